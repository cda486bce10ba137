"""Sessions with backends that plan on the host, which get every length, and preempted requests."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch
from graphrt.cache.swap import SwapArrival, SwapSpace
from graphrt.engine.handle import Launch
from graphrt.generate.generator import Event, TextGenerator
from graphrt.generate.scheduler import Preemption
from graphrt.kernels.types import FinishReason
from graphrt.replay import ReplayManager
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from tests.support.toy import LivelyModel, Wild, captured, finish, greedy, slow_device

CPU = torch.device("cpu")
PROMPTS, COUNTS = [[3, 1, 4], list(range(1, 22)), [6], [9, 9]], [12, 7, 20, 1]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that the reference backend was asked to plan, which makes it one that plans on the host."""
    batches: list[Batch] = []
    monkeypatch.setattr(TorchReferenceBackend, "plan_replay", lambda self, descriptor, batch: batches.append(batch))

    def advance(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a step without a batch")

    monkeypatch.setattr(ReplayManager, "advance", advance)
    return batches


def check_lengths(planned: list[Batch]) -> None:
    """In each step, a request either begins a sequence or continues from its previous step."""
    lengths: dict[int, int] = {}
    for batch in planned:
        for req_index, end, new in zip(batch.req_indices, batch.seq_lens, batch.query_lens, strict=True):
            assert end - new in (0, lengths.get(int(req_index)))
            lengths[int(req_index)] = int(end)


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
def test_a_backend_that_plans_on_the_host_gets_every_length(
    slow: bool, planned: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        slow_device(monkeypatch)
    runtime, model = captured(), LivelyModel(CPU)
    assert runtime.manager.plans_on_host == "torch_reference"
    want = [greedy(model, prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    with DecodeSession(runtime) as session:
        requests = [
            session.add(prompt, SamplingParams(max_new_tokens=count))
            for prompt, count in zip(PROMPTS, COUNTS, strict=True)
        ]
        finish(session)
        assert [request.tokens for request in requests] == want
        assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    check_lengths(planned)
    del planned[:]
    stops = [want[0][5], *[60] * 3]
    params = [
        SamplingParams(max_new_tokens=count, stop_ids=frozenset({stop}))
        for count, stop in zip(COUNTS, stops, strict=True)
    ]
    found: list[list[int | None]] = [[] for _ in PROMPTS]
    for event in TextGenerator(runtime).generate(PROMPTS, params):
        found[event.prompt].append(event.token)
    assert found == [[*want[0][: want[0].index(stops[0])], None], *want[1:]]
    check_lengths(planned)
    assert runtime.allocator.num_free == 59


@pytest.mark.parametrize("launch_steps", [1, 64])
def test_a_fault_behind_a_stop_token_that_the_host_alone_knows(
    launch_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device checks 8 stop tokens. The request continues after the ninth, and has a fault."""
    slow_device(monkeypatch)
    model = Wild(CPU)
    full = greedy(model, [5, 6], 12)
    model.bad = max(full)
    assert model.bad > 20
    runtime = captured(model, launch_steps=launch_steps)
    others = sorted(set(range(model.bad)) - set(full))[:8]
    calm = next([token] for token in range(60) if model.bad not in [token, *greedy(model, [token], 8)])
    params = [SamplingParams(12, stop_ids=frozenset({*others, model.bad})), SamplingParams(8)]
    events = list(TextGenerator(runtime).generate([[5, 6], calm], params))
    cut = full.index(model.bad)
    assert [event.token for event in events if event.prompt == 0] == [*full[:cut], None]
    assert [event for event in events if event.prompt == 0][-1] == Event(0, None, True, stop_token=model.bad)
    assert [event.token for event in events if event.prompt == 1] == greedy(model, calm, 8)


@pytest.mark.parametrize("launches", [0, 1, 2, 5])
@pytest.mark.parametrize("swaps", [False, True], ids=["computed_again", "swapped"])
def test_preempted_requests_resume(swaps: bool, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted while its launches are in flight. Another request uses its index and its pages meanwhile."""
    slow_device(monkeypatch)
    runtime, model = captured(max_num_reqs=2, max_num_tokens=8), LivelyModel(CPU)
    with DecodeSession(runtime) as session:
        space = SwapSpace(runtime.kv_cache, session.leases, 1 << 20) if swaps else None
        preemption = Preemption(runtime, session)
        neighbor = session.add(PROMPTS[2], SamplingParams(max_new_tokens=20))
        request = session.add(PROMPTS[1], SamplingParams(max_new_tokens=15))
        for _ in range(launches):
            session.run(2)
        length = session.table.length(request.req_index)
        preempted = preemption.preempt(request, space)
        assert preempted.length == (length if swaps else 0)
        assert preempted.swapped is None or preempted.swapped.counts == (-(-length // 4),), "none of the pages ahead"
        assert session.launches.contain(request) == (launches > 0)
        other = session.add(PROMPTS[0], SamplingParams(max_new_tokens=4))
        finish(session)
        assert other.tokens == greedy(model, PROMPTS[0], 4)
        assert neighbor.tokens == greedy(model, PROMPTS[2], 20)
        table = session.table
        assert table.reached.tolist() == table.most.tolist() == table.limits.tolist(), "of requests in the table only"
        session.release(other)
        assert len(request.tokens) == max(0, length - len(PROMPTS[1]) + 1)
        assert not session.launches.contain(request)
        preemption.resume(request, preempted, space)
        while session.running:
            arrived = preemption.arrived(request.req_index, wait=True)
            session.table.held = set() if arrived else set(session.table.prefills)
            session.run(3)
            session.collect(wait=True)
        assert request.tokens == greedy(model, PROMPTS[1], 15)
        assert request.finish_reason is FinishReason.LENGTH
        if space is not None:
            assert space.num_free_bytes == 1 << 20
            space.close()
    assert runtime.allocator.num_free == 59
    assert sorted(runtime.free_req_indices) == [0, 1]


@pytest.mark.parametrize("way", ["detach", "release"])
def test_pages_that_have_not_arrived_are_waited_for_before_they_are_free(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, waited = captured(), []
    monkeypatch.setattr(SwapArrival, "done", lambda arrival: False)
    monkeypatch.setattr(SwapArrival, "wait", lambda arrival: waited.append(runtime.allocator.num_free))
    with DecodeSession(runtime) as session, SwapSpace(runtime.kv_cache, session.leases, 1 << 20) as space:
        preemption = Preemption(runtime, session)
        request = session.add(PROMPTS[1], SamplingParams(max_new_tokens=5))
        session.run(3)
        session.collect(wait=True)
        preemption.resume(request, preemption.preempt(request, space), space)
        assert not preemption.arrived(request.req_index)
        assert [*preemption.arriving] == [request.req_index]
        free = runtime.allocator.num_free
        getattr(preemption, way)(request)
        assert waited == [free]
        assert runtime.allocator.num_free == 59
        assert not preemption.arriving


def test_held_requests_stand_still() -> None:
    runtime, model = captured(), LivelyModel(CPU)
    with DecodeSession(runtime) as session:
        first, second = (session.add(prompt, SamplingParams(max_new_tokens=5)) for prompt in PROMPTS[:2])
        session.table.held = {second.req_index}
        session.run(3)
        session.collect(wait=True)
        assert (len(first.tokens), len(second.tokens)) == (3, 0)
        session.run(9)
        assert session.run(9) == (), "all others have ended"
        session.table.held = set()
        finish(session)
        assert second.tokens == greedy(model, PROMPTS[1], 5)
        assert np.array_equal(session.table.known[second.req_index], PROMPTS[1])


@pytest.mark.parametrize("loop_sizes", [(), (1, 2)], ids=["launch_by_launch", "loop"])
def test_tokens_come_while_a_launch_runs(loop_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launch of 8 steps, of which the device has reported some: all tokens but those that end a request."""
    slow_device(monkeypatch)
    runtime, model = captured(loop_sizes=loop_sizes, decode_sizes=(1, 2)), LivelyModel(CPU)
    want = [greedy(model, prompt, 20) for prompt in PROMPTS[:2]]
    reported, real = [1], Launch.num_arrived.fget
    assert real is not None
    monkeypatch.setattr(Launch, "num_arrived", property(lambda launch: min(real(launch), reported[0])))
    with DecodeSession(runtime) as session:
        requests = [
            session.add(PROMPTS[0], SamplingParams(max_new_tokens=20, stop_ids=frozenset({want[0][4]}))),
            session.add(PROMPTS[1], SamplingParams(max_new_tokens=7)),
        ]
        session.run(2)
        session.collect(wait=True)
        (launch,) = session.run(8)
        stop, seen = want[0].index(want[0][4]), []
        for reported[0] in (0, 1, 3, 8):
            before = [len(request.tokens) for request in requests]
            new = dict(session.collect())
            assert [request.tokens[count:] for request, count in zip(requests, before, strict=True)] == [
                new.get(request, []) for request in requests
            ]
            seen.append([len(request.tokens) for request in requests])
        assert seen[-1] == [stop, 6]
        assert seen == sorted(seen)
        assert seen[0] < seen[1] < seen[-1]
        assert not requests[0].finish_reason
        fork = session.fork(requests[1])
        assert fork.tokens == requests[1].tokens
        launch.wait()
        assert [len(tokens) for _, tokens in session.collect()] == [1, 1, 1]
        assert [request.finish_reason.name for request in (*requests, fork)] == ["STOP_TOKEN", "LENGTH", "LENGTH"]
        assert requests[0].tokens == want[0][: stop + 1]
        assert requests[1].tokens == fork.tokens == want[1][:7]


def test_events_come_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches have 8 steps, of which one more has arrived each time that the host looks."""
    slow_device(monkeypatch)
    runtime, model = captured(), LivelyModel(CPU)
    want = [greedy(model, prompt, 20) for prompt in PROMPTS[:2]]
    looks, real = Counter[int](), Launch.num_arrived.fget
    assert real is not None

    def num_arrived(launch: Launch) -> int:
        looks[launch.step] += 1
        return min(real(launch), looks[launch.step])

    monkeypatch.setattr(Launch, "num_arrived", property(num_arrived))
    events = list(TextGenerator(runtime).generate(PROMPTS[:2], SamplingParams(20)))
    assert [[event.token for event in events if event.prompt == i] for i in (0, 1)] == want
    runs = [len(list(run)) for _, run in itertools.groupby(event.prompt for event in events)]
    assert max(runs) < 4, "the prompts take turns"
