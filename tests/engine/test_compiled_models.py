"""graphrt.Attention in modules compiled by torch.compile: one graph, captured at every size, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphrt
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels.cache.write import Rotary
from tests.support.layered import MAX_LEN, VOCAB
from tests.support.plain import (
    CPU,
    FULL,
    MODELS,
    OneLayer,
    Plain,
    check_tokens,
    layer_of,
    logits_of,
    rows,
    runtime_of,
    steps,
)


class Compiler:
    """A backend of torch.compile that records the graphs it gets, and runs them by torch's own kernels."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs.append(graph)
        return aot_eager(graph, inputs)

    def layers(self, graph: torch.fx.GraphModule) -> int:
        return sum("attention_layer" in str(node.target) for node in graph.graph.nodes)


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["windows_beside_full", "shared"])
def test_compiled_module_is_one_graph_for_all_sizes_and_equals_uncompiled(name: str) -> None:
    """On CPU the op trace holds the original operations and eager steps run compiled code; `compare` compares both."""
    specs, compiler = MODELS[name], Compiler()
    module = Plain(specs, CPU)
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    with runtime_of(compiled, module.compute_logits) as runtime:
        groups = len(runtime.kv_cache.groups)
        for batch in steps(groups):
            comparison = runtime.compare(batch)
            assert comparison.equal, str(comparison)
            runtime.replay(batch).tokens()
        assert [compiler.layers(graph) for graph in compiler.graphs] == [len(specs)] * 2, "1 token, and any number"
        check_tokens(runtime, module.of)
    with runtime_of(compiled, module.compute_logits, use_graphs=False) as runtime:
        check_tokens(runtime, module.of)
    assert len(compiler.graphs) == 2


class Block(torch.nn.Module):
    """One of many layers that differ only in their weights."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8 * 16, 4 * 16) / 8, requires_grad=False)
        self.attention = layer_of(index, FULL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(*(x @ self.weight.t()).split([64, 32, 32], dim=1))


@pytest.mark.usefixtures("_fresh_compiler")
def test_blocks_compiled_separately_share_one_compilation() -> None:
    """With more blocks than torch recompiles a function for."""
    compiler, blocks = Compiler(), [Block(index) for index in range(10)]
    for block in blocks:
        block.compile(fullgraph=True, backend=compiler)
    module, embedding = torch.nn.Sequential(*blocks), torch.nn.Embedding(VOCAB, 64)
    module.forward = lambda ids, positions: torch.nn.Sequential.forward(module, embedding(ids))
    with (
        torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True),
        runtime_of(module, lambda hidden: hidden @ embedding.weight.t()) as runtime,
    ):
        for batch in steps():
            comparison = runtime.compare(batch)
            assert comparison.equal, str(comparison)
    assert len(compiler.graphs) <= 5, "a first layer and all others; one token and any number"


@pytest.mark.usefixtures("_fresh_compiler")
def test_inductor_gives_equal_tokens(device: torch.device) -> None:
    """On a GPU the CUDA graph holds the compiled kernels, and replay equals eager bitwise."""
    module = Plain(MODELS["windows_beside_full"], device)
    with runtime_of(torch.compile(module, fullgraph=True), module.compute_logits, device) as runtime:
        if device.type == "cuda":
            assert {g.descriptor for g in runtime.stats().graphs} == set(runtime.manager.descriptors)
            for batch in steps(len(runtime.kv_cache.groups)):
                comparison = runtime.compare(batch)
                assert comparison.equal, str(comparison)
                runtime.replay(batch).tokens()
        check_tokens(runtime, module.of)
    with runtime_of(torch.compile(module, fullgraph=True), module.compute_logits, device, use_graphs=False) as runtime:
        check_tokens(runtime, module.of, (5,), 4)


@pytest.mark.parametrize("how", ["not", "around", "inside", "submodule"])
def test_compiled_module_runs_each_size_before_its_capture(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed = []
    monkeypatch.setattr(OpTraceRecorder, "warm_up", lambda self, step, prepare: warmed.append(step.args[0]))
    module = Plain(MODELS["alike"], CPU)
    model: torch.nn.Module = module
    if how == "around":
        model = torch.compile(module, backend="eager")
    elif how == "inside":
        module.compile(backend="eager")
    elif how == "submodule":
        module.layers[1].compile(backend="eager")
    with runtime_of(model, module.compute_logits) as runtime:
        sizes = list(runtime.manager.descriptors)
        assert warmed == ([sizes[0], next(s for s in sizes if s.kind != sizes[0].kind)] if how == "not" else sizes)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_rotary_argument_equals_rotation_before_the_layer(compiled: bool, device: torch.device) -> None:
    angles = torch.outer(torch.arange(MAX_LEN).float(), 10000.0 ** -(torch.arange(8) / 8))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    weight = torch.linspace(0.5, 1.5, 16, device=device)
    rotary = Rotary(cos_sin, weight, weight)

    def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)
        (a, b), (cos, sin) = x.chunk(2, -1), cos_sin[positions].unsqueeze(1).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    inside = OneLayer(device, lambda layer, q, k, v, positions: layer(q.clone(), k, v, rotary=rotary))
    before = OneLayer(device, lambda layer, q, k, v, at: layer(rotated(q, at), rotated(k, at), v))
    module = torch.compile(inside, fullgraph=True, backend="aot_eager") if compiled else inside
    for got, want in zip(logits_of(module, device), logits_of(before, device), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if compiled:
        with runtime_of(module, None, device) as runtime:
            assert all(runtime.compare(batch).equal for batch in steps())


def test_operators_declare_the_arguments_that_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.library.opcheck, in a step."""
    cos_sin = torch.ones(MAX_LEN, 16)
    ops = torch.ops.graphrt.attention_layer.default, torch.ops.graphrt.rotary_attention_layer.default
    checked = []

    def check(layer: graphrt.Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: object) -> torch.Tensor:
        for op, rotary in zip(ops, ((), (cos_sin, None, None, 1e-6)), strict=True):
            arguments = (q.clone(), k.clone(), v.clone(), *rotary, None, torch.zeros_like(q), layer._number)
            for rule in ("test_schema", "test_faketensor"):
                with torch.inference_mode(False):
                    plain = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
                checked.append(torch.library.opcheck(op, tuple(plain), test_utils=rule))
        return layer(q, k, v)

    with monkeypatch.context() as patched:  # the checks call an operator several times
        patched.setattr(graphrt.step.Step, "_check_order", lambda step, layer, writes: None)
        runtime_of(OneLayer(CPU, check), None, use_graphs=False).replay(rows([3], [3])).tokens()
    assert [list(result.values()) for result in checked] == [["SUCCESS"]] * 4
