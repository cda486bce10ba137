"""Encoder layers on graphrt's own kernels: packed rows that see themselves, on both sides of a token."""

from __future__ import annotations

import torch

from graphrt.backends.base import AttentionLayer, BackendContext
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_native import runs_prompt_kernel
from graphrt.kernels.attention.prompt_plan import PROMPT_HEAD_DIMS, PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from graphrt.kernels.errors import CaptureError
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec

_Key = tuple[int, int, int, torch.dtype]
"""What layers must have in common to share a schedule: query heads, KV heads, head_dim, dtype. Windows may differ."""


def _key(spec: AttentionSpec) -> _Key:
    return spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.dtype


def why_no_encoder(context: BackendContext) -> list[str]:
    """Reasons against the encoder layers of a context; none where it has none."""
    reasons = []
    for spec in dict.fromkeys(spec for spec in context.attention if not spec.is_cached):
        if spec.head_dim not in PROMPT_HEAD_DIMS:
            reasons.append(f"head_dim {spec.head_dim} in encoder attention: supports multiples of 8 from 16 to 256")
        if spec.v_head_dim is not None:
            reasons.append(f"v_head_dim {spec.v_head_dim} in encoder attention: supports that of the keys")
    return reasons


class EncoderKernels:
    """Schedules and launches of the encoder layers of one backend. Where there are none it does nothing."""

    def __init__(self, context: BackendContext, num_sms: int) -> None:
        self._context, self._num_sms = context, num_sms
        self._native = runs_prompt_kernel(context.device)
        self._keys = list(dict.fromkeys(_key(spec) for spec in context.attention if not spec.is_cached))
        self._schedules: dict[_Key, torch.Tensor] = {}
        self._plans: dict[tuple[_Key, BatchDescriptor], PromptPlan] = {}

    def allocate(self) -> None:
        """Allocate a schedule per kind of layer, for the largest size: no plan has more units than that one."""
        context = self._context
        largest = BatchDescriptor.mixed(context.max_num_tokens, context.max_num_reqs)
        for key in self._keys:
            words = self._plan(key, largest).schedule_words
            self._schedules[key] = torch.zeros(words, dtype=torch.int32, device=context.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The schedules, which each step rewrites before it reads them."""
        return {f"encoder_schedule_{index}": schedule for index, schedule in enumerate(self._schedules.values())}

    def close(self) -> None:
        """Drop the schedules."""
        self._schedules = {}

    def schedule(self, metadata: StepMetadata) -> None:
        """One launch per kind of layer. Capture-safe: where rows begin is read on the device."""
        starts = metadata.query_start_loc
        for key, schedule in self._schedules.items():
            schedule_prompt(self._plan(key, metadata.descriptor), starts, starts, schedule, seq_lens_are_starts=True)

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
        """One launch, by this step's schedule. Capture-safe: the grid follows from the descriptor."""
        key, window = _key(layer.spec), layer.spec.sliding_window
        if key not in self._schedules:
            raise CaptureError("encoder attention: expected a schedule, got none; call allocate() before run()")
        sides = None if window is None else (window - 1, window - 1)
        plan, options = self._plan(key, metadata.descriptor), layer.options(sinks)
        prompt_attention(q, k, v, out, plan, self._schedules[key], options, window=sides, lse=lse)

    def _plan(self, key: _Key, descriptor: BatchDescriptor) -> PromptPlan:
        found = self._plans.get((key, descriptor))
        if found is None:
            num_q_heads, num_kv_heads, head_dim, dtype = key
            found = self._plans[key, descriptor] = PromptPlan.make(
                descriptor.padded_reqs,
                descriptor.padded_tokens,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                num_sms=self._num_sms,
                causal=False,
                native=self._native,
            )
        return found
