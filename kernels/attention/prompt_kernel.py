"""The Triton kernel for prefills, with one program per query tile and KV head, in order of decreasing work.

A query is one new token in one query head. The queries of a request that share a KV head are numbered
`token * num_queries_per_kv + head`, and BLOCK_M of them form a query tile. Each program does the following:

1. It reads its query tile from the schedule. It exits if it has no query tile, because the grid covers the padded
   sizes.
2. It loads the queries.
3. It runs the online softmax over the KV tiles that the query tile sees, in three loops: KV tiles that start before the
   window of some query, KV tiles that every query sees completely and that need no mask, and KV tiles that end after
   the last key of some query.
4. It writes the output. Queries that see no key, padding included, get zeros.

The CUDA kernel in native/prompt.cu processes the same schedule on GPUs of compute capability 9.0.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from graphrt.kernels.attention.prompt_plan import Q_TILE_WORDS
from graphrt.kernels.attention.tile import query_exponent, soft_cap, tile_offsets, tile_pages

_Q_TILE_WORDS = tl.constexpr(Q_TILE_WORDS)
_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def prompt_kernel(
    q_ptr,  # [tokens, num_kv_heads * NUM_QUERIES_PER_KV, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]; packed: [kv_tokens, num_kv_heads, HEAD_DIM]
    v_ptr,
    block_table_ptr,  # [num_reqs, max_pages]; packed: not read
    schedule_ptr,
    out_ptr,  # like q
    lse_ptr,  # [tokens, num_kv_heads * NUM_QUERIES_PER_KV] or None
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    logit_factor,
    logit_cap,
    left,
    right,
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
    PAGE_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None
    # Softcap, ALiBi and key scales need logits that are scaled before the softmax. Key scales come from a checkpoint
    # and may be 0, negative or NaN; applying them within the exponential would hide that.
    SCALED: tl.constexpr = HAS_SOFTCAP or HAS_ALIBI or k_scale_ptr is not None
    TO_HALF: tl.constexpr = IS_FP8 and q_ptr.dtype.element_ty != tl.float32
    DOT_DTYPE: tl.constexpr = tl.float16 if TO_HALF else q_ptr.dtype.element_ty

    # 1. The query tile.
    kv_head = tl.program_id(0)
    q_tile = tl.program_id(1)
    if q_tile >= tl.load(schedule_ptr):
        return
    q_tile_ptr = schedule_ptr + _Q_TILE_WORDS * (1 + q_tile)
    req = tl.load(q_tile_ptr)
    first_query = tl.load(q_tile_ptr + 1)
    first_token = tl.load(q_tile_ptr + 2)
    query_len = tl.load(q_tile_ptr + 3)
    seq_len = tl.load(q_tile_ptr + 4)
    kv_start = tl.load(q_tile_ptr + 5).to(tl.int64)

    # 2. The queries [BLOCK_M, BLOCK_D].
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    in_dim = (d < HEAD_DIM)[None, :]
    num_queries = tl.minimum(query_len * NUM_QUERIES_PER_KV - first_query, BLOCK_M)
    is_query = m < num_queries
    token = (first_token + (first_query + m) // NUM_QUERIES_PER_KV).to(tl.int64)
    head = kv_head * NUM_QUERIES_PER_KV + (first_query + m) % NUM_QUERIES_PER_KV
    q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=is_query[:, None] & in_dim, other=0.0)
    if k_scale_ptr is not None:
        logit_factor *= tl.load(k_scale_ptr + kv_head * stride_k_scale)
    factor = logit_factor
    # fp8 keys are multiplied as float16. Dividing each query by a power of two brings it into float16's range.
    if TO_HALF:
        exponent = query_exponent(q.to(tl.float32))
        factor = logit_factor * exponent
        q = (q.to(tl.float32) / exponent).to(tl.float16)
    if not SCALED:
        factor = tl.maximum(factor, 1e-37)  # a factor of 0 times a masked logit of -inf is NaN
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=is_query, other=0.0) * _LOG2E

    # 3. The KV tiles. A query at position p sees positions max(p - left, 0) to min(p + right, seq_len - 1).
    positions = seq_len - query_len + (first_query + m) // NUM_QUERIES_PER_KV
    first = seq_len - query_len + first_query // NUM_QUERIES_PER_KV
    last = seq_len - query_len + (first_query + num_queries - 1) // NUM_QUERIES_PER_KV
    seen_from = tl.maximum(first - left, 0)
    seen_to = tl.maximum(tl.minimum(last + right + 1, seq_len), 0)
    begin = seen_from // BLOCK_N
    end = tl.maximum((seen_to + BLOCK_N - 1) // BLOCK_N, begin)
    whole_from = begin
    if HAS_LEFT:
        whole_from = tl.minimum((tl.maximum(last - left, 0) + BLOCK_N - 1) // BLOCK_N, end)
    whole_to = tl.maximum(tl.minimum(first + right + 1, seq_len), 0) // BLOCK_N
    whole_to = tl.maximum(tl.minimum(whole_to, end), whole_from)

    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head
    table_row_ptr = block_table_ptr
    # Load page ids one KV tile ahead, so that loads of K and V do not wait for them and are pipelined deeper.
    if PAGED:
        table_row_ptr += tl.maximum(req, 0).to(tl.int64) * stride_table_row
        pages = tile_pages(table_row_ptr, begin * BLOCK_N, lanes, seen_to, PAGE_SIZE, BLOCK_N)
    else:
        pages = lanes
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Units are log 2. `acc` holds weighted sums of values, not divided by the sum of weights.
    bounds = (begin, whole_from, whole_to, end)
    for part in tl.static_range(0 if HAS_LEFT else 1, 3):
        for tile in tl.range(bounds[part], bounds[part + 1], num_stages=NUM_STAGES):
            start = tile * BLOCK_N
            keys = start + lanes
            if PAGED:
                k_offsets = tile_offsets(pages, start, lanes, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N)
                v_offsets = tile_offsets(pages, start, lanes, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N)
                pages = tile_pages(table_row_ptr, start + BLOCK_N, lanes, seen_to, PAGE_SIZE, BLOCK_N)
            else:
                k_offsets = (kv_start + keys) * stride_k_slot
                v_offsets = (kv_start + keys) * stride_v_slot
            k_ptrs = k_ptr + k_offsets[:, None] + d[None, :]
            v_ptrs = v_ptr + v_offsets[:, None] + d[None, :]
            # Mask loads, because K and V that the query tile does not see may be NaN, and 0 times NaN is NaN.
            if part != 1:
                mask = ((keys >= seen_from) & (keys < seen_to))[:, None] & in_dim
                k = tl.load(k_ptrs, mask=mask, other=0.0)
            elif BLOCK_D != HEAD_DIM:
                mask = tl.broadcast_to(in_dim, [BLOCK_N, BLOCK_D])
                k = tl.load(k_ptrs, mask=mask, other=0.0)
            else:
                k = tl.load(k_ptrs)
            logits = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
            if SCALED:
                logits *= factor
            if HAS_SOFTCAP:
                logits = soft_cap(logits, logit_cap)
            if HAS_ALIBI:
                distance = tl.abs(positions[:, None] - keys[None, :]).to(tl.float32)
                if ALIBI_SQRT:
                    distance = tl.sqrt(distance)
                logits -= slopes[:, None] * distance
            if part != 1:
                visible = (keys < seq_len)[None, :] & (keys[None, :] <= positions[:, None] + right)
                if HAS_LEFT:
                    visible &= keys[None, :] >= positions[:, None] - left
                logits = tl.where(visible, logits, float("-inf"))
            # Without SCALED, the factor (> 0) is applied within the exponential at no cost.
            peaks = tl.max(logits, 1, keep_dims=True)
            if not SCALED:
                peaks *= factor
                logits *= factor
            new_top = tl.maximum(top, tl.reshape(peaks, [BLOCK_M]))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # if no key was seen, -inf - -inf is NaN
            rescale = tl.exp2(top - base)
            weights = tl.exp2(logits - base[:, None])
            total = total * rescale + tl.sum(weights, 1)
            if part != 1 or BLOCK_D != HEAD_DIM:
                v = tl.load(v_ptrs, mask=mask, other=0.0)
            else:
                v = tl.load(v_ptrs)
            acc = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), acc * rescale[:, None], input_precision="ieee")
            top = new_top

    # 4. The output. A sink is an extra logit without a value, so it changes only the sum of weights.
    if sinks_ptr is not None:
        if req >= 0:  # padding has no sinks
            sink = tl.load(sinks_ptr + head, mask=is_query, other=float("-inf")) * _LOG2E
            new_top = tl.maximum(top, sink)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2(top - base)
            total = total * rescale + tl.exp2(sink - base)
            acc = acc * rescale[:, None]
            top = new_top
    divisor = tl.where(total == 0.0, 1.0, total)  # a token that sees no key has output 0
    if lse_ptr is not None:  # -inf if no key is seen, like top
        tl.store(lse_ptr + token * stride_lse_token + head, (top + tl.log2(divisor)) * _LN2, mask=is_query)
    scale = 1.0 / divisor
    if v_scale_ptr is not None:
        scale *= tl.load(v_scale_ptr + kv_head * stride_v_scale)
    out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + d[None, :]
    tl.store(out_ptrs, (acc * scale[:, None]).to(out_ptr.dtype.element_ty), mask=is_query[:, None] & in_dim)
