"""Handles of submitted steps. Reading the results of a handle waits for its own step only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.device_wait import wait_until
from graphrt.capture.staging import StagingSlot
from graphrt.kernels.checks import check_bool, check_int
from graphrt.kernels.errors import ReplayError, UnsupportedError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.metadata.step_inputs import HEADER_STOP
from graphrt.kernels.types import FAULT_GROUP_SHIFT, FaultCode

_FAULT_TEXT = {
    FaultCode.REQ_INDEX_OUT_OF_RANGE: "req_index {value} is outside 0 to max_num_reqs - 1",
    FaultCode.BAD_LENGTH: "seq_len {value} is shorter than query_len, or longer than max_seq_len",
    FaultCode.LENGTH_EXCEEDS_PAGES: "a length of {value} needs more pages than were listed",
    FaultCode.PAGE_OUT_OF_RANGE: "page {value} is the null page or outside the cache",
    FaultCode.TOKEN_OUT_OF_RANGE: "token {value} is outside the vocabulary",
    FaultCode.DUPLICATE_REQUEST: "req_index {value} is also used by another request of the batch",
    FaultCode.DUPLICATE_PAGE: "page {value} would be written twice, because it is listed twice or by two requests",
    FaultCode.NO_LAST_TOKEN: "req_index {value} has no last token, because its sequence has not sampled a token",
    FaultCode.BAD_ENCODER_LEN: "encoder_len {value} is negative, longer than max_encoder_len, or 0 with listed pages",
    FaultCode.ENCODER_LEN_CHANGED: "encoder_len {value} differs from the earlier steps of the sequence; pass the "
    "same length in every step, or list the encoder's pages from page 0 to change it",
    FaultCode.NO_TOKEN_OFFERED: "no token can be sampled, because all logits are NaN, -inf or forbidden by its token "
    "mask or logit bias, or because the sampler returned -1",
    FaultCode.SAMPLE_OUT_OF_RANGE: "the sampler returned {value}, which is outside the vocabulary",
}
_WROTE_NOTHING = "the request wrote nothing and can be submitted again"
_WROTE_KV = "its KV was written, but it has no new token; finish the sequence, or submit a literal token"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, from the model's logits before any processing.

    token     a sampled token, or a token of a prompt
    logprob   natural logarithm of its probability
    rank      1 is the most likely token; tokens with equal logits are ordered by token id
    top       the most likely tokens and their log-probabilities, in order of rank
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class StepLogprobs:
    """Log-probabilities of some steps, copied from the output rings. TokenLogprob objects are created on access."""

    __slots__ = ("_logprobs", "_ranks", "_tokens")

    def __init__(
        self, ranks: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]
    ) -> None:
        self._ranks, self._logprobs, self._tokens = ranks, logprobs, tokens

    @classmethod
    def joined(
        cls, launches: Sequence[StepLogprobs | None], places: npt.NDArray[np.int64] | None = None
    ) -> StepLogprobs:
        """Concatenate the steps of launches with the same requests, for the requests at positions `places`."""
        asked = [launch for launch in launches if launch is not None]
        parts = zip(*((part._ranks, part._logprobs, part._tokens) for part in asked), strict=True)
        arrays = [np.concatenate(part) for part in parts]
        return cls(*(arrays if places is None else (array[:, places] for array in arrays)))

    def at(self, step: int, row: int) -> TokenLogprob | None:
        """Return the TokenLogprob of one request; None if it did not ask for log-probabilities or has no token."""
        if not (rank := int(self._ranks[step, row])):
            return None
        token, *best = self._tokens[step, row].tolist()
        logprob, *theirs = self._logprobs[step, row].tolist()
        top = tuple((t, p) for t, p in zip(best, theirs, strict=True) if t >= 0)
        return TokenLogprob(token, logprob, rank, top)

    def rows(self, step: int) -> list[TokenLogprob | None]:
        """Return the TokenLogprob of each request of a step, or None."""
        return [self.at(step, row) for row in range(self._ranks.shape[1])]


@dataclass(frozen=True, slots=True)
class RequestFault:
    """A fault of one request of a step, which the device detected.

    index         position of the request in the batch; in errors of a session, its request index
    code          kind of the fault
    value         the wrong value
    group         KV group of the page or length at fault, else 0
    by_req_index  whether `index` is a request index
    """

    index: int
    code: FaultCode
    value: int
    group: int = 0
    by_req_index: bool = False

    @property
    def what(self) -> str:
        """Description of the fault, without the request."""
        where = f" in KV group {self.group}" if self.group else ""
        return f"{self.code.name}: {_FAULT_TEXT[self.code].format(value=self.value)}{where}"

    def __str__(self) -> str:
        after = _WROTE_KV if self.code >= FaultCode.NO_TOKEN_OFFERED else _WROTE_NOTHING
        where = "request index" if self.by_req_index else "batch position"
        return f"{where} {self.index}: {self.what}; {after}"


class StepFaultError(ReplayError):
    """The device found faults in requests of a step. Their tokens are -1; the tokens of other requests are correct.

    step                number of the step
    faults              the faults of all requests, in the order of the batch
    index, code, value  fields of the first fault
    prompts             indices of the faulty prompts, if a TextGenerator raises it. Do not use `index` then, because
                        the generator assigns request indices itself
    """

    def __init__(self, step: int, faults: Sequence[RequestFault], prompts: Sequence[int] = ()) -> None:
        first, *others = faults
        if prompts:
            named = ", ".join(f"prompts[{index}]" for index in prompts[:16])
            super().__init__(f"{named}: step {step}: {first.what}; generate again without these prompts")
        else:
            listed = ", ".join(str(f.index) for f in others[:16])
            where = "request indices" if first.by_req_index else "batch positions"
            more = f" (and {len(others)} more, at {where} {listed})" if others else ""
            super().__init__(f"step {step}, {first}{more}")
        self.step, self.faults, self.prompts = step, tuple(faults), tuple(prompts)
        self.index, self.code, self.value = first.index, first.code, first.value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.faults, self.prompts)


def _request_faults(codes: npt.NDArray[np.int32], values: npt.NDArray[np.int64]) -> tuple[RequestFault, ...]:
    """Return the faults of a step, from the codes and values [num_reqs] that `write_outputs` wrote."""
    faults = []
    for index in codes.nonzero()[0].tolist():
        group, code = divmod(int(codes[index]), 1 << FAULT_GROUP_SHIFT)
        faults.append(RequestFault(index, FaultCode(code), int(values[index]), group))
    return tuple(faults)


class LogitsOwner(Protocol):
    """The owner of the logits of the latest step, which is a ReplayManager."""

    def latest_logits(self, handle: InFlight, copy: bool) -> torch.Tensor: ...


class Rings:
    """The result rings that the device writes, as host arrays with one entry per step in flight.

    positions   maximum number of tokens of a request in a step; tokens and log-probabilities have a row for each
    several_ranks  whether launches run on several ranks
    """

    __slots__ = (
        "codes", "depth", "draft_counts", "ends", "logprob_tokens", "logprobs", "positions", "ranks", "several_ranks",
        "steps", "tokens", "values",
    )  # fmt: skip

    def __init__(self, buffers: StaticBuffers, *, several_ranks: bool = False) -> None:
        self.several_ranks = several_ranks
        self.steps, self.tokens, self.ends = (
            ring.numpy() for ring in (buffers.step_ring, buffers.token_ring, buffers.finish_reason_ring)
        )
        self.codes, self.values = buffers.fault_code_ring.numpy(), buffers.fault_value_ring.numpy()
        self.draft_counts = buffers.draft_count_ring.numpy()
        self.ranks, self.logprobs, self.logprob_tokens = (
            ring.numpy() for ring in (buffers.rank_ring, buffers.logprob_ring, buffers.logprob_token_ring)
        )
        self.depth, self.positions = len(self.steps), int(self.tokens.shape[1])

    def entries(self, step: int, count: int) -> slice | npt.NDArray[np.int64]:
        """Return the entries of `count` steps, as a slice if they are contiguous, else as indices."""
        first = step % self.depth
        if first + count <= self.depth:
            return slice(first, first + count)
        return np.arange(step, step + count) % self.depth

    def rows(self, ring: npt.NDArray[Any], at: slice | npt.NDArray[np.int64], num_reqs: int) -> npt.NDArray[Any]:
        """Return a copy of a ring with positions, [steps x positions, num_reqs, ...]."""
        found: npt.NDArray[Any] = np.array(ring[at, :, :num_reqs])
        rows: npt.NDArray[Any] = found.reshape(found.shape[0] * self.positions, *found.shape[2:])
        return rows


class InFlight:
    """One launch, which uses one entry of the input ring. Reading its results waits for this launch only.

    step         number of its first step; a manager numbers steps in increasing order
    steps        maximum number of steps; a launch that loops on the device stops early when no request continues
    num_reqs     number of requests
    descriptor   the size that it ran at
    why_eager    reason why the launch ran eagerly; empty if it replayed a graph
    req_indices  [num_reqs] request index of each column, in launches of a session; else None
    positions    maximum number of tokens of a request in a step: 1 + num_speculative_tokens
    """

    __slots__ = (
        "_asks_logprobs", "_draft_counts", "_ends", "_error", "_logprobs", "_rings", "_slot", "_tokens", "descriptor",
        "num_reqs", "positions", "req_indices", "step", "steps", "why_eager",
    )  # fmt: skip

    _draft_counts: npt.NDArray[np.int32] | None
    _ends: npt.NDArray[np.int32]
    _tokens: npt.NDArray[np.int32]

    def __init__(
        self,
        step: int,
        steps: int,
        num_reqs: int,
        descriptor: BatchDescriptor,
        why_eager: str,
        slot: StagingSlot,
        rings: Rings,
        asks_logprobs: bool = False,
        req_indices: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        self.step, self.steps, self.num_reqs = step, steps, num_reqs
        self.descriptor, self.why_eager, self.req_indices = descriptor, why_eager, req_indices
        self._slot: StagingSlot | None = slot
        self._rings: Rings | None = rings
        self.positions = rings.positions
        self._error: ReplayError | None = None
        self._asks_logprobs = asks_logprobs
        self._logprobs: StepLogprobs | None = None
        slot.on_done = self._collect

    def done(self) -> bool:
        """Return whether the launch has finished, without waiting."""
        slot = self._slot
        return slot is None or slot.is_done()

    def wait(self) -> None:
        """Wait for this launch only. May be called from any thread."""
        slot = self._slot
        if slot is not None:
            slot.wait()

    @property
    def num_arrived(self) -> int:
        """Number of steps whose results have arrived, without waiting. Results arrive in order while the launch
        runs."""
        rings, step = self._rings, self.step
        if rings is None:
            return len(self._ends)
        if self.steps == 1:
            return int(rings.steps.item(step % rings.depth) == step)
        arrived = rings.steps[rings.entries(step, self.steps)] == np.arange(step, step + self.steps)
        return int(arrived.cumprod().sum())

    def _collect(self) -> None:
        """Copy the results from the rings, after the launch has finished and before its ring entries are reused.

        Several threads may run this at once, and a signal handler may interrupt it. The first call that finishes
        copying stores its results, and others discard their copies.
        """
        rings, n = self._rings, self.num_reqs
        if rings is None:
            return
        arrived = self.num_arrived
        at = rings.entries(self.step, arrived)
        tokens, ends, codes = rings.rows(rings.tokens, at, n), rings.ends[at, :n].copy(), rings.codes[at, :n].copy()
        counts = rings.draft_counts[at, :n].copy() if self.positions > 1 else None
        tokens.flags.writeable = ends.flags.writeable = False  # sessions read them later
        logprobs: StepLogprobs | None = None
        error: ReplayError | None = None
        if self._asks_logprobs:
            logprob_rings = (rings.ranks, rings.logprobs, rings.logprob_tokens)
            logprobs = StepLogprobs(*(rings.rows(ring, at, n) for ring in logprob_rings))
        if not arrived:
            error = ReplayError(
                f"step {self.step}: the device did not report this step (its ring entry contains step "
                f"{rings.steps[self.step % rings.depth]}), because the launch failed or other code wrote the buffers; "
                "close the runtime"
            )
        elif np.count_nonzero(codes):
            # At most one fault per request, because a faulty request does not run in later steps of the launch.
            steps = zip(codes, rings.values[at, :n], strict=True)
            faults = [fault for step_codes, values in steps for fault in _request_faults(step_codes, values)]
            error = StepFaultError(self.step + int(codes.any(1).argmax()), faults)
        if self._rings is rings:  # no call instruction from here on, so no thread or signal handler can intervene
            self._tokens, self._ends, self._logprobs, self._error = tokens, ends, logprobs, error
            self._draft_counts = counts
            self._slot = self._rings = None

    @property
    def error(self) -> ReplayError | None:
        """The exception that `tokens()` raises, such as a StepFaultError, or None. Waits for this launch."""
        self.wait()
        return self._error

    @property
    def faults(self) -> tuple[RequestFault, ...]:
        """The faults of all requests, in batch order. Waits for this launch. Raises: ReplayError: see `tokens`."""
        error = self.error
        if error is None:
            return ()
        if isinstance(error, StepFaultError):
            return error.faults
        raise error

    def _arrived(self, raise_on_fault: bool) -> npt.NDArray[np.int32]:
        """Return the tokens [steps x positions, num_reqs] of the steps that ran. Waits for this launch. Raises: see
        `tokens`."""
        error = self.error
        if error is not None and (raise_on_fault or not isinstance(error, StepFaultError)):
            raise error
        return self._tokens


class StepHandle(InFlight):
    """One submitted step of a batch; `steps` is 1."""

    __slots__ = ("_owner", "_sampled")

    def __init__(
        self,
        step: int,
        num_reqs: int,
        descriptor: BatchDescriptor,
        why_eager: str,
        slot: StagingSlot,
        rings: Rings,
        owner: LogitsOwner,
        sampled: bool,
        asks_logprobs: bool,
    ) -> None:
        super().__init__(step, 1, num_reqs, descriptor, why_eager, slot, rings, asks_logprobs)
        self._owner, self._sampled = owner, sampled

    @property
    def results(self) -> npt.NDArray[np.int32]:
        """The tokens, as `tokens` returns them, even if requests are faulty or there is no sampler. Waits for this
        step. Raises ReplayError, see `tokens`."""
        return self._by_request(self._arrived(False))

    def _by_request(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        by_request: npt.NDArray[np.int32] = tokens[0] if self.positions == 1 else tokens.T
        return by_request

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Return the sampled token of each request.

        raise_on_fault   if False, return the tokens even if some requests are faulty

        Returns [num_reqs] int32 on the host, read-only; -1 for requests that sample nothing or are faulty. With
        `num_speculative_tokens`, [num_reqs, 1 + num_speculative_tokens]: the accepted drafts and the token after them,
        then -1. Waits for this step only. May be called at any time and from any thread, even after later steps.

        Raises:
            StepFaultError: if a request is faulty and `raise_on_fault` is True.
            ReplayError: if the runtime has no sampler, or the device did not report the step.
            ConfigError: if `raise_on_fault` is not a bool.
        """
        raise_on_fault = check_bool("raise_on_fault", raise_on_fault, advice="pass a bool")
        if not self._sampled:
            raise ReplayError("tokens: this runtime has no sampler; read logits() instead")
        return self._by_request(self._arrived(raise_on_fault))

    def logprobs(self, position: int = 0) -> list[TokenLogprob | None]:
        """Return a TokenLogprob per request; None for a request that did not ask for it or has no token.

        position   with `num_speculative_tokens`, which token of each request, as the second index of `tokens()`

        Waits for this step only, like `tokens`. Raises: ReplayError: if the device did not report the step.
        ConfigError: if `position` is not an int from 0 to `num_speculative_tokens`.
        """
        check_int("position", position, 0, self.positions - 1, advice="pass 0 for the first token of each request")
        self._arrived(raise_on_fault=False)
        return self._logprobs.rows(position) if self._logprobs is not None else [None] * self.num_reqs

    def logits(self, *, copy: bool = False) -> torch.Tensor:
        """Return the logits [num_reqs, vocab_size] on the device, ordered after the step on the current stream.

        If the step ran in a graph that verifies drafts, [1 + num_speculative_tokens, num_reqs, vocab_size].

        copy   return a copy. Otherwise the logits are in memory that the graphs share, and are valid until the next
        step is submitted. Mixed steps with two parts always return a copy, because they reorder requests

        Call it before the next step is submitted, on the thread that submits steps. Logits of faulty requests have no
        meaning. This call does not wait for the step, so it raises no faults; read `faults`.

        Raises:
            ReplayError: if a later step was submitted, or another thread is submitting one.
            CaptureError: after `close()`.
            ConfigError: if `copy` is not a bool.
        """
        copy = check_bool("copy", copy, advice="pass a bool")
        return self._owner.latest_logits(self, copy)


