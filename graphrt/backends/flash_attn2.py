"""FlashAttention 2, whose host code chooses the number of KV splits by shapes, so it is fixed at capture."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from graphrt.backends.base import AttentionLayer
from graphrt.backends.capabilities import BackendContext, Capabilities, GraphSupport
from graphrt.backends.peer import Package, PeerBackend
from graphrt.capture.descriptor import GraphKind
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata


class FlashAttention2Backend(PeerBackend):
    """`flash_attn_with_kvcache` for decode batches, `flash_attn_varlen_func` for mixed batches, which run eagerly.

    The library chooses the number of splits from shapes that do not change between replays. The number in a graph is
    therefore correct for any lengths, though not the fastest for ragged batches.

    Mixed batches have no graph, because the grid depends on the query length. NaN in the tail of a page does not reach
    outputs, because the kernel clears a V tile beyond the length of a request. The kernel returns early for length 0.

    The supported head sizes are the head sizes of the tested forward-only wheel. A build without a head size raises in
    its first call.
    """

    name: ClassVar[str] = "flash_attn2"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        kv_dtypes=(torch.float16, torch.bfloat16),
        head_dims=(64, 128, 256),
        page_sizes=(256, 512, 768, 1024),
        layouts=(KVLayout.NHD, KVLayout.HND),
        max_query_len=1024,
        sliding_window=True,
        logits_softcap=True,
        mixed=True,
        alibi=True,
        lse=True,
        batch_invariant=True,
        kv_groups=True,
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM
    seq_len_fill: ClassVar[int] = 0
    package: ClassVar[Package] = Package(
        "flash_attn",
        "pip install flash-attn --no-build-isolation",  # the build imports torch, which an isolated build lacks
        ("flash-attn",),
        (2, 8),
        ("flash_attn_with_kvcache", "flash_attn_varlen_func"),
    )
    compute_capability: ClassVar[tuple[int, int]] = (8, 0)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._kv_starts: torch.Tensor | None = None

    def close(self) -> None:
        super().close()
        self._kv_starts = None

    def schedule(self, metadata: StepMetadata) -> None:
        """Mark the real tokens. For mixed batches, also compute the prefix sum of lengths for the varlen function.

        Capture-safe: no value is read on the host.
        """
        super().schedule(metadata)
        if metadata.descriptor.kind is GraphKind.MIXED:
            ends = metadata.seq_lens.cumsum(0, dtype=torch.int32)
            self._kv_starts = torch.nn.functional.pad(ends, (1, 0))

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
        """Attend with the kernel and its combine. Capture-safe in decode steps, since splits depend only on shapes."""
        spec = layer.spec
        options: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            # Number of tokens before the query's own.
            "window_size": (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
            "softcap": spec.logits_softcap or 0.0,
            "alibi_slopes": layer.alibi_slopes,
            "block_table": metadata.block_tables[layer.group],
        }
        if metadata.descriptor.kind is GraphKind.MIXED:
            result, sums = self._mixed(layer, q, metadata, options)
        else:
            result, sums = self._decode(layer, q, metadata, options)
        self.write(result, sums if lse is None else self._unbiased(sums, layer, metadata), out, lse)

    def _unbiased(self, sums: torch.Tensor, layer: AttentionLayer, metadata: StepMetadata) -> torch.Tensor:
        """Return the log-sum-exp as the contract defines it.

        Without a window, the kernel adds slope x key position, while the definition subtracts slope x distance. The
        softmax is the same, and the log-sum-exp differs by slope x query position.
        """
        window, width = layer.spec.sliding_window, _longest(layer, metadata)
        if layer.alibi_slopes is None or (window is not None and window <= width):
            return sums
        return sums - metadata.positions[:, None].float() * layer.alibi_slopes

    def _decode(
        self, layer: AttentionLayer, q: torch.Tensor, metadata: StepMetadata, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, query_len = metadata.descriptor.padded_reqs, metadata.descriptor.query_len
        result, sums = self._module.flash_attn_with_kvcache(
            q.view(rows, query_len, *q.shape[1:]),
            layer.k_cache,
            layer.v_cache,
            cache_seqlens=metadata.seq_lens,
            num_splits=1 if self.context.batch_invariant else 0,  # 0: its heuristic
            return_softmax_lse=True,
            **options,
        )
        return result.reshape(q.shape), sums.transpose(1, 2).reshape(q.shape[:2])

    def _mixed(
        self, layer: AttentionLayer, q: torch.Tensor, metadata: StepMetadata, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, sums, _ = self._module.flash_attn_varlen_func(
            q,
            layer.k_cache,
            layer.v_cache,
            metadata.query_start_loc,
            self._kv_starts,
            metadata.descriptor.padded_tokens,
            _longest(layer, metadata),
            return_attn_probs=True,
            **options,
        )
        return result, sums.transpose(0, 1)


def _longest(layer: AttentionLayer, metadata: StepMetadata) -> int:
    """Return the maximum number of tokens that the layer's block table can hold."""
    return metadata.block_tables[layer.group].shape[1] * layer.k_cache.shape[1]
