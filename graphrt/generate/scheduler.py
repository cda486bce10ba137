"""Who is in the next launch: admission, shared prefixes, and preemption where pages run out.

Sequences are served in the order of their prompts. Pages are allocated as a sequence grows. Where they run out, the
sequence of the last prompt gives its row and its pages back, and waits at the head of the queue: its pages lie in a
SwapSpace meanwhile, or are computed again from its tokens. The sequence of the first prompt never gives way, so it
ends; then the next one is the first. Whoever is admitted stands behind all that run in the order of prompts: sequences
wait for pages and for common beginnings of earlier ones alone, never in a circle.

The rows and their pages are a session's: this file says what becomes of them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphrt.batch import Int32Array
from graphrt.cache.swap import SwapSpace
from graphrt.cache.tables import PrefixIndex, common_prefix
from graphrt.engine.launch import Launch
from graphrt.generate.movable import MovableSession, Suspended
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import pages_needed
from graphrt.session.requests import Ids, SessionRequest

_QUIET_STEPS = 8
"""Steps of a launch at most: the host has an eighth of the work, and a sequence that ends by a stop token leaves two
launches later at most."""


@dataclass(slots=True)
class GenerationStats:
    """What a TextGenerator did beside its steps, since it was built.

    preemptions         times that a sequence gave its row and its pages back; without those that had computed
                        nothing yet
    swapped_out_pages   pages copied to the host, of all KV groups, and swapped_in_pages copied back
    recomputed_tokens   tokens whose keys and values were dropped, and computed again
    shared_tokens       tokens of prompts that were not computed, since another sequence had computed the same
    shared_pages        pages that they were found in, and copied_pages those of them that had to be copied
    """

    preemptions: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0
    recomputed_tokens: int = 0
    shared_tokens: int = 0
    shared_pages: int = 0
    copied_pages: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what follows it.

    row         its row in the session, once it was admitted
    suspended   where it stood when it was preempted, while it waits
    preempted   whether it ran before
    """

    index: int
    prompt: Int32Array
    params: SamplingParams
    row: SessionRequest | None = None
    suspended: Suspended | None = None
    preempted: bool = False

    @property
    def length_limit(self) -> int:
        """KV tokens at most: the last sampled token is never written."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether it has ended, as far as was collected."""
        return self.row is not None and bool(self.row.end)

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows."""
        return len(self.prompt) + (0 if self.row is None else len(self.row.tokens))


def longest_chunk(runtime: Runtime) -> int:
    """New tokens of one row in a step at most."""
    return runtime.config.max_num_tokens if runtime.config.mixed_batches else 1


class Scheduler:
    """The sequences that run, by row id, and those that wait.

    queue      sequences that wait, in the order of their prompts; those that were preempted come first
    members    the sequence of each row id in use
    requests   the sequence of each row whose tokens are still to come
    """

    def __init__(
        self,
        requests: Sequence[Request],
        runtime: Runtime,
        session: MovableSession,
        space: SwapSpace | None,
        stats: GenerationStats,
    ) -> None:
        self._runtime, self._session, self._space, self._stats = runtime, session, space, stats
        self._groups = runtime.kv_cache.groups
        self._longest_chunk = longest_chunk(runtime)
        self.queue = deque(requests)
        self.members: dict[int, Request] = {}
        self.requests: dict[SessionRequest, Request] = {}
        self._page_unit = math.lcm(*(group.page_size for group in self._groups))
        self._largest_page = max(group.page_size for group in self._groups)
        # Beginnings are compared by half pages, and small pages whole: less is not worth a copy.
        self._prefixes = PrefixIndex(max(min(8, self._largest_page), self._largest_page // 2))
        self._promised: dict[int, list[int]] = {}  # pages of each pool that rows without pages were admitted for
        self._all_promised = [0] * len(runtime.allocators)  # their sum
        self._shared: dict[int, int] = {}  # tokens that rows began with, of those that have computed nothing

    # -- who comes in

    def admit(self) -> None:
        """Give rows to the sequences at the head of the queue, as long as there are rows and pages for their start."""
        while self.queue:
            request = self.queue[0]
            if request.finished:
                self._drop(self.queue.popleft())
                continue
            # A sequence whose last token is in flight comes back when it is read.
            if not self._runtime.free_req_indices or (request.row is not None and self._session.in_flight(request.row)):
                return
            if not self._have(needs := self._needs_to_start(request), returns=request.preempted):
                return
            self._start(self.queue.popleft(), needs)

    def _needs_to_start(self, request: Request) -> list[int]:
        """Pages of each pool that a sequence is admitted for: of a new prompt those of its first chunk, of one that was
        preempted all that it had, as it would be preempted soon again with less."""
        length = request.num_tokens
        first = length if request.preempted else min(length, self._longest_chunk)
        if request.suspended is None or request.suspended.swapped is None:
            return pages_needed(self._groups, first, min(first, self._longest_chunk))
        needs = [0] * len(self._runtime.allocators)
        for group, count in zip(self._groups, request.suspended.swapped.counts, strict=True):
            needs[group.pool] += count
        return needs

    def _have(self, needs: list[int], *, returns: bool) -> bool:
        """Whether pools have so many pages, beside those that rows were admitted for and one for each that runs.

        returns   the sequence was preempted: it comes back once it has a page to go on with as well, and once the
                  prompts that run have pages for all their tokens, so that it does not give way again at once
        """
        if self._space is not None:
            self._space.collect()
        if not self.members:  # it may have all, and must have what it brings back at once
            fits = [self._reclaim(pool, need) for pool, need in enumerate(needs)]
            suspended = self.queue[0].suspended
            return suspended is None or suspended.swapped is None or all(fits)
        spare = [0] * len(needs)
        if returns:
            prompting = self._session.prompting
            ends = np.array([len(self._session.given[req_index]) for req_index in prompting], np.int64)
            spare = self._session.missing(np.array(prompting, np.int64), ends)
        else:
            spare = list(self._all_promised)
        for group in self._groups:
            spare[group.pool] += len(self.members) + returns
        free = [allocator.num_free for allocator in self._runtime.allocators]
        return all(need + more <= have for need, more, have in zip(needs, spare, free, strict=True))

    def _start(self, request: Request, needs: list[int]) -> None:
        if request.row is None:
            request.row = self._session.add(request.prompt, request.params)
            self.requests[request.row] = request
        else:
            suspended, request.suspended = request.suspended, None
            assert suspended is not None, "a row without a row id was suspended"
            self._session.resume(request.row, suspended, self._space)
            if suspended.swapped is not None:
                self._stats.swapped_in_pages += sum(suspended.swapped.counts)
        req_index = request.row.req_index
        self.members[req_index] = request
        self._prefixes.add(req_index, self._session.given[req_index])
        if not self._session.length(req_index):
            self._promised[req_index], self._shared[req_index] = needs, 0
            self._all_promised = [a + b for a, b in zip(self._all_promised, needs, strict=True)]

    # -- the next launch

    def launch(self) -> tuple[Launch, ...]:
        """Launch the next steps: rows that decode first, then given tokens as far as tokens and pages go. None where
        no row can go on."""
        if self._space is not None:
            self._space.collect()
        steps = self._steps()
        if self._session.prompting or steps > self._session.quiet:
            held = self._share_prefixes()
            if not self._make_room(steps):
                return ()
            self._session.hold(held)
        launches = self._session.run(steps)
        for req_index in [
            req_index for req_index, began in self._shared.items() if self._session.length(req_index) > began
        ]:
            self._begun(req_index)
        # All steps of these are launched. Whoever gets their rows and pages comes later on the same stream.
        ids = self._session.decoding
        for req_index in ids[self._session.steps_left(ids) <= 0].tolist():
            request = self._leave(req_index)
            assert request.row is not None, "members have rows"
            self._session.retire(request.row)
        return launches

    def _steps(self) -> int:
        """Steps of the next launch: several where no prompt has tokens left. Who waits for a row or for pages waits
        until a sequence ends, so at most as many as until the first comes to its longest; where one ends earlier, by a
        stop token, its row stays empty for a few steps."""
        ids = self._session.decoding
        if self._session.prompting or not len(ids):
            return 1
        most = min(_QUIET_STEPS, self._runtime.config.launch_steps)
        if self.queue:
            head = self.queue[0].row
            if head is not None and self._session.in_flight(head):
                return 1  # it comes back with the next result
            most = max(1, min(most, int(self._session.steps_left(ids).min())))
        if most <= self._session.quiet:
            return most
        steps = min(most, int(self._session.steps_left(ids).max()))
        return steps if self._fit(ids, steps) else 1

    def _fit(self, ids: Ids, steps: int) -> bool:
        """Whether there are pages for so many steps of rows, those included that are being copied to the host."""
        lengths = self._session.lengths(ids)
        needs = self._session.missing(ids, lengths + np.minimum(steps, self._session.steps_left(ids)))
        return all(self._reclaim(pool, need) for pool, need in enumerate(needs))

    def _share_prefixes(self) -> set[int]:
        """Let sequences that begin take the pages of earlier ones that began alike, before these give pages back that
        their window leaves behind. The rows that do not go on with their given tokens: those on their way, those that
        had better wait until an earlier one has computed what they need, and all behind the tokens of a step."""
        held, budget = set[int](), self._runtime.config.max_num_tokens - len(self._session.decoding)
        alone = not len(self._session.decoding)  # a launch of one row waits for its pages, on the device
        for req_index in self._session.prompting:
            waits = budget <= 0 or not self._session.arrived(req_index, wait=alone)
            if waits or (not self._session.length(req_index) and self._waits_for_prefix(req_index)):
                held.add(req_index)
                continue
            left = len(self._session.given[req_index]) - self._session.length(req_index)
            one_by_one = self.members[req_index].params.prompt_logprobs is not None
            budget, alone = budget - min(left, 1 if one_by_one else self._longest_chunk), False
        return held

    def _waits_for_prefix(self, req_index: int) -> bool:
        """Whether a sequence that begins waits for an earlier one to compute the same. Else it takes what is there."""
        given, waits = self._session.given[req_index], False
        params = self.members[req_index].params
        if params.penalised or params.prompt_logprobs is not None:
            return False  # its own tokens are counted, or have log-probabilities, where they are computed
        common, donors = self._prefixes.find(req_index, len(given) - 1)
        for donor in donors:
            if not self._session.can_share(donor, len(self._session.given[donor])):
                self._prefixes.remove(donor)  # its window has moved on: it has nothing to give any more
                continue
            if donor in self._session.arriving:
                waits = self._longest_chunk > 1  # unless somebody else has the same
                continue
            ready = self._session.length(donor)
            missing = common - self._shareable(donor, ready) if ready < common else 0
            if missing >= self._page_unit and self._longest_chunk > 1:
                return True
            # Hashes say where to look; tokens are compared before pages are taken.
            ready = min(ready, common_prefix(given, self._session.given[donor], len(given) - 1))
            if length := self._shareable(donor, ready):
                self._share(req_index, donor, length)
                return False
        return waits

    def _shareable(self, donor: int, ready: int) -> int:
        """How many of a donor's first `ready` tokens a new sequence takes over: full pages, and part of one where this
        saves more than half a page."""
        full = ready - ready % self._page_unit
        partly = [ready] if 2 * (ready - full) > self._largest_page else []
        for length in (*partly, full):
            if not self._session.can_share(donor, length):
                continue
            if length == full:
                return full
            own = [0] * len(self._runtime.allocators)  # for the copy, beside what those that run may need at once
            for group in self._groups:
                own[group.pool] += (length % group.page_size > 0) + len(self.members)
            if all(n <= allocator.num_free for n, allocator in zip(own, self._runtime.allocators, strict=True)):
                return length
        return 0

    def _share(self, req_index: int, donor: int, length: int) -> None:
        pages, copied = self._session.share(req_index, donor, length)
        self._shared[req_index] = length
        self._stats.shared_tokens += length
        self._stats.shared_pages += pages
        self._stats.copied_pages += copied

    def _make_room(self, steps: int) -> bool:
        """Make sure of pages for the next steps of all rows that decode, and for a token of the first sequence. Others
        are preempted for that. False where the first sequence has no page: all are held by somebody else."""
        while True:
            ids = self._session.decoding
            first = min(self.members, key=lambda req_index: self.members[req_index].index, default=None)
            if first in self._session.prompting:
                ids = np.append(ids, first)
            self._session.give_back(ids)
            if self._fit(ids, steps):
                return True
            if len(self.members) < 2:
                return False
            self._preempt(max(self.members, key=lambda req_index: self.members[req_index].index))

    def _reclaim(self, pool: int, need: int) -> bool:
        """Whether so many pages are free, those included that are still being copied to the host."""
        free = self._runtime.allocators[pool].num_free >= need
        return free or (self._space is not None and self._space.reclaim(pool, need))

    # -- who goes out

    def _preempt(self, req_index: int) -> None:
        """Take the row and the pages of a sequence away, and put it at the head of the queue."""
        request, length = self.members[req_index], self._session.length(req_index)
        row = request.row
        assert row is not None, "members have rows"
        self.queue.appendleft(request)
        if req_index in self._promised:  # it has computed nothing: it goes back as it came
            self._stats.shared_tokens -= length
            self._stats.shared_pages -= self._session.num_pages(req_index)
            self._leave(req_index)
            request.suspended = self._session.suspend(row, None)
            return
        self._leave(req_index)
        request.preempted = True
        self._stats.preemptions += 1
        # What a page holds is sooner computed than fetched. Tokens of penalties are counted where they are computed.
        stays = length <= self._largest_page or request.params.penalised
        suspended = self._session.suspend(row, None if stays else self._space)
        request.suspended = suspended
        if suspended.swapped is not None:
            self._stats.swapped_out_pages += sum(suspended.swapped.counts)
        else:
            self._stats.recomputed_tokens += length

    def _leave(self, req_index: int) -> Request:
        """A row id is no member's any more."""
        self._prefixes.remove(req_index)
        self._begun(req_index)
        return self.members.pop(req_index)

    def _begun(self, req_index: int) -> None:
        """A row has computed something, or will not: what it was admitted for is its own, or nobody's."""
        needs = self._promised.pop(req_index, None)
        self._shared.pop(req_index, None)
        if needs is not None:
            self._all_promised = [a - b for a, b in zip(self._all_promised, needs, strict=True)]

    def _drop(self, request: Request) -> None:
        """Forget the pages of a sequence that ended while it waited."""
        suspended, request.suspended = request.suspended, None
        if suspended is not None and suspended.swapped is not None and self._space is not None:
            self._space.drop(suspended.swapped)

    def release_finished(self) -> None:
        """Give back rows and pages of what has ended. A step in flight may still write there: it runs before any step
        that reuses them."""
        for req_index in [req_index for req_index, request in self.members.items() if request.finished]:
            request = self._leave(req_index)
            assert request.row is not None, "members have rows"
            self._session.release(request.row)
        for request in itertools.takewhile(lambda request: request.preempted, self.queue):
            if request.finished:  # its last token was in flight
                self._drop(request)
