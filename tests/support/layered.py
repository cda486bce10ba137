"""A toy model with different layers, a dense float64 oracle, and a runtime that checks the owner of every page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphrt.batch import Batch
from graphrt.cache.groups import kv_locations
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.engine.batch_delta import BatchDelta, StopConditions
from graphrt.generate.generator import TextGenerator
from graphrt.generate.scheduler import Scheduler
from graphrt.kernels.metadata.step_inputs import SEQ_LEN_FROM_DEVICE
from graphrt.proposer import Proposer
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Step
from tests.support.sampling_cases import generated

VOCAB, WIDTH, MAX_LEN = 53, 48, 96


class LayeredModel(torch.nn.Module):
    """Embeddings, an attention layer with residual per spec, tied head. Greedy tokens change from step to step."""

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device, *, seed: int = 3) -> None:
        super().__init__()
        self.specs, dtype = tuple(specs), specs[0].dtype
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.nn.Parameter:
            values = 3 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return torch.nn.Parameter(values.to(device, dtype), requires_grad=False)

        self.embed, self.where = weight(VOCAB, WIDTH), weight(MAX_LEN, WIDTH)
        self.q = torch.nn.ParameterList([weight(s.num_q_heads * s.head_dim, WIDTH) for s in specs])
        self.k = torch.nn.ParameterList([weight(s.num_kv_heads * s.head_dim, WIDTH) for s in specs])
        self.v = torch.nn.ParameterList([weight(s.num_kv_heads * s.value_dim, WIDTH) for s in specs])
        self.out = torch.nn.ParameterList([weight(WIDTH, s.num_q_heads * s.value_dim) for s in specs])

    def forward(self, step: Step) -> torch.Tensor:
        x = self.embed[step.input_ids] + self.where[step.positions]
        for layer, spec in enumerate(self.specs):
            q = (x @ self.q[layer].t()).view(-1, spec.num_q_heads, spec.head_dim)
            k = v = None
            if spec.kv_shared_with is None:
                k = (x @ self.k[layer].t()).view(-1, spec.num_kv_heads, spec.head_dim)
                v = (x @ self.v[layer].t()).view(-1, spec.num_kv_heads, spec.value_dim)
            x = x + 0.5 * step.attend(layer, q, k, v).flatten(1) @ self.out[layer].t()
        step.keep_hidden(x)
        return x[step.logits_indices] @ self.embed.t()

    def oracle(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after the last of `tokens`, dense and in float64 on the CPU."""
        return self._logits(tokens)[-1]

    def is_decided(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether no rounding of float32 changes the oracle's answer: float32, and noise of 2**-20 behind every layer,
        move the logits by less than an eighth of what the best token leads by."""
        tokens = [*prompt, *answer][:-1]
        exact, noisy, rounded = (
            self._logits(tokens, noise, dtype)[len(prompt) - 1 :].double()
            for noise, dtype in ((0.0, torch.float64), (2.0**-20, torch.float64), (0.0, torch.float32))
        )
        best = exact.topk(2).values
        moves = torch.maximum((exact - noisy).abs(), (exact - rounded).abs()).amax(1)
        return bool((8 * moves < best[:, 0] - best[:, 1]).all())

    def _logits(self, tokens: Sequence[int], noise: float = 0.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Logits after each of `tokens`, dense and on the CPU, with relative noise after every layer."""
        up = lambda w: w.detach().to("cpu", dtype)  # noqa: E731
        n, generator = len(tokens), torch.Generator().manual_seed(1)
        x = up(self.embed)[torch.tensor(tokens)] + up(self.where)[:n]
        at = torch.arange(n)
        written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, spec in enumerate(self.specs):
            q = (x @ up(self.q[layer]).t()).view(n, spec.num_q_heads, spec.head_dim)
            source = layer if spec.kv_shared_with is None else spec.kv_shared_with
            if source == layer:
                k = (x @ up(self.k[layer]).t()).view(n, spec.num_kv_heads, spec.head_dim)
                v = (x @ up(self.v[layer]).t()).view(n, spec.num_kv_heads, spec.value_dim)
                written[layer] = tuple(t.repeat_interleave(spec.num_queries_per_kv, 1) for t in (k, v))
            k, v = written[source]
            sees = at[:, None] >= at[None, :]
            if spec.sliding_window is not None:
                sees &= at[:, None] - at[None, :] < spec.sliding_window
            if spec.attention_chunk_size is not None:
                sees &= at[:, None] // spec.attention_chunk_size == at[None, :] // spec.attention_chunk_size
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            p = scores.masked_fill(~sees, float("-inf")).softmax(-1)
            x = x + 0.5 * torch.einsum("hqk,khd->qhd", p, v).flatten(1) @ up(self.out[layer]).t()
            x = x * (1 + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype))
        return x @ up(self.embed).t()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy continuation of `prompt`, by the oracle."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.oracle(tokens).argmax()))
        return tokens[len(prompt) :]


