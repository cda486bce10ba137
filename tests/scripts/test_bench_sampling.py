"""The benchmark of sampling runs through on a CPU, and its last line is its result; its figures need a GPU."""

from __future__ import annotations

import json
import sys

import pytest

from scripts import bench_sampling


def test_a_dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--rows", "1,2", "--vocab", "6000", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_sampling.py", *options, "--only", "top-k 50"])
    bench_sampling.main()
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["name"] == "sampling"
    asked = [name for name in bench_sampling.CASES if "top-k 50" in name]
    assert [(row["case"], row["rows"]) for row in report["results"]] == [(name, n) for name in asked for n in (1, 2)]
    assert all(row["graphrt_us"] > 0 and row["torch_us"] > 0 for row in report["results"])
