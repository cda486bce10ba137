"""Edges of what is captured: keys and capture_sizes at their bounds, rings, buffers, guards and op_traces one call at
a time."""

from __future__ import annotations

import threading

import pytest
import torch

from graphrt.capture import guard
from graphrt.capture.descriptor import BatchDescriptor, GraphKind, default_decode_sizes, default_mixed_sizes
from graphrt.capture.dispatcher import Dispatcher
from graphrt.capture.graph import GraphReport
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.capture.staging import StagingRing, StagingSlot
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, ReplayError
from graphrt.kernels.metadata.buffers import BufferKind, Capacity, PageGroup, StaticBuffers

CPU = torch.device("cpu")
GROUPS = (PageGroup(4, 11, 0, 5), PageGroup(2, 6, 5, 9, window=3, claims_at=11))
CAPACITY = Capacity(rows=3, tokens=7, req_indices=6, inputs=100, ring=2, page_groups=GROUPS)


def make(**changes) -> Dispatcher:
    settings = {
        "max_num_reqs": 10, "max_num_tokens": 40, "query_len": 1, "decode_sizes": (1, 2, 4, 10),
        "mixed_sizes": (16, 40), "graph_unsupported_reason": lambda descriptor: None, "use_graphs": True,
    }  # fmt: skip
    return Dispatcher(**(settings | changes))


# -- keys and capture_sizes


