"""The CUDA kernel of decode rows: its variants compile, and on a device it is right wherever it serves."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.native import native_fault, native_variant, native_variants
from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.plan_native import STATIC_SHARED_BYTES
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.errors import ConfigError, GraphRTError
from graphrt.kernels.native import nvrtc
from graphrt.kernels.native.nvrtc import compile_variant
from tests.support.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    NAN,
    Case,
    Problem,
    assert_accurate,
    decode,
    expected,
    make_problem,
)
from tests.support.native_usage import assert_fits, compiled_within

LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16, "num_sms": 132, "native": True}
EDGES = (0, 1, 15, 16, 17, 0, 31, 32, 33, 260, 1500)  # the last one is split
BASE = Case("", decode(EDGES), dtype=BF16, num_kv_heads=2, head_dim=128, num_sms=12)

CASES = [
    Case("fp16", decode(EDGES), dtype=F16, num_kv_heads=2, num_sms=12),
    replace(BASE, id="bf16"),
    replace(BASE, id="hnd", layout="HND"),
    replace(BASE, id="one_row", rows=decode((1000,)), num_sms=132),
    replace(BASE, id="one_token", rows=decode((1,)), num_sms=132),
    replace(BASE, id="one_empty_row", rows=decode((0,)), num_sms=132),
    replace(BASE, id="pairs_group_16", rows=decode((777, 20, 300)), num_sms=132, num_kv_heads=1, group=16),
    replace(BASE, id="pairs_in_two_stages", rows=decode((5000, 20)), num_sms=132, num_kv_heads=1, group=16),
    replace(BASE, id="pairs_fp8", rows=decode((1, 90, 2000)), num_sms=66, num_kv_heads=1, group=8, kv_dtype=E4M3),
    replace(BASE, id="one_row_of_two_clusters", rows=decode((9000,)), num_sms=132, num_kv_heads=1),
    replace(BASE, id="one_row_fp8", rows=decode((1000,)), num_sms=132, kv_dtype=E4M3),
    replace(BASE, id="one_row_group_16", rows=decode((777,)), num_sms=132, group=16),
    replace(BASE, id="one_row_speculative", rows=decode((777,), 4), num_sms=132),
    replace(BASE, id="one_row_head_dim_80", rows=decode((777,)), num_sms=132, head_dim=80, group=3),
    replace(BASE, id="merge_in_two_stages", rows=decode((3000, 40)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="many_rows", rows=decode(tuple(range(0, 130, 2))), num_sms=16),
    replace(BASE, id="segments_of_many_tiles", rows=decode((600, 0, 701, 5, 513)), num_sms=2),
    replace(BASE, id="many_segments", rows=decode((700, 1000, 40, 90, 33, 64, 5, 17, 0, 300, 128, 200)), num_sms=4),
    replace(BASE, id="many_segments_of_splits", rows=decode((2000, 30, 1900, 60, 90, 2100)), num_sms=14, sinks=True),
    replace(BASE, id="invariant_many_segments", rows=decode((700, 1000, 40, 90, 33)), num_sms=4, batch_invariant=True),
    replace(BASE, id="pages_read_again", rows=decode((2600, 2500)), num_sms=2),
    replace(BASE, id="two_units_across", rows=decode((3000, 200)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="ends_in_another_block", rows=decode((528, 96, 400)), num_sms=4),
    replace(BASE, id="many_rows_head_dim_64", rows=decode(tuple(range(0, 130, 2))), num_sms=16, head_dim=64, group=3),
    replace(BASE, id="many_rows_fp8", rows=decode(tuple(range(0, 130, 2))), num_sms=16, kv_dtype=E5M2),
    replace(BASE, id="invariant", batch_invariant=True),
    replace(BASE, id="invariant_one_row", batch_invariant=True, rows=decode((5000,)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="page_256", page_size=256),
    replace(BASE, id="page_48", page_size=48, rows=decode((47, 48, 49, 200))),
    replace(BASE, id="group_1", group=1),
    replace(BASE, id="group_7", group=7),
    replace(BASE, id="group_9", group=9),
    replace(BASE, id="group_16", group=16),
    replace(BASE, id="head_dim_96", head_dim=96),
    replace(BASE, id="head_dim_112", head_dim=112),
    replace(BASE, id="head_dim_192", head_dim=192),
    replace(BASE, id="head_dim_256", head_dim=256),
    replace(BASE, id="head_dim_32_fp8", head_dim=32, kv_dtype=E4M3),
    replace(BASE, id="head_dim_96_fp8", head_dim=96, kv_dtype=E4M3, group=3),
    replace(BASE, id="head_dim_256_fp8", head_dim=256, kv_dtype=E5M2),
    replace(BASE, id="fp8_scales", kv_dtype=E4M3, scale_per_head=True, num_kv_heads=3),
    replace(BASE, id="fp8_large_queries", kv_dtype=E5M2, qk_size=100.0),
    replace(BASE, id="speculative", rows=decode((0, 1, 2, 4, 17, 65, 1260), 4)),
    replace(BASE, id="speculative_full", rows=decode((4, 17, 65, 260), 4), causal=False),
    replace(BASE, id="cross_speculative", rows=decode((0, 1, 2, 3, 4, 30), 4), causal=False),
    replace(BASE, id="window", window=20, rows=decode((*EDGES, 37))),  # one key before the window in a tile of it
    replace(BASE, id="window_of_1", window=1, rows=decode((*EDGES, 18))),
    replace(BASE, id="window_speculative", rows=decode((3, 64, 1260), 3), window=333),
    replace(BASE, id="chunks", chunk=20, rows=decode((*EDGES, 20, 21, 37))),
    replace(BASE, id="chunks_of_1", chunk=1, rows=decode((*EDGES, 18))),
    replace(BASE, id="chunks_of_tiles", chunk=64, rows=decode((*EDGES, 64, 65, 128))),  # by the work list alone
    replace(BASE, id="chunks_split", chunk=1000, rows=decode((1990, 40, 1001, 1000))),
    replace(BASE, id="chunks_one_row", chunk=500, rows=decode((1490,)), num_sms=132),
    replace(BASE, id="chunks_fp8_hnd", chunk=40, kv_dtype=E4M3, layout="HND", rows=decode((79, 80, 81, 1500))),
    replace(BASE, id="chunks_invariant", chunk=333, batch_invariant=True),
    replace(BASE, id="chunks_speculative", chunk=33, rows=decode((1, 2, 33, 35, 36, 66, 1260), 3)),  # over two chunks
    replace(BASE, id="chunks_of_2_speculative", chunk=2, rows=decode((3, 64, 1261), 4)),
    replace(BASE, id="chunks_of_tiles_speculative", chunk=64, rows=decode((130, 129, 65, 66, 64), 3)),
    replace(BASE, id="192_and_128", head_dim=192, v_head_dim=128),
    replace(BASE, id="192_and_128_group_1_hnd", head_dim=192, v_head_dim=128, group=1, layout="HND"),
    replace(BASE, id="192_and_128_one_row", head_dim=192, v_head_dim=128, rows=decode((1000,)), num_sms=132),
    replace(BASE, id="192_and_128_fp8", head_dim=192, v_head_dim=128, kv_dtype=E4M3, scale_per_head=True),
    replace(BASE, id="192_and_128_group_16", head_dim=192, v_head_dim=128, group=16, sinks=True),
    replace(BASE, id="192_and_128_invariant", head_dim=192, v_head_dim=128, batch_invariant=True),
    replace(BASE, id="192_and_128_chunks", head_dim=192, v_head_dim=128, chunk=100, rows=decode((250, 100, 99, 7), 2)),
    replace(BASE, id="64_and_128", head_dim=64, v_head_dim=128, alibi="linear"),
    replace(BASE, id="128_and_48", head_dim=128, v_head_dim=48, rows=decode((3000, 40)), num_kv_heads=1, num_sms=48),
    replace(BASE, id="32_and_96_fp8", head_dim=32, v_head_dim=96, kv_dtype=E5M2, group=3),
    replace(BASE, id="16_and_256", head_dim=16, v_head_dim=256),
    replace(BASE, id="256_and_16", head_dim=256, v_head_dim=16, window=100),
    replace(BASE, id="softcap", softcap=2.0, qk_size=5.0),
    replace(BASE, id="alibi", alibi="linear"),
    replace(BASE, id="alibi_sqrt_fp8", alibi="sqrt", kv_dtype=E4M3),
    replace(BASE, id="sinks", sinks=True),
    replace(BASE, id="sinks_one_row", sinks=True, rows=decode((500,)), num_sms=132),
    replace(BASE, id="large_logits", qk_size=30.0),
]  # fmt: skip


def with_blocks(plan: AttentionPlan, *, num_parts: int, **native: int) -> AttentionPlan:
    """A plan for the CUDA kernel with other blocks, and as many parts."""
    assert plan.native is not None
    schedule = replace(plan.schedule, num_parts=num_parts)
    return replace(plan, schedule=schedule, native=replace(plan.native, **native))


def run_both(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """By one plan: the CUDA kernel, then the Triton kernel, which runs where the work list lies at an odd address."""
    plan = problem.decode_plan()
    assert plan.native is not None, "the case must be one that the CUDA kernel serves"
    native = problem.run()
    lse = None if problem.lse is None else problem.lse.clone()
    workspace, exact = problem.scratch(plan)
    assert native_fault(plan, problem.q, problem.k_cache, problem.v_cache, exact, problem.out) is None
    shifted = torch.empty(exact.numel() + 1, dtype=torch.int32, device=exact.device)[1:]
    schedule_attention(plan, problem.seq_lens, shifted, **problem.case.spans)
    problem.out.fill_(NAN)
    with pytest.warns(RuntimeWarning, match="Triton kernel runs, since work_list lies at no multiple of 16"):
        paged_attention(*problem.tensors, problem.out, plan, shifted, workspace, problem.options, lse=problem.lse)
    assert not workspace.counters.any()
    triton = problem.out.cpu().clone()
    assert_accurate(problem, triton)
    if lse is not None:
        problem.lse.copy_(lse)
    return native, triton


@pytest.mark.gpu
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_both_kernels_by_one_plan(case: Case, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, torch.device("cuda"))
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    native, _ = run_both(problem)
    assert_accurate(problem, native)
    for workspace, _ in problem.workspaces.values():
        workspace.partial_out.fill_(NAN)
        workspace.partial_lse.fill_(NAN)
    assert torch.equal(problem.run(), native), "a second run must give the same bits"
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


def check_values_of_zero(run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator) -> None:
    """`run` of a problem whose rows several blocks share and whose values are 0, or -0."""
    problem = make_problem(replace(BASE, rows=decode((3000, 40)), num_kv_heads=1, num_sms=48), rng, device)
    for zero in (0.0, -0.0):
        problem.v_cache.fill_(zero)
        assert not run(problem).any()


def check_logits(run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator) -> None:
    """`run` of rows of one token, whose log-sum-exp is their logit: bounds of 16-bit results would hide its errors."""
    for softcap, kv_dtype in ((0.0, None), (50.0, None), (50.0, E4M3)):
        case = replace(BASE, rows=decode((1,) * 24), softcap=softcap, kv_dtype=kv_dtype, qk_size=8.0)
        problem = make_problem(case, rng, device)
        run(problem)
        assert problem.lse is not None
        truth = expected(problem, torch.float64)[1]
        torch.testing.assert_close(problem.lse.cpu().double(), truth, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_logits(rng: torch.Generator) -> None:
    check_logits(Problem.run, torch.device("cuda"), rng)


@pytest.mark.gpu
def test_values_of_zero(rng: torch.Generator) -> None:
    """Blocks send each other words that are 0 until they come."""
    check_values_of_zero(Problem.run, torch.device("cuda"), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_clusters_of_any_size(cluster: int, rng: torch.Generator) -> None:
    case = replace(BASE, rows=decode((300, 0, 77, 1200)), sinks=True)
    problem = make_problem(case, rng, torch.device("cuda"))
    made = AttentionPlan.decode(4, num_sms=132, native=True, **case.heads)
    plan = with_blocks(made, cluster=cluster, num_parts=5)
    workspace, work_list = problem.scratch(plan)
    schedule_attention(plan, problem.seq_lens, work_list)
    problem.out.fill_(NAN)
    paged_attention(*problem.tensors, problem.out, plan, work_list, workspace, problem.options, lse=problem.lse)
    assert_accurate(problem, problem.out.cpu())
    assert not workspace.counters.any()


@pytest.mark.gpu
def test_strides_that_it_cannot_copy_go_to_triton(rng: torch.Generator) -> None:
    problem = make_problem(BASE, rng, torch.device("cuda"))
    shape = problem.k_cache.shape
    odd = torch.zeros(*shape[:3], shape[3] + 4, dtype=BF16, device="cuda")[..., : shape[3]]
    odd.copy_(problem.k_cache)
    moved = replace(problem, k_cache=odd)
    with pytest.warns(RuntimeWarning, match="Triton kernel runs, since k_cache has heads at addresses that are no mul"):
        assert_accurate(moved, moved.run())


@pytest.mark.parametrize("name", native_variants())
def test_variants_compile_within_their_bounds(name: str) -> None:
    variant = native_variants()[name]
    # Sixteen queries of wide heads, and every option.
    spilled = {"wide_group": 40, "wide_group_invariant": 96, "deepseek_wide": 48}.get(name, 0)
    registers, log = compiled_within(variant, spilled)
    static = int(re.search(r"(\d+) bytes smem", log).group(1))
    assert static <= STATIC_SHARED_BYTES
    assert_fits(variant, dict(variant.macros)["BLOCKS_PER_SM"], registers, static)


def test_a_source_that_does_not_compile_is_shown() -> None:
    variant = replace(native_variants()["llama"], macros=(("HEAD_DIM", 128),))
    with pytest.raises(GraphRTError, match=r"decode.cu: expected a source that compiles for sm_90, got (.|\n)*error"):
        compile_variant(variant)


def test_it_needs_a_device_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with the instructions but less shared memory, as sm_120, is left to Triton."""
    assert not nvrtc.runs_native(torch.device("cpu"))
    success = nvrtc.driver.CUresult.CUDA_SUCCESS
    capability, shared = (9, 0), 227 << 10
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(nvrtc.driver, "cuDeviceGet", lambda index: (success, index))
    monkeypatch.setattr(nvrtc.driver, "cuDeviceGetAttribute", lambda attribute, index: (success, shared))
    device = torch.device("cuda", 0)
    assert nvrtc.runs_native(device)
    capability, shared = (12, 0), 99 << 10
    assert not nvrtc.runs_native(device)
    capability, shared = (8, 0), 227 << 10
    assert not nvrtc.runs_native(device)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so: cannot open")

    assert nvrtc.nvrtc_fault() is None
    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", missing)
    fault = nvrtc.nvrtc_fault()
    assert fault is not None
    assert fault.startswith("nvrtc: expected NVIDIA's run-time compiler, got none (libnvrtc.so: cannot open); run pip ")
    with pytest.raises(ConfigError, match="run-time compiler"):
        compile_variant(native_variants()["llama"])


