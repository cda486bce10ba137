"""Model families of `transformers`, through their own modules: tokens and logits against their own eager decoding."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.groups import kv_groups
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.engine.batch_delta import BatchDelta, StopConditions
from graphrt.engine.handle import Launch
from graphrt.generate.generator import TextGenerator
from graphrt.integrations.transformers.runtime import host
from graphrt.runtime import Runtime
from tests.support.layered import Watch, generate
from tests.support.model_fixtures import PROMPT, make_oracle

PROMPTS = [PROMPT[:7], [*PROMPT, 7, 64, 29], [50]]
"""Of 7, 19 and 1 tokens. With NEW_TOKENS more, prompts and decodes cross windows, chunks and pages."""
NEW_TOKENS, MAX_LEN, PAGE = 14, 40, 4
S, F, C = "sliding_attention", "full_attention", "chunked_attention"


@dataclass
class Family:
    """A tiny model, and what its runtime must look like.

    groups   the cache layers of each KV group
    owned    most pages owned at a time, where there are no more. A group that keeps all has 16, of which two rows share
             the page that both begin with; a window of 8 has 3 per row, a chunk of 6 has 2
    """

    architecture: str
    layer_types: list[str]
    groups: list[tuple[int, ...]]
    owned: int
    options: dict[str, Any]


FAMILIES = {
    "gemma2": Family(
        "Gemma2",
        [S, F, S, F],
        [(0, 2), (1, 3)],
        16 + 3 * 3,
        {"head_dim": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": Family(
        "Gemma3",
        [S, S, F, S, S, F],
        [(0, 1), (3, 4), (2, 5)],
        16 + 3 * 6,
        {"head_dim": 16, "query_pre_attn_scalar": 4},
    ),
    "gemma3n": Family(
        "Gemma3n",
        [S, S, F, S, S, F],
        [(0,), (1,), (2,)],
        16 + 3 * 6,
        {
            "num_kv_shared_layers": 3,
            "head_dim": 16,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "gpt_oss": Family(
        "GptOss",
        [S, F, S, F],
        [(0, 2), (1, 3)],
        16 + 3 * 3,
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": Family(
        "Llama4",
        [C, C, C, F],
        [(0,), (1,), (2,), (3,)],
        16 + 2 * 9 - 1,  # rows end one after the other
        {
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        [F, F, F],
        [(0, 1, 2)],
        16,
        {
            "num_key_value_heads": 6,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "q_lora_rank": 24,
            "kv_lora_rank": 24,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "cohere2": Family("Cohere2", [S, S, S, F], [(0,), (1,), (2,), (3,)], 16 + 3 * 9, {"logit_scale": 0.5}),
    "olmo3": Family("Olmo3", [S, S, S, F], [(0,), (1,), (2,), (3,)], 16 + 3 * 9, {}),
}


def make_model(name: str) -> Any:
    """Windows of 8. No end token, and a head of its own: tied ones repeat a token for ever in Gemma 2 and 3."""
    family = FAMILIES[name]
    options = {"sliding_window": 8, "layer_types": family.layer_types} if set(family.layer_types) != {F} else {}
    options |= {"num_hidden_layers": len(family.layer_types), "eos_token_id": None, "tie_word_embeddings": False}
    return make_oracle(family.architecture, **(options | family.options))


@functools.cache
def oracle(name: str) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens and their logits, of each prompt alone, by `generate` with eager attention."""
    model, answers = make_model(name), []
    for prompt in PROMPTS:
        found = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        answers.append((found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits)))
    return answers


class Recorder(Watch):
    """Watches the pages, and keeps the logits after every step of every row. Launches must be of one step."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._logits: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, batch: Batch, ends: StopConditions, **options: Any) -> Any:
        return self._record(super().begin(batch, ends, **options), batch.req_indices)

    def advance(self, delta: BatchDelta, **options: Any) -> Any:
        return self._record(super().advance(delta, **options), delta.order)

    def _record(self, launch: Launch, req_indices: npt.NDArray[Any]) -> Launch:
        logits = self._runtime.manager.latest_logits(launch, copy=True)
        for req_index, row in zip(req_indices.tolist(), logits, strict=True):
            self._logits[req_index, self._known[req_index].length] = row
        return launch

    def logits(self, row: int, length: int, count: int) -> torch.Tensor:
        """Logits [count, vocab] after `length` tokens of a row, and after each of the next ones."""
        return torch.stack([self._logits[row, length + i] for i in range(count)])


def check(name: str, prompts: list[list[int]], count: int, backend: str) -> tuple[Runtime, Recorder]:
    """Run all prompts at once, captured, over as few pages as they need, of NaN. Compare the first `count` tokens of
    each, and their logits."""

    def allocate(*args: Any) -> KVCache:
        cache = KVCache.allocate(*args)
        for tensor in (*cache.k, *cache.v):
            tensor[1:] = float("nan")
        return cache

    (hosted, vocab_size), rows = host(make_model(name), MAX_LEN), len(prompts)
    config = RuntimeConfig(
        rows, 16, MAX_LEN, launch_steps=1, decode_sizes=(2, rows), mixed_sizes=(16,), backend=backend
    )
    runtime = Runtime(
        hosted, hosted.specs, kv_groups(hosted.specs, page_size=PAGE), vocab_size=vocab_size, device="cpu",
        num_pages=FAMILIES[name].owned + 1, config=config, allocate_kv=allocate,
    )  # fmt: skip
    runtime.capture()
    watch, generator = Recorder(runtime), TextGenerator(runtime)
    answers = generate(runtime, prompts, [count] * rows, generator)
    assert not generator.stats.preemptions
    for row, (prompt, (tokens, logits)) in enumerate(zip(prompts, oracle(name), strict=False)):
        torch.testing.assert_close(watch.logits(row, len(prompt), count), logits[:count], atol=1e-4, rtol=1e-4)
        assert answers[row] == tokens[:count]
    assert not runtime.stats().eager_steps
    assert all(a.num_free == a.num_pages - 1 for a in runtime.allocators), "all pages were given back"
    return runtime, watch


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    family = FAMILIES[name]
    assert all(len(set(tokens)) > 5 for tokens, _ in oracle(name)), "tokens must vary to tell anything"
    runtime, watch = check(name, PROMPTS, NEW_TOKENS, "torch_reference")
    groups = runtime.kv_cache.groups
    assert [group.layers or tuple(range(group.num_layers)) for group in groups] == family.groups
    assert len(runtime.kv_cache.k) == sum(map(len, family.groups)), "layers that share have none"
    assert watch.most_owned == [family.owned]
    runtime.close()


@pytest.mark.parametrize("name", ["gemma3n", "gpt_oss", "llama4"])
def test_kernels_give_the_same(name: str) -> None:
    """Interpreted, hence less: seven more tokens cross a window, a chunk and pages."""
    check(name, PROMPTS[:2], 7, "triton")[0].close()
