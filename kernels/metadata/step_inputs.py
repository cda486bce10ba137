"""Layout of the step inputs that the host sends to the device, as packed int32 words in an entry of the input ring.

An entry contains either all inputs of one step (full) or only the changes (a batch delta):

    full    header   [HEADER_SIZE]                     see HEADER_*
            requests [req_fields(groups), num_reqs]    one contiguous run per field, see REQ_*
            tokens   [num_tokens]                      literal token ids, or TOKEN_FROM_DEVICE
            pages    [num_pages_listed]                page ids, one list after another (CSR, by PAGE_START)
            stops    [STOP_FIELDS, num_reqs]           with KEEP: the stop conditions, see STOP_*

    delta   header   [HEADER_SIZE]
            order    [num_reqs]                        with NEW_ORDER: request index of each batch position
            lists    [list_fields(groups), num_reqs]   with LISTS: PAGE_* of each group, as in a full entry
            pages    [num_pages_listed]

On the device, `unpack` expands either kind to the `inputs` buffer, which has the layout of a full entry without stop
conditions. Sections have no gaps, so every offset follows from the counts in the header and the number of KV groups.

An entry starts with HEADER_COPIES - 1 copies of its header, one for each extra program of `unpack`. Programs that
read the same words of host memory wait for each other, for 0.12 us each on an H200.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from graphrt.kernels.metadata.buffers import COPIED, STOP_TOKENS
from graphrt.kernels.metadata.buffers import HEADER_COPIES as HEADER_COPIES
from graphrt.kernels.metadata.buffers import HEADER_SIZE as HEADER_SIZE

HEADER_STEP_LOW = 0  # number of the first step, low and high 32 bits; it also selects the entry of the output rings
HEADER_STEP_HIGH = 1
HEADER_NUM_REQS = 2
HEADER_NUM_TOKENS = 3
HEADER_NUM_PAGES = 4  # page ids listed
HEADER_KIND = 5  # FULL or DELTA, combined with the flags below
HEADER_STEPS = 6  # number of steps that use this entry; 1 for a full entry
HEADER_STOP = 7  # the host may set it while the entry's steps run, to make the current step the last

INPUTS_AT = HEADER_SIZE * (HEADER_COPIES - 1)  # offset of the last header in an entry; the other sections follow it

FULL = 0
DELTA = 1
NEW_ORDER = 2
KEEP = 4  # in a full entry; the device keeps request values and stop conditions for later deltas
LOOPS = 8  # all steps run in one launch, which ends early if no request continues
LISTS = 16  # some requests get pages

REQ_INDEX = 0  # index of the request's persistent state; NO_REQUEST: the batch position is empty
REQ_SEQ_LEN = 1  # KV tokens including this step's; SEQ_LEN_FROM_DEVICE: length on the device plus query_len
REQ_QUERY_START = 2  # first token of the request in `tokens`
REQ_QUERY_LEN = 3  # new tokens of the request
REQ_SAMPLE = 4  # 1: sample after the last token; 0: an unfinished prefill chunk; 1 + d: the last d tokens are drafts
REQ_COPIED = 5  # first of the 32-bit values that the refresh copies to the buffers of COPIED, in that order
REQ_ENCODER_LEN = REQ_COPIED + COPIED.index("encoder_lens")  # tokens that the request's encoder wrote
REQ_PAGES = REQ_COPIED + len(COPIED)  # first of the page lists, with PAGE_FIELDS fields per KV group, group after group

PAGE_FIRST = 0  # index in the sequence of the first listed page
PAGE_START = 1  # start of the list in `pages`
PAGE_COUNT = 2  # 0: the request's table of the group does not change
PAGE_FIELDS = 3

STOP_LENGTH = 0  # KV tokens at which the sequence ends; 0: no limit
FIRST_STOP_TOKEN = 1  # first of the stop tokens; NO_TOKEN pads the list
STOP_FIELDS = FIRST_STOP_TOKEN + STOP_TOKENS

NO_REQUEST = -(1 << 31)
SEQ_LEN_FROM_DEVICE = -(1 << 31)


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
    """Write a header to the first words of `out`, with HEADER_STOP 0."""
    # Pass the array itself, because `out.data` would create another memoryview.
    _HEADER.pack_into(out, 0, step, num_reqs, num_tokens, num_pages, kind, steps, 0)  # type: ignore[arg-type]


def req_fields(groups: int) -> int:
    """Return the number of request fields for `groups` KV groups."""
    return REQ_PAGES + PAGE_FIELDS * groups


def list_fields(groups: int) -> int:
    """Return the number of list fields per request of a delta, for `groups` KV groups."""
    return PAGE_FIELDS * groups


def inputs_size(num_reqs: int, num_tokens: int, num_pages_listed: int, groups: int) -> int:
    """Return the int32 words of the full inputs of a step, without stop conditions."""
    return HEADER_SIZE + req_fields(groups) * num_reqs + num_tokens + num_pages_listed
