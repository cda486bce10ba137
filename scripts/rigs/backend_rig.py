"""Drives any attention backend through its contract and times its work per replay, per step and per layer.

As in a server, a backend is built once for the largest batch and context of the run, and each cell is a decode size.
There are enough layers with separate KV caches to evict a layer's cache from L2 before its next run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext
from graphrt.batch import Batch
from graphrt.bench.timer import Call, Timing, rotations, spaced_calls, spacer_calls, time_calls
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from scripts.rigs.backend_report import BackendTime
from scripts.rigs.cells import Cell

_PREFERRED_PAGE = 16
_PLAN_ROUNDS = 21
_FILL_CHUNK = 1 << 26
_LEFT_FREE = 4 << 30  # for workspaces, graphs and kernels
_TOLERANCE = 0.02  # relative error of a bfloat16 output


class KVStore:
    """One flat store of K and V with normal values. Every backend and cell uses views of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._k = self._v = torch.empty(0, device="cpu")

    def reserve(self, cells: Sequence[Cell], largest_page: int) -> dict[Cell, str]:
        """Allocate for the largest cell that fits. Returns the cells that do not fit, with reasons."""
        needs = {cell: 2 * self._elements(cell, largest_page) * cell.kv_dtype.itemsize for cell in cells}
        free = (
            torch.cuda.mem_get_info(self.device)[0] - _LEFT_FREE if self.device.type == "cuda" else max(needs.values())
        )
        fit = [cell for cell in cells if needs[cell] <= free]
        if not fit:
            raise CapacityError(
                f"KV store: expected room for {min(needs.values()) >> 20} MiB, got {max(free, 0) >> 20} MiB; "
                "free memory of the device"
            )
        size = max(self._elements(cell, largest_page) for cell in fit)
        self._k, self._v = (self._fill(size, fit[0].kv_dtype, seed) for seed in (1, 2))
        return {
            cell: f"needs {needs[cell] >> 20} MiB for KV, {free >> 20} MiB are free"
            for cell in cells
            if needs[cell] > free
        }

    def layers(self, cell: Cell) -> int:
        return rotations(cell.kv_bytes, self.device)

    def views(self, cell: Cell, page_size: int, layout: KVLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V of each layer in the logical NHD view; page 0 is the null page."""
        pages = _pages(cell, page_size)
        layers, per_layer = self.layers(cell), pages * page_size * cell.num_kv_heads * cell.head_dim
        return [
            (_view(self._k, at, cell, page_size, layout), _view(self._v, at, cell, page_size, layout))
            for at in range(0, layers * per_layer, per_layer)
        ]

    def _elements(self, cell: Cell, page_size: int) -> int:
        per_layer = _pages(cell, page_size) * page_size * cell.num_kv_heads * cell.head_dim
        return self.layers(cell) * per_layer

    def _fill(self, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        store = torch.empty(size, dtype=dtype, device=self.device)
        for chunk in store.split(_FILL_CHUNK):
            chunk.normal_(generator=generator)
        return store


def _view(store: torch.Tensor, at: int, cell: Cell, page_size: int, layout: KVLayout) -> torch.Tensor:
    pages, heads, dim = _pages(cell, page_size), cell.num_kv_heads, cell.head_dim
    part = store[at : at + pages * page_size * heads * dim]
    if layout is KVLayout.NHD:
        return part.view(pages, page_size, heads, dim)
    return part.view(pages, heads, page_size, dim).transpose(1, 2)


def _pages(cell: Cell, page_size: int) -> int:
    """Return the pages of a layer, including the null page."""
    return 1 + cell.batch * -(-cell.longest // page_size)


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

    def __init__(self, cls: type[AttentionBackend], context: BackendContext, store: KVStore) -> None:
        self.context, self._store = context, store
        self._backend = cls(context)
        self._backend.allocate()

    def close(self) -> None:
        self._backend.close()

    def measure(self, cell: Cell, num_samples: int) -> BackendTime:
        """Check the result of the cell, then time it.

        Raises: AssertionError: if the result is wrong. Errors of the backend are passed on.
        """
        backend, inputs = self._backend, self._inputs(cell)
        descriptor = inputs.metadata.descriptor
        if (reason := backend.graph_unsupported_reason(descriptor)) is not None:
            return BackendTime(reason=reason)
        backend.plan_capture(descriptor)
        host_us = self._host_us(cell, inputs)
        backend.schedule(inputs.metadata)
        calls = [self._call(inputs, layer) for layer in inputs.layers]
        for layer in sorted({0, len(calls) - 1}):
            calls[layer]()
            self._check(cell, inputs, layer)

        # A schedule without launches would measure slightly above or below 0.
        idle = type(backend).schedule is AttentionBackend.schedule
        schedule = None if idle else partial(backend.schedule, inputs.metadata)
        return BackendTime(host_us, *time_layers(calls, schedule, inputs.out, num_samples))

    def _call(self, inputs: _Inputs, layer: AttentionLayer) -> Call:
        def call() -> torch.Tensor:
            out = inputs.out[layer.index]
            self._backend.run(layer, inputs.q[layer.index], inputs.metadata, out)
            return out

        return call

    def _host_us(self, cell: Cell, inputs: _Inputs) -> float:
        """Time `plan_replay` on the host with a new batch each time and an idle device. The last batch is the
        cell's."""
        descriptor = inputs.metadata.descriptor
        shorter = min(_PLAN_ROUNDS, cell.longest - 1)
        batches = [self._batch(cell, inputs.row_pages, cell.longest - less) for less in range(shorter, -1, -1)]
        for batch in batches[:2]:  # loads lazily loaded kernels
            self._backend.plan_replay(descriptor, batch)
        plan = self._backend.plan_replay
        seconds = [_seconds(partial(plan, descriptor, batch), self.context.device) for batch in batches]
        _synchronize(self.context.device)
        return 1e6 * median(seconds)

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
        per_row = kv.pages_for(cell.longest)
        order = torch.randperm(
            cell.batch * per_row, generator=torch.Generator().manual_seed(3), dtype=torch.int32, device="cpu"
        )
        row_pages = 1 + order.view(cell.batch, per_row)
        table = torch.zeros(cell.batch, context.max_pages(0), dtype=torch.int32, device="cpu")
        table[:, :per_row] = row_pages
        caches = self._store.views(cell, kv.page_size, kv.layout)
        q = torch.empty(len(caches), cell.batch, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
        q.normal_(generator=torch.Generator(device).manual_seed(4))
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
        layers = [AttentionLayer(index, spec, k, v) for index, (k, v) in enumerate(caches)]
        return _Inputs(metadata, layers, q, torch.full_like(q, float("nan")), row_pages)

    def _check(self, cell: Cell, inputs: _Inputs, index: int) -> None:
        """Check the first and the last request against float32 attention."""
        layer = inputs.layers[index]
        for row in sorted({0, cell.batch - 1}):
            pages = inputs.row_pages[row].long().to(self.context.device)
            what = f"row {row}, layer {index}"
            check_token(layer, inputs.q[index, row], pages, cell.longest, inputs.out[index, row], what=what)


def time_layers(
    calls: Sequence[Call], schedule: Callable[[], object] | None, out: torch.Tensor, num_samples: int
) -> tuple[float, float, float, float]:
    """Return microseconds of a schedule (0 for None), and of a layer: median, 20th and 80th percentile.

    calls   one per layer; together they evict a layer's cache from L2 before its next run
    out     [layers, ...]  outputs of the calls; spacers read it, and their time is subtracted
    """
    device = out.device

    def timed(calls: Sequence[Call]) -> Timing:
        return time_calls(calls, device=device, num_samples=num_samples)

    def scheduled() -> torch.Tensor:
        assert schedule is not None, "called where there is one"
        schedule()
        return out

    spacer = timed(spacer_calls(list(out))).median_us
    run = timed(spaced_calls(calls, device))
    schedule_us = 0.0
    if schedule is not None:
        schedule_us = max(0.0, timed(spaced_calls([scheduled], device)).median_us - spacer)
    return schedule_us, run.median_us - spacer, run.p20_us - spacer, run.p80_us - spacer


def check_token(
    layer: AttentionLayer, q: torch.Tensor, pages: torch.Tensor, length: int, result: torch.Tensor, *, what: str
) -> None:
    """Check the output [num_q_heads, head_dim] of a last token against float32 attention over its pages.

    Raises: AssertionError: if the output is wrong; the message names `what`.
    """
    spec = layer.spec
    k, v = (x[pages].flatten(0, 1)[:length].float() for x in (layer.k_cache, layer.v_cache))
    shares = (
        torch.einsum("hgd,shd->hgs", q.float().unflatten(0, (spec.num_kv_heads, spec.num_queries_per_kv)), k)
    ) * spec.scale
    expected = torch.einsum("hgs,shd->hgd", shares.softmax(-1), v).flatten(0, 1)
    error = float((result.float() - expected).norm() / expected.norm())
    assert error <= _TOLERANCE, (  # also False for NaN
        f"{what}: expected a relative error of at most {_TOLERANCE}, got {error:.3g}"
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
