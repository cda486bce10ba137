"""What a step's layers may read: views of the static buffers, cut to the size of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.metadata.buffers import StaticBuffers


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Attention metadata of one captured size. Every tensor is a view of StaticBuffers and is rewritten by the refresh.

    seq_lens          [padded_reqs]             int32  KV tokens including this step's; the backend's fill in pad rows
    query_start_loc   [padded_reqs + 1]         int32  prefix sum of query lengths; repeats its last value in pad rows
    positions         [padded_tokens]           int64  position of each new token in its sequence; 0 in pad tokens
    block_tables      per KV group [padded_reqs, max_pages]  int32  page ids; the null page beyond a row's pages, in
                                                pad rows, and before the first page that the row sees
    slot_mappings     per KV group [padded_tokens]           int64  flat KV slot of each new token; -1 in pad tokens
    max_seq_len       host bound, the model's maximum: the same at capture and at every replay

    A layer reads `block_tables[layer.group]`. Where all layers are alike there is one group.
    """

    descriptor: BatchDescriptor
    max_seq_len: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, buffers: StaticBuffers, descriptor: BatchDescriptor, max_seq_len: int, max_pages: Sequence[int]
    ) -> StepMetadata:
        """The metadata in static buffers that were cut to the size of `descriptor`; `max_pages` by KV group."""
        return cls(
            descriptor,
            max_seq_len,
            buffers.seq_lens,
            buffers.query_start_loc,
            buffers.positions,
            tuple(table[:, :width] for table, width in zip(buffers.block_table.unbind(), max_pages, strict=True)),
            buffers.slot_mapping.unbind(),
        )
