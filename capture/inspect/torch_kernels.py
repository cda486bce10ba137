"""Bytes in arguments of PyTorch's kernels that are not addresses but may look like them.

    struct OffsetCalculator<3> { int dims = 2; IntDivider sizes[25]; unsigned strides[25][3]; }
                                               ^^ 2 written, 23 not   ^^ 2 written, 23 not

These structs have space for 25 dimensions. A launch writes only the dimensions of its tensors. The rest is
uninitialized stack memory that often contains tensor addresses. No kernel reads it, so the audit must ignore it.

    kernels              argument                                          addresses in it
    cat                  lists of 64 or 128 inputs                         the first grid.y words
    topk, sort, ...      TensorInfo: address, sizes, strides, dims         the first word
    elementwise, index,  a lambda or a struct with an OffsetCalculator:    none in the OffsetCalculator
    reductions           dims, sizes, strides
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

from graphrt.capture.inspect.scan import WORD
from graphrt.capture.inspect.view import Node

_NUMBER = 4
_MAX_DIMS = 25
_DIVIDERS = _NUMBER * (1 + 3 * _MAX_DIMS)
"""Bytes of an OffsetCalculator before its strides: the number of dimensions and three numbers per size."""
_STRIDES = _NUMBER * _MAX_DIMS
"""Bytes of one tensor's strides."""
_TENSOR_INFO = frozenset(WORD + -(-(2 * _MAX_DIMS * size + _NUMBER) // WORD) * WORD for size in (4, 8))
"""Bytes of a TensorInfo with 4-byte and with 8-byte sizes."""
_TENSORS = {
    "gpu_index_kernel<": 3, "index_copy_kernel_impl<": 3, "index_fill_kernel_impl<": 2, "cuda_take_put_kernel<": 2,
    "_cuda_scatter_gather_internal_kernel<": 3, "_cuda_scatter_fill_internal_kernel<": 2,
}  # fmt: skip
"""Number of tensors in the calculator at the start of the kernel's lambda."""
_MOST_TENSORS = 8
_FUNCTOR = 64
"""Maximum size of the functor of an elementwise kernel. The lambda contains the calculator, an address per tensor and
the functor. One tensor's strides take more bytes than a functor, so the length determines the number of tensors."""
_NEAR = 4
"""The first address is within this many words after a calculator; a functor may precede it."""
_AFTER_CALCULATORS = 6 * WORD + WORD + WORD
"""Bytes of a ReduceOp after its two calculators: six addresses, a number, two flags and a short number."""
_OF_REDUCTION = 2 * _DIVIDERS + 3 * _STRIDES
"""Bytes of the two calculators, the first for one tensor, the second for two. Either may have no dimensions."""
_OWN = re.compile(r"(?<![\w:])at::(native|cuda)::")

IsAddress = Callable[[int, int], bool]


def no_addresses(node: Node, is_address: IsAddress) -> Iterator[tuple[int, int, int]]:
    """Yield the byte ranges of a kernel's arguments that contain no addresses: index of the argument, first byte, and
    end.

    is_address  returns whether the argument at an index contains an address of known memory at an offset
    """
    name, grid = node.name, node.grid
    if grid is None or not _OWN.search(name):
        return
    for index, argument in enumerate(node.arguments):
        length = len(argument.data)
        if argument.pointers is not None or length < WORD + _STRIDES:
            continue
        if "::CatArrayBatchedCopy" in name:
            yield index, grid[1] * WORD, length
        elif "at::cuda::detail::TensorInfo<" in name and length in _TENSOR_INFO:
            yield index, WORD, length
        elif "at::native::ReduceOp<" in name and "complex<double>" not in name:  # its padding differs
            if length > _AFTER_CALCULATORS + _OF_REDUCTION:
                end = length - _AFTER_CALCULATORS
                yield index, end - _OF_REDUCTION - _NUMBER, end  # 4 bytes of padding, or none
        elif "elementwise_kernel" in name and _is_calculator(argument.data):
            tensors = _tensors(name, length)
            end = _DIVIDERS + tensors * _STRIDES
            following = range(-(-end // WORD) * WORD, length, WORD)[:_NEAR]
            if end != length and not any(is_address(index, at) for at in following):
                end = _DIVIDERS + _STRIDES  # if the layout is unknown, at least one tensor
            yield index, 0, end


def _tensors(name: str, length: int) -> int:
    """Return the number of tensors in the calculator at the start of an argument; 1 if unknown."""
    for kernel, tensors in _TENSORS.items():
        if kernel in name:
            return tensors
    tensors, rest = divmod(length - _DIVIDERS, _STRIDES)
    if rest == 0:  # the argument is only a calculator
        return tensors
    for tensors in range(1, _MOST_TENSORS + 1):
        if 0 < length - _DIVIDERS - tensors * (_STRIDES + WORD) <= _FUNCTOR + _NUMBER:
            return tensors
    return 1


def _is_calculator(data: bytes) -> bool:
    """Return whether the data start with a number of dimensions and a divider for the size of each."""
    if len(data) < _DIVIDERS + _STRIDES:
        return False
    dims, *numbers = struct.unpack_from(f"<{1 + 3 * _MAX_DIMS}I", data)
    return 0 < dims <= _MAX_DIMS and all(_is_divider(*numbers[3 * dim : 3 * dim + 3]) for dim in range(dims))


def _is_divider(size: int, multiplier: int, shift: int) -> bool:
    """Return whether n // size == (n + (n * multiplier >> 32)) >> shift for all n, and for no smaller shift."""
    return size > 0 and shift == (size - 1).bit_length() and multiplier == (((1 << shift) - size << 32) // size) + 1
