"""Read a captured CUDA graph into a GraphView, using driver calls.

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    view = inspect_graph(graph)

Arguments are copied from the driver's memory, so views do not refer to this memory, and never write it. Only arguments
of Triton kernels have names (`triton_kernels.py`).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch
from cuda.bindings import driver

from graphrt.capture.inspect.op_trace_view import view_of_loop, view_of_op_trace
from graphrt.capture.inspect.order import topological_order
from graphrt.capture.inspect.triton_kernels import TritonKernels
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand
from graphrt.capture.op_trace import OpTrace, OpTraceLoop
from graphrt.capture.raw_graph import check, count_nodes
from graphrt.kernels.checks import shown
from graphrt.kernels.errors import CaptureError, ConfigError, GraphRTError

_OneOf = driver.CUgraphNodeType
_Memory = driver.CUmemorytype
_Edge = tuple[int, int, bool]
"""Handles of both nodes, and whether the edge is programmatic."""

_CONDITIONS = {0: "if", 1: "while", 2: "switch"}
_UNREADABLE = (RuntimeError, ValueError, AttributeError, TypeError)
"""Errors of the driver and its bindings for unknown objects. graphrt's errors are RuntimeErrors too."""


def inspect_graph(graph: Any) -> GraphView:
    """Return the nodes of a captured graph in topological order, including child graphs and conditional bodies.

    graph   a torch.cuda.CUDAGraph(keep_graph=True) whose capture has ended, a graph handle (an int or a CUgraph
            of cuda.bindings), a graph or a loop of a graphrt recorder, or an op trace

    `Node.remark` lists parts that cannot be read: unknown node types, and bodies of conditional nodes on drivers before
    13.2. The call is read-only, takes about 50 us per node, and must not run while the graph is modified.

    Raises:
        ConfigError: if `graph` is anything else.
        CaptureError: if torch did not keep the graph, the graph is closed, or the driver cannot list its nodes.
    """
    if isinstance(graph, OpTrace):
        return view_of_op_trace(graph)
    if isinstance(graph, OpTraceLoop):
        return view_of_loop(graph)
    raw = _handle(graph)
    conditionals = graph.raw_conditionals() if hasattr(graph, "raw_conditionals") else {}
    try:
        return _with_numbered_events(_Walk(conditionals).view(raw), {})
    except GraphRTError:
        raise
    except RuntimeError as error:  # raised by the bindings if there is no driver
        raise CaptureError(
            f"CUDA driver: not available ({str(error).splitlines()[0]}); install the NVIDIA driver"
        ) from error


def _handle(graph: Any) -> Any:
    if hasattr(graph, "raw_cuda_graph"):
        try:
            return graph.raw_cuda_graph()
        except CaptureError:
            raise
        except RuntimeError as error:
            raise CaptureError(
                f"graph: torch has not kept the graph, or its capture has not ended ({str(error).splitlines()[0]}); "
                f"create it "
                "with torch.cuda.CUDAGraph(keep_graph=True) and capture first"
            ) from error
    if isinstance(graph, (driver.CUgraph, int)) and not isinstance(graph, bool) and int(graph):
        return graph
    raise ConfigError(
        f"graph: expected a torch.cuda.CUDAGraph, its raw handle, or a graph of a recorder, got {shown(graph)}; "
        "pass a captured graph"
    )


@dataclass(frozen=True, slots=True)
class _Function:
    """A kernel function and its arguments, shared by all nodes that launch it. `unread`: the driver's error, or ""."""

    symbol: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    pointers: tuple[tuple[int, ...] | None, ...]
    unread: str = ""


