"""The attention kernel: one launch per layer, for decode rows, mixed batches and contiguous K and V.

A query is one new token in one query head. Those of a row that share a KV head are numbered `token * group + head`, so
that K and V are read once for all of them; BLOCK_M queries make a unit. docs/attention.md draws what follows.

The work list cuts the KV tiles of all units into equal parts, one per program and KV head. A program does this:

1. It reads its part: where its segments begin and end, and the first of them.
2. For each segment it loads the queries, then runs the online softmax over the segment's tiles.
3. A segment that is all of its unit: the program writes the output.
4. Other segments: the program leaves a partial result, divided by its sum of weights, and the log-sum-exp. It counts
   its arrival. The last to arrive merges all partial results of the unit and sets the counter back to 0. Units in many
   segments are merged in bundles first, then over the bundles.
5. It writes zeros for its share of the units that see nothing.

Merges add in the order of the segments, so the result does not depend on who arrives last. No program waits for
another, so the grid may be larger than the device.

Split-KV attention: Flash-Decoding (Dao et al. 2023). Equal parts across rows: stream-K (Osama et al. 2023) and
LeanAttention (Sanovar et al. 2024).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from graphrt.kernels.attention.tile import attend_tile, merge_partials, query_exponent, tile_offsets, tile_pages

PART_WORDS = 16
SEGMENT_WORDS = 8
"""int32 words of a part and of a segment in the work list; work_list.py documents them."""

_PART_WORDS = tl.constexpr(PART_WORDS)
_SEGMENT_WORDS = tl.constexpr(SEGMENT_WORDS)
_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _write_output(
    out_ptr,
    lse_ptr,
    v_scale_ptr,
    sinks_ptr,
    acc,
    top,
    total,
    m,
    num_queries,
    first_token,
    first_query,
    kv_head,
    stride_v_scale,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Finish the queries of a unit and store output and log-sum-exp.

    acc     [*, BLOCK_V]  weighted sums of values, not divided yet
    top     [*]  reference point of the weights: weight = exp2(logit - top)
    total   [*]  sums of the weights
    m       [*]  numbers of the queries within the unit
    """
    d = tl.arange(0, BLOCK_V)
    query = first_query + m
    token = (first_token + query // GROUP).to(tl.int64)
    head = kv_head * GROUP + query % GROUP
    mask = m < num_queries
    # A sink is one more logit, without a value: it changes the sum of weights only.
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=mask, other=float("-inf")) * _LOG2E
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.exp2(sink - base)
        acc = acc * rescale[:, None]
        top = new_top
    if lse_ptr is not None:  # -inf where nothing is seen, as top is
        lse = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * _LN2
        tl.store(lse_ptr + token * stride_lse_token + head, lse, mask=mask)
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)  # a token that sees nothing gets zeros
    if v_scale_ptr is not None:
        scale *= tl.load(v_scale_ptr + kv_head * stride_v_scale)
    out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + d[None, :]
    tl.store(
        out_ptrs, (acc * scale[:, None]).to(out_ptr.dtype.element_ty), mask=mask[:, None] & (d < V_HEAD_DIM)[None, :]
    )


@triton.jit
def _store_partial(
    partial_out_ptr,
    partial_lse_ptr,
    place,
    acc,
    top,
    total,
    m,
    num_queries,
    kv_head,
    num_kv_heads,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTIAL_M: tl.constexpr,
):
    """Leave a partial result, divided by its sum of weights, and its log-sum-exp in a place of the workspace."""
    d = tl.arange(0, BLOCK_V)
    divisor = tl.where(total == 0.0, 1.0, total)
    partial_query = (place * num_kv_heads + kv_head) * PARTIAL_M + m
    # The log-sum-exp is -inf where nothing is seen, as top is.
    tl.store(partial_lse_ptr + partial_query, top + tl.log2(divisor), mask=m < num_queries)
    partial_ptrs = partial_out_ptr + (partial_query.to(tl.int64) * V_HEAD_DIM)[:, None] + d[None, :]
    tl.store(partial_ptrs, acc / divisor[:, None], mask=(m < num_queries)[:, None] & (d < V_HEAD_DIM)[None, :])


