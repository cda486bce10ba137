"""Audit a captured graph, that is, check that every address in its nodes is in memory that stays valid.

    memory = memory_of(static={"x": x, "y": y}, weights=model, pool=graph)
    report = audit(graph, memory)
    print(report)
    report.raise_if_any()

Valid memory is registered static buffers, weights, the cache, the graph's own pool and library memory. Any other
address is a finding: unregistered memory, a freed block, bytes past the end of a buffer, or host memory that every
replay accesses again. A finding names the node, the argument and the owner of the memory.

The positions of addresses are known in arguments of Triton kernels and in operands of copies. In arguments of other
kernels any word may be an address, and a stale word in the padding of a struct may look like one. Such findings are not
`certain`; `audit_twice` captures the step a second time and resolves them. torch_kernels.py lists the bytes without
addresses in structs of PyTorch's kernels.

An audit of arguments cannot see addresses that a kernel loads from memory, indices, or the bytes that a kernel reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from graphrt.capture.inspect.address_findings import findings_in_operands, findings_in_words, registered, where_in
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.driver_memory import LookUp, driver_memory
from graphrt.capture.inspect.findings import Allowed, Audit, Finding, FindingKind, without_allowed
from graphrt.capture.inspect.lookup import Lookup
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.pool import memory_of
from graphrt.capture.inspect.scan import WORD, ArgumentRef
from graphrt.capture.inspect.twice import compare
from graphrt.capture.inspect.view import GraphView, Node, NodeKind, Place
from graphrt.kernels.checks import check_callable, check_instance, check_sequence, shown
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.ops.linear_native import EARLY_ADDRESSES

__all__ = ["Allowed", "Audit", "Finding", "FindingKind", "audit", "audit_twice", "memory_of"]


_WAIT = (
    "nvjet_*", "*cublasLt::*", "*flash::FlashAttnFwd*", "sample_chunks_kernel", "sample_rows_kernel",
    "sample_truncated*", "_check_rows_kernel", "_write_buffers_kernel", "attend_kernel", "decode_attention",
    "linear", "all_reduce", "exchange_heads",
)  # fmt: skip
"""Kernels of cuBLAS, FlashAttention 3 and graphrt that are launched early and wait on the device."""

_EARLY_ADDRESSES = {"linear": EARLY_ADDRESSES}
"""Kernels among these that load memory before they wait, with the byte offsets of its addresses in the first
argument."""


def audit(
    graph: Any,
    memory: MemoryMap,
    *,
    allowed: Sequence[Allowed] = (),
    waits: Collection[str] = (),
    driver: LookUp | None = None,
) -> Audit:
    """Check every address in the nodes of a graph.

    graph    a GraphView, or an argument of `inspect_graph`: a torch.cuda.CUDAGraph(keep_graph=True), its raw handle, a
             graph of a graphrt recorder, an op trace
    memory   the map that `memory_of` returned right after the capture
    allowed  deliberate exceptions. The report lists each exception with its reason and number of matches
    waits    name patterns of kernels that execute griddepcontrol.wait before they access memory of earlier kernels.
             Kernels of cuBLAS, FlashAttention 3 and graphrt are known; any other early launch is a finding, as is a
             load before the wait that is not from a weight
    driver   returns the region of an address that is not in the map; None: ask the CUDA driver, if available

    Launches no work and does not synchronize. Do not call it during a capture.

    Raises:
        ConfigError: if an argument has the wrong type.
    """
    _check_exceptions(allowed, waits)
    return _report(_lookup(graph, memory, driver), None, allowed, waits)


def audit_twice(
    capture: Callable[[], Any],
    memory: Callable[[Any], MemoryMap],
    *,
    allowed: Sequence[Allowed] = (),
    waits: Collection[str] = (),
    driver: LookUp | None = None,
) -> Audit:
    """Capture a step twice, each time into a separate pool, and use the first capture to audit the second.

        audit_twice(capture, lambda graph: memory_of(static=static, weights=model, pool=graph))

    capture  captures the step and returns the graph. It is called twice; the first graph is kept until the end
    memory   returns the memory map of a graph; called right after each capture

    For the other arguments see `audit`. Two captures show more than a single capture:

    - A real address is at the same position in both captures. A stale word is not, so it is dropped. Other findings
      become certain if both captures agree. Lists in arguments of kernels for many tensors (foreach, fused optimizers)
      are an exception, because unused entries contain stack data, which is often equal in both captures.
    - An address in the first capture's pool is hidden state, that is, memory that the step keeps between captures.
    - A registered address, number or copy length that differs is frozen in the graph. Numbers within structs are not
      compared; twice.py lists the numbers that are.
    - If the nodes differ, the step does something once and skips it later.

    Library memory looks like hidden state, because cuBLAS allocates a workspace in the pool of the first capture
    unless its stream already has one. Call `with_blas_workspaces` (blas.py) in `memory` to identify workspaces.

    Raises:
        ConfigError: if an argument has the wrong type, or if both captures use the same pool.
    """
    check_callable("capture", capture, advice="pass a function that captures the step and returns the graph")
    check_callable("memory", memory, advice="pass a function of the graph, such as lambda g: memory_of(pool=g)")
    _check_exceptions(allowed, waits)
    graphs, lookups = [], []
    for _ in range(2):
        graphs.append(capture())  # keeps the first graph alive, so that the second cannot reuse its pool
        lookups.append(_lookup(graphs[-1], memory(graphs[-1]), driver))
    first, second = lookups
    return _report(second, first, allowed, waits)


def _lookup(graph: Any, memory: MemoryMap, driver: LookUp | None) -> Lookup:
    check_instance("memory", memory, MemoryMap, advice="pass the map that memory_of() returns")
    view = graph if isinstance(graph, GraphView) else inspect_graph(graph)
    if driver is None:
        of_cuda = view.origin == "cuda" and torch.cuda.is_available()
        driver = driver_memory() if of_cuda else lambda address: None
    return Lookup(view, memory, driver)


def _check_exceptions(allowed: object, waits: object) -> None:
    """Check the types of `allowed` and `waits`. Raises: ConfigError."""
    for exception in check_sequence("allowed", allowed, of="Allowed", error=ConfigError):
        check_instance("allowed", exception, Allowed, advice="pass Allowed(reason, region=...)")
    if isinstance(waits, str) or not isinstance(waits, Collection) or not all(isinstance(one, str) for one in waits):
        raise ConfigError(f"waits: expected a list of name patterns, got {shown(waits)}; pass a list such as ['gemm*']")


def _report(lookup: Lookup, first: Lookup | None, allowed: Sequence[Allowed], waits: Collection[str]) -> Audit:
    owners = Counter[Owner](dict.fromkeys(Owner, 0))
    lookup.count(owners)
    found = [*findings_in_words(lookup), *findings_in_operands(lookup, owners)]
    findings = [one.finding for one in found] if first is None else compare(first, lookup, found)
    findings += _nodes(lookup, lookup.view, (*_WAIT, *waits))
    findings.sort(key=lambda finding: finding.place)  # stable, so the order within a node is kept
    findings += _registered_but_freed(lookup)
    left, allowances = without_allowed(findings, allowed)
    walked = list(lookup.view.walk())
    unread = tuple((place, node.name, node.remark) for place, node in walked if node.remark)
    return Audit(left, len(walked), lookup.words.looked_at, dict(owners), allowances, unread)


def _nodes(lookup: Lookup, view: GraphView, waits: tuple[str, ...], at: Place = ()) -> Iterator[Finding]:
    """Yield findings about whole nodes."""
    early = {edge.target: edge.source for edge in view.edges if edge.programmatic}
    for index, node in enumerate(view.nodes):
        place = (*at, index)
        if node.kind is NodeKind.HOST:
            yield _of_node(
                place, node, FindingKind.HOST_FUNCTION,
                "every replay runs this function on the host, and an audit cannot see its memory; remove it from the "
                "step, or allow it with the reason why its memory stays valid",
            )  # fmt: skip
        if index in early and not any(fnmatchcase(node.name, pattern) for pattern in waits):
            yield _of_node(
                place, node, FindingKind.EARLY_START,
                f"this kernel may start before {view.nodes[early[index]].name!r} has finished; execute "
                "griddepcontrol.wait first and name the kernel in waits=, or launch it without PDL",
            )  # fmt: skip
        if index in early:
            yield from _early_loads(lookup, place, node)
        for which, body in enumerate(node.bodies):
            yield from _nodes(lookup, body, waits, (*place, which))


def _early_loads(lookup: Lookup, place: Place, node: Node) -> Iterator[Finding]:
    """Yield findings for memory that a kernel loads before it waits, and that is not known to be a weight."""
    data = node.arguments[0].data if node.arguments else b""  # empty for a node that could not be read
    for at in _EARLY_ADDRESSES.get(node.name, ()):
        address = int.from_bytes(data[at : at + WORD], "little")
        region = lookup.find(address)
        if address == 0 or (region is not None and region.owner is Owner.WEIGHT):
            continue
        owner, name = (region.owner, region.name) if region else (None, "")
        yield Finding(
            place, node.name, where_in(ArgumentRef(place, node, 0), at), address, owner, name,
            "the kernel loads this memory before it waits for earlier kernels, which may write it; name it as a weight "
            "in memory_of() if no step writes it, or pass the operator a tensor that is not an nn.Parameter",
            FindingKind.EARLY_START,
        )  # fmt: skip


def _of_node(place: Place, node: Node, kind: FindingKind, text: str) -> Finding:
    return Finding(place, node.name, "", 0, None, "", text, kind)


def _registered_but_freed(lookup: Lookup) -> Iterator[Finding]:
    """Yield findings for registered memory in freed blocks, such as the memory of a dropped output."""
    freed = MemoryMap(r for r in lookup.memory.regions if not r.live and r.owner in (Owner.POOL, Owner.ALLOCATOR))
    for region in filter(registered, lookup.memory.regions):
        block = next((held for _, held in freed.ranges(region.address, region.nbytes) if held is not None), None)
        if block is None:
            continue
        place, name = _first_user(lookup, region)
        yield Finding(
            place, name, f"{region.owner.value} {region.name!r}", region.address, region.owner, region.name,
            f"it is in a block that was freed, {block.name!r}, and the next capture into the pool may reuse it; "
            "keep the tensor alive, or allow it if it is read before any other graph runs",
            FindingKind.FREED,
        )  # fmt: skip


def _first_user(lookup: Lookup, region: Region) -> tuple[Place, str]:
    """Return the place and name of the first node that accesses a region; empty if no node does."""
    held = np.flatnonzero((lookup.words.value >= region.address) & (lookup.words.value < region.end))
    by_word = lookup.words.argument_at(int(lookup.words.at[held[0]]))[0].place if len(held) else None
    for place, node in lookup.view.walk():
        by_operand = any(o.address < region.end and region.address < o.address + o.nbytes for o in node.operands)
        if by_operand or place == by_word:
            return place, node.name
    return (), ""
