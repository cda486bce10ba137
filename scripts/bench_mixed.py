"""Attention cost of a mixed step: as one part, as two parts, and of each part alone.

    python -m scripts.bench_mixed                       # all cells: the input of the choice of prefill backends
    python -m scripts.bench_mixed --only triton,triton+flash_attn3
    python -m scripts.bench_mixed --device cpu          # dry run of a tiny cell, times have no meaning

A cell is a batch of decoding requests plus one request with a prompt chunk. `triton` and `flash_attn3` serve all
requests with one kernel. `triton+flash_attn3` serves the decodes with the first and the chunk with the second. For
comparison, graphrt's decode kernel on the decodes and FlashAttention 3 on the chunk are timed alone, in separate
graphs: the cost of two parts if the split were free.

Device times are measured inside graph replays with a cold L2. The cost of a layer is its `run` plus 1/32 of the
schedules, which 32 layers share. Each result is checked before it is timed. The last line of standard output is one
JSON object. scripts/make_docs.py generates the registry's table from a committed result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext
from graphrt.backends.flash_attn3 import FlashAttention3Backend
from graphrt.backends.registry import backend_class
from graphrt.backends.triton import TritonBackend
from graphrt.backends.two_parts import TwoPartBackend, decode_context, two_part_unsupported_reasons
from graphrt.bench.environment import provenance
from graphrt.bench.timer import Call, rotations
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec
from scripts.rigs.backend_rig import check_row, layer_calls
from scripts.rigs.cells import LAYERS
from scripts.rigs.measure import LayerTime, make_parser, parse, reason_of, time_layers

NAMES = ("triton", "triton+triton", "triton+flash_attn3", "flash_attn3", "flash_attn3+flash_attn3")
PAGE_SIZE, SAMPLES = 16, 20


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` requests that decode at `context` tokens, and one with `chunk` new tokens after `past` tokens."""

    batch: int
    context: int
    chunk: int
    past: int = 0


CELLS = (
    Cell(256, 1024, 2048),
    Cell(64, 2048, 2048),
    Cell(16, 8192, 2048),
    Cell(64, 2048, 512),
    Cell(64, 2048, 256, 7936),
)
TINY = Cell(3, 20, 9, 7)


