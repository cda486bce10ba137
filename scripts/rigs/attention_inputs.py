"""Inputs of the attention benchmark, equal for all sides, and the check of their outputs.

Like a model, a cell has several layers with separate KV caches and one block table. There are enough layers to evict
each layer's KV cache from L2 before its next run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from graphrt.bench.timer import rotations
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.types import KVLayout
from scripts.rigs.cells import Cell

_MAX_KV_BYTES = 9 << 30  # of all layers of a cell
_FILL_CHUNK = 1 << 26
_TOLERANCE = {torch.bfloat16: 0.02, torch.float8_e4m3fn: 0.08}  # FA3 also rounds the probabilities to fp8


class KVPool:
    """One flat store of K and V per dtype, filled once with normal values. Cells use views of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stores: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, cells: Iterable[Cell]) -> None:
        """Allocate for the largest cell. Raises: CapacityError: if a cell exceeds the limit of the pool."""
        sizes: dict[torch.dtype, int] = {}
        for cell in cells:
            size = num_layers(cell, self.device) * _layer_elements(cell, max(cell.head_dims))
            if 2 * size * cell.kv_dtype.itemsize > _MAX_KV_BYTES:
                raise CapacityError(
                    f"cell {cell.part} {cell.name}: expected at most {_MAX_KV_BYTES >> 30} GiB of KV, got "
                    f"{2 * size * cell.kv_dtype.itemsize >> 20} MiB; use fewer or shorter rows"
                )
            sizes[cell.kv_dtype] = max(size, sizes.get(cell.kv_dtype, 0))
        for dtype, size in sizes.items():
            self._stores[dtype] = (self._fill(size, dtype, 1), self._fill(size, dtype, 2))

    def layers(self, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the layers, [layers, num_pages, page_size, num_kv_heads, head_dim], HND by strides."""
        k, v = (
            self._view(store, cell, size)
            for store, size in zip(self._stores[cell.kv_dtype], cell.head_dims, strict=True)
        )
        return k, v

    def _view(self, store: torch.Tensor, cell: Cell, size: int) -> torch.Tensor:
        layers = num_layers(cell, self.device)
        flat = store[: layers * _layer_elements(cell, size)]
        if cell.layout is KVLayout.NHD:
            return flat.view(layers, cell.num_pages, cell.page_size, cell.num_kv_heads, size)
        return flat.view(layers, cell.num_pages, cell.num_kv_heads, cell.page_size, size).transpose(2, 3)

    def _fill(self, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        store = torch.empty(size, dtype=dtype, device=self.device)
        for chunk in store.split(_FILL_CHUNK):
            chunk.copy_(torch.randn(chunk.shape, dtype=torch.bfloat16, device=self.device, generator=generator))
        return store


def num_layers(cell: Cell, device: torch.device) -> int:
    """Return how many layers evict each layer's KV cache from L2 before its next run."""
    return rotations(cell.kv_bytes, device)


def _layer_elements(cell: Cell, size: int) -> int:
    """Return the size of K or V with the given head size."""
    return cell.num_pages * cell.page_size * cell.num_kv_heads * size


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of every side.

    q               [layers, tokens, num_q_heads, head_dim]                         bf16   device
    k               [layers, num_pages, page_size, num_kv_heads, head_dim]          kv_dtype, device
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

    def row_pages(self, row: int) -> torch.Tensor:
        """Return the page ids of a sequence, on the device."""
        start, end = self.page_indptr[row : row + 2].tolist()
        return self.page_indices[start:end]

    def row_kv(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous K and V of a sequence: [seq_len, num_kv_heads, head_dim]; V has its own head size."""
        pages, length = self.row_pages(row), self.cell.lengths[row]
        k, v = (_take_pages(cache[layer], pages).flatten(0, 1)[:length] for cache in (self.k, self.v))
        return k, v

    def packed_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed K and V of all sequences: [sum of lengths, num_kv_heads, head_dim] each."""
        rows = [self.row_kv(layer, row) for row in range(self.cell.batch)]
        k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return k, v

    @classmethod
    def make(cls, cell: Cell, pool: KVPool) -> Inputs:
        device = pool.device
        k, v = pool.layers(cell)
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
            q=q.to(cell.kv_dtype).to(torch.bfloat16),  # scale of fp8 values, if a side needs queries in fp8
            k=k,
            v=v,
            block_table=table.to(device),
            seq_lens=lengths.to(device),
            page_indices=indices.to(device),
            page_indptr=indptr,
            last_page_len=(lengths - 1) % cell.page_size + 1,
        )


def _take_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    if cache.element_size() > 1:
        return cache[pages.long()]
    return cache.view(torch.uint8)[pages.long()].view(cache.dtype)  # not every fp8 dtype supports indexing


def check_output(inputs: Inputs, layer: int, out: torch.Tensor) -> None:
    """Compare the first, the last and the longest sequence with float32 attention, at most two tokens each.

    Raises: AssertionError: if the error of a token exceeds the tolerance of its dtype.
    """
    cell = inputs.cell
    flat = out.reshape(*inputs.q.shape[1:3], cell.head_dims[1])
    longest = max(range(cell.batch), key=lambda row: cell.lengths[row])
    for row in sorted({0, cell.batch - 1, longest}):
        k, v = (x.float() for x in inputs.row_kv(layer, row))
        for new in sorted({cell.query_len // 2, cell.query_len - 1}):
            token = row * cell.query_len + new
            seen = cell.lengths[row] - cell.query_len + new + 1
            first = cell.first_seen(seen - 1)
            expected = _attend(inputs.q[layer, token].float(), k[first:seen], v[first:seen], inputs.softmax_scale)
            error = float((flat[token].float() - expected).norm() / expected.norm())
            if not error <= _TOLERANCE[cell.kv_dtype]:  # also False for NaN
                raise AssertionError(
                    f"row {row}, token {new}, layer {layer}: expected a relative error of at most "
                    f"{_TOLERANCE[cell.kv_dtype]}, got {error:.3g}"
                )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Return float32 attention of one token [num_q_heads, head_dim] over [positions, num_kv_heads, head_dim]."""
    packed = q.unflatten(0, (k.shape[1], -1))
    logits = torch.einsum("hgd,shd->hgs", packed, k) * softmax_scale
    return torch.einsum("hgs,shd->hgd", logits.softmax(-1), v).flatten(0, 1)
