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

import re
import struct
from collections.abc import Callable, Iterator

from graphrt.capture.inspect.view import Node

_WORD, _NUMBER = 8, 4
_MAX_DIMS = 25
_DIVIDERS = _NUMBER * (1 + 3 * _MAX_DIMS)
"""Bytes of an OffsetCalculator before its strides: the number of dimensions, and three numbers per size."""
_STRIDES = _NUMBER * _MAX_DIMS
"""Bytes of the strides of one tensor."""
_TENSOR_INFO = frozenset(_WORD + -(-(2 * _MAX_DIMS * size + _NUMBER) // _WORD) * _WORD for size in (4, 8))
"""Bytes of a TensorInfo, with sizes of 4 and of 8 bytes."""
_TENSORS = {
    "gpu_index_kernel<": 3, "index_copy_kernel_impl<": 3, "index_fill_kernel_impl<": 2, "cuda_take_put_kernel<": 2,
    "_cuda_scatter_gather_internal_kernel<": 3, "_cuda_scatter_fill_internal_kernel<": 2,
}  # fmt: skip
"""How many tensors the calculator has with which the lambda of such a kernel begins."""
_MOST_TENSORS = 8
_FUNCTOR = 64
"""Bytes that a functor of an elementwise kernel may have. Such a lambda holds the calculator, an address per tensor and
the functor. As the strides of one tensor take more than a functor, its length tells how many tensors there are."""
_NEAR = 4
"""Among so many words behind a calculator there is the first address: a functor may come before it."""
_BEHIND = 6 * _WORD + _WORD + _WORD
"""Bytes of a ReduceOp behind its two calculators: six addresses, a number, two flags and a short number."""
_OF_REDUCTION = 2 * _DIVIDERS + 3 * _STRIDES
"""Bytes of these two, the first of one tensor, the second of two. Either may have no dimensions."""
_OWN = re.compile(r"(?<![\w:])at::(native|cuda)::")

IsAddress = Callable[[int, int], bool]


def no_addresses(node: Node, is_address: IsAddress) -> Iterator[tuple[int, int, int]]:
    """Stretches of a kernel's arguments that hold no address: index of the argument, first byte, and end.

    is_address  whether an argument, by index, has an address of known memory at a byte
    """
    name, grid = node.name, node.grid
    if grid is None or not _OWN.search(name):
        return
    for index, argument in enumerate(node.arguments):
        length = len(argument.data)
        if argument.pointers is not None or length < _WORD + _STRIDES:
            continue
        if "::CatArrayBatchedCopy" in name:
            yield index, grid[1] * _WORD, length
        elif "at::cuda::detail::TensorInfo<" in name and length in _TENSOR_INFO:
            yield index, _WORD, length
        elif "at::native::ReduceOp<" in name and "complex<double>" not in name:  # which is padded otherwise
            if length > _BEHIND + _OF_REDUCTION:
                yield index, length - _BEHIND - _OF_REDUCTION - _NUMBER, length - _BEHIND  # 4 bytes of padding, or none
        elif "elementwise_kernel" in name and _is_calculator(argument.data):
            tensors = _tensors(name, length)
            end = _DIVIDERS + tensors * _STRIDES
            behind = range(-(-end // _WORD) * _WORD, length, _WORD)[:_NEAR]
            if end != length and not any(is_address(index, at) for at in behind):
                end = _DIVIDERS + _STRIDES  # another layout than is known: of one tensor at least
            yield index, 0, end


def _tensors(name: str, length: int) -> int:
    """How many tensors the calculator at the beginning of an argument has; 1 where that is not known."""
    for kernel, tensors in _TENSORS.items():
        if kernel in name:
            return tensors
    tensors, rest = divmod(length - _DIVIDERS, _STRIDES)
    if rest == 0:  # the argument is a calculator, and nothing else
        return tensors
    for tensors in range(1, _MOST_TENSORS + 1):
        if 0 < length - _DIVIDERS - tensors * (_STRIDES + _WORD) <= _FUNCTOR + _NUMBER:
            return tensors
    return 1


def _is_calculator(data: bytes) -> bool:
    """Whether a number of dimensions stands first, and behind it a divider for the size of each of them."""
    if len(data) < _DIVIDERS + _STRIDES:
        return False
    dims, *numbers = struct.unpack_from(f"<{1 + 3 * _MAX_DIMS}I", data)
    return 0 < dims <= _MAX_DIMS and all(_is_divider(*numbers[3 * dim : 3 * dim + 3]) for dim in range(dims))


def _is_divider(size: int, multiplier: int, shift: int) -> bool:
    """n // size == (n + (n * multiplier >> 32)) >> shift, with the smallest shift: its numbers follow from the size."""
    return size > 0 and shift == (size - 1).bit_length() and multiplier == (((1 << shift) - size << 32) // size) + 1
