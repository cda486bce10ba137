"""The prompt schedule against its definition, and its kernel against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.prompt_plan import Q_TILE_WORDS, PromptPlan
from graphrt.kernels.attention.prompt_schedule import schedule_prompt
from graphrt.kernels.errors import CapacityError, ShapeError

Reqs = tuple[tuple[int, int], ...]
BF16 = torch.bfloat16


def make_plan(reqs: Reqs, pads: int, *, gqa: int = 4, block_m: int = 32, causal: bool = True) -> PromptPlan:
    tokens = max(1, sum(query_len for _, query_len in reqs) + pads)
    heads = {"num_q_heads": gqa, "num_kv_heads": 1, "head_dim": 64}
    plan = PromptPlan.make(len(reqs), tokens, dtype=BF16, num_sms=2, causal=causal, **heads)  # type: ignore[arg-type]
    return replace(plan, block_m=block_m)


def run(
    plan: PromptPlan, reqs: Reqs, device: torch.device, *, first_req: int = 0, packed: bool = False
) -> list[list[int]]:
    """The query tiles of the schedule. Checks that later words are unchanged."""
    lens = torch.tensor([seq_len for seq_len, _ in reqs])
    if packed:
        lens = torch.nn.functional.pad(lens.cumsum(0), (1, 0)) + 3
    starts = torch.tensor([0, *(query_len for _, query_len in reqs)]).cumsum(0)
    schedule = torch.full((plan.schedule_words,), -7, dtype=torch.int32, device=device)
    starts = starts.clamp(min=int(starts[first_req]))
    lens, starts = (x.to(torch.int32).to(device) for x in (lens, starts))
    schedule_prompt(plan, lens, starts, schedule, seq_lens_are_starts=packed)
    header, *q_tiles = schedule.cpu().view(-1, Q_TILE_WORDS).tolist()
    assert header[1:3] == [0, 0]
    assert all(word == -7 for q_tile in q_tiles[header[0] :] for word in q_tile)
    return [q_tile[:6] for q_tile in q_tiles[: header[0]]]


MIXES: dict[str, tuple[Reqs, int]] = {
    "one": (((100, 100),), 0),
    "exactly": (((64, 64), (16, 16)), 0),
    "mixed": (((70, 1), (40, 40), (0, 0), (90, 33), (90, 33), (150, 9), (0, 4)), 13),
    "pads": (((0, 0), (0, 0)), 50),
    "many": (tuple((7 * i % 90 + i % 5, i % 5) for i in range(150)), 3),
}


@pytest.mark.parametrize("gqa", [1, 3, 4, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_q_tiles(mix: str, causal: bool, gqa: int, op_device: torch.device) -> None:
    reqs, pads = MIXES[mix]
    plan = make_plan(reqs, pads, gqa=gqa, causal=causal)
    q_tiles = run(plan, reqs, op_device)
    assert q_tiles == expected_q_tiles(plan, reqs)
    assert len(q_tiles) <= plan.max_q_tiles


def expected_q_tiles(plan: PromptPlan, reqs: Reqs, first_req: int = 0) -> list[list[int]]:
    """Every query tile by definition, in order of decreasing work."""
    q_tiles, start = [], 0
    tokens = [*enumerate(reqs), (-1, (0, plan.num_tokens - sum(query_len for _, query_len in reqs)))]
    for req, (seq_len, query_len) in tokens:
        for first in range(0, query_len * plan.num_queries_per_kv, plan.block_m):
            last_token = min((first + plan.block_m - 1) // plan.num_queries_per_kv, query_len - 1)
            end = seq_len - query_len + last_token if plan.causal else seq_len - 1
            if req < 0 or req >= first_req:
                q_tiles.append(((-end, req % (len(reqs) + 1), -first), [req, first, start, query_len, seq_len, 0]))
        start += query_len
    return [words for _, words in sorted(q_tiles)]


@pytest.mark.parametrize("first_req", [1, 4, 7])
def test_reqs_before_the_first(first_req: int, op_device: torch.device) -> None:
    reqs, pads = MIXES["mixed"]
    plan = make_plan(reqs, pads)
    assert run(plan, reqs, op_device, first_req=first_req) == expected_q_tiles(plan, reqs, first_req)


def test_packed_keys(op_device: torch.device) -> None:
    reqs: Reqs = ((20, 20), (0, 0), (50, 7))
    q_tiles = run(make_plan(reqs, 2, causal=False), reqs, op_device, packed=True)
    assert sorted((q_tile[0], q_tile[4], q_tile[5]) for q_tile in q_tiles) == [
        (-1, 0, 0), (0, 20, 3), (0, 20, 3), (0, 20, 3), (2, 50, 23),
    ]  # fmt: skip


def test_max_q_tiles_is_an_upper_bound() -> None:
    reqs: Reqs = ((1, 1),) * 9
    plan = make_plan(reqs, 1, gqa=40, block_m=32)  # each token has one query tile and a quarter
    assert len(run(plan, reqs, torch.device("cpu"))) == 20 <= plan.max_q_tiles


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
