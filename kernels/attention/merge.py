"""Merge two attentions of the same queries over disjoint sets of keys, weighted by their log-sum-exps.

Splitting the keys and merging by log-sum-exp: Juravsky et al. 2024 (Hydragen), Ye et al. 2025 (FlashInfer).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.attention.arguments import ATTENTION_DTYPES, TRITON_DTYPES
from graphrt.kernels.checks import check_no_overlap, check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.sizes import ceil_div, next_power_of_two

_MAX_HEAD_DIM = 1024
_TILE_ELEMENTS = 1024
"""Elements of each input that a program processes, unless one head has more. Not measured."""

_NUM_WARPS = 4
"""Warps of a program. Not measured."""


@triton.jit
def _merge_attention_kernel(
    out_a_ptr,  # [tokens, heads, head_dim]
    lse_a_ptr,  # [tokens, heads]
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,  # like lse_a, or None
    num_heads,
    head_dim,
    stride_out_a_token,
    stride_out_a_head,
    stride_lse_a_token,
    stride_lse_a_head,
    stride_out_b_token,
    stride_out_b_head,
    stride_lse_b_token,
    stride_lse_b_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_heads = heads < num_heads
    mask = in_heads[:, None] & (d < head_dim)[None, :]
    lse_a_ptrs = lse_a_ptr + token * stride_lse_a_token + heads * stride_lse_a_head
    lse_b_ptrs = lse_b_ptr + token * stride_lse_b_token + heads * stride_lse_b_head
    lse_a = tl.load(lse_a_ptrs, mask=in_heads, other=float("-inf"))
    lse_b = tl.load(lse_b_ptrs, mask=in_heads, other=float("-inf"))
    # Do not read a side that saw no key, because it may contain NaN, and a weight of 0 times NaN is NaN.
    mask_a = mask & (lse_a != float("-inf"))[:, None]
    mask_b = mask & (lse_b != float("-inf"))[:, None]
    out_a_ptrs = out_a_ptr + (token * stride_out_a_token + heads * stride_out_a_head)[:, None] + d[None, :]
    out_b_ptrs = out_b_ptr + (token * stride_out_b_token + heads * stride_out_b_head)[:, None] + d[None, :]
    out_a = tl.load(out_a_ptrs, mask=mask_a, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptrs, mask=mask_b, other=0.0).to(tl.float32)
    top = tl.maximum(lse_a, lse_b)
    top = tl.where(top == float("-inf"), 0.0, top)  # if neither side saw a key, -inf - -inf is NaN
    weight_a = tl.exp(lse_a - top)
    weight_b = tl.exp(lse_b - top)
    total = weight_a + weight_b
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = out_a * (weight_a / divisor)[:, None] + out_b * (weight_b / divisor)[:, None]
    # Outputs may alias inputs, and several warps may load the same value, so store only after all warps have loaded.
    tl.debug_barrier()
    out_ptrs = out_ptr + (token * stride_out_token + heads * stride_out_head)[:, None] + d[None, :]
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log(divisor))
        tl.store(lse_ptr + token * stride_lse_token + heads * stride_lse_head, lse, mask=in_heads)


@dataclass(frozen=True, slots=True)
class _MergeCall:
    out_a: torch.Tensor
    lse_a: torch.Tensor
    out_b: torch.Tensor
    lse_b: torch.Tensor
    out: Written
    lse: Written | None


def _merge_attention_triton(call: _MergeCall) -> None:
    out_a, lse_a, out_b, lse_b, out, lse = call.out_a, call.lse_a, call.out_b, call.lse_b, call.out, call.lse
    tokens, heads, head_dim = out.shape
    if out.numel() == 0:
        return
    block_h, block_d = _blocks(heads, head_dim)
    _merge_attention_kernel[(tokens, ceil_div(heads, block_h))](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        heads,
        head_dim,
        *out_a.stride()[:2],
        *lse_a.stride(),
        *out_b.stride()[:2],
        *lse_b.stride(),
        *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=_NUM_WARPS,
    )


def _blocks(heads: int, head_dim: int) -> tuple[int, int]:
    block_d = next_power_of_two(head_dim)
    return min(next_power_of_two(heads), max(1, _TILE_ELEMENTS // block_d)), block_d


def _merge_attention_reference(call: _MergeCall) -> None:
    lse_a, lse_b, out, lse = call.lse_a, call.lse_b, call.out, call.lse
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.stack((lse_a - top, lse_b - top)).exp()
    total = weights.sum(0)
    weights /= torch.where(total == 0.0, 1.0, total)
    merged = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for side, side_lse, weight in ((call.out_a, lse_a, weights[0]), (call.out_b, lse_b, weights[1])):
        nothing = (side_lse == float("-inf"))[..., None]
        merged += torch.where(nothing, 0.0, side.float() * weight[..., None])
    out.copy_(merged)
    if lse is not None:
        lse.copy_(top + total.log())


_merge = DeclaredOp(
    "merge_attention", _MergeCall, triton_impl=_merge_attention_triton, reference=_merge_attention_reference
)


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Merge two attentions of the same queries over disjoint sets of keys into the attention over both, in float32.

    out_a, out_b   [tokens, heads, head_dim]  fp16, bf16 or fp32   on the device of out; last stride 1
    lse_a, lse_b   [tokens, heads]            float32              natural logs of the softmax denominators;
                                                                   any strides; -inf: no key, output not read
    out            [tokens, heads, head_dim]  fp16, bf16 or fp32   written; zeros where neither side saw a key
    lse            [tokens, heads]            float32              written if given; -inf where neither side saw a key

    `out` may be `out_a` or `out_b`, and `lse` may be `lse_a` or `lse_b`. Any other overlap is undefined. Apply sinks to
    only one of the two sides; otherwise their weight counts twice.

    Capture-safe: one launch; the grid depends only on shapes.

    Raises: ShapeError, UnsupportedError (head_dim).
    """
    check_tensor("out", out, shape=(None, None, None), dtype=ATTENTION_DTYPES)
    for name, tensor in (("out_a", out_a), ("out_b", out_b)):
        check_tensor(name, tensor, shape=out.shape, dtype=ATTENTION_DTYPES, device=out.device)
    for name, tensor in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        check_unit_stride(name, tensor)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse_a if lse is None else lse)):
        check_tensor(name, tensor, shape=out.shape[:2], dtype=torch.float32, device=out.device)
    check_no_overlap("out", out)
    if lse is not None:
        check_no_overlap("lse", lse)
    if not 1 <= out.shape[2] <= _MAX_HEAD_DIM:
        raise UnsupportedError(
            f"out: expected a head_dim from 1 to {_MAX_HEAD_DIM}, got {out.shape[2]}; move heads to their own dimension"
        )
    _merge(_MergeCall(out_a, lse_a, out_b, lse_b, out, lse))


