"""Device helpers that find the faults of a request and select its final fault from the checks of all KV groups."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.metadata.read_inputs import REQ_INDEX, REQ_QUERY_LEN, REQ_SEQ_LEN
from graphrt.kernels.metadata.read_pages import GROUP_FIELDS, MAX_PAGES, pages_at, row_pages
from graphrt.kernels.types import TOKEN_FROM_DEVICE, FaultCode

NOWHERE = tl.constexpr(1 << 30)
"""An index that is larger than every valid one."""

_TOKEN_FROM_DEVICE = tl.constexpr(TOKEN_FROM_DEVICE)
_DUPLICATE_REQUEST = tl.constexpr(int(FaultCode.DUPLICATE_REQUEST))
_DUPLICATE_PAGE = tl.constexpr(int(FaultCode.DUPLICATE_PAGE))


@triton.jit
def first_bad_page(pages_ptr, skipped, page_count, num_pages, null_page, PAGE_BLOCK: tl.constexpr):
    """Return the index of the first listed page that is the null page or outside the pool; NOWHERE if there is none.

    The first `skipped` pages are not checked. The request no longer reads them, so they may be null or reused pages.
    """
    first = tl.full([PAGE_BLOCK], NOWHERE, tl.int32)
    for base in tl.range(skipped, page_count, PAGE_BLOCK, loop_unroll_factor=4):  # four loads in flight
        index = base + tl.arange(0, PAGE_BLOCK)
        listed = index < page_count
        page = tl.load(pages_ptr + index, mask=listed, other=0)
        bad = listed & ((page < 0) | (page >= num_pages) | (page == null_page))
        first = tl.where(bad, tl.minimum(first, index), first)
    return tl.min(first, 0)


@triton.jit
def _bad_tokens(tokens_ptr, index, query_len, last_token, vocab_size):
    """Return `index` where the token is outside the vocabulary, else NOWHERE."""
    given = index < query_len
    token = tl.load(tokens_ptr + index, mask=given, other=0)
    token = tl.where((index == 0) & (token == _TOKEN_FROM_DEVICE), last_token, token)
    return tl.where(given & ((token < 0) | (token >= vocab_size)), index, NOWHERE)


@triton.jit
def first_bad_token(tokens_ptr, query_len, last_token, vocab_size, QUERY_LEN: tl.constexpr, TOKEN_BLOCK: tl.constexpr):
    """Return the index of the first token outside the vocabulary; NOWHERE if there is none.

    If the first token is TOKEN_FROM_DEVICE, `last_token` replaces it.
    """
    lanes = tl.arange(0, TOKEN_BLOCK)
    first = _bad_tokens(tokens_ptr, lanes, query_len, last_token, vocab_size)
    if (QUERY_LEN == 0) | (QUERY_LEN > TOKEN_BLOCK):
        for base in range(TOKEN_BLOCK, query_len, TOKEN_BLOCK):
            first = tl.minimum(first, _bad_tokens(tokens_ptr, base + lanes, query_len, last_token, vocab_size))
    return tl.min(first, 0)


@triton.jit
def final_fault(
    ptrs,
    row,
    step,
    stride_check,
    stride_conflicts,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Select the fault of the request at batch position `row`.

    Precedence: the first failed check, then a request index used twice, then a page written twice. Returns the code,
    the value and the KV group of the fault, and the conflict mark of a page that is written twice.
    """
    groups = tl.arange(0, GROUP_BLOCK)
    in_use = groups < GROUPS
    codes = tl.load(ptrs.check_code + groups * stride_check + row, mask=in_use, other=0)
    values = tl.load(ptrs.check_value + groups * stride_check + row, mask=in_use, other=0)
    page_marks = tl.load(ptrs.write_conflicts + (1 + groups) * stride_conflicts + row, mask=in_use, other=0)
    req_mark = tl.load(ptrs.write_conflicts + row)
    own_group = tl.min(tl.where(codes != 0, groups, GROUP_BLOCK), 0)
    page_group = tl.min(tl.where((page_marks >> 16) == step + 1, groups, GROUP_BLOCK), 0)
    page_mark = tl.sum(tl.where(groups == page_group, page_marks, 0), 0)
    code = tl.where(page_group < GROUP_BLOCK, _DUPLICATE_PAGE, 0)
    code = tl.where((req_mark >> 16) == step + 1, _DUPLICATE_REQUEST, code)
    code = tl.where(own_group < GROUP_BLOCK, tl.sum(tl.where(groups == own_group, codes, 0), 0), code)
    value = tl.sum(tl.where(groups == own_group, values, 0), 0)
    group = tl.where(own_group < GROUP_BLOCK, own_group, tl.where(code == _DUPLICATE_PAGE, page_group, 0))
    return code, value, group, page_mark


@triton.jit
def fault_value(
    code,
    value,
    group,
    page_mark,
    ptrs,
    rows_ptr,
    listed_pages_ptr,
    listed_reqs,
    listed_pages,
    num_req_indices,
    table_width,
):
    """Return the value of a fault; for a write conflict, the request index or the page that two requests share."""
    if code == _DUPLICATE_REQUEST:
        value = tl.load(rows_ptr + REQ_INDEX * listed_reqs).to(tl.int64)
    elif code == _DUPLICATE_PAGE:
        page_size = tl.load(ptrs.page_groups + group * GROUP_FIELDS)
        max_pages = tl.load(ptrs.page_groups + group * GROUP_FIELDS + MAX_PAGES)
        req_index = tl.load(rows_ptr + REQ_INDEX * listed_reqs)
        seq_len = tl.load(rows_ptr + REQ_SEQ_LEN * listed_reqs)
        column = (seq_len - tl.load(rows_ptr + REQ_QUERY_LEN * listed_reqs)) // page_size
        column += (0xFFFF - (page_mark & 0xFFFF)).to(tl.int32)
        first, count, pages_ptr = row_pages(
            rows_ptr, listed_pages_ptr, ptrs.tables, listed_reqs > 0, req_index, seq_len, group, page_size, max_pages,
            num_req_indices, table_width, listed_reqs, listed_pages,
        )  # fmt: skip
        table_ptr = ptrs.page_table + (group * num_req_indices + req_index).to(tl.int64) * table_width
        value = pages_at(column, column >= 0, pages_ptr, first, count, table_ptr).to(tl.int64)
    return value
