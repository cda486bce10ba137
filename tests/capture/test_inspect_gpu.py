"""inspect_graph() of real CUDA graphs with nodes of torch, cuBLAS, Triton and the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from cuda.bindings import driver

from graphrt.capture.allocator import allocator_rows
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.diff import diff
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.view import Edge, GraphView, Node, NodeKind, Operand
from graphrt.capture.raw_graph import check
from graphrt.kernels.errors import CaptureError
from tests.support.capture_rig import Countdown

pytestmark = pytest.mark.gpu


@triton.jit
def scale_rows(out_ptr, in_ptr, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(in_ptr + at, mask=at < n) * factor, mask=at < n)


def capture(step: Callable[[], object], *, keep_graph: bool = True) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def words(node: Node) -> set[int]:
    """All words of a node's arguments at multiples of 8 bytes."""
    found = set()
    for one in node.arguments:
        for at in range(-one.offset % 8, len(one.data) - 7, 8):
            found.add(int.from_bytes(one.data[at : at + 8], "little"))
    return found


def readable(view: GraphView) -> None:
    assert [node.remark for _, node in view.walk()] == [""] * view.num_nodes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chain_of_matrix_products(dtype: torch.dtype) -> None:
    x, w, v = (torch.randn(256, 256, device="cuda", dtype=dtype) for _ in range(3))
    outs = [torch.empty_like(x) for _ in range(2)]

    def step() -> None:
        torch.mm(x, w, out=outs[0])
        torch.mm(outs[0], v, out=outs[1])

    view = inspect_graph(capture(step))
    readable(view)
    kernels = [node for node in view.nodes if node.kind is NodeKind.KERNEL]
    assert len(kernels) >= 2
    assert any(word in node.name.lower() for node in kernels for word in ("gemm", "nvjet", "cutlass"))
    assert all(node.grid and min(node.grid) >= 1 and node.block and node.block[0] % 32 == 0 for node in kernels)
    chain = [(at, at + 1) for at in range(len(view.nodes) - 1)]
    assert [(edge.source, edge.target) for edge in view.edges] == chain, "a library may use programmatic edges"
    held = set.union(*map(words, kernels))
    assert {t.data_ptr() for t in (x, w, v, *outs)} <= held


def test_triton_kernel_and_kernel_of_torch() -> None:
    x, out = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    (node,) = inspect_graph(capture(lambda: x.add_(1.0))).nodes
    assert node.symbol.startswith("_Z")
    assert "vectorized_elementwise_kernel<" in node.name
    assert x.data_ptr() in words(node)
    assert (node.attributes, node.remark) == ({}, "")
    graph = capture(lambda: scale_rows[(8,)](out, x, 2.5, 1000, BLOCK=128))
    (node,) = inspect_graph(graph).nodes
    assert (node.name, node.symbol) == ("scale_rows", "scale_rows")
    assert node.grid == (8, 1, 1)
    assert node.block == (128, 1, 1)
    named = {one.name: one for one in node.arguments}
    assert list(named)[:4] == ["out_ptr", "in_ptr", "factor", "n"]
    assert [named[name].pointers for name in ("out_ptr", "in_ptr", "factor", "n")] == [(0,), (0,), (), ()]
    assert int.from_bytes(named["out_ptr"].data, "little") == out.data_ptr()
    assert int.from_bytes(named["in_ptr"].data, "little") == x.data_ptr()
    assert ctypes.c_float.from_buffer_copy(named["factor"].data).value == 2.5
    assert int.from_bytes(named["n"].data, "little") == 1000
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x * 2.5), "inspection does not change the graph"

    def early() -> None:
        for _ in range(2):
            scale_rows[(8,)](out, x, 2.5, 1000, BLOCK=128, launch_pdl=True)

    assert inspect_graph(capture(early)).edges == (Edge(0, 1, True),)


def test_copies_and_fills() -> None:
    x, y = torch.randn(4096, device="cuda"), torch.zeros(4096, device="cuda")
    pinned = torch.ones(64, pin_memory=True)

    def step() -> None:
        y.copy_(x)
        x[:64].copy_(pinned, non_blocking=True)
        check(driver.cuMemsetD32Async(y.data_ptr(), 7, 32, torch.cuda.current_stream().cuda_stream))

    view = inspect_graph(capture(step))
    readable(view)
    copy, upload, fill = view.nodes
    assert [node.kind for node in view.nodes] == [NodeKind.MEMCPY, NodeKind.MEMCPY, NodeKind.MEMSET]
    nbytes = 4096 * 4
    assert copy.operands == (
        Operand("src", x.data_ptr(), nbytes), Operand("dst", y.data_ptr(), nbytes, written=True),
    )  # fmt: skip
    assert upload.operands == (
        Operand("src", pinned.data_ptr(), 256, host=True), Operand("dst", x.data_ptr(), 256, written=True),
    )  # fmt: skip
    assert fill.operands == (Operand("dst", y.data_ptr(), 128, written=True),)
    assert dict(fill.scalars)["value"] == "0x7"


