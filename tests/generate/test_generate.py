"""Generation against transformers: same GGUF, float32, CPU, greedy tokens equal for 64 tokens. And what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from graphrt.config import RuntimeConfig
from graphrt.engine.handle import Launch, StepFaultError
from graphrt.generate.generator import Event, TextGenerator
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, GraphRTError, ReplayError, ShapeError
from graphrt.kernels.types import TOKEN_FROM_DEVICE, KVLayout
from graphrt.models.loading import load_model
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from tests.support.toy import VOCAB, LivelyModel, greedy, make_runtime, slow_device

NEW_TOKENS = 64
PROMPTS = (
    "Hi",
    "Why is the sky blue?",
    "Name three fruits and say in one sentence each what they taste like.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how fast it is.",
    "Here is a list of words: " + ", ".join(f"word{i}" for i in range(60)) + ". Repeat the last three of them.",
)


@pytest.fixture(scope="module")
def smollm():
    path = default_model_path()  # offline this raises, and the tests fail: nothing else shows that the tokens are right
    return load_model(path, device="cpu", dtype=torch.float32), load_tokenizer(path), path


@pytest.fixture(scope="module")
def expected(smollm) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt ids, and what transformers' generate answers to each prompt alone."""
    from transformers import AutoModelForCausalLM

    _, tokenizer, path = smollm
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = [tokenizer.encode_prompt(text, chat=i > 0) for i, text in enumerate(PROMPTS)]
    answers = []
    for prompt in ids:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=-1,
                pad_token_id=0,
            )
        answers.append(out[0, len(prompt) :].tolist())
    assert len({len(p) for p in ids}) == len(PROMPTS), "prompts of different lengths"
    assert all(len(a) == NEW_TOKENS for a in answers)
    return ids, answers


def build(smollm, page_size: int, rows: int, **config) -> Runtime:
    loaded = smollm[0]
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


