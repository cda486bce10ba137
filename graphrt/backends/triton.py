"""graphrt's own Triton kernels: split-KV paged decode, and varlen attention for mixed batches."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer, BackendContext, Capabilities, GraphSupport
from graphrt.capture.descriptor import GraphKind
from graphrt.kernels.attention.arguments import ATTENTION_DTYPES, head_dim_fault
from graphrt.kernels.attention.paged_decode import MAX_QUERY_LEN, paged_decode
from graphrt.kernels.attention.splits import DecodeWorkspace, decode_num_splits
from graphrt.kernels.attention.varlen import varlen_attention
from graphrt.kernels.errors import CaptureError
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata

_INTERPRETER_SMS = 4  # rows are split on CPU too, into few parts: an interpreted program costs milliseconds


class TritonBackend(AttentionBackend):
    """One kernel launch per layer; nothing is planned on the host. On CPU through the Triton interpreter, for tests."""

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda", "cpu"),
        dtypes=ATTENTION_DTYPES,
        kv_dtypes=ATTENTION_DTYPES,
        head_dims=None,
        page_sizes=None,
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=MAX_QUERY_LEN,
        sliding_window=True,
        logits_softcap=True,
        mixed=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._workspace: DecodeWorkspace | None = None
        self._num_sms = _INTERPRETER_SMS
        if context.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(context.device).multi_processor_count

    @classmethod
    def why_not(cls, context: BackendContext) -> list[str]:
        """As the base class, and: head sizes, one dtype for queries and cache, the interpreter on CPU."""
        reasons = super().why_not(context)
        if context.device.type == "cpu" and not INTERPRETER_AVAILABLE:
            reasons.append("device cpu: needs the Triton interpreter; set TRITON_INTERPRET=1 before triton is imported")
        for spec in dict.fromkeys(context.attention):
            fault = head_dim_fault(spec.head_dim)
            if fault is not None:
                reasons.append(fault)
            if spec.dtype != context.kv.dtype:
                reasons.append(f"dtype {spec.dtype} with KV dtype {context.kv.dtype}: must be equal")
        return list(dict.fromkeys(reasons))

    @classmethod
    def why_only_by_name(cls, context: BackendContext) -> str | None:
        """On CPU the kernels are interpreted, which is for tests."""
        return "interpreted on CPU, thousands of times slower" if context.device.type == "cpu" else None

    def allocate(self) -> None:
        """Allocate the workspace of split decode rows, for the largest decode size and layer."""
        context = self.context
        self._workspace = DecodeWorkspace.allocate(
            context.max_num_reqs,
            max_query_len=context.max_query_len,
            head_shapes={(s.num_q_heads, s.num_kv_heads, s.head_dim) for s in context.attention},
            num_sms=self._num_sms,
            device=context.device,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The workspace. Its partial results may be poisoned between replays; its counters are 0 there."""
        if self._workspace is None:
            return {}
        return {
            "decode_partial_out": self._workspace.partial_out,
            "decode_partial_lse": self._workspace.partial_lse,
            "decode_counters": self._workspace.counters,
        }

    def reset(self) -> None:
        """Zero the counters of split rows."""
        if self._workspace is not None:
            self._workspace.counters.zero_()

    def close(self) -> None:
        """Drop the workspace."""
        self._workspace = None

    def run(self, layer: AttentionLayer, q: torch.Tensor, metadata: StepMetadata, out: torch.Tensor) -> None:
        """Attend with one launch. Capture-safe: grids and splits follow from the descriptor, lengths stay on device."""
        if metadata.descriptor.kind is GraphKind.MIXED:
            self._run_mixed(layer, q, metadata, out)
        elif self._workspace is not None:
            self._run_decode(layer, q, metadata, out, self._workspace)
        else:
            raise CaptureError(f"backend {self.name}: expected a workspace, got none; call allocate() before run()")

    def _run_mixed(self, layer: AttentionLayer, q: torch.Tensor, metadata: StepMetadata, out: torch.Tensor) -> None:
        with _kernels_on(q.device):
            varlen_attention(
                q,
                layer.k_cache,
                layer.v_cache,
                metadata.block_table,
                metadata.seq_lens,
                metadata.query_start_loc,
                out,
                softmax_scale=layer.spec.scale,
                sliding_window=layer.spec.sliding_window or 0,
                logits_softcap=layer.spec.logits_softcap or 0.0,
            )

    def _run_decode(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        workspace: DecodeWorkspace,
    ) -> None:
        descriptor, spec = metadata.descriptor, layer.spec
        packed = descriptor.query_len * spec.group
        with _kernels_on(q.device):
            paged_decode(
                q,
                layer.k_cache,
                layer.v_cache,
                metadata.block_table,
                metadata.seq_lens,
                out,
                workspace,
                softmax_scale=spec.scale,
                num_splits=decode_num_splits(descriptor.padded_reqs, spec.num_kv_heads, self._num_sms, packed),
                query_len=descriptor.query_len,
                sliding_window=spec.sliding_window or 0,
                logits_softcap=spec.logits_softcap or 0.0,
            )


def _kernels_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """On CPU the ops would run their reference; this backend means the kernels."""
    return interpreted() if device.type == "cpu" else contextlib.nullcontext()
