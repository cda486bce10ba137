"""Run many steps in one launch: a WHILE node of a CUDA graph repeats a captured step while a condition is true.

    parent graph
      WHILE node                     its handle is 1 at the start of every launch
        body: child graph            a clone of the captured step; the step writes the condition
              loop_condition         one thread: handle = (condition != 0)

The graph is built by driver calls, because torch has WHILE nodes only from 2.14 on and graphrt supports 2.11. The step
is captured separately first, so allocator, pool and capture errors are the same as for any graph, and the step can also
be launched once. Torch's generators are not updated, so a step that draws from them would draw the same numbers in
every run. The steps of graphrt use counter-based random numbers instead (`graphrt/sampling.py`).

A step that never writes 0 occupies the device forever, and no call stops it. The step must count its runs and stop at a
limit.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from cuda.bindings import driver

from graphrt.capture.graph import NOTHING, GraphReport, loop_closed
from graphrt.capture.raw_graph import CostMeter, Launcher, check, node_types
from graphrt.kernels.errors import CaptureError, GraphRTError
from graphrt.kernels.native.nvrtc import NativeVariant, load, raw_stream

LOOP_CONDITION = NativeVariant("loop_condition.cu", "loop_condition", (), num_threads=1, shared_bytes=0)
"""The last kernel of a body; see loop_condition.cu."""

_NODES_OF_A_LOOP = 3  # WHILE, child graph, loop_condition kernel
_OneOf = driver.CUgraphNodeType
# A body may also contain conditional nodes, but the step is a child graph, which may not.
_IN_A_STEP = frozenset(
    {
        _OneOf.CU_GRAPH_NODE_TYPE_KERNEL,
        _OneOf.CU_GRAPH_NODE_TYPE_MEMCPY,
        _OneOf.CU_GRAPH_NODE_TYPE_MEMSET,
        _OneOf.CU_GRAPH_NODE_TYPE_GRAPH,
        _OneOf.CU_GRAPH_NODE_TYPE_EMPTY,
    }
)


class _Params(ctypes.Structure):
    """The kernel's parameters, laid out as in loop_condition.cu."""

    _fields_ = (("condition", ctypes.c_void_p), ("handle", ctypes.c_uint64))


class CudaGraphLoop:
    """A captured step in a WHILE node, instantiated and uploaded; see `Recorder.loop`.

    step        the captured graph; kept alive, which keeps the memory pool alive
    condition   int32 [1]; its memory is kept alive
    output      logits of the step
    of          capture report of the step
    """

    def __init__(
        self, step: torch.cuda.CUDAGraph, condition: torch.Tensor, output: torch.Tensor, of: GraphReport
    ) -> None:
        self._device = condition.device
        with torch.cuda.device(self._device):
            try:
                _check_nodes(step.raw_cuda_graph())
                function = load(LOOP_CONDITION, self._device.index)
                meter = CostMeter(self._device)
                graph, executable, node, body = _instantiate(step.raw_cuda_graph(), function, condition.data_ptr())
            except GraphRTError as error:
                raise CaptureError(f"{of.descriptor}: the step cannot be looped: {error}") from error
            # Also frees a loop that is dropped without close().
            self._release = weakref.finalize(self, _destroy, executable, graph, step, condition.detach())
            self._release.atexit = False  # the driver may have shut down
            check(driver.cuGraphUpload(executable, raw_stream(self._device.index)))
            self._launcher = Launcher(executable, self._device)
            self._graph, self._conditionals = graph, {int(node): ("while", (body,))}
            self.report = meter.report(of.descriptor, of.nodes + _NODES_OF_A_LOOP)
        self.output = output

    def launch(self) -> None:
        self._check_open("launch()")
        self._launcher.launch()

    def raw_cuda_graph(self) -> int:
        """Return the handle of the parent graph, not of its executable. Raises: CaptureError: if closed."""
        self._check_open("raw_cuda_graph()")
        return int(self._graph)

    def pool(self) -> tuple[int, int]:
        """Return the id of the step's memory pool. Raises: CaptureError: if closed."""
        self._check_open("pool()")
        held = self._release.peek()
        assert held is not None, "_check_open saw it alive"
        step = held[2][2]
        return step.pool()  # type: ignore[no-any-return]

    def raw_conditionals(self) -> dict[int, tuple[str, tuple[Any, ...]]]:
        """Return the kind and bodies of the WHILE node by handle, because drivers before 13.2 do not list them."""
        self._check_open("raw_conditionals()")
        return self._conditionals

    def close(self) -> None:
        self._release()
        self.output = NOTHING

    def _check_open(self, call: str) -> None:
        if not self._release.alive:
            raise loop_closed(call)


def _check_nodes(step: Any) -> None:
    """Raise CaptureError for nodes that a WHILE body cannot contain. The driver's error does not list them."""
    if refused := node_types(step) - _IN_A_STEP:
        raise CaptureError(
            f"nodes: a loop can contain {_names(_IN_A_STEP)} nodes only, got {_names(refused)}; record events, call "
            "host functions and allocate outside of the step"
        )


def _names(types: frozenset[Any]) -> str:
    return ", ".join(sorted(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in types))


def _instantiate(step: Any, function: Any, condition: int) -> tuple[Any, Any, Any, Any]:
    """Return the parent graph, its executable, the WHILE node and its body. A graph with a WHILE node can have only one
    executable at a time."""
    graph = check(driver.cuGraphCreate(0))[1]
    try:
        node, body = _fill(graph, step, function, condition)
        return graph, check(driver.cuGraphInstantiate(graph, 0))[1], node, body
    except GraphRTError:
        driver.cuGraphDestroy(graph)
        raise


def _fill(graph: Any, step: Any, function: Any, condition: int) -> tuple[Any, Any]:
    context = check(driver.cuCtxGetCurrent())[1]
    # Without the flag, a launch would start with the final condition of the previous launch, which is 0.
    flags = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
    handle = check(driver.cuGraphConditionalHandleCreate(graph, context, 1, flags))[1]
    loop = driver.CUgraphNodeParams()
    loop.type = _OneOf.CU_GRAPH_NODE_TYPE_CONDITIONAL
    loop.conditional.handle = handle
    loop.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    loop.conditional.size = 1
    loop.conditional.ctx = context
    node = check(driver.cuGraphAddNode(graph, None, None, 0, loop))[1]
    body = driver.CUgraph(int(loop.conditional.phGraph_out[0]))  # copied, because the list is a view of `loop`
    child = check(driver.cuGraphAddChildGraphNode(body, None, 0, step))[1]

    params = _Params(condition, int(handle))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))  # the driver copies the parameters
    kernel = driver.CUDA_KERNEL_NODE_PARAMS()
    kernel.func = function
    kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
    kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
    kernel.sharedMemBytes = 0
    kernel.kernelParams = ctypes.addressof(pointers)
    check(driver.cuGraphAddKernelNode(body, [child], 1, kernel))
    return node, body


def _destroy(executable: Any, graph: Any, *kept: Any) -> None:
    """Free the executable and the graph; the finalizer then drops `kept`. Errors are ignored, because they occur only
    if the context is lost."""
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
