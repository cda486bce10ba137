"""Constants and small enums shared by kernels, capture and runtime."""

from __future__ import annotations

from enum import Enum, IntEnum

PAD_SLOT_ID = -1
"""Slot of a token that no KV writer may store."""

TOKEN_FROM_DEVICE = -(1 << 31)
"""Value in a batch's token list that stands for the row's last sampled token, read on the device.

No other value in use looks like it: NO_TOKEN, which is -1, is a fault where a token belongs.
"""

NO_TOKEN = -1
"""Result of a row that sampled nothing: a pad row, an unfinished prompt chunk, a faulty row."""


class KVLayout(str, Enum):
    """Order of one page in memory.

    NHD is `[page_size, num_kv_heads, head_dim]`, HND is `[num_kv_heads, page_size, head_dim]`. Kernels always see the
    logical NHD view `[num_pages, page_size, num_kv_heads, head_dim]`; the layout is in its strides.
    """

    NHD = "NHD"
    HND = "HND"


FAULT_GROUP_SHIFT = 8
"""A fault code's KV group stands above these bits of the code."""


class FaultCode(IntEnum):
    """What the device found wrong with a row; the token of such a row is NO_TOKEN.

    The refresh finds faults of the input, codes 1 to 10: the row then becomes a pad row and writes nothing; where its
    sequence begins in that step, the row id has no last token from then on. `write_outputs`
    finds faults of the sample, from code 11 on: the row's KV is written, its token is void.
    """

    NONE = 0
    REQ_INDEX_OUT_OF_RANGE = 1  # value: the row id
    BAD_LENGTH = 2  # value: seq_len; it is < query_len, or > max_seq_len
    LENGTH_EXCEEDS_PAGES = 3  # value: seq_len, or encoder_len in a cross group; the row has not all pages for it
    PAGE_OUT_OF_RANGE = 4  # value: the page id; null page, negative or >= num_pages
    TOKEN_OUT_OF_RANGE = 5  # value: the token id; negative or >= vocab_size
    DUPLICATE_REQUEST = 6  # value: the row id; two rows of the batch name it, whatever else is wrong with the other
    DUPLICATE_PAGE = 7  # value: the page id; this step writes it twice: two rows do, two groups, or one row
    NO_LAST_TOKEN = 8  # value: the row id; the row asks for its last token, and its sequence has sampled none
    BAD_ENCODER_LEN = 9  # value: encoder_len; it is negative, > max_encoder_len, or 0 beside pages of an encoder
    ENCODER_LEN_CHANGED = 10  # value: encoder_len; the row goes on with another one than its sequence has
    NO_TOKEN_OFFERED = 11  # value: NO_TOKEN; the logits offer no token: all are NaN or -inf
    SAMPLE_OUT_OF_RANGE = 12  # value: the token that the sampler returned; negative or >= vocab_size


class RequestStatus(IntEnum):
    """State of one row of a step, written by the refresh kernel (int32 on the device)."""

    INVALID = -2  # the refresh found a fault; the row is treated as a pad row
    PAD = -1  # beyond num_reqs
    LIVE = 0  # prompt chunk that goes on: attends and writes KV, samples nothing
    SAMPLES = 1  # its last token is sampled from


class FinishReason(IntEnum):
    """Why a row's sequence does not go on by itself, as `write_outputs` found it (int32 on the device)."""

    RUNNING = 0
    STOP_TOKEN = 1  # it sampled one of its stop tokens
    LENGTH = 2  # it has as many tokens as it may have
    FAULT = 3  # the step found a fault of the row
