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
from dataclasses import replace

import numpy as np

from graphrt.batch import Batch, Int32Array
from graphrt.entry import State
from graphrt.handle import RowFault, StepFaultError
from graphrt.kernels.checks import check_bool, check_instance, check_int, check_ints
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS
from graphrt.kernels.metadata.record import LENGTH_FROM_ROW
from graphrt.kernels.types import NO_TOKEN, TOKEN_FROM_ROW, RowEnd
from graphrt.launch import Launch
from graphrt.logprobs import StepLogprobs
from graphrt.news import News, RowEnds
from graphrt.row_tables import MaskWords, RowNews, RowValues, copy_row_state
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.sampling_values import SamplingValues
from graphrt.session_pages import SessionPages
from graphrt.session_rows import Flight, Ids, Prompt, SessionRow, stop_on_host


class DecodeSession:
    """Rows on the device, over the pages and row ids of a runtime.

    runtime   a captured one with a sampler; other users of its pages and rows may share it

    `add`, `fork` and `release` may be called while launches are in flight: they concern later launches. All calls come
    from one thread. Leave a session with `close()`, or use it in a `with` block.

    Raises: ConfigError for a runtime without sampler, of a model with cross or encoder layers, or with query_len other
    than 1; UnsupportedError for a backend that plans on the host; CaptureError for a runtime that is not captured.
    """

    def __init__(self, runtime: Runtime) -> None:
        check_instance("runtime", runtime, Runtime, advice="build a Runtime")
        if runtime.state is not State.CAPTURED:
            raise CaptureError(
                f"runtime: expected a captured one, got state '{runtime.state.value}'; call capture() before"
            )
        config, groups = runtime.config, runtime.kv_cache.groups
        if not runtime.samples:
            raise ConfigError("runtime: expected one with a sampler, got sampler=None; build it with a sampler")
        if not groups or any(group.cross for group in groups):
            raise ConfigError(
                "runtime: expected a decoder alone, got a model with cross layers or without a cache; submit batches "
                "to replay() yourself"
            )
        if config.query_len != 1:
            raise ConfigError(f"runtime: expected query_len=1, got {config.query_len}; rows go on by one token a step")
        if (planner := runtime.manager.plans_on_host) is not None:
            raise UnsupportedError(
                f"runtime: expected a backend that plans on the device, got {planner}, which needs lengths on the "
                "host; submit batches to replay(), or choose another backend"
            )
        self._runtime = runtime
        self._budget = config.max_num_tokens
        self._chunk = config.max_num_tokens if config.mixed_batches else 1
        ids = config.max_num_reqs
        self._pages = SessionPages(groups, runtime.allocators, ids, config.max_seq_len)
        self._rows: dict[int, SessionRow] = {}
        self._prompts: dict[int, int] = {}  # by row id, how many tokens of the prompt were submitted
        self._order: Ids = np.empty(0, np.int64)  # the rows that go on by themselves
        self._order_rows: tuple[SessionRow, ...] = ()
        self._no_news = News(self._order)
        self._long_stops: set[int] = set()  # rows with more stop tokens than the device knows
        self._resets = runtime.manager.resets
        self._quiet = 0  # steps for which the device needs no news
        self._ahead = 0  # steps that were launched since `_most` was brought up to date
        self._reached = np.zeros(ids, np.int64)  # KV tokens that a row has for sure
        self._most = np.zeros(ids, np.int64)  # and at most, behind all launches
        self._limits = np.zeros(ids, np.int64)
        self._stops = np.full((STOP_TOKENS, ids), NO_TOKEN, np.int32)
        self._sampling = SamplingValues(ids)
        self._news = RowNews.none()
        self._asking = set[int]()  # row ids that asked for log-probabilities
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

    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, state: RowValues | None = None
    ) -> SessionRow:
        """Take in a sequence. Its prompt runs with the next launches, in chunks.

        prompt   token ids, at least one: a list, an array or a host tensor
        params   how it is sampled and when it ends; by default greedy, as long as a sequence can be
        state    what it has of RuntimeConfig.row_tensors, by name; of the others it has the initial values

        Raises: ShapeError for a prompt that is empty or no list of token ids, ConfigError for wrong params,
        UnsupportedError for params that the runtime was not built for, as with penalties, CapacityError for a sequence
        that is too long, and where no row is free; nothing has changed then.
        """
        self._open("add")
        longest, last = self._runtime.config.max_seq_len, self._runtime.vocab_size - 1
        tokens = check_ints("prompt", prompt, 0, last, advice="pass token ids of the vocabulary")
        if not len(tokens):
            raise ShapeError("prompt: expected at least 1 token, got 0; begin with the model's first token")
        if params is None:
            params = SamplingParams(max_new_tokens=max(1, longest + 1 - len(tokens)))
        check_instance("params", params, SamplingParams, advice="pass SamplingParams(...)")
        self._runtime.config.check_needs("params", params.needs)
        tables = self._runtime.manager.row_tables
        tables.check_bias("params.logit_bias", params.logit_bias)
        values = tables.check_state(state or {})
        if (limit := len(tokens) + params.max_new_tokens - 1) > longest:
            raise CapacityError(
                f"prompt: expected prompt and output within max_seq_len={longest}, got {len(tokens)} + "
                f"{params.max_new_tokens} tokens; shorten it or raise max_seq_len"
            )
        row = self._take_row(tokens.astype(np.int32), params)
        at = row.row_id
        self._reached[at] = self._most[at] = 0
        self._limits[at] = limit
        self._sampling.set(at, params, len(tokens))
        self._news.begin(at, params.logit_bias, values)
        if params.logprobs is not None:
            self._asking.add(at)
        stops = sorted(params.stop_ids)[:STOP_TOKENS]
        self._stops[:, at] = NO_TOKEN
        self._stops[: len(stops), at] = stops
        self._prompts[at] = 0
        return row

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
        seed = int(self._sampling.arrays["seeds"][at]) if seed is None else seed
        seed = check_int("seed", seed, 0, (1 << 32) - 1, advice="take it modulo 2 ** 32")
        self._catch_up()
        length, most = int(self._reached[at]), int(self._most[at])
        self._pages.check_fork(at, length)
        new = self._take_row(row.prompt, row.params)
        to, new.tokens, new.end = new.row_id, list(row.tokens), row.end
        new.logprobs, new.prompt_logprobs = list(row.logprobs), list(row.prompt_logprobs)
        if at in self._asking:
            self._asking.add(to)
        for values in (self._reached, self._most, self._limits):
            values[to] = values[at]
        self._sampling.copy(at, to)
        self._stops[:, to] = self._stops[:, at]
        self._sampling.put("seeds", to, seed)
        self._news.write(self._runtime.manager.row_tables)
        if masked := self._sampling.arrays["token_masks"][at] >= 0:
            self._sampling.put("token_masks", to, to)
        with self._runtime.manager.between_steps() as buffers:
            copy_row_state(buffers, at, to)
            buffers.row_values[COPIED.index("seeds"), to] = int(np.uint32(seed).view(np.int32))
            for group, (sources, own) in self._pages.fork(at, to, length, most):
                self._runtime.kv_cache.copy_pages(sources, own, group=group)
        self._runtime.manager.row_tables.copy(at, to)
        if masked:
            self._runtime.manager.row_tables.switch_masks({to: to})
        for flight in self._flights:
            places = [*enumerate(flight.rows), *flight.forks]
            flight.forks.extend([(place, new) for place, other in places if other is row])
        if at in self._order:
            self._reorder(np.append(self._order, to))
        return new

    def set_token_mask(self, row: SessionRow, words: MaskWords | None) -> None:
        """Say which tokens a row may sample, in launches to come, until it is told something else.

        words   a bit per token, [ceil(vocab / 32)] of 32 bits on the host, as xgrammar and llguidance fill them: bit
                t % 32 of word t // 32 is set: token t is allowed. None: all are

        A mask holds for every step of a launch: a grammar, whose mask changes with each token, takes `run(1)` and
        `collect(wait=True)` per token. Words are copied at once, and written before the next launch.

        Raises: ShapeError for words of another shape, UnsupportedError without RuntimeConfig.token_masks, ConfigError
        as `release`.
        """
        self._own(row, "set_token_mask")
        at, before = row.row_id, int(self._sampling.arrays["token_masks"][row.row_id])
        if words is not None:
            self._news.masks[at] = self._runtime.manager.row_tables.mask_words("words", words)
        now = -1 if words is None else at
        if now != before:
            self._news.switched[at] = now
            self._sampling.put("token_masks", at, now)

    def release(self, row: SessionRow) -> None:
        """Give a row and its pages back, whether it has ended or not. Launches in flight go on; nobody sees its tokens.

        Raises: ConfigError for a row of another session, or one that was released.
        """
        self._own(row, "release")
        self._release(row)

    def _release(self, row: SessionRow) -> None:
        at = row.row_id
        del self._rows[at]
        self._asking.discard(at)
        self._prompts.pop(at, None)
        self._long_stops.discard(at)
        self._reorder(self._order[self._order != at])
        self._pages.release(at)  # what is in flight runs before whoever gets the pages
        self._runtime.free_rows.append(at)

    def _take_row(self, prompt: Int32Array, params: SamplingParams) -> SessionRow:
        if not self._runtime.free_rows:
            raise CapacityError(
                f"rows: expected a free one of {self._runtime.config.max_num_reqs}, got none; release() a row"
            )
        row = SessionRow(self._runtime.free_rows.pop(), prompt, params)
        self._rows[row.row_id] = row
        if len(params.stop_ids) > STOP_TOKENS:
            self._long_stops.add(row.row_id)
        return row

    def _reorder(self, order: Ids) -> None:
        """From now on these rows go on by themselves."""
        self._catch_up()
        self._order, self._order_rows = order, tuple(map(self._rows.__getitem__, order.tolist()))
        self._no_news, self._quiet = News(order, logprobs=bool(self._asking)), 0

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
        if self._news:
            self._news.write(self._runtime.manager.row_tables)
        launches = []
        while steps and self.running:
            most = 1 if self._prompts else min(steps, self._runtime.config.launch_steps)
            launch = self._full_step(eager) if self._prompts else self._go_on(most, eager)
            if launch is None:
                break  # all rows have ended, which is still to be collected
            launches.append(launch)
            steps -= most
        return tuple(launches)

    def _go_on(self, steps: int, eager: bool) -> Launch | None:
        """Steps of the rows that go on: most of the time there are no news at all. None where all are at their
        longest."""
        if steps <= self._quiet:
            launch = self._runtime.manager.advance(self._no_news, steps=steps, eager=eager)
            self._quiet -= steps
            self._ahead += steps
            self._flights.append(Flight(launch, self._order_rows, self._order, steps))
            return launch
        self._catch_up()
        ids = self._order
        before, limits = self._most[ids], self._limits[ids]
        if (before >= limits).all():
            return None
        self._pages.give_back(ids, self._reached[ids])
        self._pages.reserve(ids, before, limits, steps)
        lists, pages = self._pages.news(ids)
        news = News(ids, lists, pages, self._no_news.logprobs)
        launch = self._runtime.manager.advance(news, steps=steps, eager=eager)
        self._pages.submitted(ids)
        after = self._most[ids] = np.minimum(before + steps, limits)
        self._flights.append(Flight(launch, self._order_rows, ids, after - before))
        # No row can come to its longest, or to the end of its pages, in so many steps.
        self._quiet = max(0, int((np.minimum(limits, self._pages.room(ids)) - after).min()))
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
        whole = [self._prompts[at] + len(chunk) == len(self._rows[at].prompt) for at, chunk in chunks.items()]
        seq_lens = np.full(len(ids), LENGTH_FROM_ROW, np.int64)
        seq_lens[len(going_on) :] = self._most[ids[len(going_on) :]] + given[len(going_on) :]
        first_pages, page_indptr, page_ids = self._pages.listed(ids)
        batch = Batch(
            row_ids=ids.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            query_lens=np.maximum(given, 1).astype(np.int32),
            tokens=np.concatenate((np.full(len(going_on), TOKEN_FROM_ROW, np.int32), *chunks.values())),
            page_indptr=page_indptr,
            page_ids=page_ids,
            first_pages=first_pages,
            sample=np.array([1] * len(going_on) + whole, np.int32),
            **self._sampling.of(ids),
        )
        ends = RowEnds(self._limits[ids].astype(np.int32), self._stops[:, ids])
        launch = self._runtime.manager.begin(batch, ends, eager=eager)
        self._pages.submitted(ids)
        self._quiet = 0
        promised = np.maximum(given, 1)
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
            ids, prompt = np.array([at]), self._rows[at].prompt
            self._pages.give_back(ids, self._most[ids])
            params = self._rows[at].params
            longest = self._chunk if params.prompt_logprobs is None else 1
            count = self._pages.fitting(ids, start, min(budget, longest, len(prompt) - start))
            if not count:
                break  # nor does a later one get what this one waits for
            if params.prompt_logprobs is not None:
                more = start + 1 < len(prompt)
                asked, token = (params.prompt_logprobs, int(prompt[start + 1])) if more else (params.logprobs, -1)
                self._sampling.ask_logprobs(at, asked, token)
            chunks[at] = prompt[start : start + count]
            budget -= count
        return chunks

    # -- results

    def collect(self, *, wait: bool = False) -> list[tuple[SessionRow, list[int]]]:
        """Take in the results of launches that have ended: each row that got tokens, and which.

        wait   wait for every launch

        Raises: StepFaultError that names the row ids of faulty rows, which have ended, once all was taken in.
        """
        wait = check_bool("wait", wait, advice="pass a bool")
        self._open("collect")
        found: dict[SessionRow, list[int]] = {}
        faulty: list[tuple[int, RowFault]] = []
        while self._flights and (wait or self._flights[0].launch.done()):
            flights = self._ended(wait)
            taken = zip(*self._take_in(flights), strict=True)
            if found:
                for row, new in taken:
                    found.setdefault(row, []).extend(new)
            else:
                found = dict(taken)
            for flight in flights:
                for fault in flight.launch.faults:
                    faulty.append((flight.launch.step, replace(fault, row=int(flight.ids[fault.row]))))
        if faulty:
            raise StepFaultError(faulty[0][0], [fault for _, fault in faulty])
        return [(row, new) for row, new in found.items() if new]

    def _ended(self, wait: bool) -> list[Flight]:
        """The first launch, which has ended, and the next ones of the same rows that have: they are taken in as one."""
        flights = [self._flights.popleft()]
        rows = flights[0].rows
        while self._flights and self._flights[0].rows is rows and not (flights[0].forks or self._flights[0].forks):
            if not (wait or self._flights[0].launch.done()):
                break
            flights.append(self._flights.popleft())
        return flights

    def _take_in(self, flights: list[Flight]) -> tuple[tuple[SessionRow, ...], list[list[int]]]:
        """Bring rows up to date; returns those that were in the launches, and the new tokens of each."""
        first = flights[0]
        tokens = np.concatenate([flight.launch.tokens(raise_on_fault=False) for flight in flights])
        ends = np.concatenate([flight.launch.ends for flight in flights]).max(0, initial=0)
        sampled = tokens >= 0
        advanced = sampled.sum(0)
        if first.given is not None:
            wrote = advanced.astype(np.bool_) | (ends != int(RowEnd.FAULT))
            advanced = np.where(first.given > 0, first.given * wrote, advanced)
        lost = sum(flight.promised for flight in flights) - advanced
        rows, ids, places = first.rows, first.ids, None
        if rows is not self._order_rows:
            places, rows, ids = self._left(first)
            tokens, sampled, ends, advanced, lost = (v[..., places] for v in (tokens, sampled, ends, advanced, lost))
        columns = tokens.T.tolist()
        for place in (~sampled.all(0)).nonzero()[0].tolist():
            columns[place] = [token for token in columns[place] if token >= 0]
        if self._long_stops:
            stop_on_host(rows, columns, ends)
        for row, new in zip(rows, columns, strict=True):
            row.tokens += new
        if first.launch.logprobs is not None:
            logprobs = StepLogprobs.joined([flight.launch.logprobs for flight in flights], places)
            for place, row in enumerate(rows):
                row.take_logprobs(logprobs, place, sampled[:, place], len(columns[place]))
        self._reached[ids] += advanced
        if lost.any():
            self._most[ids] -= lost
        if ends.any():
            self._end(rows, ids, ends)
        return rows, columns

    def _left(self, flight: Flight) -> tuple[Ids, tuple[SessionRow, ...], Ids]:
        """Of a launch's rows those that neither went nor ended meanwhile, and forks: their places, they, their ids."""
        left = [
            (place, row)
            for place, row in (*enumerate(flight.rows), *flight.forks)
            if self._rows.get(row.row_id) is row and not row.end
        ]
        places = np.array([place for place, _ in left], np.int64)
        return places, tuple(row for _, row in left), np.array([row.row_id for _, row in left], np.int64)

    def _end(self, rows: tuple[SessionRow, ...], ids: Ids, ends: Int32Array) -> None:
        gone = ends.nonzero()[0]
        for place in gone.tolist():
            rows[place].end = RowEnd(int(ends[place]))
            self._prompts.pop(rows[place].row_id, None)
        self._reorder(self._order[~np.isin(self._order, ids[gone])])

    # -- the end

    def close(self) -> None:
        """Wait for launches in flight, and give rows and pages back. Closing twice is fine."""
        if self._closed:
            return
        for flight in self._flights:
            flight.launch.wait()
        self._flights.clear()
        for row in self.rows:
            self._release(row)
        self._closed = True

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
