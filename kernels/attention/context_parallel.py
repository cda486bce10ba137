"""Attention over keys that are split over the ranks of a group. Each rank has different query heads.

    1 gather      every rank gets the queries of all ranks
    2 attend      over the keys of this rank, which gives partial outputs of all heads, and their log-sum-exps
    3 exchange    a rank gets the partial outputs of its heads from all ranks
    4 merge       weighted by the log-sum-exps, in the order of the ranks

Steps 3 and 4 are a reduce-scatter whose sums are in the order of the ranks, so a token gets the same bits in any batch.
GPUs whose group has a `SymmetricBuffer` need one kernel for step 1, and one for steps 3 and 4; see exchange_native.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import distributed as dist

from graphrt.kernels.attention.arguments import TRITON_DTYPES
from graphrt.kernels.attention.exchange_native import gather_heads, merge_heads, symmetric_buffer_for_heads
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.collectives import all_gather, all_to_all
from graphrt.kernels.sizes import next_power_of_two

_NUM_WARPS = 1  # not measured


@triton.jit(do_not_specialize=["ranks"])
def _merge_ranks_kernel(
    outs_ptr,  # [ranks, tokens, heads, head_dim]
    lses_ptr,  # [ranks, tokens, heads]
    sinks_ptr,  # [heads] or None
    out_ptr,  # [tokens, heads, head_dim]
    lse_ptr,  # [tokens, heads] or None
    ranks,
    num_heads,
    stride_outs_rank,
    stride_outs_row,
    stride_lses_rank,
    stride_lses_row,
    stride_out_row,
    stride_lse_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # a token and a head
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for rank in range(ranks):
        lse = tl.load(lses_ptr + rank * stride_lses_rank + row * stride_lses_row)
        values = tl.load(outs_ptr + rank * stride_outs_rank + row * stride_outs_row + d, mask=d < HEAD_DIM, other=0.0)
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # if no key was seen, -inf - -inf is NaN
        rescale, share = tl.exp(top - base), tl.exp(lse - base)
        acc = acc * rescale + values.to(tl.float32) * share
        total = total * rescale + share
        top = new_top
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % num_heads)
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp(top - base)
        acc = acc * rescale
        total = total * rescale + tl.exp(sink - base)
        top = new_top
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * stride_out_row + d, (acc / divisor).to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + row // num_heads * stride_lse_token + row % num_heads, top + tl.log(divisor))


@dataclass(frozen=True, slots=True)
class _MergeCall:
    outs: torch.Tensor
    lses: torch.Tensor
    sinks: torch.Tensor | None
    out: Written
    lse: Written | None


_launch_kernel = KernelLauncher(_merge_ranks_kernel)


def _launch(call: _MergeCall) -> None:
    outs, lses, out, lse = call.outs, call.lses, call.out, call.lse
    tokens, heads, head_dim = out.shape
    _launch_kernel(
        (tokens * heads,), outs, lses, call.sinks, out, lse, outs.shape[0], heads, outs.stride(0), outs.stride(2),
        lses.stride(0), lses.stride(2), out.stride(1), 0 if lse is None else lse.stride(0),
        HEAD_DIM=head_dim, BLOCK_D=next_power_of_two(head_dim), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(call: _MergeCall) -> None:
    total = call.lses.logsumexp(0)  # [tokens, heads]; -inf: sees no key
    if call.sinks is not None:
        total = torch.logaddexp(total, call.sinks)
    weights = (call.lses - total.where(total != float("-inf"), 0.0)).exp()
    merged = torch.zeros(call.out.shape, device=call.out.device)
    for values, weight in zip(call.outs, weights, strict=True):
        merged += values.float() * weight[..., None]
    call.out.copy_(merged)
    if call.lse is not None:
        call.lse.copy_(total)


_merge = DeclaredOp("merge_ranks", _MergeCall, triton_impl=_launch, reference=_reference)


def gather_queries(q: torch.Tensor, num_kv_heads: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the queries of all ranks, which share KV heads.

    q        [tokens, heads, head_dim]          those of this rank; heads is a multiple of num_kv_heads
    returns  [tokens, ranks * heads, head_dim]  contiguous. Heads of a KV head are adjacent, in the order of the ranks

    Capture-safe.
    """
    tokens, heads, head_dim = q.shape
    if (buffer := symmetric_buffer_for_heads(group, q, 1)) is not None:
        return gather_heads(buffer, q, num_kv_heads)
    every = all_gather(q, group).view(-1, tokens, num_kv_heads, heads // num_kv_heads, head_dim)
    return every.permute(1, 2, 0, 3, 4).reshape(tokens, -1, head_dim)


def reduce_scatter_attention(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    num_kv_heads: int,
    group: dist.ProcessGroup,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge the partial outputs of all ranks, and keep those of this rank's heads.

    partial      [tokens, ranks * heads, head_dim]  contiguous, heads as from `gather_queries`; finite where no key is
                                                    seen
    partial_lse  [tokens, ranks * heads]  float32   contiguous; -inf where no key is seen
    out          [tokens, heads, head_dim]          dtype of partial, contiguous, written; zeros where no rank saw a key
    lse          [tokens, heads]          float32   written if given, with sinks; the sink, or -inf, where no rank saw
                                                    a key
    sinks        [heads]                  float32   sinks of this rank's heads, or None

    Capture-safe. Sums in float32, in the order of the ranks.
    """
    if (buffer := symmetric_buffer_for_heads(group, out, 2)) is not None:
        merge_heads(buffer, partial, partial_lse, num_kv_heads, out, lse, sinks)
        return
    tokens, _, head_dim = out.shape
    sent = []
    for part in (partial, partial_lse[..., None]):  # as bytes, to send both at once
        of_rank = part.view(tokens, num_kv_heads, group.size(), -1, part.shape[-1])
        sent.append(of_rank.permute(2, 0, 1, 3, 4).flatten(2, 3).view(torch.uint8))
    received = all_to_all(torch.cat(sent, -1), group)
    outs = received[..., : head_dim * out.element_size()].view(out.dtype)
    lses = received[..., head_dim * out.element_size() :].view(torch.float32)[..., 0]
    _merge(_MergeCall(outs, lses, sinks, out, lse))


def compile_variants() -> list[CompileSpec]:
    """Return one variant per dtype, with and without sinks and log-sum-exps."""
    specs = []
    for name, dtype, head_dim, options in (
        ("bf16", torch.bfloat16, 128, True),
        ("fp16", torch.float16, 64, False),
        ("fp32", torch.float32, 80, True),
    ):
        element = TRITON_DTYPES[dtype]
        types = {"outs_ptr": f"*{element}", "lses_ptr": "*fp32", "out_ptr": f"*{element}"}
        constexprs: dict[str, object] = {"HEAD_DIM": head_dim, "BLOCK_D": next_power_of_two(head_dim)}
        for pointer in ("sinks_ptr", "lse_ptr"):
            if options:
                types[pointer] = "*fp32"
            else:
                constexprs[pointer] = None
        specs.append(CompileSpec(f"merge_ranks_{name}", _merge_ranks_kernel, types, constexprs, _NUM_WARPS, 3))
    return specs
