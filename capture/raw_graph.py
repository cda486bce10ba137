"""CUDA driver calls for capture: checked calls, launches, events, nodes and memory of a graph."""

from __future__ import annotations

import time
from typing import Any

import torch
from cuda.bindings import driver

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport
from graphrt.kernels.errors import CaptureError, GraphRTError, ReplayError
from graphrt.kernels.native.nvrtc import ensure_context, raw_stream

_CHILD = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH


def check(result: tuple[Any, ...], error: type[GraphRTError] = CaptureError) -> tuple[Any, ...]:
    """Return the result of a driver call. Raise `error` if its first element, the status, is not 0."""
    if result[0] != 0:
        raise error(
            f"CUDA: a call returned {result[0].name}; the traceback shows the call, but an earlier kernel may have "
            f"caused the error; rerun with CUDA_LAUNCH_BLOCKING=1 to find it"
        )
    return result


class Launcher:
    """Launches an executable graph on the current stream of its device, from any thread.

    The driver call takes a third of the time of `CUDAGraph.replay`.

    executable   handle of the executable graph; its owner destroys it
    """

    __slots__ = ("_context", "_device", "_executable", "_index")

    def __init__(self, executable: Any, device: torch.device) -> None:
        self._executable, self._device, self._index = executable, device, device.index
        with torch.cuda.device(device):
            ensure_context(device.index)
            self._context = int(check(driver.cuCtxGetCurrent())[1])

    def launch(self) -> None:
        """Launch the graph once. Raises: ReplayError: if the driver rejects the launch."""
        failed, context = driver.cuCtxGetCurrent()
        if not failed and int(context) == self._context:
            result = driver.cuGraphLaunch(self._executable, raw_stream(self._index))
            if result[0]:
                check(result, ReplayError)
            return
        with torch.cuda.device(self._device):  # the thread uses a different device, or has made no CUDA call yet
            ensure_context(self._index)
            check(driver.cuGraphLaunch(self._executable, raw_stream(self._index)), ReplayError)


def count_nodes(graph: Any) -> int:
    """Return the number of nodes of a raw graph; a child graph counts as one node."""
    return int(check(driver.cuGraphGetNodes(graph, 0))[-1])


def node_types(graph: Any) -> frozenset[Any]:
    """Return the types of all nodes of a raw graph, including its child graphs."""
    found: set[Any] = set()
    for node in check(driver.cuGraphGetNodes(graph, count_nodes(graph)))[1]:
        kind = check(driver.cuGraphNodeGetType(node))[1]
        found.add(kind)
        if kind == _CHILD:
            found |= node_types(check(driver.cuGraphChildGraphNodeGetGraph(node))[1])
    return frozenset(found)


class LaunchEvent:
    """An event recorded after a launch.

    torch creates the event and waits for it. A driver call records the event, which takes a third of the time of
    `Event.record`. Call `record` while the stream's device is current.
    """

    __slots__ = ("_event", "_handle", "_raw_stream", "_stream")

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._handle: driver.CUevent | None = None
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream: driver.CUstream | None = None

    def query(self) -> bool:
        """Return whether the work before the event has finished; True before the first record()."""
        return self._event.query()  # type: ignore[no-any-return]  # torch does not annotate it

    def synchronize(self) -> None:
        self._event.synchronize()

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """Record the event on `stream`, by default the current stream."""
        if self._handle is None or stream is None:
            self._event.record(stream)  # torch creates the event in its first record()
            self._handle = driver.CUevent(self._event.cuda_event)
            return
        if stream is not self._stream:
            self._stream, self._raw_stream = stream, driver.CUstream(stream.cuda_stream)
        result = driver.cuEventRecord(self._handle, self._raw_stream)
        if result[0]:
            check(result, ReplayError)


class CostMeter:
    """Measures time and device memory since construction, for a GraphReport. Includes all users of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self._free, self._reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)

    def report(self, descriptor: BatchDescriptor, nodes: int) -> GraphReport:
        pool_bytes = torch.cuda.memory_reserved(self._device) - self._reserved
        driver_bytes = self._free - torch.cuda.mem_get_info(self._device)[0] - pool_bytes
        return GraphReport(descriptor, time.perf_counter() - self._start, pool_bytes, driver_bytes, nodes)
