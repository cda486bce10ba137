"""`graphrt plan`: the proposal, its table and its JSON, for assumed costs, for results of other commands, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphrt.config import RuntimeConfig

SMALL = ("--rows", "4", "--step-tokens", "64", "--context", "20")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    path.write_text("decode 12 900000\ndecode 100 99000\nmixed 1000 1000\n")
    return path


def graph(n: int) -> float:
    return 4.6 + n * 9.8 / 256


def test_a_plan_with_assumed_costs(graphrt, trace: Path) -> None:
    code, out, _ = graphrt("plan", "--trace", trace, "--memory", "1", "--json")
    assert code == 0
    result = json.loads(out)
    assert (result["decode_sizes"], result["mixed_sizes"], result["steps"]) == ([12, 100], [1008], 1_000_000)
    before, after = result["default"], result["proposal"]
    assert before["graphs"] == 35 + 6
    assert after["graphs"] == 3
    assert before["padding"] == pytest.approx(1 - (12 * 900 + 100 * 99 + 1000) / (16 * 900 + 104 * 99 + 1024))
    assert after["padding"] == pytest.approx(1 - (12 * 900 + 100 * 99 + 1000) / (12 * 900 + 100 * 99 + 1008))
    assert before["ms_per_step"] == pytest.approx((900 * graph(16) + 99 * graph(104) + graph(1024)) / 1000)
    assert after["ms_per_step"] == pytest.approx((900 * graph(12) + 99 * graph(100) + graph(1008)) / 1000)
    assert (before["eager"], after["eager"]) == (0, 0)
    assert after["graph_bytes"] == pytest.approx((1008 * 372 / 2048 + 0.2 + 0.7) * (1 << 20))
    assert before["capture_seconds"] == pytest.approx(35 * 0.023 + 6 * 0.046)
    assert result["costs"].startswith("assumed, not measured")


def test_the_last_line_is_pasted_into_a_config(graphrt, trace: Path) -> None:
    code, out, _ = graphrt("plan", "--trace", trace, "--memory", "1")
    assert code == 0
    line = out.splitlines()[-1]
    assert line == "decode_sizes=(12, 100), mixed_sizes=(1008,)"
    config = eval(f"RuntimeConfig({line})", {"RuntimeConfig": RuntimeConfig})
    assert (config.decode_sizes, config.mixed_sizes) == ((12, 100), (1008,))
    for text in (
        "ms per step",
        "1,000,000 steps of",
        "assumed, not measured",
        "decode batches of more than 100 requests will run eagerly; add 256 to avoid it",
        "mixed batches of more than 1008 tokens will run eagerly; add 2048 to avoid it",
    ):
        assert text in out


def test_the_limits_of_a_plan(graphrt, trace: Path) -> None:
    """43 MiB hold the pool of 100 requests, but not that of 1,008 tokens. One step does not repay a capture."""
    for arguments, sizes in (
        (("--memory", "0.042"), ([12, 100], [])),
        (("--memory", "0"), ([], [])),
        (("--memory", "1", "--steps", "1"), ([], [])),
    ):
        code, out, _ = graphrt("plan", "--trace", trace, "--json", *arguments)
        result = json.loads(out)
        assert (code, result["decode_sizes"], result["mixed_sizes"]) == (0, *sizes), arguments
    assert result["proposal"]["eager"] == 1
    out = graphrt("plan", "--trace", trace, "--memory", "1", "--steps", "1")[1]
    assert "mixed batches will run eagerly: their graphs exceed --memory, or their capture takes longer" in out


def test_a_kind_without_steps_keeps_its_default(graphrt, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("decode 3 1000")
    code, out, _ = graphrt("plan", "--trace", tmp_path / "trace", "--memory", "1")
    assert code == 0
    assert out.splitlines()[-1] == "decode_sizes=(3,)"
    assert "the trace has no mixed steps; mixed_sizes keeps its default, not counted above" in out
    code, out, _ = graphrt("plan", "--trace", tmp_path / "trace", "--memory", "1", "--json")
    assert json.loads(out)["mixed_sizes"] is None


def test_plans_with_results_and_measured(graphrt, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("decode 3 1000000\nmixed 40 1000000")
    tiny = ("--shape", "tiny", "--device", "cpu")
    results = [
        graphrt("bench", "decode", *tiny, "--batch", "1,4", "--context", "16", "--steps", "2")[1],
        graphrt("capture", *tiny, "--rows", "4", "--step-tokens", "64", "--context", "20", "--json-only")[1],
    ]
    (tmp_path / "results").write_text("".join(results))
    for arguments, costs in (
        (("--measured", tmp_path / "results"), "step times: tiny on cpu; graphs: tiny on cpu"),
        (tiny, "measured with tiny on cpu, context 20"),
    ):
        code, out, log = graphrt("plan", "--trace", tmp_path / "trace", "--memory", "1", "--json", *SMALL, *arguments)
        assert code == 0, log
        result = json.loads(out)
        assert result["costs"] == costs
        assert result["decode_sizes"] in ([3], [])
        assert 0 < result["proposal"]["ms_per_step"] <= result["default"]["ms_per_step"] * 1.001


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--memory", "1", "--rows", "99"), "trace: line 2: expected at most 99 requests, got 100; raise max_num_reqs"),
        (("--memory", "1", "--step-tokens", "999"), "trace: line 3: expected at most 999 tokens, got 1000"),
        (("--memory", "1", "--step-tokens", "9"), "--step-tokens: expected at least --rows, 256, got 9; raise it"),
        (("--memory", "1", "--measured", "none"), "--measured: 'none' cannot be read"),
        (("--memory", "1", "--measured", "x", "--shape", "tiny"), "--measured: cannot be combined with --shape"),
        (("--memory", "1", "--model", "x", "--shape", "tiny"), "plan: expected one of --shape and --model, got both"),
    ],
)
def test_errors(refused, trace: Path, arguments: tuple[str, ...], text: str) -> None:
    assert text in refused("plan", "--trace", trace, *arguments)


@pytest.mark.parametrize("arguments", [("--memory", "1"), ("--trace", "x"), ("--trace", "x", "--memory", "-1")])
def test_usage_errors(refused, arguments: tuple[str, ...]) -> None:
    assert "Usage: " in refused("plan", *arguments, code=2)
