"""The arguments of the attention operators, shared by operators, kernels and references."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.op_declaration import Written


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of one call over the paged cache or over contiguous K and V; see `paged_attention` for the tensors.

    table      paged: the block table; contiguous: kv_start_loc
    starts     query_start_loc; None: each request has plan.shape.query_len new tokens
    seq_lens   None: K and V are contiguous
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor | None
    seq_lens: torch.Tensor | None
    work_list: torch.Tensor
    out: Written
    lse: Written | None
    workspace: AttentionWorkspace
    options: AttentionOptions
    plan: AttentionPlan
    pdl: bool


@dataclass(frozen=True, slots=True)
class ScheduleCall:
    """A call that schedules one step; see `schedule_attention` for the tensors."""

    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    work_list: Written
    causal: bool
    sliding_window: int
    attention_chunk_size: int
    seq_lens_are_starts: bool
    plan: AttentionPlan
