"""How the rows of a scheduler are sampled, as arrays that it keeps and picks each step's rows from."""

from __future__ import annotations

from graphrt.batch_values import Values, copied_values, of_row
from graphrt.sampling_params import SamplingParams

_OF_PARAMS = (
    "temperatures", "seeds", "top_ks", "top_ps", "min_ps", "repetition_penalties", "presence_penalties",
    "frequency_penalties",
)  # fmt: skip
"""Arrays of a Batch whose values SamplingParams has under the name of one row's value."""


class SamplingValues:
    """An array per value that a `Batch` takes of each row: greedy to begin with.

    arrays   by the names of `Batch`
    """

    def __init__(self, rows: int) -> None:
        names = (*_OF_PARAMS, "prompt_lens", "token_masks", "logprobs", "logprob_tokens")
        self.arrays: dict[str, Values] = {name: copied_values(name, None, rows).copy() for name in names}
        self._plain = {name: copied_values(name, None, 1)[0] for name in names}
        self._used: dict[str, Values] = {}

    def set(self, at: int, params: SamplingParams, prompt_len: int) -> None:
        """A sequence begins at a place."""
        for name in _OF_PARAMS:
            self.put(name, at, getattr(params, of_row(name)))
        self.put("prompt_lens", at, prompt_len if params.penalised else 0)
        self.put("token_masks", at, -1)
        self.ask_logprobs(at, params.logprobs)

    def put(self, name: str, at: int, value: float) -> None:
        """Change one value."""
        self.arrays[name][at] = value
        if value != self._plain[name]:
            self._used[name] = self.arrays[name]

    def ask_logprobs(self, at: int, count: int | None, token: int = -1) -> None:
        """Of the next token that is sampled, or of a given one."""
        self.put("logprobs", at, -1 if count is None else count)
        self.put("logprob_tokens", at, token)

    def ask_of_prompt(self, at: int, params: SamplingParams, left: Values, of_prompt: int) -> None:
        """With `prompt_logprobs`, of the next token of the prompt, `left[0]`; with none left, as of any sampled one.

        of_prompt   how many of `left` are the prompt's: others were sampled before, by a row that was suspended since
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
        """One place gets what another has."""
        for values in self._used.values():
            values[target] = values[source]

    def of(self, places: Values) -> dict[str, Values]:
        """The values of some places, as arguments of a Batch. What no sequence has used so far is left out: a batch
        need not look at it."""
        return {name: values[places] for name, values in self._used.items()}
