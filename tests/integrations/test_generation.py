"""`generate` and `stream` over a runtime: results, streams, and wrong arguments."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer

from graphrt.integrations.transformers import generation
from graphrt.integrations.transformers.generation_config import own_needs
from graphrt.integrations.transformers.runtime import from_transformers
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from tests.support.generation_rig import LONGEST, PROMPTS, VOCAB, expected, free_tokens, generate, oracle, runtime
from tests.support.model_fixtures import byte_tokenizer, make_oracle


def stream(prompts: Any, config: Any = None, **options: Any) -> Any:
    return runtime().generate_stream(prompts, config, **options)


def assert_idle() -> None:
    assert all(a.num_free == a.num_pages - 1 for a in runtime().allocators)
    assert len(runtime().free_req_indices) == 8


def test_texts_and_ids_give_the_same() -> None:
    tokenizer = byte_tokenizer()
    texts = ["Hello", "Why is the sky blue?", "é"]
    found = generate(texts, tokenizer=tokenizer, max_new_tokens=12)
    ids = [tokenizer(text).input_ids for text in texts]
    assert [result.sequence for result in found] == expected(ids, max_new_tokens=12)
    texts = tokenizer.batch_decode([result.token_ids for result in found], skip_special_tokens=True)
    assert [result.text for result in found] == texts
    assert [result.text for result in generate(ids, max_new_tokens=12)] == [None] * 3
    for kind in (tuple(ids), [torch.tensor(row) for row in ids], [torch.tensor(row).numpy() for row in ids]):
        assert [result.sequence for result in generate(kind, max_new_tokens=12)] == expected(ids, max_new_tokens=12)
    batch = {
        "input_ids": ids,
        "attention_mask": [[1] * len(row) for row in ids],
    }  # lists of different lengths, with masks of ones
    assert [result.sequence for result in generate(None, **batch, max_new_tokens=12)] == expected(
        ids, max_new_tokens=12
    )
    assert generate([]) == []


@pytest.mark.parametrize("family", ["Electra", "Llama", "GPT2"])
def test_token_types_of_zeros_are_accepted_if_they_change_nothing(family: str) -> None:
    """Electra embeds zeros without any types. Llama has no types. GPT-2 embeds types only if there are any."""
    decoder = {"is_decoder": True, "pad_token_id": 0} if family == "Electra" else {}
    model = make_oracle(family, vocab_size=VOCAB, eos_token_id=None, **decoder)
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids), "max_new_tokens": 8}
    with from_transformers(model) as built:
        if family != "GPT2":
            alone = ids[:1, 2:], ids[1:]
            typed = [{"token_type_ids": torch.zeros_like(row)} if family == "Electra" else {} for row in alone]
            want = [
                model.generate(row, max_new_tokens=8, **types)[0].tolist()
                for row, types in zip(alone, typed, strict=True)
            ]
            assert [result.sequence for result in built.generate(**batch)] == want
            batch["token_type_ids"] = torch.ones_like(ids)
        with pytest.raises((ConfigError, UnsupportedError), match="token_type_ids"):
            built.generate(**batch)


def test_the_stream_has_the_tokens_and_the_text_of_the_results() -> None:
    tokenizer, end = byte_tokenizer(), free_tokens("Llama")[0][6]
    options: dict[str, Any] = {"tokenizer": tokenizer, "eos_token_id": end, "max_new_tokens": 15, "logprobs": 1}
    results, tokens = generate(PROMPTS, **options), list(stream(PROMPTS, **options))
    first_of_each = [next(i for i, token in enumerate(tokens) if token.index == index) for index in range(3)]
    last_of_second = max(i for i, token in enumerate(tokens) if token.index == 1)
    assert max(first_of_each) < last_of_second, "the prompts run together"
    for index, result in enumerate(results):
        mine = [token for token in tokens if token.index == index]
        assert [token.token_id for token in mine] == result.token_ids
        assert "".join(token.text for token in mine) == result.text
        assert [token.finish_reason for token in mine] == [None] * (len(mine) - 1) + [result.finish_reason]
        assert [token.logprob for token in mine] == result.logprobs
        logits = oracle()(torch.tensor([result.sequence])).logits[0, len(result.prompt_ids) - 1 : -1]
        want = logits.log_softmax(-1)
        for at, (found, token) in enumerate(zip(result.logprobs, result.token_ids, strict=True)):
            assert found.token == token
            assert found.logprob == pytest.approx(want[at, token].item(), abs=1e-4)
            assert found.top[0][0] == want[at].argmax()
    assert results[0].finish_reason == "eos_token_id"


def test_many_more_prompts_than_requests() -> None:
    prompts = [[n, n + 1, 2 * n % 200] for n in range(200)]
    found = generate(prompts, max_new_tokens=8)
    assert [result.prompt_ids for result in found] == prompts
    assert [result.sequence for result in found[::23]] == expected(prompts[::23], max_new_tokens=8)
    assert_idle()


def test_streamers_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, prompt = byte_tokenizer(), byte_tokenizer()("Hello").input_ids
    oracle().generate(torch.tensor([prompt]), streamer=TextStreamer(tokenizer), max_new_tokens=12)
    want = capsys.readouterr().out
    generate(["Hello"], tokenizer=tokenizer, streamer=TextStreamer(tokenizer), max_new_tokens=12)
    assert capsys.readouterr().out == want
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True)
    (found,) = generate([prompt], tokenizer=tokenizer, streamer=pieces, max_new_tokens=12)
    assert "".join(pieces) == found.text
    with pytest.raises(ConfigError, match="streamer: expected one sequence, got 3; use generate_stream"):
        generate(PROMPTS, streamer=TextStreamer(tokenizer))
    with pytest.raises(ConfigError, match=r"streamer\.put: expected a callable"):
        generate([prompt], streamer=print)


def test_fields_of_the_call_come_before_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GenerationConfig(repetition_penalty=1.5, max_new_tokens=6, eos_token_id=None, pad_token_id=0)
    monkeypatch.setattr(oracle(), "generation_config", own)
    for config, options in (
        (None, {}),
        (None, {"repetition_penalty": 1.0}),
        (GenerationConfig(max_new_tokens=9), {}),
        (GenerationConfig(max_new_tokens=9, repetition_penalty=0.8), {"max_new_tokens": 4}),
    ):
        want = expected(PROMPTS, generation_config=config, **options)
        assert [result.sequence for result in generate(PROMPTS, config, **options)] == want


def test_a_runtime_has_the_options_that_the_generation_config_of_the_model_needs() -> None:
    model = make_oracle("Qwen2", vocab_size=VOCAB)
    model.generation_config = GenerationConfig(repetition_penalty=1.3, suppress_tokens=[4, 5], eos_token_id=[2, 3])
    with from_transformers(model) as built:
        assert built.config.penalties
        assert built.config.max_logit_bias == 2
        want = [model.generate(torch.tensor([prompt]))[0].tolist() for prompt in PROMPTS]
        assert [result.sequence for result in built.generate(PROMPTS)] == want
        with pytest.raises(UnsupportedError, match="min_new_tokens=3: needs a runtime with max_logit_bias=4"):
            built.generate(PROMPTS, min_new_tokens=3, suppress_tokens=[5, 6])
    assert own_needs(oracle(), VOCAB) == {"max_logit_bias": 0, "penalties": False}


def test_the_default_length_ends_at_the_positions_of_the_model() -> None:
    prompt = [n % 200 for n in range(LONGEST - 4)]
    (found,) = generate([prompt])
    assert [found.sequence] == expected([prompt])
    assert len(found.token_ids) == 4


def test_time_limit_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that run end with their next token, and waiting ones after their first."""
    clock = iter(range(10**6))
    monkeypatch.setattr(generation.time, "monotonic", lambda: next(clock))
    found = generate([[n] for n in range(20)], max_time=40, max_new_tokens=30)
    lengths = [len(result.token_ids) for result in found]
    assert {result.finish_reason for result in found} == {"max_time"}
    assert max(lengths) > 3
    assert lengths[8:] == [1] * 12
    assert_idle()


