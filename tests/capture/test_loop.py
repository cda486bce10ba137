"""Loops: one launch repeats an op trace on a CPU, and a captured step in a WHILE node on CUDA."""

from __future__ import annotations

import gc

import pytest
import torch

from graphrt.capture import op_trace
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels.errors import CaptureError, ReplayError, ShapeError
from graphrt.kernels.ops.norm import add_rms_norm
from tests.support.capture_rig import CPU, KEY, Countdown, Rig, ints


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.param == "cuda" else CPU


# -- how often a step runs


def test_a_step_runs_while_the_condition_holds(device: torch.device) -> None:
    rig = Countdown(device)
    loop = rig.loop(rig.step)
    for count in (1, 2, 3, 17, 1, 250, 2):
        rig.start(count)
        loop.launch()
        assert rig.runs.item() == count
        assert loop.output.tolist() == [10 * count], "the output of the last run"


def test_every_value_but_zero_continues(device: torch.device) -> None:
    """The value before the launch is ignored."""
    values = ints(device, 1, -1, 2, 1 << 16, 1 << 30, -(1 << 31), 0, 7)
    rig, at = Rig(device), torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> torch.Tensor:
        rig.condition.copy_(values[at])
        at.add_(1)
        return at + 0

    loop = rig.loop(step)
    for before in (0, 1, -1):
        rig.condition.fill_(before)
        at.zero_()
        loop.launch()
        assert at.item() == 7, "up to the first 0"


def test_only_the_last_value_of_a_run_decides(device: torch.device) -> None:
    """A step may read the condition, and write it several times."""
    rig, left, seen = Rig(device), ints(device), ints(device)

    def step() -> torch.Tensor:
        rig.condition.zero_()
        seen.add_(rig.condition)
        rig.condition.fill_(1)
        seen.add_(rig.condition)
        left.sub_(1)
        rig.condition.copy_(left > 0)
        return seen + 0

    loop = rig.loop(step)
    for count in (1, 6):
        left.fill_(count)
        seen.zero_()
        loop.launch()
        assert (left.item(), seen.item()) == (0, count)


# -- compared with single launches


