"""Mutations of the step: undo the write to one persistent or output buffer, and check that a scenario fails.

    refresh writes page_table  ->  restore its previous contents  ->  wrong tokens  ->  a scenario fails

test_replay.py does the same with the buffers of one step, test_session.py with the request state of sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphrt.batch import Batch
from graphrt.engine import program
from graphrt.kernels.errors import GraphRTError
from graphrt.kernels.metadata.buffers import BufferKind, StaticBuffers
from graphrt.kernels.types import FaultCode
from tests.engine import test_encoder_faults
from tests.session.test_session import STATE, state_scenario
from tests.support.replay_scenarios import fault_scenario, logprob_scenario, penalty_scenario
from tests.support.toy import make_rig

CPU = torch.device("cpu")


def feedback_scenario() -> None:
    """A token that the host never reads is the input of the next step."""
    rig = make_rig(CPU)
    first, other = rig.start(0, [5, 3, 1]), rig.start(1, [9])
    tokens = rig.manager.replay(Batch.from_requests([rig.row(first), rig.row(other)])).tokens().tolist()
    for sequence in (other, first):
        sequence.tokens.append(-1)
    logits = rig.manager.replay(Batch.from_requests([rig.row(s, 1, from_device=True) for s in (other, first)])).logits()
    for at, (prompt, token) in enumerate((([9], tokens[1]), ([5, 3, 1], tokens[0]))):
        torch.testing.assert_close(logits[at].double(), rig.model.oracle([*prompt, token]), atol=1e-4, rtol=1e-4)


def conflict_scenario() -> None:
    """Two requests write one page, at several batch positions; then they write it in turns, without a conflict."""
    rig = make_rig(CPU)
    requests = [rig.row(rig.start(i, [5, 3, 1])) for i in range(3)]
    requests[2] = replace(requests[2], pages=requests[0].pages)
    for order, faulty in (((0, 1, 2), {0, 2}), ((1, 0, 2), {1, 2}), ((0, 1), set()), ((2, 1), set()), ((2, 0), {0, 1})):
        found = rig.manager.replay(Batch.from_requests([requests[at] for at in order])).faults
        assert {fault.index for fault in found} == faulty, f"requests {order}"
        assert all(fault.code is FaultCode.DUPLICATE_PAGE for fault in found)


WITHIN_A_CALL = ("last_writers", "write_conflicts")
"""Written and read by one refresh: contents of earlier steps are ignored, as they carry the step number."""

WRITTEN = {
    name: spec
    for name, spec in StaticBuffers.specs().items()
    if spec.kind in (BufferKind.PERSISTENT, BufferKind.OUTPUT)
    and spec.writer != "host"
    and name not in (*STATE, *WITHIN_A_CALL)
}
SCENARIOS: dict[str, Callable[[], None]] = {
    "last_encoder_len": lambda: test_encoder_faults.test_changed_encoder_len_is_a_fault(CPU),
    "last_token": feedback_scenario,
    "step_counter": conflict_scenario,
    "penalty_seen": penalty_scenario,
    "penalty_counts": penalty_scenario,
    "fault_code_ring": fault_scenario,
    "fault_value_ring": fault_scenario,
    "rank_ring": logprob_scenario,
    "logprob_ring": logprob_scenario,
    "logprob_token_ring": logprob_scenario,
}


def holder_of(args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Return the buffers of a writer by name: the static buffers, or the penalty state."""
    first, last = args[0], args[-1]
    if isinstance(first, StaticBuffers):
        return {name: getattr(first, name) for name in StaticBuffers.specs()}
    return {"penalty_seen": last.state.seen, "penalty_counts": last.state.counts}


@pytest.mark.parametrize("field", WRITTEN)
def test_a_lost_write_fails_a_scenario(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = WRITTEN[field].writer
    real = getattr(program, writer)

    def forgetful(*args: Any, **options: Any) -> None:
        target = holder_of(args)[field]
        before = target.clone()
        real(*args, **options)
        target.copy_(before)

    monkeypatch.setattr(program, writer, forgetful)
    with pytest.raises((AssertionError, GraphRTError, IndexError, pytest.fail.Exception)):
        SCENARIOS.get(field, state_scenario)()


def test_the_scenarios_pass_without_lost_writes() -> None:
    feedback_scenario()
    conflict_scenario()
