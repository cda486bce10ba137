"""Many steps in one launch: a CUDA graph whose WHILE node runs a captured step until the step says that it is done.

    parent graph
      WHILE node                     its condition is 1 at the start of every launch
        body: child graph            a clone of the captured step; its last nodes write go_on
              loop_condition kernel  one thread: condition = (go_on != 0)

The driver's calls make it, as torch has WHILE nodes from 2.14 on only, and graphrt runs from 2.11 on. The step is
captured by itself first, so the allocator, the pool and a failing capture are what they are for any graph, and the
same step can be launched once too. Nothing here touches torch's generators: a step that draws from one would draw the
same numbers in every run. Steps of graphrt count instead (`graphrt/sampling.py`).

A step that never writes 0 keeps the device busy for good, and no call ends it. A step that loops must count its own
runs, and stop at a bound.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from cuda.bindings import driver

from graphrt.capture.graph import NOTHING, GraphReport
from graphrt.capture.raw_graph import CostMeter, Launcher, check, current_stream, node_types
from graphrt.kernels.errors import CaptureError, GraphRTError
from graphrt.kernels.native.nvrtc import NativeVariant, load

GO_ON = NativeVariant("loop_condition.cu", "loop_condition", (), num_threads=1, shared_bytes=0)
"""The kernel that ends a body; see loop_condition.cu."""

_NODES_OF_A_LOOP = 3  # WHILE, child graph, loop_condition kernel
_OneOf = driver.CUgraphNodeType
# A body may also hold conditional nodes, but a step is a child graph of the body, and child graphs may not.
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
    """As in loop_condition.cu."""

    _fields_ = (("flag", ctypes.c_void_p), ("handle", ctypes.c_uint64))


class CudaGraphLoop:
    """A captured step in a WHILE node, instantiated and uploaded; see `Recorder.loop`.

    step    as torch captured it; stays referenced, and with it the memory of its pool
    go_on   int32 [1]; its memory stays referenced
    output  the step's logits
    of      the step's report
    """

    def __init__(self, step: torch.cuda.CUDAGraph, go_on: torch.Tensor, output: torch.Tensor, of: GraphReport) -> None:
        self._device = go_on.device
        with torch.cuda.device(self._device):
            try:
                _check_nodes(step.raw_cuda_graph())
                function = load(GO_ON, self._device.index)
                meter = CostMeter(self._device)
                graph, executable, node, body = _instantiate(step.raw_cuda_graph(), function, go_on.data_ptr())
            except GraphRTError as error:
                raise CaptureError(f"{of.descriptor}: the step cannot be looped: {error}") from error
            # Whoever drops a loop without closing it gets the memory back as well.
            self._release = weakref.finalize(self, _destroy, executable, graph, step, go_on.detach())
            self._release.atexit = False  # the driver may be gone by then
            check(driver.cuGraphUpload(executable, current_stream(self._device)))
            self._launcher = Launcher(executable, self._device)
            self._graph, self._conditionals = graph, {int(node): ("while", (body,))}
            self.report = meter.report(of.descriptor, of.nodes + _NODES_OF_A_LOOP)
        self.output = output

    def launch(self) -> None:
        self._check_open("launch()")
        self._launcher.launch()

    def raw_cuda_graph(self) -> int:
        """Handle of the parent graph, not of its executable. Raises: CaptureError once it was closed."""
        self._check_open("raw_cuda_graph()")
        return int(self._graph)

    def pool(self) -> tuple[int, int]:
        """Id of the memory pool, which is the step's. Raises: CaptureError once it was closed."""
        self._check_open("pool()")
        held = self._release.peek()
        assert held is not None, "alive, as was checked"
        return held[2][2].pool()  # type: ignore[no-any-return]  # of the step

    def raw_conditionals(self) -> dict[int, tuple[str, tuple[Any, ...]]]:
        """What the WHILE node is and the graph in it, by the node's handle: drivers before 13.2 do not tell."""
        self._check_open("raw_conditionals()")
        return self._conditionals

    def close(self) -> None:
        self._release()
        self.output = NOTHING

    def _check_open(self, what: str) -> None:
        if not self._release.alive:
            raise CaptureError(f"loop: expected an open loop, got {what} of a closed one; make another with loop()")


def _check_nodes(step: Any) -> None:
    """Raise CaptureError for nodes that no WHILE body may hold: the driver would say no more than that it fails."""
    if refused := node_types(step) - _IN_A_STEP:
        raise CaptureError(
            f"nodes: expected {_names(_IN_A_STEP)} only, got {_names(refused)} too; record events, call host functions "
            "and allocate outside of the step"
        )


def _names(types: frozenset[Any]) -> str:
    return ", ".join(sorted(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in types))


def _instantiate(step: Any, function: Any, flag: int) -> tuple[Any, Any, Any, Any]:
    """The parent graph, which may have one executable at a time, that executable, the WHILE node and its body."""
    graph = check(driver.cuGraphCreate(0))[1]
    try:
        node, body = _fill(graph, step, function, flag)
        return graph, check(driver.cuGraphInstantiate(graph, 0))[1], node, body
    except GraphRTError:
        driver.cuGraphDestroy(graph)
        raise


def _fill(graph: Any, step: Any, function: Any, flag: int) -> tuple[Any, Any]:
    context = check(driver.cuCtxGetCurrent())[1]
    # Without the flag, a launch would begin with the condition that the last one ended with, which is 0.
    flags = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
    handle = check(driver.cuGraphConditionalHandleCreate(graph, context, 1, flags))[1]
    loop = driver.CUgraphNodeParams()
    loop.type = _OneOf.CU_GRAPH_NODE_TYPE_CONDITIONAL
    loop.conditional.handle = handle
    loop.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    loop.conditional.size = 1
    loop.conditional.ctx = context
    node = check(driver.cuGraphAddNode(graph, None, None, 0, loop))[1]
    body = driver.CUgraph(int(loop.conditional.phGraph_out[0]))  # its own handle: the list is a view of `loop`
    child = check(driver.cuGraphAddChildGraphNode(body, None, 0, step))[1]

    params = _Params(flag, int(handle))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))  # the driver copies what they lead to
    kernel = driver.CUDA_KERNEL_NODE_PARAMS()
    kernel.func = function
    kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
    kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
    kernel.sharedMemBytes = 0
    kernel.kernelParams = ctypes.addressof(pointers)
    check(driver.cuGraphAddKernelNode(body, [child], 1, kernel))
    return node, body


def _destroy(executable: Any, graph: Any, *kept: Any) -> None:
    """Free both; `kept` is dropped by whoever calls. A failure is that of a device which is lost, memory and all."""
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
