"""Scratch memory of attention calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.op_declaration import Written


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Scratch memory that layers and graphs share if they run one after another.

    Concurrent calls need separate workspaces, because each call would read the other's words. A block that waits for a
    word that never arrives aborts the kernel after about ten seconds. A work list from a different plan also causes
    such an abort.

    partial_out   [*] float32  partial results of split query tiles; used only within one call
    partial_lse   [*] float32  log-sum-exps of partial results, in units of log 2
    counters      [*] int32    arrival counters, and the fix-up buffer between blocks. All words are 0 between calls,
                               because the kernels reset them, unless a launch was aborted
    """

    partial_out: Written
    partial_lse: Written
    counters: Written

    @classmethod
    def allocate(cls, plans: Iterable[AttentionPlan], device: torch.device) -> AttentionWorkspace:
        """Allocate a workspace that is large enough for each plan. Raises: ShapeError: if there are no plans."""
        if isinstance(plans, AttentionPlan):
            raise ShapeError("plans: expected a list of plans, got an AttentionPlan; pass [plan]")
        plans = list(plans)
        if not plans:
            raise ShapeError("plans: expected at least one plan, got none; pass the plans of all captured sizes")
        out_size = max(plan.partial_elements for plan in plans)
        lse_size = max(plan.partial_lses for plan in plans)
        counters = max(plan.num_counters for plan in plans)
        return cls(
            torch.zeros(max(out_size, 1), dtype=torch.float32, device=device),
            torch.zeros(max(lse_size, 1), dtype=torch.float32, device=device),
            torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
        )
