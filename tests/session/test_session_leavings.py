"""What rows leave behind when they are given back, and which pages they need: nobody else sees anything of them."""

from __future__ import annotations

import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.groups import kv_groups
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.engine.handle import StepFaultError
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.kernels.types import FinishReason
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.requests import SessionRequest
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionSpec
from graphrt.step import Step
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, MAX_LEN, VOCAB, LivelyModel, greedy, make_runtime

ALONE: dict[str, list[int]] = {
    "req_indices": [0], "seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4], "page_indptr": [0, 1], "page_ids": [9]
}  # fmt: skip


def captured(device: torch.device, num_pages: int = 60, **config: object) -> Runtime:
    runtime = make_runtime(device, num_pages=num_pages, config=config)
    runtime.capture()
    return runtime


def test_whoever_gets_a_row_id_has_nothing_of_the_row_before(device: torch.device) -> None:
    """Not even one that is no row of a session, and says nothing."""
    seen = []

    def model(step: Step) -> torch.Tensor:
        seen.append(step.request_state("adapter")[0].item())
        return lively(step)

    lively = LivelyModel(device)
    config = {"max_logit_bias": 2, "use_graphs": False, "request_tensors": (RequestTensor("adapter", initial=-1),)}
    runtime = make_runtime(device, model=model, config=config)
    runtime.capture()
    batch = {"seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4], "page_indptr": [0, 1], "page_ids": [1]}
    expected = runtime.replay(Batch(req_indices=[0], **batch)).tokens().tolist()
    for leave in ("release", "close", "before it runs"):
        session = DecodeSession(runtime)
        row = session.add([3, 1, 4], SamplingParams(4, logit_bias={7: 100.0, 8: 100.0}), state={"adapter": 5})
        at = row.req_index
        if leave != "before it runs":
            session.run(2)
            session.collect(wait=True)
            assert set(row.tokens) <= {7, 8}
            assert seen[-1] == 5
        if leave == "close":
            session.close()
        else:
            session.release(row)
        assert runtime.replay(Batch(req_indices=[at], **batch)).tokens().tolist() == expected, leave
        assert seen[-1] == -1
        session.close()
    session = DecodeSession(runtime)
    session.add([3, 1, 4], SamplingParams(4, logit_bias={7: 100.0}), state={"adapter": 5})
    session.run(1)
    runtime.close()
    session.close()


@pytest.mark.parametrize("own_pages", [True, False])
def test_a_prompt_without_pages_enough_is_refused_at_once(device: torch.device, own_pages: bool) -> None:
    """No release of other rows would let it run."""
    runtime = captured(device, num_pages=4)  # three beside the null page, of four tokens each
    with DecodeSession(runtime, own_pages=own_pages) as session:
        with pytest.raises(CapacityError, match="expected at most 3 pages, got a need of 4 for 13 tokens"):
            session.add([1] * 13, SamplingParams(1))
        assert not session.rows
        assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
        row = session.add([1] * 12, SamplingParams(1))
        if own_pages:
            session.run(1)
            session.collect(wait=True)
            assert row.end is FinishReason.LENGTH


def test_a_row_id_that_was_given_back_goes_on_with_nothing(device: torch.device) -> None:
    """A batch that goes on with it would read and write pages that others have now."""
    runtime = captured(device, num_pages=10)
    model = runtime.manager._program.model
    with DecodeSession(runtime) as session:
        gone = session.add([3, 1, 4], SamplingParams(29))
        session.run(6)
        session.collect(wait=True)
        at, length = gone.req_index, 3 + len(gone.tokens)
        session.release(gone)
        runtime.free_req_indices.remove(at)
        runtime.free_req_indices.insert(0, at)  # another row gets its pages, and not its id
        other = session.add([5, 6, 7, 8, 9], SamplingParams(20))
        session.run(8)
        session.collect(wait=True)
        with pytest.raises(StepFaultError) as caught:
            runtime.replay(Batch(req_indices=[at], seq_lens=[length])).tokens()
        assert [fault.index for fault in caught.value.faults] == [0]
        while session.running:
            session.run(8)
            session.collect(wait=True)
        assert other.tokens == greedy(model, [5, 6, 7, 8, 9], 20)


def test_tokens_that_a_row_before_had_are_not_penalised(device: torch.device) -> None:
    """Of a batch that begins without a penalty, and has one later."""
    found = []
    for before in (False, True):
        runtime = captured(device, penalties=True)
        if before:
            with DecodeSession(runtime) as session:
                session.add([5, 6, 7], SamplingParams(20, presence_penalty=3.0))
                while session.running:
                    session.run(4)
                    session.collect(wait=True)
        at, pages = runtime.free_req_indices[-1], runtime.allocator.allocate(3)
        first = {"page_indptr": [0, 3], "page_ids": pages, "seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4]}
        tokens = runtime.replay(Batch(req_indices=[at], **first)).tokens().tolist()
        for length in range(4, 10):
            step = Batch(req_indices=[at], seq_lens=[length], presence_penalties=[3.0])
            tokens += runtime.replay(step).tokens().tolist()
        found.append(tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("leave", ["release", "close"])
def test_rows_are_given_back_from_inside_of_a_step(device: torch.device, leave: str) -> None:
    """As Python's collector of garbage does, which may run at any time."""
    runtime = captured(device, max_logit_bias=1)
    expected = runtime.replay(Batch(**ALONE)).tokens().tolist()
    session = DecodeSession(runtime)
    row = session.add([3, 1, 4], SamplingParams(9, logit_bias={7: 100.0}))
    session.run(2)
    session.collect(wait=True)
    assert row.req_index == ALONE["req_indices"][0]
    with runtime.manager.between_steps():
        if leave == "close":
            session.close()
        else:
            session.release(row)
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    assert runtime.replay(Batch(**ALONE)).tokens().tolist() == expected


def test_pages_that_a_fork_reads_are_not_named(device: torch.device) -> None:
    runtime = captured(device, num_pages=12)
    unused = list(range(1, 12))

    def take(count: int) -> list[int]:
        return [unused.pop(0) for _ in range(count)]

    with DecodeSession(runtime, own_pages=False) as session:
        row = session.add([3, 1, 4, 1, 5, 9], SamplingParams(12))
        session.append_pages(row, take(5))
        session.run(1)
        session.collect(wait=True)
        fork = session.fork(row, pages=[take(need) for need in session.fork_needs(row)])
        shared = set(session._pages.pages(fork.req_index)[0].tolist()) & {1, 2, 3, 4, 5}
        assert shared == {1}
        session.release(row)
        assert session.take_pages() == [[2, 3, 4, 5]]
        unused[:0] = [2, 3, 4, 5]
        session.append_pages(fork, take(4))
        while session.running:
            session.run(4)
            session.collect(wait=True)
        assert fork.tokens == greedy(runtime.manager._program.model, [3, 1, 4, 1, 5, 9], 12)
        session.release(fork)
        assert sorted(session.take_pages()[0]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("window", "chunk"), [(5, None), (9, None), (None, 8), (None, 6)])
def test_a_prompt_is_refused_for_its_pages_only_where_it_cannot_run(
    device: torch.device, window: int | None, chunk: int | None
) -> None:
    """Of layers that see a window or a chunk, at the fewest pages that are enough."""
    seen = {"sliding_window": window, "attention_chunk_size": chunk}
    attention = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32, **seen)
    spec = kv_groups([attention] * LAYERS, page_size=4)
    found, refused = set(), 0
    for num_pages in (40, 5, 4, 3, 2):
        runtime = Runtime(
            LivelyModel(device), attention, spec, vocab_size=VOCAB, device=device, num_pages=num_pages,
            config=RuntimeConfig(max_num_reqs=2, max_num_tokens=16, max_seq_len=MAX_LEN),
        )  # fmt: skip
        runtime.capture()
        with DecodeSession(runtime) as session:
            for length in (8, 9, 12, 21, 33, 60):
                prompt = [(7 * i) % VOCAB for i in range(length)]
                try:
                    row = session.add(prompt, SamplingParams(1))
                except CapacityError:
                    refused += 1
                    assert not _runs(session, prompt), (num_pages, length)
                    continue
                while session.running:
                    session.run(1)
                    session.collect(wait=True)
                found.add((length, *row.tokens))
                session.release(row)
    assert len(found) == 6, "a token for each length, however few the pages are"
    assert refused


def _runs(session: DecodeSession, prompt: list[int]) -> bool:
    """Whether a prompt runs where nobody looks at its pages before."""
    check, session._pages.check_prompt = session._pages.check_prompt, lambda length: None  # type: ignore[method-assign]
    row = session.add(prompt, SamplingParams(1))
    session._pages.check_prompt = check  # type: ignore[method-assign]
    try:
        while session.running:
            session.run(1)
            session.collect(wait=True)
        return True
    except CapacityError:
        return False
    finally:
        session.release(row)


@pytest.mark.parametrize("times", [1, 2])
def test_a_row_that_leaves_in_a_step_leaves_once(device: torch.device, times: int) -> None:
    """A second release from inside of the model took its pages while the step still wrote there."""
    hooks: list[list[SessionRequest]] = []
    lively = LivelyModel(device)

    def model(step: Step) -> torch.Tensor:
        if hooks:
            gone = hooks.pop()[0]
            session.release(gone)
            for _ in range(times - 1):
                with pytest.raises(ConfigError, match="one that was released"):
                    session.release(gone)
                with pytest.raises(ConfigError, match="one that was released"):
                    session.append_pages(gone, [])
            assert gone in session.rows, "until the call is over"
        return lively(step)

    runtime = make_runtime(device, model=model, num_pages=60, config={"use_graphs": False})
    runtime.capture()
    with DecodeSession(runtime) as session:
        gone = session.add([3, 1, 4], SamplingParams(9))
        other = session.add([7, 8], SamplingParams(12))
        session.run(2)
        session.collect(wait=True)
        hooks.append([gone])
        session.run(1)
        assert session.rows == (other,)
        while session.running:
            session.run(1)
            session.collect(wait=True)
        assert other.tokens == greedy(lively, [7, 8], 12)
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    assert runtime.allocator.num_free == 59


def test_the_collector_may_release_a_row_in_the_middle_of_a_release(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other: two at once gave KeyError, and lost pages."""
    runtime = captured(device)
    with DecodeSession(runtime) as session:
        first, second, third = (session.add([3, 1, 4], SamplingParams(9)) for _ in range(3))
        session.run(2)
        session.collect(wait=True)
        release, left = session._pages.release, []

        def hooked(at: int) -> None:
            left.append(at)
            if len(left) == 1:
                session.release(second)
                assert len(left) == 1, "the one that leaves now goes first"
            release(at)

        monkeypatch.setattr(session._pages, "release", hooked)
        session.release(first)
        assert left == [first.req_index, second.req_index]
        assert session.rows == (third,)
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    assert runtime.allocator.num_free == 59


def test_a_close_that_was_interrupted_is_repeated(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = captured(device)
    session = DecodeSession(runtime)
    for _ in range(2):
        session.add([3, 1, 4], SamplingParams(9))
    session.run(2)
    release = session._pages.release

    def interrupted(at: int) -> None:
        monkeypatch.setattr(session._pages, "release", release)
        raise KeyboardInterrupt

    monkeypatch.setattr(session._pages, "release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    session.close()
    assert not session.rows
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    assert runtime.allocator.num_free == 59
