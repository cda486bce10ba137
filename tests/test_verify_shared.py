"""`verify` leaves what objects share shared, blames the right one of several of a name, and takes a skip for none."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.testing.verify import verify

Step = Callable[..., torch.Tensor]


def rows(number: int) -> torch.Tensor:
    return torch.randn((8, 3, 5, 8)[number], 6, generator=torch.Generator().manual_seed(number))


def full(number: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


class ArrayOverTensor:
    """Its host staging is a tensor, and an array over the same memory."""

    def __init__(self) -> None:
        self.staging = torch.zeros(8, 6)
        self.words = self.staging.numpy()
        self.buffers = {"x": torch.zeros(8, 6)}

    def refresh(self, inputs: Any) -> None:
        count = len(inputs["x"])
        self.words[:count] = inputs["x"].numpy()
        self.words[count:] = 0
        self.buffers["x"].copy_(self.staging)

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * 2

    def eager(self, inputs: Any) -> torch.Tensor:
        return inputs["x"] * 2


class ViewOfArray:
    """Its positions are a view of a packed block."""

    def __init__(self) -> None:
        self.block = np.zeros((2, 6), np.float32)
        self.positions = self.block[0]
        self.buffers = {"block": torch.zeros(2, 6)}

    def refresh(self, inputs: Any) -> None:
        self.block[:] = 0
        self.positions[:] = inputs["x"][0]
        self.buffers["block"].copy_(torch.from_numpy(self.block))

    def run(self) -> torch.Tensor:
        return self.buffers["block"][0] * 2

    def eager(self, inputs: Any) -> torch.Tensor:
        return inputs["x"][0] * 2


class ListOfTwo:
    """Its list of rows is its scheduler's."""

    def __init__(self) -> None:
        self.scheduler = types.SimpleNamespace(rows=[0.0] * 6)
        self.rows = self.scheduler.rows
        self.buffers = {"rows": torch.zeros(6)}

    def refresh(self, inputs: Any) -> None:
        self.scheduler.rows[:] = inputs["x"][0].tolist()
        self.buffers["rows"].copy_(torch.tensor(self.rows))

    def run(self) -> torch.Tensor:
        return self.buffers["rows"] * 2

    def eager(self, inputs: Any) -> torch.Tensor:
        return inputs["x"][0] * 2


@pytest.mark.parametrize("kind", [ArrayOverTensor, ViewOfArray, ListOfTwo])
def test_what_two_names_share_stays_shared(kind: Callable[[], Any]) -> None:
    report = verify(kind(), lambda number: {"x": rows(number)})
    assert report.ok, report


def layer(is_on: bool) -> Step:
    scale: torch.Tensor | None = None

    def apply(x: torch.Tensor) -> torch.Tensor:
        nonlocal scale
        if not is_on:
            return x
        if scale is None:
            scale = x.sum(1, keepdim=True).cos()  # of the first batch, for ever
        return x * scale

    return apply


def of_layers(*on: bool) -> Step:
    layers = [layer(is_on) for is_on in on]

    def step(x: torch.Tensor) -> torch.Tensor:
        for apply in layers:
            x = apply(x)
        return x

    return step


def test_the_cells_of_several_closures_are_told_apart() -> None:
    assert verify(of_layers(True, False), lambda number: {"x": full(number)}).blamed == ("scale",)
    assert verify(of_layers(False, True), lambda number: {"x": full(number)}).blamed == ("layers[1]'s scale",)


class SkipsWhatIsThere:
    """It fills a buffer that nobody else writes when its contents are to change, and not else."""

    def __init__(self) -> None:
        self.last: list[int] | None = None
        self.buffers = {"x": torch.zeros(8, 6), "ids": torch.zeros(8)}

    def refresh(self, inputs: Any) -> None:
        self.buffers["x"].copy_(inputs["x"])
        if self.last != inputs["ids"]:
            self.buffers["ids"].copy_(torch.tensor(inputs["ids"]))
            self.last = inputs["ids"]

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * self.buffers["ids"][:, None]

    def eager(self, inputs: Any) -> torch.Tensor:
        return inputs["x"] * torch.tensor(inputs["ids"])[:, None]


def test_a_refresh_that_skips_what_is_there_is_silent() -> None:
    ids = [list(range(8)), list(range(8)), list(range(7, -1, -1)), list(range(8))]
    report = verify(SkipsWhatIsThere(), lambda number: {"x": full(number), "ids": ids[number]})
    assert report.ok, report


def set_memory(buffer: torch.Tensor, new: torch.Tensor) -> None:
    buffer.set_(new)


def set_data(buffer: torch.Tensor, new: torch.Tensor) -> None:
    buffer.data = new


def set_shape(buffer: torch.Tensor, new: torch.Tensor) -> None:
    buffer.resize_(int(new[:, 0].count_nonzero()), 6).copy_(new[: len(buffer)])


@pytest.mark.parametrize("change", [set_memory, set_data, set_shape])
def test_a_buffer_that_gets_other_memory_or_another_shape_is_blamed(change: Callable[..., None]) -> None:
    """Though it is the same object."""

    class Runner:
        def __init__(self) -> None:
            self.buffers = {"x": torch.zeros(8, 6)}

        def refresh(self, inputs: Any) -> None:
            new = torch.zeros(8, 6)
            new[: len(inputs["x"])] = inputs["x"]
            change(self.buffers["x"], new)

        def run(self) -> torch.Tensor:
            return self.buffers["x"] * 2

    (finding,) = verify(Runner(), lambda number: {"x": rows(number)}).findings
    assert finding.check == "replaced"
    assert finding.blamed == ("x",)
    assert "use copy_()" in str(finding)


def test_memory_of_empty_permuted_is_memory_of_empty() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_permuted((8, 6), (1, 0))
        out[:4] = x[:4]
        return out.sum(0)

    assert verify(step, lambda number: {"x": full(number)}).blamed == ("memory pool",)


def test_what_a_weak_reference_leads_to_is_looked_at() -> None:
    class Counter:
        calls = 0

    owner = Counter()
    weak = weakref.ref(owner)

    def step(x: torch.Tensor) -> torch.Tensor:
        counter = weak()
        assert counter is not None
        counter.calls += 1
        return x * counter.calls

    assert not verify(step, lambda number: {"x": full(number)}).ok


def test_two_results_of_a_name_are_an_error_of_the_step() -> None:
    def step(x: torch.Tensor) -> Any:
        return {"layer": {"0": x}, "layer.0": x + 1}

    (finding,) = verify(step, lambda number: {"x": full(number)}).findings
    assert "got two called 'layer.0'; rename one" in finding.text
