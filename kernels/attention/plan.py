"""What is fixed when an attention call is captured: a plan of four parts, and what follows from it.

`plan_shape.py` says what is attended to, `plan_schedule.py` how the work is cut, `plan_tile.py` how large units and
tiles are, `plan_native.py` what blocks of the CUDA kernel there are. `workspace.py` allocates the scratch memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS
from graphrt.kernels.attention.plan_native import NATIVE_MERGE_BUNDLE, NativePlan, parts_are_warps, plan_for_native
from graphrt.kernels.attention.plan_schedule import (
    FIXED_SPLITS,
    SchedulePlan,
    parts_of_programs,
    parts_of_varlen,
)
from graphrt.kernels.attention.plan_shape import MAX_QUERY_LEN, PlanShape, check_dtypes, check_num_sms
from graphrt.kernels.attention.plan_tile import MIN_BLOCK_M, TilePlan, decode_tile, varlen_tile
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.sizes import next_power_of_two

_MERGE_ELEMENTS_PER_WARP = 4096
"""float32 values of partial results that a merging warp of the Triton kernel holds at a time, in 128 registers per
thread. Measured: docs/LOG.md "Layout of the merge"; the number itself is not measured."""

_MIN_MERGE_BUNDLE = 8
"""Partial results. The Triton kernel merges units of more in bundles of at least this many. Measured: docs/LOG.md
"Merging in two stages"."""


@dataclass(frozen=True)
class AttentionPlan:
    """Everything about an attention call that is fixed at capture. Make it with `decode` or `varlen`.

    Every layer of a step asks for what follows from its plan, which is reckoned once.

    shape      rows, tokens and heads
    schedule   into how many parts the work is cut, and what a unit costs
    tile       sizes of units and KV tiles, and a program of the Triton kernel
    native     blocks of the CUDA kernel; None: the Triton kernel runs
    """

    shape: PlanShape
    schedule: SchedulePlan
    tile: TilePlan
    native: NativePlan | None = None

    @classmethod
    def decode(
        cls,
        num_rows: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        num_sms: int,
        query_len: int = 1,
        batch_invariant: bool = False,
        native: bool = False,
    ) -> AttentionPlan:
        """Plan of decode rows with `query_len` new tokens each.

        head_dim         size of the heads of Q and K, from 1 to MAX_HEAD_DIM
        v_head_dim       size of the heads of V and of the output; None: head_dim
        kv_dtype         dtype of the cache: `dtype`, or fp8; None: `dtype`
        num_sms          streaming multiprocessors of the device
        batch_invariant  rows are cut by their own length alone, so that no row's result depends on another's
        native           plan for the CUDA kernel where it serves the shape, on devices that `runs_native` names; the
                         Triton kernel gives right results by such a plan too, but is slower than by its own

        Raises: ShapeError for query_len outside 1 to 16, no rows, heads that do not divide, dtypes that are not served
        or no multiprocessors; UnsupportedError (head_dim, v_head_dim).
        """
        check_int("query_len", query_len, 1, MAX_QUERY_LEN, advice="use AttentionPlan.varlen", error=ShapeError)
        tokens = num_rows * query_len
        shape = PlanShape.checked(num_rows, tokens, query_len, num_q_heads, num_kv_heads, head_dim, v_head_dim)
        stored = check_dtypes(dtype, kv_dtype)
        check_num_sms(num_sms)
        tile = decode_tile(shape, dtype, stored, num_sms, batch_invariant)
        num_parts = parts_of_programs(tile.num_warps, num_kv_heads, num_sms)
        plan = cls(shape, SchedulePlan(num_parts, FIXED_SPLITS if batch_invariant else 0), tile)
        if not native:
            return plan
        found = plan_for_native(shape, plan.schedule, tile, plan.num_units, dtype, stored, num_sms)
        return plan if found is None else cls(shape, *found)

    @classmethod
    def varlen(
        cls,
        num_rows: int,
        num_tokens: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        num_sms: int,
        batch_invariant: bool = False,
    ) -> AttentionPlan:
        """Plan of packed rows with any number of new tokens each: prompt chunks, and decodes among them.

        num_tokens       tokens of q, pad tokens included
        batch_invariant  units are not cut at all

        The other arguments are those of `decode`.

        Raises: as `decode`, and ShapeError for no tokens.
        """
        shape = PlanShape.checked(num_rows, num_tokens, 0, num_q_heads, num_kv_heads, head_dim, v_head_dim)
        stored = check_dtypes(dtype, kv_dtype)
        check_num_sms(num_sms)
        tile = varlen_tile(shape, dtype, stored)
        num_parts = parts_of_varlen(tile.num_warps, num_kv_heads, num_sms)
        return cls(shape, SchedulePlan(num_parts, 1 if batch_invariant else 0), tile)

    @cached_property
    def ints(self) -> list[int]:
        """All fields of the plan as one list, as an operator takes them; those of `native` are missing without it."""
        return [*_SHAPE(self.shape), *_SCHEDULE(self.schedule), *_TILE(self.tile), *(_native_ints(self.native))]

    @classmethod
    def from_ints(cls, values: list[int]) -> AttentionPlan:
        """The plan whose `ints` these are."""
        schedule_at = len(fields(PlanShape))
        tile_at = schedule_at + len(fields(SchedulePlan))
        native_at = tile_at + len(fields(TilePlan))
        return cls(
            PlanShape(*values[:schedule_at]),
            SchedulePlan(*values[schedule_at:tile_at]),
            TilePlan(*values[tile_at:native_at]),
            NativePlan(*values[native_at:]) if len(values) > native_at else None,
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.schedule, self.tile, self.native))

    def __hash__(self) -> int:
        return self._hash

    # Who works on a part.

    @cached_property
    def parts_are_warps(self) -> bool:
        """Whether each warp of the CUDA kernel has a part of its own, and not all warps of a cluster one together."""
        return self.native is not None and parts_are_warps(self.schedule, self.native)

    @cached_property
    def native_blocks(self) -> int:
        """Blocks of the CUDA kernel per KV head; 0 where the Triton kernel runs."""
        if self.native is None:
            return 0
        num_parts = self.schedule.num_parts
        return num_parts // self.native.warps if self.parts_are_warps else num_parts * self.native.cluster

    # The work list: parts, then segments, then units that see nothing.

    def masks_chunks(self, attention_chunk_size: int) -> bool:
        """Whether a kernel must mask what lies before a chunk.

        It need not where each row has one new token and chunks begin where tiles do: the work list begins there, too.
        """
        return attention_chunk_size > 0 and (self.shape.query_len != 1 or attention_chunk_size % self.tile.block_n > 0)

    @cached_property
    def num_units(self) -> int:
        """Units per KV head, empty ones included."""
        shape, block_m = self.shape, self.tile.block_m
        if shape.query_len:
            return shape.num_rows * -(-shape.queries_of_row // block_m)
        return -(-shape.num_tokens * shape.group // block_m) + shape.num_rows + 1

    @cached_property
    def max_segments(self) -> int:
        """Most entries of the segments' area that a step can have."""
        return self.num_units * max(self.schedule.fixed_splits, 1)

    @cached_property
    def segments_at(self) -> int:
        """Where the segments begin in the work list, in words."""
        return (self.schedule.num_parts + 1) * PART_WORDS

    @cached_property
    def zeros_at(self) -> int:
        """Where the units that see nothing begin in the work list, in words."""
        return self.segments_at + self.max_segments * SEGMENT_WORDS

    @cached_property
    def work_list_words(self) -> int:
        """int32 words of the work list."""
        return self.zeros_at + 3 * self.num_units

    # Partial results: what segments leave of a unit that is cut.

    @cached_property
    def partial_m(self) -> int:
        """Queries of a partial result."""
        if not self.shape.query_len:
            return self.tile.block_m
        return min(next_power_of_two(self.shape.queries_of_row), self.tile.block_m)

    @cached_property
    def num_places(self) -> int:
        """Places for partial results in global memory, per KV head. Units that are never cut need none.

        A part has two: of a unit that began before it, and of a unit that goes on behind it. Where parts are warps the
        Triton kernel alone uses them; blocks of the CUDA kernel send letters instead.
        """
        fixed = self.schedule.fixed_splits
        if fixed:
            return self.num_units * fixed if fixed > 1 else 0
        return 2 * self.schedule.num_parts

    @cached_property
    def partial_queries(self) -> int:
        """Queries of all partial results."""
        return self.num_places * self.shape.num_kv_heads * self.partial_m

    @cached_property
    def partial_elements(self) -> int:
        """float32 sums of all partial results."""
        return self.partial_queries * self.shape.v_head_dim

    @cached_property
    def partial_lses(self) -> int:
        """Log-sum-exps of partial results. The CUDA kernel keeps those of merged bundles apart."""
        return self.partial_queries * (2 if self.native is not None and not self.parts_are_warps else 1)

    @cached_property
    def num_counters(self) -> int:
        """int32 words of arrival counters and letters.

        Each place has a counter of the bundle that begins there and one of the unit, for each block of a cluster. Where
        parts are warps, each block has a letter besides: per query v_head_dim sums, a reference point and a sum of
        weights.
        """
        cluster = 1 if self.native is None else self.native.cluster
        counters = 2 * self.num_places * self.shape.num_kv_heads * cluster
        if not self.parts_are_warps:
            return counters
        queries = self.native_blocks * self.shape.num_kv_heads * self.shape.queries_of_row
        return counters + queries * (self.shape.v_head_dim + 2)

    @cached_property
    def merge_splits(self) -> int:
        """Partial results that a program of the Triton kernel reads at a time."""
        small = self.tile.block_m == MIN_BLOCK_M and self.tile.num_warps <= 4  # a large unit needs the registers itself
        per_warp = _MERGE_ELEMENTS_PER_WARP if small else _MERGE_ELEMENTS_PER_WARP // 4
        return max(1, min(32, per_warp * self.tile.num_warps // (self.partial_m * self.shape.block_v)))

    @cached_property
    def merge_bundle(self) -> int:
        """Partial results of a bundle. A unit with more is merged on two levels: bundles, then their results."""
        if self.native is not None:
            return NATIVE_MERGE_BUNDLE
        return max(_MIN_MERGE_BUNDLE, self.merge_splits)


_SHAPE, _SCHEDULE, _TILE, _NATIVE = (
    operator.attrgetter(*(field.name for field in fields(part)))
    for part in (PlanShape, SchedulePlan, TilePlan, NativePlan)
)


def _native_ints(native: NativePlan | None) -> tuple[int, ...]:
    found: tuple[int, ...] = () if native is None else _NATIVE(native)
    return found
