"""The pages of running sequences: a table per KV group, and the pages that sequences of equal beginning share."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from graphrt.batch import Int32Array
from graphrt.cache.kv_cache import PageAllocator
from graphrt.spec import KVCacheSpec

Slots = npt.NDArray[np.int64]


class Tables:
    """The pages of every slot in one KV group: page `from_[slot]` of its sequence to page `to[slot]`, not included.

    A sequence's pages are allocated as its length grows, and given back as the window leaves them behind. The steps
    that read and write them run in the order of submission, so a page may be given to the next step at once. Of pages
    that several sequences share, each has an ownership of its own.

    listed   by slot, up to which page the steps have listed the slot's pages for its row id
    """

    def __init__(self, group: KVCacheSpec, allocator: PageAllocator, slots: int, longest: int) -> None:
        self.group, self._allocator = group, allocator
        self._pages = np.zeros((slots, group.pages_for(longest)), np.int32)
        self._every = self._pages.reshape(-1)
        self.from_ = np.zeros(slots, np.int64)
        self.to = np.zeros(slots, np.int64)
        self._listed = np.zeros(slots, np.int64)

    def give_back(self, slots: Slots, positions: npt.NDArray[np.int64]) -> None:
        """Free what tokens from `positions` on cannot see."""
        if self.group.sliding_window is None and self.group.attention_chunk_size is None:
            return
        # The next page is left behind once its last token is: most steps leave none.
        near = positions - self.from_[slots] * self.group.page_size >= self.group.page_size
        for slot, position in zip(slots[near].tolist(), positions[near].tolist(), strict=True):
            seen = min(self.group.first_page_seen(position), int(self.to[slot]))
            if seen > self.from_[slot]:
                self._allocator.free(self._pages[slot, self.from_[slot] : seen])
                self.from_[slot] = seen

    def missing(self, slots: Slots, seq_lens: npt.NDArray[np.int64]) -> int:
        """Pages that `grow` would allocate."""
        return int(self.more(slots, seq_lens).sum())

    def grow(self, slots: Slots, seq_lens: npt.NDArray[np.int64]) -> None:
        """Allocate pages up to `seq_lens`. Raises: CapacityError, with nothing changed, where there are too few."""
        self.grow_by(slots, self.more(slots, seq_lens))

    def more(self, slots: Slots, seq_lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Pages that each slot lacks for so many tokens."""
        needed = (seq_lens + (self.group.page_size - 1)) // self.group.page_size
        lacks: npt.NDArray[np.int64] = np.maximum(needed - self.to[slots], 0)
        return lacks

    def grow_by(self, slots: Slots, more: npt.NDArray[np.int64]) -> None:
        """Allocate so many pages more for each slot. Raises: as `grow`."""
        if count := int(more.sum()):
            first = self.to[slots]
            places = self._places(slots, first, more)
            self._every[places] = self._allocator.take(count)
            self.to[slots] = first + more

    def list_new(
        self, slots: Slots, wanted: npt.NDArray[np.bool_] | bool = True
    ) -> tuple[Int32Array, npt.NDArray[np.int64], Int32Array]:
        """The pages that no step has listed, of slots where they are wanted: the place of the first one of each slot,
        how many, and the ids of all, slot after slot. Whoever submitted a step with them calls `submitted`."""
        first = np.maximum(self._listed[slots], self.from_[slots])
        counts = (self.to[slots] - first) * wanted
        return first.astype(np.int32), counts, self._every[self._places(slots, first, counts)]

    def submitted(self, slots: Slots) -> None:
        """All pages of these slots have been listed."""
        self._listed[slots] = self.to[slots]

    def _places(self, slots: Slots, first: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Slots:
        """Where pages `first` to `first + counts` of each slot stand in `_every`, slot after slot."""
        ends = counts.cumsum()
        # The n-th of all stands n places behind a point of its slot's own.
        points = slots * self._pages.shape[1] + first - (ends - counts)
        places: Slots = np.repeat(points, counts)
        return places + np.arange(len(places))

    def pages(self, slot: int) -> Int32Array:
        """A copy of a slot's page ids."""
        return np.array(self._pages[slot, self.from_[slot] : self.to[slot]])

    def append(self, slot: int, pages: Int32Array) -> None:
        """Give a slot more pages, behind those that it has."""
        end = int(self.to[slot]) + len(pages)
        self._pages[slot, self.to[slot] : end] = pages
        self.to[slot] = end

    @property
    def width(self) -> int:
        """Pages of the longest sequence."""
        return self._pages.shape[1]

    def place(self, slot: int, first: int, pages: Sequence[int] | Int32Array) -> None:
        """Give an empty slot pages that it owns from now on, the first of them at place `first` of its sequence."""
        self._pages[slot, first : first + len(pages)] = pages
        self.from_[slot] = self._listed[slot] = first
        self.to[slot] = first + len(pages)

    def can_share(self, donor: int, length: int) -> bool:
        """Whether a slot still has all pages that a sequence sees that goes on behind its first `length` tokens."""
        return bool(self.from_[donor] <= self.group.first_page_seen(length))

    def share(self, donor: int, slot: int, length: int) -> tuple[int, int] | None:
        """Give an empty slot what another has of its first `length` tokens, of which the last page may be partly
        filled: the slot gets a page of its own there, and the pair says which page is to be copied to which."""
        first, full = self.group.first_page_seen(length), length // self.group.page_size
        pages = self._pages[donor, first:full].tolist()
        self._allocator.share(pages)
        copied = None
        if length % self.group.page_size:
            (own,) = self._allocator.allocate(1)
            copied = int(self._pages[donor, full]), own
            pages.append(own)
        self.place(slot, first, pages)
        return copied

    def own_pages(self, slot: int, length: int, most: int) -> int:
        """Pages that a fork needs of its own: those behind the full pages of the first `length` tokens that its first
        `most` tokens may lie in. What the slot has ahead of these is not the fork's."""
        end = min(self.group.pages_for(most), int(self.to[slot]))
        return max(0, end - max(length // self.group.page_size, int(self.from_[slot])))

    def fork(self, slot: int, new: int, length: int, most: int) -> list[tuple[int, int]]:
        """Give an empty slot the full pages of another's first `length` tokens, and pages of its own behind them: pairs
        of pages to copy, of those that its first `most` tokens may lie in."""
        first = int(self.from_[slot])
        full = max(length // self.group.page_size, first)
        shared = self._pages[slot, first:full].tolist()
        self._allocator.share(shared)
        own = self._allocator.allocate(self.own_pages(slot, length, most))
        self.place(new, first, [*shared, *own])
        return list(zip(self._pages[slot, full : full + len(own)].tolist(), own, strict=True))

    def cut(self, slot: int, length: int) -> None:
        """Free the pages behind a slot's first `length` tokens."""
        end = min(max(self.group.pages_for(length), int(self.from_[slot])), int(self.to[slot]))
        self._allocator.free(self._pages[slot, end : self.to[slot]])
        self.to[slot] = end

    def forget(self, slot: int) -> None:
        """Empty a slot whose pages somebody else frees."""
        self.from_[slot] = self.to[slot] = self._listed[slot] = 0

    def release(self, slot: int) -> None:
        """Free every page of a slot."""
        pages = self.pages(slot)
        self.forget(slot)
        self._allocator.free(pages)


class PrefixIndex:
    """Which slots begin with the same tokens: by each block of tokens, the hash of it and of all before it.

    Tokens are hashed once, when a slot is added. Hashes may agree by chance: compare tokens before pages are taken.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._keys: dict[int, list[int]] = {}  # of each slot
        self._slots: dict[int, dict[int, None]] = {}  # with each key, in the order in which they were added

    def add(self, slot: int, tokens: Int32Array) -> None:
        """Add a slot behind all others."""
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
        """Forget a slot; one that is not there makes no difference."""
        for key in self._keys.pop(slot, ()):
            if slots := self._slots.get(key):
                slots.pop(slot, None)
                if not slots:
                    del self._slots[key]

    def find(self, slot: int, most: int) -> tuple[int, list[int]]:
        """How many tokens, in whole blocks and `most` at most, a slot has in common with others at least, and with
        which of those that were added before it."""
        keys = self._keys[slot][: most // self._block]
        # Who has a key has all those before it.
        count = bisect.bisect_left(keys, True, key=lambda key: len(self._slots[key]) == 1)
        if not count:
            return 0, []
        return count * self._block, list(itertools.takewhile(slot.__ne__, self._slots[keys[count - 1]]))


def common_prefix(a: Int32Array, b: Int32Array, most: int) -> int:
    """How many tokens two sequences begin with alike, `most` at most."""
    most = min(most, len(a), len(b))
    differ = a[:most] != b[:most]
    at = int(differ.argmax()) if most else 0
    return at if most and differ[at] else most
