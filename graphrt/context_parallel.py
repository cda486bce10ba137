"""Context parallel decode: the KV of each request is interleaved over the ranks of a group.

Attention of a layer gathers the queries of the ranks, attends to the keys of this rank, and merges the partial outputs
of all ranks; see graphrt/kernels/attention/context_parallel.py. vLLM calls it DCP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import distributed as dist

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.kernels.attention.context_parallel import gather_queries, reduce_scatter_attention
from graphrt.kernels.errors import UnsupportedError
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The ranks that share the KV of each request.

    group            these ranks, among all ranks of the model
    interleave_size  consecutive tokens that one rank stores
    """

    group: dist.ProcessGroup
    interleave_size: int

    def attend(
        self,
        backend: AttentionBackend,
        layer: AttentionLayer,
        q: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        """Attend from the query heads of this rank to the keys of all ranks; arguments as in `Step.attend`.

        Capture-safe.
        """
        kv_heads = layer.spec.num_kv_heads
        every = gather_queries(q, kv_heads, self.group)
        partial = out.new_empty((len(q), every.shape[1], out.shape[2]))
        partial_lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=q.device)
        layer = replace(layer, spec=_of_all_ranks(layer.spec, self.group.size()))
        backend.run(layer, every, metadata, partial, lse=partial_lse)
        reduce_scatter_attention(partial, partial_lse, kv_heads, self.group, out, lse=lse, sinks=sinks)


def backend_specs(specs: Sequence[AttentionSpec], kv_groups: Sequence[KVCacheSpec]) -> Sequence[AttentionSpec]:
    """Return the specs of the attention that a rank computes, from the specs of the model's layers.

    Raises: UnsupportedError: if the mask or bias of a layer needs the positions of keys, or if KV groups differ. The
    message lists all reasons.
    """
    size = max((kv.context_parallel_size for kv in kv_groups), default=1)
    if size == 1:
        return specs
    wrong = {
        "sliding_window": any(spec.sliding_window for spec in specs),
        "attention_chunk_size": any(spec.attention_chunk_size for spec in specs),
        "alibi_slopes": any(spec.alibi_slopes for spec in specs),
        "cross and encoder layers": any(spec.kind is not AttentionKind.DECODER for spec in specs),
        "16-bit layers with an odd v_head_dim": any(spec.value_dim * spec.dtype.itemsize % 4 for spec in specs),
        "KV groups of another size or interleave_size, such as those of a draft model": len(
            {(kv.context_parallel_size, kv.interleave_size) for kv in kv_groups}
        )
        > 1,
    }
    if any(wrong.values()):
        listed = ", ".join(name for name, is_wrong in wrong.items() if is_wrong)
        raise UnsupportedError(
            f"context_parallel_size: not supported with {listed}; omit it, so that every rank keeps all tokens"
        )
    return [_of_all_ranks(spec, size) for spec in specs]


def _of_all_ranks(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """Return the spec with the query heads of all ranks, and without sinks, which are added after the merge."""
    return replace(spec, num_q_heads=ranks * spec.num_q_heads, sinks=False)
