"""inspect_graph() of op traces: ops with their operands, and edges between accesses of the same bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch

from graphrt.capture.graph import GraphReport
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.view import Edge, GraphView, Node, NodeKind, Operand
from graphrt.capture.op_trace import OpTrace, OpTraceEntry
from graphrt.kernels.errors import CaptureError
from tests.support.capture_rig import CPU, KEY, Countdown, op_trace_of


def view_of(step: Callable[[], torch.Tensor]) -> GraphView:
    return inspect_graph(op_trace_of(step))


def edges(view: GraphView) -> set[tuple[int, int]]:
    assert list(view.edges) == sorted(view.edges, key=lambda edge: (edge.source, edge.target))
    assert not any(edge.programmatic for edge in view.edges)
    return {(edge.source, edge.target) for edge in view.edges}


def operand(node: Node, role: str) -> Operand:
    (found,) = (one for one in node.operands if one.role == role)
    return found


# -- nodes


def test_operands_are_named_as_in_the_schema() -> None:
    x, y = torch.ones(4, 3), torch.ones(3)
    op_trace = op_trace_of(lambda: torch.add(x, y, alpha=2.5))
    (node,) = inspect_graph(op_trace).nodes
    assert (node.kind, node.name, node.grid) == (NodeKind.OP, "aten.add.Tensor", None)
    assert node.operands == (
        Operand("self", x.data_ptr(), 48),
        Operand("other", y.data_ptr(), 12),
        Operand("out", op_trace.output.data_ptr(), 48, written=True),
    )
    assert node.scalars == (("alpha", "2.5"),)
    generator = torch.Generator().manual_seed(0)
    (node,) = view_of(lambda: x.uniform_(0.5, 2.0, generator=generator)).nodes
    scalars = dict(node.scalars)
    assert (scalars["from"], scalars["to"]) == ("0.5", "2.0")
    assert scalars["generator"] == "<torch._C.Generator object>", "without its address"
    cast = view_of(lambda: x.to(torch.float64)).nodes[-1]
    assert dict(cast.scalars)["dtype"] == "torch.float64"


def test_an_operand_spans_from_its_first_element_to_its_last() -> None:
    x = torch.arange(64, dtype=torch.float64).view(8, 8)
    parts = {
        "rows": x[2:4],
        "column": x[:, 3],
        "one": x[5, 5:6],
        "none": x[:0],
        "turned": x.t(),
        "spread": x[:1].expand(4, 8),
    }
    for name, part in parts.items():
        (node,) = view_of(lambda part=part: part + 1).nodes
        read = operand(node, "self")
        held = [int(value) for value in part.flatten()]
        assert read.nbytes == (8 * (max(held) - min(held) + 1) if held else 0), name
        if held:
            assert read.address == x.data_ptr() + 8 * min(held), name


def test_each_tensor_of_a_list_is_an_operand() -> None:
    a, b, c = torch.ones(2), torch.ones(3), torch.ones(5, 7)
    view = view_of(lambda: torch.cat([a, b, a]))
    assert [(one.role, one.address) for one in view.nodes[0].operands[:3]] == [
        ("tensors[0]", a.data_ptr()), ("tensors[1]", b.data_ptr()), ("tensors[2]", a.data_ptr()),
    ]  # fmt: skip
    index = torch.tensor([1, 2])
    node = view_of(lambda: c[:, index]).nodes[-1]
    assert operand(node, "indices[1]") == Operand("indices[1]", index.data_ptr(), 16)
    (node,) = view_of(lambda: torch._foreach_add_([a, b], 1.0)[0]).nodes
    assert [one.written for one in node.operands] == [True, True]
    op_trace = op_trace_of(lambda: c.max(dim=1)[0])
    outs = [one for one in inspect_graph(op_trace).nodes[0].operands if one.role == "out"]
    assert [(one.nbytes, one.written) for one in outs] == [(20, True), (40, True)]
    assert outs[0].address == op_trace.output.data_ptr()


def test_uninitialized_memory_is_an_allocation() -> None:
    x = torch.ones(4)

    def step() -> torch.Tensor:
        y = torch.empty(4)
        torch.mul(x, 2, out=y)
        return y + 1

    view = view_of(step)
    assert [(node.kind, node.name) for node in view.nodes] == [
        (NodeKind.ALLOC, "aten.empty.memory_format"),
        (NodeKind.OP, "aten.mul.out"),
        (NodeKind.OP, "aten.add.Tensor"),
    ]
    memory = operand(view.nodes[0], "memory")
    assert memory.nbytes == 16
    assert memory.address == operand(view.nodes[1], "out").address == operand(view.nodes[2], "self").address
    assert edges(view) == {(0, 1), (1, 2)}


def test_a_loop_is_a_conditional_node_with_its_step_and_closed_graphs_raise() -> None:
    rig = Countdown(CPU)
    graph = rig.capture(rig.step)
    loop = rig.recorder.loop(graph, rig.condition)
    (node,) = inspect_graph(loop).nodes
    assert (node.kind, node.name) == (NodeKind.CONDITIONAL, "while")
    assert node.operands == (Operand("condition", rig.condition.data_ptr(), 4),)
    assert node.bodies == (inspect_graph(graph),)
    assert [inner.name for inner in node.bodies[0].nodes] == ["aten.sub_.Tensor", "aten.add_.Tensor", "aten.mul.Tensor"]
    loop.close()
    with pytest.raises(CaptureError, match="loop: step on a closed loop"):
        inspect_graph(loop)
    graph.close()
    assert (graph.entries, graph.made) == ((), ())
    with pytest.raises(CaptureError, match="graph: the graph is closed; capture the step"):
        inspect_graph(graph)
    assert node.bodies[0].num_nodes > 0


# -- edges


def naive(nodes: tuple[Node, ...]) -> set[tuple[int, int]]:
    """Compute the edges byte by byte."""
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    found = set()
    for index, node in enumerate(nodes):
        for one in node.operands:
            for byte in range(one.address, one.address + one.nbytes):
                found.add((writer.get(byte, -1), index))
                if one.written:
                    found |= {(reader, index) for reader in readers.get(byte, ())}
        for one in sorted(node.operands, key=lambda one: one.written):
            for byte in range(one.address, one.address + one.nbytes):
                if one.written:
                    writer[byte] = index
                    readers[byte] = set()
                else:
                    readers.setdefault(byte, set()).add(index)
    return {(source, target) for source, target in found if 0 <= source < target}


@pytest.mark.parametrize("seed", range(12))
def test_edges_equal_those_computed_per_byte(seed: int) -> None:
    rng, memory = random.Random(seed), torch.zeros(2, 48, dtype=torch.uint8)

    def part(half: int) -> torch.Tensor:
        first, step = rng.randrange(40), rng.choice((1, 1, 2, 3))
        return memory[half, first::step][: rng.randint(1, 5)]

    def step() -> torch.Tensor:
        for _ in range(60):
            kind, half = rng.randrange(3), rng.randrange(2)
            if kind == 0:
                part(half).zero_()
            elif kind == 1:
                part(half).add_(part(1 - half)[:1])  # the inputs of an op do not overlap with its outputs
            else:
                torch.bitwise_xor(part(half)[:1], part(rng.randrange(2)))
        return memory

    view = view_of(step)
    assert len(view.nodes) == 60
    assert edges(view) == naive(view.nodes)


def test_a_long_op_trace_is_inspected_quickly() -> None:
    """Every op reads a weight and writes its row of a cache. The last op reads the cache."""
    cache, weight = torch.zeros(10_000, 8), torch.ones(8)
    add = torch.ops.aten.add.out
    entries = [OpTraceEntry(add, (row, weight), {"out": row}, (None,), False) for row in cache.unbind()]
    entries.append(OpTraceEntry(torch.ops.aten.sum.default, (cache,), {}, (torch.zeros(()),), False))
    op_trace = OpTrace(entries, cache, GraphReport(KEY, 0.0, 0, 0, len(entries)))
    start = time.perf_counter()
    view = inspect_graph(op_trace)
    seconds = time.perf_counter() - start
    assert edges(view) == {(index, 10_000) for index in range(10_000)}
    assert seconds < 5, "quadratic work would take minutes"


def test_step_of_graphrt() -> None:
    """The first ops fill the metadata, and the layers depend on them."""
    from tests.support.toy import make_rig

    rig = make_rig(CPU, decode_sizes=(2,), mixed_sizes=(16,))
    (graph,) = (graph for key, graph in rig.manager._graphs._graphs.items() if key.padded_reqs == 2)
    view = inspect_graph(graph)
    names = [node.name for node in view.nodes if node.kind is NodeKind.OP]
    assert names[:2] == ["graphrt.unpack.default", "graphrt.refresh.default"]
    assert names.count("graphrt.write_kv.default") == 2
    assert names[-1] == "graphrt.write_outputs.default"
    assert len(names) == graph.report.nodes
    writes = {one.address: place for place, node in view.walk() for one in node.operands if one.written}
    tables = [one for _, node in view.walk() for one in node.operands if one.role == "table" and not one.written]
    assert len(tables) == 2
    assert {writes[one.address] for one in tables} == {(1,)}, "refresh fills the table that both layers read"
    refresh_to = {edge.target for edge in view.edges if edge.source == 1}
    attends = {index for index, node in enumerate(view.nodes) if node.name == "graphrt.attention_reference.default"}
    assert attends <= refresh_to
    assert Edge(0, 1) in view.edges
