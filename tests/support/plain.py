"""Modules without Step in their signatures, and runtimes around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import graphrt
from graphrt import AttentionSpec, Batch, Request, Runtime, RuntimeConfig
from tests.support.layered import MAX_LEN, VOCAB, LayeredModel, generate, prompts_of

F32, BF16, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
FULL = AttentionSpec(4, 2, 16, F32)
WINDOW, CHUNKED = replace(FULL, sliding_window=6), replace(FULL, attention_chunk_size=7)
VALUES = AttentionSpec(4, 2, 24, F32, v_head_dim=16)

MODELS: dict[str, tuple[AttentionSpec, ...]] = {
    "alike": (FULL, FULL),
    "windows_beside_full": (WINDOW, WINDOW, FULL, WINDOW),
    "shared": (FULL, WINDOW, replace(FULL, kv_shared_with=0), replace(WINDOW, kv_shared_with=1)),
    "value_heads_and_chunks": (VALUES, CHUNKED, AttentionSpec(3, 3, 20, F32, softmax_scale=0.1)),
}


def layer_of(index: int, spec: AttentionSpec, **options: Any) -> graphrt.Attention:
    """The layer that a spec describes."""
    shared = spec.kv_shared_with
    settings = {
        "name": f"layer {index}",
        "scale": spec.softmax_scale,
        "sliding_window": spec.sliding_window,
        "attention_chunk_size": spec.attention_chunk_size,
        "v_head_dim": spec.v_head_dim,
        "kv_shared_with": None if shared is None else f"layer {shared}",
        "dtype": spec.dtype,
    }
    return graphrt.Attention(spec.num_q_heads, spec.head_dim, spec.num_kv_heads, **(settings | options))


class Plain(torch.nn.Module):
    """The weights of a LayeredModel in a module without Step: token ids and positions to hidden states."""

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device, *, flat: bool = False) -> None:
        super().__init__()
        self.of = LayeredModel(specs, device)
        self.layers = torch.nn.ModuleList(layer_of(index, spec) for index, spec in enumerate(specs))
        self.flat = flat

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.of.embed[input_ids] + self.of.where[positions]
        for index, layer in enumerate(self.layers):
            q, k, v = x @ self.of.q[index].t(), x @ self.of.k[index].t(), x @ self.of.v[index].t()
            if not self.flat:
                q, k = (t.view(-1, n, layer.head_dim) for t, n in ((q, layer.num_q_heads), (k, layer.num_kv_heads)))
                v = v.view(-1, layer.num_kv_heads, layer.value_dim)
            out = layer(q) if layer.kv_shared_with else layer(q, k, v)
            assert out.dim() == q.dim()
            x = x + 0.5 * out.flatten(1) @ self.of.out[index].t()
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.of.embed.t()


def runtime_of(module: torch.nn.Module, head: Callable | None, device: torch.device = CPU, **config: Any) -> Runtime:
    """A captured runtime with the specs and the cache of the model's layers."""
    defaults = {"max_num_reqs": 4, "max_num_tokens": 16, "max_seq_len": MAX_LEN, "decode_sizes": (1, 2, 4)}
    settings = RuntimeConfig(**(defaults | {"mixed_sizes": (8, 16)} | config))
    model = graphrt.as_step_model(module, head=head)
    runtime = Runtime(model, vocab_size=VOCAB, device=device, num_pages=60, config=settings)
    runtime.capture()
    return runtime


def check_tokens(runtime: Runtime, oracle: LayeredModel, lengths: Sequence[int] = (1, 9, 23), count: int = 9) -> None:
    prompts = prompts_of(lengths)
    answers = generate(runtime, prompts, [count] * len(lengths))
    assert answers == [oracle.greedy(prompt, count) for prompt in prompts]


def rows(lengths: Sequence[int], delta: Sequence[int], num_groups: int = 1) -> Batch:
    """A step in which every request owns two pages of 16 tokens in every group."""
    found = []
    for row, (length, new) in enumerate(zip(lengths, delta, strict=True)):
        first = [1 + 2 * (row * num_groups + group) for group in range(num_groups)]
        pages = [list(range(at, at + -(-length // 16))) for at in first]
        found.append(Request(row, [(5 * length + i) % VOCAB for i in range(new)], length, pages))
    return Batch.from_requests(found)


def steps(num_groups: int = 1) -> list[Batch]:
    """Steps of sizes 1 to 4, and mixed steps, which start with prompts."""
    mixed = rows([3, 5, 4], [3, 5, 4], num_groups), rows([8, 6], [5, 1], num_groups)
    return [*mixed, *(rows([9, 7, 5, 1][:n], [1] * n, num_groups) for n in (1, 2, 3, 4))]


class OneLayer(torch.nn.Module):
    """A layer with random queries, keys and values per token; `forward` returns its output as logits."""

    def __init__(self, device: torch.device, call: Callable[..., torch.Tensor] | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.qkv = torch.nn.Embedding(VOCAB, 8 * 16, device=device)
        self.attention = layer_of(0, FULL, **options)
        self.call = call or (lambda layer, q, k, v, positions: layer(q, k, v))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(input_ids).view(-1, 8, 16).split([4, 2, 2], dim=1)
        return self.call(self.attention, q, k, v, positions).flatten(1)[:, :VOCAB].contiguous()


def logits_of(module: torch.nn.Module, device: torch.device, batches: Sequence[Batch] = ()) -> list[torch.Tensor]:
    with runtime_of(module, None, device) as runtime:
        return [runtime.replay(batch).logits(copy=True) for batch in batches or steps()]
