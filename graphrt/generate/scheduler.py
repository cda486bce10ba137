"""Decides which prompts are in the next launch: admission, shared prefixes, and preemption if pages run out.

Prompts are served in order. Pages are allocated as a sequence grows. If they run out, the request of the last prompt is
preempted. It frees its request index and its pages, and waits at the head of the queue. Its pages move to a SwapSpace,
or are recomputed from its tokens. The request of the first prompt is never preempted, so it always finishes. The next
prompt then becomes the first. A request waits only for pages and prefixes of earlier prompts, so requests cannot
deadlock.

The session owns the requests and their pages; this file decides when they run.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from graphrt.batch import Int32Array
from graphrt.cache.swap import SwapArrival, SwappedPages, SwapSpace
from graphrt.cache.tables import PrefixIndex, common_prefix
from graphrt.engine.handle import Launch
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.types import FinishReason
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import by_pool, pages_needed
from graphrt.session.requests import NO_INDEX, Ids, SessionRequest
from graphrt.session.session import DecodeSession

_QUIET_STEPS = 8
"""Maximum number of steps in a launch. With 8, the host does an eighth of the work. A sequence that finishes at a stop
token is replaced at most two launches later."""


@dataclass(slots=True)
class GenerationStats:
    """Counters of a TextGenerator, since it was built.

    preemptions        requests that were preempted after they had computed something
    swapped_out_pages  pages copied to the host, of all KV groups
    swapped_in_pages   pages copied back
    recomputed_tokens  tokens whose keys and values were dropped and recomputed
    shared_tokens      prompt tokens that were not computed, because another request had computed them
    shared_pages       pages of these tokens
    copied_pages       shared pages that had to be copied
    """

    preemptions: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0
    recomputed_tokens: int = 0
    shared_tokens: int = 0
    shared_pages: int = 0
    copied_pages: int = 0


@dataclass(eq=False, slots=True)
class PromptState:
    """A prompt and the progress of its request; `preempted` is the state that it resumes from, while it waits."""

    index: int
    prompt: Int32Array
    params: SamplingParams
    request: SessionRequest | None = None
    preempted: Preempted | None = None
    was_preempted: bool = False

    @property
    def length_limit(self) -> int:
        """Largest number of KV tokens. The last sampled token is not written to the cache."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def finished(self) -> bool:
        return self.request is not None and bool(self.request.finish_reason)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the host knows."""
        return len(self.prompt) + (0 if self.request is None else len(self.request.tokens))


def longest_chunk(runtime: Runtime) -> int:
    """Return the largest number of new tokens of one request in a step."""
    return runtime.config.max_num_tokens if runtime.config.mixed_batches else 1


class Scheduler:
    """Schedules prompts on a session.

    queue       waiting prompts, in order; preempted prompts come first
    running     the prompts that run, by request index
    by_request  the prompt of each request whose tokens were not all collected
    """

    def __init__(
        self,
        prompts: Sequence[PromptState],
        runtime: Runtime,
        session: DecodeSession,
        space: SwapSpace | None,
        stats: GenerationStats,
    ) -> None:
        self._runtime, self._session, self._space, self._stats = runtime, session, space, stats
        self._table, self._preemption = session.table, Preemption(runtime, session)
        self._groups = runtime.kv_cache.groups
        self._longest_chunk = longest_chunk(runtime)
        self._new_tokens = runtime.config.query_lens[-1] if runtime.manager.proposes else 1  # per request and step
        self.queue = deque(prompts)
        self.running: dict[int, PromptState] = {}
        self.by_request: dict[SessionRequest, PromptState] = {}
        self._page_unit = math.lcm(*(group.page_tokens for group in self._groups))
        self._largest_page = max(group.page_tokens for group in self._groups)
        # Prefixes are compared by half pages, or by whole small pages, because shorter ones are not worth a copy.
        self._prefixes = PrefixIndex(max(min(8, self._largest_page), self._largest_page // 2))
        self._promised: dict[int, list[int]] = {}  # pages of each pool that are reserved for admitted requests
        self._all_promised = [0] * len(runtime.allocators)  # their sum
        self._shared: dict[int, int] = {}  # shared tokens of requests that have computed nothing yet

    # -- admission

    def admit(self) -> None:
        """Start the prompts at the head of the queue, while there are request indices and pages for them."""
        while self.queue:
            prompt = self.queue[0]
            if prompt.finished:
                self._drop(self.queue.popleft())
                continue
            # A preempted request resumes once its tokens in flight are collected.
            if not self._runtime.free_req_indices or self._in_flight(prompt):
                return
            if not self._have(needs := self._needs_to_start(prompt), resumes=prompt.was_preempted):
                return
            self._start(self.queue.popleft(), needs)

    def _in_flight(self, prompt: PromptState) -> bool:
        return prompt.request is not None and self._session.launches.contain(prompt.request)

    def _needs_to_start(self, prompt: PromptState) -> list[int]:
        """Return the pages of each pool that a prompt needs to start. A new prompt needs the pages of its first chunk.
        A preempted prompt needs all pages that it had, or it would soon be preempted again."""
        length = prompt.num_tokens
        first = length if prompt.was_preempted else min(length, self._longest_chunk)
        if prompt.preempted is None or prompt.preempted.swapped is None:
            return pages_needed(self._groups, first, min(first, self._longest_chunk))
        return by_pool(self._groups, prompt.preempted.swapped.counts)

    def _have(self, needs: list[int], *, resumes: bool) -> bool:
        """Return True if pools have `needs` pages, in addition to reserved pages and one page for each running request.

        A request that resumes also needs a page for its next token. Running prompts must have pages for all their
        tokens, or the request would soon be preempted again.
        """
        if self._space is not None:
            self._space.collect()
        if not self.running:  # the prompt may use all pages, and needs those of its swapped tokens now
            fits = [self._reclaim(pool, need) for pool, need in enumerate(needs)]
            preempted = self.queue[0].preempted
            return preempted is None or preempted.swapped is None or all(fits)
        if resumes:
            prefilling = tuple(self._table.prefills)
            ends = np.array([len(self._table.known[req_index]) for req_index in prefilling], np.int64)
            spare = self._session.pages.missing(np.array(prefilling, np.int64), ends)
        else:
            spare = self._all_promised
        tokens = by_pool(self._groups, [len(self.running) + resumes] * len(self._groups))
        free = [allocator.num_free for allocator in self._runtime.allocators]
        return all(sum(pages) <= have for *pages, have in zip(needs, spare, tokens, free, strict=True))

    def _start(self, prompt: PromptState, needs: list[int]) -> None:
        if prompt.request is None:
            prompt.request = self._session.add(prompt.prompt, prompt.params)
            self.by_request[prompt.request] = prompt
        else:
            preempted, prompt.preempted = prompt.preempted, None
            assert preempted is not None, "a request without an index was preempted"
            self._preemption.resume(prompt.request, preempted, self._space)
            if preempted.swapped is not None:
                self._stats.swapped_in_pages += sum(preempted.swapped.counts)
        req_index = prompt.request.req_index
        self.running[req_index] = prompt
        self._prefixes.add(req_index, self._table.known[req_index])
        if not self._table.length(req_index):
            self._promised[req_index], self._shared[req_index] = needs, 0
            self._all_promised = [a + b for a, b in zip(self._all_promised, needs, strict=True)]

    # -- the next launch

    def launch(self) -> tuple[Launch, ...]:
        """Launch the next steps, with the requests that decode, and prefills as far as tokens and pages allow. Returns
        no launch if no request can continue."""
        if self._space is not None:
            self._space.collect()
        steps = self._steps()
        if self._table.prefills or steps > self._table.quiet:
            held = self._share_prefixes()
            if not self._make_room(steps):
                return ()
            self._table.held = held
        launches = self._session.run(steps)
        shared = self._shared.items()
        for req_index in [index for index, count in shared if self._table.length(index) > count]:
            self._begun(req_index)
        # All steps of these requests are launched. Later users of their indices and pages follow on the stream.
        ids = self._table.order
        if self._new_tokens == 1:  # with drafts, the end of a request is known once it is collected
            for req_index in ids[self._table.tokens_left(ids) <= 0].tolist():
                self._preemption.detach(self._leave(req_index))
        return launches

    def _steps(self) -> int:
        """Return the number of steps of the next launch, which is 1 while a prefill has tokens left.

        A prompt in the queue waits until a request finishes, so a launch ends when the first request reaches its limit.
        If a request finishes earlier, at a stop token, a few steps run without it."""
        ids = self._table.order
        if self._table.prefills or not len(ids):
            return 1
        most = min(_QUIET_STEPS, self._runtime.config.launch_steps)
        if self.queue:
            if self._in_flight(self.queue[0]):
                return 1  # the prompt resumes with the next result
            most = max(1, min(most, -(-int(self._table.tokens_left(ids).min()) // self._new_tokens)))
        if most <= self._table.quiet:
            return most
        steps = max(1, min(most, -(-int(self._table.tokens_left(ids).max()) // self._new_tokens)))
        return steps if self._fit(ids, steps * self._new_tokens) else 1

    def _fit(self, ids: Ids, tokens: int) -> bool:
        """Return True if there are pages for the next tokens of requests, including pages that are moving to the
        host."""
        lengths = np.minimum(self._table.most[ids] + tokens, self._table.limits[ids])
        needs = self._session.pages.missing(ids, lengths)
        return all(self._reclaim(pool, need) for pool, need in enumerate(needs))

    def _share_prefixes(self) -> set[int]:
        """Let new requests share pages of earlier requests with a common prefix, before windows free these pages.

        Returns the requests whose prefill is paused, because their pages are still moving, an earlier request computes
        their prefix, or the step has no tokens left for them.
        """
        held, budget = set[int](), self._runtime.config.max_num_tokens - len(self._table.order)
        alone = not len(self._table.order)  # a launch of one request waits for its pages on the device
        for req_index in tuple(self._table.prefills):
            waits = budget <= 0 or not self._preemption.arrived(req_index, wait=alone)
            if waits or (not self._table.length(req_index) and self._waits_for_prefix(req_index)):
                held.add(req_index)
                continue
            left = len(self._table.known[req_index]) - self._table.length(req_index)
            one_by_one = self.running[req_index].params.prompt_logprobs is not None
            budget, alone = budget - min(left, 1 if one_by_one else self._longest_chunk), False
        return held

    def _waits_for_prefix(self, req_index: int) -> bool:
        """Return True if a new request must wait for an earlier request to compute its prefix. Otherwise it shares the
        computed pages."""
        known, waits = self._table.known[req_index], False
        params = self.running[req_index].params
        if params.penalized or params.prompt_logprobs is not None:
            return False  # the step that computes a token counts it, or returns its log-probability
        common, donors = self._prefixes.find(req_index, len(known) - 1)
        for donor in donors:
            if not self._same_kv(req_index, donor):
                continue
            if not self._session.pages.can_share(donor, len(self._table.known[donor])):
                self._prefixes.remove(donor)  # its window has passed the prefix
                continue
            if donor in self._preemption.arriving:
                waits = self._longest_chunk > 1  # unless another donor has the same prefix
                continue
            ready = self._table.length(donor)
            missing = common - self._shareable(donor, ready) if ready < common else 0
            if missing >= self._page_unit and self._longest_chunk > 1:
                return True
            # Equal hashes are only a hint, so compare tokens before pages are shared.
            ready = min(ready, common_prefix(known, self._table.known[donor], len(known) - 1))
            if length := self._shareable(donor, ready):
                pages, copied = self._preemption.share(req_index, donor, length)
                self._shared[req_index] = length
                self._stats.shared_tokens += length
                self._stats.shared_pages += pages
                self._stats.copied_pages += copied
                return False
        return waits

    def _same_kv(self, req_index: int, other: int) -> bool:
        """Return whether two requests have equal keys and values for equal tokens."""
        boundary = self._runtime.kv_boundary
        first, second = (self.running[index].length_limit for index in (req_index, other))
        return boundary is None or (first > boundary) == (second > boundary)

    def _shareable(self, donor: int, ready: int) -> int:
        """Return how many of a donor's first `ready` tokens a new request shares. The tokens fill whole pages, and part
        of another page if sharing it saves more than half a page."""
        full = ready - ready % self._page_unit
        partly = [ready] if 2 * (ready - full) > self._largest_page else []
        for length in (*partly, full):
            if not self._session.pages.can_share(donor, length):
                continue
            if length == full:
                return full
            # Pages for the copy, and for the next token of each running request.
            copied = (length % group.page_tokens > 0 for group in self._groups)
            own = by_pool(self._groups, (copies + len(self.running) for copies in copied))
            if all(n <= allocator.num_free for n, allocator in zip(own, self._runtime.allocators, strict=True)):
                return length
        return 0

    def _make_room(self, steps: int) -> bool:
        """Preempt requests until there are pages for the next steps of the other requests, and for one token of the
        first request. Return False if other users of the runtime own the pages that the first request needs."""
        while True:
            ids = self._table.order
            first = min(self.running, key=lambda req_index: self.running[req_index].index, default=None)
            if first in self._table.prefills:
                ids = np.append(ids, first)
            self._preemption.free_passed(ids)
            if self._fit(ids, steps * self._new_tokens):
                return True
            if len(self.running) < 2:
                return self._fit(ids, 1)  # drafts without pages are dropped
            self._preempt(max(self.running, key=lambda req_index: self.running[req_index].index))

    def _reclaim(self, pool: int, need: int) -> bool:
        """Return True if `need` pages are free, including pages that are moving to the host."""
        free = self._runtime.allocators[pool].num_free >= need
        return free or (self._space is not None and self._space.reclaim(pool, need))

    # -- preemption and release

    def _preempt(self, req_index: int) -> None:
        """Free the index and the pages of a request, and put its prompt at the head of the queue."""
        prompt, length = self.running[req_index], self._table.length(req_index)
        self.queue.appendleft(prompt)
        if req_index in self._promised:  # the request has computed nothing
            self._stats.shared_tokens -= length
            self._stats.shared_pages -= sum(map(len, self._session.pages.pages(req_index)))
            prompt.preempted = self._preemption.preempt(self._leave(req_index), None)
            return
        prompt.was_preempted = True
        self._stats.preemptions += 1
        # Recomputing a page is faster than moving it. For penalties, the step that computes a token counts it.
        recompute = length <= self._largest_page or prompt.params.penalized
        preempted = self._preemption.preempt(self._leave(req_index), None if recompute else self._space)
        prompt.preempted = preempted
        if preempted.swapped is not None:
            self._stats.swapped_out_pages += sum(preempted.swapped.counts)
        else:
            self._stats.recomputed_tokens += length

    def _leave(self, req_index: int) -> SessionRequest:
        """Remove a request from the running requests, and return it."""
        self._prefixes.remove(req_index)
        self._begun(req_index)
        request = self.running.pop(req_index).request
        assert request is not None, "prompts that run have requests"
        return request

    def _begun(self, req_index: int) -> None:
        """Drop the pages that were reserved for a request, once it has computed something or is removed."""
        needs = self._promised.pop(req_index, None)
        self._shared.pop(req_index, None)
        if needs is not None:
            self._all_promised = [a - b for a, b in zip(self._all_promised, needs, strict=True)]

    def _drop(self, prompt: PromptState) -> None:
        """Drop the swapped pages of a prompt that finished while it waited."""
        preempted, prompt.preempted = prompt.preempted, None
        if preempted is not None and preempted.swapped is not None and self._space is not None:
            self._space.drop(preempted.swapped)

    def finish(self, request: SessionRequest) -> None:
        """Finish a request at its last collected token. Later tokens and faults of launches in flight are dropped."""
        with self._table.flag:
            request.finish_reason = FinishReason.STOP_TOKEN
            self._table.finish([request])

    def release_finished(self) -> None:
        """Free indices and pages of finished requests. A step in flight may still write there, but it runs before any
        step that reuses them."""
        for req_index in [req_index for req_index, prompt in self.running.items() if prompt.finished]:
            self._preemption.release(self._leave(req_index))
        for prompt in itertools.takewhile(lambda prompt: prompt.was_preempted, self.queue):
            if prompt.finished:  # its last token was in flight
                self._drop(prompt)


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

    A preempted or detached request has no request index. It still receives the tokens of launches in flight.

    session  a session of the runtime that only the caller uses
    """

    def __init__(self, runtime: Runtime, session: DecodeSession) -> None:
        self._runtime, self._session = runtime, session
        self._table, self._pages = session.table, session.pages
        self.arriving: dict[int, SwapArrival] = {}
        session.launches.must_advance = True

    def free_passed(self, ids: Ids) -> None:
        """Free pages that windows have passed, of requests whose pages are on the device."""
        self._table.catch_up()
        # A swap that is still running could write to such a page after a step has reused it.
        here = ids[[req_index not in self.arriving for req_index in ids.tolist()]] if self.arriving else ids
        self._pages.free_passed(here, self._table.least[here])

    def share(self, req_index: int, donor: int, length: int) -> tuple[int, int]:
        """Share the pages of the first `length` tokens of `donor` with a request that has no pages and starts with the
        same tokens.

        Returns: the number of its pages, and how many of them were copied.
        """

        def copy(buffers: StaticBuffers) -> int:
            copied = 0
            for group, (sources, own) in self._pages.share(donor, req_index, length):
                self._runtime.manager.mirror(partial(self._runtime.kv_cache.copy_pages, group=group), sources, own)
                copied += 1
            return copied

        copied = self._runtime.manager.between_steps(copy)  # after the launch that wrote the pages
        self._table.reached[req_index] = self._table.most[req_index] = self._table.prefills[req_index] = length
        self._session.record(req_index, self._table.known[req_index][:length])
        return sum(map(len, self._pages.pages(req_index))), copied

    def preempt(self, request: SessionRequest, space: SwapSpace | None) -> Preempted:
        """Free a request's index and its pages, which move to `space` if they fit, and are dropped otherwise.

        Resume the request once its launches in flight are collected.
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
        """Assign an index and pages to a preempted request again. It continues with the next launches, or once it has
        `arrived`. Raises: CapacityError: if no request index or page is free."""
        known = np.concatenate((request.prompt, np.array(request.tokens, np.int32)))
        start = min(preempted.length, len(known) - 1)  # with drafts, fewer tokens than were possible at preemption
        self._table.detached.discard(request)
        if not preempted.length:
            request.prompt_logprobs.clear()  # its prompt is recomputed
        self._session.start(request, known, start, self._runtime.manager.request_tables.check_state({}))
        self._session.record(request.req_index, known[:start])
        if preempted.swapped is not None and space is not None:
            pages = self._pages.place(request.req_index, preempted.first_places, preempted.swapped.counts)
            self.arriving[request.req_index] = space.swap_in(preempted.swapped, pages)

    def arrived(self, req_index: int, *, wait: bool = False) -> bool:
        """Return True if a request's pages are on the device. With `wait`, later launches wait for them."""
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
