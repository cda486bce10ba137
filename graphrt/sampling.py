"""The built-in sampler: greedy, or a draw among the tokens that a row allows, captured with the model."""

from __future__ import annotations

import torch

from graphrt.kernels.ops.sampling import Truncation, sample
from graphrt.step import Step


def sample_tokens(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """One token per row: argmax where the temperature is 0, else a draw from softmax(logits / temperature), among the
    tokens that the row's min-p, top-k and top-p keep, in this order. Token mask, logit bias and penalties come
    before all that, in this order.

    logits   [padded_reqs, vocab]  float16, bfloat16 or float32  device
    returns  [padded_reqs]         int32                          device

    The noise depends on the row's seed and position alone: for equal logits, neither padding nor other rows change the
    draw. Logits themselves may differ in their last bits between captured sizes.
    Capture-safe: random numbers come from a counter, not from torch's generator.
    """
    kept = Truncation(step.top_ks, step.top_ps, step.min_ps)
    return sample(
        logits,
        step.temperatures,
        step.seeds,
        step.metadata.seq_lens,
        req_indices=step.req_indices,
        truncation=kept,
        penalties=step.penalties,
        bias=step.logit_bias,
        token_mask=step.token_mask,
    )
