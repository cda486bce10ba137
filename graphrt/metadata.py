"""What a step's layers may read: views of the static buffers, cut to the size of one graph."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.metadata.buffers import StaticBuffers


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Attention metadata of one captured size. Every tensor is a view of StaticBuffers and is rewritten by the refresh.

    seq_lens          [padded_reqs]             int32  KV tokens including this step's; the backend's fill in pad rows
    query_start_loc   [padded_reqs + 1]         int32  prefix sum of query lengths; repeats its last value in pad rows
    block_table       [padded_reqs, max_pages]  int32  page ids; the null page beyond a row's pages and in pad rows
    slot_mapping      [padded_tokens]           int64  flat KV slot of each new token; -1 in pad tokens
    positions         [padded_tokens]           int64  position of each new token in its sequence; 0 in pad tokens
    max_seq_len       host bound, the model's maximum: the same at capture and at every replay
    """

    descriptor: BatchDescriptor
    max_seq_len: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, buffers: StaticBuffers, descriptor: BatchDescriptor, max_seq_len: int) -> StepMetadata:
        """The metadata in static buffers that were cut to the size of `descriptor`."""
        return cls(descriptor, max_seq_len, *(getattr(buffers, f.name) for f in fields(cls)[2:]))
