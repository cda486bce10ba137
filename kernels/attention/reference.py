"""Attention over the paged cache in plain torch, row by row. Serves CPU, and eager CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from graphrt.kernels.attention.arguments import check_attention_arguments
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.library import define_op


def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: Sequence[int],
    out: torch.Tensor,
    softmax_scale: float,
    sliding_window: int,
    logits_softcap: float,
) -> None:
    """Loop over the rows. `query_starts` are host values; tokens from the last one on are pad tokens."""
    page_size = k_cache.shape[1]
    out[query_starts[-1] :].zero_()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_starts[row], query_starts[row + 1]
        blind = min(end - start, max(0, end - start - seq_len))  # tokens before position 0: they see nothing
        out[start : start + blind].zero_()
        start += blind
        query_len = end - start
        if query_len == 0:
            continue
        first_seen = max(0, seq_len - query_len + 1 - sliding_window) if sliding_window else 0
        first_page = first_seen // page_size
        pages = block_table[row, first_page : -(-seq_len // page_size)]
        base = first_page * page_size
        keys, values = (
            cache.index_select(0, pages).flatten(0, 1)[first_seen - base : seq_len - base].transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        mask = _mask(query_len, seq_len, first_seen, sliding_window, q.device)
        out[start:end] = _attend(q[start:end], keys, values, mask, softmax_scale, logits_softcap)


def _mask(
    query_len: int, seq_len: int, first_seen: int, sliding_window: int, device: torch.device
) -> torch.Tensor | None:
    """Which of the positions first_seen to seq_len - 1 each query token sees [query_len, positions]; None: all."""
    if query_len == 1:
        return None
    positions = torch.arange(first_seen, seq_len, device=device)
    last_seen = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    mask = positions <= last_seen
    if sliding_window:
        mask &= positions > last_seen - sliding_window
    return mask


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softmax_scale: float,
    logits_softcap: float,
) -> torch.Tensor:
    """q [query_len, num_q_heads, D], keys and values [num_kv_heads, positions, D] -> [query_len, num_q_heads, D]."""
    query_len, num_q_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    group = num_q_heads // num_kv_heads
    # The query heads that share a KV head become query rows of it, so that K and V need not be repeated.
    by_head = q.reshape(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    packed = by_head.reshape(num_kv_heads, group * query_len, head_dim)
    if mask is not None:
        mask = mask.repeat(group, 1)
    if logits_softcap:
        logits = packed.float() @ keys.float().transpose(1, 2) * softmax_scale
        logits = logits_softcap * torch.tanh(logits / logits_softcap)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        result = (torch.softmax(logits, -1) @ values.float()).to(q.dtype)
    else:
        result = F.scaled_dot_product_attention(packed[None], keys[None], values[None], mask, scale=softmax_scale)[0]
    return result.reshape(num_kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def _attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    sliding_window: int,
    logits_softcap: float,
) -> None:
    starts = query_start_loc.tolist()
    reference_attention(
        q, k_cache, v_cache, block_table, seq_lens, starts, out, softmax_scale, sliding_window, logits_softcap
    )


_attention_reference_op: Any = define_op(
    "attention_reference(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor(a!) out, float softmax_scale, int sliding_window, float logits_softcap) -> ()",
    triton_impl=_attention_reference,  # plain torch on every device
    reference=_attention_reference,
)


def attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    sliding_window: int = 0,
    logits_softcap: float = 0.0,
) -> None:
    """Causal attention of packed new tokens to their rows' pages, in plain torch.

    q, out             [padded_tokens, num_q_heads, head_dim]                  fp16, bf16 or fp32; out is written
    k_cache, v_cache   [num_pages, page_size, num_kv_heads, head_dim]          dtype of q; any strides, the last one 1
    block_table        [padded_reqs, max_pages]                                int32
    seq_lens           [padded_reqs]  including the new tokens; 0: zeros       int32
    query_start_loc    [padded_reqs + 1]  tokens from its last value on: zeros int32
    sliding_window     positions that a token sees, itself included; 0: all
    logits_softcap     cap * tanh(logits / cap); 0.0: off

    Capture-safe: on CPU, where the op tape sees one op. Not on CUDA: it reads lengths on the host.

    Raises: ShapeError.
    """
    check_attention_arguments(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logits_softcap=logits_softcap,
    )
    check_tensor("query_start_loc", query_start_loc, shape=(seq_lens.shape[0] + 1,), dtype=torch.int32, device=q.device)
    check_unit_stride("query_start_loc", query_start_loc)
    _attention_reference_op(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        softmax_scale,
        sliding_window,
        logits_softcap,
    )
