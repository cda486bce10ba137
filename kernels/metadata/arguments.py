"""What the refresh expects of its buffers, beyond what their declarations say."""

from __future__ import annotations

import torch

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import StaticBuffers, captured_size, pass_operands

MAX_ROWS = 1 << 16
MAX_TOKENS = 1 << 16
"""A claim names its row and the page within it in 16 bits each, and the step in 32."""


def check_tables(name: str, tables: torch.Tensor, buffers: StaticBuffers) -> None:
    """Raise ShapeError unless tables that a caller keeps are as wide and as many as those of the buffers."""
    shape, device = tuple(buffers.page_table.shape), buffers.page_table.device
    check_tensor(name, tables, shape=shape, dtype=torch.int32, device=device)
    if not tables.is_contiguous():
        raise ShapeError(f"{name}: expected a contiguous tensor, got strides {list(tables.stride())}; copy it once")


def check_query_len(b: StaticBuffers, query_len: int) -> None:
    """Raise ShapeError unless the buffers are cut to as many tokens as their rows have in a decode graph."""
    rows, tokens = captured_size(b)
    if query_len and tokens != rows * query_len:
        raise ShapeError(f"input_ids: expected rows x query_len = {rows * query_len} tokens, got {tokens}; slice it")


def refresh_operands(b: StaticBuffers) -> list[torch.Tensor]:
    """The buffers of the refresh. Raises: ShapeError, also for what their declarations cannot say."""
    rows, tokens = captured_size(b)
    check_tensor("page_groups", b.page_groups, shape=(None, None))
    check_tensor("block_table", b.block_table, shape=(None, None, None))
    check_tensor("last_token", b.last_token, shape=(None,))
    req_indices, groups, width = b.last_token.shape[0], b.page_groups.shape[0], b.block_table.shape[2]
    if not (1 <= rows <= MAX_ROWS and 1 <= tokens <= MAX_TOKENS):
        raise ShapeError(
            f"req_indices, input_ids: expected 1 to {MAX_ROWS} rows and tokens, got {rows} and {tokens}; split the step"
        )
    for name, least in (("inputs", layout.inputs_size(1, 0, 0, groups)), ("claims", req_indices + 1)):
        if getattr(b, name).numel() < least:
            raise ShapeError(f"{name}: expected at least {least} values, got {getattr(b, name).numel()}; enlarge it")
    check_tensor("page_table", b.page_table, shape=(groups, req_indices, width))
    check_tensor("page_spans", b.page_spans, shape=(groups, req_indices, 2))
    for name in ("page_table", "page_spans"):
        if not getattr(b, name).is_contiguous():
            raise ShapeError(f"{name}: expected a contiguous tensor, got strides {getattr(b, name).stride()}; copy it")
    for name in (alike := ("check_code", "check_value", "table_from", "table_to", "new_spans")):
        fields = (4,) if name == "new_spans" else ()
        check_tensor(name, getattr(b, name), shape=(groups, rows, *fields))
        check_unit_stride(name, getattr(b, name))
    if len({getattr(b, name).stride(0) // (4 if name == "new_spans" else 1) for name in alike}) > 1:
        raise ShapeError(f"{', '.join(alike)}: expected equal strides of groups, got others; cut them alike")
    if b.block_table.stride(1) != width:
        raise ShapeError(
            f"block_table: expected rows of {width} columns, got stride {b.block_table.stride(1)}; copy it"
        )
    return pass_operands("refresh", b)
