"""The timer of all benchmarks.

On CUDA, calls run inside replays of a CUDA graph, so their launch overhead is that of a graph node. Pass several calls
on different buffers. They run in rotation, so that the L2 cache is full of other calls' data, as in a model.
`rotations` returns the number of calls needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.kernels.ops.sweep import read_sweep

Call = Callable[[], torch.Tensor]
"""Work under test, which returns a tensor that it wrote."""

_L2_MULTIPLE = 3  # between two runs of a call, the other calls read this multiple of the L2 cache
_WARM_UP_REPLAYS = 3
_MIN_REPLAY_SECONDS = 2e-3  # minimum duration of a replay, far above the resolution of events
_MAX_CALLS_PER_GRAPH = 2000
_SWEEPS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median, 20th and 80th percentile over all samples."""

    median_us: float
    p20_us: float
    p80_us: float


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device. Returns immediately on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rotations(bytes_per_call: int, device: torch.device) -> int:
    """Return the number of calls on distinct buffers that evict each call's data from L2 before its next run."""
    if device.type != "cuda":
        return 1
    l2_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + math.ceil(_L2_MULTIPLE * l2_bytes / max(bytes_per_call, 1))


def time_calls(calls: Sequence[Callable[[], object]], *, device: torch.device, num_samples: int = 50) -> Timing:
    """Time calls that do the same work on different buffers. A sample is the mean over one replay of all calls.

    On CUDA, each call must be capturable. It runs once eagerly, then inside a graph. On a CPU, a sample is one run of
    all calls, timed by the host.

    Raises: ConfigError: if `calls` is empty.
    """
    if not calls or num_samples < 1:
        counts = f"{len(calls)} calls and {num_samples} samples"
        raise ConfigError(
            f"time_calls: expected calls and samples, got {counts}; pass at least one call and one sample"
        )
    sample = _cuda_samples if device.type == "cuda" else _cpu_samples
    p20, median, p80 = np.percentile(sample(calls, num_samples, device), [20, 50, 80]) * 1e6
    return Timing(float(median), float(p20), float(p80))


def _cuda_samples(calls: Sequence[Callable[[], object]], num_samples: int, device: torch.device) -> list[float]:
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles kernels and fills workspaces
                call()
            graph = capture_calls(calls, 1)
            seconds = max(replay_seconds(graph) for _ in range(_WARM_UP_REPLAYS))
            rounds = min(math.ceil(_MIN_REPLAY_SECONDS / seconds), max(_MAX_CALLS_PER_GRAPH // len(calls), 1))
            if rounds > 1:
                graph = capture_calls(calls, rounds)
                for _ in range(_WARM_UP_REPLAYS):
                    graph.replay()
            samples = [replay_seconds(graph) / (rounds * len(calls)) for _ in range(num_samples)]
        torch.cuda.current_stream().wait_stream(stream)
    return samples


def capture_calls(calls: Sequence[Callable[[], object]], rounds: int) -> torch.cuda.CUDAGraph:
    """Return a graph of several rounds of calls, captured on the current stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the device time of a replay on the current stream. Waits for it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cpu_samples(calls: Sequence[Callable[[], object]], num_samples: int, device: torch.device) -> list[float]:
    samples = []
    for call in calls:
        call()
    for _ in range(num_samples):
        start = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - start) / len(calls))
    return samples


def spacer_calls(outs: Sequence[torch.Tensor]) -> list[Call]:
    """Return small kernels, one per output, that read one element each. Subtract their time from `spaced_calls`."""
    sink = torch.zeros(1, device=outs[0].device)
    return [partial(_spacer, sink, out) for out in outs]


def spaced_calls(calls: Sequence[Call], device: torch.device) -> list[Call]:
    """Return the calls, each followed by a small kernel that depends on its output and on which the next call depends.

    Like most kernels between two attention calls of a model, the small kernel has no programmatic dependent launch. So
    the start of a call cannot overlap the end of the previous call.
    """
    sink = torch.zeros(1, device=device)

    def spaced(call: Call) -> torch.Tensor:
        return _spacer(sink, call())

    return [partial(spaced, call) for call in calls]


def _spacer(sink: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return sink.add_(out.view(-1)[:1])


def measure_read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of read-only sweeps in graph replays, over memory much larger than any cache."""
    x = torch.zeros(1 << (30 if device.type == "cuda" else 25), dtype=torch.float32, device=device)
    sweep = time_calls([lambda: read_sweep(x)] * 4, device=device, num_samples=_SWEEPS)
    return x.nbytes / (sweep.median_us * 1e-6)
