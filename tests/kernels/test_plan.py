"""The numbers in plans, so that a changed constant shows without a device."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.plan import AttentionPlan

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def sizes(heads: tuple[int, ...], dtype: Any, fp8: bool, sms: int, invariant: bool) -> dict[str, Any]:
    """`heads`: query heads, KV heads, head_dim, and v_head_dim unless it is the same."""
    names = ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim")
    kinds = {"dtype": dtype, "kv_dtype": E4M3 if fp8 else None}
    return {**dict(zip(names, heads, strict=False)), **kinds, "num_sms": sms, "batch_invariant": invariant}


def decode(
    reqs: int, *heads: int, dtype: Any = BF16, fp8: bool = False, sms: int = 132, invariant: bool = False, **more: Any
) -> AttentionPlan:
    return AttentionPlan.decode(reqs, **sizes(heads, dtype, fp8, sms, invariant), **more)


def varlen(
    reqs: int, tokens: int, *heads: int, dtype: Any = BF16, fp8: bool = False, sms: int = 132, invariant: bool = False
) -> AttentionPlan:
    return AttentionPlan.varlen(reqs, tokens, **sizes(heads, dtype, fp8, sms, invariant))


PLANS: dict[str, tuple[AttentionPlan, str]] = {
    # block_m, block_n, num_warps, num_stages | num_partitions, fixed_splits, min_split_tiles, q_tile_overhead,
    # min_q_tile_cost, min_partition_tiles | partial_m, merge_splits, merge_group_size, max_partials, partial_lses,
    # num_counters
    "one_req": (decode(1, 32, 8, 128), "16 64 4 3 | 32 0 4 1 1 1 | 4 32 32 64 2048 1024"),
    "few_reqs": (decode(8, 32, 8, 128), "16 64 4 3 | 32 0 4 1 1 1 | 4 32 32 64 2048 1024"),
    "many_reqs": (decode(256, 32, 8, 128), "16 16 1 3 | 128 0 4 1 1 1 | 4 8 8 256 8192 4096"),
    "many_reqs_fp8": (decode(256, 32, 8, 128, fp8=True), "16 16 1 5 | 128 0 4 1 1 1 | 4 8 8 256 8192 4096"),
    "few_reqs_fp8": (decode(2, 32, 8, 128, fp8=True), "16 64 4 4 | 32 0 4 1 1 1 | 4 32 32 64 2048 1024"),
    "large_groups": (decode(64, 16, 1, 128), "16 64 4 3 | 256 0 4 1 1 1 | 16 8 8 512 8192 1024"),
    "small_heads": (decode(256, 9, 3, 64), "16 32 1 3 | 352 0 4 1 1 1 | 4 16 16 704 8448 4224"),
    "heads_of_256": (decode(16, 32, 8, 256), "16 32 4 3 | 32 0 4 1 1 1 | 4 16 16 64 2048 1024"),
    "speculative": (decode(16, 32, 8, 128, query_len=16), "64 64 8 3 | 16 0 4 1 1 1 | 64 1 8 32 16384 512"),
    "two_units_a_req": (decode(3, 71, 1, 128), "64 64 8 3 | 128 0 4 1 1 1 | 64 1 8 256 16384 512"),
    "float32": (decode(16, 32, 8, 64, dtype=F32), "16 32 4 3 | 32 0 4 1 1 1 | 4 32 32 64 2048 1024"),
    "float32_wide": (decode(16, 32, 8, 256, dtype=F32, query_len=4), "16 16 8 3 | 16 0 4 1 1 1 | 16 2 8 32 4096 512"),
    "invariant": (decode(256, 32, 8, 128, invariant=True), "16 64 4 3 | 32 16 4 1 1 1 | 4 32 32 4096 131072 65536"),
    "one_multiprocessor": (decode(2, 7, 7, 80, sms=1), "16 16 1 3 | 1 0 4 1 1 1 | 1 32 32 2 14 28"),
    "cuda_warps": (decode(64, 32, 8, 128, native=True), "16 16 1 2 | 128 0 4 0 6 1 | 4 8 16 256 8192 70656"),
    "cuda_fp8": (decode(64, 32, 8, 128, fp8=True, native=True), "16 32 1 2 | 128 0 4 0 6 1 | 4 8 16 256 8192 70656"),
    "cuda_one_req": (decode(1, 32, 8, 128, native=True), "16 64 4 2 | 1 0 4 7 1 32 | 4 32 16 2 128 256"),
    "cuda_pairs": (decode(2, 16, 1, 128, native=True), "16 64 4 2 | 64 0 4 7 1 1 | 16 8 16 128 4096 512"),
    "cuda_invariant": (
        decode(3, 32, 8, 128, query_len=3, invariant=True, native=True),
        "16 64 4 2 | 16 16 4 7 1 1 | 16 8 16 48 12288 768",
    ),
    "cuda_small_heads": (decode(256, 9, 3, 64, native=True), "16 16 1 2 | 704 0 4 0 6 1 | 4 16 16 1408 16896 60720"),
    "cuda_heads_of_256": (decode(64, 32, 8, 256, native=True), "16 16 4 2 | 64 0 4 0 6 1 | 4 16 16 128 4096 134144"),
    "two_sizes": (decode(64, 16, 16, 192, 128), "16 32 4 3 | 16 0 4 1 1 1 | 1 32 32 32 512 1024"),
    "cuda_two_sizes": (decode(64, 16, 16, 192, 128, native=True), "16 16 4 2 | 64 0 4 0 6 1 | 1 32 16 128 2048 20736"),
    "cuda_two_sizes_one_req": (
        decode(1, 16, 16, 192, 128, native=True),
        "16 32 4 2 | 1 0 4 11 1 64 | 1 32 16 2 64 256",
    ),
    "heads_of_512": (decode(64, 32, 8, 512), "16 32 8 3 | 16 0 4 1 1 1 | 4 4 8 32 1024 512"),
    "heads_of_72": (decode(64, 32, 8, 72), "16 16 1 3 | 128 0 4 1 1 1 | 4 8 8 256 8192 4096"),
    "odd_sizes": (decode(64, 32, 8, 33, 71), "16 32 4 3 | 32 0 4 1 1 1 | 4 32 32 64 2048 1024"),
    "heads_of_1": (decode(64, 32, 8, 1), "16 32 4 3 | 32 0 4 1 1 1 | 4 32 32 64 2048 1024"),
    "mixed_two_sizes": (varlen(64, 2048, 16, 16, 192, 128), "32 32 8 3 | 16 0 4 1 1 1 | 32 2 8 32 16384 1024"),
    "mixed_odd_sizes": (varlen(64, 2048, 32, 8, 33, 71), "64 64 8 3 | 33 0 4 1 1 1 | 64 1 8 66 33792 1056"),
    "mixed_heads_of_512": (varlen(64, 2048, 32, 8, 512), "16 32 8 3 | 33 0 4 1 1 1 | 16 1 8 66 8448 1056"),
    "mixed": (varlen(64, 2048, 32, 8, 128), "128 64 8 3 | 33 0 4 1 1 1 | 128 1 8 66 67584 1056"),
    "mixed_fp8": (varlen(64, 2048, 32, 8, 128, fp8=True), "64 64 8 3 | 33 0 4 1 1 1 | 64 1 8 66 33792 1056"),
    "mixed_256": (varlen(7, 70, 32, 8, 256), "32 32 8 3 | 33 0 4 1 1 1 | 32 1 8 66 16896 1056"),
    "mixed_float32": (varlen(7, 70, 32, 8, 256, dtype=F32), "16 16 8 3 | 33 0 4 1 1 1 | 16 2 8 66 8448 1056"),
    "mixed_invariant": (varlen(64, 2048, 32, 8, 128, invariant=True), "128 64 8 3 | 33 1 4 1 1 1 | 128 1 8 0 0 0"),
    "mixed_one": (varlen(1, 1, 9, 3, 64, sms=1), "128 64 8 3 | 1 0 4 1 1 1 | 128 1 8 2 768 12"),
}


@pytest.mark.parametrize("name", PLANS)
def test_numbers(name: str) -> None:
    plan, expected = PLANS[name]
    memory = [plan.partial_m, plan.merge_splits, plan.merge_group_size, plan.max_partials, plan.partial_lses]
    parts = (astuple(plan.tile), astuple(plan.schedule), (*memory, plan.num_counters))
    assert " | ".join(" ".join(map(str, part)) for part in parts) == expected
    assert plan.partial_elements == plan.partial_queries * plan.shape.v_head_dim
