"""Waits of the host for a GPU. With several ranks, a kernel may wait for another GPU forever, so the host polls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

watch: Callable[[Callable[[], bool]], None] | None = None
"""Polls until a condition is true, and raises if another rank has failed. None: wait in the driver."""


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
        watch(work.query)


def empty_cache(device: torch.device) -> None:
    """Free the cached memory of GPUs. With several ranks, do nothing while the current stream is busy: it may wait for
    a failed rank, and the driver would wait with it."""
    if device.type == "cuda" and (watch is None or torch.cuda.current_stream(device).query()):
        torch.cuda.empty_cache()
