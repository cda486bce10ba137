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
from graphrt.kernels.checks import check_bool
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.types import FAULT_GROUP_SHIFT, FaultCode
from graphrt.logprobs import StepLogprobs, TokenLogprob

_FAULT_TEXT = {
    FaultCode.ROW_ID_OUT_OF_RANGE: "row_id {value} is not one of the row states 0 to max_num_reqs - 1",
    FaultCode.BAD_LENGTH: "seq_len {value} is shorter than its query_len, or longer than max_seq_len",
    FaultCode.LENGTH_EXCEEDS_PAGES: "a length of {value} does not fit in the pages that were listed for its row",
    FaultCode.PAGE_OUT_OF_RANGE: "page {value} is the null page or outside the cache",
    FaultCode.TOKEN_OUT_OF_RANGE: "token {value} is outside the vocabulary",
    FaultCode.DUPLICATE_ROW: "row_id {value} is used by another row of the batch too",
    FaultCode.DUPLICATE_PAGE: "page {value} is written twice: by another row too, or it is listed twice",
    FaultCode.NO_LAST_TOKEN: "row_id {value} has no last token to go on from: its sequence has sampled none",
    FaultCode.BAD_ENCODER_LEN: "encoder_len {value} is negative, longer than max_encoder_len, or 0 beside listed pages",
    FaultCode.ENCODER_LEN_CHANGED: "encoder_len {value} is not the one that its sequence has; state it in every step, "
    "or list the encoder's pages from page 0 with another one",
    FaultCode.NO_TOKEN_OFFERED: "its logits offer no token: all are NaN or -inf, or the sampler returned -1",
    FaultCode.SAMPLE_OUT_OF_RANGE: "the sampler returned {value}, which is outside the vocabulary",
}
_WROTE_NOTHING = "the row wrote nothing and can be submitted again"
_WROTE_KV = "its KV is written, its last token is void; end the sequence, or submit its next token as a literal"


@dataclass(frozen=True, slots=True)
class RowFault:
    """What is wrong with one row of a step: its place in the batch, the code, the offending number, and the KV group
    whose pages it is about; 0 for faults that are about no pages."""

    row: int
    code: FaultCode
    value: int
    group: int = 0

    def __str__(self) -> str:
        after = _WROTE_KV if self.code >= FaultCode.NO_TOKEN_OFFERED else _WROTE_NOTHING
        where = f" in KV group {self.group}" if self.group else ""
        return f"row {self.row}: {self.code.name}: {_FAULT_TEXT[self.code].format(value=self.value)}{where}; {after}"


class StepFaultError(ReplayError):
    """Rows of a step are faulty; the device found out. Their tokens are -1, and the other rows' are right.

    step              the step's number
    faults            all faulty rows, in the order of the batch
    row, code, value  of the first of them
    """

    def __init__(self, step: int, faults: Sequence[RowFault]) -> None:
        first, *others = faults
        more = f" (and {len(others)} more, in rows {', '.join(str(f.row) for f in others[:16])})" if others else ""
        super().__init__(f"step {step}, {first}{more}")
        self.step, self.faults = step, tuple(faults)
        self.row, self.code, self.value = first.row, first.code, first.value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.faults)


def row_faults(codes: npt.NDArray[np.int32], values: npt.NDArray[np.int64]) -> tuple[RowFault, ...]:
    """The faulty rows of a step, by the codes and values that `publish` gave, [rows] each."""
    faults = []
    for row in codes.nonzero()[0].tolist():
        group, code = divmod(int(codes[row]), 1 << FAULT_GROUP_SHIFT)
        faults.append(RowFault(row, FaultCode(code), int(values[row]), group))
    return tuple(faults)


@dataclass(frozen=True, slots=True)
class Submission:
    """What is known of a step when it is submitted; see StepHandle."""

    step: int
    num_reqs: int
    descriptor: BatchDescriptor
    why_eager: str
    sampled: bool
    logprobs: bool = False


class LogitsOwner(Protocol):
    """Who knows where the logits of the latest step are."""

    def latest_logits(self, submission: Submission, copy: bool) -> torch.Tensor: ...


