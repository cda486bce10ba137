"""The one timer of graphrt's benchmarks, and how their results are shown and recorded.

On CUDA the calls under test run inside replays of a CUDA graph, so that launch overhead is that of a graph node. Pass
several calls on different buffers: they run in turn, and each finds the L2 cache full of the others' data, as it would
in a model. `rotations` says how many are needed.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from graphrt.cli.console import make_console
from graphrt.environment import environment_report
from graphrt.kernels.errors import ConfigError

_L2_MULTIPLE = 3  # between two runs of a call, the others read this many times the L2 cache
_WARM_UP_REPLAYS = 3
_MIN_REPLAY_SECONDS = 2e-3  # a replay is at least this long, so that the events' resolution does not show
_MAX_CALLS_PER_GRAPH = 2000


@dataclass(frozen=True, slots=True)
class Result:
    """Times of one call in microseconds, and what it moved.

    bytes_moved   memory traffic that the call cannot avoid; None when no bandwidth is meant
    baseline      name of the result in the same table that this one is compared with, or None
    """

    name: str
    median_us: float
    p20_us: float
    p80_us: float
    num_samples: int
    bytes_moved: int | None = None
    baseline: str | None = None

    @property
    def tb_per_s(self) -> float | None:
        """Bandwidth at the median, in 10^12 bytes per second."""
        return None if self.bytes_moved is None else self.bytes_moved / self.median_us / 1e6


def rotations(bytes_per_call: int, device: torch.device) -> int:
    """How many calls on buffers of their own keep each one's data out of the L2 cache until its next turn."""
    if device.type != "cuda":
        return 1
    l2_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + math.ceil(_L2_MULTIPLE * l2_bytes / max(bytes_per_call, 1))


def time_calls(
    name: str,
    calls: Sequence[Callable[[], object]],
    *,
    device: torch.device,
    num_samples: int = 50,
    bytes_moved: int | None = None,
    baseline: str | None = None,
) -> Result:
    """Time calls that do the same work on different buffers; a sample is the mean over one replay of all of them.

    On CUDA each call must be capturable: it runs once eagerly, then inside a graph. On CPU a sample is one run of all
    calls, with the host's clock.

    Raises: ConfigError when there is nothing to time.
    """
    if not calls or num_samples < 1:
        raise ConfigError(f"time_calls: expected calls and samples, got {len(calls)} calls and {num_samples} samples")
    sample = _cuda_samples if device.type == "cuda" else _cpu_samples
    p20, median, p80 = np.percentile(sample(calls, num_samples, device), [20, 50, 80]) * 1e6
    return Result(name, float(median), float(p20), float(p80), num_samples, bytes_moved, baseline)


def _cuda_samples(calls: Sequence[Callable[[], object]], num_samples: int, device: torch.device) -> list[float]:
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles kernels and fills workspaces
                call()
            graph = _capture(calls, 1)
            seconds = max(_replay_seconds(graph) for _ in range(_WARM_UP_REPLAYS))
            rounds = min(math.ceil(_MIN_REPLAY_SECONDS / seconds), max(_MAX_CALLS_PER_GRAPH // len(calls), 1))
            if rounds > 1:
                graph = _capture(calls, rounds)
                for _ in range(_WARM_UP_REPLAYS):
                    graph.replay()
            samples = [_replay_seconds(graph) / (rounds * len(calls)) for _ in range(num_samples)]
        torch.cuda.current_stream().wait_stream(stream)
    return samples


def _capture(calls: Sequence[Callable[[], object]], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
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


def print_table(title: str, results: Iterable[Result], *, ceiling_tb_per_s: float | None = None) -> None:
    """Print results with time, spread, bandwidth, share of the measured ceiling, and speed relative to the baseline."""
    rows = {result.name: result for result in results}
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("us", "p20 - p80", "TB/s", "of ceiling", "x baseline"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in rows.values():
        bandwidth = result.tb_per_s
        share = bandwidth / ceiling_tb_per_s if bandwidth is not None and ceiling_tb_per_s is not None else None
        speedup = rows[result.baseline].median_us / result.median_us if result.baseline is not None else None
        table.add_row(
            result.name,
            f"{result.median_us:.2f}",
            f"{result.p20_us:.2f} - {result.p80_us:.2f}",
            "" if bandwidth is None else f"{bandwidth:.2f}",
            "" if share is None else f"{share:.0%}",
            "" if speedup is None else f"{speedup:.2f}",
        )
    make_console().print(table)


def emit_json(name: str, results: Iterable[Result], **extra: Any) -> None:
    """Print one line of JSON: results, and what is needed to run them again. Call it last, after every other output.

    extra   figures of the benchmark itself, such as shapes or the measured ceiling
    """
    record = {
        "name": name,
        **provenance(),
        **extra,
        "results": [asdict(result) | {"tb_per_s": result.tb_per_s} for result in results],
    }
    print(json.dumps(record), flush=True)


def provenance() -> dict[str, Any]:
    """Device, versions, command, and the state of the checkout (None outside of one).

    tree                 hash of the tree that the files make as they are, those that git ignores left out
    uncommitted_changes  whether that is another tree than the commit's
    """
    report = environment_report()
    tree = tree_of_files(Path(__file__).resolve().parent)
    return {
        "gpu": report["gpus"][0]["name"] if report["gpus"] else None,
        "driver": report["driver"],
        "cuda": report["cuda"],
        "torch": report["packages"]["torch"],
        "triton": report["packages"]["triton"],
        "packages": report["packages"],
        "python": report["python"],
        "command": _command(),
        "commit": _git("rev-parse", "HEAD"),
        "tree": tree,
        "uncommitted_changes": None if tree is None else tree != _git("rev-parse", "HEAD^{tree}"),
    }


def tree_of_files(folder: Path) -> str | None:
    """Git's hash of the files of the checkout that `folder` is in, or None outside of one. Changes nothing there. Of a
    checkout within the checkout the commit counts, not its files."""
    inside = ("-C", str(folder.resolve()), "rev-parse")
    root = _git(*inside, "--show-toplevel")
    objects = _git(*inside, "--path-format=absolute", "--git-path", "objects")
    if root is None or objects is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        places = {
            "GIT_INDEX_FILE": f"{scratch}/index",
            "GIT_OBJECT_DIRECTORY": scratch,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }
        _git("-C", root, "read-tree", "HEAD", **places)  # what is tracked counts though it may be ignored
        if _git("-C", root, "add", "--all", **places) is None:
            return None
        return _git("-C", root, "write-tree", **places)


def _command() -> str:
    """The command line, with the program's path relative to the current folder where it lies there."""
    program = Path(sys.argv[0]).absolute()
    here = Path.cwd()
    name = program.relative_to(here) if program.is_relative_to(here) else program.name
    return shlex.join(["python", str(name), *sys.argv[1:]])


def _git(*arguments: str, **environment: str) -> str | None:
    folder = Path(__file__).resolve().parent
    variables = ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []
    command = [*variables, "git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or an installed package
        return None
    return result.stdout.strip()
