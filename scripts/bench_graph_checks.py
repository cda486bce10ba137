"""Cost of the graph checks: the audit of a graph, `verify`, and shadow steps on a busy device.

    python -m scripts.bench_graph_checks          # Llama 3.2 1B, 32 and 256 requests, a shadow every 256 launches
    python -m scripts.bench_graph_checks --shape llama-3.1-8b --rows 256 --every 64

Audits are timed in parts: the walk over the graph, the memory map, and the check of each address. A graph of over 600
nodes is audited too: a model of the same shape with `--deep` layers. `verify_runtime` is timed as a whole, including
copies of the KV cache, over eight generated batches.

Shadow steps are measured with two runtimes of the same weights, one with shadow steps and one without. Rounds of
`--steps` steps alternate. The cost of shadows is the relative difference of the times.

The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from graphrt.bench.environment import provenance
from graphrt.capture.inspect.audit import audit
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.config import RuntimeConfig
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import load_model, make_runtime
from graphrt.models.shapes import shape_config
from graphrt.runtime import Runtime, resolve_device
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.testing.verify.runtime import verify_runtime
from scripts.rigs.measure import make_parser, parse

CONTEXT = 512  # tokens of each request before the first timed step, and the longest sequence that is verified
MIXES = 8
LATER = 3  # verifications after the first one, which loads kernels


def capture(model: LlamaModel, rows: int, longest: int, every: int = 0) -> Runtime:
    """Return a captured runtime of one decode size, with or without shadow steps."""
    config = RuntimeConfig(
        max_num_reqs=rows, max_num_tokens=max(rows, 2048), max_seq_len=longest, decode_sizes=(rows,), shadow_every=every
    )
    runtime = make_runtime(model, config, num_pages=1 + rows * -(-longest // 16))
    runtime.capture()
    return runtime


def make_session(runtime: Runtime, rows: int, context: int) -> DecodeSession:
    """Requests that have `context` tokens and continue to the maximum length."""
    session, rng = DecodeSession(runtime), np.random.default_rng(0)
    most = runtime.config.max_seq_len - context
    for _ in range(rows):
        prompt = rng.integers(0, runtime.vocab_size, context).tolist()
        session.add(prompt, SamplingParams(max_new_tokens=most, temperature=0.6))
    while any(not row.tokens for row in session.requests):
        session.run(1)
        session.collect(wait=True)
    return session


def timed(call: Callable[[], object], repeats: int) -> float:
    """Return the median host milliseconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds) * 1e3


def bench_audit(runtime: Runtime) -> dict[str, Any]:
    """Return the milliseconds to walk the graph of the single decode size, to map memory, and to audit."""
    manager = runtime.manager
    size = manager.descriptors[-1]
    graph, memory = manager.graph(size), manager.memory_map(size)
    view = inspect_graph(graph)
    found: dict[str, Any] = {
        "size": str(size),
        "nodes": view.num_nodes,
        "regions": len(memory.regions),
        "walk_ms": timed(lambda: inspect_graph(graph), 10),
        "map_ms": timed(lambda: manager.memory_map(size), 10),
        "audit_ms": timed(lambda: audit(view, memory), 10),
        "whole_ms": timed(lambda: manager.audit(size), 10),
        "findings": [str(finding) for finding in manager.audit(size).findings],
    }
    print(
        f"{found['size']}: audit of {found['nodes']} nodes {found['whole_ms']:.1f} ms (graph walk "
        f"{found['walk_ms']:.1f}, memory map of {found['regions']} regions {found['map_ms']:.1f}, check of addresses "
        f"{found['audit_ms']:.1f}); {len(found['findings'])} findings",
        flush=True,
    )
    return found


