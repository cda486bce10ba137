"""Cost of every available attention backend per decode step: host time, and device time per layer.

    python -m scripts.bench_backends                            # all backends: the input of the registry's ranking
    python -m scripts.bench_backends --only triton,flash_attn3 --quick
    python -m scripts.bench_backends --device cpu --quick       # dry run of tiny cells, times have no meaning

Backends are driven through their contract only, so backends of other packages are measured like graphrt's own. Host
time is the time of `plan_replay`. Device times are measured inside graph replays with a cold L2; the time of a small
kernel between two calls is subtracted. The cost of a layer is its `run` plus 1/32 of the schedule and of the host time,
which 32 layers share. Each result is checked before it is timed. The last line of standard output is one JSON object.
scripts/make_docs.py generates the registry's table from a committed result.
"""

from __future__ import annotations

import gc
import json
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.registry import backend_class, backend_names
from graphrt.bench.environment import provenance
from graphrt.cli.console import make_console
from graphrt.kernels.errors import ConfigError, GraphRTError
from scripts.rigs.backend_rig import Rig, make_context, page_size_of
from scripts.rigs.cells import LAYERS, Cell, uniform_cell
from scripts.rigs.measure import LayerTime, make_parser, parse, print_reasons, print_table, reason_of

SAMPLES, QUICK_SAMPLES = 20, 5
CELLS = [uniform_cell("backends", batch, context) for batch in (1, 16, 64, 256) for context in (512, 2048, 8192)]
TINY = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "kv_dtype": torch.float32}
TINY_CELLS = [uniform_cell("backends", batch, context, **TINY) for batch in (1, 2) for context in (8, 40)]


def choose(
    names: Sequence[str], cells: Sequence[Cell], device: torch.device
) -> tuple[dict[str, type[AttentionBackend]], dict[str, str]]:
    """Return the backends that can serve the cells, and the reasons why the others cannot."""
    chosen, refused = {}, {}
    for name in names:
        try:
            cls = backend_class(name)
        except ConfigError as error:
            if name not in backend_names():
                raise
            refused[name] = str(error)
            continue
        reasons = cls.unsupported_reasons(make_context(cls, cells, device))
        if reasons:
            refused[name] = "; ".join(reasons)
        else:
            chosen[name] = cls
    return chosen, refused


def measure(
    cls: type[AttentionBackend], cells: Sequence[Cell], device: torch.device, num_samples: int
) -> dict[Cell, LayerTime]:
    """Time one backend. Its failure does not end the run. A device fault does, because later results would be
    unreliable."""
    times: dict[Cell, LayerTime] = {}
    rig = None
    for cell in cells:
        try:
            rig = rig or Rig(cls, make_context(cls, cells, device))
            times[cell] = rig.measure(cell, num_samples)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            times[cell] = LayerTime(reason=reason_of(error))
            if rig is None:  # the backend cannot be built
                return dict.fromkeys(cells, times[cell])
    if rig is not None:
        rig.close()
    return times


def run(arguments: Namespace) -> None:
    start = time.perf_counter()
    console = make_console()
    device = torch.device(arguments.device)
    cells = CELLS if device.type == "cuda" else TINY_CELLS
    names = arguments.only.split(",") if arguments.only else backend_names()
    backends, refused = choose(names, cells, device)
    for name, reason in refused.items():
        console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    if not backends:
        raise ConfigError("bench_backends: no backend can run here; install one, or name others with --only")
    measured: dict[str, dict[Cell, LayerTime]] = {}
    for name, cls in backends.items():
        measured[name] = measure(cls, cells, device, QUICK_SAMPLES if arguments.quick else SAMPLES)
        console.print(f"{time.perf_counter() - start:6.1f} s  {name}", highlight=False)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results = [(cell, {name: times[cell] for name, times in measured.items()}) for cell in cells]
    rows = [
        {
            "cell": cell.name,
            "backend": name,
            "host/step": timed.host_us,
            "schedule/step": timed.schedule_us,
            "run/layer": timed.run_us,
            "p20": timed.p20_us,
            "p80": timed.p80_us,
            "all/layer": timed.us,
        }
        for cell, times in results
        for name, timed in times.items()
        if timed.us is not None
    ]
    print_table(console, "backends, us", rows)
    print_reasons(console, [(cell.name, times) for cell, times in results])
    record: dict[str, Any] = {
        "name": "backends",
        **provenance(),
        "layers": LAYERS,
        "heads": [cells[0].num_q_heads, cells[0].num_kv_heads, cells[0].head_dim],
        "dtype": str(cells[0].kv_dtype).removeprefix("torch."),
        "page_sizes": {name: page_size_of(cls) for name, cls in backends.items()},
        "refused": refused,
        "seconds": round(time.perf_counter() - start, 1),
        "cells": [
            {
                "batch": cell.batch,
                "context": cell.longest,
                "kv_bytes": cell.kv_bytes,
                "backends": {name: timed.to_json() for name, timed in times.items()},
            }
            for cell, times in results
        ],
    }
    print(json.dumps(record), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", help="comma-separated backends (default: all known backends)")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    try:
        run(parse(parser))
    except GraphRTError as error:
        raise SystemExit(f"bench_backends: {error}") from error


if __name__ == "__main__":
    main()
