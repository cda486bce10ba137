"""The part of a plan for the CUDA kernel of decode rows: its blocks, their shared memory, and its clusters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from graphrt.kernels.attention.plan_schedule import SchedulePlan, round_parts
from graphrt.kernels.attention.plan_shape import PlanShape
from graphrt.kernels.attention.plan_tile import TilePlan
from graphrt.kernels.native.nvrtc import MIN_SHARED_BYTES

NATIVE_MERGE_BUNDLE = 16
"""Partial results. A unit with more is merged in bundles of this many, then over the bundles. docs/LOG.md "Letters
between blocks" has rows that pass through two bundles; the number is not measured."""

STATIC_SHARED_BYTES = 256
"""Bytes of shared memory that the compiler takes per block, at most, besides what a launch asks for. A test reads the
compiler's report."""

_MAX_QUERIES = 16
"""Queries of a unit: two N sides of an mma. More are left to the Triton kernel. Not measured."""

_MAX_SUMS = 960
"""Octets of queries x (2 v_head_dim + head_dim): a warp holds the sums in 8 times v_head_dim registers per octet, and
the queries in 4 times head_dim. Larger units would spill; a test reads the compiler's report. Not measured on a
device."""

_MAX_WIDTH = 256
"""Elements of a head. Of larger ones the queries and sums of a warp would not fit its registers. Not measured."""

_STAGES = 3
"""KV tiles of a warp in shared memory at most, that in use included. Measured: docs/LOG.md "Two tiles per warp"."""

_TWO_STAGES_FROM = 64 << 10
"""Bytes that the warps of a multiprocessor hold in one tile each. From here on two stages are faster than three,
since the first copies leave earlier. Measured: docs/LOG.md "Two tiles per warp"; the bound lies between heads of 64
and of 128."""

_MANY_UNITS = 2
"""Units per multiprocessor of a KV head. From here on heads of 64 take two blocks per multiprocessor. Measured:
docs/LOG.md "Two blocks for heads of 64"; the bound is not measured."""

_MIN_UNIT_TILES = 6
"""KV tiles. Least cost of a unit where parts belong to warps: a warp could read this many in the time that a unit of
one tile takes. Measured: docs/LOG.md "Least cost of a unit"."""

_CLUSTER_UNIT_BYTES = 28 << 10
"""Bytes of K and V that each warp of a part could read in the time that one more unit costs the part. Measured:
docs/LOG.md "Gap of seven tiles" (8 warps x 28 KB are 7 tiles of 64 tokens)."""

_CLUSTER = 8
"""Blocks of a cluster that works on a single row. Measured: docs/LOG.md "Clusters for one row"."""

_CLUSTER_SHARE = 0.9
"""Share of the multiprocessors that clusters may ask for: 15 clusters of 8 fit 132 of them. Measured: docs/LOG.md
"Clusters for one row"."""

_CLUSTER_PART_TOKENS = 2048
"""Tokens. Smallest part of a single row: to merge one more part would cost more than idle multiprocessors. Measured:
docs/LOG.md "Fewer parts for short rows"; the number itself is not measured."""

_CLUSTER_MIN_PARTS = 32
"""Parts per KV head. With fewer, several rows take no clusters. Measured: docs/LOG.md "Clusters of two"; the bound
itself is not measured."""

