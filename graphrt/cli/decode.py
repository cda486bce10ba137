"""`graphrt bench decode`: build the model, run the benchmark, and print a table and a JSON line."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from rich.table import Table

from graphrt.bench.decode import DecodeReport, DecodeResult, DecodeWork, bench_decode
from graphrt.bench.decode_ranks import RankResult, bench_ranks
from graphrt.bench.decode_transformers import DYNAMIC, STATIC, BaselineTime, time_transformers
from graphrt.bench.environment import provenance
from graphrt.bench.sampling import described
from graphrt.bench.speculation import SpeculationResult, bench_speculation, longest_sequence
from graphrt.cli.console import make_console
from graphrt.cli.options import DecodeOptions
from graphrt.cli.values import check_vocabulary, draft_source, named_source, num_drafts, sampling_params
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.models.loading import load_draft_model, load_model
from graphrt.models.packages import require
from graphrt.runtime import resolve_device


def run(options: DecodeOptions) -> None:
    """Run the benchmark; the last line of standard output is one JSON object."""
    parts = [part.strip() for part in options.batch.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", part) for part in parts):
        raise ConfigError(
            f"--batch: expected comma-separated numbers >= 1, got {options.batch!r}; pass batch sizes such as 1,8,32"
        )
    source = named_source("bench decode", options.shape, options.model)
    if options.baseline not in (None, "transformers"):
        raise ConfigError(f"--baseline: expected transformers, got {options.baseline!r}; leave it out for no baseline")
    if options.baseline is not None:
        require("transformers", "for the baseline")
    params, num = sampling_params(options), num_drafts(options.speculate, options.drafts)
    drafter = draft_source(options.speculate)
    work = DecodeWork([int(part) for part in parts], options.context, options.steps, options.backend, params)
    device = resolve_device(options.device)
    longest = options.context + options.steps
    if num:
        longest = longest_sequence(options.context, options.steps, num)
    loaded = load_model(source, device=device, max_positions=longest)
    config, dtype = loaded.config, loaded.model.dtype
    check_vocabulary(params, config.vocab_size)
    draft = None if drafter is None else load_draft_model(drafter, loaded.model)
    groups = config.kv_groups(options.page_size, KVLayout.NHD, dtype)
    report = bench_decode(options.shape or str(options.model), loaded.model, groups, work)
    drafts: list[SpeculationResult] = []
    if num:
        drafts = bench_speculation(loaded.model, groups, work, num, draft)
    del loaded, draft  # free the memory for the baseline and the ranks
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    several: list[RankResult] = []
    if options.tp > 1:
        several = bench_ranks(
            report, source, options.tp, work, device=device, page_size=options.page_size, max_positions=longest
        )  # fmt: skip
    if options.baseline is not None:
        times = time_transformers(config, batches=work.batches, context=work.context, device=device, dtype=dtype)
        report = replace(report, baselines=tuple(times))
    if not options.json_only:
        _print(report, drafts, "prompt lookup" if options.speculate == "ngram" else options.speculate, several)
    record = {"name": "decode", **provenance(), **report.to_json(), "speculate": options.speculate}
    record["speculation"], record["ranks"] = [asdict(r) for r in drafts], [asdict(r) for r in several]
    print(json.dumps(record), flush=True)


def _print(
    report: DecodeReport, drafts: Sequence[SpeculationResult], source: str | None, several: Sequence[RankResult]
) -> None:
    console = make_console()
    how = described(report.sampling)
    title = f"decode, {report.model} on {report.device}, backend {report.backend}, {how}"
    table = Table(title=title, title_justify="left")
    headings = ["batch", "context", "floor ms", "graphrt ms", "of floor", "host us (p20 - p80)"]
    headings[5:5] = ["transformers ms (factor)", "compiled ms (factor)"] if report.baselines else []
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in report.results:
        shown = [_baseline(report.baseline(way, r.batch), r) for way in (DYNAMIC, STATIC)] if report.baselines else []
        table.add_row(
            str(r.batch),
            str(r.context),
            f"{r.floor_ms:.3f}",
            f"{r.replay_ms:.3f} +- {r.replay_ms_spread / 2:.3f}",
            f"{r.share_of_floor:.0%}",
            *shown,
            f"{r.host_us:.0f} ({r.host_us_p20:.0f} - {r.host_us_p80:.0f})",
        )
    console.print(table)
    for s in drafts:
        console.print(
            f"batch {s.batch}, {s.num_drafts} drafts by {source}, ms per token: {s.plain_ms:.3f} without drafts, "
            f"{s.accepted_ms:.3f} with all accepted ({s.accepted_ms / s.plain_ms:.2f} x), "
            f"{s.rejected_ms:.3f} with none ({s.rejected_ms / s.plain_ms:.2f} x)",
            soft_wrap=True,
        )
    for of in several:
        console.print(
            f"batch {of.batch}, {of.ranks} ranks: {of.replay_ms:.3f} ms ({of.replay_ratio:.2f} x one rank, "
            f"{of.share_of_floor:.0%} of the floor), host {of.host_us:.0f} us ({of.host_ratio:.2f} x)",
            soft_wrap=True,
        )
    for time in report.baselines:
        if time.reason is not None:
            console.print(f"transformers, {time.way}, batch {time.batch}: {time.reason}", highlight=False, markup=False)
    console.print(
        f"floor: weights and KV over the measured read bandwidth of {report.read_tb_s:.2f} TB/s; "
        f"{report.decode_graphs} graphs ({report.recorder}) captured in {report.capture_seconds:.2f} s, "
        f"{report.decode_mib_per_graph:.1f} MiB and {report.nodes_per_graph} nodes each",
        soft_wrap=True,
    )


def _baseline(time: BaselineTime | None, ours: DecodeResult) -> str:
    return "-" if time is None or time.ms is None else f"{time.ms:.3f} ({time.ms / ours.replay_ms:.2f} x)"
