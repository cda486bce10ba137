"""Tiny decoders of `transformers` with `generate`, through graphrt and by their own `model.generate`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from transformers import PreTrainedModel

from graphrt.config import RuntimeConfig
from graphrt.integrations.transformers.generation import Generation
from graphrt.integrations.transformers.runtime import TransformersRuntime, from_transformers
from tests.support.model_fixtures import make_oracle

VOCAB, LONGEST, INF = 260, 96, math.inf
PROMPTS = [[72, 101, 108, 108, 111], [65], [7, 120, 33, 200, 7, 7, 9, 250, 31]]


def oracle(family: str = "Llama") -> PreTrainedModel:
    return _oracle(family)


@functools.cache
def _oracle(family: str) -> PreTrainedModel:
    return make_oracle(family, vocab_size=VOCAB, eos_token_id=None, max_position_embeddings=LONGEST)


def runtime(family: str = "Llama") -> TransformersRuntime:
    return _runtime(family)


@functools.cache
def _runtime(family: str) -> TransformersRuntime:
    config = RuntimeConfig(
        8, 32, LONGEST, decode_sizes=(8,), mixed_sizes=(32,), penalties=True, max_logit_bias=12, max_logprobs=2,
        backend="torch_reference",
    )  # fmt: skip
    return from_transformers(oracle(family), config=config, num_pages=200, page_size=4)


def generate(prompts: Any, config: Any = None, *, family: str = "Llama", **options: Any) -> list[Generation]:
    return runtime(family).generate(prompts, config, **options)


def expected(prompts: list[list[int]], family: str = "Llama", **options: Any) -> list[list[int]]:
    """What transformers returns for each prompt alone."""
    return [oracle(family).generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]


@functools.cache
def free_tokens(family: str) -> list[list[int]]:
    """The first 20 greedy tokens of each prompt, without options."""
    return [answer[len(prompt) :] for answer, prompt in zip(expected(PROMPTS, family), PROMPTS, strict=True)]
