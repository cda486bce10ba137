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
        counts = self.words[: layout.HEADER_SIZE].tolist()
        if len(counts) < layout.HEADER_SIZE or min(counts[layout.HEADER_NUM_REQS : layout.HEADER_KIND]) < 0:
            raise ShapeError(f"words: expected a header with counts >= 0, got {counts}; record the step again")
        end = self._sections[-1]
        if counts[layout.HEADER_STEPS] < 1 or len(self.words) < end:
            raise ShapeError(f"words: expected {end} words of a launch, got {len(self.words)}; record it again")
        object.__setattr__(self, "words", self.words[:end].copy())

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
    def _sections(self) -> tuple[int, int, int, int]:
        """First words of page lists, page ids and stop conditions, and the number of words."""
        _, _, reqs, tokens, num_pages, kind, *_ = self.words[: layout.HEADER_SIZE].tolist()
        if kind & layout.DELTA:
            lists = layout.HEADER_SIZE + (reqs if kind & layout.NEW_ORDER else 0)
            pages = lists + (layout.list_fields(self.groups) * reqs if kind & layout.LISTS else 0)
        else:
            lists = layout.HEADER_SIZE + layout.REQ_PAGES * reqs
            pages = lists + layout.list_fields(max(self.groups, 1)) * reqs + tokens
        stops = pages + num_pages
        return lists, pages, stops, stops + (layout.STOP_FIELDS * reqs if kind & layout.KEEP else 0)

    @property
    def inputs_end(self) -> int:
        """Number of words of the step's inputs. With the flag KEEP, stop conditions follow them."""
        return self._sections[2]

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
        at = self._sections[0]
        return self.words[at : at + count].reshape(self.groups, layout.PAGE_FIELDS, -1)

    @property
    def pages(self) -> Int32Array:
        _, start, end, _ = self._sections
        return self.words[start:end]

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
