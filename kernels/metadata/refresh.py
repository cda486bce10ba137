"""The head of every graph: turn the step record and the persistent row state into every derived buffer, on the device.

Two kernels, a program per captured row:

    check   each row by itself. A valid row claims its row id and the slots that it writes. A claim that finds another
            one of the same step marks both rows as duplicates.
    write   every derived buffer in full, pads included, and the final fault of each row.

Claims and marks carry the step number, so nothing has to be reset between steps. Running one record again finds only
its own claims, and no duplicates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import record as layout
from graphrt.kernels.metadata.buffers import (
    COPIED,
    COPIED_PADS,
    StaticBuffers,
    call_class,
    captured_size,
    pass_operands,
)
from graphrt.kernels.metadata.read_record import (
    HEADER_SIZE,
    ROW_COPIED,
    ROW_FIELDS,
    ROW_ID,
    ROW_QUERY_LEN,
    ROW_QUERY_START,
    ROW_SAMPLE,
    ROW_SEQ_LEN,
    read_header,
    row_pages,
    token_start,
)
from graphrt.kernels.metadata.reference import refresh_reference
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.types import NO_TOKEN, PAD_SLOT_ID, TOKEN_FROM_ROW, FaultCode, RowStatus

MAX_ROWS = 1 << 16
MAX_TOKENS = 1 << 16
"""A claim names its row and the token within it in 16 bits each, and the step in 32."""

_MAX_TOKEN_BLOCK = 1024
_MAX_PAGE_BLOCK = 2048
_TABLE_BLOCK = 1024
_NUM_WARPS = 4

_TOKEN_FROM_ROW = tl.constexpr(TOKEN_FROM_ROW)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_PAD_SLOT = tl.constexpr(PAD_SLOT_ID)
_ROW_ID_OUT_OF_RANGE = tl.constexpr(int(FaultCode.ROW_ID_OUT_OF_RANGE))
_BAD_LENGTH = tl.constexpr(int(FaultCode.BAD_LENGTH))
_LENGTH_EXCEEDS_PAGES = tl.constexpr(int(FaultCode.LENGTH_EXCEEDS_PAGES))
_PAGE_OUT_OF_RANGE = tl.constexpr(int(FaultCode.PAGE_OUT_OF_RANGE))
_TOKEN_OUT_OF_RANGE = tl.constexpr(int(FaultCode.TOKEN_OUT_OF_RANGE))
_DUPLICATE_ROW = tl.constexpr(int(FaultCode.DUPLICATE_ROW))
_DUPLICATE_SLOT = tl.constexpr(int(FaultCode.DUPLICATE_SLOT))
_NO_LAST_TOKEN = tl.constexpr(int(FaultCode.NO_LAST_TOKEN))
_INVALID = tl.constexpr(int(RowStatus.INVALID))
_PAD = tl.constexpr(int(RowStatus.PAD))
_LIVE = tl.constexpr(int(RowStatus.LIVE))
_SAMPLES = tl.constexpr(int(RowStatus.SAMPLES))
_NOWHERE = tl.constexpr(1 << 30)  # index that is larger than every real one


@triton.jit
def _first_bad_page(pages_ptr, page_count, num_pages, null_page, PAGE_BLOCK: tl.constexpr):
    """Index of the row's first page that is the null page or outside the cache, else _NOWHERE."""
    first = tl.full([PAGE_BLOCK], _NOWHERE, tl.int32)
    for base in range(0, page_count, PAGE_BLOCK):
        index = base + tl.arange(0, PAGE_BLOCK)
        listed = index < page_count
        page = tl.load(pages_ptr + index, mask=listed, other=0)
        bad = listed & ((page < 0) | (page >= num_pages) | (page == null_page))
        first = tl.where(bad, tl.minimum(first, index), first)
    return tl.min(first, 0)


