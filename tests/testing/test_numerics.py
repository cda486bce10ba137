"""Numerical comparisons, poison, the Triton interpreter and the timer of the tests."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphrt.bench import timer as bench
from graphrt.kernels import interpreter
from graphrt.kernels.errors import ConfigError, UnsupportedError
from graphrt.testing import numerics
from graphrt.testing.numerics import (
    assert_accurate,
    assert_bitwise_equal,
    assert_close,
    attention_oracle,
    error_bound,
    keys_seen,
)
from graphrt.testing.poison import poison, poison_bits, poisoned
from tests.support.interpreter import shuffled_programs

NAN, INF = math.nan, math.inf


# Numerics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_bitwise_equal(dtype, rng):
    x = torch.randn(3, 5, generator=rng).to(dtype)
    assert_bitwise_equal(x, x.clone())
    assert_bitwise_equal(x.t(), x.t().contiguous())
    assert_bitwise_equal(x[:0], x[:0])


BITS_DIFFER = {
    "two-of-six": (
        torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]),
        torch.zeros(2, 3),
        r"out: .* 2 of 6 elements .* at \(1, 1\): got 1\.0 \(0x3f800000\), expected 0\.0 \(0x00000000\)",
    ),
    "signed-zero": (torch.tensor(0.0), torch.tensor(-0.0), r"at \(\): got 0\.0 \(0x00000000\), expected -0\.0"),
    "nan-sign": (torch.tensor([NAN]), torch.tensor([NAN]).neg(), r"at \(0,\): got nan"),
    "shape": (torch.zeros(2), torch.zeros(2, 1), r"expected shape \[2, 1\], got \[2\]"),
    "dtype": (torch.zeros(2), torch.zeros(2).half(), "expected dtype torch.float16, got torch.float32"),
    "negative-int": (torch.tensor([-1]), torch.tensor([1]), r"got -1 \(0xffffffffffffffff\)"),
}


@pytest.mark.parametrize("case", BITS_DIFFER)
def test_bitwise_equal_notices(case):
    actual, expected, text = BITS_DIFFER[case]
    with pytest.raises(AssertionError, match=text):
        assert_bitwise_equal(actual, expected, name="out")


CLOSE = {
    "within": ([1.0, 2.0], [1.1, 2.0], 0.2, None),
    "beyond": ([1.0, 2.0], [1.1, 2.5], 0.2, r"1 of 2 elements .* at \(1,\): got 2\.0, expected 2\.5, error 0\.5"),
    "nan-in-both": ([NAN, 1.0], [NAN, 1.0], 0.0, None),
    "nan-in-one": ([NAN, 1.0], [1.0, 1.0], 9.0, r"differ; the first is at \(0,\): got nan, expected 1\.0"),
    "nan-expected": ([1.0, 1.0], [1.0, NAN], 9.0, r"at \(1,\): got 1\.0, expected nan"),
    "inf-in-both": ([INF, -INF], [INF, -INF], 0.0, None),
    "inf-sign": ([INF], [-INF], INF, "got inf, expected -inf"),
    "inf-and-finite": ([INF], [3e38], INF, "got inf, expected 3"),
    "empty": ([], [], 0.0, None),
}


@pytest.mark.parametrize("case", CLOSE)
def test_close(case):
    actual, expected, atol, text = CLOSE[case]
    actual, expected = torch.tensor(actual), torch.tensor(expected)
    if text is None:
        assert_close(actual, expected, atol=atol)
    else:
        with pytest.raises(AssertionError, match=text):
            assert_close(actual, expected, atol=atol)


def test_error_bound():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain = torch.tensor([1.0, 2.25])
    assert error_bound(plain, exact) == 2 * 0.25 + 1e-5
    assert_accurate(torch.tensor([1.5, 2.0]), plain=plain, exact=exact)
    with pytest.raises(AssertionError, match=r"error 0\.502"):
        assert_accurate(torch.tensor([1.502, 2.0]), plain=plain, exact=exact)
    with pytest.raises(AssertionError, match="compute the oracle in float64"):
        error_bound(plain, exact.float())
    with pytest.raises(AssertionError, match="expected finite results, got nan"):
        error_bound(torch.tensor([NAN, 0.0]), exact)
    with pytest.raises(AssertionError, match="expected finite results, got inf"):
        error_bound(torch.tensor([INF, 0.0]), exact)
    empty = torch.tensor([-INF, 2.0], dtype=torch.float64)  # the log-sum-exp of a token that sees nothing
    assert error_bound(empty.float(), empty) == 1e-5


LOGITS = torch.tensor([0.5, -1.0, 2.0])  # of one query at position 2, whose keys are scalars
ORACLE = {
    "plain": ({}, [0.5, -1.0, 2.0]),
    "scale": ({"softmax_scale": 3.0}, [1.5, -3.0, 6.0]),
    "window": ({"sliding_window": 2}, [-INF, -1.0, 2.0]),
    "chunk-begins-here": ({"attention_chunk_size": 2}, [-INF, -INF, 2.0]),
    "chunk-ends-here": ({"attention_chunk_size": 3}, [0.5, -1.0, 2.0]),
    "softcap": ({"logits_softcap": 4.0}, [4 * math.tanh(0.125), 4 * math.tanh(-0.25), 4 * math.tanh(0.5)]),
    "alibi": ({"alibi_slopes": torch.tensor([0.25])}, [0.5 - 0.5, -1.0 - 0.25, 2.0]),
    "alibi-sqrt": ({"alibi_slopes": torch.tensor([1.0]), "alibi_sqrt": True}, [0.5 - math.sqrt(2), -2.0, 2.0]),
    "sink": ({"sinks": torch.tensor([1.0])}, [0.5, -1.0, 2.0, 1.0]),
}


@pytest.mark.parametrize("case", ORACLE)
def test_attention_oracle(case):
    options, logits = ORACLE[case]
    v = torch.tensor([3.0, 5.0, 7.0, 0.0])  # the last value is the sink's, which adds nothing
    out, lse = attention_oracle(
        torch.ones(1, 1, 1), LOGITS.view(3, 1, 1), v[:3].view(3, 1, 1), **{"softmax_scale": 1.0, **options}
    )
    weights = [math.exp(logit) for logit in logits]
    expected = sum(w * x for w, x in zip(weights, v.tolist(), strict=False)) / sum(weights)
    assert out.item() == pytest.approx(expected, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(sum(weights)), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ((4, 6, True, 0, 3), ["xxx...", "...x..", "...xx.", "...xxx"]),  # a token that begins a chunk sees itself
        ((4, 4, True, 2), ["x...", "xx..", ".xx.", "..xx"]),
        ((4, 4, False, 2), ["xx..", "xxx.", ".xxx", "..xx"]),  # a window is a distance to both sides
    ],
)
def test_keys_seen(arguments, rows):
    assert ["".join(".x"[seen] for seen in row) for row in keys_seen(*arguments).tolist()] == rows


@pytest.mark.parametrize("causal", [True, False])
def test_attention_oracle_against_torch(causal, rng):
    q = torch.randn(5, 6, 8, generator=rng, dtype=torch.float64)
    k, v = (torch.randn(5, 2, dim, generator=rng, dtype=torch.float64) for dim in (8, 12))
    out, _ = attention_oracle(q, k, v, softmax_scale=0.3, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=causal, scale=0.3, enable_gqa=True
    )
    assert_close(out, expected.transpose(0, 1), atol=1e-12)


def test_attention_oracle_of_tokens_that_see_nothing():
    q, k = torch.ones(3, 1, 1), torch.full((1, 1, 1), 2.0)
    out, lse = attention_oracle(q, k, k, softmax_scale=1.0)
    assert out.flatten().tolist() == [0.0, 0.0, 2.0]
    assert lse.flatten().tolist() == [-INF, -INF, 2.0]
    out, lse = attention_oracle(q, k[:0], k[:0], softmax_scale=1.0, causal=False, sinks=torch.tensor([0.5]))
    assert out.flatten().tolist() == [0.0] * 3
    assert lse.flatten().tolist() == [0.5] * 3


# Poison

POISON_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", POISON_DTYPES, ids=str)
def test_poison(dtype):
    whole = torch.zeros(4, 6).to(dtype)
    poison(whole[:, ::2])
    assert poisoned(whole).tolist() == [[True, False] * 3] * 4
    assert (whole[:, 1::2].float() == 0).all()
    values = whole[:, ::2].double()
    assert values.isnan().all() if dtype.is_floating_point else (values != 0).all()
    whole[0, 0] = 1
    assert int(poisoned(whole).sum()) == 11


def test_poison_is_neither_a_computed_nan_nor_a_length_or_index():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert not poisoned(torch.tensor([NAN, -NAN, INF - INF], dtype=dtype)).any()
    assert all(poison_bits(dtype) < -1 for dtype in POISON_DTYPES if dtype.is_signed and not dtype.is_floating_point)
    for dtype in (torch.bool, torch.complex64):
        with pytest.raises(UnsupportedError, match=f"got {dtype}"):
            poison(torch.zeros(2, dtype=dtype))


# The interpreter

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this run")
FLOATS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def samples(dtype: torch.dtype) -> torch.Tensor:
    """Every value of an 8- or 16-bit dtype; of a wider one, halfway cases of the narrower dtypes and corners."""
    if dtype.itemsize <= 2:
        return torch.arange(1 << 8 * dtype.itemsize).to(BITS[dtype.itemsize]).view(dtype)
    narrow = torch.cat([samples(d).to(dtype) for d in FLOATS if d.itemsize <= 2])
    narrow = narrow[narrow.isfinite()].unique()
    corners = torch.tensor([0.0, -0.0, NAN, INF, -INF, 1e30, -1e30, 1e-30, 449.0, 464.0, 465.0], dtype=dtype)
    return torch.cat([narrow, (narrow[1:] + narrow[:-1]) / 2, corners])


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_conversion_rounds_as_the_hardware(source, target):
    x = samples(source)
    bits = interpreter.convert_float(as_bits(x).numpy(), FLOATS[source], FLOATS[target])
    got = torch.from_numpy(bits).view(target).double()
    want = x.to(target).double()
    if target == torch.float8_e4m3fn:  # saturates, where torch gives NaN
        wide = x.double()
        want = torch.where(wide.isnan(), wide, want.nan_to_num(nan=448.0).copysign(wide))
    elif target == torch.float8_e5m2:  # saturates, where torch gives infinity
        want = torch.where(want.isinf() & x.double().isfinite(), torch.tensor(57344.0).copysign(x.double()), want)
    assert_close(got, want.double(), atol=0.0)


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, wide_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    gdc_wait()
    x, y, wide = tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(wide_ptr + i)
    tl.store(out_ptr + i, x * y + x)
    tl.store(out_ptr + N + i, tl.where(x > y, x, 0.0) - y / 2.0)
    tl.store(out_ptr + 2 * N + i, wide)
    tl.store(out_ptr + 3 * N + i, i)
    tl.store(out_ptr + 4 * N + i, tl.maximum(x, y))
    tl.store(out_ptr + 5 * N + i, -tl.abs(x))
    tl.store(out_ptr + 6 * N + i, tl.max(x, 0))
    tl.store(out_ptr + 7 * N + i, tl.sum(x, 0))
    tl.store(out_ptr + 8 * N + i, (x * 100.0).to(tl.int32))
    gdc_launch_dependents()


@interpreted
def test_interpreted_bfloat16_arithmetic(rng):
    n = 64
    x, y = torch.randn(n, generator=rng).bfloat16(), torch.randn(n, generator=rng).bfloat16()
    wide = torch.randn(n, generator=rng)
    out = torch.zeros(9, n, dtype=torch.bfloat16)
    _arithmetic_kernel[(1,)](x, y, wide, out, n)
    expected = [
        x * y + x,
        torch.where(x > y, x, 0.0) - y / 2.0,
        wide.bfloat16(),
        torch.arange(n).bfloat16(),
        torch.maximum(x, y),
        -x.abs(),
        x.max().expand(n),
        x.double().sum().bfloat16().expand(n),
        (x * 100.0).int().bfloat16(),
    ]
    for row, want in enumerate(expected):
        assert_bitwise_equal(out[row], want, name=f"row {row}")


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@interpreted
@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype != torch.float64], ids=str)
def test_interpreted_dot(dtype, rng):
    a, b = (torch.randn(32, 32, generator=rng).to(dtype) for _ in range(2))
    out = torch.zeros(32, 32)
    _dot_kernel[(1,)](a, b, out, 32)
    assert_close(out, a.double() @ b.double(), atol=1e-4)


@triton.jit
def _order_kernel(count_ptr, order_ptr):
    at = tl.program_id(0) * 6 + tl.program_id(1) * 2 + tl.program_id(2)
    tl.store(order_ptr + at, tl.atomic_add(count_ptr, 1))


@interpreted
def test_programs_in_another_order():
    def launch() -> list[int]:
        count, order = torch.zeros(1, dtype=torch.int32), torch.full((24,), -1, dtype=torch.int32)
        _order_kernel[(4, 3, 2)](count, order)
        return order.tolist()

    by_id = list(range(24))
    assert launch() == by_id
    with shuffled_programs():
        first, second = launch(), launch()
    assert sorted(first) == sorted(second) == by_id, "each program runs once"
    assert by_id != first != second != by_id
    with shuffled_programs():
        assert launch() == first, "a seed gives an order"
    assert launch() == by_id


def test_interpreted_installs_the_repairs():
    """Kernels under the interpreter give right numbers without this suite too."""
    code = """if True:
        import contextlib
        import torch
        from graphrt.kernels.attention.merge import merge_attention
        from graphrt.kernels.cache.write import write_kv
        from graphrt.kernels.library import interpreted

        torch.manual_seed(0)
        x = torch.randn(1, 2, 16)
        x[0, :, :4] = torch.tensor([-0.499, 0.99, -1.99, 500.0])  # but for the last, next to a power of two
        slots = torch.zeros(1, dtype=torch.int64)
        outs = []
        for kernels in (interpreted(), contextlib.nullcontext()):
            cache = torch.zeros(2, 1, 16, 2, 16).to(torch.float8_e4m3fn)
            side, out = x.bfloat16(), torch.empty(1, 2, 16, dtype=torch.bfloat16)
            lse = torch.zeros(1, 2)
            with kernels:
                write_kv(x, x, x, cache[0], cache[1], slots, slots)
                merge_attention(side, lse, -3.0 * side, lse + 1.0, out)
            outs.append((cache.float(), out.float()))
        for ours, reference in zip(*outs):
            torch.testing.assert_close(ours, reference, rtol=1e-3, atol=0.0)  # less than a last place
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=Path(numerics.__file__).parents[2], env=environment, check=True)


