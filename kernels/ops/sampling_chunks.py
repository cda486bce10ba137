"""First pass of sampling, over all logits: a row's best token by part, or the best logits of its groups of tokens.

A program reads some chunks of one row. Greedy rows take the first way. All others take the second: `sample_rows_kernel`
draws from what groups there may be, and looks at few of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    CHUNK,
    MIN_HEAT,
    NOWHERE,
    WORD,
    best_of,
    has_bit,
    next_changed,
    raw_logits,
    row_options,
    row_values,
    split_words,
    weight,
)

MAX_CHUNKS = 8
"""Chunks that a program reads, at most."""

_STAGES = tl.constexpr(4)  # loads of so many chunks are under way


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
    plain_words_ptr,
    changed_best_ptr,
    changed_mass_ptr,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    num_groups,
    chunks,  # of one program
    GROUP: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    PROCESSES: tl.constexpr,  # some row may
    LAUNCH_PDL: tl.constexpr,
):
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # which wait for the end of this pass, but not to be launched
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
    heat, top_k, top_p, min_p, _ = row_options(row, vocab_size, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    first = part * chunks
    end = first + chunks
    at = row.to(tl.int64) * num_groups
    mass_row_ptr = group_mass_ptr
    if group_mass_ptr is not None:
        mass_row_ptr = group_mass_ptr + at
    best_row_ptr = group_best_ptr + at
    if (heat > 0) | processes:
        weighs = False
        if top_k_ptr is not None:
            weighs = (top_p < 1) & (top_k == 0) & (min_p == 0)  # top-p comes first: the mass of all tokens is needed
        rate = 1.0 / tl.maximum(heat, MIN_HEAT)
        raw = True
        if PROCESSES:
            raw = processes == 0
            if processes:
                changed = (plain_words_ptr + at * (GROUP // WORD), changed_best_ptr + at, changed_mass_ptr + at)
                _measure_changed(source, changed, num_groups, rate, first, end, GROUP, MAX_CHUNKS)
                tl.debug_barrier()  # what some threads have stored, others load
                _measure_groups(
                    source, best_row_ptr, mass_row_ptr, changed, num_groups, rate, weighs, first, end, GROUP
                )
        if raw:
            _measure_groups(source, best_row_ptr, mass_row_ptr, None, num_groups, rate, weighs, first, end, GROUP)
    else:
        best, token = _best_of_part(source, first, end)
        partial = row * tl.num_programs(1) + part
        tl.store(best_scores_ptr + partial, best)
        tl.store(best_tokens_ptr + partial, token)


@triton.jit
def _measure_changed(source, outputs, num_groups, rate, first, end, GROUP: tl.constexpr, MAX_CHUNKS: tl.constexpr):
    """The highest logit of each group among tokens that mask, bias and penalties change, and their mass relative to it.

    A lane has the 32 tokens of a word, of which mostly none or few change. It leaves the bits of those that do not.
    """
    plain_words_ptr, changed_best_ptr, changed_mass_ptr = outputs
    per_group: tl.constexpr = GROUP // WORD
    words = first * (CHUNK // WORD) + tl.arange(0, MAX_CHUNKS * CHUNK // WORD)
    inside = (words < end * (CHUNK // WORD)) & (words < num_groups * per_group)
    words = tl.where(inside, words, NOWHERE // WORD)
    plain, changed, seen = split_words(source, words)
    tl.store(plain_words_ptr + words, plain, mask=inside)
    best = tl.full(words.shape, float("-inf"), tl.float32)
    mass = tl.zeros(words.shape, tl.float32)
    while tl.max((changed != 0).to(tl.int32), 0) > 0:
        logits, changed = next_changed(source, words, changed, seen)
        new_best = tl.maximum(best, logits)
        mass = mass * weight(best, new_best, rate) + weight(logits, new_best, rate)
        best = new_best
    if per_group > 1:
        by_word = tl.reshape(best, [best.shape[0] // per_group, per_group])
        mass = tl.reshape(mass, [best.shape[0] // per_group, per_group])
        best = tl.max(by_word, 1)
        mass = tl.sum(mass * weight(by_word, best[:, None], rate), 1)
    groups = first * (CHUNK // GROUP) + tl.arange(0, MAX_CHUNKS * CHUNK // GROUP)
    inside = (groups < end * (CHUNK // GROUP)) & (groups < num_groups)
    tl.store(changed_best_ptr + groups, best, mask=inside)
    tl.store(changed_mass_ptr + groups, mass, mask=inside)


@triton.jit
def _measure_groups(
    source, best_row_ptr, mass_row_ptr, changed, num_groups, rate, weighs, first, end, GROUP: tl.constexpr
):
    """The highest logit of each group, and where `weighs` the group's mass relative to it.

    Neither value depends on the part that a group lies in.
    """
    per_chunk: tl.constexpr = CHUNK // GROUP
    per_group: tl.constexpr = GROUP // WORD
    for chunk in tl.range(first, end, num_stages=_STAGES):
        groups = chunk * per_chunk + tl.arange(0, per_chunk)
        words = chunk * (CHUNK // WORD) + tl.arange(0, CHUNK // WORD)
        logits = raw_logits(source, words[:, None] * WORD + tl.arange(0, 32)[None, :])
        if changed is not None:
            plain = tl.load(changed[0] + words, mask=words < num_groups * per_group, other=0)
            logits = tl.where(has_bit(plain), logits, float("-inf"))
        best_of_word = tl.max(logits, 1)
        best = best_of_word
        if per_group > 1:
            best = tl.max(tl.reshape(best_of_word, [per_chunk, per_group]), 1)
        if changed is not None:
            changed_best = tl.load(changed[1] + groups, mask=groups < num_groups, other=float("-inf"))
            best = tl.maximum(best, changed_best)
        tl.store(best_row_ptr + groups, best, mask=groups < num_groups)
        if mass_row_ptr is not None:
            if weighs:
                mass = tl.sum(weight(logits, best_of_word[:, None], rate), 1)
                if per_group > 1:
                    by_word = tl.reshape(best_of_word, [per_chunk, per_group])
                    mass = tl.reshape(mass, [per_chunk, per_group])
                    mass = tl.sum(mass * weight(by_word, best[:, None], rate), 1)
                if changed is not None:
                    if per_group == 1:
                        mass *= weight(best_of_word, best, rate)
                    changed_mass = tl.load(changed[2] + groups, mask=groups < num_groups, other=0.0)
                    mass += changed_mass * weight(changed_best, best, rate)
                tl.store(mass_row_ptr + groups, mass, mask=groups < num_groups)


@triton.jit
def _best_of_part(source, first, end):
    """The highest logit of a part of the vocabulary, and its token."""
    lanes = tl.arange(0, CHUNK)
    scores = tl.full([CHUNK], float("-inf"), tl.float32)
    tokens = tl.full([CHUNK], NOWHERE, tl.int32)
    for start in tl.range(first * CHUNK, end * CHUNK, CHUNK, num_stages=_STAGES):
        token = lanes + start
        logits = raw_logits(source, token)
        wins = logits > scores  # equal logits of a lane: the earlier token stays, which is the lower one
        scores = tl.where(wins, logits, scores)
        tokens = tl.where(wins, token, tokens)
    return best_of(scores, tokens)
