"""Text generation with the arguments of transformers' `generate`, and continuous batching over a runtime."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from graphrt.engine.handle import TokenLogprob
from graphrt.generate.generator import TextGenerator
from graphrt.integrations.transformers.generation_config import MergedConfig
from graphrt.integrations.transformers.host import package
from graphrt.kernels.checks import check_callable, check_instance, check_sequence
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.models.tokenizer import Tokenizer
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import check_request

Prompts = Sequence[str] | Sequence[Sequence[int]] | torch.Tensor
"""Texts, lists of token ids, or a padded batch of token ids [prompts, tokens] with an `attention_mask`."""

_TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Tokenizers and processors return them. Zeros mean the first sentence, or text that is not an image."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A new token of a sequence.

    index          index of the sequence: prompt * num_return_sequences + number of the copy
    token_id       the token
    text           the text that the token completes, without special tokens; None without a tokenizer
    finish_reason  in the last token of the sequence, the field that ended it: "eos_token_id", "stop_strings",
                   "stopping_criteria", "max_time" or "max_length"
    logprob        with `logprobs`
    """

    index: int
    token_id: int
    text: str | None
    finish_reason: str | None
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated sequence.

    prompt_ids     tokens of the prompt, without padding
    token_ids      the new tokens, including the token that ended the sequence
    text           text of the new tokens, without special tokens; None without a tokenizer
    finish_reason  as in GeneratedToken
    logprobs       one per new token, with `logprobs`
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[TokenLogprob] | None

    @property
    def sequence(self) -> list[int]:
        """Prompt and new tokens: a row of what `model.generate` returns, without padding."""
        return self.prompt_ids + self.token_ids


def generate(
    runtime: Runtime, model: Any, prompts: Prompts | None, generation_config: Any, streamer: Any, **options: Any
) -> list[Generation]:
    """Return all sequences; see TransformersRuntime.generate."""
    call = _Call(runtime, model, prompts, generation_config, **options)
    if streamer is not None:
        if len(call.prompts) != 1:
            raise ConfigError(f"streamer: expected one sequence, got {len(call.prompts)}; use generate_stream()")
        for method in ("put", "end"):
            check_callable(f"streamer.{method}", getattr(streamer, method, None), advice="pass a TextStreamer")
        streamer.put(torch.tensor(call.prompts, device="cpu"))
    found: list[list[GeneratedToken]] = [[] for _ in call.prompts]
    with closing(call.tokens(with_text=False)) as tokens:
        for token in tokens:
            found[token.index].append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token.token_id], device="cpu"))
    if streamer is not None:
        streamer.end()
    return [call.result(prompt, mine) for prompt, mine in zip(call.prompts, found, strict=True)]


def stream(
    runtime: Runtime, model: Any, prompts: Prompts | None, generation_config: Any, **options: Any
) -> Generator[GeneratedToken, None, None]:
    """Yield tokens as they arrive; see TransformersRuntime.generate_stream."""
    return _Call(runtime, model, prompts, generation_config, **options).tokens(with_text=True)


