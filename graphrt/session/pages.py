"""The pages of a session's rows: allocated ahead of their steps, given back behind windows, listed once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from graphrt.batch import Int32Array
from graphrt.cache.kv_cache import PageAllocator
from graphrt.cache.tables import Tables
from graphrt.kernels.cache.copy import Pages
from graphrt.kernels.checks import check_ints, check_sequence, shown
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.metadata.step_inputs import PAGE_COUNT, PAGE_FIELDS, PAGE_FIRST, PAGE_START
from graphrt.spec import KVCacheSpec

Ids = npt.NDArray[np.int64]

_AHEAD = 256
"""Tokens that rows have pages for ahead of their steps, where these take at most half of the free pages; else a quarter
of it, and so on. So a step in 256 has to list some, and takes the host fifteen times as long as the others."""


class CallersPages(PageAllocator):
    """Stands where a caller hands out the pages itself: it has none to give, but for those that it was just stocked
    with, and keeps what rows give back. A page is a row's until the caller takes it back."""

    def __init__(self, num_pages: int, null_page: int) -> None:
        super().__init__(num_pages, null_page)
        self._stock: list[int] = []
        self._rows = Counter[int]()  # how many rows have each page
        self._back = Counter[int]()  # how many of these gave it back, and the caller did not take it yet

    @property
    def num_free(self) -> int:
        return len(self._stock)

    def stock(self, pages: Sequence[int]) -> None:
        """Pages for the next call alone."""
        self._stock = list(pages)

    def take(self, count: int) -> npt.NDArray[np.int32]:
        assert count <= len(self._stock), "as many as num_free says"
        pages, self._stock = self._stock[:count], self._stock[count:]
        self.share(pages)
        return np.array(pages, np.int32)

    def share(self, pages: Pages) -> None:
        """One more row has these."""
        self._rows.update(np.asarray(pages).tolist())

    def check_new(self, pages: Int32Array) -> None:
        """Raise ShapeError for pages that are given twice: a row would overwrite another's tokens, or its own."""
        count = Counter(pages.tolist())
        if twice := [page for page in count if count[page] > 1 or self._rows[page]]:
            raise ShapeError(
                f"pages: expected pages that no row has, got {shown(twice)} again; pass others, or take_pages() first"
            )

    def free(self, pages: Pages) -> None:
        self._back.update(np.asarray(pages).tolist())

    def take_back(self) -> list[int]:
        """What the last row that had it gave back, once."""
        back, self._back = self._back, Counter()
        self._rows -= back
        return [page for page in back if page not in self._rows]


def _page_ids(given: object, allocators: Sequence[PageAllocator], of: str) -> list[Int32Array]:
    """Page ids that a caller hands out, a list of each KV group or pool, whose allocators are given.

    Raises: ShapeError for what are no pages of the cache.
    """
    lists = check_sequence("pages", given, len(allocators), of=f"lists of page ids, one per {of}")
    found = []
    for allocator, values in zip(allocators, lists, strict=True):
        last, null = allocator.num_pages - 1, allocator.null_page
        ids = check_ints("pages", values, 0, last, advice="pass pages of the cache", error=ShapeError)
        if null in ids:
            raise ShapeError(
                f"pages: expected other ones than the null page {null}, got {shown(ids.tolist())}; it is no sequence's"
            )
        found.append(ids.astype(np.int32))
    return found


def pages_needed(groups: Sequence[KVCacheSpec], length: int, new_tokens: int) -> list[int]:
    """Pages of each pool that a sequence of `length` tokens owns at most, in chunks of `new_tokens`. Of windowed groups
    these are those of the window and of a chunk."""
    needs = [0] * len({group.pool for group in groups})
    for group in groups:
        needs[group.pool] += group.most_pages(length, new_tokens)
    return needs


def check_pages(name: str, length: int, groups: Sequence[KVCacheSpec], allocators: Sequence[PageAllocator]) -> None:
    """Raise CapacityError for a sequence that has not pages enough even alone, in chunks of one token."""
    needs = pages_needed(groups, length, 1)
    for pool, (need, allocator) in enumerate(zip(needs, allocators, strict=True)):
        if need > (pages := allocator.num_pages - 1):
            of_pool = f" of pool {pool}" if len(needs) > 1 else ""
            raise CapacityError(
                f"{name}: expected at most {pages} pages{of_pool}, got a need of {need} for {length} tokens; shorten "
                "it, or raise num_pages"
            )


