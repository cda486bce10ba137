"""Attention with all options in plain torch, one request at a time. Runs on CPU, and eagerly on CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from graphrt.kernels.attention.arguments import check_contiguous_tensors, check_paged_tensors
from graphrt.kernels.attention.call import AttentionCall
from graphrt.kernels.attention.options import FP8_DTYPES, MAX_WINDOW, AttentionOptions, check_options
from graphrt.kernels.attention.prompt_call import PromptCall
from graphrt.kernels.attention.prompt_plan import Q_TILE_WORDS
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.op_declaration import DeclaredOp, Written

_Tensors = tuple[torch.Tensor, torch.Tensor]
_KeysAndValues = Callable[[int, int, int], _Tensors]
"""Returns the keys and values [positions, num_kv_heads, *] of a request in a range of positions."""


@dataclass(frozen=True, slots=True)
class _ReferenceCall:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    out: Written
    lse: Written | None
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class _EncoderCall:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    out: Written
    lse: Written | None
    window: int
    options: AttentionOptions


_Call = AttentionCall | PromptCall | _ReferenceCall | _EncoderCall


def reference_attention(call: AttentionCall | _ReferenceCall) -> None:
    """Attend over the paged cache or over contiguous K and V, reading the lengths on the host."""
    query_len = call.plan.shape.query_len if isinstance(call, AttentionCall) else 0
    starts = list(range(0, call.q.shape[0] + 1, query_len)) if call.starts is None else call.starts.tolist()
    if call.seq_lens is None:
        kv_starts = call.table.tolist()
        seq_lens = [end - begin for begin, end in itertools.pairwise(kv_starts)]
        keys_and_values = _packed(call.k, call.v, kv_starts)
    else:
        seq_lens = call.seq_lens.tolist()
        keys_and_values = _paged(call.k, call.v, call.table)
    _attend(call, zip(starts, starts[1:], seq_lens, strict=False), keys_and_values, *call.options.reach)
    _write_padding(call, starts[-1])


def reference_encoder(call: _EncoderCall) -> None:
    """Attend from each packed request to itself, at distances below `window` (0: at all distances)."""
    starts, reach = call.starts.tolist(), call.window - 1 if call.window else MAX_WINDOW
    reqs = ((start, end, end - start) for start, end in itertools.pairwise(starts))
    _attend(call, reqs, _packed(call.k, call.v, starts), reach, reach)
    _write_padding(call, starts[-1])


def reference_prompts(call: PromptCall) -> None:
    """Attend from the requests in the schedule of `schedule_prompt`."""
    q_tiles = call.schedule.view(-1)[Q_TILE_WORDS : Q_TILE_WORDS * (1 + int(call.schedule[0]))].view(-1, Q_TILE_WORDS)
    reqs: dict[int, list[int]] = {req: words for req, _, *words in q_tiles[:, :6].tolist()}
    first_token, *_ = reqs.pop(-1, [call.plan.num_tokens])
    if call.block_table is None:
        keys_and_values = _packed(call.k, call.v, [words[3] for words in reqs.values()])
    else:
        keys_and_values = _paged(call.k, call.v, call.block_table[list(reqs)])
    spans = ((start, start + query_len, seq_len) for start, query_len, seq_len, _ in reqs.values())
    _attend(call, spans, keys_and_values, call.left, call.right)
    _write_padding(call, first_token)


def _paged(k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor) -> _KeysAndValues:
    page_size = k_cache.shape[1]

    def gather(req: int, begin: int, end: int) -> _Tensors:
        pages = block_table[req, begin // page_size : -(-end // page_size)]
        base = begin // page_size * page_size
        keys, values = (
            cache.index_select(0, pages).flatten(0, 1)[begin - base : end - base] for cache in (k_cache, v_cache)
        )
        return keys, values

    return gather


def _packed(k: torch.Tensor, v: torch.Tensor, kv_starts: list[int]) -> _KeysAndValues:
    def cut(req: int, begin: int, end: int) -> _Tensors:
        part = slice(kv_starts[req] + begin, kv_starts[req] + end)
        return k[part], v[part]

    return cut


def _attend(
    call: _Call, reqs: Iterable[tuple[int, int, int]], keys_and_values: _KeysAndValues, left: int, right: int
) -> None:
    """Attend from tokens start to end of each request, given its seq_len."""
    chunk = call.options.attention_chunk_size
    for req, (start, end, seq_len) in enumerate(reqs):
        if start < end:
            # Do not read positions before the first one seen, because another request may own their pages by now.
            position = seq_len - end + start
            first_seen = max(0, position) // chunk * chunk if chunk else max(0, position - left)
            keys, values = keys_and_values(req, first_seen, seq_len)
            _attend_req(call, keys, values, start, end, seq_len, left, right)


def _write_padding(call: _Call, start: int) -> None:
    call.out[start:].zero_()
    if call.lse is not None:
        call.lse[start:].fill_(float("-inf"))


def _attend_req(
    call: _Call,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    end: int,
    seq_len: int,
    left: int,
    right: int,
) -> None:
    """Compute tokens start to end of out and lse. `keys` and `values` [positions, num_kv_heads, *] end at seq_len.

    left, right   a token at position p sees positions p - left to p + right
    """
    out, lse, options = call.out, call.lse, call.options
    # The first tokens may see no key, because they precede position 0 by more than `right`.
    blind = end - start if seq_len == 0 else max(0, end - start - seq_len - right)
    out[start : start + blind].zero_()
    if lse is not None:
        lse[start : start + blind] = float("-inf") if options.sinks is None else options.sinks
    start += blind
    if start == end:
        return
    # Copy q, because rounding in matrix products may depend on alignment, and so on the request's place in q.
    q = call.q[start:end].clone()
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if keys.dtype in FP8_DTYPES:
        q = q.float()
        keys, values = _dequantized(keys, options.k_scale), _dequantized(values, options.v_scale)
    query_len, num_q_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    # Group query heads that share a KV head, so that K and V need not be repeated.
    by_head = q.reshape(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    queries = by_head.reshape(num_kv_heads, -1, head_dim)
    num_queries_per_kv = num_q_heads // num_kv_heads
    tokens = torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
    mask = None
    if options.tree_masks is not None:
        mask = _tree_mask(options.tree_masks[start:end], keys.shape[1], left)
    elif options.kv_limits is not None:
        mask = torch.arange(seq_len, device=q.device) < options.kv_limits[start:end, None]
    elif query_len > 1 and min(left, right) < MAX_WINDOW:
        distance = _distance(tokens, keys)
        mask = (distance <= left) & (distance >= -right)
        if options.attention_chunk_size:
            mask &= distance <= tokens % options.attention_chunk_size
    if lse is None and not _needs_logits(options):
        mask = None if mask is None else mask.repeat(num_queries_per_kv, 1)
        scale = options.softmax_scale
        result = F.scaled_dot_product_attention(queries[None], keys[None], values[None], mask, scale=scale)[0]
    else:
        logits = (queries.float() @ keys.float().transpose(1, 2)).unflatten(1, (num_queries_per_kv, query_len))
        logits *= options.softmax_scale
        if options.logits_softcap:
            logits.div_(options.logits_softcap).tanh_().mul_(options.logits_softcap)
        if options.alibi_slopes is not None:
            distance = _distance(tokens, keys).abs().float()
            slopes = options.alibi_slopes.view(num_kv_heads, num_queries_per_kv, 1, 1)
            logits -= slopes * (distance.sqrt() if options.alibi_sqrt else distance)
        if mask is not None:
            logits.masked_fill_(~mask, float("-inf"))
        # Subtract the largest logit first, because exp(logits - lse) would include the rounding error of a large lse.
        top = logits.amax(-1, keepdim=True)
        if options.sinks is not None:
            sinks = options.sinks.view(num_kv_heads, num_queries_per_kv, 1, 1)
            top = torch.maximum(top, sinks)
        top = top.where(top != float("-inf"), 0.0)  # -inf if a token sees no key
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if options.sinks is not None:
            total += (sinks - top).exp()
        result = weights.flatten(1, 2) @ values.float() / total.where(total != 0.0, 1.0).flatten(1, 2)
        if lse is not None:
            lse[start:end] = (top + total.log()).flatten(0, 1).squeeze(-1).t()
    by_token = result.reshape(num_kv_heads, num_queries_per_kv, query_len, -1).permute(2, 0, 1, 3)
    out[start:end] = by_token.flatten(1, 2).to(out.dtype)


def _tree_mask(masks: torch.Tensor, num_keys: int, left: int) -> torch.Tensor:
    """Return which of the last keys each token of a tree sees, [query_len, num_keys]."""
    in_tree = masks[:, None] >> torch.arange(len(masks), device=masks.device) & 1
    distance = in_tree.sum(1, keepdim=True) - 1 + torch.arange(num_keys - len(masks), 0, -1, device=masks.device)
    return torch.cat((distance <= left, in_tree > 0), 1)


def _needs_logits(options: AttentionOptions) -> bool:
    """Return whether an option is not in torch's scaled_dot_product_attention, which is much faster on CPU."""
    tensors = options.alibi_slopes, options.sinks, options.kv_limits
    return options.logits_softcap > 0 or any(tensor is not None for tensor in tensors)


