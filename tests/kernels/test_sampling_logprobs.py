"""Log-probabilities against torch's log_softmax in float64, ranks and best tokens against a sort."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.kernels.ops.sampling_logprobs import MAX_TOP, TokenLogprobs, token_logprobs
from graphrt.kernels.types import NO_TOKEN

I32 = torch.int32
INF, NAN = float("inf"), float("nan")


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=I32, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [5, 2048, 4500])
def test_against_log_softmax_and_a_stable_sort(
    op_device: torch.device, rng: torch.Generator, dtype: torch.dtype, vocab: int
) -> None:
    logits = (3 * torch.randn(5, vocab, generator=rng)).to(dtype)
    tokens, wanted = [0, vocab - 1, vocab // 2, NO_TOKEN, 3], [20, 0, 1, 3, -1]
    out = token_logprobs(logits.to(op_device), ints(tokens, op_device), ints(wanted, op_device), max_top=20)
    exact = logits.double().log_softmax(-1)
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices
    for r, (token, count) in enumerate(zip(tokens, wanted, strict=True)):
        asked = count >= 0 and token != NO_TOKEN
        assert int(out.ranks[r]) == (1 + order[r].tolist().index(token) if asked else 0)
        if asked:
            torch.testing.assert_close(out.logprobs[r].double().cpu(), exact[r, token], rtol=1e-6, atol=2e-6)
        else:
            assert out.logprobs[r].isnan()
        count = min(max(count, 0), vocab)
        assert out.top_tokens[r].tolist() == order[r, :count].tolist() + [NO_TOKEN] * (20 - count)
        have = out.top_logprobs[r, :count].double().cpu()
        torch.testing.assert_close(have, exact[r, order[r, :count]], rtol=1e-6, atol=2e-6)
        assert out.top_logprobs[r, count:].isnan().all()


def test_ranks_of_equal_logits_follow_token_ids(op_device: torch.device) -> None:
    logits = torch.zeros(3, 2100, device=op_device)
    out = token_logprobs(logits, ints([0, 2047, 2099], op_device), ints([3, 0, 2], op_device), max_top=3)
    assert out.ranks.tolist() == [1, 2048, 2100]
    assert out.top_tokens.tolist() == [[0, 1, 2], [-1, -1, -1], [0, 1, -1]]


EXTREMES = {
    "masked": ([-INF] * 4, NAN, 0, [-1, -1]),
    "nan": ([NAN] * 4, NAN, 0, [-1, -1]),
    "nan_beside": ([NAN, 0.0, 0.0, -INF], -0.6931471805599453, 1, [1, 2]),
    "one": ([-INF, 3.0, -INF, NAN], 0.0, 1, [1, -1]),
    "infinite": ([0.0, INF, INF, 7.0], -0.6931471805599453, 1, [1, 2]),
    "huge": ([-1e38, 1e38, -3e38, 1e38], -0.6931471805599453, 1, [1, 3]),
}


@pytest.mark.parametrize("case", EXTREMES)
def test_extreme_logits(op_device: torch.device, case: str) -> None:
    logits, logprob, rank, top = EXTREMES[case]
    out = token_logprobs(
        torch.tensor([logits], device=op_device), ints([1], op_device), ints([2], op_device), max_top=2
    )
    torch.testing.assert_close(out.logprobs.cpu(), torch.tensor([logprob]), equal_nan=True)
    assert out.ranks.tolist() == [rank]
    assert out.top_tokens.tolist() == [top]


def test_a_row_is_the_same_in_any_batch(kernel_device: torch.device, rng: torch.Generator) -> None:
    logits = torch.randn(4, 2500, generator=rng).to(kernel_device, torch.bfloat16)
    tokens, wanted = ints([4, 5, 6, 7], kernel_device), ints([2, 2, 0, 2], kernel_device)
    whole = token_logprobs(logits, tokens, wanted, max_top=2)
    order = torch.tensor([3, 1], device=kernel_device)
    part = token_logprobs(logits[order], tokens[order], wanted[order], max_top=2)
    for name in TokenLogprobs.__slots__:
        assert torch.equal(getattr(part, name), getattr(whole, name)[order])


def test_skipped_rows_and_no_rows(kernel_device: torch.device) -> None:
    none = ints([], kernel_device)
    assert token_logprobs(torch.zeros(0, 9, device=kernel_device), none, none, max_top=3).top_tokens.shape == (0, 3)
    one, five = ints([2], kernel_device), ints([5], kernel_device)
    out = token_logprobs(torch.zeros(1, 9, device=kernel_device), one, five, max_top=0)
    assert (out.ranks.tolist(), out.top_tokens.shape) == ([3], (1, 0))


def test_values_out_of_range_raise() -> None:
    none = torch.zeros(2, dtype=I32)
    for width in (-1, MAX_TOP + 1, True):
        with pytest.raises(ConfigError, match=r"^max_top: expected"):
            token_logprobs(torch.zeros(2, 8), none, none, max_top=width)
    with pytest.raises(ShapeError, match="a vocabulary of 1 to"):
        token_logprobs(torch.zeros(2, 0), none, none, max_top=1)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 151936, 1 << 20])
def test_large_vocabularies(rng: torch.Generator, vocab: int) -> None:
    device = torch.device("cuda")
    logits = (2 * torch.randn(4, vocab, generator=rng)).bfloat16()
    tokens = logits.float().argsort(-1)[:, -5].int()
    out = token_logprobs(logits.to(device), tokens.to(device), ints([20, 0, -1, 7], device), max_top=20)
    exact = logits.double().log_softmax(-1)
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices
    assert out.top_tokens[0].tolist() == order[0, :20].tolist()
    torch.testing.assert_close(out.top_logprobs[0].double().cpu(), exact[0, order[0, :20]], rtol=1e-6, atol=5e-6)
    for r in (0, 1, 3):
        assert int(out.ranks[r]) == 1 + order[r].tolist().index(int(tokens[r]))
