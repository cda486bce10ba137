"""Overlap check of a cache's K and V tensors. Views of one pool may interleave, but must not share elements."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphrt.kernels.checks import span_bytes
from graphrt.kernels.errors import ConfigError

_Dims = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """K or V of one layer; errors name two tensors in the order of `index`."""

    index: int
    name: str
    tensor: torch.Tensor
    group: int
    pool: int


def check_disjoint(tensors: Iterable[CacheTensor]) -> None:
    """Raise ConfigError if two tensors share an element.

    Groups of one pool may share memory page by page, since a page belongs to one group at a time.
    """
    overlap = functools.cache(_overlap)  # in an interleaved pool most pairs repeat the offsets and strides of others
    open_spans: list[tuple[CacheTensor, int, int, _Dims]] = []  # tensors that end after the current one begins
    for tensor in sorted(tensors, key=lambda t: t.tensor.data_ptr()):
        begin, dims = tensor.tensor.data_ptr(), _byte_dims(tensor.tensor)
        open_spans = [entry for entry in open_spans if entry[2] > begin]
        for other, other_begin, _, other_dims in open_spans:
            share_pages = tensor.pool == other.pool and tensor.group != other.group
            if overlap(other_begin - begin, dims, other_dims, same_page=not share_pages):
                first, second = sorted((tensor, other), key=lambda t: t.index)
                raise ConfigError(
                    f"{second.name}: shares elements with {first.name}, so one would overwrite the other; pass tensors "
                    "that do not overlap, and use kv_shared_with for a layer that reads the KV of another layer"
                )
        open_spans.append((tensor, begin, begin + span_bytes(tensor.tensor), dims))


def _byte_dims(tensor: torch.Tensor) -> _Dims:
    """Return extent and stride in bytes of each dimension, pages first; the last dimension is a run of bytes."""
    size = tensor.dtype.itemsize
    *outer, head = tensor.shape
    return (*zip(outer, (s * size for s in tensor.stride()), strict=False), (head * size, 1))


def _overlap(offset: int, a: _Dims, b: _Dims, *, same_page: bool) -> bool:
    """Return whether two tensors share a byte in one page or, without `same_page`, only in different pages.

    `b` begins `offset` bytes after `a`.
    """
    (pages, stride), (other_pages, other_stride) = a[0], b[0]
    if stride != other_stride:
        return _reaches(offset, _terms(a, b))
    rest = _terms(a[1:], b[1:])
    ranges = [(1 - other_pages, pages - 1)] if same_page else [(1 - other_pages, -1), (1, pages - 1)]
    return any(low <= high and _reaches(offset, [(stride, low, high), *rest]) for low, high in ranges)


def _terms(a: _Dims, b: _Dims) -> list[tuple[int, int, int]]:
    """Return the address in `a` minus the address in `b` as terms (stride, min factor, max factor), long strides first.

    Dimensions of equal strides form one term. With nested strides `_reaches` then tries at most three values per term,
    for any number of pages.
    """
    terms: dict[int, tuple[int, int]] = {}
    for sign, dims in ((1, a), (-1, b)):
        for extent, stride in (dim for dim in dims if dim[0] > 1):
            low, high = terms.get(stride, (0, 0))
            terms[stride] = (low, high + extent - 1) if sign > 0 else (low - extent + 1, high)
    return [(stride, low, high) for stride, (low, high) in sorted(terms.items(), reverse=True)]


def _reaches(offset: int, terms: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether some choice of factors makes the sum equal `offset`. The last stride is 1."""
    if not terms:
        return offset == 0
    (stride, low, high), *rest = terms
    least = sum(s * a for s, a, _ in rest)
    most = sum(s * b for s, _, b in rest)
    first, last = max(low, -((most - offset) // stride)), min(high, (offset - least) // stride)
    return any(_reaches(offset - stride * value, rest) for value in range(first, last + 1))
