"""What a recorder returns: a step that can be launched again, and a report of what it cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.checks import check_instance, check_tensor
from graphrt.kernels.errors import CaptureError

StepFunction = Callable[[], torch.Tensor]
"""One decode step on static buffers, without arguments; returns the logits."""


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Cost of one captured graph, or of a loop around one beside what the graph itself took.

    seconds       wall time of its capture
    pool_bytes    growth of the allocator, that is of the memory pool that all graphs share
    driver_bytes  device memory that the driver took for the graph itself
    nodes         graph nodes (ops on the op trace, for the CPU twin)
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
    """A captured step, or a loop of one. `output` holds the logits of the latest run until any sibling's next one."""

    report: GraphReport
    output: torch.Tensor

    def launch(self) -> None:
        """Run the step again on the current stream, reading and writing the memory it was captured with.

        Raises: for a loop, CaptureError once it was closed, ReplayError where the device refuses or never ends.
        """

    def close(self) -> None:
        """Drop the graph and what it keeps alive; every launch must have ended. A loop keeps its step alive."""


class Recorder(Protocol):
    """Turns step functions into captured graphs, all on one device and in one memory pool.

    streams   that graphs are captured on; none on a CPU
    """

    name: str
    streams: tuple[torch.cuda.Stream, ...]

    def session(self) -> AbstractContextManager[None]:
        """Context around a whole capture_sizes of captures (garbage collection frozen, capture stream current)."""

    def warm_up(self, step: StepFunction, prepare: Callable[[], None]) -> None:
        """Run a step once outside of any capture, so that libraries make their handles and workspaces.

        On a CPU too, where nothing needs it: a step that only the first run gets right fails there as it does on CUDA.
        """

    def record(self, step: StepFunction, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> CapturedGraph:
        """Capture one step; `prepare` runs before every run of it.

        Raises CaptureError; the recorder can be used on afterwards.
        """

    def loop(self, graph: CapturedGraph, go_on: torch.Tensor) -> CapturedGraph:
        """One launch that runs a captured step, and again while `go_on` is not 0 after a run, without the host.

            step: ...; left.sub_(1); go_on.copy_(left > 0)      # the step says whether it is to run again
            loop = recorder.loop(recorder.record(step, descriptor, prepare), go_on)
            left.fill_(8)
            loop.launch()                                       # eight steps

        graph   of this recorder; can still be launched by itself, and closed before the loop is
        go_on   int32 [1] on the recorder's device; written by the step, at its end, and read after every run. What it
                holds before a launch means nothing: the step runs at least once

        **The step must count its own runs and stop at a bound.** On CUDA a loop whose step never writes 0 keeps the
        device busy for good; the twin on a CPU stops with an error.

        A loop takes memory of the driver, for its copy of the nodes, and none of the pool: it works in the memory of
        its step. So all graphs and loops of a recorder launch on one stream, and a capture_sizes has loops for those
        of its
        sizes that are worth the memory. A step may read none of torch's generators, as each run would draw the same.

        Raises: CaptureError for another recorder's kind of graph, one that was closed, and one with nodes that a loop
        cannot hold: events, host functions, allocations, conditions. ShapeError for `go_on`.
        """

    def pool_bytes(self) -> int:
        """Memory that the allocator holds for the pool; it must not grow once the last graph was captured."""

    def close(self) -> None:
        """Give the pool and the capture stream back; every graph must have been closed."""


NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
"""Stands where a closed graph, or a manager without a step, has no output."""


_Graph = TypeVar("_Graph", bound=CapturedGraph)


def check_loop(kind: type[_Graph], graph: CapturedGraph, go_on: torch.Tensor, device: torch.device) -> _Graph:
    """`graph`, as the class that a recorder makes; raises what `Recorder.loop` says."""
    step = check_instance("graph", graph, kind, advice="pass what record() of this recorder made", error=CaptureError)
    if step.output is NOTHING:
        raise CaptureError("graph: expected an open graph, got one that was closed; record the step again")
    check_tensor("go_on", go_on, shape=(1,), dtype=torch.int32, device=device)
    return step


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that may be changed outside of `torch.inference_mode`, wherever it was made."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
