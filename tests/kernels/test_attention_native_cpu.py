"""The CUDA kernel's own source on a CPU, instruction by instruction: the device tests' cases, and planted bugs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from graphrt.kernels.attention import native
from graphrt.kernels.attention.call import AttentionCall
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.native.nvrtc import NativeVariant
from tests.kernels.test_attention import check_batch_invariant_rows, check_infinite_values, check_large_queries
from tests.kernels.test_attention_features import ROWS, check_scales_of_keys, check_slopes, make_case, req_index
from tests.kernels.test_attention_native import BASE, CASES, check_logits, check_values_of_zero, with_blocks
from tests.support import native_emulation
from tests.support.attention_cases import E4M3, NAN, UNWRITTEN, Case, Problem, assert_accurate, decode, make_problem

pytestmark = pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")

Change = Callable[[AttentionPlan], AttentionPlan]

CPU = torch.device("cpu")
BY_ID = {case.id: case for case in CASES}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the CPU, and in every run of a test in the same orders."""
    monkeypatch.setattr(native, "launch", native_emulation.emulated_launch)
    monkeypatch.setattr(native_emulation, "launches", itertools.count())


def call_of(
    problem: Problem, plan: AttentionPlan, workspace: AttentionWorkspace, work_list: torch.Tensor
) -> AttentionCall:
    return AttentionCall(
        problem.q, problem.k_cache, problem.v_cache, problem.block_table, None, problem.seq_lens, work_list,
        problem.out, problem.lse, workspace, problem.options, plan, pdl=False,
    )  # fmt: skip


def run(problem: Problem, change: Change = lambda plan: plan) -> torch.Tensor:
    """Schedule, poison what may be poisoned, and attend with the CUDA kernel, by a changed plan."""
    plan = change(problem.decode_plan())
    workspace, work_list = problem.scratch(plan)
    schedule_attention(plan, problem.seq_lens, work_list, **problem.case.spans)
    for tensor in (workspace.partial_out, workspace.partial_lse):
        tensor.fill_(NAN)
    problem.out.fill_(UNWRITTEN)
    if problem.lse is not None:
        problem.lse.fill_(UNWRITTEN)
    assert native.native_fault(plan, problem.q, problem.k_cache, problem.v_cache, work_list, problem.out) is None
    native.native_attention(call_of(problem, plan, workspace, work_list))
    assert not workspace.counters.any(), "the kernel must leave its counters at 0"
    return problem.out.clone()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_every_case(case: Case, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, CPU)
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    first = run(problem)
    assert_accurate(problem, first)
    assert torch.equal(run(problem), first), "other timing, or another order, must give the same bits"
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


def test_scales_of_keys_that_are_no_scales(rng: torch.Generator) -> None:
    check_scales_of_keys(run, CPU, rng, native=True)


