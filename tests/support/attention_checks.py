"""Checks and option combinations that the tests of several attention kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

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
    "gqa": [1, 3, 4, 7, 16],
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

COMBINATIONS = covering_array(FACTORS)


def combination_id(row: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in row.values())


def combination_case(row: dict[str, Any]) -> tuple[str, Case]:
    """The operator and case of a row of the array: ragged lengths at page boundaries, padding, and a split request."""
    size, op = row["page_size"], row["op"]
    native = row["native"] and op in ("decode", "speculative")
    lengths = (0, 1, size - 1, size, size + 1, 1500 if native else 90)
    if op == "decode":
        reqs = decode(lengths)
    elif op == "speculative":
        reqs = decode(lengths, 3)
    else:
        reqs = ((0, 0), (90, 9), (1, 1), (size, min(size, 20)), (size + 1, 1))
    case = Case(
        op,
        reqs,
        **{name: value for name, value in row.items() if name not in ("kv", "op", "mask", "v_head_dim")},
        kv_dtype=None if row["kv"] == "same" else row["kv"],
        num_kv_heads=2,
        v_head_dim=0 if row["v_head_dim"] == "same" else row["v_head_dim"],
        causal=row["mask"] != "full",
        window=33 if row["mask"] == "window" else 0,
        chunk=37 if row["mask"] == "chunks" else 0,
        pad_tokens=3 if op in ("varlen", "contiguous") else 0,
        num_sms=24 if native else 3,
    )
    return "decode" if op == "speculative" else op, case


def check_batch_invariant_reqs(
    run: Callable[[Problem], torch.Tensor], kv_dtype: torch.dtype | None, device: torch.device, rng: torch.Generator
) -> None:
    """The bits of a request do not depend on other requests, on its index, or on padding.

    The batches are small and large, because the CUDA kernel uses different block sizes for them.
    """
    reqs = decode((300, 17, 0, 900, 64))
    case = Case("", reqs, dtype=BF16, kv_dtype=kv_dtype, batch_invariant=True, num_kv_heads=2, num_sms=4)
    problem = make_problem(case, rng, device)
    kinds = {problem.decode_plan().native.blocks_per_sm}
    together = run(problem)
    assert_accurate(problem, together)
    for order in ([3], [0, 2], [4, 3, 2, 1, 0], [1, 0, 2, 2, 2, 2, 4]):
        alone = replace(
            problem,
            case=replace(case, reqs=tuple(reqs[req] for req in order)),
            q=problem.q[order].contiguous(),
            out=torch.empty_like(problem.q[order]),
            lse=None,
            block_table=problem.block_table[order].contiguous(),
            seq_lens=problem.seq_lens[order].contiguous(),
            workspaces={},
        )
        kinds.add(alone.decode_plan().native.blocks_per_sm)
        assert torch.equal(run(alone), together[order])
    assert kinds == {1, 2}


def check_large_queries(run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator) -> None:
    """`run` with queries beyond float16's range: in all elements, and in one element at any index."""
    problem = make_problem(Case("", decode((70, 3) * 16), dtype=BF16, kv_dtype=E4M3), rng, device)
    options, small = problem.options, problem.q.clone()
    one = torch.zeros_like(small)
    one.view(-1, 64)[torch.arange(128), torch.randperm(128, generator=rng) % 64] = 20.0
    for queries in (small, one):
        problem.q, problem.options = queries, options
        expected = run(problem)
        assert_accurate(problem, expected)
        problem.q = (queries.double() * 1e6).to(BF16)
        problem.options = replace(options, softmax_scale=options.softmax_scale * 1e-6)
        torch.testing.assert_close(run(problem), expected, rtol=0.0, atol=0.05)


def check_infinite_values(
    run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator, **changes: Any
) -> None:
    """`run` with infinite elements in the first and last value: only those outputs are infinite, with any splits."""
    for lengths, num_sms in (((40,), 4), ((300, 20, 200), 4), ((900, 40, 500), 24)):
        case = Case("", decode(lengths), dtype=BF16, head_dim=128, num_sms=num_sms, lse=False)
        problem = make_problem(replace(case, **changes), rng, device)
        expected = torch.zeros(len(lengths), case.gqa, case.head_dim, dtype=torch.bool)
        for req, length in enumerate(lengths):
            for position, element in ((0, 5), (length - 1, 6)):
                page = problem.block_table[req, position // case.page_size]
                problem.v_cache[page, position % case.page_size, 0, element] = float("inf")
                expected[req, :, element] = True
        out = run(problem)
        assert torch.equal(out.isinf(), expected), lengths
        assert not out.isnan().any(), lengths


SCALES = Case("scales", decode((40, 0, 17)), dtype=F16, kv_dtype=E4M3, num_kv_heads=2, head_dim=64, lse=True)


def check_scales_of_keys(
    run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator, **changes: Any
) -> None:
    """`run` with unusual scales of keys: 0 and -1 are applied, and NaN is propagated."""
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
    assert not hidden[: len(seen)][seen].any(), "NaN in a scale must propagate"


def check_slopes(
    run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator, **changes: Any
) -> None:
    """`run` with slopes of 1, 0 and NaN in one of several heads: that head is NaN, and the others are correct."""
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
    assert got[: len(seen)][seen][:, 5].isnan().all(), "NaN in a slope must propagate"
    assert torch.equal(got[: len(seen)][~seen], torch.zeros_like(got[: len(seen)][~seen]))
    slopes[5] = 1.0
    got[:, 5] = expected[:, 5]
    assert_accurate(problem, got)