class _Walk:
    """Reads one graph and its nested graphs.

    conditionals   kind and bodies by handle, for conditional nodes known to the caller
    """

    def __init__(self, conditionals: Mapping[int, tuple[str, tuple[Any, ...]]]) -> None:
        self._conditionals = conditionals
        self._functions: dict[tuple[int, int], _Function] = {}
        self._attributes, self._edges, self._triton = _AttributeReader(), _EdgeReader(), TritonKernels()

    def view(self, graph: Any) -> GraphView:
        count = count_nodes(graph)
        handles = check(driver.cuGraphGetNodes(graph, count))[1][:count] if count else []
        nodes = [self._node(handle) for handle in handles]
        index = {int(handle): at for at, handle in enumerate(handles)}
        links = _links(self._edges.read(graph), index)
        order = topological_order(len(nodes), list(links))
        place = {old: new for new, old in enumerate(order)}
        edges = sorted((place[source], place[target], early) for (source, target), early in links.items())
        return GraphView(tuple(nodes[at] for at in order), tuple(Edge(*edge) for edge in edges))

    def _node(self, handle: Any) -> Node:
        """Return one node. An error is stored in its remark, so that the other nodes can be read."""
        kind, name = NodeKind.OTHER, "unknown node"
        try:
            type_ = check(driver.cuGraphNodeGetType(handle))[1]
            if type_ not in _READERS:
                name = type_.name.removeprefix("CU_GRAPH_NODE_TYPE_").replace("_", " ").lower()
                return Node(kind, name, remark="nodes of this type are not supported")
            kind, read = _READERS[type_]
            name = kind.value
            return read(self, handle)
        except _UNREADABLE as error:
            return Node(kind, name, remark=f"could not be read: {error}")

    def _kernel(self, handle: Any) -> Node:
        params = check(driver.cuGraphKernelNodeGetParams(handle))[1]  # owns the memory of `func` and `kern`
        key = int(params.func), int(params.kern)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = _function(params, self._triton)
        arguments, remark = _read_arguments(params, function)
        return Node(
            NodeKind.KERNEL,
            function.name,
            symbol=function.symbol,
            grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
            block=(params.blockDimX, params.blockDimY, params.blockDimZ),
            shared_bytes=params.sharedMemBytes,
            attributes=self._attributes.read(handle),
            arguments=arguments,
            remark=remark or function.unread,
        )

    def _memcpy(self, handle: Any) -> Node:
        params = check(driver.cuGraphMemcpyNodeGetParams(handle))[1]
        extents = (params.WidthInBytes, max(params.Height, 1), max(params.Depth, 1))
        (source, place), (target, where) = (_copy_side(params, side, extents) for side in ("src", "dst"))
        names = ("width", "height", "depth")
        scalars = [(name, str(extent)) for name, extent in zip(names, extents, strict=True)]
        scalars += [("src pitch", str(params.srcPitch)), ("dst pitch", str(params.dstPitch))]
        arrays = "array" in (place, where)
        return Node(
            NodeKind.MEMCPY,
            f"memcpy {place} to {where}",
            operands=(source, target),
            scalars=tuple(scalars) if extents[1] * extents[2] > 1 else (),
            remark="the address of an array is unknown" if arrays else "",
        )

    def _memset(self, handle: Any) -> Node:
        params = check(driver.cuGraphMemsetNodeGetParams(handle))[1]
        height, size = max(params.height, 1), params.elementSize
        nbytes = params.width * size + (height - 1) * params.pitch if params.width else 0
        scalars = [("value", hex(params.value)), ("element size", str(size)), ("width", str(params.width))]
        if height > 1:
            scalars += [("height", str(height)), ("pitch", str(params.pitch))]
        target = Operand("dst", int(params.dst), nbytes, written=True)
        return Node(NodeKind.MEMSET, "memset", operands=(target,), scalars=tuple(scalars))

    def _child(self, handle: Any) -> Node:
        body = check(driver.cuGraphChildGraphNodeGetGraph(handle))[1]
        return Node(NodeKind.CHILD, "child graph", bodies=(self.view(body),))

    def _conditional(self, handle: Any) -> Node:
        if known := self._conditionals.get(int(handle)):
            name, bodies = known
        else:
            try:
                params = check(driver.cuGraphNodeGetParams(handle))[1]  # owns the memory of its fields
            except _UNREADABLE:
                return Node(NodeKind.CONDITIONAL, "conditional", remark="drivers before 13.2 do not show its bodies")
            name = _CONDITIONS.get(int(params.conditional.type), "conditional")
            bodies = tuple(driver.CUgraph(int(body)) for body in params.conditional.phGraph_out)
        return Node(NodeKind.CONDITIONAL, name, bodies=tuple(map(self.view, bodies)))

    def _host(self, handle: Any) -> Node:
        params = check(driver.cuGraphHostNodeGetParams(handle))[1]
        symbol, library = _symbol_at(int(params.fn))
        return Node(
            NodeKind.HOST,
            _demangled(symbol) if symbol else "host function",
            symbol=symbol,
            scalars=(("library", library),) if library else (),
            remark="the memory that a host function accesses is unknown",
        )

    def _record(self, handle: Any) -> Node:
        return _event_node(NodeKind.EVENT_RECORD, driver.cuGraphEventRecordNodeGetEvent(handle))

    def _wait(self, handle: Any) -> Node:
        return _event_node(NodeKind.EVENT_WAIT, driver.cuGraphEventWaitNodeGetEvent(handle))

    def _alloc(self, handle: Any) -> Node:
        params = check(driver.cuGraphMemAllocNodeGetParams(handle))[1]
        memory = Operand("memory", int(params.dptr), int(params.bytesize), written=True)
        return Node(NodeKind.ALLOC, "allocation", operands=(memory,))

    def _free(self, handle: Any) -> Node:
        address = int(check(driver.cuGraphMemFreeNodeGetParams(handle))[1])
        return Node(NodeKind.FREE, "free", operands=(Operand("memory", address, 0),))

    def _empty(self, handle: Any) -> Node:
        return Node(NodeKind.EMPTY, "empty")


