"""diff(): equal captures, and each kind of difference."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt.capture.inspect import align
from graphrt.capture.inspect.align import aligned
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.diff import Change, GraphDiff, Level, NodeDiff, diff
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand
from tests.support.capture_rig import CPU, op_trace_of
from tests.support.fake_graphs import number, word

X, POOL, WEIGHT = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000


def kernel(name: str, *data: bytes, **fields) -> Node:
    arguments = tuple(Argument(8 * index, one) for index, one in enumerate(data))
    return Node(NodeKind.KERNEL, name, **({"grid": (1, 1, 1), "block": (32, 1, 1), "arguments": arguments} | fields))


def chain(*nodes: Node) -> GraphView:
    return GraphView(nodes, tuple(Edge(at - 1, at) for at in range(1, len(nodes))))


def memory(pool: int = POOL, blocks: tuple[int, ...] = (4096, 4096)) -> MemoryMap:
    regions, at = [Region("x", Owner.STATIC, X, 4096), Region("w", Owner.WEIGHT, WEIGHT, 4096)], pool
    for nbytes in blocks:
        regions.append(Region(f"block at {at:#x}", Owner.POOL, at, nbytes))
        at += nbytes
    return MemoryMap(regions)


def same_levels(found: GraphDiff, a: GraphView, b: GraphView, *maps: MemoryMap | None) -> GraphDiff:
    """Check that the comparison is symmetric."""
    map_a, map_b = maps or (None, None)
    levels = (found.equal_topology, found.equal_launches, found.equal)
    back = diff(b, a, map_b, map_a)
    assert levels == (back.equal_topology, back.equal_launches, back.equal)
    return found


def compared(a: GraphView, b: GraphView, *maps: MemoryMap | None) -> GraphDiff:
    return same_levels(diff(a, b, *maps), a, b, *maps)


# -- kernels


CHANGED: dict[str, tuple[dict, Level, str, str]] = {
    "name": ({"name": "h"}, Level.TOPOLOGY, "f", "h"),
    "kind": ({"kind": NodeKind.OTHER}, Level.TOPOLOGY, "", ""),
    "grid": ({"grid": (4, 1, 1)}, Level.LAUNCHES, "1x1x1", "4x1x1"),
    "block": ({"block": (64, 2, 1)}, Level.LAUNCHES, "32x1x1", "64x2x1"),
    "shared bytes": ({"shared_bytes": 9}, Level.LAUNCHES, "0", "9"),
    "attribute cluster": ({"attributes": {"cluster": "2x1x1"}}, Level.LAUNCHES, "-", "2x1x1"),
    "argument 0": ({"arguments": (Argument(0, number(-7)),)}, Level.ARGUMENTS, "3", "-7"),
    "argument 0 'n'": ({"arguments": (Argument(0, number(4), "n", ()),)}, Level.ARGUMENTS, "3", "4"),
    "argument 0 'x'": ({"arguments": (Argument(0, bytes(8), "x"),)}, Level.ARGUMENTS, "4 bytes", "8 bytes"),
    "number of arguments": ({"arguments": ()}, Level.ARGUMENTS, "1", "0"),
    "scalar value": ({"scalars": (("value", "0x1"),)}, Level.ARGUMENTS, "-", "0x1"),
    "operands": ({"operands": (Operand("dst", 5, 4, written=True),)}, Level.ARGUMENTS, "-", "dst"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_each_kind_of_difference(case: str) -> None:
    fields, level, old, new = CHANGED[case]
    before = chain(kernel("e"), kernel("f", number(3)), kernel("g"))
    nodes = (before.nodes[0], replace(before.nodes[1], **fields), before.nodes[2])
    found = compared(before, GraphView(nodes, before.edges))
    assert found.equal_topology == (level is not Level.TOPOLOGY)
    assert found.equal_launches == (level is Level.ARGUMENTS)
    assert not found.equal
    if case != "kind":
        change = Change(level, case, old, new)
        assert found.nodes == (NodeDiff((1,), (1,), "kernel f", (change,)),)
        assert str(change) in str(found)


def test_edges() -> None:
    nodes = tuple(kernel(name) for name in "efg")
    serial, fork = GraphView(nodes, (Edge(0, 1), Edge(1, 2))), GraphView(nodes, (Edge(0, 1), Edge(0, 2)))
    same = compared(serial, serial)
    assert (same.equal, same.equal_launches, same.equal_topology, same.nodes) == (True, True, True, ())
    assert str(same) == "equal: 3 nodes with equal topology, launches and arguments"
    found = compared(serial, fork)
    assert found.nodes == (
        NodeDiff((2,), (2,), "kernel g", (Change(Level.TOPOLOGY, "waits for", "f at -1", "e at -2"),)),
    )
    early = GraphView(nodes, (Edge(0, 1), Edge(1, 2, True)))
    (node,) = compared(serial, early).nodes
    assert node.changes == (Change(Level.TOPOLOGY, "waits for", "f at -1", "f at -1 (programmatic)"),)


def test_bodies() -> None:
    def around(*bodies: GraphView) -> GraphView:
        return chain(kernel("e"), Node(NodeKind.CONDITIONAL, "while", bodies=bodies))

    body = chain(kernel("f", number(3)), kernel("g"))
    wider = chain(replace(body.nodes[0], grid=(2, 1, 1)), body.nodes[1])
    assert compared(around(body), around(body)).equal
    (node,) = compared(around(body), around(wider)).nodes
    assert (node.before, node.after, node.name) == ((1, 0, 0), (1, 0, 0), "kernel f")
    longer = compared(around(body), around(chain(*body.nodes, kernel("h"))))
    assert longer.nodes == (NodeDiff(None, (1, 0, 2), "kernel h"),)
    twice = compared(around(body), around(body, body))
    assert twice.nodes[0].changes == (Change(Level.TOPOLOGY, "bodies", "1", "2"),)
    assert not compared(around(), around(GraphView(()))).equal_topology
    cut = GraphView(body.nodes)
    (waits,) = compared(around(body), around(cut)).nodes
    assert waits.changes == (Change(Level.TOPOLOGY, "waits for", "f at -1", "-"),)


# -- nodes that one graph alone has


def test_an_additional_node() -> None:
    layer = [kernel("norm"), kernel("gemm"), kernel("attend"), kernel("gemm")]
    before = chain(*layer * 6)
    nodes = [*layer * 3, kernel("split"), *layer * 3]
    found = compared(before, chain(*nodes))
    assert [node for node in found.nodes if node.before is None] == [NodeDiff(None, (12,), "kernel split")]
    assert [node.changes for node in found.nodes if node.before is not None] == [
        (Change(Level.TOPOLOGY, "waits for", "gemm at -1", "split at -1"),)
    ]
    assert not found.equal_topology
    back = diff(chain(*nodes), before)
    assert [node.before for node in back.nodes if node.after is None] == [(12,)]
    assert "- kernel split at 12" in str(back)
    assert "+ kernel split at 12" in str(found)


def longest_common(a: list[str], b: list[str]) -> int:
    """Length of a longest common subsequence by dynamic programming."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(st.lists(st.sampled_from("abc"), max_size=14), st.lists(st.sampled_from("abc"), max_size=14))
