"""Attention with every option in plain torch, one request after another. Runs on CPU, and eagerly on CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from graphrt.kernels.attention.arguments import check_attention_tensors, check_contiguous_tensors
from graphrt.kernels.attention.options import FP8_DTYPES, AttentionOptions
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.op_declaration import DeclaredOp, Written


def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: Sequence[int],
    out: torch.Tensor,
    options: AttentionOptions,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend over the paged cache. `query_starts` are host values; tokens from the last one on are padding."""
    page_size = k_cache.shape[1]
    for req, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_starts[req], query_starts[req + 1]
        if start == end:
            continue
        # Positions before the first one seen are not read: their pages may belong to another request by now.
        first_seen = _first_seen(end - start, seq_len, options)
        first_page = first_seen // page_size
        pages = block_table[req, first_page : -(-seq_len // page_size)]
        base = first_page * page_size
        keys, values = (
            cache.index_select(0, pages).flatten(0, 1)[first_seen - base : seq_len - base]
            for cache in (k_cache, v_cache)
        )
        _attend_req(q, keys, values, start, end, seq_len, out, options, lse)
    _write_padding(query_starts[-1], out, lse)


def reference_contiguous_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_starts: Sequence[int],
    query_starts: Sequence[int],
    out: torch.Tensor,
    options: AttentionOptions,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend to packed keys and values [kv_tokens, num_kv_heads, *]; otherwise as `reference_attention`."""
    for req in range(len(query_starts) - 1):
        start, end = query_starts[req], query_starts[req + 1]
        kv_end = kv_starts[req + 1]
        seq_len = kv_end - kv_starts[req]
        kv_begin = kv_starts[req] + _first_seen(end - start, seq_len, options)
        _attend_req(q, k[kv_begin:kv_end], v[kv_begin:kv_end], start, end, seq_len, out, options, lse)
    _write_padding(query_starts[-1], out, lse)


def _attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: Sequence[int],
    out: torch.Tensor,
    options: AttentionOptions,
    window: int,
    lse: torch.Tensor | None,
) -> None:
    """Attend from each packed request to itself, at distances below `window`; 0: all."""
    for start, end in itertools.pairwise(starts):
        at = torch.arange(end - start, device=q.device)
        near = (at[:, None] - at).abs() < window if window else None
        _attend_req(q, k[start:end], v[start:end], start, end, end - start, out, options, lse, near)
    _write_padding(starts[-1], out, lse)


def _first_seen(query_len: int, seq_len: int, options: AttentionOptions) -> int:
    """Return the first position that any new token of the request sees, which is that of its first token."""
    position = max(0, seq_len - query_len)
    if options.attention_chunk_size:
        return position // options.attention_chunk_size * options.attention_chunk_size
    return max(0, seq_len - query_len + 1 - options.sliding_window) if options.sliding_window else 0


def _write_padding(start: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out[start:].zero_()
    if lse is not None:
        lse[start:].fill_(float("-inf"))


def _attend_req(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    end: int,
    seq_len: int,
    out: torch.Tensor,
    options: AttentionOptions,
    lse: torch.Tensor | None,
    near: torch.Tensor | None = None,
) -> None:
    """Compute tokens start to end of out and lse. `keys` and `values` [positions, num_kv_heads, *] end at seq_len.

    near   [tokens, positions]  the positions that a token sees, without options.causal; None: all
    """
    # With causal attention tokens before position 0 see no key. Otherwise all tokens see keys, or none do.
    blind = end - start if seq_len == 0 else max(0, end - start - seq_len) if options.causal else 0
    out[start : start + blind].zero_()
    if lse is not None:
        lse[start : start + blind] = float("-inf") if options.sinks is None else options.sinks
    start += blind
    if start == end:
        return
    dtype = q.dtype
    # A copy: matrix products may round by the alignment of their operands, and so by the request's position in q.
    q = q[start:end].clone()
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if keys.dtype in FP8_DTYPES:
        q = q.float()
        keys, values = _dequantised(keys, options.k_scale), _dequantised(values, options.v_scale)
    query_len, num_q_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    # The query heads that share a KV head are grouped, so that K and V need not be repeated.
    by_head = q.reshape(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    queries = by_head.reshape(num_kv_heads, -1, head_dim)
    num_queries_per_kv = num_q_heads // num_kv_heads
    mask = _mask(query_len, seq_len, keys.shape[1], q.device, options) if near is None else near
    if lse is None and not _needs_logits(options):
        mask = None if mask is None else mask.repeat(num_queries_per_kv, 1)
        scale = options.softmax_scale
        result = F.scaled_dot_product_attention(queries[None], keys[None], values[None], mask, scale=scale)[0]
    else:
        logits = (queries.float() @ keys.float().transpose(1, 2)).unflatten(1, (num_queries_per_kv, query_len))
        _finish_logits(logits, mask, seq_len, options)
        # Subtract the largest logit first: exp(logits - lse) would carry the rounding error of a large lse.
        top = logits.amax(-1, keepdim=True)
        if options.sinks is not None:
            sinks = options.sinks.view(num_kv_heads, num_queries_per_kv, 1, 1)
            top = torch.maximum(top, sinks)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if options.sinks is not None:
            total += (sinks - top).exp()
        result = weights.flatten(1, 2) @ values.float() / total.flatten(1, 2)
        if lse is not None:
            lse[start:end] = (top + total.log()).flatten(0, 1).squeeze(-1).t()
    by_token = result.reshape(num_kv_heads, num_queries_per_kv, query_len, -1).permute(2, 0, 1, 3)
    out[start:end] = by_token.flatten(1, 2).to(dtype)


def _needs_logits(options: AttentionOptions) -> bool:
    """Return whether an option is missing in torch's scaled_dot_product_attention, which is much faster on CPU."""
    return options.logits_softcap > 0 or options.alibi_slopes is not None or options.sinks is not None


def _dequantised(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return fp8 `stored` [num_kv_heads, positions, D] times its scale [1] or [num_kv_heads], in float32."""
    return stored.float() if scale is None else stored.float() * scale[:, None, None]


def _mask(
    query_len: int, seq_len: int, num_positions: int, device: torch.device, options: AttentionOptions
) -> torch.Tensor | None:
    """Return which of the last `num_positions` positions each token sees [query_len, num_positions]; None: all."""
    if query_len == 1 or not options.causal:
        return None
    distance = _distance(query_len, seq_len, num_positions, device)
    mask = distance >= 0
    if options.sliding_window:
        mask &= distance < options.sliding_window
    if options.attention_chunk_size:
        at = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
        mask &= distance <= at % options.attention_chunk_size
    return mask


def _distance(query_len: int, seq_len: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """Return the position of each token minus that of each key [query_len, num_positions]."""
    positions = torch.arange(seq_len - num_positions, seq_len, device=device)
    return torch.arange(seq_len - query_len, seq_len, device=device)[:, None] - positions


def _finish_logits(logits: torch.Tensor, mask: torch.Tensor | None, seq_len: int, options: AttentionOptions) -> None:
    """Turn q . k [num_kv_heads, num_queries_per_kv, query_len, positions] into logits in place."""
    num_kv_heads, num_queries_per_kv, query_len, num_positions = logits.shape
    logits *= options.softmax_scale
    if options.logits_softcap:
        logits.div_(options.logits_softcap).tanh_().mul_(options.logits_softcap)
    if options.alibi_slopes is not None:
        distance = _distance(query_len, seq_len, num_positions, logits.device).abs().float()
        slopes = options.alibi_slopes.view(num_kv_heads, num_queries_per_kv, 1, 1)
        logits -= slopes * (distance.sqrt() if options.alibi_sqrt else distance)
    if mask is not None:
        logits.masked_fill_(~mask, float("-inf"))


@dataclass(frozen=True, slots=True)
class _ReferenceCall:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: Written
    lse: Written | None
    options: AttentionOptions


def _run_reference(call: _ReferenceCall) -> None:
    query_starts = call.query_start_loc.tolist()
    reference_attention(
        call.q, call.k_cache, call.v_cache, call.block_table, call.seq_lens, query_starts, call.out, call.options,
        call.lse,
    )  # fmt: skip


_reference = DeclaredOp(
    "attention_reference",
    _ReferenceCall,
    triton_impl=_run_reference,  # plain torch on every device
    reference=_run_reference,
)


def attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    options: AttentionOptions,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend from packed new tokens to the pages of their requests, in plain torch.

    q                  [padded_tokens, num_q_heads, head_dim]                  fp16, bf16 or fp32
    k_cache            [num_pages, page_size, num_kv_heads, head_dim]          dtype of q, or fp8; any strides, last 1
    v_cache            [num_pages, page_size, num_kv_heads, v_head_dim]        as k_cache
    out                [padded_tokens, num_q_heads, v_head_dim]                dtype of q, written
    block_table        [padded_reqs, max_pages]                                int32
    seq_lens           [padded_reqs]  including the new tokens; 0: zeros       int32
    query_start_loc    [padded_reqs + 1]  tokens from its last value on: zeros int32
    lse                [padded_tokens, num_q_heads]  natural log of the softmax's denominator, sinks included   float32,
                       written. -inf for padding tokens, and without sinks for tokens that see no key

    Capture-safe: on CPU, where the op trace records one op. Not on CUDA: it reads lengths on the host.

    Raises: ShapeError.
    """
    check_attention_tensors(q, k_cache, v_cache, block_table, seq_lens, out, options, lse)
    check_tensor("query_start_loc", query_start_loc, shape=(seq_lens.shape[0] + 1,), dtype=torch.int32, device=q.device)
    check_unit_stride("query_start_loc", query_start_loc)
    _reference(_ReferenceCall(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse, options))


@dataclass(frozen=True, slots=True)
class _EncoderCall:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    query_start_loc: torch.Tensor
    out: Written
    lse: Written | None
    window: int
    options: AttentionOptions


def _run_encoder(call: _EncoderCall) -> None:
    starts = call.query_start_loc.tolist()
    _attend_packed(call.q, call.k, call.v, starts, call.out, call.options, call.window, call.lse)


_encoder = DeclaredOp(
    "encoder_reference",
    _EncoderCall,
    triton_impl=_run_encoder,  # plain torch on every device
    reference=_run_encoder,
)


def encoder_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    options: AttentionOptions,
    *,
    window: int = 0,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend from packed requests to themselves, in both directions, in plain torch.

    k, v      [padded_tokens, num_kv_heads, *]   dtype of q, of the same tokens
    options   without causal
    window    a token sees tokens at a distance below it; 0: all

    The other arguments are those of `attention_reference`; capture-safe under the same conditions.

    Raises: ShapeError.
    """
    check_contiguous_tensors(q, k, v, query_start_loc, query_start_loc, out, options, lse)
    _encoder(_EncoderCall(q, k, v, query_start_loc, out, lse, window, options))
