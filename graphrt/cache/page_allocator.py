"""The page allocator of a pool, and leases that record the pages of one holder."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from graphrt.kernels.cache.copy import Pages
from graphrt.kernels.checks import check_int, check_ints, shown
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.spec import MAX_PAGES


class PageAllocator:
    """Allocates page ids with reference counts. Host-side only; the null page is never allocated.

    Pages are reference counted: `allocate` returns pages with one owner each, `share` adds an owner (for a common
    prompt prefix, which is then read-only), and `free` removes an owner. A page without owners is free.

    Each call changes the allocator completely or not at all, even if a signal handler, a finalizer or another thread
    interrupts it. A call computes the new state, and stores it only if the old state has not changed since. Python runs
    no call instruction between the comparison and the store.

    Raises: ConfigError: if a page has no owner, or a page id is not an int. An error changes nothing.
    """

    def __init__(self, num_pages: int, null_page: int = 0) -> None:
        self.num_pages = check_int(
            "PageAllocator.num_pages", num_pages, 2, MAX_PAGES, advice="pass the cache's num_pages"
        )
        advice = "pass KVCache.null_page"
        self.null_page = check_int("PageAllocator.null_page", null_page, 0, self.num_pages - 1, advice=advice)
        # A stack, so that the pages freed last are allocated first. These may still be in the L2 cache.
        self._freed = np.empty(0, np.int32)
        self._owners = np.zeros(min(self.num_pages, 1024), np.int32)  # by page; grows with `untouched`
        # Pages on the stack, the first page that was never allocated, and pages with owners. A new tuple per change.
        self._state = (0, 0, 0)

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated now."""
        return self.num_pages - 1 - self._state[2]

    def owners(self, page: int) -> int:
        """Return the number of owners of a page; 0 if it is free."""
        page = check_int("page", page, 0, self.num_pages - 1, advice="pass a page of the cache")
        return int(self._owners[page]) if page < len(self._owners) else 0

    def owners_of(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the number of owners of each page. Unlike `owners`, does not check that pages are in range."""
        owners = self._owners
        known = pages < len(owners)
        return owners[pages] if known.all() else np.where(known, owners[np.where(known, pages, 0)], 0)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages with one owner each.

        Raises: CapacityError: if too few pages are free. An error changes nothing.
        """
        pages: list[int] = self.take(count).tolist()
        return pages

    def take(self, count: int, held: npt.NDArray[np.int32] | None = None) -> npt.NDArray[np.int32]:
        """Like `allocate`, but return an array [count].

        held   [num_pages] int32, number of references of the holder to each page; updated with the allocator, see
        PageLease
        """
        count = check_int("count", count, 0, advice="pass the number of pages")
        while True:
            state, owners = self._state, self._owners
            num_freed, untouched, num_owned = state
            if count > (free := self.num_pages - 1 - num_owned):
                raise CapacityError(
                    f"pages: {shown(count)} requested, but only {free} of {self.num_pages - 1} are free; free "
                    f"finished sequences"
                )
            again = min(count, num_freed)
            pages = np.empty(count, np.int64)  # as an index, twice as fast as int32
            pages[:again] = self._freed[num_freed - again : num_freed][::-1]
            if again < count:
                first, untouched = untouched, untouched + count - again
                pages[again:] = np.arange(first, untouched)
                if first <= self.null_page < untouched:
                    pages[again + self.null_page - first :] += 1
                    untouched += 1
            while untouched > len(owners):
                owners = np.concatenate((owners, np.zeros_like(owners)))
            found, new = pages.astype(np.int32), (num_freed - again, untouched, num_owned + count)
            if self._state is state:  # no call instruction from here on
                self._state, self._owners = new, owners
                owners[pages] = 1
                if held is not None:
                    held[pages] = 1
                return found

    def share(self, pages: Pages, held: npt.NDArray[np.int32] | None = None) -> None:
        """Add an owner to each page. `held` as in `take`. Raises: ConfigError: if a page is free."""
        ids, times = np.unique(self._owned(pages, "share"), return_counts=True)
        times = times.astype(np.int32)
        num_freed, untouched, num_owned = self._state
        self._state = (num_freed, untouched, num_owned)  # no call instruction from here on
        self._owners[ids] += times
        if held is not None:
            held[ids] += times

    def free(self, pages: Pages, held: npt.NDArray[np.int32] | None = None) -> None:
        """Remove an owner from each page. `held` as in `take`. Raises: ConfigError: if a page has too few owners."""
        found = self._owned(pages, "free")
        ids, places, times = np.unique(found, return_inverse=True, return_counts=True)
        times = times.astype(np.int32)
        while True:
            state, stack = self._state, self._freed
            num_freed, untouched, num_owned = state
            left = self._owners[ids] - times
            if (left < 0).any():  # pages listed more often than they have owners
                self._refuse("free", int(ids[left.argmin()]))
            freed = np.array(list(dict.fromkeys(found[left[places] == 0].tolist())), np.int32)
            end = num_freed + len(freed)
            if end > len(stack):
                stack = np.concatenate((stack, np.empty(end, np.int32)))
            new = (end, untouched, num_owned - len(freed))
            if self._state is state:  # no call instruction from here on
                self._state, self._freed = new, stack
                stack[num_freed:end] = freed
                self._owners[ids] = left
                if held is not None:
                    held[ids] -= times
                return

    def _owned(self, pages: Pages, verb: str) -> npt.NDArray[np.int64]:
        """Return the pages as an array. Raises: ConfigError: unless each has an owner."""
        advice = "pass allocated pages"
        found = check_ints(f"{verb}: pages", pages, 0, self.num_pages - 1, advice=advice, error=ConfigError)
        if len(found) and not (have := self.owners_of(found)).all():
            self._refuse(verb, int(found[have.argmin()]))
        return found

    def _refuse(self, verb: str, page: int) -> NoReturn:
        raise ConfigError(
            f"{verb}: page {page} has {self.owners(page)} owners, fewer than listed; pass each page once per owner"
        )


class PageLease:
    """The pages of one holder. It has the methods of the allocator; `close` frees all pages that it still owns.

    A page is allocated and recorded in the lease in one uninterruptible step. So `close` does not depend on earlier
    calls, and can be repeated if it is interrupted.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._held = np.zeros(allocator.num_pages, np.int32)
        self.num_pages, self.null_page = allocator.num_pages, allocator.null_page

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_held(self) -> int:
        """Number of page references that `close` would free."""
        return int(self._held.sum())

    def owners_of(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return self._allocator.owners_of(pages)

    def take(self, count: int) -> npt.NDArray[np.int32]:
        return self._allocator.take(count, self._held)

    def share(self, pages: Pages) -> None:
        self._allocator.share(pages, self._held)

    def free(self, pages: Pages) -> None:
        self._allocator.free(pages, self._held)

    def close(self) -> None:
        """Free every page of the lease, once per reference."""
        pages = self._held.nonzero()[0]
        if len(pages):
            self._allocator.free(np.repeat(pages, self._held[pages]), self._held)
