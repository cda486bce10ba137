"""What counts as a value of the host, a copy of it, and when two are the same."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphrt.testing.verify_report import differing, has_memory

SCALARS = (
    int, float, bool, str, bytes, complex, type(None), range, slice, enum.Enum, torch.dtype, torch.device,
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip
_SURELY_LEAVES = frozenset(
    {int, float, bool, str, bytes, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device}
)
NEVER_LEAVES = frozenset({dict, type, types.FunctionType, types.MethodType, functools.partial})
"""Types of most values: one look tells of these what else takes a dozen."""
_ARRAYS = (np.ndarray, array.array, bytearray)
SEQUENCES = (list, tuple, set, frozenset, collections.deque)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Where a random generator of Python or numpy stands."""

    state: bytes

    def __repr__(self) -> str:
        return "at one place of its numbers"


@dataclass(frozen=True, slots=True)
class Keys:
    """What a dict, or an object's attributes, had entries for."""

    keys: frozenset[Any]


@dataclass(frozen=True, slots=True)
class Items:
    """What a list, a set or an array held. `owner`: its id. Others may share that object, or its memory."""

    owner: int
    held: Any

    def __repr__(self) -> str:
        return repr(self.held)


def is_same_object(old: Any, new: Any) -> bool:
    """Whether two references lead to one object, or to one method of one."""
    if isinstance(old, types.MethodType) and isinstance(new, types.MethodType):
        return old.__self__ is new.__self__ and old.__func__ is new.__func__
    return old is new


def copied(value: Any) -> Any:
    """A leaf that does not change when the step changes its own in place; tensors are not copied."""
    return copy.copy(value) if isinstance(value, (*_ARRAYS, list, set, collections.deque)) else value


def same(old: Any, new: Any, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two values are of one type and value: tensors and arrays by what they hold, containers by their items.

    within   the containers that these two lie in, by their ids: one that leads back to itself is compared once
    """
    if old is new or (id(old), id(new)) in within:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, torch.Tensor):
        alike = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
        return alike and has_memory(old) and has_memory(new) and not bool(differing(old, new).any())
    if isinstance(old, np.ndarray):
        return old.dtype == new.dtype and np.array_equal(old, new, equal_nan=old.dtype.kind in "fc")
    within |= {(id(old), id(new))}
    if isinstance(old, Mapping):
        return old.keys() == new.keys() and all(same(value, new[key], within) for key, value in old.items())
    if isinstance(old, (list, tuple, collections.deque)):
        return len(old) == len(new) and all(same(*pair, within) for pair in zip(old, new, strict=True))
    if dataclasses.is_dataclass(old) and not isinstance(old, type):
        names = {field.name for field in dataclasses.fields(old)} | {*getattr(old, "__dict__", ())}
        return all(same(getattr(old, name, None), getattr(new, name, None), within) for name in sorted(names))
    try:
        return bool(old == new or (old != old and new != new))
    except Exception:  # a comparison of somebody else's class
        return False


def is_fixed(value: Any) -> bool:
    """Whether it is a number, a text or the like, or a tuple or frozenset of them: nothing that changes in place."""
    if isinstance(value, (tuple, frozenset)):
        return all(isinstance(item, SCALARS) for item in value)
    return isinstance(value, (*SCALARS, np.generic))


def is_value(value: Any) -> bool:
    """Whether it is a number, a text, an array, or a container of them: what a tensor could hold."""
    if isinstance(value, (torch.Tensor, type(None))):
        return False
    return is_leaf(value) or isinstance(value, (dict, Keys, Drawn, Items))


def is_leaf(value: Any) -> bool:
    kind = type(value)
    if kind in _SURELY_LEAVES or kind in NEVER_LEAVES:
        return kind in _SURELY_LEAVES
    if isinstance(value, (*SCALARS, torch.Tensor, *_ARRAYS, np.generic)):
        return True
    return isinstance(value, SEQUENCES) and all(isinstance(item, SCALARS) for item in value)
