"""The HTML page in a browser: lists, filters, details, pictures, keys, and no loads."""

from __future__ import annotations

import json
import struct
from collections import Counter

import pytest

from graphrt.capture.inspect.findings import Finding, FindingKind
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.view import Edge, GraphView, Node, NodeKind, Operand, place_name
from tests.support.browser import CHROMIUM, Browser
from tests.support.page_examples import DecodeStep, Example, hostile, kernel, large, pointer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")

PLACES = "[...document.querySelectorAll('#node-list .row')].map((row) => row.dataset.place)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Write an example and open it. `rows` makes the window tall enough to show the whole list."""
    stack = []

    def show(example, fragment="", *, rows=0, scheme="light"):
        example.write(tmp_path / "graph.html")
        url = (tmp_path / "graph.html").as_uri() + fragment
        stack.append(browser.page(url, size=(1400, 900 + 28 * rows), scheme=scheme))
        return stack[-1].__enter__()

    yield show
    for page in stack:
        page.__exit__(None, None, None)


@pytest.fixture(scope="module")
def step():
    return DecodeStep(layers=2).example()


def touched(node: Node, memory: MemoryMap) -> set[Region]:
    """Regions that a node accesses, by a search over all bytes of its arguments."""
    found = set()
    for argument in node.arguments:
        words = range(0, len(argument.data) - 7, 8) if argument.pointers is None else argument.pointers
        found |= {memory.find(int.from_bytes(argument.data[at : at + 8], "little")) for at in words}
    found |= {memory.find(operand.address) for operand in node.operands}
    return found - {None}


def test_the_page_shows_every_node_and_name_and_loads_nothing(opened, step):
    page = opened(step, rows=40)
    assert page.errors == []
    assert page.evaluate("document.documentElement.dataset.ready") == "true"
    walked = [(place_name(place), node) for place, node in step.view.walk()]
    assert page.evaluate(PLACES) == [place for place, _ in walked]
    shown = page.evaluate("[...document.querySelectorAll('#node-list .row')].map((row) => row.title)")
    assert shown == [node.name for _, node in walked]
    edges = len(step.view.edges) + sum(len(b.edges) for _, n in walked for b in n.bodies)
    names = len(step.view.counts())
    facts = f"CUDA graph, {len(walked)} nodes, {edges} edges, 1 inner graph, {names} names, 2 findings"
    assert ", ".join(page.texts("#facts li")) == facts
    kinds = Counter(node.kind.value for _, node in walked)
    chips = [label.split() for label in page.texts("#kinds button")]
    assert {" ".join(kind): int(count) for *kind, count in chips} == kinds
    assert page.requests == [page.evaluate("location.href")]
    rows = page.evaluate(
        "[...document.querySelectorAll('#kernel-list .row')]"
        ".map((row) => [row.title, row.querySelector('.number').innerText])"
    )
    counts = step.view.counts()
    assert {name: int(count) for name, count in rows} == counts
    assert [name for name, _ in rows] == sorted(counts, key=lambda name: (-counts[name], name))
    page.click("#kernel-list .row:nth-child(2)")
    chosen = rows[1][0]
    assert page.evaluate(PLACES) == [place_name(p) for p, node in step.view.walk() if node.name == chosen]
    assert page.text("#count") == f"{counts[chosen]} of {step.view.num_nodes} nodes"
    page.click("#kernel-list .row:nth-child(2)")
    assert page.text("#count") == f"{step.view.num_nodes} nodes"


FILTERS = {
    "#q=decode_attention": lambda place, node, names: "decode_attention" in node.name,
    "#q=NVJET%20o_proj": lambda place, node, names: "nvjet" in node.name and any("o_proj" in name for name in names),
    "#q=_ZN2at6native12": lambda place, node, names: "_ZN2at6native12" in node.symbol,
    "#q=0x7f20000000ff": lambda place, node, names: "k cache 0" in names,
    "#q=28": lambda place, node, names: place[0] == 28
    or any("28" in text for text in (node.name, node.symbol, *names)),
    "#q=28.0": lambda place, node, names: place[:2] == (28, 0),
    "#kind=kernel&q=logits": lambda place, node, names: node.kind is NodeKind.KERNEL
    and ("logits" in node.name or "logits" in names),
    "#kernel=decode_attention&q=v%20cache%201": lambda place, node, names: (
        node.name == "decode_attention" and "v cache 1" in names
    ),
    "#findings=1": lambda place, node, names: place in ((28, 0, 0), (29,)),
    "#region=0": lambda place, node, names: "input_ring" in names,
    "#q=nothing+has+this": lambda place, node, names: False,
    "#region=x&q=": lambda place, node, names: False,
    "#node=99.5&kind=": lambda place, node, names: True,
}  # fmt: skip


