"""Host time per decode step, and how long the device waits for the host: three ways to submit the same model step.

    python scripts/bench_host.py
    python scripts/bench_host.py --shapes llama-3.2-1b --batches 1,256 --contexts 8192

session     rows live on the device: `DecodeSession.run(1)`, and `run(8)`, with `collect()` every 8 steps
stateless   `replay(batch)`, where every batch has the full tables of its rows; making the batch is a column of its own
copies      as small engines do it: a pinned tensor per field, filled with NumPy, a copy per field to static buffers,
            `CUDAGraph.replay` of the same model step, and a wait for the tokens. The model step is that of graphrt
            without its first two kernels and its last one

The host is timed while the device is idle: a step is submitted, timed, and waited for. A host that others share is
noisy, so the ways of a cell take turns, and each has the figures of its quietest round. Beside them stands the graph's
launch by itself, which is the driver's. Models have few layers and dummy weights, which the host does not see: as many
weights are guarded as the whole model has.

The device's gap is the interval of steps in a row less the time of the graph alone. Rows grow by a token a step, so the
graph is timed before and behind these steps, and the mean counts. The gap means most for a whole model, at the end:
Llama 3.2 1B with one row, alone and beside a thread that is busy with Python, as a server's event loop is.

The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from graphrt.batch import Batch
from graphrt.bench.environment import provenance
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import CudaGraph, make_recorder
from graphrt.config import RuntimeConfig
from graphrt.handle import StepHandle
from graphrt.kernels.types import KVLayout, RowStatus
from graphrt.launch import Launch
from graphrt.models.config import ModelConfig
from graphrt.models.dummy import fill_dummy_weights
from graphrt.models.llama import LlamaModel
from graphrt.models.shapes import shape_config
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session import DecodeSession

PAGE, LAYERS, ROUNDS = 16, 2, 3
COLLECT_EVERY = 8
GOALS_US = {"session": (15, 25), "stateless": (60, None)}
"""Median and 99th percentile of the host's time per step, at 256 rows; of batches with tables of 8,192 tokens."""


class Way(Protocol):
    """A way to submit steps of the same rows."""

    steps: int

    def prepare(self) -> None: ...

    def submit(self) -> None: ...

    def read(self) -> None:
        """What a loop does between two submissions, to have the tokens as early as it can."""

    def wait(self) -> None:
        """Until all has ended, and was read."""


class SessionWay:
    """Launches of `steps` steps, two of them in flight at most."""

    def __init__(self, runtime: Runtime, batch: int, context: int, steps: int = 1) -> None:
        self.steps, self._launches, self._session = steps, deque[Launch](), DecodeSession(runtime)
        self.collects: list[float] = []
        self._since = 0
        prompt = np.ones(context, np.int32)
        for _ in range(batch):
            row = self._session.add(prompt, SamplingParams(max_new_tokens=runtime.config.max_seq_len - context))
            # As if all but the last token of the prompt had been computed: what is in the cache makes no difference.
            self._session._prompts[row.row_id] = self._session._most[row.row_id] = context - 1
        self._session.run(1)
        self._session.collect(wait=True)

    def prepare(self) -> None:
        pass

    def submit(self) -> None:
        self._launches += self._session.run(self.steps)

    def read(self) -> None:
        if len(self._launches) > 1:
            self._launches.popleft().wait()
        self._collect()

    def wait(self) -> None:
        while self._launches:
            self._launches.popleft().wait()
        self._collect()

    def _collect(self) -> None:
        self._since += self.steps
        if self._since >= COLLECT_EVERY:
            start = time.perf_counter()
            self._session.collect()
            self.collects.append((time.perf_counter() - start) / self._since * 1e6)
            self._since = 0

    def close(self) -> None:
        self._session.close()


class StatelessWay:
    """Batches with the full tables of their rows."""

    steps = 1

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self._runtime, self._length = runtime, context - 1
        self._table = _table(runtime, batch)
        self._rows = np.arange(batch, dtype=np.int32)
        self._handles: deque[StepHandle] = deque()
        self._tokens: np.ndarray | None = np.ones(batch, np.int32)

    def prepare(self) -> None:
        n, listed = len(self._rows), self._length // PAGE + 1
        self._length += 1
        self._batch = Batch(
            row_ids=self._rows,
            seq_lens=np.full(n, self._length, np.int32),
            tokens=self._tokens,
            page_indptr=np.arange(0, n * listed + 1, listed, dtype=np.int32),
            page_ids=self._table[:, :listed].reshape(-1),
        )
        self._tokens = None

    def submit(self) -> None:
        self._handles.append(self._runtime.replay(self._batch))

    def read(self) -> None:
        if len(self._handles) > 1:
            self._handles.popleft().tokens()

    def wait(self) -> None:
        while self._handles:
            self._handles.popleft().tokens()

    def close(self) -> None:
        self._runtime.allocator.free(self._table.reshape(-1))


