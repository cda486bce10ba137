"""Attention in plain torch, which is the default on CPU, and an eager reference on CUDA."""

from __future__ import annotations

from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import Capabilities, GraphSupport
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.arguments import ATTENTION_DTYPES, KV_DTYPES
from graphrt.kernels.attention.reference import attention_reference, encoder_reference
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata


class TorchReferenceBackend(AttentionBackend):
    """Loops over requests; calls scaled_dot_product_attention if it supports the layer's options. Keeps no tensors."""

    name: ClassVar[str] = "torch_reference"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=ATTENTION_DTYPES,
        kv_dtypes=KV_DTYPES,
        head_dims=None,
        page_sizes=None,
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=1024,
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
        tree_drafts=True,
        context_parallel=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def extra_graph_unsupported_reason(self, descriptor: BatchDescriptor) -> str | None:
        """Reject every graph on CUDA."""
        if self.context.device.type != "cuda":
            return None
        return f"backend {self.name} reads sequence lengths on the host, which a CUDA graph cannot do; runs eagerly"

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
        """Attend request by request. Capture-safe on CPU, as one op of the op trace."""
        attention_reference(
            q,
            layer.k_cache,
            layer.v_cache,
            metadata.block_tables[layer.group],
            metadata.kv_lens(layer.spec.kind),
            metadata.query_start_loc,
            out,
            layer.options(sinks, metadata.tree_masks, metadata.kv_limits),
            lse,
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
        """Attend request by request. Capture-safe: see `run`."""
        options, window = layer.options(sinks), layer.spec.sliding_window or 0
        encoder_reference(q, k, v, metadata.query_start_loc, out, options, window=window, lse=lse)
