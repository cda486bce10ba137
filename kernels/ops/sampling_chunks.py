"""First pass of sampling, over all logits: a row's best scores by part, or what a truncating row is decided from.

A program reads some chunks of one row. Rows take one of three ways: greedy, a draw among all tokens, or groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    CHUNK,
    MIN_HEAT,
    NOWHERE,
    QUARTER,
    best_of,
    gumbel,
    process,
    random_words,
    raw_logits,
    row_options,
    row_values,
    weight,
)
from graphrt.kernels.ops.sampling_reference import SAMPLE_CHUNK


@triton.constexpr_function
def _step(processes: bool) -> int:
    """Tokens of a step. Processing takes registers, and what it takes is taken from all rows of the kernel."""
    return SAMPLE_CHUNK // 2 if processes else SAMPLE_CHUNK


@triton.constexpr_function
def _stages(processes: bool) -> int:
    """Loads of so many steps are under way, where nothing but logits is read."""
    return 1 if processes else 4


@triton.jit(do_not_specialize=["num_groups", "chunks", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def sample_chunks_kernel(
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
    best_scores_ptr,
    best_tokens_ptr,
    group_best_ptr,
    group_mass_ptr,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    num_groups,
    chunks,  # of one program
    GROUP: tl.constexpr,
    PROCESSES: tl.constexpr,  # some row may
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    source = (
        (logits_ptr, mask_words_ptr, bias_tokens_ptr, bias_values_ptr, seen_ptr, counts_ptr),
        row_values(
            row, stride_logits, vocab_size, row_ids_ptr, repetition_ptr, presence_ptr, frequency_ptr,
            state_rows, bias_counts_ptr, bias_rows, bias_capacity, mask_index_ptr, num_masks,
        ),
    )  # fmt: skip
    processes = False
    if PROCESSES:
        processes = source[1][2]
    heat, _, _, _, truncates = row_options(row, vocab_size, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    first = part * chunks
    end = first + chunks
    plain = True
    if top_k_ptr is not None:
        plain = truncates == 0
        if truncates:
            at = row.to(tl.int64) * num_groups
            group_ptrs = (group_best_ptr + at, group_mass_ptr + at)
            if processes:
                _measure_groups(source, group_ptrs, num_groups, heat, first, end, GROUP, True)
            else:
                _measure_groups(source, group_ptrs, num_groups, heat, first, end, GROUP, False)
    if plain:
        noise_at = (tl.load(seeds_ptr + row), tl.load(seq_lens_ptr + row))
        if processes:
            if heat > 0:
                best, token = _draw_from_part(source, noise_at, heat, first, end, True)
            else:
                best, token = _best_of_part(source, first, end, True)
        else:
            if heat > 0:
                best, token = _draw_from_part(source, noise_at, heat, first, end, False)
            else:
                best, token = _best_of_part(source, first, end, False)
        partial = row * tl.num_programs(1) + part
        tl.store(best_scores_ptr + partial, best)
        tl.store(best_tokens_ptr + partial, token)


@triton.jit
def _measure_groups(source, group_ptrs, num_groups, heat, first, end, GROUP: tl.constexpr, PROCESSES: tl.constexpr):
    """The highest logit of each group, and the group's mass relative to it: where kept tokens may be.

    No draw yet: most tokens will be dropped. Neither value depends on the part that a group lies in.
    """
    group_best_ptr, group_mass_ptr = group_ptrs
    per_heat = 1.0 / tl.maximum(heat, MIN_HEAT)
    per_step: tl.constexpr = _step(PROCESSES) // GROUP
    for step in tl.range(
        first * (CHUNK // _step(PROCESSES)), end * (CHUNK // _step(PROCESSES)), num_stages=_stages(PROCESSES)
    ):
        groups = tl.arange(0, per_step) + step * per_step
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        logits = raw_logits(source, tokens)
        if PROCESSES:
            logits = process(source, tokens, logits)
        best = tl.max(logits, 1)
        mass = tl.sum(weight(logits, best[:, None], per_heat), 1)
        tl.store(group_best_ptr + groups, best, mask=groups < num_groups)
        tl.store(group_mass_ptr + groups, mass, mask=groups < num_groups)


@triton.jit
def _best_of_part(source, first, end, PROCESSES: tl.constexpr):
    """The highest logit of a part of the vocabulary, and its token."""
    width: tl.constexpr = _step(PROCESSES)
    lanes = tl.arange(0, width)
    scores = tl.full([width], float("-inf"), tl.float32)
    tokens = tl.full([width], NOWHERE, tl.int32)
    for start in tl.range(first * CHUNK, end * CHUNK, width, num_stages=_stages(PROCESSES)):
        token = lanes + start
        logits = raw_logits(source, token)
        if PROCESSES:
            logits = process(source, token, logits)
        wins = logits > scores  # equal logits of a lane: the earlier token stays, which is the lower one
        scores = tl.where(wins, logits, scores)
        tokens = tl.where(wins, token, tokens)
    return best_of(scores, tokens)


@triton.jit
def _draw_from_part(source, noise_at, heat, first, end, PROCESSES: tl.constexpr):
    """The best score of a part of the vocabulary, logit + heat * noise, and its token."""
    seed, position = noise_at
    lanes = tl.arange(0, QUARTER)
    scores = tl.full([QUARTER], float("-inf"), tl.float32)
    tokens = tl.full([QUARTER], NOWHERE, tl.int32)
    for chunk in range(first, end):
        # All loads of the chunk are under way before the first is used: the noise is computed meanwhile.
        token = lanes + chunk * CHUNK
        l0 = raw_logits(source, token)
        l1 = raw_logits(source, token + QUARTER)
        l2 = raw_logits(source, token + 2 * QUARTER)
        l3 = raw_logits(source, token + 3 * QUARTER)
        w0, w1, w2, w3 = random_words(seed, lanes + chunk * QUARTER, position)
        if PROCESSES:
            l0 = process(source, token, l0)
            l1 = process(source, token + QUARTER, l1)
            l2 = process(source, token + 2 * QUARTER, l2)
            l3 = process(source, token + 3 * QUARTER, l3)
        scores, tokens = _better_of(l0 + heat * gumbel(w0), token, l0, scores, tokens)
        scores, tokens = _better_of(l1 + heat * gumbel(w1), token + QUARTER, l1, scores, tokens)
        scores, tokens = _better_of(l2 + heat * gumbel(w2), token + 2 * QUARTER, l2, scores, tokens)
        scores, tokens = _better_of(l3 + heat * gumbel(w3), token + 3 * QUARTER, l3, scores, tokens)
    return best_of(scores, tokens)


@triton.jit
def _better_of(score, token, logit, best_scores, best_tokens):
    """The higher score and its token, elementwise. Of equal scores the earlier one stays: a lane's tokens ascend."""
    wins = (score > best_scores) & (logit > float("-inf"))
    return tl.where(wins, score, best_scores), tl.where(wins, token, best_tokens)
