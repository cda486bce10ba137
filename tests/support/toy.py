"""A small attention model, a host-side scheduler for it, and a dense float64 oracle without a cache."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from graphrt.batch import Batch, Request
from graphrt.cache.kv_cache import KVCache
from graphrt.cache.page_allocator import PageAllocator
from graphrt.config import RuntimeConfig
from graphrt.context_parallel import ContextParallel
from graphrt.engine import program
from graphrt.engine.handle import Launch
from graphrt.kernels.attention import context_parallel
from graphrt.kernels.types import TOKEN_FROM_DEVICE, KVLayout
from graphrt.proposer import Proposer
from graphrt.replay import ReplayManager
from graphrt.runtime import Runtime
from graphrt.sampling import sample_tokens
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Sampler, Step

VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS, MAX_LEN = 61, 4, 2, 16, 2, 64


class ToyModel(torch.nn.Module):
    """Token and position embedding, LAYERS of attention with residual, tied head."""

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int = HEAD_DIM) -> None:
        super().__init__()
        width = HEADS * head_dim
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return torch.nn.Parameter(values.to(device, dtype), requires_grad=False)

        self.head_dim = head_dim
        self.embed = weight(VOCAB, width)
        self.where = weight(MAX_LEN, width)
        self.qkv = torch.nn.ParameterList([weight((HEADS + 2 * KV_HEADS) * head_dim, width) for _ in range(LAYERS)])
        self.out = torch.nn.ParameterList([weight(width, width) for _ in range(LAYERS)])

    def forward(self, step: Step) -> torch.Tensor:
        x = self.embed[step.input_ids] + self.where[step.positions]
        for layer in range(LAYERS):
            q, k, v = self.project(layer, x)
            x = x + step.attend(layer, q, k, v).flatten(1) @ self.out[layer].t()
        step.keep_hidden(x)
        return x[step.logits_indices] @ self.embed.t()

    def project(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = (x @ self.qkv[layer].t()).view(-1, HEADS + 2 * KV_HEADS, self.head_dim)
        return qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)

    def oracle(self, tokens: list[int]) -> torch.Tensor:
        """Logits after the last of `tokens`, dense and in float64 on the CPU."""
        return self.hidden(tokens)[-1] @ self.embed.detach().double().cpu().t()

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Hidden states of `tokens`, dense and in float64 on the CPU."""
        up = lambda w: w.detach().double().cpu()  # noqa: E731
        ids = torch.tensor(tokens)
        x = up(self.embed)[ids] + up(self.where)[: len(tokens)]
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        for layer in range(LAYERS):
            qkv = (x @ up(self.qkv[layer]).t()).view(len(tokens), -1, self.head_dim)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
            p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            x = x + torch.einsum("hqk,khd->qhd", p, v).flatten(1) @ up(self.out[layer]).t()
        return x


