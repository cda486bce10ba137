"""Exchange of query heads and partial outputs between GPUs of one host, in one kernel each without NCCL.

GPUs write into each other's memory over NVLink: see native/exchange_heads.cu and `SymmetricBuffer`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import distributed as dist

from graphrt.kernels.native.nvrtc import SMALL_CARVEOUT, NativeVariant, launch
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.all_reduce import UNIT_BYTES, SymmetricBuffer, symmetric_buffers
from graphrt.kernels.sizes import ceil_div

_WARPS = 4  # not measured
_GATHER, _MERGE = range(2)


@dataclass(frozen=True, slots=True)
class ExchangeCall:
    """Arguments of one call, for the operator and the kernel. All ranks make the same calls in the same order.

    x          [tokens, heads, size]          bfloat16 or float16, contiguous; the queries of this rank. With `lses`,
               [tokens, ranks * heads, size]  the partial outputs of all heads
    lses       [tokens, ranks * heads]        float32, contiguous; None: gather queries
    sinks      [heads]                        float32
    out        [tokens, ranks * heads, size]  the gathered queries; with `lses` [tokens, heads, size], merged outputs
    lse        [tokens, heads]                float32
    buffer     [2, ranks, capacity, 4]        int32  written by all ranks
    state      [4]                            int32
    addresses  of the buffers of all ranks
    """

    x: torch.Tensor
    lses: torch.Tensor | None
    sinks: torch.Tensor | None
    out: Written
    lse: Written | None
    buffer: Written
    state: Written
    addresses: list[int]
    rank: int
    num_kv_heads: int


def exchange_native(call: ExchangeCall) -> None:
    """Launch the kernel."""
    ranks, own = len(call.addresses), call.x if call.lses is None else call.out
    units = own.nbytes // UNIT_BYTES
    params = _params_type(ranks)(
        (ctypes.c_void_p * ranks)(*call.addresses),
        call.state.data_ptr(),
        call.buffer.shape[2],
        units,
        call.rank,
        _GATHER if call.lses is None else _MERGE,
        *(0 if t is None else t.data_ptr() for t in (call.x, call.lses, call.sinks, call.out, call.lse)),
        own.shape[2] * own.element_size() // UNIT_BYTES,
        own.shape[1] // call.num_kv_heads,
        call.num_kv_heads,
        0 if call.lse is None else call.lse.stride(0),
    )
    variant = _variant(ranks, own.dtype is torch.bfloat16)
    launch(variant, (ceil_div(units, variant.num_threads), 1), params, own.device, pdl=True)


@functools.cache
def _params_type(ranks: int) -> type[ctypes.Structure]:
    """Return `Params` of native/exchange_heads.cu."""
    fields = (
        ("buffers", ctypes.c_void_p * ranks),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("capacity", "units", "rank", "mode")),
        *((name, ctypes.c_void_p) for name in ("x", "lses", "sinks", "out", "lse")),
        *((name, ctypes.c_int) for name in ("head_units", "heads", "num_kv_heads", "stride_lse")),
    )
    return type("_Params", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def _variant(ranks: int, bfloat16: bool) -> NativeVariant:
    macros = {
        "KV_FP8": 0,
        "PARAMS_BYTES": ctypes.sizeof(_params_type(ranks)),
        "Q_BF16": int(bfloat16),
        "RANKS": ranks,
        "WARPS": _WARPS,
    }
    return NativeVariant(
        "exchange_heads.cu", "exchange_heads", tuple(macros.items()), 32 * _WARPS, 0, carveout=SMALL_CARVEOUT
    )


def native_variants() -> dict[str, NativeVariant]:
    """Return the variants that a test compiles without a GPU."""
    return {f"{ranks}_ranks": _variant(ranks, True) for ranks in (2, 4, 8)}


_op = DeclaredOp(
    "exchange_heads",
    ExchangeCall,
    triton_impl=exchange_native,
    reference=exchange_native,  # tests emulate the launch on CPU tensors; other ranks on a CPU have no buffer
)


def symmetric_buffer_for_heads(group: dist.ProcessGroup, x: torch.Tensor, units: int) -> SymmetricBuffer | None:
    """Return the buffer of a group if it has room for tensors like x [tokens, heads, size] of one rank.

    units   units that are sent for each unit of x: 1 for queries, 2 for partial outputs with their log-sum-exps
    """
    buffer = symmetric_buffers.get(group.group_name)
    fits = (
        buffer is not None
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[2] * x.element_size() % UNIT_BYTES == 0
        and 0 < units * x.nbytes <= buffer.memory[0, 0].nbytes
    )
    return buffer if fits else None


def gather_heads(buffer: SymmetricBuffer, q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return the queries of all ranks; see `gather_queries`."""
    tokens, heads, size = q.shape
    out = q.new_empty(tokens, len(buffer.addresses) * heads, size)
    memory = buffer.memory, buffer.state, buffer.addresses, buffer.rank, num_kv_heads
    _op(ExchangeCall(q.contiguous(), None, None, out, None, *memory))
    return out


def merge_heads(
    buffer: SymmetricBuffer,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    num_kv_heads: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Merge the partial outputs of all ranks; see `reduce_scatter_attention`."""
    memory = buffer.memory, buffer.state, buffer.addresses, buffer.rank, num_kv_heads
    _op(ExchangeCall(partial, partial_lse, sinks, out, lse, *memory))
