"""Results of the CUDA decode kernel, on a device and in emulation on a CPU, and injected bugs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from graphrt.kernels.attention import native
from graphrt.kernels.attention.call import AttentionCall
from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.native.nvrtc import NativeVariant
from tests.support import native_emulation
from tests.support.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    NAN,
    UNWRITTEN,
    Case,
    Problem,
    assert_accurate,
    by_id,
    decode,
    expected,
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

Change = Callable[[AttentionPlan], AttentionPlan]
CPU = torch.device("cpu")

EDGES = (0, 1, 15, 16, 17, 0, 31, 32, 33, 260, 1500)  # the last one is split
BASE = Case("", decode(EDGES), dtype=BF16, num_kv_heads=2, head_dim=128, num_sms=12)

CASES = [
    Case("fp16", decode(EDGES), dtype=F16, num_kv_heads=2, num_sms=12),
    replace(BASE, id="bf16"),
    replace(BASE, id="hnd", layout="HND"),
    replace(BASE, id="one_req", reqs=decode((1000,)), num_sms=132),
    replace(BASE, id="one_token", reqs=decode((1,)), num_sms=132),
    replace(BASE, id="one_empty_req", reqs=decode((0,)), num_sms=132),
    replace(BASE, id="pairs_gqa_16", reqs=decode((777, 20, 300)), num_sms=132, num_kv_heads=1, gqa=16),
    replace(BASE, id="pairs_on_two_levels", reqs=decode((5000, 20)), num_sms=132, num_kv_heads=1, gqa=16),
    replace(BASE, id="pairs_fp8", reqs=decode((1, 90, 2000)), num_sms=66, num_kv_heads=1, gqa=8, kv_dtype=E4M3),
    replace(BASE, id="one_req_of_two_clusters", reqs=decode((9000,)), num_sms=132, num_kv_heads=1),
    replace(BASE, id="one_req_fp8", reqs=decode((1000,)), num_sms=132, kv_dtype=E4M3),
    replace(BASE, id="one_req_gqa_16", reqs=decode((777,)), num_sms=132, gqa=16),
    replace(BASE, id="one_req_speculative", reqs=decode((777,), 4), num_sms=132),
    replace(BASE, id="one_req_head_dim_80", reqs=decode((777,)), num_sms=132, head_dim=80, gqa=3),
    replace(BASE, id="merge_on_two_levels", reqs=decode((3000, 40)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="many_reqs", reqs=decode(tuple(range(0, 130, 2))), num_sms=16),
    replace(BASE, id="splits_of_many_tiles", reqs=decode((600, 0, 701, 5, 513)), num_sms=2),
    replace(BASE, id="many_splits", reqs=decode((700, 1000, 40, 90, 33, 64, 5, 17, 0, 300, 128, 200)), num_sms=4),
    replace(BASE, id="splits_across_blocks", reqs=decode((2000, 30, 1900, 60, 90, 2100)), num_sms=14, sinks=True),
    replace(BASE, id="invariant_many_splits", reqs=decode((700, 1000, 40, 90, 33)), num_sms=4, batch_invariant=True),
    replace(BASE, id="page_ids_reloaded", reqs=decode((2600, 2500)), num_sms=2),
    replace(BASE, id="two_q_tiles_across", reqs=decode((3000, 200)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="ends_in_another_block", reqs=decode((528, 96, 400)), num_sms=4),
    replace(BASE, id="many_reqs_head_dim_64", reqs=decode(tuple(range(0, 130, 2))), num_sms=16, head_dim=64, gqa=3),
    replace(BASE, id="many_reqs_fp8", reqs=decode(tuple(range(0, 130, 2))), num_sms=16, kv_dtype=E5M2),
    replace(BASE, id="invariant", batch_invariant=True),
    replace(BASE, id="invariant_one_req", batch_invariant=True, reqs=decode((5000,)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="page_256", page_size=256),
    replace(BASE, id="page_48", page_size=48, reqs=decode((47, 48, 49, 200))),
    replace(BASE, id="gqa_1", gqa=1),
    replace(BASE, id="gqa_7", gqa=7),
    replace(BASE, id="gqa_9", gqa=9),
    replace(BASE, id="gqa_16", gqa=16),
    replace(BASE, id="head_dim_96", head_dim=96),
    replace(BASE, id="head_dim_112", head_dim=112),
    replace(BASE, id="head_dim_192", head_dim=192),
    replace(BASE, id="head_dim_256", head_dim=256),
    replace(BASE, id="head_dim_32_fp8", head_dim=32, kv_dtype=E4M3),
    replace(BASE, id="head_dim_96_fp8", head_dim=96, kv_dtype=E4M3, gqa=3),
    replace(BASE, id="head_dim_256_fp8", head_dim=256, kv_dtype=E5M2),
    replace(BASE, id="fp8_scales", kv_dtype=E4M3, scale_per_head=True, num_kv_heads=3),
    replace(BASE, id="fp8_large_queries", kv_dtype=E5M2, qk_size=100.0),
    replace(BASE, id="speculative", reqs=decode((0, 1, 2, 4, 17, 65, 1260), 4)),
    replace(BASE, id="speculative_of_20", reqs=decode((0, 1, 5, 17, 65, 1260), 5)),
    replace(BASE, id="speculative_of_20_invariant", reqs=decode((5, 65, 1260), 5), batch_invariant=True),
    replace(BASE, id="speculative_of_24_fp8", reqs=decode((6, 700), 6), kv_dtype=E4M3),
    replace(BASE, id="speculative_of_32_head_dim_64", reqs=decode((8, 700), 8), head_dim=64),
    replace(BASE, id="speculative_of_32_head_dim_96", reqs=decode((8, 700), 8), head_dim=96),
    replace(BASE, id="one_req_speculative_of_20", reqs=decode((777,), 5), num_sms=132),
    replace(BASE, id="speculative_full", reqs=decode((4, 17, 65, 260), 4), causal=False),
    replace(BASE, id="cross_speculative", reqs=decode((0, 1, 2, 3, 4, 30), 4), causal=False),
    replace(BASE, id="window", window=20, reqs=decode((*EDGES, 37))),  # one key of a KV tile is before the window
    replace(BASE, id="window_of_1", window=1, reqs=decode((*EDGES, 18))),
    replace(BASE, id="window_speculative", reqs=decode((3, 64, 1260), 3), window=333),
    replace(BASE, id="chunks", chunk=20, reqs=decode((*EDGES, 20, 21, 37))),
    replace(BASE, id="chunks_of_1", chunk=1, reqs=decode((*EDGES, 18))),
    replace(BASE, id="chunks_of_tiles", chunk=64, reqs=decode((*EDGES, 64, 65, 128))),  # needs no mask
    replace(BASE, id="chunks_split", chunk=1000, reqs=decode((1990, 40, 1001, 1000))),
    replace(BASE, id="chunks_one_req", chunk=500, reqs=decode((1490,)), num_sms=132),
    replace(BASE, id="chunks_fp8_hnd", chunk=40, kv_dtype=E4M3, layout="HND", reqs=decode((79, 80, 81, 1500))),
    replace(BASE, id="chunks_invariant", chunk=333, batch_invariant=True),
    replace(BASE, id="chunks_speculative", chunk=33, reqs=decode((1, 2, 33, 35, 36, 66, 1260), 3)),  # over two chunks
    replace(BASE, id="chunks_of_2_speculative", chunk=2, reqs=decode((3, 64, 1261), 4)),
    replace(BASE, id="chunks_of_tiles_speculative", chunk=64, reqs=decode((130, 129, 65, 66, 64), 3)),
    replace(BASE, id="192_and_128", head_dim=192, v_head_dim=128),
    replace(BASE, id="192_and_128_gqa_1_hnd", head_dim=192, v_head_dim=128, gqa=1, layout="HND"),
    replace(BASE, id="192_and_128_one_req", head_dim=192, v_head_dim=128, reqs=decode((1000,)), num_sms=132),
    replace(BASE, id="192_and_128_fp8", head_dim=192, v_head_dim=128, kv_dtype=E4M3, scale_per_head=True),
    replace(BASE, id="192_and_128_gqa_16", head_dim=192, v_head_dim=128, gqa=16, sinks=True),
    replace(BASE, id="192_and_128_invariant", head_dim=192, v_head_dim=128, batch_invariant=True),
    replace(BASE, id="192_and_128_chunks", head_dim=192, v_head_dim=128, chunk=100, reqs=decode((250, 100, 99, 7), 2)),
    replace(BASE, id="64_and_128", head_dim=64, v_head_dim=128, alibi="linear"),
    replace(BASE, id="128_and_48", head_dim=128, v_head_dim=48, reqs=decode((3000, 40)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="32_and_96_fp8", head_dim=32, v_head_dim=96, kv_dtype=E5M2, gqa=3),
    replace(BASE, id="16_and_256", head_dim=16, v_head_dim=256),
    replace(BASE, id="256_and_16", head_dim=256, v_head_dim=16, window=100),
    replace(BASE, id="softcap", softcap=2.0, qk_size=5.0),
    replace(BASE, id="alibi", alibi="linear"),
    replace(BASE, id="alibi_sqrt_fp8", alibi="sqrt", kv_dtype=E4M3),
    replace(BASE, id="sinks", sinks=True),
    replace(BASE, id="sinks_one_req", sinks=True, reqs=decode((500,)), num_sms=132),
    replace(BASE, id="large_logits", qk_size=30.0),
]  # fmt: skip


def with_blocks(plan: AttentionPlan, *, num_partitions: int, **native: int) -> AttentionPlan:
    """A plan for the CUDA kernel with other blocks and another number of partitions."""
    assert plan.native is not None
    schedule = replace(plan.schedule, num_partitions=num_partitions)
    return replace(plan, schedule=schedule, native=replace(plan.native, **native))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    native_emulation.install(monkeypatch, native)


@pytest.fixture(params=["emulation", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "emulation":
        request.getfixturevalue("emulated")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def call_of(
    problem: Problem, plan: AttentionPlan, workspace: AttentionWorkspace, work_list: torch.Tensor
) -> AttentionCall:
    return AttentionCall(
        problem.q, problem.k_cache, problem.v_cache, problem.block_table, None, problem.seq_lens, work_list,
        problem.out, problem.lse, workspace, problem.options, plan, pdl=False,
    )  # fmt: skip


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
    return problem.out.cpu().clone()


def inject(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    monkeypatch.setattr(native_emulation, "injected", (right, wrong))


@pytest.mark.parametrize("case", by_id(CASES))
def test_case(case: Case, device: torch.device, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, device)
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    first = run(problem)
    assert_accurate(problem, first)
    assert torch.equal(run(problem), first), "another execution order must give the same bits"
    if device.type == "cuda":
        check_both_kernels_with_one_plan(problem, first)
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


def check_both_kernels_with_one_plan(problem: Problem, native_out: torch.Tensor) -> None:
    """The operator launches the CUDA kernel, and with a misaligned work list the Triton kernel."""
    assert torch.equal(problem.run(), native_out)
    plan = problem.decode_plan()
    workspace, exact = problem.scratch(plan)
    shifted = torch.empty(exact.numel() + 1, dtype=torch.int32, device=exact.device)[1:]
    schedule_attention(plan, problem.seq_lens, shifted, **problem.case.spans)
    problem.out.fill_(NAN)
    with pytest.warns(RuntimeWarning, match="cannot run because work_list is not aligned to 16 bytes"):
        paged_attention(*problem.tensors, problem.out, plan, shifted, workspace, problem.options, lse=problem.lse)
    assert not workspace.counters.any()
    assert_accurate(problem, problem.out.cpu())


def test_unusual_scales_of_keys(device: torch.device, rng: torch.Generator) -> None:
    check_scales_of_keys(run, device, rng, native=True)


@pytest.mark.parametrize("reqs", [(40, 0, 300), (300,)], ids=["warps", "cluster"])
def test_slopes(reqs: tuple[int, ...], device: torch.device, rng: torch.Generator) -> None:
    check_slopes(run, device, rng, reqs=decode(reqs))


def served_combinations() -> list[Any]:
    """Decode rows of the covering array that the CUDA kernel supports, once `native` is set."""
    found = []
    for row in COMBINATIONS:
        op, case = combination_case(row | {"native": True})
        if op == "decode" and case.decode_plan().native is not None:
            found.append(pytest.param(case, id=combination_id(row)))
    return found


@pytest.mark.parametrize("case", served_combinations())
def test_combinations(case: Case, device: torch.device, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, device)
    assert_accurate(problem, run(problem))


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
def test_batch_invariant_reqs(kv_dtype: torch.dtype | None, device: torch.device, rng: torch.Generator) -> None:
    check_batch_invariant_reqs(run, kv_dtype, device, rng)


def check_logits(device: torch.device, rng: torch.Generator) -> None:
    """Requests of one token. Their log-sum-exp is the logit; 16-bit outputs would hide its errors."""
    for softcap, kv_dtype in ((0.0, None), (50.0, None), (50.0, E4M3)):
        case = replace(BASE, reqs=decode((1,) * 24), softcap=softcap, kv_dtype=kv_dtype, qk_size=8.0)
        problem = make_problem(case, rng, device)
        run(problem)
        assert problem.lse is not None
        truth = expected(problem, torch.float64)[1]
        torch.testing.assert_close(problem.lse.cpu().double(), truth, rtol=1e-5, atol=1e-4)


def check_values_of_zero(device: torch.device, rng: torch.Generator) -> None:
    """Words that blocks send to each other are 0 until they arrive: values of 0 or -0 of requests that they share."""
    problem = make_problem(replace(BASE, reqs=decode((3000, 40)), num_kv_heads=1, num_sms=48), rng, device)
    for zero in (0.0, -0.0):
        problem.v_cache.fill_(zero)
        assert not run(problem).any()


CHECKS = {  # a check, and a bug that it detects
    "large_queries": (
        partial(check_large_queries, run),
        "fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2)",
        "fminf(peak, __shfl_xor_sync(0xffffffffu, peak, 2)",
    ),
    "infinite_values": (partial(check_infinite_values, run), "counts ? x.x : 0.0f", "x.x"),
    "logits": (check_logits, "/ 3 + square * (2", "/ 3 - square * (2"),
    "values_of_zero": (check_values_of_zero, "x == 0.0f ? -0.0f : x", "x"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_values(name: str, device: torch.device, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check, right, wrong = CHECKS[name]
    check(device, rng)
    if device.type == "cpu":
        inject(monkeypatch, right, wrong)
        with pytest.raises(AssertionError, match="deadlock" if name == "values_of_zero" else ""):
            check(device, rng)


# Clusters with many splits each, which reuse the exchange buffers and use every phase of the barriers.
CLUSTERS = replace(BASE, id="clusters", reqs=decode((64, 1, 100, 17, 0, 5, 300, 33, 700)), sinks=True)


@pytest.mark.parametrize(("cluster", "num_partitions"), [(2, 2), (4, 3), (8, 2)])
def test_clusters_with_many_splits(
    cluster: int, num_partitions: int, device: torch.device, rng: torch.Generator
) -> None:
    problem = make_problem(CLUSTERS, rng, device)
    change = partial(with_blocks, num_partitions=num_partitions, cluster=cluster, stages=2)
    first = run(problem, change)
    assert_accurate(problem, first)
    assert torch.equal(run(problem, change), first)


@pytest.mark.gpu
def test_misaligned_cache_falls_back_to_triton(rng: torch.Generator) -> None:
    problem = make_problem(BASE, rng, torch.device("cuda"))
    shape = problem.k_cache.shape
    odd = torch.zeros(*shape[:3], shape[3] + 4, dtype=BF16, device="cuda")[..., : shape[3]]
    odd.copy_(problem.k_cache)
    moved = replace(problem, k_cache=odd)
    with pytest.warns(RuntimeWarning, match="cannot run because heads of k_cache are not aligned to 16 bytes"):
        assert_accurate(moved, moved.run())


@pytest.mark.gpu
def test_first_call_of_a_thread(rng: torch.Generator) -> None:
    """A new thread has no CUDA context at first."""
    problem = make_problem(BASE, rng, torch.device("cuda"))
    problem.run()
    plan, results = problem.decode_plan(), []
    workspace, work_list = problem.scratch(plan)
    tensors = (*problem.tensors, problem.out, plan, work_list, workspace, problem.options)

    def work() -> None:
        paged_attention(*tensors, lse=problem.lse)
        results.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results


@pytest.mark.parametrize("case", ["many_reqs", "one_req", "invariant"])
def test_too_little_shared_memory_is_detected(
    case: str, emulated: None, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(variant: NativeVariant, *arguments: Any, **options: Any) -> None:
        variant = replace(variant, shared_bytes=variant.shared_bytes - 8)
        native_emulation.emulated_launch(variant, *arguments, **options)

    monkeypatch.setattr(native, "launch", launch)
    with pytest.raises(AssertionError, match="stores past its shared memory"):
        run(make_problem(BY_ID[case], rng, CPU))


def test_misaligned_workspace_raises(rng: torch.Generator) -> None:
    problem = make_problem(BASE, rng, CPU)
    plan = problem.decode_plan()
    workspace, work_list = problem.scratch(plan)
    odd = replace(workspace, counters=torch.zeros(plan.num_counters + 1, dtype=torch.int32)[1:])
    with pytest.raises(ShapeError, match=r"workspace.counters: expected an address that is a multiple of 8, got"):
        native.native_attention(call_of(problem, plan, odd, work_list))


BY_ID = {case.id: case for case in CASES}
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


def check_often(problem: Problem, change: Change) -> None:
    for _ in range(6):  # each run delays other warps
        assert_accurate(problem, run(problem, change))


@pytest.mark.parametrize("bug", BUGS | BUGS_OF_CLUSTERS)
def test_injected_bugs_are_detected(
    bug: str, emulated: None, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong, *case = (BUGS | BUGS_OF_CLUSTERS)[bug]
    inject(monkeypatch, right, wrong)
    problem = make_problem(BY_ID[case[0]] if case else CLUSTERS, rng, CPU)
    change = (lambda plan: plan) if case else partial(with_blocks, num_partitions=2, cluster=2, stages=2)
    with pytest.raises(AssertionError):
        check_often(problem, change)
