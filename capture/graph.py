"""The interface of captured graphs and recorders, for CUDA and for the op trace on a CPU."""

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
"""A decode step on static buffers. It takes no arguments and returns the logits."""


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Cost of capturing one graph; for a loop, the additional cost of building the loop.

    seconds       wall time
    pool_bytes    growth of the memory pool shared by all graphs
    driver_bytes  device memory that the driver allocated for the graph itself
    nodes         number of graph nodes, or of ops in an op trace
    """

    descriptor: BatchDescriptor
    seconds: float
    pool_bytes: int
    driver_bytes: int
    nodes: int

    @property
    def nbytes(self) -> int:
        """Device memory of the graph, in the pool and in the driver."""
        return self.pool_bytes + self.driver_bytes


class CapturedGraph(Protocol):
    """A captured step, or a loop around one.

    output   logits of the latest run; the next launch of any graph of the same recorder may overwrite them
    """

    report: GraphReport
    output: torch.Tensor

    def launch(self) -> None:
        """Run the step on the current stream, using the memory addresses of the capture.

        Raises:
            CaptureError: if a loop is closed.
            ReplayError: if the driver rejects the launch, or if a loop on a CPU does not terminate.
        """

    def close(self) -> None:
        """Free the graph. All its launches must have finished. A loop keeps the graph of its step alive."""


class Recorder(Protocol):
    """Captures step functions as graphs on one device, in one memory pool.

    streams   streams on which graphs are captured; empty on a CPU
    """

    name: str
    streams: tuple[torch.cuda.Stream, ...]

    def session(self) -> AbstractContextManager[None]:
        """Return a context for captures, in which garbage collection is off and the capture stream is current."""

    def warm_up(self, step: StepFunction, prepare: Callable[[], None]) -> None:
        """Run a step once without capturing it, so that libraries create their handles and workspaces.

        An op trace does not need this run. It runs the step nevertheless, so that a step whose first run differs fails
        as on CUDA.
        """

    def capture(self, step: StepFunction, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> CapturedGraph:
        """Capture one step. `prepare` runs before each run of the step.

        Raises:
            CaptureError: if the step cannot be captured. The recorder stays usable.
        """

    def loop(self, graph: CapturedGraph, condition: torch.Tensor) -> CapturedGraph:
        """Return a graph that runs a captured step and repeats it while `condition` is not 0, in one launch.

            step: ...; left.sub_(1); condition.copy_(left > 0)      # the step decides whether to run again
            loop = recorder.loop(recorder.capture(step, descriptor, prepare), condition)
            left.fill_(8)
            loop.launch()                                           # eight steps

        graph       a graph of this recorder. It can still be launched separately, and closed before the loop
        condition   int32 [1] on the recorder's device. The step writes it, and the loop reads it after each run. Its
                    value before a launch is ignored, because the step runs at least once

        **The step must count its runs and stop at a limit.** On CUDA, a loop whose step never writes 0 occupies the
        device forever. On a CPU, such a loop raises ReplayError.

        A loop needs driver memory for its copy of the nodes, but no pool memory. A loop shares its step's memory, so
        all graphs and loops of a recorder must run on one stream. The step must not draw from torch's generators,
        because each run would draw the same numbers.

        Raises:
            CaptureError: if `graph` is closed, was captured by a different kind of recorder, or has nodes that a loop
                cannot contain: events, host functions, allocations, conditional nodes.
            ShapeError: if `condition` has the wrong shape, dtype or device.
        """

    def pool_bytes(self) -> int:
        """Return the size of the memory pool in bytes. It must not grow after the last capture."""

    def close(self) -> None:
        """Release the pool and the capture stream. Close all graphs first."""


NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
"""Output of a closed graph, and of a manager that has not run a step."""


_Graph = TypeVar("_Graph", bound=CapturedGraph)


def check_loop(kind: type[_Graph], graph: CapturedGraph, condition: torch.Tensor, device: torch.device) -> _Graph:
    """Check the arguments of `Recorder.loop` and return `graph`. Raises: see `Recorder.loop`."""
    step = check_instance("graph", graph, kind, advice="pass a graph that this recorder captured", error=CaptureError)
    if step.output is NOTHING:
        raise graph_closed()
    check_tensor("condition", condition, shape=(1,), dtype=torch.int32, device=device)
    return step


def graph_closed() -> CaptureError:
    """Return the error for the use of a closed graph."""
    return CaptureError("graph: the graph is closed; capture the step again")


def loop_closed(call: str) -> CaptureError:
    """Return the error for the use of a closed loop."""
    return CaptureError(f"loop: {call} on a closed loop; create another loop with loop()")


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the memory of `tensor` and can be modified outside `torch.inference_mode`."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
