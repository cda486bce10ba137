"""Drives any attention backend through its contract and times its work per replay, per step and per layer.

As in a server, a backend is built once for the largest batch and context of the run, and each cell is a decode size.
There are enough layers with separate KV caches to evict a layer's cache from L2 before its next run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext
from graphrt.batch import Batch
from graphrt.bench.timer import Call, rotations, synchronize
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from scripts.rigs.cells import Cell
from scripts.rigs.measure import LayerTime, check_token, time_layers

_PREFERRED_PAGE = 16
_PLAN_ROUNDS = 21


def page_size_of(cls: type[AttentionBackend]) -> int:
    """Return 16 if the backend supports it, else its smallest page size."""
    sizes = cls.capabilities.page_sizes
    return _PREFERRED_PAGE if sizes is None or _PREFERRED_PAGE in sizes else min(sizes)


def make_context(cls: type[AttentionBackend], cells: Sequence[Cell], device: torch.device) -> BackendContext:
    """Return a backend context with a supported page size and layout that is large enough for all cells."""
    layer = cells[0]
    layers = max(rotations(cell.kv_bytes, device) for cell in cells)
    layouts = cls.capabilities.layouts
    layout = KVLayout.NHD if KVLayout.NHD in layouts else layouts[0]
    spec = AttentionSpec(layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.kv_dtype)
    rows = max(cell.batch for cell in cells)
    return BackendContext(
        attention=(spec,) * layers,
        kv_groups=(KVCacheSpec(layers, layer.num_kv_heads, layer.head_dim, page_size_of(cls), layout, layer.kv_dtype),),
        device=device,
        max_num_reqs=rows,
        max_num_tokens=rows,
        max_seq_len=max(cell.longest for cell in cells),
        mixed_batches=False,
    )


def layer_calls(
    backend: AttentionBackend,
    layers: Sequence[AttentionLayer],
    q: torch.Tensor,
    out: torch.Tensor,
    metadata: StepMetadata,
) -> list[Call]:
    """Return a call per layer that runs the backend and returns the output; `q` and `out` are [layers, tokens, ...]."""

    def run(layer: AttentionLayer) -> torch.Tensor:
        backend.run(layer, q[layer.index], metadata, out[layer.index])
        return out[layer.index]

    return [partial(run, layer) for layer in layers]


def check_row(
    layer: AttentionLayer, q: torch.Tensor, pages: torch.Tensor, length: int, result: torch.Tensor, *, what: str
) -> None:
    """Check the output [num_q_heads, head_dim] of a request's last token, as `check_token` does."""
    k, v = (cache[pages].flatten(0, 1)[:length] for cache in (layer.k_cache, layer.v_cache))
    check_token(q, k, v, layer.spec.scale, result, what=what)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Tensors of a cell. As in a server, the block table has the width of the largest context."""

    metadata: StepMetadata
    layers: list[AttentionLayer]
    q: torch.Tensor
    out: torch.Tensor
    row_pages: torch.Tensor  # on the host


class Rig:
    """One allocated backend. `measure` times a cell; `close` frees its memory."""

    def __init__(self, cls: type[AttentionBackend], context: BackendContext) -> None:
        self.context = context
        self._backend = cls(context)
        self._backend.allocate()

    def close(self) -> None:
        self._backend.close()

    def measure(self, cell: Cell, num_samples: int) -> LayerTime:
        """Check the result of the cell, then time it.

        Raises: AssertionError: if the result is wrong. Errors of the backend are passed on.
        """
        backend, inputs = self._backend, self._inputs(cell)
        descriptor = inputs.metadata.descriptor
        if (reason := backend.graph_unsupported_reason(descriptor)) is not None:
            return LayerTime(reason=reason)
        backend.plan_capture(descriptor)
        host_us = self._host_us(cell, inputs)
        backend.schedule(inputs.metadata)
        calls = layer_calls(backend, inputs.layers, inputs.q, inputs.out, inputs.metadata)
        for index in sorted({0, len(calls) - 1}):
            calls[index]()
            for row in sorted({0, cell.batch - 1}):
                pages, what = inputs.row_pages[row].long().to(self.context.device), f"row {row}, layer {index}"
                q, result = inputs.q[index, row], inputs.out[index, row]
                check_row(inputs.layers[index], q, pages, cell.longest, result, what=what)

        # A schedule without launches would measure slightly above or below 0.
        idle = type(backend).schedule is AttentionBackend.schedule
        schedule = None if idle else partial(backend.schedule, inputs.metadata)
        return replace(time_layers(calls, schedule, inputs.out, num_samples), host_us=host_us)

    def _host_us(self, cell: Cell, inputs: _Inputs) -> float:
        """Time `plan_replay` on the host with a new batch each time and an idle device. The last batch is the
        cell's."""
        shorter = min(_PLAN_ROUNDS, cell.longest - 1)
        batches = [self._batch(cell, inputs.row_pages, cell.longest - less) for less in range(shorter, -1, -1)]
        seconds = []
        for batch in [*batches[:2], *batches]:  # the first two load lazily loaded kernels
            synchronize(self.context.device)
            start = time.perf_counter()
            self._backend.plan_replay(inputs.metadata.descriptor, batch)
            seconds.append(time.perf_counter() - start)
        synchronize(self.context.device)
        return 1e6 * median(seconds[2:])

    def _batch(self, cell: Cell, row_pages: torch.Tensor, length: int) -> Batch:
        used = self.context.kv_groups[0].pages_for(length)
        return Batch(
            req_indices=np.arange(cell.batch),
            seq_lens=np.full(cell.batch, length),
            tokens=np.zeros(cell.batch, np.int32),
            page_indptr=np.arange(cell.batch + 1) * used,
            page_ids=row_pages[:, :used].reshape(-1).numpy(),
        )

    def _inputs(self, cell: Cell) -> _Inputs:
        context, device = self.context, self.context.device
        spec, kv = context.attention[0], context.kv_groups[0]
        per_row, num_layers = kv.pages_for(cell.longest), rotations(cell.kv_bytes, device)
        order = torch.randperm(
            cell.batch * per_row, generator=torch.Generator().manual_seed(3), dtype=torch.int32, device="cpu"
        )
        row_pages = 1 + order.view(cell.batch, per_row)  # page 0 is the null page
        table = torch.zeros(cell.batch, context.max_pages(0), dtype=torch.int32, device="cpu")
        table[:, :per_row] = row_pages
        random = torch.Generator(device).manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=spec.dtype, device=device).normal_(generator=random)

        def cache() -> torch.Tensor:
            pages = 1 + cell.batch * per_row
            if kv.layout is KVLayout.NHD:
                return normal(pages, kv.page_size, spec.num_kv_heads, spec.head_dim)
            return normal(pages, spec.num_kv_heads, kv.page_size, spec.head_dim).transpose(1, 2)

        slots = row_pages[:, -1].long() * kv.page_size + (cell.longest - 1) % kv.page_size
        metadata = StepMetadata(
            descriptor=BatchDescriptor.decode(cell.batch),
            seq_lens=torch.full((cell.batch,), cell.longest, dtype=torch.int32, device=device),
            query_start_loc=torch.arange(cell.batch + 1, dtype=torch.int32, device=device),
            block_tables=(table.to(device),),
            slot_mappings=(slots.to(device),),
            encoder_lens=torch.zeros(cell.batch, dtype=torch.int32, device=device),
            positions=torch.full((cell.batch,), cell.longest - 1, dtype=torch.int64, device=device),
            max_seq_len=context.max_seq_len,
        )
        layers = [AttentionLayer(index, spec, cache(), cache()) for index in range(num_layers)]
        q = normal(num_layers, cell.batch, spec.num_q_heads, spec.head_dim)
        return _Inputs(metadata, layers, q, torch.full_like(q, float("nan")), row_pages)
