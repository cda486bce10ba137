"""Write a captured graph as one HTML file with search, filters, and the order and details of its nodes.

    view = inspect_graph(graph)
    write_page(view, "decode.html", title="decode, 8 rows", memory=memory, findings=audit.findings)

The file opens from disk in a browser and loads nothing else. The URL contains its state, so a link can show a node:

    decode.html#node=3.0.7                   node 7 of the first body of node 3
    decode.html#q=softmax%20kv_cache         names, symbols, regions, places and addresses; all words must match
    decode.html#kind=kernel&kernel=gemm      one kind, one name
    decode.html#region=4&findings=1          nodes with findings that access MemoryMap.regions[4]

The sources of the page are in `page_parts/`. It contains the data as JSON without duplicates; see `_page_json`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphrt.capture.inspect.findings import Finding
from graphrt.capture.inspect.memory import MemoryMap
from graphrt.capture.inspect.view import GraphView, Node, place_name
from graphrt.kernels.checks import check_instance
from graphrt.kernels.errors import ConfigError

_PARTS = Path(__file__).resolve().parent / "page_parts"
_Row = tuple[Any, ...]
_SCRIPTS = ("elements.js", "data.js", "order.js", "details.js", "main.js")


def write_page(
    view: GraphView,
    path: str | Path,
    *,
    title: str,
    memory: MemoryMap | None = None,
    findings: Sequence[Finding] = (),
) -> None:
    """Write a graph as one self-contained HTML file. An existing file is replaced.

    memory     map of the graph's memory, for the region names of pointers
    findings   findings to show at their nodes and in a list

    Does not use the device.

    Raises:
        ConfigError: if a finding has a place that is not in the graph.
        OSError: if the file cannot be written.
    """
    check_instance("view", view, GraphView, advice="pass inspect_graph(graph)")
    check_instance("path", path, (str, Path), advice="pass a file name")
    check_instance("title", title, str, advice="pass a string")
    if memory is not None:
        check_instance("memory", memory, MemoryMap, advice="pass the map that memory_of() returns")
    places = {place for place, _ in view.walk()}
    if unknown := [finding.place for finding in findings if finding.place and finding.place not in places]:
        raise ConfigError(
            f"findings: place {place_name(unknown[0])} is not in this graph; pass the findings of its own audit"
        )
    data = _page_json(view, memory, findings)
    Path(path).write_text(_html(title, data), encoding="utf-8", newline="\n")


def _html(title: str, data: Mapping[str, Any]) -> str:
    """Assemble the page. The content security policy allows only these scripts and styles, and no other resources."""
    style = _part("page.css")
    script = "\n".join(['"use strict";', "(() => {", *map(_part, _SCRIPTS), "})();"])
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # An unescaped `<` could end the script element or start a comment. Non-ASCII characters are escaped too.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"policy": policy, "style": style, "script": script, "data": text}
    parts["title"] = html.escape(title).encode("ascii", "xmlcharrefreplace").decode()
    # Replace all in one pass, so that a title that looks like a placeholder stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _part("page.html"))


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the digest of a text in the format of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page_json(view: GraphView, memory: MemoryMap | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the data for the scripts. Addresses are hexadecimal strings, because JavaScript integers have 53 bits.

    kernels   [kind, name, symbol, arguments, operands, scalars], shared by nodes
                  arguments  [offset, number of bytes, name, pointers] each
                  operands   [role, host, written] each
                  scalars    names
    launches  [grid, block, shared bytes, attributes]
    graph     {"nodes", "edges"}
                  nodes  [kernel, launch, bytes of all arguments as base64, address and number of bytes of each operand,
                         values of scalars, bodies, remark]; trailing empty values are omitted
                  edges  three numbers each: source - source of the previous edge, target - source, programmatic
    memory    {"regions", "cuts"}, or null
                  regions  [name, owner, address, number of bytes, live], in the order of the map
                  cuts     [address, region starting at this address, -1: none], sorted
    findings  [place, where, address, owner, region, text]
    """
    kernels, launches = dict[_Row, int](), dict[_Row, int]()
    graph = _graph_json(view, kernels, launches)
    return {
        "origin": view.origin,
        "kernels": list(kernels),
        "launches": [[*extents, dict(attributes)] for *extents, attributes in launches],
        "graph": graph,
        "memory": None if memory is None else _memory_json(memory),
        "findings": [
            [place_name(f.place), f.where, f"{f.address:x}", f.owner.value if f.owner else "", f.region, f.text]
            for f in findings
        ],
    }


def _graph_json(view: GraphView, kernels: dict[_Row, int], launches: dict[_Row, int]) -> dict[str, Any]:
    edges: list[int] = []
    before = 0
    for edge in view.edges:
        edges += [edge.source - before, edge.target - edge.source, int(edge.programmatic)]
        before = edge.source
    return {"nodes": [_node_json(node, kernels, launches) for node in view.nodes], "edges": edges}


def _node_json(node: Node, kernels: dict[_Row, int], launches: dict[_Row, int]) -> list[Any]:
    arguments = tuple((a.offset, len(a.data), a.name, a.pointers) for a in node.arguments)
    operands = tuple((o.role, int(o.host), int(o.written)) for o in node.operands)
    scalars = tuple(name for name, _ in node.scalars)
    kernel = (node.kind.value, node.name, node.symbol, arguments, operands, scalars)
    launch = (node.grid, node.block, node.shared_bytes, tuple(node.attributes.items()))
    values = [
        kernels.setdefault(kernel, len(kernels)),
        launches.setdefault(launch, len(launches)),
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
    """Return the regions, and the region after each cut, so that the scripts need not resolve overlaps."""
    position = {region: index for index, region in reversed(list(enumerate(memory.regions)))}
    cuts: list[list[Any]] = []
    for address in sorted({end for region in memory.regions for end in (region.address, region.end)}):
        found = memory.find(address)
        cuts.append([f"{address:x}", -1 if found is None else position[found]])
    return {
        "regions": [[r.name, r.owner.value, f"{r.address:x}", r.nbytes, int(r.live)] for r in memory.regions],
        "cuts": cuts,
    }
