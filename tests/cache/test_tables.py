"""Tables of pages, many rows at a time, against lists that are kept row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.cache.page_allocator import PageAllocator
from graphrt.cache.tables import Tables
from graphrt.kernels.errors import CapacityError
from graphrt.spec import KVCacheSpec

ROWS, SIZE, LONGEST = 5, 4, 40
SPEC = KVCacheSpec(1, 1, 8, SIZE, dtype=torch.float32)
rows_and_lengths = st.dictionaries(st.integers(0, ROWS - 1), st.integers(0, LONGEST), min_size=1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["grow", "list", "release"]), rows_and_lengths), max_size=12))
def test_rows_grow_and_list_as_one_by_one(calls: list[tuple[str, dict[int, int]]]) -> None:
    allocator = PageAllocator(30, null_page=7)
    tables = Tables(SPEC, allocator, ROWS, LONGEST)
    have: list[list[int]] = [[] for _ in range(ROWS)]
    listed = [0] * ROWS
    for what, of in calls:
        rows, lengths = np.array(list(of), np.int64), np.array(list(of.values()), np.int64)
        if what == "grow":
            more = {row: max(0, -(-length // SIZE) - len(have[row])) for row, length in of.items()}
            assert tables.more(rows, lengths).sum() == sum(more.values())
            if sum(more.values()) > allocator.num_free:
                with pytest.raises(CapacityError, match="free finished sequences"):
                    tables.grow_by(rows, tables.more(rows, lengths))
            else:
                tables.grow_by(rows, tables.more(rows, lengths))
                for row, count in more.items():
                    pages = tables.pages(row).tolist()
                    assert pages[: len(have[row])] == have[row]
                    assert len(pages) == len(have[row]) + count
                    have[row] = pages
        elif what == "list":
            for _ in range(2):  # nothing is listed before it was submitted
                firsts, counts, pages = tables.list_new(rows)
                assert firsts.tolist() == [listed[row] for row in of]
                assert counts.tolist() == [len(have[row]) - listed[row] for row in of]
                assert pages.tolist() == [page for row in of for page in have[row][listed[row] :]]
            tables.submitted(rows)
            for row in of:
                listed[row] = len(have[row])
        else:
            for row in of:
                tables.release(row)
                have[row], listed[row] = [], 0
        owned = [page for pages in have for page in pages]
        assert len(set(owned)) == len(owned) == 29 - allocator.num_free
        assert not {7} & set(owned)
        assert [len(pages) for pages in have] == tables.to.tolist()


def test_pages_are_taken_as_they_are_allocated() -> None:
    """Pages freed last first, then those never used, without the null page: in lists and in arrays."""
    one, other = PageAllocator(40, null_page=3), PageAllocator(40, null_page=3)
    taken, allocated = one.take(5), other.allocate(5)
    assert taken.dtype == np.int32
    assert taken.tolist() == allocated == [0, 1, 2, 4, 5]
    for allocator in (one, other):
        allocator.free([2, 5])
    assert one.take(4).tolist() == other.allocate(4) == [5, 2, 6, 7]
    assert one.take(0).tolist() == other.allocate(0) == []
