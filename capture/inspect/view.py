"""A captured graph as Python objects: nodes in topological order with their launch parameters, and edges.

    view = inspect_graph(graph)                     # from cuda.py; a torch.cuda.CUDAGraph or an op trace
    for place, node in view.walk():
        print(place, node.kind, node.name, node.grid)

A view is plain data without references to the graph. `to_json` and `from_json` are lossless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import ConfigError

Place = tuple[int, ...]
"""Place of a node: its index; in a body: the indices of the outer node, the body, and the node in the body."""

FORMAT = 1
"""Version of the JSON format."""


class NodeKind(str, Enum):
    """Kind of a node. OP is an operator of an op trace."""

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
    """One argument of a kernel. A tuple, because graphs have thousands of arguments.

    offset    offset in the kernel's arguments, in bytes
    data      bytes of the argument at launch
    name      name; "" except for Triton kernels
    pointers  offsets of the addresses in `data`; None: unknown, any word may be an address
    """

    offset: int
    data: bytes
    name: str = ""
    pointers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """Memory accessed by a memcpy, a memset or an op.

    role      "src" or "dst"; "memory" for an allocation or a free; for an op, the name of the argument, or "out" for a
              result
    address   address of its first byte; 0 if unknown
    nbytes    number of bytes from the first to the last
    host      whether it is host memory; False for ops on a CPU, whose memory represents device memory
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

    name        demangled name of the kernel, or name of the op; for other nodes, the kind of work
    symbol      mangled name of the kernel
    grid        number of blocks in x, y, z; None if no kernel is launched
    block       number of threads in x, y, z; None if no kernel is launched
    attributes  launch attributes that differ from their defaults, by name: cluster, cooperative, priority, ...
    arguments   arguments of a kernel
    operands    memory of a memcpy, memset, allocation, free or op
    scalars     name and value: the non-tensor arguments of an op, value and extents of a memset, extents of a multi-row
                copy, or number of an event in this graph
    bodies      graphs of a child graph node or of a conditional node
    remark      parts that could not be read, and the reasons; "" if everything was read
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
    """The target waits for the source (node indices). `programmatic`: it may start before the source has finished."""

    source: int
    target: int
    programmatic: bool = False


@dataclass(frozen=True, slots=True)
class GraphView:
    """Nodes and edges of a graph.

    nodes    in topological order, which is the capture order
    edges    sorted by source and target
    origin   "cuda" or "op trace"
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    origin: str = "cuda"

    def walk(self, at: Place = ()) -> Iterator[tuple[Place, Node]]:
        """Yield every node with its place. The nodes of bodies follow the node that contains them."""
        for index, node in enumerate(self.nodes):
            place = (*at, index)
            yield place, node
            for which, body in enumerate(node.bodies):
                yield from body.walk((*place, which))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including bodies."""
        return sum(1 for _ in self.walk())

    def counts(self) -> Counter[str]:
        """Return the number of nodes by name, including bodies."""
        return Counter(node.name for _, node in self.walk())

    def to_json(self) -> dict[str, Any]:
        """Return the view as values for `json.dumps`, with bytes as hexadecimal strings."""
        return {"format": FORMAT, **_graph_to_json(self)}

    @staticmethod
    def from_json(values: Any) -> GraphView:
        """Return the view from the result of `to_json`. Raises: ConfigError: if the values are invalid."""
        try:
            if values["format"] != FORMAT:
                raise ConfigError(f"format: expected {FORMAT}, got {shown(values['format'])}; write the file again")
            return _graph_from_json(values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"graph: not the result of to_json(), {shown(error)}; write the file again") from error


def place_name(place: Place) -> str:
    """Return a place as text: "12", or "3.0.7" for node 7 in the first body of node 3."""
    return ".".join(map(str, place))


def _graph_to_json(view: GraphView) -> dict[str, Any]:
    return {
        "origin": view.origin,
        "nodes": [_node_to_json(node) for node in view.nodes],
        "edges": [[edge.source, edge.target, int(edge.programmatic)] for edge in view.edges],
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    """Return a node without its empty fields, because most nodes use few fields."""
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


def _graph_from_json(values: Mapping[str, Any]) -> GraphView:
    nodes = tuple(map(_node_from_json, values["nodes"]))
    edges = tuple(Edge(source, target, bool(early)) for source, target, early in values["edges"])
    if any(not (0 <= edge.source < edge.target < len(nodes)) for edge in edges):
        raise ConfigError("edges: an edge does not lead to a later node; write the file again")
    return GraphView(nodes, edges, values["origin"])


def _node_from_json(values: Mapping[str, Any]) -> Node:
    return Node(**{name: _FROM_JSON[name](value) if name in _FROM_JSON else value for name, value in values.items()})


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "kind": NodeKind,
    "grid": tuple,
    "block": tuple,
    "arguments": lambda rows: tuple(
        Argument(offset, bytes.fromhex(data), name, None if pointers is None else tuple(pointers))
        for offset, data, name, pointers in rows
    ),
    "operands": lambda rows: tuple(
        Operand(role, address, nbytes, bool(host), bool(written)) for role, address, nbytes, host, written in rows
    ),
    "scalars": lambda rows: tuple(map(tuple, rows)),
    "bodies": lambda rows: tuple(map(_graph_from_json, rows)),
}
"""Fields with a different JSON format."""
