"""Attention of prefills in plain torch, one query tile of the schedule after another. Runs on CPU tensors."""

from __future__ import annotations

import torch

from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.attention.prompt_call import PromptCall
from graphrt.kernels.attention.prompt_plan import Q_TILE_WORDS


def prompt_reference(call: PromptCall) -> None:
    """Compute in float32 what the kernels compute."""
    for index in range(1, 1 + int(call.schedule[0])):
        words: list[int] = call.schedule[index * Q_TILE_WORDS : (index + 1) * Q_TILE_WORDS].tolist()
        req, first_query, first_token, query_len, seq_len, kv_start, *_ = words
        num_queries_per_kv = call.plan.num_queries_per_kv
        queries = torch.arange(
            first_query, min(first_query + call.plan.block_m, query_len * num_queries_per_kv), device="cpu"
        )
        positions = seq_len - query_len + queries // num_queries_per_kv
        begin = max(0, int(positions[0]) - call.left)
        end = max(begin, min(seq_len, int(positions[-1]) + call.right + 1))
        keys, values = (_gather(call, cache, req, kv_start, begin, end) for cache in (call.k, call.v))
        where = torch.arange(begin, end, device="cpu") - positions[:, None]
        _attend(
            call, req, first_token + queries // num_queries_per_kv, queries % num_queries_per_kv, keys, values, where
        )


def _gather(call: PromptCall, cache: torch.Tensor, req: int, kv_start: int, begin: int, end: int) -> torch.Tensor:
    """Return keys or values of positions begin to end, [positions, num_kv_heads, head_dim]."""
    if call.block_table is None:
        return cache[kv_start + begin : kv_start + end]
    size = cache.shape[1]
    pages = call.block_table[max(req, 0), begin // size : -(-end // size)]
    first = begin // size * size
    return cache.index_select(0, pages).flatten(0, 1)[begin - first : end - first]


def _attend(
    call: PromptCall,
    req: int,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    distance: torch.Tensor,
) -> None:
    """Attend with the queries of one query tile, per KV head; `distance` is a key's position minus the query's."""
    options, num_queries_per_kv = call.options, call.plan.num_queries_per_kv
    visible = (distance >= -call.left) & (distance <= call.right)
    for kv_head in range(call.plan.num_kv_heads):
        at = (tokens, kv_head * num_queries_per_kv + heads)
        k, v = (
            _dequantised(x[:, kv_head], scale, kv_head)
            for x, scale in ((keys, options.k_scale), (values, options.v_scale))
        )
        logits = call.q[at].float() @ k.T * options.softmax_scale
        if options.logits_softcap:
            logits = options.logits_softcap * torch.tanh(logits / options.logits_softcap)
        if options.alibi_slopes is not None:
            far = distance.abs().float()
            logits -= options.alibi_slopes[at[1], None] * (far.sqrt() if options.alibi_sqrt else far)
        logits.masked_fill_(~visible, float("-inf"))
        if options.sinks is not None and req >= 0:
            logits = torch.cat([logits, options.sinks[at[1], None]], 1)
        lse = torch.logsumexp(logits, 1)
        if call.lse is not None:
            call.lse[at] = lse
        top = logits.amax(1, keepdim=True) if logits.shape[1] else torch.zeros(len(tokens), 1, device="cpu")
        weights = (logits - top).exp().masked_fill_(top == float("-inf"), 0.0)
        total = weights.sum(1, keepdim=True)
        result = weights[:, : len(v)] @ v / torch.where(total == 0, 1.0, total)
        call.out[at] = result.to(call.out.dtype)


def _dequantised(stored: torch.Tensor, scale: torch.Tensor | None, kv_head: int) -> torch.Tensor:
    if stored.dtype not in FP8_DTYPES or scale is None:
        return stored.float()
    return stored.float() * scale[kv_head if scale.shape[0] > 1 else 0]
