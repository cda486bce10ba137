"""The main job against transformers: same GGUF, float32, CPU, greedy tokens equal for 64 tokens."""

from __future__ import annotations

import pytest
import torch

from graphrt.config import RuntimeConfig
from graphrt.generate import SamplingParams, TextGenerator
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.types import KVLayout
from graphrt.models.loading import load_model
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import load_tokenizer
from graphrt.runtime import Runtime

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
        loaded.config.kv_spec(page_size, KVLayout.NHD, torch.float32),
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
    with pytest.raises(CapacityError, match="expected a free row and pages, got 0 rows"):
        next(TextGenerator(runtime).generate([ids[3]], SamplingParams(4)))
    abandoned.close()
    assert run(runtime, [ids[3]], SamplingParams(4)) == [answers[3][:4]]
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1
    assert sorted(runtime.free_rows) == [0, 1]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda r: run(r, [[]], SamplingParams(4)), ShapeError, r"prompts\[0\]: expected at least 1 token, got 0"),
        (lambda r: run(r, [[1] * 510], SamplingParams(4)), CapacityError, r"max_seq_len=512, got 510 \+ 4 tokens"),
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
