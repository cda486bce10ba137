"""Prefill attention: the operator `prompt_attention`, and the launch of its Triton kernel."""

from __future__ import annotations

import warnings

import torch

from graphrt.kernels.attention.arguments import (
    check_contiguous_tensors,
    check_paged_tensors,
    compiled_types,
    logit_constants,
)
from graphrt.kernels.attention.options import FP8_DTYPES, MAX_WINDOW, AttentionOptions, check_options
from graphrt.kernels.attention.prompt_call import PromptCall
from graphrt.kernels.attention.prompt_kernel import prompt_kernel
from graphrt.kernels.attention.prompt_native import native_prompt, prompt_unsupported_reason
from graphrt.kernels.attention.prompt_plan import PROMPT_HEAD_DIMS, PromptPlan
from graphrt.kernels.attention.prompt_schedule import check_schedule
from graphrt.kernels.attention.reference import reference_prompts
from graphrt.kernels.checks import check_int, check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError, UnsupportedError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp


def _constexprs(plan: PromptPlan, options: AttentionOptions, kv_dtype: torch.dtype, left: int) -> dict[str, object]:
    """Return the constexpr arguments of the kernel, except those that distinguish paged and packed calls."""
    return {
        "NUM_QUERIES_PER_KV": plan.num_queries_per_kv,
        "HEAD_DIM": plan.head_dim,
        "HAS_LEFT": left < MAX_WINDOW,
        "HAS_SOFTCAP": options.logits_softcap > 0.0,
        "ALIBI_SQRT": options.alibi_sqrt,
        "IS_FP8": kv_dtype in FP8_DTYPES,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_D": plan.block_d,
        "NUM_STAGES": plan.num_stages,
    }


_launch_kernel = KernelLauncher(prompt_kernel)


def _launch(call: PromptCall) -> None:
    """Launch the Triton kernel, with one program per KV head and query tile, for the plan's maximum of query tiles."""
    plan, options, table = call.plan, call.options, call.block_table
    logit_factor, logit_cap = logit_constants(options.softmax_scale, options.logits_softcap)
    k_strides, v_strides = ((0, *t.stride()[:2]) if table is None else t.stride()[:3] for t in (call.k, call.v))
    _launch_kernel(
        (plan.num_kv_heads, plan.max_q_tiles),
        call.q,
        call.k,
        call.v,
        call.schedule if table is None else table,
        call.schedule,
        call.out,
        call.lse,
        options.k_scale,
        options.v_scale,
        options.alibi_slopes,
        options.sinks,
        logit_factor,
        logit_cap,
        call.left,
        call.right,
        *call.q.stride()[:2],
        *k_strides,
        *v_strides,
        0 if table is None else table.stride(0),
        *call.out.stride()[:2],
        0 if call.lse is None else call.lse.stride(0),
        *options.scale_strides,
        PAGE_SIZE=1 if table is None else call.k.shape[1],
        PAGED=table is not None,
        **_constexprs(plan, options, call.k.dtype, call.left),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )


def _on_device(call: PromptCall) -> None:
    if call.q.is_cuda and call.plan.num_blocks:
        reason = prompt_unsupported_reason(call)
        if reason is None:
            native_prompt(call)
            return
        warnings.warn(
            f"prompt_attention: the CUDA kernel cannot run because {reason}; the slower Triton kernel runs instead",
            RuntimeWarning,
            stacklevel=2,
        )
    _launch(call)


_prompt = DeclaredOp("prompt_attention", PromptCall, triton_impl=_on_device, reference=reference_prompts)


