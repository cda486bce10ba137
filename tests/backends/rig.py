"""A backend over static tensors, driven as the runtime drives it: what the contract tests share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer, BackendContext
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import make_recorder
from graphrt.kernels.types import PAD_SLOT_ID, KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.kernels import attention_cases

ROWS = 4
NAN = float("nan")
UNWRITTEN = 777.0
Rows = tuple[tuple[int, int], ...]  # (seq_len, query_len) of each row


@dataclass(frozen=True)
class Feature:
    """What a case asks of a backend.

    dtype       of the layers; None: bfloat16 on CUDA, float32 on CPU
    layers      options of each layer's spec; `same` are those where a backend wants all layers alike
    page_size   0: the smallest usual one that the backend has
    head_dim    0: 128 on CUDA, 16 on CPU
    longest     sequence on CUDA, in tokens; 0: 640
    """

    id: str
    layers: tuple[dict, ...] = ({}, {})
    same: tuple[dict, ...] | None = None
    kv_dtype: torch.dtype | None = None
    layout: KVLayout = KVLayout.NHD
    query_len: int = 1
    mixed: bool = False
    page_size: int = 0
    dtype: torch.dtype | None = None
    lse: bool = False
    batch_invariant: bool = False
    head_dim: int = 0
    scale_per_head: bool = True
    longest: int = 0


E4M3 = torch.float8_e4m3fn


@dataclass
class Sequence:
    """One row of a step, dense and on the host: its queries, keys and values of every layer."""

    seq_len: int
    query_len: int
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]


@dataclass
class Rig:
    """A backend over static tensors, driven as the runtime drives it."""

    backend: AttentionBackend
    feature: Feature
    descriptor: BatchDescriptor
    layers: list[AttentionLayer]
    sinks: list[torch.Tensor | None]
    q: list[torch.Tensor]
    out: list[torch.Tensor]
    lse: list[torch.Tensor | None]
    metadata: StepMetadata
    rng: torch.Generator
    graph: object = None
    recorder: object = None
    written: list[Sequence] = field(default_factory=list)
    batch: Batch | None = None

    @property
    def context(self) -> BackendContext:
        return self.backend.context

    def sequence(self, seq_len: int, query_len: int) -> Sequence:
        spec, stored = self.layers[0].spec, self.context.kv.dtype
        keys, layers = (seq_len, spec.num_kv_heads, spec.head_dim), range(len(self.layers))
        q = [torch.randn(query_len, *self.q[0].shape[1:], generator=self.rng).to(spec.dtype) for _ in layers]
        k, v = ([torch.randn(keys, generator=self.rng).to(stored) for _ in layers] for _ in range(2))
        return Sequence(seq_len, query_len, q, k, v)

    def write(self, sequences: list[Sequence]) -> None:
        """What an upload and a refresh do: pages in random places, NaN wherever nothing is to be read."""
        meta, page_size = self.metadata, self.context.kv.page_size
        pages_of = [-(-s.seq_len // page_size) for s in sequences]
        num_pages = self.layers[0].k_cache.shape[0]
        order = (torch.randperm(num_pages - 1, generator=self.rng) + 1).tolist()
        owned = [[order.pop() for _ in range(count)] for count in pages_of]
        for index, layer in enumerate(self.layers):
            for cache, dense in ((layer.k_cache, "k"), (layer.v_cache, "v")):
                cache.copy_(torch.full(cache.shape, NAN).to(cache.dtype))
                for sequence, pages in zip(sequences, owned, strict=True):
                    values = getattr(sequence, dense)[index]
                    for number, page in enumerate(pages):
                        part = values[number * page_size : (number + 1) * page_size]
                        cache[page, : len(part)] = part.to(cache.device)
            self.q[index].fill_(NAN)
            queries = torch.cat([s.q[index] for s in sequences])
            self.q[index][: len(queries)] = queries.to(self.q[index].device)
        table = torch.zeros(meta.block_table.shape, dtype=torch.int32)
        seq_lens = torch.full(meta.seq_lens.shape, self.backend.seq_len_fill, dtype=torch.int32)
        starts = [0]
        slots = torch.full(meta.slot_mapping.shape, PAD_SLOT_ID)
        positions = torch.zeros(meta.positions.shape, dtype=torch.int64)
        for row, (sequence, pages) in enumerate(zip(sequences, owned, strict=True)):
            table[row, : len(pages)] = torch.tensor(pages)
            seq_lens[row] = sequence.seq_len
            at = torch.arange(sequence.seq_len - sequence.query_len, sequence.seq_len)
            here = slice(starts[-1], starts[-1] + sequence.query_len)
            positions[here], slots[here] = at, table[row][at // page_size].long() * page_size + at % page_size
            starts.append(here.stop)
        starts += [starts[-1]] * (len(meta.query_start_loc) - len(starts))
        for target, value in (
            (meta.block_table, table), (meta.seq_lens, seq_lens), (meta.slot_mapping, slots),
            (meta.positions, positions), (meta.query_start_loc, torch.tensor(starts)),
        ):  # fmt: skip
            target.copy_(value)
        self.written = sequences
        self.batch = Batch(
            row_ids=range(len(sequences)),
            seq_lens=[s.seq_len for s in sequences],
            query_lens=[s.query_len for s in sequences],
            page_indptr=np.cumsum([0, *pages_of]),
            page_ids=[page for pages in owned for page in pages],
        )

    def step(self) -> torch.Tensor:
        """What is recorded."""
        self.backend.schedule(self.metadata)
        for layer, q, out, sinks, lse in zip(self.layers, self.q, self.out, self.sinks, self.lse, strict=True):
            self.backend.run(layer, q, self.metadata, out, sinks=sinks, lse=lse)
        return self.out[-1]

    def capture(self) -> None:
        recorder = self.recorder = make_recorder(self.context.device)
        with recorder.session():
            recorder.warm_up(self.step, lambda: self.backend.plan_capture(self.descriptor))
            prepare = lambda: self.backend.plan_capture(self.descriptor)  # noqa: E731
            self.graph = recorder.record(self.step, self.descriptor, prepare)
        self._synchronize()

    def replayed(self) -> list[torch.Tensor]:
        self.poison()
        self.backend.plan_replay(self.descriptor, self.batch)
        self.graph.launch()
        return self._results()

    def eager(self) -> list[torch.Tensor]:
        self.poison()
        self.backend.plan_capture(self.descriptor)
        self.backend.plan_replay(self.descriptor, self.batch)
        with torch.no_grad():
            self.step()
        return self._results()

    def check(self, results: list[torch.Tensor]) -> None:
        """Every layer against float64, made of the host's copy of keys and values; zeros in pad tokens."""
        layers = len(self.layers)
        for index, layer in enumerate(self.layers):
            lse = results[layers + index] if self.feature.lse else None
            if lse is not None and self.sinks[index] is not None:
                lse = _without_sinks_of_pads(lse, sum(s.query_len for s in self.written), self.sinks[index].cpu())
            problem = self._problem(index, layer, lse)
            quantised = getattr(self.backend, "quantises_queries", False) and self.context.kv.dtype == E4M3
            (assert_accurate_fp8 if quantised else attention_cases.assert_accurate)(problem, results[index])

    def drop_graph(self) -> None:
        if self.graph is not None:
            self.graph.close()
            self.recorder.close()
            self.graph = None

    def close(self) -> None:
        self.drop_graph()
        self.backend.close()
        assert not (left := tensors_in(vars(self.backend))), f"tensors that outlive close(): {left}"

    def _problem(self, index: int, layer: AttentionLayer, lse: torch.Tensor | None) -> attention_cases.Problem:
        spec = layer.spec
        case = attention_cases.Case(
            self.feature.id,
            tuple((s.seq_len, s.query_len) for s in self.written),
            dtype=spec.dtype,
            kv_dtype=self.context.kv.dtype,
            num_kv_heads=spec.num_kv_heads,
            group=spec.group,
            head_dim=spec.head_dim,
            window=spec.sliding_window or 0,
            softcap=spec.logits_softcap or 0.0,
        )
        dense = [
            tuple(
                values[index] if scale is None else values[index].double() * scale.cpu().double()[:, None]
                for values, scale in ((s.k, layer.k_scale), (s.v, layer.v_scale))
            )
            for s in self.written
        ]
        tensors = self.q[index], layer.k_cache, layer.v_cache, *self._tables()
        return attention_cases.Problem(case, *tensors, self.out[index], lse, layer.options(self.sinks[index]), dense)

    def _tables(self) -> tuple[torch.Tensor, ...]:
        return self.metadata.block_table, self.metadata.seq_lens, self.metadata.query_start_loc

    def poison(self) -> None:
        for name, tensor in self.backend.tensors().items():
            if name != "counters":
                tensor.fill_(NAN if tensor.is_floating_point() else 7)
        for tensor in (*self.out, *(x for x in self.lse if x is not None)):
            tensor.fill_(UNWRITTEN)
        self._synchronize()

    def _results(self) -> list[torch.Tensor]:
        self._synchronize()
        return [t.cpu().clone() for t in (*self.out, *(x for x in self.lse if x is not None))]

    def _synchronize(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()


def _without_sinks_of_pads(lse: torch.Tensor, tokens: int, sinks: torch.Tensor) -> torch.Tensor:
    """With sinks, a pad token's log-sum-exp may be the sink instead of -inf: here it is -inf for both."""
    pads = lse[tokens:]
    assert ((pads == -torch.inf) | (pads == sinks)).all(), "log-sum-exp of pad tokens"
    return torch.cat([lse[:tokens], torch.full_like(pads, -torch.inf)])


def assert_accurate_fp8(problem: attention_cases.Problem, got: torch.Tensor) -> None:
    """At most twice the error of plain torch that rounds queries and probabilities to e4m3, as such kernels do."""
    case, options = problem.case, problem.options
    truth, true_lse = attention_cases.expected(problem, torch.float64)
    plain, plain_lse, start = torch.zeros_like(truth), torch.full_like(true_lse, -torch.inf), 0
    for (seq_len, query_len), (k, v) in zip(case.rows, problem.dense, strict=True):
        q = problem.q[start : start + query_len].cpu().float().unflatten(1, (case.num_kv_heads, case.group))
        scale = torch.exp2(torch.ceil(torch.log2(q.abs().amax((0, 2, 3)) / 448.0)))[:, None, None]
        q8 = ((q / scale).to(E4M3).float() * scale).double()
        logits = torch.einsum("tkgd,nkd->tkgn", q8, k) * case.head_dim**-0.5
        at = torch.arange(seq_len - query_len, seq_len)[:, None, None, None]
        seen = torch.arange(seq_len) <= at
        if case.window:
            seen &= torch.arange(seq_len) > at - case.window
        logits = logits.masked_fill(~seen, -torch.inf)
        if options.sinks is not None:  # one more key, of no value
            sinks = options.sinks.cpu().double().view(1, case.num_kv_heads, case.group, 1)
            logits = torch.cat([logits, sinks.expand(query_len, -1, -1, -1)], -1)
            v = torch.nn.functional.pad(v.double(), (0, 0, 0, 0, 0, 1))
        plain_lse[start : start + query_len] = torch.logsumexp(logits, -1).flatten(1)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        rounded = weights.float().to(E4M3).double()
        result = torch.einsum("tkgn,nkd->tkgd", rounded, v.double()) / weights.sum(-1, keepdim=True)
        plain[start : start + query_len] = result.flatten(1, 2).to(case.dtype).double()
        start += query_len
    bound = 2 * (plain - truth).abs().max().item() + 1e-5
    error = (got.double() - truth).abs().max().item()
    assert error <= bound, f"max error {error:.3g}, allowed {bound:.3g}"
    assert not got[start:].any(), "pad tokens must be zeros"
    if problem.lse is not None:
        have, seen = problem.lse.cpu().double(), true_lse.isfinite()
        assert torch.equal(have.isfinite(), seen)
        # Sums of products of fp8 have 14 bits or so, beside the rounding of queries.
        bound = 2 * (plain_lse - true_lse)[seen].abs().max().item() + 2**-10
        error = (have - true_lse)[seen].abs().max().item()
        assert error <= bound, f"max error of the log-sum-exp {error:.3g}, allowed {bound:.3g}"


def make_rig(
    backend_class: type[AttentionBackend], feature: Feature, device: torch.device, seed: int = 0, rows: int = ROWS
) -> Rig:
    """Skips, with every reason, where the backend's own predicate says that it cannot serve the feature."""
    cuda = device.type == "cuda"
    dtype, (heads, kv_heads), head_dim = (
        (torch.bfloat16, (8, 2), 128) if cuda else (torch.float32, (4, 2), 16)
    )  # fmt: skip
    dtype, head_dim = feature.dtype or dtype, feature.head_dim or head_dim
    page_size = feature.page_size or (16 if cuda else 4)
    sizes = backend_class.capabilities.page_sizes
    if sizes is not None and page_size not in sizes:
        page_size = sizes[0]
    max_pages = max(4, (feature.longest or 640) // page_size) if cuda else (4 if page_size < 64 else 1)
    tokens = 64 if cuda else 12
    rng = torch.Generator().manual_seed(seed)
    first = None
    for options in (feature.layers, feature.same or feature.layers):
        specs = tuple(_spec(o, heads, kv_heads, head_dim, dtype) for o in options)
        kv = KVCacheSpec(len(specs), kv_heads, head_dim, page_size, feature.layout, feature.kv_dtype or dtype)
        context = BackendContext(
            attention=specs,
            kv=kv,
            device=device,
            max_num_reqs=max(ROWS, rows),
            max_num_tokens=tokens,
            max_seq_len=max_pages * page_size,
            max_query_len=feature.query_len,
            batch_invariant=feature.batch_invariant,
        )
        reasons = backend_class.why_not(context)
        first = first or reasons
        if not reasons:
            break
    else:
        pytest.skip(f"backend {backend_class.name}: {'; '.join(first)}")
    layers = [
        _layer(i, spec, kv, 1 + rows * max_pages, device, rng, feature.scale_per_head) for i, spec in enumerate(specs)
    ]
    # Values of bfloat16, which some kernels round sinks to.
    sinks = [torch.randn(heads, generator=rng).bfloat16().float().to(device) if s.sinks else None for s in specs]
    descriptor = (
        BatchDescriptor.mixed(tokens, rows) if feature.mixed else BatchDescriptor.decode(rows, feature.query_len)
    )
    padded = descriptor.padded_tokens
    make = lambda *shape, **o: torch.zeros(*shape, device=device, **o)  # noqa: E731
    metadata = StepMetadata(
        descriptor=descriptor,
        seq_lens=make(rows, dtype=torch.int32),
        query_start_loc=make(rows + 1, dtype=torch.int32),
        block_table=make(rows, max_pages, dtype=torch.int32),
        slot_mapping=make(padded, dtype=torch.int64),
        positions=make(padded, dtype=torch.int64),
        max_seq_len=max_pages * page_size,
    )
    # Queries as a model has them: slices of one tensor of queries, keys and values.
    q = [make(padded, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads] for _ in specs]
    out = [make(padded, heads, head_dim, dtype=dtype) for _ in specs]
    lse = [make(padded, heads) if feature.lse else None for _ in specs]
    backend = backend_class(context)
    backend.allocate()
    return Rig(backend, feature, descriptor, layers, sinks, q, out, lse, metadata, rng)


def _spec(options: dict, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionSpec:
    spec = AttentionSpec(heads, kv_heads, head_dim, dtype)
    slopes = tuple(0.03 * (1 + h) for h in range(heads)) if options.get("alibi") else None
    return replace(spec, alibi_slopes=slopes, **{k: v for k, v in options.items() if k != "alibi"})


def _layer(index, spec, kv, num_pages, device, rng, scale_per_head) -> AttentionLayer:
    hnd = kv.layout is KVLayout.HND
    inner = (kv.num_kv_heads, kv.page_size) if hnd else (kv.page_size, kv.num_kv_heads)
    k, v = (torch.zeros(num_pages, *inner, kv.head_dim, device=device).to(kv.dtype) for _ in range(2))
    if hnd:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    scales = [None, None]
    if kv.dtype.itemsize == 1:
        count = kv.num_kv_heads if scale_per_head else 1
        scales = [(0.5 + torch.rand(count, generator=rng)).to(device) for _ in range(2)]
    slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=device)
    return AttentionLayer(index, spec, k, v, *scales, alibi_slopes=slopes)


def tensors_in(value: object, name: str = "") -> list[str]:
    """Names of the tensors in an object's attributes, and in containers and slots of these."""
    if isinstance(value, torch.Tensor):
        return [name]
    if isinstance(value, dict):
        parts = [(f"{name}.{key}", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple, set)):
        parts = [(f"{name}[{at}]", part) for at, part in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value)]
    else:
        parts = list(vars(value).items()) if type(value).__module__.startswith("tests") else []
    return [found for part_name, part in parts for found in tensors_in(part, part_name)]
