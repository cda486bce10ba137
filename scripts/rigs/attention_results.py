"""Results of the attention benchmark: times of all sides, ratios, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from rich.console import Console

from scripts.rigs.attention_cells import PARTS
from scripts.rigs.cells import Cell
from scripts.rigs.measure import LayerTime, print_reasons, print_table

OURS = "graphrt"
PEERS = ("FA3", "FlashInfer")


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


def geometric_means(results: Sequence[CellResult]) -> dict[str, float]:
    """Return the mean ratio to the best peer by part, over cells where both have a result."""
    ratios = {part: [r.ratio for r in results if r.cell.part == part and r.ratio is not None] for part in PARTS}
    return {part: geometric_mean(known) for part, known in ratios.items() if known}


def _place(result: CellResult) -> str:
    return f"{result.cell.part} {result.cell.name}"


def print_report(console: Console, results: Sequence[CellResult], schedules: Sequence[ScheduleTime]) -> None:
    """Print times by part, schedules, and why times are missing. The JSON record has the rest."""
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
    print_reasons(console, [(_place(r), r.sides) for r in results])
