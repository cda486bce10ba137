"""Log-probabilities as the host reads them: of a token, and of the best tokens at its place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.kernels.metadata.buffers import StaticBuffers


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, and how likely the model found it: before bias, penalties, temperature and truncation.

    token     sampled, or of a prompt
    logprob   natural logarithm of its probability
    rank      1: the best token; equal ones rank by token id
    top       the best tokens and theirs, the best first, as many as were asked for
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class StepLogprobs:
    """What the rings had of some steps: [steps, rows] of TokenLogprob, made where they are asked for."""

    __slots__ = ("_logprobs", "_ranks", "_tokens")

    def __init__(self, rings: StaticBuffers, entries: npt.NDArray[np.int64], rows: int) -> None:
        self._ranks = rings.rank_ring.numpy()[entries, :rows]
        self._logprobs = rings.logprob_ring.numpy()[entries, :rows]
        self._tokens = rings.logprob_token_ring.numpy()[entries, :rows]

    def at(self, step: int, row: int) -> TokenLogprob | None:
        """Of one token; None where none was asked for, or there was no token."""
        if not (rank := int(self._ranks[step, row])):
            return None
        token, *best = self._tokens[step, row].tolist()
        logprob, *theirs = self._logprobs[step, row].tolist()
        top = tuple((t, p) for t, p in zip(best, theirs, strict=True) if t >= 0)
        return TokenLogprob(token, logprob, rank, top)

    def rows(self, step: int) -> list[TokenLogprob | None]:
        """Of all rows of a step."""
        return [self.at(step, row) for row in range(self._ranks.shape[1])]
