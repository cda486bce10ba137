"""Notices weights and caches that moved after capture: a graph would go on reading the old address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from graphrt.kernels.errors import ReplayError

# Compares a few hundred addresses in microseconds; torch builds without CUDA lack it.
_all_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

_TURN = 32
"""Tensors that `check_next` looks at: one microsecond."""


class PointerGuard:
    """Remembers the addresses of named tensors and raises when one of them has changed.

    It sees tensors whose storage was replaced (`p.data = ...`, `module.to(...)`). A parameter object that was itself
    replaced in its module is seen by `check_names`, which looks the names up again.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(named)
        self._names = [name for name, _ in pairs]
        self._tensors = [tensor for _, tensor in pairs]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        indices = list(range(len(pairs)))
        self._turns = [indices[at : at + _TURN] for at in range(0, len(indices), _TURN)] or [[]]
        self._turn = -1  # before the first, which looks at all

    @property
    def num_turns(self) -> int:
        """Calls of `check_next` that look at every tensor, once there was one."""
        return len(self._turns)

    def check(self) -> None:
        """Raise ReplayError naming the first tensor that moved."""
        for name, tensor, address in zip(self._names, self._tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                raise _moved(name, address, tensor.data_ptr())

    def check_next(self) -> None:
        """Check 32 tensors at a time, in turns; the first call checks all. Raises: as `check`, again at each call."""
        turn = self._turn
        if turn < 0 or not self._same(self._turns[turn]):
            self.check()
        self._turn = (turn + 1) % len(self._turns)

    def _same(self, indices: list[int]) -> bool:
        if _all_equal is not None:
            return bool(_all_equal(self._tensors, self._addresses, indices))
        return all(self._tensors[i].data_ptr() == self._addresses[i] for i in indices)

    def check_names(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise ReplayError when a name now leads to another address than at capture, or is gone."""
        current = {name: tensor.data_ptr() for name, tensor in named}
        for name, address in zip(self._names, self._addresses, strict=True):
            if current.get(name) != address:
                raise _moved(name, address, current.get(name, 0))


def _moved(name: str, captured: int, current: int) -> ReplayError:
    return ReplayError(
        f"{name}: expected at address {captured:#x} as captured, got {current:#x}; load new values in place "
        "(tensor.copy_), or close this runtime and capture again"
    )


def named_weights(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a Module; none of another model."""
    if isinstance(model, torch.nn.Module):
        yield from model.named_parameters()
        yield from model.named_buffers()
