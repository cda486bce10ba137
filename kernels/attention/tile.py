"""Device helpers that the attention kernels share: where a KV tile lies, and its logits."""

from __future__ import annotations

import triton
import triton.language as tl


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
        exponential = tl.exp2(tl.minimum(logits, 64.0))  # tanh is 1 in fp32 long before, and exp2 stays finite
        logits = logit_cap * (1.0 - 2.0 / (exponential + 1.0))
    return logits