@triton.jit
def _first_bad_token(tokens_ptr, query_len, last_token, vocab_size, TOKEN_BLOCK: tl.constexpr):
    """Index of the row's first token outside the vocabulary, else _NOWHERE; `last_token` may stand in for the first."""
    first = tl.full([TOKEN_BLOCK], _NOWHERE, tl.int32)
    for base in range(0, query_len, TOKEN_BLOCK):
        index = base + tl.arange(0, TOKEN_BLOCK)
        given = index < query_len
        token = tl.load(tokens_ptr + index, mask=given, other=0)
        token = tl.where((index == 0) & (token == _TOKEN_FROM_ROW), last_token, token)
        bad = given & ((token < 0) | (token >= vocab_size))
        first = tl.where(bad, tl.minimum(first, index), first)
    return tl.min(first, 0)


@triton.jit
def _claim(
    claims_ptr,
    duplicates_ptr,
    pages_ptr,
    step,
    row,
    row_id,
    seq_len,
    query_len,
    num_slots,
    stride_duplicates,
    PAGE_SIZE: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """Claim the row id and every slot that the row writes. Where a claim of this step by another row, or by another
    token of this one, is found, mark both rows; of several marks of a row, the one of its lowest token stays."""
    tag = step % 0xFFFFFFFF + 1  # never 0, which is what a slot holds that nobody has claimed yet
    id_claim = (tag << 32) | (row.to(tl.int64) << 16)
    id_mark = ((step + 1) << 16) | 0xFFFF
    other_row = tl.atomic_xchg(claims_ptr + num_slots + row_id, id_claim, sem="relaxed")
    if (other_row != id_claim) & ((other_row >> 32) == (id_claim >> 32)):
        tl.atomic_max(duplicates_ptr + row, id_mark, sem="relaxed")
        tl.atomic_max(duplicates_ptr + ((other_row >> 16) & 0xFFFF), id_mark, sem="relaxed")
    slot_marks_ptr = duplicates_ptr + stride_duplicates
    for base in range(0, query_len, TOKEN_BLOCK):
        token = base + tl.arange(0, TOKEN_BLOCK)
        mask = token < query_len
        position = tl.where(mask, seq_len - query_len + token, 0)
        page = tl.load(pages_ptr + position // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        claim = id_claim | token.to(tl.int64)
        other = tl.atomic_xchg(claims_ptr + slot, claim, mask=mask, sem="relaxed")
        hit = mask & (other != claim) & ((other >> 32) == (claim >> 32))
        if tl.max(hit.to(tl.int32), 0) > 0:
            own_mark = id_mark - (claim & 0xFFFF)
            other_mark = id_mark - (other & 0xFFFF)
            own_rows = row + tl.zeros([TOKEN_BLOCK], tl.int32)
            tl.atomic_max(slot_marks_ptr + own_rows, own_mark, mask=hit, sem="relaxed")
            tl.atomic_max(slot_marks_ptr + ((other >> 16) & 0xFFFF), other_mark, mask=hit, sem="relaxed")


@triton.jit(do_not_specialize=["padded_reqs", "padded_tokens"])
def _check_rows_kernel(
    record_ptr,
    last_token_ptr,
    claims_ptr,
    duplicates_ptr,
    fault_code_ptr,
    fault_value_ptr,
    record_words,
    padded_reqs,
    padded_tokens,
    num_row_ids,
    num_pages,
    num_slots,
    null_page,
    max_seq_len,
    max_pages,
    vocab_size,
    stride_duplicates,
    PAGE_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    step, num_reqs, num_tokens, listed_reqs, listed_tokens, listed_pages = read_header(
        record_ptr, record_words, padded_reqs, padded_tokens, QUERY_LEN
    )
    if row >= num_reqs:
        tl.store(fault_code_ptr + row, 0)
        tl.store(fault_value_ptr + row, tl.zeros([], tl.int64))
        return
    rows_ptr = record_ptr + HEADER_SIZE + row
    row_id = tl.load(rows_ptr + ROW_ID * listed_reqs)
    seq_len = tl.load(rows_ptr + ROW_SEQ_LEN * listed_reqs)
    query_start = tl.load(rows_ptr + ROW_QUERY_START * listed_reqs)
    query_len = tl.load(rows_ptr + ROW_QUERY_LEN * listed_reqs)
    page_start, page_count = row_pages(rows_ptr, listed_reqs, listed_pages)
    tokens_ptr = record_ptr + HEADER_SIZE + ROW_FIELDS * listed_reqs + query_start
    pages_ptr = record_ptr + HEADER_SIZE + ROW_FIELDS * listed_reqs + listed_tokens + page_start

    # Later checks read through what earlier ones vouch for, so each looks only where nothing was wrong so far.
    id_ok = (row_id >= 0) & (row_id < num_row_ids)
    start = token_start(record_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    end = token_start(record_ptr, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    in_place = (query_start == start) & (query_len == end - start) & (end <= num_tokens)
    length_ok = in_place & (query_len >= 1) & (query_len <= seq_len) & (seq_len <= max_seq_len)
    pages_ok = (seq_len + PAGE_SIZE - 1) // PAGE_SIZE <= tl.minimum(page_count, max_pages)
    code = tl.where(pages_ok, 0, _LENGTH_EXCEEDS_PAGES)
    code = tl.where(length_ok, code, _BAD_LENGTH)
    code = tl.where(id_ok, code, _ROW_ID_OUT_OF_RANGE)
    value = tl.where(id_ok, seq_len, row_id)

    if code == 0:
        # A sequence that begins with this step has sampled nothing: what stands there is another's.
        last_token = tl.load(last_token_ptr + row_id, mask=seq_len > query_len, other=_NO_TOKEN)
        bad_page = _first_bad_page(pages_ptr, page_count, num_pages, null_page, PAGE_BLOCK)
        bad_token = _first_bad_token(tokens_ptr, query_len, last_token, vocab_size, TOKEN_BLOCK)
        if bad_page < _NOWHERE:
            code = _PAGE_OUT_OF_RANGE
            value = tl.load(pages_ptr + bad_page)
        elif bad_token < _NOWHERE:
            code = _TOKEN_OUT_OF_RANGE
            value = tl.load(tokens_ptr + bad_token)
            if (bad_token == 0) & (value == _TOKEN_FROM_ROW):
                code = tl.where(last_token < 0, _NO_LAST_TOKEN, code)
                value = tl.where(last_token < 0, row_id, last_token)
        else:
            _claim(
                claims_ptr, duplicates_ptr, pages_ptr, step, row, row_id, seq_len, query_len, num_slots,
                stride_duplicates, PAGE_SIZE, TOKEN_BLOCK,
            )  # fmt: skip
    tl.store(fault_code_ptr + row, code)
    tl.store(fault_value_ptr + row, tl.where(code == 0, 0, value).to(tl.int64))


@triton.jit
def _final_fault(
    local_code, local_value, row_mark, slot_mark, step, rows_ptr, pages_ptr, listed_reqs, PAGE_SIZE: tl.constexpr
):
    """A row's own fault and its value, else those of its duplicate marks, if they are of this step."""
    code = local_code
    value = local_value
    if local_code == 0:
        if (row_mark >> 16) == step + 1:
            code = _DUPLICATE_ROW
            value = tl.load(rows_ptr + ROW_ID * listed_reqs).to(tl.int64)
        elif (slot_mark >> 16) == step + 1:
            code = _DUPLICATE_SLOT
            token = (0xFFFF - (slot_mark & 0xFFFF)).to(tl.int32)
            seq_len = tl.load(rows_ptr + ROW_SEQ_LEN * listed_reqs)
            position = seq_len - tl.load(rows_ptr + ROW_QUERY_LEN * listed_reqs) + token
            page = tl.load(pages_ptr + position // PAGE_SIZE).to(tl.int64)
            value = page * PAGE_SIZE + position % PAGE_SIZE
    return code, value


@triton.jit
def _as_declared(word, ptr):
    """A word of the record as the buffer behind `ptr` holds it: the bits of a float, or an int; int64 is unsigned."""
    if ptr.dtype.element_ty == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif ptr.dtype.element_ty == tl.int64:
        return word.to(tl.int64) & 0xFFFFFFFF
    else:
        return word


@triton.jit(do_not_specialize=["padded_reqs", "padded_tokens"])
def _write_buffers_kernel(
    record_ptr,
    last_token_ptr,
    duplicates_ptr,
    fault_code_ptr,
    fault_value_ptr,
    step_counter_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    logits_indices_ptr,
    row_ids_ptr,
    row_status_ptr,
    void_ids_ptr,
    copied_ptrs,
    record_words,
    padded_reqs,
    padded_tokens,
    null_page,
    max_pages,
    seq_len_fill,
    num_row_ids,
    stride_duplicates,
    stride_table,
    COPIED_PADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    step, num_reqs, num_tokens, listed_reqs, listed_tokens, listed_pages = read_header(
        record_ptr, record_words, padded_reqs, padded_tokens, QUERY_LEN
    )
    real = row < num_reqs
    rows_ptr = record_ptr + HEADER_SIZE + tl.where(real, row, 0)
    tokens_ptr = record_ptr + HEADER_SIZE + ROW_FIELDS * listed_reqs
    page_start, page_count = row_pages(rows_ptr, listed_reqs, listed_pages)
    pages_ptr = tokens_ptr + listed_tokens + page_start

    # Whether the row runs. Several programs of a row may ask while one of them stores the final fault: what they read,
    # the row's own code or the final one, gives the same answer.
    row_mark = tl.load(duplicates_ptr + row)
    slot_mark = tl.load(duplicates_ptr + stride_duplicates + row)
    code, value = _final_fault(
        tl.load(fault_code_ptr + row), tl.load(fault_value_ptr + row), row_mark, slot_mark, step, rows_ptr, pages_ptr,
        listed_reqs, PAGE_SIZE,
    )  # fmt: skip
    valid = real & (code == 0)
    start = token_start(record_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    end = token_start(record_ptr, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    row_id = tl.load(rows_ptr + ROW_ID * listed_reqs, mask=valid, other=-1)
    seq_len = tl.load(rows_ptr + ROW_SEQ_LEN * listed_reqs, mask=valid, other=0)
    page_count = tl.where(valid, page_count, 0)

    columns = part * TABLE_BLOCK + tl.arange(0, TABLE_BLOCK)
    pages = tl.load(pages_ptr + columns, mask=columns < tl.minimum(page_count, max_pages), other=null_page)
    tl.store(block_table_ptr + row.to(tl.int64) * stride_table + columns, pages, mask=columns < max_pages)

    if part == 0:
        sample = tl.load(rows_ptr + ROW_SAMPLE * listed_reqs, mask=valid, other=0)
        status = tl.where(valid, tl.where(sample != 0, _SAMPLES, _LIVE), tl.where(real, _INVALID, _PAD))
        tl.store(seq_lens_ptr + row, tl.where(valid, seq_len, seq_len_fill))
        tl.store(row_ids_ptr + row, row_id)
        tl.store(row_status_ptr + row, status)
        for i in tl.static_range(len(COPIED_PADS)):
            word = tl.load(rows_ptr + (ROW_COPIED + i) * listed_reqs, mask=valid, other=COPIED_PADS[i])
            tl.store(copied_ptrs[i] + row, _as_declared(word, copied_ptrs[i]))
        # A sequence that begins with a fault leaves no token, so what its row id holds, another's, is void.
        named_id = tl.load(rows_ptr + ROW_ID * listed_reqs, mask=real, other=-1)
        length = tl.load(rows_ptr + ROW_SEQ_LEN * listed_reqs, mask=real, other=0)
        begins = length == tl.load(rows_ptr + ROW_QUERY_LEN * listed_reqs, mask=real, other=-1)
        void = real & (code != 0) & begins & (named_id >= 0) & (named_id < num_row_ids)
        tl.store(void_ids_ptr + row, tl.where(void, named_id, -1))
        tl.store(fault_code_ptr + row, tl.where(real, code, 0))
        tl.store(fault_value_ptr + row, tl.where(real, value, 0))
        tl.store(logits_indices_ptr + row, tl.where(valid, end - 1, 0).to(tl.int64))
        tl.store(query_start_loc_ptr + row, start)
        if row == padded_reqs - 1:
            tl.store(query_start_loc_ptr + padded_reqs, end)
        if row == 0:
            tl.store(step_counter_ptr, step)

    # The row's tokens, shared out among its programs.
    last_token = tl.load(last_token_ptr + row_id, mask=valid, other=0)
    valid_end = tl.where(valid, end, start)  # a scalar condition joined to a block of them misleads the interpreter
    lanes = tl.arange(0, TOKEN_BLOCK)
    for base in range(start + part * TOKEN_BLOCK, end, num_parts * TOKEN_BLOCK):
        at = base + lanes
        mask = at < valid_end
        position = tl.where(mask, seq_len - end + at, 0)
        token = tl.load(tokens_ptr + at, mask=mask, other=0)
        token = tl.where(mask & (token == _TOKEN_FROM_ROW), last_token, token)
        page = tl.load(pages_ptr + position // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
        slot = tl.where(mask, page * PAGE_SIZE + position % PAGE_SIZE, _PAD_SLOT)
        tl.store(input_ids_ptr + at, token.to(tl.int64), mask=at < end)
        tl.store(positions_ptr + at, position.to(tl.int64), mask=at < end)
        tl.store(slot_mapping_ptr + at, slot, mask=at < end)

    # Pad tokens, shared out among all programs.
    pads_from = token_start(record_ptr, num_reqs, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    program = row * num_parts + part
    for base in range(pads_from + program * TOKEN_BLOCK, padded_tokens, tl.num_programs(0) * num_parts * TOKEN_BLOCK):
        at = base + lanes
        mask = at < padded_tokens
        zeros = tl.zeros([TOKEN_BLOCK], tl.int64)
        tl.store(input_ids_ptr + at, zeros, mask=mask)
        tl.store(positions_ptr + at, zeros, mask=mask)
        tl.store(slot_mapping_ptr + at, zeros + _PAD_SLOT, mask=mask)


def _refresh_triton(b: Any) -> None:
    padded_reqs, max_pages = b.block_table.shape
    padded_tokens = b.input_ids.shape[0]
    token_block = _token_block(b.query_len, padded_tokens)
    _check_rows_kernel[(padded_reqs,)](
        b.record, b.last_token, b.claims, b.duplicates, b.fault_code, b.fault_value,
        b.record.shape[0], padded_reqs, padded_tokens, b.last_token.shape[0], b.num_pages,
        b.num_pages * b.page_size, b.null_page, b.max_seq_len, max_pages, b.vocab_size, b.duplicates.stride(0),
        PAGE_SIZE=b.page_size, QUERY_LEN=b.query_len, TOKEN_BLOCK=token_block, PAGE_BLOCK=_page_block(max_pages),
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    table_block = min(triton.next_power_of_2(max_pages), _TABLE_BLOCK)
    _write_buffers_kernel[(padded_reqs, triton.cdiv(max_pages, table_block))](
        b.record, b.last_token, b.duplicates, b.fault_code, b.fault_value, b.step_counter, b.input_ids, b.positions,
        b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_table, b.logits_indices, b.row_ids, b.row_status,
        b.void_ids, tuple(getattr(b, name) for name in COPIED),
        b.record.shape[0], padded_reqs, padded_tokens, b.null_page, max_pages, b.seq_len_fill, b.last_token.shape[0],
        b.duplicates.stride(0), b.block_table.stride(0), COPIED_PADS=COPIED_PADS,
        PAGE_SIZE=b.page_size, QUERY_LEN=b.query_len, TOKEN_BLOCK=token_block, TABLE_BLOCK=table_block,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def _token_block(query_len: int, padded_tokens: int) -> int:
    return min(int(triton.next_power_of_2(query_len or padded_tokens)), _MAX_TOKEN_BLOCK)


def _page_block(max_pages: int) -> int:
    return min(int(triton.next_power_of_2(max_pages)), _MAX_PAGE_BLOCK)


_Call = call_class(
    "refresh",
    **dict.fromkeys(
        ("page_size", "num_pages", "null_page", "max_seq_len", "vocab_size", "query_len", "seq_len_fill"), int
    ),
)
_op = DeclaredOp("refresh", _Call, triton_impl=_refresh_triton, reference=refresh_reference)


def refresh(
    buffers: StaticBuffers,
    *,
    page_size: int,
    num_pages: int,
    null_page: int,
    max_seq_len: int,
    vocab_size: int,
    query_len: int,
    seq_len_fill: int,
) -> None:
    """Rewrite every derived buffer from the step record, for every captured row and token, pads included.

    buffers       static buffers, cut to the captured size; what each holds is in docs/decode_step.md
    query_len     new tokens per row of a decode graph; 0 in a mixed graph
    seq_len_fill  length that pad and invalid rows get: what the attention backend can bear

    A row with a fault is treated as a pad row, with status INVALID; so is every row that shares its row id or a
    written slot with another. Rows and tokens of the record beyond the captured size count as absent. Step numbers
    must grow from one record to the next; running the same record again changes nothing.

    Capture-safe: the grid follows from the captured size, and whatever varies is read from the record on the device.
    Raises: ShapeError when a tensor does not fit the others.
    """
    _check(buffers, page_size=page_size, num_pages=num_pages, max_seq_len=max_seq_len, query_len=query_len)
    operands = pass_operands("refresh", buffers)
    _op(_Call(*operands, page_size, num_pages, null_page, max_seq_len, vocab_size, query_len, seq_len_fill))


def _check(b: StaticBuffers, *, page_size: int, num_pages: int, max_seq_len: int, query_len: int) -> None:
    """Raise ShapeError for what the declarations of the buffers cannot say."""
    rows, tokens = captured_size(b)
    check_tensor("block_table", b.block_table, shape=(None, None))
    check_tensor("last_token", b.last_token, shape=(None,))
    row_ids = b.last_token.shape[0]
    if query_len and tokens != rows * query_len:
        raise ShapeError(f"input_ids: expected rows x query_len = {rows * query_len} tokens, got {tokens}; slice it")
    if not (1 <= rows <= MAX_ROWS and 1 <= tokens <= MAX_TOKENS):
        raise ShapeError(
            f"row_ids, input_ids: expected 1 to {MAX_ROWS} rows and tokens, got {rows} and {tokens}; split the step"
        )
    for name, least in (("record", layout.record_size(1, 0, 0)), ("claims", num_pages * page_size + row_ids)):
        if getattr(b, name).numel() < least:
            raise ShapeError(f"{name}: expected at least {least} values, got {getattr(b, name).numel()}; enlarge it")
    if b.block_table.shape[1] * page_size < max_seq_len:
        raise ShapeError(
            f"block_table: expected columns for max_seq_len={max_seq_len} tokens in pages of {page_size}, "
            f"got {b.block_table.shape[1]}; widen it"
        )


def compile_variants() -> list[CompileSpec]:
    """Both kernels as decode graphs (1 and 4 tokens per row) and mixed graphs use them."""
    names = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32"}
    types: dict[str, Any] = {f"{name}_ptr": names[spec.dtype] for name, spec in StaticBuffers.specs().items()}
    types["copied_ptrs"] = tuple(types[f"{name}_ptr"] for name in COPIED)
    specs = []
    for name, page_size, query_len, padded_tokens, max_pages in (
        ("decode_1", 16, 1, 256, 8192),
        ("decode_4", 64, 4, 1024, 512),
        ("mixed", 1, 0, 16384, 4096),
    ):
        table_block = min(triton.next_power_of_2(max_pages), _TABLE_BLOCK)
        token_block = _token_block(query_len, padded_tokens)
        common = {"PAGE_SIZE": page_size, "QUERY_LEN": query_len, "TOKEN_BLOCK": token_block}
        for short, kernel, extra in (
            ("check_rows", _check_rows_kernel, {"PAGE_BLOCK": _page_block(max_pages)}),
            ("write_buffers", _write_buffers_kernel, {"TABLE_BLOCK": table_block, "COPIED_PADS": COPIED_PADS}),
        ):
            constexprs: dict[str, object] = {**common, **extra}
            signature = {
                argument: "constexpr" if argument in constexprs else types.get(argument, "i32")
                for argument in kernel.arg_names
            }
            pointers = tuple(argument for argument in signature if argument.endswith("_ptr"))
            specs.append(
                CompileSpec(f"{short}_{name}", kernel, signature, constexprs, _NUM_WARPS, 3, divisible=pointers)
            )
    return specs