def test_keys_differ_by_each_of_their_fields() -> None:
    keys = [
        BatchDescriptor.decode(4), BatchDescriptor.mixed(4, 4), BatchDescriptor.decode(2, 2),
        BatchDescriptor.mixed(4, 2), BatchDescriptor.decode(1, 4), BatchDescriptor.mixed(5, 4),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert len({hash(key) for key in keys}) == len(keys)
    for key in keys:
        twin = BatchDescriptor(key.kind, key.padded_reqs, key.padded_tokens, key.query_len)
        assert (twin, hash(twin)) == (key, hash(key))
    assert [(k.padded_reqs, k.padded_tokens, k.query_len) for k in keys] == [
        (4, 4, 1), (4, 4, 0), (2, 4, 2), (2, 4, 0), (1, 4, 4), (4, 5, 0)
    ]  # fmt: skip
    assert [str(k) for k in keys[:3]] == ["decode[4]", "mixed[4 tokens, 4]", "decode[2 x 2]"]


@pytest.mark.parametrize(
    ("kind", "rows", "tokens", "query_len"),
    [
        (GraphKind.DECODE, 0, 0, 1), (GraphKind.MIXED, 0, 1, 0), (GraphKind.MIXED, 1, 0, 0),
        (GraphKind.DECODE, 2, 3, 1), (GraphKind.DECODE, 2, 2, 2), (GraphKind.DECODE, -1, -1, 1),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_hold_nothing_or_something_else(kind: GraphKind, rows: int, tokens: int, query_len: int) -> None:
    with pytest.raises(ConfigError, match="BatchDescriptor"):
        BatchDescriptor(kind, rows, tokens, query_len)


def test_the_smallest_key_of_each_kind() -> None:
    assert repr(BatchDescriptor.decode(1)).endswith("padded_reqs=1, padded_tokens=1, query_len=1)")
    assert BatchDescriptor.decode(1).padded_tokens == 1
    assert BatchDescriptor(GraphKind.DECODE, 3, 3) == BatchDescriptor.decode(3)
    assert BatchDescriptor.mixed(1, 1).query_len == 0


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [
        (2, (1, 2)), (7, (1, 2, 4, 7)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9)), (16, (1, 2, 4, 8, 16)),
        (255, (1, 2, 4, *range(8, 249, 8), 255)), (257, (1, 2, 4, *range(8, 257, 8), 257)),
        (271, (1, 2, 4, *range(8, 257, 8), 271)), (272, (1, 2, 4, *range(8, 257, 8), 272)),
        (273, (1, 2, 4, *range(8, 257, 8), 272, 273)), (288, (1, 2, 4, *range(8, 257, 8), 272, 288)),
        (290, (1, 2, 4, *range(8, 257, 8), 272, 288, 290)),
    ],
)  # fmt: skip
def test_ladders_end_with_the_maximum(maximum: int, expected: tuple[int, ...]) -> None:
    assert default_decode_sizes(maximum) == expected


@pytest.mark.parametrize(
    ("maximum", "expected"), [(63, (63,)), (65, (64, 65)), (128, (64, 128)), (129, (64, 128, 129)), (2, (2,))]
)
def test_mixed_ladders_end_with_the_maximum(maximum: int, expected: tuple[int, ...]) -> None:
    assert default_mixed_sizes(maximum) == expected


def test_mixed_ladders_begin_where_they_are_told_to() -> None:
    assert default_mixed_sizes(100, smallest=10) == (10, 20, 40, 80, 100)
    assert default_mixed_sizes(5, smallest=10) == (5,)


@pytest.mark.parametrize("capture_sizes", [default_decode_sizes, default_mixed_sizes])
def test_no_ladder_for_nothing(capture_sizes) -> None:
    for maximum in (0, -1):
        with pytest.raises(ConfigError, match=f"expected >= 1, got {maximum}"):
            capture_sizes(maximum)


# -- dispatch


@pytest.mark.parametrize("query_len", [1, 3])
def test_every_batch_within_capacity_is_served_by_the_smallest_size_that_fits(query_len: int) -> None:
    dispatcher = make(query_len=query_len)
    for rows in range(1, 11):
        target = dispatcher.dispatch(rows, rows * query_len, True)
        want = min(size for size in (1, 2, 4, 10) if size >= rows)
        assert target.descriptor == BatchDescriptor.decode(want, query_len)
        assert target.why_eager == ""
    for tokens in range(2, 41):
        target = dispatcher.dispatch(2, tokens, False)
        assert target.descriptor == BatchDescriptor.mixed(16 if tokens <= 16 else 40, 10)
        assert target.why_eager == ""
    for rows, tokens in ((11, 11), (11, 40), (1, 41), (11, 41)):
        for uniform in (True, False):
            with pytest.raises(CapacityError, match=f"got {rows} requests and {tokens} tokens"):
                dispatcher.dispatch(rows, tokens, uniform)


def test_sizes_beyond_the_ladder_run_eagerly_at_their_own_size() -> None:
    dispatcher = make(decode_sizes=(4,), mixed_sizes=(16,))
    for rows in (5, 10):
        target = dispatcher.dispatch(rows, rows, True)
        assert target.descriptor == BatchDescriptor.decode(rows)
        assert target.why_eager == f"no decode graph for {rows} rows: the largest captured is 4"
    target = dispatcher.dispatch(1, 17, False)
    assert target.descriptor == BatchDescriptor.mixed(17, 10)
    assert target.why_eager == "no mixed graph for 17 tokens: the largest captured is 16"
    assert dispatcher.dispatch(2, 5, False).descriptor == BatchDescriptor.mixed(16, 10)
    assert make(mixed_sizes=(5, 40)).dispatch(2, 5, False).descriptor == BatchDescriptor.mixed(5, 5)


def test_a_size_has_room_for_rows_and_for_tokens() -> None:
    """Each is asked for by itself, and a full size is not too small."""
    dispatcher, mixed, decode = make(), BatchDescriptor.mixed(16, 10), BatchDescriptor.decode(2)
    assert dispatcher.at(mixed, 10, 16, uniform=False).descriptor == mixed
    assert dispatcher.at(decode, 2, 2, uniform=True).descriptor == decode
    for descriptor, rows, tokens, uniform in ((mixed, 11, 16, False), (mixed, 10, 17, False), (decode, 2, 2, False)):
        with pytest.raises(CapacityError, match=f"room for {rows} requests and {tokens} tokens"):
            dispatcher.at(descriptor, rows, tokens, uniform)


@pytest.mark.parametrize(
    "descriptor",
    [BatchDescriptor.decode(3), BatchDescriptor.decode(11), BatchDescriptor.mixed(16, 9), BatchDescriptor.mixed(41, 10),
     BatchDescriptor.mixed(15, 10), BatchDescriptor.decode(2, 2)],
    ids=str,
)  # fmt: skip
def test_sizes_of_other_ladders_are_refused(descriptor: BatchDescriptor) -> None:
    with pytest.raises(ConfigError, match="descriptor: expected a size of this runtime's capture_sizes"):
        make().at(descriptor, 1, 1, uniform=True)


@pytest.mark.parametrize(("rows", "tokens", "fits"), [(10, 40, True), (11, 40, False), (10, 41, False)])
def test_the_largest_batch_of_all(rows: int, tokens: int, fits: bool) -> None:
    if fits:
        assert make().dispatch(rows, tokens, uniform=False).descriptor == BatchDescriptor.mixed(40, 10)
    else:
        with pytest.raises(CapacityError, match="at most 10 requests and 40 tokens"):
            make().dispatch(rows, tokens, uniform=False)


def test_a_backend_may_refuse_some_sizes() -> None:
    refused = lambda d: "too small" if d.padded_tokens < 4 else None  # noqa: E731
    dispatcher = make(graph_unsupported_reason=refused)
    assert [d.padded_tokens for d in dispatcher.captured()] == [40, 16, 10, 4]
    assert dispatcher.dispatch(2, 2, True).why_eager == "too small"
    assert dispatcher.dispatch(3, 3, True).why_eager == ""
    off = make(use_graphs=False, graph_unsupported_reason=refused)
    assert off.dispatch(10, 10, True).why_eager == "graphs are switched off (use_graphs=False)"


# -- static buffers


def test_bytes_and_shapes_of_the_buffers() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    by_hand = {
        "page_groups": (2, 8), "inputs": (100,), "last_token": (6,), "step_counter": (1,), "claims": (23,),
        "duplicates": (3, 3), "page_table": (2, 6, 9), "page_spans": (2, 6, 2), "block_table": (2, 3, 9),
        "table_from": (2, 3), "table_to": (2, 3), "input_ids": (7,), "positions": (7,), "slot_mapping": (2, 7),
        "query_start_loc": (4,), "seq_lens": (3,), "logits_indices": (3,), "req_indices": (3,), "req_status": (3,),
        "temperatures": (3,), "seeds": (3,), "new_spans": (2, 3, 4), "check_code": (2, 3), "check_value": (2, 3),
        "fault_code": (3,), "fault_value": (3,), "void_ids": (3,), "encoder_lens": (3,), "places": (3,),
        "decode_seq_lens": (3,), "prompt_seq_lens": (3,), "decode_start_loc": (4,), "prompt_start_loc": (4,),
        "step_ring": (2,), "token_ring": (2, 3), "end_ring": (2, 3),
        "fault_code_ring": (2, 3), "fault_value_ring": (2, 3), "last_encoder_len": (6,),
        "input_ring": (2, 384), "cursor": (5,), "order": (3,), "req_lens": (6,), "finish_reasons": (6,),
        "req_values": (13, 6),
        "top_ks": (3,), "top_ps": (3,), "min_ps": (3,), "repetition_penalties": (3,), "presence_penalties": (3,),
        "frequency_penalties": (3,), "prompt_lens": (3,), "penalty_seen": (6, 0), "penalty_counts": (6, 0),
        "logprobs": (3,), "logprob_tokens": (3,), "rank_ring": (2, 3), "logprob_ring": (2, 3, 0),
        "logprob_token_ring": (2, 3, 0), "token_masks": (3,),
        "bias_tokens": (6, 2, 0), "bias_values": (6, 2, 0), "bias_lists": (6, 3), "mask_words": (6, 0),
        "end_lengths": (6,), "end_tokens": (8, 6), "go_on": (1,),
    }  # fmt: skip
    assert {name: tuple(tensor.shape) for name, tensor in buffers.named()} == by_hand
    assert buffers.page_groups.tolist() == [[4, 11, 0, 5, 0, 0, 0, 0], [2, 6, 5, 9, 3, 0, 11, 0]]
    assert buffers.last_token.tolist() == [-1] * 6
    assert buffers.step_counter.tolist() == [-1]
    assert buffers.token_ring.tolist() == [[-1] * 3] * 2
    assert buffers.step_ring.tolist() == [-1] * 2
    assert buffers.fault_code_ring.tolist() == [[0] * 3] * 2
    assert buffers.fault_value_ring.tolist() == [[-1] * 3] * 2
    assert not any(t.any() for kind in (BufferKind.INPUT, BufferKind.DERIVED) for _, t in buffers.named(kind))
    assert buffers.nbytes == sum(t.untyped_storage().nbytes() for _, t in buffers.named())
    assert (CAPACITY.rows_plus_one, CAPACITY.claims) == (4, 11 + 6 + 6)
    assert (CAPACITY.groups, CAPACITY.groups_plus_one, CAPACITY.pages_per_row) == (2, 3, 9)


def test_declarations_say_who_writes_who_reads_and_what_pads_are() -> None:
    for name, spec in StaticBuffers.specs().items():
        writers = ("construction", "host", "unpack", "refresh", "record_tokens", "write_logprobs", "write_outputs")
        assert spec.writer in writers, name
        assert spec.readers, name
        assert all(type(reader) is str and len(reader) > 1 for reader in spec.readers), name
        assert type(spec.readers) is tuple, name
        assert type(spec.pad) is str, name
    pads = {name: spec.pad for name, spec in StaticBuffers.specs().items()}
    assert (pads["temperatures"], pads["positions"], pads["step_counter"]) == ("0", "0", "one value")
    assert pads["last_token"] == pads["claims"] == "untouched"
    initial = {name: spec.initial for name, spec in StaticBuffers.specs().items() if spec.initial}
    unknown = ("last_token", "step_counter", "step_ring", "token_ring", "fault_value_ring", "order", "end_tokens")
    unknown = dict.fromkeys(unknown, -1)
    assert initial == unknown | {"table_to": 1 << 30}, "whatever stands in a table is cleared first"


def test_buffers_are_listed_by_kind() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    every = [name for name, _ in buffers.named()]
    assert every == list(StaticBuffers.specs())
    parts = {kind: [name for name, _ in buffers.named(kind)] for kind in BufferKind}
    assert sorted(name for part in parts.values() for name in part) == sorted(every)
    assert parts[BufferKind.INPUT] == ["input_ring"]
    assert parts[BufferKind.CONSTANT] == ["page_groups"]
    both = [name for name, _ in buffers.named(BufferKind.INPUT, BufferKind.OUTPUT)]
    assert both == [name for name in every if name in parts[BufferKind.INPUT] or name in parts[BufferKind.OUTPUT]]
    assert all(tensor is getattr(buffers, name) for name, tensor in buffers.named())


# -- the ring


def test_a_slot_is_that_of_its_launch_and_of_the_inbox() -> None:
    input_ring = torch.zeros(3, 8, dtype=torch.int32)
    ring = StagingRing(input_ring, CPU)
    slots = [ring.acquire(launch) for launch in range(7)]
    assert [slots.index(slot) for slot in slots] == [0, 1, 2, 0, 1, 2, 0]
    slots[0].inputs[:] = range(8)
    assert slots[0].inputs_tensor.tolist() == list(range(8))
    assert slots[1].inputs.tolist() == [0] * 8
    assert input_ring.tolist() == [list(range(8)), [0] * 8, [0] * 8]


def test_a_slot_has_its_header_once_for_each_who_reads_it() -> None:
    input_ring = torch.zeros(2, 12, dtype=torch.int32)
    slot = StagingRing(input_ring, CPU, header=2, copies=4).acquire(1)
    slot.inputs[:] = [5, 6, 7, 8, 9, 10]
    assert input_ring.tolist() == [[0] * 12, [0] * 6 + [5, 6, 7, 8, 9, 10]]
    with slot.in_flight(None):
        assert input_ring[1].tolist() == [5, 6] * 3 + [5, 6, 7, 8, 9, 10]
    assert not input_ring[0].any()


def test_results_are_handed_over_once_and_only_after_a_step() -> None:
    slot, calls = StagingSlot.allocate(4, CPU), []
    slot.on_done = lambda: calls.append("early")
    slot.wait()
    assert calls == [], "no step was submitted"
    with slot.in_flight(None):
        slot.on_done = lambda: calls.append("step")
    assert slot.is_done()
    slot.wait()
    slot.wait()
    assert calls == ["step"]
    assert slot.on_done is None
    with slot.in_flight(None):
        pass
    slot.wait()
    assert calls == ["step"]


def test_a_slot_is_not_free_while_another_thread_takes_its_results() -> None:
    slot, began, goes_on, free = StagingSlot.allocate(4, CPU), threading.Event(), threading.Event(), threading.Event()

    def collect() -> None:
        began.set()
        goes_on.wait(10)

    with slot.in_flight(None):
        slot.on_done = collect
    reader = threading.Thread(target=slot.wait)
    reader.start()
    assert began.wait(10)
    writer = threading.Thread(target=lambda: (slot.wait(), free.set()))
    writer.start()
    assert not free.wait(0.05), "the results are not taken yet"
    goes_on.set()
    assert free.wait(10)
    for thread in (reader, writer):
        thread.join()


class Event:
    """One of a device, as a test says."""

    def __init__(self) -> None:
        self.ended, self.meanwhile = True, lambda: None

    def record(self, stream: object) -> None:
        self.ended = False

    def synchronize(self) -> None:
        self.ended = True
        self.meanwhile()

    def query(self) -> bool:
        return self.ended


def test_a_late_reader_of_one_step_does_not_collect_the_next() -> None:
    """While a thread waits for a step, another one collects it and submits the next step in the same slot."""
    slot, event, calls = StagingSlot.allocate(4, CPU), Event(), []
    slot._event = event

    def submit(name: str) -> None:
        with slot.in_flight(None):
            pass
        slot.on_done = lambda: calls.append(name)

    def collect_and_submit() -> None:
        event.meanwhile = lambda: None
        slot.wait()
        submit("second")

    submit("first")
    event.meanwhile = collect_and_submit
    slot.wait()
    assert calls == ["first"], "the second still runs"
    assert not slot.is_done()
    slot.wait()
    assert calls == ["first", "second"]


def test_a_step_that_fails_is_waited_for_all_the_same() -> None:
    slot, calls = StagingSlot.allocate(4, CPU), []
    slot.on_done = lambda: calls.append("done")
    with pytest.raises(ZeroDivisionError), slot.in_flight(None):
        raise ZeroDivisionError
    slot.wait()
    assert calls == ["done"]


def test_waits_are_counted_where_a_step_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = StagingRing(torch.zeros(2, 4, dtype=torch.int32), CPU)
    for step in range(5):
        ring.acquire(step)
    assert ring.waits == 0
    monkeypatch.setattr(StagingSlot, "is_done", lambda slot: False)
    monkeypatch.setattr(StagingSlot, "is_free", False)
    for step in range(3):
        ring.acquire(step)
    assert ring.waits == 3


def test_drain_hands_all_over() -> None:
    ring, calls = StagingRing(torch.zeros(3, 4, dtype=torch.int32), CPU), []
    for step in range(3):
        slot = ring.acquire(step)
        with slot.in_flight(None):
            slot.on_done = lambda step=step: calls.append(step)
    ring.drain()
    ring.drain()
    assert sorted(calls) == [0, 1, 2]


# -- guards


def test_each_tensor_is_guarded() -> None:
    for moved in ("a", "b", "c"):
        tensors = {name: torch.ones(3) for name in "abc"}
        watch = guard.PointerGuard(tensors.items())
        watch.check()
        old = tensors[moved].data_ptr()
        kept = tensors[moved].data
        tensors[moved].data = torch.zeros(3)
        with pytest.raises(ReplayError, match=f"^{moved}: expected at address {old:#x} as captured, got 0x"):
            watch.check()
        tensors[moved].data = kept
        watch.check()
    guard.PointerGuard([]).check()
    alone = torch.ones(3)
    watch = guard.PointerGuard([("alone", alone)])
    alone.data = torch.zeros(3)
    with pytest.raises(ReplayError, match=r"^alone: expected at address"):
        watch.check()


def test_names_that_lead_elsewhere_or_nowhere() -> None:
    tensors = {name: torch.ones(3) for name in "ab"}
    watch = guard.PointerGuard(tensors.items())
    watch.check_names({**tensors, "c": torch.ones(1)}.items())
    with pytest.raises(ReplayError, match=r"^b: expected at address 0x.* got no tensor of this name;"):
        watch.check_names({"a": tensors["a"]}.items())
    with pytest.raises(ReplayError, match=r"^a: expected at address"):
        watch.check_names({"a": tensors["b"], "b": tensors["b"]}.items())


# -- op_traces


def record(step):
    return OpTraceRecorder().record(step, BatchDescriptor.decode(2), lambda: None)


def test_a_report_counts_ops_and_the_memory_that_they_made() -> None:
    x = torch.ones(4)
    op_trace = record(lambda: (x + 1).mul_(2) + x)
    assert (op_trace.report.nodes, op_trace.report.pool_bytes, op_trace.report.driver_bytes) == (3, 2 * 16, 0)
    assert op_trace.report.descriptor == BatchDescriptor.decode(2)
    assert 0 < op_trace.report.seconds < 60
    assert GraphReport(BatchDescriptor.decode(2), 1.0, 30, 12, 5).nbytes == 42
    assert record(lambda: x[1:]).report.nodes == 0, "a view makes nothing"


def test_a_closed_tape_runs_nothing() -> None:
    x, counter = torch.ones(2), torch.zeros(1)

    def step() -> torch.Tensor:
        counter.add_(1)
        return x + counter

    op_trace = record(step)
    op_trace.launch()
    assert counter.item() == 2
    op_trace.close()
    op_trace.launch()
    assert counter.item() == 2
    assert op_trace.output.numel() == 0


def test_several_results_of_one_op_are_filled_each() -> None:
    x = torch.tensor([[1.0, 5.0, 3.0]])

    def step() -> torch.Tensor:
        values, indices = x.max(-1)
        return torch.cat([values, indices.float()])

    op_trace = record(step)
    x.copy_(torch.tensor([[7.0, 5.0, 9.0]]))
    op_trace.launch()
    assert op_trace.output.tolist() == [9.0, 2.0]


def test_indexing_by_integers_is_captured_and_by_masks_is_not() -> None:
    x, at = torch.arange(4.0), torch.tensor([3, 0])
    op_trace = record(lambda: x[at] * 1)
    at.copy_(torch.tensor([1, 2]))
    op_trace.launch()
    assert op_trace.output.tolist() == [1.0, 2.0]
    for mask in (torch.tensor([True, False, True, False]), torch.tensor([1, 0, 1, 0], dtype=torch.uint8)):
        with pytest.raises(CaptureError, match=r"decode\[2\]"):
            record(lambda mask=mask: x[mask])


@pytest.mark.parametrize("read", [lambda x: x.tolist(), lambda x: x.numpy(), lambda x: x[0].item()])
def test_a_host_read_after_other_ops_raises(read) -> None:
    """After an op, after an op that failed, and after what an op itself may read."""
    x = torch.ones(2)

    def step() -> torch.Tensor:
        with pytest.raises(RuntimeError):
            torch.add(x, torch.ones(3))
        y = x + 1
        read(y)
        return y

    with pytest.raises(CaptureError, match=r"decode\[2\].*read"):
        record(step)


def test_gradients_are_off_while_recording_and_launching() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    op_trace = record(lambda: weight * 2)
    assert not op_trace.output.requires_grad
    weight.data.fill_(3)
    op_trace.launch()
    assert op_trace.output.tolist() == [6.0, 6.0]
