"""Attention with every option in plain torch, row by row. Serves CPU, and eager CUDA."""

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
    """Loop over the rows of the paged cache. `query_starts` are host values; tokens from the last one on are pads."""
    page_size = k_cache.shape[1]
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_starts[row], query_starts[row + 1]
        if start == end:
            continue
        # Nothing before the first position seen is read: its pages may have been given to another row.
        first_seen = _first_seen(end - start, seq_len, options)
        first_page = first_seen // page_size
        pages = block_table[row, first_page : -(-seq_len // page_size)]
        base = first_page * page_size
        keys, values = (
            cache.index_select(0, pages).flatten(0, 1)[first_seen - base : seq_len - base]
            for cache in (k_cache, v_cache)
        )
        _attend_row(q, keys, values, start, end, seq_len, out, options, lse)
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
    """Loop over rows whose keys and values lie packed in k, v [kv_tokens, num_kv_heads, *]; else as above."""
    for row in range(len(query_starts) - 1):
        start, end = query_starts[row], query_starts[row + 1]
        kv_end = kv_starts[row + 1]
        seq_len = kv_end - kv_starts[row]
        kv_begin = kv_starts[row] + _first_seen(end - start, seq_len, options)
        _attend_row(q, k[kv_begin:kv_end], v[kv_begin:kv_end], start, end, seq_len, out, options, lse)
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
    """Loop over rows that see themselves, up to a distance below `window`; 0: all."""
    for start, end in itertools.pairwise(starts):
        at = torch.arange(end - start, device=q.device)
        near = (at[:, None] - at).abs() < window if window else None
        _attend_row(q, k[start:end], v[start:end], start, end, end - start, out, options, lse, near)
    _write_padding(starts[-1], out, lse)


def _first_seen(query_len: int, seq_len: int, options: AttentionOptions) -> int:
    """The first position that any of the row's new tokens sees: what its first token sees."""
    position = max(0, seq_len - query_len)
    if options.attention_chunk_size:
        return position // options.attention_chunk_size * options.attention_chunk_size
    return max(0, seq_len - query_len + 1 - options.sliding_window) if options.sliding_window else 0


def _write_padding(start: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out[start:].zero_()
    if lse is not None:
        lse[start:].fill_(float("-inf"))


def _attend_row(
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
    """Tokens start to end of q, out and lse. `keys` and `values` [positions, num_kv_heads, *] end at seq_len.

    near   [tokens, positions]  which positions a token sees, without options.causal; None: all
    """
    # Tokens before position 0, which causal attention leaves nothing to see; without it, all or none.
    blind = end - start if seq_len == 0 else max(0, end - start - seq_len) if options.causal else 0
    out[start : start + blind].zero_()
    if lse is not None:
        lse[start : start + blind] = float("-inf") if options.sinks is None else options.sinks
    start += blind
    if start == end:
        return
    dtype = q.dtype
    # A copy, because matrix products may round by the alignment of their operands, and so by where the row lies.
    q = q[start:end].clone()
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if keys.dtype in FP8_DTYPES:
        q = q.float()
        keys, values = _dequantised(keys, options.k_scale), _dequantised(values, options.v_scale)
    query_len, num_q_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    # The query heads that share a KV head are put together, so that K and V need not be repeated.
    by_head = q.reshape(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    queries = by_head.reshape(num_kv_heads, -1, head_dim)
    group = num_q_heads // num_kv_heads
    mask = _mask(query_len, seq_len, keys.shape[1], q.device, options) if near is None else near
    if lse is None and not _needs_logits(options):
        mask = None if mask is None else mask.repeat(group, 1)
        scale = options.softmax_scale
        result = F.scaled_dot_product_attention(queries[None], keys[None], values[None], mask, scale=scale)[0]
    else:
        logits = (queries.float() @ keys.float().transpose(1, 2)).unflatten(1, (group, query_len))
        _finish_logits(logits, mask, seq_len, options)
        # The largest is subtracted first: exp(logits - lse) would carry the rounding error of a large lse.
        top = logits.amax(-1, keepdim=True)
        if options.sinks is not None:
            sinks = options.sinks.view(num_kv_heads, group, 1, 1)
            top = torch.maximum(top, sinks)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if options.sinks is not None:
            total += (sinks - top).exp()
        result = weights.flatten(1, 2) @ values.float() / total.flatten(1, 2)
        if lse is not None:
            lse[start:end] = (top + total.log()).flatten(0, 1).squeeze(-1).t()
    by_token = result.reshape(num_kv_heads, group, query_len, -1).permute(2, 0, 1, 3)
    out[start:end] = by_token.flatten(1, 2).to(dtype)


def _needs_logits(options: AttentionOptions) -> bool:
    """Whether torch's scaled_dot_product_attention, which is several times faster on CPU, lacks one of the options."""
    return options.logits_softcap > 0 or options.alibi_slopes is not None or options.sinks is not None


def _dequantised(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """fp8 `stored` [num_kv_heads, positions, D] times its scale [1] or [num_kv_heads], in float32."""
    return stored.float() if scale is None else stored.float() * scale[:, None, None]


def _mask(
    query_len: int, seq_len: int, num_positions: int, device: torch.device, options: AttentionOptions
) -> torch.Tensor | None:
    """Which of the last `num_positions` positions each query token sees [query_len, num_positions]; None: all."""
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
    """Position of each query token minus that of each key [query_len, num_positions]."""
    positions = torch.arange(seq_len - num_positions, seq_len, device=device)
    return torch.arange(seq_len - query_len, seq_len, device=device)[:, None] - positions


def _finish_logits(logits: torch.Tensor, mask: torch.Tensor | None, seq_len: int, options: AttentionOptions) -> None:
    """Turn q . k [num_kv_heads, group, query_len, positions] into logits in place."""
    num_kv_heads, group, query_len, num_positions = logits.shape
    logits *= options.softmax_scale
    if options.logits_softcap:
        logits.div_(options.logits_softcap).tanh_().mul_(options.logits_softcap)
    if options.alibi_slopes is not None:
        distance = _distance(query_len, seq_len, num_positions, logits.device).abs().float()
        slopes = options.alibi_slopes.view(num_kv_heads, group, 1, 1)
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
    """Attention of packed new tokens to their rows' pages, in plain torch.

    q                  [padded_tokens, num_q_heads, head_dim]                  fp16, bf16 or fp32
    k_cache            [num_pages, page_size, num_kv_heads, head_dim]          dtype of q, or fp8; any strides, last 1
    v_cache            [num_pages, page_size, num_kv_heads, v_head_dim]        as k_cache
    out                [padded_tokens, num_q_heads, v_head_dim]                dtype of q, written
    block_table        [padded_reqs, max_pages]                                int32
    seq_lens           [padded_reqs]  including the new tokens; 0: zeros       int32
    query_start_loc    [padded_reqs + 1]  tokens from its last value on: zeros int32
    lse                [padded_tokens, num_q_heads]  natural log of the softmax's denominator, sinks included; -inf
                       where nothing is added up, and in tokens from query_start_loc's last value on   float32, written

    Capture-safe: on CPU, where the op trace sees one op. Not on CUDA: it reads lengths on the host.

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
    """Attention of packed rows to themselves, on both sides of a token, in plain torch.

    k, v      [padded_tokens, num_kv_heads, *]   dtype of q, of the same tokens
    options   without causal
    window    a token sees those at a distance below it; 0: all

    The others are those of `attention_reference`; capture-safe where it is.

    Raises: ShapeError.
    """
    check_contiguous_tensors(q, k, v, query_start_loc, query_start_loc, out, options, lse)
    _encoder(_EncoderCall(q, k, v, query_start_loc, out, lse, window, options))
