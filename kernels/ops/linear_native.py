"""The CUDA kernel of matrix products with few tokens (native/linear.cu): variants and launch."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch

from graphrt.kernels.native.nvrtc import SMALL_CARVEOUT, NativeVariant, launch
from graphrt.kernels.ops.linear_call import STEP_BYTES, End, LinearCall, LinearPlan
from graphrt.kernels.sizes import ceil_div

_GROUP = 8  # rows of weights, or tokens, of one mma


class _Params(ctypes.Structure):
    """`Params` of native/linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "zero", "bias", "x", "x_rows", "squares", "out")),
        *((name, ctypes.c_void_p) for name in ("residual", "gain")),
        *((name, ctypes.c_void_p) for name in ("squares_out", "k_cache", "v_cache", "slots", "positions", "cos_sin")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "out_stride", "residual_stride")),
        *((name, ctypes.c_longlong) for name in ("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head")),
        *((name, ctypes.c_int) for name in ("tokens", "width", "depth", "row_bytes", "tiles", "parts")),
        *((name, ctypes.c_int) for name in ("steps", "num_q_heads", "num_kv_heads")),
        *((name, ctypes.c_float) for name in ("inverse_width", "eps")),
    )


EARLY_ADDRESSES = tuple(int(getattr(_Params, name).offset) for name in ("weight", "scale", "zero"))
"""Byte offsets, in the kernel's parameters, of the addresses that it reads before it waits for earlier kernels."""


def linear_native(call: LinearCall) -> None:
    """Launch the kernel."""
    plan, end, k_cache, v_cache = call.plan, End(call.end), call.k_cache, call.v_cache
    rows, depth = len(call.weight), call.depth
    row_bytes = depth * call.bits // 8
    tiles = rows // plan.rows
    pointers = [call.weight, call.scale, call.zero, call.bias, call.x, call.x_rows, call.squares, call.out]
    pointers += [call.residual, call.gain, call.squares_out]
    pointers += [k_cache, v_cache, call.slots, call.positions, call.cos_sin]
    params = _Params(
        *(0 if t is None else t.data_ptr() for t in pointers),
        call.x.stride(0),
        call.out.stride(0),
        0 if call.residual is None else call.residual.stride(0),
        *((0,) * 6 if k_cache is None or v_cache is None else (*k_cache.stride()[:3], *v_cache.stride()[:3])),
        call.tokens,
        rows // 2 if end is End.SILU_MUL else rows,
        depth,
        row_bytes,
        tiles,
        0 if call.squares is None else call.squares.shape[1],
        ceil_div(row_bytes // STEP_BYTES, plan.k_parts * plan.unroll) * plan.unroll,
        0 if k_cache is None else call.num_q_heads,
        0 if k_cache is None else k_cache.shape[2],
        1.0 / depth,
        call.eps,
    )
    half = 0 if call.cos_sin is None else call.cos_sin.shape[1] // 2
    head_dim, page_size = (plan.rows, 1) if k_cache is None else (k_cache.shape[3], k_cache.shape[1])
    group = 0 if call.zero is None else depth // call.zero.shape[1]
    variant = _variant(plan, end, call.tokens, call.bits, group, row_bytes, head_dim, half, page_size)
    blocks = tiles
    if plan.persistent:
        blocks = min(tiles, _num_sms(call.x.device) * blocks_per_sm(plan, call.tokens, call.bits))
    pdl = call.early and _is_capturing(call.x.device)
    launch(variant, (blocks, plan.cluster), params, call.x.device, pdl=pdl)


def blocks_per_sm(plan: LinearPlan, tokens: int, bits: int) -> int:
    """Estimate how many blocks fit into the registers of a multiprocessor; 0: a block needs too many."""
    token_tiles = ceil_div(tokens, _GROUP)
    x_ahead = 4 if token_tiles == 1 else 2 if token_tiles < 4 else 1
    weights = plan.unroll * 2 * plan.row_tiles * (6 if bits == 4 else 4)
    needed = 38 + weights + 5 * token_tiles * (plan.row_tiles + x_ahead)
    most = 144 if plan.warps == 16 else 128  # blocks of 16 warps may spill a few
    return (16 if needed <= most else 8 if needed <= 255 else 0) // plan.warps


def _is_capturing(device: torch.device) -> bool:
    """Return whether the stream captures. Otherwise it may still copy into the weight, which must not be loaded
    early."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _num_sms(device: torch.device) -> int:
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=1024)
def _variant(
    plan: LinearPlan,
    end: End,
    tokens: int,
    bits: int,
    group: int,
    row_bytes: int,
    head_dim: int,
    half: int,
    page_size: int,
) -> NativeVariant:
    token_tiles = ceil_div(tokens, _GROUP)
    macros = {
        "BITS": bits,
        "BLOCKS": blocks_per_sm(plan, tokens, bits),
        "CLUSTER": plan.cluster,
        "END": int(end),
        "EVEN": int(row_bytes % (STEP_BYTES * plan.k_parts * plan.unroll) == 0),
        "GROUP": group,
        "HALF": half,
        "HEAD_DIM": head_dim,
        "KV_FP8": 0,
        "PAGE_SIZE": page_size,
        "PARAMS_BYTES": ctypes.sizeof(_Params),
        "Q_BF16": 1,
        "ROW_TILES": plan.row_tiles,
        "ROW_WARPS": plan.row_warps,
        "TOKEN_TILES": token_tiles,
        "UNROLL": plan.unroll,
        "WARPS": plan.warps,
    }
    shared = 4 * _GROUP * token_tiles * (plan.warps // plan.row_warps * (plan.rows + 4) + 1)
    if plan.cluster > 1:
        shared += 4 * _GROUP * token_tiles * plan.rows + 8
    return NativeVariant(
        "linear.cu", "linear", tuple(macros.items()), 32 * plan.warps, shared, plan.cluster, SMALL_CARVEOUT
    )


def native_variants() -> dict[str, NativeVariant]:
    """Return the variants that a test compiles without a GPU: every epilogue with 1 to 64 tokens, with and without a
    partial last iteration over k."""
    plans = {
        1: LinearPlan(1, 16, 8, False),
        16: LinearPlan(2, 16, 4, True),
        32: LinearPlan(1, 8, 4, False, 4, 2),
        64: LinearPlan(1, 8, 4, False, 8, 4),
    }
    return {
        f"{end.name.lower()}_{tokens}_{bits}_{depth}": _variant(
            replace(plan, unroll=plan.unroll if bits == 16 else plan.unroll // 2),
            end, tokens, bits, 128 if bits == 4 else 0, depth * bits // 8, 128, 64, 16,
        )
        for end in End
        for tokens, plan in plans.items()
        for bits, depth in ((16, 4096), (16, 2880), (8, 4096), (4, 4096))
        if tokens <= 16 or (bits, depth) == (16, 4096)
    }  # fmt: skip
