"""A captured graph as Python objects: nodes in topological order, what each was launched with, and the edges.

    view = inspect_graph(graph)                     # of cuda.py: a torch.cuda.CUDAGraph, or a CPU twin of one
    for place, node in view.walk():
        print(place, node.kind, node.name, node.grid)

A view is plain data. Nothing in it refers to the graph any more, and `to_json` and `from_json` keep all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError

Place = tuple[int, ...]
"""Where a node stands: its index; for a node of a body the index of the outer node, of the body, and its own there."""

FORMAT = 1
"""Version of the JSON."""

MAX_DEPTH = 64
"""Bodies in one another that JSON may have."""


class NodeKind(str, Enum):
    """What a node does. OP is one operator of a CPU twin."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    CHILD = "child graph"
    CONDITIONAL = "conditional"
    EMPTY = "empty"
    HOST = "host function"
    EVENT_RECORD = "event record"
    EVENT_WAIT = "event wait"
    ALLOC = "allocation"
    FREE = "free"
    OP = "op"
    OTHER = "other"


class Argument(NamedTuple):
    """One argument of a kernel, by value. A tuple, as graphs have thousands of them.

    offset    where it stands among the kernel's arguments, in bytes
    data      its bytes, as the launch has them
    name      its name where that is known, as of Triton kernels; else ""
    pointers  offsets within `data` of the words that are addresses, where that is known; None: any word may be one
    """

    offset: int
    data: bytes
    name: str = ""
    pointers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """Memory that a memcpy, a memset or an op works on.

    role      "src" or "dst"; "memory" of an allocation and a free; of an op the name of the argument, or "out" for what
              it returns
    address   of its first byte; 0 where the driver does not tell
    nbytes    from the first byte to the last
    host      whether it lies in the host's memory. Of an op on a CPU: False, as its memory stands for a device's
    written   whether the node may write it
    """

    role: str
    address: int
    nbytes: int
    host: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    name        of the kernel, demangled; of the op; else what the node does
    symbol      of the kernel, as the driver has it
    grid        blocks in x, y, z, and block: threads. None where nothing is launched
    attributes  of the launch, by name: cluster, cooperative, priority, ... Those that are as by default are left out
    arguments   of a kernel
    operands    of a memcpy, a memset, an allocation, a free, an op
    scalars     of an op: name and value of each argument that is no tensor. Of a memset the value and the extents, of a
                copy the extents if it has rows; of an event its number in this graph
    bodies      the graphs inside of a child graph node or of a conditional node
    remark      what could not be read, and why; "" where all was
    """

    kind: NodeKind
    name: str
    symbol: str = ""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_bytes: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[Argument, ...] = ()
    operands: tuple[Operand, ...] = ()
    scalars: tuple[tuple[str, str], ...] = ()
    bodies: tuple[GraphView, ...] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """One node waits for another: both by index. `programmatic`: it may begin before the other has ended."""

    source: int
    target: int
    programmatic: bool = False


@dataclass(frozen=True, slots=True)
class GraphView:
    """What a graph holds.

    nodes    in topological order. Two captures of one step have them in the same order
    edges    by the indices of both nodes, sorted
    origin   "cuda", or "op trace" for a CPU twin
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    origin: str = "cuda"

    def walk(self, at: Place = ()) -> Iterator[tuple[Place, Node]]:
        """Every node with its place, those in bodies behind the node that has them."""
        for index, node in enumerate(self.nodes):
            place = (*at, index)
            yield place, node
            for which, body in enumerate(node.bodies):
                yield from body.walk((*place, which))

    def node(self, place: Place) -> Node:
        """The node at a place. Raises: ConfigError where there is none."""
        view, node = self, None
        for depth, index in enumerate(place):
            nodes = view.nodes if depth % 2 == 0 else node.bodies if node is not None else ()
            if not 0 <= index < len(nodes):
                raise ConfigError(f"place: expected one of this graph, got {place_name(place)}; take one of walk()")
            found = nodes[index]
            if isinstance(found, Node):
                node = found
            else:
                view = found
        if node is None or len(place) % 2 == 0:
            raise ConfigError(f"place: expected one of a node, got {place_name(place)}; take one of walk()")
        return node

    @property
    def num_nodes(self) -> int:
        """Nodes, those in bodies included."""
        return sum(1 for _ in self.walk())

    def counts(self) -> Counter[str]:
        """How often each name stands, those in bodies included."""
        return Counter(node.name for _, node in self.walk())

    def to_json(self) -> dict[str, Any]:
        """The view as values that `json.dumps` takes; bytes in hexadecimal."""
        return {"format": FORMAT, **_graph_to_json(self)}

    @staticmethod
    def from_json(values: Any) -> GraphView:
        """The view that `to_json` wrote. Raises: ConfigError for anything else."""
        try:
            if values["format"] != FORMAT:
                raise ConfigError(f"format: expected {FORMAT}, got {shown(values['format'])}; write it by this version")
            return _graph_from_json(values, 0)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"graph: expected what to_json() wrote, got {shown(error)} while reading it") from error


