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

Rows = npt.NDArray[np.int64]


class PageSource(Protocol):
    """The source of a table's pages: a PageAllocator, a PageLease, or pages that the caller's block manager
    allocates."""

    def take(self, count: int) -> npt.NDArray[np.int32]: ...

    def share(self, pages: Pages) -> Any: ...

    def free(self, pages: Pages) -> Any: ...


class Tables:
    """The page table of one KV group, with one row per request index.

    Row r contains pages `from_[r]` up to `to[r]`, exclusive, of its sequence.
    A sequence's pages are allocated as its length grows, and freed when the window has passed them. Steps that read and
    write pages run in order of submission, so the next step may reuse a freed page. Each sequence that shares a page
    holds one reference to it.
    """

    def __init__(self, group: KVCacheSpec, source: PageSource, rows: int, longest: int) -> None:
        self.group, self._source = group, source
        self._pages = np.zeros((rows, group.pages_for(longest)), np.int32)
        self._flat = self._pages.reshape(-1)
        self.from_ = np.zeros(rows, np.int64)
        self.to = np.zeros(rows, np.int64)
        self._listed = np.zeros(rows, np.int64)  # the pages before this position were listed to the device

    def free_passed(self, rows: Rows, positions: npt.NDArray[np.int64]) -> None:
        """Free the pages that no token at or after `positions` attends to."""
        if self.group.sliding_window is None and self.group.attention_chunk_size is None:
            return
        # A page can be freed once the window has passed its last token. Most steps free none.
        near = positions - self.from_[rows] * self.group.page_tokens >= self.group.page_tokens
        for row, position in zip(rows[near].tolist(), positions[near].tolist(), strict=True):
            first, seen = int(self.from_[row]), min(self.group.first_page_seen(position), int(self.to[row]))
            if seen > first:
                passed = np.array(self._pages[row, first:seen])
                self.from_[row] = seen  # before the free, so a page that an interrupt loses is freed with the session
                self._source.free(passed)

    def more(self, rows: Rows, seq_lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of pages that each row lacks for `seq_lens` tokens."""
        needed = (seq_lens + (self.group.page_tokens - 1)) // self.group.page_tokens
        lacks: npt.NDArray[np.int64] = np.maximum(needed - self.to[rows], 0)
        return lacks

    def grow_by(self, rows: Rows, more: npt.NDArray[np.int64]) -> None:
        """Allocate `more` pages for each row. Raises: CapacityError: if too few pages are free. An error changes
        nothing."""
        if count := int(more.sum()):
            first = self.to[rows]
            places = self._places(rows, first, more)
            self._flat[places] = self._source.take(count)
            self.to[rows] = first + more

    def list_new(
        self, rows: Rows, wanted: npt.NDArray[np.bool_] | bool = True
    ) -> tuple[Int32Array, npt.NDArray[np.int64], Int32Array]:
        """Return the pages that no step has listed yet; call `submitted` once a step lists them.

        wanted   [rows] bool, the rows whose pages are listed

        Returns, per row, the position of the first new page and the number of new pages, then all ids.
        """
        first = np.maximum(self._listed[rows], self.from_[rows])
        counts = (self.to[rows] - first) * wanted
        return first.astype(np.int32), counts, self._flat[self._places(rows, first, counts)]

    def submitted(self, rows: Rows) -> None:
        self._listed[rows] = self.to[rows]

    def _places(self, rows: Rows, first: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Rows:
        """Return the indices in `_flat` of pages `first` to `first + counts` of each row, row by row."""
        ends = counts.cumsum()
        # Index of page n of all listed pages, minus n, is constant within a row.
        offsets = rows * self._pages.shape[1] + first - (ends - counts)
        places: Rows = np.repeat(offsets, counts)
        return places + np.arange(len(places))

    def pages(self, row: int) -> Int32Array:
        """Return a copy of a row's page ids."""
        return np.array(self._pages[row, self.from_[row] : self.to[row]])

    def append(self, row: int, pages: Int32Array) -> None:
        end = int(self.to[row]) + len(pages)
        self._pages[row, self.to[row] : end] = pages
        self.to[row] = end

    @property
    def width(self) -> int:
        """Pages of the longest sequence."""
        return self._pages.shape[1]

    def place(self, row: int, first: int, pages: Sequence[int] | Int32Array) -> None:
        """Fill an empty row with its own pages. The first page is at position `first` of the sequence."""
        self._pages[row, first : first + len(pages)] = pages
        self.from_[row] = self._listed[row] = first
        self.to[row] = first + len(pages)

    def can_share(self, donor: int, length: int) -> bool:
        """Return True if a row still has every page that a token at position `length` attends to."""
        return bool(self.from_[donor] <= self.group.first_page_seen(length))

    def share(self, donor: int, row: int, length: int) -> tuple[int, int] | None:
        """Share the pages of the first `length` tokens of `donor` with an empty row.

        Returns the source and target of the page to copy; None if the last shared page is full.
        """
        first, full = self.group.first_page_seen(length), length // self.group.page_tokens
        pages = self._pages[donor, first:full].tolist()
        self._source.share(pages)
        copied = None
        if length % self.group.page_tokens:
            (own,) = self._source.take(1).tolist()
            copied = int(self._pages[donor, full]), own
            pages.append(own)
        self.place(row, first, pages)
        return copied

    def num_own_pages(self, row: int, length: int, most: int) -> int:
        """Return how many pages a fork of a row must own for up to `most` tokens. It shares the full pages of the first
        `length` tokens."""
        end = min(self.group.pages_for(most), int(self.to[row]))
        return max(0, end - max(length // self.group.page_tokens, int(self.from_[row])))

    def fork(self, row: int, new: int, length: int, own: Sequence[int]) -> list[tuple[int, int]]:
        """Share the full pages of the first `length` tokens of `row` with the empty row `new`, then append the pages
        `own`.

        Returns the source and target of each page to copy.
        """
        first = int(self.from_[row])
        full = max(length // self.group.page_tokens, first)
        shared = self._pages[row, first:full].tolist()
        self._source.share(shared)
        self.place(new, first, [*shared, *own])
        return list(zip(self._pages[row, full : full + len(own)].tolist(), own, strict=True))

    def cut(self, row: int, length: int) -> None:
        """Free the pages after a row's first `length` tokens."""
        end = min(max(self.group.pages_for(length), int(self.from_[row])), int(self.to[row]))
        pages = np.array(self._pages[row, end : self.to[row]])
        self.to[row] = end
        self._source.free(pages)

    def forget(self, row: int) -> None:
        """Empty a row without freeing its pages."""
        self.from_[row] = self.to[row] = self._listed[row] = 0

    def release(self, row: int) -> None:
        """Free every page of a row."""
        pages = self.pages(row)
        self.forget(row)
        self._source.free(pages)


class PrefixIndex:
    """Finds requests with a common prefix. Each block of tokens is hashed together with all earlier blocks.

    Tokens are hashed once, when a request is added. Different tokens may have equal hashes, so compare tokens before
    sharing pages.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._keys: dict[int, list[int]] = {}  # by request index
        self._indices: dict[int, dict[int, None]] = {}  # by key, in the order in which requests were added

    def add(self, req_index: int, tokens: Int32Array) -> None:
        """Add a request after all others."""
        key, keys, words = 0, self._keys.setdefault(req_index, []), tokens.tobytes()
        wide = self._block * tokens.itemsize
        for end in range(wide, len(words) + 1, wide):
            key = hash((key, words[end - wide : end]))
            keys.append(key)
            if (indices := self._indices.get(key)) is None:
                self._indices[key] = {req_index: None}
            else:
                indices[req_index] = None

    def remove(self, req_index: int) -> None:
        """Remove a request. Nothing happens if the request was not added."""
        for key in self._keys.pop(req_index, ()):
            if indices := self._indices.get(key):
                indices.pop(req_index, None)
                if not indices:
                    del self._indices[key]

    def find(self, req_index: int, most: int) -> tuple[int, list[int]]:
        """Return the length of the longest prefix that a request shares with others, and the requests among them that
        were added earlier. The length is in whole blocks, and at most `most`."""
        keys = self._keys[req_index][: most // self._block]
        # A request with this key also has all earlier keys.
        count = bisect.bisect_left(keys, True, key=lambda key: len(self._indices[key]) == 1)
        if not count:
            return 0, []
        return count * self._block, list(itertools.takewhile(req_index.__ne__, self._indices[keys[count - 1]]))


def common_prefix(a: Int32Array, b: Int32Array, most: int) -> int:
    """Return the length of the common prefix of two sequences, at most `most` tokens."""
    most = min(most, len(a), len(b))
    differ = a[:most] != b[:most]
    at = int(differ.argmax()) if most else 0
    return at if most and differ[at] else most
