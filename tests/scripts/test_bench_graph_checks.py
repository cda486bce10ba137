"""The benchmark of the kit measures what it says, on a model that is small."""

from __future__ import annotations

import torch

from graphrt.models.loading import load_model
from scripts.bench_graph_checks import bench_audit, bench_shadow, bench_verify, make_runtime
from tests.support.cli import TINY

CPU = torch.device("cpu")


def test_audits_verification_and_shadows_are_timed() -> None:
    loaded = load_model(TINY, device=CPU)
    with make_runtime(loaded, CPU, 2, 64, 0) as runtime:
        found, verified = bench_audit(runtime), bench_verify(runtime, loaded.model, 3)
    assert found["findings"] == []
    assert found["nodes"] > 10
    assert 0 < found["audit_ms"] < found["whole_ms"] + found["audit_ms"]
    assert (verified["findings"], verified["mixes"], verified["rows"]) == ([], 3, 2)
    assert min(verified["replays"], verified["eager_runs"]) >= 3
    assert verified["seconds"] > 0
    shadow = bench_shadow(loaded, CPU, 2, every=4, steps=8, rounds=2)
    # Three rounds of eight launches, and those of the prompts before.
    assert 6 <= shadow["shadow_steps"] <= 8
    assert shadow["differences"] == []
    assert shadow["step_ms"] > 0
