"""Sampling parameters of benchmarks, as reports state them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from graphrt.sampling_params import SamplingParams


def stated_sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the non-default parameters as JSON values, excluding lengths, seeds and stops."""
    aside = ("max_new_tokens", "seed", "stop_ids")
    stated = {field.name: getattr(params, field.name) for field in fields(params) if field.name not in aside}
    stated = {name: value for name, value in stated.items() if value != getattr(SamplingParams(), name)}
    if "logit_bias" in stated:  # JSON has no infinity
        stated["logit_bias"] = {str(token): str(value) for token, value in params.logit_bias.items()}
    return stated


def described(params: SamplingParams) -> str:
    """Return the non-default parameters as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in stated_sampling(params).items()) or "greedy"
