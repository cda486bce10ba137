"""Preemption of a session's requests: their pages move to the host and back, or are shared with other requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphrt.cache.swap import SwapArrival, SwappedPages, SwapSpace
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.runtime import Runtime
from graphrt.session.requests import NO_INDEX, Ids, SessionRequest
from graphrt.session.session import DecodeSession


@dataclass(frozen=True, slots=True)
class Preempted:
    """State of a preempted request.

    length         tokens whose keys and values are kept; 0: all are recomputed
    first_places   position of the first page of each KV group in the sequence
    """

    length: int
    swapped: SwappedPages | None = None
    first_places: tuple[int, ...] = ()


class Preemption:
    """Preempts and resumes the requests of a session, and shares their pages.

    A request that is preempted or detached has no request index. It still gets the tokens of launches in flight.

    Args:
        session: of the runtime, used by the caller alone
    """

    def __init__(self, runtime: Runtime, session: DecodeSession) -> None:
        self._runtime, self._session = runtime, session
        self._table, self._pages = session.table, session.pages
        self.arriving: dict[int, SwapArrival] = {}
        session.launches.must_advance = True

    def free_passed(self, ids: Ids) -> None:
        """Free pages that windows have passed, of requests whose pages are on the device."""
        self._table.catch_up()
        # A swap that is still running could write such a page after the step that gets it next.
        here = ids[[req_index not in self.arriving for req_index in ids.tolist()]] if self.arriving else ids
        self._pages.free_passed(here, self._table.most[here])

    def share(self, req_index: int, donor: int, length: int) -> tuple[int, int]:
        """Start a request without pages with the first `length` tokens of another, which both have in common.

        Returns: the number of its pages, and how many of them were copied.
        """

        def copy(buffers: StaticBuffers) -> int:
            copied = 0
            for group, (sources, own) in self._pages.share(donor, req_index, length):
                self._runtime.kv_cache.copy_pages(sources, own, group=group)
                copied += 1
            return copied

        copied = self._runtime.manager.between_steps(copy)  # after the launch that wrote the pages
        self._table.reached[req_index] = self._table.most[req_index] = self._table.prefills[req_index] = length
        return sum(map(len, self._pages.pages(req_index))), copied

    def preempt(self, request: SessionRequest, space: SwapSpace | None) -> Preempted:
        """Free a request's index and its pages, which move to `space` if they fit there, and are dropped otherwise.

        Resume the request after its launches in flight were collected.
        """
        at, length = request.req_index, self._table.length(request.req_index)
        self.free_passed(np.array([at]))  # pages that the next token does not attend to need not move
        self._pages.cut(at, length)
        pages, preempted = self._pages.pages(at), Preempted(0)
        if space is not None and space.bytes_of([len(of_group) for of_group in pages]) <= space.num_free_bytes:
            first_places = tuple(int(table.from_[at]) for table in self._pages.tables)
            preempted = Preempted(length, space.swap_out(pages), first_places)
            self._pages.forget(at)  # the space frees them
        self.detach(request)
        return preempted

    def detach(self, request: SessionRequest) -> None:
        """Free a request's index and its pages. The request still gets the tokens of launches in flight."""
        self._forget_arrival(request)
        self._session.remove(request)
        request.req_index = NO_INDEX
        self._table.detach(request)

    def release(self, request: SessionRequest) -> None:
        """Release a finished request."""
        self._forget_arrival(request)
        self._session.release(request)

    def resume(self, request: SessionRequest, preempted: Preempted, space: SwapSpace | None) -> None:
        """Give a preempted request an index and its pages again. It continues with the next launches, or once it has
        `arrived`. Raises: CapacityError: if no request index or page is free."""
        known = np.concatenate((request.prompt, np.array(request.tokens, np.int32)))
        assert preempted.length < len(known), "all launches of the request were collected, and it has not finished"
        self._table.detached.discard(request)
        if not preempted.length:
            request.prompt_logprobs.clear()  # its prompt is recomputed
        self._session.start(request, known, preempted.length, self._runtime.manager.request_tables.check_state({}))
        if preempted.swapped is not None and space is not None:
            pages = self._pages.place(request.req_index, preempted.first_places, preempted.swapped.counts)
            self.arriving[request.req_index] = space.swap_in(preempted.swapped, pages)

    def arrived(self, req_index: int, *, wait: bool = False) -> bool:
        """Return True if a request's pages are on the device. With `wait`, later launches wait for them there."""
        arrival = self.arriving.get(req_index)
        if arrival is None:
            return True
        if not (wait or arrival.done()):
            return False
        self.arriving.pop(req_index).wait()
        return True

    def _forget_arrival(self, request: SessionRequest) -> None:
        if (arrival := self.arriving.pop(request.req_index, None)) is not None:
            arrival.wait()  # later steps may write the pages only after the copy
