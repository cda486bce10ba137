"""Modules that mix tokens, or compute something else by the number of tokens, are refused or left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

import graphrt
from graphrt.integrations.transformers.runtime import host
from tests.integrations.test_from_transformers import make_model

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shifted(distance: int) -> Change:
    """Add the values of the token at this distance, before or after."""

    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        moved = torch.zeros_like(y)
        if distance > 0:
            moved[:, distance:] = y[:, :-distance]
        else:
            moved[:, :distance] = y[:, -distance:]
        return y + 30 * moved

    return change


def limited(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Keep the tokens that fit into the capacity of an expert."""
    first = x.sum(-1).topk(min(16, x.shape[1]), dim=1).indices
    return y * torch.zeros_like(y[..., :1]).scatter(1, first[..., None], 1)


def pooled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add the sum of each eight tokens."""
    parts = torch.nn.functional.pad(y, (0, 0, 0, -y.shape[1] % 8)).unflatten(1, (-1, 8)).sum(2)
    return y + parts.repeat_interleave(8, 1)[:, : y.shape[1]]


MIXING: dict[str, Change] = {
    **{f"shift-{distance}": shifted(distance) for distance in (1, 3, 5, 8, 60, 100, -1, -4, -100)},
    "pooled": pooled,
    "mean": lambda x, y: y - y.mean(1, keepdim=True),
    "capacity": limited,
    "only-one-token": lambda x, y: 2 * y if x.shape[1] == 1 else y,
    "more-than-50-tokens": lambda x, y: 2 * y if x.shape[1] > 50 else y,
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [(name, "float32") for name in MIXING] + [("shift-100", "bfloat16")])
def test_mixing_at_any_distance_is_refused_with_the_line(name: str, dtype: str) -> None:
    model = make_model("Llama", max_position_embeddings=128).to(getattr(torch, dtype))

    class Mixing(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MIXING[name](x, super().forward(x))

    model.model.layers[1].mlp.__class__ = Mixing
    line = Mixing.forward.__code__.co_firstlineno
    with pytest.raises(graphrt.UnsupportedError, match=rf"Mixing at \S+\.py:{line} gives a token other values"):
        host(model, 128)
