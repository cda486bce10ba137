"""Fake CUDA graphs for tests of the capture watch: CPU tensors stand for device tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphrt.testing import capture_watch

_library = torch.library.Library("fake_captures", "DEF")
_library.define("wait(Tensor x) -> Tensor")
POOL, OTHER_POOL = (3, 0), (0, 0)
EVERYWHERE = {"address": 0, "total_size": 1 << 62}


class FakeCuda:
    """The state of torch.cuda.

    capturing  whether the current stream is capturing
    sync_mode  mode of torch.cuda.set_sync_debug_mode
    pool       segments of the graphs' pool; initially all memory
    live       address and size of blocks of the other pool; the graphs' pool has a new block in each snapshot
    idle       the same for free blocks
    broken     whether captures end with an error, like invalidated captures
    """

    def __init__(self) -> None:
        self.capturing = False
        self.sync_mode = 0
        self.pool: list[dict[str, int]] = [EVERYWHERE]
        self.live: list[tuple[int, int]] = [(64, 8)]
        self.idle: list[tuple[int, int]] = []
        self._snapshots = 0
        self.broken = False

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        self._snapshots += 1
        new = [{"size": self._snapshots, "state": "active_allocated"}]
        own = [segment | {"segment_pool_id": POOL, "blocks": new} for segment in self.pool]
        states = {"active_allocated": self.live, "inactive": self.idle}
        others = [
            {
                "address": address - 512,
                "total_size": 1024,
                "segment_pool_id": OTHER_POOL,
                "blocks": [{"size": 512, "state": "inactive"}, {"size": size, "state": state}],
            }
            for state, blocks in states.items()
            for address, size in blocks
        ]
        return {"segments": [*own, *others]}

    @contextlib.contextmanager
    def another_stream(self) -> Iterator[None]:
        before, self.capturing = self.capturing, False
        yield
        self.capturing = before

    def set_sync_debug_mode(self, mode: int | str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        self.sync_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph."""

    cuda: FakeCuda

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert self.cuda.sync_mode != 2, "capture_begin synchronizes"
        self.cuda.capturing = True

    def capture_end(self) -> None:
        self.cuda.capturing = False
        if self.cuda.broken:
            raise RuntimeError("invalidated")

    def pool(self) -> tuple[int, int]:
        assert not self.cuda.capturing, "torch knows the pool after the capture"
        return POOL


@contextlib.contextmanager
def captured(graph: Any) -> Iterator[None]:
    """Stands for torch.cuda.graph."""
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    graph = type("CUDAGraph", (FakeGraph,), {"cuda": cuda})
    monkeypatch.setattr(capture_watch, "_DEVICE_TYPE", "cpu")
    for name, value in {
        "CUDAGraph": graph,
        "is_current_stream_capturing": lambda: cuda.capturing,
        "get_sync_debug_mode": lambda: cuda.sync_mode,
        "set_sync_debug_mode": cuda.set_sync_debug_mode,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", cuda.snapshot)
    for owner in (torch.cuda.Stream, torch.cuda.Event):
        monkeypatch.setattr(owner, "synchronize", lambda self: None)
    return cuda


def _wait(x: torch.Tensor) -> torch.Tensor:
    """An op that synchronizes, like aten.nonzero."""
    if torch.cuda.get_sync_debug_mode() == 2:
        raise RuntimeError("called a synchronizing CUDA operation\nException raised from ...")
    return x.clone()


_library.impl("wait", _wait, "CPU")
