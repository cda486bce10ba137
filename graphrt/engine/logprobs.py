"""Log-probabilities as the host reads them: of a token, and of the best tokens at its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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

    def __init__(
        self, ranks: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]
    ) -> None:
        self._ranks, self._logprobs, self._tokens = ranks, logprobs, tokens

    @classmethod
    def joined(
        cls, launches: Sequence[StepLogprobs | None], places: npt.NDArray[np.int64] | None = None
    ) -> StepLogprobs:
        """Those of launches of the same rows, one behind the other; of some rows, where `places` are given."""
        asked = [launch for launch in launches if launch is not None]
        parts = zip(*((part._ranks, part._logprobs, part._tokens) for part in asked), strict=True)
        arrays = [np.concatenate(part) for part in parts]
        return cls(*(arrays if places is None else (array[:, places] for array in arrays)))

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
