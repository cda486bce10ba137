"""Log-probabilities and ranks of given tokens, and the most likely tokens of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_int, check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.sampling_logits import NOWHERE, best_of
from graphrt.kernels.ops.sampling_reference import token_logprobs_reference
from graphrt.kernels.sizes import ceil_div, next_power_of_two
from graphrt.kernels.types import NO_TOKEN

MAX_TOP = 1024
"""Largest number of most likely tokens per row."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_LANES = 2048
_NUM_WARPS = 8
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The results of `token_logprobs`. Entries that were not requested are NaN, 0, NO_TOKEN and NaN.

    logprobs      [rows]           float32  log_softmax(logits)[token]
    ranks         [rows]           int32    1 is the most likely token; equal logits rank by token id
    top_tokens    [rows, max_top]  int32    the most likely tokens, in order of rank
    top_logprobs  [rows, max_top]  float32  their log-probabilities
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor


@triton.jit
def _possible_logits(logits_row_ptr, tokens, vocab_size):
    logits = tl.load(logits_row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(logits > float("-inf"), logits, float("-inf"))


@triton.jit
def _decay(logits, best):
    """Return exp(logits - best), and 1 if both are infinite."""
    return tl.where(logits >= best, 1.0, tl.exp(logits - best))


@triton.jit(do_not_specialize=["max_top"])
def _token_logprobs_kernel(
    logits_ptr,
    tokens_ptr,
    wanted_ptr,
    logprobs_ptr,
    ranks_ptr,
    top_tokens_ptr,
    top_logprobs_ptr,
    vocab_size,
    stride_logits,
    max_top,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOP: tl.constexpr,
):
    row = tl.program_id(0)
    wanted = tl.load(wanted_ptr + row)
    logprob = float("nan")
    rank = 0
    count = 0
    if wanted >= 0:
        token = tl.load(tokens_ptr + row)
        real = (token >= 0) & (token < vocab_size)
        logits_row_ptr = logits_ptr + row.to(tl.int64) * stride_logits
        logit = _possible_logits(logits_row_ptr, tl.where(real, token, vocab_size), vocab_size)
        # In one pass, a lane reads the tokens of one residue modulo LANES. It keeps their best, their mass relative to
        # the best, and the number of tokens that rank before the given one.
        lanes = tl.arange(0, LANES)
        lane_best = tl.full([LANES], float("-inf"), tl.float32)
        lane_tokens = tl.full([LANES], NOWHERE, tl.int32)
        lane_mass = tl.zeros([LANES], tl.float32)
        before = tl.zeros([LANES], tl.int32)
        for start in tl.range(0, vocab_size, LANES, num_stages=4):
            at = lanes + start
            values = _possible_logits(logits_row_ptr, at, vocab_size)
            wins = values > lane_best
            best = tl.where(wins, values, lane_best)
            added = tl.where(values > float("-inf"), _decay(values, best), 0.0)
            lane_mass = lane_mass * _decay(lane_best, best) + added
            lane_best = best
            lane_tokens = tl.where(wins, at, lane_tokens)
            before += ((values > logit) | ((values == logit) & (at < token))).to(tl.int32)
        best = tl.max(lane_best, 0)
        log_total = tl.log(tl.sum(lane_mass * _decay(lane_best, best), 0))
        if best > float("-inf"):
            count = tl.minimum(wanted, max_top)
            logprob = tl.where(real, tl.where(logit >= best, 0.0, logit - best) - log_total, float("nan"))
            rank = tl.where(real, 1 + tl.sum(before, 0), 0)
        # Remove the best token of all lanes; the next best of its lane replaces it.
        chunks = tl.arange(0, CHUNKS)
        for place in range(0, count):
            value, top = best_of(lane_best, lane_tokens)
            at_place = row * max_top + place
            found = top < NOWHERE
            top_logprob = tl.where(value >= best, 0.0, value - best) - log_total
            tl.store(top_tokens_ptr + at_place, tl.where(found, top, _NO_TOKEN))
            tl.store(top_logprobs_ptr + at_place, tl.where(found, top_logprob, float("nan")))
            lane = top % LANES
            others = lane + chunks * LANES
            values = _possible_logits(logits_row_ptr, others, vocab_size)
            later = (values < value) | ((values == value) & (others > top))
            later = later & (values > float("-inf"))
            next_value, next_token = best_of(tl.where(later, values, float("-inf")), tl.where(later, others, NOWHERE))
            lane_best = tl.where(lanes == lane, next_value, lane_best)
            lane_tokens = tl.where(lanes == lane, next_token, lane_tokens)
    tl.store(logprobs_ptr + row, logprob)
    tl.store(ranks_ptr + row, rank)
    rest = tl.arange(0, TOP)
    empty = (rest >= count) & (rest < max_top)
    tl.store(top_tokens_ptr + row * max_top + rest, tl.full([TOP], _NO_TOKEN, tl.int32), mask=empty)
    tl.store(top_logprobs_ptr + row * max_top + rest, tl.full([TOP], float("nan"), tl.float32), mask=empty)


@dataclass(frozen=True, slots=True)
class _Call:
    logits: torch.Tensor
    tokens: torch.Tensor
    wanted: torch.Tensor
    logprobs: Written
    ranks: Written
    top_tokens: Written
    top_logprobs: Written


_launch_kernel = KernelLauncher(_token_logprobs_kernel)


def _launch(call: _Call) -> None:
    rows, vocab = call.logits.shape
    if rows == 0:
        return
    max_top = call.top_tokens.shape[1]
    _launch_kernel(
        (rows,), call.logits, call.tokens, call.wanted, call.logprobs, call.ranks, call.top_tokens, call.top_logprobs,
        vocab, call.logits.stride(0), max_top, LANES=_LANES, CHUNKS=next_power_of_two(ceil_div(vocab, _LANES)),
        TOP=next_power_of_two(max(max_top, 1)), num_warps=_NUM_WARPS,
    )  # fmt: skip


_op = DeclaredOp("token_logprobs", _Call, triton_impl=_launch, reference=token_logprobs_reference)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor, *, max_top: int) -> TokenLogprobs:
    """Return the log-probability and the rank of one token per row, and the most likely tokens of each row.

    logits   [rows, vocab]  float16, bfloat16 or float32  device; rows may be strided
    tokens   [rows]         int32  sampled tokens, or the next tokens of a prompt; for NO_TOKEN and tokens outside
                                   the vocabulary, only the most likely tokens are returned
    wanted   [rows]         int32  number of most likely tokens, up to max_top; if negative, the row is skipped
    max_top  width of the results

    Computed in float32. NaN logits count as -inf. Infinite logits share the probability equally.
    Capture-safe: the grid depends on shapes only. Raises: ShapeError, ConfigError.
    """
    max_top = check_int("max_top", max_top, 0, MAX_TOP, advice="pass the largest number of tokens per row")
    check_tensor("logits", logits, shape=(None, None), dtype=_FLOATS)
    (rows, vocab), device = logits.shape, logits.device
    check_unit_stride("logits", logits)
    for name, tensor in {"tokens": tokens, "wanted": wanted}.items():
        check_tensor(name, tensor, shape=(rows,), dtype=torch.int32, device=device)
        check_unit_stride(name, tensor)
    if not 1 <= vocab <= 1 << 20:
        raise ShapeError(f"logits: expected a vocabulary of 1 to {1 << 20}, got {vocab}; use torch.log_softmax")
    result = TokenLogprobs(
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty((rows, max_top), dtype=torch.int32, device=device),
        torch.empty((rows, max_top), dtype=torch.float32, device=device),
    )
    _op(_Call(logits, tokens, wanted, result.logprobs, result.ranks, result.top_tokens, result.top_logprobs))
    return result


def compile_variants() -> list[CompileSpec]:
    """Return variants for each logits dtype at a vocabulary of 128k, and for the largest vocabulary."""
    specs = []
    for kind, vocab in (("fp16", 1 << 17), ("bf16", 1 << 17), ("fp32", 1 << 20)):
        constexprs: dict[str, object] = {"LANES": _LANES, "CHUNKS": vocab // _LANES, "TOP": 32}
        pointers = {"logits_ptr": f"*{kind}", "logprobs_ptr": "*fp32", "top_logprobs_ptr": "*fp32"}
        divisible = ("logits_ptr", "vocab_size", "stride_logits")
        specs.append(
            CompileSpec(
                f"token_logprobs_{kind}", _token_logprobs_kernel, pointers, constexprs, _NUM_WARPS, 3,
                max_registers=128, divisible=divisible,
            )
        )  # fmt: skip
    return specs
