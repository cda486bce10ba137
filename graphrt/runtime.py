"""A model with its KV cache, page allocators and replay manager, sized to the device."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import distributed as dist

from graphrt.batch import Batch
from graphrt.cache.groups import check_encoder_len, kv_groups, longest_of
from graphrt.cache.kv_cache import KVCache, bytes_per_page, check_groups, pages_of_pools
from graphrt.cache.page_allocator import PageAllocator
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.device_wait import empty_cache
from graphrt.capture.graph import GraphReport
from graphrt.config import RuntimeConfig
from graphrt.draft_model import DraftModel
from graphrt.engine.handle import StepHandle
from graphrt.engine.lifecycle import State
from graphrt.engine.ranks import Ranks
from graphrt.engine.shadow import StepComparison
from graphrt.engine.stats import Stats
from graphrt.kernels.checks import (
    FLOAT32_TINY,
    check_callable,
    check_device,
    check_instance,
    check_named_tensors,
    check_number,
)
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError
from graphrt.layer import ModelLayers
from graphrt.proposer import Proposer
from graphrt.replay import ReplayManager
from graphrt.sampling import sample_tokens
from graphrt.spec import MAX_PAGES, AttentionSpec, KVCacheSpec
from graphrt.step import Model, Sampler

_TRIAL_PAGES = 2  # the null page and one other page, because trial captures run only padding


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How `num_pages="auto"` was computed. All sizes are bytes of device memory.

    pool_pages       pages of each pool, including null pages
    free_before      free memory before sizing, with the weights loaded
    reserved         memory that stays free, (1 - memory_utilization) of the device
    predicted_graphs predicted memory of graphs, buffers and activations, from trial captures
    kv_bytes         memory of the KV cache
    predicted_free   predicted free memory after `capture()`
    actual_free      measured free memory after `capture()`; None before it, and on CPU. With `lazy_capture`, later
                     captures take a part of it
    """

    pool_pages: tuple[int, ...]
    free_before: int
    reserved: int
    predicted_graphs: int
    kv_bytes: int
    predicted_free: int
    actual_free: int | None = None

    @property
    def num_pages(self) -> int:
        """Total number of pages in all pools."""
        return sum(self.pool_pages)


KVGroups = KVCacheSpec | Sequence[KVCacheSpec]
"""One spec if all layers are alike, else one spec per KV group. `kv_groups()` returns these specs."""

AllocateKV = Callable[[KVGroups, Sequence[int], torch.device], KVCache]
"""Allocates a KV cache with the given number of pages in each pool, on a device."""


