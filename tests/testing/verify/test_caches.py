"""Steps that keep tensors between runs: a cache whose key is complete is silent, an incomplete one is blamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphrt.step import Step
from graphrt.testing.verify import verify
from graphrt.testing.verify.runtime import verify_runtime
from tests.support.toy import ToyModel, make_rig

ROWS = (8, 3, 5, 8)


class WindowMasks:
    """Keeps one mask per number of rows, and a dict of the window for which each mask was filled.

    by_key     whether each number of rows has a mask of its own
    preset     windows for which masks exist before verify starts
    """

    def __init__(self, by_key: bool, preset: Mapping[int, int]) -> None:
        self.buffers = {"x": torch.zeros(8, 16), "mask": torch.zeros(8, 16)}
        self.by_key = by_key
        self.cache: dict[int, torch.Tensor] = {}
        self.made_for: dict[int, int] = {}
        for rows, window in preset.items():
            self.mask(rows, window)

    def mask(self, rows: int, window: int) -> torch.Tensor:
        key = rows if self.by_key else 0
        if key not in self.cache:
            self.cache[key] = torch.zeros(8, 16)
        if self.made_for.get(key) != window:
            self.cache[key].copy_((torch.arange(16) < window).float().expand(8, 16))
            self.made_for[key] = window
        return self.cache[key]

    def refresh(self, inputs: dict[str, Any]) -> None:
        rows = len(inputs["x"])
        self.buffers["x"].zero_()[:rows] = inputs["x"]
        self.buffers["mask"].copy_(self.mask(rows, inputs["window"]))

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * self.buffers["mask"]

    def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["x"] * (torch.arange(16) < inputs["window"])


def windows(case: int) -> dict[str, Any]:
    x = torch.randn(ROWS[case], 16, generator=torch.Generator().manual_seed(case))
    return {"x": x, "window": (4, 9, 9, 12)[case]}


@pytest.mark.parametrize("by_key", [True, False])
@pytest.mark.parametrize("preset", [{}, {8: 4}, {8: 7, 3: 2, 5: 9}], ids=["empty", "one", "all"])
def test_a_cache_beside_a_dict_of_what_it_holds_is_silent(by_key: bool, preset: dict[int, int]) -> None:
    step = WindowMasks(by_key, preset)
    report = verify(step, windows)
    assert report.ok, str(report)
    for case in (3, 0, 1):  # dict and cache still agree for the caller
        step.refresh(windows(case))
        assert torch.equal(step.run()[: ROWS[case]], step.eager(windows(case)))


@pytest.mark.parametrize("filled", [True, False], ids=["filled before", "empty"])
def test_a_cache_that_a_function_fills_on_first_use_is_silent(filled: bool) -> None:
    cache, made_for = {n: torch.zeros(16) for n in range(1, 9)}, dict[int, int]()

    def step(x: torch.Tensor, window: int) -> torch.Tensor:
        if made_for.get(len(x)) != window:
            cache[len(x)].copy_(torch.arange(16) < window)
            made_for[len(x)] = window
        return x * cache[len(x)]

    if filled:
        for rows in (8, 3, 5):
            step(torch.zeros(rows, 16), 9)
    report = verify(step, lambda case: windows(case) | {"window": 9})
    assert report.ok, str(report)
    assert torch.equal(step(torch.ones(8, 16), 9)[0], (torch.arange(16) < 9).float())


class ByLength(ToyModel):
    """Keeps a pair of tables for each number of tokens, as rotary embeddings do."""

    def forward(self, step: Step) -> torch.Tensor:
        tables = self.__dict__.setdefault("tables", {})
        count = len(step.positions)
        if count not in tables:
            at = torch.arange(count, dtype=torch.float32)[:, None]
            tables[count] = at.cos(), at.sin()
        cos, sin = tables[count]
        return super().forward(step) * (cos + sin)[step.logits_indices]


class Lazy(ToyModel):
    """Draws a weight on first use."""

    def forward(self, step: Step) -> torch.Tensor:
        if not hasattr(self, "shift"):
            self.shift = torch.randn(1)
        return super().forward(step) + self.shift


@pytest.mark.parametrize("kind", [ByLength, Lazy])
def test_a_model_that_keeps_tensors_of_no_input_is_silent(kind: type[ToyModel]) -> None:
    model = kind(torch.device("cpu"), torch.float32)
    report = verify_runtime(make_rig(torch.device("cpu"), model=model, fill=0.0).manager, count=5)
    assert report.ok, str(report)


class Turns:
    """refresh() fills the next of several tensors. The graph keeps reading the one of its capture."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.buffers = {"x": torch.zeros(8, 4)} | ({"read": torch.zeros(4)} if copies else {})
        self.ring: list[torch.Tensor] = [torch.zeros(4) for _ in range(3)]
        self.count, self.current = 0, self.ring[0]

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        self.buffers["x"].zero_()[: len(inputs["x"])] = inputs["x"]
        self.count += 1
        self.current = self.ring[self.count % 3]
        self.current.copy_(inputs["x"].sum(0))
        if self.copies:
            self.buffers["read"].copy_(self.current)

    def run(self) -> torch.Tensor:
        return self.buffers["x"] + (self.buffers["read"] if self.copies else self.current)

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"] + inputs["x"].sum(0)


def test_tensors_in_turn_are_blamed_unless_they_are_copied_to_one_buffer() -> None:
    def inputs(case: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(ROWS[case], 4, generator=torch.Generator().manual_seed(case))}

    report = verify(Turns(copies=False), inputs)
    assert {finding.check for finding in report.findings} == {"graph"}, str(report)
    assert "self.current" in report.blamed
    assert "self.current is a different tensor than at capture" in str(report)
    report = verify(Turns(copies=True), inputs)
    assert report.ok, str(report)
