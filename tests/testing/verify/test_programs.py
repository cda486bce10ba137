"""verify on generated programs: a random fault in a random step is found, and correct steps have no findings."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphrt.testing.verify import verify

ROWS, WIDTH, TABLE = 7, 5, 11
COUNTS = (7, 3, 5, 2, 7, 4)


class Program:
    """Named buffers, a random chain of torch ops over all of them, and host code that fills them.

    The chain mixes rows, so pad rows reach real ones: the correct program clears its pad rows.
    """

    def __init__(self, seed: int, fault: str = "") -> None:
        self.random, self.fault = random.Random(seed), fault
        rng = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(WIDTH, WIDTH, generator=rng) / WIDTH
        self.rows = torch.randn(TABLE, WIDTH, generator=rng)
        self.floats = [f"f{i}" for i in range(self.random.randint(1, 3))]
        self.ints = [f"i{i}" for i in range(self.random.randint(1, 2))]
        self.buffers: dict[str, torch.Tensor] = {name: torch.zeros(ROWS, WIDTH) for name in self.floats}
        self.buffers |= {name: torch.zeros(ROWS, dtype=torch.int64) for name in self.ints}
        self.names = list(self.buffers)
        self.random.shuffle(self.names)
        self.ops = [self.random.randrange(6) for _ in range(self.random.randint(3, 9))]
        self.victim = self.random.choice(self.names)
        self.totals = torch.zeros(ROWS, WIDTH)
        self.state = {"totals": self.totals} if self.random.random() < 0.5 else {}
        self.factor, self.threshold, self.big = 1.0, 0, False
        self.cached: torch.Tensor | None = None
        self.memo: dict[int, float] = {}
        self.calls = 0

    # -- host code, with the fault

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        self.calls += 1
        count = len(inputs[self.names[0]])
        for name in self.names:
            hit, buffer = name == self.victim, self.buffers[name]
            if hit and self.fault == "skipped" and self.calls % 2:
                continue
            if hit and self.fault == "replaced":
                buffer = self.buffers[name] = torch.zeros_like(buffer)
            buffer[:count] = inputs[name]
            if not (hit and self.fault == "tail"):
                buffer[count:] = 0
            if hit and self.fault == "one row short":
                buffer[count - 1] = 0
        self.cached = None
        mean = float(inputs[self.floats[0]].mean())
        self.factor = 1 + mean if self.fault == "number" else 1.0
        self.big = self.fault == "branch" and mean > 0
        self.threshold = count if self.fault == "rows" else ROWS
        if self.fault == "memo":
            self.factor = self.memo.setdefault(0, 1 + mean)

    # -- the captured body

    def run(self) -> torch.Tensor:
        x = torch.zeros(ROWS, WIDTH)
        for at, name in enumerate(self.names):
            value = self.buffers[name]
            if self.fault == "outside" and name == self.victim:
                if self.cached is None:
                    self.cached = value + 0
                value = self.cached
            value = self.rows[value] if name in self.ints else value
            x = self.op(self.ops[at % len(self.ops)], x + value)
        for op in self.ops:
            x = self.op(op, x)
        if self.fault == "unwritten":
            scratch = torch.empty(ROWS, WIDTH)
            scratch[:2] = x[:2]
            x = x + scratch.sum(0)
        x = x + x[: self.threshold].sum(0)
        x = torch.cos(x) if self.big else torch.sin(x)
        if self.state:
            self.totals += x
        return x * self.factor

    def op(self, kind: int, x: torch.Tensor) -> torch.Tensor:
        ops = (
            lambda: torch.tanh(x),
            lambda: x @ self.weight + x,
            lambda: x + x.roll(1, 1),
            lambda: torch.where(x > 0, x, x * 0.5),
            lambda: x + 0.1 * x.mean(0),
            lambda: torch.cat([x[:, 1:], x[:, :1]], 1) * 1.1,
        )
        return ops[kind]()

    # -- for verify

    def real(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"out": slice(0, len(inputs[self.names[0]]))}

    def make_inputs(self, case: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(1000 + case)
        inputs: dict[str, Any] = {name: torch.randn(COUNTS[case], WIDTH, generator=rng) for name in self.floats}
        return inputs | {name: torch.randint(1, TABLE, (COUNTS[case],), generator=rng) for name in self.ints}

    def clean(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Run the oracle: a new program without the fault."""
        other = Program.__new__(Program)
        other.__dict__.update(self.__dict__)
        other.buffers = {name: torch.zeros_like(tensor) for name, tensor in self.buffers.items()}
        other.fault, other.memo, other.state = "", {}, {}
        other.refresh(inputs)
        return other.run()[: len(inputs[self.names[0]])]


SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_correct_program_has_no_findings(seed: int) -> None:
    program = Program(seed)
    report = verify(program, program.make_inputs, cases=len(COUNTS), eager=program.clean if seed % 2 else None)
    assert report.ok, str(report)
    assert report.replays >= 3 * 3 * len(COUNTS)


EXPECTED = {
    "tail": "{victim}",
    "skipped": "{victim}",
    "replaced": "{victim}",
    "number": "self.factor",
    "branch": "self.big",
    "rows": "self.threshold",
    "outside": "self.cached",
    "memo": "self.memo[0]",
    "unwritten": "memory pool",
}
"""The name that must be blamed by fault, without an oracle."""


@pytest.mark.parametrize("fault", EXPECTED)
@pytest.mark.parametrize("seed", range(4))
def test_an_injected_fault_is_blamed(fault: str, seed: int) -> None:
    program = Program(seed, fault)
    report = verify(program, program.make_inputs, cases=len(COUNTS))
    assert not report.ok
    assert EXPECTED[fault].format(victim=program.victim) in report.blamed, str(report)


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_of_every_run_needs_an_oracle(seed: int) -> None:
    """The last real row is also lost in the eager run."""
    program = Program(seed, "one row short")
    assert verify(program, program.make_inputs, cases=len(COUNTS)).ok
    report = verify(program, program.make_inputs, cases=len(COUNTS), eager=program.clean)
    assert {finding.check for finding in report.findings} == {"padding"}
    assert report.blamed == (program.victim,), str(report)


@pytest.mark.parametrize("seed", range(4))
def test_two_numbers_at_once_are_both_blamed(seed: int) -> None:
    class Two(Program):
        def refresh(self, inputs: Mapping[str, Any]) -> None:
            super().refresh(inputs)
            self.factor, self.big = 1.5 + float(inputs[self.floats[0]].sum()), bool(len(inputs[self.names[0]]) > 4)

    program = Two(seed)
    report = verify(program, program.make_inputs, cases=len(COUNTS))
    assert {"self.factor", "self.big"} <= set(report.blamed), str(report)
