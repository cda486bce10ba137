"""Build the memory map of a process: named tensors, the pool of a graph, and all other blocks of torch's allocator.

    memory = memory_of(static={"x": x}, weights=model, cache={"k": cache.k, "v": cache.v}, pool=graph)

Named tensors come first, so they take precedence over the allocator's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphrt.capture.allocator import allocator_rows
from graphrt.capture.host_reads import tensors_in
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.op_trace import OpTrace, OpTraceLoop
from graphrt.kernels.checks import shown, span_bytes
from graphrt.kernels.errors import ConfigError

Named = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Tensors by name: a mapping or pairs with tensors or lists of tensors, or a module (its parameters and buffers)."""

PoolId = tuple[int, int]


def memory_of(
    *,
    static: Named = (),
    weights: Named = (),
    cache: Named = (),
    library: Named = (),
    pool: Any = None,
    snapshot: Sequence[Mapping[str, Any]] | None = None,
) -> MemoryMap:
    """Return a map of memory to its current owners.

    static    buffers that the graph reads and writes. Pinned buffers have the owner HOST
    weights   parameters and buffers of models
    cache     keys and values
    library   memory of libraries, such as workspaces
    pool      pool of the graph: a torch.cuda.CUDAGraph, a torch.cuda.MemPool, the id of a pool, an op trace or a loop
    snapshot  rows of `torch.cuda.memory_snapshot()`; None: the current rows, if CUDA is in use

    A static buffer covers the bytes from its first element to its last, so a graph that is passed a view must not
    access the rest of the storage. Weights and caches cover their whole storages, because models fuse, tie and slice
    them and the storage stays allocated.

    **Call `memory_of` right after the capture.** Later, the allocator may have returned freed memory to the driver. An
    address in such memory cannot be distinguished from a number.

    `memory_of` does not synchronize. Do not call it during a capture.

    Raises:
        ConfigError: if an argument has no named tensors, or a tensor without memory; if `pool` is not a pool; or if
            torch does not use its native allocator.
    """
    regions = [
        Region(name, Owner.HOST if tensor.is_pinned() else Owner.STATIC, tensor.data_ptr(), span_bytes(tensor))
        for name, tensor in _named("static", static)
    ]
    for argument, owner, values in (
        ("weights", Owner.WEIGHT, weights), ("cache", Owner.CACHE, cache), ("library", Owner.LIBRARY, library)
    ):  # fmt: skip
        storages: dict[int, Region] = {}
        for name, tensor in _named(argument, values):
            region = _storage(name, tensor, owner)
            held = storages.get(region.address)
            if held is None or held.nbytes < region.nbytes:  # a view imported by DLPack has its own storage
                storages[region.address] = region
        regions += storages.values()
    if isinstance(pool, OpTraceLoop):
        pool = pool.step
    if isinstance(pool, OpTrace):
        regions += _op_trace_regions(pool)
    own = None if pool is None or isinstance(pool, OpTrace) else _pool_id(pool)
    if snapshot is None:
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        snapshot = allocator_rows() if in_use else ()
    return MemoryMap((*regions, *_blocks(snapshot, own)))


def _blocks(rows: Iterable[Mapping[str, Any]], pool: PoolId | None) -> Iterator[Region]:
    """Yield one region per block of torch's allocator, with owner POOL if its segment is in `pool`, else ALLOCATOR.

    A block in state "active_pending_free" has no owner and is not live, although another stream still uses it. If
    torch.cuda.memory._record_memory_history() is enabled, the name includes the line that allocated the block.
    """
    for segment, block, address in blocks_of(rows):
        inside = pool is not None and tuple(segment["segment_pool_id"]) == pool
        live = block["state"] == "active_allocated"
        name = "pool of the graph" if inside else f"{'block' if live else 'freed block'} of torch's allocator"
        owner = Owner.POOL if inside else Owner.ALLOCATOR
        yield Region(name + _made_at(block), owner, address, int(block["size"]), live)


