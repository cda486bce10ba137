"""One step, run as a graph and run eagerly from the same state: what `ReplayManager.compare` returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.engine.handle import RequestFault


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one run of a step gave: tokens [num_reqs] on the host, faults, logits [num_reqs, vocab] on the device."""

    tokens: npt.NDArray[np.int32]
    faults: tuple[RequestFault, ...]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepComparison:
    """The same batch as a graph and eagerly, each from the state before it.

    descriptor       the size that both ran at
    graph, eager     what each run gave
    differing_rows   rows of the batch whose tokens, faults or logits differ, bit by bit; two NaN are equal
    max_difference   [num_reqs] float32 on the host: largest distance of a row's logits; NaN where only one run has NaN
    """

    descriptor: BatchDescriptor
    graph: StepResult
    eager: StepResult
    differing_rows: tuple[int, ...]
    max_difference: npt.NDArray[np.float32]

    @property
    def equal(self) -> bool:
        """Whether both runs gave the same."""
        return not self.differing_rows

    def __str__(self) -> str:
        rows = len(self.graph.tokens)
        if self.equal:
            return f"{self.descriptor}: {rows} rows, graph and eager step are equal bit by bit"
        lines = [f"{self.descriptor}: {len(self.differing_rows)} of {rows} rows differ"]
        for row in self.differing_rows:
            tokens = f"token {self.graph.tokens[row]} by the graph, {self.eager.tokens[row]} eagerly"
            lines.append(f"  row {row}: {tokens}; logits differ by up to {self.max_difference[row]:.3g}")
        return "\n".join(lines)


def compare_results(descriptor: BatchDescriptor, graph: StepResult, eager: StepResult) -> StepComparison:
    """Both results side by side."""
    ours, theirs = graph.logits.float(), eager.logits.float()
    # Equal, or NaN in both; a zero's sign tells two runs apart, so bits are compared, not values.
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
