"""The attention kernel, with one launch per layer for decode requests, mixed batches and contiguous K and V.

A query is one new token in one query head. The queries of a request that share a KV head are numbered
`token * num_queries_per_kv + head`, so that K and V are read once for all of them. BLOCK_M consecutive queries form a
query tile. docs/attention.md shows an example.

The work list divides the KV tiles of all query tiles into equal work partitions, one per program and KV head, as in
stream-K. A partition boundary within a query tile splits its KV. Each program does the following:

1. It reads the range of KV splits of its partition, and the first split.
2. For each split, it loads the queries, then runs the online softmax over the KV tiles of the split.
3. If the split covers the whole query tile, the program writes the output.
4. Otherwise it stores the partial result, divided by its sum of weights, and the log-sum-exp, and counts its arrival.
   The last program to arrive merges all partial results of the query tile (fix-up) and resets the counter to 0. If a
   query tile has many splits, splits are merged within merge groups first, then the results of the groups.
5. It writes zeros to its share of the query tiles that see no KV.

Merges add in split order, so the result does not depend on the order of arrival. No program waits for another program,
so the grid may exceed the number of programs that the device runs concurrently.

Split-KV attention: Flash-Decoding (Dao et al. 2023). Equal partitions across requests: stream-K (Osama et al. 2023) and
LeanAttention (Sanovar et al. 2024).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from graphrt.kernels.attention.tile import merge_partials, query_exponent, soft_cap, tile_offsets, tile_pages

PARTITION_WORDS = 16
SPLIT_WORDS = 8
"""int32 words per partition and per KV split in the work list; work_list.py documents them."""

_PARTITION_WORDS = tl.constexpr(PARTITION_WORDS)
_SPLIT_WORDS = tl.constexpr(SPLIT_WORDS)
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
    NUM_QUERIES_PER_KV: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Finalize the queries of a query tile, and store their output and log-sum-exp.

    acc     [*, BLOCK_V]  weighted sums of values, not divided by the sum of weights
    top     [*]  reference maximum: weight = exp2(logit - top)
    total   [*]  sums of the weights
    m       [*]  indices of the queries within the query tile
    """
    d = tl.arange(0, BLOCK_V)
    query = first_query + m
    token = (first_token + query // NUM_QUERIES_PER_KV).to(tl.int64)
    head = kv_head * NUM_QUERIES_PER_KV + query % NUM_QUERIES_PER_KV
    mask = m < num_queries
    # A sink is an extra logit without a value, so it changes only the sum of weights.
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=mask, other=float("-inf")) * _LOG2E
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.exp2(sink - base)
        acc = acc * rescale[:, None]
        top = new_top
    if lse_ptr is not None:  # -inf if no key is seen, like top
        lse = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * _LN2
        tl.store(lse_ptr + token * stride_lse_token + head, lse, mask=mask)
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)  # a token that sees no key has output 0
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
    partial_index,
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
    """Store a partial result, divided by its sum of weights, and its log-sum-exp in the workspace."""
    d = tl.arange(0, BLOCK_V)
    divisor = tl.where(total == 0.0, 1.0, total)
    partial_query = (partial_index * num_kv_heads + kv_head) * PARTIAL_M + m
    # The log-sum-exp is -inf if no key is seen, like top.
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
    NUM_QUERIES_PER_KV: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write zeros to query tiles that see no KV: padding requests, padding tokens, tokens before position 0.

    begin, end   this program's share of these query tiles
    """
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_V)
    for entry in tl.range(begin, end, num_stages=1):
        first_token = tl.load(zeros_ptr + entry * 3)
        first_query = tl.load(zeros_ptr + entry * 3 + 1)
        marked_queries = tl.load(zeros_ptr + entry * 3 + 2)  # negative for padding tokens, which have no sinks
        num_queries = tl.abs(marked_queries)
        query = first_query + m
        token = (first_token + query // NUM_QUERIES_PER_KV).to(tl.int64)
        head = kv_head * NUM_QUERIES_PER_KV + query % NUM_QUERIES_PER_KV
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
    q_ptr,  # [tokens, num_kv_heads * NUM_QUERIES_PER_KV, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]; contiguous: [kv_tokens, num_kv_heads, HEAD_DIM]
    v_ptr,  # like k_ptr, with heads of V_HEAD_DIM
    block_table_ptr,  # [num_reqs, max_pages]; contiguous: kv_start_loc [num_reqs + 1]
    work_list_ptr,  # partitions, KV splits, query tiles that see no KV
    out_ptr,  # [tokens, num_kv_heads * NUM_QUERIES_PER_KV, V_HEAD_DIM]
    lse_ptr,  # [tokens, num_kv_heads * NUM_QUERIES_PER_KV] or None
    partial_out_ptr,  # [max_partials, num_kv_heads, PARTIAL_M, V_HEAD_DIM]
    partial_lse_ptr,  # [max_partials, num_kv_heads, PARTIAL_M]
    counters_ptr,  # [2, max_partials, num_kv_heads]: arrivals of a merge group, of a query tile
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    tree_masks_ptr,  # [tokens] or None: int64, bit i of a token's mask is set if it sees token i of its request
    kv_limits_ptr,  # [tokens] or None: int32, number of keys that a token sees
    splits_at,
    zeros_at,
    max_partials,
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
    NUM_QUERIES_PER_KV: tl.constexpr,
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
    MERGE_GROUP_SIZE: tl.constexpr,
):
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None
    # Softcap, ALiBi and key scales need logits that are scaled before the softmax. Key scales come from a checkpoint
    # and may be 0, negative or NaN; applying them within the exponential would hide that.
    SCALED: tl.constexpr = HAS_SOFTCAP or HAS_ALIBI or k_scale_ptr is not None
    DOT_DTYPE: tl.constexpr = tl.float16 if IS_FP8 and q_ptr.dtype.element_ty != tl.float32 else q_ptr.dtype.element_ty

    # Strides are in units of STRIDE_UNIT elements, so that the compiler knows their divisibility.
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

    # 1. The work partition.
    kv_head = tl.program_id(0)
    partition = tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    partition_ptr = work_list_ptr + partition * _PARTITION_WORDS
    begin = tl.load(partition_ptr)
    end = tl.load(partition_ptr + _PARTITION_WORDS + 2)  # this partition's end is stored in the next partition
    zeros_begin = tl.load(partition_ptr + 1)
    zeros_end = tl.load(partition_ptr + _PARTITION_WORDS + 1)
    # The partition has a copy of its first split, so that a program with one split waits for only one load.
    req = tl.load(partition_ptr + 8)
    first_query = tl.load(partition_ptr + 9)
    tile_begin = tl.load(partition_ptr + 10)
    tile_end = tl.load(partition_ptr + 11)
    seq_len = tl.load(partition_ptr + 12)
    first_token = tl.load(partition_ptr + 13)
    query_len = tl.load(partition_ptr + 14)
    split_word = tl.load(partition_ptr + 15)

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

    for entry in tl.range(begin, end, num_stages=1):
        # 2. The KV split: the KV tiles tile_begin to tile_end of a query tile.
        reload = entry > begin
        if FIXED_SPLITS > 0:
            reload = entry >= begin
        if reload:
            entry_ptr = work_list_ptr + splits_at + entry * _SPLIT_WORDS
            req = tl.load(entry_ptr)
            first_query = tl.load(entry_ptr + 1)
            tile_begin = tl.load(entry_ptr + 2)
            tile_end = tl.load(entry_ptr + 3)
            seq_len = tl.load(entry_ptr + 4)
            first_token = tl.load(entry_ptr + 5)
            query_len = tl.load(entry_ptr + 6)
            split_word = tl.load(entry_ptr + 7)
        num_splits = split_word & 0xFFFF
        split_index = split_word >> 16

        # The queries of the query tile [BLOCK_M, BLOCK_D].
        num_queries = tl.minimum(query_len * NUM_QUERIES_PER_KV - first_query, BLOCK_M)
        query = first_query + m
        token = (first_token + query // NUM_QUERIES_PER_KV).to(tl.int64)
        head = kv_head * NUM_QUERIES_PER_KV + query % NUM_QUERIES_PER_KV
        q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + d[None, :]
        q = tl.load(q_ptrs, mask=(m < num_queries)[:, None] & in_dim, other=0.0)
        factor = logit_factor
        # fp8 keys are multiplied as float16. Dividing each query by a power of two brings it into float16's range.
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

        # The query tile sees keys from window_start, for its first token, to kv_end, for its last token.
        query_positions = seq_len - query_len + query // NUM_QUERIES_PER_KV
        if tree_masks_ptr is not None:
            masks = tl.load(tree_masks_ptr + token, mask=m < num_queries, other=0)
            if HAS_WINDOW:  # the depth of a token in its tree is the number of its ancestors
                seen = (masks[:, None] >> tl.arange(0, 64)[None, :]) & 1
                query_positions = seq_len - query_len - 1 + tl.sum(seen, 1).to(tl.int32)
        if kv_limits_ptr is not None:
            kv_limits = tl.load(kv_limits_ptr + token, mask=m < num_queries, other=0)
        first_position = seq_len - query_len + first_query // NUM_QUERIES_PER_KV
        kv_end = seq_len
        if CAUSAL:
            kv_end = tl.minimum(
                seq_len, seq_len - query_len + (first_query + num_queries - 1) // NUM_QUERIES_PER_KV + 1
            )
        window_start = 0
        if HAS_WINDOW:
            window_start = tl.maximum(first_position + 1 - span, 0)
            if tree_masks_ptr is not None:  # the first token of a query tile may be an early one of its tree
                window_start = tl.maximum(seq_len - query_len + 1 - span, 0)
        chunk_starts = query_positions  # a placeholder without chunks
        if HAS_CHUNKS:
            window_start = tl.maximum(first_position, 0) // span * span
            chunk_starts = tl.maximum(query_positions, 0) // span * span
        # Every query sees all KV tiles before whole_end, so these need no mask. Only large query tiles skip masks.
        whole_end = tile_begin
        if SKIP_MASKS and not HAS_WINDOW:
            whole_end = kv_end
            if CAUSAL:
                whole_end = tl.minimum(whole_end, first_position + 1)
            whole_end = tl.minimum(tl.maximum(whole_end // BLOCK_N, tile_begin), tile_end)
            if HAS_CHUNKS:
                last_position = seq_len - query_len + (first_query + num_queries - 1) // NUM_QUERIES_PER_KV
                last_chunk_start = tl.maximum(last_position, 0) // span * span
                whole_end = tl.where(last_chunk_start <= tile_begin * BLOCK_N, whole_end, tile_begin)
        if PAGED:
            table_row_ptr = block_table_ptr + req.to(tl.int64) * stride_table_row
        else:
            kv_start = tl.load(block_table_ptr + req).to(tl.int64)

        # Small query tiles accumulate the weights of each lane and reduce them once after the loop instead of once per
        # KV tile.
        if BLOCK_M == 16:
            weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        else:
            weights = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        # Load page ids one KV tile ahead, so that loads of K and V do not wait for them and are pipelined deeper.
        if PAGED:
            pages = tile_pages(table_row_ptr, tile_begin * BLOCK_N, lanes, kv_end, PAGE_SIZE, BLOCK_N)
        # The online softmax in units of log 2, first without, then with masks. `acc` holds weighted sums of values, not
        # divided by the sum of weights; `top` holds the largest logits so far.
        bounds = (tile_begin, whole_end, tile_end)
        for part in tl.static_range(0 if SKIP_MASKS and not HAS_WINDOW else 1, 2):
            for tile in tl.range(bounds[part], bounds[part + 1], num_stages=NUM_STAGES):
                start = tile * BLOCK_N
                positions = start + lanes
                if part == 1:
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
                k_ptrs = k_ptr + k_offsets[:, None] + d[None, :]
                if part == 1:  # the order of these addresses and loads affects the register count
                    k = tl.load(k_ptrs, mask=k_mask, other=0.0)
                    v_ptrs = v_ptr + v_offsets[:, None] + v_d[None, :]
                else:
                    v_ptrs = v_ptr + v_offsets[:, None] + v_d[None, :]
                    if BLOCK_D == HEAD_DIM:
                        k = tl.load(k_ptrs)
                    else:
                        k = tl.load(k_ptrs, mask=tl.broadcast_to(in_dim, [BLOCK_N, BLOCK_D]), other=0.0)
                logits = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
                if SCALED:
                    logits *= factor
                if HAS_SOFTCAP:
                    logits = soft_cap(logits, logit_cap)
                if HAS_ALIBI:
                    distance = tl.abs(query_positions[:, None] - positions[None, :]).to(tl.float32)
                    if ALIBI_SQRT:
                        distance = tl.sqrt(distance)
                    logits -= slopes[:, None] * distance
                if part == 1:
                    visible = (positions < kv_end)[None, :]
                    if tree_masks_ptr is not None:
                        place = positions - (seq_len - query_len)  # in the step
                        bit = tl.minimum(tl.maximum(place, 0), 63)
                        visible &= (place < 0)[None, :] | (((masks[:, None] >> bit[None, :]) & 1) != 0)
                    elif CAUSAL:
                        visible &= positions[None, :] <= query_positions[:, None]
                    if kv_limits_ptr is not None:
                        visible &= positions[None, :] < kv_limits[:, None]
                    if HAS_WINDOW:
                        visible &= positions[None, :] > query_positions[:, None] - span
                    if HAS_CHUNKS:
                        visible &= positions[None, :] >= chunk_starts[:, None]
                    logits = tl.where(visible, logits, float("-inf"))
                # Without SCALED, the factor (> 0) is applied within the exponential at no cost.
                if SCALED:
                    new_top = tl.maximum(top, tl.max(logits, 1))
                else:
                    new_top = tl.maximum(top, tl.reshape(tl.max(logits, 1, keep_dims=True) * factor, [BLOCK_M]))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)  # if no key was seen, -inf - -inf is NaN
                rescale = tl.exp2(top - base)
                if SCALED:
                    probabilities = tl.exp2(logits - base[:, None])
                else:
                    probabilities = tl.exp2(logits * factor - base[:, None])
                if BLOCK_M == 16:
                    weights = weights * rescale[:, None] + probabilities
                else:
                    weights = weights * rescale + tl.sum(probabilities, 1)
                # Mask the load of V: the unfilled tail of a page may contain NaN, and a weight of 0 times NaN is NaN.
                if part == 1:
                    v = tl.load(v_ptrs, mask=v_mask, other=0.0)
                elif BLOCK_V == V_HEAD_DIM:
                    v = tl.load(v_ptrs)
                else:
                    v = tl.load(v_ptrs, mask=tl.broadcast_to(in_v_dim, [BLOCK_N, BLOCK_V]), other=0.0)
                acc = tl.dot(
                    probabilities.to(DOT_DTYPE), v.to(DOT_DTYPE), acc * rescale[:, None], input_precision="ieee"
                )
                top = new_top

        # 3. If the split covers the whole query tile, write the output.
        total = weights
        if BLOCK_M == 16:
            total = tl.sum(weights, 1)
        if num_splits == 1:
            _write_output(
                out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, top, total, m, num_queries, first_token, first_query,
                kv_head, stride_v_scale, stride_out_token, stride_out_head, stride_lse_token, NUM_QUERIES_PER_KV,
                V_HEAD_DIM, BLOCK_V,
            )  # fmt: skip
        else:
            # 4. Store a partial result. With equal partitions, partition p has two indices: 2p for a query tile that
            # began in an earlier partition, and 2p + 1 for one that continues in the next partition. A query tile that
            # begins in partition p therefore uses the indices 2p + 1, 2(p + 1), 2(p + 2), ... With fixed splits, a
            # query tile has one index per split.
            if FIXED_SPLITS > 0:
                q_tile = req * ((query_len * NUM_QUERIES_PER_KV + BLOCK_M - 1) // BLOCK_M) + first_query // BLOCK_M
                first_partial = q_tile * FIXED_SPLITS
                next_partial = first_partial
                partial_step = 1
            else:
                next_partial = 2 * (partition - split_index)
                first_partial = next_partial + 1
                partial_step = 2
            _store_partial(
                partial_out_ptr, partial_lse_ptr,
                tl.where(split_index == 0, first_partial, next_partial + split_index * partial_step),
                acc, top, total, m, num_queries, kv_head, num_kv_heads, V_HEAD_DIM, BLOCK_V, PARTIAL_M,
            )  # fmt: skip
            # Level 0: the last program to arrive in a merge group of MERGE_GROUP_SIZE splits merges the group into the
            # partial result of its first split. Level 1: the last program of the query tile merges the groups. A query
            # tile with one group needs only level 0.
            leader = split_index // MERGE_GROUP_SIZE * MERGE_GROUP_SIZE
            num_merge_groups = (num_splits + MERGE_GROUP_SIZE - 1) // MERGE_GROUP_SIZE
            expected = tl.minimum(num_splits - leader, MERGE_GROUP_SIZE)
            step = partial_step
            counter = tl.where(leader == 0, first_partial, next_partial + leader * partial_step)
            is_last = True
            for level in tl.range(0, tl.where(num_merge_groups > 1, 2, 1), num_stages=1):
                if level == 1:
                    leader = leader * 0
                    expected = num_merge_groups
                    step = partial_step * MERGE_GROUP_SIZE
                    counter = max_partials + first_partial
                if is_last:
                    # All threads must have stored before one of them counts the arrival for the whole device.
                    tl.debug_barrier()
                    counter_ptr = counters_ptr + counter * num_kv_heads + kv_head
                    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
                    is_last = arrived == expected - 1
                    if is_last:
                        tl.store(counter_ptr, 0)
                        merge_m = tl.arange(0, PARTIAL_M)
                        next_leader = next_partial + leader * partial_step
                        to_partial = tl.where(leader == 0, first_partial, next_leader)
                        merged, merged_top, merged_total = merge_partials(
                            partial_out_ptr, partial_lse_ptr, to_partial, next_leader, step, merge_m, expected,
                            num_queries, kv_head, num_kv_heads, V_HEAD_DIM, BLOCK_V, PARTIAL_M, MERGE_SPLITS,
                        )  # fmt: skip
                        if (level == 0) & (num_merge_groups > 1):
                            # Several warps may load the same values, so wait until none reads the partial result.
                            tl.debug_barrier()
                            _store_partial(
                                partial_out_ptr, partial_lse_ptr, to_partial, merged, merged_top, merged_total, merge_m,
                                num_queries, kv_head, num_kv_heads, V_HEAD_DIM, BLOCK_V, PARTIAL_M,
                            )  # fmt: skip
                        else:
                            _write_output(
                                out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, merged, merged_top, merged_total, merge_m,
                                num_queries, first_token, first_query, kv_head, stride_v_scale, stride_out_token,
                                stride_out_head, stride_lse_token, NUM_QUERIES_PER_KV, V_HEAD_DIM, BLOCK_V,
                            )  # fmt: skip

    # 5. Query tiles that see no KV.
    _write_zeros(
        out_ptr, lse_ptr, sinks_ptr, work_list_ptr + zeros_at, zeros_begin, zeros_end, kv_head, stride_out_token,
        stride_out_head, stride_lse_token, NUM_QUERIES_PER_KV, V_HEAD_DIM, BLOCK_M, BLOCK_V,
    )  # fmt: skip
