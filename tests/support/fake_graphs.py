"""Graphs of a fake CUDA driver: nodes of every kind, with parameters in read-only memory."""

from __future__ import annotations

import ctypes
import itertools
import random
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from graphrt.capture import raw_graph
from graphrt.capture.inspect import cuda

driver = raw_graph.driver
SUCCESS, FAILURE = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
TYPES, MEMORY, ATTRIBUTES = driver.CUgraphNodeType, driver.CUmemorytype, driver.CUlaunchAttributeID


@dataclass
class FakeGraph:
    nodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class FakeNode:
    """A node: its type, or the number of an unknown type, and the results of calls."""

    type: object
    params: object = None
    attributes: dict[int, bytes] = field(default_factory=dict)
    memory: list[object] = field(default_factory=list)


class FakeGraphs:
    """Builds graphs, and implements the driver calls that read them.

    shuffle   reorders the nodes and edges that the driver lists
    version   version of the driver; 13.2 reports the bodies of conditional nodes
    failing   calls that fail
    missing   functions that the driver lacks
    """

    def __init__(self) -> None:
        self.graphs: dict[int, FakeGraph] = {}
        self.nodes: dict[int, FakeNode] = {}
        self.functions: dict[int, tuple[bytes, list[tuple[int, int]]]] = {}
        self.shuffle: Callable[[list], None] = lambda listed: None
        self.version, self.failing, self.calls = 13000, set[str](), list[str]()
        self.host_memory, self.missing = set[int](), set[str]()
        self._handles = itertools.count(0x1000, 16)
        self._written: list[tuple[ctypes.Array, bytes]] = []
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._attribute = prototype(self._get_attribute)
        pointers = (ctypes.c_void_p,) * 4
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *pointers, ctypes.POINTER(ctypes.c_size_t))
        self._edges = prototype(self._get_edges)

    # -- making

    def graph(self) -> int:
        self.graphs[handle := next(self._handles)] = FakeGraph()
        return handle

    def function(self, symbol: str, sizes: Iterable[int]) -> int:
        """Add a kernel with arguments of these sizes, each aligned to its size, up to 8 bytes."""
        layout, at = [], 0
        for size in sizes:
            at = -(-at // min(size, 8)) * min(size, 8)
            layout.append((at, size))
            at += size
        self.functions[handle := next(self._handles)] = symbol.encode(), layout
        return handle

    def kernel(
        self, graph, function, arguments=(), *, grid=(1, 1, 1), block=(32, 1, 1), shared=0, attributes=None,
        after=(), early=(), blob=False, scattered=False, by_kernel=False,
    ) -> int:  # fmt: skip
        """Add a launch. `early`: the nodes of `after` with programmatic edges. The arguments are in one buffer;
        `blob`: it is passed in `extra`; `scattered`: each argument has its own memory."""
        params, node = driver.CUDA_KERNEL_NODE_PARAMS(), FakeNode(TYPES.CU_GRAPH_NODE_TYPE_KERNEL)
        if by_kernel:
            params.kern = driver.CUkernel(function)
        else:
            params.func = driver.CUfunction(function)
        params.gridDimX, params.gridDimY, params.gridDimZ = grid
        params.blockDimX, params.blockDimY, params.blockDimZ = block
        params.sharedMemBytes = shared
        layout = self.functions[function][1]
        assert [len(one) for one in arguments] == [size for _, size in layout]
        data = bytearray(max((offset + size for offset, size in layout), default=0))
        for (offset, size), one in zip(layout, arguments, strict=True):
            data[offset : offset + size] = one
        if blob:
            buffer, size = self._memory(bytes(data)), ctypes.c_size_t(len(data))
            tags = (ctypes.c_uint64 * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
            node.memory += [buffer, size, tags]
            params.extra = ctypes.addressof(tags)
        elif arguments:
            buffers = [self._memory(one) for one in (arguments if scattered else [bytes(data)])]
            places = map(ctypes.addressof, buffers) if scattered else [
                ctypes.addressof(buffers[0]) + offset for offset, _ in layout
            ]  # fmt: skip
            pointers = (ctypes.c_uint64 * len(layout))(*places)
            node.memory += [*buffers, pointers]
            params.kernelParams = ctypes.addressof(pointers)
        node.params, node.attributes = params, dict(attributes or {})
        return self._add(graph, node, after, early)

    def copy(self, graph, source, target, nbytes, *, kinds=("DEVICE", "DEVICE"), after=(), **fields) -> int:
        params = driver.CUDA_MEMCPY3D()
        for side, kind, address in zip(("src", "dst"), kinds, (source, target), strict=True):
            setattr(params, f"{side}MemoryType", getattr(MEMORY, f"CU_MEMORYTYPE_{kind}"))
            setattr(params, f"{side}Host" if kind == "HOST" else f"{side}Device", address)
        params.WidthInBytes, params.Height, params.Depth = nbytes, 1, 1
        for name, value in fields.items():
            setattr(params, name, value)
        return self._add(graph, FakeNode(TYPES.CU_GRAPH_NODE_TYPE_MEMCPY, params), after)

    def fill(self, graph, target, value, size, width, *, height=1, pitch=0) -> int:
        params = driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value, params.elementSize = driver.CUdeviceptr(target), value, size
        params.width, params.height, params.pitch = width, height, pitch
        return self._add(graph, FakeNode(TYPES.CU_GRAPH_NODE_TYPE_MEMSET, params), ())

    def other(self, graph, type_, params=None, *, after=()) -> int:
        """Add a node of another type, by name or number; `params` is the result of the call that reads it."""
        named = getattr(TYPES, f"CU_GRAPH_NODE_TYPE_{type_}") if isinstance(type_, str) else type_
        return self._add(graph, FakeNode(named, params), after)

    def conditional(self, graph, kind: int, bodies: list[int]) -> int:
        params = types.SimpleNamespace(type=kind, size=len(bodies), phGraph_out=[driver.CUgraph(b) for b in bodies])
        return self.other(graph, "CONDITIONAL", types.SimpleNamespace(conditional=params))

    def depend(self, graph, source, target, kind=0) -> None:
        self.graphs[graph].edges.append((source, target, kind))

    def unwritten(self) -> bool:
        """Return whether the driver's memory is unchanged."""
        return all(bytes(array) == before for array, before in self._written)

    def _memory(self, data: bytes) -> ctypes.Array:
        array = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        self._written.append((array, data))
        return array

    def _add(self, graph, node: FakeNode, after, early=()) -> int:
        self.nodes[handle := next(self._handles)] = node
        self.graphs[graph].nodes.append(handle)
        self.graphs[graph].edges += [(source, handle, int(source in early)) for source in after]
        return handle

    # -- answering

    def __getattr__(self, name: str) -> object:
        if name.startswith("_call_") or not name.startswith("cu"):
            return getattr(driver, name)
        answer = getattr(type(self), f"_call_{name}", None)
        assert answer is not None, f"{name} is no call that reads a graph"

        def call(*arguments: object) -> tuple[object, ...]:
            self.calls.append(name)
            if name in self.failing:
                return (FAILURE, None, None)
            return answer(self, *arguments)

        return call

    def _call_cuGraphGetNodes(self, graph, count):
        listed = list(self.graphs[int(graph)].nodes)
        self.shuffle(listed)
        return SUCCESS, [driver.CUgraphNode(node) for node in listed][:count], len(listed)

    def _get_edges(self, graph: int, sources, targets, data, count) -> int:
        """Like the driver: return the number of edges without arrays, otherwise fill the arrays."""
        self.calls.append("cuGraphGetEdges")
        if "cuGraphGetEdges" in self.failing:
            return int(FAILURE)
        listed = list(self.graphs[graph].edges)
        self.shuffle(listed)
        if not sources:
            assert not targets
            assert not data
            count[0] = len(listed)
            return 0
        for at, (source, target, early) in enumerate(listed[: count[0]]):
            ctypes.c_uint64.from_address(sources + 8 * at).value = source
            ctypes.c_uint64.from_address(targets + 8 * at).value = target
            kind, port = EDGES[early]
            ctypes.memmove(data + 8 * at, bytes((port, 0, kind, 0, 0, 0, 0, 0)), 8)
        count[0] = min(count[0], len(listed))
        return 0

    def _call_cuGraphNodeGetType(self, node):
        type_ = self.nodes[int(node)].type
        return SUCCESS, type_ if isinstance(type_, TYPES) else TYPES(type_)  # as the bindings: raises ValueError

    def _params(self, node):
        return SUCCESS, self.nodes[int(node)].params

    _call_cuGraphKernelNodeGetParams = _call_cuGraphMemcpyNodeGetParams = _params
    _call_cuGraphMemsetNodeGetParams = _call_cuGraphHostNodeGetParams = _params
    _call_cuGraphChildGraphNodeGetGraph = _call_cuGraphMemAllocNodeGetParams = _params
    _call_cuGraphMemFreeNodeGetParams = _params
    _call_cuGraphEventRecordNodeGetEvent = _call_cuGraphEventWaitNodeGetEvent = _params

    def _call_cuGraphNodeGetParams(self, node):
        if self.version < 13020:
            raise RuntimeError('Function "cuGraphNodeGetParams" not found')
        return self._params(node)

    def _name(self, function):
        found = self.functions.get(int(function))
        return (SUCCESS, found[0]) if found else (FAILURE, None)

    def _param_info(self, function, index):
        layout = self.functions[int(function)][1]
        return (SUCCESS, *layout[index]) if index < len(layout) else (FAILURE, 0, 0)

    _call_cuFuncGetName = _call_cuKernelGetName = _name
    _call_cuFuncGetParamInfo = _call_cuKernelGetParamInfo = _param_info

    def _call_cuPointerGetAttribute(self, attribute, address):
        assert attribute == driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        return SUCCESS, MEMORY.CU_MEMORYTYPE_HOST if address in self.host_memory else MEMORY.CU_MEMORYTYPE_DEVICE

    def _call_cuGetProcAddress(self, symbol, version, flags):
        assert flags == 0
        found = {(b"cuGraphKernelNodeGetAttribute", 11000): self._attribute, (b"cuGraphGetEdges", 12030): self._edges}
        if symbol.decode() in self.missing:
            return FAILURE, None, None
        return SUCCESS, ctypes.cast(found[symbol, version], ctypes.c_void_p).value, None

    def _get_attribute(self, node: int, kind: int, value: int) -> int:
        self.calls.append("cuGraphKernelNodeGetAttribute")
        data = self.nodes[node].attributes.get(kind, DEFAULTS.get(kind))
        if data is None:
            return int(FAILURE)
        ctypes.memmove(value, data.ljust(64, b"\xee"), 64)  # what a call leaves behind a value means nothing
        return 0


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """Route driver calls of inspection to the returned fake."""
    found = FakeGraphs()
    for module in (raw_graph, cuda):
        monkeypatch.setattr(module, "driver", found)
    return found


def word(value: int) -> bytes:
    """Eight bytes of an address or a number."""
    return value.to_bytes(8, "little")


def number(value: int) -> bytes:
    """Four bytes of an int."""
    return value.to_bytes(4, "little", signed=True)


DEFAULTS = {
    int(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION): number(1) * 3,
    int(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_COOPERATIVE): number(0),
    int(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_PRIORITY): number(0),
    int(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW): bytes(28),
    int(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN): number(0),
    int(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP): bytes((0, 1)),
    int(ATTRIBUTES.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT): number(-1),
}
"""Attributes of launches that set none. This driver does not know the other attributes."""


EDGES = ((0, 0), (1, 1), (0, 2), (1, 0))
"""Type and port of edges: full, programmatic, waiting for the start, and another one."""


def shuffler(seed: int) -> Callable[[list], None]:
    """Return a function that reorders lists, differently in each call."""
    return random.Random(seed).shuffle
