"""Modules that mix tokens, or compute something else by the number of tokens, are refused or left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

import graphrt
from graphrt.integrations.transformers.discovery import discover
from graphrt.integrations.transformers.float32 import in_float32
from graphrt.integrations.transformers.fuse import GatedMLP, _same, find_fused
from graphrt.integrations.transformers.host import HostedModel
from graphrt.integrations.transformers.layers import find_layers
from graphrt.integrations.transformers.probe import OwnTokens, _mixing, agree, check_independence, sample_tokens
from graphrt.integrations.transformers.rotation import find_rotation
from tests.integrations.test_from_transformers import CONFIG, answers, check, make_model, state_of

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shifted(distance: int) -> Change:
    """Add the values of the token at this distance, before or after."""

    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        moved = torch.zeros_like(y)
        if distance > 0:
            moved[:, distance:] = y[:, :-distance]
        else:
            moved[:, :distance] = y[:, -distance:]
        return y + 30 * moved

    return change


def limited(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Keep the tokens that fit into the capacity of an expert."""
    first = x.sum(-1).topk(min(16, x.shape[1]), dim=1).indices
    return y * torch.zeros_like(y[..., :1]).scatter(1, first[..., None], 1)


def pooled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add the sum of each eight tokens."""
    parts = torch.nn.functional.pad(y, (0, 0, 0, -y.shape[1] % 8)).unflatten(1, (-1, 8)).sum(2)
    return y + parts.repeat_interleave(8, 1)[:, : y.shape[1]]


MIXING: dict[str, Change] = {
    **{f"shift-{distance}": shifted(distance) for distance in (1, 3, 5, 8, 60, 100, -1, -4, -100)},
    "pooled": pooled,
    "mean": lambda x, y: y - y.mean(1, keepdim=True),
    "capacity": limited,
    "only-one-token": lambda x, y: 2 * y if x.shape[1] == 1 else y,
    "more-than-50-tokens": lambda x, y: 2 * y if x.shape[1] > 50 else y,
    "weak": lambda x, y: y - 0.03 * y.mean(1, keepdim=True),
}  # fmt: skip
IN_16_BITS = [(name, dtype) for dtype in ("bfloat16", "float16") for name in ("shift-100", "only-one-token", "weak")]


@pytest.mark.parametrize(("name", "dtype"), [(name, "float32") for name in MIXING] + IN_16_BITS)
def test_mixing_at_any_distance_is_refused_with_the_line(name: str, dtype: str) -> None:
    model = make_model("Llama", max_position_embeddings=128).to(getattr(torch, dtype))

    class Mixing(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MIXING[name](x, super().forward(x))

    model.model.layers[1].mlp.__class__ = Mixing
    line = Mixing.forward.__code__.co_firstlineno
    with pytest.raises(graphrt.UnsupportedError, match=rf"Mixing at \S+\.py:{line} gives a token different values"):
        graphrt.from_transformers(model, config=replace(CONFIG, max_seq_len=128))


class FewRowsRoundMore(TorchDispatchMode):
    """Rounds partial sums of products of few rows to the dtype of the inputs, as split-K kernels of GPUs do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and len(args[0]) < 16:
            return sum(func(x, y) for x, y in zip(args[0].split(16, 1), args[1].split(16), strict=True))
        return func(*args, **(kwargs or {}))


def test_rounding_that_changes_the_routing_is_accepted() -> None:
    """The weights are large, and each token has one expert per layer."""
    sizes = {"num_hidden_layers": 24, "num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size": 32}
    model = make_model("Mixtral", **sizes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1 if "norm" in name else 4)
    hosted = HostedModel(model.bfloat16())
    discover(hosted, 64)
    before = state_of(model)
    with FewRowsRoundMore():
        assert "Mixtral" in str(_mixing(hosted, 64, 97, alone=True)), "in bfloat16, it seems to mix tokens"
        check_independence(hosted, 64, 97)
    assert state_of(model) == before


