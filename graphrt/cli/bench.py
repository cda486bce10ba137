"""`graphrt bench decode`: builds the model, runs the benchmark, prints the table and the JSON line."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.table import Table

from graphrt.bench.decode import DecodeReport, bench_decode
from graphrt.bench.environment import provenance
from graphrt.cli.console import make_console
from graphrt.kernels.types import KVLayout
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model
from graphrt.runtime import resolve_device


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `graphrt bench decode`; one of shape and model is given."""

    shape: str | None
    model: str | None
    batches: tuple[int, ...]
    context: int
    steps: int
    page_size: int
    backend: str | None
    device: str | None
    json_only: bool


def run_bench(options: BenchOptions) -> None:
    """Run the benchmark; the last line of standard output is one JSON object."""
    device = resolve_device(options.device)
    source = options.model if options.model is not None else f"dummy:{options.shape}"
    loaded = load_model(source, device=device, max_positions=options.context + options.steps)
    dtype = loaded.model.dtype
    report = bench_decode(
        options.shape or source,
        loaded.model,
        loaded.config.attention_specs(dtype),
        loaded.config.kv_spec(options.page_size, KVLayout.NHD, dtype),
        vocab_size=loaded.config.vocab_size,
        weight_bytes=streamed_bytes(loaded.model),
        batches=options.batches,
        context=options.context,
        steps=options.steps,
        device=device,
        backend=options.backend,
    )
    if not options.json_only:
        _print(report)
    print(json.dumps({"name": "decode", **provenance(), **report.to_json()}), flush=True)


def streamed_bytes(model: LlamaModel) -> int:
    """Bytes of weights that every step reads: all but an embedding table that is only looked up."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    looked_up = model.embedding is not model.head
    return total - (model.embedding.numel() * model.embedding.element_size() if looked_up else 0)


def _print(report: DecodeReport) -> None:
    table = Table(title=f"decode, {report.model} on {report.device}, backend {report.backend}", title_justify="left")
    for heading in ("batch", "context", "floor ms", "replay ms", "of floor", "eager ms", "eager/replay", "host us"):
        table.add_column(heading, justify="right")
    for r in report.results:
        table.add_row(
            str(r.batch),
            str(r.context),
            f"{r.floor_ms:.3f}",
            f"{r.replay_ms:.3f} +- {r.replay_ms_spread / 2:.3f}",
            f"{r.share_of_floor:.0%}",
            f"{r.eager_ms:.3f}",
            f"{r.eager_ms / r.replay_ms:.2f}",
            f"{r.host_us:.0f}",
        )
    console = make_console()
    console.print(table)
    console.print(
        f"floor: weights and KV over the measured read bandwidth of {report.read_tb_s:.2f} TB/s; "
        f"{report.decode_graphs} graphs ({report.recorder}) captured in {report.capture_seconds:.2f} s, "
        f"{report.decode_mib_per_graph:.1f} MiB and {report.nodes_per_graph} nodes each",
        soft_wrap=True,
    )
