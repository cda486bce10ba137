"""Hand the log-probabilities of a step to the host, in the entry of the output rings that `write_outputs` reports
after."""

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
    places_ptr,
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
    place = tl.load(places_ptr + row)
    rank = tl.load(ranks_ptr + place)
    known = (tl.load(req_status_ptr + place) == _SAMPLES) | (tl.load(given_ptr + place) >= 0)
    rank = tl.where(known, rank, 0)
    tl.store(rank_ring_ptr + entry * stride_ranks + row, rank)
    if rank > 0:
        at = entry * stride_entry + row * (1 + top)
        tl.store(logprob_ring_ptr + at, tl.load(logprobs_ptr + place))
        tl.store(logprob_token_ring_ptr + at, tl.load(tokens_ptr + place))
        lanes = tl.arange(0, TOP)
        mask = lanes < top
        best = tl.load(top_logprobs_ptr + place * top + lanes, mask=mask)
        token = tl.load(top_tokens_ptr + place * top + lanes, mask=mask)
        tl.store(logprob_ring_ptr + at + 1 + lanes, best, mask=mask)
        tl.store(logprob_token_ring_ptr + at + 1 + lanes, token, mask=mask)


@dataclass(frozen=True, slots=True)
class _Call:
    places: torch.Tensor
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
        c.places, c.req_status, c.step_counter, c.given, c.tokens, c.logprobs, c.ranks, c.top_tokens, c.top_logprobs,
        c.logprob_ring, c.logprob_token_ring, c.rank_ring, top, c.rank_ring.shape[0], c.logprob_ring.stride(0),
        c.rank_ring.stride(0), TOP=next_power_of_two(max(top, 1)), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(c: _Call) -> None:
    rows, place = c.tokens.shape[0], c.places.long()
    entry = int(c.step_counter) % c.rank_ring.shape[0]
    known = (c.req_status == int(RequestStatus.SAMPLES)) | (c.given >= 0)
    ranks = torch.where(known, c.ranks, 0)[place].cpu()
    written = torch.cat((c.logprobs[:, None], c.top_logprobs), 1)[place].cpu()
    tokens = torch.cat((c.tokens[:, None], c.top_tokens), 1)[place].cpu()
    c.rank_ring[entry, :rows] = ranks
    at = (ranks > 0).nonzero()[:, 0]
    c.logprob_ring[entry, at], c.logprob_token_ring[entry, at] = written[at], tokens[at]


_op = DeclaredOp("write_logprobs", _Call, triton_impl=_launch, reference=_reference)


def write_logprobs(buffers: StaticBuffers, tokens: torch.Tensor, result: TokenLogprobs) -> None:
    """Write a step's log-probabilities to the rings, in the order of the batch; before `write_outputs` of the step.

    buffers   static buffers, cut to one size and refreshed
    tokens    [rows]  int32  those whose log-probabilities these are: sampled, or given as `logprob_tokens`
    result    of `token_logprobs` for these, as wide as the rings have room for

    A row gets rank 0 where nothing was asked for, or no token is known: it is not sampled from, and none was given.
    Nothing else is written for it. Capture-safe: the ring entry is chosen on the device. Raises: ShapeError.
    """
    rows, columns, device = buffers.req_indices.shape[0], buffers.logprob_ring.shape[2], buffers.req_indices.device
    check_tensor("tokens", tokens, shape=(rows,), dtype=torch.int32, device=device)
    check_tensor("top_tokens", result.top_tokens, shape=(rows, columns - 1), dtype=torch.int32, device=device)
    _op(
        _Call(
            buffers.places, buffers.req_status, buffers.step_counter, buffers.logprob_tokens, tokens, result.logprobs,
            result.ranks, result.top_tokens, result.top_logprobs, buffers.logprob_ring, buffers.logprob_token_ring,
            buffers.rank_ring,
        )
    )  # fmt: skip


def compile_variants() -> list[CompileSpec]:
    """As many of the best tokens as vLLM gives by default."""
    types = dict.fromkeys(("logprobs_ptr", "top_logprobs_ptr", "logprob_ring_ptr"), "*fp32")
    types |= {"step_counter_ptr": "*i64", "TOP": "constexpr"}
    signature = {
        name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in _write_logprobs_kernel.arg_names
    }
    return [CompileSpec("write_logprobs", _write_logprobs_kernel, signature, {"TOP": 32}, _NUM_WARPS, 3)]
