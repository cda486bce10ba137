"""The pages of running sequences: a table per KV group, and an index of sequences with a common prefix."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from graphrt.batch import Int32Array
from graphrt.kernels.cache.copy import Pages
from graphrt.spec import KVCacheSpec

Slots = npt.NDArray[np.int64]


class PageSource(Protocol):
    """The source of a table's pages: a PageAllocator, a PageLease, or pages that the caller's block manager
    allocates."""

    def take(self, count: int) -> npt.NDArray[np.int32]: ...

    def share(self, pages: Pages) -> Any: ...

    def free(self, pages: Pages) -> Any: ...


class Tables:
    """The pages of every slot in one KV group: page `from_[slot]` of its sequence up to page `to[slot]`, exclusive.

    A sequence's pages are allocated as its length grows, and freed when the window has passed them. Steps that read and
    write pages run in order of submission, so the next step may reuse a freed page. Each sequence that shares a page
    holds one reference to it.
    """

    def __init__(self, group: KVCacheSpec, source: PageSource, slots: int, longest: int) -> None:
        self.group, self._source = group, source
        self._pages = np.zeros((slots, group.pages_for(longest)), np.int32)
        self._flat = self._pages.reshape(-1)
        self.from_ = np.zeros(slots, np.int64)
        self.to = np.zeros(slots, np.int64)
        self._listed = np.zeros(slots, np.int64)  # pages of a slot up to this one were listed to the device

    def free_passed(self, slots: Slots, positions: npt.NDArray[np.int64]) -> None:
        """Free the pages that no token from `positions` on attends to."""
        if self.group.sliding_window is None and self.group.attention_chunk_size is None:
            return
        # A page can be freed once the window has passed its last token. Most steps free none.
        near = positions - self.from_[slots] * self.group.page_size >= self.group.page_size
        for slot, position in zip(slots[near].tolist(), positions[near].tolist(), strict=True):
            first, seen = int(self.from_[slot]), min(self.group.first_page_seen(position), int(self.to[slot]))
            if seen > first:
                passed = np.array(self._pages[slot, first:seen])
                self.from_[slot] = seen  # first: a page lost by an interrupt here is freed when the session closes
                self._source.free(passed)

    def more(self, slots: Slots, seq_lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of additional pages that each slot needs for `seq_lens` tokens."""
        needed = (seq_lens + (self.group.page_size - 1)) // self.group.page_size
        lacks: npt.NDArray[np.int64] = np.maximum(needed - self.to[slots], 0)
        return lacks

    def grow_by(self, slots: Slots, more: npt.NDArray[np.int64]) -> None:
        """Allocate `more` pages for each slot. Raises: CapacityError: if fewer pages are free. An error changes
        nothing."""
        if count := int(more.sum()):
            first = self.to[slots]
            places = self._places(slots, first, more)
            self._flat[places] = self._source.take(count)
            self.to[slots] = first + more

    def list_new(
        self, slots: Slots, wanted: npt.NDArray[np.bool_] | bool = True
    ) -> tuple[Int32Array, npt.NDArray[np.int64], Int32Array]:
        """Return the pages that no step has listed yet; call `submitted` once a step lists them.

        wanted   [slots] bool, the slots whose pages are listed

        Returns position of each slot's first new page, number of its new pages, and the ids of all new pages.
        """
        first = np.maximum(self._listed[slots], self.from_[slots])
        counts = (self.to[slots] - first) * wanted
        return first.astype(np.int32), counts, self._flat[self._places(slots, first, counts)]

    def submitted(self, slots: Slots) -> None:
        self._listed[slots] = self.to[slots]

    def _places(self, slots: Slots, first: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Slots:
        """Return the indices in `_flat` of pages `first` to `first + counts` of each slot, slot by slot."""
        ends = counts.cumsum()
        # Index of page n of all listed pages, minus n, is constant within a slot.
        offsets = slots * self._pages.shape[1] + first - (ends - counts)
        places: Slots = np.repeat(offsets, counts)
        return places + np.arange(len(places))

    def pages(self, slot: int) -> Int32Array:
        """Return a copy of a slot's page ids."""
        return np.array(self._pages[slot, self.from_[slot] : self.to[slot]])

    def append(self, slot: int, pages: Int32Array) -> None:
        end = int(self.to[slot]) + len(pages)
        self._pages[slot, self.to[slot] : end] = pages
        self.to[slot] = end

    @property
    def width(self) -> int:
        """Pages of the longest sequence."""
        return self._pages.shape[1]

    def place(self, slot: int, first: int, pages: Sequence[int] | Int32Array) -> None:
        """Fill an empty slot with pages that it owns, the first of them at position `first` of its sequence."""
        self._pages[slot, first : first + len(pages)] = pages
        self.from_[slot] = self._listed[slot] = first
        self.to[slot] = first + len(pages)

    def can_share(self, donor: int, length: int) -> bool:
        """Return True if a slot still has all pages that the token after its first `length` tokens attends to."""
        return bool(self.from_[donor] <= self.group.first_page_seen(length))

    def share(self, donor: int, slot: int, length: int) -> tuple[int, int] | None:
        """Share the pages of the first `length` tokens of `donor` with an empty slot; return a pair of pages to
        copy."""
        first, full = self.group.first_page_seen(length), length // self.group.page_size
        pages = self._pages[donor, first:full].tolist()
        self._source.share(pages)
        copied = None
        if length % self.group.page_size:
            (own,) = self._source.take(1).tolist()
            copied = int(self._pages[donor, full]), own
            pages.append(own)
        self.place(slot, first, pages)
        return copied

    def num_own_pages(self, slot: int, length: int, most: int) -> int:
        """Return the number of a fork's own pages: pages for up to `most` tokens, except the full pages of the first
        `length` tokens, which it shares."""
        end = min(self.group.pages_for(most), int(self.to[slot]))
        return max(0, end - max(length // self.group.page_size, int(self.from_[slot])))

    def fork(self, slot: int, new: int, length: int, own: Sequence[int]) -> list[tuple[int, int]]:
        """Share the full pages of the first `length` tokens of `slot` with the empty slot `new`, and append the pages
        `own`.

        Returns pairs of pages to copy, source and target.
        """
        first = int(self.from_[slot])
        full = max(length // self.group.page_size, first)
        shared = self._pages[slot, first:full].tolist()
        self._source.share(shared)
        self.place(new, first, [*shared, *own])
        return list(zip(self._pages[slot, full : full + len(own)].tolist(), own, strict=True))

    def cut(self, slot: int, length: int) -> None:
        """Free the pages after a slot's first `length` tokens."""
        end = min(max(self.group.pages_for(length), int(self.from_[slot])), int(self.to[slot]))
        pages = np.array(self._pages[slot, end : self.to[slot]])
        self.to[slot] = end
        self._source.free(pages)

    def forget(self, slot: int) -> None:
        """Empty a slot without freeing its pages."""
        self.from_[slot] = self.to[slot] = self._listed[slot] = 0

    def release(self, slot: int) -> None:
        """Free every page of a slot."""
        pages = self.pages(slot)
        self.forget(slot)
        self._source.free(pages)


class PrefixIndex:
    """An index of slots by their first tokens. Each block of tokens is hashed together with all earlier blocks.

    Tokens are hashed once, when a slot is added. Different tokens may have equal hashes: compare tokens before sharing
    pages.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._keys: dict[int, list[int]] = {}  # by slot
        self._slots: dict[int, dict[int, None]] = {}  # by key, in the order in which slots were added

    def add(self, slot: int, tokens: Int32Array) -> None:
        """Add a slot after all others."""
        key, keys, words = 0, self._keys.setdefault(slot, []), tokens.tobytes()
        wide = self._block * tokens.itemsize
        for end in range(wide, len(words) + 1, wide):
            key = hash((key, words[end - wide : end]))
            keys.append(key)
            if (slots := self._slots.get(key)) is None:
                self._slots[key] = {slot: None}
            else:
                slots[slot] = None

    def remove(self, slot: int) -> None:
        """Remove a slot. Nothing happens if it is not in the index."""
        for key in self._keys.pop(slot, ()):
            if slots := self._slots.get(key):
                slots.pop(slot, None)
                if not slots:
                    del self._slots[key]

    def find(self, slot: int, most: int) -> tuple[int, list[int]]:
        """Return the number of tokens, in whole blocks and at most `most`, that a slot has in common with others, and
        those others that were added earlier."""
        keys = self._keys[slot][: most // self._block]
        # A slot that has a key has all keys before it.
        count = bisect.bisect_left(keys, True, key=lambda key: len(self._slots[key]) == 1)
        if not count:
            return 0, []
        return count * self._block, list(itertools.takewhile(slot.__ne__, self._slots[keys[count - 1]]))


def common_prefix(a: Int32Array, b: Int32Array, most: int) -> int:
    """Return the length of the common prefix of two sequences, at most `most` tokens."""
    most = min(most, len(a), len(b))
    differ = a[:most] != b[:most]
    at = int(differ.argmax()) if most else 0
    return at if most and differ[at] else most
