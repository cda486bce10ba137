"""Captured attention: ten thousand replays concurrent with another kernel, and replays with other lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from tests.support.attention_cases import BF16, E4M3, NAN, Case, Problem, assert_accurate, decode, make_problem

pytestmark = pytest.mark.gpu

REQS = 48
BASE = Case("", decode((1500,) * REQS), dtype=BF16, num_kv_heads=8, head_dim=128, lse=False, num_sms=132)
# How the partial results of several blocks are merged. Requests have the capacity of the longest mix.
MERGES = {
    "fixup": BASE,
    "fixup_fp8": replace(BASE, kv_dtype=E4M3),
    "fixup_of_two_head_sizes": replace(BASE, head_dim=192, v_head_dim=128),
    "fixup_in_merge_groups": replace(BASE, reqs=decode((20000,) * 4), num_kv_heads=1),
    "cluster_of_8": replace(BASE, reqs=decode((9000,))),
    "clusters_of_2": replace(BASE, reqs=decode((9000,) * 3), num_kv_heads=1, gqa=16),
    "fixed_splits": replace(BASE, reqs=decode((3000,) * 12), batch_invariant=True),
    "triton": replace(BASE, native=False),
}
TURNS = 10_000


def schedule_and_attend(plan: AttentionPlan, layers: tuple[Problem, Problem]) -> None:
    """One schedule for two layers that share a workspace. Their kernels start early, as in a step."""
    workspace, work_list = layers[0].scratch(plan)
    schedule_attention(plan, layers[0].seq_lens, work_list, **layers[0].case.spans)
    for layer in layers:
        tensors = (layer.q, layer.k_cache, layer.v_cache, layer.block_table, layers[0].seq_lens)
        paged_attention(*tensors, layer.out, plan, work_list, workspace, layer.options, pdl=True)


def capture(layers: tuple[Problem, Problem]) -> torch.cuda.CUDAGraph:
    plan = layers[0].decode_plan()
    schedule_and_attend(plan, layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        schedule_and_attend(plan, layers)
    return graph


def make_layers(case: Case, rng: torch.Generator) -> tuple[Problem, Problem]:
    """Two layers with pages for requests of the case's lengths."""
    return make_problem(case, rng, torch.device("cuda")), make_problem(case, rng, torch.device("cuda"))


def check(problem: Problem, lengths: list[int]) -> None:
    """Compare a few requests of the output with the oracle."""
    reqs = sorted({0, min(1, len(lengths) - 1), len(lengths) - 1})
    part = replace(
        problem,
        case=replace(problem.case, reqs=tuple((lengths[req], 1) for req in reqs)),
        q=problem.q[reqs],
        dense=[(problem.dense[req][0][: lengths[req]], problem.dense[req][1][: lengths[req]]) for req in reqs],
    )
    assert_accurate(part, problem.out[reqs].cpu())


def make_mixes(case: Case, rng: torch.Generator) -> dict[str, list[int]]:
    reqs, longest = len(case.reqs), case.reqs[0][0]
    return {
        "uniform": [longest // 3] * reqs,
        "one_long": [longest] + [16] * (reqs - 1),
        "ragged": torch.randint(0, longest, (reqs,), generator=rng).tolist(),
        "pads": [0 if req % 3 else longest // 2 for req in range(reqs)],
        "short": [1] * reqs,
    }


def most_splits(plan: AttentionPlan, work_list: torch.Tensor) -> int:
    """The most KV splits of any query tile of the work list."""
    words = work_list.cpu()
    splits = words[plan.splits_at :][: 8 * int(words[plan.schedule.num_partitions * 16 + 2])].view(-1, 8)
    return int((splits[:, 7] & 0xFFFF).max())


@pytest.mark.alone
@pytest.mark.parametrize("merge", MERGES)
def test_ten_thousand_concurrent_replays(merge: str, rng: torch.Generator) -> None:
    """Each replay has another mix of lengths; the device compares it with the first run of that mix."""
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
    # Check that the case merges as its name says.
    native = plan.native
    across = max(splits) // (native.warps if native is not None and plan.partition_per_warp else 1)
    cluster = 1 if native is None else native.cluster
    assert across >= (2 * plan.merge_group_size if merge == "fixup_in_merge_groups" else 2) or cluster == 8, splits
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
            with torch.cuda.stream(busy):  # at least as long as ten replays
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
    """The layer with a window or chunks. All positions hold valid data, because other lengths see other ones."""
    options = replace(layer.options, sliding_window=window, attention_chunk_size=chunk)
    return replace(layer, case=replace(layer.case, window=window, chunk=chunk), options=options)


@pytest.mark.parametrize("captured", [1, 2000])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (300, 0), (0, 256), (0, 300)])
def test_capture_at_one_length_and_replay_at_others(
    window: int, chunk: int, captured: int, rng: torch.Generator
) -> None:
    one, two = make_layers(replace(BASE, reqs=decode((2000,) * REQS)), rng)
    layers = spanned(one, window, chunk), spanned(two, window, chunk)
    layers[0].seq_lens.fill_(captured)
    graph = capture(layers)
    crossing = [256, 257, 300, 301, 600, 512] * (REQS // 6)
    ragged = list(range(0, 2000, 41))[:REQS]
    for lengths in ([2000] * REQS, [1] * REQS, ragged, crossing, [0] * (REQS - 1) + [2000]):
        layers[0].seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for layer in layers:
            layer.out.fill_(777.0)
        graph.replay()
        for layer in layers:
            check(layer, lengths)
