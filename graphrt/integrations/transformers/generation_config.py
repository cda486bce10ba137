"""Maps a GenerationConfig of `transformers` to SamplingParams, and refuses the fields that graphrt cannot honour.

Every field is in one of three tables. With HONOURED fields, tokens are those of `model.generate`. REFUSED fields raise,
unless their value changes nothing. IRRELEVANT fields change no token.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.integrations.transformers.host import package
from graphrt.kernels.checks import check_instance, check_int, check_number, is_finite, shown
from graphrt.kernels.errors import CapacityError, ConfigError, GraphRTError, UnsupportedError
from graphrt.sampling_params import SamplingParams, config_fields

HONOURED = frozenset(
    {
        "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "eos_token_id",
        "pad_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "sequence_bias",
        "bad_words_ids", "suppress_tokens", "num_return_sequences",
    }
)  # fmt: skip

REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "use_mtp": (False,),
    "is_assistant": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "speculation_type": (),
}
"""The values other than None that change nothing."""

SAMPLING_ONLY = frozenset({"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"})
"""Refused fields that greedy decoding ignores."""

IRRELEVANT = {
    "only beam search reads it": (
        "early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups",
    ),
    "only contrastive search reads it": ("low_memory",),
    "only assisted generation reads it": (
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    ),
    "only encoder-decoder models read it": ("decoder_start_token_id",),
    "the runtime has a paged cache": ("use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    "the runtime replays captured graphs": ("compile_config", "disable_compile"),
    "RuntimeConfig sizes batches and chunks of prompts": ("continuous_batching_config", "prefill_chunk_size"),
    "a prompt has at least one token": ("bos_token_id",),
    "it changes no probability": ("renormalize_logits",),
    "NaN and infinite logits are never sampled": ("remove_invalid_values",),
    "results are always objects with all fields": ("return_dict_in_generate",),
    "it describes the config": ("transformers_version", "_from_model_config"),
}  # fmt: skip
"""Fields that change no token of graphrt, by reason."""

_NEEDS = {
    "penalties": ("repetition_penalty",),
    "max_logit_bias": ("sequence_bias", "bad_words_ids", "suppress_tokens", "min_new_tokens", "min_length"),
}
"""The fields that need an option of RuntimeConfig."""

_LEAST_TOP_P = 1e-30  # keeps the most likely token, as 0 does in `transformers`
_KNOWN = HONOURED.union(REFUSED, *IRRELEVANT.values())


@dataclass(frozen=True)
class MergedConfig:
    """The config of one call.

    config          merged from the call, the model and the defaults of `transformers`
    default_length  whether none of them limits the length; `config.max_length` then counts new tokens
    eos_ids         the end-of-sequence tokens
    bias            values that are added to the logits, by token
    """

    config: Any
    default_length: bool
    eos_ids: frozenset[int]
    bias: dict[int, float]

    @classmethod
    def of(cls, model: Any, given: Any, options: dict[str, Any], vocab_size: int) -> MergedConfig:
        """Merge a GenerationConfig and the keyword arguments of a call, as `model.generate` does.

        Raises: UnsupportedError: naming all fields and arguments that graphrt cannot honour, and unknown arguments.
        ConfigError: for values that `transformers` refuses, and if `temperature` is not positive.
        """
        if given is not None:
            check_instance("generation_config", given, package().GenerationConfig, advice="pass a GenerationConfig")
        lengths = options.get("max_length"), getattr(given, "max_length", None), model.generation_config.max_length
        words: dict[str, dict[tuple[int, ...], float]] = {"sequence_bias": {}, "bad_words_ids": {}}
        try:
            config, unused = model._prepare_generation_config(given, **options)
            eos = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
            if config.sequence_bias is not None:
                words["sequence_bias"] = package().SequenceBiasLogitsProcessor(config.sequence_bias).sequence_bias
            if config.bad_words_ids is not None:
                words["bad_words_ids"] = (
                    package().NoBadWordsLogitsProcessor(config.bad_words_ids, eos or None).sequence_bias
                )
            if config.suppress_tokens is not None:
                config.suppress_tokens = list(map(int, config.suppress_tokens))
        except (TypeError, ValueError) as error:  # raised by transformers and torch
            raise ConfigError(f"generate: {error}; see GenerationConfig") from error
        _refuse(model, config, words, unused)
        if config.temperature is None:
            config.temperature = 1.0
        if config.do_sample and not (is_finite(config.temperature) and config.temperature > 0):
            raise ConfigError(
                f"temperature: expected above 0 with do_sample=True, got {config.temperature}; pass do_sample=False"
            )
        if config.max_new_tokens is None:
            check_int("max_length", config.max_length, 1, advice="pass max_new_tokens")
        check_int("min_length", config.min_length or 0, 0, advice="pass None for no minimum")
        if config.max_time is not None:
            check_number("max_time", config.max_time, 0, advice="pass None for no limit")
        check_int("num_return_sequences", config.num_return_sequences, 1, advice="leave it out for one per prompt")
        bias = {tokens[0]: value for biases in words.values() for tokens, value in biases.items()}
        bias |= {token: -math.inf for token in config.suppress_tokens or () if 0 <= token < vocab_size}
        ends = frozenset(token for token in eos if token >= 0)  # negative ones are never sampled
        return cls(config, all(length is None for length in lengths), ends, bias)

    def sampling_params(self, name: str, prompt_len: int, positions: int | None, **options: Any) -> SamplingParams:
        """Return the parameters of a sequence.

        name        the prompt, for the error
        prompt_len  its length, with the padding of its batch
        positions   positions that the model was trained for, which limit the default length
        options     further fields of SamplingParams

        Raises: CapacityError: if the prompt leaves no room for a new token.
        """
        config = self.config
        longest = config.max_length
        if config.max_new_tokens is not None:
            longest = prompt_len + config.max_new_tokens
        elif self.default_length:
            longest = min(prompt_len + longest, positions or math.inf)
        most = longest - prompt_len
        if most < 1:
            raise CapacityError(
                f"{name}: {prompt_len} tokens reach max_length={longest}; shorten it, or raise max_length"
            )
        least = config.min_new_tokens
        if least is None:
            least = max(0, (config.min_length or 0) - prompt_len)
        sampled = {
            "temperature": config.temperature,
            "top_k": config.top_k or 0,
            "top_p": 1.0 if config.top_p is None else config.top_p or _LEAST_TOP_P,
            "min_p": config.min_p or 0.0,
        }
        return SamplingParams(
            max_new_tokens=most,
            min_tokens=min(least, most) if self.eos_ids else 0,
            stop_ids=self.eos_ids,
            repetition_penalty=1.0 if config.repetition_penalty is None else config.repetition_penalty,
            logit_bias=self.bias,
            **(sampled if config.do_sample else {}),
            **options,
        )

    def fields_needing(self, option: str) -> str:
        """Return the fields and values that need an option of RuntimeConfig."""
        found = {name: getattr(self.config, name) for name in _NEEDS.get(option, ())}
        return ", ".join(f"{name}={shown(value)}" for name, value in found.items() if value) or "logprobs"


def own_needs(model: Any, vocab_size: int) -> dict[str, Any]:
    """Return the fields of RuntimeConfig that the model's own generation config needs."""
    try:
        merged = MergedConfig.of(model, None, {}, vocab_size)
        return config_fields(merged.sampling_params("prompt", 1, None))
    except (AttributeError, GraphRTError):  # `generate` reports it, and the model may run without it
        return {}


