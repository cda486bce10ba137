"""graphrt's own prompt kernel as the prompt part of mixed steps: CUDA on Hopper, Triton elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer, BackendContext, Capabilities, GraphSupport
from graphrt.backends.triton import INTERPRETER_SMS, TritonBackend, kernels_on
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_native import runs_prompt_kernel
from graphrt.kernels.attention.prompt_plan import PROMPT_HEAD_DIMS, PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from graphrt.kernels.errors import CaptureError
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class _PlanKey:
    """What layers must have in common to share a plan and its schedule. Windows are not in it: a unit finds its own."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    whole_tiles: bool  # pages hold whole tiles of the CUDA kernel, which never runs on others

    @classmethod
    def of(cls, spec: AttentionSpec, kv: KVCacheSpec) -> _PlanKey:
        whole_tiles = kv.page_size % NATIVE_PAGE_MULTIPLE == 0
        return cls(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, kv.dtype, whole_tiles)


class TritonPrefill(AttentionBackend):
    """One launch per layer; a schedule per kind of layer is made on the device at the head of the step."""

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=TritonBackend.capabilities.devices,
        dtypes=TritonBackend.capabilities.dtypes,
        kv_dtypes=TritonBackend.capabilities.kv_dtypes,
        head_dims=tuple(PROMPT_HEAD_DIMS),
        page_sizes=None,
        layouts=TritonBackend.capabilities.layouts,
        max_query_len=1,
        sliding_window=True,
        logits_softcap=True,
        mixed=False,
        alibi=True,
        alibi_sqrt=True,
        sinks=True,
        lse=True,
        batch_invariant=True,
        kv_groups=True,
        prefill=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._layer_keys = [_PlanKey.of(spec, kv) for spec, kv, _ in context.layers]
        self._schedules: dict[_PlanKey, torch.Tensor] = {}
        self._plans: dict[tuple[_PlanKey, BatchDescriptor], PromptPlan] = {}
        self._num_sms, self._native = INTERPRETER_SMS, False
        if context.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(context.device).multi_processor_count
            self._native = runs_prompt_kernel(context.device)

    @classmethod
    def also_why_not(cls, context: BackendContext) -> list[str]:
        """What the decode kernels lack on this device: the interpreter on CPU, NVRTC on a GPU."""
        return TritonBackend.also_why_not(context)

    def allocate(self) -> None:
        """Allocate a schedule per kind of layer, for the largest size."""
        context = self.context
        largest = BatchDescriptor.mixed(context.max_num_tokens, context.max_num_reqs)
        self._schedules = {
            key: torch.zeros(self._plan(key, largest).schedule_words, dtype=torch.int32, device=context.device)
            for key in dict.fromkeys(self._layer_keys)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The schedules, which each step writes anew."""
        return {f"prompt_schedule_{index}": tensor for index, tensor in enumerate(self._schedules.values())}

    def close(self) -> None:
        """Drop the schedules."""
        self._schedules = {}

    def schedule(self, metadata: StepMetadata) -> None:
        """One launch per kind of layer writes its units. Capture-safe: lengths stay on the device."""
        if not self._schedules:
            raise CaptureError(f"backend {self.name}: expected schedules, got none; call allocate() before schedule()")
        with kernels_on(metadata.seq_lens.device):
            for key, schedule in self._schedules.items():
                plan = self._plan(key, metadata.descriptor)
                schedule_prompt(plan, metadata.seq_lens, metadata.query_start_loc, schedule)

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend by this step's schedule with one launch. Capture-safe: the grid follows from the descriptor."""
        key = self._layer_keys[layer.index]
        with kernels_on(q.device):
            prompt_attention(
                q,
                layer.k_cache,
                layer.v_cache,
                out,
                self._plan(key, metadata.descriptor),
                self._schedules[key],
                layer.options(sinks),
                block_table=metadata.block_tables[layer.group],
                lse=lse,
            )

    def _plan(self, key: _PlanKey, descriptor: BatchDescriptor) -> PromptPlan:
        found = self._plans.get((key, descriptor))  # every layer of every graph asks
        if found is None:
            found = self._plans[key, descriptor] = PromptPlan.make(
                descriptor.padded_reqs,
                descriptor.padded_tokens,
                num_q_heads=key.num_q_heads,
                num_kv_heads=key.num_kv_heads,
                head_dim=key.head_dim,
                dtype=key.dtype,
                kv_dtype=key.kv_dtype,
                num_sms=self._num_sms,
                native=self._native and key.whole_tiles,
            )
        return found
