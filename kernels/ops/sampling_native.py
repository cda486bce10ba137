"""The CUDA kernels of sampling (native/sample_split.cu, native/sample_truncated.cu): variants and launches.

    sample_split      processes the tokens that mask, bias and penalties change, except in rows that process them late;
                      runs concurrently with the first pass
    sample_chunks     first pass: reads all other tokens
    sample_rows       second pass: samples rows that keep all tokens or truncate by min-p only
    sample_truncated  third pass: samples rows with top-k or top-p

sample_split and sample_truncated draw the same tokens as the Triton kernels for other devices. They build lists and
histograms in shared memory, which Triton cannot address.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphrt.kernels.native.nvrtc import NativeVariant, launch, nvrtc_fault, runs_native
from graphrt.kernels.ops.sampling_logits import LATE_TOP_K
from graphrt.kernels.ops.sampling_reference import SampleInputs

GROUPS_MULTIPLE = 4
"""The number of groups is padded to a multiple of this, because groups are read four at a time."""

_WARPS = 8
_BLOCKS_PER_SM = {"sample_split": 4, "sample_truncated": 2}  # sample_split leaves room for the first pass
_MAX_GROUPS = 4096
_BINS = 256
_LIST = 2048  # capacity of a row's list of tokens
_CHANGED = 4096  # stored changed tokens per row; rows with more process them again in each pass
_MEETING = 4 * 2 * 8 * _WARPS  # bytes of `Meeting` in sample_block.cuh

_POINTERS = (
    *SampleInputs._fields, "group_best", "group_mass", "changed_best", "plain_words", "num_changed", "highest_changed",
    "changed_tokens", "changed_logits", "out",
)  # fmt: skip
_NUMBERS = ("vocab", "state_rows", "bias_rows", "bias_capacity", "num_masks", "num_groups")


class _Params(ctypes.Structure):
    """`Params` of native/sample_row.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("logits_row", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in _NUMBERS),
    )


@functools.lru_cache(maxsize=64)
def serves(device: torch.device) -> bool:
    """Return whether the CUDA kernels run on a device. Otherwise, and without NVRTC, the Triton kernels run."""
    return runs_native(device) and nvrtc_fault() is None


@functools.lru_cache(maxsize=64)
def _variant(entry: str, dtype: torch.dtype, group: int) -> NativeVariant:
    macros = {
        "BLOCKS_PER_SM": _BLOCKS_PER_SM[entry],
        "CHANGED": _CHANGED,
        "GROUP": group,
        "LATE_TOP_K": LATE_TOP_K.value,
        "LOGIT_BYTES": dtype.itemsize,
        "Q_BF16": int(dtype == torch.bfloat16),
        "WARPS": _WARPS,
    }
    if entry == "sample_truncated":
        macros |= {"LIST": _LIST}
        words = _LIST * group // 32
        shared = _MEETING + 4 * (2 * _BINS + 2 * _MAX_GROUPS + 2 * words + 3 * _LIST) + 2 * _MAX_GROUPS
    else:
        shared = _MEETING + 4 * (_MAX_GROUPS + _CHANGED)
    return NativeVariant(f"{entry}.cu", entry, tuple(macros.items()), 32 * _WARPS, shared)


class SplitRows(NamedTuple):
    """Outputs of `sample_split`, which the second and third passes read.

    best    [rows, groups]                  float32  the highest logit of each group's changed tokens
    plain   [rows, groups * group // 32]    int32    bits of the unchanged tokens
    counts  [rows]                          int32    number of changed tokens; -1: more than can be stored
    highest [rows]                          float32  the highest logit of all changed tokens
    tokens, logits  [rows, most]            int32, float32  the changed tokens and their processed logits
    """

    best: torch.Tensor
    plain: torch.Tensor
    counts: torch.Tensor
    highest: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, groups: int, group: int, device: torch.device) -> SplitRows:
        """Allocate uninitialized tensors. The entries of rows without changed tokens stay uninitialized."""

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=device)

        ints, floats = torch.int32, torch.float32
        return cls(
            empty(floats, groups), empty(ints, groups * group // 32), empty(ints), empty(floats),
            empty(ints, _CHANGED), empty(floats, _CHANGED),
        )  # fmt: skip


def launch_native(
    entry: str,
    inputs: SampleInputs,
    sizes: Sequence[int],
    group_best: torch.Tensor,
    group_mass: torch.Tensor | None,
    split: SplitRows | None,
    out: torch.Tensor,
    group: int,
) -> None:
    """Launch one of the CUDA kernels for all rows.

    entry   "sample_split", an ordinary launch, or "sample_truncated", which may start during the second pass
    inputs  tensor inputs of the first pass
    sizes   sizes of the first pass: vocabulary, stride of the logits, rows and capacities of tables, groups
    group_best, group_mass  [rows, groups]  float32  outputs of the first pass
    split   None if no row may have mask, bias or penalties
    out     [rows]  int32  the sampled tokens
    """
    logits = inputs.logits
    parts = (None,) * len(SplitRows._fields) if split is None else split
    addresses = (0 if t is None else t.data_ptr() for t in (*inputs, group_best, group_mass, *parts, out))
    vocab, stride, *others = sizes
    params = _Params(*addresses, stride, vocab, *others)
    variant = _variant(entry, logits.dtype, group)
    launch(variant, (logits.shape[0], 1), params, logits.device, pdl=entry == "sample_truncated")


def native_variants() -> dict[str, NativeVariant]:
    """Return the variants that a test compiles without a GPU: each dtype, and the largest group size."""
    cases = ((torch.bfloat16, 32), (torch.float16, 32), (torch.float32, 32), (torch.bfloat16, 64), (torch.float32, 256))
    return {
        f"{entry}_{str(dtype).removeprefix('torch.')}_{group}": _variant(entry, dtype, group)
        for entry in ("sample_split", "sample_truncated")
        for dtype, group in cases
    }
