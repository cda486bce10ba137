"""Host time per decode step, and idle time of the device: three ways to submit the same model step.

    python -m scripts.bench_host --shapes llama-3.2-1b --batches 1,256 --contexts 8192

session     requests live on the device: `DecodeSession.run(1)` and `run(8)`, with `collect()` every 8 steps
stateless   `replay(batch)` with the full block tables in every batch; creating the batch is a separate column
copies      as in small engines: one pinned tensor per field filled by NumPy, one copy per field to static buffers,
            `CUDAGraph.replay` of the same model step, and a wait for the tokens. The model step is that of graphrt
            without its first two kernels and its last one

Host time is measured in two ways:

idle        a step is submitted to an idle device and timed, then the host waits for it
steady      steps are submitted in bursts of `ring_depth` - 2 launches, like a server that runs ahead of its device. The
            first step of a burst is not counted. `copies` waits for each step, so its steady time equals its idle time

Models have few layers and dummy weights. Host times are those of the whole model, because the same number of weights is
guarded. `launch` is the driver's share: one launch of the graph of `copies`, with the driver call that the other ways
use.

The gap is the interval of consecutive steps minus the time of the graph alone. Sequences grow with each step, and so do
graph times. Therefore the graph is timed before and after the interval, and the mean is subtracted. The last part
measures the gap of a whole model, Llama 3.2 1B with one request. It runs alone, and with a second thread that is busy
with Python, like the event loop of a server.

Other programs may use the machine's cores, so the time of a step can double within a minute. Therefore all variants of
a cell alternate in short rounds, and each round starts with new requests.
`host_us` and `host_p99_us` are the median and the 99th percentile of the idle times in the quietest round of a variant,
the one with the lowest median. `steady_us` and `steady_p99_us` are the same for the steady times. `gap_us` is the
lowest of all rounds. `host_all_us`, `steady_all_us` and `gap_all_us` are medians over all rounds. `first_us`, the
column `pages`, is the fastest first launch of a round. In the first launch of a session every request gets pages, as in
one step of 256. The later timed launches of `run(1)` list none, with up to 100 steps in a round.

The last line of standard output is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from graphrt.bench.environment import provenance
from graphrt.config import RuntimeConfig
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_model, make_runtime
from graphrt.models.shapes import shape_config
from graphrt.runtime import Runtime, resolve_device
from scripts.rigs.host_ways import PAGE, CopiesWay, SessionWay, StatelessWay, Way
from scripts.rigs.measure import make_parser, parse

LAYERS, ROUNDS = 2, 3


def host_times(way: Way, steps: int) -> dict[str, float]:
    """Return host microseconds per step with an idle device at each submission. The first tenth is a warm-up."""
    submits, prepares, warm = [], [], max(1, steps // 10)
    for _ in range(steps + warm):
        start = time.perf_counter()
        way.prepare()
        ready = time.perf_counter()
        way.submit()
        end = time.perf_counter()
        way.wait()
        submits.append((end - ready) / way.steps * 1e6)
        prepares.append((ready - start) / way.steps * 1e6)
    p50, p99 = np.percentile(submits[warm:], [50, 99])
    prepare = float(np.median(prepares))
    return {"host_us": float(p50), "host_p99_us": float(p99), "prepare_us": prepare, "first_us": submits[0]}


def steady_times(way: Way, steps: int, in_flight: int) -> dict[str, float]:
    """Return host microseconds per step in bursts of up to `in_flight` launches. The first burst is a warm-up."""
    submits: list[float] = []
    for burst in range(1 + -(-steps // (in_flight - 1))):
        for place in range(in_flight):
            way.prepare()
            start = time.perf_counter()
            way.submit()
            took = time.perf_counter() - start
            if burst and place:
                submits.append(took / way.steps * 1e6)
        way.wait()
    p50, p99 = np.percentile(submits, [50, 99])
    return {"steady_us": float(p50), "steady_p99_us": float(p99)}


def interval_us(way: Way, steps: int) -> float:
    """Return microseconds per step of consecutive steps, from an idle device until all tokens are read."""
    way.wait()
    start = time.perf_counter()
    for _ in range(steps):
        way.prepare()
        way.submit()
        way.read()
    way.wait()
    return (time.perf_counter() - start) / (steps * way.steps) * 1e6


def graph_us(way: Way, runtime: Runtime) -> float | None:
    """Return microseconds per step of the graph alone: two launches queued on a stalled device. None on a CPU."""
    if runtime.stream is None:
        return None
    found = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        way.wait()
        torch.cuda._sleep(8_000_000)
        start.record(runtime.stream)
        for _ in range(2):
            if isinstance(way, CopiesWay):
                way.replay()
            else:
                way.prepare()
                way.submit()
        end.record(runtime.stream)
        way.wait()
        found.append(start.elapsed_time(end) * 1e3 / (2 * way.steps))
    return float(np.median(found))


def gap_times(way: Way, runtime: Runtime, steps: int) -> dict[str, float | None]:
    """The interval of steps, the graph time in the middle of the interval, and the gap between two graphs."""
    before = graph_us(way, runtime)
    interval = interval_us(way, steps)
    after = graph_us(way, runtime)
    if before is None or after is None:
        return {"interval_us": interval, "graph_us": None, "gap_us": None}
    graph = (before + after) / 2
    return {"interval_us": interval, "graph_us": graph, "gap_us": interval - graph}


def in_turns(
    makers: dict[str, Callable[[], Any]], measure: Callable[[Any], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Measurements of each variant per round. A variant is created, measured and closed before the next one."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in makers}
    for _ in range(ROUNDS):
        for name, make in makers.items():
            way = make()
            rounds[name].append(measure(way))
            way.close()
    return rounds


def measure_round(way: Any, runtime: Runtime, steps: int) -> dict[str, Any]:
    """Run one round of a variant. A round of multi-step launches has a quarter as many launches."""
    few = steps if way.steps == 1 else max(1, steps // 4)
    found: dict[str, Any] = dict(host_times(way, few))
    if isinstance(way, CopiesWay):
        found |= {"steady_us": found["host_us"], "steady_p99_us": found["host_p99_us"]}
    else:
        found |= steady_times(way, few, runtime.config.ring_depth - 2)
    found |= gap_times(way, runtime, max(1, few // 2))
    if isinstance(way, SessionWay):
        found["collect_us"] = float(np.median(way.collects))
    if isinstance(way, CopiesWay):
        found["launch_us"] = way.launch_us()
    return found


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the rounds of a variant as described in the module docstring."""
    found = min(rounds, key=lambda one: float(one["host_us"])) | lowest_gap(rounds)
    steady = min(rounds, key=lambda one: float(one["steady_us"]))
    found |= {name: steady[name] for name in ("steady_us", "steady_p99_us")}
    for name in ("host", "steady"):
        found[f"{name}_all_us"] = float(np.median([one[f"{name}_us"] for one in rounds]))
    found["first_us"] = min(one["first_us"] for one in rounds)
    return found


