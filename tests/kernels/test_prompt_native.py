"""The CUDA prompt kernel: variants, plans and unsupported calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.prompt_call import PromptCall
from graphrt.kernels.attention.prompt_native import (
    prompt_unsupported_reason,
    prompt_variant,
    prompt_variants,
    runs_prompt_kernel,
)
from graphrt.kernels.attention.prompt_plan import PromptPlan
from graphrt.kernels.native.nvrtc import MIN_SHARED_BYTES
from tests.support.attention_cases import BF16, E4M3, F32
from tests.support.native_usage import compiled_within

# Bytes; the output of these heads alone takes more than half of the registers.
SPILLED = {"keys_of_232": 128, "gemma": 104}


@pytest.mark.parametrize("name", prompt_variants())
def test_variants_compile_within_their_bounds(name: str) -> None:
    variant = prompt_variants()[name]
    registers, log = compiled_within(variant, SPILLED.get(name, 0))
    assert "C7510" not in log, "ptxas serialized the wgmma"
    assert registers * variant.num_threads <= 65536
    assert variant.shared_bytes <= MIN_SHARED_BYTES


def make_plan(**changes: object) -> PromptPlan:
    sizes = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": BF16, "num_sms": 132, "native": True}
    return PromptPlan.make(4, 100, **{**sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "tile", "stages"),
    [(64, 128, (4, 4)), (128, 128, (3, 2)), (192, 64, (3, 2)), (256, 64, (3, 2))],
)
def test_tiles_and_stages_fit_shared_memory(head_dim: int, tile: int, stages: tuple[int, int]) -> None:
    variant = prompt_variant(make_plan(head_dim=head_dim), AttentionOptions(1.0), BF16, 16)
    macros = dict(variant.macros)
    assert (macros["BLOCK_N"], (macros["K_STAGES"], macros["V_STAGES"])) == (tile, stages)


@pytest.mark.parametrize(("page_size", "reqs"), [(0, 128), (16, 16), (48, 16), (64, 64), (256, 128), (96, 32)])
def test_boxes_are_within_one_page(page_size: int, reqs: int) -> None:
    assert dict(prompt_variant(make_plan(), AttentionOptions(1.0), BF16, page_size).macros)["BOX_ROWS"] == reqs


def test_unsupported_plans() -> None:
    assert make_plan().num_blocks == 132
    assert make_plan(native=False).num_blocks == 0
    assert make_plan(kv_dtype=E4M3).num_blocks == 0
    assert make_plan(dtype=F32).num_blocks == 0
    assert not runs_prompt_kernel(torch.device("cpu"))


def call_of(q: torch.Tensor, k: torch.Tensor, *, paged: bool = True) -> PromptCall:
    table = torch.zeros(4, 2, dtype=torch.int32) if paged else None
    schedule = torch.zeros(64, dtype=torch.int32)
    return PromptCall(q, k, k, table, schedule, q, None, 1, 1, AttentionOptions(1.0), make_plan())


def tensors(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


UNSUPPORTED = {
    "none": (tensors(100, 8, 128), tensors(3, 16, 2, 128), None),
    "float32": (tensors(100, 8, 128, dtype=F32), tensors(3, 16, 2, 128, dtype=F32), "q is torch.float32 and k is"),
    "fp8": (tensors(100, 8, 128), tensors(3, 16, 2, 128, dtype=E4M3), "k is torch.float8_e4m3fn"),
    "pages_of_24": (tensors(100, 8, 128), tensors(3, 24, 2, 128), "the page size of 24 is not a multiple of 16"),
    "queries_misaligned": (tensors(100, 8, 132)[:, :, 4:], tensors(3, 16, 2, 128), "heads of q are not aligned"),
    "keys_misaligned": (tensors(100, 8, 128), tensors(3, 16, 2, 129)[..., :128], "heads of k are not aligned"),
    "one_page_of_any_stride": (
        tensors(100, 8, 128), tensors(1, 16, 2, 128).as_strided((1, 16, 2, 128), (1, 256, 128, 1)), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_calls(case: str) -> None:
    q, k, text = UNSUPPORTED[case]
    reason = prompt_unsupported_reason(call_of(q, k))
    assert (reason is None) if text is None else (text in str(reason))


def test_plan_round_trips_through_ints() -> None:
    plan = make_plan()
    assert PromptPlan.from_ints(plan.ints) == plan
    assert PromptPlan.from_ints(replace(plan, causal=False).ints) == replace(plan, causal=False)
