"""Device functions of the attention kernels: addresses of a KV tile, its logits, and the online softmax over it."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))
_HALF_LN_2 = math.log(2) / 2
# The Taylor series of tanh(x ln(2) / 2) to the seventh power; below 1/4 its relative error is 3e-7.
_TANH_1 = tl.constexpr(_HALF_LN_2)
_TANH_3 = tl.constexpr(-(_HALF_LN_2**3) / 3)
_TANH_5 = tl.constexpr(2 * _HALF_LN_2**5 / 15)
_TANH_7 = tl.constexpr(-17 * _HALF_LN_2**7 / 315)
_SERIES_BELOW = tl.constexpr((0.25 / _HALF_LN_2) ** 2)


@triton.jit
def tile_pages(table_row_ptr, tile_start, lanes, kv_end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page ids of a KV tile: [BLOCK_N], or a scalar if the tile is within one page.

    table_row_ptr   the request's page ids in the block table
    tile_start      first position of the tile, a multiple of BLOCK_N
    lanes           arange(0, BLOCK_N)
    kv_end          page ids of positions at and above kv_end are not read; their lanes get page 0
    """
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_row_ptr + tile_start // PAGE_SIZE, mask=tile_start < kv_end, other=0)
    else:
        positions = tile_start + lanes
        return tl.load(table_row_ptr + positions // PAGE_SIZE, mask=positions < kv_end, other=0)


@triton.jit
def tile_offsets(pages, tile_start, lanes, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the cache offset, int64 [BLOCK_N], of each position of a KV tile, given its page ids `pages`."""
    if PAGE_SIZE % BLOCK_N == 0:
        slots = tile_start % PAGE_SIZE + lanes
    else:
        slots = (tile_start + lanes) % PAGE_SIZE
    return pages.to(tl.int64) * stride_page + slots.to(tl.int64) * stride_slot


@triton.jit
def soft_cap(logits, logit_cap):
    """Return cap * tanh(t), where `logits` are 2 log2(e) t, as scaled by `logit_constants`."""
    # tanh(t) = 1 - 2 / (exp2(logit) + 1). Above 64 it is 1 in float32, and exp2 is still finite. Near 0 the difference
    # loses precision, so a series replaces it. NaN is kept.
    exponential = tl.exp2(tl.minimum(logits, 64.0, propagate_nan=tl.PropagateNan.ALL))
    square = logits * logits
    series = logits * (_TANH_1 + square * (_TANH_3 + square * (_TANH_5 + square * _TANH_7)))
    return logit_cap * tl.where(square < _SERIES_BELOW, series, 1.0 - 2.0 / (exponential + 1.0))


@triton.jit
def query_exponent(q):
    """Return a power of two per query, [BLOCK_M, 1], so that the query divided by it fits in float16."""
    peak = tl.max(tl.abs(q), 1)
    return tl.exp2(tl.minimum(tl.ceil(tl.log2(tl.maximum(peak, 1e-30))), 127.0))[:, None]


@triton.jit
def merge_partials(
    partial_out_ptr,
    partial_lse_ptr,
    first_partial,
    next_partial,
    partial_step,
    m,
    num_partials,
    num_queries,
    kv_head,
    num_kv_heads,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTIAL_M: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    """Merge the partial results of queries `m`, weighted by exp2(log-sum-exp), in the order of the splits.

    first_partial   index of the first partial result; the i-th one after it is next_partial + i * partial_step
    num_partials    number of partial results; MERGE_SPLITS are loaded at a time
    num_queries     queries of the query tile

    Returns acc [PARTIAL_M, BLOCK_V], not divided by the sum of weights, top and total [PARTIAL_M].

    Queries are the first dimension, so that a warp has all partial results of a query and sums within its registers.
    The loads are `.cg`, which bypasses L1, because L1 may have stale partial results of an earlier layer.
    """
    d = tl.arange(0, BLOCK_V)
    acc = tl.zeros([PARTIAL_M, BLOCK_V], tl.float32)
    top = tl.full([PARTIAL_M], float("-inf"), tl.float32)
    total = tl.zeros([PARTIAL_M], tl.float32)
    for start in tl.range(0, num_partials, MERGE_SPLITS, num_stages=1):
        splits = start + tl.arange(0, MERGE_SPLITS)
        mask = (m < num_queries)[:, None] & (splits < num_partials)[None, :]
        partial_indices = tl.where(splits == 0, first_partial, next_partial + splits * partial_step)
        at = ((partial_indices * num_kv_heads + kv_head) * PARTIAL_M)[None, :] + m[:, None]
        lses = tl.load(partial_lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        outs = tl.load(
            partial_out_ptr + (at.to(tl.int64) * V_HEAD_DIM)[:, :, None] + d[None, None, :],
            mask=mask[:, :, None] & (d < V_HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lses, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - base)
        shares = tl.exp2(lses - base[:, None])
        total = total * rescale + tl.sum(shares, 1)
        acc = acc * rescale[:, None] + tl.sum(shares[:, :, None] * outs, 1)
        top = new_top
    return acc, top, total