class InFlight:
    """What was submitted in one slot of the inbox: whoever reads its results waits for it alone."""

    __slots__ = ("_error", "_slot")

    def __init__(self, slot: StagingSlot) -> None:
        self._slot: StagingSlot | None = slot
        self._error: ReplayError | None = None

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
    def error(self) -> ReplayError | None:
        """What `tokens()` raises, or None: a StepFaultError if rows are faulty. Waits."""
        self.wait()
        return self._error


class StepHandle(InFlight):
    """One submitted step.

    step         its number; every step of a manager has a larger one than the step before
    num_reqs     rows of its batch
    descriptor   the size it ran at
    why_eager    empty when it replayed a graph, else the reason why not
    """

    __slots__ = ("_buffers", "_faults", "_logprobs", "_owner", "_submission", "_tokens")

    def __init__(self, submission: Submission, slot: StagingSlot, buffers: StaticBuffers, owner: LogitsOwner) -> None:
        super().__init__(slot)
        self._submission = submission
        self._buffers: StaticBuffers | None = buffers
        self._owner = owner
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._faults: tuple[RowFault, ...] = ()
        self._logprobs: StepLogprobs | None = None
        slot.on_done = self._collect

    @property
    def step(self) -> int:
        return self._submission.step

    @property
    def num_reqs(self) -> int:
        return self._submission.num_reqs

    @property
    def descriptor(self) -> BatchDescriptor:
        return self._submission.descriptor

    @property
    def why_eager(self) -> str:
        return self._submission.why_eager

    def _collect(self) -> None:
        """Copy the results out of the rings. Called once, when the step has ended, before its entry is reused."""
        assert self._buffers is not None, "results are collected once"
        rings, step, rows = self._buffers, self.step, self.num_reqs
        entry = step % rings.step_ring.shape[0]
        self._tokens = rings.token_ring[entry, :rows].numpy().copy()
        codes = rings.fault_code_ring[entry, :rows].numpy()
        if (reported := int(rings.step_ring[entry])) != step:
            self._error = ReplayError(
                f"step {step}: expected the device to report this step, got step {reported}; the launch failed or "
                "another writer used the buffers: close this runtime"
            )
        elif codes.any():
            values = rings.fault_value_ring[entry, :rows].numpy()
            self._faults = row_faults(codes, values)
            self._error = StepFaultError(step, self._faults)
        if self._submission.logprobs:
            self._logprobs = StepLogprobs(rings, np.array([entry]), rows)
        self._slot = self._buffers = None

    @property
    def faults(self) -> tuple[RowFault, ...]:
        """All faulty rows, in the order of the batch; empty if there are none. Waits for the step.

        Raises: ReplayError when the device did not report the step at all.
        """
        self.wait()
        if self._error is not None and not self._faults:
            raise self._error
        return self._faults

    @property
    def results(self) -> npt.NDArray[np.int32]:
        """`tokens()` as they stand, whether there are faults or no sampler at all. Waits for the step."""
        self.wait()
        return self._tokens

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Sampled token of each row, [num_reqs] int32 on the host; -1 where the row samples nothing or is faulty.

        Waits for this step alone, and can be called at any time and from any thread, also after later steps.

        Raises: StepFaultError when rows are faulty (pass `raise_on_fault=False` for the other rows' tokens);
        ReplayError when the runtime was built without a sampler, or the device did not report the step; ConfigError for
        an argument that is no bool.
        """
        raise_on_fault = check_bool("raise_on_fault", raise_on_fault, advice="pass a bool")
        if not self._submission.sampled:
            raise ReplayError("tokens: expected a runtime with a sampler, got sampler=None; read logits() instead")
        self.wait()
        if self._error is not None and (raise_on_fault or not self._faults):
            raise self._error
        return self._tokens

    def logprobs(self) -> list[TokenLogprob | None]:
        """Log-probabilities of each row, [num_reqs]; None for rows that asked for none, or have no token.

        Waits for this step alone, as `tokens`. Raises: ReplayError when the device did not report the step.
        """
        self.wait()
        if self._error is not None and not self._faults:
            raise self._error
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
        return self._owner.latest_logits(self._submission, copy)
