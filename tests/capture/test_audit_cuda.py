"""The audit of real CUDA graphs: injected errors are found, and correct graphs have no findings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.inspect.audit import Allowed, Audit, FindingKind, audit, audit_twice, memory_of
from graphrt.capture.inspect.blas import with_blas_workspaces
from graphrt.capture.inspect.memory import MemoryMap, Owner
from graphrt.capture.recorder import CudaGraphRecorder
from graphrt.kernels.errors import CaptureError

pytestmark = pytest.mark.gpu


@triton.jit
def add_one(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) + 1, mask=at < count)


def add_one_by_triton(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    add_one[(1,)](x, out, x.numel(), BLOCK=1024)
    return out


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(256, device="cuda")


def capture(step: Callable[[], object], **options) -> torch.cuda.CUDAGraph:
    """Capture a step after one warm-up. cuBLAS allocates its workspace in the pool, as for compiled steps."""
    step()
    torch._C._cuda_clearCublasWorkspaces()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, **options):
        kept = step()
    torch._C._cuda_clearCublasWorkspaces()
    del kept
    return graph


def run(step: Callable[[], object], **named) -> Audit:
    graph = capture(step)
    return audit(graph, memory_of(pool=graph, **named))


def run_twice(step: Callable[[], object], **named) -> Audit:
    """torch's kernels take structs with uninitialized padding, so a single capture may show stale addresses."""
    return audit_twice(lambda: capture(step), lambda graph: memory_of(pool=graph, **named))


def kinds(report: Audit) -> set[FindingKind]:
    return {finding.kind for finding in report.findings}


