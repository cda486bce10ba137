"""A model with its KV cache, page allocator and replay manager, sized to the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import GraphKind
from graphrt.capture.graph import GraphReport
from graphrt.config import RuntimeConfig
from graphrt.handle import StepHandle
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.kv_cache import KVCache, PageAllocator
from graphrt.replay import ReplayManager, State
from graphrt.sampling import sample_tokens
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.stats import Stats
from graphrt.step import Model, Sampler

_TRIAL_PAGES = 2  # the null page and one more: trial captures touch pad rows only


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How `num_pages="auto"` was worked out; bytes of device memory.

    free_before      free when sizing began, weights loaded
    reserved         kept free on purpose: (1 - memory_utilization) of the device
    predicted_graphs what the ladder, its buffers and activations were predicted to take, from trial captures
    kv_bytes         what the cache takes
    predicted_free   free memory expected once the ladder is captured
    actual_free      free memory found then; None before `capture()`, and on CPU
    """

    num_pages: int
    free_before: int
    reserved: int
    predicted_graphs: int
    kv_bytes: int
    predicted_free: int
    actual_free: int | None = None


class Runtime:
    """A model ready to decode: `capture()`, `replay(batch)`, `close()`.

    allocator    hands out pages
    free_rows    row ids that no sequence uses; whoever starts a sequence pops one and appends it again at its end

    model, attention, vocab_size, sampler, stream   as for ReplayManager
    kv_spec             geometry and dtype of the cache; the scales of an fp8 cache are in `kv_cache`, and are 1 until
                        the caller fills them in place
    num_pages           pages of the cache, or "auto": what fits in `memory_utilization` of the device after the graphs,
                        at most what `max_num_reqs` sequences of `max_seq_len` can use
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionSpec | tuple[AttentionSpec, ...],
        kv_spec: KVCacheSpec,
        *,
        vocab_size: int,
        device: torch.device | str,
        config: RuntimeConfig | None = None,
        num_pages: int | Literal["auto"] = "auto",
        memory_utilization: float = 0.9,
        sampler: Sampler | None = sample_tokens,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        if not 0 < memory_utilization <= 1:
            raise ConfigError(f"memory_utilization: expected a share in (0, 1], got {memory_utilization}")
        self.config = config or RuntimeConfig()
        self.device = resolve_device(device)

        def build(config: RuntimeConfig, pages: int) -> ReplayManager:
            cache = KVCache.allocate(kv_spec, pages, self.device)
            return ReplayManager(
                model, cache, attention, vocab_size=vocab_size, config=config, sampler=sampler, stream=stream
            )

        self.memory_plan: MemoryPlan | None = None
        if num_pages == "auto":
            self.memory_plan = _plan_memory(build, self.config, kv_spec, self.device, memory_utilization)
            num_pages = self.memory_plan.num_pages
        self.manager = build(self.config, num_pages)
        self.allocator = PageAllocator(num_pages, kv_spec.null_page)
        self.free_rows = list(range(self.config.max_num_reqs - 1, -1, -1))

    @property
    def kv_cache(self) -> KVCache:
        return self.manager.kv_cache

    @property
    def state(self) -> State:
        return self.manager.state

    def capture(self, progress: Callable[[GraphReport], None] | None = None) -> None:
        """Capture the ladders; see ReplayManager.capture. Completes `memory_plan` with what was found."""
        self.manager.capture(progress)
        if self.memory_plan is not None and self.device.type == "cuda":
            torch.cuda.empty_cache()
            self.memory_plan = replace(self.memory_plan, actual_free=torch.cuda.mem_get_info(self.device)[0])

    def replay(self, batch: Batch, *, eager: bool = False) -> StepHandle:
        """Submit one step; see ReplayManager.replay."""
        return self.manager.replay(batch, eager=eager)

    def stats(self) -> Stats:
        """Counters so far; see Stats."""
        return self.manager.stats()

    def close(self) -> None:
        """Give back graphs, buffers and the KV cache. The model stays the caller's."""
        self.manager.close()
        del self.manager.kv_cache
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _plan_memory(
    build: Callable[[RuntimeConfig, int], ReplayManager],
    config: RuntimeConfig,
    kv_spec: KVCacheSpec,
    device: torch.device,
    utilization: float,
) -> MemoryPlan:
    useful = 1 + config.max_num_reqs * kv_spec.pages_for(config.max_seq_len)
    if device.type != "cuda":
        free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        predicted = 0
    else:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        predicted = _measure_graphs(build, config, device)
    reserved = int((1 - utilization) * total)
    budget = free - reserved - predicted
    pages = min(useful, budget // kv_spec.bytes_per_page)
    if pages < _TRIAL_PAGES:
        raise CapacityError(
            f"num_pages: expected room for at least {_TRIAL_PAGES} pages of {kv_spec.bytes_per_page} bytes, got "
            f"{budget} bytes (free {free}, reserved {reserved}, graphs {predicted}); lower max_num_reqs or raise "
            "memory_utilization"
        )
    kv_bytes = pages * kv_spec.bytes_per_page
    # A claim of 8 bytes per slot stands beside the cache, and travels with its size.
    claims = 8 * pages * kv_spec.page_size
    return MemoryPlan(pages, free, reserved, predicted, kv_bytes, free - predicted - kv_bytes - claims)


def _measure_graphs(
    build: Callable[[RuntimeConfig, int], ReplayManager], config: RuntimeConfig, device: torch.device
) -> int:
    """Bytes that buffers and the full ladder will take, from capturing the largest graph of each kind and dropping it.

    Memory of the pool is shared, so the largest graph of each kind counts once; what the driver takes per graph is
    assumed for every other size of that kind, which overestimates where small sizes have fewer nodes.
    """
    resolved = config.resolve()
    sizes = {GraphKind.DECODE: resolved.decode_sizes or (), GraphKind.MIXED: resolved.mixed_sizes or ()}
    trial = replace(config, decode_sizes=sizes[GraphKind.DECODE][-1:], mixed_sizes=sizes[GraphKind.MIXED][-1:])
    before = torch.cuda.mem_get_info(device)[0]
    manager = build(trial, _TRIAL_PAGES)
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
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {device!r}") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if resolved.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = resolved.index if resolved.index is not None else torch.cuda.current_device() if count else 0
    if index >= count:
        raise ConfigError(f"device: expected one of {count} CUDA devices, got {device!r}; pass device='cpu'")
    return torch.device("cuda", index)
