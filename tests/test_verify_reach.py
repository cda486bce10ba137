"""Where verify finds what Python keeps: each place is blamed by its name, and the same step with a tensor is silent."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import itertools
import random
import threading
import time
from collections import deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify import verify
from graphrt.testing.verify_report import own_line
from tests.support import forward_context
from tests.support.forward_context import current

Meta = namedtuple("Meta", "scale lengths")
VARIABLE = contextvars.ContextVar("VARIABLE", default=1)
LOCAL = threading.local()


class Mode(enum.Enum):
    ADD = 1
    DOUBLE = 2


class Holder:
    number = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    mode: Mode


@dataclasses.dataclass(slots=True)
class Slotted:
    depth: int


class Runner:
    """x times what the host keeps somewhere, or times a tensor that refresh fills."""

    def __init__(self, put: Callable[[Any, int], None], get: Callable[[Any], Any], planted: bool, count: bool) -> None:
        self.buffers = {"x": torch.zeros(4, 3)}
        if count:
            self.buffers["count"] = torch.ones(())
        self.kept: Any = None
        self.planted, self._put, self._get = planted, put, get

    def refresh(self, inputs: dict[str, Any]) -> None:
        self.buffers["x"].copy_(inputs["x"])
        if "count" in self.buffers:
            self.buffers["count"].fill_(inputs["count"])
        self._put(self, inputs["count"])

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * (self._get(self) if self.planted else self.buffers["count"])


def batches(case: int) -> dict[str, Any]:
    return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(case)), "count": case + 1}


def _put(path: str, make: Callable[[int], Any]) -> Callable[[Any, int], None]:
    return lambda self, count: setattr(self, path, make(count))


def _default(count: int) -> Callable[[], Any]:
    def scale(by: torch.Tensor = torch.tensor(float(count))) -> torch.Tensor:  # noqa: B008
        return by

    return scale


PLACES: dict[str, tuple[Callable[[Any, int], None], Callable[[Any], Any]]] = {
    "VARIABLE": (lambda self, count: VARIABLE.set(count) and None, lambda self: VARIABLE.get()),
    "LOCAL.number": (lambda self, count: setattr(LOCAL, "number", count), lambda self: LOCAL.number),
    "forward_context.limit": (
        lambda self, count: setattr(forward_context, "limit", count),
        lambda self: forward_context.limit,
    ),
    "tests.support.forward_context._current['count']": (
        lambda self, count: forward_context.set_current({"count": torch.tensor(count)}),
        lambda self: current()["count"],
    ),
    "Holder.number": (lambda self, count: setattr(Holder, "number", count), lambda self: Holder.number),
    "self.kept.lengths": (
        _put("kept", lambda count: Meta(1.0, torch.tensor(count))),
        lambda self: self.kept.scale * self.kept.lengths,
    ),
    "self.kept[1]": (_put("kept", lambda count: (None, torch.tensor(count))), lambda self: self.kept[1]),
    "self.kept(by)": (_put("kept", _default), lambda self: self.kept()),
    "self.kept.mode": (_put("kept", lambda count: Frozen(Mode(1 + count % 2))), lambda self: self.kept.mode.value),
    "self.kept['a'][0].depth": (
        _put("kept", lambda count: {"a": [Slotted(count)]}),
        lambda self: self.kept["a"][0].depth,
    ),
    "self.kept": (_put("kept", lambda count: slice(0, count)), lambda self: self.kept.stop),
    "self.kept ": (_put("kept", lambda count: {count}), lambda self: max(self.kept)),
    "self.kept  ": (_put("kept", lambda count: deque([9, count])), lambda self: self.kept.pop()),
    "self.kept   ": (_put("kept", lambda count: np.int64(count)), lambda self: int(self.kept)),
}


@pytest.mark.parametrize("place", PLACES)
def test_each_place_is_found(place: str) -> None:
    put, get = PLACES[place]
    planted = verify(Runner(put, get, True, False), batches)
    assert planted.blamed == (place.strip(),), planted
    clean = verify(Runner(put, get, False, True), batches)
    assert clean.ok, clean


def test_a_parameter_whose_data_is_replaced() -> None:
    class Reloaded:
        def __init__(self) -> None:
            self.buffers = {"x": torch.zeros(4, 3)}
            self.layer = torch.nn.Linear(3, 3)

        def refresh(self, inputs: dict[str, Any]) -> None:
            self.buffers["x"].copy_(inputs["x"])
            self.layer.weight.data = torch.full((3, 3), float(inputs["count"]))

        def run(self) -> torch.Tensor:
            return self.layer(self.buffers["x"])

    assert "self.layer.weight" in verify(Reloaded(), batches).blamed


# -- what run() changes in Python


class Counting:
    """x times how often it ran, counted somewhere."""

    def __init__(self, count: Callable[[Any], Any]) -> None:
        self._count = count
        self.steps, self.history, self.entries = 0, [0], {0: 0}
        self.rng, self.python = np.random.default_rng(0), random.Random(0)
        self.a, self.b = torch.zeros(3), torch.zeros(3)
        self.last: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self._count(self)


def _counted(self: Any) -> int:
    self.steps += 1
    return self.steps


def _every_fourth(self: Any) -> int:
    self.steps += 1
    return self.steps % 4 == 0


def _listed(self: Any) -> int:
    self.history.append(len(self.history))
    return self.history[-1]


def _entered(self: Any) -> int:
    self.entries[len(self.entries)] = 0
    return len(self.entries)


def _swapped(self: Any) -> torch.Tensor:
    self.a.copy_(self.b + 1)
    self.a, self.b = self.b, self.a
    return self.b.clone()


def _joined(self: Any) -> torch.Tensor:
    self.a = self.a + 1
    return self.a


CARRIED = {
    "step.steps": _counted,
    "step.steps ": _every_fourth,
    "step.history": _listed,
    "step.entries": _entered,
    "step.a": _joined,
    "step.rng": lambda self: float(self.rng.random()),
    "step.python": lambda self: self.python.random(),
    "random": lambda self: random.random(),
    "np.random": lambda self: float(np.random.rand()),
}


@pytest.mark.parametrize("place", CARRIED)
def test_what_the_body_changes_in_python_is_found(place: str) -> None:
    report = verify(Counting(CARRIED[place]), lambda case: {"x": batches(case)["x"]})
    assert report.blamed == (place.strip(),), report
    (finding,) = report.findings
    assert finding.check == "determinism"
    assert "a replay runs no Python" in finding.because


def test_a_trial_that_finds_nothing_leaves_what_it_found() -> None:
    """Entries that the body makes are dropped for a trial only."""
    step = Counting(lambda self: self.entries.setdefault(len(self.entries), 0))
    assert verify(step, lambda case: {"x": batches(case)["x"]}).ok
    assert len(step.entries) > 4


def test_buffers_that_are_swapped_in_python() -> None:
    step = Counting(_swapped)
    report = verify(step, lambda case: {"x": batches(case)["x"]}, state={"a": step.a, "b": step.b})
    assert set(report.blamed) <= {"step.a", "step.b"}
    assert len(report.findings) == 1, report


def test_what_no_result_depends_on_is_nobody_s_business() -> None:
    def noted(self: Any) -> int:
        self.steps += 1
        self.history.append(self.steps)
        self.entries[self.steps] = time.perf_counter()
        self.last = torch.ones(3) * self.steps
        return 0

    report = verify(Counting(noted), lambda case: {"x": batches(case)["x"]})
    assert report.ok, report


def test_what_hides_is_found_without_a_name() -> None:
    """The page says so."""
    counter = itertools.count()
    report = verify(lambda x: x + next(counter), lambda case: {"x": batches(case)["x"]})
    assert not report.ok
    assert report.blamed == ()


def test_an_attribute_that_refresh_reads_again() -> None:
    """The body counts, and the next refresh writes the count into a buffer."""
    runner = SimpleNamespace(buffers={"x": torch.zeros(4, 3), "at": torch.zeros(())}, count=0)

    def refresh(inputs: dict[str, Any]) -> None:
        runner.buffers["x"].copy_(inputs["x"])
        runner.buffers["at"].fill_(runner.count)

    def run() -> torch.Tensor:
        runner.count += 1
        return runner.buffers["x"] + runner.buffers["at"]

    runner.refresh, runner.run = refresh, run
    assert verify(runner, batches).blamed == ("self.count",)


@pytest.mark.parametrize("generator", [torch.Generator(), None])
def test_noise_that_is_drawn_once_is_found_and_noise_of_each_step_is_not(generator: torch.Generator | None) -> None:
    kept: list[Any] = [None]

    def frozen(x: torch.Tensor) -> torch.Tensor:
        kept[0] = torch.rand(3, generator=generator) if kept[0] is None else kept[0]
        return x + kept[0]

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, generator=generator)

    inputs = lambda case: {"x": batches(case)["x"]}  # noqa: E731
    assert verify(frozen, inputs).blamed == ("kept",)
    assert verify(drawn, inputs, eager=drawn).ok


# -- state of plain steps, and inputs that are no tensors in some cases


def scatter(case: int) -> dict[str, Any]:
    rng, n = torch.Generator().manual_seed(case), (6, 2, 4, 6)[case]
    return {"x": torch.randn(n, 3, generator=rng), "slots": torch.randperm(8, generator=rng)[:n]}


@pytest.mark.parametrize("pad", [8, 0])
def test_a_plain_step_with_state(pad: int) -> None:
    """Pad rows have a slot of their own, or one that is somebody's."""
    kept = torch.randn(9, 3, generator=torch.Generator().manual_seed(5))

    def step(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        kept[slots] = kept[slots] / 2 + x
        return kept[slots]

    report = verify(step, scatter, pad={"x": 0, "slots": pad}, state={"kept": kept[:8]})
    assert report.blamed == (() if pad == 8 else ("slots",)), report
    assert report.checked["state"] == "kept after each run"
    assert "zeros" not in report.not_checked
    undeclared = verify(step, scatter, pad={"x": 0, "slots": 8})
    assert undeclared.blamed == ("kept",)
    assert "name it in state" in undeclared.findings[0].because


def test_state_belongs_to_plain_steps_and_zeros_are_mentioned() -> None:
    runner = Runner(lambda self, count: None, lambda self: 1, True, False)
    with pytest.raises(ConfigError, match="state: expected none beside a Subject"):
        verify(runner, batches, state={"x": torch.zeros(3)})
    total = torch.zeros(3)
    report = verify(lambda x: total.add_(x.sum(0)) + 0, lambda case: {"x": batches(case)["x"]}, state={"total": total})
    assert report.ok, report
    assert "total" in report.not_checked["zeros"]


@pytest.mark.parametrize("odd", [True, False])
def test_an_input_that_is_none_in_some_cases(odd: bool) -> None:
    def step(x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        return x if image is None else x + image.sum(0)

    def inputs(case: int) -> dict[str, Any]:
        return {"x": batches(case)["x"], "image": torch.ones(2, 3) * case + 1 if case % 2 == odd else None}

    report = verify(step, inputs)
    assert report.blamed == ("image",), report
    assert "image was" in report.findings[0].because


def test_an_output_of_which_a_part_is_not_written() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:, 0] = x[:, 0]
        return out

    assert verify(step, lambda case: {"x": batches(case)["x"]}).blamed == ("memory pool",)


def test_pad_rows_do_not_count_where_real_names_other_things() -> None:
    """`real` names the state only: which rows of the output count, the oracle's shape says."""

    class Stale:
        def __init__(self) -> None:
            self.kv = torch.randn(9, 3)
            self.state = {"kv": self.kv}
            self.buffers = {"x": torch.zeros(6, 3), "slots": torch.full((6,), 8)}

        def refresh(self, inputs: dict[str, Any]) -> None:
            n = len(inputs["x"])
            self.buffers["x"][:n] = inputs["x"]  # the rest is stale, and nobody minds
            self.buffers["slots"][:n] = inputs["slots"]
            self.buffers["slots"][n:] = 8

        def run(self) -> torch.Tensor:
            self.kv.index_copy_(0, self.buffers["slots"], self.buffers["x"])
            return self.buffers["x"] * 2

        def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
            self.kv.index_copy_(0, inputs["slots"], inputs["x"])
            return inputs["x"] * 2

        def real(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return {"kv": slice(0, 8)}

    report = verify(Stale(), scatter)
    assert report.ok, report


def test_pad_values_and_aliases_and_nothing_at_all() -> None:
    """What is said where the padded step differs from the oracle."""

    def last(ids: torch.Tensor) -> torch.Tensor:
        return ids.cumsum(0)[-1:] * 2

    padded = verify(last, lambda case: {"ids": torch.arange(1, 6 - case)}, pad={"ids": 3})
    assert padded.blamed == ("ids",)
    scratch = torch.zeros(4, 3)

    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = scratch.copy_(x)
        return first, scratch.mul_(2) + 0

    x = lambda case: {"x": batches(case)["x"]}  # noqa: E731
    assert verify(twice, x, eager=lambda x: (x, x * 2)).blamed == ("scratch",)
    other = verify(lambda x: x + 1, x, eager=lambda x: x + 2)
    assert other.blamed == ()
    assert "nothing is padded" in other.findings[0].because


def test_an_error_names_the_line() -> None:
    report = verify(lambda x: x * int(x.sum()), lambda case: {"x": batches(case)["x"]})
    assert report.findings[0].check == "capture"
    assert "test_verify_reach.py" in report.findings[0].text
    assert "int(x.sum())" in report.findings[0].text
    assert own_line(ValueError("never raised")) == ""


# -- what grows


class Growing:
    """Scratch of the host that is allocated for the largest batch so far, or at once for the largest of all."""

    def __init__(self, rows: int) -> None:
        self.buffers = {"x": torch.zeros(8, 3)}
        self.scratch = torch.zeros(rows, 3)
        self.net = torch.nn.Linear(3, 3)

    def refresh(self, inputs: dict[str, Any]) -> None:
        n = len(inputs["x"])
        if n > len(self.scratch):
            self.scratch = torch.zeros(n, 3)
        self.scratch.fill_(inputs["bias"])
        self.buffers["x"].zero_()
        self.buffers["x"][:n] = inputs["x"]
        self.net.weight.data = self.net.weight.data + 0  # moves, and nobody reads it

    def run(self) -> torch.Tensor:
        return self.buffers["x"] + self.scratch[:1]

    def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["x"] + inputs["bias"]


@pytest.mark.parametrize("rows", [1, 8])
def test_what_grows_after_a_capture(rows: int) -> None:
    def inputs(case: int) -> dict[str, Any]:
        return {"x": torch.randn((2, 4, 8, 3)[case], 3), "bias": float(case)}

    runner = Growing(rows)
    report = verify(runner, inputs)
    assert report.blamed == (("self.scratch",) if rows == 1 else ()), report
    assert len(runner.scratch) == 8
    assert isinstance(runner.net.weight, torch.nn.Parameter), "what was put back for a capture is not left there"
