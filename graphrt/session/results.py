"""What a session knows of its rows while launches are in flight, and how their results bring it up to date."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np

from graphrt.batch import Int32Array
from graphrt.engine.batch_delta import BatchDelta
from graphrt.engine.handle import RequestFault, StepFaultError
from graphrt.engine.logprobs import StepLogprobs
from graphrt.kernels.metadata.buffers import STOP_TOKENS
from graphrt.kernels.types import FinishReason
from graphrt.session.requests import NO_INDEX, Flight, Ids, SessionRequest, Taken, stop_on_host

OVER = -1  # no number of resets


class RowsInFlight(ABC):
    """Rows by row id, how long they are for sure and at most, and the launches that were not collected.

    req_indices   how many there are
    resets    of the manager
    """

    # How long a row is. Its prompt has 3 tokens, and max_new_tokens is 30. It has pages for all of them:
    #
    #                 _reached   _most   _ahead   _quiet   _limits
    #     run(1)             0       3        0        0        32    the prompt is in flight
    #     collect            3       3        0        0        32
    #     run(8)             3      11        0       21        32    the device was told; 32 - 11 steps need no delta
    #     run(8)             3      11        8       13        32    a quiet launch: it is 11 + 8 tokens long at most
    #     collect           19      11        8       13        32    both launches have ended
    #     run(8)            19      11       16        5        32    quiet
    #     run(8)            19      32        0        0        32    8 > 5: _most is brought up to date, then told anew
    #
    # Lengths are KV tokens by row id, and the last token that was sampled is in no cache yet: 3 + 30 - 1 is the limit.
    #
    #     _reached  what a row has for sure: of launches that were collected
    #     _most     what it has at most, behind all launches; where it ended early, `collect` takes off what it lost
    #     _ahead    steps that rows of `_order` went since `_most` was brought up to date: add it to theirs
    #     _quiet    steps that may be launched in which no row comes to its limit or to the end of its pages
    #     _limits   what it has when it ends by its length
    #     _asking   row ids that want log-probabilities: launches bring some then
    #     _resets   those of the manager when the rows began: another number, and they are lost; see LaunchQueue
    #     _at_work  calls under way that need the rows as they are: those that are released meanwhile wait in _leaving
    #     _away     rows that gave their row id up while launches were in flight, whose tokens they still get

    def __init__(self, req_indices: int, resets: int) -> None:
        self._rows: dict[int, SessionRequest] = {}
        self._away = set[SessionRequest]()
        self._prompts: dict[int, int] = {}  # by row id, how many of these were submitted, where some were not
        self._order: Ids = np.empty(0, np.int64)  # the rows that go on by themselves
        self._order_rows: tuple[SessionRequest, ...] = ()
        self._no_delta = BatchDelta(self._order)
        self._long_stops: set[int] = set()  # rows with more stop tokens than the device knows
        self._quiet = self._ahead = 0
        self._reached, self._most, self._limits = (np.zeros(req_indices, np.int64) for _ in range(3))
        self._asking = set[int]()
        self._resets = resets
        self._at_work, self._leaving = 0, list[SessionRequest]()
        self._kept: dict[SessionRequest, list[int]] = {}  # what was taken in by a `collect` that raised
        self._flights: deque[Flight] = deque()

    @property
    def running(self) -> bool:
        """Whether any row has not ended, as far as was collected: steps may be submitted in vain."""
        return bool(self._prompts) or bool(len(self._order))

    def _reorder(self, order: Ids) -> None:
        """From now on these rows go on by themselves."""
        self._catch_up()
        order.flags.writeable = False  # launches give it to their readers
        self._order, self._order_rows = order, tuple(map(self._rows.__getitem__, order.tolist()))
        self._no_delta, self._quiet = BatchDelta(order, logprobs=bool(self._asking)), 0

    def _join(self, fork: SessionRequest, row: SessionRequest) -> None:
        """A fork gets what launches in flight bring its row, and goes on by itself where that does."""
        for flight in self._flights:
            places = [*enumerate(flight.rows), *flight.forks]
            flight.forks += tuple((place, fork) for place, other in places if other is row)
        if row.req_index in self._order:
            self._reorder(np.append(self._order, fork.req_index))

    def _catch_up(self) -> None:
        """Bring `_most` up to date."""
        self._most[self._order] += self._ahead
        self._ahead = 0

    def _ended(self, wait: bool) -> list[Flight]:
        """The first launch, which has ended, and the next ones of the same rows that have: they are taken in as one."""
        first = self._flights[0]
        flights, rows = [first], first.rows
        for flight in islice(self._flights, 1, None):
            if flight.rows is not rows or flight.forks or first.forks or not (wait or flight.launch.done()):
                break
            flights.append(flight)
        return flights

    def _take_all(self, wait: bool) -> dict[SessionRequest, list[int]]:
        """Take in every launch that has ended, or with `wait` all: tokens by row. Where that raises, the next call has
        what was taken in."""
        found = self._kept
        faults: list[tuple[int, RequestFault]] = []
        with self._working():
            while self._flights and (wait or self._flights[0].launch.done()):
                taken = self._take_in(self._ended(wait))
                faults += taken.faults
                of_rows = zip(taken.rows, taken.columns, strict=True)
                if found:
                    for row, new in of_rows:
                        found.setdefault(row, []).extend(new)
                else:
                    found.update(of_rows)
            if faults:
                raise StepFaultError(faults[0][0], [fault for _, fault in faults])
            if self._flights and self._flights[0].launch.steps > 1:
                self._take_early(self._flights[0], found)
        self._kept = {}
        return found

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A block that needs the rows as they are. A row that a model, or Python's collector of garbage, releases in it
        is given back at the end."""
        before = self._at_work
        try:
            self._at_work = before + 1
            yield
        finally:
            self._rest(before)

    def _rest(self, before: int) -> None:
        """The end of such a block. `before`: how many calls are under way without it."""
        try:
            while self._leaving and not before:  # the collector may release more meanwhile
                self._release(self._leaving[0])
                del self._leaving[0]
        finally:
            self._at_work = before

    @abstractmethod
    def _release(self, row: SessionRequest) -> None:
        """Take a row's id and its pages."""

    def _take_in(self, flights: list[Flight]) -> Taken:
        """Bring rows up to date with the first launches, which are of the same rows. The session is over where that is
        interrupted while rows change."""
        first = flights[0]
        tokens = np.concatenate([flight.launch.tokens(raise_on_fault=False) for flight in flights])
        ends = np.concatenate([flight.launch.ends() for flight in flights]).max(0, initial=0)
        sampled = tokens >= 0
        advanced = sampled.sum(0)
        if first.given is not None:
            wrote = advanced.astype(np.bool_) | (ends != int(FinishReason.FAULT))
            advanced = np.where(first.given > 0, first.given * wrote, advanced)
        lost = sum(flight.promised for flight in flights) - advanced
        rows, ids, places = first.rows, first.ids, None
        if rows is not self._order_rows:
            places, rows, ids = self._left(first)
            tokens, sampled, ends, advanced, lost = (v[..., places] for v in (tokens, sampled, ends, advanced, lost))
        columns = tokens.T.tolist()
        for place in (~sampled.all(0)).nonzero()[0].tolist():
            columns[place] = [token for token in columns[place] if token >= 0]
        if first.early:
            early = first.early if places is None else [first.early[place] for place in places.tolist()]
            columns = [new[count:] for new, count in zip(columns, early, strict=True)]
        changed, self._resets = self._resets, OVER  # until all rows are up to date
        for _ in flights:
            self._flights.popleft()
        if self._long_stops or self._away:
            stop_on_host(rows, columns, ends)
        for row, new in zip(rows, columns, strict=True):
            row.tokens += new
        if first.launch.logprobs() is not None:
            logprobs = StepLogprobs.joined([flight.launch.logprobs() for flight in flights], places)
            for place, row in enumerate(rows):
                row.take_logprobs(logprobs, place, sampled[:, place], len(columns[place]))
        # A row that the host ended at a stop token was over when it became faulty. A fork shares its row's place.
        faulty: dict[int, list[SessionRequest]] = {}
        for at in np.flatnonzero(ends == int(FinishReason.FAULT)).tolist():
            faulty.setdefault(at if places is None else int(places[at]), []).append(rows[at])
        faults = [
            (flight.launch.step, replace(fault, index=row.req_index))
            for flight in flights
            for fault in flight.launch.faults
            for row in faulty.get(fault.index, ())
        ]
        if places is not None and (away := ids == NO_INDEX).any():
            ids, advanced, lost = ids[~away], advanced[~away], lost[~away]
        self._reached[ids] += advanced
        if lost.any():
            self._most[ids] -= lost
        if ends.any():
            self._end([rows[place] for place in ends.nonzero()[0].tolist()], ends[ends > 0])
        self._resets = changed
        return Taken(rows, columns, faults)

    def _take_early(self, flight: Flight, found: dict[SessionRequest, list[int]]) -> None:
        """Take in what has arrived of a launch that runs, but for tokens that end a row."""
        tokens, ends = flight.launch.arrived()
        goes_on = (tokens >= 0) & (ends == int(FinishReason.RUNNING))
        counts, columns = goes_on.cumprod(0).sum(0).tolist(), tokens.T.tolist()
        before = flight.early or [0] * len(counts)
        places, rows, _ = self._left(flight)
        changed, self._resets = self._resets, OVER
        for place, row in zip(places.tolist(), rows, strict=True):
            if len(row.params.stop_ids) > STOP_TOKENS or row.params.logprobs is not None:
                counts[place] = 0  # the device knows the first stop tokens only
            elif new := columns[place][before[place] : counts[place]]:
                row.tokens += new
                found.setdefault(row, []).extend(new)
        flight.early = counts
        self._resets = changed

    def _left(self, flight: Flight) -> tuple[Ids, tuple[SessionRequest, ...], Ids]:
        """Of a launch's rows those that neither went nor ended meanwhile, and forks: their places, they, their ids."""
        left = [
            (place, row)
            for place, row in (*enumerate(flight.rows), *flight.forks)
            if not row.end and (self._rows.get(row.req_index) is row or row in self._away)
        ]
        places = np.array([place for place, _ in left], np.int64)
        return places, tuple(row for _, row in left), np.array([row.req_index for _, row in left], np.int64)

    def _end(self, rows: list[SessionRequest], ends: Int32Array) -> None:
        for row, end in zip(rows, ends.tolist(), strict=True):
            row.end = FinishReason(end)
            self._away.discard(row)
            self._prompts.pop(row.req_index, None)
        self._reorder(self._order[~np.isin(self._order, [row.req_index for row in rows])])
