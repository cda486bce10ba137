"""Sampling parameters of one request."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from graphrt.config import Need
from graphrt.kernels.checks import FLOAT32_MAX, FLOAT32_TINY, check_int, check_number, shown
from graphrt.kernels.errors import ConfigError

_MAX_NEW_TOKENS = 1 << 30
_MAX_SEED = (1 << 32) - 1
_MAX_TOKEN = (1 << 31) - 1  # token ids are int32 on the device


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the output of one prompt is sampled, and when it ends.

    max_new_tokens      the output ends after this number of tokens
    temperature         0 is greedy. Noise is added in float32. Below about 1e-5 of the largest logit, tokens with equal
                        logits are no longer sampled evenly; below 1e-7 the lowest token id wins
    seed                seed of this request's random numbers, from 0 to 2**32 - 1
    stop_ids            token ids that end the output; any collection of ints, stored as a frozenset
    min_tokens          the logits of `stop_ids` are -inf until the output has this number of tokens. At most
                        max_new_tokens. `stop_ids` and `logit_bias` together may then have at most
                        RuntimeConfig.max_logit_bias tokens
    top_k               keep the k most likely tokens; 0 keeps all
    top_p               keep the most likely tokens whose probabilities add up to top_p, in (0, 1]; 1 keeps all
    min_p               keep tokens with at least min_p times the probability of the most likely token, in [0, 1];
                        0 keeps all
    repetition_penalty  above 0: divides positive logits of tokens in the prompt or output, and multiplies their other
                        logits; 1 is off
    presence_penalty    subtracted from the logit of each token in the output; 0 is off, negative values favor such
                        tokens
    frequency_penalty   subtracted once per occurrence of the token in the output; 0 is off
    logit_bias          values by token id that are added to logits; -inf forbids a token. At most
                        RuntimeConfig.max_logit_bias tokens
    logprobs            return log-probabilities of each sampled token and of this many most likely tokens; None returns
                        no log-probabilities. They are computed from the model's logits, before all processing. At most
                        RuntimeConfig.max_logprobs
    prompt_logprobs     the same for each prompt token except the first. The prompt then runs one token per step

    Logits are processed in vLLM's order: token mask, bias and `min_tokens`, penalties, temperature, min-p, top-k,
    top-p. Top-k and top-p also keep tokens whose logit equals that of the last kept token. With top_k=1, only the
    lowest of these token ids is kept. Penalties need a runtime with `RuntimeConfig(penalties=True)`.

    Raises: ConfigError: if a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, least, most, advice in (
            ("max_new_tokens", 1, _MAX_NEW_TOKENS, "pass the maximum number of output tokens"),
            ("seed", 0, _MAX_SEED, "take it modulo 2 ** 32"),
            ("top_k", 0, _MAX_NEW_TOKENS, "0 keeps all tokens"),
        ):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least, most, advice=advice))
        advice = "lower it, or raise max_new_tokens"
        min_tokens = check_int("min_tokens", self.min_tokens, 0, self.max_new_tokens, advice=advice)
        object.__setattr__(self, "min_tokens", min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                advice = "None returns no log-probabilities"
                object.__setattr__(self, name, check_int(name, count, 0, _MAX_NEW_TOKENS, advice=advice))
        for name, lowest, highest, advice in (
            ("temperature", 0, FLOAT32_MAX, "0 is greedy"),
            ("top_p", FLOAT32_TINY, 1, "1 keeps all tokens"),
            ("min_p", 0, 1, "0 keeps all tokens"),
            ("repetition_penalty", FLOAT32_TINY, FLOAT32_MAX, "1 is off"),
            ("presence_penalty", -FLOAT32_MAX, FLOAT32_MAX, "0 is off"),
            ("frequency_penalty", -FLOAT32_MAX, FLOAT32_MAX, "0 is off"),
        ):
            value = check_number(name, getattr(self, name), lowest, highest, advice=advice)
            object.__setattr__(self, name, value)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias: expected values by token id, got {shown(self.logit_bias)}; pass a dict")
        bias = {}
        for token, value in self.logit_bias.items():
            token = check_int("logit_bias", token, 0, _MAX_TOKEN, advice="pass token ids")
            if not (isinstance(value, Real) and value == -math.inf):
                value = check_number("logit_bias", value, -FLOAT32_MAX, FLOAT32_MAX, advice="-inf forbids a token")
            bias[token] = float(value)
        object.__setattr__(self, "logit_bias", bias)
        try:
            if not isinstance(self.stop_ids, Collection) or isinstance(self.stop_ids, (str, bytes, Mapping)):
                raise TypeError
            given = list(self.stop_ids)
        except TypeError as error:  # a 0-d array is a Collection too
            raise ConfigError(
                f"stop_ids: expected a collection of token ids, got {shown(self.stop_ids)}; pass a set"
            ) from error
        stop_ids = [check_int("stop_ids", token, 0, _MAX_TOKEN, advice="pass token ids") for token in given]
        object.__setattr__(self, "stop_ids", frozenset(stop_ids))

    @property
    def penalized(self) -> bool:
        """Whether any penalty is on. If so, every computed token must be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def truncated(self) -> bool:
        """Whether top_k, top_p or min_p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def banned(self, prompt_len: int, vocab_size: int) -> tuple[frozenset[int], int] | None:
        """Return the tokens that `min_tokens` forbids and the first sequence length that allows them, or None.

        See `RequestTables.set_logit_bias`.
        """
        tokens = frozenset(token for token in self.stop_ids if token < vocab_size) if self.min_tokens else frozenset()
        return (tokens, prompt_len + self.min_tokens) if tokens else None

    @property
    def needs(self) -> tuple[Need, ...]:
        """The fields of RuntimeConfig that this request needs, and their lowest values."""
        on = {"truncation": self.truncated, "penalties": self.penalized}
        options = [(name, 1) for name, is_on in on.items() if is_on]
        asked = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        changed = self.logit_bias.keys() | self.stop_ids if self.min_tokens else self.logit_bias
        return (*options, ("max_logit_bias", len(changed)), *(("max_logprobs", count) for count in asked))


def config_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the RuntimeConfig fields that these parameters need."""
    most: dict[str, int] = {}
    for name, least in params.needs:
        most[name] = max(least, most.get(name, least))
    return most | {"penalties": "penalties" in most} | dict.fromkeys(most.keys() & {"truncation"}, True)
