"""Behind `unpack` in every graph: turn the step record and the persistent row state into every derived buffer.

Two kernels, a program per captured row and KV group:

    check   each row by itself, and its pages in each group. A row claims its row id and the pages that it writes. A
            claim that finds another one of the same step marks both rows as duplicates.
    write   every derived buffer in full, pads included, the page tables of the rows, and the final fault of each row.
            Each row goes to its place: in a mixed step of two parts decode rows stand first.

Claims and marks carry the step number, so nothing has to be reset between steps. Running one record again finds only
its own claims, and no duplicates.

The record may list all pages of a row, only those that are new, or none: `page_table` keeps each row's pages by row id,
and `page_spans` says which columns of it belong to the row's sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_int
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import KernelLauncher, overlaps
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import MAX_TOKENS, check_query_len, check_tables, refresh_operands
from graphrt.kernels.metadata.buffers import COPIED, COPIED_PAD_WORDS, StaticBuffers, call_class
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
    has_sequence,
    read_header,
    row_place,
    token_start,
)
from graphrt.kernels.metadata.read_pages import first_seen_page, lists_anew, pages_at, read_group, row_pages, token_at
from graphrt.kernels.metadata.reference import refresh_reference
from graphrt.kernels.metadata.write_conflicts import claim_pages, mark_req_indices
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import next_power_of_two
from graphrt.kernels.types import FAULT_GROUP_SHIFT, NO_TOKEN, PAD_SLOT_ID, TOKEN_FROM_DEVICE, FaultCode, RequestStatus

_FEW = 128  # programs, up to which each has a multiprocessor to itself, and 4 warps
_LANES_OF_FEW = 1024  # columns or tokens that such a program takes at a time
_LANES = 64  # and a program of one warp: 2,048 of these run at once on an H200
_ROW_BLOCK = 128  # rows that a program counts at a time, to find its own row's place
_SPILL = 8  # bytes: a pointer, in graphs of prompts with several KV groups
_PROGRAMS = 1024  # of a launch, beyond which a row's columns and tokens are not shared out among several

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


@triton.jit(do_not_specialize=["padded_reqs", "padded_tokens", "num_req_indices"])
def _check_rows_kernel(
    page_groups_ptr,
    inputs_ptr,
    last_token_ptr,
    last_encoder_len_ptr,
    claims_ptr,
    duplicates_ptr,
    tables_ptr,
    page_table_ptr,
    page_spans_ptr,
    table_from_ptr,
    table_to_ptr,
    new_spans_ptr,
    check_code_ptr,
    check_value_ptr,
    inputs_words,
    padded_reqs,
    padded_tokens,
    num_req_indices,
    first_row_claim,
    max_seq_len,
    vocab_size,
    table_width,
    stride_duplicates,
    stride_check,
    QUERY_LEN: tl.constexpr,
    REQ_FIELDS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    group = tl.program_id(1)
    page_size, num_pages, null_page, max_pages, window, chunk, claims_at, max_encoder_len = read_group(
        page_groups_ptr, group
    )
    if OVERLAPS:  # the second kernel may start now: it waits for this one, as this one does for `unpack`
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step, num_reqs, num_tokens, kept, listed_reqs, listed_tokens, listed_pages = read_header(
        inputs_ptr, inputs_words, padded_reqs, padded_tokens, QUERY_LEN, REQ_FIELDS
    )
    check_at = group * stride_check + row
    spans_ptr = new_spans_ptr + 4 * check_at
    # A store waits for what it stores, and holds up what stands behind it: loads come first, all fields of the row.
    held_from = tl.load(table_from_ptr + check_at)
    held_to = tl.load(table_to_ptr + check_at)
    is_row = row < num_reqs
    rows_ptr = inputs_ptr + HEADER_SIZE + row
    req_index = tl.load(rows_ptr + REQ_INDEX * listed_reqs, mask=is_row, other=-1)
    seq_len = tl.load(rows_ptr + REQ_SEQ_LEN * listed_reqs, mask=is_row, other=0)
    query_start = tl.load(rows_ptr + REQ_QUERY_START * listed_reqs, mask=is_row, other=0)
    query_len = tl.load(rows_ptr + REQ_QUERY_LEN * listed_reqs, mask=is_row, other=0)
    encoder_len = tl.load(rows_ptr + REQ_ENCODER_LEN * listed_reqs, mask=is_row, other=0)
    is_cross = max_encoder_len > 0
    listed_pages_ptr = inputs_ptr + HEADER_SIZE + REQ_FIELDS * listed_reqs + listed_tokens
    first, page_count, pages_ptr = row_pages(
        rows_ptr, listed_pages_ptr, tables_ptr, is_row, req_index, tl.where(is_cross, encoder_len, seq_len), group,
        page_size, max_pages, num_req_indices, table_width, listed_reqs, listed_pages,
    )  # fmt: skip
    anew = (first == 0) & (page_count > 0) & (is_cross == 0)
    if tables_ptr is not None:
        anew = is_row
    elif GROUPS > 1:
        anew = lists_anew(rows_ptr, is_row, page_groups_ptr, listed_reqs, listed_pages, GROUPS, GROUP_BLOCK) != 0
    # What stands in the row's table is noted here, since the second kernel's programs change it side by side.
    tl.store(spans_ptr + 2, held_from)
    tl.store(spans_ptr + 3, held_to)
    if (is_row & has_sequence(req_index, kept)) == 0:
        tl.store(check_code_ptr + check_at, 0)
        tl.store(check_value_ptr + check_at, tl.zeros([], tl.int64))
        tl.store(spans_ptr, 0)
        tl.store(spans_ptr + 1, 0)
        return
    tokens_ptr = inputs_ptr + HEADER_SIZE + REQ_FIELDS * listed_reqs + query_start

    # Later checks read through what earlier ones vouch for, so each looks only where nothing was wrong so far.
    id_ok = (req_index >= 0) & (req_index < num_req_indices)
    start = token_start(inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    end = token_start(inputs_ptr, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    in_place = (query_start == start) & (query_len == end - start) & (end <= num_tokens)
    length_ok = in_place & (query_len >= 1) & (query_len <= seq_len) & (seq_len <= max_seq_len)
    # The tokens whose pages the row needs: its own, or those that its encoder wrote.
    encoder_ok = (encoder_len >= tl.where(page_count > 0, 1, 0)) & (encoder_len <= max_encoder_len)
    encoder_ok = (is_cross == 0) | encoder_ok
    held = tl.where(is_cross, encoder_len, seq_len)

    # Which columns of the row's table will be known: those of a whole list, or those that were known and the new ones.
    # A sequence that begins with this step has none, nor has one that lists its own tokens' pages from page 0 on: what
    # stands there is another's.
    state = group * num_req_indices + tl.where(id_ok, req_index, 0)
    has_past = id_ok & length_ok & (seq_len > query_len)
    goes_on = has_past & (anew == 0)
    tag = step % 0xFFFFFFFF + 1  # never 0, which is what stands where nobody has claimed anything yet
    row_claim = (tag << 32) | (row.to(tl.int64) << 16)
    mark = ((step + 1) << 16) | 0xFFFF
    # Whatever else is wrong with the row: the state behind a row id is one row's in a step.
    claims_id = id_ok & (group == 0)
    other_row = tl.atomic_xchg(claims_ptr + first_row_claim + req_index, row_claim, mask=claims_id, sem="relaxed")
    # Tokens belong to the row, not to a group: the programs of the first group look at them.
    last_token = tl.load(last_token_ptr + req_index, mask=has_past, other=_NO_TOKEN)
    checked_tokens = tl.where(length_ok & (group == 0), query_len, 0)
    last_encoder_len = tl.load(last_encoder_len_ptr + req_index, mask=goes_on, other=0)
    keeps_len = (goes_on == 0) | ((first == 0) & (page_count > 0)) | (encoder_len == last_encoder_len)
    keeps_len = (is_cross == 0) | keeps_len
    known_from = tl.load(page_spans_ptr + 2 * state, mask=goes_on, other=0)
    known_to = tl.load(page_spans_ptr + 2 * state + 1, mask=goes_on, other=0)
    first_seen = first_seen_page(tl.where(length_ok, seq_len - query_len, 0), page_size, window, chunk)
    # The list lies within the record whatever it says, so its pages are read while the loads above are under way.
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
    code = tl.where(id_ok, code, _REQ_INDEX_OUT_OF_RANGE)
    value = tl.where(id_ok, tl.where(length_ok, held, seq_len), req_index)

    # The pages that the row writes, in blocks of a token each at least; of one block nothing has to wait for the code.
    first_written = tl.where(length_ok, (seq_len - query_len) // page_size, 0)
    written_to = tl.where(id_ok & (is_cross == 0), needed, 0)
    table_ptr = page_table_ptr + state.to(tl.int64) * table_width
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
            pool_ptr = claims_ptr + claims_at
            marks_ptr = duplicates_ptr + (1 + group) * stride_duplicates
            claim_pages(pool_ptr, marks_ptr, pages, lanes, writes, row_claim, mark)
            if (QUERY_LEN == 0) | (QUERY_LEN > TOKEN_BLOCK):
                for base in range(first_written + TOKEN_BLOCK, written_to, TOKEN_BLOCK):
                    columns = base + lanes
                    writes = columns < written_to
                    pages = pages_at(columns, writes, pages_ptr, first, page_count, table_ptr)
                    claim_pages(pool_ptr, marks_ptr, pages, columns - first_written, writes, row_claim, mark)
    mark_req_indices(other_row, row_claim, claims_id, duplicates_ptr, mark)
    tl.store(check_code_ptr + check_at, code)
    tl.store(check_value_ptr + check_at, tl.where(code == 0, 0, value).to(tl.int64))
    # Pages before the first that the row sees may be another's from now on.
    tl.store(spans_ptr, tl.where(code == 0, first_seen, 0))
    tl.store(spans_ptr + 1, tl.where(code == 0, span_to, 0))


@triton.jit(do_not_specialize=["padded_reqs", "padded_tokens", "num_req_indices"])
def _write_buffers_kernel(
    page_groups_ptr,
    inputs_ptr,
    last_token_ptr,
    last_encoder_len_ptr,
    duplicates_ptr,
    tables_ptr,
    page_table_ptr,
    page_spans_ptr,
    table_from_ptr,
    table_to_ptr,
    new_spans_ptr,
    check_code_ptr,
    check_value_ptr,
    fault_code_ptr,
    fault_value_ptr,
    step_counter_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    places_ptr,
    decode_seq_lens_ptr,
    prompt_seq_lens_ptr,
    decode_start_loc_ptr,
    prompt_start_loc_ptr,
    logits_indices_ptr,
    req_indices_ptr,
    req_status_ptr,
    void_ids_ptr,
    copied_ptrs,
    inputs_words,
    padded_reqs,
    padded_tokens,
    num_req_indices,
    table_width,
    seq_len_fill,
    stride_duplicates,
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
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    group = tl.program_id(2)
    num_parts = tl.num_programs(1)
    page_size, _, null_page, max_pages, _, _, _, max_encoder_len = read_group(page_groups_ptr, group)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    step, num_reqs, num_tokens, kept, listed_reqs, listed_tokens, listed_pages = read_header(
        inputs_ptr, inputs_words, padded_reqs, padded_tokens, QUERY_LEN, REQ_FIELDS
    )
    # All that is known by the row's place is under way before the first word is waited for.
    is_row = row < num_reqs
    rows_ptr = inputs_ptr + HEADER_SIZE + tl.where(is_row, row, 0)
    tokens_ptr = inputs_ptr + HEADER_SIZE + REQ_FIELDS * listed_reqs
    named_id = tl.load(rows_ptr + REQ_INDEX * listed_reqs, mask=is_row, other=-1)
    seq_len = tl.load(rows_ptr + REQ_SEQ_LEN * listed_reqs, mask=is_row, other=0)
    sample = tl.load(rows_ptr + REQ_SAMPLE * listed_reqs, mask=is_row, other=0)
    encoder_len = tl.load(rows_ptr + REQ_ENCODER_LEN * listed_reqs, mask=is_row, other=0)
    query_len = tl.load(rows_ptr + REQ_QUERY_LEN * listed_reqs, mask=is_row, other=-1)
    copied = ()
    for i in tl.static_range(len(COPIED_PADS)):
        copied += (tl.load(rows_ptr + (REQ_COPIED + i) * listed_reqs, mask=is_row, other=0),)  # type: ignore[assignment]
    first, page_count, pages_ptr = row_pages(
        rows_ptr, tokens_ptr + listed_tokens, tables_ptr, is_row, named_id,
        tl.where(max_encoder_len > 0, encoder_len, seq_len), group, page_size, max_pages, num_req_indices, table_width,
        listed_reqs, listed_pages,
    )  # fmt: skip
    check_at = group * stride_check + row
    span_from = tl.load(new_spans_ptr + 4 * check_at)
    span_to = tl.load(new_spans_ptr + 4 * check_at + 1)
    # The row is read at its place in the record, and written at its place in the step.
    start = token_start(inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    end = token_start(inputs_ptr, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    place, first_token, decodes = row_place(
        inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN, DECODE_LEN, ROW_BLOCK
    )
    place_at = group * stride_check + place
    held_from = tl.load(new_spans_ptr + 4 * place_at + 2)
    held_to = tl.load(new_spans_ptr + 4 * place_at + 3)
    # Whether the row runs: a fault in any group makes it a pad row in all of them.
    code, value, fault_group, page_mark = final_fault(
        check_code_ptr, check_value_ptr, duplicates_ptr, row, step, stride_check, stride_duplicates, GROUPS, GROUP_BLOCK
    )
    real = is_row & has_sequence(named_id, kept)
    valid = real & (code == 0)
    req_index = tl.where(valid, named_id, -1)
    page_count = tl.where(valid, page_count, 0)
    state = group * num_req_indices + tl.where(valid, req_index, 0)
    table_ptr = page_table_ptr + state.to(tl.int64) * table_width
    last_token = tl.load(last_token_ptr + req_index, mask=valid, other=0)

    # What the first of its tokens need is under way while the table is copied.
    slots_ptr = slot_mapping_ptr + group * stride_slots
    valid_end = tl.where(valid, end, start)  # a scalar condition joined to a block of them misleads the interpreter
    written_end = tl.where(max_encoder_len > 0, start, valid_end)  # what an encoder wrote stays
    lanes = tl.arange(0, TOKEN_BLOCK)
    first_base = start + part * TOKEN_BLOCK
    position, page, token = token_at(
        first_base + lanes, valid_end, written_end, end, seq_len, page_size, tokens_ptr, pages_ptr, first,
        page_count, table_ptr,
    )  # fmt: skip

    # The row's table of this group: what the record lists is kept for later steps, and pages that the row cannot see
    # any more are null pages in the step's own table, whoever owns them by now.
    # Columns that hold null pages already, beyond what the row uses and what the table held before, are left alone.
    used_to = tl.where(valid, tl.minimum(span_to, max_pages), 0)
    used_from = tl.where(used_to > 0, span_from, NOWHERE)
    changed_from = tl.minimum(held_from, used_from)
    changed_to = tl.maximum(tl.minimum(held_to, table_width), used_to)
    to_table = block_table_ptr + group.to(tl.int64) * stride_tables + place.to(tl.int64) * table_width
    first_change = changed_from + part * TABLE_BLOCK
    for base in tl.range(first_change, changed_to, num_parts * TABLE_BLOCK, loop_unroll_factor=4):
        columns = base + tl.arange(0, TABLE_BLOCK)
        used = (columns >= used_from) & (columns < used_to)
        pages = pages_at(columns, used, pages_ptr, first, page_count, table_ptr)
        tl.store(to_table + columns, tl.where(used, pages, null_page), mask=columns < changed_to)
        tl.store(table_ptr + columns, pages, mask=used & (columns >= first) & (columns < first + page_count))

    if part == 0:
        tl.store(page_spans_ptr + 2 * state, span_from, mask=valid)
        tl.store(page_spans_ptr + 2 * state + 1, span_to, mask=valid)
        tl.store(table_from_ptr + place_at, used_from)
        tl.store(table_to_ptr + place_at, used_to)
    if (part == 0) & (group == 0):
        status = tl.where(valid, tl.where(sample != 0, _SAMPLES, _LIVE), tl.where(real, _INVALID, _PAD))
        tl.store(seq_lens_ptr + place, tl.where(valid, seq_len, seq_len_fill))
        tl.store(req_indices_ptr + place, req_index)
        tl.store(req_status_ptr + place, status)
        tl.store(last_encoder_len_ptr + req_index, encoder_len, mask=valid)
        for i in tl.static_range(len(COPIED_PADS)):
            word = tl.where(valid, copied[i], COPIED_PADS[i])
            tl.store(copied_ptrs[i] + place, as_declared(word, copied_ptrs[i]))
        # A sequence that begins with a fault leaves no token, so what its row id holds, another's, is void.
        void = real & (code != 0) & (seq_len == query_len) & (named_id >= 0) & (named_id < num_req_indices)
        tl.store(void_ids_ptr + place, tl.where(void, named_id, -1))
        value = fault_value(
            tl.where(real, code, 0), value, fault_group, page_mark, page_groups_ptr, rows_ptr,
            tokens_ptr + listed_tokens, tables_ptr, listed_reqs, listed_pages, page_table_ptr, num_req_indices,
            table_width,
        )  # fmt: skip
        tl.store(fault_code_ptr + place, tl.where(real, code | (fault_group << _GROUP_SHIFT), 0))
        tl.store(fault_value_ptr + place, tl.where(real, value, 0))
        tl.store(logits_indices_ptr + place, tl.where(valid, first_token + end - start - 1, 0).to(tl.int64))
        # Each part of a mixed step sees the other's rows as rows without tokens. Without parts all are prompts.
        prompts_from = decodes * DECODE_LEN
        decodes_here = place < decodes
        tl.store(places_ptr + row, place)
        tl.store(decode_seq_lens_ptr + place, tl.where(valid & decodes_here, seq_len, seq_len_fill))
        tl.store(prompt_seq_lens_ptr + place, tl.where(valid & (decodes_here == 0), seq_len, seq_len_fill))
        tl.store(query_start_loc_ptr + place, first_token)
        tl.store(decode_start_loc_ptr + place, tl.minimum(first_token, prompts_from))
        tl.store(prompt_start_loc_ptr + place, tl.maximum(first_token, prompts_from))
        if row == padded_reqs - 1:
            tl.store(query_start_loc_ptr + padded_reqs, end)
            tl.store(decode_start_loc_ptr + padded_reqs, prompts_from)
            tl.store(prompt_start_loc_ptr + padded_reqs, end)
        if row == 0:
            tl.store(step_counter_ptr, step)

    # The row's tokens, shared out among its programs of this group. Slots are the group's; the rest is the first's.
    for base in range(start + part * TOKEN_BLOCK, end, num_parts * TOKEN_BLOCK):
        at = base + lanes
        if base != first_base:
            position, page, token = token_at(
                at, valid_end, written_end, end, seq_len, page_size, tokens_ptr, pages_ptr, first, page_count,
                table_ptr,
            )  # fmt: skip
        writes = at < written_end
        slot = tl.where(writes, page * page_size + position % page_size, _PAD_SLOT)
        to = first_token - start + at
        written = (at < end) & (to >= 0) & (to < padded_tokens)  # of a corrupt record the sum of lengths may be larger
        tl.store(slots_ptr + to, slot, mask=written)
        if group == 0:
            token = tl.where((at < valid_end) & (token == _TOKEN_FROM_DEVICE), last_token, token)
            tl.store(input_ids_ptr + to, token.to(tl.int64), mask=written)
            tl.store(positions_ptr + to, position.to(tl.int64), mask=written)

    # Pad tokens, shared out among all programs of this group.
    pads_from = token_start(inputs_ptr, num_reqs, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    program = row * num_parts + part
    for base in range(pads_from + program * TOKEN_BLOCK, padded_tokens, tl.num_programs(0) * num_parts * TOKEN_BLOCK):
        at = base + lanes
        mask = at < padded_tokens
        zeros = tl.zeros([TOKEN_BLOCK], tl.int64)
        tl.store(slots_ptr + at, zeros + _PAD_SLOT, mask=mask)
        if group == 0:
            tl.store(input_ids_ptr + at, zeros, mask=mask)
            tl.store(positions_ptr + at, zeros, mask=mask)


_check_rows, _write_buffers = KernelLauncher(_check_rows_kernel), KernelLauncher(_write_buffers_kernel)


def _refresh_triton(b: Any) -> None:
    groups, padded_reqs, width = b.block_table.shape
    padded_tokens, req_indices = b.input_ids.shape[0], b.last_token.shape[0]
    tiling = _Tiling.choose(padded_reqs * groups, b.query_len, padded_tokens, width)
    req_fields, early = layout.req_fields(groups), overlaps(b.inputs.device)
    _check_rows(
        (padded_reqs, groups),
        b.page_groups, b.inputs, b.last_token, b.last_encoder_len, b.claims, b.duplicates, b.tables, b.page_table,
        b.page_spans, b.table_from, b.table_to, b.new_spans, b.check_code, b.check_value,
        b.inputs.shape[0], padded_reqs, padded_tokens, req_indices, b.claims.shape[0] - req_indices, b.max_seq_len,
        b.vocab_size, width, b.duplicates.stride(0), b.check_code.stride(0),
        QUERY_LEN=b.query_len, REQ_FIELDS=req_fields, GROUPS=groups, GROUP_BLOCK=next_power_of_two(groups),
        TOKEN_BLOCK=tiling.token_block, PAGE_BLOCK=tiling.page_block, num_warps=tiling.num_warps, OVERLAPS=early,
        launch_pdl=early,
    )  # fmt: skip
    parts = min(-(-width // tiling.table_block), max(_PROGRAMS // (padded_reqs * groups), 1))
    _write_buffers(
        (padded_reqs, parts, groups),
        b.page_groups, b.inputs, b.last_token, b.last_encoder_len, b.duplicates, b.tables, b.page_table,
        b.page_spans, b.table_from, b.table_to, b.new_spans, b.check_code, b.check_value, b.fault_code, b.fault_value,
        b.step_counter, b.input_ids, b.positions, b.slot_mapping,
        b.query_start_loc, b.seq_lens, b.block_table, b.places, b.decode_seq_lens, b.prompt_seq_lens,
        b.decode_start_loc, b.prompt_start_loc, b.logits_indices, b.req_indices, b.req_status, b.void_ids,
        tuple(getattr(b, name) for name in COPIED),
        b.inputs.shape[0], padded_reqs, padded_tokens, req_indices, width, b.seq_len_fill, b.duplicates.stride(0),
        b.check_code.stride(0), b.slot_mapping.stride(0), b.block_table.stride(0), COPIED_PADS=COPIED_PAD_WORDS,
        QUERY_LEN=b.query_len, REQ_FIELDS=req_fields, DECODE_LEN=b.decode_len, GROUPS=groups,
        GROUP_BLOCK=next_power_of_two(groups), ROW_BLOCK=_ROW_BLOCK,
        TOKEN_BLOCK=tiling.token_block, TABLE_BLOCK=tiling.table_block, num_warps=tiling.num_warps, OVERLAPS=early,
        launch_pdl=early,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Warps of a program, and the tokens, listed pages and columns of a table that it takes at a time."""

    num_warps: int
    token_block: int
    page_block: int
    table_block: int

    @classmethod
    def choose(cls, programs: int, query_len: int, padded_tokens: int, width: int) -> _Tiling:
        num_warps, lanes = (4, _LANES_OF_FEW) if programs <= _FEW else (1, _LANES)
        columns, tokens = next_power_of_two(width), next_power_of_two(query_len or padded_tokens)
        return cls(num_warps, min(tokens, lanes), min(columns, 2 * lanes), min(columns, lanes))


