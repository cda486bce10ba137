"""Host memory for the KV pages of preempted sequences, copied on side streams while steps continue."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphrt.cache.kv_cache import KVCache
from graphrt.cache.page_allocator import PageAllocator, PageLease
from graphrt.kernels.cache.copy import PagePacker, Pages, check_distinct
from graphrt.kernels.checks import check_instance, check_int, check_ints, check_sequence
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError

_STAGED_BYTES = 8 << 20
"""Bytes of each of the two staging buffers. Longer copies over PCIe delay concurrent decode steps more: 5.3 % for
copies of 32 MB, 2.9 % for 8 MB."""

PageIds = npt.NDArray[np.int64]

_Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Bytes of a staging buffer, and the host memory that they are copied to or from."""


@dataclass(eq=False, slots=True)
class SwappedPages:
    """Pages of a sequence in a SwapSpace. `swap_out` returns them; pass them to `swap_in` or `drop` once.

    counts   number of pages of each KV group
    """

    counts: tuple[int, ...]
    _extents: list[Extent]
    _space: SwapSpace | None  # None after swap_in or drop


class SwapArrival:
    """Pages that are being copied back to the device. Steps may read them after `wait()`."""

    def __init__(self, event: torch.cuda.Event | None, stream: torch.cuda.Stream | None) -> None:
        self._event, self._stream = event, stream

    def done(self) -> bool:
        """Return whether the copy has finished, without waiting."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Make later work on the stream of the steps wait for the pages. The host does not wait."""
        if self._event is not None:
            assert self._stream is not None, "an event belongs to a stream"
            self._stream.wait_event(self._event)


