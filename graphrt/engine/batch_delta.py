"""The input of a session's launch: the order of the requests that continue, and new pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.batch import Int32Array
from graphrt.kernels.metadata import step_inputs as layout


@dataclass(eq=False, slots=True)
class ChangeFlag:
    """Marks an incomplete change of a session. `with flag:` sets `changing` during a change.

    If an exception interrupts the change, the flag stays set, and the session accepts only `collect` and `close`.
    LaunchQueue sets the flag before it queues steps, and resets it if they did not run. If they ran, the session resets
    the flag after it has recorded the launch.
    """

    changing: bool = False

    def __enter__(self) -> None:
        self.changing = True

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.changing = False


@dataclass(frozen=True, slots=True)
class BatchDelta:
    """Requests that continue by one token per step, each from its last token.

    order     [num_reqs] request indices. Sent only if it is not the same array object as in the previous delta
    lists     [3 x groups, num_reqs] int32, the new pages of each KV group: position of the first page in the sequence,
              start of the list in `pages`, number of pages. None: no request gets new pages
    pages     [listed] int32; None if `lists` is None
    logprobs  True if a request needs log-probabilities
    """

    order: npt.NDArray[np.int64]
    lists: npt.NDArray[np.int32] | None = None
    pages: Int32Array | None = None
    logprobs: bool = False
    flag: ChangeFlag | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.order)

    def write(self, out: Int32Array, step: int, steps: int, loops: bool, new_order: bool) -> None:
        """Pack the delta into an input slot; see kernels/metadata/step_inputs.py."""
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
    """When each request of a batch finishes.

    lengths  [num_reqs] int32, KV length at which the request finishes; 0: never
    tokens   [STOP_TOKENS, num_reqs] int32, tokens that finish the request, padded with -1
    """

    lengths: Int32Array
    tokens: npt.NDArray[np.int32]
    flag: ChangeFlag | None = None

    def write(self, out: Int32Array, at: int) -> None:
        """Append the conditions to a full batch that ends at word `at`. The device keeps them for later deltas."""
        out[layout.HEADER_KIND] = layout.KEEP
        ends = out[at : at + layout.STOP_FIELDS * len(self.lengths)].reshape(layout.STOP_FIELDS, -1)
        ends[layout.STOP_LENGTH] = self.lengths
        ends[layout.FIRST_STOP_TOKEN :] = self.tokens
