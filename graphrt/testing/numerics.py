"""Assert that tensors are equal or close, and compute attention by its definition as a reference."""

from __future__ import annotations

import torch

ERROR_FACTOR = 2.0
ERROR_FLOOR = 1e-5

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Signed integers by size in bytes."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's elements as signed integers of the same size."""
    return tensor.view(INTEGERS[tensor.element_size()])


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, *, name: str = "tensor") -> None:
    """Assert that two tensors have the same bits. A NaN equals the same NaN; 0.0 differs from -0.0.

    Raises:
        AssertionError: with the coordinate and both values of the first element that differs.
    """
    _check_alike(actual, expected, name, same_dtype=True)
    have, want = actual.detach().cpu(), expected.detach().cpu()
    differs = bits_of(have) != bits_of(want)
    if not differs.any():
        return
    at, count = first_index(differs), int(differs.sum())
    raise AssertionError(
        f"{name}: expected equal bits, but {count} of {differs.numel()} elements differ; the first is at {at}: "
        f"got {have[at].item()!r} ({_hex(have[at])}), expected {want[at].item()!r} ({_hex(want[at])})"
    )


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, atol: float, rtol: float = 0.0, name: str = "tensor"
) -> None:
    """Assert |actual - expected| <= atol + rtol * |expected|, and equal positions of NaN and infinities.

    The comparison is in float64, so the dtypes may differ.

    Raises:
        AssertionError: with the first element that is NaN or infinite in only one tensor, or with the largest error.
    """
    _check_alike(actual, expected, name, same_dtype=False)
    have, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    both_finite = have.isfinite() & want.isfinite()
    same_kind = both_finite | (have == want) | (have.isnan() & want.isnan())
    if not same_kind.all():
        at, count = first_index(~same_kind), int((~same_kind).sum())
        raise AssertionError(
            f"{name}: expected NaN and infinities in the same places, but {count} of {have.numel()} elements differ; "
            f"the first is at {at}: got {have[at].item()}, expected {want[at].item()}"
        )
    excess = torch.where(both_finite, (have - want).abs() - (atol + rtol * want.abs()), -1.0)
    if have.numel() and excess.max() > 0:
        at, count = first_index(excess == excess.max()), int((excess > 0).sum())
        raise AssertionError(
            f"{name}: expected an error of at most {atol:g} + {rtol:g} x |expected|, but {count} of {have.numel()} "
            f"elements exceed it; the largest is at {at}: got {have[at].item()}, expected {want[at].item()}, "
            f"error {abs(have[at].item() - want[at].item()):.3g}"
        )


