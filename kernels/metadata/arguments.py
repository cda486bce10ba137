"""Arguments of the operators on static buffers: schema, checks, and the pointers passed to kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from typing import Any

import torch

from graphrt.kernels.checks import check_contiguous, check_tensor, check_unit_stride
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.buffers import COPIED, ON_HOST, PER_GRAPH, PageGroup, StaticBuffers
from graphrt.kernels.op_declaration import Written

MAX_REQS = 1 << 16
MAX_TOKENS = 1 << 16
"""Limits of a writer id (`last_writers`): 16 bits for the request, 16 for the page index in it, 32 for the step."""

_GROUP_ROWS = ("check_code", "check_value", "table_from", "table_to", "new_spans")  # read with one stride


@functools.cache
def operands(operator: str) -> tuple[str, ...]:
    """Return the names of the buffers that an operator reads or writes, in the order of its arguments."""
    return tuple(n for n, spec in StaticBuffers.specs().items() if spec.writer == operator or operator in spec.readers)


def call_class(operator: str, also_written: Sequence[str] = (), **others: Any) -> type[Any]:
    """Return a dataclass of an operator's arguments, for DeclaredOp: its buffers, then `others` (types by name).

    also_written   buffers of another writer that the operator changes
    """
    written = {*also_written, *(name for name, spec in StaticBuffers.specs().items() if spec.writer == operator)}
    buffers = [(name, Written if name in written else torch.Tensor) for name in operands(operator)]
    return make_dataclass(f"{operator.capitalize()}Call", [*buffers, *others.items()], frozen=True, slots=True)


def pointers(record: Any, call: Any) -> Any:
    """Return the named tuple `record` of a kernel's buffers, taken from the arguments of its operator."""
    return record._make(getattr(call, name) for name in record._fields)


def pointer_types(record: Any, **others: str) -> Any:
    """Return the Triton types of the buffers in `record` and of `others`, for CompileSpec."""
    names = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32"}
    specs = StaticBuffers.specs()
    return record._make(others.get(name) or names[specs[name].dtype] for name in record._fields)


def check_tables(name: str, tables: torch.Tensor, buffers: StaticBuffers) -> None:
    """Raise ShapeError unless page tables that the caller owns have the shape and dtype of `buffers.page_table`."""
    shape, device = tuple(buffers.page_table.shape), buffers.page_table.device
    check_tensor(name, tables, shape=shape, dtype=torch.int32, device=device)
    check_contiguous(name, tables)


def captured_size(buffers: StaticBuffers) -> tuple[int, int]:
    """Return the padded requests and tokens of `buffers`. Raises: ShapeError: if either buffer is not 1-D."""
    for name in ("req_indices", "input_ids"):
        check_tensor(name, getattr(buffers, name), shape=(None,))
    return buffers.req_indices.shape[0], buffers.input_ids.shape[0]


def pass_operands(operator: str, b: StaticBuffers) -> list[torch.Tensor]:
    """Check the buffers of an operator against their declarations, and return them.

    Raises: ShapeError: if a tensor does not match the requests of `req_indices`, the tokens of `input_ids`, the groups
        of `page_groups`, the request indices of `last_token`, the columns of `block_table` or the entries of
        `step_ring`.
    """
    reqs, tokens = captured_size(b)
    for name in ("last_token", "step_ring"):
        check_tensor(name, getattr(b, name), shape=(None,))
    check_tensor("page_groups", b.page_groups, shape=(None, len(fields(PageGroup))))
    check_tensor("block_table", b.block_table, shape=(None, None, None))
    groups = b.page_groups.shape[0]
    everywhere = {
        "groups": groups, "groups_plus_one": groups + 1, "copied": len(COPIED), "req_indices": b.last_token.shape[0],
        "pages_per_req": b.block_table.shape[2],
    }  # fmt: skip
    check_tensor("logits_indices", b.logits_indices, shape=(None,))
    of_graph = {
        **everywhere, "reqs": reqs, "reqs_plus_one": reqs + 1, "tokens": tokens,
        "interleaved_tokens": tokens, "logits_rows": max(b.logits_indices.shape[0] // reqs, 1) * reqs if reqs else 0,
    }  # fmt: skip
    of_runtime = {**everywhere, "entries": b.step_ring.shape[0]}
    least = {
        "inputs": layout.inputs_size(1, 0, 0, groups), "input_ring": layout.INPUTS_AT + layout.HEADER_SIZE,
        "last_writers": b.last_token.shape[0] + 1, "reqs": reqs, "history": 0, "drafts": 0, "tree_drafts": 0,
        "tree_tokens": 0, "path_rows": 0,
    }  # fmt: skip
    for name in operands(operator):
        spec, tensor = StaticBuffers.specs()[name], getattr(b, name)
        extents = of_graph if spec.kind in PER_GRAPH else of_runtime
        shape = tuple(s if isinstance(s, int) else extents.get(s) for s in spec.shape)
        device = None if spec.kind in ON_HOST else b.req_indices.device
        check_tensor(name, tensor, shape=shape, dtype=spec.dtype, device=device)
        check_unit_stride(name, tensor)
        if "req_indices" in spec.shape:
            check_contiguous(name, tensor)
        columns = least.get(str(spec.shape[-1]), 1)
        if tensor.shape[-1] < columns or (tensor.dim() > 1 and tensor.shape[0] < 1):
            raise ShapeError(
                f"{name}: expected at least {columns} columns, got shape {list(tensor.shape)}; pass a wider tensor"
            )
    return [getattr(b, name) for name in operands(operator)]


def refresh_operands(b: StaticBuffers) -> list[torch.Tensor]:
    """Return the buffers of the refresh. Raises: ShapeError: if their shapes, dtypes or devices do not match."""
    reqs, tokens = captured_size(b)
    if not (1 <= reqs <= MAX_REQS and 1 <= tokens <= MAX_TOKENS):
        raise ShapeError(
            f"req_indices, input_ids: expected 1 to {MAX_REQS} requests and tokens, got {reqs} and {tokens}; "
            "split the step"
        )
    passed = pass_operands("refresh", b)
    strides = [getattr(b, name).stride(0) // getattr(b, name)[0, 0].numel() for name in _GROUP_ROWS]
    if len(set(strides)) > 1:
        raise ShapeError(
            f"{', '.join(_GROUP_ROWS)}: expected equal strides between KV groups, got {strides}; slice all of them "
            "with StaticBuffers.cut()"
        )
    if b.block_table.stride(1) != b.block_table.shape[2]:
        raise ShapeError(
            f"block_table: expected rows of {b.block_table.shape[2]} columns, got stride {b.block_table.stride(1)}; "
            f"pass a contiguous copy"
        )
    return passed
