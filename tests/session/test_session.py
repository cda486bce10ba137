"""Sessions: requests that live on the device, against the toy model's float64 oracle and the stateless path."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from graphrt.batch import Batch
from graphrt.engine.handle import StepFaultError, TokenLogprob
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, GraphRTError, ReplayError, ShapeError
from graphrt.kernels.metadata.step_inputs import HEADER_STOP
from graphrt.kernels.types import FaultCode, FinishReason
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.step import Step
from tests.support.toy import VOCAB, Broken, captured, finish, greedy, make_runtime

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6]]
LOOPS = pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])


def oracle(runtime: Runtime, prompt: list[int], count: int) -> list[int]:
    return greedy(runtime.manager._program.model, list(prompt), count)


@LOOPS
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_requests_go_on_by_themselves(device: torch.device, steps: int, loop_sizes: tuple[int, ...]) -> None:
    """To their lengths, or to a stop token: one of two, none of many, and the only one of many that comes up."""
    runtime = captured(device=device, loop_sizes=loop_sizes)
    prompts = [*PROMPTS, PROMPTS[0]]
    want = [oracle(runtime, prompt, 12) for prompt in prompts]
    most = max(want[3])
    # The device has room for eight stop tokens: the largest is not among them.
    stops = [(), (VOCAB - 1, want[1][4]), set(range(VOCAB)) - set(want[2]), {*(set(range(most)) - set(want[3])), most}]
    assert len(stops[3]) > 9
    with DecodeSession(runtime) as session:
        requests = [
            session.add(prompt, SamplingParams(max_new_tokens=12, stop_ids=frozenset(stop)))
            for prompt, stop in zip(prompts, stops, strict=True)
        ]
        finish(session, steps)
        want[1] = want[1][: want[1].index(want[1][4]) + 1]
        want[3] = want[3][: want[3].index(most) + 1]
        assert [request.tokens for request in requests] == want
        reasons = [request.finish_reason.name for request in requests]
        assert reasons == ["LENGTH", "STOP_TOKEN", "LENGTH", "STOP_TOKEN"]
    assert runtime.allocator.num_free == 59
    assert sorted(runtime.free_req_indices) == [0, 1, 2, 3]


def test_tokens_can_be_read_while_a_launch_runs(device: torch.device) -> None:
    runtime = captured(device=device, loop_sizes=(4,), decode_sizes=(4,))
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(max_new_tokens=9))
        session.run(1)
        (launch,) = session.run(8)
        seen = [int(tokens[0]) for tokens in launch]
        session.collect(wait=True)
        assert request.tokens[1:] == seen
        assert launch.num_arrived == 8
        assert launch.tokens()[:, 0].tolist() == seen
        assert launch.ends()[-1, 0] == FinishReason.LENGTH
        for array in (launch.tokens(), launch.ends(), launch.req_indices):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_a_launch_says_whose_its_columns_are(device: torch.device) -> None:
    """Requests come and go, so a column is another request's from launch to launch."""
    runtime = captured(device=device, loop_sizes=(4,))
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, SamplingParams(max_new_tokens=12)) for prompt in PROMPTS[:2]]
        launches = [*session.run(3)]
        session.release(requests.pop(0))
        requests.append(session.add(PROMPTS[2], SamplingParams(max_new_tokens=12)))
        launches += session.run(6)
        session.collect(wait=True)
        by_index: dict[int, list[int]] = {}
        for launch in launches[3:]:
            for column, req_index in enumerate(launch.req_indices.tolist()):
                by_index.setdefault(req_index, []).extend(launch.tokens()[:, column].tolist())
        assert by_index.keys() == {request.req_index for request in requests}
        for request in requests:
            assert request.tokens[-len(by_index[request.req_index]) :] == by_index[request.req_index]
        assert [len(launch.req_indices) for launch in launches] == [launch.num_reqs for launch in launches]
        assert (launches[0].tokens() == -1).any(), "of a prompt that goes on"


def test_a_loop_ends_where_no_request_goes_on(device: torch.device) -> None:
    runtime = captured(device=device, loop_sizes=(4,), decode_sizes=(4,))
    want = oracle(runtime, PROMPTS[0], 20)
    with DecodeSession(runtime) as session:
        stop = want[6]
        request = session.add(PROMPTS[0], SamplingParams(max_new_tokens=30, stop_ids=frozenset({stop})))
        session.run(1)
        (launch,) = session.run(25)
        session.collect(wait=True)
        assert request.tokens == want[: want.index(stop) + 1]
        assert launch.tokens().shape == (want.index(stop), 1), "later steps did not run"
        other = session.add(PROMPTS[1], SamplingParams(max_new_tokens=5))
        finish(session)
        assert other.tokens == oracle(runtime, PROMPTS[1], 5), "and the next launch reads its own slot"


