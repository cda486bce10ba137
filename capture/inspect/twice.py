"""Compare two captures of the same step to find addresses, state that the step keeps, and values that it freezes.

The comparison covers arguments of kernels that have a signature, 4-byte arguments, copy lengths, and number arguments
of ops in an op trace. It does not cover numbers within structs, such as the factor of `torch.mul(x, 2.0)` on CUDA,
because structs contain uninitialized bytes. `verify` finds such numbers by comparing results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from graphrt.capture.inspect.address_findings import AddressFinding, registered, where_in
from graphrt.capture.inspect.findings import Finding, FindingKind
from graphrt.capture.inspect.lookup import Lookup
from graphrt.capture.inspect.memory import Owner, Region
from graphrt.capture.inspect.scan import WORD
from graphrt.capture.inspect.view import Node, Place
from graphrt.kernels.errors import ConfigError

_NUMBER_BYTES = 4


def compare(first: Lookup, second: Lookup, found: list[AddressFinding]) -> list[Finding]:
    """Return the findings about the second capture. `found` contains the findings from the addresses of the second
    capture.

    Raises:
        ConfigError: if both captures use the same pool.
    """
    _check_pools(first, second)
    if (difference := _first_difference(first, second)) is not None:
        return [difference, *(_hidden_or_same(first, one.finding) for one in found)]
    judged = (_judged(first, second, one) for one in found)
    return [finding for finding in judged if finding is not None] + [
        *_moved_words(first, second), *_moved_operands(first, second), *_changed_scalars(first, second)
    ]  # fmt: skip


def _check_pools(first: Lookup, second: Lookup) -> None:
    starts = np.array([r.address for r in second.memory.regions if r.owner is Owner.POOL], np.uint64)
    shared = [at for at in first.memory.find_many(starts).tolist() if at >= 0 and _in_pool(first.memory.regions[at])]
    if shared:
        raise ConfigError("capture: both calls captured into one pool; create a graph per call, and do not pass pool=")


def _in_pool(region: Region | None) -> bool:
    return region is not None and region.owner is Owner.POOL


def _shape(node: Node) -> tuple[object, ...]:
    lengths = tuple(len(argument.data) for argument in node.arguments)
    return node.kind, node.name, node.grid, node.block, node.shared_bytes, lengths, len(node.operands)


def _first_difference(first: Lookup, second: Lookup) -> Finding | None:
    """Return a finding about the first node in which the captures differ."""
    ours, theirs = list(second.view.walk()), list(first.view.walk())
    for (place, node), (_, other) in zip(ours, theirs, strict=False):
        if _shape(node) != _shape(other):
            launch = "" if node.grid == other.grid else f" with grid {other.grid} and then {node.grid}"
            return _changed(
                place, node, "", 0,
                f"the captures differ, {other.name!r} in the first and {node.name!r} in the second{launch}; the step "
                "computes something once and keeps it, or a launch depends on a host number",
            )  # fmt: skip
    if len(ours) == len(theirs):
        return None
    longer = ours if len(ours) > len(theirs) else theirs
    place, node = longer[min(len(ours), len(theirs))]
    return _changed(
        place if longer is ours else (), node, "", 0,
        f"the captures differ, {len(theirs)} nodes in the first and {len(ours)} in the second; {node.name!r} is in "
        f"one capture only, so the step computes something once and skips it later",
    )  # fmt: skip


def _hidden_or_same(first: Lookup, finding: Finding) -> Finding:
    """Return the finding, with the kind HIDDEN_STATE if the address is in the first capture's pool."""
    if not _in_pool(first.memory.find(finding.address)):
        return finding
    text = (
        "an earlier capture of the step allocated this memory, so the step keeps a tensor between captures; allocate "
        "it before the first capture and register it, or allocate it in every capture"
    )
    return replace(finding, text=text, kind=FindingKind.HIDDEN_STATE)


def _judged(first: Lookup, second: Lookup, one: AddressFinding) -> Finding | None:
    """Return the finding after comparing both captures; None for a stale word."""
    finding = _hidden_or_same(first, one.finding)
    if finding.certain:
        return finding
    earlier = int(first.words.values_at(np.array([one.at]))[0])
    region = first.find(earlier)
    if region is None:
        return None  # the other capture has no address here
    if one.in_tensor_list:
        return finding  # an unused entry contains stack data, which may be equal in both captures
    agree = earlier == finding.address or region.owner in (Owner.ALLOCATOR, Owner.HOST)
    return replace(finding, certain=agree)


