"""Requests that stay on the device between launches.

    session = DecodeSession(runtime)
    request = session.add(prompt, SamplingParams(max_new_tokens=100))
    while session.running:
        session.run(8)                       # up to 8 steps, in one launch once all prompts are computed
        for request, tokens in session.collect():
            ...

Between two launches a session sends only changes: added or released requests, and new pages. Lengths, last tokens and
sampling parameters stay on the device, which also detects the end of a request. So the host may be several launches
ahead of the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from graphrt.batch import Int32Array
from graphrt.cache.page_allocator import PageLease
from graphrt.engine.handle import Launch
from graphrt.engine.lifecycle import Exclusive, State, wrong_state
from graphrt.engine.request_tables import MaskWords, RequestValues, TableUpdates
from graphrt.kernels.checks import check_bool, check_instance, check_int, check_ints
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, RankError, ShapeError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.runtime import Runtime, check_decoder
from graphrt.sampling_params import SamplingParams
from graphrt.session.launches import Launches
from graphrt.session.pages import ExternalPages, Ledger, SessionPages
from graphrt.session.requests import NO_INDEX, Prompt, SessionRequest
from graphrt.session.steps import StepLauncher
from graphrt.session.table import RequestTable


class DecodeSession:
    """Requests on the device, with pages and request indices of a runtime.

    `add`, `fork` and `release` may be called while launches are in flight, and take effect with the next launch. A call
    from another thread, a signal handler, a model or a finalizer during another call raises ReplayError.

    If an exception interrupts a call in the middle of a change, KeyboardInterrupt for example, later calls raise
    CaptureError. `collect` still returns the tokens of launches in flight, and `close` returns all pages and request
    indices. End a session with `close()`, or use it in a `with` block.

    If the backend plans on the host, each step is a separate launch with all inputs.

    runtime         a captured runtime with a sampler. Several sessions and other callers may share it
    external_pages  your block manager allocates the pages, not the runtime's allocators. `append_pages` adds pages to
                    requests, and `pop_freed_pages` returns pages that are no longer needed

    table, pages, launches  parts of the session that schedulers in this package use

    Raises: ConfigError: if the runtime has no sampler, or its model has cross or encoder layers. CaptureError: if the
    runtime is not captured.
    """

    def __init__(self, runtime: Runtime, *, external_pages: bool = False) -> None:
        check_instance("runtime", runtime, Runtime, advice="build a Runtime")
        if runtime.state is not State.CAPTURED:
            raise wrong_state(runtime.state, State.CAPTURED, "DecodeSession")
        check_decoder(runtime)
        external_pages = check_bool("external_pages", external_pages, advice="pass a bool")
        config, groups = runtime.config, runtime.kv_cache.groups
        self._runtime, self._manager = runtime, runtime.manager
        self._launch_steps, self._most_drafts = config.launch_steps, config.num_speculative_tokens
        self._exclusive = Exclusive("DecodeSession", "call a session from one thread, and not from inside its calls")
        self._ledger = Ledger(runtime, external_pages=external_pages)
        external = [ExternalPages(*pool) for pool in runtime.kv_cache.pools] if external_pages else []
        self.pages = SessionPages(groups, external or self._ledger.pages, config.max_num_reqs, config.max_seq_len)
        self.table = RequestTable(config.max_num_reqs, has_drafts=self._most_drafts > 0)
        self.launches = Launches(self.table, self._manager.stats())
        self._steps = StepLauncher(self._manager, self.table, self.pages, self.launches)
        self._updates, self._has_updates = TableUpdates(), False
        self._resets = self._manager.queue.resets
        self._closed = False
        # Load the kernels that `fork` launches, because the first use of a kernel waits for steps in flight.
        for group in range(len(groups)):
            runtime.kv_cache.packer(group).warm_up()
        self._manager.between_steps(lambda buffers: buffers.copy_request_state(0, 0))
        self._dropped = weakref.finalize(self, self._ledger.drop)
        self._dropped.atexit = False

    # -- requests

    @property
    def requests(self) -> tuple[SessionRequest, ...]:
        """All requests that were not released, including finished requests."""
        return tuple(self.table.requests.values())

    @property
    def leases(self) -> tuple[PageLease, ...]:
        """The leases that the session's pages come from, by pool; empty with external_pages=True."""
        return self._ledger.pages

    @property
    def running(self) -> bool:
        """True if any collected request is unfinished. Requests may have finished since, so a step can be wasted."""
        return self.table.running

    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, state: RequestValues | None = None
    ) -> SessionRequest:
        """Add a request. Its prompt runs with the next launches, in chunks.

        prompt  token ids, at least one: a list, an array or a host tensor
        params  how to sample, and when to finish; by default greedy, up to `max_seq_len`
        state   values of RuntimeConfig.request_tensors, by name; other tensors get their initial values

        Raises: ShapeError: if `prompt` is empty or not a list of token ids. ConfigError: if `params` are wrong.
        UnsupportedError: if the runtime was built without an option that the params need, such as penalties.
        CapacityError: if the sequence is too long, the prompt needs more pages than the cache has, or no request index
        is free. An error changes nothing.
        """
        with self._exclusive:
            self._check_open("add")
            tokens, params = check_request(self._runtime, prompt, params, "prompt", "params")
            values = self._manager.request_tables.check_state({} if state is None else state)
            self.pages.check_prompt(len(tokens))
            self._ledger.check_index()
            request = SessionRequest(NO_INDEX, tokens, params)
            with self.table.flag:
                self.start(request, request.prompt, 0, values)
            return request

    def start(self, request: SessionRequest, known: Int32Array, start: int, values: RequestValues) -> None:
        """Assign a request index, and start with known tokens. The KV cache already contains the first `start`
        tokens."""
        request.req_index = at = self._ledger.take_index()
        self._manager.request_tables.left.discard(at)  # `begin` overwrites the state of the last request there
        self._has_updates = True
        banned = request.params.banned(len(request.prompt), self._runtime.vocab_size)
        bias = dict(request.params.logit_bias)  # a copy, as the caller may change the dict
        self._updates.begin(at, bias, banned, values)
        self.table.begin(request, known, start)

    def fork_needs(self, request: SessionRequest) -> list[int]:
        """Return how many pages of each pool a `fork` of a request needs now. Raises: see `release`."""
        with self._exclusive:
            self._check_own(request, "fork_needs")
            return self.pages.fork_needs(request.req_index, *self._lengths(request))

    def fork(
        self, request: SessionRequest, *, seed: int | None = None, pages: Sequence[Sequence[int]] | None = None
    ) -> SessionRequest:
        """Add a copy of `request` that continues from its state after all launches so far.

        Full pages are shared; a partly filled page is copied on the device. Pages that `request` has for later tokens
        are not shared. Both requests get the tokens of launches in flight.

        seed   seed of the new request; by default that of `request`, so that both sample the same tokens
        pages  with external_pages=True, one list per pool, with as many pages as `fork_needs` returns

        Raises: ConfigError: if the request belongs to another session, or has prompt tokens left. ShapeError: if
        `pages` are not pages of the cache. CapacityError: if no request index or page is free. ReplayError: during a
        call of the manager. CaptureError: after its `close()`. An error changes nothing.
        """
        with self._exclusive:
            self._check_own(request, "fork")
            at = request.req_index
            if at in self.table.prefills:
                raise ConfigError(f"fork: request {at} has prompt tokens left; run() until they are submitted")
            seed = request.params.seed if seed is None else seed
            seed = check_int("seed", seed, 0, (1 << 32) - 1, advice="take it modulo 2 ** 32")
            lengths = self._lengths(request)
            given = self.pages.check_fork(at, *lengths, pages)
            self._ledger.check_index()
            self._write_updates()
            params = request.params if seed == request.params.seed else replace(request.params, seed=seed)
            fork = SessionRequest(
                NO_INDEX, request.prompt, params, list(request.tokens), request.finish_reason,
                list(request.logprobs), list(request.prompt_logprobs), request.verify_steps,
                request.num_draft_tokens, request.num_accepted_tokens,
            )  # fmt: skip

            def copy(buffers: StaticBuffers) -> None:
                self.table.flag.changing = True  # not earlier, because the manager may reject the call
                fork.req_index = to = self._ledger.take_index()
                self._manager.request_tables.left.discard(to)  # `fork` overwrites the state
                masked = bool(self.table.sampling.arrays["token_masks"][at] >= 0)
                self._manager.mirror(self._manager.request_tables.fork, buffers, at, to, seed, masked)
                for group, (sources, own) in self.pages.fork(at, to, *lengths, given):
                    self._manager.mirror(partial(self._runtime.kv_cache.copy_pages, group=group), sources, own)

            self._manager.between_steps(copy)
            self.table.fork(request, fork, seed)
            if self.table.sampling.arrays["token_masks"][at] >= 0:
                self.table.sampling.put("token_masks", fork.req_index, fork.req_index)
            self.launches.join(fork, request)
            self.table.flag.changing = False
            return fork

    def append_pages(
        self, request: SessionRequest, pages: Int32Array | Sequence[int] | Sequence[Sequence[int]]
    ) -> None:
        """Append pages to a request. Requires external_pages=True. Later launches may write to the pages.

        pages  page ids of the cache, a list of ints; with several KV groups a list of lists, one per group. No other
               code may write to these pages. A request needs `group.pages_for(tokens)` pages in total

        Raises: ConfigError: if the session allocates its pages; see also `release`. ShapeError: if they are not pages
        of the cache, or in use until `pop_freed_pages` returns them. CapacityError: if the request would have more
        pages than the longest sequence. An error changes nothing.
        """
        with self._exclusive:
            self._check_own(request, "append_pages")
            self._check_external("append_pages")
            checked = self.pages.check_append(request.req_index, pages)
            with self.table.flag:
                self.pages.append(request.req_index, checked)

    def pop_freed_pages(self) -> list[list[int]]:
        """Return the pages of each pool that were freed since the last call. Requires external_pages=True.

        Pages are freed when their request is released, or when a window has passed them. They may be reused
        immediately, because launches run in order. A shared page is returned once, after the last request that uses it
        has freed it. After `close()`, the caller owns all pages.

        Raises: ConfigError: if the session allocates its pages.
        """
        with self._exclusive:
            self._check_open("pop_freed_pages")
            self._check_external("pop_freed_pages")
            with self.table.flag:
                self.pages.free_passed(self.table.order, self.table.reached[self.table.order])
                return self.pages.pop_freed()

    def set_token_mask(self, request: SessionRequest, words: MaskWords | None) -> None:
        """Set the tokens that a request may sample in later launches.

        The mask applies to every step of a launch. A grammar, whose mask changes with each token, needs `run(1)` and
        `collect(wait=True)` per token. The words are copied immediately, and take effect with the next launch. They
        replace the drafts of the request, so its next step yields one token, unless `set_drafts` follows.

        words  [ceil(vocab / 32)] of 32 bits on the host, as xgrammar and llguidance fill them. Token t is allowed if
               bit t % 32 of word t // 32 is set. None allows all tokens

        Raises: ShapeError: if `words` has the wrong shape. UnsupportedError: without RuntimeConfig.token_masks.
        ConfigError: see `release`.
        """
        with self._exclusive:
            self._check_own(request, "set_token_mask")
            at = request.req_index
            before = int(self.table.sampling.arrays["token_masks"][at])
            mask = None if words is None else self._manager.request_tables.mask_words("words", words)
            now = -1 if mask is None else at
            with self.table.flag:
                self._has_updates = True
                if mask is not None:
                    self._updates.masks[at] = mask
                    if self._most_drafts:
                        self._updates.drafts[at] = self._manager.request_tables.check_drafts("drafts", ())
                if now != before:
                    self._updates.switched[at] = now
                    self.table.sampling.put("token_masks", at, now)

    def set_drafts(self, request: SessionRequest, tokens: Prompt, parents: Prompt | None = None) -> None:
        """Set the tokens that you expect after the last sampled one. The next step of the request verifies them.

        A draft is accepted while it equals the token that is sampled, so drafts change no tokens, only how many a step
        yields. Drafts are dropped after that step.

        tokens   at most RuntimeConfig.num_speculative_tokens token ids
        parents  one per token, for drafts that form a tree: 0 if the draft follows the last sampled token, i if it
                 follows tokens[i - 1], which must come before it. None: each draft follows the one before it

        Raises: ConfigError: see `release`. ShapeError: if they are not token ids, or a parent is not before its draft.
        UnsupportedError: if there are more tokens, or parents without RuntimeConfig.tree_depth.
        """
        with self._exclusive:
            self._check_own(request, "set_drafts")
            drafts = self._manager.request_tables.check_drafts("tokens", tokens, parents)
            with self.table.flag:
                self._has_updates = True
                self._updates.drafts[request.req_index] = drafts

    def release(self, request: SessionRequest) -> None:
        """Free a request, finished or not, and its pages.

        Tokens that were not collected are dropped, including those of finished launches. To keep them, call
        `collect(wait=True)` first. A finish_reason that was not collected stays RUNNING.

        Raises: ConfigError: if the request belongs to another session, or was released.
        """
        with self._exclusive:
            self._check_own(request, "release")
            with self.table.flag:
                self.remove(request)

    def record(self, req_index: int, tokens: Int32Array) -> None:
        """Store tokens of a request that no step computes, so that drafts are looked up in them too."""
        if self._manager.proposes and len(tokens):
            self._manager.request_tables.record_prefix(req_index, tokens)

    def remove(self, request: SessionRequest) -> None:
        """Free a request's index and its pages. Launches in flight run before steps that reuse the pages."""
        at = request.req_index
        self._updates.drop(at)
        self.table.remove(request)
        self.pages.release(at)
        self._ledger.return_index(at)

    def _write_updates(self) -> None:
        """Write updates for the next launch to the request tables. An interrupted write is repeated."""
        if self._has_updates:
            self._steps.with_drafts |= {at for at, (ids, _) in self._updates.drafts.items() if (ids >= 0).any()}
            self._updates.write(self._manager.request_tables)
            self._has_updates = False

    # -- steps

    def run(self, steps: int = 1, *, eager: bool = False) -> tuple[Launch, ...]:
        """Launch the next steps. Waits only while `RuntimeConfig.most_in_flight` launches are in flight.

        While prompts have tokens left, each step is a separate launch, which computes chunks of prompts together with
        the requests that decode. After that, one launch runs up to `RuntimeConfig.launch_steps` steps. A request that
        finishes during a launch runs as padding in its later steps. A request without a page for its next token waits
        until it gets a page.

        Returns: the launches, in order; none if no request can continue.

        Raises: ConfigError: if `steps` is not an int above 0, or `eager` is not a bool.
        CapacityError: if no request has a page for its next token; earlier launches of the call stay in flight.
        See also ReplayManager.replay. If a step fails that may already have run, the session accepts only `collect` and
        `close`.
        """
        table = self.table
        with self._exclusive:
            if (
                type(steps) is int and 0 < steps <= table.quiet and steps <= self._launch_steps and eager is False
                and not (table.prefills or self._has_updates or table.flag.changing)
                and self._resets == self._manager.queue.resets
            ):  # fmt: skip
                return (self._steps.launch_quietly(steps, eager),)  # nearly every call of a server
            steps = check_int("steps", steps, 1, 1 << 30, advice="pass how many steps to launch")
            eager = check_bool("eager", eager, advice="pass a bool")
            self._check_open("run")
            self._write_updates()
            launches: list[Launch] = []
            while steps and table.running:
                launch = self._steps.launch(min(steps, self._launch_steps), eager)
                if launch is None:
                    break  # all requests have reached their limits, and must be collected
                launches.append(launch)
                steps -= launch.steps
            return tuple(launches)

    # -- results

    def collect(self, *, wait: bool = False) -> list[tuple[SessionRequest, list[int]]]:
        """Return each request with new tokens, and the tokens.

        Tokens are returned while their launch is running, except a token that finishes a request, and tokens of
        requests that need log-probabilities. These are returned once the launch has finished.

        wait  wait for every launch

        Raises: StepFaultError: with the request indices of faulty requests and their forks, which have finished. The
        next call returns the tokens of the other requests.
        """
        wait = check_bool("wait", wait, advice="pass a bool")
        with self._exclusive:
            self._check_open("collect", changed_in_part=True)
            return self.launches.collect(wait)

    # -- the end

    def close(self) -> None:
        """Wait for launches in flight, and return all pages and request indices. May be called twice.

        Does not wait for launches after a rank has failed.

        Raises: ReplayError: during another call of the session.
        """
        with self._exclusive:
            self._closed = True
            try:
                with contextlib.suppress(RankError):  # no rank can use the pages: the runtime must be closed
                    if self.table.flag.changing:
                        self._manager.queue.synchronize()  # a launch that was interrupted may not be in `launches`
                    self.launches.wait()
            finally:
                self._ledger.close()
                self._dropped.detach()
                for held in (self.table.requests, self.table.prefills, self.launches.pending, self.table.detached):
                    held.clear()
                self.table.quiet = 0

    def __enter__(self) -> DecodeSession:
        self._check_open("with")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lengths(self, request: SessionRequest) -> tuple[int, int]:
        """Return the lowest and the highest number of tokens that a request may have after all launches."""
        return int(self.table.reached[request.req_index]), self.table.length(request.req_index)

    def _check_open(self, call: str, *, changed_in_part: bool = False) -> None:
        if self._closed:
            raise CaptureError(f"{call}: this session was closed; make a new DecodeSession")
        if self._manager.state is not State.CAPTURED:
            raise wrong_state(self._manager.state, State.CAPTURED, call)
        if self._resets != self._manager.queue.resets:
            raise CaptureError(f"{call}: reset() has dropped the requests of this session; close() the session")
        if self.table.flag.changing and not changed_in_part:
            raise CaptureError(
                f"{call}: an earlier call was interrupted; collect() the finished tokens, then close() the session"
            )

    def _check_own(self, request: SessionRequest, call: str) -> None:
        self._check_open(call)
        check_instance("request", request, SessionRequest, advice="pass a request that add() or fork() returned")
        if self.table.requests.get(request.req_index) is not request:
            raise ConfigError(
                f"{call}: the request was released, or belongs to another session; pass a live request of this session"
            )

    def _check_external(self, call: str) -> None:
        if not self.pages.are_external:
            raise ConfigError(f"{call}: this session allocates its pages itself; build it with external_pages=True")


