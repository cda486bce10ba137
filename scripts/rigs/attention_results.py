"""Results of the attention benchmark: times of each side, ratios, fits and goals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from scripts.rigs.attention_cells import PARTS
from scripts.rigs.cells import LAYERS, Cell

OURS = "graphrt"
PEERS = ("FA3", "FlashInfer")

_LARGE_KV_BYTES = 256e6
_KV_BYTES_OF_SIZES = 128e6


@dataclass(frozen=True, slots=True)
class SideTime:
    """Times of one side in one cell, in microseconds. `reason` tells why times are missing.

    call_us           one attention call between two spacers, minus the spacer; with 20th and 80th percentile
    spaced_us         call plus spacer, as measured
    spacer_us         a spacer alone, in a graph with the same number of spacers
    schedule_us       device time of the per-step schedule, shared by all layers, measured in the same way
    plan_us           host time of the per-step plan; not included in `us`
    back_to_back_us   calls without spacers
    pdl_us            the same, with programmatic dependent launch
    ways              time of each measured variant; this one is the fastest. None with a single variant
    """

    variant: str = ""
    call_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    spaced_us: float | None = None
    spacer_us: float | None = None
    schedule_us: float | None = None
    plan_us: float | None = None
    back_to_back_us: float | None = None
    pdl_us: float | None = None
    ways: dict[str, float] | None = None
    reason: str | None = None

    @property
    def us(self) -> float | None:
        """Return the compared time: a call plus its layer's share of the device schedule."""
        return None if self.call_us is None else self.call_us + (self.schedule_us or 0.0) / LAYERS


@dataclass(frozen=True, slots=True)
class CellResult:
    """All sides of one cell, by name."""

    cell: Cell
    sides: dict[str, SideTime]

    def us(self, side: str) -> float | None:
        """Return the time of the side, or None."""
        return self.sides[side].us if side in self.sides else None

    def tb_per_s(self, side: str) -> float | None:
        """Return KV bytes divided by the time of the side, in 10^12 bytes per second."""
        us = self.us(side)
        return None if us is None else self.cell.kv_bytes / us / 1e6

    def tflop_per_s(self, side: str) -> float | None:
        """Return operations divided by the time of the side, in 10^12 per second."""
        us = self.us(side)
        return None if us is None else self.cell.flops / us / 1e6

    @property
    def best_peer(self) -> str | None:
        """Return the fastest peer."""
        times = {peer: us for peer in PEERS if (us := self.us(peer)) is not None}
        return min(times, key=lambda peer: times[peer]) if times else None

    @property
    def ratio(self) -> float | None:
        """Return graphrt's time divided by the best peer's: below 1 graphrt is faster. None if either is missing."""
        ours, peer = self.us(OURS), self.best_peer
        best = None if peer is None else self.us(peer)
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
        for name, side in self.sides.items():
            known = {key: value for key, value in asdict(side).items() if value is not None and value != ""}
            record[name] = {"us": side.us, **known}
        return record


@dataclass(frozen=True, slots=True)
class ScheduleTime:
    """Time of the schedule of a step, measured like an attention call.

    num_parts   work partitions per KV head
    """

    mode: str
    rows: int
    num_parts: int
    us: float

    @property
    def is_decode(self) -> bool:
        return self.mode.startswith("decode")


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, or None of no values."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else None


@dataclass(frozen=True, slots=True)
class Fit:
    """The fit us = fixed_us + bytes / tb_per_s over the cells of one batch size. None: time does not grow with
    bytes."""

    fixed_us: float
    tb_per_s: float | None


