"""`graphrt bench serve`: build a model with dummy weights, run the benchmark, and print a table and a JSON line."""

from __future__ import annotations

import json

from rich.table import Table

from graphrt.bench.environment import provenance
from graphrt.bench.sampling import described
from graphrt.bench.serve import ServeReport, Workload, bench_serve
from graphrt.cli.console import make_console
from graphrt.cli.options import ServeOptions
from graphrt.cli.values import check_vocabulary, sampling_params
from graphrt.models.loading import load_model
from graphrt.models.shapes import shape_config
from graphrt.runtime import resolve_device


def run(options: ServeOptions) -> None:
    """Run the benchmark; the last line of standard output is one JSON object."""
    params = sampling_params(options)
    workload = Workload(options.requests, options.least, options.most, options.seed, params)
    device = resolve_device(options.device)
    loaded = load_model(shape_config(options.shape), device=device, max_positions=2 * options.most)
    check_vocabulary(params, loaded.config.vocab_size)
    report = bench_serve(
        options.shape,
        loaded.model,
        workload=workload,
        page_size=options.page_size,
        rows=options.rows,
        step_tokens=options.step_tokens,
        backend=options.backend,
    )
    if not options.json_only:
        _print(report)
    print(json.dumps({"name": "serve", **provenance(), **report.to_json()}), flush=True)


def _print(report: ServeReport) -> None:
    title = f"serve, {report.model} on {report.device}, backend {report.backend}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in (
        ("requests", f"{report.workload.requests}, up to {report.rows} concurrent"),
        ("sampling", described(report.workload.sampling)),
        ("tokens in, out", f"{report.prompt_tokens:,}, {report.output_tokens:,}"),
        ("seconds", f"{report.seconds:.2f}"),
        ("output tokens/s", f"{report.tokens_per_s:,.0f}"),
        ("requests/s", f"{report.requests_per_s:.1f}"),
        ("first token ms (p50, p99)", f"{report.ttft_ms_p50:.0f}, {report.ttft_ms_p99:.0f}"),
        ("ms per output token (p50, p99)", f"{report.tpot_ms_p50:.2f}, {report.tpot_ms_p99:.2f}"),
        ("steps, launches", f"{report.steps:,}, {report.launches:,}"),
        ("preemptions", f"{report.preemptions}"),
        ("device busy", f"{report.busy_share:.1%}"),
        ("of floor", f"{report.share_of_floor:.1%}"),
        *(("sizes", advice) for advice in report.advice),
    ):
        table.add_row(name, value)
    console = make_console()
    console.print(table)
    console.print(
        f"floor: bytes of weights per step and of KV per decoded token, over the measured read bandwidth of "
        f"{report.read_tb_s:.2f} TB/s; excludes prompt computation. Busy: measured by events around each launch",
        soft_wrap=True,
    )
