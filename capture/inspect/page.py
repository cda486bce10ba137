"""A captured graph as one HTML file: search, filters, what each node holds, its place in the order, its memory.

    view = inspect_graph(graph)
    write_page(view, "decode.html", title="decode, 8 rows", memory=memory, findings=audit.findings)

The file opens from disk in a browser and loads nothing else. Its state is in the address, so links to a node work:

    decode.html#node=3.0.7                   node 7 of the first body of node 3
    decode.html#q=softmax%20kv_cache         names, symbols, regions, places and addresses; all words must be found
    decode.html#kind=kernel&kernel=gemm      one kind, one name
    decode.html#region=4&findings=1          nodes with findings that touch MemoryMap.regions[4]
    decode.html#scale=time                   the order, as wide as the timings are

Its parts lie in `page_parts/`. The data stands in it as JSON, where equal texts stand once: `_page_json` says how.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from graphrt.capture.inspect.memory import MemoryMap, Owner
from graphrt.capture.inspect.view import GraphView, Node, Place, place_name
from graphrt.kernels.checks import check_instance
from graphrt.kernels.errors import ConfigError

_PARTS = Path(__file__).resolve().parent / "page_parts"
_SCRIPTS = ("elements.js", "data.js", "order.js", "memory.js", "details.js", "main.js")


class PageFinding(Protocol):
    """What a page shows of a finding: where it is, and one sentence. `audit` returns such ones."""

    @property
    def place(self) -> Place: ...

    @property
    def where(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def owner(self) -> Owner | None: ...

    @property
    def region(self) -> str: ...

    @property
    def text(self) -> str: ...


def write_page(
    view: GraphView,
    path: str | Path,
    *,
    title: str,
    memory: MemoryMap | None = None,
    findings: Sequence[PageFinding] = (),
    timings: Mapping[Place, float] | None = None,
) -> None:
    """Write a graph as one HTML file, which needs no network and no other file. An old file is replaced.

    memory     names what pointers point into, and adds the memory map
    findings   shown at their nodes, and in a list
    timings    microseconds by place. Nodes may be missing

    Touches no device. Raises: ConfigError for a finding or a timing of a place that the graph lacks, and for a timing
    that is negative or not finite; OSError where the file cannot be written.
    """
    check_instance("view", view, GraphView, advice="pass inspect_graph(graph)")
    check_instance("path", path, (str, Path), advice="pass the name of a file")
    check_instance("title", title, str, advice="pass a text")
    if memory is not None:
        check_instance("memory", memory, MemoryMap, advice="pass what memory_of() returns")
    timings = timings or {}
    places = {place for place, _ in view.walk()}
    for name, given in (("findings", [finding.place for finding in findings]), ("timings", list(timings))):
        if unknown := [place for place in given if tuple(place) not in places]:
            raise ConfigError(
                f"{name}: expected places of this graph, got {place_name(unknown[0])}; take them from view.walk()"
            )
    for place, microseconds in timings.items():
        if not (math.isfinite(microseconds) and microseconds >= 0):
            raise ConfigError(
                f"timings: expected microseconds of at least 0, got {microseconds} at {place_name(place)}; "
                "leave out what was not measured"
            )
    data = _page_json(view, memory, findings, timings)
    Path(path).write_text(_html(title, data), encoding="utf-8", newline="\n")


def _html(title: str, data: Mapping[str, Any]) -> str:
    """The parts put together. The policy lets the browser run these scripts and styles, and load nothing."""
    style = _part("page.css")
    script = "\n".join(['"use strict";', "(() => {", *map(_part, _SCRIPTS), "})();"])
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # `<` alone could end the script element or begin a comment in it. All but ASCII is escaped, too.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"policy": policy, "style": style, "script": script, "data": text}
    parts["title"] = html.escape(title).encode("ascii", "xmlcharrefreplace").decode()
    # In one pass: a title that looks like a mark stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _part("page.html"))


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a content security policy names a text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page_json(
    view: GraphView,
    memory: MemoryMap | None,
    findings: Sequence[PageFinding],
    timings: Mapping[Place, float],
) -> dict[str, Any]:
    """What the scripts read. Addresses are hexadecimal texts, as numbers of JavaScript have 53 bits.

    kernels   [kind, name, symbol, arguments, operands, scalars]: what nodes of one name share
                  arguments  [offset, number of bytes, name, pointers] each
                  operands   [role, host, written] each
                  scalars    names
    launches  [grid, block, shared bytes, attributes]
    graph     {"nodes", "edges"}
                  nodes  [kernel, launch, bytes of all arguments as base64, operands as address and number of bytes in
                         turn, values of scalars, bodies, remark]; without what is empty at the end
                  edges  three numbers each: source - source of the edge before, target - source, programmatic
    memory    {"regions", "cuts"}, or null
                  regions  [name, owner, address, number of bytes, live], as given
                  cuts     [address, region from there on, -1: none] by address
    findings  [place, where, address, owner, region, text]
    timings   {place: microseconds}
    """
    kernels, launches = _Table(), _Table()
    graph = _graph_json(view, kernels, launches)
    return {
        "origin": view.origin,
        "kernels": kernels.rows,
        "launches": launches.rows,
        "graph": graph,
        "memory": None if memory is None else _memory_json(memory),
        "findings": [
            [place_name(f.place), f.where, f"{f.address:x}", f.owner.value if f.owner else "", f.region, f.text]
            for f in findings
        ],
        "timings": {place_name(place): round(float(microseconds), 4) for place, microseconds in timings.items()},
    }


class _Table:
    """Rows that stand once, and their indices."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._index: dict[Any, int] = {}

    def add(self, key: Any, row: Callable[[], list[Any]]) -> int:
        """The index of the row of a key; it is made when the key is new."""
        if key not in self._index:
            self._index[key] = len(self.rows)
            self.rows.append(row())
        return self._index[key]


