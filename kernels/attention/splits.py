"""How far decode rows are split, from constants of the capture, and the scratch memory that the splits need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

MAX_SPLITS = 64
MIN_BLOCK_M, MAX_BLOCK_M = 16, 64  # query rows of one program: powers of two that tensor cores take

_PROGRAMS_PER_SM = 2
_MAX_WAVES = 4  # rows are not split further than into this many waves of programs


def _num_m_tiles(packed: int) -> int:
    return -(-packed // MAX_BLOCK_M)


def decode_num_splits(padded_reqs: int, num_kv_heads: int, num_sms: int, packed: int = 1) -> int:
    """Splits per row for a decode size, from constants of the capture alone.

    padded_reqs    rows of the decode size
    num_kv_heads   KV heads
    num_sms        streaming multiprocessors of the device
    packed         query_len x group, the query rows per KV head

    The fewest splits that fill the device about as well as any number would: `num_sms` x 2 programs run at a time,
    and rows of equal length make waves of equal duration.
    """
    programs = padded_reqs * num_kv_heads * _num_m_tiles(packed)
    slots = _PROGRAMS_PER_SM * num_sms

    def share_of_slots_used(splits: int) -> float:
        return programs * splits / (-(-programs * splits // slots) * slots)

    most = max(1, min(MAX_SPLITS, _MAX_WAVES * slots // programs))
    shares = [share_of_slots_used(splits) for splits in range(1, most + 1)]
    good_enough = 0.9 * max(shares)
    return next(splits for splits, share in enumerate(shares, start=1) if share >= good_enough)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Scratch memory of `paged_decode`, shared by all layers and graphs that run one after another.

    partial_out   [*] float32  partial results of split rows; contents matter within one call only
    partial_lse   [*] float32  their log-sum-exp in units of log 2
    counters      [*] int32    arrivals per row and tile; 0 between calls, which the kernel itself restores
    """

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        *,
        max_query_len: int,
        head_shapes: Iterable[tuple[int, int, int]],
        num_sms: int,
        device: torch.device,
    ) -> DecodeWorkspace:
        """Workspace for every decode size up to `max_rows` x `max_query_len` under `decode_num_splits`.

        head_shapes   (num_q_heads, num_kv_heads, head_dim) of the layers that share it
        """
        sizes = [_workspace_sizes(max_rows, max_query_len, *shape, num_sms) for shape in head_shapes]
        out_size, lse_size, counters_size = (max(column) for column in zip(*sizes, strict=True))
        return cls(
            torch.zeros(out_size, dtype=torch.float32, device=device),
            torch.zeros(lse_size, dtype=torch.float32, device=device),
            torch.zeros(counters_size, dtype=torch.int32, device=device),
        )


def _workspace_sizes(
    max_rows: int, max_query_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int, num_sms: int
) -> tuple[int, int, int]:
    """Elements of each tensor of the workspace. Sizes whose rows are not split need no partial results."""
    group = num_q_heads // num_kv_heads
    split_tokens = 0
    for query_len in range(1, max_query_len + 1):
        m_tiles = _num_m_tiles(query_len * group)
        most_rows_split = _MAX_WAVES * _PROGRAMS_PER_SM * num_sms // (num_kv_heads * m_tiles)
        for rows in range(1, min(max_rows, most_rows_split) + 1):
            splits = decode_num_splits(rows, num_kv_heads, num_sms, query_len * group)
            if splits > 1:
                split_tokens = max(split_tokens, rows * query_len * splits)
    lse_size = max(1, split_tokens * num_q_heads)
    counters_size = max_rows * num_kv_heads * -(-max_query_len * group // MIN_BLOCK_M)
    return lse_size * head_dim, lse_size, counters_size
