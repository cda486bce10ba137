"""graphrt's own kernels: one work-list driven kernel for decode and mixed batches, one for prefill parts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from typing import ClassVar, NamedTuple

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport, listing
from graphrt.backends.prompt_schedules import PromptKind, PromptSchedules, num_sms_of
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.kernels.attention.arguments import HEAD_DIMS
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.plan_shape import MAX_QUERY_LEN
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_plan import PROMPT_HEAD_DIMS
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.launcher import overlaps
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted
from graphrt.kernels.native.nvrtc import nvrtc_fault, runs_native
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec


class _Sizes(NamedTuple):
    """Layers with equal sizes share a plan."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


class _ScheduleKey(NamedTuple):
    """Layers with the same key share a work list. KV groups may differ, because a work list contains no page ids."""

    sizes: _Sizes
    sliding_window: int
    attention_chunk_size: int
    whole_tiles: bool
    kind: AttentionKind  # decides which lengths are read, and whether the mask is causal

    @classmethod
    def of(cls, spec: AttentionSpec, kv: KVCacheSpec) -> _ScheduleKey:
        return cls(
            _Sizes(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.dtype, kv.dtype),
            sliding_window=spec.sliding_window or 0,
            attention_chunk_size=spec.attention_chunk_size or 0,
            whole_tiles=_has_whole_tiles(kv),
            kind=spec.kind,
        )


def _has_whole_tiles(kv: KVCacheSpec) -> bool:
    """Return whether a page consists of whole tiles, which the CUDA kernels need."""
    return kv.page_size % NATIVE_PAGE_MULTIPLE == 0


