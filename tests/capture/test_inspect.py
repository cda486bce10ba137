"""inspect_graph() of CUDA graphs: every kind of node, with a fake driver."""

from __future__ import annotations

import ctypes
import random
import re
import types
from unittest import mock

import pytest
import torch

from graphrt.capture.graph import GraphReport
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.view import Argument, Edge, NodeKind, Operand
from graphrt.capture.recorder import CudaGraph
from graphrt.kernels.errors import CaptureError, ConfigError
from tests.support import fake_driver
from tests.support.capture_rig import CPU, KEY, ints
from tests.support.fake_graphs import ATTRIBUTES, FakeGraphs, driver, install, number, shuffler, word

ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
ADD_NAME = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
POINTERS = word(0x7F0000001000) + word(0x7F0000002000) + word(0x7F0000003000)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return install(monkeypatch)


# -- nodes


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("lie", [{}, {"blob": True}, {"scattered": True}])
def test_kernel(fake: FakeGraphs, lie: dict[str, bool], by_kernel: bool) -> None:
    graph = fake.graph()
    function = fake.function(ADD, [4, 8, 24])
    arguments = [number(1000), bytes(8), POINTERS]
    launch = {"grid": (2, 3, 4), "block": (128, 2, 1), "shared": 512}
    fake.kernel(graph, function, arguments, by_kernel=by_kernel, **lie, **launch)
    (node,) = inspect_graph(graph).nodes
    assert (node.kind, node.symbol, node.name) == (NodeKind.KERNEL, ADD, ADD_NAME)
    assert (node.grid, node.block, node.shared_bytes) == ((2, 3, 4), (128, 2, 1), 512)
    offsets = (0, 8, 16)
    assert node.arguments == tuple(Argument(at, data) for at, data in zip(offsets, arguments, strict=True))
    assert (node.attributes, node.remark) == ({}, "")
    assert fake.unwritten()
    if not by_kernel:  # a view does not refer to the driver's memory
        ctypes.memset(ctypes.addressof(next(iter(fake.nodes.values())).memory[0]), 0xFF, 4)
        assert node.arguments[0].data == number(1000)


def test_names_of_triton_kernels_are_not_demangled_as_types(fake: FakeGraphs) -> None:
    """Demangled as a type, "f" would become "float"."""
    graph = fake.graph()
    for name in ("f", "i", "_attend", "_Zcorrupt"):
        fake.kernel(graph, fake.function(name, []))
    assert [node.name for node in inspect_graph(graph).nodes] == ["f", "i", "_attend", "_Zcorrupt"]


def test_only_attributes_that_differ_from_their_defaults(fake: FakeGraphs) -> None:
    graph, function = fake.graph(), fake.function("f", [])
    window = word(0x7F0000000000) + word(4096) + bytes.fromhex("0000803f") + number(2) + number(1)
    cases = {
        "CLUSTER_DIMENSION": (number(2) + number(1) + number(1), {"cluster": "2x1x1"}),
        "COOPERATIVE": (number(1), {"cooperative": "1"}),
        "PRIORITY": (number(-5), {"priority": "-5"}),
        "MEM_SYNC_DOMAIN": (number(1), {"memory domain": "1"}),
        "MEM_SYNC_DOMAIN_MAP": (bytes((2, 3)), {"memory domain map": "2 3"}),
        "PREFERRED_SHARED_MEMORY_CARVEOUT": (number(100), {"shared memory carveout": "100"}),
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE": (number(2), {"cluster scheduling": "2"}),
        "DEVICE_UPDATABLE_KERNEL_NODE": (number(1), {"device-updatable": "1"}),
        "ACCESS_POLICY_WINDOW": (
            window, {"access policy": "4096 bytes at 0x7f0000000000, hit ratio 1, 2 else 1"}
        ),
    }  # fmt: skip
    for name, (value, _) in cases.items():
        fake.kernel(graph, function, attributes={int(getattr(ATTRIBUTES, f"CU_LAUNCH_ATTRIBUTE_{name}")): value})
    for node, (name, (_, expected)) in zip(inspect_graph(graph).nodes, cases.items(), strict=True):
        assert node.attributes == expected, name


