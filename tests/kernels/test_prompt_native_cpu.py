"""The source of the CUDA prompt kernel on a CPU, in emulation, and injected bugs."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphrt.kernels.attention import prompt, prompt_native
from tests.support import native_emulation
from tests.support.attention_cases import Case, assert_accurate, by_id, make_problem
from tests.support.prompt_cases import (
    CASES,
    check_pages_before_the_window,
    run_prompt,
    served,
)

pytestmark = pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the CPU, and every run of a test uses the same execution orders."""
    monkeypatch.setattr(prompt_native, "launch", native_emulation.emulated_launch)
    monkeypatch.setattr(prompt_native, "encode_map", native_emulation.emulated_map)
    monkeypatch.setattr(native_emulation, "launches", itertools.count())
    monkeypatch.setattr(prompt, "_prompt", prompt_native.native_prompt)


@pytest.mark.parametrize("case", by_id(served(CASES)))
def test_case(case: Case, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, CPU)
    first = run_prompt(problem, native=True)
    assert_accurate(problem, first)
    assert torch.equal(run_prompt(problem, native=True), first), "another execution order must give the same bits"
    ((schedule, _),) = problem.workspaces.values()
    assert not schedule[1:3].any(), "the kernel must leave its counters at 0"


def test_pages_before_the_window_are_not_read(rng: torch.Generator) -> None:
    check_pages_before_the_window(CPU, rng, native=True)


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


@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs_are_detected(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, name = BUGS[bug]
    monkeypatch.setattr(native_emulation, "injected", (right, wrong))
    (case,) = (case for case in CASES if case.id == name)
    with pytest.raises(AssertionError):
        test_case(case, rng)
