"""Find the Python values that a step can read, with their paths.

The search follows attributes, containers, closures, and the functions and globals of the step's package. The search
does not enter installed packages, generators, iterators or C code.
"""

from __future__ import annotations

import collections
import enum
import functools
import pickle
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from graphrt.testing.verify.compare import has_memory

_MOST_LOCATIONS, _DEEPEST = 50_000, 24
_WHOLE = 256  # a dict of at least this many numbers or strings is one value
_FOREIGN = frozenset(
    {"builtins", "torch", "numpy", "triton", "cuda", "threading", "logging", "typing", "abc", "random", "enum"}
)
_PACKAGES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_SCALARS = (
    int, float, bool, str, bytes, complex, type(None), range, slice, enum.Enum, torch.dtype, torch.device, np.generic,
)  # fmt: skip
IN_PLACE = (list, set, collections.deque, np.ndarray, bytearray)
_NEVER_LEAVES = frozenset({dict, type, types.FunctionType, types.MethodType})  # fast path for most values


class Location(NamedTuple):
    """The location of a value. `put` replaces the value; None if the location is read-only.

    A path that ends with a dot refers to an object's attributes as a dict.
    """

    path: str
    value: Any
    put: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """The state of a Python random generator."""

    state: bytes

    def __repr__(self) -> str:
        return "at one state of its sequence"


@dataclass(frozen=True, slots=True)
class Home:
    """The module and package of a step. Within graphrt, the first sub-package counts as the package."""

    module: str
    package: str

    @classmethod
    def of(cls, root: Any) -> Home:
        root = getattr(root, "__func__", root)
        module = (root if isinstance(root, types.FunctionType) else type(root)).__module__ or ""
        return cls(module, _package_of(module))

    def has(self, module: str | None) -> bool:
        """Return whether a module belongs to the step's package or is not installed."""
        if module == self.module or _package_of(module or "") == self.package:
            return True
        file, top = getattr(sys.modules.get(module or ""), "__file__", None), (module or "").split(".")[0]
        return file is not None and top not in (*_FOREIGN, "graphrt") and not file.startswith(_PACKAGES)


def _package_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "graphrt" else parts[0]


def locations(root: Any, name: str, left_out: list[str] | None = None) -> Iterator[Location]:
    """Yield every location reachable from an object or function, nearest first, each path once.

    Paths beyond the limits of number and depth, and tensors without their own memory, are appended to `left_out`.
    """
    left = [] if left_out is None else left_out
    home = Home.of(root)
    todo = collections.deque([(Location(name, root), 0)])
    paths, entered = set[str](), set[int]()
    while todo:
        location, depth = todo.popleft()
        value = location.value
        if len(paths) >= _MOST_LOCATIONS or (isinstance(value, torch.Tensor) and not has_memory(value)):
            left.append(location.path)
            continue
        if (generator := _generator(value)) is not None:
            location = Location(location.path, *generator)
        if location.path not in paths:
            paths.add(location.path)
            yield location
        if generator is not None or id(value) in entered or location.path.endswith(".") or is_leaf(value):
            continue
        if depth > _DEEPEST:
            left.append(location.path)
            continue
        entered.add(id(value))
        todo += [(child, depth + 1) for child in _children(value, location.path, home)]


def unreached(root: Any, name: str) -> list[str]:
    """Return the paths that `locations` omits."""
    left: list[str] = []
    collections.deque(locations(root, name, left), maxlen=0)
    return list(dict.fromkeys(left))


def _generator(value: Any) -> tuple[Drawn, Callable[[Drawn], None]] | None:
    """Return the state of a random generator and the function that restores it, or None for any other value."""
    if type(value) in _NEVER_LEAVES:
        return None
    if value is random or type(value) is random.Random:
        return Drawn(pickle.dumps(value.getstate())), lambda old: value.setstate(pickle.loads(old.state))
    return None


