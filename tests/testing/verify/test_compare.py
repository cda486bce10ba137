"""Comparison of tensors: which elements differ, the first one, and the range that a mask covers."""

from __future__ import annotations

import math

import pytest
import torch

from graphrt.testing.numerics import bits_of
from graphrt.testing.verify.compare import Difference, differing, first_difference, region, same_bits

NAN, INF = math.nan, math.inf

DIFFERENT = {
    "equal": ([1.0, 2.0], [1.0, 2.0], 0.0, [False, False]),
    "nan": ([NAN, NAN], [NAN, 1.0], 0.0, [False, True]),
    "zeros": ([0.0, 1.0], [-0.0, 1.0], 0.0, [True, False]),
    "near": ([1.0, 2.0], [1.001, 2.1], 0.01, [False, True]),
    "infinities": ([INF, INF], [INF, -INF], 0.01, [False, True]),
    "complex": ([1 + 1j, 1 + 1j, 1 + 1j], [1 + 1j, 1 - 1j, 2 + 1j], 0.0, [False, True, True]),
    "complex near": ([1e3 + 1e-2j, 1 + 0.5j], [1e3 + 0j, 1 + 0j], 1e-4, [False, True]),
    "complex nan": ([complex(NAN, 1), complex(NAN, 1)], [complex(NAN, 1), complex(NAN, 2)], 1e-4, [False, True]),
    "complex infinity": ([complex(INF, 0), complex(INF, 0)], [complex(INF, 0), complex(-INF, 0)], 1e-4, [False, True]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differing(name: str) -> None:
    have, want, tolerance, expected = DIFFERENT[name]
    assert differing(torch.tensor(have), torch.tensor(want), tolerance).tolist() == expected
    if torch.tensor(have).is_complex():
        assert differing(torch.tensor(have).conj(), torch.tensor(want).conj(), tolerance).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "nan", "other_nan"),
    [(torch.float32, 0x7FC00000, 0x7FC00001), (torch.bfloat16, 0x7FC0, 0x7FC1), (torch.float8_e4m3fn, 0x7F, -1)],
)
def test_nan_with_other_bits_is_equal(dtype: torch.dtype, nan: int, other_nan: int) -> None:
    have, want = torch.zeros(2, 3).to(dtype).t(), torch.zeros(2, 3).to(dtype).t()
    bits_of(have)[0], bits_of(want)[0] = nan, other_nan
    bits_of(have)[1, 1] = nan
    assert differing(have, want).nonzero().tolist() == [[1, 1]]


def test_same_bits_of_tensors_of_any_dtype() -> None:
    """NaN equals itself, and -0 differs from 0."""
    floats = [torch.tensor([0.0, NAN, 2.0], dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    others = [torch.tensor([True]), torch.tensor(7), torch.empty(0), torch.tensor([1 + 2j]), torch.ones(2, 3).t()]
    assert same_bits([], [])
    assert same_bits([*floats, *others], [t.clone() for t in (*floats, *others)])
    assert same_bits([others[3].conj()], [torch.tensor([1 - 2j])])
    for index, tensor in enumerate(floats):
        wrong = [t.clone() for t in floats]
        wrong[index][0] = -0.0
        assert not same_bits(floats, wrong), tensor.dtype
    assert not same_bits([torch.zeros(4)], [torch.zeros(2, 2)])
    assert not same_bits([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)])


def test_the_first_difference_ignores_elements_that_are_not_counted() -> None:
    have, want = torch.zeros(2, 3), torch.zeros(2, 3)
    have[0, 2], have[1, 0] = 1, 2
    assert first_difference("a", have, want).at == (0, 2)
    counted = torch.tensor([[False] * 3, [True] * 3])
    found = first_difference("a", have, want, counted=counted)
    assert found == Difference("a", (1, 0), 2.0, 0.0, 1, 3)
    assert first_difference("a", have[:, 1], want[:, 1]) is None
    assert str(first_difference("a", torch.tensor(1), torch.tensor(2))) == "a: got 1, expected 2 (1 of 1 differ)"
    complex_one = first_difference("a", torch.tensor([1j]), torch.tensor([2j]))
    assert str(complex_one) == "a[0]: got 1j, expected 2j (1 of 1 differ)"


REGIONS = {
    "p": torch.ones(8),
    "p[5:8]": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]),
    "p[2]": torch.tensor([0, 0, 1, 0]),
    "p[1:4]": torch.tensor([0, 1, 0, 1, 0]),
    "p[1:3, 2]": torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 1]]),
    "p[1]": torch.tensor([[0, 0], [1, 1]]),
}


@pytest.mark.parametrize("text", REGIONS)
def test_region_is_the_index_range_of_a_mask(text: str) -> None:
    assert region("p", REGIONS[text].bool()) == text
