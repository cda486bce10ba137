"""Layers that differ: graph and eager step are bitwise equal on ragged batches, with poisoned buffers in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.batch import Batch, Request
from graphrt.cache.groups import kv_groups
from graphrt.kernels.types import KVLayout
from graphrt.runtime import Runtime
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.testing.poison import poison_derived
from tests.engine.test_shadow import everything
from tests.support.layered import MAX_LEN, Watch, build, generate, prompts_of

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
FULL = AttentionSpec(4, 2, 32, F32)
WINDOW, CHUNKED = replace(FULL, sliding_window=20), replace(FULL, attention_chunk_size=24)
VALUES = AttentionSpec(4, 2, 24, F32, v_head_dim=16)
SOFTCAP = replace(FULL, logits_softcap=5.0)

PAIRS: dict[str, tuple[AttentionSpec, ...]] = {
    "window_beside_full": (WINDOW, FULL),
    "chunk_beside_full": (CHUNKED, FULL),
    "shared_window_beside_full": (WINDOW, FULL, replace(WINDOW, kv_shared_with=0)),
    "value_heads_beside_window": (VALUES, replace(VALUES, sliding_window=20)),
    "chunk_beside_window_and_softcap": (CHUNKED, replace(SOFTCAP, sliding_window=20), SOFTCAP),
    "odd_heads_beside_chunks": (AttentionSpec(3, 1, 20, F32, v_head_dim=12), CHUNKED),
}


def rows_of(
    groups: tuple[KVCacheSpec, ...], lengths: list[int], delta: list[int], pages: list[list[list[int]]]
) -> Batch:
    """A step of ragged requests that list in each group the pages they see, and null pages before them."""
    rows = []
    for row, (length, new) in enumerate(zip(lengths, delta, strict=True)):
        lists, firsts = [], []
        for g, group in enumerate(groups):
            seen = group.first_page_seen(length - new)
            lists.append(pages[g][row][seen : group.pages_for(length)])
            firsts.append(seen)
        tokens = [(7 * length + i) % 53 for i in range(new)]
        rows.append(Request(row, tokens, length, lists, first_page=firsts))
    return Batch.from_requests(rows)


def steps(runtime: Runtime, *, mixed: bool) -> list[Batch]:
    """Ragged batches over random pages; lengths cross pages, windows and chunks."""
    groups = runtime.kv_cache.groups
    generator = torch.Generator().manual_seed(5)
    order = (1 + torch.randperm(runtime.kv_cache.pool_pages[0] - 1, generator=generator)).tolist()
    pages = [[[order.pop() for _ in range(group.pages_for(MAX_LEN))] for _ in range(4)] for group in groups]
    batches = []
    for lengths in ([1, 23, 24, 48], [2, 24, 25, 49], [3, 25, 26, 50], [20, 21, 49, 95]):
        delta = [1, 1, 1, 1] if not mixed else [1, min(5, lengths[1]), 1, 3]
        batches.append(rows_of(groups, lengths, delta, pages))
    return batches


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "mixed"])
def test_replay_equals_eager_bitwise(name: str, mixed: bool, device: torch.device) -> None:
    specs = PAIRS[name]
    _, runtime = build(specs, kv_groups(specs, page_size=8, layout=KVLayout.HND), 200, device, decode_sizes=(4,))
    for tensor in (*runtime.kv_cache.k, *runtime.kv_cache.v):
        tensor[1:].normal_(generator=torch.Generator(device).manual_seed(1))
    for batch in steps(runtime, mixed=mixed):
        poison_derived(runtime.manager.buffers)
        before = everything(runtime.manager)
        comparison = runtime.compare(batch)
        assert all(torch.equal(a, b) for a, b in zip(before, everything(runtime.manager), strict=True))
        assert comparison.equal, str(comparison)
        assert not comparison.graph.logits.isnan().any()
        poison_derived(runtime.manager.buffers)
        assert runtime.replay(batch).tokens().tolist() == comparison.graph.tokens.tolist()
    runtime.close()


def test_tokens_of_an_fp8_cache_with_windows_and_chunks(device: torch.device) -> None:
    """Alone and in a batch: tokens do not depend on other requests, nor on freed pages, which hold NaN."""
    specs = tuple(replace(spec, dtype=BF16) for spec in (CHUNKED, WINDOW, FULL))
    groups = kv_groups(specs, page_size=16, dtype=FP8)
    prompts, counts = prompts_of([3, 21, 40]), [20, 25, 30]
    alone = []
    for prompt, count in zip(prompts, counts, strict=True):
        _, runtime = build(specs, groups, 60, device, batch_invariant=True)
        alone += generate(runtime, [prompt], [count])
        runtime.close()
    _, runtime = build(specs, groups, 60, device, batch_invariant=True)
    Watch(runtime)
    together = generate(runtime, prompts, counts)
    agree = [sum(a == b for a, b in zip(x, y, strict=True)) / len(x) for x, y in zip(alone, together, strict=True)]
    assert min(agree) > 0.5, "matrix products of other sizes round otherwise; one early difference changes what follows"
    assert [x[0] for x in alone] == [x[0] for x in together]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend", ["triton", "flash_attn3", "triton+triton", "triton+flash_attn3", "flash_attn3+triton"]
)
def test_backends_agree_on_groups(backend: str) -> None:
    """Groups with and without a window, in bfloat16, compared with the reference backend; freed pages hold NaN."""
    device = torch.device("cuda", 0)
    if "flash_attn3" in backend:
        pytest.importorskip("flash_attn_interface")
    specs = tuple(AttentionSpec(8, 2, 64, BF16, sliding_window=window) for window in (20, 20, None, 20, 20, None))
    groups = kv_groups(specs, page_size=16)
    logits = []
    for name in (backend, "torch_reference"):
        decode, _, prefill = name.partition("+")
        model, runtime = build(
            specs, groups, 200, device, backend=decode, prefill_backend=prefill or "none", decode_sizes=(4,)
        )
        for weight in model.parameters():
            weight.mul_(0.3)  # else every weight of a softmax is 0 or 1, and a rounding moves it
        for tensor in (*runtime.kv_cache.k, *runtime.kv_cache.v):
            tensor[1:].normal_(generator=torch.Generator(device).manual_seed(1))
        batches = steps(runtime, mixed=False) + steps(runtime, mixed=True)
        logits.append([runtime.replay(batch).logits(copy=True).float() for batch in batches])
        runtime.close()
    for got, want in zip(*logits, strict=True):
        assert not got.isnan().any()
        assert (got - want).abs().max() < 0.05 * want.abs().max()