def test_large_queries_with_an_fp8_cache(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_large_queries(run, CPU, rng)
    lesser = "fminf(peak, __shfl_xor_sync(0xffffffffu, peak, 2)"
    monkeypatch.setattr(native_emulation, "planted", (lesser.replace("fminf", "fmaxf"), lesser))
    with pytest.raises(AssertionError):
        check_large_queries(run, CPU, rng)


def test_infinite_values(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_infinite_values(run, CPU, rng)
    monkeypatch.setattr(native_emulation, "planted", ("counts ? x.x : 0.0f", "x.x"))
    with pytest.raises(AssertionError):
        check_infinite_values(run, CPU, rng)


@pytest.mark.parametrize("rows", [(40, 0, 300), (300,)], ids=["warps", "cluster"])
def test_slopes(rows: tuple[int, ...], rng: torch.Generator) -> None:
    check_slopes(run, CPU, rng, rows=decode(rows))


def served_combinations() -> list[Any]:
    """Rows of the covering array that the CUDA kernel serves, with everything else as it is."""
    found = []
    for row in ROWS:
        op, case = make_case(row | {"native": True})
        if op == "decode" and case.decode_plan().native is not None:
            found.append(pytest.param(case, id=req_index(row)))
    return found


@pytest.mark.parametrize("case", served_combinations())
def test_combinations(case: Case, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, CPU)
    assert_accurate(problem, run(problem))


def test_logits(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits(run, CPU, rng)
    monkeypatch.setattr(native_emulation, "planted", ("/ 3 + square * (2", "/ 3 - square * (2"))
    with pytest.raises(AssertionError):
        check_logits(run, CPU, rng)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
def test_batch_invariant_rows(kv_dtype: torch.dtype | None, rng: torch.Generator) -> None:
    check_batch_invariant_rows(run, kv_dtype, CPU, rng)


# Clusters with many segments each, so that the buffers between blocks are used again, and barriers in every phase.
CLUSTERS = replace(BASE, id="clusters", rows=decode((64, 1, 100, 17, 0, 130, 5, 40, 300, 33)), sinks=True)


@pytest.mark.parametrize(("cluster", "num_parts"), [(2, 2), (4, 3), (8, 2)])
def test_clusters_of_many_segments(cluster: int, num_parts: int, rng: torch.Generator) -> None:
    problem = make_problem(CLUSTERS, rng, CPU)
    change = partial(with_blocks, num_parts=num_parts, cluster=cluster, stages=2)
    first = run(problem, change)
    assert_accurate(problem, first)
    assert torch.equal(run(problem, change), first)


# What a wrong kernel would hold, what it is to be replaced by, and a case that must notice.
BUGS = {
    "copies_are_not_waited_for": ("      wait_oldest();\n", "", "bf16"),
    "the_page_tail_is_read": ("from ? 16 : 0;", "from ? 16 : 16;", "bf16"),
    "pages_of_the_segment_before": ("_known ? t.next_pages :", "_known ? t.pages :", "segments_of_many_tiles"),
    "a_stage_is_filled_too_early": ("free_stage = stage;", "free_stage = (stage + 1) % STAGES;", "bf16"),
    "warps_do_not_wait_to_merge": ("  __syncthreads();\n  merge_streams(", "  merge_streams(", "many_segments"),
    "nor_those_that_share_parts": ("lane);\n    __syncthreads();\n", "lane);\n", "invariant"),
    "results_are_overwritten": ("if (segment + 1 < end) __syncthreads();", "", "invariant_many_segments"),
    "letters_of_one_block": ("letter_of(first + sender,", "letter_of(first,", "merge_in_two_stages"),
    "letters_are_not_waited_for": ("while (__any_sync(0xffffffffu, missing));", "while (false);", "many_segments"),
    "letters_stay": ("      if (lane == 0) send(letters[i] + V_HEAD_DIM, 0.0f, 0.0f);\n", "", "bf16"),
    "values_are_not_waited_for": ("missing |= !has_come(values[i][j]);", ";", "many_segments"),
    "statistics_are_not_waited_for": ("missing |= !has_come(stats[i]);", "", "many_segments"),
    "half_a_pair_is_not_waited_for": ("!= 0 && __float", "!= 0 || __float", "many_segments"),
    "a_letter_of_a_later_block": ("letter_of(first + sender,", "letter_of(first + index,", "merge_in_two_stages"),
    "bundles_are_not_read": ("first, index, index / MERGE_BUNDLE,", "first, index, 0,", "merge_in_two_stages"),
    "bundles_are_not_merged": ("(index % MERGE_BUNDLE == MERGE_BUNDLE - 1)", "(false)", "merge_in_two_stages"),
    "partial_results_in_one_place": ("places.of(s.split), p", "places.of(0), p", "invariant"),
    "the_first_segment_is_not_shared": ("begin + 1 < end ? shared", "false ? shared", "ends_in_another_block"),
    "a_first_segment_taken_for_the_last": ("(leads && to > from", "(false && to > from", "many_segments"),
    "a_result_where_tiles_are_copied_to": ("} else if (segment + 1 < end) {", "} else if (false) {", "many_segments"),
    "results_of_other_units": ("float my_weight = exists ?", "float my_weight = true ?", "many_segments"),
    "pages_are_not_read_again": ("if (t.index == PAGES_PER_LOAD) {", "if (false) {", "pages_read_again"),
    "the_first_pages_again": ("(t.s, p, t.tile, lane)", "(t.s, p, first_tile(t.s, worker), lane)", "pages_read_again"),
    "outputs_are_not_turned": ("transpose(pack_output(", "(pack_output(", "many_segments"),
    "the_counter_stays": ("      if (is_last) *at = 0;\n", "", "invariant"),
    "bundles_of_clusters_are_not_merged": ("if (!goes_on) return;", "return;", "pairs_in_two_stages"),
    "the_cluster_does_not_wait": ("input_ring.wait();", "", "one_row"),
    "a_slice_goes_astray": ("source * SLICE + pair % SLICE)", "source * SLICE)", "one_row"),
    "later_tokens_are_seen": ("position <= query_position)", "true)", "speculative"),
    "the_edge_of_the_window": ("masked |= start <= s.", "masked |= start < s.", "window"),
    "the_window_is_ignored": ("visible &= position > query_position - p.window;", "", "window"),
    "what_lies_before_the_window": ("return max(s.seq_len - s.query_len + 1 - p.window, 0);", "return 0;", "window"),
    "the_edge_of_the_chunk": ("masked |= start < chunk_start(s.seq_len - 1, p);", "", "chunks"),
    "the_chunk_is_ignored": ("visible &= position >= chunk_start(query_position, p);", "", "chunks"),
    "the_last_tokens_chunk": ("chunk_start(query_position, p)", "chunk_start(s.seq_len - 1, p)", "chunks_speculative"),
    "the_first_tokens_chunk": ("chunk_start(query_position, p)", "first_visible(s, p)", "chunks_speculative"),
    "what_lies_before_the_chunk": ("return chunk_start(max(s.seq_len - s.query_len, 0), p);", "return 0;", "chunks"),
    "values_of_192": ("copy_async(at + TILE * K_BYTES", "copy_async(at + TILE * V_BYTES", "192_and_128"),
    "values_are_not_swizzled_alike": ("SWIZZLE(lane, V_PIECES)", "SWIZZLE(lane, K_PIECES)", "128_and_48"),
    "keys_are_not_swizzled_alike": ("SWIZZLE(lane, K_PIECES)", "SWIZZLE(lane, V_PIECES)", "128_and_48"),
    "tokens_are_not_swizzled_alike": ("(column ^ (SWIZZLE(token, V_PIECES) * 16))", "column", "bf16"),
    "fp8_halves_swapped": ("0x3120", "0x2031", "one_row_fp8"),
}  # fmt: skip


BUGS_OF_CLUSTERS = {
    "phases_are_not_told_apart": ("bytes + segment % 2, segment / 2 % 2)", "bytes + segment % 2, 0)"),
    "one_buffer": ("const int source = segment % 2 * CLUSTER + rank", "const int source = rank"),
    "one_barrier": ("shared_address(bytes + segment % 2);", "shared_address(bytes);"),
    "segments_are_not_counted": ("    ++input_ring.segment;\n", ""),
    "inboxes_are_not_open": ("    if (!met) cluster_wait();\n    met = true;\n", "    met = true;\n"),
    "results_of_blocks_are_not_waited_for": ("    input_ring.wait();\n", ""),
}


@pytest.mark.parametrize("bug", BUGS_OF_CLUSTERS)
def test_planted_bugs_of_clusters_are_noticed(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_emulation, "planted", BUGS_OF_CLUSTERS[bug])
    problem = make_problem(CLUSTERS, rng, CPU)
    with pytest.raises(AssertionError):
        assert_accurate(problem, run(problem, partial(with_blocks, num_parts=2, cluster=2, stages=2)))


@pytest.mark.parametrize("case", ["many_rows", "one_row", "invariant"])
def test_too_little_shared_memory_is_noticed(case: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(variant: NativeVariant, *arguments: Any, **options: Any) -> None:
        variant = replace(variant, shared_bytes=variant.shared_bytes - 8)
        native_emulation.emulated_launch(variant, *arguments, **options)

    monkeypatch.setattr(native, "launch", launch)
    with pytest.raises(AssertionError, match="stores behind its shared memory"):
        run(make_problem(BY_ID[case], rng, CPU))


def check_often(problem: Problem) -> None:
    """Other warps are slow each time."""
    for _ in range(6):
        assert_accurate(problem, run(problem))


def test_values_of_zero(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that another block waits for is told from one that has not come, though both are 0."""
    check_values_of_zero(run, CPU, rng)
    monkeypatch.setattr(native_emulation, "planted", ("x == 0.0f ? -0.0f : x", "x"))
    with pytest.raises(AssertionError, match="for ever"):
        check_values_of_zero(run, CPU, rng)


def test_workspaces_of_pairs(rng: torch.Generator) -> None:
    problem = make_problem(BASE, rng, CPU)
    plan = problem.decode_plan()
    workspace, work_list = problem.scratch(plan)
    odd = replace(workspace, counters=torch.zeros(plan.num_counters + 1, dtype=torch.int32)[1:])
    with pytest.raises(ShapeError, match=r"workspace.counters: expected an address that is a multiple of 8, got"):
        native.native_attention(call_of(problem, plan, odd, work_list))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, case = BUGS[bug]
    monkeypatch.setattr(native_emulation, "planted", (right, wrong))
    problem = make_problem(BY_ID[case], rng, CPU)
    with pytest.raises(AssertionError):
        check_often(problem)