def test_the_hash_filters(opened, step):
    page = opened(step, rows=40)
    hits = []
    for fragment, keeps in FILTERS.items():
        page.go(fragment)
        names = {place: {region.name for region in touched(node, step.memory)} for place, node in step.view.walk()}
        expected = [place_name(p) for p, node in step.view.walk() if keeps(p, node, names[p])]
        assert page.evaluate(PLACES) == expected, fragment
        assert page.text("#count").split(" ")[0] == str(len(expected)), fragment
        hits.append(len(expected))
    assert sum(0 < count < step.view.num_nodes for count in hits) >= 9  # most filters remove nodes
    assert page.errors == []


BASE = 0x7F00_0000_0000
VALUES = {
    "int32": (struct.pack("<i", -7), (), "-7"),
    "float": (struct.pack("<f", 0.08838834764), (), "0.08838835 int 1035273459"),
    "one": (struct.pack("<f", 1.0), (), "1.0 int 1065353216"),
    "int64": (struct.pack("<q", -5), (), "-5"),
    "large": (struct.pack("<q", 3 << 40), (), "0, 768 int 3298534883328"),
    "double": (struct.pack("<d", 0.1), (), "0.1 as two words"),
    "short": (struct.pack("<h", -2), (), "65534"),
    "flag": (b"\x01", (), "1"),
    "pointer": (struct.pack("<Q", BASE + 0x20), (0,), "input +0x20 of 4 KiB"),
    "unknown": (struct.pack("<Q", 0xDEAD0000), (0,), "unknown region pointer"),
    "null": (bytes(8), (0,), "null pointer"),
    "freed": (struct.pack("<Q", BASE + 0x1000), (0,), "old block +0 of 1.5 KiB freed"),
    "guess": (struct.pack("<Q", BASE), None, "input +0 of 4 KiB"),
    "no pointer": (struct.pack("<Q", BASE), (), "0, 32512 int 139637976727552"),
    "wide": (struct.pack("<Q", 2**64 - 2), None, "-2"),
}
STRUCT = struct.pack("<QiifIQ", BASE + 8, 32, 128, 2.5, 9, BASE + 0x1004)


def test_details_show_all_fields_of_a_node(opened):
    values = [(name, data, pointers) for name, (data, pointers, _) in VALUES.items()]
    full = kernel(
        "void ns::full<int>(int*)",
        (2, 3, 4),
        96,
        *values,
        ("", STRUCT, (0, 24)),
        symbol="_Zfull",
        shared=2048,
        cluster="2 x 1 x 1",
    )
    memory = MemoryMap(
        [Region("input", Owner.STATIC, BASE, 4096), Region("old block", Owner.POOL, BASE + 4096, 1536, False)]
    )
    operands = (
        Operand("src", 0x5000, 3_000_000, host=True),
        Operand("dst", BASE + 4000, 100, written=True),
        Operand("other", 0, 1),
    )
    remark, scalars = "half of it could not be read", (("dim", "-1"),)
    copy = Node(NodeKind.MEMCPY, "memcpy", operands=operands, scalars=scalars, remark=remark)
    body = GraphView((Node(NodeKind.EMPTY, "inner"), copy), (Edge(0, 1, True),))
    outer = Node(NodeKind.CONDITIONAL, "while", bodies=(body,))
    found = Finding((0,), "full", "argument 3", 0x1234, Owner.POOL, "old block", "It is wrong.", FindingKind.FREED)
    page = opened(Example(GraphView((full, outer), (Edge(0, 1),)), memory, [found]), "#node=0", rows=60)

    assert page.text("#name") == "void ns::full<int>(int*)"
    assert page.text("#details .symbol") == "_Zfull"
    assert page.texts("#details .finding p") == ["It is wrong.", "argument 3 · 0x1234 · pool · old block"]
    labels, values = page.texts("#details dt"), page.texts("#details dd")
    assert dict(zip(labels, values, strict=True)) == {
        "kind": "kernel", "grid": "2 × 3 × 4  =  24 blocks",
        "cluster": "2 x 1 x 1", "block": "96 × 1 × 1  =  96 threads", "shared memory": "2 KiB",
    }  # fmt: skip
    rows = page.evaluate(
        "[...document.querySelectorAll('#details tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText.replace(/\\s+/g, ' ').trim()))"
    )
    for (name, (data, _, text)), (offset, label, shown) in zip(VALUES.items(), rows, strict=False):
        argument = next(a for a in full.arguments if a.name == name)
        assert (offset, label) == (str(argument.offset), f"{name} {len(data)} B")
        assert shown.startswith(text), name
        assert int(shown.rsplit("0x", 1)[1], 16) == int.from_bytes(data, "little"), name
    last = [row[2].rsplit(" ", 1)[0] for row in rows[len(VALUES) :]]
    assert last == [
        "input +0x8 of 4 KiB",
        "32, 128 int 549755813920",
        "2.5, 9 int 39730544640",
        "old block +0x4 of 1.5 KiB freed",
    ]
    assert page.texts("#details .node-link .name") == ["while"]

    page.go("#node=1")
    assert page.texts("#details h3") == ["Body 0 2 nodes, 1 edge", "Waits for 1", "Waited for by 0"]
    page.go("#node=1.0.1")
    assert page.text("#details .remark") == "half of it could not be read"
    rows = page.evaluate(
        "[...document.querySelectorAll('#details tbody tr')].map((r) => r.innerText.replace(/\\s+/g, ' ').trim())"
    )
    assert rows == [
        "src host 2.9 MiB unknown region 0x5000",
        "dst written 100 B input +0xfa0 of 4 KiB 4 B past the end 0x7f0000000fa0",
        "other 1 B address unknown 0x0",
        "dim -1",
    ]
    assert page.text("#trail").split() == ["graph", "›", "1", "while", "body", "0"]
    assert page.texts("#details .node-link") == ["1\nwhile\nbody 0", "1.0.0\ninner\nprogrammatic"]
    assert page.errors == []


