"""Results of `ReplayManager.compare`: one step run as a graph and eagerly from the same state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.engine.handle import RequestFault


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
    differing_rows   requests of the batch whose tokens, faults or logits differ in any bit; two NaN are equal
    max_difference   [num_reqs] float32 on the host: largest difference of a request's logits; NaN if only one has NaN
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
            tokens = f"token {self.graph.tokens[row]} by the graph, {self.eager.tokens[row]} eagerly"
            lines.append(f"  request {row}: {tokens}; logits differ by up to {self.max_difference[row]:.3g}")
        return "\n".join(lines)


def compare_results(descriptor: BatchDescriptor, graph: StepResult, eager: StepResult) -> StepComparison:
    ours, theirs = graph.logits.float(), eager.logits.float()
    # Equal bits, or NaN in both. Signs are compared too, because 0 == -0.
    same = (graph.logits.signbit() == eager.logits.signbit()) & (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = torch.where(same, 0.0, (ours - theirs).abs())
    rows = range(len(graph.tokens))
    at = [{fault.index: fault for fault in result.faults} for result in (graph, eager)]
    equal = same.all(-1).tolist()
    differing = tuple(
        row
        for row in rows
        if not equal[row] or graph.tokens[row] != eager.tokens[row] or at[0].get(row) != at[1].get(row)
    )
    return StepComparison(descriptor, graph, eager, differing, distance.amax(-1).cpu().numpy())
