"""Captures of sizes at their first use, for `RuntimeConfig.lazy_capture`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from graphrt.capture.dispatcher import NOT_CAPTURED, Dispatch
from graphrt.engine.graphs import StepGraphs
from graphrt.engine.guards import Guards
from graphrt.engine.launch_queue import LaunchQueue
from graphrt.engine.stats import Stats


@dataclass(frozen=True, slots=True)
class LateCapture:
    """Captures a size between two launches."""

    queue: LaunchQueue
    graphs: StepGraphs
    guards: Guards
    stats: Stats

    def __call__(self, target: Dispatch) -> str:
        """Capture the graph of a size if it has none. Return "", or the reason why steps of the size run eagerly.

        After a failed capture, all steps of the size run eagerly. An interrupt leaves `target` unchanged.

        Raises: ReplayError: if a tensor that graphs read has moved.
        """
        if target.why_eager is not NOT_CAPTURED:
            return target.why_eager
        start = time.perf_counter()
        with self.guards.late_capture():
            try:
                self.queue.capture(target.descriptor)
                target.why_eager = ""
            except Exception as error:
                target.why_eager = f"{target.descriptor}: capture at first use failed: {type(error).__name__}: {error}"
        self.stats.graphs = self.graphs.reports
        self.stats.capture_seconds += time.perf_counter() - start
        return target.why_eager