def test_compiling_leaves_no_trace_in_constants() -> None:
    """The compiler writes into what it is handed; a bytes object of one space is shared by the whole process."""
    compile_variant(native_variants()["llama"])
    assert bytes([32]) == b"\x20"


OTHER_DTYPES = {
    "float32": "q is torch.float32",
    "float32_queries": "q is torch.float32",
    "fp8_of_80": "the plan was made for another dtype than torch.float8_e4m3fn",
    "fp8": "the plan was made for another dtype than torch.float8_e4m3fn",
}


@pytest.mark.parametrize(("change", "fault"), OTHER_DTYPES.items(), ids=OTHER_DTYPES)
def test_tensors_of_other_dtypes_than_the_plans_go_to_triton(change: str, fault: str) -> None:
    """A plan does not hold dtypes."""
    head_dim = 80 if change == "fp8_of_80" else 128
    plan = AttentionPlan.decode(4, **{**LLAMA, "head_dim": head_dim})
    assert plan.native is not None
    dtype = BF16 if change.startswith("fp8") else F32
    kv_dtype = F32 if change == "float32" else E4M3
    q = torch.zeros(4, 32, head_dim, dtype=dtype)
    cache = torch.zeros(3, 16, 8, head_dim, dtype=kv_dtype)
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32)
    assert native_fault(plan, q, cache, cache, work_list, q) == fault
    right = torch.zeros(4, 32, head_dim, dtype=BF16), torch.zeros(3, 16, 8, head_dim, dtype=BF16)
    assert native_fault(plan, right[0], right[1], right[1], work_list, right[0]) is None
    small_pages = torch.zeros(3, 8, 8, head_dim, dtype=BF16)
    assert native_fault(plan, right[0], small_pages, small_pages, work_list, right[0]) == (
        "pages of 8 tokens are no multiple of 16"
    )
    odd = torch.zeros(4, 32, head_dim + 1, dtype=BF16)[..., :head_dim]
    assert native_fault(plan, odd, right[1], right[1], work_list, right[0]) == (
        "q has heads at addresses that are no multiple of 4"
    )


