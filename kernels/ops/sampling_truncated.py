"""Third pass of sampling, a program per row that truncates: a draw among the tokens that min-p, top-k and top-p keep.

A group's highest logit and highest noise bound the scores of its tokens. So a draw looks at few groups: at some with
the highest bounds, then at all whose bounds reach the best score among those.

min-p, top-k and top-p each keep the tokens from some logit upwards, so a row keeps what is at or above one threshold.
The groups' highest logits give a lower bound of it, and what reaches that bound is mostly a short list. The list is
then searched in registers. Of rows that keep too much for a list, `sampling_passes.py` draws.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    MIN_HEAT,
    NOWHERE,
    WORD,
    best_of,
    key_gap,
    key_of,
    largest_reaching,
    logits_of_words,
    row_options,
    row_values,
    token_noise,
    value_of,
    weight,
)
from graphrt.kernels.ops.sampling_passes import draw_by_passes, words_of_groups
from graphrt.kernels.types import NO_TOKEN

LIST = 2048
"""Tokens that a row's list holds."""

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WORDS = tl.constexpr(128)  # whose tokens are looked at side by side
_SHORT = tl.constexpr(256)  # tokens of a list that most top-ks leave: one for each thread
_DRAWN = tl.constexpr(256)  # tokens whose noise is drawn side by side
_FLOOR_KEYS = tl.constexpr(1 << 12)  # a bound need not be exact
_SURE = tl.constexpr(1.0001)  # a bound on masses holds in spite of roundings where it holds by this factor


