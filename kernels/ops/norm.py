"""RMSNorm (Zhang and Sennrich 2019), optionally fused with the preceding residual addition; one program per token."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride, once_per_geometry
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.library import define_op
from graphrt.kernels.ops.reference import add_rms_norm_reference, rms_norm_reference
from graphrt.kernels.sizes import next_power_of_two

MAX_HIDDEN_SIZE = 16384
"""Largest hidden size, because a program keeps the whole token in registers."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _rms_norm_kernel(
    residual_ptr,
    x_ptr,
    weight_ptr,
    out_ptr,
    eps,
    stride_residual,
    stride_x,
    stride_out,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < HIDDEN
    x = tl.load(x_ptr + token * stride_x + dims, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + token * stride_residual + dims
        total = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32) + x
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, rounded, mask=mask)
        x = rounded.to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rstd = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    normed = (x * rstd).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + token * stride_out + dims, normed.to(dtype), mask=mask)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


_launch_kernel = KernelLauncher(_rms_norm_kernel)


def _launch(residual: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    tokens, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    block = next_power_of_two(hidden)
    _launch_kernel(
        (tokens,),
        residual, x, weight, out, eps, 0 if residual is None else residual.stride(0), x.stride(0), out.stride(0),
        HIDDEN=hidden, BLOCK=block, HAS_RESIDUAL=residual is not None, num_warps=_num_warps(block),
    )  # fmt: skip
    return out


_rms_norm_op = define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    triton_impl=partial(_launch, None),
    reference=rms_norm_reference,
    fake=lambda x, weight, eps: x.new_empty(x.shape),
)
_add_rms_norm_op = define_op(
    "add_rms_norm(Tensor(a!) residual, Tensor x, Tensor weight, float eps) -> Tensor",
    triton_impl=_launch,
    reference=add_rms_norm_reference,
    fake=lambda residual, x, weight, eps: x.new_empty(x.shape),
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of each token: x / sqrt(mean(x^2) + eps) * weight.

    x        [tokens, hidden]  float16, bfloat16 or float32  device; rows may be strided
    weight   [hidden]          any of these dtypes           device
    returns  [tokens, hidden]  x's dtype, contiguous

    Statistics are computed in float32. The normalized value is rounded to x's dtype before scaling, as in Llama.
    Capture-safe: the launch depends on shapes only.
    Raises: ShapeError: if a tensor has the wrong shape, dtype, device or stride. UnsupportedError: if hidden is larger
        than MAX_HIDDEN_SIZE.
    """
    _check(x, weight)
    result: torch.Tensor = _rms_norm_op(x, weight, eps)
    return result


def add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` in place, and return the RMSNorm of the sum.

    residual  [tokens, hidden]  float16, bfloat16 or float32  device; changed in place, rounded to its dtype
    x         [tokens, hidden]  any of these dtypes           device
    weight    [hidden]          any of these dtypes           device
    returns   [tokens, hidden]  x's dtype, contiguous

    Capture-safe: the launch depends on shapes only.
    Raises: see `rms_norm`.
    """
    _check_added(x, weight, residual)
    result: torch.Tensor = _add_rms_norm_op(residual, x, weight, eps)
    return result


@once_per_geometry
def _check_added(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    _check(x, weight)
    check_tensor("residual", residual, shape=x.shape, dtype=_FLOATS, device=x.device)
    check_unit_stride("residual", residual)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_tensor("x", x, shape=(None, None), dtype=_FLOATS)
    check_tensor("weight", weight, shape=(x.shape[1],), dtype=_FLOATS, device=x.device)
    check_unit_stride("x", x)
    check_unit_stride("weight", weight)
    if not 1 <= x.shape[1] <= MAX_HIDDEN_SIZE:
        raise UnsupportedError(
            f"x: expected a hidden size from 1 to {MAX_HIDDEN_SIZE}, got {x.shape[1]}; use torch.nn.functional.rms_norm"
        )


def compile_variants() -> list[CompileSpec]:
    """Return variants with common, odd and the largest hidden sizes, with and without residual."""
    specs = []
    for name, kind, residual_kind, hidden in (
        ("bf16_4096", "bf16", None, 4096),
        ("add_bf16_4096", "bf16", "bf16", 4096),
        ("add_fp16_to_fp32_2880", "fp16", "fp32", 2880),
        ("add_fp32_16384", "fp32", "fp32", 16384),
    ):
        block = next_power_of_two(hidden)
        constexprs: dict[str, object] = {"HIDDEN": hidden, "BLOCK": block, "HAS_RESIDUAL": residual_kind is not None}
        if residual_kind is None:
            constexprs["residual_ptr"] = None
        types = {f"{argument}_ptr": f"*{kind}" for argument in ("x", "weight", "out")}
        types |= {"residual_ptr": f"*{residual_kind}", "eps": "fp32"}
        specs.append(
            CompileSpec(
                f"rms_norm_{name}", _rms_norm_kernel, types, constexprs, _num_warps(block), 3,
                divisible=("*_ptr", "stride_*"),
            )
        )  # fmt: skip
    return specs
