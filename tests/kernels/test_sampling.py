"""Sampling kernel and reference: greedy against torch, draws against Python's Philox in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.ops.sampling import sample
from graphrt.kernels.ops.sampling_logits import SAMPLE_CHUNK
from graphrt.kernels.ops.sampling_reference import exponential_reference, philox4x32, sample_reference
from graphrt.kernels.types import NO_TOKEN
from tests.support.sampling_cases import arguments, exact_draws, one_hot_rows, python_philox

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")


@triton.jit
def _philox_kernel(seed_ptr, counter0_ptr, counter1_ptr, out_ptr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    c0 = tl.load(counter0_ptr + lanes)
    c1 = tl.load(counter1_ptr + lanes)
    zero = tl.zeros_like(c0)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, zero, zero)
    tl.store(out_ptr + lanes, w0.to(tl.int64))
    tl.store(out_ptr + N + lanes, w1.to(tl.int64))
    tl.store(out_ptr + 2 * N + lanes, w2.to(tl.int64))
    tl.store(out_ptr + 3 * N + lanes, w3.to(tl.int64))


def test_philox_known_answer() -> None:
    """The first vector of Random123's known-answer tests."""
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(word) for word in philox4x32(zero, zero, zero)] == expected
    assert list(python_philox(0, 0, 0)) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32 + 7, 2**63 - 1])
def test_philox_equals_triton_and_the_paper(kernel_device: torch.device, seed: int) -> None:
    c0 = torch.tensor([0, 1, 2, 3, 511, 65535, 65536, 131071], dtype=torch.int64)
    c1 = torch.tensor([0, 5, 0, 77, 4096, 131072, 2**31 - 1, 1], dtype=torch.int64)
    words = torch.stack(philox4x32(torch.tensor(seed), c0, c1, 1))
    assert words.T.tolist() == [list(python_philox(seed, int(a), int(b), 1)) for a, b in zip(c0, c1, strict=True)]
    words = torch.stack(philox4x32(torch.tensor(seed), c0, c1))
    assert words.T.tolist() == [list(python_philox(seed, int(a), int(b))) for a, b in zip(c0, c1, strict=True)]
    out = torch.empty(4, 8, dtype=torch.int64, device=kernel_device)
    key = torch.tensor([seed], dtype=torch.int64, device=kernel_device)
    _philox_kernel[(1,)](key, c0.int().to(kernel_device), c1.int().to(kernel_device), out, N=8)
    assert torch.equal(out.cpu(), words)


