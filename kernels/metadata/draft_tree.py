"""Drafts that form a tree: the masks of its tokens, and the path that the sampled tokens take through it.

    drafts     17 8 9 8     of a request with last token 4, at position 40
    parents     0 1 1 0     0: token 4, i: draft i - 1

    token       4           17          8           9           8
    position    40          41          42          42          41
    mask        00001       00011       00111       01011       10001      itself and its ancestors
    KV slot of  40          41          42          43          44         until `move_path`

`write_tree` runs after the refresh. `follow_tree` runs after each sample, and finds the draft after the token whose
logits were sampled. `write_outputs` accepts that draft.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.metadata import step_inputs as layout
from graphrt.kernels.metadata.arguments import call_class, pass_operands, pointer_types, pointers
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import next_power_of_two

_NUM_WARPS = 1
_HEADER_KIND = tl.constexpr(layout.HEADER_KIND)
_KEEPS_STATE = tl.constexpr(layout.DELTA | layout.KEEP)

_Tree = namedtuple("_Tree", "inputs req_indices drafts_left logits_indices draft_parents positions tree_masks")
_Path = namedtuple("_Path", "tokens drafts_left logits_indices input_ids tree_masks path_rows")
"""Buffers that the kernels read and write, in the order of their arguments."""


@triton.jit(do_not_specialize=["num_drafts"])
def _write_tree_kernel(ptrs, num_drafts, QUERY_LEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first = row * QUERY_LEN
    req_index = tl.load(ptrs.req_indices + row)
    valid = req_index >= 0
    left = tl.load(ptrs.drafts_left + row)
    root = tl.load(ptrs.logits_indices + row, mask=valid, other=first).to(tl.int32) - first
    start = tl.load(ptrs.positions + first)
    # A prompt, and the drafts of a batch, are a chain.
    is_tree = valid & (root == 0) & ((tl.load(ptrs.inputs + _HEADER_KIND) & _KEEPS_STATE) != 0)
    count = tl.where(valid, root + 1 + tl.maximum(left, 0), 0)
    drafts_ptr = ptrs.draft_parents + req_index.to(tl.int64) * num_drafts
    drafted = (lanes > 0) & (lanes < tl.where(is_tree, count, 0))
    parents = tl.load(drafts_ptr + lanes - 1, mask=drafted, other=0)
    parents = tl.where(is_tree, parents, lanes - 1)
    masks = tl.full([BLOCK], 1, tl.int64) << lanes
    depths = lanes * 0
    for i in range(1, count):
        parent = tl.sum(tl.where(lanes == i, parents, 0), 0)
        above = tl.sum(tl.where(lanes == parent, masks, 0), 0)
        depth = tl.sum(tl.where(lanes == parent, depths, 0), 0)
        masks = tl.where(lanes == i, masks | above, masks)
        depths = tl.where(lanes == i, depth + 1, depths)
    tl.store(ptrs.positions + first + lanes, start + depths, mask=lanes < count)
    tl.store(ptrs.tree_masks + first + lanes, masks, mask=lanes < QUERY_LEN)


@triton.jit(do_not_specialize=["padded_reqs", "position"])
def _follow_tree_kernel(ptrs, padded_reqs, position, QUERY_LEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first = row * QUERY_LEN
    follows = tl.load(ptrs.drafts_left + row) > 0
    token = tl.load(ptrs.tokens + row).to(tl.int64)
    later = follows & (position > 0)
    node_row = tl.load(ptrs.path_rows + (position - 1) * padded_reqs + row, mask=later, other=row)
    node = tl.load(ptrs.logits_indices + node_row, mask=follows, other=0)
    root = tl.load(ptrs.logits_indices + row, mask=follows, other=0).to(tl.int32) - first
    above = tl.load(ptrs.tree_masks + node, mask=follows, other=0)
    in_step = lanes < tl.where(follows, QUERY_LEN, 0)
    masks = tl.load(ptrs.tree_masks + first + lanes, mask=in_step, other=0)
    ids = tl.load(ptrs.input_ids + first + lanes, mask=in_step, other=-1)
    own = tl.full([BLOCK], 1, tl.int64) << lanes
    is_child = in_step & (masks == (above | own)) & (masks != above) & (ids == token)
    child = tl.min(tl.where(is_child, lanes, BLOCK), 0)
    next_row = tl.where(child < BLOCK, (child - root) * padded_reqs + row, 0)
    tl.store(ptrs.path_rows + position * padded_reqs + row, next_row.to(tl.int64))


_launch_write, _launch_follow = KernelLauncher(_write_tree_kernel), KernelLauncher(_follow_tree_kernel)


def _tile(query_len: int) -> dict[str, Any]:
    return {"QUERY_LEN": query_len, "BLOCK": next_power_of_two(query_len)}


def _write(b: Any) -> None:
    reqs = b.req_indices.shape[0]
    tile = _tile(b.positions.shape[0] // reqs)
    _launch_write((reqs,), pointers(_Tree, b), b.draft_parents.shape[1], **tile, num_warps=_NUM_WARPS)


def _follow(b: Any) -> None:
    reqs = b.drafts_left.shape[0]
    tile = _tile(b.input_ids.shape[0] // reqs)
    _launch_follow((reqs,), pointers(_Path, b), reqs, b.position, **tile, num_warps=_NUM_WARPS)


def _write_reference(b: Any) -> None:
    reqs = b.req_indices.shape[0]
    masks, positions = b.tree_masks.view(reqs, -1), b.positions.view(reqs, -1)
    query_len = masks.shape[1]
    masks.copy_(1 << torch.arange(query_len, device=masks.device))
    for row, req_index in enumerate(b.req_indices.tolist()):
        if req_index < 0:
            continue
        root = int(b.logits_indices[row]) - row * query_len
        is_tree = root == 0 and int(b.inputs[layout.HEADER_KIND]) & (layout.DELTA | layout.KEEP)
        for i in range(1, root + 1 + max(int(b.drafts_left[row]), 0)):
            parent = int(b.draft_parents[req_index, i - 1]) if is_tree else i - 1
            masks[row, i] |= masks[row, parent]
            positions[row, i] = positions[row, parent] + 1


def _follow_reference(b: Any) -> None:
    reqs = b.drafts_left.shape[0]
    masks, ids = b.tree_masks.view(reqs, -1), b.input_ids.view(reqs, -1)
    rows = b.path_rows.view(-1, reqs)
    rows[b.position] = 0
    own = 1 << torch.arange(masks.shape[1], device=masks.device)
    for row in (b.drafts_left > 0).nonzero()[:, 0].tolist():
        root = int(b.logits_indices[row])
        above = b.tree_masks[b.logits_indices[rows[b.position - 1, row] if b.position else row]]
        is_child = (masks[row] == (above | own)) & (masks[row] != above) & (ids[row] == b.tokens[row])
        if is_child.any():
            child = row * masks.shape[1] + int(is_child.int().argmax())
            rows[b.position, row] = (child - root) * reqs + row


_WriteCall = call_class("write_tree", ("positions",))
_FollowCall = call_class("follow_tree", tokens=torch.Tensor, position=int)
_write_op = DeclaredOp("write_tree", _WriteCall, triton_impl=_write, reference=_write_reference)
_follow_op = DeclaredOp("follow_tree", _FollowCall, triton_impl=_follow, reference=_follow_reference)
_write_operands = functools.partial(pass_operands, "write_tree")
_follow_operands = functools.partial(pass_operands, "follow_tree")


def write_tree(buffers: StaticBuffers) -> None:
    """Write the masks of the tokens of a step, and correct their positions.

    buffers    static buffers, cut with `tree_depth` to a graph with several tokens per request, and refreshed

    Capture-safe. Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match.
    """
    _write_op(_WriteCall(*buffers.once(_write_operands)))


def follow_tree(buffers: StaticBuffers, tokens: torch.Tensor, position: int) -> None:
    """Find the draft that equals the token sampled at a position of the path, and follows the token before it.

    buffers    static buffers after `write_tree`
    tokens     [padded_reqs]  int32 or int64  device; the sampled tokens
    position   number of tokens that a request has sampled before in this step; below the depth of trees

    Capture-safe. Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match.
    """
    shape, device = buffers.req_indices.shape, buffers.req_indices.device
    check_tensor("tokens", tokens, shape=shape, dtype=(torch.int32, torch.int64), device=device)
    check_unit_stride("tokens", tokens)
    _follow_op(_FollowCall(*buffers.once(_follow_operands), tokens, position))


def compile_variants() -> list[CompileSpec]:
    """Return the variants for few drafts and for the maximum."""
    specs = []
    for query_len in (4, 64):
        types = {"ptrs": pointer_types(_Tree)}, {"ptrs": pointer_types(_Path, tokens="*i32")}
        for kernel, signature in zip((_write_tree_kernel, _follow_tree_kernel), types, strict=True):
            name = f"{kernel.fn.__name__.strip('_')}_{query_len}"
            specs.append(CompileSpec(name, kernel, signature, _tile(query_len), _NUM_WARPS, 3))
    return specs
