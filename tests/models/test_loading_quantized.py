"""Quantized checkpoints: logits against a float64 model of the dequantized weights, and the keys of their configs.

The test quantizes and packs the weights of a tiny model by the rules of AutoAWQ, GPTQModel and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graphrt.config import RuntimeConfig
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import CapacityError, ConfigError, GraphRTError, ReplayError, UnsupportedError
from graphrt.kernels.ops.quantized import Fp8Weight, Int4Weight, QuantizedWeight
from graphrt.models import loading
from graphrt.models.config import ModelConfig
from graphrt.models.hf import SafetensorsSource
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model, make_runtime
from graphrt.sampling_params import SamplingParams
from tests.engine.test_ranks import Group, check_tokens, decode, decode_interleaved
from tests.support.model_fixtures import (
    PROMPT,
    SIZES,
    check_logits,
    check_shards,
    edit_json,
    edit_weights,
    oracle_logits,
    save_oracle,
)
from tests.support.rank_processes import run_ranks

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
Tensors = dict[str, torch.Tensor]


# Packing


def words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack 8 columns into each column of int32: `order[i]` in the i-th nibble."""
    packed = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate(order):
        packed |= values[:, column::8].long() << 4 * i
    return packed.to(torch.int32)


def awq(q: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(q.t(), order), "qzeros": words(zero.t(), order), "scales": scale.t().contiguous()}


def gptq(q: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, *, offset: int = 1) -> Tensors:
    depth = q.shape[1]
    return {
        "qweight": words(q).t().contiguous(),
        "qzeros": words(zero.t() - offset),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(depth, dtype=torch.int32) // (depth // zero.shape[1]),
        "bias": torch.zeros(len(q), dtype=torch.float16),
    }


