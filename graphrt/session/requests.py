"""The request of a session that callers use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Int32Array
from graphrt.engine.handle import StepLogprobs, TokenLogprob
from graphrt.kernels.types import FinishReason
from graphrt.sampling_params import SamplingParams

Prompt = Sequence[int] | Int32Array | torch.Tensor
"""Token ids: a list, an array or a host tensor of any int dtype."""

Ids = npt.NDArray[np.int64]

NO_INDEX = -1
"""Request index of a preempted request, which has none."""


@dataclass(eq=False, slots=True)
class SessionRequest:
    """A sequence in a session.

    req_index        index of its state on the device, as in `Step.req_indices`
    prompt           [tokens] int32
    tokens           the tokens that were sampled and collected, including a token that finishes the request
    finish_reason    why the request finished; RUNNING until the end is collected, even after an earlier release
    logprobs         with SamplingParams.logprobs, one per token
    prompt_logprobs  with SamplingParams.prompt_logprobs, one per prompt token except the first
    verify_steps     collected steps that could verify drafts, and yielded tokens
    num_draft_tokens     number of drafts that these steps verified
    num_accepted_tokens  number of accepted drafts: tokens that these steps yielded beyond one per step. A right draft
                         at which the request finishes is not counted, because no token follows it
    """

    req_index: int
    prompt: Int32Array
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.RUNNING
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def split_logprobs(
    logprobs: StepLogprobs, column: int, sampled: npt.NDArray[np.bool_], count: int
) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """Return one request's log-probabilities of a launch: of its first `count` sampled tokens, and of prompt tokens,
    which belong to steps that sampled none."""
    of_tokens, of_prompt = list[TokenLogprob](), list[TokenLogprob]()
    for step in range(len(sampled)):
        found = logprobs.at(step, column)
        if found is not None and not sampled[step]:
            of_prompt.append(found)
        elif found is not None and len(of_tokens) < count:
            of_tokens.append(found)
    return of_tokens, of_prompt
