"""Rejection sampling of drafts that were drawn from known probabilities.

    draft 8, drawn from q         p(8) = 0.3, q(8) = 0.5      accepted with probability min(1, p / q) = 0.6
    if it is rejected             a token drawn from max(p - q, 0), normalized

The tokens then have the distribution p for any q. `kept_logprobs` computes log p with the options of `sample`.
`residual` computes the logits to sample from: of the draft alone, of max(p - q, 0), or of p for requests without a
draft. A draft must not be drawn with the noise that `sample` uses for these logits, so `DRAFT_SEED` is added to its
seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_contiguous, check_int, check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.library import define_op
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.sampling import LogitBias, TokenMask, Truncation, sample_inputs
from graphrt.kernels.ops.sampling_logits import (
    NOWHERE,
    WORD,
    exponential,
    kernel_input_types,
    kernel_inputs,
    key_of,
    logits_of_words,
    min_p_floor,
    rate_of,
    req_values,
    row_options,
    value_of,
    weight,
)
from graphrt.kernels.ops.sampling_reference import (
    MAX_TEMPERATURE,
    SampleInputs,
    exponential_reference,
    kept_reference,
    philox4x32,
    processed_reference,
)
from graphrt.kernels.ops.sampling_state import Penalties
from graphrt.kernels.sizes import ceil_div

DRAFT_SEED = 1 << 32
"""Added to a request's seed for the noise of its drafts."""

_ACCEPTS = 2  # third counter of the random numbers that accept drafts; see `noise_reference`
_NUM_WARPS = 8
_BLOCK = 1024
_PROBES = 16
_ACCEPTS_AT = tl.constexpr(_ACCEPTS)
_LN_2 = tl.constexpr(0.6931471805599453)
_LEAST = tl.constexpr(1e-20)
"""Share of p that the residual keeps, so that it has tokens if rounding makes p no larger than q anywhere."""


@triton.jit
def _largest_reaching(row_ptr, vocab_size, best, rate, low, need, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
                      PROBES: tl.constexpr):  # fmt: skip
    """Return the largest key >= `low` such that tokens with at least its logit reach `need`, by number or by mass.

    `low` if none does. Sums of non-negative floats in a fixed order are monotone, so the search is exact.
    """
    lanes = tl.arange(0, BLOCK)
    high = tl.zeros_like(low) + key_of(best) + 1
    while high - low > 1:
        width = (high - low + PROBES) // (PROBES + 1)
        probes = tl.minimum(low + (1 + tl.arange(0, PROBES)).to(tl.int64) * width, high - 1)
        bounds = value_of(probes)
        sums = tl.zeros([PROBES, BLOCK], tl.float32)
        for base in range(0, vocab_size, BLOCK):
            logits = tl.load(row_ptr + base + lanes, mask=base + lanes < vocab_size, other=float("-inf"))
            amounts = tl.where(logits > float("-inf"), 1.0, 0.0)
            if BY_MASS:
                amounts = weight(logits, best, rate)
            sums += tl.where(logits[None, :] >= bounds[:, None], amounts[None, :], 0.0)
        reaches = tl.sum(sums, 1) >= need
        new_low = tl.max(tl.where(reaches, probes, low), 0)
        high = tl.min(tl.where(reaches, high, probes), 0)
        low = new_low
    return low


