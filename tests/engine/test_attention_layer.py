"""Models made of graphrt.Attention layers, compared with a dense float64 oracle; errors of wrong use."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import graphrt
from graphrt import AttentionSpec, ConfigError, ReplayError, Runtime, RuntimeConfig, ShapeError
from graphrt.backends import registry
from graphrt.backends.choice import get_attn_backend
from graphrt.kernels.errors import CaptureError, UnsupportedError
from graphrt.layer import ModelLayers, attention_specs
from tests.support.layered import MAX_LEN, VOCAB
from tests.support.plain import (
    BF16,
    CPU,
    F32,
    FULL,
    MODELS,
    WINDOW,
    OneLayer,
    Plain,
    check_tokens,
    layer_of,
    logits_of,
    rows,
    runtime_of,
    steps,
)


@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_the_oracle(name: str, flat: bool, device: torch.device) -> None:
    module = Plain(MODELS[name], device, flat=flat)
    with runtime_of(module, module.compute_logits, device) as runtime:
        assert attention_specs(module) == MODELS[name]
        assert runtime.kv_cache.groups[0].page_size == 16
        check_tokens(runtime, module.of)


def test_tokens_through_interpreted_kernels() -> None:
    module = Plain(MODELS["shared"], CPU)
    with runtime_of(module, module.compute_logits, backend="triton", decode_sizes=(2,), mixed_sizes=(8,)) as runtime:
        check_tokens(runtime, module.of, (2, 7), 3)


def test_module_that_returns_logits_of_every_token_needs_no_head(device: torch.device) -> None:
    class WithHead(Plain):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.compute_logits(super().forward(input_ids, positions))

    module = WithHead(MODELS["alike"], device)
    with runtime_of(module, None, device) as runtime:
        check_tokens(runtime, module.of)


@pytest.mark.parametrize("kind", ["parameter", "tensor"])
def test_sinks_can_be_changed_between_steps(kind: str, device: torch.device) -> None:
    """A sink equal to the only other logit takes half of the softmax."""
    values = torch.zeros(4, dtype=BF16, device=device)
    sinks = torch.nn.Parameter(values, requires_grad=False) if kind == "parameter" else values
    module, without = OneLayer(device, sinks=sinks), OneLayer(device)
    assert [name for name in module.state_dict() if "sinks" in name] == ["attention.sinks"] * (kind == "parameter")
    first = rows([1], [1])  # one key: its weight is 1 without a sink
    (plain,) = logits_of(without, device, [first])
    q, k, _ = module.qkv(torch.tensor([5], device=device)).view(8, 16).split([4, 2, 2])
    logits = (q * k.repeat_interleave(2, 0)).sum(-1) / 4
    with runtime_of(module, None, device) as runtime:
        for sink in (0.0, 1.5, -2.0):
            sinks.data.fill_(sink)
            share = torch.sigmoid(logits - sink).repeat_interleave(16)[:VOCAB]
            got = runtime.replay(first).logits(copy=True)
            torch.testing.assert_close(got, plain * share, rtol=1e-4, atol=1e-5)


def test_spec_of_a_layer_has_its_options_and_follows_module_to() -> None:
    slopes = [0.5, 0.25, 0.125, 0.0625]
    for given in (slopes, tuple(slopes), torch.tensor(slopes)):
        layer = layer_of(0, FULL, alibi_slopes=given, alibi_sqrt=True, logits_softcap=20.0)
        assert layer.spec == replace(FULL, alibi_slopes=tuple(slopes), alibi_sqrt=True, logits_softcap=20.0)
    layer = graphrt.Attention(4, 16, name="x", sinks=torch.nn.Parameter(torch.zeros(4)), dtype=BF16)
    assert "name='x'" in repr(layer)
    assert layer.spec.dtype == BF16
    assert layer.half().spec.dtype == torch.float16
    assert layer.to("meta").spec.dtype == torch.float16
    assert layer.to_empty(device="cpu").float().spec == replace(AttentionSpec(4, 4, 16, F32), sinks=True)
    with torch.device("meta"):
        assert graphrt.Attention(4, 16, name="x").spec == AttentionSpec(4, 4, 16, F32)


WRONG: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "batch_dimension": (lambda a, q, k, v, at: a(q[None], k[None], v[None]), "query .* without a batch dimension"),
    "flat_width": (lambda a, q, k, v, at: a(q.flatten(1)[:, 1:], k, v), r"query of shape \[tokens, 4, 16\]"),
    "kv_heads": (lambda a, q, k, v, at: a(q, q, v), "key of shape"),
    "head_dim": (lambda a, q, k, v, at: a(q, k, v[:, :, :8]), "value of shape"),
    "fewer_tokens": (lambda a, q, k, v, at: a(q, k[:1], v), "k: expected shape"),
    "all_fewer_tokens": (lambda a, q, k, v, at: a(q[:1], k[:1], v[:1]), "q: expected shape"),
    "dtype": (lambda a, q, k, v, at: a(q.half(), k, v), "q: expected dtype float32"),
    "no_value": (lambda a, q, k, v, at: a(q, k), "'layer 0': v: expected a tensor"),
    "nothing": (lambda a, q, k, v, at: a(q), "'layer 0': k: expected a tensor"),
    "no_tensor": (lambda a, q, k, v, at: a(q.tolist, k, v), "expected a tensor as query"),
    "rotary": (lambda a, q, k, v, at: a(q, k, v, rotary=q), "rotary: expected Rotary"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_raise(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ShapeError, match=text):
        runtime_of(OneLayer(CPU, call), None)


def test_layer_with_kv_shared_with_takes_no_keys() -> None:
    module = Plain(MODELS["shared"], CPU)
    module.layers[3].kv_shared_with = None  # after the specs were made, it would be called with keys
    model = graphrt.as_step_model(module, head=module.compute_logits)
    runtime = Runtime(model, (*MODELS["shared"][:3], WINDOW), vocab_size=VOCAB, device=CPU, num_pages=60)
    module.layers[3].kv_shared_with = "layer 1"
    with pytest.raises(ShapeError, match="k: expected a tensor"):
        runtime.capture()


def test_call_outside_a_step_raises() -> None:
    module = Plain(MODELS["alike"], CPU)
    with pytest.raises(CaptureError, match=r"Attention 'layer 0': called outside of a step.* KV cache"):
        module(torch.tensor([1]), torch.tensor([0]))
    with runtime_of(module, module.compute_logits) as runtime:
        runtime.replay(rows([3], [3])).tokens()
        with pytest.raises(CaptureError, match="outside"):
            module(torch.tensor([1]), torch.tensor([0]))
    number = module.layers[0]._number
    del module, runtime
    query = torch.zeros(1, 4, 16)
    with pytest.raises(CaptureError, match=f"layer {number} was garbage-collected"):
        torch.ops.graphrt.attention_layer(query, None, None, None, query.clone(), number)


def test_failed_step_unbinds_its_layers() -> None:
    def fail(layer: graphrt.Attention, *rest: Any) -> torch.Tensor:
        raise ZeroDivisionError

    module = OneLayer(CPU, fail)
    with pytest.raises(ZeroDivisionError):
        runtime_of(module, None)
    with pytest.raises(CaptureError, match="outside"):
        module.attention(*torch.zeros(1, 8, 16).split([4, 2, 2], dim=1))
    module.call = lambda layer, q, k, v, positions: layer(q, k, v)
    assert len(logits_of(module, CPU)) == 6


def test_second_call_and_call_before_the_source_layer_raise() -> None:
    with pytest.raises(UnsupportedError, match="'layer 0': layer: second attend\\(\\) for layer 0 in one step"):
        runtime_of(OneLayer(CPU, lambda a, q, k, v, at: a(a(q, k, v), k, v)), None)
    module = Plain((FULL, replace(FULL, kv_shared_with=0)), CPU)
    original, module.layers = module.layers, torch.nn.ModuleList(reversed(module.layers))
    module.registered = torch.nn.ModuleList(original)
    with pytest.raises(ConfigError, match=r"'layer 1': expected kv_shared_with to name an earlier layer \(none\)"):
        attention_specs(module)
    early = Plain((FULL, replace(FULL, kv_shared_with=0)), CPU)
    early.forward = lambda ids, at: early.layers[1](early.of.embed[ids] @ early.of.q[1].t())
    with pytest.raises(UnsupportedError, match="'layer 1': layer: layer 1 reads the keys and values of layer 0"):
        runtime_of(early, early.compute_logits)


def test_encoder_layer_may_be_called_again() -> None:
    """ALBERT calls one layer many times."""
    again = lambda a, q, k, v, at: a(a(q, k, v), k, v)  # noqa: E731
    module = OneLayer(CPU, again)
    module.attention = graphrt.Attention(4, 16, 2, name="layer 0", kind=graphrt.AttentionKind.ENCODER)
    ids = [3, 1, 4, 1, 5]
    config = RuntimeConfig(4, 16, MAX_LEN, decode_sizes=(), mixed_sizes=(16,))
    model = graphrt.as_step_model(module)
    with Runtime(model, vocab_size=VOCAB, device=CPU, config=config, sampler=None) as runtime:
        runtime.capture()
        have = runtime.replay(graphrt.Batch.from_requests([graphrt.Request(0, ids, len(ids))])).logits()[0].double()
    q, k, v = module.qkv(torch.tensor(ids)).double().view(-1, 8, 16).split([4, 2, 2], dim=1)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    for _ in range(2):
        q = torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) / 4).softmax(-1), v)
    assert (have - q.flatten(1)[-1, : len(have)]).abs().max() < 1e-5


def test_op_trace_records_the_operations_of_the_layer() -> None:
    with runtime_of(OneLayer(CPU), None) as runtime:
        for tape in runtime.manager._graphs._graphs.values():
            names = [entry.func._schema.name for entry in tape._entries]
            assert not [name for name in names if "attention_layer" in name]
            assert "graphrt::write_kv" in names


WRONG_OUT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "shape": (lambda q: torch.empty_like(q)[:, :2], "out: expected shape"),
    "dtype": (lambda q: torch.empty_like(q).half(), "out: expected dtype float32"),
    "strides": (lambda q: torch.empty_like(q).mT.contiguous().mT, "out: not contiguous"),
}


@pytest.mark.parametrize("name", [None, *WRONG_OUT])
def test_attend_writes_into_out(name: str | None) -> None:
    module, outs = OneLayer(CPU), []
    make, text = WRONG_OUT.get(name, (torch.empty_like, ""))

    def model(step: graphrt.Step) -> torch.Tensor:
        q, k, v = module.qkv(step.input_ids).view(-1, 8, 16).split([4, 2, 2], dim=1)
        outs.append(make(q.contiguous()))
        assert step.attend(0, q, k, v, out=outs[-1]) is outs[-1]
        return outs[-1].flatten(1)[step.logits_indices, :VOCAB]

    config = RuntimeConfig(4, 16, MAX_LEN, decode_sizes=(4,), mixed_sizes=(16,))
    groups = graphrt.kv_groups([FULL])
    with Runtime(model, FULL, groups, vocab_size=VOCAB, device=CPU, num_pages=20, config=config) as runtime:
        if name is not None:
            with pytest.raises(ShapeError, match=text):
                runtime.capture()
            return
        runtime.capture()
        got = [runtime.replay(batch).logits(copy=True) for batch in steps()]
    for ours, theirs in zip(got, logits_of(module, CPU), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_duplicate_layer_name_raises() -> None:
    module = torch.nn.Module()
    module.first, module.second = (torch.nn.ModuleDict({"attention": layer_of(0, FULL)}) for _ in range(2))
    with pytest.raises(ConfigError, match=r"'layer 0' is the name of first.attention and of second.attention"):
        attention_specs(module)
    with pytest.raises(ConfigError, match=r"'layer 0' is the name of module.first.attention and of module.second"):
        runtime_of(module, None)
    module.second = module.first  # one layer at two places is one layer
    assert attention_specs(module) == (FULL,)


@pytest.mark.parametrize("shared", ["layer 0", "layer 1", "layer 2", "attention"])
def test_kv_shared_with_must_name_an_earlier_layer(shared: str) -> None:
    module = torch.nn.ModuleList([layer_of(0, FULL), layer_of(1, FULL, kv_shared_with=shared), layer_of(2, FULL)])
    if shared == "layer 0":
        assert attention_specs(module) == (FULL, replace(FULL, kv_shared_with=0), FULL)
        return
    with pytest.raises(ConfigError, match=rf"'layer 1': .*earlier layer \('layer 0'\), got '{shared}'"):
        attention_specs(module)


def test_wrong_layer_arguments_raise() -> None:
    for wrong in ("", 3):
        with pytest.raises(ConfigError, match=r"Attention.name: expected a non-empty str"):
            graphrt.Attention(4, 16, name=wrong)
    with pytest.raises(ConfigError, match=r"Attention.kv_shared_with: expected a non-empty str, got 0"):
        graphrt.Attention(4, 16, name="x", kv_shared_with=0)
    with pytest.raises(ShapeError, match="sinks: expected shape"):
        graphrt.Attention(4, 16, name="x", sinks=torch.zeros(5))
    with pytest.raises(ConfigError, match="multiple of num_kv_heads"):
        graphrt.Attention(4, 16, 3, name="x")
    with pytest.raises(ConfigError, match="expected one of"):
        graphrt.Attention(4, 16, name="x").double().spec  # noqa: B018
    models = {
        torch.nn.Linear(2, 2): "model: Linear has no graphrt.Attention layers",
        (lambda step: step): "model: expected Module, got ",
    }
    for model, text in models.items():
        with pytest.raises(ConfigError, match=text):
            attention_specs(model)
        with pytest.raises(
            ConfigError, match=r"attention: required, because the model has no graphrt.Attention layers"
        ):
            Runtime(model, vocab_size=VOCAB, device=CPU)
    with pytest.raises(ConfigError, match="module: expected Module"):
        graphrt.as_step_model(lambda ids, positions: ids)
    with pytest.raises(ConfigError, match="head: expected a callable"):
        graphrt.as_step_model(torch.nn.Linear(2, 2), head=3)
    with pytest.raises(ShapeError, match=r"module\(input_ids, positions\): expected shape"):
        runtime_of(OneLayer(CPU, lambda a, q, k, v, at: a(q, k, v)[:1]), None)


def test_attention_argument_must_match_the_layers() -> None:
    module = Plain(MODELS["alike"], CPU)
    model = graphrt.as_step_model(module, head=module.compute_logits)
    groups = graphrt.kv_groups([FULL, FULL], page_size=8)
    for attention in (FULL, [FULL, FULL], None):
        Runtime(model, attention, groups, vocab_size=VOCAB, device=CPU, num_pages=9).close()
    for wrong in ([FULL, WINDOW], [FULL] * 3, [FULL]):
        with pytest.raises(ConfigError, match="differs from the specs of the model's 2 "):
            Runtime(model, wrong, vocab_size=VOCAB, device=CPU)
    with pytest.raises(ConfigError, match="kv_spec: required with one spec for all layers"):
        Runtime(model, FULL, vocab_size=VOCAB, device=CPU)
    cache = graphrt.KVCache.allocate(groups, 20, CPU)
    manager = graphrt.ReplayManager(model, cache, vocab_size=VOCAB, config=RuntimeConfig(4, 16, MAX_LEN))
    manager.close()


def test_two_managers_share_one_model() -> None:
    first, second = Plain(MODELS["shared"], CPU), Plain(MODELS["shared"], CPU)
    for weight in second.of.parameters():
        weight.data.mul_(1.1)
    runtimes = [runtime_of(m, m.compute_logits) for m in (first, first, second)]
    for runtime, module in zip(runtimes * 2, (first, first, second) * 2, strict=True):
        check_tokens(runtime, module.of, (3, 11), 6)
    step = runtimes[0].manager._program.view(runtimes[0].manager.descriptors[0])
    with ModelLayers(first).bound_to(step):
        with pytest.raises(ReplayError, match="'layer 0': a step of another manager is running"):
            runtimes[1].replay(rows([3], [3], 2), eager=True)
        runtimes[2].replay(rows([3], [3], 2), eager=True).tokens()
    runtimes[1].replay(rows([3], [3], 2), eager=True).tokens()


def test_copied_and_unpickled_layers_are_independent() -> None:
    module = Plain(MODELS["windows_beside_full"], CPU)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [module, copy.deepcopy(module), torch.load(file, weights_only=False)]
    numbers = [layer._number for m in copies for layer in m.layers] + [copy.copy(module.layers[0])._number]
    assert len(set(numbers)) == len(numbers)
    for m in copies:
        with runtime_of(m, m.compute_logits) as runtime:
            check_tokens(runtime, m.of, (4,), 4)


def test_moved_weight_raises() -> None:
    module = OneLayer(CPU, sinks=torch.nn.Parameter(torch.zeros(4)))
    with runtime_of(module, None) as runtime:
        runtime.replay(rows([3], [3])).tokens()
        module.attention.sinks.data = torch.ones(4)
        with pytest.raises(ReplayError, match=r"module\.attention\.sinks: expected at address"):
            _ = [runtime.replay(rows([4], [1])).tokens() for _ in range(runtime.manager._guards.num_turns)]


def test_get_attn_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = attention_specs(Plain(MODELS["shared"], CPU))
    groups = graphrt.kv_groups(specs)
    monkeypatch.setattr(registry, "_registered", {})
    config = RuntimeConfig(4, 16, MAX_LEN)
    found = get_attn_backend(specs, groups, "cpu", config=config)
    assert (found.name, found.backend) == ("torch_reference", registry.backend_class("torch_reference"))
    assert found.reason == registry.select_backend(found.context)[1]
    assert get_attn_backend(list(specs), groups, CPU, config=config) == found
    model = graphrt.as_step_model(Plain(MODELS["shared"], CPU))
    with Runtime(model, vocab_size=VOCAB, device=CPU, config=config, num_pages=20) as runtime:
        assert (runtime.stats().backend, runtime.stats().backend_reason) == (found.name, found.reason)

    class Another(registry.backend_class("torch_reference")):
        name = "another"

    registry.register_backend(Another)
    assert get_attn_backend(specs, groups, CPU, config=replace(config, backend="another")).backend is Another
    with pytest.raises(UnsupportedError, match="backend flash_attn3"):
        get_attn_backend(specs, groups, CPU, config=replace(config, backend="flash_attn3"))
    with pytest.raises(ConfigError, match="as in the cache"):
        get_attn_backend(specs[:1], groups, CPU)
    with pytest.raises(ConfigError, match=r"attention\[0\]"):
        get_attn_backend(["x"], groups, CPU)
