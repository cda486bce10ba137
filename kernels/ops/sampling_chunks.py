"""First pass of sampling, over all logits: the highest logit of each group of tokens, and its mass for top-p.

For greedy rows this pass writes only the best group of each tile, and so a fiftieth of the data.

A program reads a tile of one row. It issues all loads before it waits for any load, and takes two to five instructions
per token. More instructions would take longer than the read itself, so it skips the tokens that mask, bias and
penalties change. Other programs of the same launch, or a concurrent kernel (`sampling_native.py`), find these by their
bits and process them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    CHUNK,
    NOWHERE,
    WORD,
    best_of,
    bits_of,
    finite,
    has_bit,
    next_changed,
    picks_tiles,
    processes_late,
    rate_of,
    req_values,
    row_options,
    split_bits,
    split_words,
    weight,
)

CHANGED_WORDS = 512
"""Words of 32 tokens in which a program looks for changed tokens."""


@triton.jit(do_not_specialize=["num_groups", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def sample_chunks_kernel(
    ptrs,
    group_best_ptr,
    group_mass_ptr,
    plain_words_ptr,
    changed_best_ptr,
    changed_mass_ptr,
    list_groups_ptr,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    num_groups,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a tile
    CHANGED_WORDS: tl.constexpr,  # 0: a concurrent kernel finds the changed tokens
    PROCESSES: tl.constexpr,  # whether rows may have changed tokens
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PROCESSES and CHANGED_WORDS:  # programs with dependent loads start first
        part -= tl.cdiv(num_groups * (GROUP // WORD), CHANGED_WORDS)
    tile: tl.constexpr = CHUNKS * CHUNK
    raw = _load_tile(ptrs.logits + row.to(tl.int64) * stride_logits, part * tile, vocab_size, tile)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    source = ptrs, req_values(row, ptrs, vocab_size, stride_logits, state_rows, bias_rows, bias_capacity, num_masks)
    heat, top_k, top_p, min_p, truncates = row_options(row, ptrs, vocab_size)
    rate = rate_of(heat)
    weighs = False
    if ptrs.top_k is not None:
        # top-p without top-k and min-p needs the mass of all tokens
        weighs = (heat > 0) & (top_p < 1) & (top_k == 0) & (min_p == 0)
    leaves_out = False  # whether the tile's result excludes changed tokens
    if PROCESSES:
        leaves_out = source[1][2] != 0
        if CHANGED_WORDS == 0 and ptrs.top_k is not None:
            leaves_out &= ~processes_late(source, top_k, truncates)
    at = row.to(tl.int64) * num_groups
    mass_row_ptr = group_mass_ptr
    if group_mass_ptr is not None:
        mass_row_ptr = group_mass_ptr + at
    if part >= 0:
        of_tile = (group_best_ptr + at, list_groups_ptr + at)
        _measure_tile(source, raw, of_tile, mass_row_ptr, num_groups, heat, weighs, leaves_out, part, GROUP, PROCESSES)
    elif PROCESSES and CHANGED_WORDS:
        if source[1][2]:
            changed_mass_row_ptr = changed_mass_ptr
            if changed_mass_ptr is not None:
                changed_mass_row_ptr = changed_mass_ptr + at
            of_changed = (plain_words_ptr + at * (GROUP // WORD), changed_best_ptr + at)
            _measure_changed(
                source,
                of_changed,
                changed_mass_row_ptr,
                num_groups,
                rate,
                weighs,
                tl.program_id(1),
                GROUP,
                CHANGED_WORDS,
            )
    if OVERLAPS and PROCESSES and CHANGED_WORDS == 0:
        # The next kernel waits for this kernel only, so this kernel waits for sample_split. Only the last program
        # waits, because a waiting program blocks others from its multiprocessor.
        if (row == tl.num_programs(0) - 1) & (part == tl.num_programs(1) - 1):
            tl.extra.cuda.gdc_wait()


@triton.jit
def _load_tile(row_ptr, first, vocab_size, tile: tl.constexpr):
    """Return [words, 32] logits of a tile, -inf beyond the vocabulary. Only the last tile has a mask.

    No other program reads them, so they are evicted first, and data that all rows use stays in the cache.
    """
    tokens = first + tl.arange(0, tile // WORD)[:, None] * WORD + tl.arange(0, 32)[None, :]
    if (first >= 0) & (first + tile <= vocab_size):
        raw = tl.load(row_ptr + tokens, eviction_policy="evict_first")
    else:
        raw = tl.load(row_ptr + tokens, mask=(tokens >= 0) & (tokens < vocab_size), other=float("-inf"))
    return raw


@triton.jit
def _measure_tile(
    source,
    raw,
    outputs,
    mass_row_ptr,
    num_groups,
    heat,
    weighs,
    leaves_out,
    part,
    GROUP: tl.constexpr,
    PROCESSES: tl.constexpr,
):
    """Write the highest logit of each group, and with `weighs` the group's mass relative to it.

    With `leaves_out`, changed tokens are left out. Neither value depends on the tile. Maxima ignore NaN, so the maxima
    are enough to find NaN. For a greedy row without changed tokens, the tile's best group and its logit are written.
    """
    best_row_ptr, tile_groups_row_ptr = outputs
    num_words: tl.constexpr = raw.shape[0]
    per_group: tl.constexpr = GROUP // WORD
    per_tile: tl.constexpr = num_words // per_group
    logits = raw.to(tl.float32)
    if PROCESSES:
        words = part * num_words + tl.arange(0, num_words)
        words = tl.where((words < num_groups * per_group) & leaves_out, words, NOWHERE // WORD)
        bits = bits_of(source, words)  # loaded before the branch
        if leaves_out:
            plain, _, _ = split_bits(source, words, bits)
            logits = tl.where(has_bit(plain), logits, float("-inf"))
    best_of_word = tl.max(logits, 1)
    best = best_of_word
    if per_group > 1:
        best = tl.max(tl.reshape(best_of_word, [per_tile, per_group]), 1)
    groups = part * per_tile + tl.arange(0, per_tile)
    best = tl.where(best > float("-inf"), best, float("-inf"))
    if picks_tiles(source, heat):
        best_of_tile, group = best_of(best, groups)
        tl.store(best_row_ptr + part, best_of_tile)
        tl.store(tile_groups_row_ptr + part, group)
    else:
        tl.store(best_row_ptr + groups, best, mask=groups < num_groups)
    if mass_row_ptr is not None:
        if weighs:
            rate = rate_of(heat)
            top = finite(best_of_word)
            mass = tl.sum(tl.exp2((finite(logits) - top[:, None]) * rate), 1)
            if per_group > 1:
                mass = tl.reshape(mass, [per_tile, per_group])
                by_word = tl.reshape(top, [per_tile, per_group])
                mass = tl.sum(mass * tl.exp2((by_word - finite(best)[:, None]) * rate), 1)
            tl.store(mass_row_ptr + groups, mass, mask=groups < num_groups)


@triton.jit
def _measure_changed(
    source,
    outputs,
    mass_row_ptr,
    num_groups,
    rate,
    weighs,
    part,
    GROUP: tl.constexpr,
    CHANGED_WORDS: tl.constexpr,
):
    """Write the highest logit of each group among changed tokens, and their mass relative to it.

    A lane has the 32 tokens of a word, of which few change. It also writes the bits of the tokens that do not change.
    """
    plain_words_row_ptr, best_row_ptr = outputs
    per_group: tl.constexpr = GROUP // WORD
    words = part * CHANGED_WORDS + tl.arange(0, CHANGED_WORDS)
    inside = words < num_groups * per_group
    words = tl.where(inside, words, NOWHERE // WORD)
    plain, changed, seen = split_words(source, words)
    tl.store(plain_words_row_ptr + words, plain, mask=inside)
    best = tl.full(words.shape, float("-inf"), tl.float32)
    mass = tl.zeros(words.shape, tl.float32)
    while tl.max((changed != 0).to(tl.int32), 0) > 0:
        _, logits, changed = next_changed(source, words, changed, seen)
        new_best = tl.maximum(best, logits)
        if weighs:
            mass = mass * weight(best, new_best, rate) + weight(logits, new_best, rate)
        best = new_best
    if per_group > 1:
        by_word = tl.reshape(best, [CHANGED_WORDS // per_group, per_group])
        best = tl.max(by_word, 1)
        mass = tl.reshape(mass, [CHANGED_WORDS // per_group, per_group])
        mass = tl.sum(mass * weight(by_word, best[:, None], rate), 1)
    groups = part * (CHANGED_WORDS // per_group) + tl.arange(0, CHANGED_WORDS // per_group)
    tl.store(best_row_ptr + groups, best, mask=groups < num_groups)
    if mass_row_ptr is not None:
        tl.store(mass_row_ptr + groups, mass, mask=groups < num_groups)
