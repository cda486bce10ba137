"""The result of one launch of a session: up to N steps, whose tokens can be read while the launch is running."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from graphrt.engine.handle import InFlight
from graphrt.engine.logprobs import StepLogprobs
from graphrt.kernels.metadata.step_inputs import HEADER_STOP

_POLL_SECONDS = 50e-6
"""Pause between two polls. A step takes a millisecond or more, and other threads can run during the pause."""


class Launch(InFlight):
    """One submitted launch of a session, of up to `steps` steps, or of a bundle."""

    __slots__ = ()

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Return the sampled tokens, [steps that ran, num_reqs] int32 on the host, read-only; -1 where a request got
        none.

        Waits for the launch.

        Raises: StepFaultError: if requests are faulty and `raise_on_fault` is True. ReplayError: if the device did not
        report the launch.
        """
        return self._arrived(raise_on_fault)

    def stop(self) -> None:
        """End the launch early, after the step that is running, or after its first step.

        Its requests continue with the next launch. Steps already queued run as padding. Any thread and any signal
        handler may call it. A launch that has finished is not changed.
        """
        slot = self._slot
        if slot is not None:
            inputs = slot.inputs
            if self._slot is slot:  # no call instruction up to the write, so no other launch can get the slot
                inputs[HEADER_STOP] = 1

    def arrived(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return tokens and FinishReasons of the steps that have arrived, [steps, num_reqs] int32 each, without
        waiting."""
        rings = self._rings
        if rings is None:
            return self._tokens, self._ends
        at, n = rings.entries(self.step, self.num_arrived), self.num_reqs
        tokens, ends = rings.tokens[at, :n].copy(), rings.ends[at, :n].copy()
        # Another thread may have collected the launch since. Then a later launch may have written its ring entries.
        return (tokens, ends) if self._rings is rings else (self._tokens, self._ends)

    def ends(self) -> npt.NDArray[np.int32]:
        """Return the FinishReason of each request after each step, [steps that ran, num_reqs] int32, read-only.

        Waits for the launch.
        """
        self.wait()
        return self._ends

    def logprobs(self) -> StepLogprobs | None:
        """Return log-probabilities of each request after each step, or None if no request asked for any.

        `launch.logprobs().at(step, column)` is a TokenLogprob, or None for a request that asked for none or got no
        token. Waits for the launch.
        """
        self.wait()
        return self._logprobs

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        """Iterate over the tokens of the steps, [num_reqs] int32 each, as they arrive."""
        for index in range(self.steps):
            while self.num_arrived <= index and not self.done():
                time.sleep(_POLL_SECONDS)
            if self.num_arrived <= index:
                return
            rings = self._rings
            if rings is not None:
                tokens = rings.tokens[(self.step + index) % rings.depth, : self.num_reqs].copy()
            yield self._tokens[index] if self._rings is None else tokens  # may have been collected, as in `arrived`
