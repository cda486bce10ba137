"""Steps and calls that fail: which request is named, and what a failed call changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphrt.batch import Batch
from graphrt.engine import program
from graphrt.engine.handle import StepFaultError
from graphrt.engine.shadow import Shadow
from graphrt.generate.generator import Event, TextGenerator
from graphrt.kernels.errors import CapacityError, CaptureError, ReplayError, ShapeError, UnsupportedError
from graphrt.kernels.types import FaultCode, FinishReason
from graphrt.sampling import sample_tokens
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.support.toy import VOCAB, Broken, LivelyModel, captured, finish, greedy, make_runtime

CPU = torch.device("cpu")
LOOPS = pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
PARAMS = SamplingParams(12, temperature=30.0, seed=1)


class Failing(LivelyModel):
    """Raises in one of its calls."""

    calls, fails_at = 0, -1

    def forward(self, step: Step) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("out of memory")
        return super().forward(step)


def alone(device: torch.device) -> list[int]:
    """Return the tokens of the request of these tests."""
    with DecodeSession(captured(device=device)) as session:
        request = session.add([3, 1, 4], PARAMS)
        finish(session)
        return list(request.tokens)


@pytest.mark.parametrize("failures", [1, 3])
def test_a_failed_step_keeps_results_of_launches_in_flight(device: torch.device, failures: int) -> None:
    """Their numbers are skipped: two launches in flight must not share a ring entry."""
    model = Failing(device)
    runtime = captured(model, device, launch_steps=1, ring_depth=2)
    expected = alone(device)
    with DecodeSession(runtime) as session:
        request = session.add([3, 1, 4], PARAMS)
        session.run(2)
        for _ in range(failures):
            model.fails_at = model.calls + 1
            with pytest.raises(RuntimeError, match="out of memory"):
                session.run(1, eager=True)
        finish(session)
        assert request.tokens == expected
    batch = {"req_indices": [0], "seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4], "page_indptr": [0, 1]}
    first = runtime.replay(Batch(page_ids=[9], **batch))
    for _ in range(failures):
        model.fails_at = model.calls + 1
        with pytest.raises(RuntimeError, match="out of memory"):
            runtime.replay(Batch(page_ids=[9], **batch), eager=True)
    second = runtime.replay(Batch(page_ids=[8], **batch))
    assert first.tokens().tolist() == second.tokens().tolist() == greedy(LivelyModel(device), [3, 1, 4], 1)


def test_a_session_is_over_if_a_step_ran_and_its_call_raised(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shadow finds no memory after the graph: the request is one token longer than the host knows."""
    runtime = captured(device=device, shadow_every=1)
    real = Shadow._take

    def take(self: Shadow, copies: object, *args: object) -> None:
        if copies is self._graph:
            raise torch.OutOfMemoryError("no memory")
        real(self, copies, *args)  # type: ignore[arg-type]

    session = DecodeSession(runtime)
    session.add([3, 1, 4], PARAMS)
    session.run(1)
    session.collect(wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "_take", take)
        with pytest.raises(torch.OutOfMemoryError):
            session.run(1)
    with pytest.raises(CaptureError, match="run: an earlier call was interrupted"):
        session.run(1)
    session.close()


@pytest.mark.parametrize("released", [False, True])
def test_a_fault_names_requests_of_the_launch(released: bool) -> None:
    """A fork gets tokens of that launch, and the fault. The next request of a released index does not."""
    with DecodeSession(captured(Broken(CPU))) as session:
        request = session.add([3, 1, 4], SamplingParams(10))
        session.run(6)
        fork, first = session.fork(request), request.req_index
        if released:
            session.release(request)
            request = session.add([5, 6], SamplingParams(3))
            assert request.req_index == first
        with pytest.raises(StepFaultError) as caught:
            session.collect(wait=True)
        assert [fault.index for fault in caught.value.faults] == [first, fork.req_index][released:]
        assert {fault.code for fault in caught.value.faults} == {FaultCode.NO_TOKEN_OFFERED}
        assert fork.finish_reason is FinishReason.FAULT
        assert request.finish_reason is (FinishReason.RUNNING if released else FinishReason.FAULT)


