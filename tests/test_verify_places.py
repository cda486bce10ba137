"""Steps that lead to other objects: which of them a number belongs to, and what is left of them afterwards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.testing.verify import verify

SIZES = (8, 3, 5, 8)


def inputs(case: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(case)
    rows = SIZES[case % len(SIZES)]
    return {"x": torch.randn(rows, 4, generator=rng), "lens": torch.rand(rows, generator=rng)}


class Slot:
    def __init__(self, index: int) -> None:
        self.index, self.buf = index, torch.full((4,), float(index))


class Ring:
    """A slot per launch in flight, in turn."""

    def __init__(self) -> None:
        self.ring = [Slot(0), Slot(1), Slot(2)]
        self.slot, self.count = self.ring[0], 0

    def move(self) -> None:
        self.count += 1
        self.slot = self.ring[self.count % 3]


class Moves(Ring):
    def __call__(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        self.move()
        return x * 2


class Reads(Ring):
    def __call__(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        self.move()
        return x * (1 + self.slot.index)


class ReadsBefore(Ring):
    def __call__(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        y = x * (1 + self.slot.index)
        self.slot = self.ring[1] if self.slot is self.ring[0] else self.ring[0]
        return y


class Linked:
    def __init__(self) -> None:
        self.first, self.second = Slot(1), Slot(2)
        self.first.next, self.second.next = self.second, self.first  # type: ignore[attr-defined]
        self.slot = self.first

    def __call__(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        y = x * self.slot.index
        self.slot = self.slot.next  # type: ignore[attr-defined]
        return y


class Runner:
    """Fills its buffer from outside, and works on a tensor of its own in turn."""

    def __init__(self) -> None:
        self.buffers = {"x": torch.zeros(8, 4)}
        self.ring = Ring()

    def refresh(self, given: dict[str, torch.Tensor]) -> None:
        self.buffers["x"].zero_()[: len(given["x"])] = given["x"]

    def run(self) -> torch.Tensor:
        self.ring.move()
        return self.buffers["x"] * 2


def held(step: Any) -> list[Any]:
    """Which objects there are, and what is in each."""
    ring = getattr(step, "ring", None)
    slots = [step.first, step.second] if isinstance(step, Linked) else (ring.ring if isinstance(ring, Ring) else ring)
    return [(id(slot), slot.index, id(slot.buf), slot.buf.tolist()) for slot in slots]


@pytest.mark.parametrize(
    ("make", "blamed"),
    [(Moves, None), (Runner, None), (Reads, "step.slot"), (ReadsBefore, "step.slot"), (Linked, "step.slot")],
)
def test_objects_in_turn_stay_what_they_are(make: Callable[[], Any], blamed: str | None) -> None:
    """What run() changed is put back before each run: into the object that it is of, not into the next one."""
    step = make()
    before = copy.deepcopy([each[1::2] for each in held(step)]), [each[::2] for each in held(step)]
    report = verify(step, inputs)
    assert ([each[1::2] for each in held(step)], [each[::2] for each in held(step)]) == before
    if blamed is None:
        assert report.ok, report
    else:
        assert any(name.startswith(blamed) for name in report.blamed), report


class Decode:
    scale = 1.0


class Prefill:
    scale = 2.0


def test_classes_in_turn_stay_what_they_are() -> None:
    class Step:
        def __init__(self) -> None:
            self.phase: Any = Decode()

        def __call__(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
            y = x * self.phase.scale
            self.phase = Prefill() if isinstance(self.phase, Decode) else Decode()
            return y

    report = verify(Step(), inputs)
    assert (Decode.scale, Prefill.scale) == (1.0, 2.0)
    assert any(name.startswith("step.phase") for name in report.blamed), report


class Plan:
    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


PLANS: dict[str, Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "lambda": lambda factor: lambda x: x * factor,
    "partial": lambda factor: functools.partial(torch.mul, factor),
    "keyword": lambda factor: functools.partial(torch.mul, other=factor),
    "method": lambda factor: Plan(factor).run,
    "builtin": lambda factor: factor.mul,
}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "anew"])
@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_of_the_first_case(kind: str, keep: bool) -> None:
    class Step:
        plan: Callable[[torch.Tensor], torch.Tensor] | None = None

        def __call__(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
            plan = self.plan
            if plan is None or not keep:
                plan = self.plan = PLANS[kind](lens[:3].amax())
            return plan(x)

    report = verify(Step(), inputs, pad={"lens": 0})
    if keep:
        assert "step.plan" in report.blamed, report
    else:
        assert report.ok, report


class WarmFunction(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.impl = self.slow

    def slow(self, x: torch.Tensor) -> torch.Tensor:
        self.impl = self.fast
        return x.abs()

    def fast(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return self.impl(x)


class WarmTraining(torch.nn.Module):
    def forward(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.eval()
            return x.abs()
        return x * 2


class Warmed(torch.nn.Module):
    def forward(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return x * 2


class WarmClass(torch.nn.Module):
    def forward(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        self.__class__ = Warmed  # type: ignore[assignment]
        return x.abs()


@pytest.mark.parametrize(
    ("make", "blamed"),
    [(WarmFunction, "step.impl"), (WarmTraining, "step.training"), (WarmClass, "step.__class__")],
)
def test_another_path_once_it_is_warm(make: Callable[[], Any], blamed: str) -> None:
    report = verify(make(), inputs)
    assert blamed in report.blamed, report


class Chosen:
    """What refresh() chooses by the values of its input: the graph goes on with the choice of its capture."""

    def __init__(self, kind: str) -> None:
        self.buffers = {"x": torch.zeros(4, 4), "mean": torch.zeros(())}
        self.kind, self.act = kind, torch.relu
        self.norm = torch.nn.BatchNorm1d(4, affine=False, track_running_stats=False)
        self.scaled = functools.partial(torch.mul, 1.0)

    def refresh(self, given: dict[str, torch.Tensor]) -> None:
        self.buffers["x"].copy_(given["x"])
        self.buffers["mean"].copy_(given["x"].mean())
        above = bool(given["x"].mean() > 0)
        self.act = torch.relu if above else torch.tanh
        self.norm.train(above)
        self.scaled = functools.partial(torch.mul, 1.0 if above else 2.0)

    def run(self) -> torch.Tensor:
        x = self.buffers["x"]
        if self.kind == "act":
            return self.act(x)
        if self.kind == "norm":
            return x * 2 if self.norm.training else x * 3
        if self.kind == "scaled":
            return self.scaled(x)
        return torch.where(self.buffers["mean"] > 0, torch.relu(x), torch.tanh(x))


@pytest.mark.parametrize(
    ("kind", "blamed"), [("act", "self.act"), ("norm", "self.norm.training"), ("scaled", "self.scaled"), ("none", None)]
)
def test_what_refresh_chooses_is_named(kind: str, blamed: str | None) -> None:
    def signed(case: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(case)) + (1 if case % 2 else -1)}

    report = verify(Chosen(kind), signed)
    assert report.blamed == (() if blamed is None else (blamed,)), report
    if kind == "act":
        assert "choose on the device, or capture a graph for each" in str(report)


def test_bytes_and_decimals_are_values() -> None:
    class Step:
        def __init__(self) -> None:
            self.mode = bytearray(b"\0")

        def __call__(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
            y = x * (1 + self.mode[0])
            self.mode[0] = 1 - self.mode[0]
            return y

    report = verify(Step(), inputs)
    assert report.blamed == ("step.mode",), report


def test_rows_that_the_oracle_leaves_out_are_named() -> None:
    def make(case: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(3)}

    report = verify(lambda x: torch.cat([x[:2] * 2, x[2:] * 99]), make, eager=lambda x: (x * 2)[:2])
    assert report.ok
    assert report.not_checked["oracle"].startswith("it gives 2 of 3 rows of out in case ")
    report = verify(lambda x: x * 3, make, eager=lambda x: (x * 2)[:0])
    assert "padding" in report.not_checked
    assert "padding" not in report.checked
    report = verify(lambda x: x * 3, make, eager=lambda x: x * 3)
    assert "oracle" not in report.not_checked
    assert "padding" in report.checked


def test_a_generator_is_blamed_on_nobody() -> None:
    """It goes on by itself: neither the inputs of the capture nor anything else within reach explains it."""

    def going() -> Any:
        before = torch.zeros(4)
        x = yield
        while True:
            mean = x[:3].mean(0)
            x = yield x + before
            before = mean

    generator = going()
    next(generator)
    report = verify(lambda x, lens: generator.send(x), inputs)
    assert not report.ok
    assert "host values" not in report.blamed
