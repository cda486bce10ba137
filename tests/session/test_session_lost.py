"""Calls that fail on their way: no token is lost without a word, and nothing of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.tables import Tables
from graphrt.config import RequestTensor
from graphrt.engine.launch import Launch
from graphrt.engine.shadow import Shadow
from graphrt.engine.stats import Stats
from graphrt.kernels.errors import CaptureError, ConfigError, GraphRTError, ReplayError, ShapeError
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import SessionPages
from graphrt.session.results import RowsInFlight
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.support.toy import LivelyModel, greedy, make_runtime

PARAMS = SamplingParams(12, temperature=30.0, seed=1)


class Calling(LivelyModel):
    """Calls something once, in the middle of a step."""

    call: Callable[[], Any] | None = None

    def forward(self, step: Step) -> torch.Tensor:
        if self.call is not None:
            call, self.call = self.call, None
            call()
        return super().forward(step)


def captured(device: torch.device, num_pages: int = 60, **config: object) -> tuple[Runtime, Calling]:
    model = Calling(device)
    runtime = make_runtime(device, model=model, num_pages=num_pages, config=config)
    runtime.capture()
    return runtime, model


def fail() -> None:
    raise RuntimeError("out of memory")


def interrupt(*args: object, **options: object) -> Any:
    raise KeyboardInterrupt


def to_the_end(session: DecodeSession) -> None:
    while session.running:
        session.run(2)
        session.collect(wait=True)


def begun(runtime: Runtime, steps: int) -> DecodeSession:
    """A session with one row, which went so many steps."""
    session = DecodeSession(runtime)
    session.add([3, 1, 4], PARAMS)
    session.run(steps)
    session.collect(wait=True)
    return session


def alone(device: torch.device) -> list[int]:
    """What the row of these tests gets."""
    with DecodeSession(captured(device)[0]) as session:
        row = session.add([3, 1, 4], PARAMS)
        to_the_end(session)
        return list(row.tokens)


@pytest.mark.parametrize("failures", [1, 3])
def test_a_step_that_fails_leaves_those_in_flight_their_results(device: torch.device, failures: int) -> None:
    """Numbers of steps that did not run are left out: two launches in flight must not share an entry of the rings."""
    runtime, model = captured(device, launch_steps=1, ring_depth=2)
    expected = alone(device)
    with DecodeSession(runtime) as session:
        row = session.add([3, 1, 4], PARAMS)
        session.run(2)
        for _ in range(failures):
            model.call = fail
            with pytest.raises(RuntimeError, match="out of memory"):
                session.run(1, eager=True)
        to_the_end(session)
        assert row.tokens == expected
    batch = {"req_indices": [0], "seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4], "page_indptr": [0, 1]}
    first = runtime.replay(Batch(page_ids=[9], **batch))
    for _ in range(failures):
        model.call = fail
        with pytest.raises(RuntimeError, match="out of memory"):
            runtime.replay(Batch(page_ids=[9], **batch), eager=True)
    second = runtime.replay(Batch(page_ids=[8], **batch))
    assert first.tokens().tolist() == second.tokens().tolist() == greedy(LivelyModel(device), [3, 1, 4], 1)


def test_results_that_could_not_be_read_are_read_later(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = captured(device)
    expected, found = alone(device), []
    with DecodeSession(runtime) as session:
        row = session.add([3, 1, 4], PARAMS)
        session.run(5)
        with monkeypatch.context() as patch:
            patch.setattr(Launch, "ends", interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.collect(wait=True)
        assert not row.tokens
        while session.running:
            found += [token for _, new in session.collect(wait=True) for token in new]
            if session.running:
                session.run(3)
        found += [token for _, new in session.collect(wait=True) for token in new]
        assert row.tokens == found == expected


def test_rows_that_changed_in_part_are_over(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = captured(device)
    session = DecodeSession(runtime)
    session.add([3, 1, 4], PARAMS)
    session.run(20)
    with monkeypatch.context() as patch:
        patch.setattr(RowsInFlight, "_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.collect(wait=True)
    for call in (session.collect, lambda: session.add([1]), lambda: session.run(1)):
        with pytest.raises(CaptureError, match=r"expected its rows, got a reset\(\) or a call that failed on its way"):
            call()
    session.close()
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    assert runtime.allocator.num_free == 59


def test_a_call_that_is_interrupted_behind_its_launch_ends_the_session(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would get the launch's tokens."""
    for steps in (1, 3):
        runtime, _ = captured(device)
        session = begun(runtime, 2)
        with monkeypatch.context() as patch:
            patch.setattr(Stats, "count", interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.run(steps)
        with pytest.raises(CaptureError, match="expected its rows"):
            session.run(1)
        session.close()
        assert len(runtime.free_req_indices) == runtime.config.max_num_reqs


def test_a_step_that_ran_though_its_call_raised(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a shadow finds no memory behind the graph: the row is one token further than the host knows."""
    runtime, _ = captured(device, shadow_every=1)
    real = Shadow._take

    def take(self: Shadow, copies: object, *args: object) -> None:
        if copies is self._graph:
            raise torch.OutOfMemoryError("no memory")
        real(self, copies, *args)  # type: ignore[arg-type]

    session = begun(runtime, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "_take", take)
        with pytest.raises(torch.OutOfMemoryError):
            session.run(1)
    with pytest.raises(CaptureError, match="expected its rows"):
        session.run(1)
    session.close()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_row_that_is_released_in_the_middle_of_a_step(device: torch.device, steps: int) -> None:
    """By Python's collector of garbage, for example: the others lose nothing."""
    runtime, model = captured(device, use_graphs=False)
    with DecodeSession(runtime) as session:
        row, other = session.add([3, 1, 4], PARAMS), session.add([5, 6], PARAMS)
        if steps > 1:
            session.run(2)
            session.collect(wait=True)
        model.call = lambda: session.release(other)
        session.run(steps)
        to_the_end(session)
        assert row.tokens == alone(device)
        again = session.add([3, 1, 4], PARAMS)
        to_the_end(session)
        assert again.tokens == row.tokens
    assert runtime.allocator.num_free == 59


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SessionPages, "reserve"),
        (SessionPages, "listed"),
        (SessionPages, "delta"),
        (Tables, "more"),
        (RowsInFlight, "_end"),
        (RowsInFlight, "_ended"),
        (RowsInFlight, "_left"),
    ],
)
@pytest.mark.parametrize("behind", [False, True])
def test_a_row_that_is_released_wherever_a_call_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, behind: bool
) -> None:
    """Python's collector of garbage may run between any two lines. The row leaves when the call is over."""
    runtime, _ = captured(device)
    session = DecodeSession(runtime)
    row, other, short = session.add([3, 1, 4], PARAMS), session.add([5, 6], PARAMS), session.add([9], SamplingParams(2))
    real, left = getattr(owner, name), [other]

    def hook(*args: Any, **options: Any) -> Any:
        found = real(*args, **options) if behind else None
        if left:
            session.release(left.pop())
        return found if behind else real(*args, **options)

    monkeypatch.setattr(owner, name, hook)
    to_the_end(session)
    assert not left, "the hook was called"
    assert other not in session.rows
    assert row.tokens == alone(device)
    assert len(short.tokens) == 2
    session.close()
    assert sorted(runtime.free_req_indices) == list(range(runtime.config.max_num_reqs))
    assert runtime.allocator.num_free == 59


