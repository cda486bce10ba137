"""Shapes of well-known models, for benchmarks on dummy weights."""

from __future__ import annotations

from graphrt.kernels.errors import ConfigError
from graphrt.models.config import ModelConfig
from graphrt.models.fields import shown
from graphrt.models.rope import RopeConfig


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig("llama3", 500_000.0, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope=_llama3_rope(8.0),
        eos_ids=(128_001, 128_008, 128_009),
    ),
    "llama-3.2-1b": ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope=_llama3_rope(32.0),
        tie_word_embeddings=True,
        eos_ids=(128_001, 128_008, 128_009),
    ),
    "qwen3-0.6b": ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope=RopeConfig(theta=1_000_000.0),
        qk_norm=True,
        tie_word_embeddings=True,
        eos_ids=(151_645, 151_643),
    ),
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
        eos_ids=(2,),
    ),
    "mistral-7b": ModelConfig(
        architecture="mistral",
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
        sliding_windows=(4096,) * 32,
        eos_ids=(2,),
    ),
}
"""Well-known models by name. Mistral is version 0.1, which has a sliding window."""


def shape_config(name: str) -> ModelConfig:
    """Return the shape of a well-known model. Raises ConfigError if `name` is not in SHAPES."""
    if not isinstance(name, str) or name not in SHAPES:
        raise ConfigError(f"shape: expected one of {', '.join(SHAPES)}, got {shown(name)}")
    return SHAPES[name]
