"""What an earlier case left on the device, what an oracle must give, and steps that do not repeat."""

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
from tests.verify_examples import Copies, rows, silu

SIZES = (8, 3, 5, 8)


def counted(case: int, sizes: tuple[int, ...] = SIZES) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(case)
    return {"x": torch.randn(sizes[case], 16, generator=rng), "n": torch.tensor([sizes[case]])}


def total(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def skipping(planted: bool) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """A kernel that skips pad rows, and the tensor that it writes to; without the bug it zeroes them."""
    out = torch.zeros(8, 16)

    def step(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        live = torch.arange(len(x))[:, None] < n
        out[: len(x)].copy_(torch.where(live, x, out[: len(x)] if planted else 0.0))
        if not planted:
            out[len(x) :] = 0
        return out.sum(0)

    return out, step


# -- tensors that nobody named


@pytest.mark.parametrize("eager", [total, None], ids=["oracle", "no oracle"])
@pytest.mark.parametrize("sizes", [SIZES, (3, 8), (2, 4, 8), (4, 4, 6, 4)], ids=str)
def test_rows_of_a_larger_case_in_a_tensor_that_nobody_named(
    sizes: tuple[int, ...], eager: Callable[..., Any] | None
) -> None:
    make = lambda case: counted(case, sizes)  # noqa: E731
    report = verify(skipping(True)[1], make, cases=len(sizes), eager=eager)
    assert report.blamed == ("out",), report
    (finding,) = report.findings
    assert finding.check == "determinism"
    assert finding.difference is not None
    assert "name it in state" in finding.because
    clean = verify(skipping(False)[1], make, cases=len(sizes), eager=eager)
    assert clean.ok, clean


def test_the_stale_rows_are_said() -> None:
    assert "out[3:8] still holds what runs before left there" in str(verify(skipping(True)[1], counted, eager=total))


class Scratch:
    """A runner with a tensor of its own, into which live rows alone are written."""

    def __init__(self, planted: bool, by_index: bool) -> None:
        self.buffers = {"x": torch.zeros(8, 16), "rows": torch.full((8,), 8)}
        self.out = torch.zeros(9, 16)  # the last row takes what pad rows write
        self.planted, self.by_index = planted, by_index

    def refresh(self, inputs: dict[str, Any]) -> None:
        n = len(inputs["x"])
        self.buffers["x"].zero_()
        self.buffers["x"][:n] = inputs["x"]
        self.buffers["rows"].fill_(8)
        self.buffers["rows"][:n] = torch.arange(n)

    def run(self) -> torch.Tensor:
        if not self.planted:
            self.out.zero_()
        if self.by_index:
            self.out.index_copy_(0, self.buffers["rows"], self.buffers["x"])
        else:
            self.out[self.buffers["rows"]] = self.buffers["x"]
        return self.out[:8].abs().amax(0)

    def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["x"].abs().amax(0)


@pytest.mark.parametrize("by_index", [False, True])
def test_rows_of_a_larger_case_in_a_runner(by_index: bool) -> None:
    assert verify(Scratch(True, by_index), counted).blamed == ("self.out",)
    clean = verify(Scratch(False, by_index), counted)
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


def test_scratch_whose_rest_no_result_depends_on_is_silent() -> None:
    """A workspace keeps what larger cases wrote, a counter is back at 0 when the step ends."""
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


# -- state, which goes on by right


def test_state_that_reaches_the_results_where_the_oracle_says_it_may_not() -> None:
    out, step = skipping(True)
    report = verify(step, counted, eager=total, state={"out": out})
    assert report.blamed == ("state out",), report
    assert report.findings[0].check == "state"
    assert "what case 0 left in out[3:8]" in report.findings[0].because
    out, step = skipping(False)
    clean = verify(step, counted, eager=total, state={"out": out})
    assert clean.ok, clean
    assert "from what another one left" in clean.checked["state goes on"]


def test_state_that_goes_on_by_right() -> None:
    """The oracle reads it, or there is none but the step itself."""
    out, step = skipping(True)
    assert verify(step, counted, state={"out": out}).ok, "nobody says that the rest of it may not count"
    sums = torch.zeros(16)

    def running(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        sums.add_(x.sum(0))
        return sums + 0

    def knows(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return sums + x.sum(0)

    report = verify(running, counted, pad={"x": 0}, eager=knows, state={"sums": sums})
    assert report.ok, report
    assert torch.equal(sums, torch.zeros(16))
    report = verify(running, counted, pad={"x": 0}, eager=total, state={"sums": sums})
    assert report.blamed == ("state sums",), report
    assert "let the oracle read the state" in report.findings[0].because


def test_a_state_from_which_one_of_both_raises() -> None:
    """And one from which both do is none that this case meets."""
    at = torch.zeros((), dtype=torch.int64)
    table = torch.arange(4.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        at.add_(2)
        return x + table[at - 1]

    def knows(x: torch.Tensor) -> torch.Tensor:
        if int(at):
            raise IndexError("the table ends")
        return x + table[1]

    report = verify(step, lambda case: {"x": rows(case)["x"]}, cases=2, eager=knows, state={"at": at})
    assert report.blamed == ("state at",), report
    assert "the oracle raised IndexError: the table ends" in report.findings[0].text


# -- what an oracle gives


def nothing(*args: Any, **inputs: Any) -> None:
    """Computes, and returns nothing."""


SILENT = {"None": nothing, "[]": lambda x: [], "{}": lambda x: {}, "one case": lambda x: x if len(x) > 2 else None}


@pytest.mark.parametrize("name", SILENT)
def test_an_oracle_that_returns_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"eager: expected the results of case \d, got nothing"):
        verify(silu, rows, eager=SILENT[name])


def test_a_runner_whose_oracle_returns_nothing() -> None:
    runner = Copies()
    runner.eager = nothing
    with pytest.raises(ConfigError, match="eager: expected the results of case 0, got nothing"):
        verify(runner, rows)


def test_an_oracle_that_changes_the_state_alone() -> None:
    sums = torch.ones(6)

    def step(x: torch.Tensor) -> torch.Tensor:
        sums.add_(x.sum(0))
        return sums * 2

    def oracle(x: torch.Tensor) -> None:
        sums.add_(x.sum(0))

    report = verify(step, rows, eager=oracle, pad={"x": 0}, state={"sums": sums})
    assert report.ok, report
    assert "gives none of out" in report.not_checked["outputs"]


def test_cases_whose_oracle_raised_are_not_counted() -> None:
    def oracle(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 2:
            raise ValueError("two rows")
        return silu(x)

    report = verify(silu, rows, eager=oracle)
    assert "exact results of 3 cases" in report.checked["padding"]
    report = verify(silu, rows, eager=lambda x: 1 // 0)
    assert "padding" in report.not_checked


# -- steps that do not repeat

TICKS = itertools.count()
UNREPEATED = {
    "clock": lambda x: x * (time.perf_counter_ns() // 1000 % 97),
    "iterator": lambda x: x + next(TICKS),
    "now and then the same": lambda x: x + next(TICKS) % 2,
}


@pytest.mark.parametrize("name", UNREPEATED)
@pytest.mark.parametrize("eager", [None, lambda x: x], ids=["own", "oracle"])
def test_a_step_that_does_not_repeat(name: str, eager: Callable[..., Any] | None) -> None:
    report = verify(UNREPEATED[name], rows, eager=eager)
    assert report.blamed == ()
    (finding,) = report.findings
    assert finding.check == "determinism"
    assert "the step does not repeat" in finding.text
    assert "compute different things" not in str(report)
    assert "does not repeat" in report.not_checked["graph"]
    assert not {"graph", "padding", "history"} & set(report.checked)


def test_a_count_that_refresh_keeps_is_named_all_the_same() -> None:
    """It does not repeat either, but with that value put back it does."""
    runner = SimpleNamespace(buffers={"x": torch.zeros(5, 6)}, count=0)

    def refresh(inputs: dict[str, Any]) -> None:
        runner.buffers["x"].zero_()
        runner.buffers["x"][: len(inputs["x"])] = inputs["x"]
        runner.count += 1

    runner.refresh, runner.run = refresh, lambda: runner.buffers["x"] + runner.count
    report = verify(runner, rows)
    assert "self.count" in report.blamed, report
