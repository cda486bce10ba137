"""A backend with static tensors, called as in the runtime, at one captured size, one step after another."""

from __future__ import annotations

import contextlib
import math
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import CapturedGraph, Recorder
from graphrt.capture.recorder import make_recorder
from graphrt.kernels.types import PAD_SLOT_ID, KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.testing.backend_accuracy import E4M3, DenseRow, check_rows, random_tree, tree_depths
from graphrt.testing.backend_features import ROWS, SEED, Feature, contexts_of
from graphrt.testing.numerics import bits_of, keys_seen

NAN = float("nan")
FINITE = 100.0
"""Value in the null page if pages are dropped. Kernels may read it, but it must not affect results."""

UNWRITTEN = 777.0
Rows = tuple[tuple[int, int, int], ...]
"""(seq_len, query_len, encoder_len) of each request of a step."""


@dataclass
class DenseSequence:
    """One request of a step, dense, on the host.

    q, k, v   queries, stored keys and stored values of every layer. For a layer with kv_shared_with, those of its
              source; for a cross layer, those of the encoder
    tree_masks   [query_len] int64; None: the new tokens form a chain
    kv_limits    [query_len] int32; None: a token sees the keys up to itself
    """

    seq_len: int
    query_len: int
    encoder_len: int
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    tree_masks: torch.Tensor | None = None
    kv_limits: torch.Tensor | None = None

    def length_in(self, kv: KVCacheSpec) -> int:
        """Return the number of tokens of the request in a KV group."""
        return self.encoder_len if kv.cross else self.seq_len