def place_name(place: Place) -> str:
    """A place as text: "12", or "3.0.7" for node 7 of the first body of node 3."""
    return ".".join(map(str, place))


def _graph_to_json(view: GraphView) -> dict[str, Any]:
    return {
        "origin": view.origin,
        "nodes": [_node_to_json(node) for node in view.nodes],
        "edges": [[edge.source, edge.target, int(edge.programmatic)] for edge in view.edges],
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    """What is empty is left out: most nodes have few of the fields."""
    values: dict[str, Any] = {"kind": node.kind.value, "name": node.name}
    lists: dict[str, Any] = {
        "arguments": [[a.offset, a.data.hex(), a.name, a.pointers] for a in node.arguments],
        "operands": [[o.role, o.address, o.nbytes, int(o.host), int(o.written)] for o in node.operands],
        "scalars": [list(scalar) for scalar in node.scalars],
        "bodies": [_graph_to_json(body) for body in node.bodies],
    }
    plain = {
        "symbol": node.symbol, "grid": node.grid, "block": node.block, "shared_bytes": node.shared_bytes,
        "attributes": dict(node.attributes), "remark": node.remark,
    }  # fmt: skip
    return values | {name: value for name, value in (plain | lists).items() if value}


def _graph_from_json(values: Mapping[str, Any], depth: int) -> GraphView:
    if depth > MAX_DEPTH:
        raise ConfigError(f"bodies: expected at most {MAX_DEPTH} in one another, got more; the file is damaged")
    nodes = tuple(_node_from_json(node, depth) for node in values["nodes"])
    edges = tuple(Edge(int(source), int(target), bool(early)) for source, target, early in values["edges"])
    if any(not (0 <= edge.source < edge.target < len(nodes)) for edge in edges):
        raise ConfigError("edges: expected each from a node to a later one, got others; the file is damaged")
    return GraphView(nodes, edges, _text(values["origin"]))


def _node_from_json(values: Mapping[str, Any], depth: int) -> Node:
    return Node(
        kind=NodeKind(_text(values["kind"])),
        name=_text(values["name"]),
        symbol=_text(values.get("symbol", "")),
        grid=_extents(values.get("grid")),
        block=_extents(values.get("block")),
        shared_bytes=int(values.get("shared_bytes", 0)),
        attributes={_text(name): _text(value) for name, value in values.get("attributes", {}).items()},
        arguments=tuple(_argument_from_json(*argument) for argument in values.get("arguments", ())),
        operands=tuple(
            Operand(_text(role), _within(address, 64), _within(nbytes, 63), bool(host), bool(written))
            for role, address, nbytes, host, written in values.get("operands", ())
        ),
        scalars=tuple((_text(name), _text(value)) for name, value in values.get("scalars", ())),
        bodies=tuple(_graph_from_json(body, depth + 1) for body in values.get("bodies", ())),
        remark=_text(values.get("remark", "")),
    )


def _argument_from_json(offset: Any, data: Any, name: Any, pointers: Any) -> Argument:
    content = bytes.fromhex(data)
    at = None if pointers is None else tuple(map(int, pointers))
    if any(not 0 <= one <= len(content) - 8 for one in at or ()):
        raise ConfigError("pointers: expected offsets of words in their argument, got others; the file is damaged")
    return Argument(_within(offset, 31), content, _text(name), at)


def _within(value: Any, bits: int) -> int:
    """A number of so many bits."""
    number = int(value)
    if number < 0 or number >> bits:
        raise ConfigError(f"graph: expected numbers of {bits} bits, got {shown(number)}; the file is damaged")
    return number


def _extents(values: Any) -> tuple[int, int, int] | None:
    if values is None:
        return None
    x, y, z = map(int, values)
    return x, y, z


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {shown(value)}")
    return value
