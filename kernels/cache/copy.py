"""Copies of whole KV pages: within a cache (copy on write), and between caches (swapping out to the host, and in).

Not part of a graph: page lists are host values. torch's indexed copies run at memory speed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from graphrt.kernels.checks import check_ints, check_sequence, check_tensor
from graphrt.kernels.errors import ShapeError

Pages = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
"""Page ids: a list, an array or a host tensor of any int dtype."""


def copy_pages(
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    src_pages: Pages,
    dst_pages: Pages,
) -> None:
    """Copy page src_pages[i] to page dst_pages[i] in the K and V cache of every layer.

    k_caches, v_caches  per layer [num_pages, page_size, num_kv_heads, head_dim]  any strides, any dtype, one device;
                        V may have heads of another size
    src_pages           may repeat; all are read before any page is written
    dst_pages           all different

    Capture-safe: no, page ids are host values. Runs on the current stream.
    Raises: ShapeError for lists of different lengths, pages out of range, or a page that is written twice.
    """
    check_sequence("k_caches", k_caches, of="tensors, one per layer")
    check_sequence("v_caches", v_caches, of="tensors, one per layer")
    caches = (*k_caches, *v_caches)
    src, dst = _check("caches", caches, caches, src_pages, dst_pages)
    if len(dst) == 0:
        return
    with torch.inference_mode():  # caches may be inference tensors, which are written in this mode alone
        src_index, dst_index = src.to(caches[0].device), dst.to(caches[0].device)
        for cache in map(_bits, caches):
            cache.index_copy_(0, dst_index, cache.index_select(0, src_index))


def swap_pages(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_pages: Pages,
    dst_pages: Pages,
) -> None:
    """Copy page src_pages[i] of each tensor of `src` to page dst_pages[i] of its partner in `dst`.

    src, dst   tensors [num_pages, page_size, num_kv_heads, head_dim] of equal dtype, pairwise of one page shape; each
               side on one device, often one on the GPU and the other in pinned host memory
    src_pages  may repeat
    dst_pages  all different

    The pages of one tensor travel as one block, on the current stream. From the GPU to the host the call waits for
    the data, since the host may read it next; into the GPU it does not.

    Capture-safe: no, page ids are host values.

    Raises: ShapeError for tensors that do not match, lists of different lengths, pages out of range, or a page that is
    written twice; nothing is written then.
    """
    check_sequence("src", src, of="tensors")
    check_sequence("dst", dst, len(src), of="tensors, as in src")
    from_pages, to_pages = _check("src", src, dst, src_pages, dst_pages)
    if len(to_pages) == 0:
        return
    with torch.inference_mode():  # as in copy_pages
        src_index, dst_index = from_pages.to(src[0].device), to_pages.to(dst[0].device)
        for a, b in zip(map(_bits, src), map(_bits, dst), strict=True):
            b.index_copy_(0, dst_index, _gather(a, src_index, b.device))


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """fp8 pages as bytes: torch has no indexed copies of fp8."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _gather(cache: torch.Tensor, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The pages of `index`, on `device`. On the way to the GPU pinned memory saves the host from waiting."""
    if cache.device.type == "cpu" and device.type == "cuda":
        staged = torch.empty((len(index), *cache.shape[1:]), dtype=cache.dtype, device="cpu", pin_memory=True)
        torch.index_select(cache, 0, index, out=staged)
        return staged.to(device, non_blocking=True)
    return cache.index_select(0, index).to(device)


def _check(
    name: str, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], src_pages: Pages, dst_pages: Pages
) -> tuple[torch.Tensor, torch.Tensor]:
    """The page ids of both sides as int64 tensors on the host."""
    if not src:
        raise ShapeError(f"{name}: expected at least 1 tensor, got none; pass the caches of every layer")
    for index, (a, b) in enumerate(zip(src, dst, strict=True)):
        for side, tensor, first in ((name, a, src[0]), ("dst", b, dst[0])):
            check_tensor(f"{side}[{index}]", tensor, shape=(None,) * 4, device=first.device)
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise ShapeError(
                f"dst[{index}]: expected pages of {list(a.shape[1:])} {a.dtype}, got {list(b.shape[1:])} {b.dtype}; "
                "pass caches of one model"
            )
    advice = "pass allocated pages"
    from_pages = check_ints("src_pages", src_pages, 0, min(len(cache) for cache in src) - 1, advice=advice)
    to_pages = check_ints("dst_pages", dst_pages, 0, min(len(cache) for cache in dst) - 1, advice=advice)
    if len(from_pages) != len(to_pages):
        raise ShapeError(
            f"dst_pages: expected {len(from_pages)} pages, one per source page, got {len(to_pages)}; pair them up"
        )
    pages, counts = np.unique(to_pages, return_counts=True)
    if len(pages) != len(to_pages):
        twice = pages[counts > 1][0]
        raise ShapeError(f"dst_pages: expected different pages, got page {twice} twice; the result would be undefined")
    return torch.from_numpy(from_pages), torch.from_numpy(to_pages)
