"""Launches, events and failed captures: with a fake driver, and on a GPU."""

from __future__ import annotations

import threading
import types
import warnings

import pytest
import torch

from graphrt.capture import raw_graph, recorder
from graphrt.capture.graph import GraphReport
from graphrt.capture.recorder import CudaGraph
from graphrt.kernels.errors import ReplayError
from tests.support.capture_rig import KEY, Countdown, Rig
from tests.support.fake_driver import KERNEL, FakeDriver, Template, install

CUDA = torch.device("cuda", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


class Generator:
    """Stands for torch's generator; a step draws `draws` numbers."""

    def __init__(self, draws: int) -> None:
        self.offset, self.draws = 0, draws

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.offset])


class Captured(Template):
    """A graph that torch can launch."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(KERNEL)
        self.generator, self.replays = generator, 0

    def replay(self) -> None:
        self.replays += 1
        self.generator.offset += self.generator.draws

    def raw_cuda_graph_exec(self) -> int:
        return 5


@pytest.mark.parametrize("draws", [0, 4])
def test_torch_launches_only_steps_that_draw_from_its_generator(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, draws: int
) -> None:
    generator = Generator(draws)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(1), generator))
    template = Captured(generator)
    graph = CudaGraph(template, types.SimpleNamespace(device=torch.device("cuda", 1)), GraphReport(KEY, 0.0, 0, 0, 1))
    for _ in range(3):
        graph.launch()
    assert template.replays == (3 if draws else 1)
    assert fake.calls.count("cuGraphLaunch") == 3 - template.replays
    fake.failing = "cuGraphLaunch"
    if not draws:
        with pytest.raises(ReplayError, match=r"CUDA: a call returned CUDA_ERROR_INVALID_VALUE"):
            graph.launch()
    graph.close()
    with pytest.raises(AssertionError, match="closed graph"):
        graph.launch()


def test_a_launch_switches_to_the_device_of_the_graph(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(raw_graph, "ensure_context", asked.append)
    launcher = raw_graph.Launcher(5, torch.device("cuda", 1))
    assert asked == [1]
    launcher.launch()
    assert asked == [1], "the thread's context is the device's"
    launcher._context = 8
    launcher.launch()
    assert asked == [1, 1]
    assert [name for name in fake.calls if "Get" not in name] == ["cuGraphLaunch", "cuGraphLaunch"]


def test_the_driver_records_an_event_after_torch_created_it(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    made = types.SimpleNamespace(record=recorded.append, cuda_event=77, query=lambda: True, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: made)
    event, stream = raw_graph.LaunchEvent(), types.SimpleNamespace(cuda_stream=3)
    for _ in range(3):
        event.record(stream)
    assert recorded == [stream]
    assert fake.calls == ["cuEventRecord"] * 2
    event.record(None)
    assert recorded == [stream, None], "torch looks up the current stream"
    assert event.query()
    fake.failing = "cuEventRecord"
    with pytest.raises(ReplayError, match=r"CUDA: a call returned CUDA_ERROR_INVALID_VALUE"):
        event.record(stream)


class Invalidated:
    """torch.cuda.CUDAGraph before 2.12, whose first capture fails: the generator stays in capture mode."""

    capturing, begun = False, 0

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        Invalidated.capturing = True
        Invalidated.begun += 1

    def capture_end(self) -> None:
        if Invalidated.begun == 1:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        warnings.warn("The CUDA Graph is empty", UserWarning, stacklevel=2)
        Invalidated.capturing = False


@pytest.mark.filterwarnings("error")
def test_the_generator_can_draw_after_an_invalidated_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Invalidated)
    monkeypatch.setattr(recorder, "check_capture_allocator", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    pools, ended = iter((0, number) for number in range(1, 9)), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: ended.append(of), raising=False)
    monkeypatch.setitem(recorder._idle_streams, CUDA, [object()])
    made = recorder.CudaGraphRecorder(CUDA)

    def step() -> torch.Tensor:
        raise LookupError("in the step")

    with pytest.raises(LookupError, match="in the step"):
        made._capture(step)
    assert ended == [(0, (0, 2))], "the pool of the failed graph"
    assert (made._pool, Invalidated.begun, Invalidated.capturing) == ((0, 3), 2, False)


class Interrupted:
    """A CUDAGraph during whose calls a signal handler may raise. Only a capture that is open can be ended."""

    is_open, at, allocates = False, "", False

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        Interrupted.is_open = Interrupted.allocates = True
        self.handle_signal("begin")

    def capture_end(self) -> None:
        if not self.is_open:
            raise RuntimeError("CUDA error: operation not permitted when stream is not capturing")
        Interrupted.is_open = Interrupted.allocates = False
        self.handle_signal("end")

    @classmethod
    def handle_signal(cls, where: str) -> None:
        at, cls.at = cls.at, "" if cls.at == where else cls.at
        if at == where:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["begin", "step", "end"])
def test_an_interrupted_capture_is_ended(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def end_allocation(*of: object) -> None:
        if not Interrupted.allocates:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        Interrupted.allocates = False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Interrupted)
    monkeypatch.setattr(recorder, "check_capture_allocator", lambda device: None)
    monkeypatch.setattr(recorder, "_borrow", lambda output: output)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
    monkeypatch.setitem(recorder._idle_streams, CUDA, [object()])
    made, output = recorder.CudaGraphRecorder(CUDA), torch.ones(1)

    def step() -> torch.Tensor:
        Interrupted.handle_signal("step")
        return output

    Interrupted.at = at
    with pytest.raises(KeyboardInterrupt):
        made._capture(step)
    assert (Interrupted.is_open, Interrupted.allocates) == (False, False)
    assert made._capture(step)[1] is output


# -- on a GPU only


@pytest.mark.gpu
def test_every_recorder_has_a_capture_stream_of_its_own() -> None:
    """Streams of torch repeat after 32, and a shared stream means a shared cuBLAS workspace."""
    recorders = [recorder.make_recorder(CUDA) for _ in range(40)]
    try:
        own = {one.streams[0].cuda_stream for one in recorders}
        assert len(own) == 40
        assert own.isdisjoint(torch.cuda.Stream().cuda_stream for _ in range(40))
    finally:
        for one in recorders:
            one.close()


@pytest.mark.gpu
def test_a_step_that_draws_and_synchronizes_in_its_first_run_is_captured() -> None:
    """The synchronization invalidates the first capture. The second one follows a warm-up that draws."""
    rig, numbers, waits = Rig(CUDA), torch.zeros(64, device=CUDA), [True]

    def step() -> torch.Tensor:
        if waits and torch.cuda.is_current_stream_capturing():
            waits.clear()
            numbers.sum().item()
        return numbers.uniform_()

    rig.capture(step).launch()
    assert len(set(numbers.tolist())) > 1
    assert torch.rand(4, device=CUDA).max() < 1


@pytest.mark.gpu
def test_a_recorder_can_capture_after_all_its_graphs_are_closed() -> None:
    """torch frees a memory pool with its last graph, and cannot capture into it again."""
    rig, numbers = Rig(CUDA), torch.ones(64, device=CUDA)
    for _ in range(3):
        graphs = [rig.capture(lambda: numbers * 2) for _ in range(2)]
        for graph in graphs:
            graph.launch()
            assert graph.output.sum().item() == 128
            graph.close()
        assert rig.recorder.pool_bytes() > 0


@pytest.mark.gpu
def test_launches_by_torch_and_by_the_driver_are_ordered() -> None:
    """torch makes the first launch. On the default stream and another one, in this thread and in a new one."""
    rig = Countdown(CUDA)
    graph = rig.capture(rig.step)
    rig.start(0)
    torch.cuda.synchronize()
    seen: list[torch.Tensor] = []

    def launch() -> None:
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    torch.cuda._sleep(5_000_000)
                    graph.launch()
                    seen.append(rig.runs.clone())
            stream.synchronize()

    launch()
    assert graph._launcher is not None
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert [int(runs) for runs in seen] == list(range(1, 13))


@pytest.mark.gpu
def test_a_step_draws_new_numbers_from_torch_in_every_launch() -> None:
    rig, numbers = Rig(CUDA), torch.zeros(64, device=CUDA)
    graph = rig.capture(lambda: numbers.uniform_())
    seen = []
    for _ in range(4):
        graph.launch()
        seen.append(tuple(numbers.tolist()))
    assert len(set(seen)) == 4
    torch.cuda.manual_seed(5)
    graph.launch()
    again = numbers.tolist()
    torch.cuda.manual_seed(5)
    graph.launch()
    assert numbers.tolist() == again


@pytest.mark.gpu
def test_another_thread_may_draw_during_captures_from_torch_2_12_on() -> None:
    """torch 2.11 puts the device's generator into capture mode for all threads, so the other thread's draw fails."""
    rig, numbers = Rig(CUDA), torch.zeros(64, device=CUDA)
    stop, errors = threading.Event(), list[str]()

    def draw() -> None:
        own = torch.empty(64, device=CUDA)
        while not stop.is_set():
            try:
                own.uniform_()
            except RuntimeError as error:
                errors.append(str(error))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        graphs = [rig.capture(lambda: numbers.add_(1)) for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    numbers.zero_()
    for graph in graphs:
        graph.launch()
    assert numbers.tolist() == [50.0] * 64, "the captures are not affected"
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 12):
        assert not errors
    assert all("Offset increment outside graph capture" in error for error in errors)
    assert torch.rand(4, device=CUDA).max() < 1