class Layered(Rig):
    """A step with a matrix product, a graphrt kernel, and state that it updates in place."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        rng = torch.Generator().manual_seed(0)
        self.hidden, self.residual, weight, self.norm = (
            torch.randn(shape, generator=rng).to(device) for shape in ((3, 64), (3, 64), (64, 64), (64,))
        )
        self.weight = weight / 8
        self.trace = torch.zeros(64, 3, 64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.first = (self.hidden.clone(), self.residual.clone())

    def step(self) -> torch.Tensor:
        normed = add_rms_norm(self.residual, self.hidden @ self.weight, self.norm, 1e-5)
        self.hidden.copy_(torch.tanh(normed))
        self.trace.index_copy_(0, self.at, self.hidden[None])
        self.at.add_(1)
        self.condition.sub_(1)
        return self.hidden * 2

    def start(self, count: int) -> None:
        self.hidden.copy_(self.first[0])
        self.residual.copy_(self.first[1])
        self.trace.zero_()
        self.at.zero_()
        self.condition.fill_(count)

    def state(self) -> list[torch.Tensor]:
        return [t.clone() for t in (self.hidden, self.residual, self.trace, self.at, self.condition)]


def test_a_loop_equals_single_launches(device: torch.device) -> None:
    rig = Layered(device)
    graph = rig.capture(rig.step)
    loop = rig.recorder.loop(graph, rig.condition)
    for count in (1, 5, 40, 5):
        rig.start(count)
        for _ in range(count):
            graph.launch()
        expected = [*rig.state(), graph.output.clone()]
        rig.start(count)
        loop.launch()
        for have, want in zip([*rig.state(), loop.output], expected, strict=True):
            assert torch.equal(have, want)
        # The same recurrence in float64, without graphs.
        hidden, residual = (t.double() for t in rig.first)
        for run in range(count):
            residual = residual + hidden @ rig.weight.double()
            normed = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-5) * rig.norm.double()
            hidden = torch.tanh(normed)
            if run < 5:  # rounding errors grow from run to run
                torch.testing.assert_close(rig.trace[run].double(), hidden, rtol=0, atol=5e-3)
        assert rig.trace[count:].count_nonzero() == 0


def test_loops_of_several_sizes_share_a_pool(device: torch.device) -> None:
    rig, sizes = Rig(device), (512, 64, 8)
    x, runs = torch.zeros(512, device=device), ints(device)

    def step(size: int) -> torch.Tensor:
        y = x[:size] * 2  # an intermediate, in memory that the graphs share
        x[:size].copy_(y + 1)
        runs.add_(1)
        rig.condition.sub_(1)
        return x[:size].sum().reshape(1)

    graphs = [rig.capture(lambda size=size: step(size)) for size in sizes]
    loops = [rig.recorder.loop(graph, rig.condition) for graph in graphs]
    for index, count in ((0, 3), (2, 5), (1, 2), (2, 1), (0, 4)):
        x.zero_()
        runs.zero_()
        rig.condition.fill_(count)
        loops[index].launch()
        assert runs.item() == count
        assert loops[index].output.item() == sizes[index] * (2**count - 1)
        assert x[sizes[index] :].count_nonzero() == 0


def test_a_report_has_the_cost_of_the_loop_only(device: torch.device) -> None:
    rig = Countdown(device)
    graph = rig.capture(rig.step)
    report = rig.recorder.loop(graph, rig.condition).report
    assert report.descriptor == KEY
    assert report.pool_bytes == 0, "a loop shares the memory of its step"
    assert report.nodes - graph.report.nodes == (3 if device.type == "cuda" else 0)
    assert 0 < report.seconds < 60


# -- lifetimes and errors


def test_a_loop_outlives_its_step(device: torch.device) -> None:
    rig = Countdown(device)
    graph = rig.capture(rig.step)
    loop = rig.recorder.loop(graph, rig.condition)
    graph.close()
    del graph
    gc.collect()
    others = [torch.full((64,), 7.0, device=device) for _ in range(8)]
    rig.start(3)
    loop.launch()
    assert (rig.runs.item(), loop.output.item()) == (3, 30)
    assert all((other == 7).all() for other in others)
    loop.close()


def test_a_step_is_launched_between_loops_and_after_they_are_closed(device: torch.device) -> None:
    rig = Countdown(device)
    graph = rig.capture(rig.step)
    loops = [rig.recorder.loop(graph, rig.condition) for _ in range(2)]
    rig.start(4)
    for one, runs in ((loops[0], 4), (graph, 5), (graph, 6)):
        one.launch()
        assert rig.runs.item() == runs
    loops[0].close()
    rig.condition.fill_(3)
    for one, runs in ((loops[1], 9), (graph, 10)):
        one.launch()
        assert rig.runs.item() == runs
    loops[1].close()
    graph.launch()
    assert rig.runs.item() == 11


def test_closed_loops_and_graphs_raise(device: torch.device) -> None:
    """As other values do."""
    rig = Countdown(device)
    graph = rig.capture(rig.step)
    loop = rig.recorder.loop(graph, rig.condition)
    for wrong in (loop, None, rig.step):
        with pytest.raises(CaptureError, match=r"graph: expected (OpTrace|CudaGraph), got"):
            rig.recorder.loop(wrong, rig.condition)
    loop.close()
    loop.close()
    rig.start(3)
    with pytest.raises(CaptureError, match=r"loop: launch\(\) on a closed loop"):
        loop.launch()
    assert rig.runs.item() == 0
    assert loop.output.numel() == 0
    graph.close()
    with pytest.raises(CaptureError, match="graph: the graph is closed; capture the step"):
        rig.recorder.loop(graph, rig.condition)


WRONG_CONDITIONS = {
    "dtype": (lambda d: torch.zeros(1, dtype=torch.int64, device=d), "expected dtype int32, got int64"),
    "two": (lambda d: ints(d, 0, 0), r"expected shape \[1\], got \[2\]"),
    "meta": (lambda d: ints(torch.device("meta")), "expected device"),
    "number": (lambda d: 1, "expected a torch.Tensor, got int"),
}


@pytest.mark.parametrize("case", WRONG_CONDITIONS)
def test_a_condition_of_another_shape_dtype_or_device_raises(device: torch.device, case: str) -> None:
    rig = Countdown(device)
    make, text = WRONG_CONDITIONS[case]
    with pytest.raises(ShapeError, match=f"condition: {text}"):
        rig.recorder.loop(rig.capture(rig.step), make(device))


# -- on a CPU only


def test_an_endless_loop_on_a_cpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert op_trace.MAX_RUNS == 1 << 20
    monkeypatch.setattr(op_trace, "MAX_RUNS", 50)
    rig = Countdown(CPU)
    loop = rig.loop(rig.step)
    rig.start(50)
    loop.launch()
    assert rig.runs.item() == 50, "the bound is inclusive"
    rig.start(51)
    with pytest.raises(ReplayError, match="condition: expected 0 after at most 50 runs, got 1; count the runs"):
        loop.launch()
    rig.start(2)
    loop.launch()
    assert rig.runs.item() == 2, "the loop stays usable"


def test_a_loop_on_a_cpu_keeps_the_memory_of_its_condition() -> None:
    """Like a CUDA graph, it ignores new data assigned to the caller's tensor."""
    rig = Countdown(CPU)
    alias = rig.condition.detach()
    loop = OpTraceRecorder().loop(rig.capture(rig.step), rig.condition)
    rig.start(3)
    rig.condition.data = ints(CPU, 7)
    loop.launch()
    assert (alias.item(), rig.runs.item()) == (0, 3), "step and loop use the memory of the capture"
    assert rig.condition.item() == 7
