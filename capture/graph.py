"""What a recorder returns: a step that can be launched again, and a report of what it cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from graphrt.capture.descriptor import BatchDescriptor

StepFunction = Callable[[], torch.Tensor]
"""One decode step on static buffers, without arguments; returns the logits."""


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Cost of one captured graph.

    seconds       wall time of its capture
    pool_bytes    growth of the allocator, that is of the memory pool that all graphs share
    driver_bytes  device memory that the driver took for the graph itself
    nodes         graph nodes (ops on the tape, for the CPU twin)
    """

    descriptor: BatchDescriptor
    seconds: float
    pool_bytes: int
    driver_bytes: int
    nodes: int

    @property
    def nbytes(self) -> int:
        """All device memory that the graph took."""
        return self.pool_bytes + self.driver_bytes


class CapturedGraph(Protocol):
    """A captured step. `output` holds the logits of the latest launch until the next launch of any sibling."""

    report: GraphReport
    output: torch.Tensor

    def launch(self) -> None:
        """Run the step again on the current stream, reading and writing the memory it was captured with."""

    def close(self) -> None:
        """Drop the graph and what it keeps alive."""


class Recorder(Protocol):
    """Turns step functions into captured graphs, all on one device and in one memory pool."""

    name: str

    def session(self) -> AbstractContextManager[None]:
        """Context around a whole ladder of captures (garbage collection frozen, capture stream current)."""

    def warm_up(self, step: StepFunction, prepare: Callable[[], None]) -> None:
        """Run a step once outside of any capture, so that libraries make their handles and workspaces."""

    def record(self, step: StepFunction, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> CapturedGraph:
        """Capture one step; `prepare` runs before every run of it.

        Raises CaptureError; the recorder can be used on afterwards.
        """

    def close(self) -> None:
        """Give the pool and the capture stream back; every graph must have been closed."""


NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
"""Stands where a closed graph, or a manager without a step, has no output."""


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that may be changed outside of `torch.inference_mode`, wherever it was made."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
