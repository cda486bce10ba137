"""Launch parameters of the CUDA decode kernel: blocks, their shared memory, and clusters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from graphrt.kernels.attention.plan_schedule import SchedulePlan, round_partitions
from graphrt.kernels.attention.plan_shape import PlanShape
from graphrt.kernels.attention.plan_tile import TilePlan
from graphrt.kernels.native.nvrtc import MIN_SHARED_BYTES
from graphrt.kernels.sizes import ceil_div

NATIVE_MERGE_GROUP_SIZE = 16
"""Partial results per merge group; if there are more, each group is merged first. docs/dev/log.md "Partial results
between blocks" has requests that span two groups; the number is not measured."""

STATIC_SHARED_BYTES = 256
"""Largest static shared memory of a block in bytes, in addition to the dynamic memory of the launch. A test reads the
compiler's report."""

_MAX_QUERIES = 32
"""Largest query tile, in queries: four times the N = 8 of an mma. Larger query tiles use the Triton kernel. Not
measured."""

_MAX_SUMS = 1152
"""Limit of octets of queries x (2 v_head_dim + head_dim). A warp keeps the sums in 8 times v_head_dim registers per
octet and the queries in 4 times head_dim. Near the limit most variants spill, those without options up to 200 bytes. A
test reads the compiler's report for some. Not measured on a device."""

_MAX_WIDTH = 256
"""Largest head size. Queries and sums of larger heads would not fit in a warp's registers. Not measured."""

_STAGES = 3
"""Maximum KV tiles of a warp in shared memory, including the one in use. Measured: docs/dev/log.md "Two tiles per
warp"."""

_TWO_STAGES_FROM = 64 << 10
"""Bytes of one KV tile for each warp of a multiprocessor. From this size on, two stages are faster than three because
the first copies are issued earlier. Measured: docs/dev/log.md "Two tiles per warp"; the bound is between heads of 64
and of 128."""

_MANY_Q_TILES = 2
"""Query tiles of a KV head per multiprocessor. From this number on, heads of 64 use two blocks per multiprocessor.
Measured: docs/dev/log.md "Two blocks for heads of 64"; the bound is not measured."""

_MIN_Q_TILE_COST = 6
"""Minimum cost of a query tile in plans with one partition per warp, in KV tiles. A warp could read this many in the
time of a query tile with one KV tile. Measured: docs/dev/log.md "Least cost of a query tile"."""

_CLUSTER_Q_TILE_BYTES = 28 << 10
"""Bytes of K and V that each warp of a partition could read in the time that an additional query tile costs. Measured:
docs/dev/log.md "Gap of seven tiles" (8 warps x 28 KB are 7 KV tiles of 64 tokens)."""

_CLUSTER = 8
"""Blocks per cluster for a single request. Measured: docs/dev/log.md "Clusters for one request"."""

_CLUSTER_SHARE = 0.9
"""Maximum share of the multiprocessors that clusters use. 15 clusters of 8 fit on 132. Measured: docs/dev/log.md
"Clusters for one request"."""

_CLUSTER_PARTITION_TOKENS = 2048
"""Smallest partition of a single request, in tokens. Merging more partitions would cost more than idle multiprocessors.
Measured: docs/dev/log.md "Fewer partitions for short requests"; the number itself is not measured."""

_CLUSTER_MIN_PARTITIONS = 32
"""Minimum partitions per KV head for several requests to use clusters. Measured: docs/dev/log.md "Clusters of two"; the
bound itself is not measured."""

