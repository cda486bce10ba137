"""Boundary values of configuration, specs, cache and allocator: each number at its bound and one beyond."""

from __future__ import annotations

import pytest
import torch

from graphrt.cache.kv_cache import KVCache
from graphrt.cache.page_allocator import PageAllocator
from graphrt.config import RuntimeConfig
from graphrt.kernels.checks import FLOAT32_MAX, FLOAT32_TINY
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.sampling_params import SamplingParams
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.toy import HEAD_DIM, KV_HEADS, LAYERS

CPU = torch.device("cpu")
SPEC = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)


@pytest.mark.parametrize(("k", "v"), [(1, 2), (2, 1), (3, 2), (2, 3)], ids=str)
def test_k_and_v_need_one_tensor_per_layer(k: int, v: int) -> None:
    tensors = [torch.zeros(5, 4, KV_HEADS, HEAD_DIM) for _ in range(6)]
    with pytest.raises(ConfigError, match=f"expected 2 K and V tensors, one per layer, got {k} and {v}"):
        KVCache(SPEC, tensors[:k], tensors[3 : 3 + v])


@pytest.mark.parametrize(("null_page", "fits"), [(0, True), (4, True), (5, False), (6, False)], ids=str)
def test_null_page_must_be_a_page_of_the_cache(null_page: int, fits: bool) -> None:
    spec = KVCacheSpec(1, 1, 8, 4, dtype=torch.float32, null_page=null_page)
    if fits:
        assert KVCache.allocate(spec, 5, CPU).groups[0].null_page == null_page
        assert null_page not in PageAllocator(5, null_page).allocate(4)
    else:
        with pytest.raises(ConfigError, match=f"null_page: expected a page below num_pages=5, got {null_page}"):
            KVCache.allocate(spec, 5, CPU)
        with pytest.raises(ConfigError, match="null_page"):
            PageAllocator(5, null_page)


@pytest.mark.parametrize(("num_pages", "null_page"), [(1, 0), (0, 0), (5, -1)], ids=str)
def test_allocator_needs_two_pages(num_pages: int, null_page: int) -> None:
    with pytest.raises(ConfigError, match="PageAllocator"):
        PageAllocator(num_pages, null_page)


def test_allocator_allocates_all_pages_and_none() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(0) == []
    with pytest.raises(ConfigError, match="count"):
        allocator.allocate(-1)
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    assert allocator.num_free == 0
    with pytest.raises(CapacityError, match="1 requested, 0 of 3 are free"):
        allocator.allocate(1)
    allocator.free([2])
    allocator.free([3])
    assert allocator.allocate(2) == [3, 2], "the page freed last comes first"
    with pytest.raises(ConfigError, match=r"free: pages\[0\]: expected an int from 0 to 3, got 4"):
        allocator.free([4])
    with pytest.raises(ConfigError, match=r"share: pages\[0\]: expected an int from 0 to 3, got -1"):
        allocator.share([-1])
    allocator.share([1, 1])
    assert allocator.owners(1) == 3
    allocator.free([1, 1, 1])
    assert (allocator.owners(1), allocator.num_free) == (0, 1)


@pytest.mark.parametrize(
    ("field", "least"),
    [("max_num_reqs", 1), ("max_num_tokens", 1), ("max_seq_len", 1), ("query_len", 1), ("ring_depth", 2)],
)
def test_lower_bound_of_each_number(field: str, least: int) -> None:
    small = {"max_num_reqs": 1, "max_num_tokens": 8, "max_seq_len": 8}
    assert getattr(RuntimeConfig(**small | {field: least}), field) == least
    for value in (least - 1, -1):
        with pytest.raises(ConfigError, match=rf"RuntimeConfig.{field}: expected .* got {value};"):
            RuntimeConfig(**small | {field: value})


def test_a_full_decode_step_must_fit() -> None:
    assert RuntimeConfig(max_num_reqs=5, query_len=3, max_num_tokens=15).max_num_tokens == 15
    with pytest.raises(ConfigError, match="max_num_reqs x query_len = 15, got 14"):
        RuntimeConfig(max_num_reqs=5, query_len=3, max_num_tokens=14)


def test_resolve_replaces_none_by_defaults() -> None:
    config = RuntimeConfig(max_num_reqs=6, max_num_tokens=100, backend="triton").resolve()
    assert (config.decode_sizes, config.mixed_sizes, config.backend) == ((1, 2, 4, 6), (64, 100), "triton")
    config = RuntimeConfig(max_num_reqs=6, max_num_tokens=100, decode_sizes=(), mixed_sizes=(7, 3)).resolve()
    assert (config.decode_sizes, config.mixed_sizes) == ((), (3, 7))
    for field, most in (("decode_sizes", 6), ("mixed_sizes", 100)):
        assert getattr(RuntimeConfig(max_num_reqs=6, max_num_tokens=100, **{field: (1, most)}).resolve(), field) == (
            1,
            most,
        )
        for size in (0, most + 1):
            with pytest.raises(ConfigError, match=rf"{field}\[0\]: expected an int from 1 to {most}, got {size}"):
                RuntimeConfig(max_num_reqs=6, max_num_tokens=100, **{field: (size,)}).resolve()


