"""The arguments of `write_kv`, and its reference in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.op_declaration import Written


@dataclass(frozen=True, slots=True)
class WriteKVCall:
    """Arguments of one `write_kv` call; see `write_kv` and `Rotary` for the tensors."""

    q: Written
    k: torch.Tensor
    v: torch.Tensor
    k_cache: Written
    v_cache: Written
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def write_kv_reference(call: WriteKVCall) -> None:
    """Reference of `graphrt::write_kv`."""
    k_cache, v_cache, slots = call.k_cache, call.v_cache, call.slot_mapping
    table = None if call.cos_sin is None else call.cos_sin[call.positions]
    if table is not None or call.q_norm is not None:
        call.q.copy_(_norm_and_rotate(call.q, call.q_norm, table, call.norm_eps))
    k = _norm_and_rotate(call.k, call.k_norm, table, call.norm_eps)
    stored = slots >= 0
    pages, offsets = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[pages[stored], offsets[stored]] = _as_stored(k[stored], call.k_scale, k_cache.dtype)
    v_cache[pages[stored], offsets[stored]] = _as_stored(call.v[stored], call.v_scale, v_cache.dtype)


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
    """Apply RMSNorm per head, then rotate the first dims, in float32; round to x's dtype after each product."""
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
