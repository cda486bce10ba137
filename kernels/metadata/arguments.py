"""Argument checks of the refresh that the buffer declarations cannot express."""

from __future__ import annotations

import torch

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import StaticBuffers, captured_size, pass_operands

MAX_REQS = 1 << 16
MAX_TOKENS = 1 << 16
"""Limits of a writer id (`last_writers`): 16 bits for the request, 16 for the page index in it, 32 for the step."""


def check_tables(name: str, tables: torch.Tensor, buffers: StaticBuffers) -> None:
    """Raise ShapeError unless page tables that the caller owns have the shape and dtype of `buffers.page_table`."""
    shape, device = tuple(buffers.page_table.shape), buffers.page_table.device
    check_tensor(name, tables, shape=shape, dtype=torch.int32, device=device)
    _check_contiguous(name, tables)


def check_query_len(b: StaticBuffers, query_len: int) -> None:
    """Raise ShapeError unless a decode graph has `query_len` tokens for each request; 0 is a mixed graph."""
    reqs, tokens = captured_size(b)
    if query_len and tokens != reqs * query_len:
        raise ShapeError(f"input_ids: expected {reqs} requests x query_len {query_len} tokens, got {tokens}; slice it")


def refresh_operands(b: StaticBuffers) -> list[torch.Tensor]:
    """Return the buffers that the refresh takes. Raises: ShapeError: if one does not fit the others."""
    reqs, tokens = captured_size(b)
    check_tensor("page_groups", b.page_groups, shape=(None, None))
    check_tensor("block_table", b.block_table, shape=(None, None, None))
    check_tensor("last_token", b.last_token, shape=(None,))
    req_indices, groups, width = b.last_token.shape[0], b.page_groups.shape[0], b.block_table.shape[2]
    if not (1 <= reqs <= MAX_REQS and 1 <= tokens <= MAX_TOKENS):
        raise ShapeError(
            f"req_indices, input_ids: expected 1 to {MAX_REQS} requests and tokens, got {reqs} and {tokens}; "
            "split the step"
        )
    for name, least in (("inputs", layout.inputs_size(1, 0, 0, groups)), ("last_writers", req_indices + 1)):
        if getattr(b, name).numel() < least:
            raise ShapeError(f"{name}: expected at least {least} values, got {getattr(b, name).numel()}; enlarge it")
    check_tensor("page_table", b.page_table, shape=(groups, req_indices, width))
    check_tensor("page_spans", b.page_spans, shape=(groups, req_indices, 2))
    for name in ("page_table", "page_spans"):
        _check_contiguous(name, getattr(b, name))
    group_strides = {}
    for name in ("check_code", "check_value", "table_from", "table_to", "new_spans"):
        fields = (4,) if name == "new_spans" else ()
        check_tensor(name, getattr(b, name), shape=(groups, reqs, *fields))
        check_unit_stride(name, getattr(b, name))
        group_strides[name] = getattr(b, name).stride(0) // (4 if name == "new_spans" else 1)
    if len(set(group_strides.values())) > 1:
        raise ShapeError(
            f"{', '.join(group_strides)}: expected equal strides between KV groups, got "
            f"{list(group_strides.values())}; slice all of them with StaticBuffers.cut()"
        )
    if b.block_table.stride(1) != width:
        raise ShapeError(
            f"block_table: expected rows of {width} columns, got stride {b.block_table.stride(1)}; copy it"
        )
    return pass_operands("refresh", b)


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ShapeError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}; copy it once")
