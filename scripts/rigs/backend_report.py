"""Cells and results of the backend benchmark: times, cost per layer, and the printed table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from scripts.rigs.cells import LAYERS, Cell, uniform_cell

BATCHES, CONTEXTS = (1, 16, 64, 256), (512, 2048, 8192)


def make_cells(batches: Sequence[int] = BATCHES, contexts: Sequence[int] = CONTEXTS, **options: Any) -> list[Cell]:
    """Return a cell per batch and context. `options` are fields of Cell that describe the layer."""
    return [uniform_cell("backends", batch, context, **options) for batch in batches for context in contexts]


@dataclass(frozen=True, slots=True)
class BackendTime:
    """Times of one backend in one cell, in microseconds. `reason` tells why times are missing.

    host_us       host time per replay: plan_replay
    schedule_us   device time of `schedule`, once per step
    run_us        device time of `run`, once per layer; with 20th and 80th percentile
    """

    host_us: float | None = None
    schedule_us: float | None = None
    run_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    reason: str | None = None

    @property
    def device_us(self) -> float | None:
        """Return the device time of a layer with its share of the schedule."""
        return None if self.run_us is None else self.run_us + (self.schedule_us or 0.0) / LAYERS

    @property
    def us(self) -> float | None:
        """Return the ranked value: device time of a layer, plus its share of host work for which the device waits."""
        return None if self.device_us is None else self.device_us + (self.host_us or 0.0) / LAYERS

    def to_json(self) -> dict[str, Any]:
        return {
            "us": self.us,
            "device_us": self.device_us,
            **{key: value for key, value in asdict(self).items() if value is not None},
        }


@dataclass(frozen=True, slots=True)
class BackendResult:
    """All backends in one cell, by name."""

    cell: Cell
    times: dict[str, BackendTime]

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.cell.batch,
            "context": self.cell.longest,
            "kv_bytes": self.cell.kv_bytes,
            "backends": {name: time.to_json() for name, time in self.times.items()},
        }


def print_report(console: Console, results: Sequence[BackendResult]) -> None:
    """Print one line per cell and backend: host time per step, device times, cost per layer, ratio to the cheapest."""
    table = Table(title="backends, us", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for heading in ("host/step", "schedule/step", "run/layer", "p20 - p80", "all/layer", "ratio", "TB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        cheapest = min((us for time in result.times.values() if (us := time.us) is not None), default=None)
        for name, time in result.times.items():
            if time.us is None or cheapest is None:
                continue
            table.add_row(
                result.cell.name,
                name,
                f"{time.host_us or 0:.1f}",
                f"{time.schedule_us or 0:.1f}",
                f"{time.run_us:.2f}",
                f"{time.p20_us:.2f} - {time.p80_us:.2f}",
                f"{time.us:.2f}",
                f"{time.us / cheapest:.2f}",
                f"{result.cell.kv_bytes / (time.run_us or 1) / 1e6:.2f}",
            )
    console.print(table)
    for line in _reasons(results):
        console.print(line, highlight=False, soft_wrap=True)


def _reasons(results: Sequence[BackendResult]) -> list[str]:
    """Print why backends have no result, each reason once."""
    cells: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, time in result.times.items():
            if time.reason is not None:
                cells.setdefault((name, time.reason), []).append(result.cell.name)
    return [f"no figure of {name} for {', '.join(where)}: {reason}" for (name, reason), where in cells.items()]
