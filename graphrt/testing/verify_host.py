"""Values of the host that a step can see, as they were: what changed meanwhile, and what is put back for a trial.

A graph freezes them as they are at capture. `HostValues.take(step)` remembers them, `changed(step)` says which are
others now, and `assigned` puts old ones back for a block, so that an eager run shows what they would have done.
Only values and addresses are kept: nothing that the caller drops stays alive by this.
"""

from __future__ import annotations

import array
import collections
import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphrt.kernels.checks import shown
from graphrt.testing.verify_report import differing
from graphrt.testing.verify_slots import NO_VALUES, OTHER, Keys, copied, is_fixed, same, slots

_LARGEST_KEPT = 1 << 20  # bytes of a tensor whose contents are kept, as an old address alone cannot be tried again
_MOST_KEPT = {False: 64 << 20, True: 16 << 20}  # of all; True: of parameters


@dataclass(frozen=True, slots=True)
class _Old:
    """A tensor as it was: its contents too where it is small."""

    address: int
    shape: tuple[int, ...]
    contents: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is another one than when it was taken. `old` can be assigned at `path`, `text` says both."""

    path: str
    name: str
    old: Any
    text: str
    is_tensor: bool = False


class HostValues:
    """The values as they were when they were taken."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    def take(cls, root: Any, name: str) -> HostValues:
        values: dict[str, Any] = {}
        room = dict(_MOST_KEPT)
        for slot in slots(root, name):
            value = slot.value
            if isinstance(value, torch.Tensor):
                values[slot.path] = _Old(value.data_ptr(), tuple(value.shape), _contents(value, room))
            elif not isinstance(value, NO_VALUES):
                values[slot.path] = slot.copy()
        return cls(values)

    def contents(self, path: str) -> torch.Tensor | None:
        """What a tensor held, where it was kept."""
        old = self._values.get(path)
        return old.contents if isinstance(old, _Old) else None

    def changed(self, root: Any, name: str, *, entries: bool = False) -> list[Change]:
        """What holds another value now, and could be put back.

        entries   also dicts and objects that have entries which they had not
        """
        found = []
        for slot in slots(root, name):
            old, new = self._values.get(slot.path, Keys), slot.value
            if old is Keys or old is OTHER or slot.set is None:
                continue
            elif isinstance(old, Keys):
                if entries and isinstance(new, dict) and (extra := [key for key in new if key not in old.keys]):
                    names = [entry(slot.path, key) for key in extra]
                    text = f"{', '.join(names[:3])} {'was' if len(extra) == 1 else 'were'} made"
                    found.append(Change(slot.path, names[0] if len(extra) == 1 else slot.path, old, text))
            elif isinstance(old, _Old):
                if isinstance(new, torch.Tensor) and (old.address, old.shape) == (new.data_ptr(), tuple(new.shape)):
                    continue
                text = f"another tensor stands in {slot.path} than at capture; the graph reads the old one's memory"
                found.append(Change(slot.path, slot.path, old.contents, text, True))
            elif isinstance(new, torch.Tensor) or not same(old, new):
                now = "a tensor" if isinstance(new, torch.Tensor) else _short(new)
                text = f"{slot.path} was {_short(old)} and is {now} now"
                found.append(Change(slot.path, slot.path, old, text))
        return found


@contextmanager
def assigned(root: Any, name: str, values: Mapping[str, Any]) -> Iterator[None]:
    """The given values stand in their places until the block ends."""
    with ExitStack() as stack:
        for put, old in assign(root, name, values):
            stack.callback(put, old)
        yield


def assign(root: Any, name: str, values: Mapping[str, Any]) -> list[tuple[Callable[[Any], None], Any]]:
    """Put the given values in their places. Returns what undoes it: setters, and what stood there."""
    undo = []
    for slot in list(slots(root, name)) if values else ():
        if slot.path in values and slot.set is not None:
            old = dict(slot.value) if isinstance(slot.value, dict) else slot.value
            with suppress(AttributeError, TypeError):  # an object that lets nobody assign
                slot.set(copied(values[slot.path]))
                undo.append((slot.set, old))
    return undo


def written_tensors(root: Any, name: str, during: Callable[[], object]) -> dict[str, torch.Tensor]:
    """The tensors, by path, that were changed in place while `during` ran."""

    before: dict[str, tuple[torch.Tensor, int, torch.Tensor | None]] = {}
    room, room_of_uncounted = dict(_MOST_KEPT), dict.fromkeys(_MOST_KEPT, sys.maxsize)
    for slot in slots(root, name):
        tensor = slot.value
        if isinstance(tensor, torch.Tensor):
            # `.data`, kernels and some ops write without a version. Tensors of inference mode count none at all.
            kept = _contents(tensor, room_of_uncounted if tensor.is_inference() else room)
            before[slot.path] = tensor, _version(tensor), kept
    during()

    def written(tensor: torch.Tensor, version: int, old: torch.Tensor | None) -> bool:
        if version != _version(tensor):
            return True
        return old is not None and (tensor.shape != old.shape or bool(differing(tensor.detach(), old).any()))

    return {path: entry[0] for path, entry in before.items() if written(*entry)}


