"""The schedule of prompts against its rules, and its kernel against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.prompt_plan import UNIT_WORDS, PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from graphrt.kernels.errors import CapacityError, ShapeError

Rows = tuple[tuple[int, int], ...]
BF16 = torch.bfloat16


def make_plan(rows: Rows, pads: int, *, group: int = 4, block_m: int = 32, causal: bool = True) -> PromptPlan:
    tokens = max(1, sum(query_len for _, query_len in rows) + pads)
    heads = {"num_q_heads": group, "num_kv_heads": 1, "head_dim": 64}
    plan = PromptPlan.make(len(rows), tokens, dtype=BF16, num_sms=2, causal=causal, **heads)  # type: ignore[arg-type]
    return replace(plan, block_m=block_m)


def run(
    plan: PromptPlan, rows: Rows, device: torch.device, *, first_row: int = 0, packed: bool = False
) -> list[list[int]]:
    """The units of the schedule, the words behind them checked to be as before."""
    lens = torch.tensor([seq_len for seq_len, _ in rows])
    if packed:
        lens = torch.nn.functional.pad(lens.cumsum(0), (1, 0)) + 3
    starts = torch.tensor([0, *(query_len for _, query_len in rows)]).cumsum(0)
    schedule = torch.full((plan.schedule_words,), -7, dtype=torch.int32, device=device)
    starts = starts.clamp(min=int(starts[first_row]))
    lens, starts = (x.to(torch.int32).to(device) for x in (lens, starts))
    schedule_prompt(plan, lens, starts, schedule, seq_lens_are_starts=packed)
    header, *units = schedule.cpu().view(-1, UNIT_WORDS).tolist()
    assert header[1:3] == [0, 0]
    assert all(word == -7 for unit in units[header[0] :] for word in unit)
    return [unit[:6] for unit in units[: header[0]]]


MIXES: dict[str, tuple[Rows, int]] = {
    "one": (((100, 100),), 0),
    "exactly": (((64, 64), (16, 16)), 0),
    "mixed": (((70, 1), (40, 40), (0, 0), (90, 33), (90, 33), (150, 9), (0, 4)), 13),
    "pads": (((0, 0), (0, 0)), 50),
    "many": (tuple((7 * i % 90 + i % 5, i % 5) for i in range(150)), 3),
}


@pytest.mark.parametrize("group", [1, 3, 4, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_kernel_and_reference_agree(mix: str, causal: bool, group: int, kernel_device: torch.device) -> None:
    rows, pads = MIXES[mix]
    plan = make_plan(rows, pads, group=group, causal=causal)
    units = run(plan, rows, kernel_device)
    assert units == reference_units(plan, rows, kernel_device)
    assert len(units) <= plan.max_units


def reference_units(plan: PromptPlan, rows: Rows, device: torch.device, first_row: int = 0) -> list[list[int]]:
    """Every unit by its definition, in the order of the rules."""
    units, start = [], 0
    tokens = [*enumerate(rows), (-1, (0, plan.num_tokens - sum(query_len for _, query_len in rows)))]
    for row, (seq_len, query_len) in tokens:
        for first in range(0, query_len * plan.group, plan.block_m):
            last_token = min((first + plan.block_m - 1) // plan.group, query_len - 1)
            end = seq_len - query_len + last_token if plan.causal else seq_len - 1
            if row < 0 or row >= first_row:
                units.append(((-end, row % (len(rows) + 1), -first), [row, first, start, query_len, seq_len, 0]))
        start += query_len
    return [words for _, words in sorted(units)]


@pytest.mark.parametrize("first_row", [1, 4, 7])
def test_rows_before_the_first(first_row: int, kernel_device: torch.device) -> None:
    rows, pads = MIXES["mixed"]
    plan = make_plan(rows, pads)
    assert run(plan, rows, kernel_device, first_row=first_row) == reference_units(plan, rows, kernel_device, first_row)


def check_packed_keys(device: torch.device) -> None:
    rows: Rows = ((20, 20), (0, 0), (50, 7))
    units = run(make_plan(rows, 2, causal=False), rows, device, packed=True)
    assert sorted((unit[0], unit[4], unit[5]) for unit in units) == [
        (-1, 0, 0), (0, 20, 3), (0, 20, 3), (0, 20, 3), (2, 50, 23),
    ]  # fmt: skip


def test_packed_keys(kernel_device: torch.device) -> None:
    check_packed_keys(kernel_device)


def test_packed_keys_by_the_reference() -> None:
    check_packed_keys(torch.device("cpu"))


@pytest.mark.parametrize("mix", MIXES)
def test_cpu_reference(mix: str) -> None:
    rows, pads = MIXES[mix]
    plan = make_plan(rows, pads)
    assert run(plan, rows, torch.device("cpu")) == reference_units(plan, rows, torch.device("cpu"))


def test_most_units_there_can_be() -> None:
    rows: Rows = ((1, 1),) * 9
    plan = make_plan(rows, 1, group=40, block_m=32)  # each token is a unit and a quarter
    assert len(run(plan, rows, torch.device("cpu"))) == 20 <= plan.max_units


WRONG = {
    "lens": ({"lens": 5}, ShapeError, r"seq_lens: expected shape \[2\]"),
    "starts": ({"starts": 4}, ShapeError, r"query_start_loc: expected shape \[3\]"),
    "schedule": ({"words": -1}, CapacityError, "schedule: expected at least .* elements for this plan, got"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    changes, error, text = WRONG[case]
    plan = make_plan(((5, 5), (6, 6)), 0)
    lens, starts = (
        torch.zeros(changes.get(name, size), dtype=torch.int32) for name, size in (("lens", 2), ("starts", 3))
    )
    schedule = torch.zeros(plan.schedule_words + changes.get("words", 0), dtype=torch.int32)
    with pytest.raises(error, match=text):
        schedule_prompt(plan, lens, starts, schedule)
