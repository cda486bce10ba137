"""Check that PyTorch's CUDA allocator supports graphs, and read its memory snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.kernels.errors import ConfigError

# The CPU build of torch lacks this function.
_backend: Callable[[], str] = getattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native")


def check_allocator() -> None:
    """Raise ConfigError if PyTorch does not use its native CUDA allocator."""
    if (backend := _backend()) != "native":
        raise ConfigError(
            f"PYTORCH_CUDA_ALLOC_CONF: graphrt needs PyTorch's native allocator, got backend {backend!r}, which has no "
            "memory snapshot; remove `backend:` from PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, and do not call "
            "change_current_allocator()"
        )


def check_capture_allocator(device: torch.device) -> None:
    """Raise ConfigError if graphs cannot be captured on `device` with the current allocator.

    Graphs need the native allocator with caching enabled; otherwise they have no private memory pool. Does nothing on
    a CPU.
    """
    if device.type != "cuda":
        return
    check_allocator()
    # No call reports whether PYTORCH_NO_CUDA_MEMORY_CACHING is in effect, but uncached allocations are not counted.
    before = _num_allocations(device)
    probe = torch.empty(1, dtype=torch.uint8, device=device)
    if _num_allocations(probe.device) == before:
        raise ConfigError(
            "PYTORCH_NO_CUDA_MEMORY_CACHING: PyTorch's caching allocator is disabled, so a CUDA graph has no memory "
            "pool; unset the variable, or call torch.cuda.memory.caching_allocator_enable(True)"
        )


def allocator_rows(pool: tuple[int, int] | None = None) -> Sequence[Mapping[str, Any]]:
    """Return the segments of torch's CUDA allocator, of one pool or of all, as `torch.cuda.memory_snapshot()` does.

    Raises:
        ConfigError: see check_allocator().
    """
    check_allocator()
    # memory_snapshot() releases references to the numbers of the pool id, and to 0 and False without a pool, that it
    # does not own (PyTorch pull request 196366). Numbers above 256 are then freed while in use, and Python crashes.
    segments = torch.cuda.memory._snapshot()["segments"]
    return [segment for segment in segments if pool is None or tuple(segment["segment_pool_id"]) == pool]


def _num_allocations(device: torch.device) -> int:
    """Return how many blocks the caching allocator has ever allocated."""
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
