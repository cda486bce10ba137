"""Artificial graphs and allocators, in which tests of the audit know every address."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from graphrt.capture.inspect.memory import Owner, Region
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand

BASE = 0x7F20_0000_0000
X = Region("x", Owner.STATIC, BASE, 4096)
WEIGHT = Region("layer.weight", Owner.WEIGHT, BASE + 0x10000, 1 << 16)
POOL = Region("pool of the graph", Owner.POOL, BASE + 0x100000, 1 << 20)
IDLE = Region("pool of the graph", Owner.POOL, POOL.end, 1 << 20, live=False)
LEAK = Region("block of torch's allocator", Owner.ALLOCATOR, BASE + 0x400000, 2048)
GONE = Region("freed block of torch's allocator", Owner.ALLOCATOR, LEAK.end, 2048, live=False)
STAGING = Region("staging", Owner.HOST, BASE + 0x800000, 256)
REGIONS = (X, WEIGHT, POOL, IDLE, LEAK, GONE, STAGING)


class FakeDriver:
    """Knows these regions, and records the addresses that it is asked about."""

    def __init__(self, *regions: Region) -> None:
        self.regions, self.asked = regions, list[int]()

    def __call__(self, address: int) -> Region | None:
        self.asked.append(address)
        return next((r for r in self.regions if r.address <= address < r.end), None)


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def kernel(*blobs: bytes, name: str = "kernel", pointers: Iterable[tuple[int, ...] | None] = ()) -> Node:
    """A kernel with these arguments and their pointer offsets."""
    told = [*pointers, *[None] * len(blobs)]
    arguments = tuple(Argument(8 * at, blob, pointers=told[at]) for at, blob in enumerate(blobs))
    return Node(NodeKind.KERNEL, name, grid=(1, 1, 1), block=(32, 1, 1), arguments=arguments)


def copy(src: Operand, dst: Operand) -> Node:
    return Node(NodeKind.MEMCPY, "memcpy", operands=(src, dst))


def op(*operands: Operand, scalars: tuple[tuple[str, str], ...] = ()) -> Node:
    return Node(NodeKind.OP, "aten.add.Tensor", operands=operands, scalars=scalars)


def src(address: int, nbytes: int = 8, host: bool = False) -> Operand:
    return Operand("src", address, nbytes, host)


def dst(address: int, nbytes: int = 8, host: bool = False) -> Operand:
    return Operand("dst", address, nbytes, host, written=True)


def graph(*nodes: Node, edges: tuple[Edge, ...] = ()) -> GraphView:
    return GraphView(nodes, edges)


def segment(address: int, *blocks: tuple[int, str], pool: tuple[int, int] = (0, 0), frames: object = ()) -> dict:
    """A row of `torch.cuda.memory_snapshot` with blocks of these sizes and states."""
    rows, at = [], address
    for size, state in blocks:
        rows.append(
            {"address": at, "size": size, "requested_size": size, "state": state, "frames": list(frames)}
        )  # fmt: skip
        at += size
    allocated = sum(size for size, state in blocks if state == "active_allocated")
    return {
        "device": 0, "address": address, "total_size": at - address, "allocated_size": allocated,
        "active_size": allocated, "requested_size": allocated, "stream": 0, "segment_type": "large",
        "segment_pool_id": pool, "is_expandable": False, "frames": [], "blocks": rows,
    }  # fmt: skip


def realistic() -> tuple[GraphView, list[Region]]:
    """A graph of the size of a decode step: 350 KB of arguments, with a few addresses per argument."""
    rng = np.random.default_rng(0)
    starts = BASE + np.arange(2000) * (1 << 21)
    owners = (Owner.WEIGHT, Owner.POOL, Owner.STATIC, Owner.LIBRARY)
    regions = [Region(f"r{i}", owners[i % 4], int(start), 1 << 20) for i, start in enumerate(starts)]
    nodes = []
    for index in range(600):
        size = 2560 if index % 7 == 0 else 256  # a blob of cuBLASLt, a struct of an ATen kernel
        blob = rng.integers(0, 1 << 20, size // 4, dtype=np.uint32).astype("<u4").view(np.uint8)
        blob[rng.random(size) < 0.5] = 0
        for at in rng.choice(size // 8, 6, replace=False).tolist():
            address = int(rng.choice(starts)) + int(rng.integers(0, 1 << 20))
            blob[8 * at : 8 * at + 8] = np.frombuffer(words(address), np.uint8)
        nodes.append(kernel(blob.tobytes(), words(7), name=f"kernel {index % 40}"))
    return graph(*nodes, edges=tuple(Edge(i, i + 1) for i in range(599))), regions
