"""The checks at public borders: each bound from both sides, each condition alone."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from graphrt.kernels.checks import (
    check_int,
    check_ints,
    check_no_overlap,
    check_not_empty,
    check_tensor,
    check_unit_stride,
    is_finite,
    shown,
)
from graphrt.kernels.errors import ConfigError, ReplayError, ShapeError

CPU, I32, F32 = torch.device("cpu"), torch.int32, torch.float32
T = torch.zeros(2, 3)

TENSORS = {
    "list": ([1.0], {}, "x: expected a torch.Tensor, got list"),
    "rank": (T, {"shape": (2, 3, 1)}, "x: expected shape [2, 3, 1], got [2, 3]"),
    "rank-any": (T, {"shape": (None,)}, "x: expected shape [*], got [2, 3]"),
    "rank-any-more": (T, {"shape": (None, None, None)}, "x: expected shape [*, *, *], got [2, 3]"),
    "first": (T, {"shape": (1, None)}, "x: expected shape [1, *], got [2, 3]"),
    "last": (T, {"shape": (None, 4)}, "x: expected shape [*, 4], got [2, 3]"),
    "dtype": (T, {"dtype": I32}, "x: expected dtype int32, got float32"),
    "dtypes": (T, {"dtype": (I32, torch.int64)}, "x: expected dtype int32 or int64, got float32"),
    "device": (T, {"device": torch.device("meta")}, "x: expected device meta, got cpu"),
    "shape-before-dtype": (T, {"shape": (2,), "dtype": I32}, "x: expected shape [2], got [2, 3]"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_refused(case: str) -> None:
    tensor, wanted, text = TENSORS[case]
    with pytest.raises(ShapeError, match=re.escape(text)):
        check_tensor("x", tensor, **wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        {}, {"shape": (2, 3)}, {"shape": (None, 3)}, {"shape": [2, None]}, {"shape": torch.Size((2, 3))},
        {"dtype": F32}, {"dtype": (I32, F32)}, {"dtype": (F32,)}, {"device": CPU},
        {"shape": (2, None), "dtype": F32, "device": CPU},
    ],
    ids=str,
)  # fmt: skip
def test_tensors_that_pass(wanted: dict) -> None:
    check_tensor("x", T, **wanted)


def test_an_extent_of_none_matches_zero() -> None:
    check_tensor("x", torch.zeros(0, 3), shape=(None, 3))
    with pytest.raises(ShapeError):
        check_tensor("x", torch.zeros(0, 3), shape=(1, 3))
    check_not_empty("x", torch.zeros(1, 1))
    for shape in ((0,), (3, 0), (0, 3)):
        with pytest.raises(ShapeError, match="x: expected no extent of 0"):
            check_not_empty("x", torch.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "strides", "unit"),
    [
        ((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((2, 1), (1, 7), True), ((2, 2), (1, 7), False),
        ((2, 3), (9, 1), True), ((3,), (2,), False), ((1,), (5,), True), ((), (), True), ((3,), (0,), False),
        ((0,), (2,), True),
    ],
    ids=str,
)  # fmt: skip
def test_the_last_dimension_is_contiguous(shape, strides, unit: bool) -> None:
    tensor = torch.zeros(50).as_strided(shape, strides)
    if unit:
        check_unit_stride("x", tensor)
    else:
        with pytest.raises(ShapeError, match="x: expected stride 1 in the last dimension"):
            check_unit_stride("x", tensor)


LAYOUTS = [
    ((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (4, 1)), ((2, 3), (2, 1)), ((2, 3), (1, 1)), ((2, 3), (0, 1)),
    ((1, 3), (0, 1)), ((1, 3), (2, 1)), ((2, 3), (1, 3)), ((3, 2), (1, 2)), ((2, 2, 2), (1, 2, 4)),
    ((2, 2, 2), (4, 1, 2)), ((2, 2, 2), (3, 1, 2)), ((2, 2, 2), (5, 2, 1)), ((2, 1, 3), (3, 0, 1)), ((3,), (2,)),
    ((3,), (0,)), ((2, 3, 2), (6, 2, 1)), ((2, 3, 2), (5, 2, 1)), ((2, 3, 2), (7, 2, 1)), ((3, 2, 3), (1, 9, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS, ids=str)
def test_elements_that_share_memory(shape, strides) -> None:
    """Against counting the addresses. Strides that interleave without sharing are no layout that the check allows."""
    tensor = torch.zeros(60).as_strided(shape, strides)
    addresses = torch.arange(60).as_strided(shape, strides).flatten().tolist()
    if len(set(addresses)) == len(addresses):
        check_no_overlap("x", tensor)
    else:
        with pytest.raises(ShapeError, match="x: expected elements that share no memory"):
            check_no_overlap("x", tensor)


@pytest.mark.parametrize("value", [3, 7, np.int64(5), np.uint8(7)], ids=repr)
def test_ints_that_pass(value: object) -> None:
    number = check_int("n", value, 3, 7, advice="go on")
    assert (type(number), number) == (int, int(value))


@pytest.mark.parametrize("value", [2, 8, True, 5.0, "5", None, np.float32(5), np.bool_(True), [5], 10**30], ids=repr)
def test_ints_that_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"n: expected an int from 3 to 7, got {value!r}; go on")):
        check_int("n", value, 3, 7, advice="go on")


def test_an_int_without_an_upper_bound_and_with_another_error() -> None:
    assert check_int("n", 10**30, 3, advice="go on") == 10**30
    assert check_int("n", 0, 0, 0, advice="go on") == 0
    with pytest.raises(ReplayError, match="n: expected an int >= 3, got 2; go on"):
        check_int("n", 2, 3, advice="go on", error=ReplayError)
    with pytest.raises(ConfigError, match="n: expected an int from 0 to 0, got 1"):
        check_int("n", 1, 0, 0, advice="go on")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_only_dense_tensors_pass() -> None:
    for other in (T.to_sparse(), torch.nested.nested_tensor([T, T])):
        with pytest.raises(ShapeError, match="x: expected a dense tensor, got a sparse or nested one"):
            check_tensor("x", other)


def test_a_long_value_is_cut_to_80_characters() -> None:
    assert shown("x" * 78) == repr("x" * 78)
    assert shown("x" * 79) == "'" + "x" * 76 + "..."


def test_ints_beyond_64_bits_are_named_by_their_place() -> None:
    most = 1 << 63
    for values, at, wrong in (([5, -3, most], 2, most), ([most - 1, -most, -most - 1], 2, -most - 1)):
        with pytest.raises(ShapeError, match=re.escape(f"n[{at}]: expected an int from 0 to 9, got {wrong}; go on")):
            check_ints("n", values, 0, 9, advice="go on")


@pytest.mark.parametrize("value", [0, -1.5, 10**300, np.float32(2), np.int8(3), Fraction(1, 3), 1e308], ids=repr)
def test_finite_numbers(value: object) -> None:
    assert is_finite(value) is True


@pytest.mark.parametrize(
    "value",
    [True, False, float("inf"), float("-inf"), float("nan"), np.float32("nan"), 10**400, "1", None, 1j, Decimal(1)],
    ids=repr,
)
def test_what_is_no_finite_number(value: object) -> None:
    assert is_finite(value) is False
