"""Results of the attention benchmark: ratios, the fit of single requests, goals, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
from rich.console import Console

from scripts.rigs.attention_cells import PARTS
from scripts.rigs.cells import Cell
from scripts.rigs.measure import LayerTime, print_reasons, print_table

OURS = "graphrt"
PEERS = ("FA3", "FlashInfer")

_LARGE_KV_BYTES = 256e6
_KV_BYTES_OF_SIZES = 128e6


@dataclass(frozen=True, slots=True)
class CellResult:
    """All sides of one cell, by name. Host times of plans are reported, but no ratio includes them."""

    cell: Cell
    sides: dict[str, LayerTime]

    def us(self, side: str) -> float | None:
        """Return the device time of the side, or None."""
        return self.sides[side].device_us if side in self.sides else None

    def tb_per_s(self, side: str) -> float | None:
        """Return KV bytes divided by the time of the side, in 10^12 bytes per second."""
        us = self.us(side)
        return None if us is None else self.cell.kv_bytes / us / 1e6

    @property
    def ratio(self) -> float | None:
        """Return graphrt's time divided by the best peer's: below 1 graphrt is faster. None if either is missing."""
        ours = self.us(OURS)
        best = min((us for peer in PEERS if (us := self.us(peer)) is not None), default=None)
        return None if ours is None or best is None else ours / best

    def to_json(self) -> dict[str, Any]:
        cell = self.cell
        record: dict[str, Any] = {
            "part": cell.part,
            "cell": cell.name,
            "batch": cell.batch,
            "longest": cell.longest,
            "tokens": sum(cell.lengths),
            "heads": [cell.num_q_heads, cell.num_kv_heads, *cell.head_dims],
            "page_size": cell.page_size,
            "layout": cell.layout.value,
            "kv_dtype": str(cell.kv_dtype).removeprefix("torch."),
            "kv_bytes": cell.kv_bytes,
            "ratio": self.ratio,
        }
        if cell.attention_chunk_size:
            record["attention_chunk_size"] = cell.attention_chunk_size
        if cell.query_len > 1:
            record |= {"query_len": cell.query_len, "flops": cell.flops}
        return record | {name: time.to_json() | {"us": time.device_us} for name, time in self.sides.items()}


@dataclass(frozen=True, slots=True)
class ScheduleTime:
    """Time of the schedule of a step, measured like an attention call.

    num_parts   work partitions per KV head
    """

    mode: str
    rows: int
    num_parts: int
    us: float


def fit_times(num_bytes: Sequence[int], times_us: Sequence[float]) -> tuple[float | None, float | None]:
    """Fit us = fixed + bytes / bandwidth, and return fixed us and TB/s. Both are None with fewer than two sizes.

    The fit minimises relative errors, so that short and long calls have equal weight. The bandwidth is None if times do
    not grow with bytes.
    """
    if len(set(num_bytes)) < 2:
        return None, None
    us_per_megabyte, fixed = np.polyfit(np.asarray(num_bytes) / 1e6, times_us, 1, w=1.0 / np.asarray(times_us))
    return float(fixed), 1.0 / float(us_per_megabyte) if us_per_megabyte > 0 else None


def geometric_means(results: Sequence[CellResult]) -> dict[str, float]:
    """Return the mean ratio to the best peer by part, over cells where both have a result."""
    ratios = {part: [r.ratio for r in results if r.cell.part == part and r.ratio is not None] for part in PARTS}
    return {part: geometric_mean(known) for part, known in ratios.items() if known}


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound, and the value of its worst cell.

    value   None: not measured
    met     None: not measured, or cells are missing and the others are within the bound
    """

    name: str
    bound: float
    at_least: bool
    value: float | None
    where: str = ""
    missing: tuple[str, ...] = ()

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        within = self.value >= self.bound if self.at_least else self.value <= self.bound
        return None if within and self.missing else within

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def goals(results: Sequence[CellResult], schedules: Sequence[ScheduleTime]) -> list[Goal]:
    """Return the goals of this benchmark, evaluated on the measured cells."""

    def of(*parts: str) -> list[CellResult]:
        return [r for r in results if r.cell.part in parts]

    def mean_goal(part: str, bound: float) -> Goal:
        missing = tuple(_place(r) for r in of(part) if r.ratio is None)
        return Goal(f"{part}: geometric mean of the ratios", bound, False, means.get(part), missing=missing)

    def worst_goal(name: str, bound: float, values: dict[str, float | None], *, at_least: bool = False) -> Goal:
        known = {place: value for place, value in values.items() if value is not None}
        missing = tuple(place for place in values if place not in known)
        if not known:
            return Goal(name, bound, at_least, None, missing=missing)
        where = (min if at_least else max)(known, key=lambda place: known[place])
        return Goal(name, bound, at_least, known[where], where, missing)

    means = geometric_means(results)
    ratios = {_place(r): r.ratio for r in of("uniform", "ragged")}
    budgets = {
        _place(r): None if (us := r.us(OURS)) is None else us / (5.0 + r.cell.kv_bytes / 4.45e6)
        for r in of("uniform", "ragged")
        if r.cell.batch > 1
    }
    single = [(r.cell.kv_bytes, us) for r in of("uniform") if r.cell.batch == 1 and (us := r.us(OURS)) is not None]
    fixed_us, tb_per_s = fit_times([size for size, _ in single], [us for _, us in single])
    large_fp8 = {_place(r): r.tb_per_s(OURS) for r in of("fp8") if r.cell.kv_bytes >= _LARGE_KV_BYTES}
    two_sizes = {
        _place(r): r.tb_per_s(OURS) for r in of("heads") if r.cell.v_head_dim and r.cell.kv_bytes >= _KV_BYTES_OF_SIZES
    }
    varlen = {_place(r): None if r.ratio is None else 1.0 / r.ratio for r in of("varlen")}
    of_256 = [s for s in schedules if s.rows == 256]
    decodes: dict[str, float | None] = {s.mode: s.us for s in of_256 if s.mode.startswith("decode")}
    mixed: dict[str, float | None] = {s.mode: s.us for s in of_256 if s.mode not in decodes}
    return [
        mean_goal("uniform", 0.83),
        mean_goal("ragged", 0.75),
        worst_goal("uniform and ragged: ratio of any cell", 1.02, ratios),
        worst_goal("B > 1: time over 5 us + bytes / 4.45 TB/s", 1.0, budgets),
        Goal("B = 1: fixed us of the fit", 5.0, False, fixed_us),
        Goal("B = 1: TB/s of the fit", 4.1, True, tb_per_s),
        worst_goal("fp8, KV >= 256 MB: TB/s", 3.8, large_fp8, at_least=True),
        mean_goal("shapes", 1.0),
        worst_goal("heads of 192 and 128, KV >= 128 MB: TB/s", 4.2, two_sizes, at_least=True),
        worst_goal("varlen: share of FA3's TFLOP/s", 0.75, varlen, at_least=True),
        worst_goal("schedule of 256 decode rows: us", 3.0, decodes),
        worst_goal("schedule of 256 rows of a mixed batch: us", 3.0, mixed),
    ]


