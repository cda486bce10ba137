"""Copies of whole pages, inside a cache and between caches, against slices taken one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphrt.kernels.cache.copy import copy_pages, swap_pages
from graphrt.kernels.errors import ShapeError

PAGES, PAGE, HEADS, DIM, LAYERS = 7, 4, 2, 8, 2


def caches(device: torch.device, seed: int, layout: str = "NHD", pages: int = PAGES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    page = (PAGE, HEADS) if layout == "NHD" else (HEADS, PAGE)
    made = [torch.randn(pages, *page, DIM, generator=generator).to(device) for _ in range(LAYERS)]
    return made if layout == "NHD" else [cache.transpose(1, 2) for cache in made]


COPIES = {
    "one": ([1], [2]),
    "none": ([], []),
    "fan_out": ([3, 3, 3], [1, 5, 6]),
    "exchange": ([1, 2], [2, 1]),
    "chain": ([1, 2, 3], [2, 3, 4]),
    "onto_itself": ([4], [4]),
    "first_and_last": ([0, PAGES - 1], [PAGES - 1, 0]),
}
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", COPIES)
def test_copy_pages(device: str, layout: str, case: str) -> None:
    """Every page is read before any is written."""
    src, dst = COPIES[case]
    k, v = (caches(torch.device(device), seed, layout) for seed in (1, 2))
    before = [cache.clone() for cache in (*k, *v)]
    addresses = [cache.data_ptr() for cache in (*k, *v)]
    copy_pages(k, v, src, dst)
    assert [cache.data_ptr() for cache in (*k, *v)] == addresses
    for cache, old in zip((*k, *v), before, strict=True):
        expected = old.clone()
        for a, b in zip(src, dst, strict=True):
            expected[b] = old[a]
        assert torch.equal(cache, expected)


@devices
def test_pages_of_a_cache_of_one_page(device: str) -> None:
    """Page 0 is the first and the last; page 1 is none."""
    k, v, host = (caches(torch.device(device), seed, pages=1) for seed in (1, 2, 3))
    before = [cache.clone() for cache in (*k, *v)]
    copy_pages(k, v, [0], [0])
    assert all(torch.equal(cache, old) for cache, old in zip((*k, *v), before, strict=True))
    swap_pages(k, host, [0], [0])
    assert all(torch.equal(a, b) for a, b in zip(host, k, strict=True))
    for src, dst, name in (([1], [0], "src_pages"), ([0], [1], "dst_pages")):
        with pytest.raises(ShapeError, match=rf"{name}\[0\]: expected an int from 0 to 0, got 1"):
            copy_pages(k, v, src, dst)


@devices
def test_heads_of_two_sizes(device: str) -> None:
    """Values may be narrower than keys."""
    k, v = (torch.randn(PAGES, PAGE, HEADS, size, device=device) for size in (24, 16))
    before = k.clone(), v.clone()
    copy_pages([k], [v], [1, 3], [2, 6])
    host = [torch.zeros_like(cache, device="cpu") for cache in (k, v)]
    swap_pages([k, v], host, [2, 6], [0, 1])
    for cache, old, swapped in zip((k, v), before, host, strict=True):
        assert torch.equal(cache[[2, 6]], old[[1, 3]])
        assert torch.equal(cache[[0, 1, 3, 4, 5]], old[[0, 1, 3, 4, 5]])
        assert torch.equal(swapped[:2], old[[1, 3]].cpu())


@devices
def test_keys_stay_keys(device: str) -> None:
    """K and V of a layer are copied within themselves, and layers do not mix."""
    k, v = ([torch.full((3, PAGE, HEADS, DIM), float(f"{side}{layer}"), device=device) for layer in range(LAYERS)]
            for side in (1, 2))  # fmt: skip
    for cache in (*k, *v):
        cache[1] += 0.5
    copy_pages(k, v, [1], [2])
    for side, layers in ((10.5, k), (20.5, v)):
        for layer, cache in enumerate(layers):
            assert (cache[2] == side + layer).all()
            assert (cache[0] == side + layer - 0.5).all()


ROUTES = {
    "cpu_to_cpu": pytest.param("cpu", "cpu", False),
    "cuda_to_cuda": pytest.param("cuda", "cuda", False, marks=pytest.mark.gpu),
    "cuda_to_cpu": pytest.param("cuda", "cpu", False, marks=pytest.mark.gpu),
    "cpu_to_cuda": pytest.param("cpu", "cuda", False, marks=pytest.mark.gpu),
    "cuda_to_pinned": pytest.param("cuda", "cpu", True, marks=pytest.mark.gpu),
    "pinned_to_cuda": pytest.param("cpu", "cuda", True, marks=pytest.mark.gpu),
}


@pytest.mark.parametrize(("source", "target", "pin"), ROUTES.values(), ids=ROUTES)
def test_swap_pages(source: str, target: str, pin: bool) -> None:
    src, dst = caches(torch.device(source), 3), caches(torch.device(target), 4, "HND", pages=3)
    if pin:
        src, dst = ([t.pin_memory() if t.device.type == "cpu" else t for t in side] for side in (src, dst))
    before = [cache.cpu().clone() for cache in dst]
    swap_pages(src, dst, [5, 1], [0, 2])
    for a, b, old in zip(src, dst, before, strict=True):
        old[0], old[2] = a[5].cpu(), a[1].cpu()
        assert torch.equal(b.cpu(), old)


def test_swapping_out_and_in_restores_the_pages() -> None:
    src, host = caches(torch.device("cpu"), 5), caches(torch.device("cpu"), 6)
    before = [cache.clone() for cache in src]
    swap_pages(src, host, [2, 4], [1, 0])
    for cache in src:
        cache[[2, 4]] = float("nan")
    swap_pages(host, src, [0, 1], [4, 2])
    assert all(torch.equal(a, b) for a, b in zip(src, before, strict=True))


BAD_PAGES = {
    "lengths": ([1, 2], [3], "dst_pages: expected 2 pages, one per source page, got 1"),
    "src_high": ([PAGES], [1], r"src_pages\[0\]: expected an int from 0 to 6, got 7"),
    "src_negative": ([-1], [1], r"src_pages\[0\]: expected an int from 0 to 6, got -1"),
    "dst_high": ([1], [PAGES], r"dst_pages\[0\]: expected an int from 0 to 6, got 7"),
    "none": (None, [1], "src_pages: expected ints from 0 to 6 on the host, got None"),
    "text": ("12", "34", "src_pages: expected ints from 0 to 6 on the host, got '12'"),
    "bool": ([1], [True], r"dst_pages\[0\]: expected an int from 0 to 6, got True"),
    "float": ([1.0], [1], r"src_pages\[0\]: expected an int from 0 to 6, got 1.0"),
    "ragged": ([1, [2]], [1, 2], r"src_pages\[1\]: expected an int from 0 to 6, got \[2\]"),
    "dst_twice": ([1, 2, 3], [5, 4, 5], "dst_pages: expected different pages, got page 5 twice"),
}


@pytest.mark.parametrize("case", BAD_PAGES)
def test_bad_pages_are_named_and_nothing_is_written(case: str) -> None:
    src, dst, message = BAD_PAGES[case]
    k, v = caches(torch.device("cpu"), 1), caches(torch.device("cpu"), 2)
    before = [cache.clone() for cache in (*k, *v)]
    with pytest.raises(ShapeError, match=message):
        copy_pages(k, v, src, dst)
    with pytest.raises(ShapeError, match=message):
        swap_pages(k, v, src, dst)
    assert all(torch.equal(a, b) for a, b in zip((*k, *v), before, strict=True))


def test_the_smaller_side_limits_the_pages_of_a_swap() -> None:
    src, dst = caches(torch.device("cpu"), 1), caches(torch.device("cpu"), 2, pages=3)
    with pytest.raises(ShapeError, match=r"dst_pages\[0\]: expected an int from 0 to 2, got 3"):
        swap_pages(src, dst, [6], [3])


BAD_TENSORS = {
    "count": (lambda c: c[:1], "dst: expected 2 tensors, as in src, got 1"),
    "none": (lambda c: None, "dst: expected a list or tuple of tensors, as in src, got None"),
    "item": (lambda c: [c[0], "b"], r"dst\[1\]: expected a torch.Tensor, got str"),
    "device": (lambda c: [c[0], c[1].to("meta")], r"dst\[1\]: expected device cpu, got meta"),
    "sparse": (lambda c: [c[0].to_sparse(), c[1]], r"dst\[0\]: expected a dense tensor"),
    "page_shape": (lambda c: [t[..., :4] for t in c], r"dst\[0\]: expected pages of"),
    "dtype": (lambda c: [c[0], c[1].half()], r"dst\[1\]: expected pages of"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_caches_that_do_not_match_are_named(case: str) -> None:
    change, message = BAD_TENSORS[case]
    src = caches(torch.device("cpu"), 1)
    with pytest.raises(ShapeError, match=message):
        swap_pages(src, change(caches(torch.device("cpu"), 2)), [1], [1])


def test_arrays_and_tensors_of_pages() -> None:
    k, v = caches(torch.device("cpu"), 1), caches(torch.device("cpu"), 2)
    want = [cache[[1, 2]].clone() for cache in (*k, *v)]
    copy_pages(k, v, np.array([1, 2], np.uint8), torch.tensor([4, 5], dtype=torch.int16))
    assert all(torch.equal(cache[[4, 5]], w) for cache, w in zip((*k, *v), want, strict=True))


def test_neither_a_default_device_nor_inference_mode_matters() -> None:
    """A process may have torch's default device set, and tensors of inference mode are written outside of it too."""
    with torch.inference_mode():
        k, v = caches(torch.device("cpu"), 1), caches(torch.device("cpu"), 2)
    want = [cache[1].clone() for cache in (*k, *v)]
    torch.set_default_device("meta")
    try:
        copy_pages(k, v, [1], [4])
        swap_pages(k, v, [1], [6])
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(cache[4], w) for cache, w in zip((*k, *v), want, strict=True))
    assert all(torch.equal(b[6], w) for b, w in zip(v, want[:LAYERS], strict=True))
