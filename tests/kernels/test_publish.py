"""Publishing, kernel and reference, against expectations in plain Python."""

from __future__ import annotations

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata.buffers import Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.publish import publish
from graphrt.kernels.types import NO_TOKEN, FaultCode, RowStatus

CPU = torch.device("cpu")
VOCAB = 262208  # of a real model; more than 2**18
S, F = RowStatus, FaultCode
UNTOUCHED = -77

# token, row id, status, fault of the refresh; then what the host must find: token, code, value
Entry = tuple[int, int, RowStatus, tuple[FaultCode, int], int, FaultCode, int]
FINE = (F.NONE, 0)
STEPS: list[tuple[int, list[Entry]]] = [
    (
        4,
        [
            (11, 3, S.SAMPLES, FINE, 11, F.NONE, 0),
            (12, 0, S.LIVE, FINE, NO_TOKEN, F.NONE, 0),
            (13, -1, S.INVALID, (F.PAGE_OUT_OF_RANGE, 99), NO_TOKEN, F.PAGE_OUT_OF_RANGE, 99),
            (14, 7, S.SAMPLES, FINE, 14, F.NONE, 0),
            (15, -1, S.PAD, FINE, NO_TOKEN, F.NONE, 0),
        ],
    ),
    (5, [(0, 3, S.SAMPLES, FINE, 0, F.NONE, 0)]),
    (6, [(21, -1, S.PAD, FINE, NO_TOKEN, F.NONE, 0), (22, -1, S.PAD, FINE, NO_TOKEN, F.NONE, 0)]),
    (
        2**33 + 1,
        [
            (NO_TOKEN, 5, S.SAMPLES, FINE, NO_TOKEN, F.NO_TOKEN_OFFERED, NO_TOKEN),
            (VOCAB - 1, 6, S.SAMPLES, FINE, VOCAB - 1, F.NONE, 0),
            (VOCAB, 4, S.SAMPLES, FINE, NO_TOKEN, F.SAMPLE_OUT_OF_RANGE, VOCAB),
            (-2, 2, S.SAMPLES, FINE, NO_TOKEN, F.SAMPLE_OUT_OF_RANGE, -2),
            (VOCAB + 9, 0, S.LIVE, FINE, NO_TOKEN, F.NONE, 0),  # nobody samples: whatever the sampler says
            (-5, -1, S.INVALID, (F.DUPLICATE_ROW, 3), NO_TOKEN, F.DUPLICATE_ROW, 3),
        ],
    ),
]


def make_buffers(device: torch.device, rows: int, row_ids: int, ring: int = 3) -> StaticBuffers:
    buffers = StaticBuffers.allocate(Capacity(rows, rows, row_ids, 100, ring, (PageGroup(1, 2, 0, 1),)), device)
    for name in ("step_ring", "token_ring", "fault_code_ring", "fault_value_ring"):
        getattr(buffers, name).fill_(UNTOUCHED)
    buffers.last_token.copy_(torch.arange(100, 100 + row_ids))
    buffers.places.copy_(torch.arange(rows))
    return buffers


def check_steps(device: torch.device, dtype: torch.dtype) -> None:
    buffers = make_buffers(device, 6, 8)
    expected = {n: getattr(buffers, n).tolist() for n in ("token_ring", "fault_code_ring", "fault_value_ring")}
    last = buffers.last_token.tolist()
    for step, entries in STEPS:
        cut, entry = buffers.cut(len(entries), len(entries)), step % 3
        tokens, row_ids, status, faults, found, codes, values = (list(c) for c in zip(*entries, strict=True))
        cut.step_counter.fill_(step)
        cut.row_ids.copy_(torch.tensor(row_ids))
        cut.row_status.copy_(torch.tensor([int(s) for s in status]))
        cut.fault_code.copy_(torch.tensor([int(code) for code, _ in faults]))
        cut.fault_value.copy_(torch.tensor([value for _, value in faults]))
        cut.void_ids.fill_(-1)
        if step == 6:
            cut.void_ids[1] = 7
            last[7] = NO_TOKEN  # a sequence that began with a fault
        publish(cut, torch.tensor(tokens, dtype=dtype, device=device), vocab_size=VOCAB)
        if device.type == "cuda":
            torch.cuda.synchronize()
        n = len(entries)
        expected["token_ring"][entry][:n] = found
        expected["fault_code_ring"][entry][:n] = [int(code) for code in codes]
        for r, (i, s) in enumerate(zip(row_ids, status, strict=True)):
            if codes[r]:
                expected["fault_value_ring"][entry][r] = values[r]
            if s in (S.SAMPLES, S.LIVE):
                last[i] = found[r]  # a prompt chunk and a void sample forget what an ended sequence left
        for name, value in expected.items():
            assert getattr(buffers, name).tolist() == value, name
        assert buffers.last_token.tolist() == last
        assert buffers.step_ring[entry] == step
    assert buffers.step_ring.tolist() == [
        2**33 + 1 if i == (2**33 + 1) % 3 else {0: 6, 1: 4, 2: 5}[i] for i in range(3)
    ]


dtypes = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)


@dtypes
def test_kernel(kernel_device: torch.device, dtype: torch.dtype) -> None:
    check_steps(kernel_device, dtype)


