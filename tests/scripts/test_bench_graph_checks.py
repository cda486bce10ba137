"""The benchmark of the kit measures what it says, on a model that is small."""

from __future__ import annotations

from graphrt.models.loading import load_model
from scripts.bench_graph_checks import bench_audit, bench_shadow, bench_verify, capture
from tests.support.cli import TINY


def test_audits_verification_and_shadows_are_timed() -> None:
    model = load_model(TINY, device="cpu").model
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
