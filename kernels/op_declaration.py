"""Operators declared by a frozen dataclass, which defines the schema, the call and the argument conversion.

    @dataclass(frozen=True, slots=True)
    class ScaleCall:
        x: torch.Tensor
        out: Written
        bias: torch.Tensor | None
        factor: float

    scale = DeclaredOp("scale", ScaleCall, triton_impl=launch_scale, reference=scale_reference)
    scale(ScaleCall(x, out, None, 2.0))      # registered as scale(Tensor x, Tensor(a!) out, Tensor? bias, float factor)

Both implementations take the dataclass. A field may be a dataclass itself; its fields then become operator arguments. A
frozen dataclass with a property `ints` and a class method `from_ints` is passed as one list of ints. Equal lists give
the same object.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, TypeVar

import torch

from graphrt.kernels.library import define_op

Written = Annotated[torch.Tensor, "written"]
"""Annotation of a tensor that the operator writes."""

_LEAVES = {torch.Tensor: "Tensor", int: "int", float: "float", bool: "bool", list[int]: "int[]"}

_MOST_KEPT = 4096
"""Cached objects made from ints, more than the plans of a runtime."""

Call = TypeVar("Call")


class DeclaredOp(Generic[Call]):
    """An operator of the library `graphrt` whose arguments are the fields of the dataclass `arguments`.

    Capture-safe: a call only reads the fields and calls the operator.
    Raises: TypeError: at declaration, if a field's annotation has no schema type, if two fields have the same name, or
        if there are fewer than two fields.
    """

    def __init__(
        self,
        name: str,
        arguments: type[Call],
        *,
        triton_impl: Callable[[Call], None],
        reference: Callable[[Call], None] | None,
    ) -> None:
        classes: dict[str, Any] = {}
        paths, types_of, source = _describe(arguments, classes, itertools.count())
        build: Callable[[tuple[Any, ...]], Call] = eval(f"lambda values: {source}", classes)  # as in dataclasses
        names = [path.rsplit(".", 1)[-1] if not path.endswith(".ints") else path.split(".")[-2] for path in paths]
        if len(names) < 2 or len(set(names)) != len(names):
            raise TypeError(
                f"{arguments.__name__}: expected at least two fields with different names, got {names}; "
                "add or rename fields"
            )
        self.schema = f"{name}({', '.join(_arguments(names, types_of))}) -> ()"
        self._values: Callable[[Call], tuple[object, ...]] = operator.attrgetter(*paths)
        self._op: Any = define_op(
            self.schema,
            triton_impl=lambda *values: triton_impl(build(values)),
            reference=None if reference is None else lambda *values: reference(build(values)),
        )

    def __call__(self, call: Call) -> None:
        self._op(*self._values(call))


def _describe(cls: type[Any], classes: dict[str, Any], indices: Iterator[int]) -> tuple[list[str], list[str], str]:
    """Return the paths to a dataclass's leaves, their schema types, and an expression that builds an instance.

    classes   written: the callables of the expression, by name
    indices   indices of the leaves in `values`, used by the expression

    A step builds dozens of instances, and a generated expression takes a third of the time of per-field calls.
    """
    paths: list[str] = []
    kinds: list[str] = []
    parts: list[str] = []
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if hasattr(hint, "from_ints"):
            paths.append(f"{field.name}.ints")
            kinds.append("int[]")
            parts.append(f"{_named(_from_ints(hint), classes)}(tuple(values[{next(indices)}]))")
        elif dataclasses.is_dataclass(hint):
            inner_paths, inner_kinds, source = _describe(typing.cast("type[Any]", hint), classes, indices)
            paths += [f"{field.name}.{path}" for path in inner_paths]
            kinds += inner_kinds
            parts.append(source)
        else:
            paths.append(field.name)
            kinds.append(_kind(f"{cls.__name__}.{field.name}", hint))
            parts.append(f"values[{next(indices)}]")
    return paths, kinds, f"{_named(cls, classes)}({', '.join(parts)})"


def _named(called: object, classes: dict[str, Any]) -> str:
    name = f"make_{len(classes)}"
    classes[name] = called
    return name


def _from_ints(cls: type[Any]) -> Callable[[tuple[int, ...]], Any]:
    return functools.lru_cache(_MOST_KEPT)(lambda values: cls.from_ints(list(values)))


def _kind(name: str, hint: Any) -> str:
    """Return the schema type of an annotation; `!` marks the alias set of a written tensor."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [argument for argument in typing.get_args(hint) if argument is not types.NoneType]
        if len(inner) == 1:
            return _kind(name, inner[0]) + "?"
    if hint == Written:
        return "Tensor!"
    if hint not in _LEAVES:
        raise TypeError(
            f"{name}: expected a tensor, int, float, bool, list[int] or a dataclass of these, got {hint}; "
            "change the annotation"
        )
    return _LEAVES[hint]


def _arguments(names: list[str], kinds: list[str]) -> Iterator[str]:
    alias_sets = itertools.chain("abcdefghijklmnopqrstuvwxyz", (f"a{number}" for number in itertools.count()))
    for name, kind in zip(names, kinds, strict=True):
        yield f"{kind.replace('!', f'({next(alias_sets)}!)') if '!' in kind else kind} {name}"
