"""Runners whose host code takes buffers or slots in turn, or allocates for larger batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import make_recorder
from graphrt.testing.verify import verify


class Double:
    """Two buffers in turn, and a number that says which one is filled: the graph keeps the number of its capture."""

    def __init__(self) -> None:
        self.pair, self.turn = [torch.zeros(8, 4) for _ in "ab"], 0
        self.buffers = dict(zip(("a", "b"), self.pair, strict=True))

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        self.turn ^= 1
        self.pair[self.turn].zero_()[: len(inputs["x"])] = inputs["x"]

    def run(self) -> torch.Tensor:
        return self.pair[self.turn] * 2

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"] * 2


class DoubleGraphs(Double):
    """The same with a graph for each buffer."""

    def capture(self, inputs: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        recorder = make_recorder(torch.device("cpu"))
        with recorder.session():
            graphs = [
                recorder.capture(lambda t=t: t * 2, BatchDescriptor.decode(i + 1), lambda: None)  # type: ignore[misc]
                for i, t in enumerate(self.pair)
            ]

        def launch() -> torch.Tensor:
            graphs[self.turn].launch()
            return graphs[self.turn].output

        return launch


def sized(case: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn((8, 3, 5, 8, 2)[case], 4, generator=torch.Generator().manual_seed(case))}


@pytest.mark.parametrize("cases", range(1, 6))
def test_two_buffers_in_turn(cases: int) -> None:
    assert verify(DoubleGraphs(), sized, cases=cases).ok
    if cases > 1:
        report = verify(Double(), sized, cases=cases)
        assert [(finding.check, finding.blamed) for finding in report.findings] == [("graph", ("self.turn",))]


class Allocates:
    """Takes slots from a free list in turn. With state, what it writes depends on earlier runs."""

    def __init__(self, with_state: bool) -> None:
        self.free, self.mine = deque(range(16)), list[int]()
        self.kv, self.alias = torch.zeros(17, 4), self.free
        self.buffers = {"x": torch.zeros(8, 4), "slots": torch.zeros(8, dtype=torch.int64)}
        self.state = {"kv": self.kv[:16]} if with_state else {}

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        given, slots = inputs["x"], self.buffers["slots"]
        self.free.extend(self.mine)
        self.mine = [self.free.popleft() for _ in range(len(given))]
        self.buffers["x"].zero_()[: len(given)] = given
        slots.fill_(16)
        slots[: len(given)] = torch.tensor(self.mine)

    def run(self) -> torch.Tensor:
        self.kv.index_copy_(0, self.buffers["slots"], self.buffers["x"])
        return self.kv[self.buffers["slots"]] * 2

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"] * 2


@pytest.mark.parametrize("with_state", [False, True])
def test_trials_leave_the_callers_free_list_consistent(with_state: bool) -> None:
    runner = Allocates(with_state)
    report = verify(runner, sized)
    assert (list(runner.free), runner.mine) == (list(range(16)), [])
    assert runner.alias is runner.free
    assert ("self.free" in report.blamed) is with_state, report


class Growing:
    """Allocates scratch memory for the largest batch so far, or for the largest of all."""

    def __init__(self, rows: int) -> None:
        self.buffers = {"x": torch.zeros(8, 3)}
        self.scratch = torch.zeros(rows, 3)

    def refresh(self, inputs: dict[str, Any]) -> None:
        n = len(inputs["x"])
        if n > len(self.scratch):
            self.scratch = torch.zeros(n, 3)
        self.scratch.fill_(inputs["bias"])
        self.buffers["x"].zero_()
        self.buffers["x"][:n] = inputs["x"]

    def run(self) -> torch.Tensor:
        return self.buffers["x"] + self.scratch[:1]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_tensor_that_grows_after_the_capture_is_blamed(rows: int) -> None:
    def inputs(case: int) -> dict[str, Any]:
        return {"x": torch.randn((2, 4, 8, 3)[case], 3), "bias": float(case)}

    report = verify(Growing(rows), inputs)
    assert report.blamed == (("self.scratch",) if rows == 1 else ()), report
