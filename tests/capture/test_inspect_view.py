"""Views as files: JSON that comes back whole or is refused, drawings that can be read, and walks of long graphs."""

from __future__ import annotations

import copy
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from graphrt.capture.inspect.audit import audit, memory_of
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.diff import diff, fingerprint
from graphrt.capture.inspect.dot import to_dot
from graphrt.capture.inspect.order import topological_order
from graphrt.capture.inspect.page import write_page
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand, place_name
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels.errors import CaptureError, ConfigError
from tests.support.capture_rig import CPU, KEY, Countdown

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
    recorder = OpTraceRecorder()
    step = recorder.capture(lambda: torch.cat([x * 2, torch.empty(4, 3).fill_(1)]).softmax(-1), KEY, lambda: None)
    loop = rig.loop(rig.step)
    return {
        "every kind": every_kind(), "op_trace": inspect_graph(step), "loop": inspect_graph(loop), "empty": GraphView(())
    }  # fmt: skip


# -- JSON


@pytest.mark.parametrize("name", ["every kind", "op_trace", "loop", "empty"])
def test_what_was_written_comes_back(name: str) -> None:
    view = views()[name]
    assert GraphView.from_json(json.loads(json.dumps(view.to_json()))) == view


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value, with every key in it."""
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
def test_damage_is_refused_or_harmless(seed: int) -> None:
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
    assert to_dot(view).startswith("digraph")
    assert view.num_nodes == sum(view.counts().values())


@pytest.mark.parametrize("values", [None, 1, [], "graph", {}, {"format": 2}, {"format": 1}, {"format": 1, "nodes": {}}])
def test_what_is_no_graph(values: object) -> None:
    with pytest.raises(ConfigError, match=r"(graph|format): expected"):
        GraphView.from_json(values)


DAMAGE = {
    "backwards": ({"edges": [[1, 0, 0]]}, "edges: expected each from a node to a later one"),
    "to-itself": ({"edges": [[1, 1, 0]]}, "edges: expected each from a node to a later one"),
    "beyond": ({"edges": [[0, 99, 0]]}, "edges: expected each from a node to a later one"),
    "negative": ({"edges": [[-1, 0, 0]]}, "edges: expected each from a node to a later one"),
    "pointer": (
        {"nodes": [{"kind": "kernel", "name": "f", "arguments": [[0, "00" * 8, "", [1]]]}]},
        "pointers: expected",
    ),
    "kind": ({"nodes": [{"kind": "kernels", "name": "f"}]}, "while reading it"),
    "hex": ({"nodes": [{"kind": "kernel", "name": "f", "arguments": [[0, "0g", "", None]]}]}, "while reading it"),
    "infinite": ({"nodes": [{"kind": "kernel", "name": "f", "shared_bytes": float("inf")}]}, "while reading it"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str) -> None:
    fields, text = DAMAGE[case]
    values = GraphView((Node(NodeKind.EMPTY, "a"), Node(NodeKind.EMPTY, "b"))).to_json()
    with pytest.raises(ConfigError, match=text):
        GraphView.from_json(values | {"edges": []} | fields)


def nested(count: int, fields: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"origin": "cuda", "edges": [], "nodes": [{"kind": "empty", "name": "e"} | fields]}
    for _ in range(count):
        values = {"origin": "cuda", "edges": [], "nodes": [{"kind": "child graph", "name": "c", "bodies": [values]}]}
    return {"format": 1} | values


def test_bodies_in_bodies_without_end() -> None:
    for count in (65, 300, 20_000):
        with pytest.raises(ConfigError, match="bodies: expected at most 64 in one another"):
            GraphView.from_json(nested(count, {}))
    view = GraphView.from_json(nested(64, {}))
    assert GraphView.from_json(json.loads(json.dumps(view.to_json()))) == view
    assert len(Dot(to_dot(view)).clusters) == 64
    assert view.num_nodes == 65


@pytest.mark.parametrize(
    "name", ["kind", "name", "symbol", "grid", "attributes", "arguments", "operands", "scalars", "bodies"]
)
def test_lists_in_lists_without_end(name: str) -> None:
    endless: list[Any] = []
    for _ in range(20_000):
        endless = [endless]
    for values in (
        nested(0, {name: endless}),
        nested(0, {name: {"a": endless}}),
        nested(0, {}) | {name: 1, "format": endless},
    ):
        with pytest.raises(ConfigError, match=r"(graph|format): expected"):
            GraphView.from_json(values)


# -- DOT

TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[{}\[\];,=])', re.DOTALL)


class Dot:
    """Reads the part of the DOT language that drawings here are in, and nothing else."""

    def __init__(self, text: str) -> None:
        assert "\0" not in text
        self.tokens, at, end = [], 0, len(text.rstrip())
        while at < end:
            found = TOKEN.match(text, at)
            assert found, text[at : at + 40]
            self.tokens.append(found[1])
            at = found.end()
        self.nodes: dict[str, dict[str, str]] = {}
        self.edges: list[tuple[str, str, dict[str, str]]] = []
        self.clusters: dict[str, list[str]] = {}
        self.take("digraph")
        self.take("graphrt")
        self.block([])
        assert not self.tokens

    def take(self, *expected: str) -> str:
        token = self.tokens.pop(0)
        assert not expected or token in expected, (token, expected)
        return token

    def name(self) -> str:
        token = self.take()
        assert token[0] == '"' or token.isidentifier() or token.isdigit(), token
        return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], token[1:-1]) if token[0] == '"' else token

    def block(self, members: list[str]) -> None:
        self.take("{")
        while self.tokens[0] != "}":
            self.statement(members)
        self.take("}")

    def statement(self, members: list[str]) -> None:
        if self.tokens[0] == "subgraph":
            self.take()
            inner = self.clusters.setdefault(self.name(), [])
            self.block(inner)
            members.extend(inner)
            return
        first = self.name()
        if self.tokens[0] == "=":
            self.take()
            self.name()
        elif self.tokens[0] == "->":
            self.take()
            second = self.name()
            self.edges.append((first, second, self.attributes()))
        else:
            attributes = self.attributes()
            if first != "node":
                assert first not in self.nodes
                self.nodes[first] = attributes
                members.append(first)
        self.take(";")

    def attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.tokens[0] == "[":
            self.take()
            while True:
                key = self.name()
                self.take("=")
                found[key] = self.name()
                if self.take(",", "]") == "]":
                    break
        return found


@pytest.mark.parametrize("name", ["every kind", "op_trace", "loop", "empty"])
def test_a_drawing_has_all_nodes_and_edges(name: str) -> None:
    view = views()[name]
    dot = Dot(to_dot(view))
    places = {f"n{place_name(place)}": node for place, node in view.walk()}
    assert dot.nodes.keys() == places.keys()
    lines = lambda text: text.replace("\r\n", "\n").replace("\r", "\n")  # noqa: E731
    for key, node in places.items():
        assert dot.nodes[key]["tooltip"] == lines(node.name)
        assert dot.nodes[key]["label"].startswith(f"{key[1:]} {lines(node.name)}"[:50])
    assert {end for source, target, _ in dot.edges for end in (source, target)} <= dot.nodes.keys()
    plain = {(s, t, a.get("style") == "dashed") for s, t, a in dot.edges if a.get("style") != "dotted"}
    expected = {(f"n{edge.source}", f"n{edge.target}", edge.programmatic) for edge in view.edges}
    outer = {edge for edge in plain if "." not in edge[0]}
    assert outer == expected
    for place, node in view.walk():
        for which, body in enumerate(node.bodies):
            cluster = f"cluster_{place_name((*place, which))}"
            assert len(dot.clusters[cluster]) == body.num_nodes
            entries = [a for s, _, a in dot.edges if a.get("lhead") == cluster and s == f"n{place_name(place)}"]
            assert len(entries) == bool(body.nodes)


@pytest.mark.parametrize("name", NASTY)
def test_names_are_escaped(name: str) -> None:
    dot = Dot(to_dot(GraphView((Node(NodeKind.KERNEL, name + "\0", grid=(1, 2, 3), block=(4, 5, 6)),))))
    shown = name.replace("\r\n", "\n").replace("\r", "\n")
    assert dot.nodes["n0"]["tooltip"] == shown
    assert dot.nodes["n0"]["label"] == f"0 {shown}\n1x2x3 blocks of 4x5x6"


def test_long_names_are_cut_in_the_drawing_alone() -> None:
    dot = Dot(to_dot(GraphView((Node(NodeKind.KERNEL, "k" * 3000),))))
    assert dot.nodes["n0"]["label"] == f"0 {'k' * 57}..."
    assert dot.nodes["n0"]["tooltip"] == "k" * 3000


# -- order and size


def test_order_keeps_a_list_that_is_one() -> None:
    labels = ["d", "c", "b", "a"]
    assert topological_order(labels, []) == [0, 1, 2, 3]
    assert topological_order(labels, [(0, 3), (1, 2)]) == [0, 1, 2, 3]


def test_order_by_depth_then_name() -> None:
    labels = ["end", "b", "a", "root"]
    assert topological_order(labels, [(3, 2), (3, 1), (1, 0), (2, 0)]) == [3, 2, 1, 0]


def test_order_by_what_comes_before_and_behind() -> None:
    """Two nodes of one name, which only their neighbours tell apart."""
    edges = {("root", "f1"), ("root", "f2"), ("f1", "g"), ("f2", "h")}
    for names in (["h", "f1", "g", "f2", "root"], ["g", "f2", "f1", "root", "h"], ["f2", "h", "f1", "g", "root"]):
        pairs = [(names.index(source), names.index(target)) for source, target in edges]
        order = topological_order([name[0] for name in names], pairs)
        found = [names[at] for at in order]
        assert found[1:3] == ["f2", "f1"] or found[1:3] == ["f1", "f2"]
        assert (found[1] == "f1") == FIRST.setdefault("f1 is first", found[1] == "f1")


FIRST: dict[str, bool] = {}


def test_order_refuses_a_circle() -> None:
    with pytest.raises(CaptureError, match="edges: expected no circle, got one among 3 nodes"):
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
    assert len(Dot(to_dot(GraphView(view.nodes[:500], view.edges[:499]))).edges) == 499
    assert len(to_dot(view).splitlines()) == 3 + 20_000 + 19_999 + 1
    assert walked < 1


def test_what_is_no_view_and_no_map_is_refused(tmp_path: Path) -> None:
    view, wrong, page = every_kind(), cast("Any", 3), tmp_path / "page.html"
    for call in (
        lambda: diff(wrong, view), lambda: fingerprint(wrong), lambda: to_dot(wrong),
        lambda: write_page(wrong, page, title="x"),
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
        with pytest.raises(ConfigError, match="waits: expected patterns of names"):
            audit(view, memory_of(), waits=cast("Any", waits))


@pytest.mark.parametrize(
    "node",
    [
        {"arguments": [[1 << 70, "00", "", None]]},
        {"operands": [["src", -5, 1, 0, 0]]},
        {"operands": [["src", 0, 1 << 70, 0, 0]]},
    ],
)
def test_numbers_that_no_graph_has(node: dict[str, object]) -> None:
    values = {"format": 1, "nodes": [{"kind": "kernel", "name": "k", **node}], "edges": [], "origin": "cuda"}
    with pytest.raises(ConfigError, match=r"expected numbers of \d+ bits, got "):
        GraphView.from_json(values)
