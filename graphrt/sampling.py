"""The built-in sampler, captured together with the model."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.kernels.ops.rejection import DRAFT_SEED, kept_logprobs, residual
from graphrt.kernels.ops.sampling import Truncation, sample
from graphrt.kernels.ops.sampling_shards import sample_shards
from graphrt.step import Step


def sample_tokens(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """Sample one token per request, by argmax at temperature 0, else by a draw from softmax(logits / temperature).

    Logits are processed in this order: token mask, logit bias and `min_tokens`, penalties, temperature, min-p, top-k,
    top-p.

    logits   [padded_reqs, vocab] float16, bfloat16 or float32 device; with a group of ranks, may be only the columns of
                                   this rank, see `sample_shards`
    returns  [padded_reqs]         int32                          device

    The noise depends only on the request's seed and position. For equal logits, neither padding nor other requests
    change the draw. Logits may differ in their last bits between captured sizes. Capture-safe: random numbers come from
    a counter, not from torch's generator.
    """
    draws = step.temperatures, step.seeds, step.sample_lens
    if step.shards is not None and logits.shape[1] != step.shards.vocab_size:
        return sample_shards(logits, *draws, shards=step.shards, **_options(step))
    return sample(logits, *draws, **_options(step))


def sampling_logprobs(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """Return the log-probabilities [padded_reqs, vocab] float32 from which `sample_tokens` draws. Capture-safe."""
    return kept_logprobs(logits, step.temperatures, step.seeds, step.sample_lens, **_options(step))


def verify_drafts(logits: torch.Tensor, step: Step, position: int) -> torch.Tensor:
    """Accept the draft at `position`, or sample a different token; requests without a draft sample as usual.

    logits   [padded_reqs, vocab]  float16, bfloat16 or float32  device
    returns  [padded_reqs]         int32                          device; the draft, if it is accepted

    A token has the distribution of `sample_tokens`; see `graphrt.kernels.ops.rejection`. Capture-safe.
    """
    b = step.buffers
    last = b.logits_indices.view(-1, len(b.req_indices))[position]
    rest = residual(
        sampling_logprobs(logits, step), b.draft_logprobs, b.input_ids, last, b.drafts_left, b.req_indices, b.seeds,
        b.sample_lens, position=position,
    )  # fmt: skip
    return sample(rest, torch.ones_like(b.temperatures), b.seeds, b.sample_lens)


def draw_draft(logits: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a draft per request with its sampling parameters, for rejection sampling.

    logits   [padded_reqs, vocab]  float16, bfloat16 or float32  device
    returns  the drafts [padded_reqs] int32, and the log-probabilities [padded_reqs, vocab] float32

    The noise differs from the noise of the request's tokens, because a draft must not depend on that noise.
    Capture-safe.
    """
    logprobs = sampling_logprobs(logits, step)
    return sample(logprobs, torch.ones_like(step.temperatures), step.seeds + DRAFT_SEED, step.sample_lens), logprobs


def _options(step: Step) -> dict[str, Any]:
    return {
        "req_indices": step.req_indices,
        "truncation": Truncation(step.top_ks, step.top_ps, step.min_ps),
        "penalties": step.penalties,
        "bias": step.logit_bias,
        "token_mask": step.token_mask,
    }