def test_a_refused_fork_changes_nothing() -> None:
    runtime = captured()
    with DecodeSession(runtime) as session:
        request = session.add([3, 1, 4], SamplingParams(12, logprobs=None))
        session.run(3)
        before = (list(runtime.free_req_indices), runtime.allocator.num_free, list(session.requests))

        def refused(_: object) -> None:
            with pytest.raises(ReplayError, match="ReplayManager: expected one call at a time"):
                session.fork(request)

        runtime.manager.between_steps(refused)
        assert (list(runtime.free_req_indices), runtime.allocator.num_free, list(session.requests)) == before
        fork = session.fork(request)
        finish(session)
        assert request.tokens == fork.tokens == greedy(runtime.manager._program.model, [3, 1, 4], 12)
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    assert runtime.allocator.num_free == 59


@LOOPS
def test_run_makes_no_launch_if_no_request_can_continue(loop_sizes: tuple[int, ...]) -> None:
    """One request has reached its limit, which was not collected yet; the other has no page."""
    with DecodeSession(captured(num_pages=5, loop_sizes=loop_sizes)) as session:
        done = session.add([3, 1, 4], SamplingParams(6))
        waits = session.add([3, 1, 4], SamplingParams(40))
        with pytest.raises(CapacityError, match="no request has a page for its next token, and 0 pages are free"):
            session.run(1 << 30)
        session.collect(wait=True)
        assert done.finish_reason is FinishReason.LENGTH
        assert waits.finish_reason is FinishReason.RUNNING
        session.release(done)
        before = len(waits.tokens)
        session.run(3)
        session.collect(wait=True)
        assert len(waits.tokens) == before + 3


@pytest.mark.parametrize("requests", [2, 4])
def test_a_generator_names_a_faulty_prompt_after_all_other_events(requests: int) -> None:
    """Of four prompts, with two or four request indices, the last one is faulty."""

    class Bad(LivelyModel):
        def forward(self, step: Step) -> torch.Tensor:
            bad = step.metadata.seq_lens == 8
            return torch.where(bad[:, None], float("nan"), super().forward(step))

    model = Bad(CPU)
    runtime = captured(model, max_num_reqs=requests)
    prompts, seen = [[5], [6], [7], [1, 2, 3, 4, 5]], list[Event]()
    events = TextGenerator(runtime).generate(prompts, [SamplingParams(3)] * 3 + [SamplingParams(20)])
    with pytest.raises(
        StepFaultError, match=r"^prompts\[3\]: step \d+: NO_TOKEN_OFFERED: .*; generate again"
    ) as caught:
        seen.extend(events)  # what came before the error stays
    assert caught.value.prompts == (3,)
    for index, prompt in enumerate(prompts[:3]):
        tokens = [event.token for event in seen if event.prompt == index]
        assert tokens == greedy(model, prompt, 3)
        assert [event.finished for event in seen if event.prompt == index] == [False, False, True]
    of_bad = [event for event in seen if event.prompt == 3]
    assert [event.token for event in of_bad] == greedy(model, prompts[3], 3)
    assert not any(event.finished for event in of_bad)


def test_a_session_is_over_after_a_launch_failed_in_a_later_step() -> None:
    """Some of its steps have run: each request would miss tokens. Later calls raise; collect() and close() do not."""
    model = Failing(CPU)
    runtime = captured(model)
    with DecodeSession(runtime) as session:
        request = session.add([3, 1, 4], SamplingParams(12))
        session.run(2)
        session.collect(wait=True)
        model.fails_at = model.calls + 1
        with pytest.raises(RuntimeError, match="out of memory"):
            session.run(1, eager=True)
        session.run(1)  # a single step is as if it had not been asked for
        session.collect(wait=True)
        known = list(request.tokens)
        model.fails_at = model.calls + 3
        with pytest.raises(RuntimeError, match="out of memory"):
            session.run(8, eager=True)
        for call in (lambda: session.run(1), lambda: session.add([1]), lambda: session.fork(request)):
            with pytest.raises(CaptureError, match="an earlier call was interrupted"):
                call()
        assert session.collect(wait=True) == []
        assert request.tokens == known
    with DecodeSession(runtime) as session:
        request = session.add([3, 1, 4], SamplingParams(12))
        finish(session, 4)
        assert request.tokens[: len(known)] == known


class Late:
    """Tokens of a ring. A function is called before they are read for the first time."""

    def __init__(self, tokens: np.ndarray, meanwhile: Callable[[], object]) -> None:
        self.tokens, self.meanwhile = tokens, meanwhile

    def __getitem__(self, at: object) -> np.ndarray:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return self.tokens[at]  # type: ignore[index]