_READERS: dict[Any, tuple[NodeKind, Callable[[_Walk, Any], Node]]] = {
    _OneOf.CU_GRAPH_NODE_TYPE_KERNEL: (NodeKind.KERNEL, _Walk._kernel),
    _OneOf.CU_GRAPH_NODE_TYPE_MEMCPY: (NodeKind.MEMCPY, _Walk._memcpy),
    _OneOf.CU_GRAPH_NODE_TYPE_MEMSET: (NodeKind.MEMSET, _Walk._memset),
    _OneOf.CU_GRAPH_NODE_TYPE_GRAPH: (NodeKind.CHILD, _Walk._child),
    _OneOf.CU_GRAPH_NODE_TYPE_CONDITIONAL: (NodeKind.CONDITIONAL, _Walk._conditional),
    _OneOf.CU_GRAPH_NODE_TYPE_EMPTY: (NodeKind.EMPTY, _Walk._empty),
    _OneOf.CU_GRAPH_NODE_TYPE_HOST: (NodeKind.HOST, _Walk._host),
    _OneOf.CU_GRAPH_NODE_TYPE_EVENT_RECORD: (NodeKind.EVENT_RECORD, _Walk._record),
    _OneOf.CU_GRAPH_NODE_TYPE_WAIT_EVENT: (NodeKind.EVENT_WAIT, _Walk._wait),
    _OneOf.CU_GRAPH_NODE_TYPE_MEM_ALLOC: (NodeKind.ALLOC, _Walk._alloc),
    _OneOf.CU_GRAPH_NODE_TYPE_MEM_FREE: (NodeKind.FREE, _Walk._free),
}


def _links(edges: Sequence[_Edge], index: Mapping[int, int]) -> dict[tuple[int, int], bool]:
    """Return the node indices of each edge, and whether it is programmatic. A full edge replaces a programmatic one."""
    found: dict[tuple[int, int], bool] = {}
    for source, target, early in edges:
        ends = index[source], index[target]
        found[ends] = early and found.get(ends, True)
    return found


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_uint8),
        ("to_port", ctypes.c_uint8),
        ("type", ctypes.c_uint8),
        ("_", ctypes.c_uint8 * 5),
    )


class _EdgeReader:
    """Reads edges with direct driver calls, because bindings before 13.3 return freed edge data."""

    def __init__(self) -> None:
        self._get = _function_of_driver(
            b"cuGraphGetEdges", 12030, *(ctypes.c_void_p,) * 4, ctypes.POINTER(ctypes.c_size_t)
        )

    def read(self, graph: Any) -> list[_Edge]:
        """Return the edges. Raises: CaptureError: if the call fails or the driver is older than CUDA 12.3."""
        count = ctypes.c_size_t()
        self._ask(graph, None, None, None, count)
        length = count.value
        ends, data = [(ctypes.c_uint64 * length)() for _ in range(2)], (_EdgeData * length)()
        if length:
            self._ask(graph, *ends, data, count)
        found = zip(*ends, data, strict=True)
        return [(source, target, bool(kind.type or kind.from_port)) for source, target, kind in found][: count.value]

    def _ask(self, graph: Any, *arguments: Any) -> None:
        if self._get is None:
            raise CaptureError("CUDA driver: versions before CUDA 12.3 cannot list edges; update the driver")
        check((driver.CUresult(self._get(int(graph), *arguments)),))


# -- kernels


