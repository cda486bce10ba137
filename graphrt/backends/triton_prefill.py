"""graphrt's own prompt kernel as the prompt part of mixed steps: CUDA on Hopper, Triton elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer, BackendContext, Capabilities, GraphSupport
from graphrt.backends.prompt_schedules import PromptKind, PromptSchedules
from graphrt.backends.triton import TritonBackend, kernels_on
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_plan import PROMPT_HEAD_DIMS
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec


class TritonPrefill(AttentionBackend):
    """One launch per layer; a schedule per kind of layer is made on the device at the head of the step."""

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = replace(
        TritonBackend.capabilities,
        head_dims=tuple(PROMPT_HEAD_DIMS),
        max_query_len=1,
        mixed=False,
        v_head_dim=False,
        attention_chunk_size=False,
        cross_attention=False,
        encoder_attention=False,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._layer_kinds = [_kind(spec, kv) for spec, kv, _ in context.layers]
        self._schedules = PromptSchedules(context, self._layer_kinds)

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """What the decode kernels lack on this device: the interpreter on CPU, NVRTC on a GPU."""
        return TritonBackend.extra_unsupported_reasons(context)

    def allocate(self) -> None:
        """Allocate a schedule per kind of layer, for the largest size."""
        self._schedules.allocate()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The schedules, which each step writes anew."""
        return self._schedules.tensors("prompt_schedule")

    def close(self) -> None:
        """Drop the schedules."""
        self._schedules.close()

    def schedule(self, metadata: StepMetadata) -> None:
        """One launch per kind of layer writes its units. Capture-safe: lengths stay on the device."""
        with kernels_on(metadata.seq_lens.device):
            self._schedules.write(metadata.descriptor, metadata.seq_lens, metadata.query_start_loc, packed=False)

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
        plan, schedule = self._schedules.of(self._layer_kinds[layer.index], metadata.descriptor)
        table, options = metadata.block_tables[layer.group], layer.options(sinks)
        with kernels_on(q.device):
            prompt_attention(q, layer.k_cache, layer.v_cache, out, plan, schedule, options, block_table=table, lse=lse)


def _kind(spec: AttentionSpec, kv: KVCacheSpec) -> PromptKind:
    """The CUDA kernel never runs on pages that hold no whole tiles of it."""
    whole_tiles = kv.page_size % NATIVE_PAGE_MULTIPLE == 0
    heads = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
    return PromptKind(*heads, spec.dtype, kv.dtype, causal=True, native=whole_tiles)
