"""Room on the host for KV pages whose sequence waits: swapped out and in on side streams, while steps go on."""

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
"""Bytes of each of the two staging buffers. Longer copies over the link hold decode steps up more: 32 MB at a time cost
them 5.3 %, 8 MB 2.9 %. See docs/dev/log.md, "Swaps beside steps"."""

Extent = tuple[int, int]
"""First byte and number of bytes."""

PageIds = npt.NDArray[np.int64]

_Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Bytes of a staging buffer, each with its place on the host."""


@dataclass(eq=False, slots=True)
class SwappedPages:
    """Pages of a sequence in a SwapSpace: what `swap_out` returns, and what `swap_in` takes once.

    counts   pages of each KV group
    """

    counts: tuple[int, ...]
    _extents: list[Extent]
    _space: SwapSpace | None  # None once the pages are gone


class SwapArrival:
    """Pages on their way back to the device. A step may read them after `wait()`."""

    def __init__(self, event: torch.cuda.Event | None, stream: torch.cuda.Stream | None) -> None:
        self._event, self._stream = event, stream

    def done(self) -> bool:
        """Whether the pages have arrived, without waiting."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Let later work of the steps' stream wait for the pages. The host does not wait."""
        if self._event is not None:
            assert self._stream is not None, "events are of a stream"
            self._stream.wait_event(self._event)


