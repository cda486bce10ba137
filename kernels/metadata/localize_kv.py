"""Reduces the KV lengths and slots of a step to the part of the KV that this rank stores, after `refresh`.

    3 ranks, interleave_size 2       position    0 1 2 3 4 5 6 7 8 9
                                     rank        0 0 1 1 2 2 0 0 1 1
    a request of 9 tokens, rank 1                    x x         x      3 tokens: seq_lens is 3
    slots of these tokens in a page                  0 1         2      -1 for all other tokens

A page holds `page_size` tokens on each rank, so its id is the same on all ranks. A page begins at a multiple of
ranks x interleave_size, so the slot of a token on its rank depends only on its slot in the whole page.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.metadata.arguments import call_class, pass_operands, pointer_types, pointers
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import ceil_div
from graphrt.kernels.types import PAD_SLOT_ID

_BLOCK = 256
_PAD_SLOT = tl.constexpr(PAD_SLOT_ID)
_Pointers = namedtuple("_Pointers", "positions slot_mapping seq_lens kv_limits")


@triton.jit
def _local_len(length, ranks, rank, interleave_size):
    """Return how many of the first `length` tokens of a request a rank stores."""
    whole = length // (ranks * interleave_size) * interleave_size
    rest = length % (ranks * interleave_size) - rank * interleave_size
    return whole + tl.minimum(tl.maximum(rest, 0), interleave_size)


@triton.jit(do_not_specialize=["tokens", "reqs", "ranks", "rank", "interleave_size"])
def _localize_kv_kernel(
    ptrs, tokens, reqs, stride_slots, ranks, rank, interleave_size, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token, is_req = at < tokens, at < reqs
    positions = tl.load(ptrs.positions + at, mask=is_token, other=0).to(tl.int32)
    tl.store(ptrs.kv_limits + at, _local_len(positions + 1, ranks, rank, interleave_size), mask=is_token)
    seq_lens = tl.load(ptrs.seq_lens + at, mask=is_req, other=0)
    tl.store(ptrs.seq_lens + at, _local_len(seq_lens, ranks, rank, interleave_size), mask=is_req)
    for group in tl.static_range(GROUPS):
        slots_ptr = ptrs.slot_mapping + group * stride_slots + at
        slots = tl.load(slots_ptr, mask=is_token, other=_PAD_SLOT)
        own = (slots >= 0) & (slots // interleave_size % ranks == rank)
        local = slots // (ranks * interleave_size) * interleave_size + slots % interleave_size
        tl.store(slots_ptr, tl.where(own, local, _PAD_SLOT), mask=is_token)


_launch_kernel = KernelLauncher(_localize_kv_kernel)


def _launch(c: Any) -> None:
    tokens, reqs = c.positions.shape[0], c.seq_lens.shape[0]
    _launch_kernel(
        (ceil_div(max(tokens, reqs), _BLOCK),), pointers(_Pointers, c), tokens, reqs, c.slot_mapping.stride(0),
        c.ranks, c.rank, c.interleave_size, GROUPS=c.slot_mapping.shape[0], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _reference(c: Any) -> None:
    part = c.ranks, c.rank, c.interleave_size
    c.kv_limits.copy_(_local_lens(c.positions + 1, *part))
    c.seq_lens.copy_(_local_lens(c.seq_lens, *part))
    slots, size = c.slot_mapping, c.interleave_size
    own = (slots >= 0) & (slots // size % c.ranks == c.rank)
    slots.copy_(torch.where(own, slots // (c.ranks * size) * size + slots % size, PAD_SLOT_ID))


def _local_lens(lengths: torch.Tensor, ranks: int, rank: int, interleave_size: int) -> torch.Tensor:
    whole = lengths // (ranks * interleave_size) * interleave_size
    rest = lengths % (ranks * interleave_size) - rank * interleave_size
    return whole + rest.clamp(0, interleave_size)


_Call = call_class("localize_kv", ("seq_lens", "slot_mapping"), ranks=int, rank=int, interleave_size=int)
_operands = functools.partial(pass_operands, "localize_kv")
_op = DeclaredOp("localize_kv", _Call, triton_impl=_launch, reference=_reference)


def localize_kv(buffers: StaticBuffers, *, ranks: int, rank: int, interleave_size: int) -> None:
    """Reduce `seq_lens` and `slot_mapping` to the KV of one rank, and write `kv_limits`. Call it once per refresh.

    buffers          static buffers with `interleaves`, cut to the captured size and refreshed
    ranks, rank      ranks that share the KV of a request, and the number of this one
    interleave_size  consecutive tokens that one rank stores

    Capture-safe. Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match.
    """
    _op(_Call(*buffers.once(_operands), ranks, rank, interleave_size))


def compile_variants() -> list[CompileSpec]:
    """Return the variant for one KV group."""
    constexprs = {"GROUPS": 1, "BLOCK": _BLOCK}
    return [CompileSpec("localize_kv", _localize_kv_kernel, {"ptrs": pointer_types(_Pointers)}, constexprs, 4, 3)]
