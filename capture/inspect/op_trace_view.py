"""Convert an op trace to a GraphView: one node per op, and edges between ops that access the same memory."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from graphrt.capture.graph import NOTHING, graph_closed
from graphrt.capture.inspect.view import Edge, GraphView, Node, NodeKind, Operand
from graphrt.capture.op_trace import MadeMemory, OpTrace, OpTraceEntry, OpTraceLoop
from graphrt.kernels.checks import span_bytes

_IDENTITY = re.compile(r" at 0x[0-9a-fA-F]+")
"""Addresses in the repr of Python objects, which differ from run to run."""


def view_of_op_trace(op_trace: OpTrace) -> GraphView:
    """Return the view of an op trace: one OP node per op, and one ALLOC node per uninitialized allocation.

    Edges are data dependencies. An edge leads from the last op that wrote a byte to each op that reads or overwrites
    the byte. Edges also lead from the readers of a byte to the next op that writes it. A tensor counts as all bytes
    from its first byte to its last.

    The view keeps no memory alive; the trace may be closed afterwards.

    Raises:
        CaptureError: if the trace is closed.
    """
    if op_trace.output is NOTHING:
        raise graph_closed()
    made = [(one.before, _made_node(one)) for one in op_trace.made]
    ops = [(index, _node(entry)) for index, entry in enumerate(op_trace.entries)]
    nodes = [node for _, node in sorted(made + ops, key=lambda one: one[0])]  # stable, so an allocation precedes its op
    flow = _Flow()
    for node in nodes:
        flow.add(node)
    edges = sorted(flow.edges)
    return GraphView(tuple(nodes), tuple(Edge(*edge) for edge in edges), "op trace")


def view_of_loop(loop: OpTraceLoop) -> GraphView:
    """Return the view of a loop, one node whose body is the view of its step. Raises: CaptureError: if closed."""
    condition = Operand("condition", loop.condition.data_ptr(), loop.condition.nbytes)
    body = view_of_op_trace(loop.step)
    return GraphView((Node(NodeKind.CONDITIONAL, "while", operands=(condition,), bodies=(body,)),), (), "op trace")


class _Flow:
    """The last accesses to every byte, as disjoint memory ranges, and the resulting edges."""

    def __init__(self) -> None:
        self.edges: list[tuple[int, int]] = []
        self._count = 0
        # Range i starts at _cuts[i]. It has a last writer (-1: none), and the nodes that read it since.
        self._cuts = [0]
        self._writers = [-1]
        self._readers: list[list[int]] = [[]]

    def add(self, node: Node) -> None:
        index, sources = self._count, set[int]()
        self._count += 1
        for operand in node.operands:
            if operand.nbytes and not operand.written:
                self._read(operand, index, sources)
        for operand in node.operands:
            if operand.nbytes and operand.written:
                self._write(operand, index, sources)
        self.edges += [(source, index) for source in sources - {-1, index}]

    def _read(self, operand: Operand, index: int, sources: set[int]) -> None:
        for at in self._ranges(operand):
            sources.add(self._writers[at])
            self._readers[at].append(index)

    def _write(self, operand: Operand, index: int, sources: set[int]) -> None:
        ranges = self._ranges(operand)
        for at in ranges:
            sources.add(self._writers[at])
            sources.update(self._readers[at])
        within = slice(ranges.start, ranges.stop)
        self._cuts[within], self._writers[within], self._readers[within] = [operand.address], [index], [[]]

    def _ranges(self, operand: Operand) -> range:
        return range(self._cut(operand.address), self._cut(operand.address + operand.nbytes))

    def _cut(self, address: int) -> int:
        at = bisect.bisect_left(self._cuts, address)
        if at == len(self._cuts) or self._cuts[at] != address:
            self._cuts.insert(at, address)
            self._writers.insert(at, self._writers[at - 1])
            self._readers.insert(at, list(self._readers[at - 1]))
        return at


def _made_node(made: MadeMemory) -> Node:
    memory = _operand("memory", made.tensor, written=True)
    return Node(NodeKind.ALLOC, str(made.func), operands=(memory,))


def _node(entry: OpTraceEntry) -> Node:
    operands, scalars = [], []
    for name, written, value in _arguments(entry):
        if isinstance(value, torch.Tensor):
            operands.append(_operand(name, value, written))
        elif isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
            tensors = ((at, one) for at, one in enumerate(value) if one is not None)
            operands += [_operand(f"{name}[{at}]", one, written) for at, one in tensors]
        else:
            scalars.append((name, _IDENTITY.sub("", repr(value))))
    operands += [_operand("out", kept, written=True) for kept in entry.outputs if kept is not None]
    interpreted = {"interpreted": "yes"} if entry.interpret else {}
    return Node(
        NodeKind.OP, str(entry.func), attributes=interpreted, operands=tuple(operands), scalars=tuple(scalars)
    )  # fmt: skip


def _arguments(entry: OpTraceEntry) -> Iterator[tuple[str, bool, Any]]:
    """Yield the name of each argument passed, whether the op writes it, and its value."""
    declared = _declared(entry.func)
    for (name, written), value in zip(declared, entry.args, strict=False):
        yield name, written, value
    by_name = dict(declared)
    for name, value in entry.kwargs.items():
        yield name, by_name[name], value


@lru_cache(maxsize=4096)
def _declared(func: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Return the name of each argument, and whether the op writes it."""
    arguments = func._schema.arguments  # type: ignore[attr-defined]  # all ops have one
    return tuple((a.name, a.alias_info is not None and a.alias_info.is_write) for a in arguments)


def _operand(role: str, tensor: torch.Tensor, written: bool) -> Operand:
    return Operand(role, tensor.data_ptr(), span_bytes(tensor), written=written)
