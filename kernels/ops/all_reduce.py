"""Sums over the ranks of one host, with the residual addition and RMSNorm after them, in one kernel without NCCL.

GPUs write into each other's memory over NVLink (native/all_reduce.cu). Each rank has an `Inbox` in memory that torch
shares between processes. Calls with an inbox return the same bits as sums in `collectives`, in all ranks, except that
an RMSNorm may differ by its order of additions.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import distributed as dist

from graphrt.kernels.native.nvrtc import SMALL_CARVEOUT, NativeVariant, launch
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.sizes import ceil_div

UNIT_BYTES = 16
"""Bytes that a thread exchanges at a time."""

MAX_RANKS, MAX_WIDTH = 8, 8192
"""Largest number of ranks, and of values per token, because a block has one thread for 8 values."""

TIMEOUT_SECONDS = 8
"""How long a call waits for the words of other ranks."""

_STATE_WORDS = 4  # `State` of native/all_reduce.cu: calls, finished blocks, fault
_FAULT = 2
_SUM, _NORM, _GATHER = range(3)


@dataclass(frozen=True, slots=True)
class AllReduceCall:
    """Arguments of one call, for the operator and the kernel. All ranks make the same calls in the same order.

    x          [tokens, width]  bfloat16 or float16, contiguous; or [records, 2]  int32
    residual   [tokens, width]  the sum is added to it; None: no residual and no norm
    bias       [width]          added to the sum
    gain       [width]          of the norm
    out        [tokens, width]  the norm, or the sum; of records: [ranks, records, 2]  int32
    inbox      [2, ranks, capacity, 4]  int32  written by all ranks
    state      [4]              int32
    addresses  of the inboxes of all ranks
    """

    x: torch.Tensor
    residual: Written | None
    bias: torch.Tensor | None
    gain: torch.Tensor | None
    out: Written
    inbox: Written
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
    pointers = (call.state, x, call.bias, call.residual, call.gain, call.out)
    params = _params_type(ranks)(
        (ctypes.c_void_p * ranks)(*call.addresses),
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
        call.inbox.shape[2],
        units,
        block_units,
        call.rank,
        mode,
        1.0 / x.shape[1],
        call.eps,
    )
    launch(variant, (ceil_div(units, block_units), 1), params, x.device, pdl=True)


@functools.cache
def _params_type(ranks: int) -> type[ctypes.Structure]:
    """Return `Params` of native/all_reduce.cu."""
    fields = (
        ("inboxes", ctypes.c_void_p * ranks),
        *((name, ctypes.c_void_p) for name in ("state", "x", "bias", "residual", "gain", "out")),
        *((name, ctypes.c_int) for name in ("capacity", "units", "block_units", "rank", "mode")),
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
        "TIMEOUT": TIMEOUT_SECONDS * 10**9,
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
    reference=all_reduce_native,  # tests emulate the launch on CPU tensors; other ranks on a CPU have no inbox
)


@dataclass(frozen=True, slots=True)
class Inbox:
    """Memory of one rank into which all ranks of a group write, and the operators that use it.

    All ranks must call the same operators in the same order, each on one stream. Operators are capture-safe: the launch
    depends on shapes only, and memory holds the number of the call.

    memory     [2, ranks, capacity, 4]  int32  all words are -1, except those that have arrived for the next call
    state      [4]                      int32  `State` of native/all_reduce.cu
    addresses  of `memory` of each rank, in this process
    rank       of this process
    """

    memory: torch.Tensor
    state: torch.Tensor
    addresses: list[int]
    rank: int

    @classmethod
    def of_local(cls, memory: torch.Tensor, addresses: list[int], rank: int) -> Inbox:
        """Return the inbox in `memory`, and clear it. No rank may use it before all ranks have cleared theirs."""
        inbox = cls(memory, torch.empty(_STATE_WORDS, dtype=torch.int32, device=memory.device), addresses, rank)
        inbox.clear()
        return inbox

    @classmethod
    def allocate(cls, group: dist.ProcessGroup, tokens: int, width: int, device: torch.device) -> Inbox:
        """Allocate the inboxes of a group for `tokens` tokens of `width` 16-bit values. A collective call on the host;
        not allowed during a capture. Set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before the process's first call: torch
        otherwise creates a multicast object, which the kernel does not use and some hosts refuse.

        Raises: RuntimeError: from torch, if the GPUs cannot access each other's memory.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory  # slow to import

        ranks, capacity = group.size(), ceil_div(2 * tokens * width, UNIT_BYTES)
        memory = symmetric_memory.empty(2, ranks, capacity, UNIT_BYTES // 4, dtype=torch.int32, device=device)
        addresses = [int(address) for address in symmetric_memory.rendezvous(memory, group).buffer_ptrs]
        inbox = cls.of_local(memory, addresses, group.rank())
        inbox.reset(group)
        return inbox

    def clear(self) -> None:
        """Forget all calls, and words that have arrived."""
        self.memory.fill_(-1)
        self.state.zero_()

    def reset(self, group: dist.ProcessGroup) -> None:
        """Clear the inboxes of all ranks, for example after aborted launches. A collective call on the host."""
        torch.cuda.synchronize(self.memory.device)
        dist.barrier(group)  # no rank still sends
        self.clear()
        torch.cuda.synchronize(self.memory.device)
        dist.barrier(group)

    def missing_rank(self) -> int | None:
        """Return a rank that a call has awaited for TIMEOUT_SECONDS in vain; None: there is none. Synchronizes.

        Once a rank is missing, results are NaN and calls no longer wait, until `reset`.
        """
        fault = int(self.state[_FAULT])
        return fault - 1 if fault else None

    def fits(self, *tensors: torch.Tensor) -> bool:
        """Return whether the operators accept tensors [tokens, width]."""
        return all(
            tensor.dtype in (torch.bfloat16, torch.float16)
            and 0 < tensor.nbytes <= self.memory[0, 0].nbytes
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
        return self._run(x, torch.empty_like(x), residual, bias, gain, eps)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x [tokens, width] over ranks; see `fits`."""
        return self._run(x, torch.empty_like(x))

    def gather(self, records: torch.Tensor) -> torch.Tensor:
        """Return the records [ranks, count, 2] of all ranks.

        records  [count, 2]  int32  device; contiguous, at most the inbox's capacity
        """
        return self._run(records, records.new_empty(len(self.addresses), *records.shape))

    def _run(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        _op(AllReduceCall(x, residual, bias, gain, out, self.memory, self.state, self.addresses, self.rank, eps))
        return out


inboxes: dict[str, Inbox] = {}
"""The inboxes of groups, by the name of the group. Ranks of a group without an inbox use the group's collectives."""


def inbox_for(group: dist.ProcessGroup, *tensors: torch.Tensor) -> Inbox | None:
    """Return the inbox of a group if it accepts the tensors."""
    inbox = inboxes.get(group.group_name)
    return inbox if inbox is not None and inbox.fits(*tensors) else None
