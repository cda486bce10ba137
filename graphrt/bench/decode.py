"""The decode benchmark: milliseconds per step against the memory floor, and host time per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from graphrt.batch import Batch
from graphrt.bench.decode_transformers import BaselineTime
from graphrt.bench.sampling import stated_sampling
from graphrt.bench.timer import measure_read_bandwidth, synchronize
from graphrt.cache.groups import kv_locations
from graphrt.cache.kv_cache import bytes_per_page
from graphrt.config import RuntimeConfig
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.models.llama import LlamaModel
from graphrt.models.loading import free_memory
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams, config_fields
from graphrt.session.table import SamplingValues
from graphrt.spec import AttentionSpec, KVCacheSpec

_ROUNDS = 5
_HOST_STEPS = 200  # minimum on CUDA; on a CPU one round is enough, because nothing runs concurrently
_MAX_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The steps to time, for each batch size: `steps` per round, of requests that start at `context` tokens.

    batches    distinct batch sizes, which are sorted
    sampling   parameters of all requests; seeds differ. Penalties apply to tokens of timed steps

    Raises: ConfigError: if there is no batch size, or a number is not an int >= 1.
    """

    batches: Sequence[int]
    context: int
    steps: int
    backend: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not isinstance(self.batches, Sequence) or not self.batches:
            raise ConfigError(f"batches: expected one or more sizes, got {self.batches!r}; pass a list of sizes")
        sizes = {check_int("batches", batch, 1, advice="pass numbers of sequences") for batch in self.batches}
        object.__setattr__(self, "batches", tuple(sorted(sizes)))
        check_int("context", self.context, 1, _MAX_CONTEXT, advice="pass the tokens that each sequence already has")
        check_int("steps", self.steps, 1, _MAX_CONTEXT, advice="pass the number of steps per round")


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Results for one batch size. Milliseconds per step are medians over several rounds; a spread is maximum minus
    minimum.

    replay_ms              steady state with the host submitting ahead, as in a serving loop
    floor_ms               time to read the bytes that a step must read, at the measured read bandwidth
    host_us                host time of one `replay()` call: median over `host_steps` steps
    host_us_p20, _p80      20th and 80th percentiles of the host time
    """

    batch: int
    context: int
    replay_ms: float
    replay_ms_spread: float
    host_us: float
    host_us_p20: float
    host_us_p80: float
    host_steps: int
    floor_ms: float
    weight_bytes: int
    kv_bytes: int

    @property
    def share_of_floor(self) -> float:
        """Floor divided by measured time; 1 means that all bytes are read at full bandwidth, with no other cost."""
        return self.floor_ms / self.replay_ms


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """Results of a run. `to_json` returns the JSON line that the command prints last.

    sampling    parameters of all requests; seeds differ
    baselines   times of `transformers` for the same shape in the same run; empty if not requested
    """

    model: str
    device: str
    backend: str
    recorder: str
    read_tb_s: float
    capture_seconds: float
    decode_graphs: int
    decode_mib_per_graph: float
    nodes_per_graph: int
    results: tuple[DecodeResult, ...]
    sampling: SamplingParams
    baselines: tuple[BaselineTime, ...] = ()

    def baseline(self, way: str, batch: int) -> BaselineTime | None:
        """Return the result of a baseline at a batch size, or None if it was not requested."""
        return next((time for time in self.baselines if (time.way, time.batch) == (way, batch)), None)

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["results"] = [asdict(r) | {"share_of_floor": r.share_of_floor} for r in self.results]
        record["sampling"] = stated_sampling(self.sampling)
        return record


def bench_decode(name: str, model: LlamaModel, kv_groups: Sequence[KVCacheSpec], work: DecodeWork) -> DecodeReport:
    """Capture a graph for each batch size, and time decode steps. Raises: see `decode_runtime`."""
    device, context, steps = model.device, work.context, work.steps
    attention = model.config.attention_specs(model.dtype)
    with decode_runtime(model, kv_groups, work) as runtime:
        bandwidth = measure_read_bandwidth(device)
        runtime.capture()
        stats = runtime.stats()
        results = []
        for batch in work.batches:
            loop = DecodeLoop(runtime, batch, context, work.sampling)
            replay, host = loop.step_seconds(steps), loop.host_seconds(steps)
            p20, host_us, p80 = np.percentile(host, [20, 50, 80]) * 1e6
            kv_bytes = batch * kv_bytes_read(attention, kv_groups, context + steps // 2)
            results.append(
                DecodeResult(
                    batch=batch,
                    context=context,
                    replay_ms=1e3 * median(replay),
                    replay_ms_spread=1e3 * (max(replay) - min(replay)),
                    host_us=float(host_us),
                    host_us_p20=float(p20),
                    host_us_p80=float(p80),
                    host_steps=len(host),
                    floor_ms=1e3 * (model.streamed_bytes + kv_bytes) / bandwidth,
                    weight_bytes=model.streamed_bytes,
                    kv_bytes=kv_bytes,
                )
            )
        return DecodeReport(
            model=name,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            backend=stats.backend,
            recorder=stats.recorder,
            read_tb_s=bandwidth / 1e12,
            capture_seconds=stats.capture_seconds,
            decode_graphs=len(stats.graphs),
            decode_mib_per_graph=stats.graph_bytes / max(len(stats.graphs), 1) / (1 << 20),
            nodes_per_graph=max((g.nodes for g in stats.graphs), default=0),
            results=tuple(results),
            sampling=work.sampling,
        )


def decode_runtime(model: LlamaModel, kv_groups: Sequence[KVCacheSpec], work: DecodeWork) -> Runtime:
    """Return a runtime for `bench_decode`. Raises: CapacityError: if the KV cache exceeds free memory."""
    largest, max_seq_len, device = work.batches[-1], work.context + work.steps, model.device
    attention = model.config.attention_specs(model.dtype)
    config = RuntimeConfig(
        max_num_reqs=largest,
        max_num_tokens=max(largest, 64),
        max_seq_len=max_seq_len,
        mixed_sizes=(),
        backend=work.backend,
        **config_fields(work.sampling) | {"truncation": work.sampling.truncated},
    )
    pages, needed = kv_memory(kv_groups, largest, work.context, max_seq_len)
    free = free_memory(device)
    if free is not None and needed > free:
        raise CapacityError(
            f"batches: expected a KV cache of at most {free} bytes, the memory that is free on {device}, got {needed} "
            f"bytes for {largest} sequences of {max_seq_len} tokens; lower the largest batch or the context"
        )
    return Runtime(
        model, attention, kv_groups, vocab_size=model.config.vocab_size, device=device, config=config, num_pages=pages,
        group=model.group,
    )  # fmt: skip


def kv_memory(
    kv_groups: Sequence[KVCacheSpec], rows: int, context: int, max_seq_len: int
) -> tuple[tuple[int, ...], int]:
    """Return the pages per pool, including the null page, and their bytes, for requests that start to decode at
    `context` tokens.

    Windowed groups have the pages of their window and of future tokens.
    """
    pages, nbytes = [], 0
    for pool in sorted({group.pool for group in kv_groups}):
        of_pool = [group for group in kv_groups if group.pool == pool]
        per_row = sum(group.pages_for(max_seq_len) - group.first_page_seen(context) for group in of_pool)
        pages.append(1 + rows * per_row)
        nbytes += pages[-1] * bytes_per_page(of_pool)
    return tuple(pages), nbytes


def kv_bytes_read(attention: Sequence[AttentionSpec], kv_groups: Sequence[KVCacheSpec], length: int) -> int:
    """Return the bytes of K and V that a step reads for one sequence."""
    total = 0
    for spec, place in zip(attention, kv_locations(attention, kv_groups), strict=True):
        if place is None or spec.is_cross:  # does not read the sequence's KV
            continue
        group = kv_groups[place.group]
        seen = min(length, spec.sliding_window or length, spec.attention_chunk_size or length)
        total += seen * group.layer_bytes_per_page // group.page_size
    return total


class DecodeLoop:
    """Decodes `batch` sequences, starting at `context` tokens. Tokens are fed back on the device."""

    def __init__(self, runtime: Runtime, batch: int, context: int, sampling: SamplingParams) -> None:
        self._runtime = runtime
        cache, rng = runtime.kv_cache, np.random.default_rng(0)
        # Shuffle pages, as in a long-running allocator. Every step lists the pages that requests read from the
        # context, and those of future tokens.
        free = [rng.permutation(count - 1).astype(np.int32) + 1 for count in cache.pool_pages]
        pages, counts, firsts = [], [], []
        for group in cache.groups:
            firsts += [group.first_page_seen(context)] * batch
            per_row = group.pages_for(runtime.config.max_seq_len) - firsts[-1]
            counts += [per_row] * batch
            pages.append(free[group.pool][: batch * per_row])
            free[group.pool] = free[group.pool][batch * per_row :]
        self._pages = np.concatenate(pages)
        self._indptr = np.cumsum([0, *counts], dtype=np.int32)
        self._firsts = np.array(firsts, np.int32)
        self._rows = np.arange(batch, dtype=np.int32)
        self._context = context
        values = SamplingValues(batch)
        for row in range(batch):
            values.set(row, replace(sampling, seed=row), context)
        self._sampling = values.of(self._rows)
        runtime.manager.reset()  # penalties start here
        runtime.manager.request_tables.set_logit_bias(dict.fromkeys(range(batch), sampling.logit_bias))

    def _batch(self, length: int, *, first: bool) -> Batch:
        n = len(self._rows)
        return Batch(
            req_indices=self._rows,
            seq_lens=np.full(n, length, np.int32),
            tokens=np.ones(n, np.int32) if first else None,
            page_indptr=self._indptr,
            page_ids=self._pages,
            first_pages=self._firsts,
            **self._sampling,
        )

    def step_seconds(self, steps: int, *, eager: bool = False) -> list[float]:
        """Return the seconds per step of several rounds. The host submits as far ahead as the ring allows."""
        rounds = []
        for _ in range(_ROUNDS + 1):
            batches = self._batches(steps)
            synchronize(self._runtime.device)
            start = time.perf_counter()
            for batch in batches:
                last = self._runtime.replay(batch, eager=eager)
            last.tokens()
            rounds.append((time.perf_counter() - start) / steps)
        return rounds[1:]  # the first round warms up

    def host_seconds(self, steps: int) -> list[float]:
        """Return the host seconds of single `replay()` calls with a free input slot. The first round is a warm-up."""
        wanted = _HOST_STEPS if self._runtime.device.type == "cuda" else steps
        rounds = []
        for _ in range(1 + -(-wanted // steps)):
            rounds.append([self._host_seconds(batch) for batch in self._batches(steps)])
        return [seconds for calls in rounds[1:] for seconds in calls]

    def _host_seconds(self, batch: Batch) -> float:
        start = time.perf_counter()
        handle = self._runtime.replay(batch)
        seconds = time.perf_counter() - start
        handle.wait()
        return seconds

    def _batches(self, steps: int) -> list[Batch]:
        return [self._batch(self._context + 1 + i, first=i == 0) for i in range(steps)]
