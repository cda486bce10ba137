"""The source of the CUDA decode kernel on a CPU, in emulation: the cases of the device tests, and injected bugs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from graphrt.kernels.attention import native
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.native.nvrtc import NativeVariant
from tests.support import native_emulation
from tests.support.attention_cases import (
    E4M3,
    NAN,
    UNWRITTEN,
    Case,
    Problem,
    assert_accurate,
    by_id,
    decode,
    make_problem,
)
from tests.support.attention_checks import (
    COMBINATIONS,
    check_batch_invariant_reqs,
    check_infinite_values,
    check_large_queries,
    check_scales_of_keys,
    check_slopes,
    combination_case,
    combination_id,
)
from tests.support.native_cases import BASE, CASES, call_of, check_logits, check_values_of_zero, with_blocks

pytestmark = pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")

Change = Callable[[AttentionPlan], AttentionPlan]

CPU = torch.device("cpu")
BY_ID = {case.id: case for case in CASES}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the CPU, and every run of a test uses the same execution orders."""
    monkeypatch.setattr(native, "launch", native_emulation.emulated_launch)
    monkeypatch.setattr(native_emulation, "launches", itertools.count())


def run(problem: Problem, change: Change = lambda plan: plan) -> torch.Tensor:
    """Schedule, poison the scratch memory and outputs, and attend with the CUDA kernel and a changed plan."""
    plan = change(problem.decode_plan())
    workspace, work_list = problem.scratch(plan)
    schedule_attention(plan, problem.seq_lens, work_list, **problem.case.spans)
    for tensor in (workspace.partial_out, workspace.partial_lse):
        tensor.fill_(NAN)
    problem.out.fill_(UNWRITTEN)
    if problem.lse is not None:
        problem.lse.fill_(UNWRITTEN)
    call = call_of(problem, plan, workspace, work_list)
    assert native.native_unsupported_reason(call) is None
    native.native_attention(call)
    assert not workspace.counters.any(), "the kernel must leave its counters at 0"
    return problem.out.clone()


@pytest.mark.parametrize("case", by_id(CASES))
def test_case(case: Case, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, CPU)
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    first = run(problem)
    assert_accurate(problem, first)
    assert torch.equal(run(problem), first), "another execution order must give the same bits"
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


def test_unusual_scales_of_keys(rng: torch.Generator) -> None:
    check_scales_of_keys(run, CPU, rng, native=True)


