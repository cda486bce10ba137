"""Checks of tensors and numbers at public borders: one line each, errors with both values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch

from graphrt.kernels.errors import ConfigError, GraphRTError, ShapeError


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ShapeError unless `tensor` has the given shape (None matches any extent), dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; pass a tensor")
    # A ladder of graphs makes tens of thousands of these checks: the common cases come first and build nothing.
    if shape is not None and tensor.shape != shape and not _matches(tensor.shape, shape):
        want = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
        raise ShapeError(f"{name}: expected shape {want}, got {list(tensor.shape)}; reshape or slice it")
    if dtype is not None and tensor.dtype is not dtype:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in allowed:
            names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
            got = str(tensor.dtype).removeprefix("torch.")
            raise ShapeError(f"{name}: expected dtype {names}, got {got}; convert it with .to()")
    if device is not None and tensor.device != device:
        raise ShapeError(f"{name}: expected device {device}, got {tensor.device}; move it with .to()")


def _matches(have: Sequence[int], want: Sequence[int | None]) -> bool:
    return len(have) == len(want) and all(w is None or w == h for h, w in zip(have, want, strict=True))


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError unless the last dimension of `tensor` is contiguous, as the kernels require."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ShapeError(
            f"{name}: expected stride 1 in the last dimension, got strides {list(tensor.stride())}; "
            "permute other dimensions, or call .contiguous()"
        )


def check_no_overlap(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError where elements of `tensor`, which is written, may share memory, as after expand()."""
    if tensor.is_contiguous():
        return
    span = 0  # from the first element to the last, over the dimensions of smaller strides
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride <= span:
            raise ShapeError(
                f"{name}: expected elements that share no memory, got strides {list(tensor.stride())} for shape "
                f"{list(tensor.shape)}; it is written, pass a tensor of its own, not one made by expand()"
            )
        span += (extent - 1) * stride


def check_not_empty(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError where `tensor` has no elements."""
    if tensor.numel() == 0:
        raise ShapeError(
            f"{name}: expected no extent of 0, got shape {list(tensor.shape)}; pass one that holds something"
        )


def check_int(
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    *,
    advice: str,
    error: type[GraphRTError] = ConfigError,
) -> int:
    """`value` as an int; raises `error` unless it is one, of Python or NumPy and no bool, from `low` to `high`."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        bounds = f">= {low}" if high is None else f"from {low} to {high}"
        raise error(f"{name}: expected an int {bounds}, got {value!r}; {advice}")
    return number


def check_int_field(owner: object, name: str, low: int, high: int | None = None, *, advice: str) -> None:
    """`check_int` of a frozen dataclass's field, which is Python's int from then on."""
    value = check_int(f"{type(owner).__name__}.{name}", getattr(owner, name), low, high, advice=advice)
    object.__setattr__(owner, name, value)


def is_finite(value: object) -> bool:
    """Whether `value` is a finite number, of Python or NumPy and no bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False
