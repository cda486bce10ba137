"""Rows of a session that a scheduler moves: suspended with their pages elsewhere, resumed, begun on another's pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from graphrt.batch import Int32Array
from graphrt.cache.swap import SwapArrival, SwappedPages, SwapSpace
from graphrt.kernels.errors import ReplayError
from graphrt.runtime import Runtime
from graphrt.session.requests import NO_INDEX, Flight, Ids, SessionRequest, Taken
from graphrt.session.session import DecodeSession


@dataclass(frozen=True, slots=True)
class Suspended:
    """Where a row stood that waits.

    length         tokens whose keys and values are kept; 0: all are computed again
    swapped        its pages, by KV group; None: it has none
    first_places   where the pages of each KV group begin in its sequence
    """

    length: int
    swapped: SwappedPages | None = None
    first_places: tuple[int, ...] = ()


class MovableSession(DecodeSession):
    """What a scheduler needs beside `add`, `run`, `collect` and `release`. Rows are named by their row ids.

    A row that was suspended or retired has no row id; the tokens of launches in flight still come to it.

    given   by row id, the tokens that the host knew when the row got the id
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._arriving: dict[int, SwapArrival] = {}

    # -- what rows are at

    @property
    def given(self) -> dict[int, Int32Array]:
        return self._given

    @property
    def prompting(self) -> tuple[int, ...]:
        """The rows that have given tokens left, in the order in which they came."""
        return tuple(self._prompts)

    @property
    def decoding(self) -> Ids:
        """The rows that go on by themselves."""
        return self._order

    @property
    def quiet(self) -> int:
        """Steps for which no row comes to its longest, or needs a page."""
        return self._quiet

    def lengths(self, ids: Ids) -> Ids:
        """Tokens whose keys and values rows have behind all launches, where they did not end before."""
        self._catch_up()
        lengths: Ids = self._most[ids]
        return lengths

    def length(self, req_index: int) -> int:
        """The same of one row."""
        self._catch_up()
        return int(self._most[req_index])

    def steps_left(self, ids: Ids) -> Ids:
        """Steps of rows until their longest."""
        steps: Ids = self._limits[ids] - self.lengths(ids)
        return steps

    def in_flight(self, row: SessionRequest) -> bool:
        """Whether a launch that has the row was not collected yet."""
        return any(row in flight.rows for flight in self._flights)

    # -- pages

    def num_pages(self, req_index: int) -> int:
        """Pages that a row has, of all KV groups."""
        return sum(map(len, self._pages.pages(req_index)))

    def give_back(self, ids: Ids) -> None:
        """Free what windows have left behind, of rows whose pages are on the device."""
        # Pages that are still on their way may be written later than a step that gets them now.
        here = ids[[req_index not in self._arriving for req_index in ids.tolist()]] if self._arriving else ids
        self._pages.give_back(here, self.lengths(here))

    def missing(self, ids: Ids, lengths: Ids) -> list[int]:
        """Pages of each pool that rows need to have so many tokens, beside those that they have."""
        return self._pages.missing(ids, lengths)

    def can_share(self, donor: int, length: int) -> bool:
        """Whether `share` can take so many tokens of a row."""
        return self._pages.can_share(donor, length)

    def share(self, req_index: int, donor: int, length: int) -> tuple[int, int]:
        """Let a row that has no page begin with another's first `length` tokens, which are among its own: how many
        pages it has then, and how many of them were copied."""
        copied = 0
        with self._runtime.manager.between_steps():  # behind the launch that wrote them
            for group, (sources, own) in self._pages.share(donor, req_index, length):
                self._runtime.kv_cache.copy_pages(sources, own, group=group)
                copied += 1
        self._reached[req_index] = self._most[req_index] = self._prompts[req_index] = length
        return self.num_pages(req_index), copied

    # -- rows come and go

    def hold(self, ids: Iterable[int]) -> None:
        """These rows with given tokens left do not go on in the next launches; all others do."""
        self._held = set(ids)

    def suspend(self, row: SessionRequest, space: SwapSpace | None) -> Suspended:
        """Take a row's id and its pages, which go to a space where it has room for them, or are dropped.

        Launches in flight go on; resume the row once they were collected.
        """
        at, length = row.req_index, self.length(row.req_index)
        self.give_back(np.array([at]))  # what the next token does not see need not travel
        self._pages.cut(at, length)
        pages, suspended = self._pages.pages(at), Suspended(0)
        if space is not None and space.bytes_of([len(of_group) for of_group in pages]) <= space.num_free_bytes:
            first_places = tuple(self._pages.first_places(at))
            suspended = Suspended(length, space.swap_out(pages), first_places)
            self._pages.forget(at)  # the space frees them
        self.retire(row)
        return suspended

    def retire(self, row: SessionRequest) -> None:
        """Take a row's id and its pages. Launches in flight go on, and their tokens come to the row."""
        self._release(row)
        row.req_index = NO_INDEX
        if not row.end:
            self._away.add(row)

    def resume(self, row: SessionRequest, suspended: Suspended, space: SwapSpace | None) -> None:
        """Give a row that was suspended a row id and its pages again; it goes on with the next launches, or with those
        behind `arrived`. Raises CapacityError where no row or page is free."""
        given = np.concatenate((row.prompt, np.array(row.tokens, np.int32)))
        assert suspended.length < len(given), "all launches of the row were collected, and it has not ended"
        self._take_row(row)
        self._away.discard(row)
        if not suspended.length:
            row.prompt_logprobs.clear()  # its prompt is computed again
        self._begin(row, given, suspended.length, self._runtime.manager.request_tables.check_state({}))
        if suspended.swapped is not None and space is not None:
            pages = self._pages.place(row.req_index, suspended.first_places, suspended.swapped.counts)
            self._arriving[row.req_index] = space.swap_in(suspended.swapped, pages)

    @property
    def arriving(self) -> tuple[int, ...]:
        """The rows whose pages may still be on their way; they are to be held."""
        return tuple(self._arriving)

    def arrived(self, req_index: int, *, wait: bool = False) -> bool:
        """Whether a row's pages are on the device. With `wait`, later launches wait for them, on the device."""
        arrival = self._arriving.get(req_index)
        if arrival is None:
            return True
        if not (wait or arrival.done()):
            return False
        self._arriving.pop(req_index).wait()
        return True

    def _take_in(self, flights: list[Flight]) -> Taken:
        """As a session does. Rows always have pages for their steps here, so one that stood still is an error."""
        taken = super()._take_in(flights)
        for flight in flights if not taken.faults else ():
            if flight.given is not None:
                continue
            sampled = (flight.launch.tokens(raise_on_fault=False) >= 0).sum(0)
            for place in np.flatnonzero(sampled < flight.promised).tolist():
                row = flight.rows[place]
                if not row.end and (row in self._away or self._rows.get(row.req_index) is row):
                    raise ReplayError(
                        f"row {flight.ids[place]}: expected a token from each step of launch {flight.launch.step}, got "
                        f"{sampled[place]}; check the model's logits for NaN, and the sampler"
                    )
        return taken

    def _release(self, row: SessionRequest) -> None:
        if (arrival := self._arriving.pop(row.req_index, None)) is not None:
            arrival.wait()  # nobody may write there before the copy has
        super()._release(row)
