"""What verify makes of the host's part of a step: arguments of any kind, buffers that are replaced, runners that keep
count. The same steps without their bug are silent, and the caller's runner works on as it did."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import make_recorder
from graphrt.testing.verify import verify
from graphrt.testing.verify_report import VerifyReport

CPU = torch.device("cpu")
SIZES = (8, 3, 5, 8, 2, 7, 4)


def rows(case: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SIZES[case], 4, generator=torch.Generator().manual_seed(case))}


def blames(report: VerifyReport) -> list[tuple[str, tuple[str, ...]]]:
    return [(finding.check, finding.blamed) for finding in report.findings]


@dataclasses.dataclass
class Cached:
    k: torch.Tensor


Scales = collections.namedtuple("Scales", "k")
HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "list": (lambda k: [k], lambda kv: kv[0]),
    "tuple": (lambda k: (k,), lambda kv: kv[0]),
    "deque": (lambda k: collections.deque([k]), lambda kv: kv[0]),
    "dict": (lambda k: {"k": k}, lambda kv: kv["k"]),
    "nested": (lambda k: {"a": [(k,)]}, lambda kv: kv["a"][0][0]),
    "namedtuple": (Scales, lambda kv: kv.k),
    "dataclass": (Cached, lambda kv: kv.k),
    "array": (lambda k: [k.numpy()], lambda kv: torch.from_numpy(kv[0])),
    "array in a dict": (lambda k: {0: k.numpy()}, lambda kv: torch.from_numpy(kv[0])),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_in_an_argument_are_frozen_as_numbers_are(holder: str) -> None:
    pack, unpack = HOLDERS[holder]

    def step(x: torch.Tensor, kv: Any) -> torch.Tensor:
        return x * unpack(kv)

    def inputs(case: int, value: float) -> dict[str, Any]:
        return {"x": torch.ones(8, 4) + case, "kv": pack(torch.full((4,), value))}

    assert blames(verify(step, lambda case: inputs(case, float(case)))) == [("graph", ("kv",))]
    assert verify(step, lambda case: inputs(case, 2.0)).ok


class Unspeakable:
    """An object that can be neither compared nor shown."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise ValueError("no text")


def test_an_argument_that_can_be_neither_compared_nor_shown() -> None:
    report = verify(lambda x, s: x * s.value, lambda case: {"x": torch.ones(8), "s": Unspeakable(case)})
    assert blames(report) == [("graph", ("s",))]
    assert "s was a value of type Unspeakable when case 0 was captured" in str(report)


class Grows:
    """Replaces its buffer where an input is larger, or always."""

    def __init__(self, always: bool) -> None:
        self.always, self.buffers = always, {"x": torch.zeros(3, 4)}

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        given = inputs["x"]
        if self.always or len(given) > len(self.buffers["x"]):
            self.buffers["x"] = torch.zeros_like(given)
        self.buffers["x"].zero_()
        self.buffers["x"][: len(given)] = given

    def run(self) -> torch.Tensor:
        return self.buffers["x"].sum(0)


@pytest.mark.parametrize("always", [False, True])
def test_a_buffer_that_another_of_another_shape_replaces(always: bool) -> None:
    assert blames(verify(Grows(always), lambda case: rows((1, 0, 2, 3)[case]))) == [("replaced", ("x",))]


class Double:
    """Two buffers in turn, and a number that says which one is filled: the graph has the number of its capture."""

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
        recorder = make_recorder(CPU)
        with recorder.session():
            graphs = [
                recorder.capture(lambda t=t: t * 2, BatchDescriptor.decode(i + 1), lambda: None)  # type: ignore[misc]
                for i, t in enumerate(self.pair)
            ]

        def launch() -> torch.Tensor:
            graphs[self.turn].launch()
            return graphs[self.turn].output

        return launch


@pytest.mark.parametrize("cases", range(1, 8))
def test_a_runner_with_two_buffers_in_turn(cases: int) -> None:
    """Whatever the number of cases: numbers that refresh() leaves go with what it leaves in the buffers."""
    assert verify(DoubleGraphs(), rows, cases=cases).ok
    if cases > 1:
        report = verify(Double(), rows, cases=cases)
        assert blames(report) == [("graph", ("self.turn",))]
        assert "self.turn was 0 and is 1 now" in str(report) or "self.turn was 1 and is 0 now" in str(report)


