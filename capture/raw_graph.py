"""What capture asks of the CUDA driver itself: checked calls, the nodes of a graph, the cost of making one."""

from __future__ import annotations

import time
from typing import Any

import torch
from cuda.bindings import driver

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport
from graphrt.kernels.errors import CaptureError, GraphRTError

_CHILD = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH


def check(result: tuple[Any, ...], error: type[GraphRTError] = CaptureError) -> tuple[Any, ...]:
    """What a call of the driver returned, its status first; raises `error` for any status but success."""
    if int(result[0]) != 0:
        raise error(f"CUDA driver: expected success, got {result[0]!r}")
    return result


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
