"""The first operator of every graph, which expands an entry of the input ring to the step inputs on the device.

The host writes an entry to pinned memory, then launches a graph. The cursor on the device selects the entry:

    full entry    its words are copied to `inputs`. Drafts of the device replace the placeholders for drafts
    batch delta   every request continues by one token, and in a graph with drafts by its drafts, as many as its pages
                  and its length limit allow. A position is NO_REQUEST if its request has finished or waits for a page
                  for its next token

Several steps may use one entry. The first step reads the entry's changes; in later steps all requests continue.
Lengths, last tokens and sampling values of continuing requests are on the device, so the host need not know them and
may be several launches ahead.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import numpy as np
import triton
import triton.language as tl

from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher, overlaps
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import call_class, pass_operands, pointer_types, pointers
from graphrt.kernels.metadata.buffers import (
    COPIED,
    CURSOR_ENTRY,
    CURSOR_KIND,
    CURSOR_NUM_REQS,
    CURSOR_STEP,
    CURSOR_STEPS,
    STOP_TOKENS,
    PageGroup,
    StaticBuffers,
)
from graphrt.kernels.metadata.read_pages import GROUP_FIELDS, MAX_ENCODER_LEN, PAGE_SIZE
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import next_power_of_two
from graphrt.kernels.types import DRAFT_FROM_DEVICE, NO_TOKEN, TOKEN_FROM_DEVICE

_PROGRAMS = layout.HEADER_COPIES
_MIN_REQS = 8  # minimum requests per program
_BLOCK = 1024  # words that a program copies per iteration
_NUM_WARPS = 4

_HEADER_SIZE = tl.constexpr(layout.HEADER_SIZE)
_STEP_LOW = tl.constexpr(layout.HEADER_STEP_LOW)
_STEP_HIGH = tl.constexpr(layout.HEADER_STEP_HIGH)
_NUM_REQS = tl.constexpr(layout.HEADER_NUM_REQS)
_NUM_TOKENS = tl.constexpr(layout.HEADER_NUM_TOKENS)
_NUM_PAGES = tl.constexpr(layout.HEADER_NUM_PAGES)
_KIND = tl.constexpr(layout.HEADER_KIND)
_STEPS = tl.constexpr(layout.HEADER_STEPS)
_INPUTS_AT = tl.constexpr(layout.INPUTS_AT)
_DELTA = tl.constexpr(layout.DELTA)
_NEW_ORDER = tl.constexpr(layout.NEW_ORDER)
_LISTS = tl.constexpr(layout.LISTS)
_KEEP = tl.constexpr(layout.KEEP)
_REQ_INDEX = tl.constexpr(layout.REQ_INDEX)
_REQ_SEQ_LEN = tl.constexpr(layout.REQ_SEQ_LEN)
_REQ_QUERY_START = tl.constexpr(layout.REQ_QUERY_START)
_REQ_QUERY_LEN = tl.constexpr(layout.REQ_QUERY_LEN)
_REQ_SAMPLE = tl.constexpr(layout.REQ_SAMPLE)
_REQ_COPIED = tl.constexpr(layout.REQ_COPIED)
_REQ_PAGES = tl.constexpr(layout.REQ_PAGES)
_PAGE_FIELDS = tl.constexpr(layout.PAGE_FIELDS)
_STOP_LENGTH = tl.constexpr(layout.STOP_LENGTH)
_FIRST_STOP_TOKEN = tl.constexpr(layout.FIRST_STOP_TOKEN)
_STOP_FIELDS = tl.constexpr(layout.STOP_FIELDS)
_NO_REQUEST = tl.constexpr(layout.NO_REQUEST)
_SEQ_LEN_FROM_DEVICE = tl.constexpr(layout.SEQ_LEN_FROM_DEVICE)
_TOKEN_FROM_DEVICE = tl.constexpr(TOKEN_FROM_DEVICE)
_DRAFT_FROM_DEVICE = tl.constexpr(DRAFT_FROM_DEVICE)
_STOP_TOKENS = tl.constexpr(STOP_TOKENS)
_NO_BOUND = tl.constexpr(1 << 40)  # tokens, where encoder pages limit no request
_CURSOR_STEP = tl.constexpr(CURSOR_STEP)
_CURSOR_NUM_REQS = tl.constexpr(CURSOR_NUM_REQS)
_CURSOR_STEPS = tl.constexpr(CURSOR_STEPS)
_CURSOR_KIND = tl.constexpr(CURSOR_KIND)


@triton.jit
def _from_host(ptr, mask, other):
    """Load words that the host wrote before the launch.

    Ordinary loads are safe, as L1 has no stale lines when a kernel starts. Volatile loads do not coalesce. Loads that
    bypass L1 (.cg) take 3.6 times as long on words that do not start at a multiple of 64 bytes. Triton 3.6 ignores .cv;
    later versions compile .cv, which was not measured.
    """
    return tl.load(ptr, mask=mask, other=other)


@triton.jit
def _copy_words(entry_ptr, inputs_ptr, words, num_tokens, BLOCK: tl.constexpr):
    """Copy words of an entry to the step inputs, split over all programs. The first `num_tokens` of them are tokens;
    placeholders for drafts are left out, because another program writes the drafts."""
    for base in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
        at = base + tl.arange(0, BLOCK)
        word = _from_host(entry_ptr + at, at < words, 0)
        is_draft = (at < num_tokens) & (word == _DRAFT_FROM_DEVICE)
        tl.store(inputs_ptr + at, word, mask=(at < words) & (is_draft == 0))


@triton.jit
def _room(ptrs, groups, first, count, req_index, length, runs, num_req_indices, GROUPS: tl.constexpr):
    """Return the number of tokens after `length` for which requests have pages, known pages or pages listed now."""
    group_ptrs = ptrs.page_groups + GROUP_FIELDS * groups
    page_size = tl.load(group_ptrs + PAGE_SIZE, mask=groups < GROUPS, other=1).to(tl.int64)
    # Encoder pages are always complete.
    crosses = tl.load(group_ptrs + MAX_ENCODER_LEN, mask=groups < GROUPS, other=1) > 0
    spans_ptr = ptrs.page_spans + 2 * (groups * num_req_indices + req_index[None, :])
    known_to = tl.load(spans_ptr + 1, mask=(groups < GROUPS) & runs[None, :], other=0)
    listed_to = tl.where(count > 0, first.to(tl.int64) + count, 0)
    pages_to = tl.maximum(known_to.to(tl.int64), listed_to)
    return tl.min(tl.where(crosses, _NO_BOUND, pages_to * page_size - length[None, :]), 0)


@triton.jit
def _take_drafts(
    ptrs, tokens_ptr, req_index, runs, places, length, limit, room, num_drafts, max_len, DRAFT_BLOCK: tl.constexpr
):  # fmt: skip
    """Write the drafts of requests to `places` places after their first tokens. Return the number of new tokens, as far
    as pages and the length limit allow."""
    ahead = tl.arange(0, DRAFT_BLOCK)[:, None]
    has_place = ahead < places[None, :]
    drafts_ptr = ptrs.drafts + req_index[None, :].to(tl.int64) * num_drafts
    has_draft = has_place & (ahead < num_drafts) & runs[None, :]
    draft = tl.load(drafts_ptr + ahead, mask=has_draft, other=-1)
    if ptrs.draft_parents is not None:  # a tree ends at the first draft that does not follow the one before it
        parents_ptr = ptrs.draft_parents + req_index[None, :].to(tl.int64) * num_drafts
        draft = tl.where(tl.load(parents_ptr + ahead, mask=has_draft, other=0) == ahead, draft, -1)
    tl.store(tokens_ptr[None, :] + 1 + ahead, draft, mask=has_place)
    found = tl.min(tl.where(draft < 0, ahead, DRAFT_BLOCK), 0)
    most = tl.minimum(tl.where((limit > 0) & (limit < max_len), limit, max_len) - length, room)
    return tl.maximum(tl.minimum(1 + found, most), 1).to(tl.int32)


@triton.jit
def _copy_requests(
    entry_ptr, ptrs, stops_at, num_reqs, num_tokens, num_req_indices, num_drafts, max_len, rows,
    REQ_FIELDS: tl.constexpr, FIELD_BLOCK: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    QUERY_LEN: tl.constexpr, DRAFT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy requests of a full entry to the step inputs.

    SEQ_LEN_FROM_DEVICE becomes the length on the device plus query_len. The request index becomes NO_REQUEST if the
    sequence has finished. If such a request samples after more than one token, the others are places for its drafts;
    its query_len becomes the number of tokens that it has.
    """
    mask = rows < num_reqs
    from_ptr = entry_ptr + _HEADER_SIZE + rows
    to_ptr = ptrs.inputs + _HEADER_SIZE + rows
    req_index = _from_host(from_ptr + _REQ_INDEX * num_reqs, mask, -1)
    seq_len = _from_host(from_ptr + _REQ_SEQ_LEN * num_reqs, mask, 0)
    query_len = _from_host(from_ptr + _REQ_QUERY_LEN * num_reqs, mask, 0)
    fields = tl.arange(0, FIELD_BLOCK)[:, None]
    words = _from_host(from_ptr[None, :] + fields * num_reqs, (fields < REQ_FIELDS) & mask[None, :], 0)
    continues = mask & (seq_len == _SEQ_LEN_FROM_DEVICE) & (req_index >= 0) & (req_index < num_req_indices)
    length = tl.load(ptrs.req_seq_lens + req_index, mask=continues, other=0)
    finished = continues & (tl.load(ptrs.finish_reasons + req_index, mask=continues, other=0) != 0)
    if QUERY_LEN > 1:
        sample = _from_host(from_ptr + _REQ_SAMPLE * num_reqs, mask, 0)
        query_start = _from_host(from_ptr + _REQ_QUERY_START * num_reqs, mask, 0)
        limit = _from_host(entry_ptr + stops_at + rows + _STOP_LENGTH * num_reqs, mask, 0)
        groups = tl.arange(0, GROUP_BLOCK)[:, None]
        list_ptrs = from_ptr[None, :] + (_REQ_PAGES + _PAGE_FIELDS * groups) * num_reqs
        in_use = (groups < GROUPS) & mask[None, :]
        first = _from_host(list_ptrs, in_use, 0)
        count = _from_host(list_ptrs + 2 * num_reqs, in_use, 0)
        fits = (query_start >= 0) & (query_start <= num_tokens - query_len) & (query_len <= QUERY_LEN)
        drafting = continues & (sample > 1) & fits
        runs = drafting & (finished == 0)
        room = _room(ptrs, groups, first, count, req_index, length, runs, num_req_indices, GROUPS)
        tokens_ptr = ptrs.inputs + _HEADER_SIZE + REQ_FIELDS * num_reqs + query_start
        places = tl.where(drafting, query_len - 1, 0)
        count_new = _take_drafts(
            ptrs, tokens_ptr, req_index, runs, places, length, limit, room, num_drafts, max_len, DRAFT_BLOCK
        )
        query_len = tl.where(drafting, count_new, query_len)
        is_count = (fields == _REQ_QUERY_LEN) | (fields == _REQ_SAMPLE)
        words = tl.where(is_count & drafting[None, :], query_len[None, :], words)
    words = tl.where((fields == _REQ_INDEX) & finished[None, :], _NO_REQUEST, words)
    words = tl.where((fields == _REQ_SEQ_LEN) & continues[None, :], (length + query_len)[None, :], words)
    tl.store(to_ptr[None, :] + fields * num_reqs, words, mask=(fields < REQ_FIELDS) & mask[None, :])


