"""Generation against transformers: same GGUF, float32, CPU, greedy tokens equal for 64 tokens. And what it refuses."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch

from graphrt.config import RuntimeConfig
from graphrt.engine.handle import Launch, StepFaultError
from graphrt.generate.generator import Event, TextGenerator
from graphrt.generate.scheduler import PromptState
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, ReplayError, ShapeError
from graphrt.kernels.types import TOKEN_FROM_DEVICE, KVLayout
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.requests import SessionRequest
from tests.support.default_model import default_model, default_oracle
from tests.support.toy import VOCAB, LivelyModel, Wild, captured, greedy, make_runtime, slow_device

NEW_TOKENS = 40
PROMPTS = (
    "Hi",
    "Why is the sky blue?",
    "Name three fruits and say in one sentence each what they taste like.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how fast it is.",
    "Here is a list of words: " + ", ".join(f"word{i}" for i in range(60)) + ". Repeat the last three of them.",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(default_model_path())
    ids = [tokenizer.encode_prompt(text, chat=i > 0) for i, text in enumerate(PROMPTS)]
    assert len({len(p) for p in ids}) == len(PROMPTS), "prompts of different lengths"
    return ids


def best_tokens(prompt: list[int], answer: list[int]) -> list[int]:
    """By transformers, the best token after the prompt and each part of an answer.

    It is the answer itself if the answer is transformers' greedy one, and else differs from it.
    """
    with torch.no_grad():
        logits = default_oracle()(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def build(page_size: int, rows: int, **config) -> Runtime:
    loaded = default_model()
    settings = {"max_num_reqs": rows, "max_num_tokens": 128, "max_seq_len": 512, "mixed_sizes": (64,)} | config
    runtime = Runtime(
        loaded.model,
        loaded.config.attention_specs(torch.float32),
        loaded.config.kv_groups(page_size, KVLayout.NHD, torch.float32),
        vocab_size=loaded.config.vocab_size,
        device="cpu",
        config=RuntimeConfig(**settings),
        num_pages=1 + rows * (512 // page_size),
    )
    runtime.capture()
    return runtime


def run(runtime: Runtime, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    for event in TextGenerator(runtime).generate(prompts, params):
        if event.token is not None:
            answers[event.prompt].append(event.token)
    return answers


@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_equal_transformers(prompts, page_size: int) -> None:
    """As one ragged batch: prompts longer than the token budget run in chunks, together with decoding requests."""
    runtime = build(page_size, rows=5, decode_sizes=(2, 5))
    answers = run(runtime, prompts, SamplingParams(NEW_TOKENS))
    assert answers == [best_tokens(*pair) for pair in zip(prompts, answers, strict=True)]
    assert all(len(answer) == NEW_TOKENS for answer in answers)
    assert sum(runtime.stats().replays.values()) >= NEW_TOKENS
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1, "all pages were freed"


def test_tokens_of_prompts_alone_equal_transformers(prompts) -> None:
    runtime = build(16, rows=1)
    for prompt in prompts:
        [answer] = run(runtime, [prompt], SamplingParams(8))
        assert answer == best_tokens(prompt, answer)
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1, "all pages were freed"


def test_two_generators_share_a_runtime_and_an_abandoned_one_gives_back(prompts) -> None:
    runtime = build(16, rows=2)
    first = TextGenerator(runtime).generate([prompts[1]], SamplingParams(6))
    second = TextGenerator(runtime).generate([prompts[2]], SamplingParams(6))
    mixed = [(next(first).token, next(second).token) for _ in range(6)]
    for prompt, answer in zip(prompts[1:3], zip(*mixed, strict=True), strict=True):
        assert list(answer) == best_tokens(prompt, list(answer))
    first.close()
    second.close()
    abandoned = TextGenerator(runtime).generate(prompts[:2], SamplingParams(NEW_TOKENS))
    next(abandoned)
    with pytest.raises(CapacityError, match=r"0 request indices and \d+ pages are free"):
        next(TextGenerator(runtime).generate([prompts[3]], SamplingParams(4)))
    abandoned.close()
    [answer] = run(runtime, [prompts[3]], SamplingParams(4))
    assert answer == best_tokens(prompts[3], answer)
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1
    assert sorted(runtime.free_req_indices) == [0, 1]


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy() -> Runtime:
    return captured()


def assert_idle_and_right(runtime: Runtime) -> None:
    """Every row and page is back, and the next prompts give the oracle's tokens."""
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1
    assert sorted(runtime.free_req_indices) == list(range(runtime.config.max_num_reqs))
    model, prompts = LivelyModel(CPU), [[5, 6, 7], [9]]
    assert run(runtime, prompts, SamplingParams(5)) == [greedy(model, prompt, 5) for prompt in prompts]


