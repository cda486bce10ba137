"""GraphView: JSON, damaged JSON, the order of nodes, and long graphs."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from graphrt.capture.inspect.audit import audit, memory_of
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.diff import diff, fingerprint
from graphrt.capture.inspect.order import topological_order
from graphrt.capture.inspect.page import write_page
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand
from graphrt.kernels.errors import CaptureError, ConfigError
from tests.support.capture_rig import CPU, Countdown, op_trace_of

NOT_A_VIEW = "graph: not the result of to_json"
INVALID = f"{NOT_A_VIEW}|format: expected|graph: expected numbers"
NASTY = [
    '"',
    "\\",
    'a"b\\"c\\',
    "two\nlines\r\nthree\rfour",
    "<b>&amp;</b>",
    "{a|b}",
    "\\N \\l",
    "é中",
    "tab\t",
    "]; n0 -> n1;",
    "",
]


def every_kind() -> GraphView:
    """A view with every kind of node and every field."""
    kernel = Node(
        NodeKind.KERNEL, "void f<4>(int)", symbol="_Z1fILi4EEvi", grid=(2, 3, 4), block=(128, 1, 1), shared_bytes=512,
        attributes={"cluster": "2x1x1", "priority": "-5"},
        arguments=(
            Argument(0, b"\x01\x00\x00\x00"), Argument(8, bytes(range(8)), "x", (0,)), Argument(16, b"", "y", ())
        ),
    )  # fmt: skip
    copies = Node(
        NodeKind.MEMCPY, "memcpy", operands=(Operand("src", 1 << 47, 64, True), Operand("dst", 2, 64, written=True))
    )
    body = GraphView((kernel, Node(NodeKind.MEMSET, "memset", scalars=(("value", "0x0"),))), (Edge(0, 1, True),))
    nodes = [Node(kind, f"{kind.value} {nasty}", remark=nasty) for kind, nasty in zip(NodeKind, NASTY, strict=False)]
    nodes += [kernel, copies, Node(NodeKind.CHILD, "child graph", bodies=(body,))]
    nodes += [Node(NodeKind.CONDITIONAL, "switch", bodies=(body, GraphView(()), GraphView((nodes[-1],))))]
    edges = [Edge(at - 1, at, at % 3 == 0) for at in range(1, len(nodes))] + [Edge(0, len(nodes) - 1)]
    return GraphView(tuple(nodes), tuple(sorted(edges, key=lambda edge: (edge.source, edge.target))))


def views() -> dict[str, GraphView]:
    rig, x = Countdown(CPU), torch.ones(4, 3)
    step = op_trace_of(lambda: torch.cat([x * 2, torch.empty(4, 3).fill_(1)]).softmax(-1))
    loop = rig.loop(rig.step)
    return {
        "every kind": every_kind(), "op_trace": inspect_graph(step), "loop": inspect_graph(loop), "empty": GraphView(())
    }  # fmt: skip


# -- JSON


@pytest.mark.parametrize("name", ["every kind", "op_trace", "loop", "empty"])
def test_json_round_trip(name: str) -> None:
    view = views()[name]
    assert GraphView.from_json(json.loads(json.dumps(view.to_json()))) == view


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a JSON value with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from spots(value[key])


def junk(rng: random.Random) -> Any:
    return rng.choice(
        [None, True, -1, 0, 1 << 80, 1.5, float("nan"), float("inf"), "", "x", "ff", [], [1], [[]], {}, {"format": 1},
         [0, 0], [[0, 0, 0]], [["src", 0, 0, 0, 0]], "kernel", b"", (), [None] * 5]
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(300))
def test_damaged_json_raises_or_is_a_valid_view(seed: int) -> None:
    rng = random.Random(seed)
    values = copy.deepcopy(every_kind().to_json())
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        where, key = rng.choice(list(spots(values)))
        if rng.random() < 0.3:
            del where[key]
        else:
            where[key] = junk(rng)
    try:
        view = GraphView.from_json(values)
    except ConfigError:
        return
    assert GraphView.from_json(json.loads(json.dumps(view.to_json()))) == view
    assert view.num_nodes == sum(view.counts().values())


@pytest.mark.parametrize("values", [None, 1, [], "graph", {}, {"format": 2}, {"format": 1}, {"format": 1, "nodes": {}}])
def test_values_that_are_no_graph_raise(values: object) -> None:
    with pytest.raises(ConfigError, match=INVALID):
        GraphView.from_json(values)


DAMAGE = {
    "backwards": ({"edges": [[1, 0, 0]]}, "edges: an edge does not lead from a node to a later one"),
    "to-itself": ({"edges": [[1, 1, 0]]}, "edges: an edge does not lead from a node to a later one"),
    "beyond": ({"edges": [[0, 99, 0]]}, "edges: an edge does not lead from a node to a later one"),
    "negative": ({"edges": [[-1, 0, 0]]}, "edges: an edge does not lead from a node to a later one"),
    "pointer": (
        {"nodes": [{"kind": "kernel", "name": "f", "arguments": [[0, "00" * 8, "", [1]]]}]},
        "pointers: an offset is outside of its argument",
    ),
    "kind": ({"nodes": [{"kind": "kernels", "name": "f"}]}, NOT_A_VIEW),
    "hex": (
        {"nodes": [{"kind": "kernel", "name": "f", "arguments": [[0, "0g", "", None]]}]},
        NOT_A_VIEW,
    ),
    "infinite": (
        {"nodes": [{"kind": "kernel", "name": "f", "shared_bytes": float("inf")}]},
        NOT_A_VIEW,
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_errors_of_damaged_json(case: str) -> None:
    fields, text = DAMAGE[case]
    values = GraphView((Node(NodeKind.EMPTY, "a"), Node(NodeKind.EMPTY, "b"))).to_json()
    with pytest.raises(ConfigError, match=text):
        GraphView.from_json(values | {"edges": []} | fields)


def nested(count: int, fields: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"origin": "cuda", "edges": [], "nodes": [{"kind": "empty", "name": "e"} | fields]}
    for _ in range(count):
        values = {"origin": "cuda", "edges": [], "nodes": [{"kind": "child graph", "name": "c", "bodies": [values]}]}
    return {"format": 1} | values


def test_deeply_nested_bodies_raise() -> None:
    for count in (65, 300, 20_000):
        with pytest.raises(ConfigError, match="bodies: they are nested more than 64 deep"):
            GraphView.from_json(nested(count, {}))
    view = GraphView.from_json(nested(64, {}))
    assert GraphView.from_json(json.loads(json.dumps(view.to_json()))) == view
    assert view.num_nodes == 65


@pytest.mark.parametrize(
    "name", ["kind", "name", "symbol", "grid", "attributes", "arguments", "operands", "scalars", "bodies"]
)
def test_deeply_nested_lists_raise(name: str) -> None:
    endless: list[Any] = []
    for _ in range(20_000):
        endless = [endless]
    for values in (
        nested(0, {name: endless}),
        nested(0, {name: {"a": endless}}),
        nested(0, {}) | {name: 1, "format": endless},
    ):
        with pytest.raises(ConfigError, match=INVALID):
            GraphView.from_json(values)


# -- order and size


def test_a_valid_order_is_kept() -> None:
    labels = ["d", "c", "b", "a"]
    assert topological_order(labels, []) == [0, 1, 2, 3]
    assert topological_order(labels, [(0, 3), (1, 2)]) == [0, 1, 2, 3]


def test_order_by_depth_then_name() -> None:
    labels = ["end", "b", "a", "root"]
    assert topological_order(labels, [(3, 2), (3, 1), (1, 0), (2, 0)]) == [3, 2, 1, 0]


def test_order_by_neighbourhood() -> None:
    """Two nodes of one name that differ in their neighbours only."""
    edges = {("root", "f1"), ("root", "f2"), ("f1", "g"), ("f2", "h")}
    for names in (["h", "f1", "g", "f2", "root"], ["g", "f2", "f1", "root", "h"], ["f2", "h", "f1", "g", "root"]):
        pairs = [(names.index(source), names.index(target)) for source, target in edges]
        order = topological_order([name[0] for name in names], pairs)
        found = [names[at] for at in order]
        assert found[1:3] == ["f2", "f1"] or found[1:3] == ["f1", "f2"]
        assert (found[1] == "f1") == FIRST.setdefault("f1 is first", found[1] == "f1")


FIRST: dict[str, bool] = {}


def test_order_raises_for_a_cycle() -> None:
    with pytest.raises(CaptureError, match="edges: there is a cycle among 3 nodes"):
        topological_order(["a", "b", "c", "d"], [(1, 2), (2, 3), (3, 1)])


def test_a_graph_of_20_000_nodes() -> None:
    argument = Argument(0, bytes(8))
    node = Node(NodeKind.KERNEL, "k", grid=(1, 1, 1), block=(32, 1, 1), arguments=(argument,) * 4)
    view = GraphView((node,) * 20_000, tuple(Edge(at, at + 1) for at in range(19_999)))
    start = time.perf_counter()
    assert sum(1 for _ in view.walk()) == view.num_nodes == view.counts()["k"] == 20_000
    walked = time.perf_counter() - start
    order = topological_order(["k"] * 20_000, [(at + 1, at) for at in range(19_999)])
    assert order == list(range(19_999, -1, -1))
    assert walked < 1


def test_arguments_of_wrong_types_raise(tmp_path: Path) -> None:
    view, wrong, page = every_kind(), cast("Any", 3), tmp_path / "page.html"
    for call in (
        lambda: diff(wrong, view), lambda: fingerprint(wrong), lambda: write_page(wrong, page, title="x"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"view: expected GraphView, got 3; pass inspect_graph\(graph\)"):
            call()
    for call in (
        lambda: diff(view, view, wrong), lambda: fingerprint(view, wrong),
        lambda: write_page(view, page, title="x", memory=wrong),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="memory: expected MemoryMap, got 3"):
            call()
    for path, title, text in ((None, "x", "path: expected str or Path"), (page, 3, "title: expected str, got 3")):
        with pytest.raises(ConfigError, match=text):
            write_page(view, cast("Any", path), title=cast("Any", title))
    for call in (lambda: memory_of(static=wrong), lambda: memory_of(weights=wrong)):
        with pytest.raises(ConfigError, match="expected tensors by name, got 3"):
            call()
    for waits in ("wait*", 3):
        with pytest.raises(ConfigError, match="waits: expected a list of name patterns"):
            audit(view, memory_of(), waits=cast("Any", waits))


@pytest.mark.parametrize(
    "node",
    [
        {"arguments": [[1 << 70, "00", "", None]]},
        {"operands": [["src", -5, 1, 0, 0]]},
        {"operands": [["src", 0, 1 << 70, 0, 0]]},
    ],
)
def test_numbers_out_of_range_raise(node: dict[str, object]) -> None:
    values = {"format": 1, "nodes": [{"kind": "kernel", "name": "k", **node}], "edges": [], "origin": "cuda"}
    with pytest.raises(ConfigError, match=r"expected numbers of \d+ bits, got "):
        GraphView.from_json(values)
