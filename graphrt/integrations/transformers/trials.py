"""Random input and weights for which a module and its operator must give the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from graphrt.integrations.transformers.float32 import widened
from graphrt.kernels.sizes import ceil_div

_ROUNDING = 8
"""Allowed difference of results, in units of the last place of the largest one."""
_FLOAT32 = 3e-5
"""Allowed difference of results in float32, as a part of the largest one of a token."""
_BLOCK = 65537
"""Random numbers of a weight; larger weights repeat them. A prime, so that rows differ."""


class Trial(NamedTuple):
    """One comparison.

    x         the input [1, tokens, width]
    replace   maps a tensor of the modules to the tensor that replaces it during the comparison
    same      whether two results are equal
    rotates   whether positions may differ from 0; a rotation by 0 changes no value, and so rounds none
    """

    x: torch.Tensor
    replace: Callable[[torch.Tensor], torch.Tensor]
    same: Callable[[torch.Tensor, Any], bool]
    rotates: bool = True


def trials(
    width: int, dtype: torch.dtype, device: torch.device, *, eps: float = 0.0, last_place: int = 0
) -> Iterator[Trial]:
    """Yield trials, from which any difference in arithmetic shows.

    With the weights of the module, results may differ by the rounding of products. 1, 7 and 128 tokens run different
    kernels.

    In float32, with random weights, results must be equal up to 3e-5. Small values show factors of a branch and
    epsilons. Large ones show factors of the residual. Large weights, and tokens with one large value, exceed clamps.

    In 16 bits, products with one weight per row do not round, so 99% of the values must be equal. This shows where
    values are converted to a different dtype. Other values may differ, because kernels approximate functions.

    eps         the epsilon of a norm
    last_place  difference of values that are equal in 16 bits, in units of the last place
    """
    generator = torch.Generator(device="cpu").manual_seed(0)

    def draw(tokens: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
        x = (torch.randn(1, tokens, width, generator=generator, device="cpu") + 0.5) * scale
        return x.to(device, dtype)

    for tokens, scale in ((1, 1.0), (7, 16.0), (128, 1.0)):
        yield Trial(draw(tokens, scale, dtype), lambda value: value, same_values)
    scales = torch.tensor([1.0, 1e-3, 1e3, eps**0.5 or 1.0], device=device).repeat(8)
    yield Trial(draw(32, 1.0, torch.float32) * scales[:, None], _RandomWeights(1.0), _same_in_float32)
    x = draw(16, 1e3, torch.float32)
    x[:, ::2, 0] *= 1e3
    yield Trial(x, _RandomWeights(1e4), _same_in_float32)
    if dtype.itemsize == 2:
        yield Trial(draw(128, 1, dtype), _SparseWeights(), partial(_same_bits, last_place=last_place), rotates=False)


def same_values(found: torch.Tensor, expected: Any) -> bool:
    """Return whether a result equals what a module returned, up to rounding."""
    return _same_kind(found, expected) and _close(
        found, expected, _ROUNDING * torch.finfo(found.dtype).eps * expected.abs().max()
    )


def _same_in_float32(found: torch.Tensor, expected: Any) -> bool:
    return _same_kind(found, expected) and _close(found, expected, _FLOAT32 * expected.abs().amax(-1, keepdim=True))


def _same_bits(found: torch.Tensor, expected: Any, last_place: int) -> bool:
    """Return whether 99% of the values are equal, or differ by `last_place` units in the last place at most."""
    if not same_values(found, expected):
        return False
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    return bool(((found == expected) | (steps <= last_place)).float().mean() >= 0.99)


def _same_kind(found: torch.Tensor, expected: Any) -> bool:
    return isinstance(expected, torch.Tensor) and expected.dtype == found.dtype and expected.shape == found.shape


def _close(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> bool:
    return bool(((expected - found).abs() <= bound).all())


class _RandomWeights:
    """Replaces each parameter by other random float32 values, and converts buffers to float32.

    gain  standard deviation of vectors, and of products with a random vector
    """

    def __init__(self, gain: float) -> None:
        self._gain, self._count = gain, 0

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, torch.nn.Parameter) or not value.is_floating_point():
            return widened(value)
        self._count += 1
        block = torch.randn(_BLOCK, generator=torch.Generator(device="cpu").manual_seed(self._count), device="cpu")
        values = block.to(value.device).repeat(ceil_div(value.numel(), _BLOCK))[: value.numel()].view(value.shape)
        return values.mul_(self._gain * (value.shape[-1] ** -0.5 if value.dim() > 1 else 1))


class _SparseWeights:
    """Replaces each matrix by one with a 1 or -1 in each row, and each vector by random values."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, torch.nn.Parameter) or not value.is_floating_point() or value.dim() > 2:
            return value
        self._count += 1
        if value.dim() < 2:
            generator = torch.Generator(device="cpu").manual_seed(self._count)
            return torch.randn(value.shape, generator=generator, device="cpu").to(value.device, value.dtype)
        weight, rows = torch.zeros_like(value), torch.arange(len(value), device=value.device)
        signs = torch.where(rows % 3 == 0, -1.0, 1.0).to(value.dtype)
        return weight.scatter_(1, ((7 * rows + self._count) % value.shape[1])[:, None], signs[:, None])
