"""Static buffers: shapes, contents, kinds. The staging ring: slots, headers, results."""

from __future__ import annotations

import threading

import pytest
import torch

from graphrt.capture.staging import StagingRing, StagingSlot
from graphrt.kernels.metadata.buffers import BufferKind, Capacity, PageGroup, StaticBuffers

CPU = torch.device("cpu")
GROUPS = (PageGroup(4, 11, 0, 5), PageGroup(2, 6, 5, 9, window=3, writers_at=11))
CAPACITY = Capacity(reqs=3, tokens=7, req_indices=6, inputs=100, ring=2, page_groups=GROUPS)


# -- static buffers


def test_bytes_and_shapes_of_the_buffers() -> None:
    buffers = StaticBuffers.allocate(CAPACITY, CPU)
    by_hand = {
        "page_groups": (2, 8), "inputs": (100,), "last_token": (6,), "step_counter": (1,), "last_writers": (23,),
        "write_conflicts": (3, 3), "page_table": (2, 6, 9), "page_spans": (2, 6, 2), "block_table": (2, 3, 9),
        "table_from": (2, 3), "table_to": (2, 3), "input_ids": (7,), "positions": (7,), "slot_mapping": (2, 7),
        "query_start_loc": (4,), "seq_lens": (3,), "logits_indices": (3,), "req_indices": (3,), "req_status": (3,),
        "temperatures": (3,), "seeds": (3,), "new_spans": (2, 3, 4), "check_code": (2, 3), "check_value": (2, 3),
        "fault_code": (3,), "fault_value": (3,), "void_req_indices": (3,), "encoder_lens": (3,), "buffer_rows": (3,),
        "decode_seq_lens": (3,), "prompt_seq_lens": (3,), "decode_start_loc": (4,), "prompt_start_loc": (4,),
        "step_ring": (2,), "token_ring": (2, 3), "finish_reason_ring": (2, 3),
        "fault_code_ring": (2, 3), "fault_value_ring": (2, 3), "last_encoder_len": (6,),
        "input_ring": (2, 384), "cursor": (5,), "order": (3,), "req_seq_lens": (6,), "finish_reasons": (6,),
        "req_values": (13, 6),
        "top_ks": (3,), "top_ps": (3,), "min_ps": (3,), "repetition_penalties": (3,), "presence_penalties": (3,),
        "frequency_penalties": (3,), "prompt_lens": (3,), "penalty_seen": (6, 0), "penalty_counts": (6, 0),
        "logprobs": (3,), "logprob_tokens": (3,), "rank_ring": (2, 3), "logprob_ring": (2, 3, 0),
        "logprob_token_ring": (2, 3, 0), "token_masks": (3,),
        "bias_tokens": (6, 2, 0), "bias_values": (6, 2, 0), "bias_lists": (6, 3), "mask_words": (6, 0),
        "length_limits": (6,), "stop_tokens": (8, 6), "loop_condition": (1,),
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
    assert (CAPACITY.reqs_plus_one, CAPACITY.last_writers) == (4, 11 + 6 + 6)
    assert (CAPACITY.groups, CAPACITY.groups_plus_one, CAPACITY.pages_per_req) == (2, 3, 9)


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
    assert pads["last_token"] == pads["last_writers"] == "untouched"
    initial = {name: spec.initial for name, spec in StaticBuffers.specs().items() if spec.initial}
    unknown = ("last_token", "step_counter", "step_ring", "token_ring", "fault_value_ring", "order", "stop_tokens")
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


def test_results_are_collected_once() -> None:
    slot, calls = StagingSlot.allocate(4, CPU), []
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
