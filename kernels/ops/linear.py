"""The products of a decoder layer, fused with the elementwise work after them: for model authors.

A Llama layer has four products. In a step with few tokens, each is one kernel:

    q = linear_rope_write(x, qkv, ...)                 rotary embedding, and the write of keys and values
    x = linear_add(attended, o, residual, gain, eps)   the residual addition, and most of RMSNorm
    h = linear_silu_mul(x, gate_up)                    SwiGLU
    x = linear_add(h, down, residual, next_gain, eps)

`linear_plan` chooses between the CUDA kernel of native/linear.cu and a separate product followed by graphrt's kernels.
The CUDA kernel computes at most 64 tokens, in bfloat16. PyTorch computes all other products, or `quantized_product` if
the weight is quantized. Both ways give equal values up to rounding. The choice depends only on shapes, dtypes and
alignment, so a replay equals the eager step.

In a captured step, the kernel loads weights that are parameters before earlier kernels have finished, so a step must
not write a parameter. It loads other tensors only after these kernels have finished.

RMSNorm is split between two products. The first multiplies by the gain and sums the squares. The second divides by
the root mean square. `Normed` holds the intermediate result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import distributed as dist
from torch.nn import functional

from graphrt.kernels.cache.write import Rotary, check_cos_sin, write_kv
from graphrt.kernels.checks import (
    check_contiguous,
    check_no_overlap,
    check_not_empty,
    check_tensor,
    check_unit_stride,
    once_per_geometry,
)
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.ops.activation import silu_mul
from graphrt.kernels.ops.all_reduce import symmetric_buffer_for
from graphrt.kernels.ops.collectives import all_reduce
from graphrt.kernels.ops.linear_call import MAX_TOKENS, STEP_BYTES, End, LinearCall, LinearPlan
from graphrt.kernels.ops.linear_native import linear_native
from graphrt.kernels.ops.linear_plans import linear_plan
from graphrt.kernels.ops.linear_reference import linear_reference
from graphrt.kernels.ops.norm import add_rms_norm
from graphrt.kernels.ops.quantized import QuantizedWeight, Weight, check_weight
from graphrt.kernels.ops.quantized_product import quantized_product


def _run(call: LinearCall) -> None:
    """Launch the kernel. On a CPU, compute the reference, even if Triton kernels are interpreted."""
    (linear_native if call.x.is_cuda else linear_reference)(call)


_op = DeclaredOp("linear", LinearCall, triton_impl=_run, reference=linear_reference)

_ALIGNMENT = 16  # bytes of one load


class Normed(NamedTuple):
    """The input of a product: a vector per token, after RMSNorm, or before the division of RMSNorm.

    x        [tokens, width]  the vector after RMSNorm if `squares` is None, else the vector multiplied by the gain
    squares  [tokens, parts]  float32  sums of squares of parts of the vector before the gain; contiguous
    eps      added to the mean square
    """

    x: torch.Tensor
    squares: torch.Tensor | None = None
    eps: float = 0.0

    def finished(self) -> torch.Tensor:
        """Return the vector after RMSNorm [tokens, width], for operators that do not take a Normed."""
        if self.squares is None:
            return self.x
        mean = self.squares.sum(1, keepdim=True) / self.x.shape[1]
        return (self.x.float() * torch.rsqrt(mean + self.eps)).to(self.x.dtype)


def linear(
    x: torch.Tensor | Normed,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    x            [rows of x, depth]  float16, bfloat16 or float32  device; rows may be strided; or a Normed
    weight       [out, depth]        x's dtype  device; or a quantized weight
    bias         [out]               x's dtype  device
    rows         [tokens]            int64      device; rows of x to multiply, e.g. `step.logits_indices`; None: all
    returns      [tokens, out]       x's dtype, contiguous

    Products are summed in float32. With a Normed, sums are divided by the root mean square before the bias is added.
    Capture-safe: the launch depends on shapes only. Values of `rows` are not checked.
    Raises: ShapeError: if a tensor does not fit the others.
    """
    x = _checked(x, weight, bias)
    tokens = len(x.x) if rows is None else len(rows)
    if rows is not None:
        check_tensor("rows", rows, shape=(None,), dtype=torch.int64, device=weight.device)
    plan = _plan(x.x, tokens, weight, End.PLAIN)
    if plan is None:
        vectors = x.finished()
        return _product(vectors if rows is None else vectors.index_select(0, rows), weight, bias)
    out = torch.empty(tokens, weight.shape[0], dtype=weight.dtype, device=weight.device)
    _op(_call(x, weight, bias, out, End.PLAIN, plan, rows=rows))
    return out


