"""Prompt attention against a dense float64 oracle, with NaN wherever no result may come from: the Triton kernel."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.work_list import schedule_attention
from tests.support.attention_cases import BF16, E4M3, E5M2, F16, NAN, Case, decode
from tests.support.prompt_cases import UNWRITTEN, PromptCase, assert_right, launch_prompt, make_prompt, run_prompt

MIX = ((70, 1), (40, 40), (0, 0), (90, 33), (150, 9))


def paged(id: str, rows: tuple[tuple[int, int], ...], **options: object) -> PromptCase:
    return PromptCase(Case(id, rows, **options))  # type: ignore[arg-type]  # fields of Case


def packed(
    id: str, rows: tuple[tuple[int, int], ...], window: tuple[int, int] | None = None, **options: object
) -> PromptCase:
    return PromptCase(Case(id, rows, **options), window, packed=True)  # type: ignore[arg-type]


CASES = [
    paged("one_prompt", ((37, 37),)),
    paged("edges_of_page_16", ((15, 15), (16, 16), (17, 17), (1, 1)), dtype=BF16),
    paged("a_unit_exactly", ((32, 32), (33, 33), (31, 31)), dtype=BF16),
    paged("chunks_and_decodes", MIX, pad_tokens=5, num_kv_heads=2, group=2, dtype=BF16),
    paged("chunks_and_decodes_fp32", MIX, pad_tokens=5, num_kv_heads=2, group=2),
    paged("behind_context", ((300, 40), (129, 2)), dtype=F16),
    paged("invalid_row_between", ((17, 1), (0, 21), (40, 3)), dtype=BF16, sinks=True),
    paged("only_padding", ((0, 0), (0, 0)), pad_tokens=9, dtype=F16, sinks=True),
    paged("longer_than_row", ((3, 7), (2, 1)), dtype=F16),
    paged("page_1", ((5, 5), (19, 1)), page_size=1),
    paged("page_48", ((49, 3), (148, 148)), page_size=48, dtype=BF16),
    paged("page_64_hnd", ((130, 3), (64, 60)), page_size=64, layout="HND", num_kv_heads=2, dtype=BF16),
    paged("page_256", ((270, 33),), page_size=256, dtype=F16),
    paged("group_1", ((140, 135), (9, 1)), group=1, num_kv_heads=2, dtype=BF16),
    paged("group_3_straddles_units", ((60, 50), (9, 5)), group=3, dtype=F16),
    paged("group_71", ((40, 5), (9, 1)), group=71, dtype=F16),
    paged("head_dim_16", ((33, 7),), head_dim=16, dtype=F16),
    paged("head_dim_80", ((150, 60),), head_dim=80, dtype=F16),
    paged("head_dim_96", ((150, 60),), head_dim=96, dtype=BF16),
    paged("head_dim_128", ((300, 60), (17, 17)), head_dim=128, dtype=BF16),
    paged("head_dim_256", ((150, 60),), head_dim=256, dtype=BF16),
    paged("window", ((160, 130), (100, 1), (5, 5)), window=17, pad_tokens=2, dtype=BF16),
    paged("window_of_1", ((150, 40),), window=1, dtype=F16),
    paged("window_behind_context", ((700, 40),), window=200, dtype=F16),
    paged("softcap", ((150, 40), (3, 1)), softcap=2.0, qk_size=5.0, dtype=F16),
    paged("alibi", ((150, 40), (3, 1)), alibi="linear", dtype=F16, num_kv_heads=2),
    paged("alibi_sqrt_sinks_window", ((150, 40), (3, 1)), alibi="sqrt", sinks=True, window=60, dtype=BF16),
    paged("sinks", MIX, sinks=True, pad_tokens=3, dtype=BF16),
    paged("large_logits", ((200, 60),), qk_size=30.0, dtype=BF16),
    paged("e4m3", ((150, 40), (20, 20)), kv_dtype=E4M3, dtype=BF16),
    paged("e5m2_per_head", ((150, 40),), kv_dtype=E5M2, dtype=F16, scale_per_head=True, num_kv_heads=2, softcap=3.0),
    replace(paged("first_row", MIX, pad_tokens=5, dtype=BF16), first_row=1),
    replace(paged("first_row_behind_all", decode((40, 9)), pad_tokens=5, dtype=BF16), first_row=2),
    packed("encoder", ((40, 40), (129, 129), (1, 1)), causal=False, pad_tokens=3, dtype=BF16),
    packed("encoder_window", ((40, 40), (200, 200)), (5, 9), causal=False, dtype=F16),
    packed("encoder_window_of_itself", ((140, 140),), (0, 0), causal=False, dtype=F16),
    packed("encoder_looks_back", ((200, 200),), (40, 0), causal=False, dtype=F16, sinks=True),
    packed("cross", ((150, 20), (7, 40)), causal=False, dtype=BF16),
    packed("packed_causal", ((150, 150), (40, 3)), head_dim=128, dtype=BF16, num_kv_heads=2),
    packed("packed_options", ((150, 150),), (60, 30), causal=False, softcap=5.0, alibi="linear", dtype=F16,
           head_dim=80),
]  # fmt: skip


def by_id(cases: list[PromptCase]) -> list[object]:
    return [pytest.param(case, id=case.id) for case in cases]


@pytest.mark.parametrize("case", by_id(CASES))
def test_triton(case: PromptCase, kernel_device: torch.device, rng: torch.Generator) -> None:
    problem = make_prompt(case, rng, kernel_device)
    first = run_prompt(case, problem)
    assert_right(case, problem, first)
    assert torch.equal(run_prompt(case, problem), first), "a second run must give the same bits"


@pytest.mark.parametrize("case", by_id(CASES))
def test_reference(case: PromptCase, rng: torch.Generator) -> None:
    """Without the interpreter CPU tensors get this."""
    problem = make_prompt(case, rng, torch.device("cpu"))
    assert_right(case, problem, run_prompt(case, problem))


def test_strided_tensors(kernel_device: torch.device, rng: torch.Generator) -> None:
    """Queries inside a qkv tensor, K and V interleaved by page, output in a larger tensor, a table with a margin."""
    case = paged("", ((140, 40), (0, 0), (17, 5)), num_kv_heads=2, group=2, dtype=BF16)
    dense = make_prompt(case, rng, kernel_device)
    qkv = torch.cat([dense.q, torch.full_like(dense.q, NAN)], dim=1)
    kv = torch.stack([dense.k_cache, dense.v_cache], dim=1)
    table = torch.nn.functional.pad(dense.block_table, (0, 3), value=-1)
    out = torch.full_like(qkv, UNWRITTEN)
    problem = replace(
        dense,
        q=qkv[:, :4],
        k_cache=kv[:, 0],
        v_cache=kv[:, 1],
        block_table=table[:, : dense.block_table.shape[1]],
        out=out[:, 4:],
    )
    assert_right(case, problem, run_prompt(case, problem))
    assert (out[:, :4] == UNWRITTEN).all()


def check_pages_before_the_window(device: torch.device, rng: torch.Generator, native: bool) -> None:
    case = paged("", ((400, 37), (300, 5)), window=20, page_size=16, dtype=BF16)
    problem = make_prompt(case, rng, device)
    for row, (seq_len, query_len) in enumerate(case.case.rows):
        problem.block_table[row, : (seq_len - query_len + 1 - 20) // 16] = 1 << 28  # no page at all
    assert_right(case, problem, run_prompt(case, problem, native=native))


def test_pages_before_the_window_may_be_gone(kernel_device: torch.device, rng: torch.Generator) -> None:
    check_pages_before_the_window(kernel_device, rng, native=False)


def test_the_example_of_the_docs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "attention.md"
    (example,) = re.findall(r"^```python\n(import torch\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    q, k, v = (names[name].float().transpose(0, 1) for name in "qkv")
    for row in (slice(0, 3), slice(3, 8)):
        want = torch.nn.functional.scaled_dot_product_attention(q[:, row], k[:, row], v[:, row]).transpose(0, 1)
        torch.testing.assert_close(names["out"][row].float(), want, rtol=0.0, atol=2e-3)


def check_mixed_step(device: torch.device, rng: torch.Generator, native: bool) -> None:
    """Decode rows by the decode kernel and prompt rows by this one, each over all rows of the batch as padded."""
    rows = ((70, 1), (33, 1), (300, 1), (90, 60), (40, 40), (0, 0))
    case = replace(paged("", rows, dtype=BF16, pad_tokens=7, lse=False), first_row=3)
    problem = make_prompt(case, rng, device)
    problem.out.fill_(UNWRITTEN)
    decodes = replace(
        problem,
        q=problem.q[: len(rows)],
        out=problem.out[: len(rows)],
        seq_lens=torch.where(torch.arange(len(rows), device=device) < 3, problem.seq_lens, 0).to(torch.int32),
        case=replace(case.case, rows=tuple((seq_len, 1) for seq_len, _ in rows), native=native),
        workspaces={},
    )
    plan = decodes.decode_plan()
    workspace, work_list = decodes.scratch(plan)
    schedule_attention(plan, decodes.seq_lens, work_list)
    paged_attention(*decodes.tensors, decodes.out, plan, work_list, workspace, decodes.options)
    launch_prompt(case, problem, native=native)
    assert_right(replace(case, first_row=0), problem, problem.out.cpu())


def test_a_mixed_step(kernel_device: torch.device, rng: torch.Generator) -> None:
    check_mixed_step(kernel_device, rng, native=False)


# Lengths that one graph serves: (seq_len, query_len) of rows that the problem has the room for.
REPLAYS = [
    ((300, 100), (150, 90), (40, 40)),
    ((10, 10), (0, 0), (40, 33)),
    ((0, 0), (0, 0), (0, 0)),
    ((299, 1), (1, 1), (38, 7)),
    ((128, 128), (129, 64), (0, 0)),
]


def check_replays(native: bool, first_row: bool, device: torch.device, rng: torch.Generator) -> None:
    """One capture serves every mix of lengths, bit for bit as eagerly, and is right."""
    full = paged("", REPLAYS[0], num_kv_heads=2, head_dim=128, dtype=BF16, pad_tokens=10, num_sms=132)
    problem = make_prompt(full, rng, device)
    problem.q.nan_to_num_(0.5)
    plan = full.plan(problem.q.shape[0], native)
    schedule = torch.zeros(plan.schedule_words, dtype=torch.int32, device=device)
    problem.workspaces[plan] = schedule, None
    launch_prompt(full, problem, native=native)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch_prompt(full, problem, native=native)
    for turn, rows in enumerate(REPLAYS[::-1]):
        first = turn % 3 if first_row else 0
        starts = torch.tensor([0, *(query_len for _, query_len in rows)]).cumsum(0)
        problem.query_start_loc.copy_(starts.clamp(min=int(starts[first])))
        problem.seq_lens.copy_(torch.tensor([seq_len for seq_len, _ in rows]))
        results = []
        for run in (lambda: launch_prompt(full, problem, native=native), graph.replay, graph.replay):
            problem.out.fill_(UNWRITTEN)
            problem.lse.fill_(UNWRITTEN)
            schedule.fill_(-1)
            run()
            results.append((problem.out.clone(), problem.lse.clone()))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
        pads = problem.q.shape[0] - int(starts[-1])
        case = replace(full, case=replace(full.case, rows=rows, pad_tokens=pads), first_row=first)
        dense = [(k[:seq_len], v[:seq_len]) for (k, v), (seq_len, _) in zip(problem.dense, rows, strict=True)]
        assert_right(case, replace(problem, case=case.case, dense=dense), problem.out.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("first_row", [False, True])
def test_capture_and_replays_of_other_lengths(first_row: bool, rng: torch.Generator) -> None:
    check_replays(False, first_row, torch.device("cuda"), rng)
