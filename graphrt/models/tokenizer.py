"""Text to token ids and back, by the tokenizer and chat template that belong to a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ConfigError
from graphrt.models.config import gguf_eos_ids
from graphrt.models.fields import FieldReader, check_path, shown
from graphrt.models.gguf_file import read_gguf
from graphrt.models.packages import require

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")
"""End of a text or turn in the formats of the Llama family. Configs often name only one of a model's."""

_INCOMPLETE = "\ufffd"
_MAX_TOKEN = (1 << 31) - 1


def check_prompt(text: str) -> None:
    """Raise ConfigError unless `text` is a string that is not empty and that UTF-8 can encode."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"prompt: expected some text, got {text!r}; pass a string that is not empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8 become lone surrogates
        raise ConfigError(f"prompt: expected text in UTF-8, got {text!r:.80}; convert it to UTF-8") from error


class Tokenizer:
    """A model's tokenizer.

    backend         a fast tokenizer of `transformers`
    chat_template   Jinja source for prompts that are messages; None means that the model has no chat format
    eos_ids         end-of-text ids; special tokens of well-known names are added to them
    """

    def __init__(self, backend: Any, chat_template: str | None = None, eos_ids: Sequence[int] = ()) -> None:
        if not hasattr(backend, "added_tokens_decoder"):
            raise ConfigError(
                f"backend: expected a tokenizer of transformers, got {shown(backend)}; see load_tokenizer"
            )
        if chat_template is not None and not isinstance(chat_template, str):
            raise ConfigError(
                f"chat_template: expected Jinja source or None, got {shown(chat_template)}; pass its text"
            )
        self._backend = backend
        self._chat_template = chat_template if chat_template is not None else backend.chat_template
        tokens = backend.added_tokens_decoder.items()
        self._special = {token.content: index for index, token in tokens if token.special}
        special = [index for name in _END_TOKENS if (index := self.special_id(name)) is not None]
        self.eos_ids = frozenset([*_check_ids("eos_ids", eos_ids), *special])

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token of this text, or None. `decode` leaves special tokens out."""
        return self._special.get(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_prompt(..., chat=True)` works."""
        return self._chat_template is not None

    def encode_prompt(self, text: str, *, chat: bool) -> list[int]:
        """Token ids of a prompt: as one user message that asks for an answer, or as text to be continued.

        Raises: ConfigError when the text is none that `check_prompt` takes or the model has no chat template.
        """
        check_prompt(text)
        if not chat:
            return list(self._backend(text).input_ids)
        if self._chat_template is None:
            raise ConfigError("chat: expected a model with a chat template, got one without; pass chat=False")
        require("jinja2", "for chat templates")
        try:
            rendered = self._backend.apply_chat_template(
                [{"role": "user", "content": text}],
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a program that came with the model, and may raise anything
            raise ConfigError(
                f"chat template: expected Jinja that renders a user message, got {type(error).__name__}: {error}; "
                "pass chat=False (--raw)"
            ) from error
        # The template has written the special tokens that the model wants.
        return list(self._backend(rendered, add_special_tokens=False).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens. Raises: ConfigError for what are no token ids."""
        ids = _check_ids("ids", ids)
        return str(self._backend.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stream(self) -> TokenStream:
        """A new incremental decoder, for one sequence."""
        return TokenStream(self)


class TokenStream:
    """Decodes one sequence as it grows.

    The texts of `push` and `finish` join to the text of the whole sequence, and none ends within a character. Only a
    short window is decoded again: tokens are decoded with the ones before them, whose text is then cut off, because
    some tokenizers give a token another text at the start.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text has been given out

    def push(self, token: int) -> str:
        """The text that becomes certain with one more token; empty in the middle of a character.

        Raises: ConfigError for what is no token id.
        """
        self._window += _check_ids("token", (token,))
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text

    def finish(self) -> str:
        """The rest: replacement characters if the sequence ended in the middle of a character, else nothing."""
        text = self._pending()
        self._window, self._shown = [], 0
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._window[: self._shown])
        return self._tokenizer.decode(self._window)[len(before) :]


def _check_ids(name: str, ids: Sequence[int]) -> list[int]:
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise ConfigError(f"{name}: expected token ids, got {shown(ids)}; pass a sequence of ints")
    return [check_int(name, token, 0, _MAX_TOKEN, advice="pass token ids") for token in ids]


def load_tokenizer(source: Path, eos_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file.

    eos_ids   further end-of-text ids, such as those of the model's config

    Raises: ConfigError when there is none, it cannot be read or a package is missing.
    """
    source = check_path("source", source)
    transformers = require("transformers", "for tokenizers")
    if not source.is_file():
        backend = _read(transformers, source, source)
        own: tuple[int, ...] = () if backend.eos_token_id is None else (backend.eos_token_id,)
        return Tokenizer(backend, None, (*own, *eos_ids))
    require("gguf", "to read GGUF files")
    metadata = read_gguf(source).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise ConfigError(f"{source}: expected a GGUF file with a tokenizer, got none; pass the original folder")
    backend = _read(transformers, source, source.parent, gguf_file=source.name)
    # The file's own template and end tokens: some versions of transformers leave them out or take others.
    fields = FieldReader(metadata, str(source))
    key = "tokenizer.chat_template"
    template = fields.text(key) if fields.has(key) and metadata[key] != "" else None
    own = gguf_eos_ids(fields)
    fields.finish()
    return Tokenizer(backend, template, (*own, *eos_ids))


def _read(transformers: Any, source: Path, folder: Path, **options: str) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, clean_up_tokenization_spaces=False, **options
        )
    except Exception as error:  # transformers and tokenizers raise many kinds, none documented
        raise ConfigError(
            f"{source}: expected a tokenizer that transformers can read, got {type(error).__name__}: {error}"
        ) from error
