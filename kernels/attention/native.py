"""The CUDA kernel for decode requests (native/decode.cu): supported calls, variants and launch.

It processes the same work list as the Triton kernel and produces the same results. docs/attention.md describes its
techniques.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from graphrt.kernels.attention.arguments import logit_constants
from graphrt.kernels.attention.call import AttentionCall
from graphrt.kernels.attention.options import FP8_DTYPES, AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.plan_native import NativePlan, native_shared_bytes, native_tile, serves_heads
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.native.nvrtc import SMALL_CARVEOUT, NativeVariant, launch

NATIVE_PAGE_MULTIPLE = 16
"""The page size must be a multiple of this many tokens, so that each copy by a warp is within one page."""

_ALIGNMENT = 16  # bytes per copy
_PAIR = 8  # bytes per load from the workspace


class _Params(ctypes.Structure):
    """`Params` of native/attend.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "block_table", "work_list", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("partial_out", "partial_lse", "counters")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "v_scale", "slopes", "sinks")),
        *((name, ctypes.c_longlong) for name in ("q_token", "q_head", "k_page", "k_slot", "k_head")),
        *((name, ctypes.c_longlong) for name in ("v_page", "v_slot", "v_head", "table_row")),
        *((name, ctypes.c_longlong) for name in ("out_token", "out_head", "lse_token")),
        *((name, ctypes.c_int) for name in ("k_scale_head", "v_scale_head", "splits_at", "zeros_at")),
        *((name, ctypes.c_int) for name in ("max_partials", "window")),
        *((name, ctypes.c_float) for name in ("logit_factor", "logit_cap")),
    )


