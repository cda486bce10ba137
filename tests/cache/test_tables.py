"""Tables of pages, many slots at a time, against lists that are kept slot by slot."""

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

SLOTS, SIZE, LONGEST = 5, 4, 40
SPEC = KVCacheSpec(1, 1, 8, SIZE, dtype=torch.float32)
slots_and_lengths = st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, LONGEST), min_size=1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["grow", "list", "release"]), slots_and_lengths), max_size=12))
def test_slots_grow_and_list_as_one_by_one(calls: list[tuple[str, dict[int, int]]]) -> None:
    allocator = PageAllocator(30, null_page=7)
    tables = Tables(SPEC, allocator, SLOTS, LONGEST)
    have: list[list[int]] = [[] for _ in range(SLOTS)]
    listed = [0] * SLOTS
    for what, of in calls:
        slots, lengths = np.array(list(of), np.int64), np.array(list(of.values()), np.int64)
        if what == "grow":
            more = {slot: max(0, -(-length // SIZE) - len(have[slot])) for slot, length in of.items()}
            assert tables.more(slots, lengths).sum() == sum(more.values())
            if sum(more.values()) > allocator.num_free:
                with pytest.raises(CapacityError, match="free finished sequences"):
                    tables.grow_by(slots, tables.more(slots, lengths))
            else:
                tables.grow_by(slots, tables.more(slots, lengths))
                for slot, count in more.items():
                    pages = tables.pages(slot).tolist()
                    assert pages[: len(have[slot])] == have[slot]
                    assert len(pages) == len(have[slot]) + count
                    have[slot] = pages
        elif what == "list":
            for _ in range(2):  # nothing is listed before it was submitted
                firsts, counts, pages = tables.list_new(slots)
                assert firsts.tolist() == [listed[slot] for slot in of]
                assert counts.tolist() == [len(have[slot]) - listed[slot] for slot in of]
                assert pages.tolist() == [page for slot in of for page in have[slot][listed[slot] :]]
            tables.submitted(slots)
            for slot in of:
                listed[slot] = len(have[slot])
        else:
            for slot in of:
                tables.release(slot)
                have[slot], listed[slot] = [], 0
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