@triton.jit(do_not_specialize=["num_groups", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def sample_truncated_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    seq_lens_ptr,
    row_ids_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    counts_ptr,
    bias_tokens_ptr,
    bias_values_ptr,
    bias_counts_ptr,
    mask_words_ptr,
    mask_index_ptr,
    group_best_ptr,
    group_mass_ptr,
    plain_words_ptr,
    list_groups_ptr,
    list_tokens_ptr,
    list_logits_ptr,
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
    LIST: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    row = tl.program_id(0)
    heat, top_k, top_p, min_p, truncates = row_options(
        row, vocab_size, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    if not truncates:
        return
    source = (
        (logits_ptr, mask_words_ptr, bias_tokens_ptr, bias_values_ptr, seen_ptr, counts_ptr),
        row_values(
            row, stride_logits, vocab_size, row_ids_ptr, repetition_ptr, presence_ptr, frequency_ptr,
            state_rows, bias_counts_ptr, bias_rows, bias_capacity, mask_index_ptr, num_masks,
        ),
    )  # fmt: skip
    at = row.to(tl.int64) * num_groups
    plain_words_row_ptr = plain_words_ptr
    if plain_words_ptr is not None:
        plain_words_row_ptr = plain_words_ptr + at * (GROUP // WORD)
    noise_at = (tl.load(seeds_ptr + row), tl.load(seq_lens_ptr + row))
    rate = 1.0 / tl.maximum(heat, MIN_HEAT)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    groups = tl.arange(0, GROUPS)
    group_best = tl.load(group_best_ptr + at + groups, mask=groups < num_groups, other=float("-inf"))
    best = tl.max(group_best, 0)
    num_weighed = tl.where((top_p < 1) & (top_k == 0) & (min_p == 0), num_groups, 0)
    group_mass = tl.load(group_mass_ptr + at + groups, mask=groups < num_weighed, other=0.0)
    total = tl.sum(group_mass * weight(group_best, best, rate), 0)
    gap = tl.where(source[1][2], 1, key_gap(logits_ptr.dtype.element_ty))
    floor = _floor(group_best, best, total, heat, rate, top_k, top_p, min_p, gap)
    token = NOWHERE
    length = LIST + 1
    if (top_k > 0) | (top_p < 1):
        row_list = (list_tokens_ptr + row.to(tl.int64) * LIST, list_logits_ptr + row.to(tl.int64) * LIST)
        length = _make_list(source, groups, group_best, floor, list_groups_ptr + at, row_list, GROUP, LIST)
        if length <= _SHORT:
            token = _draw_from_list(
                row_list, length, noise_at, best, floor, total, heat, rate, top_k, top_p, min_p, gap, _SHORT
            )
        elif length <= LIST:
            token = _draw_from_list(
                row_list, length, noise_at, best, floor, total, heat, rate, top_k, top_p, min_p, gap, LIST
            )
    if length > LIST:
        group_ptrs = (group_best_ptr + at, list_groups_ptr + at, num_groups)
        token = draw_by_passes(
            source, plain_words_row_ptr, noise_at, group_ptrs, best, floor, total, heat, rate, top_k, top_p, min_p,
            GROUPS, GROUP,
        )  # fmt: skip
    tl.store(out_ptr + row, tl.where(token < NOWHERE, token, _NO_TOKEN))


@triton.jit
def _floor(group_best, best, total, heat, per_heat, top_k, top_p, min_p, gap):
    """A logit below which nothing is kept, from the groups' highest logits.

    Where k groups reach a logit, so do k tokens. Where the best tokens of some groups hold top-p of the mass, no token
    below all of them is kept. The latter speaks of the whole mass, so it serves rows without top-k and min-p only.
    """
    floor = tl.where(min_p > 0, best + heat * tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
    by_count = top_k > 0
    weights = weight(group_best, best, per_heat)
    amounts = tl.where(by_count, 1.0, weights)
    need = tl.where(by_count, top_k.to(tl.float32), top_p * total * _SURE)
    useful = by_count | ((top_p < 1) & (min_p <= 0))
    # Most searches are short of some ten steps when they begin at the lowest of the groups, not at -inf.
    lowest = tl.min(tl.where(group_best > float("-inf"), group_best, float("inf")), 0)
    lowest = tl.maximum(tl.minimum(lowest, best), floor)
    useful = useful & (tl.sum(tl.where(group_best >= lowest, amounts, 0.0), 0) >= need)
    low = key_of(lowest)
    high = tl.where(useful, key_of(best) + 1, low)
    low, high = largest_reaching(group_best, amounts, need, low, high, tl.maximum(gap, _FLOOR_KEYS))
    return tl.where(useful, value_of(low), floor)


@triton.jit
def _make_list(
    source, groups, group_best, floor, list_groups_row_ptr, row_list, GROUP: tl.constexpr, LIST: tl.constexpr
):
    """List the tokens that reach the floor, with their processed logits; the length, or more than LIST: too many."""
    per_group: tl.constexpr = GROUP // WORD
    wide: tl.constexpr = _WORDS // per_group
    tokens_ptr, logits_ptr = row_list
    chosen = (group_best >= floor) & (group_best > float("-inf"))
    count = tl.sum(chosen.to(tl.int32), 0)
    length = tl.where(count > LIST, count, 0)  # each has a token that reaches the floor
    if count <= LIST:
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(list_groups_row_ptr + place, groups, mask=chosen)
        tl.debug_barrier()  # what some threads have stored, others load
    start = 0
    while (start < count) & (length <= LIST):
        listed = start + tl.arange(0, wide)
        group = tl.load(list_groups_row_ptr + listed, mask=listed < count, other=NOWHERE // GROUP)
        tokens, logits = logits_of_words(source, words_of_groups(group, per_group))
        taken = (logits >= floor) & (logits > float("-inf"))
        # Places within a word, and of words within the turn: a scan of all tokens at once crosses warps for each.
        within = tl.cumsum(taken.to(tl.int32), 1)
        of_words = tl.sum(taken.to(tl.int32), 1)
        before = length + tl.cumsum(of_words, 0) - of_words
        # A list that is too long is not read. Places in the mask would have the compiler find all of them twice.
        list_place = tl.minimum(before[:, None] + within, LIST) - 1
        tl.store(tokens_ptr + list_place, tokens, mask=taken)
        tl.store(logits_ptr + list_place, logits, mask=taken)
        length += tl.sum(of_words, 0)
        start += wide
    tl.debug_barrier()
    return length


@triton.jit
def _draw_from_list(
    row_list, length, noise_at, best, floor, total, heat, rate, top_k, top_p, min_p, gap, LIST: tl.constexpr
):
    """The draw among listed tokens, which hold all that are kept. Top-k's threshold first: top-p's mass is above it."""
    tokens_ptr, logits_ptr = row_list
    lanes = tl.arange(0, LIST)
    logits = tl.load(logits_ptr + lanes, mask=lanes < length, other=float("-inf"))
    weights = weight(logits, best, rate)
    threshold = key_of(floor)
    end = key_of(best) + 1
    if (top_k > 0) & (top_k < length):
        ones = tl.full([LIST], 1.0, tl.float32)
        threshold, _ = largest_reaching(logits, ones, top_k.to(tl.float32), threshold, end, gap)
    if top_p < 1:
        if (top_k > 0) | (min_p > 0):
            total = tl.sum(tl.where(logits >= value_of(threshold), weights, 0.0), 0)
        threshold, _ = largest_reaching(logits, weights, top_p * total, threshold, end, gap)
    # Most lists are short, and noise is what takes instructions: a lane has a token of each block.
    seed, position = noise_at
    scores = tl.full([_DRAWN], float("-inf"), tl.float32)
    tokens = tl.full([_DRAWN], NOWHERE, tl.int32)
    for start in range(0, length, _DRAWN):
        at = start + tl.arange(0, _DRAWN)
        token = tl.load(tokens_ptr + at, mask=at < length, other=NOWHERE)
        logit = tl.load(logits_ptr + at, mask=at < length, other=float("-inf"))
        kept = (at < length) & (logit >= value_of(threshold))
        score = tl.where(kept, tl.fma(heat, token_noise(seed, position, token), logit), float("-inf"))
        wins = score > scores  # equal scores of a lane: the earlier token stays, which is the lower one
        scores = tl.where(wins, score, scores)
        tokens = tl.where(wins, token, tokens)
    _, drawn = best_of(scores, tokens)
    return drawn
