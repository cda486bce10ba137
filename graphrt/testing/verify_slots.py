"""Every value of the host within reach of a step, by path: in attributes, closures, defaults, globals and containers.

It follows objects, functions and modules of own code, and stops at those of packages. Out of reach are a generator, an
iterator, and what C code keeps.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import pickle
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from graphrt.testing.verify_report import has_memory
from graphrt.testing.verify_values import NEVER_LEAVES, SEQUENCES, Drawn, Keys, copied, is_fixed, is_leaf

_MOST_SLOTS, _DEEPEST = 50_000, 24
_WHOLE = 256  # entries from which on a dict of numbers and texts is one value
_FOREIGN = frozenset(
    {"builtins", "torch", "numpy", "triton", "cuda", "threading", "logging", "typing", "abc", "random", "enum"}
)
NO_VALUES = (functools._lru_cache_wrapper, torch.Generator)
OTHER = object()
"""What is known of an object: that it is one."""
_SAME_PATH = (dict, contextvars.ContextVar, weakref.ref, *NO_VALUES)  # as what is in them
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_OF_SLOTS = ("__dict__", "__weakref__")  # what `__slots__` names that is no value
_PACKAGES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))

Place = tuple[int, str]
Setter = Callable[[Any], None]
Children = Iterator[tuple[Any, str, Setter | None]]


class Slot(NamedTuple):
    """A place that holds a value: `set` is None where it cannot be assigned.

    place     which one it is, whatever the path that leads there: the id of what it is in, and its name in that
    is_leaf   whether the value has no places of its own, or is the dict of them
    is_whole  whether a dict is one value, and has no places of its own
    swap      of a dict: puts a whole dict into the place. `set` puts entries back into the one that is there
    """

    path: str
    value: Any
    set: Setter | None
    place: Place
    is_leaf: bool = True
    is_whole: bool = False
    swap: Setter | None = None

    def copy(self) -> Any:
        """The value as it is now, for a comparison and to be put back: `OTHER` where only the places in it count."""
        if isinstance(self.value, dict):
            return dict(self.value) if self.is_whole else Keys(frozenset(self.value))
        return copied(self.value) if self.is_leaf else OTHER


@dataclass(frozen=True, slots=True)
class _Home:
    """Where the code of a step stands: its module, and the package of that. Of graphrt itself, one of its packages: a
    model of graphrt is searched as one of anybody's, without the operators that it calls."""

    module: str
    package: str

    @classmethod
    def of(cls, root: Any) -> _Home:
        root = getattr(root, "__func__", root)
        module = (root if isinstance(root, types.FunctionType) else type(root)).__module__ or ""
        return cls(module, _package_of(module))

    def has(self, module: str | None) -> bool:
        """Whether a module is of the step's package, or not installed."""
        top = (module or "").split(".")[0]
        if module == self.module or _package_of(module or "") == self.package:
            return True
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        return file is not None and top not in (*_FOREIGN, "graphrt") and not file.startswith(_PACKAGES)


def _package_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "graphrt" else parts[0]


def slots(root: Any, name: str) -> Iterator[Slot]:
    """Every value within reach of an object or a function, each once, and one for each path."""
    paths: set[str] = set()
    for slot in _slots(root, name, _Home.of(root), []):
        if slot.path not in paths:  # a cell that several functions share
            paths.add(slot.path)
            yield slot


def unreached(root: Any, name: str) -> list[str]:
    """Paths of values that `slots` leaves aside: too many, too deep, or tensors without memory of their own."""
    left: list[str] = []
    for _ in _slots(root, name, _Home.of(root), left):
        pass
    return list(dict.fromkeys(left))


def _slots(root: Any, name: str, home: _Home, left: list[str]) -> Iterator[Slot]:
    """What lies near comes first. Paths that are left aside go to `left`."""
    seen: set[int] = set()
    count = 0
    known = {name: 0}
    todo: collections.deque[tuple[Any, str, Setter | None, int, Place]] = collections.deque()
    todo.append((root, name, None, 0, (0, name)))

    def enter(value: Any, path: str, depth: int, children: Children) -> None:
        for child, where, put in children:
            inside = where.removeprefix(path)  # of a closure or a global: its own name
            todo.append((child, where, put, depth + 1, (id(value), inside)))

    while todo:
        value, path, setter, depth, place = todo.popleft()
        if count >= _MOST_SLOTS:
            left += [path, *(where for _, where, _, _, _ in todo)]
            return
        if isinstance(value, torch.Tensor) and not has_memory(value):
            left.append(path)
            continue
        if is_leaf(value) or (isinstance(value, type) and path.endswith(".__class__")):
            count += 1
            yield Slot(path, value, setter, place)
            if isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                yield _entries(value, path)
                enter(value, path, depth, _of_tensor(value, path))
            continue
        source = _random(value)
        if source is None and setter is not None and not isinstance(value, _SAME_PATH):
            count += 1
            yield Slot(path, value, setter, place, is_leaf=False)
        if id(value) in seen:
            continue
        if depth > _DEEPEST:
            left.append(path)
            continue
        seen.add(id(value))
        if source is not None:
            yield Slot(path, *source, place)
            continue
        if isinstance(value, NO_VALUES):
            yield Slot(path, value, None, place)
        elif isinstance(value, dict):
            is_whole = len(value) >= _WHOLE and all(map(is_fixed, value.values()))
            entries = functools.partial(_set_entries, value, setter)
            yield Slot(path, value, entries, place, is_whole=is_whole, swap=setter)
            if is_whole:
                count += 1
                continue
        elif isinstance(value, types.FunctionType) or (_is_own_object(value) and hasattr(value, "__dict__")):
            yield _entries(value, path)
        enter(value, path, depth, _children(value, path, setter, home, known))


