"""Models with windows, sinks and experts in bfloat16: 32 requests of ragged lengths, against transformers in float32.

On a GPU with contexts of up to 16,384 tokens, and in a smaller form on a CPU. transformers computes all logits of a
prompt and the answer of graphrt in one forward pass. Wherever its two best logits differ by more than MARGIN, the next
token of the answer is the best one.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch

import graphrt
from graphrt.capture.descriptor import GraphKind
from tests.support.model_fixtures import make_oracle

REQUESTS, NEW_TOKENS = 32, 24
MARGIN = 0.5
"""Several times the error of bfloat16 here; logits have a standard deviation of 1.6 and 2.9."""
S, F = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3": {"layer_types": [S, S, F, S, S, F], "query_pre_attn_scalar": 256},
    "GptOss": {"layer_types": [S, F, S, F], "num_local_experts": 4, "num_experts_per_tok": 4},
}
"""All experts compute all tokens, because rounding would choose different ones."""


def make_model(name: str, window: int, longest: int) -> Any:
    options = MODELS[name] | {"sliding_window": window, "max_position_embeddings": longest, "head_dim": 64}
    options |= {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": len(options["layer_types"])}
    model = make_oracle(name, eos_token_id=None, tie_word_embeddings=False, **options)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 3
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 0.7
            layer.self_attn.k_proj.weight *= 0.7
            if hasattr(layer.self_attn, "sinks"):
                layer.self_attn.sinks += math.log(window) + 1.5  # of the order of the sum over a window
    return model.bfloat16()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("device", "window", "longest"), [("cpu", 32, 256), pytest.param("cuda", 1024, 16384, marks=pytest.mark.gpu)]
)
def test_tokens_of_a_ragged_batch_without_eager_steps(name: str, device: str, window: int, longest: int) -> None:
    model, rng = make_model(name, window, longest).to(device), random.Random(1)
    lengths = [1, window - 1, window, window + 1, longest - NEW_TOKENS]
    lengths += [rng.randint(1, longest - NEW_TOKENS) for _ in range(REQUESTS - len(lengths))]
    prompts = [[rng.randrange(97) for _ in range(length)] for length in lengths]
    config = graphrt.RuntimeConfig(REQUESTS, longest, longest)
    with graphrt.from_transformers(model, config=config, num_pages=3 * REQUESTS * longest // 16) as runtime:
        results = runtime.generate(prompts, max_new_tokens=NEW_TOKENS)
        stats = runtime.stats()
        assert not stats.eager_steps
        assert max(d.padded_reqs for d in stats.replays if d.kind is GraphKind.DECODE) == REQUESTS
    reference, decided = copy.deepcopy(model).float(), 0
    for result in results:
        ids = torch.tensor([result.sequence], device=device)
        with torch.no_grad():
            logits = reference(ids, use_cache=False, logits_to_keep=NEW_TOKENS + 1).logits[0, :-1]
        best, second = logits.topk(2).values.unbind(-1)
        clear = best - second > MARGIN
        assert torch.equal(logits.argmax(-1)[clear], ids[0, -NEW_TOKENS:][clear])
        decided += int(clear.sum())
    assert decided > REQUESTS * NEW_TOKENS / 3, "the margin excludes too many tokens"
