"""Text generation with continuous batching: a small scheduler over a Runtime.

It admits prompts as rows and pages allow, runs them in chunks beside the rows that decode, and submits each step
before it reads the one before: a decoding row takes its token from the device, so the host is never waited for. A row
that ended is noticed one step late; what that step computed for it is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Batch, Int32Array
from graphrt.handle import StepHandle
from graphrt.kernels.checks import (
    FLOAT32_MAX,
    check_instance,
    check_int,
    check_ints,
    check_number,
    check_sequence,
    shown,
)
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, ReplayError, ShapeError
from graphrt.kernels.types import TOKEN_FROM_ROW
from graphrt.kv_cache import PageAllocator
from graphrt.replay import State
from graphrt.runtime import Runtime
from graphrt.spec import KVCacheSpec

_MAX_NEW_TOKENS = 1 << 30
_MAX_SEED = (1 << 32) - 1

Prompt = Sequence[int] | Int32Array | torch.Tensor
"""Token ids: a list, an array or a host tensor of any int dtype."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is continued.

    temperature   0 is greedy
    seed          of this prompt's random numbers, which depend on nothing else; the logits that they are added to may
                  differ in their last bits between captured sizes
    stop_ids      tokens that end the output and are not part of it; any collection of ints, kept as a frozenset
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, least, most, advice in (
            ("max_new_tokens", 1, _MAX_NEW_TOKENS, "pass how many tokens may follow the prompt"),
            ("seed", 0, _MAX_SEED, "take it modulo 2 ** 32"),
        ):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least, most, advice=advice))
        temperature = check_number("temperature", self.temperature, 0, FLOAT32_MAX, advice="0 is greedy")
        object.__setattr__(self, "temperature", temperature)
        if not isinstance(self.stop_ids, (frozenset, set, list, tuple)):
            raise ConfigError(f"stop_ids: expected a set of token ids, got {shown(self.stop_ids)}; pass frozenset(...)")
        stop_ids = [check_int("stop_ids", token, 0, advice="pass token ids") for token in self.stop_ids]
        object.__setattr__(self, "stop_ids", frozenset(stop_ids))


@dataclass(frozen=True, slots=True)
class Event:
    """One new token of one prompt, or its end. `token` is None when the end brought no token (a stop id)."""

    prompt: int
    token: int | None
    finished: bool


