"""Record the Python values that a step can read, detect which ones changed, and restore them.

A CUDA graph keeps the Python values that the step had at capture. `HostValues.take(step, "step")` records them,
`changed()` lists values that differ now, and `assigned()` restores old values in a block, so that an eager run shows
their effect. `HostValues` stores values, addresses and weak references, so it keeps no tensor alive.
"""

from __future__ import annotations

import collections
import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from graphrt.kernels.checks import shown
from graphrt.testing.verify.compare import has_memory, same_bits, unlike
from graphrt.testing.verify.locations import IN_PLACE, Drawn, Home, Location, is_fixed, is_leaf, locations

_LARGEST_COPIED, _MOST_COPIED = 1 << 20, 64 << 20  # bytes of one tensor, and of all tensors


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a dict, or the attribute names of an object."""

    keys: frozenset[Any]


@dataclass(frozen=True, slots=True)
class _Items:
    """A copy of a list, set or array of scalars."""

    held: Any

    def __repr__(self) -> str:
        return repr(self.held)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that is not kept alive, and a copy of its contents if it is small."""

    address: int
    shape: tuple[int, ...]
    contents: torch.Tensor | None
    tensor: weakref.ref[torch.Tensor]


class Change(NamedTuple):
    """A value that differs from the recorded one.

    `old` can be assigned at `path`; it is None for a tensor that was too large to copy. The report shows `name` and
    `text`. `tensor` is the recorded tensor if it was replaced and is still alive.
    """

    path: str
    name: str
    old: Any
    text: str
    is_tensor: bool = False
    tensor: torch.Tensor | None = None


def same(old: Any, new: Any) -> bool:
    """Return whether two values have the same type and equal contents."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, torch.Tensor):
        alike = old.dtype == new.dtype and old.device == new.device and has_memory(old) and has_memory(new)
        return alike and not unlike(old, new)
    if isinstance(old, np.ndarray):
        return old.dtype == new.dtype and np.array_equal(old, new, equal_nan=old.dtype.kind in "fc")
    if isinstance(old, Mapping):
        return old.keys() == new.keys() and all(same(value, new[key]) for key, value in old.items())
    if isinstance(old, (list, tuple, collections.deque)):
        return len(old) == len(new) and all(same(*pair) for pair in zip(old, new, strict=True))
    try:
        return bool(old == new or (old != old and new != new))
    except Exception:  # raised by __eq__ of the caller's class
        return False


def is_value(value: Any) -> bool:
    """Return whether a recorded value is data that a tensor could store: numbers, strings and containers of these."""
    if isinstance(value, (torch.Tensor, type(None))):
        return False
    return is_leaf(value) or isinstance(value, (dict, _Keys, Drawn, _Items))


class HostValues:
    """The values reachable from a step at one moment."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    def take(cls, root: Any, name: str) -> HostValues:
        values, room = dict[str, Any](), [_MOST_COPIED]
        for path, value, _ in locations(root, name):
            with suppress(TypeError):  # the object does not support weak references, so only its own locations count
                values[path] = _recorded(value, room)
        return cls(values)

    def contents(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the recorded contents of a tensor, or None if it was too large to copy."""
        every = (old for old in self._values.values() if isinstance(old, _Tensor))
        return next((old.contents for old in every if old.tensor() is tensor), None)

    def changed(self, root: Any, name: str, *, entries: bool = False) -> list[Change]:
        """Return the values that differ from the recorded values, with data first, then objects and functions.

        With `entries`, also return dicts and objects with new entries, but exclude tensors that were too large to copy.
        """
        found, objects = [], []
        for path, new, put in locations(root, name):
            if (old := self._values.get(path)) is None and path not in self._values:
                continue
            if isinstance(old, _Keys):
                added = [key for key in new if key not in old.keys] if entries and isinstance(new, dict) else []
                if added:
                    names = [_entry(path, key) for key in added]
                    text = f"{', '.join(names[:3])} {'was' if len(added) == 1 else 'were'} added"
                    found.append(Change(path, names[0] if len(added) == 1 else path.removesuffix("."), old, text))
            elif put is None:
                continue
            elif isinstance(old, _Tensor):
                if not (isinstance(new, torch.Tensor) and (old.address, old.shape) == (new.data_ptr(), new.shape)):
                    text = f"{path} is a different tensor than at capture; the graph reads the memory of the old one"
                    found.append(Change(path, path, old.contents, text, True, old.tensor()))
            elif isinstance(old, weakref.ref):
                if (kept := old()) is not None and kept is not new:
                    objects.append(Change(path, path, kept, f"{path} was {_named(kept)} and is {_named(new)} now"))
            elif not same(old.held if isinstance(old, _Items) else old, new):
                found.append(Change(path, path, old, f"{path} was {_short(old)} and is {_named(new)} now"))
        found += objects
        return [change for change in found if change.old is not None or not change.is_tensor] if entries else found


def _recorded(value: Any, room: list[int]) -> Any:
    """Return the part of a value to record. `room` contains the bytes left for tensor copies."""
    if isinstance(value, torch.Tensor):
        return _Tensor(value.data_ptr(), tuple(value.shape), _copied(value, room), weakref.ref(value))
    if isinstance(value, dict):
        return _Items(dict(value)) if is_leaf(value) else _Keys(frozenset(value))
    if is_leaf(value) or isinstance(value, Drawn):
        return _Items(copy.copy(value)) if isinstance(value, IN_PLACE) else value
    return weakref.ref(value)


def _copied(tensor: torch.Tensor, room: list[int]) -> torch.Tensor | None:
    size = tensor.numel() * tensor.element_size()
    if size > min(_LARGEST_COPIED, room[0]):
        return None
    room[0] -= size
    return tensor.detach().clone()


@contextmanager
def assigned(root: Any, name: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Assign old values (`Change.old`) to their paths within the block."""
    with ExitStack() as stack:
        for location in list(locations(root, name)) if values else ():
            if location.path in values:
                stack.callback(_assign(location, values[location.path]))
        yield


def _assign(location: Location, old: Any) -> Callable[[], object]:
    """Assign an old value to a location, and return a function that undoes it.

    Containers are changed in place, because other objects may share them.
    """
    value, put = location.value, location.put
    if isinstance(old, _Keys):
        entries = dict(value)
        _fill(value, {key: item for key, item in entries.items() if key in old.keys})
        return functools.partial(_fill, value, entries)
    is_array = isinstance(value, np.ndarray)
    if isinstance(old, _Items) and type(value) is type(old.held) and (not is_array or value.shape == old.held.shape):
        items = copy.copy(value)
        _fill(value, old.held)
        return functools.partial(_fill, value, items)
    if put is None:
        return lambda: None
    with suppress(AttributeError, TypeError):  # read-only
        put(copy.copy(old.held) if isinstance(old, _Items) else old)
    return functools.partial(_try_put, put, value)


def _try_put(put: Callable[[Any], None], value: Any) -> None:
    with suppress(AttributeError, TypeError, IndexError):
        put(value)


def _fill(container: Any, items: Any) -> None:
    """Replace the contents of a container."""
    if isinstance(container, np.ndarray):
        if container.flags.writeable:
            container[...] = items
    elif isinstance(container, (list, bytearray)):
        container[:] = items
    else:
        container.clear()
        (container.extend if isinstance(container, collections.deque) else container.update)(items)


@contextmanager
def unchanged(root: Any, name: str) -> Iterator[None]:
    """Undo the block's changes to Python values, in each location and in the items of containers."""
    before = list(locations(root, name))
    containers = [each.value for each in before if isinstance(each.value, (dict, *IN_PLACE))]
    items = [(each, dict(each) if isinstance(each, dict) else copy.copy(each)) for each in containers]
    try:
        yield
    finally:
        for container, held in items:
            if not _holds(container, held):
                _fill(container, held)
        for location in before:
            if location.put is not None:
                _try_put(location.put, location.value)


def _holds(container: Any, items: Any) -> bool:
    if isinstance(container, np.ndarray):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), items.items(), strict=False)
        return len(container) == len(items) and all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return len(container) == len(items) and all(a is b for a, b in zip(container, items, strict=True))


