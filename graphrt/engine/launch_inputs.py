"""The input words of one launch, by name. kernels/metadata/step_inputs.py defines the layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.batch import Batch, Int32Array
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout


@dataclass(frozen=True, slots=True)
class LaunchInputs:
    """The input words of one launch, copied from its input slot. Raises: ShapeError: if the words are not valid."""

    words: Int32Array
    groups: int

    def __post_init__(self) -> None:
        counts = self.words[: layout.HEADER_SIZE]
        if len(counts) < layout.HEADER_SIZE or counts[layout.HEADER_NUM_REQS : layout.HEADER_KIND].min() < 0:
            raise ShapeError(f"words: expected a header with counts >= 0, got {counts.tolist()}; record the step again")
        if self.steps < 1 or len(self.words) < self.end:
            raise ShapeError(f"words: expected {self.end} words of a launch, got {len(self.words)}; record it again")
        object.__setattr__(self, "words", self.words[: self.end].copy())

    @property
    def num_reqs(self) -> int:
        return int(self.words[layout.HEADER_NUM_REQS])

    @property
    def num_tokens(self) -> int:
        return int(self.words[layout.HEADER_NUM_TOKENS])

    @property
    def steps(self) -> int:
        return int(self.words[layout.HEADER_STEPS])

    @property
    def kind(self) -> int:
        return int(self.words[layout.HEADER_KIND])

    @property
    def is_delta(self) -> bool:
        return bool(self.kind & layout.DELTA)

    @property
    def _lists_at(self) -> int:
        """First word of the page lists."""
        if self.is_delta:
            return layout.HEADER_SIZE + (self.num_reqs if self.kind & layout.NEW_ORDER else 0)
        return layout.HEADER_SIZE + layout.REQ_PAGES * self.num_reqs

    @property
    def _pages_at(self) -> int:
        at = self._lists_at
        if not self.is_delta:
            return at + layout.list_fields(max(self.groups, 1)) * self.num_reqs + self.num_tokens
        return at + (layout.list_fields(self.groups) * self.num_reqs if self.kind & layout.LISTS else 0)

    @property
    def inputs_end(self) -> int:
        """Number of words of the step's inputs. With the flag KEEP, stop conditions follow them."""
        return self._pages_at + int(self.words[layout.HEADER_NUM_PAGES])

    @property
    def end(self) -> int:
        return self.inputs_end + (layout.STOP_FIELDS * self.num_reqs if self.kind & layout.KEEP else 0)

    def with_steps(self, steps: int) -> LaunchInputs:
        copied = LaunchInputs(self.words, self.groups)
        copied.words[layout.HEADER_STEPS] = steps
        return copied

    @property
    def lists(self) -> npt.NDArray[np.int32]:
        """The page list of each KV group and request, [groups, PAGE_FIELDS, num_reqs]; zeros if no page is listed."""
        if self.is_delta and not self.kind & layout.LISTS:
            return np.zeros((self.groups, layout.PAGE_FIELDS, self.num_reqs), np.int32)
        count = layout.list_fields(self.groups) * self.num_reqs
        return self.words[self._lists_at : self._lists_at + count].reshape(self.groups, layout.PAGE_FIELDS, -1)

    @property
    def pages(self) -> Int32Array:
        return self.words[self._pages_at : self._pages_at + int(self.words[layout.HEADER_NUM_PAGES])]

    @property
    def order(self) -> Int32Array | None:
        """The request index at each position of the batch; None if a delta keeps the order."""
        if self.is_delta and not self.kind & layout.NEW_ORDER:
            return None
        return self.words[layout.HEADER_SIZE : layout.HEADER_SIZE + self.num_reqs]  # the first field

    def rows(self, field: int) -> Int32Array:
        """Return a field of the requests of a full entry, [num_reqs]; see REQ_*."""
        assert not self.is_delta, "a delta has no request fields"
        at = layout.HEADER_SIZE + field * self.num_reqs
        return self.words[at : at + self.num_reqs]

    def listed(self) -> list[tuple[int, int, int, Int32Array]]:
        """Return KV group, position in the batch, first page and page ids (a view) of every list that is not empty."""
        found = []
        pages = self.pages
        for group, (firsts, starts, counts) in enumerate(self.lists):
            for row in counts.nonzero()[0].tolist():
                start, count = int(starts[row]), int(counts[row])
                if start < 0 or count < 0 or start + count > len(pages):
                    raise ShapeError(
                        f"words: expected lists within {len(pages)} pages, got {count} pages from index {start}; "
                        "record it again"
                    )
                found.append((group, row, int(firsts[row]), pages[start : start + count]))
        return found

    def write(self, out: Int32Array, step: int) -> None:
        """Write the words into an input slot, for steps numbered from `step`, each as a separate launch."""
        out[: len(self.words)] = self.words
        kind = self.kind & ~layout.LOOPS
        listed = int(self.words[layout.HEADER_NUM_PAGES])
        layout.write_header(out, step, self.num_reqs, self.num_tokens, listed, kind, self.steps)

    def batch(self) -> Batch:
        """Return the request indices, lengths and pages of a full entry, for a backend that plans on the host."""
        lists, pages = self.lists, {}
        if len(self.pages):
            indptr = np.concatenate((lists[:, layout.PAGE_START].reshape(-1), [len(self.pages)]))
            firsts = lists[:, layout.PAGE_FIRST].reshape(-1)
            pages = {"page_indptr": indptr, "page_ids": self.pages, "first_pages": firsts}
        return Batch(
            req_indices=self.rows(layout.REQ_INDEX),
            seq_lens=self.rows(layout.REQ_SEQ_LEN),
            query_lens=self.rows(layout.REQ_QUERY_LEN),
            **pages,
        )
