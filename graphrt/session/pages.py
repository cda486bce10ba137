"""The pages of a session's requests, which are allocated before the steps need them, and freed after a window has
passed them."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from graphrt.batch import Int32Array
from graphrt.cache.page_allocator import PageAllocator, PageLease
from graphrt.cache.tables import Tables
from graphrt.kernels.cache.copy import Pages
from graphrt.kernels.checks import check_ints, check_sequence, shown
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.metadata.step_inputs import PAGE_COUNT, PAGE_FIELDS, PAGE_FIRST, PAGE_START
from graphrt.runtime import Runtime
from graphrt.session.requests import Ids
from graphrt.spec import KVCacheSpec

_AHEAD = 256
"""Tokens for which requests get pages in advance, if these take at most half of the free pages, otherwise a quarter of
this number, and so on. A step that lists pages takes fifteen times as much host time as other steps."""


class ExternalPages:
    """The pages of a pool that the caller's block manager allocates. Counts the requests that use each page.

    `free` collects unused pages for `pop_freed`. A freed page may not be appended again before it is popped.
    """

    num_free = 0  # only the caller adds pages to requests

    def __init__(self, num_pages: int, null_page: int) -> None:
        self.num_pages, self.null_page = num_pages, null_page
        self._users = Counter[int]()
        self._freed: dict[int, None] = {}

    def take(self, count: int) -> npt.NDArray[np.int32]:
        assert not count, "the session checks num_free first"
        return np.empty(0, np.int32)

    def share(self, pages: Pages) -> None:
        self._users.update(np.asarray(pages).tolist())

    def free(self, pages: Pages) -> None:
        for page in np.asarray(pages).tolist():
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self._freed[page] = None

    def check_new(self, pages: Int32Array) -> None:
        """Raise ShapeError if a page is in use, was not popped, or is given twice."""
        count = Counter(pages.tolist())
        if again := [page for page in count if count[page] > 1 or page in self._users or page in self._freed]:
            raise ShapeError(
                f"pages: {shown(again)} are in use by a request of the session; call pop_freed_pages() first"
            )

    def pop_freed(self) -> list[int]:
        """Return the pages that were freed since the last call."""
        freed, self._freed = self._freed, {}
        return list(freed)


def _page_ids(given: object, pools: Sequence[PageLease | ExternalPages], of: str) -> list[Int32Array]:
    """Return the checked page ids that a caller passes, as one list per KV group or pool."""
    lists = check_sequence("pages", given, len(pools), of=f"lists of page ids, one per {of}")
    found = []
    for pool, values in zip(pools, lists, strict=True):
        last, null = pool.num_pages - 1, pool.null_page
        ids = check_ints("pages", values, 0, last, advice="pass pages of the cache", error=ShapeError)
        if null in ids:
            raise ShapeError(f"pages: expected no null page ({null}), got {shown(ids.tolist())}; remove it")
        found.append(ids.astype(np.int32))
    return found


def pages_needed(groups: Sequence[KVCacheSpec], length: int, new_tokens: int) -> list[int]:
    """Return the maximum pages of each pool for a sequence of `length` tokens in chunks of `new_tokens`. Groups with a
    window need pages for the window and a chunk."""
    return by_pool(groups, (group.most_pages(length, new_tokens) for group in groups))


def by_pool(groups: Sequence[KVCacheSpec], counts: Iterable[int]) -> list[int]:
    """Return the page counts of each pool, from the page counts of each KV group."""
    sums = [0] * len({group.pool for group in groups})
    for group, count in zip(groups, counts, strict=True):
        sums[group.pool] += int(count)
    return sums


def check_pages(
    name: str, length: int, groups: Sequence[KVCacheSpec], pools: Sequence[PageAllocator | PageLease | ExternalPages]
) -> None:
    """Raise CapacityError if the pools are too small for this sequence alone, prefilled one token at a time."""
    needs = pages_needed(groups, length, 1)
    for index, (need, pool) in enumerate(zip(needs, pools, strict=True)):
        if need > (pages := pool.num_pages - 1):
            of_pool = f" of pool {index}" if len(needs) > 1 else ""
            raise CapacityError(
                f"{name}: {length} tokens need {need} pages{of_pool}, and the cache has {pages}; raise num_pages"
            )


class SessionPages:
    """The page tables of a session, one per KV group, with one row per request index."""

    def __init__(
        self, groups: Sequence[KVCacheSpec], pools: Sequence[PageLease | ExternalPages], num_indices: int, longest: int
    ) -> None:
        self._groups, self._pools = groups, pools
        self._external = [pool for pool in pools if isinstance(pool, ExternalPages)]
        self.tables = [Tables(group, pools[group.pool], num_indices, longest) for group in groups]

    @property
    def are_external(self) -> bool:
        """True if the caller's block manager allocates the pages."""
        return bool(self._external)

    def free_passed(self, ids: Ids, lengths: Ids) -> None:
        for table in self.tables:
            table.free_passed(ids, lengths)

    def room(self, ids: Ids) -> Ids:
        """Return the number of tokens that each request has pages for."""
        rooms = (table.to[ids] * table.group.page_tokens for table in self.tables)
        return functools.reduce(np.minimum, rooms)

    def reserve(self, ids: Ids, lengths: Ids, limits: Ids, steps: int) -> None:
        """Allocate pages for the next steps of requests that have up to `lengths` tokens, and more if many are free. If
        too few are free, some requests wait for pages.

        Raises: CapacityError: if no request has a page for its next token.
        """
        ahead = 0 if self.are_external else _AHEAD
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
        """Allocate pages for `lengths` tokens, and return the requests that got them."""
        if self._grow(ids, lengths):
            return ids
        have = [self._grow(ids[i : i + 1], lengths[i : i + 1]) for i in range(len(ids))]
        return ids[np.array(have, np.bool_)]

    def fitting(self, ids: Ids, start: int, count: int) -> int:
        """Allocate pages for the next `count` tokens of one request, or fewer, and return how many tokens fit."""
        while count and not self._grow(ids, ids * 0 + start + count):
            # Reduce the count to the last token before a page boundary of some group.
            sizes = (table.group.page_tokens for table in self.tables)
            count = max(0, max((start + count - 1) // size * size for size in sizes) - start)
        return count

    def check_prompt(self, length: int) -> None:
        """Raise CapacityError if the cache is too small for a prompt."""
        check_pages("prompt", length, self._groups, self._pools)

    def missing(self, ids: Ids, lengths: Ids) -> list[int]:
        """Return the number of additional pages of each pool that requests need for `lengths` tokens."""
        return by_pool(self._groups, (table.more(ids, lengths).sum() for table in self.tables))

    def _grow(self, ids: Ids, lengths: Ids, spare: int = 1) -> bool:
        """Allocate pages for `lengths` tokens. Return False, with nothing allocated, if fewer than `spare` times the
        needed pages are free."""
        more = [table.more(ids, lengths) for table in self.tables]
        needs = by_pool(self._groups, (pages.sum() for pages in more))
        if any(need * spare > pool.num_free for need, pool in zip(needs, self._pools, strict=True)):
            return False
        if any(needs):
            for table, pages in zip(self.tables, more, strict=True):
                table.grow_by(ids, pages)
        return True

    def none_left(self) -> CapacityError:
        """Return the error to raise if no request of a step has a page for its next token."""
        if self.are_external:
            return CapacityError(
                "run: no request has a page for its next token; call append_pages() for a running request"
            )
        free = " + ".join(str(pool.num_free) for pool in self._pools)
        return CapacityError(
            f"run: no request has a page for its next token, and {free} pages are free; collect(), then release() a "
            f"finished request, or preempt a request"
        )

    def submitted(self, ids: Ids) -> None:
        for table in self.tables:
            table.submitted(ids)

    def listed(self, ids: Ids) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return the pages that no launch has listed, as first_pages, page_indptr and page_ids of a Batch."""
        firsts, counts, pages = zip(*(table.list_new(ids) for table in self.tables), strict=True)
        page_indptr = np.zeros(len(self.tables) * len(ids) + 1, np.int32)
        np.cumsum(np.concatenate(counts), out=page_indptr[1:])
        return np.concatenate(firsts), page_indptr, np.concatenate(pages)

    def delta(
        self, ids: Ids, continuing: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], Int32Array] | tuple[None, None]:
        """Return the same pages as lists and pages of a BatchDelta. A request that does not continue lists no pages,
        because the device would skip them."""
        lists, every, start = np.empty((len(self.tables), PAGE_FIELDS, len(ids)), np.int32), [], 0
        for fields, table in zip(lists, self.tables, strict=True):
            fields[PAGE_FIRST], counts, pages = table.list_new(ids, continuing)
            fields[PAGE_COUNT], fields[PAGE_START] = counts, counts.cumsum() - counts + start
            start += len(pages)
            every.append(pages)
        return (lists.reshape(-1, len(ids)), np.concatenate(every)) if start else (None, None)

    def fork_needs(self, req_index: int, length: int, most: int) -> list[int]:
        """Return how many pages of each pool a fork needs, if its request has `length` to `most` tokens."""
        return by_pool(self._groups, (table.num_own_pages(req_index, length, most) for table in self.tables))

    def check_fork(self, req_index: int, length: int, most: int, given: object) -> list[Int32Array]:
        """Check the pages that the caller passes for a fork, and return them by pool; empty without external pages."""
        needs = self.fork_needs(req_index, length, most)
        if self._external:
            pages = _page_ids([[]] * len(needs) if given is None else given, self._pools, "pool")
            for need, ids in zip(needs, pages, strict=True):
                if len(ids) != need:
                    raise CapacityError(
                        f"fork: expected {need} pages in pages=, got {len(ids)}; pass as many as fork_needs() returns"
                    )
            for external, ids in zip(self._external, pages, strict=True):
                external.check_new(ids)
            return pages
        if given is not None:
            raise ConfigError("pages: this session allocates its pages itself; omit pages=")
        for need, pool in zip(needs, self._pools, strict=True):
            if need > pool.num_free:
                raise CapacityError(
                    f"fork: expected {need} free pages, got {pool.num_free}; release() finished requests"
                )
        return []

    def fork(
        self, req_index: int, new: int, length: int, most: int, given: Sequence[Int32Array]
    ) -> Iterator[tuple[int, tuple[list[int], list[int]]]]:
        """Share the full pages of the first `length` tokens of a request with a new request, and add the new request's
        own pages.

        Yields by KV group the source and target pages to copy. `given` is what `check_fork` returned.
        """
        left = [ids.tolist() for ids in given]
        for external, ids in zip(self._external, left, strict=True):
            external.share(ids)
        for group, table in enumerate(self.tables):
            count, pool_index = table.num_own_pages(req_index, length, most), table.group.pool
            if left:
                own, left[pool_index] = left[pool_index][:count], left[pool_index][count:]
            else:
                own = self._pools[pool_index].take(count).tolist()
            if pairs := table.fork(req_index, new, length, own):
                sources, targets = map(list, zip(*pairs, strict=True))
                yield group, (sources, targets)

    def can_share(self, donor: int, length: int) -> bool:
        return all(table.can_share(donor, length) for table in self.tables)

    def share(self, donor: int, req_index: int, length: int) -> Iterator[tuple[int, tuple[list[int], list[int]]]]:
        """Share the pages of the first `length` tokens of `donor` with a request; yield pages to copy, see `fork`."""
        for group, table in enumerate(self.tables):
            if (pair := table.share(donor, req_index, length)) is not None:
                yield group, ([pair[0]], [pair[1]])

    def check_append(self, req_index: int, given: object) -> list[Int32Array]:
        """Check the pages that the caller appends to a request, and return them by KV group.

        given   one list per group, or the list of the only group
        """
        pools = [self._pools[table.group.pool] for table in self.tables]
        pages = _page_ids([given] if len(pools) == 1 else given, pools, "KV group")
        for group, (table, more) in enumerate(zip(self.tables, pages, strict=True)):
            room = table.width - int(table.to[req_index])
            if len(more) > room:
                raise CapacityError(
                    f"pages: expected at most {room} more pages of KV group {group}, got {len(more)}; raise "
                    f"max_seq_len, or "
                    "append fewer pages"
                )
        for number, pool in enumerate(self._external):
            of_pool = [ids for ids, group in zip(pages, self._groups, strict=True) if group.pool == number]
            pool.check_new(np.concatenate(of_pool))
        return pages

    def append(self, req_index: int, pages: Sequence[Int32Array]) -> None:
        for table, more in zip(self.tables, pages, strict=True):
            self._external[table.group.pool].share(more)
            table.append(req_index, more)

    def pop_freed(self) -> list[list[int]]:
        """Return the pages of each pool that were freed since the last call."""
        return [pool.pop_freed() for pool in self._external]

    def pages(self, req_index: int) -> list[Int32Array]:
        return [table.pages(req_index) for table in self.tables]

    def place(self, req_index: int, first_places: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Allocate `counts` pages of each KV group for a request without pages, starting at these positions."""
        pages = []
        for table, first, count in zip(self.tables, first_places, counts, strict=True):
            pages.append(self._pools[table.group.pool].take(count).tolist())
            table.place(req_index, first, pages[-1])
        return pages

    def cut(self, req_index: int, length: int) -> None:
        for table in self.tables:
            table.cut(req_index, length)

    def forget(self, req_index: int) -> None:
        for table in self.tables:
            table.forget(req_index)

    def release(self, req_index: int) -> None:
        for table in self.tables:
            table.release(req_index)


class Ledger:
    """The pages and request indices that a session holds, as one lease per pool, or none with external pages.

    A page or an index is taken and recorded in one step, which no exception in a signal handler can split. So `close`
    returns everything, no matter where a call was interrupted, and can itself be repeated.
    """

    def __init__(self, runtime: Runtime, *, external_pages: bool) -> None:
        self.pages = () if external_pages else tuple(map(PageLease, runtime.allocators))
        self._free_indices = runtime.free_req_indices
        self._left = runtime.manager.request_tables.left
        self._indices: list[int] = []

    def check_index(self) -> None:
        if not self._free_indices:
            raise CapacityError("requests: no request index is free; release() a request, or raise max_num_reqs")

    def take_index(self) -> int:
        """Take a free request index."""
        self._indices.extend(map(self._free_indices.pop, (-1,)))  # one C call moves the index
        return self._indices[-1]

    def return_index(self, req_index: int) -> None:
        """Return a request index. Its state on the device is cleared before a step outside of sessions uses it."""
        self._left.add(req_index)
        self._free_indices.extend(map(self._indices.pop, (self._indices.index(req_index),)))

    def close(self) -> None:
        """Return all pages and request indices. May be called twice."""
        for lease in self.pages:
            lease.close()
        self._left.update(self._indices)
        self._free_indices.extend(map(self._indices.pop, [-1] * len(self._indices)))

    def drop(self) -> None:
        """Return all pages and request indices of a garbage-collected session. Later steps run after its launches."""
        held = sum(lease.num_held for lease in self.pages)
        if held or self._indices:
            warnings.warn(
                f"DecodeSession: dropped with {len(self._indices)} requests and {held} pages; close() it, or use it in "
                "a `with` block",
                ResourceWarning,
                stacklevel=2,
            )
        self.close()
