"""Text generation with continuous batching: a small scheduler over a Runtime.

It admits prompts as rows and pages allow, runs them in chunks beside the rows that decode, and submits each step
before it reads the one before: a decoding row takes its token from the device, so the host is never waited for. A row
that ended is noticed one step late; what that step computed for it is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graphrt.batch import Batch, Row
from graphrt.handle import StepHandle
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.types import TOKEN_FROM_ROW
from graphrt.runtime import Runtime


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is continued.

    temperature   0 is greedy
    seed          of this prompt's random numbers, which depend on nothing else; the logits that they are added to may
                  differ in their last bits between captured sizes
    stop_ids      tokens that end the output and are not part of it
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: expected >= 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature: expected a finite number >= 0, got {self.temperature}; 0 is greedy")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed: expected 0 to {(1 << 32) - 1}, got {self.seed}")


@dataclass(frozen=True, slots=True)
class Event:
    """One new token of one prompt, or its end. `token` is None when the end brought no token (a stop id)."""

    prompt: int
    token: int | None
    finished: bool


@dataclass(slots=True)
class _Sequence:
    index: int
    prompt: Sequence[int]
    params: SamplingParams
    row_id: int = -1
    pages: list[int] = field(default_factory=list)
    scheduled: int = 0  # tokens whose KV has been submitted
    sampled: int = 0  # tokens read back
    finished: bool = False

    @property
    def length_limit(self) -> int:
        """KV tokens at most: the last sampled token is never written."""
        return len(self.prompt) + self.params.max_new_tokens - 1


class TextGenerator:
    """Continues prompts of token ids with a captured runtime, as many at a time as its rows and pages allow."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._page_size = runtime.kv_cache.spec.page_size

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[Event]:
        """Yield tokens as they come, all prompts interleaved; every prompt ends with one `finished` event.

        Raises: ShapeError for an empty prompt, CapacityError for one that cannot fit even alone, before any step.
        """
        per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(per_prompt) != len(prompts):
            raise ShapeError(f"params: expected {len(prompts)}, one per prompt, got {len(per_prompt)}")
        sequences = [_Sequence(i, p, s) for i, (p, s) in enumerate(zip(prompts, per_prompt, strict=True))]
        for sequence in sequences:
            self._check_fits(sequence)
        return self._run(deque(sequences))

    def _run(self, waiting: deque[_Sequence]) -> Iterator[Event]:
        running: list[_Sequence] = []
        in_flight: deque[tuple[StepHandle, list[_Sequence]]] = deque()
        try:
            while waiting or running or in_flight:
                self._admit(waiting, running)
                if waiting and not running and not in_flight:
                    free = f"{len(self._runtime.free_rows)} rows and {self._runtime.allocator.num_free} pages"
                    raise CapacityError(
                        f"prompts[{waiting[0].index}]: expected a free row and pages, got {free}, the others held by "
                        "somebody else; wait for them"
                    )
                rows, members = self._next_step(running)
                if rows:
                    in_flight.append((self._runtime.replay(Batch.from_rows(rows)), members))
                if in_flight and (len(in_flight) > 1 or not rows):
                    handle, sampled = in_flight.popleft()
                    yield from self._collect(handle, sampled)
                    for sequence in [s for s in running if s.finished]:
                        running.remove(sequence)
                        self._release(sequence)
        finally:
            for sequence in running:
                self._release(sequence)

    def _admit(self, waiting: deque[_Sequence], running: list[_Sequence]) -> None:
        """Move prompts to `running` while there is a row and pages for their whole length, in order."""
        while waiting and self._runtime.free_rows:
            needed = self._runtime.kv_cache.spec.pages_for(waiting[0].length_limit)
            if needed > self._runtime.allocator.num_free:
                return
            sequence = waiting.popleft()
            sequence.pages = self._runtime.allocator.allocate(needed)
            sequence.row_id = self._runtime.free_rows.pop()
            running.append(sequence)

    def _next_step(self, running: Sequence[_Sequence]) -> tuple[list[Row], list[_Sequence]]:
        """Rows of the next step, decodes first, then prompt chunks as far as the token budget goes; who is sampled."""
        budget = self._runtime.config.max_num_tokens
        prompts = [s for s in running if s.scheduled < len(s.prompt)]
        rows, members = [], []
        for sequence in running:
            if sequence.scheduled >= len(sequence.prompt) and sequence.scheduled < sequence.length_limit:
                rows.append(self._row(sequence, [TOKEN_FROM_ROW], sample=True))
                members.append(sequence)
                budget -= 1
        for sequence in prompts:
            chunk = sequence.prompt[sequence.scheduled : sequence.scheduled + budget]
            if not chunk:
                break
            last = sequence.scheduled + len(chunk) == len(sequence.prompt)
            rows.append(self._row(sequence, chunk, sample=last))
            members.append(sequence)
            budget -= len(chunk)
        return rows, members

    def _row(self, sequence: _Sequence, tokens: Sequence[int], *, sample: bool) -> Row:
        sequence.scheduled += len(tokens)
        used = self._runtime.kv_cache.spec.pages_for(sequence.scheduled)
        return Row(
            row_id=sequence.row_id,
            tokens=tokens,
            seq_len=sequence.scheduled,
            pages=sequence.pages[:used],
            sample=sample,
            temperature=sequence.params.temperature,
            seed=sequence.params.seed,
        )

    def _collect(self, handle: StepHandle, members: Sequence[_Sequence]) -> Iterator[Event]:
        for sequence, token in zip(members, handle.tokens().tolist(), strict=True):
            if token < 0 or sequence.finished:
                continue  # a prompt that goes on, or a row that ended one step ago
            if token in sequence.params.stop_ids:
                sequence.finished = True
                yield Event(sequence.index, None, True)
                continue
            sequence.sampled += 1
            sequence.finished = sequence.sampled == sequence.params.max_new_tokens
            yield Event(sequence.index, token, sequence.finished)

    def _release(self, sequence: _Sequence) -> None:
        # A step in flight may still write its last token here. It runs before any step that reuses the pages.
        self._runtime.allocator.free(sequence.pages)
        self._runtime.free_rows.append(sequence.row_id)

    def _check_fits(self, sequence: _Sequence) -> None:
        if not len(sequence.prompt):
            raise ShapeError(f"prompts[{sequence.index}]: expected at least 1 token, got 0")
        limit, longest = sequence.length_limit, self._runtime.config.max_seq_len
        if limit > longest:
            raise CapacityError(
                f"prompts[{sequence.index}]: expected prompt and output within max_seq_len={longest}, got "
                f"{len(sequence.prompt)} + {sequence.params.max_new_tokens} tokens; shorten it or raise max_seq_len"
            )
        needed, pages = self._runtime.kv_cache.spec.pages_for(limit), self._runtime.allocator.num_pages - 1
        if needed > pages:
            raise CapacityError(
                f"prompts[{sequence.index}]: expected at most {pages} pages, got a need of {needed} for "
                f"{limit} tokens; raise num_pages"
            )
