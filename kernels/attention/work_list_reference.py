"""Plain Python reference of the work list, using loops over the linearized work instead of closed forms."""

from __future__ import annotations

import itertools

import torch

from graphrt.kernels.attention.attend import PARTITION_WORDS
from graphrt.kernels.attention.call import ScheduleCall

_QTile = tuple[int, int, int, int, int, int, int]
"""Request, first query, seq_len, first token of the request, query_len, first KV tile, number of KV tiles."""


def work_list_reference(call: ScheduleCall) -> None:
    """Write the work list that work_list.py describes."""
    plan, schedule = call.plan, call.plan.schedule
    num_partitions, q_tile_overhead = schedule.num_partitions, schedule.q_tile_overhead
    q_tiles, zeros = _q_tiles(call)

    # The linearized work: each query tile has an overhead and its KV tiles.
    total = max(
        sum(max(q_tile[-1] + q_tile_overhead, schedule.min_q_tile_cost) for q_tile in q_tiles) - q_tile_overhead, 1
    )
    active = min(max(total // schedule.min_partition_tiles, 1), num_partitions)
    partition_size = -(-total // active)
    boundaries = [min(partition * partition_size, total) for partition in range(num_partitions)]

    # KV splits: query tiles are split at partition boundaries, or by their own lengths.
    splits: list[list[int]] = []
    begins: list[int] = []  # work offset of each split
    offset = -q_tile_overhead
    for req, first_query, seq_len, first_token, length, first_kv_tile, kv_tiles in q_tiles:
        offset += max(q_tile_overhead, schedule.min_q_tile_cost - kv_tiles)
        if schedule.fixed_splits:
            num_splits = min(-(-kv_tiles // schedule.min_split_tiles), schedule.fixed_splits)
            bounds = [split_index * kv_tiles // num_splits for split_index in range(num_splits + 1)]
        else:
            bounds = [
                0,
                *(boundary - offset for boundary in boundaries if offset < boundary < offset + kv_tiles),
                kv_tiles,
            ]
            num_splits = len(bounds) - 1
        for split_index in range(num_splits):
            begin, end = first_kv_tile + bounds[split_index], first_kv_tile + bounds[split_index + 1]
            splits.append([req, first_query, begin, end, seq_len, first_token, length, num_splits | split_index << 16])
            begins.append(offset + bounds[split_index])
        offset += kv_tiles

    # Partitions: each has the splits that start at its boundary or later.
    is_entry = [schedule.fixed_splits > 0 or kv_split[-1] >> 16 == 0 for kv_split in splits]
    partitions = torch.zeros(num_partitions + 1, PARTITION_WORDS, dtype=torch.int32, device="cpu")
    for partition in range(num_partitions + 1):
        first = sum(begin < boundaries[partition] for begin in begins) if partition < num_partitions else len(splits)
        entries = sum(is_entry[:first])
        partitions[partition, 0] = entries - 1 if first < len(splits) and not is_entry[first] else entries
        partitions[partition, 2] = entries
        partitions[partition, 1] = min(partition, num_partitions) * len(zeros) // num_partitions
        if not schedule.fixed_splits and partition < num_partitions and first < len(splits):
            partitions[partition, 8:] = torch.tensor(splits[first], dtype=torch.int32, device="cpu")

    work_list = call.work_list
    work_list[: plan.splits_at] = partitions.flatten()
    if splits:
        flat = torch.tensor(list(itertools.compress(splits, is_entry)), dtype=torch.int32, device="cpu").flatten()
        work_list[plan.splits_at : plan.splits_at + flat.numel()] = flat
    if zeros:
        flat = torch.tensor(zeros, dtype=torch.int32, device="cpu").flatten()
        work_list[plan.zeros_at : plan.zeros_at + flat.numel()] = flat


def _q_tiles(call: ScheduleCall) -> tuple[list[_QTile], list[tuple[int, int, int]]]:
    """Return the query tiles that see KV, and the entries of those that do not."""
    shape, tile = call.plan.shape, call.plan.tile
    num_queries_per_kv, query_len = shape.num_queries_per_kv, shape.query_len
    lengths = call.seq_lens.tolist()
    if call.seq_lens_are_starts:
        lengths = [end - start for start, end in itertools.pairwise(lengths)]
    given = call.query_start_loc
    starts = list(range(0, shape.num_tokens + 1, query_len)) if given is None else given.tolist()
    reqs = [(lengths[r], starts[r], starts[r + 1] - starts[r]) for r in range(shape.num_reqs)]
    if given is not None:
        reqs.append((0, starts[-1], shape.num_tokens - starts[-1]))  # the padding tokens
    q_tiles: list[_QTile] = []
    zeros: list[tuple[int, int, int]] = []
    for req, (seq_len, first_token, length) in enumerate(reqs):
        for first_query in range(0, length * num_queries_per_kv, tile.block_m):
            num_queries = min(length * num_queries_per_kv - first_query, tile.block_m)
            kv_end = seq_len
            if call.causal:
                kv_end = min(kv_end, seq_len - length + (first_query + num_queries - 1) // num_queries_per_kv + 1)
            position, first_seen = seq_len - length + first_query // num_queries_per_kv, 0
            if call.sliding_window:
                first_seen = max(position + 1 - call.sliding_window, 0)
            if call.attention_chunk_size:
                first_seen = max(position, 0) // call.attention_chunk_size * call.attention_chunk_size
            first_kv_tile = first_seen // tile.block_n
            kv_tiles = -(-kv_end // tile.block_n) - first_kv_tile if kv_end > 0 else 0
            if kv_tiles > 0:
                q_tiles.append((req, first_query, seq_len, first_token, length, first_kv_tile, kv_tiles))
            else:
                zeros.append((first_token, first_query, num_queries if req < shape.num_reqs else -num_queries))
    return q_tiles, zeros
