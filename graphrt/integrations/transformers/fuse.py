"""Replaces norms and gated MLPs by graphrt's operators, where these compute the same on random input."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphrt.integrations.transformers.host import HostedModel
from graphrt.kernels.errors import GraphRTError
from graphrt.kernels.ops.activation import silu_mul
from graphrt.kernels.ops.norm import rms_norm

Forward = Callable[[torch.Tensor], torch.Tensor]
_ROUNDING = 8
"""Allowed difference of results, in units of the last place of the largest one."""


def find_fused(hosted: HostedModel) -> dict[str, str]:
    """Set `hosted.fused`, and return the operator of each module that is replaced, by name.

    A module is found by its weights: one vector, or the two or three linear layers of a gated MLP. It is replaced if
    its operator gives the same on random input. Modules of equal class, shapes and constants are tried once. Modules
    with hooks are left alone.
    """
    tried: dict[Any, int | None] = {}  # index of the candidate that computes the same
    found = {}
    for name, module in hosted.model.named_modules():
        if module in hosted.tables or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            continue
        candidates = list(_candidates(module))
        if not candidates:
            continue
        shapes = tuple((key, tuple(weight.shape), weight.dtype) for key, weight in module.named_parameters())
        constants = tuple(value for value in vars(module).values() if isinstance(value, float))
        key = (type(module), shapes, constants)
        if key not in tried:
            equal = (index for index, (_, forward, width) in enumerate(candidates) if _same(module, forward, width))
            tried[key] = next(equal, None)
        if (index := tried[key]) is not None:
            found[name], hosted.fused[module], _ = candidates[index]
    return found


def _candidates(module: torch.nn.Module) -> Iterator[tuple[str, Forward, int]]:
    """Yield operators that may compute what a module does, with the width of its input."""
    own, children = dict(module.named_parameters(recurse=False)), list(module.children())
    if len(own) == 1 and not children and len(inspect.signature(module.forward).parameters) == 1:
        ((name, weight),) = own.items()
        if weight.dim() == 1:
            for eps in {value for value in vars(module).values() if isinstance(value, float)}:
                yield "rms_norm", _Norm(module, name, eps), len(weight)
    linears = [child for child in children if type(child) is torch.nn.Linear]
    if own or not 2 <= len(linears) <= 3 or len(inspect.signature(module.forward).parameters) != 1:
        return
    for *first, down in itertools.permutations(linears):
        if sum(linear.out_features for linear in first) == 2 * down.in_features:
            yield "silu_mul", _GatedMLP(first, down), first[0].in_features


class _Norm:
    def __init__(self, module: torch.nn.Module, name: str, eps: float) -> None:
        self._weights, self._name, self._eps = module._parameters, name, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights[self._name]
        assert weight is not None, "the norm had a weight"
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, self._eps).view(x.shape)


class _GatedMLP:
    """down(silu(gate) * up), with the gate and the up projection next to each other in memory."""

    def __init__(self, first: list[torch.nn.Linear], down: torch.nn.Linear) -> None:
        self._first, self._down = first, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(self._first) == 1:
            gate_up = self._first[0](rows)
        else:
            width = self._down.in_features
            gate_up = rows.new_empty(len(rows), 2 * width)
            for linear, out in zip(self._first, (gate_up[:, :width], gate_up[:, width:]), strict=True):
                if linear.bias is None:
                    torch.mm(rows, linear.weight.t(), out=out)
                else:
                    torch.addmm(linear.bias, rows, linear.weight.t(), out=out)
        result: torch.Tensor = self._down(silu_mul(gate_up))
        return result.view(*x.shape[:-1], -1)


def _same(module: torch.nn.Module, forward: Forward, width: int) -> bool:
    """Return whether a module and an operator give the same on random input of [1, 5, width]."""
    weight = next(module.parameters())
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = (torch.randn(1, 5, width, generator=generator, device="cpu") + 0.5).to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            expected, found = module(x), forward(x.clone())
    except (GraphRTError, RuntimeError, TypeError):  # an input of another kind
        return False
    if not isinstance(expected, torch.Tensor) or expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    bound = _ROUNDING * torch.finfo(found.dtype).eps * expected.abs().max()
    return bool(((expected - found).abs() <= bound).all())
