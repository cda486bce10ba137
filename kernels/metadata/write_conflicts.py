"""Device helpers that claim row ids and pages for a row of this step, and mark the rows that claim the same."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _is_taken(other, claim):
    """Whether another claim of the same step was found."""
    return (other != claim) & ((other >> 32) == (claim >> 32))


@triton.jit
def mark_req_indices(other, claim, is_claimed, duplicates_ptr, mark):
    """Where another row of this step held the row id that a row claimed, mark both rows."""
    hit = is_claimed & _is_taken(other, claim)
    tl.atomic_max(duplicates_ptr + ((claim >> 16) & 0xFFFF), mark, mask=hit, sem="relaxed")
    tl.atomic_max(duplicates_ptr + ((other >> 16) & 0xFFFF), mark, mask=hit, sem="relaxed")


@triton.jit
def claim_pages(pool_claims_ptr, marks_ptr, pages, index, mask, row_claim, mark):
    """Claim pages that a row writes, for the row and their places in it. Where a claim of this step by another row, or
    by another place of this one, is found, mark both; of several marks of a row, that of its first page stays."""
    claim = row_claim | index.to(tl.int64)
    other = tl.atomic_xchg(pool_claims_ptr + pages, claim, mask=mask, sem="relaxed")
    hit = mask & _is_taken(other, claim)
    if tl.max(hit.to(tl.int32), 0) > 0:
        own_mark = mark - (claim & 0xFFFF)
        other_mark = mark - (other & 0xFFFF)
        own_rows = ((row_claim >> 16) & 0xFFFF).to(tl.int32) + index * 0
        tl.atomic_max(marks_ptr + own_rows, own_mark, mask=hit, sem="relaxed")
        tl.atomic_max(marks_ptr + ((other >> 16) & 0xFFFF), other_mark, mask=hit, sem="relaxed")