def written_tensors(root: Any, name: str, during: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Return the tensors, by path, that `during` changes in place."""
    room = [_MOST_COPIED]
    tensors = [(path, value) for path, value, _ in locations(root, name) if isinstance(value, torch.Tensor)]
    # Writes through `.data` and by kernels do not change the version. Inference tensors have no version.
    before = [(path, tensor, _version(tensor), _copied(tensor, room)) for path, tensor in tensors]
    during()
    found = {path: tensor for path, tensor, version, _ in before if version != _version(tensor)}
    rest = [(path, tensor, old) for path, tensor, _, old in before if path not in found and old is not None]
    if not same_bits([tensor.detach() for _, tensor, _ in rest], [old for _, _, old in rest]):
        found |= {path: tensor for path, tensor, old in rest if unlike(tensor.detach(), old)}
    return found


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def values_at(root: Any, name: str, paths: Collection[str] | None = None) -> dict[str, Any]:
    """Return the immutable values and the tensors by path, either all or only the values at `paths`."""
    return {
        path: value
        for path, value, _ in (locations(root, name) if paths is None or paths else ())
        if (paths is None or path in paths) and (is_fixed(value) or isinstance(value, torch.Tensor))
    }


def torch_generators(root: Any, name: str) -> list[torch.Generator]:
    """Return the reachable torch generators."""
    return [value for _, value, _ in locations(root, name) if isinstance(value, torch.Generator)]


def caches(root: Any, name: str) -> list[tuple[str, Any]]:
    """Return the reachable functions with a non-empty `functools` cache, except those of installed packages."""
    cached, home = functools._lru_cache_wrapper, Home.of(root)
    found = [(path, value) for path, value, _ in locations(root, name) if isinstance(value, cached)]
    return [(path, f) for path, f in found if home.has(f.__module__) and f.cache_info().currsize]


def _entry(path: str, key: Any) -> str:
    return f"{path}{key}" if path.endswith(".") else f"{path}[{key!r}]"


def _named(value: Any) -> str:
    """Describe data by its text, a function by its name, and any other object by its class."""
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if is_leaf(value) or isinstance(value, Drawn):
        return _short(value)
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"an object of type {type(value).__qualname__}"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
