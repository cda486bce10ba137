"""Rejection sampling: log-probabilities against exact ones, and the distribution of accepted and replaced drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted
from graphrt.kernels.ops.rejection import DRAFT_SEED, kept_logprobs, residual, store_draft_logprobs
from graphrt.kernels.ops.sampling import sample
from tests.kernels.test_sampling_distribution import CASES, check_counts, devices, flat_logits, setting
from tests.support.sampling_cases import I32, arguments, one_hot_rows, truncation

CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="the compiled kernels are tested here")


@devices
@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_the_exact_distribution(device: str, case: str) -> None:
    """Those of transformers' processors in float64; the interpreted kernel agrees."""
    where = torch.device(device)
    exact, temperature, kwargs = setting(case, 2, where)
    run = lambda: kept_logprobs(  # noqa: E731
        *arguments(flat_logits().to(where).expand(2, -1), temperature), **kwargs
    ).cpu()
    results = [run()]
    if device == "cpu" and INTERPRETER_AVAILABLE:
        with interpreted():
            results.append(run())
    for found in results:
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0].double().exp(), exact, atol=1e-6, rtol=1e-5)
        assert ((found[0] > -torch.inf) == (exact > 0)).all()


def many_logits(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows with ties, and rows of edges: a NaN, infinities, nothing to sample."""
    rng = torch.Generator().manual_seed(11)
    rows = (4 * torch.randn(6, vocab, generator=rng)).to(dtype)
    rows[1] = (rows[1] * 2).round() / 2
    edges = one_hot_rows(vocab, {3: torch.nan}, {5: torch.inf, 9: torch.inf}, {7: 80.0}, rest=-1.0)
    return torch.cat((rows, edges.to(dtype), torch.full((1, vocab), -torch.inf, dtype=dtype)))


@pytest.mark.parametrize(
    ("device", "vocab"),
    [pytest.param("cpu", 1500, marks=needs_interpreter), pytest.param("cuda", 128256, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e30])
@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}])
def test_the_kernel_agrees_with_the_reference(
    device: str, vocab: int, temperature: float, options: dict[str, float]
) -> None:
    logits = many_logits(vocab, torch.bfloat16)
    rows = len(logits)
    want = kept_logprobs(*arguments(logits, temperature), truncation=truncation(rows, CPU, **options))
    where = torch.device(device)
    call = lambda: kept_logprobs(  # noqa: E731
        *arguments(logits.to(where), temperature), truncation=truncation(rows, where, **options)
    ).cpu()
    if device == "cpu":
        with interpreted():
            found = call()
    else:
        found = call()
    torch.testing.assert_close(found, want, atol=2e-4, rtol=1e-5)
    assert found[-1].eq(-torch.inf).all()


def distributions(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the model and of the draft model: they differ, and each lacks tokens of the other."""
    rng = torch.Generator().manual_seed(5)
    p, q = torch.randn(12, generator=rng), torch.randn(12, generator=rng)
    p[[2, 5]], q[[5, 7, 8]] = -torch.inf, -torch.inf
    return p.log_softmax(0).to(device), q.log_softmax(0).to(device)


def verified(log_p: torch.Tensor, log_q: torch.Tensor, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts from q, and the tokens that replace or equal them, one per seed."""
    rows, device = len(seeds), seeds.device
    ones, at = torch.ones(rows, device=device), torch.full((rows,), 9, dtype=I32, device=device)
    drafts = sample(log_q.expand(rows, -1), ones, seeds + DRAFT_SEED, at)
    zeros = torch.zeros(rows, dtype=I32, device=device)
    inputs = torch.stack((drafts, drafts), 1).flatten().long()  # the token before a draft is not read
    places = 2 * torch.arange(rows, device=device)
    of_rows = log_p.expand(rows, -1).contiguous()
    logits = residual(of_rows, log_q[None, None].contiguous(), inputs, places, zeros + 1, zeros, seeds, at, position=0)
    return drafts.cpu().long(), sample(logits, ones, seeds, at).cpu().long()


@pytest.mark.parametrize(
    ("device", "count"), [("cpu", 100_000), pytest.param("cuda", 1_000_000, marks=pytest.mark.gpu)]
)
def test_tokens_have_the_distribution_of_the_model(device: str, count: int) -> None:
    """Also given the draft, by the formula. The part that the distributions have in common is accepted."""
    log_p, log_q = distributions(torch.device(device))
    p, q = (x.double().exp().cpu() for x in (log_p, log_q))
    drafts, tokens = [torch.cat(parts) for parts in zip(*(
        verified(log_p, log_q, torch.arange(start, start + 50_000, device=device)) for start in range(0, count, 50_000)
    ), strict=True)]  # fmt: skip
    check_counts(drafts.bincount(minlength=12), count * q)
    check_counts(tokens.bincount(minlength=12), count * p)
    common = float(torch.minimum(p, q).sum())
    assert (drafts == tokens).double().mean() == pytest.approx(common, abs=5 * (common / count) ** 0.5)
    rest = (p - q).clamp_min(0) / (p - q).clamp_min(0).sum()
    accepted = torch.where(q > 0, (p / q).clamp_max(1), 0.0)
    joint = torch.diag(q * accepted) + (q * (1 - accepted))[:, None] * rest
    check_counts((drafts * 12 + tokens).bincount(minlength=144), count * joint.flatten())


@needs_interpreter
def test_interpreted_kernels_agree_with_the_references() -> None:
    """Rows with an accepted and a rejected draft, without drafts and of padding; equal distributions are accepted."""
    log_p, log_q = distributions(CPU)
    rows, seeds, at = 40, torch.arange(40), torch.full((40,), 9, dtype=I32)
    drafts = sample(log_q.expand(rows, -1), torch.ones(rows), seeds + DRAFT_SEED, at)
    left, req_indices = (torch.arange(rows) % 4 - 1).int(), (torch.arange(rows) % 7 - 1).int()
    proposed = torch.stack((log_p.expand(rows, -1), log_q.expand(rows, -1)), 1).contiguous()
    last, found = torch.arange(rows) - 1, []
    last[0] = 0
    for runs in (lambda call: call(), run_interpreted):
        kept = torch.full((6, 2, 12), 7.0)
        runs(lambda kept=kept: store_draft_logprobs(proposed[:7], req_indices[:7], kept))
        assert torch.equal(kept[:6], proposed[1:7])
        for position in (0, 1):
            call = partial(
                residual, log_p.expand(rows, -1).contiguous(), kept, drafts.long(), last, left, req_indices, seeds, at,
                position=position,
            )  # fmt: skip
            found.append(runs(call))
    for position in (0, 1):
        torch.testing.assert_close(found[position], found[2 + position], atol=1e-5, rtol=1e-5)
    idle = (left <= 0) | (req_indices < 0)
    assert torch.equal(found[1][idle], log_p.expand(rows, -1)[idle])
    # The first distribution that is stored is the model's, so every draft is accepted that can be sampled from it.
    accepted, possible = (found[0][~idle] == 0).sum(1) == 1, log_p[drafts[last + 1].long()][~idle] > -torch.inf
    assert torch.equal(accepted, possible)
    assert 0 < possible.sum() < len(possible)


def run_interpreted(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with interpreted():
        return call()


def test_what_is_refused() -> None:
    log_p, log_q = distributions(CPU)
    with pytest.raises(ShapeError, match="the proposer's log-probabilities"):
        store_draft_logprobs(log_p[None], torch.zeros(1, dtype=I32), log_q[None, None])
    with pytest.raises(ShapeError, match="draft_logprobs: expected"):
        residual(
            log_p[None], log_q[None, None, :5].contiguous(), torch.zeros(2, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64), *(torch.zeros(1, dtype=I32) for _ in range(2)),
            torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=I32), position=0,
        )  # fmt: skip
