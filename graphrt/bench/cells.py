"""What the benchmarks of attention and of backends measure: one attention layer over one batch of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrt.kernels.types import KVLayout

LAYERS = 32
"""Layers that share what is done once per step: this share of it counts in each layer's figure."""

SEED = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a batch of rows with KV lengths `lengths`, and `query_len` new tokens in each.

    part       the group of cells that it is shown with
    lengths    KV tokens of each row, the new ones included
    kv_dtype   of the KV cache
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

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def num_pages(self) -> int:
        """Pages of all rows together, for one layer."""
        return sum(-(-length // self.page_size) for length in self.lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        return 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of both products over the visible pairs of query and key."""
        before_first = [length - self.query_len for length in self.lengths]
        pairs = sum(self.query_len * b + self.query_len * (self.query_len + 1) // 2 for b in before_first)
        return 4 * pairs * self.num_q_heads * self.head_dim


def uniform_cell(part: str, batch: int, context: int, **options: Any) -> Cell:
    """A cell of equal rows, named "batch x context"; `options` are fields of Cell."""
    return Cell(part, f"{batch} x {context}", (context,) * batch, **options)
