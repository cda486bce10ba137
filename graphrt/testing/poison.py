"""Poison is a value that no step writes. It fills buffers between replays to find elements that are not rewritten."""

from __future__ import annotations

import torch

from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.metadata.buffers import BufferKind, StaticBuffers
from graphrt.testing.numerics import bits_of

# Floats get a quiet NaN, with a payload if the format has one, to distinguish an unwritten element from a NaN that a
# kernel computed.
_FLOAT_BITS = {
    torch.float64: 0x7FF8DEADDEADDEAD,
    torch.float32: 0x7FC0DEAD,
    torch.float16: 0x7EAD,
    torch.bfloat16: 0x7FED,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7D,
    torch.float8_e4m3fnuz: -0x80,
    torch.float8_e5m2fnuz: -0x80,
    torch.float8_e8m0fnu: -1,
}
# Integers get bytes 0xa5, in signed types a large negative number, and not a valid id, length, KV slot or token.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor of any shape and strides with the poison of its dtype.

    Raises:
        UnsupportedError: if the dtype has no poison (bool, complex).
    """
    bits_of(tensor).fill_(poison_bits(tensor.dtype))


def poison_derived(buffers: StaticBuffers) -> None:
    """Poison every derived buffer. This is safe between replays, because each refresh rewrites what a step reads."""
    for _, tensor in buffers.named(BufferKind.DERIVED):
        poison(tensor)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bool mask of the elements that contain poison, with the shape and device of `tensor`."""
    return bits_of(tensor) == poison_bits(tensor.dtype)


def has_poison(dtype: torch.dtype) -> bool:
    """Return whether a dtype has a poison value."""
    return dtype in _FLOAT_BITS or dtype in _INTEGERS


def poison_bits(dtype: torch.dtype) -> int:
    """Return the poison of a dtype as a signed integer of the same size."""
    size = dtype.itemsize
    if dtype in _FLOAT_BITS:
        return _FLOAT_BITS[dtype]
    if dtype in _INTEGERS:
        return int.from_bytes(b"\xa5" * size, "little", signed=True)
    raise UnsupportedError(f"poison: expected a float or integer dtype, got {dtype}; poison another buffer")
