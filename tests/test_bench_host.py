"""The benchmark of the host runs through on a CPU and reports what it says; its figures need a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scripts import bench_host
from tests.test_bench_decode import TINY

CPU = torch.device("cpu")


def test_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    cells = bench_host.measure_cells("tiny", TINY, CPU, (1, 2), (20,), 4)
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(1, 20), (2, 20)]
    for cell in cells:
        for way in ("session", "session_8", "stateless", "copies"):
            found = cell[way]
            assert 0 < found["host_us"] <= found["host_p99_us"]
            assert found["host_us"] <= found["median_us"], "the quietest round"
            assert found["interval_us"] > 0
            assert found["graph_us"] is found["gap_us"] is None, "there is no device"
        assert cell["session"]["collect_us"] > 1, "microseconds"
        assert cell["launch_us"] is None
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len(bench_host.header().splitlines()[-1].split("|")) == len(bench_host.line(cells[0]).split("|"))
    assert bench_host.goals(cells) == []
    at_goal = cells[0] | {"batch": 256, "context": 8192}
    assert [text.partition("tokens: ")[2].split()[0] for text in bench_host.goals([at_goal])] == [
        "session",
        "stateless",
    ]


def test_all_ways_sample_the_same_tokens() -> None:
    """The baseline is the same model step: what it samples from an empty cache is what the others sample."""
    with bench_host.build(TINY, CPU, (3,), 60, TINY.num_layers) as runtime:

        def empty_cache() -> None:
            for _, tensor in runtime.kv_cache.named_tensors():
                tensor.zero_()

        session = bench_host.SessionWay(runtime, 3, 20)
        for _ in range(5):
            session.submit()
        session.wait()
        session._session.collect(wait=True)
        want = [row.tokens for row in session._session.rows]
        session.close()
        empty_cache()
        stateless, seen = bench_host.StatelessWay(runtime, 3, 20), []
        for _ in range(6):
            stateless.prepare()
            stateless.submit()
            seen.append(stateless._handles[-1].tokens().tolist())
        stateless.close()
        assert [list(row) for row in zip(*seen, strict=True)] == want
        empty_cache()
        copies, seen = bench_host.CopiesWay(runtime, 3, 20), []
        for _ in range(6):
            copies.submit()
            copies.wait()
            seen.append(copies._tokens.tolist())
        copies.close()
        assert [list(row) for row in zip(*seen, strict=True)] == want
        assert len({tuple(row) for row in want}) == 1, "all rows began alike"


def test_a_whole_model_beside_a_busy_thread() -> None:
    whole = bench_host.measure_whole("tiny", replace(TINY, max_position_embeddings=2000), CPU, 20, 4)
    assert list(whole["ways"]) == ["run(1)", "run(8)", "run(32)", "stateless", "copies"]
    for found in whole["ways"].values():
        assert found["tokens_per_s"] > 0
        assert found["busy_tokens_per_s"] > 0
    assert len(bench_host.whole_table(whole)) == 6