def error_bound(plain: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error bound of a kernel, which is twice the error of plain torch in its dtype, plus 1e-5.

    plain   any shape, the kernel's dtype   result of plain torch
    exact   same shape, float64             result in float64 for the same rounded inputs
    """
    _check_alike(plain, exact, "plain", same_dtype=False)
    if exact.dtype != torch.float64:
        raise AssertionError(f"exact: expected a float64 tensor, got {exact.dtype}; compute the oracle in float64")
    plain, exact = plain.detach().cpu().double(), exact.detach().cpu()
    error = torch.where(plain == exact, 0.0, (plain - exact).abs())  # the difference of equal infinities is NaN
    if not error.isfinite().all():
        raise AssertionError(f"plain: expected finite results, got {plain[first_index(~error.isfinite())].item()}")
    return ERROR_FACTOR * (error.max().item() if error.numel() else 0.0) + ERROR_FLOOR


def assert_accurate(actual: torch.Tensor, *, plain: torch.Tensor, exact: torch.Tensor, name: str = "tensor") -> None:
    """Assert that `actual` is within `error_bound` of `exact`."""
    assert_close(actual, exact, atol=error_bound(plain, exact), name=name)


def keys_seen(
    query_len: int,
    seq_len: int,
    causal: bool = True,
    sliding_window: int = 0,
    attention_chunk_size: int = 0,
    tree_masks: torch.Tensor | None = None,
    kv_limits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mask of the keys that each of a sequence's last tokens sees, [query_len, seq_len] bool on the CPU.

    0 disables window and chunks. A window contains the keys at a distance below its size, on both sides unless
    `causal`. The token at position p sees only keys of its chunk, starting at p // attention_chunk_size *
    attention_chunk_size. `tree_masks` [query_len] int64 and `kv_limits` [query_len] int32 are those
    of AttentionOptions.
    """
    at = torch.arange(seq_len - query_len, seq_len, device="cpu")[:, None]
    where = torch.arange(seq_len, device="cpu")
    seen = where <= at if causal else torch.ones(query_len, seq_len, dtype=torch.bool, device="cpu")
    if tree_masks is not None:
        in_step = tree_masks.cpu()[:, None] >> torch.arange(query_len, device="cpu") & 1
        seen[:, seq_len - query_len :] = in_step > 0
        at = seq_len - query_len + in_step.sum(1, keepdim=True) - 1
    if kv_limits is not None:
        seen = where < kv_limits.cpu()[:, None]
    if sliding_window:
        seen = seen & ((where - at).abs() < sliding_window)
    if attention_chunk_size:
        seen = seen & (where >= at // attention_chunk_size * attention_chunk_size)
    return seen


def attention_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    sliding_window: int = 0,
    attention_chunk_size: int = 0,
    logits_softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    alibi_sqrt: bool = False,
    sinks: torch.Tensor | None = None,
    tree_masks: torch.Tensor | None = None,
    kv_limits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one sequence by definition, on the CPU in `dtype`. Returns out and lse.

    q              [query_len, num_q_heads, head_dim]     any dtype   token i is at position seq_len - query_len + i
    k              [seq_len, num_kv_heads, head_dim]      any dtype   dequantized, finite; consecutive query heads
                                                                      share a KV head
    v              [seq_len, num_kv_heads, v_head_dim]    any dtype   like k
    alibi_slopes   [num_q_heads]                          any dtype   like sinks; options as in AttentionOptions
    out            [query_len, num_q_heads, v_head_dim]   dtype       zeros for tokens that see nothing
    lse            [query_len, num_q_heads]               dtype       natural log of the denominator; -inf if it is 0
    """
    q, k, v = (x.detach().cpu().to(dtype) for x in (q, k, v))
    query_len, seq_len, num_kv_heads = q.shape[0], k.shape[0], k.shape[1]
    at, where = torch.arange(seq_len - query_len, seq_len, device="cpu")[:, None], torch.arange(seq_len, device="cpu")
    seen = keys_seen(query_len, seq_len, causal, sliding_window, attention_chunk_size, tree_masks, kv_limits)
    by_kv_head = q.unflatten(1, (num_kv_heads, -1))  # [tokens, KV heads, group, head_dim]
    logits = softmax_scale * torch.einsum("tkgd,skd->tkgs", by_kv_head, k).flatten(1, 2)
    if logits_softcap:
        logits = logits_softcap * torch.tanh(logits / logits_softcap)
    if alibi_slopes is not None:
        distance = (at - where).abs().to(dtype)
        distance = distance.sqrt() if alibi_sqrt else distance
        logits = logits - alibi_slopes.detach().cpu().to(dtype)[:, None] * distance[:, None]
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        extra = sinks.detach().cpu().to(dtype)[None, :, None].expand(query_len, -1, -1)
        logits = torch.cat((logits, extra), dim=2)
    # The softmax of a token that sees nothing is NaN. NaN in the inputs must still reach the result.
    weights = torch.where(seen[:, None], torch.softmax(logits, 2)[..., :seq_len], 0.0)
    out = torch.einsum("tkgs,skd->tkgd", weights.unflatten(1, (num_kv_heads, -1)), v)
    return out.flatten(1, 2), torch.logsumexp(logits, 2)


def _check_alike(actual: torch.Tensor, expected: torch.Tensor, name: str, *, same_dtype: bool) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {list(expected.shape)}, got {list(actual.shape)}")
    if same_dtype and actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: expected dtype {expected.dtype}, got {actual.dtype}")


def first_index(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the coordinate of the first true element."""
    return tuple(mask.nonzero()[0].tolist())


def _hex(scalar: torch.Tensor) -> str:
    size = scalar.element_size()
    return f"0x{bits_of(scalar).item() % (1 << 8 * size):0{2 * size}x}"
