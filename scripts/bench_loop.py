"""Cost of a step inside a WHILE loop, against one launch per step from the host.

    python -m scripts.bench_loop                             # steps of 1, 50 and 300 tiny kernels, 200 runs a launch
    python -m scripts.bench_loop --nodes 400 --runs 32

Both variants run the same captured step on the same stream, alternating `--samples` times. A sample is the time between
two idle states of the device, divided by the number of runs. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

import torch

from graphrt.bench.environment import provenance
from graphrt.bench.timer import synchronize
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import make_recorder
from graphrt.runtime import resolve_device
from scripts.rigs.measure import make_parser, parse


def measure(device: torch.device, nodes: int, runs: int, samples: int) -> dict[str, float]:
    """Return the median microseconds per run of a step of `nodes` kernels, and the cost of building the loop."""
    recorder = make_recorder(device)
    condition = torch.zeros(1, dtype=torch.int32, device=device)
    x = torch.zeros(1, dtype=torch.int32, device=device)

    def step() -> torch.Tensor:
        for _ in range(nodes - 1):
            x.add_(1)
        return condition.sub_(1)

    with recorder.session():
        recorder.warm_up(step, lambda: None)
        graph = recorder.capture(step, BatchDescriptor.decode(1), lambda: None)
    loop = recorder.loop(graph, condition)

    def one_by_one() -> None:
        for _ in range(runs):
            graph.launch()

    loop_launches: list[float] = []

    def looped() -> None:
        start = time.perf_counter()
        loop.launch()
        loop_launches.append(time.perf_counter() - start)

    times: dict[Callable[[], None], list[float]] = {one_by_one: [], looped: []}
    for sample in range(samples + 1):
        for side, seconds in times.items():
            condition.fill_(runs)
            synchronize(device)
            start = time.perf_counter()
            side()
            synchronize(device)
            if sample:  # the first one warms up
                seconds.append((time.perf_counter() - start) / runs)
            if condition.item() != 0:
                raise RuntimeError(f"condition: expected 0 after {runs} runs, got {condition.item()}")
    found = {
        "nodes": graph.report.nodes,
        "runs": runs,
        "launches_us": median(times[one_by_one]) * 1e6,
        "loop_us": median(times[looped]) * 1e6,
        "loop_launch_us": median(loop_launches) * 1e6,
        "loop_make_ms": loop.report.seconds * 1e3,
        "loop_bytes": loop.report.driver_bytes,
        "graph_bytes": graph.report.driver_bytes,
    }
    loop.close()
    graph.close()
    recorder.close()
    return found


def line(row: dict[str, float]) -> str:
    return (
        f"{row['nodes']:4.0f} nodes: {row['launches_us']:7.2f} us per run with {row['runs']:.0f} launches, "
        f"{row['loop_us']:7.2f} us with a loop, {row['loop_launch_us']:5.1f} us host time; created in "
        f"{row['loop_make_ms']:.1f} ms, {row['loop_bytes'] / (1 << 20):.1f} MiB"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 50, 300])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--samples", type=int, default=20)
    arguments = parse(parser)
    device, rows = resolve_device(arguments.device), []
    for nodes in arguments.nodes:
        rows.append(measure(device, nodes, arguments.runs, arguments.samples))
        print(line(rows[-1]), flush=True)
    print(json.dumps({"name": "loop", "steps": rows, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
