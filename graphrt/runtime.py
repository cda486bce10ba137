"""A model with its KV cache, page allocator and replay manager, sized to the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from graphrt.batch import Batch
from graphrt.cache.groups import check_encoder_len, kv_groups, longest_of
from graphrt.cache.kv_cache import KVCache, bytes_per_page, check_groups
from graphrt.cache.page_allocator import PageAllocator
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.capture.graph import GraphReport
from graphrt.config import RuntimeConfig
from graphrt.engine.compare import StepComparison
from graphrt.engine.handle import StepHandle
from graphrt.engine.lifecycle import State
from graphrt.engine.stats import Stats
from graphrt.kernels.checks import (
    check_callable,
    check_device,
    check_instance,
    check_int,
    check_named_tensors,
    is_finite,
    shown,
)
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError
from graphrt.layer import ModelLayers
from graphrt.replay import ReplayManager
from graphrt.sampling import sample_tokens
from graphrt.spec import MAX_PAGES, AttentionSpec, KVCacheSpec
from graphrt.step import Model, Sampler

_TRIAL_PAGES = 2  # the null page and one more: trial captures touch pad rows only


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How `num_pages="auto"` was worked out; bytes of device memory.

    pool_pages       pages of each pool, null pages included
    free_before      free when sizing began, weights loaded
    reserved         kept free on purpose: (1 - memory_utilization) of the device
    predicted_graphs what the capture_sizes, its buffers and activations were predicted to take, from trial captures
    kv_bytes         what the cache takes
    predicted_free   free memory expected once the capture_sizes is captured
    actual_free      free memory found then; None before `capture()`, and on CPU
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
        """Pages of all pools together."""
        return sum(self.pool_pages)


KVGroups = KVCacheSpec | Sequence[KVCacheSpec]
"""One spec where all layers are alike, else that of every KV group, as kv_groups() makes them."""

AllocateKV = Callable[[KVGroups, Sequence[int], torch.device], KVCache]
"""Makes a KV cache with so many pages in each pool on a device."""


class Runtime:
    """A model ready to decode, with its KV cache and whoever hands out pages and rows.

    Which to use: `Runtime`, which owns one `ReplayManager`, where graphrt is to size the cache and hand out pages and
    row ids; `ReplayManager` where your scheduler does.

    manager      the step alone: descriptors, weights check, reset
    allocators   hand out pages, one of each pool; `allocator` where there is one pool
    free_req_indices    row ids that no sequence uses; whoever starts a sequence pops one and appends it again at its
                        end
    stream       the stream that steps run on; None on a CPU

    model, attention, vocab_size, sampler, stream, weights   as for ReplayManager
    kv_spec             geometry and dtype of the cache, or those of its KV groups, as `kv_groups()` makes them, and as
                        None makes them of all layers' specs, with pages of 16 tokens. The scales of an fp8 cache are in
                        `kv_cache`, and are 1 until the caller fills them in place
    num_pages           pages of each pool, one number or one per pool; or "auto": what fits in `memory_utilization` of
                        the device after the graphs, at most what `max_num_reqs` sequences of `max_seq_len` can use
    allocate_kv         called with kv_spec, the pages of each pool and the device, and returns the KVCache: give your
                        own where the KV tensors are yours. With "auto" on a GPU it is called twice, the first time for
                        a cache of 2 pages that is dropped again

    Lifecycle: `capture()` once, then `replay(batch)` per step, then `close()`, which leaving a `with` block does.
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
        allocate_kv: AllocateKV = KVCache.allocate,
    ) -> None:
        if kv_spec is None:
            kv_spec = kv_groups(ModelLayers(model).resolve(attention, None))
        groups = check_groups(kv_spec)
        check_callable("allocate_kv", allocate_kv, advice="pass a function like KVCache.allocate")
        if not (is_finite(memory_utilization) and 0 < memory_utilization <= 1):
            raise ConfigError(
                f"memory_utilization: expected a share in (0, 1], got {shown(memory_utilization)}; 0.9 is usual"
            )
        given = None if isinstance(num_pages, str) and num_pages == "auto" else _pool_pages(num_pages, groups)
        config = RuntimeConfig() if config is None else config
        self.config = check_instance("config", config, RuntimeConfig, advice="pass a RuntimeConfig")
        check_encoder_len(groups, self.config.max_encoder_len)
        self.device = resolve_device(device)
        self.samples = sampler is not None
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
            )

        self.memory_plan: MemoryPlan | None = None
        if given is None:
            self.memory_plan = _plan_memory(build, self.config, groups, self.device, memory_utilization)
            given = self.memory_plan.pool_pages
        self._manager: ReplayManager | None = build(self.config, given)
        on_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.current_stream(self.device) if on_cuda and stream is None else stream
        self._last_stats = self._manager.stats()
        self.vocab_size = int(vocab_size)
        self.allocators = tuple(PageAllocator(count, null) for count, null in self._manager.kv_cache.pools)
        self.free_req_indices = list(range(self.config.max_num_reqs - 1, -1, -1))

    @property
    def manager(self) -> ReplayManager:
        """The step alone. Raises: CaptureError after `close()`."""
        return self._open("manager")

    @property
    def allocator(self) -> PageAllocator:
        """Hands out pages. Raises: ConfigError where there are several pools, each with an allocator of its own."""
        if len(self.allocators) > 1:
            raise ConfigError(f"allocator: expected one pool, got {len(self.allocators)}; use allocators[group.pool]")
        return self.allocators[0]

    @property
    def kv_cache(self) -> KVCache:
        """The cache. Raises: CaptureError after `close()`."""
        return self._open("kv_cache").kv_cache

    @property
    def state(self) -> State:
        """Where in its lifecycle the runtime is."""
        return State.CLOSED if self._manager is None else self._manager.state

    def capture(self, progress: Callable[[GraphReport], None] | None = None) -> None:
        """Capture the capture_sizes; see ReplayManager.capture. Completes `memory_plan` with what was found."""
        self._open("capture").capture(progress)
        if self.memory_plan is not None and self.device.type == "cuda":
            torch.cuda.empty_cache()
            self.memory_plan = replace(self.memory_plan, actual_free=torch.cuda.mem_get_info(self.device)[0])

    def replay(self, batch: Batch, *, eager: bool = False, descriptor: BatchDescriptor | None = None) -> StepHandle:
        """Submit one step; see ReplayManager.replay."""
        return self._open("replay").replay(batch, eager=eager, descriptor=descriptor)

    def compare(self, batch: Batch, *, descriptor: BatchDescriptor | None = None) -> StepComparison:
        """Run one step as a graph and eagerly, and restore what it changed; see ReplayManager.compare."""
        return self._open("compare").compare(batch, descriptor=descriptor)

    def stats(self) -> Stats:
        """Counters so far, the last ones after `close()`; see Stats."""
        if self._manager is not None:
            self._last_stats = self._manager.stats()
        return self._last_stats

    def close(self) -> None:
        """Give back graphs, buffers and the KV cache. The model stays the caller's, and so do KV tensors that the
        caller made. Closing twice is fine."""
        if self._manager is None:
            return
        self._manager.close()
        self._manager.forget_cache()
        self._manager = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Runtime:
        self._open("with")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, call: str) -> ReplayManager:
        if self._manager is None:
            raise CaptureError(f"{call}: expected an open runtime, got one that was closed; build a new Runtime")
        return self._manager


