"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of a sequence's last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_contiguous, check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.sizes import next_power_of_two

LONGEST = 4
"""Maximum number of tokens to compare. The longest match is preferred, then the latest."""

_LONGEST = tl.constexpr(LONGEST)
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["max_len", "max_reqs", "num_drafts"])
def _ngram_drafts_kernel(
    history_ptr, lens_ptr, req_indices_ptr, drafts_ptr, max_len, max_reqs, num_drafts, BLOCK: tl.constexpr,
    DRAFT_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    req_index = tl.load(req_indices_ptr + row)
    known = (req_index >= 0) & (req_index < max_reqs)
    end = tl.where(known, tl.minimum(tl.load(lens_ptr + row), max_len), 0)
    tokens_ptr = history_ptr + tl.where(known, req_index, 0).to(tl.int64) * max_len
    lanes = tl.arange(0, BLOCK)
    best = tl.zeros([BLOCK], tl.int64)  # length of the match, then its position
    for base in range(1, end, BLOCK):
        position = base + lanes  # position of the token after the match
        inside = position < end
        length = tl.zeros([BLOCK], tl.int64)
        equal = inside
        for i in tl.static_range(1, _LONGEST + 1):
            token = tl.load(tokens_ptr + position - i, mask=inside & (position >= i), other=-1)
            last = tl.load(tokens_ptr + end - i, mask=end > i, other=-2)
            equal = equal & (token == last)
            length += equal.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, (length << 32) | position.to(tl.int64), 0))
    found = tl.max(best, 0)
    start = (found & 0xFFFFFFFF).to(tl.int32)
    ahead = tl.arange(0, DRAFT_BLOCK)
    offered = (start + ahead < tl.where(found > 0, end, 0)) & (ahead < num_drafts)
    draft = tl.load(tokens_ptr + start + ahead, mask=offered, other=-1)
    tl.store(drafts_ptr + row * num_drafts + ahead, draft, mask=ahead < num_drafts)


@dataclass(frozen=True, slots=True)
class _Call:
    history: torch.Tensor
    lens: torch.Tensor
    req_indices: torch.Tensor
    drafts: Written


_launch_kernel = KernelLauncher(_ngram_drafts_kernel)


def _launch(c: _Call) -> None:
    rows, num_drafts = c.drafts.shape
    _launch_kernel(
        (rows,), c.history, c.lens, c.req_indices, c.drafts, c.history.shape[1], c.history.shape[0], num_drafts,
        BLOCK=_BLOCK, DRAFT_BLOCK=next_power_of_two(num_drafts), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(c: _Call) -> None:
    c.drafts.fill_(-1)
    for row, (req_index, length) in enumerate(zip(c.req_indices.tolist(), c.lens.tolist(), strict=True)):
        if not 0 <= req_index < len(c.history):
            continue
        tokens = c.history[req_index, :length].tolist()
        found = (0, 0)
        for position in range(1, len(tokens)):
            match = 0
            while match < min(LONGEST, position) and tokens[position - 1 - match] == tokens[-1 - match]:
                match += 1
            found = max(found, (match, position))
        if found[0]:
            drafts = tokens[found[1] :][: c.drafts.shape[1]]
            c.drafts[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32, device=c.drafts.device)


_op = DeclaredOp("ngram_drafts", _Call, triton_impl=_launch, reference=_reference)


def find_ngrams(history: torch.Tensor, lens: torch.Tensor, req_indices: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """Return the tokens that followed the longest match of each sequence's last tokens in the sequence itself.

    history      [max_reqs, max_len]  int32  device, contiguous; tokens by request index
    lens         [rows]               int32  tokens of each sequence
    req_indices  [rows]               int32  a row out of range gets no drafts
    returns      [rows, num_drafts]   int32  -1 after the last draft

    Example: after 5 6 7 8 5 6, the drafts are 7 8 5 6.
    Capture-safe: the kernel reads all lengths on the device. Raises: ShapeError.
    """
    check_tensor("history", history, shape=(None, None), dtype=torch.int32)
    check_contiguous("history", history)
    check_tensor("req_indices", req_indices, shape=(None,), dtype=torch.int32, device=history.device)
    rows = req_indices.shape[0]
    check_tensor("lens", lens, shape=(rows,), dtype=torch.int32, device=history.device)
    drafts = torch.empty((rows, num_drafts), dtype=torch.int32, device=history.device)
    if drafts.numel():
        _op(_Call(history, lens, req_indices, drafts))
    return drafts


def compile_variants() -> list[CompileSpec]:
    """Return the variant for 4 drafts."""
    constexprs = {"BLOCK": _BLOCK, "DRAFT_BLOCK": 4}
    return [CompileSpec("ngram_drafts", _ngram_drafts_kernel, {}, constexprs, _NUM_WARPS, 3)]
