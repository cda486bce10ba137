"""Second pass of sampling, a program per row: the best of the row's parts, or a draw among all of its groups.

Rows that truncate are left to `sampling_truncated.py`, so that others need not pay for it: neither in registers nor in
what those spill.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import NOWHERE, best_of, row_options, row_values
from graphrt.kernels.ops.sampling_passes import best_score
from graphrt.kernels.types import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["num_parts", "num_groups", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def sample_rows_kernel(
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
    list_groups_ptr,
    out_ptr,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    num_groups,
    num_parts,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    row = tl.program_id(0)
    heat, _, _, _, truncates = row_options(row, vocab_size, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    source = (
        (logits_ptr, mask_words_ptr, bias_tokens_ptr, bias_values_ptr, seen_ptr, counts_ptr),
        row_values(
            row, stride_logits, vocab_size, row_ids_ptr, repetition_ptr, presence_ptr, frequency_ptr,
            state_rows, bias_counts_ptr, bias_rows, bias_capacity, mask_index_ptr, num_masks,
        ),
    )  # fmt: skip
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # also by those that leave: the next pass waits for this one alone
    if top_k_ptr is not None:
        if truncates:
            return
    at = row.to(tl.int64) * num_groups
    if (heat > 0) | source[1][2]:
        noise_at = (tl.load(seeds_ptr + row), tl.load(seq_lens_ptr + row))
        group_ptrs = (group_best_ptr + at, list_groups_ptr + at, num_groups)
        token, _ = best_score(source, noise_at, group_ptrs, float("-inf"), heat, GROUPS, GROUP)
    else:
        parts = tl.arange(0, PARTS)
        partials = row * num_parts + parts
        scores = tl.load(best_scores_ptr + partials, mask=parts < num_parts, other=float("-inf"))
        tokens = tl.load(best_tokens_ptr + partials, mask=parts < num_parts, other=NOWHERE)
        _, token = best_of(scores, tokens)
    tl.store(out_ptr + row, tl.where(token < NOWHERE, token, _NO_TOKEN))
