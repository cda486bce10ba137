"""NumPy reference of the refresh, on CPU tensors, one request at a time.

It compares all requests of the batch directly, without `last_writers` and `write_conflicts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import COPIED, COPIED_PADS, PageGroup
from graphrt.kernels.types import FAULT_GROUP_SHIFT, PAD_SLOT_ID, TOKEN_FROM_DEVICE, FaultCode, RequestStatus

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NOWHERE = 1 << 30  # first column of a table without pages


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """Parsed step inputs, truncated to the size of a graph. The places of request r in the buffers, in batch order, are
    `starts[r] : starts[r + 1]`. It may have fewer tokens in a graph for drafts."""

    step: int
    num_reqs: int
    num_tokens: int
    allows_empty: bool
    rows: Int32Array  # [req_fields(groups), listed requests]
    starts: Int64Array  # [num_reqs + 1]
    tokens: Int32Array
    pages: Int32Array
    query_len: int = 0
    tables: Int32Array | None = None  # [groups, req_indices, pages_per_req], if the caller owns the page tables
    groups: Sequence[PageGroup] = ()

    @classmethod
    def parse(cls, words: Int32Array, padded_reqs: int, padded_tokens: int, query_len: int, groups: int) -> _StepInputs:
        header = [int(word) for word in words[: layout.HEADER_SIZE]]
        step = header[layout.HEADER_STEP_HIGH] << 32 | header[layout.HEADER_STEP_LOW] & 0xFFFFFFFF
        sizes = header[layout.HEADER_NUM_REQS], header[layout.HEADER_NUM_TOKENS], header[layout.HEADER_NUM_PAGES]
        if min(sizes) < 0 or layout.inputs_size(*sizes, groups) > len(words):
            sizes = (0, 0, 0)
        listed_reqs, listed_tokens, listed_pages = sizes
        req_fields = layout.req_fields(groups)
        tokens_at = layout.HEADER_SIZE + req_fields * listed_reqs
        pages_at = tokens_at + listed_tokens
        rows = words[layout.HEADER_SIZE : tokens_at].reshape(req_fields, listed_reqs)
        num_reqs = min(listed_reqs, padded_reqs)
        num_tokens = min(listed_tokens, padded_tokens)
        if listed_reqs > num_reqs:
            num_tokens = min(max(int(rows[layout.REQ_QUERY_START, num_reqs]), 0), num_tokens)
        if query_len:
            num_tokens = min(num_tokens, num_reqs * query_len)
            starts = np.arange(num_reqs + 1, dtype=np.int64) * query_len
        else:
            starts = np.zeros(num_reqs + 1, np.int64)
            starts[1:-1] = rows[layout.REQ_QUERY_START, 1:num_reqs].clip(0, num_tokens)
            starts[-1] = num_tokens if num_reqs else 0
        return cls(
            step,
            num_reqs,
            num_tokens if num_reqs else 0,
            bool(header[layout.HEADER_KIND] & (layout.DELTA | layout.KEEP)),
            rows,
            starts,
            words[tokens_at:pages_at],
            words[pages_at : pages_at + listed_pages],
            query_len,
        )

    def buffer_layout(self, padded_reqs: int, decode_len: int) -> tuple[Int64Array, Int64Array, int]:
        """Return each batch position's buffer row, each row's first token, and the number of decode requests."""
        lengths = np.diff(self.starts)
        decodes = (lengths == decode_len) if decode_len else np.zeros(self.num_reqs, np.bool_)
        order = np.concatenate((np.flatnonzero(decodes), np.flatnonzero(~decodes)))
        buffer_rows = np.arange(padded_reqs)
        buffer_rows[order] = np.arange(self.num_reqs)
        starts = np.full(padded_reqs + 1, self.starts[-1])
        starts[: self.num_reqs + 1] = np.concatenate(([0], np.cumsum(lengths[order])))
        return buffer_rows, starts, int(decodes.sum())

    def requests(self) -> list[int]:
        """Return the batch positions that hold a request."""
        empty = self.rows[layout.REQ_INDEX, : self.num_reqs] == layout.NO_REQUEST
        return [row for row in range(self.num_reqs) if not (self.allows_empty and empty[row])]

    def field(self, field: int, row: int) -> int:
        return int(self.rows[field, row])

    def row_tokens(self, row: int) -> Int32Array:
        start = self.field(layout.REQ_QUERY_START, row)
        return self.tokens[start : start + self.field(layout.REQ_QUERY_LEN, row)]

    def row_pages(self, group: int, row: int) -> tuple[int, Int32Array]:
        """Return the listed pages, preceded by the index of the first listed page in the sequence."""
        if self.tables is not None:
            return 0, self._table_row(self.tables[group], self.groups[group], row)
        at = layout.REQ_PAGES + layout.PAGE_FIELDS * group
        first, start, count = (
            self.field(at + i, row) for i in (layout.PAGE_FIRST, layout.PAGE_START, layout.PAGE_COUNT)
        )
        listed = self.pages[start : start + count] if first >= 0 and start >= 0 and count > 0 else self.pages[:0]
        return max(first, 0), listed

    def _table_row(self, table: Int32Array, group: PageGroup, row: int) -> Int32Array:
        """Return the pages of the tokens that a request holds, from the table that the caller owns."""
        held = self.field(layout.REQ_ENCODER_LEN if group.max_encoder_len else layout.REQ_SEQ_LEN, row)
        return table[self.field(layout.REQ_INDEX, row), : min(-(-held // group.page_size), group.max_pages)]


@dataclass(frozen=True, slots=True)
class _Table:
    """A request's new table of one group: columns `span[0] : span[1]` of `pages`, and its fault (code and value)."""

    span: tuple[int, int]
    pages: Int32Array
    fault: tuple[int, int]


