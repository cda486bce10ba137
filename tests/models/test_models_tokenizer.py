"""Tokenizers: prompts, chat templates, end tokens, and text that grows token by token."""

from __future__ import annotations

import json
import sys

import pytest

from graphrt.kernels.errors import ConfigError
from graphrt.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.model_fixtures import byte_tokenizer, sentencepiece_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = {
    "ascii": "Hello world",
    "accents": "naïve café über",
    "cjk": "日本語のテキスト",
    "emoji": "ok 👍🏽 and 👩‍👩‍👧 done",
    "mixed": "Zażółć 🦆\n\tनमस्ते\u200d",
    "spaces": "  two  spaces \n\n",
    "replacement character": "a\ufffdb",
}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_streamed_text_joins_to_the_whole_and_never_cuts_a_character(text):
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode_prompt(text, chat=False)
    assert len(ids) == len(text.encode())
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)
        assert parts[-1] == ""


def test_text_comes_with_the_token_that_completes_it():
    tokenizer = Tokenizer(byte_tokenizer())
    assert streamed(tokenizer, tokenizer.encode_prompt("aé👍b", chat=False)) == [
        "a",
        "",
        "é",
        "",
        "",
        "",
        "👍",
        "b",
        "",
    ]


def test_an_unfinished_character_comes_last_and_once():
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode_prompt("a👍", chat=False)[:-1]
    assert streamed(tokenizer, ids) == ["a", "", "", "", "\ufffd"]
    stream = tokenizer.stream()
    for i in ids:
        stream.push(i)
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_spaces_between_words_survive_tokenizers_that_strip_the_first():
    tokenizer = Tokenizer(sentencepiece_tokenizer())
    words = {word: tokenizer._backend.convert_tokens_to_ids(word) for word in ("▁Hello", "▁world", "s", "!")}
    emoji = [tokenizer._backend.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é👍".encode()]
    ids = [words["▁Hello"], words["▁world"], words["s"], *emoji, words["▁world"], words["!"]]
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == "Hello worldsé👍 world!"
    assert parts[:3] == ["Hello", " world", "s"]
    assert not any("\ufffd" in part for part in parts)


def test_special_tokens_are_not_text():
    tokenizer = Tokenizer(byte_tokenizer())
    end = tokenizer._backend.convert_tokens_to_ids("<|im_end|>")
    ids = [*tokenizer.encode_prompt("hi", chat=False), end, *tokenizer.encode_prompt("!", chat=False)]
    assert tokenizer.decode(ids) == "hi!"
    assert streamed(tokenizer, ids) == ["h", "i", "", "!", ""]


def test_chat_prompts_follow_the_template_without_a_second_start_token():
    tokenizer = Tokenizer(byte_tokenizer(bos=True), TEMPLATE)
    ids = tokenizer.encode_prompt("hi", chat=True)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer._backend.decode(ids) == text
    assert tokenizer.encode_prompt("hi", chat=False)[0] == tokenizer._backend.convert_tokens_to_ids("<s>")


def test_end_tokens_come_from_tokenizer_config_and_known_names(tmp_path):
    backend = byte_tokenizer()
    backend.eos_token = "<s>"
    backend.save_pretrained(tmp_path)
    ids = backend.convert_tokens_to_ids(["<s>", "<|im_end|>", "<|endoftext|>"])
    assert load_tokenizer(tmp_path, [7]).eos_ids == {7, *ids}


def test_folders(tmp_path):
    backend = byte_tokenizer()
    backend.chat_template = TEMPLATE
    backend.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.encode_prompt("é", chat=True) == Tokenizer(backend).encode_prompt("é", chat=True)


def test_prompts_that_cannot_be_encoded_are_refused():
    tokenizer = Tokenizer(byte_tokenizer())
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match=r"chat: .*got one without; pass chat=False"):
        tokenizer.encode_prompt("hi", chat=True)
    with pytest.raises(ConfigError, match="prompt: expected some text"):
        tokenizer.encode_prompt("", chat=False)


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="expected a tokenizer that transformers can read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("package", ["transformers", "jinja2"])
def test_missing_packages_name_the_pip_command(tmp_path, package, monkeypatch):
    tokenizer = Tokenizer(byte_tokenizer(), TEMPLATE)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf'{package}: .*run pip install "graphrt\[models\]"'):
        load_tokenizer(tmp_path) if package == "transformers" else tokenizer.encode_prompt("hi", chat=True)