@dtypes
def test_reference(dtype: torch.dtype) -> None:
    check_steps(CPU, dtype)


def check_places(device: torch.device) -> None:
    """What stands at another place than in the batch goes to the host in the batch's order, and to its own row id."""
    buffers = make_buffers(device, 3, 8)
    buffers.places.copy_(torch.tensor([2, 0, 1]))
    buffers.row_ids.copy_(torch.tensor([5, 6, -1]))
    buffers.void_ids.copy_(torch.tensor([-1, -1, 7]))
    buffers.row_status.copy_(torch.tensor([int(S.SAMPLES), int(S.LIVE), int(S.INVALID)]))
    buffers.fault_code.copy_(torch.tensor([0, 0, int(F.BAD_LENGTH)]))
    buffers.fault_value.copy_(torch.tensor([1, 2, 33]))
    buffers.step_counter.zero_()
    publish(buffers, torch.tensor([70, 71, 72], device=device), vocab_size=100)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.token_ring[0].tolist() == [NO_TOKEN, 70, NO_TOKEN]
    assert buffers.fault_code_ring[0].tolist() == [int(F.BAD_LENGTH), 0, 0]
    assert buffers.fault_value_ring[0].tolist() == [33, UNTOUCHED, UNTOUCHED]
    assert buffers.last_token.tolist() == [100, 101, 102, 103, 104, 70, NO_TOKEN, NO_TOKEN]


def test_places_kernel(kernel_device: torch.device) -> None:
    check_places(kernel_device)


def test_places_reference() -> None:
    check_places(CPU)


def check_wide_samples(device: torch.device) -> None:
    """2**32 + 5 is no token 5."""
    buffers = make_buffers(device, 2, 2)
    buffers.row_ids.copy_(torch.arange(2))
    buffers.void_ids.fill_(-1)
    buffers.row_status.fill_(int(S.SAMPLES))
    buffers.step_counter.zero_()
    publish(buffers, torch.tensor([2**32 + 5, -(2**32) + 5], device=device), vocab_size=100)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.token_ring[0].tolist() == [NO_TOKEN, NO_TOKEN]
    assert buffers.fault_code_ring[0].tolist() == [int(F.SAMPLE_OUT_OF_RANGE)] * 2
    assert buffers.fault_value_ring[0].tolist() == [2**32 + 5, -(2**32) + 5]
    assert buffers.last_token.tolist() == [NO_TOKEN, NO_TOKEN]


def test_wide_samples_kernel(kernel_device: torch.device) -> None:
    check_wide_samples(kernel_device)


def test_wide_samples_reference() -> None:
    check_wide_samples(CPU)


def check_without_tokens(device: torch.device) -> None:
    """The caller samples: faults are told, last tokens stay."""
    buffers = make_buffers(device, 3, 3)
    buffers.row_ids.copy_(torch.tensor([2, -1, 1]))
    buffers.row_status.copy_(torch.tensor([int(S.SAMPLES), int(S.INVALID), int(S.LIVE)]))
    buffers.fault_code.copy_(torch.tensor([0, int(F.BAD_LENGTH), 0]))
    buffers.fault_value.copy_(torch.tensor([0, 17, 0]))
    buffers.step_counter.fill_(7)
    publish(buffers, None, vocab_size=100)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.step_ring.tolist() == [UNTOUCHED, 7, UNTOUCHED]
    assert buffers.token_ring[1].tolist() == [NO_TOKEN] * 3
    assert buffers.fault_code_ring[1].tolist() == [0, int(F.BAD_LENGTH), 0]
    assert buffers.fault_value_ring[1].tolist() == [UNTOUCHED, 17, UNTOUCHED]
    assert buffers.last_token.tolist() == [100, 101, 102]


def test_without_tokens_kernel(kernel_device: torch.device) -> None:
    check_without_tokens(kernel_device)


def test_without_tokens_reference() -> None:
    check_without_tokens(CPU)


def test_more_rows_than_a_program_takes(kernel_device: torch.device) -> None:
    rows = 1500
    buffers = make_buffers(kernel_device, rows, rows, ring=2)
    tokens = torch.arange(rows, dtype=torch.int32, device=kernel_device)
    buffers.row_ids.copy_(tokens.flip(0))
    buffers.void_ids.fill_(-1)
    buffers.row_status.fill_(int(S.SAMPLES))
    buffers.step_counter.fill_(1)
    publish(buffers, tokens, vocab_size=rows)
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.token_ring[1].tolist() == list(range(rows))
    assert buffers.last_token.tolist() == list(range(rows))[::-1]
    assert set(buffers.token_ring[0].tolist()) == {UNTOUCHED}
    assert buffers.step_ring.tolist() == [UNTOUCHED, 1]


BAD = {
    "dtype": (torch.zeros(2, dtype=torch.float32), "tokens: expected dtype int32 or int64"),
    "shape": (torch.zeros(3, dtype=torch.int32), r"tokens: expected shape \[2\], got \[3\]"),
    "stride": (torch.zeros(4, dtype=torch.int32)[::2], "tokens: expected stride 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_tokens_that_do_not_fit_are_named(case: str) -> None:
    tokens, message = BAD[case]
    with pytest.raises(ShapeError, match=message):
        publish(make_buffers(CPU, 2, 2), tokens, vocab_size=5)