def test_a_triton_kernel_and_elementwise_kernels_of_torch_have_no_findings(x: torch.Tensor) -> None:
    out = torch.empty_like(x)
    report = run(lambda: add_one_by_triton(x, out), static={"x": x, "out": out})
    assert report.ok, str(report)
    assert report.counts[Owner.STATIC] == 2
    report = run_twice(lambda: (x * 2 + 1).softmax(0).sum(), static={"x": x})
    assert report.ok, str(report)
    assert report.counts[Owner.STATIC] >= 1
    assert report.counts[Owner.POOL] >= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cublas_products_have_no_findings(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to("cuda", dtype).requires_grad_(False)
    inputs = {rows: torch.randn(rows, 512, device="cuda", dtype=dtype) for rows in (1, 8, 64)}
    for rows, given in inputs.items():
        report = run_twice(lambda given=given: model(given), static={"x": given}, weights=model)
        assert report.ok, f"{rows} rows: {report}"
        assert report.counts[Owner.WEIGHT] >= 4


@pytest.mark.parametrize("bias", [False, True])
def test_a_workspace_from_before_the_capture_is_library_memory(bias: bool) -> None:
    """Workspaces of cuBLAS, and of cuBLASLt, which torch uses for products with a bias."""
    x = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
    layer = torch.nn.Linear(8192, 512, bias=bias, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x)  # allocates the workspaces of the stream in torch's default pool
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        y = layer(x)
    memory = memory_of(static={"x": x, "y": y}, weights=layer, pool=graph)
    report = audit(graph, with_blas_workspaces(memory, [stream]))
    assert report.ok, f"{report}\nwithout the probe: {audit(graph, memory)}"


def test_the_state_of_torch_s_generator_is_library_memory(x: torch.Tensor) -> None:
    graph = capture(lambda: x.uniform_())
    memory, before = memory_of(static={"x": x}, pool=graph), torch.cuda.get_rng_state()
    report = audit(graph, with_blas_workspaces(memory))
    assert report.ok, f"{report}\nwithout the probe: {audit(graph, memory)}"
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_workspace_of_the_first_capture_is_not_hidden_state() -> None:
    x = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
    layer = torch.nn.Linear(8192, 512, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer(x)  # creates the library's handle and the workspaces of this stream
    stream = torch.cuda.Stream()

    def captured() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            layer(x)
        return graph

    def memory(graph: torch.cuda.CUDAGraph) -> MemoryMap:
        return with_blas_workspaces(memory_of(static={"x": x}, weights=layer, pool=graph), [stream])

    report = audit_twice(captured, memory)
    assert report.ok, str(report)


def test_a_foreign_allocation(x: torch.Tensor) -> None:
    mask = torch.ones_like(x)
    report = run(lambda: x * mask, static={"x": x})
    assert {(f.kind, f.address) for f in report.findings} == {(FindingKind.FOREIGN, mask.data_ptr())}
    by_triton = run(lambda: add_one_by_triton(x, mask), static={"x": x})
    (finding,) = by_triton.findings
    assert (finding.kind, finding.address, finding.certain) == (FindingKind.FOREIGN, mask.data_ptr(), True)
    assert "'out'" in finding.where


def test_a_freed_block(x: torch.Tensor) -> None:
    held = {"mask": torch.ones_like(x)}
    address = held["mask"].data_ptr()
    graph = capture(lambda: x * held["mask"])
    held.clear()
    report = audit(graph, memory_of(static={"x": x}, pool=graph))
    assert {(f.kind, f.address) for f in report.findings} == {(FindingKind.FREED, address)}


def test_a_dropped_output_is_a_finding(x: torch.Tensor) -> None:
    graph, held = torch.cuda.CUDAGraph(keep_graph=True), {}
    with torch.cuda.graph(graph):
        held["y"] = x * 2
    memory = memory_of(static={"x": x, "y": held["y"]}, pool=graph)
    assert audit(graph, memory).ok
    named = memory.regions[:2]
    held.clear()
    report = audit(graph, MemoryMap([*named, *memory_of(pool=graph).regions]))
    assert [(f.kind, f.region) for f in report.findings] == [(FindingKind.FREED, "y")]


@pytest.mark.parametrize("name", [True, False])
def test_a_pinned_source(x: torch.Tensor, name: bool) -> None:
    staging = torch.ones(256).pin_memory()
    static = {"x": x} | ({"staging": staging} if name else {})
    graph = capture(lambda: x.copy_(staging, non_blocking=True))
    memory = memory_of(static=static, pool=graph)
    (finding,) = audit(graph, memory).findings
    assert (finding.kind, finding.address) == (FindingKind.HOST_MEMORY, staging.data_ptr())
    assert finding.region == ("staging" if name else "pinned memory")
    assert audit(graph, memory, allowed=[Allowed("the test waits", region=finding.region)]).ok


def test_access_past_the_end_of_a_view() -> None:
    buffer = torch.ones(1024, device="cuda")
    report = run(lambda: buffer[512:] * 2, static={"head": buffer[:512]})
    assert kinds(report) == {FindingKind.OVERRUN}
    assert {f.address for f in report.findings} == {buffer[512:].data_ptr()}


def test_two_graphs_sharing_a_pool(x: torch.Tensor) -> None:
    pool = torch.cuda.graph_pool_handle()
    graphs = [capture(lambda: (x * 2).softmax(0), pool=pool), capture(lambda: (x[:64] * 3).exp(), pool=pool)]
    for graph in graphs:
        report = audit(graph, memory_of(static={"x": x}, pool=graph))
        assert report.ok, str(report)
        assert report.counts[Owner.POOL] > 0


def test_two_captures_decide(x: torch.Tensor) -> None:
    mask, kept = torch.ones_like(x), []

    foreign = run_twice(lambda: x * mask, static={"x": x})
    assert {(f.kind, f.address, f.certain) for f in foreign.findings} == {
        (FindingKind.FOREIGN, mask.data_ptr(), True)
    }  # fmt: skip

    def keeps() -> torch.Tensor:
        if len(kept) < 2 and torch.cuda.is_current_stream_capturing():
            kept.append(x * 2)
        return x + kept[0] if kept else x + x

    hidden = run_twice(keeps, static={"x": x})
    assert kinds(hidden) == {FindingKind.HIDDEN_STATE}
    assert {f.address for f in hidden.findings} == {kept[0].data_ptr()}


def test_library_memory_is_not_a_finding(x: torch.Tensor) -> None:
    from cuda.bindings import driver

    status, address = driver.cuMemAlloc(1024)
    assert int(status) == 0
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            driver.cuMemcpyDtoDAsync(x.data_ptr(), address, 1024, torch.cuda.current_stream().cuda_stream)
        report = audit(graph, memory_of(static={"x": x}, pool=graph))
        assert report.ok, str(report)
        assert (report.counts[Owner.LIBRARY], report.counts[Owner.STATIC]) == (1, 1)
    finally:
        driver.cuMemFree(address)


def test_a_graph_of_the_recorder_borrows_its_output(x: torch.Tensor) -> None:
    recorder = CudaGraphRecorder(x.device)
    with recorder.session():
        recorder.warm_up(lambda: x * 2, lambda: None)
        graph = recorder.capture(lambda: (x * 2).softmax(0), BatchDescriptor.decode(1), lambda: None)
    try:
        assert audit(graph, memory_of(static={"x": x}, pool=graph)).ok
        report = audit(graph, memory_of(static={"x": x, "output": graph.output}, pool=graph))
        assert [(f.kind, f.region) for f in report.findings] == [(FindingKind.FREED, "output")]
    finally:
        graph.close()
        recorder.close()
    with pytest.raises(CaptureError, match="graph: the graph is closed"):
        graph.pool()
