"""Reference of `write_kv` in PyTorch."""

from __future__ import annotations

import torch


def write_kv_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Reference of `graphrt::write_kv`; see `write_kv` for the arguments."""
    table = None if cos_sin is None else cos_sin[positions]
    if table is not None or q_norm is not None:
        q.copy_(_norm_and_rotate(q, q_norm, table, norm_eps))
    k = _norm_and_rotate(k, k_norm, table, norm_eps)
    stored = slot_mapping >= 0
    pages, offsets = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
    k_cache[pages[stored], offsets[stored]] = _as_stored(k[stored], k_scale, k_cache.dtype)
    v_cache[pages[stored], offsets[stored]] = _as_stored(v[stored], v_scale, v_cache.dtype)


def _as_stored(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Convert `x` [tokens, num_kv_heads, *] to the cache dtype; for fp8, divide by the scale and saturate."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    x = x.float() if scale is None else x.float() / scale[:, None]
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _norm_and_rotate(
    x: torch.Tensor, weight: torch.Tensor | None, table: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Apply RMSNorm per head, then rotate the first dims; in float32, rounded to x's dtype after each product."""
    if weight is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x = (wide.to(x.dtype).float() * weight.float()).to(x.dtype)
    if table is None:
        return x
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), -1)