def check_request(
    runtime: Runtime, prompt: Prompt, params: SamplingParams | None, name: str, params_name: str
) -> tuple[Int32Array, SamplingParams]:
    """Return a prompt as an array, and its params. The default params are greedy and have no limit but `max_seq_len`.

    Raises an error that names the argument if the runtime cannot run them.
    """
    longest, last = runtime.config.max_seq_len, runtime.vocab_size - 1
    tokens = check_ints(name, prompt, 0, last, advice="pass token ids of the vocabulary")
    if not len(tokens):
        raise ShapeError(f"{name}: expected at least 1 token, got 0; start with the BOS token of the model")
    if params is None:
        params = SamplingParams(max_new_tokens=max(1, longest + 1 - len(tokens)))
    check_instance(params_name, params, SamplingParams, advice="pass SamplingParams(...)")
    runtime.config.check_needs(params_name, params.needs)
    runtime.manager.request_tables.check_bias(f"{params_name}.logit_bias", params.logit_bias)
    if len(tokens) + params.max_new_tokens - 1 > longest:
        raise CapacityError(
            f"{name}: {len(tokens)} tokens and max_new_tokens={params.max_new_tokens} exceed max_seq_len={longest}; "
            f"shorten the prompt, lower max_new_tokens or raise max_seq_len"
        )
    return tokens.astype(np.int32), params
