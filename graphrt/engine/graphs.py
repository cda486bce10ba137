"""The captured sizes of a step, and the loops over some of them: made together, launched, dropped together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.graph import CapturedGraph, GraphReport, Recorder
from graphrt.engine.program import StepProgram
from graphrt.engine.step_model import is_compiled
from graphrt.kernels.errors import ConfigError


class StepGraphs:
    """The graphs of one step program. They share a memory pool, so all run on one stream.

    name          how they are captured, for `stats()`, and streams where
    is_off_graph  whether what runs now launches kernels by itself
    """

    def __init__(self, program: StepProgram, recorder: Recorder, loop_sizes: Sequence[int]) -> None:
        self._program, self._recorder, self._loop_sizes = program, recorder, loop_sizes
        self._plans = program.backend.plans_on_host()
        self._graphs: dict[BatchDescriptor, CapturedGraph] = {}
        self._loops: dict[BatchDescriptor, CapturedGraph] = {}
        self.name, self.streams = recorder.name, recorder.streams
        self.is_off_graph = False

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        """What each graph cost, in the order of capture."""
        return tuple(graph.report for graph in self._graphs.values())

    def record(
        self, descriptors: Sequence[BatchDescriptor], progress: Callable[[GraphReport], None] | None = None
    ) -> None:
        """Capture every size, and a loop over those that may run many times in one launch; after an error, none."""
        try:
            with self._recorder.session():
                # A compiler may compile, load and tune at any size, which a capture forbids: so each runs once before.
                every_size, warm = is_compiled(self._program.model), set[GraphKind]()
                for descriptor in descriptors:
                    step = partial(self._program.run, descriptor)
                    prepare = partial(self._program.backend.plan_capture, descriptor)
                    if every_size or descriptor.kind not in warm:
                        warm.add(descriptor.kind)
                        self._recorder.warm_up(step, prepare)
                    graph = self._graphs[descriptor] = self._recorder.record(step, descriptor, prepare)
                    if descriptor.kind is GraphKind.DECODE and descriptor.padded_reqs in self._loop_sizes:
                        self._loops[descriptor] = self._recorder.loop(graph, self._program.buffers.go_on)
                    if progress is not None:
                        progress(graph.report)
        except BaseException:
            self._drop()
            raise

    def graph(self, descriptor: BatchDescriptor) -> CapturedGraph:
        """The graph of a size. Raises: ConfigError for one that was not captured."""
        if descriptor not in self._graphs:
            raise ConfigError(f"descriptor: expected one of the captured sizes, got {descriptor}; see descriptors")
        return self._graphs[descriptor]

    def can_loop(self, descriptor: BatchDescriptor) -> bool:
        """Whether a size can run many times in one launch."""
        return descriptor in self._loops

    def run(
        self, descriptor: BatchDescriptor, batch: Batch | None, eager: bool, steps: int = 1, loops: bool = False
    ) -> torch.Tensor:
        """Queue steps of one size on the current stream; returns the logits of the last.

        batch   what a backend that plans on the host plans; None: what the rows go on with is known to the device alone
        eager   outside of a graph
        loops   in one launch, which ends early where no row goes on
        """
        if eager:
            return self._run_eagerly(descriptor, batch, steps)
        graph = (self._loops if loops else self._graphs)[descriptor]
        for _ in range(1 if loops else steps):
            if self._plans and batch is not None:
                with torch.inference_mode():
                    self._program.backend.plan_replay(descriptor, batch)
            graph.launch()  # no op of torch: whoever launches a graph need not be in inference mode
        return graph.output

    @contextlib.contextmanager
    def off_graph(self) -> Iterator[None]:
        """What runs inside launches kernels by itself, and may load some: eager steps, and work between steps."""
        before, self.is_off_graph = self.is_off_graph, True
        try:
            yield
        finally:
            self.is_off_graph = before

    def pool_bytes(self) -> int:
        """Memory that the allocator holds for the graphs' pool."""
        return self._recorder.pool_bytes()

    def _run_eagerly(self, descriptor: BatchDescriptor, batch: Batch | None, steps: int) -> torch.Tensor:
        backend = self._program.backend
        with torch.inference_mode(), self.off_graph():
            for _ in range(steps):
                backend.plan_capture(descriptor)
                if batch is not None:
                    backend.plan_replay(descriptor, batch)
                logits = self._program.run(descriptor)
        return logits

    def close(self) -> None:
        """Drop all, with the pool and the capture stream."""
        self._drop()
        self._recorder.close()
        vars(self).pop("_program", None)

    def _drop(self) -> None:
        # All or none: graphs share the pool and a cuBLAS workspace, so one must not be reset while another lives.
        for graph in (*self._loops.values(), *self._graphs.values()):
            graph.close()
        self._loops.clear()
        self._graphs.clear()
