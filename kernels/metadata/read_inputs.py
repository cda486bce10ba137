"""Device helpers that read the `inputs` buffer; step_inputs.py describes its layout."""

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
_MAY_BE_EMPTY = tl.constexpr(layout.DELTA | layout.KEEP)
_NO_REQUEST = tl.constexpr(layout.NO_REQUEST)
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
    """Read the header of the step inputs.

    Returns the step number, the requests and tokens that the graph processes, and whether batch positions may be empty.
    Also returns the requests, tokens and pages that the inputs list, which determine the section offsets.

    Inputs whose counts exceed the buffer are treated as empty. Requests and tokens beyond the graph's size are ignored.
    """
    low = tl.load(inputs_ptr + HEADER_STEP_LOW).to(tl.int64) & 0xFFFFFFFF
    step = (tl.load(inputs_ptr + HEADER_STEP_HIGH).to(tl.int64) << 32) | low
    listed_reqs = tl.load(inputs_ptr + HEADER_NUM_REQS).to(tl.int64)
    listed_tokens = tl.load(inputs_ptr + HEADER_NUM_TOKENS).to(tl.int64)
    listed_pages = tl.load(inputs_ptr + HEADER_NUM_PAGES).to(tl.int64)
    allows_empty = (tl.load(inputs_ptr + _KIND) & _MAY_BE_EMPTY) != 0
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
    return step, num_reqs, num_tokens, allows_empty, listed_reqs, listed_tokens, listed_pages


@triton.jit
def as_declared(word, ptr):
    """Convert an input word to the element type of `ptr`: float32 by its bits, int64 as unsigned, int32 unchanged."""
    if ptr.dtype.element_ty == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif ptr.dtype.element_ty == tl.int64:
        return word.to(tl.int64) & 0xFFFFFFFF
    else:
        return word


@triton.jit
def has_request(req_index, allows_empty):
    """Return whether a batch position holds a request. In sessions, finished and waiting requests are NO_REQUEST."""
    return (allows_empty == 0) | (req_index != _NO_REQUEST)


@triton.jit
def token_start(inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN: tl.constexpr):
    """Return the first token of batch position `row`; for a pad request, the number of tokens in the batch."""
    if QUERY_LEN > 0:
        return tl.minimum(row, num_reqs) * QUERY_LEN
    else:
        inner = (row > 0) & (row < num_reqs)
        start = tl.load(inputs_ptr + HEADER_SIZE + REQ_QUERY_START * listed_reqs + row, mask=inner, other=0)
        return tl.where(row >= num_reqs, num_tokens, tl.minimum(tl.maximum(start, 0), num_tokens))


@triton.jit
def token_range(
    inputs_ptr, row, query_start, query_len, num_reqs, num_tokens, listed_reqs, QUERY_LEN: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return where the tokens of batch position `row` start and end in the inputs, where its places in the buffers end,
    and whether the tokens match the request.

    In a graph for drafts, missing drafts are padding after the tokens of the request. With QUERY_LEN > 1, a request has
    QUERY_LEN places in the buffers, starting at `token_start`. In a mixed graph, its places in the buffers are those in
    the inputs.
    """
    if QUERY_LEN > 1:
        matches = (query_start >= 0) & (query_len >= 0) & (query_len <= QUERY_LEN)
        matches = matches & (query_start <= num_tokens - query_len)
        start = tl.where(matches, query_start, 0)
        end = start + tl.where(matches, query_len, 0)
        places_end = start + tl.where(row < num_reqs, QUERY_LEN, 0)
    else:
        start = token_start(inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
        places_end = token_start(inputs_ptr, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
        missing = places_end - start - query_len
        matches = (query_start == start) & (missing >= 0) & (missing < POSITIONS) & (places_end <= num_tokens)
        end = places_end - tl.where(matches, missing, 0)
    return start, end, places_end, matches


@triton.jit
def find_buffer_row(
    inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN: tl.constexpr, DECODE_LEN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the buffer row of batch position `row`, the first token of that row, and the number of decode requests.

    With DECODE_LEN 0, the buffers have the batch order. Otherwise requests with DECODE_LEN new tokens come first, then
    all others; both keep their order. Every program counts the requests itself, because there are few.
    """
    buffer_row = row
    first_token = token_start(inputs_ptr, row, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
    decodes = 0
    if DECODE_LEN > 0:
        decodes_before = 0
        tokens_before = 0
        for base in range(0, num_reqs, ROW_BLOCK):
            others = base + tl.arange(0, ROW_BLOCK)
            start = token_start(inputs_ptr, others, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
            end = token_start(inputs_ptr, others + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN)
            is_decode = (others < num_reqs) & (end - start == DECODE_LEN)
            earlier = others < row
            decodes += tl.sum(is_decode.to(tl.int32), 0)
            decodes_before += tl.sum((is_decode & earlier).to(tl.int32), 0)
            tokens_before += tl.sum(tl.where(earlier & (is_decode == 0), end - start, 0), 0)
        if row < num_reqs:
            length = token_start(inputs_ptr, row + 1, num_reqs, num_tokens, listed_reqs, QUERY_LEN) - first_token
            buffer_row = tl.where(length == DECODE_LEN, decodes_before, decodes + row - decodes_before)
            first_token = DECODE_LEN * tl.where(length == DECODE_LEN, decodes_before, decodes)
            first_token += tl.where(length == DECODE_LEN, 0, tokens_before)
    return buffer_row, first_token, decodes