def _children(value: Any, path: str, home: Home) -> Iterator[Location]:
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield Location(f"{path}[{key!r}]", item, functools.partial(value.__setitem__, key))
    elif isinstance(value, (list, collections.deque)):
        for index, item in enumerate(value):
            yield Location(f"{path}[{index}]", item, functools.partial(value.__setitem__, index))
    elif isinstance(value, tuple):
        yield from (Location(f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield Location(path.removesuffix(f".{value.__name__}"), value.__self__)
        yield Location(path, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (Location(path, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield Location(path, value.__wrapped__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, path, home) if home.has(value.__module__) else ()
    elif isinstance(value, type):
        is_own = home.has(value.__module__) and not issubclass(value, enum.Enum)
        yield from _of_classes(value.__mro__, path, ()) if is_own else ()
    elif isinstance(value, torch.nn.Module) or _is_own_object(value):
        yield Location(f"{path}.", attributes := getattr(value, "__dict__", {}))
        for part in _MODULE_PARTS if isinstance(value, torch.nn.Module) else ():
            for key, item in list(attributes[part].items()):
                yield Location(f"{path}.{key}", item, functools.partial(attributes[part].__setitem__, key))
        names = [*attributes, *(n for kind in type(value).__mro__ for n in vars(kind).get("__slots__", ()))]
        for key in names:
            if hasattr(value, key) and not (isinstance(value, torch.nn.Module) and key in _OF_EVERY_MODULE):
                yield Location(f"{path}.{key}", getattr(value, key), functools.partial(object.__setattr__, value, key))
        yield from _of_classes(type(value).__mro__, path, names)


def _of_classes(kinds: Collection[type], path: str, known: Collection[str]) -> Iterator[Location]:
    """Yield the attributes and functions of classes, except names that the object itself defines."""
    found = set(known)
    for kind in kinds:
        for key, item in list(vars(kind).items()) if kind.__module__.split(".")[0] not in _FOREIGN else ():
            item = getattr(item, "__func__", item)  # the function of a static method
            if key not in found and isinstance(item, types.FunctionType):
                yield Location(f"{path}.{key}", item)
            elif key not in found and not key.startswith("__") and _is_data(item):
                yield Location(f"{path}.{key}", item, functools.partial(setattr, kind, key))
            found.add(key)


def _of_function(function: types.FunctionType, path: str, home: Home) -> Iterator[Location]:
    """Yield a function's closure variables, its defaults, and the globals that its code uses, by their bare names."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if key == "__class__":  # of super()
            continue
        with suppress(ValueError):  # an empty cell
            yield Location(key, cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
    yield Location(path, function.__defaults__)
    space, names = function.__globals__, _names_in(function.__code__)
    prefix = "" if function.__module__ == home.module else f"{function.__module__}."
    for key in names:
        item = space.get(key)
        if isinstance(item, types.ModuleType) and item is not random:
            for attribute in names if home.has(item.__name__) else ():
                if attribute in vars(item) and not isinstance(part := vars(item)[attribute], types.ModuleType):
                    put = functools.partial(setattr, item, attribute)
                    yield Location(f"{prefix}{key}.{attribute}", part, put if _is_data(part) else None)
        elif key in space:
            yield Location(f"{prefix}{key}", item, functools.partial(space.__setitem__, key))


def _names_in(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_in(constant)
    return list(dict.fromkeys(names))


def _is_data(item: Any) -> bool:
    """Return whether an attribute of a class or module is data rather than code."""
    return is_leaf(item) or isinstance(item, (list, tuple, dict)) or _is_own_object(item)


def _is_own_object(value: Any) -> bool:
    """Return whether a value is an instance of a Python class outside the packages that are never searched."""
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, functools._lru_cache_wrapper)):
        return False
    module = type(value).__module__
    return module.split(".")[0] not in _FOREIGN and not module.startswith("graphrt.capture.")  # recorders own graphs


def is_fixed(value: Any) -> bool:
    """Return whether a value is immutable data: a number, a string, or a tuple of these."""
    if isinstance(value, (tuple, frozenset)):
        return all(isinstance(item, _SCALARS) for item in value)
    return isinstance(value, _SCALARS)


def is_leaf(value: Any) -> bool:
    """Return whether a value is compared as a whole and contains no locations."""
    if isinstance(value, dict):
        return len(value) >= _WHOLE and all(isinstance(item, _SCALARS) for item in value.values())
    if type(value) in _NEVER_LEAVES:
        return False
    if isinstance(value, (torch.Tensor, np.ndarray, bytearray)) or is_fixed(value):
        return True
    return isinstance(value, IN_PLACE) and all(isinstance(item, _SCALARS) for item in value)
