"""Canaries: guard bytes in front of a static buffer and behind it, in one storage, that no kernel may touch.

    canaries = Canaries()
    positions = canaries.full("positions", (8,), torch.int64, device, 0)
    ...
    for broken in canaries.broken():
        print(broken)

The guards hold the poison of the buffer's dtype. So a kernel that reads beyond its buffer reads NaN, or a large
negative number, and a kernel that writes beyond it is found, with the place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.testing.poison import poison_bits

GUARD_BYTES = 256
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class BrokenCanary:
    """A guard that somebody wrote to.

    name     of the buffer
    behind   whether the guard is the one behind the buffer
    offset   of the first changed byte: behind, from the buffer's end on; in front, how far before its beginning
    count    changed elements
    """

    name: str
    behind: bool
    offset: int
    count: int

    def __str__(self) -> str:
        where = f"{self.offset} bytes behind its end" if self.behind else f"{self.offset} bytes before its beginning"
        return f"{self.name}: {self.count} guard elements were written, the first {where}"


@dataclass(frozen=True, slots=True)
class _Guarded:
    whole: torch.Tensor  # integers of the element's size: guard, buffer, guard
    guard: int  # elements of each guard
    bits: int


class Canaries:
    """Static buffers with guards, by name, on any device. Capture-safe: nothing of it runs inside a step."""

    def __init__(self) -> None:
        self._guarded: dict[str, _Guarded] = {}

    @torch.inference_mode(False)
    def full(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, value: float = 0
    ) -> torch.Tensor:
        """A contiguous buffer of this shape, filled with `value`, with a guard of 256 bytes on each side."""
        size = dtype.itemsize
        guard, count = GUARD_BYTES // size, math.prod(shape)
        if dtype.is_complex:
            return torch.view_as_complex(self.full(name, (*shape, 2), dtype.to_real(), device)).fill_(value)
        bits = -(0x5B) if dtype == torch.bool else poison_bits(dtype)  # 0xa5 as a signed byte
        whole = torch.full((2 * guard + count,), bits, dtype=_INTEGERS[size], device=device)
        self._guarded[name] = _Guarded(whole, guard, bits)
        buffer = whole[guard : guard + count].view(dtype).view(tuple(shape))
        buffer.fill_(value)
        return buffer

    def broken(self) -> list[BrokenCanary]:
        """The guards that were written to since they were made or repaired; waits for the device."""
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
        """Write the guards again."""
        for kept in self._guarded.values():
            kept.whole[: kept.guard] = kept.bits
            kept.whole[-kept.guard :] = kept.bits
