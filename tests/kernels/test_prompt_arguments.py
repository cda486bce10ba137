"""What `prompt_attention` and its plan refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt.kernels.attention.options import MAX_WINDOW, AttentionOptions
from graphrt.kernels.attention.prompt import prompt_attention
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.errors import CapacityError, GraphRTError, ShapeError, UnsupportedError

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16, "num_sms": 2}


def arguments(**changes: Any) -> tuple[list[Any], dict[str, Any]]:
    plan = PromptPlan.make(2, 6, **SIZES)
    q = torch.zeros(6, 4, 64, dtype=BF16)
    cache = torch.zeros(5, 16, 2, 64, dtype=BF16)
    found = {
        "q": q,
        "k": cache,
        "v": cache.clone(),
        "out": torch.zeros_like(q),
        "plan": plan,
        "schedule": torch.zeros(plan.schedule_words, dtype=torch.int32),
        "options": AttentionOptions(0.125),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        **changes,
    }
    order = ("q", "k", "v", "out", "plan", "schedule", "options")
    return [found.pop(name) for name in order], found


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


BOTH_WAYS = AttentionOptions(0.125, causal=False)
WRONG: dict[str, tuple[dict[str, Any], type[GraphRTError], str]] = {
    "tokens": ({"q": bf16(7, 4, 64), "out": bf16(7, 4, 64)}, ShapeError, "q: expected 6 tokens, 4 query and 2 KV"),
    "heads": ({"q": bf16(6, 8, 64), "out": bf16(6, 8, 64)}, ShapeError, "make a plan for this shape"),
    "kv_heads": ({"k": bf16(5, 16, 1, 64), "v": bf16(5, 16, 1, 64)}, ShapeError, "q: expected 6 tokens"),
    "out": ({"out": bf16(6, 4, 32)}, ShapeError, "out: expected shape"),
    "lse": ({"lse": torch.zeros(6, 2)}, ShapeError, "lse: expected shape"),
    "table_rows": ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, ShapeError, "block_table: expected shape"),
    "table_dtype": ({"block_table": torch.zeros(2, 2)}, ShapeError, "block_table: expected"),
    "pages_without_table": ({"block_table": None}, ShapeError, "k: expected"),
    "packed_with_table": ({"k": bf16(9, 2, 64), "v": bf16(9, 2, 64)}, ShapeError, "k_cache: expected"),
    "schedule": ({"schedule": torch.zeros(8, dtype=torch.int32)}, CapacityError, "schedule: expected at least"),
    "window_and_causal": ({"window": (1, 1)}, ShapeError, r"window: expected None with causal, got \(1, 1\); use"),
    "window_of_one": ({"window": (1,), "options": BOTH_WAYS}, ShapeError, r"window: expected \(left, right\) or None"),
    "window_below_0": ({"window": (1, -1), "options": BOTH_WAYS}, ShapeError, "window: expected an int from 0 to"),
    "window_above": ({"window": (MAX_WINDOW + 1, 0), "options": BOTH_WAYS}, ShapeError, "window: expected an int"),
    "window_of_floats": ({"window": (1.0, 0), "options": BOTH_WAYS}, ShapeError, "window: expected an int"),
    "scale": ({"options": AttentionOptions(0.0)}, ShapeError, "softmax_scale: expected"),
    "chunks": (
        {"options": AttentionOptions(1.0, attention_chunk_size=4)}, UnsupportedError,
        "attention_chunk_size: expected 0, got 4",
    ),
    "value_heads": (
        {"v": bf16(5, 16, 2, 32), "out": bf16(6, 4, 32)}, UnsupportedError,
        "v: expected head size 64 as in q and k, got 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_raise(case: str) -> None:
    changes, error, text = WRONG[case]
    positional, named = arguments(**changes)
    with pytest.raises(error, match=text):
        prompt_attention(*positional, **named)


def test_valid_arguments() -> None:
    positional, named = arguments(lse=torch.zeros(6, 4))
    prompt_attention(*positional, **named)
    positional, named = arguments(options=BOTH_WAYS, window=(MAX_WINDOW, 0))
    prompt_attention(*positional, **named)


def test_unsupported_head_size_raises() -> None:
    plan = PromptPlan.make(2, 6, **{**SIZES, "head_dim": 20})
    q, cache = bf16(6, 4, 20), bf16(5, 16, 2, 20)
    schedule = torch.zeros(plan.schedule_words, dtype=torch.int32)
    positional, named = arguments(q=q, k=cache, v=cache, out=q.clone(), plan=plan, schedule=schedule)
    with pytest.raises(UnsupportedError, match="q: expected a head_dim that is a multiple of 8 from 16 to 256, got 20"):
        prompt_attention(*positional, **named)


WRONG_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "reqs": ({"num_reqs": 0}, "num_reqs: expected an int >= 1, got 0"),
    "tokens": ({"num_tokens": 0}, "num_tokens: expected an int >= 1, got 0"),
    "heads": ({"num_q_heads": 3}, "num_q_heads: expected a multiple of num_kv_heads=2, got 3; choose head counts"),
    "sms": ({"num_sms": 0}, "num_sms: expected an int >= 1, got 0"),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_wrong_plans_raise(case: str) -> None:
    changes, text = WRONG_PLANS[case]
    sizes = {"num_reqs": 2, "num_tokens": 6, **SIZES, **changes}
    with pytest.raises(ShapeError, match=text):
        PromptPlan.make(**sizes)