def test_a_launch_can_be_stopped() -> None:
    """The word that stops it is set while its third step runs: by the model, since a CPU runs steps at once."""
    runtime = captured()
    manager, stop_at, steps = runtime.manager, [0], [0]
    forward = manager._program.model.forward

    def stopping(step: Step) -> torch.Tensor:
        steps[0] += 1
        if steps[0] == stop_at[0]:
            queue = manager.queue
            queue._ring._slots[queue.launches % len(queue._ring._slots)].inputs[HEADER_STOP] = 1
        return forward(step)

    manager._program.model.forward = stopping
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, SamplingParams(max_new_tokens=12)) for prompt in PROMPTS]
        session.run(2, eager=True)
        session.collect(wait=True)
        before, stop_at[0] = [len(request.tokens) for request in requests], steps[0] + 3
        (launch,) = session.run(8, eager=True)
        session.collect(wait=True)
        assert [len(request.tokens) - count for request, count in zip(requests, before, strict=True)] == [3] * 3
        launch.stop()  # has ended: its slot is another's by now
        finish(session)
        assert [request.tokens for request in requests] == [oracle(runtime, prompt, 12) for prompt in PROMPTS]


def test_no_page_for_any_request_is_an_error_that_says_so(device: torch.device) -> None:
    runtime = captured(device=device, num_pages=3)
    with DecodeSession(runtime) as session:
        request = session.add([3, 1, 4], SamplingParams(max_new_tokens=20))
        session.run(6)
        with pytest.raises(CapacityError, match="run: no request has a page for its next token, and 0 pages are free"):
            session.run(1)
        session.collect(wait=True)
        assert request.tokens == oracle(runtime, [3, 1, 4], 6), "8 tokens of KV: 3, and 5 of those it sampled"
        session.release(request)
        again = session.add([3, 1, 4], SamplingParams(max_new_tokens=4))
        finish(session)
        assert again.tokens == request.tokens[:4]


def test_a_fork_goes_on_as_its_request_does(device: torch.device) -> None:
    runtime = captured(device=device)
    want = oracle(runtime, PROMPTS[1], 24)
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[1], SamplingParams(max_new_tokens=24))
        session.run(3)
        forks = [session.fork(request)]  # while its launches are in flight
        session.run(4)
        session.collect(wait=True)
        forks.append(session.fork(forks[0]))
        finish(session, 4)
        assert [each.tokens for each in (request, *forks)] == [want] * 3
        assert len({each.req_index for each in (request, *forks)}) == 3
    assert runtime.allocator.num_free == 59


def test_faulty_requests_end_and_are_named_and_the_others_go_on(device: torch.device) -> None:
    """A model whose logits are NaN for one request from some length on."""
    model = Broken(device)
    model.broken = (2,)
    runtime = captured(model, device)
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, SamplingParams(max_new_tokens=10)) for prompt in PROMPTS]
        (faulty,) = [request for request in requests if request.req_index == 2]
        session.run(10)
        with pytest.raises(ReplayError, match="request index 2: NO_TOKEN_OFFERED") as error:
            session.collect(wait=True)
        assert [fault.code for fault in error.value.faults] == [FaultCode.NO_TOKEN_OFFERED]
        assert faulty.finish_reason is FinishReason.FAULT
        finish(session)
        for request, prompt in zip(requests, PROMPTS, strict=True):
            want = oracle(runtime, prompt, 10)
            assert request.tokens == (want[: len(request.tokens)] if request is faulty else want)
        assert len(faulty.tokens) < 10