def prompt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    plan: PromptPlan,
    schedule: torch.Tensor,
    options: AttentionOptions,
    *,
    block_table: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend from many new tokens per request to the request's pages, or to packed keys and values.

    q, out        [num_tokens, num_q_heads, head_dim]   fp16, bf16 or fp32; out is written
    k, v          [num_pages, page_size, num_kv_heads, head_dim]  with block_table: the requests' pages, which already
                  contain the K and V of the new tokens
                  [kv_tokens, num_kv_heads, head_dim]  without block_table: K and V of the requests, packed
                  dtype of q, or fp8; any strides, the last 1
    schedule      written by `schedule_prompt` in this step from the same plan. With block_table, it is written from
                  `seq_lens`, otherwise from `kv_start_loc` (`seq_lens_are_starts`). Calls that share a schedule must
                  run one after another
    options       causal, sliding_window and all other options, as for `paged_attention`
    block_table   [num_reqs, max_pages]   int32
    window        (left, right), without options.causal: positions before and after its own that a token sees;
                  None: all. The last token of a request is at the position of its last key
    lse           [num_tokens, num_q_heads]  natural log of the softmax's denominator, sinks included   float32,
                  written. For a token that sees no key, it is the sink, or -inf without sinks. For padding tokens, it
                  is -inf

    The kernel writes tokens query_start_loc[0] and above, and zeros to padding tokens (query_start_loc[-1] and above).
    It does not write tokens before query_start_loc[0]; a decode kernel may write them first.

    Keys and values that no token of the request sees may be NaN. The caller must guarantee valid pages and lengths, as
    for `paged_attention`. Packed keys need a kv_start_loc that does not decrease and ends at kv_tokens or less.

    Capture-safe: one launch, no sync, no allocation; the grid depends only on the plan.

    Raises: ShapeError, CapacityError, UnsupportedError.
    """
    if options.attention_chunk_size:
        raise UnsupportedError(
            f"attention_chunk_size: expected 0, got {options.attention_chunk_size}; use paged_attention instead"
        )
    left, right = _reach(options, window)
    check_schedule(plan, schedule, q.device)
    one = schedule[:1]  # checked in place of the length tensors, which the schedule replaces
    if block_table is None:
        check_contiguous_tensors(q, k, v, one, one, out, options, lse)
    else:
        check_tensor("block_table", block_table, shape=(plan.num_reqs, None), dtype=torch.int32, device=q.device)
        check_unit_stride("block_table", block_table)
        check_paged_tensors(q, k, v, block_table[:1], one, out, lse)
        check_options(options, q.shape[1], k.shape[2], k.dtype, q.device)
    heads = (plan.num_tokens, plan.num_q_heads, plan.head_dim)
    if q.shape != heads or k.shape[-2] != plan.num_kv_heads:
        raise ShapeError(
            f"q: expected {heads[0]} tokens, {heads[1]} query and {plan.num_kv_heads} KV heads of size {heads[2]} as "
            f"in the plan, got {q.shape[0]} tokens, {q.shape[1]} and {k.shape[-2]} heads of size {q.shape[2]}; make "
            f"a plan for "
            "this shape"
        )
    if v.shape[-1] != plan.head_dim:
        raise UnsupportedError(
            f"v: expected head size {plan.head_dim} as in q and k, got {v.shape[-1]}; use paged_attention"
        )
    if plan.head_dim not in PROMPT_HEAD_DIMS:
        raise UnsupportedError(
            f"q: expected a head_dim that is a multiple of 8 from 16 to 256, got {plan.head_dim}; use paged_attention"
        )
    _prompt(PromptCall(q, k, v, block_table, schedule, out, lse, left, right, options, plan))


def _reach(options: AttentionOptions, window: tuple[int, int] | None) -> tuple[int, int]:
    """Return the positions before and after its own that a token sees; MAX_WINDOW: all."""
    if window is None:
        return options.reach
    if options.causal:
        raise ShapeError(f"window: expected None with causal, got {window!r}; use options.sliding_window")
    if not (isinstance(window, tuple) and len(window) == 2):
        raise ShapeError(f"window: expected (left, right) or None, got {window!r}; pass two ints")
    for side in window:
        check_int("window", side, 0, MAX_WINDOW, advice="None switches it off", error=ShapeError)
    return window


def compile_variants() -> list[CompileSpec]:
    """Return the variants that a test compiles without a GPU: shapes of common models, and corner cases."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    cases: list[tuple[str, torch.dtype, torch.dtype, int, int, int, bool]] = [
        # name, dtype, KV dtype, head_dim, num_queries_per_kv, page_size (0: packed), every option
        ("llama", bf16, bf16, 128, 4, 16, False),
        ("llama_page64", fp16, fp16, 128, 4, 64, False),
        ("llama_fp8", bf16, e4m3, 128, 4, 16, False),
        ("packed", bf16, bf16, 128, 4, 0, False),
        ("encoder", fp16, fp16, 64, 1, 0, False),
        ("options", fp16, fp16, 96, 3, 16, True),
        ("gemma", bf16, bf16, 256, 2, 16, True),
        ("gemma_fp8", bf16, e5m2, 256, 8, 16, True),
        ("fp32", fp32, fp32, 80, 4, 16, True),
        ("fp32_large", fp32, fp32, 256, 8, 0, False),
    ]
    specs = []
    for name, dtype, kv_dtype, head_dim, num_queries_per_kv, page_size, every in cases:
        plan = PromptPlan.make(
            64, 2048, num_q_heads=8 * num_queries_per_kv, num_kv_heads=8, head_dim=head_dim, dtype=dtype,
            kv_dtype=kv_dtype,
            num_sms=132,
        )  # fmt: skip
        options = AttentionOptions(1.0, True, int(every), logits_softcap=float(every), alibi_sqrt=every)
        constexprs: dict[str, object] = {
            **_constexprs(plan, options, kv_dtype, _reach(options, None)[0]),
            "PAGE_SIZE": page_size or 1,
            "PAGED": page_size > 0,
        }
        types = compiled_types(dtype, kv_dtype, constexprs, options=every)
        specs.append(
            CompileSpec(
                f"prompt_{name}", prompt_kernel, types, constexprs, plan.num_warps, plan.num_stages,
                divisible=("*_ptr", "stride_*"),
            )
        )  # fmt: skip
    return specs
