"""Write the log-probabilities of a step to the output rings, before `write_outputs` completes the ring entry."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.metadata.arguments import call_class, pass_operands, pointer_types, pointers
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.ops.sampling_logprobs import TokenLogprobs
from graphrt.kernels.sizes import next_power_of_two
from graphrt.kernels.types import NO_TOKEN

_NUM_WARPS = 1
_NO_TOKEN = tl.constexpr(NO_TOKEN)

_Pointers = namedtuple(
    "_Pointers",
    "buffer_rows drafts_left step_counter logprob_tokens tokens token_logprobs ranks top_tokens top_logprobs "
    "logprob_ring logprob_token_ring rank_ring",
)


@triton.jit(do_not_specialize=["top", "entries", "position", "positions", "last"])
def _write_logprobs_kernel(
    ptrs,
    top,
    entries,
    stride_entry,
    stride_position,
    stride_ranks,
    position,
    positions,
    last,  # whether this is the last position of the graph
    TOP: tl.constexpr,
):
    row = tl.program_id(0)
    entry = tl.load(ptrs.step_counter) % entries
    buffer_row = tl.load(ptrs.buffer_rows + row)
    rank = tl.load(ptrs.ranks + buffer_row)
    given = tl.where(position == 0, tl.load(ptrs.logprob_tokens + buffer_row), -1)
    known = (given >= 0) | (tl.load(ptrs.drafts_left + buffer_row) >= 0)
    rank = tl.where(known, rank, 0)
    stride_ranks_position = stride_ranks // positions
    ranks_ptr = ptrs.rank_ring + entry * stride_ranks + row
    tl.store(ranks_ptr + position * stride_ranks_position, rank)
    for unused in range(position + 1, tl.where(last != 0, positions, 0)):
        tl.store(ranks_ptr + unused * stride_ranks_position, 0)
    if rank > 0:
        at = entry * stride_entry + position * stride_position + row * (1 + top)
        tl.store(ptrs.logprob_ring + at, tl.load(ptrs.token_logprobs + buffer_row))
        tl.store(ptrs.logprob_token_ring + at, tl.load(ptrs.tokens + buffer_row))
        lanes = tl.arange(0, TOP)
        mask = lanes < top
        logprob = tl.load(ptrs.top_logprobs + buffer_row * top + lanes, mask=mask)
        token = tl.load(ptrs.top_tokens + buffer_row * top + lanes, mask=mask)
        tl.store(ptrs.logprob_ring + at + 1 + lanes, logprob, mask=mask)
        tl.store(ptrs.logprob_token_ring + at + 1 + lanes, token, mask=mask)


_launch_kernel = KernelLauncher(_write_logprobs_kernel)


def _launch(c: Any) -> None:
    top = c.top_tokens.shape[1]
    _launch_kernel(
        (c.tokens.shape[0],), pointers(_Pointers, c), top, c.rank_ring.shape[0], c.logprob_ring.stride(0),
        c.logprob_ring.stride(1), c.rank_ring.stride(0), c.position, c.rank_ring.shape[1], int(c.last),
        TOP=next_power_of_two(max(top, 1)), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(c: Any) -> None:
    rows, buffer_rows = c.tokens.shape[0], c.buffer_rows.long()
    entry = int(c.step_counter) % c.rank_ring.shape[0]
    known = (c.drafts_left >= 0) | ((c.logprob_tokens >= 0) & (c.position == 0))
    ranks = torch.where(known, c.ranks, 0)[buffer_rows].cpu()
    logprobs = torch.cat((c.token_logprobs[:, None], c.top_logprobs), 1)[buffer_rows].cpu()
    tokens = torch.cat((c.tokens[:, None], c.top_tokens), 1)[buffer_rows].cpu()
    c.rank_ring[entry, c.position, :rows] = ranks
    if c.last:
        c.rank_ring[entry, c.position + 1 :, :rows] = 0
    at = (ranks > 0).nonzero()[:, 0]
    c.logprob_ring[entry, c.position, at], c.logprob_token_ring[entry, c.position, at] = logprobs[at], tokens[at]


_RESULTS = ("tokens", "token_logprobs", "ranks", "top_tokens", "top_logprobs")
_Call = call_class("write_logprobs", (), **dict.fromkeys(_RESULTS, torch.Tensor), position=int, last=bool)
_operands = functools.partial(pass_operands, "write_logprobs")
_op = DeclaredOp("write_logprobs", _Call, triton_impl=_launch, reference=_reference)


def write_logprobs(
    buffers: StaticBuffers, tokens: torch.Tensor, result: TokenLogprobs, *, position: int = 0, last: bool = True
) -> None:
    """Write a step's log-probabilities to the rings, in batch order. Call it before `write_outputs` of the step.

    buffers   static buffers, cut to the captured size and refreshed
    tokens    [padded_reqs]  int32  device; the token of each request: sampled, or given as `logprob_tokens`
    result    the result of `token_logprobs` for `tokens`, with the number of top tokens that the rings store
    position  as in `write_outputs`; `last` tells whether it is the last position of the graph

    A request that asked for no log-probabilities, or that has neither a sampled nor a given token, gets rank 0 and no
    other values.

    Capture-safe: the kernel selects the ring entry on the device.
    Raises: ShapeError: if `tokens` or `result` does not match the buffers.
    """
    rows, columns, device = buffers.req_indices.shape[0], buffers.logprob_ring.shape[3], buffers.req_indices.device
    check_tensor("tokens", tokens, shape=(rows,), dtype=torch.int32, device=device)
    check_tensor("top_tokens", result.top_tokens, shape=(rows, columns - 1), dtype=torch.int32, device=device)
    values = (tokens, result.logprobs, result.ranks, result.top_tokens, result.top_logprobs)
    _op(_Call(*buffers.once(_operands), *values, position, last))


def compile_variants() -> list[CompileSpec]:
    """Return the variant for vLLM's default limit of 20 top tokens."""
    floats = dict.fromkeys(("token_logprobs", "top_logprobs"), "*fp32")
    types = {"ptrs": pointer_types(_Pointers, **dict.fromkeys(_RESULTS, "*i32") | floats)}
    return [CompileSpec("write_logprobs", _write_logprobs_kernel, types, {"TOP": 32}, _NUM_WARPS, 3)]
