"""The source of the CUDA kernel of few-token products on a CPU, in emulation, against float64; and injected bugs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.kernels.native import nvrtc
from graphrt.kernels.native.nvrtc import NativeVariant
from graphrt.kernels.ops import linear_native
from graphrt.kernels.ops.linear_call import End, LinearCall, LinearPlan
from tests.support import native_emulation

pytestmark = pytest.mark.skipif(native_emulation.COMPILER is None, reason="needs the C++ compiler g++")

BF16 = torch.bfloat16
PAGES, PAGE_SIZE = 11, 4


NARROW, WIDE, TURNS = LinearPlan(1, 4, 2, False), LinearPlan(2, 2, 4, False), LinearPlan(1, 4, 4, True)


@dataclass(frozen=True)
class Case:
    id: str
    end: End = End.PLAIN
    tokens: int = 3
    depth: int = 256
    rows: int = 64
    plan: LinearPlan = NARROW
    bias: bool = False
    squares: bool = False
    gather: bool = False
    head_dim: int = 32
    half: int = 16
    bits: int = 16
    group: int = 32


CASES = [
    Case("plain"),
    Case("one_token", tokens=1),
    Case("sixteen_tokens", tokens=16, plan=WIDE),
    Case("nine_tokens_in_turns", tokens=9, plan=TURNS, depth=512, rows=320),
    Case("uneven_depth", depth=352, plan=WIDE),
    Case("odd_unroll", depth=288, plan=LinearPlan(1, 2, 3, True), rows=96),
    Case("norm_and_bias", squares=True, bias=True),
    Case("gathered", gather=True, squares=True, tokens=5),
    Case("add", End.ADD),
    Case("add_wide_in_turns", End.ADD, tokens=16, plan=LinearPlan(2, 4, 2, True), bias=True, rows=320),
    Case("silu_mul", End.SILU_MUL, squares=True, rows=128),
    Case("silu_mul_wide", End.SILU_MUL, bias=True, rows=128, plan=WIDE, tokens=12),
    Case("rope_write", End.ROPE_WRITE, squares=True, rows=32 * 6, tokens=9),
    Case("rope_write_wide", End.ROPE_WRITE, bias=True, rows=64 * 5, head_dim=64, half=32, plan=WIDE),
    Case("rope_write_part", End.ROPE_WRITE, rows=64 * 4, head_dim=64, half=8, plan=TURNS),
    Case("write_without_rotation", End.ROPE_WRITE, rows=32 * 6, half=0),
    Case("row_warps", tokens=20, plan=LinearPlan(1, 4, 2, False, 2), rows=96),
    Case("row_warps_in_turns", End.ADD, tokens=33, plan=LinearPlan(1, 4, 4, True, 4), squares=True, rows=320),
    Case("cluster", tokens=3, plan=LinearPlan(1, 2, 4, False, 2, 4), depth=576, squares=True, gather=True),
    Case("cluster_add", End.ADD, tokens=21, plan=LinearPlan(2, 4, 2, False, 2, 2), rows=128, bias=True, depth=512),
    Case("cluster_silu_mul", End.SILU_MUL, tokens=9, plan=LinearPlan(1, 4, 2, False, 4, 8), rows=128, depth=1024),
    Case("cluster_rope_write", End.ROPE_WRITE, tokens=40, plan=LinearPlan(1, 4, 1, False, 2, 2), rows=192, bias=True),
    Case("fp8", bits=8, tokens=9, depth=512, bias=True),
    Case("fp8_add_in_turns", End.ADD, bits=8, plan=TURNS, rows=320, depth=576, squares=True),
    Case("fp8_silu_mul", End.SILU_MUL, bits=8, rows=128, plan=WIDE, gather=True),
    Case("int4", bits=4, tokens=9, depth=1024),
    Case("int4_groups_of_64", End.ADD, bits=4, group=64, plan=TURNS, rows=320, depth=640),
    Case("int4_groups_of_128", End.ROPE_WRITE, bits=4, group=128, rows=32 * 6, depth=768, plan=WIDE, bias=True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_native, "launch", native_emulation.emulated_launch)
    monkeypatch.setattr(native_emulation, "launches", itertools.count())


def int4(rows: int, depth: int, group: int, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return 4-bit weights, packed in the order 0 2 4 6 1 3 5 7 from the lowest bits, with scales, zeros and values."""
    q = torch.randint(16, (rows, depth), generator=rng, device="cpu", dtype=torch.int32)
    zero = torch.randint(16, (rows, depth // group), generator=rng, device="cpu", dtype=torch.uint8)
    scale = (torch.rand(rows, depth // group, generator=rng, device="cpu") * depth**-0.5 / 4).to(BF16)
    words = sum(q.view(rows, -1, 8)[..., k].long() << 4 * i for i, k in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    data = words.to(torch.uint32).view(torch.uint8).view(rows, -1)
    values = (q.view(rows, -1, group) - zero[..., None].int()) * scale[..., None].double()
    return data, scale, zero, values.to(BF16).view(rows, depth)


def check(case: Case, rng: torch.Generator) -> None:
    """Compare every output with float64. What earlier kernels write arrives when the kernel waits for them."""

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cpu").to(dtype)

    end, tokens, rows = case.end, case.tokens, case.rows
    bias = normal(rows) if case.bias else None
    padded = torch.full((rows * case.depth + 4096,), torch.nan, dtype=BF16, device="cpu")  # reads past the end give NaN
    values = normal(rows, case.depth) * case.depth**-0.5
    if case.bits == 16:
        weight, scale, zero = padded[: rows * case.depth].view(rows, -1).copy_(values), None, None
    elif case.bits == 8:
        scale, zero = torch.rand(rows, generator=rng, device="cpu") / 448, None
        weight = values.div(values.abs().amax() / 448).to(torch.float8_e4m3fn)
        weight[0, :4] = torch.tensor([448.0, -448.0, 2**-9, -(2**-9)]).to(weight.dtype)
        values = weight.double() * scale.double()[:, None]
    else:
        weight, scale, zero, values = int4(rows, case.depth, case.group, rng)
    x_rows = torch.randperm(tokens + 2, generator=rng, device="cpu")[:tokens] if case.gather else None
    x = normal(tokens + 2 if case.gather else tokens, case.depth)
    squares = normal(len(x), 7, dtype=torch.float32).square() * case.depth if case.squares else None
    residual, gain = normal(tokens, rows), normal(rows)
    num_heads = rows // case.head_dim
    kv_heads, width = num_heads // 3, rows // 2 if end is End.SILU_MUL else rows
    q_heads = num_heads - 2 * kv_heads
    width = q_heads * case.head_dim if end is End.ROPE_WRITE else width
    caches = [normal(1 + PAGES, PAGE_SIZE, kv_heads, case.head_dim) for _ in range(2)]  # the first page is not theirs
    written = [c.clone() for c in caches]
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=rng, device="cpu")[:tokens]
    slots[tokens // 2] = -1
    positions = torch.randint(50, (tokens,), generator=rng, device="cpu")
    cos_sin = normal(50, 2 * case.half, dtype=torch.float32) if case.half else None
    cache = (*(c[1:] for c in written), slots.clone(), positions.clone(), cos_sin)
    # float64
    rowed = x if x_rows is None else x[x_rows]
    want = rowed.double() @ values.double().T
    if squares is not None:
        used = squares if x_rows is None else squares[x_rows]
        want *= (used.double().sum(1, keepdim=True) / case.depth + 1e-5).rsqrt()
    want += 0 if bias is None else bias.double()
    # Inputs from earlier kernels hold NaN, and invalid indices, until the kernel waits.
    out, out_residual = torch.full((tokens, width), torch.nan, dtype=BF16, device="cpu"), residual.clone()
    squares_out = torch.full((tokens, rows // case.plan.square_rows), torch.nan, device="cpu")
    for tensor in (x, x_rows, squares, out_residual, cache[2], cache[3]):
        if tensor is not None:
            native_emulation.write_late(tensor)
    adds, writes = end is End.ADD, end is End.ROPE_WRITE
    call = LinearCall(
        x, weight, scale, zero, bias, x_rows, squares, out, out_residual if adds else None, gain if adds else None,
        squares_out if adds else None, *(cache if writes else (None,) * 5),
        eps=1e-5, end=int(end), plan=case.plan, early=True,
    )  # fmt: skip
    linear_native.linear_native(call)
    close = {"rtol": 2**-7, "atol": 2**-7}
    if end is End.PLAIN:
        torch.testing.assert_close(out.double(), want, **close)
    elif end is End.SILU_MUL:
        gate, up = want.chunk(2, 1)
        torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, **close)
    elif end is End.ADD:
        torch.testing.assert_close(out_residual.double(), residual.double() + want, **close)
        torch.testing.assert_close(out.double(), out_residual.double() * gain.double(), **close)
        torch.testing.assert_close(squares_out.double().sum(1), out_residual.double().square().sum(1))
    else:
        heads = want.view(tokens, num_heads, case.head_dim)
        turned = heads.clone()
        if cos_sin is not None:
            cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, -1)
            low, high = heads[..., : case.half], heads[..., case.half : 2 * case.half]
            turned[..., : case.half] = low * cos - high * sin
            turned[..., case.half : 2 * case.half] = high * cos + low * sin
        torch.testing.assert_close(out.double().view(tokens, q_heads, -1), turned[:, :q_heads], **close)
        new = (turned[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :])
        for before, after, values in zip(caches, written, new, strict=True):
            expected = before.double().flatten(0, 1)
            expected[PAGE_SIZE + slots[slots >= 0]] = values[slots >= 0]
            torch.testing.assert_close(after.double().flatten(0, 1), expected, **close)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_case(case: Case, rng: torch.Generator) -> None:
    check(case, rng)


BY_ID = {case.id: case for case in CASES}
WAIT = "  wait_for_earlier_kernels();\n"
SOURCE = (Path(nvrtc.__file__).parent / "linear.cu").read_text()


def waits_after(text: str) -> tuple[str, str]:
    """Move the wait after a later text of the source."""
    end = SOURCE.index(text, SOURCE.index(WAIT)) + len(text)
    passed = SOURCE[SOURCE.index(WAIT) : end]
    return passed, passed.removeprefix(WAIT) + WAIT


# Text of the source, the wrong text that replaces it, and a case that must notice.
BUGS = {
    "no_wait": (WAIT, "", "plain"),
    "one_warp_waits": (WAIT, f"  if (warp == 0) {WAIT}", "plain"),
    "x_read_before_the_wait": (*waits_after("load_x(load, 0, load);\n"), "plain"),
    "rows_of_x_read_before_the_wait": (*waits_after("+ step_at(0) * STEP + of_step;\n  }\n"), "gathered"),
    "tokens_of_the_next_tile_missing": ("else if (loads) load_x(", "else if (!ends) load_x(", "nine_tokens_in_turns"),
    "weights_of_the_same_tile_again": ("source_at(next_tile, 0)", "source_at(tile, 0)", "nine_tokens_in_turns"),
    "sums_not_reset": ("          sums[r][j][i] = 0.0f;\n", "", "nine_tokens_in_turns"),
    "sums_overwritten": ("    if (!is_last) __syncthreads();", "    ", "add_wide_in_turns"),
    "sums_read_too_early": ("    __syncthreads();\n    const auto sum_of", "    const auto sum_of", "plain"),
    "depth_not_bounded": ("if (!EVEN && step >= all_steps)", "if (false)", "uneven_depth"),
    "row_not_gathered": ("(p.x_rows ? p.x_rows[token] : token) * p.x_stride", "token * p.x_stride", "gathered"),
    "squares_not_gathered": ("(p.x_rows ? p.x_rows[token] : token) *", "token *", "gathered"),
    "padded_slot_written": ("    if (slot < 0) return;\n", "", "rope_write"),
    "values_rotated": ("p.num_q_heads + p.num_kv_heads ? HALF", "1000 ? HALF", "rope_write"),
    "rotated_the_other_way": ("low * o.cos - high * o.sin", "low * o.cos + high * o.sin", "rope_write"),
    "rest_of_a_head_shifted": ("2 * num_rotated * TILE_WIDTH", "0", "rope_write_part"),
    "gain_of_the_old_residual": ("rounded(residual *", "rounded(low *", "add"),
    "subnormal_fp8_lost": ("masked_or(bytes >> 4, 0x07f007f0", "masked_or(bytes >> 4, 0x07800780", "fp8"),
    "bytes_swapped": ("0x3424 : 0x1404", "0x1404 : 0x3424", "fp8"),
    "scale_of_another_row": ("[tile.high + row];\n#endif", "[tile.low + row];\n#endif", "fp8_silu_mul"),
    "zero_of_the_first_group": ("w.zero = p.zero[of_scales]", "w.zero = p.zero[0]", "int4"),
    "group_of_the_first_lane": ("(step * STEP + of_step) / GROUP", "step * STEP / GROUP", "int4_groups_of_64"),
    "x_of_the_first_eighth": ("* STEP + 8 * eighth);", "* STEP);", "int4"),
    "rows_of_the_first_warp": ("tile.row(row_of_warp) + of_group", "tile.row(0) + of_group", "row_warps"),
    "x_of_another_part_of_k": ("(i * K_PARTS + ahead_by(u)) * STEP", "(i * K_WARPS + ahead_by(u)) * STEP", "cluster"),
    "blocks_do_not_split_k": ("k_part = rank * K_WARPS + k_warp;", "k_part = k_warp;", "cluster_add"),
    "blocks_not_met": ("    cluster_wait();\n", "", "cluster_silu_mul"),
    "sums_not_awaited": ("    wait_for_bytes(arrived, 0);\n", "", "cluster_add"),
    "sums_of_the_first_block": ("sums_of_blocks[(block *", "sums_of_blocks[(0 *", "cluster_add"),
    "ends_of_the_first_tokens": ("i * CLUSTER + rank;\n      const bool", "i;\n      const bool", "cluster_rope_write"),
    "bias_of_the_gate_twice": ("p.bias[tile.high + row]", "p.bias[tile.low + row]", "silu_mul_wide"),
}  # fmt: skip


def check_often(case: Case, rng: torch.Generator) -> None:
    """Each launch delays other warps."""
    for _ in range(4):
        check(case, rng)


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_detected(bug: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, case = BUGS[bug]
    monkeypatch.setattr(native_emulation, "injected", (right, wrong))
    with pytest.raises(AssertionError):
        check_often(BY_ID[case], rng)


def test_too_little_shared_memory_is_detected(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(variant: NativeVariant, *arguments: Any, **options: Any) -> None:
        variant = replace(variant, shared_bytes=variant.shared_bytes - 8)
        native_emulation.emulated_launch(variant, *arguments, **options)

    monkeypatch.setattr(linear_native, "launch", launch)
    with pytest.raises(AssertionError, match="stores past its shared memory"):
        check(BY_ID["sixteen_tokens"], rng)