def run(runtime: Runtime, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    for event in TextGenerator(runtime).generate(prompts, params):
        if event.token is not None:
            answers[event.prompt].append(event.token)
    return answers


@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_equal_transformers_alone(smollm, expected, page_size: int) -> None:
    ids, answers = expected
    runtime = build(smollm, page_size, rows=1)
    for prompt, answer in zip(ids, answers, strict=True):
        assert run(runtime, [prompt], SamplingParams(NEW_TOKENS)) == [answer]
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1, "all pages were given back"


@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_equal_transformers_as_one_ragged_batch(smollm, expected, page_size: int) -> None:
    """Prompts longer than the token budget go in chunks, beside rows that decode already."""
    ids, answers = expected
    runtime = build(smollm, page_size, rows=5, decode_sizes=(2, 5))
    assert run(runtime, ids, SamplingParams(NEW_TOKENS)) == answers
    assert sum(runtime.stats().replays.values()) >= NEW_TOKENS


def test_more_prompts_than_rows_wait_their_turn(smollm, expected) -> None:
    ids, answers = expected
    runtime = build(smollm, 16, rows=2)
    short = SamplingParams(8)
    assert run(runtime, [*ids, *ids], short) == [a[:8] for a in (*answers, *answers)]


def test_a_stop_token_ends_a_prompt_and_is_not_part_of_it(smollm, expected) -> None:
    ids, answers = expected
    stop = answers[1][5]
    wanted = answers[1][: answers[1].index(stop)]
    runtime = build(smollm, 16, rows=2)
    assert run(runtime, [ids[1]], SamplingParams(NEW_TOKENS, stop_ids=frozenset({stop}))) == [wanted]


def test_sampling_depends_on_the_seed_and_on_nothing_else(smollm, expected) -> None:
    """The same prompt and seed give the same tokens alone, in a batch and without graphs; another seed others."""
    ids, _ = expected
    runtime, eager = build(smollm, 16, rows=3, decode_sizes=(1, 3)), build(smollm, 16, rows=3, use_graphs=False)
    hot = [SamplingParams(12, temperature=0.9, seed=s) for s in (1, 2, 1)]
    alone = [run(runtime, [ids[1]], hot[0])[0], run(runtime, [ids[2]], hot[1])[0]]
    batch = [[] for _ in range(3)]
    for event in TextGenerator(runtime).generate([ids[1], ids[2], ids[1]], hot):
        batch[event.prompt].append(event.token)
    assert batch == [*alone, alone[0]]
    assert run(eager, [ids[1]], hot[0]) == [alone[0]]
    assert run(runtime, [ids[1]], hot[1])[0] != alone[0]


def test_two_generators_share_a_runtime_and_an_abandoned_one_gives_back(smollm, expected) -> None:
    ids, answers = expected
    runtime = build(smollm, 16, rows=2)
    first = TextGenerator(runtime).generate([ids[1]], SamplingParams(6))
    second = TextGenerator(runtime).generate([ids[2]], SamplingParams(6))
    mixed = [(next(first).token, next(second).token) for _ in range(6)]
    assert [list(x) for x in zip(*mixed, strict=True)] == [answers[1][:6], answers[2][:6]]
    first.close()
    second.close()
    abandoned = TextGenerator(runtime).generate(ids[:2], SamplingParams(NEW_TOKENS))
    next(abandoned)
    with pytest.raises(CapacityError, match=r"0 request indices and \d+ pages are free"):
        next(TextGenerator(runtime).generate([ids[3]], SamplingParams(4)))
    abandoned.close()
    assert run(runtime, [ids[3]], SamplingParams(4)) == [answers[3][:4]]
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1
    assert sorted(runtime.free_req_indices) == [0, 1]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda r: run(r, [[]], SamplingParams(4)), ShapeError, r"prompts\[0\]: expected at least 1 token, got 0"),
        (
            lambda r: run(r, [[1] * 510], SamplingParams(4)),
            CapacityError,
            "510 tokens and max_new_tokens=4 exceed max_seq_len=512",
        ),
        (lambda r: SamplingParams(0), ConfigError, "max_new_tokens: expected an int from 1 to 1073741824, got 0"),
        (lambda r: SamplingParams(temperature=float("nan")), ConfigError, "temperature: expected a finite number"),
        (lambda r: SamplingParams(seed=-1), ConfigError, "seed: expected an int from 0 to 4294967295, got -1"),
        (
            lambda r: TextGenerator(r).generate([[1]], []),
            ShapeError,
            "params: expected 1 SamplingParams, one per prompt, got 0",
        ),
    ],
    ids=["empty", "long", "tokens", "temperature", "seed", "params"],
)
def test_bad_requests(smollm, call, error, text: str) -> None:
    with pytest.raises(error, match=text):
        call(build(smollm, 16, rows=1, use_graphs=False))


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy() -> Runtime:
    runtime = make_runtime(CPU)
    runtime.capture()
    return runtime


def assert_idle_and_right(runtime: Runtime) -> None:
    """Every row and page is back, and the next prompts give the oracle's tokens."""
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1
    assert sorted(runtime.free_req_indices) == list(range(runtime.config.max_num_reqs))
    model, prompts = LivelyModel(CPU), [[5, 6, 7], [9]]
    assert run(runtime, prompts, SamplingParams(5)) == [greedy(model, prompt, 5) for prompt in prompts]


