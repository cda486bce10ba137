"""Waits of the host for a GPU. With several ranks, a kernel may wait for another GPU forever, so the host polls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Watch(Protocol):
    """Checks for failed ranks while the host waits for a GPU."""

    def wait_for_device(self, done: Callable[[], bool]) -> None:
        """Wait until a condition is true. Raises: RankError: if a rank has failed."""

    def poll(self) -> None:
        """Raise RankError if a rank has failed. For code that polls by itself."""


watch: Watch | None = None
"""The ranks of a group of GPUs. None: wait in the driver."""


class Waitable(Protocol):
    """An event or a stream of torch, or a LaunchEvent."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


def wait_for(work: Waitable | None) -> None:
    """Wait until the work before an event, or on a stream, has finished; None: on a CPU.

    Raises: RankError: if a rank has failed.
    """
    if work is None:
        return
    if watch is None:
        work.synchronize()
    else:
        watch.wait_for_device(work.query)


def wait_until(done: Callable[[], bool], poll_seconds: float) -> None:
    """Wait until results have arrived in host memory. Raises: RankError: if a rank has failed."""
    if watch is not None:
        watch.wait_for_device(done)
    while not done():
        time.sleep(poll_seconds)


def empty_cache(device: torch.device) -> None:
    """Free the cached memory of GPUs. With several ranks, do nothing while the current stream is busy: it may wait for
    a failed rank, and the driver would wait with it."""
    if device.type == "cuda" and (watch is None or torch.cuda.current_stream(device).query()):
        torch.cuda.empty_cache()