def test_fork_and_join_of_streams() -> None:
    x, y, side = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda"), torch.cuda.Stream()

    def step() -> None:
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.mul_(2)
        x.sin_()
        torch.cuda.current_stream().wait_stream(side)
        x.add_(y)

    view, again = inspect_graph(capture(step)), inspect_graph(capture(step))
    assert set(view.edges) == {Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3)}
    assert diff(again, view).equal_launches
    assert y.data_ptr() in words(view.nodes[1]), "in launch order"


def test_child_graph() -> None:
    x = torch.zeros(1000, device="cuda")
    inner = capture(lambda: x.add_(1.0).mul_(2.0))
    graph = check(driver.cuGraphCreate(0))[1]
    try:
        check(driver.cuGraphAddChildGraphNode(graph, None, 0, inner.raw_cuda_graph()))
        view = inspect_graph(graph)
    finally:
        check(driver.cuGraphDestroy(graph))
    readable(view)
    (node,) = view.nodes
    assert node.kind is NodeKind.CHILD
    (body,) = node.bodies
    assert diff(body, inspect_graph(inner)).equal
    assert all(x.data_ptr() in words(one) for one in body.nodes)


def test_loop_and_body() -> None:
    rig = Countdown(torch.device("cuda", 0))
    graph = rig.capture(rig.step)
    loop = rig.recorder.loop(graph, rig.condition)
    view = inspect_graph(loop)
    readable(view)
    (node,) = view.nodes
    assert (node.kind, node.name) == (NodeKind.CONDITIONAL, "while")
    (body,) = node.bodies
    child, setter = body.nodes
    assert (child.kind, setter.name) == (NodeKind.CHILD, "loop_condition")
    assert body.edges == (Edge(0, 1),)
    assert rig.condition.data_ptr() in words(setter)
    assert diff(child.bodies[0], inspect_graph(graph)).equal
    assert rig.runs.data_ptr() in set.union(*map(words, child.bodies[0].nodes))
    rig.start(3)
    loop.launch()
    assert rig.runs.item() == 3


def test_nodes_made_by_driver_calls() -> None:
    torch.zeros(1, device="cuda")  # creates the context
    graph, event = check(driver.cuGraphCreate(0))[1], check(driver.cuEventCreate(0))[1]
    ran = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: ran.append(data))
    host, made = driver.CUDA_HOST_NODE_PARAMS(), driver.CUDA_MEM_ALLOC_NODE_PARAMS()
    host.fn = driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
    made.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.bytesize = 1 << 16
    try:
        record = check(driver.cuGraphAddEventRecordNode(graph, None, 0, event))[1]
        wait = check(driver.cuGraphAddEventWaitNode(graph, [record], 1, event))[1]
        empty = check(driver.cuGraphAddEmptyNode(graph, [wait], 1))[1]
        alloc = check(driver.cuGraphAddMemAllocNode(graph, [empty], 1, made))[1]
        free = check(driver.cuGraphAddMemFreeNode(graph, [alloc], 1, made.dptr))[1]
        check(driver.cuGraphAddHostNode(graph, [free], 1, host))
        nodes = inspect_graph(int(graph)).nodes
    finally:
        check(driver.cuGraphDestroy(graph))
        check(driver.cuEventDestroy(event))
    assert [node.kind for node in nodes] == [
        NodeKind.EVENT_RECORD, NodeKind.EVENT_WAIT, NodeKind.EMPTY, NodeKind.ALLOC, NodeKind.FREE, NodeKind.HOST,
    ]  # fmt: skip
    assert nodes[0].scalars == nodes[1].scalars == (("event", "0"),)
    assert nodes[3].operands[0].nbytes == 1 << 16
    assert nodes[3].operands[0].address == nodes[4].operands[0].address != 0
    assert nodes[5].remark == "the memory that a host function accesses is unknown"
    assert not ran


def pool_of(graph: torch.cuda.CUDAGraph) -> MemoryMap:
    segments = allocator_rows(graph.pool())
    return MemoryMap(Region("pool", Owner.POOL, one["address"], one["total_size"]) for one in segments)


def test_two_captures_of_a_step_are_equal() -> None:
    """In two pools, both alive, with kernels whose arguments have no padding."""
    x, out = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")

    def step() -> None:
        y = x + x
        scale_rows[(8,)](out, y + x, 2.5, 1000, BLOCK=128)
        out.add_(y)

    first, second = capture(step), capture(step)
    a, b = inspect_graph(first), inspect_graph(second)
    found = diff(a, b, pool_of(first), pool_of(second))
    assert found.equal, str(found)
    assert not diff(a, b).equal, "two pools"
    x = x.clone()
    moved = inspect_graph(third := capture(step))
    changes = [change for node in diff(a, moved, pool_of(first), pool_of(third)).nodes for change in node.changes]
    assert len({change.before for change in changes}) == 1, "x alone"


def test_a_graph_that_torch_did_not_keep_raises() -> None:
    x = torch.zeros(8, device="cuda")
    with pytest.raises(CaptureError, match=r"create it with torch.cuda.CUDAGraph\(keep_graph=True\) and capture first"):
        inspect_graph(capture(lambda: x.add_(1), keep_graph=False))
    with pytest.raises(CaptureError, match="its capture has not ended"):
        inspect_graph(torch.cuda.CUDAGraph(keep_graph=True))
