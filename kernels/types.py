"""Constants and small enums shared by kernels, capture and runtime."""

from __future__ import annotations

from enum import Enum, IntEnum

PAD_SLOT_ID = -1
"""Slot of a token that no KV writer may store."""

TOKEN_FROM_ROW = -1
"""Value in a batch's token list that stands for the row's last sampled token, read on the device."""

NO_TOKEN = -1
"""Result of a row that sampled nothing: a pad row, an unfinished prompt chunk, an invalid row."""


class KVLayout(str, Enum):
    """Order of one page in memory.

    NHD is `[page_size, num_kv_heads, head_dim]`, HND is `[num_kv_heads, page_size, head_dim]`. Kernels always see the
    logical NHD view `[num_pages, page_size, num_kv_heads, head_dim]`; the layout is in its strides.
    """

    NHD = "NHD"
    HND = "HND"


class FaultCode(IntEnum):
    """What the refresh kernel found wrong with a row. The row then becomes a pad row and its token is -1."""

    NONE = 0
    ROW_ID_OUT_OF_RANGE = 1  # value: the row id
    BAD_LENGTH = 2  # value: seq_len; it is < query_len, or > max_seq_len
    LENGTH_EXCEEDS_PAGES = 3  # value: seq_len; pages x page_size is smaller
    PAGE_OUT_OF_RANGE = 4  # value: the page id; null page, negative or >= num_pages
    TOKEN_OUT_OF_RANGE = 5  # value: the token id; negative or >= vocab_size, or the row has no last token
    DUPLICATE_ROW = 6  # value: the row id; two rows of the batch name it
    DUPLICATE_SLOT = 7  # value: the flat slot; two rows write it


class RowStatus(IntEnum):
    """State of one row of a step, written by the refresh kernel (int32 on the device)."""

    INVALID = -2  # the refresh found a fault; the row is treated as a pad row
    PAD = -1  # beyond num_reqs
    LIVE = 0  # prompt chunk that goes on: attends and writes KV, samples nothing
    SAMPLES = 1  # its last token is sampled from
