"""The work list covers every KV tile of every query tile once, in equal partitions, for any lengths."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.kernels.attention import work_list as work_list_module
from graphrt.kernels.attention.attend import PARTITION_WORDS, SPLIT_WORDS
from graphrt.kernels.attention.call import ScheduleCall
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.work_list_reference import work_list_reference
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted

HEADS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32}


def make_plan(reqs, query_len=1, *, tokens=0, num_sms=4, batch_invariant=False):
    common = {**HEADS, "num_sms": num_sms, "batch_invariant": batch_invariant}
    if query_len:
        return AttentionPlan.decode(reqs, query_len=query_len, **common)
    return AttentionPlan.varlen(reqs, tokens, **common)


def run_schedule(plan, lengths, query_starts=None, *, device="cpu", **options):
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = None
    if query_starts is not None:
        starts = torch.tensor(query_starts, dtype=torch.int32, device=device)
    work_list = torch.full((plan.work_list_words + 8,), -77, dtype=torch.int32, device=device)
    schedule_attention(plan, seq_lens, work_list, query_start_loc=starts, **options)
    assert (work_list[plan.work_list_words :] == -77).all(), "written past the end of the list"
    return work_list.cpu()


def run_reference(plan, lengths, query_starts=None, **options):
    starts = None if query_starts is None else torch.tensor(query_starts)
    work_list = torch.full((plan.work_list_words,), -77, dtype=torch.int32)
    call = {"causal": True, "sliding_window": 0, "attention_chunk_size": 0, "seq_lens_are_starts": False, **options}
    work_list_reference(ScheduleCall(torch.tensor(lengths), starts, work_list, plan=plan, **call))
    return work_list


def areas(plan, work_list):
    """The partitions, and the used entries of the splits and zeros areas."""
    partitions = work_list[: (plan.schedule.num_partitions + 1) * PARTITION_WORDS].view(-1, PARTITION_WORDS)
    splits = work_list[partitions.numel() :][: plan.max_split_entries * SPLIT_WORDS].view(-1, SPLIT_WORDS)
    zeros = work_list[partitions.numel() + splits.numel() :][: 3 * plan.num_q_tiles].view(-1, 3)
    return partitions, splits[: int(partitions[-1, 0])], zeros[: int(partitions[-1, 1])]


def splits_of_partitions(plan, work_list):
    """The KV splits of each partition, as the kernels read them."""
    partitions, splits, _ = areas(plan, work_list)
    found = []
    for partition, following in itertools.pairwise(partitions.tolist()):
        begin, end = partition[0], following[2]
        assert 0 <= begin <= end <= len(splits)
        of_partition = splits[begin:end].tolist()
        if of_partition and not plan.schedule.fixed_splits:
            of_partition[0] = partition[8:]
        found.append(of_partition)
    return found


def expected_tiles(plan, lengths, starts, causal, window, chunk):
    """By definition, the KV tiles of each query tile, and the query tiles that see no KV."""
    walked, blind = set(), set()
    for req, length in enumerate(lengths):
        query_len = starts[req + 1] - starts[req]
        for first in range(0, query_len * plan.shape.num_queries_per_kv, plan.tile.block_m):
            last = min(first + plan.tile.block_m, query_len * plan.shape.num_queries_per_kv) - 1
            seen = set()
            for token in range(first // plan.shape.num_queries_per_kv, last // plan.shape.num_queries_per_kv + 1):
                end = length - query_len + token + 1 if causal else length
                begin = max(end - window, 0) if window else 0
                if chunk and end > 0:
                    begin = (end - 1) // chunk * chunk
                seen |= {position // plan.tile.block_n for position in range(begin, min(end, length))}
            if seen:
                walked |= {(req, first, tile) for tile in range(min(seen), max(seen) + 1)}
            else:
                blind.add((starts[req], first, last - first + 1))
    return walked, blind


def check_list(plan, work_list, lengths, starts, *, causal=True, window=0, chunk=0):
    partitions, splits, zeros = areas(plan, work_list)
    walked, blind = expected_tiles(plan, lengths, starts, causal, window, chunk)
    of_partitions = splits_of_partitions(plan, work_list)
    seen, by_q_tile = [], {}
    for partition, of_partition in enumerate(of_partitions):
        for req, first, begin, end, seq_len, query_start, query_len, split_word in of_partition:
            assert begin < end, "an empty split"
            assert (seq_len, query_start, query_len) == (lengths[req], starts[req], starts[req + 1] - starts[req])
            seen += [(req, first, tile) for tile in range(begin, end)]
            by_q_tile.setdefault((req, first), []).append((partition, split_word & 0xFFFF, split_word >> 16))
    assert seen == sorted(seen), "out of order"
    assert len(seen) == len(set(seen))
    assert set(seen) == walked
    for found in by_q_tile.values():
        assert [(count, split) for _, count, split in found] == [(len(found), i) for i in range(len(found))]
    assert partitions[0, 0] == 0
    assert partitions[-1, 0] == partitions[-1, 2] == len(splits)
    assert partitions[:, 1].tolist() == sorted(partitions[:, 1].tolist())
    assert partitions[0, 1] == 0
    pads = {entry for entry in map(tuple, zeros.tolist()) if entry[2] < 0}
    assert sum(-count for _, _, count in pads) == (plan.shape.num_tokens - starts[-1]) * plan.shape.num_queries_per_kv
    assert set(map(tuple, zeros.tolist())) - pads == blind
    assert len(zeros) == len(blind) + len(pads)
    if not plan.schedule.fixed_splits:
        assert len(splits) == len(by_q_tile)
        for found in by_q_tile.values():  # the kernel derives the indices of partial results from it
            assert [partition for partition, _, _ in found] == list(range(found[0][0], found[0][0] + len(found)))
        overhead, least = plan.schedule.q_tile_overhead, plan.schedule.min_q_tile_cost
        tiles = dict.fromkeys(by_q_tile, 0)
        for req, first, _ in seen:
            tiles[req, first] += 1
        costs = {q_tile: max(count + overhead, least) for q_tile, count in tiles.items()}
        gaps = {q_tile: costs[q_tile] - tiles[q_tile] for q_tile in tiles}
        loads = [sum(s[3] - s[2] + gaps[s[0], s[1]] for s in of_partition) for of_partition in of_partitions]
        total = sum(costs.values()) - overhead
        active = min(max(total // plan.schedule.min_partition_tiles, 1), plan.schedule.num_partitions)
        assert all(not load for load in loads[active:])
        most = max([overhead, *gaps.values()])
        assert max(loads) <= -(-max(total, 1) // active) + 2 * most, "partitions are not equal"


def assert_same_list(plan, have, want):
    """Compare all words that the kernels read."""
    assert splits_of_partitions(plan, have) == splits_of_partitions(plan, want)
    (ours, _, our_zeros), (theirs, _, their_zeros) = areas(plan, have), areas(plan, want)
    assert torch.equal(ours[:, 1], theirs[:, 1])
    assert torch.equal(our_zeros, their_zeros)


DECODE_CASES = {
    "one": [1],
    "tile_edges": [31, 32, 33, 1, 64],
    "ragged": [700, 3, 0, 40, 1, 129, 0, 64],
    "one_long": [5000, 1, 1, 1, 1, 1],
    "many_short": [1] * 40,
    "all_pads": [0, 0, 0],
    "pads_around": [0, 0, 300, 0],
    "reqs_of_all_warps": [37 * i % 211 for i in range(300)],
    "blocks_of_units": [i % 7 for i in range(600)],
}


@pytest.mark.parametrize("case", DECODE_CASES)
@pytest.mark.parametrize(
    "variant", ["plain", "speculative", "window", "chunks", "speculative_chunks", "fixed", "warps"]
)
def test_decode_lists(case, variant, kernel_device):
    lengths = DECODE_CASES[case]
    query_len = 5 if variant.startswith("speculative") else 1
    window, chunk = 70 if variant == "window" else 0, 67 if variant.endswith("chunks") else 0
    plan = make_plan(len(lengths), query_len, batch_invariant=variant == "fixed")
    if variant == "warps":  # as in plans of the CUDA kernel
        schedule = replace(plan.schedule, num_partitions=384, q_tile_overhead=0, min_q_tile_cost=6)
        plan = replace(plan, schedule=schedule, tile=replace(plan.tile, block_n=16))
    starts = list(range(0, len(lengths) * query_len + 1, query_len))
    spans = {"sliding_window": window, "attention_chunk_size": chunk}
    kernel = run_schedule(plan, lengths, device=kernel_device, **spans)
    check_list(plan, kernel, lengths, starts, window=window, chunk=chunk)
    reference = run_reference(plan, lengths, **spans)
    check_list(plan, reference, lengths, starts, window=window, chunk=chunk)
    assert_same_list(plan, kernel, reference)


VARLEN_CASES = {
    # lengths, query lengths, padding tokens
    "prompts": ([40, 7, 300], [40, 7, 100], 5),
    "mixed": ([900, 33, 1, 64, 0], [1, 33, 1, 20, 0], 9),
    "no_pads": ([20, 30], [20, 30], 0),
    "only_pads": ([0, 0], [0, 0], 16),
    "many": ([37 * i % 211 + i % 4 for i in range(300)], [i % 4 for i in range(300)], 20),
}


@pytest.mark.parametrize("case", VARLEN_CASES)
@pytest.mark.parametrize("variant", ["causal", "full", "window", "chunks", "fixed", "starts"])
def test_varlen_lists(case, variant, kernel_device):
    lengths, query_lens, pads = VARLEN_CASES[case]
    starts = [0, *itertools.accumulate(query_lens)]
    window, chunk = 50 if variant == "window" else 0, 48 if variant == "chunks" else 0
    options = {"causal": variant != "full", "sliding_window": window, "attention_chunk_size": chunk}
    given_lengths = lengths
    if variant == "starts":
        options["seq_lens_are_starts"] = True
        given_lengths = [0, *itertools.accumulate(lengths)]
    plan = make_plan(len(lengths), 0, tokens=starts[-1] + pads, batch_invariant=variant == "fixed")
    kernel = run_schedule(plan, given_lengths, starts, device=kernel_device, **options)
    reference = run_reference(plan, given_lengths, starts, **options)
    for work_list in (kernel, reference):
        check_list(plan, work_list, lengths, starts, causal=options["causal"], window=window, chunk=chunk)
    assert_same_list(plan, kernel, reference)


def check_many_reqs(reqs, variant, device):
    """Fits one block of query tiles, or needs several."""
    lengths = [37 * i % 2011 if i % 8 else 0 for i in range(reqs)]
    mixed = variant == "mixed"
    query_lens = [min(length, i % 3) if mixed else 1 for i, length in enumerate(lengths)]
    starts = [0, *itertools.accumulate(query_lens)]
    spans = {"window": {"sliding_window": 70}, "chunks": {"attention_chunk_size": 70}}.get(variant, {})
    plan = make_plan(reqs, 0 if mixed else 1, tokens=starts[-1] if mixed else None, batch_invariant=variant == "fixed")
    given = starts if mixed else None
    kernel = run_schedule(plan, lengths, given, device=device, **spans)
    assert_same_list(plan, kernel, run_reference(plan, lengths, given, **spans))


@pytest.mark.parametrize("reqs", [1100, 2500])
@pytest.mark.parametrize("variant", ["plain", "window", "chunks", "mixed"])
def test_many_reqs(reqs, variant, kernel_device):
    check_many_reqs(reqs, variant, kernel_device)


@pytest.mark.gpu  # takes minutes in the interpreter, where other tests cover these paths
@pytest.mark.parametrize("reqs", [1000, 1100, 2500])
def test_many_reqs_of_fixed_splits(reqs):
    check_many_reqs(reqs, "fixed", "cuda")


@pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="needs the Triton interpreter")
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=120),
    st.integers(1, 40),
    st.integers(0, 200),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 40),
    st.sampled_from([32, 512]),  # query tiles that a program processes at once: all, or a block of them
)
def test_any_lengths(lengths, num_sms, span, chunked, fixed, overhead, min_cost, min_partition, q_tile_block):
    made = make_plan(len(lengths), num_sms=num_sms, batch_invariant=fixed)
    costs = {"q_tile_overhead": overhead, "min_q_tile_cost": min_cost, "min_partition_tiles": min_partition}
    plan = replace(made, schedule=replace(made.schedule, **costs))
    spans = {"attention_chunk_size" if chunked else "sliding_window": span}
    with interpreted(), mock.patch.object(work_list_module, "_MAX_Q_TILE_BLOCK", q_tile_block):
        kernel = run_schedule(plan, lengths, **spans)
    starts = list(range(len(lengths) + 1))
    check_list(plan, kernel, lengths, starts, **({"chunk": span} if chunked else {"window": span}))
    reference = run_reference(plan, lengths, **spans)
    assert_same_list(plan, kernel, reference)


def test_packed_reqs_in_several_blocks_of_q_tiles(kernel_device, monkeypatch):
    monkeypatch.setattr(work_list_module, "_MAX_Q_TILE_BLOCK", 32)
    lengths, query_lens = [40, 0, 900, 3] * 30, [40, 0, 1, 3] * 30
    starts = [0, *itertools.accumulate(query_lens)]
    plan = make_plan(len(lengths), 0, tokens=starts[-1] + 70)
    assert plan.num_q_tiles > 2 * 32
    kernel = run_schedule(plan, lengths, starts, device=kernel_device)
    check_list(plan, kernel, lengths, starts)


def test_fixed_splits_are_independent_of_other_reqs():
    plan = make_plan(4, batch_invariant=True)
    one = areas(plan, run_schedule(plan, [900, 0, 0, 0]))[1]
    other = areas(plan, run_schedule(plan, [900, 5000, 3, 64]))[1]
    assert torch.equal(one, other[other[:, 0] == 0])
