"""The pinned ring that transfers each launch's inputs to the device, with one input slot per launch in flight.

Overwriting an input slot that the device has not read yet is a common bug in decode runners. Here, `acquire` is the
only way to get an input slot, and it waits for the event recorded by the last launch that used it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from graphrt.capture import device_wait
from graphrt.capture.raw_graph import LaunchEvent


class StagingSlot:
    """An input slot: input words, and the event of the last launch that used them.

    No call takes a lock. Threads and signal handlers may wait for a launch while its results are being collected, so
    `on_done` may run several times, even concurrently; it must take effect only once.

    Queue a launch between `begin` and `end`, or in an `in_flight` block, which takes twice as long.

    Args:
        words: [words] int32, on the host; pinned if a GPU reads it
        device: device that reads the words
        header: number of words in the header
        copies: copies of the header at the start of the words. The inputs start with the last copy

    Attributes:
        inputs: the words to write between `acquire` and `begin`, which copies the header
        on_done: called after the last launch has finished and before the words are written again
    """

    __slots__ = ("_copies", "_event", "_header", "_num_copies", "_running", "inputs", "inputs_tensor", "on_done")

    def __init__(self, words: torch.Tensor, device: torch.device, header: int = 0, copies: int = 1) -> None:
        record_at = header * (copies - 1)
        self.inputs_tensor = words[record_at:]
        self.inputs: npt.NDArray[np.int32] = self.inputs_tensor.numpy()
        self._num_copies = copies - 1
        self._copies, self._header = (x.view(np.uint8).data for x in (words[:record_at].numpy(), self.inputs[:header]))
        self.on_done: Callable[[], None] | None = None
        self._event = LaunchEvent() if device.type == "cuda" else None
        # A new object per launch; None once the launch is known to have finished, so that `is_done` need not ask again.
        self._running: object = None

    @classmethod
    def allocate(cls, words: int, device: torch.device) -> StagingSlot:
        """Return an input slot with newly allocated memory."""
        pinned = device.type == "cuda"
        return cls(torch.zeros(words, dtype=torch.int32, device="cpu", pin_memory=pinned), device)

    @contextlib.contextmanager
    def in_flight(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Queue a launch on `stream` in this block."""
        self.begin()
        try:
            yield
        finally:
            self.end(stream)

    def begin(self) -> None:
        """Copy the header of the completed inputs. The results are still those of the last launch."""
        self._copies[:] = self._header.tobytes() * self._num_copies

    def end(self, stream: torch.cuda.Stream | None) -> None:
        """Record the event on `stream`. Call this after each `begin`, even if queuing the launch failed."""
        if self._event is not None:
            self._event.record(stream)
            self._running = object()

    @property
    def is_free(self) -> bool:
        """True if the last launch is known to have finished and its results have been collected."""
        return self._running is None and self.on_done is None

    def is_done(self) -> bool:
        """Return whether the last launch has finished, without waiting."""
        running = self._running
        # Compare after the query, because another thread may queue the next launch during it.
        if running is not None and self._event is not None and self._event.query() and self._running is running:
            self._running = None
        if self._running is not None and device_wait.watch is not None:
            device_wait.watch.poll()
        return self._running is None

    def wait(self) -> None:
        """Wait until the last launch has finished, then collect its results.

        A newer launch may be using the input slot by then. If that launch is running, its results are not collected.
        """
        if self.is_free:
            return
        # With several ranks, wait for a finished launch too: this raises after a failure, when results may be wrong.
        if self._event is not None and (self._running is not None or device_wait.watch is not None):
            device_wait.wait_for(self._event)
        on_done = self.on_done  # read before the query, because a launch is queued before its `on_done` is set
        if on_done is not None and self.is_done():
            on_done()
            if self.on_done is on_done:
                self.on_done = None


class StagingRing:
    """The input slots of an input ring, used in turn. `acquire` is the only way to get one for writing.

    Args:
        header, copies: see StagingSlot
    """

    def __init__(self, input_ring: torch.Tensor, device: torch.device, header: int = 0, copies: int = 1) -> None:
        self._slots = [StagingSlot(words, device, header, copies) for words in input_ring]
        self.waits = 0

    def acquire(self, launch: int) -> StagingSlot:
        """Return the input slot of a launch, ready for writing. Wait only while its last launch is running."""
        slot = self._slots[launch % len(self._slots)]
        if not slot.is_free:
            if not slot.is_done():
                self.waits += 1
            slot.wait()
        return slot

    def drain(self) -> None:
        """Wait for every launch in flight and collect all results."""
        for slot in self._slots:
            slot.wait()

    def close(self) -> None:
        """Drop the input slots. All launches must have finished."""
        self._slots = []
