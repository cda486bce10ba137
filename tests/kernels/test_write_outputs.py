"""`write_outputs`, kernel and reference, against expected results in plain Python."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import STOP_TOKENS, BufferKind, Capacity, PageGroup, StaticBuffers
from graphrt.kernels.metadata.write_outputs import write_outputs
from graphrt.kernels.types import NO_TOKEN, FaultCode, FinishReason, RequestStatus
from tests.support.refresh_rig import UNTOUCHED, make_buffers

VOCAB = 262208  # of a real model; more than 2**18
S, F = RequestStatus, FaultCode

# token, request index, status, fault of the refresh; then the expected results: token, code, value
Entry = tuple[int, int, RequestStatus, tuple[FaultCode, int], int, FaultCode, int]
FINE = (F.NONE, 5)
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
WIDE: tuple[int, list[Entry]] = (  # 2**32 + 5 is out of range, not token 5
    2**33 + 2,
    [(t, i, S.SAMPLES, FINE, NO_TOKEN, F.SAMPLE_OUT_OF_RANGE, t) for i, t in ((5, 2**32 + 5), (6, -(2**32) + 5))],
)
VOID = {4: (2, 1), 6: (1, 7)}  # the batch position and request index of a sequence that starts with a fault


def write(buffers: StaticBuffers, tokens: list[int] | torch.Tensor | None, vocab_size: int = 100) -> None:
    """Write the outputs, and wait: on CUDA the rings are host memory that the test reads without a stream."""
    device = buffers.req_indices.device
    if isinstance(tokens, list):
        tokens = torch.tensor(tokens, device=device)
    write_outputs(buffers, tokens, vocab_size=vocab_size)
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_steps(op_device: torch.device, dtype: torch.dtype) -> None:
    """Results are in batch order in the rings, and by request index in the state; buffer rows are rotated."""
    buffers = make_buffers(op_device, 6, 8)
    rings = ("step_ring", "token_ring", "fault_code_ring", "fault_value_ring")
    expected = {name: getattr(buffers, name).tolist() for name in (*rings, "last_token")}
    for step, entries in [*STEPS, WIDE] if dtype is torch.int64 else STEPS:
        n, at = len(entries), step % 3
        cut = buffers.cut(n, n)
        cut.buffer_rows.copy_(torch.arange(1, n + 1) % n)
        tokens, req_indices, status, faults, *_ = zip(*entries[-1:], *entries[:-1], strict=True)
        cut.step_counter.fill_(step)
        cut.req_indices.copy_(torch.tensor(req_indices))
        cut.drafts_left.copy_(torch.tensor([0 if s is S.SAMPLES else -1 for s in status]))
        cut.fault_code.copy_(torch.tensor([code for code, _ in faults]))
        cut.fault_value.copy_(torch.tensor([value for _, value in faults]))
        cut.void_req_indices.fill_(-1)
        if step in VOID:
            position, req_index = VOID[step]
            cut.void_req_indices[(position + 1) % n] = req_index
            expected["last_token"][req_index] = NO_TOKEN
        write(cut, torch.tensor(tokens, dtype=dtype, device=op_device), VOCAB)
        expected["step_ring"][at] = step
        for r, (_, i, s, _, found, code, value) in enumerate(entries):
            expected["token_ring"][at][0][r] = found
            expected["fault_code_ring"][at][r] = code
            if code:
                expected["fault_value_ring"][at][r] = value
            if s in (S.SAMPLES, S.LIVE):
                expected["last_token"][i] = found  # prefill chunks and void samples clear the previous last token
        for name, values in expected.items():
            assert getattr(buffers, name).tolist() == values, name


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
    buffers.req_indices.copy_(torch.tensor([i if s >= S.LIVE else -1 for i, s in enumerate(status)]))
    buffers.fault_code.copy_(torch.tensor([int(F.BAD_LENGTH) if s is S.INVALID else 0 for s in status]))
    buffers.sample_lens.copy_(torch.arange(10, 10 + n))
    buffers.drafts_left.copy_(torch.tensor([0 if s is S.SAMPLES else -1 for s in status]))
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
        buffers.buffer_rows[r], buffers.fault_code[at] = at, int(code)
        buffers.sample_lens[at] = seq_len + r
        buffers.drafts_left[at] = 0 if status is S.SAMPLES else -1
        buffers.req_indices[at] = req_index if status >= S.LIVE else -1
        buffers.length_limits[req_index] = limit + r if limit > 0 else limit
        buffers.stop_tokens[:, req_index] = torch.tensor(stops)
        buffers.inputs[layout.HEADER_SIZE + r] = req_index
        if status >= S.LIVE:
            lens[req_index] = seq_len + r
        if status is not S.PAD:  # with a delta, faulty requests finish too
            reasons[req_index] = int(end)
    write(buffers, tokens)
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
            write(buffers, torch.zeros(8, dtype=torch.int32, device=op_device))
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
            write(buffers, [1, 2, 3, -1, 4 if continues else 100])
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
            write(buffers, [1, 2])
            over = used_up if counts else before == 2
            expected = [entries + 1 + over, 0 if over else before + 1, num_reqs if counts else 2, 3, kind]
            assert buffers.cursor.tolist() == expected
            assert buffers.loop_condition.tolist() == [int(not over)]
            assert buffers.token_ring[1, 0].tolist() == [1, 2], "the step itself counts"


def test_without_tokens(op_device: torch.device) -> None:
    """Length limits still finish requests, last tokens stay, and a loop ends because no request continues."""
    buffers = make_step(op_device, [S.SAMPLES, S.LIVE, S.INVALID], kind=L, steps=4)
    buffers.length_limits[0] = 10
    buffers.stop_tokens.fill_(NO_TOKEN)
    buffers.fault_value[2] = 17
    write(buffers, None)
    assert buffers.step_ring.tolist() == [UNTOUCHED, 1, UNTOUCHED]
    assert buffers.token_ring[1, 0].tolist() == [NO_TOKEN] * 3
    assert buffers.fault_code_ring[1].tolist() == [0, 0, F.BAD_LENGTH]
    assert buffers.fault_value_ring[1].tolist() == [UNTOUCHED, UNTOUCHED, 17]
    assert buffers.last_token.tolist() == [100, 101, 102]
    assert buffers.finish_reason_ring[1].tolist() == buffers.finish_reasons.tolist() == [LENGTH, GO, FAULT]
    assert buffers.req_seq_lens.tolist() == [10, 11, UNTOUCHED]
    assert buffers.cursor.tolist() == [1, 0, 3, 4, L]


@pytest.mark.parametrize("continuing", [0, 300, 599])
def test_one_of_many_requests_continues(kernel_device: torch.device, continuing: int) -> None:
    reqs = 600
    buffers = make_step(kernel_device, [S.SAMPLES] * reqs, kind=L, steps=2)
    buffers.req_indices[599 - continuing], buffers.drafts_left[599 - continuing] = -1, -1
    buffers.fault_code[599 - continuing] = int(F.BAD_LENGTH)
    tokens = torch.arange(reqs, dtype=torch.int32, device=kernel_device)
    buffers.stop_tokens[3] = tokens
    tokens[continuing] = reqs
    write(buffers, tokens, reqs + 1)
    reasons = [int(STOP)] * reqs
    reasons[continuing], reasons[599 - continuing] = int(GO), int(FAULT)
    assert buffers.finish_reason_ring[1].tolist() == buffers.finish_reasons.tolist() == reasons
    want = tokens.tolist()
    want[599 - continuing] = NO_TOKEN
    assert buffers.token_ring[1, 0].tolist() == want
    want[599 - continuing] = 100 + 599 - continuing  # the last token of a faulty request does not change
    assert buffers.last_token.tolist() == want
    assert buffers.cursor.tolist() == [0, 1, reqs, 2, L]
    assert buffers.loop_condition.tolist() == [1]


def test_drafts_are_counted_in_batch_order(op_device: torch.device) -> None:
    """Rows of two drafts that are accepted, of one that is rejected, of none, of padding, and of a prompt chunk."""
    capacity = Capacity(5, 15, 5, 100, 3, (PageGroup(1, 2, 0, 1),), drafts=2)
    buffers = StaticBuffers.allocate(capacity, op_device).cut(5, 15, 3)
    buffers.draft_count_ring.fill_(UNTOUCHED)
    buffers.step_counter.fill_(4)
    buffers.buffer_rows.copy_(torch.tensor([3, 0, 1, 4, 2]))
    buffers.req_indices.copy_(torch.tensor([2, 0, -1, 1, 4]))
    buffers.drafts_left.copy_(torch.tensor([2, 1, -1, 0, -1]))
    buffers.input_ids.copy_(torch.tensor([5, 6, 7, 5, 8, 0, *[0] * 9]))
    first = 3 * torch.arange(5)
    rows = [first + torch.tensor([min(position, n) for n in (2, 1, 0, 0, 0)]) for position in range(3)]
    buffers.logits_indices.copy_(torch.cat(rows))
    for position, sampled in enumerate(([6, 9, 0, 3, 0], [7, 1, 1, 1, 1], [4, 1, 1, 1, 1])):
        tokens = torch.tensor(sampled, device=op_device)
        write_outputs(buffers, tokens, vocab_size=VOCAB, position=position)
    if op_device.type == "cuda":
        torch.cuda.synchronize()
    none = NO_TOKEN
    found = [[3, 6, 9, none, none], [none, 7, none, none, none], [none, 4, none, none, none]]
    assert buffers.token_ring[1].tolist() == found
    assert buffers.draft_count_ring.tolist() == [[UNTOUCHED] * 5, [0, 2, 1, 0, 0], [UNTOUCHED] * 5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the interpreter")
def test_step_number_is_stored_last(kernel_device: torch.device) -> None:
    buffers = make_step(kernel_device, [S.SAMPLES, S.INVALID, S.SAMPLES])
    buffers.stop_tokens[0] = 6
    specs = StaticBuffers.specs()
    rings = [
        tensor
        for name, tensor in buffers.named(BufferKind.OUTPUT)
        if specs[name].writer == "write_outputs" and name != "step_ring"
    ]
    seen: list[object] = []
    exchange = InterpreterBuilder.create_atomic_rmw

    def look(self: object, *args: object) -> object:
        seen.append(([ring[1].tolist() for ring in rings], buffers.step_ring[1].item()))
        return exchange(self, *args)

    with mock.patch.object(InterpreterBuilder, "create_atomic_rmw", look):
        write(buffers, torch.tensor([5, 0, 6], dtype=torch.int32, device=kernel_device))
    expected = [[[5, NO_TOKEN, 6]], [GO, FAULT, STOP], [0, F.BAD_LENGTH, 0], [UNTOUCHED, 0, UNTOUCHED], [0] * 3]
    assert seen == [(expected, UNTOUCHED)]
    assert buffers.step_ring.tolist() == [UNTOUCHED, 1, UNTOUCHED]


@pytest.mark.gpu
def test_host_that_polls_sees_complete_steps() -> None:
    """While later steps run, the host finds all results of a step as soon as it finds the step number."""
    device, reqs, steps = torch.device("cuda"), 512, 200
    buffers = make_step(device, [S.SAMPLES] * reqs)
    rings = {name: torch.full((steps, *ring.shape[1:]), UNTOUCHED, dtype=ring.dtype).pin_memory()
             for name, ring in buffers.named(BufferKind.OUTPUT) if name != "step_ring"}  # fmt: skip
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
        assert set(rings["token_ring"][step, 0].tolist()) == {step}
        assert set(rings["finish_reason_ring"][step].tolist()) == {int(STOP) if step == 3 else int(GO)}
        assert set(rings["fault_code_ring"][step].tolist()) == {0}
    torch.cuda.synchronize()
