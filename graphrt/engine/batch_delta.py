"""What a session tells the device: which rows go on, and which pages some of them get."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.batch import Int32Array
from graphrt.kernels.metadata import step_inputs as layout


@dataclass(frozen=True, slots=True)
class BatchDelta:
    """Rows that go on by one token a step, each from its last token on.

    order      [num_reqs] row id of each place. It is sent where the device has another one: who keeps it makes a new
               array where it changes
    lists      [3 x groups, num_reqs] int32, the pages that rows get: per KV group the place of the first one in the
               sequence, where its list begins in `pages`, and how many there are; None: no row gets any
    pages      [listed] int32, None with no lists
    logprobs   whether any row asks for log-probabilities
    """

    order: npt.NDArray[np.int64]
    lists: npt.NDArray[np.int32] | None = None
    pages: Int32Array | None = None
    logprobs: bool = False

    @property
    def num_reqs(self) -> int:
        return len(self.order)

    def write(self, out: Int32Array, step: int, steps: int, loops: bool, new_order: bool) -> None:
        """Pack into a slot of the input_ring; see kernels/metadata/step_inputs.py."""
        kind = layout.DELTA | (layout.LOOPS if loops else 0)
        at, n, listed = layout.HEADER_SIZE, len(self.order), 0
        if new_order:
            kind |= layout.NEW_ORDER
            out[at : at + n] = self.order
            at += n
        if self.lists is not None and self.pages is not None:
            kind |= layout.LISTS
            listed = len(self.pages)
            out[at : at + self.lists.size] = self.lists.reshape(-1)
            at += self.lists.size
            out[at : at + listed] = self.pages
        layout.write_header(out, step, n, 0, listed, kind, steps)


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When each row of a batch ends by itself: `lengths` [rows] int32, KV tokens with which it does, 0: never; `tokens`
    [STOP_TOKENS, rows] int32, tokens that end it, -1 where there are fewer."""

    lengths: Int32Array
    tokens: npt.NDArray[np.int32]

    def write(self, out: Int32Array, at: int) -> None:
        """Add to a batch that was written in full, up to word `at`: what it says is kept for delta to come."""
        out[layout.HEADER_KIND] = layout.KEEP
        ends = out[at : at + layout.STOP_FIELDS * len(self.lengths)].reshape(layout.STOP_FIELDS, -1)
        ends[layout.STOP_LENGTH] = self.lengths
        ends[layout.FIRST_STOP_TOKEN :] = self.tokens
