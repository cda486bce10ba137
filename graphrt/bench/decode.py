"""The decode benchmark behind `graphrt bench decode`: ms per step against the memory floor, eager against replay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from graphrt.batch import Batch
from graphrt.bench.timer import measure_read_bandwidth
from graphrt.config import RuntimeConfig
from graphrt.runtime import Runtime
from graphrt.spec import AttentionSpec, KVCacheSpec

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """One batch size. Times in milliseconds per step, medians of several rounds with their spread.

    replay_ms    steady state, the host submitting ahead: what a serving loop gets
    eager_ms     the same steps without graphs, same run
    host_us      host time of one `replay()` call
    floor_ms     bytes that a step must read, over the measured read bandwidth
    """

    batch: int
    context: int
    replay_ms: float
    replay_ms_spread: float
    eager_ms: float
    eager_ms_spread: float
    host_us: float
    floor_ms: float
    weight_bytes: int
    kv_bytes: int

    @property
    def share_of_floor(self) -> float:
        """Floor over measured time: 1 would be every byte at full bandwidth and nothing else."""
        return self.floor_ms / self.replay_ms


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """A whole run; `to_json` is the one line that the command prints last."""

    model: str
    device: str
    backend: str
    recorder: str
    read_tb_s: float
    capture_seconds: float
    decode_graphs: int
    mixed_graphs: int
    decode_mib_per_graph: float
    mixed_mib_per_graph: float
    nodes_per_graph: int
    results: tuple[DecodeResult, ...]

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["results"] = [asdict(r) | {"share_of_floor": r.share_of_floor} for r in self.results]
        return record


def bench_decode(
    name: str,
    model: torch.nn.Module,
    attention: tuple[AttentionSpec, ...],
    kv_spec: KVCacheSpec,
    *,
    vocab_size: int,
    weight_bytes: int,
    batches: Sequence[int],
    context: int,
    steps: int,
    device: torch.device,
    backend: str | None = None,
) -> DecodeReport:
    """Capture a ladder for `batches` and time decoding from `context` tokens on, `steps` steps a round.

    weight_bytes   bytes of weights that one step reads (an embedding table that is only looked up does not count)
    """
    max_seq_len = context + steps
    largest = max(batches)
    config = RuntimeConfig(
        max_num_reqs=largest,
        max_num_tokens=max(largest, 64),
        max_seq_len=max_seq_len,
        mixed_sizes=(),
        backend=backend,
    )
    bandwidth = measure_read_bandwidth(device)
    pages = 1 + largest * kv_spec.pages_for(max_seq_len)
    runtime = Runtime(model, attention, kv_spec, vocab_size=vocab_size, device=device, config=config, num_pages=pages)
    try:
        runtime.capture()
        stats = runtime.stats()
        results = []
        for batch in sorted(batches):
            loop = _Loop(runtime, batch, context)
            replay = loop.step_seconds(steps, eager=False)
            eager = loop.step_seconds(steps, eager=True)
            kv_bytes = batch * (context + steps // 2) * kv_spec.bytes_per_token
            results.append(
                DecodeResult(
                    batch=batch,
                    context=context,
                    replay_ms=1e3 * median(replay),
                    replay_ms_spread=1e3 * (max(replay) - min(replay)),
                    eager_ms=1e3 * median(eager),
                    eager_ms_spread=1e3 * (max(eager) - min(eager)),
                    host_us=1e6 * loop.host_seconds(steps),
                    floor_ms=1e3 * (weight_bytes + kv_bytes) / bandwidth,
                    weight_bytes=weight_bytes,
                    kv_bytes=kv_bytes,
                )
            )
        decode = [g for g in stats.graphs if g.descriptor.query_len]
        return DecodeReport(
            model=name,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            backend=stats.backend,
            recorder=stats.recorder,
            read_tb_s=bandwidth / 1e12,
            capture_seconds=stats.capture_seconds,
            decode_graphs=len(decode),
            mixed_graphs=len(stats.graphs) - len(decode),
            decode_mib_per_graph=_mib_per_graph(sum(g.nbytes for g in decode), len(decode)),
            mixed_mib_per_graph=_mib_per_graph(
                stats.graph_bytes - sum(g.nbytes for g in decode), len(stats.graphs) - len(decode)
            ),
            nodes_per_graph=max((g.nodes for g in decode), default=0),
            results=tuple(results),
        )
    finally:
        runtime.close()


class _Loop:
    """Decodes `batch` sequences from `context` tokens on, each token fed back on the device."""

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self._runtime = runtime
        spec = runtime.kv_cache.spec
        per_row = spec.pages_for(runtime.config.max_seq_len)
        # Shuffled pages, as a long-running allocator hands them out.
        pages = np.random.default_rng(0).permutation(runtime.kv_cache.num_pages - 1)[: batch * per_row] + 1
        self._pages = pages.astype(np.int32)
        self._indptr = np.arange(batch + 1, dtype=np.int32) * per_row
        self._rows = np.arange(batch, dtype=np.int32)
        self._context = context
        self._vocab_token = 1

    def _batch(self, length: int, *, first: bool) -> Batch:
        n = len(self._rows)
        return Batch(
            row_ids=self._rows,
            seq_lens=np.full(n, length, np.int32),
            tokens=np.full(n, self._vocab_token, np.int32) if first else None,
            page_indptr=self._indptr,
            page_ids=self._pages,
        )

    def step_seconds(self, steps: int, *, eager: bool) -> list[float]:
        """Seconds per step of several rounds, the host submitting as far ahead as the ring allows."""
        rounds = []
        for _ in range(_ROUNDS + 1):
            batches = self._batches(steps)
            _synchronize(self._runtime.device)
            start = time.perf_counter()
            for batch in batches:
                last = self._runtime.replay(batch, eager=eager)
            last.tokens()
            rounds.append((time.perf_counter() - start) / steps)
        return rounds[1:]  # the first round warms up

    def host_seconds(self, steps: int) -> float:
        """Host seconds of one `replay()` call that finds its ring slot free (the median)."""
        calls = []
        for batch in self._batches(steps):
            start = time.perf_counter()
            handle = self._runtime.replay(batch)
            calls.append(time.perf_counter() - start)
            handle.wait()
        return median(calls)

    def _batches(self, steps: int) -> list[Batch]:
        return [self._batch(self._context + 1 + i, first=i == 0) for i in range(steps)]


def _mib_per_graph(nbytes: int, graphs: int) -> float:
    return nbytes / graphs / (1 << 20) if graphs else 0.0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
