"""Sequences that live on the device: the host says what is new, and launches as many steps as it likes.

    session = DecodeSession(runtime)
    row = session.add(prompt, SamplingParams(max_new_tokens=100))
    while session.running:
        session.run(8)                       # up to 8 steps: one launch, once all prompts are read
        for row, tokens in session.collect():
            ...

Between two launches a session sends what has changed: rows that came or went, and new pages. Lengths, last tokens and
sampling parameters stay on the device, which also notices when a row ends. So the host may be launches ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphrt.batch import Batch, Int32Array
from graphrt.engine.batch_delta import BatchDelta, StopConditions
from graphrt.engine.launch import Launch
from graphrt.engine.lifecycle import State, wrong_state
from graphrt.engine.request_tables import MaskWords, RequestValues, TableUpdates
from graphrt.kernels.checks import check_bool, check_instance, check_int, check_ints
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, ReplayError, ShapeError
from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS
from graphrt.kernels.metadata.step_inputs import SEQ_LEN_FROM_DEVICE
from graphrt.kernels.types import NO_TOKEN, TOKEN_FROM_DEVICE
from graphrt.runtime import Runtime, check_decoder
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import CallersPages, SessionPages
from graphrt.session.requests import NO_INDEX, Flight, Prompt, SessionRequest
from graphrt.session.results import OVER, RowsInFlight
from graphrt.session.sampling_values import SamplingValues


class DecodeSession(RowsInFlight):
    """Rows on the device, over the pages and row ids of a runtime.

    runtime     a captured one with a sampler; other users of its pages and rows may share it
    own_pages   False: your block manager hands out the pages, not the runtime's allocators. Rows get them by
                `append_pages`, and `take_pages` says which ones they need no more

    `add`, `fork` and `release` may be called while launches are in flight: they concern later launches. All calls come
    from one thread. Leave a session with `close()`, or use it in a `with` block.

    Each step is a launch of its own, which sends all that rows have, in two cases: the backend plans on the host, or
    `query_len` is not 1.

    Raises: ConfigError for a runtime without sampler, of a model with cross or encoder layers, or with query_len other
    than 1 and no mixed batches; CaptureError for a runtime that is not captured.
    """

    def __init__(self, runtime: Runtime, *, own_pages: bool = True) -> None:
        check_instance("runtime", runtime, Runtime, advice="build a Runtime")
        if runtime.state is not State.CAPTURED:
            raise wrong_state(runtime.state, State.CAPTURED, "DecodeSession")
        check_decoder(runtime)
        config, groups = runtime.config, runtime.kv_cache.groups
        super().__init__(config.max_num_reqs, runtime.manager.queue.resets)
        self._runtime, self._manager = runtime, runtime.manager
        self._budget, self._launch_steps = config.max_num_tokens, config.launch_steps
        self._chunk = config.max_num_tokens if config.mixed_batches else 1
        self._in_full = config.query_len != 1 or self._manager.plans_on_host is not None
        ids = config.max_num_reqs
        own_pages = check_bool("own_pages", own_pages, advice="pass a bool")
        self._foreign = () if own_pages else tuple(CallersPages(*pool) for pool in runtime.kv_cache.pools)
        self._pages = SessionPages(groups, self._foreign or runtime.allocators, ids, config.max_seq_len)
        self._given: dict[int, Int32Array] = {}  # by row id, the tokens that were known when it got the id
        self._held = set[int]()  # row ids of prompts that do not go on yet
        self._stops = np.full((STOP_TOKENS, ids), NO_TOKEN, np.int32)
        self._sampling = SamplingValues(ids)
        self._delta = TableUpdates.none()
        self._closed = False
        # What `fork` launches beside the graphs. The first use of a kernel loads it, which waits for steps in flight.
        for group in range(len(groups)):
            runtime.kv_cache.packer(group).warm_up()
        with self._manager.between_steps() as buffers:
            buffers.copy_request_state(0, 0)

    # -- rows come and go

    @property
    def rows(self) -> tuple[SessionRequest, ...]:
        """All rows, those included that have ended and were not released."""
        return tuple(self._rows.values())

    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, state: RequestValues | None = None
    ) -> SessionRequest:
        """Take in a sequence. Its prompt runs with the next launches, in chunks.

        prompt   token ids, at least one: a list, an array or a host tensor
        params   how it is sampled and when it ends; by default greedy, as long as a sequence can be
        state    what it has of RuntimeConfig.request_tensors, by name; of the others it has the initial values

        Raises: ShapeError for a prompt that is empty or no list of token ids, ConfigError for wrong params,
        UnsupportedError for params that the runtime was not built for, as with penalties, CapacityError for a sequence
        that is too long, for a prompt that needs more pages than there are, and where no row is free; nothing has
        changed then.
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
        tables = self._manager.request_tables
        tables.check_bias("params.logit_bias", params.logit_bias)
        values = tables.check_state({} if state is None else state)
        if len(tokens) + params.max_new_tokens - 1 > longest:
            raise CapacityError(
                f"prompt: expected prompt and output within max_seq_len={longest}, got {len(tokens)} + "
                f"{params.max_new_tokens} tokens; shorten it, lower max_new_tokens or raise max_seq_len"
            )
        self._pages.check_prompt(len(tokens))
        with self._working():
            row = self._take_row(SessionRequest(NO_INDEX, tokens.astype(np.int32), params))
            self._begin(row, row.prompt, 0, values)
        return row

    def _begin(self, row: SessionRequest, given: Int32Array, start: int, values: RequestValues) -> None:
        """Let a row begin with given tokens, of which the cache has `start` already, and with values of row tensors."""
        at, params = row.req_index, row.params
        self._reached[at] = self._most[at] = self._prompts[at] = start
        self._given[at] = given
        self._limits[at] = len(row.prompt) + params.max_new_tokens - 1
        self._sampling.set(at, params, len(row.prompt))
        banned = params.banned(len(row.prompt), self._runtime.vocab_size)
        self._delta.begin(at, dict(params.logit_bias), banned, values)  # a dict that the caller still has
        if params.logprobs is not None:
            self._asking.add(at)
        stops = sorted(params.stop_ids)[:STOP_TOKENS]
        self._stops[:, at] = NO_TOKEN
        self._stops[: len(stops), at] = stops

    def fork_needs(self, row: SessionRequest) -> list[int]:
        """Pages of each pool that `fork` of a row takes now. Raises: ConfigError as `release`."""
        self._own(row, "fork_needs")
        self._catch_up()
        at = row.req_index
        return self._pages.fork_needs(at, int(self._reached[at]), int(self._most[at]))

    def fork(
        self, row: SessionRequest, *, seed: int | None = None, pages: Sequence[Sequence[int]] | None = None
    ) -> SessionRequest:
        """A second sequence that goes on as `row` does, from where the launches so far bring it.

        Full pages are shared; others with tokens are copied, on the device. Pages that `row` has for tokens to come are
        not the fork's. The new row gets the tokens of launches in flight as `row` does.

        seed    of the new sequence; by default that of `row`, which then samples the same
        pages   with own_pages=False: a list for each pool, of as many as `fork_needs` says

        Raises: ConfigError for a row of another session or one whose prompt was not submitted yet, ShapeError for what
        are no pages of the cache, CapacityError where no row or page is free, ReplayError during a call of the manager
        and CaptureError after its `close()`; nothing has changed then.
        """
        self._own(row, "fork")
        at = row.req_index
        if at in self._prompts:
            raise ConfigError(
                f"fork: expected a row whose prompt was submitted, got row {at} with tokens left; run() first"
            )
        seed = row.params.seed if seed is None else seed
        seed = check_int("seed", seed, 0, (1 << 32) - 1, advice="take it modulo 2 ** 32")
        with self._working():
            self._catch_up()
            lent = self._pages.check_fork(at, int(self._reached[at]), int(self._most[at]), pages)
            params = row.params if seed == row.params.seed else replace(row.params, seed=seed)
            new = self._take_row(SessionRequest(NO_INDEX, row.prompt, params, list(row.tokens), row.end))
            try:
                self._copy(row, new, seed, lent)
            except BaseException:
                self._release(new)
                raise
            self._join(new, row)
            return new

    def _copy(self, row: SessionRequest, new: SessionRequest, seed: int, lent: list[Int32Array]) -> None:
        """Bring all that is known of a row to another one's place, on the host and on the device."""
        at, to = row.req_index, new.req_index
        length, most = int(self._reached[at]), int(self._most[at])
        new.logprobs, new.prompt_logprobs = list(row.logprobs), list(row.prompt_logprobs)
        if at in self._asking:
            self._asking.add(to)
        for values in (self._reached, self._most, self._limits):
            values[to] = values[at]
        self._sampling.copy(at, to)
        self._stops[:, to] = self._stops[:, at]
        self._sampling.put("seeds", to, seed)
        self._delta.write(self._manager.request_tables)
        if masked := self._sampling.arrays["token_masks"][at] >= 0:
            self._sampling.put("token_masks", to, to)
        with self._manager.between_steps() as buffers:
            buffers.copy_request_state(at, to)
            # By fill_: torch copies a number that is assigned to an element from the host, and waits for the device.
            buffers.req_values[COPIED.index("seeds"), to].fill_(int(np.uint32(seed).view(np.int32)))
            for pool, ids in zip(self._foreign, lent, strict=True):
                pool.stock(ids.tolist())
            for group, (sources, own) in self._pages.fork(at, to, length, most):
                self._runtime.kv_cache.copy_pages(sources, own, group=group)
            buffers.page_spans[:, to].zero_()  # those of `row`; the fork's first step lists all that the fork has
        self._manager.request_tables.copy(at, to)
        if masked:
            self._manager.request_tables.switch_masks({to: to})

    def append_pages(self, row: SessionRequest, pages: Int32Array | Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Give a row more pages, behind those that it has; launches to come may write them.

        pages   page ids of the cache, a list of ints; with several KV groups a list of lists, one per group. Nobody
                else may write them. A row needs `group.pages_for(tokens)` of them in all

        Raises: ConfigError for a session that owns its pages and for a row as `release`, ShapeError for what are no
        pages of the cache and for what a row of the session has until `take_pages` names it, CapacityError for more
        than the longest sequence has; nothing has changed then.
        """
        self._own(row, "append_pages")
        if not self._foreign:
            raise ConfigError("append_pages: expected a session with own_pages=False, got one that owns its pages")
        self._pages.append(row.req_index, pages)

    def take_pages(self) -> list[list[int]]:
        """The pages of each pool that rows need no more, since the last call: those of rows that were released, and
        those behind windows. They may be given to other rows at once, as launches run in their order. A page that rows
        share is named once, when the last of them gave it back.

        Raises: ConfigError for a session that owns its pages.
        """
        self._open("take_pages")
        if not self._foreign:
            raise ConfigError("take_pages: expected a session with own_pages=False, got one that owns its pages")
        with self._working():
            self._pages.give_back(self._order, self._reached[self._order])
        return [pool.take_back() for pool in self._foreign]

    def set_token_mask(self, row: SessionRequest, words: MaskWords | None) -> None:
        """Say which tokens a row may sample, in launches to come, until it is told something else.

        words   a bit per token, [ceil(vocab / 32)] of 32 bits on the host, as xgrammar and llguidance fill them: bit
                t % 32 of word t // 32 is set: token t is allowed. None: all are

        A mask holds for every step of a launch: a grammar, whose mask changes with each token, takes `run(1)` and
        `collect(wait=True)` per token. Words are copied at once, and written before the next launch.

        Raises: ShapeError for words of another shape, UnsupportedError without RuntimeConfig.token_masks, ConfigError
        as `release`.
        """
        self._own(row, "set_token_mask")
        at, before = row.req_index, int(self._sampling.arrays["token_masks"][row.req_index])
        if words is not None:
            self._delta.masks[at] = self._manager.request_tables.mask_words("words", words)
        now = -1 if words is None else at
        if now != before:
            self._delta.switched[at] = now
            self._sampling.put("token_masks", at, now)

    def release(self, row: SessionRequest) -> None:
        """Give a row and its pages back, whether it has ended or not. Launches in flight go on; nobody sees its tokens.

        Raises: ConfigError for a row of another session, or one that was released.
        """
        if not self._at_work:  # else the rows that are looked at may be between two states
            self._open("release")
        self._check_own(row, "release")
        with self._working():
            self._leaving.append(row)

    def _release(self, row: SessionRequest) -> None:
        """Take a row's id and its pages."""
        at = row.req_index
        self._asking.discard(at)
        self._long_stops.discard(at)
        self._given.pop(at, None)
        self._prompts.pop(at, None)
        self._held.discard(at)
        self._delta.drop(at)  # whoever gets the row id next may be no row of this session
        if at in self._order:
            self._reorder(self._order[self._order != at])
        self._pages.release(at)  # what is in flight runs before whoever gets the pages
        del self._rows[at]  # until here close() would do it again
        self._runtime.free_req_indices.append(at)
        self._manager.request_tables.left.add(at)

    def _take_row(self, row: SessionRequest) -> SessionRequest:
        """Give a row a row id."""
        if not self._runtime.free_req_indices:
            raise CapacityError(
                f"rows: expected a free one of {self._runtime.config.max_num_reqs}, got none; release() a row"
            )
        row.req_index = self._runtime.free_req_indices.pop()
        self._manager.request_tables.left.discard(row.req_index)  # it begins, and says what it has, or is a copy
        self._rows[row.req_index] = row
        if len(row.params.stop_ids) > STOP_TOKENS:
            self._long_stops.add(row.req_index)
        return row

    # -- steps

    def run(self, steps: int = 1, *, eager: bool = False) -> tuple[Launch, ...]:
        """Launch the next steps; never waits for their results, only where the config's `most_in_flight` are in flight.

        While prompts have tokens left, each step is a launch, which takes prompts in chunks beside the rows that go on.
        After that one launch takes up to `RuntimeConfig.launch_steps` steps. A row that ends on the way stands still
        from then on. So does one that has no page for its next token, until there is one.

        Returns the launches, the first one first; none where no row goes on.
        Raises: CapacityError where no row has a page for its next token, with what was launched before in flight; as
        ReplayManager.replay. After an error behind which steps may have run the session is over: close() it.
        """
        queue, flights = self._manager.queue, self._flights
        before, at_work = queue.launches - len(flights), self._at_work
        try:
            self._at_work = at_work + 1
            quiet = not self._prompts and not self._delta and self._resets == queue.resets and eager is False
            if quiet and type(steps) is int and 0 < steps <= self._quiet and steps <= self._launch_steps:
                return (self._go_on_quietly(steps, eager),)  # what a server does nearly all the time: no call too many
            steps = check_int("steps", steps, 1, 1 << 30, advice="pass how many steps to launch")
            eager = check_bool("eager", eager, advice="pass a bool")
            self._open("run")
            if self._delta:
                self._delta.write(self._manager.request_tables)
            launches: list[Launch] = []
            while steps and self.running:
                full = self._in_full or not self._prompts.keys() <= self._held
                most = 1 if full else min(steps, self._launch_steps)
                launch = self._full_step(eager) if full else self._go_on(most, eager)
                if launch is None:
                    break  # all rows have ended, which is still to be collected
                launches.append(launch)
                steps -= most
            return tuple(launches)
        except BaseException:
            if queue.launches - len(flights) != before:  # interrupted behind a launch: nobody would get its tokens
                self._resets = OVER
            raise
        finally:
            self._rest(at_work)

    def _go_on_quietly(self, steps: int, eager: bool) -> Launch:
        """Steps of which the device knows all: no row gets pages, none can come to its longest."""
        launch = self._manager.advance(self._no_delta, steps=steps, eager=eager)
        self._quiet -= steps
        self._ahead += steps
        self._flights.append(Flight(launch, self._order_rows, self._order, steps))
        return launch

    def _go_on(self, steps: int, eager: bool) -> Launch | None:
        """Steps of the rows that go on. None where all are at their longest."""
        if steps <= self._quiet:
            return self._go_on_quietly(steps, eager)
        self._catch_up()
        ids = self._order
        before, limits = self._most[ids], self._limits[ids]
        short = before < limits
        if not short.any():
            return None
        self._pages.give_back(ids, self._reached[ids])
        self._pages.reserve(ids[short], before[short], limits[short], steps)
        ends = np.minimum(limits, self._pages.room(ids))  # a row stands still at the end of its pages
        going_on = before < ends
        lists, pages = self._pages.delta(ids, going_on)
        delta = BatchDelta(ids, lists, pages, self._no_delta.logprobs)
        launch = self._manager.advance(delta, steps=steps, eager=eager)
        self._pages.submitted(ids[going_on])
        after = self._most[ids] = np.minimum(before + steps, ends)
        # No row can come to its longest, or to the end of its pages, in so many steps.
        self._quiet = int((ends - after).min())
        self._flights.append(Flight(launch, self._order_rows, ids, after - before))
        return launch

    def _full_step(self, eager: bool) -> Launch | None:
        """One step in full: the rows that go on, and as much of the prompts as there is room and pages for. None where
        all rows are at their longest."""
        self._catch_up()
        going_on = self._order[self._most[self._order] < self._limits[self._order]]
        if not len(going_on) and self._held.issuperset(self._prompts):
            return None
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
            seq_lens[: len(going_on)] = SEQ_LEN_FROM_DEVICE
        first_pages, page_indptr, page_ids = self._pages.listed(ids)
        batch = Batch(
            req_indices=ids.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            query_lens=promised.astype(np.int32),
            tokens=np.concatenate((np.full(len(going_on), TOKEN_FROM_DEVICE, np.int32), *chunks.values())),
            page_indptr=page_indptr,
            page_ids=page_ids,
            first_pages=first_pages,
            sample=np.array([1] * len(going_on) + whole, np.int32),
            **self._sampling.of(ids),
        )
        ends = StopConditions(self._limits[ids].astype(np.int32), self._stops[:, ids])
        rows = tuple(map(self._rows.__getitem__, ids.tolist()))
        launch = self._manager.begin(batch, ends, eager=eager)
        self._pages.submitted(ids)
        self._quiet = 0
        self._most[ids] += promised
        for at, chunk in chunks.items():
            self._prompts[at] += len(chunk)
        if done := [at for at, last in zip(chunks, whole, strict=True) if last]:
            for at in done:
                del self._prompts[at]
            self._reorder(np.append(self._order, done))
        self._flights.append(Flight(launch, rows, ids, promised, given))
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
            longest = self._chunk if self._rows[at].params.prompt_logprobs is None else 1
            count = self._pages.fitting(ids, start, min(budget, longest, len(tokens) - start))
            if not count:
                if self._foreign:
                    continue  # a later one may have been given pages
                break  # nor does a later one get what this one waits for
            row = self._rows[at]
            self._sampling.ask_of_prompt(at, row.params, tokens[start + 1 :], len(row.prompt) - start - 1)
            chunks[at] = tokens[start : start + count]
            budget -= count
        return chunks

    # -- results

    def collect(self, *, wait: bool = False) -> list[tuple[SessionRequest, list[int]]]:
        """Take in results: each row that got tokens, and which. Tokens are taken in while their launch runs, but for
        those that end a row, and of rows that asked for log-probabilities, which are once the launch has ended.

        wait   wait for every launch

        Raises: StepFaultError with the row ids of the faulty rows and their forks, which have ended. The next call
        returns the tokens of the other rows.
        """
        wait = check_bool("wait", wait, advice="pass a bool")
        self._open("collect")
        return [(row, new) for row, new in self._take_all(wait).items() if new]

    # -- the end

    def close(self) -> None:
        """Wait for launches in flight, and give rows and pages back. Closing twice is fine."""
        if self._at_work:
            raise ReplayError(
                "close: expected it between calls of the session, got it in the middle of one; close later"
            )
        self._closed = True  # a call that was interrupted here is repeated, and goes on
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
        if self._manager.state is not State.CAPTURED:
            raise wrong_state(self._manager.state, State.CAPTURED, call)
        if self._resets != self._manager.queue.resets:
            raise CaptureError(f"{call}: expected its rows, got a reset() or a call that failed on its way; close() it")

    def _own(self, row: SessionRequest, call: str) -> None:
        self._open(call)
        self._check_own(row, call)

    def _check_own(self, row: SessionRequest, call: str) -> None:
        check_instance("row", row, SessionRequest, advice="pass what add() or fork() returned")
        if self._rows.get(row.req_index) is not row or row in self._leaving:
            raise ConfigError(f"{call}: expected a row of this session, got one that was released or is another's")
