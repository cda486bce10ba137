"""The benchmark of the host runs through on a CPU and reports what it says; its figures need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts import bench_host
from tests.scripts.test_bench_decode import TINY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_host, "ROUNDS", 2)


def test_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    cells = bench_host.measure_cells("tiny", TINY, CPU, (1, 2), (20,), 4)
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(1, 20), (2, 20)]
    for cell in cells:
        for way in ("session", "session_8", "stateless", "copies"):
            found = cell[way]
            assert 0 < found["host_us"] <= found["host_p99_us"]
            assert found["interval_us"] > 0
            assert found["graph_us"] is found["gap_us"] is None, "there is no device"
            assert found["host_us"] <= found["host_all_us"]
            assert 0 < found["steady_us"] <= found["steady_p99_us"]
            assert found["steady_us"] <= found["steady_all_us"]
        assert cell["copies"]["steady_us"] == cell["copies"]["host_us"], "copies wait for each step"
        assert cell["session"]["collect_us"] > 1, "microseconds"
        assert cell["session"]["first_us"] > 1, "in which rows get pages"
        assert cell["copies"]["launch_us"] is None, "there is no driver"
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len(bench_host.header().splitlines()[-1].split("|")) == len(bench_host.line(cells[0]).split("|"))


class Submits:
    """A way that notes what is asked of it, where each submission takes as long as there are launches in flight."""

    steps = 2

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.flying, self.now = "", 0, 0.0
        monkeypatch.setattr(bench_host.time, "perf_counter", lambda: self.now)

    def prepare(self) -> None:
        self.calls += "p"
        self.now += 100.0

    def submit(self) -> None:
        self.calls += "s"
        self.now += 10e-6 if self.flying else 100e-6
        self.flying += 1

    def wait(self) -> None:
        self.calls += "w"
        self.flying = 0


def test_steady_steps_are_those_behind_others_while_the_ring_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Submits(monkeypatch)
    found = bench_host.steady_times(way, 5, 3)
    assert way.calls == "pspspsw" * 4, "one burst warms up, then two launches of each count"
    assert found == pytest.approx({"steady_us": 5.0, "steady_p99_us": 5.0}), "per step"


def test_all_ways_sample_the_same_tokens() -> None:
    """The baseline is the same model step: from an empty cache it samples what the others sample."""
    with bench_host.build(TINY, CPU, (3,), 60, TINY.num_layers) as runtime:

        def tokens(make: Callable[..., Any], read: Callable[[Any], list[int]]) -> list[list[int]]:
            for _, tensor in runtime.kv_cache.named_tensors():
                tensor.zero_()
            way, seen = make(runtime, 3, 20), []
            for _ in range(6):
                way.prepare()
                way.submit()
                seen.append(read(way))
            way.close()
            return [list(row) for row in zip(*seen, strict=True)]

        session = bench_host.SessionWay(runtime, 3, 20)
        for _ in range(5):
            session.submit()
        session.wait()
        session._session.collect(wait=True)
        want = [row.tokens for row in session._session.requests]
        session.close()
        assert tokens(bench_host.StatelessWay, lambda way: way._handles[-1].tokens().tolist()) == want
        assert tokens(bench_host.CopiesWay, lambda way: way.wait() or way._tokens.tolist()) == want
        assert len({tuple(row) for row in want}) == 1, "all rows began alike"


def test_a_whole_model_beside_a_busy_thread() -> None:
    whole = bench_host.measure_whole("tiny", replace(TINY, max_position_embeddings=2000), CPU, 20, 4)
    assert list(whole["ways"]) == ["session", "session_8", "session_32", "stateless", "copies"]
    for found in whole["ways"].values():
        assert found["tokens_per_s"] > 0
        assert found["busy_tokens_per_s"] > 0
    assert len(bench_host.whole_table(whole)) == 6


def test_a_gap_is_taken_from_the_graph_in_the_middle_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step makes the next one a microsecond longer, and there are 5 between two graphs."""
    step = 100

    def graph_us(way: object, runtime: object) -> float:
        return float(step)

    def interval_us(way: object, steps: int) -> float:
        nonlocal step
        step += steps
        return step - steps / 2 + 5

    monkeypatch.setattr(bench_host, "graph_us", graph_us)
    monkeypatch.setattr(bench_host, "interval_us", interval_us)
    assert bench_host.gap_times(None, None, 40) == {"interval_us": 125.0, "graph_us": 120.0, "gap_us": 5.0}


def test_of_several_rounds_the_quietest_counts() -> None:
    measured = ((30.0, 60.0, 200.0, 4.0, 8.0), (14.0, 22.0, 300.0, 7.0, 9.0), (90.0, 15.0, 250.0, 2.0, 10.0))
    rounds = [
        {
            "host_us": host, "host_p99_us": p99, "steady_us": steady, "steady_p99_us": steady + 1, "first_us": first,
            "interval_us": 9 + gap, "graph_us": 9.0, "gap_us": gap,
        }
        for host, p99, first, gap, steady in measured
    ]  # fmt: skip
    assert bench_host.summary(rounds) == {
        "host_us": 14.0, "host_p99_us": 22.0, "host_all_us": 30.0, "first_us": 200.0,
        "steady_us": 8.0, "steady_p99_us": 9.0, "steady_all_us": 9.0,
        "interval_us": 11.0, "graph_us": 9.0, "gap_us": 2.0, "gap_all_us": 4.0,
    }  # fmt: skip
    assert rounds[0]["first_us"] == 200.0, "what was measured stays"
