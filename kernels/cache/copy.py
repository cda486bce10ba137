"""Whole KV pages on the move: into one block of bytes, out of it, and from page to page of a cache (copy on write).

Not part of a graph: page lists are host values.
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

# How a launch is cut up: a packer reads these three when it is made. Decode steps run beside it, and their blocks need
# whole multiprocessors. A launch that ends soon holds them up less than one that takes few multiprocessors for long:
# docs/LOG.md, "Swaps beside steps".
_BLOCK = 1024
"""Words of up to 8 bytes that a program moves at a time."""

_PROGRAMS = 2048
"""Programs of a launch at most."""

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
    """Move pages between their places in all tensors and one block of bytes.

    1. A piece of work is a block of words of one page of one tensor. Programs take pieces in turns.
    2. The table says where the tensor is, how far apart its pages are, and where its part of a packed page begins.
    3. Words are copied, to the packed page or from it.
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
    """Gathers pages of some tensors into one block of bytes, and scatters them again.

    tensors     [num_pages, page_size, num_kv_heads, head_dim] each, any strides without overlap, any dtypes, one
                device; often K and V of all layers of a KV group
    num_pages   pages that all tensors have
    page_bytes  of one page, all tensors together

    A packed page holds the page of each tensor, one after the other, in the order of memory. Where pages are dense in
    every tensor, a packed block takes one launch, else one or two per tensor. Work runs on the tensors' device, on the
    stream that is current there, whichever device is current.

    Raises: ShapeError for what are no such tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        check_sequence("tensors", tensors, of="tensors")
        if not tensors:
            raise ShapeError("tensors: expected at least 1 tensor, got none; pass the caches of every layer")
        views, rows, offset, dense = [], [], 0, True
        for index, tensor in enumerate(tensors):
            name = f"tensors[{index}]"
            check_tensor(name, tensor, shape=(None,) * 4, device=tensors[0].device if index else None)
            check_not_empty(name, tensor)
            check_no_overlap(name, tensor)
            # fp8 as bytes: torch has no indexed copies of fp8.
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
        self._kernels: dict[bool, Any] = {}  # compiled: launched without Triton's binder, which looks at every argument

    def pack(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy pages into `out`.

        pages  [n]               int64  device, in range; may repeat
        out    [n * page_bytes]  uint8  device, its address a multiple of 16

        Capture-safe: no, page ids change. Runs on the current stream, and the host does not wait.
        """
        self._move(pages, out, pack=True)

    def unpack(self, pages: torch.Tensor, source: torch.Tensor) -> None:
        """Copy what `pack` wrote to pages, all different. As `pack` otherwise."""
        self._move(pages, source, pack=False)

    def copy(self, src_pages: Pages, dst_pages: Pages) -> None:
        """Copy page src_pages[i] to page dst_pages[i].

        src_pages   may repeat; all are read before any page is written
        dst_pages   all different

        Capture-safe: no, page ids are host values. Runs on the current stream, and the host does not wait.
        Raises: ShapeError for lists of different lengths, pages out of range, or a page that is written twice.
        """
        advice = "pass allocated pages"
        src = check_ints("src_pages", src_pages, 0, self.num_pages - 1, advice=advice)
        dst = check_ints("dst_pages", dst_pages, 0, self.num_pages - 1, advice=advice)
        if len(src) != len(dst):
            raise ShapeError(f"dst_pages: expected {len(src)} pages, one per source page, got {len(dst)}; pair them up")
        check_distinct("dst_pages", dst)
        if len(dst):
            block = torch.empty(len(src) * self.page_bytes, dtype=torch.uint8, device=self.device)
            both = self.upload(np.concatenate((src, dst)))
            self.pack(both[: len(src)], block)
            self.unpack(both[len(src) :], block)

    def warm_up(self) -> None:
        """Compile and load the kernels, so that no later call does. Moves nothing, and nothing a second time."""
        if self._dense and self.device.type == "cuda" and not self._kernels:
            nothing = torch.empty(2, dtype=torch.int64, device=self.device)
            for pack in (True, False):
                self._launch(nothing, nothing.view(torch.uint8), 0, pack=pack)

    def upload(self, pages: npt.NDArray[np.int64], out: torch.Tensor | None = None) -> torch.Tensor:
        """Page ids on the device, uploaded on the current stream from pinned memory: the host does not wait.

        out   [at least as many]  int64  device; where they go. None: memory of their own
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
            with torch.inference_mode():  # caches may be inference tensors, which are written in this mode alone
                self._move_reference(pages, packed.view(count, self.page_bytes), pack=pack)

    def _launch(self, pages: torch.Tensor, packed: torch.Tensor, count: int, *, pack: bool) -> None:
        programs = min(max(1, count * len(self._rows) * self._blocks), self._programs)
        arguments = (
            self._table, pages, packed.view(_WORDS[self._word]), count, len(self._rows), self._blocks,
            self.page_bytes // self._word, _TRITON_WORDS[self._word], self._block, self._aligned, pack,
        )  # fmt: skip
        # Triton launches on the current device, which need not be the one of the tensors.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if (kernel := self._kernels.get(pack)) is not None:
                kernel[programs, 1, 1](*arguments)
                return
            kernel = _move_pages_kernel[(programs,)](*arguments, num_warps=self._num_warps)
        if kernel is not None:  # under the interpreter there is none
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
    """Raise ShapeError where a page is listed twice, to be written."""
    ordered = np.sort(pages)
    again = ordered[1:] == ordered[:-1]
    if again.any():
        twice = ordered[again.argmax()]
        raise ShapeError(f"{name}: expected different pages, got page {twice} twice; the result would be undefined")


def compile_variants() -> list[CompileSpec]:
    """Both ways, in the widest words and in the narrowest."""
    specs = []
    for name, word, kind, aligned in (("wide", tl.int64, "i64", True), ("bytes", tl.uint8, "u8", False)):
        for way in ("pack", "unpack"):
            constexprs: dict[str, object] = {"WORD": word, "BLOCK": _BLOCK, "ALIGNED": aligned, "PACK": way == "pack"}
            pointers = {"table_ptr": "*i64", "pages_ptr": "*i64", "packed_ptr": f"*{kind}"}
            signature = {
                argument: "constexpr" if argument in constexprs else pointers.get(argument, "i32")
                for argument in _move_pages_kernel.arg_names
            }
            divisible = ("table_ptr", "packed_ptr")
            variant = f"{way}_pages_{name}"
            specs.append(
                CompileSpec(variant, _move_pages_kernel, signature, constexprs, _NUM_WARPS, 3, divisible=divisible)
            )
    return specs
