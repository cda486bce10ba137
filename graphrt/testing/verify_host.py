"""Values of the host that a step can see: numbers, lists and tensors in its attributes, closure and globals, by path.

A graph freezes them as they are at capture. `HostValues.take(step)` remembers them, `changed(step)` says which are
others now, and `assigned` puts old ones back for a block, so that an eager run shows what they would have done.
Only values and addresses are kept: nothing that the caller drops stays alive by this.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MOST_SLOTS, _DEEPEST = 20_000, 8
_LARGEST_KEPT = 1 << 20  # bytes of a tensor whose contents are kept, as an old address alone cannot be tried again
_MOST_KEPT = 64 << 20
_SCALARS = (int, float, bool, str, complex, type(None))
_FOREIGN = frozenset({"builtins", "torch", "numpy", "triton", "cuda", "threading", "logging", "typing", "abc"})
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that holds a value: `set` is None where it cannot be assigned."""

    path: str
    value: Any
    set: Callable[[Any], None] | None


@dataclass(frozen=True, slots=True)
class _Old:
    """A tensor as it was: its contents too where it is small."""

    address: int
    shape: tuple[int, ...]
    contents: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Keys:
    """What a dict, or an object's attributes, had entries for."""

    keys: frozenset[Any]


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
        kept = 0
        for slot in slots(root, name):
            value = slot.value
            if isinstance(value, torch.Tensor):
                contents = None
                size = value.numel() * value.element_size()
                if not isinstance(value, torch.nn.Parameter) and size <= _LARGEST_KEPT and kept + size <= _MOST_KEPT:
                    contents, kept = value.clone(), kept + size
                values[slot.path] = _Old(value.data_ptr(), tuple(value.shape), contents)
            elif isinstance(value, dict):
                values[slot.path] = _Keys(frozenset(value))
            elif not isinstance(value, functools._lru_cache_wrapper):
                values[slot.path] = _copy(value)
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
            old, new = self._values.get(slot.path, _Keys), slot.value
            if old is _Keys or slot.set is None:
                continue
            elif isinstance(old, _Keys):
                if entries and isinstance(new, dict) and (extra := [key for key in new if key not in old.keys]):
                    names = [_entry(slot.path, key) for key in extra]
                    text = f"{', '.join(names[:3])} {'was' if len(extra) == 1 else 'were'} made"
                    found.append(Change(slot.path, names[0] if len(extra) == 1 else slot.path, old, text))
            elif isinstance(old, _Old):
                if isinstance(new, torch.Tensor) and (old.address, old.shape) == (new.data_ptr(), tuple(new.shape)):
                    continue
                text = f"another tensor stands in {slot.path} than at capture; the graph reads the old one's memory"
                found.append(Change(slot.path, slot.path, old.contents, text, True))
            elif isinstance(new, torch.Tensor) or not _same(old, new):
                shown = "a tensor" if isinstance(new, torch.Tensor) else _short(new)
                text = f"{slot.path} was {_short(old)} and is {shown} now"
                found.append(Change(slot.path, slot.path, old, text))
        return found


@contextmanager
def assigned(root: Any, name: str, values: Mapping[str, Any]) -> Iterator[None]:
    """The given values stand in their places until the block ends."""
    with ExitStack() as stack:
        if values:
            for slot in list(slots(root, name)):
                if slot.path in values and slot.set is not None:
                    stack.callback(slot.set, dict(slot.value) if isinstance(slot.value, dict) else slot.value)
                    slot.set(values[slot.path])
        yield


def written_tensors(root: Any, name: str, during: Callable[[], object]) -> dict[str, torch.Tensor]:
    """The tensors, by path, that were changed in place while `during` ran."""

    def versions() -> dict[str, tuple[torch.Tensor, int]]:
        tensors = {s.path: s.value for s in slots(root, name) if isinstance(s.value, torch.Tensor)}
        return {path: (t, t._version) for path, t in tensors.items() if not t.is_inference()}

    before = versions()
    during()
    after = versions()
    return {
        path: tensor
        for path, (tensor, version) in after.items()
        if path in before and before[path][0] is tensor and before[path][1] != version
    }


def caches(root: Any, name: str) -> list[tuple[str, Any]]:
    """The functions with a cache (functools) that are within reach and hold results, but for those of packages."""
    found = [(s.path, s.value) for s in slots(root, name) if isinstance(s.value, functools._lru_cache_wrapper)]
    return [(path, function) for path, function in found if function.cache_info().currsize and _is_own_code(function)]


def _is_own_code(function: Any) -> bool:
    path = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return "site-packages" not in path


