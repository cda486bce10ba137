"""Mutations of the step: undo the write to one buffer, and check that a scenario fails.

refresh writes page_table  ->  restore its previous contents  ->  wrong tokens  ->  a scenario fails
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
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from tests.engine import test_encoder_faults
from tests.session.test_session import PROMPTS, alone, oracle
from tests.support.replay_scenarios import (
    draft_scenario,
    encoder_scenario,
    fault_scenario,
    logprob_scenario,
    mask_scenario,
    penalty_scenario,
    rejection_scenario,
    rig_of,
    scenario,
    tree_scenario,
    truncation_scenario,
)
from tests.support.toy import captured, first_of_two_ranks, make_rig

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


def state_scenario() -> None:
    """Requests with a stop token, without one, and at high temperature, in loops and single steps."""
    runtime = captured(loop_sizes=(4,), decode_sizes=(4,))
    want = [oracle(runtime, prompt, 12) for prompt in PROMPTS]
    with DecodeSession(runtime) as session:
        hot = SamplingParams(max_new_tokens=12, temperature=50.0, seed=3)
        requests = [session.add(PROMPTS[0], SamplingParams(max_new_tokens=12, stop_ids=frozenset({want[0][7]})))]
        requests += [session.add(PROMPTS[1], SamplingParams(max_new_tokens=12)), session.add(PROMPTS[2], hot)]
        session.run(2)
        session.collect(wait=True)
        launches = session.run(3)
        session.collect(wait=True)
        assert [len(launch.tokens()) for launch in launches] == [3]
        for _ in range(12):
            session.run(4)
            session.collect(wait=True)
        assert requests[0].tokens == want[0][: want[0].index(want[0][7]) + 1]
        assert requests[1].tokens == want[1]
        assert [request.finish_reason.name for request in requests] == ["STOP_TOKEN", "LENGTH", "LENGTH"]
        assert requests[2].tokens == alone(runtime, requests[2])[0]


def encoder_len_scenario() -> None:
    test_encoder_faults.test_changed_encoder_len_is_a_fault(CPU)


def step_scenario() -> None:
    scenario(rig_of(two_parts=False))


def parts_scenario() -> None:
    """Mixed steps in two parts."""
    scenario(rig_of(two_parts=True))


def interleaved_scenario() -> None:
    """Ranks that share the KV of each request."""
    with first_of_two_ranks() as cache:
        scenario(make_rig(CPU, cache=cache, page_size=32, num_pages=20))


NOT_MISSED = ("last_writers", "write_conflicts", "counted_lens", "req_status")
"""The first two are written and read by one refresh: contents of earlier steps are ignored, as they carry the step
number. With a `counted_lens` of 0, a step counts the whole sequence again. Only models read `req_status`."""

WRITTEN = {
    name: spec
    for name, spec in StaticBuffers.specs().items()
    if name not in NOT_MISSED
    and (
        (spec.kind in (BufferKind.DERIVED, BufferKind.CARRIED) and spec.readers != ("refresh",))
        or (spec.kind in (BufferKind.PERSISTENT, BufferKind.OUTPUT) and spec.writer != "host")
    )
}
SCENARIOS: dict[Callable[[], None], tuple[str, ...]] = {
    encoder_len_scenario: ("last_encoder_len",),
    feedback_scenario: ("last_token",),
    conflict_scenario: ("step_counter",),
    encoder_scenario: ("encoder_lens",),
    truncation_scenario: ("top_ks", "top_ps", "min_ps"),
    penalty_scenario: (
        "penalty_seen", "penalty_counts", "token_history", "repetition_penalties", "presence_penalties",
        "frequency_penalties", "prompt_lens",
    ),
    mask_scenario: ("token_masks",),
    draft_scenario: ("drafts", "drafts_left", "draft_count_ring"),
    rejection_scenario: ("draft_logprobs",),
    tree_scenario: ("draft_parents", "tree_masks", "path_rows"),
    fault_scenario: ("fault_code", "fault_value", "fault_code_ring", "fault_value_ring"),
    logprob_scenario: ("logprobs", "logprob_tokens", "rank_ring", "logprob_ring", "logprob_token_ring"),
    interleaved_scenario: ("kv_limits",),
    parts_scenario: ("decode_seq_lens", "decode_start_loc", "prompt_seq_lens", "prompt_start_loc"),
}  # fmt: skip
SCENARIO_OF = {name: run for run, names in SCENARIOS.items() for name in names}


@pytest.mark.parametrize("field", WRITTEN)
def test_a_lost_write_fails_a_scenario(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = WRITTEN[field].writer
    real = getattr(program, writer)

    def forgetful(*args: Any, **options: Any) -> None:
        penalties = {"penalty_seen": "seen", "penalty_counts": "counts", "token_history": "history"}
        if field in penalties:
            target = getattr(args[-1].state, penalties[field])
        else:
            target = args[2] if writer == "store_draft_logprobs" else getattr(args[0], field)
        before = target.clone()
        real(*args, **options)
        target.copy_(before)

    monkeypatch.setattr(program, writer, forgetful)
    of_steps = WRITTEN[field].kind in (BufferKind.DERIVED, BufferKind.CARRIED)
    run = SCENARIO_OF.get(field, step_scenario if of_steps else state_scenario)
    with pytest.raises((AssertionError, GraphRTError, IndexError, RuntimeError, pytest.fail.Exception)):
        run()


@pytest.mark.parametrize("run", [*SCENARIOS, step_scenario, state_scenario])
def test_the_scenarios_pass_without_lost_writes(run: Callable[[], None]) -> None:
    run()
