"""Decode attention of graphrt against FlashAttention 3 and FlashInfer, on one GPU, in one process.

    python -m scripts.bench_attention                                    # everything, with both peers
    python -m scripts.bench_attention --only uniform,ragged --quick
    python -m scripts.bench_attention --device cpu --without-peers       # dry run of tiny cells, times have no meaning

Every call runs inside a CUDA graph with its KV cache evicted from L2. A small kernel that depends on the call's output
runs between two calls; the time of a graph of only these kernels is subtracted. 1/32 of the time of the schedule on the
device is added, because 32 layers share it. FlashInfer plans on the host; its host time is reported but not added. Each
output is checked before it is timed. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from graphrt.bench.environment import provenance
from graphrt.bench.timer import measure_read_bandwidth
from graphrt.cli.console import make_console
from graphrt.kernels.errors import GraphRTError
from scripts.rigs.attention_cells import PARTS, SCHEDULE, make_cells, shrink
from scripts.rigs.attention_inputs import Inputs
from scripts.rigs.attention_peers import Fa3Side, FlashInferSide
from scripts.rigs.attention_results import (
    OURS,
    PEERS,
    CellResult,
    ScheduleTime,
    geometric_means,
    print_report,
)
from scripts.rigs.attention_schedule import make_schedules
from scripts.rigs.attention_sides import GraphrtSide, Side, prepare_checked
from scripts.rigs.cells import SEED, Cell
from scripts.rigs.measure import LayerTime, make_parser, parse, time_layers

SAMPLES, QUICK_SAMPLES = 30, 8


def measure(cell: Cell, sides: Sequence[Side], device: torch.device, num_samples: int) -> CellResult:
    """Time all sides of a cell. The fastest variant represents a side."""
    inputs = Inputs.make(cell, device)
    times: dict[str, LayerTime] = {}
    for side in sides:
        every, reason = prepare_checked(side, cell, inputs)
        measured = []
        for prepared in every:
            timed = time_layers(prepared.calls, prepared.schedule, inputs.q, num_samples)
            measured.append(replace(timed, variant=prepared.variant, host_us=prepared.plan_us))
        times[side.name] = fastest(measured) if measured else LayerTime(reason=reason)
    return CellResult(cell, times)


def fastest(measured: Sequence[LayerTime]) -> LayerTime:
    """Return the fastest variant of a side, with the times of all variants."""
    ways = {time.variant or "": time.device_us or 0.0 for time in measured}
    return replace(min(measured, key=lambda t: t.device_us or 0.0), ways=ways if len(ways) > 1 else None)


def measure_schedules(device: torch.device, num_samples: int) -> list[ScheduleTime]:
    times = []
    for case in make_schedules():
        us = time_layers([case.call(device)], None, torch.zeros(1, 1, device=device), num_samples).run_us
        assert us is not None, "it was timed"
        times.append(ScheduleTime(case.mode, case.rows, case.plan(device).schedule.num_partitions, us))
    return times


def progress_line(result: CellResult, seconds: float) -> str:
    times = {name: result.us(name) for name in result.sides}
    shown = ", ".join(f"{name} {'-' if us is None else f'{us:.2f}'}" for name, us in times.items())
    return f"{seconds:6.1f} s  {result.cell.part} {result.cell.name}: {shown} us"


def run(arguments: Namespace) -> None:
    start = time.perf_counter()
    console = make_console()
    device = torch.device(arguments.device)
    parts = arguments.only.split(",")
    cells = make_cells(part for part in parts if part != SCHEDULE)
    num_samples = QUICK_SAMPLES if arguments.quick else SAMPLES
    if device.type == "cpu":
        cells = [shrink(cell) for cell in cells]
    sides: list[Side] = [GraphrtSide()]
    if not arguments.without_peers:
        flashinfer = FlashInferSide(device)
        sides += [Fa3Side(), flashinfer]
        console.print(f"FlashInfer: modules compiled in {flashinfer.build(cells):.1f} s", highlight=False)
    ceiling = measure_read_bandwidth(device) / 1e12
    console.print(f"read-only sweep: {ceiling:.2f} TB/s", highlight=False)
    results = []
    for cell in cells:
        results.append(measure(cell, sides, device, num_samples))
        console.print(progress_line(results[-1], time.perf_counter() - start), highlight=False)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    schedules = measure_schedules(device, num_samples) if SCHEDULE in parts else []
    print_report(console, results, schedules)
    record = {
        "name": "attention",
        **provenance(),
        "read_tb_per_s": ceiling,
        "seed": SEED,
        "sides": [OURS, *([] if arguments.without_peers else PEERS)],
        "seconds": round(time.perf_counter() - start, 1),
        "geometric_means": geometric_means(results),
        "schedules": [asdict(schedule) for schedule in schedules],
        "cells": [result.to_json() for result in results],
    }
    print(json.dumps(record), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    every = ",".join((*PARTS, SCHEDULE))
    parser.add_argument("--only", default=every, help=f"comma-separated parts of {every}")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--without-peers", action="store_true", help="time graphrt alone")
    arguments = parse(parser)
    if arguments.device == "cpu" and not arguments.without_peers:
        parser.error("--device cpu: the peers need a GPU; pass --without-peers")
    try:
        run(arguments)
    except GraphRTError as error:
        raise SystemExit(f"bench_attention: {error}") from error


if __name__ == "__main__":
    main()