def test_keys_and_the_browser_s_history(opened, step):
    page = opened(step)
    page.press("/", *"rms")
    assert page.evaluate("location.hash") == "#q=rms"
    page.press("Enter")
    assert page.text("#details h2") == "Node 7"
    page.press("ArrowDown", "ArrowDown", "ArrowUp")
    assert page.evaluate("location.hash") == "#q=rms&node=12"
    assert page.evaluate("document.querySelector('#node-list .chosen').dataset.place") == "12"
    page.press("Escape")
    assert page.text("#details h2") == "No node selected"
    page.press("Escape")
    assert page.text("#count") == f"{step.view.num_nodes} nodes"
    page.go("#node=28")
    page.press("Enter")
    assert page.text("#details h2") == "Node 28.0.0"
    page.evaluate(
        "new Promise((done) => { addEventListener('hashchange', () => done(0), {once: true}); history.back(); })"
    )
    assert page.text("#details h2") == "Node 28"
    page.press("/", *"zz", "Escape")
    assert page.evaluate("document.querySelector('#q').value") == ""
    assert page.errors == []


def test_clicks_filter_and_select(opened, step):
    page = opened(step)
    page.click("#findings")
    assert page.text("#count").startswith("2 of")
    page.click("#node-list .row:nth-child(2)")
    assert page.text("#details h2") == "Node 29"
    page.click("#chips button")
    page.click("#details .region .link")
    region = step.memory.regions.index(next(r for r in step.memory.regions if r.name == "logits"))
    assert page.evaluate("location.hash") == f"#region={region}&node=29"
    expected = sum("logits" in {r.name for r in touched(node, step.memory)} for _, node in step.view.walk())
    assert page.text("#count").startswith(f"{expected} of")
    page.click("#chips button")
    page.click("[data-kind=memset]")
    assert page.evaluate(PLACES) == ["5"]
    page.click("#details .node-link")
    assert page.text("#details h2") == "Node 28"
    assert page.errors == []


def test_the_order_is_drawn_in_columns_and_lanes(opened):
    """A diamond and a separate node: three columns, three lanes."""
    nodes = tuple(kernel(name, (1,), 32) for name in ("first", "left", "right", "last", "alone"))
    view = GraphView(nodes, (Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3)))
    page = opened(Example(view, MemoryMap([]), []))
    assert page.text("#picture-facts") == "5 nodes, 3 steps deep, 2 lanes"
    colors = page.evaluate(
        "[...document.querySelectorAll('#node-list .swatch')].map((s) => getComputedStyle(s).backgroundColor)"
    )
    assert len(set(colors)) == 5
    drawn = {(1 / 6, 0): 0, (1 / 6, 1): 4, (3 / 6, 0): 1, (3 / 6, 1): 2, (5 / 6, 0): 3}
    height = page.evaluate("document.querySelector('#strip').clientHeight")
    for (across, lane), node in drawn.items():
        down = (7 + 48 * (lane + 0.5)) / height
        found = page.evaluate(
            "(() => { const c = document.querySelector('#strip'); return [...c.getContext('2d').getImageData("
            f"Math.floor(c.width * {across + 0.1}), Math.floor(c.height * {down}), 1, 1).data.slice(0, 3)]; }})()"
        )
        assert f"rgb({', '.join(map(str, found))})" == colors[node], node
        page.click("#strip", across=across, down=down)
        assert page.text("#details h2") == f"Node {node}"
    before = page.evaluate("location.hash")
    page.click("#strip", across=5 / 6, down=(7 + 48 * 1.5) / height)  # empty
    assert page.evaluate("location.hash") == before