@pytest.mark.gpu
def test_the_first_call_of_a_thread(rng: torch.Generator) -> None:
    """A new thread has no CUDA context until something gives it one."""
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


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": F32},
        {"head_dim": 72},
        {"v_head_dim": 72},
        {"head_dim": 512},
        {"head_dim": 64, "v_head_dim": 272},
        {"head_dim": 96, "v_head_dim": 80, "kv_dtype": E4M3},
        {"head_dim": 192, "v_head_dim": 192, "num_q_heads": 8 * 16},
        {"head_dim": 80, "kv_dtype": E4M3},
        {"num_q_heads": 8 * 17},
        {"query_len": 5},
        {"head_dim": 256, "num_q_heads": 8 * 16},
    ],
    ids=str,
)
def test_shapes_that_only_triton_serves(change: dict[str, object]) -> None:
    arguments = {**LLAMA, **change}
    assert AttentionPlan.decode(4, **arguments) == AttentionPlan.decode(4, **{**arguments, "native": False})


PLANS = {  # rows and changes; warps, cluster, blocks per KV head
    "one": ({"num_rows": 1}, (8, 8, 8)),
    "few": ({"num_rows": 2}, (8, 1, 16)),
    "some": ({"num_rows": 31}, (8, 1, 16)),
    "many": ({"num_rows": 32}, (8, 1, 16)),
    "fp8": ({"num_rows": 32, "kv_dtype": E4M3}, (8, 1, 16)),
    "one_of_32_heads": ({"num_rows": 1, "num_kv_heads": 32}, (8, 2, 2)),
    "one_of_1_head": ({"num_rows": 1, "num_kv_heads": 1, "num_q_heads": 16}, (8, 8, 64)),
    "one_invariant": ({"num_rows": 1, "batch_invariant": True}, (8, 1, 16)),
    "many_invariant": ({"num_rows": 256, "batch_invariant": True}, (8, 1, 16)),
    "head_dim_256": ({"num_rows": 64, "head_dim": 256}, (4, 1, 16)),
    "192_and_128": ({"num_rows": 64, "head_dim": 192, "v_head_dim": 128, "num_kv_heads": 16}, (8, 1, 8)),
    "many_64_and_128": ({"num_rows": 64, "head_dim": 64, "v_head_dim": 128}, (8, 1, 16)),
    "many_head_dim_64": ({"num_rows": 64, "head_dim": 64}, (8, 1, 32)),
    "many_head_dim_64_wide": ({"num_rows": 64, "head_dim": 64, "num_q_heads": 128}, (8, 1, 16)),
    "parts_not_rounded": ({"num_rows": 16, "num_kv_heads": 3, "num_q_heads": 9, "head_dim": 64}, (8, 1, 44)),
    "pairs_for_few": ({"num_rows": 15, "num_kv_heads": 1, "num_q_heads": 16}, (8, 2, 128)),
    "no_pairs_between": ({"num_rows": 32, "num_kv_heads": 1, "num_q_heads": 16}, (8, 1, 128)),
    "pairs_for_whole_units": ({"num_rows": 64, "num_kv_heads": 1, "num_q_heads": 16}, (8, 2, 128)),
    "no_pairs_for_cheap_merges": ({"num_rows": 64, "num_kv_heads": 1, "num_q_heads": 4}, (8, 1, 128)),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    change, expected = PLANS[name]
    plan = AttentionPlan.decode(**{**LLAMA, **change})
    assert plan.native is not None
    assert (plan.native.warps, plan.native.cluster, plan.native_blocks) == expected
    if plan.parts_are_warps:
        assert plan.schedule.num_parts == plan.native_blocks * plan.native.warps
        assert plan.tile.block_n == (32 if "fp8" in name else 16), "parts are cut at any tile"


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values at an address that lies `elements` further on than the allocator's."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)[elements:]
    return room.view(tensor.shape).copy_(tensor)


def test_addresses_that_it_cannot_read_go_to_triton() -> None:
    """One tensor at a time, and of each one thing at a time."""
    plan = AttentionPlan.decode(4, **LLAMA)
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32)
    q, cache = torch.zeros(4, 32, 128, dtype=BF16), torch.zeros(3, 16, 8, 128, dtype=BF16)
    right = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "work_list": work_list, "out": q.clone()}
    assert native_fault(plan, **right) is None
    wide = torch.zeros(3, 16, 8, 132, dtype=BF16)[..., :128]  # 264 bytes from head to head
    heads, at = "has heads at addresses that are no multiple of", "lies at no multiple of 16"
    for name, tensor, fault in (
        ("k_cache", shifted(cache, 4), f"k_cache {heads} 16"),
        ("v_cache", shifted(cache, 4), f"v_cache {heads} 16"),
        ("k_cache", wide, f"k_cache {heads} 16"),
        ("v_cache", wide, f"v_cache {heads} 16"),
        ("q", shifted(q, 1), f"q {heads} 4"),
        ("out", shifted(q, 1), f"out {heads} 4"),
        ("q", torch.zeros(4, 32, 129, dtype=BF16)[..., :128], f"q {heads} 4"),
        ("out", torch.zeros(4, 32, 129, dtype=BF16)[..., :128], f"out {heads} 4"),
        ("work_list", shifted(work_list, 2), f"work_list {at}"),
    ):
        assert native_fault(plan, **{**right, name: tensor}) == fault
    for name, tensor in (("k_cache", shifted(cache, 8)), ("q", shifted(q, 2)), ("work_list", shifted(work_list, 4))):
        assert native_fault(plan, **{**right, name: tensor}) is None


