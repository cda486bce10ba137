"""Addresses as region name and offset, which are equal in two captures of the same step.

Addresses in a memory pool differ between captures, as do allocations of a graph. These regions are compared by
order of first use instead of by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.scan import WORD
from graphrt.capture.inspect.view import Argument, GraphView, NodeKind, place_name
from graphrt.kernels.checks import check_instance


@dataclass(frozen=True, slots=True)
class Spot:
    """An address in a region. `nameless`: the region's name may differ between two captures."""

    region: Region
    offset: int
    nameless: bool

    def __str__(self) -> str:
        return f"{self.region.name}+{self.offset:#x}"


class Symbols:
    """The regions that a graph accesses: its own allocations, then the regions of a map.

    memory   the map; None: only the graph's allocations are known
    """

    def __init__(self, view: GraphView, memory: MemoryMap | None) -> None:
        check_instance("view", view, GraphView, advice="pass inspect_graph(graph)")
        if memory is not None:
            check_instance("memory", memory, MemoryMap, advice="pass the map that memory_of() returns")
        self._made = MemoryMap(_made(view))
        self._memory = memory or MemoryMap(())

    def find(self, address: int) -> Spot | None:
        """Return the region of an address and the offset in it; None if unknown."""
        if region := self._made.find(address):
            return Spot(region, address - region.address, True)
        if region := self._memory.find(address):
            return Spot(region, address - region.address, region.owner is Owner.POOL)
        return None

    def parts(self, argument: Argument) -> tuple[list[tuple[int, Spot]], bytes]:
        """Return the addresses in an argument by offset, and its bytes with zeros in place of addresses.

        If the positions of addresses are unknown, every word that points into a region is an address.
        """
        data, offsets = argument.data, argument.pointers
        if offsets is None:
            offsets = tuple(range(-argument.offset % WORD, len(data) - WORD + 1, WORD))
        found = []
        for at in offsets:
            spot = self.find(int.from_bytes(data[at : at + WORD], "little"))
            if spot is not None:
                found.append((at, spot))
                data = data[:at] + bytes(WORD) + data[at + WORD :]
        return found, data


class Pairing:
    """Matches nameless regions of two graphs by first use."""

    def __init__(self) -> None:
        self._there: dict[Region, Region] = {}
        self._back: dict[Region, Region] = {}

    def same(self, here: Spot, there: Spot) -> bool:
        """Return whether both addresses are the same. Pairs their regions if both are new."""
        if here.nameless != there.nameless or here.offset != there.offset:
            return False
        if not here.nameless:
            return (here.region.name, here.region.owner) == (there.region.name, there.region.owner)
        partner = self._there.setdefault(here.region, there.region)
        return partner == there.region and self._back.setdefault(there.region, here.region) == here.region


def _made(view: GraphView) -> Iterator[Region]:
    for place, node in view.walk():
        for operand in node.operands:
            fresh = operand.role == ("memory" if node.kind is NodeKind.ALLOC else "out")
            if fresh and operand.written:
                yield Region(f"allocated by {place_name(place)}", Owner.POOL, operand.address, operand.nbytes)
