"""How the weights of a model are quantized, as described by the quantization_config of a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from graphrt.kernels.checks import shown
from graphrt.kernels.ops.quantized import GROUPS, Fp8Weight, Int4Weight, Weight
from graphrt.models.fields import FieldReader

_DEFAULT_GROUP = 128


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weight matrices of a model are stored.

    Attributes:
        bits: 8 for an Fp8Weight, 4 for an Int4Weight.
        group: number of inputs per scale, for 4 bits. If it does not divide the inputs of a weight, as in some shards,
            the weight has smaller groups, whose size is the greatest common divisor.
        plain: Hugging Face names of modules whose weight is not quantized, such as "lm_head".
        packing: how a checkpoint stores quantized weights: awq, gptq, gptq_v2 or fp8. Not compared.
    """

    bits: int
    group: int = 0
    plain: frozenset[str] = frozenset()
    packing: str = field(default="", compare=False)


def empty_weight(
    quantization: Quantization | None,
    modules: Sequence[str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Weight:
    """Return an uninitialized weight with the rows of all `modules`. It is quantized if all of them are."""
    if quantization is None or quantization.plain.intersection(modules):
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    if quantization.bits == 8:
        return Fp8Weight.empty(*shape, dtype, device)
    return Int4Weight.empty(*shape, math.gcd(quantization.group, shape[1]), dtype, device)


# Which modules are quantized is read from the checkpoint's tensors, not from these lists.
_LISTS = {"modules_to_not_convert", "ignored_layers", "ignore", "modules_in_block_to_quantize", "lm_head"}
# These keys state how the weights were computed, and which kernels another library uses.
_IRRELEVANT = {
    "act_group_aware", "auto_forward_data_parallel", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "dequantize", "disable_exllama", "do_fuse", "exllama_config",
    "expert_dtype", "failsafe", "fallback", "fuse_max_seq_len", "gc_mode", "global_compression_ratio", "gptaq",
    "hessian", "max_input_length", "meta", "mock_quantization", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_to_fuse", "mse", "offload_to_disk",
    "offload_to_disk_path", "pack_impl", "pad_token_id", "quantization_status", "quantizer", "run_compressed",
    "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "use_optimized_inference",
    "version", "vram_strategy", "wait_for_submodule_finalizers",
}  # fmt: skip


def quantization_from_hf(fields: FieldReader) -> Quantization | None:
    """Read the quantization_config of a config.json; None if there is none.

    Every key is applied, has no effect on the result, or is refused by name. Activations are not quantized, because
    products with unquantized activations are closer to the model before its quantization.
    """
    reader = FieldReader(fields.mapping("quantization_config"), fields.where)
    if not fields.has("quantization_config") or fields.get("quantization_config") == {}:
        return None
    method = reader.text("quant_method")
    found = None
    if method in _METHODS:
        found = _METHODS[method](reader)
        reader.refuse_unread("", _LISTS | _IRRELEVANT)
    elif method:
        reader.unsupported(f"quant_method {shown(method)} (supported: {', '.join(_METHODS)})")
    _report(reader, fields, "quantization_config")
    return found


def _report(reader: FieldReader, to: FieldReader, name: str) -> None:
    to.problems += [f"{name}: {problem}" for problem in reader.problems]
    to.reasons += [f"{name}: {reason}" for reason in reader.reasons]


def _group(fields: FieldReader) -> int:
    group = fields.integer("group_size", fields.get("q_group_size", _DEFAULT_GROUP), least=-1)
    if group not in GROUPS:
        fields.unsupported(f"group_size {group} (supported: {', '.join(map(str, GROUPS))})")
    return group


def _awq(fields: FieldReader) -> Quantization:
    gemm, bits = ("gemm", "GEMM"), (4,)
    fields.refuse({"version": gemm, "format": gemm, "checkpoint_format": gemm, "bits": bits, "w_bit": bits})
    fields.refuse({"zero_point": (True,), "desc_act": (False,), "pack_dtype": ("int32",), "method": ("awq",)})
    if fields.get("backend") == "llm-awq":
        fields.unsupported("backend 'llm-awq', which stores weights in a different order")
    return Quantization(4, _group(fields), packing="awq")


def _gptq(fields: FieldReader) -> Quantization:
    formats = ("gptq", "gptq_v2")
    fields.refuse({"checkpoint_format": formats, "format": formats, "bits": (4,), "pack_dtype": ("int32",)})
    fields.refuse({"is_marlin_format": (False,), "adapter": (), "rotation": (), "method": ("gptq",)})
    for pattern in fields.mapping("dynamic"):
        if not pattern.startswith("-:"):  # with the prefix, a pattern names modules that are not quantized
            fields.unsupported(f"dynamic {shown(pattern)}")
    fields.get("desc_act")  # the permutation is in g_idx
    fields.get("backend")
    packing = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    return Quantization(4, _group(fields), packing=packing)


def _compressed_tensors(fields: FieldReader) -> Quantization:
    formats = ("float-quantized", "naive-quantized")
    fields.refuse({"format": formats, "kv_cache_scheme": (), "transform_config": ()})
    if fields.mapping("sparsity_config").get("format", "dense") != "dense":
        fields.unsupported(f"sparsity_config {shown(fields.get('sparsity_config'))}")
    for name, group in fields.mapping("config_groups").items():
        where = f"config_groups.{name}"
        scheme = FieldReader(group, f"{fields.where}: quantization_config.{where}")
        scheme.refuse({"output_activations": (), "format": formats})
        weights = FieldReader(scheme.mapping("weights"), fields.where)
        weights.refuse({"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "channel"), "symmetric": (True,)})
        weights.refuse({"dynamic": (False,), "group_size": (), "block_structure": (), "actorder": ()})
        weights.refuse_unread("", {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
        scheme.refuse_unread("", {"targets", "input_activations"})
        _report(weights, scheme, "weights")
        _report(scheme, fields, where)
    return Quantization(8, packing="fp8")


def _fp8(fields: FieldReader) -> Quantization:
    fields.refuse({"weight_block_size": (), "activation_scheme": ("dynamic", "static"), "fmt": ("e4m3",)})
    fields.refuse({"kv_cache_scheme": (), "modules_to_convert": (), "scale_fmt": ("float",)})
    return Quantization(8, packing="fp8")


_METHODS: dict[str, Callable[[FieldReader], Quantization]] = {
    "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq
}  # fmt: skip