_POLL_SECONDS = 50e-6
"""Pause between two polls. A step takes a millisecond or more, and other threads can run during the pause."""


class Launch(InFlight):
    """One submitted launch of a session or a bundle, of up to `steps` steps."""

    __slots__ = ()

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Return the sampled tokens, [steps that ran, num_reqs] int32 on the host, read-only; -1: no token. Waits for
        the launch.

        With `num_speculative_tokens`, each step has 1 + num_speculative_tokens rows.

        Raises: StepFaultError: if requests are faulty and `raise_on_fault` is True. ReplayError: if the device did not
        report the launch.
        """
        return self._arrived(raise_on_fault)

    def stop(self) -> None:
        """End the launch early, after the step that is running. At least its first step runs.

        Its requests continue with the next launch. Steps already queued run as padding. May be called from any thread
        and from a signal handler. Has no effect on a finished launch.

        Raises: UnsupportedError: with a group of ranks, which would end at different steps.
        """
        if (rings := self._rings) is not None and rings.several_ranks:
            raise UnsupportedError("stop: not supported with several ranks; run fewer steps per launch")
        slot = self._slot
        if slot is not None:
            inputs = slot.inputs
            if self._slot is slot:  # no call instruction up to the write, so no other launch can get the input slot
                inputs[HEADER_STOP] = 1

    def arrived(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return tokens [steps x positions, num_reqs] and FinishReasons [steps, num_reqs], int32, of the steps whose
        results have arrived. Does not wait."""
        rings = self._rings
        if rings is None:
            return self._tokens, self._ends
        at, n = rings.entries(self.step, self.num_arrived), self.num_reqs
        tokens, ends = rings.rows(rings.tokens, at, n), rings.ends[at, :n].copy()
        # Another thread may have collected the launch by now, and a later launch may have written its ring entries.
        return (tokens, ends) if self._rings is rings else (self._tokens, self._ends)

    def ends(self) -> npt.NDArray[np.int32]:
        """Return the FinishReason of each request after each step, [steps that ran, num_reqs] int32. Waits for the
        launch."""
        self.wait()
        return self._ends

    def draft_counts(self) -> npt.NDArray[np.int32]:
        """Return the number of drafts that each step verified, [steps that ran, num_reqs] int32. Waits for the
        launch. Needs a runtime with `num_speculative_tokens`."""
        self.wait()
        assert self._draft_counts is not None, "the runtime verifies drafts"
        return self._draft_counts

    def logprobs(self) -> StepLogprobs | None:
        """Return the log-probabilities of all steps; None if no request asked for them. Waits for the launch."""
        self.wait()
        return self._logprobs

    def _has_ended_or(self, index: int) -> bool:
        """Return whether the launch has ended or the step at `index` has arrived."""
        return self.num_arrived > index or self.done()

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        """Iterate over the tokens of the steps, [num_reqs] int32 each, as they arrive; with `num_speculative_tokens`,
        [1 + num_speculative_tokens, num_reqs]."""
        for index in range(self.steps):
            wait_until(partial(self._has_ended_or, index), _POLL_SECONDS)
            if self.num_arrived <= index:
                return
            rings = self._rings
            if rings is not None:
                tokens = rings.tokens[(self.step + index) % rings.depth, :, : self.num_reqs].copy()
            if self._rings is None:  # may have been collected, as in `arrived`
                tokens = self._tokens[index * self.positions : (index + 1) * self.positions]
            yield tokens if self.positions > 1 else tokens[0]