def test_modules_for_16_bits_only_are_compared_in_their_own_dtype() -> None:
    model = make_model("Llama", max_position_embeddings=128).bfloat16()

    class Narrow(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.bfloat16:
                raise RuntimeError("expected bfloat16")
            return super().forward(x)

    model.model.layers[1].mlp.__class__ = Narrow
    hosted = HostedModel(model)
    discover(hosted, 128)
    check_independence(hosted, 128, 97)
    model.model.layers[2].mlp.forward = lambda x: shifted(60)(x, x)
    with pytest.raises(graphrt.UnsupportedError, match="gives a token different values"):
        check_independence(hosted, 128, 97)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rounding_of_many_layers_does_not_keep_modules(device: str) -> None:
    sizes = {"num_hidden_layers": 60, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = make_model("Llama", **sizes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1 if "norm" in name else 4)
    hosted = HostedModel(model.bfloat16().to(device))
    discover(hosted, 64)
    check_independence(hosted, 64, 97)
    sample = sample_tokens(model, 64, 97)
    with torch.no_grad():
        before = hosted.run(OwnTokens(sample[1]), *sample)
        assert len(find_fused(hosted, 64, 97)) == 60 * 8 + 2
        seem_equal = agree(hosted.run(OwnTokens(sample[1]), *sample).float(), before.float())
        assert device == "cuda" or not seem_equal, "in bfloat16, rounding is larger than the comparison allows"
    assert len(find_rotation(hosted, 64, 97)) == 60
    assert len(find_layers(hosted, 64, 97)) == 60


def test_tf32_is_off_while_modules_are_compared() -> None:
    """Either API of torch may have set it; it raises RuntimeError where the two differ."""
    matmul = torch.backends.cuda.matmul
    try:
        for setting in ("highest", "medium", "fp32_precision"):
            torch.set_float32_matmul_precision("highest" if setting == "fp32_precision" else setting)
            if setting == "fp32_precision":
                matmul.fp32_precision = "tf32"
            before = matmul.fp32_precision
            with in_float32(torch.nn.Linear(2, 2)):
                assert not matmul.allow_tf32
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == before == ("ieee" if setting == "highest" else "tf32")
            assert setting == "fp32_precision" or torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision("highest")


class Clamping(LlamaMLP):
    """Differs from LlamaMLP for values that random input does not reach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-1e6, 1e6)


class Scaling(LlamaMLP):
    """Has the forward of LlamaMLP, and another call."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


def test_modules_with_code_of_their_own_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one whose activation differs from that of the other layers."""
    model = make_model("Llama", num_hidden_layers=5)
    mlps = [layer.mlp for layer in model.model.layers]
    mlps[1].__class__, mlps[2].__class__, mlps[3].act_fn = Clamping, Scaling, torch.nn.ReLU()
    mlps[4].gate_proj.register_forward_hook(lambda module, args, output: output.clamp(-1e6, 1e6))
    runtime = check(model, answers(model))
    assert [name for name, operator in runtime.fused.items() if operator == "decoder_layer"] == ["model.layers.0"]
    assert "linear_silu_mul" not in runtime.fused.values()
    runtime.close()
    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: original(self, x).clamp(-1e6, 1e6))
    with graphrt.from_transformers(make_model("Llama"), config=CONFIG) as runtime:
        assert {"decoder_layer", "linear_silu_mul"}.isdisjoint(runtime.fused.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: y,
        lambda x, y: 2 * y if x.shape[1] > 10 else y,
        lambda x, y: 2 * y if x.shape[1] == 1 else y,
        lambda x, y: y.clamp(-9, 9),
    ],
    ids=["equal", "long", "single", "clamp"],
)
def test_comparison_covers_lengths_and_large_values(change: Change, request: pytest.FixtureRequest) -> None:
    mlp = make_model("Llama").model.layers[0].mlp
    forward = GatedMLP([mlp.gate_proj, mlp.up_proj], mlp.down_proj)
    original = mlp.forward
    mlp.forward = lambda x: change(x, original(x))
    assert _same(mlp, forward, 48, torch.float32) is (request.node.callspec.id == "equal")
