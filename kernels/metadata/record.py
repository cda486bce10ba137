"""Layout of the step record: the one int32 array that the host uploads per step.

    header  [HEADER_SIZE]                   see HEADER_*
    rows    [row_fields(groups), num_reqs]  one contiguous run per field, see ROW_*
    tokens  [num_tokens]                    literal token ids, or TOKEN_FROM_ROW
    pages   [num_pages_listed]              page ids, list after list (CSR, by ROW_PAGE_START)

The record is packed to what the step uses, so that only its used prefix travels: every offset follows from
num_reqs and num_tokens in the header, which the kernels read on the device. The number of KV groups is a runtime's.
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
ROW_SAMPLE = 4  # 1: the row's last token is sampled from; 0: prompt chunk that goes on
ROW_COPIED = 5  # first of the 32-bit values that go to the buffers of COPIED as they are, in that order
ROW_ENCODER_LEN = ROW_COPIED + COPIED.index("encoder_lens")  # tokens that the row's encoder wrote
ROW_PAGES = ROW_COPIED + len(COPIED)  # first of the page lists: PAGE_FIELDS fields per KV group, group after group

PAGE_FIRST = 0  # place in the sequence of the first listed page
PAGE_START = 1  # where the list begins in `pages`
PAGE_COUNT = 2  # 0: the group's table of this row stays as it is
PAGE_FIELDS = 3


def row_fields(groups: int) -> int:
    """Fields of a row, in a runtime of so many KV groups."""
    return ROW_PAGES + PAGE_FIELDS * groups


def record_size(num_reqs: int, num_tokens: int, num_pages_listed: int, groups: int) -> int:
    """Number of int32 words that a step of this size uses."""
    return HEADER_SIZE + row_fields(groups) * num_reqs + num_tokens + num_pages_listed
