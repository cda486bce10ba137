"""Exact conversion of user-supplied numbers to the declared dtype of a per-request tensor."""

from __future__ import annotations

from numbers import Integral

import numpy as np
import torch

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import GraphRTError

REQUEST_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Dtypes of per-request tensors; a replay bundle can store all of them."""

_INT64_END = 2.0**63


def converted(name: str, value: object, dtype: torch.dtype, error: type[GraphRTError]) -> torch.Tensor:
    """Return a copy of `value` on the host as a tensor of `dtype`.

    value   a number, nested lists of numbers, an array or a tensor; the result has its shape

    Ints must be exact in `dtype`: 2**24 + 1 raises for float32. Floats are rounded to a float `dtype` and must be in
    its range. For an int or bool `dtype` they must be integral: 2.0 is accepted for int32.

    Raises: `error`: if `value` has items that are not real numbers, ints beyond 64 bits, or numbers that `dtype` cannot
        represent.
    """
    try:
        tensor = _tensor_of(value, dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise error(f"{name}: expected numbers of {dtype}, got {shown(value)}; pass numbers") from cause
    if tensor is None:
        raise error(f"{name}: expected numbers of {dtype}, got {shown(value)}; pass numbers that {dtype} can represent")
    return tensor


def _tensor_of(value: object, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert `value`; None if `dtype` cannot represent a number."""
    if isinstance(value, torch.Tensor):
        return _kept(value.detach().cpu(), dtype)
    array = np.array(value)
    tensor = _kept(torch.from_numpy(array), dtype)
    if tensor is None or array.dtype.kind != "f" or not isinstance(value, (list, tuple)):
        return tensor
    # In a list with floats, NumPy converts ints to floats and rounds them, so convert the ints separately.
    items = np.array(value, dtype=object)
    is_int = np.array([isinstance(item, Integral) for item in items.flat], np.bool_)
    if is_int.any():
        ints = _tensor_of(items.reshape(-1)[is_int].tolist(), dtype)
        if ints is None:
            return None
        tensor.view(-1)[torch.from_numpy(is_int)] = ints
    return tensor


def _kept(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a copy in `dtype`; None if the conversion changes a number."""
    if given.is_complex() or given.layout is not torch.strided or given.is_nested:
        raise TypeError("complex, sparse and nested tensors are not supported")
    if dtype.is_floating_point and given.is_floating_point():
        tensor, wide = given.to(dtype, copy=True), given.double()
        inside = wide.abs() <= torch.finfo(dtype).max
        same = (tensor.double() == wide) | (tensor.double().isnan() & wide.isnan())  # infinities, if `dtype` has them
        return tensor if bool((inside | same).all()) else None
    whole = _as_int64(given)
    if whole is None:
        return None
    tensor = whole.to(dtype, copy=True)
    back = _as_int64(tensor)
    return tensor if back is not None and torch.equal(back, whole) else None


def _as_int64(numbers: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers as int64; None if a number is not a 64-bit int."""
    if numbers.is_floating_point():
        wide = numbers.double()
        inside = (wide >= -_INT64_END) & (wide < _INT64_END) & (wide == wide.trunc())
        return wide.long() if bool(inside.all()) else None
    whole = numbers.to(torch.int64)
    return None if numbers.dtype is torch.uint64 and bool((whole < 0).any()) else whole
