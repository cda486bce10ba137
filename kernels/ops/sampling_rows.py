"""Second pass of sampling: pick the best token, or draw among all tokens or the tokens that min-p keeps.

A program samples one row. Rows with top-k or top-p are sampled by `sampling_truncated.py`, so that other rows do not
need its registers. That pass runs concurrently. It may start once this pass has waited for the first pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    CHUNK,
    NOWHERE,
    WORD,
    best_of,
    logits_of_words,
    min_p_floor,
    picks_tiles,
    req_values,
    row_options,
)
from graphrt.kernels.ops.sampling_passes import best_of_groups, best_score
from graphrt.kernels.types import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["num_groups", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def sample_rows_kernel(
    ptrs,
    group_best_ptr,
    changed_best_ptr,
    list_groups_ptr,
    out_ptr,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    num_groups,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a tile
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    heat, _, _, min_p, truncates = row_options(row, ptrs, vocab_size)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait, because the next pass also reads the first one's output
    if ptrs.top_k is not None:
        if truncates:
            return
    source = ptrs, req_values(row, ptrs, vocab_size, stride_logits, state_rows, bias_rows, bias_capacity, num_masks)
    at = row.to(tl.int64) * num_groups
    num_changed = tl.where(source[1][2], num_groups, 0)
    group_ptrs = (group_best_ptr + at, changed_best_ptr + at, list_groups_ptr + at, num_groups, num_changed)
    if heat > 0:
        noise_at = (tl.load(ptrs.seeds + row), tl.load(ptrs.seq_lens + row))
        floor = float("-inf")
        if ptrs.top_k is not None:
            if min_p > 0:
                plain_best, changed_best = best_of_groups(group_ptrs, GROUPS)
                floor = min_p_floor(tl.max(tl.maximum(plain_best, changed_best), 0), heat, min_p)
        token, _ = best_score(source, noise_at, group_ptrs, floor, heat, GROUPS, GROUP)
    else:
        if picks_tiles(source, heat):
            tiles = tl.arange(0, TILES)
            known = tiles * (CHUNKS * CHUNK) < vocab_size
            best = tl.load(group_ptrs[0] + tiles, mask=known, other=float("-inf"))
            groups = tl.load(group_ptrs[2] + tiles, mask=known, other=NOWHERE // GROUP)
            _, group = best_of(best, groups)
        else:
            plain_best, changed_best = best_of_groups(group_ptrs, GROUPS)
            _, group = best_of(tl.maximum(plain_best, changed_best), tl.arange(0, GROUPS))
        token = _best_token(source, group, GROUP)
    tl.store(out_ptr + row, tl.where(token < NOWHERE, token, _NO_TOKEN))


@triton.jit
def _best_token(source, group, GROUP: tl.constexpr):
    """Return the token with the highest logit, or the lowest id on ties. It is in the lowest of the best groups."""
    per_group: tl.constexpr = GROUP // WORD
    tokens, logits = logits_of_words(source, group * per_group + tl.arange(0, per_group))
    logits = tl.reshape(logits, [GROUP])
    _, token = best_of(logits, tl.where(logits > float("-inf"), tl.reshape(tokens, [GROUP]), NOWHERE))
    return token