def lowest_gap(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return interval, graph time and gap of the round with the lowest gap, and the median gap. No gaps on a CPU."""
    if rounds[0]["gap_us"] is None:
        return {"interval_us": min(one["interval_us"] for one in rounds), "gap_all_us": None}
    best = min(rounds, key=lambda one: float(one["gap_us"]))
    found = {name: best[name] for name in ("interval_us", "graph_us", "gap_us")}
    return found | {"gap_all_us": float(np.median([one["gap_us"] for one in rounds]))}


def build(config: ModelConfig, device: torch.device, batches: tuple[int, ...], longest: int, layers: int) -> Runtime:
    """Return a captured runtime of a model with the given layers that guards as many weights as the whole model."""
    few = replace(config, num_layers=layers, sliding_windows=config.sliding_windows[:layers])
    model = load_model(few, device=device, max_positions=longest).model
    copies = range(config.num_layers // layers)
    most = max(batches)
    sizes = RuntimeConfig(most, most, longest, decode_sizes=batches, loop_sizes=batches, mixed_sizes=())
    weights = [(f"{name} {copy}", weight) for copy in copies for name, weight in model.named_parameters()]
    pages = 1 + most * -(-longest // PAGE)
    runtime = make_runtime(model, sizes, page_size=PAGE, num_pages=pages, weights=weights)
    runtime.capture()
    return runtime


def measure_cells(
    name: str,
    config: ModelConfig,
    device: torch.device,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    steps: int,
) -> list[dict[str, Any]]:
    """Measure every batch size and context of one shape."""
    cells: list[dict[str, Any]] = []
    for context in contexts:
        longest = context + 8 * steps + 400  # launches of 8 steps need the most
        with build(config, device, batches, longest, min(LAYERS, config.num_layers)) as runtime:
            for batch in batches:
                rounds = in_turns(
                    makers_of(runtime, batch, context, (1, 8)), lambda way: measure_round(way, runtime, steps)
                )
                cell: dict[str, Any] = {"shape": name, "batch": batch, "context": context}
                cell |= {way: summary(found) for way, found in rounds.items()}
                cells.append(cell)
                print(line(cell), flush=True)
    return cells


def makers_of(runtime: Runtime, batch: int, context: int, launches: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """Return the constructor of each variant, sessions with launches of the given numbers of steps."""
    makers: dict[str, Callable[[], Any]] = {
        "session" if steps == 1 else f"session_{steps}": partial(SessionWay, runtime, batch, context, steps)
        for steps in launches
    }
    makers["stateless"] = partial(StatelessWay, runtime, batch, context)
    makers["copies"] = partial(CopiesWay, runtime, batch, context)
    return makers


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Run Python work in a second thread, like a busy event loop of a server."""
    stop, payload = threading.Event(), {"tokens": list(range(200)), "text": "word " * 50}

    def work() -> None:
        while not stop.is_set():
            json.loads(json.dumps(payload))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_whole(name: str, config: ModelConfig, device: torch.device, context: int, steps: int) -> dict[str, Any]:
    """Measure a whole model with one request: gaps, and tokens per second alone and with a busy second thread."""
    with build(config, device, (1,), context + 3 * steps + 900, config.num_layers) as runtime:

        def measure(way: Any) -> dict[str, Any]:
            few = max(1, steps // way.steps)
            interval_us(way, max(1, few // 4))  # warms up
            found = gap_times(way, runtime, few)
            with busy_thread():
                found["busy_interval_us"] = interval_us(way, few)
            return found

        rounds = in_turns(makers_of(runtime, 1, context, (1, 8, 32)), measure)
    ways = {}
    for way, all_rounds in rounds.items():
        found = {"graph_us": None, "gap_us": None} | lowest_gap(all_rounds)
        found["tokens_per_s"] = 1e6 / min(one["interval_us"] for one in all_rounds)
        found["busy_tokens_per_s"] = 1e6 / min(one["busy_interval_us"] for one in all_rounds)
        ways[way] = found
    return {"shape": name, "batch": 1, "context": context, "ways": ways}


def line(cell: dict[str, Any]) -> str:
    parts = [f"{cell['shape']:>14} {cell['batch']:4d} {cell['context']:6d}"]
    for way in ("session", "session_8", "stateless", "copies"):
        found = cell[way]
        gap = "" if found["gap_us"] is None else f"{found['gap_us']:7.1f}"
        steady = "" if way == "copies" else f" {found['steady_us']:7.1f} {found['steady_p99_us']:7.1f}"
        parts.append(f"{found['host_us']:7.1f} {found['host_p99_us']:7.1f}{steady} {gap:>7}")
    session, launch = cell["session"], cell["copies"]["launch_us"]
    ours = f"{session['first_us']:7.1f} {session['collect_us']:7.1f} {cell['stateless']['prepare_us']:6.1f}"
    parts.append(f"{ours} {'' if launch is None else f'{launch:.1f}':>6}")
    return " |".join(parts)


def header() -> str:
    title = f"{'shape':>14} {'rows':>4} {'tokens':>6}"
    ways = [f"{way:>7} {'p99':>7} {'steady':>7} {'p99':>7} {'gap':>7}" for way in ("run(1)", "run(8)", "replay")]
    ways.append(f"{'copies':>7} {'p99':>7} {'gap':>7}")
    return "microseconds per step, of the quietest round\n" + " |".join(
        [title, *ways, f"{'pages':>7} {'collect':>7} {'batch':>6} {'launch':>6}"]
    )


def whole_table(whole: dict[str, Any]) -> list[str]:
    lines = [f"{whole['shape']}, all layers, 1 row, {whole['context']} tokens: per token"]
    for way, found in whole["ways"].items():
        device = (
            "" if found["graph_us"] is None else f"graph {found['graph_us']:8.1f} us, gap {found['gap_us']:7.1f} us, "
        )
        lines.append(
            f"  {way:>9}: {device}{found['tokens_per_s']:8.0f} tokens/s; with a busy thread "
            f"{found['busy_tokens_per_s']:8.0f}"
        )
    return lines


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default="llama-3.1-8b,llama-3.2-1b")
    parser.add_argument("--batches", type=_numbers, default=(1, 64, 256))
    parser.add_argument("--contexts", type=_numbers, default=(1024, 8192))
    parser.add_argument("--steps", type=int, default=80, help="of each way in a round")
    options = parse(parser)
    device, cells = resolve_device(options.device), []
    print(header(), flush=True)
    for shape in options.shapes.split(","):
        cells += measure_cells(shape, shape_config(shape), device, options.batches, options.contexts, options.steps)
    whole = measure_whole("llama-3.2-1b", shape_config("llama-3.2-1b"), device, 1024, 3 * options.steps)
    print("\n".join(whole_table(whole)), flush=True)
    print(json.dumps({"name": "host", "cells": cells, "whole": whole, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
