"""Device helpers that claim row ids and pages for a row of this step, and mark the rows that claim the same."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.metadata.read_pages import pages_at


@triton.jit
def claim_row_id(row_claim_ptr, duplicates_ptr, claim, mark):
    """Claim a row id; where another row of this step holds it, mark both rows."""
    other = tl.atomic_xchg(row_claim_ptr, claim, sem="relaxed")
    if (other != claim) & ((other >> 32) == (claim >> 32)):
        tl.atomic_max(duplicates_ptr + ((claim >> 16) & 0xFFFF), mark, sem="relaxed")
        tl.atomic_max(duplicates_ptr + ((other >> 16) & 0xFFFF), mark, sem="relaxed")


@triton.jit
def claim_pages(
    pool_claims_ptr,
    marks_ptr,
    pages_ptr,
    first,
    count,
    table_ptr,
    row_claim,
    mark,
    first_column,
    end_column,
    BLOCK: tl.constexpr,
):
    """Claim every page that the row writes, for the row and its place in it. Where a claim of this step by another row,
    or by another place of this one, is found, mark both; of several marks of a row, that of its first page stays."""
    for base in range(first_column, end_column, BLOCK):
        column = base + tl.arange(0, BLOCK)
        mask = column < end_column
        page = pages_at(column, mask, pages_ptr, first, count, table_ptr)
        claim = row_claim | (column - first_column).to(tl.int64)
        other = tl.atomic_xchg(pool_claims_ptr + page, claim, mask=mask, sem="relaxed")
        hit = mask & (other != claim) & ((other >> 32) == (claim >> 32))
        if tl.max(hit.to(tl.int32), 0) > 0:
            own_mark = mark - (claim & 0xFFFF)
            other_mark = mark - (other & 0xFFFF)
            own_rows = ((row_claim >> 16) & 0xFFFF).to(tl.int32) + tl.zeros([BLOCK], tl.int32)
            tl.atomic_max(marks_ptr + own_rows, own_mark, mask=hit, sem="relaxed")
            tl.atomic_max(marks_ptr + ((other >> 16) & 0xFFFF), other_mark, mask=hit, sem="relaxed")
