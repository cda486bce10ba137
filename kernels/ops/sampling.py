"""Sampling inside the graph: a token per row from its logits.

A draw from softmax(logits / temperature) is the argmax of logits + temperature * Gumbel noise (Gumbel-max). The noise
comes from Philox, a counter-based generator, at (seed, vocabulary index, position): from equal logits a row
draws the same token wherever it stands and whatever the batch is padded to, and nothing is kept between steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.library import define_op
from graphrt.kernels.ops.reference import MAX_TEMPERATURE, SAMPLE_CHUNK, sample_reference
from graphrt.kernels.types import NO_TOKEN

MAX_VOCAB_SIZE = 1 << 20
"""Largest vocabulary that `sample` takes: the best of all chunks are compared by one program."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_NUM_WARPS = 4

_MAX_HEAT = tl.constexpr(MAX_TEMPERATURE)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NOWHERE = tl.constexpr(1 << 30)  # index that is larger than every real one


@triton.jit
def _gumbel(bits):
    """Gumbel noise from 32 random bits, as -log of an exponential variate; see `exponential_reference`."""
    u = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    tail = -tl.log(tl.maximum(1.0 - u, 2.9802322387695312e-08))
    return -tl.log(tl.where(u < 0.015625, series, tail))


@triton.jit
def _better_of(scores, tokens, best_scores, best_tokens):
    """The higher score and its token, elementwise; of equal scores, the lower token."""
    wins = (scores > best_scores) | ((scores == best_scores) & (tokens < best_tokens))
    return tl.where(wins, scores, best_scores), tl.where(wins, tokens, best_tokens)


@triton.jit
def _scored(logits_ptr, tokens, vocab_size, noise):
    """Scores of some tokens; those that cannot be chosen (NaN, -inf, beyond the vocabulary) become _NOWHERE."""
    logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    possible = logits > float("-inf")
    return tl.where(possible, logits + noise, float("-inf")), tl.where(possible, tokens, _NOWHERE)


