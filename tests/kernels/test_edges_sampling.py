"""Sampling and publishing at their bounds: vocabularies, seeds, positions, rings, and each argument wrong alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.library import INTERPRETER_AVAILABLE, interpreted
from graphrt.kernels.ops.reference import SAMPLE_CHUNK, sample_reference
from graphrt.kernels.ops.sampling import publish, sample
from graphrt.kernels.types import NO_TOKEN, RowStatus
from tests.kernels.test_sampling import arguments, exact_draws, one_hot_rows

INF = float("inf")
S = RowStatus


@pytest.fixture(params=["reference", "kernel"])
def draw(request: pytest.FixtureRequest, kernel_device: torch.device) -> Callable[..., torch.Tensor]:
    """`sample` as the kernel runs, and as the reference does, on the same arguments."""
    if request.param == "kernel":
        return lambda *args: sample(*(a.to(kernel_device) for a in args)).cpu()
    return sample_reference


@pytest.mark.parametrize("seed", [2**31 - 1, 2**31, 2**32 - 3, 2**32 + 5, 2**40 + 7], ids=str)
def test_draws_of_large_seeds(draw, rng: torch.Generator, seed: int) -> None:
    """Against Philox on Python's integers: no bit of a seed is lost, and none is taken for a sign."""
    logits = 3 * torch.randn(3, 50, generator=rng)
    expected, margin = exact_draws(logits, [1.0] * 3, seed, 77)
    assert margin > 1e-4
    assert draw(*arguments(logits, 1.0, seed, 77)).tolist() == expected


@pytest.mark.parametrize("position", [0, 1, 2**16, 2**31 - 1], ids=str)
def test_draws_at_extreme_positions(draw, rng: torch.Generator, position: int) -> None:
    logits = 3 * torch.randn(3, 50, generator=rng)
    expected, margin = exact_draws(logits, [0.6] * 3, 4, position)
    assert margin > 1e-4
    assert draw(*arguments(logits, 0.6, 4, position)).tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_of_one(draw, temperature: float) -> None:
    logits = torch.tensor([[0.5], [-INF], [INF], [float("nan")], [-1e38]])
    assert draw(*arguments(logits, temperature)).tolist() == [0, NO_TOKEN, 0, NO_TOKEN, 0]