def _moved_words(first: Lookup, second: Lookup) -> Iterator[Finding]:
    """Yield words that point to different bytes of registered memory in the two captures."""
    words = second.words
    if not len(words.at):
        return
    named = np.array([registered(region) for region in second.regions] + [False], np.bool_)
    earlier: npt.NDArray[np.uint64] = first.words.values_at(words.at)
    for index in np.flatnonzero(named[second.holder] & (earlier != words.value)).tolist():
        before, now = first.find(int(earlier[index])), second.regions[int(second.holder[index])]
        if before is not None and registered(before):
            ref, offset = words.argument_at(int(words.at[index]))
            address = int(words.value[index])
            yield _moved(ref.place, ref.node, where_in(ref, offset), address, int(earlier[index]), before, now)


def _moved_operands(first: Lookup, second: Lookup) -> Iterator[Finding]:
    for (place, node), (_, other) in zip(second.view.walk(), first.view.walk(), strict=True):
        for operand, old in zip(node.operands, other.operands, strict=True):
            if operand.address == old.address or not operand.nbytes:
                continue
            before, now = first.find(old.address), second.find(operand.address)
            if before is not None and now is not None and registered(before) and registered(now):
                yield _moved(place, node, f"operand {operand.role}", operand.address, old.address, before, now)


def _moved(
    place: Place, node: Node, where: str, address: int, earlier: int, before: Region, now: Region
) -> Finding:  # fmt: skip
    text = (
        f"the address differs between captures, byte {earlier - before.address} of {before.name!r} and then byte "
        f"{address - now.address} of {now.name!r}; a graph keeps the address of its capture, so choose on the device"
    )
    return Finding(place, node.name, where, address, now.owner, now.name, text, FindingKind.CHANGED)


def _changed_scalars(first: Lookup, second: Lookup) -> Iterator[Finding]:
    """Yield numbers that differ, in ops and in arguments where the addresses are known."""
    advice = "a graph keeps the number of its capture, so keep it in a tensor"
    for (place, node), (_, other) in zip(second.view.walk(), first.view.walk(), strict=True):
        for index, (argument, old) in enumerate(zip(node.arguments, other.arguments, strict=True)):
            pointers = argument.pointers
            if pointers is None and len(argument.data) == _NUMBER_BYTES:
                pointers = ()  # too short for an address, too long for a functor without members
            if pointers is None or argument.data == old.data:
                continue
            now, before = _numbers(argument.data, pointers), _numbers(old.data, pointers)
            if now != before:
                name = f"argument {index} {argument.name!r}" if argument.name else f"argument {index}"
                yield _changed(
                    place, node, name, 0,
                    f"the number differs between captures, bytes {before.hex()} and then {now.hex()}; {advice}",
                )  # fmt: skip
        changed = [(n, old, v) for (n, v), (_, old) in zip(node.scalars, other.scalars, strict=False) if v != old]
        for name, old_value, value in changed:
            yield _changed(
                place, node, f"argument {name!r}", 0,
                f"the number differs between captures, {old_value} and then {value}; {advice}",
            )  # fmt: skip
        sizes = [
            (o, was.nbytes) for o, was in zip(node.operands, other.operands, strict=True) if o.nbytes != was.nbytes
        ]
        if sizes and not changed:
            operand, nbytes = sizes[0]
            yield _changed(
                place, node, f"operand {operand.role}", operand.address,
                f"the length differs between captures, {nbytes} and then {operand.nbytes} bytes; a graph keeps the "
                "length of its capture, so use the largest length and a mask",
            )  # fmt: skip


def _numbers(data: bytes, pointers: tuple[int, ...]) -> bytes:
    """Return the bytes with zeros in place of addresses."""
    left = bytearray(data)
    for offset in pointers:
        left[offset : offset + WORD] = bytes(WORD)
    return bytes(left)


def _changed(place: Place, node: Node, where: str, address: int, text: str) -> Finding:
    return Finding(place, node.name, where, address, None, "", text, FindingKind.CHANGED)