def linear_add(
    x: torch.Tensor | Normed,
    weight: Weight,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Normed:
    """Add x @ weight.T + bias to `residual` in place, and return the RMSNorm of the sum.

    x         [tokens, depth]  float16, bfloat16 or float32  device; or a Normed
    weight    [width, depth]   x's dtype  device; or a quantized weight
    residual  [tokens, width]  x's dtype  device; changed in place, must not overlap x
    gain      [width]          x's dtype  device; weight of the norm
    eps       added to the mean square
    bias      [width]
    group     ranks whose products are summed before the bias is added; each has a part of the depth
    returns   a Normed [tokens, width] for the next product

    Capture-safe. Raises the same errors as `linear`.
    """
    x = _checked(x, weight, bias)
    tokens, width = len(x.x), weight.shape[0]
    _check_residual(x.x, width, residual, gain)
    if group is not None:
        partial = linear(x, weight)
        if (buffer := symmetric_buffer_for(group, partial, residual)) is not None:
            return Normed(buffer.add_norm(partial, residual, gain, eps, bias))
        total = all_reduce(partial, group)
        return Normed(add_rms_norm(residual, total if bias is None else total + bias, gain, eps))
    plan = _plan(x.x, tokens, weight, End.ADD)
    if plan is None or 2 * width % STEP_BYTES:  # the kernel cannot read rows of this width in the next product
        return Normed(add_rms_norm(residual, _product(x.finished(), weight, bias), gain, eps))
    if x.x.data_ptr() == residual.data_ptr():
        raise ShapeError("residual: shares its memory with x, which the kernel reads; pass x.clone()")
    out = torch.empty(tokens, width, dtype=weight.dtype, device=weight.device)
    squares = torch.empty(tokens, width // plan.square_rows, dtype=torch.float32, device=weight.device)
    _op(_call(x, weight, bias, out, End.ADD, plan, residual=residual, gain=gain, squares_out=squares))
    return Normed(out, squares, eps)


def linear_silu_mul(
    x: torch.Tensor | Normed,
    weight: Weight,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up, where x @ weight.T + bias holds gate, then up.

    x        [tokens, depth]      float16, bfloat16 or float32  device; or a Normed
    weight   [2 * width, depth]   x's dtype  device; or a quantized weight
    bias     [2 * width]
    returns  [tokens, width]      x's dtype, contiguous

    Capture-safe. Raises the same errors as `linear`.
    """
    x = _checked(x, weight, bias)
    rows = weight.shape[0]
    if rows % 2:
        raise ShapeError(f"weight: expected an even number of rows, got {rows}; concatenate gate and up")
    plan = _plan(x.x, len(x.x), weight, End.SILU_MUL)
    if plan is None:
        return silu_mul(_product(x.finished(), weight, bias))
    out = torch.empty(len(x.x), rows // 2, dtype=weight.dtype, device=weight.device)
    _op(_call(x, weight, bias, out, End.SILU_MUL, plan))
    return out


def linear_rope_write(
    x: torch.Tensor | Normed,
    weight: Weight,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    *,
    rotary: Rotary | None = None,
    bias: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by the joint weight of queries, keys and values; rotate, store keys and values, return the queries.

    x        [tokens, depth]  float16, bfloat16 or float32  device; or a Normed
    weight   [(num_q_heads + num_kv_heads) * head_dim + num_kv_heads * v_head_dim, depth]  x's dtype  device; or a
             quantized weight
    bias     one value per row of `weight`
    returns  [tokens, num_q_heads, head_dim]  x's dtype; a slice of the product if `write_kv` ran after it

    Other arguments as in `write_kv`. With norms of queries and keys, an fp8 cache, or values whose head size differs
    from the keys', `write_kv` runs after the product.

    Capture-safe. Raises the same errors as `linear` and `write_kv`.
    """
    x = _checked(x, weight, bias)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, shape=(None,) * 4)
    num_kv_heads, head_dim, v_head_dim = *k_cache.shape[2:], v_cache.shape[3]
    kv_rows = num_kv_heads * head_dim, num_kv_heads * v_head_dim
    q_rows = weight.shape[0] - sum(kv_rows)
    if q_rows <= 0 or q_rows % head_dim:
        raise ShapeError(
            f"weight: expected rows for query heads of size {head_dim} and for {num_kv_heads} KV heads, got "
            f"{weight.shape[0]} rows; concatenate the weights of queries, keys and values"
        )
    plan = None
    if head_dim == v_head_dim and k_cache.dtype == weight.dtype and (rotary is None or not _has_norms(rotary)):
        plan = _plan(x.x, len(x.x), weight, End.ROPE_WRITE, head_dim, 0 if rotary is None else rotary.cos_sin.shape[-1])
    if plan is None:
        qkv = linear(x, weight, bias)
        dims = (head_dim, head_dim, v_head_dim)
        parts = qkv.split_with_sizes((q_rows, *kv_rows), 1)
        q, k, v = (part.view(len(qkv), part.shape[1] // dim, dim) for part, dim in zip(parts, dims, strict=True))
        write_kv(q, k, v, k_cache, v_cache, slot_mapping, positions, rotary=rotary, k_scale=k_scale, v_scale=v_scale)
        return q
    out = torch.empty(len(x.x), q_rows, dtype=weight.dtype, device=weight.device)
    cos_sin = None if rotary is None else rotary.cos_sin
    _check_cache(x.x, k_cache, v_cache, slot_mapping, positions, cos_sin)
    _op(
        _call(
            x, weight, bias, out, End.ROPE_WRITE, plan,
            k_cache=k_cache, v_cache=v_cache, slots=slot_mapping, positions=positions, cos_sin=cos_sin,
        )
    )  # fmt: skip
    return out.view(len(out), -1, head_dim)


def _has_norms(rotary: Rotary) -> bool:
    return rotary.q_norm is not None or rotary.k_norm is not None


def _product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias [tokens, rows] without the CUDA kernel."""
    if isinstance(weight, QuantizedWeight):
        return quantized_product(x, weight, bias)
    return functional.linear(x, weight, bias)


def _plan(
    x: torch.Tensor, tokens: int, weight: Weight, end: End, head_dim: int = 0, rotary_dim: int = 0
) -> LinearPlan | None:
    """Return the CUDA kernel's plan for a product; None: `_product` computes it."""
    rows, depth = weight.shape
    bits, data = (weight.bits, weight.data) if isinstance(weight, QuantizedWeight) else (16, weight)
    if weight.dtype is not torch.bfloat16 or not 1 <= tokens <= MAX_TOKENS or depth * bits // 8 % STEP_BYTES:
        return None
    if not data.is_contiguous() or (data.data_ptr() | x.data_ptr() | 2 * x.stride(0)) % _ALIGNMENT:
        return None
    return linear_plan(weight.device, tokens, bits, end, rows, depth, head_dim, rotary_dim)


def _call(
    x: Normed,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    end: End,
    plan: LinearPlan,
    *,
    rows: torch.Tensor | None = None,
    **tensors: torch.Tensor | None,
) -> LinearCall:
    names = ("residual", "gain", "squares_out", "k_cache", "v_cache", "slots", "positions", "cos_sin")
    data, scale, zero = weight.tensors() if isinstance(weight, QuantizedWeight) else (weight, None, None)
    return LinearCall(
        x.x, data, scale, zero, bias, rows, x.squares, out, **{name: tensors.get(name) for name in names},
        eps=x.eps, end=int(end), plan=plan, early=isinstance(data, torch.nn.Parameter),
    )  # fmt: skip


def _checked(x: torch.Tensor | Normed, weight: Weight, bias: torch.Tensor | None) -> Normed:
    normed = x if isinstance(x, Normed) else Normed(x)
    check_weight("weight", weight)
    _check_product(normed.x, normed.squares, weight.shape, weight.dtype, weight.device, bias)
    return normed


@once_per_geometry
def _check_product(
    x: torch.Tensor,
    squares: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    bias: torch.Tensor | None,
) -> None:
    check_tensor("x", x, shape=(None, shape[1]), dtype=dtype, device=device)
    check_unit_stride("x", x)
    if squares is not None:
        check_tensor("squares", squares, shape=(x.shape[0], None), dtype=torch.float32, device=device)
        check_contiguous("squares", squares)
    if bias is not None:
        check_tensor("bias", bias, shape=(shape[0],), dtype=dtype, device=device)
        check_unit_stride("bias", bias)


@once_per_geometry
def _check_residual(x: torch.Tensor, width: int, residual: torch.Tensor, gain: torch.Tensor) -> None:
    check_tensor("residual", residual, shape=(x.shape[0], width), dtype=x.dtype, device=x.device)
    check_tensor("gain", gain, shape=(width,), dtype=x.dtype, device=x.device)
    check_unit_stride("residual", residual)
    check_no_overlap("residual", residual)
    check_unit_stride("gain", gain)


@once_per_geometry
def _check_cache(
    x: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
) -> None:
    tokens, device = x.shape[0], x.device
    check_tensor("k_cache", k_cache, shape=(None, None, None, None), dtype=x.dtype, device=device)
    check_tensor("v_cache", v_cache, shape=tuple(k_cache.shape), dtype=x.dtype, device=device)
    named = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping, "positions": positions}
    for name in ("slot_mapping", "positions"):
        check_tensor(name, named[name], shape=(tokens,), dtype=torch.int64, device=device)
    if cos_sin is not None:
        check_cos_sin(cos_sin, k_cache.shape[3], device)
        named["rotary.cos_sin"] = cos_sin
        if not cos_sin.is_contiguous():
            raise ShapeError("rotary.cos_sin: not contiguous; pass a contiguous table")
    for name, tensor in named.items():
        check_unit_stride(name, tensor)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_not_empty(name, cache)
        check_no_overlap(name, cache)
