"""Mutations of the step: each buffer that lasts beyond a step, or that the host reads, is put back after its writer.

    refresh writes page_table  ->  put back to what it held before  ->  wrong tokens, and a scenario says so

Buffers of one step are dropped in turn in test_replay.py, the row state of sessions in test_session.py.
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
    """A token that the host never sees is the next step's input."""
    rig = make_rig(CPU)
    first, other = rig.start(0, [5, 3, 1]), rig.start(1, [9])
    tokens = rig.manager.replay(Batch.from_requests([rig.row(first), rig.row(other)])).tokens().tolist()
    for sequence in (other, first):
        sequence.tokens.append(-1)
    logits = rig.manager.replay(Batch.from_requests([rig.row(s, 1, from_device=True) for s in (other, first)])).logits()
    for at, (prompt, token) in enumerate((([9], tokens[1]), ([5, 3, 1], tokens[0]))):
        torch.testing.assert_close(logits[at].double(), rig.model.oracle([*prompt, token]), atol=1e-4, rtol=1e-4)


def claim_scenario() -> None:
    """Two rows that write one page, in the same place of the batch and in others; and rows that write it in turn."""
    rig = make_rig(CPU)
    rows = [rig.row(rig.start(i, [5, 3, 1])) for i in range(3)]
    rows[2] = replace(rows[2], pages=rows[0].pages)
    for order, faulty in (((0, 1, 2), {0, 2}), ((1, 0, 2), {1, 2}), ((0, 1), set()), ((2, 1), set()), ((2, 0), {0, 1})):
        found = rig.manager.replay(Batch.from_requests([rows[at] for at in order])).faults
        assert {fault.index for fault in found} == faulty, f"rows {order}"
        assert all(fault.code is FaultCode.DUPLICATE_PAGE for fault in found)


WITHIN_A_CALL = ("claims", "duplicates")
"""Written and read by one refresh; what an earlier step left there counts for nothing, as it has that step's number."""

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
    "step_counter": claim_scenario,
    "penalty_seen": penalty_scenario,
    "penalty_counts": penalty_scenario,
    "fault_code_ring": fault_scenario,
    "fault_value_ring": fault_scenario,
    "rank_ring": logprob_scenario,
    "logprob_ring": logprob_scenario,
    "logprob_token_ring": logprob_scenario,
}


def holder_of(args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """By name, what a writer writes to: the static buffers, or the state of the penalties."""
    first, last = args[0], args[-1]
    if isinstance(first, StaticBuffers):
        return {name: getattr(first, name) for name in StaticBuffers.specs()}
    return {"penalty_seen": last.state.seen, "penalty_counts": last.state.counts}


@pytest.mark.parametrize("field", WRITTEN)
def test_a_buffer_that_is_not_kept_is_noticed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_scenarios_pass_where_nothing_is_forgotten() -> None:
    feedback_scenario()
    claim_scenario()
