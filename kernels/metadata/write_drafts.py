"""Stores the drafts of a proposer for the next step, after `write_outputs`."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_contiguous, check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.metadata.arguments import call_class, pass_operands, pointer_types, pointers
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import ceil_div

_BLOCK = 128
_Pointers = namedtuple("_Pointers", "req_indices drafts draft_parents proposed parents")


@triton.jit(do_not_specialize=["values", "num_drafts", "vocab_size"])
def _write_drafts_kernel(ptrs, values, num_drafts, vocab_size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < values
    row = at // num_drafts
    req_index = tl.load(ptrs.req_indices + row, mask=mask, other=-1)
    draft = tl.load(ptrs.proposed + at, mask=mask, other=-1)
    draft = tl.where((draft >= 0) & (draft < vocab_size), draft, -1)
    to = req_index.to(tl.int64) * num_drafts + at % num_drafts
    if ptrs.draft_parents is not None:
        parent = at % num_drafts
        if ptrs.parents is not None:
            parent = tl.load(ptrs.parents + at, mask=mask, other=-1)
            draft = tl.where((parent >= 0) & (parent <= at % num_drafts), draft, -1)
        tl.store(ptrs.draft_parents + to, parent, mask=mask & (req_index >= 0))
    tl.store(ptrs.drafts + to, draft, mask=mask & (req_index >= 0))


_launch_kernel = KernelLauncher(_write_drafts_kernel)


def _launch(c: Any) -> None:
    values, ptrs = c.proposed.numel(), pointers(_Pointers, c)
    if not c.draft_parents.shape[1]:
        ptrs = ptrs._replace(draft_parents=None)
    _launch_kernel(
        (ceil_div(values, _BLOCK),), ptrs, values, c.drafts.shape[1], c.vocab_size, BLOCK=_BLOCK, num_warps=4
    )


def _reference(c: Any) -> None:
    known = c.req_indices >= 0
    proposed = c.proposed[known]
    valid = (proposed >= 0) & (proposed < c.vocab_size)
    if c.draft_parents.shape[1]:
        chain = torch.arange(proposed.shape[1], dtype=torch.int32, device=proposed.device).expand_as(proposed)
        parents = chain if c.parents is None else c.parents[known]
        valid &= (parents >= 0) & (parents <= chain)
        c.draft_parents[c.req_indices[known].long()] = parents
    c.drafts[c.req_indices[known].long()] = torch.where(valid, proposed, -1)


_Call = call_class("write_drafts", proposed=torch.Tensor, parents=torch.Tensor | None, vocab_size=int)
_operands = functools.partial(pass_operands, "write_drafts")
_op = DeclaredOp("write_drafts", _Call, triton_impl=_launch, reference=_reference)


def write_drafts(
    buffers: StaticBuffers, proposed: torch.Tensor, parents: torch.Tensor | None = None, *, vocab_size: int
) -> None:
    """Store the drafts that requests verify in their next step.

    buffers     static buffers, cut to the captured size and refreshed
    proposed    [padded_reqs, drafts]  int32  device, contiguous; a request's drafts end before its first -1, and before
                its first token outside the vocabulary
    parents     [padded_reqs, drafts]  int32  device, contiguous; 0: the draft follows the last sampled token, i: it
                follows draft i - 1, which must come before it. A request's drafts end before the first wrong parent.
                None: each draft follows the one before it

    Capture-safe. Raises: ShapeError: if a tensor has the wrong shape, dtype or device. UnsupportedError: if `parents`
    are given, but the buffers have no room for trees.
    """
    shape = buffers.req_indices.shape[0], buffers.drafts.shape[1]
    tensors = {"the proposer's drafts": proposed} | ({} if parents is None else {"the proposer's parents": parents})
    for name, tensor in tensors.items():
        check_tensor(name, tensor, shape=shape, dtype=torch.int32, device=buffers.req_indices.device)
        check_contiguous(name, tensor)
    if parents is not None and not buffers.draft_parents.shape[1]:
        raise UnsupportedError("parents: needs a runtime with tree_depth; build it with RuntimeConfig(tree_depth=...)")
    _op(_Call(*buffers.once(_operands), proposed, parents, vocab_size))


def compile_variants() -> list[CompileSpec]:
    """Return the variants for chains and for trees."""
    specs = []
    for name, kind in (("write_drafts", "constexpr"), ("write_drafts_tree", "*i32")):
        types = {"ptrs": pointer_types(_Pointers, draft_parents=kind, proposed="*i32", parents=kind)}
        specs.append(CompileSpec(name, _write_drafts_kernel, types, {"BLOCK": _BLOCK}, 4, 3))
    return specs
