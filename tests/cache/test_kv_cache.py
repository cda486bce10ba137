"""The paged KV cache and its page allocator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.cache.kv_cache import KVCache
from graphrt.cache.page_allocator import PageAllocator
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.types import KVLayout
from graphrt.spec import KVCacheSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
def test_nhd_and_hnd_have_equal_logical_views(layout: KVLayout, page_size: int) -> None:
    spec = KVCacheSpec(2, 3, 8, page_size, layout, torch.float32)
    cache = KVCache.allocate(spec, 5, CPU)
    assert all(t.shape == (5, page_size, 3, 8) for _, t in cache.named_tensors())
    token, head = cache.k[0].stride()[1:3]
    assert (token > head) == (layout is KVLayout.NHD)
    assert (
        cache.nbytes == sum(t.numel() * t.element_size() for _, t in cache.named_tensors()) == 5 * spec.bytes_per_page
    )
    assert [spec.pages_for(n) for n in (0, 1, page_size, page_size + 1)] == [0, 1, 1, 2]


F8 = torch.float8_e5m2
ONES = torch.ones(2)
WRONG_TENSORS = {
    # a change of the tensors of two layers, and the error
    "count": (lambda k, v: (k[:1], v), "expected 2 K and V tensors, one per layer, got 1 and 2"),
    "shape": (lambda k, v: ([k[0], k[1][:, :3]], v), r"k\[1\]: expected shape \[\*, 4, 2, 8\], got \[6, 3, 2, 8\]"),
    "pages": (lambda k, v: (k, [v[0][:5], v[1]]), r"v\[0\]: expected 6 pages, as in the other layers of its pool"),
    "dtype": (lambda k, v: (k, [v[0].half(), v[1]]), r"v\[0\]: expected dtype float32, got float16"),
    "device": (lambda k, v: (k, [v[0], v[1].to("meta")]), r"v\[1\]: expected device cpu, got meta"),
    "stride": (lambda k, v: ([k[0].mT.contiguous().mT, k[1]], v), "stride 1 in the last"),
    "none": (lambda k, v: ([None, k[1]], v), r"k\[0\]: expected a torch.Tensor, got NoneType"),
    "expanded": (lambda k, v: (k, [v[0], v[1][:1].expand_as(v[1])]), r"v\[1\]: elements may share memory"),
    "one-tensor": (lambda k, v: (k, [v[0], k[1]]), r"v\[1\]: shares elements with k\[1\]"),
}
WRONG_SCALES = {
    "count": (F8, [ONES], "v_scales: expected 2 tensors, got 1"),
    "shape": (F8, [ONES, torch.ones(3)], r"v_scales\[1\]: expected shape \[1\] or \[2\]"),
    "dtype": (F8, [ONES.half()] * 2, r"v_scales\[0\]: expected dtype float32"),
    "device": (F8, [ONES.to("meta")] * 2, r"v_scales\[0\]: expected device cpu"),
    "not-fp8": (torch.float16, [ONES] * 2, r"v_scales\[0\]: a float16 cache takes no scale"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_kv_tensors_raise(case: str) -> None:
    change, text = WRONG_TENSORS[case]
    make = lambda: [torch.zeros(6, 4, 2, 8) for _ in range(2)]  # noqa: E731
    k, v = change(make(), make())
    of_counts = case in ("count", "one-tensor")
    with pytest.raises(ConfigError if of_counts else ShapeError, match=text):
        KVCache(KVCacheSpec(2, 2, 8, 4, dtype=torch.float32), k, v)


@pytest.mark.parametrize("case", WRONG_SCALES)
def test_wrong_scales_raise(case: str) -> None:
    dtype, scales, text = WRONG_SCALES[case]
    k, v = torch.zeros(2, 2, 6, 4, 2, 8, dtype=dtype)
    with pytest.raises(ConfigError if case == "count" else ShapeError, match=text):
        KVCache(KVCacheSpec(2, 2, 8, 4, dtype=dtype), list(k), list(v), v_scales=scales)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_scales_of_an_fp8_cache_default_to_one(dtype: torch.dtype) -> None:
    """One tensor per layer, since kernels are specialised on the alignment of an address."""
    spec = KVCacheSpec(3, 2, 8, 4, dtype=dtype)
    cache = KVCache.allocate(spec, 5, CPU)
    assert cache.nbytes == 3 * 2 * 5 * 4 * 2 * 8
    scales = (*cache.k_scales, *cache.v_scales)
    assert len(scales) == 6
    assert all(torch.equal(s, torch.ones(2)) and s.dtype == torch.float32 for s in scales)
    assert len({s.untyped_storage().data_ptr() for s in scales}) == 6
    named = dict(cache.named_tensors())
    assert named["kv_cache.k_scales[2]"] is cache.k_scales[2]
    assert named["kv_cache.v_scales[0]"] is cache.v_scales[0]
    k_scales = [torch.full((2,), 0.5), torch.full((1,), 2.0), torch.ones(1)]
    given = KVCache(spec, cache.k, cache.v, k_scales=k_scales)
    assert all(a is b for a, b in zip(given.k_scales, k_scales, strict=True))
    assert [s.tolist() for s in given.v_scales] == [[1.0] * 2] * 3
    wide = KVCache.allocate(KVCacheSpec(3, 2, 8, 4), 5, CPU)
    assert wide.k_scales == wide.v_scales == ()
    assert len(list(wide.named_tensors())) == 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=["wide", "e4m3", "e5m2"])
def test_copy_pages(dtype: torch.dtype, layout: KVLayout, device: str) -> None:
    """Bitwise, including the payload of NaN."""
    spec = KVCacheSpec(2, 2, 8, 4, layout, dtype)
    cache = KVCache.allocate(spec, 6, device)
    caches = [t.view(torch.uint8) for t in (*cache.k, *cache.v)]
    for tensor in caches:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    before = [t.clone() for t in caches]
    cache.copy_pages([1, 2, 2], [4, 5, 1])
    for old, new in zip(before, caches, strict=True):
        old[[4, 5, 1]] = old[[1, 2, 2]]
        assert torch.equal(new, old)


def test_wrong_copies_raise_and_change_nothing() -> None:
    cache = KVCache.allocate(KVCacheSpec(2, 2, 8, 4, dtype=torch.float32), 6, CPU)
    for _, tensor in cache.named_tensors():
        tensor.normal_()
    for pages in (([1], [2, 3]), ([1], [6]), ([1, 2], [3, 3]), ([-1], [1])):
        state = [t.clone() for _, t in cache.named_tensors()]
        with pytest.raises(ShapeError):
            cache.copy_pages(*pages)
        assert all(torch.equal(a, b) for a, (_, b) in zip(state, cache.named_tensors(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=["wide", "fp8"])
def test_torch_modes_do_not_affect_a_cache(dtype: torch.dtype) -> None:
    """Inference mode, default device and default dtype."""
    spec = KVCacheSpec(2, 2, 8, 4, KVLayout.HND, dtype)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            cache = KVCache.allocate(spec, 6, "cpu")
            own = KVCache(spec, [t.clone() for t in cache.k], [t.clone() for t in cache.v])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    made = [t for _, t in cache.named_tensors()]
    assert len(made) == (8 if dtype.itemsize == 1 else 4)
    assert not any(t.is_inference() for t in (*made, *own.k_scales, *own.v_scales))
    assert {t.device for t in (*made, *own.k_scales)} == {CPU}
    assert {t.dtype for t in (*cache.k, *cache.v)} == {dtype}
    assert {t.dtype for t in (*own.k_scales, *cache.v_scales)} <= {torch.float32}
    for tensor in (*made, *own.k_scales):
        tensor.zero_()
    own.copy_pages([1], [2])


def test_null_page_may_be_the_last() -> None:
    spec = KVCacheSpec(1, 1, 8, null_page="last")
    assert [KVCache.allocate(spec, pages, CPU).groups[0].null_page for pages in (2, 9)] == [1, 8]
    assert KVCache.allocate(spec, 9, CPU).groups == (KVCacheSpec(1, 1, 8, null_page=8),)
    assert KVCache.allocate(spec, 9, CPU).pools == ((9, 8),)
    assert KVCache.allocate(KVCacheSpec(1, 1, 8, null_page=3), 9, CPU).groups[0].null_page == 3
    with pytest.raises(ConfigError, match="null_page: expected a page below num_pages=9, got 9;"):
        KVCache.allocate(KVCacheSpec(1, 1, 8, null_page=9), 9, CPU)


def test_page_of_several_ranks() -> None:
    spec = KVCacheSpec(1, 2, 8, 4, context_parallel_size=3, interleave_size=2)
    assert [spec.pages_for(tokens) for tokens in (0, 1, 12, 13)] == [0, 1, 1, 2]
    assert KVCache.allocate(spec, 5, CPU).k[0].shape == (5, 4, 2, 8)
    for changes, text in (
        ({"interleave_size": 3}, "interleave_size: expected a divisor of page_size="),
        ({"context_parallel_size": 2, "sliding_window": 3}, "context_parallel_size: expected 1 with a window"),
    ):
        with pytest.raises(ConfigError, match=text):
            KVCacheSpec(1, 2, 8, **changes)


SPEC = KVCacheSpec(2, 2, 8, 4, dtype=torch.float32)
K = [torch.zeros(6, 4, 2, 8) for _ in range(2)]
V = [torch.zeros(6, 4, 2, 8) for _ in range(2)]

WRONG_TYPES = {
    "spec": (lambda: KVCache("spec", K, V), "groups: expected a list or tuple of KVCacheSpec .* got 'spec'"),
    "no-spec": (lambda: KVCache((), K, V), "expected 0 K and V tensors"),
    "k": (lambda: KVCache(SPEC, None, V), "k: expected a list or tuple of tensors, one per layer, got None"),
    "sparse": (lambda: KVCache(SPEC, [K[0].to_sparse(), K[1]], V), r"k\[0\]: sparse and nested tensors"),
    "grad": (lambda: KVCache(SPEC, K, [V[0], V[1].clone().requires_grad_()]), r"v\[1\]: requires gradients"),
    "one-page": (
        lambda: KVCache(SPEC, [t[:1] for t in K], [t[:1] for t in V]),
        "num_pages: expected an int from 2 .* 1",
    ),
    "scales": (lambda: KVCache(SPEC, K, V, k_scales=3), "k_scales: expected a list or tuple of tensors"),
    "pages": (lambda: KVCache.allocate(SPEC, 1, "cpu"), "num_pages: expected an int from 2 to 2147483647, got 1"),
    "device": (lambda: KVCache.allocate(SPEC, 6, 3), "device: expected cpu, cuda or cuda:N, got 3"),
    "memory": (
        lambda: KVCache.allocate(KVCacheSpec(60000, 60000, 60000), 2**31 - 1, "cpu"),
        r"num_pages: 2147483647 pages of 1382\d* bytes do not fit",
    ),
    "memory-of-torch": (
        lambda: KVCache.allocate(KVCacheSpec(4, 256, 512, 1024), 2**31 - 1, "cpu"),
        "num_pages: 2147483647 pages of 2147483648 bytes do not fit",
    ),
    "copy-group": (lambda: KVCache(SPEC, K, V).copy_pages([1], [2], group=1), "group: expected an int from 0 to 0"),
    "copy-none": (lambda: KVCache(SPEC, K, V).copy_pages(None, [2]), "src_pages: expected ints from 0 to 5 .*None"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_wrong_cache_arguments_raise(case: str) -> None:
    call, text = WRONG_TYPES[case]
    with pytest.raises((ConfigError, ShapeError, CapacityError), match=text):
        call()


WRONG_PAGES = {
    "init": (lambda a: PageAllocator(1.5), "PageAllocator.num_pages: expected an int from 2 to 2147483647, got 1.5"),
    "init-one": (lambda a: PageAllocator(1), "PageAllocator.num_pages: .* got 1"),
    "null-out": (lambda a: PageAllocator(5, 5), "PageAllocator.null_page: .* got 5"),
    "count-less": (lambda a: a.allocate(-1), "count: .* got -1"),
    "owners": (lambda a: a.owners(-1), "page: expected an int from 0 to 4, got -1"),
    "free": (lambda a: a.free(None), "free: pages: expected ints from 0 to 4 on the host, got None"),
    "share-rank": (lambda a: a.share(np.array([[1]])), r"share: pages: expected one dimension, got shape \[1, 1\]"),
    "free-twice": (lambda a: a.free([1, 1]), "pass each page once"),
    "free-null": (lambda a: a.free([0]), "pass each page once"),
    "free-range": (lambda a: a.free([99]), "expected an int from 0 to 4, got 99"),
    "free-one-of-two": (lambda a: a.free([1, 4]), "pass each page once"),
    "share-free": (lambda a: a.share([4]), "pass each page once"),
}


@pytest.mark.parametrize("case", WRONG_PAGES)
def test_wrong_pages_raise_and_change_nothing(case: str) -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    assert pages == [1, 2]
    call, text = WRONG_PAGES[case]
    with pytest.raises((ConfigError, CapacityError), match=text):
        call(allocator)
    assert allocator.num_free == 2
    assert [allocator.owners(page) for page in pages] == [1, 1]
    allocator.free(np.array(pages, np.int16))
    assert allocator.num_free == 4
    assert {type(page) for page in allocator.allocate(np.int64(4))} == {int}


def test_pages_freed_last_are_allocated_first() -> None:
    allocator = PageAllocator(2**31 - 1, null_page=2)
    first = allocator.allocate(4)
    assert first == [0, 1, 3, 4]
    allocator.free([3, 0])
    assert allocator.allocate(3) == [0, 3, 5]
    assert allocator.num_free == 2**31 - 2 - 5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=40))
def test_allocator_equals_a_counting_model(operations: list[tuple[str, int]]) -> None:
    """For random sequences of calls. The null page is never allocated."""
    allocator, owned = PageAllocator(9, null_page=3), {}
    for verb, n in operations:
        free = 8 - len(owned)
        if verb == "allocate" and n > free:
            with pytest.raises(CapacityError, match=f"{n} requested, but only {free} of 8 are free"):
                allocator.allocate(n)
        elif verb == "allocate":
            owned |= dict.fromkeys(allocator.allocate(n), 1)
        elif verb == "share":
            chosen = sorted(owned)[:n]
            allocator.share(chosen)
            owned |= {p: owned[p] + 1 for p in chosen}
        elif verb == "free":
            chosen = sorted(owned)[:n]
            allocator.free(chosen)
            owned = {p: c - (p in chosen) for p, c in owned.items() if c - (p in chosen)}
        assert allocator.num_free == 8 - len(owned)
        assert {p: allocator.owners(p) for p in range(9) if allocator.owners(p)} == owned
        assert 3 not in owned
