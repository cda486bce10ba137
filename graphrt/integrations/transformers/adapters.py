"""Notices adapters that were merged, disabled or scaled after the capture. Graphs do not follow such changes."""

from __future__ import annotations

import copy
from typing import Any

import torch

from graphrt.kernels.errors import ReplayError

_STATE = "merged", "disable_adapters", "active_adapters", "scaling"
"""Attributes of the layers of PEFT from which a forward pass chooses its weights. Every such layer has the first."""


class AdapterWatch:
    """The state of all layers with adapters, at the time of the construction."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._captured = model, _states(model)

    def check(self) -> None:
        """Raise ReplayError if the state of a layer differs from the captured state."""
        current = _states(self._model)
        for name, captured in self._captured.items():
            found = current.get(name, captured)  # check_weights finds layers that were removed
            for attribute, value in captured.items():
                if found[attribute] != value:
                    raise ReplayError(
                        f"{name}.{attribute}: expected {value} as captured, got {found[attribute]}; restore it, or "
                        "close this runtime and capture again"
                    )


def _states(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {attribute: copy.copy(getattr(module, attribute, None)) for attribute in _STATE}
        for name, module in model.named_modules()
        if isinstance(getattr(module, _STATE[0], None), bool)
    }
