"""Argument checks: accepted and rejected values, limits, and error texts."""

from __future__ import annotations

import itertools
import math
import re
from array import array
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from graphrt.kernels import checks
from graphrt.kernels.errors import ConfigError, ReplayError, ShapeError


class NoRepr:
    def __repr__(self) -> str:
        raise ValueError("no repr")


def ints(values: object) -> np.ndarray:
    return checks.check_ints("pages", values, 0, 9, advice="pass pages")


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        (1, np.int8(2)),
        range(1, 3),
        array("h", [1, 2]),
        np.array([1, 2], np.uint64),
        np.array([1, 0, 2, 0], np.int16)[::2],
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.tensor([[1, 0], [2, 0]])[:, 0],
    ],
    ids=["list", "numpy-items", "range", "array", "uint64", "strided", "int32", "uint8", "column"],
)
def test_check_ints_accepts_sequences_arrays_and_tensors(values) -> None:
    found = ints(values)
    assert found.dtype == np.int64
    assert found.flags.c_contiguous
    assert found.tolist() == [1, 2]
    for empty in ([], (), np.array([]), torch.tensor([])):  # of any dtype
        assert ints(empty).tolist() == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (None, "pages: expected ints from 0 to 9 on the host, got None; pass pages"),
        ("12", "got '12'"),
        (3, "got 3;"),
        ([1, True], r"pages\[1\]: expected an int from 0 to 9, got True"),
        ([1, 2.0], r"pages\[1\]: .* got 2.0"),
        ([1, None], r"pages\[1\]: .* got None"),
        ([1, 2, -1], r"pages\[2\]: expected an int from 0 to 9, got -1"),
        ([1, 10], r"pages\[1\]: .* got 10"),
        ([2**70], r"pages\[0\]: .* got 1180591620717411303424"),
        ([5, -3, 1 << 63], r"pages\[2\]: .* got 9223372036854775808"),
        ([(1 << 63) - 1, -(1 << 63), -(1 << 63) - 1], r"pages\[2\]: .* got -9223372036854775809"),
        ([10**5000], r"pages\[0\]: .* got a value of type int"),
        (np.array([2**63], np.uint64), r"pages\[0\]: .* got 9223372036854775808"),
        (np.array([True]), "got bool values"),
        (np.array([1.0]), "got float64 values"),
        (np.array([[1]]), r"expected one dimension, got shape \[1, 1\]"),
        (np.array(1), r"expected one dimension, got shape \[\]"),
        (torch.tensor([1.0]), "got a float32 tensor on cpu"),
        (torch.tensor([True]), "got bool values"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "got a int64 tensor on meta"),
        (torch.tensor([1, 2]).to_sparse(), "got a int64 tensor on cpu"),
    ],
)
def test_check_ints_raises(values, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        ints(values)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: checks.check_bool("f", 1, advice="do"), "f: expected True or False, got 1; do"),
        (lambda: checks.check_bool("f", "no", advice="do"), "got 'no'"),
        (lambda: checks.check_callable("f", "abc", advice="do"), "f: expected a callable, got 'abc'; do"),
        (lambda: checks.check_instance("f", 3, str, advice="do"), "f: expected str, got 3; do"),
        (lambda: checks.check_instance("f", 3, (str, bytes), advice="do"), "f: expected str or bytes, got 3"),
        (lambda: checks.check_int("f", 10**5000, 0, 9, advice="do"), "from 0 to 9, got a value of type int; do"),
        (lambda: checks.check_int("f", NoRepr(), 0, advice="do"), "got a value of type NoRepr"),
        (lambda: checks.check_int("f", list(range(99)), 0, advice="do"), r"got \[0, 1, [0-9, ]+\.\.\.; do"),
        (lambda: checks.check_sequence("f", "ab", 2, of="pages"), "f: expected .*got 'ab'"),
        (lambda: checks.check_sequence("f", {1}, 2, of="pages"), r"f: expected .*got \{1\}"),
        (
            lambda: checks.check_sequence("f", [1], 2, of="pages"),
            "f: expected .*2 pages, got 1; pass 2 items",
        ),
        (lambda: checks.check_int("f", 1, 0, 0, advice="do"), "f: expected an int from 0 to 0, got 1"),
        (lambda: checks.check_int("f", 2, 3, advice="do", error=ReplayError), "f: expected an int >= 3, got 2; do"),
        (lambda: checks.check_number("f", math.nan, 0, advice="do"), "f: expected a finite number >= 0, got nan; do"),
        (lambda: checks.check_number("f", -0.1, 0, advice="do"), "got -0.1"),
        (lambda: checks.check_number("f", 1e39, 0, checks.FLOAT32_MAX, advice="do"), r"3\.40282e\+38, got 1e\+39"),
        (lambda: checks.check_number("f", 1.1, 0, 1, advice="do"), "a finite number from 0 to 1, got 1.1"),
        (lambda: checks.check_number("f", True, 0, 1, advice="do"), "got True"),
        (lambda: checks.check_named_tensors("w", "abc"), "w: expected pairs of a name and a tensor, got 'abc'"),
        (lambda: checks.check_named_tensors("w", 3), "got 3;"),
        (lambda: checks.check_named_tensors("w", itertools.count()), r"w\[0\]: expected a name and a tensor, got 0"),
        (lambda: checks.check_named_tensors("w", {"a": torch.ones(1)}), r"w\[0\]: .* got 'a'"),
        (lambda: checks.check_named_tensors("w", [("a", 3)]), r"w\[0\]: .* got \('a', 3\)"),
    ],
)
def test_bad_values_raise(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ConfigError, ReplayError, ShapeError), match=text):
        call()


