"""Integer helpers for launches. Triton's functions of the same names take several microseconds per host call."""

from __future__ import annotations


def ceil_div(value: int, size: int) -> int:
    """Return `value / size`, rounded up."""
    return -(-value // size)


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two >= `value`; `value` must be at least 1."""
    return 1 << (value - 1).bit_length()
