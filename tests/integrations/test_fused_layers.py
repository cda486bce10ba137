"""Decoder layers of `transformers` that run as those of graphrt's own Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import graphrt
from tests.integrations.test_from_transformers import CONFIG, FAMILIES, PROMPTS, answers, check, make_model

NEW_TOKENS = 4
LAYERS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Mistral": {},
    "Phi3": {"partial_rotary_factor": 0.5},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {},
}


def replaced(runtime: Any) -> list[str]:
    return [name for name, operator in runtime.fused.items() if operator == "decoder_layer"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_replaced_and_follow_their_weights(name: str, device: str) -> None:
    """Tokens and logits equal transformers' own, also after all weights of a layer change in place."""
    model = make_model(name, **(FAMILIES[name] | LAYERS[name]))
    expected = answers(model)
    runtime = check(model.to(device), expected, CONFIG if device == "cpu" else replace(CONFIG, backend=None))
    assert replaced(runtime) == [f"model.layers.{index}" for index in range(3)]
    with torch.no_grad():
        for weight in model.model.layers[1].parameters():
            weight.mul_(-0.7)
    with runtime:
        changed = [result.token_ids for result in runtime.generate(PROMPTS, max_new_tokens=NEW_TOKENS)]
    assert changed == [tokens for tokens, _ in answers(model.cpu())] != [tokens for tokens, _ in expected]


def test_layer_is_five_operators() -> None:
    """The projection with rotation and write, attention, and three more products; queries with norms take one more."""
    for name, count in (("Llama", 5), ("Qwen3", 6)):
        nodes = []
        for layers in (2, 3):
            sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
            model = make_model(name, num_hidden_layers=layers, hidden_size=128, intermediate_size=128, **sizes)
            with graphrt.from_transformers(model.bfloat16(), config=CONFIG) as runtime:
                nodes.append(max(graph.nodes for graph in runtime.stats().graphs))
        assert nodes[1] - nodes[0] == count


class Halved(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().forward(hidden_states, **options) * 0.5


def subclass(layer: Any) -> None:
    layer.__class__ = Halved


def hook(layer: Any) -> None:
    layer.register_forward_hook(lambda module, args, output: output * 0.5)


def hook_of_child(layer: Any) -> None:
    layer.self_attn.register_forward_pre_hook(
        lambda module, args, options: (args, options | {"hidden_states": options["hidden_states"] * 0.5}),
        with_kwargs=True,
    )


def patch(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **options: forward(*args, **options) * 0.5


@pytest.mark.parametrize("change", [subclass, hook, hook_of_child, patch])
def test_layer_with_code_of_the_caller_is_kept(change: Callable[[Any], None]) -> None:
    model = make_model("Llama")
    change(model.model.layers[1])
    with check(model, answers(model)) as runtime:
        assert replaced(runtime) == ["model.layers.0", "model.layers.2"]


class Program(torch.nn.ModuleList):
    """Layers, of which the model calls the functions that `choose` returns."""

    choose: Callable[[list[Any]], list[Any]]

    def __getitem__(self, index: Any) -> Any:
        return self.choose(list(self._modules.values()))


@pytest.mark.parametrize("order", [[0, 0, 1, 2], [0, 1, 0, 2], [2, 0, 1]])
def test_layers_may_run_twice_and_in_any_order(order: list[int]) -> None:
    model = make_model("Llama")
    program = model.model.layers = Program(model.model.layers)
    program.choose = lambda layers: [layers[index] for index in order]
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        assert len(replaced(runtime)) == 3
        found = [result.sequence for result in runtime.generate(PROMPTS, max_new_tokens=NEW_TOKENS)]
    for prompt, sequence in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0]
        assert sequence[len(prompt) :] == logits.argmax(1)[len(prompt) - 1 : -1].tolist()


def test_results_that_code_of_the_caller_uses_again_are_not_changed() -> None:
    """The result of the first layer is added at the end."""
    model = make_model("Llama")
    program, kept = Program(model.model.layers), list[torch.Tensor]()
    keep, add = lambda x, **_: kept.append(x) or x, lambda x, **_: x + kept[-1]
    program.choose = lambda layers: [layers[0], keep, *layers[1:], add]
    model.model.layers = program
    with check(model, answers(model)) as runtime:
        assert len(replaced(runtime)) == 3


class Steered(torch.nn.Module):
    """A layer whose result is changed in place."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("direction", torch.zeros(48))

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.layer(*args, **options).add_(self.direction)


def test_results_that_change_in_place_have_another_norm() -> None:
    """At first, the change is zero."""
    model = make_model("Llama")
    model.model.layers[1] = Steered(model.model.layers[1])
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        assert len(replaced(runtime)) == 3
        model.model.layers[1].direction.copy_(torch.linspace(-3, 3, 48))
        found = [result.token_ids for result in runtime.generate(PROMPTS, max_new_tokens=NEW_TOKENS)]
    assert found == [tokens for tokens, _ in answers(model)]


def test_hooks_of_all_modules_keep_all_modules() -> None:
    model = make_model("Llama")
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        with graphrt.from_transformers(model, config=CONFIG) as runtime:
            assert set(runtime.fused.values()) == {"write_kv"}
    finally:
        hook.remove()