@dataclass
class Rig:
    """A backend, the static tensors of one descriptor, and the most recently written requests.

    `write` replaces upload and refresh. `replayed` and `eager` run the step and return the output of every layer, then
    the log-sum-exp of every layer, on the host. `check` compares these with float64.
    """

    backend: AttentionBackend
    feature: Feature
    descriptor: BatchDescriptor
    layers: list[AttentionLayer]
    sinks: list[torch.Tensor | None]
    q: list[torch.Tensor]
    new_kv: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of this step; only encoder layers read them
    out: list[torch.Tensor]
    lse: list[torch.Tensor]
    metadata: StepMetadata
    rng: torch.Generator
    graph: CapturedGraph | None = None
    recorder: Recorder | None = None
    written: list[DenseSequence] = field(default_factory=list)
    decodes: int = 0  # requests of the decode part, one token each, which come first
    batch: Batch | None = None
    before: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @property
    def context(self) -> BackendContext:
        return self.backend.context

    def sequence(self, seq_len: int, query_len: int, encoder_len: int = 0) -> DenseSequence:
        """Return a request with random contents."""

        def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=self.rng, device="cpu").to(dtype)

        row = DenseSequence(seq_len, query_len, encoder_len, [], [], [])
        if self.feature.tree_drafts:
            row.tree_masks = random_tree(query_len, self.rng)
        if self.feature.context_parallel:
            limits = torch.randint(seq_len + 1, (query_len,), generator=self.rng, device="cpu", dtype=torch.int32)
            row.kv_limits = limits.sort().values
        for layer in self.layers:
            spec, length = layer.spec, encoder_len if layer.spec.is_cross else seq_len
            row.q.append(random(query_len, spec.num_q_heads, spec.head_dim, dtype=spec.dtype))
            for values, size in ((row.k, spec.head_dim), (row.v, spec.value_dim)):
                if spec.kv_shared_with is None:
                    values.append(random(length, spec.num_kv_heads, size, dtype=layer.k_cache.dtype))
                else:
                    values.append(values[spec.kv_shared_with])
        return row

    def write(self, sequences: Sequence[DenseSequence]) -> None:
        """Write the requests of the next step to random pages, with NaN wherever the backend must not read.

        For a prefill part, requests with one new token come first and belong to the decode part.
        """
        if self.context.prefill:
            sequences = sorted(sequences, key=lambda sequence: sequence.query_len > 1)
            self.decodes = sum(sequence.query_len == 1 for sequence in sequences)
        meta, rows = self.metadata, range(len(sequences))
        seq_lens = torch.full(meta.seq_lens.shape, self.backend.seq_len_fill, dtype=torch.int32, device="cpu")
        positions = torch.zeros(meta.positions.shape, dtype=torch.int64, device="cpu")
        encoder_lens = [sequence.encoder_len for sequence in sequences]
        starts = [0]
        for row, sequence in enumerate(sequences):
            if row >= self.decodes:
                seq_lens[row] = sequence.seq_len
            at = torch.arange(sequence.seq_len - sequence.query_len, sequence.seq_len, device="cpu")
            starts.append(starts[-1] + sequence.query_len)
            positions[starts[row] : starts[-1]] = at
        ends = starts[-1:] * (len(meta.query_start_loc) - len(starts))
        meta.seq_lens.copy_(seq_lens)
        meta.positions.copy_(positions)
        if meta.tree_masks is not None:
            meta.tree_masks.fill_(1)
        for start, sequence in zip(starts, sequences, strict=False):
            here = slice(start, start + sequence.query_len)
            if meta.tree_masks is not None and sequence.tree_masks is not None:
                meta.tree_masks[here] = sequence.tree_masks.to(meta.tree_masks.device)
                meta.positions[here] = (tree_depths(sequence.tree_masks) + positions[start]).to(meta.positions.device)
            if meta.kv_limits is not None and sequence.kv_limits is not None:
                meta.kv_limits[here] = sequence.kv_limits.to(meta.kv_limits.device)
        padding = [0] * (len(meta.encoder_lens) - len(rows))
        meta.encoder_lens.copy_(torch.tensor([*encoder_lens, *padding], device="cpu"))
        meta.query_start_loc.copy_(torch.tensor([*starts, *ends], device="cpu").clamp(min=self.decodes))
        lists: list[list[int]] = []
        first_pages: list[int] = []
        for group in range(len(self.context.kv_groups)):
            first, owned = self._write_pages(group, sequences, starts, positions)
            first_pages += first
            lists += owned
        for layer, q, new_kv in zip(self.layers, self.q, self.new_kv, strict=True):
            names = ("q",) if layer.spec.is_cached else ("q", "k", "v")
            for name, tensor in zip(names, (q, *new_kv), strict=False):
                tensor.fill_(NAN)
                for row in rows:
                    tensor[starts[row] : starts[row + 1]] = getattr(sequences[row], name)[layer.index].to(q.device)
        self.written = list(sequences)
        self.batch = Batch(
            req_indices=np.arange(len(sequences), dtype=np.int32),
            seq_lens=np.array([s.seq_len for s in sequences], np.int32),
            query_lens=np.array([s.query_len for s in sequences], np.int32),
            page_indptr=np.cumsum([0, *map(len, lists)]).astype(np.int32),
            page_ids=np.array([page for pages in lists for page in pages], np.int32),
            first_pages=np.array(first_pages, np.int32),
            encoder_lens=np.array(encoder_lens, np.int32),
        )
        self.before = [(name, tensor.clone()) for name, tensor in self._inputs()]

    def _write_pages(
        self, group: int, sequences: Sequence[DenseSequence], starts: Sequence[int], positions: torch.Tensor
    ) -> tuple[list[int], list[list[int]]]:
        """Write one KV group: block table, KV slots, and the caches of its layers.

        Returns the index of each request's first page, and its page ids.
        """
        meta, kv = self.metadata, self.context.kv_groups[group]
        null_page = kv.null_page
        assert isinstance(null_page, int), "features set the null page to an int"
        owners = [layer for layer in self.layers if layer.spec.is_cached and layer.spec.kv_shared_with is None]
        layers = [layer for layer in owners if layer.group == group]
        free = [page for page in range(layers[0].k_cache.shape[0]) if page != null_page]
        order = [free[at] for at in torch.randperm(len(free), generator=self.rng, device="cpu").tolist()]
        first_pages = [_oldest_kept(kv, s) // kv.page_size for s in sequences]
        owned = [
            [order.pop() for _ in range(kv.pages_for(s.length_in(kv)) - first)]
            for s, first in zip(sequences, first_pages, strict=True)
        ]
        table = torch.full(meta.block_tables[group].shape, null_page, dtype=torch.int32, device="cpu")
        slots = torch.full(meta.slot_mappings[group].shape, PAD_SLOT_ID, device="cpu")
        for row, (first, pages) in enumerate(zip(first_pages, owned, strict=True)):
            table[row, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
            if kv.cross:  # steps do not write cross groups
                continue
            here = slice(starts[row], starts[row + 1])
            page = table[row][positions[here] // kv.page_size].long()
            slots[here] = page * kv.page_size + positions[here] % kv.page_size
        meta.block_tables[group].copy_(table)
        meta.slot_mappings[group].copy_(slots)
        for layer in layers:
            for cache, dense in ((layer.k_cache, "k"), (layer.v_cache, "v")):
                cache.copy_(torch.full(cache.shape, NAN, device="cpu").to(cache.dtype))
                if self.feature.drops_pages:  # the first tile of a request may start in the null page
                    cache[null_page] = torch.full(cache.shape[1:], FINITE, device="cpu").to(cache.dtype)
                for sequence, first, pages in zip(sequences, first_pages, owned, strict=True):
                    values = getattr(sequence, dense)[layer.index]
                    for number, page in enumerate(pages, first):
                        part = values[number * kv.page_size : (number + 1) * kv.page_size]
                        cache[page, : len(part)] = part.to(cache.device)
        return first_pages, owned

    def step(self) -> torch.Tensor:
        """Run the step, eagerly or under capture."""
        self.backend.schedule(self.metadata)
        for index, (layer, q, out) in enumerate(zip(self.layers, self.q, self.out, strict=True)):
            sinks, lse = self.sinks[index], self.lse[index] if self.lse else None
            if layer.spec.is_cached:
                self.backend.run(layer, q, self.metadata, out, sinks=sinks, lse=lse)
            else:
                k, v = self.new_kv[index]
                self.backend.run_encoder(layer, q, k, v, self.metadata, out, sinks=sinks, lse=lse)
        return self.out[-1]

    def capture(self) -> None:
        """Capture the step if the backend supports it; otherwise, only `eager` can run."""
        if self.backend.graph_unsupported_reason(self.descriptor) is not None:
            return
        recorder = self.recorder = make_recorder(self.context.device)

        def prepare() -> None:
            self.backend.plan_capture(self.descriptor)

        with recorder.session():
            recorder.warm_up(self.step, prepare)
            self.graph = recorder.capture(self.step, self.descriptor, prepare)
        self._synchronize()

    def replayed(self) -> list[torch.Tensor]:
        """Run one step with the graph, and return the results."""
        assert self.graph is not None, "replayed() without a graph"
        assert self.batch is not None, "replayed() before write()"
        self._poison()
        self.backend.plan_replay(self.descriptor, self.batch)
        self.graph.launch()
        return self._results()

    def eager(self) -> list[torch.Tensor]:
        """Run one step with the same calls outside the graph, and return the results."""
        assert self.batch is not None, "eager() before write()"
        self._poison()
        self.backend.plan_capture(self.descriptor)
        self.backend.plan_replay(self.descriptor, self.batch)
        with torch.no_grad():
            self.step()
        return self._results()

    def check(self, name: str, results: list[torch.Tensor]) -> None:
        """Compare every layer with float64 on the host, and check that inputs were not modified."""
        count, first = len(self.layers), self.decodes
        if any(bool((result[:first] != UNWRITTEN).any()) for result in results):
            raise AssertionError(f"{self.backend.name}, {name}: wrote to the {first} tokens of the decode part")
        for index, layer in enumerate(self.layers):
            quantized = self.backend.quantizes_queries and layer.k_cache.dtype == E4M3
            window = layer.spec.sliding_window or 0  # options() omits the window of an encoder layer
            check_rows(
                f"{self.backend.name}, {name}, layer {index}",
                results[index][first:],
                results[count + index][first:] if self.lse else None,
                [_dense(sequence, layer) for sequence in self.written[first:]],
                replace(layer.options(self.sinks[index]), sliding_window=window),
                quantized_queries=quantized,
            )
        for (what, now), (_, then) in zip(self._inputs(), self.before, strict=True):
            if not torch.equal(bits_of(now), bits_of(then)):
                raise AssertionError(f"{self.backend.name}, {name}: modified {what}, which is read-only")

    def drop_graph(self) -> None:
        if self.graph is not None and self.recorder is not None:
            self.graph.close()
            self.recorder.close()
            self.graph = None

    def close(self) -> None:
        """Close the backend, and raise AssertionError if it still references tensors."""
        self.drop_graph()
        self.backend.close()
        left = tensors_in(self.backend)
        if left:
            raise AssertionError(f"{self.backend.name}: holds tensors after close(): {', '.join(left)}")

    def _inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, the tensors that a backend must not modify."""
        meta = self.metadata
        names = ("seq_lens", "query_start_loc", "positions", "encoder_lens")
        tensors = [(f"metadata.{name}", getattr(meta, name)) for name in names]
        for group, (table, slots) in enumerate(zip(meta.block_tables, meta.slot_mappings, strict=True)):
            tensors += [(f"metadata.block_tables[{group}]", table), (f"metadata.slot_mappings[{group}]", slots)]
        for layer, q, (k, v) in zip(self.layers, self.q, self.new_kv, strict=True):
            tensors += [("q", q), ("k", k), ("v", v), ("k_cache", layer.k_cache), ("v_cache", layer.v_cache)]
        return tensors

    def _poison(self) -> None:
        for name, tensor in self.backend.tensors().items():
            if name != "counters":
                spoil(tensor)
        for tensor in (*self.out, *self.lse):
            tensor.fill_(UNWRITTEN)
        self._synchronize()

    def _results(self) -> list[torch.Tensor]:
        self._synchronize()
        return [tensor.cpu().clone() for tensor in (*self.out, *self.lse)]

    def _synchronize(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()


def spoil(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with garbage: NaN, or wrong integers within bounds."""
    tensor.fill_(NAN if tensor.is_floating_point() else 7)


@contextlib.contextmanager
def open_rigs(
    backend_class: type[AttentionBackend], feature: Feature, device: torch.device, sizes: Sequence[int] = (ROWS,)
) -> Iterator[list[Rig]]:
    """Yield one rig per batch size, and close all at the end. After an error, only drop their graphs."""
    rigs: list[Rig] = []
    try:
        for rows in sizes:
            rigs.append(make_rig(backend_class, feature, device, rows=rows))
        yield rigs
    except BaseException:
        for rig in rigs:
            rig.drop_graph()
        raise
    for rig in rigs:
        rig.close()


def make_rig(backend_class: type[AttentionBackend], feature: Feature, device: torch.device, *, rows: int = ROWS) -> Rig:
    """Return a rig with an allocated backend.

    Raises:
        unittest.SkipTest: if the class has `unsupported_reasons` for the feature.
    """
    contexts = contexts_of(backend_class, feature, device, rows)
    if feature.prefill:
        prefill_class = backend_class.prefill_class()
        assert prefill_class is not None, "declared by the class"
        backend_class = prefill_class
    reasons = [backend_class.unsupported_reasons(context) for context in contexts]
    context = next((c for c, found in zip(contexts, reasons, strict=True) if not found), None)
    if context is None:
        raise unittest.SkipTest(f"backend {backend_class.name}: {'; '.join(reasons[0])}")
    rng = torch.Generator().manual_seed(SEED)
    layers = _layers(context, rows, rng, feature)
    # Use values that bfloat16 can represent, because some kernels round sinks to it.
    sinks = [
        torch.randn(spec.num_q_heads, generator=rng, device="cpu").bfloat16().float().to(device) if spec.sinks else None
        for spec in context.attention
    ]
    descriptor = BatchDescriptor.decode(rows, feature.query_len)
    if feature.mixed:
        descriptor = BatchDescriptor.mixed(context.max_num_tokens, rows)
    padded = descriptor.padded_tokens

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    groups = range(len(context.kv_groups))
    metadata = StepMetadata(
        descriptor=descriptor,
        seq_lens=make(rows, dtype=torch.int32),
        query_start_loc=make(rows + 1, dtype=torch.int32),
        block_tables=tuple(make(rows, context.max_pages(group), dtype=torch.int32) for group in groups),
        slot_mappings=tuple(make(padded, dtype=torch.int64) for _ in groups),
        encoder_lens=make(rows, dtype=torch.int32),
        positions=make(padded, dtype=torch.int64),
        max_seq_len=context.max_seq_len,
        tree_masks=make(padded, dtype=torch.int64) if feature.tree_drafts else None,
        kv_limits=make(padded, dtype=torch.int32) if feature.context_parallel else None,
    )
    q, new_kv, out, lse = [], [], [], []
    for spec in context.attention:
        heads, kv_heads, dtype = spec.num_q_heads, spec.num_kv_heads, spec.dtype
        # Slice one qkv tensor, as in a model.
        parts = [(heads, spec.head_dim), (kv_heads, spec.head_dim), (kv_heads, spec.value_dim)]
        sizes = [math.prod(part) for part in parts]
        qkv = make(padded, sum(sizes), dtype=dtype).split(sizes, 1)
        queries, keys, values = (tensor.unflatten(1, part) for tensor, part in zip(qkv, parts, strict=True))
        q.append(queries)
        new_kv.append((keys, values))
        out.append(make(padded, heads, spec.value_dim, dtype=dtype))
        lse += [make(padded, heads)] if feature.lse else []
    backend = backend_class(context)
    backend.allocate()
    return Rig(backend, feature, descriptor, layers, sinks, q, new_kv, out, lse, metadata, rng)


def _oldest_kept(kv: KVCacheSpec, sequence: DenseSequence) -> int:
    """Return the oldest position that a token of this step sees. Pages before it are dropped."""
    if kv.cross:
        return 0
    window, chunk = kv.sliding_window or 0, kv.attention_chunk_size or 0
    seen = keys_seen(sequence.query_len, sequence.seq_len, True, window, chunk)
    return int(seen.any(0).nonzero()[0])


def _layers(context: BackendContext, rows: int, rng: torch.Generator, feature: Feature) -> list[AttentionLayer]:
    """Return the layers with their caches.

    Page ids of one group are valid in the caches of all others, so that a backend that confuses groups reads wrong
    values instead of reading out of bounds.
    """
    num_pages = 1 + rows * max((context.max_pages(group) for group in range(len(context.kv_groups))), default=0)
    layers: list[AttentionLayer] = []
    assert context.group_of is not None, "set at construction"
    for index, (spec, group) in enumerate(zip(context.attention, context.group_of, strict=True)):
        if group is None:
            nothing = torch.empty(0, 1, spec.num_kv_heads, 0, dtype=spec.dtype, device=context.device)
            slopes = _slopes(spec, context.device)
            layers.append(AttentionLayer(index, spec, nothing, nothing, alibi_slopes=slopes, writes=False))
        elif spec.kv_shared_with is None:
            kv = context.kv_groups[group]
            layers.append(_layer(index, spec, kv, group, num_pages, context.device, rng, feature))
        else:
            layers.append(replace(layers[spec.kv_shared_with], index=index, spec=spec, writes=False))
    return layers


def _layer(
    index: int,
    spec: AttentionSpec,
    kv: KVCacheSpec,
    group: int,
    num_pages: int,
    device: torch.device,
    rng: torch.Generator,
    feature: Feature,
) -> AttentionLayer:
    hnd = kv.layout is KVLayout.HND
    page = (kv.num_kv_heads, kv.page_size) if hnd else (kv.page_size, kv.num_kv_heads)
    if feature.one_pool:
        k, v = torch.zeros(num_pages, 2, *page, kv.head_dim, device=device).to(kv.dtype).unbind(1)
    else:
        sizes = (kv.head_dim, kv.value_dim)
        k, v = (torch.zeros(num_pages, *page, size, device=device).to(kv.dtype) for size in sizes)
    if hnd:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    k_scale = v_scale = None
    if kv.dtype.itemsize == 1:
        count = kv.num_kv_heads if feature.scale_per_head else 1
        k_scale, v_scale = ((0.5 + torch.rand(count, generator=rng, device="cpu")).to(device) for _ in range(2))
    slopes, writes = _slopes(spec, device), not spec.is_cross
    return AttentionLayer(index, spec, k, v, k_scale, v_scale, alibi_slopes=slopes, group=group, writes=writes)


def _slopes(spec: AttentionSpec, device: torch.device) -> torch.Tensor | None:
    return None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=device)


def _dense(sequence: DenseSequence, layer: AttentionLayer) -> DenseRow:
    k, v = (
        stored[layer.index] if scale is None else stored[layer.index].double() * scale.cpu().double()[:, None]
        for stored, scale in ((sequence.k, layer.k_scale), (sequence.v, layer.v_scale))
    )
    return DenseRow(sequence.q[layer.index], k, v, sequence.tree_masks, sequence.kv_limits)


def tensors_in(backend: AttentionBackend) -> list[str]:
    """Return the names of the tensors in a backend's attributes, including containers and objects of its package."""
    package = type(backend).__module__.split(".")[0]
    seen: set[int] = set()

    def find(value: Any, name: str) -> list[str]:
        if isinstance(value, torch.Tensor):
            return [name]
        if id(value) in seen:
            return []
        seen.add(id(value))
        parts: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = [(f"{name}[{at}]", part) for at, part in enumerate(value)]
        elif is_dataclass(value) and not isinstance(value, type):
            parts = [(f"{name}.{part.name}", getattr(value, part.name)) for part in fields(value)]
        elif type(value).__module__.split(".")[0] == package and hasattr(value, "__dict__"):
            parts = [(f"{name}.{key}", part) for key, part in vars(value).items()]
        return [found for part_name, part in parts for found in find(part, part_name)]

    return find(backend, type(backend).__name__)
