"""Convert text to token ids and back, with the tokenizer and chat template of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from graphrt.kernels.checks import check_int, shown
from graphrt.kernels.errors import ConfigError, GraphRTError
from graphrt.models.fields import check_path, printable
from graphrt.models.gguf_file import read_gguf
from graphrt.models.gguf_tokenizer import gguf_tokenizer
from graphrt.models.packages import require

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")
"""End of a text or turn in the formats of the Llama family. Configs often list only one of them."""

_INCOMPLETE = "\ufffd"
_MAX_TOKEN = (1 << 31) - 1
_T = TypeVar("_T")


def check_prompt(text: str) -> None:
    """Raise ConfigError unless `text` is a non-empty string that UTF-8 can encode."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"prompt: expected some text, got {shown(text)}; pass a non-empty string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8 become lone surrogates
        raise ConfigError(f"prompt: {text!r:.80} is not valid UTF-8; convert it to UTF-8") from error


class Tokenizer:
    """The tokenizer of a model.

    Args:
        backend: a fast tokenizer of `transformers`.
        chat_template: Jinja source for chat prompts. None means the backend's template, if any.
        eos_ids: end-of-text ids. Special tokens with well-known names are added.
        bos_id: first token of every chat prompt, added if the template does not write it.
    """

    def __init__(
        self,
        backend: Any,
        chat_template: str | None = None,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
    ) -> None:
        template = backend.chat_template if chat_template is None else chat_template
        if isinstance(template, dict):  # templates by name; transformers uses "default" if there are no tools
            template = template.get("default", template)
        if template is not None and not isinstance(template, str | dict):
            raise ConfigError(f"chat_template: expected Jinja source or None, got {shown(template)}; pass its text")
        self._backend, self._chat_template, self._bos_id = backend, template, bos_id
        self._special = {t.content: index for index, t in backend.added_tokens_decoder.items() if t.special}
        ends = (self._special[name] for name in _END_TOKENS if name in self._special)
        self.eos_ids = frozenset([*_check_ids("eos_ids", eos_ids), *ends])

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat format, for `encode_prompt(..., chat=True)`."""
        return self._chat_template is not None

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token whose text is exactly `text`, or None.

        `decode` omits special tokens, so such a text never appears in its result.
        """
        return self._special.get(text)

    def encode_prompt(self, text: str, *, chat: bool) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            text: the prompt.
            chat: whether `text` is a user message to answer; otherwise, it is a text to continue.

        Raises:
            ConfigError: if `check_prompt` rejects the text, if the model has no chat template, or if the template
                fails or writes nothing.
        """
        check_prompt(text)
        if not chat:
            ids = list(_guarded("tokenizer", lambda: self._backend(text).input_ids))
            if not ids:
                raise ConfigError(f"prompt: {shown(text)} has no tokens in this vocabulary; pass another text")
            return ids
        if self._chat_template is None:
            raise ConfigError("chat: the model has no chat template; pass chat=False (--raw)")
        if isinstance(self._chat_template, dict):
            names = ", ".join(map(shown, self._chat_template))
            raise ConfigError(
                f"chat template: the model has {names}, but none named 'default'; pass chat=False (--raw)"
            )
        require("jinja2", "for chat templates")
        try:
            rendered = self._backend.apply_chat_template(
                [{"role": "user", "content": text}],
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # the template is a program from the model and may raise anything
            raise ConfigError(
                f"chat template: cannot render a user message: {type(error).__name__}: {printable(error)}; "
                "pass chat=False (--raw)"
            ) from error
        # The template has already written the special tokens that the model expects.
        ids = list(_guarded("tokenizer", lambda: self._backend(rendered, add_special_tokens=False).input_ids))
        if not ids:
            raise ConfigError("chat template: renders a user message as an empty string; pass chat=False (--raw)")
        return ids if self._bos_id is None or ids[0] == self._bos_id else [self._bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, excluding special tokens.

        Raises:
            ConfigError: if `ids` is not a sequence of token ids.
        """
        ids = _check_ids("ids", ids)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(_guarded("tokenizer", lambda: self._backend.decode(ids, **options)))

    def stream(self) -> TokenStream:
        """Return a new incremental decoder for one sequence."""
        return TokenStream(self)


class TokenStream:
    """Decode one sequence incrementally.

    The results of `push` and `finish` concatenate to the text of the whole sequence. No result ends inside a character.
    Each call decodes a short window again, because some tokenizers decode a token differently at the start of a
    sequence. A token is therefore decoded together with the preceding tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text was returned

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes, or "" while a character is incomplete.

        Raises:
            ConfigError: if `token` is not a token id.
        """
        self._window += _check_ids("token", (token,))
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text

    def finish(self) -> str:
        """Return the remaining text, which is replacement characters if the sequence ended inside a character, else
        ""."""
        text = self._pending()
        self._window, self._shown = [], 0
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._window[: self._shown])
        return self._tokenizer.decode(self._window)[len(before) :]


def load_tokenizer(source: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder or a GGUF file.

    Args:
        source: the folder or file.

    Raises:
        ConfigError: if `source` has no readable tokenizer, or a package is missing.
        UnsupportedError: if a GGUF file has a vocabulary, pre-tokenizer or key that graphrt does not implement.
    """
    source = check_path("source", source)
    transformers = require("transformers", "for tokenizers")

    def from_folder() -> Tokenizer:
        backend = transformers.AutoTokenizer.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, clean_up_tokenization_spaces=False
        )
        own = () if backend.eos_token_id is None else (backend.eos_token_id,)
        return Tokenizer(backend, None, own)

    def from_file() -> Tokenizer:
        found = gguf_tokenizer(read_gguf(source).metadata, printable(source))
        return Tokenizer(found.backend, found.chat_template, found.eos_ids, found.bos_id)

    if not source.is_file():
        return _guarded(f"{printable(source)}: cannot read a tokenizer", from_folder)
    require("gguf", "to read GGUF files")
    return _guarded(f"{printable(source)}: cannot build a tokenizer", from_file)


def _guarded(what: str, call: Callable[[], _T]) -> _T:
    """Return `call()`. Convert errors caused by damaged tokenizer files to a ConfigError that starts with `what`."""
    try:
        return call()
    except GraphRTError:
        raise
    except BaseException as error:  # transformers and tokenizers raise many kinds, and Rust panics are not Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = f"{what}: {type(error).__name__}: {printable(error)}"
        raise ConfigError(f"{text}; copy all files of the tokenizer again") from error


def _check_ids(name: str, ids: Sequence[int]) -> list[int]:
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise ConfigError(f"{name}: expected a sequence of token ids, got {shown(ids)}; pass a list of ints")
    return [check_int(name, token, 0, _MAX_TOKEN, advice="pass token ids") for token in ids]
