"""Products with what follows them, in one kernel and in separate ones, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.ops import linear as operators
from graphrt.kernels.ops import linear_plans
from graphrt.kernels.ops.linear import Normed, linear, linear_add, linear_rope_write, linear_silu_mul
from graphrt.kernels.ops.linear_call import MAX_TOKENS, End
from graphrt.kernels.ops.linear_plans import DevicePlans, device_plans, linear_plan, load_plans
from graphrt.kernels.ops.norm import rms_norm
from graphrt.testing.numerics import assert_accurate

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-5
HIDDEN, HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 256, 4, 2, 64, 9, 8
ROWS = (HEADS + 2 * KV_HEADS) * DIM


@dataclass(frozen=True)
class Case:
    """`fused`: whether each product is one operator. Separate ones are taken for more tokens and other dtypes."""

    id: str
    tokens: int = 3
    dtype: torch.dtype = BF16
    hidden: int = HIDDEN
    bias: bool = False
    rotary_dim: int = DIM
    head_norms: bool = False
    cache_dtype: torch.dtype | None = None
    fused: bool = True


CASES = [
    Case("one_token", tokens=1),
    Case("bias", bias=True),
    Case("sixteen_tokens", tokens=16),
    Case("more_tokens_than_measured", tokens=MAX_TOKENS + 1, fused=False),
    Case("float32", dtype=F32, fused=False),
    Case("float16", dtype=torch.float16, bias=True, fused=False),
    Case("uneven_depth", hidden=HIDDEN + 32),
    Case("depth_that_no_step_divides", hidden=HIDDEN + 8, fused=False),
    Case("part_rotated", rotary_dim=32, tokens=9),
    Case("rotated_dims_that_no_tile_divides", rotary_dim=24),
    Case("head_norms", head_norms=True),
    Case("fp8_cache", cache_dtype=torch.float8_e4m3fn, bias=True),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


class Draw:
    """Random tensors of a case."""

    def __init__(self, case: Case, rng: torch.Generator, device: torch.device) -> None:
        self.case, self.rng, self.device = case, rng, device

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.rng, device="cpu") * scale).to(self.device, self.case.dtype)

    def weight(self, rows: int, depth: int) -> torch.Tensor:
        return self.normal(rows, depth, scale=depth**-0.5)

    def bias(self, rows: int) -> torch.Tensor | None:
        return self.normal(rows) if self.case.bias else None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float64."""
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * gain.double()


def is_fused(x: Normed) -> bool:
    return x.squares is not None


@cases
def test_add_then_silu_mul(case: Case, rng: torch.Generator, device: torch.device) -> None:
    draw = Draw(case, rng, device)
    hidden, inner = case.hidden, 192
    x, residual, gain = draw.normal(case.tokens, inner), draw.normal(case.tokens, hidden), draw.normal(hidden)
    o, gate_up, head = draw.weight(hidden, inner), draw.weight(2 * inner, hidden), draw.weight(96, hidden)
    biases = [draw.bias(len(weight)) for weight in (o, gate_up, head)]
    before = residual.clone()
    normed = linear_add(x, o, residual, gain, EPS, bias=biases[0])
    assert is_fused(normed) is case.fused
    exact = before.double() + product(x, o, biases[0], torch.float64)
    assert_accurate(residual, plain=before + product(x, o, biases[0], case.dtype), exact=exact)
    # The next products start from the rounded residual.
    plain = rms_norm(residual, gain, EPS)
    assert_accurate(normed.finished(), plain=plain, exact=norm(residual, gain))
    gate, up = product(norm(residual, gain), gate_up, biases[1], torch.float64).chunk(2, 1)
    plain_gate, plain_up = product(plain, gate_up, biases[1], case.dtype).chunk(2, 1)
    out = linear_silu_mul(normed, gate_up, bias=biases[1])
    assert_accurate(out, plain=functional.silu(plain_gate) * plain_up, exact=functional.silu(gate) * up)
    rows = torch.randint(case.tokens, (min(case.tokens, 2),), generator=rng, device="cpu").to(device)
    logits = linear(normed, head, biases[2], rows=rows)
    exact = product(norm(residual, gain), head, biases[2], torch.float64)
    assert_accurate(logits, plain=product(plain, head, biases[2], case.dtype)[rows], exact=exact[rows])


