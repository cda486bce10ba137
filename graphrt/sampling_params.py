"""How one sequence is continued: its sampling, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Real

from graphrt.config import Need
from graphrt.kernels.checks import FLOAT32_MAX, FLOAT32_TINY, check_int, check_number, shown
from graphrt.kernels.errors import ConfigError

_MAX_NEW_TOKENS = 1 << 30
_MAX_SEED = (1 << 32) - 1
_MAX_TOKEN = (1 << 31) - 1  # the device has token ids as int32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is continued.

    temperature   0 is greedy. Noise is added in float32: at less than 1e-5 of the largest logit, tokens of equal logits
                  are not drawn evenly any more, and at less than 1e-7 the lowest one is
    seed          of this prompt's random numbers, which depend on nothing else; the logits that they are added to may
                  differ in their last bits between captured sizes
    stop_ids      tokens that end the output; any collection of ints, kept as a frozenset
    min_tokens    the logits of `stop_ids` are -inf until the output has so many tokens, at most max_new_tokens. Stop
                  tokens and tokens with a bias then share the entries of RuntimeConfig.max_logit_bias
    min_p         keep tokens with at least this share of the best one's probability, in [0, 1]; 0: all
    top_k         of these keep the k most likely ones; 0: all
    top_p         of these keep the fewest most likely ones that hold this probability, in (0, 1]; 1: all. Tokens as
                  likely as the last one that top_k or top_p keeps are kept too, but for top_k 1, which takes the lowest
    repetition_penalty   above 0: logits of tokens in the prompt or output are divided by it where they are above 0,
                  else multiplied; 1: none
    presence_penalty, frequency_penalty   subtracted from logits of tokens in the output: once, and for each time that
                  the token is there; 0: none, below 0 a token is preferred

    logit_bias    values that are added to the logits of some tokens, by token; -inf forbids one. At most
                  RuntimeConfig.max_logit_bias of them

    logprobs      give log-probabilities of each sampled token, and of so many best ones; None: of none. They are those
                  of the model's logits, before all else. At most RuntimeConfig.max_logprobs
    prompt_logprobs   the same of each token of the prompt but the first. Such a prompt runs one token a step, as each
                  needs logits of its own: a prompt of 1,000 tokens takes 1,000 steps, beside the other rows

    Logits are processed as vLLM does it: token mask, bias, penalties, temperature, min-p, top-k, top-p. A prompt with
    penalties needs a runtime with `RuntimeConfig(penalties=True)`.
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
            ("max_new_tokens", 1, _MAX_NEW_TOKENS, "pass how many tokens may follow the prompt"),
            ("seed", 0, _MAX_SEED, "take it modulo 2 ** 32"),
            ("top_k", 0, _MAX_NEW_TOKENS, "0 is all tokens"),
        ):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least, most, advice=advice))
        advice = "lower it, or raise max_new_tokens"
        min_tokens = check_int("min_tokens", self.min_tokens, 0, self.max_new_tokens, advice=advice)
        object.__setattr__(self, "min_tokens", min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                advice = "None without log-probabilities"
                object.__setattr__(self, name, check_int(name, count, 0, _MAX_NEW_TOKENS, advice=advice))
        temperature = check_number("temperature", self.temperature, 0, FLOAT32_MAX, advice="0 is greedy")
        object.__setattr__(self, "temperature", temperature)
        for name, lowest, advice in (("top_p", FLOAT32_TINY, "1 is all tokens"), ("min_p", 0.0, "0 is all tokens")):
            object.__setattr__(self, name, check_number(name, getattr(self, name), lowest, 1, advice=advice))
        for name, lowest, advice in (
            ("repetition_penalty", FLOAT32_TINY, "1 is none"),
            ("presence_penalty", -FLOAT32_MAX, "0 is none"),
            ("frequency_penalty", -FLOAT32_MAX, "0 is none"),
        ):
            value = check_number(name, getattr(self, name), lowest, FLOAT32_MAX, advice=advice)
            object.__setattr__(self, name, value)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias: expected values by token, got {shown(self.logit_bias)}; pass a dict")
        bias = {}
        for token, value in self.logit_bias.items():
            token = check_int("logit_bias", token, 0, _MAX_TOKEN, advice="pass token ids")
            forbids = isinstance(value, Real) and value == -math.inf
            bias[token] = (
                -math.inf
                if forbids
                else check_number("logit_bias", value, -FLOAT32_MAX, FLOAT32_MAX, advice="-inf forbids a token")
            )
        object.__setattr__(self, "logit_bias", bias)
        try:
            if not isinstance(self.stop_ids, Collection) or isinstance(self.stop_ids, (str, bytes, Mapping)):
                raise TypeError
            given = list(self.stop_ids)
        except TypeError as error:  # an array of no dimensions is a Collection too
            raise ConfigError(
                f"stop_ids: expected a set of token ids, got {shown(self.stop_ids)}; pass frozenset(...)"
            ) from error
        stop_ids = [check_int("stop_ids", token, 0, _MAX_TOKEN, advice="pass token ids") for token in given]
        object.__setattr__(self, "stop_ids", frozenset(stop_ids))

    @property
    def penalised(self) -> bool:
        """Whether the prompt has a penalty, which needs every token that is computed to be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def banned(self, prompt_len: int, vocab_size: int) -> tuple[frozenset[int], int] | None:
        """Return the tokens that `min_tokens` forbids and the sequence length that ends this; None if there are none.

        See `RequestTables.set_logit_bias`.
        """
        tokens = frozenset(token for token in self.stop_ids if token < vocab_size) if self.min_tokens else frozenset()
        return (tokens, prompt_len + self.min_tokens) if tokens else None

    @property
    def needs(self) -> tuple[Need, ...]:
        """What a runtime must have been built with."""
        penalties = (("penalties", 1),) if self.penalised else ()
        asked = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        changed = self.logit_bias.keys() | self.stop_ids if self.min_tokens else self.logit_bias
        return (*penalties, ("max_logit_bias", len(changed)), *(("max_logprobs", count) for count in asked))
