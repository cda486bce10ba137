"""Reports of the attention benchmark: tables of times and goals, and a plot of bandwidth by context length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from graphrt.kernels.errors import ConfigError
from scripts.rigs.attention_cells import PARTS
from scripts.rigs.attention_results import (
    OURS,
    PEERS,
    CellResult,
    Goal,
    ScheduleTime,
    SideTime,
    fits,
    geometric_means,
)

_COLOURS = {OURS: "tab:blue", "FA3": "tab:orange", "FlashInfer": "tab:green"}


def print_report(
    console: Console,
    results: Sequence[CellResult],
    schedules: Sequence[ScheduleTime],
    goals: Sequence[Goal],
    *,
    ceiling_tb_per_s: float,
) -> None:
    """Print a table per measured part, then means, fits and goals."""
    for part in PARTS:
        chosen = [r for r in results if r.cell.part == part]
        if chosen:
            console.print(_times_table(part, chosen, ceiling_tb_per_s))
            console.print(_method_table(part, chosen))
            console.print(_variants_table(part, chosen))
            for side in (OURS, *PEERS) if part == "varlen" else ():
                if (table := _ways_table(part, side, chosen)) is not None:
                    console.print(table)
            if (table := _back_to_back_table(chosen)) is not None:
                console.print(table)
            for line in _reasons(chosen):
                console.print(line, highlight=False)
    if schedules:
        console.print(_schedules_table(schedules))
    means = geometric_means(results)
    if means:
        shown = ", ".join(f"{part} {mean:.3f}" for part, mean in means.items())
        console.print(f"geometric means of the ratio to the best peer: {shown}", highlight=False)
    if fits(results):
        console.print(_fits_table(results))
    console.print(_goals_table(goals))


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _times_table(part: str, results: Sequence[CellResult], ceiling_tb_per_s: float) -> Table:
    varlen = part == "varlen"
    units = [f"{name} TFLOP/s" for name in (OURS, "FA3")] if varlen else ["TB/s", "of ceiling"]
    headings = ["KV MB", *(f"{side} us" for side in (OURS, *PEERS)), "ratio", *units]
    table = _table(f"{part}: us per call, with a layer's share of the device's schedule", headings)
    for result in results:
        bandwidth = result.tb_per_s(OURS)
        if varlen:
            last = [_number(result.tflop_per_s(side), 0) for side in (OURS, "FA3")]
        else:
            share = "-" if bandwidth is None else f"{bandwidth / ceiling_tb_per_s:.0%}"
            last = [_number(bandwidth, 2), share]
        table.add_row(
            result.cell.name,
            f"{result.cell.kv_bytes / 1e6:.1f}",
            *(_number(result.us(side), 1 if side in PEERS else 2) for side in (OURS, *PEERS)),
            _number(result.ratio, 3),
            *last,
        )
    return table


def _method_table(part: str, results: Sequence[CellResult]) -> Table:
    """Print the components of the times: a call with its spacer, the spacer alone, and the per-step work."""
    headings = ["spacer", *(f"{side} +" for side in (OURS, *PEERS)), "p20 - p80", "schedule", "FA3's", "plan"]
    title = f"{part}: as measured, us; +: with spacer; p20 - p80: {OURS}; plan: host time of FlashInfer"
    table = _table(title, headings)
    for result in results:
        ours, fa3, flashinfer = (result.sides.get(side, SideTime()) for side in (OURS, *PEERS))
        spread = "-" if ours.p20_us is None else f"{ours.p20_us:.1f} - {_number(ours.p80_us, 1)}"
        table.add_row(
            result.cell.name,
            _number(next((s.spacer_us for s in result.sides.values() if s.spacer_us is not None), None), 2),
            *(_number(side.spaced_us, 2) for side in (ours, fa3, flashinfer)),
            spread,
            _number(ours.schedule_us, 1),
            _number(fa3.schedule_us, 1),
            _number(flashinfer.plan_us, 0),
        )
    return table


def _variants_table(part: str, results: Sequence[CellResult]) -> Table:
    """Print the fastest variant of each side."""
    table = _table(f"{part}: as", (OURS, *PEERS))
    for result in results:
        table.add_row(result.cell.name, *(result.sides.get(side, SideTime()).variant or "-" for side in (OURS, *PEERS)))
    return table


def _ways_table(part: str, side: str, results: Sequence[CellResult]) -> Table | None:
    """Print the time of each variant, for sides with several variants."""
    timed = {r.cell.name: r.sides[side].ways or {} for r in results if side in r.sides}
    ways = list(dict.fromkeys(way for of_cell in timed.values() for way in of_cell))
    if not ways:
        return None
    table = _table(f"{part}: us of each way of {side}", ways)
    for name, of_cell in timed.items():
        table.add_row(name, *(_number(of_cell.get(way), 1) for way in ways))
    return table


def _back_to_back_table(results: Sequence[CellResult]) -> Table | None:
    """Print graphrt's times without spacers, if measured."""
    timed = [(r.cell.name, ours) for r in results if (ours := r.sides.get(OURS)) and ours.back_to_back_us is not None]
    if not timed:
        return None
    table = _table(f"{OURS} back to back, us: no spacer between calls", ["spaced", "back to back", "with PDL", "gain"])
    for name, ours in timed:
        plain, pdl = ours.back_to_back_us, ours.pdl_us
        gain = None if plain is None or pdl is None else plain - pdl
        table.add_row(name, *(_number(value, 2) for value in (ours.call_us, plain, pdl, gain)))
    return table