def check_decoder(runtime: Runtime) -> None:
    """Raise ConfigError for a runtime whose rows cannot go on by a token a step: without sampler, of a model with cross
    or encoder layers, or with query_len other than 1 where there are no mixed batches."""
    config, groups = runtime.config, runtime.kv_cache.groups
    if not runtime.samples:
        raise ConfigError("runtime: expected one with a sampler, got sampler=None; build it with a sampler")
    if not groups or any(group.cross for group in groups):
        raise ConfigError(
            "runtime: expected a decoder alone, got a model with cross layers or without a cache; submit batches "
            "to replay() yourself"
        )
    if not config.mixed_batches and config.query_len != 1:
        raise ConfigError(
            f"runtime: expected query_len=1 with mixed_batches=False, got {config.query_len}; "
            "rows that decode have one new token, allow mixed batches"
        )


def _pool_pages(num_pages: int | Sequence[int], groups: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """Pages of each pool. Raises: ConfigError."""
    pools = len({spec.pool for spec in groups})
    counts = list(num_pages) if isinstance(num_pages, (list, tuple)) else [num_pages] * pools
    if len(counts) != pools:
        raise ConfigError(f"num_pages: expected one number, or one for each of {pools} pools, got {shown(num_pages)}")
    return tuple(check_int("num_pages", count, 2, MAX_PAGES, advice='or pass "auto"') for count in counts)


def _checked_cache(
    cache: KVCache, groups: tuple[KVCacheSpec, ...], pages: tuple[int, ...], device: torch.device
) -> KVCache:
    """What `allocate_kv` returned; raises ConfigError where it is not what was asked for."""
    check_instance("allocate_kv", cache, KVCache, advice="return a KVCache")
    for name, want, got in (
        ("pool_pages", pages, cache.pool_pages),
        ("groups", tuple(spec.resolve(pages[spec.pool]) for spec in groups), cache.groups),
        ("device", device, cache.device),
    ):
        if want != got:
            raise ConfigError(f"allocate_kv: expected a cache of {name} {want}, got {got}; make it as asked for")
    return cache


def _plan_memory(
    build: Callable[[RuntimeConfig, tuple[int, ...]], ReplayManager],
    config: RuntimeConfig,
    groups: tuple[KVCacheSpec, ...],
    device: torch.device,
    utilization: float,
) -> MemoryPlan:
    pools = sorted({spec.pool for spec in groups})
    of_pool = [[spec for spec in groups if spec.pool == pool] for pool in pools]
    # Beside the null page, what all sequences together can own: of windowed groups the window's pages alone.
    lengths, chunk = (config.max_seq_len, config.max_encoder_len or 0), config.max_num_tokens
    per_row = [sum(spec.most_pages(longest_of(spec, *lengths), chunk) for spec in specs) for specs in of_pool]
    useful = [min(config.max_num_reqs * count, MAX_PAGES - 1) for count in per_row]
    page_bytes = [bytes_per_page(specs) for specs in of_pool]
    if device.type != "cuda":
        free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        predicted = 0
    else:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        predicted = _measure_graphs(build, config, device, len(pools))
    reserved = int((1 - utilization) * total)
    budget = free - reserved - predicted
    # Every pool gets the same share of what it can use, so that none is full long before the others.
    most = sum(count * nbytes for count, nbytes in zip(useful, page_bytes, strict=True))
    left = budget - sum(page_bytes)
    if left < sum(page_bytes):
        raise CapacityError(
            f"num_pages: expected room for at least {_TRIAL_PAGES} pages of {sum(page_bytes)} bytes, got "
            f"{budget} bytes (free {free}, reserved {reserved}, graphs {predicted}); lower max_num_reqs or raise "
            "memory_utilization"
        )
    pages = tuple(1 + max(1, min(count, count * left // most)) for count in useful)
    kv_bytes = sum(count * nbytes for count, nbytes in zip(pages, page_bytes, strict=True))
    # A claim of 8 bytes per page stands beside the cache, and travels with its size.
    return MemoryPlan(pages, free, reserved, predicted, kv_bytes, free - predicted - kv_bytes - 8 * sum(pages))


def _measure_graphs(
    build: Callable[[RuntimeConfig, tuple[int, ...]], ReplayManager],
    config: RuntimeConfig,
    device: torch.device,
    pools: int,
) -> int:
    """Bytes that buffers and the full capture_sizes will take, from capturing the largest graph of each kind and
    dropping it.

    Memory of the pool is shared, so the largest graph of each kind counts once; what the driver takes per graph is
    assumed for every other size of that kind, which overestimates where small sizes have fewer nodes.
    """
    resolved = config.resolve()
    sizes = {GraphKind.DECODE: resolved.decode_sizes or (), GraphKind.MIXED: resolved.mixed_sizes or ()}
    trial = replace(config, decode_sizes=sizes[GraphKind.DECODE][-1:], mixed_sizes=sizes[GraphKind.MIXED][-1:])
    before = torch.cuda.mem_get_info(device)[0]
    manager = build(trial, (_TRIAL_PAGES,) * pools)
    try:
        manager.capture()
        torch.cuda.empty_cache()
        predicted = before - torch.cuda.mem_get_info(device)[0]
        for report in manager.stats().graphs:
            predicted += report.driver_bytes * (len(sizes[report.descriptor.kind]) - 1)
    finally:
        manager.close()
        del manager
        torch.cuda.empty_cache()
    return predicted


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device that a name means: None is CUDA if there is one, `cuda` gets the index of the current device.

    Raises: ConfigError for a name that is no device, and for one that is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = check_device("device", device)
    if resolved.type == "meta":
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {shown(device)}; steps compute")
    return resolved