def test_launches_of_the_same_requests_are_collected_as_one(device: torch.device) -> None:
    """One collect returns what each request sampled in all launches in flight, in which requests end."""
    runtime = captured(device=device, ring_depth=16, max_num_tokens=32)
    want = [oracle(runtime, prompt, 12) for prompt in PROMPTS]
    with DecodeSession(runtime) as session:
        limits, stop = [4, 12, 9], want[1][6]
        requests = [
            session.add(prompt, SamplingParams(limit, stop_ids=frozenset({stop} if prompt is PROMPTS[1] else ())))
            for prompt, limit in zip(PROMPTS, limits, strict=True)
        ]
        want = [want[0][:4], want[1][: want[1].index(stop) + 1], want[2][:9]]
        session.run(1)
        assert dict(session.collect(wait=True)) == dict(zip(requests, [tokens[:1] for tokens in want], strict=True))
        for _ in range(11):
            session.run(1)
        assert dict(session.collect(wait=True)) == dict(zip(requests, [tokens[1:] for tokens in want], strict=True))
        assert [request.tokens for request in requests] == want
        assert [request.finish_reason.name for request in requests] == ["LENGTH", "STOP_TOKEN", "LENGTH"]
        assert session.collect(wait=True) == []
        assert not session.running


def test_a_step_that_was_refused_is_as_if_it_had_not_been_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Requests need new pages in a step that is refused. The next step lists these pages."""
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")  # each step checks all weights
    runtime = captured(device=device, num_pages=30)
    embed = runtime.manager._program.model.embed
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, SamplingParams(max_new_tokens=30)) for prompt in PROMPTS[::2]]
        kept, moved = embed.data, embed.data.clone()
        for at in range(24):
            if at in (0, 1, 9, 17):
                embed.data = moved
                with pytest.raises(ReplayError, match="embed: expected at address"):
                    session.run(1)
                embed.data = kept
            session.run(1)
        session.collect(wait=True)
        for request, prompt in zip(requests, PROMPTS[::2], strict=True):
            assert request.tokens == oracle(runtime, prompt, 24)


@pytest.mark.parametrize("mixed", [True, False])
def test_prompts_in_chunks_beside_requests_that_go_on(device: torch.device, mixed: bool) -> None:
    runtime = captured(device=device, num_pages=80, mixed_batches=mixed, max_num_tokens=16)
    generator = random.Random(3)
    with DecodeSession(runtime) as session:
        requests: list[SessionRequest] = []
        for length in (5, 40, 23, 1):
            prompt = [generator.randrange(VOCAB) for _ in range(length)]
            requests.append(session.add(prompt, SamplingParams(max_new_tokens=15)))
            session.run(2)
            session.collect()
        finish(session)
        for request in requests:
            assert request.tokens == oracle(runtime, request.prompt.tolist(), 15)


def test_equal_to_the_stateless_path_bit_by_bit(device: torch.device) -> None:
    runtime = captured(device=device, loop_sizes=(4,))
    for eager in (False, True):
        with DecodeSession(runtime) as session:
            requests = [session.add(prompt, SamplingParams(max_new_tokens=40)) for prompt in PROMPTS]
            session.run(6, eager=eager)
            session.collect(wait=True)
            session.run(1, eager=eager)
            at = [request.req_index for request in session.requests]
            logits = runtime.manager.queue._logits[:3].clone()
            session.collect(wait=True)
            lengths = [len(request.prompt) + len(request.tokens) - 1 for request in requests]
            pages = [session.pages.tables[0].pages(i) for i in at]
            batch = Batch(
                req_indices=at, seq_lens=lengths, tokens=[request.tokens[-2] for request in requests],
                page_indptr=np.cumsum([0, *map(len, pages)]), page_ids=np.concatenate(pages),
            )  # fmt: skip
            again = runtime.replay(batch).logits(copy=True)
            assert torch.equal(logits, again)


def alone(runtime: Runtime, request: SessionRequest) -> tuple[list[int], list[TokenLogprob | None]]:
    """What the stateless path samples for the same prompt and parameters, one token a step, and how likely it is."""
    req_index, pages = runtime.free_req_indices[-1], [pool.allocate(16) for pool in runtime.allocators]
    tokens, params = request.prompt.tolist(), request.params
    runtime.manager.request_tables.set_logit_bias({req_index: params.logit_bias})
    values = {
        "temperatures": [params.temperature], "seeds": [params.seed], "top_ks": [params.top_k],
        "top_ps": [params.top_p], "min_ps": [params.min_p], "prompt_lens": [len(tokens)],
        "repetition_penalties": [params.repetition_penalty], "presence_penalties": [params.presence_penalty],
        "frequency_penalties": [params.frequency_penalty],
        "logprobs": [-1 if params.logprobs is None else params.logprobs],
    }  # fmt: skip
    out: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    while len(out) < params.max_new_tokens and (not out or out[-1] not in params.stop_ids):
        new = tokens if not out else out[-1:]
        batch = Batch(
            req_indices=[req_index], seq_lens=[len(tokens) + len(out)], query_lens=[len(new)], tokens=new,
            page_indptr=range(0, 16 * len(pages) + 1, 16), page_ids=[page for ids in pages for page in ids], **values,
        )  # fmt: skip
        handle = runtime.replay(batch)
        out.append(int(handle.tokens().reshape(-1)[0]))
        logprobs += handle.logprobs()
    for pool, ids in zip(runtime.allocators, pages, strict=True):
        pool.free(ids)
    return out, logprobs


def test_a_collect_that_raised_keeps_what_it_took_in_for_the_next_one(device: torch.device) -> None:
    """A server that streams what `collect` gives loses no token of the other requests."""
    runtime = captured(device=device, token_masks=True)
    with DecodeSession(runtime) as session:
        faulty, request = (session.add(prompt, SamplingParams(max_new_tokens=6)) for prompt in PROMPTS[::2])
        session.set_token_mask(faulty, [0, 0])
        session.run(4)
        with pytest.raises(StepFaultError, match=f"request index {faulty.req_index}: NO_TOKEN_OFFERED"):
            session.collect(wait=True)
        ((streamed, tokens),) = session.collect(wait=True)
        assert streamed is request
        assert tokens == request.tokens == oracle(runtime, PROMPTS[2], 4)
        session.run(2)
        assert [(found, len(new)) for found, new in session.collect(wait=True)] == [(request, 2)]


def test_a_fork_says_by_which_seed_it_samples(device: torch.device) -> None:
    runtime = captured(device=device)
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(max_new_tokens=12, temperature=50.0, seed=9))
        session.run(2)
        fork = session.fork(request, seed=4)
        same, back = session.fork(fork), session.fork(fork, seed=9)
        assert [found.params.seed for found in (request, fork, same, back)] == [9, 4, 4, 9]
        finish(session)
        assert fork.tokens == same.tokens != request.tokens == back.tokens
        assert fork.tokens[:2] == request.tokens[:2]


WRONG_CALLS = [
    ("session.add([])", ShapeError, "prompt: expected at least 1 token, got 0"),
    ("session.add([VOCAB])", GraphRTError, "prompt"),
    ("session.add([1], 3)", ConfigError, "params: expected SamplingParams"),
    ("session.add([1] * 70)", CapacityError, "prompt: 70 tokens and max_new_tokens=1 exceed max_seq_len=64"),
    ("session.run(0)", ConfigError, "steps"),
    ("session.run(1.5)", ConfigError, "steps"),
    ("session.run(1, eager=2)", ConfigError, "eager"),
    ("session.collect(wait=1)", ConfigError, "wait"),
    ("session.fork(3)", ConfigError, "request: expected SessionRequest"),
    ("session.fork(request)", ConfigError, "fork: request 1 has prompt tokens left"),
    ("session.release(gone)", ConfigError, "release: the request was released, or belongs to another session"),
    ("session.fork(gone)", ConfigError, "fork: the request was released, or belongs to another session"),
    ("[session.add([1]) for _ in range(9)]", CapacityError, "requests: no request index is free"),
    ("(session.close(), session.run())", CaptureError, "run: this session was closed"),
    ("DecodeSession(runtime.manager)", ConfigError, "runtime: expected Runtime"),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG_CALLS, ids=[call for call, *_ in WRONG_CALLS])
def test_wrong_calls_are_named(call: str, error: type[Exception], text: str) -> None:
    runtime = captured()
    with DecodeSession(runtime) as session:
        gone, request = session.add([5]), session.add([7, 8])
        session.release(gone)
        with pytest.raises(error, match=text):
            eval(call, {**globals(), "session": session, "request": request, "gone": gone, "runtime": runtime})


def test_a_runtime_that_is_not_captured_or_samples_nothing() -> None:
    runtime = make_runtime(torch.device("cpu"), num_pages=9)
    with pytest.raises(CaptureError, match="DecodeSession: expected state 'captured', got 'new'"):
        DecodeSession(runtime)
    blind = make_runtime(torch.device("cpu"), num_pages=9, sampler=None)
    blind.capture()
    with pytest.raises(ConfigError, match="has no sampler"):
        DecodeSession(blind)
