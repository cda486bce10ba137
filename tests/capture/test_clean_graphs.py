"""Correct steps of other libraries have no findings of audit or verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from graphrt.backends.registry import backend_class
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import CapturedGraph, Recorder
from graphrt.capture.inspect.audit import Audit, audit_twice, memory_of
from graphrt.capture.inspect.blas import with_blas_workspaces
from graphrt.capture.inspect.memory import MemoryMap
from graphrt.capture.recorder import make_recorder
from graphrt.testing.verify import Inputs, verify

TOKENS, ROWS, LONGEST, PAGE, PAGES = 12, 4, 16, 16, 40


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def model(device: torch.device) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().to(device)


def random(case: int, *shape: int, high: int = 97) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(case))


def audited(step: Callable[[], Any], device: torch.device, **owned: Any) -> Audit:
    """Audit a step that is captured twice."""
    recorders: list[Recorder] = []
    graphs: list[CapturedGraph] = []

    def capture() -> CapturedGraph:
        recorder = make_recorder(device)  # each has its own pool
        recorders.append(recorder)
        with recorder.session(), torch.inference_mode():
            recorder.warm_up(step, lambda: None)
            graphs.append(recorder.capture(step, BatchDescriptor.decode(ROWS), lambda: None))
        return graphs[-1]

    def memory(graph: CapturedGraph) -> MemoryMap:
        # Warm-ups ran on the capture streams: cuBLAS has workspaces there.
        held, streams = memory_of(pool=graph, **owned), [stream for one in recorders for stream in one.streams]
        return with_blas_workspaces(held, streams) if streams else held

    try:
        return audit_twice(capture, memory)
    finally:
        for graph in graphs:
            graph.close()
        for recorder in recorders:
            recorder.close()


def test_transformers_model(model: Any, device: torch.device) -> None:
    """A forward pass over sequences of different lengths. Without the mask as an input, the model reads the device."""

    def step(input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits

    def make_inputs(case: int) -> dict[str, Any]:
        lengths = random(case, ROWS, 1, 1, 1, high=TOKENS) + 1
        at = torch.arange(TOKENS)
        mask = (at <= at[:, None]) & (at < lengths)
        return {"input_ids": random(case, ROWS, TOKENS).to(device), "mask": mask.to(device)}

    report = verify(step, make_inputs)
    assert report.ok, str(report)
    static = make_inputs(0)
    found = audited(lambda: step(**static), device, static=static, weights=model)
    assert not found.findings, str(found)


class StaticCacheDecode:
    """A decode step of `transformers` with its static cache, which counts its tokens on the device."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.cache = model, transformers.StaticCache(config=model.config, max_cache_len=LONGEST)
        self.buffers = {
            "tokens": torch.zeros(ROWS, 1, dtype=torch.int64, device=device),
            "positions": torch.zeros(ROWS, 1, dtype=torch.int64, device=device),
            "mask": torch.zeros(ROWS, 1, 1, LONGEST, dtype=torch.bool, device=device),
        }
        self.refresh({"tokens": random(0, ROWS, 1), "length": 0})
        with torch.inference_mode():
            self.run()
        self.state = {
            f"{name} of layer {number}": value
            for number, layer in enumerate(self.cache.layers)
            for name, value in vars(layer).items()
            if isinstance(value, torch.Tensor)
        }

    def refresh(self, inputs: Inputs) -> None:
        self.buffers["tokens"].copy_(inputs["tokens"])
        self.buffers["positions"].fill_(inputs["length"])
        self.buffers["mask"].copy_((torch.arange(LONGEST) <= inputs["length"]).expand(ROWS, 1, 1, LONGEST))

    def run(self) -> torch.Tensor:
        tokens, positions, mask = self.buffers.values()
        return self.model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).logits


def test_transformers_static_cache(model: Any, device: torch.device) -> None:
    step = StaticCacheDecode(model, device)
    report = verify(step, lambda case: {"tokens": random(case, ROWS, 1), "length": 1})
    assert report.ok, str(report)
    assert {"state", "history"} <= set(report.checked)
    found = audited(step.run, device, static=step.buffers, weights=model, cache=step.state)
    assert not found.findings, str(found)


def test_optimizer_step(device: torch.device) -> None:
    """On CUDA its kernels take dozens of addresses in one list, whose tail no launch writes: words there may look like
    addresses of freed blocks, and the audit says that they may be numbers."""
    weights = {f"w{at}": torch.ones(3 + 7 * at, device=device) for at in range(40)}
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 0.5)
    optimizer = torch.optim.AdamW(weights.values(), fused=True, capturable=device.type == "cuda")
    factor = torch.full((), 0.75, device=device)

    def step() -> torch.Tensor:
        torch._foreach_mul_([weight.grad for weight in weights.values()], factor)
        optimizer.step()
        return weights["w39"].sum()

    with torch.inference_mode():
        step()  # creates the state
    state = {
        f"{name} of {number}": value for number, of in enumerate(optimizer.state.values()) for name, value in of.items()
    }
    grads = {f"gradient of {name}": weight.grad for name, weight in weights.items()}
    found = audited(step, device, static={"factor": factor}, weights=weights | grads | state)
    assert not [finding for finding in found.findings if finding.certain or device.type == "cpu"], str(found)


@pytest.mark.gpu
def test_flash_attention_3_step() -> None:
    """Paged decode attention with automatic splits, for lengths that shrink and grow."""
    backend = backend_class("flash_attn3")
    if (reason := backend.unavailable()) is not None:
        pytest.skip(f"flash_attn3: {reason}")
    attend = backend.package.load().flash_attn_with_kvcache
    device, options = torch.device("cuda"), {"device": "cuda", "dtype": torch.bfloat16}
    k_cache, v_cache = (torch.randn(PAGES, PAGE, 2, 128, **options) for _ in range(2))

    def step(q: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return attend(q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, causal=True)

    def make_inputs(case: int) -> dict[str, Any]:
        columns = PAGES // ROWS
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(case)).view(ROWS, columns)
        return {
            "q": torch.randn(ROWS, 1, 8, 128, **options),
            "lengths": (random(case, ROWS, high=columns * PAGE) + 1).int().to(device),
            "table": pages.int().to(device),
        }

    report = verify(step, make_inputs)
    assert report.ok, str(report)
    static = make_inputs(0)
    found = audited(lambda: step(**static), device, static=static, cache={"k": k_cache, "v": v_cache})
    assert not found.findings, str(found)