BAD_PROMPTS = {
    "last-token": ([TOKEN_FROM_DEVICE], r"prompts\[1\]\[0\]: expected an int from 0 to 60, got -2147483648"),
    "minus-one": ([3, -1], r"prompts\[1\]\[1\]: expected an int from 0 to 60, got -1"),
    "vocabulary": ([VOCAB], r"prompts\[1\]\[0\]: expected an int from 0 to 60, got 61"),
    "wraps": ([2**32 + 5], r"prompts\[1\]\[0\]: .* got 4294967301"),
    "huge": ([10**30], r"prompts\[1\]\[0\]: .* got 1000000000000000000000000000000"),
    "bool": ([True], r"prompts\[1\]\[0\]: .* got True"),
    "bools": (np.array([True]), r"prompts\[1\]: .* got bool values"),
    "float": ([1.0], r"prompts\[1\]\[0\]: .* got 1.0"),
    "floats": (np.array([1.0]), r"prompts\[1\]: .* got float64 values"),
    "rank": (np.array([[1, 2]]), r"prompts\[1\]: expected one dimension, got shape \[1, 2\]"),
    "ragged": ([1, [2]], r"prompts\[1\]\[1\]: .* got \[2\]"),
    "text": ("ab", r"prompts\[1\]: .* got 'ab'"),
    "number": (7, r"prompts\[1\]: .* got 7"),
    "none": (None, r"prompts\[1\]: .* got None"),
    "empty": ([], r"prompts\[1\]: expected at least 1 token, got 0"),
    "bf16": (torch.tensor([1.0]).bfloat16(), r"prompts\[1\]: .* got a bfloat16 tensor on cpu"),
    "meta": (torch.ones(1, dtype=torch.int64, device="meta"), r"prompts\[1\]: .* tensor on meta"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_any_step(toy: Runtime, case: str) -> None:
    prompt, text = BAD_PROMPTS[case]
    steps = toy.stats().real_tokens
    with pytest.raises(ShapeError, match=text):
        TextGenerator(toy).generate([[5, 6], prompt, [7]], SamplingParams(3))
    assert toy.stats().real_tokens == steps
    assert_idle_and_right(toy)


@pytest.mark.parametrize(
    ("prompts", "error", "text"),
    [
        (None, ShapeError, "prompts: expected a list or tuple of prompts, each a list of token ids, got None"),
        ("ab", ShapeError, "prompts: .* got 'ab'"),
        ([1, 2], ShapeError, r"prompts\[0\]: expected ints from 0 to 60 on the host, got 1"),
        (np.ones((2, 3), np.int64), ShapeError, "prompts: expected a list or tuple"),
        (({1}, [2]), ShapeError, r"prompts\[0\]: .* got \{1\}"),
    ],
    ids=["none", "text", "one-prompt", "padded", "set"],
)
def test_what_no_list_of_prompts_is(toy: Runtime, prompts, error, text: str) -> None:
    with pytest.raises(error, match=text):
        TextGenerator(toy).generate(prompts, SamplingParams(3))


@pytest.mark.parametrize("params", [None, 3, "ab", [3], [None], SamplingParams], ids=str)
def test_what_no_params_are(toy: Runtime, params) -> None:
    with pytest.raises(GraphRTError, match="params"):
        TextGenerator(toy).generate([[1]], params)


@pytest.mark.parametrize(
    "prompt",
    [(5, 6, 7), range(5, 8), np.array([5, 6, 7], np.uint8), torch.tensor([5, 6, 7]), [np.int16(5), 6, np.uint64(7)]],
    ids=["tuple", "range", "uint8", "tensor", "numpy-items"],
)
def test_prompts_of_every_kind(toy: Runtime, prompt) -> None:
    assert run(toy, [prompt], SamplingParams(5)) == [greedy(LivelyModel(CPU), [5, 6, 7], 5)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected an int from 1 to 1073741824, got 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens: .* got True"),
        ({"max_new_tokens": 2**31}, "max_new_tokens: .* got 2147483648"),
        ({"seed": 2**32}, "seed: expected an int from 0 to 4294967295, got 4294967296"),
        ({"seed": 1.0}, "seed: .* got 1.0"),
        ({"seed": None}, "seed: .* got None"),
        ({"temperature": "hot"}, "temperature: expected a finite number >= 0, got 'hot'"),
        ({"temperature": float("inf")}, "temperature: .* got inf"),
        ({"temperature": 1e39}, "temperature: .* got 1e"),
        ({"temperature": -0.5}, "temperature: .* got -0.5"),
        ({"temperature": True}, "temperature: .* got True"),
        ({"stop_ids": 3}, "stop_ids: expected a collection of token ids, got 3"),
        ({"stop_ids": "ab"}, "stop_ids: .* got 'ab'"),
        ({"stop_ids": [1.5]}, "stop_ids: expected an int from 0 to 2147483647, got 1.5"),
        ({"stop_ids": {True}}, "stop_ids: .* got True"),
        ({"stop_ids": {-1}}, "stop_ids: .* got -1"),
        ({"stop_ids": [[1]]}, r"stop_ids: .* got \[1\]"),
    ],
    ids=str,
)
def test_sampling_params_of_wrong_types(arguments: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**arguments)


def test_sampling_params_are_pythons_own() -> None:
    params = SamplingParams(np.int64(3), np.float32(0.5), np.uint32(2**32 - 1), [np.int32(4), 4])
    assert params == SamplingParams(3, 0.5, 2**32 - 1, frozenset({4}))
    assert [type(x) for x in (params.max_new_tokens, params.temperature, params.seed)] == [int, float, int]
    assert hash(params) == hash(SamplingParams(3, 0.5, 2**32 - 1, frozenset({4})))


class Wild(LivelyModel):
    """Logits that are all `fill` for rows whose last token is `bad`."""

    bad, fill = 13, float("nan")

    def forward(self, step) -> torch.Tensor:
        logits = super().forward(step)
        bad = (step.input_ids == self.bad)[step.logits_indices][:, None]
        return torch.where(bad, torch.full_like(logits, self.fill), logits)


@pytest.mark.parametrize("fill", [float("nan"), float("-inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("prompt", [[13], [5, 13], [13] * 20 + [13]], ids=["one", "last", "chunks"])
def test_logits_that_offer_no_token_end_generation_with_an_error(fill: float, prompt: list[int]) -> None:
    """In that step, not one late; the rows and pages of all prompts come back."""
    model = Wild(CPU)
    model.fill = fill
    runtime = make_runtime(CPU, model=model)
    runtime.capture()
    events = TextGenerator(runtime).generate([[5, 6], prompt], SamplingParams(30))
    with pytest.raises(StepFaultError, match=r"prompts\[1\]: step \d+: NO_TOKEN_OFFERED"):
        for _ in itertools.islice(events, 50):
            pass
    assert_idle_and_right(runtime)


def test_a_fault_of_a_row_that_has_ended_does_not_end_the_others() -> None:
    """A stop token is noticed one step late; that step has no token to offer after it, and nobody asked for one."""
    model = Wild(CPU)
    (model.bad,) = greedy(model, [5, 6], 1)
    runtime = make_runtime(CPU, model=model)
    runtime.capture()
    params = [SamplingParams(4, stop_ids=[model.bad]), SamplingParams(8)]
    events = list(TextGenerator(runtime).generate([[5, 6], [9]], params))
    assert [event for event in events if event.prompt == 0] == [Event(0, None, True)]
    assert [event.token for event in events if event.prompt == 1] == greedy(model, [9], 8)
    assert model.bad not in greedy(model, [9], 8)


def test_a_row_without_token_and_without_fault_is_an_error(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the device reports, a loop over rows that must yield a token does not go on without one."""
    real = Launch.tokens
    monkeypatch.setattr(Launch, "tokens", lambda *_, **options: np.full_like(real(*_, **options), -1))
    with pytest.raises(ReplayError, match=r"request \d: launch \d+ gave 0 tokens"):
        list(TextGenerator(toy).generate([[5, 6]], SamplingParams(30)))
    monkeypatch.undo()
    assert_idle_and_right(toy)


def test_rows_come_back_after_the_steps_in_flight_have_ended(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_prompts_of_one_token_and_answers_of_one_token(toy: Runtime, max_new_tokens: int) -> None:
    model = LivelyModel(CPU)
    answers = run(toy, [[3], [4], [5, 6], [7], [8], [9]], SamplingParams(max_new_tokens))
    assert answers == [greedy(model, p, max_new_tokens) for p in ([3], [4], [5, 6], [7], [8], [9])]
    assert_idle_and_right(toy)


def test_prompts_longer_than_a_step_run_in_chunks_beside_others(toy: Runtime) -> None:
    model, prompts = LivelyModel(CPU), [[2] * 40, [3], list(range(30)), [4] * 16, [5] * 17, [6]]
    assert run(toy, prompts, SamplingParams(8)) == [greedy(model, prompt, 8) for prompt in prompts]
    assert_idle_and_right(toy)


def test_launches_take_several_steps_while_others_wait_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten prompts, four rows: who waits is admitted as soon as the first sequence comes to its longest."""
    runtime = make_runtime(torch.device("cpu"), num_pages=80)
    runtime.capture()
    launched, advance = [], runtime.manager.advance
    monkeypatch.setattr(
        runtime.manager,
        "advance",
        lambda delta, *, steps=1, **o: (launched.append(steps), advance(delta, steps=steps, **o))[1],
    )
    model, counts = LivelyModel(torch.device("cpu")), [20, 9, 14, 17, 11, 20, 3, 16, 12, 8]
    answers = [[] for _ in counts]
    params = [SamplingParams(max_new_tokens=count) for count in counts]
    for event in TextGenerator(runtime).generate([[n, 2, 3] for n in range(10)], params):
        if event.token is not None:
            answers[event.prompt].append(event.token)
    assert answers == [greedy(model, [n, 2, 3], count) for n, count in enumerate(counts)]
    assert max(launched) == 8
    assert len(launched) < sum(launched) / 2
    # Four rows are never idle while somebody waits: all steps together are few more than the tokens ask for.
    assert runtime.stats().replays.total() <= sum(counts) / 4 + 20


def test_prompts_without_mixed_batches() -> None:
    """Every step is a decode step: prompts are fed one token at a time, beside rows that decode."""
    runtime = make_runtime(CPU, config={"mixed_batches": False})
    runtime.capture()
    model, prompts = LivelyModel(CPU), [[5, 6, 7], [9], [4] * 9, [3, 2], [8] * 5]
    assert run(runtime, prompts, SamplingParams(6)) == [greedy(model, prompt, 6) for prompt in prompts]
    assert {descriptor.kind.value for descriptor in runtime.stats().replays} == {"decode"}
    assert not runtime.stats().eager_steps
    assert_idle_and_right(runtime)
    wide = make_runtime(CPU, config={"mixed_batches": False, "query_len": 2})
    with pytest.raises(ConfigError, match="expected query_len=1 with mixed_batches=False, got 2"):
        TextGenerator(wide)


def test_no_prompts(toy: Runtime) -> None:
    assert list(TextGenerator(toy).generate([], SamplingParams(3))) == []


def test_a_stop_token_as_the_first_token(toy: Runtime) -> None:
    (first,) = greedy(LivelyModel(CPU), [5, 6], 1)
    params = SamplingParams(4, stop_ids=[first])
    assert list(TextGenerator(toy).generate([[5, 6]], params)) == [Event(0, None, True)]
    assert_idle_and_right(toy)


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
    with pytest.raises(CaptureError, match="closed"):
        TextGenerator(runtime)
    assert sorted(runtime.free_req_indices) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="runtime: has no sampler"):
        TextGenerator(make_runtime(CPU, sampler=None))
    for wrong in (None, "runtime", runtime.state):
        with pytest.raises(ConfigError, match="runtime: expected Runtime, got"):
            TextGenerator(wrong)