def test_an_argument_buffer_without_layout_is_one_argument(fake: FakeGraphs) -> None:
    """As with cuBLASLt, without a layout, and with a layout longer than the buffer."""
    graph, data = fake.graph(), bytes(range(256)) * 10
    function = fake.function("nvjet", [2560])
    fake.kernel(graph, function, [data], blob=True)
    assert inspect_graph(graph).nodes[0].arguments == (Argument(0, data),)
    for layout in ([], [(0, 4000)]):
        fake.functions[function] = b"nvjet", layout
        assert inspect_graph(graph).nodes[0].arguments == (Argument(0, data),)


def test_copies_are_named_by_the_memory_of_both_sides(fake: FakeGraphs) -> None:
    graph = fake.graph()
    cases = {
        ("DEVICE", "DEVICE"): ("device to device", Operand("src", 0x1000, 64), ""),
        ("HOST", "DEVICE"): ("host to device", Operand("src", 0x1000, 64, host=True), ""),
        ("UNIFIED", "UNIFIED"): ("host to device", Operand("src", 0x1000, 64, host=True), ""),
        ("ARRAY", "DEVICE"): ("array to device", Operand("src", 0, 64), "the address of an array is unknown"),
    }
    for kinds in cases:
        fake.copy(graph, 0x1000, 0x2000, 64, kinds=kinds)
    fake.host_memory.add(0x1000)
    for node, (name, source, remark) in zip(inspect_graph(graph).nodes, cases.values(), strict=True):
        assert (node.kind, node.name, node.remark) == (NodeKind.MEMCPY, f"memcpy {name}", remark)
        assert node.operands == (source, Operand("dst", 0x2000, 64, written=True))
        assert not node.scalars


def test_a_multi_row_copy_spans_from_its_first_byte_to_its_last(fake: FakeGraphs) -> None:
    graph = fake.graph()
    rows = {"Height": 3, "Depth": 2, "srcPitch": 100, "srcHeight": 5, "dstPitch": 16, "srcY": 1, "srcXInBytes": 4}
    fake.copy(graph, 0x1000, 0x2000, 16, srcZ=2, **rows)
    (node,) = inspect_graph(graph).nodes
    # The span of a numpy array of [planes, 5 rows, 100 bytes].
    planes = torch.arange(6 * 5 * 100).view(6, 5, 100)[2:4, 1:4, 4:20]
    first, last = int(planes.min()), int(planes.max())
    assert node.operands == (
        Operand("src", 0x1000 + first, last - first + 1),
        Operand("dst", 0x2000, 3 * 2 * 16, written=True),
    )
    assert dict(node.scalars) == {"width": "16", "height": "3", "depth": "2", "src pitch": "100", "dst pitch": "16"}


def test_fill_allocation_and_free(fake: FakeGraphs) -> None:
    graph, params = fake.graph(), driver.CUDA_MEM_ALLOC_NODE_PARAMS()
    fake.fill(graph, 0x3000, 0xFF, 1, 100)
    fake.fill(graph, 0x3000, 7, 4, 10, height=3, pitch=64)
    params.dptr, params.bytesize = driver.CUdeviceptr(0x4000), 256
    fake.other(graph, "MEM_ALLOC", params)
    fake.other(graph, "MEM_FREE", driver.CUdeviceptr(0x4000))
    flat, rows, made, freed = inspect_graph(graph).nodes
    assert flat.operands == (Operand("dst", 0x3000, 100, written=True),)
    assert dict(flat.scalars) == {"value": "0xff", "element size": "1", "width": "100"}
    assert rows.operands == (Operand("dst", 0x3000, 2 * 64 + 40, written=True),)
    assert dict(rows.scalars)["pitch"] == "64"
    assert (made.kind, made.operands) == (NodeKind.ALLOC, (Operand("memory", 0x4000, 256, written=True),))
    assert (freed.kind, freed.operands) == (NodeKind.FREE, (Operand("memory", 0x4000, 0),))


def test_child_graph(fake: FakeGraphs) -> None:
    graph, child, inner = fake.graph(), fake.graph(), fake.graph()
    fake.fill(inner, 0x3000, 0, 1, 1)
    fake.kernel(child, fake.function("f", []))
    fake.other(child, "GRAPH", driver.CUgraph(inner))
    first = fake.other(graph, "EMPTY")
    fake.other(graph, "GRAPH", driver.CUgraph(child), after=[first])
    view = inspect_graph(graph)
    assert [(place, node.name) for place, node in view.walk()] == [
        ((0,), "empty"),
        ((1,), "child graph"),
        ((1, 0, 0), "f"),
        ((1, 0, 1), "child graph"),
        ((1, 0, 1, 0, 0), "memset"),
    ]
    assert view.edges == (Edge(0, 1),)


