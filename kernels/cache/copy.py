"""Copy whole KV pages: to and from one packed block of bytes, and between pages of a cache (copy on write).

These copies are not part of a graph, because page lists are host values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_ints, check_no_overlap, check_not_empty, check_sequence, check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.library import cpu_runs_triton

Pages = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
"""Page ids: a list, an array or a host tensor of any int dtype."""

# Launch parameters, which a packer reads at construction. Decode steps run concurrently, and their blocks need whole
# multiprocessors, so a short launch on all multiprocessors delays a step less than a long launch on a few.
_BLOCK = 1024
"""Words (of up to 8 bytes) that a program copies per iteration."""

_PROGRAMS = 2048
"""Maximum programs per launch."""

_NUM_WARPS = 4

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_TRITON_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


@triton.jit(do_not_specialize=["pages_ptr", "num_pages", "num_tensors", "num_blocks", "packed_words"])
def _move_pages_kernel(
    table_ptr,
    pages_ptr,
    packed_ptr,
    num_pages,
    num_tensors,
    num_blocks,
    packed_words,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    PACK: tl.constexpr,
):
    """Copy pages of all tensors to (PACK) or from one block of bytes.

    A work item is a block of words in one page of one tensor; programs process items round-robin. `table_ptr` points to
    the address, page stride, offset in a packed page and words per page of each tensor.
    """
    words = tl.arange(0, BLOCK)
    pieces = num_pages.to(tl.int64) * num_tensors * num_blocks
    for piece in range(tl.program_id(0).to(tl.int64), pieces, tl.num_programs(0).to(tl.int64)):
        block = piece % num_blocks
        tensor = piece // num_blocks % num_tensors
        page = piece // num_blocks // num_tensors
        row = table_ptr + tensor * 4
        address, stride, offset, count = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        at = block * BLOCK
        cache = address.to(tl.pointer_type(WORD)) + tl.load(pages_ptr + page) * stride + at
        packed = packed_ptr + page * packed_words + offset + at
        if ALIGNED:
            cache = tl.multiple_of(cache, 16)
            packed = tl.multiple_of(packed, 16)
        inside = at + words < count
        if PACK:
            tl.store(packed + words, tl.load(cache + words, mask=inside), mask=inside)
        else:
            tl.store(cache + words, tl.load(packed + words, mask=inside), mask=inside)


class PagePacker:
    """Gather pages of several tensors into one block of bytes, and scatter them back.

    tensors     each [num_pages, page_size, num_kv_heads, head_dim], any dtype, any strides without overlap, all on one
                device; usually K and V of all layers of a KV group
    num_pages   pages per tensor
    page_bytes  bytes per page, summed over all tensors

    A packed page contains the page of each tensor in turn, in memory order. If pages are dense in every tensor, packing
    takes one launch; otherwise, it takes one or two launches per tensor. Work runs on the current stream of the
    tensors' device, regardless of the current device.

    Raises: ShapeError: if `tensors` is empty, or a tensor has the wrong rank or device, is empty, or overlaps itself.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        check_sequence("tensors", tensors, of="tensors")
        if not tensors:
            raise ShapeError("tensors: the list is empty; pass the caches of every layer")
        views, rows, offset, dense = [], [], 0, True
        for index, tensor in enumerate(tensors):
            name = f"tensors[{index}]"
            check_tensor(name, tensor, shape=(None,) * 4, device=tensors[0].device if index else None)
            check_not_empty(name, tensor)
            check_no_overlap(name, tensor)
            # View fp8 as bytes, because torch does not support indexed copies of fp8.
            bits = tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.detach()
            extents = zip(tensor.stride()[1:], tensor.shape[1:], (1, 2, 3), strict=True)
            views.append(view := bits.permute(0, *(dim for _, _, dim in sorted(extents, reverse=True))))
            nbytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
            dense &= view[0].is_contiguous()
            address = 0 if tensor.device.type == "meta" else tensor.data_ptr()
            rows.append((address, tensor.stride(0) * tensor.dtype.itemsize, offset, nbytes))
            offset += nbytes
        self.device, self.page_bytes = tensors[0].device, offset
        self.num_pages = min(len(tensor) for tensor in tensors)
        self._views, self._rows = tuple(views), rows
        common = math.gcd(16, *(value for row in rows for value in row))
        self._word, self._aligned, self._dense = min(common, 8), common == 16, dense
        words = np.array(rows, np.int64)
        words[:, 1:] //= self._word
        self._block, self._programs, self._num_warps = _BLOCK, _PROGRAMS, _NUM_WARPS
        self._blocks = -(-int(words[:, 3].max()) // self._block)
        self._table = torch.from_numpy(words).to(self.device)
        self._kernels: dict[bool, Any] = {}  # compiled kernels, launched without Triton's binder

    def pack(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy pages to `out`.

        pages  [n]               int64  device; in range, may repeat
        out    [n * page_bytes]  uint8  device; its address is a multiple of 16

        Not capture-safe, because page ids change. Runs on the current stream without waiting.
        """
        self._move(pages, out, pack=True)

    def unpack(self, pages: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a block written by `pack` to `pages`, which must be distinct; otherwise like `pack`."""
        self._move(pages, source, pack=False)

    def copy(self, src_pages: Pages, dst_pages: Pages) -> None:
        """Copy page src_pages[i] to page dst_pages[i].

        src_pages   may repeat; all pages are read before any page is written
        dst_pages   distinct

        Not capture-safe, because page ids are host values. Runs on the current stream without waiting.
        Raises: ShapeError: if the lists differ in length, a page is out of range, or `dst_pages` repeats a page.
        """
        advice = "pass allocated pages"
        src = check_ints("src_pages", src_pages, 0, self.num_pages - 1, advice=advice)
        dst = check_ints("dst_pages", dst_pages, 0, self.num_pages - 1, advice=advice)
        if len(src) != len(dst):
            raise ShapeError(
                f"dst_pages: expected {len(src)} pages, one per source page, got {len(dst)}; pass one target per source"
            )
        check_distinct("dst_pages", dst)
        if len(dst):
            block = torch.empty(len(src) * self.page_bytes, dtype=torch.uint8, device=self.device)
            both = self.upload(np.concatenate((src, dst)))
            self.pack(both[: len(src)], block)
            self.unpack(both[len(src) :], block)

    def warm_up(self) -> None:
        """Compile and load the kernels before the first copy. Copies nothing; further calls do nothing."""
        if self._dense and self.device.type == "cuda" and not self._kernels:
            nothing = torch.empty(2, dtype=torch.int64, device=self.device)
            for pack in (True, False):
                self._launch(nothing, nothing.view(torch.uint8), 0, pack=pack)

    def upload(self, pages: npt.NDArray[np.int64], out: torch.Tensor | None = None) -> torch.Tensor:
        """Upload page ids from pinned memory on the current stream without waiting, and return the device tensor.

        out   [>= n]  int64  device; the destination. None: allocate one
        """
        if self.device.type == "cpu":
            return torch.from_numpy(pages)
        pinned = torch.empty(len(pages), dtype=torch.int64, device="cpu", pin_memory=True)
        pinned.numpy()[:] = pages
        if out is None:
            return pinned.to(self.device, non_blocking=True)
        return out[: len(pages)].copy_(pinned, non_blocking=True)

    def _move(self, pages: torch.Tensor, packed: torch.Tensor, *, pack: bool) -> None:
        count = len(pages)
        if self._dense and (self.device.type == "cuda" or cpu_runs_triton()):
            self._launch(pages, packed, count, pack=pack)
        elif count:
            with torch.inference_mode():  # inference tensors can only be written in this mode
                self._move_reference(pages, packed.view(count, self.page_bytes), pack=pack)

    def _launch(self, pages: torch.Tensor, packed: torch.Tensor, count: int, *, pack: bool) -> None:
        programs = min(max(1, count * len(self._rows) * self._blocks), self._programs)
        arguments = (
            self._table, pages, packed.view(_WORDS[self._word]), count, len(self._rows), self._blocks,
            self.page_bytes // self._word, _TRITON_WORDS[self._word], self._block, self._aligned, pack,
        )  # fmt: skip
        # Triton launches on the current device, which may not be the tensors' device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if (kernel := self._kernels.get(pack)) is not None:
                kernel[programs, 1, 1](*arguments)
                return
            kernel = _move_pages_kernel[(programs,)](*arguments, num_warps=self._num_warps)
        if kernel is not None:  # None under the interpreter
            self._kernels[pack] = kernel

    def _move_reference(self, pages: torch.Tensor, packed: torch.Tensor, *, pack: bool) -> None:
        for view, (_, _, offset, nbytes) in zip(self._views, self._rows, strict=True):
            part = packed[:, offset : offset + nbytes]
            if pack:
                part.copy_(view.index_select(0, pages).flatten(1).view(torch.uint8))
            else:
                block = torch.empty((len(pages), *view.shape[1:]), dtype=view.dtype, device=self.device)
                block.flatten(1).view(torch.uint8).copy_(part)
                view.index_copy_(0, pages, block)


def check_distinct(name: str, pages: npt.NDArray[np.int64]) -> None:
    """Raise ShapeError if a page to write is listed twice."""
    ordered = np.sort(pages)
    again = ordered[1:] == ordered[:-1]
    if again.any():
        twice = ordered[again.argmax()]
        raise ShapeError(f"{name}: page {twice} is listed twice, so its contents would be undefined; list it once")


def compile_variants() -> list[CompileSpec]:
    """Return the variants for both directions, with the widest and the narrowest words."""
    specs = []
    for name, word, kind, aligned in (("wide", tl.int64, "i64", True), ("bytes", tl.uint8, "u8", False)):
        for way in ("pack", "unpack"):
            constexprs: dict[str, object] = {"WORD": word, "BLOCK": _BLOCK, "ALIGNED": aligned, "PACK": way == "pack"}
            pointers = {"table_ptr": "*i64", "pages_ptr": "*i64", "packed_ptr": f"*{kind}"}
            divisible = ("table_ptr", "packed_ptr")
            variant = f"{way}_pages_{name}"
            specs.append(
                CompileSpec(variant, _move_pages_kernel, pointers, constexprs, _NUM_WARPS, 3, divisible=divisible)
            )
    return specs
