"""Capture steps as CUDA graphs in one memory pool, on one capture stream.

`torch.cuda.graph` synchronizes, empties the allocator's cache and collects garbage for every graph, so 35 graphs take
tens of seconds. The recorder calls `capture_begin` and `capture_end` itself, and collects garbage once for all graphs.
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

from graphrt.capture.allocator import allocator_rows, check_capture_allocator
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import NOTHING, CapturedGraph, GraphReport, Recorder, StepFunction, check_loop, graph_closed
from graphrt.capture.loop import CudaGraphLoop
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.capture.raw_graph import CostMeter, Launcher, check, count_nodes
from graphrt.kernels.errors import CaptureError
from graphrt.kernels.garbage import no_collections, older_objects_set_aside

# cuBLAS keeps one workspace per stream for the lifetime of the process, shared by graphs captured on that stream. Every
# open recorder therefore has its own capture stream; a closed recorder passes its stream to the next one. The stream is
# not from torch's pool, because torch assigns its 32 streams round-robin and other code may multiply matrices on the
# same stream.
_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a driver stream that torch assigns to no other user."""
    if device in _idle_streams and not _idle_streams[device]:
        gc.collect()  # a dropped runtime is part of reference cycles, and its stream is idle once they are collected
    if idle := _idle_streams.setdefault(device, []):
        torch.cuda.synchronize(device)  # graphs of a dropped recorder may still use its workspace
        return idle.pop()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the context
        _, stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    return torch.cuda.ExternalStream(int(stream), device=device)


class CudaGraph:
    """A captured and instantiated CUDA graph.

    torch makes the first launch, because it advances the random number generator by the step's draws. If the step
    draws nothing, all later launches are driver calls.
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

    def loop(self, condition: torch.Tensor) -> CudaGraphLoop:
        assert self._graph is not None, "loop of a closed graph"
        return CudaGraphLoop(self._graph, condition, self.output, self.report)

    def raw_cuda_graph(self) -> int:
        """Return the handle of the graph, not of its executable. Raises: CaptureError: if closed."""
        return self._open().raw_cuda_graph()

    def pool(self) -> tuple[int, int]:
        """Return the id of the memory pool, shared by all graphs of a recorder. Raises: CaptureError: if closed."""
        return self._open().pool()

    def close(self) -> None:
        self._graph = self._launcher = None  # torch frees it, unless a loop refers to it
        self.output = NOTHING

    def _open(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            raise graph_closed()
        return self._graph


class CudaGraphRecorder:
    """Captures CUDA graphs on `device` in one memory pool. The graphs share memory, so they must replay on one stream.

    Raises:
        ConfigError: if PyTorch's allocator does not support graphs; see check_capture_allocator().
    """

    name = "cuda-graph"

    def __init__(self, device: torch.device) -> None:
        check_capture_allocator(device)
        self._device = device
        self._stream = _own_stream(device)
        self.streams: tuple[torch.cuda.Stream, ...] = (self._stream,)
        self._pool = torch.cuda.graph_pool_handle()
        self._living = weakref.WeakSet[torch.cuda.CUDAGraph]()
        # This also applies to a recorder dropped without close(). Otherwise its stream's cuBLAS workspace (32 MiB on an
        # H100) is lost, and the next recorder allocates another.
        self._leave_stream = weakref.finalize(self, _idle_streams[device].append, self._stream)
        self._leave_stream.atexit = False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        # Collecting garbage during a capture can free a Triton kernel or a tensor, which invalidates the capture.
        with no_collections():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with older_objects_set_aside(), torch.cuda.stream(self._stream):  # some code calls gc.collect() itself
                yield
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def warm_up(self, step: StepFunction, prepare: Callable[[], None]) -> None:
        prepare()
        with torch.inference_mode():
            step()

    def capture(self, step: StepFunction, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> CudaGraph:
        meter = CostMeter(self._device)
        prepare()
        try:
            graph, output = self._capture(step)
        except Exception:
            # A step's first run at a size may compile, allocate or choose an algorithm, which a capture forbids.
            # Run it once outside a capture and try again. A second failure is an error in the step.
            self.warm_up(step, prepare)
            prepare()
            try:
                graph, output = self._capture(step)
            except Exception as error:
                raise CaptureError(f"{descriptor}: the step could not be captured: {error}") from error
        graph.instantiate()
        check(driver.cuGraphUpload(graph.raw_cuda_graph_exec(), self._stream.cuda_stream))
        return CudaGraph(graph, output, meter.report(descriptor, count_nodes(graph.raw_cuda_graph())))

    def loop(self, graph: CapturedGraph, condition: torch.Tensor) -> CudaGraphLoop:
        return check_loop(CudaGraph, graph, condition, self._device).loop(condition)

    def pool_bytes(self) -> int:
        return sum(segment["total_size"] for segment in allocator_rows(self._pool))

    def close(self) -> None:
        self._leave_stream()

    def _capture(self, step: StepFunction) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        if not self._living:  # torch frees a pool with its last graph and cannot capture into it again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with _kernel_loads_allowed(), torch.inference_mode():
            try:  # around all calls: a signal handler may raise after any of them
                # thread_local: CUDA calls of other threads neither invalidate this capture nor become part of it.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                output = step()
                graph.capture_end()
            except BaseException:
                self._abort(graph)
                raise
        self._living.add(graph)
        return graph, _borrow(output)

    def _abort(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that raised, even if it had not begun or had ended. Errors of this function are ignored."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warns that the graph is empty
                graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # raised if the allocator does not allocate from the pool
                # After an invalidated capture, it would still allocate from the unusable pool.
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                self._pool = torch.cuda.graph_pool_handle()
            with contextlib.suppress(RuntimeError):
                _reset_generator()


def _reset_generator() -> None:
    """Make torch's generator usable outside captures again.

    Before PyTorch 2.12, an invalidated capture leaves the generator in capture mode, in which drawing raises an error.
    The end of another capture resets it, so this function captures an empty graph.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that the graph is empty
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()


