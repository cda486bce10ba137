"""State of a model per request, advanced by every token: rejected drafts and steps back leave no trace."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.batch import Batch
from graphrt.config import RequestTensor
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.proposer import Proposer
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.session.test_speculation import PARAMS, PROMPTS, results, run
from tests.support.drafts import Table
from tests.support.toy import VOCAB, LivelyModel, captured, finish

START = 7


def after(state: int, token: int) -> int:
    return (31 * state + token) % 1009


class Stateful(LivelyModel):
    """A model that prefers a token which all tokens so far determine, by a state of its own."""

    def forward(self, step: Step) -> torch.Tensor:
        starts, before = step.metadata.query_start_loc, step.state_before("state")
        at = torch.arange(len(step.input_ids), dtype=torch.int32, device=starts.device)
        rows = torch.searchsorted(starts[1:], at, right=True).clamp_max(len(before) - 1)
        values, state = [], before[0]
        for first, earlier, token in zip(starts[rows] == at, before[rows], step.input_ids, strict=True):
            state = (31 * torch.where(first, earlier, state) + token) % 1009
            values.append(state)
        values = torch.stack(values)
        step.keep_state("state", values)
        preferred = values[step.logits_indices, None] % VOCAB
        return super().forward(step).scatter_add_(1, preferred, torch.full_like(preferred, 300.0, dtype=torch.float32))


def stateful(device: torch.device, most: int, proposer: Proposer | None = None, **config: object) -> Runtime:
    tensor = RequestTensor("state", (2 + most,), torch.int64, START)
    return captured(
        Stateful(device), device, 80, proposer=proposer, num_speculative_tokens=most, request_tensors=(tensor,),
        max_num_tokens=20, **config,
    )  # fmt: skip


@pytest.mark.parametrize(("most", "loop_sizes"), [(1, (1, 2, 4)), (4, ())])
def test_rejected_drafts_leave_no_trace(device: torch.device, most: int, loop_sizes: tuple[int, ...]) -> None:
    """Drafts of any quality, in launches of any length, with chunks of prompts, a fork, and reused request indices."""
    plain = stateful(device, 0, max_logprobs=2)
    with DecodeSession(plain) as session:
        requests = run(session, PARAMS)
        want = results(requests)
    table = Table(most, device)
    runtime = stateful(device, most, table, loop_sizes=loop_sizes, max_logprobs=2)
    for seed, right in enumerate((1.0, 0.6, 0.0)):
        pick = random.Random(seed)
        table.fill(requests, pick, right)
        with DecodeSession(runtime) as session:
            found = run(session, PARAMS, pick)
            assert results(found) == want
            for request in found:
                state, tokens = START, [*request.prompt.tolist(), *request.tokens][:-1]
                for token in tokens:
                    state = after(state, token)
                kept = runtime.manager.request_tables.tensors["state"][request.req_index]
                assert kept[(len(tokens) - 1) % (2 + most)] == state
            if right < 1:
                continue
            session.release(found[0])
            long = session.add(list(range(45)), SamplingParams(2))  # a prompt of three steps
            finish(session)
            state = START
            for token in range(45):
                state = after(state, token)
            assert runtime.manager.request_tables.tensors["state"][long.req_index, 44 % (2 + most)] == state
    assert runtime.stats().tokens_per_step[1]
    assert runtime.stats().tokens_per_step[1 + most]
    plain.close()
    runtime.close()


def test_callers_step_back(device: torch.device) -> None:
    """A batch that starts at an earlier position; each is also compared with its eager step, from the same state."""
    runtime = stateful(device, 2)
    pages = {"page_indptr": [0, 5], "page_ids": range(1, 6), "req_indices": [0]}
    runtime.replay(Batch(seq_lens=[9], query_lens=[9], tokens=PROMPTS[0], **pages))
    sequence = list(PROMPTS[0])
    for start, tokens in ((9, [5, 6, 7]), (10, [8, 9]), (11, [2]), (11, [3, 4])):
        sequence[start:] = tokens
        count = len(tokens)
        batch = Batch(req_indices=[0], seq_lens=[start + count], query_lens=[count], sample=[count], tokens=tokens)
        assert runtime.compare(batch).equal
        runtime.replay(batch).tokens()
        state = START
        for at, token in enumerate(sequence):
            state = after(state, token)
            if at >= start:
                assert runtime.manager.request_tables.tensors["state"][0, at % 4] == state
    runtime.close()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="state_before: expected a name of RuntimeConfig"):
        captured(Stateful(torch.device("cpu")))
    for shape in ((), (5,)):
        tensor = RequestTensor("state", shape, torch.int64)
        with pytest.raises(
            ConfigError, match=r"state_before: 'state' has shape .* declare RequestTensor\('state', \(6, "
        ):
            captured(
                Stateful(torch.device("cpu")), num_speculative_tokens=4, request_tensors=(tensor,), max_num_tokens=20
            )
    with pytest.raises(UnsupportedError, match="keep_state: tokens of several branches have the same position"):
        stateful(torch.device("cpu"), 2, tree_depth=2)
