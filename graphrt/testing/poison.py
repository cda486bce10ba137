"""Poison: values that no step can have written, put into buffers between replays to find what is not rewritten."""

from __future__ import annotations

import torch

from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.metadata.buffers import BufferKind, StaticBuffers

# Floats get a quiet NaN, with a payload of its own where the format has room for one: a NaN that a kernel computed
# is then told from a poisoned element that nobody wrote.
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
# Integers get bytes 0xa5: in signed types a large negative number, which is no id, length, slot or token, and over
# which no loop runs forever.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensor: torch.Tensor) -> None:
    """Fill `tensor`, any shape and strides, with the poison of its dtype, and check that every element took it.

    Raises: UnsupportedError for a dtype without poison (bool, complex), AssertionError when an element did not take it.
    """
    _bits(tensor).fill_(poison_bits(tensor.dtype))
    if not bool(poisoned(tensor).all()):
        raise AssertionError(
            f"poison: expected it in all {tensor.numel()} elements, got {int((~poisoned(tensor)).sum())} without; "
            "somebody else is writing to the tensor"
        )


def poison_derived(buffers: StaticBuffers) -> None:
    """Poison every derived buffer: these may be, between replays, since each refresh rewrites what a step reads."""
    for _, tensor in buffers.named(BufferKind.DERIVED):
        poison(tensor)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements of `tensor` still hold its poison: a bool tensor of the same shape, on the same device."""
    return _bits(tensor) == poison_bits(tensor.dtype)


def has_poison(dtype: torch.dtype) -> bool:
    """Whether `poison_bits` knows a dtype."""
    return dtype in _FLOAT_BITS or dtype in _INTEGERS


def poison_bits(dtype: torch.dtype) -> int:
    """The poison of a dtype, as the value of the signed integer of the same size."""
    size = dtype.itemsize
    if dtype in _FLOAT_BITS:
        return _FLOAT_BITS[dtype]
    if dtype in _INTEGERS:
        return int.from_bytes(b"\xa5" * size, "little", signed=True)
    raise UnsupportedError(f"poison: expected a real float or an integer dtype, got {dtype}; poison another buffer")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_VIEWS[tensor.element_size()]) if tensor.dtype != torch.bool else tensor
