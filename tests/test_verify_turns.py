"""Steps whose host code takes tensors in turn: whatever moves them, the tensor that a graph goes on with is blamed."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.testing.verify import verify
from graphrt.testing.verify_runs import Runs
from graphrt.testing.verify_subject import Target

ROWS = (8, 3, 5, 8)


class Turns:
    """refresh() fills the next of several tensors. The graph goes on reading the one of its capture."""

    def __init__(self, turn: Callable[[Any], None], count: int = 2) -> None:
        self.turn, self.x = turn, torch.zeros(8, 4)
        self.buffers = {"x": self.x}
        self.ring: Any = [torch.zeros(4) for _ in range(count)]
        self.n, self.slot = 0, self.ring[0]

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        self.x.zero_()
        self.x[: len(inputs["x"])] = inputs["x"]
        self.n += 1
        self.turn(self)
        self.slot.copy_(inputs["x"].sum(0))

    def run(self) -> torch.Tensor:
        return self.x + self.slot

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"] + inputs["x"].sum(0)


class Copied(Turns):
    """Copies what it chose into the tensor that the graph reads."""

    def __init__(self, turn: Callable[[Any], None], count: int = 2) -> None:
        super().__init__(turn, count)
        self.read = torch.zeros(4)
        self.buffers["read"] = self.read

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        super().refresh(inputs)
        self.read.copy_(self.slot)

    def run(self) -> torch.Tensor:
        return self.x + self.read


def by_number(step: Turns) -> None:
    step.slot = step.ring[step.n % len(step.ring)]


def by_swap(step: Turns) -> None:
    step.ring[0], step.ring[-1] = step.ring[-1], step.ring[0]
    step.slot = step.ring[0]


def by_rotation(step: Turns) -> None:
    step.ring = collections.deque(step.ring)
    step.ring.rotate(1)
    step.slot = step.ring[0]


def by_pop(step: Turns) -> None:
    step.ring.insert(0, step.ring.pop())
    step.slot = step.ring[0]


def by_new_list(step: Turns) -> None:
    step.ring = [*step.ring[1:], step.ring[0]]
    step.slot = step.ring[0]


def inputs(case: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS[case], 4, generator=torch.Generator().manual_seed(case))}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("turn", [by_number, by_swap, by_rotation, by_pop, by_new_list])
def test_a_tensor_of_the_capture_is_blamed(turn: Callable[[Any], None], count: int) -> None:
    report = verify(Turns(turn, count), inputs, cases=4)
    assert {finding.check for finding in report.findings} == {"graph"}, str(report)
    assert set(report.blamed) <= {"self.slot", *(f"self.ring[{n}]" for n in range(count))}, str(report)
    assert "self.slot" in report.blamed
    assert "another tensor stands in self.slot than at capture" in str(report)


@pytest.mark.parametrize("turn", [by_number, by_swap, by_rotation, by_pop, by_new_list])
def test_what_is_copied_to_one_place_is_no_finding(turn: Callable[[Any], None]) -> None:
    report = verify(Copied(turn), inputs, cases=4)
    assert report.ok, str(report)
    assert report.replays


class Remade(Turns):
    """Makes a table anew in each refresh, besides."""

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        super().refresh(inputs)
        self.table = torch.ones(4)


def test_a_tensor_that_was_replaced_is_not_kept() -> None:
    """On a device its memory is given away, which shows that a graph reads it. Buffers stay, and are put back."""
    step = Remade(by_number)
    step.buffers |= {"first": step.ring[0], "second": step.ring[1]}
    step.refresh(inputs(0))
    runs = Runs(Target(step, None), {})
    runs.refreshed = frozenset({"self.slot", "self.table", "self.n"})
    contents = runs.contents()
    assert contents.host == {"self.slot": step.slot, "self.n": 1}
    table, slot = weakref.ref(step.table), step.slot
    step.refresh(inputs(1))
    assert table() is None
    assert step.slot is not slot
    with runs.numbers_of(contents):
        assert step.slot is slot
        assert step.n == 1
    assert step.slot is not slot
