"""Sampling values of a scheduler's requests, as arrays that each step's Batch takes its values from."""

from __future__ import annotations

from graphrt.batch_values import Values, copied_values, singular
from graphrt.sampling_params import SamplingParams

_OF_PARAMS = (
    "temperatures", "seeds", "top_ks", "top_ps", "min_ps", "repetition_penalties", "presence_penalties",
    "frequency_penalties",
)  # fmt: skip
"""Fields of a Batch whose values SamplingParams has under the singular name."""


class SamplingValues:
    """One array per sampling value of a `Batch`, by its name there, with an entry per request index."""

    def __init__(self, num_indices: int) -> None:
        names = (*_OF_PARAMS, "prompt_lens", "token_masks", "logprobs", "logprob_tokens")
        self.arrays: dict[str, Values] = {name: copied_values(name, None, num_indices).copy() for name in names}
        self._plain = {name: copied_values(name, None, 1)[0] for name in names}
        self._used: dict[str, Values] = {}

    def set(self, at: int, params: SamplingParams, prompt_len: int) -> None:
        """Set the values of a request that starts at this index."""
        for name in _OF_PARAMS:
            self.put(name, at, getattr(params, singular(name)))
        self.put("prompt_lens", at, prompt_len if params.penalised else 0)
        self.put("token_masks", at, -1)
        self.ask_logprobs(at, params.logprobs)

    def put(self, name: str, at: int, value: float) -> None:
        self.arrays[name][at] = value
        if value != self._plain[name]:
            self._used[name] = self.arrays[name]

    def ask_logprobs(self, at: int, count: int | None, token: int = -1) -> None:
        """Ask for log-probabilities of the next sampled token, or of a given one; None asks for none."""
        self.put("logprobs", at, -1 if count is None else count)
        self.put("logprob_tokens", at, token)

    def ask_of_prompt(self, at: int, params: SamplingParams, left: Values, of_prompt: int) -> None:
        """Ask for log-probabilities of the next prompt token, `left[0]`, if the request has `prompt_logprobs`.

        `left` follows the tokens of this step. The first `of_prompt` of them are of the prompt.
        """
        if params.prompt_logprobs is None:
            return
        if not len(left):
            self.ask_logprobs(at, params.logprobs)
        elif of_prompt > 0:
            self.ask_logprobs(at, params.prompt_logprobs, int(left[0]))
        else:
            self.ask_logprobs(at, None)

    def copy(self, source: int, target: int) -> None:
        for values in self._used.values():
            values[target] = values[source]

    def of(self, places: Values) -> dict[str, Values]:
        """Return the values of some indices as arguments of a Batch. Values that no request has used are left out."""
        return {name: values[places] for name, values in self._used.items()}
