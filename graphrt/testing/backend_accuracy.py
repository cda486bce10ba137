"""Check the accuracy of a backend. Its error against float64 must be at most twice that of torch in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.kernels.attention.options import AttentionOptions
from graphrt.testing.numerics import assert_accurate, attention_oracle, keys_seen

E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_FP8_LSE_FLOOR = 2**-10  # sums of fp8 products have about 14 bits, and queries are also rounded


@dataclass(frozen=True, slots=True)
class DenseRow:
    """One request of a step in one layer, on the host: the queries of its new tokens, and all keys and values.

    q   [query_len, num_q_heads, head_dim]
    k   [seq_len, num_kv_heads, head_dim]     dequantized; [encoder_len, ...] in a cross layer
    v   [seq_len, num_kv_heads, v_head_dim]   like k
    tree_masks  [query_len] int64, those of AttentionOptions, if the new tokens form a tree
    kv_limits   [query_len] int32, those of AttentionOptions, if each token sees only some keys
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tree_masks: torch.Tensor | None = None
    kv_limits: torch.Tensor | None = None


def random_tree(query_len: int, rng: torch.Generator) -> torch.Tensor:
    """Return the masks of tokens of which each follows a random earlier one."""
    masks = 1 << torch.arange(query_len, device="cpu")
    for token in range(1, query_len):
        masks[token] |= masks[int(torch.randint(token, (1,), generator=rng, device="cpu"))]
    return masks


def tree_depths(masks: torch.Tensor) -> torch.Tensor:
    """Return the number of ancestors of each token."""
    return (masks[:, None] >> torch.arange(len(masks), device="cpu") & 1).sum(1) - 1


def check_rows(
    name: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rows: Sequence[DenseRow],
    options: AttentionOptions,
    *,
    quantized_queries: bool,
) -> None:
    """Check that the results of packed requests are accurate, and that padding tokens have the required values.

    out      [padded_tokens, num_q_heads, v_head_dim]
    lse      [padded_tokens, num_q_heads]  float32; None if it was not requested
    rows     the requests
    options  options of the layer. The window of a non-causal layer extends to both sides
    quantized_queries   allow queries and probabilities that are rounded to e4m3

    Raises:
        AssertionError: if a result is wrong.
    """
    tokens = sum(row.q.shape[0] for row in rows)
    pads = out[tokens:]
    if not bool((pads == 0).all()):
        got = pads[pads != 0][0].item()  # NaN != 0
        raise AssertionError(f"{name}: expected zeros in padding tokens {tokens} to {len(out) - 1}, got {got:.3g}")
    if lse is not None:
        _check_lse_of_pads(name, lse[tokens:], options.sinks)
    if not rows:
        return
    exact = _packed([_oracle(row, options, torch.float64) for row in rows])
    if quantized_queries:
        plain = _packed([_oracle_in_e4m3(row, options) for row in rows])
    else:
        plain = _packed([_oracle(row, options, row.q.dtype) for row in rows])
    assert_accurate(out[:tokens], plain=plain[0].to(out.dtype), exact=exact[0], name=f"{name}: output")
    if lse is None:
        return
    if quantized_queries:
        error, bound = (lse[:tokens].double() - exact[1]).abs().max(), (plain[1] - exact[1]).abs().max()
        if not float(error) <= 2 * float(bound) + _FP8_LSE_FLOOR:  # also true for NaN
            raise AssertionError(f"{name}: log-sum-exp: expected an error of at most {2 * bound:.3g}, got {error:.3g}")
    else:
        assert_accurate(lse[:tokens], plain=plain[1], exact=exact[1], name=f"{name}: log-sum-exp")


def _check_lse_of_pads(name: str, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    good = lse == -math.inf
    if sinks is not None:
        good |= lse == sinks.cpu()
    if not bool(good.all()):
        wanted = "-inf" if sinks is None else "-inf or the sink"
        raise AssertionError(f"{name}: log-sum-exp: expected {wanted} in padding tokens, got {lse[~good][0].item()}")


def _packed(results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _oracle(row: DenseRow, options: AttentionOptions, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_oracle(
        row.q,
        row.k,
        row.v,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        sliding_window=options.sliding_window,
        attention_chunk_size=options.attention_chunk_size,
        logits_softcap=options.logits_softcap,
        alibi_slopes=options.alibi_slopes,
        alibi_sqrt=options.alibi_sqrt,
        sinks=options.sinks,
        tree_masks=row.tree_masks,
        kv_limits=row.kv_limits,
        dtype=dtype,
    )


def _oracle_in_e4m3(row: DenseRow, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in float64, except for the rounding in kernels with fp8 products.

    Queries and probabilities are rounded to e4m3, with a scale per request and KV head. Supports windows, chunks
    and sinks.
    """
    heads, (query_len, seq_len) = row.k.shape[1], (row.q.shape[0], row.k.shape[0])
    if not seq_len:  # nothing to round
        return _oracle(row, options, torch.float64)
    q = row.q.cpu().float().unflatten(1, (heads, -1))
    scale = torch.exp2(torch.ceil(torch.log2(q.abs().amax((0, 2, 3)) / _E4M3_MAX)))[:, None, None]
    rounded = ((q / scale).to(E4M3).float() * scale).double()
    logits = torch.einsum("tkgd,nkd->tkgn", rounded, row.k.double()) * options.softmax_scale
    seen = keys_seen(query_len, seq_len, options.causal, options.sliding_window, options.attention_chunk_size)
    logits, v = logits.masked_fill(~seen[:, None, None], -math.inf), row.v.double()
    if options.sinks is not None:  # an additional key with a value of zeros
        sinks = options.sinks.cpu().double().view(1, heads, -1, 1)
        logits = torch.cat([logits, sinks.expand(query_len, -1, -1, -1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 1))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    result = torch.einsum("tkgn,nkd->tkgd", weights.float().to(E4M3).double(), v) / weights.sum(-1, keepdim=True)
    return result.flatten(1, 2), torch.logsumexp(logits, -1).flatten(1)
