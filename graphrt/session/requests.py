"""A row of a session, and what a session remembers of a launch until it is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Int32Array
from graphrt.engine.handle import RequestFault
from graphrt.engine.launch import Launch
from graphrt.engine.logprobs import StepLogprobs, TokenLogprob
from graphrt.kernels.metadata.buffers import STOP_TOKENS
from graphrt.kernels.types import FinishReason
from graphrt.sampling_params import SamplingParams

Prompt = Sequence[int] | Int32Array | torch.Tensor
"""Token ids: a list, an array or a host tensor of any int dtype."""

Ids = npt.NDArray[np.int64]

NO_INDEX = -1
"""Row id of a row that has none."""


@dataclass(eq=False, slots=True)
class SessionRequest:
    """A sequence of a session.

    req_index   its row state, which a model indexes by `Step.req_indices`
    prompt   [tokens] int32, what it began with
    tokens   what it has sampled since, as far as it was collected; a token that ends it is the last of them
    end      why it ended, as far as that was collected: RUNNING while it has not
    logprobs         with SamplingParams.logprobs, of each of `tokens`
    prompt_logprobs  with SamplingParams.prompt_logprobs, of each token of the prompt but the first
    """

    req_index: int
    prompt: Int32Array
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    end: FinishReason = FinishReason.RUNNING
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def take_logprobs(self, logprobs: StepLogprobs, place: int, sampled: npt.NDArray[np.bool_], count: int) -> None:
        """Add those of a launch: of `count` sampled tokens, and of a prompt's where none was sampled."""
        for step in range(len(sampled)):
            found = logprobs.at(step, place)
            if found is not None and not sampled[step]:
                self.prompt_logprobs.append(found)
            elif found is not None and count:
                self.logprobs.append(found)
                count -= 1


@dataclass(slots=True)
class Flight:
    """A launch that was not collected yet.

    rows      whose row each place is
    ids       [places] their row ids
    promised  tokens that each row was counted for: one number, or [places]
    given     how many of these are of a prompt, [places]: the row has them whether a token was sampled or not. None: of
              no prompt
    forks     rows that were forked from one in flight, with its place
    early     how many of its tokens each row has already, [places]; empty: none
    """

    launch: Launch
    rows: tuple[SessionRequest, ...]
    ids: Ids
    promised: int | Ids
    given: Ids | None = None
    forks: tuple[tuple[int, SessionRequest], ...] = ()
    early: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """What launches brought: their rows that neither went nor ended before, the new tokens of each, and the faults of
    these rows, with the number of their step; faults name row ids."""

    rows: tuple[SessionRequest, ...]
    columns: list[list[int]]
    faults: list[tuple[int, RequestFault]]


def stop_on_host(rows: tuple[SessionRequest, ...], columns: list[list[int]], ends: Int32Array) -> None:
    """End rows at stop tokens, of which the device knows the first ones alone."""
    for place, (row, new) in enumerate(zip(rows, columns, strict=True)):
        for index, token in enumerate(new if len(row.params.stop_ids) > STOP_TOKENS else ()):
            if token in row.params.stop_ids:
                columns[place], ends[place] = new[: index + 1], int(FinishReason.STOP_TOKEN)
                break
