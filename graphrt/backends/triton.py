"""graphrt's own Triton kernels: one work-list driven kernel for decode rows and mixed batches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer, BackendContext, Capabilities, GraphSupport
from graphrt.backends.encoder import EncoderKernels, why_no_encoder
from graphrt.backends.prompt_schedules import num_sms_of
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.kernels.attention.arguments import ATTENTION_DTYPES, HEAD_DIMS, KV_DTYPES
from graphrt.kernels.attention.native import NATIVE_PAGE_MULTIPLE
from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.plan_shape import MAX_QUERY_LEN
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import CaptureError
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted
from graphrt.kernels.native.nvrtc import nvrtc_fault, runs_native
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class _ScheduleKey:
    """What layers must have in common to share a work list. Groups of equal pages share theirs: no page is in it."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sliding_window: int
    attention_chunk_size: int
    whole_tiles: bool  # pages hold whole tiles of the CUDA kernel, which never runs on others
    kind: AttentionKind  # whose lengths count, and whether causally

    @classmethod
    def of(cls, spec: AttentionSpec, kv: KVCacheSpec) -> _ScheduleKey:
        return cls(
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.value_dim,
            dtype=spec.dtype,
            kv_dtype=kv.dtype,
            sliding_window=spec.sliding_window or 0,
            attention_chunk_size=spec.attention_chunk_size or 0,
            whole_tiles=kv.page_size % NATIVE_PAGE_MULTIPLE == 0,
            kind=spec.kind,
        )


