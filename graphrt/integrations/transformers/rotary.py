"""Tables that replace rotary modules whose result depends on other tokens of the batch, or on the host."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


class RotaryTable:
    """The results of a rotary module for all positions.

    Modules with two sets of frequencies choose one by the longest sequence of the batch. With tables, each token takes
    the set of its own request: the long one if the request may exceed the length of the model's original training.

    module    a module without parameters, called with hidden states and position ids
    length    number of positions
    boundary  length above which the module uses its long set; None: it has one set
    device    device of the tables

    boundary  also None if no sequence can be longer
    """

    def __init__(self, module: torch.nn.Module, length: int, boundary: int | None, device: torch.device) -> None:
        self._forward = module.forward
        self._module, self._length, self._device = module, length, device
        self.boundary = boundary if boundary is not None and boundary < length else None
        self._tables: dict[Any, tuple[Any, Any]] = {}
        self._seen = self._values()

    def __call__(
        self, calls: ContextVar[Any], x: torch.Tensor, position_ids: torch.Tensor, *extra: Any, **named: Any
    ) -> Any:
        key = (x.dtype, extra, tuple(sorted(named.items())))
        if key not in self._tables:  # in the dry run
            with _disable_current_modes(), torch.no_grad():
                self._tables[key] = self._build_all(*key)
        short, long = self._tables[key]
        positions = position_ids[0]
        if x.is_meta:
            like = lambda table: torch.empty(1, len(positions), *table.shape[2:], dtype=table.dtype, device="meta")  # noqa: E731
            return tree_map_only(torch.Tensor, like, short)
        if self.boundary is None:
            return tree_map_only(torch.Tensor, lambda table: table[:, positions], short)
        exceeds = calls.get().exceeds(self.boundary)[None, :, None]
        first, second = positions.clamp(max=self.boundary - 1), positions
        return type(short)(torch.where(exceeds, b[:, second], a[:, first]) for a, b in zip(short, long, strict=True))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tables that steps read."""
        return [table for table in tree_leaves(list(self._tables.values())) if table is not None]

    def rebuild(self) -> None:
        """Recompute the tables in place if a buffer of the module has changed."""
        if self.take_change():
            for key, tables in self._tables.items():
                for table, new in zip(tree_leaves(tables), tree_leaves(self._build_all(*key)), strict=True):
                    if table is not None:
                        table.copy_(new)

    def take_change(self) -> bool:
        """Return whether a buffer of the module has changed since the previous call."""
        seen, self._seen = self._seen, self._values()
        return any(not torch.equal(old, new) for old, new in zip(seen, self._seen, strict=True))

    def _values(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self._module.buffers()]

    def _build_all(self, dtype: torch.dtype, extra: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Any:
        short = self.build(dtype, extra, dict(named), self.boundary)
        return short, self.build(dtype, extra, dict(named)) if self.boundary else None

    def build(self, dtype: torch.dtype, extra: tuple[Any, ...], named: dict[str, Any], most: int | None = None) -> Any:
        """Return what the module computes for all positions, or for the first `most`; the module is unchanged."""
        module = self._module
        attributes = dict(vars(module))
        buffers = {name: (buffer, buffer.clone()) for name, buffer in module._buffers.items() if buffer is not None}
        try:
            x = torch.empty(1, 1, 1, dtype=dtype, device=self._device)
            positions = torch.arange(most or self._length, device=self._device)
            return self._forward(x, positions[None], *extra, **named)
        finally:
            vars(module).clear()
            vars(module).update(attributes)
            for name, (buffer, value) in buffers.items():
                module._buffers[name] = buffer.copy_(value)


def is_rotary(module: torch.nn.Module) -> bool:
    """Return whether a module computes something from positions only: it has no parameters, and takes position ids."""
    return (
        "forward" not in vars(module)
        and "position_ids" in inspect.signature(module.forward).parameters
        and not any(True for _ in module.parameters())
    )


def rope_types(module: torch.nn.Module) -> set[str]:
    """Return the kinds of rotary embedding that a rotary module computes, such as "default" or "longrope"."""
    kinds: Any = getattr(module, "rope_type", "default")
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}


def long_boundary(module: torch.nn.Module) -> int | None:
    """Return the length above which a rotary module uses a second set of frequencies; None if it has one set."""
    if "longrope" not in rope_types(module):
        return None
    config: Any = module.config
    parameters = config.rope_parameters
    if "original_max_position_embeddings" not in parameters:  # by layer type
        parameters = next(of for of in parameters.values() if of["rope_type"] == "longrope")
    return int(parameters["original_max_position_embeddings"])
