"""Layout of the step record: the one int32 array that the host uploads per step.

    header  [HEADER_SIZE]              see HEADER_*
    rows    [ROW_FIELDS, num_reqs]     one contiguous run per field, see ROW_*
    tokens  [num_tokens]               literal token ids, or TOKEN_FROM_ROW
    pages   [num_pages_listed]         page ids of all rows, row after row (CSR, by ROW_PAGE_START)

The record is packed to what the step uses, so that only its used prefix travels: every offset follows from
num_reqs and num_tokens in the header, which the kernels read on the device.
"""

from __future__ import annotations

from graphrt.kernels.metadata.buffers import COPIED

HEADER_SIZE = 8
HEADER_STEP_LOW = 0  # step number, low and high 32 bits; it also chooses the slot of the output ring
HEADER_STEP_HIGH = 1
HEADER_NUM_REQS = 2
HEADER_NUM_TOKENS = 3
HEADER_NUM_PAGES = 4  # page ids listed in the record

ROW_ID = 0  # which persistent row state belongs to this row
ROW_SEQ_LEN = 1  # KV tokens including this step's
ROW_QUERY_START = 2  # first token of the row in `tokens`
ROW_QUERY_LEN = 3  # new tokens of the row
ROW_PAGE_START = 4  # first page of the row in `pages`
ROW_PAGE_COUNT = 5
ROW_SAMPLE = 6  # 1: the row's last token is sampled from; 0: prompt chunk that goes on
ROW_COPIED = 7  # first of the 32-bit values that go to the buffers of COPIED as they are, in that order
ROW_FIELDS = ROW_COPIED + len(COPIED)


def record_size(num_reqs: int, num_tokens: int, num_pages_listed: int) -> int:
    """Number of int32 words that a step of this size uses."""
    return HEADER_SIZE + ROW_FIELDS * num_reqs + num_tokens + num_pages_listed
