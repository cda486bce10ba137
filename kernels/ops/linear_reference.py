"""Reference of matrix products with few tokens in PyTorch, in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from graphrt.kernels.ops.linear_call import End, LinearCall
from graphrt.kernels.ops.quantized import dequantized


def linear_reference(call: LinearCall) -> None:
    """Reference of `graphrt::linear`; see LinearCall for the arguments."""
    x, squares, end = call.x, call.squares, End(call.end)
    if call.x_rows is not None:
        x = x[call.x_rows]
        squares = None if squares is None else squares[call.x_rows]
    weight = call.weight.float() if call.scale is None else dequantized(call.weight, call.scale, call.zero)
    sums = functional.linear(x.float(), weight)
    if squares is not None:
        sums *= torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + call.eps)
    if call.bias is not None:
        sums += call.bias.float()
    if end is End.PLAIN:
        call.out.copy_(sums)
    elif end is End.SILU_MUL:
        gate, up = sums.chunk(2, 1)
        call.out.copy_(functional.silu(gate) * up)
    elif end is End.ADD:
        assert call.residual is not None, "ADD has a residual"
        assert call.gain is not None, "ADD has a gain"
        assert call.squares_out is not None, "ADD writes squares"
        call.residual.copy_(call.residual.float() + sums)
        residual = call.residual.float()
        call.out.copy_(residual * call.gain.float())
        call.squares_out.copy_(residual.square().view(len(residual), -1, call.plan.square_rows).sum(2))
    else:
        _rope_write(call, sums)


def _rope_write(call: LinearCall, sums: torch.Tensor) -> None:
    assert call.k_cache is not None, "ROPE_WRITE has a cache"
    assert call.v_cache is not None, "ROPE_WRITE has a cache"
    assert call.slots is not None, "ROPE_WRITE has slots"
    assert call.positions is not None, "ROPE_WRITE has positions"
    page_size, num_kv_heads, head_dim = call.k_cache.shape[1:]
    heads = sums.unflatten(1, (-1, head_dim))
    rotated, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if call.cos_sin is not None:
        half = call.cos_sin.shape[1] // 2
        cos, sin = call.cos_sin[call.positions].unsqueeze(1).chunk(2, 2)
        low, high, rest = rotated[..., :half], rotated[..., half : 2 * half], rotated[..., 2 * half :]
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
    call.out.copy_(rotated[:, : call.num_q_heads].flatten(1))
    stored = call.slots >= 0
    slots = call.slots[stored]
    for cache, values in ((call.k_cache, rotated[:, call.num_q_heads :]), (call.v_cache, v)):
        cache[slots // page_size, slots % page_size] = values[stored].to(cache.dtype)
