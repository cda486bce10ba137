"""Loops and the CUDA driver: calls and errors with a fake driver, and behaviour on a GPU."""

from __future__ import annotations

import ctypes
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from graphrt.capture import loop as cuda_loop
from graphrt.capture import raw_graph
from graphrt.capture.graph import GraphReport
from graphrt.capture.recorder import CudaGraph
from graphrt.kernels.errors import CaptureError, ConfigError, ReplayError
from graphrt.kernels.native.nvrtc import compile_variant
from tests.support.capture_rig import CPU, KEY, Countdown, Rig, ints
from tests.support.fake_driver import KERNEL, MEMSET, TYPES, FakeDriver, Template, install

# -- calls, with a fake driver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def graph_of(template: Template) -> CudaGraph:
    return CudaGraph(template, torch.ones(1), GraphReport(KEY, 0.0, 0, 0, len(template.nodes)))


def test_driver_calls_of_a_loop_from_construction_to_close(fake: FakeDriver) -> None:
    template, condition = Template(KERNEL, [MEMSET, [KERNEL]], MEMSET), ints(CPU)
    loop = graph_of(template).loop(condition)
    made = [name for name in fake.calls if "Get" not in name]
    assert made == [
        "cuGraphCreate", "cuGraphConditionalHandleCreate", "cuGraphAddNode", "cuGraphAddChildGraphNode",
        "cuGraphAddKernelNode", "cuGraphInstantiate", "cuGraphUpload",
    ]  # fmt: skip
    assert fake.kernel == (condition.data_ptr(), 9)
    assert (loop.report.nodes, loop.report.driver_bytes) == (6, 0)
    fake.calls.clear()
    loop.launch()
    fake.failing = "cuGraphLaunch"
    with pytest.raises(ReplayError, match=r"CUDA: a call returned CUDA_ERROR_INVALID_VALUE"):
        loop.launch()
    kept = weakref.ref(template)
    del template
    assert kept() is not None
    loop.close()
    loop.close()
    made = [name for name in fake.calls if "Get" not in name]
    assert made == ["cuGraphLaunch", "cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy"]
    assert kept() is None, "a closed loop releases its step"
    graph_of(Template(KERNEL)).loop(ints(CPU))
    gc.collect()
    assert fake.calls[-2:] == ["cuGraphExecDestroy", "cuGraphDestroy"], "so does a dropped one"


@pytest.mark.parametrize("failing", ["cuGraphAddNode", "cuGraphAddChildGraphNode", "cuGraphInstantiate"])
def test_a_failed_construction_frees_the_graph(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    fake.failing = failing
    with pytest.raises(CaptureError, match=r"decode\[1\]: the step cannot be looped: CUDA: .*INVALID_VALUE"):
        graph_of(Template(KERNEL)).loop(ints(CPU))
    assert fake.calls[-2:] == [failing, "cuGraphDestroy"]
    missing = mock.Mock(side_effect=ConfigError("nvrtc: NVIDIA's run-time compiler is missing"))
    monkeypatch.setattr(cuda_loop, "load", missing)
    with pytest.raises(CaptureError, match="cannot be looped: nvrtc: NVIDIA's run-time compiler is missing"):
        graph_of(Template(KERNEL)).loop(ints(CPU))


@pytest.mark.parametrize("name", ["HOST", "EVENT_RECORD", "WAIT_EVENT", "MEM_ALLOC", "CONDITIONAL", "BATCH_MEM_OP"])
def test_unsupported_nodes_are_named(fake: FakeDriver, name: str) -> None:
    refused = getattr(TYPES, f"CU_GRAPH_NODE_TYPE_{name}")
    for template in (Template(KERNEL, refused), Template(KERNEL, [MEMSET, [refused]])):
        with pytest.raises(CaptureError, match=rf"decode\[1\]: .*got {name}; record events, call host functions"):
            graph_of(template).loop(ints(CPU))
    assert "cuGraphCreate" not in fake.calls


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_loop_kernel_compiles_without_the_device_runtime_library(arch: str) -> None:
    cubin, log = compile_variant(cuda_loop.LOOP_CONDITION, arch)
    assert cubin.startswith(b"\x7fELF")
    assert b"cudaGraphSetConditional" in cubin, "the driver resolves it"
    assert "0 bytes spill stores" in log


# -- on a GPU only

CUDA = torch.device("cuda", 0)


@pytest.mark.gpu
def test_a_launch_is_ordered_in_its_stream() -> None:
    """After slow work and before reads, on the default stream and on another one."""
    rig = Countdown(CUDA)
    loop = rig.loop(rig.step)
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            for count in (5, 9):
                torch.cuda._sleep(20_000_000)
                rig.start(count)
                loop.launch()
                seen = rig.runs * 2
                rig.runs.fill_(-1)
                assert seen.item() == 2 * count
        stream.synchronize()


@pytest.mark.gpu
def test_a_launch_does_not_synchronize() -> None:
    rig = Rig(CUDA)

    def step() -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        rig.condition.sub_(1)
        return rig.condition + 0

    loop = rig.loop(step)
    ended = torch.cuda.Event()
    for _ in range(2):
        rig.condition.fill_(100)
        loop.launch()
        ended.record()
        assert not ended.query(), "a hundred runs of a millisecond are pending"
        assert rig.condition.item() == 0


@pytest.mark.gpu
def test_another_thread_can_launch_and_generators_do_not_change() -> None:
    rig = Countdown(CUDA)
    loop = rig.loop(rig.step)
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    rig.start(6)
    torch.cuda.synchronize()
    with ThreadPoolExecutor() as threads:
        threads.submit(loop.launch).result()
    assert rig.runs.item() == 6
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.gpu
def test_events_and_host_functions_raise() -> None:
    rig, event = Rig(CUDA), torch.cuda.Event(external=True)

    def with_event() -> torch.Tensor:
        rig.condition.zero_()
        event.record()
        return rig.condition + 0

    def with_host_function() -> torch.Tensor:
        rig.condition.zero_()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL): a host function without Python
        assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, free, None) == 0
        return rig.condition + 0

    for step, name in ((with_event, "EVENT_RECORD"), (with_host_function, "HOST")):
        graph = rig.capture(step)
        with pytest.raises(CaptureError, match=rf"decode\[1\]: the step cannot be looped: nodes: .*got {name};"):
            rig.recorder.loop(graph, rig.condition)
        graph.launch()
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_every_step_of_a_manager_can_be_looped() -> None:
    """Including programmatic dependent launches of the attention kernels."""
    from tests.support.toy import make_rig

    rig = make_rig(CUDA, fill=0.0)
    condition = ints(CUDA)
    graphs = list(rig.manager._graphs._graphs.values())
    assert graphs
    for graph in graphs:
        graph.launch()
        once = graph.output.clone()
        loop = rig.manager._graphs._recorder.loop(graph, condition)
        loop.launch()
        assert torch.equal(loop.output.nan_to_num(), once.nan_to_num())
        torch.cuda.synchronize()
        loop.close()
    rig.manager.close()