class Allocates:
    """Takes slots from a list of free ones, in turn: the state that it writes depends on what ran before."""

    def __init__(self, pays: bool) -> None:
        self.free, self.mine = collections.deque(range(16)), list[int]()
        self.kv, self.pays = torch.zeros(17, 4), pays
        self.alias = self.free
        self.buffers = {"x": torch.zeros(8, 4), "slots": torch.zeros(8, dtype=torch.int64)}
        self.state = {"kv": self.kv} if pays else {}

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

    def real(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"kv": slice(0, 16)} if self.pays else {}


@pytest.mark.parametrize("pays", [False, True])
def test_trials_leave_the_callers_runner_as_it_was(pays: bool) -> None:
    """A trial puts an old free list back for one run; what that run made of it is undone."""
    runner = Allocates(pays)
    report = verify(runner, rows)
    assert sorted([*runner.free, *runner.mine]) == list(range(16))
    assert runner.alias is runner.free
    assert blames(report) == ([("history", ("self.free",)), ("history", ("slots",))] if pays else [])
    if pays:
        assert "what refresh() writes there depends on what ran before, not on the case alone" in str(report)


class Counts:
    """Writes a number that it counts up: it does so in every case, so nobody may say that it does not."""

    def __init__(self) -> None:
        self.number, self.buffers = 0, {"x": torch.zeros(8, 4), "offset": torch.zeros(1)}

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        self.number += 1
        self.buffers["x"].zero_()[: len(inputs["x"])] = inputs["x"]
        self.buffers["offset"].fill_(self.number)

    def run(self) -> torch.Tensor:
        return self.buffers["x"] + self.buffers["offset"]


def test_a_number_that_refresh_counts_up() -> None:
    report = verify(Counts(), rows)
    assert report.blamed == ("self.number", "offset")
    assert "does not write" not in str(report)


class Narrow:
    def __init__(self, dtype: torch.dtype) -> None:
        self.buffers = {"x": torch.zeros(8, dtype=dtype)}

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        self.buffers["x"].copy_(inputs["x"])

    def run(self) -> torch.Tensor:
        return self.buffers["x"].double() * 2

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"].double() * 2


@pytest.mark.parametrize(("dtype", "step"), [(torch.int32, 1 << 31), (torch.int8, 200), (torch.int64, 1 << 31)])
def test_a_buffer_that_is_too_narrow_for_its_input(dtype: torch.dtype, step: int) -> None:
    report = verify(Narrow(dtype), lambda case: {"x": torch.arange(8) + case * step})
    if dtype is torch.int64:
        assert report.ok
    else:
        assert report.blamed == ("x",)
        assert f"x is {dtype}, which does not hold [{step}, {step + 1}, {step + 2}, ...] of inputs['x']" in str(report)


def test_integers_that_no_int64_has() -> None:
    assert verify(lambda x: x, lambda case: {"x": torch.full((4 - case % 2,), (1 << 63) - 1).to(torch.uint64) * 2}).ok


def test_a_gradient_is_found_by_its_tensor() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.zeros(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad.add_(x)  # type: ignore[union-attr]
        return weight.grad.clone()  # type: ignore[union-attr]

    report = verify(step, lambda case: {"x": torch.ones(4) + case})
    assert report.blamed == ("weight.grad",)
    assert weight.grad.tolist() == [0.0] * 4, "as it was"


class Tickets:
    """Hands out numbers beside a list of who has them: both go on together, whatever is tried."""

    def __init__(self) -> None:
        self.next, self.owners, self.buffers = 0, list[int](), {"x": torch.zeros(8, 4)}
        self.blocks = collections.deque(Cached(torch.tensor(i)) for i in range(4))

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        assert self.next == len(self.owners)
        self.owners.append(len(inputs["x"]))
        self.next += 1
        self.blocks.rotate()
        self.buffers["x"].zero_()[: len(inputs["x"])] = inputs["x"]

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * 2


def test_a_number_that_goes_with_a_list() -> None:
    runner = Tickets()
    assert verify(runner, rows).ok
    assert runner.next == len(runner.owners)
    assert sorted(int(block.k) for block in runner.blocks) == [0, 1, 2, 3]