class CopiesWay:
    """A copy per field to the static buffers of a captured model step, whose tokens the host waits for."""

    steps = 1

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self._runtime, self._length, self._tokens = runtime, context - 1, np.ones(batch, np.int64)
        self._table = _table(runtime, batch)
        program, key = runtime.manager._program, BatchDescriptor.decode(batch)
        runtime.manager.reset()
        with torch.inference_mode():
            buffers = program.refresh(key).buffers  # of no rows; what is the same in each step is written here
            buffers.query_start_loc.copy_(torch.arange(batch + 1))
            for buffer in (buffers.row_ids, buffers.logits_indices):
                buffer.copy_(torch.arange(batch))
            buffers.row_status.fill_(int(RowStatus.SAMPLES))
            self._statics = {
                "input_ids": buffers.input_ids,
                "positions": buffers.positions,
                "slot_mapping": buffers.slot_mapping[0],
                "seq_lens": buffers.seq_lens,
                "block_table": buffers.block_table[0],
                "temperatures": buffers.temperatures,
            }
            self._out = torch.zeros(batch, dtype=torch.int64, device=runtime.device)

            def run() -> torch.Tensor:
                step = program.view(key)  # a new one for each call of the model
                program.backend.schedule(step.metadata)
                with program.model_layers.bound_to(step):
                    logits = program.model(step)
                assert program.sampler is not None, "a runtime with a sampler"
                self._out.copy_(program.sampler(logits, step))
                return logits

            self._recorder = make_recorder(runtime.device)
            with self._recorder.session():
                self._recorder.warm_up(run, lambda: program.backend.plan_capture(key))
                self._graph = self._recorder.record(run, key, lambda: program.backend.plan_capture(key))
        self._pinned = {name: _pinned_like(static) for name, static in self._statics.items()}
        self._host = {name: pinned.numpy() for name, pinned in self._pinned.items()}
        self._host_out = _pinned_like(self._out)
        raw = self._graph._graph if isinstance(self._graph, CudaGraph) else None
        self.replay: Callable[[], None] = self._graph.launch if raw is None else raw.replay

    def prepare(self) -> None:
        pass

    def submit(self) -> None:
        self._length += 1
        host, length = self._host, self._length
        host["input_ids"][:] = self._tokens
        host["positions"][:] = length - 1
        host["slot_mapping"][:] = self._table[:, (length - 1) // PAGE].astype(np.int64) * PAGE + (length - 1) % PAGE
        host["seq_lens"][:] = length
        pages = -(-length // PAGE)
        host["block_table"][:, :pages] = self._table[:, :pages]
        host["temperatures"][:] = 0
        for name, static in self._statics.items():
            static.copy_(self._pinned[name], non_blocking=True)
        self.replay()

    def read(self) -> None:
        self._host_out.copy_(self._out, non_blocking=True)
        _synchronize(self._runtime.device)
        self._tokens = self._host_out.numpy() % self._runtime.vocab_size

    wait = read

    def close(self) -> None:
        self._graph.close()
        self._recorder.close()
        self._runtime.manager.reset()
        self._runtime.allocator.free(self._table.reshape(-1))


def _table(runtime: Runtime, batch: int) -> np.ndarray:
    """Pages for the longest sequences, as a long-running allocator hands them out: [batch, pages] int32."""
    per_row = -(-runtime.config.max_seq_len // PAGE)
    pages = np.random.default_rng(0).permutation(runtime.allocator.allocate(batch * per_row))
    return pages.astype(np.int32).reshape(batch, per_row)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.device.type == "cuda"
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def host_times(way: Way, steps: int) -> dict[str, float]:
    """Microseconds of the host per step, the device idle at each submission; the first tenth warms up."""
    submits, prepares = [], []
    for _ in range(steps + steps // 10):
        start = time.perf_counter()
        way.prepare()
        ready = time.perf_counter()
        way.submit()
        end = time.perf_counter()
        way.wait()
        submits.append((end - ready) / way.steps * 1e6)
        prepares.append((ready - start) / way.steps * 1e6)
    times = submits[steps // 10 :]
    p50, p99 = np.percentile(times, [50, 99])
    return {"host_us": float(p50), "host_p99_us": float(p99), "prepare_us": float(np.median(prepares))}


def interval_us(way: Way, steps: int) -> float:
    """Microseconds per step of steps in a row, from an idle device until all tokens are read."""
    way.wait()
    start = time.perf_counter()
    for _ in range(steps):
        way.prepare()
        way.submit()
        way.read()
    way.wait()
    return (time.perf_counter() - start) / (steps * way.steps) * 1e6


def graph_us(way: Way, runtime: Runtime, rounds: int = 7, launches: int = 3) -> float | None:
    """Microseconds per step of the graph alone: launches that were queued while the device slept. None on a CPU."""
    if runtime.stream is None:
        return None
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        way.wait()
        torch.cuda._sleep(8_000_000)
        start.record(runtime.stream)
        for _ in range(launches):
            if isinstance(way, CopiesWay):
                way.replay()
            else:
                way.prepare()
                way.submit()
        end.record(runtime.stream)
        way.wait()
        found.append(start.elapsed_time(end) * 1e3 / (launches * way.steps))
    return float(np.median(found))


def gap_us(way: Way, runtime: Runtime, steps: int) -> dict[str, float | None]:
    """Microseconds per step of steps in a row, of the graph alone, and how much longer the former take."""
    before = graph_us(way, runtime)
    interval, after = interval_us(way, steps), graph_us(way, runtime)
    if before is None or after is None:
        return {"interval_us": interval, "graph_us": None, "gap_us": None}
    graph = (before + after) / 2
    return {"interval_us": interval, "graph_us": graph, "gap_us": interval - graph}


def measure_ways(makers: dict[str, Callable[[], Any]], runtime: Runtime, steps: int) -> dict[str, dict[str, Any]]:
    """Each way of submitting the steps of one cell, in rounds that take turns: the figures of its quietest round, and
    `median_us`, the median of the rounds."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in makers}
    for last in [False] * (ROUNDS - 1) + [True]:
        for name, make in makers.items():
            way = make()
            few = max(1, steps // way.steps)
            found: dict[str, Any] = dict(host_times(way, few))
            if last:
                found |= gap_us(way, runtime, few)
                if isinstance(way, SessionWay):
                    found["collect_us"] = float(np.median(way.collects))
            way.close()
            rounds[name].append(found)
    return {
        name: of[-1]
        | min(({key: one[key] for key in _OF_HOST} for one in of), key=lambda one: one["host_us"])
        | {"median_us": float(np.median([one["host_us"] for one in of]))}
        for name, of in rounds.items()
    }


_OF_HOST = ("host_us", "host_p99_us", "prepare_us")


def launch_us(runtime: Runtime, batch: int, launches: int) -> float | None:
    """Microseconds of the host for the launch of a size's graph, without anything that a step has beside it. The graph
    takes slots of steps that ran before, whose rows are forgotten behind it. None on a CPU."""
    if runtime.stream is None:
        return None
    graph, times = runtime.manager.graph(BatchDescriptor.decode(batch)), []
    for _ in range(launches):
        start = time.perf_counter()
        graph.launch()
        times.append(time.perf_counter() - start)
        _synchronize(runtime.device)
    runtime.manager.reset()
    return float(np.median(times)) * 1e6


def build(config: ModelConfig, device: torch.device, batches: tuple[int, ...], longest: int, layers: int) -> Runtime:
    """A captured runtime of a model with so many layers, which guards as many weights as the whole one has."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    few = replace(config, num_layers=layers, sliding_windows=config.sliding_windows[:layers])
    model = LlamaModel(few, dtype=dtype, device=device, max_positions=longest)
    fill_dummy_weights(model)
    copies = range(config.num_layers // layers)
    runtime = Runtime(
        model,
        few.attention_specs(dtype),
        few.kv_groups(PAGE, KVLayout.NHD, dtype),
        vocab_size=config.vocab_size,
        device=device,
        config=RuntimeConfig(
            max_num_reqs=max(batches),
            max_num_tokens=max(batches),
            max_seq_len=longest,
            decode_sizes=batches,
            loop_sizes=batches,
            mixed_sizes=(),
        ),
        num_pages=1 + max(batches) * -(-longest // PAGE),
        weights=[(f"{name} {copy}", weight) for copy in copies for name, weight in model.named_parameters()],
    )
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
    """Every batch and context of one shape."""
    cells: list[dict[str, Any]] = []
    for context in contexts:
        longest = context + 4 * steps + 500  # launches of 8 steps take the most
        with build(config, device, batches, longest, min(LAYERS, config.num_layers)) as runtime:
            for batch in batches:
                makers: dict[str, Callable[[], Any]] = {
                    "session": partial(SessionWay, runtime, batch, context),
                    "session_8": partial(SessionWay, runtime, batch, context, 8),
                    "stateless": partial(StatelessWay, runtime, batch, context),
                    "copies": partial(CopiesWay, runtime, batch, context),
                }
                cell: dict[str, Any] = {"shape": name, "batch": batch, "context": context}
                cell |= measure_ways(makers, runtime, steps) | {"launch_us": launch_us(runtime, batch, steps)}
                cells.append(cell)
                print(line(cell), flush=True)
    return cells


@contextlib.contextmanager
def busy_thread(busy: bool) -> Iterator[None]:
    """Python work in a second thread, as of a server's event loop that has no rest."""
    stop, payload = threading.Event(), {"tokens": list(range(200)), "text": "word " * 50}

    def work() -> None:
        while not stop.is_set():
            json.loads(json.dumps(payload))

    thread = threading.Thread(target=work)
    if busy:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if busy:
            thread.join()


def measure_whole(name: str, config: ModelConfig, device: torch.device, context: int, steps: int) -> dict[str, Any]:
    """A whole model with one row: the gap of every way, and tokens per second beside a busy thread."""
    with build(config, device, (1,), context + 4 * steps + 900, config.num_layers) as runtime:
        makers: dict[str, Callable[[], Any]] = {
            f"run({n})": lambda n=n: SessionWay(runtime, 1, context, n)  # type: ignore[misc]
            for n in (1, 8, 32)
        }
        makers |= {
            "stateless": lambda: StatelessWay(runtime, 1, context),
            "copies": lambda: CopiesWay(runtime, 1, context),
        }
        ways = {}
        for label, make in makers.items():
            way = make()
            few = max(1, steps // way.steps)
            interval_us(way, few)  # warms up
            found: dict[str, Any] = gap_us(way, runtime, few)
            found["tokens_per_s"] = 1e6 / found["interval_us"]
            with busy_thread(True):
                found["busy_tokens_per_s"] = 1e6 / interval_us(way, few)
            way.close()
            ways[label] = found
    return {"shape": name, "batch": 1, "context": context, "ways": ways}


def line(cell: dict[str, Any]) -> str:
    parts = [f"{cell['shape']:>14} {cell['batch']:4d} {cell['context']:6d}"]
    for way in ("session", "session_8", "stateless", "copies"):
        found = cell[way]
        gap = "" if found["gap_us"] is None else f"{found['gap_us']:7.1f}"
        parts.append(f"{found['host_us']:7.1f} {found['host_p99_us']:7.1f} {gap:>7}")
    launch = "" if cell["launch_us"] is None else f"{cell['launch_us']:6.1f}"
    parts.append(f"{launch:>6} {cell['session']['collect_us']:7.1f} {cell['stateless']['prepare_us']:6.1f}")
    return " |".join(parts)


def header() -> str:
    title = f"{'shape':>14} {'rows':>4} {'tokens':>6}"
    ways = [f"{way:>7} {'p99':>7} {'gap':>7}" for way in ("run(1)", "run(8)", "replay", "copies")]
    return "microseconds per step\n" + " |".join([title, *ways, f"{'launch':>7} {'collect':>7} {'batch':>6}"])


def goals(cells: list[dict[str, Any]]) -> list[str]:
    """The goals beside what was measured, where they are about."""
    lines = []
    for cell in cells:
        if cell["batch"] != 256:
            continue
        for way, (median, p99) in GOALS_US.items():
            found = cell[way]
            if way == "stateless" and cell["context"] != 8192:
                continue
            text = f"{way} {found['host_us']:.1f} us (goal {median})"
            if p99 is not None:
                text += f", p99 {found['host_p99_us']:.1f} us (goal {p99})"
            lines.append(f"{cell['shape']} 256 rows, {cell['context']} tokens: {text}")
    return lines


def whole_table(whole: dict[str, Any]) -> list[str]:
    lines = [f"{whole['shape']}, all layers, 1 row, {whole['context']} tokens: per token"]
    for way, found in whole["ways"].items():
        device = (
            "" if found["graph_us"] is None else f"graph {found['graph_us']:8.1f} us, gap {found['gap_us']:7.1f} us, "
        )
        lines.append(
            f"  {way:>9}: {device}{found['tokens_per_s']:8.0f} tokens/s; beside a busy thread "
            f"{found['busy_tokens_per_s']:8.0f}"
        )
    return lines


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.1-8b,llama-3.2-1b")
    parser.add_argument("--batches", type=_numbers, default=(1, 64, 256))
    parser.add_argument("--contexts", type=_numbers, default=(1024, 8192))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    device, cells = torch.device("cuda", 0), []
    print(header(), flush=True)
    for shape in options.shapes.split(","):
        cells += measure_cells(shape, shape_config(shape), device, options.batches, options.contexts, options.steps)
    whole = measure_whole("llama-3.2-1b", shape_config("llama-3.2-1b"), device, 1024, 4 * options.steps)
    print("\n".join([*goals(cells), *whole_table(whole)]), flush=True)
    print(json.dumps({"name": "host", "cells": cells, "whole": whole, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
