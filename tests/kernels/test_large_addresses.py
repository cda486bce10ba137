"""Caches of more than 2**31 elements and 2**32 bytes, with page ids at which a 32-bit offset would wrap."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.attention.operators import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.cache.write import write_kv

pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 16, 8, 128


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 lacks comparisons and some indexing."""
    return x.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
def test_write_and_attention_beyond_32_bits(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    num_pages = (1 << 32) // (dtype.itemsize * PAGE * HEADS * DIM) + 64
    k_cache, v_cache = (torch.empty(num_pages, PAGE, HEADS, DIM, dtype=dtype, device=device) for _ in "kv")
    assert k_cache.nbytes > 1 << 32
    assert k_cache.numel() > 1 << 31
    length = 3 * PAGE + 5
    pages = torch.tensor([num_pages - 2, 1, num_pages - 33, num_pages - 1], device=device)
    positions = torch.arange(length, device=device)
    slots = pages[positions // PAGE] * PAGE + positions % PAGE
    k, v, q = (
        torch.randn(length, heads, DIM, generator=generator, device=device).bfloat16() for heads in (HEADS, HEADS, 32)
    )
    as_bytes(k_cache[0]).fill_(7)
    write_kv(q, k, v, k_cache, v_cache, slots, positions)
    k, v = k.to(dtype), v.to(dtype)
    assert torch.equal(as_bytes(k_cache.view(-1, HEADS, DIM))[slots], as_bytes(k))
    assert torch.equal(as_bytes(v_cache.view(-1, HEADS, DIM))[slots], as_bytes(v))
    assert (as_bytes(k_cache[0]) == 7).all(), "page 0 is not written"

    heads = {"num_q_heads": 32, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": torch.bfloat16, "num_sms": 132}
    heads["kv_dtype"] = dtype
    decode, native = (AttentionPlan.decode(1, native=native, **heads) for native in (False, True))  # type: ignore[arg-type]
    varlen = AttentionPlan.varlen(1, length, **heads)  # type: ignore[arg-type]  # a dict of several types
    assert native.native is not None
    workspace = AttentionWorkspace.allocate([decode, native, varlen], device)
    options = AttentionOptions(DIM**-0.5)
    table = pages[None].int()
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    reqs = torch.tensor([0, length], dtype=torch.int32, device=device)
    keys, values = (x.double().repeat_interleave(4, 1) for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q[-1].double(), keys) * DIM**-0.5
    expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    for plan, tokens, starts in ((decode, q[-1:], None), (native, q[-1:], None), (varlen, q, reqs)):
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
    as_bytes(packed_k)[first:], as_bytes(packed_v)[first:] = as_bytes(k), as_bytes(v)
    kv_starts = torch.tensor([first, first + length], dtype=torch.int32, device=device)
    out = torch.full_like(q, 777.0)
    work_list = torch.zeros(varlen.work_list_words, dtype=torch.int32, device=device)
    schedule_attention(varlen, kv_starts, work_list, query_start_loc=reqs, seq_lens_are_starts=True)
    contiguous_attention(q, packed_k, packed_v, kv_starts, reqs, out, varlen, work_list, workspace, options)
    assert (out[-1].double() - expected).abs().max() < 2e-2