def test_small_exponential_variates_are_exact() -> None:
    edges = [0, 1, 2, 3, 1000, 2**16, 2**26 - 1, 2**26, 2**26 + 1, 2**31, 2**32 - 2**20, 2**32 - 1]
    bits = torch.tensor([*edges, *range(0, 2**32, 2**32 // 999)], dtype=torch.int64)
    exact = -np.log1p(-(bits.numpy().astype(np.float64) + 0.5) / 2**32)
    have = exponential_reference(bits).double().numpy()
    assert np.isfinite(have).all()
    assert (have > 0).all()
    inner = bits.numpy() < 2**32 - 2**20  # beyond, 1 - u has few bits left; such variates never win a draw
    assert np.abs(have / exact - 1)[inner].max() < 5e-6
    assert np.abs(have / exact - 1)[bits.numpy() < 2**26].max() < 3e-7


QUARTER = SAMPLE_CHUNK // 4
GREEDY = {
    "vocab_1": (torch.tensor([[-3.0], [NAN]]), [0, NO_TOKEN]),
    "vocab_7": (one_hot_rows(7, {6: 1.0}, {0: 1.0}, {3: 0.5}), [6, 0, 3]),
    "negative": (torch.tensor([[-5.0, -2.0, -9.0]]), [1]),
    "tie_in_a_quarter": (one_hot_rows(50, {17: 2.0, 9: 2.0, 30: 2.0}), [9]),
    "tie_of_quarters": (
        one_hot_rows(SAMPLE_CHUNK, {QUARTER + 3: 2.0, 3 * QUARTER: 2.0, 2 * QUARTER: 2.0}),
        [QUARTER + 3],
    ),
    "tie_of_chunks": (
        one_hot_rows(3 * SAMPLE_CHUNK, {2 * SAMPLE_CHUNK: 1.0, SAMPLE_CHUNK + 9: 1.0}),
        [SAMPLE_CHUNK + 9],
    ),
    "all_equal": (torch.zeros(2, 5000), [0, 0]),
    "next_row_is_better": (one_hot_rows(3 * SAMPLE_CHUNK, {SAMPLE_CHUNK + 5: 1.0}, {7: 9.0}), [SAMPLE_CHUNK + 5, 7]),
    "no_token_before_a_row": (
        one_hot_rows(3 * SAMPLE_CHUNK, {}, {7: 9.0}).where(torch.tensor([[False], [True]]), NAN),
        [NO_TOKEN, 7],
    ),
    "last_token": (one_hot_rows(5000, {4999: 1.0}), [4999]),
    "vocab_is_a_chunk": (one_hot_rows(SAMPLE_CHUNK, {SAMPLE_CHUNK - 1: 1.0}), [SAMPLE_CHUNK - 1]),
    "a_token_beyond_a_chunk": (one_hot_rows(SAMPLE_CHUNK + 1, {SAMPLE_CHUNK: 1.0}), [SAMPLE_CHUNK]),
    "nan_is_skipped": (one_hot_rows(9, {0: NAN, 4: 3.0, 5: NAN}), [4]),
    "nan_but_one": (one_hot_rows(2100, {2099: -7.0}, rest=NAN), [2099]),
    "all_nan": (one_hot_rows(2100, {}, rest=NAN), [NO_TOKEN]),
    "masked": (one_hot_rows(2100, {2050: -1e30}, rest=-INF), [2050]),
    "all_masked": (one_hot_rows(2100, {}, rest=-INF), [NO_TOKEN]),
    "masked_and_nan": (one_hot_rows(10, {3: NAN}, rest=-INF), [NO_TOKEN]),
    "infinity": (one_hot_rows(3000, {2500: INF, 2700: INF, 3: 1e30}), [2500]),
    "smallest_finite": (one_hot_rows(30, {8: torch.finfo(F32).min}, rest=-INF), [8]),
}


@pytest.mark.parametrize("case", GREEDY)
def test_greedy(kernel_device: torch.device, case: str) -> None:
    logits, expected = GREEDY[case]
    for out in (sample(*arguments(logits.to(kernel_device), 0.0)), sample_reference(*arguments(logits, 0.0))):
        assert (out.dtype, out.tolist()) == (torch.int32, expected)


@pytest.mark.parametrize("temperature", [0.0, -0.0, -1.0, NAN])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_temperatures_of_0_and_below_are_argmax(
    kernel_device: torch.device, rng: torch.Generator, dtype: torch.dtype, temperature: float
) -> None:
    logits = torch.randn(3, 5007, generator=rng).to(kernel_device, dtype)[:, :5001]
    expected = [min(row.nonzero().flatten().tolist()) for row in logits == logits.max(-1, keepdim=True).values]
    assert sample(*arguments(logits, temperature)).tolist() == expected
    assert sample_reference(*arguments(logits, temperature)).tolist() == expected


DRAWS = {  # rows, vocabulary, temperatures, seed, position
    "vocab_2": (6, 2, [1.0], 0, 77),
    "vocab_40": (6, 40, [0.5, 1.0, 2.0], 3, 77),
    "greedy_and_drawn": (4, 40, [1e-9, 1.0, 1e-9, 2.0], 3, 8),
    "quarters": (2, 1500, [0.7], 2**32 - 10, 77),
    "chunks": (2, 4500, [1.3, 0.2], 12345, 77),
    **{f"seed_{seed}": (3, 50, [1.0], seed, 77) for seed in (2**31 - 1, 2**31, 2**32 - 3, 2**32 + 5, 2**40 + 7)},
    **{f"position_{at}": (3, 50, [0.6], 4, at) for at in (0, 1, 2**16, 2**31 - 1)},
}


@pytest.mark.parametrize("case", DRAWS)
def test_draws_follow_the_definition(kernel_device: torch.device, rng: torch.Generator, case: str) -> None:
    """Against Philox on Python's integers, in float64: all bits of a seed count, and none is a sign."""
    rows, vocab, heats, seed, position = DRAWS[case]
    logits = 3 * torch.randn(rows, vocab, generator=rng)
    heat = [heats[r % len(heats)] for r in range(rows)]
    expected, margin = exact_draws(logits, heat, seed, position)
    assert margin > 1e-4, "choose other inputs: float32 cannot decide these"
    args = arguments(logits.to(kernel_device), [h if h > 1e-8 else 0.0 for h in heat], seed, position)
    before = [a.clone() for a in args]
    assert sample(*args).tolist() == sample_reference(*args).tolist() == expected
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True)), "an argument was written"


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_kernel_and_reference_draw_the_same(
    kernel_device: torch.device, rng: torch.Generator, dtype: torch.dtype
) -> None:
    logits = (4 * torch.randn(12, 3001, generator=rng)).to(kernel_device, dtype)
    heat = [0.0, 0.3, 1.0, 1.7] * 3
    assert sample(*arguments(logits, heat, 9)).tolist() == sample_reference(*arguments(logits, heat, 9)).tolist()


def test_a_draw_depends_on_seed_and_position_only(kernel_device: torch.device, rng: torch.Generator) -> None:
    """A draw does not depend on the row's index, the batch size or the other rows."""
    logits = torch.randn(6, 300, generator=rng).to(kernel_device)
    args = arguments(logits, [1.0, 0.5, 0.0, 2.0, 1.0, 0.8], seed=4)
    all_rows = sample(*args)
    order = torch.tensor([5, 1, 3], device=kernel_device)
    assert torch.equal(sample(*(a[order] for a in args)), all_rows[order])
    assert torch.equal(sample(*(a[4:5] for a in args)), all_rows[4:5])
    others = logits.clone()
    others[[0, 2]] = NAN
    assert torch.equal(sample(others, *args[1:])[[1, 3, 4, 5]], all_rows[[1, 3, 4, 5]])


def test_equal_rows_differ_by_seed_and_by_position(kernel_device: torch.device) -> None:
    logits = torch.zeros(1, 1000, device=kernel_device).expand(4, -1)
    temperatures = torch.ones(4, device=kernel_device)
    seeds = torch.tensor([1, 1, 2, 2], device=kernel_device)
    positions = torch.tensor([1, 2, 1, 2], dtype=torch.int32, device=kernel_device)
    tokens = sample(logits, temperatures, seeds, positions).tolist()
    assert len(set(tokens)) == 4
    assert sample(logits, temperatures, seeds, positions).tolist() == tokens


EXTREMES = {
    "tiny_is_argmax": (1e-30, one_hot_rows(2100, {2060: 1.0}), {2060}),
    "tiny_with_large_logits": (1e-38, one_hot_rows(20, {7: 1e30, 8: 9e29}), {7}),
    "huge_avoids_masked": (1e38, one_hot_rows(2100, {5: 3.0, 2070: -3.0}, rest=-INF), {5, 2070}),
    "infinite_avoids_masked": (INF, one_hot_rows(2100, {5: 3.0, 2070: -3.0}, rest=-INF), {5, 2070}),
    "avoids_nan": (2.0, one_hot_rows(2100, {11: 0.0, 12: 0.0}, rest=NAN), {11, 12}),
    "nothing_left": (1.0, one_hot_rows(2100, {3: NAN}, rest=-INF), {NO_TOKEN}),
    "infinite_logit": (1.0, one_hot_rows(40, {13: INF}), {13}),
}


@pytest.mark.parametrize("case", EXTREMES)
def test_extreme_temperatures_and_logits(kernel_device: torch.device, case: str) -> None:
    temperature, logits, allowed = EXTREMES[case]
    for seed in range(4):
        args = arguments(logits.to(kernel_device), temperature, seed)
        assert sample(*args).item() in allowed
        assert sample_reference(*args).item() in allowed


@pytest.mark.parametrize("vocab", [0, (1 << 20) + 1])
def test_vocabularies_beyond_the_limits_raise(vocab: int) -> None:
    with pytest.raises(ShapeError, match=f"logits: expected a vocabulary of 1 to 1048576, got {vocab}"):
        sample(*arguments(torch.zeros(1, vocab).expand(2, -1), 0.0))
