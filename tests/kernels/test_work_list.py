"""The device-made schedule: it covers every KV tile of every unit once, in equal parts, for any lengths."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.kernels.attention import work_list as work_list_module
from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS
from graphrt.kernels.attention.call import ScheduleCall
from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.work_list_reference import work_list_reference
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted

HEADS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32}


def make_plan(rows, query_len=1, *, tokens=0, num_sms=4, batch_invariant=False):
    common = {**HEADS, "num_sms": num_sms, "batch_invariant": batch_invariant}
    if query_len:
        return AttentionPlan.decode(rows, query_len=query_len, **common)
    return AttentionPlan.varlen(rows, tokens, **common)


def run_schedule(plan, lengths, query_starts=None, *, device="cpu", **options):
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = None
    if query_starts is not None:
        starts = torch.tensor(query_starts, dtype=torch.int32, device=device)
    work_list = torch.full((plan.work_list_words + 8,), -77, dtype=torch.int32, device=device)
    schedule_attention(plan, seq_lens, work_list, query_start_loc=starts, **options)
    assert (work_list[plan.work_list_words :] == -77).all(), "written beyond the list"
    return work_list.cpu()


def run_reference(
    plan,
    lengths,
    query_starts=None,
    *,
    causal=True,
    sliding_window=0,
    attention_chunk_size=0,
    seq_lens_are_starts=False,
):
    starts = None if query_starts is None else torch.tensor(query_starts)
    work_list = torch.full((plan.work_list_words,), -77, dtype=torch.int32)
    lengths = torch.tensor(lengths)
    spans = causal, sliding_window, attention_chunk_size
    work_list_reference(ScheduleCall(lengths, starts, work_list, *spans, seq_lens_are_starts, plan))
    return work_list


def areas(plan, work_list):
    """Parts, the segments' area as far as it is used, the zeros in use."""
    parts = work_list[: (plan.schedule.num_parts + 1) * PART_WORDS].view(-1, PART_WORDS)
    segments = work_list[parts.numel() :][: plan.max_segments * SEGMENT_WORDS].view(-1, SEGMENT_WORDS)
    zeros = work_list[parts.numel() + segments.numel() :][: 3 * plan.num_units].view(-1, 3)
    return parts, segments[: int(parts[-1, 0])], zeros[: int(parts[-1, 1])]


def segments_of_parts(plan, work_list):
    """The segments of each part, read as the kernels read them."""
    parts, segments, _ = areas(plan, work_list)
    found = []
    for part, following in itertools.pairwise(parts.tolist()):
        begin, end = part[0], following[2]
        assert 0 <= begin <= end <= len(segments)
        of_part = segments[begin:end].tolist()
        if of_part and not plan.schedule.fixed_splits:
            of_part[0] = part[8:]
        found.append(of_part)
    return found


