"""What torch's allocator on CUDA says of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.kernels.errors import ConfigError

# The CPU build of torch lacks it, and needs it not.
_backend: Callable[[], str] = getattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native")


def check_allocator() -> None:
    """Raise ConfigError for an allocator that does not tell which memory is whose."""
    if (backend := _backend()) != "native":
        raise ConfigError(
            f"PYTORCH_CUDA_ALLOC_CONF: expected torch's native allocator, got {backend!r}, which does not tell which "
            "memory is whose; leave backend: out"
        )


def allocator_rows(pool: tuple[int, int] | None = None) -> Sequence[Mapping[str, Any]]:
    """Rows of `torch.cuda.memory_snapshot()` without its history, of one pool or of all. Raises: as check_allocator."""
    check_allocator()
    if pool is not None:
        return torch.cuda.memory_snapshot(pool)  # type: ignore[no-any-return]  # torch does not annotate it
    return torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-any-return]
