"""Normalize and rotate the step's queries and keys, and store keys and values in the paged cache, in one launch.

A program handles BLOCK_H heads of one token: query heads, which it changes in place, or key and value heads, which it
stores in the token's slot. For an fp8 cache, it divides keys and values by their scales and rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.attention.arguments import KV_DTYPES
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.cache.reference import WriteKVCall, write_kv_reference
from graphrt.kernels.checks import check_no_overlap, check_not_empty, check_tensor, check_unit_stride, once_per_geometry
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import next_power_of_two

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_TILE_ELEMENTS = 2048
"""Elements of q per program; twice as many for k and v together. Not tuned."""

_NUM_WARPS = 4
"""Warps per program. Not tuned."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Transform of queries and keys before attention: optional per-head RMSNorm, then rotary embedding.

    cos_sin   [max_positions, rotary_dim]  float32  device; cosines, then sines, of every position. The first
              rotary_dim dims of a head are rotated in halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    q_norm    [head_dim]  device; RMSNorm weight of the queries. None: no norm
    k_norm    [head_dim]  device; RMSNorm weight of the keys. None: no norm
    norm_eps  added to the mean square
    """

    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6


@triton.jit
def _norm_piece(x, rstd, weight_ptr, dims, mask, dtype: tl.constexpr):
    """Return a piece of each head after RMSNorm, rounded to `dtype` after both products."""
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    return ((x * rstd[:, None]).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _as_stored(x, scale_ptr, scale_heads, head_mask, out_dtype: tl.constexpr):
    """Convert `x` to the cache dtype; for fp8, divide by the scale and saturate."""
    if out_dtype == tl.float8e4nv or out_dtype == tl.float8e5:
        limit: tl.constexpr = 448.0 if out_dtype == tl.float8e4nv else 57344.0
        x = x.to(tl.float32)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + scale_heads, mask=head_mask, other=1.0)
            # `/` has an error of up to two ulp on the device, which could change the rounding to fp8.
            x = tl.div_rn(x, scale[:, None])
        x = tl.where(x > limit, limit, x)  # comparisons keep NaN; minimum and maximum would drop it
        x = tl.where(x < -limit, -limit, x)
    return x.to(out_dtype)


@triton.jit
def _norm_and_rotate(
    in_ptr,
    out_ptr,
    in_heads,
    out_heads,
    head_mask,
    scale_ptr,
    scale_heads,
    weight_ptr,
    cos_sin_ptr,
    norm_eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalize and rotate BLOCK_H heads of one token, and store them.

    in_heads, out_heads, scale_heads   [BLOCK_H] offsets of the heads and their scales

    A head is loaded in three pieces: the two halves that are rotated into each other, and the rest. Each piece is
    stored in its load layout, so no thread overwrites elements that another thread has not read yet. The norm uses the
    mean square of all three pieces. Each piece is rounded to the input dtype, then to the output dtype.
    """
    dtype: tl.constexpr = in_ptr.dtype.element_ty
    half_lanes = tl.arange(0, BLOCK_HALF)
    rest_lanes = tl.arange(0, BLOCK_REST)
    in_half = half_lanes < HALF
    in_rest = rest_lanes < HEAD_DIM - 2 * HALF
    half_mask = head_mask[:, None] & in_half[None, :]
    rest_mask = head_mask[:, None] & in_rest[None, :]
    low_ptrs = in_ptr + in_heads[:, None] + half_lanes[None, :]
    low = tl.load(low_ptrs, mask=half_mask, other=0.0).to(tl.float32)
    high = tl.load(low_ptrs + HALF, mask=half_mask, other=0.0).to(tl.float32)
    rest_ptrs = in_ptr + in_heads[:, None] + 2 * HALF + rest_lanes[None, :]
    rest = tl.load(rest_ptrs, mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(total / HEAD_DIM + norm_eps)
        low = _norm_piece(low, rstd, weight_ptr, half_lanes, in_half, dtype)
        high = _norm_piece(high, rstd, weight_ptr, half_lanes + HALF, in_half, dtype)
        rest = _norm_piece(rest, rstd, weight_ptr, rest_lanes + 2 * HALF, in_rest, dtype)
    if HALF > 0:
        cos = tl.load(cos_sin_ptr + half_lanes, mask=in_half, other=0.0)[None, :]
        sin = tl.load(cos_sin_ptr + HALF + half_lanes, mask=in_half, other=0.0)[None, :]
        low, high = low * cos - high * sin, high * cos + low * sin
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    out_ptrs = out_ptr + out_heads[:, None] + half_lanes[None, :]
    tl.store(out_ptrs, _as_stored(low.to(dtype), scale_ptr, scale_heads, head_mask, out_dtype), mask=half_mask)
    tl.store(out_ptrs + HALF, _as_stored(high.to(dtype), scale_ptr, scale_heads, head_mask, out_dtype), mask=half_mask)
    rest_out_ptrs = out_ptr + out_heads[:, None] + 2 * HALF + rest_lanes[None, :]
    tl.store(rest_out_ptrs, _as_stored(rest.to(dtype), scale_ptr, scale_heads, head_mask, out_dtype), mask=rest_mask)


@triton.jit
def _write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    norm_eps,
    num_q_heads,
    num_kv_heads,
    num_q_blocks,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_page,
    stride_k_slot,
    stride_k_cache_head,
    stride_v_page,
    stride_v_slot,
    stride_v_cache_head,
    stride_cos_sin,
    stride_k_scale,
    stride_v_scale,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    # Second grid dimension: blocks of query heads, then blocks of KV heads.
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    angles_ptr = cos_sin_ptr
    if HALF > 0:
        angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin
    if block < num_q_blocks:
        heads = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        q_heads = token * stride_q_token + heads * stride_q_head
        _norm_and_rotate(
            q_ptr, q_ptr, q_heads, q_heads, heads < num_q_heads, None, heads, q_norm_ptr, angles_ptr, norm_eps,
            HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_Q_NORM,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            page = slot // PAGE_SIZE
            offset = slot % PAGE_SIZE
            kv_heads = ((block - num_q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
            head_mask = kv_heads < num_kv_heads
            k_out = page * stride_k_page + offset * stride_k_slot + kv_heads * stride_k_cache_head
            _norm_and_rotate(
                k_ptr, k_cache_ptr, token * stride_k_token + kv_heads * stride_k_head, k_out, head_mask,
                k_scale_ptr, kv_heads * stride_k_scale, k_norm_ptr, angles_ptr, norm_eps,
                HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_K_NORM,
            )  # fmt: skip
            dims = tl.arange(0, BLOCK_V)
            mask = head_mask[:, None] & (dims < V_HEAD_DIM)[None, :]
            v_heads = token * stride_v_token + kv_heads * stride_v_head
            v = tl.load(v_ptr + v_heads[:, None] + dims[None, :], mask=mask, other=0.0)
            v = _as_stored(v, v_scale_ptr, kv_heads * stride_v_scale, head_mask, v_cache_ptr.dtype.element_ty)
            v_out = page * stride_v_page + offset * stride_v_slot + kv_heads * stride_v_cache_head
            tl.store(v_cache_ptr + v_out[:, None] + dims[None, :], v, mask=mask)


_launch = KernelLauncher(_write_kv_kernel)


def _tiling(num_heads: int, head_dim: int, v_head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Return the heads per program, and the block sizes of a V head and of the pieces of a Q or K head."""
    widest = next_power_of_two(max(head_dim, v_head_dim))
    return {
        "BLOCK_H": min(next_power_of_two(num_heads), max(1, _TILE_ELEMENTS // widest)),
        "BLOCK_V": next_power_of_two(v_head_dim),
        "BLOCK_HALF": next_power_of_two(max(rotary_dim // 2, 1)),
        "BLOCK_REST": next_power_of_two(max(head_dim - rotary_dim, 1)),
    }


def _write_kv_triton(call: WriteKVCall) -> None:
    q, k, v, k_cache, v_cache, cos_sin = call.q, call.k, call.v, call.k_cache, call.v_cache, call.cos_sin
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size, v_head_dim = k.shape[1], k_cache.shape[1], v.shape[2]
    if tokens == 0:
        return
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    tiling = _tiling(max(num_q_heads, num_kv_heads), head_dim, v_head_dim, rotary_dim)
    changes_q = cos_sin is not None or call.q_norm is not None
    num_q_blocks = -(-num_q_heads // tiling["BLOCK_H"]) if changes_q else 0
    grid = (tokens, num_q_blocks + -(-num_kv_heads // tiling["BLOCK_H"]))
    _launch(
        grid, q, k, v, k_cache, v_cache, call.slot_mapping, call.positions, cos_sin, call.q_norm, call.k_norm,
        call.k_scale, call.v_scale, call.norm_eps, num_q_heads, num_kv_heads, num_q_blocks, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        0 if cos_sin is None else cos_sin.stride(0), _scale_stride(call.k_scale), _scale_stride(call.v_scale),
        PAGE_SIZE=page_size, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, HALF=rotary_dim // 2,
        HAS_Q_NORM=call.q_norm is not None, HAS_K_NORM=call.k_norm is not None, **tiling, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _scale_stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.shape[0] == 1 else 1


_write_kv = DeclaredOp("write_kv", WriteKVCall, triton_impl=_write_kv_triton, reference=write_kv_reference)


def write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    *,
    rotary: Rotary | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store a step's keys and values in the paged cache. With `rotary`, first normalize and rotate q (in place) and k.

    q             [tokens, num_q_heads, head_dim]  float16, bfloat16 or float32  device; changed in place with `rotary`
    k             [tokens, num_kv_heads, head_dim]  q's dtype  device; unchanged; may be a slice of a qkv tensor
    v             [tokens, num_kv_heads, v_head_dim]  q's dtype  device; like k
    k_cache       [num_pages, page_size, num_kv_heads, head_dim]  any float dtype or fp8  device; last stride 1
    v_cache       [num_pages, page_size, num_kv_heads, v_head_dim]  k_cache's dtype  device; last stride 1
    slot_mapping  [tokens]  int64  device; page * page_size + offset of each token. Tokens with slots < 0 are not stored
    positions     [tokens]  int64  device; row of each token in rotary.cos_sin, including pad tokens
    k_scale       [1] or [num_kv_heads]  float32  device; for fp8 caches: key = stored value * k_scale; > 0. None: 1
    v_scale       like k_scale, for the values

    Mean square and rotation are computed in float32. Values are rounded to q's dtype after the norm, its weight
    and the rotation, then to the cache dtype. An fp8 cache stores the float32 quotient value / scale, rounded
    to nearest even and saturated at the largest finite value. Infinities saturate too; NaN stays NaN.
    Rotary embedding: Su et al. 2021, in halves. fp8 formats: Micikevicius et al. 2022.

    Only the device could check these conditions, so the caller must guarantee them (the runtime's refresh does):

    - slots are below num_pages * page_size, and distinct unless negative;
    - positions are within rotary.cos_sin.

    Otherwise the behavior is undefined and includes writes out of bounds.

    Capture-safe: the grid depends on the shapes; slots, positions and scales are read on the device.
    Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match.
    """
    if rotary is None:
        cos_sin = q_norm = k_norm = None
        norm_eps = 0.0
    else:
        cos_sin, q_norm, k_norm, norm_eps = rotary.cos_sin, rotary.q_norm, rotary.k_norm, rotary.norm_eps
    tensors = q, k, v, k_cache, v_cache, slot_mapping, positions, cos_sin, q_norm, k_norm
    _check(*tensors, k_scale, v_scale, rotary is not None)
    _write_kv(WriteKVCall(*tensors, norm_eps, k_scale, v_scale))


@once_per_geometry
def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    rotates: bool,
) -> None:
    check_tensor("q", q, shape=(None, None, None), dtype=_FLOATS)
    (tokens, _, head_dim), device = q.shape, q.device
    check_tensor("k", k, shape=(tokens, None, head_dim), dtype=q.dtype, device=device)
    check_tensor("v", v, shape=(*k.shape[:2], None), dtype=q.dtype, device=device)
    check_tensor("k_cache", k_cache, shape=(None, None, k.shape[1], head_dim), dtype=KV_DTYPES, device=device)
    v_shape = (*k_cache.shape[:3], v.shape[2])
    check_tensor("v_cache", v_cache, shape=v_shape, dtype=k_cache.dtype, device=device)
    check_tensor("slot_mapping", slot_mapping, shape=(tokens,), dtype=torch.int64, device=device)
    check_tensor("positions", positions, shape=(tokens,), dtype=torch.int64, device=device)
    named = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    named["positions"] = positions
    if rotates:
        check_cos_sin(cos_sin, head_dim, device)
        check_no_overlap("q", q)
        named["rotary.cos_sin"] = cos_sin
        for name, weight in (("rotary.q_norm", q_norm), ("rotary.k_norm", k_norm)):
            if weight is not None:
                check_tensor(name, weight, shape=(head_dim,), dtype=_FLOATS, device=device)
                named[name] = weight
    for name, tensor in named.items():
        check_unit_stride(name, tensor)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if k.shape[1]:  # without KV heads, only queries are changed
            check_not_empty(name, cache)
        check_no_overlap(name, cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            check_kv_scale(name, scale, k_cache.dtype, k.shape[1], device)


def check_cos_sin(cos_sin: torch.Tensor, head_dim: int, device: torch.device) -> None:
    """Raise ShapeError unless `cos_sin` is a rotation table of heads of this size."""
    check_tensor("rotary.cos_sin", cos_sin, shape=(None, None), dtype=torch.float32, device=device)
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ShapeError(
            f"rotary.cos_sin: expected an even width from 2 to head_dim={head_dim}, got {rotary_dim}; pass the "
            "cosines of half the rotated dims, then their sines"
        )
    check_not_empty("rotary.cos_sin", cos_sin)


def check_kv_scale(
    name: str, scale: torch.Tensor, cache_dtype: torch.dtype, num_kv_heads: int, device: torch.device
) -> None:
    """Raise ShapeError unless the cache is fp8 and `scale` is a contiguous float32 tensor [1] or [num_kv_heads]."""
    if cache_dtype not in FP8_DTYPES:
        raise ShapeError(
            f"{name}: a {str(cache_dtype).removeprefix('torch.')} cache takes no scale; pass None, or use an fp8 cache"
        )
    check_tensor(name, scale, shape=(None,), dtype=torch.float32, device=device)
    if scale.shape[0] not in (1, num_kv_heads):
        raise ShapeError(
            f"{name}: expected shape [1] or [{num_kv_heads}], got {list(scale.shape)}; pass one scale, or one scale "
            f"per KV head"
        )
    check_unit_stride(name, scale)


def compile_variants() -> list[CompileSpec]:
    """Return variants with and without rotation, norms and fp8 scales, and with odd head sizes."""
    specs = []
    for name, kind, cache_kind, heads, head_dim, v_head_dim, rotary_dim, has_norm, has_scale in (
        ("llama_bf16", "bf16", "bf16", 32, 128, 128, 128, False, False),
        ("qwen3_bf16", "bf16", "bf16", 32, 128, 128, 128, True, False),
        ("partial_fp16_to_fp32", "fp16", "fp32", 12, 80, 80, 32, False, False),
        ("wide_fp32", "fp32", "fp16", 8, 256, 256, 64, True, False),
        ("plain_bf16", "bf16", "bf16", 8, 64, 64, 0, False, False),
        ("llama_bf16_to_e4m3", "bf16", "fp8e4nv", 32, 128, 128, 128, False, True),
        ("qwen3_fp16_to_e5m2", "fp16", "fp8e5", 32, 128, 128, 128, True, True),
        ("partial_fp32_to_e4m3", "fp32", "fp8e4nv", 12, 80, 80, 32, False, True),
        ("plain_bf16_to_e5m2", "bf16", "fp8e5", 8, 64, 64, 0, False, False),
        ("deepseek_bf16", "bf16", "bf16", 128, 192, 128, 192, False, False),
        ("deepseek_bf16_to_e4m3", "bf16", "fp8e4nv", 128, 192, 128, 64, True, True),
        ("gemma4_bf16", "bf16", "bf16", 8, 512, 512, 128, True, False),
        ("odd_fp16", "fp16", "fp16", 5, 33, 71, 22, True, False),
    ):
        constexprs: dict[str, object] = {
            "PAGE_SIZE": 16,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "HALF": rotary_dim // 2,
            "HAS_Q_NORM": has_norm,
            "HAS_K_NORM": has_norm,
            **_tiling(heads, head_dim, v_head_dim, rotary_dim),
        }
        types = {f"{x}_ptr": f"*{kind}" for x in ("q", "k", "v")}
        types |= {f"{x}_ptr": f"*{cache_kind}" for x in ("k_cache", "v_cache")}
        types |= {"slot_mapping_ptr": "*i64", "positions_ptr": "*i64", "norm_eps": "fp32"}
        types |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr"), f"*{kind}")
        types |= dict.fromkeys(("cos_sin_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32")
        for given, pointers in (
            (rotary_dim > 0, ("cos_sin_ptr",)),
            (has_norm, ("q_norm_ptr", "k_norm_ptr")),
            (has_scale, ("k_scale_ptr", "v_scale_ptr")),
        ):
            if not given:
                constexprs |= dict.fromkeys(pointers)
        # Scale strides are 1 (one scale per head) or 0 (one in total), never a multiple of 16.
        divisible = ("*_ptr", "stride_*_token", "stride_*_head", "stride_*_page", "stride_*_slot", "stride_cos_sin")
        specs.append(
            CompileSpec(f"write_kv_{name}", _write_kv_kernel, types, constexprs, _NUM_WARPS, 3, divisible=divisible)
        )
    return specs
