"""The arguments of `prompt_attention`, declared once: operator, kernels and reference take these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.op_declaration import Written


@dataclass(frozen=True, slots=True)
class PromptCall:
    """One call; `prompt_attention` says what the tensors hold.

    block_table   None: K and V are packed
    schedule      the CUDA kernel counts in its header, and leaves it as it was
    left, right   a token at position p sees from p - left to p + right, both without a bound where they are MAX_WINDOW
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor | None
    schedule: Written
    out: Written
    lse: Written | None
    left: int
    right: int
    options: AttentionOptions
    plan: PromptPlan
