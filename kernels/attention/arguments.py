"""Host code shared by the attention operators: argument checks and logit constants."""

from __future__ import annotations

import math

import torch

from graphrt.kernels.attention.options import FP8_DTYPES, AttentionOptions, check_options
from graphrt.kernels.checks import check_no_overlap, check_not_empty, check_tensor, check_unit_stride
from graphrt.kernels.errors import ShapeError, UnsupportedError

ATTENTION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KV_DTYPES = (*ATTENTION_DTYPES, *FP8_DTYPES)
MAX_HEAD_DIM = 512
HEAD_DIMS = tuple(range(1, MAX_HEAD_DIM + 1))
"""Head sizes that the Triton kernel supports for K and V. It pads them to powers of two in registers."""
TRITON_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
"""Names of the dtypes in a Triton signature."""

_LOG2E = math.log2(math.e)


def logit_constants(softmax_scale: float, logits_softcap: float) -> tuple[float, float]:
    """Return the two constants that the kernels use to convert `q . k` to logits in units of log 2.

    Without softcap, the logit is `factor * qk`. With softcap, `cap * tanh(scale * qk / cap)` is computed as
    `cap * (1 - 2 / (exp2(factor * qk) + 1))`. The first value is the factor, the second is the cap.
    """
    if logits_softcap == 0.0:
        return softmax_scale * _LOG2E, 0.0
    return 2.0 * _LOG2E * softmax_scale / logits_softcap, logits_softcap * _LOG2E


def check_paged_tensors(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Raise ShapeError unless the tensors of a call over the paged cache match."""
    check_tensor("q", q, shape=(None, None, None), dtype=ATTENTION_DTYPES)
    head_dim, device = q.shape[2], q.device
    kv_dtypes = (q.dtype, *FP8_DTYPES)
    check_tensor("k_cache", k_cache, shape=(None, None, None, head_dim), dtype=kv_dtypes, device=device)
    check_tensor("v_cache", v_cache, shape=(*k_cache.shape[:3], None), dtype=k_cache.dtype, device=device)
    check_tensor("seq_lens", seq_lens, shape=(None,), dtype=torch.int32, device=device)
    check_tensor("block_table", block_table, shape=(seq_lens.shape[0], None), dtype=torch.int32, device=device)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)):
        check_unit_stride(name, tensor)
        check_not_empty(name, tensor)
    check_unit_stride("seq_lens", seq_lens)
    _check_q_side(q, out, lse, k_cache.shape[2], v_cache.shape[3])


def check_contiguous_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_start_loc: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    options: AttentionOptions,
    lse: torch.Tensor | None = None,
) -> None:
    """Raise ShapeError unless the tensors and options of a call with contiguous K and V match."""
    check_tensor("q", q, shape=(None, None, None), dtype=ATTENTION_DTYPES)
    head_dim, device = q.shape[2], q.device
    check_tensor("k", k, shape=(None, None, head_dim), dtype=(q.dtype, *FP8_DTYPES), device=device)
    check_tensor("v", v, shape=(*k.shape[:2], None), dtype=k.dtype, device=device)
    check_tensor("query_start_loc", query_start_loc, shape=(None,), dtype=torch.int32, device=device)
    check_tensor("kv_start_loc", kv_start_loc, shape=query_start_loc.shape, dtype=torch.int32, device=device)
    for name, tensor in (("k", k), ("v", v), ("kv_start_loc", kv_start_loc), ("query_start_loc", query_start_loc)):
        check_unit_stride(name, tensor)
    _check_q_side(q, out, lse, k.shape[1], v.shape[2])
    check_options(options, q.shape[1], k.shape[1], k.dtype, q.device)


def _check_q_side(
    q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, num_kv_heads: int, v_head_dim: int
) -> None:
    check_tensor("out", out, shape=(*q.shape[:2], v_head_dim), dtype=q.dtype, device=q.device)
    check_unit_stride("q", q)
    check_unit_stride("out", out)
    check_no_overlap("out", out)
    if lse is not None:
        check_tensor("lse", lse, shape=q.shape[:2], dtype=torch.float32, device=q.device)
        check_unit_stride("lse", lse)
        check_no_overlap("lse", lse)
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise ShapeError(
            f"q: expected a multiple of k_cache's {num_kv_heads} KV heads, got {q.shape[1]} heads; "
            "pass the cache of the same layer"
        )


def check_query_starts(
    query_start_loc: torch.Tensor | None, num_reqs: int, query_len: int, device: torch.device
) -> None:
    """Raise ShapeError unless query_start_loc is [num_reqs + 1], or None for a plan whose query_len is fixed."""
    if (query_start_loc is None) != (query_len > 0):
        want, got = ("None", "a tensor") if query_len else ("a tensor", "None")
        raise ShapeError(
            f"query_start_loc: expected {want} for a plan with query_len={query_len}, got {got}; "
            "make a plan without query_len by AttentionPlan.varlen"
        )
    if query_start_loc is not None:
        check_tensor("query_start_loc", query_start_loc, shape=(num_reqs + 1,), dtype=torch.int32, device=device)
        check_unit_stride("query_start_loc", query_start_loc)


def check_triton_head_dim(name: str, head_dim: int) -> None:
    """Raise UnsupportedError unless the Triton kernels support this head size."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedError(
            f"{name}: expected a head size from 1 to {MAX_HEAD_DIM}, got {head_dim}; "
            "choose the backend 'torch_reference'"
        )


def compiled_types(
    dtype: torch.dtype, kv_dtype: torch.dtype, constexprs: dict[str, object], *, options: bool
) -> dict[str, str]:
    """Return the types of an attention kernel's arguments. Without `options`, optional pointers are None constexprs."""
    optional = ("lse_ptr", "k_scale_ptr", "v_scale_ptr", "slopes_ptr", "sinks_ptr")
    if not options:
        constexprs |= dict.fromkeys(optional)
    types = dict.fromkeys((*optional, "partial_out_ptr", "partial_lse_ptr"), "*fp32")
    types |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{TRITON_DTYPES[dtype]}")
    types |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{TRITON_DTYPES[kv_dtype]}")
    return types | dict.fromkeys(("logit_factor", "logit_cap"), "fp32")