def test_install_needs_the_interpreter_and_changes_nothing_the_second_time(monkeypatch):
    if triton.knobs.runtime.interpret:
        before = triton.runtime.interpreter.InterpreterBuilder.binary_op
        interpreter.install()
        assert triton.runtime.interpreter.InterpreterBuilder.binary_op is before
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(UnsupportedError, match="triton was imported without TRITON_INTERPRET=1"):
        interpreter.install()


# The timer


def test_timing_on_cpu():
    runs = []
    result = bench.time_calls(
        [lambda: runs.append(0), lambda: runs.append(1)],
        device=torch.device("cpu"),
        num_samples=5,
    )
    assert runs == [0, 1] * 6  # one round warms up
    assert 0 < result.p20_us <= result.median_us <= result.p80_us
    with pytest.raises(ConfigError, match="got 0 calls"):
        bench.time_calls([], device=torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.alone
def test_timing_in_graph_replays():
    device = torch.device("cuda")
    nbytes = 64 << 20
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(bench.rotations(nbytes, device))]
    assert len(buffers) >= 2
    result = bench.time_calls([lambda b=b: b.fill_(1) for b in buffers], device=device)
    assert 1 < result.median_us < 1e4
    assert all(bool((b == 1).all()) for b in buffers)


def test_testing_kit_needs_no_cuda():
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import graphrt.bench.timer, graphrt.testing.numerics, graphrt.testing.poison"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(numerics.__file__).parents[2], check=True)