@cases
def test_rope_write(case: Case, rng: torch.Generator, device: torch.device) -> None:
    draw = Draw(case, rng, device)
    x, weight, bias = draw.normal(case.tokens, case.hidden), draw.weight(ROWS, case.hidden), draw.bias(ROWS)
    cache_dtype = case.cache_dtype or case.dtype
    caches = [draw.normal(PAGES, PAGE_SIZE, KV_HEADS, DIM).to(cache_dtype) for _ in range(2)]
    written = [cache.clone() for cache in caches]
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=rng, device="cpu")[: case.tokens].to(device)
    slots[case.tokens // 2] = -1
    positions = torch.randint(40, (case.tokens,), generator=rng, device="cpu").to(device)
    cos_sin = torch.rand(40, case.rotary_dim, generator=rng, device="cpu").to(device)
    norms = [draw.normal(DIM) if case.head_norms else None for _ in range(2)]
    rotary = Rotary(cos_sin, *norms, norm_eps=EPS)
    q = linear_rope_write(x, weight, *written, slots, positions, rotary=rotary, bias=bias)

    def heads(dtype: torch.dtype) -> list[torch.Tensor]:
        """Queries, keys and values, with the norm and rotation in the product's dtype or in float64."""
        qkv = product(x, weight, bias, dtype).view(case.tokens, -1, DIM)
        parts = list(qkv.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1))
        half = case.rotary_dim // 2
        cos, sin = cos_sin.to(dtype)[positions].unsqueeze(1).chunk(2, 2)
        for index, gain in enumerate(norms):
            part = parts[index]
            if gain is not None:
                part = norm(part.reshape(-1, DIM), gain).to(dtype).view(part.shape)
            low, high, rest = part[..., :half], part[..., half : 2 * half], part[..., 2 * half :]
            parts[index] = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
        return parts

    plain, exact = heads(case.dtype), heads(torch.float64)
    assert_accurate(q, plain=plain[0], exact=exact[0])
    stored = slots >= 0
    for before, after, own, right in zip(caches, written, plain[1:], exact[1:], strict=True):
        after, before = after.view(-1, KV_HEADS, DIM), before.view(-1, KV_HEADS, DIM)
        new = after[slots[stored]].to(case.dtype)
        assert_accurate(new, plain=own[stored].to(cache_dtype).to(case.dtype), exact=right[stored])
        untouched = torch.ones(len(after), dtype=torch.bool, device=device)
        untouched[slots[stored]] = False
        assert torch.equal(after[untouched].view(torch.uint8), before[untouched].view(torch.uint8))


