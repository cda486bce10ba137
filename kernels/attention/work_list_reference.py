"""The work list in plain Python. The schedule kernel computes it in closed form; this file walks along the line."""

from __future__ import annotations

import itertools

import torch

from graphrt.kernels.attention.attend import PART_WORDS
from graphrt.kernels.attention.call import ScheduleCall

_Unit = tuple[int, int, int, int, int, int, int]
"""A unit on the line: row, first query, seq_len, first token of the row, query_len, first tile, number of tiles."""


def work_list_reference(call: ScheduleCall) -> None:
    """Write the list as work_list.py documents it."""
    plan, schedule = call.plan, call.plan.schedule
    num_parts, unit_overhead = schedule.num_parts, schedule.unit_overhead
    units, zeros = _units(call)

    # The line: every unit costs its tiles and the gap ahead of them, which the first unit has for nothing.
    total = max(sum(max(unit[-1] + unit_overhead, schedule.min_unit_tiles) for unit in units) - unit_overhead, 1)
    active = min(max(total // schedule.min_part_tiles, 1), num_parts)
    part_size = -(-total // active)
    cuts = [min(part * part_size, total) for part in range(num_parts)]

    # Segments: units, cut where a cut falls into their tiles, or by their own lengths.
    segments: list[list[int]] = []
    begins: list[int] = []  # where each segment begins on the line
    line = -unit_overhead
    for row, first_query, seq_len, first_token, length, first_tile, tiles in units:
        line += max(unit_overhead, schedule.min_unit_tiles - tiles)
        if schedule.fixed_splits:
            splits = min(-(-tiles // schedule.fixed_tiles), schedule.fixed_splits)
            bounds = [split * tiles // splits for split in range(splits + 1)]
        else:
            bounds = [0, *(cut - line for cut in cuts if line < cut < line + tiles), tiles]
            splits = len(bounds) - 1
        for split in range(splits):
            begin, end = first_tile + bounds[split], first_tile + bounds[split + 1]
            segments.append([row, first_query, begin, end, seq_len, first_token, length, splits | split << 16])
            begins.append(line + bounds[split])
        line += tiles

    # Parts: each takes the segments from the first that begins at its cut or behind it.
    is_entry = [schedule.fixed_splits > 0 or segment[-1] >> 16 == 0 for segment in segments]
    parts = torch.zeros(num_parts + 1, PART_WORDS, dtype=torch.int32, device="cpu")
    for part in range(num_parts + 1):
        first = sum(begin < cuts[part] for begin in begins) if part < num_parts else len(segments)
        entries = sum(is_entry[:first])
        parts[part, 0] = entries - 1 if first < len(segments) and not is_entry[first] else entries
        parts[part, 2] = entries
        parts[part, 1] = min(part, num_parts) * len(zeros) // num_parts
        if not schedule.fixed_splits and part < num_parts and first < len(segments):
            parts[part, 8:] = torch.tensor(segments[first], dtype=torch.int32, device="cpu")

    work_list = call.work_list
    work_list[: plan.segments_at] = parts.flatten()
    if segments:
        flat = torch.tensor(list(itertools.compress(segments, is_entry)), dtype=torch.int32, device="cpu").flatten()
        work_list[plan.segments_at : plan.segments_at + flat.numel()] = flat
    if zeros:
        flat = torch.tensor(zeros, dtype=torch.int32, device="cpu").flatten()
        work_list[plan.zeros_at : plan.zeros_at + flat.numel()] = flat


def _units(call: ScheduleCall) -> tuple[list[_Unit], list[tuple[int, int, int]]]:
    """The units that see tiles, and the entries of those that see nothing."""
    shape, tile = call.plan.shape, call.plan.tile
    group, query_len = shape.group, shape.query_len
    lengths = call.seq_lens.tolist()
    if call.seq_lens_are_starts:
        lengths = [end - start for start, end in itertools.pairwise(lengths)]
    given = call.query_start_loc
    starts = list(range(0, shape.num_tokens + 1, query_len)) if given is None else given.tolist()
    rows = [(lengths[r], starts[r], starts[r + 1] - starts[r]) for r in range(shape.num_rows)]
    if given is not None:
        rows.append((0, starts[-1], shape.num_tokens - starts[-1]))  # the pad tokens
    units: list[_Unit] = []
    zeros: list[tuple[int, int, int]] = []
    for row, (seq_len, first_token, length) in enumerate(rows):
        for first_query in range(0, length * group, tile.block_m):
            num_queries = min(length * group - first_query, tile.block_m)
            kv_end = seq_len
            if call.causal:
                kv_end = min(kv_end, seq_len - length + (first_query + num_queries - 1) // group + 1)
            position, first_seen = seq_len - length + first_query // group, 0
            if call.sliding_window:
                first_seen = max(position + 1 - call.sliding_window, 0)
            if call.attention_chunk_size:
                first_seen = max(position, 0) // call.attention_chunk_size * call.attention_chunk_size
            first_tile = first_seen // tile.block_n
            tiles = -(-kv_end // tile.block_n) - first_tile if kv_end > 0 else 0
            if tiles > 0:
                units.append((row, first_query, seq_len, first_token, length, first_tile, tiles))
            else:
                zeros.append((first_token, first_query, num_queries if row < shape.num_rows else -num_queries))
    return units, zeros