def test_a_session_is_not_closed_in_the_middle_of_its_step(device: torch.device) -> None:
    runtime, model = captured(device, use_graphs=False)
    with DecodeSession(runtime) as session:
        row = session.add([3, 1, 4], PARAMS)
        model.call = session.close
        with pytest.raises(ReplayError, match="close: expected it between calls of the session"):
            session.run(1)
        to_the_end(session)
        assert row.tokens == alone(device)


def test_a_batch_that_is_interrupted_leaves_sessions_alone(device: torch.device) -> None:
    runtime, model = captured(device)
    with DecodeSession(runtime) as session:
        row = session.add([3, 1, 4], PARAMS)
        session.run(2)
        model.call = interrupt
        batch = {"seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4], "page_indptr": [0, 1], "page_ids": [50]}
        with pytest.raises(KeyboardInterrupt):
            runtime.replay(Batch(req_indices=[3], **batch), eager=True)
        to_the_end(session)
        assert row.tokens == alone(device)


@pytest.mark.parametrize("call", ["release", "fork"])
def test_a_release_or_fork_that_is_interrupted_gives_its_row_id_back(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    runtime, _ = captured(device)
    where = {"release": (RowsInFlight, "_reorder"), "fork": (Tables, "place")}[call]
    with DecodeSession(runtime) as session:
        for _ in range(2):  # a row id that was in use before
            row = session.add([3, 1, 4, 1, 5, 9], PARAMS)
            session.run(2)
            with monkeypatch.context() as patch:
                patch.setattr(*where, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    getattr(session, call)(row)
            if call == "fork":
                session.release(row)
    assert sorted(runtime.free_req_indices) == list(range(runtime.config.max_num_reqs))
    assert call == "fork" or runtime.allocator.num_free == 59


def test_nonsense_has_typed_errors() -> None:
    runtime = make_runtime(
        torch.device("cpu"), num_pages=60,
        config={"max_logit_bias": 2, "token_masks": True, "request_tensors": (RequestTensor("v"),)},
    )  # fmt: skip
    runtime.capture()

    class NoText:
        def __repr__(self) -> str:
            raise ValueError("no text")

    tables = runtime.manager.request_tables
    with DecodeSession(runtime) as session:
        row = session.add([1])
        sparse = torch.tensor([1, 2]).to_sparse()
        calls: list[Callable[[], object]] = [
            lambda: SamplingParams(stop_ids=np.array(3)),  # type: ignore[arg-type]
            lambda: SamplingParams(stop_ids=torch.tensor(3)),  # type: ignore[arg-type]
            lambda: tables.set_logit_bias({0: {1: np.array([1.0, 2.0])}}),
            lambda: tables.set_logit_bias({0: {1: torch.tensor([])}}),
            lambda: session.set_token_mask(row, sparse),
            lambda: tables.set_token_masks({0: sparse}),
            lambda: session.add([1], state={10**5000: 1}),
            lambda: session.add([1], state={NoText(): 1}),
        ]
        for call in calls:
            with pytest.raises((ConfigError, ShapeError)) as caught:
                call()
            assert isinstance(caught.value, GraphRTError)
            assert "expected" in str(caught.value)
