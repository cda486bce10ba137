"""Experts as a fixed sequence of matrix products, for devices on which `grouped_mm` reads group sizes on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def dense_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute every expert for every token, and weight the results; an `ExpertsInterface` entry.

    Reads all weights once, as a decode step with many requests does anyway. Capture-safe.

    hidden         [tokens, width]
    top_k_index    [tokens, k]  ids of the experts
    top_k_weights  [tokens, k]
    """
    total = torch.zeros_like(hidden)
    if hidden.is_meta:
        return total
    for expert in range(self.num_experts):
        up = self.gate_up_proj if self.has_gate else self.up_proj
        x = _linear(self, hidden, up[expert], "gate_up_proj_bias" if self.has_gate else "up_proj_bias", expert)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = _linear(self, x, self.down_proj[expert], "down_proj_bias", expert)
        if getattr(self, "has_post_expert_norm", False):  # transformers 5.17 has no such norm
            x = self.post_expert_norm(x)
        weight = torch.where(top_k_index == expert, top_k_weights, 0).sum(-1, keepdim=True)
        total += x * weight.to(x.dtype)
    return total


def _linear(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: str, expert: int) -> torch.Tensor:
    added = getattr(self, bias)[expert] if self.has_bias else None
    return functional.linear(x, weight.t() if self.is_transposed else weight, added)
