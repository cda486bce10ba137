"""Quantized weights, and products with them, against float64 with values that the test unpacks by itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from graphrt.kernels.errors import ConfigError, GraphRTError, ShapeError, UnsupportedError
from graphrt.kernels.ops import linear as operators
from graphrt.kernels.ops.linear import Normed, linear, linear_add, linear_rope_write, linear_silu_mul
from graphrt.kernels.ops.linear_call import LinearPlan
from graphrt.kernels.ops.quantized import Fp8Weight, Int4Weight, QuantizedWeight, concatenate
from graphrt.testing.numerics import assert_accurate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """`group` 0: fp8."""

    id: str
    group: int = 0
    tokens: int = 3
    rows: int = 40
    depth: int = 256
    dtype: torch.dtype = BF16
    bias: bool = False


CASES = [
    Case("fp8", bias=True),
    Case("fp8_one_token", tokens=1, rows=32),
    Case("fp8_odd_depth", depth=200, tokens=20, rows=33),
    Case("fp8_many_tokens", tokens=70, rows=66, depth=130),
    Case("fp8_two_tiles_of_tokens", tokens=135, rows=16, depth=64, bias=True),
    Case("fp8_prompt", tokens=257, rows=16, depth=72),
    Case("fp8_float16", dtype=F16, tokens=17),
    Case("fp8_float32", dtype=F32, bias=True),
    Case("int4_of_32", group=32, bias=True),
    Case("int4_of_64", group=64, tokens=20, depth=192),
    Case("int4_of_128", group=128, tokens=1, rows=70),
    Case("int4_many_tokens", group=128, tokens=70, rows=66),
    Case("int4_two_tiles_of_tokens", group=32, tokens=135, rows=16, depth=96),
    Case("int4_prompt", group=64, tokens=257, rows=16, depth=128, bias=True),
    Case("int4_float16", group=32, dtype=F16, tokens=17),
    Case("int4_float32", group=64, dtype=F32, bias=True),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def fp8(rows: int, depth: int, dtype: torch.dtype, rng: torch.Generator) -> tuple[Fp8Weight, torch.Tensor]:
    """A weight with the smallest and largest numbers among others, and its values in float64."""
    data = torch.randn(rows, depth, generator=rng).mul(60).to(E4M3)
    data.view(torch.uint8)[0, :4] = torch.tensor([0x01, 0x80, 0x7E, 0xFE], dtype=torch.uint8)
    scale = (0.5 + torch.rand(rows, generator=rng)) * depth**-0.5 / 60
    return Fp8Weight(data, scale, dtype), data.double() * scale.double()[:, None]


def int4(rows: int, depth: int, group: int, dtype: torch.dtype, rng: torch.Generator):
    """A weight, packed by hand, and its values in float64 after rounding to `dtype`."""
    q = torch.randint(16, (rows, depth), generator=rng)
    zero = torch.randint(16, (rows, depth // group), generator=rng)
    scale = ((0.5 + torch.rand(rows, depth // group, generator=rng)) * depth**-0.5 / 8).to(dtype)
    words = sum(q.view(rows, -1, 8)[..., k] << 4 * i for i, k in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    data = torch.stack([words >> shift & 255 for shift in (0, 8, 16, 24)], 2).to(torch.uint8).view(rows, -1)
    grouped = (q.view(rows, -1, group) - zero[..., None]) * scale.double()[..., None]
    weight = Int4Weight(data, scale, zero.to(torch.uint8))
    return weight, grouped.to(dtype).double().view(rows, depth)


def make(case: Case, rows: int, depth: int, rng: torch.Generator) -> tuple[QuantizedWeight, torch.Tensor]:
    return int4(rows, depth, case.group, case.dtype, rng) if case.group else fp8(rows, depth, case.dtype, rng)


@cases
def test_products(case: Case, rng: torch.Generator, op_device: torch.device) -> None:
    weight, values = make(case, case.rows, case.depth, rng)
    x = torch.randn(case.tokens, case.depth + 8, generator=rng).to(case.dtype)[:, : case.depth]
    bias = torch.randn(case.rows, generator=rng).to(case.dtype) if case.bias else None
    out = linear(x.to(op_device), weight.to(op_device), None if bias is None else bias.to(op_device)).cpu()
    assert (out.dtype, out.is_contiguous()) == (case.dtype, True)
    exact, plain = x.double() @ values.T, x @ values.to(case.dtype).T
    if bias is not None:
        exact, plain = exact + bias.double(), plain + bias
    assert_accurate(out, plain=plain, exact=exact)


@cases
def test_values_and_rows(case: Case, rng: torch.Generator) -> None:
    weight, values = make(case, case.rows, case.depth, rng)
    torch.testing.assert_close(weight.dequantized().double(), values, rtol=1e-6, atol=0)
    assert (tuple(weight.shape), weight.dtype, weight.device.type) == ((case.rows, case.depth), case.dtype, "cpu")
    first, second = weight.split([5, case.rows - 5])
    joined = concatenate([second, first])
    assert torch.equal(joined.dequantized(), weight.dequantized().roll(-5, 0))
    second.copy_(second.split([case.rows - 5])[0])
    first.copy_(joined.split([case.rows - 5, 5])[1])
    second.scale.zero_()
    assert (weight.dequantized()[5:] == 0).all(), "rows share the memory of the weight"
    assert torch.equal(weight.dequantized()[:5], joined.dequantized()[-5:])


def test_the_nibbles_of_a_word() -> None:
    """The order that the CUDA kernel reads."""
    q = torch.arange(64, dtype=torch.uint8)[None] % 8
    weight = Int4Weight.pack(q, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.uint8))
    (word, *_) = weight.data.view(torch.int32)[0].tolist()
    assert word & 0xFFFFFFFF == 0x75316420
    pairs = [(word >> 4 * i) & 0x000F000F for i in range(4)]
    assert [(pair & 15, pair >> 16) for pair in pairs] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert torch.equal(weight.dequantized(), q.float())


@pytest.mark.parametrize(("tokens", "is_planned"), [(3, False), (3, True), (20, True)])
@pytest.mark.parametrize("group", [0, 32])
def test_operators(
    group: int,
    tokens: int,
    is_planned: bool,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quantized weight gives the result of a tensor with its values. With a plan, it takes the CUDA kernel."""
    case = Case("any", group, tokens)
    hidden, heads, kv_heads, dim = 128, 4, 2, 16
    bits_of_calls: list[int] = []
    launch = operators._op
    monkeypatch.setattr(operators, "_op", lambda call: (bits_of_calls.append(call.bits), launch(call)))
    monkeypatch.setattr(operators, "linear_plan", lambda *_: LinearPlan(1, 4, 2, False) if is_planned else None)

    def weight(rows: int, depth: int) -> tuple[QuantizedWeight, torch.Tensor]:
        quantized, values = make(case, rows, depth, rng)
        return quantized.to(device), values.to(device, F32)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(device, BF16)

    x, gain = normal(tokens, hidden), normal(hidden)
    residual = normal(tokens, hidden)
    (o, o_values), (gate_up, gate_up_values), (qkv, qkv_values) = (
        weight(rows, hidden) for rows in (hidden, 192, (heads + 2 * kv_heads) * dim)
    )
    slots = torch.randperm(32, generator=rng)[:tokens].to(device)
    positions = torch.arange(tokens).to(device)

    def run(o, gate_up, qkv, dtype: torch.dtype) -> list[torch.Tensor]:
        total = residual.to(dtype, copy=True)
        normed = linear_add(x.to(dtype), o, total, gain.to(dtype), EPS)
        gated = linear_silu_mul(Normed(x.to(dtype)), gate_up)
        k, v = (torch.zeros(4, 8, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
        q = linear_rope_write(x.to(dtype), qkv, k, v, slots, positions)
        return [total, normed.finished(), gated, q, k, v]

    ours = run(o, gate_up, qkv, BF16)
    assert bits_of_calls == ([4 if group else 8] * 3 if is_planned else [])
    exact = run(o_values, gate_up_values, qkv_values, F32)
    plain = run(o_values.to(BF16), gate_up_values.to(BF16), qkv_values.to(BF16), BF16)
    for found, ordinary, right in zip(ours, plain, exact, strict=True):
        assert_accurate(found, plain=ordinary, exact=right.double())


def test_a_measured_plan_of_another_format_is_not_taken(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(operators, "linear_plan", lambda device, tokens, bits, *rest: asked.append(bits))
    monkeypatch.setattr(operators, "_op", lambda call: pytest.fail("the CUDA kernel was chosen"))
    for case in (Case("fp8"), Case("int4", group=32)):
        weight, _ = make(case, case.rows, case.depth, rng)
        linear(torch.zeros(2, case.depth, dtype=BF16), weight)
    linear(torch.zeros(2, 256, dtype=BF16), torch.zeros(32, 256, dtype=BF16))
    assert asked == [8, 4, 16]


@pytest.mark.parametrize("kind", [fp8, int4], ids=["fp8", "int4"])
def test_to_converts_the_dtype_of_the_products(kind, rng: torch.Generator) -> None:
    """Of fp8 weights it keeps the tensors: in another dtype they would be larger, and their scales less exact."""
    weight, values = kind(64, 128, F32, rng) if kind is fp8 else kind(64, 128, 32, F32, rng)
    x, before = torch.randn(3, 128, generator=rng).to(BF16), [tensor.dtype for tensor in weight.parameters()]
    model = nn.Sequential(weight).to("cpu", BF16)
    assert model[0].dtype == BF16
    assert kind is int4 or [tensor.dtype for tensor in weight.parameters()] == before
    plain = nn.functional.linear(x, values.to(BF16))
    assert_accurate(linear(x, model[0]), plain=plain, exact=x.double() @ values.t())
    assert model.to("meta")[0].device.type == "meta"
    with pytest.raises(ShapeError, match=r"dtype: .* got torch\.float64"):
        fp8(4, 32, F32, rng)[0].double()


def test_a_model_owns_the_tensors_by_name(rng: torch.Generator) -> None:
    model = nn.Module()
    model.o, _ = fp8(4, 32, BF16, rng)
    model.down, _ = int4(4, 64, 32, BF16, rng)
    names = ["o.data", "o.scale", "down.data", "down.scale", "down.zero"]
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()] == names
    other = nn.Module()
    other.o = Fp8Weight.empty(4, 32, BF16, torch.device("cpu"))
    other.down = Int4Weight.empty(4, 64, 32, BF16, torch.device("cpu"))
    addresses = [p.data_ptr() for p in other.parameters()]
    other.load_state_dict(model.state_dict())
    assert [p.data_ptr() for p in other.parameters()] == addresses
    assert torch.equal(other.down.dequantized(), model.down.dequantized())


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


WRONG = {
    "fp8 data": (lambda: Fp8Weight(torch.zeros(4, 32), torch.ones(4), BF16), "data: expected dtype float8_e4m3fn"),
    "fp8 scale": (lambda: Fp8Weight(torch.zeros(4, 32).to(E4M3), torch.ones(1), BF16), r"scale: expected shape \[4\]"),
    "fp8 dtype": (lambda: Fp8Weight(torch.zeros(4, 32).to(E4M3), torch.ones(4), torch.int8), "dtype: expected one of"),
    "strided data": (
        lambda: Fp8Weight(torch.zeros(32, 4).to(E4M3).t(), torch.ones(4), BF16), "data: expected a contiguous tensor",
    ),
    "group": (lambda: Int4Weight(bytes_of(4, 48), torch.ones(4, 2), bytes_of(4, 2)), "group: .* got 48"),
    "no group": (lambda: Int4Weight.empty(4, 96, 64, BF16, torch.device("cpu")), "divides 96 inputs, got 64"),
    "uneven groups": (lambda: Int4Weight(bytes_of(4, 32), torch.ones(4, 3), bytes_of(4, 3)), "groups of equal size"),
    "zero": (lambda: Int4Weight(bytes_of(4, 32), torch.ones(4, 2), bytes_of(4, 1)), "zero: expected shape"),
    "packed depth": (lambda: Int4Weight.pack(bytes_of(4, 36), torch.ones(4, 1), bytes_of(4, 1)), "a multiple of 8"),
    "packed value": (
        lambda: Int4Weight.pack(bytes_of(4, 32) + 16, torch.ones(4, 1), bytes_of(4, 1)),
        "values: expected 0 to 15, got 16",
    ),
    "packed zero": (
        lambda: Int4Weight.pack(bytes_of(4, 32), torch.ones(4, 1), bytes_of(4, 1) + 200), "zero: .* got 200",
    ),
    "parts": (
        lambda: concatenate([Int4Weight.empty(4, 64, g, BF16, torch.device("cpu")) for g in (32, 64)]),
        "parts: weights differ in kind",
    ),
    "depth of x": (
        lambda: linear(torch.zeros(2, 31, dtype=BF16), Fp8Weight.empty(4, 32, BF16, torch.device("cpu"))),
        r"x: expected shape \[\*, 32\]",
    ),
    "dtype of x": (
        lambda: linear(torch.zeros(2, 64), Int4Weight.empty(4, 64, 32, BF16, torch.device("cpu"))),
        "x: expected dtype bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise(call, message: str) -> None:
    with pytest.raises(GraphRTError, match=message) as caught:
        call()
    assert isinstance(caught.value, ShapeError | UnsupportedError | ConfigError)
