"""Bytes of PyTorch's own kernel arguments that hold no address, though they may look like one.

    struct OffsetCalculator<3> { int dims = 2; IntDivider sizes[25]; unsigned strides[25][3]; }
                                               ^^ 2 written, 23 not   ^^ 2 written, 23 not

Such structs have room for 25 dimensions. A launch writes as many as its tensors have, and the rest is what the stack
held: often the address of some tensor. No kernel reads the rest, so no audit may take it for an address.

    kernels              argument                                          addresses in it
    cat                  lists of 64 or 128 inputs                         the first grid.y words
    topk, sort, ...      TensorInfo: address, sizes, strides, dims         the first word
    elementwise, index,  a lambda or a struct with an OffsetCalculator:    none in the OffsetCalculator
    reductions           dims, sizes, strides
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from graphrt.capture.inspect.view import Node

_WORD, _NUMBER = 8, 4
_MAX_DIMS = 25
_DIVIDERS = _NUMBER * (1 + 3 * _MAX_DIMS)
"""Bytes of an OffsetCalculator before its strides: the number of dimensions, and three numbers per size."""
_STRIDES = _NUMBER * _MAX_DIMS
"""Bytes of the strides of one tensor."""
_OF_REDUCTION = 2 * _DIVIDERS + 3 * _STRIDES
"""Bytes of the two of a reduction: of one tensor, then of two. The second one may have no dimensions."""
_MOST_TENSORS = 5
_TENSOR_INFO = frozenset(_WORD + -(-(2 * _MAX_DIMS * size + _NUMBER) // _WORD) * _WORD for size in (4, 8))
"""Bytes of a TensorInfo, with sizes of 4 and of 8 bytes."""

IsAddress = Callable[[int, int], bool]


def no_addresses(node: Node, is_address: IsAddress) -> Iterator[tuple[int, int, int]]:
    """Stretches of a kernel's arguments that hold no address: index of the argument, first byte, and end.

    is_address  whether an argument, by index, has an address of known memory at a byte. Asked where a calculator may
                end: its length depends on a number of tensors that it does not hold, and addresses follow it
    """
    name, grid = node.name, node.grid
    if grid is None or "at::" not in name:
        return
    for index, argument in enumerate(node.arguments):
        length = len(argument.data)
        if argument.pointers is not None or length < _WORD + _STRIDES:
            continue
        if "CatArrayBatchedCopy" in name:
            yield index, grid[1] * _WORD, length
        elif "TensorInfo<" in name and length in _TENSOR_INFO:
            yield index, _WORD, length
        elif "reduce_kernel" in name:
            first = next((first for first, _ in _calculators(argument.data, index, is_address)), length)
            yield index, first, min(first + _OF_REDUCTION, length)
        elif "elementwise_kernel" in name:
            yield from ((index, *stretch) for stretch in _calculators(argument.data, index, is_address))


def _calculators(data: bytes, index: int, is_address: IsAddress) -> Iterator[tuple[int, int]]:
    """Where OffsetCalculators lie in an argument."""
    numbers = np.frombuffer(data, "<u4", len(data) // _NUMBER).tolist()
    at = 0
    while at + _DIVIDERS + _STRIDES <= len(data):
        if not _is_calculator(numbers, at // _NUMBER):
            at += _NUMBER
            continue
        ends = range(at + _DIVIDERS + _STRIDES, len(data) + 1, _STRIDES)[:_MOST_TENSORS]
        if at == 0 and len(data) in ends:  # the argument is a calculator, and nothing else
            end = len(data)
        else:
            end = next((end for end in reversed(ends) if _begins(index, -(-end // _WORD) * _WORD, is_address)), ends[0])
        yield at, end
        at = end


def _begins(index: int, at: int, is_address: IsAddress) -> bool:
    """Whether addresses begin at a byte of an argument: there is one, and none before it."""
    return is_address(index, at) and not is_address(index, at - _WORD)


def _is_calculator(numbers: list[int], at: int) -> bool:
    """Whether a number of dimensions begins here, and a divider for the size of each: size, multiplier and shift."""
    dims = numbers[at]
    return 0 < dims <= _MAX_DIMS and all(_is_divider(*numbers[i : i + 3]) for i in range(at + 1, at + 1 + 3 * dims, 3))


def _is_divider(size: int, multiplier: int, shift: int) -> bool:
    """n // size == (n + (n * multiplier >> 32)) >> shift, with the smallest shift: its numbers follow from the size."""
    return size > 0 and shift == (size - 1).bit_length() and multiplier == (((1 << shift) - size << 32) // size) + 1
