"""Copy the real tokens of an external kernel's result, and fill the pad tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.attention.arguments import TRITON_DTYPES
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.sizes import ceil_div, next_power_of_two

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MAX_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit
def _copy_live_kernel(
    result_ptr,
    live_ptr,
    first_ptr,
    out_ptr,
    fill,
    width,
    inner,
    stride_token,
    stride_outer,
    stride_inner,
    stride_out_token,
    stride_out_outer,
    FLAT: tl.constexpr,  # the values of a token are contiguous in `result` and `out`
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if first_ptr is not None:
        # Another kernel owns the tokens before `first`.
        if token < tl.load(first_ptr):
            return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    # Do not read pad tokens, because the kernel may not have written them.
    live = tl.load(live_ptr + token).to(tl.int32)
    read = at < live * width
    from_at = at
    to_at = at
    if not FLAT:
        from_at = (at // inner) * stride_outer + (at % inner) * stride_inner
        to_at = (at // inner) * stride_out_outer + at % inner
    value = tl.load(result_ptr + token * stride_token + from_at, mask=read, other=0.0)
    filled = (tl.zeros([BLOCK], tl.float32) + fill).to(value.dtype)
    tl.store(out_ptr + token * stride_out_token + to_at, tl.where(read, value, filled), mask=mask)


@dataclass(frozen=True, slots=True)
class _Call:
    result: torch.Tensor
    live: torch.Tensor
    first: torch.Tensor | None
    out: Written
    fill: float


def _launch(call: _Call) -> None:
    tokens, outer, inner = call.out.shape
    block = min(next_power_of_two(outer * inner), _MAX_BLOCK)
    flat = call.result.stride()[1:] == (inner, 1) and call.out.stride(1) == inner
    _copy_live_kernel[(tokens, ceil_div(outer * inner, block))](
        call.result, call.live, call.first, call.out, call.fill, outer * inner, inner, *call.result.stride(),
        *call.out.stride()[:2], FLAT=flat, BLOCK=block, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(call: _Call) -> None:
    first = 0 if call.first is None else int(call.first)
    live = call.live[first:].view(-1, 1, 1)
    call.out[first:] = torch.where(live, call.result[first:].to(call.out.dtype), call.fill)


_op = DeclaredOp("copy_live", _Call, triton_impl=_launch, reference=_reference)


def copy_live(
    result: torch.Tensor,
    live: torch.Tensor,
    out: torch.Tensor,
    *,
    fill: float = 0.0,
    first: torch.Tensor | None = None,
) -> None:
    """Copy the real tokens of `result` to `out`, and write `fill` to the other tokens.

    result  [tokens, outer, inner]  float16, bfloat16 or float32  device; any strides
    live    [tokens]                bool                          device; True for real tokens; other tokens are not
    read
    out     [tokens, outer, inner]  result's dtype                device; written; last stride 1
    first   [1]                     int32                         device; tokens before it are not written; None: 0

    Capture-safe: the grid depends on shapes only.
    Raises: ShapeError: if a tensor does not match `out`.
    """
    check_tensor("out", out, shape=(None, None, None), dtype=_FLOATS)
    check_unit_stride("out", out)
    check_tensor("result", result, shape=tuple(out.shape), dtype=out.dtype, device=out.device)
    check_tensor("live", live, shape=(out.shape[0],), dtype=torch.bool, device=out.device)
    check_unit_stride("live", live)
    if first is not None:
        check_tensor("first", first, shape=(1,), dtype=torch.int32, device=out.device)
    _op(_Call(result, live, first, out, fill))


def compile_variants() -> list[CompileSpec]:
    """Return variants for outputs of both 16-bit dtypes and for log-sum-exps, with and without `first`."""
    specs = []
    cases = (("bf16", torch.bfloat16, True), ("fp16", torch.float16, False), ("lse", torch.float32, True))
    for name, dtype, part in cases:
        kind = f"*{TRITON_DTYPES[dtype]}"
        constexprs: dict[str, object] = {"BLOCK": _MAX_BLOCK, "FLAT": name != "lse"}
        constexprs |= {} if part else {"first_ptr": None}
        types = {"result_ptr": kind, "out_ptr": kind, "live_ptr": "*i1", "fill": "fp32"}
        divisible = ("result_ptr", "out_ptr", "width", "stride_token", "stride_out_token")
        specs.append(
            CompileSpec(f"copy_live_{name}", _copy_live_kernel, types, constexprs, _NUM_WARPS, 3, divisible=divisible)
        )
    return specs
