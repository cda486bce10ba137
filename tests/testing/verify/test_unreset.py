"""What persists between runs: unnamed tensors that are never reset, and steps that do not repeat."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify import verify
from tests.support.verify_examples import Copies, rows, silu

SIZES = (8, 3, 5, 8)


def counted(case: int, sizes: tuple[int, ...] = SIZES) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(case)
    return {"x": torch.randn(sizes[case], 16, generator=rng), "n": torch.tensor([sizes[case]])}


def total(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def skipping(injected: bool) -> Callable[..., torch.Tensor]:
    """Return a step that skips pad rows. Without the bug it zeroes the pad rows of the tensor that it writes to."""
    out = torch.zeros(8, 16)

    def step(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        live = torch.arange(len(x))[:, None] < n
        out[: len(x)].copy_(torch.where(live, x, out[: len(x)] if injected else 0.0))
        if not injected:
            out[len(x) :] = 0
        return out.sum(0)

    return step


@pytest.mark.parametrize("eager", [total, None], ids=["oracle", "no oracle"])
@pytest.mark.parametrize("sizes", [SIZES, (3, 8), (2, 4, 8), (4, 4, 6, 4)], ids=str)
def test_rows_of_a_larger_case_in_an_unnamed_tensor(sizes: tuple[int, ...], eager: Callable[..., Any] | None) -> None:
    make = lambda case: counted(case, sizes)  # noqa: E731
    report = verify(skipping(True), make, cases=len(sizes), eager=eager)
    assert report.blamed == ("out",), report
    (finding,) = report.findings
    assert finding.check == "determinism"
    assert finding.difference is not None
    assert f":{max(sizes)}] still contains values of earlier runs" in finding.because
    assert "name the tensor in state" in finding.because
    clean = verify(skipping(False), make, cases=len(sizes), eager=eager)
    assert clean.ok, clean


def test_a_tensor_that_only_a_middle_case_writes() -> None:
    class Middle(Copies):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(6)

        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs)
            self.writes = len(inputs["x"]) == 2

        def run(self) -> torch.Tensor:
            if self.writes:
                self.kept += self.buffers["x"].sum(0)
            return silu(self.buffers["x"]) + self.kept

    assert "self.kept" in verify(Middle(), rows).blamed


def test_a_workspace_that_no_result_depends_on_is_silent() -> None:
    """A workspace keeps what larger cases wrote, and a counter is 0 again at the end of the step."""
    space, arrived = torch.zeros(8, 16), torch.zeros(1)

    def step(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        space[: len(x)].copy_(x)
        arrived.add_(1)
        first = space[: len(x)] * arrived
        arrived.zero_()
        return first

    report = verify(step, counted, pad={"x": 0})
    assert report.ok, report
    assert "space" in report.not_checked["unnamed state"]


def test_named_state_may_persist() -> None:
    sums = torch.zeros(16)

    def step(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        sums.add_(x.sum(0))
        return sums + 0

    assert verify(step, counted, pad={"x": 0}).blamed == ("sums",)
    report = verify(step, counted, pad={"x": 0}, state={"sums": sums})
    assert report.ok, report
    assert torch.equal(sums, torch.zeros(16))
    assert "sums" in report.not_checked["zeros"]


# -- an oracle that returns nothing

SILENT = {"None": lambda x: None, "{}": lambda x: {}}


@pytest.mark.parametrize("name", SILENT)
def test_an_oracle_that_returns_nothing_raises(name: str) -> None:
    with pytest.raises(ConfigError, match="eager: the oracle returned nothing"):
        verify(silu, rows, eager=SILENT[name])


# -- steps that do not repeat

TICKS = itertools.count()
UNREPEATED = {
    "clock": lambda x: x * (time.perf_counter_ns() // 1000 % 97),
    "iterator": lambda x: x + next(TICKS),
    "every other run": lambda x: x + next(TICKS) % 2,
}


@pytest.mark.parametrize("name", UNREPEATED)
@pytest.mark.parametrize("eager", [None, lambda x: x], ids=["own", "oracle"])
def test_a_step_that_does_not_repeat_has_one_finding_without_a_cause(
    name: str, eager: Callable[..., Any] | None
) -> None:
    report = verify(UNREPEATED[name], rows, eager=eager)
    (finding,) = report.findings
    assert (finding.check, finding.blamed) == ("determinism", ())
    assert "the step is not deterministic" in finding.text
    assert "not deterministic" in report.not_checked["graph"]
    assert not {"graph", "padding", "history"} & set(report.checked)


def test_a_count_of_refresh_is_blamed() -> None:
    runner = SimpleNamespace(buffers={"x": torch.zeros(5, 6)}, count=0)

    def refresh(inputs: dict[str, Any]) -> None:
        runner.buffers["x"].zero_()
        runner.buffers["x"][: len(inputs["x"])] = inputs["x"]
        runner.count += 1

    runner.refresh, runner.run = refresh, lambda: runner.buffers["x"] + runner.count
    assert "self.count" in verify(runner, rows).blamed