@pytest.mark.parametrize("end", ["close", "drop", "KeyboardInterrupt"])
def test_a_stream_that_ends_early_returns_its_requests(end: str) -> None:
    tokens = stream(PROMPTS * 5, max_new_tokens=30)
    assert next(tokens).index == 0
    if end == "KeyboardInterrupt":
        with pytest.raises(KeyboardInterrupt):
            tokens.throw(KeyboardInterrupt)
    elif end == "close":
        tokens.close()
    del tokens
    gc.collect()
    assert_idle()
    assert [result.token_ids for result in generate(PROMPTS)] == free_tokens("Llama")


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "one text": ("Hello", {}, ShapeError, "prompts: expected a list or tuple of texts or lists .*, got 'Hello'"),
    "nothing": (None, {}, ShapeError, "prompts: expected a list or tuple of texts or lists of token ids, got None"),
    "flat": ([3, 4], {}, ShapeError, r"prompts\[0\]: expected ints from 0 to 259 on the host, got 3"),
    "flat tensor": (torch.tensor([3, 4]), {}, ShapeError, r"prompts: expected a tensor .*, got shape \[2\]"),
    "empty": ([[1], []], {}, ShapeError, r"prompts\[1\]: expected at least 1 token, got 0"),
    "empty text": (["a", ""], {"tokenizer": byte_tokenizer()}, ShapeError, r"prompts\[1\]: expected at least 1 token"),
    "vocabulary": ([[VOCAB]], {}, ShapeError, r"prompts\[0\]\[0\]: expected an int from 0 to 259, got 260"),
    "no tokenizer": (["Hi"], {}, ConfigError, "tokenizer: texts need one, .* pass tokenizer="),
    "stop strings": ([[1]], {"stop_strings": "x"}, ConfigError, "tokenizer: texts need one"),
    "no such tokenizer": ([[1]], {"tokenizer": "gpt2"}, ConfigError, "tokenizer: expected PreTrainedTokenizerBase"),
    "typo": ([[1]], {"max_tokens": 3, "x": 1}, ConfigError, "generate: unknown arguments 'max_tokens', 'x'"),
    "typo with False": ([[1]], {"do_smaple": False}, ConfigError, "generate: unknown arguments 'do_smaple'"),
    "copies": ([[1]], {"num_return_sequences": 0}, ConfigError, "num_return_sequences: expected an int >= 1, got 0"),
    "without length": ([[1]], {"max_length": None}, ConfigError, "max_length: expected an int >= 1, got None"),
    "temperature text": ([[1]], {"temperature": "1", "do_sample": True}, ConfigError, "temperature: expected above 0"),
    "max_time text": ([[1]], {"max_time": "1"}, ConfigError, "max_time: expected a finite number >= 0, got '1'"),
    "min_length text": ([[1]], {"min_length": "2"}, ConfigError, "min_length: expected an int >= 0, got '2'"),
    "long": ([[1], [1] * 90], {"max_new_tokens": 30}, CapacityError, r"prompts\[1\]: 90 tokens and max_new_tokens=30 "),
    "max_length": ([[1], [2] * 9], {"max_length": 9}, CapacityError, r"prompts\[1\]: 9 tokens reach max_length=9"),
    "mask": ([[1, 2]], {"attention_mask": [[1]]}, ShapeError, "attention_mask: expected one value per token"),
    "temperature": ([[1]], {"temperature": 0.0, "do_sample": True}, ConfigError, "pass do_sample=False"),
    "greedy copies": ([[1]], {"num_return_sequences": 2}, ConfigError, "generate: .*num_return_sequences"),
    "no length": ([[1]], {"max_new_tokens": 0}, ConfigError, "generate: `max_new_tokens` must be greater than 0"),
    "config": ([[1]], {"config": {}}, ConfigError, "generation_config: expected GenerationConfig, got"),
    "end token": ([[1]], {"eos_token_id": "x"}, ConfigError, "generate: .*'str'; see GenerationConfig"),
    "stop number": (
        [[1]], {"stop_strings": 5, "tokenizer": byte_tokenizer()}, ConfigError, "stop_strings: expected a list or tuple"
    ),
    "criterion": ([[1]], {"stopping_criteria": 5}, ConfigError, "stopping_criteria: expected a list or tuple"),
    "top_p": ([[1]], {"top_p": 1.5, "do_sample": True}, ConfigError, "top_p"),
    "biases": (
        [[1]], {"suppress_tokens": [*range(40)]}, UnsupportedError, r"suppress_tokens=\[0, 1, .*max_logit_bias=40",
    ),
    "bias": ([[1]], {"sequence_bias": {(999,): 1.0}}, ConfigError, "expected an int from 0 to 259, got 999"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_any_step(name: str) -> None:
    prompts, options, error, text = WRONG[name]
    steps = runtime().stats().real_tokens
    for call in (generate, stream):
        with pytest.raises(error, match=text):
            call(prompts, **options)
    assert runtime().stats().real_tokens == steps
