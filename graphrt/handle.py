"""The result of one step: a handle whose `tokens()` waits for that step alone."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from graphrt.capture.buffers import StaticBuffers
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.staging import StagingSlot
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.types import FaultCode

_FAULT_TEXT = {
    FaultCode.ROW_ID_OUT_OF_RANGE: "row_id {value} is not one of the row states 0 to max_num_reqs - 1",
    FaultCode.BAD_LENGTH: "seq_len {value} is shorter than its query_len, or longer than max_seq_len",
    FaultCode.LENGTH_EXCEEDS_PAGES: "seq_len {value} does not fit in the pages listed for it",
    FaultCode.PAGE_OUT_OF_RANGE: "page {value} is the null page or outside the cache",
    FaultCode.TOKEN_OUT_OF_RANGE: "token {value} is outside the vocabulary, or its row has no last token",
    FaultCode.DUPLICATE_ROW: "row_id {value} is used by another row of the batch too",
    FaultCode.DUPLICATE_SLOT: "KV slot {value} is written by another row of the batch too",
}


class StepFaultError(ReplayError):
    """A row of a step was invalid, found on the device. The row wrote nothing and its token is -1.

    step, row, code, value   the first invalid row, what is wrong with it, and the offending number
    """

    def __init__(self, step: int, row: int, code: FaultCode, value: int) -> None:
        what = _FAULT_TEXT[code].format(value=value)
        super().__init__(f"step {step}, row {row}: {code.name}: {what}; the row wrote nothing, mend it and go on")
        self.step, self.row, self.code, self.value = step, row, code, value


class LogitsOwner(Protocol):
    """Who knows where the logits of the latest step are."""

    def latest_logits(self, step: int) -> torch.Tensor: ...


class StepHandle:
    """One submitted step.

    descriptor   the size it ran at
    why_eager    empty when it replayed a graph, else the reason why not
    """

    __slots__ = (
        "_buffers", "_fault", "_owner", "_samples", "_slot", "_tokens", "descriptor", "num_reqs", "step", "why_eager",
    )  # fmt: skip

    def __init__(
        self,
        step: int,
        num_reqs: int,
        descriptor: BatchDescriptor,
        why_eager: str,
        slot: StagingSlot,
        buffers: StaticBuffers,
        owner: LogitsOwner,
        samples: bool,
    ) -> None:
        self.step = step
        self.num_reqs = num_reqs
        self.descriptor = descriptor
        self.why_eager = why_eager
        self._slot: StagingSlot | None = slot
        self._buffers: StaticBuffers | None = buffers
        self._owner = owner
        self._samples = samples
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._fault: ReplayError | None = None

    def collect(self) -> None:
        """Copy the results out of the ring. Called once, when the step has ended, before its ring entry is reused."""
        assert self._buffers is not None, "collect runs once"
        entry = self.step % self._buffers.token_ring.shape[0]
        self._tokens = self._buffers.token_ring[entry, : self.num_reqs].numpy().copy()
        step, row, code, value = self._buffers.fault_ring[entry].tolist()
        if step != self.step:
            self._fault = ReplayError(
                f"step {self.step}: expected the device to report this step, got step {step}; the launch failed or "
                "another writer used the buffers: close this runtime"
            )
        elif row >= 0:
            self._fault = StepFaultError(step, row, FaultCode(code), value)
        self._slot = self._buffers = None

    def done(self) -> bool:
        """Whether the step has ended, without waiting."""
        return self._slot is None or self._slot.is_done()

    def wait(self) -> None:
        """Wait for this step alone; later steps go on."""
        if self._slot is not None:
            self._slot.wait()

    @property
    def fault(self) -> ReplayError | None:
        """What `tokens()` raises, a StepFaultError for the first invalid row, or None. Waits for the step."""
        self.wait()
        return self._fault

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Sampled token of each row, [num_reqs] int32 on the host; -1 where the row samples nothing or is invalid.

        Waits for this step alone, and can be called at any time, also after later steps.

        Raises: StepFaultError when a row was invalid (pass `raise_on_fault=False` for the other rows' tokens);
        ReplayError when the runtime was built without a sampler.
        """
        if not self._samples:
            raise ReplayError("tokens: expected a runtime with a sampler, got sampler=None; read logits() instead")
        self.wait()
        if self._fault is not None and raise_on_fault:
            raise self._fault
        return self._tokens

    def logits(self, *, copy: bool = False) -> torch.Tensor:
        """Logits [num_reqs, vocab] on the device, ordered after the step on the current stream.

        They lie in the graphs' shared memory and live until the next step is submitted: use them before, or take a
        copy. Raises: ReplayError when a later step was submitted already.
        """
        logits = self._owner.latest_logits(self.step)[: self.num_reqs]
        return logits.clone() if copy else logits