def compile_variants() -> list[CompileSpec]:
    """Return one variant per dtype, one that rounds float32 partial results, and one with the largest head."""
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    cases = [
        # name, dtype of the sides and of the output, head_dim, with lse
        ("fp16", fp16, fp16, 64, True),
        ("bf16", bf16, bf16, 128, True),
        ("fp32", fp32, fp32, 256, True),
        ("fp32_to_bf16", fp32, bf16, 128, False),
        ("fp32_largest", fp32, fp32, _MAX_HEAD_DIM, True),
    ]
    specs = []
    for name, dtype, out_dtype, head_dim, with_lse in cases:
        block_h, block_d = _blocks(32, head_dim)
        constexprs: dict[str, object] = {"BLOCK_H": block_h, "BLOCK_D": block_d}
        if not with_lse:
            constexprs["lse_ptr"] = None
        types = dict.fromkeys(("out_a_ptr", "out_b_ptr"), f"*{TRITON_DTYPES[dtype]}")
        types |= dict.fromkeys(("lse_a_ptr", "lse_b_ptr", "lse_ptr"), "*fp32")
        types["out_ptr"] = f"*{TRITON_DTYPES[out_dtype]}"
        specs.append(
            CompileSpec(
                f"merge_attention_{name}", _merge_attention_kernel, types, constexprs, _NUM_WARPS, 3,
                divisible=("*_ptr", "head_dim", "stride_out_*"),
            )
        )  # fmt: skip
    return specs
