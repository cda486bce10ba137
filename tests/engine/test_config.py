"""RuntimeConfig, the specs and SamplingParams: defaults, the bounds of each field, and contradictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.config import RuntimeConfig
from graphrt.kernels.checks import FLOAT32_MAX, FLOAT32_TINY
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.sampling_params import SamplingParams
from graphrt.spec import AttentionSpec, KVCacheSpec


def config(**changes: Any) -> RuntimeConfig:
    return RuntimeConfig(**{"max_num_reqs": 1, "max_num_tokens": 1 << 16} | changes)


def attention(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 16} | changes)


def cache(**changes: Any) -> KVCacheSpec:
    return KVCacheSpec(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 16} | changes)


INTS = [
    (config, "max_num_reqs", 1, 1 << 16),
    (config, "max_num_tokens", 1, 1 << 16),
    (config, "max_seq_len", 1, 1 << 30),
    (config, "num_speculative_tokens", 0, 63),
    (config, "ring_depth", 2, 1024),
    (config, "launch_steps", 1, 1024),
    (config, "shadow_every", 0, 1 << 30),
    (config, "max_encoder_len", 1, 1 << 30),
    (config, "max_logit_bias", 0, 1 << 16),
    (config, "max_logprobs", 0, 1024),
    (attention, "num_q_heads", 1, 1 << 16),
    (attention, "head_dim", 1, 1 << 16),
    (attention, "sliding_window", 1, 1 << 30),
    (attention, "attention_chunk_size", 1, 1 << 30),
    (attention, "v_head_dim", 1, 1 << 16),
    (cache, "num_layers", 1, 1 << 16),
    (cache, "num_kv_heads", 1, 1 << 16),
    (cache, "page_size", 1, 1024),
    (cache, "pool", 0, 1 << 16),
    (cache, "null_page", 0, (1 << 31) - 2),
    (SamplingParams, "max_new_tokens", 1, 1 << 30),
    (SamplingParams, "seed", 0, (1 << 32) - 1),
]


@pytest.mark.parametrize(("make", "field", "low", "high"), INTS, ids=[field for _, field, *_ in INTS])
def test_bounds_of_each_int(make: Callable[..., Any], field: str, low: int, high: int) -> None:
    """NumPy ints become Python's, since configs and specs are hashed and traced."""
    for value in (low, high, np.int64(high)):
        kept = getattr(make(**{field: value}), field)
        assert (kept, type(kept)) == (value, int)
    for wrong in (low - 1, high + 1, 1.5, True):
        with pytest.raises(ConfigError, match=rf"{field}: expected an int from {low} to {high}, got {wrong};"):
            make(**{field: wrong})


@pytest.mark.parametrize(
    ("make", "field", "low", "high"),
    [
        (attention, "softmax_scale", FLOAT32_TINY, FLOAT32_MAX),
        (attention, "logits_softcap", FLOAT32_TINY, FLOAT32_MAX),
        (SamplingParams, "temperature", 0.0, FLOAT32_MAX),
    ],
)
def test_bounds_of_each_float(make: Callable[..., Any], field: str, low: float, high: float) -> None:
    for value in (low, high, 1, np.float32(0.5)):
        kept = getattr(make(**{field: value}), field)
        assert (kept, type(kept)) == (value, float)
    for wrong in (low / 2 or -1e-9, -0.5, high * 1.01, float("nan"), float("inf"), "1", True):
        with pytest.raises(ConfigError, match=f"{field}: expected a finite number"):
            make(**{field: wrong})


