"""Copy pages within a cache, and to and from a packed block, compared with slices of each page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from graphrt.kernels.cache import copy
from graphrt.kernels.cache.copy import PagePacker
from graphrt.kernels.errors import ShapeError

PAGES, PAGE, HEADS, DIM, LAYERS = 7, 4, 2, 8, 2
CPU = torch.device("cpu")


def caches(device: torch.device, layout: str = "NHD", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return K and V of two layers in a page layout; V has another head size."""
    generator = torch.Generator().manual_seed(1)

    def make(dim: int) -> torch.Tensor:
        page = (HEADS, PAGE) if layout == "HND" else (PAGE, HEADS)
        tensor = torch.randn(PAGES, *page, dim, generator=generator).to(device, dtype)
        return tensor.transpose(1, 2) if layout == "HND" else tensor

    made = [make(dim) for _ in range(LAYERS) for dim in (DIM, DIM - 3)]
    if layout == "side_by_side":  # K and V of a page are adjacent
        both = torch.stack([make(DIM), make(DIM)], 1)
        return [both[:, 0], both[:, 1], *made]
    if layout == "by_token":  # K and V of a token are adjacent: pages are not dense
        both = torch.stack([make(DIM), make(DIM)], 2)
        return [both[:, :, 0], both[:, :, 1], *made]
    return made


LAYOUTS = ("NHD", "HND", "side_by_side", "by_token")
COPIES = {
    "one": ([1], [2]),
    "none": ([], []),
    "fan_out": ([3, 3, 3], [1, 5, 6]),
    "exchange": ([1, 2], [2, 1]),
    "chain": ([1, 2, 3], [2, 3, 4]),
    "onto_itself": ([4], [4]),
    "first_and_last": ([0, PAGES - 1], [PAGES - 1, 0]),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@layouts
@pytest.mark.parametrize("case", COPIES)
def test_copies(kernel_device: torch.device, layout: str, case: str) -> None:
    """All pages are read before any is written, and tensors do not mix."""
    src, dst = COPIES[case]
    tensors = caches(kernel_device, layout)
    before, addresses = [t.clone() for t in tensors], [t.data_ptr() for t in tensors]
    PagePacker(tensors).copy(src, dst)
    assert [t.data_ptr() for t in tensors] == addresses
    for tensor, old in zip(tensors, before, strict=True):
        expected = old.clone()
        for a, b in zip(src, dst, strict=True):
            expected[b] = old[a]
        assert torch.equal(tensor, expected)


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_packed_pages(kernel_device: torch.device, layout: str, dtype: torch.dtype) -> None:
    """A packed page holds the bytes of each tensor in turn, and can be restored to any page bit by bit."""
    tensors = caches(kernel_device, layout, dtype)
    packer, pages = PagePacker(tensors), [5, 1, 5]
    out = torch.full((3 * packer.page_bytes + 16,), 171, dtype=torch.uint8, device=kernel_device)
    packer.pack(packer.upload(np.array(pages)), out[:-16])
    assert (out[-16:] == 171).all()
    for index, page in enumerate(pages):
        stored = out[index * packer.page_bytes : (index + 1) * packer.page_bytes]
        for tensor in tensors:
            in_memory = tensor[page].transpose(0, 1) if layout == "HND" else tensor[page]
            want = bits(in_memory).flatten()
            assert torch.equal(stored[: len(want)], want)
            stored = stored[len(want) :]
    before = [bits(t).clone() for t in tensors]
    packer.unpack(packer.upload(np.array([2, 6, 0])), out[:-16])
    for tensor, old in zip(tensors, before, strict=True):
        old[[2, 6, 0]] = old[[5, 1, 5]]
        assert torch.equal(bits(tensor), old)


def test_kernel_and_reference_pack_alike(kernel_device: torch.device) -> None:
    """Use more work items than programs, and pages larger than a block."""
    tensors = [torch.randn(90, 40, 2, 33, device=kernel_device), torch.randn(90, 40, 2, 16, device=kernel_device)]
    packer, pages = PagePacker(tensors), np.random.default_rng(0).permutation(90)
    out, want = (torch.zeros(90 * packer.page_bytes, dtype=torch.uint8, device=kernel_device) for _ in range(2))
    packer.pack(packer.upload(pages), out)
    packer._move_reference(packer.upload(pages), want.view(90, -1), pack=True)
    assert torch.equal(out, want)


class Kernel:
    """A fake jitted kernel that records for each launch whether it used the binder, and the device."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, object]] = []
        self.current: object = None

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        if len(grid) == 3:
            return lambda *arguments: self.launches.append(("compiled", self.current))

        def bound(*arguments: object, num_warps: int) -> Kernel:
            self.launches.append(("bound", self.current))
            return self

        return bound

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before


def test_launches_use_the_device_of_the_tensors_and_the_binder_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded without CUDA. After warm_up, no launch compiles or uses the binder."""
    kernel, there = Kernel(), torch.device("cuda", 1)
    monkeypatch.setattr(copy, "_move_pages_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "device", kernel.device)
    packer, empty = PagePacker(caches(CPU)), torch.empty
    packer.device = there
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))
    packer.warm_up()
    packer.warm_up()
    assert kernel.launches == [("bound", there)] * 2
    packer.pack(empty(3, dtype=torch.int64), empty(3 * packer.page_bytes, dtype=torch.uint8))
    packer.unpack(empty(3, dtype=torch.int64), empty(3 * packer.page_bytes, dtype=torch.uint8))
    assert kernel.launches[2:] == [("compiled", there)] * 2


