"""Text generation with continuous batching over a Runtime; scheduler.py says who is in a launch.

Rows live on the device (session.py). Prompts run in chunks beside the rows that decode, a step per launch. Once all
prompts that have a row are read, a launch has several steps, whose tokens come while it runs. Each launch is submitted
before the one before is read, so the device never waits for the host. A row that ends by a stop token is free for
another sequence some launches later.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphrt.cache.swap import SwapSpace
from graphrt.engine.handle import StepFaultError
from graphrt.engine.launch import Launch
from graphrt.engine.lifecycle import State, wrong_state
from graphrt.engine.logprobs import TokenLogprob
from graphrt.generate.movable import MovableSession
from graphrt.generate.scheduler import GenerationStats, Request, Scheduler, longest_chunk
from graphrt.kernels.checks import check_instance, check_int, check_ints, check_sequence
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.types import FinishReason
from graphrt.runtime import Runtime, check_decoder
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import check_pages, pages_needed
from graphrt.session.requests import Prompt


@dataclass(frozen=True, slots=True)
class Event:
    """One new token of one prompt, or its end. `token` is None when the end brought no token (a stop id).

    logprob           of the token, with `SamplingParams.logprobs`
    prompt_logprobs   of each token of the prompt but the first, with the parameter of that name, in its first event
    """

    prompt: int
    token: int | None
    finished: bool
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class TextGenerator:
    """Continues prompts of token ids with a captured runtime, as many at a time as its rows and pages allow.

    Without mixed batches (`RuntimeConfig.mixed_batches`), prompts are fed one token per step.

    A sequence takes pages as it grows. Where pages run out, the sequence of the last prompt waits for others to end.
    Its pages lie in host memory meanwhile. Prompts that begin alike share the pages of that beginning. Neither changes
    a token, but for the last bits of logits between captured sizes.

    runtime      a captured one; several generators may share it
    swap_bytes   pinned host memory of one `generate` at most, taken where its sequences may not all have pages at once.
                 What does not fit there is computed again; 0: all of it. Where the host does not give the memory, a
                 RuntimeWarning says why, once, and all is computed again
    stats        what happened beside the steps; see GenerationStats

    Raises: ConfigError for a runtime without sampler, without mixed batches where query_len is not 1, or of a model
    with cross or encoder layers, and for swap_bytes that are no int >= 0; CaptureError for a runtime that was closed.
    """

    def __init__(self, runtime: Runtime, *, swap_bytes: int = 4 << 30) -> None:
        check_instance("runtime", runtime, Runtime, advice="build a Runtime")
        if runtime.state is State.CLOSED:
            raise wrong_state(State.CLOSED, State.CAPTURED, "TextGenerator")
        check_decoder(runtime)
        self._runtime = runtime
        self._swap_bytes = check_int("swap_bytes", swap_bytes, 0, 1 << 50, advice="0 computes again instead")
        self.stats = GenerationStats()

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
        While it runs: CapacityError where somebody else holds the pages that the first sequence needs; StepFaultError
        whose `prompts` had a fault, for example logits that are all NaN, behind the events of all that had arrived;
        ReplayError where a row yields no token, and CaptureError after a `reset()`.
        """
        if self._runtime.state is not State.CAPTURED:
            raise wrong_state(self._runtime.state, State.CAPTURED, "generate")
        check_sequence("prompts", prompts, of="prompts, each a list of token ids")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        check_sequence("params", params, len(prompts), of="SamplingParams, one per prompt")
        requests = [self._request(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
        return self._run(requests)

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        check_instance(f"params[{index}]", params, SamplingParams, advice="pass SamplingParams(...)")
        self._runtime.config.check_needs(f"params[{index}]", params.needs)
        self._runtime.manager.request_tables.check_bias(f"params[{index}].logit_bias", params.logit_bias)
        name, last = f"prompts[{index}]", self._runtime.vocab_size - 1
        tokens = check_ints(name, prompt, 0, last, advice="pass token ids of the vocabulary")
        request = Request(index, tokens.astype(np.int32), params)
        if not len(tokens):
            raise ShapeError(f"{name}: expected at least 1 token, got 0; leave it out")
        limit, longest = request.length_limit, self._runtime.config.max_seq_len
        if limit > longest:
            raise CapacityError(
                f"{name}: expected prompt and output within max_seq_len={longest}, got "
                f"{len(tokens)} + {params.max_new_tokens} tokens; shorten it, lower max_new_tokens or raise "
                "max_seq_len"
            )
        check_pages(name, limit, self._runtime.kv_cache.groups, self._runtime.allocators)
        return request

    def _swap_space(self, requests: Sequence[Request]) -> SwapSpace | None:
        """Room for what may have to wait; None where all sequences that can run at once have their pages."""
        runtime, rows = self._runtime, self._runtime.config.max_num_reqs
        if not (self._swap_bytes and requests):
            return None
        groups, chunk = runtime.kv_cache.groups, longest_chunk(runtime)
        needs = np.array([pages_needed(groups, request.length_limit, chunk) for request in requests])
        pages = np.array([allocator.num_pages - 1 for allocator in runtime.allocators])
        if (np.sort(needs, 0)[-rows:].sum(0) <= pages).all():
            return None
        longest = max(request.length_limit for request in requests)
        most = sum(group.pages_for(longest) * group.bytes_per_page for group in groups)
        nbytes = min(self._swap_bytes, most * min(rows, len(requests)))
        try:
            return SwapSpace(runtime.kv_cache, runtime.allocators, nbytes, stream=runtime.stream)
        except CapacityError as error:
            self._swap_bytes = 0
            warnings.warn(f"sequences that wait are computed again: {error}", RuntimeWarning, stacklevel=2)
            return None

    def _run(self, requests: list[Request]) -> Generator[Event, None, None]:
        space = self._swap_space(requests)
        session = MovableSession(self._runtime)
        scheduler = Scheduler(requests, self._runtime, session, space, self.stats)
        in_flight: deque[Launch] = deque()
        try:
            while scheduler.queue or scheduler.members or in_flight:
                scheduler.admit()
                launches = scheduler.launch()
                in_flight.extend(launches)
                if not in_flight and (scheduler.members or scheduler.queue):
                    waiting = [*scheduler.members.values(), *scheduler.queue][0]
                    pages = " + ".join(str(allocator.num_free) for allocator in self._runtime.allocators)
                    free = f"{len(self._runtime.free_req_indices)} rows and {pages} pages"
                    raise CapacityError(
                        f"prompts[{waiting.index}]: expected a free row and pages, got {free}, the others held by "
                        "somebody else; wait for them"
                    )
                if in_flight and (len(in_flight) > 1 or not launches):
                    launch = in_flight.popleft()
                    if launch.steps > 1 and not launch.done():
                        for _ in launch:  # each step as it arrives
                            yield from _collect(session, scheduler)
                    launch.wait()
                    yield from _collect(session, scheduler)
                    scheduler.release_finished()
        finally:
            try:
                session.close()
            finally:
                if space is not None:
                    space.close()


def _collect(session: MovableSession, scheduler: Scheduler) -> Iterator[Event]:
    """What has arrived; a fault behind all of it, by the index of its prompt."""
    fault = None
    while True:
        try:
            found = session.collect()
            break
        except StepFaultError as error:
            fault = fault or error
    for row, tokens in found:
        yield from _events(scheduler.requests[row], tokens)
    if fault is not None:
        faulty = sorted(request.index for row, request in scheduler.requests.items() if row.end is FinishReason.FAULT)
        raise StepFaultError(fault.step, fault.faults, faulty)


def _events(request: Request, tokens: list[int]) -> Iterator[Event]:
    """What a prompt's new tokens are to the caller: a stop token ends it, and is no part of it."""
    row = request.row
    assert row is not None, "tokens come to rows"
    last = len(tokens) - 1 if request.finished and row.end is not FinishReason.FAULT else len(tokens)
    logprobs: Sequence[TokenLogprob | None] = row.logprobs[-len(tokens) :] or [None] * len(tokens)
    is_first = request.params.prompt_logprobs is not None and len(row.tokens) == len(tokens)
    of_prompt = tuple(row.prompt_logprobs) if is_first else None
    for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if index == last and row.end is FinishReason.STOP_TOKEN:
            yield Event(request.index, None, True, None, of_prompt)
        else:
            yield Event(request.index, token, index == last, logprob, of_prompt)
        of_prompt = None