@pytest.mark.parametrize(
    ("kind", "name", "count"), [(0, "if", 2), (1, "while", 1), (2, "switch", 3), (7, "conditional", 1)]
)
def test_newer_drivers_show_the_bodies_of_a_conditional_node(
    fake: FakeGraphs, kind: int, name: str, count: int
) -> None:
    graph, bodies = fake.graph(), [fake.graph() for _ in range(count)]
    for index, body in enumerate(bodies):
        fake.kernel(body, fake.function(f"k{index}", []))
    fake.conditional(graph, kind, bodies)
    (node,) = inspect_graph(graph).nodes
    assert (node.kind, node.name, node.bodies) == (NodeKind.CONDITIONAL, "conditional", ())
    assert node.remark == "drivers before 13.2 do not show its bodies"
    fake.version = 13020
    (node,) = inspect_graph(graph).nodes
    assert (node.kind, node.name, node.remark) == (NodeKind.CONDITIONAL, name, "")
    assert [body.nodes[0].name for body in node.bodies] == [f"k{index}" for index in range(count)]


def test_a_host_function_has_the_name_of_its_symbol(fake: FakeGraphs) -> None:
    graph = fake.graph()
    library = ctypes.CDLL(None)
    for address in (ctypes.cast(library.malloc, ctypes.c_void_p).value, 0x10):
        params = driver.CUDA_HOST_NODE_PARAMS()
        params.fn = driver.CUhostFn(address)
        fake.other(graph, "HOST", params)
    known, unknown = inspect_graph(graph).nodes
    assert "malloc" in known.symbol
    assert known.name == known.symbol
    assert "libc" in dict(known.scalars)["library"]
    assert (unknown.name, unknown.symbol, unknown.scalars) == ("host function", "", ())
    assert {known.remark, unknown.remark} == {"the memory that a host function accesses is unknown"}


def test_events_are_numbered_by_first_use(fake: FakeGraphs) -> None:
    graph, child = fake.graph(), fake.graph()
    fake.other(graph, "EVENT_RECORD", 0x99)
    fake.other(child, "WAIT_EVENT", 0x55)
    fake.other(graph, "GRAPH", driver.CUgraph(child))
    fake.other(graph, "WAIT_EVENT", 0x99)
    fake.other(graph, "EVENT_RECORD", 0x55)
    found = [(node.kind, dict(node.scalars)) for _, node in inspect_graph(graph).walk() if not node.bodies]
    assert found == [
        (NodeKind.EVENT_RECORD, {"event": "0"}),
        (NodeKind.EVENT_WAIT, {"event": "1"}),
        (NodeKind.EVENT_WAIT, {"event": "0"}),
        (NodeKind.EVENT_RECORD, {"event": "1"}),
    ]


def test_an_unreadable_node_gets_a_remark_and_the_others_are_read(fake: FakeGraphs) -> None:
    graph = fake.graph()
    fake.other(graph, 77)
    fake.other(graph, "BATCH_MEM_OP")
    fake.other(graph, "EXT_SEMAS_SIGNAL")
    fake.copy(graph, 0x1000, 0x2000, 64)
    fake.fill(graph, 0x3000, 0, 1, 1)
    fake.other(graph, "MEMCPY", driver.CUDA_MEMCPY3D())  # its memory types are 0, which is invalid
    fake.failing = {"cuGraphMemsetNodeGetParams"}
    nodes = inspect_graph(graph).nodes
    assert [(node.kind, node.name) for node in nodes] == [
        (NodeKind.OTHER, "unknown node"),
        (NodeKind.OTHER, "batch mem op"),
        (NodeKind.OTHER, "ext semas signal"),
        (NodeKind.MEMCPY, "memcpy device to device"),
        (NodeKind.MEMSET, "memset"),
        (NodeKind.MEMCPY, "memcpy"),
    ]
    assert nodes[0].remark == "could not be read: 77 is not a valid CUgraphNodeType"
    assert nodes[1].remark == nodes[2].remark == "nodes of this type are not supported"
    assert nodes[3].remark == ""
    assert "INVALID_VALUE" in nodes[4].remark
    assert re.fullmatch("could not be read: .* is not a valid CUmemorytype", nodes[5].remark)