@pytest.mark.gpu
def test_a_warm_packer_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm packer copies the same bytes as a cold one, whose launches use the binder."""
    device = torch.device("cuda", 0)
    results = []
    for warm in (False, True):
        tensors = caches(device)
        packer = PagePacker(tensors)
        if warm:
            packer.warm_up()
            monkeypatch.setattr(copy, "_move_pages_kernel", None)
        packer.copy([3, 3, 5], [1, 6, 2])
        results.append([t.clone() for t in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_cache_on_another_device_than_the_current_one() -> None:
    tensors = caches(torch.device("cuda", 1))
    want = [t[1].clone() for t in tensors]
    with torch.cuda.device(0):
        PagePacker(tensors).copy([1], [4])
    torch.cuda.synchronize(1)
    assert all(torch.equal(t[4], w) for t, w in zip(tensors, want, strict=True))


def test_word_size_is_the_widest_aligned_one() -> None:
    storage = torch.zeros(1 + 6 * 2 * 4 * 6, dtype=torch.bfloat16)
    for tensor, word, aligned in (
        (torch.zeros(6, 2, 4, 8), 8, True),
        (torch.zeros(6, 2, 1, 5), 8, False),
        (torch.zeros(6, 1, 1, 5), 4, False),
        (storage[1:].view(6, 2, 4, 6), 2, False),
        (torch.zeros(6, 1, 1, 5, dtype=torch.float8_e5m2), 1, False),
    ):
        packer = PagePacker([tensor])
        assert (packer._word, packer._aligned) == (word, aligned)


BAD_PAGES = {
    "lengths": ([1, 2], [3], "dst_pages: expected 2 pages, one per source page, got 1"),
    "src_high": ([PAGES], [1], r"src_pages\[0\]: expected an int from 0 to 6, got 7"),
    "src_negative": ([-1], [1], r"src_pages\[0\]: expected an int from 0 to 6, got -1"),
    "dst_high": ([1], [PAGES], r"dst_pages\[0\]: expected an int from 0 to 6, got 7"),
    "none": (None, [1], "src_pages: expected ints from 0 to 6 on the host, got None"),
    "dst_twice": ([1, 2, 3], [5, 4, 5], "dst_pages: page 5 is listed twice"),
    "of_one_tensor": ([2], [PAGES - 1], r"dst_pages\[0\]: expected an int from 0 to 5, got 6"),
}


@pytest.mark.parametrize("case", BAD_PAGES)
def test_bad_pages_raise_before_anything_is_written(case: str) -> None:
    src, dst, message = BAD_PAGES[case]
    tensors = caches(CPU)
    if case == "of_one_tensor":  # the tensor with the fewest pages limits page ids
        tensors[1] = tensors[1][: PAGES - 1]
    before = [t.clone() for t in tensors]
    with pytest.raises(ShapeError, match=message):
        PagePacker(tensors).copy(src, dst)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


BAD_TENSORS = {
    "nothing": (lambda c: [], "tensors: the list is empty"),
    "none": (lambda c: None, "tensors: expected a list or tuple of tensors, got None"),
    "item": (lambda c: [c[0], "b"], r"tensors\[1\]: expected a torch.Tensor, got str"),
    "device": (lambda c: [c[0], c[1].to("meta")], r"tensors\[1\]: expected device cpu, got meta"),
    "sparse": (lambda c: [c[0].to_sparse(), c[1]], r"tensors\[0\]: sparse and nested tensors"),
    "rank": (lambda c: [c[0][0]], r"tensors\[0\]: expected shape"),
    "empty": (lambda c: [c[0][:0]], r"tensors\[0\]: the tensor is empty"),
    "expanded": (lambda c: [c[0][:1].expand_as(c[0])], r"tensors\[0\]: elements may share memory"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_raise(case: str) -> None:
    change, message = BAD_TENSORS[case]
    with pytest.raises(ShapeError, match=message):
        PagePacker(change(caches(CPU)))


def test_pages_in_arrays_and_copies_outside_of_modes() -> None:
    """The default device of torch may be set, and inference tensors are written outside of inference mode."""
    with torch.inference_mode():
        tensors = caches(CPU)
    want = [t[[1, 2]].clone() for t in tensors]
    torch.set_default_device("meta")
    try:
        PagePacker(tensors).copy(np.array([1, 2], np.uint8), torch.tensor([4, 5], dtype=torch.int16, device="cpu"))
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(t[[4, 5]], w) for t, w in zip(tensors, want, strict=True))