def native_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the kernel cannot run a call whose plan was made for it; None if it can.

    A plan assumes dtypes, page sizes and addresses, but does not fix them, so a call may differ from the plan. The
    Triton kernel then runs with the same plan and work list. Its results are correct, but it is slower than with its
    own plan.
    """
    plan = call.plan
    if call.q.element_size() != 2:
        return f"q is {call.q.dtype}"
    if call.k.shape[1] % NATIVE_PAGE_MULTIPLE:
        return f"the page size of {call.k.shape[1]} is not a multiple of {NATIVE_PAGE_MULTIPLE}"
    if call.options.kv_limits is not None or (call.options.tree_masks is not None and plan.shape.query_len > 1):
        return "it has no masks for trees and limits"
    tile = native_tile(call.k.dtype)
    if not serves_heads(plan.shape, call.k.dtype) or plan.tile.block_n % tile:
        return f"the plan was not made for a cache of {call.k.dtype}"
    for name, cache in (("k_cache", call.k), ("v_cache", call.v)):
        page, slot, head, _ = cache.stride()
        if cache.data_ptr() % _ALIGNMENT or math.gcd(page, slot, head) * cache.element_size() % _ALIGNMENT:
            return f"heads of {name} are not aligned to {_ALIGNMENT} bytes"
    for name, tensor in (("q", call.q), ("out", call.out)):
        token, head, _ = tensor.stride()
        if tensor.data_ptr() % 4 or token % 2 or head % 2:
            return f"heads of {name} are not aligned to 4 bytes"
    return f"work_list is not aligned to {_ALIGNMENT} bytes" if call.work_list.data_ptr() % _ALIGNMENT else None


def native_variant(
    plan: AttentionPlan, options: AttentionOptions, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int
) -> NativeVariant:
    """Return the variant for a call whose plan was made for the CUDA kernel."""
    # 1: a window. 2: chunks. Chunks that start at KV tile boundaries need no mask, because the work list starts there.
    window = 1 if options.sliding_window else 2 if plan.masks_chunks(options.attention_chunk_size) else 0
    alibi = 0 if options.alibi_slopes is None else 1 + options.alibi_sqrt
    return _variant(plan, alibi, options.causal, window, options.logits_softcap > 0.0, dtype, kv_dtype, page_size)


@functools.lru_cache(maxsize=1024)
def _variant(
    plan: AttentionPlan,
    alibi: int,
    causal: bool,
    window: int,
    softcap: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
) -> NativeVariant:
    native, shape = _native_of(plan), plan.shape
    shared = native_shared_bytes(shape, kv_dtype, native.warps, native.stages, native.cluster)
    macros = {
        "ALIBI": alibi,
        "BLOCKS_PER_SM": native.blocks_per_sm,
        "BLOCK_N": plan.tile.block_n,
        "CAUSAL": int(causal),
        "CLUSTER": native.cluster,
        "FIXED_SPLITS": plan.schedule.fixed_splits,
        "NUM_QUERIES_PER_KV": shape.num_queries_per_kv,
        "HEAD_DIM": shape.head_dim,
        "KV_FP8": 1 + FP8_DTYPES.index(kv_dtype) if kv_dtype in FP8_DTYPES else 0,
        "MERGE_GROUP_SIZE": plan.merge_group_size,
        "PAGE_SIZE": page_size,
        "PARAMS_BYTES": ctypes.sizeof(_Params),
        "PARTIAL_M": plan.partial_m,
        "Q_BF16": int(dtype == torch.bfloat16),
        "QUERY_LEN": shape.query_len,
        "SOFTCAP": int(softcap),
        "STAGES": native.stages,
        "V_HEAD_DIM": shape.v_head_dim,
        "WARPS": native.warps,
        "WINDOW": window,
    }
    # This carveout has room for one block per multiprocessor, and the grid has no more blocks.
    carveout = SMALL_CARVEOUT if native.blocks_per_sm == 1 else -1
    return NativeVariant(
        "decode.cu", "decode_attention", tuple(macros.items()), 32 * native.warps, shared, native.cluster, carveout
    )


def _native_of(plan: AttentionPlan) -> NativePlan:
    assert plan.native is not None, "the plan was made for the Triton kernel"
    return plan.native


def native_attention(call: AttentionCall) -> None:
    """Launch the kernel for a call that has no `native_unsupported_reason`.

    Raises: ShapeError: if the workspace is not aligned to 8 bytes.
    """
    plan, options, workspace = call.plan, call.options, call.workspace
    for name, words in (("partial_out", workspace.partial_out), ("counters", workspace.counters)):
        if words.data_ptr() % _PAIR:
            raise ShapeError(
                f"workspace.{name}: expected an address that is a multiple of {_PAIR}, got {words.data_ptr():#x}; "
                "create the workspace with AttentionWorkspace.allocate"
            )
    logit_factor, logit_cap = logit_constants(options.softmax_scale, options.logits_softcap)
    pointers = [call.q, call.k, call.v, call.table, call.work_list, call.out, call.lse]
    pointers += [workspace.partial_out, workspace.partial_lse, workspace.counters]
    pointers += [options.k_scale, options.v_scale, options.alibi_slopes, options.sinks]
    params = _Params(
        *(0 if t is None else t.data_ptr() for t in pointers),
        *call.q.stride()[:2],
        *call.k.stride()[:3],
        *call.v.stride()[:3],
        call.table.stride(0),
        *call.out.stride()[:2],
        0 if call.lse is None else call.lse.stride(0),
        *options.scale_strides,
        plan.splits_at,
        plan.zeros_at,
        plan.max_partials,
        options.span,
        logit_factor,
        logit_cap,
    )
    variant = native_variant(plan, options, call.q.dtype, call.k.dtype, call.k.shape[1])
    launch(variant, (plan.shape.num_kv_heads, plan.native_blocks), params, call.q.device, pdl=call.pdl)


def native_variants() -> dict[str, NativeVariant]:
    """Return the variants that a test compiles without a GPU: shapes of common models, and corner cases."""
    bf16, fp16, e4m3, e5m2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
    cases: dict[str, tuple[torch.dtype, torch.dtype, int, int, int, int, int, bool]] = {
        # name: dtype, KV dtype, head_dim, num_queries_per_kv, query_len, requests, page_size, every option
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
        "speculative_one": (bf16, bf16, 128, 4, 5, 1, 16, False),
        "speculative_five": (bf16, bf16, 128, 4, 5, 32, 16, False),
        "speculative_six": (bf16, bf16, 128, 4, 6, 32, 16, True),
        "speculative_fp8": (bf16, e4m3, 128, 4, 5, 32, 16, True),
        "speculative_small_heads": (bf16, bf16, 64, 4, 8, 32, 16, True),
        "speculative_three_stages": (bf16, bf16, 96, 4, 8, 32, 16, False),
        "wide_gqa": (bf16, bf16, 160, 16, 1, 8, 16, True),
        "wide_gqa_invariant": (bf16, bf16, 160, 16, 1, 8, 16, True),
        "gemma": (bf16, bf16, 256, 2, 1, 8, 16, True),
        "gemma_fp8": (bf16, e5m2, 256, 8, 1, 8, 16, True),
        "odd_head_dim": (fp16, fp16, 80, 7, 1, 1, 48, True),
        "odd_head_dim_fp8": (fp16, e5m2, 96, 7, 2, 8, 48, True),
        "deepseek_one": (bf16, bf16, 192, 1, 1, 1, 16, False),
        "deepseek": (bf16, bf16, 192, 1, 1, 64, 16, False),
        "deepseek_fp8": (bf16, e4m3, 192, 1, 1, 64, 16, True),
        "deepseek_wide": (bf16, bf16, 192, 16, 1, 8, 16, True),
        "wide_values": (bf16, bf16, 64, 4, 1, 64, 16, False),
        "chunked": (bf16, bf16, 128, 5, 1, 64, 16, True),
        "chunked_speculative": (bf16, bf16, 128, 5, 3, 64, 16, True),
        "chunked_fp8": (bf16, e4m3, 128, 5, 1, 64, 16, True),
    }
    variants = {}
    for name, (dtype, kv_dtype, head_dim, num_queries_per_kv, query_len, reqs, page_size, every) in cases.items():
        heads = 1 if name == "pairs" else 16 if name.startswith("deepseek") else 8
        v_head_dim = 128 if name.startswith(("deepseek", "wide_values")) else None
        plan = AttentionPlan.decode(
            reqs,
            num_q_heads=heads * num_queries_per_kv,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_sms=132,
            query_len=query_len,
            batch_invariant=name.endswith("invariant"),
            native=True,
        )
        slopes, chunked = (
            torch.zeros(heads * num_queries_per_kv, device="cpu") if every else None,
            name.startswith("chunked"),
        )
        options = AttentionOptions(
            1.0,
            sliding_window=int(every and not chunked),
            attention_chunk_size=int(every and chunked),
            logits_softcap=float(every),
            alibi_slopes=slopes,
            alibi_sqrt=every,
        )
        variants[name] = native_variant(plan, options, dtype, kv_dtype, page_size)
    return variants
