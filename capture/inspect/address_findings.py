"""Findings about single addresses: classification of regions, and texts of the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graphrt.capture.inspect.findings import Finding, FindingKind
from graphrt.capture.inspect.lookup import Lookup
from graphrt.capture.inspect.memory import Owner, Region
from graphrt.capture.inspect.scan import ArgumentRef
from graphrt.capture.inspect.view import Node, NodeKind, Operand, Place

_LONGEST_STRUCT = 256  # bytes; a longer argument may be a list of tensors with unused entries
_REGISTERED = frozenset({Owner.STATIC, Owner.WEIGHT, Owner.CACHE})


@dataclass(frozen=True, slots=True)
class AddressFinding:
    """A finding about one address, and the position of the address.

    at              position of a word in the bytes of all arguments; -1 for an operand
    in_tensor_list  whether the word may be in a fixed-length list with unused entries, as in kernels for many
                    tensors
    """

    finding: Finding
    at: int = -1
    in_tensor_list: bool = False


def registered(region: Region | None) -> bool:
    """Return whether the caller registered the region as device memory."""
    return region is not None and region.owner in _REGISTERED


def findings_in_words(lookup: Lookup) -> Iterator[AddressFinding]:
    """Yield findings in the arguments of kernels. A scanned word without a region counts as a number."""
    words = lookup.words
    # A word without a region has the index -1, which selects the last element.
    bad = np.array([_is_invalid(region) for region in lookup.regions] + [False], np.bool_)
    unmapped = words.exact & (lookup.holder < 0) & (words.value != 0)
    for index in np.flatnonzero(bad[lookup.holder] | unmapped).tolist():
        at, holder = int(words.at[index]), int(lookup.holder[index])
        ref, offset = words.argument_at(at)
        region = lookup.regions[holder] if holder >= 0 else None
        finding = _finding(
            lookup, ref.place, ref.node, where_in(ref, offset), int(words.value[index]), region,
            certain=bool(words.exact[index]),
        )  # fmt: skip
        yield AddressFinding(finding, at=at, in_tensor_list=len(ref.argument.data) > _LONGEST_STRUCT)


def findings_in_operands(lookup: Lookup, owners: Counter[Owner]) -> Iterator[AddressFinding]:
    """Yield a finding at the first invalid byte of each operand, and count valid operands in `owners`."""
    for place, node in lookup.view.walk():
        if node.kind in (NodeKind.ALLOC, NodeKind.FREE):
            continue  # these nodes define memory
        for operand in node.operands:
            if not operand.address:  # unknown to the driver
                continue
            finding = _of_operand(lookup, owners, place, node, operand)
            if finding is not None:
                yield AddressFinding(finding)


def where_in(ref: ArgumentRef, offset: int) -> str:
    """Return a position in an argument as text, such as "argument 3 'x', byte 16"."""
    name = f" {ref.argument.name!r}" if ref.argument.name else ""
    return f"argument {ref.index}{name}, byte {offset}"


def _is_invalid(region: Region) -> bool:
    return region.owner in (Owner.ALLOCATOR, Owner.HOST) or (not region.live and region.owner is not Owner.POOL)


def _of_operand(
    lookup: Lookup, owners: Counter[Owner], place: Place, node: Node, operand: Operand
) -> Finding | None:  # fmt: skip
    where, previous = f"operand {operand.role}", None
    for address, region in lookup.ranges(operand):
        if address == operand.address:
            owners[Owner.HOST if operand.host else region.owner if region else Owner.ALLOCATOR] += bool(region)
        if operand.host or (region is not None and region.owner is Owner.HOST):
            if operand.written and region in lookup.memory.regions:
                return None  # the caller registered the buffer
            return _finding(lookup, place, node, where, address, region, host=True)
        if region is None or _is_invalid(region):
            return _finding(lookup, place, node, where, address, region, after=previous)
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
    after: Region | None = None,
) -> Finding:
    """Return the finding for an invalid address. `after`: the registered region in which the operand starts."""
    if host or (region is not None and region.owner is Owner.HOST):
        kind, text = FindingKind.HOST_MEMORY, (
            "every replay accesses this host memory again; copy before the launch, or allow it with the reason why "
            "nothing changes the buffer while a launch is in flight"
        )  # fmt: skip
        return Finding(place, node.name, where, address, Owner.HOST, region.name if region else "", text, kind, certain)
    if after is None and region is not None:
        after = lookup.memory.before(address)
        after = after if registered(after) and after is not None and region.address < after.end else None
    if registered(after) and after is not None:
        kind, text = FindingKind.OVERRUN, (
            f"byte {address - after.address} is past the end of {after.owner.value} {after.name!r} with {after.nbytes} "
            "bytes; register all memory that the step uses, or pass the step a smaller view"
        )  # fmt: skip
    elif region is None:
        kind, text = FindingKind.UNMAPPED, (
            "neither the map nor the driver knows this address, so its tensor was freed; keep the tensor alive as "
            "long as the graph, or register it: pass the tensor, or pool=graph, to memory_of()"
        )  # fmt: skip
    elif not region.live:
        kind, text = FindingKind.FREED, (
            f"the memory is free, {region.name!r}, and its next owner changes what the graph reads; keep the tensor "
            "alive as long as the graph"
        )  # fmt: skip
    else:
        kind, text = FindingKind.FOREIGN, (
            f"{region.name!r} of {region.nbytes} bytes is neither registered nor in the graph's pool, so it may be "
            f"freed; pass it to memory_of(), or allocate it during the capture"
        )  # fmt: skip
    owner, name = (region.owner, region.name) if region else (None, "")
    return Finding(place, node.name, where, address, owner, name, text, kind, certain)
