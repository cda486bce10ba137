"""What capture asks of the CUDA driver itself: checked calls, the nodes of a graph, the cost of making one."""

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
    """What a call of the driver returned, its status first; raises `error` for any status but success."""
    if result[0] != 0:
        raise error(f"CUDA driver: expected success, got {result[0]!r}")
    return result


class Launcher:
    """Launches an executable graph on the current stream of its device, from any thread: one call of the driver, a
    third of the time that torch takes.

    executable   its handle; whoever owns it destroys it
    """

    __slots__ = ("_context", "_device", "_executable", "_index")

    def __init__(self, executable: Any, device: torch.device) -> None:
        self._executable, self._device, self._index = executable, device, device.index
        with torch.cuda.device(device):
            ensure_context(device.index)
            self._context = int(check(driver.cuCtxGetCurrent())[1])

    def launch(self) -> None:
        """Raises: ReplayError where the driver refuses."""
        failed, context = driver.cuCtxGetCurrent()
        if not failed and int(context) == self._context:
            result = driver.cuGraphLaunch(self._executable, raw_stream(self._index))
            if result[0]:
                check(result, ReplayError)
            return
        with torch.cuda.device(self._device):  # the thread is at another device, or has made no CUDA call yet
            ensure_context(self._index)
            check(driver.cuGraphLaunch(self._executable, raw_stream(self._index)), ReplayError)


def current_stream(device: torch.device) -> int:
    """Handle of the stream that is current on a device, in the calling thread."""
    return raw_stream(device.index)


def count_nodes(graph: Any) -> int:
    """Nodes of a raw graph; a child graph is one node."""
    return int(check(driver.cuGraphGetNodes(graph, 0))[-1])


def node_types(graph: Any) -> frozenset[Any]:
    """Types of all nodes of a raw graph, those in its child graphs included."""
    found: set[Any] = set()
    for node in check(driver.cuGraphGetNodes(graph, count_nodes(graph)))[1]:
        kind = check(driver.cuGraphNodeGetType(node))[1]
        found.add(kind)
        if kind == _CHILD:
            found |= node_types(check(driver.cuGraphChildGraphNodeGetGraph(node))[1])
    return frozenset(found)


class LaunchEvent:
    """An event behind a launch. torch makes it and waits for it; one call of the driver records it, a third of the time
    that torch takes. Must be recorded where the stream's device is the current one."""

    __slots__ = ("_event", "_handle", "_raw_stream", "_stream")

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._handle: driver.CUevent | None = None
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream: driver.CUstream | None = None

    def query(self) -> bool:
        """Whether what was queued before it has ended; True before the first record."""
        return self._event.query()  # type: ignore[no-any-return]  # torch does not annotate it

    def synchronize(self) -> None:
        self._event.synchronize()

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """Behind what is queued on `stream`; None: on the current one."""
        if self._handle is None or stream is None:
            self._event.record(stream)  # torch makes an event where it is first recorded
            self._handle = driver.CUevent(self._event.cuda_event)
            return
        if stream is not self._stream:
            self._stream, self._raw_stream = stream, driver.CUstream(stream.cuda_stream)
        result = driver.cuEventRecord(self._handle, self._raw_stream)
        if result[0]:
            check(result, ReplayError)


class CostMeter:
    """Time and device memory from now on, for a GraphReport. Other users of the device are counted too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self._free, self._reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)

    def report(self, descriptor: BatchDescriptor, nodes: int) -> GraphReport:
        pool_bytes = torch.cuda.memory_reserved(self._device) - self._reserved
        driver_bytes = self._free - torch.cuda.mem_get_info(self._device)[0] - pool_bytes
        return GraphReport(descriptor, time.perf_counter() - self._start, pool_bytes, driver_bytes, nodes)
