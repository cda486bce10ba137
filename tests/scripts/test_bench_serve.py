"""The serving benchmark: its workload, its counts, its clock; its figures need a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.bench.serve import LaunchTimer, ServeReport, Workload, bench_serve
from graphrt.kernels.errors import ConfigError
from graphrt.models.loading import load_model
from tests.scripts.test_bench_decode import TINY

CPU = torch.device("cpu")


def bench(**options: Any) -> ServeReport:
    model = load_model(TINY, device=CPU).model
    return bench_serve("tiny", model, **{"workload": Workload(5, 3, 9), "rows": 2, "step_tokens": 16} | options)


def test_report() -> None:
    report = bench()
    prompts, params = report.workload.make(TINY.vocab_size)
    assert report.prompt_tokens == sum(map(len, prompts))
    assert report.output_tokens == sum(each.max_new_tokens for each in params)
    token = TINY.num_layers * 2 * 2 * 8 * 4
    lengths = [
        len(prompt) + i for prompt, each in zip(prompts, params, strict=True) for i in range(1, each.max_new_tokens)
    ]
    assert report.kv_bytes == sum(lengths) * token
    longest = max(len(prompt) + each.max_new_tokens for prompt, each in zip(prompts, params, strict=True))
    assert report.output_tokens / 2 <= report.steps < report.output_tokens + longest
    assert report.launches <= report.steps
    assert 0 < report.busy_seconds < report.seconds
    assert report.ttft_ms_p50 <= report.ttft_ms_p99 < 1e3 * report.seconds
    record = json.loads(json.dumps(report.to_json()))
    floor = (report.steps * report.weight_bytes + report.kv_bytes) / (report.read_tb_s * 1e12)
    assert record["floor_seconds"] == pytest.approx(floor)
    assert record["share_of_floor"] == pytest.approx(floor / report.seconds)
    assert record["requests_per_s"] == 5 / report.seconds
    assert record["tokens_per_s"] == report.output_tokens / report.seconds


def test_the_workload_is_that_of_nano_vllm() -> None:
    """The totals that its README states for 256 sequences."""
    prompts, params = Workload().make(151_936)
    assert sum(each.max_new_tokens for each in params) == 133_966
    assert (len(prompts), max(map(max, prompts))) == (256, 10_000)
    assert {each.temperature for each in params} == {0.6}
    assert all(100 <= len(prompt) <= 1024 for prompt in prompts)
    assert max(map(max, Workload().make(50)[0])) == 49


def test_sizes_are_checked() -> None:
    for sizes, text in (
        ({"requests": 0}, "requests: expected an int from 1 to 65536, got 0"),
        ({"least": 5, "most": 4}, "least: expected an int from 1 to 4, got 5"),
        ({"most": 0}, "most: expected an int from 1 to 1048576, got 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            Workload(**sizes)
    with pytest.raises(ConfigError, match="rows: expected an int from 1 to 65536, got 0"):
        bench(rows=0)
    with pytest.raises(ConfigError, match="step_tokens: expected at least 2, one token per request, got 1; raise"):
        bench(step_tokens=1)


def test_idle_time_is_between_launches_and_where_the_host_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of 4 ms: the second waits 1 ms on the device, the third comes when all has ended and takes 2 ms to
    make, which its events do not show."""
    recorded = iter([0.0, 4.0, 5.0, 9.0, 12.0, 18.0])
    ended = {4.0: False, 9.0: True}

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            assert stream == "steps"
            self.at = next(recorded)

        def query(self) -> bool:
            return ended[self.at]

        def synchronize(self) -> None:
            assert self.at == 18.0

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    clock = iter([0.0, 0.001, 0.001, 0.002, 0.012, 0.014])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("graphrt.bench.serve.time", SimpleNamespace(perf_counter=lambda: next(clock)))

    class Manager:
        def begin(self) -> str:
            return "begun"

        def advance(self) -> str:
            return "advanced"

    manager = Manager()
    with LaunchTimer(manager, "steps") as timer:  # type: ignore[arg-type]
        assert [manager.begin(), manager.advance(), manager.advance()] == ["begun", "advanced", "advanced"]
    assert (manager.begin(), vars(manager)) == ("begun", {})
    assert timer.launches == 3
    assert timer.busy_seconds == pytest.approx((18 - 1 - 3 - 2) / 1e3)
