"""The memory that a graph may work on, by address: who owns each piece.

memory = MemoryMap([Region("x", Owner.STATIC, x.data_ptr(), x.nbytes), ...])
memory.find(0x7f0000001000)          # the region that holds this byte, or None
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


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
        self._owners: list[Region | None] = []
        self._sweep()

    def find(self, address: int) -> Region | None:
        """The region that holds the byte at an address; None where no region does."""
        at = bisect.bisect_right(self._cuts, address) - 1
        return self._owners[at] if at >= 0 else None

    def to_json(self) -> list[dict[str, Any]]:
        """The regions as values that `json.dumps` takes, by address."""
        return [
            {"name": r.name, "owner": r.owner.value, "address": r.address, "nbytes": r.nbytes, "live": r.live}
            for r in sorted(self.regions, key=lambda region: region.address)
        ]

    @staticmethod
    def from_json(values: Iterable[Mapping[str, Any]]) -> MemoryMap:
        """The regions that `to_json` wrote."""
        return MemoryMap(
            Region(str(v["name"]), Owner(v["owner"]), int(v["address"]), int(v["nbytes"]), bool(v["live"]))
            for v in values
        )

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
            self._owners.append(self.regions[open_[0]] if open_ else None)
