"""The CUDA kernel's own source on a CPU, instruction by instruction: the device tests' cases, and planted bugs."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.kernels.attention import native
from graphrt.kernels.attention.work_list import schedule_attention
from tests.kernels import native_emulation
from tests.kernels.attention_cases import NAN, UNWRITTEN, Case, Problem, assert_accurate, make_problem
from tests.kernels.test_attention_native import CASES

pytestmark = pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")

CPU = torch.device("cpu")
BY_ID = {case.id: case for case in CASES}


def run(problem: Problem) -> torch.Tensor:
    """Schedule, poison what may be poisoned, and attend with the CUDA kernel."""
    plan = problem.decode_plan()
    workspace, work_list = problem.scratch(plan)
    options = problem.options
    schedule_attention(plan, problem.seq_lens, work_list, causal=options.causal, sliding_window=options.sliding_window)
    for tensor in (workspace.partial_out, workspace.partial_lse):
        tensor.fill_(NAN)
    problem.out.fill_(UNWRITTEN)
    if problem.lse is not None:
        problem.lse.fill_(UNWRITTEN)
    assert native.native_serves(plan, problem.q, problem.k_cache, problem.v_cache, work_list, problem.out)
    native.native_attention(
        problem.q, problem.k_cache, problem.v_cache, problem.block_table, work_list, problem.out, problem.lse,
        workspace, plan, options, False,
    )  # fmt: skip
    assert not workspace.counters.any(), "the kernel must leave its counters at 0"
    return problem.out.clone()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_every_case(case: Case, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "launch", native_emulation.emulated_launch)
    problem = make_problem(case, rng, CPU)
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    first = run(problem)
    assert_accurate(problem, first)
    assert torch.equal(run(problem), first), "another order of clusters must give the same bits"
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


# What a wrong kernel would hold, what it is to be replaced by, and a case that must notice.
BUGS = {
    "copies_are_not_waited_for": ("      wait_oldest();\n", "", "bf16"),
    "the_page_tail_is_read": ("from ? 16 : 0;", "from ? 16 : 16;", "bf16"),
    "pages_of_the_segment_before": ("_known ? t.next_pages :", "_known ? t.pages :", "segments_of_many_tiles"),
    "a_stage_is_filled_too_early": ("free_stage = stage;", "free_stage = (stage + 1) % STAGES;", "bf16"),
    "warps_do_not_wait_to_merge": ("lane);\n    __syncthreads();\n", "lane);\n", "bf16"),
    "results_are_overwritten": ("if (segment + 1 < end) __syncthreads();", "", "many_segments"),
    "partial_results_in_one_place": ("slots.of(s.split), p", "slots.of(0), p", "bf16"),
    "the_counter_stays": ("      if (is_last) *at = 0;\n", "", "bf16"),
    "groups_are_not_merged": ("level < (groups > 1 ? 2 : 1)", "level < 1", "merge_in_two_stages"),
    "the_cluster_does_not_wait": ("inbox.wait();", "", "one_row"),
    "a_slice_goes_astray": ("source * SLICE + unit % SLICE)", "source * SLICE)", "one_row"),
    "later_tokens_are_seen": ("position <= query)", "true)", "speculative"),
    "the_window_is_ignored": ("visible &= position > query - p.window;", "", "window"),
    "rows_are_not_swizzled_alike": ("(column ^ (SWIZZLE(token) * 16))", "column", "bf16"),
    "fp8_halves_swapped": ("0x3120", "0x2031", "one_row_fp8"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, case = BUGS[bug]
    monkeypatch.setattr(native, "launch", native_emulation.emulated_launch)
    monkeypatch.setattr(native_emulation, "planted", (right, wrong))
    random.seed(0)
    with pytest.raises(AssertionError):
        assert_accurate(problem := make_problem(BY_ID[case], rng, CPU), run(problem))
