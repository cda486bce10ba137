"""The result of one launch of a session: up to N steps, whose tokens can be read while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from graphrt.engine.handle import InFlight
from graphrt.engine.logprobs import StepLogprobs
from graphrt.kernels.metadata.step_inputs import HEADER_STOP

_POLL_SECONDS = 50e-6
"""A step takes a millisecond or more. Who waits for one leaves the interpreter to other threads meanwhile."""


class Launch(InFlight):
    """One submitted launch of a session, of up to `steps` steps, or of a bundle."""

    __slots__ = ()

    def tokens(self, *, raise_on_fault: bool = True) -> npt.NDArray[np.int32]:
        """Sampled tokens, [steps that ran, num_reqs] int32 on the host, read-only; -1 where a row got none.

        Waits for the launch. Raises: StepFaultError when rows are faulty, unless `raise_on_fault` is False;
        ReplayError when the device did not report the launch.
        """
        return self._arrived(raise_on_fault)

    def stop(self) -> None:
        """End it early, after the step that is under way, or after its first one. Rows go on with the next launch.

        Steps that are launched already run without rows. Any thread may call it; a launch that has ended stays as is.
        """
        slot = self._slot
        if slot is not None:
            slot.amend(HEADER_STOP, 1, lambda: self._slot is slot)

    def arrived(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Tokens and StopConditions of the steps that have arrived, [steps, num_reqs] int32 each, without waiting."""
        rings = self._rings
        if rings is None:
            return self._tokens, self._ends
        at, n = rings.entries(self.step, self.num_arrived), self.num_reqs
        tokens, ends = rings.tokens[at, :n].copy(), rings.ends[at, :n].copy()
        # Another thread may have collected it meanwhile, and its entries be a later launch's.
        return (tokens, ends) if self._rings is rings else (self._tokens, self._ends)

    def ends(self) -> npt.NDArray[np.int32]:
        """FinishReason of each row after each step, [steps that ran, num_reqs] int32, read-only. Waits for the
        launch."""
        self.wait()
        return self._ends

    def logprobs(self) -> StepLogprobs | None:
        """Log-probabilities of each row after each step: `launch.logprobs().at(step, column)`, a TokenLogprob, or None
        for a row that asked for none or did not go on. None where no row asked for any. Waits for the launch."""
        self.wait()
        return self._logprobs

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        """The tokens of one step after the other, [num_reqs] int32, each as soon as it has arrived."""
        for index in range(self.steps):
            while self.num_arrived <= index and not self.done():
                time.sleep(_POLL_SECONDS)
            if self.num_arrived <= index:
                return
            rings = self._rings
            if rings is not None:
                tokens = rings.tokens[(self.step + index) % rings.depth, : self.num_reqs].copy()
            yield self._tokens[index] if self._rings is None else tokens  # collected meanwhile, as in `arrived`