@pytest.mark.parametrize(
    "call", ["cuGraphKernelNodeGetParams", "cuFuncGetName", "cuFuncGetParamInfo", "cuGraphKernelNodeGetAttribute"]
)
def test_a_kernel_with_partial_information(fake: FakeGraphs, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An index past the last argument is an invalid value. After any other error, arguments may be missing."""
    graph = fake.graph()
    fake.kernel(graph, fake.function("f", [8]), [word(5)], attributes={2: number(1)})
    fake.failing, fake.missing = {call}, {call}
    (node,) = inspect_graph(graph).nodes
    assert node.kind is NodeKind.KERNEL
    unread = "INVALID_VALUE" in node.remark
    assert unread == (call in ("cuGraphKernelNodeGetParams", "cuFuncGetName"))
    assert len(node.arguments) == (call == "cuGraphKernelNodeGetAttribute")
    assert node.attributes == ({"cooperative": "1"} if call == "cuFuncGetParamInfo" else {})
    refused = driver.CUresult.CUDA_ERROR_INVALID_HANDLE
    monkeypatch.setattr(FakeGraphs, "_call_cuFuncGetParamInfo", lambda *arguments: (refused, None, None))
    fake.failing, fake.missing = set(), set()
    (node,) = inspect_graph(graph).nodes
    assert node.arguments == ()
    assert "the layout of its arguments could not be read: <CUresult.CUDA_ERROR_INVALID_HANDLE" in node.remark


def test_a_kernel_without_argument_pointers(fake: FakeGraphs) -> None:
    graph = fake.graph()
    node = fake.kernel(graph, fake.function("f", [8, 4]), [word(5), number(6)])
    pointers = fake.nodes[node].memory[-1]
    pointers[0] = 0
    assert [argument.data for argument in inspect_graph(graph).nodes[0].arguments] == [b"", number(6)]
    fake.nodes[node].params.kern = driver.CUkernel(0x66)
    assert inspect_graph(graph).nodes[0].name == "f", "one of its two handles is known"
    fake.nodes[node].params.kernelParams = 0
    (found,) = inspect_graph(graph).nodes
    assert (found.arguments, found.remark) == ((), "the driver reports no arguments")


# -- edges and order


def test_programmatic_edges_are_marked(fake: FakeGraphs) -> None:
    graph, f = fake.graph(), fake.function("f", [])
    a = fake.kernel(graph, f)
    b = fake.kernel(graph, f, after=[a], early=[a])
    c = fake.kernel(graph, f, after=[a, b, b], early=[b])
    fake.depend(graph, b, c)  # a full edge wins
    assert inspect_graph(graph).edges == (Edge(0, 1, True), Edge(0, 2), Edge(1, 2))
    for kind in range(4):
        graph = fake.graph()
        fake.depend(graph, fake.kernel(graph, f), fake.kernel(graph, f), kind)
        assert inspect_graph(graph).edges == (Edge(0, 1, kind > 0),)
    view = inspect_graph(fake.graph())
    assert (view.nodes, view.edges, view.origin) == ((), (), "cuda")


def test_the_order_of_the_capture_is_kept(fake: FakeGraphs) -> None:
    """Two streams launched alternately, although names and depth would give another order."""
    graph = fake.graph()
    last = {"b": None, "a": None}
    for index in range(6):
        stream = "ba"[index % 2]
        after = [last[stream]] if last[stream] else []
        last[stream] = fake.kernel(graph, fake.function(f"{stream}{index}", []), after=after)
    assert [node.name for node in inspect_graph(graph).nodes] == ["b0", "a1", "b2", "a3", "b4", "a5"]


def forked(fake: FakeGraphs, seed: int) -> int:
    """A graph of forking and joining streams with many equal names."""
    rng, graph = random.Random(seed), fake.graph()
    functions = [fake.function(f"k{index}", [4]) for index in range(3)]
    root = fake.kernel(graph, functions[0], [number(0)])
    ends = [root]
    for count in range(30):
        after = rng.sample(ends, rng.randint(1, len(ends)))
        node = fake.kernel(graph, rng.choice(functions), [number(count)], after=after)
        ends = [end for end in ends if end not in after] + [node]
        if len(ends) < 4:
            ends.append(fake.kernel(graph, rng.choice(functions), [number(100 + count)], after=[rng.choice(after)]))
    return graph


@pytest.mark.parametrize("seed", range(8))
def test_every_edge_leads_forward_in_any_order_of_the_driver_s_list(fake: FakeGraphs, seed: int) -> None:
    graph = forked(fake, seed)
    value = {h: int.from_bytes(bytes(n.memory[0]), "little") for h, n in fake.nodes.items()}
    expected = {(value[source], value[target]) for source, target, _ in fake.graphs[graph].edges}
    fake.shuffle = shuffler(seed)
    view = inspect_graph(graph)
    assert all(edge.source < edge.target for edge in view.edges)
    names = [int.from_bytes(node.arguments[0].data, "little") for node in view.nodes]
    assert {(names[edge.source], names[edge.target]) for edge in view.edges} == expected


# -- what is inspected


def test_graphs_of_torch_and_graphrt_and_raw_handles(fake: FakeGraphs) -> None:
    raw = fake.graph()
    fake.kernel(raw, fake.function("f", []))
    of_torch = types.SimpleNamespace(raw_cuda_graph=lambda: raw)
    ours = CudaGraph(of_torch, torch.ones(1), GraphReport(KEY, 0.0, 0, 0, 1))
    for graph in (raw, driver.CUgraph(raw), of_torch, ours):
        assert [node.name for node in inspect_graph(graph).nodes] == ["f"]
    ours.close()
    with pytest.raises(CaptureError, match="graph: the graph is closed"):
        inspect_graph(ours)
    text = "You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with\nmore"
    not_kept = types.SimpleNamespace(raw_cuda_graph=mock.Mock(side_effect=RuntimeError(text)))
    with pytest.raises(CaptureError, match=r"You cannot .*; create it with torch.cuda.CUDAGraph\(keep_graph=True\)"):
        inspect_graph(not_kept)


def test_other_types_and_graphs_that_the_driver_cannot_list_raise(fake: FakeGraphs) -> None:
    for wrong in (None, 0, True, "graph", 1.5, driver.CUgraph(0), types.SimpleNamespace()):
        with pytest.raises(ConfigError, match=r"graph: expected a torch.cuda.CUDAGraph, .* got .*; pass a captured"):
            inspect_graph(wrong)
    assert fake.calls == []
    graph = fake.graph()
    for call in ("cuGraphGetNodes", "cuGraphGetEdges"):
        fake.failing = {call}
        with pytest.raises(CaptureError, match=r"CUDA: a call returned CUDA_ERROR_INVALID_VALUE"):
            inspect_graph(graph)
    fake.failing, fake.missing = set(), {"cuGraphGetEdges"}
    with pytest.raises(CaptureError, match=r"^CUDA driver: versions before CUDA 12.3"):
        inspect_graph(graph)


def test_the_body_of_a_loop_is_read_on_older_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop keeps the handle of its body. One fake driver builds the loop, and another one reads it."""
    maker = fake_driver.install(monkeypatch)
    template = fake_driver.Template(fake_driver.KERNEL)
    loop = CudaGraph(template, torch.ones(1), GraphReport(KEY, 0.0, 0, 0, 1)).loop(ints(CPU))
    assert maker.calls.count("cuGraphAddNode") == 1
    reader = install(monkeypatch)
    parent, body = reader.graph(), reader.graph()
    node = reader.conditional(parent, 1, [body])
    reader.kernel(body, reader.function("loop_condition", []))
    ((made, (name, bodies)),) = loop.raw_conditionals().items()
    assert (made, name, len(bodies), loop.raw_cuda_graph()) == (9, "while", 1, 9), "the handles of the first driver"
    monkeypatch.setattr(loop, "_graph", parent)
    monkeypatch.setattr(loop, "_conditionals", {node: ("while", (driver.CUgraph(body),))})
    view = inspect_graph(loop)
    assert [(node.name, node.remark) for _, node in view.walk()] == [("while", ""), ("loop_condition", "")]
    loop.close()
    with pytest.raises(CaptureError, match=r"loop: raw_cuda_graph\(\) on a closed loop"):
        inspect_graph(loop)


def test_number_of_driver_calls_per_node(fake: FakeGraphs) -> None:
    """One for the type, one for the parameters, one per attribute, and some per function."""
    graph = fake.graph()
    function = fake.function("f", [8, 8, 4])
    node = None
    for _ in range(300):
        node = fake.kernel(graph, function, [word(1), word(2), number(3)], after=[node] if node else [])
    inspect_graph(graph)
    bound = [call for call in fake.calls if call != "cuGraphKernelNodeGetAttribute"]
    assert len(bound) < 300 * 2 + 20
    assert len(fake.calls) - len(bound) == 300 * 10