def make_recorder(device: torch.device) -> Recorder:
    """Return a recorder for `device`, which captures CUDA graphs on a GPU and op traces on a CPU."""
    return CudaGraphRecorder(device) if device.type == "cuda" else OpTraceRecorder()


@contextlib.contextmanager
def _kernel_loads_allowed() -> Iterator[None]:
    """Allow Triton to load new kernels during a capture.

    Loading a module uses no stream, but the driver allows it only in relaxed capture mode. The hooks relax this
    thread's mode during the load, so captures need neither a warm-up per size nor a list of kernel variants.
    """
    relaxed, hooks = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED, triton.knobs.runtime
    outer: list[Any] = []

    def before_load(*args: Any, **kwargs: Any) -> None:
        outer.append(check(driver.cuThreadExchangeStreamCaptureMode(relaxed))[1])

    def after_load(*args: Any, **kwargs: Any) -> None:
        check(driver.cuThreadExchangeStreamCaptureMode(outer.pop()))

    try:
        hooks.kernel_load_start_hook.add(before_load)
        hooks.kernel_load_end_hook.add(after_load)
        yield
    finally:
        hooks.kernel_load_start_hook.remove(before_load)
        hooks.kernel_load_end_hook.remove(after_load)
        if outer:  # a load failed
            after_load()


class _DeviceMemory:
    """Device memory owned by another object, in a form that torch.as_tensor accepts."""

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
    """Return a tensor that shares the memory without owning it.

    If graphs owned their outputs, smaller graphs could not reuse the memory. For 35 sizes, the logits of a vocabulary
    of 128k tokens would take more than a gigabyte.
    """
    with torch.inference_mode(False):
        return torch.as_tensor(_DeviceMemory(tensor), device=tensor.device).view(tensor.dtype)
