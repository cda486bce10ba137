"""min_tokens: stop tokens have logits of -inf until then, by the rule of vLLM, against a dense oracle."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphrt.batch import Batch
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, GraphRTError, ShapeError, UnsupportedError
from graphrt.kernels.metadata.buffers import STOP_TOKENS
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.requests import SessionRequest
from graphrt.session.session import DecodeSession
from tests.support.sampling_cases import finish, generated, greedy_output, model_of
from tests.support.toy import VOCAB, LivelyModel, ToyModel, make_runtime

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6]]


def runtime_of(device: torch.device, **options: object) -> Runtime:
    config = {"max_logit_bias": 24, "penalties": True, "token_masks": True, "max_logprobs": 2, "max_num_tokens": 8}
    pages = options.pop("num_pages", 60)
    runtime = make_runtime(device, model=LivelyModel(device), num_pages=pages, config=config | options)
    runtime.capture()
    return runtime


def ends(model: ToyModel, prompt: list[int], count: int) -> frozenset[int]:
    """The first tokens of the greedy output: as stop tokens they end it at once."""
    return frozenset(greedy_output(model, prompt, SamplingParams(count)))


def cases(model: ToyModel) -> list[SamplingParams]:
    stops = [ends(model, prompt, 3) for prompt in PROMPTS]
    biased = {min(stops[2]): 30.0, 7: 4.0, 60: -math.inf}
    many = frozenset(range(0, VOCAB, 4)) | stops[1]
    assert len(many) > STOP_TOKENS
    return [
        SamplingParams(14, stop_ids=stops[0], min_tokens=6),
        SamplingParams(14, stop_ids=many, min_tokens=5, logit_bias={}),
        SamplingParams(14, stop_ids=stops[2], min_tokens=9, logit_bias=biased, repetition_penalty=1.2),
    ]


@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
def test_stop_tokens_are_not_sampled_before_min_tokens(device: torch.device, loop_sizes: tuple[int, ...]) -> None:
    """The prompts run in chunks. Each request index then serves another request, which has no stop tokens."""
    runtime = runtime_of(device, loop_sizes=loop_sizes, num_pages=30)
    model = model_of(runtime)
    params = cases(model)
    want = [greedy_output(model, prompt, of) for prompt, of in zip(PROMPTS, params, strict=True)]
    for prompt, of, output in zip(PROMPTS, params, want, strict=True):
        free = greedy_output(model, prompt, SamplingParams(14, stop_ids=of.stop_ids))
        assert len(output) >= of.min_tokens > len(free)
    with DecodeSession(runtime) as session:
        for order in ([0, 1, 2], [2, 0, 1]):
            rows = [session.add(PROMPTS[i], params[i]) for i in order]
            finish(session)
            assert [row.tokens for row in rows] == [want[i] for i in order]
            for row in rows:
                session.release(row)
            plain = [session.add(PROMPTS[i], SamplingParams(8)) for i in order]
            finish(session)
            assert [row.tokens for row in plain] == [greedy_output(model, PROMPTS[i], SamplingParams(8)) for i in order]
            for row in plain:
                session.release(row)


@pytest.mark.parametrize("num_pages", [60, 9], ids=["at_once", "preempted"])
def test_generator(device: torch.device, num_pages: int) -> None:
    """A preempted request is computed again from its prompt and output: the output still counts from its prompt."""
    runtime = runtime_of(device, num_pages=num_pages)
    model = model_of(runtime)
    params = cases(model)
    generator = TextGenerator(runtime, swap_bytes=0)
    outputs = generated(generator, PROMPTS, params)
    want = [greedy_output(model, prompt, of) for prompt, of in zip(PROMPTS, params, strict=True)]
    assert outputs == [out[:-1] if out[-1] in of.stop_ids else out for out, of in zip(want, params, strict=True)]
    assert (generator.stats.preemptions > 0) == (num_pages == 9)


def test_forks_and_token_masks(device: torch.device) -> None:
    runtime = runtime_of(device)
    model = model_of(runtime)
    allowed = set(range(0, VOCAB, 2))
    words = [sum(1 << t % 32 for t in allowed if t // 32 == word) for word in range(2)]
    stop_ids = frozenset(greedy_output(model, PROMPTS[0], SamplingParams(3), allowed))
    params = SamplingParams(14, stop_ids=stop_ids, min_tokens=8)
    want = greedy_output(model, PROMPTS[0], params, allowed)
    with DecodeSession(runtime) as session:
        row = session.add(PROMPTS[0], params)
        session.set_token_mask(row, words)
        session.run(4)
        fork = session.fork(row)
        finish(session)
        assert row.tokens == fork.tokens == want


def test_draws_and_logprobs(device: torch.device) -> None:
    """A draw is the draw of a request whose bias forbids the stop tokens. Log-probabilities are those of the model."""
    runtime = runtime_of(device)
    sampled = {"temperature": 40.0, "seed": 3, "top_k": 30, "logprobs": 2}

    def run(params: SamplingParams) -> SessionRequest:
        with DecodeSession(runtime) as session:
            row = session.add(PROMPTS[0], params)
            finish(session)
            return row

    stop_ids = frozenset(run(SamplingParams(3, **sampled)).tokens)
    have = run(SamplingParams(6, min_tokens=6, stop_ids=stop_ids, **sampled))
    want = run(SamplingParams(6, logit_bias=dict.fromkeys(stop_ids, -math.inf), **sampled))
    assert have.tokens == want.tokens
    assert have.logprobs == want.logprobs
    logprobs = model_of(runtime).oracle(PROMPTS[0]).log_softmax(0)
    assert have.logprobs[0].logprob == pytest.approx(float(logprobs[have.tokens[0]]), abs=1e-4)


def test_replay_without_a_session(device: torch.device) -> None:
    """The stop tokens and the length are written once by request index; no field of the Batch repeats them."""
    runtime = runtime_of(device)
    tables, model = runtime.manager.request_tables, model_of(runtime)
    prompt, stop_ids = PROMPTS[1], ends(model, PROMPTS[1], 3)
    params = SamplingParams(9, stop_ids=stop_ids, min_tokens=4, logit_bias={11: 3.0})
    want = greedy_output(model, prompt, params)
    tables.set_logit_bias({2: params.logit_bias}, banned={2: (stop_ids, len(prompt) + 4)})
    pages = {"page_indptr": [0, 12], "page_ids": list(range(1, 13))}
    output: list[int] = []
    for start in (0, 8, 16):
        new = prompt[start : start + 8]
        batch = Batch(
            req_indices=[2], seq_lens=[start + len(new)], query_lens=[len(new)], tokens=new,
            sample=[start == 16], **pages,
        )  # fmt: skip
        tokens = runtime.replay(batch).tokens().tolist()
    output += tokens
    while len(output) < len(want):
        batch = Batch(req_indices=[2], seq_lens=[len(prompt) + len(output)], **pages)
        output += runtime.replay(batch).tokens().tolist()
    assert output == want
    tables.set_logit_bias({2: None})
    again = Batch(req_indices=[2], seq_lens=[1], tokens=[6], page_indptr=[0, 1], page_ids=[1])
    assert runtime.replay(again).tokens().tolist() == [int(model.oracle([6]).argmax())]


def test_stop_tokens_beyond_the_vocabulary_need_nothing(device: torch.device) -> None:
    runtime = runtime_of(device)
    with DecodeSession(runtime) as session:
        row = session.add(PROMPTS[0], SamplingParams(5, stop_ids={VOCAB, 2**31 - 1}, min_tokens=3))
        finish(session)
        assert row.tokens == greedy_output(model_of(runtime), PROMPTS[0], SamplingParams(5))


def test_a_request_whose_every_token_is_a_stop_token_faults(device: torch.device) -> None:
    runtime = runtime_of(device, max_logit_bias=VOCAB)
    with DecodeSession(runtime) as session:
        row = session.add(PROMPTS[0], SamplingParams(5, stop_ids=range(VOCAB), min_tokens=2))
        session.run(2)
        with pytest.raises(GraphRTError):
            session.collect(wait=True)
        assert row.tokens == []


REFUSED: dict[str, tuple[Callable[[Runtime], object], type[Exception], str]] = {
    "too many tokens": (
        lambda runtime: DecodeSession(runtime).add(
            [1], SamplingParams(3, min_tokens=1, stop_ids={1, 2}, logit_bias={2: 1, 3: 1})
        ),
        UnsupportedError, "params: needs a runtime with max_logit_bias=3, but this runtime has max_logit_bias=2",
    ),
    "too many tokens for a generator": (
        lambda runtime: TextGenerator(runtime).generate([[1]], SamplingParams(3, min_tokens=1, stop_ids={1, 2, 3})),
        UnsupportedError, "max_logit_bias=3, but this runtime has",
    ),
    **{
        f"banned: {banned}": (
            lambda runtime, banned=banned: runtime.manager.request_tables.set_logit_bias({1: {5: 1.0}}, banned=banned),
            error, message,
        )
        for banned, error, message in (
            ({1: ({1, 2}, 3)}, UnsupportedError, r"banned\[1\]: needs a runtime with max_logit_bias=3"),
            ({1: {1, 2}}, ConfigError, r"banned\[1\]: expected tokens and a length"),
            ({1: (4, 4)}, ConfigError, r"banned\[1\]: expected tokens and a length"),
            ({1: ([VOCAB], 4)}, ShapeError, r"banned\[1\]\[0\]: expected an int from 0 to 60, got 61"),
            ({1: ([4], -1)}, ConfigError, r"banned\[1\]: expected an int from 0"),
            ({4: ([4], 1)}, ConfigError, "req_index: expected"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, error, message = REFUSED[case]
    runtime = make_runtime(torch.device("cpu"), num_pages=8, config={"max_logit_bias": 2})
    runtime.capture()
    with pytest.raises(error, match=message):
        call(runtime)
    assert not runtime.manager._program.buffers.bias_lists.any()


def test_params_are_kept_as_ints() -> None:
    params = SamplingParams(np.int64(5), min_tokens=np.int32(3))
    assert (params.min_tokens, type(params.min_tokens)) == (3, int)
    assert SamplingParams(stop_ids={4}).needs == SamplingParams(stop_ids={4}, min_tokens=0).needs
