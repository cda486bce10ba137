"""Programs under the Triton interpreter in any order, as a device runs them; its repairs are kernels/interpreter.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime.interpreter import InterpreterBuilder


@contextmanager
def shuffled_programs(seed: int = 0) -> Iterator[None]:
    """Within, the interpreter runs the programs of each launch in a random order, each whole.

    By itself it runs them by their ids, and what programs leave each other in memory is then never overwritten by one
    of a higher id that a device would have run first. Kernels whose programs wait for each other do not end.
    """
    set_grid_dim, set_grid_idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    chance = random.Random(seed)
    order: dict[tuple[int, ...], tuple[int, ...]] = {}

    def draw(self: Any, *dim: int) -> None:
        set_grid_dim(self, *dim)
        programs = list(itertools.product(*(range(n) for n in dim)))
        order.clear()
        order.update(zip(programs, chance.sample(programs, len(programs)), strict=True))

    def move(self: Any, *program: int) -> None:
        set_grid_idx(self, *order[program])

    with mock.patch.multiple(InterpreterBuilder, set_grid_dim=draw, set_grid_idx=move):
        yield
