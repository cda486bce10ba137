"""Inputs and steps for the tests of verify."""

from __future__ import annotations

from typing import Any

import torch

WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
COUNTS = (5, 2, 4, 5)


def rows(case: int, **more: Any) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(case)
    return {"x": torch.randn(COUNTS[case], 6, generator=rng), **more}


def silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ WEIGHT)


class Copies:
    """A subject that copies its inputs to buffers and clears the pad rows."""

    def __init__(self) -> None:
        self.buffers = {"x": torch.zeros(5, 6)}

    def refresh(self, inputs: dict[str, Any]) -> None:
        count = len(inputs["x"])
        self.buffers["x"][:count] = inputs["x"]
        self.buffers["x"][count:] = 0

    def run(self) -> Any:
        return silu(self.buffers["x"])
