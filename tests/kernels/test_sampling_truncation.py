"""Top-k, top-p and min-p: the kept sets are those of transformers, and draws follow the exact distribution."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.ops import sampling
from graphrt.kernels.ops.sampling import sample
from graphrt.kernels.ops.sampling_logits import SAMPLE_CHUNK
from graphrt.kernels.ops.sampling_reference import kept_reference, noise_reference, sample_reference
from graphrt.kernels.types import NO_TOKEN
from tests.support.sampling_cases import (
    F32,
    I32,
    INF,
    arguments,
    column,
    drawn,
    penalties_with,
    reference_ops,
    truncation,
    warped,
)  # fmt: skip

NAN = float("nan")
CPU = torch.device("cpu")
CASES = {
    "top_k": (50, 1.0, 0.0),
    "top_k_2": (2, 1.0, 0.0),
    "top_p": (0, 0.9, 0.0),
    "top_p_small": (0, 0.2, 0.0),
    "top_p_large": (0, 0.999, 0.0),
    "min_p": (0, 1.0, 0.02),
    "min_p_half": (0, 1.0, 0.5),
    "top_k_top_p": (40, 0.7, 0.0),
    "top_k_min_p": (30, 1.0, 0.05),
    "top_p_min_p": (0, 0.8, 0.01),
    "all": (60, 0.9, 0.005),
    "top_k_beyond_a_list": (2600, 1.0, 0.0),
    "all_beyond_a_list": (2800, 0.95, 1e-5),
    "min_p_beyond_a_list": (0, 1.0, 1e-7),
}
cases = pytest.mark.parametrize("case", CASES)


@cases
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_reference_keeps_the_same_tokens_as_transformers(rng: torch.Generator, case: str, scale: float) -> None:
    top_k, top_p, min_p = CASES[case]
    logits = scale * torch.randn(3000, generator=rng)
    expected = warped(logits, 0.8, top_k, top_p, min_p) > -INF
    assert torch.equal(kept_reference(logits, 0.8, top_k, top_p, min_p), expected)


def winners(logits: torch.Tensor, kept: torch.Tensor, temperature: float, seeds: torch.Tensor) -> list[int]:
    """The tokens that the definition draws: the best of logits + temperature * noise among the kept, in float64."""
    noise = noise_reference(seeds, torch.full_like(seeds, 5), logits.shape[-1]).double()
    scores = torch.where(kept, logits.double() + temperature * noise, -INF)
    best = scores.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-5, "choose other seeds: float32 cannot decide these"
    return scores.argmax(-1).tolist()


@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["flat", "peaked"])
def test_draws_are_the_best_scores_among_tokens_that_transformers_keeps(
    kernel_device: torch.device, rng: torch.Generator, scale: float
) -> None:
    """Flat logits keep many tokens; two chunks, the second cut short."""
    rows = len(CASES)
    logits = scale * torch.randn(SAMPLE_CHUNK + 952, generator=rng)
    kept = torch.stack([warped(logits, 0.8, *options) > -INF for options in CASES.values()])
    expected = winners(logits, kept, 0.8, torch.arange(rows))
    top_k, top_p, min_p = (list(values) for values in zip(*CASES.values(), strict=True))
    options = truncation(rows, kernel_device, top_k=top_k, top_p=top_p, min_p=min_p)
    assert drawn(logits.to(kernel_device), rows, 0.8, truncation=options).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernel_and_reference_draw_the_same_with_ties(
    kernel_device: torch.device, rng: torch.Generator, dtype: torch.dtype
) -> None:
    """Logits of 16 bits have many ties, at every bound: they are kept or dropped together."""
    rows = len(CASES)
    logits = (2 * torch.randn(rows, 3000, generator=rng)).to(dtype)
    parts = [list(values) for values in zip(*CASES.values(), strict=True)]

    options = truncation(rows, CPU, top_k=parts[0], top_p=parts[1], min_p=parts[2])
    expected = sample_reference(*arguments(logits, 1.1), None, options.top_k, options.top_p, options.min_p)
    options = truncation(rows, kernel_device, top_k=parts[0], top_p=parts[1], min_p=parts[2])
    assert sample(*arguments(logits.to(kernel_device), 1.1), truncation=options).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("around", [0.0, 1.0, -1.0, 6e4])
def test_kernel_separates_neighboring_16_bit_logits(
    kernel_device: torch.device, dtype: torch.dtype, around: float
) -> None:
    """Logits of 16 bits are searched in steps of 16 bits: one value each, on both sides of 0, subnormals too."""
    bits = torch.tensor(around, dtype=dtype).view(torch.int16) + torch.arange(9, dtype=torch.int16)
    values = torch.cat([bits, bits + (-(1 << 15) if around == 0 else -9)]).view(dtype)
    rows = 8
    logits = values[torch.arange(rows * 96).view(rows, 96) * 7 % len(values)]
    bounds = {"top_k": [3, 9, 31, 62, 88, 0, 0, 0], "top_p": [1.0] * 5 + [0.07, 0.4, 0.8]}
    reference = truncation(rows, CPU, **bounds)
    expected = sample_reference(*arguments(logits, 3.0), None, reference.top_k, reference.top_p, reference.min_p)
    result = sample(*arguments(logits.to(kernel_device), 3.0), truncation=truncation(rows, kernel_device, **bounds))
    assert result.tolist() == expected.tolist()


def test_rows_without_truncation_draw_the_same_as_without_the_option(
    kernel_device: torch.device, rng: torch.Generator
) -> None:
    logits = torch.randn(6, 2500, generator=rng).to(kernel_device)
    args = arguments(logits, [0.0, 1.0, 0.5, 2.0, 1.0, 1.0], seed=3)
    options = truncation(
        6, kernel_device, top_k=[5, 0, 2500, -3, 9999, 0], top_p=[0.5, 1.0, 1.5, NAN, INF, 1.0],
        min_p=[0.3, 0.0, -1.0, NAN, -INF, 0.0],
    )  # fmt: skip
    assert sample(*args, truncation=options).tolist() == sample(*args).tolist()


HOSTILE = {
    "top_k_1": {"top_k": 1},
    "top_p_0": {"top_p": 0.0},
    "top_p_negative": {"top_p": -1.0},
    "top_p_minus_infinity": {"top_p": -INF},
    "top_p_smallest": {"top_p": 1e-45},
    "min_p_1": {"min_p": 1.0},
    "min_p_7": {"min_p": 7.0},
    "min_p_infinity": {"min_p": INF},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_values_that_leave_the_best_token_only(kernel_device: torch.device, rng: torch.Generator, case: str) -> None:
    logits = torch.randn(100, generator=rng)
    tokens = drawn(logits.to(kernel_device), 4, 3.0, truncation=truncation(4, kernel_device, **HOSTILE[case]))
    assert tokens.tolist() == [int(logits.argmax())] * 4


def test_greedy_truncation_takes_the_lowest_of_equal_logits(kernel_device: torch.device) -> None:
    logits = torch.zeros(60)
    logits[[31, 17, 40]] = 2.0
    options = truncation(3, kernel_device, top_k=[1, 0, 1], top_p=[1.0, 0.0, 0.5])
    assert drawn(logits.to(kernel_device), 3, 5.0, truncation=options).tolist() == [17] * 3


EXTREME_ROWS = {
    "masked": (torch.full((70,), -INF), {NO_TOKEN}),
    "nan": (torch.full((70,), NAN), {NO_TOKEN}),
    "one_left": (torch.full((70,), -INF).index_fill(0, torch.tensor([66]), -1e30), {66}),
    "infinite": (torch.zeros(70).index_fill(0, torch.tensor([7, 9]), INF), {7}),
    "nan_and_two": (torch.full((70,), NAN).index_fill(0, torch.tensor([7, 9]), 1.0), {7, 9}),
    "zeros_of_both_signs": (torch.full((70,), -9.0).index_fill(0, torch.tensor([7]), -0.0).index_fill(
        0, torch.tensor([9]), 0.0), {7, 9}),
}  # fmt: skip


@pytest.mark.parametrize("case", EXTREME_ROWS)
def test_extreme_logits_under_truncation(kernel_device: torch.device, case: str) -> None:
    logits, allowed = EXTREME_ROWS[case]
    options = truncation(
        5, kernel_device, top_k=[2, 0, 0, 2, 69], top_p=[1.0, 0.5, 1.0, 0.9, 0.9], min_p=[0, 0, 0.5, 0.5, 0]
    )
    for temperature in (1e-38, 1.0, INF):
        tokens = set(drawn(logits.to(kernel_device), 5, temperature, truncation=options).tolist())
        if temperature == INF and case == "zeros_of_both_signs":
            continue  # all logits weigh the same
        assert tokens <= allowed, temperature


def test_a_truncated_row_is_the_same_in_any_batch(kernel_device: torch.device, rng: torch.Generator) -> None:
    """Bitwise: beside other rows, at other places, and where programs of the first pass read more chunks."""
    logits = (torch.randn(4, 2900, generator=rng)).to(kernel_device)
    seeds, heat = torch.arange(4), [1.0, 0.7, 1.0, 1.3]
    options = {"top_k": [20, 0, 0, 2700], "top_p": [0.9, 0.5, 0.97, 0.9], "min_p": [0.0, 0.0, 0.01, 0.0]}

    def draw(rows: list[int]) -> list[int]:
        picked = {name: [values[r] for r in rows] for name, values in options.items()}
        return sample(
            logits[rows], column([heat[r] for r in rows], len(rows), F32, kernel_device), seeds[rows].to(kernel_device),
            torch.full((len(rows),), 9, dtype=I32, device=kernel_device),
            truncation=truncation(len(rows), kernel_device, **picked),
        ).tolist()  # fmt: skip

    alone = [draw([r])[0] for r in range(4)]
    assert draw([3, 2, 1, 0]) == alone[::-1]
    assert draw([1, 1, 3]) == [alone[1], alone[1], alone[3]]


@pytest.mark.parametrize("penalized", [False, True], ids=["plain", "penalized"])
@pytest.mark.parametrize(
    ("name", "size"), [("_PROGRAMS", 1), ("LIST", 128), *(("_MAX_GROUPS", most) for most in (200, 100, 50))]
)
def test_sizes_of_the_kernels_change_nothing(
    kernel_device: torch.device, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, name: str, size: int,
    penalized: bool,
) -> None:  # fmt: skip
    """Here a small batch takes what large batches and vocabularies take.

    Large batches read several chunks per program, the last program fewer. Vocabularies beyond 131072 have groups of
    several words. Flat rows of vocabularies beyond 65536 have more groups than a list holds; then none is listed.
    """
    rows, vocab = 6, 4 * SAMPLE_CHUNK + 77
    logits = torch.randn(rows, vocab, generator=rng)
    logits[[2, 4]] *= 0.01
    logits[0, [5000, 8200]] = 9.0  # a tie of two chunks
    logits[1, vocab - 1] = 9.0
    processed: dict[str, object] = {}
    if penalized:
        sequences = [(list(range(r, vocab, 16)), [5, 6]) for r in range(rows)]
        repetition = [1.0, 1.0, 1.0, 1.5, 1.5, 1.5]
        with reference_ops():
            processed["penalties"], processed["req_indices"] = penalties_with(
                sequences, vocab, kernel_device, repetition, 0.01, 0.2
            )
    args = arguments(logits.to(kernel_device), [0.0, 0.0, 1.0, 1.0, 0.7, 0.5])
    options = truncation(rows, kernel_device, top_k=[0, 0, 0, 40, 2500, 0], top_p=[1.0, 1.0, 0.97, 0.9, 0.9, 1.0])
    expected = sample(*args, truncation=options, **processed).tolist()
    assert penalized or expected[:2] == [5000, vocab - 1]
    monkeypatch.setattr(sampling, name, size)
    assert sample(*args, truncation=options, **processed).tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 151936, 1 << 20])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_large_vocabularies(rng: torch.Generator, vocab: int, scale: float) -> None:
    """Kept sets as the float64 reference has them, at sizes of models; flat logits keep most tokens."""
    device = torch.device("cuda")
    sets = [(50, 0.9, 0.0), (1024, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.05), (5000, 0.99, 0.0)]
    for top_k, top_p, min_p in sets:
        logits = scale * torch.randn(vocab, generator=rng)
        kept = kept_reference(logits, 0.9, top_k, top_p, min_p)
        options = truncation(8, device, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens = drawn(logits.to(device), 8, 0.9, truncation=options)
        noise = noise_reference(torch.arange(8), torch.full((8,), 5), vocab).double()
        scores = torch.where(kept, logits.double() + 0.9 * noise, -INF)
        best = scores.topk(2).values
        decided = best[:, 0] - best[:, 1] > 1e-4
        assert torch.equal(tokens.long()[decided], scores.argmax(-1)[decided]), (top_k, top_p, min_p)
        assert kept[tokens.long()].all()