def test_a_late_reader_gets_tokens_of_its_own_launch() -> None:
    """The ring entry is written again while a thread is about to read it."""
    with DecodeSession(captured(ring_depth=2, launch_steps=1)) as session:
        request = session.add([3, 1, 4], SamplingParams(20, temperature=20.0, seed=5))
        for read in (lambda of: next(iter(of)), lambda of: of.arrived()[0][0]):
            (launch,) = session.run(1)
            at, rings = len(request.tokens), copy.copy(launch._rings)
            assert rings is not None
            rings.tokens = Late(rings.tokens, lambda: (session.run(5), session.collect(wait=True)))  # type: ignore[assignment]
            launch._rings = rings
            assert read(launch).tolist() == [request.tokens[at]]


class FailingSampler:
    """Samples as graphrt does. In one of its calls it raises, or returns too many tokens."""

    def __init__(self, how: str) -> None:
        self.calls, self.fails_at, self.how = 0, -1, how

    def __call__(self, logits: torch.Tensor, step: Step) -> torch.Tensor:
        self.calls += 1
        tokens = sample_tokens(logits, step)
        if self.calls != self.fails_at:
            return tokens
        if self.how == "raises":
            raise RuntimeError("out of memory")
        return tokens.repeat(2) if self.how == "returns" else tokens


@pytest.mark.parametrize(("how", "error"), [("raises", RuntimeError), ("returns", ShapeError), ("late", RuntimeError)])
def test_a_failed_step_counts_no_token(monkeypatch: pytest.MonkeyPatch, how: str, error: type[Exception]) -> None:
    """The session submits the step again; a token that counts twice would be penalized twice. "late": the step fails
    after the sampler."""
    sampler = FailingSampler(how)
    real = program.token_logprobs

    def token_logprobs(*arguments: object, **options: object) -> object:
        if how == "late" and sampler.calls == sampler.fails_at:
            raise RuntimeError("out of memory")
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(program, "token_logprobs", token_logprobs)
    runtime = make_runtime(CPU, sampler=sampler, config={"penalties": True, "max_logprobs": 0})
    runtime.capture()
    state = runtime.manager.buffers
    params = SamplingParams(14, frequency_penalty=0.05, repetition_penalty=1.02)
    found, counts = [], []
    for failures in (False, True):
        with DecodeSession(runtime) as session:
            request, other = session.add([3, 1, 4], params), session.add([5, 6, 7, 8], SamplingParams(14))
            while session.running:
                if failures:
                    sampler.fails_at = sampler.calls + 1
                    with pytest.raises(error, match=r"out of memory|the sampler's tokens: expected shape"):
                        session.run(1, eager=True)
                session.run(1, eager=True)
                session.collect(wait=True)
            found.append((request.tokens, other.tokens))
            counts.append(
                (state.penalty_counts[request.req_index].clone(), state.penalty_seen[request.req_index].clone())
            )
    assert found[0] == found[1]
    tokens = found[0][0][:-1]  # the last one was no input
    assert counts[0][0].tolist() == np.bincount(tokens, minlength=VOCAB).tolist()
    for first, second in zip(*counts, strict=True):
        assert torch.equal(first, second)


def test_unknown_tokens_and_masks_are_refused() -> None:
    runtime = captured(max_logprobs=1, token_masks=True)
    batch = {"req_indices": [0], "seq_lens": [1], "tokens": [3], "page_indptr": [0, 1], "page_ids": [1]}
    batch |= {"logprobs": [1]}
    most = runtime.config.max_num_reqs
    (found,) = runtime.replay(Batch(**batch, logprob_tokens=[VOCAB - 1], token_masks=[most - 1])).logprobs()
    assert found is not None
    assert found.token == VOCAB - 1
    with pytest.raises(ShapeError, match=f"logprob_tokens: expected token ids below vocab_size={VOCAB}, got {VOCAB}"):
        runtime.replay(Batch(**batch, logprob_tokens=[VOCAB]))
    with pytest.raises(UnsupportedError, match=f"needs a runtime with max_num_reqs={most + 1}"):
        runtime.replay(Batch(**batch, token_masks=[most]))


def test_calls_raise_after_the_runtime_was_closed() -> None:
    runtime = captured()
    session = DecodeSession(runtime)
    request = session.add([3, 1, 4], SamplingParams(12))
    session.run(3)
    runtime.close()
    calls = {
        "run": lambda: session.run(1), "collect": session.collect, "add": lambda: session.add([1]),
        "fork": lambda: session.fork(request), "release": lambda: session.release(request),
        "DecodeSession": lambda: DecodeSession(runtime), "TextGenerator": lambda: TextGenerator(runtime),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(CaptureError, match=f"^{name}: expected state 'captured', got 'closed'; it was closed"):
            call()
    session.close()
