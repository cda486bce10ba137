"""The memory that a graph may work on, by address: who owns each piece.

    memory = MemoryMap([Region("x", Owner.STATIC, x.data_ptr(), x.nbytes), ...])
    memory.find(0x7f0000001000)          # the region that holds this byte, or None

`memory_of` of pool.py makes the map of a process: named tensors, the pool of a graph, torch's allocator.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt


class Owner(str, Enum):
    """Whose memory a region is.

    STATIC     the caller's buffer that graphs are to read and write
    WEIGHT     a parameter or a buffer of a model
    CACHE      keys and values
    POOL       a block of the graph's memory pool
    ALLOCATOR  another block of torch's allocator: nobody has promised that it stays
    LIBRARY    the driver knows the memory, torch does not: workspaces and state of libraries
    HOST       pinned memory of the host
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
    """A piece of memory.

    live   whether it is allocated: a block of a pool that was freed is not
    """

    name: str
    owner: Owner
    address: int
    nbytes: int
    live: bool = True

    @property
    def end(self) -> int:
        """Address of the first byte behind it."""
        return self.address + self.nbytes


class MemoryMap:
    """Regions by address. Where several hold one byte, the one that was given first is found.

    regions   in any order; empty ones are left out
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        # Cut where any region begins or ends: between two cuts one region holds every byte, the first that was given.
        self.regions = tuple(region for region in regions if region.nbytes)
        self._cuts: list[int] = []
        self._holders: list[
            int
        ] = []  # index in `regions` of who holds the bytes from a cut on; -1 where no region does
        self._sweep()
        self._cut_array = np.array(self._cuts, np.uint64)
        self._holder_array = np.array([-1, *self._holders], np.int64)  # from before the first cut

    def find(self, address: int) -> Region | None:
        """The region that holds the byte at an address; None where no region does."""
        return self._held(bisect.bisect_right(self._cuts, address) - 1)

    def find_many(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """For each address the index in `regions` of what `find` gives; -1 where no region holds it."""
        return self._holder_array[np.searchsorted(self._cut_array, addresses, side="right")]

    def stretches(self, address: int, nbytes: int) -> Iterator[tuple[int, Region | None]]:
        """The bytes from an address on, cut where another region begins to hold them: first address, and region."""
        at, end = bisect.bisect_right(self._cuts, address) - 1, address + nbytes
        while address < end:
            yield address, self._held(at)
            at += 1
            address = self._cuts[at] if at < len(self._cuts) else end

    def before(self, address: int) -> Region | None:
        """The region that holds the last byte before the stretch around an address; None where no region does."""
        return self._held(bisect.bisect_right(self._cuts, address) - 2)

    def to_json(self) -> list[dict[str, Any]]:
        """The regions as values that `json.dumps` takes, in the order in which they were given."""
        return [
            {"name": r.name, "owner": r.owner.value, "address": r.address, "nbytes": r.nbytes, "live": r.live}
            for r in self.regions
        ]

    @staticmethod
    def from_json(values: Iterable[Mapping[str, Any]]) -> MemoryMap:
        """The regions that `to_json` wrote."""
        return MemoryMap(
            Region(str(v["name"]), Owner(v["owner"]), int(v["address"]), int(v["nbytes"]), bool(v["live"]))
            for v in values
        )

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
