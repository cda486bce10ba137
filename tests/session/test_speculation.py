"""Sessions with drafts: the tokens and the state are those of plain decoding, for any drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import GraphKind
from graphrt.config import RequestTensor
from graphrt.kernels.errors import ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.library import interpreted
from graphrt.kernels.metadata.buffers import STOP_TOKENS, BufferKind
from graphrt.kernels.types import FinishReason
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.sampling import sample_tokens
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Step
from tests.support.drafts import Table, TreeTable, results, state_of
from tests.support.layered import build
from tests.support.replay_scenarios import branches, copies
from tests.support.toy import VOCAB, captured, finish, make_runtime

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 7], [8, 2, 8, 2]]
PARAMS = [
    SamplingParams(40),
    SamplingParams(27, temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(33, temperature=20.0, seed=5, stop_ids={1, 2}, logprobs=2),
]
PENALIZED = [
    SamplingParams(40, frequency_penalty=0.3, repetition_penalty=1.1),
    SamplingParams(27, temperature=0.8, seed=3, presence_penalty=2.0, min_tokens=9, stop_ids={5, 11, 20}),
    SamplingParams(33, temperature=20.0, seed=5, stop_ids={1, 2}, logit_bias={4: 3.0}, logprobs=0),
]


def run(
    session: DecodeSession, params: list[SamplingParams], pick: random.Random | None = None
) -> list[SessionRequest]:
    """Run three requests, of which one starts later, and a fork; in random launches with `pick`."""
    requests = [session.add(prompt, each) for prompt, each in zip(PROMPTS[:2], params, strict=False)]
    session.run(3)
    requests.append(session.add(PROMPTS[2], params[2]))
    session.run(1)
    requests.append(session.fork(requests[1]))
    while session.running:
        session.run(pick.randint(1, 9) if pick else 1)
        session.collect(wait=pick is None or pick.random() < 0.5)
    return requests


def plain_request(device: torch.device, count: int) -> SessionRequest:
    """The first prompt with its tokens, decoded without drafts."""
    runtime = captured(device=device)
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(count))
        finish(session)
    runtime.close()
    return request


@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
@pytest.mark.parametrize(("most", "tree_depth"), [(1, 0), (4, 0), (9, 4)], ids=["1", "4", "tree"])
@pytest.mark.parametrize("params", [PARAMS, PENALIZED], ids=["plain", "penalties"])
def test_tokens_and_state_are_those_of_plain_decoding(
    device: torch.device, params: list[SamplingParams], most: int, tree_depth: int, loop_sizes: tuple[int, ...]
) -> None:
    """Any acceptance pattern, and any split into launches: with stop tokens, length limits, a prompt and a fork."""
    options = {"max_num_tokens": 40, "penalties": True, "max_logit_bias": 8, "max_logprobs": 2}
    plain = captured(device=device, num_pages=80, **options)
    with DecodeSession(plain) as session:
        requests = run(session, params)
        want, (state, kv) = results(requests), state_of(plain, session, requests)
    table = (TreeTable if tree_depth else Table)(most, device)
    runtime = captured(
        device=device, num_pages=80, proposer=table, num_speculative_tokens=most, tree_depth=tree_depth,
        loop_sizes=loop_sizes, **options,
    )  # fmt: skip
    for seed, right in enumerate((1.0, 0.8, 0.4, 0.0)):
        pick = random.Random(seed)
        table.fill(requests, pick, right)
        with DecodeSession(runtime) as session:
            found = run(session, params, pick)
            assert [request.req_index for request in found] == [request.req_index for request in requests]
            assert results(found) == want
            found_state, found_kv = state_of(runtime, session, found)
            assert found_state == state
            for ours, theirs in zip(found_kv, kv, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    plain.close()
    runtime.close()


@pytest.mark.parametrize("most", [1, 3])
def test_accepted_drafts_save_steps(device: torch.device, most: int) -> None:
    """Of 1 + K tokens a step, if all drafts are right. Drafts of the caller are verified in one step each."""
    request = plain_request(device, 25)
    want = request.tokens
    table = Table(most, device)
    table.fill([request], random.Random(0), 1.0)
    steps = -(-24 // (1 + most))
    for proposer in (table, None):
        runtime = captured(device=device, proposer=proposer, num_speculative_tokens=most, max_num_tokens=32)
        with DecodeSession(runtime) as session:
            request, launches = session.add(PROMPTS[0], SamplingParams(25)), 0
            session.run(1)
            while session.running:
                session.collect(wait=True)
                if proposer is None:
                    session.set_drafts(request, want[len(request.tokens) :][:most])
                session.run(1)
                launches += 1
                session.collect(wait=True)
            assert (request.tokens, launches) == (want, steps)
            assert request.verify_steps == steps
            assert sum(n * count for n, count in runtime.stats().tokens_per_step.items()) == 24
        runtime.close()


@pytest.mark.parametrize("drafts_at", [0, 1])
def test_plain_steps_are_not_counted_as_verifying(device: torch.device, drafts_at: int) -> None:
    """Launches of the same requests are collected together: one step with two right drafts, and one without drafts. A
    fork that shares a launch has the steps of its source, which the runtime counts once."""
    want = plain_request(device, 25).tokens
    runtime = captured(device=device, num_speculative_tokens=3, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(25))
        session.run(1)
        session.collect(wait=True)
        for step in range(2):
            if step == drafts_at:
                session.set_drafts(request, want[1 + step :][:2])
            session.run(1)
        session.collect(wait=True)
        assert request.tokens == want[:5]
        assert request.verify_steps == 1
        assert runtime.stats().tokens_per_step == {3: 1}
        session.set_drafts(request, want[5:7])
        session.run(1)
        fork = session.fork(request)
        session.collect(wait=True)
        assert request.tokens == fork.tokens == want[:8]
        assert request.verify_steps == fork.verify_steps == 2
        assert request.num_draft_tokens == fork.num_draft_tokens == fork.num_accepted_tokens == 4
        assert runtime.stats().tokens_per_step == {3: 2}
        assert runtime.stats().num_draft_tokens == 4
    runtime.close()


@pytest.mark.parametrize("count", [5, 30], ids=["length", "stop_token"])
def test_tokens_after_a_stop_token_are_dropped_and_not_counted(device: torch.device, count: int) -> None:
    """Of a step that accepts three drafts. The host finds the stop token, and the device may find the length limit."""
    want = plain_request(device, 30).tokens
    stop_ids = {want[2], *(token for token in range(VOCAB) if token not in want)}
    assert sum(token < want[2] for token in stop_ids) > STOP_TOKENS
    runtime = captured(device=device, num_speculative_tokens=3, max_num_tokens=32, max_logprobs=0)
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(count, stop_ids=stop_ids, logprobs=0))
        session.run(1)
        session.collect(wait=True)
        session.set_drafts(request, want[1:4])
        session.run(3)
        assert session.collect(wait=True) == [(request, want[1:3])]
        assert request.finish_reason is FinishReason.STOP_TOKEN
        assert [found.token for found in request.logprobs] == want[:3]
        assert runtime.stats().tokens_per_step == {2: request.verify_steps}
    runtime.close()


def test_a_custom_sampler_verifies_drafts(device: torch.device) -> None:
    """It reads the position and a value of the request, and calls the built-in sampler."""

    def sampler(logits: torch.Tensor, step: Step) -> torch.Tensor:
        rolled = torch.where((step.sample_lens % 3 == 0)[:, None], logits.roll(1, 1), logits)
        shift = step.request_state("shift")[:, None] * torch.arange(VOCAB, device=device)
        return sample_tokens(rolled + shift, step)

    table, found = Table(3, device), []
    for most in (0, 3):
        runtime = make_runtime(
            device, num_pages=60, sampler=sampler, proposer=table if most else None,
            config={"num_speculative_tokens": most, "request_tensors": (RequestTensor("shift"),)},
        )  # fmt: skip
        runtime.capture()
        with DecodeSession(runtime) as session:
            requests = [
                session.add(PROMPTS[0], SamplingParams(20, temperature=heat, seed=2), state={"shift": shift})
                for heat, shift in ((0.0, 0.0), (3.0, 0.5))
            ]
            finish(session)
            found.append(results(requests))
        table.fill(requests, random.Random(0), 0.9)
        accepted = runtime.stats().tokens_per_step
        runtime.close()
    assert found[1] == found[0]
    assert accepted[1]
    assert accepted[4]


@pytest.mark.parametrize("tree_depth", [0, 2])
def test_a_mask_that_changes_with_each_token_holds_for_all_tokens(device: torch.device, tree_depth: int) -> None:
    """As of a grammar. The repeated tokens of the prompt give drafts that the next mask forbids."""
    allowed = [5, 6, 7], [10, 11]
    masks = [[sum(1 << token for token in tokens), 0] for tokens in allowed]
    found = []
    for most in (0, 3):
        proposer = (branches if tree_depth else ngram_drafts) if most else None
        runtime = captured(
            device=device, proposer=proposer, num_speculative_tokens=most, tree_depth=tree_depth if most else 0,
            max_num_tokens=32, token_masks=True,
        )  # fmt: skip
        with DecodeSession(runtime) as session:
            request = session.add([5, 10, 5, 10, 5, 10, 5], SamplingParams(16, temperature=20.0))
            other = session.add([5, 10, 5, 10, 5, 10, 5], SamplingParams(16))
            while not request.finish_reason:
                session.set_token_mask(request, masks[len(request.tokens) % 2])
                session.run(1)
                session.collect(wait=True)
            finish(session)
            assert all(token in allowed[at % 2] for at, token in enumerate(request.tokens))
            found.append((request.tokens, other.tokens))
            session.set_token_mask(later := session.add([5], SamplingParams(9)), masks[0])
            finish(session)
            assert set(later.tokens) <= {5, 6, 7}
        runtime.close()
    assert found[1] == found[0]


def test_the_right_branch_of_a_tree_is_accepted(device: torch.device) -> None:
    """Right drafts are the last child at every depth. With a chain of as many drafts, the depth is the limit."""
    want = plain_request(device, 12).tokens
    runtime = captured(device=device, num_speculative_tokens=6, tree_depth=3, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(12))
        session.run(1)
        session.collect(wait=True)
        wrong = [(token + 1) % VOCAB for token in want]
        branches = [wrong[1], want[1], wrong[2], want[2], wrong[3], want[3]]
        for drafts, parents in ((branches, [0, 0, 2, 2, 4, 4]), (want[5:11], None)):
            session.set_drafts(request, drafts, parents)
            (launch,) = session.run(1)
            assert (launch.tokens() >= 0).sum() == 4
            session.collect(wait=True)
        assert request.tokens == want[:9]
        for drafts, parents in (([1, 2], [0]), ([1, 2], [0, 2]), ([1], [1])):
            with pytest.raises(ShapeError, match="parents: expected one number per draft, and each parent before"):
                session.set_drafts(request, drafts, parents)
        finish(session)
        assert request.tokens == want
    runtime.close()


def test_ngrams_are_found_in_prompt_and_output(device: torch.device) -> None:
    """A model that repeats what is in its prompt: all drafts are accepted."""
    pattern = [11, 12, 13, 14, 15, 16]
    runtime = captured(copies, device=device, proposer=ngram_drafts, num_speculative_tokens=3, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        request = session.add([*pattern, *pattern[:2]], SamplingParams(17))
        session.run(1)
        session.run(4)
        session.collect(wait=True)
        assert request.tokens == [*pattern[2:], *pattern, *pattern, 11][:17]
        assert request.finish_reason is FinishReason.LENGTH
    runtime.close()


def test_replay_verifies_the_drafts_of_a_batch(device: torch.device) -> None:
    """Plain requests, prompts and drafts in one step; counts of accepted tokens from the results."""
    runtime = captured(device=device, num_speculative_tokens=2, max_num_tokens=32)
    plain = captured(device=device)
    with DecodeSession(plain) as session:
        requests = [session.add(prompt, SamplingParams(9)) for prompt in PROMPTS]
        finish(session)
        want = [request.tokens for request in requests]
    pages = {"page_indptr": [0, 5, 10, 15], "page_ids": range(1, 16), "req_indices": [0, 1, 2]}
    lens = [len(prompt) for prompt in PROMPTS]
    prompts = {"seq_lens": lens, "query_lens": lens, "tokens": [t for prompt in PROMPTS for t in prompt]}
    first = runtime.replay(Batch(**prompts, **pages)).tokens()
    assert first.tolist() == [[tokens[0], -1, -1] for tokens in want]
    # Two right drafts, a wrong one, and none.
    batch = Batch(
        req_indices=[0, 1, 2], seq_lens=[lens[0] + 3, lens[1] + 2, lens[2] + 1], query_lens=[3, 2, 1], sample=[3, 2, 1],
        tokens=[*want[0][:3], want[1][0], (want[1][1] + 1) % VOCAB, want[2][0]],
    )  # fmt: skip
    handle = runtime.replay(batch)
    assert handle.descriptor.query_len == 3
    assert handle.logits().shape == (3, 3, VOCAB)
    assert handle.tokens().tolist() == [want[0][1:4], [want[1][1], -1, -1], [want[2][1], -1, -1]]
    assert runtime.compare(batch).equal
    buffers = runtime.manager.buffers
    assert buffers.req_seq_lens[:3].tolist() == [lens[0] + 3, lens[1] + 1, lens[2] + 1]
    with pytest.raises(UnsupportedError, match="at most 2 drafts per request, got 3"):
        runtime.replay(Batch(req_indices=[0], seq_lens=[20], query_lens=[4], sample=[4], tokens=[1] * 4))
    # The first request starts again, in a step with the drafts of the others: none that is right, and two.
    tokens = [*PROMPTS[0], want[1][1], (want[1][2] + 1) % VOCAB, *want[2][1:4]]
    batch = Batch(
        req_indices=[0, 1, 2], seq_lens=[lens[0], lens[1] + 3, lens[2] + 4], query_lens=[lens[0], 2, 3],
        sample=[1, 2, 3], tokens=tokens, page_indptr=[0, 3, 3, 3], page_ids=[1, 2, 3],
    )  # fmt: skip
    comparison = runtime.compare(batch)
    assert comparison.equal, comparison
    handle = runtime.replay(batch)
    assert (handle.descriptor.kind, handle.why_eager) == (GraphKind.MIXED, "")
    assert handle.logits().shape == (3, 3, VOCAB)
    assert handle.tokens().tolist() == [[want[0][0], -1, -1], [want[1][2], -1, -1], want[2][2:5]]
    assert buffers.req_seq_lens[:3].tolist() == [lens[0], lens[1] + 2, lens[2] + 4]
    for each in (runtime, plain):
        each.close()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"proposer: expected .* got num_speculative_tokens=0; pass"):
        captured(proposer=ngram_drafts)
    drafting = {"num_speculative_tokens": 2, "max_num_tokens": 32}
    for wrong in (None, [1, 2], (None, None), (torch.zeros(4, 2, dtype=torch.int32),) * 3):
        with pytest.raises(ShapeError, match=r"proposer: expected drafts \[\d, 2\] int32, or drafts and a second"):
            captured(proposer=lambda step, wrong=wrong: wrong, **drafting)
    with pytest.raises(ShapeError, match=r"the proposer's drafts: expected dtype int32, got int64; convert it"):
        captured(proposer=lambda step: ngram_drafts(step).long(), **drafting)
    runtime = captured(num_speculative_tokens=2, max_num_tokens=32)
    with DecodeSession(runtime) as session:
        request = session.add([1, 2, 3], SamplingParams(5))
        with pytest.raises(UnsupportedError, match="tokens: needs a runtime with num_speculative_tokens=3"):
            session.set_drafts(request, [1, 2, 3])
        with pytest.raises(UnsupportedError, match="parents: needs a runtime with tree_depth=1"):
            session.set_drafts(request, [1, 2], [0, 0])
    runtime.close()
    with pytest.raises(UnsupportedError, match="parents: needs a runtime with tree_depth"):
        captured(num_speculative_tokens=2, proposer=TreeTable(2, torch.device("cpu")), max_num_tokens=32)
    for change, reason in (
        ({"sliding_window": 2}, "tree_depth with sliding_window 2: the window must be larger than .* drafts, 2"),
        ({"attention_chunk_size": 8}, "tree_depth with attention_chunk_size: not supported"),
        ({"alibi_slopes": (0.5,) * 4}, "tree_depth with alibi_slopes: not supported"),
    ):
        spec, cache = AttentionSpec(4, 2, 16, torch.float32, **change), KVCacheSpec(1, 2, 16, 4, dtype=torch.float32)
        with pytest.raises(UnsupportedError, match=reason):
            build([spec], cache, 40, torch.device("cpu"), num_speculative_tokens=2, tree_depth=2)


@contextmanager
def kernels_of(name: str) -> Iterator[None]:
    if name == "reference":
        yield
        return
    with interpreted():
        yield


@pytest.mark.parametrize(("proposer", "most", "tree_depth"), [(ngram_drafts, 3, 0), (branches, 4, 2)])
def test_kernels_agree_with_the_reference(proposer: Proposer, most: int, tree_depth: int) -> None:
    """The same session on the references and on interpreted kernels: tokens, and all state that a step leaves. One
    request becomes as long as the runtime allows."""
    found = []
    for name in ("reference", "interpreter"):
        with kernels_of(name):
            runtime = captured(
                proposer=proposer, num_speculative_tokens=most, tree_depth=tree_depth, max_num_tokens=16,
                penalties=True, max_logprobs=1, backend="torch_reference", max_num_reqs=3, decode_sizes=(3,),
                mixed_sizes=(16,), max_seq_len=30,
            )  # fmt: skip
            params = [SamplingParams(22), SamplingParams(7, frequency_penalty=0.1, logprobs=1), SamplingParams(5)]
            with DecodeSession(runtime) as session:
                requests = [session.add(prompt, each) for prompt, each in zip(PROMPTS[1:], params[1:], strict=True)]
                session.run(2)
                requests.append(session.add(PROMPTS[0], params[0]))  # in mixed steps, in which the others have drafts
                finish(session, 4)
                state = runtime.manager.buffers.named(BufferKind.PERSISTENT, BufferKind.CARRIED)
                skipped = ("last_writers", "write_conflicts")
                found.append((results(requests), {n: t.tolist() for n, t in state if n not in skipped}))
            runtime.close()
    assert found[0][0] == found[1][0]
    for name, values in found[0][1].items():
        assert found[1][1][name] == values, name
