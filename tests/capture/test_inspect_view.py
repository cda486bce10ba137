"""GraphView: JSON, invalid JSON, and the order of nodes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from graphrt.capture.inspect.audit import audit, memory_of
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.diff import diff
from graphrt.capture.inspect.order import topological_order
from graphrt.capture.inspect.page import write_page
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand
from graphrt.kernels.errors import CaptureError, ConfigError
from tests.support.capture_rig import CPU, Countdown, op_trace_of

NASTY = ['"', "\\", "two\nlines\r\nthree\rfour", "<b>&amp;</b>", "é中", "tab\t", ""]


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
    nodes = [Node(kind, f"{kind.value} {nasty}", remark=nasty) for kind, nasty in zip(NodeKind, itertools.cycle(NASTY))]
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


NODE = {"kind": "kernel", "name": "f"}
NOT_A_VIEW = "graph: not the result of to_json"
BACKWARDS = "edges: an edge does not lead to a later node"
INVALID: dict[str, tuple[Any, str]] = {
    "none": (None, NOT_A_VIEW),
    "list": ([], NOT_A_VIEW),
    "empty": ({}, NOT_A_VIEW),
    "format": ({"format": 2}, "format: expected 1, got 2"),
    "no nodes": ({"format": 1}, NOT_A_VIEW),
    **{
        f"edge {source}-{target}": ({"edges": [[source, target, 0]], "nodes": [NODE, NODE]}, BACKWARDS)
        for source, target in ((1, 0), (1, 1), (0, 99), (-1, 0))
    },
    "kind": ({"nodes": [NODE | {"kind": "kernels"}]}, NOT_A_VIEW),
    "field": ({"nodes": [NODE | {"color": "red"}]}, NOT_A_VIEW),
    "hex": ({"nodes": [NODE | {"arguments": [[0, "0g", "", None]]}]}, NOT_A_VIEW),
    "operand": ({"nodes": [NODE | {"operands": [["src", 0]]}]}, NOT_A_VIEW),
}


ENDLESS: dict[str, Any] = {"format": 1, "origin": "cuda", "edges": [], "nodes": []}
ENDLESS["nodes"].append({"kind": "child graph", "name": "c", "bodies": [ENDLESS]})
INVALID["endless nesting"] = ENDLESS, NOT_A_VIEW


@pytest.mark.parametrize("case", INVALID)
def test_values_that_are_no_graph_raise(case: str) -> None:
    values, text = INVALID[case]
    if isinstance(values, dict) and values and "format" not in values:
        values = {"format": 1, "origin": "cuda", "edges": [], **values}
    with pytest.raises(ConfigError, match=text):
        GraphView.from_json(values)


# -- order


def test_nodes_keep_their_order_as_far_as_their_dependencies_allow() -> None:
    assert topological_order(4, []) == [0, 1, 2, 3]
    assert topological_order(4, [(0, 3), (1, 2)]) == [0, 1, 2, 3]
    assert topological_order(5, [(3, 2), (3, 1), (1, 0), (2, 0)]) == [3, 1, 2, 0, 4]
    with pytest.raises(CaptureError, match="edges: there is a cycle among 3 nodes"):
        topological_order(4, [(1, 2), (2, 3), (3, 1)])


def test_arguments_of_wrong_types_raise(tmp_path: Path) -> None:
    view, wrong, page = every_kind(), cast("Any", 3), tmp_path / "page.html"
    calls = {
        r"view: expected GraphView, got 3; pass inspect_graph\(graph\)": (
            lambda: diff(wrong, view), lambda: write_page(wrong, page, title="x"),
        ),
        "memory: expected MemoryMap, got 3": (
            lambda: diff(view, view, wrong), lambda: write_page(view, page, title="x", memory=wrong),
            lambda: audit(view, wrong),
        ),
        "path: expected str or Path": (lambda: write_page(view, cast("Any", None), title="x"),),
        "title: expected str, got 3": (lambda: write_page(view, page, title=wrong),),
        "expected named tensors, got 3": (lambda: memory_of(static=wrong), lambda: memory_of(weights=wrong)),
    }  # fmt: skip
    for text, each in calls.items():
        for call in each:
            with pytest.raises(ConfigError, match=text):
                call()
