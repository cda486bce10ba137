"""Proposers of drafts, captured together with the model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphrt.config import RuntimeConfig
from graphrt.kernels.checks import check_callable
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.kernels.ops.ngrams import find_ngrams
from graphrt.sampling import sample_tokens
from graphrt.step import Sampler, Step

Proposer = Callable[[Step], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
"""Maps a step, after its tokens are sampled, to drafts [padded_reqs, num_speculative_tokens] int32, contiguous. A
request's drafts end before its first -1. Drafts change no tokens, only how many a step yields.

With `RuntimeConfig.rejection_sampling`, it returns a pair: the drafts, and the log-probabilities from which each was
drawn, [padded_reqs, num_speculative_tokens, vocab_size] float32, contiguous; see `graphrt.sampling.draw_draft`.

With `RuntimeConfig.tree_depth`, it may return drafts and their parents, of the same shape and dtype. Parent 0 is the
last sampled token, parent i is draft i - 1, and parents come before their children. Steps that also compute prompts
verify only the drafts before the first branch, so the best path should come first."""


def check_proposer(
    proposer: Proposer | None, config: RuntimeConfig, *, sampler: Sampler | None, plans_on_host: str | None
) -> None:
    """Check whether a runtime can verify drafts.

    plans_on_host   name of the backend if it plans each step on the host

    Raises: ConfigError: if a proposer has no sampler, or `num_speculative_tokens` is 0; if rejection sampling has no
    proposer, or a custom sampler. UnsupportedError: if the backend needs exact lengths on the host.
    """
    if proposer is not None:
        check_callable("proposer", proposer, advice="pass a DraftModel, a function of a Step, or None")
        if not (config.num_speculative_tokens and sampler is not None):
            raise ConfigError(
                "proposer: expected a runtime with a sampler, and num_speculative_tokens of at least 1, got "
                f"{'no sampler' if sampler is None else f'num_speculative_tokens={config.num_speculative_tokens}'}; "
                "pass sampler= and RuntimeConfig(num_speculative_tokens=...), or proposer=None"
            )
    if config.rejection_sampling and (proposer is None or sampler is not sample_tokens):
        raise ConfigError(
            "RuntimeConfig.rejection_sampling: expected the built-in sampler, and a proposer that returns "
            f"log-probabilities, got {'no proposer' if proposer is None else 'another sampler'}; pass "
            "proposer=DraftModel(...), or rejection_sampling=False"
        )
    if config.num_speculative_tokens and plans_on_host is not None:
        raise UnsupportedError(
            f"backend {plans_on_host}: plans each step on the host from exact lengths, which are not known with "
            "drafts; use another backend, or num_speculative_tokens=0"
        )


def ngram_drafts(step: Step) -> torch.Tensor:
    """Propose the tokens that followed an earlier occurrence of the request's last tokens (prompt lookup).

    Compares up to four tokens. Prefers the longest match, then the latest. Capture-safe.
    """
    b = step.buffers
    return find_ngrams(b.token_history, b.sample_lens + 1, b.req_indices, b.drafts.shape[1])
