"""Prompt attention against a dense float64 oracle, with NaN wherever it may not read: kernels and reference."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.kernels.attention import prompt, prompt_native
from graphrt.kernels.attention.operators import paged_attention
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted
from tests.support import native_emulation
from tests.support.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    UNWRITTEN,
    Case,
    Problem,
    assert_accurate,
    by_id,
    decode,
    make_problem,
    strided,
)
from tests.support.interpreter import shuffled_programs


@pytest.fixture(
    params=[
        "reference",
        "interpreter",
        "emulation",
        *(pytest.param(n, marks=pytest.mark.gpu) for n in ("triton", "cuda")),
    ]
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.device, bool]]:
    """A device, and whether the CUDA kernel runs on it; in emulation on a CPU."""
    name = request.param
    with contextlib.ExitStack() as contexts:
        if name == "interpreter":
            if not INTERPRETER_AVAILABLE:
                pytest.skip("needs the Triton interpreter")
            contexts.enter_context(interpreted())
            contexts.enter_context(shuffled_programs())
        if name == "emulation":
            emulate(monkeypatch)
        if name == "cuda" and not prompt_native.runs_prompt_kernel(torch.device("cuda")):
            pytest.skip("needs a GPU of compute capability 9.0")
        yield torch.device("cuda" if name in ("triton", "cuda") else "cpu"), name in ("emulation", "cuda")


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    native_emulation.install(monkeypatch, prompt_native)
    monkeypatch.setattr(prompt_native, "encode_map", native_emulation.emulated_map)
    monkeypatch.setattr(prompt, "_prompt", prompt_native.native_prompt)


def prompt_plan(case: Case, num_tokens: int, native: bool) -> PromptPlan:
    heads = {name: value for name, value in case.heads.items() if name != "v_head_dim"}
    sizes = {**heads, "kv_dtype": case.stored, "num_sms": case.num_sms}
    return PromptPlan.make(len(case.reqs), num_tokens, causal=case.causal, native=native, **sizes)


def run_prompt(problem: Problem, *, native: bool = False) -> torch.Tensor:
    """Poison every output, schedule and attend."""
    problem.out.fill_(UNWRITTEN)
    if problem.lse is not None:
        problem.lse.fill_(UNWRITTEN)
    launch_prompt(problem, native=native)
    return problem.out.cpu().clone()


def launch_prompt(problem: Problem, *, native: bool = False) -> None:
    """Schedule and attend; captured in graphs, if everything it allocates exists."""
    case = problem.case
    plan = prompt_plan(case, problem.q.shape[0], native)
    device = problem.q.device
    if plan not in problem.workspaces:
        schedule = torch.full((plan.schedule_words,), -(1 << 30), dtype=torch.int32, device=device)
        problem.workspaces[plan] = schedule, problem.contiguous() if case.packed else None
    schedule, packed = problem.workspaces[plan]
    lens, k, v, table = problem.seq_lens, problem.k_cache, problem.v_cache, problem.block_table
    if packed is not None:
        (k, v, lens), table = packed, None
    starts = problem.query_start_loc
    if case.first_req:
        starts = starts.clamp(min=int(starts[case.first_req]))
    schedule_prompt(plan, lens, starts, schedule, seq_lens_are_starts=packed is not None)
    prompt_attention(
        problem.q, k, v, problem.out, plan, schedule, problem.options, block_table=table, window=case.sides,
        lse=problem.lse,
    )  # fmt: skip


MIX = ((70, 1), (40, 40), (0, 0), (90, 33), (150, 9))


CASES = [
    Case("one_prompt", ((37, 37),)),
    Case("edges_of_page_16", ((15, 15), (16, 16), (17, 17), (1, 1)), dtype=BF16),
    Case("exactly_one_q_tile", ((32, 32), (33, 33), (31, 31)), dtype=BF16),
    Case("chunks_and_decodes", MIX, pad_tokens=5, num_kv_heads=2, gqa=2, dtype=BF16),
    Case("chunks_and_decodes_fp32", MIX, pad_tokens=5, num_kv_heads=2, gqa=2),
    Case("after_context", ((300, 40), (129, 2)), dtype=F16),
    Case("invalid_req_between", ((17, 1), (0, 21), (40, 3)), dtype=BF16, sinks=True),
    Case("only_padding", ((0, 0), (0, 0)), pad_tokens=9, dtype=F16, sinks=True),
    Case("longer_than_req", ((3, 7), (2, 1)), dtype=F16),
    Case("page_1", ((5, 5), (19, 1)), page_size=1),
    Case("page_48", ((49, 3), (148, 148)), page_size=48, dtype=BF16),
    Case("page_64_hnd", ((130, 3), (64, 60)), page_size=64, layout="HND", num_kv_heads=2, dtype=BF16),
    Case("page_256", ((270, 33),), page_size=256, dtype=F16),
    Case("gqa_1", ((140, 135), (9, 1)), gqa=1, num_kv_heads=2, dtype=BF16),
    Case("gqa_3_straddles_q_tiles", ((60, 50), (9, 5)), gqa=3, dtype=F16),
    Case("gqa_71", ((40, 5), (9, 1)), gqa=71, dtype=F16),
    Case("head_dim_16", ((33, 7),), head_dim=16, dtype=F16),
    Case("head_dim_80", ((150, 60),), head_dim=80, dtype=F16),
    Case("head_dim_96", ((150, 60),), head_dim=96, dtype=BF16),
    Case("head_dim_128", ((300, 60), (17, 17)), head_dim=128, dtype=BF16),
    Case("head_dim_256", ((150, 60),), head_dim=256, dtype=BF16),
    Case("window", ((160, 130), (100, 1), (5, 5)), window=17, pad_tokens=2, dtype=BF16),
    Case("window_of_1", ((150, 40),), window=1, dtype=F16),
    Case("window_after_context", ((700, 40),), window=200, dtype=F16),
    Case("softcap", ((150, 40), (3, 1)), softcap=2.0, qk_size=5.0, dtype=F16),
    Case("alibi", ((150, 40), (3, 1)), alibi="linear", dtype=F16, num_kv_heads=2),
    Case("alibi_sqrt_sinks_window", ((150, 40), (3, 1)), alibi="sqrt", sinks=True, window=60, dtype=BF16),
    Case("sinks", MIX, sinks=True, pad_tokens=3, dtype=BF16),
    Case("large_logits", ((200, 60),), qk_size=30.0, dtype=BF16),
    Case("e4m3", ((150, 40), (20, 20)), kv_dtype=E4M3, dtype=BF16),
    Case("e5m2_per_head", ((150, 40),), kv_dtype=E5M2, dtype=F16, scale_per_head=True, num_kv_heads=2, softcap=3.0),
    Case("first_req", MIX, pad_tokens=5, dtype=BF16, first_req=1),
    Case("first_req_after_all", decode((40, 9)), pad_tokens=5, dtype=BF16, first_req=2),
    Case("encoder", packed=True, reqs=((40, 40), (129, 129), (1, 1)), causal=False, pad_tokens=3, dtype=BF16),
    Case("encoder_window", packed=True, reqs=((40, 40), (200, 200)), sides=(5, 9), causal=False, dtype=F16),
    Case("encoder_window_of_0", packed=True, reqs=((140, 140),), sides=(0, 0), causal=False, dtype=F16),
    Case("encoder_looks_back", packed=True, reqs=((200, 200),), sides=(40, 0), causal=False, dtype=F16, sinks=True),
    Case("cross", packed=True, reqs=((150, 20), (7, 40)), causal=False, dtype=BF16),
    Case("packed_causal", packed=True, reqs=((150, 150), (40, 3)), head_dim=128, dtype=BF16, num_kv_heads=2),
    Case("packed_options", packed=True, reqs=((150, 150),), sides=(60, 30), causal=False, softcap=5.0, alibi="linear",
         dtype=F16, head_dim=80),
]  # fmt: skip
LARGE = [
    Case("many_q_tiles", ((900, 700), (64, 64), (1, 1), (1200, 500)), head_dim=128, dtype=BF16, num_kv_heads=2,
          num_sms=132, pad_tokens=70),
    Case("long_context", ((4000, 130),), head_dim=128, dtype=F16, num_sms=132, lse=False),
    Case("window_over_many_tiles", ((3000, 300),), head_dim=64, dtype=BF16, window=1000, num_sms=132, page_size=64),
    Case("many_reqs", packed=True, reqs=tuple((n, n) for n in range(1, 130, 3)), causal=False, dtype=F16, gqa=1,
         num_kv_heads=4, num_sms=132),
]  # fmt: skip


def check_case(case: Case, device: torch.device, rng: torch.Generator, *, native: bool) -> None:
    problem = make_problem(case, rng, device)
    first = run_prompt(problem, native=native)
    assert_accurate(problem, first)
    assert torch.equal(run_prompt(problem, native=native), first), "another execution order must give the same bits"
    ((schedule, _),) = problem.workspaces.values()
    assert not schedule[1:3].any(), "the kernel must leave its counters at 0"


@pytest.mark.parametrize("case", by_id(CASES))
def test_case(
    case: Case, kernel: tuple[torch.device, bool], rng: torch.Generator, recwarn: pytest.WarningsRecorder
) -> None:
    device, native = kernel
    if native and (case.dtype not in (F16, BF16) or case.stored != case.dtype or case.page_size % 16):
        pytest.skip("the CUDA kernel does not support this case")
    check_case(case, device, rng, native=native)
    assert not (native and recwarn.list), "the Triton kernel ran"


@pytest.mark.gpu
@pytest.mark.parametrize("case", by_id(LARGE))
def test_large_case(case: Case, rng: torch.Generator) -> None:
    check_case(case, torch.device("cuda"), rng, native=True)


def test_strided_tensors(kernel_device: torch.device, rng: torch.Generator) -> None:
    case = Case("", ((140, 40), (0, 0), (17, 5)), num_kv_heads=2, gqa=2, dtype=BF16)
    problem, rest = strided(make_problem(case, rng, kernel_device))
    assert_accurate(problem, run_prompt(problem))
    assert (rest == UNWRITTEN).all()


def test_pages_before_the_window_are_not_read(kernel: tuple[torch.device, bool], rng: torch.Generator) -> None:
    case = Case("", ((400, 37), (300, 5)), window=20, page_size=16, dtype=BF16)
    problem = make_problem(case, rng, kernel[0])
    for req, (seq_len, query_len) in enumerate(case.reqs):
        problem.block_table[req, : (seq_len - query_len + 1 - 20) // 16] = 1 << 28  # an invalid page id
    assert_accurate(problem, run_prompt(problem, native=kernel[1]))


def test_example_of_prompts_in_the_docs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "attention.md"
    _, example = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    q, k, v = (names[name].float().transpose(0, 1) for name in "qkv")
    for req in (slice(0, 3), slice(3, 8)):
        want = torch.nn.functional.scaled_dot_product_attention(q[:, req], k[:, req], v[:, req]).transpose(0, 1)
        torch.testing.assert_close(names["out"][req].float(), want, rtol=0.0, atol=2e-3)


def test_mixed_step(kernel: tuple[torch.device, bool], rng: torch.Generator) -> None:
    """The decode kernel runs decode requests and this one prefills, each over all padded requests of the batch."""
    device, native = kernel
    reqs = ((70, 1), (33, 1), (300, 1), (90, 60), (40, 40), (0, 0))
    case = Case("", reqs, dtype=BF16, pad_tokens=7, lse=False, first_req=3)
    problem = make_problem(case, rng, device)
    problem.out.fill_(UNWRITTEN)
    decodes = replace(
        problem,
        q=problem.q[: len(reqs)],
        out=problem.out[: len(reqs)],
        seq_lens=torch.where(torch.arange(len(reqs), device=device) < 3, problem.seq_lens, 0).to(torch.int32),
        case=replace(case, first_req=0, reqs=tuple((seq_len, 1) for seq_len, _ in reqs), native=native),
        workspaces={},
    )
    plan = decodes.decode_plan()
    workspace, work_list = decodes.scratch(plan)
    schedule_attention(plan, decodes.seq_lens, work_list)
    paged_attention(*decodes.tensors, decodes.out, plan, work_list, workspace, decodes.options)
    launch_prompt(problem, native=native)
    assert_accurate(replace(problem, case=replace(case, first_req=0)), problem.out.cpu())


# Lengths that one graph serves: (seq_len, query_len) of requests that fit the tensors of the problem.
REPLAYS = [
    ((300, 100), (150, 90), (40, 40)),
    ((10, 10), (0, 0), (40, 33)),
    ((0, 0), (0, 0), (0, 0)),
    ((299, 1), (1, 1), (38, 7)),
    ((128, 128), (129, 64), (0, 0)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("first_req", [False, True])
def test_capture_and_replays_of_other_lengths(first_req: bool, native: bool, rng: torch.Generator) -> None:
    """One capture serves every mix of lengths, is bitwise equal to eager runs, and is correct."""
    device = torch.device("cuda")
    full = Case("", REPLAYS[0], num_kv_heads=2, head_dim=128, dtype=BF16, pad_tokens=10, num_sms=132)
    problem = make_problem(full, rng, device)
    problem.q.nan_to_num_(0.5)
    plan = prompt_plan(full, problem.q.shape[0], native)
    schedule = torch.zeros(plan.schedule_words, dtype=torch.int32, device=device)
    problem.workspaces[plan] = schedule, None
    launch_prompt(problem, native=native)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch_prompt(problem, native=native)
    for turn, reqs in enumerate(REPLAYS[::-1]):
        first = turn % 3 if first_req else 0
        starts = torch.tensor([0, *(query_len for _, query_len in reqs)]).cumsum(0)
        problem.query_start_loc.copy_(starts.clamp(min=int(starts[first])))
        problem.seq_lens.copy_(torch.tensor([seq_len for seq_len, _ in reqs]))
        results = []
        for run in (lambda: launch_prompt(problem, native=native), graph.replay, graph.replay):
            problem.out.fill_(UNWRITTEN)
            problem.lse.fill_(UNWRITTEN)
            schedule.fill_(-1)
            run()
            results.append((problem.out.clone(), problem.lse.clone()))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
        pads = problem.q.shape[0] - int(starts[-1])
        case = replace(full, reqs=reqs, pad_tokens=pads, first_req=first)
        dense = [(k[:seq_len], v[:seq_len]) for (k, v), (seq_len, _) in zip(problem.dense, reqs, strict=True)]
        assert_accurate(replace(problem, case=case, dense=dense), problem.out.cpu())


@pytest.mark.gpu
def test_unsupported_call_falls_back_to_triton(rng: torch.Generator) -> None:
    case = Case("", ((40, 20),), dtype=BF16, page_size=8)
    problem = make_problem(case, rng, torch.device("cuda"))
    with pytest.warns(RuntimeWarning, match="cannot run because the page size of 8 is not a multiple of 16"):
        assert_accurate(problem, run_prompt(problem, native=True))


# Text of the source, the wrong text that replaces it, and a case that must detect the bug.
BUGS = {
    "keys_not_waited_for": (
        "k_ring.phase);\n      barrier_sync(", "1 - k_ring.phase);\n      barrier_sync(", "after_context",
    ),
    "values_not_waited_for": ("v_ring.phase);\n      multiply", "1);\n      multiply", "head_dim_128"),
    "weights_before_their_products": ("wgmma_wait<1>();", "", "head_dim_128"),
    "sums_before_their_products": ("} else {\n        wgmma_wait<0>();", "} else {", "after_context"),
    "sums_not_rescaled": ("sums[i] *= rescale[i / 2 % 2];", ";", "large_logits"),
    "sums_of_the_previous_q_tile": ("TILE_PANEL), !begins);", "TILE_PANEL), true);", "after_context"),
    "queries_of_the_previous_q_tile": ("        left_side = make_d", "        make_d", "head_dim_128"),
    "totals_of_the_next_q_tile": ("const Queries ended = q;", "const Queries &ended = q;", "head_dim_128"),
    "invisible_values_not_cleared": ("if (from <= 0 && to >= BLOCK_N) return;", "return;", "head_dim_128"),
    "values_before_the_window_not_cleared": ("token < from || token >= to", "token >= to", "window_after_context"),
    "later_keys_visible": ("|| column > most[row]", "", "head_dim_128"),
    "window_too_small": ("- p.left - start;", "- p.left + 1 - start;", "window"),
    "page_ids_of_the_previous_tile": ("if (tile > u.begin) page_of_lane", "if (false) page_of_lane", "after_context"),
    "panels_of_values": ("make_descriptor(values, TILE_PANEL)", "make_descriptor(values, 16)", "head_dim_128"),
    "outputs_not_swizzled": ("(i ^ m) % 8 * 16 + lane", "i % 8 * 16 + lane", "head_dim_128"),
    "sinks_of_padding": ("p.sinks && u.req >= 0", "p.sinks", "only_padding"),
    "counters_not_reset": (", p.schedule[2] = 0;", ";", "chunks_and_decodes"),
    "stage_not_released": ("if (lane == 0) arrive(b.v_empty + v_ring.stage);", "", "after_context"),
}  # fmt: skip


@pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")
@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs_are_detected(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    right, wrong, name = BUGS[bug]
    monkeypatch.setattr(native_emulation, "injected", (right, wrong))
    (case,) = (case for case in CASES if case.id == name)
    with pytest.raises(AssertionError):
        check_case(case, torch.device("cpu"), rng, native=True)
