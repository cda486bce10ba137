"""Fields of GenerationConfig: tokens equal those of `model.generate`, probabilities those of transformers' processors,
and errors name every field that graphrt does not honour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, StopStringCriteria, WatermarkingConfig

from graphrt.integrations.transformers.generation import _Ends
from graphrt.integrations.transformers.generation_config import HONOURED, IRRELEVANT, REFUSED, MergedConfig
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.ops.sampling_reference import SampleInputs, kept_reference, processed_reference
from tests.support.generation_rig import INF, PROMPTS, VOCAB, expected, free_tokens, generate, oracle
from tests.support.model_fixtures import byte_tokenizer, sentencepiece_tokenizer
from tests.support.sampling_cases import biases, penalties_with


def test_every_field_is_classified_once() -> None:
    irrelevant = [name for names in IRRELEVANT.values() for name in names]
    classified = [*HONOURED, *REFUSED, *irrelevant]
    assert len(classified) == len(set(classified))
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    assert [name for name in classified if f"`{name}`" not in page] == ["_from_model_config"]
    assert set(classified) - {"_from_model_config"} == GenerationConfig().to_dict().keys() - {"_from_model_config"}


def ends_last(ids: torch.Tensor, scores: None) -> torch.Tensor:
    return ids[:, -1] % 5 == 0


Options = Callable[[list[list[int]]], dict[str, Any]]
GREEDY: dict[str, Options] = {
    "default": lambda free: {},
    "max_new_tokens": lambda free: {"max_new_tokens": 1},
    "max_length": lambda free: {"max_length": 12},
    "both_lengths": lambda free: {"max_length": 3, "max_new_tokens": 30},
    "eos_token_id": lambda free: {"eos_token_id": free[0][4], "max_new_tokens": 30},
    "eos_list": lambda free: {"eos_token_id": [free[0][9], free[1][3], free[2][0], -1]},
    "eos_negative": lambda free: {"eos_token_id": -1, "pad_token_id": 0, "min_new_tokens": 3},
    "min_new_tokens": lambda free: {"eos_token_id": [free[0][2], free[1][0]], "min_new_tokens": 7},
    "min_length": lambda free: {"eos_token_id": [free[0][2], free[1][0], free[2][0]], "min_length": 9},
    "min_over_max": lambda free: {"eos_token_id": free[0][1], "min_new_tokens": 9, "max_new_tokens": 4},
    "repetition_penalty": lambda free: {"repetition_penalty": 1.8},
    "repetition_reward": lambda free: {"repetition_penalty": 0.5},
    "sequence_bias": lambda free: {"sequence_bias": {(free[0][1],): -2.5, (free[1][2],): -INF, (17,): 1.5}},
    "sequence_bias_list": lambda free: {"sequence_bias": [[[free[0][1]], -9.0], [[17], 1.0]]},
    "bad_words_ids": lambda free: {
        "bad_words_ids": [[free[0][0]], [free[2][1]], [free[1][5]]], "eos_token_id": [free[1][5], 3],
    },
    "suppress_tokens": lambda free: {"suppress_tokens": [free[0][0], free[1][0], 10**6, -1]},
    "suppress_tensor": lambda free: {"suppress_tokens": torch.tensor([free[0][0], free[1][0]])},
    "sampling_fields": lambda free: {
        "do_sample": False, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "top_h": 0.3,
        "epsilon_cutoff": 0.1, "eta_cutoff": 0.1,
    },
    "max_time": lambda free: {"max_time": 0.0, "max_new_tokens": 20},
    "stopping_criteria": lambda free: {"stopping_criteria": [ends_last], "max_new_tokens": 30},
    "together": lambda free: {
        "repetition_penalty": 1.3, "sequence_bias": {(17,): 2.0, (free[0][0],): -1.0}, "suppress_tokens": [free[1][0]],
        "bad_words_ids": [[free[2][0]]], "eos_token_id": [17, free[0][3]], "min_new_tokens": 5, "max_new_tokens": 40,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_equal_transformers(name: str, family: str) -> None:
    options = GREEDY[name](free_tokens(family))
    want = expected(PROMPTS, family, **options)
    found = generate(PROMPTS, family=family, **options)
    assert [result.sequence for result in found] == want
    assert [result.prompt_ids for result in found] == PROMPTS
    for result in found:
        assert (result.finish_reason == "eos_token_id") == (
            result.token_ids[-1] in torch.tensor(options.get("eos_token_id", [])).flatten().tolist()
        )
        assert (result.finish_reason == "max_time") == (name == "max_time")
    changed = any(result.token_ids != tokens for result, tokens in zip(found, free_tokens(family), strict=True))
    assert changed == (name not in ("default", "eos_negative", "sampling_fields")), "the option must have an effect"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("options", [
    {"max_new_tokens": 9}, {"max_length": 15}, {"repetition_penalty": 1.6, "min_length": 12, "eos_token_id": [39, 250]},
], ids=["new", "length", "penalty"])  # fmt: skip
def test_padded_batches_equal_transformers(options: dict[str, Any], masked: bool) -> None:
    """`max_length` counts padding, as in transformers. Without a mask, pad tokens are padding."""
    pad, width = 255, max(map(len, PROMPTS))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    options = {"pad_token_id": pad, **options} | ({"attention_mask": (ids != pad).long()} if masked else {})
    want = oracle().generate(ids, **options).tolist()
    for result, row in zip(generate(ids, **options), want, strict=True):
        skipped = width - len(result.prompt_ids)
        assert row[skipped : skipped + len(result.sequence)] == result.sequence
        assert set(row[skipped + len(result.sequence) :]) <= {pad}
    by_name = generate(None, input_ids=ids, **options)
    assert [result.sequence for result in by_name] == [result.sequence for result in generate(ids, **options)]


def ascii_pair(tokens: list[int]) -> tuple[int, str]:
    """The first two neighbors that are both ASCII: index of the second one, and their text."""
    texts = [byte_tokenizer().decode([token]) for token in tokens]
    first = next(i for i in range(1, 19) if (texts[i] + texts[i + 1]).isascii())
    return first + 1, texts[first] + texts[first + 1]


@pytest.mark.parametrize("where", ["output", "prompt", "special", "several"])
def test_stop_strings_equal_transformers(where: str) -> None:
    """Also a string that starts in the prompt, and a special token, which decoded text omits."""
    tokenizer, (free, *_) = byte_tokenizer(), free_tokens("Llama")
    at, text = ascii_pair(free)
    options: dict[str, Any] = {"stop_strings": text, "tokenizer": tokenizer, "max_new_tokens": 20}
    prompt, length = PROMPTS[0], at + 1
    if where == "prompt":
        prompt, length = [*PROMPTS[0], *free[:at]], 1
    elif where == "special":
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        options |= {"stop_strings": "<|im_end|>", "sequence_bias": {(end,): 1e4}}
        length = 1
    elif where == "several":
        options["stop_strings"] = ["not in the text", text, "x" * 30]
    (want,) = expected([prompt], **options)
    (found,) = generate([prompt], **options)
    assert found.sequence == want
    assert (len(found.token_ids), found.finish_reason) == (length, "stop_strings")
    assert found.text == tokenizer.decode(found.token_ids, skip_special_tokens=True)


def test_stop_strings_end_where_the_criterion_of_transformers_is_met_first() -> None:
    """Random sequences of words and letters, in which stop strings start and end inside of tokens."""
    tokenizer, rng = sentencepiece_tokenizer(), torch.Generator().manual_seed(1)
    words = [*range(257, 262), *tokenizer.convert_tokens_to_ids([f"<0x{ord(c):02X}>" for c in " dHlo!sé"[:7]])]
    config, met = GenerationConfig(stop_strings=["o wor", "lds", "!!", " s"]), 0
    for _ in range(60):
        ids = [words[i] for i in torch.randint(len(words), (16,), generator=rng).tolist()]
        ends, criterion = _Ends(config, tokenizer, None, [ids[:4]]), StopStringCriteria(tokenizer, config.stop_strings)
        want = next((at for at in range(4, 16) if criterion(torch.tensor([ids[: at + 1]]), None)), None)
        assert next((at for at in range(4, 16) if ends(0, ids[at])), None) == want
        met += want is not None
    assert 20 < met < 60


def their_probabilities(
    config: MergedConfig, sequence: list[int], prompt_len: int, logits: torch.Tensor
) -> torch.Tensor:
    model, merged = oracle(), config.config
    model._prepare_special_tokens(merged, device="cpu")
    merged.min_length = (merged.min_new_tokens or 0) + prompt_len if merged.min_new_tokens else merged.min_length
    processors = model._get_logits_processor(merged, prompt_len, device="cpu", model_kwargs={})
    return processors(torch.tensor([sequence]), logits[None].clone()).softmax(-1)[0]


def our_probabilities(config: MergedConfig, sequence: list[int], prompt_len: int, logits: torch.Tensor) -> torch.Tensor:
    params = config.sampling_params("prompt", prompt_len, None)
    cpu, length = torch.device("cpu"), len(sequence)
    state, row = penalties_with(
        [(sequence[:prompt_len], sequence[prompt_len:])], VOCAB, cpu, repetition=params.repetition_penalty
    )
    early = params.logit_bias | dict.fromkeys(params.stop_ids, -INF)
    bias = biases([dict(params.logit_bias)], row.tolist(), 8, cpu, [(early, prompt_len + params.min_tokens)])
    checked = state.checked(1, VOCAB, cpu)
    ones = torch.ones(1)
    inputs = SampleInputs(
        logits[None], ones, ones.long(), torch.tensor([length], dtype=torch.int32), row, bias_tokens=bias.tokens,
        bias_values=bias.values, bias_lists=bias.lists, **checked,
    )  # fmt: skip
    processed = processed_reference(inputs)[0]
    kept = kept_reference(processed, params.temperature, params.top_k, params.top_p, params.min_p)
    return torch.where(kept, processed / params.temperature, -INF).softmax(-1)


SAMPLED: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {"top_k": 0},
    "cold": {"temperature": 0.4, "top_k": 0},
    "hot": {"temperature": 2.5, "top_k": None},
    "no temperature": {"temperature": None},
    "top_k": {"top_k": 7, "temperature": 1.3},
    "top_k_1": {"top_k": 1},
    "top_p": {"top_p": 0.7, "top_k": 0, "temperature": 0.8},
    "top_p_0": {"top_p": 0.0},
    "min_p": {"min_p": 0.08, "top_k": 0, "temperature": 1.5},
    "top_k_top_p": {"top_k": 12, "top_p": 0.6, "temperature": 1.4},
    "top_k_min_p": {"top_k": 20, "min_p": 0.15},
    "penalty": {"repetition_penalty": 1.7, "top_p": 0.9},
    "everything": {
        "temperature": 1.2, "top_k": 25, "top_p": 0.85, "repetition_penalty": 1.4, "min_new_tokens": 6,
        "eos_token_id": [3, 4, 5], "sequence_bias": {(3,): 4.0, (8,): 3.0, (250,): -INF, (33,): 2.0},
        "bad_words_ids": [[9], [10], [3]], "suppress_tokens": [11, 12],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_probabilities_equal_those_of_the_processors_of_transformers(name: str) -> None:
    """For logits with one outstanding, several, and no likely token; during and after `min_new_tokens`."""
    rng = torch.Generator().manual_seed(7)
    for scale in (0.3, 2.0, 6.0):
        for length in (9, 11, 15):
            logits = scale * torch.randn(VOCAB, generator=rng)
            sequence = torch.randint(VOCAB, (length,), generator=rng).tolist()
            merged = MergedConfig.of(oracle(), None, {"do_sample": True, **SAMPLED[name]}, VOCAB)
            ours, theirs = (of(merged, sequence, 8, logits) for of in (our_probabilities, their_probabilities))
            assert ((ours > 0) == (theirs > 0)).all()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_samples_have_these_probabilities_and_follow_the_seed_of_torch() -> None:
    options: dict[str, Any] = {"do_sample": True, "top_k": 6, "temperature": 1.5, "max_new_tokens": 1}
    torch.manual_seed(11)
    found = generate([PROMPTS[0]], num_return_sequences=600, **options)
    with torch.no_grad():
        logits = oracle()(torch.tensor([PROMPTS[0]])).logits[0, -1]
    want = their_probabilities(MergedConfig.of(oracle(), None, options, VOCAB), PROMPTS[0], 5, logits)
    counts = Counter(result.token_ids[0] for result in found)
    assert counts.keys() == set(want.nonzero()[:, 0].tolist())
    for token, count in counts.items():
        mean = 600 * want[token].item()
        assert abs(count - mean) < 5 * mean**0.5
    pair = []
    for _ in range(2):
        torch.manual_seed(11)
        pair.append([result.token_ids for result in generate([PROMPTS[0]], num_return_sequences=40, **options)])
    assert pair[0] == pair[1]


NOT_NEUTRAL: dict[str, Any] = {
    "num_beams": 4, "constraints": ["c"], "force_words_ids": [[3]], "penalty_alpha": 0.6, "dola_layers": "high",
    "top_h": 0.4, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 2, "begin_suppress_tokens": [220],
    "forced_bos_token_id": 5, "forced_eos_token_id": 6, "exponential_decay_length_penalty": (5, 1.1),
    "guidance_scale": 1.5, "watermarking_config": WatermarkingConfig(bias=2.0), "token_healing": True,
    "output_attentions": True, "output_hidden_states": True, "output_scores": True, "output_logits": True,
    "use_mtp": True, "is_assistant": True, "prompt_lookup_num_tokens": 10, "assistant_early_exit": 2,
    "speculation_type": "dflash",
}  # fmt: skip


def test_one_error_names_every_field_that_is_not_honoured() -> None:
    assert NOT_NEUTRAL.keys() == REFUSED.keys()
    config = GenerationConfig(
        do_sample=True,
        sequence_bias={(3, 4): 1.0, (5,): 2.0},
        bad_words_ids=[[7, 8, 9]],
        min_p=0.1,
        top_p=0.9,
        **NOT_NEUTRAL,
    )
    with pytest.raises(UnsupportedError) as error:
        generate(PROMPTS, config, logits_processor=[print], prefix_allowed_tokens_fn=len)
    text = str(error.value)
    for name, value in NOT_NEUTRAL.items():
        assert f"{name}={value!r}"[:60] in " ".join(text.split())
    for part in ("sequence_bias of several tokens=[[3, 4]]", "bad_words_ids of several tokens=[[7, 8, 9]]",
                 "min_p with top_p=(0.1, 0.9)", "logits_processor=[", "prefix_allowed_tokens_fn=<"):  # fmt: skip
        assert part in text
    for name, neutral in REFUSED.items():
        for value in (None, *neutral):
            MergedConfig.of(oracle(), None, {name: value, "do_sample": True}, VOCAB)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_irrelevant_fields_change_no_token() -> None:
    values = {
        "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.5, "num_beam_groups": 1,
        "low_memory": True, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.9, "max_matching_ngram_size": 4, "assistant_lookbehind": 3,
        "target_lookbehind": 3, "assistant_ensemble_weight": 0.5, "decoder_start_token_id": 3, "use_cache": False,
        "cache_implementation": "static", "cache_config": {"a": 1}, "max_cache_len": 99,
        "compile_config": CompileConfig(), "disable_compile": True,
        "continuous_batching_config": None, "prefill_chunk_size": 3, "bos_token_id": 9,
        "renormalize_logits": True, "remove_invalid_values": True, "return_dict_in_generate": True,
        "transformers_version": "4", "_from_model_config": True,
    }  # fmt: skip
    assert values.keys() == {name for names in IRRELEVANT.values() for name in names}
    found = generate(PROMPTS, GenerationConfig(**values))
    assert [result.token_ids for result in found] == free_tokens("Llama")
