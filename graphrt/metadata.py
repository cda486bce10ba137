"""What a step's layers may read: views of the static buffers, cut to the size of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.spec import AttentionKind


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Attention metadata of one captured size. Every tensor is a view of StaticBuffers and is rewritten by the refresh.

    seq_lens          [padded_reqs]             int32  KV tokens including this step's; the backend's fill in pad rows
    query_start_loc   [padded_reqs + 1]         int32  prefix sum of query lengths; repeats its last value in pad rows
    positions         [padded_tokens]           int64  position of each new token in its sequence; 0 in pad tokens
    block_tables      per KV group [padded_reqs, max_pages]  int32  page ids; the null page beyond a row's pages, in
                                                pad rows, and before the first page that the row sees
    slot_mappings     per KV group [padded_tokens]           int64  flat KV slot of each new token; -1 in pad tokens,
                                                and everywhere in cross groups
    encoder_lens      [padded_reqs]             int32  tokens that the row's encoder wrote; 0 in pad rows
    max_seq_len       host bound, the model's maximum: the same at capture and at every replay

    A layer reads `block_tables[layer.group]`. Where all layers are alike there is one group. Cross layers take
    `encoder_lens` where others take `seq_lens`.
    """

    descriptor: BatchDescriptor
    max_seq_len: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    encoder_lens: torch.Tensor

    @classmethod
    def of(
        cls, buffers: StaticBuffers, descriptor: BatchDescriptor, max_seq_len: int, max_pages: Sequence[int]
    ) -> StepMetadata:
        """The metadata in static buffers that were cut to the size of `descriptor`; `max_pages` by KV group.

        Without KV groups, buffers are those of one group that keeps nothing, and no layer may read them.
        """
        groups = len(max_pages)
        return cls(
            descriptor,
            max_seq_len,
            buffers.seq_lens,
            buffers.query_start_loc,
            buffers.positions,
            tuple(buffers.block_table[group, :, :width] for group, width in enumerate(max_pages)),
            buffers.slot_mapping.unbind()[:groups],
            buffers.encoder_lens,
        )

    def kv_lens(self, kind: AttentionKind) -> torch.Tensor:
        """Keys and values of each row, [padded_reqs] int32, that layers of a kind find in the cache."""
        return self.encoder_lens if kind is AttentionKind.CROSS else self.seq_lens
