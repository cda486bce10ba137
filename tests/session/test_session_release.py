"""Requests that are released: nothing of them is left for the next user of their pages and indices."""

from __future__ import annotations

import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.groups import kv_groups
from graphrt.config import RequestTensor, RuntimeConfig
from graphrt.engine.handle import StepFaultError
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.types import FinishReason
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionSpec
from graphrt.step import Step
from tests.support.toy import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MAX_LEN,
    VOCAB,
    LivelyModel,
    captured,
    finish,
    greedy,
)

ALONE: dict[str, list[int]] = {
    "req_indices": [0], "seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4], "page_indptr": [0, 1], "page_ids": [9]
}  # fmt: skip


def test_state_of_a_released_request_is_cleared(device: torch.device) -> None:
    """Also for a batch outside of sessions, which sets none."""
    seen = []

    def model(step: Step) -> torch.Tensor:
        seen.append(step.request_state("adapter")[0].item())
        return lively(step)

    lively = LivelyModel(device)
    config = {"max_logit_bias": 2, "use_graphs": False, "request_tensors": (RequestTensor("adapter", initial=-1),)}
    runtime = captured(model, device, **config)
    batch = {"seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4], "page_indptr": [0, 1], "page_ids": [1]}
    expected = runtime.replay(Batch(req_indices=[0], **batch)).tokens().tolist()
    for leave in ("release", "close", "before it runs"):
        session = DecodeSession(runtime)
        request = session.add([3, 1, 4], SamplingParams(4, logit_bias={7: 100.0, 8: 100.0}), state={"adapter": 5})
        at = request.req_index
        if leave != "before it runs":
            session.run(2)
            session.collect(wait=True)
            assert set(request.tokens) <= {7, 8}
            assert seen[-1] == 5
        if leave == "close":
            session.close()
        else:
            session.release(request)
        assert runtime.replay(Batch(req_indices=[at], **batch)).tokens().tolist() == expected, leave
        assert seen[-1] == -1
        session.close()
    session = DecodeSession(runtime)
    session.add([3, 1, 4], SamplingParams(4, logit_bias={7: 100.0}), state={"adapter": 5})
    session.run(1)
    runtime.close()
    session.close()


@pytest.mark.parametrize("external_pages", [False, True])
def test_add_raises_if_the_cache_is_too_small_for_a_prompt(device: torch.device, external_pages: bool) -> None:
    runtime = captured(device=device, num_pages=4)  # 3 usable pages of 4 tokens
    with DecodeSession(runtime, external_pages=external_pages) as session:
        with pytest.raises(CapacityError, match="prompt: 13 tokens need 4 pages, and the cache has 3"):
            session.add([1] * 13, SamplingParams(1))
        assert not session.requests
        assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
        request = session.add([1] * 12, SamplingParams(1))
        if not external_pages:
            session.run(1)
            session.collect(wait=True)
            assert request.finish_reason is FinishReason.LENGTH


def test_a_released_request_index_has_no_pages(device: torch.device) -> None:
    """A batch that continues there would use pages of another request."""
    runtime = captured(device=device, num_pages=10)
    model = runtime.manager._program.model
    with DecodeSession(runtime) as session:
        gone = session.add([3, 1, 4], SamplingParams(29))
        session.run(6)
        session.collect(wait=True)
        at, length = gone.req_index, 3 + len(gone.tokens)
        session.release(gone)
        runtime.free_req_indices.remove(at)
        runtime.free_req_indices.insert(0, at)  # another request gets its pages, and another index
        other = session.add([5, 6, 7, 8, 9], SamplingParams(20))
        session.run(8)
        session.collect(wait=True)
        with pytest.raises(StepFaultError) as caught:
            runtime.replay(Batch(req_indices=[at], seq_lens=[length])).tokens()
        assert [fault.index for fault in caught.value.faults] == [0]
        finish(session, 8)
        assert other.tokens == greedy(model, [5, 6, 7, 8, 9], 20)


def test_tokens_of_a_released_request_are_not_penalized(device: torch.device) -> None:
    """A batch starts at its index without a penalty, and gets one later."""
    found = []
    for before in (False, True):
        runtime = captured(device=device, penalties=True)
        if before:
            with DecodeSession(runtime) as session:
                session.add([5, 6, 7], SamplingParams(20, presence_penalty=3.0))
                finish(session, 4)
        at, pages = runtime.free_req_indices[-1], runtime.allocator.allocate(3)
        first = {"page_indptr": [0, 3], "page_ids": pages, "seq_lens": [3], "query_lens": [3], "tokens": [3, 1, 4]}
        tokens = runtime.replay(Batch(req_indices=[at], **first)).tokens().tolist()
        for length in range(4, 10):
            step = Batch(req_indices=[at], seq_lens=[length], presence_penalties=[3.0])
            tokens += runtime.replay(step).tokens().tolist()
        found.append(tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("leave", ["release", "close"])
def test_release_and_close_during_a_call_of_the_manager(device: torch.device, leave: str) -> None:
    runtime = captured(device=device, max_logit_bias=1)
    expected = runtime.replay(Batch(**ALONE)).tokens().tolist()
    session = DecodeSession(runtime)
    request = session.add([3, 1, 4], SamplingParams(9, logit_bias={7: 100.0}))
    session.run(2)
    session.collect(wait=True)
    assert request.req_index == ALONE["req_indices"][0]
    runtime.manager.between_steps(lambda _: session.close() if leave == "close" else session.release(request))
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    assert runtime.replay(Batch(**ALONE)).tokens().tolist() == expected


@pytest.mark.parametrize(("window", "chunk"), [(5, None), (9, None), (None, 8), (None, 6)])
def test_add_refuses_only_prompts_that_cannot_run(device: torch.device, window: int | None, chunk: int | None) -> None:
    """Of layers with a window or a chunk, at the smallest cache that is large enough."""
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
                    request = session.add(prompt, SamplingParams(1))
                except CapacityError:
                    refused += 1
                    assert not _runs(session, prompt), (num_pages, length)
                    continue
                finish(session, 1)
                found.add((length, *request.tokens))
                session.release(request)
    assert len(found) == 6, "a token for each length, however few the pages are"
    assert refused


def _runs(session: DecodeSession, prompt: list[int]) -> bool:
    """Return True if a prompt runs without the check of add()."""
    check, session.pages.check_prompt = session.pages.check_prompt, lambda length: None  # type: ignore[method-assign]
    request = session.add(prompt, SamplingParams(1))
    session.pages.check_prompt = check  # type: ignore[method-assign]
    try:
        finish(session, 1)
        return True
    except CapacityError:
        return False
    finally:
        session.release(request)
