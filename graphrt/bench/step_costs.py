"""Costs of steps and graphs for `graphrt plan`, measured here, read from results of other commands, or assumed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from graphrt.bench.decode import DecodeLoop, kv_memory
from graphrt.bench.size_plan import Costs, Curve, StepCosts
from graphrt.bench.timer import synchronize
from graphrt.capture.descriptor import BatchDescriptor, GraphKind, default_mixed_sizes
from graphrt.capture.graph import GraphReport
from graphrt.config import RuntimeConfig
from graphrt.engine.traffic import read_lines
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import make_runtime
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession

MEASURED_STEPS, _ROUNDS = 10, 3
_NODE_MS = 0.02  # host time of a node in an eager step
_MIB = 1 << 20

# Llama 3.1 8B on one NVIDIA H200, context 1,024: docs/results/nvidia-h200, decode.json and capture.json.
_ASSUMED_GRAPH = Curve((0, 256), (4.6, 14.4))
_ASSUMED_NODES = 364
_ASSUMED_MEMORY = {  # milliseconds to capture a graph, its bytes, bytes of the pool per request or token
    GraphKind.DECODE: (23.0, 0.1 * _MIB, 108 / 256 * _MIB),
    GraphKind.MIXED: (46.0, 0.7 * _MIB, 372 / 2048 * _MIB),
}


def assumed_costs() -> tuple[Costs, str]:
    """Return a linear model of Llama 3.1 8B on an H200, and a sentence that describes it."""
    (first, last), (low, high) = _ASSUMED_GRAPH.sizes, _ASSUMED_GRAPH.ms
    source = (
        f"assumed, not measured: {low} ms + {(high - low) / (last - first):.3f} ms per token for a step, "
        f"{_ASSUMED_NODES * _NODE_MS:.1f} ms more if it is eager, and the graphs of llama-3.1-8b on an H200; measure "
        "with --shape or --model, or pass --measured"
    )
    return _costs(_ASSUMED_GRAPH, _ASSUMED_NODES, _ASSUMED_MEMORY), source


def read_costs(path: str | Path) -> tuple[Costs, str]:
    """Read costs from JSON lines of `graphrt bench decode` and `graphrt capture`, and return them with a sentence that
    states their origin.

    Step times are from `bench decode`; time and memory of graphs are from `capture`. Assumed values replace the costs
    of a missing result. Lines that are not JSON, such as the tables of these commands, are skipped.

    Raises: ConfigError: if the file cannot be read, or has no result or a damaged one.
    """
    graph, nodes, memory = _ASSUMED_GRAPH, _ASSUMED_NODES, _ASSUMED_MEMORY
    times, graphs = "assumed", "assumed"
    for number, line in enumerate(read_lines("--measured", path), 1):
        if not line.startswith("{"):
            continue
        try:
            record = json.loads(line)
            if record["name"] == "decode":
                points = {int(r["batch"]): float(r["replay_ms"]) for r in record["results"]}
                if len(points) < 2 or not all(0 < ms < inf for ms in points.values()):
                    raise ValueError("a plan needs the times of two batch sizes, each above 0")
                graph = Curve.of(points)
                nodes = int(record["nodes_per_graph"])
                times = f"{record['model']} on {record['device']}"
            elif record["name"] == "capture":
                memory = _memory([_report(of) for of in record["graphs"]])
                graphs = f"{record['model']} on {record['gpu'] or 'cpu'}"
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"--measured: line {number} is not a result of `graphrt bench decode` or `graphrt capture` "
                f"({error!r}); "
                "write their last lines to the file again"
            ) from error
    if times == graphs == "assumed":
        raise ConfigError(
            f"--measured: {str(path)!r:.200} has no result; write the last lines of `graphrt bench decode` and "
            "`graphrt capture` to it"
        )
    return _costs(graph, nodes, memory), f"step times: {times}; graphs: {graphs}"


def measure_costs(
    model: LlamaModel, *, rows: int, step_tokens: int, context: int, page_size: int = 16, backend: str | None = None
) -> Costs:
    """Capture a few sizes, and time their steps with graphs and eagerly.

    rows, step_tokens   largest decode and mixed size
    context             KV tokens of each request of a decode step, and the longest prompt of a mixed step

    Raises: ConfigError: if a size is invalid. CapacityError: if the KV cache exceeds free memory.
    """
    sizes = [n for n in (1 << i for i in range(rows.bit_length())) if n < rows]
    config = RuntimeConfig(
        max_num_reqs=rows,
        max_num_tokens=step_tokens,
        max_seq_len=context + MEASURED_STEPS,
        decode_sizes=(*sizes, rows),
        mixed_sizes=tuple(n for n in default_mixed_sizes(step_tokens) if n <= rows * context),
        backend=backend,
    )
    groups = model.config.kv_groups(page_size, KVLayout.NHD, model.dtype)
    pages, _ = kv_memory(groups, rows, 0, config.max_seq_len)
    curves = []
    with make_runtime(model, config, page_size=page_size, num_pages=pages) as runtime:
        runtime.capture()
        memory = _memory(runtime.stats().graphs)
        loops = {n: DecodeLoop(runtime, n, context, SamplingParams()) for n in config.decode_sizes or ()}
        for eager in (False, True):
            decode = {n: median(loop.step_seconds(MEASURED_STEPS, eager=eager)) for n, loop in loops.items()}
            mixed = {n: _mixed_seconds(runtime, n, context, eager=eager) for n in config.mixed_sizes or ()}
            seconds = {GraphKind.DECODE: decode, GraphKind.MIXED: mixed or decode}
            curves.append({kind: Curve.of({n: 1e3 * s for n, s in of.items()}) for kind, of in seconds.items()})
    graph, eagerly = curves
    return {kind: StepCosts(graph[kind], eagerly[kind], *memory[kind]) for kind in GraphKind}


def _mixed_seconds(runtime: Runtime, tokens: int, context: int, *, eager: bool) -> float:
    """Return the seconds of a step that computes prompts of up to `context` tokens, until their first tokens."""
    prompts = [[1] * min(context, tokens - at) for at in range(0, tokens, context)]
    rounds = []
    with DecodeSession(runtime) as session:
        for _ in range(1 + _ROUNDS):
            requests = [session.add(prompt, SamplingParams(1)) for prompt in prompts]
            synchronize(runtime.device)
            start = time.perf_counter()
            session.run(1, eager=eager)
            session.collect(wait=True)
            rounds.append(time.perf_counter() - start)
            for request in requests:
                session.release(request)
    return median(rounds[1:])  # the first round warms up


def _costs(graph: Curve, nodes: int, memory: dict[GraphKind, tuple[float, float, float]]) -> Costs:
    """Return costs in which both kinds have the step times of `graph`, and an eager step also takes host time."""
    eager = Curve(graph.sizes, tuple(ms + nodes * _NODE_MS for ms in graph.ms))
    return {kind: StepCosts(graph, eager, *memory[kind]) for kind in GraphKind}


def _memory(graphs: Sequence[GraphReport]) -> dict[GraphKind, tuple[float, float, float]]:
    """Return for each kind the milliseconds to capture a graph, its bytes, and pool bytes per request or token.

    The largest graph is captured first, and the others use its pool. If they enlarge the pool, their own bytes include
    the growth.
    """
    first = max(graphs, key=lambda graph: graph.descriptor.padded_tokens)
    found = {}
    for kind in GraphKind:
        own = [graph for graph in graphs if graph.descriptor.kind is kind] or graphs
        found[kind] = (
            1e3 * fmean(graph.seconds for graph in own),
            fmean(graph.driver_bytes + graph.pool_bytes * (graph is not first) for graph in own),
            first.pool_bytes / first.descriptor.padded_tokens,
        )
    return found


def _report(record: dict[str, Any]) -> GraphReport:
    """Return the report of a graph that `graphrt capture` printed."""
    if (size := re.match(r"(decode|mixed)\[([0-9]+)", record["size"])) is None:
        raise ValueError(f"size: {record['size']!r}")
    n = int(size[2])
    descriptor = BatchDescriptor.decode(n) if size[1] == "decode" else BatchDescriptor.mixed(n, n)
    fields = ("seconds", "pool_bytes", "driver_bytes", "nodes")
    return GraphReport(descriptor, *(record[name] for name in fields))
