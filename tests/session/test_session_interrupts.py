"""Calls that are interrupted at any point: by an exception, another call, another thread or a finalizer.

The invariant: `close()` of the session and of the runtime succeeds and returns all pages and request indices, no other
request loses or reorders a token, and nothing hangs.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

import pytest
import torch

import graphrt
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import CaptureError, ReplayError
from graphrt.kernels.garbage import older_objects_set_aside
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.requests import SessionRequest
from graphrt.session.session import DecodeSession
from tests.support.toy import LivelyModel, finish, greedy, make_runtime

CPU = torch.device("cpu")
PAGES, PROMPT, OTHER = 60, [3, 1, 4, 1, 5, 9], [2, 7, 1, 8]
COUNT = 12
POINTS = 24  # per call, at random among all of them
PACKAGE = f"{Path(graphrt.__file__).parent}/"


class AtEvent:
    """Acts at one of the function entries and C returns in graphrt within a `with` block, and lets exceptions through.

    These are the points at which CPython calls signal handlers, and finalizers of the garbage collector. Points in
    torch are left out: an exception at the entry of its `TorchDispatchMode.__exit__` leaves the mode active.
    """

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.count, self.number, self.action = 0, number, action

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self.count += 1
        if self.count == self.number:
            sys.setprofile(None)
            self.action()

    def __enter__(self) -> AtEvent:
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def interrupt() -> None:
    raise KeyboardInterrupt


def captured(**config: Any) -> Runtime:
    defaults = {"max_num_reqs": 6, "max_logit_bias": 1, "token_masks": True, "max_logprobs": 0}
    runtime = make_runtime(CPU, model=LivelyModel(CPU), num_pages=PAGES, config=defaults | config)
    runtime.capture()
    return runtime


def assert_all_returned(runtime: Runtime) -> None:
    assert sorted(runtime.free_req_indices) == list(range(runtime.config.max_num_reqs))
    assert runtime.allocator.num_free == PAGES - 1
    assert sorted(runtime.allocator.allocate(PAGES - 1)) == list(range(1, PAGES)), "no page is handed out twice"
    runtime.allocator.free(range(1, PAGES))


class Served:
    """A runtime with a session that calls interrupt, and another one whose request continues throughout."""

    def __init__(self, **config: Any) -> None:
        self.runtime = captured(**config)
        self.expected = greedy(LivelyModel(CPU), PROMPT, COUNT)
        self.others = greedy(LivelyModel(CPU), OTHER, 50)
        self.witness = DecodeSession(self.runtime)
        self.witness_request = self.witness.add(OTHER, SamplingParams(50))
        self.witness.run(1)

    def begin(self) -> None:
        """A session with a request that has launches in flight, and one that was not computed yet."""
        self.session = DecodeSession(self.runtime)
        self.request = self.session.add(PROMPT, SamplingParams(COUNT))
        self.session.run(1)
        self.got = self.session.collect(wait=True)[0][1]
        self.session.run(3)
        self.waiting = self.session.add(OTHER, SamplingParams(4, logprobs=0, logit_bias={3: 0.0}))

    def check(self) -> None:
        """The invariant, after a call of `session` that may have been interrupted."""
        self.witness.run(1)
        self.witness.collect(wait=True)
        assert self.witness_request.tokens == self.others[: len(self.witness_request.tokens)]
        session, request = self.session, self.request
        try:
            finish(session, 4)
            complete = request in session.requests
        except CaptureError:
            complete = False
            with contextlib.suppress(CaptureError):
                session.collect(wait=True)
                assert len(request.tokens) >= 4, "the launches in flight were collected"
        assert request.tokens == self.expected[: len(request.tokens)]
        assert len(request.tokens) == COUNT or not complete
        for extra in session.requests:
            known = {tuple(PROMPT): self.expected, tuple(OTHER): self.others}[tuple(extra.prompt.tolist())]
            assert extra.tokens == known[: len(extra.tokens)]
            assert len(extra.logprobs) == (len(extra.tokens) if extra.params.logprobs is not None else 0)
        session.close()
        free = set(range(self.runtime.config.max_num_reqs)) - {self.witness_request.req_index}
        assert sorted(self.runtime.free_req_indices) == sorted(free)
        pages = int(self.witness.pages.tables[0].to[self.witness_request.req_index])
        assert self.runtime.allocator.num_free == PAGES - 1 - pages
        if len(self.witness_request.tokens) == 50:
            self.witness.release(self.witness_request)
            self.witness_request = self.witness.add(OTHER, SamplingParams(50))
            self.witness.run(1)


BATCH = Batch(req_indices=[3], seq_lens=[3], query_lens=[3], tokens=[3, 1, 4], page_indptr=[0, 1], page_ids=[PAGES - 1])
CALLS: dict[str, Callable[[Served], object]] = {
    "add": lambda s: s.session.add([3, 1, 4, 1, 5, 9], SamplingParams(COUNT, logit_bias={3: 0.0})),
    "fork": lambda s: s.session.fork(s.request),
    "release": lambda s: s.session.release(s.waiting),
    "run_prefill": lambda s: s.session.run(1),
    "run_many": lambda s: s.session.run(6),
    "run_quiet": lambda s: (s.session.release(s.waiting), s.session.run(2), s.session.run(1)),
    "collect": lambda s: s.session.collect(wait=True),
    "collect_arrived": lambda s: s.session.collect(),
    "set_token_mask": lambda s: s.session.set_token_mask(s.request, [-1] * 2),
    "close": lambda s: s.session.close(),
    "batch": lambda s: s.runtime.replay(BATCH).wait(),
}  # fmt: skip


def points(served: Served, name: str, most: int = POINTS) -> Iterator[int]:
    """Events of a call at which to interrupt it, at random: all, or `most`. A session begins before each, and is
    checked after it."""
    served.begin()
    with AtEvent(-1, interrupt) as counter:
        CALLS[name](served)
    served.check()
    every = range(1, counter.count + 1)
    for number in sorted(random.Random(counter.count).sample(every, min(most, len(every)))):
        served.begin()
        yield number
        served.check()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of short steps
    served = Served()
    yield served
    served.witness.close()
    assert_all_returned(served.runtime)
    served.runtime.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_at_any_point_of_a_call(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython reports an exception that is raised while it frees a generator, and continues: the call then succeeds."""
    freed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: freed.append(type(error.object)))
    for number in points(served, name):
        raised = False
        freed.clear()
        try:
            with AtEvent(number, interrupt) as at:
                CALLS[name](served)
        except KeyboardInterrupt:
            raised = True
        assert raised or freed == [GeneratorType] or at.count < number, f"{name}: event {number} swallowed it"


