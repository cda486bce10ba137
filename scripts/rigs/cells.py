"""Cells of the attention and backend benchmarks: one attention layer over one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrt.kernels.types import KVLayout

LAYERS = 32
"""Layers that share the work done once per step. Each layer's time includes this fraction of it."""

SEED = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a batch with KV lengths `lengths` and `query_len` new tokens per request.

    part                  the table in which the cell is printed
    lengths               KV tokens of each request, including the new ones
    v_head_dim            head size of V and of the output; 0 means head_dim
    kv_dtype              of the KV cache
    attention_chunk_size  chunk size of chunked attention; 0 means causal attention over all tokens
    """

    part: str
    name: str
    lengths: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    layout: KVLayout = KVLayout.NHD
    kv_dtype: torch.dtype = torch.bfloat16
    query_len: int = 1
    v_head_dim: int = 0
    attention_chunk_size: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def num_pages(self) -> int:
        """Return the pages of all requests for one layer."""
        return sum(-(-length // self.page_size) for length in self.lengths)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Return the head sizes of K and V."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V that one call must read."""
        tokens = sum(length - self.first_seen(length - self.query_len) for length in self.lengths)
        return tokens * self.num_kv_heads * sum(self.head_dims) * self.kv_dtype.itemsize

    def first_seen(self, position: int) -> int:
        """Return the first position to which a token attends."""
        return position - position % self.attention_chunk_size if self.attention_chunk_size else 0

    @property
    def flops(self) -> int:
        """Return the floating-point operations of both products over the visible query-key pairs."""
        before_first = [length - self.query_len for length in self.lengths]
        pairs = sum(self.query_len * b + self.query_len * (self.query_len + 1) // 2 for b in before_first)
        return 2 * pairs * self.num_q_heads * sum(self.head_dims)


def uniform_cell(part: str, batch: int, context: int, **options: Any) -> Cell:
    """Return a cell of equal lengths named "batch x context". `options` are fields of Cell."""
    return Cell(part, f"{batch} x {context}", (context,) * batch, **options)