class TritonBackend(AttentionBackend):
    """One kernel launch per layer; nothing is planned on the host. On CPU through the Triton interpreter, for tests.

    The device makes the schedule at the head of the step. Layers of equal heads and window share one launch and one
    work list.
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda", "cpu"),
        dtypes=ATTENTION_DTYPES,
        kv_dtypes=KV_DTYPES,
        head_dims=HEAD_DIMS,
        page_sizes=None,
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=MAX_QUERY_LEN,
        sliding_window=True,
        logits_softcap=True,
        mixed=True,
        alibi=True,
        alibi_sqrt=True,
        sinks=True,
        lse=True,
        batch_invariant=True,
        kv_groups=True,
        v_head_dim=True,
        attention_chunk_size=True,
        prefill=True,
        cross_attention=True,
        encoder_attention=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        cached = [index for index, spec in enumerate(context.attention) if spec.is_cached]
        keys = (_ScheduleKey.of(spec, kv) for spec, kv, _ in context.layers)
        self._layer_keys = dict(zip(cached, keys, strict=True))
        self._keys = list(dict.fromkeys(self._layer_keys.values()))
        self._work_lists: dict[_ScheduleKey, torch.Tensor] = {}
        self._plans: dict[tuple[_ScheduleKey, BatchDescriptor], AttentionPlan] = {}
        self._workspace: AttentionWorkspace | None = None
        self._num_sms = num_sms_of(context.device)
        self._native = context.device.type == "cpu" or runs_native(context.device)  # on CPU: the plans of a device
        self._encoder = EncoderKernels(context)

    @classmethod
    def extra_unsupported_reasons(cls, context: BackendContext) -> list[str]:
        """On CPU, that the interpreter is missing; on a device of the CUDA kernel, that NVRTC is. Heads of encoder
        layers that their kernel lacks."""
        if context.device.type == "cpu" and not INTERPRETER_AVAILABLE:
            return ["device cpu: needs the Triton interpreter; set TRITON_INTERPRET=1 before triton is imported"]
        reasons = why_no_encoder(context)
        if context.device.type == "cuda" and torch.cuda.is_available() and runs_native(context.device):
            fault = nvrtc_fault()
            reasons += [] if fault is None else [fault]
        return reasons

    @classmethod
    def prefill_class(cls) -> type[AttentionBackend]:
        """Prompts have a kernel of their own."""
        from graphrt.backends.triton_prefill import TritonPrefill  # which imports this file

        return TritonPrefill

    @classmethod
    def why_only_by_name(cls, context: BackendContext) -> str | None:
        """On CPU the kernels are interpreted, which is for tests."""
        return "interpreted on CPU, thousands of times slower" if context.device.type == "cpu" else None

    def allocate(self) -> None:
        """Allocate a work list per kind of layer, and the workspace of split rows, for the largest sizes."""
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
        if every_plan:  # else all layers are an encoder's
            self._workspace = AttentionWorkspace.allocate(every_plan, context.device)
        self._encoder.allocate()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Work lists and workspace. All but the counters may be poisoned between replays; the counters are 0 there."""
        tensors = self._encoder.tensors()
        if self._workspace is None:
            return tensors
        lists = {f"work_list_{index}": tensor for index, tensor in enumerate(self._work_lists.values())}
        return (
            tensors
            | lists
            | {
                "partial_out": self._workspace.partial_out,
                "partial_lse": self._workspace.partial_lse,
                "counters": self._workspace.counters,
            }
        )

    def reset(self) -> None:
        """Zero the counters of split rows, and the letters behind them."""
        if self._workspace is not None:
            self._workspace.counters.zero_()

    def close(self) -> None:
        """Drop work lists and workspace."""
        self._work_lists = {}
        self._workspace = None
        self._encoder.close()

    def schedule(self, metadata: StepMetadata) -> None:
        """One launch per kind of layer writes its work list. Capture-safe: lengths stay on the device."""
        mixed = metadata.descriptor.kind is GraphKind.MIXED
        if self._keys:
            self._check_allocated()
        with kernels_on(metadata.seq_lens.device):
            for key, work_list in self._work_lists.items():
                schedule_attention(
                    self._plan(key, metadata.descriptor),
                    metadata.kv_lens(key.kind),
                    work_list,
                    query_start_loc=metadata.query_start_loc if mixed else None,
                    causal=key.kind is AttentionKind.DECODER,
                    sliding_window=key.sliding_window,
                    attention_chunk_size=key.attention_chunk_size,
                )
            self._encoder.schedule(metadata)

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
        """Attend with one launch, by the work list that this step's `schedule` made.

        Capture-safe: the grid follows from the descriptor, lengths stay on the device.
        """
        key = self._layer_keys[layer.index]
        workspace = self._check_allocated()
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
                workspace,
                layer.options(sinks),
                query_start_loc=metadata.query_start_loc if metadata.descriptor.kind is GraphKind.MIXED else None,
                lse=lse,
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
        """Attend with one launch of the prompt kernel, by the schedule of this step. Capture-safe: as `run`."""
        with kernels_on(q.device):
            self._encoder.run(layer, q, k, v, metadata, out, sinks, lse)

    def _plan(self, key: _ScheduleKey, descriptor: BatchDescriptor) -> AttentionPlan:
        found = self._plans.get((key, descriptor))  # every layer of every graph asks
        if found is None:
            found = self._plans[key, descriptor] = self._make_plan(key, descriptor)
        return found

    def _make_plan(self, key: _ScheduleKey, descriptor: BatchDescriptor) -> AttentionPlan:
        if descriptor.kind is GraphKind.MIXED:
            return AttentionPlan.varlen(
                descriptor.padded_reqs,
                descriptor.padded_tokens,
                num_q_heads=key.num_q_heads,
                num_kv_heads=key.num_kv_heads,
                head_dim=key.head_dim,
                v_head_dim=key.v_head_dim,
                dtype=key.dtype,
                kv_dtype=key.kv_dtype,
                num_sms=self._num_sms,
                batch_invariant=self.context.batch_invariant,
            )
        return AttentionPlan.decode(
            descriptor.padded_reqs,
            query_len=descriptor.query_len,
            num_q_heads=key.num_q_heads,
            num_kv_heads=key.num_kv_heads,
            head_dim=key.head_dim,
            v_head_dim=key.v_head_dim,
            dtype=key.dtype,
            kv_dtype=key.kv_dtype,
            num_sms=self._num_sms,
            batch_invariant=self.context.batch_invariant,
            native=self._native and key.whole_tiles,  # Triton has better plans of its own where it is not
        )

    def _check_allocated(self) -> AttentionWorkspace:
        if self._workspace is None:
            raise CaptureError(f"backend {self.name}: expected a workspace, got none; call allocate() before run()")
        return self._workspace


def kernels_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """On CPU the ops would run their reference; this backend means the kernels."""
    return interpreted() if device.type == "cpu" else contextlib.nullcontext()
