"""A ring of bytes in memory that processes of one host share: one writer, and readers that each read all bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_LENGTH_BYTES = 8


class SharedRing:
    """Sends messages of any length. A message that does not fit is written in pieces, as readers make room.

    counters  [1 + readers] int64, shared and initially 0: bytes written, and bytes read by each reader
    ring      [bytes] uint8, shared
    reader    index of this process among the readers; None: it is the writer
    wait      called with a condition; returns once it is true
    """

    def __init__(
        self,
        counters: npt.NDArray[np.int64],
        ring: npt.NDArray[np.uint8],
        reader: int | None,
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._written, self._read, self._ring, self._wait = counters[:1], counters[1:], ring.data, wait
        self._own = self._written if reader is None else self._read[reader : reader + 1]
        self._at = 0  # bytes that this process has written or read
        self._end = 0  # bytes that can be written before all readers are asked how far they have read

    def send(self, message: bytes) -> None:
        data = memoryview(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
        while data:
            if self._at == self._end:
                self._wait(self._has_room)
            start = self._at % len(self._ring)
            size = min(len(data), self._end - self._at, len(self._ring) - start)
            self._ring[start : start + size] = data[:size]
            self._advance(size)
            data = data[size:]

    def _has_room(self) -> bool:
        self._end = len(self._ring) + int(self._read.min())
        return self._end > self._at

    def receive(self) -> bytes:
        length = int.from_bytes(self._take(_LENGTH_BYTES), "little")
        return self._take(length)

    def _take(self, count: int) -> bytes:
        out = bytearray()
        while len(out) < count:
            if not (ready := int(self._written[0]) - self._at):
                self._wait(lambda: bool(self._written[0] != self._at))
                continue
            start = self._at % len(self._ring)
            piece = self._ring[start : min(start + min(ready, count - len(out)), len(self._ring))]
            out += piece
            self._advance(len(piece))
        return bytes(out)

    def _advance(self, count: int) -> None:
        self._at += count
        self._own[0] = self._at  # after the bytes
