"""Who is in the next step: admission, chunks of prompts, shared prefixes, and preemption where pages run out.

Sequences are served in the order of their prompts. Pages are allocated as a sequence grows. Where they run out, the
sequence of the last prompt gives its row and its pages back, and waits at the head of the queue: its pages lie in a
SwapSpace meanwhile, or are computed again from its tokens. The sequence of the first prompt never gives way, so it
ends; then the next one is the first. Whoever is admitted stands behind all that run in the order of prompts: sequences
wait for pages and for common beginnings of earlier ones alone, never in a circle.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from graphrt.batch import Batch, Int32Array
from graphrt.entry import OnStream
from graphrt.handle import StepHandle
from graphrt.kernels.types import TOKEN_FROM_ROW
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.sampling_values import SamplingValues
from graphrt.swap import SwapArrival, SwappedPages, SwapSpace
from graphrt.tables import PrefixIndex, Slots, Tables, common_prefix


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

    output      tokens read back
    in_flight   steps submitted, whose token for this sequence is not read yet
    scheduled   tokens whose KV is kept while the sequence waits, in `swapped`; `places` has the place of the first page
                of each KV group
    preempted   whether the sequence ran before
    """

    index: int
    prompt: Int32Array
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    finished: bool = False
    in_flight: int = 0
    scheduled: int = 0
    swapped: SwappedPages | None = None
    places: list[int] = field(default_factory=list)
    preempted: bool = False

    @property
    def length_limit(self) -> int:
        """KV tokens at most: the last sampled token is never written."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def tokens(self) -> Int32Array:
        """All tokens that the host knows."""
        return np.concatenate((self.prompt, np.array(self.output, np.int32))) if self.output else self.prompt


@dataclass(frozen=True, slots=True)
class Submitted:
    """A step in flight: whose row each is, and which rows must yield a token."""

    handle: StepHandle
    members: list[Request]
    samples: list[bool]


def longest_chunk(runtime: Runtime) -> int:
    """New tokens of one row in a step at most."""
    return runtime.config.max_num_tokens if runtime.config.mixed_batches else 1


def pages_needed(runtime: Runtime, request: Request, new_tokens: int) -> list[int]:
    """Pages of each pool that a sequence owns at most, in chunks of so many tokens; of windowed groups, those of the
    window and of a chunk."""
    needs = [0] * len(runtime.allocators)
    for group in runtime.kv_cache.groups:
        needs[group.pool] += group.most_pages(request.length_limit, new_tokens)
    return needs


class Scheduler:
    """The sequences that run, one per slot, as arrays: a step of 256 rows is built by a few NumPy calls.

    queue       sequences that wait, in the order of their prompts; those that were preempted come first
    members     the sequence of each slot in use
    tables      the pages of each slot, by KV group; a step lists those that are new
    given       by slot, the tokens that the host knew when the sequence was admitted: its prompt, and what had followed
    scheduled   [slots]  int64  tokens whose KV has been submitted
    """

    def __init__(
        self, requests: Sequence[Request], runtime: Runtime, space: SwapSpace | None, stats: GenerationStats
    ) -> None:
        self._runtime, self._space, self._stats = runtime, space, stats
        self._groups = runtime.kv_cache.groups
        self._longest_chunk = longest_chunk(runtime)
        self.queue = deque(requests)
        self.members: dict[int, Request] = {}
        slots = min(len(requests), runtime.config.max_num_reqs)
        longest = max((request.length_limit for request in requests), default=0)
        self.tables = [Tables(group, runtime.allocators[group.pool], slots, longest) for group in self._groups]
        self._page_unit = math.lcm(*(group.page_size for group in self._groups))
        self._largest_page = max(group.page_size for group in self._groups)
        # Beginnings are compared by half pages, and small pages whole: less is not worth a copy.
        self._prefixes = PrefixIndex(max(min(8, self._largest_page), self._largest_page // 2))
        self._free_slots = list(range(slots - 1, -1, -1))
        self._given: dict[int, Int32Array] = {}
        self._prompting: list[int] = []  # slots with given tokens left, in the order of their prompts
        self._promised: dict[int, list[int]] = {}  # pages of each pool that slots without pages were admitted for
        self._arriving: dict[int, SwapArrival] = {}
        self._decoding = np.zeros(slots, np.bool_)
        self._scheduled = np.zeros(slots, np.int64)
        self._limits = np.zeros(slots, np.int64)
        self._row_ids = np.zeros(slots, np.int32)
        self._sampling = SamplingValues(slots)
        self._on_stream = OnStream(runtime.stream, "graphrt.copy_pages")

    # -- who comes in

    def admit(self) -> None:
        """Give rows to the sequences at the head of the queue, as long as there are rows and pages for their start."""
        while self.queue:
            request = self.queue[0]
            # A sequence whose last token is in flight comes back when it is read.
            if not request.finished and (not self._free_slots or not self._runtime.free_rows or request.in_flight):
                return
            if request.finished:
                self._drop(self.queue.popleft())
            elif self._have(needs := self._needs_to_start(request), returns=request.preempted):
                self._start(self.queue.popleft(), needs)
            else:
                return

    def _needs_to_start(self, request: Request) -> list[int]:
        """Pages of each pool that a sequence is admitted for: of a new prompt those of its first chunk, of one that was
        preempted all that it had, as it would be preempted soon again with less."""
        needs = [0] * len(self._runtime.allocators)
        length = len(request.prompt) + len(request.output)
        first = length if request.preempted else min(length, self._longest_chunk)
        for index, group in enumerate(self._groups):
            if request.swapped is not None:
                needs[group.pool] += request.swapped.counts[index]
            else:
                needs[group.pool] += group.most_pages(first, min(first, self._longest_chunk))
        return needs

    def _have(self, needs: list[int], *, returns: bool) -> bool:
        """Whether pools have so many pages, beside those that slots were admitted for and one for each that runs.

        returns   the sequence was preempted: it comes back once it has a page to go on with as well, and once the
                  prompts that run have pages for all their tokens, so that it does not give way again at once
        """
        if self._space is not None:
            self._space.collect()
        if not self.members:  # it may have all, and must have what it brings back at once
            fits = [self._reclaim(pool, need) for pool, need in enumerate(needs)]
            return self.queue[0].swapped is None or all(fits)
        spare = [0] * len(needs)
        prompting = np.array(self._prompting, np.int64)
        ends = np.array([len(self._given[slot]) for slot in self._prompting], np.int64)
        for table in self.tables:
            spare[table.group.pool] += len(self.members) + returns
            if returns:
                spare[table.group.pool] += table.missing(prompting, ends)
        if not returns:
            for of_slot in self._promised.values():
                spare = [a + b for a, b in zip(spare, of_slot, strict=True)]
        free = [allocator.num_free for allocator in self._runtime.allocators]
        return all(need + more <= have for need, more, have in zip(needs, spare, free, strict=True))

    def _start(self, request: Request, needs: list[int]) -> None:
        slot = self._free_slots.pop()
        self.members[slot] = request
        self._row_ids[slot] = self._runtime.free_rows.pop()
        self._scheduled[slot], self._limits[slot] = request.scheduled, request.length_limit
        self._sampling.set(slot, request.params, len(request.prompt))
        tables, row_id = self._runtime.manager.row_tables, int(self._row_ids[slot])
        tables.set_logit_bias({row_id: request.params.logit_bias})
        tables.set_state({row_id: {}})
        self._given[slot] = request.tokens
        self._prefixes.add(slot, self._given[slot])
        self._prompting.append(slot)
        if request.swapped is None:
            self._promised[slot] = needs
            return
        assert self._space is not None, "what was swapped out lies in a space"
        pages = []
        for table, first, count in zip(self.tables, request.places, request.swapped.counts, strict=True):
            pages.append(self._runtime.allocators[table.group.pool].allocate(count))
            table.place(slot, first, pages[-1])
        self._arriving[slot] = self._space.swap_in(request.swapped, pages)
        self._stats.swapped_in_pages += sum(request.swapped.counts)
        request.swapped = None

    # -- the next step

    def submit(self) -> Submitted | None:
        """Submit the next step: decodes first, then given tokens as far as tokens and pages go. None: no row."""
        if self._space is not None:
            self._space.collect()
        going_on = self._share_prefixes()
        decoding = self._make_room()
        if decoding is None:
            return None
        for table in self.tables:
            table.grow(decoding, self._scheduled[decoding] + 1)
        chunks, done = self._chunks(
            self._runtime.config.max_num_tokens - len(decoding), going_on, alone=not len(decoding)
        )
        slots = np.concatenate((decoding, np.fromiter(chunks, np.int64, len(chunks))))
        if not len(slots):
            return None
        query_lens = np.ones(len(slots), np.int32)
        query_lens[len(decoding) :] = [len(chunk) for chunk in chunks.values()]
        samples = np.ones(len(slots), np.int32)
        samples[len(decoding) :] = [slot in done for slot in chunks]
        self._scheduled[slots] += query_lens
        seq_lens = self._scheduled[slots]
        first_pages, counts, new_pages = zip(*(table.list_new(slots) for table in self.tables), strict=True)
        page_indptr = np.zeros(len(self.tables) * len(slots) + 1, np.int32)
        np.cumsum(np.concatenate(counts), out=page_indptr[1:])
        batch = Batch(
            row_ids=self._row_ids[slots],
            seq_lens=seq_lens.astype(np.int32),
            query_lens=query_lens,
            tokens=np.concatenate((np.full(len(decoding), TOKEN_FROM_ROW, np.int32), *chunks.values())),
            page_indptr=page_indptr,
            page_ids=np.concatenate(new_pages),
            first_pages=np.concatenate(first_pages),
            sample=samples,
            **self._sampling.of(slots),
        )
        members = [self.members[slot] for slot in slots.tolist()]
        step = Submitted(self._runtime.replay(batch), members, (samples == 1).tolist())
        for table in self.tables:
            table.submitted(slots)
        for request, samples_token in zip(step.members, step.samples, strict=True):
            request.in_flight += samples_token
        self._decoding[list(done)] = True
        # All steps of these are submitted. Whoever gets their rows and pages comes later on the same stream.
        for slot in slots[seq_lens >= self._limits[slots]].tolist():
            self._release(slot)
        return step

    def _share_prefixes(self) -> list[int]:
        """Let sequences that begin take the pages of earlier ones that began alike, before these give pages back that
        their window leaves behind. The slots that may go on with their given tokens, as many as a step has tokens
        for: without those that had better wait until an earlier one has computed what they need."""
        going_on, budget = [], self._runtime.config.max_num_tokens - int(self._decoding.sum())
        for slot in self._prompting:
            if budget <= 0:
                break
            if self._scheduled[slot] or not self._waits_for_prefix(slot):
                going_on.append(slot)
                if slot not in self._arriving:
                    budget -= min(len(self._given[slot]) - int(self._scheduled[slot]), self._longest_chunk)
        return going_on

    def _waits_for_prefix(self, slot: int) -> bool:
        """Whether a sequence that begins waits for an earlier one to compute the same. Else it takes what is there."""
        given, waits = self._given[slot], False
        if self.members[slot].params.penalised:
            return False  # its own tokens are counted where they are computed
        common, donors = self._prefixes.find(slot, len(given) - 1)
        for donor in donors:
            if not all(table.can_share(donor, len(self._given[donor])) for table in self.tables):
                self._prefixes.remove(donor)  # its window has moved on: it has nothing to give any more
                continue
            if donor in self._arriving:
                waits = self._longest_chunk > 1  # unless somebody else has the same
                continue
            ready = int(self._scheduled[donor])
            missing = common - self._shareable(donor, ready) if ready < common else 0
            if missing >= self._page_unit and self._longest_chunk > 1:
                return True
            # Hashes say where to look; tokens are compared before pages are taken.
            ready = min(ready, common_prefix(given, self._given[donor], len(given) - 1))
            if length := self._shareable(donor, ready):
                self._share(slot, length, donor)
                return False
        return waits

    def _shareable(self, donor: int, ready: int) -> int:
        """How many of a donor's first `ready` tokens a new sequence takes over: full pages, and part of one where this
        saves more than half a page."""
        full = ready - ready % self._page_unit
        partly = [ready] if 2 * (ready - full) > self._largest_page else []
        for length in (*partly, full):
            if not all(table.can_share(donor, length) for table in self.tables):
                continue
            if length == full:
                return full
            own = [0] * len(self._runtime.allocators)  # for the copy, beside what those that run may need at once
            for group in self._groups:
                own[group.pool] += (length % group.page_size > 0) + len(self.members)
            if all(n <= allocator.num_free for n, allocator in zip(own, self._runtime.allocators, strict=True)):
                return length
        return 0

    def _share(self, slot: int, length: int, donor: int) -> None:
        for group, table in enumerate(self.tables):
            copied = table.share(donor, slot, length)
            if copied is not None:
                with self._on_stream:  # behind the step that wrote the page
                    self._runtime.kv_cache.copy_pages([copied[0]], [copied[1]], group=group)
                self._stats.copied_pages += 1
            self._stats.shared_pages += int(table.to[slot] - table.from_[slot])
        self._scheduled[slot] = length
        self._stats.shared_tokens += length

    def _make_room(self) -> Slots | None:
        """The slots that decode, once there are pages for all of them, and for a token of the first sequence. Others
        are preempted for that. None where the first sequence has no page: all are held by somebody else."""
        while True:
            slots = decoding = np.flatnonzero(self._decoding)
            if self._prompting and (first := self._prompting[0]) == self._oldest():
                slots = np.append(decoding, first)
            positions = self._scheduled[slots]
            needs = [0] * len(self._runtime.allocators)
            here = np.array([slot not in self._arriving for slot in slots.tolist()], np.bool_)
            for table in self.tables:
                # Pages that are still on their way may be written later than a step that gets them now.
                table.give_back(slots[here], positions[here])
                needs[table.group.pool] += table.missing(slots, positions + 1)
            if all(self._reclaim(pool, need) for pool, need in enumerate(needs)):
                return decoding
            if len(self.members) == 1:
                return None
            self._preempt(max(self.members, key=lambda slot: self.members[slot].index))

    def _oldest(self) -> int:
        return min(self.members, key=lambda slot: self.members[slot].index)

    def _reclaim(self, pool: int, need: int) -> bool:
        """Whether so many pages are free, those included that are still being copied to the host."""
        free = self._runtime.allocators[pool].num_free >= need
        return free or (self._space is not None and self._space.reclaim(pool, need))

    def _chunks(self, budget: int, going_on: Sequence[int], *, alone: bool) -> tuple[dict[int, Int32Array], set[int]]:
        """The next given tokens by slot, `budget` of them at most, and the slots that have none left then.

        going_on   whose tokens these are, in order; those that were preempted meanwhile are passed over
        alone      there is no other row in the step
        """
        chunks: dict[int, Int32Array] = {}
        done = set[int]()
        for slot in going_on:
            if not budget:
                break
            if slot not in self.members or not self._arrived(slot, wait=alone and not chunks):
                continue
            given, start = self._given[slot], int(self._scheduled[slot])
            at = np.array([slot])
            for table in self.tables:
                table.give_back(at, self._scheduled[at])
            count = self._fitting(at, start, min(budget, self._longest_chunk, len(given) - start))
            if not count:
                break  # nor does a later one get what this one waits for
            for table in self.tables:
                table.grow(at, np.array([start + count]))
            self._promised.pop(slot, None)
            chunks[slot] = given[start : start + count]
            budget -= count
            if start + count == len(given):
                done.add(slot)
        self._prompting = [slot for slot in self._prompting if slot not in done]
        return chunks, done

    def _arrived(self, slot: int, *, wait: bool) -> bool:
        """Whether a slot's pages are on the device. A step without other rows waits for them, on the device."""
        arrival = self._arriving.get(slot)
        if arrival is None:
            return True
        if not (wait or arrival.done()):
            return False
        self._arriving.pop(slot).wait()
        return True

    def _fitting(self, at: Slots, start: int, count: int) -> int:
        """How many of the next `count` tokens of a slot there are pages for."""
        while count:
            needs = [0] * len(self._runtime.allocators)
            for table in self.tables:
                needs[table.group.pool] += table.missing(at, np.array([start + count]))
            if all(n <= a.num_free for n, a in zip(needs, self._runtime.allocators, strict=True)):
                break
            # Down to the last token before a page of some group.
            count = max((start + count - 1) // g.page_size * g.page_size for g in self._groups) - start
            count = max(count, 0)
        return count

    # -- who goes out

    def _preempt(self, slot: int) -> None:
        """Take the row and the pages of a sequence away, and put it at the head of the queue."""
        request, scheduled = self.members[slot], int(self._scheduled[slot])
        if slot in self._promised:  # it has computed nothing: it goes back as it came
            self._stats.shared_tokens -= scheduled
            self._stats.shared_pages -= sum(len(table.pages(slot)) for table in self.tables)
            self._release(slot)
            self.queue.appendleft(request)
            return
        request.preempted, request.scheduled = True, 0
        self._stats.preemptions += 1
        if slot not in self._arriving:
            for table in self.tables:  # what the next token does not see need not travel
                table.give_back(np.array([slot]), np.array([scheduled]))
        pages = [table.pages(slot) for table in self.tables]
        counts = [len(of_group) for of_group in pages]
        # What a page holds is sooner computed than fetched.
        space = self._space if scheduled > self._largest_page and not request.params.penalised else None
        if space is not None and space.bytes_of(counts) <= space.num_free_bytes:
            request.scheduled, request.places = scheduled, [int(table.from_[slot]) for table in self.tables]
            request.swapped = space.swap_out(pages)
            self._stats.swapped_out_pages += sum(counts)
            for table in self.tables:
                table.forget(slot)  # the space frees them
        else:
            self._stats.recomputed_tokens += scheduled
        self._release(slot)
        self.queue.appendleft(request)

    def _drop(self, request: Request) -> None:
        """Forget the pages of a sequence that ended while it waited."""
        if request.swapped is not None and self._space is not None:
            self._space.drop(request.swapped)
            request.swapped = None

    def release_finished(self) -> None:
        """Give back rows and pages of what has ended. A step in flight may still write there: it runs before any step
        that reuses them."""
        for slot in [slot for slot, request in self.members.items() if request.finished]:
            self._release(slot)
        for request in itertools.takewhile(lambda request: request.preempted, self.queue):
            if request.finished:  # its last token was in flight
                self._drop(request)

    def release_all(self) -> None:
        """Give back every row and page."""
        for slot in list(self.members):
            self._release(slot)

    def _release(self, slot: int) -> None:
        if slot in self._arriving:
            self._arriving.pop(slot).wait()  # nobody may write there before the copy has
        del self.members[slot], self._given[slot]
        self._prefixes.remove(slot)
        self._promised.pop(slot, None)
        if slot in self._prompting:
            self._prompting.remove(slot)
        self._decoding[slot] = False
        self._free_slots.append(slot)
        self._runtime.free_rows.append(int(self._row_ids[slot]))
        for table in self.tables:
            table.release(slot)
