"""Modules whose arithmetic differs a little from that of the operators are not replaced.

The tests change the source of forward functions, as if transformers defined them so. Code of the caller is never
replaced.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import graphrt
from tests.integrations.test_from_transformers import CONFIG, PROMPTS, answers, check, make_model

PARTS = {"linear", "linear_silu_mul", "rms_norm", "write_kv"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def change(monkeypatch: pytest.MonkeyPatch, cls: Any, *edits: tuple[str, str]) -> None:
    """Replace texts in the source of a forward function."""
    module = sys.modules[cls.__module__]
    source = textwrap.dedent(inspect.getsource(cls.forward))
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    names: dict[str, Any] = {}
    exec(source, vars(module), names)
    monkeypatch.setattr(cls, "forward", names["forward"])


def operators(model: Any) -> set[str]:
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        return set(runtime.fused.values())


def check_tokens(model: Any) -> set[str]:
    """Compare tokens and logits with transformers' own, and return the operators."""
    with check(model, answers(model)) as runtime:
        return set(runtime.fused.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiplier_near_one_keeps_the_layers(dtype: torch.dtype) -> None:
    """Granite multiplies the results of attention and MLP."""
    for multiplier, kind in ((1.01, "write_kv"), (0.999, "write_kv"), (1.0, "decoder_layer")):
        model = make_model("Granite", residual_multiplier=multiplier, attention_multiplier=0.36).to(dtype)
        with graphrt.from_transformers(model, config=CONFIG) as runtime:
            assert {runtime.fused.get(f"model.layers.{i}", "write_kv") for i in range(3)} == {kind}


FIRST, LAST = "hidden_states = residual + hidden_states\n\n", "hidden_states = residual + hidden_states\n    return"
LAYERS = {
    "factor-of-a-branch": (LAST, LAST.replace("+ ", "+ 1.0005 * ")),
    "factor-of-the-residual": (LAST, LAST.replace("= ", "= 0.999 * ")),
    "factor-of-attention": (FIRST, FIRST.replace("+ ", "+ 1.0005 * ")),
    "clamp": (LAST, LAST.replace("residual + hidden_states", "(residual + hidden_states).clamp(-1e4, 1e4)")),
    "input-of-attention": ("hidden_states=hidden_states,", "hidden_states=hidden_states * 0.999,"),
    "norm-of-the-mlp": (LAST, LAST.replace("+ hidden_states", "+ self.input_layernorm(hidden_states)")),
    "result-without-the-input": (FIRST, FIRST.replace("residual + ", "0.999 * residual + ")),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_with_other_arithmetic_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, llama.LlamaDecoderLayer, LAYERS[name])
    assert operators(make_model("Llama", num_hidden_layers=1).bfloat16()) == PARTS


def test_layer_with_a_residual_in_float32_is_kept_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    change(
        monkeypatch,
        llama.LlamaDecoderLayer,
        (f"    {FIRST}", f"    dtype = hidden_states.dtype\n    {FIRST.replace('residual', 'residual.float()')}"),
        ("self.post_attention_layernorm(hidden_states)", "self.post_attention_layernorm(hidden_states.to(dtype))"),
        (LAST, LAST.replace("residual + hidden_states", "(residual + hidden_states).to(dtype)")),
    )
    for dtype in DTYPES:
        assert ("decoder_layer" in operators(make_model("Llama", num_hidden_layers=1).to(dtype))) is (
            dtype == torch.float32
        )


EPSILON = "variance + self.variance_epsilon"
NORMS = {
    "factor-of-epsilon": (EPSILON, "variance + 1.01 * self.variance_epsilon"),
    "epsilon-of-the-root": (f"torch.rsqrt({EPSILON})", "1 / (variance.sqrt() + self.variance_epsilon)"),
    "clamp-of-the-gain": ("self.weight *", "self.weight.clamp(max=1e4) *"),
    "gain-plus-a-little": ("self.weight *", "(0.001 + self.weight) *"),
    "factor": ("self.weight *", "1.0005 * self.weight *"),
    "clamp": ("hidden_states.to(input_dtype)", "hidden_states.to(input_dtype).clamp(-5, 5)"),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_with_other_arithmetic_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, llama.LlamaRMSNorm, NORMS[name])
    assert operators(make_model("Llama", num_hidden_layers=1).bfloat16()) == PARTS - {"rms_norm"}


def test_norm_that_rounds_its_statistics_is_kept_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, llama.LlamaRMSNorm, ("hidden_states = hidden_states.to(torch.float32)\n", "pass\n"))
    for dtype in DTYPES:
        assert ("rms_norm" in operators(make_model("Llama", num_hidden_layers=1).to(dtype))) is (dtype == torch.float32)


MLPS = {
    "factor": ("self.down_proj(", "1.0005 * self.down_proj("),
    "factor-of-the-gate": ("self.gate_proj(x)", "1.0005 * self.gate_proj(x)"),
    "clamp": ("self.gate_proj(x)", "self.gate_proj(x).clamp(max=1e6)"),
    "activation": ("self.act_fn(", "torch.nn.functional.gelu("),
    "sum": ("self.up_proj(x)", "(self.up_proj(x) + 1e-3)"),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlp_with_other_arithmetic_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, llama.LlamaMLP, MLPS[name])
    assert operators(make_model("Llama", num_hidden_layers=1).bfloat16()) == PARTS - {"linear_silu_mul"}


