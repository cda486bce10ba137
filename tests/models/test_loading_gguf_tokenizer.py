"""Tokenizers of GGUF files: the rules of llama.cpp for special tokens, BOS, pre-tokenizers and SentencePiece."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.models.gguf_tokenizer import gguf_tokenizer
from graphrt.models.smollm import default_model_path
from graphrt.models.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BAR, BLOCK = "\uff5c", "\u2581"
BOS, EOS = f"<{BAR}begin{BLOCK}of{BLOCK}sentence{BAR}>", f"<{BAR}end{BLOCK}of{BLOCK}sentence{BAR}>"


def byte_level(*special: tuple[str, int], pre: str | None = "gpt-2", merges: tuple[str, ...] = (), **keys: Any) -> dict:
    """Metadata of a vocabulary with a token per byte, the results of `merges`, and `special` tokens with types."""
    tokens = [*ALPHABET, *(m.replace(" ", "") for m in merges), *(token for token, _ in special)]
    types = [NORMAL] * (len(tokens) - len(special)) + [kind for _, kind in special]
    found = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": list(merges)} | keys
    return {f"tokenizer.ggml.{k}": v for k, v in (found | ({"pre": pre} if pre else {})).items()}


def sentencepiece(scores: dict[str, float], **keys: Any) -> dict:
    """Metadata of a SentencePiece vocabulary: unknown, BOS, EOS, a token per byte, then `scores`."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scores)]
    found = {"model": "llama", "tokens": names, "token_type": types, "scores": [0.0] * 259 + list(scores.values())}
    return {f"tokenizer.ggml.{k}": v for k, v in (found | keys).items()}


def load(metadata: dict) -> Tokenizer:
    found = gguf_tokenizer(metadata, "file")
    return Tokenizer(found.backend, found.chat_template, found.eos_ids, found.bos_id)


