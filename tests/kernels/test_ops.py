"""Norms and activation, kernels and references, against float64 formulas and transformers layers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from graphrt.kernels.errors import ShapeError, UnsupportedError
from graphrt.kernels.ops.activation import silu_mul
from graphrt.kernels.ops.norm import add_rms_norm, rms_norm
from graphrt.testing.numerics import assert_accurate, assert_bitwise_equal

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    id: str
    tokens: int = 3
    width: int = 64
    dtype: torch.dtype = F32
    residual_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None
    scale: float = 1.0
    row_gap: int = 0  # values between rows that belong to nobody


NORMS = [
    Case("fp32"),
    Case("fp16", dtype=F16),
    Case("bf16", dtype=BF16),
    Case("width_1", width=1),
    Case("width_17", width=17, tokens=5),
    Case("width_2880_bf16", width=2880, tokens=2, dtype=BF16),
    Case("width_16384", width=16384, tokens=2),
    Case("strided_rows", row_gap=8),
    Case("tiny_values", scale=1e-15),
    Case("large_fp16", dtype=F16, scale=3e3),
    Case("zeros", scale=0.0),
    Case("fp32_residual_bf16_x", dtype=BF16, residual_dtype=F32),
    Case("bf16_residual_fp32_x", residual_dtype=BF16),
    Case("fp32_weight_fp16_x", dtype=F16, weight_dtype=F32),
    Case("no_tokens", tokens=0),
]
GATES = [
    Case("fp32"),
    Case("fp16", dtype=F16),
    Case("bf16", dtype=BF16),
    Case("width_2", width=2),
    Case("width_34", width=34, tokens=5),
    Case("width_5000_bf16", width=5000, dtype=BF16),
    Case("strided_rows", row_gap=3),
    Case("extremes", scale=60.0),
    Case("no_tokens", tokens=0),
]
norms = pytest.mark.parametrize("case", NORMS, ids=lambda case: case.id)
gates = pytest.mark.parametrize("case", GATES, ids=lambda case: case.id)


def draw(case: Case, rng: torch.Generator, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    values = torch.randn(case.tokens, case.width + case.row_gap, generator=rng) * case.scale
    return values.to(device, dtype or case.dtype)[:, : case.width]


def normed(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, rounded: torch.dtype) -> torch.Tensor:
    """Return the RMSNorm of Llama, computed in `dtype` with the first product rounded to `rounded`."""
    wide = x.to(dtype)
    wide = wide / ((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()
    return wide.to(rounded).to(dtype) * weight.to(dtype)


@norms
def test_norms(case: Case, rng: torch.Generator, op_device: torch.device) -> None:
    x, residual = draw(case, rng, op_device), draw(case, rng, op_device, case.residual_dtype)
    weight = torch.randn(case.width, generator=rng).to(op_device, case.weight_dtype or case.dtype)
    before, total = x.clone(), (residual.double() + x.double()).to(F32).to(residual.dtype)
    for out, normalised in ((rms_norm(x, weight, EPS), x), (add_rms_norm(residual, x, weight, EPS), total)):
        assert (out.dtype, out.shape, out.is_contiguous()) == (case.dtype, x.shape, True)
        plain = normed(normalised, weight, F32, case.dtype).to(case.dtype)
        assert_accurate(out, plain=plain, exact=normed(normalised, weight, F64, F64))
    assert_bitwise_equal(x, before, name="x, which must not change")
    assert_bitwise_equal(residual, total, name="residual")


@gates
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's, in the interpreter; exp(-gate) may be inf
def test_silu_mul(case: Case, rng: torch.Generator, op_device: torch.device) -> None:
    gate_up = draw(case, rng, op_device)
    out = silu_mul(gate_up)
    assert (out.dtype, out.shape, out.is_contiguous()) == (case.dtype, (case.tokens, case.width // 2), True)
    gate, up = gate_up.double().chunk(2, -1)
    plain = functional.silu(gate_up[:, : case.width // 2]) * gate_up[:, case.width // 2 :]
    assert_accurate(out, plain=plain, exact=gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_against_transformers(op_device: torch.device, rng: torch.Generator, dtype: torch.dtype) -> None:
    """The elementwise operations of a layer equal those of transformers up to the last bit of the dtype."""
    hidden, width = 96, 40
    x, residual = (torch.randn(4, hidden, generator=rng).to(op_device, dtype) for _ in range(2))
    gate_up = torch.randn(4, 2 * width, generator=rng).to(op_device, dtype)
    norm = LlamaRMSNorm(hidden, eps=EPS)
    norm.weight.data = torch.randn(hidden, generator=rng).to(op_device, dtype)
    with torch.no_grad():
        total = residual + x
        expected = norm(total)
        gate, up = gate_up.chunk(2, -1)
        expected_gate = ACT2FN["silu"](gate) * up
    limit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(add_rms_norm(residual, x, norm.weight.data, EPS), expected, rtol=limit, atol=limit)
    assert_bitwise_equal(residual, total, name="residual")
    torch.testing.assert_close(rms_norm(total, norm.weight.data, EPS), expected, rtol=limit, atol=limit)
    torch.testing.assert_close(silu_mul(gate_up), expected_gate, rtol=limit, atol=limit)


def test_nan_in_one_token_does_not_affect_others(kernel_device: torch.device, rng: torch.Generator) -> None:
    """Pad tokens may hold NaN."""
    x = torch.randn(3, 32, generator=rng).to(kernel_device)
    weight = torch.ones(32, device=kernel_device)
    norm, gate = rms_norm(x, weight, EPS), silu_mul(x)
    x[1] = float("nan")
    for after, before in ((rms_norm(x, weight, EPS), norm), (silu_mul(x), gate)):
        assert_bitwise_equal(after[[0, 2]], before[[0, 2]])


def ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


BAD = {
    "norm_rank": (lambda: rms_norm(ones(4), ones(4), EPS), ShapeError, "x: expected shape"),
    "norm_weight": (lambda: rms_norm(ones(2, 4), ones(3), EPS), ShapeError, "weight: expected shape"),
    "norm_dtype": (lambda: rms_norm(ones(2, 4, dtype=F64), ones(4), EPS), ShapeError, "x: expected dtype"),
    "norm_stride": (lambda: rms_norm(ones(4, 2).t(), ones(4), EPS), ShapeError, "x: expected stride 1"),
    "norm_wide": (lambda: rms_norm(ones(1, 16385), ones(16385), EPS), UnsupportedError, "hidden size from 1 to 16384"),
    "residual": (lambda: add_rms_norm(ones(1, 4), ones(2, 4), ones(4), EPS), ShapeError, "residual: expected shape"),
    "gate_odd": (lambda: silu_mul(ones(2, 3)), ShapeError, "gate_up: expected an even width"),
    "gate_empty": (lambda: silu_mul(ones(2, 0)), ShapeError, "gate_up: expected an even width"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_raise(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