def _entries(value: Any, path: str) -> Slot:
    """The attributes of an object, as a dict that may get more of them."""
    return Slot(f"{path}.", vars(value), functools.partial(_set_entries, vars(value), None), (id(value), "."))


def _set_entries(owner: dict[Any, Any], put: Setter | None, value: Any) -> None:
    """Put entries back, or drop those that were not there, or put something else in place of the dict."""
    if isinstance(value, Keys):
        for key in [key for key in owner if key not in value.keys]:
            del owner[key]
    elif isinstance(value, dict):
        owner.clear()
        owner.update(value)
    elif put is not None:
        put(value)


def _random(value: Any) -> tuple[Drawn, Setter] | None:
    """Where a generator stands, and what puts it there."""
    if type(value) in NEVER_LEAVES:
        return None
    if value is random or (isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)):
        return Drawn(pickle.dumps(value.getstate())), lambda old: value.setstate(pickle.loads(old.state))
    if value is np.random or isinstance(value, np.random.RandomState):
        state = pickle.dumps(value.get_state(legacy=False))
        return Drawn(state), lambda old: value.set_state(pickle.loads(old.state))
    if isinstance(value, np.random.Generator):
        source = value.bit_generator
        return Drawn(pickle.dumps(source.state)), lambda old: setattr(source, "state", pickle.loads(old.state))
    return None


def _children(value: Any, path: str, put: Setter | None, home: _Home, known: dict[str, int]) -> Children:
    """`known`: which cell, or which globals, a name without a path means."""
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield item, f"{path}[{key!r}]", functools.partial(value.__setitem__, key)
    elif isinstance(value, (list, collections.deque)):
        for index, item in enumerate(value):
            yield item, f"{path}[{index}]", functools.partial(value.__setitem__, index)
    elif isinstance(value, tuple):
        yield from _of_tuple(value, path, put)
    elif isinstance(value, contextvars.ContextVar):
        with contextlib.suppress(LookupError):  # it was not set
            yield value.get(), path, functools.partial(_set_variable, value)
    elif isinstance(value, types.MethodType):
        yield value.__self__, path.removesuffix(f".{value.__name__}"), None
        yield value.__func__, path, None
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, path, home, known) if home.has(value.__module__) else ()
    elif isinstance(value, functools.partial):
        yield value.func, path, None
        for index, item in enumerate(value.args):
            yield item, f"{path}({index})", None
        yield value.keywords, path, None
    elif isinstance(value, weakref.ref):
        yield value(), path, None
    elif isinstance(value, types.ModuleType):
        yield from _of_module(value, path) if home.has(value.__name__) else ()
    elif isinstance(value, torch.nn.Module):
        for part in _MODULE_PARTS:
            for key, item in list(vars(value)[part].items()):
                yield item, f"{path}.{key}", functools.partial(vars(value)[part].__setitem__, key)
        for key, item in list(vars(value).items()):
            if key not in _OF_EVERY_MODULE:
                yield item, f"{path}.{key}", functools.partial(_put, value, key)
            elif key.endswith("_hooks") and isinstance(item, dict):
                yield from ((hook, f"{path}.{key}", None) for hook in list(item.values()))
        yield from _of_classes(value, path, home)
        yield from _kind_of(value, path, home)
    elif isinstance(value, type):
        if home.has(value.__module__) and not issubclass(value, enum.Enum):
            yield from _of_kinds(value.__mro__, path, home, ())
    elif _is_own_object(value):
        names = list(getattr(value, "__dict__", ()))
        names += [n for kind in type(value).__mro__ for n in _slot_names(kind)]
        for key in names:
            if hasattr(value, key):
                yield getattr(value, key), f"{path}.{key}", functools.partial(_put, value, key)
        yield from _of_classes(value, path, home)
        yield from _kind_of(value, path, home)


def _of_tuple(value: tuple[Any, ...], path: str, put: Setter | None) -> Children:
    """An item is replaced by another tuple in place of the whole one."""
    items = list(value)

    def replace(index: int, item: Any) -> None:
        items[index] = item
        assert put is not None, "no setter is given where the tuple cannot be replaced"
        put(type(value)(*items) if hasattr(value, "_fields") else tuple(items))

    for index, item in enumerate(value):
        where = f"{path}.{value._fields[index]}" if hasattr(value, "_fields") else f"{path}[{index}]"
        yield item, where, None if put is None else functools.partial(replace, index)