class _Call:
    """One call of `generate` or `stream`, with checked arguments.

    prompts  the prompt of each sequence
    """

    def __init__(
        self,
        runtime: Runtime,
        model: Any,
        prompts: Prompts | None,
        generation_config: Any,
        *,
        tokenizer: Any = None,
        attention_mask: Any = None,
        stopping_criteria: Sequence[Any] | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> None:
        if prompts is None:
            prompts = options.pop("input_ids", None)
        for name in _TOKEN_TYPES & options.keys():
            if options[name] is not None and _are_default_types(model, name, options[name]):
                del options[name]
        merged = MergedConfig.of(model, generation_config, options, runtime.vocab_size)
        config = merged.config
        if tokenizer is None and (config.stop_strings or _has_text(prompts)):
            tokenizer = _tokenizer_of(model.name_or_path)
        if tokenizer is not None:
            kind = package().PreTrainedTokenizerBase
            check_instance("tokenizer", tokenizer, kind, advice="load it with AutoTokenizer")
        self._tokenizer = None if tokenizer is None else Tokenizer(tokenizer)
        self._logprobs = logprobs is not None
        if attention_mask is None and isinstance(prompts, torch.Tensor) and config.pad_token_id not in merged.eos_ids:
            attention_mask = None if config.pad_token_id is None else prompts != config.pad_token_id
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.prompts: list[list[int]] = []
        self._params: list[SamplingParams] = []
        for index, (tokens, width) in enumerate(_rows(prompts, attention_mask, tokenizer)):
            name = f"prompts[{index}]"
            params = merged.sampling_params(name, width, positions, logprobs=logprobs)
            for need in params.needs:
                runtime.config.check_needs(merged.fields_needing(need[0]), [need])
            checked, _ = check_request(runtime, tokens, params, name, "generation_config")
            self.prompts += [checked.tolist()] * config.num_return_sequences
            self._params += [params] * config.num_return_sequences
        if config.do_sample:  # torch.manual_seed() makes them repeatable, as in `transformers`
            seeds = torch.randint(1 << 32, (len(self._params),), device="cpu").tolist()
            self._params = [replace(params, seed=seed) for params, seed in zip(self._params, seeds, strict=True)]
        self._ends = _Ends(config, tokenizer, stopping_criteria, self.prompts)
        self._events = TextGenerator(runtime).generate(
            self.prompts, self._params, ends=self._ends if self._ends.active else None
        )

    def tokens(self, *, with_text: bool) -> Generator[GeneratedToken, None, None]:
        """Yield the tokens of all sequences as they arrive."""
        texts = [self._tokenizer.stream() for _ in self.prompts] if with_text and self._tokenizer else None
        with closing(self._events) as events:
            for event in events:
                token = event.stop_token if event.token is None else event.token
                assert token is not None, "an event without a token has a stop token"
                text = reason = None
                if event.finished:
                    ended = self._ends.reasons.get(event.prompt, "max_length")
                    reason = "eos_token_id" if event.token is None else ended
                if texts is not None:
                    text = texts[event.prompt].push(token)
                    if event.finished:
                        text += texts[event.prompt].finish()
                yield GeneratedToken(event.prompt, token, text, reason, event.logprob)

    def result(self, prompt: list[int], tokens: list[GeneratedToken]) -> Generation:
        """Return a sequence whose tokens have all arrived."""
        ids = [token.token_id for token in tokens]
        return Generation(
            prompt,
            ids,
            None if self._tokenizer is None else self._tokenizer.decode(ids),
            tokens[-1].finish_reason or "",
            [token.logprob for token in tokens if token.logprob is not None] if self._logprobs else None,
        )


class _Ends:
    """Ends sequences that the device does not end: at stop strings, a time limit, and criteria of the caller.

    active   whether the call has any of these
    reasons  the reason of each sequence that was ended
    """

    def __init__(
        self, config: Any, tokenizer: Any, criteria: Sequence[Any] | None, prompts: Sequence[Sequence[int]]
    ) -> None:
        self.reasons: dict[int, str] = {}
        self._deadline = math.inf if config.max_time is None else time.monotonic() + config.max_time
        if criteria is not None:
            check_sequence("stopping_criteria", criteria, of="StoppingCriteria", error=ConfigError)
        self._criteria, self._texts = list(criteria or ()), None
        if config.stop_strings:
            stops = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings
            for stop in check_sequence("stop_strings", stops, of="texts", error=ConfigError):
                check_instance("stop_strings", stop, str, advice="pass texts")
            self._texts = package().StopStringCriteria(tokenizer, config.stop_strings)
            ends = self._texts.embedding_vec[:, self._texts.max_valid_positions * self._texts.num_stop_strings : -1]
            self._may_end = set((ends > 0).any(1).nonzero()[:, 0].tolist())  # tokens that contain the end of one
        self.active = bool(self._criteria or self._texts) or self._deadline < math.inf
        self._known = [list(prompt) for prompt in prompts] if self._criteria or self._texts else []

    def __call__(self, index: int, token: int) -> bool:
        if time.monotonic() > self._deadline:
            self.reasons[index] = "max_time"
        if self._known:
            known = self._known[index]
            known.append(token)
            if self._texts is not None and token in self._may_end:
                last = torch.tensor([known[-self._texts.maximum_token_len :]], device="cpu")
                if self._texts(last, None):
                    self.reasons[index] = "stop_strings"
            if self._criteria:
                ids = torch.tensor([known], device="cpu")
                if any(bool(criterion(ids, None)) for criterion in self._criteria):
                    self.reasons[index] = "stopping_criteria"
        return index in self.reasons


def _are_default_types(model: Any, name: str, types: Any) -> bool:
    """Return whether token types are zeros that change no logits. In GPT-2, zeros add an embedding."""
    if any(map(np.any, _listed(name, types))):
        return False
    if name not in inspect.signature(model.forward).parameters:
        return True
    zeros = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        plain, typed = (model(zeros, use_cache=False, **given).logits for given in ({}, {name: zeros}))
    return torch.allclose(plain, typed)


def _has_text(prompts: object) -> bool:
    return isinstance(prompts, (list, tuple)) and any(isinstance(prompt, str) for prompt in prompts)


def _rows(prompts: Any, mask: Any, tokenizer: Any) -> Iterator[tuple[Any, int]]:
    """Yield the tokens of each prompt, and their number with padding."""
    rows = _listed("prompts", prompts)
    masks = None if mask is None else _listed("attention_mask", mask)
    if masks is not None and [*map(np.size, masks)] != [*map(np.size, rows)]:
        raise ShapeError("attention_mask: expected one value per token of each prompt; pass the tokenizer's")
    for index, row in enumerate(rows):
        tokens = tokenizer(row).input_ids if isinstance(row, str) else row
        kept = tokens if masks is None else [token for token, keep in zip(tokens, masks[index], strict=True) if keep]
        yield kept, np.size(tokens)


def _listed(name: str, rows: Any) -> Sequence[Any]:
    """Return the rows of a batch as lists of numbers, or texts."""
    if isinstance(rows, torch.Tensor):
        if rows.dim() != 2:
            raise ShapeError(f"{name}: expected a tensor [prompts, tokens], got shape {list(rows.shape)}; reshape it")
        return rows.tolist()
    check_sequence(name, rows, of="texts or lists of token ids")
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]


@functools.lru_cache(maxsize=1)
def _tokenizer_of(name: str) -> Any:
    """Load the tokenizer of the model that was loaded by this name."""
    if not name:
        raise ConfigError("tokenizer: texts need one, and the model has no name to load it by; pass tokenizer=")
    try:
        return package().AutoTokenizer.from_pretrained(name)
    except Exception as error:  # each class of tokenizer raises different errors
        raise ConfigError(f"tokenizer: {name!r} has none ({type(error).__name__}: {error}); pass tokenizer=") from error
