"""The work list in plain Python: what the schedule kernel computes in closed form, by walking the line of costs."""

from __future__ import annotations

import itertools

import torch

from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS

_Unit = tuple[int, int, int, int, int, int, int, int]  # row, first row, count, seq_len, query start, query_len, tiles


def work_list_reference(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    work_list: torch.Tensor,
    num_rows: int,
    num_tokens: int,
    num_units: int,
    num_parts: int,
    max_segments: int,
    query_len: int,
    group: int,
    block_m: int,
    block_n: int,
    causal: bool,
    sliding_window: int,
    seq_lens_are_starts: bool,
    fixed_splits: int,
    fixed_tiles: int,
    unit_overhead: int,
    min_unit_tiles: int,
    min_part_tiles: int,
) -> None:
    """Write the list as `schedule_attention` documents it."""
    lengths = seq_lens.tolist()
    if seq_lens_are_starts:
        lengths = [end - start for start, end in itertools.pairwise(lengths)]
    starts = list(range(0, num_tokens + 1, query_len)) if query_start_loc is None else query_start_loc.tolist()
    rows = [(lengths[r], starts[r], starts[r + 1] - starts[r]) for r in range(num_rows)]
    if query_start_loc is not None:
        rows.append((0, starts[-1], num_tokens - starts[-1]))  # the pad tokens
    units: list[_Unit] = []
    zeros: list[tuple[int, int, int]] = []
    for row, (seq_len, query_start, length) in enumerate(rows):
        for first_row in range(0, length * group, block_m):
            count = min(length * group - first_row, block_m)
            kv_end = seq_len
            if causal:
                kv_end = min(kv_end, seq_len - length + (first_row + count - 1) // group + 1)
            first_tile = 0
            if sliding_window:
                first_tile = max(seq_len - length + first_row // group + 1 - sliding_window, 0) // block_n
            tiles = -(-kv_end // block_n) - first_tile if kv_end > 0 else 0
            if tiles > 0:
                units.append((row, first_row, count, seq_len, query_start, length, first_tile, tiles))
            else:
                zeros.append((query_start, first_row, count if row < num_rows else -count))

    total = max(sum(max(unit[-1] + unit_overhead, min_unit_tiles) for unit in units) - unit_overhead, 1)
    active = min(max(total // min_part_tiles, 1), num_parts)
    part_size = -(-total // active)
    cuts = [min(part * part_size, total) for part in range(num_parts)]
    segments: list[list[int]] = []
    positions: list[int] = []  # where each segment begins on the line of costs
    line = -unit_overhead
    for row, first_row, _, seq_len, query_start, length, first_tile, tiles in units:
        line += max(unit_overhead, min_unit_tiles - tiles)
        if fixed_splits:
            splits = min(-(-tiles // fixed_tiles), fixed_splits)
            bounds = [split * tiles // splits for split in range(splits + 1)]
        else:
            bounds = [0, *(cut - line for cut in cuts if line < cut < line + tiles), tiles]
            splits = len(bounds) - 1
        for split in range(splits):
            begin, end = first_tile + bounds[split], first_tile + bounds[split + 1]
            segments.append([row, first_row, begin, end, seq_len, query_start, length, splits | split << 16])
            positions.append(line + bounds[split])
        line += tiles

    is_entry = [fixed_splits > 0 or segment[-1] >> 16 == 0 for segment in segments]
    parts = torch.zeros(num_parts + 1, PART_WORDS, dtype=torch.int32)
    for part in range(num_parts + 1):
        first = sum(position < cuts[part] for position in positions) if part < num_parts else len(segments)
        entries = sum(is_entry[:first])
        parts[part, 0] = entries - 1 if first < len(segments) and not is_entry[first] else entries
        parts[part, 2] = entries
        parts[part, 1] = min(part, num_parts) * len(zeros) // num_parts
        if not fixed_splits and part < num_parts and first < len(segments):
            parts[part, 8:] = torch.tensor(segments[first], dtype=torch.int32)
    segments_at = parts.numel()
    zeros_at = segments_at + max_segments * SEGMENT_WORDS
    work_list[:segments_at] = parts.flatten()
    if segments:
        flat = torch.tensor(list(itertools.compress(segments, is_entry)), dtype=torch.int32).flatten()
        work_list[segments_at : segments_at + flat.numel()] = flat
    if zeros:
        flat = torch.tensor(zeros, dtype=torch.int32).flatten()
        work_list[zeros_at : zeros_at + flat.numel()] = flat
