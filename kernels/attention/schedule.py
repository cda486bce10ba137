"""The schedule kernel: writes the work list of a step, as work_list.py describes it.

Every program of the grid does the same four steps, and writes its own share of the list:

1. Cost: all units are found, and what they cost is added up. The sum is the length of the line, and gives the part
   size.
2. Place: each unit's end on the line follows from a running sum. The units that end at or before a cut are counted:
   their number says which unit the cut falls into. Meanwhile the program writes its share of first segments and zeros.
3. Parts: with the unit of its cut known, each part's first segment follows by one division.
4. Fixed splits only: the program writes all segments of a few units of its own.

In steps 1 and 2 units are the second dimension and parts the first, of one 2D shape. So nothing changes its layout on
the way; such a change costs a barrier and a trip through shared memory. In step 3 parts are lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS

_PART_WORDS = tl.constexpr(PART_WORDS)
_SEGMENT_WORDS = tl.constexpr(SEGMENT_WORDS)

SEARCH_RADIX = 4
_SEARCH_RADIX = tl.constexpr(SEARCH_RADIX)


@triton.jit
def _units(
    unit,
    num_units,
    seq_lens_ptr,
    stride_seq_lens,
    query_start_loc_ptr,
    num_rows,
    num_tokens,
    span,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNKED: tl.constexpr,
    SEQ_LENS_ARE_STARTS: tl.constexpr,
    SEARCH_LEVELS: tl.constexpr,
):
    """What the units are, all int32 of the shape of `unit`: row, first query, number of queries, seq_len, first token
    of the row in q, query_len, first tile and number of tiles. Units behind the last one have no queries."""
    if QUERY_LEN > 0:
        TILES: tl.constexpr = (QUERY_LEN * GROUP + BLOCK_M - 1) // BLOCK_M
        row = unit // TILES
        first_query = unit % TILES * BLOCK_M
        first_token = row * QUERY_LEN
        query_len = tl.where(unit < num_units, QUERY_LEN, 0)
    else:
        # Rows of any query_len: row r begins at unit query_start_loc[r] * GROUP // BLOCK_M + r, which leaves room for
        # an incomplete unit per row. A virtual last row takes the pad tokens. A unit's row is searched for, by radix 4.
        row = unit * 0
        for level in tl.static_range(SEARCH_LEVELS):
            stride = _SEARCH_RADIX ** (SEARCH_LEVELS - 1 - level)
            passed = unit * 0
            for i in tl.static_range(1, _SEARCH_RADIX):  # all loads of a level at once
                candidate = row + i * stride
                exists = candidate <= num_rows
                begins = tl.load(query_start_loc_ptr + candidate, mask=exists, other=0) * GROUP // BLOCK_M + candidate
                passed += (exists & (begins <= unit)).to(tl.int32)
            row += passed * stride
        first_token = tl.load(query_start_loc_ptr + row)
        query_end = tl.load(query_start_loc_ptr + row + 1, mask=row < num_rows, other=0)
        query_end = tl.where(row < num_rows, query_end, num_tokens)
        first_query = (unit - first_token * GROUP // BLOCK_M - row) * BLOCK_M
        query_len = tl.where(unit < num_units, query_end - first_token, 0)
    is_row = (row < num_rows) & (unit < num_units)
    seq_len = tl.load(seq_lens_ptr + row * stride_seq_lens, mask=is_row, other=0)
    if SEQ_LENS_ARE_STARTS:
        seq_len = tl.load(seq_lens_ptr + (row + 1) * stride_seq_lens, mask=is_row, other=0) - seq_len
    num_queries = tl.minimum(tl.maximum(query_len * GROUP - first_query, 0), BLOCK_M)
    # Tiles that the unit sees: up to its last token's position, and from the window or the chunk of its first token on.
    kv_end = seq_len
    if CAUSAL:
        kv_end = tl.minimum(kv_end, seq_len - query_len + (first_query + num_queries - 1) // GROUP + 1)
    kv_end = tl.where(num_queries > 0, tl.maximum(kv_end, 0), 0)
    if CHUNKED:
        first_tile = tl.maximum(seq_len - query_len + first_query // GROUP, 0) // span * span // BLOCK_N
    else:
        first_tile = tl.maximum(seq_len - query_len + first_query // GROUP + 1 - span, 0) // BLOCK_N
        first_tile = tl.where(span > 0, first_tile, 0)
    tiles = tl.maximum((kv_end + BLOCK_N - 1) // BLOCK_N - first_tile, 0)
    return row, first_query, num_queries, seq_len, first_token, query_len, first_tile, tiles


@triton.jit
def _quotient(n, divisor):
    """n // divisor, for int32 values that are not negative: unsigned division takes fewer instructions."""
    return (n.to(tl.uint32) // divisor.to(tl.uint32)).to(tl.int32)


@triton.jit
def _fixed_splits(tiles, FIXED_SPLITS: tl.constexpr, FIXED_TILES: tl.constexpr):
    """Into how many segments fixed splits cut a unit of so many tiles."""
    return tl.minimum((tiles + FIXED_TILES - 1) // FIXED_TILES, FIXED_SPLITS)


@triton.jit
def _entries(tiles, FIXED_SPLITS: tl.constexpr, FIXED_TILES: tl.constexpr):
    """Entries of units in the segments' area: all segments under fixed splits, otherwise the first one."""
    if FIXED_SPLITS > 0:
        return _fixed_splits(tiles, FIXED_SPLITS, FIXED_TILES)
    else:
        return tl.minimum(tiles, 1)


@triton.jit
def _cut_segment(split, start, tiles, part_size):
    """Segment `split` of units that the parts cut: its first tile and last tile + 1, relative to the unit's first tile,
    and the unit's number of segments. `start` is where the unit's tiles begin on the line."""
    part = _quotient(start, part_size)
    begin = tl.maximum((part + split) * part_size - start, 0)
    end = tl.minimum((part + split + 1) * part_size - start, tiles)
    return begin, end, 1 + _quotient(start + tiles - 1, part_size) - part


@triton.jit
def _store_segment(ptrs, mask, row, first_query, begin, end, seq_len, first_token, query_len, splits, split):
    tl.store(ptrs, row, mask=mask)
    tl.store(ptrs + 1, first_query, mask=mask)
    tl.store(ptrs + 2, begin, mask=mask)
    tl.store(ptrs + 3, end, mask=mask)
    tl.store(ptrs + 4, seq_len, mask=mask)
    tl.store(ptrs + 5, first_token, mask=mask)
    tl.store(ptrs + 6, query_len, mask=mask)
    tl.store(ptrs + 7, splits | (split << 16), mask=mask)


@triton.jit
def _cost(tiles, overhead, min_unit_tiles):
    """What a unit costs, in tiles: its gap and its tiles. Units that see nothing cost nothing."""
    return tl.where(tiles > 0, tl.maximum(tiles + overhead, min_unit_tiles), 0)


@triton.jit
def _as_lanes(x, mine):
    """A value per part from the first dimension to the second."""
    return tl.sum(tl.where(mine, x, 0), 0, keep_dims=True)


@triton.jit
def _sum_units(x):
    return tl.sum(x, 1, keep_dims=True)


@triton.jit
def _totals(num_queries, tiles, overhead, min_unit_tiles):
    """Costs of a block of units, and how many have queries but see nothing."""
    is_zero = (num_queries > 0) & (tiles == 0)
    return _sum_units(_cost(tiles, overhead, min_unit_tiles)), _sum_units(is_zero.to(tl.int32))


@triton.jit
def _place_block(
    work_list_ptr,
    segments_at,
    zeros_at,
    unit,
    row,
    first_query,
    num_queries,
    seq_len,
    first_token,
    query_len,
    first_tile,
    tiles,
    cut,
    part_unit,
    part_start,
    part_entry,
    start_of_block,
    entry_of_block,
    zero_of_block,
    num_rows,
    num_units,
    overhead,
    min_unit_tiles,
    part_size,
    FIXED_SPLITS: tl.constexpr,
    FIXED_TILES: tl.constexpr,
):
    """Step 2 for a block of units: where they lie on the line, and which of them the cuts of this program fall into.

    cut                    [PART_BLOCK, 1] where this program's parts begin on the line
    part_unit              [PART_BLOCK, 1] units so far that end at or before the cut: the number of the cut's unit
    part_start             [PART_BLOCK, 1] where that unit begins on the line, its gap included
    part_entry             [PART_BLOCK, 1] entries of the segments' area before that unit
    start_, entry_, zero_of_block   the line, the entries and the zeros before this block

    Writes this program's share of the units' first segments, unless splits are fixed, and of the zeros. Returns what
    the parts know so far, and the costs, entries and zeros of the units.
    """
    cost = _cost(tiles, overhead, min_unit_tiles)
    entries = _entries(tiles, FIXED_SPLITS, FIXED_TILES)
    unit_end = start_of_block + tl.cumsum(cost, 1)
    # A cut in a gap belongs to the unit behind the gap. Units that see nothing end where the unit before them ends.
    before = unit_end <= cut
    tl.static_assert(tl.constexpr(unit.shape[1]) * max(FIXED_SPLITS, 1) < 1 << 15, "entries of a block have 15 bits")
    counts = entries << 16 | (unit < num_units).to(tl.int32)  # two counts in 32 bits, which a warp sums in one step
    sums = _sum_units(tl.where(before, counts, 0))
    part_unit += sums & 0xFFFF
    part_entry += sums >> 16 & 0xFFFF
    part_start += _sum_units(tl.where(before, cost, 0))
    # Every program has found all units; each writes every n-th of them. One program alone would store for too long.
    mine = unit % tl.num_programs(0) == tl.program_id(0)
    is_zero = (num_queries > 0) & (tiles == 0)
    ranks = tl.cumsum(tl.minimum(tiles, 1) | is_zero.to(tl.int32) << 16, 1)
    if FIXED_SPLITS == 0:
        entry = entry_of_block + (ranks & 0xFFFF) - 1
        begin, end, splits = _cut_segment(0, unit_end - tiles, tiles, part_size)
        _store_segment(
            work_list_ptr + segments_at + entry * _SEGMENT_WORDS, mine & (tiles > 0), row, first_query,
            first_tile + begin, first_tile + end, seq_len, first_token, query_len, splits, 0,
        )  # fmt: skip
    zero_ptrs = work_list_ptr + zeros_at + (zero_of_block + (ranks >> 16) - 1) * 3
    tl.store(zero_ptrs, first_token, mask=mine & is_zero)
    tl.store(zero_ptrs + 1, first_query, mask=mine & is_zero)
    tl.store(zero_ptrs + 2, tl.where(row < num_rows, num_queries, -num_queries), mask=mine & is_zero)
    return part_unit, part_start, part_entry, cost, entries, is_zero.to(tl.int32)


@triton.jit
def _entries_before(own, unit, entries):
    """Entries of the units of a block that come before each of `own`."""
    return _sum_units(tl.where(unit < own, entries, 0))


@triton.jit
def _store_fixed_segments(
    ptrs,
    row,
    first_query,
    seq_len,
    first_token,
    query_len,
    first_tile,
    tiles,
    FIXED_SPLITS: tl.constexpr,
    FIXED_TILES: tl.constexpr,
):
    """All segments of units that are cut by their own lengths, one unit after another from `ptrs` on."""
    split = tl.arange(0, FIXED_SPLITS)[None, :]
    splits = _fixed_splits(tiles, FIXED_SPLITS, FIXED_TILES)
    divisor = tl.maximum(splits, 1)
    begin = first_tile + _quotient(split * tiles, divisor)
    end = first_tile + _quotient((split + 1) * tiles, divisor)
    _store_segment(
        ptrs + split * _SEGMENT_WORDS, split < splits, row, first_query, begin, end, seq_len, first_token, query_len,
        splits, split,
    )  # fmt: skip


# The stride of seq_lens is 1. The compiler is not told: each thread would load lengths in pairs, and layouts would
# change.
@triton.jit(
    do_not_specialize=[
        "stride_seq_lens",
        "num_rows",
        "num_tokens",
        "num_units",
        "num_parts",
        "overhead",
        "min_unit_tiles",
    ]
)
def schedule_kernel(
    seq_lens_ptr,
    stride_seq_lens,
    query_start_loc_ptr,
    work_list_ptr,
    num_rows,
    num_tokens,
    num_units,
    num_parts,
    overhead,
    min_unit_tiles,
    span,
    segments_at,
    zeros_at,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNKED: tl.constexpr,
    SEQ_LENS_ARE_STARTS: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    MIN_PART_TILES: tl.constexpr,
    SEARCH_LEVELS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PART_LANES: tl.constexpr,
    OWN_UNITS: tl.constexpr,
    UNIT_BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    # Step 1: units, costs, and the size of a part.
    program = tl.program_id(0)
    lanes = tl.arange(0, UNIT_BLOCK)[None, :]
    costs = tl.zeros([1, 1], tl.int32)
    num_zeros = tl.zeros([1, 1], tl.int32)
    if ONE_BLOCK:
        row, first_query, num_queries, seq_len, first_token, query_len, first_tile, tiles = _units(
            lanes, num_units, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_rows, num_tokens, span,
            QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
        )  # fmt: skip
        costs, num_zeros = _totals(num_queries, tiles, overhead, min_unit_tiles)
    else:
        for base in range(0, num_units, UNIT_BLOCK):
            _, _, num_queries, _, _, _, _, tiles = _units(
                base + lanes, num_units, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_rows, num_tokens,
                span, QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
            )  # fmt: skip
            more_costs, more_zeros = _totals(num_queries, tiles, overhead, min_unit_tiles)
            costs += more_costs
            num_zeros += more_zeros
    total = tl.maximum(costs - overhead, 1)  # the line begins behind the first gap
    if MIN_PART_TILES > 1:
        active = tl.maximum(total // MIN_PART_TILES, 1)
    else:
        active = total
    active = tl.minimum(active, num_parts)
    part_size = _quotient(total + active - 1, active)

    # Step 2: the unit of each cut.
    part = program * PART_BLOCK + tl.arange(0, PART_BLOCK)[:, None]
    cut = tl.minimum(part * part_size, total)
    part_unit = tl.zeros([PART_BLOCK, 1], tl.int32)
    # The line begins where the first unit's gap of `overhead` ends.
    part_start = tl.zeros([PART_BLOCK, 1], tl.int32) - overhead
    part_entry = tl.zeros([PART_BLOCK, 1], tl.int32)
    own = program * OWN_UNITS + tl.arange(0, OWN_UNITS)[:, None]
    own_entry = tl.zeros([OWN_UNITS, 1], tl.int32)
    start_of_block = tl.zeros([1, 1], tl.int32) - overhead
    entry_of_block = tl.zeros([1, 1], tl.int32)
    zero_of_block = tl.zeros([1, 1], tl.int32)
    if ONE_BLOCK:
        part_unit, part_start, part_entry, _, entries, _ = _place_block(
            work_list_ptr, segments_at, zeros_at, lanes, row, first_query, num_queries, seq_len, first_token, query_len,
            first_tile, tiles, cut, part_unit, part_start, part_entry, start_of_block, entry_of_block, zero_of_block,
            num_rows, num_units, overhead, min_unit_tiles, part_size, FIXED_SPLITS, FIXED_TILES,
        )  # fmt: skip
        if FIXED_SPLITS > 0:
            own_entry = _entries_before(own, lanes, entries)
    else:
        for base in range(0, num_units, UNIT_BLOCK):
            row, first_query, num_queries, seq_len, first_token, query_len, first_tile, tiles = _units(
                base + lanes, num_units, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_rows, num_tokens,
                span, QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
            )  # fmt: skip
            part_unit, part_start, part_entry, cost, entries, is_zero = _place_block(
                work_list_ptr, segments_at, zeros_at, base + lanes, row, first_query, num_queries, seq_len, first_token,
                query_len, first_tile, tiles, cut, part_unit, part_start, part_entry, start_of_block, entry_of_block,
                zero_of_block, num_rows, num_units, overhead, min_unit_tiles, part_size, FIXED_SPLITS,
                FIXED_TILES,
            )  # fmt: skip
            start_of_block += _sum_units(cost)
            entry_of_block += _sum_units(entries)
            zero_of_block += _sum_units(is_zero)
            if FIXED_SPLITS > 0:
                own_entry += _entries_before(own, base + lanes, entries)

    # Step 3: the parts' words. Parts are lanes now: as the first dimension, each thread would go through all of them.
    lane = tl.arange(0, PART_LANES)[None, :]
    mine = tl.arange(0, PART_BLOCK)[:, None] == lane
    part_unit = _as_lanes(part_unit, mine)
    part_start = _as_lanes(part_start, mine)
    part_entry = _as_lanes(part_entry, mine)
    part = program * PART_BLOCK + lane
    cut = tl.minimum(part * part_size, total)
    in_list = (lane < PART_BLOCK) & (part <= num_parts)
    is_active = in_list & (part_unit < num_units)
    row, first_query, _, seq_len, first_token, query_len, first_tile, tiles = _units(
        tl.where(is_active, part_unit, 0), num_units, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_rows,
        num_tokens, span, QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
    )  # fmt: skip
    part_start += _cost(tiles, overhead, min_unit_tiles) - tiles  # where the unit's tiles begin, behind its gap
    into = tl.maximum(cut - part_start, 0)
    part_ptrs = work_list_ptr + part * _PART_WORDS
    tl.store(part_ptrs + 1, _quotient(tl.minimum(part, num_parts) * num_zeros, num_parts), mask=in_list)
    if FIXED_SPLITS == 0:
        split = tl.where(into > 0, part - _quotient(part_start, part_size), 0)
        tl.store(part_ptrs, part_entry, mask=in_list)
        tl.store(part_ptrs + 2, part_entry + (is_active & (split > 0)).to(tl.int32), mask=in_list)
        begin, end, splits = _cut_segment(split, part_start, tiles, part_size)
        _store_segment(
            part_ptrs + 8, is_active, row, first_query, first_tile + begin, first_tile + end, seq_len, first_token,
            query_len, splits, split,
        )  # fmt: skip
    else:
        splits = _fixed_splits(tiles, FIXED_SPLITS, FIXED_TILES)
        cost = tl.maximum(tiles, 1)
        split = tl.minimum(_quotient(into * splits + cost - 1, cost), splits)
        entry = part_entry + tl.where(is_active, split, 0)
        tl.store(part_ptrs, entry, mask=in_list)
        tl.store(part_ptrs + 2, entry, mask=in_list)
        # Step 4: the segments of this program's own units.
        row, first_query, _, seq_len, first_token, query_len, first_tile, tiles = _units(
            own, num_units, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_rows, num_tokens, span,
            QUERY_LEN, GROUP, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
        )  # fmt: skip
        _store_fixed_segments(
            work_list_ptr + segments_at + own_entry * _SEGMENT_WORDS, row, first_query, seq_len, first_token, query_len,
            first_tile, tiles, FIXED_SPLITS, FIXED_TILES,
        )  # fmt: skip
