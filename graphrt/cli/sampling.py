"""The sampling options of commands, as the library takes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import fields

from graphrt.cli.options import PromptOptions, SamplingOptions
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.ops.sampling_logprobs import MAX_TOP
from graphrt.sampling_params import SamplingParams


def sampling_params(
    options: SamplingOptions, max_new_tokens: int = 1, stop_ids: Collection[int] = ()
) -> SamplingParams:
    """How a command samples, of seed 0. Raises: ConfigError."""
    kind = PromptOptions if isinstance(options, PromptOptions) else SamplingOptions
    values = {field.name: getattr(options, field.name) for field in fields(kind)}
    for option, name in (("--logprobs", "logprobs"), ("--prompt-logprobs", "prompt_logprobs")):
        if (count := values.get(name)) is not None and count > MAX_TOP:
            raise ConfigError(f"{option}: expected at most {MAX_TOP}, got {count}; ask for fewer tokens")
    values["logit_bias"] = _logit_bias(options.logit_bias or ())
    return SamplingParams(max_new_tokens, stop_ids=frozenset(stop_ids), **values)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise ConfigError for a biased token, or one that ends an answer, that there is not."""
    for name, tokens in (("--logit-bias", params.logit_bias), ("--stop-id", params.stop_ids)):
        for token in tokens:
            if token >= vocab_size:
                raise ConfigError(
                    f"{name}: expected token ids below {vocab_size}, got {token}; name one of the vocabulary"
                )


def _logit_bias(texts: Sequence[str]) -> dict[int, float]:
    """The values of tokens that were given as ID=X."""
    bias: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            if not re.fullmatch(r"\s*[0-9]+\s*", token):
                raise ValueError("no token id")
            if int(token) in bias:
                raise ConfigError(
                    f"--logit-bias: expected each token once, got {token} again in {text!r}; leave one out"
                )
            bias[int(token)] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"--logit-bias: expected ID=X with a token id and a number, got {text!r}; pass 42=-5 or 42=-inf"
            ) from error
    return bias
