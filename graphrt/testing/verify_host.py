"""Values of the host that a step can see, as they were: what changed meanwhile, and what is put back for a trial.

A graph freezes them as they are at capture. `HostValues.take(step)` remembers them, `changed(step)` says which are
others now, and `assigned` puts old ones back for a block, so that an eager run shows what they would have done.
Only values, addresses and weak references are kept: nothing that the caller drops stays alive by this.

What is put back for good, before each run, goes by place: `rewritten` says what a run left in which object. A path will
not do, as `self.slot` may lead to another object by then, whose numbers are its own.
"""

from __future__ import annotations

import array
import collections
import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from graphrt.kernels.checks import shown
from graphrt.testing.verify_report import differing, same_bits
from graphrt.testing.verify_slots import NO_VALUES, OTHER, Place, Setter, Slot, slots
from graphrt.testing.verify_values import Items, Keys, copied, is_fixed, is_same_object, same

_LARGEST_KEPT = 1 << 20  # bytes of a tensor whose contents are kept, as an old address alone cannot be tried again
_SHARED = (list, set, collections.deque, np.ndarray, array.array, bytearray)  # whose items change in place
_MOST_KEPT = {False: 64 << 20, True: 16 << 20}  # of all; True: of parameters


@dataclass(frozen=True, slots=True)
class _Old:
    """A tensor as it was, as long as somebody else keeps it: its contents too where it is small."""

    address: int
    shape: tuple[int, ...]
    contents: torch.Tensor | None
    tensor: weakref.ref[torch.Tensor]


class _Object:
    """Which object, function or method stood somewhere, as long as somebody else keeps it."""

    def __init__(self, value: Any) -> None:
        self.text = _called(value)
        self._get: Callable[[], Any] = lambda: None
        if isinstance(value, types.MethodType):
            owner, function = weakref.ref(value.__self__), value.__func__
            self._get = lambda: None if (one := owner()) is None else types.MethodType(function, one)
        elif isinstance(value, types.BuiltinFunctionType) or _holds_numbers_alone(value):
            self._get = lambda: value
        else:
            self._get = weakref.ref(value)

    @classmethod
    def of(cls, value: Any) -> _Object | Any:
        """`OTHER` for what takes no weak reference, as a list: only the places in it count."""
        try:
            return cls(value)
        except TypeError:
            return OTHER

    @property
    def value(self) -> Any:
        """None where it is gone."""
        return self._get()


def _holds_numbers_alone(value: Any) -> bool:
    """Whether a function or a partial keeps nothing alive but numbers and functions."""
    if isinstance(value, functools.partial):
        return callable(value.func) and all(map(is_fixed, (*value.args, *value.keywords.values())))
    if not isinstance(value, types.FunctionType):
        return False
    try:
        kept = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # an empty cell
        return False
    return all(map(is_fixed, (*kept, *(value.__defaults__ or ()))))


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is another one than when it was taken. `old` can be assigned at `path`, `text` says both.

    tensor   of a place with another tensor: the one that stood there, where somebody keeps it
    """

    path: str
    name: str
    old: Any
    text: str
    is_tensor: bool = False
    tensor: torch.Tensor | None = None


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
                values[slot.path] = _Old(
                    value.data_ptr(), tuple(value.shape), _contents(value, room), weakref.ref(value)
                )
            elif not (slot.is_leaf or isinstance(value, dict)):
                values[slot.path] = _Object.of(value)
            elif isinstance(value, _SHARED):
                values[slot.path] = Items(id(value), copied(value))
            elif not isinstance(value, NO_VALUES):
                values[slot.path] = slot.copy()
        return cls(values)

    def contents(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor held, wherever it stood, where that was kept."""
        for old in self._values.values():
            if isinstance(old, _Old) and old.tensor() is tensor:
                return old.contents
        return None

    def changed(self, root: Any, name: str, *, entries: bool = False) -> list[Change]:
        """What holds another value now, and could be put back: values first, then objects that hold values.

        entries   also dicts and objects that have entries which they had not
        """
        found, objects = [], []
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
                found.append(Change(slot.path, slot.path, old.contents, text, True, old.tensor()))
            elif isinstance(old, _Object):
                if (kept := old.value) is not None and not is_same_object(kept, new):
                    text = f"{slot.path} was {old.text} and is {_shown_in(slot)} now"
                    objects.append(Change(slot.path, slot.path, kept, text))
            elif isinstance(new, torch.Tensor) or not same(old.held if isinstance(old, Items) else old, new):
                text = f"{slot.path} was {_short(old)} and is {_shown_in(slot)} now"
                found.append(Change(slot.path, slot.path, old, text))
        return found + objects


