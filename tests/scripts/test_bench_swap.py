"""The benchmark of swaps runs through on a CPU and reports what it says; its figures need a GPU."""

from __future__ import annotations

import torch

from scripts import bench_swap
from tests.scripts.test_bench_decode import TINY


def test_a_dry_run() -> None:
    found = bench_swap.measure(
        TINY, torch.device("cpu"), batch=2, context=20, steps=3, only=None, sizes_mb=(1,), sequence_tokens=64
    )
    (row,) = found["link"]
    page_bytes = 16 * TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * 4
    assert row["nbytes"] == row["pages"] * page_bytes <= 10**6
    assert all(value > 0 for value in row.values())
    steps = found["steps"]
    assert (steps["steps"], steps["swapped_pages"]) == (2 * bench_swap.ROUNDS, 4)
    assert steps["swap_gb_s"] > 0
    assert steps["median_ratio"] > 0