@triton.jit
def _write_zeros(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    zeros_ptr,
    begin,
    end,
    kv_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the output of units that see nothing: pad rows, pad tokens, tokens before position 0.

    begin, end   this program's share of these units
    """
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_V)
    for entry in tl.range(begin, end, num_stages=1):
        first_token = tl.load(zeros_ptr + entry * 3)
        first_query = tl.load(zeros_ptr + entry * 3 + 1)
        marked_queries = tl.load(zeros_ptr + entry * 3 + 2)  # negative for pad tokens, whose sinks do not count
        num_queries = tl.abs(marked_queries)
        query = first_query + m
        token = (first_token + query // GROUP).to(tl.int64)
        head = kv_head * GROUP + query % GROUP
        mask = m < num_queries
        out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + d[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_V], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=mask[:, None] & (d < V_HEAD_DIM)[None, :])
        if lse_ptr is not None:
            lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
            if sinks_ptr is not None:
                sink = tl.load(sinks_ptr + head, mask=mask, other=0.0)
                lse = tl.where(marked_queries > 0, sink, lse)
            tl.store(lse_ptr + token * stride_lse_token + head, lse, mask=mask)


@triton.jit
def attend_kernel(
    q_ptr,  # [tokens, num_kv_heads * GROUP, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]; contiguous: [kv_tokens, num_kv_heads, HEAD_DIM]
    v_ptr,  # as k_ptr, with heads of V_HEAD_DIM
    block_table_ptr,  # [rows, max_pages]; contiguous: kv_start_loc [rows + 1]
    work_list_ptr,  # parts, segments, units that see nothing
    out_ptr,  # [tokens, num_kv_heads * GROUP, V_HEAD_DIM]
    lse_ptr,  # [tokens, num_kv_heads * GROUP] or None
    partial_out_ptr,  # [places, num_kv_heads, PARTIAL_M, V_HEAD_DIM]
    partial_lse_ptr,  # [places, num_kv_heads, PARTIAL_M]
    counters_ptr,  # [2, places, num_kv_heads]: arrivals at a bundle, at a unit
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    segments_at,
    zeros_at,
    num_places,
    logit_factor,
    logit_cap,
    span,  # positions of a window or of a chunk
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_table_row,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_k_scale,
    stride_v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    IS_FP8: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    SKIP_MASKS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PARTIAL_M: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    MERGE_BUNDLE: tl.constexpr,
):
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None
    # Logits are scaled before the softmax where something needs them: softcap, ALiBi, or a scale of keys. Such a scale
    # comes from a checkpoint and may be 0, negative or NaN; scaling within the exponential would hide that.
    SCALED: tl.constexpr = HAS_SOFTCAP or HAS_ALIBI or k_scale_ptr is not None
    DOT_DTYPE: tl.constexpr = tl.float16 if IS_FP8 and q_ptr.dtype.element_ty != tl.float32 else q_ptr.dtype.element_ty

    # Strides come in a unit, so that the compiler knows what they are multiples of.
    stride_q_token *= STRIDE_UNIT
    stride_q_head *= STRIDE_UNIT
    stride_k_page *= STRIDE_UNIT
    stride_k_slot *= STRIDE_UNIT
    stride_k_head *= STRIDE_UNIT
    stride_v_page *= STRIDE_UNIT
    stride_v_slot *= STRIDE_UNIT
    stride_v_head *= STRIDE_UNIT
    stride_out_token *= STRIDE_UNIT
    stride_out_head *= STRIDE_UNIT

    # 1. The part.
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    part_ptr = work_list_ptr + part * _PART_WORDS
    begin = tl.load(part_ptr)
    end = tl.load(part_ptr + _PART_WORDS + 2)  # the next part says where this one ends
    zeros_begin = tl.load(part_ptr + 1)
    zeros_end = tl.load(part_ptr + _PART_WORDS + 1)
    # The part holds a copy of its first segment, so that a program with one segment waits for one load only.
    row = tl.load(part_ptr + 8)
    first_query = tl.load(part_ptr + 9)
    tile_begin = tl.load(part_ptr + 10)
    tile_end = tl.load(part_ptr + 11)
    seq_len = tl.load(part_ptr + 12)
    first_token = tl.load(part_ptr + 13)
    query_len = tl.load(part_ptr + 14)
    splits = tl.load(part_ptr + 15)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    v_d = tl.arange(0, BLOCK_V)
    lanes = tl.arange(0, BLOCK_N)
    in_dim = (d < HEAD_DIM)[None, :]
    in_v_dim = (v_d < V_HEAD_DIM)[None, :]
    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head
    if k_scale_ptr is not None:
        logit_factor *= tl.load(k_scale_ptr + kv_head * stride_k_scale)

    for segment in tl.range(begin, end, num_stages=1):
        # 2. The segment: a unit's tiles from tile_begin to tile_end.
        reload = segment > begin
        if FIXED_SPLITS > 0:
            reload = segment >= begin
        if reload:
            segment_ptr = work_list_ptr + segments_at + segment * _SEGMENT_WORDS
            row = tl.load(segment_ptr)
            first_query = tl.load(segment_ptr + 1)
            tile_begin = tl.load(segment_ptr + 2)
            tile_end = tl.load(segment_ptr + 3)
            seq_len = tl.load(segment_ptr + 4)
            first_token = tl.load(segment_ptr + 5)
            query_len = tl.load(segment_ptr + 6)
            splits = tl.load(segment_ptr + 7)
        num_splits = splits & 0xFFFF
        split = splits >> 16

        # The unit's queries [BLOCK_M, BLOCK_D], one query head of one token each.
        num_queries = tl.minimum(query_len * GROUP - first_query, BLOCK_M)
        query = first_query + m
        token = (first_token + query // GROUP).to(tl.int64)
        head = kv_head * GROUP + query % GROUP
        q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + d[None, :]
        q = tl.load(q_ptrs, mask=(m < num_queries)[:, None] & in_dim, other=0.0)
        factor = logit_factor
        # fp8 keys are multiplied as float16: a power of two per query makes the queries fit.
        if IS_FP8 and q_ptr.dtype.element_ty != tl.float32:
            exponent = query_exponent(q.to(tl.float32))
            factor = logit_factor * exponent
            q = (q.to(tl.float32) / exponent).to(tl.float16)
        if not SCALED:
            factor = tl.maximum(factor, 1e-37)  # a factor of 0 times a masked logit of -inf is NaN
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        slopes = top
        if HAS_ALIBI:
            slopes = tl.load(slopes_ptr + head, mask=m < num_queries, other=0.0) * _LOG2E

        # Keys of the unit: from window_start, which its first token sees, to kv_end, where its last token stops.
        query_positions = seq_len - query_len + query // GROUP
        first_position = seq_len - query_len + first_query // GROUP
        kv_end = seq_len
        if CAUSAL:
            kv_end = tl.minimum(seq_len, seq_len - query_len + (first_query + num_queries - 1) // GROUP + 1)
        window_start = 0
        if HAS_WINDOW:
            window_start = tl.maximum(first_position + 1 - span, 0)
        chunk_starts = query_positions  # of each query's chunk
        if HAS_CHUNKS:
            window_start = tl.maximum(first_position, 0) // span * span
            chunk_starts = tl.maximum(query_positions, 0) // span * span
        # Tiles before whole_end are seen whole by every query, and need no mask. Only large units ask for this.
        whole_end = tile_begin
        if SKIP_MASKS and not HAS_WINDOW:
            whole_end = kv_end
            if CAUSAL:
                whole_end = tl.minimum(whole_end, first_position + 1)
            whole_end = tl.minimum(tl.maximum(whole_end // BLOCK_N, tile_begin), tile_end)
            if HAS_CHUNKS:
                last_position = seq_len - query_len + (first_query + num_queries - 1) // GROUP
                last_chunk_start = tl.maximum(last_position, 0) // span * span
                whole_end = tl.where(last_chunk_start <= tile_begin * BLOCK_N, whole_end, tile_begin)
        if PAGED:
            table_row_ptr = block_table_ptr + row.to(tl.int64) * stride_table_row
        else:
            kv_start = tl.load(block_table_ptr + row).to(tl.int64)

        # Small units keep the weights of each lane apart and add them up after the loop, which saves a reduction per
        # tile.
        if BLOCK_M == 16:
            weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        else:
            weights = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        # Page ids are read one tile ahead, so that the loads of K and V do not wait for them and are pipelined deeper.
        if PAGED:
            pages = tile_pages(table_row_ptr, tile_begin * BLOCK_N, lanes, kv_end, PAGE_SIZE, BLOCK_N)
        if SKIP_MASKS and not HAS_WINDOW:
            for tile in tl.range(tile_begin, whole_end, num_stages=NUM_STAGES):
                start = tile * BLOCK_N
                positions = start + lanes
                if PAGED:
                    k_offsets = tile_offsets(pages, start, lanes, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N)
                    v_offsets = tile_offsets(pages, start, lanes, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N)
                    pages = tile_pages(table_row_ptr, start + BLOCK_N, lanes, kv_end, PAGE_SIZE, BLOCK_N)
                else:
                    k_offsets = (kv_start + positions) * stride_k_slot
                    v_offsets = (kv_start + positions) * stride_v_slot
                k_ptrs = k_ptr + k_offsets[:, None] + d[None, :]
                v_ptrs = v_ptr + v_offsets[:, None] + v_d[None, :]
                if BLOCK_D == HEAD_DIM:
                    k = tl.load(k_ptrs)
                else:
                    k = tl.load(k_ptrs, mask=tl.broadcast_to(in_dim, [BLOCK_N, BLOCK_D]), other=0.0)
                if BLOCK_V == V_HEAD_DIM:
                    v_mask = None
                else:
                    v_mask = tl.broadcast_to(in_v_dim, [BLOCK_N, BLOCK_V])
                acc, top, weights = attend_tile(
                    q, k, v_ptrs, v_mask, acc, top, weights, positions, query_positions, chunk_starts, kv_end, factor,
                    logit_cap, span, slopes, SCALED, HAS_SOFTCAP, HAS_ALIBI, ALIBI_SQRT, HAS_WINDOW, HAS_CHUNKS, CAUSAL,
                    False, DOT_DTYPE,
                )  # fmt: skip

        for tile in tl.range(whole_end, tile_end, num_stages=NUM_STAGES):
            start = tile * BLOCK_N
            positions = start + lanes
            k_mask = (positions < kv_end)[:, None]
            if HAS_WINDOW or HAS_CHUNKS:
                k_mask &= (positions >= window_start)[:, None]
            v_mask = k_mask
            if BLOCK_D != HEAD_DIM:
                k_mask &= in_dim
            if BLOCK_V != V_HEAD_DIM:
                v_mask &= in_v_dim
            if PAGED:
                k_offsets = tile_offsets(pages, start, lanes, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N)
                v_offsets = tile_offsets(pages, start, lanes, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N)
                pages = tile_pages(table_row_ptr, start + BLOCK_N, lanes, kv_end, PAGE_SIZE, BLOCK_N)
            else:
                k_offsets = (kv_start + positions) * stride_k_slot
                v_offsets = (kv_start + positions) * stride_v_slot
            k = tl.load(k_ptr + k_offsets[:, None] + d[None, :], mask=k_mask, other=0.0)
            acc, top, weights = attend_tile(
                q, k, v_ptr + v_offsets[:, None] + v_d[None, :], v_mask, acc, top, weights, positions, query_positions,
                chunk_starts, kv_end, factor, logit_cap, span, slopes, SCALED, HAS_SOFTCAP, HAS_ALIBI, ALIBI_SQRT,
                HAS_WINDOW, HAS_CHUNKS, CAUSAL, True, DOT_DTYPE,
            )  # fmt: skip

        # 3. A whole unit: its output.
        total = weights
        if BLOCK_M == 16:
            total = tl.sum(weights, 1)
        if num_splits == 1:
            _write_output(
                out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, top, total, m, num_queries, first_token, first_query,
                kv_head, stride_v_scale, stride_out_token, stride_out_head, stride_lse_token, GROUP, V_HEAD_DIM,
                BLOCK_V,
            )  # fmt: skip
        else:
            # 4. A segment of a unit that is cut: the place of its partial result. With equal parts, part p has place 2p
            # for a unit that began in an earlier part, and place 2p + 1 for a unit that goes on in the next. A unit
            # that begins in part p therefore has places 2p + 1, 2(p + 1), 2(p + 2), ... With fixed splits a unit has a
            # place for each of its segments.
            if FIXED_SPLITS > 0:
                unit = row * ((query_len * GROUP + BLOCK_M - 1) // BLOCK_M) + first_query // BLOCK_M
                first_place = unit * FIXED_SPLITS
                next_place = first_place
                place_step = 1
            else:
                next_place = 2 * (part - split)
                first_place = next_place + 1
                place_step = 2
            _store_partial(
                partial_out_ptr, partial_lse_ptr, tl.where(split == 0, first_place, next_place + split * place_step),
                acc, top, total, m, num_queries, kv_head, num_kv_heads, V_HEAD_DIM, BLOCK_V, PARTIAL_M,
            )  # fmt: skip
            # Level 0: who arrives last at a bundle of MERGE_BUNDLE partial results merges it into the bundle's first
            # place. Level 1: who arrives last at the unit merges the bundles. Units of one bundle have level 0 only.
            leader = split // MERGE_BUNDLE * MERGE_BUNDLE
            num_bundles = (num_splits + MERGE_BUNDLE - 1) // MERGE_BUNDLE
            expected = tl.minimum(num_splits - leader, MERGE_BUNDLE)
            step = place_step
            counter = tl.where(leader == 0, first_place, next_place + leader * place_step)
            is_last = True
            for level in tl.range(0, tl.where(num_bundles > 1, 2, 1), num_stages=1):
                if level == 1:
                    leader = leader * 0
                    expected = num_bundles
                    step = place_step * MERGE_BUNDLE
                    counter = num_places + first_place
                if is_last:
                    # All threads have stored before one of them counts the arrival, for the whole device to see.
                    tl.debug_barrier()
                    counter_ptr = counters_ptr + counter * num_kv_heads + kv_head
                    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
                    is_last = arrived == expected - 1
                    if is_last:
                        tl.store(counter_ptr, 0)
                        merge_m = tl.arange(0, PARTIAL_M)
                        next_leader = next_place + leader * place_step
                        to_place = tl.where(leader == 0, first_place, next_leader)
                        merged, merged_top, merged_total = merge_partials(
                            partial_out_ptr, partial_lse_ptr, to_place, next_leader, step, merge_m, expected,
                            num_queries, kv_head, num_kv_heads, V_HEAD_DIM, BLOCK_V, PARTIAL_M, MERGE_SPLITS,
                        )  # fmt: skip
                        if (level == 0) & (num_bundles > 1):
                            # Warps may hold copies of the same loads: none may still be reading the place.
                            tl.debug_barrier()
                            _store_partial(
                                partial_out_ptr, partial_lse_ptr, to_place, merged, merged_top, merged_total, merge_m,
                                num_queries, kv_head, num_kv_heads, V_HEAD_DIM, BLOCK_V, PARTIAL_M,
                            )  # fmt: skip
                        else:
                            _write_output(
                                out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, merged, merged_top, merged_total, merge_m,
                                num_queries, first_token, first_query, kv_head, stride_v_scale, stride_out_token,
                                stride_out_head, stride_lse_token, GROUP, V_HEAD_DIM, BLOCK_V,
                            )  # fmt: skip

    # 5. Units that see nothing.
    _write_zeros(
        out_ptr, lse_ptr, sinks_ptr, work_list_ptr + zeros_at, zeros_begin, zeros_end, kv_head, stride_out_token,
        stride_out_head, stride_lse_token, GROUP, V_HEAD_DIM, BLOCK_M, BLOCK_V,
    )  # fmt: skip