def bench_verify(runtime: Runtime, model: LlamaModel, mixes: int) -> dict[str, Any]:
    """Return the seconds to verify the captured graphs: the first call, and the median of later calls."""
    seconds, findings = [], []
    for _ in range(1 + LATER):
        start = time.perf_counter()
        report = verify_runtime(runtime.manager, model=model, count=mixes)
        seconds.append(time.perf_counter() - start)
        findings += [str(finding) for finding in report.findings]
    return {
        "rows": runtime.config.max_num_reqs,
        "mixes": mixes,
        "cache_bytes": runtime.kv_cache.nbytes,
        "replays": report.replays,
        "eager_runs": report.eager_runs,
        "first_seconds": seconds[0],
        "seconds": median(seconds[1:]),
        "later_seconds": seconds[1:],
        "findings": findings,
    }


def bench_shadow(model: LlamaModel, rows: int, every: int, steps: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds per step with shadow steps and without."""
    context = min(CONTEXT, model.config.max_position_embeddings // 4)
    longest = context + steps * (rounds + 1) + 2
    runtimes = [capture(model, rows, longest, n) for n in (0, every)]
    sessions = [make_session(runtime, rows, context) for runtime in runtimes]
    times: list[list[float]] = [[], []]
    for index in range(rounds + 1):
        for session, seconds in zip(sessions, times, strict=True):
            start = time.perf_counter()
            for _ in range(steps):
                session.run(1)
            session.collect(wait=True)
            if index:  # the first one warms up
                seconds.append(time.perf_counter() - start)
    stats = runtimes[1].stats()
    plain, shadowed = (median(seconds) / steps * 1e3 for seconds in times)
    for session, runtime in zip(sessions, runtimes, strict=True):
        session.close()
        runtime.close()
    return {
        "rows": rows,
        "every": every,
        "steps": steps,
        "shadow_steps": stats.shadow_steps,
        "differences": [str(difference) for difference in stats.shadow_differences],
        "step_ms": plain,
        "shadowed_step_ms": shadowed,
        "share": shadowed / plain - 1,
        "ms_per_shadow": (shadowed - plain) * every,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--rows", default="32,256", help="comma-separated")
    parser.add_argument("--every", type=int, default=256, help="launches per shadow step")
    parser.add_argument("--steps", type=int, default=512, help="steps per round; a multiple of --every")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deep", type=int, default=64, help="layers of the model with the long graph")
    arguments = parse(parser)
    if arguments.every < 1 or arguments.steps < 1 or arguments.steps % arguments.every or arguments.rounds < 1:
        parser.error("--steps must be a multiple of --every, and --every, --steps and --rounds at least 1")
    device = resolve_device(arguments.device)
    shape = shape_config(arguments.shape)
    positions = min(shape.max_position_embeddings, 1 << 14)
    model = load_model(shape, device=device, max_positions=positions).model
    results: dict[str, Any] = {"shape": arguments.shape, "audits": [], "verifies": [], "shadows": []}
    for rows in map(int, arguments.rows.split(",")):
        with capture(model, rows, CONTEXT) as runtime:
            results["audits"].append(bench_audit(runtime))
            verified = bench_verify(runtime, model, MIXES)
        results["verifies"].append(verified)
        print(
            f"{rows} rows: {MIXES} batches verified in {verified['seconds']:.2f} s (first call "
            f"{verified['first_seconds']:.2f}) by {verified['replays']} replays and {verified['eager_runs']} eager "
            f"runs over {verified['cache_bytes'] >> 20} MiB of cache; {len(verified['findings'])} findings",
            flush=True,
        )
        shadow = bench_shadow(model, rows, arguments.every, arguments.steps, arguments.rounds)
        results["shadows"].append(shadow)
        print(
            f"{rows} rows: {shadow['step_ms']:.3f} ms a step, {shadow['shadowed_step_ms']:.3f} ms with a shadow every "
            f"{arguments.every} launches ({shadow['share']:+.2%}, {shadow['ms_per_shadow']:.2f} ms each)",
            flush=True,
        )
    del model  # free its memory for the deep model
    deep = replace(shape, num_layers=arguments.deep, sliding_windows=())
    model = load_model(deep, device=device, max_positions=positions).model
    with capture(model, int(arguments.rows.split(",")[0]), CONTEXT) as runtime:
        results["deep_audit"] = {"layers": deep.num_layers, **bench_audit(runtime)}
    print(json.dumps({"name": "graph_checks", **results, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