def write(path: Path, metadata: dict) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    writer.add_tensor("token_embd.weight", np.zeros((300, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_control_tokens_outside_the_byte_alphabet_keep_their_ids(tmp_path: Path) -> None:
    """DeepSeek-R1-Distill spells them with U+FF5C and U+2581."""
    special = ((BOS, CONTROL), (EOS, CONTROL), ("<think>", USER_DEFINED), ("\u2026", USER_DEFINED), ("<s>", CONTROL))
    metadata = byte_level(*special, merges=("t h",), bos_token_id=257, eos_token_id=258, pre="deepseek-r1-qwen")
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", metadata))
    ids = [257, 259, ALPHABET.index("a"), 258, 260, 261]
    assert tokenizer.encode_prompt(f"{BOS}<think>a{EOS}\u2026<s>", chat=False) == ids
    assert tokenizer.decode(ids) == "<think>a\u2026"
    assert [tokenizer.special_id(x) for x in (EOS, "<think>", "<s>", "a")] == [258, None, 261, None]
    assert 258 in tokenizer.eos_ids
    assert len(tokenizer._backend) == 262, "no token is added to the list of the file"
    ids = tokenizer.encode_prompt("<|endoftext|> </s> <unk>", chat=False)
    assert tokenizer.decode(ids) == "<|endoftext|> </s> <unk>"
    assert max(ids) < 256


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
def test_end_tokens_of_llama_cpp_are_control_tokens_whatever_their_type(kind: int) -> None:
    tokenizer = load(byte_level(("<|im_end|>", kind), ("<|fim_pad|>", kind)))
    assert tokenizer.eos_ids == {256, 257}
    assert tokenizer.encode_prompt("a<|im_end|>", chat=False)[-1] == 256
    assert tokenizer.decode([256]) == ""


BOS_CASES = {
    **dict.fromkeys(["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"], True),
    **dict.fromkeys(["gpt-2", "qwen2", "smollm", "smaug-bpe", "deepseek-r1-qwen", "default", None], False),
}


@pytest.mark.parametrize("pre", BOS_CASES)
def test_bos_follows_the_pre_tokenizer_unless_the_file_says(pre: str | None) -> None:
    a = ALPHABET.index("a")
    for says, expected in ((None, BOS_CASES[pre]), (True, True), (False, False)):
        keys = {} if says is None else {"add_bos_token": says}
        metadata = byte_level(("<s>", CONTROL), pre=pre, bos_token_id=256, **keys)
        template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
        for prompt, chat in (("a", False), ("a", True), ("<s>a", True)):
            ids = load(metadata | template).encode_prompt(prompt, chat=chat)
            written = prompt.startswith("<s>")
            assert ids == [256] * (expected or written) + [a], "llama.cpp adds BOS to chat prompts too, once"


PRE_TEXT = "DON'Tx  12345 été!?\n\nx"
DIGITS = ["1", "2", "3", "4", "5"]
PRE = {
    "default": ["DON", "'", "Tx", " ", " ", "123", "45", " été", "!?", "\n", "\n", "x"],
    "falcon": ["DON", "'", "Tx", " ", " ", "123", "45", " été", "!?", "\n", "\n", "x"],
    "gpt-2": ["DON", "'", "Tx", " ", " 12345", " été", "!?", "\n", "\n", "x"],
    "smollm": ["DON", "'", "Tx", "  ", *DIGITS, " été", "!?", "\n", "\n", "x"],
    "llama-bpe": ["DON", "'T", "x", " ", " ", "123", "45", " été", "!?\n\n", "x"],
    "qwen2": ["DON", "'T", "x", " ", " ", *DIGITS, " été", "!?\n\n", "x"],
    "ufakzeka": ["DON", "'Tx", " ", " ", *DIGITS, " été", "!?\n\n", "x"],
    "minicpm5": ["DON", "'T", "x", "  ", "123", "45", " été", "!?\n\n", "x"],
    "tekken": ["DON", "'Tx", " ", " ", *DIGITS, " été", "!?\n\n", "x"],
    "gpt-4o": ["DON'T", "x", " ", " ", "123", "45", " été", "!?\n\n", "x"],
    "deepseek-coder": ["DON", "'", "Tx", "  ", *DIGITS, " été", "!?", "\n", "\n", "x"],
    "deepseek-v3": ["DON", "'Tx", "  ", "123", "45", " été", "!?\n\n", "x"],
}


@pytest.mark.parametrize("pre", PRE)
def test_pre_tokenizers_split_as_llama_cpp(pre: str) -> None:
    backend = load(byte_level(("<s>", CONTROL), pre=pre, bos_token_id=256))._backend.backend_tokenizer
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(PRE_TEXT)]
    assert [decoders.ByteLevel().decode([piece]) for piece in pieces] == PRE[pre]


def test_a_missing_pre_tokenizer_is_the_default_one() -> None:
    merges = ("1 2", "12 3", "123 4")
    assert load(byte_level(merges=merges, pre=None)).encode_prompt("1234", chat=False)[0] == 257
    assert load(byte_level(merges=merges)).encode_prompt("1234", chat=False) == [258]
    word, keys = (("abc", NORMAL), ("<s>", CONTROL)), {"bos_token_id": 257, "add_bos_token": False}
    assert load(byte_level(*word, pre="llama-bpe", **keys)).encode_prompt("abc", chat=False) == [256], "whole words"
    assert len(load(byte_level(*word, pre="qwen2", **keys)).encode_prompt("abc", chat=False)) == 3


def test_tokens_equal_transformers_on_a_real_file() -> None:
    path = default_model_path()
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert len(ours._backend) == len(theirs) == 49_152
    for text in ("Hello 12345 it's\n\n  don't  naïve 日本 \t a", "def f(x):\r\n\treturn x  # ok", "<|im_start|>a\nb "):
        assert ours.encode_prompt(text, chat=False) == theirs(text).input_ids


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Merge the leftmost of the pairs with the best score until no pair is a token."""
    symbols = list(text)
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]:
        at = min(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return symbols


PIECES = ["▁a", "ab", "ba", "aa", "▁▁", "▁b", "abb", "bab", "▁ab", "aab", "baa", "abab"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.permutations(PIECES), text=st.text("ab ", min_size=1, max_size=10))
def test_sentencepiece_merges_the_best_score_first(order: list[str], text: str) -> None:
    scores = {"▁": -90.0, "a": -91.0, "b": -92.0} | {piece: -float(i) for i, piece in enumerate(order)}
    tokenizer = load(sentencepiece(scores))
    ids = tokenizer.encode_prompt(text, chat=False)
    expected = merged_by_score("▁" + text.replace(" ", "▁"), scores)
    assert tokenizer._backend.convert_ids_to_tokens(ids) == ["<s>", *expected]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_adds_a_space_and_bos_unless_the_file_says_no() -> None:
    scores = {"▁": -1.0, "a": -2.0, "▁a": 0.0}

    def tokens(text: str, **keys: Any) -> list[str]:
        tokenizer = load(sentencepiece(scores, **keys))
        return tokenizer._backend.convert_ids_to_tokens(tokenizer.encode_prompt(text, chat=False))

    assert tokens("a</s>a é") == ["<s>", "▁a", "</s>", "▁a", "▁", "<0xC3>", "<0xA9>"]
    assert tokens(" a") == ["<s>", "▁", "▁a"]
    assert tokens("a</s>a", add_space_prefix=False, add_bos_token=False) == ["a", "</s>", "a"]


REFUSED = {
    "vocabulary": (byte_level(model="bert"), "tokenizer.ggml.model 'bert'"),
    "pre": (byte_level(pre="gpt-9"), "tokenizer.ggml.pre 'gpt-9'"),
    "pre that llama.cpp knows": (byte_level(pre="deepseek-llm"), "tokenizer.ggml.pre 'deepseek-llm'"),
    "eos": (byte_level(add_eos_token=True), "tokenizer.ggml.add_eos_token"),
    "separator": (byte_level(add_sep_token=True), "tokenizer.ggml.add_sep_token"),
    "unknown key": (byte_level(add_nonsense=True), "tokenizer.ggml.add_nonsense"),
    "forbidden tokens": (byte_level(suppress_tokens=[3]), "tokenizer.ggml.suppress_tokens"),
    "text in the byte alphabet": (byte_level(("né", USER_DEFINED)), "the user-defined token 'né'"),
}
MALFORMED = {
    "no tokens": (byte_level(tokens=[]), "tokenizer.ggml.tokens: expected a list of tokens"),
    "a token twice": (byte_level(("a", NORMAL)), "tokenizer.ggml.tokens: 'a' is in the list twice"),
    "few types": (byte_level(token_type=[1]), "tokenizer.ggml.token_type: expected a type for each of 256 tokens"),
    "text as types": (byte_level(token_type="a"), "tokenizer.ggml.token_type: expected a list of integers"),
    "no BOS": (byte_level(add_bos_token=True), "tokenizer.ggml.bos_token_id"),
    "BOS outside": (byte_level(add_bos_token=True, bos_token_id=999), "tokenizer.ggml.bos_token_id"),
    "no merges": (byte_level() | {"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: expected a list of merges"),
    "merges of nothing": (byte_level() | {"tokenizer.ggml.merges": ["q zz"]}, "ggml.merges: 'q zz' has parts"),
    "no scores": (
        sentencepiece({}) | {"tokenizer.ggml.scores": None},
        "scores: expected a number for each of 259",
    ),
    "infinite score": (sentencepiece({"a": float("inf")}), "tokenizer.ggml.scores"),
    "long piece": (sentencepiece({"a" * 2000: 0.0}), "tokens of at most 1024 characters"),
}


@pytest.mark.parametrize("case", [*REFUSED, *MALFORMED])
def test_other_tokenizers_are_refused_with_the_key(case: str) -> None:
    metadata, text = (REFUSED | MALFORMED)[case]
    with pytest.raises(UnsupportedError if case in REFUSED else ConfigError) as caught:
        load(metadata)
    assert text in str(caught.value)
