"""Models of `transformers` by the adapter of docs/embedding.md, through steps and through layers, give equal tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import graphrt
from graphrt import AttentionSpec, RuntimeConfig, SamplingParams, TextGenerator

PROMPTS = [[5, 9, 3, 7, 2, 8, 11], [1], list(range(20, 39)), [5, 9, 3, 7, 44]]
NEW, VOCAB = 12, 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "bos_token_id": None,
    "max_position_embeddings": 128, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {"intermediate_size": 48},
    "Starcoder2": GROUPED | {"sliding_window": 5},
    "Granite": GROUPED | {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 1.0},
    "Qwen3Moe": GROUPED | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def made(name: str, **options: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def alone(model: transformers.PreTrainedModel) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


def together(model: Any, specs: list[AttentionSpec] | None) -> list[list[int]]:
    config = RuntimeConfig(max_num_reqs=4, max_num_tokens=16, max_seq_len=64)
    with graphrt.Runtime(model, specs, vocab_size=VOCAB, device="cpu", config=config) as runtime:
        runtime.capture()
        found: list[list[int]] = [[] for _ in PROMPTS]
        for event in TextGenerator(runtime).generate(PROMPTS, SamplingParams(max_new_tokens=NEW)):
            found[event.prompt].append(event.token)
        assert not runtime.stats().eager_steps
    return found


def call(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, *, step: Any, **options: Any):
    return step(module, *(x[0].transpose(0, 1) for x in (q, k, v)), options)[None], None


transformers.AttentionInterface.register("graphrt-ports", call)


class Body(torch.nn.Module):
    """The module without its head, with an attention layer in each block, for `as_step_model`."""

    def __init__(self, base: torch.nn.Module, specs: list[AttentionSpec]) -> None:
        super().__init__()
        self.base = base
        self.layers = torch.nn.ModuleList(
            graphrt.Attention(
                s.num_q_heads, s.head_dim, s.num_kv_heads, name=f"layer {i}", scale=s.softmax_scale,
                sliding_window=s.sliding_window, alibi_slopes=s.alibi_slopes,
            )
            for i, s in enumerate(specs)
        )  # fmt: skip

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        attend = lambda module, q, k, v, options: self.layers[module.layer_idx](q, k, v)  # noqa: E731
        return self.base(input_ids[None], position_ids=positions[None], use_cache=False, step=attend)[0][0]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(name: str) -> None:
    model = made(name, **(SIZES | MODELS[name]))
    expected = alone(model)
    model.set_attn_implementation("graphrt-ports")
    base, head = model.base_model, model.get_output_embeddings()
    specs: list[AttentionSpec] = []

    def note(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        scale, window = options["scaling"], options.get("sliding_window")
        specs.append(AttentionSpec(*q.shape[1:2], *k.shape[1:], q.dtype, softmax_scale=scale, sliding_window=window))
        return torch.zeros_like(q)

    with torch.inference_mode():
        base(torch.tensor([[1, 2]]), position_ids=torch.arange(2)[None], use_cache=False, step=note)

    def stepped(step: graphrt.Step) -> torch.Tensor:
        attend = lambda module, q, k, v, options: step.attend(module.layer_idx, q, k, v)  # noqa: E731
        hidden = base(step.input_ids[None], position_ids=step.positions[None], use_cache=False, step=attend)[0][0]
        return head(hidden[step.logits_indices])

    assert together(stepped, specs) == expected
    assert together(graphrt.as_step_model(Body(base, specs), head=head), None) == expected
    assert len({tuple(tokens) for tokens in expected}) > 2, "tokens that tell nothing"


def test_alibi_slopes_of_bloom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bloom computes attention in its module, so the test replaces `forward`. Positions come only from slopes."""
    model = made("Bloom", vocab_size=VOCAB, hidden_size=24, n_layer=3, n_head=6, eos_token_id=None)
    expected = alone(model)
    slopes = tuple(2.0**-n for n in (2, 4, 6, 8, 1, 3))  # those of 4 heads, then every other one of 8
    spec = AttentionSpec(6, 6, 4, torch.float32, alibi_slopes=slopes)
    steps: list[graphrt.Step] = []

    def forward(self: Any, hidden: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any):
        q, k, v = self.query_key_value(hidden)[0].view(-1, self.num_heads, 3, self.head_dim).unbind(2)
        return self.dense(steps[-1].attend(self.layer_idx, q, k, v).flatten(1))[None] + residual, None

    monkeypatch.setattr(type(model.transformer.h[0].self_attention), "forward", forward)

    def stepped(step: graphrt.Step) -> torch.Tensor:
        steps.append(step)
        return model.lm_head(model.transformer(step.input_ids[None], use_cache=False)[0][0][step.logits_indices])

    assert together(stepped, [spec] * 3) == expected
    assert len({tuple(tokens) for tokens in expected}) > 2, "tokens that tell nothing"