def refresh_reference(b: Any) -> None:
    """Reference of `graphrt::refresh`; the attributes of `b` are the arguments of `refresh`."""
    input_ids, req_indices = b.input_ids, b.req_indices
    groups = [PageGroup(*words) for words in b.page_groups.tolist()]
    step = _StepInputs.parse(b.inputs.numpy(), len(req_indices), len(input_ids), b.query_len, len(groups))
    if b.tables is not None:
        step = replace(step, tables=b.tables.numpy(), groups=groups)
    last_token, last_encoder_len = b.last_token.numpy(), b.last_encoder_len.numpy()
    buffer_rows, starts, decodes = step.buffer_layout(len(req_indices), b.decode_len)
    places, positions = np.diff(step.starts), len(b.logits_indices) // len(req_indices)

    # Fill all buffers with pads, then overwrite those of valid requests.
    copied = [(i, getattr(b, name), pad) for i, (name, pad) in enumerate(zip(COPIED, COPIED_PADS, strict=True))]
    for tensor, pad in (
        (input_ids, 0), (b.positions, 0), (b.slot_mapping, PAD_SLOT_ID), (b.seq_lens, b.seq_len_fill),
        (b.logits_indices, 0), (b.sample_lens, 0), (b.drafts_left, -1),
        (req_indices, -1), (b.req_status, RequestStatus.PAD), (b.void_req_indices, -1),
        (b.new_spans, 0),
        (b.check_code, FaultCode.NONE), (b.check_value, 0), (b.fault_code, FaultCode.NONE), (b.fault_value, 0),
        (b.decode_seq_lens, b.seq_len_fill), (b.prompt_seq_lens, b.seq_len_fill),
        *((tensor, pad) for _, tensor, pad in copied),
    ):  # fmt: skip
        tensor.fill_(int(pad))
    for table, group in zip(b.block_table, groups, strict=True):
        table.fill_(group.null_page)
    b.new_spans[..., 2], b.new_spans[..., 3] = b.table_from, b.table_to
    b.table_from.fill_(_NOWHERE)
    b.table_to.fill_(0)
    prompts_from = starts[decodes] if decodes else 0
    for loc, values in (
        (b.query_start_loc, starts), (b.decode_start_loc, np.minimum(starts, prompts_from)),
        (b.prompt_start_loc, np.maximum(starts, prompts_from)), (b.buffer_rows, buffer_rows),
    ):  # fmt: skip
        loc.numpy()[:] = values
    b.step_counter.fill_(step.step)

    tables: dict[tuple[int, int], _Table] = {}
    checks: dict[tuple[int, int], tuple[int, int]] = {}
    requests = step.requests()
    for row in requests:
        fault = _check_row(step, row, last_token, b.max_seq_len, positions)
        keeps = not fault[0] and _keeps_pages(step, row, groups)
        for g, group in enumerate(groups):
            checks[g, row] = fault
            if not fault[0]:
                tables[g, row] = _table(step, g, row, group, b, keeps)
                checks[g, row] = tables[g, row].fault
        if not checks[0, row][0]:
            checks[0, row] = _check_tokens(step, row, last_token, b.vocab_size)
        for g in range(len(groups)):
            b.check_code[g, row], b.check_value[g, row] = checks[g, row]
            if not checks[g, row][0]:
                b.new_spans[g, row, 0], b.new_spans[g, row, 1] = tables[g, row].span

    shared = _find_conflicts(step, groups, tables, checks)
    faults: dict[int, tuple[int, int, int]] = {}  # by batch position: code, value, group
    for row in requests:
        own = [(*checks[g, row], g) for g in range(len(groups)) if checks[g, row][0]]
        if own or row in shared:
            faults[row] = code, value, g = own[0] if own else shared[row]
            buffer_row = int(buffer_rows[row])
            b.fault_code[buffer_row], b.fault_value[buffer_row] = code | g << FAULT_GROUP_SHIFT, value
            req_index = step.field(layout.REQ_INDEX, row)
            starts_sequence = step.field(layout.REQ_SEQ_LEN, row) == step.field(layout.REQ_QUERY_LEN, row)
            if starts_sequence and 0 <= req_index < len(last_token):
                b.void_req_indices[buffer_row] = req_index

    valid = np.array([row for row in requests if row not in faults], np.int64)
    rows, at = step.rows[:, valid], buffer_rows[valid]
    # Pass an int, because NumPy looks up __array__ on an enum member's class and discards exceptions raised there.
    b.req_status.numpy()[buffer_rows[list(faults)]] = int(RequestStatus.INVALID)
    samples, live = int(RequestStatus.SAMPLES), int(RequestStatus.LIVE)
    b.req_status.numpy()[at] = np.where(rows[layout.REQ_SAMPLE] != 0, samples, live)
    lengths = rows[layout.REQ_QUERY_LEN]
    kv_lens = rows[layout.REQ_SEQ_LEN] + places[valid] - lengths
    b.seq_lens.numpy()[at] = kv_lens
    last_encoder_len[rows[layout.REQ_INDEX]] = rows[layout.REQ_ENCODER_LEN]
    for lens, selected in ((b.decode_seq_lens, at < decodes), (b.prompt_seq_lens, at >= decodes)):
        lens.numpy()[at[selected]] = kv_lens[selected]
    req_indices.numpy()[at] = rows[layout.REQ_INDEX]
    last = starts[at] + lengths - 1
    drafts = (rows[layout.REQ_SAMPLE] - 1).clip(0, np.minimum(lengths, positions) - 1)
    for position, indices in enumerate(b.logits_indices.numpy().reshape(-1, len(req_indices))):
        indices[at] = last - drafts + np.minimum(position, drafts)
    b.sample_lens.numpy()[at] = rows[layout.REQ_SEQ_LEN] - drafts
    b.drafts_left.numpy()[at] = np.where(rows[layout.REQ_SAMPLE] != 0, drafts, -1)
    for i, tensor, _ in copied:
        words = rows[layout.REQ_COPIED + i]
        as_declared = {torch.float32: words.view(np.float32), torch.int64: words.view(np.uint32)}
        tensor.numpy()[at] = as_declared.get(tensor.dtype, words)
    ids, positions = input_ids.numpy(), b.positions.numpy()
    for row, buffer_row in zip(valid.tolist(), at.tolist(), strict=True):
        tokens, req_index = step.row_tokens(row), step.field(layout.REQ_INDEX, row)
        span = slice(int(starts[buffer_row]), int(starts[buffer_row]) + len(tokens))
        ids[span] = np.where(tokens == TOKEN_FROM_DEVICE, last_token[req_index], tokens)
        positions[span] = step.field(layout.REQ_SEQ_LEN, row) - len(tokens) + np.arange(len(tokens))
        for g, group in enumerate(groups):
            _write_table(step, g, row, buffer_row, group, tables[g, row], b)
            if group.max_encoder_len:
                continue  # steps do not write the pages of an encoder
            # Missing drafts are written too, as attention may read them with weight 0, and 0 x NaN is NaN.
            written = step.field(layout.REQ_SEQ_LEN, row) - len(tokens) + np.arange(places[row])
            written = written[written < min(tables[g, row].span[1], group.max_pages) * group.page_size]
            page = tables[g, row].pages[written // group.page_size].astype(np.int64)
            slots = page * group.page_size + written % group.page_size
            b.slot_mapping.numpy()[g, span.start : span.start + len(slots)] = slots


def _check_row(step: _StepInputs, row: int, last: Any, max_seq_len: int, positions: int) -> tuple[int, int]:
    """Return the first fault in a request's index and lengths, and its value."""
    req_index, seq_len = step.field(layout.REQ_INDEX, row), step.field(layout.REQ_SEQ_LEN, row)
    start, query_len = step.field(layout.REQ_QUERY_START, row), step.field(layout.REQ_QUERY_LEN, row)
    if not 0 <= req_index < len(last):
        return int(FaultCode.REQ_INDEX_OUT_OF_RANGE), req_index
    missing, end = step.starts[row + 1] - start - query_len, step.starts[row + 1]
    in_place = start == step.starts[row] and 0 <= missing < positions and end <= step.num_tokens
    if step.query_len > 1:
        in_place = start >= 0 and query_len <= step.query_len and start + query_len <= step.num_tokens
    if not (in_place and 1 <= query_len <= seq_len <= max_seq_len):
        return int(FaultCode.BAD_LENGTH), seq_len
    return int(FaultCode.NONE), 0


def _first_seen_page(step: _StepInputs, row: int, group: PageGroup) -> int:
    """Return the page of the first token that the request reads in this step."""
    position = step.field(layout.REQ_SEQ_LEN, row) - step.field(layout.REQ_QUERY_LEN, row)
    seen = max(0, position + 1 - group.window) if group.window else 0
    return (position - position % group.chunk if group.chunk else seen) // group.page_size


def _keeps_pages(step: _StepInputs, row: int, groups: list[PageGroup]) -> bool:
    """Return whether the tables of the request index belong to this sequence.

    They do not if the sequence starts in this step, or if it lists pages from page 0 in a self-attention group.
    """
    if step.field(layout.REQ_SEQ_LEN, row) == step.field(layout.REQ_QUERY_LEN, row):
        return False
    own = (step.row_pages(g, row) for g, group in enumerate(groups) if not group.max_encoder_len)
    return not any(first == 0 and len(listed) for first, listed in own)


def _table(step: _StepInputs, g: int, row: int, group: PageGroup, b: Any, keeps: bool) -> _Table:
    """Return the table of a request with valid index and lengths: kept pages, overwritten by listed pages."""
    first, listed = step.row_pages(g, row)
    seq_len, req_index = step.field(layout.REQ_SEQ_LEN, row), step.field(layout.REQ_INDEX, row)
    held = step.field(layout.REQ_ENCODER_LEN, row) if group.max_encoder_len else seq_len
    if group.max_encoder_len and not bool(len(listed)) <= held <= group.max_encoder_len:
        return _Table((0, 0), listed[:0], (int(FaultCode.BAD_ENCODER_LEN), held))
    relists = first == 0 and bool(len(listed))
    if group.max_encoder_len and keeps and not relists and held != int(b.last_encoder_len[req_index]):
        return _Table((0, 0), listed[:0], (int(FaultCode.ENCODER_LEN_CHANGED), held))
    known = (0, 0) if not keeps else tuple(b.page_spans[g, req_index].tolist())
    seen, needed, end = _first_seen_page(step, row, group), -(-held // group.page_size), first + len(listed)
    span, fits = known, True
    if len(listed):
        whole = first == 0 or (first <= seen and end >= needed)
        fits = whole or known[0] <= first <= known[1]
        span = (first, end) if whole else (known[0], max(known[1], end))
    pages = b.page_table[g, req_index].numpy().copy()
    pages[first:end] = listed[: max(len(pages) - first, 0)]
    fault = (int(FaultCode.NONE), 0)
    seen_list = listed[max(seen - first, 0) :]
    bad = (seen_list < 0) | (seen_list >= group.num_pages) | (seen_list == group.null_page)
    if not (fits and span[0] <= seen and needed <= min(span[1], group.max_pages)):
        fault = (int(FaultCode.LENGTH_EXCEEDS_PAGES), held)
    elif bad.any():
        fault = (int(FaultCode.PAGE_OUT_OF_RANGE), int(seen_list[bad.argmax()]))
    return _Table((seen, span[1]), pages, fault)


def _check_tokens(step: _StepInputs, row: int, last: Any, vocab_size: int) -> tuple[int, int]:
    """Return the first fault in a request's tokens, and its value."""
    req_index = step.field(layout.REQ_INDEX, row)
    starts_sequence = step.field(layout.REQ_SEQ_LEN, row) == step.field(layout.REQ_QUERY_LEN, row)
    tokens = step.row_tokens(row).copy()
    if tokens[0] == TOKEN_FROM_DEVICE:
        # A sequence that starts in this step has no last token; the stored one belongs to a previous sequence.
        if starts_sequence or last[req_index] < 0:
            return int(FaultCode.NO_LAST_TOKEN), req_index
        tokens[0] = last[req_index]
    bad = (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        return int(FaultCode.TOKEN_OUT_OF_RANGE), int(tokens[bad.argmax()])
    return int(FaultCode.NONE), 0


def _write_table(step: _StepInputs, g: int, row: int, buffer_row: int, group: PageGroup, table: _Table, b: Any) -> None:
    """Write the request's table for this step, and update its persistent table."""
    req_index, end = step.field(layout.REQ_INDEX, row), min(table.span[1], group.max_pages)
    columns = slice(table.span[0], end)
    b.block_table[g, buffer_row, columns] = torch.from_numpy(table.pages[columns])
    first, listed = step.row_pages(g, row)
    new = slice(max(first, table.span[0]), min(first + len(listed), end))
    if new.start < new.stop:
        b.page_table[g, req_index, new] = torch.from_numpy(table.pages[new])
    b.page_spans[g, req_index, 0], b.page_spans[g, req_index, 1] = table.span
    b.table_from[g, buffer_row], b.table_to[g, buffer_row] = table.span[0] if end > 0 else _NOWHERE, end


def _find_conflicts(
    step: _StepInputs,
    groups: list[PageGroup],
    tables: dict[tuple[int, int], _Table],
    checks: dict[tuple[int, int], tuple[int, int]],
) -> dict[int, tuple[int, int, int]]:
    """Return code, value and group of each request that shares its index, or a page it writes, with another request.

    Pages count only in groups whose check passed. A request index counts even if the request has other faults.
    """
    written: dict[tuple[int, int], Int64Array] = {}  # written pages as offsets in last_writers, by group and request
    for (g, row), (code, _) in checks.items():
        if not code:
            seq_len, size = step.field(layout.REQ_SEQ_LEN, row), groups[g].page_size
            columns = np.arange((seq_len - step.field(layout.REQ_QUERY_LEN, row)) // size, -(-seq_len // size))
            columns = columns[:0] if groups[g].max_encoder_len else columns  # steps do not write encoder pages
            written[g, row] = tables[g, row].pages[columns].astype(np.int64) + groups[g].writers_at
    shared_pages = _repeated(np.concatenate(list(written.values()))) if written else np.empty(0, np.int64)
    ids = step.rows[layout.REQ_INDEX, : step.num_reqs]
    shared_req_indices = set(_repeated(ids).tolist())
    faults: dict[int, tuple[int, int, int]] = {}
    for (g, row), own in sorted(written.items(), reverse=True):
        if (hit := np.isin(own, shared_pages)).any():
            page = int(own[hit.argmax()]) - groups[g].writers_at
            faults[row] = (int(FaultCode.DUPLICATE_PAGE), page, g)
    for row, req_index in enumerate(ids.tolist()):
        if req_index in shared_req_indices:
            faults[row] = (int(FaultCode.DUPLICATE_REQUEST), req_index, 0)
    return faults


def _repeated(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    distinct, counts = np.unique(values, return_counts=True)
    repeated: npt.NDArray[Any] = distinct[counts > 1]
    return repeated