def test_the_number_of_name_matches_is_maximal(a: list[str], b: list[str]) -> None:
    pairs = list(aligned(*([("kernel", name) for name in side] for side in (a, b))))
    assert [i for i, _ in pairs if i is not None] == list(range(len(a)))
    assert [j for _, j in pairs if j is not None] == list(range(len(b)))
    assert sum(a[i] == b[j] for i, j in pairs if i is not None and j is not None) == longest_common(a, b)


def test_graphs_with_nothing_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with other names are matched by position, those of another kind are not."""
    kinds, other = [("kernel", "f"), ("memcpy", "c")], [("memcpy", "d"), ("kernel", "g")]
    assert list(aligned(kinds, other)) == [(0, None), (1, 0), (None, 1)]
    a, b = ([("kernel", f"{side}{at}") for at in range(100)] for side in "ab")
    matched = list(aligned(a, [*b, ("kernel", "c")]))
    assert matched == [*((at, at) for at in range(100)), (None, 100)]
    monkeypatch.setattr(align, "_MOST_EDITS", 10)
    assert list(aligned(a, [*b, ("kernel", "c")])) == matched, "as if the search was given up"


def test_long_graphs_are_compared_quickly() -> None:
    """One additional node among 20,000, and another product in every layer of 2,000 nodes."""
    layer = [kernel(name) for name in ("norm", "qkv", "rope", "write", "attend", "out", "norm", "up", "act", "down")]
    start = time.perf_counter()
    long = chain(*layer * 2000)
    found = diff(long, chain(*layer * 1000, kernel("more"), *layer * 1000))
    assert [node.after for node in found.nodes if node.before is None] == [(10_000,)]
    small = chain(*layer * 200)
    swapped = [kernel("up_64") if node.name == "up" else node for node in layer]
    found = diff(small, chain(*swapped * 200))
    assert len(found.nodes) == 200
    assert len({node.before for node in found.nodes}) == 200
    assert str(found).count("\n") < 5, "nodes with equal differences are grouped"
    assert "200 x kernel up at 7, 17, 27" in str(found)
    assert time.perf_counter() - start < 15


def test_the_text_of_a_comparison_is_cut() -> None:
    """A line per node and per change; 60 lines, then the number of further lines."""
    for count, lines, last in ((30, 61, "    argument 0: 29 -> 1029"), (31, 62, "... and 2 more lines")):
        a, b = (chain(*(kernel("f" * (1 + at), number(at + more)) for at in range(count))) for more in (0, 1000))
        text = str(compared(a, b)).splitlines()
        assert len(text) == lines
        assert text[-1] == last
    assert diff(chain(kernel("f" * 97)), GraphView(())).nodes[0].name == f"kernel {'f' * 93}..."
    pair = chain(kernel("f"), kernel("f"))
    assert str(diff(pair, GraphView(()))).splitlines() == [
        "2 nodes against 0: topology not equal, launches equal, arguments equal", "- 2 x kernel f at 0, 1",
    ]  # fmt: skip


# -- addresses


def test_addresses_are_compared_by_region_and_offset() -> None:
    here = chain(kernel("f", word(X + 16), word(POOL + 32)))
    elsewhere = chain(kernel("f", word(X + 16), word(POOL + 0x100000 + 32)))
    maps = memory(), memory(POOL + 0x100000)
    assert compared(here, elsewhere, *maps).equal
    assert compared(here, elsewhere).nodes[0].changes == (
        Change(Level.ARGUMENTS, "argument 1", hex(POOL + 32), hex(POOL + 0x100020)),
    ), "without maps, addresses are compared by value"
    moved = chain(kernel("f", word(X + 24), word(POOL + 32)))
    (node,) = compared(here, moved, memory(), memory()).nodes
    assert node.changes == (Change(Level.ARGUMENTS, "argument 0", "x+0x10", "x+0x18"),)
    for address, text in ((0x7F3000000010, "0x7f3000000010"), (WEIGHT, "w+0x0")):
        (node,) = compared(here, chain(kernel("f", word(address), word(POOL + 32))), memory(), memory()).nodes
        assert node.changes == (Change(Level.ARGUMENTS, "argument 0", "x+0x10", text),)


def test_blocks_of_pools_are_matched_by_first_use() -> None:
    """Their names differ between captures. Repeated use of the same block is compared."""
    a, b = POOL, POOL + 4096
    straight = chain(kernel("f", word(a), word(b)), kernel("g", word(b), word(a)))
    swapped = chain(kernel("f", word(b), word(a)), kernel("g", word(a), word(b)))
    crossed = chain(kernel("f", word(a), word(b)), kernel("g", word(a), word(b)))
    merged = chain(kernel("f", word(a), word(a)), kernel("g", word(a), word(a)))
    maps = memory(), memory()
    assert compared(straight, swapped, *maps).equal

    def capture(at: int) -> GraphView:
        made = Node(NodeKind.ALLOC, "allocation", operands=(Operand("memory", at, 64, written=True),))
        return chain(made, kernel("f", word(at + 8)), Node(NodeKind.FREE, "free", operands=(Operand("memory", at, 0),)))

    assert compared(capture(0x5000), capture(0x9000)).equal, "allocations of the graph too"
    for other in (crossed, merged):
        found = compared(straight, other, *maps)
        assert found.equal_launches
        assert not found.equal


def test_addresses_within_structs() -> None:
    """At multiples of 8 bytes from the start of all arguments, not of the struct, unless they are known."""
    here = Argument(4, number(1) + word(X) + number(2) + number(3))
    there = Argument(4, number(1) + word(X + 4096 * 5) + number(2) + number(4))
    moved = MemoryMap([Region("x", Owner.STATIC, X + 4096 * 5, 4096)])
    views = [chain(replace(kernel("f"), arguments=(one,))) for one in (here, there)]
    (node,) = compared(*views, memory(), moved).nodes
    assert node.changes == (Change(Level.ARGUMENTS, "argument 0, byte 16", "3", "4", opaque=True),)
    assert "(in a struct)" in str(node.changes[0])
    for pointers in ((), (0,)):
        words = (Argument(0, word(at), "n", pointers) for at in (X, X + 4096 * 5))
        views = [chain(replace(kernel("f"), arguments=(one,))) for one in words]
        assert compared(*views, memory(), moved).equal == bool(pointers), "a known number is not an address"


def random_node(rng: random.Random, depth: int) -> Node:
    places = [X + 8, WEIGHT, POOL + 16, POOL + 4096, 0x7F3000000000, 3]
    if depth and rng.random() < 0.2:
        bodies = tuple(random_view(rng, depth - 1, rng.randrange(3)) for _ in range(rng.randrange(1, 3)))
        return Node(NodeKind.CONDITIONAL, "while", bodies=bodies)
    if rng.random() < 0.3:
        operands = tuple(
            Operand(role, rng.choice(places), rng.choice((4, 8)), rng.random() < 0.2) for role in ("src", "dst")
        )
        return Node(NodeKind.MEMCPY, "copy", operands=operands, scalars=(("width", rng.choice("12")),))
    data = [b"".join(word(rng.choice(places)) for _ in range(rng.randrange(1, 3))) for _ in range(2)]
    pointers = rng.choice([None, (0,), ()])
    arguments = tuple(Argument(8 * at, one, pointers=pointers) for at, one in enumerate(data))
    return Node(
        NodeKind.KERNEL, rng.choice("fg"), grid=(rng.randrange(1, 3), 1, 1), block=(1, 1, 1), arguments=arguments
    )


def random_view(rng: random.Random, depth: int, count: int) -> GraphView:
    nodes = tuple(random_node(rng, depth) for _ in range(count))
    pairs = [(i, j) for j in range(count) for i in range(j) if rng.random() < 0.5]
    return GraphView(nodes, tuple(Edge(i, j, rng.random() < 0.2) for i, j in sorted(pairs)))


def varied(rng: random.Random, view: GraphView) -> GraphView:
    """Return the view with one node or edge replaced, sometimes by an equal one, or removed."""
    nodes, edges, at = list(view.nodes), list(view.edges), rng.randrange(len(view.nodes))
    kind = rng.randrange(4)
    if kind == 0:
        nodes[at] = random_node(rng, 1)
    elif kind == 1 and nodes[at].arguments:
        first, *rest = nodes[at].arguments
        nodes[at] = replace(nodes[at], arguments=(first._replace(data=word(POOL + 16) + first.data[8:]), *rest))
    elif kind == 2 and edges:
        edges[0] = replace(edges[0], programmatic=rng.random() < 0.5)
    elif kind == 3 and nodes[at].bodies and nodes[at].bodies[0].nodes:
        nodes[at] = replace(nodes[at], bodies=(varied(rng, nodes[at].bodies[0]), *nodes[at].bodies[1:]))
    return GraphView(tuple(nodes), tuple(edges))


def test_comparisons_of_random_graphs_are_symmetric() -> None:
    """In pools at other addresses and with other blocks. A graph is equal to itself."""
    rng, seen = random.Random(0), [0, 0, 0, 0]
    for _ in range(800):
        view = random_view(rng, 2, rng.randrange(1, 6))
        other = varied(rng, view) if rng.random() < 0.8 else view
        maps = (memory(), memory(blocks=(8192,)) if rng.random() < 0.1 else memory())
        found = compared(view, other, *maps)
        assert diff(view, view, maps[0], maps[0]).equal
        seen[found.equal_topology + found.equal_launches + found.equal] += 1
    assert min(seen) >= 10, seen


# -- steps on a CPU


class Toy:
    """A step of a few ops on static buffers for any number of requests."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.x, self.table = torch.randn(8, 16, generator=rng), torch.arange(8)
        self.weight, self.out = torch.randn(16, 16, generator=rng), torch.zeros(8, 16)

    def step(self, rows: int) -> torch.Tensor:
        hidden = torch.empty(rows, 16)
        torch.mm(self.x[:rows], self.weight, out=hidden)
        scale = self.weight.amax()  # reads the weight only
        self.out[:rows].copy_(torch.tanh(hidden / scale))
        self.table.add_(1)  # all requests
        return self.out[:rows] * 2

    def view(self, rows: int) -> GraphView:
        return inspect_graph(op_trace_of(lambda: self.step(rows)))

    def memory(self) -> MemoryMap:
        names = {"x": Owner.STATIC, "table": Owner.STATIC, "weight": Owner.WEIGHT, "out": Owner.STATIC}
        return MemoryMap(Region(n, o, getattr(self, n).data_ptr(), getattr(self, n).nbytes) for n, o in names.items())