def test_a_head_dim_of_another_dtype_alone_goes_to_triton() -> None:
    """Tiles of 64 tokens fit both dtypes here; heads of 80 are no multiple of 32."""
    plan = AttentionPlan.decode(4, **{**LLAMA, "head_dim": 80}, batch_invariant=True)
    assert plan.native is not None
    assert plan.tile.block_n == 64
    q, cache = torch.zeros(4, 32, 80, dtype=BF16), torch.zeros(3, 16, 8, 80, dtype=E4M3)
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32)
    assert native_fault(plan, q, cache, cache, work_list, q) == (
        "the plan was made for another dtype than torch.float8_e4m3fn"
    )


SHARED_BYTES = {  # warps x (stages x tile + partial result) + input_ring, in bytes
    "llama_one": 8 * (2 * 8192 + 4 * 4 * 134) + 16 * (32 + 4) * 8 + 16,
    "llama": 8 * (2 * 8192 + 4 * 4 * 134),
    "llama_fp8": 8 * (2 * 8192 + 4 * 4 * 134),
    "small_heads": 8 * (3 * 4096 + 4 * 3 * 70) + 16 * (12 + 3) * 8 + 16,
    "pairs": 8 * (2 * 8192 + 4 * 16 * 134) + 16 * (512 + 16) * 2 + 16,
    "gemma": 4 * (2 * 16384 + 4 * 2 * 262),
    "deepseek": 8 * (2 * 10240 + 4 * 1 * 134),
    "deepseek_one": 8 * (2 * 10240 + 4 * 1 * 134) + 16 * (16 + 1) * 4 + 16,
}


