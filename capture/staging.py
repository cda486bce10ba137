"""The pinned ring through which the host tells the device what is new: one slot per launch in flight.

Overwriting a slot that the device has not read yet is the most repeated bug of decode runners. Here a slot can only be
had from `acquire`, which waits for the event that the slot's last launch recorded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from graphrt.capture.raw_graph import LaunchEvent


class StagingSlot:
    """One slot: words in host memory, the event of the launch that used them last, and who collects its results.

    words          [words] int32, host: pinned where the device reads it
    device         who reads it
    header         its first words, of which the slot has `copies`, one behind the other; `record` begins with the last
    record         what is written between `acquire` and `begin`, which copies the header
    on_done        called once, after the slot's launch has ended and before the slot is written again

    A launch is queued between `begin` and `end`, or in an `in_flight` block, which takes twice as long.
    """

    __slots__ = (
        "_copies", "_event", "_header", "_lock", "_num_copies", "_running", "_submitted", "on_done", "inputs",
        "inputs_tensor",
    )  # fmt: skip

    def __init__(self, words: torch.Tensor, device: torch.device, header: int = 0, copies: int = 1) -> None:
        record_at = header * (copies - 1)
        self.inputs_tensor = words[record_at:]
        self.inputs: npt.NDArray[np.int32] = self.inputs_tensor.numpy()
        self._num_copies = copies - 1
        self._copies, self._header = (x.view(np.uint8).data for x in (words[:record_at].numpy(), self.inputs[:header]))
        self.on_done: Callable[[], None] | None = None
        self._event = LaunchEvent() if device.type == "cuda" else None
        self._submitted = False
        self._running = False  # as far as anybody asked: a launch that is known to have ended costs no call any more
        # Another thread may read a step's tokens while this one submits the next step: one of them collects.
        self._lock = threading.Lock()

    @classmethod
    def allocate(cls, words: int, device: torch.device) -> StagingSlot:
        """A slot with memory of its own."""
        pinned = device.type == "cuda"
        return cls(torch.zeros(words, dtype=torch.int32, device="cpu", pin_memory=pinned), device)

    @contextlib.contextmanager
    def in_flight(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Context in which a launch is queued on `stream`."""
        self.begin()
        try:
            yield
        finally:
            self.end(stream)

    def begin(self) -> None:
        """Copy the header, as the record is written. To those who read results, the slot is still the last launch's."""
        self._copies[:] = self._header.tobytes() * self._num_copies

    def end(self, stream: torch.cuda.Stream | None) -> None:
        """The launch is queued on `stream`, or failed on the way there: the slot is not written again before the device
        is done with it. Call it behind every `begin`."""
        with self._lock:
            self._submitted = True
            if self._event is not None:
                self._event.record(stream)
                self._running = True

    @property
    def is_free(self) -> bool:
        """Whether the slot's last launch is known to have ended, and its results were handed over."""
        return not self._running and self.on_done is None  # `on_done` goes when it has returned

    def is_done(self) -> bool:
        """Whether the slot's last launch has ended, without waiting."""
        if not self._running:
            return True
        with self._lock:
            return self._has_ended()

    def wait(self) -> None:
        """Wait until the slot's last launch has ended, then hand its results over.

        A late reader may find the slot in use by a newer launch. It leaves that one to its own readers.
        """
        if self.is_free:
            return
        if self._running and self._event is not None:
            self._event.synchronize()
        with self._lock:
            if self.on_done is not None and self._submitted and self._has_ended():
                self.on_done()
                self.on_done = None

    def amend(self, index: int, value: int, owns: Callable[[], bool]) -> None:
        """Write a word of the record while its launch is in flight; nothing where `owns` says that it is another's."""
        with self._lock:
            if owns():
                self.inputs[index] = value

    def _has_ended(self) -> bool:
        if self._running and self._event is not None and self._event.query():
            self._running = False
        return not self._running


class StagingRing:
    """The slots of an input_ring, used in turn. The only way to write to one is `acquire`.

    header, copies   of each slot; see StagingSlot
    """

    def __init__(self, input_ring: torch.Tensor, device: torch.device, header: int = 0, copies: int = 1) -> None:
        self._slots = [StagingSlot(words, device, header, copies) for words in input_ring]
        self.waits = 0

    def acquire(self, launch: int) -> StagingSlot:
        """The slot of a launch, free to be written. Waits only when the launch that had it before still runs."""
        slot = self._slots[launch % len(self._slots)]
        if not slot.is_free:
            if not slot.is_done():
                self.waits += 1
            slot.wait()
        return slot

    def drain(self) -> None:
        """Wait for every launch in flight and hand all results over."""
        for slot in self._slots:
            slot.wait()

    def close(self) -> None:
        """Drop the slots; every launch must have ended."""
        self._slots = []
