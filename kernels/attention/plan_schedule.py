"""The part of a plan that says how the work is cut: into how many parts, and what a unit costs.

docs/attention.md draws the line, the units and the cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

FIXED_SPLITS = 16
"""Segments. A batch-invariant decode plan cuts a unit into at most this many. Not measured."""

FIXED_TILES = 4
"""KV tiles. A batch-invariant plan cuts no smaller segment than this. Not measured."""

_WARPS_PER_SM = 8
"""Warps of all programs of the Triton kernel on a multiprocessor. Enough loads are then under way to hide the latency
of memory. Not measured apart."""

_VARLEN_WAVES = 2
"""Parts per program that runs at a time, in mixed batches. One wave of whole parts leaves multiprocessors idle.
Measured: docs/LOG.md "Varlen in two waves"."""

_ROUND_PARTS = 16
"""Parts. Their number is rounded down to a multiple of this, so that batches of round sizes are cut less often.
Measured: docs/LOG.md "Parts of a round number"."""

_MOST_ROUNDED_OFF = 1 / 16
"""Share of the parts. Where rounding would drop more, the number stays as it is. Measured: docs/LOG.md "Parts rounded
less"."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """How the line of units is cut.

    num_parts       equal parts per KV head; a part belongs to a program of the Triton kernel, or to a warp or a cluster
                    of the CUDA kernel
    fixed_splits    0: cuts fall where the parts end; else a unit is cut by its own length, into at most this many
    fixed_tiles     smallest segment under fixed_splits, in KV tiles
    unit_overhead   what a unit costs besides its tiles, in KV tiles
    min_unit_tiles  least cost of a unit, in KV tiles, overhead included
    min_part_tiles  smallest part, in KV tiles; a shorter line is cut into fewer parts
    """

    num_parts: int
    fixed_splits: int = 0
    fixed_tiles: int = FIXED_TILES
    unit_overhead: int = 1
    min_unit_tiles: int = 1
    min_part_tiles: int = 1


def parts_of_programs(num_warps: int, num_kv_heads: int, num_sms: int) -> int:
    """Parts per KV head of a decode plan of the Triton kernel: one for each program that runs at a time."""
    return round_parts(max(1, _WARPS_PER_SM // num_warps) * num_sms // num_kv_heads)


def parts_of_varlen(num_warps: int, num_kv_heads: int, num_sms: int) -> int:
    """Parts per KV head of a plan for mixed batches."""
    return max(1, _VARLEN_WAVES * (_WARPS_PER_SM // num_warps) * num_sms // num_kv_heads)


def round_parts(parts: int) -> int:
    """`parts`, rounded down to a round number where that drops few of them."""
    parts = max(1, parts)
    rounded = parts // _ROUND_PARTS * _ROUND_PARTS
    return rounded if parts - rounded <= _MOST_ROUNDED_OFF * parts else parts
