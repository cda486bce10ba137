"""Time from the start of a process to its first token, by phase, with an empty and with a filled kernel cache.

    python -m scripts.bench_start                            # Llama-3.1-8B and Llama-3.2-1B with dummy weights
    python -m scripts.bench_start --shapes llama-3.2-1b --repeats 5
    python -m scripts.bench_start --device cpu --shapes smollm2-135m --rows 1 --repeats 1

Every run is a new process. The first run of a shape starts with an empty folder as TRITON_CACHE_DIR. `--repeats` more
runs find its kernels there; their medians are reported. Seconds of the phases, in order:

    python          start of the interpreter
    import_torch    import torch
    import_graphrt  the other imports
    context         the CUDA context
    model           load_model: allocates and fills the weights
    runtime         Runtime(): trial captures and the KV cache. They also compile kernels
    capture         capture() of all sizes
    first_token     a prompt of 64 tokens, until its first token is on the host

`ready` is the sum until `capture`, and `compile` is the part of `runtime` and `capture` that compiles and loads kernels
ahead. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.models.config import ModelConfig

_PROMPT = 64


def start(source: str | ModelConfig, device_name: str, rows: int, begun: float) -> dict[str, float]:
    """Start a runtime and generate one token. Return the seconds of each phase since `begun`, a `time.time()`."""
    ends = {"python": time.time()}
    import torch

    ends["import_torch"] = time.time()
    from graphrt import RuntimeConfig, SamplingParams, TextGenerator, load_model
    from graphrt.bench.timer import synchronize
    from graphrt.engine import graphs
    from graphrt.models.loading import make_runtime

    ends["import_graphrt"] = time.time()
    device = torch.device(device_name)
    torch.zeros(1, device=device)
    synchronize(device)
    ends["context"] = time.time()
    model = load_model(source, device=device).model
    synchronize(device)
    ends["model"] = time.time()
    ahead, compile_seconds = graphs.compile_ahead, 0.0

    def timed(*arguments: Any) -> None:
        nonlocal compile_seconds
        before = time.time()
        ahead(*arguments)
        compile_seconds += time.time() - before

    graphs.compile_ahead = timed
    try:
        tokens = max(rows, 2048 if device.type == "cuda" else _PROMPT)
        config = RuntimeConfig(max_num_reqs=rows, max_num_tokens=tokens, max_seq_len=min(8192, len(model.cos_sin)))
        with make_runtime(model, config) as runtime:
            ends["runtime"] = time.time()
            runtime.capture()
            ends["capture"] = time.time()
            next(TextGenerator(runtime).generate([[1] * _PROMPT], SamplingParams(max_new_tokens=2)))
            ends["first_token"] = time.time()
            stats = runtime.stats()
            if stats.late_kernels:
                print("loaded after capture():", ", ".join(stats.late_kernels), file=sys.stderr)
    finally:
        graphs.compile_ahead = ahead
    times = [begun, *ends.values()]
    seconds = {name: end - last for (name, end), last in zip(ends.items(), times[:-1], strict=True)}
    return {
        **seconds,
        "compile": compile_seconds,
        "ready": ends["capture"] - begun,
        "graphs": len(stats.graphs),
        "compiled_kernels": stats.compiled_kernels.total(),
        "late_kernels": stats.late_kernels.total(),
    }


def measure(arguments: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Run `start` in new processes that share a kernel cache. Return the first run, and the medians of the others."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}

        def run() -> dict[str, Any]:
            command = [sys.executable, "-m", "scripts.bench_start", *arguments, "--begun", str(time.time())]
            result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
            return found

        first, *others = [run() for _ in range(repeats + 1)]
    filled = {name: median(run[name] for run in others) for name in first}
    return [{"cache": "empty", **first}, {"cache": "filled", **filled}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.1-8b,llama-3.2-1b", help="comma-separated names")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", type=int, default=256, help="largest decode size")
    parser.add_argument("--repeats", type=int, default=3, help="runs with a filled cache")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)  # set in a new process: when it was started
    arguments = parser.parse_args()
    if arguments.begun is not None:
        source = f"dummy:{arguments.shapes}"
        print(json.dumps(start(source, arguments.device, arguments.rows, arguments.begun)), flush=True)
        return
    from graphrt.bench.environment import provenance

    rows = []
    for shape in arguments.shapes.split(","):
        options = ["--shapes", shape, "--device", arguments.device, "--rows", str(arguments.rows)]
        for found in measure(options, arguments.repeats):
            rows.append({"shape": shape, **found})
            phases = ", ".join(f"{name} {value:.2f}" for name, value in found.items() if isinstance(value, float))
            print(
                f"{shape}, {found['cache']} cache: {phases}; {found['compiled_kernels']} kernels compiled", flush=True
            )
    print(json.dumps({"name": "start", **provenance(), "results": rows}), flush=True)


if __name__ == "__main__":
    main()