_Call = call_class(
    "refresh",
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
    """Rewrite every derived buffer from the step record, for every captured row and token, pads included.

    buffers       static buffers, cut to the captured size; what each holds is in docs/decode_step.md
    query_len     new tokens per row of a decode graph; 0 in a mixed graph
    seq_len_fill  length that pad and invalid rows get: what the attention backend can bear
    decode_len    of a mixed graph with a decode part: rows of so many new tokens stand first in the buffers, all others
                  behind them, both in the order of the record. 0: rows stand as the record has them
    tables        [groups, req_indices, pages_per_row]  int32  device: each row id's pages, which the caller keeps; read
                  as if each row listed all its pages there, and what the record lists is not read. None: the record has
                  the lists

    A row with a fault is treated as a pad row, with status INVALID; so is every row that shares its row id or a
    written page with another. The pages of such a row's table stay what they were. Rows and tokens of the record beyond
    the captured size count as absent. Step numbers must grow from one record to the next; running the same record again
    changes nothing.

    Capture-safe: the grid follows from the captured size, and whatever varies is read from the record on the device.
    Raises: ShapeError when a tensor does not fit the others.
    """
    check_query_len(buffers, query_len)
    check_int("decode_len", decode_len, 0, MAX_TOKENS, advice="0 without a decode part", error=ShapeError)
    if query_len and decode_len:
        raise ShapeError(f"decode_len: expected 0 in a decode graph, got {decode_len}; rows stand in their order there")
    if tables is not None:
        check_tables("tables", tables, buffers)
    operands = buffers.once(refresh_operands)
    _op(_Call(*operands, tables, max_seq_len, vocab_size, query_len, decode_len, seq_len_fill))


def compile_variants() -> list[CompileSpec]:
    """Both kernels as decode graphs (1 and 4 tokens per row) and mixed graphs use them."""
    names = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32"}
    types: dict[str, Any] = {f"{name}_ptr": names[spec.dtype] for name, spec in StaticBuffers.specs().items()}
    types["tables_ptr"] = "*i32"
    types["copied_ptrs"] = tuple(types[f"{name}_ptr"] for name in COPIED)
    specs = []
    for name, groups, rows, query_len, padded_tokens, max_pages, decode_len, tables in (
        ("decode_1", 1, 256, 1, 256, 8192, 0, False),
        ("decode_1_tables", 1, 256, 1, 256, 8192, 0, True),
        ("decode_4", 6, 256, 4, 1024, 512, 0, False),
        ("mixed", 1, 256, 0, 16384, 4096, 0, False),
        ("mixed_parts", 6, 256, 0, 16384, 4096, 1, False),
        ("mixed_tables", 6, 256, 0, 16384, 4096, 0, True),
    ):
        tiling = _Tiling.choose(rows * groups, query_len, padded_tokens, max_pages)
        common: dict[str, object] = {
            "QUERY_LEN": query_len,
            "REQ_FIELDS": layout.req_fields(groups),
            "TOKEN_BLOCK": tiling.token_block,
            "OVERLAPS": True,
        }
        common |= {"GROUPS": groups, "GROUP_BLOCK": next_power_of_two(groups)}
        if not tables:
            common["tables_ptr"] = None
        written = {"TABLE_BLOCK": tiling.table_block, "COPIED_PADS": COPIED_PAD_WORDS}
        written |= {"DECODE_LEN": decode_len, "ROW_BLOCK": _ROW_BLOCK}
        for short, kernel, extra in (
            ("check_rows", _check_rows_kernel, {"PAGE_BLOCK": tiling.page_block}),
            ("write_buffers", _write_buffers_kernel, written),
        ):
            constexprs: dict[str, object] = {**common, **extra}
            signature = {
                argument: "constexpr" if argument in constexprs else types.get(argument, "i32")
                for argument in kernel.arg_names
            }
            pointers = tuple(argument for argument in signature if argument.endswith("_ptr"))
            specs.append(
                CompileSpec(
                    f"{short}_{name}", kernel, signature, constexprs, tiling.num_warps, 3, divisible=pointers,
                    max_spill=_SPILL, ptx=("griddepcontrol.wait",),
                )
            )  # fmt: skip
    return specs
