"""Caches of more than 2**31 elements: page ids near the end, where a 32-bit offset would wrap."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.attention.paged_decode import paged_decode
from graphrt.kernels.attention.splits import DecodeWorkspace
from graphrt.kernels.attention.varlen import varlen_attention
from graphrt.kernels.cache.write import write_kv

pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 16, 8, 128
NUM_PAGES = (1 << 31) // (PAGE * HEADS * DIM) + 64


def test_write_decode_and_varlen_beyond_32_bits() -> None:
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

    table = pages[None].int()
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    out = torch.empty(1, 32, DIM, dtype=torch.bfloat16, device=device)
    workspace = DecodeWorkspace.allocate(1, max_query_len=1, head_shapes=[(32, HEADS, DIM)], num_sms=132, device=device)
    paged_decode(
        q[-1:], k_cache, v_cache, table, lengths, out, workspace, softmax_scale=DIM**-0.5, num_splits=2
    )  # fmt: skip
    rows = torch.tensor([0, length], dtype=torch.int32, device=device)
    packed = torch.empty_like(q)
    varlen_attention(q, k_cache, v_cache, table, lengths, rows, packed, softmax_scale=DIM**-0.5)
    keys, values = (x.double().repeat_interleave(4, 1) for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q[-1].double(), keys) * DIM**-0.5
    expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    for got in (out[0], packed[-1]):
        assert (got.double() - expected).abs().max() < 2e-2
