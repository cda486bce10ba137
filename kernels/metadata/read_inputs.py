"""Device helpers that read the step record, on the layout of record.py."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.metadata import step_inputs as layout

HEADER_SIZE = tl.constexpr(layout.HEADER_SIZE)
HEADER_STEP_LOW = tl.constexpr(layout.HEADER_STEP_LOW)
HEADER_STEP_HIGH = tl.constexpr(layout.HEADER_STEP_HIGH)
HEADER_NUM_REQS = tl.constexpr(layout.HEADER_NUM_REQS)
HEADER_NUM_TOKENS = tl.constexpr(layout.HEADER_NUM_TOKENS)
HEADER_NUM_PAGES = tl.constexpr(layout.HEADER_NUM_PAGES)
_KIND = tl.constexpr(layout.HEADER_KIND)
_KEPT = tl.constexpr(layout.DELTA | layout.KEEP)
_NOBODY = tl.constexpr(layout.NOBODY)
REQ_INDEX = tl.constexpr(layout.REQ_INDEX)
REQ_SEQ_LEN = tl.constexpr(layout.REQ_SEQ_LEN)
REQ_QUERY_START = tl.constexpr(layout.REQ_QUERY_START)
REQ_QUERY_LEN = tl.constexpr(layout.REQ_QUERY_LEN)
REQ_SAMPLE = tl.constexpr(layout.REQ_SAMPLE)
REQ_COPIED = tl.constexpr(layout.REQ_COPIED)
REQ_ENCODER_LEN = tl.constexpr(layout.REQ_ENCODER_LEN)


@triton.jit
def read_header(
    inputs_ptr, inputs_words, padded_reqs, padded_tokens, QUERY_LEN: tl.constexpr, REQ_FIELDS: tl.constexpr
):
    """Step, rows and tokens to serve, whether rows are kept, and the record's own extents, which place its sections.

    A record that claims to be longer than its buffer counts as empty; rows and tokens beyond the graph's are absent.
    """
    low = tl.load(inputs_ptr + HEADER_STEP_LOW).to(tl.int64) & 0xFFFFFFFF
    step = (tl.load(inputs_ptr + HEADER_STEP_HIGH).to(tl.int64) << 32) | low
    listed_reqs = tl.load(inputs_ptr + HEADER_NUM_REQS).to(tl.int64)
    listed_tokens = tl.load(inputs_ptr + HEADER_NUM_TOKENS).to(tl.int64)
    listed_pages = tl.load(inputs_ptr + HEADER_NUM_PAGES).to(tl.int64)
    kept = (tl.load(inputs_ptr + _KIND) & _KEPT) != 0
    words = HEADER_SIZE + REQ_FIELDS * listed_reqs + listed_tokens + listed_pages
    fits = (listed_reqs >= 0) & (listed_tokens >= 0) & (listed_pages >= 0) & (words <= inputs_words)
    listed_reqs = tl.where(fits, listed_reqs, 0).to(tl.int32)
    listed_tokens = tl.where(fits, listed_tokens, 0).to(tl.int32)
    listed_pages = tl.where(fits, listed_pages, 0).to(tl.int32)
    num_reqs = tl.minimum(listed_reqs, padded_reqs)
    num_tokens = tl.minimum(listed_tokens, padded_tokens)
    absent_ptr = inputs_ptr + HEADER_SIZE + REQ_QUERY_START * listed_reqs + num_reqs
    first_absent = tl.load(absent_ptr, mask=listed_reqs > num_reqs, other=num_tokens)
    num_tokens = tl.minimum(tl.maximum(first_absent, 0), num_tokens)
    if QUERY_LEN > 0:
        num_tokens = tl.minimum(num_tokens, num_reqs * QUERY_LEN)
    num_tokens = tl.where(num_reqs > 0, num_tokens, 0)
    return step, num_reqs, num_tokens, kept, listed_reqs, listed_tokens, listed_pages


@triton.jit
def as_declared(word, ptr):
    """A word of the record as the buffer behind `ptr` holds it: the bits of a float, or an int; int64 is unsigned."""
    if ptr.dtype.element_ty == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif ptr.dtype.element_ty == tl.int64:
        return word.to(tl.int64) & 0xFFFFFFFF
    else:
        return word


@triton.jit
def has_sequence(req_index, kept):
    """Whether a sequence stands at a row of the record. Where rows are kept, some are NOBODY's: they ended, or wait."""
    return (kept == 0) | (req_index != _NOBODY)


@triton.jit
def token_start(inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN: tl.constexpr):
    """First token of `row` in the graph's token buffers; of a pad row, one past the last real row's tokens."""
    if QUERY_LEN > 0:
        return tl.minimum(row, num_reqs) * QUERY_LEN
    else:
        inner = (row > 0) & (row < num_reqs)
        start = tl.load(inputs_ptr + HEADER_SIZE + REQ_QUERY_START * listed_reqs + row, mask=inner, other=0)
        return tl.where(row >= num_reqs, num_tokens, tl.minimum(tl.maximum(start, 0), num_tokens))


@triton.jit
def row_place(
    inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN: tl.constexpr, DECODE_LEN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Where a row of the record stands in the step's buffers, its first token there, and the decode part's rows.

    Without a decode part (DECODE_LEN 0) rows stand in their order. With one, rows of DECODE_LEN new tokens come first,
    then all others, both in their order. Each program counts the rows for itself, as they are few.
    """
    place = row
    first_token = token_start(inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    decodes = 0
    if DECODE_LEN > 0:
        before = 0
        tokens_before = 0
        for base in range(0, num_reqs, ROW_BLOCK):
            others = base + tl.arange(0, ROW_BLOCK)
            begin = token_start(inputs_ptr, others, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
            end = token_start(inputs_ptr, others + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
            is_decode = (others < num_reqs) & (end - begin == DECODE_LEN)
            earlier = others < row
            decodes += tl.sum(is_decode.to(tl.int32), 0)
            before += tl.sum((is_decode & earlier).to(tl.int32), 0)
            tokens_before += tl.sum(tl.where(earlier & (is_decode == 0), end - begin, 0), 0)
        if row < num_reqs:
            length = token_start(inputs_ptr, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN) - first_token
            place = tl.where(length == DECODE_LEN, before, decodes + row - before)
            first_token = DECODE_LEN * tl.where(length == DECODE_LEN, before, decodes)
            first_token += tl.where(length == DECODE_LEN, 0, tokens_before)
    return place, first_token, decodes
