"""Plans and schedules of graphrt's prompt kernel per kind of layer, for prefill parts and encoder layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from graphrt.backends.capabilities import BackendContext
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.prompt_native import runs_prompt_kernel
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt

INTERPRETER_SMS = 4  # few, because an interpreted program takes milliseconds


class PromptKind(NamedTuple):
    """Layers of the same kind share a plan and its schedule. Windows may differ, because each tile computes its own.

    native   whether the CUDA kernel may serve these layers on devices that run it
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    native: bool = True


class PromptSchedules:
    """A schedule per kind of layer, which each step rewrites, and a plan per kind and size.

    Without kinds, it has no tensors, and its methods do nothing.
    """

    def __init__(self, context: BackendContext, kinds: Iterable[PromptKind]) -> None:
        self._context, self._kinds = context, tuple(dict.fromkeys(kinds))
        self._num_sms, self._native = num_sms_of(context.device), runs_prompt_kernel(context.device)
        self._schedules: dict[PromptKind, torch.Tensor] = {}
        self._plan = cache(self._make_plan)  # looked up by every layer of every graph

    def allocate(self) -> None:
        """Allocate one schedule per kind for the largest size, whose plan needs the most words."""
        context = self._context
        largest = BatchDescriptor.mixed(context.max_num_tokens, context.max_num_reqs)
        for kind in self._kinds:
            words = self._plan(kind, largest).schedule_words
            self._schedules[kind] = torch.zeros(words, dtype=torch.int32, device=context.device)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the schedules, named `name` and a number."""
        return {f"{name}_{index}": tensor for index, tensor in enumerate(self._schedules.values())}

    def close(self) -> None:
        self._schedules = {}

    def write(self, descriptor: BatchDescriptor, lens: torch.Tensor, starts: torch.Tensor, *, packed: bool) -> None:
        """Compute the schedules of a step, one launch per kind. Capture-safe: lengths stay on the device.

        lens, starts   [padded_reqs], [padded_reqs + 1]  int32  see `schedule_prompt`
        packed         `lens` contains the starts of packed sequences instead of lengths
        """
        for kind in self._kinds:
            plan, schedule = self.of(kind, descriptor)
            schedule_prompt(plan, lens, starts, schedule, seq_lens_are_starts=packed)

    def of(self, kind: PromptKind, descriptor: BatchDescriptor) -> tuple[PromptPlan, torch.Tensor]:
        """Return the plan and the schedule of a kind at one size."""
        return self._plan(kind, descriptor), self._schedules[kind]

    def _make_plan(self, kind: PromptKind, descriptor: BatchDescriptor) -> PromptPlan:
        sizes = kind._asdict() | {"native": self._native and kind.native}
        return PromptPlan.make(descriptor.padded_reqs, descriptor.padded_tokens, num_sms=self._num_sms, **sizes)


def num_sms_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; INTERPRETER_SMS on CPU."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
