"""Shared parts of the benchmarks on several ranks of one host: options, the group, and times of captured graphs."""

from __future__ import annotations

import argparse
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import multiprocessing

from graphrt.bench.decode_ranks import join_group
from graphrt.bench.timer import capture_calls, replay_seconds
from scripts.rigs.measure import make_parser, parse

_WARM_UPS = 3

Work = Callable[[Namespace, dist.ProcessGroup, torch.device], None]
"""What a rank does with the options."""


def make_ranks_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options --device, --ranks and --samples."""
    parser = make_parser(description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=15)
    return parser


def run_ranks(parser: argparse.ArgumentParser, work: Work) -> None:
    """Parse the options, and run `work` on every rank, in a new process and on a GPU of its own, or on the CPU."""
    options = parse(parser)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks: expected at most {torch.cuda.device_count()}, the number of GPUs, got {options.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (options, f"file://{folder}/rendezvous", work), nprocs=options.ranks)


def _run(rank: int, options: Namespace, rendezvous: str, work: Work) -> None:
    group, device = join_group(rendezvous, rank, options.ranks, options.device)
    work(options, group, device)
    dist.barrier(group)
    dist.destroy_process_group()


def samples_of(
    step: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device, samples: int, parts: int
) -> list[float]:
    """Return microseconds of runs of `step`, divided by the number of its parts. On CUDA, a run is a graph replay.

    group   whose ranks run the same steps, and start each run together; None: this rank is alone
    """
    times = []
    if device.type == "cpu":
        for _ in range(samples):
            if group is not None:
                dist.barrier(group)
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) / parts * 1e6)
        return times
    stream, flag = torch.cuda.Stream(), torch.zeros(1, device=device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = capture_calls([step], 1)
        for _ in range(_WARM_UPS + samples):
            if group is not None:
                dist.all_reduce(flag, group=group)
            times.append(replay_seconds(graph) / parts * 1e6)
    torch.cuda.current_stream().wait_stream(stream)
    return times[_WARM_UPS:]
