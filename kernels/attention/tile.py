"""Device helpers that the attention kernels share: where a KV tile lies, and its logits."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_HALF_LN_2 = math.log(2) / 2
# The Taylor series of tanh(x ln(2) / 2) to its seventh power; below 1/4 the rest is 3e-7 of the value.
_TANH_1 = tl.constexpr(_HALF_LN_2)
_TANH_3 = tl.constexpr(-(_HALF_LN_2**3) / 3)
_TANH_5 = tl.constexpr(2 * _HALF_LN_2**5 / 15)
_TANH_7 = tl.constexpr(-17 * _HALF_LN_2**7 / 315)
_SERIES_BELOW = tl.constexpr((0.25 / _HALF_LN_2) ** 2)


@triton.jit
def tile_pages(table_row_ptr, tile_start, lanes, seq_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of a KV tile: [BLOCK_N], or a scalar where the tile lies within one page.

    table_row_ptr   the row's line of the block table
    tile_start      first position of the tile, a multiple of BLOCK_N
    lanes           arange(0, BLOCK_N)
    seq_len         columns of positions from here on are not read; their lanes get page 0
    """
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_row_ptr + tile_start // PAGE_SIZE, mask=tile_start < seq_len, other=0)
    else:
        positions = tile_start + lanes
        return tl.load(table_row_ptr + positions // PAGE_SIZE, mask=positions < seq_len, other=0)


@triton.jit
def tile_offsets(pages, tile_start, lanes, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offset in a cache (int64 [BLOCK_N]) of each position of a KV tile, whose page ids are `pages`."""
    if PAGE_SIZE % BLOCK_N == 0:
        slots = tile_start % PAGE_SIZE + lanes
    else:
        slots = (tile_start + lanes) % PAGE_SIZE
    return pages.to(tl.int64) * stride_page + slots.to(tl.int64) * stride_slot


@triton.jit
def tile_logits(q, k, logit_factor, logit_cap, HAS_SOFTCAP: tl.constexpr):
    """Logits of a tile in units of log 2, fp32 [BLOCK_M, BLOCK_N]; the factors are those of `logit_constants`."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * logit_factor
    if HAS_SOFTCAP:
        # tanh(t) with t = logits * ln(2) / 2. It is 1 in fp32 long before 64, where exp2 is still finite. Near 0 the
        # quotient cancels, so a series stands in; NaN stays NaN.
        exponential = tl.exp2(tl.minimum(logits, 64.0, propagate_nan=tl.PropagateNan.ALL))
        square = logits * logits
        series = logits * (_TANH_1 + square * (_TANH_3 + square * (_TANH_5 + square * _TANH_7)))
        logits = logit_cap * tl.where(square < _SERIES_BELOW, series, 1.0 - 2.0 / (exponential + 1.0))
    return logits
