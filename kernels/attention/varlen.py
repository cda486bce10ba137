"""Attention of mixed batches over the paged cache: prompt chunks and decodes, packed, in one launch per layer.

The query heads that share a KV head are packed with the tokens: query row `token * group + head` of a sequence. The
grid holds as many tiles of BLOCK_M such rows as any batch of the padded size can need, and each program finds its
sequence by a binary search over `query_start_loc`. A virtual row behind the last one takes the pad tokens and zeroes
them. Tiles without tokens exit after the search.
"""

from __future__ import annotations

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
from graphrt.kernels.attention.tile import tile_logits, tile_offsets, tile_pages
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.library import define_op


@triton.jit
def _tile_row(query_start_loc_ptr, tile, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last row whose first tile is not behind `tile`: row r starts at tile start(r) * GROUP // BLOCK_M + r."""
    low = 0
    high = num_rows  # the virtual row of the pad tokens
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) * GROUP // BLOCK_M + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _attend_tile(
    q,
    acc,
    top,
    total,
    tile_start,
    seq_len,
    window_start,
    last_visible,
    table_row_ptr,
    k_ptr,
    v_ptr,
    stride_k_page,
    stride_k_slot,
    stride_v_page,
    stride_v_slot,
    logit_factor,
    logit_cap,
    sliding_window,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One step of the online softmax over a KV tile. Without MASKED every query row sees the whole tile."""
    lanes = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    positions = tile_start + lanes
    in_range = positions < seq_len
    if HAS_WINDOW:
        in_range &= positions >= window_start
    pages = tile_pages(table_row_ptr, tile_start, lanes, seq_len, PAGE_SIZE, BLOCK_N)
    k_offsets = tile_offsets(pages, tile_start, lanes, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N)
    v_offsets = tile_offsets(pages, tile_start, lanes, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N)
    k_ptrs = k_ptr + k_offsets[:, None] + d[None, :]
    v_ptrs = v_ptr + v_offsets[:, None] + d[None, :]
    # The loads mask the values: the unfilled tail of a page may hold NaN, and zero probability times NaN is NaN.
    if MASKED:
        k = tl.load(k_ptrs, mask=in_range[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=in_range[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D != HEAD_DIM:
        k = tl.load(k_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    logits = tile_logits(q, k, logit_factor, logit_cap, HAS_SOFTCAP)
    if MASKED:
        visible = positions[None, :] <= last_visible[:, None]
        if HAS_WINDOW:
            visible &= positions[None, :] > last_visible[:, None] - sliding_window
        logits = tl.where(visible, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing visible so far: -inf - -inf is NaN
    rescale = tl.exp2(top - base)
    probabilities = tl.exp2(logits - base[:, None])
    total = total * rescale + tl.sum(probabilities, 1)
    acc = tl.dot(probabilities.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _varlen_attention_kernel(
    q_ptr,  # [padded_tokens, num_kv_heads * GROUP, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,
    block_table_ptr,  # [padded_reqs, max_pages]
    seq_lens_ptr,  # [padded_reqs]
    query_start_loc_ptr,  # [padded_reqs + 1]
    out_ptr,  # like q
    num_rows,
    num_tokens,  # padded_tokens
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
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _tile_row(query_start_loc_ptr, tile, num_rows, GROUP, BLOCK_M)
    query_start = tl.load(query_start_loc_ptr + row)
    query_end = num_tokens
    seq_len = 0
    if row < num_rows:
        query_end = tl.load(query_start_loc_ptr + row + 1)
        seq_len = tl.load(seq_lens_ptr + row)
    query_len = query_end - query_start
    m_start = (tile - query_start * GROUP // BLOCK_M - row) * BLOCK_M
    if m_start >= query_len * GROUP:
        return

    m = m_start + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = (query_start + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    q_mask = (m < query_len * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + d[None, :], mask=q_mask, other=0.0)
    table_row_ptr = block_table_ptr + row.to(tl.int64) * stride_table_row
    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head

    # Positions that the first and the last token of the tile see; in between, tiles up to `whole_end` need no mask.
    last_visible = seq_len - query_len + m // GROUP
    first_token_sees = seq_len - query_len + m_start // GROUP
    last_token_sees = tl.minimum(seq_len - query_len + (m_start + BLOCK_M - 1) // GROUP, seq_len - 1)
    window_start = 0
    if HAS_WINDOW:
        window_start = tl.maximum(first_token_sees + 1 - sliding_window, 0)
    first_tile = window_start // BLOCK_N
    last_tile = tl.maximum((last_token_sees + BLOCK_N) // BLOCK_N, first_tile)
    whole_end = first_tile
    if not HAS_WINDOW:
        whole_end = tl.maximum((first_token_sees + 1) // BLOCK_N, first_tile)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if not HAS_WINDOW:
        for kv_tile in tl.range(first_tile, whole_end, num_stages=NUM_STAGES):
            acc, top, total = _attend_tile(
                q,
                acc,
                top,
                total,
                kv_tile * BLOCK_N,
                seq_len,
                window_start,
                last_visible,
                table_row_ptr,
                k_ptr,
                v_ptr,
                stride_k_page,
                stride_k_slot,
                stride_v_page,
                stride_v_slot,
                logit_factor,
                logit_cap,
                sliding_window,
                HEAD_DIM,
                PAGE_SIZE,
                False,
                HAS_SOFTCAP,
                False,
                BLOCK_N,
                BLOCK_D,
            )
    for kv_tile in tl.range(whole_end, last_tile, num_stages=NUM_STAGES):
        acc, top, total = _attend_tile(
            q,
            acc,
            top,
            total,
            kv_tile * BLOCK_N,
            seq_len,
            window_start,
            last_visible,
            table_row_ptr,
            k_ptr,
            v_ptr,
            stride_k_page,
            stride_k_slot,
            stride_v_page,
            stride_v_slot,
            logit_factor,
            logit_cap,
            sliding_window,
            HEAD_DIM,
            PAGE_SIZE,
            HAS_WINDOW,
            HAS_SOFTCAP,
            True,
            BLOCK_N,
            BLOCK_D,
        )
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a token that sees nothing gets zeros
    tl.store(
        out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )


def _tiling(head_dim: int, itemsize: int) -> dict[str, int]:
    """BLOCK sizes, warps and stages of a kernel variant."""
    block_d = next_power_of_two(head_dim)
    if itemsize == 4:  # fp32 products run without tensor cores and hold their operands in registers
        return {
            "BLOCK_M": 16,
            "BLOCK_N": 32 if block_d <= 128 else 16,
            "BLOCK_D": block_d,
            "NUM_STAGES": 2,
            "num_warps": 4,
        }
    if block_d <= 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": block_d, "NUM_STAGES": 3, "num_warps": 4}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": block_d, "NUM_STAGES": 2, "num_warps": 8}


def _launch_varlen_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    sliding_window: int,
    logits_softcap: float,
) -> None:
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    num_tokens, num_rows, group = q.shape[0], seq_lens.shape[0], q.shape[1] // num_kv_heads
    tiling = _tiling(head_dim, q.element_size())
    num_tiles = triton.cdiv(num_tokens * group, tiling["BLOCK_M"]) + num_rows + 1
    logit_factor, logit_cap = logit_constants(softmax_scale, logits_softcap)
    _varlen_attention_kernel[(num_tiles, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        num_rows,
        num_tokens,
        logit_factor,
        logit_cap,
        sliding_window,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[1],
        HAS_WINDOW=sliding_window > 0,
        HAS_SOFTCAP=logits_softcap > 0.0,
        **tiling,
        num_stages=tiling["NUM_STAGES"],
    )


def _varlen_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    sliding_window: int,
    logits_softcap: float,
) -> None:
    starts = query_start_loc.tolist()
    reference_attention(
        q, k_cache, v_cache, block_table, seq_lens, starts, out, softmax_scale, sliding_window, logits_softcap
    )


_varlen_attention_op: Any = define_op(
    "varlen_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor(a!) out, float softmax_scale, int sliding_window, float logits_softcap) -> ()",
    triton_impl=_launch_varlen_attention,
    reference=_varlen_attention_reference,
)


def varlen_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    sliding_window: int = 0,
    logits_softcap: float = 0.0,
) -> None:
    """Causal attention of packed new tokens, any number per row, to their rows' pages.

    q, out             [padded_tokens, num_q_heads, head_dim]                  fp16, bf16 or fp32; out is written
    k_cache, v_cache   [num_pages, page_size, num_kv_heads, head_dim]          dtype of q; any strides, the last one 1
    block_table        [padded_reqs, max_pages]                                int32
    seq_lens           [padded_reqs]  including the new tokens; 0: zeros       int32
    query_start_loc    [padded_reqs + 1]  tokens from its last value on: zeros int32
    sliding_window     positions that a token sees, itself included; 0: all
    logits_softcap     cap * tanh(logits / cap); 0.0: off

    Capture-safe: one launch, no sync, no allocation; the grid depends on the padded sizes only.

    Raises: ShapeError, UnsupportedError (head_dim).
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
    check_triton_head_dim("varlen_attention", q.shape[2])
    check_tensor("query_start_loc", query_start_loc, shape=(seq_lens.shape[0] + 1,), dtype=torch.int32, device=q.device)
    check_unit_stride("query_start_loc", query_start_loc)
    _varlen_attention_op(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        softmax_scale,
        sliding_window,
        logits_softcap,
    )


