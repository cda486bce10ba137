"""The attention schedule, made on the device from `seq_lens`: a work list that all layers of one window share.

A unit is a tile of BLOCK_M query rows of one row. The units that see any KV tile form a line: each has as many places
as it sees tiles, behind a gap of `unit_overhead` places for what a second segment costs a part, or a longer one that
makes `min_unit_tiles` of both; the line begins behind the first `unit_overhead`. It is cut into equal parts, the last
one being shorter: `num_parts`, or as many as leave each `min_part_tiles`. Where a cut falls into a unit, the unit is
split there. With fixed splits a unit is cut by its own length alone, and the parts take whole segments, so that a row's
result does not depend on its neighbours.

The list is int32, three areas one after another:

    parts      [num_parts + 1, 16]   0: first segment, 1: first unit of zeros, 8..15: a copy of the first segment; the
                                     last entry holds the ends
    segments   [max_segments, 8]     row, first query row, tile begin, tile end, seq_len, query start, query_len,
                                     number of splits of the unit | index of this one << 16
    zeros      [units, 3]            units that see nothing: query start, first query row, number of query rows, which
                                     is negative for pad tokens
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.attention.arguments import next_power_of_two
from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list_reference import work_list_reference
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.library import define_op

_MAX_PROGRAMS = 64  # of one part each, before they take several
_MAX_PART_BLOCK = 4  # and that many, before there are more programs
_MIN_UNIT_BLOCK, _MAX_UNIT_BLOCK = 32, 512
_MANY_UNITS = 256  # units of a block from which on 8 warps are faster than 4

_PART_WORDS = tl.constexpr(PART_WORDS)
_SEGMENT_WORDS = tl.constexpr(SEGMENT_WORDS)


@triton.jit
def _units(
    unit,
    num_units,
    seq_lens_ptr,
    query_start_loc_ptr,
    num_rows,
    num_tokens,
    sliding_window,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEQ_LENS_ARE_STARTS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """What the units are: row, first query row, number of query rows, seq_len, query start, query_len, first tile and
    number of tiles, all int32 of the shape of `unit`. Units behind the last one have no query rows."""
    if QUERY_LEN > 0:
        TILES: tl.constexpr = (QUERY_LEN * GROUP + BLOCK_M - 1) // BLOCK_M
        row = unit // TILES
        first_row = unit % TILES * BLOCK_M
        query_start = row * QUERY_LEN
        query_len = tl.where(unit < num_units, QUERY_LEN, 0)
    else:
        # Row r starts at unit query_start_loc[r] * GROUP // BLOCK_M + r; a virtual last row takes the pad tokens.
        low = unit * 0
        high = low + num_rows
        for _ in range(SEARCH_STEPS):
            middle = (low + high + 1) // 2
            begins = tl.load(query_start_loc_ptr + middle) * GROUP // BLOCK_M + middle
            low = tl.where(begins <= unit, middle, low)
            high = tl.where(begins <= unit, high, tl.maximum(middle - 1, low))
        row = low
        query_start = tl.load(query_start_loc_ptr + row)
        query_end = tl.load(query_start_loc_ptr + row + 1, mask=row < num_rows, other=0)
        query_end = tl.where(row < num_rows, query_end, num_tokens)
        first_row = (unit - query_start * GROUP // BLOCK_M - row) * BLOCK_M
        query_len = tl.where(unit < num_units, query_end - query_start, 0)
    is_row = (row < num_rows) & (unit < num_units)
    seq_len = tl.load(seq_lens_ptr + row, mask=is_row, other=0)
    if SEQ_LENS_ARE_STARTS:
        seq_len = tl.load(seq_lens_ptr + row + 1, mask=is_row, other=0) - seq_len
    count = tl.minimum(tl.maximum(query_len * GROUP - first_row, 0), BLOCK_M)
    kv_end = seq_len
    if CAUSAL:
        kv_end = tl.minimum(kv_end, seq_len - query_len + (first_row + count - 1) // GROUP + 1)
    kv_end = tl.where(count > 0, tl.maximum(kv_end, 0), 0)
    first_tile = tl.maximum(seq_len - query_len + first_row // GROUP + 1 - sliding_window, 0) // BLOCK_N
    first_tile = tl.where(sliding_window > 0, first_tile, 0)
    tiles = tl.maximum((kv_end + BLOCK_N - 1) // BLOCK_N - first_tile, 0)
    return row, first_row, count, seq_len, query_start, query_len, first_tile, tiles


@triton.jit
def _quotient(n, divisor):
    """n // divisor of int32 that are not negative, in fewer steps than of those that may be; else not to be used."""
    return (n.to(tl.uint32) // divisor.to(tl.uint32)).to(tl.int32)


@triton.jit
def _num_splits(start, tiles, part_size, FIXED_SPLITS: tl.constexpr, FIXED_TILES: tl.constexpr):
    """Segments of units: [1, ...] where there are tiles. `start` is where the unit lies on the line of costs."""
    if FIXED_SPLITS > 0:
        splits = tl.minimum((tiles + FIXED_TILES - 1) // FIXED_TILES, FIXED_SPLITS)
    else:
        splits = 1 + _quotient(start + tiles - 1, part_size) - _quotient(start, part_size)
    return tl.where(tiles > 0, splits, 0)


@triton.jit
def _segment_tiles(split, splits, start, tiles, part_size, FIXED_SPLITS: tl.constexpr):
    """First and last tile + 1 of segment `split` of a unit, relative to the unit's first tile."""
    if FIXED_SPLITS > 0:
        divisor = tl.maximum(splits, 1)
        begin = _quotient(split * tiles, divisor)
        end = _quotient((split + 1) * tiles, divisor)
    else:
        part = _quotient(start, part_size) + split
        begin = tl.maximum(part * part_size - start, 0)
        end = tl.minimum((part + 1) * part_size - start, tiles)
    return begin, end


@triton.jit
def _store_segment(ptrs, mask, row, first_row, begin, end, seq_len, query_start, query_len, splits, split):
    tl.store(ptrs, row, mask=mask)
    tl.store(ptrs + 1, first_row, mask=mask)
    tl.store(ptrs + 2, begin, mask=mask)
    tl.store(ptrs + 3, end, mask=mask)
    tl.store(ptrs + 4, seq_len, mask=mask)
    tl.store(ptrs + 5, query_start, mask=mask)
    tl.store(ptrs + 6, query_len, mask=mask)
    tl.store(ptrs + 7, splits | (split << 16), mask=mask)


@triton.jit
def _cost(tiles, overhead, min_unit_tiles):
    """Places of a unit on the line, gap included."""
    return tl.where(tiles > 0, tl.maximum(tiles + overhead, min_unit_tiles), 0)


@triton.jit
def _totals(count, tiles, overhead, min_unit_tiles):
    """Costs of a block of units, and how many have query rows but see nothing."""
    is_zero = (count > 0) & (tiles == 0)
    return tl.sum(_cost(tiles, overhead, min_unit_tiles), 0), tl.sum(is_zero.to(tl.int32), 0)


@triton.jit
def _place_block(
    work_list_ptr,
    segments_at,
    zeros_at,
    unit,
    row,
    first_row,
    count,
    seq_len,
    query_start,
    query_len,
    first_tile,
    tiles,
    cut,
    part_unit,
    part_start,
    part_segment,
    start_of_block,
    segment_of_block,
    zero_of_block,
    num_rows,
    num_units,
    num_zeros,
    overhead,
    min_unit_tiles,
    part_size,
    FIXED_SPLITS: tl.constexpr,
    FIXED_TILES: tl.constexpr,
):
    """Place a block of units on the line of costs: find the units that the cuts of this program's parts fall into, and
    write this program's share of the first segments, or of all under fixed splits, and of the zeros. Returns what the
    parts know so far, and the costs, segments and zeros up to the end of the block."""
    cost = _cost(tiles, overhead, min_unit_tiles)
    unit_end = start_of_block + tl.cumsum(cost, 0)
    start = unit_end - tiles
    splits = _num_splits(start, tiles, part_size, FIXED_SPLITS, FIXED_TILES)
    segment = segment_of_block + tl.cumsum(splits, 0) - splits
    # A cut in a gap belongs to the next unit that sees anything; those between that see nothing are behind it.
    before = unit_end[None, :] <= cut[:, None]
    packed = splits << 16 | (unit < num_units).to(tl.int32)  # not with the cost too: warps sum 32 bits in one step
    sums = tl.sum(tl.where(before, packed[None, :], 0), 1)
    part_unit += sums & 0xFFFF
    part_segment += sums >> 16 & 0xFFFF
    part_start += tl.sum(tl.where(before, cost[None, :], 0), 1)
    is_zero = (count > 0) & (tiles == 0)
    # A unit's words are sectors apart: one program alone would take longer to store them than all to find them.
    mine = unit % tl.num_programs(0) == tl.program_id(0)
    ptrs = work_list_ptr + segments_at + segment * _SEGMENT_WORDS
    for split in range(max(FIXED_SPLITS, 1)):
        begin, end = _segment_tiles(tiles * 0 + split, splits, start, tiles, part_size, FIXED_SPLITS)
        _store_segment(
            ptrs + split * _SEGMENT_WORDS, mine & (split < splits), row, first_row, first_tile + begin,
            first_tile + end, seq_len, query_start, query_len, splits, split,
        )  # fmt: skip
    if num_zeros > 0:
        zero = zero_of_block + tl.cumsum(is_zero.to(tl.int32), 0) - 1
        zero_ptrs = work_list_ptr + zeros_at + zero * 3
        tl.store(zero_ptrs, query_start, mask=mine & is_zero)
        tl.store(zero_ptrs + 1, first_row, mask=mine & is_zero)
        tl.store(zero_ptrs + 2, tl.where(row < num_rows, count, -count), mask=mine & is_zero)
    return part_unit, part_start, part_segment, cost, splits, is_zero


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_units", "num_parts", "overhead", "min_unit_tiles"])
def _schedule_kernel(
    seq_lens_ptr,
    query_start_loc_ptr,
    work_list_ptr,
    num_rows,
    num_tokens,
    num_units,
    num_parts,
    overhead,
    min_unit_tiles,
    sliding_window,
    segments_at,
    zeros_at,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEQ_LENS_ARE_STARTS: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    MIN_PART_TILES: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    UNIT_BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    # Every program computes the line of costs; it writes the parts of its block, and every n-th unit.
    program = tl.program_id(0)
    lanes = tl.arange(0, UNIT_BLOCK)
    costs = tl.zeros([], tl.int32)
    num_zeros = tl.zeros([], tl.int32)
    if ONE_BLOCK:
        row, first_row, count, seq_len, query_start, query_len, first_tile, tiles = _units(
            lanes, num_units, seq_lens_ptr, query_start_loc_ptr, num_rows, num_tokens, sliding_window, QUERY_LEN,
            GROUP, BLOCK_M, BLOCK_N, CAUSAL, SEQ_LENS_ARE_STARTS, SEARCH_STEPS,
        )  # fmt: skip
        costs, num_zeros = _totals(count, tiles, overhead, min_unit_tiles)
    else:
        for base in range(0, num_units, UNIT_BLOCK):
            _, _, count, _, _, _, _, tiles = _units(
                base + lanes, num_units, seq_lens_ptr, query_start_loc_ptr, num_rows, num_tokens, sliding_window,
                QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, SEQ_LENS_ARE_STARTS, SEARCH_STEPS,
            )  # fmt: skip
            more_costs, more_zeros = _totals(count, tiles, overhead, min_unit_tiles)
            costs += more_costs
            num_zeros += more_zeros
    total = tl.maximum(costs - overhead, 1)
    if MIN_PART_TILES > 1:
        active = tl.maximum(total // MIN_PART_TILES, 1)
    else:
        active = total
    active = tl.minimum(active, num_parts)
    part_size = _quotient(total + active - 1, active)

    part = program * PART_BLOCK + tl.arange(0, PART_BLOCK)
    cut = tl.minimum(part * part_size, total)
    part_unit = tl.zeros([PART_BLOCK], tl.int32)
    # The line begins where the first unit's gap of `overhead` ends.
    part_start = tl.zeros([PART_BLOCK], tl.int32) - overhead
    part_segment = tl.zeros([PART_BLOCK], tl.int32)
    start_of_block = tl.zeros([], tl.int32) - overhead
    segment_of_block = tl.zeros([], tl.int32)
    zero_of_block = tl.zeros([], tl.int32)
    if ONE_BLOCK:
        part_unit, part_start, part_segment, _, _, _ = _place_block(
            work_list_ptr, segments_at, zeros_at, lanes, row, first_row, count, seq_len, query_start, query_len,
            first_tile, tiles, cut, part_unit, part_start, part_segment, start_of_block, segment_of_block,
            zero_of_block, num_rows, num_units, num_zeros, overhead, min_unit_tiles, part_size, FIXED_SPLITS,
            FIXED_TILES,
        )  # fmt: skip
    else:
        for base in range(0, num_units, UNIT_BLOCK):
            row, first_row, count, seq_len, query_start, query_len, first_tile, tiles = _units(
                base + lanes, num_units, seq_lens_ptr, query_start_loc_ptr, num_rows, num_tokens, sliding_window,
                QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, SEQ_LENS_ARE_STARTS, SEARCH_STEPS,
            )  # fmt: skip
            part_unit, part_start, part_segment, cost, splits, is_zero = _place_block(
                work_list_ptr, segments_at, zeros_at, base + lanes, row, first_row, count, seq_len, query_start,
                query_len, first_tile, tiles, cut, part_unit, part_start, part_segment, start_of_block,
                segment_of_block, zero_of_block, num_rows, num_units, num_zeros, overhead, min_unit_tiles,
                part_size, FIXED_SPLITS, FIXED_TILES,
            )  # fmt: skip
            start_of_block += tl.sum(cost, 0)
            segment_of_block += tl.sum(splits, 0)
            zero_of_block += tl.sum(is_zero.to(tl.int32), 0)

    is_active = part_unit < num_units
    row, first_row, _, seq_len, query_start, query_len, first_tile, tiles = _units(
        tl.where(is_active, part_unit, 0), num_units, seq_lens_ptr, query_start_loc_ptr, num_rows, num_tokens,
        sliding_window, QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, SEQ_LENS_ARE_STARTS, SEARCH_STEPS,
    )  # fmt: skip
    part_start += _cost(tiles, overhead, min_unit_tiles) - tiles  # behind the gap
    splits = _num_splits(part_start, tiles, part_size, FIXED_SPLITS, FIXED_TILES)
    into = tl.maximum(cut - part_start, 0)
    if FIXED_SPLITS > 0:
        cost = tl.maximum(tiles, 1)
        split = tl.minimum(_quotient(into * splits + cost - 1, cost), splits)
    else:
        split = tl.where(into > 0, part - _quotient(part_start, part_size), 0)
    split = tl.where(is_active, split, 0)
    part_ptrs = work_list_ptr + part * _PART_WORDS
    in_list = part <= num_parts
    tl.store(part_ptrs, part_segment + split, mask=in_list)
    tl.store(part_ptrs + 1, _quotient(tl.minimum(part, num_parts) * num_zeros, num_parts), mask=in_list)
    if FIXED_SPLITS == 0:
        begin, end = _segment_tiles(split, splits, part_start, tiles, part_size, FIXED_SPLITS)
        _store_segment(
            part_ptrs + 8, is_active, row, first_row, first_tile + begin, first_tile + end, seq_len, query_start,
            query_len, splits, split,
        )  # fmt: skip
        _store_segment(
            work_list_ptr + segments_at + (part_segment + split) * _SEGMENT_WORDS, is_active & (split > 0), row,
            first_row, first_tile + begin, first_tile + end, seq_len, query_start, query_len, splits, split,
        )  # fmt: skip


def _launch_options(query_len: int, num_rows: int, num_units: int, num_parts: int) -> dict[str, int]:
    """Constexprs that follow from the sizes, and num_warps."""
    block = min(max(next_power_of_two(num_units), _MIN_UNIT_BLOCK), _MAX_UNIT_BLOCK)
    return {
        "SEARCH_STEPS": 0 if query_len else num_rows.bit_length() + 1,
        "PART_BLOCK": min(next_power_of_two(-(-num_parts // _MAX_PROGRAMS)), _MAX_PART_BLOCK),
        "UNIT_BLOCK": block,
        "ONE_BLOCK": num_units <= block,
        "num_warps": 8 if block >= _MANY_UNITS else 4,
    }


def _schedule_triton(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    work_list: torch.Tensor,
    num_rows: int,
    num_tokens: int,
    num_units: int,
    num_parts: int,
    max_segments: int,
    query_len: int,
    group: int,
    block_m: int,
    block_n: int,
    causal: bool,
    sliding_window: int,
    seq_lens_are_starts: bool,
    fixed_splits: int,
    fixed_tiles: int,
    unit_overhead: int,
    min_unit_tiles: int,
    min_part_tiles: int,
) -> None:
    segments_at = (num_parts + 1) * PART_WORDS
    options = _launch_options(query_len, num_rows, num_units, num_parts)
    _schedule_kernel[(triton.cdiv(num_parts + 1, options["PART_BLOCK"]),)](
        seq_lens,
        query_start_loc,
        work_list,
        num_rows,
        num_tokens,
        num_units,
        num_parts,
        unit_overhead,
        min_unit_tiles,
        sliding_window,
        segments_at,
        segments_at + max_segments * SEGMENT_WORDS,
        QUERY_LEN=query_len,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CAUSAL=causal,
        SEQ_LENS_ARE_STARTS=seq_lens_are_starts,
        FIXED_SPLITS=fixed_splits,
        FIXED_TILES=fixed_tiles,
        MIN_PART_TILES=min_part_tiles,
        **options,
    )


_schedule_op: Any = define_op(
    "schedule_attention(Tensor seq_lens, Tensor? query_start_loc, Tensor(a!) work_list, int num_rows, int num_tokens, "
    "int num_units, int num_parts, int max_segments, int query_len, int group, int block_m, int block_n, bool causal, "
    "int sliding_window, bool seq_lens_are_starts, int fixed_splits, int fixed_tiles, int unit_overhead, "
    "int min_unit_tiles, int min_part_tiles) -> ()",
    triton_impl=_schedule_triton,
    reference=work_list_reference,
)


def schedule_attention(
    plan: AttentionPlan,
    seq_lens: torch.Tensor,
    work_list: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    seq_lens_are_starts: bool = False,
) -> None:
    """Write the work list of one step from its lengths; every layer with the same plan and window may share it.

    plan             host constants of the captured size
    seq_lens         [rows]      int32  KV tokens of each row; 0: the row's outputs become zeros
                     [rows + 1]  int32  with `seq_lens_are_starts`: where each row's keys begin in contiguous K and V
    work_list        [>= plan.work_list_words]  int32  written in full, as far as it is read
    query_start_loc  [rows + 1]  int32  for plans without a fixed query_len
    sliding_window   that of the layers; 0: none

    Capture-safe: one launch, no sync, no allocation; the grid depends on the plan only.

    Raises: ShapeError, CapacityError.
    """
    expected = plan.num_rows + 1 if seq_lens_are_starts else plan.num_rows
    check_tensor("seq_lens", seq_lens, shape=(expected,), dtype=torch.int32)
    check_unit_stride("seq_lens", seq_lens)
    check_tensor("work_list", work_list, shape=(None,), dtype=torch.int32, device=seq_lens.device)
    check_unit_stride("work_list", work_list)
    if work_list.shape[0] < plan.work_list_words:
        raise CapacityError(
            f"work_list: expected at least {plan.work_list_words} words for this plan, got {work_list.shape[0]}; "
            "allocate it for the largest plan"
        )
    if (query_start_loc is None) != (plan.query_len > 0):
        raise ShapeError(
            f"query_start_loc: expected {'None' if plan.query_len else 'a tensor'} for a plan with query_len="
            f"{plan.query_len}, got the opposite; a plan without query_len is made by AttentionPlan.varlen"
        )
    if query_start_loc is not None:
        check_tensor(
            "query_start_loc", query_start_loc, shape=(plan.num_rows + 1,), dtype=torch.int32, device=seq_lens.device
        )
        check_unit_stride("query_start_loc", query_start_loc)
    if sliding_window < 0 or (sliding_window and not causal):
        raise ShapeError(
            f"sliding_window: expected >= 0, and 0 without causal, got {sliding_window}; 0 switches it off"
        )
    _schedule_op(
        seq_lens, query_start_loc, work_list, plan.num_rows, plan.num_tokens, plan.num_units, plan.num_parts,
        plan.max_segments, plan.query_len, plan.group, plan.block_m, plan.block_n, causal, sliding_window,
        seq_lens_are_starts, plan.fixed_splits, plan.fixed_tiles, plan.unit_overhead, plan.min_unit_tiles,
        plan.min_part_tiles,
    )  # fmt: skip


def compile_variants() -> list[CompileSpec]:
    """Kernel variants that a test compiles without a GPU."""
    specs = []
    for name, query_len, fixed_splits, min_part_tiles in (
        ("decode", 1, 0, 1),
        ("clusters", 1, 0, 32),
        ("speculative", 5, 0, 1),
        ("varlen", 0, 0, 1),
        ("fixed", 1, 16, 1),
    ):
        options = _launch_options(query_len, 256, 256, 128)
        warps = options.pop("num_warps")
        constexprs: dict[str, object] = {
            "QUERY_LEN": query_len,
            "GROUP": 4,
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "CAUSAL": True,
            "SEQ_LENS_ARE_STARTS": False,
            "FIXED_SPLITS": fixed_splits,
            "FIXED_TILES": 4,
            "MIN_PART_TILES": min_part_tiles,
            **options,
        }
        signature = {}
        for argument in _schedule_kernel.arg_names:
            kind = "*i32" if argument.endswith("_ptr") else "i32"
            signature[argument] = "constexpr" if argument in constexprs else kind
        if query_len:
            constexprs["query_start_loc_ptr"] = None
            signature["query_start_loc_ptr"] = "constexpr"
        divisible = tuple(a for a, kind in signature.items() if kind.startswith("*"))
        specs.append(
            CompileSpec(f"schedule_{name}", _schedule_kernel, signature, constexprs, warps, 3, divisible=divisible)
        )
    return specs
