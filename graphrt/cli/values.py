"""Convert command-line options to library values, and check them against the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path

from graphrt.cli.options import SamplingOptions
from graphrt.kernels.checks import shown
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.kernels.ops.sampling_logprobs import MAX_TOP
from graphrt.models.config import ModelConfig
from graphrt.models.loading import DUMMY_PREFIX, resolve_source
from graphrt.models.shapes import shape_config
from graphrt.sampling_params import SamplingParams

_DRAFTS = 4


def named_source(command: str, shape: str | None, model: str | None) -> str | ModelConfig:
    """Return the source of the model. Raises: ConfigError: unless exactly one of --shape and --model is given."""
    if shape is not None and model is None:
        return shape_config(shape)
    if model is not None and shape is None:
        return model
    got = "none" if shape is None else "both"
    raise ConfigError(f"{command}: expected one of --shape and --model, got {got}; specify one")


def draft_source(speculate: str | None) -> str | Path | None:
    """Return the source of the draft model of --speculate; None: none, or ngram. Raises: ConfigError: if there is no
    such model."""
    if speculate is None or speculate == "ngram" or speculate.startswith(DUMMY_PREFIX):
        return None if speculate == "ngram" else speculate
    try:
        path = resolve_source(speculate)
    except ConfigError as error:
        raise ConfigError(f"--speculate: expected ngram or a draft model, got {shown(speculate)}: {error}") from error
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"--speculate: the folder {str(path)!r} has no config.json; specify ngram, or a folder with config.json "
            "and safetensors files"
        )
    return path


def num_drafts(speculate: str | None, drafts: int | None) -> int:
    """Return the drafts per step, 0 without --speculate. Raises: ConfigError: if --drafts is given without
    --speculate."""
    if speculate is None and drafts is not None:
        raise ConfigError(
            f"--drafts: requires --speculate, got --drafts {drafts} alone; add --speculate ngram or a draft model, or "
            "leave --drafts out"
        )
    return 0 if speculate is None else drafts or _DRAFTS


def check_step_tokens(rows: int, step_tokens: int) -> None:
    """Raise ConfigError unless a step has room for a token of each request."""
    if step_tokens < rows:
        raise ConfigError(
            f"--step-tokens: expected at least --rows, {rows}, got {step_tokens}; raise it, or lower --rows"
        )


def sampling_params(
    options: SamplingOptions,
    max_new_tokens: int = 1,
    *,
    stop_ids: Collection[int] = (),
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the SamplingParams of a command, with seed 0. Raises: ConfigError."""
    values = {field.name: getattr(options, field.name) for field in fields(SamplingOptions)}
    values["prompt_logprobs"] = prompt_logprobs
    for option, name in (("--logprobs", "logprobs"), ("--prompt-logprobs", "prompt_logprobs")):
        if (count := values[name]) is not None and count > MAX_TOP:
            raise ConfigError(f"{option}: expected at most {MAX_TOP}, got {count}; request fewer tokens")
    values["logit_bias"] = _logit_bias(options.logit_bias or ())
    return SamplingParams(max_new_tokens, stop_ids=frozenset(stop_ids), min_tokens=min_tokens, **values)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise ConfigError if a biased token or a stop token is not in the vocabulary."""
    for name, tokens in (("--logit-bias", params.logit_bias), ("--stop-id", params.stop_ids)):
        for token in tokens:
            if token >= vocab_size:
                raise ConfigError(
                    f"{name}: expected token ids below vocab_size={vocab_size}, got {token}; pass ids of the vocabulary"
                )


def check_length(prompts: Sequence[Sequence[int]], max_new_tokens: int, positions: int) -> None:
    """Raise CapacityError if a prompt, or a prompt plus its output, exceeds the model's positions."""
    index = max(range(len(prompts)), key=lambda at: len(prompts[at]))
    length = len(prompts[index])
    which = "prompt" if len(prompts) == 1 else f"prompt {index + 1}"
    if length > positions:
        raise CapacityError(f"{which}: it has {length} tokens, but the model has {positions} positions; shorten it")
    if length + max_new_tokens - 1 > positions:
        raise CapacityError(
            f"{which}: {length} tokens and --max-new-tokens {max_new_tokens} are more than the model's {positions} "
            f"positions; lower --max-new-tokens to {positions + 1 - length}, or shorten the prompt"
        )


def _logit_bias(texts: Sequence[str]) -> dict[int, float]:
    """Parse options such as ID=X, and return the values by token."""
    bias: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            if not re.fullmatch(r"\s*[0-9]+\s*", token):
                raise ValueError("no token id")
            if int(token) in bias:
                raise ConfigError(
                    f"--logit-bias: token {token} is given twice, again in {text!r}; pass each token once"
                )
            bias[int(token)] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"--logit-bias: expected ID=X with a token id and a number, got {text!r}; pass 42=-5 or 42=-inf"
            ) from error
    return bias