def test_mlp_that_differs_by_an_attribute_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, llama.LlamaMLP, ("self.down_proj(", "(1 + self.index) * self.down_proj("))
    model = make_model("Llama")
    for index, layer in enumerate(model.model.layers):
        layer.mlp.index = index
    with check(model, answers(model)) as runtime:
        assert [name for name, kind in runtime.fused.items() if kind == "decoder_layer"] == ["model.layers.0"]


def test_module_with_a_buffer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer has no effect at first."""
    change(monkeypatch, llama.LlamaMLP, ("self.down_proj(", "self.scale * self.down_proj("))
    model = make_model("Llama")
    for layer in model.model.layers:
        layer.mlp.register_buffer("scale", torch.ones(1))
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        assert "linear_silu_mul" not in runtime.fused.values()
        model.model.layers[1].mlp.scale.fill_(-2)
        found = [result.token_ids for result in runtime.generate(PROMPTS, max_new_tokens=4)]
    assert found == [tokens for tokens, _ in answers(model)]


QUERIES = "query_states = self.q_proj(hidden_states)"
ROTATED = "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        ((QUERIES, f"self.k_proj(hidden_states)\n    {QUERIES}"), {"write_kv"}),
        ((ROTATED, f"{ROTATED}\n    query_states.add_(1e-3)"), set()),
        ((ROTATED, f"{ROTATED}\n    key_states = 1.0005 * key_states"), set()),
        (("key_states = self.k_proj", "hidden_states.add_(0.1)\n    key_states = self.k_proj"), {"write_kv"}),
    ],
    ids=["keys-first", "queries-change-in-place", "factor-of-keys", "input-changes-in-place"],
)
def test_attention_with_other_arithmetic_is_kept(
    edit: tuple[str, str], kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many heads of keys as of queries, so that they could be taken for each other."""
    change(monkeypatch, llama.LlamaAttention, edit)
    found = check_tokens(make_model("Llama", num_key_value_heads=6))
    assert found == {"linear", "linear_silu_mul", "rms_norm"} | kept


def test_norm_of_keys_before_that_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "query_states = self.q_norm("
    change(monkeypatch, Qwen3Attention, (first, f"self.k_norm(hidden_states.view(hidden_shape))\n    {first}"))
    assert "decoder_layer" not in check_tokens(make_model("Qwen3", num_key_value_heads=6, head_dim=8))


def use_lambda(model: Any) -> None:
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = lambda x: torch.nn.functional.silu(x).clamp(max=1e6)


def limit_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Hardtanh(-1e6, 1e6)).eval()


def share_norms(model: Any) -> None:
    first, *others = model.model.layers
    for layer in others:
        layer.input_layernorm = first.input_layernorm
        layer.post_attention_layernorm.weight = first.post_attention_layernorm.weight


def parametrize_weights(model: Any) -> None:
    class Half(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    for layer in model.model.layers:
        parametrize.register_parametrization(layer.input_layernorm, "weight", Half())
        parametrize.register_parametrization(layer.mlp.up_proj, "weight", Half())
        parametrizations.weight_norm(layer.self_attn.k_proj)


def prune_weights(model: Any) -> None:
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.gate_proj, "weight", 0.5)
        prune.l1_unstructured(layer.input_layernorm, "weight", 0.5)


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (use_lambda, PARTS - {"linear_silu_mul"}),
        (limit_activation, PARTS - {"linear_silu_mul"}),
        (share_norms, {"decoder_layer", "linear", "rms_norm"}),
        (parametrize_weights, PARTS - {"linear_silu_mul"}),
        (prune_weights, PARTS - {"linear_silu_mul"}),
    ],
)
def test_changed_modules(prepare: Callable[[Any], None], expected: set[str]) -> None:
    model = make_model("Llama")
    prepare(model)
    assert check_tokens(model) == expected


def test_parameters_of_the_same_memory_are_not_moved() -> None:
    model = make_model("Llama")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    for name in ("gate_proj", "up_proj", "down_proj"):
        second.get_submodule(name).weight = torch.nn.Parameter(first.get_submodule(name).weight.data)
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        with torch.no_grad():
            first.up_proj.weight.mul_(-2)
        found = [result.token_ids for result in runtime.generate(PROMPTS, max_new_tokens=4)]
    assert torch.equal(first.up_proj.weight, second.up_proj.weight)
    assert found == [tokens for tokens, _ in answers(model)]


def test_rotation_by_code_of_the_caller_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original = llama.apply_rotary_pos_emb
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda *args, **options: original(*args, **options))
    assert check_tokens(make_model("Llama")) == PARTS - {"write_kv"}


def test_norm_with_another_dtype_than_its_input_is_kept() -> None:
    """In float32, such a norm has the same result as the operator. In this model it returns float32."""
    model = make_model("Llama").bfloat16()
    model.model.norm.float()
    model.lm_head.float()
    expected = answers(model)
    with graphrt.from_transformers(model, config=CONFIG) as runtime:
        assert "model.norm" not in runtime.fused
        found = runtime.generate(PROMPTS, max_new_tokens=1)
    assert [result.token_ids[0] for result in found] == [tokens[0] for tokens, _ in expected]


def test_attention_with_dropout_is_refused() -> None:
    model = make_model("Llama", attention_dropout=0.1)
    model.model.layers[1].self_attn.train()
    with pytest.raises(graphrt.UnsupportedError, match=r"modeling_llama\.py:\d+ drops values at random; .*model\.eval"):
        graphrt.from_transformers(model, config=CONFIG)