def blocks_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], int]]:
    """Yield the segment (a row of the snapshot), block and address of each block of torch's allocator."""
    for segment in rows:
        address = int(segment["address"])
        for block in segment["blocks"]:
            yield segment, block, address
            address += int(block["size"])


def _made_at(block: Mapping[str, Any]) -> str:
    """Return the innermost line outside torch that allocated a block."""
    frames = [f for f in block.get("frames", ()) if str(f["filename"]).endswith(".py")]
    frame = next((f for f in frames if "/torch/" not in str(f["filename"])), None)
    return f", allocated at {frame['filename']}:{frame['line']} in {frame['name']}" if frame else ""


def _op_trace_regions(op_trace: OpTrace) -> Iterator[Region]:
    """Yield the memory of an op trace, with owner POOL if the trace allocated it, else ALLOCATOR.

    Unlike a CUDA graph, a trace keeps memory from before the capture alive. Such memory is live only if tensors other
    than the trace's own refer to its storage.
    """
    made = [one.tensor for one in op_trace.made]
    made += [tensor for entry in op_trace.entries for tensor in entry.outputs if tensor is not None]
    used = tensors_in([(entry.args, entry.kwargs) for entry in op_trace.entries])
    held: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in (*made, *used):
        held.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor
    own = {tensor.untyped_storage().data_ptr() for tensor in made}
    for address, tensors in held.items():
        tensor = next(iter(tensors.values()))
        if address in own:
            yield _storage("pool of the graph", tensor, Owner.POOL)
            continue
        storage = tensor.untyped_storage()  # counts as a reference
        live = torch._C._storage_Use_Count(storage._cdata) - 1 > len(tensors)
        name = "memory from outside of the capture" if live else "memory that only the graph refers to"
        yield _storage(name, tensor, Owner.ALLOCATOR, live)


def _named(argument: str, values: Named) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(values, torch.nn.Module):
        values = (*values.named_parameters(), *values.named_buffers())
    if not isinstance(values, Iterable):
        raise ConfigError(f"{argument}: expected named tensors, got {shown(values)}; pass a dict or a module")
    for pair in values.items() if isinstance(values, Mapping) else values:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigError(f"{argument}: expected named tensors, got {shown(pair)}; pass a dict or a module")
        name, value = pair
        listed = isinstance(value, (list, tuple))
        for label, tensor in ((f"{name}.{at}", one) for at, one in enumerate(value)) if listed else [(name, value)]:
            dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_nested
            if not dense or tensor.is_meta:
                raise ConfigError(
                    f"{argument}: expected dense tensors, got {shown(type(tensor))} as {label!r}; pass the tensors "
                    "whose memory the graph accesses"
                )
            if not _has_memory(tensor):
                raise ConfigError(
                    f"{argument}: {label!r} of type {type(tensor).__name__} has no memory; materialize it, or pass the "
                    "tensors that it consists of"
                )
            yield label, tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory. Lazy parameters, wrapper subclasses and fake tensors have none."""
    try:
        storage = tensor.untyped_storage()
        address, _ = storage.data_ptr(), tensor.is_pinned()
        return bool(address) or not (tensor.numel() or storage.nbytes())
    except Exception:  # the error depends on the subclass
        return False


def _storage(name: str, tensor: torch.Tensor, owner: Owner, live: bool = True) -> Region:
    storage = tensor.untyped_storage()
    return Region(name, owner, storage.data_ptr(), storage.nbytes(), live)


def _pool_id(pool: Any) -> PoolId:
    """Return the id of the memory pool of a graph. Raises: ConfigError: if it is not a private pool."""
    if isinstance(pool, torch.cuda.MemPool):
        pool = pool.id
    elif callable(method := getattr(pool, "pool", None)):
        pool = method()
    if not (isinstance(pool, tuple) and len(pool) == 2 and all(type(number) is int for number in pool)):
        raise ConfigError(f"pool: expected a graph, a pool or its id, got {shown(pool)}; pass the captured graph")
    if pool == (0, 0):
        raise ConfigError("pool: (0, 0) is torch's default pool; capture into a private pool")
    return pool