def _contents(tensor: torch.Tensor, room: dict[bool, int]) -> torch.Tensor | None:
    """A copy of a small tensor, as long as there is room for its kind; see `_MOST_KEPT`."""
    size, kind = tensor.numel() * tensor.element_size(), isinstance(tensor, torch.nn.Parameter)
    if size > min(_LARGEST_KEPT, room[kind]):
        return None
    room[kind] -= size
    return tensor.detach().clone()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def values_at(root: Any, name: str, paths: Collection[str] | None = None) -> dict[str, Any]:
    """The values at these paths, or at all, for `assign`: copies, and tensors themselves."""
    return {
        slot.path: slot.copy()
        for slot in (slots(root, name) if paths is None or paths else ())
        if (paths is None or slot.path in paths) and not isinstance(slot.value, NO_VALUES)
    }


def numbers_at(root: Any, name: str, paths: Collection[str] | None = None) -> dict[str, Any]:
    """Those of `values_at` that cannot change in place: numbers, texts, and tuples of them."""
    return {path: value for path, value in values_at(root, name, paths).items() if is_fixed(value)}


@contextmanager
def unchanged(root: Any, name: str) -> Iterator[None]:
    """What the block does to the host is undone: what stands where, and what is in lists, sets, arrays and dicts."""
    before = [(slot, _items(slot.value)) for slot in slots(root, name)]
    try:
        yield
    finally:
        for slot, items in before:
            _put_items(slot.value, items)
        now = {slot.path: slot.value for slot in slots(root, name)}
        for slot, _ in before:
            found = now.get(slot.path, slot.value)
            if slot.set is not None and not isinstance(slot.value, dict) and found is not slot.value:
                with suppress(AttributeError, TypeError):  # an object that lets nobody assign
                    slot.set(slot.value)


def _items(value: Any) -> Any:
    kinds = (dict, list, set, collections.deque, np.ndarray, array.array)
    return copy.copy(value) if isinstance(value, kinds) else None


def _put_items(value: Any, items: Any) -> None:
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = items
    elif isinstance(value, array.array):
        value[:] = items
    elif isinstance(value, (list, collections.deque)) and not _same_objects(value, items):
        value.clear()
        value.extend(items)
    elif isinstance(value, dict):
        if not (_same_objects(value, items) and _same_objects(value.values(), items.values())):
            value.clear()
            value.update(items)
    elif isinstance(value, set) and value != items:
        value.clear()
        value.update(items)


def _same_objects(have: Collection[Any], want: Collection[Any]) -> bool:
    return len(have) == len(want) and all(a is b for a, b in zip(have, want, strict=True))


def rewritten_values(root: Any, name: str, during: Callable[[], object]) -> dict[str, Any]:
    """The host values, by path, that are others after `during` ran, as they were: for `assign`."""
    before = values_at(root, name)
    during()
    found = {}
    for slot in slots(root, name):
        old, new = before.get(slot.path, Keys), slot.value
        if old is Keys or old is OTHER or slot.set is None:
            continue
        if isinstance(old, Keys):
            other = isinstance(new, dict) and not old.keys.issuperset(new)
        elif isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
            other = old is not new
        else:
            other = not same(old, new)
        if other:
            found[slot.path] = old
    return found


def generators(root: Any, name: str) -> list[tuple[torch.Generator, torch.Tensor]]:
    """torch's generators within reach, and where they stand."""
    return [(s.value, s.value.get_state()) for s in slots(root, name) if isinstance(s.value, torch.Generator)]


def caches(root: Any, name: str) -> list[tuple[str, Any]]:
    """The functions with a cache (functools) that are within reach and hold results, but for those of packages."""
    found = [(s.path, s.value) for s in slots(root, name) if isinstance(s.value, functools._lru_cache_wrapper)]
    return [(path, function) for path, function in found if function.cache_info().currsize and _is_own_code(function)]


def _is_own_code(function: Any) -> bool:
    path = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return "site-packages" not in path


def entry(path: str, key: Any) -> str:
    """The path of an entry of a dict, or of an attribute of an object, whose path ends with a dot."""
    return f"{path}{key}" if path.endswith(".") else f"{path}[{key!r}]"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
