"""The result of one launch of a session: up to N steps, whose tokens can be read while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.staging import StagingSlot
from graphrt.handle import InFlight, RowFault, StepFaultError, row_faults
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.metadata.buffers import StaticBuffers

_POLL_SECONDS = 50e-6
"""A step takes a millisecond or more. Who waits for one leaves the interpreter to other threads meanwhile."""


class Launch(InFlight):
    """One submitted launch of a session.

    step         number of its first step
    steps        steps at most. A launch that loops ends early where no row goes on; others run all, without rows
    num_reqs     rows
    descriptor   the size it ran at
    why_eager    empty when it replayed a graph, else the reason why not
    """

    __slots__ = (
        "_buffers", "_codes", "_ends", "_tokens", "_values", "descriptor", "num_reqs", "step", "steps", "why_eager",
    )  # fmt: skip

    def __init__(
        self,
        step: int,
        steps: int,
        num_reqs: int,
        descriptor: BatchDescriptor,
        why_eager: str,
        slot: StagingSlot,
        buffers: StaticBuffers,
    ) -> None:
        super().__init__(slot)
        self.step, self.steps, self.num_reqs = step, steps, num_reqs
        self.descriptor, self.why_eager = descriptor, why_eager
        self._buffers: StaticBuffers | None = buffers
        self._tokens = self._ends = self._codes = np.empty((0, num_reqs), np.int32)
        self._values = np.empty((0, num_reqs), np.int64)
        slot.on_done = self._collect

    def _entries(self) -> npt.NDArray[np.int64]:
        assert self._buffers is not None, "results are collected once"
        return np.arange(self.step, self.step + self.steps) % self._buffers.step_ring.shape[0]

    def _collect(self) -> None:
        """Copy the results out of the rings: once, when the launch has ended, before its entries are used again."""
        rings, n = self._buffers, self.num_reqs
        assert rings is not None, "results are collected once"
        at = self._entries()[: self.num_arrived]
        self._tokens = rings.token_ring.numpy()[at, :n]
        self._ends = rings.end_ring.numpy()[at, :n]
        self._codes = rings.fault_code_ring.numpy()[at, :n]
        if self._codes.any():
            self._values = rings.fault_value_ring.numpy()[at, :n]
            self._error = StepFaultError(self.step + int(self._codes.any(1).argmax()), self._faults())
        if not len(at):
            self._error = ReplayError(
                f"step {self.step}: expected the device to report this step, got none; the launch failed or another "
                "writer used the buffers: close this runtime"
            )
        self._slot = self._buffers = None

    def _faults(self) -> tuple[RowFault, ...]:
        """Every row's first fault: it is parked from then on."""
        return tuple(
            fault
            for codes, values in zip(self._codes, self._values, strict=True)
            for fault in row_faults(codes, values)
        )

    @property
    def num_arrived(self) -> int:
        """Steps whose results have arrived, without waiting. They arrive in order, while the launch runs."""
        if self._buffers is None:
            return len(self._tokens)
        arrived = self._buffers.step_ring.numpy()[self._entries()] == np.arange(self.step, self.step + self.steps)
        return int(arrived.cumprod().sum())

    def arrived(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Tokens and RowEnds of the steps that have arrived, [steps, num_reqs] int32 each, without waiting."""
        rings = self._buffers
        if rings is None:
            return self._tokens, self._ends
        at, n = self._entries()[: self.num_arrived], self.num_reqs
        return rings.token_ring.numpy()[at, :n], rings.end_ring.numpy()[at, :n]

    @property
    def faults(self) -> tuple[RowFault, ...]:
        """All faulty rows, by their places; empty if there are none. Waits for the launch."""
        self.wait()
        return self._error.faults if isinstance(self._error, StepFaultError) else ()

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Sampled tokens, [steps that ran, num_reqs] int32 on the host; -1 where a row did not go on.

        Waits for the launch. Raises: StepFaultError when rows are faulty, unless `raise_on_fault` is False;
        ReplayError when the device did not report the launch.
        """
        self.wait()
        if self._error is not None and (raise_on_fault or not len(self._tokens)):
            raise self._error
        return self._tokens

    @property
    def ends(self) -> npt.NDArray[np.int32]:
        """RowEnd of each row after each step, [steps that ran, num_reqs] int32. Waits for the launch."""
        self.wait()
        return self._ends

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        """The tokens of one step after the other, [num_reqs] int32, each as soon as it has arrived."""
        for index in range(self.steps):
            while self.num_arrived <= index and not self.done():
                time.sleep(_POLL_SECONDS)
            if self.num_arrived <= index:
                return
            buffers = self._buffers
            if buffers is None:
                yield self._tokens[index]
            else:
                yield buffers.token_ring.numpy()[self._entries()[index], : self.num_reqs].copy()