def fit_times(num_bytes: Sequence[int], times_us: Sequence[float]) -> Fit | None:
    """Fit by least squares on relative errors, so that short and long calls have equal weight. None below two sizes."""
    if len(set(num_bytes)) < 2:
        return None
    times = np.asarray(times_us, dtype=np.float64)
    megabytes = np.asarray(num_bytes, dtype=np.float64) / 1e6
    columns = np.stack([1.0 / times, megabytes / times], axis=1)
    (fixed, us_per_megabyte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    return Fit(float(fixed), 1.0 / float(us_per_megabyte) if us_per_megabyte > 0 else None)


def fits(results: Sequence[CellResult]) -> dict[int, dict[str, Fit]]:
    """Return fits of the uniform cells by batch size and side, for at least two context lengths."""
    found: dict[int, dict[str, Fit]] = {}
    uniform = [r for r in results if r.cell.part == "uniform"]
    for batch in sorted({r.cell.batch for r in uniform}):
        for side in (OURS, *PEERS):
            points = [
                (r.cell.kv_bytes, us) for r in uniform if r.cell.batch == batch and (us := r.us(side)) is not None
            ]
            fit = fit_times([size for size, _ in points], [us for _, us in points])
            if fit is not None:
                found.setdefault(batch, {})[side] = fit
    return found


def geometric_means(results: Sequence[CellResult]) -> dict[str, float]:
    """Return the mean ratio to the best peer by part, over cells where both have a result."""
    means = {
        part: geometric_mean([r.ratio for r in results if r.cell.part == part and r.ratio is not None])
        for part in PARTS
    }
    return {part: mean for part, mean in means.items() if mean is not None}


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
    missing: tuple[str, ...] = field(default=())

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
        ratios = {_place(r): r.ratio for r in of(part)}
        value = geometric_mean([ratio for ratio in ratios.values() if ratio is not None])
        return Goal(f"{part}: geometric mean of the ratios", bound, False, value, missing=_missing(ratios))

    def worst_goal(name: str, bound: float, values: dict[str, float | None], *, at_least: bool = False) -> Goal:
        known = {place: value for place, value in values.items() if value is not None}
        if not known:
            return Goal(name, bound, at_least, None, missing=_missing(values))
        where = (min if at_least else max)(known, key=lambda place: known[place])
        return Goal(name, bound, at_least, known[where], where, _missing(values))

    ratios = {_place(r): r.ratio for r in of("uniform", "ragged")}
    budgets = {
        _place(r): None if (us := r.us(OURS)) is None else us / (5.0 + r.cell.kv_bytes / 4.45e6)
        for r in of("uniform", "ragged")
        if r.cell.batch > 1
    }
    single = fits(results).get(1, {}).get(OURS)
    large_fp8 = {_place(r): r.tb_per_s(OURS) for r in of("fp8") if r.cell.kv_bytes >= _LARGE_KV_BYTES}
    two_sizes = {
        _place(r): r.tb_per_s(OURS) for r in of("heads") if r.cell.v_head_dim and r.cell.kv_bytes >= _KV_BYTES_OF_SIZES
    }
    varlen = {_place(r): None if r.ratio is None else 1.0 / r.ratio for r in of("varlen")}
    of_256 = [s for s in schedules if s.rows == 256]
    decodes: dict[str, float | None] = {s.mode: s.us for s in of_256 if s.is_decode}
    mixed: dict[str, float | None] = {s.mode: s.us for s in of_256 if not s.is_decode}
    return [
        mean_goal("uniform", 0.83),
        mean_goal("ragged", 0.75),
        worst_goal("uniform and ragged: ratio of any cell", 1.02, ratios),
        worst_goal("B > 1: time over 5 us + bytes / 4.45 TB/s", 1.0, budgets),
        Goal("B = 1: fixed us of the fit", 5.0, False, single.fixed_us if single else None),
        Goal("B = 1: TB/s of the fit", 4.1, True, single.tb_per_s if single else None),
        worst_goal("fp8, KV >= 256 MB: TB/s", 3.8, large_fp8, at_least=True),
        mean_goal("shapes", 1.0),
        worst_goal("heads of 192 and 128, KV >= 128 MB: TB/s", 4.2, two_sizes, at_least=True),
        worst_goal("varlen: share of FA3's TFLOP/s", 0.75, varlen, at_least=True),
        worst_goal("schedule of 256 decode rows: us", 3.0, decodes),
        worst_goal("schedule of 256 rows of a mixed batch: us", 3.0, mixed),
    ]


def _place(result: CellResult) -> str:
    return f"{result.cell.part} {result.cell.name}"


def _missing(values: dict[str, float | None]) -> tuple[str, ...]:
    return tuple(place for place, value in values.items() if value is None)
