"""The CUDA kernel of prompts: its own source on a CPU, instruction by instruction, and planted bugs."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphrt.kernels.attention import prompt, prompt_native
from tests.kernels.test_prompt import CASES, by_id, check_pages_before_the_window
from tests.kernels.test_prompt_native import served
from tests.support import prompt_emulation
from tests.support.prompt_cases import PromptCase, assert_right, make_prompt, run_prompt

pytestmark = pytest.mark.skipif(prompt_emulation.COMPILER is None, reason="needs the C++ compiler g++")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the CPU, and in every run of a test in the same orders."""
    monkeypatch.setattr(prompt_native, "launch", prompt_emulation.emulated_launch)
    monkeypatch.setattr(prompt_native, "encode_map", prompt_emulation.emulated_map)
    monkeypatch.setattr(prompt_emulation, "launches", itertools.count())
    monkeypatch.setattr(prompt, "prompt_reference", None)
    monkeypatch.setattr(prompt, "_prompt", prompt_native.native_prompt)


@pytest.mark.parametrize("case", by_id(served(CASES)))
def test_every_case(case: PromptCase, rng: torch.Generator) -> None:
    problem = make_prompt(case, rng, CPU)
    first = run_prompt(case, problem, native=True)
    assert_right(case, problem, first)
    assert torch.equal(run_prompt(case, problem, native=True), first), "other timing must give the same bits"
    ((schedule, _),) = problem.workspaces.values()
    assert not schedule[1:3].any(), "the kernel must leave its counters at 0"


def test_pages_before_the_window_may_be_gone(rng: torch.Generator) -> None:
    check_pages_before_the_window(CPU, rng, native=True)


# What a wrong kernel would hold, what it is to be replaced by, and a case that must notice.
BUGS = {
    "keys_are_not_waited_for": ("k_ring.phase);\n      meet(", "1 - k_ring.phase);\n      meet(", "behind_context"),
    "values_are_not_waited_for": ("v_ring.phase);\n      multiply", "1);\n      multiply", "head_dim_128"),
    "weights_before_their_products": ("wait_for_products<1>();", "", "head_dim_128"),
    "sums_before_their_products": ("} else {\n        wait_for_products<0>();", "} else {", "behind_context"),
    "sums_are_not_rescaled": ("sums[i] *= rescale[i / 2 % 2];", ";", "large_logits"),
    "sums_of_the_unit_before": ("TILE_PANEL), !begins);", "TILE_PANEL), true);", "behind_context"),
    "queries_of_the_unit_before": ("        left_side = describe(", "        describe(", "head_dim_128"),
    "totals_of_the_next_unit": ("const Queries ended = q;", "const Queries &ended = q;", "head_dim_128"),
    "values_that_nobody_sees": ("if (from <= 0 && to >= BLOCK_N) return;", "return;", "head_dim_128"),
    "values_before_the_window": ("token < from || token >= to", "token >= to", "window_behind_context"),
    "later_keys": ("|| column > most[row]", "", "head_dim_128"),
    "the_edge_of_the_window": ("- p.left - start;", "- p.left + 1 - start;", "window"),
    "pages_of_the_tile_before": ("if (tile > u.begin) page_of_lane", "if (false) page_of_lane", "behind_context"),
    "panels_of_values": ("describe(values, TILE_PANEL)", "describe(values, 16)", "head_dim_128"),
    "outputs_are_swizzled": ("(i ^ m) % 8 * 16 + lane", "i % 8 * 16 + lane", "head_dim_128"),
    "sinks_of_padding": ("p.sinks && u.row >= 0", "p.sinks", "only_padding"),
    "the_counters_stay": (", p.schedule[2] = 0;", ";", "chunks_and_decodes"),
    "a_stage_is_not_given_back": ("if (lane == 0) arrive(b.v_empty + v_ring.stage);", "", "behind_context"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, name = BUGS[bug]
    monkeypatch.setattr(prompt_emulation, "planted", (right, wrong))
    (case,) = (case for case in CASES if case.id == name)
    with pytest.raises(AssertionError):
        test_every_case(case, rng)
