"""Copy a checkpoint into the weights of a model, after a check of names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from graphrt.kernels.errors import ConfigError
from graphrt.kernels.ops.quantized import QuantizedWeight, Weight
from graphrt.models.config import ModelConfig
from graphrt.models.fields import printable
from graphrt.models.quantization import Quantization

Index = tuple[slice, ...]
"""A part of a tensor: the rows, and the columns of a matrix. () is the whole tensor."""


class WeightSource(Protocol):
    """A checkpoint: tensors by their Hugging Face names, read one at a time."""

    @property
    def quantization(self) -> Quantization | None:
        """How the checkpoint's weights are quantized."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the checkpoint's table of contents."""
        ...

    def copy_into(self, name: str, target: Weight, index: Index = ()) -> None:
        """Copy one tensor, or `tensor[index]`, into `target`, converting its dtype and device. A tensor takes a
        quantized weight too. A quantized target takes only a quantized weight, which may have fewer rows and columns.
        """
        ...

    def has_own_head(self) -> bool:
        """Return whether the checkpoint has an output head that differs from its embedding."""
        ...


class TensorSource:
    """A WeightSource for tensors in memory."""

    quantization = None

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def copy_into(self, name: str, target: Weight, index: Index = ()) -> None:
        assert not isinstance(target, QuantizedWeight), "check_weights refuses tensors for quantized weights"
        target.copy_(self._tensors[name][index])

    def has_own_head(self) -> bool:
        embedding, head = (self._tensors.get(f"{name}.weight") for name in ("model.embed_tokens", "lm_head"))
        return embedding is not None and head is not None and not torch.equal(embedding, head.to(embedding))


def check_weights(config: ModelConfig, expected: Mapping[str, tuple[int, ...]], checkpoint: WeightSource) -> None:
    """Check the names of a checkpoint's tensors, and that they have the expected shapes.

    Raises:
        ConfigError: if tensors are missing, unknown or of the wrong shape, if the checkpoint has a head and the model
            has none, or if the model's weights are quantized differently.
    """
    shapes = checkpoint.shapes()
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unknown = [n for n in shapes if n not in expected and n not in ignored and "rotary_emb." not in n]
    missing = [name for name in expected if name not in shapes]
    misshaped = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    found = {"missing": missing, "unknown": unknown, "of the wrong shape": misshaped}
    if any(found.values()):
        text = "; ".join(f"{len(names)} {kind}: {_listing(names)}" for kind, names in found.items() if names)
        raise ConfigError(
            f"weights: expected the {len(expected)} tensors of this {config.architecture} model, got {text}; "
            "use the config that belongs to the checkpoint"
        )
    if config.tie_word_embeddings and checkpoint.has_own_head():
        raise ConfigError(
            "weights: lm_head.weight differs from model.embed_tokens.weight, and this model uses one tensor for "
            "both; build the model with tie_word_embeddings=False"
        )
    if config.quantization not in (None, checkpoint.quantization):
        raise ConfigError(
            f"weights: the checkpoint is not quantized like the model, which has weights of {config.quantization.bits} "
            "bits; build the model with the config of the checkpoint"
        )


def _listing(names: list[str], most: int = 6) -> str:
    return printable(", ".join(names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
