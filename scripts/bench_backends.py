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

import argparse
import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.registry import backend_class, backend_names
from graphrt.bench.environment import provenance
from graphrt.cli.console import make_console
from graphrt.kernels.errors import ConfigError, GraphRTError
from scripts.rigs.backend_report import BackendResult, BackendTime, make_cells, print_report
from scripts.rigs.backend_rig import KVStore, Rig, make_context, page_size_of
from scripts.rigs.cells import LAYERS, Cell

SAMPLES, QUICK_SAMPLES = 20, 5
TINY = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "kv_dtype": torch.float32}
TINY_CELLS = make_cells((1, 2), (8, 40), **TINY)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated backends; by default all that are known")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none; --device cpu is a dry run")
    return arguments


def choose(
    names: Sequence[str], cells: Sequence[Cell], device: torch.device
) -> tuple[dict[str, type[AttentionBackend]], dict[str, str]]:
    """Return the backends that can serve the cells, and the reasons against the others."""
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
    cls: type[AttentionBackend], cells: Sequence[Cell], store: KVStore, num_samples: int
) -> dict[Cell, BackendTime]:
    """Time one backend. A failing backend must not end the run of the others, but a device fault does: later results
    would be unreliable."""
    times: dict[Cell, BackendTime] = {}
    rig = None
    for cell in cells:
        try:
            rig = rig or Rig(cls, make_context(cls, cells, store.device), store)
            times[cell] = rig.measure(cell, num_samples)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            times[cell] = BackendTime(reason=" ".join(f"{type(error).__name__}: {error}".split())[:300])
            if rig is None:  # it cannot be built
                return dict.fromkeys(cells, times[cell])
    if rig is not None:
        rig.close()
    return times


def run(arguments: argparse.Namespace) -> None:
    start = time.perf_counter()
    console = make_console()
    device = torch.device(arguments.device)
    cells = make_cells() if device.type == "cuda" else TINY_CELLS
    names = arguments.only.split(",") if arguments.only else backend_names()
    backends, refused = choose(names, cells, device)
    for name, reason in refused.items():
        console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    if not backends:
        raise ConfigError("bench_backends: expected a backend that runs here, got none; install one, or name another")
    store = KVStore(device)
    too_large = store.reserve(cells, max(page_size_of(cls) for cls in backends.values()))
    fit = [cell for cell in cells if cell not in too_large]
    measured: dict[str, dict[Cell, BackendTime]] = {}
    for name, cls in backends.items():
        measured[name] = measure(cls, fit, store, QUICK_SAMPLES if arguments.quick else SAMPLES)
        console.print(f"{time.perf_counter() - start:6.1f} s  {name}", highlight=False)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results = []
    for cell in cells:
        missing = BackendTime(reason=too_large.get(cell))
        results.append(BackendResult(cell, {name: times.get(cell, missing) for name, times in measured.items()}))
    print_report(console, results)
    record: dict[str, Any] = {
        "name": "backends",
        **provenance(),
        "layers": LAYERS,
        "heads": [cells[0].num_q_heads, cells[0].num_kv_heads, cells[0].head_dim],
        "dtype": str(cells[0].kv_dtype).removeprefix("torch."),
        "page_sizes": {name: page_size_of(cls) for name, cls in backends.items()},
        "refused": refused,
        "seconds": round(time.perf_counter() - start, 1),
        "cells": [result.to_json() for result in results],
    }
    print(json.dumps(record), flush=True)


def main() -> None:
    try:
        run(parse())
    except GraphRTError as error:
        raise SystemExit(f"bench_backends: {error}") from error


if __name__ == "__main__":
    main()
