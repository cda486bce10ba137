"""Capture sizes for a trace of batch sizes, with the least expected time among all choices that fit a memory limit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphrt.capture.descriptor import GraphKind
from graphrt.engine.traffic import Trace

CaptureSizes = dict[GraphKind, tuple[int, ...]]

_MIXED_MULTIPLE = 16  # tokens; products of a few tokens more or less take the same time
_MOST_CANDIDATES = 512  # planning takes time proportional to the cube of this number


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a step by its size, interpolated between the points, and extrapolated from the last two.

    sizes   ascending
    ms      never decreasing
    """

    sizes: tuple[int, ...]
    ms: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> Curve:
        """Return the curve through measured points. A time below that of a smaller size is raised to it."""
        sizes = sorted(points)
        ms = np.maximum.accumulate([points[size] for size in sizes])
        return cls(tuple(sizes), tuple(ms.tolist()))

    def __call__(self, size: int) -> float:
        if size > self.sizes[-1] and len(self.sizes) > 1:
            (low, high), (first, last) = self.sizes[-2:], self.ms[-2:]
            return last + (size - high) * (last - first) / (high - low)
        return float(np.interp(size, self.sizes, self.ms))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of one kind of batch.

    graph         time of a step with a graph of a size
    eager         time of a step without a graph; `eager_ms` returns at least the time with a graph
    capture_ms    time to capture a graph
    graph_bytes   device memory of each graph, without the pool that all graphs share
    pool_bytes    bytes of this pool per request or token of the largest graph
    """

    graph: Curve
    eager: Curve
    capture_ms: float
    graph_bytes: float
    pool_bytes: float

    def eager_ms(self, size: int) -> float:
        return max(self.graph(size), self.eager(size))


Costs = Mapping[GraphKind, StepCosts]


@dataclass(frozen=True, slots=True)
class Assessment:
    """Costs of a trace with given capture sizes.

    graphs           number of graphs
    padding          share of the tokens of all steps that are padding; requests of decode batches count as tokens
    eager            share of steps without a graph
    ms_per_step      expected time of a step
    graph_bytes      device memory of all graphs
    capture_seconds  time to capture them
    """

    graphs: int
    padding: float
    eager: float
    ms_per_step: float
    graph_bytes: float
    capture_seconds: float


def assess(sizes: Mapping[GraphKind, Sequence[int]], trace: Trace, costs: Costs) -> Assessment:
    """Return the costs of a trace with these capture sizes, in ascending order."""
    steps = eager = real = padded = 0
    ms = 0.0
    for kind, batches in trace.items():
        for size, count in batches.items():
            at = bisect_left(sizes[kind], size)
            has_graph = at < len(sizes[kind])
            ran = sizes[kind][at] if has_graph else size
            ms += count * (costs[kind].graph(ran) if has_graph else costs[kind].eager_ms(ran))
            steps, eager = steps + count, eager + count * (not has_graph)
            real, padded = real + count * size, padded + count * ran
    pool = max((costs[kind].pool_bytes * of[-1] for kind, of in sizes.items() if of), default=0.0)
    return Assessment(
        graphs=sum(map(len, sizes.values())),
        padding=1 - real / padded,
        eager=eager / steps,
        ms_per_step=ms / steps,
        graph_bytes=pool + sum(costs[kind].graph_bytes * len(of) for kind, of in sizes.items()),
        capture_seconds=sum(costs[kind].capture_ms * len(of) for kind, of in sizes.items()) / 1e3,
    )


class _Kind:
    """The fastest choices of sizes for the batches of one kind, by number of graphs and largest graph.

    sizes   candidates, ascending: the sizes of the trace, rounded up
    ms      [k, j]: least time of the trace with k graphs, of which candidate j - 1 is the largest. j is 0 if k is 0
    bytes   [k]: memory of k graphs without the pool
    pool    [j]: bytes of the pool
    """

    def __init__(self, kind: GraphKind, batches: Mapping[int, int], costs: StepCosts, limit: int, share: float) -> None:
        multiple = max(_MIXED_MULTIPLE if kind is GraphKind.MIXED else 1, -(-limit // _MOST_CANDIDATES))
        totals: dict[int, np.ndarray] = {}  # number of batches, and their time without graphs
        for size, count in sorted(batches.items()):
            rounded = min(-(-size // multiple) * multiple, limit)
            totals[rounded] = totals.get(rounded, 0.0) + count * np.array([1.0, costs.eager_ms(size)])
        self.sizes, n = list(totals), len(totals)
        served, eager_ms = np.vstack([np.zeros(2), *totals.values()]).cumsum(0).T  # of the batches up to a candidate
        ms, self._before = np.full((n + 1, n + 1), np.inf), np.zeros((n + 1, n + 1), int)
        ms[0, 0] = 0.0
        for j, size in enumerate(self.sizes, 1):
            # [k, i]: k graphs up to candidate i - 1, and a graph of this size for the larger batches
            options = ms[:-1, :j] + costs.graph(size) * (served[j] - served[:j])
            self._before[1:, j] = options.argmin(1)
            ms[1:, j] = options.min(1)
        larger = eager_ms[-1] - eager_ms  # [j]: time of the batches above candidate j - 1, without graphs
        graphs = np.arange(n + 1)
        self.ms = ms + larger + (share * costs.capture_ms * graphs)[:, None]
        self.bytes = costs.graph_bytes * graphs
        self.pool = costs.pool_bytes * np.array([0, *self.sizes])

    def chosen(self, k: int, j: int) -> tuple[int, ...]:
        """Return the sizes of the cheapest choice of k graphs, of which candidate j - 1 is the largest."""
        sizes: list[int] = []
        while k:
            sizes.append(self.sizes[j - 1])
            k, j = k - 1, int(self._before[k, j])
        return tuple(reversed(sizes))


def plan_sizes(
    trace: Trace, costs: Costs, *, memory_bytes: float, max_num_reqs: int, max_num_tokens: int, steps: float
) -> CaptureSizes:
    """Return the capture sizes that minimize the time of one capture and of `steps` steps distributed as in the trace.

    A batch runs with the smallest graph that has room for it, or eagerly if no graph has room. The plan is optimal,
    except that token counts are rounded up to multiples of 16, and to fewer than 512 candidates.

    memory_bytes    maximum device memory of all graphs
    """
    share = sum(batches.total() for batches in trace.values()) / steps
    limits = {GraphKind.DECODE: max_num_reqs, GraphKind.MIXED: max_num_tokens}
    decode, mixed = (_Kind(kind, trace[kind], costs[kind], limits[kind], share) for kind in GraphKind)
    least, best = np.inf, CaptureSizes()
    for pool in np.union1d(decode.pool, mixed.pool):
        # Find the best numbers of graphs among the choices that fit in this pool.
        of_decode, of_mixed = (np.where(of.pool <= pool, of.ms, np.inf) for of in (decode, mixed))
        ms = of_decode.min(1)[:, None] + of_mixed.min(1)
        ms[pool + decode.bytes[:, None] + mixed.bytes > memory_bytes] = np.inf
        i, k = np.unravel_index(ms.argmin(), ms.shape)
        if ms[i, k] < least:
            least = ms[i, k]
            best = {
                kind: of.chosen(int(n), int(ms[n].argmin()))
                for kind, of, n, ms in zip(GraphKind, (decode, mixed), (i, k), (of_decode, of_mixed), strict=True)
            }
    return best
