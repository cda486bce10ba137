"""Operators of context parallel decode, against an enumeration of positions and attention over all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt.kernels.attention import context_parallel
from graphrt.kernels.attention.context_parallel import gather_queries, reduce_scatter_attention
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.localize_kv import localize_kv
from graphrt.testing.numerics import assert_close, attention_oracle

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
    """Stands for a process group of three ranks."""

    def size(self) -> int:
        return 3
