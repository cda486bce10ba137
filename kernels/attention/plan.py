"""The plan of an attention call: the values that are fixed at capture, in four parts, and sizes derived from them.

`plan_shape.py` defines the padded and head sizes, `plan_schedule.py` the partitions, `plan_tile.py` the sizes of query
tiles and KV tiles, and `plan_native.py` the blocks of the CUDA kernel. `workspace.py` allocates scratch memory.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass, fields
from functools import cached_property

import torch

from graphrt.kernels.attention.attend import PARTITION_WORDS, SPLIT_WORDS
from graphrt.kernels.attention.plan_native import (
    NATIVE_MERGE_GROUP_SIZE,
    NativePlan,
    partition_per_warp,
    plan_for_native,
)
from graphrt.kernels.attention.plan_schedule import (
    FIXED_SPLITS,
    SchedulePlan,
    decode_partitions,
    varlen_partitions,
)
from graphrt.kernels.attention.plan_shape import MAX_QUERY_LEN, PlanShape, check_dtypes, check_num_sms
from graphrt.kernels.attention.plan_tile import MIN_BLOCK_M, TilePlan, decode_tile, varlen_tile
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.sizes import next_power_of_two

_MERGE_ELEMENTS_PER_WARP = 4096
"""float32 values of partial results that a merging warp of the Triton kernel keeps at a time, in 128 registers per
thread. Measured: docs/dev/log.md "Layout of the merge"; the number itself is not measured."""

_MIN_MERGE_GROUP_SIZE = 8
"""Smallest merge group of the Triton kernel, in partial results. Measured: docs/dev/log.md "Merging in two stages"."""


@dataclass(frozen=True)
class AttentionPlan:
    """The values of an attention call that are fixed at capture. Create a plan with `decode` or `varlen`.

    Derived values are cached properties, because every layer of a step reads them.

    shape      requests, tokens and heads
    schedule   the number of work partitions, and the cost of a query tile
    tile       sizes of query tiles, KV tiles, and programs of the Triton kernel
    native     blocks of the CUDA kernel; None: the Triton kernel runs
    """

    shape: PlanShape
    schedule: SchedulePlan
    tile: TilePlan
    native: NativePlan | None = None

    @classmethod
    def decode(
        cls,
        num_reqs: int,
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
        """Make a plan for decode requests with `query_len` new tokens each.

        head_dim         head size of Q and K, from 1 to MAX_HEAD_DIM
        v_head_dim       head size of V and the output; None: head_dim
        kv_dtype         dtype of the cache: `dtype`, or fp8; None: `dtype`
        num_sms          streaming multiprocessors of the device
        batch_invariant  split each request only by its own length, so that its result does not depend on other requests
        native           plan for the CUDA kernel if it supports the shape; requires a device for which `runs_native` is
                         true. The Triton kernel also gives correct results with such a plan, but is slower than with
                         its own plan

        Raises: ShapeError: if query_len is not from 1 to 16, num_reqs or num_sms is less than 1, num_q_heads is not a
        multiple of num_kv_heads, or a dtype is not supported. UnsupportedError: if head_dim or v_head_dim is not
        supported.
        """
        check_int("query_len", query_len, 1, MAX_QUERY_LEN, advice="use AttentionPlan.varlen", error=ShapeError)
        tokens = num_reqs * query_len
        shape = PlanShape.checked(num_reqs, tokens, query_len, num_q_heads, num_kv_heads, head_dim, v_head_dim)
        stored = check_dtypes(dtype, kv_dtype)
        check_num_sms(num_sms)
        tile = decode_tile(shape, dtype, stored, num_sms, batch_invariant)
        num_partitions = decode_partitions(tile.num_warps, num_kv_heads, num_sms)
        plan = cls(shape, SchedulePlan(num_partitions, FIXED_SPLITS if batch_invariant else 0), tile)
        if not native:
            return plan
        found = plan_for_native(shape, plan.schedule, tile, plan.num_q_tiles, dtype, stored, num_sms)
        return plan if found is None else cls(shape, *found)

    @classmethod
    def varlen(
        cls,
        num_reqs: int,
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
        """Make a plan for packed requests with any number of new tokens each, such as prompt chunks and decodes.

        num_tokens       tokens of q, including padding
        batch_invariant  do not split query tiles

        For the other arguments see `decode`.

        Raises: see `decode`, and ShapeError: if num_tokens is less than 1.
        """
        shape = PlanShape.checked(num_reqs, num_tokens, 0, num_q_heads, num_kv_heads, head_dim, v_head_dim)
        stored = check_dtypes(dtype, kv_dtype)
        check_num_sms(num_sms)
        tile = varlen_tile(shape, dtype, stored)
        num_partitions = varlen_partitions(tile.num_warps, num_kv_heads, num_sms)
        return cls(shape, SchedulePlan(num_partitions, 1 if batch_invariant else 0), tile)

    @cached_property
    def ints(self) -> list[int]:
        """All fields of the plan as one list, for operator arguments. The fields of `native` are omitted if `native` is
        None."""
        parts = (self.shape, self.schedule, self.tile, self.native)
        return [value for part in parts if part is not None for value in astuple(part)]

    @classmethod
    def from_ints(cls, values: list[int]) -> AttentionPlan:
        """Return the plan whose `ints` are `values`."""
        left = iter(values)
        shape, schedule, tile = (
            part(*itertools.islice(left, len(fields(part)))) for part in (PlanShape, SchedulePlan, TilePlan)
        )
        native = tuple(left)
        return cls(shape, schedule, tile, NativePlan(*native) if native else None)  # type: ignore[arg-type]

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.schedule, self.tile, self.native))

    def __hash__(self) -> int:
        return self._hash

    # The workers of a partition.

    @cached_property
    def partition_per_warp(self) -> bool:
        """Whether each warp of the CUDA kernel has its own partition; otherwise the warps of a cluster share a
        partition."""
        return self.native is not None and partition_per_warp(self.schedule, self.native)

    @cached_property
    def native_blocks(self) -> int:
        """Blocks of the CUDA kernel per KV head; 0 if the Triton kernel runs."""
        if self.native is None:
            return 0
        num_partitions = self.schedule.num_partitions
        return num_partitions // self.native.warps if self.partition_per_warp else num_partitions * self.native.cluster

    # The work list: partitions, KV splits, query tiles that see no KV.

    def masks_chunks(self, attention_chunk_size: int) -> bool:
        """Return whether a kernel must mask positions before the chunk.

        No mask is needed with one new token per request and chunks that start at KV tile boundaries, because the work
        list starts there too.
        """
        return attention_chunk_size > 0 and (self.shape.query_len != 1 or attention_chunk_size % self.tile.block_n > 0)

    @cached_property
    def num_q_tiles(self) -> int:
        """Query tiles per KV head, including those that see no KV."""
        shape, block_m = self.shape, self.tile.block_m
        if shape.query_len:
            return shape.num_reqs * -(-shape.queries_per_req // block_m)
        return -(-shape.num_tokens * shape.num_queries_per_kv // block_m) + shape.num_reqs + 1

    @cached_property
    def max_split_entries(self) -> int:
        """Maximum number of entries in the splits area of a step."""
        return self.num_q_tiles * max(self.schedule.fixed_splits, 1)

    @cached_property
    def splits_at(self) -> int:
        """Offset in the work list, in words, of the KV splits."""
        return (self.schedule.num_partitions + 1) * PARTITION_WORDS

    @cached_property
    def zeros_at(self) -> int:
        """Offset in the work list, in words, of the query tiles that see no KV."""
        return self.splits_at + self.max_split_entries * SPLIT_WORDS

    @cached_property
    def work_list_words(self) -> int:
        """int32 words of the work list."""
        return self.zeros_at + 3 * self.num_q_tiles

    # Partial results of query tiles with several KV splits.

    @cached_property
    def partial_m(self) -> int:
        """Queries per partial result."""
        if not self.shape.query_len:
            return self.tile.block_m
        return min(next_power_of_two(self.shape.queries_per_req), self.tile.block_m)

    @cached_property
    def max_partials(self) -> int:
        """Partial results in global memory per KV head; 0 if query tiles are never split.

        A partition has two partial results: one for a query tile that began in an earlier partition, and one for a
        query tile that continues in the next partition. With one partition per warp, only the Triton kernel uses them;
        blocks of the CUDA kernel send their partial results through the fix-up buffer instead.
        """
        fixed = self.schedule.fixed_splits
        if fixed:
            return self.num_q_tiles * fixed if fixed > 1 else 0
        return 2 * self.schedule.num_partitions

    @cached_property
    def partial_queries(self) -> int:
        """Queries in all partial results."""
        return self.max_partials * self.shape.num_kv_heads * self.partial_m

    @cached_property
    def partial_elements(self) -> int:
        """float32 sums in all partial results."""
        return self.partial_queries * self.shape.v_head_dim

    @cached_property
    def partial_lses(self) -> int:
        """Log-sum-exps of partial results. The CUDA kernel stores the log-sum-exps of merge groups separately."""
        return self.partial_queries * (2 if self.native is not None and not self.partition_per_warp else 1)

    @cached_property
    def num_counters(self) -> int:
        """int32 words of the arrival counters and the fix-up buffer.

        Each partial result has a counter for its merge group and one for its query tile, per block of a cluster.
        With one partition per warp, each block also has a partial result in the fix-up buffer: per query,
        v_head_dim sums, a reference maximum and a sum of weights.
        """
        cluster = 1 if self.native is None else self.native.cluster
        counters = 2 * self.max_partials * self.shape.num_kv_heads * cluster
        if not self.partition_per_warp:
            return counters
        queries = self.native_blocks * self.shape.num_kv_heads * self.shape.queries_per_req
        return counters + queries * (self.shape.v_head_dim + 2)

    @cached_property
    def merge_splits(self) -> int:
        """Partial results that a program of the Triton kernel loads at a time."""
        small = self.tile.block_m == MIN_BLOCK_M and self.tile.num_warps <= 4  # large query tiles need the registers
        per_warp = _MERGE_ELEMENTS_PER_WARP if small else _MERGE_ELEMENTS_PER_WARP // 4
        return max(1, min(32, per_warp * self.tile.num_warps // (self.partial_m * self.shape.block_v)))

    @cached_property
    def merge_group_size(self) -> int:
        """Partial results per merge group. With more partial results, first each group is merged, then the groups."""
        if self.native is not None:
            return NATIVE_MERGE_GROUP_SIZE
        return max(_MIN_MERGE_GROUP_SIZE, self.merge_splits)
