"""Runs a function in several processes of a group, and returns what each has returned or raised."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from graphrt import env

_context = multiprocessing.get_context("forkserver")
# A process imports nothing that the server has imported; torch imports torch._dynamo in its first use of meta tensors.
_context.set_forkserver_preload(["tests.engine.test_rank_failures", "torch._dynamo", "graphrt.backends.registry"])


@dataclass
class Outcome:
    """What a rank has returned or raised, and after how many seconds; neither if its process was killed."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    exit_code: int | None = None


def run_ranks(
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 2,
    backend: str = "gloo",
    seconds: int = 60,
) -> list[Outcome]:
    """Call function(group, *arguments) on every rank, for at most `seconds`. `folder` is for the rendezvous."""
    pipes, processes, end = [], [], time.monotonic() + seconds
    for rank in range(ranks):
        receiver, sender = _context.Pipe(duplex=False)
        task = (sender, str(folder / "rendezvous"), backend, rank, ranks, function, arguments)
        processes.append(_context.Process(target=_work, args=task))
        pipes.append(receiver)
        processes[-1].start()
        sender.close()
    outcomes = []
    for process, receiver in zip(processes, pipes, strict=True):
        try:
            arrived = receiver.poll(max(0, end - time.monotonic()))
            outcome = receiver.recv() if arrived else Outcome(error=TimeoutError("a rank has not ended"))
        except EOFError:
            outcome = Outcome()
        process.join(30 if "cuda" in backend else 5)  # the driver frees the memory of a GPU
        process.kill()
        outcome.exit_code = process.exitcode
        outcomes.append(outcome)
    (folder / "rendezvous").unlink()
    return outcomes


def _work(
    sender: Any,
    path: str,
    backend: str,
    rank: int,
    ranks: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if "cuda" in backend:
        env.set_nccl_defaults()  # a function may use NCCL before it calls Ranks.of
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=ranks)
    outcome, start = Outcome(), time.monotonic()
    try:
        outcome.value = function(dist.group.WORLD, *arguments)
    except BaseException as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        outcome.error = error
    outcome.seconds = time.monotonic() - start
    sender.send(outcome)
