"""Layout of what the host tells the device about its next steps: one int32 array, in a slot of the input_ring.

A slot says a step in full, or only what is new:

    full   header  [HEADER_SIZE]                   see HEADER_*
           rows    [req_fields(groups), num_reqs]  one contiguous run per field, see ROW_*
           tokens  [num_tokens]                    literal token ids, or TOKEN_FROM_DEVICE
           pages   [num_pages_listed]              page ids, list after list (CSR, by PAGE_START)
           ends    [END_FIELDS, num_reqs]          with KEEP: when each row ends, see END_*

    delta   header  [HEADER_SIZE]
           order   [num_reqs]                      with NEW_ORDER: the row id of each place, else they stay
           lists   [list_fields(groups), num_reqs] with LISTS: PAGE_* of each group, as in the rows of a full slot
           pages   [num_pages_listed]

`unpack` turns either into the step record on the device, which has the layout of a full slot without its ends. Slots
are
packed to what they use: every offset follows from the counts in the header. The number of KV groups is a runtime's.

Before its header a slot has copies of it, one for each other program of `unpack`. Programs that read the same words of
host memory wait for one another, 0.12 us each on an H200; those that read words of their own do not.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS
from graphrt.kernels.metadata.buffers import HEADER_COPIES as HEADER_COPIES
from graphrt.kernels.metadata.buffers import HEADER_SIZE as HEADER_SIZE

HEADER_STEP_LOW = 0  # number of the first step, low and high 32 bits; it also chooses the entry of the output ring
HEADER_STEP_HIGH = 1
HEADER_NUM_REQS = 2
HEADER_NUM_TOKENS = 3
HEADER_NUM_PAGES = 4  # page ids listed
HEADER_KIND = 5  # FULL or DELTA, with what else is there
HEADER_STEPS = 6  # steps that this slot is for; a full one is for one

HEADER_STOP = 7  # the host may set it while the slot's steps run: the one under way is the last

INPUTS_AT = HEADER_SIZE * (HEADER_COPIES - 1)  # of a slot: where its last header is, and all that follows

FULL = 0
DELTA = 1
NEW_ORDER = 2
KEEP = 4  # what a full slot says of its rows is kept for delta to come
LOOPS = 8  # the steps run in one launch, which ends early where no row goes on
LISTS = 16  # some rows get pages

REQ_INDEX = 0  # which persistent row state belongs to this row; NOBODY: a row without a sequence
REQ_SEQ_LEN = 1  # KV tokens including this step's; LENGTH_FROM_DEVICE: the row's own, and the new ones
REQ_QUERY_START = 2  # first token of the row in `tokens`
REQ_QUERY_LEN = 3  # new tokens of the row
REQ_SAMPLE = 4  # 1: the row's last token is sampled from; 0: prompt chunk that goes on
REQ_COPIED = 5  # first of the 32-bit values that go to the buffers of COPIED as they are, in that order
REQ_ENCODER_LEN = REQ_COPIED + COPIED.index("encoder_lens")  # tokens that the row's encoder wrote
REQ_PAGES = REQ_COPIED + len(COPIED)  # first of the page lists: PAGE_FIELDS fields per KV group, group after group

PAGE_FIRST = 0  # place in the sequence of the first listed page
PAGE_START = 1  # where the list begins in `pages`
PAGE_COUNT = 2  # 0: the group's table of this row stays as it is
PAGE_FIELDS = 3

END_LENGTH = 0  # KV tokens with which the sequence ends; 0: it does not
END_TOKENS = 1  # first of the tokens that end it; NO_TOKEN where there are fewer
END_FIELDS = END_TOKENS + STOP_TOKENS

NOBODY = -(1 << 31)
LENGTH_FROM_DEVICE = -(1 << 31)


_HEADER = struct.Struct("<q6i")


def write_header(
    out: npt.NDArray[np.int32],
    step: int,
    num_reqs: int,
    num_tokens: int,
    num_pages: int,
    kind: int = FULL,
    steps: int = 1,
) -> None:
    """Pack the header into the first words of a record; nobody has stopped its steps yet."""
    # An array is a buffer: `out.data` would make another one of it first.
    _HEADER.pack_into(out, 0, step, num_reqs, num_tokens, num_pages, kind, steps, 0)  # type: ignore[arg-type]


def req_fields(groups: int) -> int:
    """Fields of a row, in a runtime of so many KV groups."""
    return REQ_PAGES + PAGE_FIELDS * groups


def list_fields(groups: int) -> int:
    """Fields of a row in the lists of delta."""
    return PAGE_FIELDS * groups


def inputs_size(num_reqs: int, num_tokens: int, num_pages_listed: int, groups: int) -> int:
    """Number of int32 words that a step of this size uses."""
    return HEADER_SIZE + req_fields(groups) * num_reqs + num_tokens + num_pages_listed
