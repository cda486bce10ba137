"""The operator after `unpack` in every graph, which derives all buffers from the step inputs and persistent state.

Two kernels, with one program per padded request and KV group:

    check   Checks each request, and its pages in each group. Detects write conflicts, see write_conflicts.py.
    write   Writes the derived buffers including their pads, the page tables, and the final fault of each request.
            In a mixed step with separate decode attention, decode requests get the first buffer rows.

Running the same inputs again reports no conflicts, because each request then replaces only its own writer ids.

The inputs may list all pages of a request, only its new pages, or none, because `page_table` keeps the pages of every
request index. `page_spans` stores which columns of the table belong to the current sequence.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_int, check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import KernelLauncher, overlaps
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import (
    MAX_TOKENS,
    call_class,
    captured_size,
    check_tables,
    pointer_types,
    pointers,
    refresh_operands,
)
from graphrt.kernels.metadata.buffers import COPIED, COPIED_PAD_WORDS, StaticBuffers
from graphrt.kernels.metadata.faults import NOWHERE, fault_value, final_fault, first_bad_page, first_bad_token
from graphrt.kernels.metadata.read_inputs import (
    HEADER_SIZE,
    REQ_COPIED,
    REQ_ENCODER_LEN,
    REQ_INDEX,
    REQ_QUERY_LEN,
    REQ_QUERY_START,
    REQ_SAMPLE,
    REQ_SEQ_LEN,
    as_declared,
    find_buffer_row,
    has_request,
    read_header,
    token_range,
    token_start,
)
from graphrt.kernels.metadata.read_pages import first_seen_page, lists_page_0, pages_at, read_group, row_pages, token_at
from graphrt.kernels.metadata.reference import refresh_reference
from graphrt.kernels.metadata.write_conflicts import mark_req_conflict, store_page_writers
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import next_power_of_two
from graphrt.kernels.types import FAULT_GROUP_SHIFT, NO_TOKEN, PAD_SLOT_ID, TOKEN_FROM_DEVICE, FaultCode, RequestStatus

_FEW_PROGRAMS = 128  # up to this many programs, each runs on its own multiprocessor with 4 warps
_WIDE_BLOCK = 1024  # columns or tokens per iteration of a 4-warp program
_NARROW_BLOCK = 64  # the same for a 1-warp program; 2,048 of these run at once on an H200
_ROW_BLOCK = 128  # requests counted per iteration to find a program's buffer row
_MAX_SPILL = 8  # bytes of one pointer, in mixed graphs with several KV groups
_MAX_PROGRAMS = 1024  # limit when splitting a request's columns and tokens over several programs

_TOKEN_FROM_DEVICE = tl.constexpr(TOKEN_FROM_DEVICE)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_PAD_SLOT = tl.constexpr(PAD_SLOT_ID)
_REQ_INDEX_OUT_OF_RANGE = tl.constexpr(int(FaultCode.REQ_INDEX_OUT_OF_RANGE))
_BAD_LENGTH = tl.constexpr(int(FaultCode.BAD_LENGTH))
_LENGTH_EXCEEDS_PAGES = tl.constexpr(int(FaultCode.LENGTH_EXCEEDS_PAGES))
_PAGE_OUT_OF_RANGE = tl.constexpr(int(FaultCode.PAGE_OUT_OF_RANGE))
_TOKEN_OUT_OF_RANGE = tl.constexpr(int(FaultCode.TOKEN_OUT_OF_RANGE))
_NO_LAST_TOKEN = tl.constexpr(int(FaultCode.NO_LAST_TOKEN))
_BAD_ENCODER_LEN = tl.constexpr(int(FaultCode.BAD_ENCODER_LEN))
_ENCODER_LEN_CHANGED = tl.constexpr(int(FaultCode.ENCODER_LEN_CHANGED))
_INVALID = tl.constexpr(int(RequestStatus.INVALID))
_PAD = tl.constexpr(int(RequestStatus.PAD))
_LIVE = tl.constexpr(int(RequestStatus.LIVE))
_SAMPLES = tl.constexpr(int(RequestStatus.SAMPLES))
_GROUP_SHIFT = tl.constexpr(FAULT_GROUP_SHIFT)

_Checked = namedtuple(
    "_Checked",
    "page_groups inputs last_token last_encoder_len last_writers write_conflicts tables page_table page_spans "
    "table_from table_to new_spans check_code check_value",
)
_Written = namedtuple(
    "_Written",
    "page_groups inputs last_token last_encoder_len write_conflicts tables page_table page_spans table_from table_to "
    "new_spans check_code check_value fault_code fault_value step_counter input_ids positions slot_mapping "
    "query_start_loc seq_lens block_table buffer_rows decode_seq_lens prompt_seq_lens decode_start_loc "
    "prompt_start_loc logits_indices sample_lens drafts_left req_indices req_status void_req_indices",
)
"""Buffers that the kernels read and write, in the order of their arguments."""


@triton.jit(do_not_specialize=["padded_reqs", "padded_tokens", "num_req_indices"])
def _check_rows_kernel(
    ptrs,
    inputs_words,
    padded_reqs,
    padded_tokens,
    num_req_indices,
    first_req_writer,
    max_seq_len,
    vocab_size,
    table_width,
    stride_conflicts,
    stride_check,
    QUERY_LEN: tl.constexpr,
    REQ_FIELDS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    group = tl.program_id(1)
    page_size, num_pages, null_page, max_pages, window, chunk, writers_at, max_encoder_len = read_group(
        ptrs.page_groups, group
    )
    if OVERLAPS:  # the second kernel may start, because it waits for this one, which waits for `unpack`
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step, num_reqs, num_tokens, allows_empty, listed_reqs, listed_tokens, listed_pages = read_header(
        ptrs.inputs, inputs_words, padded_reqs, padded_tokens, QUERY_LEN, REQ_FIELDS
    )
    check_at = group * stride_check + row
    spans_ptr = ptrs.new_spans + 4 * check_at
    # Issue all loads before the first store, because a store waits for its value and delays every later instruction.
    held_from = tl.load(ptrs.table_from + check_at)
    held_to = tl.load(ptrs.table_to + check_at)
    is_row = row < num_reqs
    rows_ptr = ptrs.inputs + HEADER_SIZE + row
    req_index = tl.load(rows_ptr + REQ_INDEX * listed_reqs, mask=is_row, other=-1)
    seq_len = tl.load(rows_ptr + REQ_SEQ_LEN * listed_reqs, mask=is_row, other=0)
    query_start = tl.load(rows_ptr + REQ_QUERY_START * listed_reqs, mask=is_row, other=0)
    query_len = tl.load(rows_ptr + REQ_QUERY_LEN * listed_reqs, mask=is_row, other=0)
    encoder_len = tl.load(rows_ptr + REQ_ENCODER_LEN * listed_reqs, mask=is_row, other=0)
    is_cross = max_encoder_len > 0
    listed_pages_ptr = ptrs.inputs + HEADER_SIZE + REQ_FIELDS * listed_reqs + listed_tokens
    first, page_count, pages_ptr = row_pages(
        rows_ptr, listed_pages_ptr, ptrs.tables, is_row, req_index, tl.where(is_cross, encoder_len, seq_len), group,
        page_size, max_pages, num_req_indices, table_width, listed_reqs, listed_pages,
    )  # fmt: skip
    from_start = (first == 0) & (page_count > 0) & (is_cross == 0)
    if ptrs.tables is not None:
        from_start = is_row
    elif GROUPS > 1:
        listed = lists_page_0(rows_ptr, is_row, ptrs.page_groups, listed_reqs, listed_pages, GROUPS, GROUP_BLOCK)
        from_start = listed != 0
    # Save the table's old span here, because the programs of the second kernel overwrite it concurrently.
    tl.store(spans_ptr + 2, held_from)
    tl.store(spans_ptr + 3, held_to)
    if (is_row & has_request(req_index, allows_empty)) == 0:
        tl.store(ptrs.check_code + check_at, 0)
        tl.store(ptrs.check_value + check_at, tl.zeros([], tl.int64))
        tl.store(spans_ptr, 0)
        tl.store(spans_ptr + 1, 0)
        return
    tokens_ptr = ptrs.inputs + HEADER_SIZE + REQ_FIELDS * listed_reqs + query_start

    # Later checks use values that earlier checks validate, so they are masked off where an earlier check failed.
    index_ok = (req_index >= 0) & (req_index < num_req_indices)
    _, _, _, in_place = token_range(
        ptrs.inputs, row, query_start, query_len, num_reqs, num_tokens, listed_reqs, QUERY_LEN, POSITIONS
    )
    length_ok = in_place & (query_len >= 1) & (query_len <= seq_len) & (seq_len <= max_seq_len)
    # `held`: number of tokens whose pages the request needs, from its sequence or its encoder.
    encoder_ok = (encoder_len >= tl.where(page_count > 0, 1, 0)) & (encoder_len <= max_encoder_len)
    encoder_ok = (is_cross == 0) | encoder_ok
    held = tl.where(is_cross, encoder_len, seq_len)

    # The known columns of the table: those of a complete list, or the known columns plus the new ones. A sequence that
    # starts in this step, or that lists pages from page 0, has no known columns; they belong to a previous sequence.
    state = group * num_req_indices + tl.where(index_ok, req_index, 0)
    has_past = index_ok & length_ok & (seq_len > query_len)
    continues = has_past & (from_start == 0)
    tag = step % 0xFFFFFFFF + 1  # never 0, the initial value of last_writers
    req_writer = (tag << 32) | (row.to(tl.int64) << 16)
    mark = ((step + 1) << 16) | 0xFFFF
    # This applies despite other faults, because only one request per step may use the state of a request index.
    is_writer = index_ok & (group == 0)
    writer_ptr = ptrs.last_writers + first_req_writer + req_index
    previous = tl.atomic_xchg(writer_ptr, req_writer, mask=is_writer, sem="relaxed")
    # Tokens are the same in all groups, so only the programs of the first group check them.
    last_token = tl.load(ptrs.last_token + req_index, mask=has_past, other=_NO_TOKEN)
    checked_tokens = tl.where(length_ok & (group == 0), query_len, 0)
    last_encoder_len = tl.load(ptrs.last_encoder_len + req_index, mask=continues, other=0)
    keeps_len = (continues == 0) | ((first == 0) & (page_count > 0)) | (encoder_len == last_encoder_len)
    keeps_len = (is_cross == 0) | keeps_len
    known_from = tl.load(ptrs.page_spans + 2 * state, mask=continues, other=0)
    known_to = tl.load(ptrs.page_spans + 2 * state + 1, mask=continues, other=0)
    first_seen = first_seen_page(tl.where(length_ok, seq_len - query_len, 0), page_size, window, chunk)
    # row_pages() clamps the list to the inputs, so its pages can be read before the loads above complete.
    skipped = tl.maximum(first_seen - first, 0)
    bad_page = first_bad_page(pages_ptr, skipped, page_count, num_pages, null_page, PAGE_BLOCK)
    needed = tl.where(length_ok & encoder_ok, (held + page_size - 1) // page_size, 0)
    listed_to = first + page_count
    whole = (first == 0) | ((first <= first_seen) & (listed_to >= needed))
    joins = (first >= known_from) & (first <= known_to)
    span_from = tl.where((page_count > 0) & whole, first, known_from)
    span_to = tl.where(page_count > 0, tl.where(whole, listed_to, tl.maximum(known_to, listed_to)), known_to)
    pages_ok = (page_count == 0) | whole | joins
    pages_ok = pages_ok & (span_from <= first_seen) & (needed <= tl.minimum(span_to, max_pages))
    code = tl.where(pages_ok, 0, _LENGTH_EXCEEDS_PAGES)
    code = tl.where(keeps_len, code, _ENCODER_LEN_CHANGED)
    code = tl.where(encoder_ok, code, _BAD_ENCODER_LEN)
    code = tl.where(length_ok, code, _BAD_LENGTH)
    code = tl.where(index_ok, code, _REQ_INDEX_OUT_OF_RANGE)
    value = tl.where(index_ok, tl.where(length_ok, held, seq_len), req_index)

    # Pages that the request writes. The first block of them is loaded before the code is known.
    first_written = tl.where(length_ok, (seq_len - query_len) // page_size, 0)
    written_to = tl.where(index_ok & (is_cross == 0), needed, 0)
    table_ptr = ptrs.page_table + state.to(tl.int64) * table_width
    lanes = tl.arange(0, TOKEN_BLOCK)
    columns = first_written + lanes
    writes = columns < tl.minimum(written_to, table_width)
    pages = pages_at(columns, writes, pages_ptr, first, page_count, table_ptr)
    bad_token = first_bad_token(tokens_ptr, checked_tokens, last_token, vocab_size, QUERY_LEN, TOKEN_BLOCK)
    if code == 0:
        if bad_page < NOWHERE:
            code = _PAGE_OUT_OF_RANGE
            value = tl.load(pages_ptr + bad_page)
        elif bad_token < NOWHERE:
            code = _TOKEN_OUT_OF_RANGE
            value = tl.load(tokens_ptr + bad_token)
            if (bad_token == 0) & (value == _TOKEN_FROM_DEVICE):
                code = tl.where(last_token < 0, _NO_LAST_TOKEN, code)
                value = tl.where(last_token < 0, req_index, last_token)
        else:
            pool_writers_ptr = ptrs.last_writers + writers_at
            marks_ptr = ptrs.write_conflicts + (1 + group) * stride_conflicts
            store_page_writers(pool_writers_ptr, marks_ptr, pages, lanes, writes, req_writer, mark)
            if (QUERY_LEN == 0) | (QUERY_LEN > TOKEN_BLOCK):
                for base in range(first_written + TOKEN_BLOCK, written_to, TOKEN_BLOCK):
                    columns = base + lanes
                    writes = columns < written_to
                    pages = pages_at(columns, writes, pages_ptr, first, page_count, table_ptr)
                    index = columns - first_written
                    store_page_writers(pool_writers_ptr, marks_ptr, pages, index, writes, req_writer, mark)
    mark_req_conflict(previous, req_writer, is_writer, ptrs.write_conflicts, mark)
    tl.store(ptrs.check_code + check_at, code)
    tl.store(ptrs.check_value + check_at, tl.where(code == 0, 0, value).to(tl.int64))
    # From now on, pages before the first one that the request reads may be reused.
    tl.store(spans_ptr, tl.where(code == 0, first_seen, 0))
    tl.store(spans_ptr + 1, tl.where(code == 0, span_to, 0))


@triton.jit(do_not_specialize=["padded_reqs", "padded_tokens", "num_req_indices"])
def _write_buffers_kernel(
    ptrs,
    copied_ptrs,
    inputs_words,
    padded_reqs,
    padded_tokens,
    num_req_indices,
    table_width,
    seq_len_fill,
    stride_conflicts,
    stride_check,
    stride_slots,
    stride_tables,
    COPIED_PADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    REQ_FIELDS: tl.constexpr,
    DECODE_LEN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    group = tl.program_id(2)
    num_parts = tl.num_programs(1)
    page_size, _, null_page, max_pages, _, _, _, max_encoder_len = read_group(ptrs.page_groups, group)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    step, num_reqs, num_tokens, allows_empty, listed_reqs, listed_tokens, listed_pages = read_header(
        ptrs.inputs, inputs_words, padded_reqs, padded_tokens, QUERY_LEN, REQ_FIELDS
    )
    # Issue all loads that depend only on the batch position before the first use of a loaded value.
    is_row = row < num_reqs
    rows_ptr = ptrs.inputs + HEADER_SIZE + tl.where(is_row, row, 0)
    tokens_ptr = ptrs.inputs + HEADER_SIZE + REQ_FIELDS * listed_reqs
    named_index = tl.load(rows_ptr + REQ_INDEX * listed_reqs, mask=is_row, other=-1)
    seq_len = tl.load(rows_ptr + REQ_SEQ_LEN * listed_reqs, mask=is_row, other=0)
    sample = tl.load(rows_ptr + REQ_SAMPLE * listed_reqs, mask=is_row, other=0)
    encoder_len = tl.load(rows_ptr + REQ_ENCODER_LEN * listed_reqs, mask=is_row, other=0)
    query_start = tl.load(rows_ptr + REQ_QUERY_START * listed_reqs, mask=is_row, other=0)
    query_len = tl.load(rows_ptr + REQ_QUERY_LEN * listed_reqs, mask=is_row, other=-1)
    copied = ()
    for i in tl.static_range(len(COPIED_PADS)):
        copied += (tl.load(rows_ptr + (REQ_COPIED + i) * listed_reqs, mask=is_row, other=0),)  # type: ignore[assignment]
    first, page_count, pages_ptr = row_pages(
        rows_ptr, tokens_ptr + listed_tokens, ptrs.tables, is_row, named_index,
        tl.where(max_encoder_len > 0, encoder_len, seq_len), group, page_size, max_pages, num_req_indices, table_width,
        listed_reqs, listed_pages,
    )  # fmt: skip
    check_at = group * stride_check + row
    span_from = tl.load(ptrs.new_spans + 4 * check_at)
    span_to = tl.load(ptrs.new_spans + 4 * check_at + 1)
    # Inputs are read at the batch position `row`; results are written to `buffer_row`.
    start, end, slots_end, _ = token_range(
        ptrs.inputs, row, query_start, query_len, num_reqs, num_tokens, listed_reqs, QUERY_LEN, POSITIONS
    )
    kv_len = seq_len + (slots_end - end)
    buffer_row, first_token, decodes = find_buffer_row(
        ptrs.inputs, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN, DECODE_LEN, ROW_BLOCK
    )
    buffer_at = group * stride_check + buffer_row
    held_from = tl.load(ptrs.new_spans + 4 * buffer_at + 2)
    held_to = tl.load(ptrs.new_spans + 4 * buffer_at + 3)
    # A fault in any group makes the request a pad request in all groups.
    code, value, fault_group, page_mark = final_fault(
        ptrs, row, step, stride_check, stride_conflicts, GROUPS, GROUP_BLOCK
    )
    real = is_row & has_request(named_index, allows_empty)
    valid = real & (code == 0)
    req_index = tl.where(valid, named_index, -1)
    page_count = tl.where(valid, page_count, 0)
    state = group * num_req_indices + tl.where(valid, req_index, 0)
    table_ptr = ptrs.page_table + state.to(tl.int64) * table_width
    last_token = tl.load(ptrs.last_token + req_index, mask=valid, other=0)

    # Load the data of the first tokens before the table is copied.
    slots_ptr = ptrs.slot_mapping + group * stride_slots
    valid_end = tl.where(valid, end, start)  # Triton's interpreter miscomputes `scalar & block`
    written_end = tl.where(max_encoder_len > 0, start, valid_end)  # steps do not write the pages of an encoder
    lanes = tl.arange(0, TOKEN_BLOCK)
    first_base = start + part * TOKEN_BLOCK
    position, page, token = token_at(
        first_base + lanes, valid_end, written_end, end, seq_len, page_size, tokens_ptr, pages_ptr, first,
        page_count, table_ptr,
    )  # fmt: skip

    # The request's table of this group. Listed pages are also stored in page_table for later steps. Pages that the
    # request no longer reads become null pages in block_table, because another sequence may own them by now. Columns
    # outside the current and the previous span are null pages already and are not written.
    used_to = tl.where(valid, tl.minimum(span_to, max_pages), 0)
    used_from = tl.where(used_to > 0, span_from, NOWHERE)
    changed_from = tl.minimum(held_from, used_from)
    changed_to = tl.maximum(tl.minimum(held_to, table_width), used_to)
    to_table = ptrs.block_table + group.to(tl.int64) * stride_tables + buffer_row.to(tl.int64) * table_width
    first_change = changed_from + part * TABLE_BLOCK
    for base in tl.range(first_change, changed_to, num_parts * TABLE_BLOCK, loop_unroll_factor=4):
        columns = base + tl.arange(0, TABLE_BLOCK)
        used = (columns >= used_from) & (columns < used_to)
        pages = pages_at(columns, used, pages_ptr, first, page_count, table_ptr)
        tl.store(to_table + columns, tl.where(used, pages, null_page), mask=columns < changed_to)
        tl.store(table_ptr + columns, pages, mask=used & (columns >= first) & (columns < first + page_count))

    if part == 0:
        tl.store(ptrs.page_spans + 2 * state, span_from, mask=valid)
        tl.store(ptrs.page_spans + 2 * state + 1, span_to, mask=valid)
        tl.store(ptrs.table_from + buffer_at, used_from)
        tl.store(ptrs.table_to + buffer_at, used_to)
    if (part == 0) & (group == 0):
        status = tl.where(valid, tl.where(sample != 0, _SAMPLES, _LIVE), tl.where(real, _INVALID, _PAD))
        tl.store(ptrs.seq_lens + buffer_row, tl.where(valid, kv_len, seq_len_fill))
        tl.store(ptrs.req_indices + buffer_row, req_index)
        tl.store(ptrs.req_status + buffer_row, status)
        tl.store(ptrs.last_encoder_len + req_index, encoder_len, mask=valid)
        for i in tl.static_range(len(COPIED_PADS)):
            word = tl.where(valid, copied[i], COPIED_PADS[i])
            tl.store(copied_ptrs[i] + buffer_row, as_declared(word, copied_ptrs[i]))
        # A faulty request that starts a sequence samples nothing, so void the last token of the previous sequence.
        voids = real & (code != 0) & (seq_len == query_len) & (named_index >= 0) & (named_index < num_req_indices)
        tl.store(ptrs.void_req_indices + buffer_row, tl.where(voids, named_index, -1))
        value = fault_value(
            tl.where(real, code, 0), value, fault_group, page_mark, ptrs, rows_ptr, tokens_ptr + listed_tokens,
            listed_reqs, listed_pages, num_req_indices, table_width,
        )  # fmt: skip
        tl.store(ptrs.fault_code + buffer_row, tl.where(real, code | (fault_group << _GROUP_SHIFT), 0))
        tl.store(ptrs.fault_value + buffer_row, tl.where(real, value, 0))
        last_index = first_token + end - start - 1
        drafts = tl.zeros([], tl.int32)
        if POSITIONS > 1:
            # Logits row `position * padded_reqs + buffer_row` is of the request's last token, or of an earlier one if
            # drafts follow it.
            drafts = tl.minimum(tl.maximum(sample - 1, 0), tl.minimum(tl.maximum(query_len, 1), POSITIONS) - 1)
            at = last_index - drafts + tl.minimum(lanes, drafts)
            logits_ptr = ptrs.logits_indices + lanes * padded_reqs + buffer_row
            tl.store(logits_ptr, tl.where(valid, at, 0).to(tl.int64), mask=lanes < POSITIONS)
        else:
            tl.store(ptrs.logits_indices + buffer_row, tl.where(valid, last_index, 0).to(tl.int64))
        tl.store(ptrs.sample_lens + buffer_row, tl.where(valid, seq_len - drafts, 0))
        tl.store(ptrs.drafts_left + buffer_row, tl.where(valid & (sample != 0), drafts, -1))
        # For decode attention, prefill requests have no tokens, and vice versa. With DECODE_LEN 0, all are prefill.
        prompts_from = decodes * DECODE_LEN
        is_decode = buffer_row < decodes
        tl.store(ptrs.buffer_rows + row, buffer_row)
        tl.store(ptrs.decode_seq_lens + buffer_row, tl.where(valid & is_decode, kv_len, seq_len_fill))
        tl.store(ptrs.prompt_seq_lens + buffer_row, tl.where(valid & (is_decode == 0), kv_len, seq_len_fill))
        tl.store(ptrs.query_start_loc + buffer_row, first_token)
        tl.store(ptrs.decode_start_loc + buffer_row, tl.minimum(first_token, prompts_from))
        tl.store(ptrs.prompt_start_loc + buffer_row, tl.maximum(first_token, prompts_from))
        if row == padded_reqs - 1:
            last_end = token_start(ptrs.inputs, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
            tl.store(ptrs.query_start_loc + padded_reqs, last_end)
            tl.store(ptrs.decode_start_loc + padded_reqs, prompts_from)
            tl.store(ptrs.prompt_start_loc + padded_reqs, last_end)
        if row == 0:
            tl.store(ptrs.step_counter, step)

    # The request's tokens, split over its programs of this group. Slots differ by group; group 0 writes the rest.
    for base in range(start + part * TOKEN_BLOCK, slots_end, num_parts * TOKEN_BLOCK):
        at = base + lanes
        if base != first_base:
            position, page, token = token_at(
                at, valid_end, written_end, end, seq_len, page_size, tokens_ptr, pages_ptr, first, page_count,
                table_ptr,
            )  # fmt: skip
        writes = at < written_end
        place = position
        if POSITIONS > 1:
            # Missing drafts are written too, as attention may read them with weight 0, and 0 x NaN is NaN.
            place = seq_len - end + at
            writes = (at < tl.where(written_end > start, slots_end, start)) & (place < used_to * page_size)
            page = pages_at(place // page_size, writes, pages_ptr, first, page_count, table_ptr).to(tl.int64)
        slot = tl.where(writes, page * page_size + place % page_size, _PAD_SLOT)
        to = first_token - start + at
        written = (
            (at < slots_end) & (to >= 0) & (to < padded_tokens)
        )  # in corrupt inputs the lengths may sum to more tokens
        tl.store(slots_ptr + to, slot, mask=written)
        if group == 0:
            token = tl.where((at < valid_end) & (token == _TOKEN_FROM_DEVICE), last_token, token)
            tl.store(ptrs.input_ids + to, token.to(tl.int64), mask=written)
            tl.store(ptrs.positions + to, position.to(tl.int64), mask=written)

    # Pad tokens, split over all programs of this group.
    pads_from = token_start(ptrs.inputs, num_reqs, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    program = row * num_parts + part
    for base in range(pads_from + program * TOKEN_BLOCK, padded_tokens, tl.num_programs(0) * num_parts * TOKEN_BLOCK):
        at = base + lanes
        mask = at < padded_tokens
        zeros = tl.zeros([TOKEN_BLOCK], tl.int64)
        tl.store(slots_ptr + at, zeros + _PAD_SLOT, mask=mask)
        if group == 0:
            tl.store(ptrs.input_ids + at, zeros, mask=mask)
            tl.store(ptrs.positions + at, zeros, mask=mask)


_check_rows, _write_buffers = KernelLauncher(_check_rows_kernel), KernelLauncher(_write_buffers_kernel)


def _refresh_triton(b: Any) -> None:
    groups, padded_reqs, width = b.block_table.shape
    padded_tokens, req_indices = b.input_ids.shape[0], b.last_token.shape[0]
    positions = b.logits_indices.shape[0] // padded_reqs
    num_warps, check, write = _constexprs(
        padded_reqs, groups, b.query_len, padded_tokens, width, b.decode_len, positions
    )
    early = overlaps(b.inputs.device)
    options = {"num_warps": num_warps, "OVERLAPS": early, "launch_pdl": early}
    _check_rows(
        (padded_reqs, groups),
        pointers(_Checked, b), b.inputs.shape[0], padded_reqs, padded_tokens, req_indices,
        b.last_writers.shape[0] - req_indices, b.max_seq_len, b.vocab_size, width, b.write_conflicts.stride(0),
        b.check_code.stride(0), **check, **options,
    )  # fmt: skip
    parts = min(-(-width // write["TABLE_BLOCK"]), max(_MAX_PROGRAMS // (padded_reqs * groups), 1))
    _write_buffers(
        (padded_reqs, parts, groups),
        pointers(_Written, b), tuple(getattr(b, name) for name in COPIED), b.inputs.shape[0], padded_reqs,
        padded_tokens, req_indices, width, b.seq_len_fill, b.write_conflicts.stride(0), b.check_code.stride(0),
        b.slot_mapping.stride(0), b.block_table.stride(0), **write, **options,
    )  # fmt: skip


def _constexprs(
    reqs: int, groups: int, query_len: int, padded_tokens: int, width: int, decode_len: int, positions: int
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the number of warps, and the constexprs of both kernels."""
    num_warps, lanes = (4, _WIDE_BLOCK) if reqs * groups <= _FEW_PROGRAMS else (1, _NARROW_BLOCK)
    columns, tokens = next_power_of_two(width), next_power_of_two(max(query_len or padded_tokens, positions))
    both = {
        "QUERY_LEN": query_len, "REQ_FIELDS": layout.req_fields(groups), "GROUPS": groups,
        "GROUP_BLOCK": next_power_of_two(groups), "TOKEN_BLOCK": min(tokens, lanes), "POSITIONS": positions,
    }  # fmt: skip
    check = {**both, "PAGE_BLOCK": min(columns, 2 * lanes)}
    write = {**both, "COPIED_PADS": COPIED_PAD_WORDS, "DECODE_LEN": decode_len, "ROW_BLOCK": _ROW_BLOCK}
    return num_warps, check, {**write, "TABLE_BLOCK": min(columns, lanes)}


