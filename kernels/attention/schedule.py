"""The schedule kernel, which writes the work list of a step. work_list.py describes the list.

Every program of the grid runs the same four steps and writes its own share of the list:

1. Cost: load all query tiles and sum their costs. The sum is the total work, which determines the partition size.
2. Placement: a running sum gives the end of each query tile in the linearized work. The number of query tiles that end
   at or before a partition boundary is the index of the query tile containing it. In the same pass, each program writes
   its share of the first splits and of the zeros.
3. Partitions: given the query tile at its boundary, one division gives the first split of a partition.
4. Fixed splits: if splits are fixed, each program writes all splits of its own few query tiles.

In steps 1 and 2, query tiles are the second dimension and partitions the first dimension of one 2D shape. Values thus
never change layout. A change of layout would cost a barrier and a round trip through shared memory. In step 3,
partitions are lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.attention.attend import PARTITION_WORDS, SPLIT_WORDS

_PARTITION_WORDS = tl.constexpr(PARTITION_WORDS)
_SPLIT_WORDS = tl.constexpr(SPLIT_WORDS)

SEARCH_RADIX = 4
_SEARCH_RADIX = tl.constexpr(SEARCH_RADIX)


@triton.jit
def _load_q_tiles(
    q_tile,
    num_q_tiles,
    seq_lens_ptr,
    stride_seq_lens,
    query_start_loc_ptr,
    num_reqs,
    num_tokens,
    span,
    QUERY_LEN: tl.constexpr,
    NUM_QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNKED: tl.constexpr,
    SEQ_LENS_ARE_STARTS: tl.constexpr,
    SEARCH_LEVELS: tl.constexpr,
):
    """Load query tiles; all results are int32 of the shape of `q_tile`.

    Returns request, first query, number of queries, seq_len, first token of the request in q, query_len, first KV tile
    and number of KV tiles. Query tiles after the last one have no queries.
    """
    if QUERY_LEN > 0:
        Q_TILES: tl.constexpr = (QUERY_LEN * NUM_QUERIES_PER_KV + BLOCK_M - 1) // BLOCK_M
        req = q_tile // Q_TILES
        first_query = q_tile % Q_TILES * BLOCK_M
        first_token = req * QUERY_LEN
        query_len = tl.where(q_tile < num_q_tiles, QUERY_LEN, 0)
    else:
        # Request r starts at query tile query_start_loc[r] * NUM_QUERIES_PER_KV // BLOCK_M + r, which leaves room for
        # an incomplete query tile per request. A virtual last request has the padding tokens. The request of a query
        # tile is found by a radix-4 search.
        req = q_tile * 0
        for level in tl.static_range(SEARCH_LEVELS):
            stride = _SEARCH_RADIX ** (SEARCH_LEVELS - 1 - level)
            passed = q_tile * 0
            for i in tl.static_range(1, _SEARCH_RADIX):  # all loads of a level at once
                candidate = req + i * stride
                exists = candidate <= num_reqs
                begins = (
                    tl.load(query_start_loc_ptr + candidate, mask=exists, other=0) * NUM_QUERIES_PER_KV // BLOCK_M
                    + candidate
                )
                passed += (exists & (begins <= q_tile)).to(tl.int32)
            req += passed * stride
        first_token = tl.load(query_start_loc_ptr + req)
        query_end = tl.load(query_start_loc_ptr + req + 1, mask=req < num_reqs, other=0)
        query_end = tl.where(req < num_reqs, query_end, num_tokens)
        first_query = (q_tile - first_token * NUM_QUERIES_PER_KV // BLOCK_M - req) * BLOCK_M
        query_len = tl.where(q_tile < num_q_tiles, query_end - first_token, 0)
    is_req = (req < num_reqs) & (q_tile < num_q_tiles)
    seq_len = tl.load(seq_lens_ptr + req * stride_seq_lens, mask=is_req, other=0)
    if SEQ_LENS_ARE_STARTS:
        seq_len = tl.load(seq_lens_ptr + (req + 1) * stride_seq_lens, mask=is_req, other=0) - seq_len
    num_queries = tl.minimum(tl.maximum(query_len * NUM_QUERIES_PER_KV - first_query, 0), BLOCK_M)
    # KV tiles that the query tile sees: from the window or chunk of its first token to its last token.
    kv_end = seq_len
    if CAUSAL:
        kv_end = tl.minimum(kv_end, seq_len - query_len + (first_query + num_queries - 1) // NUM_QUERIES_PER_KV + 1)
    kv_end = tl.where(num_queries > 0, tl.maximum(kv_end, 0), 0)
    if CHUNKED:
        first_kv_tile = tl.maximum(seq_len - query_len + first_query // NUM_QUERIES_PER_KV, 0) // span * span // BLOCK_N
    else:
        first_kv_tile = tl.maximum(seq_len - query_len + first_query // NUM_QUERIES_PER_KV + 1 - span, 0) // BLOCK_N
        first_kv_tile = tl.where(span > 0, first_kv_tile, 0)
    kv_tiles = tl.maximum((kv_end + BLOCK_N - 1) // BLOCK_N - first_kv_tile, 0)
    return req, first_query, num_queries, seq_len, first_token, query_len, first_kv_tile, kv_tiles


@triton.jit
def _quotient(n, divisor):
    """Return n // divisor of non-negative int32 values. Unsigned division takes fewer instructions."""
    return (n.to(tl.uint32) // divisor.to(tl.uint32)).to(tl.int32)


@triton.jit
def _num_fixed_splits(kv_tiles, FIXED_SPLITS: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr):
    """Return the number of KV splits of a query tile if splits are fixed."""
    return tl.minimum((kv_tiles + MIN_SPLIT_TILES - 1) // MIN_SPLIT_TILES, FIXED_SPLITS)


@triton.jit
def _entries(kv_tiles, FIXED_SPLITS: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr):
    """Return the entries of query tiles in the splits area, which are all splits if fixed, otherwise only the first."""
    if FIXED_SPLITS > 0:
        return _num_fixed_splits(kv_tiles, FIXED_SPLITS, MIN_SPLIT_TILES)
    else:
        return tl.minimum(kv_tiles, 1)


@triton.jit
def _split_bounds(split_index, start, kv_tiles, partition_size):
    """Return the bounds of KV split `split_index` of query tiles that partition boundaries split.

    start   work offset of the query tile's first KV tile

    Returns its first KV tile and last KV tile + 1, relative to the query tile's first, and the number of splits.
    """
    partition = _quotient(start, partition_size)
    begin = tl.maximum((partition + split_index) * partition_size - start, 0)
    end = tl.minimum((partition + split_index + 1) * partition_size - start, kv_tiles)
    return begin, end, 1 + _quotient(start + kv_tiles - 1, partition_size) - partition


@triton.jit
def _store_split(ptrs, mask, req, first_query, begin, end, seq_len, first_token, query_len, num_splits, split_index):
    tl.store(ptrs, req, mask=mask)
    tl.store(ptrs + 1, first_query, mask=mask)
    tl.store(ptrs + 2, begin, mask=mask)
    tl.store(ptrs + 3, end, mask=mask)
    tl.store(ptrs + 4, seq_len, mask=mask)
    tl.store(ptrs + 5, first_token, mask=mask)
    tl.store(ptrs + 6, query_len, mask=mask)
    tl.store(ptrs + 7, num_splits | (split_index << 16), mask=mask)


@triton.jit
def _cost(kv_tiles, q_tile_overhead, min_q_tile_cost):
    """Return a query tile's cost in KV tiles, including the overhead. Query tiles that see no KV cost nothing."""
    return tl.where(kv_tiles > 0, tl.maximum(kv_tiles + q_tile_overhead, min_q_tile_cost), 0)


@triton.jit
def _as_lanes(x, mine):
    """Move per-partition values from the first dimension to the second."""
    return tl.sum(tl.where(mine, x, 0), 0, keep_dims=True)


@triton.jit
def _sum_q_tiles(x):
    return tl.sum(x, 1, keep_dims=True)


@triton.jit
def _totals(num_queries, kv_tiles, q_tile_overhead, min_q_tile_cost):
    """Return the costs of a block of query tiles, and how many of them have queries but see no KV."""
    is_zero = (num_queries > 0) & (kv_tiles == 0)
    return _sum_q_tiles(_cost(kv_tiles, q_tile_overhead, min_q_tile_cost)), _sum_q_tiles(is_zero.to(tl.int32))


@triton.jit
def _place_block(
    work_list_ptr,
    splits_at,
    zeros_at,
    q_tile,
    req,
    first_query,
    num_queries,
    seq_len,
    first_token,
    query_len,
    first_kv_tile,
    kv_tiles,
    boundary,
    partition_q_tile,
    partition_start,
    partition_entry,
    start_of_block,
    entry_of_block,
    zero_of_block,
    num_reqs,
    num_q_tiles,
    q_tile_overhead,
    min_q_tile_cost,
    partition_size,
    FIXED_SPLITS: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
):
    """Step 2 for a block of query tiles: place them in the linearized work, and find those at partition boundaries.

    boundary           [PARTITION_BLOCK, 1] work offset at which this program's partitions begin
    partition_q_tile   [PARTITION_BLOCK, 1] query tiles so far that end at or before the boundary, which is the index of
                       the query tile that contains it
    partition_start    [PARTITION_BLOCK, 1] work offset of that query tile, including its overhead
    partition_entry    [PARTITION_BLOCK, 1] entries of the splits area before that query tile
    start_, entry_, zero_of_block   work offset, entries and zeros before this block

    Writes this program's share of the first splits, unless splits are fixed, and of the zeros. Returns the updated
    partition_ values, and costs, entries and zeros of the query tiles.
    """
    cost = _cost(kv_tiles, q_tile_overhead, min_q_tile_cost)
    entries = _entries(kv_tiles, FIXED_SPLITS, MIN_SPLIT_TILES)
    q_tile_end = start_of_block + tl.cumsum(cost, 1)
    # A boundary within the overhead belongs to the query tile that follows. Query tiles without KV have no extent.
    before = q_tile_end <= boundary
    tl.static_assert(tl.constexpr(q_tile.shape[1]) * max(FIXED_SPLITS, 1) < 1 << 15, "entries of a block have 15 bits")
    counts = entries << 16 | (q_tile < num_q_tiles).to(tl.int32)  # two counts in 32 bits, which a warp sums in one step
    sums = _sum_q_tiles(tl.where(before, counts, 0))
    partition_q_tile += sums & 0xFFFF
    partition_entry += sums >> 16 & 0xFFFF
    partition_start += _sum_q_tiles(tl.where(before, cost, 0))
    # All programs have loaded all query tiles. Each writes every n-th one; a single program would take too long.
    mine = q_tile % tl.num_programs(0) == tl.program_id(0)
    is_zero = (num_queries > 0) & (kv_tiles == 0)
    ranks = tl.cumsum(tl.minimum(kv_tiles, 1) | is_zero.to(tl.int32) << 16, 1)
    if FIXED_SPLITS == 0:
        entry = entry_of_block + (ranks & 0xFFFF) - 1
        begin, end, num_splits = _split_bounds(0, q_tile_end - kv_tiles, kv_tiles, partition_size)
        _store_split(
            work_list_ptr + splits_at + entry * _SPLIT_WORDS, mine & (kv_tiles > 0), req, first_query,
            first_kv_tile + begin, first_kv_tile + end, seq_len, first_token, query_len, num_splits, 0,
        )  # fmt: skip
    zero_ptrs = work_list_ptr + zeros_at + (zero_of_block + (ranks >> 16) - 1) * 3
    tl.store(zero_ptrs, first_token, mask=mine & is_zero)
    tl.store(zero_ptrs + 1, first_query, mask=mine & is_zero)
    tl.store(zero_ptrs + 2, tl.where(req < num_reqs, num_queries, -num_queries), mask=mine & is_zero)
    return partition_q_tile, partition_start, partition_entry, cost, entries, is_zero.to(tl.int32)


@triton.jit
def _entries_before(own, q_tile, entries):
    """Return, for each query tile in `own`, the entries of a block's query tiles before it."""
    return _sum_q_tiles(tl.where(q_tile < own, entries, 0))


@triton.jit
def _store_fixed_splits(
    ptrs,
    req,
    first_query,
    seq_len,
    first_token,
    query_len,
    first_kv_tile,
    kv_tiles,
    FIXED_SPLITS: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
):
    """Store all fixed splits of query tiles, one query tile after another, starting at `ptrs`."""
    split_index = tl.arange(0, FIXED_SPLITS)[None, :]
    num_splits = _num_fixed_splits(kv_tiles, FIXED_SPLITS, MIN_SPLIT_TILES)
    divisor = tl.maximum(num_splits, 1)
    begin = first_kv_tile + _quotient(split_index * kv_tiles, divisor)
    end = first_kv_tile + _quotient((split_index + 1) * kv_tiles, divisor)
    _store_split(
        ptrs + split_index * _SPLIT_WORDS, split_index < num_splits, req, first_query, begin, end, seq_len, first_token,
        query_len,
        num_splits, split_index,
    )  # fmt: skip


# The stride of seq_lens is always 1. If the compiler knew, it would load lengths in pairs and change layouts.
@triton.jit(
    do_not_specialize=[
        "stride_seq_lens",
        "num_reqs",
        "num_tokens",
        "num_q_tiles",
        "num_partitions",
        "q_tile_overhead",
        "min_q_tile_cost",
        "splits_at",
        "zeros_at",
    ]
)
def schedule_kernel(
    seq_lens_ptr,
    stride_seq_lens,
    query_start_loc_ptr,
    work_list_ptr,
    num_reqs,
    num_tokens,
    num_q_tiles,
    num_partitions,
    q_tile_overhead,
    min_q_tile_cost,
    span,
    splits_at,
    zeros_at,
    QUERY_LEN: tl.constexpr,
    NUM_QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNKED: tl.constexpr,
    SEQ_LENS_ARE_STARTS: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    MIN_PARTITION_TILES: tl.constexpr,
    SEARCH_LEVELS: tl.constexpr,
    PARTITION_BLOCK: tl.constexpr,
    PARTITION_LANES: tl.constexpr,
    OWN_Q_TILES: tl.constexpr,
    Q_TILE_BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    # Step 1: query tiles, costs, and the size of a partition.
    program = tl.program_id(0)
    lanes = tl.arange(0, Q_TILE_BLOCK)[None, :]
    costs = tl.zeros([1, 1], tl.int32)
    num_zeros = tl.zeros([1, 1], tl.int32)
    if ONE_BLOCK:
        req, first_query, num_queries, seq_len, first_token, query_len, first_kv_tile, kv_tiles = _load_q_tiles(
            lanes, num_q_tiles, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_reqs, num_tokens, span,
            QUERY_LEN, NUM_QUERIES_PER_KV, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
        )  # fmt: skip
        costs, num_zeros = _totals(num_queries, kv_tiles, q_tile_overhead, min_q_tile_cost)
    else:
        for base in range(0, num_q_tiles, Q_TILE_BLOCK):
            _, _, num_queries, _, _, _, _, kv_tiles = _load_q_tiles(
                base + lanes, num_q_tiles, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_reqs, num_tokens,
                span, QUERY_LEN, NUM_QUERIES_PER_KV, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS,
                SEARCH_LEVELS,
            )  # fmt: skip
            more_costs, more_zeros = _totals(num_queries, kv_tiles, q_tile_overhead, min_q_tile_cost)
            costs += more_costs
            num_zeros += more_zeros
    total = tl.maximum(costs - q_tile_overhead, 1)  # the first query tile has no overhead
    if MIN_PARTITION_TILES > 1:
        active = tl.maximum(total // MIN_PARTITION_TILES, 1)
    else:
        active = total
    active = tl.minimum(active, num_partitions)
    partition_size = _quotient(total + active - 1, active)

    # Step 2: the query tile at each partition boundary.
    partition = program * PARTITION_BLOCK + tl.arange(0, PARTITION_BLOCK)[:, None]
    boundary = tl.minimum(partition * partition_size, total)
    partition_q_tile = tl.zeros([PARTITION_BLOCK, 1], tl.int32)
    # Offset 0 is where the overhead of the first query tile ends.
    partition_start = tl.zeros([PARTITION_BLOCK, 1], tl.int32) - q_tile_overhead
    partition_entry = tl.zeros([PARTITION_BLOCK, 1], tl.int32)
    own = program * OWN_Q_TILES + tl.arange(0, OWN_Q_TILES)[:, None]
    own_entry = tl.zeros([OWN_Q_TILES, 1], tl.int32)
    start_of_block = tl.zeros([1, 1], tl.int32) - q_tile_overhead
    entry_of_block = tl.zeros([1, 1], tl.int32)
    zero_of_block = tl.zeros([1, 1], tl.int32)
    if ONE_BLOCK:
        partition_q_tile, partition_start, partition_entry, _, entries, _ = _place_block(
            work_list_ptr, splits_at, zeros_at, lanes, req, first_query, num_queries, seq_len, first_token, query_len,
            first_kv_tile, kv_tiles, boundary, partition_q_tile, partition_start, partition_entry, start_of_block,
            entry_of_block, zero_of_block,
            num_reqs, num_q_tiles, q_tile_overhead, min_q_tile_cost, partition_size, FIXED_SPLITS, MIN_SPLIT_TILES,
        )  # fmt: skip
        if FIXED_SPLITS > 0:
            own_entry = _entries_before(own, lanes, entries)
    else:
        for base in range(0, num_q_tiles, Q_TILE_BLOCK):
            req, first_query, num_queries, seq_len, first_token, query_len, first_kv_tile, kv_tiles = _load_q_tiles(
                base + lanes, num_q_tiles, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_reqs, num_tokens,
                span, QUERY_LEN, NUM_QUERIES_PER_KV, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS,
                SEARCH_LEVELS,
            )  # fmt: skip
            partition_q_tile, partition_start, partition_entry, cost, entries, is_zero = _place_block(
                work_list_ptr, splits_at, zeros_at, base + lanes, req, first_query, num_queries, seq_len, first_token,
                query_len, first_kv_tile, kv_tiles, boundary, partition_q_tile, partition_start, partition_entry,
                start_of_block, entry_of_block,
                zero_of_block, num_reqs, num_q_tiles, q_tile_overhead, min_q_tile_cost, partition_size, FIXED_SPLITS,
                MIN_SPLIT_TILES,
            )  # fmt: skip
            start_of_block += _sum_q_tiles(cost)
            entry_of_block += _sum_q_tiles(entries)
            zero_of_block += _sum_q_tiles(is_zero)
            if FIXED_SPLITS > 0:
                own_entry += _entries_before(own, base + lanes, entries)

    # Step 3: the words of the partitions. Partitions are lanes here, because in the first dimension each thread would
    # process all of them.
    lane = tl.arange(0, PARTITION_LANES)[None, :]
    mine = tl.arange(0, PARTITION_BLOCK)[:, None] == lane
    partition_q_tile = _as_lanes(partition_q_tile, mine)
    partition_start = _as_lanes(partition_start, mine)
    partition_entry = _as_lanes(partition_entry, mine)
    partition = program * PARTITION_BLOCK + lane
    boundary = tl.minimum(partition * partition_size, total)
    in_list = (lane < PARTITION_BLOCK) & (partition <= num_partitions)
    is_active = in_list & (partition_q_tile < num_q_tiles)
    req, first_query, _, seq_len, first_token, query_len, first_kv_tile, kv_tiles = _load_q_tiles(
        tl.where(is_active, partition_q_tile, 0), num_q_tiles, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr,
        num_reqs, num_tokens, span, QUERY_LEN, NUM_QUERIES_PER_KV, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED,
        SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
    )  # fmt: skip
    # The work offset of the query tile's first KV tile, after its overhead.
    partition_start += _cost(kv_tiles, q_tile_overhead, min_q_tile_cost) - kv_tiles
    into = tl.maximum(boundary - partition_start, 0)
    partition_ptrs = work_list_ptr + partition * _PARTITION_WORDS
    tl.store(
        partition_ptrs + 1, _quotient(tl.minimum(partition, num_partitions) * num_zeros, num_partitions), mask=in_list
    )
    if FIXED_SPLITS == 0:
        split_index = tl.where(into > 0, partition - _quotient(partition_start, partition_size), 0)
        tl.store(partition_ptrs, partition_entry, mask=in_list)
        tl.store(partition_ptrs + 2, partition_entry + (is_active & (split_index > 0)).to(tl.int32), mask=in_list)
        begin, end, num_splits = _split_bounds(split_index, partition_start, kv_tiles, partition_size)
        _store_split(
            partition_ptrs + 8, is_active, req, first_query, first_kv_tile + begin, first_kv_tile + end, seq_len,
            first_token,
            query_len, num_splits, split_index,
        )  # fmt: skip
    else:
        num_splits = _num_fixed_splits(kv_tiles, FIXED_SPLITS, MIN_SPLIT_TILES)
        cost = tl.maximum(kv_tiles, 1)
        split_index = tl.minimum(_quotient(into * num_splits + cost - 1, cost), num_splits)
        entry = partition_entry + tl.where(is_active, split_index, 0)
        tl.store(partition_ptrs, entry, mask=in_list)
        tl.store(partition_ptrs + 2, entry, mask=in_list)
        # Step 4: the splits of this program's own query tiles.
        req, first_query, _, seq_len, first_token, query_len, first_kv_tile, kv_tiles = _load_q_tiles(
            own, num_q_tiles, seq_lens_ptr, stride_seq_lens, query_start_loc_ptr, num_reqs, num_tokens, span,
            QUERY_LEN, NUM_QUERIES_PER_KV, BLOCK_M, BLOCK_N, CAUSAL, CHUNKED, SEQ_LENS_ARE_STARTS, SEARCH_LEVELS,
        )  # fmt: skip
        _store_fixed_splits(
            work_list_ptr + splits_at + own_entry * _SPLIT_WORDS, req, first_query, seq_len, first_token, query_len,
            first_kv_tile, kv_tiles, FIXED_SPLITS, MIN_SPLIT_TILES,
        )  # fmt: skip