def test_an_exception_at_any_point_of_a_capture_at_first_use() -> None:
    """The call captures a mixed size, and a decode size with a loop. Later calls capture what is missing."""
    sizes = {"decode_sizes": (1, 2, 6), "loop_sizes": (2,), "mixed_sizes": (4, 5, 6, 16), "lazy_capture": True}
    late = {BatchDescriptor.mixed(5, 5), BatchDescriptor.decode(2)}
    events, rng = 0, random.Random(5)
    for _ in range(1 + 40):
        served = Served(**sizes)
        served.begin()
        assert late.isdisjoint(served.runtime.manager.descriptors)
        number = rng.randint(1, events) if events else -1
        with contextlib.suppress(KeyboardInterrupt), AtEvent(number, interrupt) as at:
            CALLS["run_many"](served)
        events = events or at.count
        served.check()
        served.begin()
        CALLS["run_many"](served)
        served.check()
        assert late <= set(served.runtime.manager.descriptors)
        assert not served.runtime.stats().eager_steps
        served.witness.close()
        assert_all_returned(served.runtime)
        served.runtime.close()


def quietly(call: Callable[[], object]) -> Callable[[], object]:
    """A call from a signal handler: one that is made during another call is refused, and else succeeds."""

    def action() -> None:
        with contextlib.suppress(ReplayError):
            call()

    return action


def in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("where", ["handler", "thread"])
@pytest.mark.parametrize("name", ["add", "fork", "run_prefill", "run_many", "collect"])
def test_a_second_call_at_any_point_of_a_call_is_refused_or_takes_its_turn(
    served: Served, name: str, where: str
) -> None:
    rng = random.Random(7)
    for number in points(served, name):
        (launch,) = served.session.run(1)
        session = served.session
        add = partial(session.add, PROMPT, SamplingParams(COUNT))
        second = rng.choice([session.run, session.collect, add, launch.stop, launch.wait, served.witness.run])
        action = quietly(second) if where == "handler" else lambda second=second: in_thread(quietly(second))
        with AtEvent(number, action), contextlib.suppress(ReplayError):
            CALLS[name](served)


