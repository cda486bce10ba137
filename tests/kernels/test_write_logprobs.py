"""`write_logprobs` against hand-written results: ring entries, batch order, and requests without a token."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.logprobs import write_logprobs
from graphrt.kernels.ops.sampling_logprobs import TokenLogprobs

REQS, TOP, RING = 5, 3, 4


def buffers_of(device: torch.device, columns: int = 1 + TOP) -> StaticBuffers:
    capacity = Capacity(7, 7, 9, 100, RING, (PageGroup(1, 2, 0, 1),), logprob_columns=columns)
    buffers = StaticBuffers.allocate(capacity, device).cut(REQS, REQS)
    for ring in (buffers.rank_ring, buffers.logprob_ring, buffers.logprob_token_ring):
        ring.fill_(-9)
    return buffers


def result_of(device: torch.device, ranks: list[int], top: int = TOP) -> TokenLogprobs:
    reqs = torch.arange(REQS, device=device)
    tops = torch.arange(REQS * top, device=device).reshape(REQS, top)
    rank = torch.tensor(ranks, dtype=torch.int32, device=device)
    return TokenLogprobs(-reqs.float() - 0.5, rank, tops.int() + 100, -tops.float() - 20)


@pytest.mark.parametrize("step", [0, 6, (1 << 33) + 1])
def test_results_are_in_batch_order(kernel_device: torch.device, step: int) -> None:
    """Buffer rows 0 to 4 hold requests 3, 0, 4, 1, 2.

    Request 1 asks for nothing. Request 4 is an unfinished prefill with a given token, request 2 one without.
    """
    buffers = buffers_of(kernel_device)
    buffers.step_counter.fill_(step)
    buffer_row_of = [1, 3, 4, 0, 2]
    buffers.buffer_rows.copy_(torch.tensor(buffer_row_of))
    buffers.drafts_left.copy_(torch.tensor([0, 3, -1, 1, -1]))
    buffers.logprob_tokens.copy_(torch.tensor([-1, -1, 5, -1, -1]))
    tokens = torch.tensor([50, 51, 52, 53, 54], dtype=torch.int32, device=kernel_device)
    write_logprobs(buffers, tokens, result_of(kernel_device, [1, 2, 3, 0, 4]))
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()  # the rings are host memory that the test reads without a stream
    entry = step % RING
    assert buffers.rank_ring[entry, 0, :REQS].tolist() == [2, 0, 0, 1, 3]
    for at in range(REQS):
        row, known = buffer_row_of[at], at in (0, 3, 4)
        want = [50 + row, *(100 + TOP * row + i for i in range(TOP))] if known else [-9] * (1 + TOP)
        assert buffers.logprob_token_ring[entry, 0, at].tolist() == want
        theirs = [-0.5 - row, *(-20.0 - TOP * row - i for i in range(TOP))] if known else [-9.0] * (1 + TOP)
        assert buffers.logprob_ring[entry, 0, at].tolist() == theirs
    others = [e for e in range(RING) if e != entry]
    for ring in (buffers.rank_ring, buffers.logprob_ring, buffers.logprob_token_ring):
        assert (ring[others] == -9).all()
        assert (ring[entry, :, REQS:] == -9).all()


@pytest.mark.parametrize(("samples", "top"), [(True, 0), (False, TOP)], ids=["without_top_tokens", "pad"])
def test_steps_of_one_status(kernel_device: torch.device, samples: bool, top: int) -> None:
    buffers = buffers_of(kernel_device, columns=1 + top)
    buffers.step_counter.fill_(2)
    buffers.buffer_rows.copy_(torch.arange(REQS))
    buffers.drafts_left.fill_(0 if samples else -1)
    buffers.logprob_tokens.fill_(-1)
    tokens = torch.arange(REQS, dtype=torch.int32, device=kernel_device)
    write_logprobs(buffers, tokens, result_of(kernel_device, [1] * REQS, top))
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.rank_ring[2, 0, :REQS].tolist() == [int(samples)] * REQS
    assert buffers.logprob_token_ring[2, 0, :REQS, 0].tolist() == (list(range(REQS)) if samples else [-9] * REQS)


def test_arguments_of_wrong_shape_raise() -> None:
    buffers, device = buffers_of(torch.device("cpu")), torch.device("cpu")
    with pytest.raises(ShapeError, match="tokens: expected"):
        write_logprobs(buffers, torch.zeros(4, dtype=torch.int32), result_of(device, [1] * 5))
    with pytest.raises(ShapeError, match="top_tokens: expected"):
        write_logprobs(buffers, torch.zeros(5, dtype=torch.int32), result_of(device, [1] * 5, top=2))
