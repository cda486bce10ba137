"""Small benchmarks run through on a CPU and report what they say; their figures need a GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from graphrt.kernels.ops import linear
from graphrt.kernels.ops.linear_call import LinearPlan
from graphrt.models.loading import load_model
from scripts import (
    bench_all_reduce,
    bench_context_parallel,
    bench_linear,
    bench_loop,
    bench_sampling,
    bench_start,
    bench_swap,
    bench_transformers,
)
from scripts.bench_graph_checks import bench_audit, bench_shadow, bench_verify, capture
from tests.scripts.test_bench_decode import TINY
from tests.support import cli

CPU = torch.device("cpu")


def test_audits_verification_and_shadows_are_timed() -> None:
    model = load_model(cli.TINY, device="cpu").model
    with capture(model, 2, 64) as runtime:
        found, verified = bench_audit(runtime), bench_verify(runtime, model, 3)
    assert found["findings"] == []
    assert found["nodes"] > 10
    assert 0 < found["audit_ms"] < found["whole_ms"] + found["audit_ms"]
    assert (verified["findings"], verified["mixes"], verified["rows"]) == ([], 3, 2)
    assert min(verified["replays"], verified["eager_runs"]) >= 3
    assert verified["seconds"] > 0
    shadow = bench_shadow(model, 2, every=4, steps=8, rounds=2)
    # Three rounds of eight launches, and those of the prompts before.
    assert 6 <= shadow["shadow_steps"] <= 8
    assert shadow["differences"] == []
    assert shadow["step_ms"] > 0


@pytest.mark.parametrize("fuse", [True, False])
def test_steps_of_transformers_models(fuse: bool) -> None:
    found = bench_transformers.time_hosted(TINY, CPU, [1, 2], 16, 2, fuse=fuse)
    assert all(ms > 0 for ms in found["ms"].values())
    assert list(found["ms"]) == [1, 2]
    layers = TINY.num_layers
    assert found["fused"].get("decoder_layer", 0) == (layers if fuse else 0)


def test_loops() -> None:
    row = bench_loop.measure(CPU, nodes=5, runs=7, samples=2)
    assert (row["nodes"], row["runs"]) == (5, 7)
    assert all(row[name] > 0 for name in ("launches_us", "loop_us", "loop_launch_us", "loop_make_ms"))
    assert "   5 nodes: " in bench_loop.line(row)
    assert " per run with 7 launches, " in bench_loop.line(row)


def test_all_reduce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--ranks", "1", "--tokens", "1,3", "--width", "64", "--calls", "2", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_all_reduce.py", *options])
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda work, arguments, nprocs: work(0, *arguments))
    bench_all_reduce.main()
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rows = [(row["name"], row["ranks"], row["tokens"], row["norm"]) for row in report["rows"]]
    assert rows == [("gloo", 1, tokens, norm) for tokens in (1, 3) for norm in (False, True)]
    assert all(0 < row["p20_us"] <= row["us"] <= row["p80_us"] for row in report["rows"])


def test_context_parallel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--device",
        "cpu",
        "--ranks",
        "1",
        "--reqs",
        "2",
        "--tokens",
        "1,70",
        "--head-dim",
        "8",
        "--samples",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["bench_context_parallel.py", *options])
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda work, arguments, nprocs: work(0, *arguments))
    bench_context_parallel.main()
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rows = [(row["exchange"], row["reqs"], row["tokens"], row["ranks"]) for row in report["rows"]]
    assert rows == [("gloo", 2, 1, 1), ("gloo", 2, 70, 1)]
    assert all(row["us"] > 0 and row["one_us"] > 0 and row["error"] < 1e-5 for row in report["rows"])


def test_sampling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--rows", "1,2", "--vocab", "6000", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_sampling.py", *options, "--only", "top-k 50"])
    bench_sampling.main()
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["name"] == "sampling"
    asked = [name for name in bench_sampling.CASES if "top-k 50" in name]
    assert [(row["case"], row["rows"]) for row in report["results"]] == [(name, n) for name in asked for n in (1, 2)]
    assert all(row["graphrt_us"] > 0 and row["torch_us"] > 0 for row in report["results"])


def test_swaps() -> None:
    found = bench_swap.measure(TINY, CPU, batch=2, context=20, steps=3, only=None, sizes_mb=(1,), sequence_tokens=64)
    (row,) = found["link"]
    page_bytes = 16 * TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * 4
    assert row["nbytes"] == row["pages"] * page_bytes <= 10**6
    assert all(value > 0 for value in row.values())
    steps = found["steps"]
    assert (steps["steps"], steps["swapped_pages"]) == (2 * bench_swap.ROUNDS, 4)
    assert steps["swap_gb_s"] > 0
    assert steps["median_ratio"] > 0


PHASES = ["python", "import_torch", "import_graphrt", "context", "model", "runtime", "capture", "first_token"]


def test_a_start_by_phases() -> None:
    before = time.time()
    found = bench_start.start(cli.TINY, "cpu", 2, before)
    assert list(found)[: len(PHASES)] == PHASES
    assert all(found[name] >= 0 for name in PHASES)
    assert sum(found[name] for name in PHASES[:-1]) == pytest.approx(found["ready"])
    assert found["ready"] + found["first_token"] <= time.time() - before
    assert found["graphs"] > 1
    assert (found["compile"], found["late_kernels"]) == (0, 0)  # a CPU compiles nothing


def test_starts_with_an_empty_and_with_a_filled_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """New processes that count the files of the kernel cache instead of starting a runtime."""
    code = (
        "import json, os, pathlib; cache = pathlib.Path(os.environ['TRITON_CACHE_DIR'])\n"
        "found = len(list(cache.iterdir())); (cache / str(found)).touch()\n"
        "print('a log'); print(json.dumps({'ready': float(found), 'compiled_kernels': 0}))"
    )
    real = bench_start.subprocess.run
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> object:
        commands.append(command)
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(bench_start.subprocess, "run", run)
    monkeypatch.setattr(bench_start.sys, "argv", ["bench_start", "--shapes", "a,b", "--repeats", "3", "--rows", "7"])
    monkeypatch.setattr("graphrt.bench.environment.provenance", lambda: {"gpu": "none"})
    bench_start.main()
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    expected = [("a", "empty", 0), ("a", "filled", 2), ("b", "empty", 0), ("b", "filled", 2)]
    assert [(row["shape"], row["cache"], row["ready"]) for row in report["results"]] == expected
    assert (report["name"], len(commands)) == ("start", 8)
    assert commands[0][1:-1] == [
        "-m", "scripts.bench_start", "--shapes", "a", "--device", "cuda:0", "--rows", "7", "--begun"
    ]  # fmt: skip


def test_plans_of_products(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "plans.json"
    other, older = [1, 16, "ADD", 64, 64, [1, 16, 8, 1, 1, 1]], [3, 16, "ADD", 576, 576, [1, 8, 1, 0, 1, 1]]
    table.write_text(json.dumps({"NVIDIA H200": [other], "cpu": [other, older]}))
    early, run = set(), linear._op
    monkeypatch.setattr(linear, "_op", lambda call: (early.add(call.early), run(call)))
    monkeypatch.setattr(linear, "linear_plan", linear.linear_plan)  # the benchmark replaces it
    monkeypatch.setattr(
        bench_linear, "candidates", lambda *_: [LinearPlan(1, 4, 2, False), LinearPlan(1, 4, 2, False, 2, 2)]
    )
    options = ["--device", "cpu", "--shapes", "smollm2-135m", "--tokens", "3", "--bits", "16", "--samples", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_linear.py", *options, "--write", str(table)])
    bench_linear.main()
    layer, head = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["results"]
    keys = [["SILU_MUL", 3072, 576], ["ADD", 576, 1536], ["ROPE_WRITE", 960, 576], ["ADD", 576, 576]]
    if ["ROPE_WRITE", 960, 576, None] in layer["plans"]:
        keys.append(["PLAIN", 960, 576])
    assert [plan[:3] for plan in layer["plans"]] == keys
    assert [plan[:3] for plan in head["plans"]] == [["PLAIN", 49_152, 576]]
    assert all(result[name] > 0 for result in (layer, head) for name in ("floor_us", "separate_us", "fused_us"))
    tables = json.loads(table.read_text())
    assert (tables["NVIDIA H200"], tables["cpu"][0]) == ([other], other)
    assert [row[:2] for row in tables["cpu"][1:]] == [[3, 16]] * (len(keys) + 1), "the older plan was replaced"
    assert older not in tables["cpu"]
    assert early == {True}, "weights are loaded as in a model"
    bench_linear.write_table(tmp_path / "new.json", "cpu", [other])
    assert json.loads((tmp_path / "new.json").read_text()) == {"cpu": [other]}