def _place(result: CellResult) -> str:
    return f"{result.cell.part} {result.cell.name}"


def print_report(
    console: Console, results: Sequence[CellResult], schedules: Sequence[ScheduleTime], judged: Sequence[Goal]
) -> None:
    """Print times by part, schedules, goals, and why times are missing. The JSON record has the rest."""
    for part in PARTS:
        rows = [
            {
                "cell": r.cell.name,
                "KV MB": r.cell.kv_bytes / 1e6,
                **{f"{side} us": r.us(side) for side in (OURS, *PEERS)},
                "ratio": r.ratio,
                "TB/s": r.tb_per_s(OURS),
                **{side: r.sides[side].variant if side in r.sides else None for side in (OURS, *PEERS)},
            }
            for r in results
            if r.cell.part == part
        ]
        if rows:
            print_table(console, f"{part}: us per call, with a layer's share of the device's schedule", rows)
    print_table(
        console, "the schedule alone, once per step", [{"cell": f"{s.mode}, {s.rows}", "us": s.us} for s in schedules]
    )
    met = {True: "yes", False: "NO", None: "unknown"}
    print_table(
        console,
        "goals",
        [
            {
                "cell": goal.name,
                "bound": f"{'>=' if goal.at_least else '<='} {goal.bound:g}",
                "measured": goal.value,
                "met": met[goal.met],
                "worst": goal.where,
                "missing": len(goal.missing),
            }
            for goal in judged
        ],
    )
    print_reasons(console, [(_place(r), r.sides) for r in results])
