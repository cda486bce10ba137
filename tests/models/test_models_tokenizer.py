"""Tokenizers: prompts, chat templates, end tokens, and text that grows token by token."""

from __future__ import annotations

import sys

import pytest
import transformers

from graphrt.kernels.errors import ConfigError
from graphrt.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.model_fixtures import byte_tokenizer, edit_json, sentencepiece_tokenizer

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
def test_streamed_pieces_join_to_the_text_and_hold_whole_characters(text):
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode_prompt(text, chat=False)
    assert len(ids) == len(text.encode())
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)
        assert parts[-1] == ""


def test_text_is_returned_with_the_token_that_completes_it():
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode_prompt("aé👍", chat=False)
    assert streamed(tokenizer, ids) == ["a", "", "é", "", "", "", "👍", ""]
    assert streamed(tokenizer, ids[:-1]) == ["a", "", "é", "", "", "", "\ufffd"]
    stream = tokenizer.stream()
    stream.push(ids[1])
    assert [stream.finish(), stream.finish()] == ["\ufffd", ""]


def test_spaces_between_words_survive_tokenizers_that_strip_the_first():
    tokenizer = Tokenizer(sentencepiece_tokenizer())
    words = {word: tokenizer._backend.convert_tokens_to_ids(word) for word in ("▁Hello", "▁world", "s", "!")}
    emoji = [tokenizer._backend.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é👍".encode()]
    ids = [words["▁Hello"], words["▁world"], words["s"], *emoji, words["▁world"], words["!"]]
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == "Hello worldsé👍 world!"
    assert parts[:3] == ["Hello", " world", "s"]
    assert not any("\ufffd" in part for part in parts)


def test_special_tokens_have_ids_and_no_text():
    tokenizer = Tokenizer(byte_tokenizer())
    end = tokenizer._backend.convert_tokens_to_ids("<|im_end|>")
    ids = [*tokenizer.encode_prompt("hi", chat=False), end, *tokenizer.encode_prompt("!", chat=False)]
    assert tokenizer.decode(ids) == "hi!"
    assert streamed(tokenizer, ids) == ["h", "i", "", "!", ""]
    texts = ("<|im_end|>", " <|im_end|>", "<|im_end|><|im_end|>", "a", "")
    assert [tokenizer.special_id(text) for text in texts] == [end, None, None, None, None]


def test_chat_prompts_follow_the_template_without_a_second_bos():
    tokenizer = Tokenizer(byte_tokenizer(bos=True), TEMPLATE)
    ids = tokenizer.encode_prompt("hi", chat=True)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer._backend.decode(ids) == text
    assert tokenizer.encode_prompt("hi", chat=False)[0] == tokenizer._backend.convert_tokens_to_ids("<s>")
    plain = Tokenizer(byte_tokenizer())
    assert not plain.has_chat_template
    with pytest.raises(ConfigError, match=r"chat: the model has no chat template; pass chat=False"):
        plain.encode_prompt("hi", chat=True)


def test_end_tokens_are_those_of_the_tokenizer_and_well_known_names(tmp_path):
    backend = byte_tokenizer()
    backend.eos_token = "<s>"
    backend.save_pretrained(tmp_path)
    ids = backend.convert_tokens_to_ids(["<s>", "<|im_end|>", "<|endoftext|>"])
    assert load_tokenizer(tmp_path).eos_ids == set(ids)


NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
TEMPLATES = {
    "config": (TEMPLATE, None, None),
    "default by name": (NAMED, None, None),
    "files": (None, {"chat_template.jinja": TEMPLATE, "additional_chat_templates/rag.jinja": "rag"}, None),
    "file before config": ("config", {"chat_template.jinja": TEMPLATE}, None),
    "no default": (NAMED[1:], None, r"chat template: the model has 'tool_use', but none named 'default'"),
    "empty": ("", None, "chat template: renders a user message as an empty string"),
    "number": (3, None, "chat_template: expected Jinja source or None, got 3"),
}


@pytest.mark.parametrize(("config", "files", "error"), TEMPLATES.values(), ids=TEMPLATES)
def test_templates_are_chosen_as_transformers_does(tmp_path, config, files, error):
    byte_tokenizer().save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", **({} if config is None else {"chat_template": config}))
    for name, text in (files or {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if error:
        with pytest.raises(ConfigError, match=error):
            load_tokenizer(tmp_path).encode_prompt("hi", chat=True)
        return
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    message = [{"role": "user", "content": "hi"}]
    expected = reference.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert load_tokenizer(tmp_path).encode_prompt("hi", chat=True) == expected
    assert "assistant" in reference.decode(expected)


@pytest.mark.parametrize("package", ["transformers", "jinja2"])
def test_missing_packages_name_the_pip_command(tmp_path, package, monkeypatch):
    tokenizer = Tokenizer(byte_tokenizer(), TEMPLATE)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf'{package}: .*run pip install "graphrt\[models\]"'):
        load_tokenizer(tmp_path) if package == "transformers" else tokenizer.encode_prompt("hi", chat=True)
