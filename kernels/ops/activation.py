"""The elementwise part of SwiGLU (Shazeer 2020): silu(gate) * up, on the output of one joint matrix product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.library import define_op
from graphrt.kernels.ops.reference import silu_mul_reference
from graphrt.kernels.sizes import next_power_of_two

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MAX_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, stride_gate_up, stride_out, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = dims < width
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    gate_ptrs = gate_up_ptr + token * stride_gate_up + dims
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * stride_out + dims, (activated * up).to(dtype), mask=mask)


_launch = KernelLauncher(_silu_mul_kernel)


def _silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens == 0:
        return out
    block = min(next_power_of_two(width), _MAX_BLOCK)
    grid = (tokens, -(-width // block))
    _launch(grid, gate_up, out, width, gate_up.stride(0), out.stride(0), BLOCK=block, num_warps=_NUM_WARPS)
    return out


_op = define_op(
    "silu_mul(Tensor gate_up) -> Tensor",
    triton_impl=_silu_mul_triton,
    reference=silu_mul_reference,
    fake=lambda gate_up: gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)),
)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for each token; a row of `gate_up` holds gate, then up.

    gate_up  [tokens, 2 * width]  float16, bfloat16 or float32  device; rows may be strided
    returns  [tokens, width]      gate_up's dtype, contiguous

    The activation is computed in float32 and rounded before the product, as in PyTorch.
    Capture-safe: the launch depends on shapes only.
    Raises: ShapeError: if `gate_up` has the wrong rank, dtype or stride, or an odd width.
    """
    check_tensor("gate_up", gate_up, shape=(None, None), dtype=_FLOATS)
    check_unit_stride("gate_up", gate_up)
    if gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        raise ShapeError(f"gate_up: expected an even width > 0, got {gate_up.shape[1]}; concatenate gate and up")
    result: torch.Tensor = _op(gate_up)
    return result


def compile_variants() -> list[CompileSpec]:
    """Return one variant per dtype."""
    specs = []
    for kind in ("fp16", "bf16", "fp32"):
        types = {"gate_up_ptr": f"*{kind}", "out_ptr": f"*{kind}"}
        divisible = ("gate_up_ptr", "out_ptr", "width", "stride_gate_up", "stride_out")
        specs.append(
            CompileSpec(
                f"silu_mul_{kind}", _silu_mul_kernel, types, {"BLOCK": _MAX_BLOCK}, _NUM_WARPS, 3, divisible=divisible
            )
        )
    return specs