BAD = {
    "last-token": ([TOKEN_FROM_DEVICE], r"prompts\[1\]\[0\]: expected an int from 0 to 60, got -2147483648"),
    "vocabulary": ([VOCAB], r"prompts\[1\]\[0\]: expected an int from 0 to 60, got 61"),
    "bool": ([True], r"prompts\[1\]\[0\]: .* got True"),
    "floats": (np.array([1.0]), r"prompts\[1\]: .* got float64 values"),
    "rank": (np.array([[1, 2]]), r"prompts\[1\]: expected one dimension, got shape \[1, 2\]"),
    "text": ("ab", r"prompts\[1\]: .* got 'ab'"),
    "none": (None, r"prompts\[1\]: .* got None"),
    "empty": ([], r"prompts\[1\]: expected at least 1 token, got 0"),
    "meta": (torch.ones(1, dtype=torch.int64, device="meta"), r"prompts\[1\]: .* tensor on meta"),
}
BAD_CALLS = {name: ([[5, 6], prompt, [7]], SamplingParams(3), text) for name, (prompt, text) in BAD.items()} | {
    "no list": (None, SamplingParams(3), "prompts: expected a list or tuple of prompts, each a list .*, got None"),
    "one prompt": ([1, 2], SamplingParams(3), r"prompts\[0\]: expected ints from 0 to 60 on the host, got 1"),
    "padded": (np.ones((2, 3), np.int64), SamplingParams(3), "prompts: expected a list or tuple"),
    "no params": ([[1]], None, "params"),
    "ints as params": ([[1]], [3], "params"),
    **{
        f"{n} params": ([[1], [2]], [SamplingParams(1)] * n, f"params: expected 2 SamplingParams, .* got {n}")
        for n in (0, 1, 3)
    },
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_prompt_is_refused_before_any_step(toy: Runtime, case: str) -> None:
    prompts, params, text = BAD_CALLS[case]
    steps = toy.stats().real_tokens
    with pytest.raises((ConfigError, ShapeError), match=text):
        TextGenerator(toy).generate(prompts, params)
    assert toy.stats().real_tokens == steps
    assert_idle_and_right(toy)
    assert list(TextGenerator(toy).generate([], SamplingParams(3))) == []


@pytest.mark.parametrize(
    "prompt",
    [(5, 6, 7), range(5, 8), np.array([5, 6, 7], np.uint8), torch.tensor([5, 6, 7]), [np.int16(5), 6, np.uint64(7)]],
    ids=["tuple", "range", "uint8", "tensor", "numpy-items"],
)
def test_prompts_of_every_kind(toy: Runtime, prompt) -> None:
    assert run(toy, [prompt], SamplingParams(5)) == [greedy(LivelyModel(CPU), [5, 6, 7], 5)]


@pytest.mark.parametrize("fill", [float("nan"), float("-inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("prompt", [[13], [5, 13], [13] * 20 + [13]], ids=["one", "last", "chunks"])
def test_logits_that_offer_no_token_end_generation_with_an_error(fill: float, prompt: list[int]) -> None:
    """In that step, not one late; the rows and pages of all prompts come back."""
    model = Wild(CPU)
    model.bad, model.fill = 13, fill
    runtime = captured(model)
    events = TextGenerator(runtime).generate([[5, 6], prompt], SamplingParams(30))
    with pytest.raises(StepFaultError, match=r"prompts\[1\]: step \d+: NO_TOKEN_OFFERED"):
        list(events)
    assert_idle_and_right(runtime)


def test_a_fault_of_a_request_that_has_ended_does_not_end_the_others() -> None:
    """A stop token is noticed one step late; that step has no token to offer after it, and nobody asked for one."""
    model = Wild(CPU)
    (model.bad,) = greedy(model, [5, 6], 1)
    runtime = captured(model)
    params = [SamplingParams(4, stop_ids=[model.bad]), SamplingParams(8)]
    events = list(TextGenerator(runtime).generate([[5, 6], [9]], params))
    assert [event for event in events if event.prompt == 0] == [Event(0, None, True, stop_token=model.bad)]
    assert [event.token for event in events if event.prompt == 1] == greedy(model, [9], 8)
    assert model.bad not in greedy(model, [9], 8)


def test_a_request_without_token_and_without_fault_is_an_error(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the device reports, a loop over rows that must yield a token does not go on without one."""
    real = Launch.tokens
    monkeypatch.setattr(Launch, "tokens", lambda *_, **options: np.full_like(real(*_, **options), -1))
    with pytest.raises(ReplayError, match=r"request \d: launch \d+ has 0 tokens"):
        list(TextGenerator(toy).generate([[5, 6]], SamplingParams(30)))
    monkeypatch.undo()
    assert_idle_and_right(toy)


def test_requests_come_back_after_the_steps_in_flight_have_ended(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = slow_device(monkeypatch)
    events = TextGenerator(toy).generate([[5, 6], [7]], SamplingParams(30))
    next(events)
    pages = toy.allocator.num_free
    del waited[:]
    monkeypatch.setattr(
        toy.allocator, "free", lambda *ids, free=toy.allocator.free: waited.append("free") or free(*ids)
    )
    events.close()
    monkeypatch.undo()
    assert waited[1:] == ["free"], "all pages of the session at once"
    assert isinstance(waited[0], int), "a launch in flight is waited for before pages are free"
    assert toy.allocator.num_free > pages
    assert_idle_and_right(toy)


def test_launches_take_several_steps_while_others_wait_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten prompts, four rows: who waits is admitted as soon as the first sequence comes to its longest."""
    runtime = captured(num_pages=80)
    launched, real = [], runtime.manager.advance

    def advance(delta: object, *, steps: int = 1, **options: object) -> Launch:
        launched.append(steps)
        return real(delta, steps=steps, **options)

    monkeypatch.setattr(runtime.manager, "advance", advance)
    model, counts = LivelyModel(CPU), [20, 9, 14, 17, 11, 20, 3, 16, 12, 8]
    answers = run(runtime, [[n, 2, 3] for n in range(10)], [SamplingParams(count) for count in counts])
    assert answers == [greedy(model, [n, 2, 3], count) for n, count in enumerate(counts)]
    assert max(launched) == 8
    assert len(launched) < sum(launched) / 2
    # Four rows are never idle while somebody waits: all steps together are few more than the tokens ask for.
    assert runtime.stats().replays.total() <= sum(counts) / 4 + 20


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("num_pages", [60, 12], ids=["pages", "preempted"])
def test_prompts_end_at_tokens_that_the_caller_chooses(
    num_pages: int, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends with its prompt: its index is free again, and the device computes few more of its tokens."""
    if slow:
        slow_device(monkeypatch)
    runtime = captured(num_pages=num_pages)
    model, cuts = LivelyModel(CPU), [20, 1, 14, 2, 11, 20, 3, 16, 12, 8]
    prompts = [[n, 2, 3] for n in range(10)]
    want = [greedy(model, prompt, 20) for prompt in prompts]
    seen: list[list[int]] = [[] for _ in prompts]

    def ends(prompt: int, token: int) -> bool:
        seen[prompt].append(token)
        return len(seen[prompt]) == cuts[prompt]

    generator = TextGenerator(runtime)
    events = list(generator.generate(prompts, SamplingParams(20), ends=ends))
    for index, cut in enumerate(cuts):
        mine = [event for event in events if event.prompt == index]
        assert [event.token for event in mine] == seen[index] == want[index][:cut]
        assert [event.finished for event in mine] == [False] * (cut - 1) + [True]
    assert (generator.stats.preemptions > 0) == (num_pages == 12)
    if num_pages == 60:
        assert runtime.stats().real_tokens < sum(cuts) + 3 * len(cuts) + 2 * 8 * len(cuts)
    monkeypatch.undo()
    assert_idle_and_right(runtime)


@pytest.mark.parametrize("num_pages", [60, 12])
def test_prompts_arrive_while_others_run(num_pages: int) -> None:
    """Prompts arrive at every second launch, or when all have finished. With few pages, they also arrive while
    preempted prompts wait. The generator keeps no state of finished prompts."""
    runtime = captured(num_pages=num_pages)
    generator = TextGenerator(runtime)
    prompts = [[5 + i, 6, 7 * i % 50] * (1 + i % 3) for i in range(9)]
    lengths = [12, 3, 20, 7, 9, 16, 1, 5, 8]
    waves = iter([[0, 1], [2], [3, 4, 5], "idle", [6, 7], "idle", [8]])
    answers: list[list[int | None]] = [[] for _ in prompts]
    calls, wave = itertools.count(), next(waves, None)

    def alive() -> int:
        return sum(type(value) in (PromptState, SessionRequest) for value in gc.get_objects())

    before = alive()

    def arrivals(idle: bool) -> list[tuple[list[int], SamplingParams]] | None:
        nonlocal wave
        if idle:
            assert alive() <= before
        if wave is None or (wave == "idle" and not idle) or (next(calls) % 2 and not idle):
            return None if wave is None else []
        arrived, wave = wave, next(waves, None)
        return [] if arrived == "idle" else [(prompts[i], SamplingParams(lengths[i])) for i in arrived]

    for event in generator.serve(arrivals):
        answers[event.prompt].append(event.token)
    model = LivelyModel(CPU)
    assert answers == [greedy(model, prompt, count) for prompt, count in zip(prompts, lengths, strict=True)]
    assert (generator.stats.preemptions > 0) == (num_pages == 12)
    assert_idle_and_right(runtime)


def test_a_wrong_prompt_that_arrives_ends_the_others(toy: Runtime) -> None:
    generator = TextGenerator(toy)
    with pytest.raises(CapacityError, match=r"prompts\[7\]: 1 tokens and max_new_tokens=9999"):
        generator.check([5], SamplingParams(9999), 7)
    waves = iter([[([5], SamplingParams(9))], [([6], SamplingParams(9999))]])
    with pytest.raises(CapacityError, match=r"prompts\[1\]: 1 tokens and max_new_tokens=9999"):
        list(generator.serve(lambda idle: next(waves)))
    assert_idle_and_right(toy)


@pytest.mark.parametrize("arrived", [5, [5], [([5], SamplingParams(9), 1)], "ab"], ids=str)
def test_arrivals_that_are_no_prompts_with_params_are_refused(toy: Runtime, arrived: object) -> None:
    with pytest.raises(ShapeError, match="arrivals: expected "):
        list(TextGenerator(toy).serve(lambda idle: arrived))
    assert_idle_and_right(toy)


def test_functions_of_the_caller_are_checked_before_the_first_step(toy: Runtime) -> None:
    with pytest.raises(ConfigError, match="arrivals: expected a callable, got None"):
        TextGenerator(toy).serve(None)
    with pytest.raises(ConfigError, match="ends: expected a callable, got 5"):
        TextGenerator(toy).generate([[5]], SamplingParams(9), ends=5)


def test_a_fault_after_a_token_that_the_caller_chose_as_the_last_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_device(monkeypatch)  # both tokens are collected together
    model = Wild(CPU)
    (model.bad,) = greedy(model, [5, 6], 1)
    runtime = captured(model)
    events = TextGenerator(runtime).generate([[5, 6], [9]], SamplingParams(8), ends=lambda _, token: token == model.bad)
    got = [(event.prompt, event.token, event.finished) for event in events]
    assert [found for found in got if found[0] == 0] == [(0, model.bad, True)]
    assert [token for prompt, token, _ in got if prompt == 1] == greedy(model, [9], 8)


def test_prompts_without_mixed_batches() -> None:
    """Every step is a decode step: prompts are fed one token at a time, beside rows that decode."""
    runtime = captured(mixed_batches=False)
    model, prompts = LivelyModel(CPU), [[5, 6, 7], [9], [4] * 9, [3, 2], [8] * 5]
    assert run(runtime, prompts, SamplingParams(6)) == [greedy(model, prompt, 6) for prompt in prompts]
    assert {descriptor.kind.value for descriptor in runtime.stats().replays} == {"decode"}
    assert not runtime.stats().eager_steps
    assert_idle_and_right(runtime)


def test_generators_need_a_captured_runtime_with_a_sampler() -> None:
    runtime = make_runtime(CPU)
    generator = TextGenerator(runtime)
    with pytest.raises(CaptureError, match="generate: expected state 'captured', got 'new'"):
        generator.generate([[1]], SamplingParams(3))
    runtime.capture()
    running = generator.generate([[5, 6]], SamplingParams(30))
    next(running)
    runtime.close()
    with pytest.raises(CaptureError, match="closed"):
        list(running)
    with pytest.raises(CaptureError, match="generate: expected state 'captured', got 'closed'; it was closed"):
        generator.generate([[1]], SamplingParams(3))
    assert sorted(runtime.free_req_indices) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="runtime: has no sampler"):
        TextGenerator(make_runtime(CPU, sampler=None))
    for wrong in (None, "runtime", runtime.state):
        with pytest.raises(ConfigError, match="runtime: expected Runtime, got"):
            TextGenerator(wrong)