def test_two_captures_of_a_step_are_equal() -> None:
    toy = Toy()
    first, second = toy.view(4), toy.view(4)
    assert [node.operands for node in first.nodes] != [node.operands for node in second.nodes], "different memory"
    assert compared(first, second).equal
    other = Toy()
    assert not compared(first, other.view(4)).equal
    assert compared(first, other.view(4), toy.memory(), other.memory()).equal
    kept, scale = toy.x, 2.0

    def scaled() -> GraphView:
        return inspect_graph(op_trace_of(lambda: toy.x * scale))

    first, toy.x, scale = scaled(), toy.x.clone(), 3.0  # a replaced buffer and a frozen number
    (node,) = compared(first, scaled(), toy.memory(), toy.memory()).nodes
    assert node.changes == (
        Change(Level.ARGUMENTS, "operand self", f"at {kept.data_ptr():#x}", "at x+0x0"),
        Change(Level.ARGUMENTS, "scalar other", "2.0", "3.0"),
    )


def test_operand_differences_show_only_what_differs() -> None:
    def copy(**fields) -> GraphView:
        return chain(
            Node(NodeKind.MEMCPY, "c", operands=(Operand(**({"role": "src", "address": X, "nbytes": 4} | fields)),))
        )

    cases = {
        "4 bytes -> 8 bytes": {"nbytes": 8},
        "on the device -> on the host": {"host": True},
        "read -> written": {"written": True},
        "at x+0x0 -> at x+0x8": {"address": X + 8},
        "at x+0x0 -> at 0x10": {"address": 16},
        "4 bytes, read, at x+0x0 -> 2 bytes, written, at w+0x0": {"nbytes": 2, "written": True, "address": WEIGHT},
    }
    for text, fields in cases.items():
        (node,) = compared(copy(), copy(**fields), memory(), memory()).nodes
        assert [str(change) for change in node.changes] == [f"operand src: {text}"]


def test_sizes_of_a_step_of_graphrt() -> None:
    """The ops, cache and weights are the same; tensors with an entry per request are larger."""
    from tests.support.toy import make_rig

    rig = make_rig(CPU, decode_sizes=(2, 4), mixed_sizes=(16,))
    graphs = {key.padded_reqs: graph for key, graph in rig.manager._graphs._graphs.items() if str(key)[:6] == "decode"}
    two, four = inspect_graph(graphs[2]), inspect_graph(graphs[4])
    found = compared(two, four)
    assert (found.equal_topology, found.equal_launches, found.equal) == (True, True, False)
    changed = {change.what for node in found.nodes for change in node.changes}
    assert not changed & {"operand k_cache", "operand v_cache", "operand input_ring", "scalar softmax_scale"}
    assert {"scalar padded_reqs", "operand logits", "operand block_table"} <= changed
    again = make_rig(CPU, decode_sizes=(2, 4), mixed_sizes=(16,), model=rig.model)
    other = {key.padded_reqs: graph for key, graph in again.manager._graphs._graphs.items() if str(key)[:6] == "decode"}
    found = diff(inspect_graph(other[2]), two)
    assert (found.equal_launches, found.equal) == (True, False), "other buffers"
