"""The staging ring: slots, headers, results."""

from __future__ import annotations

import threading

import pytest
import torch

from graphrt.capture.staging import StagingRing, StagingSlot
from tests.support.capture_rig import CPU, PendingEvent


def test_launches_take_the_slots_in_turn() -> None:
    input_ring = torch.zeros(3, 8, dtype=torch.int32)
    ring = StagingRing(input_ring, CPU)
    slots = [ring.acquire(launch) for launch in range(7)]
    assert [slots.index(slot) for slot in slots] == [0, 1, 2, 0, 1, 2, 0]
    slots[0].inputs[:] = range(8)
    assert slots[0].inputs_tensor.tolist() == list(range(8))
    assert slots[1].inputs.tolist() == [0] * 8
    assert input_ring.tolist() == [list(range(8)), [0] * 8, [0] * 8]


def test_begin_copies_the_header_for_each_reader() -> None:
    input_ring = torch.zeros(2, 12, dtype=torch.int32)
    slot = StagingRing(input_ring, CPU, header=2, copies=4).acquire(1)
    slot.inputs[:] = [5, 6, 7, 8, 9, 10]
    assert input_ring.tolist() == [[0] * 12, [0] * 6 + [5, 6, 7, 8, 9, 10]]
    with slot.in_flight(None):
        assert input_ring[1].tolist() == [5, 6] * 3 + [5, 6, 7, 8, 9, 10]
    assert not input_ring[0].any()


def test_a_slot_is_not_free_while_another_thread_collects_its_results() -> None:
    slot, began, proceed, free = StagingSlot.allocate(4, CPU), threading.Event(), threading.Event(), threading.Event()

    def collect() -> None:
        began.set()
        proceed.wait(10)

    with slot.in_flight(None):
        slot.on_done = collect
    reader = threading.Thread(target=slot.wait)
    reader.start()
    assert began.wait(10)
    writer = threading.Thread(target=lambda: (slot.wait(), free.set()))
    writer.start()
    assert not free.wait(0.05), "the results are not collected yet"
    proceed.set()
    assert free.wait(10)
    for thread in (reader, writer):
        thread.join()


def test_a_late_reader_of_one_launch_does_not_collect_the_next() -> None:
    """While a thread waits for a step, another one collects it and submits the next step in the same slot."""
    slot, event, calls = StagingSlot.allocate(4, CPU), PendingEvent(), []
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


def test_results_are_collected_once_and_before_a_slot_is_written_again() -> None:
    ring, done = StagingRing(torch.zeros(2, 16, dtype=torch.int32), CPU), []
    for launch in range(5):
        slot = ring.acquire(launch)
        slot._event = PendingEvent()
        assert ring.waits == max(0, launch - 1), "counted while a launch is running"
        assert done == list(range(max(0, launch - 1))), "all launches but the one in the other slot"
        with slot.in_flight(None):
            slot.on_done = lambda launch=launch: done.append(launch)
    ring.drain()
    ring.drain()
    assert sorted(done) == [0, 1, 2, 3, 4]
    slot.on_done = lambda: done.append(5)
    with pytest.raises(ZeroDivisionError), slot.in_flight(None):
        raise ZeroDivisionError
    slot.wait()
    assert done[-1] == 5, "a launch that failed is waited for too"
