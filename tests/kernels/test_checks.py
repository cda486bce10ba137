"""What the shared checks of numbers, flags and lists accept, and what they refuse."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphrt.kernels import checks
from graphrt.kernels.errors import ConfigError, ShapeError


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
def test_ints_of_every_kind(values) -> None:
    found = ints(values)
    assert found.dtype == np.int64
    assert found.flags.c_contiguous
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize("values", [[], (), np.array([]), torch.tensor([])], ids=["list", "tuple", "array", "tensor"])
def test_no_ints(values) -> None:
    assert ints(values).tolist() == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (None, "pages: expected ints from 0 to 9 on the host, got None; pass pages"),
        ("12", "got '12'"),
        (b"12", "got b'12'"),
        (3, "got 3;"),
        ({1, 2}, "got {1, 2}"),
        ([1, True], r"pages\[1\]: expected an int from 0 to 9, got True"),
        ([1, 2.0], r"pages\[1\]: .* got 2.0"),
        ([1, [2]], r"pages\[1\]: .* got \[2\]"),
        ([1, None], r"pages\[1\]: .* got None"),
        ([1, torch.tensor(2)], r"pages\[1\]: .* got tensor\(2\)"),
        ([1, 2, -1], r"pages\[2\]: expected an int from 0 to 9, got -1"),
        ([1, 10], r"pages\[1\]: .* got 10"),
        ([2**70], r"pages\[0\]: .* got 1180591620717411303424"),
        ([10**5000], r"pages\[0\]: .* got a value of type int"),
        (np.array([2**63], np.uint64), r"pages\[0\]: .* got 9223372036854775808"),
        (np.array([True]), "got bool values"),
        (np.array([1.0]), "got float64 values"),
        (np.array([[1]]), r"expected one dimension, got shape \[1, 1\]"),
        (np.array(1), r"expected one dimension, got shape \[\]"),
        (np.array([1, None]), "got object values"),
        (torch.tensor([1.0]), "got a float32 tensor on cpu"),
        (torch.tensor([1.0], requires_grad=True), "got a float32 tensor on cpu"),
        (torch.tensor([1.0]).bfloat16(), "got a bfloat16 tensor on cpu"),
        (torch.tensor([True]), "got bool values"),
        (torch.tensor([1j]), "got complex64 values"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "got a int64 tensor on meta"),
        (torch.tensor([1, 2]).to_sparse(), "got a int64 tensor on cpu"),
    ],
)
def test_what_no_list_of_ints_is(values, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        ints(values)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: checks.check_bool("f", 1, advice="do"), "f: expected True or False, got 1; do"),
        (lambda: checks.check_bool("f", "no", advice="do"), "got 'no'"),
        (lambda: checks.check_bool("f", None, advice="do"), "got None"),
        (lambda: checks.check_callable("f", "abc", advice="do"), "f: expected a callable, got 'abc'; do"),
        (lambda: checks.check_instance("f", 3, str, advice="do"), "f: expected str, got 3; do"),
        (lambda: checks.check_instance("f", 3, (str, bytes), advice="do"), "f: expected str or bytes, got 3"),
        (lambda: checks.check_int("f", 10**5000, 0, 9, advice="do"), "from 0 to 9, got a value of type int; do"),
        (lambda: checks.check_int("f", NoRepr(), 0, advice="do"), "got a value of type NoRepr"),
        (lambda: checks.check_int("f", list(range(99)), 0, advice="do"), r"got \[0, 1, [0-9, ]+\.\.\.; do"),
        (lambda: checks.check_number("f", math.nan, 0, advice="do"), "f: expected a finite number >= 0, got nan; do"),
        (lambda: checks.check_number("f", -0.1, 0, advice="do"), "got -0.1"),
        (lambda: checks.check_number("f", 1.1, 0, 1, advice="do"), "a finite number from 0 to 1, got 1.1"),
        (lambda: checks.check_number("f", True, 0, 1, advice="do"), "got True"),
        (lambda: checks.check_named_tensors("w", "abc"), "w: expected pairs of a name and a tensor, got 'abc'"),
        (lambda: checks.check_named_tensors("w", 3), "got 3;"),
        (lambda: checks.check_named_tensors("w", np.array(3)), r"got array\(3\);"),
        (lambda: checks.check_named_tensors("w", itertools.count()), r"w\[0\]: expected a name and a tensor, got 0"),
        (lambda: checks.check_named_tensors("w", ["ab"]), r"w\[0\]: expected a name and a tensor, got 'ab'"),
        (lambda: checks.check_named_tensors("w", {"a": torch.ones(1)}), r"w\[0\]: .* got 'a'"),
        (lambda: checks.check_named_tensors("w", [("a", 3)]), r"w\[0\]: .* got \('a', 3\)"),
    ],
)
def test_what_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


@pytest.mark.parametrize(
    ("value", "text"),
    [("ab", "got 'ab'"), (None, "got None"), ({1}, r"got \{1\}"), ([1], "2 pages, got 1; pass one of each")],
    ids=["text", "none", "set", "length"],
)
def test_what_no_sequence_is(value, text: str) -> None:
    with pytest.raises(ShapeError, match=f"src: expected .*{text}"):
        checks.check_sequence("src", value, 2, of="pages")


def test_what_is_accepted_comes_back_as_pythons_own() -> None:
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
def test_what_a_check_refuses_it_refuses_again(wrong: object) -> None:
    check = checks.once_per_geometry(lambda x: checks.check_tensor("x", x, shape=(2, None)))
    for _ in range(2):
        with pytest.raises(ShapeError, match="x: expected"):
            check(wrong)


def test_geometries_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MOST_PASSED", 2)
    seen: list[int] = []
    check = checks.once_per_geometry(lambda x: seen.append(len(x)))
    for n in (1, 2, 3, 3, 1):
        check(torch.zeros(n))
    assert seen == [1, 2, 3, 1]
