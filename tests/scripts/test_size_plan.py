"""Planned capture sizes against all subsets, and the costs that they are planned with."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import accumulate, combinations, product
from pathlib import Path

import pytest

from graphrt.bench.size_plan import Curve, StepCosts, assess, plan_sizes
from graphrt.bench.step_costs import assumed_costs, measure_costs, read_costs
from graphrt.capture.descriptor import GraphKind
from graphrt.engine.traffic import Trace
from graphrt.kernels.errors import ConfigError
from graphrt.models.loading import load_model
from tests.support.cli import TINY

DECODE, MIXED = GraphKind
Sizes = dict[GraphKind, tuple[int, ...]]
SIZES: Sizes = {DECODE: tuple(range(1, 8)), MIXED: (16, 32, 48)}


def random_costs(rng: random.Random, sizes: tuple[int, ...]) -> StepCosts:
    graph, eager = (Curve(sizes, tuple(accumulate(rng.random() * top for _ in sizes))) for top in (2, 8))
    return StepCosts(graph, eager, rng.choice([0.0, 1.0, 60.0]), rng.randint(0, 9), rng.random())


def time_and_bytes(
    sizes: Sizes, trace: Trace, costs: dict[GraphKind, StepCosts], repeats: float
) -> tuple[float, float]:
    """Milliseconds of the trace and of 1 / `repeats` captures, and bytes of the graphs."""
    ms = pool = nbytes = 0.0
    for kind, of in costs.items():
        for n, count in trace[kind].items():
            fits = [size for size in sizes[kind] if size >= n]
            ms += count * (of.graph(min(fits)) if fits else max(of.graph(n), of.eager(n)))
        ms += len(sizes[kind]) * of.capture_ms / repeats
        nbytes += len(sizes[kind]) * of.graph_bytes
        pool = max([pool, *(size * of.pool_bytes for size in sizes[kind])])
    return ms, pool + nbytes


def test_a_plan_is_the_best_of_all_subsets() -> None:
    rng = random.Random(0)
    subsets = [[of for k in range(len(all_) + 1) for of in combinations(all_, k)] for all_ in SIZES.values()]
    numbers = set()
    for _ in range(50):
        costs = {kind: random_costs(rng, sizes) for kind, sizes in SIZES.items()}
        trace = {
            kind: Counter({n: rng.randint(1, 50) for n in rng.sample(range(1, sizes[-1] + 1), rng.randint(0, 7))})
            for kind, sizes in SIZES.items()
        }
        total, repeats = sum(of.total() for of in trace.values()) or 1, rng.choice([1, 10])
        limit = rng.choice([0, 12, 30, 60, 1000])
        every = [
            time_and_bytes(dict(zip(SIZES, pair, strict=True)), trace, costs, repeats) for pair in product(*subsets)
        ]
        plan = plan_sizes(trace, costs, memory_bytes=limit, max_num_reqs=7, max_num_tokens=48, steps=total * repeats)
        ms, nbytes = time_and_bytes(plan, trace, costs, repeats)
        assert ms == pytest.approx(min(time for time, needed in every if needed <= limit))
        assert nbytes <= limit
        numbers.add(tuple(map(len, plan.values())))
    assert len(numbers) > 10, "plans with many numbers of graphs are compared"


def test_assessment() -> None:
    linear, slow = Curve((0, 10), (1.0, 2.0)), Curve((1,), (5.0,))
    costs = {DECODE: StepCosts(linear, slow, 20.0, 100.0, 3.0), MIXED: StepCosts(linear, slow, 50.0, 200.0, 2.0)}
    trace = {DECODE: Counter({3: 6, 4: 1, 9: 1}), MIXED: Counter({30: 2})}
    found = assess({DECODE: (4, 6), MIXED: (32,)}, trace, costs)
    assert found.graphs == 3
    assert found.padding == pytest.approx((6 * 1 + 2 * 2) / (7 * 4 + 9 + 2 * 32))
    assert found.eager == pytest.approx(1 / 10)
    assert found.ms_per_step == pytest.approx((7 * 1.4 + 5.0 + 2 * 4.2) / 10)
    assert found.graph_bytes == 2 * 100 + 200 + 32 * 2
    assert found.capture_seconds == pytest.approx((2 * 20 + 50) / 1e3)


def test_curves() -> None:
    curve = Curve.of({4: 3.0, 1: 1.0, 2: 2.0, 3: 1.5})
    assert [curve(n) for n in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.0, 3.0, 5.0]
    assert Curve((1,), (7.0,))(100) == 7.0


def test_mixed_sizes_are_multiples_of_16_up_to_the_maximum() -> None:
    trace = {DECODE: Counter({5: 1000}), MIXED: Counter({5: 1000, 90: 1000, 95: 1000, 99: 1000})}
    plan = plan_sizes(trace, assumed_costs()[0], memory_bytes=1e9, max_num_reqs=8, max_num_tokens=99, steps=1e9)
    assert plan == {DECODE: (5,), MIXED: (16, 96, 99)}


def test_a_large_runtime_is_planned_with_few_candidates() -> None:
    trace = {DECODE: Counter(dict.fromkeys(range(1, 2049), 1)), MIXED: Counter(dict.fromkeys(range(1, 8193), 1))}
    plan = plan_sizes(trace, assumed_costs()[0], memory_bytes=1e12, max_num_reqs=2048, max_num_tokens=8192, steps=1e9)
    assert plan == {DECODE: tuple(range(4, 2049, 4)), MIXED: tuple(range(16, 8193, 16))}


def test_costs_of_results(tmp_path: Path) -> None:
    decode = {
        "name": "decode", "model": "m", "device": "d", "nodes_per_graph": 100,
        "results": [{"batch": 2, "replay_ms": 1.0}, {"batch": 4, "replay_ms": 4.0}],
    }  # fmt: skip
    graphs = [
        {"size": "mixed[64 tokens, 4]", "seconds": 0.5, "pool_bytes": 640, "driver_bytes": 7, "nodes": 9},
        {"size": "decode[4]", "seconds": 0.25, "pool_bytes": 3, "driver_bytes": 2, "nodes": 9},
        {"size": "decode[2 x 2]", "seconds": 0.75, "pool_bytes": 0, "driver_bytes": 4, "nodes": 9},
    ]
    capture = {"name": "capture", "model": "n", "gpu": None, "graphs": graphs}
    path = tmp_path / "results"
    path.write_text("\n".join(["a table", json.dumps(decode), json.dumps(capture), json.dumps({"name": "serve"})]))
    costs, source = read_costs(path)
    assert source == "step times: m on d; graphs: n on cpu"
    for kind, memory in ((DECODE, (500.0, 4.5, 10.0)), (MIXED, (500.0, 7.0, 10.0))):
        assert (costs[kind].capture_ms, costs[kind].graph_bytes, costs[kind].pool_bytes) == memory
        assert [costs[kind].graph(n) for n in (1, 3, 6)] == [1.0, 2.5, 7.0]
        assert [costs[kind].eager_ms(n) for n in (1, 6)] == [3.0, 9.0], "20 us for each of 100 nodes"
    path.write_text(json.dumps(capture))
    assert read_costs(path)[1] == "step times: assumed; graphs: n on cpu"
    assert read_costs(path)[0][DECODE].graph == assumed_costs()[0][DECODE].graph
    for text, error in (
        ("", "--measured: .* has no result; write the last lines of `graphrt bench decode`"),
        ("\n{", "--measured: line 2 is not a result of `graphrt bench decode`"),
        *(
            (json.dumps(decode | {"results": results}), "the times of two batch sizes, each above 0")
            for results in (
                [],
                [{"batch": 4, "replay_ms": 5.0}],
                [{"batch": n, "replay_ms": float("nan")} for n in (1, 2)],
            )
        ),
        ('{"name": "decode"}', "--measured: line 1 is not a result .*KeyError"),
        (json.dumps(capture).replace("mixed[", "other["), "--measured: line 1 is not a result .*other"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=error):
            read_costs(path)
    with pytest.raises(ConfigError, match=r"--measured: '.*none' cannot be read"):
        read_costs(tmp_path / "none")


def test_costs_are_measured() -> None:
    """An op trace has no memory of its own on a CPU, and its times have no meaning."""
    costs = measure_costs(load_model(TINY, device="cpu").model, rows=5, step_tokens=100, context=20)
    assert [costs[kind].graph.sizes for kind in GraphKind] == [(1, 2, 4, 5), (64, 100)]
    for of in costs.values():
        assert of.graph.sizes == of.eager.sizes
        assert min(of.graph.ms) > 0 < of.capture_ms
        assert of.pool_bytes + of.graph_bytes > 0


@pytest.mark.gpu
@pytest.mark.alone
def test_eager_steps_take_longer_on_a_gpu() -> None:
    costs = measure_costs(load_model(TINY, device="cuda").model, rows=8, step_tokens=128, context=20)
    for of, size in ((costs[DECODE], 4), (costs[MIXED], 64)):
        assert 0 < of.graph(size) < of.eager(size)
        assert of.pool_bytes > 0
