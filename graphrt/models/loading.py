"""Load a model from a folder, a hub id or a GGUF file, or create a model with dummy weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import distributed as dist

from graphrt.cache.groups import kv_groups
from graphrt.config import RuntimeConfig
from graphrt.draft_model import DraftModel
from graphrt.engine.ranks import Ranks
from graphrt.kernels.checks import check_instance, check_int, shown
from graphrt.kernels.compile_ahead import hash_triton
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.kernels.ops.quantized import QuantizedWeight
from graphrt.models.config import ModelConfig
from graphrt.models.eagle import load_eagle
from graphrt.models.fields import MAX_EXTENT, check_path
from graphrt.models.gguf import GGUFSource
from graphrt.models.hf import SafetensorsSource, download, is_eagle
from graphrt.models.llama import LlamaModel
from graphrt.models.shapes import shape_config
from graphrt.models.weights import WeightSource
from graphrt.runtime import Runtime, resolve_device
from graphrt.spec import COMPUTE_DTYPES

DUMMY_PREFIX = "dummy:"
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights.

    Attributes:
        tokenizer_source: folder or GGUF file that contains the tokenizer. None for dummy weights.
    """

    model: LlamaModel
    config: ModelConfig
    tokenizer_source: Path | None


def load_model(
    source: str | Path | ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype | Literal["auto"] = "auto",
    max_positions: int | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> LoadedModel:
    """Load a Llama-family model.

    Names, shapes and files are checked before memory is allocated. Weights are then copied tensor by tensor.

    Args:
        source: a Hugging Face folder or hub id, or a .gguf file. For dummy weights: "dummy:<shape>" with a name of
            `shape_config`, or a ModelConfig.
        device: device on which the model runs.
        dtype: "auto" means the checkpoint's dtype on CUDA (bfloat16 for GGUF) and float32 on a CPU.
        max_positions: rows of the rotation table, which limit the sequence length. Defaults to the model's limit. A
            model with rope_type "dynamic" or "longrope" has one set of frequencies: that of a sequence of this length.
        seed: seed of dummy weights.
        group: ranks that share the model. Each rank calls this function, and reads and keeps only its shard. Dummy
            weights of a shard are not those of the whole model.

    Raises:
        ConfigError: if an argument has the wrong type, a file is missing, corrupt or inconsistent, a package is
            missing, or the ranks have different models.
        UnsupportedError: if graphrt does not implement the model.
        CapacityError: if the weights and rotation table do not fit in free memory.
        RankError: if another rank exits or fails.
    """
    ranks = None if group is None else Ranks.of(group)  # from here on, a rank that ends is noticed
    device = resolve_device(device)
    if dtype != "auto" and dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype: expected 'auto' or one of {COMPUTE_DTYPES}, got {shown(dtype)}; pass one of these")
    if device.type == "cuda":
        hash_triton()  # a runtime needs the hash before its first kernel
    check_int("seed", seed, 0, (1 << 64) - 1, advice="pass the seed of the dummy weights")

    def build(config: ModelConfig) -> LlamaModel:
        chosen = dtype if dtype != "auto" else config.dtype if device.type == "cuda" else torch.float32
        positions = config.max_position_embeddings if max_positions is None else max_positions
        check_int("max_positions", positions, 1, MAX_EXTENT, advice="pass the longest sequence, or None")
        weights, table = _weight_bytes(config, chosen, group), positions * config.rotary_dim * 4
        free = free_memory(device)
        if free is not None and weights + table > free:
            raise CapacityError(
                f"model: {weights} bytes of weights in {str(chosen).removeprefix('torch.')} and {table} bytes of "
                f"rotation table exceed the {free} bytes that are free on {device}; lower max_positions, or choose "
                "a smaller model or dtype, or another device"
            )
        return LlamaModel(config, dtype=chosen, device=device, max_positions=max_positions, group=group)

    if isinstance(source, ModelConfig) or (isinstance(source, str) and source.startswith(DUMMY_PREFIX)):
        config = source if isinstance(source, ModelConfig) else shape_config(source.removeprefix(DUMMY_PREFIX))
        _check_equal(config, ranks)
        model = build(config)
        _fill_dummy_weights(model, seed + model.sharding.rank)
        return LoadedModel(model, config, None)
    path = resolve_source(source)
    checkpoint = GGUFSource(path) if path.is_file() else SafetensorsSource(path)
    _check_equal(checkpoint.config, ranks)
    _on_meta(checkpoint.config, torch.float32, group).check_weights(checkpoint)
    model = build(checkpoint.config)
    model.load_weights(checkpoint if ranks is None else cast(WeightSource, _Watched(checkpoint, ranks)))
    return LoadedModel(model, checkpoint.config, path)


def _check_equal(config: ModelConfig, ranks: Ranks | None) -> None:
    """Raise ConfigError if the ranks have different models, whose shards may have equal shapes."""
    if ranks is not None:
        ranks.check_equal({f"model.{field.name}": getattr(config, field.name) for field in fields(config)})


class _Watched:
    """A checkpoint that looks for failed ranks before it reads a tensor."""

    def __init__(self, source: WeightSource, ranks: Ranks) -> None:
        self._source, self._ranks = source, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def copy_into(self, *arguments: Any) -> None:
        self._ranks.poll()
        self._source.copy_into(*arguments)


def load_draft_model(source: str | Path, model: LlamaModel) -> DraftModel:
    """Load a draft model, or an EAGLE or EAGLE-3 head, for `model`; pass it as `proposer=` to Runtime.

    It has the dtype and device of `model`, and takes sequences of the same length. The folder of a head has a
    config.json with an architecture such as LlamaForCausalLMEagle3 or EagleLlamaForCausalLM, and safetensors files. A
    head without an embedding or lm_head shares those of `model`.

    Args:
        source: see `load_model`. A head is in a folder, or on the hub.

    Raises: ConfigError, UnsupportedError, CapacityError: see `load_model`.
    """
    check_instance("model", model, LlamaModel, advice="pass the model of load_model(), or build a DraftModel yourself")
    if not str(source).startswith(DUMMY_PREFIX):
        source = resolve_source(source)
        if source.is_dir() and is_eagle(source):
            return load_eagle(source, model)
    draft = load_model(source, device=model.device, dtype=model.dtype, max_positions=len(model.cos_sin)).model
    return DraftModel(draft, draft.config.attention_specs(draft.dtype), vocab_size=draft.config.vocab_size)


def _on_meta(config: ModelConfig, dtype: torch.dtype, group: dist.ProcessGroup | None) -> LlamaModel:
    return LlamaModel(config, dtype=dtype, device=torch.device("meta"), max_positions=1, group=group)


def _weight_bytes(config: ModelConfig, dtype: torch.dtype, group: dist.ProcessGroup | None) -> int:
    return sum(weight.nbytes for weight in _on_meta(config, dtype, group).parameters())


@torch.no_grad()
def _fill_dummy_weights(model: LlamaModel, seed: int) -> None:
    """Overwrite all weights in place with seeded noise that keeps activations near 1, and finite in every dtype.

    Matrices have standard deviation 1 / sqrt(columns), so a product keeps the scale of its input.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, QuantizedWeight):
            module.fill_with_noise(module.shape[1] ** -0.5, generator)
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)


def make_runtime(
    model: LlamaModel,
    config: RuntimeConfig,
    *,
    page_size: int = 16,
    context_parallel_size: int = 1,
    interleave_size: int = 1,
    **options: Any,
) -> Runtime:
    """Return a runtime for `model` on its device, with one KV group per distinct window.

    Args:
        page_size: as for `kv_groups`, as are context_parallel_size and interleave_size.
        options: go to Runtime.

    Raises: ConfigError: if the ranks that would share the KV of a request do not hold the same KV heads.
    """
    attention = model.config.attention_specs(model.dtype)
    if model.sharding.kv_copies % context_parallel_size:
        raise ConfigError(
            f"context_parallel_size: expected a divisor of the {model.sharding.kv_copies} ranks that hold the same KV "
            f"head, got {context_parallel_size}; use more ranks, or a model with fewer KV heads"
        )
    groups = kv_groups(
        attention,
        page_size=page_size,
        context_parallel_size=context_parallel_size,
        interleave_size=interleave_size,
    )
    vocab_size, group = model.config.vocab_size, model.group
    return Runtime(
        model, attention, groups, vocab_size=vocab_size, device=model.device, config=config, group=group, **options
    )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can currently be allocated on `device`, or None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    # SC_AVPHYS_PAGES excludes the page cache, which is reclaimable and often most of the memory.
    if device.type != "cpu" or not _MEMINFO.is_file():
        return None
    found = re.findall(r"^(?:MemAvailable|SwapFree): +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    return sum(map(int, found)) * 1024 if found else None


def resolve_source(source: str | Path) -> Path:
    """Return the folder or .gguf file that `source` specifies. A hub id is downloaded first.

    Raises:
        ConfigError: if `source` is not a folder, a .gguf file or a hub id.
    """
    expected = f"model: expected a folder, a .gguf file, a hub id such as org/name or {DUMMY_PREFIX}<shape>"
    path = check_path(expected, source)
    is_file = path.is_file()
    if path.is_dir() or (is_file and path.suffix == ".gguf"):
        return path
    text = str(source)
    if is_file:
        raise ConfigError(
            f"model: {shown(text)} is neither a folder nor a .gguf file; specify the folder that contains it"
        )
    looks_like_id = isinstance(source, str) and text.count("/") == 1 and text[0] not in "./~" and text[-1] != "/"
    if not looks_like_id or path.suffix == ".gguf":
        raise ConfigError(f"{expected}, got {text!r}, which does not exist; check the path")
    return download(text)
