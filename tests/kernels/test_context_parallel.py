"""Operators of context parallel decode, against an enumeration of positions and attention over all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt.kernels.attention import context_parallel, exchange_native
from graphrt.kernels.attention.context_parallel import gather_queries, reduce_scatter_attention
from graphrt.kernels.attention.exchange_native import native_variants
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.localize_kv import localize_kv
from graphrt.kernels.ops import all_reduce
from graphrt.testing.numerics import assert_close, attention_oracle
from tests.kernels.test_all_reduce import Emulated, needs_compiler
from tests.support import native_emulation
from tests.support.native_usage import accesses_before_the_wait, assert_fits, compiled_within

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(("ranks", "size", "pages"), [(2, 1, 4), (2, 4, 4), (3, 2, 6), (4, 3, 3)])
def test_lengths_and_slots_of_each_rank(op_device: torch.device, ranks: int, size: int, pages: int) -> None:
    """`pages` tokens of a page are on a rank, so `ranks * pages` tokens have one page id."""
    whole, tokens = ranks * pages, 41
    groups = (PageGroup(whole, 9, 0, 5), PageGroup(whole, 9, 0, 5))
    capacity = Capacity(reqs=6, tokens=50, req_indices=6, inputs=64, ring=1, page_groups=groups, interleaves=True)
    lengths = torch.tensor([0, 1, size, whole - 1, whole, tokens], dtype=torch.int32)
    positions = torch.arange(50) % tokens
    slots = torch.stack([(7 + at // whole) * whole + at % whole for at in (positions, positions.flip(0))])
    slots[:, 45:] = -1
    owners = [[position // size % ranks for position in range(tokens)]] * 2
    for rank in range(ranks):
        b = StaticBuffers.allocate(capacity, op_device).cut(6, 50)
        b.seq_lens.copy_(lengths)
        b.positions.copy_(positions)
        b.slot_mapping.copy_(slots)
        localize_kv(b, ranks=ranks, rank=rank, interleave_size=size)
        owned = [owners[0][:length].count(rank) for length in range(tokens + 1)]
        assert b.seq_lens.tolist() == [owned[length] for length in lengths.tolist()]
        assert b.kv_limits.tolist() == [owned[position + 1] for position in positions.tolist()]
        for found, of_group in zip(b.slot_mapping.tolist(), slots.tolist(), strict=True):
            for slot, at in zip(found, of_group, strict=True):
                page, place = divmod(at, whole)
                mine = at >= 0 and place // size % ranks == rank
                before = sum(other // size % ranks == rank for other in range(place))
                assert slot == (page * pages + before if mine else -1)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no_sinks", "sinks"])
def test_ranks_together_attend_to_all_keys(
    op_device: torch.device, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_sinks: bool
) -> None:
    """Three ranks have 2 of 6 query heads of each of two KV heads; one rank has no key."""
    ranks, tokens, keys, kv_heads, dim = 3, 5, 14, 2, 18

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    q = draw(ranks, tokens, kv_heads, 2, dim).to(dtype)  # of each rank
    k, v = draw(keys, kv_heads, dim).to(dtype), draw(keys, kv_heads, 8).to(dtype)
    sinks = draw(ranks, kv_heads * 2)
    parts = [slice(0, 5), slice(5, 5), slice(5, keys)]
    monkeypatch.setattr(context_parallel, "all_gather", lambda x, group: q.flatten(2, 3))
    every = gather_queries(q[0].flatten(1, 2), kv_heads, Group())
    assert torch.equal(every.unflatten(1, (kv_heads, ranks, 2)), q.permute(1, 2, 0, 3, 4))

    sent: list[torch.Tensor] = []

    def reduce_scatter(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.zeros(tokens, kv_heads * 2, 8, dtype=dtype), torch.zeros(tokens, kv_heads * 2)
        out, lse = out.to(op_device), lse.to(op_device)
        partial, partial_lse = oracle(every, parts[rank])
        reduce_scatter_attention(
            partial.to(dtype).to(op_device), partial_lse.float().to(op_device), kv_heads, Group(), out,
            lse=lse, sinks=sinks[rank].to(op_device) if with_sinks else None,
        )  # fmt: skip
        return out.cpu(), lse.cpu()

    def oracle(q: torch.Tensor, part: slice, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_oracle(q, k[part], v[part], softmax_scale=0.3, causal=False, **options)

    monkeypatch.setattr(context_parallel, "all_to_all", lambda x, group: sent.append(x) or x)
    for rank in range(ranks):
        reduce_scatter(rank)
    for rank in range(ranks):
        received = torch.stack([of_rank[rank] for of_rank in sent])
        monkeypatch.setattr(context_parallel, "all_to_all", lambda x, group, received=received: received)
        out, lse = reduce_scatter(rank)
        options = {"sinks": sinks[rank]} if with_sinks else {}
        exact, exact_lse = oracle(q[rank].flatten(1, 2), slice(None), **options)
        assert_close(out, exact.to(dtype), atol={F16: 3e-3, BF16: 2e-2, F32: 2e-6}[dtype], name="out")
        assert_close(lse, exact_lse.float(), atol=2e-5, name="lse")


class Group:
    """Replaces a process group of three ranks."""

    group_name = "three"

    def size(self) -> int:
        return 3


def check_exchanges(calls: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Gather queries and merge partial outputs in turn, with changing sizes, against the operators above."""
    ranks, most, dim = 3, 5, 16
    emulated = Emulated(ranks, 2 * most * 4 * dim // 8, monkeypatch)
    monkeypatch.setattr(exchange_native, "launch", emulated.queues.launch)
    kept, gathers, merges = [], [], []
    for call in range(calls):
        tokens, kv_heads = 1 + call % most, 1 + call % 2
        heads = 4 // kv_heads
        q = torch.randn(ranks, tokens, kv_heads, heads, dim, generator=rng).to(BF16)
        partial = torch.randn(ranks, tokens, kv_heads, ranks, heads, dim, generator=rng).to(BF16)
        lses = 3 * torch.randn(ranks, tokens, kv_heads, ranks, heads, generator=rng)
        lses[torch.rand(lses.shape, generator=rng) < 0.3] = float("-inf")
        partial[lses == float("-inf")] = 0
        sinks = torch.randn(ranks, kv_heads * heads, generator=rng) if call % 3 else None
        for rank in range(ranks):
            emulated.queues.rank = rank
            monkeypatch.setitem(all_reduce.symmetric_buffers, "three", emulated.buffers[rank])
            own = q[rank].flatten(1, 2), partial[rank].flatten(1, 3), lses[rank].flatten(1, 3)
            kept.append(own)
            gathers.append((gather_queries(own[0], kv_heads, Group()), q.permute(1, 2, 0, 3, 4).flatten(1, 3)))
            out, lse = torch.empty_like(own[0]), torch.empty(tokens, 6)[:, : kv_heads * heads]
            of_rank = None if sinks is None else sinks[rank]
            reduce_scatter_attention(*own[1:], kv_heads, Group(), out, lse=lse, sinks=of_rank)
            merges.append((out, lse, partial[:, :, :, rank].flatten(2, 3), lses[:, :, :, rank].flatten(2, 3), of_rank))
            kept.append((of_rank,))
    emulated.run(seed)
    assert all(torch.equal(found, want) for found, want in gathers)
    for out, lse, outs, lses, of_rank in merges:
        total = lses.logsumexp(0) if of_rank is None else torch.logaddexp(lses.logsumexp(0), of_rank)
        weights = (lses - total.where(total != float("-inf"), 0.0)).exp()[..., None]
        torch.testing.assert_close(out.float(), (weights * outs.float()).sum(0), rtol=2**-7, atol=2**-8)
        torch.testing.assert_close(lse, total, rtol=1e-5, atol=1e-5)


BUGS = {
    "one_half": ("(i64)(calls % 2) * RANKS * p.capacity", "0"),
    "words_not_reset": ("if (r != p.rank) store_not_arrived(", "if (false) store_not_arrived("),
    "lse_of_another_head": ("row_of(to)]), 0, 0, 0", "row_of(p.rank)]), 0, 0, 0"),
}


@needs_compiler
def test_exchanges_of_ranks_that_stall(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_exchanges(100, rng, monkeypatch, seed=0)


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_of_exchanges_are_detected(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_emulation, "injected", BUGS[bug])
    with pytest.raises(AssertionError):
        check_exchanges(30, rng, monkeypatch, seed=0)


@pytest.mark.parametrize("name", native_variants())
def test_variants_compile_within_their_bounds(name: str) -> None:
    variant = native_variants()[name]
    registers, _ = compiled_within(variant, 0)
    assert_fits(variant, 1, registers)
    assert not accesses_before_the_wait(variant)
