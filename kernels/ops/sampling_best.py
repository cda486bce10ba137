"""The best token of each row among the columns of this rank, for `sample_shards`, and the best of several such tokens.

A record is a score and its token, 8 bytes. The first kernel writes a record per row and tile of 2048 tokens, the second
selects one of them, and after the exchange one of those of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.ops.sampling_logits import (
    NOWHERE,
    SAMPLE_CHUNK,
    WORD,
    best_of,
    kernel_input_types,
    kernel_inputs,
    logits_of_words,
    noise_of_words,
    req_values,
    row_options,
)
from graphrt.kernels.ops.sampling_reference import SampleInputs
from graphrt.kernels.sizes import ceil_div, next_power_of_two
from graphrt.kernels.types import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WARPS = 4


@triton.jit(do_not_specialize=["first_word", "end_word", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def best_of_tiles_kernel(
    ptrs,
    records_ptr,
    first_word,
    end_word,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    WORDS: tl.constexpr,  # of a tile
):
    row = tl.program_id(0)
    heat, _, _, _, _ = row_options(row, ptrs, vocab_size)
    (
        row_at, vocab, processes, mask_at, num_masked, bias_at, num_biases, state_row, num_penalized, repetition,
        presence, frequency,
    ) = req_values(row, ptrs, vocab_size, stride_logits, state_rows, bias_rows, bias_capacity, num_masks)  # fmt: skip
    # Tokens are numbered as in the whole vocabulary, but the first column is the first token of this rank.
    row_at -= first_word * WORD
    source = (
        ptrs,
        (row_at, vocab, processes, mask_at, num_masked, bias_at, num_biases, state_row, num_penalized, repetition,
         presence, frequency),
    )  # fmt: skip
    words = first_word + tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    words = tl.where(words < end_word, words, NOWHERE // WORD)
    tokens, scores = logits_of_words(source, words)
    if heat > 0:
        noise = noise_of_words(tl.load(ptrs.seeds + row), tl.load(ptrs.seq_lens + row), words)
        scores = tl.where(scores > float("-inf"), tl.fma(heat, noise, scores), float("-inf"))
    best, token = best_of(tl.reshape(scores, [WORDS * WORD]), tl.reshape(tokens, [WORDS * WORD]))
    at = 2 * (tl.program_id(1) * tl.num_programs(0) + row)
    tl.store(records_ptr + at, best.to(tl.int32, bitcast=True))
    tl.store(records_ptr + at + 1, token)


@triton.jit(do_not_specialize=["count"])
def best_record_kernel(records_ptr, out_ptr, count, COUNT: tl.constexpr, AS_TOKENS: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, COUNT)
    at = 2 * (index * tl.num_programs(0) + row)
    scores = tl.load(records_ptr + at, mask=index < count, other=0).to(tl.float32, bitcast=True)
    scores = tl.where(index < count, scores, float("-inf"))
    best, token = best_of(scores, tl.load(records_ptr + at + 1, mask=index < count, other=NOWHERE))
    if AS_TOKENS:
        tl.store(out_ptr + row, tl.where(best > float("-inf"), token, _NO_TOKEN))
    else:
        tl.store(out_ptr + 2 * row, best.to(tl.int32, bitcast=True))
        tl.store(out_ptr + 2 * row + 1, token)


_launch_tiles, _launch_records = KernelLauncher(best_of_tiles_kernel), KernelLauncher(best_record_kernel)


def best_of_columns(inputs: SampleInputs, first: int, end: int, vocab_size: int) -> torch.Tensor:
    """Return the best token of each row, and its score with noise, as records [rows, 2] int32.

    inputs      of rows without truncation; the logits are the columns of the tokens from `first` to `end`
    vocab_size  size of the whole vocabulary, which the other tensors are for
    """
    logits = inputs.logits
    rows, words, tile = len(logits), ceil_div(end, 32) - ceil_div(first, 32), SAMPLE_CHUNK // 32
    tiles = max(1, ceil_div(words, tile))
    records = torch.empty((tiles, rows, 2), dtype=torch.int32, device=logits.device)
    ptrs, (_, *sizes) = kernel_inputs(inputs._replace(top_k=None, top_p=None, min_p=None), records, inputs.temperatures)
    _launch_tiles(
        (rows, tiles), ptrs, records, ceil_div(first, 32), ceil_div(end, 32), vocab_size, *sizes, WORDS=tile,
        num_warps=_WARPS,
    )  # fmt: skip
    return best_records(records, as_tokens=False)


def best_records(records: torch.Tensor, *, as_tokens: bool) -> torch.Tensor:
    """Return the best record of each row [rows, 2] int32, or its token [rows] int32, which may be NO_TOKEN.

    records  [count, rows, 2]  int32  device; the lowest of equal scores' tokens is the best
    """
    count, rows, _ = records.shape
    out = torch.empty((rows,) if as_tokens else (rows, 2), dtype=torch.int32, device=records.device)
    _launch_records((rows,), records, out, count, COUNT=next_power_of_two(count), AS_TOKENS=as_tokens, num_warps=_WARPS)
    return out


def compile_variants() -> list[CompileSpec]:
    """Return variants without options and with all, and of the selection."""
    off = dict.fromkeys(("top_k", "top_p", "min_p"), "constexpr")
    specs = []
    for kind, everything in (("bf16", False), ("fp32", True)):
        types: dict[str, Any] = kernel_input_types(kind, everything=everything) | off
        specs.append(
            CompileSpec(
                f"best_of_tiles_{kind}{'_all' if everything else ''}", best_of_tiles_kernel,
                {"ptrs": SampleInputs(**types)}, {"WORDS": SAMPLE_CHUNK // 32}, _WARPS, 3,
                divisible=("ptrs", "vocab_size", "stride_logits", "*_ptr"),
            )
        )  # fmt: skip
    constexprs = {"COUNT": 32, "AS_TOKENS": True}
    specs.append(CompileSpec("best_record", best_record_kernel, {}, constexprs, _WARPS, 3, divisible=("*_ptr",)))
    return specs
