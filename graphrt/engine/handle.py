"""The result of one step: a handle whose `tokens()` waits for that step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.staging import StagingSlot
from graphrt.engine.logprobs import StepLogprobs, TokenLogprob
from graphrt.kernels.checks import check_bool
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.types import FAULT_GROUP_SHIFT, FaultCode

_FAULT_TEXT = {
    FaultCode.REQ_INDEX_OUT_OF_RANGE: "req_index {value} is not one of the row states 0 to max_num_reqs - 1",
    FaultCode.BAD_LENGTH: "seq_len {value} is shorter than its query_len, or longer than max_seq_len",
    FaultCode.LENGTH_EXCEEDS_PAGES: "a length of {value} does not fit in the pages that were listed for its row",
    FaultCode.PAGE_OUT_OF_RANGE: "page {value} is the null page or outside the cache",
    FaultCode.TOKEN_OUT_OF_RANGE: "token {value} is outside the vocabulary",
    FaultCode.DUPLICATE_REQUEST: "req_index {value} is used by another row of the batch too",
    FaultCode.DUPLICATE_PAGE: "page {value} is written twice: by another row too, or it is listed twice",
    FaultCode.NO_LAST_TOKEN: "req_index {value} has no last token to go on from: its sequence has sampled none",
    FaultCode.BAD_ENCODER_LEN: "encoder_len {value} is negative, longer than max_encoder_len, or 0 beside listed pages",
    FaultCode.ENCODER_LEN_CHANGED: "encoder_len {value} is not the one that its sequence has; state it in every step, "
    "or list the encoder's pages from page 0 with another one",
    FaultCode.NO_TOKEN_OFFERED: "its logits offer no token: all are NaN, -inf or forbidden by its token mask or "
    "logit bias, or the sampler returned -1",
    FaultCode.SAMPLE_OUT_OF_RANGE: "the sampler returned {value}, which is outside the vocabulary",
}
_WROTE_NOTHING = "the row wrote nothing and can be submitted again"
_WROTE_KV = "its KV is written, its last token is void; end the sequence, as a session does, or submit a literal token"


@dataclass(frozen=True, slots=True)
class RequestFault:
    """What is wrong with one row of a step: its place in the batch, or in a session its row id; the code, the offending
    number, and the KV group whose pages it is about, 0 for faults that are about no pages."""

    index: int
    code: FaultCode
    value: int
    group: int = 0

    @property
    def what(self) -> str:
        """The fault in words, without the row."""
        where = f" in KV group {self.group}" if self.group else ""
        return f"{self.code.name}: {_FAULT_TEXT[self.code].format(value=self.value)}{where}"

    def __str__(self) -> str:
        after = _WROTE_KV if self.code >= FaultCode.NO_TOKEN_OFFERED else _WROTE_NOTHING
        return f"row {self.index}: {self.what}; {after}"


class StepFaultError(ReplayError):
    """Rows of a step are faulty; the device found out. Their tokens are -1, and the other rows' are right.

    step              the step's number
    faults            all faulty rows, in the order of the batch
    row, code, value  of the first of them
    prompts           of a TextGenerator: indices of the faulty prompts. The generator assigns rows itself, so do not
                      use `row` then
    """

    def __init__(self, step: int, faults: Sequence[RequestFault], prompts: Sequence[int] = ()) -> None:
        first, *others = faults
        if prompts:
            named = ", ".join(f"prompts[{index}]" for index in prompts[:16])
            super().__init__(f"{named}: step {step}: {first.what}; generate again without what is named here")
        else:
            more = (
                f" (and {len(others)} more, in rows {', '.join(str(f.index) for f in others[:16])})" if others else ""
            )
            super().__init__(f"step {step}, {first}{more}")
        self.step, self.faults, self.prompts = step, tuple(faults), tuple(prompts)
        self.index, self.code, self.value = first.index, first.code, first.value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.faults, self.prompts)


def row_faults(codes: npt.NDArray[np.int32], values: npt.NDArray[np.int64]) -> tuple[RequestFault, ...]:
    """The faulty rows of a step, by the codes and values that `write_outputs` gave, [rows] each."""
    faults = []
    for row in codes.nonzero()[0].tolist():
        group, code = divmod(int(codes[row]), 1 << FAULT_GROUP_SHIFT)
        faults.append(RequestFault(row, FaultCode(code), int(values[row]), group))
    return tuple(faults)


class LogitsOwner(Protocol):
    """Who knows where the logits of the latest step are."""

    def latest_logits(self, handle: InFlight, copy: bool) -> torch.Tensor: ...


class Rings:
    """The rings that the device writes results to, as arrays of the host: an entry per step in flight."""

    __slots__ = ("codes", "depth", "ends", "logprob_tokens", "logprobs", "ranks", "steps", "tokens", "values")

    def __init__(self, buffers: StaticBuffers) -> None:
        self.steps, self.tokens, self.ends = (
            ring.numpy() for ring in (buffers.step_ring, buffers.token_ring, buffers.finish_reason_ring)
        )
        self.codes, self.values = buffers.fault_code_ring.numpy(), buffers.fault_value_ring.numpy()
        self.ranks, self.logprobs, self.logprob_tokens = (
            ring.numpy() for ring in (buffers.rank_ring, buffers.logprob_ring, buffers.logprob_token_ring)
        )
        self.depth = len(self.steps)

    def entries(self, step: int, count: int) -> slice | npt.NDArray[np.int64]:
        """The entries of so many steps: a slice, where they lie in one piece."""
        first = step % self.depth
        if first + count <= self.depth:
            return slice(first, first + count)
        return np.arange(step, step + count) % self.depth


class InFlight:
    """What was submitted in one slot of the input_ring: whoever reads its results waits for it alone.

    step         number of its first step; every step of a manager has a larger one than the step before
    steps        steps at most. A launch that loops ends early where no row goes on; others run all, without rows
    num_reqs     rows
    descriptor   the size it ran at
    why_eager    empty when it replayed a graph, else the reason why not
    req_indices      [num_reqs] the row id of each column, of a session's launch; None of others
    """

    __slots__ = (
        "_asks_logprobs", "_ends", "_error", "_logprobs", "_rings", "_slot", "_tokens", "descriptor", "num_reqs",
        "req_indices", "step", "steps", "why_eager",
    )  # fmt: skip

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
        self._error: ReplayError | None = None
        self._asks_logprobs = asks_logprobs
        self._logprobs: StepLogprobs | None = None
        slot.on_done = self._collect

    def done(self) -> bool:
        """Whether it has ended, without waiting."""
        slot = self._slot
        return slot is None or slot.is_done()

    def wait(self) -> None:
        """Wait for it alone; what was submitted later goes on. May be called from any thread."""
        slot = self._slot
        if slot is not None:
            slot.wait()

    @property
    def num_arrived(self) -> int:
        """Steps whose results have arrived, without waiting. They arrive in order, while it runs."""
        rings, step = self._rings, self.step
        if rings is None:
            return len(self._tokens)
        if self.steps == 1:
            return int(rings.steps.item(step % rings.depth) == step)
        arrived = rings.steps[rings.entries(step, self.steps)] == np.arange(step, step + self.steps)
        return int(arrived.cumprod().sum())

    def _collect(self) -> None:
        """Copy the results out of the rings, after the launch has finished and before its ring entries are reused.

        Several threads may run this at once, or a signal handler in the middle of it. The first one to finish copying
        stores its results. After that the entries may be reused, and a slower one drops what it has read.
        """
        rings, n = self._rings, self.num_reqs
        if rings is None:
            return
        arrived = self.num_arrived
        at = rings.entries(self.step, arrived)
        tokens, ends, codes = (ring[at, :n].copy() for ring in (rings.tokens, rings.ends, rings.codes))
        tokens.flags.writeable = ends.flags.writeable = False  # a session reads them later, too
        logprobs: StepLogprobs | None = None
        error: ReplayError | None = None
        if self._asks_logprobs:
            of_rings = (rings.ranks, rings.logprobs, rings.logprob_tokens)
            logprobs = StepLogprobs(*(ring[at, :n].copy() for ring in of_rings))
        if not arrived:
            error = ReplayError(
                f"step {self.step}: expected the device to report this step, got step "
                f"{rings.steps[self.step % rings.depth]}; the launch failed or another writer used the buffers: close "
                "this runtime"
            )
        elif np.count_nonzero(codes):
            # Each row's first fault: the row is parked from then on.
            steps = zip(codes, rings.values[at, :n], strict=True)
            faults = [fault for of_step, values in steps for fault in row_faults(of_step, values)]
            error = StepFaultError(self.step + int(codes.any(1).argmax()), faults)
        if self._rings is rings:  # no call instruction from here on: neither a thread nor a signal comes in between
            self._tokens, self._ends, self._logprobs, self._error = tokens, ends, logprobs, error
            self._slot = self._rings = None

    @property
    def error(self) -> ReplayError | None:
        """What `tokens()` raises, or None: a StepFaultError if rows are faulty. Waits."""
        self.wait()
        return self._error

    @property
    def faults(self) -> tuple[RequestFault, ...]:
        """All faulty rows, by their places; empty if there are none. Waits.

        Raises: ReplayError when the device did not report the first step at all.
        """
        error = self.error
        if error is None:
            return ()
        if isinstance(error, StepFaultError):
            return error.faults
        raise error

    def _arrived(self, raise_on_fault: bool) -> npt.NDArray[np.int32]:
        """Tokens of the steps that ran, [steps, num_reqs]; waits, and raises as `tokens` of its kinds say."""
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
        """`tokens()` as they stand, whether there are faults or no sampler at all. Waits for the step.

        Raises: ReplayError when the device did not report the step.
        """
        tokens: npt.NDArray[np.int32] = self._arrived(False)[0]
        return tokens

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Sampled token of each row, [num_reqs] int32 on the host, read-only; -1 where the row samples nothing or is
        faulty.

        Waits for this step alone, and can be called at any time and from any thread, also after later steps.

        Raises: StepFaultError when rows are faulty (pass `raise_on_fault=False` for the other rows' tokens);
        ReplayError when the runtime was built without a sampler, or the device did not report the step; ConfigError for
        an argument that is no bool.
        """
        raise_on_fault = check_bool("raise_on_fault", raise_on_fault, advice="pass a bool")
        if not self._sampled:
            raise ReplayError("tokens: expected a runtime with a sampler, got sampler=None; read logits() instead")
        tokens: npt.NDArray[np.int32] = self._arrived(raise_on_fault)[0]
        return tokens

    def logprobs(self) -> list[TokenLogprob | None]:
        """Log-probabilities of each row, [num_reqs]; None for rows that asked for none, or have no token.

        Waits for this step alone, as `tokens`. Raises: ReplayError when the device did not report the step.
        """
        self._arrived(raise_on_fault=False)
        return self._logprobs.rows(0) if self._logprobs is not None else [None] * self.num_reqs

    def logits(self, *, copy: bool = False) -> torch.Tensor:
        """Logits [num_reqs, vocab] on the device, ordered after the step on the current stream.

        They lie in the graphs' shared memory and live until the next step is submitted: use them before, or take a
        copy. Those of a mixed step in two parts are a copy, since the step has its rows in another order. Call it
        before the next step is submitted, from the thread that submits steps.

        Raises: ReplayError when a later step was submitted already or another thread submits one, CaptureError after
        `close()`, ConfigError for an argument that is no bool.
        """
        copy = check_bool("copy", copy, advice="pass a bool")
        return self._owner.latest_logits(self, copy)
