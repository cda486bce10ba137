"""`write_outputs`, kernel and reference, against expected results in plain Python."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import STOP_TOKENS, BufferKind, StaticBuffers
from graphrt.kernels.metadata.write_outputs import write_outputs
from graphrt.kernels.types import NO_TOKEN, FaultCode, FinishReason, RequestStatus
from tests.support.refresh_rig import UNTOUCHED, make_buffers

CPU = torch.device("cpu")
VOCAB = 262208  # of a real model; more than 2**18
S, F = RequestStatus, FaultCode

# token, request index, status, fault of the refresh; then the expected results: token, code, value
Entry = tuple[int, int, RequestStatus, tuple[FaultCode, int], int, FaultCode, int]
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
            (VOCAB + 9, 0, S.LIVE, FINE, NO_TOKEN, F.NONE, 0),  # not sampled: the sampler may return anything
            (-5, -1, S.INVALID, (F.DUPLICATE_REQUEST, 3), NO_TOKEN, F.DUPLICATE_REQUEST, 3),
        ],
    ),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_steps(op_device: torch.device, dtype: torch.dtype) -> None:
    buffers = make_buffers(op_device, 6, 8)
    expected = {n: getattr(buffers, n).tolist() for n in ("token_ring", "fault_code_ring", "fault_value_ring")}
    last = buffers.last_token.tolist()
    for step, entries in STEPS:
        cut, entry = buffers.cut(len(entries), len(entries)), step % 3
        tokens, req_indices, status, faults, found, codes, values = (list(c) for c in zip(*entries, strict=True))
        cut.step_counter.fill_(step)
        cut.req_indices.copy_(torch.tensor(req_indices))
        cut.req_status.copy_(torch.tensor([int(s) for s in status]))
        cut.fault_code.copy_(torch.tensor([int(code) for code, _ in faults]))
        cut.fault_value.copy_(torch.tensor([value for _, value in faults]))
        cut.void_req_indices.fill_(-1)
        if step == 6:
            cut.void_req_indices[1] = 7
            last[7] = NO_TOKEN  # a sequence that starts with a fault
        write_outputs(cut, torch.tensor(tokens, dtype=dtype, device=op_device), vocab_size=VOCAB)
        if op_device.type == "cuda":
            torch.cuda.synchronize()
        n = len(entries)
        expected["token_ring"][entry][:n] = found
        expected["fault_code_ring"][entry][:n] = [int(code) for code in codes]
        for r, (i, s) in enumerate(zip(req_indices, status, strict=True)):
            if codes[r]:
                expected["fault_value_ring"][entry][r] = values[r]
            if s in (S.SAMPLES, S.LIVE):
                last[i] = found[r]  # prefill chunks and void samples clear the previous last token
        for name, value in expected.items():
            assert getattr(buffers, name).tolist() == value, name
        assert buffers.last_token.tolist() == last
        assert buffers.step_ring[entry] == step
    assert buffers.step_ring.tolist() == [
        2**33 + 1 if i == (2**33 + 1) % 3 else {0: 6, 1: 4, 2: 5}[i] for i in range(3)
    ]


def test_order(op_device: torch.device) -> None:
    """Results are in batch order in the rings, and by request index in the state, if buffer rows are reordered."""
    buffers = make_buffers(op_device, 3, 8)
    buffers.buffer_rows.copy_(torch.tensor([2, 0, 1]))
    buffers.req_indices.copy_(torch.tensor([5, 6, -1]))
    buffers.void_req_indices.copy_(torch.tensor([-1, -1, 7]))
    buffers.req_status.copy_(torch.tensor([int(S.SAMPLES), int(S.LIVE), int(S.INVALID)]))
    buffers.fault_code.copy_(torch.tensor([0, 0, int(F.BAD_LENGTH)]))
    buffers.fault_value.copy_(torch.tensor([1, 2, 33]))
    buffers.step_counter.zero_()
    write_outputs(buffers, torch.tensor([70, 71, 72], device=op_device), vocab_size=100)
    if op_device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.token_ring[0].tolist() == [NO_TOKEN, 70, NO_TOKEN]
    assert buffers.fault_code_ring[0].tolist() == [int(F.BAD_LENGTH), 0, 0]
    assert buffers.fault_value_ring[0].tolist() == [33, UNTOUCHED, UNTOUCHED]
    assert buffers.last_token.tolist() == [100, 101, 102, 103, 104, 70, NO_TOKEN, NO_TOKEN]


def test_wide_samples(op_device: torch.device) -> None:
    """2**32 + 5 is out of range, not token 5."""
    buffers = make_buffers(op_device, 2, 2)
    buffers.req_indices.copy_(torch.arange(2))
    buffers.void_req_indices.fill_(-1)
    buffers.req_status.fill_(int(S.SAMPLES))
    buffers.step_counter.zero_()
    write_outputs(buffers, torch.tensor([2**32 + 5, -(2**32) + 5], device=op_device), vocab_size=100)
    if op_device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.token_ring[0].tolist() == [NO_TOKEN, NO_TOKEN]
    assert buffers.fault_code_ring[0].tolist() == [int(F.SAMPLE_OUT_OF_RANGE)] * 2
    assert buffers.fault_value_ring[0].tolist() == [2**32 + 5, -(2**32) + 5]
    assert buffers.last_token.tolist() == [NO_TOKEN, NO_TOKEN]


def test_without_tokens(op_device: torch.device) -> None:
    """Without tokens, faults are reported and last tokens do not change."""
    buffers = make_buffers(op_device, 3, 3)
    buffers.req_indices.copy_(torch.tensor([2, -1, 1]))
    buffers.req_status.copy_(torch.tensor([int(S.SAMPLES), int(S.INVALID), int(S.LIVE)]))
    buffers.fault_code.copy_(torch.tensor([0, int(F.BAD_LENGTH), 0]))
    buffers.fault_value.copy_(torch.tensor([0, 17, 0]))
    buffers.step_counter.fill_(7)
    write_outputs(buffers, None, vocab_size=100)
    if op_device.type == "cuda":
        torch.cuda.synchronize()
    assert buffers.step_ring.tolist() == [UNTOUCHED, 7, UNTOUCHED]
    assert buffers.token_ring[1].tolist() == [NO_TOKEN] * 3
    assert buffers.fault_code_ring[1].tolist() == [0, int(F.BAD_LENGTH), 0]
    assert buffers.fault_value_ring[1].tolist() == [UNTOUCHED, 17, UNTOUCHED]
    assert buffers.last_token.tolist() == [100, 101, 102]


# token, status, fault of the refresh, seq_len, length limit, stop tokens; then the finish reason
GO, STOP, LENGTH, FAULT = FinishReason
NONE = (NO_TOKEN,) * STOP_TOKENS
FINISHED: list[tuple[int, RequestStatus, FaultCode, int, int, tuple[int, ...], FinishReason]] = [
    (5, S.SAMPLES, F.NONE, 10, 0, NONE, GO),
    (5, S.SAMPLES, F.NONE, 10, 11, NONE, GO),
    (5, S.SAMPLES, F.NONE, 10, 10, NONE, LENGTH),
    (5, S.SAMPLES, F.NONE, 10, 9, NONE, LENGTH),
    (5, S.SAMPLES, F.NONE, 10, -3, NONE, GO),
    (5, S.SAMPLES, F.NONE, 10, 0, (5, *NONE[1:]), STOP),
    (5, S.SAMPLES, F.NONE, 10, 0, (*NONE[1:], 5), STOP),
    (5, S.SAMPLES, F.NONE, 10, 10, (4, 6, 5, 7, *NONE[4:]), STOP),
    (5, S.SAMPLES, F.NONE, 10, 0, (4, 6, 55, 0, *NONE[4:]), GO),
    (0, S.SAMPLES, F.NONE, 10, 0, (NO_TOKEN, 0, *NONE[2:]), STOP),
    (5, S.LIVE, F.NONE, 10, 0, (5, *NONE[1:]), GO),  # not sampled
    (5, S.LIVE, F.NONE, 10, 10, NONE, LENGTH),
    (NO_TOKEN, S.SAMPLES, F.NONE, 10, 0, NONE, FAULT),
    (100, S.SAMPLES, F.NONE, 10, 10, (100, *NONE[1:]), FAULT),
    (5, S.PAD, F.NONE, 10, 1, (5, *NONE[1:]), GO),
    (5, S.INVALID, F.BAD_LENGTH, 10, 1, (5, *NONE[1:]), FAULT),
]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_step(
    device: torch.device, status: list[RequestStatus], *, kind: int = layout.DELTA, steps: int = 1, req_indices: int = 0
) -> StaticBuffers:
    """Return buffers after a refresh in batch order, in which live request i has request index i."""
    n = len(status)
    buffers = make_buffers(device, n, req_indices or n)
    inputs = torch.full((max(100, 2 * n),), UNTOUCHED, dtype=torch.int32)
    layout.write_header(inputs.numpy(), 1, n, n, 0, kind, steps)
    inputs[layout.HEADER_SIZE :][:n] = torch.arange(n)
    tensors = dict(buffers.named()) | {"inputs": inputs.to(device)}
    buffers = StaticBuffers(**tensors)
    buffers.req_status.copy_(torch.tensor([int(s) for s in status]))
    buffers.req_indices.copy_(torch.tensor([i if s >= S.LIVE else -1 for i, s in enumerate(status)]))
    buffers.fault_code.copy_(torch.tensor([int(F.BAD_LENGTH) if s is S.INVALID else 0 for s in status]))
    buffers.seq_lens.copy_(torch.arange(10, 10 + n))
    buffers.void_req_indices.fill_(-1)
    buffers.step_counter.fill_(1)
    for name in ("finish_reason_ring", "req_seq_lens", "finish_reasons", "loop_condition"):
        getattr(buffers, name).fill_(UNTOUCHED)
    return buffers


def test_finish(op_device: torch.device) -> None:
    """Finish reasons are in batch order for the host, with reordered buffer rows and other request indices."""
    n, req_indices = len(FINISHED), len(FINISHED) + 3
    buffers = make_step(op_device, [S.PAD] * n, req_indices=req_indices)
    buffer_rows = [(7 * r + 3) % n for r in range(n)]  # of the batch's reqs
    tokens = [0] * n
    lens, reasons = [UNTOUCHED] * req_indices, [UNTOUCHED] * req_indices
    for r, (token, status, code, seq_len, limit, stops, end) in enumerate(FINISHED):
        at, req_index = buffer_rows[r], req_indices - 1 - r
        tokens[at] = token
        buffers.buffer_rows[r], buffers.req_status[at], buffers.fault_code[at] = at, int(status), int(code)
        buffers.seq_lens[at] = seq_len + r
        buffers.req_indices[at] = req_index if status >= S.LIVE else -1
        buffers.length_limits[req_index] = limit + r if limit > 0 else limit
        buffers.stop_tokens[:, req_index] = torch.tensor(stops)
        buffers.inputs[layout.HEADER_SIZE + r] = req_index
        if status >= S.LIVE:
            lens[req_index] = seq_len + r
        if status is not S.PAD:  # with a delta, faulty requests finish too
            reasons[req_index] = int(end)
    write_outputs(buffers, torch.tensor(tokens, device=op_device), vocab_size=100)
    wait(op_device)
    assert buffers.finish_reason_ring[1].tolist() == [int(end) for *_, end in FINISHED]
    assert buffers.finish_reasons.tolist() == reasons
    assert buffers.req_seq_lens.tolist() == lens
    assert {*buffers.finish_reason_ring[0].tolist(), *buffers.finish_reason_ring[2].tolist()} == {UNTOUCHED}


def test_faulty_rows(op_device: torch.device) -> None:
    """With kept state, faulty requests finish: their index comes from the step inputs, as the refresh cleared it."""
    named = [3, 8, -1, layout.NO_REQUEST, layout.NO_REQUEST + 1, (1 << 31) - 1, 5, 6]  # 8 request indices
    for kind in (layout.FULL, layout.KEEP, layout.DELTA, layout.DELTA | layout.NEW_ORDER | layout.LOOPS):
        for num_reqs in (8, 7, 0):
            buffers = make_step(op_device, [S.INVALID] * 6 + [S.SAMPLES, S.INVALID], kind=kind)
            buffers.req_indices[6] = 5
            buffers.inputs[layout.HEADER_SIZE :][:8] = torch.tensor(named)
            buffers.inputs[layout.HEADER_NUM_REQS] = num_reqs
            write_outputs(buffers, torch.zeros(8, dtype=torch.int32, device=op_device), vocab_size=100)
            wait(op_device)
            reasons = [UNTOUCHED] * 8
            reasons[5] = int(GO)
            if kind != layout.FULL and num_reqs:
                reasons[3] = int(FAULT)
                reasons[6] = int(FAULT) if num_reqs == 8 else UNTOUCHED
            assert buffers.finish_reasons.tolist() == reasons
            assert buffers.req_seq_lens.tolist() == [UNTOUCHED] * 5 + [16] + [UNTOUCHED] * 2
            assert buffers.finish_reason_ring[1].tolist() == [int(FAULT)] * 6 + [int(GO), int(FAULT)]


N, L = layout.DELTA, layout.DELTA | layout.LOOPS
# kind, steps of the entry, steps before this one, whether a request continues; then the next step, 0: the next entry
CURSORS = [
    (layout.FULL, 1, 0, True, 0),
    (layout.KEEP, 1, 0, False, 0),
    (N, 1, 0, True, 0),
    (N, 3, 0, True, 1),
    (N, 3, 1, True, 2),
    (N, 3, 2, True, 0),
    (N, 3, 0, False, 1),  # one replay per step: all of them run
    (L, 3, 0, True, 1),
    (L, 3, 0, False, 0),
    (L, 3, 1, False, 0),
    (L, 3, 2, True, 0),
    (L | layout.NEW_ORDER, 1, 0, True, 0),
    (N, 0, 0, True, 0),
    (L, -5, 0, True, 0),
    (N, 2, 7, True, 0),
]


def test_cursor(op_device: torch.device) -> None:
    for kind, steps, before, continues, after in CURSORS:
        for entry in (0, 2**40):
            # A prefill chunk, a pad request, a finished request and a faulty sample do not continue by themselves.
            buffers = make_step(op_device, [S.LIVE, S.PAD, S.SAMPLES, S.SAMPLES, S.SAMPLES], kind=kind, steps=steps)
            buffers.length_limits[2] = 12
            buffers.cursor.copy_(torch.tensor([entry, before, UNTOUCHED, UNTOUCHED, UNTOUCHED]))
            tokens = torch.tensor([1, 2, 3, -1, 4 if continues else 100], device=op_device)
            write_outputs(buffers, tokens, vocab_size=100)
            wait(op_device)
            assert buffers.cursor.tolist() == [entry + (after == 0), after, 5, steps, kind]
            assert buffers.loop_condition.tolist() == [int(after > 0)]


def test_stop(op_device: torch.device) -> None:
    """A stop by the host ends a loop; steps that are already queued run without requests."""
    for kind, before, used_up, num_reqs in ((L, 0, True, 0), (L, 2, True, 0), (N, 0, False, 0), (N, 2, True, 0)):
        for stopped_entry, counts in ((1, True), (2, False)):
            buffers = make_step(op_device, [S.SAMPLES, S.SAMPLES], kind=kind, steps=3)
            entries = buffers.input_ring.shape[0]
            buffers.cursor.copy_(torch.tensor([entries + 1, before, UNTOUCHED, UNTOUCHED, UNTOUCHED]))
            buffers.input_ring[stopped_entry % entries, layout.INPUTS_AT + layout.HEADER_STOP] = 1
            write_outputs(buffers, torch.tensor([1, 2], device=op_device), vocab_size=100)
            wait(op_device)
            over = used_up if counts else before == 2
            expected = [entries + 1 + over, 0 if over else before + 1, num_reqs if counts else 2, 3, kind]
            assert buffers.cursor.tolist() == expected
            assert buffers.loop_condition.tolist() == [int(not over)]
            assert buffers.token_ring[1].tolist() == [1, 2], "the step itself counts"


def test_finish_without_tokens(op_device: torch.device) -> None:
    """Without tokens, length limits still finish requests, and a loop ends because no request continues."""
    buffers = make_step(op_device, [S.SAMPLES, S.LIVE, S.INVALID], kind=L, steps=4)
    buffers.length_limits[0] = 10
    buffers.stop_tokens.fill_(NO_TOKEN)
    write_outputs(buffers, None, vocab_size=100)
    wait(op_device)
    assert (
        buffers.finish_reason_ring[1].tolist() == buffers.finish_reasons.tolist() == [int(LENGTH), int(GO), int(FAULT)]
    )
    assert buffers.req_seq_lens.tolist() == [10, 11, UNTOUCHED]
    assert buffers.cursor.tolist() == [1, 0, 3, 4, L]


@pytest.mark.parametrize("continuing", [0, 300, 599])
def test_one_of_many_requests_continues(kernel_device: torch.device, continuing: int) -> None:
    reqs = 600
    buffers = make_step(kernel_device, [S.SAMPLES] * reqs, kind=L, steps=2)
    buffers.req_status[599 - continuing] = int(S.INVALID)
    buffers.fault_code[599 - continuing] = int(F.BAD_LENGTH)
    tokens = torch.arange(reqs, dtype=torch.int32, device=kernel_device)
    buffers.stop_tokens[3] = tokens
    tokens[continuing] = reqs
    write_outputs(buffers, tokens, vocab_size=reqs + 1)
    wait(kernel_device)
    reasons = [int(STOP)] * reqs
    reasons[continuing], reasons[599 - continuing] = int(GO), int(FAULT)
    assert buffers.finish_reason_ring[1].tolist() == buffers.finish_reasons.tolist() == reasons
    want = tokens.tolist()
    want[599 - continuing] = NO_TOKEN
    assert buffers.token_ring[1].tolist() == want
    want[599 - continuing] = 100 + 599 - continuing  # the last token of a faulty request does not change
    assert buffers.last_token.tolist() == want
    assert buffers.cursor.tolist() == [0, 1, reqs, 2, L]
    assert buffers.loop_condition.tolist() == [1]


def make_faulty_step(device: torch.device) -> tuple[StaticBuffers, torch.Tensor]:
    buffers = make_step(device, [S.SAMPLES, S.INVALID, S.SAMPLES])
    buffers.stop_tokens[0] = 6
    return buffers, torch.tensor([5, 0, 6], dtype=torch.int32, device=device)


def reported(buffers: StaticBuffers) -> list[object]:
    """Return what the host reads of step 1 after it sees the step number."""
    specs = StaticBuffers.specs()
    written = {n for n, s in specs.items() if s.writer == "write_outputs" and s.kind is BufferKind.OUTPUT}
    return [t[1].tolist() for name, t in buffers.named() if name in written and t is not buffers.step_ring]


EXPECTED = [[5, NO_TOKEN, 6], [int(GO), int(FAULT), int(STOP)], [0, int(F.BAD_LENGTH), 0], [UNTOUCHED, 0, UNTOUCHED]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the interpreter")
def test_step_number_is_stored_last(kernel_device: torch.device) -> None:
    buffers, tokens = make_faulty_step(kernel_device)
    seen: list[object] = []
    exchange = InterpreterBuilder.create_atomic_rmw

    def look(self: object, *args: object) -> object:
        seen.append((reported(buffers), buffers.step_ring[1].item()))
        return exchange(self, *args)

    with mock.patch.object(InterpreterBuilder, "create_atomic_rmw", look):
        write_outputs(buffers, tokens, vocab_size=100)
    assert seen == [(EXPECTED, UNTOUCHED)]
    assert buffers.step_ring.tolist() == [UNTOUCHED, 1, UNTOUCHED]


@pytest.mark.gpu
def test_host_that_polls_sees_complete_steps() -> None:
    """While later steps run, the host finds all results of a step as soon as it finds the step number."""
    device, reqs, steps = torch.device("cuda"), 512, 200
    buffers = make_step(device, [S.SAMPLES] * reqs)
    rings = {name: torch.full((steps, reqs), UNTOUCHED, dtype=getattr(buffers, name).dtype).pin_memory()
             for name, _ in buffers.named(BufferKind.OUTPUT) if name != "step_ring"}  # fmt: skip
    rings["step_ring"] = torch.full((steps,), UNTOUCHED, dtype=torch.int64).pin_memory()
    buffers = StaticBuffers(**(dict(buffers.named()) | rings))
    tokens = [torch.full((reqs,), step, dtype=torch.int32, device=device) for step in range(steps)]
    for values in (tokens[0], tokens[0]):  # compiles
        write_outputs(buffers, values, vocab_size=steps)
    torch.cuda.synchronize()
    for ring in rings.values():
        ring.fill_(UNTOUCHED)
    buffers.stop_tokens[0] = 3
    torch.cuda._sleep(100_000_000)  # queues the steps, so that they run while the host polls
    for step in range(steps):
        buffers.step_counter.fill_(step)
        write_outputs(buffers, tokens[step], vocab_size=steps)
    deadline = time.monotonic() + 60
    for step in range(steps):
        while rings["step_ring"][step] != step:
            assert time.monotonic() < deadline
        assert set(rings["token_ring"][step].tolist()) == {step}
        assert set(rings["finish_reason_ring"][step].tolist()) == {int(STOP) if step == 3 else int(GO)}
        assert set(rings["fault_code_ring"][step].tolist()) == {0}
    torch.cuda.synchronize()
