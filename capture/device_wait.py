"""Waits of the host for a GPU. A kernel may wait for another GPU forever, so ranks replace the wait by a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

watch: Callable[[Callable[[], bool]], None] | None = None
"""Waits until a condition is true, and raises if another rank has failed. None: the driver waits."""


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
    """Free the cached memory of GPUs. Do nothing on a CPU, or while the current stream waits for a rank that has
    failed, because the driver would wait too."""
    if device.type == "cuda" and (watch is None or torch.cuda.current_stream(device).query()):
        torch.cuda.empty_cache()
