"""A captured graph as a drawing: text for Graphviz, with the bodies of nodes as boxes around their nodes."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.capture.inspect.view import GraphView, Node, NodeKind, Place, place_name
from graphrt.kernels.checks import check_instance

_LONGEST_NAME = 60
_COLOURS = {
    NodeKind.KERNEL: "#cfe2f3", NodeKind.OP: "#cfe2f3", NodeKind.MEMCPY: "#fce5cd", NodeKind.MEMSET: "#fff2cc",
    NodeKind.CHILD: "#d9ead3", NodeKind.CONDITIONAL: "#ead1dc", NodeKind.HOST: "#f4cccc",
}  # fmt: skip
_OTHER_COLOUR = "#eeeeee"


def to_dot(view: GraphView) -> str:
    """The graph in the DOT language, for `dot -Tsvg`.

    A node has its place as id ("n3", "n3.0.7" for node 7 of the first body of node 3) and its whole name as tooltip;
    long names are cut in the drawing. Programmatic edges are dashed. A dotted edge leads from a node to each of its
    bodies that has nodes.
    """
    check_instance("view", view, GraphView, advice="pass inspect_graph(graph)")
    lines = [
        "digraph graphrt {",
        "  compound=true;",
        '  node [shape=box, style=filled, fontname="monospace", fontsize=10];',
        *_graph(view, (), "  "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _graph(view: GraphView, at: Place, indent: str) -> Iterator[str]:
    for index, node in enumerate(view.nodes):
        place = (*at, index)
        yield f"{indent}{_id(place)} [{_attributes(node, place)}];"
        for which, body in enumerate(node.bodies):
            yield from _body(body, (*place, which), indent)
    for edge in view.edges:
        style = " [style=dashed]" if edge.programmatic else ""
        yield f"{indent}{_id((*at, edge.source))} -> {_id((*at, edge.target))}{style};"


def _body(body: GraphView, at: Place, indent: str) -> Iterator[str]:
    cluster = _quoted(f"cluster_{place_name(at)}")
    yield f"{indent}subgraph {cluster} {{"
    yield f"{indent}  label={_quoted(f'body {at[-1]} of {place_name(at[:-1])}')};"
    yield from _graph(body, at, indent + "  ")
    yield f"{indent}}}"
    if body.nodes:
        yield f"{indent}{_id(at[:-1])} -> {_id((*at, 0))} [style=dotted, lhead={cluster}];"


def _attributes(node: Node, place: Place) -> str:
    name = node.name if len(node.name) <= _LONGEST_NAME else f"{node.name[: _LONGEST_NAME - 3]}..."
    lines = [f"{place_name(place)} {name}"]
    if node.grid is not None and node.block is not None:
        lines.append(f"{_extents(node.grid)} blocks of {_extents(node.block)}")
    lines += [f"{operand.role}: {operand.nbytes} bytes" for operand in node.operands if node.kind is not NodeKind.OP]
    colour = _COLOURS.get(node.kind, _OTHER_COLOUR)
    label = "\n".join(lines)
    return f'label={_quoted(label)}, tooltip={_quoted(node.name)}, fillcolor="{colour}"'


def _id(place: Place) -> str:
    return _quoted(f"n{place_name(place)}")


def _extents(extents: tuple[int, int, int]) -> str:
    return "x".join(map(str, extents))


def _quoted(text: str) -> str:
    """A string of DOT. Graphviz reads backslashes in labels, ends a string at NUL, and knows lines by \\n alone."""
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    for line_end in ("\r\n", "\r", "\n"):
        text = text.replace(line_end, "\\n")
    return f'"{text}"'.replace("\0", "")
