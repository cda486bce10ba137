"""A read-only sweep over memory, used by benchmarks to measure the upper limit of the decode bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.library import define_op

_BLOCK = 4096
_PROGRAMS = 132 * 8


@triton.jit
def _read_sweep_kernel(x_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(pid * BLOCK, num_elements, stride, num_stages=4):
        total += tl.load(x_ptr + start + offsets, mask=start + offsets < num_elements, other=0.0)
    tl.store(out_ptr + pid, tl.sum(total, axis=0))


def _launch(x: torch.Tensor, out: torch.Tensor) -> None:
    _read_sweep_kernel[(out.shape[0],)](x, out, x.numel(), BLOCK=_BLOCK, num_warps=8)


def _reference(x: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()
    out[0] = x.sum()


_read_sweep_op = define_op("read_sweep(Tensor x, Tensor(a!) out) -> ()", triton_impl=_launch, reference=_reference)


def read_sweep(x: torch.Tensor) -> torch.Tensor:
    """Read all of `x` once and return partial sums.

    x        [n]         float32  device
    returns  [programs]  float32  device; their sum is the sum of `x`

    Capture-safe: the grid is fixed.
    Raises: ShapeError: if `x` is not a 1-D float32 tensor.
    """
    check_tensor("x", x, shape=(None,), dtype=torch.float32)
    out = torch.empty(_PROGRAMS, device=x.device)
    _read_sweep_op(x, out)
    return out


def compile_variants() -> list[CompileSpec]:
    """Return the only variant."""
    return [
        CompileSpec(
            name="read_sweep",
            kernel=_read_sweep_kernel,
            signature={"x_ptr": "*fp32", "out_ptr": "*fp32", "num_elements": "i64"},
            constexprs={"BLOCK": _BLOCK},
            num_warps=8,
            num_stages=3,
            divisible=("x_ptr", "out_ptr"),
        )
    ]