def _dequantized(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return fp8 `stored` [num_kv_heads, positions, D] times its scale [1] or [num_kv_heads], in float32."""
    return stored.float() if scale is None else stored.float() * scale[:, None, None]


def _distance(tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return each token's position [query_len, 1] minus that of each of the last keys [query_len, positions]."""
    return tokens - tokens[-1] + torch.arange(keys.shape[1] - 1, -1, -1, device=keys.device)


# Uses plain torch on every device.
_reference = DeclaredOp(
    "attention_reference", _ReferenceCall, triton_impl=reference_attention, reference=reference_attention
)
_encoder = DeclaredOp("encoder_reference", _EncoderCall, triton_impl=reference_encoder, reference=reference_encoder)


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
    v_cache            [num_pages, page_size, num_kv_heads, v_head_dim]        like k_cache
    out                [padded_tokens, num_q_heads, v_head_dim]                dtype of q, written
    block_table        [padded_reqs, max_pages]                                int32
    seq_lens           [padded_reqs]  including the new tokens; 0: zeros       int32
    query_start_loc    [padded_reqs + 1]  tokens from its last value on: zeros int32
    lse                [padded_tokens, num_q_heads]  natural log of the softmax's denominator, sinks included   float32,
                       written. -inf for padding tokens, and without sinks for tokens that see no key

    Capture-safe: on CPU, where the op trace records one op. Not on CUDA, because it reads lengths on the host.

    Raises: ShapeError.
    """
    check_paged_tensors(q, k_cache, v_cache, block_table, seq_lens, out, lse)
    check_options(options, q.shape[1], k_cache.shape[2], k_cache.dtype, q.device)
    check_tensor("query_start_loc", query_start_loc, shape=(seq_lens.shape[0] + 1,), dtype=torch.int32, device=q.device)
    check_unit_stride("query_start_loc", query_start_loc)
    _reference(_ReferenceCall(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse, options))


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
    """Compute bidirectional attention within each packed request, in plain torch.

    k, v      [padded_tokens, num_kv_heads, *]   dtype of q, for the same tokens
    options   without causal
    window    a token sees tokens at distances below this; 0: all

    The other arguments are those of `attention_reference`; capture-safe under the same conditions.

    Raises: ShapeError.
    """
    check_contiguous_tensors(q, k, v, query_start_loc, query_start_loc, out, options, lse)
    _encoder(_EncoderCall(q, k, v, query_start_loc, out, lse, window, options))
