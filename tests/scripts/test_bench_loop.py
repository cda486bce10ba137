"""The benchmark of loops runs through on a CPU and reports what it says; its figures need a GPU."""

from __future__ import annotations

import torch

from scripts import bench_loop


def test_a_dry_run() -> None:
    row = bench_loop.measure(torch.device("cpu"), nodes=5, runs=7, samples=2)
    assert (row["nodes"], row["runs"]) == (5, 7)
    assert all(row[name] > 0 for name in ("launches_us", "loop_us", "loop_launch_us", "loop_make_ms"))
    assert "   5 nodes: " in bench_loop.line(row)
    assert " by 7 launches, " in bench_loop.line(row)