class Rig:
    """The tensors of a cell, with enough layers to evict a layer's cache from L2 before its next run."""

    def __init__(self, cell: Cell, spec: AttentionSpec, device: torch.device) -> None:
        self.cell, self.spec, self.device = cell, spec, device
        lengths = [*[cell.context] * cell.batch, cell.past + cell.chunk]
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        pages = 1 + sum(counts)
        rows, tokens = cell.batch + 1, cell.batch + cell.chunk
        # Queries, outputs, K and V of the chunk alone, with enough copies for a cold L2.
        width = 2 * (cell.chunk * spec.num_q_heads + (cell.past + cell.chunk) * spec.num_kv_heads) * spec.head_dim
        layers = rotations(width * spec.dtype.itemsize, device)
        self.context = BackendContext(
            attention=(spec,) * layers,
            kv_groups=(KVCacheSpec(layers, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, dtype=spec.dtype),),
            device=device,
            max_num_reqs=rows,
            max_num_tokens=tokens,
            max_seq_len=max(lengths),
        )
        random = torch.Generator(device).manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=spec.dtype, device=device).normal_(generator=random)

        shape = (pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        self.layers = [AttentionLayer(index, spec, normal(*shape), normal(*shape)) for index in range(layers)]
        self.q = normal(layers, tokens, spec.num_q_heads, spec.head_dim)
        self.out = torch.full_like(self.q, float("nan"))
        order = iter((1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(2))).split(counts))
        self.table = torch.zeros(rows, self.context.max_pages(0), dtype=torch.int32)
        for row, owned in enumerate(order):
            self.table[row, : len(owned)] = owned
        self.lengths = lengths
        self.metadata = self._metadata()

    def _metadata(self) -> StepMetadata:
        """Return the metadata of the whole step with its two parts, as the refresh writes it."""
        cell, device = self.cell, self.device
        rows, tokens = cell.batch + 1, cell.batch + cell.chunk
        slots = torch.arange(tokens, device=device)

        def part(descriptor: BatchDescriptor, lens: list[int], starts: list[int], end: int) -> StepMetadata:
            return StepMetadata(
                descriptor=descriptor,
                max_seq_len=self.context.max_seq_len,
                seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
                query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
                positions=torch.zeros(end, dtype=torch.int64, device=device),
                block_tables=(table,),
                slot_mappings=(slots[:end],),
                encoder_lens=torch.zeros(len(lens), dtype=torch.int32, device=device),
            )

        table = self.table.to(device)
        mixed, at = BatchDescriptor.mixed(tokens, rows), list(range(rows))
        decodes = part(BatchDescriptor.decode(rows), [*self.lengths[:-1], 0], [*at, cell.batch], rows)
        prompts = part(mixed, [*[0] * cell.batch, self.lengths[-1]], [*[cell.batch] * rows, tokens], tokens)
        whole = part(mixed, self.lengths, [*at, tokens], tokens)
        return StepMetadata(**{f: getattr(whole, f) for f in whole.__slots__ if f != "parts"}, parts=(decodes, prompts))

    def calls(self, backend: AttentionBackend, metadata: StepMetadata, tokens: slice) -> list[Call]:
        return layer_calls(backend, self.layers, self.q[:, tokens], self.out[:, tokens], metadata)

    def check(self, rows: Sequence[int], result: torch.Tensor) -> None:
        """Check the last token of some requests in the first layer against float32 attention."""
        for row in rows:
            pages = self.table[row, : -(-self.lengths[row] // PAGE_SIZE)].long().to(self.device)
            at = row if row < self.cell.batch else -1
            check_row(self.layers[0], self.q[0, at], pages, self.lengths[row], result[at], what=f"row {row}")

    def time(self, calls: Sequence[Call], schedule: Callable[[], object] | None) -> LayerTime:
        return time_layers(calls, schedule, self.out, SAMPLES)


def make(name: str, context: BackendContext) -> AttentionBackend:
    """Return the backend or pair with this name. Raises: UnsupportedError or ValueError: if it cannot serve the cell,
    with the reason."""
    decode, _, prefill = name.partition("+")
    cls = backend_class(decode)
    reasons = cls.unsupported_reasons(decode_context(context) if prefill else context)
    of_prompts = backend_class(prefill).prefill_class() if prefill else None
    if prefill:
        reasons += two_part_unsupported_reasons(context, cls, of_prompts)
    if reasons:
        raise ValueError("; ".join(reasons))
    return cls(context) if of_prompts is None else TwoPartBackend(context, cls, of_prompts)


def measure(name: str, rig: Rig) -> LayerTime:
    try:
        backend = make(name, rig.context)
        backend.allocate()
        backend.schedule(rig.metadata)
        calls = rig.calls(backend, rig.metadata, slice(None))
        rig.out.fill_(float("nan"))
        calls[0]()
        rig.check([0, rig.cell.batch - 1, rig.cell.batch], rig.out[0])
        times = rig.time(calls, lambda: backend.schedule(rig.metadata))
        backend.close()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return LayerTime(reason=reason_of(error))
    return times


def alone(rig: Rig, decode: type[AttentionBackend]) -> dict[str, LayerTime]:
    """graphrt's decode kernel on the decodes, and FlashAttention 3 on the chunk, paged and packed."""
    assert rig.metadata.parts is not None, "made above"
    decodes = rig.metadata.parts[0]
    assert decodes is not None, "made above"
    backend = decode(decode_context(rig.context))
    backend.allocate()
    backend.schedule(decodes)
    calls = rig.calls(backend, decodes, slice(rig.cell.batch + 1))
    calls[0]()
    rig.check([0, rig.cell.batch - 1], rig.out[0, : rig.cell.batch + 1])
    found = {"decode": rig.time(calls, lambda: backend.schedule(decodes))}
    backend.close()
    if FlashAttention3Backend.unsupported_reasons(rig.context):
        return found
    module, spec, cell = FlashAttention3Backend.package.load(), rig.spec, rig.cell
    seen = cell.past + cell.chunk
    table = rig.table[-1:].to(rig.device)[:, : -(-seen // PAGE_SIZE)].contiguous()
    lens = torch.tensor([seen], dtype=torch.int32, device=rig.device)
    starts = torch.tensor([0, cell.chunk], dtype=torch.int32, device=rig.device)
    kv_starts = torch.tensor([0, seen], dtype=torch.int32, device=rig.device)
    packed = [
        torch.randn(2, seen, *layer.k_cache.shape[2:], device=rig.device, dtype=spec.dtype) for layer in rig.layers
    ]

    queries = rig.q[:, cell.batch :]
    paged = partial(
        module.flash_attn_with_kvcache, cache_seqlens=lens, page_table=table, cu_seqlens_q=starts,
        max_seqlen_q=cell.chunk, softmax_scale=spec.scale, causal=True,
    )  # fmt: skip
    contiguous = partial(
        module.flash_attn_varlen_func, cu_seqlens_q=starts, cu_seqlens_k=kv_starts, max_seqlen_q=cell.chunk,
        max_seqlen_k=seen, softmax_scale=spec.scale, causal=True,
    )  # fmt: skip
    calls = [partial(paged, q, at.k_cache, at.v_cache) for q, at in zip(queries, rig.layers, strict=True)]
    rig.check([cell.batch], calls[0]())
    found["chunk_paged"] = rig.time(calls, None)
    calls = [partial(contiguous, q, k, v) for q, (k, v) in zip(queries, packed, strict=True)]
    found["chunk_packed"] = rig.time(calls, None)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default=",".join(NAMES), help="comma-separated names")
    options = parse(parser)
    if unknown := sorted(set(options.only.split(",")) - set(NAMES)):
        parser.error(f"--only: expected some of {', '.join(NAMES)}, got {', '.join(unknown)}")
    device, on_cpu = torch.device(options.device), options.device == "cpu"
    spec = AttentionSpec(4, 2, 16, torch.float32) if on_cpu else AttentionSpec(32, 8, 128, torch.bfloat16)
    names = ["torch_reference", "torch_reference+torch_reference"] if on_cpu else options.only.split(",")
    results = []
    for cell in (TINY,) if on_cpu else CELLS:
        rig = Rig(cell, spec, device)
        apart = alone(rig, backend_class("torch_reference") if on_cpu else TritonBackend)
        parts = [time.us or 0.0 for name, time in apart.items() if name in ("decode", "chunk_paged")]
        alone_us = sum(parts) if len(parts) == 2 else None
        backends = {name: measure(name, rig) for name in names}
        times = {"backends": backends, "alone": apart}
        records = {what: {name: time.to_json() for name, time in of.items()} for what, of in times.items()}
        results.append({**asdict(cell), **records, "alone_us": alone_us})
        shown = {name: time.reason if time.us is None else round(time.us, 1) for name, time in backends.items()}
        print(f"{cell}: alone {alone_us and round(alone_us, 1)}, {shown}", flush=True)
        del rig
        if not on_cpu:
            torch.cuda.empty_cache()
    record = {
        "name": "mixed",
        **provenance(),
        "layers": LAYERS,
        "heads": [spec.num_q_heads, spec.num_kv_heads, spec.head_dim],
        "dtype": str(spec.dtype).removeprefix("torch."),
        "page_size": PAGE_SIZE,
        "alone": "FlashAttention 3 over pages",
        "cells": results,
    }
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
