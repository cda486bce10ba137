"""The refresh in NumPy, on CPU tensors: what the kernels of refresh.py do, row by row.

It keeps no claims: a batch is in front of it as a whole, so duplicates are found by looking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphrt.kernels.metadata import record as layout
from graphrt.kernels.metadata.buffers import COPIED, COPIED_PADS
from graphrt.kernels.types import PAD_SLOT_ID, TOKEN_FROM_ROW, FaultCode, RowStatus

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Record:
    """A step record cut to what a graph has room for. Tokens of row r are `starts[r] : starts[r + 1]`."""

    step: int
    num_reqs: int
    num_tokens: int
    rows: Int32Array  # [ROW_FIELDS, listed rows]
    starts: Int64Array  # [num_reqs + 1]
    tokens: Int32Array
    pages: Int32Array

    @classmethod
    def parse(cls, words: Int32Array, padded_reqs: int, padded_tokens: int, query_len: int) -> _Record:
        header = [int(word) for word in words[: layout.HEADER_SIZE]]
        step = header[layout.HEADER_STEP_HIGH] << 32 | header[layout.HEADER_STEP_LOW] & 0xFFFFFFFF
        sizes = header[layout.HEADER_NUM_REQS], header[layout.HEADER_NUM_TOKENS], header[layout.HEADER_NUM_PAGES]
        if min(sizes) < 0 or layout.record_size(*sizes) > len(words):
            sizes = (0, 0, 0)
        listed_reqs, listed_tokens, listed_pages = sizes
        tokens_at = layout.HEADER_SIZE + layout.ROW_FIELDS * listed_reqs
        pages_at = tokens_at + listed_tokens
        rows = words[layout.HEADER_SIZE : tokens_at].reshape(layout.ROW_FIELDS, listed_reqs)
        num_reqs = min(listed_reqs, padded_reqs)
        num_tokens = min(listed_tokens, padded_tokens)
        if listed_reqs > num_reqs:
            num_tokens = min(max(int(rows[layout.ROW_QUERY_START, num_reqs]), 0), num_tokens)
        if query_len:
            num_tokens = min(num_tokens, num_reqs * query_len)
            starts = np.arange(num_reqs + 1, dtype=np.int64) * query_len
        else:
            starts = np.zeros(num_reqs + 1, np.int64)
            starts[1:-1] = rows[layout.ROW_QUERY_START, 1:num_reqs].clip(0, num_tokens)
            starts[-1] = num_tokens if num_reqs else 0
        return cls(
            step,
            num_reqs,
            num_tokens if num_reqs else 0,
            rows,
            starts,
            words[tokens_at:pages_at],
            words[pages_at : pages_at + listed_pages],
        )

    def field(self, field: int, row: int) -> int:
        return int(self.rows[field, row])

    def row_tokens(self, row: int) -> Int32Array:
        return self.tokens[self.starts[row] : self.starts[row + 1]]

    def row_pages(self, row: int) -> Int32Array:
        start, count = self.field(layout.ROW_PAGE_START, row), self.field(layout.ROW_PAGE_COUNT, row)
        return self.pages[start : start + count] if start >= 0 and count > 0 else self.pages[:0]


@dataclass(frozen=True, slots=True)
class _Limits:
    page_size: int
    num_pages: int
    null_page: int
    max_seq_len: int
    max_pages: int
    vocab_size: int
    query_len: int


def refresh_reference(b: Any) -> None:
    """Reference of `graphrt::refresh`; see `refresh` for the arguments, which `b` has as attributes."""
    input_ids, block_table, row_ids = b.input_ids, b.block_table, b.row_ids
    limits = _Limits(
        b.page_size, b.num_pages, b.null_page, b.max_seq_len, block_table.shape[1], b.vocab_size, b.query_len
    )
    step = _Record.parse(b.record.numpy(), len(row_ids), len(input_ids), b.query_len)
    last, starts = b.last_token.numpy(), b.query_start_loc.numpy()

    # Pads first, everywhere; valid rows are then written over them.
    copied = [(i, getattr(b, name), pad) for i, (name, pad) in enumerate(zip(COPIED, COPIED_PADS, strict=True))]
    for tensor, pad in (
        (input_ids, 0), (b.positions, 0), (b.slot_mapping, PAD_SLOT_ID), (b.seq_lens, b.seq_len_fill),
        (block_table, b.null_page), (b.logits_indices, 0), (row_ids, -1), (b.row_status, RowStatus.PAD),
        (b.void_ids, -1), (b.fault_code, FaultCode.NONE), (b.fault_value, 0),
        *((tensor, pad) for _, tensor, pad in copied),
    ):  # fmt: skip
        tensor.fill_(int(pad))
    starts[step.num_reqs :] = step.starts[-1]
    starts[: step.num_reqs + 1] = step.starts
    b.step_counter.fill_(step.step)

    faults = [_check_row(step, row, last, limits) for row in range(step.num_reqs)]
    slots = {row: _slots(step, row, b.page_size) for row, fault in enumerate(faults) if not fault[0]}
    for row, fault in _duplicates(step, slots).items():
        faults[row] = fault
    if faults:
        b.fault_code.numpy()[: step.num_reqs], b.fault_value.numpy()[: step.num_reqs] = zip(*faults, strict=True)

    for row, (code, _) in enumerate(faults):
        row_id = step.field(layout.ROW_ID, row)
        begins = step.field(layout.ROW_SEQ_LEN, row) == step.field(layout.ROW_QUERY_LEN, row)
        if code and begins and 0 <= row_id < len(last):
            b.void_ids[row] = row_id

    invalid = [row for row, fault in enumerate(faults) if fault[0]]
    valid = np.array([row for row, fault in enumerate(faults) if not fault[0]], np.int64)
    rows = step.rows[:, valid]
    b.row_status.numpy()[invalid] = RowStatus.INVALID
    b.row_status.numpy()[valid] = np.where(rows[layout.ROW_SAMPLE] != 0, RowStatus.SAMPLES, RowStatus.LIVE)
    b.seq_lens.numpy()[valid] = rows[layout.ROW_SEQ_LEN]
    row_ids.numpy()[valid] = rows[layout.ROW_ID]
    b.logits_indices.numpy()[valid] = step.starts[valid + 1] - 1
    for i, tensor, _ in copied:
        words = rows[layout.ROW_COPIED + i]
        as_declared = {torch.float32: words.view(np.float32), torch.int64: words.view(np.uint32)}
        tensor.numpy()[valid] = as_declared.get(tensor.dtype, words)
    ids, places, written, table = (t.numpy() for t in (input_ids, b.positions, b.slot_mapping, block_table))
    for row in valid.tolist():
        span = slice(int(step.starts[row]), int(step.starts[row + 1]))
        tokens, pages = step.row_tokens(row), step.row_pages(row)[: limits.max_pages]
        ids[span] = np.where(tokens == TOKEN_FROM_ROW, last[step.field(layout.ROW_ID, row)], tokens)
        places[span] = step.field(layout.ROW_SEQ_LEN, row) - len(tokens) + np.arange(len(tokens))
        written[span] = slots[row]
        table[row, : len(pages)] = pages


def _check_row(step: _Record, row: int, last: Any, limits: _Limits) -> tuple[int, int]:
    """The first fault that the row shows by itself, and the offending number."""
    row_id, seq_len = step.field(layout.ROW_ID, row), step.field(layout.ROW_SEQ_LEN, row)
    start, query_len = step.field(layout.ROW_QUERY_START, row), step.field(layout.ROW_QUERY_LEN, row)
    if not 0 <= row_id < len(last):
        return int(FaultCode.ROW_ID_OUT_OF_RANGE), row_id
    in_place = start == step.starts[row] and start + query_len == step.starts[row + 1] <= step.num_tokens
    if not (in_place and 1 <= query_len <= seq_len <= limits.max_seq_len):
        return int(FaultCode.BAD_LENGTH), seq_len
    pages = step.row_pages(row)
    if seq_len > min(len(pages), limits.max_pages) * limits.page_size:
        return int(FaultCode.LENGTH_EXCEEDS_PAGES), seq_len
    bad = (pages < 0) | (pages >= limits.num_pages) | (pages == limits.null_page)
    if bad.any():
        return int(FaultCode.PAGE_OUT_OF_RANGE), int(pages[bad.argmax()])
    tokens = step.row_tokens(row).copy()
    if tokens[0] == TOKEN_FROM_ROW:
        # A sequence that begins with this step has sampled nothing: what stands there is another's.
        if seq_len == query_len or last[row_id] < 0:
            return int(FaultCode.NO_LAST_TOKEN), row_id
        tokens[0] = last[row_id]
    bad = (tokens < 0) | (tokens >= limits.vocab_size)
    if bad.any():
        return int(FaultCode.TOKEN_OUT_OF_RANGE), int(tokens[bad.argmax()])
    return int(FaultCode.NONE), 0


def _slots(step: _Record, row: int, page_size: int) -> Int64Array:
    """The flat slots that the row writes, in token order."""
    seq_len = step.field(layout.ROW_SEQ_LEN, row)
    positions = np.arange(seq_len - step.field(layout.ROW_QUERY_LEN, row), seq_len)
    pages = step.row_pages(row).astype(np.int64)
    return pages[positions // page_size] * page_size + positions % page_size


def _duplicates(step: _Record, slots: dict[int, Int64Array]) -> dict[int, tuple[int, int]]:
    """Faults of the rows in `slots` that share a row id, or write a slot that is written elsewhere too."""
    faults: dict[int, tuple[int, int]] = {}
    if not slots:
        return faults
    shared_slots = _repeated(np.concatenate(list(slots.values())))
    shared_ids = set(_repeated(step.rows[layout.ROW_ID, list(slots)]).tolist())
    for row, own in slots.items():
        if len(shared_slots) and (hit := np.isin(own, shared_slots)).any():
            faults[row] = (int(FaultCode.DUPLICATE_SLOT), int(own[hit.argmax()]))
        if step.field(layout.ROW_ID, row) in shared_ids:
            faults[row] = (int(FaultCode.DUPLICATE_ROW), step.field(layout.ROW_ID, row))
    return faults


def _repeated(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    distinct, counts = np.unique(values, return_counts=True)
    repeated: npt.NDArray[Any] = distinct[counts > 1]
    return repeated
