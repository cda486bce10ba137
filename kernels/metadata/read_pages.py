"""Device helpers that read the pages and tokens of a request, from the step inputs and from its page table."""

from __future__ import annotations

from dataclasses import fields

import triton
import triton.language as tl

from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import PageGroup

GROUP_FIELDS = tl.constexpr(len(fields(PageGroup)))
_REQ_PAGES = tl.constexpr(layout.REQ_PAGES)
_PAGE_FIRST = tl.constexpr(layout.PAGE_FIRST)
_PAGE_START = tl.constexpr(layout.PAGE_START)
_PAGE_COUNT = tl.constexpr(layout.PAGE_COUNT)
_PAGE_FIELDS = tl.constexpr(layout.PAGE_FIELDS)
PAGE_SIZE = tl.constexpr([f.name for f in fields(PageGroup)].index("page_size"))
MAX_PAGES = tl.constexpr([f.name for f in fields(PageGroup)].index("max_pages"))
MAX_ENCODER_LEN = tl.constexpr([f.name for f in fields(PageGroup)].index("max_encoder_len"))
_MAX_COLUMNS = tl.constexpr(1 << 30)  # columns; the sum of two still fits in int32


@triton.jit
def read_group(page_groups_ptr, group):
    """Load the fields of one KV group, in the order of PageGroup."""
    group_ptr = page_groups_ptr + group * GROUP_FIELDS
    page_size = tl.load(group_ptr)
    num_pages = tl.load(group_ptr + 1)
    null_page = tl.load(group_ptr + 2)
    max_pages = tl.load(group_ptr + 3)
    window = tl.load(group_ptr + 4)
    chunk = tl.load(group_ptr + 5)
    writers_at = tl.load(group_ptr + 6)
    max_encoder_len = tl.load(group_ptr + MAX_ENCODER_LEN)
    return page_size, num_pages, null_page, max_pages, window, chunk, writers_at, max_encoder_len


@triton.jit
def first_seen_page(first_position, page_size, window, chunk):
    """Return the first page that a request reads if its first new token is at `first_position`."""
    seen = tl.where(window > 0, first_position + 1 - window, 0)
    seen = tl.where(chunk > 0, first_position - first_position % tl.maximum(chunk, 1), seen)
    return tl.maximum(seen, 0) // page_size


@triton.jit
def pages_at(columns, mask, pages_ptr, first, count, table_ptr):
    """Load the page ids of a request at `columns`, listed pages from the inputs, the others from its table."""
    listed = mask & (columns >= first) & (columns < first + count)
    new = tl.load(pages_ptr + (columns - first), mask=listed, other=0)
    kept = tl.load(table_ptr + columns, mask=mask & (listed == 0), other=0)
    return tl.where(listed, new, kept)


@triton.jit
def token_at(at, valid_end, written_end, end, seq_len, page_size, tokens_ptr, pages_ptr, first, page_count, table_ptr):
    """Return position, page and token id for tokens `at` of the inputs; 0 for a request that does not run."""
    mask = at < valid_end
    token = tl.load(tokens_ptr + at, mask=mask, other=0)
    position = tl.where(mask, seq_len - end + at, 0)
    page = pages_at(position // page_size, at < written_end, pages_ptr, first, page_count, table_ptr)
    return position, page.to(tl.int64), token


@triton.jit
def row_pages(
    rows_ptr, listed_pages_ptr, tables_ptr, is_row, req_index, held, group, page_size, max_pages, num_req_indices,
    table_width, listed_reqs, listed_pages,
):  # fmt: skip
    """Return a request's page list in one KV group: index of its first page in the sequence, page count, pointer.

    With `tables_ptr` (page tables that the caller owns), the list is all pages of the `held` tokens in that table.
    Otherwise the list is in the inputs, and is truncated to the listed pages. A list with a negative first page is
    treated as empty.
    """
    if tables_ptr is not None:
        known = is_row & (req_index >= 0) & (req_index < num_req_indices) & (held > 0)
        first = tl.where(known, 0, 0)
        count = tl.where(known, tl.minimum((held - 1) // page_size + 1, max_pages), 0)
        at = group.to(tl.int64) * num_req_indices + tl.where(known, req_index, 0)
        pages_ptr = tables_ptr + at * table_width
    else:
        fields_ptr = rows_ptr + (_REQ_PAGES + _PAGE_FIELDS * group) * listed_reqs
        first = tl.load(fields_ptr + _PAGE_FIRST * listed_reqs, mask=is_row, other=0)
        start = tl.load(fields_ptr + _PAGE_START * listed_reqs, mask=is_row, other=0)
        count = tl.load(fields_ptr + _PAGE_COUNT * listed_reqs, mask=is_row, other=0)
        start = tl.where((start >= 0) & (start <= listed_pages), start, listed_pages)
        count = tl.where(first >= 0, tl.maximum(tl.minimum(count, listed_pages - start), 0), 0)
        first = tl.minimum(tl.maximum(first, 0), _MAX_COLUMNS)
        pages_ptr = listed_pages_ptr + start
    return first, count, pages_ptr


@triton.jit
def lists_page_0(
    rows_ptr, is_row, page_groups_ptr, listed_reqs, listed_pages, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr
):
    """Return whether a request lists pages from page 0 in a self-attention group, which voids all its tables."""
    groups = tl.arange(0, GROUP_BLOCK)
    in_use = groups < tl.where(is_row, GROUPS, 0)
    max_encoder_len = tl.load(page_groups_ptr + groups * GROUP_FIELDS + MAX_ENCODER_LEN, mask=in_use, other=1)
    fields_ptr = rows_ptr + (_REQ_PAGES + _PAGE_FIELDS * groups) * listed_reqs
    first = tl.load(fields_ptr + _PAGE_FIRST * listed_reqs, mask=in_use, other=1)
    start = tl.load(fields_ptr + _PAGE_START * listed_reqs, mask=in_use, other=0)
    count = tl.load(fields_ptr + _PAGE_COUNT * listed_reqs, mask=in_use, other=0)
    from_start = (max_encoder_len == 0) & (first == 0) & (count > 0) & (start >= 0) & (start < listed_pages)
    return tl.max(from_start.to(tl.int32), 0)
