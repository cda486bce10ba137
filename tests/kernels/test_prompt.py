"""Prompt attention against a dense float64 oracle, with NaN wherever it may not read: Triton kernel and reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.attention_cases import BF16, UNWRITTEN, Case, assert_accurate, by_id, make_problem, strided
from tests.support.prompt_cases import (
    CASES,
    check_mixed_step,
    check_pages_before_the_window,
    check_replays,
    run_prompt,
)


@pytest.mark.parametrize("case", by_id(CASES))
def test_case(case: Case, op_device: torch.device, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, op_device)
    first = run_prompt(problem)
    assert_accurate(problem, first)
    assert torch.equal(run_prompt(problem), first), "a second run must give the same bits"


def test_strided_tensors(kernel_device: torch.device, rng: torch.Generator) -> None:
    case = Case("", ((140, 40), (0, 0), (17, 5)), num_kv_heads=2, gqa=2, dtype=BF16)
    problem, rest = strided(make_problem(case, rng, kernel_device))
    assert_accurate(problem, run_prompt(problem))
    assert (rest == UNWRITTEN).all()


def test_pages_before_the_window_are_not_read(kernel_device: torch.device, rng: torch.Generator) -> None:
    check_pages_before_the_window(kernel_device, rng, native=False)


def test_example_of_the_docs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "attention.md"
    (example,) = re.findall(r"^```python\n(import torch\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    q, k, v = (names[name].float().transpose(0, 1) for name in "qkv")
    for req in (slice(0, 3), slice(3, 8)):
        want = torch.nn.functional.scaled_dot_product_attention(q[:, req], k[:, req], v[:, req]).transpose(0, 1)
        torch.testing.assert_close(names["out"][req].float(), want, rtol=0.0, atol=2e-3)


def test_mixed_step(kernel_device: torch.device, rng: torch.Generator) -> None:
    check_mixed_step(kernel_device, rng, native=False)


@pytest.mark.gpu
@pytest.mark.parametrize("first_req", [False, True])
def test_capture_and_replays_of_other_lengths(first_req: bool, rng: torch.Generator) -> None:
    check_replays(False, first_req, torch.device("cuda"), rng)