def test_long_and_wide_graphs_are_drawn(opened):
    ops = tuple(Node(NodeKind.OP, f"aten::op{i}") for i in range(600))
    chain = GraphView(ops, tuple(Edge(i, i + 1) for i in range(599)), "op trace")
    page = opened(Example(chain, MemoryMap([]), []), "#node=599")
    assert page.text("#picture-facts") == "600 nodes, 600 steps deep, 1 lane"
    assert page.text("#facts").startswith("op trace")
    page.press("0")
    page.click("#strip", across=0.5, down=0.45)
    assert abs(int(page.text("#details h2").removeprefix("Node ")) - 300) <= 2
    wide = opened(Example(GraphView(ops), MemoryMap([]), []))
    assert wide.text("#picture-facts") == "600 nodes, 1 step deep, 64 lanes drawn"
    assert wide.errors == page.errors == []


def test_the_overview_counts_the_regions_of_each_owner(opened):
    regions = [Region("a", Owner.POOL, BASE, 512), Region("b", Owner.POOL, BASE + 512, 512, live=False)]
    memory = MemoryMap([*regions, Region("c", Owner.CACHE, BASE + 8192, 64)])
    page = opened(Example(GraphView((kernel("f", (1,), 32, pointer(BASE + 4)),)), memory, []))
    assert page.texts("#details h3") == ["Memory 3 regions", "Keys"]
    shown = dict(zip(page.texts("#details dt"), page.texts("#details dd"), strict=True))
    assert (shown["pool"], shown["cache"]) == ("1 KiB in 2 regions, 1 freed", "64 B in 1 region")
    found = Finding((), "", "static 'x'", BASE, Owner.STATIC, "x", "It was freed.", FindingKind.FREED)
    page = opened(Example(GraphView((kernel("f", (1,), 32),)), memory, [found]))
    assert page.texts("#details .finding p")[0] == "It was freed.", "a finding about no node"
    assert page.errors == []


def test_hostile_names_run_nothing(opened):
    example = hostile()
    page = opened(example, rows=40)
    names = [node.name for node in example.view.nodes]
    literal = json.dumps(names)
    rows = "[...document.querySelectorAll('#node-list .row')].map((row) => row.title)"
    assert page.evaluate(f"JSON.stringify({rows}) === JSON.stringify({literal})") is True
    for index in range(len(names)):
        page.go(f"#node={index}")
        same = f"document.querySelector('#name').textContent === {json.dumps(names[index])}"
        assert page.evaluate(same) is True, names[index]
        label = names[index] or "none"
        shown = "[...document.querySelectorAll('#details dt')].map((e) => e.textContent)"
        assert page.evaluate(f"{shown}.includes({json.dumps(label)})") is True, label
    page.evaluate("location.hash = ''")
    for index, name in enumerate(names):
        if not name:
            continue  # an empty name in an address means all names
        row = f"[...document.querySelectorAll('#kernel-list .row')].find((row) => row.title === {json.dumps(name)})"
        page.evaluate(f"{row}.click()")
        assert page.evaluate(PLACES) == [str(index)], name
        if index < 2 or "\ud800" in name:
            page.open()  # the same from the address
            assert page.evaluate(PLACES) == [str(index)], name
        page.evaluate("document.querySelector('#chips button').click()")
    assert page.evaluate("document.querySelectorAll('img, script').length") == 2
    assert page.evaluate("document.title").startswith("</script><script>")
    assert page.errors == []
    assert {url.split("#")[0] for url in page.requests} == {page.evaluate("location.href").split("#")[0]}


def test_both_color_schemes(opened, step):
    grounds = {}
    for scheme in ("light", "dark"):
        page = opened(step, scheme=scheme)
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        grounds[scheme] = sum(map(int, color[4:-1].split(",")))
    assert grounds["light"] > 600
    assert grounds["dark"] < 100
    picture = "document.querySelector('#strip').toDataURL()"
    before = page.evaluate(picture)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    page.frame()
    assert page.evaluate(picture) != before


def test_twenty_thousand_nodes(opened):
    page = opened(large(20_000), "#node=15000")
    assert page.text("#count") == "20,000 nodes"
    assert "15000" in page.evaluate(PLACES)
    assert page.evaluate("document.querySelectorAll('*').length") < 1500
    page.evaluate("document.querySelector('#node-list').scrollTop = 1e9")
    page.frame()
    assert page.evaluate(PLACES)[-1] == "19999"
    page.go("#q=block%2017%20layer_kernel_9%3C")
    page.frame()
    count = int(page.text("#count").split(" ")[0].replace(",", ""))
    assert 100 < count < 20_000
    assert page.evaluate("document.querySelectorAll('*').length") < 1500
    took = page.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart")
    assert took < 10_000, f"{took} ms; on a free core it is less than one second"
    assert page.errors == []
