"""compare(): runs a step as a graph and eagerly from one state, and restores the state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphrt.batch import Batch
from graphrt.engine import lifecycle as entry
from graphrt.kernels.errors import ReplayError
from tests.engine.test_shadow import everything
from tests.support.steps import decode, prompt
from tests.support.toy import VOCAB, make_rig


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_compare_restores_the_state(device: torch.device, kv_dtype: torch.dtype) -> None:
    rig = make_rig(device, kv_dtype=kv_dtype, fill=0.0)
    token = int(rig.manager.replay(prompt(1, 2, 3)).tokens()[0])
    before = everything(rig.manager)
    for batch in (decode(4), prompt(4, 4, 4, 4), Batch.empty()):
        comparison = rig.manager.compare(batch)
        assert comparison.equal, str(comparison)
        assert "are bitwise equal" in str(comparison)
        assert len(comparison.graph.tokens) == batch.num_reqs
    after = everything(rig.manager)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    comparison = rig.manager.compare(decode(4))
    found = rig.manager.replay(decode(4)).tokens()
    assert comparison.graph.tokens.tolist() == comparison.eager.tokens.tolist() == found.tolist()
    if kv_dtype is torch.float32:
        assert found.tolist() == [int(rig.model.oracle([1, 2, 3, token]).argmax())]


def test_compare_shows_a_frozen_number(device: torch.device) -> None:
    """A Python number that changes between steps."""
    scale = [1.0]
    rig = make_rig(device)
    forward = rig.model.forward
    rig.model.forward = lambda step: forward(step) * scale[0]
    rig = make_rig(device, model=rig.model)
    assert rig.manager.compare(prompt(1, 2)).equal
    scale[0] = -2.0
    comparison = rig.manager.compare(prompt(1, 2))
    assert comparison.differing_rows == (0,)
    exact = rig.model.oracle([1, 2])
    assert comparison.graph.tokens.tolist() == [int(exact.argmax())]
    assert comparison.eager.tokens.tolist() == [int(exact.argmin())]
    assert comparison.max_difference[0] == pytest.approx(3 * float(exact.abs().max()), rel=1e-3)
    assert "1 of 1 requests differ" in str(comparison)
    assert f"token {int(exact.argmax())} in the graph, {int(exact.argmin())} in the eager step" in str(comparison)


def test_faults_are_compared_and_not_raised(device: torch.device) -> None:
    rig = make_rig(device)
    comparison = rig.manager.compare(prompt(1, VOCAB))
    assert comparison.equal
    assert comparison.graph.faults == comparison.eager.faults != ()


def test_steps_in_flight_keep_their_results(device: torch.device) -> None:
    rig = make_rig(device)
    handles = [rig.manager.replay(prompt(t)) for t in range(3)]
    counted = rig.manager.stats().replays.total(), rig.manager.stats().padded_tokens
    assert rig.manager.compare(prompt(5)).equal
    assert (rig.manager.stats().replays.total(), rig.manager.stats().padded_tokens) == counted
    assert [int(h.tokens()[0]) for h in handles] == [int(rig.model.oracle([t]).argmax()) for t in range(3)]
    with pytest.raises(ReplayError, match="has overwritten the logits"):
        handles[-1].logits()


def test_comparing_a_batch_without_a_graph_raises(device: torch.device) -> None:
    rig = make_rig(device, mixed_sizes=())
    with pytest.raises(ReplayError, match=r"this batch has no graph \(no mixed"):
        rig.manager.compare(prompt(1, 2, 3))


@pytest.mark.gpu
def test_compare_runs_on_the_stream_of_the_steps() -> None:
    rig = make_rig(torch.device("cuda", 0), fill=0.0)
    rig.manager.replay(prompt(1, 2, 3)).tokens()
    before, other = everything(rig.manager), torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(3):
            comparison = rig.manager.compare(decode(4))
            assert comparison.equal, str(comparison)
            assert torch.cuda.current_stream() == other
    assert all(torch.equal(a, b) for a, b in zip(before, everything(rig.manager), strict=True))


def test_stream_contexts_can_be_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outermost context restores the stream."""
    steps, callers = (SimpleNamespace(cuda_stream=n, device=torch.device("cuda", 0)) for n in (1, 2))
    current, ranges = [callers], []
    monkeypatch.setattr(entry, "raw_stream", lambda index: current[-1].cuda_stream)
    monkeypatch.setattr(entry, "_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(entry, "_push_range", ranges.append)
    monkeypatch.setattr(entry, "_pop_range", ranges.pop)
    on_stream = entry.OnStream(steps, "step")
    with on_stream:
        with pytest.raises(ZeroDivisionError), on_stream:
            raise ZeroDivisionError
        assert current[-1] is steps
        assert ranges == ["step"]
    assert current[1:] == [steps, callers]
    assert ranges == []
