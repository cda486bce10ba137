"""Captures steps as CUDA graphs: one memory pool, one capture stream, no per-graph synchronisation.

`torch.cuda.graph` synchronises, empties the allocator's cache and collects garbage for every graph, which makes a
capture_sizes of 35 graphs take tens of seconds. Here the raw `capture_begin`/`capture_end` are called on one stream,
and
garbage collection is frozen once for the whole capture_sizes.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from cuda.bindings import driver

from graphrt.capture.allocator import allocator_rows
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.garbage import older_objects_set_aside
from graphrt.capture.graph import NOTHING, CapturedGraph, GraphReport, Recorder, StepFunction, check_loop
from graphrt.capture.loop import CudaGraphLoop
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.capture.raw_graph import CostMeter, Launcher, check, count_nodes
from graphrt.kernels.errors import CaptureError

# cuBLAS keeps one workspace per stream for the life of the process, and two graphs captured on one stream share it.
# So every live recorder has a capture stream of its own, and a closed one leaves it to the next. It is none of torch's:
# torch hands out 32 in turn, the 33rd is the first again, and on that one somebody else may multiply matrices.
_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the driver that torch gives nobody else."""
    if idle := _idle_streams.setdefault(device, []):
        return idle.pop()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context
        _, stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    return torch.cuda.ExternalStream(int(stream), device=device)


class CudaGraph:
    """A captured and instantiated CUDA graph.

    The first launch is torch's, which gives the step a share of the generator's numbers: a step that draws none can be
    launched without torch from then on.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, report: GraphReport) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._launcher: Launcher | None = None
        self.output = output
        self.report = report

    def launch(self) -> None:
        if self._launcher is not None:
            self._launcher.launch()
            return
        assert self._graph is not None, "launch of a closed graph"
        device = self.output.device
        generator = torch.cuda.default_generators[device.index]
        before = generator.get_state()
        self._graph.replay()
        if torch.equal(before, generator.get_state()):
            self._launcher = Launcher(driver.CUgraphExec(self._graph.raw_cuda_graph_exec()), device)

    def loop(self, go_on: torch.Tensor) -> CudaGraphLoop:
        assert self._graph is not None, "loop of a closed graph"
        return CudaGraphLoop(self._graph, go_on, self.output, self.report)

    def raw_cuda_graph(self) -> int:
        """Handle of the graph itself, not of its executable. Raises: CaptureError once it was closed."""
        if self._graph is None:
            raise CaptureError("graph: expected an open graph, got one that was closed; record the step again")
        return self._graph.raw_cuda_graph()

    def pool(self) -> tuple[int, int]:
        """Id of the memory pool, which its siblings share. Raises: CaptureError once it was closed."""
        if self._graph is None:
            raise CaptureError("graph: expected an open graph, got one that was closed; record the step again")
        return self._graph.pool()

    def close(self) -> None:
        self._graph = self._launcher = None  # torch frees it, unless a loop holds it
        self.output = NOTHING


class CudaGraphRecorder:
    """Records CUDA graphs on `device` that share one memory pool, so they must replay on one stream."""

    name = "cuda-graph"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _own_stream(device)
        self.streams: tuple[torch.cuda.Stream, ...] = (self._stream,)
        self._pool = torch.cuda.graph_pool_handle()
        self._living = weakref.WeakSet[torch.cuda.CUDAGraph]()
        # Also for a recorder that is dropped without close(): else its stream's cuBLAS workspace (32 MiB on an H100) is
        # lost, and the next recorder makes another one.
        self._leave_stream = weakref.finalize(self, _idle_streams[device].append, self._stream)
        self._leave_stream.atexit = False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        # A Triton kernel or tensor that dies during a capture can invalidate it: collect now, then not until the end.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with older_objects_set_aside(), torch.cuda.stream(self._stream):  # some code collects though that is off
                yield
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        finally:
            if was_enabled:
                gc.enable()

    def warm_up(self, step: StepFunction, prepare: Callable[[], None]) -> None:
        prepare()
        with torch.inference_mode():
            step()

    def record(self, step: StepFunction, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> CudaGraph:
        meter = CostMeter(self._device)
        prepare()
        try:
            graph, output = self._capture(step)
        except Exception:
            # What a step does on its first run at a size (compile, allocate, choose an algorithm) may be forbidden in a
            # capture. Let it do that outside; what fails again, or fails outside as well, is an error of the step.
            self.warm_up(step, prepare)
            prepare()
            try:
                graph, output = self._capture(step)
            except Exception as error:
                raise CaptureError(f"{descriptor}: the step could not be captured: {error}") from error
        graph.instantiate()
        check(driver.cuGraphUpload(graph.raw_cuda_graph_exec(), self._stream.cuda_stream))
        return CudaGraph(graph, output, meter.report(descriptor, count_nodes(graph.raw_cuda_graph())))

    def loop(self, graph: CapturedGraph, go_on: torch.Tensor) -> CudaGraphLoop:
        return check_loop(CudaGraph, graph, go_on, self._device).loop(go_on)

    def pool_bytes(self) -> int:
        return sum(segment["total_size"] for segment in allocator_rows(self._pool))

    def close(self) -> None:
        self._leave_stream()

    def _capture(self, step: StepFunction) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        if not self._living:  # torch ends a pool with its last graph, and puts no other into it then
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with _kernel_loads_allowed(), torch.inference_mode():
            # thread_local: CUDA calls of other threads neither break this capture nor are captured.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = step()
            except BaseException:
                self._abort(graph)
                raise
            graph.capture_end()
        self._living.add(graph)
        return graph, _borrow(output)

    def _abort(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose step raised. That error is the one to show, not what ending the capture may raise."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the graph is empty
                graph.capture_end()
        except RuntimeError:
            # An invalidated capture leaves the allocator in the belief that it goes on, and its pool unusable.
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            with contextlib.suppress(RuntimeError):
                _end_generator_s_capture()


def _end_generator_s_capture() -> None:
    """Let torch's generator draw outside of captures again.

    It believes that an invalidated capture goes on, and refuses until another one has ended: here is one without nodes.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()


