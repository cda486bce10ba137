"""Products of any number of tokens with quantized weights, which are dequantized in registers.

    out[token, row] = sum over k of x[token, k] * w[row, k] + bias[row]

A program computes a tile of rows and tokens. Rows are the first operand of `tl.dot`, which tensor cores read from
registers, so dequantized weights do not pass through shared memory. Sums are in float32 and in the order of k, so the
result of a token depends neither on other tokens nor on the order of programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.quantized import QuantizedWeight, dequantized
from graphrt.kernels.sizes import ceil_div


@dataclass(frozen=True, slots=True)
class ProductCall:
    """A product, declared once for operator, kernel and reference. Absent tensors are None.

    x     [tokens, depth]  rows may be strided
    data, scale, zero      tensors of an Int4Weight, or of an Fp8Weight if `zero` is None
    bias  [rows]           x's dtype
    out   [tokens, rows]   x's dtype, contiguous
    """

    x: torch.Tensor
    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bias: torch.Tensor | None
    out: Written


@triton.jit
def _product_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    depth,
    stride_x,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Tokens and rows beyond the last one read the last one. Their results are not stored.
    x_ptrs = x_ptr + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * stride_x
    row = tl.minimum(rows, num_rows - 1).to(tl.int64)
    ks = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    if GROUP:
        of_group = row * (depth // GROUP)
        next_scale, next_zero = tl.load(scale_ptr + of_group), tl.load(zero_ptr + of_group)
    for first in range(0, depth, DEPTH):
        k = first + ks
        x = tl.load(x_ptrs + k[:, None], mask=k[:, None] < depth, other=0.0)
        if GROUP:
            words = tl.load(data_ptr + row[:, None] * (depth // 8) + (first // 8 + tl.arange(0, DEPTH // 8))[None, :])
            scale, zero = next_scale.to(tl.float32), next_zero.to(tl.int32)
            # Triton does not prefetch loads of less than 4 bytes.
            of_group = row * (depth // GROUP) + tl.minimum(first + DEPTH, depth - 1) // GROUP
            next_scale, next_zero = tl.load(scale_ptr + of_group), tl.load(zero_ptr + of_group)
            # Nibble n of a word holds k = 2 * (n % 4) + n // 4.
            even = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12))
            q = tl.reshape(tl.join(even, even >> 16) & 15, (ROWS, DEPTH)) - zero[:, None]
            weight = (q.to(tl.float32) * scale[:, None]).to(dtype)
        else:
            weight = tl.load(data_ptr + row[:, None] * depth + k[None, :], mask=k[None, :] < depth, other=0.0).to(dtype)
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    if not GROUP:
        sums *= tl.load(scale_ptr + row)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    stored = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    out_ptrs = out_ptr + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(out_ptrs, sums.to(dtype), mask=stored)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tile of a program, and launch options."""

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int


def _tiles(tokens: int, group: int, itemsize: int) -> _Tiles:
    """Return the tiles for a number of tokens. A tile of int4 has one group, or a part of one.

    With few tokens, reading the weights takes most of the time, so there are many small tiles of rows.
    """
    parts = 2 if itemsize == 4 else 1  # float32 takes twice the registers and shared memory
    deep, flat = min(128 // parts, group or 128), min(64 // parts, group or 64)
    if tokens <= 32:
        return _Tiles(16 if tokens <= 16 else 32, 32, deep, 4, 5)
    if tokens <= 64:
        return _Tiles(64, 64, flat, 4, 4)
    if tokens <= 256:
        return _Tiles(128 // parts, 64, flat, 4, 4)
    return _Tiles(128 // parts, 128 // parts, flat, 8, 3)


_launch_kernel = KernelLauncher(_product_kernel)


def _launch(call: ProductCall) -> None:
    (num_tokens, depth), num_rows = call.x.shape, call.data.shape[0]
    group = 0 if call.zero is None else depth // call.zero.shape[1]
    tiles = _tiles(num_tokens, group, call.x.element_size())
    _launch_kernel(
        (ceil_div(num_tokens, tiles.tokens), ceil_div(num_rows, tiles.rows)),
        call.x, call.data.view(torch.int32) if group else call.data, call.scale, call.zero, call.bias, call.out,
        num_tokens, num_rows, depth, call.x.stride(0),
        GROUP=group, ROWS=tiles.rows, TOKENS=tiles.tokens, DEPTH=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _reference(call: ProductCall) -> None:
    bias = None if call.bias is None else call.bias.float()
    call.out.copy_(functional.linear(call.x.float(), dequantized(call.data, call.scale, call.zero), bias))


_op = DeclaredOp("quantized_product", ProductCall, triton_impl=_launch, reference=_reference)


def quantized_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, like `torch.nn.functional.linear`.

    x        [tokens, depth]  weight.dtype  device; rows may be strided, last stride 1
    bias     [rows]           weight.dtype  device
    returns  [tokens, rows]   weight.dtype, contiguous

    Sums are in float32. Capture-safe: the launch depends on shapes only. The caller checks the arguments, as `linear`
    does.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if len(out):
        _op(ProductCall(x, *weight.tensors(), bias, out))
    return out


def compile_variants() -> list[CompileSpec]:
    """Return variants of every format and size of tiles, and of other dtypes."""
    specs = []
    cases = [("bf16", group, tokens) for group in (0, 32, 64, 128) for tokens in (16, 32, 64, 256, 512)]
    cases += [("fp16", 128, 16), ("fp16", 0, 512)]
    cases += [("fp32", group, tokens) for group in (0, 128) for tokens in (16, 64, 256, 512)]
    for kind, group, tokens in cases:
        tiles = _tiles(tokens, group, 4 if kind == "fp32" else 2)
        types = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), f"*{kind}")
        types |= {"data_ptr": "*i32", "scale_ptr": f"*{kind}", "zero_ptr": "*u8"}
        constexprs: dict[str, object] = {
            "GROUP": group, "ROWS": tiles.rows, "TOKENS": tiles.tokens, "DEPTH": tiles.depth,
        }  # fmt: skip
        if not group:
            types |= {"data_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
            constexprs["zero_ptr"] = None
        name = f"quantized_product_{kind}_{f'int4_{group}' if group else 'fp8'}_{tokens}"
        specs.append(
            CompileSpec(
                name, _product_kernel, types, constexprs, tiles.num_warps, tiles.num_stages,
                divisible=("*_ptr", "depth", "stride_x", "num_rows"),
            )
        )  # fmt: skip
    return specs