class Runtime:
    """A model ready to decode, with its KV cache, page allocators and request indices.

    Use ReplayManager if your scheduler sizes the cache and allocates pages and request indices.

    manager           the ReplayManager
    allocators        page allocator of each pool; `allocator` if there is one pool
    free_req_indices  request indices that no sequence uses; pop one for a new sequence, and append it when the sequence
                      is finished
    stream            stream of the steps; None on CPU
    rank              rank of this process in `group`; 0 without a group
    kv_boundary       length limit above which a request's KV differs from that of shorter requests, so TextGenerator
                      shares no prefix across it; None, the default: KV depends only on the preceding tokens

    model, attention, vocab_size, config, sampler, stream, weights, proposer, group   as for ReplayManager
    kv_spec             shape and dtype of the model's cache, or of each KV group, as `kv_groups()` returns them; None:
                        `kv_groups()` of all layers, with pages of 16 tokens. The scales of an fp8 cache are tensors of
                        `kv_cache`. They are 1 until the caller fills them in place
    device              device of the cache and of all steps; None: CUDA if available, else CPU
    num_pages           pages of each pool, as one number or one per pool. "auto": as many as fit, together with the
                        graphs, into `memory_utilization` of the device memory, but at most the pages that
                        `max_num_reqs` sequences of `max_seq_len` can use
    memory_utilization  fraction of the device memory that "auto" may use, in (0, 1]
    allocate_kv         called with kv_spec, the pages of each pool and the device; returns the KVCache. Pass your own
                        function to use your own KV tensors. With "auto" on a GPU it is called twice, first for a
                        temporary cache of 2 pages

    Call `capture()` once, then `replay(batch)` per step, then `close()`, or use a `with` block.

    Raises:
        ConfigError: if an argument has the wrong type, or arguments do not match.
        UnsupportedError: if no attention backend supports them.
        CapacityError: if the cache does not fit into the memory of the device.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionSpec | Sequence[AttentionSpec] | None = None,
        kv_spec: KVGroups | None = None,
        *,
        vocab_size: int,
        device: torch.device | str | None,
        config: RuntimeConfig | None = None,
        num_pages: int | Sequence[int] | Literal["auto"] = "auto",
        memory_utilization: float = 0.9,
        sampler: Sampler | None = sample_tokens,
        stream: torch.cuda.Stream | None = None,
        weights: Iterable[tuple[str, torch.Tensor]] | None = None,
        proposer: Proposer | None = None,
        group: dist.ProcessGroup | None = None,
        allocate_kv: AllocateKV = KVCache.allocate,
    ) -> None:
        if kv_spec is None:
            kv_spec = kv_groups(ModelLayers(model).resolve(attention, None))
        groups = check_groups(kv_spec)
        if isinstance(proposer, DraftModel):
            groups = proposer.kv_groups(groups)
        check_callable("allocate_kv", allocate_kv, advice="pass a function like KVCache.allocate")
        check_number("memory_utilization", memory_utilization, FLOAT32_TINY, 1, advice="0.9 is usual")
        given: tuple[int, ...] | None = None
        if not (isinstance(num_pages, str) and num_pages == "auto"):
            given = pages_of_pools(num_pages, groups, 'or pass "auto"')
        config = RuntimeConfig() if config is None else config
        self.config = check_instance("config", config, RuntimeConfig, advice="pass a RuntimeConfig")
        check_encoder_len(groups, self.config.max_encoder_len)
        self.device = resolve_device(device)
        self.samples, self.rank = sampler is not None, 0 if group is None else Ranks.of(group).rank
        named = None if weights is None else check_named_tensors("weights", weights)

        def build(config: RuntimeConfig, pages: tuple[int, ...]) -> ReplayManager:
            return ReplayManager(
                model,
                _checked_cache(allocate_kv(groups, pages, self.device), groups, pages, self.device),
                attention,
                vocab_size=vocab_size,
                config=config,
                sampler=sampler,
                stream=stream,
                weights=named,
                proposer=proposer,
                group=group,
            )

        self.kv_boundary: int | None = None
        self.memory_plan: MemoryPlan | None = None
        if given is None:
            self.memory_plan = _plan_memory(build, self.config, groups, self.device, memory_utilization, group)
            given = self.memory_plan.pool_pages
        self._manager: ReplayManager | None = build(self.config, given)
        on_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.current_stream(self.device) if on_cuda and stream is None else stream
        self._last_stats = self._manager.stats()
        self.vocab_size = int(vocab_size)
        self.allocators = tuple(PageAllocator(count, null) for count, null in self._manager.kv_cache.pools)
        self.free_req_indices = list(range(self.config.max_num_reqs - 1, -1, -1))
        text = "Runtime: dropped without close(), so its memory is freed at the next garbage collection; call close()"
        self._dropped = weakref.finalize(self, warnings.warn, text, ResourceWarning, stacklevel=2)
        self._dropped.atexit = False

    @property
    def manager(self) -> ReplayManager:
        """The replay manager. Raises CaptureError after `close()`."""
        return self._open("manager")

    @property
    def allocator(self) -> PageAllocator:
        """The page allocator, if there is one pool. Raises ConfigError if there are several."""
        if len(self.allocators) > 1:
            raise ConfigError(
                f"allocator: this runtime has {len(self.allocators)} pools; use allocators[group.pool] instead"
            )
        return self.allocators[0]

    @property
    def kv_cache(self) -> KVCache:
        """The KV cache. Raises CaptureError after `close()`."""
        return self._open("kv_cache").kv_cache

    @property
    def state(self) -> State:
        """State of the lifecycle: new, captured or closed."""
        return State.CLOSED if self._manager is None else self._manager.state

    def capture(self, progress: Callable[[GraphReport], None] | None = None) -> None:
        """Capture all graphs; see ReplayManager.capture. Sets `memory_plan.actual_free`."""
        self._open("capture").capture(progress)
        if self.memory_plan is not None and self.device.type == "cuda":
            torch.cuda.empty_cache()
            self.memory_plan = replace(self.memory_plan, actual_free=torch.cuda.mem_get_info(self.device)[0])

    def replay(self, batch: Batch, *, eager: bool = False, descriptor: BatchDescriptor | None = None) -> StepHandle:
        """Submit one step; see ReplayManager.replay."""
        return self._open("replay").replay(batch, eager=eager, descriptor=descriptor)

    def compare(self, batch: Batch, *, descriptor: BatchDescriptor | None = None) -> StepComparison:
        """Run one step as a graph and eagerly, and restore what the step changed; see ReplayManager.compare."""
        return self._open("compare").compare(batch, descriptor=descriptor)

    def follow(self) -> None:
        """Run what rank 0 launches, until it closes its runtime; see ReplayManager.follow."""
        self._open("follow").follow()

    def stats(self) -> Stats:
        """Return the counters; after `close()` their last values."""
        if self._manager is not None:
            self._last_stats = self._manager.stats()
        return self._last_stats

    def close(self) -> None:
        """Free graphs, buffers and the KV cache. The caller owns the model and any KV tensors that it allocated.

        A second call does nothing.
        """
        if self._manager is None:
            return
        self._manager.close()
        self._manager.forget_cache()
        self._manager = None
        self._dropped.detach()
        empty_cache(self.device)

    def __enter__(self) -> Runtime:
        self._open("with")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, call: str) -> ReplayManager:
        if self._manager is None:
            raise CaptureError(f"{call}: this runtime was closed; build a new Runtime")
        return self._manager


def check_decoder(runtime: Runtime) -> None:
    """Check that a runtime can decode one token per request and step.

    Raises: ConfigError: if the runtime has no sampler, or if the model has cross or encoder layers.
    """
    groups = runtime.kv_cache.groups
    if not runtime.samples:
        raise ConfigError("runtime: has no sampler; pass sampler= to Runtime")
    if not groups or any(group.cross for group in groups):
        raise ConfigError("runtime: the model has cross layers or no KV cache; submit batches to replay() yourself")


def _checked_cache(
    cache: KVCache, groups: tuple[KVCacheSpec, ...], pages: tuple[int, ...], device: torch.device
) -> KVCache:
    """Return the result of `allocate_kv`; raise ConfigError if it does not match the arguments."""
    check_instance("allocate_kv", cache, KVCache, advice="return a KVCache")
    for name, want, got in (
        ("pool_pages", pages, cache.pool_pages),
        ("groups", tuple(spec.resolve(pages[spec.pool]) for spec in groups), cache.groups),
        ("device", device, cache.device),
    ):
        if want != got:
            raise ConfigError(
                f"allocate_kv: expected a cache with {name} {want}, got {got}; build the cache from "
                f"the arguments of the call"
            )
    return cache


def _plan_memory(
    build: Callable[[RuntimeConfig, tuple[int, ...]], ReplayManager],
    config: RuntimeConfig,
    groups: tuple[KVCacheSpec, ...],
    device: torch.device,
    utilization: float,
    group: dist.ProcessGroup | None,
) -> MemoryPlan:
    pools = sorted({spec.pool for spec in groups})
    of_pool = [[spec for spec in groups if spec.pool == pool] for pool in pools]
    # The pages that all sequences together can own, without the null page; windowed groups own only the window's pages.
    lengths, chunk = (config.max_seq_len, config.max_encoder_len or 0), config.max_num_tokens
    per_req = [sum(spec.most_pages(longest_of(spec, *lengths), chunk) for spec in specs) for specs in of_pool]
    useful = [min(config.max_num_reqs * count, MAX_PAGES - 1) for count in per_req]
    page_bytes = [bytes_per_page(specs) for specs in of_pool]
    free, total = _memory(device)
    predicted = _measure_graphs(build, config, device, len(pools)) if device.type == "cuda" else 0
    reserved = int((1 - utilization) * total)
    budget = free - reserved - predicted
    if group is not None:
        budget = min(Ranks.of(group).exchange(budget))  # all ranks allocate the same number of pages
    # Every pool gets the same fraction of the pages that it can use, so that no pool fills up long before the others.
    most = sum(count * nbytes for count, nbytes in zip(useful, page_bytes, strict=True))
    left = budget - sum(page_bytes)
    if left < sum(page_bytes):
        raise CapacityError(
            f"num_pages: {budget} bytes cannot hold {_TRIAL_PAGES} pages of {sum(page_bytes)} bytes (free {free}, "
            f"reserved {reserved}, graphs {predicted}); lower max_num_reqs, or raise memory_utilization"
        )
    pages = tuple(1 + max(1, min(count, count * left // most)) for count in useful)
    kv_bytes = sum(count * nbytes for count, nbytes in zip(pages, page_bytes, strict=True))
    # The static buffers use another 8 bytes per page, to detect write conflicts.
    return MemoryPlan(pages, free, reserved, predicted, kv_bytes, free - predicted - kv_bytes - 8 * sum(pages))


def _memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a GPU; on a CPU, half of the host's memory for both."""
    if device.type != "cuda":
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        return half, half
    gc.collect()  # tensors in garbage occupy memory, and a collection during a trial capture would change the result
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def default_config(
    groups: Sequence[KVCacheSpec], longest: int, device: torch.device, memory_utilization: float
) -> RuntimeConfig:
    """Return the default config of `from_transformers` for a model of `longest` positions."""
    config = RuntimeConfig() if device.type == "cuda" else RuntimeConfig(max_num_reqs=8, max_num_tokens=64)
    free, total = _memory(device)
    budget = (free - (1 - memory_utilization) * total) / 2  # half of it, since graphs and activations need memory too

    def nbytes(length: int) -> int:
        return sum(group.bytes_per_page * group.most_pages(length, config.max_num_tokens) for group in groups)

    while longest > 1024 and nbytes(longest) > budget:
        longest //= 2
    return replace(config, max_seq_len=longest)


