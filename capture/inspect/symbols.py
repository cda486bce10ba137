"""Addresses as places that two captures of one step share: the name of a region and the offset in it.

Memory of a pool lies elsewhere in each capture, and so does what a graph allocates. Such regions have no names to
compare. Two graphs use them alike if one numbering, by first use, gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.view import Argument, GraphView, NodeKind, place_name
from graphrt.kernels.checks import check_instance

_WORD = 8


@dataclass(frozen=True, slots=True)
class Spot:
    """An address in a region. `nameless`: two captures need not have the region under one name."""

    region: Region
    offset: int
    nameless: bool

    def __str__(self) -> str:
        return f"{self.region.name}+{self.offset:#x}"


class Symbols:
    """The regions that a graph works on: those that it allocates, then those of a map.

    memory   None: only what the graph allocates has a symbol
    """

    def __init__(self, view: GraphView, memory: MemoryMap | None) -> None:
        check_instance("view", view, GraphView, advice="pass inspect_graph(graph)")
        if memory is not None:
            check_instance("memory", memory, MemoryMap, advice="pass what memory_of() returns")
        self._made = MemoryMap(_made(view))
        self._memory = memory or MemoryMap(())

    def find(self, address: int) -> Spot | None:
        """Where an address is; None where no region has it."""
        if region := self._made.find(address):
            return Spot(region, address - region.address, True)
        if region := self._memory.find(address):
            return Spot(region, address - region.address, region.owner is Owner.POOL)
        return None

    def parts(self, argument: Argument) -> tuple[list[tuple[int, Spot]], bytes]:
        """The addresses in an argument by their offsets in it, and its bytes with zeros in their place.

        Where it is not known which words are addresses, those are that lie in a region.
        """
        data, offsets = argument.data, argument.pointers
        if offsets is None:
            offsets = tuple(range(-argument.offset % _WORD, len(data) - _WORD + 1, _WORD))
        found = []
        for at in offsets:
            spot = self.find(int.from_bytes(data[at : at + _WORD], "little"))
            if spot is not None:
                found.append((at, spot))
                data = data[:at] + bytes(_WORD) + data[at + _WORD :]
        return found, data


class Pairing:
    """Which nameless region of one graph is which of the other: whichever is met first on both sides."""

    def __init__(self) -> None:
        self._there: dict[Region, Region] = {}
        self._back: dict[Region, Region] = {}

    def same(self, here: Spot, there: Spot) -> bool:
        """Whether both are one place."""
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
                yield Region(f"made by {place_name(place)}", Owner.POOL, operand.address, operand.nbytes)
