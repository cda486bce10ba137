"""The HTML page of a graph, without a browser: complete data, no loads, and escaped names."""

from __future__ import annotations

import base64
import bisect
import hashlib
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.findings import Finding, FindingKind
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.page import write_page
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand, place_name
from graphrt.kernels.errors import ConfigError
from tests.support.page_examples import DecodeStep, Example, hostile, large
from tests.support.toy import make_rig

PARTS = Path(__file__).resolve().parent.parent.parent / "capture" / "inspect" / "page_parts"


def toy_step() -> Example:
    """The op trace of a real step, with graphrt's operators and real addresses."""
    rig = make_rig(torch.device("cpu"), decode_sizes=(2,), mixed_sizes=(16,))
    (op_trace, *_) = rig.manager._graphs._graphs.values()
    weights = [Region(n, Owner.WEIGHT, p.data_ptr(), p.nbytes) for n, p in rig.model.named_parameters()]
    static = [Region(n, Owner.STATIC, t.data_ptr(), t.nbytes) for n, t in rig.manager.buffers.named()]
    return Example(inspect_graph(op_trace), MemoryMap([*weights, *static]), [], "a toy step")


def many_kinds() -> Example:
    """Nodes of every kind with all fields, and nested bodies."""
    inner = GraphView(
        (Node(NodeKind.KERNEL, "deep", grid=(1, 2, 3), block=(4, 5, 6)), Node(NodeKind.EMPTY, "empty")), (Edge(0, 1),)
    )
    loop = Node(NodeKind.CONDITIONAL, "while", attributes={"type": "while"}, bodies=(inner, GraphView(())))
    child = Node(NodeKind.CHILD, "child", bodies=(GraphView((loop,)),), remark="one field could not be read")
    argument = Argument(4, bytes(range(24)), "both", (0, 16))
    full = Node(
        NodeKind.KERNEL, "full", "_Z4fullv", (65535, 1, 9), (1024, 1, 1), 99, {"priority": "-5"},
        (argument, Argument(28, b"", "nothing"), Argument(32, b"\xff")),
        (Operand("dst", 2**64 - 1, 2**40, True, True), Operand("src", 0, 1)),
        (("dim", "-1"), ("dtype", "torch.float32")),
    )  # fmt: skip
    rest = [Node(kind, kind.value) for kind in NodeKind]
    nodes = (full, child, *rest)
    edges = (Edge(0, 1), Edge(0, 9, True), Edge(1, 2), Edge(3, 4), Edge(3, 14, True))
    found = Finding((1, 0, 0, 0, 0), "deep", "argument 0, byte 0", 2**63, None, "", "wrong", FindingKind.UNMAPPED)
    overlapping = [
        Region("first", Owner.CACHE, 1000, 100),
        Region("", Owner.POOL, 900, 5000, False),
        Region("last", Owner.HOST, 2**63, 1),
        Region("first", Owner.CACHE, 1000, 100),
    ]
    return Example(GraphView(nodes, edges), MemoryMap(overlapping), [found], "all kinds")


EXAMPLES = {
    "decode step": lambda: DecodeStep(layers=3).example(),
    "op trace": toy_step,
    "all kinds": many_kinds,
    "hostile": hostile,
    "large": lambda: large(300),
    "empty": lambda: Example(GraphView(()), MemoryMap([]), []),
}


