"""A loop as the CUDA driver sees it: what it is asked for, what it refuses, and on a GPU what it does."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch

from graphrt.capture import loop as cuda_loop
from graphrt.capture import raw_graph
from graphrt.capture.graph import GraphReport
from graphrt.capture.recorder import CudaGraph
from graphrt.kernels.errors import CaptureError, ConfigError, GraphRTError, ReplayError
from graphrt.kernels.native.nvrtc import compile_variant
from tests.capture.test_loop import CPU, KEY, Countdown, Rig, ints
from tests.support.fake_driver import FAILURE, KERNEL, MEMSET, SUCCESS, TYPES, FakeDriver, Template, install

# -- what the driver is asked, on a driver that is none


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def graph_of(template: Template) -> CudaGraph:
    return CudaGraph(template, torch.ones(1), GraphReport(KEY, 0.0, 0, 0, len(template.nodes)))


def test_the_driver_is_asked_for_a_loop_and_gives_it_back(fake: FakeDriver) -> None:
    template, go_on = Template(KERNEL, [MEMSET, [KERNEL]], MEMSET), ints(CPU)
    loop = graph_of(template).loop(go_on)
    made = [name for name in fake.calls if "Get" not in name]
    assert made == [
        "cuGraphCreate", "cuGraphConditionalHandleCreate", "cuGraphAddNode", "cuGraphAddChildGraphNode",
        "cuGraphAddKernelNode", "cuGraphInstantiate", "cuGraphUpload",
    ]  # fmt: skip
    assert fake.kernel == (go_on.data_ptr(), 9)
    assert (loop.report.nodes, loop.report.driver_bytes) == (6, 0)
    fake.calls.clear()
    loop.launch()
    fake.failing = "cuGraphLaunch"
    with pytest.raises(ReplayError, match=r"CUDA driver: expected success, got .*INVALID_VALUE"):
        loop.launch()
    kept = weakref.ref(template)
    del template
    assert kept() is not None
    loop.close()
    loop.close()
    made = [name for name in fake.calls if "Get" not in name]
    assert made == ["cuGraphLaunch", "cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy"]
    assert kept() is None, "a closed loop lets go of its step"


def test_a_loop_that_is_dropped_is_freed(fake: FakeDriver) -> None:
    graph_of(Template(KERNEL)).loop(ints(CPU))
    gc.collect()
    assert fake.calls[-2:] == ["cuGraphExecDestroy", "cuGraphDestroy"]


@pytest.mark.parametrize("failing", ["cuGraphAddNode", "cuGraphAddChildGraphNode", "cuGraphInstantiate"])
def test_a_loop_that_fails_leaves_nothing(fake: FakeDriver, failing: str) -> None:
    fake.failing = failing
    with pytest.raises(CaptureError, match=r"decode\[1\]: the step cannot be looped: CUDA driver: .*INVALID_VALUE"):
        graph_of(Template(KERNEL)).loop(ints(CPU))
    assert fake.calls[-2:] == [failing, "cuGraphDestroy"]


@pytest.mark.parametrize("name", ["HOST", "EVENT_RECORD", "WAIT_EVENT", "MEM_ALLOC", "CONDITIONAL", "BATCH_MEM_OP"])
def test_nodes_that_no_loop_can_hold_are_named(fake: FakeDriver, name: str) -> None:
    refused = getattr(TYPES, f"CU_GRAPH_NODE_TYPE_{name}")
    for template in (Template(KERNEL, refused), Template(KERNEL, [MEMSET, [refused]])):
        with pytest.raises(CaptureError, match=rf"decode\[1\]: .*got {name} too; record events, call host functions"):
            graph_of(template).loop(ints(CPU))
    assert "cuGraphCreate" not in fake.calls


def test_a_missing_compiler_is_a_reason_why_a_step_cannot_be_looped(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(variant: object, index: int) -> None:
        raise ConfigError("nvrtc: NVIDIA's run-time compiler is missing")

    monkeypatch.setattr(cuda_loop, "load", missing)
    with pytest.raises(CaptureError, match="cannot be looped: nvrtc: NVIDIA's run-time compiler is missing"):
        graph_of(Template(KERNEL)).loop(ints(CPU))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles_without_a_library_of_the_device(arch: str) -> None:
    cubin, log = compile_variant(cuda_loop.GO_ON, arch)
    assert cubin.startswith(b"\x7fELF")
    assert b"cudaGraphSetConditional" in cubin, "the driver resolves it"
    assert "0 bytes spill stores" in log


def test_errors_of_the_driver_are_errors_of_graphrt() -> None:
    assert raw_graph.check((SUCCESS, 5)) == (SUCCESS, 5)
    for kind in (CaptureError, ReplayError):
        with pytest.raises(kind, match=r"CUDA driver: expected success, got .*INVALID_VALUE") as error:
            raw_graph.check((FAILURE,), kind)
        assert isinstance(error.value, GraphRTError)


# -- on a GPU alone

CUDA = torch.device("cuda", 0)


@pytest.mark.gpu
def test_a_thousand_launches_of_changing_counts() -> None:
    rig = Countdown(CUDA)
    loop = rig.loop(rig.step)
    rig.start(0)
    total = 0
    for launch in range(1000):
        count = 1 + launch * 7 % 13
        rig.go_on.fill_(count)
        loop.launch()
        total += count
    assert rig.runs.item() == total


@pytest.mark.gpu
def test_a_launch_is_in_order_with_the_stream() -> None:
    """Behind work that is slow, ahead of work that reads; on the default stream and on another one."""
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
def test_a_launch_waits_for_nothing() -> None:
    rig = Rig(CUDA)

    def step() -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        rig.go_on.sub_(1)
        return rig.go_on + 0

    loop = rig.loop(step)
    ended = torch.cuda.Event()
    for _ in range(2):
        rig.go_on.fill_(100)
        loop.launch()
        ended.record()
        assert not ended.query(), "a hundred runs of a millisecond are still to come"
        assert rig.go_on.item() == 0


@pytest.mark.gpu
def test_a_launch_leaves_generators_alone() -> None:
    rig = Countdown(CUDA)
    loop = rig.loop(rig.step)
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    rig.start(20)
    loop.launch()
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.gpu
def test_a_thread_of_its_own_can_launch() -> None:
    rig = Countdown(CUDA)
    loop = rig.loop(rig.step)
    rig.start(6)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            loop.launch()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert not errors
    assert rig.runs.item() == 6


@pytest.mark.gpu
def test_events_and_host_functions_are_refused() -> None:
    rig, event = Rig(CUDA), torch.cuda.Event(external=True)

    def with_event() -> torch.Tensor:
        rig.go_on.zero_()
        event.record()
        return rig.go_on + 0

    def with_host_function() -> torch.Tensor:
        rig.go_on.zero_()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of nothing: a function that needs no Python
        assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, free, None) == 0
        return rig.go_on + 0

    for step, name in ((with_event, "EVENT_RECORD"), (with_host_function, "HOST")):
        graph = rig.record(step)
        with pytest.raises(CaptureError, match=rf"decode\[1\]: the step cannot be looped: nodes: .*got {name} too"):
            rig.recorder.loop(graph, rig.go_on)
        graph.launch()
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_every_step_of_a_manager_can_be_looped() -> None:
    """Whatever kernels the model and its attention launch, programmatic dependent launches among them."""
    from tests.support.toy import make_rig

    rig = make_rig(CUDA, fill=0.0)
    go_on = ints(CUDA)
    graphs = list(rig.manager._graphs._graphs.values())
    assert graphs
    for graph in graphs:
        graph.launch()
        once = graph.output.clone()
        loop = rig.manager._graphs._recorder.loop(graph, go_on)
        loop.launch()
        assert torch.equal(loop.output.nan_to_num(), once.nan_to_num())
        torch.cuda.synchronize()
        loop.close()
    rig.manager.close()


@pytest.mark.gpu
def test_memory_copies_and_fills_are_repeated() -> None:
    """Nodes that are no kernels."""
    rig = Rig(CUDA)
    source, target = (
        torch.arange(4096, dtype=torch.int32, device=CUDA),
        torch.zeros(4096, dtype=torch.int32, device=CUDA),
    )

    def step() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        raw_graph.check(raw_graph.driver.cuMemsetD32Async(target.data_ptr(), 1, 4096, stream))
        source.add_(target)
        raw_graph.check(raw_graph.driver.cuMemcpyDtoDAsync(target.data_ptr(), source.data_ptr(), 4 * 4096, stream))
        rig.go_on.sub_(1)
        return target.sum().reshape(1)

    loop = rig.loop(step)
    source.copy_(torch.arange(4096))
    rig.go_on.fill_(12)
    loop.launch()
    assert torch.equal(target.cpu(), torch.arange(4096, dtype=torch.int32) + 12)
    assert loop.output.item() == 4096 * 4095 // 2 + 12 * 4096


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_is_given_back() -> None:
    """By closing, and by dropping. The driver keeps some of what the first loops took, for the next ones."""
    x = torch.zeros(1024, device=CUDA)

    class Long(Rig):
        def step(self) -> torch.Tensor:
            for _ in range(300):
                x.add_(1)
            self.go_on.sub_(1)
            return x * 2

    rig = Long(CUDA)
    graph = rig.record(rig.step)

    def free_after(rounds: int, close: bool) -> int:
        for _ in range(rounds):
            loops = [rig.recorder.loop(graph, rig.go_on) for _ in range(4)]
            for loop in loops:
                rig.go_on.fill_(2)
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
        assert free_after(25, close) >= warm - (4 << 20), "a hundred loops, and no megabytes of them"


@pytest.mark.gpu
@pytest.mark.alone
def test_the_pool_lives_as_long_as_a_loop() -> None:
    rig = Rig(CUDA)
    x = torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA)

    def step() -> torch.Tensor:
        rig.go_on.sub_(1)
        return x + 1  # 64 MiB of the pool

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(CUDA)

    before = reserved()
    graph = rig.record(step)
    loop = rig.recorder.loop(graph, rig.go_on)
    assert loop.pool() == graph.pool()
    graph.close()
    assert reserved() >= before + (64 << 20)
    x.fill_(6)
    rig.go_on.fill_(3)
    loop.launch()
    assert (loop.output == 7).all()
    loop.close()
    del graph, loop
    assert reserved() <= before + (4 << 20)