def make_recorder(device: torch.device) -> Recorder:
    """The recorder for `device`: CUDA graphs on CUDA, the op trace elsewhere."""
    return CudaGraphRecorder(device) if device.type == "cuda" else OpTraceRecorder()


@contextlib.contextmanager
def _kernel_loads_allowed() -> Iterator[None]:
    """Let Triton load a kernel that it meets for the first time in the middle of a capture.

    Loading a module touches no stream, but only a relaxed capture mode allows it: this thread's mode is relaxed for the
    time of the load. So a capture_sizes needs neither a warm-up per size nor a list of kernel variants.
    """
    relaxed, hooks = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED, triton.knobs.runtime
    outer: list[Any] = []

    def before_load(*args: Any, **kwargs: Any) -> None:
        outer.append(check(driver.cuThreadExchangeStreamCaptureMode(relaxed))[1])

    def after_load(*args: Any, **kwargs: Any) -> None:
        check(driver.cuThreadExchangeStreamCaptureMode(outer.pop()))

    hooks.kernel_load_start_hook.add(before_load)
    hooks.kernel_load_end_hook.add(after_load)
    try:
        yield
    finally:
        hooks.kernel_load_start_hook.remove(before_load)
        hooks.kernel_load_end_hook.remove(after_load)
        if outer:  # a load failed
            after_load()


class _DeviceMemory:
    """Describes device memory that somebody else owns, for torch.as_tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        typestr = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[tensor.element_size()]
        strides = tuple(s * tensor.element_size() for s in tensor.stride())
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "strides": strides,
            "version": 3,
        }


def _borrow(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without owning it. Were graphs to own their outputs, smaller ones could not reuse the memory:
    the logits of 35 sizes of a 128k vocabulary alone would take more than a gigabyte of the pool."""
    with torch.inference_mode(False):
        return torch.as_tensor(_DeviceMemory(tensor), device=tensor.device).view(tensor.dtype)
