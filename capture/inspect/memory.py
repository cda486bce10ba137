"""Memory regions by address, and their owners.

    memory = MemoryMap([Region("x", Owner.STATIC, x.data_ptr(), x.nbytes), ...])
    memory.find(0x7f0000001000)          # the region that contains this byte, or None

`memory_of` in pool.py returns the map of a process: named tensors, the pool of a graph, torch's allocator.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt


class Owner(str, Enum):
    """Owner of a region.

    STATIC     a registered buffer that graphs read and write
    WEIGHT     a parameter or a buffer of a model
    CACHE      keys and values
    POOL       a block of the graph's memory pool
    ALLOCATOR  another block of torch's allocator, which may be freed
    LIBRARY    an allocation known to the driver but not to torch, such as workspaces and state of libraries
    HOST       pinned host memory
    """

    STATIC = "static"
    WEIGHT = "weight"
    CACHE = "cache"
    POOL = "pool"
    ALLOCATOR = "allocator"
    LIBRARY = "library"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Region:
    """A range of memory.

    live   False for a freed block
    """

    name: str
    owner: Owner
    address: int
    nbytes: int
    live: bool = True

    @property
    def end(self) -> int:
        """Address of the first byte after the region."""
        return self.address + self.nbytes


class MemoryMap:
    """Regions by address. If several regions contain a byte, a lookup returns the first of these regions in the list.

    regions   empty regions are dropped; the order matters only for overlaps
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        # Regions start and end only at cuts, so all bytes between two cuts have the same region.
        self.regions = tuple(region for region in regions if region.nbytes)
        self._cuts: list[int] = []
        self._holders: list[int] = []  # index in `regions` for the bytes after each cut; -1: no region
        self._sweep()
        self._cut_array = np.array(self._cuts, np.uint64)
        self._holder_array = np.array([-1, *self._holders], np.int64)  # starts before the first cut

    def find(self, address: int) -> Region | None:
        """Return the region that contains an address; None if there is none."""
        return self._held(bisect.bisect_right(self._cuts, address) - 1)

    def find_many(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the index in `regions` for each address; -1 if no region contains it."""
        return self._holder_array[np.searchsorted(self._cut_array, addresses, side="right")]

    def ranges(self, address: int, nbytes: int) -> Iterator[tuple[int, Region | None]]:
        """Yield the parts of a range by region: first address and region."""
        at, end = bisect.bisect_right(self._cuts, address) - 1, address + nbytes
        while address < end:
            yield address, self._held(at)
            at += 1
            address = self._cuts[at] if at < len(self._cuts) else end

    def before(self, address: int) -> Region | None:
        """Return the region directly before the gap or region that contains an address; None if there is none."""
        return self._held(bisect.bisect_right(self._cuts, address) - 2)

    def _held(self, at: int) -> Region | None:
        holder = self._holders[at] if at >= 0 else -1
        return self.regions[holder] if holder >= 0 else None

    def _sweep(self) -> None:
        events: dict[int, tuple[list[int], list[int]]] = {}
        for index, region in enumerate(self.regions):
            events.setdefault(region.address, ([], []))[0].append(index)
            events.setdefault(region.end, ([], []))[1].append(index)
        open_: list[int] = []
        for address in sorted(events):
            begins, ends = events[address]
            for index in begins:
                bisect.insort(open_, index)
            for index in ends:
                del open_[bisect.bisect_left(open_, index)]
            self._cuts.append(address)
            self._holders.append(open_[0] if open_ else -1)
