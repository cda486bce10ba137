"""Text generation with continuous batching over a Runtime; scheduler.py decides which prompts are in a launch.

Requests stay on the device (session.py). Chunks of prompts run together with the requests that decode, one step per
launch. Once all running prompts are computed, a launch has several steps, whose tokens arrive while it is running. Each
launch is submitted before the previous launch is collected, so the device never waits for the host. A request that
finishes at a stop token is replaced a few launches later.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphrt.cache.swap import SwapSpace
from graphrt.engine.handle import Launch, StepFaultError, TokenLogprob
from graphrt.engine.lifecycle import State, wrong_state
from graphrt.generate.scheduler import GenerationStats, PromptState, Scheduler, longest_chunk
from graphrt.kernels.checks import check_callable, check_instance, check_int, check_sequence
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.types import FinishReason
from graphrt.runtime import Runtime, check_decoder
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import check_pages, pages_needed
from graphrt.session.requests import Prompt, SessionRequest
from graphrt.session.session import DecodeSession, check_request

_UNFINISHED = (FinishReason.RUNNING, FinishReason.FAULT)  # a fault is raised, and has no event


@dataclass(frozen=True, slots=True)
class Event:
    """One new token of a prompt, or the end of the prompt.

    prompt           index of the prompt
    token            None if the prompt finished at a stop token, without a new token
    finished         True in the last event of the prompt
    logprob          log-probability of the token or the stop token, with `SamplingParams.logprobs`
    prompt_logprobs  in the first event, with `SamplingParams.prompt_logprobs`: one per prompt token except the first
    stop_token       the stop token at which the prompt finished, if `token` is None
    num_draft_tokens, num_accepted_tokens  in the last event: drafts that the prompt's steps verified, and how many of
                     them were accepted; see SessionRequest. If `ends` finished the prompt, without the steps of the
                     launch that was running
    """

    prompt: int
    token: int | None
    finished: bool
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    stop_token: int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


EndsPrompt = Callable[[int, int], bool]
"""Called with the index of a prompt and each of its new tokens, in order. True finishes the prompt at this token."""

Arrivals = Callable[[bool], Sequence[tuple[Prompt, SamplingParams]] | None]
"""Returns the prompts that have arrived, each with its params, or None if no more will arrive. The argument is True if
all earlier prompts have finished. The call may then block until the next prompt."""


class TextGenerator:
    """Continues prompts of token ids, as many at a time as the request indices and pages of a runtime allow.

    Without mixed batches (`RuntimeConfig.mixed_batches`), prompts are computed one token per step.

    Pages are allocated as a sequence grows. If none are free, the request of the last prompt is preempted, and its
    pages move to host memory. Prompts with a common prefix share its pages. Preemption and shared pages do not change
    tokens, unless logits differ in their last bits between captured sizes.

    runtime     a captured runtime; several generators may share it
    swap_bytes  pinned host memory for one `generate` call, if the cache cannot hold all its sequences at once. Pages
                that do not fit are recomputed; with 0, or with several ranks, all pages are. If the host cannot
                allocate the memory, a RuntimeWarning states the reason once, and all pages are recomputed

    stats  see GenerationStats

    Raises: ConfigError: if the runtime has no sampler, its model has cross or encoder layers, or `swap_bytes` is
    negative. CaptureError: if the runtime was closed.
    """

    def __init__(self, runtime: Runtime, *, swap_bytes: int = 4 << 30) -> None:
        check_instance("runtime", runtime, Runtime, advice="build a Runtime")
        if runtime.state is State.CLOSED:
            raise wrong_state(State.CLOSED, State.CAPTURED, "TextGenerator")
        check_decoder(runtime)
        self._runtime = runtime
        self._swap_bytes = check_int("swap_bytes", swap_bytes, 0, 1 << 50, advice="0 recomputes instead")
        self.stats = GenerationStats()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        ends: EndsPrompt | None = None,
    ) -> Generator[Event, None, None]:
        """Yield tokens of all prompts as they arrive. The last event of each prompt has `finished` set.

        All prompts are checked before the first step. When the generator ends, fails or is closed, it waits for steps
        in flight and frees its request indices and pages.

        prompts  token ids from 0 to vocab_size - 1, at least one per prompt: lists, arrays or host tensors
        params   one for all prompts, or one per prompt
        ends     called with the index of a prompt and its new token, except a stop token. If it returns True, this
                 token is the prompt's last. Use it for conditions that only the host detects, such as a stop string

        Raises: ShapeError: if a prompt is empty or not a list of token ids. CapacityError: if the cache is too small
        for a single prompt. ConfigError: if `params` are wrong, or `ends` is not callable. CaptureError: if the runtime
        is not captured. These errors are raised before any step. Errors raised later: CapacityError: if other users of
        the runtime hold the pages that the first prompt needs. StepFaultError: if prompts had a fault, such as logits
        that are all NaN; its `prompts` lists them. All tokens that had arrived are yielded first. ReplayError: if a
        request gets no token. CaptureError: after a `reset()`.
        """
        self._check_captured("generate")
        if ends is not None:
            check_callable("ends", ends, advice="pass a function of a prompt's index and its new token, or None")
        check_sequence("prompts", prompts, of="prompts, each a list of token ids")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        check_sequence("params", params, len(prompts), of="SamplingParams, one per prompt")
        return self._run([self._checked(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))], ends)

    def serve(self, arrivals: Arrivals) -> Generator[Event, None, None]:
        """Yield tokens of prompts that arrive while other prompts run. A new prompt joins the next launch.

        Prompts are numbered in the order of their arrival. Preempted requests are recomputed. An error ends the
        generator and all its prompts, so validate each prompt with `check` first.

        arrivals  called before each launch, by the thread that runs the generator. After it has returned None, the
                  generator ends when all prompts have finished

        Raises: see `generate`; ConfigError: if `arrivals` is not callable. An invalid prompt raises when it arrives.
        """
        self._check_captured("serve")
        check_callable("arrivals", arrivals, advice="pass a function that returns the prompts that have arrived")
        return self._run([], None, arrivals)

    def check(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> None:
        """Raise the error that `generate` would raise for a prompt. The text has `index`. Any thread may call this."""
        self._checked(index, prompt, params)

    def _check_captured(self, call: str) -> None:
        if self._runtime.state is not State.CAPTURED:
            raise wrong_state(self._runtime.state, State.CAPTURED, call)

    def _checked(self, index: int, prompt: Prompt, params: SamplingParams) -> PromptState:
        name, params_name = f"prompts[{index}]", f"params[{index}]"
        check_instance(params_name, params, SamplingParams, advice="pass SamplingParams(...)")
        state = PromptState(index, *check_request(self._runtime, prompt, params, name, params_name))
        check_pages(name, state.length_limit, self._runtime.kv_cache.groups, self._runtime.allocators)
        return state

    def _swap_space(self, prompts: Sequence[PromptState], session: DecodeSession) -> SwapSpace | None:
        """Return host memory for pages of preempted requests; None if all requests that run at once have pages."""
        runtime, most_running = self._runtime, self._runtime.config.max_num_reqs
        if not (self._swap_bytes and prompts) or runtime.manager.has_ranks:
            return None
        groups, chunk = runtime.kv_cache.groups, longest_chunk(runtime)
        needs = np.array([pages_needed(groups, prompt.length_limit, chunk) for prompt in prompts])
        pages = np.array([allocator.num_pages - 1 for allocator in runtime.allocators])
        if (np.sort(needs, 0)[-most_running:].sum(0) <= pages).all():
            return None
        longest = max(prompt.length_limit for prompt in prompts)
        most = sum(group.pages_for(longest) * group.bytes_per_page for group in groups)
        nbytes = min(self._swap_bytes, most * min(most_running, len(prompts)))
        try:
            return SwapSpace(runtime.kv_cache, session.leases, nbytes, stream=runtime.stream)
        except CapacityError as error:
            self._swap_bytes = 0
            warnings.warn(f"preempted requests are recomputed: {error}", RuntimeWarning, stacklevel=2)
            return None

    def _run(
        self, prompts: list[PromptState], ends: EndsPrompt | None, arrivals: Arrivals | None = None
    ) -> Generator[Event, None, None]:
        space: SwapSpace | None = None
        session = DecodeSession(self._runtime)
        try:
            space = self._swap_space(prompts, session)
            scheduler = Scheduler(prompts, self._runtime, session, space, self.stats)
            in_flight: deque[Launch] = deque()
            indices = itertools.count(len(prompts))

            def is_busy() -> bool:
                return bool(scheduler.queue or scheduler.running or in_flight)

            while arrivals is not None or is_busy():
                if arrivals is not None:
                    arrived = arrivals(not is_busy())
                    for prompt in check_sequence("arrivals", () if arrived is None else arrived, of="prompts"):
                        check_sequence("arrivals", prompt, 2, of="items, a prompt and its SamplingParams")
                        scheduler.queue.append(self._checked(next(indices), *prompt))
                    arrivals = arrivals if arrived is not None else None
                    if not is_busy():
                        continue
                scheduler.admit()
                launches = scheduler.launch()
                in_flight.extend(launches)
                if not in_flight and (scheduler.running or scheduler.queue):
                    prompt, *_ = [*scheduler.running.values(), *scheduler.queue]
                    pages = " + ".join(str(allocator.num_free) for allocator in self._runtime.allocators)
                    raise CapacityError(
                        f"prompts[{prompt.index}]: other users of the runtime hold the pages or request indices that "
                        f"it needs ({len(self._runtime.free_req_indices)} request indices and {pages} pages are free); "
                        "wait until more are free"
                    )
                if in_flight and (len(in_flight) > 1 or not launches):
                    launch = in_flight.popleft()
                    if launch.steps > 1 and not launch.done():
                        for _ in launch:  # each step as it arrives
                            yield from _collect(session, scheduler, ends)
                    launch.wait()
                    yield from _collect(session, scheduler, ends)
                    scheduler.release_finished()
        finally:
            try:
                if space is not None:
                    space.close()
            finally:
                session.close()


def _collect(session: DecodeSession, scheduler: Scheduler, ends: EndsPrompt | None) -> Iterator[Event]:
    """Yield an event per collected token, and then raise a fault by the index of its prompt."""
    fault = None
    while True:
        try:
            found = session.collect()
            break
        except StepFaultError as error:
            fault = fault or error
    for request, tokens in found:
        for event in _events(scheduler.by_request[request], request, tokens):
            if ends is not None and event.token is not None and ends(event.prompt, event.token):
                scheduler.finish(request)
                event = replace(event, finished=True)
            if event.finished:
                counts = request.num_draft_tokens, request.num_accepted_tokens
                event = replace(event, num_draft_tokens=counts[0], num_accepted_tokens=counts[1])
                del scheduler.by_request[request]
            yield event
            if event.finished:
                break
    if fault is not None:
        prompts = scheduler.by_request.items()
        faulty = sorted(prompt.index for request, prompt in prompts if request.finish_reason is FinishReason.FAULT)
        if faulty:  # not if `ends` finished these prompts before the fault
            raise StepFaultError(fault.step, fault.faults, faulty)


def _events(prompt: PromptState, request: SessionRequest, tokens: list[int]) -> Iterator[Event]:
    """Yield the events of a prompt's new tokens. A stop token ends the prompt, and is not part of the output."""
    last = len(tokens) - 1 if request.finish_reason not in _UNFINISHED else len(tokens)
    logprobs: Sequence[TokenLogprob | None] = request.logprobs[-len(tokens) :] or [None] * len(tokens)
    is_first = prompt.params.prompt_logprobs is not None and len(request.tokens) == len(tokens)
    of_prompt = tuple(request.prompt_logprobs) if is_first else None
    for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if index == last and request.finish_reason is FinishReason.STOP_TOKEN:
            yield Event(prompt.index, None, True, logprob, of_prompt, token)
        else:
            yield Event(prompt.index, token, index == last, logprob, of_prompt)
        of_prompt = None
