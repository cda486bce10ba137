"""Inputs of the attention benchmark, equal for all sides, and the check of their outputs.

Like a model, a cell has several layers with separate KV caches and one block table. There are enough layers to evict
each layer's KV cache from L2 before its next run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.bench.timer import rotations
from graphrt.kernels.types import KVLayout
from scripts.rigs.cells import Cell
from scripts.rigs.measure import TOLERANCE, check_token

_FP8_TOLERANCE = 0.08  # FA3 also rounds the probabilities to fp8


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of every side.

    q               [layers, tokens, num_q_heads, head_dim]                         bf16   device
    k               [layers, num_pages, page_size, num_kv_heads, head_dim]          kv_dtype, device; HND by strides
    v               as k, with heads of v_head_dim
    block_table     [batch, max pages]  shuffled, 0 after a sequence's pages         int32  device
    seq_lens        [batch]                                                         int32  device
    page_indices    [num_pages]  the pages of all sequences, concatenated           int32  device
    page_indptr     [batch + 1]  offsets into page_indices                          int32  host
    last_page_len   [batch]                                                         int32  host
    """

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    page_indices: torch.Tensor
    page_indptr: torch.Tensor
    last_page_len: torch.Tensor

    @property
    def layers(self) -> int:
        return self.q.shape[0]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def softmax_scale(self) -> float:
        return float(self.cell.head_dim**-0.5)

    def empty_out(self) -> torch.Tensor:
        """Return an output buffer [layers, tokens, num_q_heads, v_head_dim] in the dtype of q."""
        return self.q.new_empty(*self.q.shape[:3], self.cell.head_dims[1])

    def query_starts(self) -> torch.Tensor:
        """Query offsets: [batch + 1] int32, device."""
        rows, query_len = self.cell.batch, self.cell.query_len
        return torch.arange(rows + 1, dtype=torch.int32, device=self.device) * query_len

    def kv_starts(self) -> torch.Tensor:
        """Key offsets without pages: [batch + 1] int32, device."""
        return torch.nn.functional.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    def row_kv(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous K and V of a sequence: [seq_len, num_kv_heads, head_dim]; V has its own head size."""
        start, end = self.page_indptr[row : row + 2].tolist()
        pages, length = self.page_indices[start:end].long(), self.cell.lengths[row]
        # Not every fp8 dtype supports indexing.
        k, v = (
            cache[layer].view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1)[:length] for cache in (self.k, self.v)
        )
        return k, v

    def packed_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed K and V of all sequences: [sum of lengths, num_kv_heads, head_dim] each."""
        rows = [self.row_kv(layer, row) for row in range(self.cell.batch)]
        k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return k, v

    @classmethod
    def make(cls, cell: Cell, device: torch.device) -> Inputs:
        k, v = (_make_cache(cell, size, device, seed) for seed, size in enumerate(cell.head_dims, 1))
        generator = torch.Generator("cpu").manual_seed(3)
        counts = torch.tensor([-(-length // cell.page_size) for length in cell.lengths], device="cpu")
        indices = torch.randperm(cell.num_pages, generator=generator, dtype=torch.int32, device="cpu")
        table = torch.zeros(cell.batch, int(counts.max()), dtype=torch.int32, device="cpu")
        for row, pages in enumerate(indices.split(counts.tolist())):
            table[row, : len(pages)] = pages
        indptr = torch.zeros(cell.batch + 1, dtype=torch.int32, device="cpu")
        indptr[1:] = counts.cumsum(0)
        lengths = torch.tensor(cell.lengths, dtype=torch.int32, device="cpu")
        shape = (k.shape[0], cell.batch * cell.query_len, cell.num_q_heads, cell.head_dim)
        q = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(4))
        return cls(
            cell=cell,
            q=q.to(cell.kv_dtype).to(torch.bfloat16),  # rounded to fp8 first, because some sides need fp8 queries
            k=k,
            v=v,
            block_table=table.to(device),
            seq_lens=lengths.to(device),
            page_indices=indices.to(device),
            page_indptr=indptr,
            last_page_len=(lengths - 1) % cell.page_size + 1,
        )


def _make_cache(cell: Cell, size: int, device: torch.device, seed: int) -> torch.Tensor:
    """Return K or V of all layers with normal values and heads of `size`."""
    nhd = cell.layout is KVLayout.NHD
    page = (cell.page_size, cell.num_kv_heads) if nhd else (cell.num_kv_heads, cell.page_size)
    shape = (rotations(cell.kv_bytes, device), cell.num_pages, *page, size)
    cache = torch.empty(shape, dtype=cell.kv_dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for layer in cache:
        layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=device, generator=generator))
    return cache if nhd else cache.transpose(2, 3)


def check_output(inputs: Inputs, layer: int, out: torch.Tensor) -> None:
    """Compare the first, the last and the longest sequence with float32 attention, at most two tokens each.

    Raises: AssertionError: if the error of a token exceeds the tolerance of its dtype.
    """
    cell = inputs.cell
    tolerance = _FP8_TOLERANCE if cell.kv_dtype.itemsize == 1 else TOLERANCE
    flat = out.reshape(*inputs.q.shape[1:3], cell.head_dims[1])
    longest = max(range(cell.batch), key=lambda row: cell.lengths[row])
    for row in sorted({0, cell.batch - 1, longest}):
        k, v = inputs.row_kv(layer, row)
        for new in sorted({cell.query_len // 2, cell.query_len - 1}):
            token = row * cell.query_len + new
            end = cell.lengths[row] - cell.query_len + new + 1
            start = cell.first_seen(end - 1)
            q, what = inputs.q[layer, token], f"row {row}, token {new}, layer {layer}"
            check_token(
                q, k[start:end], v[start:end], inputs.softmax_scale, flat[token], what=what, tolerance=tolerance
            )
