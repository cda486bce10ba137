"""Every option of the attention kernel, alone and in pairs, against the dense oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.reference import attention_reference
from tests.support.attention_cases import (
    BF16,
    E4M3,
    F16,
    Case,
    assert_accurate,
    decode,
    make_problem,
)
from tests.support.attention_checks import (
    COMBINATIONS,
    FACTORS,
    check_scales_of_keys,
    check_slopes,
    combination_case,
    combination_id,
)


@pytest.mark.parametrize("native", [False, True], ids=["triton", "cuda"])
@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_unusual_scales_of_keys(op: str, native: bool, kernel_device: str, rng: torch.Generator) -> None:
    reqs = decode((40, 0, 17)) if op == "decode" else ((40, 5), (0, 0), (17, 1))
    device = torch.device(kernel_device)
    check_scales_of_keys(lambda problem: problem.run(op), device, rng, reqs=reqs, native=native)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("native", [False, True], ids=["triton", "cuda"])
@pytest.mark.parametrize("alibi", ["linear", "sqrt"])
@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_slopes(op: str, alibi: str, native: bool, kernel_device: torch.device, rng: torch.Generator) -> None:
    reqs = decode((40, 0, 300)) if op == "decode" else ((40, 5), (0, 0), (300, 1))
    check_slopes(lambda problem: problem.run(op), kernel_device, rng, reqs=reqs, native=native, alibi=alibi)


def test_slopes_in_the_reference(rng: torch.Generator) -> None:
    check_slopes(lambda problem: problem.run_reference(attention_reference), torch.device("cpu"), rng)


def test_the_array_covers_every_pair():
    for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2):
        assert {(row[a], row[b]) for row in COMBINATIONS} == set(itertools.product(xs, ys))
    assert len(COMBINATIONS) < 70


@pytest.mark.parametrize("row", [pytest.param(row, id=combination_id(row)) for row in COMBINATIONS])
def test_combinations(row: dict[str, Any], kernel_device: torch.device, rng: torch.Generator) -> None:
    op, case = combination_case(row)
    problem = make_problem(case, rng, kernel_device)
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    assert_accurate(problem, problem.run(op))
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


@pytest.mark.parametrize("row", [pytest.param(row, id=combination_id(row)) for row in COMBINATIONS[:24]])
def test_reference_of_combinations(row: dict[str, Any], rng: torch.Generator) -> None:
    op, case = combination_case(row)
    problem = make_problem(case, rng, torch.device("cpu"))
    got = problem.run(op) if op == "contiguous" else problem.run_reference(attention_reference)
    assert_accurate(problem, got)


LONG = {
    "bf16": Case("", decode((131072, 5)), dtype=BF16, head_dim=128, num_sms=132),
    "fp8": Case("", decode((131072, 5)), dtype=BF16, kv_dtype=E4M3, head_dim=128, num_sms=132),
    "window": Case("", decode((131072, 5)), dtype=F16, head_dim=64, window=4000, num_sms=132),
    "invariant": Case("", decode((131072, 5)), dtype=BF16, head_dim=128, batch_invariant=True, num_sms=132),
    "speculative": Case("", decode((131072, 5), 4), dtype=BF16, head_dim=128, alibi="linear", num_sms=132),
    "varlen": Case("", ((131072, 20), (7, 7)), dtype=BF16, head_dim=128, num_sms=132),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
def test_request_of_128k_tokens(name: str, rng: torch.Generator) -> None:
    problem = make_problem(LONG[name], rng, torch.device("cuda"))
    assert_accurate(problem, problem.run("varlen" if name == "varlen" else "decode"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [64, 256])
def test_large_batches(num_reqs: int, rng: torch.Generator) -> None:
    """Batch sizes for which Triton plans use one-warp programs, and plans of the CUDA kernel smaller blocks."""
    lengths = torch.randint(0, 700, (num_reqs,), generator=rng).tolist()
    base = Case("", decode(tuple(lengths)), dtype=BF16, num_kv_heads=8, head_dim=128, num_sms=132)
    for kv_dtype, native in itertools.product((None, E4M3), (False, True)):
        case = replace(base, kv_dtype=kv_dtype, native=native)
        problem = make_problem(case, rng, torch.device("cuda"))
        assert_accurate(problem, problem.run())
        again = replace(problem, out=torch.empty_like(problem.out))
        assert torch.equal(again.run(), problem.run())
