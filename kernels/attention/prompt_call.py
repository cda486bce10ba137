"""The arguments of `prompt_attention`, shared by operator, kernels and reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.op_declaration import Written


@dataclass(frozen=True, slots=True)
class PromptCall:
    """Arguments of one `prompt_attention` call; see `prompt_attention` for the tensors.

    block_table   None: K and V are packed
    schedule      its header has counters that the CUDA kernel uses and resets
    left, right   a token at position p sees positions p - left to p + right; MAX_WINDOW: no bound
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
