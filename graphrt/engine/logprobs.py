"""Log-probabilities on the host: of a token, and of the most likely tokens at its position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, from the model's logits before any processing.

    token     a sampled token, or a token of a prompt
    logprob   natural logarithm of its probability
    rank      1 is the most likely token; tokens of equal logits rank by token id
    top       the most likely tokens and their log-probabilities, in order of rank
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class StepLogprobs:
    """Log-probabilities of some steps, copied from the output rings. TokenLogprob objects are made on access."""

    __slots__ = ("_logprobs", "_ranks", "_tokens")

    def __init__(
        self, ranks: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]
    ) -> None:
        self._ranks, self._logprobs, self._tokens = ranks, logprobs, tokens

    @classmethod
    def joined(
        cls, launches: Sequence[StepLogprobs | None], places: npt.NDArray[np.int64] | None = None
    ) -> StepLogprobs:
        """Concatenate the steps of launches of the same requests; `places` selects some of the requests."""
        asked = [launch for launch in launches if launch is not None]
        parts = zip(*((part._ranks, part._logprobs, part._tokens) for part in asked), strict=True)
        arrays = [np.concatenate(part) for part in parts]
        return cls(*(arrays if places is None else (array[:, places] for array in arrays)))

    def at(self, step: int, row: int) -> TokenLogprob | None:
        """Return the TokenLogprob of one request; None if it asked for none, or got no token."""
        if not (rank := int(self._ranks[step, row])):
            return None
        token, *best = self._tokens[step, row].tolist()
        logprob, *theirs = self._logprobs[step, row].tolist()
        top = tuple((t, p) for t, p in zip(best, theirs, strict=True) if t >= 0)
        return TokenLogprob(token, logprob, rank, top)

    def rows(self, step: int) -> list[TokenLogprob | None]:
        """Return the TokenLogprob or None of each request of a step."""
        return [self.at(step, row) for row in range(self._ranks.shape[1])]