@triton.jit
def _store_request_values(
    entry_ptr, ptrs, stops_at, num_reqs, num_req_indices, rows, COPIED_VALUES: tl.constexpr, VALUE_BLOCK: tl.constexpr
):
    """Store the order, values and stop conditions of a full entry's requests, for later steps with batch deltas."""
    mask = rows < num_reqs
    rows_ptr = entry_ptr + _HEADER_SIZE + rows
    req_index = _from_host(rows_ptr + _REQ_INDEX * num_reqs, mask, -1)
    tl.store(ptrs.order + rows, req_index, mask=mask)
    mask = mask & (req_index >= 0) & (req_index < num_req_indices)
    fields = tl.arange(0, VALUE_BLOCK)[:, None]
    stops_ptr = entry_ptr + stops_at + rows
    is_value = (fields < COPIED_VALUES) & mask[None, :]
    is_stop = (fields < _STOP_TOKENS) & mask[None, :]
    values = _from_host(rows_ptr[None, :] + (_REQ_COPIED + fields) * num_reqs, is_value, 0)
    tokens = _from_host(stops_ptr[None, :] + (_FIRST_STOP_TOKEN + fields) * num_reqs, is_stop, 0)
    length = _from_host(stops_ptr + _STOP_LENGTH * num_reqs, mask, 0)
    tl.store(ptrs.req_values + fields * num_req_indices + req_index[None, :], values, mask=is_value)
    tl.store(ptrs.stop_tokens + fields * num_req_indices + req_index[None, :], tokens, mask=is_stop)
    tl.store(ptrs.length_limits + req_index, length, mask=mask)