def compile_variants() -> list[CompileSpec]:
    """Kernel variants that a test compiles without a GPU: shapes of common models, and the corners."""
    cases: list[tuple[str, torch.dtype, int, int, int, bool]] = [
        # name, dtype, head_dim, group, page_size, options (window and softcap)
        ("llama", torch.bfloat16, 128, 4, 16, False),
        ("llama_page64", torch.float16, 128, 4, 64, False),
        ("small_heads", torch.bfloat16, 64, 3, 16, False),
        ("gemma", torch.bfloat16, 256, 2, 16, True),
        ("odd_head_dim", torch.float16, 80, 7, 48, True),
        ("fp32", torch.float32, 64, 4, 16, True),
        ("fp32_128", torch.float32, 128, 4, 16, False),
        ("fp32_large", torch.float32, 256, 8, 16, False),
    ]
    pointers = {"block_table_ptr": "*i32", "seq_lens_ptr": "*i32", "query_start_loc_ptr": "*i32"}
    specs = []
    for name, dtype, head_dim, group, page_size, options in cases:
        tiling = _tiling(head_dim, dtype.itemsize)
        num_warps = tiling.pop("num_warps")
        constexprs: dict[str, object] = {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": page_size,
            "HAS_WINDOW": options,
            "HAS_SOFTCAP": options,
            **tiling,
        }
        signature = {}
        for argument in _varlen_attention_kernel.arg_names:
            if argument in constexprs:
                signature[argument] = "constexpr"
            elif argument.endswith("_ptr"):
                signature[argument] = pointers.get(argument, f"*{TRITON_DTYPES[dtype]}")
            else:
                signature[argument] = "fp32" if argument.startswith("logit_") else "i32"
        divisible = tuple(a for a in signature if a.endswith("_ptr") or a.startswith("stride_"))
        specs.append(
            CompileSpec(
                f"varlen_attention_{name}",
                _varlen_attention_kernel,
                signature,
                constexprs,
                num_warps,
                tiling["NUM_STAGES"],
                divisible=divisible,
            )
        )
    return specs
