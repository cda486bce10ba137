"""Throughput of swaps over the host link, and their cost for concurrent steps.

    python -m scripts.bench_swap
    python -m scripts.bench_swap --only link
    python -m scripts.bench_swap --batch 64 --context 2048

link    GB/s of `SwapSpace.swap_out` and `swap_in` at several sizes, against one plain copy of the same bytes between
        pinned memory and the device: the limit of the link. Also host microseconds per call
steps   milliseconds per decode step of a captured model (the shape of Llama 3.2 1B, dummy weights), two steps in flight
        as in TextGenerator, alternating without and with swaps: medians and 99th percentiles. During each step a
        sequence of 2,048 tokens is swapped out or in

The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from graphrt.batch import Batch
from graphrt.bench.environment import provenance
from graphrt.bench.timer import synchronize
from graphrt.cache.page_allocator import PageAllocator
from graphrt.cache.swap import SwapArrival, SwappedPages, SwapSpace
from graphrt.cli.console import make_console
from graphrt.config import RuntimeConfig
from graphrt.kernels.types import KVLayout
from graphrt.models.config import ModelConfig
from graphrt.models.loading import load_model, make_runtime
from graphrt.models.shapes import shape_config
from graphrt.runtime import Runtime
from scripts.rigs.measure import print_table

PAGE = 16
SEQUENCES, SEQUENCE_TOKENS = 3, 2048  # swapped during the steps
SIZES_MB = (1, 8, 64, 256, 1024)
ROUNDS = 4


def build(config: ModelConfig, device: torch.device, batch: int, context: int, steps: int, spare: int) -> Runtime:
    """Return a captured runtime of one decode size with `spare` pages in addition to those of the requests."""
    longest = context + steps
    model = load_model(config, device=device, max_positions=longest).model
    sizes = RuntimeConfig(batch, batch, longest, decode_sizes=(batch,), mixed_sizes=())
    runtime = make_runtime(model, sizes, page_size=PAGE, num_pages=1 + batch * -(-longest // PAGE) + spare)
    runtime.capture()
    return runtime


def shuffled(allocator: PageAllocator, count: int) -> np.ndarray:
    """Return pages in the order of a long-running allocator."""
    return np.random.default_rng(0).permutation(allocator.allocate(count))


def plain_copies(nbytes: int, device: torch.device) -> tuple[float, float]:
    """Return GB/s of one copy to pinned memory and of one from it: the best of several."""
    pinned = device.type == "cuda"
    host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    ways = ((host, there), (there, host))
    return tuple(nbytes / min(seconds(lambda a=a, b=b: a.copy_(b, non_blocking=True), device)) / 1e9 for a, b in ways)


def seconds(call: Any, device: torch.device) -> list[float]:
    """Return seconds from the call until its copies have finished. The first two calls are a warm-up."""
    found = []
    for _ in range(7):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return found[2:]


def bench_link(runtime: Runtime, sizes_mb: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measure both directions at every size that fits into the free pages."""
    allocator, results = runtime.allocator, []
    page_bytes = runtime.kv_cache.groups[0].bytes_per_page
    for size in sizes_mb:
        count = max(1, size * 10**6 // page_bytes)
        if count > allocator.num_free:
            continue
        nbytes = count * page_bytes
        times: dict[str, list[float]] = {"out": [], "in": [], "host_out": [], "host_in": []}
        with SwapSpace(runtime.kv_cache, runtime.allocators, nbytes, stream=runtime.stream) as space:
            for _ in range(7):
                pages = shuffled(allocator, count)
                synchronize(runtime.device)
                start = time.perf_counter()
                swapped = space.swap_out([pages])
                times["host_out"].append(time.perf_counter() - start)
                synchronize(runtime.device)
                times["out"].append(time.perf_counter() - start)
                space.collect()
                pages = shuffled(allocator, count)
                start = time.perf_counter()
                space.swap_in(swapped, [pages])
                times["host_in"].append(time.perf_counter() - start)
                synchronize(runtime.device)
                times["in"].append(time.perf_counter() - start)
                allocator.free(pages)
        best = {name: min(values[2:]) for name, values in times.items()}
        plain_out, plain_in = plain_copies(nbytes, runtime.device)
        results.append(
            {
                "nbytes": nbytes,
                "pages": count,
                "out_gb_s": nbytes / best["out"] / 1e9,
                "in_gb_s": nbytes / best["in"] / 1e9,
                "plain_out_gb_s": plain_out,
                "plain_in_gb_s": plain_in,
                "host_out_us": 1e6 * median(times["host_out"][2:]),
                "host_in_us": 1e6 * median(times["host_in"][2:]),
            }
        )
    return results


class _Swaps:
    """Sequences that are swapped out and then in to other pages, with one swap per step, as by a scheduler."""

    def __init__(self, runtime: Runtime, space: SwapSpace, pages: int) -> None:
        self._space, self._allocator, self._count = space, runtime.allocator, pages
        self._pages = [self._allocator.allocate(pages) for _ in range(SEQUENCES)]
        self._arrivals: list[SwapArrival | None] = [None] * SEQUENCES
        self._outside: SwappedPages | None = None
        self._turn = self.bytes_moved = 0

    def go_on(self) -> None:
        """Swap in the sequence that is swapped out; if there is none, swap out the next one. The host does not wait."""
        self._space.collect()
        at = self._turn
        if self._outside is None:
            arrival = self._arrivals[at]
            if arrival is not None and not arrival.done():
                return
            self._outside = self._space.swap_out([self._pages[at]])
        elif self._allocator.num_free < self._count:
            return
        else:
            self._pages[at] = self._allocator.allocate(self._count)
            self._arrivals[at] = self._space.swap_in(self._outside, [self._pages[at]])
            self._outside, self._turn = None, (at + 1) % SEQUENCES
        self.bytes_moved += self._space.bytes_of([self._count])

    def end(self) -> None:
        """Free all pages."""
        if self._outside is not None:
            self._space.drop(self._outside)
            self._pages[self._turn] = []
        for pages, arrival in zip(self._pages, self._arrivals, strict=True):
            if arrival is not None:
                arrival.wait()
            self._allocator.free(pages)


class _Steps:
    """Decodes all requests, starting at the context length. Tokens are fed back on the device."""

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self._runtime, self._context = runtime, context
        self._rows = np.arange(batch, dtype=np.int32)
        per_row = -(-runtime.config.max_seq_len // PAGE)
        self._pages = shuffled(runtime.allocator, batch * per_row).astype(np.int32)
        self._indptr = np.arange(batch + 1, dtype=np.int32) * per_row

    def run(self, steps: int, swaps: _Swaps | None) -> list[float]:
        """Return milliseconds between the ends of steps, timed by the device, or by the host on a CPU."""
        events, clock, before = [], [], None
        synchronize(self._runtime.device)
        for step in range(steps):
            if swaps is not None:
                swaps.go_on()
            handle = self._runtime.replay(
                Batch(
                    req_indices=self._rows,
                    seq_lens=np.full(len(self._rows), self._context + 1 + step, np.int32),
                    tokens=np.ones(len(self._rows), np.int32) if step == 0 else None,
                    page_indptr=self._indptr if step == 0 else np.zeros(len(self._rows) + 1, np.int32),
                    page_ids=self._pages if step == 0 else np.empty(0, np.int32),
                )
            )
            if self._runtime.stream is not None:
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record(self._runtime.stream)
            else:
                clock.append(1e3 * time.perf_counter())
            if before is not None:
                before.wait()
            before = handle
        synchronize(self._runtime.device)
        if events:
            return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return np.diff(clock).tolist()


def bench_steps(runtime: Runtime, batch: int, context: int, steps: int, pages: int) -> dict[str, Any]:
    """Run alternating rounds without and with swaps. The first round of each kind is a warm-up."""
    loop, found = _Steps(runtime, batch, context), {"alone": [], "swapping": []}
    moved = elapsed = 0.0
    nbytes = SEQUENCES * pages * runtime.kv_cache.groups[0].bytes_per_page
    with SwapSpace(runtime.kv_cache, runtime.allocators, nbytes, stream=runtime.stream) as space:
        for round_ in range(1 + ROUNDS):
            alone = loop.run(steps, None)
            swaps = _Swaps(runtime, space, pages)
            start = time.perf_counter()
            swapping = loop.run(steps, swaps)
            if round_:
                elapsed += time.perf_counter() - start
                moved += swaps.bytes_moved
                found["alone"] += alone
                found["swapping"] += swapping
            swaps.end()
            space.reclaim(0, 2 * SEQUENCES * pages)
    result: dict[str, Any] = {"batch": batch, "context": context, "steps": len(found["alone"]), "swapped_pages": pages}
    for name, values in found.items():
        result[f"{name}_ms"], result[f"{name}_p99_ms"] = (float(x) for x in np.percentile(values, [50, 99]))
    result["median_ratio"] = result["swapping_ms"] / result["alone_ms"]
    result["p99_ratio"] = result["swapping_p99_ms"] / result["alone_p99_ms"]
    result["mean_ratio"] = float(np.mean(found["swapping"]) / np.mean(found["alone"]))
    result["swap_gb_s"] = moved / elapsed / 1e9
    return result


def measure(
    config: ModelConfig, device: torch.device, *, batch: int, context: int, steps: int, only: str | None,
    sizes_mb: tuple[int, ...] = SIZES_MB, sequence_tokens: int = SEQUENCE_TOKENS,
) -> dict[str, Any]:  # fmt: skip
    """Run both parts over one runtime."""
    (group,) = config.kv_groups(PAGE, KVLayout.NHD, torch.bfloat16)
    pages = sequence_tokens // PAGE
    spare = max(2 * SEQUENCES * pages, 1 + max(sizes_mb) * 10**6 // group.bytes_per_page)
    found: dict[str, Any] = {}
    with build(config, device, batch, context, steps, spare) as runtime:
        if only != "steps":
            found["link"] = bench_link(runtime, sizes_mb)
        if only != "link":
            found["steps"] = bench_steps(runtime, batch, context, steps, pages)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("link", "steps"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    found = measure(
        shape_config("llama-3.2-1b"), torch.device("cuda", 0), batch=options.batch, context=options.context,
        steps=options.steps, only=options.only,
    )  # fmt: skip
    console = make_console()
    for part, rows in (("link", found.get("link", [])), ("steps", [found["steps"]] if "steps" in found else [])):
        print_table(console, part, rows)
    print(json.dumps({"name": "swap", **provenance(), **found}), flush=True)


if __name__ == "__main__":
    main()
