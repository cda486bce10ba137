"""The places where Python keeps values: what is found, put back and left alone."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from graphrt.testing.verify_host import as_now, assign, places, rewritten, written_tensors
from graphrt.testing.verify_slots import slots
from graphrt.testing.verify_values import Drawn


def test_values_are_put_back_and_undone() -> None:
    kept = SimpleNamespace(items=[1], pair=(1, torch.ones(2)), table={"a": 1}, rng=random.Random(1))
    items, ones = kept.items, kept.pair[1]
    assert any(isinstance(held, Drawn) for _, held in places(kept, "k").values())

    def change() -> None:
        kept.items.append(2)
        kept.pair = (2, torch.zeros(2))
        kept.table["b"] = 2
        kept.rng.random()

    old = rewritten(kept, "k", change)
    assert {held.path for held in old} == {"k.items", "k.pair", "k.table", "k.rng"}
    state = kept.rng.getstate()
    now = as_now(kept, "k", old)
    for held in old:
        held.put_back()
    assert (kept.items, kept.pair[0], kept.table) == ([1], 1, {"a": 1})
    assert kept.pair[1] is ones
    assert kept.rng.getstate() != state
    assert kept.items is items
    for held in now:
        held.put_back()
    assert kept.items is items
    assert kept.items == [1, 2]
    assert kept.pair[0] == 2
    assert kept.table == {"a": 1, "b": 2}
    assert kept.rng.getstate() == state


def test_tensors_that_count_no_versions_are_seen() -> None:
    with torch.inference_mode():
        kept = SimpleNamespace(made=torch.zeros(3), other=torch.zeros(3))
        assert set(written_tensors(kept, "k", lambda: kept.made.add_(1))) == {"k.made"}


def test_code_of_packages_is_not_searched() -> None:
    def step() -> Any:
        return np.array(functools.reduce(max, [1])), torch.nn.functional.relu, dataclasses.replace

    assert not [slot.path for slot in slots(step, "step") if not slot.path.startswith("step")]


def test_each_path_is_one_place() -> None:
    """An attribute that a class takes from its base and replaces, and names that two functions share."""

    class Base:
        table: Any = {"base": 1}  # noqa: RUF012

    class Derived(Base):
        table = {"own": 2}  # noqa: RUF012

    def closing(over: int) -> Callable[[], int]:
        return lambda: over

    kept = SimpleNamespace(derived=Derived(), first=closing(1), second=closing(2))
    found = [slot.path for slot in slots(kept, "k")]
    assert len(found) == len(set(found))
    assert "k.derived.table['own']" in found
    assert "k.derived.table['base']" not in found
    assert found.count("over") == 1


def test_what_lets_nobody_assign_is_left() -> None:
    class Fixed:
        __slots__ = ("n",)

        def __init__(self) -> None:
            object.__setattr__(self, "n", 1)

        @property
        def twice(self) -> int:
            return 2

    fixed = Fixed()
    assert assign(fixed, "f", {"f.n": 2, "f.twice": 3})
    assert fixed.n == 2
