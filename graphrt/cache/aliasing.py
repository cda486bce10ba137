"""Whether two K or V tensors of a cache lie in one place: views of one pool may interleave, but not meet."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphrt.kernels.checks import span_bytes
from graphrt.kernels.errors import ConfigError

_Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """K or V of one layer, `at` places behind the first tensor of the cache, and whose pages these are."""

    at: int
    name: str
    tensor: torch.Tensor
    group: int
    pool: int

    @property
    def begin(self) -> int:
        return self.tensor.data_ptr()

    @property
    def end(self) -> int:
        return self.begin + span_bytes(self.tensor)

    @property
    def byte_steps(self) -> _Steps:
        """Extent and stride of each dimension in bytes, pages first; the last is a run of bytes."""
        size = self.tensor.dtype.itemsize
        *outer, head = self.tensor.shape
        return (*zip(outer, (s * size for s in self.tensor.stride()), strict=False), (head * size, 1))


def check_disjoint(tensors: Iterable[Placed]) -> None:
    """Raise ConfigError where two tensors would overwrite each other.

    Groups of one pool may lie in the same memory page by page, since a page belongs to one of them at a time.
    """
    meet = functools.cache(_meet)  # in an interleaved pool most pairs look like another pair
    before: list[tuple[Placed, int, int, _Steps]] = []  # those that have not ended where the next one begins
    for one in sorted(tensors, key=lambda t: t.begin):
        begin, steps = one.begin, one.byte_steps
        before = [entry for entry in before if entry[2] > begin]
        for other, its_begin, _, its_steps in before:
            by_turns = one.pool == other.pool and one.group != other.group
            if meet(its_begin - begin, steps, its_steps, same_page=not by_turns):
                first, second = sorted((one, other), key=lambda t: t.at)
                raise ConfigError(
                    f"{second.name}: expected other memory than that of {first.name}, got elements of both in one "
                    "place; they would overwrite each other: pass tensors that share none, and name the layer whose "
                    "keys and values another reads by kv_shared_with"
                )
        before.append((one, begin, one.end, steps))


def _meet(away: int, ours: _Steps, theirs: _Steps, *, same_page: bool) -> bool:
    """Whether a byte belongs to both, of other pages alone without `same_page`. Theirs begins `away` behind ours."""
    (pages, stride), (others, its_stride) = ours[0], theirs[0]
    if stride != its_stride:
        return _reaches(away, _unknowns(ours, theirs))
    rest = _unknowns(ours[1:], theirs[1:])
    ranges = [(1 - others, pages - 1)] if same_page else [(1 - others, -1), (1, pages - 1)]
    return any(low <= high and _reaches(away, [(stride, low, high), *rest]) for low, high in ranges)


def _unknowns(ours: _Steps, theirs: _Steps) -> list[tuple[int, int, int]]:
    """Our place minus theirs as a sum: (step, least, most) of each term, long steps first.

    Dimensions of equal strides make one term, which has at most three values where strides are nested. So the search
    is short, whatever the number of pages.
    """
    terms: dict[int, tuple[int, int]] = {}
    for sign, dims in ((1, ours), (-1, theirs)):
        for extent, stride in (dim for dim in dims if dim[0] > 1):
            low, high = terms.get(stride, (0, 0))
            terms[stride] = (low, high + extent - 1) if sign > 0 else (low - extent + 1, high)
    return [(stride, low, high) for stride, (low, high) in sorted(terms.items(), reverse=True)]


def _reaches(away: int, terms: Sequence[tuple[int, int, int]]) -> bool:
    """Whether some choice of terms has the sum `away`. The last step is 1."""
    if not terms:
        return away == 0
    (step, low, high), *rest = terms
    least = sum(s * a for s, a, _ in rest)
    most = sum(s * b for s, _, b in rest)
    first, last = max(low, -((most - away) // step)), min(high, (away - least) // step)
    return any(_reaches(away - step * value, rest) for value in range(first, last + 1))
