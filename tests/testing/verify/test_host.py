"""Python values: where verify finds them, what it blames, and that it restores them."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.testing.verify import verify
from graphrt.testing.verify.host import HostValues, assigned, unchanged, written_tensors
from tests.support import forward_context
from tests.support.forward_context import current


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
    """Multiplies by a Python value, or by a tensor that refresh() fills."""

    def __init__(self, put: Callable[[Any, int], None], get: Callable[[Any], Any], injected: bool) -> None:
        self.buffers = {"x": torch.zeros(4, 3)}
        if not injected:
            self.buffers["count"] = torch.ones(())
        self.kept: Any = None
        self.layer = torch.nn.Linear(3, 3, bias=False)
        self.injected, self._put, self._get = injected, put, get

    def refresh(self, inputs: dict[str, Any]) -> None:
        self.buffers["x"].copy_(inputs["x"])
        if not self.injected:
            self.buffers["count"].fill_(inputs["count"])
        self._put(self, inputs["count"])

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * (self._get(self) if self.injected else self.buffers["count"])


def batches(case: int) -> dict[str, Any]:
    return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(case)), "count": case + 1}


def keep(make: Callable[[int], Any]) -> Callable[[Any, int], None]:
    return lambda self, count: setattr(self, "kept", make(count))


LOCATIONS: dict[str, tuple[Callable[[Any, int], None], Callable[[Any], Any]]] = {
    "forward_context.limit": (
        lambda self, count: setattr(forward_context, "limit", count),
        lambda self: forward_context.limit,
    ),
    "tests.support.forward_context._current['count']": (
        lambda self, count: forward_context.set_current({"count": torch.tensor(count)}),
        lambda self: current()["count"],
    ),
    "Holder.number": (lambda self, count: setattr(Holder, "number", count), lambda self: Holder.number),
    "self.layer.weight": (
        lambda self, count: setattr(self.layer.weight, "data", torch.full((3, 3), float(count))),
        lambda self: self.layer.weight[0],
    ),
    "self.layer.training": (
        lambda self, count: self.layer.train(count % 2 == 0) and None,
        lambda self: 1 + self.layer.training,
    ),
    "self.kept.mode": (keep(lambda count: Frozen(Mode(1 + count % 2))), lambda self: self.kept.mode.value),
    "self.kept['a'][0].depth": (keep(lambda count: {"a": [Slotted(count)]}), lambda self: self.kept["a"][0].depth),
    "self.kept": (keep(lambda count: slice(0, count)), lambda self: self.kept.stop),
    "self.kept ": (keep(lambda count: {count}), lambda self: max(self.kept)),
    "self.kept  ": (keep(lambda count: deque([9, count])), lambda self: self.kept[-1]),
    "self.kept   ": (keep(lambda count: np.array([count])), lambda self: int(self.kept[0])),
    "self.kept    ": (
        keep(lambda count: torch.relu if count % 2 else torch.tanh),
        lambda self: self.kept(torch.ones(())),
    ),
}


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_python_value_that_a_graph_froze_is_blamed_by_its_location(location: str) -> None:
    put, get = LOCATIONS[location]
    injected = verify(Runner(put, get, True), batches)
    assert injected.blamed == (location.strip(),), injected
    clean = verify(Runner(put, get, False), batches)
    assert clean.ok, clean


def test_a_value_of_the_first_batch_is_blamed_next_to_a_large_dict() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vocabulary = {f"token {at}": at for at in range(60_000)}
            self.kept: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "scale" not in self.kept:
                self.kept["scale"] = x[0].abs().max().clone()
            return x * self.kept["scale"]

    report = verify(Module(), lambda case: {"x": batches(case)["x"][: 4 - case % 2]})
    assert {finding.blamed for finding in report.findings} == {("step.kept['scale']",)}, str(report)


# -- values that run() changes


class Counting:
    """Adds a value that each run changes."""

    def __init__(self, count: Callable[[Any], Any]) -> None:
        self._count = count
        self.steps, self.history, self.entries = 0, [0], {0: 0}
        self.a: Any = torch.zeros(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self._count(self)


def listed(self: Any) -> int:
    self.history.append(len(self.history))
    return self.history[-1]


def joined(self: Any) -> torch.Tensor:
    self.a = self.a + 1
    return self.a


def noted(self: Any) -> int:
    """Change much that no result depends on."""
    self.steps += 1
    self.history.append(self.steps)
    self.entries[self.steps] = time.perf_counter()
    self.a = torch.ones(3) * self.steps
    return 0


@pytest.mark.parametrize(("count", "blamed"), [(listed, "step.history"), (joined, "step.a"), (noted, None)])
def test_a_value_that_each_run_changes_is_blamed_if_a_result_depends_on_it(count: Any, blamed: str | None) -> None:
    step = Counting(count)
    report = verify(step, lambda case: {"x": batches(case)["x"]})
    assert report.blamed == ((blamed,) if blamed else ()), report
    assert report.ok is (blamed is None)
    assert (step.steps, step.history, step.entries) == (0, [0], {0: 0}), "restored"
    assert not step.a.any(), "restored"


@pytest.mark.parametrize("generator", [torch.Generator(), None])
def test_noise_drawn_once_is_blamed_and_noise_of_each_step_is_not(generator: torch.Generator | None) -> None:
    kept: list[Any] = [None]

    def frozen(x: torch.Tensor) -> torch.Tensor:
        kept[0] = torch.rand(3, generator=generator) if kept[0] is None else kept[0]
        return x + kept[0]

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, generator=generator)

    inputs = lambda case: {"x": batches(case)["x"]}  # noqa: E731
    assert verify(frozen, inputs).blamed == ("kept",)
    assert verify(drawn, inputs, eager=drawn).ok


# -- the search itself


class Host:
    def __init__(self) -> None:
        self.number, self.numbers, self.nested = 1, [1, 2], {"a": {"b": 2.0}}
        self.tensor, self.me = torch.ones(2), self


def test_changes_are_listed_and_undone() -> None:
    host = Host()
    numbers = host.numbers
    taken = HostValues.take(host, "self")
    assert taken.changed(host, "self", entries=True) == []
    with unchanged(host, "self"):
        host.number, host.tensor = 2, torch.zeros(2)
        host.numbers.append(3)
        host.nested["a"]["b"], host.nested["c"] = 3.0, 4
        host.later = 1
        changes = {change.path: change for change in taken.changed(host, "self", entries=True)}
        paths = {"self.number", "self.numbers", "self.tensor", "self.nested['a']['b']", "self.nested", "self."}
        assert set(changes) == paths
        assert changes["self.nested"].name == "self.nested['c']"
        with assigned(host, "self", {path: change.old for path, change in changes.items()}):
            assert (host.number, host.numbers, host.nested) == (1, [1, 2], {"a": {"b": 2.0}})
            assert torch.equal(host.tensor, torch.ones(2))
            assert not hasattr(host, "later")
        assert (host.number, host.numbers, host.later, host.nested["c"]) == (2, [1, 2, 3], 1, 4)
    assert taken.changed(host, "self", entries=True) == []
    assert host.numbers is numbers


def test_recorded_values_keep_no_tensor_alive() -> None:
    """On a device the memory of a dropped tensor is reused, which shows that a graph still reads it."""
    host = Host()
    taken = HostValues.take(host, "self")
    host.tensor = torch.zeros(2)
    (change,) = taken.changed(host, "self")
    assert (change.path, change.tensor, change.old.tolist()) == ("self.tensor", None, [1.0, 1.0])


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_written_in_place_are_found(inference: bool) -> None:
    """Tensors of inference mode have no version."""
    with torch.inference_mode(inference):
        host = Host()
        assert written_tensors(host, "self", lambda: None) == {}
        assert set(written_tensors(host, "self", lambda: host.tensor.add_(1))) == {"self.tensor"}


def freed() -> torch.Tensor:
    tensor = torch.randn(4)
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "meta": lambda: torch.empty(4, device="meta"),
    "lazy": torch.nn.parameter.UninitializedParameter,
    "packed": lambda: torch.empty(4, dtype=torch.uint4),
    "freed": freed,
}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_tensors_without_memory_are_listed_as_not_checked(kind: str) -> None:
    kept = {"one": WITHOUT_MEMORY[kind](), "view": torch.zeros(2, 3).t()}

    def step(x: torch.Tensor) -> torch.Tensor:
        assert kept
        return x * 2

    report = verify(step, lambda case: {"x": batches(case)["x"]})
    assert report.ok, str(report)
    assert report.not_checked["host values"].endswith(": kept['one']")
