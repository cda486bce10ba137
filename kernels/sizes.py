"""Whole numbers of launches. Triton's own run as device functions, which takes the host several microseconds a call."""

from __future__ import annotations


def ceil_div(value: int, size: int) -> int:
    """How many pieces of `size` hold `value`."""
    return -(-value // size)


def next_power_of_two(value: int) -> int:
    """The smallest power of two >= `value`, which is at least 1."""
    return 1 << (value - 1).bit_length()
