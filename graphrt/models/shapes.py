"""Shapes of well-known models, for benchmarks on dummy weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError
from graphrt.models.config import ModelConfig
from graphrt.models.quantization import Quantization
from graphrt.models.rope import RopeConfig


def _llama3(factor: float) -> dict[str, Any]:
    """Return the common options of all sizes of Llama 3.1 and 3.2. Smaller sizes extend the context by more."""
    rope = RopeConfig("llama3", 500_000.0, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    return {"rms_norm_eps": 1e-5, "rope": rope, "eos_ids": (128_001, 128_008, 128_009)}


_HEAD = frozenset(("lm_head",))
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
# The numbers are vocab_size, hidden_size, intermediate_size, num_layers, num_q_heads, num_kv_heads, head_dim,
# max_position_embeddings.
SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, **_llama3(8.0)),
    "llama-3.1-70b": ModelConfig("llama", 128_256, 8192, 28_672, 80, 64, 8, 128, 131_072, **_llama3(8.0)),
    "llama-3.2-1b": ModelConfig("llama", 128_256, 2048, 8192, 16, 32, 8, 64, 131_072, **_llama3(32.0), **_TIED),
    "qwen3-0.6b": ModelConfig(
        "qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960,
        rope=RopeConfig(theta=1_000_000.0), qk_norm=True, eos_ids=(151_645, 151_643), **_TIED,
    ),
    "smollm2-135m": ModelConfig(
        "llama", 49_152, 576, 1536, 30, 9, 3, 64, 8192,
        rms_norm_eps=1e-5, rope=RopeConfig(theta=100_000.0), eos_ids=(2,), **_TIED,
    ),
    "mistral-7b": ModelConfig(
        "mistral", 32_000, 4096, 14_336, 32, 32, 8, 128, 32_768,
        rms_norm_eps=1e-5, sliding_windows=(4096,) * 32, eos_ids=(2,),
    ),
}  # fmt: skip
"""Well-known models by name. Mistral is version 0.1, which has a sliding window."""


_QUANTIZATIONS = {"fp8": Quantization(8, plain=_HEAD), "int4": Quantization(4, 128, plain=_HEAD)}


def shape_config(name: str) -> ModelConfig:
    """Return the shape of a well-known model: a name in SHAPES.

    With the suffix -fp8 or -int4, its matrices are quantized, except the head: fp8 with a scale per row, or int4 with a
    scale per 128 inputs. Where 128 does not divide the inputs, groups are smaller.

    Raises: ConfigError: if there is no such shape.
    """
    base, _, suffix = name.rpartition("-")
    if base in SHAPES and suffix in _QUANTIZATIONS:
        return replace(SHAPES[base], quantization=_QUANTIZATIONS[suffix])
    if name not in SHAPES:
        raise ConfigError(
            f"shape: expected one of {', '.join(SHAPES)}, with the suffix -fp8 or -int4 if quantized, got "
            f"{shown(name)}; choose one of these"
        )
    return SHAPES[name]
