"""Every option of the attention kernel, alone and in pairs, against the dense oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.reference import attention_reference
from tests.support.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    Case,
    Problem,
    assert_accurate,
    decode,
    make_problem,
)
from tests.support.covering import covering_array

FACTORS: dict[str, list[Any]] = {
    "dtype": [BF16, F16, F32],
    "kv": ["same", E4M3, E5M2],
    "head_dim": [13, 64, 72, 80, 96, 112, 128, 192, 256],
    "v_head_dim": ["same", 33, 64, 128],
    "group": [1, 3, 4, 7, 16],
    "page_size": [16, 32, 48, 128, 256],
    "layout": ["NHD", "HND"],
    "op": ["decode", "speculative", "varlen", "contiguous"],
    "mask": ["causal", "window", "chunks", "full"],
    "softcap": [0.0, 2.0],
    "alibi": ["", "linear", "sqrt"],
    "sinks": [False, True],
    "lse": [False, True],
    "batch_invariant": [False, True],
    "scale_per_head": [False, True],
    "native": [False, True],
}


ROWS = covering_array(FACTORS)

SCALES = Case("scales", decode((40, 0, 17)), dtype=F16, kv_dtype=E4M3, num_kv_heads=2, head_dim=64, lse=True)


def check_scales_of_keys(
    run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator, **changes: Any
) -> None:
    """`run` of a problem whose keys have scales that no calibration gives: 0 and -1 are followed, NaN is not hidden."""
    problem = make_problem(replace(SCALES, **changes), rng, device)
    scale, q = torch.ones(2, device=device), problem.q.clone()
    problem.options = replace(problem.options, k_scale=scale)

    def result(factor: float, queries: torch.Tensor) -> torch.Tensor:
        scale.fill_(factor)
        problem.q.copy_(queries)
        return run(problem).clone()

    same = {"rtol": 0.0, "atol": 2e-3}
    torch.testing.assert_close(result(-1.0, q), result(1.0, -q), **same)
    torch.testing.assert_close(result(0.0, q), result(1.0, q.nan_to_num().mul(0.0)), **same)
    hidden = result(float("nan"), q).isfinite().flatten(1).any(1)
    seen = (problem.seq_lens > 0).cpu().repeat_interleave(problem.query_start_loc.diff().cpu().long())
    assert not hidden[: len(seen)][seen].any(), "NaN in a scale must show"


@pytest.mark.parametrize("native", [False, True], ids=["triton", "cuda"])
@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_scales_of_keys_that_are_no_scales(op: str, native: bool, kernel_device: str, rng: torch.Generator) -> None:
    rows = decode((40, 0, 17)) if op == "decode" else ((40, 5), (0, 0), (17, 1))
    device = torch.device(kernel_device)
    check_scales_of_keys(lambda problem: problem.run(op), device, rng, rows=rows, native=native)


def check_slopes(
    run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator, **changes: Any
) -> None:
    """`run` with slopes of 1, of 0, and of NaN in one head of several: that head is NaN, and the others are right."""
    base = Case("", decode((40, 0, 300)), dtype=BF16, num_kv_heads=2, head_dim=64, alibi="linear", lse=False)
    problem = make_problem(replace(base, **changes), rng, device)
    assert problem.options.alibi_slopes is not None
    slopes = problem.options.alibi_slopes
    slopes.copy_(torch.tensor([1.0, 0.5, 0.25, 0.0, 1.0, 1.0, 2.0, 0.0]))
    expected = run(problem).clone()
    assert_accurate(problem, expected)
    slopes[5] = float("nan")
    got = run(problem)
    seen = (problem.seq_lens > 0).cpu().repeat_interleave(problem.query_start_loc.diff().cpu().long())
    assert got[: len(seen)][seen][:, 5].isnan().all(), "NaN in a slope must show"
    assert torch.equal(got[: len(seen)][~seen], torch.zeros_like(got[: len(seen)][~seen]))
    slopes[5] = 1.0
    got[:, 5] = expected[:, 5]
    assert_accurate(problem, got)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("native", [False, True], ids=["triton", "cuda"])
@pytest.mark.parametrize("alibi", ["linear", "sqrt"])
@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_slopes(op: str, alibi: str, native: bool, kernel_device: torch.device, rng: torch.Generator) -> None:
    rows = decode((40, 0, 300)) if op == "decode" else ((40, 5), (0, 0), (300, 1))
    check_slopes(lambda problem: problem.run(op), kernel_device, rng, rows=rows, native=native, alibi=alibi)


def test_slopes_in_the_reference(rng: torch.Generator) -> None:
    check_slopes(lambda problem: problem.run_reference(attention_reference), torch.device("cpu"), rng)


def make_case(row: dict[str, Any]) -> tuple[str, Case]:
    """Ragged lengths at the edges of the page, pad rows and pad tokens included, and a row that blocks share."""
    size, op = row["page_size"], row["op"]
    native = row["native"] and op in ("decode", "speculative")
    lengths = (0, 1, size - 1, size, size + 1, 1500 if native else 90)
    if op == "decode":
        rows = decode(lengths)
    elif op == "speculative":
        rows = decode(lengths, 3)
    else:
        rows = ((0, 0), (90, 9), (1, 1), (size, min(size, 20)), (size + 1, 1))
    case = Case(
        op,
        rows,
        dtype=row["dtype"],
        kv_dtype=None if row["kv"] == "same" else row["kv"],
        page_size=size,
        layout=row["layout"],
        num_kv_heads=2,
        group=row["group"],
        head_dim=row["head_dim"],
        v_head_dim=0 if row["v_head_dim"] == "same" else row["v_head_dim"],
        causal=row["mask"] != "full",
        window=33 if row["mask"] == "window" else 0,
        chunk=37 if row["mask"] == "chunks" else 0,
        softcap=row["softcap"],
        alibi=row["alibi"],
        sinks=row["sinks"],
        scale_per_head=row["scale_per_head"],
        lse=row["lse"],
        batch_invariant=row["batch_invariant"],
        native=row["native"],
        pad_tokens=3 if op in ("varlen", "contiguous") else 0,
        num_sms=24 if native else 3,
    )
    return "decode" if op == "speculative" else op, case


def req_index(row: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in row.values())


def test_the_array_covers_every_pair():
    for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(xs, ys))
    assert len(ROWS) < 70


@pytest.mark.parametrize("row", [pytest.param(row, id=req_index(row)) for row in ROWS])
def test_combinations(row: dict[str, Any], kernel_device: torch.device, rng: torch.Generator) -> None:
    op, case = make_case(row)
    problem = make_problem(case, rng, kernel_device)
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    assert_accurate(problem, problem.run(op))
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


@pytest.mark.parametrize("row", [pytest.param(row, id=req_index(row)) for row in ROWS[:24]])
def test_reference_of_combinations(row: dict[str, Any], rng: torch.Generator) -> None:
    op, case = make_case(row)
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
def test_a_row_of_128k(name: str, rng: torch.Generator) -> None:
    problem = make_problem(LONG[name], rng, torch.device("cuda"))
    assert_accurate(problem, problem.run("varlen" if name == "varlen" else "decode"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 256])
def test_large_batches(rows: int, rng: torch.Generator) -> None:
    """Sizes at which Triton plans take narrow programs, and those of the CUDA kernel smaller blocks."""
    lengths = torch.randint(0, 700, (rows,), generator=rng).tolist()
    base = Case("", decode(tuple(lengths)), dtype=BF16, num_kv_heads=8, head_dim=128, num_sms=132)
    for kv_dtype, native in itertools.product((None, E4M3), (False, True)):
        case = replace(base, kv_dtype=kv_dtype, native=native)
        problem = make_problem(case, rng, torch.device("cuda"))
        assert_accurate(problem, problem.run())
        again = replace(problem, out=torch.empty_like(problem.out))
        assert torch.equal(again.run(), problem.run())