class Document(HTMLParser):
    """Elements with their attributes and some of their texts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.texts[-1] += data

    def named(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(a, text) for (name, a), text in zip(self.elements, self.texts, strict=True) if name == tag]


@pytest.fixture
def page(tmp_path):
    """Write an example, and return the document and its data."""

    def write(example: Example) -> tuple[Document, dict]:
        example.write(tmp_path / "graph.html")
        document = Document((tmp_path / "graph.html").read_text(encoding="utf-8"))
        return document, json.loads(document.named("script")[0][1])

    return write


def read_graph(values: dict, data: dict) -> GraphView:
    """Decode a view from the data of a page, as page.py describes them."""
    nodes = []
    for kernel, launch, *rest in values["nodes"]:
        data64, operands, scalars, bodies, remark = rest + ["", [], [], [], ""][len(rest) :]
        kind, name, symbol, layout, roles, labels = data["kernels"][kernel]
        grid, block, shared, attributes = data["launches"][launch]
        content, arguments, at = base64.b64decode(data64), [], 0
        for offset, size, label, pointers in layout:
            arguments.append(
                Argument(offset, content[at : at + size], label, None if pointers is None else tuple(pointers))
            )
            at += size
        assert at == len(content)
        memory = [
            Operand(role, int(operands[2 * i], 16), operands[2 * i + 1], bool(host), bool(written))
            for i, (role, host, written) in enumerate(roles)
        ]
        nodes.append(
            Node(
                NodeKind(kind), name, symbol, grid and tuple(grid), block and tuple(block), shared, attributes,
                tuple(arguments), tuple(memory),
                tuple(zip(labels, scalars, strict=True)), tuple(read_graph(body, data) for body in bodies), remark,
            )
        )  # fmt: skip
    edges, source = [], 0
    for i in range(0, len(values["edges"]), 3):
        source += values["edges"][i]
        edges.append(Edge(source, source + values["edges"][i + 1], bool(values["edges"][i + 2])))
    return GraphView(tuple(nodes), tuple(edges), data["origin"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_contains_the_whole_view_and_finds_the_same_regions_as_the_map(page, name):
    example = EXAMPLES[name]()
    memory = example.memory
    _, data = page(example)
    assert read_graph(data["graph"], data) == example.view
    assert data["findings"] == [
        [place_name(f.place), f.where, f"{f.address:x}", f.owner.value if f.owner else "", f.region, f.text]
        for f in example.findings
    ]
    regions = [Region(n, Owner(o), int(a, 16), size, bool(live)) for n, o, a, size, live in data["memory"]["regions"]]
    assert regions == list(memory.regions)
    cuts = [(int(address, 16), regions[region] if region >= 0 else None) for address, region in data["memory"]["cuts"]]
    first = {region: at for at, region in reversed(list(enumerate(regions)))}
    assert all(first[regions[at]] == at for _, at in data["memory"]["cuts"] if at >= 0)
    starts = [start for start, _ in cuts]
    assert starts == sorted(starts)
    edges = {end + by for region in regions for end in (region.address, region.end) for by in (-1, 0, 1)}
    for address in edges:
        at = bisect.bisect_right(starts, address) - 1
        assert (cuts[at][1] if at >= 0 else None) == memory.find(address), hex(address)


def test_hostile_texts_stay_texts_and_only_the_page_s_own_scripts_and_styles_run(page):
    example = hostile()
    document, data = page(example)
    plain, _ = page(replace(example, view=GraphView(()), findings=[], title="plain"))
    assert [tag for tag, _ in document.elements] == [tag for tag, _ in plain.elements], "no text became an element"
    assert document.named("title")[0][1] == document.named("h1")[0][1] == example.title.replace("\ud800", "\ufffd")
    assert {name for _, name, *_ in data["kernels"]} == {node.name for _, node in example.view.walk()}
    (policy,) = [a["content"] for a, _ in document.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        text = document.named(tag)[-1][1]
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    links = {"src", "href", "srcset", "action", "style"}
    assert [tag for tag, attributes in document.elements if links & attributes.keys()] == []


@pytest.mark.parametrize("path", sorted(PARTS.iterdir()), ids=lambda path: path.name)
def test_sources_load_nothing_and_parse_no_text_as_markup(path):
    text = path.read_text(encoding="utf-8")
    forbidden = (
        r"https?:|//\w+\.\w+/|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\("
    )
    assert re.findall(forbidden, text) == []
    assert path.suffix == ".html" or re.findall(r"<!--|</script", text) == []


def test_pages_are_small_and_replace_files_and_a_finding_of_another_graph_writes_nothing(tmp_path):
    view = GraphView((Node(NodeKind.EMPTY, "a"), Node(NodeKind.EMPTY, "b")))
    found = Finding((7, 1), "", "", 0, None, "", "", FindingKind.FREED)
    with pytest.raises(ConfigError, match=re.escape("findings: place 7.1 is not in this graph")):
        write_page(view, tmp_path / "graph.html", title="", findings=[found])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        write_page(view, tmp_path / "no" / "graph.html", title="")
    path = tmp_path / "graph.html"
    large(20_000).write(path)
    assert 200_000 < path.stat().st_size < 4e6
    write_page(view, str(path), title="new")
    assert path.read_text().startswith("<!doctype html>")
    assert path.stat().st_size < 200_000


def colors_of(scheme: str) -> dict[str, tuple[float, ...]]:
    """The colors that page.css declares for a scheme, by name."""
    light, dark = re.search(
        r":root \{(.*?)\n\}\n@media .*?:root \{(.*?)\}", (PARTS / "page.css").read_text(), re.DOTALL
    ).groups()
    found = re.findall(r"--([\w-]+):\s*#(\w\w)(\w\w)(\w\w)\b", light if scheme == "light" else dark)
    return {name: tuple(int(part, 16) / 255 for part in parts) for name, *parts in found}


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The contrast ratio of WCAG 2, 1 to 21."""

    def luminance(color: tuple[float, ...]) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast_in_both_schemes(scheme):
    colors = colors_of(scheme)
    pairs = [*itertools.product(("text", "dim", "accent", "danger", "good"), ("panel", "well", "ground"))]
    pairs += [("accent", "accent-soft"), ("text", "accent-soft"), ("danger", "danger-soft"), ("dim", "danger-soft")]
    pairs += [("ink", "danger"), *(("ink", f"c{i}") for i in range(12))]  # labels in boxes
    ratios = {pair: contrast(*(colors[name] for name in pair)) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    boxes = {f"c{i}": contrast(colors[f"c{i}"], colors["panel"]) for i in range(13)}
    assert min(boxes.values()) >= 3, boxes  # required by WCAG for graphics
