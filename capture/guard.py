"""Detect weights that a step writes, and tensors that moved or changed after capture.

A graph continues to read the old address with the old shape. Its kernels may load parameters early, before the step's
earlier kernels have finished.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from graphrt.kernels.errors import CaptureError, ReplayError

_NAMES_A_TURN = 4
"""Names checked per step. Each check touches cache lines that are cold if the host works between steps. A tensor takes
several lines, so each step checks only one tensor."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""The captured properties of a tensor: address, shape, strides and dtype."""


class PointerGuard:
    """Stores the addresses and layouts of named tensors, and raises ReplayError if an address or a layout has changed.

    guard = PointerGuard(named)            before the capture
    guard.remember(look_up)                after the capture; `look_up` returns further tensors that graphs read
    guard.check_next()                     before each launch

    `check` detects a tensor whose storage was replaced (`p.data = ...`, `module.to(...)`, `set_`), a tensor that was
    resized or whose strides or dtype changed in place, and a remembered name that now refers to another tensor. The
    incremental checks of `check_next` compare addresses only. NameWatch detects replaced parameters.

    named     tensors that `check_next` checks one at a time
    in_turns  if False, `check_next` does nothing after its first call
    always    if True, every call of `check_next` checks everything; otherwise only the first call does

    num_turns   number of incremental `check_next` calls that cover all tensors
    """

    def __init__(self, named: NamedTensors, *, in_turns: bool = True, always: bool = False) -> None:
        pairs = list(named)
        self._names = [name for name, _ in pairs]
        self._tensors = [tensor for _, tensor in pairs]
        self._places = [_place(tensor) for tensor in self._tensors]
        nothing = torch.empty(0, device="cpu")
        turns = [(tensor, place[0]) for tensor, place in zip(self._tensors, self._places, strict=True) if in_turns]
        turns = turns or [(nothing, nothing.data_ptr())]
        self.num_turns = len(turns)
        self._next_turn = itertools.cycle(turns).__next__
        self._always, self._all_due = always, True  # a full check is due initially and after an error
        self._look_up: Callable[[], NamedTensors] = lambda: ()
        self._remembered: dict[str, _Place] = {}

    def remember(self, look_up: Callable[[], NamedTensors]) -> None:
        """Make `check` call `look_up` again and verify that each name still refers to its current memory."""
        self._look_up = look_up
        self._remembered = {name: _place(tensor) for name, tensor in look_up()}

    def check(self) -> None:
        """Raise ReplayError for the first tensor that moved or changed."""
        for name, tensor, place in zip(self._names, self._tensors, self._places, strict=True):
            if _place(tensor) != place:
                raise _changed(name, place, _place(tensor))
        _check_names(self._remembered.items(), self._look_up())

    def check_next(self) -> None:
        """Check one tensor, in turn; the first call checks all tensors.

        Raises: see `check`. After an error, each call checks all tensors until all are valid.
        """
        if not self._all_due:
            tensor, address = self._next_turn()
            if tensor.data_ptr() == address:
                return
        self._all_due = True
        self.check()
        self._all_due = self._always

    def check_names(self, named: NamedTensors) -> None:
        """Raise ReplayError if a captured name is missing in `named` or refers to a different tensor."""
        _check_names(zip(self._names, self._places, strict=True), named)

    def check_new(self, named: NamedTensors) -> None:
        """Raise ReplayError if a name in `named` was neither captured nor remembered."""
        known = {*self._names, *self._remembered}
        if new := next((name for name, _ in named if name not in known), None):
            raise ReplayError(
                f"{new}: graphs do not read this tensor, which was added after the capture; remove it, or close this "
                "runtime and capture again"
            )


class NameWatch:
    """Detects parameters, buffers and submodules of a module that were replaced by other objects.

    PointerGuard does not detect a replaced parameter, because the graph still reads the old parameter, which has not
    moved. `module.weight = Parameter(...)` and `load_state_dict(..., assign=True)` replace parameters.

    model   a module; a model of any other type has no names to watch

    any     whether there are names to watch
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
        """Return whether one of the next 4 names refers to a different object. If so, the next call rechecks them."""
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
    """Return the error for a tensor that differs from the captured tensor."""
    if current is None:
        return ReplayError(
            f"{name}: the tensor captured at address {captured[0]:#x} is gone; restore it, or close this runtime and "
            "capture again"
        )
    moved, changed = captured[0] != current[0], captured[1:] != current[1:]
    parts = [f"at address {captured[0]:#x}"] if moved else []
    found = [f"{current[0]:#x}"] if moved else []
    if changed:
        parts.append(_layout(captured))
        found.append(_layout(current))
    advice = "load new values in place (tensor.copy_)" if moved else "restore its shape, strides and dtype"
    return ReplayError(
        f"{name}: expected {', '.join(parts)} as captured, got {', '.join(found)}; {advice}, or close this runtime and "
        "capture again"
    )


def _layout(place: _Place) -> str:
    _, shape, strides, dtype = place
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(strides)}"


@contextlib.contextmanager
def parameters_unwritten(model: object) -> Iterator[None]:
    """Return a context for the capture of a step. Writes through `.data` and by Triton kernels are not detected.

    Raises: CaptureError: if the step wrote a parameter of the model.
    """
    before = _versions(model)
    yield
    for name, version in _versions(model).items():
        if version != before.get(name, version):
            raise CaptureError(
                f"{name}: the step writes this parameter, and kernels of the step may load parameters before the write "
                "has finished; keep what a step writes in a buffer (register_buffer)"
            )


def _versions(model: object) -> dict[str, int]:
    """Return how often each parameter was written in place. Parameters made in inference mode have no such number."""
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    return {name: parameter._version for name, parameter in named if not parameter.is_inference()}


def named_weights(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a Module under all their names. Yield nothing for a model of any other
    type."""
    if isinstance(model, torch.nn.Module):
        yield from model.named_parameters(remove_duplicate=False)
        yield from model.named_buffers(remove_duplicate=False)
