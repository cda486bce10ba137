"""Repetition, presence and frequency penalties from the user to the tokens, against transformers and formulas."""

from __future__ import annotations

import pytest
import torch

from graphrt.batch import Batch
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.ops.sampling_reference import unpacked_bits
from graphrt.kernels.types import TOKEN_FROM_DEVICE
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.testing.poison import poison_derived
from tests.support.sampling_cases import finish, generated, greedy_output, model_of
from tests.support.toy import VOCAB, make_runtime

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
CASES = [
    SamplingParams(14, repetition_penalty=1.7),
    SamplingParams(14, repetition_penalty=0.6),
    SamplingParams(14, presence_penalty=25.0),
    SamplingParams(14, frequency_penalty=15.0),
    SamplingParams(14, presence_penalty=-9.0, frequency_penalty=5.0, repetition_penalty=1.3),
]


def runtime_of(device: torch.device, num_pages: int = 60, **config: object) -> Runtime:
    runtime = make_runtime(device, num_pages=num_pages, config={"penalties": True} | config)
    runtime.capture()
    return runtime


def run_session(
    runtime: Runtime, prompts: list[list[int]], params: list[SamplingParams], steps: int
) -> list[list[int]]:
    with DecodeSession(runtime) as session:
        rows = [session.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        finish(session, steps)
        return [row.tokens for row in rows]


@pytest.mark.parametrize("params", CASES, ids=range(len(CASES)))
def test_penalties_of_batches(device: torch.device, params: SamplingParams) -> None:
    """The prompt in two chunks, then tokens that the device feeds back; pads and poison in between."""
    runtime = runtime_of(device)
    want = greedy_output(model_of(runtime), PROMPT, params)
    assert want != greedy_output(model_of(runtime), PROMPT, SamplingParams(14)), "the penalty shows"
    values = {
        "repetition_penalties": [params.repetition_penalty], "presence_penalties": [params.presence_penalty],
        "frequency_penalties": [params.frequency_penalty], "prompt_lens": [len(PROMPT)],
    }  # fmt: skip
    pages = {"page_indptr": [0, 10], "page_ids": range(1, 11)}
    output = []
    for round_ in range(2):  # the row id once more: position 0 clears what the first sequence left
        runtime.replay(
            Batch(req_indices=[2], seq_lens=[4], query_lens=[4], tokens=PROMPT[:4], sample=[0], **pages, **values)
        )
        rest = PROMPT[4:]
        handle = runtime.replay(
            Batch(req_indices=[2], seq_lens=[len(PROMPT)], query_lens=[len(rest)], tokens=rest, **pages, **values)
        )
        output = [int(handle.tokens()[0])]
        while len(output) < params.max_new_tokens:
            poison_derived(runtime.manager.buffers)
            length = len(PROMPT) + len(output)
            handle = runtime.replay(Batch(req_indices=[2], seq_lens=[length], tokens=[TOKEN_FROM_DEVICE], **values))
            output.append(int(handle.tokens()[0]))
        assert output == want, f"round {round_}"


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
def test_requests_of_sessions_have_their_own_penalties(
    device: torch.device, steps: int, loop_sizes: tuple[int, ...]
) -> None:
    """Four rows beside each other, one without penalties; then the row ids again, in another order."""
    runtime = runtime_of(device, loop_sizes=loop_sizes)
    prompts = [PROMPT, PROMPT[:3], [7], PROMPT[2:]]
    params = [CASES[0], CASES[4], SamplingParams(14), CASES[3]]
    want = [greedy_output(model_of(runtime), prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    assert run_session(runtime, prompts, params, steps) == want
    assert run_session(runtime, prompts[::-1], params[::-1], steps) == want[::-1]


def test_mixed_steps_reorder_requests(device: torch.device) -> None:
    """Prompts come while others decode: their rows stand behind those, and each counts its own tokens."""
    runtime = runtime_of(device, backend="torch_reference", prefill_backend="torch_reference")
    prompts = [[7], PROMPT, PROMPT[:5]]
    params = [CASES[3], CASES[4], CASES[0]]
    with DecodeSession(runtime) as session:
        rows = []
        for prompt, each in zip(prompts, params, strict=True):
            rows.append(session.add(prompt, each))
            session.run(2)
        finish(session, 3)
        want = [greedy_output(model_of(runtime), prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        assert [row.tokens for row in rows] == want


def test_rejected_drafts_are_not_counted(device: torch.device) -> None:
    """A caller that verifies three drafts per step and goes back to the first wrong one gets the tokens, counts and
    bits of plain decoding."""
    params = SamplingParams(12, repetition_penalty=1.3, frequency_penalty=4.0, presence_penalty=1.0)
    values = {
        "repetition_penalties": [1.3], "presence_penalties": [1.0], "frequency_penalties": [4.0],
        "prompt_lens": [len(PROMPT)], "req_indices": [2],
    }  # fmt: skip
    pages = {"page_indptr": [0, 10], "page_ids": range(1, 11)}
    runtime = runtime_of(device, num_speculative_tokens=3, max_num_tokens=32)
    want, buffers = greedy_output(model_of(runtime), PROMPT, params), runtime.manager.buffers
    prompt = {"seq_lens": [len(PROMPT)], "query_lens": [len(PROMPT)], "tokens": PROMPT}
    output = [int(runtime.replay(Batch(**prompt, **pages, **values)).tokens()[0, 0])]
    assert output == want[:1]
    for accepted in (0, 2, 1, 3, 0):
        start = len(PROMPT) + len(output) - 1
        drafts = [*want[len(output) : len(output) + accepted], 7, 7, 7][:3]
        runtime.replay(Batch(seq_lens=[start + 4], query_lens=[4], tokens=[output[-1], *drafts], **values))
        output = want[: len(output) + accepted]
        # The step that computes the token after the accepted ones: it steps back over the rejected drafts.
        last = {"seq_lens": [start + accepted + 1], "query_lens": [1], "tokens": [output[-1]]}
        output.append(int(runtime.replay(Batch(**last, **values)).tokens()[0, 0]))
        assert output == want[: len(output)]
        counts = torch.bincount(torch.tensor(output[:-1]), minlength=VOCAB)
        assert buffers.penalty_counts[2].tolist() == counts.tolist()
        seen = unpacked_bits(buffers.penalty_seen[2].cpu(), VOCAB)
        assert set(seen.nonzero().flatten().tolist()) == {*PROMPT, *output[:-1]}


def test_a_preempted_sequence_counts_its_tokens_once(device: torch.device) -> None:
    """Too few pages for all: sequences are computed again from their first token, or wait with their pages kept."""
    runtime = runtime_of(device, num_pages=11)
    prompts = [PROMPT, [*PROMPT[:8], 11, 12], PROMPT[1:9]]
    params = [SamplingParams(14, repetition_penalty=1.5), CASES[4], SamplingParams(14, frequency_penalty=15.0)]
    want = [greedy_output(model_of(runtime), prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for swap_bytes in (0, 1 << 20):
        generator = TextGenerator(runtime, swap_bytes=swap_bytes)
        assert generated(generator, prompts, params) == want
        assert generator.stats.preemptions > 0


def test_shared_prefixes_are_counted_for_each_request(device: torch.device) -> None:
    runtime = runtime_of(device)
    common = [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    prompts = [[*common, 20], [*common, 21], [*common, 22]]
    params = [SamplingParams(10), CASES[4], SamplingParams(10, repetition_penalty=2.0)]
    want = [greedy_output(model_of(runtime), prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    assert generated(TextGenerator(runtime), prompts, params) == want


def test_a_fork_copies_the_counts(device: torch.device) -> None:
    runtime = runtime_of(device)
    params = SamplingParams(20, frequency_penalty=10.0, repetition_penalty=1.2)
    want = greedy_output(model_of(runtime), PROMPT, params)
    with DecodeSession(runtime) as session:
        row = session.add(PROMPT, params)
        session.run(6)
        fork = session.fork(row)
        session.run(3)
        second = session.fork(fork)
        session.release(row)
        finish(session, 4)
        assert fork.tokens == second.tokens == want


def test_requests_without_penalties_are_unchanged(device: torch.device) -> None:
    """Sampled rows in a batch with penalized rows, and in a runtime built without penalties: equal tokens."""
    free = [SamplingParams(20, temperature=30.0, seed=seed) for seed in range(4)]
    prompts = [PROMPT, PROMPT[:3], [7], PROMPT[2:]]
    plain = make_runtime(device, num_pages=60)
    plain.capture()
    want = run_session(plain, prompts, free, 4)
    mixed = [free[0], SamplingParams(20, presence_penalty=9.0), free[2], CASES[0]]
    got = run_session(runtime_of(device), prompts, mixed, 4)
    assert (got[0], got[2]) == (want[0], want[2])
    assert plain.manager.buffers.penalty_counts.numel() == 0
    counts = runtime_of(device).manager.buffers.penalty_counts
    assert counts.shape == (4, VOCAB)


def test_comparing_a_step_counts_nothing(device: torch.device) -> None:
    runtime = runtime_of(device)
    values = {"frequency_penalties": [1.0], "prompt_lens": [1]}
    pages = {"page_indptr": [0, 4], "page_ids": range(1, 5)}
    runtime.replay(Batch(req_indices=[1], seq_lens=[1], tokens=[5], **pages, **values)).tokens()
    before = runtime.manager.buffers.penalty_counts.clone()
    batch = Batch(req_indices=[1], seq_lens=[2], tokens=[9], **values)
    assert runtime.compare(batch).equal
    assert torch.equal(runtime.manager.buffers.penalty_counts, before)
    runtime.replay(batch).tokens()
    assert runtime.manager.buffers.penalty_counts[1].nonzero().tolist() == [[9]]


def test_a_runtime_without_penalties_refuses_them(device: torch.device) -> None:
    runtime = make_runtime(device, num_pages=20)
    runtime.capture()
    text = "needs a runtime with penalties=True, but this runtime has penalties=False; build it with RuntimeConfig"
    off = {"repetition_penalties": [1.0], "presence_penalties": [0.0]}
    pages = {"page_indptr": [0, 1], "page_ids": [1]}
    runtime.replay(Batch(req_indices=[0], seq_lens=[1], tokens=[1], **pages, **off)).tokens()
    for name, value in (("repetition_penalties", 1.1), ("presence_penalties", 0.1), ("frequency_penalties", -1.0)):
        batch = Batch(req_indices=[0], seq_lens=[2], tokens=[1], **(off | {name: [value]}))
        with pytest.raises(UnsupportedError, match=f"batch: {text}"):
            runtime.replay(batch)
    with DecodeSession(runtime) as session:
        with pytest.raises(UnsupportedError, match=f"params: {text}"):
            session.add([1], CASES[2])
        assert session.requests == ()
    with pytest.raises(UnsupportedError, match=rf"params\[1\]: {text}"):
        next(TextGenerator(runtime).generate([[1], [2]], [SamplingParams(3), CASES[0]]))