class SwapSpace:
    """Pinned host memory for the KV pages of preempted sequences.

    The pages of a sequence are copied to the host and freed, and later copied back to newly allocated pages:

        swapped = space.swap_out([pages_of_group_0, pages_of_group_1])
        ...
        arrival = space.swap_in(swapped, [allocator.allocate(n) for n in swapped.counts])
        arrival.wait()                                          # then submit the step that reads them

    No call blocks the host. Copies run on two side streams, through two staging buffers on the device, after all steps
    submitted so far. On CPU, the same calls copy immediately.

    kv_cache     the cache that contains the pages
    allocators   the page allocator of each pool. `swap_out` takes over one reference to each page. `collect` and
                 `reclaim` free this reference after the copy
    nbytes       bytes of host memory
    stream       the stream that steps run on; None: the current stream. Ignored on CPU

    Use a space from one thread. Call `close()` at the end, or use it in a `with` block. If a call fails, for example
    with a CUDA error, pages and host memory belong to the same owners as before the call.

    Raises:
        ConfigError: if an argument is wrong, or the cache has no KV groups.
        CapacityError: if the host memory or the staging buffers cannot be allocated.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        allocators: Sequence[PageAllocator | PageLease],
        nbytes: int,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        check_instance("kv_cache", kv_cache, KVCache, advice="pass the runtime's")
        if not kv_cache.groups:
            raise ConfigError("kv_cache: has no KV groups and so no pages to swap; do not build a SwapSpace")
        pools = len(kv_cache.pool_pages)
        check_sequence("allocators", allocators, pools, of="PageAllocators, one per pool", error=ConfigError)
        for pool, allocator in enumerate(allocators):
            name = f"allocators[{pool}]"
            check_instance(name, allocator, (PageAllocator, PageLease), advice="pass the runtime's")
            if allocator.num_pages != kv_cache.pool_pages[pool]:
                raise ConfigError(
                    f"{name}.num_pages: expected {kv_cache.pool_pages[pool]}, as in the cache, got "
                    f"{allocator.num_pages}; pass the allocator of this cache"
                )
        nbytes = check_int("nbytes", nbytes, 1, 1 << 50, advice="pass the bytes of host memory")
        if stream is not None:
            check_instance("stream", stream, torch.cuda.Stream, advice="omit it to use the current stream")
        self._groups, self._allocators = kv_cache.groups, tuple(allocators)
        self._packers = [kv_cache.packer(group) for group in range(len(kv_cache.groups))]
        staged = max(_STAGED_BYTES, *(packer.page_bytes for packer in self._packers))
        most = sum(kv_cache.pool_pages[group.pool] for group in self._groups)
        self._memory = HostMemory(nbytes)
        try:
            pinned = kv_cache.device.type == "cuda"
            self._host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            raise CapacityError(
                f"nbytes: cannot allocate {nbytes} bytes of host memory ({_first_line(error)}); lower nbytes"
            ) from error
        try:
            self._link = _Link(kv_cache.device, stream, staged, most)
        except RuntimeError as error:
            raise CapacityError(
                f"SwapSpace: cannot allocate two staging buffers of {staged} bytes on {kv_cache.device} "
                f"({_first_line(error)}); leave more device memory free"
            ) from error
        for packer in self._packers:
            packer.warm_up()
        self._going: deque[tuple[torch.cuda.Event | None, int, PageIds]] = deque()
        self._closed = False

    @property
    def num_free_bytes(self) -> int:
        """Free bytes of host memory."""
        return self._memory.num_free

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Return the host bytes of `counts` pages of each KV group."""
        return sum(count * packer.page_bytes for count, packer in zip(counts, self._packers, strict=True))

    def swap_out(self, pages: Sequence[Pages]) -> SwappedPages:
        """Copy pages to the host, and take over one reference to each.

        pages   per KV group a list, array or host tensor of page ids. A shared page is copied, and stays allocated for
                its other owners

        Raises:
            ConfigError: if there is not one list per group, or a page is not allocated.
            CapacityError: if the host memory is full.
            CaptureError: after `close()`.

        An error changes nothing.
        """
        ids = self._checked(pages)
        self.collect()
        counts = tuple(map(len, ids))
        extents = self._memory.take(needed := self.bytes_of(counts))
        if extents is None:
            raise CapacityError(
                f"swap_out: the pages need {needed} bytes, but only {self.num_free_bytes} are free; drop pages or "
                f"swap them in"
            )
        going = []
        try:
            with self._link.session() as link:
                for group, part, device_pages, at, nbytes in self._pieces(ids, link):
                    event = link.outward(self._packers[group], device_pages, self._copies(extents, at, nbytes, link))
                    going.append((event, self._groups[group].pool, part))
        except BaseException:
            self._memory.give(extents)  # later copies to these bytes run after the copies that were submitted
            raise
        self._going.extend(going)
        if self._link.main is None:
            self.collect()
        return SwappedPages(counts, extents, self)

    def swap_in(self, swapped: SwappedPages, pages: Sequence[Pages]) -> SwapArrival:
        """Copy pages back to the device, and free their host memory. `swapped` cannot be used again.

        pages   per KV group, as many pages as were swapped out. Each page has exactly one owner, and keeps it

        Raises:
            ConfigError: if the number of pages differs, if a page does not have exactly one owner, or if `swapped` was
                swapped in or dropped before, or belongs to another space.
            CaptureError: after `close()`.

        An error changes nothing.
        """
        ids = self._checked(pages, owners=1)
        self._own(swapped, "swap_in")
        if tuple(map(len, ids)) != swapped.counts:
            raise ConfigError(
                f"swap_in: expected swapped.counts={swapped.counts} pages per KV group, got {tuple(map(len, ids))}; "
                "allocate swapped.counts pages"
            )
        with self._link.session() as link:
            for group, _, device_pages, at, nbytes in self._pieces(ids, link):
                link.inward(self._packers[group], device_pages, self._copies(swapped._extents, at, nbytes, link))
            event = link.arrived()
        self.drop(swapped)  # the next copy to this memory runs after this one, on the same stream
        return SwapArrival(event, self._link.main)

    def drop(self, swapped: SwappedPages) -> None:
        """Free the host memory of pages that are no longer needed. Raises: see `swap_in`."""
        self._own(swapped, "drop")
        swapped._space = None
        self._memory.give(swapped._extents)

    def collect(self) -> None:
        """Free the pages whose copy to the host has finished."""
        while self._going and (self._going[0][0] is None or self._going[0][0].query()):
            self._free_oldest()

    def reclaim(self, pool: int, count: int) -> bool:
        """Free swapped-out pages until a pool has `count` free pages.

        Later work on the stream of the steps waits for the copies of these pages. Returns False if the pool has fewer
        free pages after all swapped-out pages were freed.
        """
        allocator = self._allocators[check_int("pool", pool, 0, len(self._allocators) - 1, advice="pass a pool")]
        count = check_int("count", count, 0, advice="pass the number of free pages")
        while allocator.num_free < count and self._going:
            self._link.main_waits(self._going[0][0])
            self._free_oldest()
        return allocator.num_free >= count

    def close(self) -> None:
        """Free all pages and the host memory. The contents of swapped-out pages are lost. A second call does nothing.

        Later work on the stream of the steps waits for running copies; the host does not wait.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._link.close()
        finally:
            while self._going:
                self._free_oldest()
            del self._host, self._link, self._packers

    def __enter__(self) -> SwapSpace:
        self._open("with")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _free_oldest(self) -> None:
        _, pool, pages = self._going.popleft()
        self._allocators[pool].free(pages)

    def _open(self, call: str) -> None:
        if self._closed:
            raise CaptureError(f"{call}: this SwapSpace was closed; build a new SwapSpace")

    def _own(self, swapped: SwappedPages, call: str) -> None:
        self._open(call)
        check_instance("swapped", swapped, SwappedPages, advice="pass pages that swap_out() returned")
        if swapped._space is not self:
            why = "were swapped in or dropped before" if swapped._space is None else "belong to another SwapSpace"
            raise ConfigError(f"{call}: these pages {why}; pass pages that swap_out() of this space returned, once")

    def _checked(self, pages: Sequence[Pages], owners: int | None = None) -> list[PageIds]:
        """Return the checked page ids of each group: each listed once, with `owners` owners (None: at least one)."""
        self._open("pages")
        check_sequence("pages", pages, len(self._groups), of="lists of pages, one per KV group", error=ConfigError)
        ids, of_pool = [], dict[int, list[PageIds]]()
        for group, (spec, listed) in enumerate(zip(self._groups, pages, strict=True)):
            allocator, name = self._allocators[spec.pool], f"pages[{group}]"
            advice = "pass allocated pages"
            found = check_ints(name, listed, 0, allocator.num_pages - 1, advice=advice, error=ConfigError)
            have = allocator.owners_of(found)
            wrong = have < 1 if owners is None else have != owners
            if wrong.any():
                want, at = "at least 1 owner" if owners is None else f"{owners} owner", int(wrong.argmax())
                raise ConfigError(f"{name}: expected pages with {want}, page {found[at]} has {have[at]}; {advice}")
            of_pool.setdefault(spec.pool, []).append(found)
            ids.append(found)
        for lists in of_pool.values():
            check_distinct("pages", np.concatenate(lists))
        return ids

    def _pieces(self, ids: list[PageIds], link: _Link) -> Iterator[tuple[int, PageIds, torch.Tensor, int, int]]:
        """Yield pieces that fit a staging buffer: group, page ids on host and device, first byte, number of bytes."""
        every = link.upload(self._packers[0], np.concatenate(ids))
        at = first = 0
        for group, (packer, pages) in enumerate(zip(self._packers, ids, strict=True)):
            most = link.staged_bytes // packer.page_bytes
            for start in range(0, len(pages), most):
                part = pages[start : start + most]
                nbytes = len(part) * packer.page_bytes
                yield group, part, every[first : first + len(part)], at, nbytes
                first, at = first + len(part), at + nbytes

    def _copies(self, extents: list[Extent], at: int, nbytes: int, link: _Link) -> _Copies:
        """Return views of bytes `at` to `at + nbytes` of a sequence, in the next staging buffer and on the host."""
        return [
            (link.staged[first : first + size], self._host[host : host + size])
            for first, host, size in locate_bytes(extents, at, nbytes)
        ]


class _Link:
    """Two side streams and two staging buffers. Kernels fill or drain one buffer while the other is copied.

    main   the stream that steps run on; None on CPU, where every call runs immediately
    """

    def __init__(self, device: torch.device, main: torch.cuda.Stream | None, staged_bytes: int, most_ids: int) -> None:
        self.staged_bytes = staged_bytes
        self._turn = 0
        if device.type != "cuda":
            self.main = self._ids = None
            self._buffers = [torch.empty(staged_bytes, dtype=torch.uint8, device=device)]
            return
        self.main, self._device = torch.cuda.current_stream(device) if main is None else main, device
        # Lowest priority, so that these kernels use idle multiprocessors if steps run at a higher one.
        self._kernels, self._copies = (torch.cuda.Stream(device, priority=0) for _ in range(2))
        with torch.cuda.stream(self.main):  # allocated on this stream, which waits for the others in `close`
            self._buffers = [torch.empty(staged_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self._ids = torch.empty(most_ids, dtype=torch.int64, device=device)
            ready = self.main.record_event()
        for stream in (self._kernels, self._copies):
            stream.wait_event(ready)
        # Recorded again for every piece, because a wait covers the most recent record. Never queried.
        self._submitted, *self._filled = (torch.cuda.Event() for _ in range(3))
        self._drained = [torch.cuda.Event() for _ in range(2)]

    @property
    def staged(self) -> torch.Tensor:
        return self._buffers[self._turn]

    @contextlib.contextmanager
    def session(self) -> Iterator[_Link]:
        """Order the copies in the block after all work on the stream of the steps. After an error in the block, later
        work on all three streams waits for the copies."""
        if self.main is None:
            with torch.inference_mode():
                yield self
            return
        before = torch.cuda.current_stream(self._device), torch.cuda.current_stream()
        try:
            self._submitted.record(self.main)
            self._kernels.wait_event(self._submitted)
            with torch.inference_mode():
                yield self
        except BaseException:
            self._settle()
            raise
        finally:
            for stream in before:  # the stream of the cache's device, then the current one
                torch.cuda.set_stream(stream)

    def upload(self, packer: PagePacker, pages: PageIds) -> torch.Tensor:
        if self.main is not None:
            torch.cuda.set_stream(self._kernels)
        return packer.upload(pages, self._ids)

    def outward(self, packer: PagePacker, pages: torch.Tensor, copies: _Copies) -> torch.cuda.Event | None:
        """Gather pages in the next buffer, then copy it to the host. Returns the event after the read."""
        turn, staged = self._take_turn(len(pages) * packer.page_bytes)
        if self.main is None:
            packer.pack(pages, staged)
            _copy((host, part) for part, host in copies)
            return None
        torch.cuda.set_stream(self._kernels)
        self._kernels.wait_event(self._drained[turn])
        packer.pack(pages, staged)
        read: torch.cuda.Event = self._kernels.record_event()
        torch.cuda.set_stream(self._copies)
        self._copies.wait_event(read)
        _copy((host, part) for part, host in copies)
        self._drained[turn].record(self._copies)
        return read

    def inward(self, packer: PagePacker, pages: torch.Tensor, copies: _Copies) -> None:
        """Copy from the host to the next buffer, then scatter it to pages."""
        turn, staged = self._take_turn(len(pages) * packer.page_bytes)
        if self.main is None:
            _copy(copies)
            packer.unpack(pages, staged)
            return
        torch.cuda.set_stream(self._copies)
        self._copies.wait_event(self._drained[turn])
        _copy(copies)
        self._filled[turn].record(self._copies)
        torch.cuda.set_stream(self._kernels)
        self._kernels.wait_event(self._filled[turn])
        packer.unpack(pages, staged)
        self._drained[turn].record(self._kernels)

    def arrived(self) -> torch.cuda.Event | None:
        """Return an event recorded after all pages are written."""
        if self.main is None:
            return None
        event: torch.cuda.Event = self._kernels.record_event()
        return event

    def main_waits(self, event: torch.cuda.Event | None) -> None:
        """Make later work on the stream of the steps wait for an event."""
        if self.main is not None and event is not None:
            self.main.wait_event(event)

    def close(self) -> None:
        """Make the stream of the steps wait for all copies, and free the buffers."""
        if self.main is not None:
            for stream in (self._kernels, self._copies):
                self.main.wait_event(stream.record_event())
        self._buffers.clear()
        self._ids = None

    def _take_turn(self, nbytes: int) -> tuple[int, torch.Tensor]:
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        return turn, self._buffers[turn][:nbytes]

    def _settle(self) -> None:
        assert self.main is not None, "copies on CPU are synchronous"
        events = [stream.record_event() for stream in (self._kernels, self._copies)]
        for stream in (self.main, self._kernels, self._copies):
            for event in events:
                stream.wait_event(event)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair to the first, on the current stream."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


Extent = tuple[int, int]
"""First byte and number of bytes."""


class HostMemory:
    """Free bytes of the host memory, as sorted extents that are not adjacent."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[Extent] = [(0, nbytes)]

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, nbytes: int) -> list[Extent] | None:
        """Allocate as few extents as possible, of `nbytes` bytes in total. Return None if fewer bytes are free."""
        if nbytes > self.num_free:
            return None
        fitting = [extent for extent in self._free if extent[1] >= nbytes]
        chosen = [min(fitting, key=lambda e: e[1])] if fitting else sorted(self._free, key=lambda e: -e[1])
        taken = []
        for start, size in chosen:
            if not nbytes:
                break
            used = min(size, nbytes)
            self._free.remove((start, size))
            if size > used:
                self._free.append((start + used, size - used))
            taken.append((start, used))
            nbytes -= used
        self._free.sort()
        return taken

    def give(self, extents: Sequence[Extent]) -> None:
        """Free extents that `take` returned."""
        merged: list[Extent] = []
        for start, size in sorted([*self._free, *extents]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                start, size = merged[-1][0], merged.pop()[1] + size
            merged.append((start, size))
        self._free = merged


def locate_bytes(extents: Sequence[Extent], at: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield offset in the data, offset in memory and size of each part of `nbytes` bytes of data stored in extents."""
    before = 0
    for start, size in extents:
        first, last = max(at, before), min(at + nbytes, before + size)
        if first < last:
            yield first - at, start + first - before, last - first
        before += size