def _refuse(model: Any, config: Any, words: dict[str, dict[tuple[int, ...], float]], unused: dict[str, Any]) -> None:
    """Raise UnsupportedError if a field or an argument changes results, and graphrt does not honour it."""
    found = {name: getattr(config, name, None) for name in REFUSED if config.do_sample or name not in SAMPLING_ONLY}
    found = {name: value for name, value in found.items() if value is not None and value not in REFUSED[name]}
    newer = {name: getattr(config, name) for name in package().GenerationConfig().to_dict().keys() - _KNOWN}
    found |= {name: value for name, value in newer.items() if value is not None and value is not False}
    for name, biases in words.items():
        if several := [list(tokens) for tokens in biases if len(tokens) > 1]:
            found[f"{name} of several tokens"] = several
    if config.do_sample and config.min_p and config.top_p is not None and config.top_p < 1:
        found["min_p with top_p"] = config.min_p, config.top_p
    arguments = {*inspect.signature(model.generate).parameters, *inspect.signature(model.forward).parameters}
    given = {name: value for name, value in unused.items() if value is not None}
    found |= {name: value for name, value in given.items() if name in arguments and value is not False}
    reasons = [f"{name}={shown(value)}" for name, value in found.items()]
    if reasons:
        raise UnsupportedError(f"generate: cannot honour {', '.join(reasons)}; unset them, or call model.generate()")
    if unknown := [name for name in given if name not in arguments]:
        raise ConfigError(f"generate: unknown arguments {', '.join(map(repr, unknown))}; see GenerationConfig")