def expected_tiles(plan, lengths, starts, causal, window, chunk):
    """Every (token row of a unit, KV tile) that must be walked, and the units that see nothing, from the definition."""
    walked, blind = set(), set()
    for row, length in enumerate(lengths):
        query_len = starts[row + 1] - starts[row]
        for first in range(0, query_len * plan.shape.group, plan.tile.block_m):
            last = min(first + plan.tile.block_m, query_len * plan.shape.group) - 1
            seen = set()
            for token in range(first // plan.shape.group, last // plan.shape.group + 1):
                end = length - query_len + token + 1 if causal else length
                begin = max(end - window, 0) if window else 0
                if chunk and end > 0:
                    begin = (end - 1) // chunk * chunk
                seen |= {position // plan.tile.block_n for position in range(begin, min(end, length))}
            if seen:
                walked |= {(row, first, tile) for tile in range(min(seen), max(seen) + 1)}
            else:
                blind.add((starts[row], first, last - first + 1))
    return walked, blind


def check_list(plan, work_list, lengths, starts, *, causal=True, window=0, chunk=0):
    parts, segments, zeros = areas(plan, work_list)
    walked, blind = expected_tiles(plan, lengths, starts, causal, window, chunk)
    of_parts = segments_of_parts(plan, work_list)
    seen, by_unit = [], {}
    for part, of_part in enumerate(of_parts):
        for row, first, begin, end, seq_len, query_start, query_len, splits in of_part:
            assert begin < end, "an empty segment"
            assert (seq_len, query_start, query_len) == (lengths[row], starts[row], starts[row + 1] - starts[row])
            seen += [(row, first, tile) for tile in range(begin, end)]
            by_unit.setdefault((row, first), []).append((part, splits & 0xFFFF, splits >> 16))
    assert seen == sorted(seen), "out of order"
    assert len(seen) == len(set(seen))
    assert set(seen) == walked
    for found in by_unit.values():
        assert [(count, split) for _, count, split in found] == [(len(found), i) for i in range(len(found))]
    assert parts[0, 0] == 0
    assert parts[-1, 0] == parts[-1, 2] == len(segments)
    assert parts[:, 1].tolist() == sorted(parts[:, 1].tolist())
    assert parts[0, 1] == 0
    pads = {entry for entry in map(tuple, zeros.tolist()) if entry[2] < 0}
    assert sum(-count for _, _, count in pads) == (plan.shape.num_tokens - starts[-1]) * plan.shape.group
    assert set(map(tuple, zeros.tolist())) - pads == blind
    assert len(zeros) == len(blind) + len(pads)
    if not plan.schedule.fixed_splits:
        assert len(segments) == len(by_unit)
        for found in by_unit.values():  # what the kernel derives the places of partial results from
            assert [part for part, _, _ in found] == list(range(found[0][0], found[0][0] + len(found)))
        overhead, least = plan.schedule.unit_overhead, plan.schedule.min_unit_tiles
        tiles = dict.fromkeys(by_unit, 0)
        for row, first, _ in seen:
            tiles[row, first] += 1
        costs = {unit: max(count + overhead, least) for unit, count in tiles.items()}
        gaps = {unit: costs[unit] - tiles[unit] for unit in tiles}
        loads = [sum(s[3] - s[2] + gaps[s[0], s[1]] for s in of_part) for of_part in of_parts]
        total = sum(costs.values()) - overhead
        active = min(max(total // plan.schedule.min_part_tiles, 1), plan.schedule.num_parts)
        assert all(not load for load in loads[active:])
        most = max([overhead, *gaps.values()])
        assert max(loads) <= -(-max(total, 1) // active) + 2 * most, "parts are not equal"


def assert_same_list(plan, have, want):
    """All that is read."""
    assert segments_of_parts(plan, have) == segments_of_parts(plan, want)
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
    "rows_of_all_warps": [37 * i % 211 for i in range(300)],
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
    if variant == "warps":  # as of a plan of the CUDA kernel
        schedule = replace(plan.schedule, num_parts=384, unit_overhead=0, min_unit_tiles=6)
        plan = replace(plan, schedule=schedule, tile=replace(plan.tile, block_n=16))
    starts = list(range(0, len(lengths) * query_len + 1, query_len))
    spans = {"sliding_window": window, "attention_chunk_size": chunk}
    kernel = run_schedule(plan, lengths, device=kernel_device, **spans)
    check_list(plan, kernel, lengths, starts, window=window, chunk=chunk)
    reference = run_reference(plan, lengths, **spans)
    check_list(plan, reference, lengths, starts, window=window, chunk=chunk)
    assert_same_list(plan, kernel, reference)


VARLEN_CASES = {
    # lengths, query lengths, pad tokens
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


def check_many_rows(rows, variant, device):
    """In one block of units, and in several."""
    lengths = [37 * i % 2011 if i % 8 else 0 for i in range(rows)]
    mixed = variant == "mixed"
    query_lens = [min(length, i % 3) if mixed else 1 for i, length in enumerate(lengths)]
    starts = [0, *itertools.accumulate(query_lens)]
    spans = {"window": {"sliding_window": 70}, "chunks": {"attention_chunk_size": 70}}.get(variant, {})
    plan = make_plan(rows, 0 if mixed else 1, tokens=starts[-1] if mixed else None, batch_invariant=variant == "fixed")
    given = starts if mixed else None
    kernel = run_schedule(plan, lengths, given, device=device, **spans)
    assert_same_list(plan, kernel, run_reference(plan, lengths, given, **spans))


@pytest.mark.parametrize("rows", [1100, 2500])
@pytest.mark.parametrize("variant", ["plain", "window", "chunks", "mixed"])
def test_many_rows(rows, variant, kernel_device):
    check_many_rows(rows, variant, kernel_device)


@pytest.mark.gpu  # for minutes under the interpreter, which sees these paths with fewer rows
@pytest.mark.parametrize("rows", [1000, 1100, 2500])
def test_many_rows_of_fixed_splits(rows):
    check_many_rows(rows, "fixed", "cuda")


@pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="needs the Triton interpreter")
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=300),
    st.integers(1, 40),
    st.integers(0, 200),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 40),
    st.sampled_from([32, 512]),  # units that a program looks at together: one block of them, and several
)
def test_any_lengths(lengths, num_sms, span, chunked, fixed, unit_overhead, min_unit_tiles, min_part_tiles, unit_block):
    made = make_plan(len(lengths), num_sms=num_sms, batch_invariant=fixed)
    costs = {"unit_overhead": unit_overhead, "min_unit_tiles": min_unit_tiles, "min_part_tiles": min_part_tiles}
    plan = replace(made, schedule=replace(made.schedule, **costs))
    spans = {"attention_chunk_size" if chunked else "sliding_window": span}
    with interpreted(), mock.patch.object(work_list_module, "_MAX_UNIT_BLOCK", unit_block):
        kernel = run_schedule(plan, lengths, **spans)
    starts = list(range(len(lengths) + 1))
    check_list(plan, kernel, lengths, starts, **({"chunk": span} if chunked else {"window": span}))
    reference = run_reference(plan, lengths, **spans)
    assert_same_list(plan, kernel, reference)


def test_packed_rows_in_several_blocks_of_units(kernel_device, monkeypatch):
    monkeypatch.setattr(work_list_module, "_MAX_UNIT_BLOCK", 32)
    lengths, query_lens = [40, 0, 900, 3] * 30, [40, 0, 1, 3] * 30
    starts = [0, *itertools.accumulate(query_lens)]
    plan = make_plan(len(lengths), 0, tokens=starts[-1] + 70)
    assert plan.num_units > 2 * 32
    kernel = run_schedule(plan, lengths, starts, device=kernel_device)
    check_list(plan, kernel, lengths, starts)


def test_fixed_splits_depend_on_the_row_alone():
    plan = make_plan(4, batch_invariant=True)
    one = areas(plan, run_schedule(plan, [900, 0, 0, 0]))[1]
    other = areas(plan, run_schedule(plan, [900, 5000, 3, 64]))[1]
    assert torch.equal(one, other[other[:, 0] == 0])


WRONG = {
    "short_list": (
        lambda p: schedule_attention(p, torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)),
        CapacityError,
    ),
    "rows": (lambda p: run_schedule(p, [1, 2]), ShapeError),
    "starts": (lambda p: run_schedule(p, [1, 2, 3], [0, 1, 2, 3]), ShapeError),
    "window": (lambda p: run_schedule(p, [1, 2, 3], sliding_window=-1), ShapeError),
    "chunks": (lambda p: run_schedule(p, [1, 2, 3], attention_chunk_size=-1), ShapeError),
    "chunks_full": (lambda p: run_schedule(p, [1, 2, 3], attention_chunk_size=4, causal=False), ShapeError),
    "chunks_window": (lambda p: run_schedule(p, [1, 2, 3], attention_chunk_size=4, sliding_window=4), ShapeError),
    "window_full": (lambda p: run_schedule(p, [1, 2, 3], sliding_window=4, causal=False), ShapeError),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case):
    call, error = WRONG[case]
    with pytest.raises(error):
        call(make_plan(3))


BAD_PLANS = {
    "query_len": (lambda: make_plan(3, 17), "varlen"),
    "no_rows": (lambda: make_plan(0), "at least 1 row"),
    "no_tokens": (lambda: make_plan(1, 0, tokens=0), "1 token"),
    "heads": (lambda: AttentionPlan.decode(1, **(HEADS | {"num_q_heads": 5}), num_sms=4), "multiple of num_kv_heads=2"),
    "no_plans": (lambda: AttentionWorkspace.allocate([], torch.device("cpu")), "at least one"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plans(case):
    make, text = BAD_PLANS[case]
    with pytest.raises(ShapeError, match=text):
        make()


def test_scratch_tensors_must_be_dense():
    """Else their sizes say nothing about the memory that the kernel addresses."""
    plan = make_plan(2)
    q = torch.zeros(2, 8, 64)
    cache = torch.zeros(4, 16, 2, 64)
    table, lengths = torch.ones(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    workspace = AttentionWorkspace.allocate([plan], q.device)
    work_list = torch.zeros(2 * plan.work_list_words, dtype=torch.int32)
    options = AttentionOptions(1.0)
    with pytest.raises(ShapeError, match="work_list: expected stride 1"):
        paged_attention(q, cache, cache, table, lengths, torch.empty_like(q), plan, work_list[::2], workspace, options)
    flat = replace(workspace, counters=torch.zeros(1, dtype=torch.int32).expand(9999))
    with pytest.raises(ShapeError, match=r"workspace\.counters: expected stride 1"):
        paged_attention(q, cache, cache, table, lengths, torch.empty_like(q), plan, work_list, flat, options)
    with pytest.raises(ShapeError, match="seq_lens: expected stride 1"):
        schedule_attention(plan, torch.ones(4, dtype=torch.int32)[::2], work_list)


def test_plans():
    plans = [make_plan(rows, num_sms=132) for rows in (1, 64, 256)]
    workspace = AttentionWorkspace.allocate(plans, torch.device("cpu"))
    assert workspace.partial_lse.numel() == max(plan.partial_queries for plan in plans)
    assert workspace.counters.numel() == max(plan.num_counters for plan in plans)
    assert all(plan.schedule.num_parts * plan.shape.num_kv_heads <= 8 * 132 for plan in plans)