def _function(params: Any, triton: TritonKernels) -> _Function:
    """Return the kernel function of a node. Raises: CaptureError: if the driver rejects both of the node's handles."""
    handle, name_of, info_of = params.kern, driver.cuKernelGetName, driver.cuKernelGetParamInfo
    if not int(handle) or int(name_of(handle)[0]) != 0:
        handle, name_of, info_of = params.func, driver.cuFuncGetName, driver.cuFuncGetParamInfo
    symbol = check(name_of(handle))[1].decode(errors="replace")
    layout: list[tuple[int, int]] = []
    while int((answer := info_of(handle, len(layout)))[0]) == 0:
        layout.append((int(answer[1]), int(answer[2])))
    at_the_end = int(answer[0]) == int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    unread = "" if at_the_end else f"the layout of its arguments could not be read: {answer[0]!r}"
    offsets, sizes = zip(*layout, strict=True) if layout else ((), ())
    known = triton.arguments(symbol, int(params.func), sizes) or (("", None),) * len(layout)
    names, pointers = zip(*known, strict=True) if layout else ((), ())
    return _Function(symbol, _demangled(symbol), offsets, sizes, names, pointers, unread)


@lru_cache(maxsize=4096)
def _demangled(symbol: str) -> str:
    # Names without the prefix could be demangled as types: a Triton kernel called "f" would become "float".
    return str(torch._C._demangle(symbol)) if symbol.startswith("_Z") else symbol


def _read_arguments(params: Any, function: _Function) -> tuple[tuple[Argument, ...], str]:
    """Return the arguments of a launch, and a remark on arguments that could not be read."""
    offsets, sizes = function.offsets, function.sizes
    if params.kernelParams and offsets:
        places = (ctypes.c_uint64 * len(offsets)).from_address(params.kernelParams)[:]
        first = places[0]
        if first and places == [first + offset - offsets[0] for offset in offsets]:  # contiguous, as in one buffer
            data = _cut(ctypes.string_at(first, offsets[-1] - offsets[0] + sizes[-1]), offsets, sizes, offsets[0])
        else:
            data = [ctypes.string_at(at, size) if at else b"" for at, size in zip(places, sizes, strict=True)]
    elif params.extra:
        blob = _blob(params.extra)
        if not offsets or any(offset + size > len(blob) for offset, size in zip(offsets, sizes, strict=True)):
            return (Argument(0, blob),), ""
        data = _cut(blob, offsets, sizes)
    else:
        return (), "the driver reports no arguments" if offsets else ""
    return tuple(map(Argument, offsets, data, function.names, function.pointers)), ""


def _cut(blob: bytes, offsets: Sequence[int], sizes: Sequence[int], start: int = 0) -> list[bytes]:
    """Split a buffer whose first byte is at offset `start`."""
    return [blob[offset - start : offset - start + size] for offset, size in zip(offsets, sizes, strict=True)]


def _blob(extra: int) -> bytes:
    """Return the argument buffer from the `extra` list: pairs of tag and pointer, terminated by 0."""
    words = (ctypes.c_uint64 * 9).from_address(extra)
    buffer = size = at = 0
    while at < 8 and (tag := words[at]):
        if tag == 1:
            buffer = words[at + 1]
        elif tag == 2:
            size = ctypes.c_size_t.from_address(words[at + 1]).value
        at += 2
    return ctypes.string_at(buffer, size) if buffer else b""


def _function_of_driver(name: bytes, version: int, *arguments: Any) -> Callable[..., int] | None:
    """Return a driver function of a CUDA version; None if the driver lacks it. The function returns a status."""
    status, address, *_ = driver.cuGetProcAddress(name, version, 0)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address)) if int(status) == 0 and address else None


class _AttributeReader:
    """Reads launch attributes with direct driver calls, because the bindings create 70 objects per value."""

    def __init__(self) -> None:
        arguments = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        self._get = _function_of_driver(b"cuGraphKernelNodeGetAttribute", 11000, *arguments)
        self._values = ctypes.create_string_buffer(_VALUE_BYTES * len(_ATTRIBUTES))
        start = ctypes.addressof(self._values)
        self._asked = [(int(kind), start + _VALUE_BYTES * at) for at, (kind, _, _) in enumerate(_ATTRIBUTES)]
        self._read: dict[bytes, dict[str, str]] = {}  # most launches of a graph have the same attributes

    def read(self, handle: Any) -> dict[str, str]:
        """Return the attributes that differ from their defaults, by name. Attributes unknown to the driver are
        skipped."""
        if (get := self._get) is None:
            return {}
        node = int(handle)
        answers = bytes(get(node, kind, at) == 0 for kind, at in self._asked)
        key = answers + self._values.raw
        if (found := self._read.get(key)) is None:
            values = (self._values.raw[at : at + _VALUE_BYTES] for at in range(0, len(self._values), _VALUE_BYTES))
            found = self._read[key] = {
                name: shown
                for told, value, (_, name, text) in zip(answers, values, _ATTRIBUTES, strict=True)
                if told and (shown := text(value))
            }
        return found


