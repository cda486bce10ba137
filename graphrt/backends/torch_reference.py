"""Attention in plain torch: every CPU, and eager CUDA to compare with."""

from __future__ import annotations

from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer, Capabilities, GraphSupport
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.attention.arguments import ATTENTION_DTYPES
from graphrt.kernels.attention.reference import attention_reference
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata


class TorchReferenceBackend(AttentionBackend):
    """Loops over the rows with torch's scaled_dot_product_attention; keeps no tensors."""

    name: ClassVar[str] = "torch_reference"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=ATTENTION_DTYPES,
        kv_dtypes=ATTENTION_DTYPES,
        head_dims=None,
        page_sizes=None,
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=1024,
        sliding_window=True,
        logits_softcap=True,
        mixed=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def why_not_graph(self, descriptor: BatchDescriptor) -> str | None:
        """As the base class; on CUDA nothing can be captured."""
        if self.context.device.type == "cuda":
            return (
                f"backend {self.name} reads sequence lengths on the host, which a CUDA graph cannot hold; runs eagerly"
            )
        return super().why_not_graph(descriptor)

    def run(self, layer: AttentionLayer, q: torch.Tensor, metadata: StepMetadata, out: torch.Tensor) -> None:
        """Attend row by row. Capture-safe: on CPU, as one op of the tape."""
        attention_reference(
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
