"""Shared parts of the benchmarks: options, times of a layer, the check of a result, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from graphrt.bench.timer import Call, spaced_calls, spacer_calls, time_calls
from scripts.rigs.cells import LAYERS

TOLERANCE = 0.02
"""Relative error of a bfloat16 output."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of tiny cells")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options; exit with an error if the device is missing."""
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none; --device cpu is a dry run")
    return options


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Times of one implementation in one cell, in microseconds. `reason` tells why times are missing.

    run_us        device time of one layer, with 20th and 80th percentile
    schedule_us   device time of the schedule of a step, which all layers share
    host_us       host time of the plan of a step
    variant       the measured variant, if an implementation has several
    ways          `device_us` of each variant, of which `variant` is the fastest. None with a single variant
    """

    run_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    schedule_us: float | None = None
    host_us: float | None = None
    variant: str | None = None
    ways: dict[str, float] | None = None
    reason: str | None = None

    @property
    def device_us(self) -> float | None:
        """Return the device time of a layer with its share of the schedule."""
        return None if self.run_us is None else self.run_us + (self.schedule_us or 0.0) / LAYERS

    @property
    def us(self) -> float | None:
        """Return the device time of a layer, plus its share of host work for which the device waits."""
        return None if self.device_us is None else self.device_us + (self.host_us or 0.0) / LAYERS

    def to_json(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self).items() if value is not None}
        return {"us": self.us, "device_us": self.device_us, **known}


def time_layers(
    calls: Sequence[Call], schedule: Callable[[], object] | None, out: torch.Tensor, num_samples: int
) -> LayerTime:
    """Time a layer, and the schedule of a step.

    calls   one per layer; together they evict a layer's cache from L2 before its next run
    out     [layers, ...]  spacers between the calls read it, and their time is subtracted
    """
    device = out.device
    timed = partial(time_calls, device=device, num_samples=num_samples)

    def scheduled() -> torch.Tensor:
        assert schedule is not None, "called where there is one"
        schedule()
        return out

    spacer = timed(spacer_calls(list(out))).median_us
    run = timed(spaced_calls(calls, device))
    schedule_us = None
    if schedule is not None:
        schedule_us = max(0.0, timed(spaced_calls([scheduled], device)).median_us - spacer)
    return LayerTime(run.median_us - spacer, run.p20_us - spacer, run.p80_us - spacer, schedule_us)


def check_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    result: torch.Tensor,
    *,
    what: str,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare the output of one token with float32 attention.

    q        [num_q_heads, head_dim]
    k, v     [positions, num_kv_heads, head_dim]   all that the token sees; v may have a different head size
    result   [num_q_heads, v_head_dim]

    Raises: AssertionError: if the relative error exceeds the tolerance; the message names `what`.
    """
    logits = torch.einsum("hgd,shd->hgs", q.float().unflatten(0, (k.shape[1], -1)), k.float()) * softmax_scale
    expected = torch.einsum("hgs,shd->hgd", logits.softmax(-1), v.float()).flatten(0, 1)
    error = float((result.float() - expected).norm() / expected.norm())
    if not error <= tolerance:  # also False for NaN
        raise AssertionError(f"{what}: expected a relative error of at most {tolerance}, got {error:.3g}")


def reason_of(error: Exception) -> str:
    """Return the error on one line. Compilers state the cause at the end."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"


def print_table(console: Console, title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a line per row; the keys of the rows are the headings."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in rows[0] if rows else ():
        table.add_column(heading, justify="left" if heading in ("cell", "backend") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("-" if x is None else f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    console.print(table)


def print_reasons(console: Console, cells: Iterable[tuple[str, Mapping[str, LayerTime]]]) -> None:
    """Print why times are missing, each reason once. `cells` has the name and the times of each cell."""
    missing: dict[tuple[str, str], list[str]] = {}
    for cell, times in cells:
        for name, time in times.items():
            if time.reason is not None:
                missing.setdefault((name, time.reason), []).append(cell)
    for (name, reason), where in missing.items():
        console.print(f"no time of {name} for {', '.join(where)}: {reason}", highlight=False, soft_wrap=True)
