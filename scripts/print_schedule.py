"""Print how a decode batch is divided into work partitions, and the KV splits of each partition.

    python scripts/print_schedule.py --seq-lens 1x32768+63x512
    python scripts/print_schedule.py --seq-lens 96+32+160 --num-q-heads 16 --num-kv-heads 4 --num-sms 2 --triton

No GPU is needed: --num-sms gives the number of multiprocessors (132 on an H200). docs/attention.md explains the terms.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from graphrt.kernels.attention.attend import PARTITION_WORDS, SPLIT_WORDS
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.errors import ConfigError, GraphRTError

_SHOWN = 4
"""Lines shown at the start and at the end of a shortened table."""


@dataclass(frozen=True, slots=True)
class ListedSplit:
    """A KV split of the work list.

    req                       index of the request in the batch
    first_query               first query of its query tile, within the request
    tile_begin, tile_end      KV tiles of the split, excluding tile_end
    split_index, num_splits   index of the split within the query tile, and the number of KV splits of the query tile
    """

    req: int
    first_query: int
    tile_begin: int
    tile_end: int
    split_index: int
    num_splits: int


def parse_seq_lens(text: str) -> list[int]:
    """Parse sequence lengths: "1x32768+63x512" is one sequence of 32768 tokens, then 63 of 512.

    Raises: ConfigError.
    """
    lengths: list[int] = []
    for item in text.split("+"):
        match = re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,9})", item.strip())
        if match is None:
            raise ConfigError(
                f"seq_lens: expected counts and lengths such as 1x32768+63x512, got {text!r}; correct {item!r}"
            )
        lengths += [int(match[2])] * int(match[1] or 1)
    return lengths


def read_partitions(plan: AttentionPlan, work_list: torch.Tensor) -> list[list[ListedSplit]]:
    """Return the KV splits that the kernels read for each partition."""
    words = work_list.tolist()

    def listed(at: int) -> ListedSplit:
        req, first_query, begin, end, _, _, _, split_word = words[at : at + SPLIT_WORDS]
        return ListedSplit(req, first_query, begin, end, split_word >> 16, split_word & 0xFFFF)

    partitions = []
    for partition in range(plan.schedule.num_partitions):
        at = partition * PARTITION_WORDS
        begin, end = words[at], words[at + PARTITION_WORDS + 2]
        splits = [listed(plan.splits_at + entry * SPLIT_WORDS) for entry in range(begin, end)]
        if splits and not plan.schedule.fixed_splits:
            splits[0] = listed(at + 8)
        partitions.append(splits)
    return partitions


def explain_schedule(plan: AttentionPlan, seq_lens: Sequence[int], *, every_line: bool, **spans: int) -> str:
    """Return the plan, the total work, the query tiles and the partitions of a decode batch as text.

    The numbers are those of a work list that `schedule_attention` wrote, which the kernels use.

    seq_lens     KV tokens of each request
    every_line   do not shorten the tables
    spans        `sliding_window` and `attention_chunk_size`
    """
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32, device="cpu")
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device="cpu")
    schedule_attention(plan, lengths, work_list, **spans)
    partitions = read_partitions(plan, work_list)
    q_tiles: dict[tuple[int, int], list[tuple[int, ListedSplit]]] = {}
    for partition, splits in enumerate(partitions):
        for split in splits:
            q_tiles.setdefault((split.req, split.first_query), []).append((partition, split))
    sections = [
        _plan_lines(plan, seq_lens),
        *_work_and_q_tiles(plan, q_tiles, every_line),
        _partition_lines(plan, partitions, every_line),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _plan_lines(plan: AttentionPlan, seq_lens: Sequence[int]) -> list[str]:
    shape, schedule, native = plan.shape, plan.schedule, plan.native
    reqs = ", ".join(f"{len(list(same))} x {length}" for length, same in itertools.groupby(seq_lens))
    if native is None:
        kernel, owner = "Triton", f"program of {_count(plan.tile.num_warps, 'warp')}"
    else:
        kernel = f"CUDA: {_count(plan.native_blocks, 'block')} of {native.warps} warps per KV head"
        owner = f"cluster of {native.cluster} blocks" if native.cluster > 1 else "block"
        owner = "warp" if plan.partition_per_warp else owner
    new = _count(shape.query_len, "new token")
    of = f"{shape.head_dim}" if shape.v_head_dim == shape.head_dim else f"{shape.head_dim}, V of {shape.v_head_dim}"
    q_tiles = -(-shape.queries_per_req // plan.tile.block_m)
    splits = "at partition boundaries"
    if schedule.fixed_splits:
        splits = f"fixed: at most {schedule.fixed_splits} per query tile, of at least {schedule.min_split_tiles} tiles"
    return [
        f"requests     {shape.num_reqs}: {reqs} tokens",
        f"heads        {shape.num_queries_per_kv * shape.num_kv_heads} query, {shape.num_kv_heads} KV, of {of}",
        f"queries      {new} x {shape.num_queries_per_kv} heads per KV head = {shape.queries_per_req} per request",
        f"query tiles  of up to {plan.tile.block_m} queries: {q_tiles} per request",
        f"KV tiles     of {plan.tile.block_n} tokens",
        f"kernel       {kernel}",
        f"partitions   {schedule.num_partitions} per KV head, one for each {owner}",
        f"cost         of a query tile: KV tiles + {schedule.q_tile_overhead}, at least {schedule.min_q_tile_cost}",
        f"KV splits    {splits}",
    ]


def _work_and_q_tiles(
    plan: AttentionPlan, q_tiles: dict[tuple[int, int], list[tuple[int, ListedSplit]]], every_line: bool
) -> Iterator[list[str]]:
    schedule = plan.schedule
    table = ["request  query  tiles  cost   work range         partitions   splits"]
    work = -schedule.q_tile_overhead
    for (req, first_query), found in q_tiles.items():
        tiles = found[-1][1].tile_end - found[0][1].tile_begin
        cost = max(tiles + schedule.q_tile_overhead, schedule.min_q_tile_cost)
        work += cost
        table.append(
            f"{req:<8} {first_query:<6} {tiles:<6} {cost:<6} {f'{work - tiles} to {work}':<18} "
            f"{_range(found[0][0], found[-1][0]):<12} {len(found)}"
        )
    total = max(work, 1)
    active = min(max(total // schedule.min_partition_tiles, 1), schedule.num_partitions)
    yield [
        f"total work   {total} tiles",
        f"partition    {total} / {active} partitions, rounded up = {-(-total // active)} tiles",
    ]
    yield [*table[:1], *_shortened(table[1:], every_line)]


def _partition_lines(plan: AttentionPlan, partitions: list[list[ListedSplit]], every_line: bool) -> list[str]:
    table = []
    per_block = plan.native.warps if plan.native is not None and plan.partition_per_warp else 0
    for partition, splits in enumerate(partitions):
        owner = f"{partition // per_block:<5} " if per_block else ""
        texts = [f"request {s.req} tiles {s.tile_begin} to {s.tile_end} ({_share(s)})" for s in splits]
        table.append(f"{partition:<9} {owner}{'; '.join(texts) or 'none'}")
    heading = "partition block KV splits" if per_block else "partition KV splits"
    return [heading, *_shortened(table, every_line)]


def _share(split: ListedSplit) -> str:
    return "not split" if split.num_splits == 1 else f"split {split.split_index} of {split.num_splits}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _shortened(lines: list[str], every_line: bool) -> list[str]:
    hidden = len(lines) - 2 * _SHOWN
    if every_line or hidden <= 1:
        return lines
    return [*lines[:_SHOWN], f"...   {hidden} more", *lines[-_SHOWN:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", required=True, metavar="LENGTHS", help="such as 1x32768+63x512")
    parser.add_argument("--num-q-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-head-dim", type=int, help="default: --head-dim")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=("float8_e4m3fn", "float8_e5m2"), help="default: --dtype")
    parser.add_argument("--num-sms", type=int, default=132, help="streaming multiprocessors of the GPU (default: 132)")
    parser.add_argument("--query-len", type=int, default=1, help="new tokens per request (default: 1)")
    parser.add_argument("--window", type=int, default=0, help="sliding window; 0: none")
    parser.add_argument("--chunk", type=int, default=0, help="attention_chunk_size; 0: none")
    parser.add_argument("--batch-invariant", action="store_true", help="split each request by its own length")
    parser.add_argument("--triton", action="store_true", help="plan for the Triton kernel instead of the CUDA kernel")
    parser.add_argument("--all", action="store_true", help="do not shorten the tables")
    arguments = parser.parse_args()
    try:
        seq_lens = parse_seq_lens(arguments.seq_lens)
        plan = AttentionPlan.decode(
            len(seq_lens),
            num_q_heads=arguments.num_q_heads,
            num_kv_heads=arguments.num_kv_heads,
            head_dim=arguments.head_dim,
            v_head_dim=arguments.v_head_dim,
            dtype=getattr(torch, arguments.dtype),
            kv_dtype=None if arguments.kv_dtype is None else getattr(torch, arguments.kv_dtype),
            num_sms=arguments.num_sms,
            query_len=arguments.query_len,
            batch_invariant=arguments.batch_invariant,
            native=not arguments.triton,
        )
        spans = {"sliding_window": arguments.window, "attention_chunk_size": arguments.chunk}
        print(explain_schedule(plan, seq_lens, every_line=arguments.all, **spans))
    except GraphRTError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
