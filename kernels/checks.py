"""Checks of tensors at public borders: one line per tensor, errors with both values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.kernels.errors import ShapeError


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
