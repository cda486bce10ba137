"""A fake CUDA driver: it records calls, and fails the calls that a test names."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

from graphrt.capture import loop as cuda_loop
from graphrt.capture import raw_graph, recorder


class FakeDriver:
    """Graphs are lists of node types; a child graph or body is a nested list. Structs are those of the bindings."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = ""

    def __getattr__(self, name: str) -> object:
        value = getattr(raw_graph_driver, name)
        if not name.startswith("cu"):
            return value

        def call(*arguments: object) -> tuple[object, ...]:
            self.calls.append(name)
            status = SUCCESS if name != self.failing else FAILURE
            if name == "cuGraphGetNodes":
                nodes = arguments[0]
                return (status, list(enumerate(nodes)) if arguments[1] else [], len(nodes))
            if name == "cuGraphNodeGetType":
                kind = arguments[0][1]
                return status, TYPES.CU_GRAPH_NODE_TYPE_GRAPH if isinstance(kind, list) else kind
            if name == "cuGraphChildGraphNodeGetGraph":
                return status, arguments[0][1]
            if name == "cuGraphAddNode":
                assert arguments[4].conditional.size == 1
                assert int(arguments[4].conditional.handle) == 9
            if name == "cuGraphAddKernelNode":
                pointers = ctypes.cast(arguments[3].kernelParams, ctypes.POINTER(ctypes.c_void_p))
                words = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_uint64))
                self.kernel = (words[0], words[1])
            return status, 9

        return call


raw_graph_driver = raw_graph.driver
SUCCESS, FAILURE = raw_graph_driver.CUresult.CUDA_SUCCESS, raw_graph_driver.CUresult.CUDA_ERROR_INVALID_VALUE
TYPES = raw_graph_driver.CUgraphNodeType
KERNEL, MEMSET = TYPES.CU_GRAPH_NODE_TYPE_KERNEL, TYPES.CU_GRAPH_NODE_TYPE_MEMSET


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Route driver calls of capture to the returned fake."""
    found = FakeDriver()
    for module in (raw_graph, cuda_loop, recorder):
        monkeypatch.setattr(module, "driver", found)
    monkeypatch.setattr(cuda_loop, "load", lambda variant, index: raw_graph_driver.CUfunction(1))
    monkeypatch.setattr(raw_graph, "ensure_context", lambda index: None)
    for module in (raw_graph, cuda_loop):
        monkeypatch.setattr(module, "raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    return found


class Template:
    """Stands for a torch.cuda.CUDAGraph with these nodes."""

    def __init__(self, *nodes: object) -> None:
        self.nodes = list(nodes)

    def raw_cuda_graph(self) -> list[object]:
        return self.nodes
