"""Canaries, which are guard bytes before and after a static buffer, in the same storage, that no kernel may write.

    canaries = Canaries()
    positions = canaries.full("positions", (8,), torch.int64, device, 0)
    ...
    for broken in canaries.broken():
        print(broken)

The guards contain the poison of the buffer's dtype. A kernel that reads beyond its buffer reads NaN or a large negative
number. Writes beyond a buffer are reported with their offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.testing.numerics import INTEGERS
from graphrt.testing.poison import poison_bits

GUARD_BYTES = 256


@dataclass(frozen=True, slots=True)
class BrokenCanary:
    """A guard that was written to.

    name        name of the buffer
    is_after    whether the guard is after the buffer
    offset      bytes from the end of the buffer to the first changed element, or back from its start
    count       number of changed elements
    """

    name: str
    is_after: bool
    offset: int
    count: int

    def __str__(self) -> str:
        where = "after its end" if self.is_after else "before its start"
        return f"{self.name}: {self.count} guard elements were written, the first {self.offset} bytes {where}"


@dataclass(frozen=True, slots=True)
class _Guarded:
    whole: torch.Tensor  # integers of the element's size: guard, buffer, guard
    guard: int  # elements of each guard
    bits: int


class Canaries:
    """Static buffers with guards, by name, on any device. Capture-safe: runs no code inside a step."""

    def __init__(self) -> None:
        self._guarded: dict[str, _Guarded] = {}

    @torch.inference_mode(False)
    def full(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, value: float = 0
    ) -> torch.Tensor:
        """Return a contiguous buffer filled with `value`, with a 256-byte guard on each side."""
        size = dtype.itemsize
        guard, count = GUARD_BYTES // size, math.prod(shape)
        if dtype.is_complex:
            return torch.view_as_complex(self.full(name, (*shape, 2), dtype.to_real(), device)).fill_(value)
        bits = -(0x5B) if dtype == torch.bool else poison_bits(dtype)  # 0xa5 as a signed byte
        whole = torch.full((2 * guard + count,), bits, dtype=INTEGERS[size], device=device)
        self._guarded[name] = _Guarded(whole, guard, bits)
        buffer = whole[guard : guard + count].view(dtype).view(tuple(shape))
        buffer.fill_(value)
        return buffer

    def broken(self) -> list[BrokenCanary]:
        """Return the guards that were written to since creation or repair. Waits for the device."""
        found = []
        for name, kept in self._guarded.items():
            front, back = kept.whole[: kept.guard] != kept.bits, kept.whole[-kept.guard :] != kept.bits
            if not bool((front | back).any()):
                continue
            size = kept.whole.element_size()
            if count := int(front.sum()):
                last = int(front.nonzero()[-1])
                found.append(BrokenCanary(name, False, (kept.guard - last) * size, count))
            if count := int(back.sum()):
                found.append(BrokenCanary(name, True, int(back.nonzero()[0]) * size, count))
        return found

    def repair(self) -> None:
        """Restore the guards."""
        for kept in self._guarded.values():
            kept.whole[: kept.guard] = kept.bits
            kept.whole[-kept.guard :] = kept.bits