def test_products_of_few_tokens_are_one_operator(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[End] = []
    run = operators._op
    monkeypatch.setattr(operators, "_op", lambda call: (calls.append(End(call.end)), run(call)))
    test_rope_write(Case("fused"), rng, torch.device("cpu"))
    assert calls == [End.ROPE_WRITE]
    test_rope_write(Case("head_norms", head_norms=True), rng, torch.device("cpu"))
    assert calls[1:] == [End.PLAIN], "the product, before norm, rotation and write"


def test_only_parameters_are_loaded_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step may have computed any other tensor, such as a parametrized weight."""
    early: list[bool] = []
    monkeypatch.setattr(operators, "_op", lambda call: early.append(call.early))
    x, weight = torch.zeros(1, 64, dtype=BF16), torch.nn.Parameter(torch.zeros(64, 64, dtype=BF16))
    with torch.inference_mode():
        for each in (weight, weight * 1, weight.data, weight[:32]):
            linear(x, each)
    assert early == [True, False, False, False]


def test_a_result_does_not_depend_on_other_tokens(rng: torch.Generator, device: torch.device) -> None:
    draw = Draw(Case("any"), rng, device)
    x, weight = draw.normal(MAX_TOKENS, HIDDEN), draw.weight(2 * HIDDEN, HIDDEN)
    out = linear_silu_mul(x, weight)
    nan = x.clone()
    nan[1::2] = torch.nan
    assert torch.equal(linear_silu_mul(nan, weight)[::2], out[::2])
    assert linear_silu_mul(nan, weight)[1::2].isnan().all()


def test_large_residuals_stay_finite(rng: torch.Generator, device: torch.device) -> None:
    """Some models have residuals of thousands in a few dims."""
    draw = Draw(Case("any"), rng, device)
    residual, gain = draw.normal(2, HIDDEN), draw.normal(HIDDEN)
    residual[:, 7] = 3e4
    normed = linear_add(draw.normal(2, 64), draw.weight(HIDDEN, 64), residual, gain, EPS)
    assert is_fused(normed)
    assert_accurate(normed.finished(), plain=rms_norm(residual, gain, EPS), exact=norm(residual, gain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(64, 48)}, "x: "),
        ({"x": torch.zeros(3, 32, dtype=torch.float64)}, "x: "),
        ({"residual": torch.zeros(2, 64)}, "residual: "),
        ({"gain": torch.zeros(63)}, "gain: "),
        ({"bias": torch.zeros(63)}, "bias: "),
        ({"x": Normed(torch.zeros(3, 32), torch.ones(1, 2))}, "squares: "),
        ({"x": Normed(torch.zeros(3, 32), torch.ones(2, 3).t())}, "squares: "),
        ({"x": Normed(torch.zeros(3, 32), torch.ones(3, 2, dtype=BF16))}, "squares: "),
    ],
    ids=["depth", "dtype", "residual", "gain", "bias", "squares", "strided squares", "squares in 16 bits"],
)
def test_wrong_tensors_raise(change: dict[str, Any], message: str) -> None:
    zeros = {"x": (3, 32), "weight": (64, 32), "residual": (3, 64), "gain": (64,)}
    tensors = {name: torch.zeros(shape) for name, shape in zeros.items()} | change
    with pytest.raises(ShapeError, match=message):
        linear_add(**tensors, eps=EPS)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["fused", "separate"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache: {"k_cache": cache[0]}, r"k_cache: expected shape \[\*, \*, \*, \*\]"),
        (lambda cache: {"v_cache": None}, "v_cache: expected a torch.Tensor"),
        (lambda cache: {"v_cache": cache[:1].expand_as(cache)}, "v_cache: elements may share memory"),
        (lambda _: {"rotary": Rotary(torch.zeros(8))}, r"rotary\.cos_sin: expected shape"),
        (lambda _: {"rotary": Rotary(torch.zeros(8, 128))}, r"cos_sin: expected an even width .*=64, got 128"),
    ],
    ids=["cache", "none", "expanded", "table", "wide"],
)
def test_wrong_caches_raise(change: Callable[[torch.Tensor], dict[str, Any]], message: str, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(3, HIDDEN, dtype=dtype), torch.zeros(ROWS, HIDDEN, dtype=dtype)
    cache, three = torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, DIM, dtype=dtype), torch.arange(3)
    tensors = {"k_cache": cache, "v_cache": cache.clone(), "slot_mapping": three, "positions": three} | change(cache)
    with pytest.raises(ShapeError, match=message):
        linear_rope_write(x, weight, **tensors)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["fused", "separate"])
def test_a_residual_that_shares_memory_raises(dtype: torch.dtype) -> None:
    weight, gain = torch.zeros(64, 64, dtype=dtype), torch.zeros(64, dtype=dtype)
    with pytest.raises(ShapeError, match="residual: elements may share memory"):
        linear_add(torch.zeros(3, 64, dtype=dtype), weight, torch.zeros(1, 64, dtype=dtype).expand(3, 64), gain, EPS)
    if dtype is BF16:  # other products end before the addition
        x = torch.zeros(3, 64, dtype=dtype)
        with pytest.raises(ShapeError, match=r"residual: .*pass x\.clone\(\)"):
            linear_add(x, weight, x, gain, EPS)


def test_no_tokens() -> None:
    draw = Draw(Case("none", tokens=0), torch.Generator(), torch.device("cpu"))
    cache, none = draw.normal(9, 8, KV_HEADS, DIM), torch.empty(0, dtype=torch.int64)
    q = linear_rope_write(draw.normal(0, HIDDEN), draw.weight(ROWS, HIDDEN), cache, cache.clone(), none, none)
    x = linear_add(q.flatten(1), draw.weight(HIDDEN, HEADS * DIM), draw.normal(0, HIDDEN), draw.normal(HIDDEN), EPS)
    assert linear(linear_silu_mul(x, draw.weight(64, HIDDEN)), draw.weight(8, 32)).shape == (0, 8)


def test_plans() -> None:
    """Measured sizes take their own plan, others that of the nearest."""
    cpu = torch.device("cpu")
    for measured in load_plans()["NVIDIA H200"]:
        found = linear_plan(cpu, measured.tokens, measured.bits, measured.end, measured.rows, measured.depth, 128, 128)
        assert found == measured.plan
    assert linear_plan(cpu, 16, 16, End.ADD, 4096, 4100, 0, 0) == linear_plan(cpu, 16, 16, End.ADD, 4096, 4096, 0, 0)
    assert linear_plan(cpu, 1, 16, End.ADD, 4100, 4096, 0, 0) is None, "no tile divides the rows"
    assert linear_plan(cpu, 1, 16, End.ROPE_WRITE, 4096, 4096, 80, 24) is None, "no tile divides what is rotated"
    assert linear_plan(cpu, 33, 16, End.ADD, 4096, 4096, 0, 0) is None, "no plan gains beyond 32 tokens"


def test_devices_without_measured_plans_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Stats.products` has the reason."""
    fault: str | None = None
    name = "NVIDIA H200"
    monkeypatch.setattr(linear_plans, "runs_native", lambda device: device.index == 0)
    monkeypatch.setattr(linear_plans, "nvrtc_fault", lambda: fault)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    def found(index: int) -> DevicePlans:
        return device_plans.__wrapped__(torch.device("cuda", index))

    assert found(0) == (load_plans()[name], "CUDA kernel for at most 32 tokens, with the plans of NVIDIA H200")
    assert found(1) == ((), "PyTorch: this device does not run the CUDA kernel (compute capability 9.0 or newer)")
    name = "NVIDIA Z1"
    advice = "write a file with scripts/bench_linear.py --write, and set GRAPHRT_LINEAR_PLANS"
    assert found(0) == ((), f"PyTorch: no plans were measured on NVIDIA Z1; {advice}")
    monkeypatch.setattr(linear_plans, "device_plans", found)
    assert linear_plan.__wrapped__(0, 1, 16, End.ADD, 4096, 4096, 0, 0) is None
    fault = "nvrtc: missing"
    assert found(0) == ((), "PyTorch: nvrtc: missing")


def test_products_without_a_fused_rope_write_have_plans_as_plain_products() -> None:
    # `linear_rope_write` then calls `linear`, which would use the plan of a product of another size.
    for plans in load_plans().values():
        keys = {(p.end, p.tokens, p.bits, p.rows, p.depth): p.plan for p in plans}
        separate = [key[1:] for key, plan in keys.items() if key[0] is End.ROPE_WRITE and plan is None]
        assert [size for size in separate if (End.PLAIN, *size) not in keys] == []