def test_large_queries_with_an_fp8_cache(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_large_queries(run, CPU, rng)
    lesser = "fminf(peak, __shfl_xor_sync(0xffffffffu, peak, 2)"
    monkeypatch.setattr(native_emulation, "injected", (lesser.replace("fminf", "fmaxf"), lesser))
    with pytest.raises(AssertionError):
        check_large_queries(run, CPU, rng)


def test_infinite_values(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_infinite_values(run, CPU, rng)
    monkeypatch.setattr(native_emulation, "injected", ("counts ? x.x : 0.0f", "x.x"))
    with pytest.raises(AssertionError):
        check_infinite_values(run, CPU, rng)


@pytest.mark.parametrize("reqs", [(40, 0, 300), (300,)], ids=["warps", "cluster"])
def test_slopes(reqs: tuple[int, ...], rng: torch.Generator) -> None:
    check_slopes(run, CPU, rng, reqs=decode(reqs))


def served_combinations() -> list[Any]:
    """Decode rows of the covering array that the CUDA kernel supports, once `native` is set."""
    found = []
    for row in COMBINATIONS:
        op, case = combination_case(row | {"native": True})
        if op == "decode" and case.decode_plan().native is not None:
            found.append(pytest.param(case, id=combination_id(row)))
    return found


@pytest.mark.parametrize("case", served_combinations())
def test_combinations(case: Case, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, CPU)
    assert_accurate(problem, run(problem))


def test_logits(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits(run, CPU, rng)
    monkeypatch.setattr(native_emulation, "injected", ("/ 3 + square * (2", "/ 3 - square * (2"))
    with pytest.raises(AssertionError):
        check_logits(run, CPU, rng)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
def test_batch_invariant_reqs(kv_dtype: torch.dtype | None, rng: torch.Generator) -> None:
    check_batch_invariant_reqs(run, kv_dtype, CPU, rng)


# Clusters with many splits each, which reuse the exchange buffers and use every phase of the barriers.
CLUSTERS = replace(BASE, id="clusters", reqs=decode((64, 1, 100, 17, 0, 130, 5, 40, 300, 33)), sinks=True)


@pytest.mark.parametrize(("cluster", "num_partitions"), [(2, 2), (4, 3), (8, 2)])
def test_clusters_with_many_splits(cluster: int, num_partitions: int, rng: torch.Generator) -> None:
    problem = make_problem(CLUSTERS, rng, CPU)
    change = partial(with_blocks, num_partitions=num_partitions, cluster=cluster, stages=2)
    first = run(problem, change)
    assert_accurate(problem, first)
    assert torch.equal(run(problem, change), first)


# Text of the sources, the wrong text that replaces it, and a case that must detect the bug.
BUGS = {
    "missing_wait_for_copies": ("      wait_oldest();\n", "", "bf16"),
    "page_tail_copied": ("from ? 16 : 0;", "from ? 16 : 16;", "bf16"),
    "page_ids_of_the_previous_split": ("_known ? t.next_pages :", "_known ? t.pages :", "splits_of_many_tiles"),
    "stage_filled_too_early": ("free_stage = stage;", "free_stage = (stage + 1) % STAGES;", "bf16"),
    "missing_barrier_before_merge": ("  __syncthreads();\n  merge_streams(", "  merge_streams(", "many_splits"),
    "missing_barrier_cooperative": ("lane);\n    __syncthreads();\n", "lane);\n", "invariant"),
    "partial_results_overwritten": ("if (split + 1 < end) __syncthreads();", "", "invariant_many_splits"),
    "fixup_of_one_block_only": ("fixup_partial(first + sender,", "fixup_partial(first,", "merge_on_two_levels"),
    "fixup_does_not_wait": ("while (__any_sync(0xffffffffu, missing));", "while (false);", "many_splits"),
    "fixup_words_not_reset": ("      if (lane == 0) send(partials[i] + V_HEAD_DIM, 0.0f, 0.0f);\n", "", "bf16"),
    "values_not_waited_for": ("missing |= !has_arrived(values[i][j]);", ";", "many_splits"),
    "statistics_not_waited_for": ("missing |= !has_arrived(stats[i]);", "", "many_splits"),
    "half_a_pair_not_waited_for": ("!= 0 && __float", "!= 0 || __float", "many_splits"),
    "fixup_of_a_later_block": ("fixup_partial(first + sender,", "fixup_partial(first + index,", "merge_on_two_levels"),
    "merge_groups_not_received": ("first, index, index / MERGE_GROUP_SIZE,", "first, index, 0,", "merge_on_two_levels"),
    "merge_groups_not_merged": ("(index % MERGE_GROUP_SIZE == MERGE_GROUP_SIZE - 1)", "(false)", "merge_on_two_levels"),
    "all_partial_results_at_one_index": ("partials.of(s.split_index), p", "partials.of(0), p", "invariant"),
    "first_split_not_shared": ("begin + 1 < end ? shared", "false ? shared", "ends_in_another_block"),
    "first_split_read_as_last": ("(leads && to > from", "(false && to > from", "many_splits"),
    "partial_result_over_copied_tiles": ("} else if (split + 1 < end) {", "} else if (false) {", "many_splits"),
    "partial_results_of_other_q_tiles": ("float my_weight = exists ?", "float my_weight = true ?", "many_splits"),
    "page_ids_not_reloaded": ("if (t.index == PAGES_PER_LOAD) {", "if (false) {", "page_ids_reloaded"),
    "first_page_ids_again": ("(t.s, p, t.tile, lane)", "(t.s, p, first_tile(t.s, worker), lane)", "page_ids_reloaded"),
    "outputs_not_transposed": ("transpose(pack_output(", "(pack_output(", "many_splits"),
    "counter_not_reset": ("      if (is_last) *at = 0;\n", "", "invariant"),
    "merge_groups_of_clusters_not_merged": ("if (!continues) return;", "return;", "pairs_on_two_levels"),
    "cluster_does_not_wait": ("cluster_exchange.wait();", "", "one_req"),
    "slice_at_the_wrong_offset": ("source * SLICE + pair % SLICE)", "source * SLICE)", "one_req"),
    "later_tokens_visible": ("position <= query_position)", "true)", "speculative"),
    "window_boundary_not_masked": ("masked |= start <= s.", "masked |= start < s.", "window"),
    "window_ignored": ("visible &= position > query_position - p.window;", "", "window"),
    "copies_before_the_window": ("return max(s.seq_len - s.query_len + 1 - p.window, 0);", "return 0;", "window"),
    "chunk_boundary_not_masked": ("masked |= start < chunk_start(s.seq_len - 1, p);", "", "chunks"),
    "chunk_ignored": ("visible &= position >= chunk_start(query_position, p);", "", "chunks"),
    "chunk_of_last_token": ("chunk_start(query_position, p)", "chunk_start(s.seq_len - 1, p)", "chunks_speculative"),
    "chunk_of_first_token": ("chunk_start(query_position, p)", "first_visible(s, p)", "chunks_speculative"),
    "copies_before_the_chunk": ("return chunk_start(max(s.seq_len - s.query_len, 0), p);", "return 0;", "chunks"),
    "values_at_the_wrong_offset": ("copy_async(at + TILE * K_BYTES", "copy_async(at + TILE * V_BYTES", "192_and_128"),
    "values_read_with_the_swizzle_of_keys": ("SWIZZLE(lane, V_PIECES)", "SWIZZLE(lane, K_PIECES)", "128_and_48"),
    "keys_read_with_the_swizzle_of_values": ("SWIZZLE(lane, K_PIECES)", "SWIZZLE(lane, V_PIECES)", "128_and_48"),
    "values_written_without_swizzle": ("(column ^ (SWIZZLE(token, V_PIECES) * 16))", "column", "bf16"),
    "fp8_halves_swapped": ("0x3120", "0x2031", "one_req_fp8"),
}  # fmt: skip


BUGS_OF_CLUSTERS = {
    "phases_not_distinguished": ("bytes + round % 2, round / 2 % 2)", "bytes + round % 2, 0)"),
    "one_buffer": ("const int source = round % 2 * CLUSTER + rank", "const int source = rank"),
    "one_barrier": ("shared_address(bytes + round % 2);", "shared_address(bytes);"),
    "rounds_not_counted": ("    ++cluster_exchange.round;\n", ""),
    "buffers_not_ready": (
        "    if (!cluster_ready) cluster_wait();\n    cluster_ready = true;\n", "    cluster_ready = true;\n",
    ),
    "results_of_blocks_not_waited_for": ("    cluster_exchange.wait();\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS_OF_CLUSTERS)
def test_cluster_bugs_are_detected(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_emulation, "injected", BUGS_OF_CLUSTERS[bug])
    problem = make_problem(CLUSTERS, rng, CPU)
    with pytest.raises(AssertionError):
        assert_accurate(problem, run(problem, partial(with_blocks, num_partitions=2, cluster=2, stages=2)))


@pytest.mark.parametrize("case", ["many_reqs", "one_req", "invariant"])
def test_too_little_shared_memory_is_detected(case: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(variant: NativeVariant, *arguments: Any, **options: Any) -> None:
        variant = replace(variant, shared_bytes=variant.shared_bytes - 8)
        native_emulation.emulated_launch(variant, *arguments, **options)

    monkeypatch.setattr(native, "launch", launch)
    with pytest.raises(AssertionError, match="stores past its shared memory"):
        run(make_problem(BY_ID[case], rng, CPU))


def check_often(problem: Problem) -> None:
    """Each run delays other warps."""
    for _ in range(6):
        assert_accurate(problem, run(problem))


def test_values_of_zero(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero that a block sends is distinguished from a word that has not arrived."""
    check_values_of_zero(run, CPU, rng)
    monkeypatch.setattr(native_emulation, "injected", ("x == 0.0f ? -0.0f : x", "x"))
    with pytest.raises(AssertionError, match="deadlock"):
        check_values_of_zero(run, CPU, rng)


def test_misaligned_workspace_raises(rng: torch.Generator) -> None:
    problem = make_problem(BASE, rng, CPU)
    plan = problem.decode_plan()
    workspace, work_list = problem.scratch(plan)
    odd = replace(workspace, counters=torch.zeros(plan.num_counters + 1, dtype=torch.int32)[1:])
    with pytest.raises(ShapeError, match=r"workspace.counters: expected an address that is a multiple of 8, got"):
        native.native_attention(call_of(problem, plan, odd, work_list))


@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs_are_detected(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, case = BUGS[bug]
    monkeypatch.setattr(native_emulation, "injected", (right, wrong))
    problem = make_problem(BY_ID[case], rng, CPU)
    with pytest.raises(AssertionError):
        check_often(problem)
