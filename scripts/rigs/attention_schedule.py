"""Benchmark of the attention schedule alone, which the device computes from the lengths of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from graphrt.bench.timer import Call
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.native.nvrtc import runs_native
from scripts.rigs.attention_sides import num_sms
from scripts.rigs.cells import SEED

_ROWS = (1, 64, 256, 1024)
_LONGEST = 4096
_ROWS_PER_PAD = 8
_MIXED_QUERY_LEN = 2


@dataclass(frozen=True, slots=True)
class ScheduleCase:
    """A step of `rows` requests of 1 to 4096 KV tokens, seeded; every eighth one is padding.

    mixed   requests of two new tokens each, as in mixed batches, instead of decodes
    """

    mode: str
    rows: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    query_len: int = 1
    sliding_window: int = 0
    attention_chunk_size: int = 0
    batch_invariant: bool = False
    mixed: bool = False

    def plan(self, device: torch.device) -> AttentionPlan:
        make = partial(AttentionPlan.varlen, num_tokens=self.rows * _MIXED_QUERY_LEN)
        if not self.mixed:
            decode = partial(AttentionPlan.decode, native=runs_native(device))
            make = partial(decode, query_len=self.query_len, batch_invariant=self.batch_invariant)
        return make(
            self.rows,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=torch.bfloat16,
            num_sms=num_sms(device),
        )

    def call(self, device: torch.device) -> Call:
        """Return a capturable call that computes the schedule of this step and returns the work list."""
        plan = self.plan(device)
        lengths = np.random.default_rng((SEED, self.rows)).integers(1, _LONGEST, size=self.rows, endpoint=True)
        lengths[_ROWS_PER_PAD - 1 :: _ROWS_PER_PAD] = 0
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        starts = None
        if self.mixed:
            starts = torch.arange(self.rows + 1, dtype=torch.int32, device=device) * _MIXED_QUERY_LEN
        work_list = torch.empty(plan.work_list_words, dtype=torch.int32, device=device)

        def schedule() -> torch.Tensor:
            schedule_attention(
                plan,
                seq_lens,
                work_list,
                query_start_loc=starts,
                sliding_window=self.sliding_window,
                attention_chunk_size=self.attention_chunk_size,
            )
            return work_list

        return schedule


def make_schedules() -> list[ScheduleCase]:
    """Return every mode at 1, 64, 256 and 1024 requests."""
    return [
        case
        for rows in _ROWS
        for case in (
            ScheduleCase("decode", rows),
            ScheduleCase("decode, 9/3 x 64", rows, 9, 3, 64),
            ScheduleCase("decode, 32/32 x 128", rows, 32, 32),
            ScheduleCase("decode, 64/8 x 128", rows, 64, 8),
            ScheduleCase("decode, 16/1 x 128", rows, 16, 1),
            ScheduleCase("decode, window of 1024", rows, sliding_window=1024),
            ScheduleCase("decode, chunks of 1024", rows, attention_chunk_size=1024),
            ScheduleCase("decode, 4 new tokens", rows, query_len=4),
            ScheduleCase("decode, batch-invariant", rows, batch_invariant=True),
            ScheduleCase("mixed, 2 new tokens", rows, mixed=True),
        )
    ]
