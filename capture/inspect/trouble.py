"""Single addresses in trouble: which region makes a finding, and what the finding says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graphrt.capture.inspect.findings import Finding, FindingKind
from graphrt.capture.inspect.lookup import Lookup
from graphrt.capture.inspect.memory import Owner, Region
from graphrt.capture.inspect.scan import Slot
from graphrt.capture.inspect.view import Node, NodeKind, Operand, Place

_LONGEST_STRUCT = 256  # bytes; a longer argument may be a list for many tensors, with places that are not in use
_REGISTERED = frozenset({Owner.STATIC, Owner.WEIGHT, Owner.CACHE})


@dataclass(frozen=True, slots=True)
class Trouble:
    """A finding about one address, and where the address stands.

    at       of a word of an argument: where it stands among all arguments; -1 for an operand
    operand  of an operand: its index in the node; -1 for a word
    list_of_many   whether the word stands in a list of fixed length, as kernels for many tensors take: not all places
                   of such a list are in use
    """

    finding: Finding
    at: int = -1
    operand: int = -1
    list_of_many: bool = False


def registered(region: Region | None) -> bool:
    """Whether the caller has named the region as memory of the device."""
    return region is not None and region.owner in _REGISTERED


def troubles_of_words(lookup: Lookup) -> Iterator[Trouble]:
    """Of the kernels' arguments. A scanned word that nobody knows is a number."""
    words = lookup.words
    bad = np.array([_is_trouble(region) for region in lookup.regions] + [False], np.bool_)  # -1 is the last
    unmapped = words.exact & (lookup.holder < 0) & (words.value != 0)
    for index in np.flatnonzero(bad[lookup.holder] | unmapped).tolist():
        at, holder = int(words.at[index]), int(lookup.holder[index])
        slot, offset = words.slot_at(at)
        region = lookup.regions[holder] if holder >= 0 else None
        finding = _finding(
            lookup, slot.place, slot.node, where_in(slot, offset), int(words.value[index]), region,
            certain=bool(words.exact[index]),
        )  # fmt: skip
        yield Trouble(finding, at=at, list_of_many=len(slot.argument.data) > _LONGEST_STRUCT)


def troubles_of_operands(lookup: Lookup, owners: Counter[Owner]) -> Iterator[Trouble]:
    """Of copies, fills and ops: for each operand the first byte in trouble. Adds the operands to `owners`."""
    for place, node in lookup.view.walk():
        if node.kind in (NodeKind.ALLOC, NodeKind.FREE):
            continue  # they say what memory there is
        for index, operand in enumerate(node.operands):
            if not operand.address:  # the driver does not tell
                continue
            finding = _of_operand(lookup, owners, place, node, operand)
            if finding is not None:
                yield Trouble(finding, operand=index)


def where_in(slot: Slot, offset: int) -> str:
    """ "argument 3 'x', byte 16": the byte of the argument, which counts from the argument's first."""
    name = f" {slot.argument.name!r}" if slot.argument.name else ""
    return f"argument {slot.index}{name}, byte {offset}"


def _is_trouble(region: Region) -> bool:
    return region.owner in (Owner.ALLOCATOR, Owner.HOST) or (not region.live and region.owner is not Owner.POOL)


def _of_operand(
    lookup: Lookup, owners: Counter[Owner], place: Place, node: Node, operand: Operand
) -> Finding | None:  # fmt: skip
    where, previous = f"operand {operand.role}", None
    for address, region in lookup.stretches(operand):
        if address == operand.address:
            owners[Owner.HOST if operand.host else region.owner if region else Owner.ALLOCATOR] += bool(region)
        if operand.host or (region is not None and region.owner is Owner.HOST):
            if operand.written and region in lookup.memory.regions:
                return None  # the caller has named the buffer: it stays
            return _finding(lookup, place, node, where, address, region, host=True)
        if region is None or _is_trouble(region):
            return _finding(lookup, place, node, where, address, region, behind=previous)
        previous = region
    return None


def _finding(
    lookup: Lookup,
    place: Place,
    node: Node,
    where: str,
    address: int,
    region: Region | None,
    *,
    certain: bool = True,
    host: bool = False,
    behind: Region | None = None,
) -> Finding:
    """The finding about an address in trouble. `behind`: the registered region that an operand goes on from."""
    if host or (region is not None and region.owner is Owner.HOST):
        kind, text = FindingKind.HOST_MEMORY, (
            "expected memory of the device, got the host's, which every replay reads or writes again; copy before "
            "the launch, or allow it with the reason why nobody changes the buffer while a launch is in flight"
        )  # fmt: skip
        return Finding(place, node.name, where, address, Owner.HOST, region.name if region else "", text, kind, certain)
    if behind is None and region is not None:
        behind = lookup.memory.before(address)
        behind = behind if registered(behind) and behind is not None and region.address < behind.end else None
    if registered(behind) and behind is not None:
        kind, text = FindingKind.OVERRUN, (
            f"expected memory of {behind.owner.value} {behind.name!r}, got byte {address - behind.address} of its "
            f"{behind.nbytes}; register all that the step uses, or pass the step a view that ends where it may work"
        )  # fmt: skip
    elif region is None:
        kind, text = FindingKind.UNMAPPED, (
            "expected an address of allocated memory, got one that neither the map nor the driver knows; its tensor "
            "was freed: keep the tensor as long as the graph, or name it, or the graph's own by pool=, in memory_of()"
        )  # fmt: skip
    elif not region.live:
        kind, text = FindingKind.FREED, (
            f"expected memory that somebody holds, got {region.name!r}; whoever is given the block next changes what "
            "the graph reads: keep the tensor as long as the graph"
        )  # fmt: skip
    else:
        kind, text = FindingKind.FOREIGN, (
            f"expected memory that is registered or of the graph's pool, got {region.name!r} of {region.nbytes} bytes; "
            "nothing keeps it for the graph: name it in memory_of(), or make it within the capture"
        )  # fmt: skip
    owner, name = (region.owner, region.name) if region else (None, "")
    return Finding(place, node.name, where, address, owner, name, text, kind, certain)
