"""Checks of options before a model is loaded."""

from __future__ import annotations

from graphrt.kernels.errors import ConfigError
from graphrt.models.config import ModelConfig
from graphrt.models.shapes import shape_config


def named_source(command: str, shape: str | None, model: str | None) -> str | ModelConfig:
    """Return the source to load a model from. Raises: ConfigError: unless one of --shape and --model is given."""
    if shape is not None and model is None:
        return shape_config(shape)
    if model is not None and shape is None:
        return model
    got = "none" if shape is None else "both"
    raise ConfigError(f"{command}: expected one of --shape and --model, got {got}; name one")


def check_room(step_tokens: int, rows: int) -> None:
    """Raise ConfigError if a step cannot hold a token of each request."""
    if step_tokens < rows:
        raise ConfigError(
            f"--step-tokens: expected at least --rows, {rows}, got {step_tokens}; raise it, or lower --rows"
        )