def test_accepted_values_become_python_values() -> None:
    assert checks.check_bool("f", np.bool_(True), advice="") is True
    assert type(checks.check_number("f", np.float32(0.5), 0, 1, advice="")) is float
    assert type(checks.check_number("f", 1, 0, 1, advice="")) is float
    assert checks.check_instance("f", "a", str, advice="") == "a"
    assert checks.check_sequence("f", (1, 2), 2, of="pages") == (1, 2)
    weight = torch.nn.Linear(2, 2, bias=False)
    assert checks.check_named_tensors("w", weight.named_parameters()) == (("weight", weight.weight),)


def test_a_check_runs_once_per_geometry() -> None:
    seen = []

    @checks.once_per_geometry
    def check(x: object, y: object, limit: object) -> None:
        seen.append((x, y, limit))
        checks.check_tensor("x", x, shape=(2, None))  # type: ignore[arg-type]

    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    for x in (a, b):
        check(x, None, 5)
    assert len(seen) == 1
    for x, y, limit in (
        (a.double(), None, 5), (a[:, :2], None, 5), (torch.zeros(3, 2).t(), None, 5), (a, a, 5), (a, None, 6),
        (torch.zeros(2, 3, device="meta"), None, 5),
    ):  # fmt: skip
        before = len(seen)
        check(x, y, limit)
        check(x, y, limit)
        assert len(seen) == before + 1


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(2, 2).to_sparse(), [1, 2], None], ids=["shape", "sparse", "list", "none"]
)
def test_a_failed_check_runs_again(wrong: object) -> None:
    check = checks.once_per_geometry(lambda x: checks.check_tensor("x", x, shape=(2, None)))
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"^x: "):
            check(wrong)


def test_the_geometry_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MOST_PASSED", 2)
    seen: list[int] = []
    check = checks.once_per_geometry(lambda x: seen.append(len(x)))
    for n in (1, 2, 3, 3, 1):
        check(torch.zeros(n))
    assert seen == [1, 2, 3, 1]


CPU, I32, F32 = torch.device("cpu"), torch.int32, torch.float32
T = torch.zeros(2, 3)

