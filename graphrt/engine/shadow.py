"""Shadow steps, which run both eagerly and as a graph, from the same state, and compare the results.

    state ──> eager step ──> result      copied, then undone
    state ──> graph      ──> result      kept, so a shadow step changes nothing
                               └─ compared on the device; the host reads one flag at a later step

A server can detect wrong graphs while it serves. All work is queued on the stream of the steps.

`compare_results` serves `ReplayManager.compare`, which runs a step both ways and restores what it changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.engine.graphs import StepGraphs
from graphrt.engine.handle import RequestFault
from graphrt.engine.program import StepProgram
from graphrt.engine.stats import ShadowDifference, Stats, TensorDifference
from graphrt.engine.undo import Copies, Slots, StepUndo
from graphrt.kernels.metadata.buffers import BufferKind

_MOST_KEPT = 16  # differences kept in stats


class Shadow:
    """Runs steps eagerly and as graphs, and stores differences in `stats`. Keeps three copies of a step's state."""

    def __init__(self, program: StepProgram, graphs: StepGraphs, stats: Stats) -> None:
        self._program, self._graphs, self._stats = program, graphs, stats
        self._undo = StepUndo(program)
        self._eager, self._graph = Copies(), Copies()
        # A step whose result is being copied to the host: its number and size, the flag, and the event of the copy.
        self._pending: tuple[int, BatchDescriptor, torch.Tensor, torch.cuda.Event | None] | None = None

    def run(self, step: int, descriptor: BatchDescriptor, batch: Batch | None, num_reqs: int) -> torch.Tensor:
        """Run a step eagerly, undo it, replay its graph, and return the logits of the graph.

        The next entry of the input ring must contain the inputs of the step. An error of the eager step changes no
        state.
        """
        self.poll()  # the previous comparison still uses the copies
        with torch.inference_mode(), self._graphs.off_graph():  # caches may be inference tensors
            with self._undo.undone(descriptor) as slots:
                logits = self._graphs.run(descriptor, batch, eager=True)
                self._take(self._eager, descriptor, num_reqs, logits, slots)
            logits = self._graphs.run(descriptor, batch, eager=False)
            self._take(self._graph, descriptor, num_reqs, logits, slots)
            words = self._eager.block.view(torch.int64), self._graph.block.view(torch.int64)
            self._pending = (step, descriptor, *_to_host((words[0] != words[1]).any()))
        self._stats.shadow_steps += 1
        return logits

    def poll(self) -> None:
        """Wait for the comparison of the last shadow step, and warn if graph and eager step differ."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, descriptor, differs, arrival = pending
        if arrival is not None:
            arrival.synchronize()
        if not differs:
            return
        difference = ShadowDifference(step, descriptor, tuple(self._differences()))
        if len(self._stats.shadow_differences) < _MOST_KEPT:
            self._stats.shadow_differences += (difference,)
        warnings.warn(f"graphrt: {difference}", RuntimeWarning, stacklevel=2)

    def _take(
        self, copies: Copies, descriptor: BatchDescriptor, num_reqs: int, logits: torch.Tensor, slots: Slots
    ) -> None:
        """Copy the results of a step in execution order, so that the first difference is closest to its cause."""
        rows = self._program.logits_of(logits, descriptor, num_reqs)
        state = self._undo.state(descriptor)
        last = {name: state.pop(name) for name, _ in self._program.buffers.named(BufferKind.PERSISTENT)}
        copies.take(state | self._undo.written(slots) | {"logits": rows} | last)

    def _differences(self) -> Iterator[TensorDifference]:
        """Yield the tensors that differ, each with its first element that differs."""
        for name, eager in self._eager.views.items():
            graph = self._graph.views[name]
            bits = [t.contiguous().view(torch.uint8).view(t.numel(), -1) for t in (eager, graph) if t.numel()]
            if not bits or not bool((other := (bits[0] != bits[1]).any(-1)).any()):
                continue
            first = int(other.int().argmax())
            of_eager, of_graph = (t.reshape(-1)[first : first + 1].double().item() for t in (eager, graph))
            index = tuple(map(int, np.unravel_index(first, eager.shape)))
            yield TensorDifference(name, index, of_graph, of_eager, int(other.sum()), eager.numel())


def _to_host(flag: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Return a flag in host memory, and the event after which it is valid."""
    if flag.device.type == "cpu":
        return flag, None
    pinned = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    pinned.copy_(flag, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return pinned, arrival


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one run: tokens [num_reqs] on the host, faults, logits [num_reqs, vocab] on the device."""

    tokens: npt.NDArray[np.int32]
    faults: tuple[RequestFault, ...]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepComparison:
    """A batch run as a graph and eagerly, from the same state.

    descriptor       size of both runs
    graph, eager     results of each run
    differing_rows   requests of the batch whose tokens, faults or logits differ in any bit; NaN equals NaN
    max_difference   [num_reqs] float32 on the host: largest difference of a request's logits; NaN if only one run has
    NaN
    """

    descriptor: BatchDescriptor
    graph: StepResult
    eager: StepResult
    differing_rows: tuple[int, ...]
    max_difference: npt.NDArray[np.float32]

    @property
    def equal(self) -> bool:
        return not self.differing_rows

    def __str__(self) -> str:
        rows = len(self.graph.tokens)
        if self.equal:
            return f"{self.descriptor}: {rows} requests, graph and eager step are bitwise equal"
        lines = [f"{self.descriptor}: {len(self.differing_rows)} of {rows} requests differ"]
        for row in self.differing_rows:
            tokens = f"token {self.graph.tokens[row]} in the graph, {self.eager.tokens[row]} in the eager step"
            lines.append(f"  request {row}: {tokens}; logits differ by up to {self.max_difference[row]:.3g}")
        return "\n".join(lines)


def compare_results(descriptor: BatchDescriptor, graph: StepResult, eager: StepResult) -> StepComparison:
    # By request, if the step had several positions.
    of_graph, of_eager = (result.logits.movedim(-2, 0).flatten(1) for result in (graph, eager))
    ours, theirs = of_graph.float(), of_eager.float()
    # Equal bits, or NaN in both. Signs are compared too, because 0 == -0.
    same = (of_graph.signbit() == of_eager.signbit()) & (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = torch.where(same, 0.0, (ours - theirs).abs())
    rows = range(len(graph.tokens))
    at = [{fault.index: fault for fault in result.faults} for result in (graph, eager)]
    equal = same.all(-1).tolist()
    differing = tuple(
        row
        for row in rows
        if not equal[row] or (graph.tokens[row] != eager.tokens[row]).any() or at[0].get(row) != at[1].get(row)
    )
    return StepComparison(descriptor, graph, eager, differing, distance.amax(-1).cpu().numpy())