@triton.jit
def _advance_requests(
    entry_ptr, ptrs, num_reqs, new_order, has_lists, num_req_indices, num_drafts, max_len, rows,
    REQ_FIELDS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, COPIED_VALUES: tl.constexpr,
    COPIED_BLOCK: tl.constexpr, QUERY_LEN: tl.constexpr, DRAFT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write requests of the step inputs that continue by one token and drafts, with the pages that the delta lists."""
    mask = rows < num_reqs
    rows_ptr = ptrs.inputs + _HEADER_SIZE + rows
    # Lists have the same layout in the entry and in the inputs. Issue all loads from host memory before the first use.
    gets_pages = rows < tl.where(has_lists, num_reqs, 0)
    list_ptr = entry_ptr + _HEADER_SIZE + tl.where(new_order, num_reqs, 0) + rows
    groups = tl.arange(0, GROUP_BLOCK)[:, None]
    in_use = (groups < GROUPS) & mask[None, :]
    list_ptrs = list_ptr[None, :] + _PAGE_FIELDS * groups * num_reqs
    listed_here = in_use & gets_pages[None, :]
    first = _from_host(list_ptrs, listed_here, 0)
    start = _from_host(list_ptrs + num_reqs, listed_here, 0)
    count = _from_host(list_ptrs + 2 * num_reqs, listed_here, 0)
    ordered = rows < tl.where(new_order, num_reqs, 0)
    req_index = _from_host(entry_ptr + _HEADER_SIZE + rows, ordered, -1)
    tl.store(ptrs.order + rows, req_index, mask=ordered)
    req_index = tl.where(ordered, req_index, tl.load(ptrs.order + rows, mask=mask & (ordered == 0), other=-1))

    runs = mask & (req_index >= 0) & (req_index < num_req_indices)
    length = tl.load(ptrs.req_seq_lens + req_index, mask=runs, other=0)
    finished = tl.load(ptrs.finish_reasons + req_index, mask=runs, other=1) != 0
    # A request without a page for its token waits until it gets one.
    room = _room(ptrs, groups, first, count, req_index, length, runs, num_req_indices, GROUPS)
    runs = runs & (finished == 0) & (room > 0)
    tokens_ptr = rows_ptr - rows + REQ_FIELDS * num_reqs + rows * QUERY_LEN
    count_new = rows * 0 + 1
    if QUERY_LEN > 1:
        limit = tl.load(ptrs.length_limits + req_index, mask=runs, other=0)
        places = tl.where(mask, QUERY_LEN - 1, 0)
        count_new = _take_drafts(
            ptrs, tokens_ptr, req_index, runs, places, length, limit, room, num_drafts, max_len, DRAFT_BLOCK
        )
    seq_len = length + count_new

    values = tl.arange(0, COPIED_BLOCK)[:, None]
    kept = (values < COPIED_VALUES) & runs[None, :]
    value = tl.load(ptrs.req_values + values * num_req_indices + req_index[None, :], mask=kept, other=0)
    values_ptr = rows_ptr[None, :] + (_REQ_COPIED + values) * num_reqs
    tl.store(values_ptr, value, mask=(values < COPIED_VALUES) & mask[None, :])
    tl.store(rows_ptr + _REQ_INDEX * num_reqs, tl.where(runs, req_index, _NO_REQUEST), mask=mask)
    tl.store(rows_ptr + _REQ_SEQ_LEN * num_reqs, seq_len, mask=mask)
    tl.store(rows_ptr + _REQ_QUERY_START * num_reqs, rows * QUERY_LEN, mask=mask)
    tl.store(rows_ptr + _REQ_QUERY_LEN * num_reqs, count_new, mask=mask)
    tl.store(rows_ptr + _REQ_SAMPLE * num_reqs, count_new, mask=mask)
    fields_ptr = rows_ptr[None, :] + (_REQ_PAGES + _PAGE_FIELDS * groups) * num_reqs
    tl.store(fields_ptr, first, mask=in_use)
    tl.store(fields_ptr + num_reqs, start, mask=in_use)
    tl.store(fields_ptr + 2 * num_reqs, count, mask=in_use)
    tl.store(tokens_ptr, rows * 0 + _TOKEN_FROM_DEVICE, mask=mask)


_Unpacked = namedtuple(
    "_Unpacked",
    "page_groups input_ring inputs cursor order req_seq_lens finish_reasons req_values length_limits stop_tokens "
    "step_counter page_spans drafts draft_parents",
)
"""Buffers that the kernel reads and writes, in the order of its arguments."""


@triton.jit(
    do_not_specialize=["num_req_indices", "max_reqs", "inputs_words", "input_ring_words", "num_drafts", "max_len"]
)
def _unpack_kernel(
    ptrs,
    num_entries,
    stride_input_ring,
    max_reqs,
    inputs_words,
    input_ring_words,
    num_req_indices,
    num_drafts,
    max_len,
    REQ_FIELDS: tl.constexpr,
    FIELD_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    COPIED_VALUES: tl.constexpr,
    COPIED_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    REQ_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    DRAFT_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:  # the refresh may start now, because it waits for this kernel to finish
        tl.extra.cuda.gdc_launch_dependents()
    # In an entry's first step, read this program's copy of the header; in later steps, read the header from the cursor.
    entry = tl.load(ptrs.cursor)
    first_step = tl.load(ptrs.cursor + _CURSOR_STEP) == 0
    header_ptr = ptrs.input_ring + (entry % num_entries) * stride_input_ring
    entry_ptr = header_ptr + _INPUTS_AT
    header_ptr += _HEADER_SIZE * tl.program_id(0)
    fields = tl.arange(0, _HEADER_SIZE)
    header = _from_host(header_ptr + fields, fields < tl.where(first_step, _HEADER_SIZE, 0), 0)
    step = tl.sum(tl.where(fields == _STEP_HIGH, header, 0), 0).to(tl.int64) << 32
    step = step | (tl.sum(tl.where(fields == _STEP_LOW, header, 0), 0).to(tl.int64) & 0xFFFFFFFF)
    num_reqs = tl.sum(tl.where(fields == _NUM_REQS, header, 0), 0)
    num_tokens = tl.sum(tl.where(fields == _NUM_TOKENS, header, 0), 0)
    num_pages = tl.sum(tl.where(fields == _NUM_PAGES, header, 0), 0)
    kind = tl.sum(tl.where(fields == _KIND, header, 0), 0)
    steps = tl.sum(tl.where(fields == _STEPS, header, 0), 0)
    if first_step == 0:
        step = tl.load(ptrs.step_counter) + 1
        num_reqs = tl.load(ptrs.cursor + _CURSOR_NUM_REQS).to(tl.int32)
        steps = tl.load(ptrs.cursor + _CURSOR_STEPS).to(tl.int32)
        kind = tl.load(ptrs.cursor + _CURSOR_KIND).to(tl.int32)

    # Treat an entry as empty if its counts exceed the size of the entry or of the inputs, or if a full entry is past
    # its first step.
    delta = (kind & _DELTA) != 0
    new_order = first_step & ((kind & _NEW_ORDER) != 0)
    keep = (kind & _KEEP) != 0
    reqs = num_reqs.to(tl.int64)
    num_tokens = tl.where(delta, num_reqs * QUERY_LEN, num_tokens)
    used = _HEADER_SIZE + REQ_FIELDS * reqs + num_tokens + num_pages
    has_lists = first_step & ((kind & _LISTS) != 0)
    delta_words = _HEADER_SIZE + tl.where(new_order, reqs, 0) + num_pages
    delta_words += tl.where(has_lists, _PAGE_FIELDS * GROUPS * reqs, 0)
    entry_words_used = tl.where(delta, delta_words, used + tl.where(keep, _STOP_FIELDS * reqs, 0))
    fits = (delta | first_step) & (num_reqs >= 0) & (num_reqs <= max_reqs) & (num_tokens >= 0) & (num_pages >= 0)
    fits = fits & (used <= inputs_words) & (entry_words_used <= input_ring_words)
    num_reqs = tl.where(fits, num_reqs, 0)
    num_tokens = tl.where(fits, num_tokens, 0)
    num_pages = tl.where(fits, num_pages, 0)
    used = tl.where(fits, used, _HEADER_SIZE).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(ptrs.inputs + _STEP_LOW, step.to(tl.int32))
        tl.store(ptrs.inputs + _STEP_HIGH, (step >> 32).to(tl.int32))
        tl.store(ptrs.inputs + _NUM_REQS, num_reqs)
        tl.store(ptrs.inputs + _NUM_TOKENS, num_tokens)
        tl.store(ptrs.inputs + _NUM_PAGES, num_pages)
        tl.store(ptrs.inputs + _KIND, kind)
        tl.store(ptrs.inputs + _STEPS, steps)
        tl.store(ptrs.inputs + _HEADER_SIZE - 1, 0)

    # Both the requests and the words that are only copied are split over the programs.
    rows = tl.program_id(0) * REQ_BLOCK + tl.arange(0, REQ_BLOCK)
    if delta:
        _advance_requests(
            entry_ptr, ptrs, num_reqs, new_order, has_lists, num_req_indices, num_drafts, max_len, rows,
            REQ_FIELDS, GROUPS, GROUP_BLOCK, COPIED_VALUES, COPIED_BLOCK, QUERY_LEN, DRAFT_BLOCK,
        )  # fmt: skip
        pages_from = delta_words.to(tl.int32) - num_pages
        pages_to = _HEADER_SIZE + (REQ_FIELDS + QUERY_LEN) * num_reqs
        for base in range(tl.program_id(0) * BLOCK, num_pages, tl.num_programs(0) * BLOCK):
            at = base + tl.arange(0, BLOCK)
            page = _from_host(entry_ptr + pages_from + at, at < num_pages, 0)
            tl.store(ptrs.inputs + pages_to + at, page, mask=at < num_pages)
    else:
        # With KEEP, requests are copied one by one and completed from the device state; the rest is copied as words.
        copied_from = _HEADER_SIZE
        if keep:
            copied_from = _HEADER_SIZE + REQ_FIELDS * num_reqs
            _copy_requests(
                entry_ptr, ptrs, used, num_reqs, num_tokens, num_req_indices, num_drafts, max_len, rows, REQ_FIELDS,
                FIELD_BLOCK, GROUPS, GROUP_BLOCK, QUERY_LEN, DRAFT_BLOCK,
            )  # fmt: skip
            _store_request_values(entry_ptr, ptrs, used, num_reqs, num_req_indices, rows, COPIED_VALUES, VALUE_BLOCK)
        places = tl.where(keep, num_tokens, 0)
        _copy_words(entry_ptr + copied_from, ptrs.inputs + copied_from, used - copied_from, places, BLOCK)


def _tile_sizes(groups: int) -> dict[str, int]:
    """Return the numbers of fields and values per request, and the matching block sizes."""
    fields, values, power = layout.req_fields(groups), len(COPIED), next_power_of_two
    return {
        "REQ_FIELDS": fields, "FIELD_BLOCK": power(fields), "GROUPS": groups, "GROUP_BLOCK": power(groups),
        "COPIED_VALUES": values, "COPIED_BLOCK": power(values), "VALUE_BLOCK": power(max(values, STOP_TOKENS)),
    }  # fmt: skip


_launch = KernelLauncher(_unpack_kernel)


def _unpack_triton(b: Any) -> None:
    groups, num_req_indices, ptrs = b.page_groups.shape[0], b.req_seq_lens.shape[0], pointers(_Unpacked, b)
    if not (b.only_chains and b.draft_parents.shape[1]):
        ptrs = ptrs._replace(draft_parents=None)
    req_block = max(_MIN_REQS, next_power_of_two(-(-b.padded_reqs // _PROGRAMS)))
    _launch(
        (_PROGRAMS,),
        ptrs, b.input_ring.shape[0], b.input_ring.stride(0), min(b.padded_reqs, b.order.shape[0]),
        b.inputs.shape[0], b.input_ring.shape[1] - layout.INPUTS_AT, num_req_indices, b.drafts.shape[1],
        b.token_history.shape[1] - 1, **_tile_sizes(groups), REQ_BLOCK=req_block, BLOCK=_BLOCK,
        QUERY_LEN=b.query_len, DRAFT_BLOCK=next_power_of_two(b.query_len), OVERLAPS=overlaps(b.inputs.device),
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def unpack_reference(b: Any) -> None:
    """Reference of `graphrt::unpack`."""
    cursor, groups = b.cursor.tolist(), b.page_groups.tolist()
    entry = b.input_ring[cursor[CURSOR_ENTRY] % b.input_ring.shape[0]].numpy()[layout.INPUTS_AT :]
    inputs, num_req_indices = b.inputs.numpy(), b.req_seq_lens.shape[0]
    first_step = cursor[CURSOR_STEP] == 0
    if first_step:
        header = entry[: layout.HEADER_SIZE].copy()
    else:
        header = np.zeros(layout.HEADER_SIZE, np.int32)
        step = int(b.step_counter.item()) + 1
        header[layout.HEADER_STEP_LOW] = np.uint32(step & 0xFFFFFFFF).view(np.int32)
        header[layout.HEADER_STEP_HIGH] = step >> 32
        header[layout.HEADER_NUM_REQS] = cursor[CURSOR_NUM_REQS]
        header[layout.HEADER_STEPS] = cursor[CURSOR_STEPS]
        header[layout.HEADER_KIND] = cursor[CURSOR_KIND]
    kind, req_fields = int(header[layout.HEADER_KIND]), layout.req_fields(len(groups))
    new_order = first_step and bool(kind & layout.NEW_ORDER)
    list_fields = layout.list_fields(len(groups)) if first_step and kind & layout.LISTS else 0
    if kind & layout.DELTA:
        header[layout.HEADER_NUM_TOKENS] = header[layout.HEADER_NUM_REQS] * b.query_len
    counts = [layout.HEADER_NUM_REQS, layout.HEADER_NUM_TOKENS, layout.HEADER_NUM_PAGES]
    n, tokens, pages = (int(header[count]) for count in counts)
    used = layout.inputs_size(n, tokens, pages, len(groups))
    entry_words_used = used + (layout.STOP_FIELDS * n if kind & layout.KEEP else 0)
    if kind & layout.DELTA:
        entry_words_used = layout.HEADER_SIZE + (new_order + list_fields) * n + pages
    fits = min(n, tokens, pages) >= 0 and n <= min(b.padded_reqs, len(b.order))
    fits = fits and used <= len(inputs) and entry_words_used <= len(entry)
    if not fits or not (first_step or kind & layout.DELTA):
        n = tokens = pages = 0
        header[counts] = 0
        used = layout.HEADER_SIZE
    inputs[: layout.HEADER_SIZE] = header
    rows = inputs[layout.HEADER_SIZE : layout.HEADER_SIZE + req_fields * n].reshape(req_fields, n)
    lens, order = b.req_seq_lens.numpy(), b.order.numpy()
    if not kind & layout.DELTA:
        inputs[layout.HEADER_SIZE : used] = entry[layout.HEADER_SIZE : used]
        ids = rows[layout.REQ_INDEX].copy()
        known = (ids >= 0) & (ids < num_req_indices)
        if kind & layout.KEEP:
            order[:n] = ids
            values = rows[layout.REQ_COPIED : layout.REQ_COPIED + len(COPIED), known]
            b.req_values.numpy()[:, ids[known]] = values
            stops = entry[used : used + layout.STOP_FIELDS * n].reshape(layout.STOP_FIELDS, n)[:, known]
            b.length_limits.numpy()[ids[known]] = stops[layout.STOP_LENGTH]
            b.stop_tokens.numpy()[:, ids[known]] = stops[layout.FIRST_STOP_TOKEN :]
            continuing = np.flatnonzero((rows[layout.REQ_SEQ_LEN] == layout.SEQ_LEN_FROM_DEVICE) & known)
            new_tokens = inputs[layout.HEADER_SIZE + req_fields * n :][:tokens]
            for row in continuing[rows[layout.REQ_SAMPLE, continuing] > 1].tolist():
                start, query_len = (int(rows[f, row]) for f in (layout.REQ_QUERY_START, layout.REQ_QUERY_LEN))
                if 0 <= start <= tokens - query_len and query_len <= b.query_len:
                    places = new_tokens[start + 1 : start + query_len]
                    count = _take_drafts_reference(b, int(ids[row]), rows[layout.REQ_PAGES :, row], groups, places)
                    rows[layout.REQ_QUERY_LEN, row] = rows[layout.REQ_SAMPLE, row] = count
            rows[layout.REQ_SEQ_LEN, continuing] = lens[ids[continuing]] + rows[layout.REQ_QUERY_LEN, continuing]
            rows[layout.REQ_INDEX, continuing[b.finish_reasons.numpy()[ids[continuing]] != 0]] = layout.NO_REQUEST
        return
    at = layout.HEADER_SIZE
    if new_order:
        order[:n] = entry[at : at + n]
        at += n
    rows[:] = 0
    if list_fields:
        rows[layout.REQ_PAGES :] = entry[at : at + list_fields * n].reshape(list_fields, n)
        at += list_fields * n
    rows[layout.REQ_QUERY_START], rows[layout.REQ_QUERY_LEN] = np.arange(n) * b.query_len, 1
    new_tokens = inputs[layout.HEADER_SIZE + req_fields * n :][: n * b.query_len].reshape(n, b.query_len)
    new_tokens[:, 1:], new_tokens[:, 0] = NO_TOKEN, TOKEN_FROM_DEVICE
    for row in range(n):
        req_index = int(order[row])
        rows[layout.REQ_INDEX, row], rows[layout.REQ_SEQ_LEN, row] = layout.NO_REQUEST, 1
        if not 0 <= req_index < num_req_indices:
            continue
        length = int(lens[req_index])
        room = _room_reference(b, req_index, rows[layout.REQ_PAGES :, row], groups) - length
        runs = b.finish_reasons[req_index] == 0 and room > 0
        if runs:
            rows[layout.REQ_INDEX, row] = req_index
            rows[layout.REQ_COPIED : layout.REQ_COPIED + len(COPIED), row] = b.req_values[:, req_index]
        if runs and b.query_len > 1:
            lists, places = rows[layout.REQ_PAGES :, row], new_tokens[row, 1:]
            rows[layout.REQ_QUERY_LEN, row] = _take_drafts_reference(b, req_index, lists, groups, places)
        rows[layout.REQ_SEQ_LEN, row] = length + rows[layout.REQ_QUERY_LEN, row]
    rows[layout.REQ_SAMPLE] = rows[layout.REQ_QUERY_LEN]
    inputs[layout.HEADER_SIZE + (req_fields + b.query_len) * n :][:pages] = entry[at : at + pages]


def _take_drafts_reference(b: Any, req_index: int, lists: Any, groups: list[list[int]], places: Any) -> int:
    """Write the drafts of a request to the places for them. Return the number of its new tokens."""
    places[:] = NO_TOKEN
    if b.finish_reasons[req_index]:
        return 1
    drafts, length = b.drafts[req_index].numpy()[: len(places)], int(b.req_seq_lens[req_index])
    if b.only_chains and b.draft_parents.shape[1]:
        parents = b.draft_parents[req_index].numpy()[: len(places)]
        drafts = np.where(parents == np.arange(len(parents)), drafts, NO_TOKEN)
    places[: len(drafts)] = drafts
    limit, longest = int(b.length_limits[req_index]), b.token_history.shape[1] - 1
    most: int = min(limit if limit > 0 else longest, longest, _room_reference(b, req_index, lists, groups)) - length
    return max(min(1 + int((drafts >= 0).cumprod().sum()), most), 1)


def _room_reference(b: Any, req_index: int, lists: Any, groups: list[list[int]]) -> int:
    """Return the number of tokens that a request has pages for in every self-attention group."""
    room: int = _NO_BOUND.value
    for g, words in enumerate(groups):
        group = PageGroup(*words)
        first, _, count = lists[layout.PAGE_FIELDS * g :][: layout.PAGE_FIELDS].tolist()
        pages_to = max(int(b.page_spans[g, req_index, 1]), first + count if count > 0 else 0)
        if not group.max_encoder_len:
            room = min(room, pages_to * group.page_size)
    return room


_Call = call_class("unpack", padded_reqs=int, query_len=int, only_chains=bool)
_op = DeclaredOp("unpack", _Call, triton_impl=_unpack_triton, reference=unpack_reference)


def unpack(buffers: StaticBuffers, query_len: int = 1, *, only_chains: bool = False) -> None:
    """Write the step inputs from the current entry of the input ring, and store the entry's request values.

    buffers      static buffers, cut to the captured size; docs/decode_step.md describes them
    query_len    maximum new tokens of a request that continues: its last sampled token, and drafts
    only_chains  the graph verifies no trees, so drafts end before the first branch

    The cursor selects the entry and its step; `write_outputs` advances it. An entry with counts out of range, or with
    more requests than the graph was captured for, is treated as a step without requests.

    Capture-safe: the grid depends on the captured size; the kernel reads the entry and its counts on the device.
    Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match.
    """
    _op(_Call(*buffers.once(_operands), buffers.req_indices.shape[0], query_len, only_chains))


_operands = functools.partial(pass_operands, "unpack")


def compile_variants() -> list[CompileSpec]:
    """Return the variants for one KV group and for several, without and with drafts."""
    specs = []
    for name, groups, query_len in (("1", 1, 1), ("6", 6, 1), ("drafts", 1, 4), ("chains", 1, 4)):
        constexprs = {**_tile_sizes(groups), "REQ_BLOCK": _MIN_REQS, "BLOCK": _BLOCK, "OVERLAPS": True}
        constexprs |= {"QUERY_LEN": query_len, "DRAFT_BLOCK": next_power_of_two(query_len)}
        types = {"ptrs": pointer_types(_Unpacked, draft_parents="*i32" if name == "chains" else "constexpr")}
        specs.append(
            CompileSpec(f"unpack_{name}", _unpack_kernel, types, constexprs, _NUM_WARPS, 3, divisible=("ptrs",))
        )
    return specs
