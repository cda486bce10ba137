"""The built-in sampler, captured together with the model."""

from __future__ import annotations

import torch

from graphrt.kernels.ops.sampling import Truncation, sample
from graphrt.step import Step


def sample_tokens(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """Sample one token per request, by argmax at temperature 0, else by a draw from softmax(logits / temperature).

    Logits are processed in this order: token mask, logit bias and `min_tokens`, penalties, temperature, min-p, top-k,
    top-p.

    logits   [padded_reqs, vocab]  float16, bfloat16 or float32  device
    returns  [padded_reqs]         int32                          device

    The noise depends only on the request's seed and position. For equal logits, neither padding nor other requests
    change the draw. Logits may differ in their last bits between captured sizes. Capture-safe: random numbers come from
    a counter, not from torch's generator.
    """
    kept = Truncation(step.top_ks, step.top_ps, step.min_ps)
    return sample(
        logits,
        step.temperatures,
        step.seeds,
        step.sample_lens,
        req_indices=step.req_indices,
        truncation=kept,
        penalties=step.penalties,
        bias=step.logit_bias,
        token_mask=step.token_mask,
    )