@triton.jit(do_not_specialize=["state_rows", "bias_rows", "bias_capacity", "num_masks"])
def _kept_logprobs_kernel(
    ptrs,
    out_ptr,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    BLOCK: tl.constexpr,
    PROBES: tl.constexpr,
):
    row = tl.program_id(0)
    heat, top_k, top_p, min_p, _ = row_options(row, ptrs, vocab_size)
    source = ptrs, req_values(row, ptrs, vocab_size, stride_logits, state_rows, bias_rows, bias_capacity, num_masks)
    row_ptr = out_ptr + row.to(tl.int64) * vocab_size
    words = tl.arange(0, BLOCK // WORD)
    lane_best = tl.full([BLOCK // WORD, 32], float("-inf"), tl.float32)
    lane_tokens = tl.full([BLOCK // WORD, 32], NOWHERE, tl.int32)
    for first in range(0, tl.cdiv(vocab_size, WORD), BLOCK // WORD):
        tokens, logits = logits_of_words(source, first + words)
        tl.store(row_ptr + tokens, logits, mask=tokens < vocab_size)
        higher = logits > lane_best
        lane_best = tl.where(higher, logits, lane_best)
        lane_tokens = tl.where(higher, tokens, lane_tokens)
    best = tl.max(tl.max(lane_best, 1), 0)
    best_token = tl.min(tl.min(tl.where(lane_best == best, lane_tokens, NOWHERE), 1), 0)
    tl.debug_barrier()  # threads load what others have stored
    lanes = tl.arange(0, BLOCK)
    rate = rate_of(heat)
    bound = key_of(min_p_floor(best, heat, min_p))
    if (heat > 0) & (top_k > 0):
        bound = _largest_reaching(row_ptr, vocab_size, best, rate, bound, top_k * 1.0, False, BLOCK, PROBES)
    mass = _mass(row_ptr, vocab_size, best, rate, value_of(bound), BLOCK)
    if (heat > 0) & (top_p < 1):
        need = top_p * mass
        bound = _largest_reaching(row_ptr, vocab_size, best, rate, bound, need, True, BLOCK, PROBES)
        mass = _mass(row_ptr, vocab_size, best, rate, value_of(bound), BLOCK)
    log_mass = tl.log(mass)
    for base in range(0, vocab_size, BLOCK):
        tokens = base + lanes
        logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
        kept = (logits > float("-inf")) & (logits >= value_of(bound))
        logprobs = tl.where(logits >= best, 0.0, (logits - best) * rate * _LN_2) - log_mass
        if heat <= 0:
            kept = tokens == best_token
            logprobs = tl.zeros([BLOCK], tl.float32)
        tl.store(row_ptr + tokens, tl.where(kept, logprobs, float("-inf")), mask=tokens < vocab_size)


@triton.jit
def _mass(row_ptr, vocab_size, best, rate, floor, BLOCK: tl.constexpr):
    """Return the sum of the weights of the tokens whose logits are at least `floor`."""
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for base in range(0, vocab_size, BLOCK):
        logits = tl.load(row_ptr + base + lanes, mask=base + lanes < vocab_size, other=float("-inf"))
        sums += tl.where(logits >= floor, weight(logits, best, rate), 0.0)
    return tl.sum(sums, 0)


_launch_kept = KernelLauncher(_kept_logprobs_kernel)


def _kept_triton(*tensors: torch.Tensor | None) -> torch.Tensor:
    inputs = SampleInputs(*tensors)  # type: ignore[arg-type]
    rows, vocab = inputs.logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=inputs.logits.device)
    words = torch.empty(1, dtype=torch.int32, device=out.device)
    ptrs, sizes = kernel_inputs(inputs, words, out)
    if rows:
        _launch_kept((rows,), ptrs, out, *sizes, BLOCK=_BLOCK, PROBES=_PROBES, num_warps=_NUM_WARPS)
    return out


def _kept_reference(*tensors: torch.Tensor | None) -> torch.Tensor:
    inputs = SampleInputs(*tensors)  # type: ignore[arg-type]
    out = processed_reference(inputs)
    for row, logits in enumerate(out):
        heat = min(float(inputs.temperatures[row]), MAX_TEMPERATURE)
        top_k, top_p, min_p = 0, 1.0, 0.0
        if inputs.top_k is not None and inputs.top_p is not None and inputs.min_p is not None:
            top_k, top_p, min_p = int(inputs.top_k[row]), float(inputs.top_p[row]), float(inputs.min_p[row])
        possible = logits > float("-inf")
        best = torch.where(possible, logits, float("-inf")).max()
        if not heat > 0 or top_k == 1 or top_p <= 0:
            first = int((possible & (logits == best)).int().argmax())
            out[row] = float("-inf")
            out[row, first] = 0.0 if possible.any() else float("-inf")
            continue
        below = torch.where(logits >= best, 0.0, (logits.double() - best.double()) / heat)
        kept = kept_reference(logits, heat, top_k, top_p, min_p)
        out[row] = torch.where(kept, below, float("-inf")).log_softmax(0).float() if kept.any() else float("-inf")
    return out


_arguments = (f"Tensor{'?' if name in SampleInputs._field_defaults else ''} {name}" for name in SampleInputs._fields)
_kept_op = define_op(
    f"kept_logprobs({', '.join(_arguments)}) -> Tensor",
    triton_impl=_kept_triton,
    reference=_kept_reference,
    fake=lambda logits, *others: logits.new_empty(logits.shape, dtype=torch.float32),
)


def kept_logprobs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    req_indices: torch.Tensor | None = None,
    truncation: Truncation | None = None,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    token_mask: TokenMask | None = None,
) -> torch.Tensor:
    """Return the log-probabilities [rows, vocab] float32 from which `sample` draws with the same arguments.

    -inf for tokens that it does not keep; one token of probability 1 in greedy rows. `seeds` are not read.
    Capture-safe. Raises: see `sample`.
    """
    inputs = sample_inputs(logits, temperatures, seeds, seq_lens, req_indices, truncation, penalties, bias, token_mask)
    result: torch.Tensor = _kept_op(*inputs)
    return result


@triton.jit(do_not_specialize=["vocab_size", "num_drafts", "position"])
def _residual_kernel(
    logprobs_ptr,
    draft_logprobs_ptr,
    input_ids_ptr,
    last_ptr,
    drafts_left_ptr,
    req_indices_ptr,
    seeds_ptr,
    seq_lens_ptr,
    out_ptr,
    vocab_size,
    num_drafts,
    position,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    req_index = tl.load(req_indices_ptr + row)
    verifies = (tl.load(drafts_left_ptr + row) > 0) & (req_index >= 0)
    row_ptr = logprobs_ptr + row.to(tl.int64) * vocab_size
    draft_at = tl.where(verifies, req_index, 0).to(tl.int64) * num_drafts + position
    draft_row_ptr = draft_logprobs_ptr + draft_at * vocab_size
    draft = tl.load(input_ids_ptr + tl.load(last_ptr + row) + 1, mask=verifies, other=0)
    log_p = tl.load(row_ptr + draft)
    log_q = tl.load(draft_row_ptr + draft, mask=verifies, other=0.0)
    zero = tl.zeros([1], tl.int32)
    word, _, _, _ = tl.philox(tl.load(seeds_ptr + row), zero, tl.load(seq_lens_ptr + row) + zero, zero + _ACCEPTS_AT,
                              zero)  # fmt: skip
    variate = tl.sum(exponential(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10), 0)
    accepts = log_p - log_q >= -variate
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    logprobs = tl.load(row_ptr + tokens, mask=mask, other=float("-inf"))
    of_draft = tl.load(draft_row_ptr + tokens, mask=tokens < tl.where(verifies, vocab_size, 0), other=float("-inf"))
    p = tl.exp(logprobs)
    rest = tl.log(tl.maximum(p - tl.exp(of_draft), p * _LEAST))
    rest = tl.where(logprobs > float("-inf"), rest, float("-inf"))
    chosen = tl.where(tokens == draft, 0.0, float("-inf"))
    out = tl.where(verifies, tl.where(accepts, chosen, rest), logprobs)
    tl.store(out_ptr + row.to(tl.int64) * vocab_size + tokens, out, mask=mask)


@triton.jit(do_not_specialize=["vocab_size", "num_drafts"])
def _store_kernel(proposed_ptr, req_indices_ptr, draft_logprobs_ptr, vocab_size, num_drafts, BLOCK: tl.constexpr):
    row, position = tl.program_id(0), tl.program_id(1)
    req_index = tl.load(req_indices_ptr + row)
    tokens = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < tl.where(req_index >= 0, vocab_size, 0)
    at = (row.to(tl.int64) * num_drafts + position) * vocab_size
    to = (req_index.to(tl.int64) * num_drafts + position) * vocab_size
    tl.store(draft_logprobs_ptr + to + tokens, tl.load(proposed_ptr + at + tokens, mask=mask, other=0.0), mask=mask)


@dataclass(frozen=True, slots=True)
class _ResidualCall:
    logprobs: torch.Tensor
    draft_logprobs: torch.Tensor
    input_ids: torch.Tensor
    last: torch.Tensor
    drafts_left: torch.Tensor
    req_indices: torch.Tensor
    seeds: torch.Tensor
    seq_lens: torch.Tensor
    out: Written
    position: int


@dataclass(frozen=True, slots=True)
class _StoreCall:
    proposed: torch.Tensor
    req_indices: torch.Tensor
    draft_logprobs: Written


_launch_residual, _launch_store = KernelLauncher(_residual_kernel), KernelLauncher(_store_kernel)


def _residual_triton(c: _ResidualCall) -> None:
    rows, vocab = c.logprobs.shape
    if rows:
        _launch_residual(
            (rows, ceil_div(vocab, _BLOCK)), c.logprobs, c.draft_logprobs, c.input_ids, c.last, c.drafts_left,
            c.req_indices, c.seeds, c.seq_lens, c.out, vocab, c.draft_logprobs.shape[1], c.position, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip


def _residual_reference(c: _ResidualCall) -> None:
    c.out.copy_(c.logprobs)
    words = philox4x32(c.seeds, torch.zeros_like(c.seeds), c.seq_lens.long() & 0xFFFFFFFF, _ACCEPTS)[0]
    variates = exponential_reference(words)
    for row in ((c.drafts_left > 0) & (c.req_indices >= 0)).nonzero()[:, 0].tolist():
        draft, log_p = int(c.input_ids[c.last[row] + 1]), c.logprobs[row]
        log_q = c.draft_logprobs[c.req_indices[row], c.position]
        if bool(log_p[draft] - log_q[draft] >= -variates[row]):
            c.out[row] = float("-inf")
            c.out[row, draft] = 0.0
        else:
            c.out[row] = torch.maximum(log_p.exp() - log_q.exp(), log_p.exp() * _LEAST.value).log()


def _store_triton(c: _StoreCall) -> None:
    rows, num_drafts, vocab = c.proposed.shape
    if rows and num_drafts:
        _launch_store(
            (rows, num_drafts, ceil_div(vocab, _BLOCK)), c.proposed, c.req_indices, c.draft_logprobs, vocab, num_drafts,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def _store_reference(c: _StoreCall) -> None:
    known = c.req_indices >= 0
    c.draft_logprobs[c.req_indices[known].long()] = c.proposed[known]


_residual_op = DeclaredOp("draft_residual", _ResidualCall, triton_impl=_residual_triton, reference=_residual_reference)
_store_op = DeclaredOp("store_draft_logprobs", _StoreCall, triton_impl=_store_triton, reference=_store_reference)


def residual(
    logprobs: torch.Tensor,
    draft_logprobs: torch.Tensor,
    input_ids: torch.Tensor,
    last: torch.Tensor,
    drafts_left: torch.Tensor,
    req_indices: torch.Tensor,
    seeds: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    position: int,
) -> torch.Tensor:
    """Accept or reject one draft per row, and return the logits [rows, vocab] float32 to sample from at temperature 1.

    logprobs        [rows, vocab]               float32  the result of `kept_logprobs`
    draft_logprobs  [max_reqs, drafts, vocab]   float32  the log-probabilities from which drafts were drawn
    input_ids       [tokens]                    int64    the draft of a row is at `last + 1`
    last            [rows]                      int64    index of the token before the draft
    drafts_left     [rows]                      int32    a row without drafts keeps its log-probabilities
    req_indices     [rows]                      int32    of `draft_logprobs`; -1 is treated like a row without drafts
    seeds, seq_lens [rows]                      int64, int32   of the random number that accepts a draft
    position        second index of `draft_logprobs`

    Capture-safe. Raises: ShapeError: if a shape, dtype or device does not match.
    """
    check_tensor("logprobs", logprobs, shape=(None, None), dtype=torch.float32)
    (rows, vocab), device = logprobs.shape, logprobs.device
    check_tensor("draft_logprobs", draft_logprobs, shape=(None, None, vocab), dtype=torch.float32, device=device)
    check_int("position", position, 0, draft_logprobs.shape[1] - 1, advice="pass the index of the draft")
    of_rows = {
        "last": (last, torch.int64), "drafts_left": (drafts_left, torch.int32),
        "req_indices": (req_indices, torch.int32), "seeds": (seeds, torch.int64), "seq_lens": (seq_lens, torch.int32),
    }  # fmt: skip
    for name, (tensor, dtype) in of_rows.items():
        check_tensor(name, tensor, shape=(rows,), dtype=dtype, device=device)
        check_unit_stride(name, tensor)
    check_tensor("input_ids", input_ids, shape=(None,), dtype=torch.int64, device=device)
    for name, tensor in {"logprobs": logprobs, "draft_logprobs": draft_logprobs, "input_ids": input_ids}.items():
        check_contiguous(name, tensor)
    out = torch.empty_like(logprobs)
    _residual_op(
        _ResidualCall(
            logprobs, draft_logprobs, input_ids, last, drafts_left, req_indices, seeds, seq_lens, out, position
        )
    )
    return out


def store_draft_logprobs(proposed: torch.Tensor, req_indices: torch.Tensor, draft_logprobs: torch.Tensor) -> None:
    """Store the log-probabilities of a proposer's drafts by request index.

    proposed        [rows, drafts, vocab]      float32  device, contiguous
    req_indices     [rows]                     int32    a row is skipped if it is -1
    draft_logprobs  [max_reqs, drafts, vocab]  float32  written

    Capture-safe. Raises: ShapeError: if a shape, dtype or device does not match.
    """
    shape, device = (req_indices.shape[0], *draft_logprobs.shape[1:]), draft_logprobs.device
    check_tensor("the proposer's log-probabilities", proposed, shape=shape, dtype=torch.float32, device=device)
    check_contiguous("the proposer's log-probabilities", proposed)
    _store_op(_StoreCall(proposed, req_indices, draft_logprobs))


def compile_variants() -> list[CompileSpec]:
    """Return a variant of each kernel, and of `kept_logprobs` with no options and with all."""
    specs = []
    for everything in (False, True):
        types: dict[str, Any] = kernel_input_types("bf16", everything=everything)
        specs.append(
            CompileSpec(
                f"kept_logprobs{'_all' if everything else ''}", _kept_logprobs_kernel,
                {"ptrs": SampleInputs(**types), "out_ptr": "*fp32"}, {"BLOCK": _BLOCK, "PROBES": _PROBES}, _NUM_WARPS,
                3,
            )
        )  # fmt: skip
    floats32 = dict.fromkeys(("logprobs_ptr", "draft_logprobs_ptr", "out_ptr", "proposed_ptr"), "*fp32")
    longs = dict.fromkeys(("input_ids_ptr", "last_ptr", "seeds_ptr"), "*i64")
    for name, kernel in {"draft_residual": _residual_kernel, "store_draft_logprobs": _store_kernel}.items():
        specs.append(CompileSpec(name, kernel, floats32 | longs, {"BLOCK": _BLOCK}, 4, 3))
    return specs