class SwapSpace:
    """Pinned host memory for KV pages of sequences that wait.

    A sequence's pages go out, serve others, and come back to other pages later:

        swapped = space.swap_out([pages_of_group_0, pages_of_group_1])
        ...
        arrival = space.swap_in(swapped, [allocator.allocate(n) for n in swapped.counts])
        arrival.wait()                                          # then submit the step that reads them

    No call waits on the host. Copies run on two side streams, through two staging buffers on the device: a kernel
    gathers the pages of all layers, and one copy per buffer crosses the link. Copies are ordered behind the steps that
    were submitted before. On a CPU the same calls copy at once.

    kv_cache     the cache of all pages
    allocators   who hands out pages of each pool. `swap_out` takes over one ownership of each page, and gives it back
                 to the allocator once the page was read: `collect` and `reclaim` do so
    nbytes       bytes of host memory
    stream       the stream that steps run on; None means the current one, and nothing on a CPU

    All calls come from one thread. Leave a space with `close()`, or use it in a `with` block. After an error in the
    middle of a call, from CUDA for example, all pages and bytes belong to whom they belonged before.

    Raises: ConfigError for wrong arguments and a cache without KV groups, CapacityError for more memory than there is.
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
            raise ConfigError(
                "kv_cache: expected at least one KV group, got none; a model without a cache has no pages to swap"
            )
        pools = len(kv_cache.pool_pages)
        check_sequence("allocators", allocators, pools, of="PageAllocators, one per pool", error=ConfigError)
        for pool, allocator in enumerate(allocators):
            name = f"allocators[{pool}]"
            check_instance(name, allocator, (PageAllocator, PageLease), advice="pass the runtime's")
            if allocator.num_pages != kv_cache.pool_pages[pool]:
                raise ConfigError(
                    f"{name}: expected one of {kv_cache.pool_pages[pool]} pages, got one of {allocator.num_pages}; "
                    "pass the one that hands out the cache's pages"
                )
        nbytes = check_int("nbytes", nbytes, 1, 1 << 50, advice="pass bytes of host memory")
        if stream is not None:
            check_instance("stream", stream, torch.cuda.Stream, advice="leave it out for the current stream")
        self._groups, self._allocators = kv_cache.groups, tuple(allocators)
        self._packers = [kv_cache.packer(group) for group in range(len(kv_cache.groups))]
        staged = max(_STAGED_BYTES, *(packer.page_bytes for packer in self._packers))
        most = sum(kv_cache.pool_pages[group.pool] for group in self._groups)
        self._memory = _HostMemory(nbytes)
        try:
            pinned = kv_cache.device.type == "cuda"
            self._host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            raise CapacityError(
                f"nbytes: expected host memory that can be had, got {nbytes} bytes and '{_first_line(error)}'; ask for "
                "less"
            ) from error
        try:
            self._link = _Link(kv_cache.device, stream, staged, most)
        except RuntimeError as error:
            raise CapacityError(
                f"SwapSpace: expected room for two buffers of {staged} bytes on {kv_cache.device}, got "
                f"'{_first_line(error)}'; leave more memory free"
            ) from error
        for packer in self._packers:
            packer.warm_up()
        self._going: deque[tuple[torch.cuda.Event | None, int, PageIds]] = deque()
        self._closed = False

    @property
    def num_free_bytes(self) -> int:
        """Bytes of host memory that hold no pages."""
        return self._memory.num_free

    @property
    def num_going_out(self) -> int:
        """Pages that are still held until their copy has read them."""
        return sum(len(pages) for _, _, pages in self._going)

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Host bytes of so many pages of each KV group."""
        return sum(count * packer.page_bytes for count, packer in zip(counts, self._packers, strict=True))

    def swap_out(self, pages: Sequence[Pages]) -> SwappedPages:
        """Copy pages to the host, and take over one ownership of each.

        pages   by KV group, lists, arrays or host tensors of page ids; a shared page is copied, and stays with its
                other owners

        Raises: ConfigError for pages that nobody owns, or that are no list per group, CapacityError where the host
        memory is full, CaptureError after `close()`; nothing has changed then.
        """
        ids = self._checked(pages)
        self.collect()
        counts = tuple(map(len, ids))
        extents = self._memory.take(needed := self.bytes_of(counts))
        if extents is None:
            raise CapacityError(
                f"swap_out: expected at most {self.num_free_bytes} bytes, which are free on the host, got {needed}; "
                "drop or swap in other sequences, or build a larger space"
            )
        going = []
        try:
            with self._link.session() as link:
                for group, part, device_pages, at, nbytes in self._pieces(ids, link):
                    event = link.outward(self._packers[group], device_pages, self._copies(extents, at, nbytes, link))
                    going.append((event, self._groups[group].pool, part))
        except BaseException:
            self._memory.give(extents)  # later copies to these bytes run behind those of the pieces before the error
            raise
        self._going.extend(going)
        if self._link.main is None:
            self.collect()
        return SwappedPages(counts, extents, self)

    def swap_in(self, swapped: SwappedPages, pages: Sequence[Pages]) -> SwapArrival:
        """Copy pages back to the device, and free their host memory. `swapped` is used up.

        pages   by KV group, as many as went out; each has one owner, which keeps it

        Raises: ConfigError for pages of another number or of no or several owners, for pages that were swapped in or
        dropped already, or went to another space; CaptureError after `close()`. Nothing has changed then.
        """
        ids = self._checked(pages, owners=1)
        self._own(swapped, "swap_in")
        if tuple(map(len, ids)) != swapped.counts:
            raise ConfigError(
                f"swap_in: expected {swapped.counts} pages by KV group, as went out, got {tuple(map(len, ids))}; "
                "allocate as many"
            )
        with self._link.session() as link:
            for group, _, device_pages, at, nbytes in self._pieces(ids, link):
                link.inward(self._packers[group], device_pages, self._copies(swapped._extents, at, nbytes, link))
            event = link.arrived()
        self.drop(swapped)  # the next copy to this memory runs behind this one, on the same stream
        return SwapArrival(event, self._link.main)

    def drop(self, swapped: SwappedPages) -> None:
        """Forget pages that will not come back. Raises: as `swap_in`."""
        self._own(swapped, "drop")
        swapped._space = None
        self._memory.give(swapped._extents)

    def collect(self) -> None:
        """Give pages back to the allocators whose copy has read them."""
        while self._going and (self._going[0][0] is None or self._going[0][0].query()):
            self._give_back()

    def reclaim(self, pool: int, count: int) -> bool:
        """Give pages of a pool back until `count` are free there: later work of the steps' stream waits for the copies
        that read them. False, with all given back, where that is too few."""
        allocator = self._allocators[check_int("pool", pool, 0, len(self._allocators) - 1, advice="pass a pool")]
        count = check_int("count", count, 0, advice="pass how many pages are to be free")
        while allocator.num_free < count and self._going:
            self._link.main_waits(self._going[0][0])
            self._give_back()
        return allocator.num_free >= count

    def close(self) -> None:
        """Give all pages back to the allocators, and the memory to the system. What is on the host is lost.

        Later work of the steps' stream waits for copies under way, the host does not. Closing twice is fine.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._link.close()
        finally:
            while self._going:
                self._give_back()
            del self._host, self._link, self._packers

    def __enter__(self) -> SwapSpace:
        self._open("with")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _give_back(self) -> None:
        _, pool, pages = self._going.popleft()
        self._allocators[pool].free(pages)

    def _open(self, call: str) -> None:
        if self._closed:
            raise CaptureError(f"{call}: expected an open space, got one that was closed; build a new SwapSpace")

    def _own(self, swapped: SwappedPages, call: str) -> None:
        self._open(call)
        check_instance("swapped", swapped, SwappedPages, advice="pass what swap_out() returned")
        if swapped._space is not self:
            got = "that came back or were dropped" if swapped._space is None else "of another space"
            raise ConfigError(f"{call}: expected pages in this space, got pages {got}; each comes back once")

    def _checked(self, pages: Sequence[Pages], owners: int | None = None) -> list[PageIds]:
        """The pages of each group, all different in their pool, with so many owners; None: any, but for none."""
        self._open("pages")
        check_sequence("pages", pages, len(self._groups), of="lists of pages, one per KV group", error=ConfigError)
        ids, of_pool = [], dict[int, list[PageIds]]()
        for group, (spec, listed) in enumerate(zip(self._groups, pages, strict=True)):
            allocator, name = self._allocators[spec.pool], f"pages[{group}]"
            advice = "pass pages that allocate() gave"
            found = check_ints(name, listed, 0, allocator.num_pages - 1, advice=advice, error=ConfigError)
            have = allocator.owners_of(found)
            wrong = have < 1 if owners is None else have != owners
            if wrong.any():
                want, at = "an owner" if owners is None else f"{owners} owner", int(wrong.argmax())
                got = f"page {found[at]} with {have[at]}"
                raise ConfigError(f"{name}: expected pages with {want}, got {got}; {advice}")
            of_pool.setdefault(spec.pool, []).append(found)
            ids.append(found)
        for lists in of_pool.values():
            check_distinct("pages", np.concatenate(lists))
        return ids

    def _pieces(self, ids: list[PageIds], link: _Link) -> Iterator[tuple[int, PageIds, torch.Tensor, int, int]]:
        """Pages in pieces that a staging buffer holds: the group, the pages on the host and on the device, the place of
        their first byte among all, and the number of bytes."""
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
        """Bytes `at` to `at + nbytes` of a sequence: in the next staging buffer, and where they lie on the host."""
        return [
            (link.staged[first : first + size], self._host[host : host + size])
            for first, host, size in _parts(extents, at, nbytes)
        ]


class _Link:
    """Two side streams and two staging buffers: kernels fill or drain one buffer while the other crosses the link.

    main     the stream that steps run on; None on a CPU, where everything runs at once
    staged   the buffer of the next piece
    """

    def __init__(self, device: torch.device, main: torch.cuda.Stream | None, staged_bytes: int, most_ids: int) -> None:
        self.staged_bytes = staged_bytes
        self._turn = 0
        if device.type != "cuda":
            self.main = self._ids = None
            self._buffers = [torch.empty(staged_bytes, dtype=torch.uint8, device=device)]
            return
        self.main, self._device = torch.cuda.current_stream(device) if main is None else main, device
        # Of the lowest priority there is: where steps run at a higher one, kernels here fill gaps.
        self._kernels, self._copies = (torch.cuda.Stream(device, priority=0) for _ in range(2))
        with torch.cuda.stream(self.main):  # memory of this stream: `close` lets it wait for the others
            self._buffers = [torch.empty(staged_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self._ids = torch.empty(most_ids, dtype=torch.int64, device=device)
            ready = self.main.record_event()
        for stream in (self._kernels, self._copies):
            stream.wait_event(ready)
        # Recorded again and again: who waits for an event waits for its last record before that. Never queried.
        self._submitted, *self._filled = (torch.cuda.Event() for _ in range(3))
        self._drained = [torch.cuda.Event() for _ in range(2)]

    @property
    def staged(self) -> torch.Tensor:
        return self._buffers[self._turn]

    @contextlib.contextmanager
    def session(self) -> Iterator[_Link]:
        """What moves inside is ordered behind all that was submitted to the steps' stream. After an error inside, all
        later work of all three streams is ordered behind what moved."""
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
            for stream in before:  # of the cache's device, then of the current one
                torch.cuda.set_stream(stream)

    def upload(self, packer: PagePacker, pages: PageIds) -> torch.Tensor:
        """Page ids for the kernels, valid until the next upload's."""
        if self.main is not None:
            torch.cuda.set_stream(self._kernels)
        return packer.upload(pages, self._ids)

    def outward(self, packer: PagePacker, pages: torch.Tensor, copies: _Copies) -> torch.cuda.Event | None:
        """Fill the next buffer with pages, then copy it to the host. The event says that the pages were read."""
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
        """Copy from the host to the next buffer, then write it to pages."""
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
        """An event behind all pages that were written."""
        if self.main is None:
            return None
        event: torch.cuda.Event = self._kernels.record_event()
        return event

    def main_waits(self, event: torch.cuda.Event | None) -> None:
        """Let later work of the steps' stream wait for an event."""
        if self.main is not None and event is not None:
            self.main.wait_event(event)

    def close(self) -> None:
        """Let the steps' stream wait for all that moves; the buffers are given back behind that."""
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
        assert self.main is not None, "a CPU settles everything at once"
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


class _HostMemory:
    """Which bytes of the host memory are free: extents in order, none beside another."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[Extent] = [(0, nbytes)]

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, nbytes: int) -> list[Extent] | None:
        """Extents of `nbytes` bytes together, as few as possible; None where fewer are free."""
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
        """Free what `take` gave."""
        merged: list[Extent] = []
        for start, size in sorted([*self._free, *extents]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                start, size = merged[-1][0], merged.pop()[1] + size
            merged.append((start, size))
        self._free = merged


def _parts(extents: Sequence[Extent], at: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Where bytes `at` to `at + nbytes` of something that lies in extents are: place among these bytes, place in the
    memory, and size of each part."""
    before = 0
    for start, size in extents:
        first, last = max(at, before), min(at + nbytes, before + size)
        if first < last:
            yield first - at, start + first - before, last - first
        before += size