@dataclass
class _Known:
    """State of a request: pages of each group by position, tokens, and longest length."""

    pages: list[dict[int, int]]
    length: int = 0
    limit: int = 0


class Watch:
    """Follows the page lists of every launch, as the documentation of Batch and BatchDelta tells them: who owns what.

    In each launch the pages that rows can see must be allocated, and belong to one group each. A page that several rows
    see has as many owners, and one that a row writes has no other. Then NaN is written into every page that the
    allocators call free: whatever reads a freed page shows.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._known = runtime, dict[int, _Known]()
        self.most_owned, self.steps = [0] * len(runtime.allocators), 0
        manager = runtime.manager
        self._begin, self._advance = manager.begin, manager.advance
        manager.begin, manager.advance = self.begin, self.advance  # type: ignore[method-assign]

    def begin(self, batch: Batch, ends: StopConditions, **options: Any) -> Any:
        """Check the batch against all earlier ones, overwrite free pages, and submit it."""
        n, spans = batch.num_reqs, []
        for row in range(n):
            req_index, new, length = int(batch.req_indices[row]), int(batch.query_lens[row]), int(batch.seq_lens[row])
            known = self._known.setdefault(req_index, _Known([{} for _ in self._runtime.kv_cache.groups]))
            start = known.length if length == SEQ_LEN_FROM_DEVICE else length - new
            known.length, known.limit = start + new, int(ends.lengths[row])
            for g, pages in enumerate(known.pages):
                if start == 0:
                    pages.clear()
                at = g * n + row
                listed = batch.page_ids[batch.page_indptr[at] : batch.page_indptr[at + 1]].tolist()
                pages.update(enumerate(listed, int(batch.first_pages[at])))
            spans.append((known, start, start + new))
        self._check(spans, 1)
        return self._begin(batch, ends, **options)

    def advance(self, delta: BatchDelta, *, steps: int = 1, **options: Any) -> Any:
        """Do the same for requests that continue by at most so many steps."""
        known = [self._known[req_index] for req_index in delta.order.tolist()]
        if delta.lists is not None and delta.pages is not None:
            for place, lists in enumerate(delta.lists.T.tolist()):
                for pages, first, start, count in zip(
                    known[place].pages, lists[0::3], lists[1::3], lists[2::3], strict=True
                ):
                    pages.update(enumerate(delta.pages[start : start + count].tolist(), first))
        spans = [(row, row.length, min(row.length + steps, row.limit)) for row in known if row.length < row.limit]
        for row, _, end in spans:
            row.length = end
        self._check(spans, steps)
        return self._advance(delta, steps=steps, **options)

    def _check(self, spans: Sequence[tuple[_Known, int, int]], steps: int) -> None:
        self.steps += steps
        group_of: dict[tuple[int, int], int] = {}  # by pool and page
        seen, written = Counter[tuple[int, int]](), set[tuple[int, int]]()
        for known, start, end in spans:
            for g, group in enumerate(self._runtime.kv_cache.groups):
                for column in range(group.first_page_seen(start), -(-end // group.page_size)):
                    page = known.pages[g][column]
                    assert group_of.setdefault((group.pool, page), g) == g, f"page {page} is of two groups"
                    seen[group.pool, page] += 1
                    if (column + 1) * group.page_size > start:
                        written.add((group.pool, page))
        for (pool, page), rows in seen.items():
            owners = self._runtime.allocators[pool].owners(page)
            assert owners >= rows, f"page {page} is seen by {rows} rows and has {owners} owners"
            assert owners == 1 or (pool, page) not in written, f"page {page} is written and has {owners} owners"
        self._spoil_free_pages()

    def _spoil_free_pages(self) -> None:
        cache = self._runtime.kv_cache
        for pool, allocator in enumerate(self._runtime.allocators):
            owned = allocator.num_pages - 1 - allocator.num_free
            self.most_owned[pool] = max(self.most_owned[pool], owned)
            free = [p for p in range(allocator.num_pages) if p != allocator.null_page and not allocator.owners(p)]
            for g, group in enumerate(cache.groups):
                for tensor in (t for tensors in cache.of_group(g) for t in tensors if group.pool == pool):
                    tensor[free] = float("nan")


@contextmanager
def exact_ownership() -> Iterator[None]:
    """Check after every launch of a TextGenerator on CPU that a page has as many owners as running sequences use it."""
    real = Scheduler.launch

    def launch(scheduler: Scheduler) -> Any:
        launches = real(scheduler)
        for pool, allocator in enumerate(scheduler._runtime.allocators):
            held = Counter[int]()
            for table in scheduler._session.pages.tables:
                if table.group.pool == pool:
                    for req_index in scheduler.running:
                        held.update(table.pages(req_index).tolist())
            owned = {page: count for page in range(allocator.num_pages) if (count := allocator.owners(page))}
            assert owned == held
        return launches

    Scheduler.launch = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler.launch = real  # type: ignore[method-assign]


def build(
    specs: Sequence[AttentionSpec],
    groups: Sequence[KVCacheSpec] | KVCacheSpec,
    num_pages: int | Sequence[int],
    device: torch.device,
    proposer: Proposer | None = None,
    **config: Any,
) -> tuple[LayeredModel, Runtime]:
    """A captured runtime over a cache of NaN, with null pages of zeros."""
    model = LayeredModel(specs, device)

    def allocate(groups: Any, pages: Any, device: torch.device) -> KVCache:
        cache = KVCache.allocate(groups, pages, device)
        for tensor in (*cache.k, *cache.v):
            tensor[1:] = float("nan")
        return cache

    defaults = {"max_num_reqs": 4, "max_num_tokens": 16, "max_seq_len": MAX_LEN, "decode_sizes": (2, 4)}
    runtime = Runtime(
        model, specs, groups, vocab_size=VOCAB, device=device, num_pages=num_pages, allocate_kv=allocate,
        proposer=proposer, config=RuntimeConfig(**(defaults | {"mixed_sizes": (16,)} | config)),
    )  # fmt: skip
    runtime.capture()
    return model, runtime


def generate(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    generator: TextGenerator | None = None,
    stop_ids: Sequence[frozenset[int]] | None = None,
) -> list[list[int]]:
    """Greedy tokens of all prompts, generated together."""
    stops = stop_ids or [frozenset()] * len(prompts)
    params = [SamplingParams(max_new_tokens=n, stop_ids=stop) for n, stop in zip(counts, stops, strict=True)]
    return generated(generator or TextGenerator(runtime), prompts, params)


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def locations(specs: Sequence[AttentionSpec], groups: Sequence[KVCacheSpec]) -> list[tuple[int, int, bool]]:
    """Group, cache layer and `writes` of every layer."""
    return [(place.group, place.cache_layer, place.writes) for place in kv_locations(specs, groups)]