def _graph_json(view: GraphView, kernels: _Table, launches: _Table) -> dict[str, Any]:
    edges: list[int] = []
    before = 0
    for edge in view.edges:
        edges += [edge.source - before, edge.target - edge.source, int(edge.programmatic)]
        before = edge.source
    return {"nodes": [_node_json(node, kernels, launches) for node in view.nodes], "edges": edges}


def _node_json(node: Node, kernels: _Table, launches: _Table) -> list[Any]:
    arguments = tuple((a.offset, len(a.data), a.name, a.pointers) for a in node.arguments)
    operands = tuple((o.role, int(o.host), int(o.written)) for o in node.operands)
    scalars = tuple(name for name, _ in node.scalars)
    kernel = (node.kind.value, node.name, node.symbol, arguments, operands, scalars)
    launch = (node.grid, node.block, node.shared_bytes, tuple(node.attributes.items()))
    values = [
        kernels.add(kernel, lambda: list(kernel)),
        launches.add(launch, lambda: [*launch[:3], dict(node.attributes)]),
        base64.b64encode(b"".join(a.data for a in node.arguments)).decode(),
        [value for o in node.operands for value in (f"{o.address:x}", o.nbytes)],
        [value for _, value in node.scalars],
        [_graph_json(body, kernels, launches) for body in node.bodies],
        node.remark,
    ]
    while not values[-1] and len(values) > 2:
        del values[-1]
    return values


def _memory_json(memory: MemoryMap) -> dict[str, Any]:
    """The regions, and which of them holds the bytes between two cuts: the browser need not know the map's rules."""
    position = {region: index for index, region in reversed(list(enumerate(memory.regions)))}
    cuts: list[list[Any]] = []
    for address in sorted({end for region in memory.regions for end in (region.address, region.end)}):
        found = memory.find(address)
        cuts.append([f"{address:x}", -1 if found is None else position[found]])
    return {
        "regions": [[r.name, r.owner.value, f"{r.address:x}", r.nbytes, int(r.live)] for r in memory.regions],
        "cuts": cuts,
    }
