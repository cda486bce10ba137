"""Cases and checks of the CUDA decode kernel, on a device and in emulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from graphrt.kernels.attention.call import AttentionCall
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.workspace import AttentionWorkspace
from tests.support.attention_cases import BF16, E4M3, E5M2, F16, Case, Problem, decode, expected, make_problem

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


def check_values_of_zero(run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator) -> None:
    """`run` with requests that several blocks share and values of 0 or -0."""
    problem = make_problem(replace(BASE, reqs=decode((3000, 40)), num_kv_heads=1, num_sms=48), rng, device)
    for zero in (0.0, -0.0):
        problem.v_cache.fill_(zero)
        assert not run(problem).any()


def check_logits(run: Callable[[Problem], torch.Tensor], device: torch.device, rng: torch.Generator) -> None:
    """`run` with requests of one token. Their log-sum-exp is the logit; 16-bit outputs would hide its errors."""
    for softcap, kv_dtype in ((0.0, None), (50.0, None), (50.0, E4M3)):
        case = replace(BASE, reqs=decode((1,) * 24), softcap=softcap, kv_dtype=kv_dtype, qk_size=8.0)
        problem = make_problem(case, rng, device)
        run(problem)
        assert problem.lse is not None
        truth = expected(problem, torch.float64)[1]
        torch.testing.assert_close(problem.lse.cpu().double(), truth, rtol=1e-5, atol=1e-4)


def call_of(
    problem: Problem, plan: AttentionPlan, workspace: AttentionWorkspace, work_list: torch.Tensor
) -> AttentionCall:
    return AttentionCall(
        problem.q, problem.k_cache, problem.v_cache, problem.block_table, None, problem.seq_lens, work_list,
        problem.out, problem.lse, workspace, problem.options, plan, pdl=False,
    )  # fmt: skip
