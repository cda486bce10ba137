"""Detects adapters of PEFT that were merged, disabled, chosen or scaled after capture. Graphs ignore such changes."""

from __future__ import annotations

import copy
from typing import Any

import torch

from graphrt.kernels.errors import ReplayError

_STATE = "merged", "disable_adapters", "active_adapters", "scaling"
"""Attributes of the layers of PEFT from which a forward pass chooses its weights. Every such layer has the first."""


class AdapterWatch:
    """The state of all layers with adapters, at the time of the construction.

    PointerGuard and NameWatch do not detect these changes, because the layers keep their tensors.

    any   whether there are such layers
    """

    def __init__(self, model: object) -> None:
        self._layers = [
            (name, module, {attribute: copy.copy(value) for attribute, value in _state(module).items()})
            for name, module in (model.named_modules() if isinstance(model, torch.nn.Module) else ())
            if isinstance(getattr(module, _STATE[0], None), bool)
        ]
        self.any = bool(self._layers)
        self._turn = 0

    def check(self) -> None:
        """Raise ReplayError if the state of a layer differs from the captured state."""
        for layer in self._layers:
            _check(*layer)

    def check_next(self) -> None:
        """Check one layer, in turn. After an error, the next call checks it again. Raises: see `check`."""
        _check(*self._layers[self._turn])
        self._turn = (self._turn + 1) % len(self._layers)


def _check(name: str, module: torch.nn.Module, captured: dict[str, Any]) -> None:
    if (found := _state(module)) == captured:
        return
    attribute = next(attribute for attribute in _STATE if found[attribute] != captured[attribute])
    raise ReplayError(
        f"{name}.{attribute}: expected {captured[attribute]} as captured, got {found[attribute]}; restore it, or close "
        "this runtime and capture again"
    )


def _state(module: torch.nn.Module) -> dict[str, Any]:
    return {attribute: getattr(module, attribute, None) for attribute in _STATE}