def _of_tensor(tensor: torch.Tensor, path: str) -> Children:
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad, f"{path}.grad", functools.partial(setattr, tensor, "grad")
    for key, item in list(vars(tensor).items()):
        yield item, f"{path}.{key}", functools.partial(setattr, tensor, key)


def _kind_of(value: Any, path: str, home: _Home) -> Children:
    """The class of an object of own code, which may become another one."""
    if home.has(type(value).__module__) and not isinstance(value, threading.local):
        yield type(value), f"{path}.__class__", functools.partial(_put, value, "__class__")


def _of_classes(value: Any, path: str, home: _Home) -> Children:
    return _of_kinds(type(value).__mro__, path, home, getattr(value, "__dict__", ()))


def _of_kinds(kinds: Iterable[type], path: str, home: _Home, known: Iterable[str]) -> Children:
    """What classes keep, and what their methods reach, but for names that the object has itself."""
    found = set(known)
    for kind in kinds:
        if kind.__module__.split(".")[0] in _FOREIGN:
            continue
        for key, given in list(vars(kind).items()):
            if key in found:  # another class, or the object itself, has one of that name before it
                continue
            item = _function_of(given)
            if isinstance(item, types.FunctionType) and home.has(item.__module__):
                yield item, f"{path}.{key}", None
            elif not key.startswith("__") and _is_data(item):
                yield item, f"{path}.{key}", functools.partial(setattr, kind, key)
            found.add(key)


def _function_of(item: Any) -> Any:
    """What a method of a class, or a property, calls; anything else is as it is."""
    if isinstance(item, (staticmethod, classmethod)):
        return item.__func__
    if isinstance(item, property):
        return item.fget
    return item.func if isinstance(item, functools.cached_property) else item


def _of_function(function: types.FunctionType, path: str, home: _Home, known: dict[str, int]) -> Children:
    """What a function closes over, and the globals that its code names, as these are called in it.

    Another cell of a name that is `known`, as those of a decorator that stands twice, is called by its function too.
    """
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        where = key if known.setdefault(key, id(cell)) == id(cell) else f"{path}'s {key}"
        try:
            yield cell.cell_contents, where, functools.partial(setattr, cell, "cell_contents")
        except ValueError:  # empty
            continue
    space, names = function.__globals__, _names_in(function.__code__)
    for key in names:
        if key in space:
            yield from _of_global(function, key, space[key], names, home, known)
    for key, item in list(vars(function).items()):
        yield item, f"{path}.{key}", functools.partial(vars(function).__setitem__, key)
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    put = functools.partial(setattr, function, "__defaults__")
    for (item, _, setter), key in zip(_of_tuple(defaults, path, put), arguments[-len(defaults) :], strict=False):
        yield item, f"{path}({key})", setter
    if (keywords := function.__kwdefaults__) is not None:
        for key, item in list(keywords.items()):
            yield item, f"{path}({key})", functools.partial(keywords.__setitem__, key)


def _of_global(
    function: types.FunctionType, name: str, item: Any, names: list[str], home: _Home, known: dict[str, int]
) -> Children:
    """A global that a function names: itself, or, of a module of own code, what the function names of it."""
    space = id(function.__globals__)
    at_home = (function.__module__ or "") == home.module and known.setdefault(name, space) == space
    key = name if at_home else f"{function.__module__}.{name}"
    put = functools.partial(function.__globals__.__setitem__, name)
    if item is np and "random" in names:
        yield np.random, f"{name}.random", None
    elif item is random or item is np.random:
        yield item, name, None
    elif isinstance(item, types.ModuleType):
        if home.has(item.__name__):
            for attribute in names:
                part = vars(item).get(attribute, np)  # a module of a module is not followed
                if _is_data(part) or (isinstance(part, types.FunctionType) and home.has(part.__module__)):
                    yield part, f"{key}.{attribute}", functools.partial(setattr, item, attribute)
    elif not isinstance(item, types.BuiltinFunctionType):
        yield item, key, put


def _of_module(module: types.ModuleType, path: str) -> Children:
    """What a module that an object keeps, as its configuration, holds. No functions: nobody says which are called."""
    for key, item in list(vars(module).items()):
        if not key.startswith("__") and _is_data(item):
            yield item, f"{path}.{key}", functools.partial(setattr, module, key)


def _is_data(item: Any) -> bool:
    """Whether an attribute of a class or a module is something that it keeps, not what it is made of."""
    return is_leaf(item) or isinstance(item, (*SEQUENCES, dict)) or _is_own_object(item)


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
    names = [names] if isinstance(names, str) else names
    private = f"_{kind.__name__.lstrip('_')}"
    return [f"{private}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names if n not in _OF_SLOTS]


def _set_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    variable.set(value)


def _put(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, threading.local):
        setattr(owner, key, value)
    else:
        object.__setattr__(owner, key, value)  # frozen dataclasses too
