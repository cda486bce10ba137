"""Find cuBLAS workspaces in the blocks of torch's allocator.

torch allocates one workspace for cuBLAS and one for cuBLASLt per thread and stream, on first use, and keeps them until
the process ends. If a step ran on the capture stream before its capture, its matrix products use workspaces outside the
graph's pool. These stay valid, but an audit cannot distinguish them from other allocations. Probes find them, because
a product with known operands accesses no other memory except the library's.

The same applies to the seed and offset that torch's generator keeps for graphs that draw from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from graphrt.capture.allocator import allocator_rows
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.pool import memory_of
from graphrt.capture.inspect.scan import scan

_WORKSPACE, _GENERATOR = "workspace of cuBLAS", "state of torch's generator"
_SHAPES = ((64, 16384, 64), (8, 8192, 512), (1, 16384, 64), (128, 8192, 128))
"""Rows, depth and columns: few results of long sums, so that split-K kernels combine partial sums in a workspace."""


def with_blas_workspaces(memory: MemoryMap, streams: Iterable[torch.cuda.Stream] = ()) -> MemoryMap:
    """Return the map with cuBLAS workspaces and the state of torch's generator marked as LIBRARY memory.

        memory = with_blas_workspaces(memory_of(static=static, weights=model, pool=graph))

    memory   process memory map from `memory_of`, with the blocks of torch's allocator
    streams  streams on which graphs were captured; empty: the default stream of torch.cuda.graph

    Captures a few small products per stream using torch.cuda.graph, which synchronizes and empties the allocator's
    cache, so call it after `memory_of`. Workspaces that no probe uses are not found. If the capture allocated its
    workspace in its own pool, this call is not needed.
    """
    default = torch.cuda.graph.default_capture_stream
    chosen = tuple(streams) or ((default,) if default is not None else ())
    found = dict.fromkeys(region for stream in chosen for region in _probe(stream, memory))
    return MemoryMap((*memory.regions[: _first_block(memory)], *found, *memory.regions[_first_block(memory) :]))


def _first_block(memory: MemoryMap) -> int:
    """Return the index of the allocator's first block. The named regions before it are not workspaces."""
    blocks = (at for at, r in enumerate(memory.regions) if r.owner in (Owner.POOL, Owner.ALLOCATOR))
    return next(blocks, len(memory.regions))


def _probe(stream: torch.cuda.Stream, memory: MemoryMap) -> list[Region]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream), torch.inference_mode():
        static = {
            f"{name} {rows} {depth} {columns} {dtype}": torch.zeros(shape, dtype=dtype, device=stream.device)
            for dtype in (torch.bfloat16, torch.float32)
            for rows, depth, columns in _SHAPES
            for name, shape in _operands(rows, depth, columns).items()
        }
        drawn = torch.zeros(1, device=stream.device)
        # Load the kernels, and allocate missing workspaces outside the probes' pools.
        _products(static)
        with torch.random.fork_rng(devices=[stream.device]):
            drawn.uniform_()
    found = _other_blocks(stream, memory, static, lambda: _products(static), _WORKSPACE)
    return found + _other_blocks(stream, memory, {"drawn": drawn}, drawn.uniform_, _GENERATOR)


def _other_blocks(
    stream: torch.cuda.Stream, memory: MemoryMap, static: Mapping[str, torch.Tensor], work: Callable[[], object],
    name: str,
) -> list[Region]:  # fmt: skip
    """Return the live blocks that `work` uses in addition to its operands, as regions called `name`."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.inference_mode(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    words = scan(inspect_graph(graph))
    own = memory_of(static=static, pool=graph, snapshot=allocator_rows(graph.pool()))
    others = words.value[(words.aligned | words.exact) & (own.find_many(words.value) < 0)]
    blocks = {memory.find(word) for word in others.tolist()}
    return [
        Region(name, Owner.LIBRARY, block.address, block.nbytes)
        for block in blocks
        if block is not None and block.owner in (Owner.ALLOCATOR, Owner.POOL) and block.live
    ]


def _operands(rows: int, depth: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"x": (rows, depth), "w": (depth, columns), "bias": (columns,), "y": (rows, columns)}


def _products(static: Mapping[str, torch.Tensor]) -> None:
    """Run each product without a bias, for which torch uses cuBLAS, and with a bias, for which torch uses cuBLASLt."""
    tensors = iter(static.values())
    for x, w, bias, y in zip(tensors, tensors, tensors, tensors, strict=True):
        torch.mm(x, w, out=y)
        torch.addmm(bias, x, w, out=y)