_VALUE_BYTES = 64
_Id = driver.CUlaunchAttributeID


def _number(*default: int) -> Callable[[bytes], str]:
    def text(value: bytes) -> str:
        (number,) = struct.unpack_from("<i", value)
        return "" if number in default else str(number)

    return text


def _extents(value: bytes) -> str:
    extents = struct.unpack_from("<3I", value)
    return "" if extents in ((0, 0, 0), (1, 1, 1)) else "x".join(map(str, extents))


def _window(value: bytes) -> str:
    address, nbytes, ratio, hit, miss = struct.unpack_from("<QQfii", value)
    return f"{nbytes} bytes at {address:#x}, hit ratio {ratio:g}, {hit} else {miss}" if nbytes else ""


def _domain_map(value: bytes) -> str:
    domains = tuple(value[:2])
    return "" if domains in ((0, 0), (0, 1)) else f"{domains[0]} {domains[1]}"


_ATTRIBUTES: tuple[tuple[Any, str, Callable[[bytes], str]], ...] = (
    (_Id.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, "cluster", _extents),
    (_Id.CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION, "preferred cluster", _extents),
    (_Id.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, "cluster scheduling", _number(0, 1)),
    (_Id.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, "cooperative", _number(0)),
    (_Id.CU_LAUNCH_ATTRIBUTE_PRIORITY, "priority", _number(0)),
    (_Id.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, "access policy", _window),
    (_Id.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, "memory domain", _number(0)),
    (_Id.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, "memory domain map", _domain_map),
    (_Id.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, "shared memory carveout", _number(0, -1)),
    (_Id.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, "device-updatable", _number(0)),
)


# -- other nodes


def _copy_side(params: Any, side: str, extents: tuple[int, int, int]) -> tuple[Operand, str]:
    """Return one side of a copy, and the kind of its memory: "host", "device" or "array"."""
    width, height, depth = extents
    kind, written = getattr(params, f"{side}MemoryType"), side == "dst"
    if kind is None:  # newer bindings raise this error
        raise ValueError("unknown CUmemorytype")
    if kind == _Memory.CU_MEMORYTYPE_ARRAY:
        return Operand(side, 0, width * height * depth, written=written), "array"
    base = int(getattr(params, f"{side}Host" if kind == _Memory.CU_MEMORYTYPE_HOST else f"{side}Device"))
    host = kind == _Memory.CU_MEMORYTYPE_HOST or (kind == _Memory.CU_MEMORYTYPE_UNIFIED and _on_host(base))
    pitch = getattr(params, f"{side}Pitch") or width
    plane = pitch * (getattr(params, f"{side}Height") or height)
    first = getattr(params, f"{side}XInBytes") + getattr(params, f"{side}Y") * pitch
    first += getattr(params, f"{side}Z") * plane
    nbytes = (depth - 1) * plane + (height - 1) * pitch + width if width else 0
    return Operand(side, base + first, nbytes, host, written), "host" if host else "device"


def _on_host(address: int) -> bool:
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, kind = driver.cuPointerGetAttribute(attribute, address)
    return int(status) != 0 or int(kind) == int(_Memory.CU_MEMORYTYPE_HOST)


class _DlInfo(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("library", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _symbol_at(address: int) -> tuple[str, str]:
    """Return the names of the function at an address of this process and of its library; "" if unknown."""
    info = _DlInfo()
    find = getattr(ctypes.CDLL(None), "dladdr", None)
    if find is None or not find(ctypes.c_void_p(address), ctypes.byref(info)):
        return "", ""
    return (info.symbol or b"").decode(errors="replace"), PurePath((info.library or b"").decode(errors="replace")).name


def _event_node(kind: NodeKind, answer: tuple[Any, ...]) -> Node:
    return Node(kind, kind.value, scalars=(("event", str(int(check(answer)[1]))),))


def _with_numbered_events(view: GraphView, numbers: dict[str, str]) -> GraphView:
    """Number events by first use, because their handles differ between captures."""
    nodes = []
    for node in view.nodes:
        if node.bodies:
            node = replace(node, bodies=tuple(_with_numbered_events(body, numbers) for body in node.bodies))
        elif node.kind in (NodeKind.EVENT_RECORD, NodeKind.EVENT_WAIT) and node.scalars:
            handle = node.scalars[0][1]
            node = replace(node, scalars=(("event", numbers.setdefault(handle, str(len(numbers)))),))
        nodes.append(node)
    return replace(view, nodes=tuple(nodes))