@pytest.mark.parametrize("name", SHARED_BYTES)
def test_shared_memory_of_a_block(name: str) -> None:
    assert native_variants()[name].shared_bytes == SHARED_BYTES[name]


OPTIONS = {
    "none": ({}, {}),
    "window": ({"sliding_window": 1}, {"WINDOW": 1}),
    "chunks": ({"attention_chunk_size": 33}, {"WINDOW": 2}),
    "chunks_of_tiles": ({"attention_chunk_size": 48}, {}),  # the work list begins where they do
    "softcap": ({"logits_softcap": 1.0}, {"SOFTCAP": 1}),
    "full": ({"causal": False}, {"CAUSAL": 0}),
    "alibi": ({"alibi_slopes": torch.ones(32)}, {"ALIBI": 1}),
    "alibi_sqrt": ({"alibi_slopes": torch.ones(32), "alibi_sqrt": True}, {"ALIBI": 2}),
    "sinks": ({"sinks": torch.ones(32), "k_scale": torch.ones(1)}, {}),  # these are pointers, null or not
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_macros(name: str) -> None:
    options, changes = OPTIONS[name]
    plan = AttentionPlan.decode(64, **LLAMA)
    plain = dict(native_variant(plan, AttentionOptions(1.0), BF16, BF16, 16).macros)
    assert {key: plain[key] for key in ("WINDOW", "SOFTCAP", "CAUSAL", "ALIBI", "KV_FP8", "Q_BF16")} == {
        "WINDOW": 0, "SOFTCAP": 0, "CAUSAL": 1, "ALIBI": 0, "KV_FP8": 0, "Q_BF16": 1,
    }  # fmt: skip
    variant = native_variant(plan, AttentionOptions(1.0, **options), BF16, BF16, 16)
    assert dict(variant.macros) == plain | changes


def test_chunks_in_macros() -> None:
    """A mask where the work list alone does not do: several new tokens, or chunks that begin within tiles."""
    for change, size, window in (
        ({}, 8192, 0),
        ({}, 8200, 2),
        ({"query_len": 2}, 8192, 2),
        ({"kv_dtype": E4M3}, 8192, 0),
        ({"kv_dtype": E4M3}, 48, 2),  # tiles of 32
        ({"batch_invariant": True}, 8192, 0),
        ({"batch_invariant": True}, 48, 2),  # of 64
    ):
        plan = AttentionPlan.decode(64, **{**LLAMA, **change})
        options = AttentionOptions(1.0, attention_chunk_size=size)
        assert plan.masks_chunks(size) == (window == 2)
        assert dict(native_variant(plan, options, BF16, change.get("kv_dtype", BF16), 16).macros)["WINDOW"] == window


def test_sizes_in_macros() -> None:
    plan = AttentionPlan.decode(64, **{**LLAMA, "head_dim": 192, "v_head_dim": 128})
    macros = dict(native_variant(plan, AttentionOptions(1.0), BF16, BF16, 16).macros)
    assert (macros["HEAD_DIM"], macros["V_HEAD_DIM"]) == (192, 128)


def test_dtypes_in_macros() -> None:
    for dtype, kv_dtype, q_bf16, kv_fp8 in ((F16, F16, 0, 0), (BF16, E4M3, 1, 1), (F16, E5M2, 0, 2)):
        plan = AttentionPlan.decode(64, **{**LLAMA, "dtype": dtype}, kv_dtype=kv_dtype)
        macros = dict(native_variant(plan, AttentionOptions(1.0), dtype, kv_dtype, 48).macros)
        assert (macros["Q_BF16"], macros["KV_FP8"], macros["PAGE_SIZE"]) == (q_bf16, kv_fp8, 48)
