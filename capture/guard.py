"""Notices tensors that moved or changed after capture: a graph goes on reading the old address, as the old shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from graphrt.kernels.errors import ReplayError

_TURN, _NAMES_A_TURN = 1, 4
"""Tensors, and names, that are looked at before a step. Each lies in cache lines of its own, which are cold where the
host does other work between steps. A tensor takes several lines, so there is one a turn."""

_address = torch.Tensor.data_ptr

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""What a graph knows of a tensor: address, shape, strides and dtype."""


class PointerGuard:
    """Remembers where named tensors lie and how, and raises when one of them has changed. See NameWatch for names.

    guard = PointerGuard(named)            before the capture
    guard.remember(tensors_by_name)        after it: whatever else graphs read, and how to look it up again
    guard.check_next()                     before each launch

    `check` sees a tensor whose storage was replaced (`p.data = ...`, `module.to(...)`, `set_`), one that was resized or
    whose strides or dtype changed in place, and, by `remember`, a name that now leads to another tensor. The turns of
    `check_next` see addresses alone.

    named     the tensors that `check_next` looks at in turns
    in_turns  False: `check_next` looks at none after its first call
    always    `check_next` checks everything at every call, not at the first alone
    """

    def __init__(self, named: NamedTensors, *, in_turns: bool = True, always: bool = False) -> None:
        pairs = list(named)
        self._names = [name for name, _ in pairs]
        self._tensors = [tensor for _, tensor in pairs]
        self._places = [_place(tensor) for tensor in self._tensors]
        addresses = [place[0] for place in self._places]
        starts = range(0, len(pairs), _TURN) if in_turns else ()
        self._turns = [(self._tensors[at : at + _TURN], addresses[at : at + _TURN]) for at in starts] or [([], [])]
        self._next_turn = itertools.cycle(self._turns).__next__
        self._always, self._all_due = always, True  # the first call looks at all, and so does one after an error
        self._look_up: Callable[[], NamedTensors] = lambda: ()
        self._remembered: dict[str, _Place] = {}

    @property
    def num_turns(self) -> int:
        """Calls of `check_next` that look at every tensor, once there was one."""
        return len(self._turns)

    def remember(self, look_up: Callable[[], NamedTensors]) -> None:
        """Let `check` look these names up again from now on: each must lead to where it leads now."""
        self._look_up = look_up
        self._remembered = {name: _place(tensor) for name, tensor in look_up()}

    def check(self) -> None:
        """Raise ReplayError naming the first tensor that moved or changed."""
        for name, tensor, place in zip(self._names, self._tensors, self._places, strict=True):
            if _place(tensor) != place:
                raise _changed(name, place, _place(tensor))
        _check_names(self._remembered.items(), self._look_up())

    def check_next(self) -> None:
        """Check one tensor at a time, in turns; the first call checks all. Raises: as `check`, again at each call."""
        if not self._all_due:
            tensors, addresses = self._next_turn()
            if list(map(_address, tensors)) == addresses:
                return
        self._all_due = True
        self.check()
        self._all_due = self._always

    def check_names(self, named: NamedTensors) -> None:
        """Raise ReplayError when a name of `named` at capture now leads elsewhere, or is gone."""
        _check_names(zip(self._names, self._places, strict=True), named)


class NameWatch:
    """Remembers what the names of a module and its submodules lead to, and tells when one leads elsewhere.

    A parameter that another took the place of has not moved: the graph reads the old one, which lives on, as a caller
    or a guard holds it. `module.weight = Parameter(...)` and `load_state_dict(..., assign=True)` do that.

    model   other models than modules have no names, and nothing to tell

    any     whether there are names at all
    """

    def __init__(self, model: object) -> None:
        names: list[tuple[dict[str, Any], str, object]] = []
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            for of in (module._parameters, module._buffers, module._modules):
                names += [(of, name, value) for name, value in of.items()]
        self.any = bool(names)
        self._turns = [names[at : at + _NAMES_A_TURN] for at in range(0, len(names), _NAMES_A_TURN)] or [[]]
        self._turn = 0

    def changed(self) -> bool:
        """Whether one of the next 4 names leads elsewhere, in turns. If so, these come again."""
        for of, name, value in self._turns[self._turn]:
            if of.get(name) is not value:
                return True
        self._turn = (self._turn + 1) % len(self._turns)
        return False


def _check_names(captured: Iterable[tuple[str, _Place]], named: NamedTensors) -> None:
    current = {name: _place(tensor) for name, tensor in named}
    for name, place in captured:
        if (now := current.get(name)) != place:
            raise _changed(name, place, now)


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _changed(name: str, captured: _Place, current: _Place | None) -> ReplayError:
    """The error of a tensor that is not what it was: what it was, what it is, and the way out."""
    if current is None:
        return ReplayError(
            f"{name}: expected at address {captured[0]:#x} as captured, got no tensor of this name; put it back, or "
            "close this runtime and capture again"
        )
    moved, changed = captured[0] != current[0], captured[1:] != current[1:]
    parts = [f"at address {captured[0]:#x}"] if moved else []
    found = [f"{current[0]:#x}"] if moved else []
    if changed:
        parts.append(_layout(captured))
        found.append(_layout(current))
    advice = "load new values in place (tensor.copy_)" if moved else "give it back its shape, strides and dtype"
    return ReplayError(
        f"{name}: expected {', '.join(parts)} as captured, got {', '.join(found)}; {advice}, or close this runtime and "
        "capture again"
    )


def _layout(place: _Place) -> str:
    _, shape, strides, dtype = place
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(strides)}"


def named_weights(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a Module; none of another model."""
    if isinstance(model, torch.nn.Module):
        yield from model.named_parameters()
        yield from model.named_buffers()