def _measure_graphs(
    build: Callable[[RuntimeConfig, tuple[int, ...]], ReplayManager],
    config: RuntimeConfig,
    device: torch.device,
    pools: int,
) -> int:
    """Return the predicted bytes of buffers and all graphs, by capturing and dropping the largest graph of each kind.

    Graphs share a memory pool, so the largest graph of each kind counts once. The driver memory of that graph is
    assumed for every other size of its kind, and for every loop, which overestimates small sizes with fewer nodes.
    """
    resolved = config.resolve()
    sizes = {GraphKind.DECODE: resolved.decode_sizes or (), GraphKind.MIXED: resolved.mixed_sizes or ()}
    loops = {GraphKind.DECODE: set(config.loop_sizes), GraphKind.MIXED: set[int]()}
    before = torch.cuda.mem_get_info(device)[0]
    # The trial captures the largest sizes, and compiles the kernels of all.
    manager = build(replace(config, lazy_capture=True), (_TRIAL_PAGES,) * pools)
    try:
        manager.capture()
        torch.cuda.empty_cache()
        predicted = before - torch.cuda.mem_get_info(device)[0]
        for report in manager.stats().graphs:
            kind, measured = report.descriptor.kind, {report.descriptor.padded_reqs}
            predicted += report.driver_bytes * (len(sizes[kind]) - 1 + len(loops[kind] - measured))
    finally:
        manager.close()
        del manager
        empty_cache(device)
    return predicted


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device to use. None: CUDA if available, else CPU; "cuda" gets the index of the current device.

    Raises: ConfigError: if there is no such device, or if it is the meta device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = check_device(device)
    if resolved.type == "meta":
        raise ConfigError("device: the meta device cannot compute; pass cpu, cuda or cuda:N")
    return resolved
