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
        self._written, self._read, self._ring, self._wait = counters[:1], counters[1:], ring, wait
        self._own = self._written if reader is None else self._read[reader : reader + 1]
        self._at = 0  # bytes that this process has written or read

    def send(self, message: bytes) -> None:
        data = np.frombuffer(len(message).to_bytes(_LENGTH_BYTES, "little") + message, np.uint8)
        while len(data):
            if not (room := len(self._ring) - self._at + int(self._read.min())):
                self._wait(lambda: bool(self._at - int(self._read.min()) < len(self._ring)))
                continue
            start = self._at % len(self._ring)
            piece = data[: min(room, len(self._ring) - start)]
            self._ring[start : start + len(piece)] = piece
            self._advance(len(piece))
            data = data[len(piece) :]

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
            out += piece.tobytes()
            self._advance(len(piece))
        return bytes(out)

    def _advance(self, count: int) -> None:
        self._at += count
        self._own[0] = self._at  # after the bytes
