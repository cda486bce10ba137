"""Sequences that live on the device: the host says what is new, and launches as many steps as it likes.

    session = DecodeSession(runtime)
    row = session.add(prompt, SamplingParams(max_new_tokens=100))
    while session.running:
        session.run(8)                       # up to 8 tokens of each row, in one launch
        for row, tokens in session.collect():
            ...

Between two launches a session sends what has changed: rows that came or went, and new pages. Lengths, last tokens and
sampling parameters stay on the device, which also notices when a row ends. So the host may be launches ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Batch, Int32Array, sampling_values
from graphrt.handle import StepFaultError
from graphrt.kernels.checks import check_bool, check_instance, check_int, check_ints
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, ShapeError
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS
from graphrt.kernels.metadata.record import LENGTH_FROM_ROW
from graphrt.kernels.types import NO_TOKEN, TOKEN_FROM_ROW, RowEnd
from graphrt.launch import Launch
from graphrt.news import News, RowEnds
from graphrt.replay import State
from graphrt.runtime import Runtime, check_decoder
from graphrt.sampling_params import SamplingParams
from graphrt.session_pages import SessionPages

Prompt = Sequence[int] | Int32Array | torch.Tensor
"""Token ids: a list, an array or a host tensor of any int dtype."""

Ids = npt.NDArray[np.int64]

NO_ROW = -1  # row id of a row that has none


@dataclass(eq=False, slots=True)
class SessionRow:
    """A sequence of a session.

    row_id   its row state, which a model indexes by `Step.row_ids`
    prompt   [tokens] int32, what it began with
    tokens   what it has sampled since, as far as it was collected; a token that ends it is the last of them
    end      why it ended, as far as that was collected: GOES_ON while it has not
    """

    row_id: int
    prompt: Int32Array
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    end: RowEnd = RowEnd.GOES_ON


@dataclass(frozen=True, slots=True)
class Flight:
    """A launch that was not collected yet.

    rows      whose row each place is
    ids       [places] their row ids
    promised  tokens that each row was counted for: one number, or [places]
    given     how many of these are of a prompt, [places]: the row has them whether a token was sampled or not. None: of
              no prompt
    forks     rows that were forked from one in flight, with its place
    early     how many of its tokens each row has already, [places]; empty: none
    """

    launch: Launch
    rows: tuple[SessionRow, ...]
    ids: Ids
    promised: int | Ids
    given: Ids | None = None
    forks: list[tuple[int, SessionRow]] = field(default_factory=list)
    early: list[int] = field(default_factory=list)


class DecodeSession:
    """Rows on the device, over the pages and row ids of a runtime.

    runtime   a captured one with a sampler; other users of its pages and rows may share it

    `add`, `fork` and `release` may be called while launches are in flight: they concern later launches. All calls come
    from one thread. Leave a session with `close()`, or use it in a `with` block.

    A backend that plans on the host needs the lengths of each step there, and a decode size of `query_len` other than 1
    has no row of one token: every step goes in full then, in a launch of its own.

    Raises: ConfigError for a runtime without sampler, of a model with cross or encoder layers, or with query_len other
    than 1 and no mixed batches; CaptureError for a runtime that is not captured.
    """

    def __init__(self, runtime: Runtime) -> None:
        check_instance("runtime", runtime, Runtime, advice="build a Runtime")
        if runtime.state is not State.CAPTURED:
            raise CaptureError(
                f"runtime: expected a captured one, got state '{runtime.state.value}'; call capture() before"
            )
        check_decoder(runtime)
        config, groups = runtime.config, runtime.kv_cache.groups
        self._runtime = runtime
        self._budget = config.max_num_tokens
        self._chunk = config.max_num_tokens if config.mixed_batches else 1
        self._in_full = config.query_len != 1 or runtime.manager.plans_on_host is not None
        ids = config.max_num_reqs
        self._pages = SessionPages(groups, runtime.allocators, ids, config.max_seq_len)
        self._rows: dict[int, SessionRow] = {}
        self._away = set[SessionRow]()  # rows without a row id, which get the tokens of launches in flight
        self._given: dict[int, Int32Array] = {}  # by row id, the tokens that were known when it got the id
        self._prompts: dict[int, int] = {}  # by row id, how many of these were submitted, where some were not
        self._held = set[int]()  # row ids of prompts that do not go on yet
        self._order: Ids = np.empty(0, np.int64)  # the rows that go on by themselves
        self._order_rows: tuple[SessionRow, ...] = ()
        self._resets = runtime.manager.resets
        self._quiet = 0  # steps for which the device needs no news
        self._ahead = 0  # steps that were launched since `_most` was brought up to date
        self._reached = np.zeros(ids, np.int64)  # KV tokens that a row has for sure
        self._most = np.zeros(ids, np.int64)  # and at most, behind all launches
        self._limits = np.zeros(ids, np.int64)
        self._stops = np.full((STOP_TOKENS, ids), NO_TOKEN, np.int32)
        self._sampling = sampling_values(ids)
        self._flights: deque[Flight] = deque()
        self._closed = False

    # -- rows come and go

    @property
    def rows(self) -> tuple[SessionRow, ...]:
        """All rows, those included that have ended and were not released."""
        return tuple(self._rows.values())

    @property
    def running(self) -> bool:
        """Whether any row has not ended, as far as was collected: steps may be submitted in vain."""
        return bool(self._prompts) or bool(len(self._order))

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> SessionRow:
        """Take in a sequence. Its prompt runs with the next launches, in chunks.

        prompt   token ids, at least one: a list, an array or a host tensor
        params   how it is sampled and when it ends; by default greedy, as long as a sequence can be

        Raises: ShapeError for a prompt that is empty or no list of token ids, ConfigError for wrong params,
        CapacityError for a sequence that is too long, and where no row is free; nothing has changed then.
        """
        self._open("add")
        longest, last = self._runtime.config.max_seq_len, self._runtime.vocab_size - 1
        tokens = check_ints("prompt", prompt, 0, last, advice="pass token ids of the vocabulary")
        if not len(tokens):
            raise ShapeError("prompt: expected at least 1 token, got 0; begin with the model's first token")
        if params is None:
            params = SamplingParams(max_new_tokens=max(1, longest + 1 - len(tokens)))
        check_instance("params", params, SamplingParams, advice="pass SamplingParams(...)")
        if len(tokens) + params.max_new_tokens - 1 > longest:
            raise CapacityError(
                f"prompt: expected prompt and output within max_seq_len={longest}, got {len(tokens)} + "
                f"{params.max_new_tokens} tokens; shorten it or raise max_seq_len"
            )
        row = self._take_row(SessionRow(NO_ROW, tokens.astype(np.int32), params))
        self._begin(row, row.prompt, 0)
        return row

    def _begin(self, row: SessionRow, given: Int32Array, start: int) -> None:
        """Let a row begin with given tokens, of which the cache has `start` already."""
        at, params = row.row_id, row.params
        self._reached[at] = self._most[at] = self._prompts[at] = start
        self._given[at] = given
        self._limits[at] = len(row.prompt) + params.max_new_tokens - 1
        for name, values in self._sampling.items():
            values[at] = getattr(params, name.removesuffix("s"))
        stops = sorted(params.stop_ids)[:STOP_TOKENS]
        self._stops[:, at] = NO_TOKEN
        self._stops[: len(stops), at] = stops

    def fork(self, row: SessionRow, *, seed: int | None = None) -> SessionRow:
        """A second sequence that goes on as `row` does, from where the launches so far bring it.

        Full pages are shared; the others are copied, on the device. The new row gets the tokens of launches in flight
        as `row` does.

        seed   of the new sequence; by default that of `row`, which then samples the same

        Raises: ConfigError for a row of another session or one whose prompt was not submitted yet, CapacityError where
        no row or page is free; nothing has changed then.
        """
        self._own(row, "fork")
        at = row.row_id
        if at in self._prompts:
            raise ConfigError(
                f"fork: expected a row whose prompt was submitted, got row {at} with tokens left; run() first"
            )
        seed = int(self._sampling["seeds"][at]) if seed is None else seed
        seed = check_int("seed", seed, 0, (1 << 32) - 1, advice="take it modulo 2 ** 32")
        self._catch_up()
        length, most = int(self._reached[at]), int(self._most[at])
        self._pages.check_fork(at, length)
        new = self._take_row(SessionRow(NO_ROW, row.prompt, row.params, list(row.tokens), row.end))
        to = new.row_id
        for values in (self._reached, self._most, self._limits, *self._sampling.values()):
            values[to] = values[at]
        self._stops[:, to], self._sampling["seeds"][to] = self._stops[:, at], seed
        with self._runtime.manager.between_steps() as buffers:
            buffers.copy_row(at, to)
            buffers.row_values[COPIED.index("seeds"), to] = int(np.uint32(seed).view(np.int32))
            for group, (sources, own) in self._pages.fork(at, to, length, most):
                self._runtime.kv_cache.copy_pages(sources, own, group=group)
        for flight in self._flights:
            places = [*enumerate(flight.rows), *flight.forks]
            flight.forks.extend([(place, new) for place, other in places if other is row])
        if at in self._order:
            self._reorder(np.append(self._order, to))
        return new

    def release(self, row: SessionRow) -> None:
        """Give a row and its pages back, whether it has ended or not. Launches in flight go on; nobody sees its tokens.

        Raises: ConfigError for a row of another session, or one that was released.
        """
        self._own(row, "release")
        self._release(row)

    def _release(self, row: SessionRow) -> None:
        """Take a row's id and its pages."""
        at = row.row_id
        del self._rows[at]
        self._given.pop(at, None)
        self._prompts.pop(at, None)
        self._held.discard(at)
        if at in self._order:
            self._reorder(self._order[self._order != at])
        self._pages.release(at)  # what is in flight runs before whoever gets the pages
        self._runtime.free_rows.append(at)

    def _take_row(self, row: SessionRow) -> SessionRow:
        """Give a row a row id."""
        if not self._runtime.free_rows:
            raise CapacityError(
                f"rows: expected a free one of {self._runtime.config.max_num_reqs}, got none; release() a row"
            )
        row.row_id = self._runtime.free_rows.pop()
        self._rows[row.row_id] = row
        return row

    def _reorder(self, order: Ids) -> None:
        """From now on these rows go on by themselves."""
        self._catch_up()
        self._order, self._order_rows = order, tuple(map(self._rows.__getitem__, order.tolist()))
        self._quiet = 0

    def _catch_up(self) -> None:
        """Bring `_most` up to date."""
        self._most[self._order] += self._ahead
        self._ahead = 0

    # -- steps

    def run(self, steps: int = 1, *, eager: bool = False) -> tuple[Launch, ...]:
        """Launch the next steps; never waits for their results, only where `ring_depth` launches are in flight.

        While prompts have tokens left, each step is a launch, which takes prompts in chunks beside the rows that go on.
        After that one launch takes up to `RuntimeConfig.launch_steps` steps. A row that ends on the way stands still
        from then on. So does one that has no page for its next token, until there is one.

        Returns the launches, the first one first; none where no row goes on.
        Raises: CapacityError where no row has a page for its next token, with what was launched before in flight; as
        ReplayManager.replay.
        """
        steps = check_int("steps", steps, 1, 1 << 30, advice="pass how many steps to launch")
        eager = check_bool("eager", eager, advice="pass a bool")
        self._open("run")
        launches = []
        while steps and self.running:
            if not self._held.issuperset(self._prompts):
                launches.append(self._full_step(eager))
                steps -= 1
            elif not self._quiet and self._all_at_their_longest():
                break  # they have ended, which is still to be collected
            elif self._in_full:
                launches.append(self._full_step(eager))
                steps -= 1
            else:
                most = min(steps, self._runtime.config.launch_steps)
                launches.append(self._go_on(most, eager))
                steps -= most
        return tuple(launches)

    def _all_at_their_longest(self) -> bool:
        self._catch_up()
        return bool((self._most[self._order] >= self._limits[self._order]).all())

    def _go_on(self, steps: int, eager: bool) -> Launch:
        """Steps of the rows that go on: most of the time there are no news at all."""
        if steps <= self._quiet:
            launch = self._runtime.manager.advance(News(self._order), steps=steps, eager=eager)
            self._quiet -= steps
            self._ahead += steps
            self._flights.append(Flight(launch, self._order_rows, self._order, steps))
            return launch
        self._catch_up()
        ids, before = self._order, self._most[self._order]
        self._pages.give_back(ids, self._reached[ids])
        self._pages.reserve(ids, before, self._limits[ids], steps)
        news = News(ids, *self._pages.news(ids))
        launch = self._runtime.manager.advance(news, steps=steps, eager=eager)
        after = self._most[ids] = np.minimum(before + steps, self._limits[ids])
        self._flights.append(Flight(launch, self._order_rows, ids, after - before))
        # No row can come to its longest, or to the end of its pages, in so many steps.
        room = np.minimum(self._limits[ids], self._pages.room(ids)) - after
        self._quiet = max(0, int(room.min()))
        return launch

    def _full_step(self, eager: bool) -> Launch:
        """One step in full: the rows that go on, and as much of the prompts as there is room and pages for."""
        self._catch_up()
        going_on = self._order[self._most[self._order] < self._limits[self._order]]
        self._pages.give_back(going_on, self._reached[going_on])
        going_on = self._pages.with_pages(going_on, self._most[going_on] + 1)
        chunks = self._chunks(self._budget - len(going_on))
        ids = np.concatenate((going_on, np.fromiter(chunks, np.int64, len(chunks))))
        if not len(ids):
            raise self._pages.none_left()
        given = np.array([0] * len(going_on) + [len(chunk) for chunk in chunks.values()], np.int64)
        whole = [self._prompts[at] + len(chunk) == len(self._given[at]) for at, chunk in chunks.items()]
        promised = np.maximum(given, 1)
        seq_lens = self._most[ids] + promised
        if not self._in_full:  # the device also knows who has ended
            seq_lens[: len(going_on)] = LENGTH_FROM_ROW
        first_pages, page_indptr, page_ids = self._pages.listed(ids)
        batch = Batch(
            row_ids=ids.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            query_lens=promised.astype(np.int32),
            tokens=np.concatenate((np.full(len(going_on), TOKEN_FROM_ROW, np.int32), *chunks.values())),
            page_indptr=page_indptr,
            page_ids=page_ids,
            first_pages=first_pages,
            sample=np.array([1] * len(going_on) + whole, np.int32),
            **{name: values[ids] for name, values in self._sampling.items()},
        )
        ends = RowEnds(self._limits[ids].astype(np.int32), self._stops[:, ids])
        launch = self._runtime.manager.begin(batch, ends, eager=eager)
        self._quiet = 0
        self._most[ids] += promised
        rows = tuple(map(self._rows.__getitem__, ids.tolist()))
        self._flights.append(Flight(launch, rows, ids, promised, given))
        for at, chunk in chunks.items():
            self._prompts[at] += len(chunk)
        if done := [at for at, last in zip(chunks, whole, strict=True) if last]:
            for at in done:
                del self._prompts[at]
            self._reorder(np.append(self._order, done))
        return launch

    def _chunks(self, budget: int) -> dict[int, Int32Array]:
        """The next tokens of prompts by row id, as far as `budget` and pages go; their pages are allocated."""
        chunks: dict[int, Int32Array] = {}
        for at, start in self._prompts.items():
            if budget < 1:
                break
            if at in self._held:
                continue
            ids, tokens = np.array([at]), self._given[at]
            self._pages.give_back(ids, self._most[ids])
            count = self._pages.fitting(ids, start, min(budget, self._chunk, len(tokens) - start))
            if not count:
                break  # nor does a later one get what this one waits for
            chunks[at] = tokens[start : start + count]
            budget -= count
        return chunks

    # -- results

    def collect(self, *, wait: bool = False) -> list[tuple[SessionRow, list[int]]]:
        """Take in results: each row that got tokens, and which. Tokens are taken in while their launch runs, but for
        those that end a row, which are once the launch has ended.

        wait   wait for every launch

        Raises: StepFaultError that names the row ids of faulty rows, which have ended, once all was taken in.
        """
        wait = check_bool("wait", wait, advice="pass a bool")
        self._open("collect")
        found: dict[SessionRow, list[int]] = {}
        error: StepFaultError | None = None
        while self._flights and (wait or self._flights[0].launch.done()):
            error = self._take_in(self._flights.popleft(), found) or error
        if error is not None:
            raise error
        if self._flights and self._flights[0].launch.steps > 1:
            self._take_early(self._flights[0], found)
        return list(found.items())

    def _take_early(self, flight: Flight, found: dict[SessionRow, list[int]]) -> None:
        """Take in what has arrived of a launch that runs, but for tokens that end a row."""
        tokens, ends = flight.launch.arrived()
        goes_on = (tokens >= 0) & (ends == int(RowEnd.GOES_ON))
        counts, columns = goes_on.cumprod(0).sum(0).tolist(), tokens.T.tolist()
        before = flight.early or [0] * len(counts)
        for place, row in (*enumerate(flight.rows), *flight.forks):
            if row.end or not (row in self._away or self._rows.get(row.row_id) is row):
                continue
            if len(row.params.stop_ids) > STOP_TOKENS:
                counts[place] = 0  # the device knows the first of them
            elif new := columns[place][before[place] : counts[place]]:
                row.tokens += new
                found.setdefault(row, []).extend(new)
        flight.early[:] = counts

    def _take_in(self, flight: Flight, found: dict[SessionRow, list[int]]) -> StepFaultError | None:
        launch, ids = flight.launch, flight.ids
        tokens = launch.tokens(raise_on_fault=False)
        sampled, ends = tokens >= 0, launch.ends.max(0, initial=0)
        advanced = sampled.sum(0)
        if flight.given is not None:
            wrote = advanced.astype(np.bool_) | (ends != int(RowEnd.FAULT))
            advanced = np.where(flight.given > 0, flight.given * wrote, advanced)
        lost = flight.promised - advanced
        columns, ended, gone = tokens.T.tolist(), ends.tolist(), []
        places, here, faulty = list[int](), list[int](), set[int]()
        whole = bool(sampled.all())
        for place, row in (*enumerate(flight.rows), *flight.forks):
            at, new = row.row_id, columns[place]
            seated = self._rows.get(at) is row
            if row.end or not (seated or row in self._away):
                continue
            if seated:
                places.append(place)
                here.append(at)
            if not whole:
                new = [token for token in new if token >= 0]
            if flight.early:
                new = new[flight.early[place] :]
            if len(row.params.stop_ids) > STOP_TOKENS:  # the device knows the first of them
                for index, token in enumerate(new):
                    if token in row.params.stop_ids:
                        new, ended[place] = new[: index + 1], int(RowEnd.STOP_TOKEN)
                        break
            if new:
                row.tokens += new
                found.setdefault(row, []).extend(new)
            if ended[place]:
                row.end = RowEnd(ended[place])
                if row.end is RowEnd.FAULT:
                    faulty.add(place)
                self._away.discard(row)
                if seated:
                    self._prompts.pop(at, None)
                    gone.append(at)
        self._reached[here] += advanced[places]
        self._most[here] -= lost[places]
        if gone:
            self._reorder(self._order[~np.isin(self._order, gone)])
        if not faulty:
            return None
        faults = [replace(fault, row=int(ids[fault.row])) for fault in launch.faults if fault.row in faulty]
        return StepFaultError(launch.step, faults)

    # -- the end

    def close(self) -> None:
        """Wait for launches in flight, and give rows and pages back. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            for flight in self._flights:
                flight.launch.wait()  # nobody who gets the pages may find them written
        finally:
            self._flights.clear()
            self._away.clear()
            for row in self.rows:
                self._release(row)

    def __enter__(self) -> DecodeSession:
        self._open("with")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, call: str) -> None:
        if self._closed:
            raise CaptureError(f"{call}: expected an open session, got one that was closed; make a new DecodeSession")
        if self._resets != self._runtime.manager.resets:
            raise CaptureError(f"{call}: expected rows on the device, got none after reset(); close() the session")

    def _own(self, row: SessionRow, call: str) -> None:
        self._open(call)
        check_instance("row", row, SessionRow, advice="pass what add() or fork() returned")
        if self._rows.get(row.row_id) is not row:
            raise ConfigError(f"{call}: expected a row of this session, got one that was released or is another's")