_CHEAP_MERGE_QUERIES = 4
"""Queries of a unit. To merge so few is cheap, and clusters of two gain nothing. Not measured."""


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Blocks of the CUDA kernel.

    warps          warps per block
    stages         KV tiles of a warp in shared memory, that in use included
    cluster        blocks that work on a part together; 1: no clusters
    blocks_per_sm  blocks that share a multiprocessor
    """

    warps: int
    stages: int
    cluster: int = 1
    blocks_per_sm: int = 1


def plan_for_native(
    shape: PlanShape,
    schedule: SchedulePlan,
    tile: TilePlan,
    num_units: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_sms: int,
) -> tuple[SchedulePlan, TilePlan, NativePlan] | None:
    """Schedule, tile and blocks of the CUDA kernel; None where it does not serve the shape.

    schedule, tile   those of the Triton kernel; the size of units and the kind of splits stay as they are
    num_units        units of the shape
    """
    queries = shape.queries_of_row
    sums = -(-queries // 8) * (2 * shape.v_head_dim + shape.head_dim)
    if dtype.itemsize != 2 or queries > _MAX_QUERIES or sums > _MAX_SUMS or not serves_heads(shape, kv_dtype):
        return None
    cluster, clusters_per_head = _cluster(shape, bool(schedule.fixed_splits), num_units, num_sms)
    warps_and_blocks = [(8, 1), (4, 1)]
    many = num_units >= _MANY_UNITS * (num_sms // shape.num_kv_heads)
    if many and max(shape.head_dim, shape.v_head_dim) <= 64 and queries <= 8:
        warps_and_blocks.insert(0, (8, 2))  # tiles are small: one block would wait for memory
    size = functools.partial(native_shared_bytes, shape, kv_dtype, cluster=cluster)
    native = _blocks(warps_and_blocks, native_tile_bytes(shape, kv_dtype), size)
    if native is None:
        return None
    native = replace(native, cluster=cluster)
    parts_of_blocks = clusters_per_head or round_parts(native.blocks_per_sm * num_sms // shape.num_kv_heads)
    if parts_are_warps(schedule, native):
        schedule = replace(
            schedule,
            num_parts=native.warps * parts_of_blocks,
            unit_overhead=0,
            min_unit_tiles=_MIN_UNIT_TILES,
        )
        num_warps = 1 if shape.widest <= 128 else 4
        tile = TilePlan(tile.block_m, native_tile(kv_dtype), num_warps, native.stages)
        return schedule, tile, native
    block_n = 64 if shape.widest <= 128 else 32
    tile_bytes = block_n * (shape.head_dim + shape.v_head_dim) * kv_dtype.itemsize
    schedule = replace(
        schedule,
        num_parts=parts_of_blocks,
        unit_overhead=max(1, round(native.warps * _CLUSTER_UNIT_BYTES / tile_bytes)),
        min_part_tiles=_CLUSTER_PART_TOKENS // block_n if cluster > 1 and num_units == 1 else 1,
    )
    return schedule, TilePlan(tile.block_m, block_n, 4, native.stages), native


def parts_are_warps(schedule: SchedulePlan, native: NativePlan) -> bool:
    """Whether each warp has a part of its own. Under clusters and fixed splits all warps of a cluster share one."""
    return native.cluster == 1 and not schedule.fixed_splits


def native_tile(kv_dtype: torch.dtype) -> int:
    """Tokens that a warp of the CUDA kernel multiplies at a time; sizes of heads must be multiples of this, too."""
    return 16 if kv_dtype.itemsize == 2 else 32


def serves_heads(shape: PlanShape, kv_dtype: torch.dtype) -> bool:
    """Whether the CUDA kernel multiplies heads of these sizes."""
    tile = native_tile(kv_dtype)
    return shape.head_dim % tile == 0 and shape.v_head_dim % tile == 0 and shape.widest <= _MAX_WIDTH


def native_tile_bytes(shape: PlanShape, kv_dtype: torch.dtype) -> int:
    """Bytes of K and V of such a tile."""
    return native_tile(kv_dtype) * (shape.head_dim + shape.v_head_dim) * kv_dtype.itemsize


def native_shared_bytes(shape: PlanShape, kv_dtype: torch.dtype, warps: int, stages: int, cluster: int) -> int:
    """Bytes of dynamic shared memory of a block: tiles, partial results, what a cluster exchanges."""
    queries, v_head_dim = shape.queries_of_row, shape.v_head_dim
    partial_bytes = 4 * queries * (v_head_dim + 6)
    input_ring_bytes = 16 * (-(-queries * v_head_dim // 2 // cluster) + queries) * cluster + 16 if cluster > 1 else 0
    return warps * (stages * native_tile_bytes(shape, kv_dtype) + partial_bytes) + input_ring_bytes


def _blocks(
    warps_and_blocks: list[tuple[int, int]], tile_bytes: int, size: Callable[[int, int], int]
) -> NativePlan | None:
    """The first pair of warps per block and blocks per multiprocessor with room for two stages, with as many as fit."""
    for warps, blocks in warps_and_blocks:
        # A multiprocessor has 1 KB of shared memory more than a block may take, and each block costs it 1 KB.
        room = (MIN_SHARED_BYTES + 1024) // blocks - 1024 - STATIC_SHARED_BYTES
        most = 2 if warps * blocks * tile_bytes >= _TWO_STAGES_FROM else _STAGES
        fitting = [stages for stages in range(2, most + 1) if size(warps, stages) <= room]
        if fitting:
            return NativePlan(warps, fitting[-1], blocks_per_sm=blocks)
    return None


def _cluster(shape: PlanShape, fixed_splits: bool, num_units: int, num_sms: int) -> tuple[int, int]:
    """Blocks of a cluster, and clusters per KV head; (1, 0): no clusters.

    A single row is merged within a cluster, without global memory. Half of the multiprocessors then read at full speed.
    Several rows take clusters of two where parts are many and a merge is expensive, if one of two things holds:

    - clusters of two leave the units whole;
    - or they halve many splits.

    In between, and with few parts, more parts of one block were faster.
    """
    if fixed_splits:
        return 1, 0
    parts = round_parts(num_sms // shape.num_kv_heads)
    if num_units > 1:
        expensive = shape.queries_of_row > _CHEAP_MERGE_QUERIES and parts >= _CLUSTER_MIN_PARTS
        helps = 8 * num_units < parts or parts < 4 * num_units <= 2 * parts
        return (2, parts // 2) if expensive and helps else (1, 0)
    cluster = _CLUSTER
    while cluster > 1 and cluster * shape.num_kv_heads > _CLUSTER_SHARE * num_sms:
        cluster //= 2
    return (cluster, max(1, num_sms // 2 // (cluster * shape.num_kv_heads))) if cluster > 1 else (1, 0)