_Call = call_class(
    "refresh",
    (),
    tables=torch.Tensor | None,
    **dict.fromkeys(("max_seq_len", "vocab_size", "query_len", "decode_len", "seq_len_fill"), int),
)
_op = DeclaredOp("refresh", _Call, triton_impl=_refresh_triton, reference=refresh_reference)


def refresh(
    buffers: StaticBuffers,
    *,
    max_seq_len: int,
    vocab_size: int,
    query_len: int,
    seq_len_fill: int,
    decode_len: int = 0,
    tables: torch.Tensor | None = None,
) -> None:
    """Rewrite every derived buffer from the step inputs, for all padded requests and tokens.

    buffers       static buffers, cut to the captured size; docs/decode_step.md describes them
    max_seq_len   longest sequence; a longer request is a BAD_LENGTH fault
    vocab_size    token ids outside 0 .. vocab_size - 1 are a TOKEN_OUT_OF_RANGE fault
    query_len     new tokens per request of a decode graph; 0 in a mixed graph
    seq_len_fill  `seq_lens` value of pad and invalid requests that the attention backend requires
    decode_len    for a mixed graph with separate decode attention: requests with `decode_len` new tokens come first in
                  the buffers, then all others; both keep their batch order. 0: the buffers have the batch order
    tables        [groups, req_indices, pages_per_req]  int32  device; page tables that the caller owns. They are read
                  as if each request listed all its pages, and the lists in the inputs are ignored. None: use the lists

    A faulty request is treated as a pad request with status INVALID. This includes every request that shares its
    request index or a written page with another request. Its page table does not change. Requests and tokens beyond the
    captured size are ignored. Step numbers must increase; running the same inputs again changes nothing.

    In a graph for drafts, `logits_indices` has several rows per request. Requests may then have fewer tokens than
    `query_len`, or in a mixed graph than places in the inputs. Padding follows them in the buffers, and `seq_lens`
    counts it.

    Capture-safe: the grid depends on the captured size; the kernels read all varying values on the device.
    Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match, or if `decode_len` is set in a decode
    graph.
    """
    reqs, tokens = captured_size(buffers)
    if query_len and tokens != reqs * query_len:
        raise ShapeError(f"input_ids: expected {reqs} requests x query_len {query_len} tokens, got {tokens}; slice it")
    check_int("decode_len", decode_len, 0, MAX_TOKENS, advice="pass 0 to keep the batch order", error=ShapeError)
    if query_len and decode_len:
        raise ShapeError(
            f"decode_len: expected 0 in a decode graph, got {decode_len}; only mixed graphs reorder requests"
        )
    if tables is not None:
        check_tables("tables", tables, buffers)
    if query_len:
        check_tensor("logits_indices", buffers.logits_indices, shape=(reqs * query_len,))
    operands = buffers.once(refresh_operands)
    _op(_Call(*operands, tables, max_seq_len, vocab_size, query_len, decode_len, seq_len_fill))