@pytest.mark.parametrize("vocab", [SAMPLE_CHUNK // 4, SAMPLE_CHUNK // 4 + 1, 3 * SAMPLE_CHUNK - 1, 3 * SAMPLE_CHUNK])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_every_quarter_and_chunk_is_searched_to_its_last_token(draw, vocab: int, temperature: float) -> None:
    """At a low temperature the peak wins; what lies behind a row in memory is the next row, and never chosen."""
    quarter = SAMPLE_CHUNK // 4
    peaks = sorted({0, quarter - 1, min(quarter, vocab - 1), vocab - 1, vocab // 2, max(vocab - quarter, 0)})
    logits = torch.cat([one_hot_rows(vocab, {peak: 9.0}) for peak in peaks])
    assert draw(*arguments(logits, temperature)).tolist() == peaks
    flat = torch.full((len(peaks) * vocab + 1,), 1e30)[:-1].view(len(peaks), vocab)
    flat.copy_(logits)
    assert draw(*arguments(flat, temperature)).tolist() == peaks


def test_greedy_and_drawn_rows_side_by_side(draw, rng: torch.Generator) -> None:
    logits = 3 * torch.randn(4, 40, generator=rng)
    heat = [0.0, 1.0, 0.0, 2.0]
    expected, _ = exact_draws(logits, [1e-9, 1.0, 1e-9, 2.0], 3, 8)
    assert draw(*arguments(logits, heat, 3, 8)).tolist() == expected
    assert [expected[0], expected[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


def test_no_rows(kernel_device: torch.device) -> None:
    out = sample(*(a.to(kernel_device) for a in arguments(torch.zeros(0, 9), 0.0)))
    assert (tuple(out.shape), out.dtype) == ((0,), torch.int32)
    ring = torch.full((2, 3), -7, dtype=torch.int32, device=kernel_device)
    last = torch.full((4,), 5, dtype=torch.int32, device=kernel_device)
    none, counter = ring.new_empty(0), torch.zeros(1, dtype=torch.int64, device=kernel_device)
    publish(none, none, none, counter, last, ring)
    assert set(ring.flatten().tolist()) == {-7}
    assert last.tolist() == [5] * 4


@pytest.mark.parametrize("context", [interpreted, nullcontext], ids=["kernel", "reference"])
def test_a_ring_that_is_just_wide_enough(context) -> None:
    """One entry as wide as the step, and an entry of a wider ring: what lies beside is not touched."""
    if context is interpreted and not INTERPRETER_AVAILABLE:
        pytest.skip("the compiled kernels are tested on this machine")
    for depth, width, step in ((1, 3, 7), (1, 3, 0), (3, 5, 5), (2, 3, 2**40 + 1)):
        whole = torch.full((depth + 2, width), -77, dtype=torch.int32)
        last = torch.tensor([10, 11, 12, 13], dtype=torch.int32)
        row_ids = torch.tensor([2, 0, 3], dtype=torch.int32)
        status = torch.tensor([S.SAMPLES, S.LIVE, S.INVALID], dtype=torch.int32)
        with context():
            publish(torch.tensor([21, 22, 23]), row_ids, status, torch.tensor([step]), last, whole[1:-1])
        expected = [[-77] * width for _ in range(depth + 2)]
        expected[1 + step % depth][:3] = [21, NO_TOKEN, NO_TOKEN]
        assert whole.tolist() == expected
        assert last.tolist() == [NO_TOKEN, 11, 21, 13]


def sample_arguments() -> dict[str, torch.Tensor]:
    return dict(zip(("logits", "temperatures", "seeds", "seq_lens"), arguments(torch.zeros(3, 8), 0.0), strict=True))


def publish_arguments() -> dict[str, torch.Tensor]:
    int32 = torch.int32
    return {
        "tokens": torch.zeros(3, dtype=int32),
        "row_ids": torch.arange(3, dtype=int32),
        "row_status": torch.zeros(3, dtype=int32),
        "step_counter": torch.zeros(1, dtype=torch.int64),
        "last_token": torch.zeros(4, dtype=int32),
        "token_ring": torch.zeros(2, 3, dtype=int32),
    }


OPS = {"sample": (sample, sample_arguments), "publish": (publish, publish_arguments)}
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda t: t.double(),
    "rank": lambda t: t.unsqueeze(0),
    "scalar": lambda t: t.flatten()[0],
    "device": lambda t: t.to("meta"),
    "stride": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "shorter": lambda t: t[:-1],
    "longer": lambda t: torch.cat([t, t[:1]]),
}
SIZED = {"sample": ("temperatures", "seeds", "seq_lens"), "publish": ("row_ids", "row_status", "step_counter")}
ARGUMENTS = [(op, name) for op, (_, make) in OPS.items() for name in make()]


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_every_argument_is_checked_by_itself(op: str, name: str) -> None:
    call, make = OPS[op]
    call(**make())
    for what, change in WRONG.items():
        if what in ("shorter", "longer") and name not in SIZED[op]:
            continue  # its extent is what the others are measured by
        if (name, what) in {("step_counter", "stride"), ("token_ring", "device")}:
            continue  # of one value there is none; the ring may lie in pinned memory
        with pytest.raises(ShapeError) as caught:
            call(**make() | {name: change(make()[name])})
        first = {"logits": "temperatures", "tokens": "row_ids"}.get(name, name) if what == "device" else name
        assert str(caught.value).startswith(f"{first}: expected"), what


@pytest.mark.parametrize(("depth", "width"), [(0, 3), (2, 2), (0, 0), (1, 0)])
def test_a_ring_without_room(depth: int, width: int) -> None:
    with pytest.raises(ShapeError, match=rf"token_ring: expected \[>= 1, >= 3\], got \[{depth}, {width}\]"):
        publish(**publish_arguments() | {"token_ring": torch.zeros(depth, width, dtype=torch.int32)})
