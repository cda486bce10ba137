"""Write the log-probabilities of a step to the output rings, before `write_outputs` publishes the ring entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.sampling_logprobs import TokenLogprobs
from graphrt.kernels.sizes import next_power_of_two
from graphrt.kernels.types import NO_TOKEN, RequestStatus

_NUM_WARPS = 1
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_SAMPLES = tl.constexpr(int(RequestStatus.SAMPLES))


@triton.jit(do_not_specialize=["top", "entries"])
def _write_logprobs_kernel(
    buffer_rows_ptr,
    req_status_ptr,
    step_counter_ptr,
    given_ptr,
    tokens_ptr,
    logprobs_ptr,
    ranks_ptr,
    top_tokens_ptr,
    top_logprobs_ptr,
    logprob_ring_ptr,
    logprob_token_ring_ptr,
    rank_ring_ptr,
    top,
    entries,
    stride_entry,
    stride_ranks,
    TOP: tl.constexpr,
):
    row = tl.program_id(0)
    entry = tl.load(step_counter_ptr) % entries
    buffer_row = tl.load(buffer_rows_ptr + row)
    rank = tl.load(ranks_ptr + buffer_row)
    known = (tl.load(req_status_ptr + buffer_row) == _SAMPLES) | (tl.load(given_ptr + buffer_row) >= 0)
    rank = tl.where(known, rank, 0)
    tl.store(rank_ring_ptr + entry * stride_ranks + row, rank)
    if rank > 0:
        at = entry * stride_entry + row * (1 + top)
        tl.store(logprob_ring_ptr + at, tl.load(logprobs_ptr + buffer_row))
        tl.store(logprob_token_ring_ptr + at, tl.load(tokens_ptr + buffer_row))
        lanes = tl.arange(0, TOP)
        mask = lanes < top
        logprob = tl.load(top_logprobs_ptr + buffer_row * top + lanes, mask=mask)
        token = tl.load(top_tokens_ptr + buffer_row * top + lanes, mask=mask)
        tl.store(logprob_ring_ptr + at + 1 + lanes, logprob, mask=mask)
        tl.store(logprob_token_ring_ptr + at + 1 + lanes, token, mask=mask)


@dataclass(frozen=True, slots=True)
class _Call:
    buffer_rows: torch.Tensor
    req_status: torch.Tensor
    step_counter: torch.Tensor
    given: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor
    logprob_ring: Written
    logprob_token_ring: Written
    rank_ring: Written


def _launch(c: _Call) -> None:
    top = c.top_tokens.shape[1]
    _write_logprobs_kernel[(c.tokens.shape[0],)](
        c.buffer_rows, c.req_status, c.step_counter, c.given, c.tokens, c.logprobs, c.ranks, c.top_tokens,
        c.top_logprobs, c.logprob_ring, c.logprob_token_ring, c.rank_ring, top, c.rank_ring.shape[0],
        c.logprob_ring.stride(0), c.rank_ring.stride(0), TOP=next_power_of_two(max(top, 1)), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(c: _Call) -> None:
    rows, buffer_rows = c.tokens.shape[0], c.buffer_rows.long()
    entry = int(c.step_counter) % c.rank_ring.shape[0]
    known = (c.req_status == int(RequestStatus.SAMPLES)) | (c.given >= 0)
    ranks = torch.where(known, c.ranks, 0)[buffer_rows].cpu()
    logprobs = torch.cat((c.logprobs[:, None], c.top_logprobs), 1)[buffer_rows].cpu()
    tokens = torch.cat((c.tokens[:, None], c.top_tokens), 1)[buffer_rows].cpu()
    c.rank_ring[entry, :rows] = ranks
    at = (ranks > 0).nonzero()[:, 0]
    c.logprob_ring[entry, at], c.logprob_token_ring[entry, at] = logprobs[at], tokens[at]


_op = DeclaredOp("write_logprobs", _Call, triton_impl=_launch, reference=_reference)


def write_logprobs(buffers: StaticBuffers, tokens: torch.Tensor, result: TokenLogprobs) -> None:
    """Write a step's log-probabilities to the rings, in batch order. Call it before `write_outputs` of the step.

    buffers   static buffers, cut to the captured size and refreshed
    tokens    [padded_reqs]  int32  device; the token of each request: sampled, or given as `logprob_tokens`
    result    what `token_logprobs` returned for `tokens`, with as many top tokens as the rings hold

    A request gets rank 0, and no other values, if it did not ask for log-probabilities, or if it has no token because
    it neither samples nor gives one.

    Capture-safe: the kernel selects the ring entry on the device.
    Raises: ShapeError: if `tokens` or `result` does not fit the buffers.
    """
    rows, columns, device = buffers.req_indices.shape[0], buffers.logprob_ring.shape[2], buffers.req_indices.device
    check_tensor("tokens", tokens, shape=(rows,), dtype=torch.int32, device=device)
    check_tensor("top_tokens", result.top_tokens, shape=(rows, columns - 1), dtype=torch.int32, device=device)
    _op(
        _Call(
            buffers.buffer_rows, buffers.req_status, buffers.step_counter, buffers.logprob_tokens, tokens,
            result.logprobs, result.ranks, result.top_tokens, result.top_logprobs, buffers.logprob_ring,
            buffers.logprob_token_ring, buffers.rank_ring,
        )
    )  # fmt: skip


def compile_variants() -> list[CompileSpec]:
    """Return the variant for vLLM's default limit of 20 top tokens."""
    types = dict.fromkeys(("logprobs_ptr", "top_logprobs_ptr", "logprob_ring_ptr"), "*fp32")
    types["step_counter_ptr"] = "*i64"
    return [CompileSpec("write_logprobs", _write_logprobs_kernel, types, {"TOP": 32}, _NUM_WARPS, 3)]
