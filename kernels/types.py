"""Constants and enums shared by kernels, capture and runtime."""

from __future__ import annotations

from enum import Enum, IntEnum

PAD_SLOT_ID = -1
"""Value in `slot_mapping` of a token whose KV is not written."""

TOKEN_FROM_DEVICE = -(1 << 31)
"""Placeholder in a batch's token list for the request's last sampled token, which is on the device.

It differs from NO_TOKEN, because -1 in a token list is a fault.
"""

DRAFT_FROM_DEVICE = TOKEN_FROM_DEVICE + 1
"""Placeholder in the token list of a session's batch for a draft that the device may have."""

NO_TOKEN = -1
"""Result of a request that sampled nothing: a pad request, an unfinished prefill chunk, a faulty request."""


class KVLayout(str, Enum):
    """Memory layout of one page.

    NHD is `[page_size, num_kv_heads, head_dim]`, HND is `[num_kv_heads, page_size, head_dim]`. Kernels always take the
    NHD view `[num_pages, page_size, num_kv_heads, head_dim]`; the layout determines its strides.
    """

    NHD = "NHD"
    HND = "HND"


FAULT_GROUP_SHIFT = 8
"""Number of low bits in a reported fault code that contain the FaultCode; the higher bits are the KV group."""


class FaultCode(IntEnum):
    """Fault of a request that the device detected. Its token is NO_TOKEN.

    Codes 1 to 10 are input faults, which the refresh detects. The request is then treated as a pad request and
    nothing is written for it. If the step starts its sequence, the last token of its request index is voided. Codes 11
    and above are sampling faults, which `write_outputs` detects after the request's KV is written.
    """

    NONE = 0
    REQ_INDEX_OUT_OF_RANGE = 1  # value: the request index
    BAD_LENGTH = 2  # value: seq_len; it is < query_len, or > max_seq_len
    LENGTH_EXCEEDS_PAGES = 3  # value: seq_len, or encoder_len in a cross group; too few pages for it
    PAGE_OUT_OF_RANGE = 4  # value: the page id; the null page, negative or >= num_pages
    TOKEN_OUT_OF_RANGE = 5  # value: the token id; negative or >= vocab_size
    DUPLICATE_REQUEST = 6  # value: the request index; another request of the batch, faulty or not, has it
    DUPLICATE_PAGE = 7  # value: the page id; requests or groups write it twice, or one request does
    NO_LAST_TOKEN = 8  # value: the request index; TOKEN_FROM_DEVICE, but the sequence has sampled no token
    BAD_ENCODER_LEN = 9  # value: encoder_len; negative, > max_encoder_len, or 0 with encoder pages listed
    ENCODER_LEN_CHANGED = 10  # value: encoder_len; it differs from the previous step's
    NO_TOKEN_OFFERED = 11  # value: NO_TOKEN; all logits are NaN or -inf
    SAMPLE_OUT_OF_RANGE = 12  # value: the sampled token; negative or >= vocab_size


class RequestStatus(IntEnum):
    """Status of a request in a step, written by the refresh (int32 on the device)."""

    INVALID = -2  # the refresh found a fault; treated as a pad request
    PAD = -1  # no request
    LIVE = 0  # unfinished prefill chunk, which writes KV and attends but does not sample
    SAMPLES = 1  # a token is sampled from its last position


class FinishReason(IntEnum):
    """Why a sequence is finished, written by `write_outputs` (int32 on the device)."""

    RUNNING = 0
    STOP_TOKEN = 1  # it sampled one of its stop tokens
    LENGTH = 2  # it reached its length limit
    FAULT = 3  # the request had a fault
