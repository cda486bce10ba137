"""The tile sizes of an attention plan: query tiles, KV tiles, and programs of the Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.attention.plan_schedule import decode_partitions
from graphrt.kernels.attention.plan_shape import PlanShape
from graphrt.kernels.sizes import next_power_of_two

MIN_BLOCK_M = 16
"""Smallest query tile, in queries, because a tensor core product needs at least 16. A limit of Triton."""

_ODD_BLOCK_N = 32
"""Maximum tokens of a KV tile if heads are loaded element by element, because each element needs a register for its
address. A test reads the compiler's report. Not measured on a device."""

_FEW_SPLITS = 8
"""Maximum KV splits per query tile of up to 4 queries for programs of one warp. With more splits, merging costs more
than such programs gain, so programs have four warps. Measured: docs/dev/log.md "One warp and tiles of 16 tokens"; the
bound itself is not measured."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Sizes of query tiles, KV tiles, and programs of the Triton kernel.

    block_m     maximum queries per query tile
    block_n     tokens per KV tile, the unit of the work list
    num_warps   warps per program
    num_stages  KV tiles in the load pipeline of a program, including the one in use
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(
    shape: PlanShape, dtype: torch.dtype, kv_dtype: torch.dtype, num_sms: int, batch_invariant: bool
) -> TilePlan:
    """Return the tiles and programs for decode requests."""
    queries, block_d = shape.queries_per_req, shape.widest
    block_m = max(MIN_BLOCK_M, min(_max_block_m(block_d, dtype), next_power_of_two(queries)))
    if dtype == torch.float32:
        num_warps, block_n = _float32_program(block_d)
        return TilePlan(block_m, block_n, num_warps, num_stages=3)
    if block_m > MIN_BLOCK_M or block_d > 128:
        num_warps = 8 if block_m * block_d >= 8192 or _is_odd(shape, kv_dtype) else 4
        return TilePlan(block_m, 64 if block_d <= 128 else 32, num_warps, num_stages=3)
    # One-warp programs read fastest. With few requests, each has many splits, and merging needs more warps.
    if _is_odd(shape, kv_dtype):
        return TilePlan(block_m, _ODD_BLOCK_N, num_warps=4, num_stages=3)
    num_q_tiles = shape.num_reqs * -(-queries // block_m)
    merge_cost = max(1, next_power_of_two(queries) // 4) * decode_partitions(1, shape.num_kv_heads, num_sms)
    one_warp = num_q_tiles * _FEW_SPLITS >= merge_cost and not batch_invariant
    num_warps = 1 if one_warp else 4
    num_stages = 3
    if kv_dtype.itemsize == 1:
        num_stages = 5 if one_warp else 4
    return TilePlan(block_m, 16 * num_warps * max(1, 128 // block_d), num_warps, num_stages)


def varlen_tile(shape: PlanShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> TilePlan:
    """Return the tiles and programs for mixed batches, which are compute-bound."""
    block_d = shape.widest
    if dtype == torch.float32:
        num_warps, block_n = _float32_program(block_d)
    else:
        num_warps, block_n = 8, 64 if block_d <= 128 else 32
    block_m = _max_block_m(block_d, dtype)
    if dtype.itemsize == 2 and block_d <= 128 and kv_dtype.itemsize == 2 and not _is_odd(shape, kv_dtype):
        block_m = 128
    return TilePlan(block_m, block_n, num_warps, num_stages=3)


def _is_odd(shape: PlanShape, kv_dtype: torch.dtype) -> bool:
    """Return whether the addresses of K or V heads allow only loads of less than 16 bytes."""
    return any(size * kv_dtype.itemsize % 16 for size in (shape.head_dim, shape.v_head_dim))


def _max_block_m(block_d: int, dtype: torch.dtype) -> int:
    """Return the largest number of queries per query tile for which the sums fit in registers."""
    if dtype == torch.float32:
        return MIN_BLOCK_M
    return 64 if block_d <= 128 else 32 if block_d <= 256 else MIN_BLOCK_M


def _float32_program(block_d: int) -> tuple[int, int]:
    """Return warps and tokens per KV tile. float32 products run without tensor cores, with operands in registers."""
    return (4, 32) if block_d <= 64 else (8, 16)