_CHEAP_MERGE_QUERIES = 4
"""Query tiles of up to this many queries are cheap to merge, so clusters of two gain nothing. Not measured."""


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Blocks of the CUDA kernel.

    warps          warps per block
    stages         KV tiles per warp in shared memory, including the one in use
    cluster        number of blocks that share a partition; 1: no clusters
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
    num_q_tiles: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_sms: int,
) -> tuple[SchedulePlan, TilePlan, NativePlan] | None:
    """Return the schedule, tile and blocks of the CUDA kernel; None if it does not support the shape.

    schedule, tile   of the Triton kernel; block_m and the kind of splits are kept
    num_q_tiles      query tiles of the shape
    """
    queries = shape.queries_per_req
    sums = -(-queries // 8) * (2 * shape.v_head_dim + shape.head_dim)
    if dtype.itemsize != 2 or queries > _MAX_QUERIES or sums > _MAX_SUMS or not serves_heads(shape, kv_dtype):
        return None
    cluster, clusters_per_head = _cluster(shape, bool(schedule.fixed_splits), num_q_tiles, num_sms)
    warps_and_blocks = [(8, 1), (4, 1)]
    many = num_q_tiles >= _MANY_Q_TILES * (num_sms // shape.num_kv_heads)
    if many and max(shape.head_dim, shape.v_head_dim) <= 64 and queries <= 8:
        warps_and_blocks.insert(0, (8, 2))  # KV tiles are small, so one block would not hide the latency
    size = functools.partial(native_shared_bytes, shape, kv_dtype, cluster=cluster)
    tile_bytes = native_tile_bytes(shape, kv_dtype)
    min_stages = max(2, ceil_div(_partial_bytes(shape), tile_bytes))  # a warp's partial result overwrites its tiles
    native = _blocks(warps_and_blocks, tile_bytes, min_stages, size)
    if native is None:
        return None
    native = replace(native, cluster=cluster)
    partitions = clusters_per_head or round_partitions(native.blocks_per_sm * num_sms // shape.num_kv_heads)
    if partition_per_warp(schedule, native):
        schedule = replace(
            schedule,
            num_partitions=native.warps * partitions,
            q_tile_overhead=0,
            min_q_tile_cost=_MIN_Q_TILE_COST,
        )
        num_warps = 1 if shape.widest <= 128 else 4
        tile = TilePlan(tile.block_m, native_tile(kv_dtype), num_warps, native.stages)
        return schedule, tile, native
    block_n = 64 if shape.widest <= 128 else 32
    tile_bytes = block_n * (shape.head_dim + shape.v_head_dim) * kv_dtype.itemsize
    schedule = replace(
        schedule,
        num_partitions=partitions,
        q_tile_overhead=max(1, round(native.warps * _CLUSTER_Q_TILE_BYTES / tile_bytes)),
        min_partition_tiles=_CLUSTER_PARTITION_TOKENS // block_n if cluster > 1 and num_q_tiles == 1 else 1,
    )
    return schedule, TilePlan(tile.block_m, block_n, 4, native.stages), native


def partition_per_warp(schedule: SchedulePlan, native: NativePlan) -> bool:
    """Return whether each warp has its own partition. Otherwise all warps of a cluster share a partition."""
    return native.cluster == 1 and not schedule.fixed_splits


def native_tile(kv_dtype: torch.dtype) -> int:
    """Return the tokens that a warp of the CUDA kernel multiplies at a time; head sizes must be multiples of it."""
    return 16 if kv_dtype.itemsize == 2 else 32


def serves_heads(shape: PlanShape, kv_dtype: torch.dtype) -> bool:
    """Return whether the CUDA kernel supports these head sizes."""
    tile = native_tile(kv_dtype)
    return shape.head_dim % tile == 0 and shape.v_head_dim % tile == 0 and shape.widest <= _MAX_WIDTH


def native_tile_bytes(shape: PlanShape, kv_dtype: torch.dtype) -> int:
    """Return the bytes of K and V in a tile of `native_tile` tokens."""
    return native_tile(kv_dtype) * (shape.head_dim + shape.v_head_dim) * kv_dtype.itemsize


def native_shared_bytes(shape: PlanShape, kv_dtype: torch.dtype, warps: int, stages: int, cluster: int) -> int:
    """Return a block's dynamic shared memory in bytes: KV tiles, partial results, and a cluster's exchange buffers."""
    queries, v_head_dim = shape.queries_per_req, shape.v_head_dim
    exchange_bytes = 16 * (-(-queries * v_head_dim // 2 // cluster) + queries) * cluster + 16 if cluster > 1 else 0
    return warps * (stages * native_tile_bytes(shape, kv_dtype) + _partial_bytes(shape)) + exchange_bytes


def _partial_bytes(shape: PlanShape) -> int:
    """Return the bytes of a warp's partial result: padded sums, reference maxima and sums of weights."""
    return 4 * shape.queries_per_req * (shape.v_head_dim + 6)


def _blocks(
    warps_and_blocks: list[tuple[int, int]], tile_bytes: int, min_stages: int, size: Callable[[int, int], int]
) -> NativePlan | None:
    """Return the first choice of warps and blocks with room for `min_stages`, and as many stages as fit."""
    for warps, blocks in warps_and_blocks:
        # A multiprocessor has 1 KB more shared memory than a block may use, and each block reserves 1 KB.
        room = (MIN_SHARED_BYTES + 1024) // blocks - 1024 - STATIC_SHARED_BYTES
        most = 2 if warps * blocks * tile_bytes >= _TWO_STAGES_FROM else _STAGES
        fitting = [stages for stages in range(min_stages, most + 1) if size(warps, stages) <= room]
        if fitting:
            return NativePlan(warps, fitting[-1], blocks_per_sm=blocks)
    return None


def _cluster(shape: PlanShape, fixed_splits: bool, num_q_tiles: int, num_sms: int) -> tuple[int, int]:
    """Return the blocks per cluster and the clusters per KV head; (1, 0): no clusters.

    The partial results of a single request are merged within a cluster, without global memory. Half of the
    multiprocessors are enough to read at full speed. Several requests use clusters of two if there are many partitions,
    merges are expensive, and one of these holds:

    - clusters of two leave query tiles unsplit;
    - clusters of two halve a large number of splits.

    Otherwise, more partitions of one block each were faster.
    """
    if fixed_splits:
        return 1, 0
    partitions = round_partitions(num_sms // shape.num_kv_heads)
    if num_q_tiles > 1:
        expensive = shape.queries_per_req > _CHEAP_MERGE_QUERIES and partitions >= _CLUSTER_MIN_PARTITIONS
        helps = 8 * num_q_tiles < partitions or partitions < 4 * num_q_tiles <= 2 * partitions
        return (2, partitions // 2) if expensive and helps else (1, 0)
    cluster = _CLUSTER
    while cluster > 1 and cluster * shape.num_kv_heads > _CLUSTER_SHARE * num_sms:
        cluster //= 2
    return (cluster, max(1, num_sms // 2 // (cluster * shape.num_kv_heads))) if cluster > 1 else (1, 0)