class TritonBackend(AttentionBackend):
    """One kernel launch per layer, without planning on the host. Runs in the Triton interpreter on CPU, for tests.

    The device computes the schedule at the start of the step. Layers with equal heads and window share one work list
    and the launch that computes it.
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = replace(
        TorchReferenceBackend.capabilities,
        devices=("cuda", "cpu"),
        head_dims=HEAD_DIMS,
        max_query_len=MAX_QUERY_LEN,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        cached = [index for index, spec in enumerate(context.attention) if spec.is_cached]
        keys = (_ScheduleKey.of(spec, kv) for spec, kv, _ in context.layers)
        self._layer_keys = dict(zip(cached, keys, strict=True))
        self._keys = list(dict.fromkeys(self._layer_keys.values()))
        self._work_lists: dict[_ScheduleKey, torch.Tensor] = {}
        self._plan = cache(self._make_plan)  # looked up by every layer of every graph
        self._workspace: AttentionWorkspace | None = None
        self._num_sms = num_sms_of(context.device)
        self._native = context.device.type == "cpu" or runs_native(context.device)  # on CPU: same plans as on a GPU
        encoders = (spec for spec in context.attention if not spec.is_cached)
        self._encoder = PromptSchedules(context, map(_encoder_kind, encoders))

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """Return what is missing: the interpreter on CPU, NVRTC on a GPU, or a head size in encoder layers."""
        if context.device.type == "cpu" and not INTERPRETER_AVAILABLE:
            return ["device cpu: needs the Triton interpreter; set TRITON_INTERPRET=1 before triton is imported"]
        reasons = []
        for spec in dict.fromkeys(spec for spec in context.attention if not spec.is_cached):
            if spec.head_dim not in PROMPT_HEAD_DIMS:
                reasons.append(f"head_dim {spec.head_dim} in encoder attention: supports {listing(PROMPT_HEAD_DIMS)}")
            if spec.v_head_dim is not None:
                reasons.append(
                    f"v_head_dim {spec.v_head_dim} in encoder attention: supports only the head size of the keys"
                )
        if context.device.type == "cuda" and torch.cuda.is_available() and runs_native(context.device):
            fault = nvrtc_fault()
            reasons += [] if fault is None else [fault]
        return reasons

    @classmethod
    def prefill_class(cls) -> type[AttentionBackend]:
        return TritonPrefill

    def compiles_ahead(self, descriptor: BatchDescriptor) -> bool:
        return type(self) is TritonBackend  # a subclass may launch other kernels

    def allocate(self) -> None:
        """Allocate one work list per kind of layer and the split-KV workspace, for the largest sizes."""
        context = self.context
        powers = [1 << bit for bit in range(context.max_num_reqs.bit_length())]
        sizes = []
        if context.mixed_batches:
            sizes.append(BatchDescriptor.mixed(context.max_num_tokens, context.max_num_reqs))
        for rows in (*powers, context.max_num_reqs):
            sizes += [BatchDescriptor.decode(rows, query_len) for query_len in range(1, context.max_query_len + 1)]
        plans = {key: [self._plan(key, size) for size in sizes] for key in self._keys}
        self._work_lists = {
            key: torch.zeros(max(plan.work_list_words for plan in of_key), dtype=torch.int32, device=context.device)
            for key, of_key in plans.items()
        }
        every_plan = [plan for of_key in plans.values() for plan in of_key]
        if every_plan:  # empty if all layers are encoder layers
            self._workspace = AttentionWorkspace.allocate(every_plan, context.device)
        self._encoder.allocate()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return work lists and workspace. Between replays the counters are 0, and the rest is arbitrary."""
        tensors = self._encoder.tensors("encoder_schedule")
        if (work := self._workspace) is None:
            return tensors
        tensors |= {f"work_list_{index}": tensor for index, tensor in enumerate(self._work_lists.values())}
        return tensors | {"partial_out": work.partial_out, "partial_lse": work.partial_lse, "counters": work.counters}

    def reset(self) -> None:
        """Zero the counters of KV splits, and the partial results that follow them."""
        if self._workspace is not None:
            self._workspace.counters.zero_()

    def close(self) -> None:
        self._work_lists = {}
        self._workspace = None
        self._encoder.close()

    def schedule(self, metadata: StepMetadata) -> None:
        """Compute the work lists, one launch per kind of layer. Capture-safe: lengths stay on the device."""
        mixed = metadata.descriptor.kind is GraphKind.MIXED
        # A token of a tree is up to query_len positions before the same token of a chain, so its window begins earlier.
        ahead = 0 if metadata.tree_masks is None else metadata.descriptor.query_len
        with kernels_on(metadata.seq_lens.device):
            for key, work_list in self._work_lists.items():
                schedule_attention(
                    self._plan(key, metadata.descriptor),
                    metadata.kv_lens(key.kind),
                    work_list,
                    query_start_loc=metadata.query_start_loc if mixed else None,
                    causal=key.kind is AttentionKind.DECODER and metadata.kv_limits is None,
                    sliding_window=key.sliding_window and key.sliding_window + ahead,
                    attention_chunk_size=key.attention_chunk_size,
                )
            starts = metadata.query_start_loc
            self._encoder.write(metadata.descriptor, starts, starts, packed=True)

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
        """Attend in one launch, with the work list of this step.

        Capture-safe: the grid depends only on the descriptor, and lengths stay on the device.
        """
        key = self._layer_keys[layer.index]
        assert self._workspace is not None, "allocate() makes it"
        with kernels_on(q.device):
            paged_attention(
                q,
                layer.k_cache,
                layer.v_cache,
                metadata.block_tables[layer.group],
                metadata.kv_lens(key.kind),
                out,
                self._plan(key, metadata.descriptor),
                self._work_lists[key],
                self._workspace,
                layer.options(sinks, metadata.tree_masks, metadata.kv_limits),
                query_start_loc=metadata.query_start_loc if metadata.descriptor.kind is GraphKind.MIXED else None,
                lse=lse,
                pdl=overlaps(q.device),
            )

    def run_encoder(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend in one launch of the prompt kernel, with the schedule of this step. Capture-safe: see `run`."""
        window = layer.spec.sliding_window
        sides = None if window is None else (window - 1, window - 1)
        plan, schedule = self._encoder.of(_encoder_kind(layer.spec), metadata.descriptor)
        with kernels_on(q.device):
            prompt_attention(q, k, v, out, plan, schedule, layer.options(sinks), window=sides, lse=lse)

    def _make_plan(self, key: _ScheduleKey, descriptor: BatchDescriptor) -> AttentionPlan:
        options = key.sizes._asdict() | {"num_sms": self._num_sms, "batch_invariant": self.context.batch_invariant}
        if descriptor.kind is GraphKind.MIXED:
            return AttentionPlan.varlen(descriptor.padded_reqs, descriptor.padded_tokens, **options)
        native = self._native and key.whole_tiles  # the Triton kernel has better plans
        # The CUDA kernel has no masks for trees and limits.
        if (self.context.tree_drafts or self.context.context_parallel) and descriptor.query_len > 1:
            native = False
        return AttentionPlan.decode(descriptor.padded_reqs, query_len=descriptor.query_len, native=native, **options)


class TritonPrefill(AttentionBackend):
    """The prompt kernel for the prefill part of mixed steps, in CUDA on Hopper and in Triton elsewhere.

    One launch per layer. The device computes a schedule per kind of layer at the start of the step.
    """

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
        tree_drafts=False,
        context_parallel=False,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._layer_kinds = [_prefill_kind(spec, kv) for spec, kv, _ in context.layers]
        self._schedules = PromptSchedules(context, self._layer_kinds)

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        return TritonBackend.extra_unsupported_reasons(context)

    def compiles_ahead(self, descriptor: BatchDescriptor) -> bool:
        return type(self) is TritonPrefill

    def allocate(self) -> None:
        """Allocate one schedule per kind of layer, for the largest size."""
        self._schedules.allocate()

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._schedules.tensors("prompt_schedule")

    def close(self) -> None:
        self._schedules.close()

    def schedule(self, metadata: StepMetadata) -> None:
        """Compute the schedules, one launch per kind of layer. Capture-safe: lengths stay on the device."""
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
        """Attend in one launch, with this step's schedule. Capture-safe: the grid depends only on the descriptor."""
        plan, schedule = self._schedules.of(self._layer_kinds[layer.index], metadata.descriptor)
        table, options = metadata.block_tables[layer.group], layer.options(sinks)
        with kernels_on(q.device):
            prompt_attention(q, layer.k_cache, layer.v_cache, out, plan, schedule, options, block_table=table, lse=lse)


def _prefill_kind(spec: AttentionSpec, kv: KVCacheSpec) -> PromptKind:
    heads = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
    return PromptKind(*heads, spec.dtype, kv.dtype, causal=True, native=_has_whole_tiles(kv))


def _encoder_kind(spec: AttentionSpec) -> PromptKind:
    return PromptKind(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.dtype, causal=False)


def kernels_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make ops run their kernels in the interpreter on CPU, instead of their torch references."""
    return interpreted() if device.type == "cpu" else contextlib.nullcontext()