@pytest.mark.parametrize(
    ("make", "field"),
    [
        *((config, name) for name in ("use_graphs", "check_weights", "batch_invariant", "mixed_batches")),
        *((config, name) for name in ("penalties", "token_masks")),
        *((attention, name) for name in ("sinks", "alibi_sqrt")),
        (cache, "cross"),
    ],
)
def test_flags_take_bools_only(make: Callable[..., Any], field: str) -> None:
    assert getattr(make(**{field: np.bool_(False)}), field) is False
    for wrong in (1, None, "no"):
        with pytest.raises(ConfigError, match=f"{field}: expected True or False, got {wrong!r}"):
            make(**{field: wrong})


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "full step": (
        lambda: config(max_num_reqs=5, num_speculative_tokens=2, max_num_tokens=14),
        r"max_num_reqs x \(1 \+ num_speculative_tokens\) = 15, got",
    ),
    "tree depth": (
        lambda: config(num_speculative_tokens=2, tree_depth=3, max_num_tokens=9),
        "an int from 0 to 2, got 3",
    ),
    "rejected trees": (
        lambda: config(num_speculative_tokens=2, tree_depth=1, rejection_sampling=True, max_num_tokens=9),
        "tree_depth: expected 0 with rejection_sampling=True, which verifies chains, got 1; set one of them",
    ),
    "decode size of 0": (lambda: config(decode_sizes=(0,)), r"decode_sizes\[0\]: expected an int from 1 to 1, got 0"),
    "decode size": (lambda: config(decode_sizes=(2,)), r"decode_sizes\[0\]: expected an int from 1 to 1, got 2"),
    "mixed size": (lambda: config(max_num_tokens=9, mixed_sizes=(10,)), r"mixed_sizes\[0\]: .* from 1 to 9, got 10"),
    "sizes": (lambda: config(decode_sizes=1), "decode_sizes: expected ints from 1 to 1 .*, got 1"),
    "loop size": (
        lambda: config(max_num_reqs=4, decode_sizes=(1, 4), loop_sizes=(2, 4)),
        r"loop_sizes: \[2\] are not in decode_sizes",
    ),
    "backend": (lambda: config(backend=3), "RuntimeConfig.backend: expected str, got 3"),
    "prefill": (
        lambda: config(prefill_backend="none", mixed_batches=False),
        "prefill_backend: expected None",
    ),
    "mixed": (lambda: config(mixed_sizes=(8,), mixed_batches=False), "mixed_sizes: expected .* with mixed_batches=Fa"),
    "groups": (lambda: attention(num_kv_heads=3), "multiple of num_kv_heads=3, got 4"),
    "dtype": (lambda: attention(dtype=torch.int8), "AttentionSpec.dtype: expected one of .*, got torch.int8"),
    "dtype text": (lambda: attention(dtype="float16"), "AttentionSpec.dtype: expected one of .*, got 'float16'"),
    "slopes": (lambda: attention(alibi_slopes=(1.0,) * 5), "expected 4 slopes, one per query head, got 5"),
    "few slopes": (lambda: attention(alibi_slopes=(1.0,)), "expected 4 slopes, one per query head, got 1"),
    "slopes list": (lambda: attention(alibi_slopes=[1.0] * 4), "alibi_slopes: expected tuple, got \\["),
    "slopes nan": (lambda: attention(alibi_slopes=(float("nan"),) * 4), "alibi_slopes: expected finite floats"),
    "slopes range": (lambda: attention(alibi_slopes=(1, 2, 3, -1.01 * FLOAT32_MAX)), "slopes: expected finite floats"),
    "slopes none": (lambda: attention(alibi_slopes=(None,) * 4), "alibi_slopes: expected finite floats"),
    "sqrt alone": (lambda: attention(alibi_sqrt=True), "alibi_sqrt: requires alibi_slopes"),
    "kv dtype": (lambda: cache(dtype=torch.int8), "KVCacheSpec.dtype: .*e5m2.*, got torch.int8"),
    "layout": (lambda: cache(layout="NHD"), "KVCacheSpec.layout: expected .* got 'NHD'"),
    "null page": (lambda: cache(null_page="first"), 'null_page: expected an int .*pass a page id, or "last"'),
    "tokens": (lambda: cache().pages_for(-1), "num_tokens: expected an int >= 0, got -1"),
    "stop ids": (lambda: SamplingParams(stop_ids=3), "stop_ids: expected a collection of token ids, got 3"),
    "stop ids text": (lambda: SamplingParams(stop_ids="ab"), "stop_ids: expected a collection .* got 'ab'"),
    "stop ids array": (lambda: SamplingParams(stop_ids=np.array(3)), "stop_ids: expected a collection"),
    "stop id": (lambda: SamplingParams(stop_ids={-1}), "stop_ids: expected an int from 0 to 2147483647, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_fields_and_contradictions_raise(case: str) -> None:
    build, text = WRONG[case]
    with pytest.raises(ConfigError, match=text):
        build()


def test_defaults_of_the_config() -> None:
    default = RuntimeConfig()
    assert (default.max_num_reqs, default.max_num_tokens, default.max_seq_len) == (256, 2048, 4096)
    assert (default.query_lens, default.ring_depth, default.backend) == ((1,), 8, None)
    assert (default.decode_sizes, default.mixed_sizes) == (None, None)
    assert (default.use_graphs, default.check_weights, default.mixed_batches) == (True, True, True)
    assert not default.batch_invariant


def test_defaults_of_specs_and_sampling() -> None:
    layer, kv, params = AttentionSpec(2, 1, 16), KVCacheSpec(1, 1, 16), SamplingParams()
    assert (layer.dtype, kv.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (layer.softmax_scale, layer.sliding_window, layer.logits_softcap, layer.alibi_slopes) == (None,) * 4
    assert (layer.alibi_sqrt, layer.sinks) == (False, False)
    assert (kv.page_size, kv.layout, kv.null_page) == (16, KVLayout.NHD, 0)
    assert (params.max_new_tokens, params.temperature, params.seed, params.stop_ids) == (128, 0.0, 0, frozenset())


def test_resolve_replaces_none_by_defaults() -> None:
    resolved = RuntimeConfig(max_num_reqs=6, max_num_tokens=100, backend="triton").resolve()
    assert (resolved.decode_sizes, resolved.mixed_sizes, resolved.backend) == ((1, 2, 4, 6), (64, 100), "triton")
    resolved = RuntimeConfig(max_num_reqs=6, max_num_tokens=100, decode_sizes=(), mixed_sizes=(7, 3)).resolve()
    assert (resolved.decode_sizes, resolved.mixed_sizes) == ((), (3, 7))
    made = RuntimeConfig(max_num_reqs=8, decode_sizes=[4, 2, 4], mixed_sizes=np.array([32, 16], np.int16))
    assert (made.decode_sizes, made.mixed_sizes) == ((2, 4), (16, 32))
    assert hash(made) == hash(RuntimeConfig(max_num_reqs=8, decode_sizes=(2, 4), mixed_sizes=(16, 32)))


def test_derived_values() -> None:
    assert config(max_num_reqs=5, num_speculative_tokens=2, max_num_tokens=15).max_num_tokens == 15
    assert (AttentionSpec(6, 2, 25).num_queries_per_kv, AttentionSpec(6, 2, 25).scale) == (3, 0.2)
    assert AttentionSpec(6, 2, 25, softmax_scale=0.3).scale == 0.3
    slopes = attention(alibi_slopes=(FLOAT32_MAX, -FLOAT32_MAX, *np.ones(2, np.float32))).alibi_slopes
    assert slopes == (FLOAT32_MAX, -FLOAT32_MAX, 1.0, 1.0)
    assert {type(slope) for slope in slopes} == {float}
    for page_size in (1, 1024):
        spec = KVCacheSpec(3, 2, 8, page_size, dtype=torch.float16)
        assert spec.bytes_per_page == 3 * 2 * page_size * 2 * 8 * 2
    params = SamplingParams(np.int64(3), np.float32(0.5), np.uint32(2**32 - 1), [np.int32(4), 4])
    assert params == SamplingParams(3, 0.5, 2**32 - 1, frozenset({4}))
    assert hash(params) == hash(SamplingParams(3, 0.5, 2**32 - 1, frozenset({4})))
