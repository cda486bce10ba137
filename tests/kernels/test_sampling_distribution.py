"""The distribution of draws of `sample`: chi-square against exact probabilities, option by option.

On CPU the reference draws thousands of tokens, and the interpreted kernel some of the same: a draw of it takes a tenth
of a second. On a GPU the kernel draws a hundred thousand.
"""

from __future__ import annotations

import math

import pytest
import torch

from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted
from graphrt.kernels.ops.sampling import sample
from graphrt.kernels.ops.sampling_reference import noise_reference
from graphrt.kernels.ops.sampling_state import Penalties
from tests.support.sampling_cases import (
    I32,
    INF,
    biases,
    column,
    drawn,
    formula,
    penalties_with,
    token_mask,
    truncation,
    warped,
)

VOCAB = 70  # tokens of three groups of the noise, the last one cut short
PROMPT, OUTPUT = [3, 3, 9, 40], [5, 5, 1, 64, 40]
BIAS = {2: 1.5, 10: -0.4, 33: 2.0, 69: 2.5, 68: -INF}
FORBIDDEN = [4, 31, 32, 50]
CASES = {
    "temperature": {},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "penalties": {"penalties": (1.5, 0.4, 0.3)},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "all": {
        "top_k": 30, "top_p": 0.9, "min_p": 0.02, "penalties": (1.5, 0.4, 0.3), "bias": True, "mask": True,
        "temperature": 1.3,
    },
}  # fmt: skip


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
KERNEL_DRAWS = 16


def bound(freedom: int) -> float:
    """The 0.01 % point of chi-square, after Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def check_counts(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square of counts; cells of which fewer than five are expected are taken together."""
    assert observed[expected == 0].sum() == 0, "a token was drawn that has no probability"
    many = expected >= 5
    cells = [torch.stack((observed[many].double(), expected[many]), 1)]
    rest = torch.stack((observed[~many].sum().double(), expected[~many].sum()))
    if rest[1] >= 1:
        cells.append(rest[None])
    have, want = torch.cat(cells).unbind(1)
    assert len(want) > 1
    assert ((have - want) ** 2 / want).sum() < bound(len(want) - 1)


def flat_logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))


def setting(case: str, count: int, where: torch.device) -> tuple[torch.Tensor, float, dict[str, object]]:
    """Exact probabilities (float64), the temperature, and the options of `sample` for so many rows."""
    options, kwargs = CASES[case], {}
    temperature = options.get("temperature", 0.8)
    values = flat_logits().double()
    if "mask" in options:
        allowed = torch.ones(1, VOCAB, dtype=torch.bool)
        allowed[0, FORBIDDEN] = False
        values = torch.where(allowed[0], values, -INF)
        kwargs["token_mask"] = token_mask(allowed, [0] * count, where)
    if "bias" in options:
        for token, value in BIAS.items():
            values[token] += value
    repetition = options.get("penalties", (1.0, 0.0, 0.0))
    exact = formula(values, PROMPT, OUTPUT, *repetition)
    sets = (options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
    if "penalties" in options or "bias" in options:
        penalties, req_indices = penalties_with([(PROMPT, OUTPUT)], VOCAB, where, *repetition)
        kwargs["req_indices"] = req_indices.expand(count).contiguous()
        if "penalties" in options:
            of_rows = (column(value, count, torch.float32, where) for value in repetition)
            kwargs["penalties"] = Penalties(*of_rows, penalties.state)
        if "bias" in options:
            kwargs["bias"] = biases([BIAS], req_indices.tolist(), 4, where)
    if sets != (0, 1.0, 0.0):
        kwargs["truncation"] = truncation(count, where, top_k=sets[0], top_p=sets[1], min_p=sets[2])
    return warped(exact, temperature, *sets).softmax(0), temperature, kwargs


@devices
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(device: str, case: str) -> None:
    where, count = torch.device(device), 4000 if device == "cpu" else 100_000
    exact, temperature, kwargs = setting(case, count, where)
    tokens = drawn(flat_logits().to(where), count, temperature, first_seed=1000, **kwargs)
    check_counts(torch.bincount(tokens.long(), minlength=VOCAB), count * exact)


@pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="the compiled kernels are tested on this machine")
@pytest.mark.parametrize("case", CASES)
def test_the_interpreted_kernel_draws_the_same(case: str) -> None:
    _, temperature, kwargs = setting(case, KERNEL_DRAWS, torch.device("cpu"))
    expected = drawn(flat_logits(), KERNEL_DRAWS, temperature, first_seed=1000, **kwargs)
    with interpreted():
        tokens = drawn(flat_logits(), KERNEL_DRAWS, temperature, first_seed=1000, **kwargs)
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) > 3


@devices
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_of_neighboring_keys_are_independent(device: str, varied: str) -> None:
    """Pairs of draws at (seed, position) and at the next seed, or the next position: a table of all pairs."""
    where, count, tokens = torch.device(device), 20_000 if device == "cpu" else 100_000, 8
    logits = torch.linspace(-1, 1, tokens)
    keys = 2 * torch.arange(count, device=where)
    at = torch.full((count,), 7, dtype=I32, device=where)
    heat = torch.ones(count, device=where)
    pairs = []
    for step in (0, 1):
        seeds, positions = (keys + step, at) if varied == "seed" else (keys, at + step)
        pairs.append(sample(logits.to(where).expand(count, -1), heat, seeds, positions).cpu().long())
    exact = logits.double().softmax(0)
    expected = count * (exact[:, None] * exact[None, :]).flatten()
    check_counts(torch.bincount(tokens * pairs[0] + pairs[1], minlength=tokens**2), expected)


@pytest.fixture(scope="module")
def variates() -> torch.Tensor:
    """exp(-noise) of two groups and a third cut short, for many keys: they should be exponential variates."""
    seeds = torch.arange(40_000)
    return (-noise_reference(seeds, seeds % 50, VOCAB).double()).exp()


def test_variates_of_each_token_are_exponential(variates: torch.Tensor) -> None:
    """In 20 cells of equal probability, for tokens at every place of a group."""
    cells = ((1 - (-variates).exp()) * 20).long().clamp(max=19)
    for token in range(VOCAB):
        check_counts(torch.bincount(cells[:, token], minlength=20), torch.full((20,), len(cells) / 20).double())


def test_variates_of_a_group_are_independent(variates: torch.Tensor) -> None:
    """All pairs by correlation, and the least of any set of a group's tokens: equally often each, and exponential."""
    correlations = torch.corrcoef((1 - (-variates).exp()).T) - torch.eye(VOCAB)
    assert correlations.abs().max() < 5.5 / math.sqrt(len(variates))
    for chosen in ([0, 1], [3, 17, 31], list(range(32)), list(range(5, 25)), [30, 31, 32, 33], [64, 69]):
        least, which = variates[:, chosen].min(1)
        count = len(chosen)
        check_counts(torch.bincount(which, minlength=count), torch.full((count,), len(variates) / count).double())
        cells = ((1 - (-count * least).exp()) * 20).long().clamp(max=19)
        check_counts(torch.bincount(cells, minlength=20), torch.full((20,), len(cells) / 20).double())
        # The least value says nothing about whose it is.
        table = torch.bincount(which * 2 + (least < math.log(2) / count), minlength=2 * count)
        check_counts(table, torch.full((2 * count,), len(variates) / count / 2).double())
