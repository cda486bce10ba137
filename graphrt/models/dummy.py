"""Random weights for benchmarks: generated on the device, and finite in every dtype."""

from __future__ import annotations

import torch

from graphrt.models.llama import LlamaModel


@torch.no_grad()
def fill_dummy_weights(model: LlamaModel, seed: int = 0) -> None:
    """Overwrite all weights in place with seeded noise that keeps activations near 1.

    Matrices have standard deviation 1 / sqrt(columns), so a product keeps the scale of its input. Norms are 1 and
    biases 0.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