@contextmanager
def assigned(root: Any, name: str, values: Mapping[str, Any]) -> Iterator[None]:
    """The given values stand in their places until the block ends."""
    with ExitStack() as stack:
        for put, old in assign(root, name, values):
            stack.callback(put, old)
        yield


def assign(root: Any, name: str, values: Mapping[str, Any]) -> list[tuple[Callable[[Any], None], Any]]:
    """Put the given values in their places. Returns what undoes it: setters, and what stood there."""
    undo: list[tuple[Callable[[Any], None], Any]] = []
    for slot in list(slots(root, name)) if values else ():
        if slot.path in values and slot.set is not None:
            new = values[slot.path]
            if isinstance(new, Items):
                if id(slot.value) == new.owner and _takes(slot.value, new.held):
                    undo.append((functools.partial(_put_items, slot.value), _items(slot.value)))
                    _put_items(slot.value, new.held)
                    continue
                new = new.held
            old = dict(slot.value) if isinstance(slot.value, dict) else slot.value
            with suppress(AttributeError, TypeError):  # an object that lets nobody assign
                slot.set(copied(new))
                undo.append((slot.set, old))
    return undo


def _takes(value: Any, items: Any) -> bool:
    """Whether a list, set or array can hold what it held. Whoever shares it, or its memory, goes on sharing it then."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable) and value.shape == items.shape and value.dtype == items.dtype
    return type(value) is type(items)


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

    found = {path for path, (tensor, version, _) in before.items() if version != _version(tensor)}
    rest = {p: (t.detach(), old) for p, (t, _, old) in before.items() if p not in found and old is not None}
    if not same_bits([now for now, _ in rest.values()], [old for _, old in rest.values()]):
        found |= {p for p, (now, old) in rest.items() if now.shape != old.shape or bool(differing(now, old).any())}
    return {path: entry[0] for path, entry in before.items() if path in found}


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
    """What cannot change in place at these paths, or at all: numbers, texts, and tuples of them. And tensors."""
    return {
        slot.path: slot.value
        for slot in (slots(root, name) if paths is None or paths else ())
        if (paths is None or slot.path in paths) and (is_fixed(slot.value) or isinstance(slot.value, torch.Tensor))
    }


def renewed(root: Any, name: str, during: Callable[[], object]) -> tuple[set[str], set[str]]:
    """The paths of numbers that are others after `during` ran, whether their objects are others too or not, and those
    where another tensor stands."""
    before = values_at(root, name)
    during()
    after = values_at(root, name)
    both = [(path, old, after[path]) for path, old in before.items() if path in after]
    tensors = {p for p, old, new in both if old is not new and all(isinstance(t, torch.Tensor) for t in (old, new))}
    numbers = {p for p, old, new in both if is_fixed(old) and is_fixed(new) and not same(old, new)}
    return numbers, tensors


@contextmanager
def unchanged(root: Any, name: str) -> Iterator[None]:
    """What the block does to the host is undone: what stands where, and what is in lists, sets, arrays and dicts."""
    before = [(slot, _items(slot.value)) for slot in slots(root, name)]
    try:
        yield
    finally:
        for slot, items in before:
            _put_items(slot.value, items)
        now = {slot.place: slot.value for slot in slots(root, name)}
        for slot, _ in before:  # `before` keeps every owner alive, so no id is used twice
            found = now.get(slot.place, slot.value)
            if slot.set is not None and not isinstance(slot.value, dict) and not is_same_object(found, slot.value):
                with suppress(AttributeError, TypeError):  # an object that lets nobody assign
                    slot.set(slot.value)


def _items(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, *_SHARED)) else None


def _put_items(value: Any, items: Any) -> None:
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = items
    elif isinstance(value, (array.array, bytearray)):
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


@dataclass(frozen=True, slots=True)
class Held:
    """What stood in a place: a value, or which object.

    path   that led to it
    name   for a report: the path. Where a new object differs from the old one in one number, the path of that number
    put    puts something into this place, whatever the path leads to by then
    """

    path: str
    name: str
    place: Place
    old: Any
    put: Setter

    def put_back(self) -> None:
        with suppress(AttributeError, TypeError):  # an object that lets nobody assign
            self.put(self.old)


Places = dict[Place, tuple[Slot, Any]]
"""Of each place the slot, which keeps the place alive, and a copy of what it holds."""


def places(root: Any, name: str) -> Places:
    """All places within reach, and what they hold."""
    return {slot.place: (slot, slot.copy()) for slot in slots(root, name) if not isinstance(slot.value, NO_VALUES)}


def rewritten(root: Any, name: str, during: Callable[[], object]) -> list[Held]:
    """The places that hold something else after `during` ran, with what they held before.

    Places that went out of reach are not among them: what led there holds something else.
    """
    before = places(root, name)
    during()
    now = {slot.place: slot for slot in slots(root, name)}
    found = [_held(slot, old) for place, (slot, old) in before.items() if _is_other(slot, old, now.get(place))]
    by_path = {slot.path: old for slot, old in before.values() if is_fixed(old)}
    return [_named(held, by_path, now.values()) for held in found if held is not None]


def first_held(held: Held, at_first: Places) -> Held:
    """The same place with what it held at first, where it was there then."""
    found = _held(*at_first[held.place]) if held.place in at_first else None
    return held if found is None else replace(found, name=held.name)


def _is_other(slot: Slot, old: Any, new: Slot | None) -> bool:
    if new is None:
        return False
    if _is_reference(slot) and not is_same_object(slot.value, new.value):
        return True
    if isinstance(old, Keys):
        return not old.keys.issuperset(new.value)  # of the same dict
    if old is OTHER:
        return False
    if _is_tensor(old) or _is_tensor(new.value):
        return old is not new.value
    return not same(old, new.value)


def _is_reference(slot: Slot) -> bool:
    return not slot.is_leaf or isinstance(slot.value, dict)


def _held(slot: Slot, old: Any) -> Held | None:
    """None for a place that nothing can be put into."""
    put: Setter | None = slot.set
    if old is OTHER:
        old = slot.value
    elif isinstance(slot.value, dict):
        put = put if slot.swap is None else functools.partial(_put_dict, slot)
    elif _items(slot.value) is not None:
        put = functools.partial(_put_container, slot)
    return None if put is None else Held(slot.path, slot.path, slot.place, old, put)


def _put_dict(slot: Slot, content: Any) -> None:
    """The same dict as before, with the entries that it had."""
    assert slot.set is not None, "entries of a dict can be put back"
    assert slot.swap is not None, "asked for before"
    slot.set(content)
    slot.swap(slot.value)


def _put_container(slot: Slot, items: Any) -> None:
    """The same list, set or array as before, with the items that it had."""
    _put_items(slot.value, items)
    if slot.set is not None:
        slot.set(slot.value)


def _named(held: Held, before: Mapping[str, Any], now: Iterable[Slot]) -> Held:
    if is_fixed(held.old):
        return held
    inner = [
        slot.path
        for slot in now
        if slot.path.startswith((f"{held.path}.", f"{held.path}["))
        and slot.path in before
        and not same(before[slot.path], slot.value)
    ]
    return replace(held, name=inner[0]) if len(inner) == 1 else held


def as_now(root: Any, name: str, held: Iterable[Held]) -> list[Held]:
    """The same places with what they hold now, as far as they are within reach."""
    wanted = {one.place: one for one in held}
    now = places(root, name) if wanted else {}
    found = [now[place] for place in wanted if place in now]
    again = [_held(slot, dict(slot.value) if isinstance(slot.value, dict) else old) for slot, old in found]
    return [one for one in again if one is not None]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


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


def _shown_in(slot: Slot) -> str:
    """What stands in a place, for a reader."""
    if _is_tensor(slot.value):
        return "a tensor"
    return _short(slot.value) if slot.is_leaf else _called(slot.value)


def _called(value: Any) -> str:
    """An object by its class, a function by its name: what an object holds may be tensors, which are long to read."""
    if isinstance(value, functools.partial):
        return f"a partial of {_called(value.func)}"
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"an object of {type(value).__qualname__}"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
