"""Decode attention of graphrt against FlashAttention 3 and FlashInfer, on one GPU, in one process.

    python -m scripts.bench_attention                                    # everything, with both peers
    python -m scripts.bench_attention --only uniform,ragged --quick
    python -m scripts.bench_attention --without-peers --plot bandwidth.png
    python -m scripts.bench_attention --device cpu --without-peers       # a dry run of tiny cells, times mean nothing

Every call runs inside a CUDA graph with its KV cache evicted from L2. A small kernel that depends on the call's output
runs between two calls; the time of a graph of only these kernels is subtracted. 1/32 of the per-step schedule on the
device is added, the share of one of 32 layers. FlashInfer plans on the host; that time is reported and not added. Each
output is checked before it is timed. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from graphrt.bench.environment import provenance
from graphrt.bench.timer import Call, Timing, measure_read_bandwidth, spaced_calls, spacer_calls, time_calls
from graphrt.cli.console import make_console
from graphrt.kernels.errors import GraphRTError
from scripts.rigs.attention_cells import PARTS, SCHEDULE, make_cells, shrink
from scripts.rigs.attention_inputs import Inputs, KVPool
from scripts.rigs.attention_peers import Fa3Side, FlashInferSide
from scripts.rigs.attention_report import plot, print_report
from scripts.rigs.attention_results import (
    OURS,
    PEERS,
    CellResult,
    ScheduleTime,
    SideTime,
    fits,
    geometric_means,
    goals,
)
from scripts.rigs.attention_schedule import make_schedules
from scripts.rigs.attention_sides import GraphrtSide, Prepared, Side, prepare_checked
from scripts.rigs.cells import SEED, Cell

SAMPLES, QUICK_SAMPLES = 30, 8


class Clock:
    """Times the calls of one cell, with and without spacers."""

    def __init__(self, inputs: Inputs, num_samples: int) -> None:
        self._device, self._num_samples = inputs.device, num_samples
        self.spacer_us = self.time(spacer_calls(list(inputs.q))).median_us

    def time(self, calls: Sequence[Call]) -> Timing:
        return time_calls(calls, device=self._device, num_samples=self._num_samples)

    def side(self, prepared: Prepared, *, back_to_back: bool) -> SideTime:
        spaced = self.time(spaced_calls(prepared.calls, self._device))
        schedule_us = None
        if prepared.schedule is not None:
            schedule_us = self.time(spaced_calls([prepared.schedule], self._device)).median_us - self.spacer_us
        return SideTime(
            variant=prepared.variant,
            call_us=spaced.median_us - self.spacer_us,
            p20_us=spaced.p20_us - self.spacer_us,
            p80_us=spaced.p80_us - self.spacer_us,
            spaced_us=spaced.median_us,
            spacer_us=self.spacer_us,
            schedule_us=schedule_us,
            plan_us=prepared.plan_us,
            back_to_back_us=self.time(prepared.calls).median_us if back_to_back else None,
            pdl_us=self.time(prepared.pdl_calls).median_us if back_to_back and prepared.pdl_calls else None,
        )


def measure(cell: Cell, sides: Sequence[Side], pool: KVPool, num_samples: int) -> CellResult:
    """Time all sides of a cell. The fastest variant represents a side."""
    inputs = Inputs.make(cell, pool)
    clock = Clock(inputs, num_samples)
    times: dict[str, SideTime] = {}
    for side in sides:
        every, reason = prepare_checked(side, cell, inputs)
        measured = [
            clock.side(prepared, back_to_back=side.name == OURS and cell.part == "uniform") for prepared in every
        ]
        times[side.name] = fastest(measured) if measured else SideTime(reason=reason)
    return CellResult(cell, times)


def fastest(measured: Sequence[SideTime]) -> SideTime:
    """Return the fastest variant of a side, with the times of all variants."""
    ways = {time.variant: time.us for time in measured if time.us is not None}
    return replace(min(measured, key=lambda t: t.us or 0.0), ways=ways if len(ways) > 1 else None)


def measure_schedules(device: torch.device, num_samples: int) -> list[ScheduleTime]:
    spacer = time_calls(spacer_calls([torch.zeros(1, device=device)]), device=device, num_samples=num_samples)
    times = []
    for case in make_schedules():
        calls = spaced_calls([case.call(device)], device)
        us = time_calls(calls, device=device, num_samples=num_samples).median_us - spacer.median_us
        times.append(ScheduleTime(case.mode, case.rows, case.plan(device).schedule.num_parts, us))
    return times


def progress_line(result: CellResult, seconds: float) -> str:
    shown = ", ".join(f"{name} {'-' if t.us is None else f'{t.us:.2f}'}" for name, t in result.sides.items())
    return f"{seconds:6.1f} s  {result.cell.part} {result.cell.name}: {shown} us"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ",".join((*PARTS, SCHEDULE))
    parser.add_argument("--only", default=every, help=f"comma-separated parts of {every}")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--without-peers", action="store_true", help="time graphrt alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--plot", type=Path, help="draw bandwidth by context length into this file")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.without_peers:
        parser.error("--device cpu: the peers need a GPU; pass --without-peers")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none; --device cpu --without-peers is a dry run")
    return arguments


def run(arguments: argparse.Namespace) -> None:
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
        sides += [Fa3Side(), FlashInferSide(device)]
    for side in sides:
        if isinstance(side, FlashInferSide):
            console.print(f"FlashInfer: modules compiled in {side.build(cells):.1f} s", highlight=False)
    ceiling = measure_read_bandwidth(device) / 1e12
    console.print(f"read-only sweep: {ceiling:.2f} TB/s", highlight=False)
    pool = KVPool(device)
    pool.reserve(cells)
    results = []
    for cell in cells:
        results.append(measure(cell, sides, pool, num_samples))
        console.print(progress_line(results[-1], time.perf_counter() - start), highlight=False)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    schedules = measure_schedules(device, num_samples) if SCHEDULE in parts else []
    judged = goals(results, schedules)
    print_report(console, results, schedules, judged, ceiling_tb_per_s=ceiling)
    record = {
        "name": "attention",
        **provenance(),
        "read_tb_per_s": ceiling,
        "seed": SEED,
        "sides": [OURS, *([] if arguments.without_peers else PEERS)],
        "seconds": round(time.perf_counter() - start, 1),
        "geometric_means": geometric_means(results),
        "fits": {batch: {side: asdict(f) for side, f in of.items()} for batch, of in fits(results).items()},
        "schedules": [asdict(schedule) for schedule in schedules],
        "goals": [goal.to_json() for goal in judged],
        "cells": [result.to_json() for result in results],
    }
    print(json.dumps(record), flush=True)
    if arguments.plot is not None:
        plot(results, arguments.plot, ceiling_tb_per_s=ceiling)


def main() -> None:
    try:
        run(parse())
    except GraphRTError as error:
        raise SystemExit(f"bench_attention: {error}") from error


if __name__ == "__main__":
    main()