def compile_variants() -> list[CompileSpec]:
    """Return the variants of both kernels for decode graphs (1 and 4 tokens per request) and mixed graphs, without and
    with drafts."""
    copied = pointer_types(namedtuple("copied", COPIED))
    specs = []
    for name, groups, rows, query_len, padded_tokens, max_pages, decode_len, positions, tables in (
        ("decode_1", 1, 256, 1, 256, 8192, 0, 1, "constexpr"),
        ("decode_1_tables", 1, 256, 1, 256, 8192, 0, 1, "*i32"),
        ("decode_4", 6, 256, 4, 1024, 512, 0, 4, "constexpr"),
        ("mixed", 1, 256, 0, 16384, 4096, 0, 1, "constexpr"),
        ("mixed_parts", 6, 256, 0, 16384, 4096, 1, 1, "constexpr"),
        ("mixed_drafts", 6, 256, 0, 16384, 4096, 1, 4, "constexpr"),
        ("mixed_tables", 6, 256, 0, 16384, 4096, 0, 1, "*i32"),
    ):
        num_warps, check, write = _constexprs(rows, groups, query_len, padded_tokens, max_pages, decode_len, positions)
        for part, kernel, record, constexprs in (
            ("check_rows", _check_rows_kernel, _Checked, check),
            ("write_buffers", _write_buffers_kernel, _Written, write),
        ):
            types = {"ptrs": pointer_types(record, tables=tables), "copied_ptrs": copied}
            specs.append(
                CompileSpec(
                    f"{part}_{name}", kernel, types, constexprs | {"OVERLAPS": True}, num_warps, 3,
                    divisible=("ptrs",), max_spill=_MAX_SPILL, ptx=("griddepcontrol.wait",),
                )
            )  # fmt: skip
    return specs