def _schedules_table(schedules: Sequence[ScheduleTime]) -> Table:
    by_mode: dict[str, dict[int, float]] = {}
    for schedule in schedules:
        by_mode.setdefault(schedule.mode, {})[schedule.rows] = schedule.us
    rows = sorted({schedule.rows for schedule in schedules})
    table = _table("the schedule alone, us, once per step", [f"{n} rows" for n in rows])
    for mode, times in by_mode.items():
        table.add_row(mode, *(_number(times.get(n), 2) for n in rows))
    return table


def _reasons(results: Sequence[CellResult]) -> list[str]:
    """Print why sides have no result, each reason once."""
    cells: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, side in result.sides.items():
            if side.reason is not None:
                cells.setdefault((name, side.reason), []).append(result.cell.name)
    return [f"no figure of {name} for {'; '.join(where)}: {reason}" for (name, reason), where in cells.items()]


def _fits_table(results: Sequence[CellResult]) -> Table:
    headings = [f"{side} {unit}" for side in (OURS, *PEERS) for unit in ("us", "TB/s")]
    table = _table("uniform: fit of us = fixed + bytes / bandwidth, by batch size", headings)
    for batch, by_side in fits(results).items():
        row = []
        for side in (OURS, *PEERS):
            fit = by_side.get(side)
            row += [_number(fit.fixed_us, 1), _number(fit.tb_per_s, 2)] if fit else ["-", "-"]
        table.add_row(str(batch), *row)
    return table


def _goals_table(goals: Sequence[Goal]) -> Table:
    table = _table("goals", ["bound", "measured", "met"])
    table.add_column("worst cell")
    for goal in goals:
        note = f"{len(goal.missing)} without a figure" if goal.missing else ""
        table.add_row(
            goal.name,
            f"{'>=' if goal.at_least else '<='} {goal.bound:g}",
            _number(goal.value, 3),
            {True: "yes", False: "NO", None: "unknown"}[goal.met],
            "; ".join(text for text in (goal.where, note) if text),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def plot(results: Sequence[CellResult], path: Path, *, ceiling_tb_per_s: float) -> None:
    """Plot bandwidth by context length for uniform cells, one panel per batch size with at least two lengths.

    Raises: ConfigError: without matplotlib, or without such cells.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f'matplotlib: expected the package for --plot, got none ({error}); run pip install "graphrt[plot]"'
        ) from error
    uniform = [r for r in results if r.cell.part == "uniform"]
    panels = list(fits(uniform))
    if not panels:
        raise ConfigError("plot: expected uniform cells, got none with a figure; measure the part 'uniform'")
    figure = Figure(figsize=(3.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for batch, axis in zip(panels, axes, strict=True):
        of_batch = sorted((r for r in uniform if r.cell.batch == batch), key=lambda r: max(r.cell.lengths))
        for side in (OURS, *PEERS):
            points = [(max(r.cell.lengths), t) for r in of_batch if (t := r.tb_per_s(side)) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=side, color=_COLOURS[side])
        axis.axhline(ceiling_tb_per_s, color="grey", linestyle="--", linewidth=1, label="read sweep")
        axis.set_xscale("log", base=2)
        axis.set_title(f"batch {batch}")
        axis.set_xlabel("context length")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("KV read, TB/s")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(path, dpi=150)
