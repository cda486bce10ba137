"""Compare two captured graphs: nodes and edges, launch shapes, and arguments.

    print(diff(inspect_graph(of_two), inspect_graph(of_four), memory, memory))     # what depends on the batch size

There are three levels. Each includes the previous one:

    topology    kinds, names and edges
    launches    grids, blocks, shared memory, attributes
    arguments   arguments, operands, scalars; addresses as (region, offset)

Struct padding is uninitialized and may differ between two captures of the same step. `Change.opaque` marks differences
in structs with unknown fields.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graphrt.capture.inspect.align import aligned
from graphrt.capture.inspect.memory import MemoryMap
from graphrt.capture.inspect.symbols import Pairing, Symbols
from graphrt.capture.inspect.view import Argument, GraphView, Node, Operand, Place, place_name

_LONGEST_NAME, _MOST_LINES, _MOST_PLACES = 96, 60, 8
_NONE = "-"


class Level(str, Enum):
    """Level of a difference."""

    TOPOLOGY = "topology"
    LAUNCHES = "launches"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between two nodes.

    what     "grid", "argument 2 'n'", "argument 0, byte 16", "operand src", "waits for", ...
    opaque   whether it is in a struct with unknown fields, and so may be padding
    """

    level: Level
    what: str
    before: str
    after: str
    opaque: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}{' (in a struct)' if self.opaque else ''}"


@dataclass(frozen=True, slots=True)
class NodeDiff:
    """A node that differs, with its place in each graph. The place is None in a graph without this node."""

    before: Place | None
    after: Place | None
    name: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """The differences between two graphs. `str` groups nodes with the same differences.

    nodes   nodes that differ, in order
    sizes   number of nodes in each graph, including bodies
    """

    nodes: tuple[NodeDiff, ...]
    sizes: tuple[int, int]

    @property
    def equal_topology(self) -> bool:
        """Whether kinds, names and edges are equal, so that one graph may update the other's executable."""
        return Level.TOPOLOGY not in self._levels()

    @property
    def equal_launches(self) -> bool:
        """Whether grids, blocks, shared memory and attributes are also equal."""
        return self.equal_topology and Level.LAUNCHES not in self._levels()

    @property
    def equal(self) -> bool:
        """Whether everything is equal, including every byte of the arguments."""
        return not self.nodes

    def _levels(self) -> set[Level]:
        missing = {Level.TOPOLOGY for node in self.nodes if node.before is None or node.after is None}
        return missing | {change.level for node in self.nodes for change in node.changes}

    def __str__(self) -> str:
        before, after = self.sizes
        if self.equal:
            return f"equal: {before} nodes with equal topology, launches and arguments"
        levels = ", ".join(f"{level.value} {'not equal' if level in self._levels() else 'equal'}" for level in Level)
        lines = [line for group in _groups(self.nodes) for line in group]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more lines"]
        return "\n".join([f"{before} nodes against {after}: {levels}", *lines])


def diff(a: GraphView, b: GraphView, memory_a: MemoryMap | None = None, memory_b: MemoryMap | None = None) -> GraphDiff:
    """Return the differences between two graphs.

    memory_a, memory_b   memory maps of the graphs. An address in a region is compared as region name and offset. In
                         the pool, and in allocations of the graph, regions are matched by first use. Other words are
                         compared by value

    Nodes are matched by kind and name. A node with a different name in the other graph, such as a matrix product for
    another batch size, is matched by position.
    """
    found = _Comparison(Symbols(a, memory_a), Symbols(b, memory_b))
    return GraphDiff(tuple(found.graphs(a, b, (), ())), (a.num_nodes, b.num_nodes))


