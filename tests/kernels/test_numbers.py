"""Numbers in the range of a dtype are converted, all others raise."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt.bundle.format import from_plain, to_plain
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.numbers import REQUEST_DTYPES, converted

FLOATS = [dtype for dtype in REQUEST_DTYPES if dtype.is_floating_point]
WHOLE = [dtype for dtype in REQUEST_DTYPES if not dtype.is_floating_point]

KEPT: list[tuple[Any, torch.dtype, Any]] = [
    (2**24, torch.float32, 2.0**24),
    (2048, torch.float16, 2048.0),
    (1e300, torch.float64, 1e300),
    (0.1, torch.float32, float(np.float32(0.1))),
    (1e-300, torch.float32, 0.0),
    (448, torch.float8_e4m3fn, 448.0),
    (0.3, torch.float8_e4m3fn, 0.3125),
    (-math.inf, torch.float32, -math.inf),
    (-math.inf, torch.float8_e5m2, -math.inf),
    (0, torch.bool, False),
    (True, torch.float32, 1.0),
    (2.0, torch.int32, 2),
    (2**63 - 1, torch.int64, 2**63 - 1),
    (torch.tensor(3, dtype=torch.uint16), torch.int8, 3),
    ([], torch.int32, []),
]
REFUSED: list[tuple[Any, torch.dtype]] = [
    (1 + 2j, torch.float32),
    (torch.tensor(1j), torch.float32),
    (70_000, torch.float16),
    (1e300, torch.float32),
    (np.uint64(2**63), torch.int64),
    (2.0**63, torch.int64),
    (450.0, torch.float8_e4m3fn),
    (math.inf, torch.float8_e4m3fn),
    (2, torch.bool),
    (300, torch.int8),
    (-1, torch.uint8),
    (1.5, torch.int32),
    (math.nan, torch.int32),
    ("ab", torch.float32),
    (None, torch.float32),
    ([[1], [1, 2]], torch.float32),
    (torch.ones(2).to_sparse(), torch.float32),
    (torch.empty(2, device="meta"), torch.float32),
]


@pytest.mark.parametrize(("value", "dtype", "want"), KEPT, ids=str)
def test_representable_numbers_are_kept(value: Any, dtype: torch.dtype, want: Any) -> None:
    tensor = converted("a", value, dtype, ShapeError)
    assert tensor.dtype == dtype
    assert tensor.tolist() == want
    if isinstance(value, torch.Tensor):
        assert tensor.data_ptr() != value.data_ptr()


@pytest.mark.parametrize(("value", "dtype"), REFUSED, ids=str)
def test_other_numbers_raise(value: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ShapeError, match=f"a: expected numbers of {dtype}, got .*; pass "):
        converted("a", value, dtype, ShapeError)


@given(st.floats(), st.sampled_from(FLOATS))
def test_a_float_is_rounded_or_raises(number: float, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    try:
        found = converted("a", number, dtype, ShapeError).item()
    except ShapeError:
        assert abs(number) > most
        return
    if not math.isfinite(number):
        assert found == number or (math.isnan(found) and math.isnan(number))
    else:
        assert abs(found - number) <= max(abs(number) * torch.finfo(dtype).eps, torch.finfo(dtype).tiny)


@given(st.floats(), st.sampled_from(WHOLE))
def test_a_float_for_an_int_dtype_is_integral_or_raises(number: float, dtype: torch.dtype) -> None:
    try:
        assert Fraction(converted("a", number, dtype, ShapeError).item()) == Fraction(number)
    except ShapeError:
        most = 1 if dtype is torch.bool else 127
        assert not (0 <= number <= most and number.is_integer())


@pytest.mark.parametrize("dtype", REQUEST_DTYPES, ids=str)
def test_bundles_store_request_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    assert from_plain(to_plain(dtype)) == dtype