@dataclass(slots=True)
class _Sequence:
    index: int
    prompt: Int32Array
    params: SamplingParams
    sampled: int = 0  # tokens read back
    finished: bool = False

    @property
    def length_limit(self) -> int:
        """KV tokens at most: the last sampled token is never written."""
        return len(self.prompt) + self.params.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A step in flight: whose row each is, and which rows must yield a token."""

    handle: StepHandle
    members: list[_Sequence]
    samples: list[bool]


class TextGenerator:
    """Continues prompts of token ids with a captured runtime, as many at a time as its rows and pages allow.

    Without mixed batches (`RuntimeConfig.mixed_batches`), prompts are fed one token per step.

    Raises: ConfigError for a runtime without sampler, without mixed batches where query_len is not 1, or of a model
    with cross or encoder layers, CaptureError for one that was closed.
    """

    def __init__(self, runtime: Runtime) -> None:
        check_instance("runtime", runtime, Runtime, advice="build a Runtime")
        if runtime.state is State.CLOSED:
            raise CaptureError("runtime: expected an open one, got one that was closed; build a new Runtime")
        if not runtime.samples:
            raise ConfigError("runtime: expected one with a sampler, got sampler=None; build it with a sampler")
        config, groups = runtime.config, runtime.kv_cache.groups
        if not groups or any(group.cross for group in groups):
            raise ConfigError(
                "runtime: expected a decoder alone, got a model with cross layers or without a cache; submit batches "
                "to replay() yourself"
            )
        if not config.mixed_batches and config.query_len != 1:
            raise ConfigError(
                f"runtime: expected query_len=1 with mixed_batches=False, got {config.query_len}; "
                "rows that decode have one new token, allow mixed batches"
            )
        self._runtime = runtime

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[Event, None, None]:
        """Yield tokens as they come, all prompts interleaved; every prompt ends with one `finished` event.

        prompts   token ids from 0 to vocab_size - 1, at least one per prompt: lists, arrays or host tensors
        params    one for all, or one per prompt

        All prompts are checked before the first step. Rows and pages are given back at the end, after an error, and
        when the generator is closed; steps in flight are waited for.

        Raises: ShapeError for a prompt that is empty or no list of token ids, CapacityError for one that cannot fit
        even alone, ConfigError for wrong params, CaptureError where the runtime is not captured, all before any step.
        While it runs: StepFaultError where a row had a fault, for example logits that are all NaN; ReplayError where a
        row yields no token.
        """
        if self._runtime.state is not State.CAPTURED:
            raise CaptureError(
                f"generate: expected a captured runtime, got state '{self._runtime.state.value}'; "
                "call capture() before, and close() after it"
            )
        check_sequence("prompts", prompts, of="prompts, each a list of token ids")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        check_sequence("params", params, len(prompts), of="SamplingParams, one per prompt")
        sequences = [self._sequence(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
        return self._run(deque(sequences))

    def _sequence(self, index: int, prompt: Prompt, params: SamplingParams) -> _Sequence:
        check_instance(f"params[{index}]", params, SamplingParams, advice="pass SamplingParams(...)")
        name, last = f"prompts[{index}]", self._runtime.vocab_size - 1
        tokens = check_ints(name, prompt, 0, last, advice="pass token ids of the vocabulary")
        sequence = _Sequence(index, tokens.astype(np.int32), params)
        if not len(tokens):
            raise ShapeError(f"{name}: expected at least 1 token, got 0; leave it out")
        limit, longest = sequence.length_limit, self._runtime.config.max_seq_len
        if limit > longest:
            raise CapacityError(
                f"{name}: expected prompt and output within max_seq_len={longest}, got "
                f"{len(tokens)} + {params.max_new_tokens} tokens; shorten it or raise max_seq_len"
            )
        needs = _pages_needed(self._runtime, sequence)
        for need, allocator in zip(needs, self._runtime.allocators, strict=True):
            if need > (pages := allocator.num_pages - 1):
                raise CapacityError(
                    f"{name}: expected at most {pages} pages, got a need of {need} for {limit} tokens; raise num_pages"
                )
        return sequence

    def _run(self, waiting: deque[_Sequence]) -> Generator[Event, None, None]:
        running = _Running(waiting, self._runtime)
        in_flight: deque[_Submitted] = deque()
        try:
            while waiting or running.members or in_flight:
                while waiting and running.admit(waiting[0]):
                    waiting.popleft()
                if waiting and not running.members and not in_flight:
                    pages = " + ".join(str(allocator.num_free) for allocator in self._runtime.allocators)
                    free = f"{len(self._runtime.free_rows)} rows and {pages} pages"
                    raise CapacityError(
                        f"prompts[{waiting[0].index}]: expected a free row and pages, got {free}, the others held by "
                        "somebody else; wait for them"
                    )
                step = running.submit()
                if step is not None:
                    in_flight.append(step)
                if in_flight and (len(in_flight) > 1 or step is None):
                    yield from _collect(in_flight.popleft())
                    running.release_finished()
        finally:
            try:
                for step in in_flight:
                    step.handle.wait()  # nobody who gets the pages may find them written
            finally:
                running.release_all()


def _collect(step: _Submitted) -> Iterator[Event]:
    tokens = step.handle.tokens(raise_on_fault=False).tolist()
    if any(not step.members[fault.row].finished for fault in step.handle.faults):
        step.handle.tokens()  # raises
    for sequence, token, samples in zip(step.members, tokens, step.samples, strict=True):
        if sequence.finished or not samples:
            continue  # a row that ended one step ago, or a prompt that goes on
        if token < 0:
            raise ReplayError(
                f"prompts[{sequence.index}]: expected a token from step {step.handle.step}, got none; "
                "check the model's logits for NaN, and the sampler"
            )
        if token in sequence.params.stop_ids:
            sequence.finished = True
            yield Event(sequence.index, None, True)
            continue
        sequence.sampled += 1
        sequence.finished = sequence.sampled == sequence.params.max_new_tokens
        yield Event(sequence.index, token, sequence.finished)


def _longest_chunk(runtime: Runtime) -> int:
    return runtime.config.max_num_tokens if runtime.config.mixed_batches else 1


def _pages_needed(runtime: Runtime, sequence: _Sequence) -> list[int]:
    """Pages of each pool that a sequence owns at most; of windowed groups, those of the window and of a chunk."""
    needs = [0] * len(runtime.allocators)
    new_tokens = min(_longest_chunk(runtime), len(sequence.prompt))
    for group in runtime.kv_cache.groups:
        needs[group.pool] += group.most_pages(sequence.length_limit, new_tokens)
    return needs


class _Tables:
    """The pages of every slot in one KV group: page `from_[slot]` of its sequence to page `to[slot]`, not included.

    A sequence's pages are allocated as its length grows, and given back as the window leaves them behind. The steps
    that read and write them run in the order of submission, so a page may be given to the next step at once.
    """

    def __init__(self, group: KVCacheSpec, allocator: PageAllocator, slots: int, longest: int) -> None:
        self.group, self._allocator = group, allocator
        self._pages = np.zeros((slots, group.pages_for(longest)), np.int32)
        self.from_ = np.zeros(slots, np.int64)
        self.to = np.zeros(slots, np.int64)

    def give_back(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """Free what tokens from `positions` on cannot see."""
        if self.group.sliding_window is None and self.group.attention_chunk_size is None:
            return
        # The next page is left behind once its last token is: most steps leave none.
        near = positions - self.from_[slots] * self.group.page_size >= self.group.page_size
        for slot, position in zip(slots[near].tolist(), positions[near].tolist(), strict=True):
            seen = min(self.group.first_page_seen(position), int(self.to[slot]))
            if seen > self.from_[slot]:
                self._allocator.free(self._pages[slot, self.from_[slot] : seen])
                self.from_[slot] = seen

    def extend(
        self, slots: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]
    ) -> tuple[Int32Array, npt.NDArray[np.int64], list[Int32Array]]:
        """Allocate pages up to `seq_lens`: the place of the first new page of each slot, how many, and their ids."""
        first, needed = self.to[slots], -(-seq_lens // self.group.page_size)
        new = []
        for slot, start, end in zip(*(x[needed > first].tolist() for x in (slots, first, needed)), strict=True):
            self._pages[slot, start:end] = self._allocator.allocate(end - start)
            new.append(self._pages[slot, start:end])
        self.to[slots] = needed
        return first.astype(np.int32), needed - first, new

    def release(self, slot: int) -> None:
        """Free every page of a slot."""
        self._allocator.free(self._pages[slot, self.from_[slot] : self.to[slot]])
        self.from_[slot] = self.to[slot] = 0

    def owned(self, slot: int) -> int:
        """Pages that a slot has now."""
        return int(self.to[slot] - self.from_[slot])


class _Running:
    """The sequences that run, one per slot, as arrays: a step of 256 rows is built by a few NumPy calls.

    members     the sequence of each slot in use
    tables      the pages of each slot, by KV group; a step lists those that are new
    reserved    by slot, the pages of each pool that its sequence may own at once
    scheduled   [slots]  int64  tokens whose KV has been submitted
    """

    def __init__(self, sequences: Sequence[_Sequence], runtime: Runtime) -> None:
        self._runtime = runtime
        self._longest_chunk = _longest_chunk(runtime)
        self.members: dict[int, _Sequence] = {}
        self._reserved: dict[int, list[int]] = {}
        slots = min(len(sequences), runtime.config.max_num_reqs)
        longest = max((sequence.length_limit for sequence in sequences), default=0)
        self._tables = [
            _Tables(group, runtime.allocators[group.pool], slots, longest) for group in runtime.kv_cache.groups
        ]
        self._free_slots = list(range(slots - 1, -1, -1))
        self._prompting: list[int] = []  # slots whose prompt has tokens left, in order of admission
        self._decoding = np.zeros(slots, np.bool_)
        self._scheduled = np.zeros(slots, np.int64)
        self._limits = np.zeros(slots, np.int64)
        self._row_ids = np.zeros(slots, np.int32)
        self._temperatures = np.zeros(slots, np.float32)
        self._seeds = np.zeros(slots, np.uint32)

    def admit(self, sequence: _Sequence) -> bool:
        """Give a sequence a row, and reserve the pages that it may own at once; False where there are none."""
        needs = _pages_needed(self._runtime, sequence)
        if not self._free_slots or not self._runtime.free_rows or not self._have(needs):
            return False
        slot = self._free_slots.pop()
        self._reserved[slot] = needs
        self._row_ids[slot] = self._runtime.free_rows.pop()
        self._scheduled[slot], self._limits[slot] = 0, sequence.length_limit
        self._temperatures[slot], self._seeds[slot] = sequence.params.temperature, sequence.params.seed
        self.members[slot] = sequence
        self._prompting.append(slot)
        return True

    def _have(self, needs: list[int]) -> bool:
        """Whether pools have so many pages beside those that running sequences may still ask for."""
        free = [allocator.num_free for allocator in self._runtime.allocators]
        for slot, reserved in self._reserved.items():
            for pool, count in enumerate(reserved):
                free[pool] -= count
            for table in self._tables:
                free[table.group.pool] += table.owned(slot)
        return all(need <= left for need, left in zip(needs, free, strict=True))

    def submit(self) -> _Submitted | None:
        """Submit the next step: decodes first, then prompt chunks as far as the token budget goes. None: no row."""
        decoding = np.flatnonzero(self._decoding)
        chunks, done = self._chunks(self._runtime.config.max_num_tokens - len(decoding))
        slots = np.concatenate((decoding, np.fromiter(chunks, np.int64, len(chunks))))
        if not len(slots):
            return None
        query_lens = np.ones(len(slots), np.int32)
        query_lens[len(decoding) :] = [len(chunk) for chunk in chunks.values()]
        samples = np.ones(len(slots), np.int32)
        samples[len(decoding) :] = [slot in done for slot in chunks]
        positions = self._scheduled[slots]
        self._scheduled[slots] += query_lens
        seq_lens = self._scheduled[slots]
        for table in self._tables:
            table.give_back(slots, positions)
        first_pages, counts, new = zip(*(table.extend(slots, seq_lens) for table in self._tables), strict=True)
        page_indptr = np.zeros(len(self._tables) * len(slots) + 1, np.int32)
        np.cumsum(np.concatenate(counts), out=page_indptr[1:])
        new_pages = [pages for of_group in new for pages in of_group]
        batch = Batch(
            row_ids=self._row_ids[slots],
            seq_lens=seq_lens.astype(np.int32),
            query_lens=query_lens,
            tokens=np.concatenate((np.full(len(decoding), TOKEN_FROM_ROW, np.int32), *chunks.values())),
            page_indptr=page_indptr,
            page_ids=np.concatenate(new_pages) if new_pages else np.empty(0, np.int32),
            first_pages=np.concatenate(first_pages),
            sample=samples,
            temperatures=self._temperatures[slots],
            seeds=self._seeds[slots],
        )
        members = [self.members[slot] for slot in slots.tolist()]
        handle = self._runtime.replay(batch)
        self._decoding[list(done)] = True
        self._decoding[slots] &= seq_lens < self._limits[slots]
        return _Submitted(handle, members, (samples == 1).tolist())

    def _chunks(self, budget: int) -> tuple[dict[int, Int32Array], set[int]]:
        """The next prompt tokens by slot, `budget` of them at most, and the slots whose prompt is through then."""
        chunks, done = {}, set()
        for slot in self._prompting:
            if not budget:
                break
            prompt, start = self.members[slot].prompt, int(self._scheduled[slot])
            chunks[slot] = chunk = prompt[start : start + min(budget, self._longest_chunk)]
            budget -= len(chunk)
            if start + len(chunk) == len(prompt):
                done.add(slot)
        self._prompting = [slot for slot in self._prompting if slot not in done]
        return chunks, done

    def release_finished(self) -> None:
        """Give back rows and pages of what has ended. A step in flight may still write there: it runs before any step
        that reuses them."""
        for slot in [slot for slot, sequence in self.members.items() if sequence.finished]:
            self._release(slot)

    def release_all(self) -> None:
        """Give back every row and page."""
        for slot in list(self.members):
            self._release(slot)

    def _release(self, slot: int) -> None:
        del self.members[slot], self._reserved[slot]
        self._decoding[slot] = False
        self._free_slots.append(slot)
        self._runtime.free_rows.append(int(self._row_ids[slot]))
        for table in self._tables:
            table.release(slot)
