"""The pinned ring through which every step record reaches the device: one slot per step in flight.

Overwriting a slot whose upload has not run yet is the most repeated bug of decode runners. Here a slot can only be
had from `acquire`, which waits for the event that the slot's last step recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch


class StagingSlot:
    """One slot: a host record, the event of the step that used it last, and who collects that step's results.

    on_done   called once, after the slot's step has ended and before the slot is written again
    """

    __slots__ = ("_event", "_lock", "_stream", "_submitted", "on_done", "record", "record_tensor")

    def __init__(self, words: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.record_tensor = torch.zeros(words, dtype=torch.int32, device="cpu", pin_memory=cuda)
        self.record: npt.NDArray[np.int32] = self.record_tensor.numpy()
        self.on_done: Callable[[], None] | None = None
        self._event = torch.cuda.Event() if cuda else None
        self._stream: torch.cuda.Stream | None = None
        self._submitted = False
        # Another thread may read a step's tokens while this one submits the next step: one of them collects.
        self._lock = threading.Lock()

    def in_flight(self, stream: torch.cuda.Stream | None) -> StagingSlot:
        """Context in which a step's upload and launch are queued on `stream`. However it ends, by an error between the
        two as well, the slot is not written again before the device is done with it."""
        self._stream = stream
        return self

    def __enter__(self) -> None:
        self._submitted = True

    def __exit__(self, *error: object) -> None:
        if self._event is not None:
            self._event.record(self._stream)

    def is_done(self) -> bool:
        """Whether the slot's last step has ended, without waiting."""
        return not self._submitted or self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the slot's last step has ended, then hand its results over.

        A late reader may find the slot in use by a newer step. It leaves that step to the step's own readers.
        """
        if self._submitted and self._event is not None:
            self._event.synchronize()
        with self._lock:
            ended = self._submitted and (self._event is None or self._event.query())
            if ended and self.on_done is not None:
                on_done, self.on_done = self.on_done, None
                on_done()


class StagingRing:
    """`depth` slots used in turn. The only way to write to the device record is `acquire`, fill, `upload`."""

    def __init__(self, depth: int, words: int, device_record: torch.Tensor) -> None:
        self._slots = [StagingSlot(words, device_record.device) for _ in range(depth)]
        self._device_record = device_record
        self.waits = 0

    def acquire(self, step: int) -> StagingSlot:
        """The slot of `step`, free to be written. Waits only when the step `depth` before still runs."""
        slot = self._slots[step % len(self._slots)]
        if not slot.is_done():
            self.waits += 1
        slot.wait()
        return slot

    def upload(self, slot: StagingSlot, words: int) -> None:
        """Queue the one host-to-device copy of a step: the used prefix of the record, on the current stream."""
        self._device_record[:words].copy_(slot.record_tensor[:words], non_blocking=True)

    def drain(self) -> None:
        """Wait for every step in flight and hand all results over."""
        for slot in self._slots:
            slot.wait()

    def close(self) -> None:
        """Drop the slots' memory; every step must have ended."""
        self._slots = []
        del self._device_record
