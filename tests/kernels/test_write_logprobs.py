"""`write_logprobs` against what was asked for, by hand: entries, places, and rows of which nothing is known."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.logprobs import write_logprobs
from graphrt.kernels.ops.sampling_logprobs import TokenLogprobs
from graphrt.kernels.types import RequestStatus

ROWS, TOP, RING = 5, 3, 4
SAMPLES, LIVE, PAD = (int(status) for status in (RequestStatus.SAMPLES, RequestStatus.LIVE, RequestStatus.PAD))


def buffers_of(device: torch.device, columns: int = 1 + TOP) -> StaticBuffers:
    capacity = Capacity(7, 7, 9, 100, RING, (PageGroup(1, 2, 0, 1),), logprob_columns=columns)
    buffers = StaticBuffers.allocate(capacity, device).cut(ROWS, ROWS)
    for ring in (buffers.rank_ring, buffers.logprob_ring, buffers.logprob_token_ring):
        ring.fill_(-9)
    return buffers


def result_of(device: torch.device, ranks: list[int], top: int = TOP) -> TokenLogprobs:
    rows = torch.arange(ROWS, device=device)
    tops = torch.arange(ROWS * top, device=device).reshape(ROWS, top)
    rank = torch.tensor(ranks, dtype=torch.int32, device=device)
    return TokenLogprobs(-rows.float() - 0.5, rank, tops.int() + 100, -tops.float() - 20)


def write_outputs(buffers: StaticBuffers, tokens: torch.Tensor, result: TokenLogprobs) -> None:
    """Publish, and wait: on CUDA the rings are host memory, which the test reads without a stream's knowledge."""
    write_logprobs(buffers, tokens, result)
    if tokens.device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("step", [0, 6, (1 << 33) + 1])
def test_each_row_of_the_batch_finds_its_own(kernel_device: torch.device, step: int) -> None:
    """Places 0 to 4 hold rows 3, 0, 4, 1, 2. Of row 1 nothing was asked, row 4 is a prompt that goes on with a given
    token, and row 2 one without."""
    buffers = buffers_of(kernel_device)
    buffers.step_counter.fill_(step)
    place_of = [1, 3, 4, 0, 2]
    buffers.places.copy_(torch.tensor(place_of))
    buffers.req_status.copy_(torch.tensor([SAMPLES, SAMPLES, LIVE, SAMPLES, LIVE]))
    buffers.logprob_tokens.copy_(torch.tensor([-1, -1, 5, -1, -1]))
    tokens = torch.tensor([50, 51, 52, 53, 54], dtype=torch.int32, device=kernel_device)
    write_outputs(buffers, tokens, result_of(kernel_device, [1, 2, 3, 0, 4]))
    entry = step % RING
    assert buffers.rank_ring[entry, :ROWS].tolist() == [2, 0, 0, 1, 3]
    for row in range(ROWS):
        place, known = place_of[row], row in (0, 3, 4)
        want = [50 + place, *(100 + TOP * place + i for i in range(TOP))] if known else [-9] * (1 + TOP)
        assert buffers.logprob_token_ring[entry, row].tolist() == want
        theirs = [-0.5 - place, *(-20.0 - TOP * place - i for i in range(TOP))] if known else [-9.0] * (1 + TOP)
        assert buffers.logprob_ring[entry, row].tolist() == theirs
    others = [e for e in range(RING) if e != entry]
    for ring in (buffers.rank_ring, buffers.logprob_ring, buffers.logprob_token_ring):
        assert (ring[others] == -9).all()
        assert (ring[entry, ROWS:] == -9).all()


def test_the_token_alone(kernel_device: torch.device) -> None:
    buffers = buffers_of(kernel_device, columns=1)
    buffers.step_counter.fill_(2)
    buffers.places.copy_(torch.arange(ROWS))
    buffers.req_status.fill_(SAMPLES)
    buffers.logprob_tokens.fill_(-1)
    tokens = torch.arange(ROWS, dtype=torch.int32, device=kernel_device)
    write_outputs(buffers, tokens, result_of(kernel_device, [1] * ROWS, top=0))
    assert buffers.logprob_token_ring[2, :ROWS, 0].tolist() == list(range(ROWS))


def test_pads_say_nothing(kernel_device: torch.device) -> None:
    buffers = buffers_of(kernel_device)
    buffers.step_counter.fill_(0)
    buffers.places.copy_(torch.arange(ROWS))
    buffers.req_status.fill_(PAD)
    buffers.logprob_tokens.fill_(-1)
    write_outputs(
        buffers, torch.zeros(ROWS, dtype=torch.int32, device=kernel_device), result_of(kernel_device, [1] * 5)
    )
    assert buffers.rank_ring[0, :ROWS].tolist() == [0] * ROWS


def test_results_that_do_not_fit_are_named() -> None:
    buffers, device = buffers_of(torch.device("cpu")), torch.device("cpu")
    with pytest.raises(ShapeError, match="tokens: expected"):
        write_logprobs(buffers, torch.zeros(4, dtype=torch.int32), result_of(device, [1] * 5))
    with pytest.raises(ShapeError, match="top_tokens: expected"):
        write_logprobs(buffers, torch.zeros(5, dtype=torch.int32), result_of(device, [1] * 5, top=2))
