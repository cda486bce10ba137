"""The attention operators over the paged cache and over contiguous K and V, which launch either kernel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from graphrt.kernels.attention.arguments import (
    check_contiguous_tensors,
    check_paged_tensors,
    check_query_starts,
    compiled_types,
    logit_constants,
)
from graphrt.kernels.attention.attend import attend_kernel
from graphrt.kernels.attention.call import AttentionCall
from graphrt.kernels.attention.native import native_attention, native_unsupported_reason
from graphrt.kernels.attention.options import FP8_DTYPES, AttentionOptions, check_options
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.reference import reference_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.checks import check_tensor, check_unit_stride, once_per_geometry
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp

_MAX_INT32 = (1 << 31) - 1


def _constexprs(plan: AttentionPlan, options: AttentionOptions, kv_dtype: torch.dtype) -> dict[str, object]:
    """Return the constexpr arguments of the kernel, except those that distinguish paged and contiguous calls."""
    return {
        "NUM_QUERIES_PER_KV": plan.shape.num_queries_per_kv,
        "HEAD_DIM": plan.shape.head_dim,
        "V_HEAD_DIM": plan.shape.v_head_dim,
        "CAUSAL": options.causal,
        "HAS_WINDOW": options.sliding_window > 0,
        "HAS_CHUNKS": plan.masks_chunks(options.attention_chunk_size),
        "HAS_SOFTCAP": options.logits_softcap > 0.0,
        "ALIBI_SQRT": options.alibi_sqrt,
        "IS_FP8": kv_dtype in FP8_DTYPES,
        "FIXED_SPLITS": plan.schedule.fixed_splits,
        "SKIP_MASKS": plan.shape.query_len == 0 and options.kv_limits is None,
        "BLOCK_M": plan.tile.block_m,
        "BLOCK_N": plan.tile.block_n,
        "BLOCK_D": plan.shape.block_d,
        "BLOCK_V": plan.shape.block_v,
        "NUM_STAGES": plan.tile.num_stages,
        "PARTIAL_M": plan.partial_m,
        "MERGE_SPLITS": plan.merge_splits,
        "MERGE_GROUP_SIZE": plan.merge_group_size,
    }


def _stride_unit(kv_strides: Sequence[int], others: Sequence[int]) -> int:
    """Return the unit in which strides are passed to the kernel: 1, 2, 4 or 8 elements.

    Triton specializes on strides that are multiples of 16. For other strides of K and V, such as those of heads of 72,
    the unit tells the compiler their alignment. Without it, the compiler would load element by element.
    """
    common = math.gcd(*kv_strides)
    strides = (common, *others)
    if common % 16 == 0 or max(map(abs, (*kv_strides, *strides))) > _MAX_INT32:
        return 1
    return math.gcd(*strides, 8)


_launch_kernel = KernelLauncher(attend_kernel)


def _launch(call: AttentionCall) -> None:
    """Launch the Triton kernel, with one program per KV head and work partition."""
    plan, options, workspace = call.plan, call.options, call.workspace
    paged = call.seq_lens is not None
    logit_factor, logit_cap = logit_constants(options.softmax_scale, options.logits_softcap)
    k_strides, v_strides = (t.stride()[:3] if paged else (0, *t.stride()[:2]) for t in (call.k, call.v))
    stride_unit = _stride_unit((*k_strides, *v_strides), (*call.q.stride()[:2], *call.out.stride()[:2]))
    _launch_kernel(
        (plan.shape.num_kv_heads, plan.schedule.num_partitions),
        call.q,
        call.k,
        call.v,
        call.table,
        call.work_list,
        call.out,
        call.lse,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.counters,
        options.k_scale,
        options.v_scale,
        options.alibi_slopes,
        options.sinks,
        options.tree_masks,
        options.kv_limits,
        plan.splits_at,
        plan.zeros_at,
        plan.max_partials,
        logit_factor,
        logit_cap,
        options.span,
        *(stride // stride_unit for stride in (*call.q.stride()[:2], *k_strides, *v_strides)),
        call.table.stride(0),
        *(stride // stride_unit for stride in call.out.stride()[:2]),
        0 if call.lse is None else call.lse.stride(0),
        *options.scale_strides,
        PAGE_SIZE=call.k.shape[1] if paged else 1,
        PAGED=paged,
        STRIDE_UNIT=stride_unit,
        LAUNCH_PDL=call.pdl,
        **_constexprs(plan, options, call.k.dtype),
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        launch_pdl=call.pdl,
    )


def _attention_on_device(call: AttentionCall) -> None:
    if call.q.is_cuda and call.plan.native is not None:
        reason = native_unsupported_reason(call)
        if reason is None:
            native_attention(call)
            return
        warnings.warn(
            f"attention: the CUDA kernel cannot run because {reason}; the slower Triton kernel runs instead",
            RuntimeWarning,
            stacklevel=2,
        )
    _launch(call)


_attention = DeclaredOp("attention", AttentionCall, triton_impl=_attention_on_device, reference=reference_attention)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    plan: AttentionPlan,
    work_list: torch.Tensor,
    workspace: AttentionWorkspace,
    options: AttentionOptions,
    *,
    query_start_loc: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Attend from the new tokens of each request to the request's pages, which already contain their K and V.

    q                  [num_tokens, num_q_heads, head_dim]                fp16, bf16 or fp32
    k_cache            [num_pages, page_size, num_kv_heads, head_dim]     dtype of q, or fp8; any strides, last one 1
    v_cache            [num_pages, page_size, num_kv_heads, v_head_dim]   like k_cache
    out                [num_tokens, num_q_heads, v_head_dim]              dtype of q, written
    block_table        [num_reqs, max_pages]                              int32
    seq_lens           [num_reqs]  including the new tokens; 0: zeros     int32
    work_list          written by `schedule_attention` in this step, from the same plan, seq_lens and window or chunks
    query_start_loc    [num_reqs + 1]  for plans without query_len        int32
    lse                [num_tokens, num_q_heads]  natural log of the softmax's denominator, sinks included   float32,
                       written. For a token that sees no key, it is the sink, or -inf without sinks
    pdl                programmatic dependent launch; the kernel starts before the previous kernel has finished, and
    waits on the device

    Padding tokens (index query_start_loc[-1] and above) get zeros and a log-sum-exp of -inf.

    num_reqs, num_tokens and head sizes must match plan.shape. The kernel pads heads of any size up to MAX_HEAD_DIM,
    so no tensor needs padding. fp8 keys and values are multiplied as float16, or as float32 if q is float32. Their
    scales are applied to logits and output.

    Only the device could check the following, so the caller must guarantee it (the runtime's refresh does):

    - the work list was written in this step; with tree masks and a window, for a window of query_len more positions;
    - 0 <= seq_lens <= max_pages * page_size;
    - page ids are valid up to the page of the last token;
    - query_start_loc begins at 0, does not decrease and ends at num_tokens or less.

    Otherwise the behavior is undefined and may include reads out of bounds.

    Capture-safe: one launch, no sync, no allocation; the grid depends only on the plan.

    Raises: ShapeError, CapacityError.
    """
    _check_paged(
        q, k_cache, v_cache, block_table, seq_lens, out, lse, query_start_loc, plan, work_list,
        workspace.partial_out, workspace.partial_lse, workspace.counters,
    )  # fmt: skip
    check_options(options, q.shape[1], k_cache.shape[2], k_cache.dtype, q.device)
    for name, tensor in (("tree_masks", options.tree_masks), ("kv_limits", options.kv_limits)):
        if tensor is not None:
            check_tensor(name, tensor, shape=(q.shape[0],))
    _attention(
        AttentionCall(
            q, k_cache, v_cache, block_table, query_start_loc, seq_lens, work_list, out, lse, workspace, options, plan,
            pdl,
        )
    )  # fmt: skip


