"""Sums over the ranks of one host, with the residual addition and RMSNorm after them, in one kernel without NCCL.

GPUs write into each other's memory over NVLink (native/all_reduce.cu). Each rank has a `SymmetricBuffer`, which torch
allocates in memory that all ranks can access. Calls with a buffer return the same bits as sums in `collectives`, on all
ranks. Only an RMSNorm may differ, because it adds in a different order.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import distributed as dist

from graphrt.kernels.native.nvrtc import SMALL_CARVEOUT, NativeVariant, launch, nvrtc_fault, runs_native
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.sizes import ceil_div

UNIT_BYTES = 16
"""Bytes that a thread exchanges at a time."""

MAX_RANKS, MAX_WIDTH = 8, 8192
"""Largest number of ranks, and of values per token. A block has one thread per 8 values of a token."""

MAX_BYTES = 2 << 20
"""Maximum number of bytes that a rank sends in a launch: 256 tokens of 4096 values of 16 bits. Sums of more tokens take
several launches."""

# The layout of `State` in native/symmetric_buffer.cuh.
_STATE_WORDS, _FAULT, _LIMIT_MS, _NAMED_BY_HOST = 6, 2, 3, slice(4, 6)
_SUM, _NORM, _GATHER = range(3)


@dataclass(frozen=True, slots=True)
class AllReduceCall:
    """Arguments of one call, for the operator and the kernel. All ranks make the same calls in the same order.

    x          [tokens, width]  bfloat16 or float16, contiguous; or [records, 2]  int32
    residual   [tokens, width]  the sum is added to it; None: no residual and no norm
    bias       [width]          added to the sum
    gain       [width]          of the norm
    out        [tokens, width]  the norm, or the sum; of records: [ranks, records, 2]  int32
    buffer     [2, ranks, capacity, 4]  int32  written by all ranks
    state      [6]              int32
    addresses  of the buffers of all ranks
    """

    x: torch.Tensor
    residual: Written | None
    bias: torch.Tensor | None
    gain: torch.Tensor | None
    out: Written
    buffer: Written
    state: Written
    addresses: list[int]
    rank: int
    eps: float


def all_reduce_native(call: AllReduceCall) -> None:
    """Launch the kernel."""
    ranks, x = len(call.addresses), call.x
    mode = _GATHER if x.dtype is torch.int32 else _SUM if call.residual is None else _NORM
    units, block_units = (len(x), 0) if mode == _GATHER else (x.nbytes // UNIT_BYTES, x.shape[1] * 2 // UNIT_BYTES)
    variant = _variant(ranks, 1 if mode == _GATHER else ceil_div(block_units, 32), x.dtype is not torch.float16)
    block_units = block_units or variant.num_threads
    params = _params_type(ranks)(
        (ctypes.c_void_p * ranks)(*call.addresses),
        call.state.data_ptr(),
        call.buffer.shape[2],
        units,
        call.rank,
        mode,
        *(0 if t is None else t.data_ptr() for t in (x, call.bias, call.residual, call.gain, call.out)),
        block_units,
        1.0 / x.shape[1],
        call.eps,
    )
    launch(variant, (ceil_div(units, block_units), 1), params, x.device, pdl=True)


@functools.cache
def _params_type(ranks: int) -> type[ctypes.Structure]:
    """Return `Params` of native/all_reduce.cu."""
    fields = (
        ("buffers", ctypes.c_void_p * ranks),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("capacity", "units", "rank", "mode")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "residual", "gain", "out")),
        ("block_units", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("inverse_width", "eps")),
    )
    return type("_Params", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def _variant(ranks: int, warps: int, bfloat16: bool) -> NativeVariant:
    macros = {
        "KV_FP8": 0,
        "PARAMS_BYTES": ctypes.sizeof(_params_type(ranks)),
        "Q_BF16": int(bfloat16),
        "RANKS": ranks,
        "WARPS": warps,
    }
    return NativeVariant(
        "all_reduce.cu", "all_reduce", tuple(macros.items()), 32 * warps, 4 * warps, carveout=SMALL_CARVEOUT
    )


def native_variants() -> dict[str, NativeVariant]:
    """Return the variants that a test compiles without a GPU."""
    sizes = ((2, 16), (4, 16), (8, 32))
    return {f"{ranks}_ranks_{256 * warps}_wide": _variant(ranks, warps, True) for ranks, warps in sizes}


_op = DeclaredOp(
    "peer_all_reduce",
    AllReduceCall,
    triton_impl=all_reduce_native,
    reference=all_reduce_native,  # tests emulate the launch on CPU tensors; other ranks on a CPU have no buffer
)


def buffer_words(ranks: int, max_bytes: int) -> int:
    """Return the number of int32 in a buffer for calls in which each rank sends at most `max_bytes`."""
    return 2 * ranks * max_bytes // 4 + _STATE_WORDS


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """Memory of one rank into which all ranks of a group write, and the operators that use it.

    All ranks must call the same operators in the same order, each on one stream. Operators are capture-safe, because
    the number of the call is in device memory.

    memory     [2, ranks, capacity, 4]  int32  all words are -1, except those that have arrived for the next call
    state      [6]                      int32  `State` of native/symmetric_buffer.cuh
    missing    [1]                      int32  pinned host memory; 0, or 1 + the rank of `abort`
    addresses  of `memory` of each rank, in this process
    rank       of this process
    """

    memory: torch.Tensor
    state: torch.Tensor
    missing: torch.Tensor
    addresses: list[int]
    rank: int

    @classmethod
    @torch.inference_mode(False)  # the buffer outlives the caller's mode, and other threads write it
    def of_words(cls, words: torch.Tensor, addresses: list[int], rank: int) -> SymmetricBuffer:
        """Return the buffer in memory of `buffer_words` words, and clear it. No rank may use it before all ranks have
        cleared theirs."""
        ranks = len(addresses)
        missing = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=words.is_cuda)
        memory = words[:-_STATE_WORDS].view(2, ranks, -1, UNIT_BYTES // 4)
        buffer = cls(memory, words[-_STATE_WORDS:], missing, addresses, rank)
        buffer.state[_NAMED_BY_HOST].view(torch.int64).fill_(missing.data_ptr())
        buffer.wait_at_most(600)
        buffer.clear()
        return buffer

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, group: dist.ProcessGroup, device: torch.device) -> SymmetricBuffer | None:
        """Allocate the buffers of a group, 4 MiB per rank on each GPU. Return None on all ranks if there are more than
        MAX_RANKS, or if a GPU cannot run the kernel or access the memory of the others.

        A collective call on the host, with `device` as current device; not allowed during a capture. Set
        TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before the process's first call: torch otherwise creates a multicast object,
        which the kernel does not use and some hosts refuse.
        """
        if group.size() > MAX_RANKS or not can_share(group, device):
            return None
        from torch.distributed import _symmetric_memory as symmetric_memory  # slow to import

        count = buffer_words(group.size(), MAX_BYTES)
        words = symmetric_memory.empty(count, dtype=torch.int32, device=device)
        addresses = [int(address) for address in symmetric_memory.rendezvous(words, group).buffer_ptrs]
        buffer = cls.of_words(words, addresses, group.rank())
        buffer.reset(group)
        return buffer

    def clear(self) -> None:
        """Forget all calls, missing ranks, and words that have arrived."""
        self.missing.zero_()
        self.memory.fill_(-1)
        self.state[:_LIMIT_MS].zero_()

    def wait_at_most(self, seconds: float) -> None:
        """Set how long calls wait for other ranks, including captured calls. The default is 600 seconds, because some
        ranks may still compile kernels."""
        self.state[_LIMIT_MS] = round(1000 * seconds)

    def abort(self, rank: int) -> None:
        """Stop running and later calls from waiting, as if `rank` were missing. Does not use the driver. Kernels notice
        it within milliseconds."""
        self.missing[0] = 1 + rank

    def reset(self, group: dist.ProcessGroup) -> None:
        """Clear the buffers of all ranks, for example after aborted launches. A collective call on the host."""
        torch.cuda.synchronize(self.memory.device)
        dist.barrier(group)  # no rank sends any more
        self.clear()
        torch.cuda.synchronize(self.memory.device)
        dist.barrier(group)

    def missing_rank(self) -> int | None:
        """Return the rank that a call did not receive from in time, or the rank of `abort`, or None. Synchronizes.

        Once a rank is missing, results are NaN and calls no longer wait, until `reset`.
        """
        fault = int(self.state[_FAULT]) or int(self.missing)
        return fault - 1 if fault else None

    def fits(self, *tensors: torch.Tensor) -> bool:
        """Return whether the operators accept tensors [tokens, width]."""
        return all(
            tensor.dtype in (torch.bfloat16, torch.float16)
            and len(tensor) > 0
            and 0 < tensor[0].nbytes <= self.memory[0, 0].nbytes
            and tensor.shape[1] <= MAX_WIDTH
            and 2 * tensor.shape[1] % UNIT_BYTES == 0
            and tensor.is_contiguous()
            and tensor.data_ptr() % UNIT_BYTES == 0
            for tensor in tensors
        )

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the sum of x over ranks, and `bias`, to `residual` in place. Return the RMSNorm of the residual.

        x         [tokens, width]  bfloat16 or float16  device; see `fits`
        residual  [tokens, width]  x's dtype  device; equal on all ranks
        gain      [width]          x's dtype  device; contiguous
        bias      [width]          x's dtype  device; contiguous
        returns   [tokens, width]  x's dtype, contiguous
        """
        out = torch.empty_like(x)
        for part in self._parts(x):
            self._run(x[part], out[part], residual[part], bias, gain, eps)
        return out

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x [tokens, width] over ranks; see `fits`."""
        out = torch.empty_like(x)
        for part in self._parts(x):
            self._run(x[part], out[part])
        return out

    def gather(self, records: torch.Tensor) -> torch.Tensor:
        """Return the records [ranks, count, 2] of all ranks.

        records  [count, 2]  int32  device; contiguous, at most the buffer's capacity
        """
        out = records.new_empty(len(self.addresses), *records.shape)
        self._run(records, out)
        return out

    def _parts(self, x: torch.Tensor) -> list[slice]:
        """Return the tokens of each launch."""
        tokens = self.memory[0, 0].nbytes // x[0].nbytes
        return [slice(first, first + tokens) for first in range(0, len(x), tokens)]

    def _run(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        _op(AllReduceCall(x, residual, bias, gain, out, self.memory, self.state, self.addresses, self.rank, eps))


def can_share(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether each rank has a GPU of its own that runs the kernel and can access the memory of all others. All
    ranks return the same. A rank must see the GPUs of all ranks. A collective call on the host."""

    def gathered(value: object) -> list[object]:
        every: list[object] = [None] * group.size()
        dist.all_gather_object(every, value, group=group)
        return every

    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    own = torch.cuda.current_device() if device.index is None else device.index
    used = gathered(uuids[own])
    able = (
        len(set(used)) == len(used)
        and runs_native(device)
        and nvrtc_fault() is None
        and all(
            uuid == uuids[own] or (uuid in uuids and torch.cuda.can_device_access_peer(own, uuids.index(str(uuid))))
            for uuid in used
        )
    )
    return all(gathered(able))


symmetric_buffers: dict[str, SymmetricBuffer] = {}
"""The buffers of groups, by the name of the group. Ranks of a group without a buffer use the group's collectives."""


def symmetric_buffer_for(group: dist.ProcessGroup, *tensors: torch.Tensor) -> SymmetricBuffer | None:
    """Return the buffer of a group if it accepts the tensors."""
    buffer = symmetric_buffers.get(group.group_name)
    return buffer if buffer is not None and buffer.fits(*tensors) else None
