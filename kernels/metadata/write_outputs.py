"""The tail of every graph: hand tokens and faults to the row state and to the host.

The next step finds a row's token in `last_token`, its length in `req_lens`, and whether it goes on in
`finish_reasons`. The
host finds the step's results in one entry of each output ring: the step's number, a token per row, a fault code per
row, and a value where there is a fault. Then the cursor moves on: to the slot's next step, or to the next slot.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import (
    CURSOR_KIND,
    CURSOR_NUM_REQS,
    CURSOR_SIZE,
    CURSOR_SLOT,
    CURSOR_STEP,
    CURSOR_STEPS,
    STOP_TOKENS,
    StaticBuffers,
    call_class,
    pass_operands,
)
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.types import NO_TOKEN, FaultCode, FinishReason, RequestStatus

_ROW_BLOCK = 256  # rows at a time
_NUM_WARPS = 4

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_SAMPLES = tl.constexpr(int(RequestStatus.SAMPLES))
_LIVE = tl.constexpr(int(RequestStatus.LIVE))
_PAD = tl.constexpr(int(RequestStatus.PAD))
_NO_TOKEN_OFFERED = tl.constexpr(int(FaultCode.NO_TOKEN_OFFERED))
_SAMPLE_OUT_OF_RANGE = tl.constexpr(int(FaultCode.SAMPLE_OUT_OF_RANGE))
_RUNNING = tl.constexpr(int(FinishReason.RUNNING))
_END_STOP_TOKEN = tl.constexpr(int(FinishReason.STOP_TOKEN))
_END_LENGTH = tl.constexpr(int(FinishReason.LENGTH))
_END_FAULT = tl.constexpr(int(FinishReason.FAULT))
_HEADER_NUM_REQS = tl.constexpr(layout.HEADER_NUM_REQS)
_HEADER_KIND = tl.constexpr(layout.HEADER_KIND)
_HEADER_STEPS = tl.constexpr(layout.HEADER_STEPS)
_KEPT = tl.constexpr(layout.DELTA | layout.KEEP)
_LOOPS = tl.constexpr(layout.LOOPS)
_STOP_AT = tl.constexpr(layout.INPUTS_AT + layout.HEADER_STOP)
_RECORD_IDS = tl.constexpr(layout.HEADER_SIZE)  # row ids are the first field of the rows
_CURSOR_SLOT = tl.constexpr(CURSOR_SLOT)
_CURSOR_STEP = tl.constexpr(CURSOR_STEP)
_CURSOR_NUM_REQS = tl.constexpr(CURSOR_NUM_REQS)
_CURSOR_STEPS = tl.constexpr(CURSOR_STEPS)
_CURSOR_KIND = tl.constexpr(CURSOR_KIND)


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "num_req_indices"])
def _write_outputs_kernel(
    tokens_ptr,
    input_ring_ptr,
    inputs_ptr,
    cursor_ptr,
    places_ptr,
    req_indices_ptr,
    req_status_ptr,
    seq_lens_ptr,
    fault_code_ptr,
    fault_value_ptr,
    void_ids_ptr,
    end_lengths_ptr,
    end_tokens_ptr,
    step_counter_ptr,
    last_token_ptr,
    req_lens_ptr,
    finish_reasons_ptr,
    go_on_ptr,
    step_ring_ptr,
    token_ring_ptr,
    end_ring_ptr,
    fault_code_ring_ptr,
    fault_value_ring_ptr,
    num_rows,
    num_req_indices,
    vocab_size,
    slots,
    stride_input_ring,
    ring_depth,
    stride_tokens,
    stride_ends,
    stride_codes,
    stride_values,
    BLOCK: tl.constexpr,
    END_TOKENS: tl.constexpr,
):
    step = tl.load(step_counter_ptr)
    entry = step % ring_depth
    slot = tl.load(cursor_ptr + _CURSOR_SLOT)
    # The host may set this word while the slot's steps run. A volatile load reads it anew in each of them; .cv is left
    # out by Triton 3.6. One lane loads it, as volatile loads of one word cross the link one by one.
    lanes = tl.arange(0, BLOCK)
    stop_ptr = input_ring_ptr + (slot % slots) * stride_input_ring + _STOP_AT
    stop = tl.load(stop_ptr + lanes * 0, mask=lanes == 0, other=0, volatile=True)
    num_reqs = tl.load(inputs_ptr + _HEADER_NUM_REQS)
    kind = tl.load(inputs_ptr + _HEADER_KIND)
    going_on = tl.zeros([BLOCK], tl.int32)
    for base in range(0, num_rows, BLOCK):
        rows = base + lanes
        mask = rows < num_rows
        # The host asks for the rows in its batch's order; the step has each at its place.
        place = tl.load(places_ptr + rows, mask=mask, other=0)
        status = tl.load(req_status_ptr + place, mask=mask, other=_PAD)
        code = tl.load(fault_code_ptr + place, mask=mask, other=0)
        value = tl.load(fault_value_ptr + place, mask=mask, other=0)
        live = mask & (status >= _LIVE)
        req_index = tl.load(req_indices_ptr + place, mask=live, other=0)
        seq_len = tl.load(seq_lens_ptr + place, mask=live, other=0)
        kept = tl.where((kind & _KEPT) != 0, num_reqs, 0)
        named_id = tl.load(inputs_ptr + _RECORD_IDS + rows, mask=mask & (rows < kept), other=-1)
        # A store waits for what it stores, and holds up what stands behind it: the loads come first.
        limit = tl.load(end_lengths_ptr + req_index, mask=live, other=0)
        stops = ()
        for i in tl.static_range(END_TOKENS):
            stops += (tl.load(end_tokens_ptr + i * num_req_indices + req_index, mask=live, other=_NO_TOKEN),)  # type: ignore[assignment]
        token = tl.zeros([BLOCK], tl.int64) + _NO_TOKEN
        if tokens_ptr is not None:
            # A sample is judged in its own width: cut to 32 bits first, 2**32 + 5 would pass for token 5.
            token = tl.load(tokens_ptr + place, mask=mask, other=_NO_TOKEN).to(tl.int64)
            void_id = tl.load(void_ids_ptr + place, mask=mask, other=-1)
            samples = status == _SAMPLES
            bad = samples & ((token < 0) | (token >= vocab_size))
            code = tl.where(bad, tl.where(token == _NO_TOKEN, _NO_TOKEN_OFFERED, _SAMPLE_OUT_OF_RANGE), code)
            value = tl.where(bad, token, value)
            token = tl.where(samples & (bad == 0), token, _NO_TOKEN)
            # Every live row's last token changes: a prompt that goes on voids what an ended sequence left there.
            tl.store(last_token_ptr + req_index, token.to(tl.int32), mask=live)
            # No live row has a void id, as the refresh makes all rows of one id faulty: the stores' order is free.
            tl.store(last_token_ptr + void_id, tl.zeros([BLOCK], tl.int32) + _NO_TOKEN, mask=void_id >= 0)
        tl.store(token_ring_ptr + entry * stride_tokens + rows, token.to(tl.int32), mask=mask)
        tl.store(fault_code_ring_ptr + entry * stride_codes + rows, code, mask=mask)
        tl.store(fault_value_ring_ptr + entry * stride_values + rows, value, mask=mask & (code != 0))

        # How a row goes on when the host has no delta of it: a stop token, its length or a fault end it.
        end = tl.where((limit > 0) & (seq_len >= limit), _END_LENGTH, _RUNNING)
        for i in tl.static_range(END_TOKENS):
            end = tl.where((token >= 0) & (token == stops[i]), _END_STOP_TOKEN, end)
        end = tl.where(code != 0, _END_FAULT, end)
        tl.store(end_ring_ptr + entry * stride_ends + rows, tl.where(mask, end, 0), mask=mask)
        tl.store(req_lens_ptr + req_index, seq_len, mask=live)
        tl.store(finish_reasons_ptr + req_index, end, mask=live)
        going_on = tl.maximum(going_on, (live & (token >= 0) & (end == _RUNNING)).to(tl.int32))
        # A row that the refresh found faulty is nobody's in the step; the record has its id.
        faulty = mask & (rows < kept) & (live == 0) & (code != 0)
        faulty = faulty & (named_id >= 0) & (named_id < num_req_indices)
        tl.store(finish_reasons_ptr + named_id, tl.zeros([BLOCK], tl.int32) + _END_FAULT, mask=faulty)

    # The host may look at the rings while later steps run: the step's number arrives behind all the rest of it.
    tl.debug_barrier()
    tl.atomic_xchg(step_ring_ptr + entry, step, sem="release", scope="sys")

    # The slot is used up after its last step. A launch that loops over its steps ends where no row goes on, or the host
    # stops it. One that does not loop runs all steps, those after a stop without rows.
    done = tl.load(cursor_ptr + _CURSOR_STEP) + 1
    steps = tl.load(inputs_ptr + _HEADER_STEPS)
    any_goes_on = tl.max(going_on, 0) > 0
    stopped = tl.max((stop != 0).to(tl.int32), 0) > 0
    ends_early = ((kind & _LOOPS) != 0) & ((any_goes_on == 0) | stopped)
    used_up = (done >= steps) | ends_early
    tl.store(cursor_ptr + _CURSOR_SLOT, slot + tl.where(used_up, 1, 0))
    tl.store(cursor_ptr + _CURSOR_STEP, tl.where(used_up, 0, done))
    tl.store(cursor_ptr + _CURSOR_NUM_REQS, tl.where(stopped, 0, num_reqs).to(tl.int64))
    tl.store(cursor_ptr + _CURSOR_STEPS, steps.to(tl.int64))
    tl.store(cursor_ptr + _CURSOR_KIND, kind.to(tl.int64))
    tl.store(go_on_ptr, tl.where(used_up, 0, 1))


_launch = KernelLauncher(_write_outputs_kernel)


def _write_outputs_triton(b: Any) -> None:
    rows = b.req_indices.shape[0]
    _launch(
        (1,), b.tokens, b.input_ring, b.inputs, b.cursor, b.places, b.req_indices, b.req_status, b.seq_lens,
        b.fault_code,
        b.fault_value, b.void_ids, b.end_lengths, b.end_tokens, b.step_counter, b.last_token, b.req_lens,
        b.finish_reasons,
        b.go_on, b.step_ring, b.token_ring, b.end_ring, b.fault_code_ring, b.fault_value_ring,
        rows, b.last_token.shape[0], b.vocab_size, b.input_ring.shape[0], b.input_ring.stride(0), b.step_ring.shape[0],
        b.token_ring.stride(0), b.end_ring.stride(0), b.fault_code_ring.stride(0), b.fault_value_ring.stride(0),
        BLOCK=_ROW_BLOCK, END_TOKENS=STOP_TOKENS, num_warps=_NUM_WARPS,
    )  # fmt: skip


def write_outputs_reference(b: Any) -> None:
    """Reference of `graphrt::write_outputs`."""
    tokens, vocab_size = b.tokens, b.vocab_size
    rows, step = b.req_indices.shape[0], int(b.step_counter.item())
    entry, place = step % b.step_ring.shape[0], b.places.long()
    code, value = b.fault_code.clone(), b.fault_value.clone()
    published = torch.full((rows,), NO_TOKEN, dtype=torch.int64, device=b.req_indices.device)
    live = b.req_status >= int(RequestStatus.LIVE)
    ids = b.req_indices[live].long()
    if tokens is not None:
        samples = b.req_status == int(RequestStatus.SAMPLES)
        bad = samples & ((tokens < 0) | (tokens >= vocab_size))
        code[bad] = int(FaultCode.SAMPLE_OUT_OF_RANGE)
        code[bad & (tokens == NO_TOKEN)] = int(FaultCode.NO_TOKEN_OFFERED)
        value[bad] = tokens[bad].long()
        good = samples & ~bad
        published[good] = tokens[good].long()
        b.last_token[ids] = published[live].int()
        b.last_token[b.void_ids[b.void_ids >= 0].long()] = NO_TOKEN

    ends = torch.zeros_like(ids, dtype=torch.int32)
    limits = b.end_lengths[ids]
    ends[(limits > 0) & (b.seq_lens[live] >= limits)] = int(FinishReason.LENGTH)
    stopped = (published[live] == b.end_tokens[:, ids]).any(0) & (published[live] >= 0)
    ends[stopped] = int(FinishReason.STOP_TOKEN)
    ends[code[live] != 0] = int(FinishReason.FAULT)
    b.req_lens[ids], b.finish_reasons[ids] = b.seq_lens[live], ends
    header = b.inputs[: layout.HEADER_SIZE].tolist()
    num_reqs, kind, steps = header[layout.HEADER_NUM_REQS], header[layout.HEADER_KIND], header[layout.HEADER_STEPS]
    if kind & (layout.DELTA | layout.KEEP):
        named = b.inputs[layout.HEADER_SIZE :][: min(num_reqs, rows)].long()
        faulty = (code[place] != 0)[: len(named)] & ~live[place][: len(named)]
        named = named[faulty & (named >= 0) & (named < len(b.finish_reasons))]
        b.finish_reasons[named] = int(FinishReason.FAULT)

    published_ends = torch.where(code != 0, int(FinishReason.FAULT), 0).int()
    published_ends[live] = ends
    b.end_ring[entry, :rows] = published_ends[place]
    code, value = code[place], value[place]
    b.token_ring[entry, :rows] = published[place].int()
    b.fault_code_ring[entry, :rows] = code
    b.fault_value_ring[entry, :rows] = torch.where(code != 0, value, b.fault_value_ring[entry, :rows])
    b.step_ring[entry] = step  # behind all the rest of the step, for a host that watches
    goes_on = bool(((ends == 0) & (published[live] >= 0)).any())
    stopped = bool(
        b.input_ring[int(b.cursor[CURSOR_SLOT]) % b.input_ring.shape[0], layout.INPUTS_AT + layout.HEADER_STOP]
    )
    done = int(b.cursor[CURSOR_STEP]) + 1
    used_up = done >= steps or (bool(kind & layout.LOOPS) and (stopped or not goes_on))
    b.cursor[CURSOR_SLOT] += int(used_up)
    b.cursor[CURSOR_STEP] = 0 if used_up else done
    b.cursor[CURSOR_NUM_REQS] = 0 if stopped else num_reqs
    b.cursor[CURSOR_STEPS], b.cursor[CURSOR_KIND] = steps, kind
    b.go_on.fill_(0 if used_up else 1)


_Call = call_class("write_outputs", tokens=torch.Tensor | None, vocab_size=int)
_op = DeclaredOp("write_outputs", _Call, triton_impl=_write_outputs_triton, reference=write_outputs_reference)


def write_outputs(buffers: StaticBuffers, tokens: torch.Tensor | None, *, vocab_size: int) -> None:
    """Hand a step's tokens and faults to the row state, where the next step finds them, and to the host's rings.

    buffers     static buffers, cut to one size and refreshed
    tokens      [rows]  int32 or int64  device; one per row. None where the caller samples: tokens are NO_TOKEN then,
                                        and last tokens stay as they are
    vocab_size  a sampled token below 0 or from here on is a fault of its row, and the row's last token is void

    Capture-safe: the ring entry is chosen on the device, by the step counter.
    Raises: ShapeError when a tensor does not fit the others.
    """
    operands = buffers.once(_operands)
    if tokens is not None:
        shape, device = buffers.req_indices.shape, buffers.req_indices.device
        check_tensor("tokens", tokens, shape=shape, dtype=(torch.int32, torch.int64), device=device)
        check_unit_stride("tokens", tokens)
    _op(_Call(*operands, tokens, vocab_size))


def _operands(buffers: StaticBuffers) -> list[torch.Tensor]:
    operands = pass_operands("write_outputs", buffers)
    req_indices = buffers.last_token.shape[0]
    for name, least in (
        ("input_ring", (layout.INPUTS_AT + layout.HEADER_SIZE,)),
        ("inputs", (layout.HEADER_SIZE,)),
        ("cursor", (CURSOR_SIZE,)),
        ("req_lens", (req_indices,)),
        ("finish_reasons", (req_indices,)),
        ("end_lengths", (req_indices,)),
        ("end_tokens", (STOP_TOKENS, req_indices)),
    ):
        tensor = getattr(buffers, name)
        if tensor.shape[-1] < least[-1] or not tensor.is_contiguous():
            raise ShapeError(f"{name}: expected at least {list(least)} values, contiguous, got {list(tensor.shape)}")
    return operands


def compile_variants() -> list[CompileSpec]:
    """Publishing tokens of both dtypes, and none."""
    wide = ("fault_value_ptr", "step_counter_ptr", "step_ring_ptr", "fault_value_ring_ptr", "cursor_ptr")
    specs = []
    for kind in ("i32", "i64", None):
        constexprs: dict[str, object] = {"BLOCK": _ROW_BLOCK, "END_TOKENS": STOP_TOKENS}
        constexprs |= {} if kind else {"tokens_ptr": None}
        types = {"tokens_ptr": f"*{kind}", **dict.fromkeys(wide, "*i64")}
        signature = {
            argument: "constexpr"
            if argument in constexprs
            else types.get(argument, "*i32" if argument.endswith("_ptr") else "i32")
            for argument in _write_outputs_kernel.arg_names
        }
        specs.append(
            CompileSpec(
                f"publish_{kind or 'none'}", _write_outputs_kernel, signature, constexprs, _NUM_WARPS, 3,
                ptx=("ld.volatile.global.b32", ".sys.release.exch.b64"),
            )
        )  # fmt: skip
    return specs