@once_per_geometry
def _check_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    plan: AttentionPlan,
    work_list: torch.Tensor,
    *workspace: torch.Tensor,
) -> None:
    check_paged_tensors(q, k_cache, v_cache, block_table, seq_lens, out, lse)
    num_reqs = plan.shape.num_reqs
    if seq_lens.shape[0] != num_reqs:
        raise ShapeError(f"seq_lens: expected {num_reqs} requests, got {seq_lens.shape[0]}; use the plan of this size")
    _check_plan(q, k_cache.shape[2], v_cache.shape[3], plan, work_list, AttentionWorkspace(*workspace))
    check_query_starts(query_start_loc, num_reqs, plan.shape.query_len, q.device)


def contiguous_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_start_loc: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    plan: AttentionPlan,
    work_list: torch.Tensor,
    workspace: AttentionWorkspace,
    options: AttentionOptions,
    *,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend from packed requests to packed K and V, without a cache. With causal, the last token is at the last key.

    q                 [num_tokens, num_q_heads, head_dim]            fp16, bf16 or fp32
    k                 [kv_tokens, num_kv_heads, head_dim]            dtype of q, or fp8; any strides, last one 1
    v                 [kv_tokens, num_kv_heads, v_head_dim]          like k
    out               [num_tokens, num_q_heads, v_head_dim]          dtype of q, written
    kv_start_loc      [num_reqs + 1]  first key of each request      int32
    query_start_loc   [num_reqs + 1]  first token of each request    int32

    AttentionPlan.varlen makes the plan, and `schedule_attention` writes the work list from `kv_start_loc` with
    `seq_lens_are_starts`. For the other arguments, guarantees and errors see `paged_attention`. The caller guarantees
    that kv_start_loc begins at 0 or more, does not decrease and ends at kv_tokens or less.

    Capture-safe: see `paged_attention`.

    Raises: ShapeError, CapacityError.
    """
    check_contiguous_tensors(q, k, v, kv_start_loc, query_start_loc, out, options, lse)
    shape = plan.shape
    if shape.query_len or query_start_loc.shape[0] != shape.num_reqs + 1:
        raise ShapeError(
            f"query_start_loc: expected {shape.num_reqs} requests and a plan made by AttentionPlan.varlen, got "
            f"{query_start_loc.shape[0] - 1} requests and query_len={shape.query_len}; use the plan of this size"
        )
    _check_plan(q, k.shape[1], v.shape[2], plan, work_list, workspace)
    _attention(
        AttentionCall(
            q, k, v, kv_start_loc, query_start_loc, None, work_list, out, lse, workspace, options, plan, pdl=False
        )
    )


def _check_plan(
    q: torch.Tensor,
    num_kv_heads: int,
    v_head_dim: int,
    plan: AttentionPlan,
    work_list: torch.Tensor,
    workspace: AttentionWorkspace,
) -> None:
    shape = plan.shape
    heads = (shape.num_queries_per_kv * shape.num_kv_heads, shape.num_kv_heads)
    if q.shape[0] != shape.num_tokens or (q.shape[1], num_kv_heads) != heads or q.shape[2] != shape.head_dim:
        raise ShapeError(
            f"q: expected {shape.num_tokens} tokens, {heads[0]} query and {heads[1]} KV heads of size "
            f"{shape.head_dim} as in the plan, got {q.shape[0]} tokens, {q.shape[1]} and {num_kv_heads} heads of "
            f"size {q.shape[2]}; make a plan "
            "for this shape"
        )
    if v_head_dim != shape.v_head_dim:
        raise ShapeError(
            f"v: expected head size {shape.v_head_dim} as in the plan, got {v_head_dim}; make a plan with this "
            f"v_head_dim"
        )
    needed = {
        "work_list": (work_list, plan.work_list_words, torch.int32),
        "workspace.partial_out": (workspace.partial_out, plan.partial_elements, torch.float32),
        "workspace.partial_lse": (workspace.partial_lse, plan.partial_lses, torch.float32),
        "workspace.counters": (workspace.counters, plan.num_counters, torch.int32),
    }
    for name, (tensor, count, dtype) in needed.items():
        check_tensor(name, tensor, shape=(None,), dtype=dtype, device=q.device)
        check_unit_stride(name, tensor)
        if tensor.numel() < count:
            raise CapacityError(
                f"{name}: expected at least {count} elements for this plan, got {tensor.numel()}; "
                "allocate it for the largest plan"
            )


def compile_variants() -> list[CompileSpec]:
    """Return the variants that a test compiles without a GPU: shapes of common models, and corner cases."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    # Bytes. Only the merge spills, and varlen is faster with 3 stages despite the spill. Odd sizes, which no common
    # model has, spill more because they are loaded element by element.
    spill, spill_varlen, spill_odd = 64, 400, 512
    cases: list[tuple[str, torch.dtype, torch.dtype, tuple[int, int], int, int, int, int, str]] = [
        # name, dtype, KV dtype, head sizes, query heads per KV head, query_len (0: varlen), requests, page_size (0:
        # contiguous), and for all options on: a window or chunks
        ("llama", bf16, bf16, (128, 128), 4, 1, 1, 16, ""),
        ("llama_many", bf16, bf16, (128, 128), 4, 1, 256, 16, ""),
        ("llama_page64", fp16, fp16, (128, 128), 4, 1, 1, 64, ""),
        ("llama_fp8", bf16, e4m3, (128, 128), 4, 1, 1, 16, ""),
        ("llama_fp8_many", bf16, e4m3, (128, 128), 4, 1, 256, 16, ""),
        ("small_heads", bf16, bf16, (64, 64), 3, 1, 1, 16, ""),
        ("speculative", bf16, bf16, (128, 128), 4, 5, 8, 16, ""),
        ("tree", bf16, bf16, (128, 128), 4, 5, 8, 16, ""),
        ("tree_window", bf16, bf16, (128, 128), 4, 16, 8, 16, "window"),
        ("packed_max", bf16, bf16, (128, 128), 16, 16, 8, 16, ""),
        ("gemma", bf16, bf16, (256, 256), 2, 1, 8, 16, "window"),
        ("gemma_speculative", bf16, e5m2, (256, 256), 8, 8, 8, 16, "window"),
        ("odd_head_dim", fp16, e5m2, (80, 80), 7, 1, 8, 48, "window"),
        ("fp32", fp32, fp32, (64, 64), 4, 1, 8, 16, "window"),
        ("fp32_large", fp32, fp32, (256, 256), 8, 8, 8, 16, ""),
        ("limits", bf16, bf16, (128, 128), 16, 0, 64, 16, ""),
        ("limits_speculative", bf16, bf16, (128, 128), 16, 5, 8, 16, ""),
        ("varlen", bf16, bf16, (128, 128), 4, 0, 64, 16, ""),
        ("varlen_options", fp16, e4m3, (128, 128), 4, 0, 64, 16, "window"),
        ("varlen_gemma", bf16, bf16, (256, 256), 2, 0, 64, 16, "window"),
        ("varlen_fp32", fp32, fp32, (256, 256), 8, 0, 64, 16, ""),
        ("contiguous", bf16, bf16, (128, 128), 4, 0, 64, 0, ""),
        ("deepseek", bf16, bf16, (192, 128), 1, 1, 1, 16, ""),
        ("deepseek_many", bf16, bf16, (192, 128), 1, 1, 256, 16, ""),
        ("deepseek_fp8", bf16, e4m3, (192, 128), 1, 1, 64, 16, "window"),
        ("deepseek_varlen", bf16, bf16, (192, 128), 1, 0, 64, 16, ""),
        ("deepseek_contiguous", bf16, bf16, (192, 128), 1, 0, 64, 0, ""),
        ("wide_values", bf16, bf16, (64, 128), 4, 1, 64, 16, ""),
        ("heads_of_72", bf16, bf16, (72, 72), 4, 1, 256, 16, ""),
        ("heads_of_40", bf16, bf16, (40, 40), 4, 1, 256, 16, ""),
        ("odd_sizes", fp16, e5m2, (33, 71), 7, 1, 8, 48, "window"),
        ("odd_sizes_varlen", bf16, bf16, (71, 33), 3, 0, 64, 16, "window"),
        ("smallest", bf16, bf16, (1, 1), 4, 1, 256, 16, ""),
        ("gemma4", bf16, bf16, (512, 512), 2, 1, 8, 16, ""),
        ("gemma4_speculative", bf16, e4m3, (512, 512), 8, 8, 8, 16, "window"),
        ("gemma4_varlen", bf16, bf16, (512, 512), 2, 0, 64, 16, ""),
        ("gemma4_fp32", fp32, fp32, (512, 512), 2, 1, 8, 16, ""),
        ("chunked", bf16, bf16, (128, 128), 5, 1, 64, 16, "chunks"),
        ("chunked_speculative", bf16, e4m3, (128, 128), 5, 4, 64, 16, "chunks"),
        ("chunked_varlen", bf16, bf16, (128, 128), 5, 0, 64, 16, "chunks"),
    ]
    specs = []
    for name, dtype, kv_dtype, sizes, num_queries_per_kv, query_len, reqs, page_size, options in cases:
        heads = {"num_q_heads": 8 * num_queries_per_kv, "num_kv_heads": 8, "dtype": dtype, "num_sms": 132}
        heads |= {"head_dim": sizes[0], "v_head_dim": sizes[1]}
        if query_len:
            plan = AttentionPlan.decode(reqs, kv_dtype=kv_dtype, query_len=query_len, **heads)  # type: ignore[arg-type]
        else:
            plan = AttentionPlan.varlen(reqs, 2048, kv_dtype=kv_dtype, **heads)  # type: ignore[arg-type]
        chosen = AttentionOptions(
            1.0,
            sliding_window=int(options == "window"),
            attention_chunk_size=int(options == "chunks"),
            logits_softcap=float(bool(options)),
            alibi_sqrt=bool(options),
        )
        tree, limits = name.startswith("tree"), name.startswith("limits")
        if limits:
            chosen = AttentionOptions(1.0, causal=False, kv_limits=torch.empty(0, dtype=torch.int32, device="cpu"))
        constexprs: dict[str, object] = {
            **_constexprs(plan, chosen, kv_dtype),
            "PAGE_SIZE": page_size or 1,
            "PAGED": page_size > 0,
            "STRIDE_UNIT": _stride_unit(sizes, sizes),
            "LAUNCH_PDL": False,
        }
        types = compiled_types(dtype, kv_dtype, constexprs, options=bool(options) and not tree)
        if tree:
            types["tree_masks_ptr"] = "*i64"
        else:
            constexprs["tree_masks_ptr"] = None
        if limits:
            types["kv_limits_ptr"] = "*i32"
        else:
            constexprs["kv_limits_ptr"] = None
        specs.append(
            CompileSpec(
                f"attention_{name}",
                attend_kernel,
                types,
                constexprs,
                plan.tile.num_warps,
                plan.tile.num_stages,
                divisible=("*_ptr", "stride_*" if math.gcd(*sizes) % 16 == 0 else "stride_table*"),
                max_spill=spill_odd if name.startswith("odd_sizes") else spill if query_len else spill_varlen,
            )
        )
    return specs