@pytest.mark.parametrize("page_size", [1, 1024])
def test_bounds_of_page_size(page_size: int) -> None:
    spec = KVCacheSpec(3, 2, 8, page_size, dtype=torch.float16)
    assert spec.bytes_per_page == 3 * 2 * page_size * 2 * 8 * 2
    assert spec.bytes_per_page == spec.page_size * 3 * 2 * 2 * 8 * 2
    with pytest.raises(ConfigError, match="page_size: expected an int from 1 to 1024"):
        KVCacheSpec(3, 2, 8, 0 if page_size == 1 else 1025)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf"), "1", True])
@pytest.mark.parametrize("field", ["softmax_scale", "logits_softcap"])
def test_softmax_scale_must_be_positive(field: str, scale: object) -> None:
    with pytest.raises(ConfigError, match=f"AttentionSpec.{field}: expected a finite number >= 1.17549e-38"):
        AttentionSpec(4, 2, 16, **{field: scale})
    assert getattr(AttentionSpec(4, 2, 16, **{field: 1}), field) == 1.0


@pytest.mark.parametrize("field", ["softmax_scale", "logits_softcap"])
def test_softmax_scale_at_the_bounds_of_float32(field: str) -> None:
    for scale in (FLOAT32_TINY, FLOAT32_MAX):
        assert getattr(AttentionSpec(2, 1, 16, **{field: scale}), field) == scale
    for scale in (FLOAT32_TINY / 2, FLOAT32_MAX * 1.01):
        with pytest.raises(ConfigError, match=f"AttentionSpec.{field}: expected a finite number >= 1.17549e-38"):
            AttentionSpec(2, 1, 16, **{field: scale})


def test_alibi_slopes_at_the_bounds_of_float32() -> None:
    assert AttentionSpec(2, 1, 16, alibi_slopes=(FLOAT32_MAX, -FLOAT32_MAX)).alibi_slopes == (FLOAT32_MAX, -FLOAT32_MAX)
    for wrong in ((1.0, FLOAT32_MAX * 1.01), (-FLOAT32_MAX * 1.01, 1.0), (float("nan"), 1.0), (1.0, None)):
        with pytest.raises(ConfigError, match="alibi_slopes: expected finite floats"):
            AttentionSpec(2, 1, 16, alibi_slopes=wrong)
    for count in (1, 3):
        with pytest.raises(ConfigError, match=f"expected 2 slopes, one per query head, got {count}"):
            AttentionSpec(2, 1, 16, alibi_slopes=(1.0,) * count)


def test_defaults_of_the_specs() -> None:
    layer, cache = AttentionSpec(2, 1, 16), KVCacheSpec(1, 1, 16)
    assert (layer.dtype, cache.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (layer.softmax_scale, layer.sliding_window, layer.logits_softcap, layer.alibi_slopes) == (None,) * 4
    assert (layer.alibi_sqrt, layer.sinks) == (False, False)
    assert (cache.page_size, cache.layout, cache.null_page) == (16, KVLayout.NHD, 0)


@pytest.mark.parametrize(
    ("make", "field", "most"),
    [
        (lambda n: AttentionSpec(n, 1, 16), "AttentionSpec.num_q_heads", 1 << 16),
        (lambda n: AttentionSpec(1, 1, n), "AttentionSpec.head_dim", 1 << 16),
        (lambda n: AttentionSpec(1, 1, 16, sliding_window=n), "AttentionSpec.sliding_window", 1 << 30),
        (lambda n: KVCacheSpec(n, 1, 16), "KVCacheSpec.num_layers", 1 << 16),
        (lambda n: KVCacheSpec(1, 1, 16, page_size=n), "KVCacheSpec.page_size", 1024),
        (lambda n: KVCacheSpec(1, 1, 16, null_page=n), "KVCacheSpec.null_page", (1 << 31) - 2),
        (lambda n: RuntimeConfig(1, n), "RuntimeConfig.max_num_tokens", 1 << 16),
        (lambda n: RuntimeConfig(n, 1 << 16), "RuntimeConfig.max_num_reqs", 1 << 16),
        (lambda n: RuntimeConfig(max_seq_len=n), "RuntimeConfig.max_seq_len", 1 << 30),
        (lambda n: RuntimeConfig(ring_depth=n), "RuntimeConfig.ring_depth", 1024),
        (lambda n: SamplingParams(n), "max_new_tokens", 1 << 30),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_upper_bound_of_each_number(make, field: str, most: int) -> None:
    make(most)
    with pytest.raises(ConfigError, match=rf"^{field}: expected an int from \d to {most}, got {most + 1}"):
        make(most + 1)


def test_defaults_of_sampling() -> None:
    params = SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.seed, params.stop_ids) == (128, 0.0, 0, frozenset())


def test_derived_properties_of_attention_spec() -> None:
    assert (AttentionSpec(6, 2, 25).num_queries_per_kv, AttentionSpec(6, 2, 25).scale) == (3, 0.2)
    assert AttentionSpec(6, 2, 25, softmax_scale=0.3).scale == 0.3
    assert AttentionSpec(6, 2, 25, sliding_window=1).sliding_window == 1
    with pytest.raises(ConfigError, match="sliding_window"):
        AttentionSpec(6, 2, 25, sliding_window=0)
    for name in ("alibi_sqrt", "sinks"):
        with pytest.raises(ConfigError, match=f"AttentionSpec.{name}: expected True or False"):
            AttentionSpec(6, 2, 25, **{name: 1})