TENSORS = {
    "list": ([1.0], {}, "x: expected a torch.Tensor, got list"),
    "sparse": (T.to_sparse(), {}, "x: sparse and nested tensors are not supported"),
    "nested": (
        torch.nested.nested_tensor([T, T], layout=torch.jagged),
        {},
        "x: sparse and nested tensors are not supported",
    ),
    "no-rows": (torch.zeros(0, 3), {"shape": (1, 3)}, "x: expected shape [1, 3], got [0, 3]"),
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
def test_check_tensor_raises(case: str) -> None:
    tensor, wanted, text = TENSORS[case]
    with pytest.raises(ShapeError, match=re.escape(text)):
        checks.check_tensor("x", tensor, **wanted)


def test_check_tensor_passes() -> None:
    for wanted in (
        {}, {"shape": (2, 3)}, {"shape": [2, None]}, {"shape": torch.Size((2, 3))}, {"dtype": F32},
        {"dtype": (I32, F32)}, {"shape": (None, 3), "dtype": F32, "device": CPU},
    ):  # fmt: skip
        checks.check_tensor("x", T, **wanted)
    checks.check_tensor("x", torch.zeros(0, 3), shape=(None, 3))


def test_check_not_empty() -> None:
    checks.check_not_empty("x", torch.zeros(1, 1))
    for shape in ((0,), (3, 0), (0, 3)):
        with pytest.raises(ShapeError, match="x: the tensor is empty"):
            checks.check_not_empty("x", torch.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "strides", "unit"),
    [
        ((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((2, 1), (1, 7), True), ((2, 2), (1, 7), False),
        ((2, 3), (9, 1), True), ((3,), (2,), False), ((1,), (5,), True), ((), (), True), ((3,), (0,), False),
        ((0,), (2,), True),
    ],
    ids=str,
)  # fmt: skip
def test_check_unit_stride(shape, strides, unit: bool) -> None:
    tensor = torch.zeros(50).as_strided(shape, strides)
    if unit:
        checks.check_unit_stride("x", tensor)
    else:
        with pytest.raises(ShapeError, match="x: expected stride 1 in the last dimension"):
            checks.check_unit_stride("x", tensor)


LAYOUTS = [
    ((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (4, 1)), ((2, 3), (2, 1)), ((2, 3), (1, 1)), ((2, 3), (0, 1)),
    ((1, 3), (0, 1)), ((1, 3), (2, 1)), ((2, 3), (1, 3)), ((3, 2), (1, 2)), ((2, 2, 2), (1, 2, 4)),
    ((2, 2, 2), (4, 1, 2)), ((2, 2, 2), (3, 1, 2)), ((2, 2, 2), (5, 2, 1)), ((2, 1, 3), (3, 0, 1)), ((3,), (2,)),
    ((3,), (0,)), ((2, 3, 2), (6, 2, 1)), ((2, 3, 2), (5, 2, 1)), ((2, 3, 2), (7, 2, 1)), ((3, 2, 3), (1, 9, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS, ids=str)
def test_check_no_overlap(shape, strides) -> None:
    """Compared with the addresses of all elements, for layouts without interleaved dimensions."""
    tensor = torch.zeros(60).as_strided(shape, strides)
    addresses = torch.arange(60).as_strided(shape, strides).flatten().tolist()
    if len(set(addresses)) == len(addresses):
        checks.check_no_overlap("x", tensor)
    else:
        with pytest.raises(ShapeError, match="x: elements may share memory"):
            checks.check_no_overlap("x", tensor)


@pytest.mark.parametrize("value", [3, 7, np.int64(5), np.uint8(7)], ids=repr)
def test_check_int_passes(value: object) -> None:
    number = checks.check_int("n", value, 3, 7, advice="fix it")
    assert (type(number), number) == (int, int(value))
    assert checks.check_int("n", 10**30, 3, advice="fix it") == 10**30
    assert checks.check_int("n", 0, 0, 0, advice="fix it") == 0


@pytest.mark.parametrize("value", [2, 8, True, 5.0, "5", None, np.float32(5), np.bool_(True), [5], 10**30], ids=repr)
def test_check_int_raises(value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"n: expected an int from 3 to 7, got {value!r}; fix it")):
        checks.check_int("n", value, 3, 7, advice="fix it")


def test_shown_truncates_to_80_characters() -> None:
    assert checks.shown("x" * 78) == repr("x" * 78)
    assert checks.shown("x" * 79) == "'" + "x" * 76 + "..."


def test_is_finite() -> None:
    for value in (0, -1.5, 10**300, np.float32(2), np.int8(3), Fraction(1, 3), 1e308):
        assert checks.is_finite(value) is True
    infinite = (float("inf"), float("-inf"), float("nan"), np.float32("nan"), 10**400)
    for value in (*infinite, True, False, "1", None, 1j, Decimal(1)):
        assert checks.is_finite(value) is False
