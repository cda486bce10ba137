"""Host constants of an attention call at one captured size: tile sizes, parts of the work list, scratch memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from graphrt.kernels.attention.arguments import ATTENTION_DTYPES, check_triton_head_dim, next_power_of_two
from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.native.nvrtc import MIN_SHARED_BYTES

MAX_QUERY_LEN = 16
"""Most new tokens per row of a decode plan."""

_MIN_BLOCK_M = 16  # query rows of a unit: what tensor cores take at least
_WARPS_PER_SM = 8  # programs of a resident wave, in warps: enough to keep the loads of the memory's latency in flight
_VARLEN_WAVES = 2
_FIXED_SPLITS = 16
_FIXED_TILES = 4
_FEW_SPLITS = 8  # parts per unit, of up to 4 query rows, up to which programs are of one warp
_MERGE_ELEMENTS_PER_WARP = 4096  # fp32 values of partial results that a merging warp holds at a time
_MIN_MERGE_GROUP = 8
_NATIVE_MAX_PACKED = 16  # query rows of a unit of the CUDA kernel, and their registers: rows in tiles of 8 x head_dim
_NATIVE_MAX_STATE = 320
_NATIVE_STAGES = 3  # tiles of a warp in flight or in use at most, and two
_NATIVE_TWO_STAGES = 64 << 10  # where the tiles of a multiprocessor's warps are as large as this together
_NATIVE_MANY_UNITS = 2  # units per multiprocessor from which on a plan is one of many rows
_STREAM_MIN_UNIT_TILES = 6  # tiles that a warp could read in the time that a unit of one tile takes
_CLUSTER_UNIT_BYTES = 28 << 10  # KV bytes that each warp of a part could read in the time that another unit takes all
_CLUSTER = 8
_CLUSTER_SHARE = 0.9  # of the multiprocessors: clusters do not fill those of every GPC
_CLUSTER_PART_TOKENS = 2048  # smallest part of a single row
_CLUSTER_MIN_PARTS = 32
_CHEAP_MERGE_ROWS = 4
_SHARED_BYTES = MIN_SHARED_BYTES  # of a block; of a multiprocessor it is 1 KB more per block
_STATIC_SHARED_BYTES = 256
_MAX_NATIVE_MERGE_GROUP = 16
_ROUND_PARTS = 16  # parts are a multiple of this, so that batches of round sizes need fewer splits,
_MOST_ROUNDED_OFF = 1 / 16  # unless more multiprocessors than this were idle


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything about an attention call that is fixed at capture. Make it with `decode` or `varlen`.

    query_len      new tokens per row; 0: any number, given by query_start_loc
    num_parts      equal parts of the work list per KV head: of a program, or of a warp or cluster of the CUDA kernel
    fixed_splits   0: parts cut units where they must; else units are cut by their own length, into at most this many
    fixed_tiles    smallest split of a unit under fixed_splits, in KV tiles
    unit_overhead  what another unit costs a part, in KV tiles
    min_unit_tiles least cost of a unit, in KV tiles, that of its overhead included
    min_part_tiles smallest part, in KV tiles: shorter batches are cut into fewer
    native_warps   warps per block of the CUDA kernel; 0: the Triton kernel runs
    cluster        blocks of the CUDA kernel that work on a part together
    blocks_per_sm  blocks of it that share a multiprocessor
    """

    num_rows: int
    num_tokens: int
    query_len: int
    group: int
    num_kv_heads: int
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_parts: int
    fixed_splits: int
    fixed_tiles: int
    unit_overhead: int
    min_unit_tiles: int
    min_part_tiles: int
    native_warps: int = 0
    cluster: int = 1
    blocks_per_sm: int = 1

    @classmethod
    def decode(
        cls,
        num_rows: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        num_sms: int,
        query_len: int = 1,
        batch_invariant: bool = False,
        native: bool = False,
    ) -> AttentionPlan:
        """Plan of decode rows with `query_len` new tokens each.

        kv_dtype         dtype of the cache: `dtype`, or fp8; None: `dtype`
        num_sms          streaming multiprocessors of the device
        batch_invariant  rows are split by their own length alone, so that no row's result depends on another's
        native           for the CUDA kernel where it serves the shape, on devices that `runs_native` names; the Triton
                         kernel gives the right results by such a plan too, but in parts that were not made for it

        Raises: ShapeError for query_len outside 1 to 16, no rows, heads that do not divide, dtypes that are not served
        or no multiprocessors; UnsupportedError (head_dim).
        """
        _check_sizes(num_rows, num_rows, num_q_heads, num_kv_heads)
        _check_kernel(head_dim, dtype, kv_dtype, num_sms)
        if not 1 <= query_len <= MAX_QUERY_LEN:
            raise ShapeError(f"query_len: expected 1 to {MAX_QUERY_LEN}, got {query_len}; use AttentionPlan.varlen")
        group = num_q_heads // num_kv_heads
        packed = query_len * group
        block_m = max(_MIN_BLOCK_M, min(_max_block_m(head_dim, dtype), next_power_of_two(packed)))
        num_units = num_rows * -(-packed // block_m)
        block_d = next_power_of_two(head_dim)
        num_stages = 3
        if dtype == torch.float32:
            num_warps, block_n = _float32_tile(block_d)
        elif block_m > _MIN_BLOCK_M or block_d > 128:
            num_warps = 8 if block_m * block_d >= 8192 else 4
            block_n = 64 if block_d <= 128 else 32
        else:
            # Programs of one warp stream best; but with few rows each is split many times, and merging wants warps.
            merge_cost = max(1, next_power_of_two(packed) // 4) * _num_parts(1, num_kv_heads, num_sms)
            narrow = num_units * _FEW_SPLITS >= merge_cost and not batch_invariant
            num_warps = 1 if narrow else 4
            block_n = 16 * num_warps * max(1, 128 // block_d)
            if (kv_dtype or dtype).itemsize == 1:
                num_stages = 5 if narrow else 4
        plan = cls(
            num_rows=num_rows,
            num_tokens=num_rows * query_len,
            query_len=query_len,
            group=group,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            num_parts=_num_parts(num_warps, num_kv_heads, num_sms),
            fixed_splits=_FIXED_SPLITS if batch_invariant else 0,
            fixed_tiles=_FIXED_TILES,
            unit_overhead=1,
            min_unit_tiles=1,
            min_part_tiles=1,
        )
        return plan._for_native(dtype, kv_dtype or dtype, num_sms) if native else plan

    def _for_native(self, dtype: torch.dtype, kv_dtype: torch.dtype, num_sms: int) -> AttentionPlan:
        """The plan with tiles and parts of the CUDA kernel, or as it is where that does not serve the shape."""
        packed = self.query_len * self.group
        state = -(-packed // 8) * self.head_dim
        if dtype.itemsize != 2 or packed > _NATIVE_MAX_PACKED or state > _NATIVE_MAX_STATE:
            return self
        if self.head_dim % native_tile(kv_dtype):
            return self
        cluster, parts_of_cluster = _cluster(self, num_sms)
        shapes = [(8, 1), (4, 1)]
        many = self.num_units >= _NATIVE_MANY_UNITS * (num_sms // self.num_kv_heads)
        if many and self.head_dim <= 64 and packed <= 8:
            shapes.insert(0, (8, 2))  # tiles are small: one block would wait for memory
        size = functools.partial(native_shared_bytes, self.head_dim, packed, kv_dtype, cluster=cluster)
        shape = _block_shape(shapes, native_tile_bytes(self.head_dim, kv_dtype), size)
        if shape is None:
            return self
        warps, blocks, stages = shape
        blocks_per_head = parts_of_cluster or _round_parts(blocks * num_sms // self.num_kv_heads)
        plan = replace(self, num_stages=stages, native_warps=warps, cluster=cluster, blocks_per_sm=blocks)
        if plan.parts_are_warps:
            return replace(
                plan,
                block_n=native_tile(kv_dtype),
                num_warps=1 if self.block_d <= 128 else 4,
                num_parts=warps * blocks_per_head,
                unit_overhead=0,
                min_unit_tiles=_STREAM_MIN_UNIT_TILES,
            )
        block_n = 64 if self.block_d <= 128 else 32
        part_bytes = 2 * block_n * self.head_dim * kv_dtype.itemsize
        return replace(
            plan,
            block_n=block_n,
            num_warps=4,
            num_parts=blocks_per_head,
            unit_overhead=max(1, round(warps * _CLUSTER_UNIT_BYTES / part_bytes)),
            min_part_tiles=_CLUSTER_PART_TOKENS // block_n if cluster > 1 and self.num_units == 1 else 1,
        )

    @classmethod
    def varlen(
        cls,
        num_rows: int,
        num_tokens: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        num_sms: int,
        batch_invariant: bool = False,
    ) -> AttentionPlan:
        """Plan of packed rows with any number of new tokens each: prompt chunks, and decodes among them.

        num_tokens       tokens of q, pad tokens included
        batch_invariant  units are not split at all

        The other arguments are those of `decode`.

        Raises: as `decode`, and ShapeError for no tokens.
        """
        _check_sizes(num_rows, num_tokens, num_q_heads, num_kv_heads)
        _check_kernel(head_dim, dtype, kv_dtype, num_sms)
        block_d = next_power_of_two(head_dim)
        block_m = _max_block_m(head_dim, dtype)
        num_warps, block_n = _float32_tile(block_d) if dtype == torch.float32 else (8, 64 if block_d <= 128 else 32)
        if dtype.itemsize == 2 and block_d <= 128 and (kv_dtype or dtype).itemsize == 2:
            block_m = 128
        return cls(
            num_rows=num_rows,
            num_tokens=num_tokens,
            query_len=0,
            group=num_q_heads // num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=3,
            # Two waves leave no multiprocessor idle where one of whole parts would, and even out.
            num_parts=max(1, _VARLEN_WAVES * (_WARPS_PER_SM // num_warps) * num_sms // num_kv_heads),
            fixed_splits=1 if batch_invariant else 0,
            fixed_tiles=_FIXED_TILES,
            unit_overhead=1,
            min_unit_tiles=1,
            min_part_tiles=1,
        )

    def to_list(self) -> list[int]:
        """The fields in order, as an operator takes them."""
        return [getattr(self, field) for field in self.__slots__]

    @property
    def parts_are_warps(self) -> bool:
        """Whether each warp of the CUDA kernel has a part of its own, and not all warps of a cluster one together."""
        return self.native_warps > 0 and self.cluster == 1 and not self.fixed_splits

    @property
    def native_blocks(self) -> int:
        """Blocks of the CUDA kernel per KV head."""
        return self.num_parts // self.native_warps if self.parts_are_warps else self.num_parts * self.cluster

    @property
    def num_units(self) -> int:
        """Tiles of query rows, empty ones included."""
        if self.query_len:
            return self.num_rows * -(-self.query_len * self.group // self.block_m)
        return -(-self.num_tokens * self.group // self.block_m) + self.num_rows + 1

    @property
    def max_segments(self) -> int:
        """Most entries of the segments' area that a step can have."""
        return self.num_units * max(self.fixed_splits, 1)

    @property
    def segments_at(self) -> int:
        """Where the segments begin in the work list, in words."""
        return (self.num_parts + 1) * PART_WORDS

    @property
    def zeros_at(self) -> int:
        """Where the units of zeros begin in the work list, in words."""
        return self.segments_at + self.max_segments * SEGMENT_WORDS

    @property
    def work_list_words(self) -> int:
        """int32 words of the work list."""
        return self.zeros_at + 3 * self.num_units

    @property
    def block_d(self) -> int:
        """head_dim, rounded up to a power of two."""
        return next_power_of_two(self.head_dim)

    @property
    def partial_m(self) -> int:
        """Query rows of a partial result."""
        return min(next_power_of_two(self.query_len * self.group), self.block_m) if self.query_len else self.block_m

    @property
    def merge_splits(self) -> int:
        """Partial results that are merged at a time."""
        small = self.block_m == _MIN_BLOCK_M and self.num_warps <= 4  # else the tile itself needs the registers
        per_warp = _MERGE_ELEMENTS_PER_WARP if small else _MERGE_ELEMENTS_PER_WARP // 4
        return max(1, min(32, per_warp * self.num_warps // (self.partial_m * self.block_d)))

    @property
    def merge_group(self) -> int:
        """Partial results that are merged in a first stage, where a unit has more."""
        if self.native_warps:
            return _MAX_NATIVE_MERGE_GROUP
        return max(_MIN_MERGE_GROUP, self.merge_splits)

    @property
    def num_slots(self) -> int:
        """Places for partial results, per KV head. Units that are never split need none.

        The Triton kernel needs them where parts are warps; the CUDA kernel's blocks then send letters instead.
        """
        if self.fixed_splits:
            return self.num_units * self.fixed_splits if self.fixed_splits > 1 else 0
        return 2 * self.num_parts

    @property
    def partial_rows(self) -> int:
        """Query rows of all partial results."""
        return self.num_slots * self.num_kv_heads * self.partial_m

    @property
    def partial_lses(self) -> int:
        """Log-sum-exps of partial results; the CUDA kernel keeps those of merged groups apart."""
        return self.partial_rows * (2 if self.native_warps and not self.parts_are_warps else 1)

    @property
    def num_counters(self) -> int:
        """Arrival counters: for each slot one of the group that begins there, and one of the unit; for each block. And
        the words of the letters that blocks of the CUDA kernel send each other where parts are warps."""
        counters = 2 * self.num_slots * self.num_kv_heads * self.cluster
        if not self.parts_are_warps:
            return counters
        rows = self.native_blocks * self.num_kv_heads * self.query_len * self.group
        return counters + rows * (self.head_dim + 2)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Scratch memory of attention calls, shared by all layers and graphs that run one after another.

    Calls that run at a time need one each: they would take each other's words, and one that waits in vain traps after
    some ten seconds, as does one by the work list of another plan.

    partial_out   [*] float32  partial results of split units; contents matter within one call only
    partial_lse   [*] float32  their log-sum-exp in units of log 2
    counters      [*] int32    arrivals per split unit, and letters between blocks; 0 between calls, which the kernels
                               themselves restore, unless a launch was aborted
    """

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(cls, plans: Iterable[AttentionPlan], device: torch.device) -> AttentionWorkspace:
        """A workspace that serves each of the plans. Raises: ShapeError without any."""
        if isinstance(plans, AttentionPlan):
            raise ShapeError("plans: expected a list of plans, got an AttentionPlan; pass [plan]")
        plans = list(plans)
        if not plans:
            raise ShapeError("plans: expected at least one, got none; pass the plans of all sizes")
        out_size = max(plan.partial_rows * plan.head_dim for plan in plans)
        lse_size = max(plan.partial_lses for plan in plans)
        counters = max(plan.num_counters for plan in plans)
        return cls(
            torch.zeros(max(out_size, 1), dtype=torch.float32, device=device),
            torch.zeros(max(lse_size, 1), dtype=torch.float32, device=device),
            torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
        )


def _num_parts(num_warps: int, num_kv_heads: int, num_sms: int) -> int:
    return _round_parts(max(1, _WARPS_PER_SM // num_warps) * num_sms // num_kv_heads)


def _round_parts(parts: int) -> int:
    parts = max(1, parts)
    rounded = parts // _ROUND_PARTS * _ROUND_PARTS
    return rounded if parts - rounded <= _MOST_ROUNDED_OFF * parts else parts


def native_tile(kv_dtype: torch.dtype) -> int:
    """Tokens of a tile of the CUDA kernel, and what it needs head_dim to be a multiple of."""
    return 16 if kv_dtype.itemsize == 2 else 32


def native_tile_bytes(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Keys and values of a tile."""
    return 2 * native_tile(kv_dtype) * head_dim * kv_dtype.itemsize


def native_shared_bytes(
    head_dim: int, packed: int, kv_dtype: torch.dtype, warps: int, stages: int, cluster: int
) -> int:
    """Dynamic shared memory of a block of the CUDA kernel: tiles, partial results, what a cluster exchanges.

    packed   query rows of a unit
    """
    partial_bytes = 4 * packed * (head_dim + 6)
    inbox_bytes = 16 * (-(-packed * head_dim // 2 // cluster) + packed) * cluster + 16 if cluster > 1 else 0
    return warps * (stages * native_tile_bytes(head_dim, kv_dtype) + partial_bytes) + inbox_bytes


def _block_shape(
    shapes: list[tuple[int, int]], tile_bytes: int, size: Callable[[int, int], int]
) -> tuple[int, int, int] | None:
    """The first of `shapes`, pairs of warps per block and blocks per multiprocessor, with room for two stages, and how
    many stages it takes."""
    for warps, blocks in shapes:
        room = (_SHARED_BYTES + 1024) // blocks - 1024 - _STATIC_SHARED_BYTES
        most = 2 if warps * blocks * tile_bytes >= _NATIVE_TWO_STAGES else _NATIVE_STAGES
        stages = [n for n in range(2, most + 1) if size(warps, n) <= room]
        if stages:
            return warps, blocks, stages[-1]
    return None


def _cluster(plan: AttentionPlan, num_sms: int) -> tuple[int, int]:
    """Blocks of a cluster, and how many clusters there are per KV head; (1, 0): no clusters.

    A single row is merged within a cluster, without a way through global memory; half of the multiprocessors suffice to
    read at full speed. Several rows take clusters of two where parts are many and a merge is dear: where that leaves no
    unit split or halves many splits. In between, and with few parts, more parts of one block were faster.
    """
    if plan.fixed_splits:
        return 1, 0
    parts = _round_parts(num_sms // plan.num_kv_heads)
    if plan.num_units > 1:
        dear = plan.query_len * plan.group > _CHEAP_MERGE_ROWS and parts >= _CLUSTER_MIN_PARTS
        helps = 8 * plan.num_units < parts or parts < 4 * plan.num_units <= 2 * parts
        return (2, parts // 2) if dear and helps else (1, 0)
    cluster = _CLUSTER
    while cluster > 1 and cluster * plan.num_kv_heads > _CLUSTER_SHARE * num_sms:
        cluster //= 2
    return (cluster, max(1, num_sms // 2 // (cluster * plan.num_kv_heads))) if cluster > 1 else (1, 0)


def _max_block_m(head_dim: int, dtype: torch.dtype) -> int:
    """Most query rows of a unit that fit the registers."""
    if dtype == torch.float32:
        return _MIN_BLOCK_M
    return 64 if head_dim <= 128 else 32


def _float32_tile(block_d: int) -> tuple[int, int]:
    """Warps and BLOCK_N: fp32 products run without tensor cores and hold their operands in registers."""
    return (4, 32) if block_d <= 64 else (8, 16)


def _check_sizes(num_rows: int, num_tokens: int, num_q_heads: int, num_kv_heads: int) -> None:
    if num_rows < 1 or num_tokens < 1:
        raise ShapeError(f"plan: expected at least 1 row and 1 token, got {num_rows} and {num_tokens}; pad the batch")
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ShapeError(
            f"num_q_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_q_heads}; "
            "each KV head serves equally many query heads"
        )


def _check_kernel(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, num_sms: int) -> None:
    check_triton_head_dim("plan", head_dim)
    if dtype not in ATTENTION_DTYPES:
        raise ShapeError(f"dtype: expected one of {ATTENTION_DTYPES}, got {dtype}; convert q with .to()")
    if kv_dtype not in (None, dtype, *FP8_DTYPES):
        raise ShapeError(
            f"kv_dtype: expected {dtype} as the queries, or one of {FP8_DTYPES}, got {kv_dtype}; fill such a cache"
        )
    check_int("num_sms", num_sms, 1, advice="pass the device's multi_processor_count", error=ShapeError)
