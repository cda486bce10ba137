"""Captured attention: ten thousand replays beside another kernel, and lengths far from those of the capture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from tests.support.attention_cases import BF16, E4M3, NAN, Case, Problem, assert_accurate, decode, make_problem

pytestmark = pytest.mark.gpu

ROWS = 48
BASE = Case("", decode((1500,) * ROWS), dtype=BF16, num_kv_heads=8, head_dim=128, lse=False, num_sms=132)
# How a row that several blocks share is merged; rows have the capacity for their longest mix.
MERGES = {
    "letters": BASE,
    "letters_fp8": replace(BASE, kv_dtype=E4M3),
    "letters_of_two_sizes": replace(BASE, head_dim=192, v_head_dim=128),
    "letters_in_groups": replace(BASE, rows=decode((20000,) * 4), num_kv_heads=1),
    "cluster_of_8": replace(BASE, rows=decode((9000,))),
    "clusters_of_2": replace(BASE, rows=decode((9000,) * 3), num_kv_heads=1, group=16),
    "fixed_splits": replace(BASE, rows=decode((3000,) * 12), batch_invariant=True),
    "triton": replace(BASE, native=False),
}
TURNS = 10_000


def schedule_and_attend(plan: AttentionPlan, layers: tuple[Problem, Problem]) -> None:
    """One schedule, and two layers by it that share a workspace."""
    workspace, work_list = layers[0].scratch(plan)
    schedule_attention(plan, layers[0].seq_lens, work_list, **layers[0].case.spans)
    for layer in layers:
        tensors = (layer.q, layer.k_cache, layer.v_cache, layer.block_table, layers[0].seq_lens)
        paged_attention(*tensors, layer.out, plan, work_list, workspace, layer.options)


def capture(layers: tuple[Problem, Problem]) -> torch.cuda.CUDAGraph:
    plan = layers[0].decode_plan()
    schedule_and_attend(plan, layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        schedule_and_attend(plan, layers)
    return graph


def make_layers(case: Case, rng: torch.Generator) -> tuple[Problem, Problem]:
    """Two layers over pages for rows of the case's lengths."""
    return make_problem(case, rng, torch.device("cuda")), make_problem(case, rng, torch.device("cuda"))


def check(problem: Problem, lengths: list[int]) -> None:
    """A few rows of the output against the oracle."""
    rows = sorted({0, min(1, len(lengths) - 1), len(lengths) - 1})
    part = replace(
        problem,
        case=replace(problem.case, rows=tuple((lengths[row], 1) for row in rows)),
        q=problem.q[rows],
        dense=[(problem.dense[row][0][: lengths[row]], problem.dense[row][1][: lengths[row]]) for row in rows],
    )
    assert_accurate(part, problem.out[rows].cpu())


def make_mixes(case: Case, rng: torch.Generator) -> dict[str, list[int]]:
    rows, longest = len(case.rows), case.rows[0][0]
    return {
        "uniform": [longest // 3] * rows,
        "one_long": [longest] + [16] * (rows - 1),
        "ragged": torch.randint(0, longest, (rows,), generator=rng).tolist(),
        "pads": [0 if row % 3 else longest // 2 for row in range(rows)],
        "short": [1] * rows,
    }


def most_splits(plan: AttentionPlan, work_list: torch.Tensor) -> int:
    """Of any unit of the list."""
    words = work_list.cpu()
    segments = words[plan.segments_at :][: 8 * int(words[plan.schedule.num_parts * 16 + 2])].view(-1, 8)
    return int((segments[:, 7] & 0xFFFF).max())


@pytest.mark.alone
@pytest.mark.parametrize("merge", MERGES)
def test_ten_thousand_replays_beside_another_kernel(merge: str, rng: torch.Generator) -> None:
    """Each replay takes another mix of lengths, and is compared with the first of that mix, on the device."""
    case = MERGES[merge]
    layers = make_layers(case, rng)
    plan, mixes = layers[0].decode_plan(), make_mixes(case, rng)
    workspace, work_list = layers[0].scratch(plan)
    lengths = torch.tensor(list(mixes.values()), dtype=torch.int32, device="cuda")
    expected, splits = [], []
    for mix in mixes.values():
        layers[0].seq_lens.copy_(torch.tensor(mix))
        schedule_and_attend(plan, layers)
        splits.append(most_splits(plan, work_list))
        for layer in layers:
            check(layer, mix)
        expected.append(torch.stack([layer.out.view(torch.int16) for layer in layers]))
    # The case merges in the way that it is named for.
    native = plan.native
    across = max(splits) // (native.warps if native is not None and plan.parts_are_warps else 1)
    cluster = 1 if native is None else native.cluster
    assert across >= (2 * plan.merge_bundle if merge == "letters_in_groups" else 2) or cluster == 8, splits
    assert cluster == {"cluster_of_8": 8, "clusters_of_2": 2}.get(merge, 1)

    stacked = torch.stack(expected)
    order = torch.randint(len(mixes), (997,), generator=rng).cuda()
    turn, wrong = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))

    def step() -> None:
        which = order[turn % len(order)]
        layers[0].seq_lens.copy_(lengths[which].squeeze(0))
        schedule_and_attend(plan, layers)
        got = torch.stack([layer.out.view(torch.int16) for layer in layers])
        wrong.add_((got != stacked[which].squeeze(0)).any())
        turn.add_(1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    noise, busy = torch.randn(4096, 4096, device="cuda", dtype=BF16), torch.cuda.Stream()
    busy.wait_stream(torch.cuda.current_stream())
    for done in range(TURNS):
        if done % 10 == 0:
            with torch.cuda.stream(busy):  # as long as ten replays, or longer
                for _ in range(4):
                    torch.mm(noise, noise)
        if done % 97 == 0:
            workspace.partial_out.fill_(NAN)
            workspace.partial_lse.fill_(NAN)
            work_list.fill_(-(1 << 30))
            for layer in layers:
                layer.out.fill_(NAN)
        graph.replay()
    assert turn.item() == TURNS + 1
    assert wrong.item() == 0
    assert not workspace.counters.any()


def spanned(layer: Problem, window: int, chunk: int) -> Problem:
    """The layer with a window or chunks. It is made without: what they hide at one length they show at others."""
    options = replace(layer.options, sliding_window=window, attention_chunk_size=chunk)
    return replace(layer, case=replace(layer.case, window=window, chunk=chunk), options=options)


@pytest.mark.parametrize("captured", [1, 2000])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (300, 0), (0, 256), (0, 300)])
def test_capture_at_one_length_and_replay_at_others(
    window: int, chunk: int, captured: int, rng: torch.Generator
) -> None:
    one, two = make_layers(replace(BASE, rows=decode((2000,) * ROWS)), rng)
    layers = spanned(one, window, chunk), spanned(two, window, chunk)
    layers[0].seq_lens.fill_(captured)
    graph = capture(layers)
    crossing = [256, 257, 300, 301, 600, 512] * (ROWS // 6)
    ragged = list(range(0, 2000, 41))[:ROWS]
    for lengths in ([2000] * ROWS, [1] * ROWS, ragged, crossing, [0] * (ROWS - 1) + [2000]):
        layers[0].seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for layer in layers:
            layer.out.fill_(777.0)
        graph.replay()
        for layer in layers:
            check(layer, lengths)