@triton.jit
def _best_of(scores, tokens):
    """The highest score and the lowest token that has it."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, tokens, _NOWHERE), 0)


@triton.jit
def _sample_chunk_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    seq_lens_ptr,
    best_scores_ptr,
    best_tokens_ptr,
    vocab_size,
    stride_logits,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    QUARTER: tl.constexpr = CHUNK // 4
    lanes = tl.arange(0, QUARTER)
    tokens = chunk * CHUNK + lanes
    logits_row_ptr = logits_ptr + row * stride_logits
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        # One counter gives four words: word w belongs to quarter w of the chunk.
        counter = chunk * QUARTER + lanes
        w0, w1, w2, w3 = tl.philox(
            tl.load(seeds_ptr + row), counter, tl.load(seq_lens_ptr + row) + tl.zeros_like(counter),
            tl.zeros_like(counter), tl.zeros_like(counter),
        )  # fmt: skip
        heat = tl.minimum(temperature, _MAX_HEAT)
        n0 = heat * _gumbel(w0)
        n1 = heat * _gumbel(w1)
        n2 = heat * _gumbel(w2)
        n3 = heat * _gumbel(w3)
    else:
        n0 = tl.zeros([QUARTER], tl.float32)
        n1 = n0
        n2 = n0
        n3 = n0
    scores, where = _scored(logits_row_ptr, tokens, vocab_size, n0)
    more, at = _scored(logits_row_ptr, tokens + QUARTER, vocab_size, n1)
    scores, where = _better_of(more, at, scores, where)
    more, at = _scored(logits_row_ptr, tokens + 2 * QUARTER, vocab_size, n2)
    scores, where = _better_of(more, at, scores, where)
    more, at = _scored(logits_row_ptr, tokens + 3 * QUARTER, vocab_size, n3)
    scores, where = _better_of(more, at, scores, where)
    best, token = _best_of(scores, where)
    partial = row * tl.num_programs(1) + chunk
    tl.store(best_scores_ptr + partial, best)
    tl.store(best_tokens_ptr + partial, token)


@triton.jit
def _sample_row_kernel(best_scores_ptr, best_tokens_ptr, out_ptr, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, CHUNKS)
    partials = row.to(tl.int64) * num_chunks + lanes
    scores = tl.load(best_scores_ptr + partials, mask=lanes < num_chunks, other=float("-inf"))
    tokens = tl.load(best_tokens_ptr + partials, mask=lanes < num_chunks, other=_NOWHERE)
    _, token = _best_of(scores, tokens)
    tl.store(out_ptr + row, tl.where(token < _NOWHERE, token, _NO_TOKEN))


def _sample_triton(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    chunks = triton.cdiv(vocab, SAMPLE_CHUNK)
    best_scores = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    _sample_chunk_kernel[(rows, chunks)](
        logits, temperatures, seeds, seq_lens, best_scores, best_tokens, vocab, logits.stride(0),
        CHUNK=SAMPLE_CHUNK, num_warps=_NUM_WARPS,
    )  # fmt: skip
    _sample_row_kernel[(rows,)](
        best_scores, best_tokens, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1
    )
    return out


_sample_op = define_op(
    "sample(Tensor logits, Tensor temperatures, Tensor seeds, Tensor seq_lens) -> Tensor",
    triton_impl=_sample_triton,
    reference=sample_reference,
    fake=lambda logits, temperatures, seeds, seq_lens: logits.new_empty((logits.shape[0],), dtype=torch.int32),
)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """One token per row: argmax at temperature 0, else a draw from softmax(logits / temperature).

    logits        [rows, vocab]  float16, bfloat16 or float32  device; rows may be strided
    temperatures  [rows]         float32  0 (or less, or NaN): argmax, the lowest index of equal logits
    seeds         [rows]         int64    key of the row's random numbers
    seq_lens      [rows]         int32    position of the draw; the same seed and position draw the same noise
    returns       [rows]         int32    NO_TOKEN where no logit is above -inf

    NaN and -inf logits are never chosen.
    Capture-safe: no generator state; random numbers are a function of seed, position and vocabulary index.
    Raises: ShapeError when a tensor does not fit the others, or the vocabulary is larger than MAX_VOCAB_SIZE.
    """
    check_tensor("logits", logits, shape=(None, None), dtype=_FLOATS)
    (rows, vocab), device = logits.shape, logits.device
    check_tensor("temperatures", temperatures, shape=(rows,), dtype=torch.float32, device=device)
    check_tensor("seeds", seeds, shape=(rows,), dtype=torch.int64, device=device)
    check_tensor("seq_lens", seq_lens, shape=(rows,), dtype=torch.int32, device=device)
    named = {"logits": logits, "temperatures": temperatures, "seeds": seeds, "seq_lens": seq_lens}
    for name, tensor in named.items():
        check_unit_stride(name, tensor)
    if not 1 <= vocab <= MAX_VOCAB_SIZE:
        raise ShapeError(f"logits: expected a vocabulary of 1 to {MAX_VOCAB_SIZE}, got {vocab}; sample in the caller")
    result: torch.Tensor = _sample_op(logits, temperatures, seeds, seq_lens)
    return result


def compile_variants() -> list[CompileSpec]:
    """Sampling from each logits dtype, and the largest final reduction."""
    specs = []
    partials = {"best_scores_ptr": "*fp32", "best_tokens_ptr": "*i32"}
    for kind in ("fp16", "bf16", "fp32"):
        signature = {
            "logits_ptr": f"*{kind}",
            "temperatures_ptr": "*fp32",
            "seeds_ptr": "*i64",
            "seq_lens_ptr": "*i32",
            **partials,
            "vocab_size": "i32",
            "stride_logits": "i32",
            "CHUNK": "constexpr",
        }
        divisible = ("logits_ptr", "vocab_size", "stride_logits", *partials)
        specs.append(
            CompileSpec(
                f"sample_chunk_{kind}", _sample_chunk_kernel, signature, {"CHUNK": SAMPLE_CHUNK}, _NUM_WARPS, 3,
                divisible=divisible,
            )
        )  # fmt: skip
    chunks = MAX_VOCAB_SIZE // SAMPLE_CHUNK
    row_signature = {**partials, "out_ptr": "*i32", "num_chunks": "i32", "CHUNKS": "constexpr"}
    specs.append(CompileSpec("sample_row", _sample_row_kernel, row_signature, {"CHUNKS": chunks}, 1, 3))
    return specs
