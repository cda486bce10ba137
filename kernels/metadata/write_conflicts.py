"""Device helpers that detect write conflicts of a step: two requests with one request index, or two writes to a page.

`last_writers` holds a writer id for each page and request index: step tag (32 bits), batch position (16 bits) and, for
a page, its index among the pages that the request writes (16 bits). A request stores its own id by an atomic exchange.
If the id that it replaces has the same step tag, the two conflict, and both are marked in `write_conflicts`. The step
tag makes ids of earlier steps stale, so neither buffer is reset between steps.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _conflicts(previous, writer):
    """Return whether `previous` is another writer id of the same step."""
    return (previous != writer) & ((previous >> 32) == (writer >> 32))


@triton.jit
def mark_req_conflict(previous, writer, is_writer, write_conflicts_ptr, mark):
    """Mark both requests if `previous`, the id that `writer` replaced at a request index, is of the same step."""
    hit = is_writer & _conflicts(previous, writer)
    tl.atomic_max(write_conflicts_ptr + ((writer >> 16) & 0xFFFF), mark, mask=hit, sem="relaxed")
    tl.atomic_max(write_conflicts_ptr + ((previous >> 16) & 0xFFFF), mark, mask=hit, sem="relaxed")


@triton.jit
def store_page_writers(pool_writers_ptr, marks_ptr, pages, index, mask, req_writer, mark):
    """Store the writer ids of the pages that a request writes, and mark both requests of every conflict.

    index   [n] indices of `pages` among the pages that the request writes

    A request keeps only its largest mark, that of its first page in conflict.
    """
    writer = req_writer | index.to(tl.int64)
    previous = tl.atomic_xchg(pool_writers_ptr + pages, writer, mask=mask, sem="relaxed")
    hit = mask & _conflicts(previous, writer)
    if tl.max(hit.to(tl.int32), 0) > 0:
        own_mark = mark - (writer & 0xFFFF)
        previous_mark = mark - (previous & 0xFFFF)
        own_rows = ((req_writer >> 16) & 0xFFFF).to(tl.int32) + index * 0
        tl.atomic_max(marks_ptr + own_rows, own_mark, mask=hit, sem="relaxed")
        tl.atomic_max(marks_ptr + ((previous >> 16) & 0xFFFF), previous_mark, mask=hit, sem="relaxed")
