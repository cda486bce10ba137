"""Conversion of user-supplied numbers to the declared dtype of a per-request tensor."""

from __future__ import annotations

import numpy as np
import torch

from graphrt.kernels.checks import shown
from graphrt.kernels.errors import GraphRTError

REQUEST_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Dtypes of per-request tensors; a replay bundle can store all of them."""


def converted(name: str, value: object, dtype: torch.dtype, error: type[GraphRTError]) -> torch.Tensor:
    """Return a copy of `value` on the host as a tensor of `dtype`.

    value   a number, nested lists of numbers, an array or a tensor; the result has its shape

    Numbers are rounded to a float `dtype`, and must be in its range. For an int or bool `dtype`, they must be integral
    and in its range: 2.0 is accepted for int32.

    Raises: `error`: if `value` has items that are not real numbers, ints beyond 64 bits, or numbers that `dtype` cannot
        represent.
    """
    try:
        given = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        if given.is_complex():
            raise TypeError("complex numbers are not supported")
        tensor, wide = given.to(dtype, copy=True), given.double()
        fits = (tensor.double() == wide) | (tensor.double().isnan() & wide.isnan())
        if dtype.is_floating_point:
            fits |= wide.abs() <= torch.finfo(dtype).max
    except (TypeError, ValueError, RuntimeError) as cause:
        raise error(f"{name}: expected numbers of {dtype}, got {shown(value)}; pass numbers") from cause
    if not bool(fits.all()):
        raise error(f"{name}: expected numbers of {dtype}, got {shown(value)}; pass numbers that {dtype} can represent")
    return tensor
