"""Copies of whole KV pages: within a cache (copy on write), and between caches (swapping out to the host, and in).

Not part of a graph: page lists are host values. torch's indexed copies run at memory speed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.kernels.errors import ShapeError


def copy_pages(
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    src_pages: Sequence[int],
    dst_pages: Sequence[int],
) -> None:
    """Copy page src_pages[i] to page dst_pages[i] in the K and V cache of every layer.

    k_caches, v_caches  per layer [num_pages, page_size, num_kv_heads, head_dim]  any strides, any dtype, one device
    src_pages           may repeat; all are read before any page is written
    dst_pages           all different

    Capture-safe: no, page ids are host values. Runs on the current stream.
    Raises: ShapeError for lists of different lengths, pages out of range, or a page that is written twice.
    """
    caches = (*k_caches, *v_caches)
    _check_pages(caches, caches, src_pages, dst_pages)
    if len(dst_pages) == 0:
        return
    src, dst = _index(src_pages, caches[0].device), _index(dst_pages, caches[0].device)
    for cache in map(_bits, caches):
        cache.index_copy_(0, dst, cache.index_select(0, src))


def swap_pages(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_pages: Sequence[int],
    dst_pages: Sequence[int],
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
    if len(src) != len(dst):
        raise ShapeError(f"dst: expected {len(src)} tensors, as in src, got {len(dst)}; pass caches of one model")
    for index, (a, b) in enumerate(zip(src, dst, strict=True)):
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise ShapeError(
                f"dst[{index}]: expected pages of {list(a.shape[1:])} {a.dtype}, got {list(b.shape[1:])} {b.dtype}; "
                "pass caches of one model"
            )
    _check_pages(src, dst, src_pages, dst_pages)
    if len(dst_pages) == 0:
        return
    src_index, dst_index = _index(src_pages, src[0].device), _index(dst_pages, dst[0].device)
    for a, b in zip(map(_bits, src), map(_bits, dst), strict=True):
        b.index_copy_(0, dst_index, _gather(a, src_index, b.device))


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """fp8 pages as bytes: torch has no indexed copies of fp8."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _gather(cache: torch.Tensor, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The pages of `index`, on `device`. On the way to the GPU pinned memory saves the host from waiting."""
    if cache.device.type == "cpu" and device.type == "cuda":
        staged = torch.empty((len(index), *cache.shape[1:]), dtype=cache.dtype, pin_memory=True)
        torch.index_select(cache, 0, index, out=staged)
        return staged.to(device, non_blocking=True)
    return cache.index_select(0, index).to(device)


def _index(pages: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([int(page) for page in pages], dtype=torch.int64).to(device)


def _check_pages(
    src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], src_pages: Sequence[int], dst_pages: Sequence[int]
) -> None:
    if len(src_pages) != len(dst_pages):
        raise ShapeError(
            f"dst_pages: expected {len(src_pages)} pages, one per source page, got {len(dst_pages)}; pair them up"
        )
    for name, pages, caches in (("src_pages", src_pages, src), ("dst_pages", dst_pages, dst)):
        limit = min((cache.shape[0] for cache in caches), default=0)
        for page in pages:
            if not 0 <= page < limit:
                raise ShapeError(f"{name}: expected pages from 0 to {limit - 1}, got {page}; pass allocated pages")
    if len(set(dst_pages)) != len(dst_pages):
        twice = next(page for i, page in enumerate(dst_pages) if page in dst_pages[:i])
        raise ShapeError(f"dst_pages: expected different pages, got page {twice} twice; the result would be undefined")