class SessionPages:
    """A table per KV group, with a slot per row id."""

    def __init__(
        self, groups: Sequence[KVCacheSpec], allocators: Sequence[PageAllocator], ids: int, longest: int
    ) -> None:
        self._allocators = allocators
        self._foreign = [allocator for allocator in allocators if isinstance(allocator, CallersPages)]
        self._tables = [Tables(group, allocators[group.pool], ids, longest) for group in groups]

    def give_back(self, ids: Ids, lengths: Ids) -> None:
        """Free the pages that windows have left behind, of rows that have so many tokens for sure."""
        for table in self._tables:
            table.give_back(ids, lengths)

    def room(self, ids: Ids) -> Ids:
        """Tokens that each row has pages for."""
        rooms = (table.to[ids] * table.group.page_size for table in self._tables)
        return functools.reduce(np.minimum, rooms)

    def reserve(self, ids: Ids, lengths: Ids, limits: Ids, steps: int) -> None:
        """Pages for the next steps of rows that have up to `lengths` tokens, and for some more where pages are plenty.
        Where they are not, rows without a page wait.

        Raises: CapacityError where no row has a page for its next token.
        """
        ahead = 0 if self._foreign else _AHEAD
        while ahead > steps:
            if self._grow(ids, np.minimum(lengths + ahead, limits), spare=2):
                return
            ahead //= 4
        while True:
            if self._grow(ids, np.minimum(lengths + steps, limits)):
                return
            if steps == 1:
                break
            steps //= 2
        if not len(self.with_pages(ids, np.minimum(lengths + 1, limits))):
            raise self.none_left()

    def with_pages(self, ids: Ids, lengths: Ids) -> Ids:
        """Those of some rows that have pages for so many tokens, which they get here where there are any."""
        if self._grow(ids, lengths):
            return ids
        have = [self._grow(ids[i : i + 1], lengths[i : i + 1]) for i in range(len(ids))]
        return ids[np.array(have, np.bool_)]

    def fitting(self, ids: Ids, start: int, count: int) -> int:
        """How many of the next `count` tokens of one row there are pages for, which it gets."""
        while count and not self._grow(ids, ids * 0 + start + count):
            # Down to the last token before a page of some group.
            sizes = (table.group.page_size for table in self._tables)
            count = max(0, max((start + count - 1) // size * size for size in sizes) - start)
        return count

    def check_prompt(self, length: int) -> None:
        """Raise CapacityError for a prompt that has not pages enough even alone."""
        check_pages("prompt", length, [table.group for table in self._tables], self._allocators)

    def missing(self, ids: Ids, lengths: Ids) -> list[int]:
        """Pages of each pool that rows need to have so many tokens, beside those that they have."""
        needs = [0] * len(self._allocators)
        for table in self._tables:
            needs[table.group.pool] += table.missing(ids, lengths)
        return needs

    def _grow(self, ids: Ids, lengths: Ids, spare: int = 1) -> bool:
        """Pages for rows to have so many tokens; False, with nothing allocated, where fewer are free than `spare` times
        as many."""
        needs = [0] * len(self._allocators)
        more = [table.more(ids, lengths) for table in self._tables]
        for table, pages in zip(self._tables, more, strict=True):
            needs[table.group.pool] += int(pages.sum())
        if any(need * spare > allocator.num_free for need, allocator in zip(needs, self._allocators, strict=True)):
            return False
        if any(needs):
            for table, pages in zip(self._tables, more, strict=True):
                table.grow_by(ids, pages)
        return True

    def none_left(self) -> CapacityError:
        """The error of a step in which no row has a page."""
        if self._foreign:
            return CapacityError(
                "run: expected a page for the next token of a row, got none; append_pages() to a row that goes on"
            )
        free = " + ".join(str(allocator.num_free) for allocator in self._allocators)
        return CapacityError(
            f"run: expected a page for the next token of a row, got {free} free pages; collect(), and release() a row "
            "that has ended, or one that is to give way"
        )

    def submitted(self, ids: Ids) -> None:
        """What `listed` or `delta` gave for these rows is in a launch."""
        for table in self._tables:
            table.submitted(ids)

    def listed(self, ids: Ids) -> tuple[Int32Array, Int32Array, Int32Array]:
        """The pages that no launch has listed, as a Batch takes them: first_pages, page_indptr, page_ids."""
        firsts, counts, pages = zip(*(table.list_new(ids) for table in self._tables), strict=True)
        page_indptr = np.zeros(len(self._tables) * len(ids) + 1, np.int32)
        np.cumsum(np.concatenate(counts), out=page_indptr[1:])
        return np.concatenate(firsts), page_indptr, np.concatenate(pages)

    def delta(
        self, ids: Ids, going_on: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], Int32Array] | tuple[None, None]:
        """The same as BatchDelta takes them: the lists of all rows, and the pages. A row that does not go on lists
        none: the
        device passes it over, and would lose them."""
        lists, every, start = np.empty((len(self._tables), PAGE_FIELDS, len(ids)), np.int32), [], 0
        for fields, table in zip(lists, self._tables, strict=True):
            fields[PAGE_FIRST], counts, pages = table.list_new(ids, going_on)
            fields[PAGE_COUNT], fields[PAGE_START] = counts, counts.cumsum() - counts + start
            start += len(pages)
            every.append(pages)
        return (lists.reshape(-1, len(ids)), np.concatenate(every)) if start else (None, None)

    def check_fork(self, req_index: int, length: int, most: int, given: object) -> list[Int32Array]:
        """The pages that a caller gives, by pool, to fork a row as `fork_needs`; none where the session owns its pages.
        Raises: CapacityError for too few, ConfigError or ShapeError for wrong ones."""
        needs = self.fork_needs(req_index, length, most)
        if self._foreign:
            pages = _page_ids([[]] * len(needs) if given is None else given, self._allocators, "pool")
            for need, ids in zip(needs, pages, strict=True):
                if len(ids) != need:
                    raise CapacityError(
                        f"fork: expected {need} pages in pages=, got {len(ids)}; give as many as fork_needs() says"
                    )
            for pool, ids in zip(self._foreign, pages, strict=True):
                pool.check_new(ids)
            return pages
        if given is not None:
            raise ConfigError("pages: expected none in a session that owns its pages, got some; leave them out")
        for need, allocator in zip(needs, self._allocators, strict=True):
            if need > allocator.num_free:
                raise CapacityError(
                    f"fork: expected {need} free pages, got {allocator.num_free}; release() rows that have ended"
                )
        return []

    def fork(
        self, req_index: int, new: int, length: int, most: int
    ) -> Iterator[tuple[int, tuple[list[int], list[int]]]]:
        """Give a new row the full pages of another's first `length` tokens, and pages of its own behind them: by KV
        group, pages to copy and where to, of those that its first `most` tokens may lie in."""
        for group, table in enumerate(self._tables):
            if pairs := table.fork(req_index, new, length, most):
                sources, own = map(list, zip(*pairs, strict=True))
                yield group, (sources, own)

    def can_share(self, donor: int, length: int) -> bool:
        """Whether a row still has all pages that a sequence sees that goes on behind its first `length` tokens."""
        return all(table.can_share(donor, length) for table in self._tables)

    def share(self, donor: int, req_index: int, length: int) -> Iterator[tuple[int, tuple[list[int], list[int]]]]:
        """Give a row without pages what another has of its first `length` tokens: by KV group, pages to copy and where
        to, as the last page may be partly filled."""
        for group, table in enumerate(self._tables):
            if (pair := table.share(donor, req_index, length)) is not None:
                yield group, ([pair[0]], [pair[1]])

    def append(self, req_index: int, given: object) -> None:
        """Give a row more pages of each KV group: a list of each, or of the only one its pages.

        Raises: ShapeError for what are no pages of the cache or some row's already, CapacityError where a table has no
        room; nothing has changed then.
        """
        allocators = [self._allocators[table.group.pool] for table in self._tables]
        pages = _page_ids([given] if len(allocators) == 1 else given, allocators, "KV group")
        for group, (table, more) in enumerate(zip(self._tables, pages, strict=True)):
            room = table.width - int(table.to[req_index])
            if len(more) > room:
                raise CapacityError(
                    f"pages: expected at most {room} more of KV group {group}, where the longest sequence has "
                    f"{table.width}, got {len(more)}; a row needs no pages beyond its longest"
                )
        of_pools: list[list[Int32Array]] = [[] for _ in self._foreign]
        for table, more in zip(self._tables, pages, strict=True):
            of_pools[table.group.pool].append(more)
        for pool, lists in zip(self._foreign, of_pools, strict=True):
            pool.check_new(np.concatenate(lists))
        for table, more in zip(self._tables, pages, strict=True):
            self._foreign[table.group.pool].share(more)
            table.append(req_index, more)

    def fork_needs(self, req_index: int, length: int, most: int) -> list[int]:
        """Pages of each pool that a fork of a row needs which has `length` tokens for sure, and `most` at most."""
        needs = [0] * len(self._allocators)
        for table in self._tables:
            needs[table.group.pool] += table.own_pages(req_index, length, most)
        return needs

    def pages(self, req_index: int) -> list[Int32Array]:
        """A copy of a row's page ids, by KV group."""
        return [table.pages(req_index) for table in self._tables]

    def first_places(self, req_index: int) -> list[int]:
        """Where a row's pages begin in its sequence, by KV group."""
        return [int(table.from_[req_index]) for table in self._tables]

    def place(self, req_index: int, first_places: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Give a row without pages so many of each KV group, from these places of its sequence on: the pages."""
        pages = []
        for table, first, count in zip(self._tables, first_places, counts, strict=True):
            pages.append(self._allocators[table.group.pool].allocate(count))
            table.place(req_index, first, pages[-1])
        return pages

    def cut(self, req_index: int, length: int) -> None:
        """Free the pages behind a row's first `length` tokens. The device must not know of them any more."""
        for table in self._tables:
            table.cut(req_index, length)

    def forget(self, req_index: int) -> None:
        """Empty a row whose pages somebody else frees."""
        for table in self._tables:
            table.forget(req_index)

    def release(self, req_index: int) -> None:
        """Free every page of a row."""
        for table in self._tables:
            table.release(req_index)
