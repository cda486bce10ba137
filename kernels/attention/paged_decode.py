"""Split-KV attention of decode rows over the paged cache, one launch per layer (Flash-Decoding, Dao et al. 2023).

Every row has `query_len` query tokens. They and the query heads that share a KV head are packed into the M dimension
of one tile, so K and V are read once per KV head. The grid is `(KV heads x M tiles, num_splits, padded_reqs)`. Each
row shares its KV tiles out among at most `num_splits` programs on the device, from `seq_lens`; programs beyond that
share, and those of pad rows, exit after one load. A program that has its row to itself writes the output. Otherwise
it leaves a normalised partial result and its log-sum-exp, and the last program to arrive merges them in split order,
which makes the result independent of who was last, and sets the arrival counter back to 0. Nobody waits for anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.attention.arguments import (
    TRITON_DTYPES,
    check_attention_arguments,
    check_triton_head_dim,
    logit_constants,
    next_power_of_two,
)
from graphrt.kernels.attention.reference import reference_attention
from graphrt.kernels.attention.splits import MAX_BLOCK_M, MAX_SPLITS, MIN_BLOCK_M, DecodeWorkspace
from graphrt.kernels.attention.tile import tile_logits, tile_offsets, tile_pages
from graphrt.kernels.checks import check_tensor
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.library import define_op

MAX_QUERY_LEN = 16

_MERGE_ELEMENTS = 8192  # fp32 values of partial results that a merging program holds at a time


@triton.jit
def _merge_partials(
    partial_out_ptr,
    partial_lse_ptr,
    first_partial,
    m,
    active_splits,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    MERGE_M: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    """Sum of the partial results of query rows `m`, weighted by their log-sum-exp, MERGE_SPLITS of them at a time.

    The loads are `.cg`: L1 is not coherent, and a line of it may hold the partials of an earlier layer.
    """
    d = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, SPLITS_POW2)
    lse_mask = (splits < active_splits)[:, None] & (m < PACKED)[None, :]
    lse_ptrs = partial_lse_ptr + first_partial + (splits * PACKED)[:, None] + m[None, :]
    lses = tl.load(lse_ptrs, mask=lse_mask, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(lses, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lses - top[None, :]), 0)
    merged = tl.zeros([MERGE_M, BLOCK_D], tl.float32)
    for start in tl.range(0, active_splits, MERGE_SPLITS):
        some = start + tl.arange(0, MERGE_SPLITS)
        partials = first_partial + (some * PACKED)[:, None] + m[None, :]
        mask = (some < active_splits)[:, None] & (m < PACKED)[None, :]
        some_lses = tl.load(partial_lse_ptr + partials, mask=mask, other=float("-inf"), cache_modifier=".cg")
        outs = tl.load(
            partial_out_ptr + (partials * HEAD_DIM)[:, :, None] + d[None, None, :],
            mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        merged += tl.sum(tl.exp2(some_lses - top[None, :])[:, :, None] * outs, 0)
    return merged / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _paged_decode_kernel(
    q_ptr,  # [padded_reqs * QUERY_LEN, num_kv_heads * GROUP, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,
    block_table_ptr,  # [padded_reqs, max_pages]
    seq_lens_ptr,  # [padded_reqs]
    out_ptr,  # like q
    partial_out_ptr,  # [padded_reqs, num_kv_heads, num_splits, QUERY_LEN * GROUP, HEAD_DIM]
    partial_lse_ptr,  # [padded_reqs, num_kv_heads, num_splits, QUERY_LEN * GROUP]
    counters_ptr,  # [padded_reqs, num_kv_heads * NUM_M_TILES]
    logit_factor,
    logit_cap,
    sliding_window,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_table_row,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    NUM_M_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    MERGE_M: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    PACKED: tl.constexpr = QUERY_LEN * GROUP
    row = tl.program_id(2)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    kv_head = tl.program_id(0) // NUM_M_TILES
    m_start = (tl.program_id(0) % NUM_M_TILES) * BLOCK_M
    num_kv_heads = tl.num_programs(0) // NUM_M_TILES

    # The first visible position of the row's first query token: what lies before needs no tile.
    seq_len = tl.load(seq_lens_ptr + row)
    window_start = 0
    if HAS_WINDOW:
        window_start = tl.maximum(seq_len - QUERY_LEN + 1 - sliding_window, 0)
    first_tile = window_start // BLOCK_N
    num_tiles = tl.maximum(tl.cdiv(seq_len, BLOCK_N) - first_tile, 0)
    active_splits = tl.minimum(num_splits, tl.maximum(num_tiles, 1))  # a pad row has one, which writes its zeros
    if split >= active_splits:
        return

    m = m_start + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = row.to(tl.int64) * QUERY_LEN + m // GROUP
    head = kv_head * GROUP + m % GROUP
    q_mask = (m < PACKED)[:, None] & (d < HEAD_DIM)[None, :]
    out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + d[None, :]
    q = tl.load(q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + d[None, :], mask=q_mask, other=0.0)

    lanes = tl.arange(0, BLOCK_N)
    last_visible = seq_len - QUERY_LEN + m // GROUP
    table_row_ptr = block_table_ptr + row.to(tl.int64) * stride_table_row
    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed over lanes once, after the loop
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    tile_begin = first_tile + split * num_tiles // active_splits
    tile_end = first_tile + (split + 1) * num_tiles // active_splits
    # Page ids are read one tile ahead, so that the loads of K and V do not wait for them and are pipelined deeper.
    pages = tile_pages(table_row_ptr, tile_begin * BLOCK_N, lanes, seq_len, PAGE_SIZE, BLOCK_N)
    for tile in tl.range(tile_begin, tile_end, num_stages=NUM_STAGES):
        start = tile * BLOCK_N
        positions = start + lanes
        kv_mask = (positions < seq_len)[:, None]
        if HAS_WINDOW:
            kv_mask &= (positions >= window_start)[:, None]
        if BLOCK_D != HEAD_DIM:
            kv_mask &= (d < HEAD_DIM)[None, :]
        k_offsets = tile_offsets(pages, start, lanes, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N)
        v_offsets = tile_offsets(pages, start, lanes, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N)
        pages = tile_pages(table_row_ptr, start + BLOCK_N, lanes, seq_len, PAGE_SIZE, BLOCK_N)
        k = tl.load(k_ptr + k_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        logits = tile_logits(q, k, logit_factor, logit_cap, HAS_SOFTCAP)
        visible = positions[None, :] <= last_visible[:, None]
        if HAS_WINDOW:
            visible &= positions[None, :] > last_visible[:, None] - sliding_window
        logits = tl.where(visible, logits, float("-inf"))

        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing visible so far: -inf - -inf is NaN
        rescale = tl.exp2(top - base)
        probabilities = tl.exp2(logits - base[:, None])
        weights = weights * rescale[:, None] + probabilities
        # The load masks V: the unfilled tail of a page may hold NaN, and zero probability times NaN is NaN.
        v = tl.load(v_ptr + v_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        acc = tl.dot(probabilities.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top

    total = tl.sum(weights, 1)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a token that sees nothing gets zeros
    if active_splits == 1:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=q_mask)
        return

    if IS_SPLIT:
        lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))  # -inf where nothing is seen, as top is
        first_partial = (row.to(tl.int64) * num_kv_heads + kv_head) * num_splits * PACKED
        partial = first_partial + split * PACKED + m
        tl.store(partial_lse_ptr + partial, lse, mask=m < PACKED)
        tl.store(partial_out_ptr + (partial * HEAD_DIM)[:, None] + d[None, :], acc, mask=q_mask)
        # The barrier orders the stores of all threads before the one thread that announces them, at gpu scope.
        tl.debug_barrier()
        counter_ptr = counters_ptr + row * tl.num_programs(0) + tl.program_id(0)
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == active_splits - 1:
            merge_m = m_start + tl.arange(0, MERGE_M)
            merged = _merge_partials(
                partial_out_ptr,
                partial_lse_ptr,
                first_partial,
                merge_m,
                active_splits,
                PACKED,
                HEAD_DIM,
                BLOCK_D,
                SPLITS_POW2,
                MERGE_M,
                MERGE_SPLITS,
            )
            merge_token = row.to(tl.int64) * QUERY_LEN + merge_m // GROUP
            merge_head = kv_head * GROUP + merge_m % GROUP
            tl.store(
                out_ptr + (merge_token * stride_out_token + merge_head * stride_out_head)[:, None] + d[None, :],
                merged.to(out_ptr.dtype.element_ty),
                mask=(merge_m < PACKED)[:, None] & (d < HEAD_DIM)[None, :],
            )
            tl.store(counter_ptr, 0)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Compile-time sizes of one kernel variant."""

    block_m: int
    block_n: int
    block_d: int
    num_m_tiles: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, packed: int, head_dim: int, itemsize: int) -> _Tiling:
        """Sizes for `packed` query rows per KV head: 32 to 64 KB of K and V in flight, and no register spills."""
        block_d = next_power_of_two(head_dim)
        if itemsize == 4:  # fp32 products run without tensor cores and hold their operands in registers
            block_m, block_n = MIN_BLOCK_M, 32 if block_d <= 64 else 16
        else:
            block_m = max(MIN_BLOCK_M, min(MAX_BLOCK_M, next_power_of_two(packed)))
            block_n = 64 if block_d <= 128 else 32
        num_warps = 8 if block_m * block_d * itemsize >= 16384 else 4
        return cls(block_m, block_n, block_d, -(-packed // block_m), num_warps, 4 if block_d <= 64 else 3)

    def constexprs(self, packed: int) -> dict[str, int]:
        """The constexpr arguments of the kernel that follow from the tiling."""
        merge_m = min(next_power_of_two(packed), self.block_m)
        return {
            "NUM_M_TILES": self.num_m_tiles,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_D": self.block_d,
            "NUM_STAGES": self.num_stages,
            "SPLITS_POW2": MAX_SPLITS,
            "MERGE_M": merge_m,
            "MERGE_SPLITS": max(1, min(16, _MERGE_ELEMENTS // (merge_m * self.block_d))),
        }


def _launch_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    counters: torch.Tensor,
    query_len: int,
    softmax_scale: float,
    sliding_window: int,
    logits_softcap: float,
    num_splits: int,
) -> None:
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    group = q.shape[1] // num_kv_heads
    tiling = _Tiling.choose(group * query_len, head_dim, q.element_size())
    logit_factor, logit_cap = logit_constants(softmax_scale, logits_softcap)
    _paged_decode_kernel[(num_kv_heads * tiling.num_m_tiles, num_splits, seq_lens.shape[0])](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        partial_out,
        partial_lse,
        counters,
        logit_factor,
        logit_cap,
        sliding_window,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        GROUP=group,
        QUERY_LEN=query_len,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[1],
        HAS_WINDOW=sliding_window > 0,
        HAS_SOFTCAP=logits_softcap > 0.0,
        IS_SPLIT=num_splits > 1,
        **tiling.constexprs(group * query_len),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _paged_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    counters: torch.Tensor,
    query_len: int,
    softmax_scale: float,
    sliding_window: int,
    logits_softcap: float,
    num_splits: int,
) -> None:
    starts = range(0, q.shape[0] + 1, query_len)
    reference_attention(
        q, k_cache, v_cache, block_table, seq_lens, starts, out, softmax_scale, sliding_window, logits_softcap
    )


_paged_decode_op: Any = define_op(
    "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor(a!) out, "
    "Tensor(b!) partial_out, Tensor(c!) partial_lse, Tensor(d!) counters, int query_len, float softmax_scale, "
    "int sliding_window, float logits_softcap, int num_splits) -> ()",
    triton_impl=_launch_paged_decode,
    reference=_paged_decode_reference,
)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    softmax_scale: float,
    num_splits: int,
    query_len: int = 1,
    sliding_window: int = 0,
    logits_softcap: float = 0.0,
) -> None:
    """Causal attention of `query_len` new tokens per row to the row's pages.

    q, out             [padded_reqs * query_len, num_q_heads, head_dim]        fp16, bf16 or fp32; out is written
    k_cache, v_cache   [num_pages, page_size, num_kv_heads, head_dim]          dtype of q; any strides, the last one 1
    block_table        [padded_reqs, max_pages]                                int32
    seq_lens           [padded_reqs]  including the new tokens; 0: zeros       int32
    workspace          scratch memory; its counters are 0 before and after
    num_splits         1 to 64 programs share a row; see `decode_num_splits`
    sliding_window     positions that a token sees, itself included; 0: all
    logits_softcap     cap * tanh(logits / cap); 0.0: off

    Capture-safe: one launch, no sync, no allocation; the grid depends on the padded sizes only, and the split of each
    row is computed on the device. Two calls that share a workspace must be ordered on one stream.

    Raises: ShapeError, UnsupportedError (head_dim), CapacityError (workspace too small).
    """
    check_attention_arguments(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logits_softcap=logits_softcap,
    )
    rows, num_q_heads, num_kv_heads, head_dim = seq_lens.shape[0], q.shape[1], k_cache.shape[2], k_cache.shape[3]
    check_triton_head_dim("paged_decode", head_dim)
    if not 1 <= query_len <= MAX_QUERY_LEN or q.shape[0] != rows * query_len:
        raise ShapeError(
            f"query_len: expected 1 to {MAX_QUERY_LEN} tokens in each of {rows} rows, got {query_len} and {q.shape[0]} "
            "tokens in q; use varlen_attention for other batches"
        )
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ShapeError(f"num_splits: expected 1 to {MAX_SPLITS}, got {num_splits}; use decode_num_splits()")
    group = num_q_heads // num_kv_heads
    split_tokens = q.shape[0] * num_q_heads * num_splits if num_splits > 1 else 0
    arrivals = rows * num_kv_heads * -(-query_len * group // MIN_BLOCK_M)
    needed = {"partial_out": split_tokens * head_dim, "partial_lse": split_tokens, "counters": arrivals}
    for name, count in needed.items():
        tensor: torch.Tensor = getattr(workspace, name)
        dtype = torch.int32 if name == "counters" else torch.float32
        check_tensor(f"workspace.{name}", tensor, shape=(None,), dtype=dtype, device=q.device)
        if tensor.numel() < count:
            raise CapacityError(
                f"workspace.{name}: expected at least {count} elements for {rows} rows x {query_len} tokens in "
                f"{num_splits} splits, got {tensor.numel()}; allocate it for the largest decode size"
            )
    _paged_decode_op(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.counters,
        query_len,
        softmax_scale,
        sliding_window,
        logits_softcap,
        num_splits,
    )


def compile_variants() -> list[CompileSpec]:
    """Kernel variants that a test compiles without a GPU: shapes of common models, and the corners."""
    cases: list[tuple[str, torch.dtype, int, int, int, int, bool, bool]] = [
        # name, dtype, head_dim, group, query_len, page_size, options (window and softcap), split
        ("llama", torch.bfloat16, 128, 4, 1, 16, False, True),
        ("llama_unsplit", torch.bfloat16, 128, 4, 1, 16, False, False),
        ("llama_page64", torch.float16, 128, 4, 1, 64, False, True),
        ("small_heads", torch.bfloat16, 64, 3, 1, 16, False, True),
        ("speculative", torch.bfloat16, 128, 4, 5, 16, False, True),
        ("packed_max", torch.bfloat16, 128, 16, 16, 16, False, True),
        ("gemma", torch.bfloat16, 256, 2, 1, 16, True, True),
        ("gemma_speculative", torch.bfloat16, 256, 8, 8, 16, True, True),
        ("odd_head_dim", torch.float16, 80, 7, 1, 48, True, True),
        ("fp32", torch.float32, 64, 4, 1, 16, True, True),
        ("fp32_128", torch.float32, 128, 4, 1, 16, False, True),
        ("fp32_large", torch.float32, 256, 8, 8, 16, False, True),
    ]
    pointers = {"block_table_ptr": "*i32", "seq_lens_ptr": "*i32", "counters_ptr": "*i32"}
    pointers |= {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32"}
    specs = []
    for name, dtype, head_dim, group, query_len, page_size, options, split in cases:
        tiling = _Tiling.choose(group * query_len, head_dim, dtype.itemsize)
        constexprs: dict[str, object] = {
            "GROUP": group,
            "QUERY_LEN": query_len,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": page_size,
            "HAS_WINDOW": options,
            "HAS_SOFTCAP": options,
            "IS_SPLIT": split,
            **tiling.constexprs(group * query_len),
        }
        signature = {}
        for argument in _paged_decode_kernel.arg_names:
            if argument in constexprs:
                signature[argument] = "constexpr"
            elif argument.endswith("_ptr"):
                signature[argument] = pointers.get(argument, f"*{TRITON_DTYPES[dtype]}")
            else:
                signature[argument] = "fp32" if argument.startswith("logit_") else "i32"
        divisible = tuple(a for a in signature if a.endswith("_ptr") or a.startswith("stride_"))
        specs.append(
            CompileSpec(
                f"paged_decode_{name}",
                _paged_decode_kernel,
                signature,
                constexprs,
                tiling.num_warps,
                tiling.num_stages,
                divisible=divisible,
            )
        )
    return specs
