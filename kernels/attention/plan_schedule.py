"""How an attention plan partitions the work: the number of partitions, and the cost of a query tile.

docs/attention.md shows an example.
"""

from __future__ import annotations

from dataclasses import dataclass

FIXED_SPLITS = 16
"""Maximum KV splits per query tile in a batch-invariant decode plan. Not measured."""

MIN_SPLIT_TILES = 4
"""Smallest KV split of a batch-invariant plan, in KV tiles. Not measured."""

_WARPS_PER_SM = 8
"""Warps of all programs of the Triton kernel on a multiprocessor. This many loads in flight hide the memory latency.
Not measured separately."""

_VARLEN_WAVES = 2
"""Partitions per concurrently running program in mixed batches. With a single wave, multiprocessors would be idle at
the end. Measured: docs/dev/log.md "Varlen in two waves"."""

_ROUND_PARTITIONS = 16
"""The number of partitions is rounded down to a multiple of this, so that batches of round sizes have fewer splits.
Measured: docs/dev/log.md "Round partition counts"."""

_MOST_ROUNDED_OFF = 1 / 16
"""Maximum share of the partitions that rounding may drop; otherwise the number is not rounded. Measured:
docs/dev/log.md "Partition counts rounded less"."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """How the KV tiles of all query tiles are divided into partitions.

    num_partitions       equal partitions per KV head, one for each program of the Triton kernel, or for each warp or
                         cluster of the CUDA kernel
    fixed_splits         0: split at partition boundaries. Otherwise, split each query tile by its own length, into at
                         most this many KV splits
    min_split_tiles      smallest KV split with fixed_splits, in KV tiles
    q_tile_overhead      cost of a query tile in addition to its KV tiles, in KV tiles
    min_q_tile_cost      minimum cost of a query tile, in KV tiles, including overhead
    min_partition_tiles  smallest partition, in KV tiles; less work uses fewer partitions
    """

    num_partitions: int
    fixed_splits: int = 0
    min_split_tiles: int = MIN_SPLIT_TILES
    q_tile_overhead: int = 1
    min_q_tile_cost: int = 1
    min_partition_tiles: int = 1


def decode_partitions(num_warps: int, num_kv_heads: int, num_sms: int) -> int:
    """Return the partitions per KV head of a Triton decode plan, one per concurrently running program."""
    return round_partitions(max(1, _WARPS_PER_SM // num_warps) * num_sms // num_kv_heads)


def varlen_partitions(num_warps: int, num_kv_heads: int, num_sms: int) -> int:
    """Return the partitions per KV head of a plan for mixed batches."""
    return max(1, _VARLEN_WAVES * (_WARPS_PER_SM // num_warps) * num_sms // num_kv_heads)


def round_partitions(partitions: int) -> int:
    """Round `partitions` down to a multiple of 16, unless rounding drops too many."""
    partitions = max(1, partitions)
    rounded = partitions // _ROUND_PARTITIONS * _ROUND_PARTITIONS
    return rounded if partitions - rounded <= _MOST_ROUNDED_OFF * partitions else partitions
