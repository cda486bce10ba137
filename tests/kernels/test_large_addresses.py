"""Caches of more than 2**31 elements: page ids near the end, where a 32-bit offset would wrap."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.attention.attention import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan, AttentionWorkspace
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.cache.write import write_kv

pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 16, 8, 128
NUM_PAGES = (1 << 31) // (PAGE * HEADS * DIM) + 64


def test_write_and_attention_beyond_32_bits() -> None:
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    k_cache, v_cache = (torch.empty(NUM_PAGES, PAGE, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in "kv")
    assert k_cache.numel() > 1 << 31
    length = 3 * PAGE + 5
    pages = torch.tensor([NUM_PAGES - 2, 1, NUM_PAGES - 33, NUM_PAGES - 1], device=device)
    positions = torch.arange(length, device=device)
    slots = pages[positions // PAGE] * PAGE + positions % PAGE
    k, v, q = (
        torch.randn(length, heads, DIM, generator=generator, device=device).bfloat16() for heads in (HEADS, HEADS, 32)
    )
    wrapped = k_cache.view(-1)[: 1 << 20]
    wrapped.fill_(7.0)
    write_kv(q, k, v, k_cache, v_cache, slots, positions)
    assert torch.equal(k_cache.view(-1, HEADS, DIM)[slots], k)
    assert torch.equal(v_cache.view(-1, HEADS, DIM)[slots], v)
    assert (wrapped[: PAGE * HEADS * DIM] == 7.0).all(), "page 0 is not written"

    heads = {"num_q_heads": 32, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": torch.bfloat16, "num_sms": 132}
    decode = AttentionPlan.decode(1, **heads)  # type: ignore[arg-type]  # a dict of both
    varlen = AttentionPlan.varlen(1, length, **heads)  # type: ignore[arg-type]
    workspace = AttentionWorkspace.allocate([decode, varlen], device)
    options = AttentionOptions(DIM**-0.5)
    table = pages[None].int()
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    rows = torch.tensor([0, length], dtype=torch.int32, device=device)
    keys, values = (x.double().repeat_interleave(4, 1) for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q[-1].double(), keys) * DIM**-0.5
    expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    for plan, tokens, starts in ((decode, q[-1:], None), (varlen, q, rows)):
        out = torch.full_like(tokens, 777.0)
        work_list = torch.zeros(plan.work_list_words, dtype=torch.int32, device=device)
        schedule_attention(plan, lengths, work_list, query_start_loc=starts)
        paged_attention(
            tokens, k_cache, v_cache, table, lengths, out, plan, work_list, workspace, options, query_start_loc=starts
        )
        assert (out[-1].double() - expected).abs().max() < 2e-2

    # The same tokens as contiguous K and V, at the end of the memory that was the cache.
    first = k_cache.numel() // (HEADS * DIM) - length
    packed_k, packed_v = k_cache.view(-1, HEADS, DIM), v_cache.view(-1, HEADS, DIM)
    packed_k[first:], packed_v[first:] = k, v
    kv_starts = torch.tensor([first, first + length], dtype=torch.int32, device=device)
    out = torch.full_like(q, 777.0)
    work_list = torch.zeros(varlen.work_list_words, dtype=torch.int32, device=device)
    schedule_attention(varlen, kv_starts, work_list, query_start_loc=rows, seq_lens_are_starts=True)
    contiguous_attention(q, packed_k, packed_v, kv_starts, rows, out, varlen, work_list, workspace, options)
    assert (out[-1].double() - expected).abs().max() < 2e-2
