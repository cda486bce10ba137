"""Audits a captured graph: every address that a node holds must lie in memory that stays.

    memory = memory_of(static={"x": x, "y": y}, weights=model, pool=graph)
    report = audit(graph, memory)
    print(report)
    report.raise_if_any()

What stays: a registered static buffer, a weight, the cache, the graph's own pool, memory of libraries. All else is a
finding, with the node, the argument and the owner: memory that nobody registered, a freed block, bytes behind the end
of a buffer, memory of the host that every replay reads again.

Kernels of Triton and operands of copies say where their addresses are. In the arguments of other kernels any word may
be one, and a stale word in the padding of a struct may look like one: such findings are not `certain`. `audit_twice`
captures the step a second time and decides them. Of structs of PyTorch's own kernels it is known which of their bytes
hold no address (torch_kernels.py).

What no audit of arguments sees: addresses that a kernel loads from memory, indices, and which bytes are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from graphrt.capture.inspect.ask import CudaDriver, Driver, NoDriver
from graphrt.capture.inspect.findings import Allowed, Audit, Finding, FindingKind, without_allowed
from graphrt.capture.inspect.lookup import Lookup
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.pool import memory_of
from graphrt.capture.inspect.trouble import Trouble, registered, troubles_of_operands, troubles_of_words
from graphrt.capture.inspect.twice import compare
from graphrt.capture.inspect.view import GraphView, Node, NodeKind, Place
from graphrt.kernels.checks import check_callable, check_instance, check_sequence, shown
from graphrt.kernels.errors import ConfigError

__all__ = ["Allowed", "Audit", "Finding", "FindingKind", "audit", "audit_twice", "memory_of"]


_WAIT = (
    "nvjet_*", "*cublasLt::*", "*flash::FlashAttnFwd*", "sample_chunks_kernel", "sample_rows_kernel",
    "sample_truncated*", "_check_rows_kernel", "_write_buffers_kernel", "attend_kernel", "decode_attention",
)  # fmt: skip
"""Kernels of cuBLAS and FlashAttention 3, which launch them early by themselves, and those of graphrt."""


def audit(
    graph: Any,
    memory: MemoryMap,
    *,
    allowed: Sequence[Allowed] = (),
    waits: Collection[str] = (),
    driver: Driver | None = None,
) -> Audit:
    """Classify every address that the nodes of a graph hold.

    graph    a GraphView, or what `inspect_graph` takes: a torch.cuda.CUDAGraph(keep_graph=True), its raw handle, a
             graph of a recorder of graphrt, an op trace
    memory   what `memory_of` made right after the capture
    allowed  deliberate exceptions. The report lists each with its reason, and those that nothing matched
    waits    patterns of the names of kernels that execute griddepcontrol.wait before they touch what an earlier one may
             still read or write. Those of cuBLAS, FlashAttention 3 and graphrt are known; another one is a finding
    driver   asked about addresses that the map does not know; None: the CUDA driver, where there is one

    Launches nothing and synchronises nothing; not for use during a capture. Raises: ConfigError for wrong arguments.
    """
    _check_exceptions(allowed, waits)
    return _report(_lookup(graph, memory, driver), None, allowed, waits)


def audit_twice(
    capture: Callable[[], Any],
    memory: Callable[[Any], MemoryMap],
    *,
    allowed: Sequence[Allowed] = (),
    waits: Collection[str] = (),
    driver: Driver | None = None,
) -> Audit:
    """Capture a step twice, each into a pool of its own, and audit the second capture by the first.

        audit_twice(capture, lambda graph: memory_of(static=static, weights=model, pool=graph))

    capture  captures the step and returns the graph. It is called twice, and the first graph lives until the end
    memory   makes the map for a graph; called right after each capture

    The other arguments are those of `audit`. What a single audit cannot tell, two captures can:

    - A word that is an address stands where the other capture has one too. A stale word does not, and is dropped; any
      other finding becomes certain where both captures agree. Not so in the lists that kernels for many tensors take
      (foreach, fused optimizers): a place that is not in use holds what the stack held, often the same both times.
    - An address in the first capture's pool is hidden state: memory that the step keeps from one capture to the next.
    - A registered address, a number or the length of a copy that differs is baked: the graph will go on with that of
      its capture. Of numbers, those that twice.py names: not those within structs.
    - Captures of different nodes have no fixed step: something was done once and is skipped from then on.

    What libraries keep is no state of the step, but looks like it: cuBLAS makes a workspace in the pool of the first
    capture, unless its stream had one. `with_blas_workspaces` of blas.py, called in `memory`, names it.

    Raises: ConfigError for wrong arguments, and where both captures share a pool.
    """
    check_callable("capture", capture, advice="pass a function that captures the step and returns the graph")
    check_callable("memory", memory, advice="pass a function of the graph, such as lambda g: memory_of(pool=g)")
    _check_exceptions(allowed, waits)
    graphs, lookups = [], []
    for _ in range(2):
        graphs.append(capture())  # keeps the first alive: its pool must not be given to the second
        lookups.append(_lookup(graphs[-1], memory(graphs[-1]), driver))
    first, second = lookups
    return _report(second, first, allowed, waits)


def _lookup(graph: Any, memory: MemoryMap, driver: Driver | None) -> Lookup:
    check_instance("memory", memory, MemoryMap, advice="pass what memory_of() returns")
    if driver is not None:
        check_callable("driver.memory_at", getattr(driver, "memory_at", None), advice="pass a Driver, or None")
    if not isinstance(graph, GraphView):
        from graphrt.capture.inspect.cuda import inspect_graph

        graph = inspect_graph(graph)
    if driver is None:
        driver = CudaDriver() if graph.origin == "cuda" and torch.cuda.is_available() else NoDriver()
    return Lookup(graph, memory, driver)


def _check_exceptions(allowed: object, waits: object) -> None:
    """Raises: ConfigError for what are no exceptions, and no patterns."""
    for exception in check_sequence("allowed", allowed, of="Allowed", error=ConfigError):
        check_instance("allowed", exception, Allowed, advice="pass Allowed(reason, region=...)")
    if isinstance(waits, str) or not isinstance(waits, Collection) or not all(isinstance(one, str) for one in waits):
        raise ConfigError(f"waits: expected patterns of names, got {shown(waits)}; pass a list")


def _report(lookup: Lookup, first: Lookup | None, allowed: Sequence[Allowed], waits: Collection[str]) -> Audit:
    owners = Counter[Owner](dict.fromkeys(Owner, 0))
    lookup.count(owners)
    troubles = [*troubles_of_words(lookup), *troubles_of_operands(lookup, owners)]
    findings = [trouble.finding for trouble in troubles] if first is None else compare(first, lookup, troubles)
    findings += _nodes(lookup.view, (*_WAIT, *waits))
    findings.sort(key=lambda finding: finding.place)  # stable: within a node as they were found
    findings += _freed_beneath(lookup, troubles)
    left, allowances = without_allowed(findings, allowed)
    walked = list(lookup.view.walk())
    unread = tuple((place, node.name, node.remark) for place, node in walked if node.remark)
    return Audit(left, len(walked), lookup.words.looked_at, dict(owners), allowances, unread)


def _nodes(view: GraphView, waits: tuple[str, ...], at: Place = ()) -> Iterator[Finding]:
    """Findings about nodes as a whole."""
    early = {edge.target: edge.source for edge in view.edges if edge.programmatic}
    for index, node in enumerate(view.nodes):
        place = (*at, index)
        if node.kind is NodeKind.HOST:
            yield _of_node(
                place, node, FindingKind.HOST_FUNCTION,
                "expected work of the device, got a function that runs on the host in every replay and whose memory "
                "no audit sees; take it out of the step, or allow it with the reason why its memory stays",
            )  # fmt: skip
        if index in early and not any(fnmatchcase(node.name, pattern) for pattern in waits):
            yield _of_node(
                place, node, FindingKind.EARLY_START,
                f"expected a kernel that waits, got one that may begin before {view.nodes[early[index]].name!r} has "
                "ended; execute griddepcontrol.wait first and name it in waits=, or launch it without PDL",
            )  # fmt: skip
        for which, body in enumerate(node.bodies):
            yield from _nodes(body, waits, (*place, which))


def _of_node(place: Place, node: Node, kind: FindingKind, text: str) -> Finding:
    return Finding(place, node.name, "", 0, None, "", text, kind)


def _freed_beneath(lookup: Lookup, troubles: list[Trouble]) -> Iterator[Finding]:
    """Registered memory that lies in a freed block, as an output does that nobody holds: it may be given away."""
    freed = sorted(
        (r for r in lookup.memory.regions if not r.live and r.owner in (Owner.POOL, Owner.ALLOCATOR)),
        key=lambda region: region.address,
    )
    starts = np.array([region.address for region in freed], np.uint64)
    for region in filter(registered, lookup.memory.regions):
        at = int(np.searchsorted(starts, region.end)) - 1
        if at < 0 or freed[at].end <= region.address:
            continue
        place, name = _first_user(lookup, region)
        yield Finding(
            place, name, f"{region.owner.value} {region.name!r}", region.address, region.owner, region.name,
            f"expected memory that somebody holds, got {freed[at].name!r}; the next capture into the pool may be given "
            "it, so hold the tensor, or allow it where it is read before any other graph runs",
            FindingKind.FREED,
        )  # fmt: skip


def _first_user(lookup: Lookup, region: Region) -> tuple[Place, str]:
    """The first node that works on a region; none where no node does."""
    held = np.flatnonzero((lookup.words.value >= region.address) & (lookup.words.value < region.end))
    places = [lookup.words.slot_at(int(lookup.words.at[held[0]]))[0].place] if len(held) else []
    for place, node in lookup.view.walk():
        if any(o.address < region.end and region.address < o.address + o.nbytes for o in node.operands):
            places.append(place)
            break
    return (min(places), lookup.view.node(min(places)).name) if places else ((), "")
