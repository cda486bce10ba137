"""Encoder layers on graphrt's own kernels: bidirectional attention within each packed sequence."""

from __future__ import annotations

import torch

from graphrt.backends.base import AttentionLayer
from graphrt.backends.capabilities import BackendContext
from graphrt.backends.prompt_schedules import PromptKind, PromptSchedules
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_plan import PROMPT_HEAD_DIMS
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec


def why_no_encoder(context: BackendContext) -> list[str]:
    """Return the reasons why the prompt kernel cannot serve the encoder layers of a context."""
    reasons = []
    for spec in dict.fromkeys(spec for spec in context.attention if not spec.is_cached):
        if spec.head_dim not in PROMPT_HEAD_DIMS:
            reasons.append(f"head_dim {spec.head_dim} in encoder attention: supports multiples of 8 from 16 to 256")
        if spec.v_head_dim is not None:
            reasons.append(f"v_head_dim {spec.v_head_dim} in encoder attention: supports that of the keys")
    return reasons


class EncoderKernels:
    """Schedules and launches of the encoder layers of one backend. Does nothing if the model has none."""

    def __init__(self, context: BackendContext) -> None:
        self._schedules = PromptSchedules(context, (_kind(s) for s in context.attention if not s.is_cached))

    def allocate(self) -> None:
        """Allocate one schedule per kind of layer."""
        self._schedules.allocate()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the schedules, which each step rewrites before it reads them."""
        return self._schedules.tensors("encoder_schedule")

    def close(self) -> None:
        """Drop the schedules."""
        self._schedules.close()

    def schedule(self, metadata: StepMetadata) -> None:
        """Compute the schedules, one launch per kind of layer. Capture-safe: the device reads where requests start."""
        starts = metadata.query_start_loc
        self._schedules.write(metadata.descriptor, starts, starts, packed=True)

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        """Attend in one launch, by this step's schedule. Capture-safe: the grid depends only on the descriptor."""
        window = layer.spec.sliding_window
        sides = None if window is None else (window - 1, window - 1)
        plan, schedule = self._schedules.of(_kind(layer.spec), metadata.descriptor)
        prompt_attention(q, k, v, out, plan, schedule, layer.options(sinks), window=sides, lse=lse)


def _kind(spec: AttentionSpec) -> PromptKind:
    return PromptKind(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.dtype, causal=False)