def gptq_v2(q: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return gptq(q, zero, scale, offset=0)


def int4(weight: torch.Tensor, group: int, pack: Callable[..., Tensors], sym: bool) -> tuple[Tensors, torch.Tensor]:
    """Quantize and pack a matrix; returns its tensors, and its values in float64."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(1 if pack is gptq else 0, 15)
    if sym:
        scale, zero = (groups.abs().amax(2) / 7.5).half(), torch.full_like(zero, 8)
    q = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    values = (q.double() - zero.double()[..., None]) * scale.double()[..., None]
    return pack(q.flatten(1).int(), zero.int(), scale), values.flatten(1)


def fp8(weight: torch.Tensor, strategy: str, extra: bool) -> tuple[Tensors, torch.Tensor]:
    peak = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax()
    scale = (peak / 448).to(torch.bfloat16 if strategy == "channel" else torch.float32)
    data = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = {"weight": data, "weight_scale": scale}
    return stored | ({"input_scale": torch.tensor(0.01)} if extra else {}), data.double() * scale.double()


def fp8_of_transformers(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    stored, values = fp8(weight, "tensor", extra=True)
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    return {names.get(name, name): tensor for name, tensor in stored.items()}, values


# Checkpoints


def compressed(strategy: str, **options: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    weights |= {"observer": "minmax", "observer_kwargs": {}, "group_size": None, "block_structure": None}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    config |= {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "frozen"}
    return config | {"global_compression_ratio": 1.2} | options


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "damp_percent": 0.01}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@dataclass
class Case:
    """A way to quantize; `plain` are parts of the names of modules that stay tensors."""

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    plain: tuple[str, ...] = ("lm_head",)
    options: dict[str, Any] = field(default_factory=dict)


def of_int4(
    config: dict[str, Any], pack: Callable[..., Tensors], group: int = 32, sym: bool = False, **options: Any
) -> Case:
    return Case(config | {"group_size": group}, lambda weight: int4(weight, group, pack, sym), **options)


def of_fp8(config: dict[str, Any], strategy: str, extra: bool = False, **options: Any) -> Case:
    return Case(config, lambda weight: fp8(weight, strategy, extra), **options)


DOWN, V = "layers.1.mlp.down_proj", "layers.0.self_attn.v_proj"
CASES = {
    "awq": of_int4(AWQ, awq),
    "awq-64": of_int4(AWQ, awq, 64),
    "awq-some-plain": of_int4(
        AWQ | {"modules_to_not_convert": [DOWN, V]}, awq, plain=("lm_head", DOWN, V), options={"attention_bias": True}
    ),
    "gptq": of_int4(GPTQ | {"checkpoint_format": ""}, gptq),
    "gptq-64": of_int4(GPTQ | {"pack_impl": "cpu", "offload_to_disk": True}, gptq, 64),  # as GPTQModel writes it
    "gptq-symmetric": of_int4(GPTQ | {"sym": True, "checkpoint_format": "gptq"}, gptq, 128, True),
    "gptq-v2": of_int4(GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, gptq_v2),
    "gptq-biases": of_int4(GPTQ, gptq, options={"attention_bias": True}),
    "gptq-head": of_int4(GPTQ | {"lm_head": True}, gptq, plain=(), options={"vocab_size": 104}),
    "gptq-tied": of_int4(GPTQ, gptq, options={"tie_word_embeddings": True}),
    "gptq-skips": of_int4(GPTQ | {"dynamic": {"-:.*down.*": {}}}, gptq, plain=("lm_head", "down_proj")),
    "compressed-tensors-tensor": of_fp8(compressed("tensor"), "tensor"),
    "compressed-tensors-channel": of_fp8(
        compressed("channel", ignore=["re:.*lm_head", f"model.{DOWN}"]), "channel", plain=("lm_head", DOWN)
    ),
    "compressed-tensors-static": of_fp8(compressed("channel", format="naive-quantized"), "channel", extra=True),
    "fp8": of_fp8(FP8 | {"ignored_layers": ["lm_head", V]}, "tensor", plain=("lm_head", V)),
    "fp8-static": of_fp8(FP8 | {"activation_scheme": "static"}, "tensor", extra=True),
    "fp8-transformers": Case(
        FP8 | {"activation_scheme": "static", "weight_block_size": None, "dequantize": False}, fp8_of_transformers
    ),
}
INT4 = [name for name in CASES if CASES[name].config["quant_method"] in ("awq", "gptq")]


def save(folder: Path, case: Case, **options: Any) -> nn.Module:
    """Save a quantized model, and return the model of its dequantized weights in float64."""
    oracle = save_oracle(folder, "Llama", **(WIDE | case.options | options))
    tensors = load_file(folder / "model.safetensors")
    for name, module in oracle.named_modules():
        if (
            isinstance(module, nn.Linear)
            and not any(part in name for part in case.plain)
            and f"{name}.weight" in tensors
        ):
            stored, values = case.quantize(tensors.pop(f"{name}.weight"))
            parts = {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
            tensors |= {part: tensor for part, tensor in parts.items() if part not in tensors}
            module.double().weight.data = values
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=case.config)
    return oracle.double()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    oracle = save(tmp_path, case)
    loaded = load_model(tmp_path, device="cpu")
    check_logits(loaded.model, oracle)
    kind = Int4Weight if name in INT4 else Fp8Weight
    layers = loaded.model.layers
    held = {f"{i}.{part}": getattr(layers[i], part) for i in range(3) for part in ("qkv", "o", "gate_up", "down")}
    plain = {"0.qkv"} & {"0.qkv" for part in case.plain if part == V}
    plain |= {f"{i}.down" for i in range(3) if any(part in f"layers.{i}.mlp.down_proj" for part in case.plain)}
    assert {name for name, weight in held.items() if type(weight) is not kind} == plain
    assert isinstance(loaded.model.head, kind) == ("lm_head" not in case.plain)
    assert load_model(tmp_path, device="cpu", dtype=torch.bfloat16).model.layers[2].o.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["awq", "compressed-tensors-channel"])
def test_a_model_of_tensors_takes_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    oracle = save(tmp_path, CASES[name])
    source = SafetensorsSource(tmp_path)
    config = ModelConfig.from_hf(SIZES | WIDE | {"model_type": "llama", "quantization_config": None})
    model = LlamaModel(config, dtype=torch.float32, device=torch.device("cpu"))
    model.load_weights(source)
    check_logits(model, oracle)
    quantized = load_model(tmp_path, device="cpu").model
    before = [weight.clone() for weight in quantized.parameters()]
    tensors = {name: torch.zeros(shape) for name, shape in source.shapes().items()}
    with pytest.raises(
        ConfigError, match=r"weights: the checkpoint is not quantized like the model, which has weights of [48] bits"
    ):
        quantized.load_weights(tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, quantized.parameters(), strict=True))


HEADS_OF_12 = {"num_attention_heads": 16, "head_dim": 12}  # bounds of key heads are inside of words
SIX_HEADS = {"hidden_size": 192, "num_attention_heads": 6, "head_dim": 32}
HALF_GROUPS = SIX_HEADS | {"num_key_value_heads": 6}  # 96 inputs of the attention output per rank
PADDED = SIX_HEADS | {"num_key_value_heads": 3, "intermediate_size": 160}
SHARDS: dict[str, tuple[str, dict[str, Any], int]] = {name: (name, {}, 2) for name in CASES}
SHARDS |= {f"{name}, words": (name, HEADS_OF_12, 2) for name in ("awq", "gptq")}
SHARDS |= {f"{name}, groups": (name, HALF_GROUPS, 2) for name in ("awq-64", "gptq-64")}
SHARDS |= {f"{name}, padded": (name, PADDED, 2) for name in ("awq", "gptq-v2", "fp8", "compressed-tensors-channel")}
SHARDS |= {f"{name}, 4 ranks": (name, {}, 4) for name in ("awq-64", "gptq-head", "gptq-symmetric", "fp8")}


@pytest.mark.parametrize("case", SHARDS)
def test_shards_are_slices_of_the_dequantized_weights(tmp_path: Path, case: str) -> None:
    name, options, ranks = SHARDS[case]
    oracle, source = save(tmp_path, CASES[name], **options), SafetensorsSource(tmp_path)
    shards: list[dict[str, torch.Tensor]] = []
    for rank in range(ranks):
        model = LlamaModel(source.config, dtype=torch.float32, device=torch.device("cpu"), group=Group(rank, ranks))
        for weight in model.parameters():
            weight.view(torch.uint8).fill_(0xFF)  # padding must be written
        model.load_weights(source)
        targets = model.weight_targets().items()
        shards.append({key: t.dequantized() if isinstance(t, QuantizedWeight) else t for key, t in targets})
    whole = oracle.float().state_dict()
    if missing := whole.keys() - shards[0].keys():
        assert missing == {"lm_head.weight"}
        assert source.config.tie_word_embeddings
        del whole["lm_head.weight"]
    check_shards(shards, whole, model.sharding.kv_copies)


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return "_proj." in name and tensor.dim() == 2


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8"])
def test_each_rank_reads_its_slices_only(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, CASES[name])
    whole = sum(t.numel() for key, t in load_file(tmp_path / "model.safetensors").items() if is_matrix(key, t))
    read, counts = SafetensorsSource._read, [0, 0]

    def count(self: SafetensorsSource, key: str, *index: Any) -> torch.Tensor:
        found = read(self, key, *index)
        counts[rank] += found.numel() if is_matrix(key, found) else 0
        return found

    monkeypatch.setattr(SafetensorsSource, "_read", count)
    for rank in range(2):
        source = SafetensorsSource(tmp_path)
        model = LlamaModel(source.config, dtype=torch.float32, device=torch.device("cpu"), group=Group(rank, 2))
        model.load_weights(source)
    assert counts == [whole // 2] * 2


TOKENS = {  # case, its sizes; ranks that share the KV of a request, and interleave_size
    "awq": ("awq", {"num_key_value_heads": 1}, 2, 1),
    "gptq": ("gptq-64", HALF_GROUPS),
    "fp8": ("compressed-tensors-channel", PADDED),
}


@pytest.mark.parametrize("case", TOKENS)
def test_tokens_of_ranks_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    name, sizes, *interleaved = TOKENS[case]
    oracle = save(tmp_path, CASES[name], eos_token_id=None, **sizes).float()
    expected = decode(None, tmp_path)
    function = decode_interleaved if interleaved else decode
    outcomes = run_ranks(tmp_path, function, tmp_path, *interleaved)
    del expected["kv_bytes"]
    check_tokens(oracle, expected, outcomes)


@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_a_runtime_replays_and_guards_quantized_weights(tmp_path: Path, name: str, device: torch.device) -> None:
    oracle = save(tmp_path, CASES[name])
    model = load_model(tmp_path, device=device, dtype=torch.float32).model
    config = RuntimeConfig(2, 16, 64, decode_sizes=(1,), mixed_sizes=())
    with make_runtime(model, config) as runtime:
        runtime.capture()
        events = TextGenerator(runtime).generate([PROMPT], SamplingParams(6))
        tokens = [event.token for event in events if event.token is not None]
        text = list(PROMPT)
        for token in tokens:
            logits = oracle_logits(oracle, text)[-1]
            assert logits[token] > logits.max() - 1e-3
            text.append(token)
        runtime.manager.check_weights(model)
        model.layers[1].gate_up.data = nn.Parameter(model.layers[1].gate_up.data.clone(), requires_grad=False)
        with pytest.raises(ReplayError, match=r"layers\.1\.gate_up\.data"):
            runtime.manager.check_weights(model)


@pytest.mark.parametrize(("suffix", "kind"), [("fp8", Fp8Weight), ("int4", Int4Weight)])
def test_dummy_weights(suffix: str, kind: type[QuantizedWeight], monkeypatch: pytest.MonkeyPatch) -> None:
    shape, options = f"dummy:qwen3-0.6b-{suffix}", {"device": "cpu", "dtype": torch.bfloat16, "max_positions": 8}
    sizes = {"num_layers": 1, "vocab_size": 64}
    config = loading.shape_config(shape.removeprefix("dummy:"))
    small = type(config)(**{name: getattr(config, name) for name in config.__slots__} | sizes | {"sliding_windows": ()})
    monkeypatch.setattr(loading, "shape_config", lambda name: small)
    model, again = (load_model(shape, **options).model for _ in range(2))
    layer = model.layers[0]
    assert all(type(weight) is kind for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))
    for weight in (layer.qkv, layer.down):
        values = weight.dequantized()
        assert values.std() == pytest.approx(weight.shape[1] ** -0.5, rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    nbytes = sum(weight.nbytes for weight in model.parameters())
    matrices = sum(weight.shape[0] * weight.shape[1] for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert 0 < sum(p.nbytes for p in layer.parameters()) - matrices * weight.bits // 8 < matrices // 32
    monkeypatch.setattr(loading, "free_memory", lambda device: nbytes)
    with pytest.raises(CapacityError, match=f"model: {nbytes} bytes of weights"):
        load_model(shape, **options)


# What is refused


def group(**weights: Any) -> dict[str, Any]:
    config = compressed("tensor")
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


REFUSED = {
    "method": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' (supported: awq, "),
    "awq version": (AWQ | {"version": "gemv"}, "version 'gemv'"),
    "awq bits": (AWQ | {"bits": 3}, "bits 3"),
    "awq group": (AWQ | {"group_size": -1}, "group_size -1 (supported: 32, 64, 128)"),
    "awq group of 16": (AWQ | {"group_size": 16}, "group_size 16"),
    "awq without zeros": (AWQ | {"zero_point": False}, "zero_point False"),
    "awq of llm-awq": (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq'"),
    "an unknown key": (AWQ | {"bits_of_head": 8}, "the key bits_of_head, whose meaning is not known"),
    "gptq bits": (GPTQ | {"bits": 8}, "bits 8"),
    "gptq format": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    "gptq per module": (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic '+:.*down.*'"),
    "gptq adapter": (GPTQ | {"adapter": {"name": "lora"}}, "adapter"),
    "blocks": (FP8 | {"weight_block_size": [128, 128]}, "weight_block_size [128, 128]"),
    "fp8 scheme": (FP8 | {"activation_scheme": "other"}, "activation_scheme 'other'"),
    "fp8 cache": (compressed("tensor", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "int4 of compressed-tensors": (compressed("tensor", format="pack-quantized"), "format 'pack-quantized'"),
    "sparse": (compressed("tensor", sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
    "strategy": (group(strategy="block"), "config_groups.group_0: weights: strategy 'block'"),
    "integers": (group(type="int"), "config_groups.group_0: weights: type 'int'"),
    "reordered": (group(actorder="group"), "config_groups.group_0: weights: actorder 'group'"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "text"), REFUSED.values(), ids=REFUSED)
def test_other_quantizations_are_refused_by_key(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ModelConfig.from_hf(SIZES | {"model_type": "llama", "quantization_config": config})
    assert f"quantization_config: {text}" in str(caught.value)


@pytest.mark.parametrize(
    "value", [3, {"quant_method": 3}, FP8 | {"config_groups": 1}, compressed("x") | {"config_groups": [1]}]
)
def test_values_of_another_type_are_refused(value: object) -> None:
    with pytest.raises(GraphRTError, match="quantization_config"):
        ModelConfig.from_hf(SIZES | {"model_type": "llama", "quantization_config": value})


OUT = "model.layers.1.self_attn.o_proj"
DAMAGED: dict[str, tuple[str, dict[str, Callable[[torch.Tensor], torch.Tensor | None]], str]] = {
    "permuted": ("gptq", {f"{OUT}.g_idx": lambda t: t.flip(0)}, rf"{OUT}\.g_idx: .*desc_act"),
    "no scales": ("awq", {f"{OUT}.scales": lambda t: None}, rf"{OUT}\.scales: expected shape .* got nothing"),
    "zeros of other groups": ("awq", {f"{OUT}.qzeros": lambda t: t[:2]}, rf"{OUT}\.qzeros: expected shape \[4, 16\]"),
    "a bias": ("gptq", {f"{OUT}.bias": lambda t: t + 1}, rf"1 unknown: {OUT}\.bias"),
    "no scale": ("fp8", {f"{OUT}.weight_scale": lambda t: None}, rf"{OUT}\.weight_scale: expected .* got nothing"),
    "blocks": ("fp8", {f"{OUT}.weight_scale": lambda t: t.expand(2, 2)}, r"weight_scale: .* got shape \[2, 2\]"),
    "two scales": ("fp8", {f"{OUT}.weight_scale_inv": lambda t: torch.ones(1)}, "weight_scale_inv: .* got nothing"),
    "another module": ("fp8", {"extra.input_scale": lambda t: torch.ones(1)}, r"1 unknown: extra\.input_scale"),
    "scale of a tensor": ("fp8", {f"model.{V}.weight_scale": lambda t: torch.ones(1)}, rf"1 unknown: model\.{V}"),
    "a matrix": ("awq", {f"{OUT}.qweight": lambda t: t[0]}, "expected a quantized matrix"),
    "no words": ("awq", {f"{OUT}.qweight": lambda t: t.float()}, "qweight and qzeros must be int32"),
    "scales of integers": ("awq", {f"{OUT}.scales": lambda t: t.int()}, rf"{OUT}\.scales: expected floats .* got I32"),
    "scales of fp8": (
        "fp8",
        {f"{OUT}.weight_scale": lambda t: t.to(torch.float8_e4m3fn)},
        r"expected floats .* got F8_E4M3",
    ),
    "integers": ("awq", {"model.norm.weight": lambda t: t.int()}, r"'model\.norm\.weight' has dtype I32"),
    "another dtype": ("awq", {"extra": lambda t: torch.ones(4, dtype=torch.uint8)}, "'extra' has dtype U8"),
}


@pytest.mark.parametrize(("name", "changes", "text"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_checkpoints_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change returns the new tensor, or None to remove it."""

    def damage(tensors: Tensors) -> None:
        for tensor, change in changes.items():
            changed = change(tensors.pop(tensor, None))
            if changed is not None:
                tensors[tensor] = changed.contiguous()

    save(tmp_path, CASES[name])
    edit_weights(tmp_path / "model.safetensors", damage)
    monkeypatch.setattr(LlamaModel, "load_weights", lambda *_: pytest.fail("weights were written"))
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        load_model(tmp_path, device="cpu")
