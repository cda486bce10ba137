"""Convert a block table to a CSR list of page ids, the format of kernels that do not take block tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.library import define_op
from graphrt.kernels.sizes import ceil_div

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _list_pages_kernel(table_ptr, indptr_ptr, indices_ptr, stride_table, table_width, capacity, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(indptr_ptr + row)
    count = tl.minimum(tl.load(indptr_ptr + row + 1) - start, table_width)
    first = tl.program_id(1) * BLOCK
    if first < count:
        columns = first + tl.arange(0, BLOCK)
        at = start + columns
        # indptr is an unchecked argument, so mask every write outside the buffer.
        mask = (columns < count) & (at >= 0) & (at < capacity)
        pages = tl.load(table_ptr + row.to(tl.int64) * stride_table + columns, mask=mask, other=0)
        tl.store(indices_ptr + at, pages, mask=mask)


def _list_pages_triton(block_table: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor) -> None:
    rows, width = block_table.shape
    _list_pages_kernel[(rows, ceil_div(width, _BLOCK))](
        block_table, indptr, indices, block_table.stride(0), width, indices.shape[0], BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )


def list_pages_reference(block_table: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """Reference of `graphrt::list_pages` in PyTorch."""
    starts = indptr.tolist()
    for row in range(block_table.shape[0]):
        start, end = starts[row], min(starts[row + 1], starts[row] + block_table.shape[1], indices.shape[0])
        if 0 <= start < end:
            indices[start:end] = block_table[row, : end - start]


_op = define_op(
    "list_pages(Tensor block_table, Tensor indptr, Tensor(a!) indices) -> ()",
    triton_impl=_list_pages_triton,
    reference=list_pages_reference,
)


def list_pages(block_table: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """Write the first indptr[i + 1] - indptr[i] page ids of each table row i to indices[indptr[i] : indptr[i + 1]].

    block_table  [rows, max_pages]  int32  device; rows may be strided
    indptr       [rows + 1]         int32  device; non-decreasing
    indices      [capacity]         int32  device; written in place. Elements outside the ranges are unchanged

    Page ids beyond the table's width or beyond `capacity` are not written.
    Capture-safe: the grid depends only on the table's shape; the kernel reads the counts on the device.
    Raises: ShapeError: if a tensor has the wrong shape, dtype, device or stride.
    """
    check_tensor("block_table", block_table, shape=(None, None), dtype=torch.int32)
    check_tensor("indptr", indptr, shape=(block_table.shape[0] + 1,), dtype=torch.int32, device=block_table.device)
    check_tensor("indices", indices, shape=(None,), dtype=torch.int32, device=block_table.device)
    for name, tensor in (("block_table", block_table), ("indptr", indptr), ("indices", indices)):
        check_unit_stride(name, tensor)
    _op(block_table, indptr, indices)


def compile_variants() -> list[CompileSpec]:
    """Return the only variant."""
    return [CompileSpec("list_pages", _list_pages_kernel, {}, {"BLOCK": _BLOCK}, _NUM_WARPS, 3, divisible=("*_ptr",))]
