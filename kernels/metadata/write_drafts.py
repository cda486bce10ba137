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
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.metadata.arguments import call_class, pass_operands, pointer_types, pointers
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import ceil_div

_BLOCK = 128
_Pointers = namedtuple("_Pointers", "req_indices drafts proposed")


@triton.jit(do_not_specialize=["values", "num_drafts", "vocab_size"])
def _write_drafts_kernel(ptrs, values, num_drafts, vocab_size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < values
    row = at // num_drafts
    req_index = tl.load(ptrs.req_indices + row, mask=mask, other=-1)
    draft = tl.load(ptrs.proposed + at, mask=mask, other=-1)
    draft = tl.where((draft >= 0) & (draft < vocab_size), draft, -1)
    to = req_index.to(tl.int64) * num_drafts + at % num_drafts
    tl.store(ptrs.drafts + to, draft, mask=mask & (req_index >= 0))


_launch_kernel = KernelLauncher(_write_drafts_kernel)


def _launch(c: Any) -> None:
    values = c.proposed.numel()
    _launch_kernel(
        (ceil_div(values, _BLOCK),), pointers(_Pointers, c), values, c.drafts.shape[1], c.vocab_size, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip


def _reference(c: Any) -> None:
    known = c.req_indices >= 0
    proposed = c.proposed[known]
    valid = (proposed >= 0) & (proposed < c.vocab_size)
    c.drafts[c.req_indices[known].long()] = torch.where(valid, proposed, -1)


_Call = call_class("write_drafts", proposed=torch.Tensor, vocab_size=int)
_operands = functools.partial(pass_operands, "write_drafts")
_op = DeclaredOp("write_drafts", _Call, triton_impl=_launch, reference=_reference)


def write_drafts(buffers: StaticBuffers, proposed: torch.Tensor, *, vocab_size: int) -> None:
    """Store the drafts that requests verify in their next step.

    buffers     static buffers, cut to the captured size and refreshed
    proposed    [padded_reqs, drafts]  int32  device, contiguous; a request's drafts end before its first -1, and before
                its first token outside the vocabulary

    Capture-safe. Raises: ShapeError: if `proposed` has the wrong shape, dtype or device.
    """
    shape = buffers.req_indices.shape[0], buffers.drafts.shape[1]
    check_tensor("proposed", proposed, shape=shape, dtype=torch.int32, device=buffers.req_indices.device)
    check_contiguous("proposed", proposed)
    _op(_Call(*buffers.once(_operands), proposed, vocab_size))


def compile_variants() -> list[CompileSpec]:
    """Return the only variant."""
    types = {"ptrs": pointer_types(_Pointers, proposed="*i32")}
    return [CompileSpec("write_drafts", _write_drafts_kernel, types, {"BLOCK": _BLOCK}, 4, 3)]