@pytest.mark.gpu
def test_memory_copies_and_fills_are_repeated() -> None:
    """Nodes other than kernels."""
    rig = Rig(CUDA)
    source, target = torch.arange(4096, dtype=torch.int32, device=CUDA), ints(CUDA, *[0] * 4096)

    def step() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        raw_graph.check(raw_graph.driver.cuMemsetD32Async(target.data_ptr(), 1, 4096, stream))
        source.add_(target)
        raw_graph.check(raw_graph.driver.cuMemcpyDtoDAsync(target.data_ptr(), source.data_ptr(), 4 * 4096, stream))
        rig.condition.sub_(1)
        return target.sum().reshape(1)

    loop = rig.loop(step)
    source.copy_(torch.arange(4096))
    rig.condition.fill_(12)
    loop.launch()
    assert torch.equal(target.cpu(), torch.arange(4096, dtype=torch.int32) + 12)
    assert loop.output.item() == 4096 * 4095 // 2 + 12 * 4096


@pytest.mark.gpu
@pytest.mark.alone
def test_driver_memory_is_freed() -> None:
    """By close(), and by dropping loops. The driver caches some memory of the first loops."""
    x = torch.zeros(1024, device=CUDA)

    class Long(Rig):
        def step(self) -> torch.Tensor:
            for _ in range(300):
                x.add_(1)
            self.condition.sub_(1)
            return x * 2

    rig = Long(CUDA)
    graph = rig.capture(rig.step)

    def free_after(rounds: int, close: bool) -> int:
        for _ in range(rounds):
            loops = [rig.recorder.loop(graph, rig.condition) for _ in range(4)]
            for loop in loops:
                rig.condition.fill_(2)
                loop.launch()
            torch.cuda.synchronize()
            if close:
                for loop in loops:
                    loop.close()
            del loop, loops
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(CUDA)[0]

    warm = free_after(3, True)
    for close in (True, False):
        assert free_after(25, close) >= warm - (4 << 20), "a hundred loops keep no megabytes"


@pytest.mark.gpu
@pytest.mark.alone
def test_a_loop_keeps_the_pool_alive() -> None:
    rig = Rig(CUDA)
    x = torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA)

    def step() -> torch.Tensor:
        rig.condition.sub_(1)
        return x + 1  # 64 MiB of the pool

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(CUDA)

    before = reserved()
    graph = rig.capture(step)
    loop = rig.recorder.loop(graph, rig.condition)
    assert loop.pool() == graph.pool()
    graph.close()
    assert reserved() >= before + (64 << 20)
    x.fill_(6)
    rig.condition.fill_(3)
    loop.launch()
    assert (loop.output == 7).all()
    loop.close()
    del graph, loop
    assert reserved() <= before + (4 << 20)
