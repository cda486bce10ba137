"""Which bytes of the host memory of a SwapSpace are free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Extent = tuple[int, int]
"""First byte and number of bytes."""


class HostMemory:
    """Free bytes of the host memory, as sorted extents that do not touch."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[Extent] = [(0, nbytes)]

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, nbytes: int) -> list[Extent] | None:
        """Allocate extents of `nbytes` bytes in total, as few as possible; return None if fewer bytes are free."""
        if nbytes > self.num_free:
            return None
        fitting = [extent for extent in self._free if extent[1] >= nbytes]
        chosen = [min(fitting, key=lambda e: e[1])] if fitting else sorted(self._free, key=lambda e: -e[1])
        taken = []
        for start, size in chosen:
            if not nbytes:
                break
            used = min(size, nbytes)
            self._free.remove((start, size))
            if size > used:
                self._free.append((start + used, size - used))
            taken.append((start, used))
            nbytes -= used
        self._free.sort()
        return taken

    def give(self, extents: Sequence[Extent]) -> None:
        """Free extents that `take` returned."""
        merged: list[Extent] = []
        for start, size in sorted([*self._free, *extents]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                start, size = merged[-1][0], merged.pop()[1] + size
            merged.append((start, size))
        self._free = merged


def locate_bytes(extents: Sequence[Extent], at: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield offset in the data, offset in memory and size of each part of `nbytes` bytes of data stored in extents."""
    before = 0
    for start, size in extents:
        first, last = max(at, before), min(at + nbytes, before + size)
        if first < last:
            yield first - at, start + first - before, last - first
        before += size