def test_a_call_during_another_call_names_the_rule() -> None:
    runtime = captured(use_graphs=False)
    model = runtime.manager._program.model
    with DecodeSession(runtime) as session:
        request = session.add(PROMPT, SamplingParams(6))
        errors: list[str] = []
        release, add = (lambda: session.release(request)), (lambda: session.add([1]))
        calls = (session.run, session.collect, session.close, release, add)

        def forward(step: Any) -> torch.Tensor:
            for call in calls:
                with pytest.raises(ReplayError) as caught:
                    call()
                errors.append(str(caught.value))
            return LivelyModel.forward(model, step)

        model.forward = forward
        session.run(2)
        del model.forward
        finish(session, 2)
        assert request.tokens == greedy(LivelyModel(CPU), PROMPT, 6)
    assert len(errors) == 10
    assert all(
        error.startswith("DecodeSession: expected one call at a time, but another call is in progress; call")
        for error in errors
    )


def test_a_session_that_is_dropped_warns_and_returns_what_it_has(served: Served) -> None:
    def dropped() -> None:
        session = DecodeSession(served.runtime)
        session.add(PROMPT)
        session.run(2)

    free = served.runtime.allocator.num_free
    with pytest.warns(ResourceWarning, match="DecodeSession: dropped with 1 requests and .* pages; close"):
        dropped()
    assert served.runtime.allocator.num_free == free
    assert len(served.runtime.free_req_indices) == served.runtime.config.max_num_reqs - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DecodeSession(served.runtime)  # it has taken nothing


@pytest.mark.parametrize("name", ["add", "fork", "run_many", "close"])
def test_another_session_is_dropped_at_any_point_of_a_call(served: Served, name: str) -> None:
    """As the garbage collector does: the dropped session's pages are not handed out twice."""
    for number in points(served, name, 16):
        dropped = [DecodeSession(served.runtime)]
        dropped[0].add(OTHER)
        dropped[0].run(2)
        with AtEvent(number, dropped.clear), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            CALLS[name](served)
        dropped.clear()


def test_an_exception_at_any_point_of_a_generator() -> None:
    runtime = captured()
    prompts, counts = [PROMPT, OTHER, [9]], [9, 5, 7]
    params = [SamplingParams(count) for count in counts]
    expected = [greedy(LivelyModel(CPU), prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    with AtEvent(-1, interrupt) as counter:
        list(TextGenerator(runtime).generate(prompts, params))
    with older_objects_set_aside():  # a collection of all objects of a test process takes half a second
        for number in random.Random(1).sample(range(1, counter.count + 1), 40):
            got: list[list[int | None]] = [[] for _ in prompts]
            with contextlib.suppress(KeyboardInterrupt), AtEvent(number, interrupt):
                for event in TextGenerator(runtime).generate(prompts, params):
                    got[event.prompt].append(event.token)
            assert got == [want[: len(tokens)] for want, tokens in zip(expected, got, strict=True)]
            gc.collect()  # a generator that was interrupted while it closed its session drops it
            assert_all_returned(runtime)
    runtime.close()


def test_an_exception_at_any_point_of_the_close_of_a_runtime() -> None:
    with AtEvent(-1, interrupt) as counter:
        captured().close()
    for number in random.Random(4).sample(range(1, counter.count + 1), 12):
        runtime = captured(decode_sizes=(1,), mixed_sizes=())
        session = DecodeSession(runtime)
        session.add(PROMPT)
        session.run(2)
        with contextlib.suppress(KeyboardInterrupt), AtEvent(number, interrupt):
            runtime.close()
        session.close()
        runtime.close()
        assert_all_returned(runtime)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signals_at_random_times(served: Served) -> None:
    """Real signals, while a server adds, runs, collects and releases."""
    rng, deadline = random.Random(2), time.monotonic() + 4.0
    previous, interrupted = signal.signal(signal.SIGALRM, lambda *_: interrupt()), 0
    try:
        while time.monotonic() < deadline:
            served.begin()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0002, 0.02))
                requests: list[SessionRequest] = [served.request]
                while served.session.running and len(requests) < 6:
                    requests.append(served.session.add(PROMPT, SamplingParams(COUNT)))
                    served.session.run(rng.randint(1, 4))
                    served.session.collect(wait=rng.random() < 0.5)
                    served.session.release(requests[-1])
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0)
            served.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted
