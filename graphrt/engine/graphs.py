"""The graphs of a step, one per capture size, and loops around some of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.graph import CapturedGraph, GraphReport, Recorder
from graphrt.capture.guard import parameters_unwritten
from graphrt.engine.ahead import compile_ahead
from graphrt.engine.program import StepProgram
from graphrt.engine.step_model import is_compiled
from graphrt.kernels.compile_ahead import counting_compilations
from graphrt.kernels.errors import ConfigError


class StepGraphs:
    """The graphs of one step program. They share a memory pool, so all run on one stream."""

    def __init__(self, program: StepProgram, recorder: Recorder, loop_sizes: Sequence[int]) -> None:
        self._program, self._recorder, self._loop_sizes = program, recorder, loop_sizes
        self._plans = program.backend.plans_on_host()
        self._graphs: dict[BatchDescriptor, CapturedGraph] = {}
        self._loops: dict[BatchDescriptor, CapturedGraph] = {}
        self.name, self.streams = recorder.name, recorder.streams
        self.is_off_graph = False

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        return tuple(graph.report for graph in self._graphs.values())

    def capture(
        self,
        descriptors: Sequence[BatchDescriptor],
        every_size: Sequence[BatchDescriptor],
        progress: Callable[[GraphReport], None] | None = None,
    ) -> None:
        """Capture all sizes, and loops around the decode graphs of `loop_sizes`. After an error, no graph remains.

        every_size   sizes whose kernels are compiled first: `descriptors`, and sizes that are captured later
        """
        try:
            with self._recorder.session(), counting_compilations():
                # On the capture stream, so that cuBLAS needs a workspace for this stream only.
                if self._program.kv_cache.device.type == "cuda":
                    compile_ahead(self._program, every_size)
                buffers = self._program.buffers  # filled with padding requests, which are valid
                self._program.refresh(BatchDescriptor.mixed(len(buffers.input_ids), len(buffers.req_indices)))
                for descriptor in descriptors:
                    self._capture(descriptor, partial(self._program.backend.plan_capture, descriptor))
                    if progress is not None:
                        progress(self._graphs[descriptor].report)
        except BaseException:
            self._drop()
            raise

    def capture_late(self, descriptor: BatchDescriptor, before_run: Callable[[], None]) -> None:
        """Capture one more size. Warm-up runs are queued after earlier work of the current stream. The state of torch's
        random generator is restored after them. After an error, the other graphs remain, and the call can be repeated.

        before_run   called before each run of the step, so that the run reads an input entry without requests
        """
        device = self._program.kv_cache.device
        random = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        state = random.get_state()

        def prepare() -> None:
            before_run()
            self._program.backend.plan_capture(descriptor)

        try:
            with self.off_graph(), torch.inference_mode(), self._recorder.session():
                self._capture(descriptor, prepare)
        finally:
            random.set_state(state)

    def _capture(self, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> None:
        """Capture a size, and a loop around it if it is a decode size of `loop_sizes`."""
        program, recorder = self._program, self._recorder
        if descriptor not in self._graphs:  # an interrupt may have come between graph and loop
            step = partial(program.run, descriptor)
            # A compiled model may compile, load and tune kernels at any size, which a capture forbids. So each size
            # runs once before its capture.
            if is_compiled(program.model) or descriptor.query_len not in {size.query_len for size in self._graphs}:
                recorder.warm_up(step, prepare)
            with parameters_unwritten(program.model):
                graph = recorder.capture(step, descriptor, prepare)
            self._graphs[descriptor] = graph
        if descriptor.kind is GraphKind.DECODE and descriptor.padded_reqs in self._loop_sizes:
            self._loops[descriptor] = recorder.loop(self._graphs[descriptor], program.buffers.loop_condition)

    def graph(self, descriptor: BatchDescriptor) -> CapturedGraph:
        """Return the graph of a size. Raises: ConfigError: if the size is not captured."""
        if descriptor not in self._graphs:
            raise ConfigError(f"descriptor: {descriptor} is not a captured size; choose one of `descriptors`")
        return self._graphs[descriptor]

    def can_loop(self, descriptor: BatchDescriptor) -> bool:
        """Return whether a size has a loop, which runs several steps in one launch."""
        return descriptor in self._loops

    def run(
        self, descriptor: BatchDescriptor, batch: Batch | None, eager: bool, steps: int = 1, loops: bool = False
    ) -> torch.Tensor:
        """Queue steps of one size on the current stream, and return the logits of the last step.

        batch   the batch, for backends that plan on the host; None if its values are only on the device
        loops   run all steps in one launch, which ends early if all requests are finished
        """
        if eager:
            backend = self._program.backend
            with torch.inference_mode(), self.off_graph():
                for _ in range(steps):
                    backend.plan_capture(descriptor)
                    if batch is not None:
                        backend.plan_replay(descriptor, batch)
                    logits = self._program.run(descriptor)
            return logits
        graph = (self._loops if loops else self._graphs)[descriptor]
        for _ in range(1 if loops else steps):
            if self._plans and batch is not None:
                with torch.inference_mode():
                    self._program.backend.plan_replay(descriptor, batch)
            graph.launch()  # dispatches no torch op, so inference mode is not needed
        return graph.output

    @contextlib.contextmanager
    def off_graph(self) -> Iterator[None]:
        """Return a context for code that launches kernels without a graph and may load them, such as eager steps."""
        before, self.is_off_graph = self.is_off_graph, True
        try:
            yield
        finally:
            self.is_off_graph = before

    def pool_bytes(self) -> int:
        return self._recorder.pool_bytes()

    def close(self) -> None:
        """Free all graphs, the pool and the capture stream."""
        self._drop()
        self._recorder.close()
        vars(self).pop("_program", None)

    def _drop(self) -> None:
        # All graphs are freed together, because they share the pool and a cuBLAS workspace.
        for graph in (*self._loops.values(), *self._graphs.values()):
            graph.close()
        self._loops.clear()
        self._graphs.clear()
