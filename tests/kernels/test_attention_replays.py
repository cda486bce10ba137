"""Captured attention: ten thousand replays beside another kernel, and lengths far from those of the capture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.attention import paged_attention
from graphrt.kernels.attention.work_list import schedule_attention
from tests.kernels.attention_cases import BF16, NAN, Case, Problem, assert_accurate, decode, make_problem

pytestmark = pytest.mark.gpu

ROWS = 48


def capture(problem: Problem, second: Problem) -> torch.cuda.CUDAGraph:
    """One schedule and two layers in a graph."""
    plan = problem.decode_plan()
    workspace, work_list = problem.scratch(plan)

    def step() -> None:
        schedule_attention(plan, problem.seq_lens, work_list)
        for layer in (problem, second):
            tensors = (layer.q, layer.k_cache, layer.v_cache, layer.block_table, problem.seq_lens)
            paged_attention(*tensors, layer.out, plan, work_list, workspace, layer.options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def make_layers(longest: int, rng: torch.Generator) -> tuple[Problem, Problem]:
    """Two layers over pages for rows of `longest` tokens."""
    case = Case("", decode((longest,) * ROWS), dtype=BF16, num_kv_heads=8, head_dim=128, lse=False, num_sms=132)
    first = make_problem(case, rng, torch.device("cuda"))
    return first, make_problem(case, rng, torch.device("cuda"))


def check(problem: Problem, lengths: list[int]) -> None:
    """A few rows of the output against the oracle."""
    rows = [0, 1, ROWS - 1]
    part = replace(
        problem,
        case=replace(problem.case, rows=tuple((lengths[row], 1) for row in rows)),
        q=problem.q[rows],
        dense=[(problem.dense[row][0][: lengths[row]], problem.dense[row][1][: lengths[row]]) for row in rows],
    )
    assert_accurate(part, problem.out[rows].cpu())


@pytest.mark.alone
def test_ten_thousand_replays_beside_another_kernel(rng: torch.Generator) -> None:
    first, second = make_layers(1500, rng)
    ragged = torch.randint(0, 1500, (ROWS,), generator=rng).tolist()
    mixes = {
        "uniform": [512] * ROWS,
        "one_long": [1500] + [16] * (ROWS - 1),
        "ragged": ragged,
        "pads": [0 if row % 3 else 700 for row in range(ROWS)],
        "short": [1] * ROWS,
    }
    on_device = {name: torch.tensor(mix, dtype=torch.int32, device="cuda") for name, mix in mixes.items()}
    graph = capture(first, second)
    expected = {}
    for name, mix in mixes.items():
        first.seq_lens.copy_(on_device[name])
        graph.replay()
        check(first, mix)
        expected[name] = first.out.clone()
    workspace, work_list = first.scratch(first.decode_plan())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    noise, busy = torch.randn(4096, 4096, device="cuda", dtype=BF16), torch.cuda.Stream()
    names = list(mixes)
    for turn in range(10_000):
        name = names[turn * 7 % len(names)]
        if turn % 20 == 0:
            with torch.cuda.stream(busy):
                torch.mm(noise, noise)
        if turn % 500 == 0:
            workspace.partial_out.fill_(NAN)
            workspace.partial_lse.fill_(NAN)
            work_list.fill_(-(1 << 30))
        first.seq_lens.copy_(on_device[name])
        graph.replay()
        if turn % 5 == 0:
            wrong += (first.out.view(torch.int16) != expected[name].view(torch.int16)).sum()
    assert wrong.item() == 0
    assert not workspace.counters.any()


@pytest.mark.parametrize("captured", [1, 2000])
def test_capture_at_one_length_and_replay_at_others(captured: int, rng: torch.Generator) -> None:
    first, second = make_layers(2000, rng)
    first.seq_lens.fill_(captured)
    graph = capture(first, second)
    for lengths in ([2000] * ROWS, [1] * ROWS, list(range(0, 2000, 41))[:ROWS], [0] * (ROWS - 1) + [2000]):
        first.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for layer in (first, second):
            layer.out.fill_(777.0)
        graph.replay()
        check(first, lengths)
        check(second, lengths)
