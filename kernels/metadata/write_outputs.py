"""Stores the tokens and faults of a step for the next step, and reports them to the host.

A graph with drafts samples at 1 + K positions of each request, one after another. This operator runs after each of
them. A request continues to the next position if its next draft equals the token that was sampled, and if neither a
stop token nor its length finishes it. So state, results and penalties never see a rejected draft. If drafts form a
tree, `follow_tree` has found the next draft.

The next step reads a request's token from `last_token`, its length from `req_seq_lens` and its finish reason from
`finish_reasons`. The host reads the results of a step from one entry of each output ring: the step number, then for
each request a token, finish reason, fault code and, if the code is not 0, fault value; with drafts, also the number of
drafts. Finally the cursor advances to the next step of the input entry, or to the next entry.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import call_class, pass_operands, pointer_types, pointers
from graphrt.kernels.metadata.buffers import (
    CURSOR_ENTRY,
    CURSOR_KIND,
    CURSOR_NUM_REQS,
    CURSOR_STEP,
    CURSOR_STEPS,
    STOP_TOKENS,
    StaticBuffers,
)
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.types import NO_TOKEN, FaultCode, FinishReason

_REQ_BLOCK = 256  # requests per iteration
_NUM_WARPS = 4

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NO_TOKEN_OFFERED = tl.constexpr(int(FaultCode.NO_TOKEN_OFFERED))
_SAMPLE_OUT_OF_RANGE = tl.constexpr(int(FaultCode.SAMPLE_OUT_OF_RANGE))
_RUNNING = tl.constexpr(int(FinishReason.RUNNING))
_FINISH_STOP_TOKEN = tl.constexpr(int(FinishReason.STOP_TOKEN))
_FINISH_LENGTH = tl.constexpr(int(FinishReason.LENGTH))
_FINISH_FAULT = tl.constexpr(int(FinishReason.FAULT))
_HEADER_NUM_REQS = tl.constexpr(layout.HEADER_NUM_REQS)
_HEADER_KIND = tl.constexpr(layout.HEADER_KIND)
_HEADER_STEPS = tl.constexpr(layout.HEADER_STEPS)
_KEEPS_STATE = tl.constexpr(layout.DELTA | layout.KEEP)
_LOOPS = tl.constexpr(layout.LOOPS)
_STOP_AT = tl.constexpr(layout.INPUTS_AT + layout.HEADER_STOP)
_INPUT_REQ_INDICES = tl.constexpr(layout.HEADER_SIZE)  # request indices are the first request field
_CURSOR_ENTRY = tl.constexpr(CURSOR_ENTRY)
_CURSOR_STEP = tl.constexpr(CURSOR_STEP)
_CURSOR_NUM_REQS = tl.constexpr(CURSOR_NUM_REQS)
_CURSOR_STEPS = tl.constexpr(CURSOR_STEPS)
_CURSOR_KIND = tl.constexpr(CURSOR_KIND)


_Reported = namedtuple(
    "_Reported",
    "tokens input_ring inputs cursor buffer_rows req_indices sample_lens drafts_left input_ids "
    "logits_indices path_rows fault_code fault_value "
    "void_req_indices length_limits stop_tokens step_counter last_token req_seq_lens finish_reasons loop_condition "
    "token_history drafts step_ring token_ring finish_reason_ring fault_code_ring fault_value_ring draft_count_ring",
)
"""Buffers that the kernel reads and writes, in the order of its arguments."""


@triton.jit(
    do_not_specialize=["padded_reqs", "vocab_size", "num_req_indices", "position", "positions", "history_len",
                       "num_drafts"]
)  # fmt: skip
def _write_outputs_kernel(
    ptrs,
    padded_reqs,
    num_req_indices,
    vocab_size,
    position,  # number of tokens that a request has sampled before in this step
    positions,  # positions per request in the ring
    history_len,
    num_drafts,
    input_entries,
    stride_input_ring,
    ring_depth,
    stride_tokens,
    stride_positions,
    stride_reasons,
    stride_codes,
    stride_values,
    stride_counts,
    BLOCK: tl.constexpr,
    NUM_STOP_TOKENS: tl.constexpr,
    FIRST: tl.constexpr,  # whether this is the first position
    LAST: tl.constexpr,
):
    step = tl.load(ptrs.step_counter)
    entry = step % ring_depth
    input_entry = tl.load(ptrs.cursor + _CURSOR_ENTRY)
    # The host may set this word while the entry's steps run. A volatile load rereads it in every step (Triton 3.6
    # ignores .cv). Only one lane loads it, because volatile loads of one word are not merged and each crosses PCIe.
    lanes = tl.arange(0, BLOCK)
    stop_ptr = ptrs.input_ring + (input_entry % input_entries) * stride_input_ring + _STOP_AT
    stop = tl.load(stop_ptr + lanes * 0, mask=lanes == 0, other=0, volatile=True)
    num_reqs = tl.load(ptrs.inputs + _HEADER_NUM_REQS)
    kind = tl.load(ptrs.inputs + _HEADER_KIND)
    continues = tl.zeros([BLOCK], tl.int32)
    for base in range(0, padded_reqs, BLOCK):
        rows = base + lanes
        mask = rows < padded_reqs
        # Results are reported in batch order; `buffer_row` is the row of each request in the step's buffers.
        buffer_row = tl.load(ptrs.buffer_rows + rows, mask=mask, other=0)
        req_index = tl.load(ptrs.req_indices + buffer_row, mask=mask, other=-1)
        code = tl.load(ptrs.fault_code + buffer_row, mask=mask, other=0)
        value = tl.load(ptrs.fault_value + buffer_row, mask=mask, other=0)
        left = tl.load(ptrs.drafts_left + buffer_row, mask=mask, other=-1)
        samples = mask & (left >= 0)
        runs = mask & (req_index >= 0)  # in the step
        live = runs  # at this position
        if FIRST == 0:
            live = runs & samples
            code = code * 0  # an earlier position has reported it
        seq_len = tl.load(ptrs.sample_lens + buffer_row, mask=live, other=0)
        tracked_reqs = tl.where((kind & _KEEPS_STATE) != 0, num_reqs, 0)
        named_index = tl.load(ptrs.inputs + _INPUT_REQ_INDICES + rows, mask=mask & (rows < tracked_reqs), other=-1)
        # Issue all loads before the first store, because a store waits for its value and delays later instructions.
        limit = tl.load(ptrs.length_limits + req_index, mask=live, other=0)
        stops = ()
        for i in tl.static_range(NUM_STOP_TOKENS):
            stops += (tl.load(ptrs.stop_tokens + i * num_req_indices + req_index, mask=live, other=_NO_TOKEN),)  # type: ignore[assignment]
        token = tl.zeros([BLOCK], tl.int64) + _NO_TOKEN
        if ptrs.tokens is not None:
            # Check a sample before narrowing it, because 2**32 + 5 truncated to 32 bits would pass as token 5.
            token = tl.load(ptrs.tokens + buffer_row, mask=mask, other=_NO_TOKEN).to(tl.int64)
            void_index = tl.load(ptrs.void_req_indices + buffer_row, mask=mask, other=-1)
            bad = samples & ((token < 0) | (token >= vocab_size))
            code = tl.where(bad, tl.where(token == _NO_TOKEN, _NO_TOKEN_OFFERED, _SAMPLE_OUT_OF_RANGE), code)
            value = tl.where(bad, token, value)
            token = tl.where(samples & (bad == 0), token, _NO_TOKEN)
            # Write the last token of every live request, so that an unfinished prefill voids the previous sequence's.
            tl.store(ptrs.last_token + req_index, token.to(tl.int32), mask=live)
            # The two stores may run in either order, because no live request has the request index of a faulty one.
            if FIRST:
                tl.store(ptrs.last_token + void_index, tl.zeros([BLOCK], tl.int32) + _NO_TOKEN, mask=void_index >= 0)
        reports = mask if FIRST else live
        ring_ptr = ptrs.token_ring + entry * stride_tokens + position * stride_positions + rows
        tl.store(ring_ptr, token.to(tl.int32), mask=mask)
        tl.store(ptrs.fault_code_ring + entry * stride_codes + rows, code, mask=reports)
        tl.store(ptrs.fault_value_ring + entry * stride_values + rows, value, mask=mask & (code != 0))
        if FIRST:
            count_ptr = ptrs.draft_count_ring + entry * stride_counts + rows
            tl.store(count_ptr, tl.maximum(left, 0), mask=rows < tl.where(num_drafts > 0, padded_reqs, 0))

        # A stop token, the length limit or a fault finishes the request; otherwise it continues.
        reason = tl.where((limit > 0) & (seq_len >= limit), _FINISH_LENGTH, _RUNNING)
        for i in tl.static_range(NUM_STOP_TOKENS):
            reason = tl.where((token >= 0) & (token == stops[i]), _FINISH_STOP_TOKEN, reason)
        reason = tl.where(code != 0, _FINISH_FAULT, reason)
        tl.store(ptrs.finish_reason_ring + entry * stride_reasons + rows, tl.where(mask, reason, 0), mask=reports)
        tl.store(ptrs.req_seq_lens + req_index, seq_len, mask=live)
        tl.store(ptrs.finish_reasons + req_index, reason, mask=live)
        history_ptr = ptrs.token_history + req_index.to(tl.int64) * history_len + seq_len
        tl.store(history_ptr, token.to(tl.int32), mask=live & (token >= 0) & (seq_len < history_len))
        running = live & (token >= 0) & (reason == _RUNNING)
        if LAST == 0:
            if ptrs.path_rows is None:
                index = tl.load(ptrs.logits_indices + position * padded_reqs + buffer_row, mask=running, other=0)
                draft = tl.load(ptrs.input_ids + index + 1, mask=running & (left > 0), other=_NO_TOKEN)
                accepts = running & (left > 0) & (draft == token)
            else:
                next_row = tl.load(ptrs.path_rows + position * padded_reqs + buffer_row, mask=running, other=0)
                accepts = running & (next_row > 0)
            tl.store(ptrs.sample_lens + buffer_row, seq_len + 1, mask=accepts)
            tl.store(ptrs.drafts_left + buffer_row, tl.where(accepts, left - 1, -1), mask=samples)
        else:
            if FIRST == 0:  # requests that sampled their last token at an earlier position
                earlier = runs & (samples == 0)
                last = tl.load(ptrs.last_token + req_index, mask=earlier, other=_NO_TOKEN)
                finished = tl.load(ptrs.finish_reasons + req_index, mask=earlier, other=_FINISH_FAULT)
                running = running | (earlier & (last >= 0) & (finished == _RUNNING))
            continues = tl.maximum(continues, running.to(tl.int32))
            drafts_ptr = ptrs.drafts + req_index.to(tl.int64) * num_drafts
            has_drafts = runs & (rows < tl.where(num_drafts > 0, padded_reqs, 0))
            tl.store(drafts_ptr, tl.zeros([BLOCK], tl.int32) - 1, mask=has_drafts)
            for unused in range(position + 1, positions):
                at = entry * stride_tokens + unused * stride_positions + rows
                tl.store(ptrs.token_ring + at, tl.zeros([BLOCK], tl.int32) + _NO_TOKEN, mask=mask)
        # The refresh sets the request index of a faulty request to -1; the step inputs still have it.
        if FIRST:
            faulty = mask & (rows < tracked_reqs) & (live == 0) & (code != 0)
            faulty = faulty & (named_index >= 0) & (named_index < num_req_indices)
            tl.store(ptrs.finish_reasons + named_index, tl.zeros([BLOCK], tl.int32) + _FINISH_FAULT, mask=faulty)
    if LAST == 0:
        return

    # The host may poll the rings while later steps run, so the step number must arrive after all other results.
    tl.debug_barrier()
    tl.atomic_xchg(ptrs.step_ring + entry, step, sem="release", scope="sys")

    # An entry is finished after its last step. A looping launch ends early if no request continues or the host stops
    # it. Other launches run all steps; after a stop these are steps without requests.
    done = tl.load(ptrs.cursor + _CURSOR_STEP) + 1
    steps = tl.load(ptrs.inputs + _HEADER_STEPS)
    any_continues = tl.max(continues, 0) > 0
    stopped = tl.max((stop != 0).to(tl.int32), 0) > 0
    ends_early = ((kind & _LOOPS) != 0) & ((any_continues == 0) | stopped)
    finished = (done >= steps) | ends_early
    tl.store(ptrs.cursor + _CURSOR_ENTRY, input_entry + tl.where(finished, 1, 0))
    tl.store(ptrs.cursor + _CURSOR_STEP, tl.where(finished, 0, done))
    tl.store(ptrs.cursor + _CURSOR_NUM_REQS, tl.where(stopped, 0, num_reqs).to(tl.int64))
    tl.store(ptrs.cursor + _CURSOR_STEPS, steps.to(tl.int64))
    tl.store(ptrs.cursor + _CURSOR_KIND, kind.to(tl.int64))
    tl.store(ptrs.loop_condition, tl.where(finished, 0, 1))


_launch = KernelLauncher(_write_outputs_kernel)


def _write_outputs_triton(b: Any) -> None:
    ptrs = pointers(_Reported, b)
    if not len(b.path_rows):
        ptrs = ptrs._replace(path_rows=None)
    _launch(
        (1,), ptrs, b.req_indices.shape[0], b.last_token.shape[0], b.vocab_size, b.position,
        b.token_ring.shape[1], b.token_history.shape[1], b.drafts.shape[1], b.input_ring.shape[0],
        b.input_ring.stride(0), b.step_ring.shape[0], b.token_ring.stride(0), b.token_ring.stride(1),
        b.finish_reason_ring.stride(0), b.fault_code_ring.stride(0), b.fault_value_ring.stride(0),
        b.draft_count_ring.stride(0),
        BLOCK=_REQ_BLOCK, NUM_STOP_TOKENS=STOP_TOKENS, FIRST=b.position == 0, LAST=_is_last(b), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _is_last(b: Any) -> bool:
    """Return whether a call is for the last position of its graph. Without a sampler, there is only one call."""
    drafts = len(b.path_rows) or len(b.logits_indices) - len(b.req_indices)
    return b.tokens is None or b.position * len(b.req_indices) == drafts


def write_outputs_reference(b: Any) -> None:
    """Reference of `graphrt::write_outputs`."""
    tokens, vocab_size, first = b.tokens, b.vocab_size, b.position == 0
    rows, step = b.req_indices.shape[0], int(b.step_counter.item())
    entry, buffer_row = step % b.step_ring.shape[0], b.buffer_rows.long()
    code, value = (b.fault_code.clone() if first else torch.zeros_like(b.fault_code)), b.fault_value.clone()
    tokens_out = torch.full((rows,), NO_TOKEN, dtype=torch.int64, device=b.req_indices.device)
    runs, samples = b.req_indices >= 0, b.drafts_left >= 0
    live = runs if first else runs & samples
    ids = b.req_indices[live].long()
    if tokens is not None:
        bad = samples & ((tokens < 0) | (tokens >= vocab_size))
        code[bad] = int(FaultCode.SAMPLE_OUT_OF_RANGE)
        code[bad & (tokens == NO_TOKEN)] = int(FaultCode.NO_TOKEN_OFFERED)
        value[bad] = tokens[bad].long()
        good = samples & ~bad
        tokens_out[good] = tokens[good].long()
        b.last_token[ids] = tokens_out[live].int()
        if first:
            b.last_token[b.void_req_indices[b.void_req_indices >= 0].long()] = NO_TOKEN

    reasons, lens = torch.zeros_like(ids, dtype=torch.int32), b.sample_lens[live]
    limits = b.length_limits[ids]
    reasons[(limits > 0) & (lens >= limits)] = int(FinishReason.LENGTH)
    stopped = (tokens_out[live] == b.stop_tokens[:, ids]).any(0) & (tokens_out[live] >= 0)
    reasons[stopped] = int(FinishReason.STOP_TOKEN)
    reasons[code[live] != 0] = int(FinishReason.FAULT)
    b.req_seq_lens[ids], b.finish_reasons[ids] = lens, reasons
    kept = (tokens_out[live] >= 0) & (lens < b.token_history.shape[1])
    b.token_history[ids[kept], lens[kept].long()] = tokens_out[live][kept].int()
    header = b.inputs[: layout.HEADER_SIZE].tolist()
    num_reqs, kind, steps = header[layout.HEADER_NUM_REQS], header[layout.HEADER_KIND], header[layout.HEADER_STEPS]
    if first and kind & (layout.DELTA | layout.KEEP):
        named = b.inputs[layout.HEADER_SIZE :][: min(num_reqs, rows)].long()
        faulty = (code[buffer_row] != 0)[: len(named)] & ~live[buffer_row][: len(named)]
        named = named[faulty & (named >= 0) & (named < len(b.finish_reasons))]
        b.finish_reasons[named] = int(FinishReason.FAULT)

    reasons_out = torch.where(code != 0, int(FinishReason.FAULT), 0).int()
    reasons_out[live] = reasons
    reports = torch.arange(rows, device="cpu") if first else live[buffer_row].nonzero()[:, 0].cpu()
    at = buffer_row[reports]
    b.finish_reason_ring[entry, reports] = reasons_out[at]
    b.token_ring[entry, b.position, :rows] = tokens_out[buffer_row].int()
    b.fault_code_ring[entry, reports] = code[at]
    b.fault_value_ring[entry, reports] = torch.where(code[at] != 0, value[at], b.fault_value_ring[entry, reports])
    if first and b.drafts.shape[1]:
        b.draft_count_ring[entry, :rows] = b.drafts_left[buffer_row].clamp_min(0)
    if not _is_last(b):
        running = live & (reasons_out == 0) & (tokens_out >= 0) & (b.drafts_left > 0)
        if len(b.path_rows):
            accepts = running & (b.path_rows.view(-1, rows)[b.position] > 0)
        else:
            index = b.logits_indices.view(-1, rows)[b.position]
            accepts = running & (b.input_ids[(index + 1).clamp_max(len(b.input_ids) - 1)] == tokens_out)
        b.sample_lens.add_(accepts.int())
        b.drafts_left.copy_(torch.where(accepts, b.drafts_left - 1, NO_TOKEN))
        return
    b.token_ring[entry, b.position + 1 :, :rows] = NO_TOKEN
    of_step = b.req_indices[runs].long()
    b.drafts[of_step, :1] = NO_TOKEN
    continues = bool(((b.finish_reasons[of_step] == 0) & (b.last_token[of_step] >= 0)).any()) and tokens is not None
    b.step_ring[entry] = step  # last, for a host that polls it
    stopped = bool(
        b.input_ring[int(b.cursor[CURSOR_ENTRY]) % b.input_ring.shape[0], layout.INPUTS_AT + layout.HEADER_STOP]
    )
    done = int(b.cursor[CURSOR_STEP]) + 1
    finished = done >= steps or (bool(kind & layout.LOOPS) and (stopped or not continues))
    b.cursor[CURSOR_ENTRY] += int(finished)
    b.cursor[CURSOR_STEP] = 0 if finished else done
    b.cursor[CURSOR_NUM_REQS] = 0 if stopped else num_reqs
    b.cursor[CURSOR_STEPS], b.cursor[CURSOR_KIND] = steps, kind
    b.loop_condition.fill_(0 if finished else 1)


_ADVANCED = ("sample_lens", "drafts_left", "token_history", "drafts")
_Call = call_class("write_outputs", _ADVANCED, tokens=torch.Tensor | None, vocab_size=int, position=int)
_op = DeclaredOp("write_outputs", _Call, triton_impl=_write_outputs_triton, reference=write_outputs_reference)


def write_outputs(buffers: StaticBuffers, tokens: torch.Tensor | None, *, vocab_size: int, position: int = 0) -> None:
    """Store a step's tokens and faults in the request state for the next step, and in the output rings for the host.

    buffers     static buffers, cut to the captured size and refreshed
    tokens      [padded_reqs]  int32 or int64  device; one token per request. None: the caller samples outside the
                graph. Tokens are then NO_TOKEN, and `last_token` does not change
    vocab_size  a sampled token outside 0 .. vocab_size - 1 is a fault, and voids the request's last token
    position    number of tokens that a request has sampled before in this step. A graph with drafts calls this for
                each of its positions in order; the call for the last position completes the step

    Capture-safe: the kernel selects the ring entry on the device, by the step counter.
    Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match.
    """
    operands = buffers.once(_operands)
    if tokens is not None:
        shape, device = buffers.req_indices.shape, buffers.req_indices.device
        check_tensor("tokens", tokens, shape=shape, dtype=(torch.int32, torch.int64), device=device)
        check_unit_stride("tokens", tokens)
    _op(_Call(*operands, tokens, vocab_size, position))


_operands = functools.partial(pass_operands, "write_outputs")


def compile_variants() -> list[CompileSpec]:
    """Return the variants for both token dtypes, for a step without tokens, and for the positions of drafts, also of
    those that form a tree."""
    specs = []
    cases = {"i32": (1, 1), "i64": (1, 1), "none": (1, 1), "first": (1, 0), "next": (0, 0), "last": (0, 1)}
    for name, (first, last) in {**cases, "tree": (0, 0)}.items():
        token_type = {"none": "constexpr", "i64": "*i64"}.get(name, "*i32")
        path_type = "*i64" if name == "tree" else "constexpr"
        types = {"ptrs": pointer_types(_Reported, tokens=token_type, path_rows=path_type)}
        constexprs = {"BLOCK": _REQ_BLOCK, "NUM_STOP_TOKENS": STOP_TOKENS, "FIRST": bool(first), "LAST": bool(last)}
        specs.append(
            CompileSpec(
                f"write_outputs_{name}", _write_outputs_kernel, types, constexprs, _NUM_WARPS, 3,
                ptx=("ld.volatile.global.b32", ".sys.release.exch.b64") if last else (),
            )
        )  # fmt: skip
    return specs
