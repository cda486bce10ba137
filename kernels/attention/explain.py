"""A schedule in words and numbers: what a plan says, where units lie on the line, and which segments each part has.

`scripts/print_schedule.py` prints this for any rows, on any machine. The numbers are read from a work list that
`schedule_attention` wrote, so they are those that the kernels follow.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.errors import ConfigError

_SHOWN = 4
"""Lines of a table at its beginning, and at its end, where it is shortened."""


@dataclass(frozen=True, slots=True)
class ListedSegment:
    """A segment of the work list.

    row                    row of the batch
    first_query            first query of its unit within the row
    tile_begin, tile_end   its tiles, the last one excluded
    split, num_splits      its number within the unit, from 0 on, and how many segments the unit has
    """

    row: int
    first_query: int
    tile_begin: int
    tile_end: int
    split: int
    num_splits: int


def parse_rows(text: str) -> list[int]:
    """Lengths of the rows of "1x32768+63x512": one row of 32768 tokens, then 63 of 512. Raises: ConfigError."""
    lengths: list[int] = []
    for item in text.split("+"):
        match = re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,9})", item.strip())
        if match is None:
            raise ConfigError(
                f"rows: expected counts and lengths such as 1x32768+63x512, got {text!r}; correct {item!r}"
            )
        lengths += [int(match[2])] * int(match[1] or 1)
    return lengths


def read_parts(plan: AttentionPlan, work_list: torch.Tensor) -> list[list[ListedSegment]]:
    """The segments of each part, as the kernels read them."""
    words = work_list.tolist()

    def listed(at: int) -> ListedSegment:
        row, first_query, begin, end, _, _, _, splits = words[at : at + SEGMENT_WORDS]
        return ListedSegment(row, first_query, begin, end, splits >> 16, splits & 0xFFFF)

    parts = []
    for part in range(plan.schedule.num_parts):
        at = part * PART_WORDS
        begin, end = words[at], words[at + PART_WORDS + 2]
        segments = [listed(plan.segments_at + segment * SEGMENT_WORDS) for segment in range(begin, end)]
        if segments and not plan.schedule.fixed_splits:
            segments[0] = listed(at + 8)
        parts.append(segments)
    return parts


def explain_schedule(
    plan: AttentionPlan,
    lengths: Sequence[int],
    *,
    sliding_window: int = 0,
    attention_chunk_size: int = 0,
    every_line: bool = False,
) -> str:
    """Plan, line, units and parts of a decode batch, as text.

    plan             made by AttentionPlan.decode for as many rows
    lengths          seq_len of each row
    every_line       do not shorten the tables

    Capture-safe: no; it runs on the CPU.

    Raises: ShapeError for a plan of another size, or a window or chunks that no layer may have.
    """
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32, device="cpu")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    schedule_attention(
        plan, seq_lens, work_list, sliding_window=sliding_window, attention_chunk_size=attention_chunk_size
    )
    parts = read_parts(plan, work_list)
    units: dict[tuple[int, int], list[tuple[int, ListedSegment]]] = {}
    for part, segments in enumerate(parts):
        for segment in segments:
            units.setdefault((segment.row, segment.first_query), []).append((part, segment))
    sections = [
        _plan_lines(plan, lengths),
        *_line_and_units(plan, units, every_line),
        _part_lines(plan, parts, every_line),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _plan_lines(plan: AttentionPlan, lengths: Sequence[int]) -> list[str]:
    shape, schedule, native = plan.shape, plan.schedule, plan.native
    rows = ", ".join(f"{len(list(same))} x {length}" for length, same in itertools.groupby(lengths))
    if native is None:
        kernel, owner = "Triton", f"program of {_count(plan.tile.num_warps, 'warp')}"
    else:
        kernel = f"CUDA: {_count(plan.native_blocks, 'block')} of {native.warps} warps per KV head"
        owner = f"cluster of {native.cluster} blocks" if native.cluster > 1 else "block"
        owner = "warp" if plan.parts_are_warps else owner
    new = _count(shape.query_len, "new token")
    of = f"{shape.head_dim}" if shape.v_head_dim == shape.head_dim else f"{shape.head_dim}, V of {shape.v_head_dim}"
    units = -(-shape.queries_of_row // plan.tile.block_m)
    if schedule.fixed_splits:
        cuts = (
            f"fixed: by a unit's own length, at most {schedule.fixed_splits}, of at least {schedule.fixed_tiles} tiles"
        )
    else:
        cuts = "where parts end"
    return [
        f"rows         {shape.num_rows}: {rows} tokens",
        f"heads        {shape.group * shape.num_kv_heads} query, {shape.num_kv_heads} KV, of {of}",
        f"queries      {new} x {shape.group} heads per KV head = {shape.queries_of_row} per row",
        f"units        of up to {plan.tile.block_m} queries: {units} per row",
        f"tile         {plan.tile.block_n} tokens",
        f"kernel       {kernel}",
        f"parts        {schedule.num_parts} per KV head, one for each {owner}",
        f"cost         of a unit: tiles + {schedule.unit_overhead}, at least {schedule.min_unit_tiles}",
        f"cuts         {cuts}",
    ]


def _line_and_units(
    plan: AttentionPlan, units: dict[tuple[int, int], list[tuple[int, ListedSegment]]], every_line: bool
) -> Iterator[list[str]]:
    schedule = plan.schedule
    table = ["row   query  tiles  cost   on the line        parts        segments"]
    line, total = -schedule.unit_overhead, 0
    for (row, first_query), found in units.items():
        tiles = found[-1][1].tile_end - found[0][1].tile_begin
        cost = max(tiles + schedule.unit_overhead, schedule.min_unit_tiles)
        line += cost
        begin, end = line - tiles, line
        table.append(
            f"{row:<5} {first_query:<6} {tiles:<6} {cost:<6} {f'{begin} to {end}':<18} "
            f"{_range(found[0][0], found[-1][0]):<12} {len(found)}"
        )
        total = line
    length = max(total, 1)
    active = min(max(length // schedule.min_part_tiles, 1), schedule.num_parts)
    yield [
        f"line         {length} tiles",
        f"part size    {length} / {active} parts, rounded up = {-(-length // active)} tiles",
    ]
    yield [*table[:1], *_shortened(table[1:], every_line)]


def _part_lines(plan: AttentionPlan, parts: list[list[ListedSegment]], every_line: bool) -> list[str]:
    table = []
    per_block = plan.native.warps if plan.native is not None and plan.parts_are_warps else 0
    for part, segments in enumerate(parts):
        owner = f"{part // per_block:<5} " if per_block else ""
        texts = [f"row {s.row} tiles {s.tile_begin} to {s.tile_end} ({_share(s)})" for s in segments]
        table.append(f"{part:<5} {owner}{'; '.join(texts) or 'nothing'}")
    heading = "part  block segments" if per_block else "part  segments"
    return [heading, *_shortened(table, every_line)]


def _share(segment: ListedSegment) -> str:
    return "whole" if segment.num_splits == 1 else f"split {segment.split} of {segment.num_splits}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _shortened(lines: list[str], every_line: bool) -> list[str]:
    hidden = len(lines) - 2 * _SHOWN
    if every_line or hidden <= 1:
        return lines
    return [*lines[:_SHOWN], f"...   {hidden} more", *lines[-_SHOWN:]]
