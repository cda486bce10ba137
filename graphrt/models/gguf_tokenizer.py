"""The tokenizer of a GGUF file, built by the rules of llama.cpp's `llama-vocab.cpp`.

Splitting, byte alphabet and merges follow `tokenizer.ggml.model` and `tokenizer.ggml.pre`. All control and
user-defined tokens keep their ids, and no token is added to the file's list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.kernels.checks import is_finite, shown
from graphrt.models.fields import FieldReader
from graphrt.models.packages import require

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MAX_PIECE = 1024  # characters; splitting a SentencePiece token into pairs takes quadratic time

_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"  # llama.cpp's definition of upper and lower case


def _words(digits: str, contraction: str = f"(?:{_CONTRACTION})|") -> str:
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|{_SYMBOLS}[\r\n]*|{_SPACES}"


def _cased(digits: str, suffix: str = "") -> str:
    first = r"[^\r\n\p{L}\p{N}]?"
    cased = f"{first}{_UPPER}*{_LOWER}+{suffix}|{first}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{cased}|\p{{N}}{digits}|{_SYMBOLS}[\r\n/]*|{_SPACES}"


_LLAMA3 = _words("{1,3}")
_DEEPSEEK3 = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
_SPLITS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), "default"),
    (
        (_GPT2,),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
    ),
    ((r"\p{N}", _GPT2), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (
        (_LLAMA3,),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 "
        "chatglm-bpe",
    ),
    ((_words(""),), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    ((_words("", ""),), "ufakzeka"),
    ((r"\p{N}{1,3}", _words("+")), "minicpm5"),
    ((_cased(""),), "tekken"),
    ((_cased("{1,3}", f"(?:{_CONTRACTION})?"),), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    ((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"), "falcon"),
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"), "deepseek-coder"),
    ((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),  # noqa: RUF001
)
_PRE = {name: patterns for patterns, names in _SPLITS for name in names.split()}
_WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
    "minicpm5",
}  # fmt: skip
"""Pre-tokenizers that look up words before merging."""
_STARTS_WITH_BOS = _WHOLE_WORDS - {"minicpm5"}
"""Pre-tokenizers whose models expect BOS if `add_bos_token` is missing."""

END_NAMES = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<\uff5cend▁of▁sentence\uff5c>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
}  # fmt: skip
"""Control tokens that end a text. llama.cpp identifies them by name and ignores the type in the file."""

_END_KEYS = (
    "eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id",
)  # fmt: skip
_IRRELEVANT = {
    "pre", "scores", "merges", "added_tokens", "add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap",
    "token_type_count", "unknown_token_id", "seperator_token_id", "separator_token_id", "padding_token_id",
    "cls_token_id", "mask_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "prefix_token_id",
    "suffix_token_id", "middle_token_id", "normalizer.lowercase", "normalizer.strip_accents",
}  # fmt: skip
"""Keys that llama.cpp does not read for a vocabulary of this kind, or that do not affect tokens."""


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """A fast tokenizer of `transformers`, the file's chat template, and the ids of special tokens."""

    backend: Any
    chat_template: str | None
    bos_id: int | None  # first token of every prompt
    eos_ids: tuple[int, ...]


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> GGUFTokenizer:
    """Build the tokenizer from a GGUF file's metadata.

    Raises:
        UnsupportedError: if a vocabulary, pre-tokenizer or key is not implemented; the message names it.
        ConfigError: if a key is missing or malformed.
    """
    transformers = require("transformers", "for tokenizers")
    fields = FieldReader(metadata, where)
    kind = fields.text(f"{_PREFIX}model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind and kind not in builders:
        fields.unsupported(f"{_PREFIX}model {shown(kind)} (supported: {', '.join(builders)})")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.texts(f"{_PREFIX}tokens"))]
    fields.expect(f"{_PREFIX}tokens", bool(tokens), "a list of tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    twice = next((token for index, token in enumerate(tokens) if vocab[token] != index), None)
    if twice is not None:
        fields.problems.append(f"{_PREFIX}tokens: {shown(twice)} is in the list twice")
    types = _token_types(fields, tokens)
    template_key = "tokenizer.chat_template"
    template = fields.text(template_key) if metadata.get(template_key) else None  # llama.cpp: empty means none
    eos_ids = [i for key in _END_KEYS for i in fields.token_ids(_PREFIX + key)]
    fields.finish()

    raw, add_bos = builders[kind](fields, vocab, types)
    add_bos = fields.flag(f"{_PREFIX}add_bos_token", add_bos)
    ids = {"bos": fields.token_ids(f"{_PREFIX}bos_token_id"), "eos": fields.token_ids(f"{_PREFIX}eos_token_id")}
    if kind == "llama":  # default to SentencePiece's ids if the file has none
        ids = {name: found or default for (name, found), default in zip(ids.items(), ((1,), (2,)), strict=True)}
    special = {f"{name}_token": tokens[found[0]] for name, found in ids.items() if found and found[0] < len(tokens)}
    if add_bos and "bos_token" not in special:
        fields.problems.append(f"{_PREFIX}bos_token_id: missing, or not in {_PREFIX}tokens; the prompts need it")
    for key in ("add_eos_token", "add_sep_token"):
        if fields.flag(_PREFIX + key):
            fields.unsupported(f"{_PREFIX}{key} true, which adds a token after every prompt")
    fields.refuse({f"{_PREFIX}suppress_tokens": ()})
    fields.refuse_unread(_PREFIX, _IRRELEVANT)
    fields.finish()

    tokenizers = require("tokenizers", "for tokenizers")
    bos_id = vocab[special["bos_token"]] if add_bos else None
    if bos_id is not None:
        start = {"id": "BOS", "ids": [bos_id], "tokens": [tokens[bos_id]]}
        raw.post_processor = tokenizers.processors.TemplateProcessing("BOS $A", special_tokens=[start])
    _add_special_tokens(raw, tokens, types)
    backend = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    ends = (*eos_ids, *ids["eos"], *(vocab[name] for name in sorted(END_NAMES & vocab.keys())))
    return GGUFTokenizer(backend, template, bos_id, tuple(dict.fromkeys(i for i in ends if i < len(tokens))))


def _token_types(fields: FieldReader, tokens: Sequence[str]) -> list[int]:
    key = f"{_PREFIX}token_type"
    types = fields.integers(key) if fields.has(key) else (_NORMAL,) * len(tokens)
    fields.expect(key, len(types) >= len(tokens), f"a type for each of {len(tokens)} tokens")
    return [_CONTROL if token in END_NAMES else kind for token, kind in zip(tokens, types, strict=False)]


def _add_special_tokens(raw: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Match control and user-defined tokens in a text first. Decoded text omits control tokens."""
    added = require("tokenizers", "for tokenizers").AddedToken
    kinds = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    found = [(token, kinds[kind]) for token, kind in zip(tokens, types, strict=True) if kind in kinds]
    raw.add_special_tokens([added(token, special=True, normalized=False) for token, special in found if special])
    raw.add_tokens([added(token, special=False, normalized=False) for token, special in found if not special])


def _byte_level(fields: FieldReader, vocab: dict[str, int], types: Sequence[int]) -> tuple[Any, bool]:
    """Return a byte-level BPE tokenizer, and whether it adds BOS by default."""
    tokenizers = require("tokenizers", "for tokenizers")
    pre = fields.text(f"{_PREFIX}pre", "default")
    if pre and pre not in _PRE:
        fields.unsupported(f"{_PREFIX}pre {shown(pre)} (supported: {', '.join(sorted(_PRE))})")
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # The decoder would interpret the characters of these tokens as bytes.
    misread = [
        t for t, k in zip(vocab, types, strict=True) if k == _USER_DEFINED and not t.isascii() and alphabet > {*t}
    ]
    if misread:
        fields.unsupported(f"the user-defined token {shown(misread[0])}, which is spelled in the byte alphabet")
    key = f"{_PREFIX}merges"
    merges = [(m[: m.find(" ", 1)], m[m.find(" ", 1) + 1 :]) for m in fields.texts(key) if m.find(" ", 1) > 0]
    fields.expect(key, fields.has(key), "a list of merges")
    merges = list(dict.fromkeys(merges))
    unknown = next((pair for pair in merges if not {*pair, "".join(pair)} <= vocab.keys()), None)
    if unknown is not None:
        fields.problems.append(f"{key}: {shown(' '.join(unknown))} has parts that are not in {_PREFIX}tokens")
    fields.finish()
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PRE[pre]]
    steps.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return raw, pre in _STARTS_WITH_BOS


def _sentencepiece(fields: FieldReader, vocab: dict[str, int], types: Sequence[int]) -> tuple[Any, bool]:
    """Return a SentencePiece tokenizer, and whether it adds BOS by default.

    The pair with the highest score is merged first, and unknown characters become bytes.
    """
    tokenizers = require("tokenizers", "for tokenizers")
    key = f"{_PREFIX}scores"
    scores = fields.get(key)
    good = isinstance(scores, list) and len(scores) >= len(vocab) and all(map(is_finite, scores))
    fields.expect(key, good, f"a number for each of {len(vocab)} tokens")
    fields.expect(f"{_PREFIX}tokens", max(map(len, vocab)) <= _MAX_PIECE, f"tokens of at most {_MAX_PIECE} characters")
    prefix = fields.flag(f"{_PREFIX}add_space_prefix", True)
    fields.finish()
    pairs = [
        (-scores[index], index, token[:cut], token[cut:])
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges = [(left, right) for _, _, left, right in sorted(pairs)]
    unknown = next((token for token, kind in zip(vocab, types, strict=True) if kind == _UNKNOWN), None)
    raw = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    )
    space = [tokenizers.normalizers.Prepend("▁")] if prefix else []
    raw.normalizer = tokenizers.normalizers.Sequence([*space, tokenizers.normalizers.Replace(" ", "▁")])
    decoders = tokenizers.decoders
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return raw, True
