"""The CUDA kernel of decode rows (native/decode.cu): when it serves, its variants and its launch.

It reads the work list of the Triton kernel and leaves what that leaves. What it does better: every warp streams a part
of its own, warps of a block merge through shared memory, blocks of a cluster through distributed shared memory, fp8
values are transposed in registers, and queries of small groups are not padded to 16.
"""

from __future__ import annotations

import ctypes

import torch

from graphrt.kernels.attention.arguments import logit_constants
from graphrt.kernels.attention.options import FP8_DTYPES, AttentionOptions
from graphrt.kernels.attention.plan import (
    AttentionPlan,
    AttentionWorkspace,
    native_shared_bytes,
    native_tile,
)
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.native.nvrtc import NativeVariant, launch

NATIVE_PAGE_MULTIPLE = 16
"""Tokens that lie in one page together."""

_ALIGNMENT = 16  # bytes that one copy moves
_PAIR = 8  # bytes of the workspace that are read at a time


class _Params(ctypes.Structure):
    """`Params` of native/attend.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "block_table", "work_list", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("partial_out", "partial_lse", "counters")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "v_scale", "slopes", "sinks")),
        *((name, ctypes.c_longlong) for name in ("q_token", "q_head", "k_page", "k_slot", "k_head")),
        *((name, ctypes.c_longlong) for name in ("v_page", "v_slot", "v_head", "table_row")),
        *((name, ctypes.c_longlong) for name in ("out_token", "out_head", "lse_token")),
        *((name, ctypes.c_int) for name in ("k_scale_head", "v_scale_head", "segments_at", "zeros_at")),
        *((name, ctypes.c_int) for name in ("num_slots", "window")),
        *((name, ctypes.c_float) for name in ("logit_factor", "logit_cap")),
    )


def native_fault(
    plan: AttentionPlan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work_list: torch.Tensor,
    out: torch.Tensor,
) -> str | None:
    """What keeps the kernel from the tensors of a call by a plan that was made for it: their dtypes, pages that do not
    hold whole tiles, addresses to copy from; or None.

    The Triton kernel then runs by the same plan and work list: right, but in parts that were not made for it.
    """
    if q.element_size() != 2:
        return f"q is {q.dtype}"
    if k_cache.shape[1] % NATIVE_PAGE_MULTIPLE:
        return f"pages of {k_cache.shape[1]} tokens are no multiple of {NATIVE_PAGE_MULTIPLE}"
    tile = native_tile(k_cache.dtype)
    if plan.head_dim % tile or plan.block_n % tile:
        return f"the plan was made for another dtype than {k_cache.dtype}"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        bytes_to_rows = [stride * cache.element_size() for stride in cache.stride()[:3]]
        if any(n % _ALIGNMENT for n in (cache.data_ptr(), *bytes_to_rows)):
            return f"{name} has rows at addresses that are no multiple of {_ALIGNMENT}"
    for name, tensor in (("q", q), ("out", out)):
        if tensor.data_ptr() % 4 or any(stride % 2 for stride in tensor.stride()[:2]):
            return f"{name} has heads at addresses that are no multiple of 4"
    return f"work_list lies at no multiple of {_ALIGNMENT}" if work_list.data_ptr() % _ALIGNMENT else None


def native_variant(
    plan: AttentionPlan, options: AttentionOptions, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int
) -> NativeVariant:
    """The variant of a call."""
    packed = plan.query_len * plan.group
    shared = native_shared_bytes(plan.head_dim, packed, kv_dtype, plan.native_warps, plan.num_stages, plan.cluster)
    macros = {
        "ALIBI": 0 if options.alibi_slopes is None else 1 + options.alibi_sqrt,
        "BLOCKS_PER_SM": plan.blocks_per_sm,
        "BLOCK_N": plan.block_n,
        "CAUSAL": int(options.causal),
        "CLUSTER": plan.cluster,
        "FIXED_SPLITS": plan.fixed_splits,
        "GROUP": plan.group,
        "HEAD_DIM": plan.head_dim,
        "KV_FP8": 1 + FP8_DTYPES.index(kv_dtype) if kv_dtype in FP8_DTYPES else 0,
        "MERGE_GROUP": plan.merge_group,
        "PAGE_SIZE": page_size,
        "PARAMS_BYTES": ctypes.sizeof(_Params),
        "PARTIAL_M": plan.partial_m,
        "Q_BF16": int(dtype == torch.bfloat16),
        "QUERY_LEN": plan.query_len,
        "SOFTCAP": int(options.logits_softcap > 0.0),
        "STAGES": plan.num_stages,
        "WARPS": plan.native_warps,
        "WINDOW": int(options.sliding_window > 0),
    }
    return NativeVariant(
        "decode.cu", "decode_attention", tuple(macros.items()), 32 * plan.native_warps, shared, plan.cluster
    )


def native_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    work_list: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: AttentionWorkspace,
    plan: AttentionPlan,
    options: AttentionOptions,
    pdl: bool,
) -> None:
    """One launch; the arguments are those of `paged_attention`, without a `native_fault`.

    Raises: ShapeError for a workspace whose words cannot be read in pairs.
    """
    for name, words in (("partial_out", workspace.partial_out), ("counters", workspace.counters)):
        if words.data_ptr() % _PAIR:
            raise ShapeError(
                f"workspace.{name}: expected an address that is a multiple of {_PAIR}, got {words.data_ptr():#x}; "
                "make it with AttentionWorkspace.allocate"
            )
    logit_factor, logit_cap = logit_constants(options.softmax_scale, options.logits_softcap)
    pointers = [q, k_cache, v_cache, block_table, work_list, out, lse]
    pointers += [workspace.partial_out, workspace.partial_lse, workspace.counters]
    pointers += [options.k_scale, options.v_scale, options.alibi_slopes, options.sinks]
    params = _Params(
        *(0 if t is None else t.data_ptr() for t in pointers),
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        *options.scale_strides,
        plan.segments_at,
        plan.zeros_at,
        plan.num_slots,
        options.sliding_window,
        logit_factor,
        logit_cap,
    )
    variant = native_variant(plan, options, q.dtype, k_cache.dtype, k_cache.shape[1])
    launch(variant, (plan.num_kv_heads, plan.native_blocks), params, q.device, pdl=pdl)


def native_variants() -> dict[str, NativeVariant]:
    """Variants that a test compiles without a GPU: shapes of common models, and the corners."""
    bf16, fp16, e4m3, e5m2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
    cases: dict[str, tuple[torch.dtype, torch.dtype, int, int, int, int, int, bool]] = {
        # name: dtype, KV dtype, head_dim, group, query_len, rows, page_size, every option
        "llama_one": (bf16, bf16, 128, 4, 1, 1, 16, False),
        "llama": (bf16, bf16, 128, 4, 1, 16, 16, False),
        "llama_many": (bf16, bf16, 128, 4, 1, 256, 16, False),
        "llama_fp8": (bf16, e4m3, 128, 4, 1, 256, 16, False),
        "many_small_heads": (bf16, bf16, 64, 4, 1, 256, 16, False),
        "many_small_heads_wide": (bf16, bf16, 64, 16, 1, 256, 16, True),
        "pairs": (bf16, bf16, 128, 16, 1, 2, 16, True),
        "small_heads": (fp16, fp16, 64, 3, 1, 1, 64, False),
        "packed_max": (bf16, bf16, 128, 16, 1, 8, 16, True),
        "speculative": (bf16, bf16, 128, 4, 4, 8, 16, True),
        "wide_group": (bf16, bf16, 160, 16, 1, 8, 16, True),
        "wide_group_invariant": (bf16, bf16, 160, 16, 1, 8, 16, True),
        "gemma": (bf16, bf16, 256, 2, 1, 8, 16, True),
        "gemma_fp8": (bf16, e5m2, 256, 8, 1, 8, 16, True),
        "odd_head_dim": (fp16, fp16, 80, 7, 1, 1, 48, True),
        "odd_head_dim_fp8": (fp16, e5m2, 96, 7, 2, 8, 48, True),
    }
    variants = {}
    for name, (dtype, kv_dtype, head_dim, group, query_len, rows, page_size, every) in cases.items():
        heads = 1 if name == "pairs" else 8
        plan = AttentionPlan.decode(
            rows,
            num_q_heads=heads * group,
            num_kv_heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_sms=132,
            query_len=query_len,
            batch_invariant=name.endswith("invariant"),
            native=True,
        )
        slopes = torch.zeros(heads * group) if every else None
        options = AttentionOptions(1.0, True, int(every), float(every), slopes, alibi_sqrt=every)
        variants[name] = native_variant(plan, options, dtype, kv_dtype, page_size)
    return variants