def slots(root: Any, name: str) -> Iterator[Slot]:
    """Every value within reach of an object or a function, each once."""
    seen: set[int] = set()
    count = 0
    todo: list[tuple[Any, str, Callable[[Any], None] | None, int]] = [(root, name, None, 0)]
    while todo and count < _MOST_SLOTS:
        value, path, setter, depth = todo.pop()
        if _is_leaf(value):
            count += 1
            yield Slot(path, value, setter)
            continue
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        if isinstance(value, functools._lru_cache_wrapper):
            yield Slot(path, value, None)
        elif isinstance(value, dict):
            yield Slot(path, value, functools.partial(_set_entries, value))
        elif isinstance(value, types.FunctionType) or (_is_own_object(value) and hasattr(value, "__dict__")):
            yield Slot(f"{path}.", vars(value), functools.partial(_set_entries, vars(value)))
        todo += [(child, where, put, depth + 1) for child, where, put in reversed(list(_children(value, path)))]


def _is_leaf(value: Any) -> bool:
    if isinstance(value, (*_SCALARS, torch.Tensor, np.ndarray, np.generic)):
        return True
    return isinstance(value, (list, tuple)) and all(isinstance(item, _SCALARS) for item in value)


def _children(value: Any, path: str) -> Iterator[tuple[Any, str, Callable[[Any], None] | None]]:
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield item, f"{path}[{key!r}]", functools.partial(value.__setitem__, key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield item, f"{path}[{index}]", functools.partial(value.__setitem__, index)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield item, f"{path}[{index}]", None
    elif isinstance(value, types.MethodType):
        yield value.__self__, path.removesuffix(f".{value.__name__}"), None
        yield value.__func__, path, None
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, path)
    elif isinstance(value, functools.partial):
        yield value.func, path, None
        for index, item in enumerate(value.args):
            yield item, f"{path}({index})", None
        yield value.keywords, path, None
    elif isinstance(value, torch.nn.Module):
        for part in _MODULE_PARTS:
            for key, item in list(vars(value)[part].items()):
                yield item, f"{path}.{key}", functools.partial(vars(value)[part].__setitem__, key)
        for key, item in list(vars(value).items()):
            if key not in _MODULE_PARTS and not key.endswith("_hooks") and key != "training":
                yield item, f"{path}.{key}", functools.partial(_put, value, key)
        yield from _of_classes(value, path)
    elif _is_own_object(value):
        names = list(getattr(value, "__dict__", ()))
        names += [n for kind in type(value).__mro__ for n in _slot_names(kind)]
        for key in names:
            if hasattr(value, key):
                yield getattr(value, key), f"{path}.{key}", functools.partial(_put, value, key)
        yield from _of_classes(value, path)


def _of_classes(value: Any, path: str) -> Iterator[tuple[Any, str, Callable[[Any], None] | None]]:
    """What the classes of an object keep, and what their methods reach."""
    for kind in type(value).__mro__:
        if kind.__module__.split(".")[0] in _FOREIGN:
            continue
        for key, item in list(vars(kind).items()):
            if isinstance(item, types.FunctionType):
                yield item, f"{path}.{key}", None
            elif key.startswith("__") or key in getattr(value, "__dict__", ()):
                continue
            elif isinstance(item, (*_SCALARS, list, dict, torch.Tensor)):
                yield item, f"{path}.{key}", functools.partial(setattr, kind, key)


def _of_function(function: types.FunctionType, path: str) -> Iterator[tuple[Any, str, Callable[[Any], None] | None]]:
    """What a function closes over, and the globals that its code names, as these are called in it."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, key, functools.partial(setattr, cell, "cell_contents")
        except ValueError:  # empty
            continue
    space = function.__globals__
    for key in _names_in(function.__code__):
        if key in space and not isinstance(space[key], (type, types.ModuleType, types.BuiltinFunctionType)):
            item = space[key]
            if isinstance(item, types.FunctionType) and item.__module__ != function.__module__:
                continue
            yield item, key, functools.partial(space.__setitem__, key)
    for key, item in list(vars(function).items()):
        yield item, f"{path}.{key}", functools.partial(vars(function).__setitem__, key)
    for index, item in enumerate(function.__defaults__ or ()):
        yield item, f"{path}.__defaults__[{index}]", None


def _set_entries(owner: dict[Any, Any], entries: _Keys | dict[Any, Any]) -> None:
    """Put entries back, or drop those that were not there."""
    if isinstance(entries, _Keys):
        for key in [key for key in owner if key not in entries.keys]:
            del owner[key]
    else:
        owner.clear()
        owner.update(entries)


def _entry(path: str, key: Any) -> str:
    return f"{path}{key}" if path.endswith(".") else f"{path}[{key!r}]"


def _names_in(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_in(constant)
    return list(dict.fromkeys(names))


def _is_own_object(value: Any) -> bool:
    """Whether it is an object of somebody's Python code, whose attributes mean something."""
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return False
    return kind.__module__.split(".")[0] not in _FOREIGN


def _slot_names(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    return [names] if isinstance(names, str) else [n for n in names if not n.startswith("__")]


def _put(owner: Any, key: str, value: Any) -> None:
    object.__setattr__(owner, key, value)  # frozen dataclasses too


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return list(value) if isinstance(value, list) else value


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return isinstance(old, np.ndarray) and isinstance(new, np.ndarray) and np.array_equal(old, new)
    return type(old) is type(new) and (old == new or (old != old and new != new))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