class LivelyModel(ToyModel):
    """A toy model whose greedy tokens change from step to step: the plain one repeats the last token of its prompt."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.float32)
        for weight in (*self.qkv, *self.out):
            weight.data.mul_(4)


class Wild(LivelyModel):
    """Logits are all `fill` for requests whose last token is `bad`."""

    bad, fill = -1, float("nan")

    def forward(self, step: Step) -> torch.Tensor:
        logits = super().forward(step)
        bad = (step.input_ids == self.bad)[step.logits_indices][:, None]
        return torch.where(bad, torch.full_like(logits, self.fill), logits)


class Broken(LivelyModel):
    """Logits are NaN from a length on, for the request indices in `broken`."""

    length, broken = 7, (0,)

    def forward(self, step: Step) -> torch.Tensor:
        broken = torch.stack([step.req_indices == index for index in self.broken]).any(0)
        bad = broken & (step.metadata.seq_lens >= self.length)
        return torch.where(bad[:, None], float("nan"), super().forward(step))


@dataclass
class Sequence:
    """A sequence on the host: tokens so far, and its pages."""

    req_index: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass
class Rig:
    """A captured toy runtime and its host state."""

    model: ToyModel
    manager: ReplayManager
    allocator: PageAllocator
    page_size: int

    def start(self, req_index: int, tokens: list[int]) -> Sequence:
        return Sequence(req_index, list(tokens))

    def row(self, sequence: Sequence, count: int | None = None, *, from_device: bool = False, **options) -> Request:
        """The next `count` tokens of a sequence as a Request; allocates its pages."""
        count = len(sequence.tokens) - sequence.cached if count is None else count
        new = sequence.tokens[sequence.cached : sequence.cached + count]
        sequence.cached += count
        needed = -(-sequence.cached // self.page_size)
        sequence.pages += self.allocator.allocate(needed - len(sequence.pages))
        sample = sequence.cached == len(sequence.tokens)
        tokens = [TOKEN_FROM_DEVICE] if from_device else new
        return Request(sequence.req_index, tokens, sequence.cached, tuple(sequence.pages), sample=sample, **options)

    def prefill(self, *sequences: Sequence) -> np.ndarray:
        """Feed all tokens that are not cached in one step, and append the sampled tokens."""
        tokens = self.manager.replay(Batch.from_requests([self.row(s) for s in sequences])).tokens()
        for sequence, token in zip(sequences, tokens.reshape(len(sequences), -1)[:, 0].tolist(), strict=True):
            sequence.tokens.append(token)
        return tokens


def make_rig(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    page_size: int = 4,
    layout: KVLayout = KVLayout.NHD,
    num_pages: int = 80,
    head_dim: int = HEAD_DIM,
    capture: bool = True,
    model: ToyModel | None = None,
    fill: float = float("nan"),
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
    sampler: Sampler | None = sample_tokens,
    cache: KVCache | None = None,
    options: dict[str, object] | None = None,
    **config,
) -> Rig:
    """A rig with a cache full of NaN, including the null page, so that reads of unwritten KV are visible. With drafts,
    the null page is zero, because padding reads it.

    `options` are further arguments of the ReplayManager, and `config` are fields of the RuntimeConfig.
    """
    model = model or ToyModel(device, dtype, head_dim)
    if cache is None:
        spec = KVCacheSpec(LAYERS, KV_HEADS, head_dim, page_size, layout, kv_dtype or dtype)
        cache = KVCache.allocate(spec, num_pages, device)
        for tensor in (*cache.k, *cache.v):
            tensor.fill_(fill)
            if config.get("num_speculative_tokens"):
                tensor[0] = 0
    attention = AttentionSpec(HEADS, KV_HEADS, head_dim, dtype, sliding_window=window)
    defaults = {"max_num_reqs": 8, "max_num_tokens": 32, "max_seq_len": MAX_LEN, "decode_sizes": (1, 2, 4, 8)}
    settings = RuntimeConfig(**(defaults | {"mixed_sizes": (16, 32)} | config))
    manager = ReplayManager(
        model, cache, attention, vocab_size=VOCAB, config=settings, sampler=sampler, **(options or {})
    )
    if capture:
        manager.capture()
    return Rig(model, manager, PageAllocator(num_pages), page_size)


@contextlib.contextmanager
def first_of_two_ranks() -> Iterator[KVCache]:
    """A cache of 20 pages for rigs made within, which run as the first of two ranks that share the KV of each request.
    The other rank has none of the first 32 tokens of a sequence."""

    class First:
        group_name = "first"
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

    def answer(x: torch.Tensor, group: object) -> torch.Tensor:
        of_other = x[0].clone()
        of_other[..., -4:].view(torch.float32).fill_(float("-inf"))
        return torch.stack((x[0], of_other))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "context_of", lambda *_: ContextParallel(First(), 32))
        patch.setattr(context_parallel, "all_gather", lambda x, group: torch.stack((x, x)))
        patch.setattr(context_parallel, "all_to_all", answer)
        spec = KVCacheSpec(
            LAYERS, KV_HEADS, HEAD_DIM, 32, dtype=torch.float32, context_parallel_size=2, interleave_size=32
        )
        yield KVCache.allocate(spec, 20, "cpu")


def make_runtime(device: torch.device, *, model: object = None, config: dict | None = None, **options) -> Runtime:
    """A runtime of a lively toy model in float32 before capture, with 4 requests and pages of 4 tokens."""
    settings = {"max_num_reqs": 4, "max_num_tokens": 16, "max_seq_len": MAX_LEN} | (config or {})
    return Runtime(
        model or LivelyModel(device),
        AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32),
        options.pop("kv_spec", KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)),
        vocab_size=VOCAB,
        device=device,
        config=RuntimeConfig(**settings),
        **options,
    )


def captured(
    model: object = None,
    device: torch.device | str = "cpu",
    num_pages: int = 60,
    *,
    proposer: Proposer | None = None,
    **config: object,
) -> Runtime:
    """A captured runtime of `make_runtime` over a cache of NaN, except for its null page."""
    runtime = make_runtime(torch.device(device), model=model, num_pages=num_pages, config=config, proposer=proposer)
    for _, tensor in runtime.kv_cache.named_tensors():
        tensor[1:] = float("nan")
    runtime.capture()
    return runtime


def finish(session: DecodeSession, steps: int = 3) -> None:
    """Run all requests of a session to their ends."""
    while session.running:
        session.run(steps)
        session.collect(wait=True)


def slow_device(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A device that is never ahead of its host. From now on a session's launch has ended once somebody waited for it,
    or asked for it 1 to 31 times, by its step. The list gets the first step of each that was."""
    waited: list[object] = []
    asked, real = Counter[int](), Launch.wait

    def wait(launch: Launch) -> None:
        if launch.step not in waited:
            waited.append(launch.step)
        real(launch)

    def done(launch: Launch) -> bool:
        asked[launch.step] += 1
        if asked[launch.step] > launch.step * 7919 % 31:
            launch.wait()
        return launch.step in waited

    monkeypatch.setattr(Launch, "wait", wait)
    monkeypatch.setattr(Launch, "done", done)
    return waited


def greedy(model: ToyModel, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation of `prompt`, by the oracle."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.oracle(tokens).argmax()))
    return tokens[len(prompt) :]
