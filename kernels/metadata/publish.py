"""The tail of every graph: hand tokens and faults to the row state and to the host.

The next step finds a row's token in `last_token`. The host finds the step's results in one entry of each output ring:
the step's number, a token per row, a fault code per row, and a value where there is a fault.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.metadata.buffers import StaticBuffers, call_class, pass_operands
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.types import NO_TOKEN, FaultCode, RowStatus

_ROW_BLOCK = 256  # rows of a program
_NUM_WARPS = 4

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_SAMPLES = tl.constexpr(int(RowStatus.SAMPLES))
_LIVE = tl.constexpr(int(RowStatus.LIVE))
_PAD = tl.constexpr(int(RowStatus.PAD))
_NO_TOKEN_OFFERED = tl.constexpr(int(FaultCode.NO_TOKEN_OFFERED))
_SAMPLE_OUT_OF_RANGE = tl.constexpr(int(FaultCode.SAMPLE_OUT_OF_RANGE))


@triton.jit(do_not_specialize=["num_rows", "vocab_size"])
def _publish_kernel(
    tokens_ptr,
    places_ptr,
    row_ids_ptr,
    row_status_ptr,
    fault_code_ptr,
    fault_value_ptr,
    void_ids_ptr,
    step_counter_ptr,
    last_token_ptr,
    step_ring_ptr,
    token_ring_ptr,
    fault_code_ring_ptr,
    fault_value_ring_ptr,
    num_rows,
    vocab_size,
    ring_depth,
    stride_tokens,
    stride_codes,
    stride_values,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    # The host asks for the rows in its batch's order; the step has each at its place.
    place = tl.load(places_ptr + rows, mask=mask, other=0)
    status = tl.load(row_status_ptr + place, mask=mask, other=_PAD)
    code = tl.load(fault_code_ptr + place, mask=mask, other=0)
    value = tl.load(fault_value_ptr + place, mask=mask, other=0)
    step = tl.load(step_counter_ptr)
    entry = step % ring_depth
    token = tl.zeros([BLOCK], tl.int64) + _NO_TOKEN
    if tokens_ptr is not None:
        # A sample is judged in its own width: cut to 32 bits first, 2**32 + 5 would pass for token 5.
        token = tl.load(tokens_ptr + place, mask=mask, other=_NO_TOKEN).to(tl.int64)
        samples = status == _SAMPLES
        bad = samples & ((token < 0) | (token >= vocab_size))
        code = tl.where(bad, tl.where(token == _NO_TOKEN, _NO_TOKEN_OFFERED, _SAMPLE_OUT_OF_RANGE), code)
        value = tl.where(bad, token, value)
        token = tl.where(samples & (bad == 0), token, _NO_TOKEN)
        # Every live row's last token changes: a prompt that goes on voids what an ended sequence left there.
        live = mask & (status >= _LIVE)
        row_id = tl.load(row_ids_ptr + place, mask=live, other=0)
        tl.store(last_token_ptr + row_id, token.to(tl.int32), mask=live)
        # No live row has a void id, as the refresh makes all rows of one id faulty: the order of the stores is free.
        void_id = tl.load(void_ids_ptr + place, mask=mask, other=-1)
        tl.store(last_token_ptr + void_id, tl.zeros([BLOCK], tl.int32) + _NO_TOKEN, mask=void_id >= 0)
    tl.store(token_ring_ptr + entry * stride_tokens + rows, token.to(tl.int32), mask=mask)
    tl.store(fault_code_ring_ptr + entry * stride_codes + rows, code, mask=mask)
    tl.store(fault_value_ring_ptr + entry * stride_values + rows, value, mask=mask & (code != 0))
    if tl.program_id(0) == 0:
        tl.store(step_ring_ptr + entry, step)


def _publish_triton(b: Any) -> None:
    rows = b.row_ids.shape[0]
    _publish_kernel[(triton.cdiv(rows, _ROW_BLOCK),)](
        b.tokens, b.places, b.row_ids, b.row_status, b.fault_code, b.fault_value, b.void_ids, b.step_counter,
        b.last_token, b.step_ring, b.token_ring, b.fault_code_ring, b.fault_value_ring,
        rows, b.vocab_size, b.step_ring.shape[0],
        b.token_ring.stride(0), b.fault_code_ring.stride(0), b.fault_value_ring.stride(0),
        BLOCK=_ROW_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


def publish_reference(b: Any) -> None:
    """Reference of `graphrt::publish`."""
    tokens, vocab_size = b.tokens, b.vocab_size
    rows, step = b.row_ids.shape[0], int(b.step_counter.item())
    entry, place = step % b.step_ring.shape[0], b.places.long()
    code, value = b.fault_code.clone(), b.fault_value.clone()
    published = torch.full((rows,), NO_TOKEN, dtype=torch.int64, device=b.row_ids.device)
    if tokens is not None:
        samples = b.row_status == int(RowStatus.SAMPLES)
        bad = samples & ((tokens < 0) | (tokens >= vocab_size))
        code[bad] = int(FaultCode.SAMPLE_OUT_OF_RANGE)
        code[bad & (tokens == NO_TOKEN)] = int(FaultCode.NO_TOKEN_OFFERED)
        value[bad] = tokens[bad].long()
        good = samples & ~bad
        published[good] = tokens[good].long()
        live = b.row_status >= int(RowStatus.LIVE)
        b.last_token[b.row_ids[live].long()] = published[live].int()
        b.last_token[b.void_ids[b.void_ids >= 0].long()] = NO_TOKEN
    b.step_ring[entry] = step
    code, value = code[place], value[place]
    b.token_ring[entry, :rows] = published[place].int()
    b.fault_code_ring[entry, :rows] = code
    b.fault_value_ring[entry, :rows] = torch.where(code != 0, value, b.fault_value_ring[entry, :rows])


_Call = call_class("publish", tokens=torch.Tensor | None, vocab_size=int)
_op = DeclaredOp("publish", _Call, triton_impl=_publish_triton, reference=publish_reference)


def publish(buffers: StaticBuffers, tokens: torch.Tensor | None, *, vocab_size: int) -> None:
    """Hand a step's tokens and faults to the row state, where the next step finds them, and to the host's rings.

    buffers     static buffers, cut to one size and refreshed
    tokens      [rows]  int32 or int64  device; one per row. None where the caller samples: tokens are NO_TOKEN then,
                                        and last tokens stay as they are
    vocab_size  a sampled token below 0 or from here on is a fault of its row, and the row's last token is void

    Capture-safe: the ring entry is chosen on the device, by the step counter.
    Raises: ShapeError when a tensor does not fit the others.
    """
    operands = pass_operands("publish", buffers)
    if tokens is not None:
        shape, device = buffers.row_ids.shape, buffers.row_ids.device
        check_tensor("tokens", tokens, shape=shape, dtype=(torch.int32, torch.int64), device=device)
        check_unit_stride("tokens", tokens)
    _op(_Call(*operands, tokens, vocab_size))


def compile_variants() -> list[CompileSpec]:
    """Publishing tokens of both dtypes, and none."""
    wide = ("fault_value_ptr", "step_counter_ptr", "step_ring_ptr", "fault_value_ring_ptr")
    specs = []
    for kind in ("i32", "i64", None):
        constexprs: dict[str, object] = {"BLOCK": _ROW_BLOCK} | ({} if kind else {"tokens_ptr": None})
        types = {"tokens_ptr": f"*{kind}", **dict.fromkeys(wide, "*i64")}
        signature = {
            argument: "constexpr"
            if argument in constexprs
            else types.get(argument, "*i32" if argument.endswith("_ptr") else "i32")
            for argument in _publish_kernel.arg_names
        }
        specs.append(CompileSpec(f"publish_{kind or 'none'}", _publish_kernel, signature, constexprs, _NUM_WARPS, 3))
    return specs
