"""How a benchmark samples: what a runtime must be built with for it, and how a report says it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from graphrt.sampling_params import SamplingParams


def stated_sampling(params: SamplingParams) -> dict[str, Any]:
    """What of some params is not as by default, as values that `json.dumps` takes; lengths, seeds and stops aside."""
    aside = ("max_new_tokens", "seed", "stop_ids")
    stated = {field.name: getattr(params, field.name) for field in fields(params) if field.name not in aside}
    stated = {name: value for name, value in stated.items() if value != getattr(SamplingParams(), name)}
    if "logit_bias" in stated:  # JSON has no infinity
        stated["logit_bias"] = {str(token): str(value) for token, value in params.logit_bias.items()}
    return stated


def config_fields(params: SamplingParams) -> dict[str, Any]:
    """What a runtime is to be built with for sequences of such params, by the names of RuntimeConfig."""
    most: dict[str, int] = {}
    for name, least in params.needs:
        most[name] = max(least, most.get(name, least))
    return most | {"penalties": "penalties" in most}


def described(params: SamplingParams) -> str:
    """The same in a line."""
    return ", ".join(f"{name} {value}" for name, value in stated_sampling(params).items()) or "greedy"