class _Comparison:
    def __init__(self, before: Symbols, after: Symbols) -> None:
        self._before, self._after = before, after
        self._pairing = Pairing()

    def graphs(self, a: GraphView, b: GraphView, at_a: Place, at_b: Place) -> Iterator[NodeDiff]:
        pairs = list(aligned(*([(node.kind.value, node.name) for node in view.nodes] for view in (a, b))))
        waits = _waits(a, b, dict(pairs))
        for i, j in pairs:
            if i is None or j is None:
                node = a.nodes[i] if i is not None else b.nodes[j or 0]
                yield NodeDiff(
                    None if i is None else (*at_a, i), None if j is None else (*at_b, j), _title(node)
                )  # fmt: skip
                continue
            before, after = a.nodes[i], b.nodes[j]
            changes = (*waits(i, j), *self._nodes(before, after))
            if changes:
                yield NodeDiff((*at_a, i), (*at_b, j), _title(before), changes)
            for which, bodies in enumerate(zip(before.bodies, after.bodies, strict=False)):
                yield from self.graphs(*bodies, (*at_a, i, which), (*at_b, j, which))

    def _nodes(self, a: Node, b: Node) -> Iterator[Change]:
        for level, what, before, after in (
            (Level.TOPOLOGY, "kind", a.kind.value, b.kind.value),
            (Level.TOPOLOGY, "name", a.name, b.name),
            (Level.TOPOLOGY, "bodies", str(len(a.bodies)), str(len(b.bodies))),
            (Level.LAUNCHES, "grid", _extents(a.grid), _extents(b.grid)),
            (Level.LAUNCHES, "block", _extents(a.block), _extents(b.block)),
            (Level.LAUNCHES, "shared bytes", str(a.shared_bytes), str(b.shared_bytes)),
        ):
            if before != after:
                yield Change(level, what, before, after)
        yield from _by_name(Level.LAUNCHES, "attribute", a.attributes, b.attributes)
        yield from self._arguments(a.arguments, b.arguments)
        yield from self._operands(a.operands, b.operands)
        yield from _by_name(Level.ARGUMENTS, "scalar", dict(a.scalars), dict(b.scalars))

    def _arguments(self, a: Sequence[Argument], b: Sequence[Argument]) -> Iterator[Change]:
        if len(a) != len(b):
            yield Change(Level.ARGUMENTS, "number of arguments", str(len(a)), str(len(b)))
        for index, (here, there) in enumerate(zip(a, b, strict=False)):
            name = here.name or there.name
            what = f"argument {index} {name!r}" if name else f"argument {index}"
            if len(here.data) != len(there.data):
                yield Change(Level.ARGUMENTS, what, f"{len(here.data)} bytes", f"{len(there.data)} bytes")
                continue
            single = len(here.data) <= 8
            opaque = not single and None in (here.pointers, there.pointers)
            for at, before, after in self._words(here, there):
                yield Change(Level.ARGUMENTS, what if single else f"{what}, byte {at}", before, after, opaque)

    def _words(self, a: Argument, b: Argument) -> Iterator[tuple[int, str, str]]:
        """Yield the differences between two arguments of equal size: offset and both values."""
        at_a, at_b = (dict(symbols.parts(one)[0]) for symbols, one in ((self._before, a), (self._after, b)))
        if a.data == b.data and not at_a and not at_b:
            return
        length = len(a.data)
        stops = sorted({*at_a, *at_b, length})
        at = 0
        while at < length:
            here, there = at_a.get(at), at_b.get(at)
            end = at + 8 if here or there else min(at + _word(length), stops[bisect_right(stops, at)])
            before, after = a.data[at:end], b.data[at:end]
            if not (self._pairing.same(here, there) if here and there else before == after and here is there):
                yield at, str(here or _value(before)), str(there or _value(after))
            at = end

    def _operands(self, a: Sequence[Operand], b: Sequence[Operand]) -> Iterator[Change]:
        roles_a, roles_b = ([one.role for one in side] for side in (a, b))
        pairs = list(zip(a, b, strict=False))
        if roles_a != roles_b:
            yield Change(Level.ARGUMENTS, "operands", ", ".join(roles_a) or _NONE, ", ".join(roles_b) or _NONE)
            others = dict(zip(roles_b, b, strict=True))
            pairs = [(one, others[one.role]) for one in a if one.role in others]
        for here, there in pairs:
            before, after = self._before.find(here.address), self._after.find(there.address)
            same = here.address == there.address and before is after
            if before and after:
                same = self._pairing.same(before, after)
            texts = [
                (f"{here.nbytes} bytes", f"{there.nbytes} bytes"),
                ("on the host" if here.host else "on the device", "on the host" if there.host else "on the device"),
                ("written" if here.written else "read", "written" if there.written else "read"),
            ]
            differ = [text for text in texts if text[0] != text[1]]
            if not same:
                differ.append((f"at {before or hex(here.address)}", f"at {after or hex(there.address)}"))
            if differ:
                here_text, there_text = (", ".join(side) for side in zip(*differ, strict=True))
                yield Change(Level.ARGUMENTS, f"operand {here.role}", here_text, there_text)


def _waits(a: GraphView, b: GraphView, partner: dict[int | None, int | None]) -> Callable[[int, int], Iterator[Change]]:
    """Return a function that compares the dependencies of two matched nodes."""
    sources_a, sources_b = _sources(a), _sources(b)

    def told(i: int, j: int) -> Iterator[Change]:
        here, there = sources_a[i], sources_b[j]
        if {(partner.get(source), early) for source, early in here} != set(there):
            yield Change(Level.TOPOLOGY, "waits for", _sources_text(a, here, i), _sources_text(b, there, j))

    return told


def _sources(view: GraphView) -> list[list[tuple[int, bool]]]:
    found: list[list[tuple[int, bool]]] = [[] for _ in view.nodes]
    for edge in view.edges:
        found[edge.target].append((edge.source, edge.programmatic))
    return found


def _sources_text(view: GraphView, sources: list[tuple[int, bool]], node: int) -> str:
    """Return a node's dependencies by relative position, so that equal differences between layers have equal texts."""
    texts = (
        f"{_short(view.nodes[at].name)} at {at - node}{' (programmatic)' if early else ''}" for at, early in sources
    )
    return ", ".join(texts) or _NONE


# -- texts


def _groups(nodes: Sequence[NodeDiff]) -> Iterator[list[str]]:
    """Yield the text lines of each group of nodes whose differences are equal."""
    groups: dict[tuple[object, ...], list[NodeDiff]] = {}
    for node in nodes:
        key = (node.name, node.before is None, node.after is None, node.changes)
        groups.setdefault(key, []).append(node)
    for group in groups.values():
        first = group[0]
        sign = "+ " if first.before is None else "- " if first.after is None else ""
        places = [place_name(node.before or node.after or ()) for node in group]
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        times = f"{len(group)} x " if len(group) > 1 else ""
        yield [
            f"{sign}{times}{first.name} at {', '.join(places[:_MOST_PLACES])}{more}",
            *(f"    {change}" for change in first.changes),
        ]


def _by_name(level: Level, what: str, a: Any, b: Any) -> Iterator[Change]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield Change(level, f"{what} {name}", a.get(name, _NONE), b.get(name, _NONE))


def _title(node: Node) -> str:
    return f"{node.kind.value} {_short(node.name)}" if node.name != node.kind.value else node.name


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _extents(extents: tuple[int, int, int] | None) -> str:
    return "x".join(map(str, extents)) if extents else _NONE


def _word(length: int) -> int:
    """Return the number of bytes to compare as one value: the size of the argument if it is at most 8, else 4."""
    return length if length <= 8 else 4


def _value(data: bytes) -> str:
    number = int.from_bytes(data, "little", signed=True)
    return str(number) if abs(number) < 1 << 31 else hex(int.from_bytes(data, "little"))
