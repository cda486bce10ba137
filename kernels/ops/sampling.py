"""Sample one token per row of logits, inside the graph.

    sample(logits, temperatures, seeds, seq_lens)                                          # greedy and temperature
    sample(logits, temperatures, seeds, seq_lens, truncation=Truncation(top_k, top_p, min_p))

A draw from softmax(logits / temperature) is the argmax of logits + temperature * Gumbel noise (Gumbel-max). The noise
comes from Philox, a counter-based generator, at (seed, vocabulary index, position). Equal logits thus give equal tokens
regardless of batch position and padding, and steps share no generator state. The highest noise of 32 neighbors is
drawn first, so that one random word can exclude all 32; see `noise_reference`.

Logits are processed in vLLM's order, in float32: token mask, bias, penalties, temperature, min-p, top-k, top-p. A row
without these options costs as much as greedy or temperature sampling.

    sample_split      finds the changed tokens, concurrently with the first pass, if rows may have any
    sample_chunks     first pass: reads each logit once and writes the highest of 32 neighbors
    sample_rows       second pass: samples rows that keep all tokens, or truncate by min-p only
    sample_truncated  third pass, if rows may truncate: samples rows with top-k or top-p

Changed tokens are tokens whose logits a mask, a bias or penalties change. sample_split and sample_truncated are CUDA
C++ (`sampling_native.py`). On other devices, Triton kernels replace both, and programs of the first pass find the
changed tokens.

Most penalties lower logits. If only such penalties change a row, and top-k keeps few tokens, the model's logit bounds
each processed logit. The first pass then includes all tokens, and `sample_split` skips the row. The third pass lists
slightly more than k tokens and processes the tokens that have occurred; see `processes_late`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrt.kernels.checks import check_contiguous, check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import KernelLauncher, overlaps
from graphrt.kernels.library import define_op
from graphrt.kernels.ops.sampling_chunks import CHANGED_WORDS, sample_chunks_kernel
from graphrt.kernels.ops.sampling_logits import SAMPLE_CHUNK, kernel_input_types, kernel_inputs
from graphrt.kernels.ops.sampling_native import GROUPS_MULTIPLE, SplitRows, launch_native, serves
from graphrt.kernels.ops.sampling_reference import NOISE_GROUP, SampleInputs, sample_reference
from graphrt.kernels.ops.sampling_rows import sample_rows_kernel
from graphrt.kernels.ops.sampling_state import Penalties, state_words
from graphrt.kernels.ops.sampling_truncated import LIST, sample_truncated_kernel
from graphrt.kernels.sizes import ceil_div, next_power_of_two

MAX_VOCAB_SIZE = 1 << 20
"""Largest vocabulary of `sample`, because one program compares the results of all parts of a row."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_DTYPES_OF_ROWS = {
    "temperatures": torch.float32, "seeds": torch.int64, "seq_lens": torch.int32, "req_indices": torch.int32,
    "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32, "mask_index": torch.int32,
}  # fmt: skip
_CHUNK_WARPS = 4
_ROW_WARPS = 8
_ROW_REGISTERS = 128  # two rows per multiprocessor
_CHUNK_FRAME = 8  # bytes of stack frame that the first pass reserves but never uses if it reads bits early
_ROW_SPILL = 1024  # spilled bytes, in loops that most rows skip
_CHUNKS = 2  # chunks per tile of the first pass if there are more than _PROGRAMS chunks
_PROGRAMS = 2048
_MAX_GROUPS = 4096  # per row; larger vocabularies have larger groups


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation per row: min-p, top-k and top-p, in this order.

    top_k  [rows]  int32    keep the k most likely tokens; off if 0 or less, or at least the vocabulary size; 1: greedy
    top_p  [rows]  float32  keep the most likely tokens that add up to top_p, after min-p and top-k; off if 1 or more,
                            or NaN; 0 or less: greedy
    min_p  [rows]  float32  keep tokens with at least min_p times the highest probability; off if 0 or less, or NaN;
                            values above 1 count as 1

    Tokens with equal logits are kept or dropped together, so ties at a bound are kept.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to the logits of some tokens, in persistent tensors indexed by request index.

    A request has two lists. The second list applies only to the request's first tokens, so that `min_tokens` can forbid
    stop tokens among them.

    tokens  [max_reqs, 2, n]  int32    both lists, strictly ascending; tokens outside the vocabulary are ignored
    values  [max_reqs, 2, n]  float32  -inf and NaN forbid the token
    lists   [max_reqs, 3]     int32    the sizes of the first and the second list, and a length. The second list applies
                                       while `seq_lens` is below this length, else the first
    """

    tokens: torch.Tensor
    values: torch.Tensor
    lists: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, max_entries: int, device: torch.device) -> LogitBias:
        """Allocate empty lists of up to `max_entries` tokens each."""
        return cls(
            torch.zeros((max_reqs, 2, max_entries), dtype=torch.int32, device=device),
            torch.zeros((max_reqs, 2, max_entries), dtype=torch.float32, device=device),
            torch.zeros((max_reqs, 3), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Masks of allowed tokens, for example from a grammar.

    words  [masks, ceil(vocab / 32)]  int32  token t is allowed if bit t % 32 of word t // 32 is set
    index  [rows]                     int32  the mask index of each row; no mask if -1 or out of range
    """

    words: torch.Tensor
    index: torch.Tensor


def _group_size(vocab: int) -> int:
    """Return the size of a group, the adjacent tokens for which the passes keep one highest logit and noise bound."""
    smallest: int = next_power_of_two(ceil_div(vocab, _MAX_GROUPS))
    return max(NOISE_GROUP, smallest)


_launch_chunks, _launch_rows = KernelLauncher(sample_chunks_kernel), KernelLauncher(sample_rows_kernel)
_launch_truncated = KernelLauncher(sample_truncated_kernel)


def _sample_triton(*tensors: torch.Tensor | None) -> torch.Tensor:
    inputs = SampleInputs(*tensors)  # type: ignore[arg-type]
    logits = inputs.logits
    (rows, vocab), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    native = serves(device)
    # The tile size affects no draw.
    chunks = _CHUNKS if rows * ceil_div(vocab, SAMPLE_CHUNK) > _PROGRAMS else 1
    tiles = programs = ceil_div(vocab, chunks * SAMPLE_CHUNK)
    group = _group_size(vocab)
    groups = ceil_div(vocab, group)
    if native:
        groups = GROUPS_MULTIPLE * ceil_div(groups, GROUPS_MULTIPLE)
    group_best = torch.empty((rows, groups), dtype=torch.float32, device=device)
    list_groups = torch.empty((rows, groups), dtype=torch.int32, device=device)
    truncates = inputs.top_k is not None
    group_mass = torch.empty_like(group_best) if truncates else None
    ptrs, numbers = kernel_inputs(inputs, list_groups, group_best)
    sizes = (*numbers, groups)
    processes = any(tensor is not None for tensor in (inputs.seen, inputs.bias_tokens, inputs.mask_words))
    split = plain_words = None
    changed_best, changed_mass = group_best, group_mass  # placeholders, because no row has changed tokens
    if processes and native:
        split = SplitRows.allocate(rows, groups, group, device)
        changed_best = split.best
    elif processes:
        plain_words = torch.empty((rows, groups * group // 32), dtype=torch.int32, device=device)
        changed_best = torch.empty_like(group_best)
        changed_mass = torch.empty_like(group_best) if truncates else None
        programs += ceil_div(groups * group // 32, CHANGED_WORDS)
    early = overlaps(device)
    if split is not None:
        launch_native("sample_split", ptrs, sizes, group_best, group_mass, split, out, group)
    _launch_chunks(
        (rows, programs), ptrs, group_best, group_mass, plain_words, changed_best, changed_mass, list_groups, *sizes,
        GROUP=group, CHUNKS=chunks, CHANGED_WORDS=0 if native else CHANGED_WORDS, PROCESSES=processes, OVERLAPS=early,
        num_warps=_CHUNK_WARPS, launch_pdl=early and split is not None,
    )  # fmt: skip
    wide = max(next_power_of_two(groups), 32)
    _launch_rows(
        (rows,), ptrs, group_best, changed_best, list_groups, out, *sizes, GROUPS=wide, GROUP=group,
        TILES=next_power_of_two(tiles), CHUNKS=chunks, OVERLAPS=early, num_warps=_ROW_WARPS, maxnreg=_ROW_REGISTERS,
        launch_pdl=early,
    )  # fmt: skip
    if truncates and native:
        launch_native("sample_truncated", ptrs, sizes, group_best, group_mass, split, out, group)
    elif truncates:
        list_words = torch.empty((rows, LIST * group // 32), dtype=torch.int32, device=device)
        list_tokens = torch.empty((rows, LIST), dtype=torch.int32, device=device)
        list_logits = torch.empty((rows, LIST), dtype=torch.float32, device=device)
        _launch_truncated(
            (rows,), ptrs, group_best, group_mass, plain_words, changed_best, changed_mass, list_groups, list_words,
            list_tokens, list_logits, out, *sizes, GROUPS=wide, GROUP=group, LIST=LIST, OVERLAPS=early,
            num_warps=_ROW_WARPS, maxnreg=_ROW_REGISTERS, launch_pdl=early,
        )  # fmt: skip
    return out


_arguments = (f"Tensor{'?' if name in SampleInputs._field_defaults else ''} {name}" for name in SampleInputs._fields)
_sample_op = define_op(
    f"sample({', '.join(_arguments)}) -> Tensor",
    triton_impl=_sample_triton,
    reference=sample_reference,
    fake=lambda logits, *others: logits.new_empty((logits.shape[0],), dtype=torch.int32),
)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    req_indices: torch.Tensor | None = None,
    truncation: Truncation | None = None,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    token_mask: TokenMask | None = None,
) -> torch.Tensor:
    """Sample one token per row: argmax at temperature 0, else a draw from softmax(logits / temperature).

    logits        [rows, vocab]  float16, bfloat16 or float32  device; rows may be strided; not written
    temperatures  [rows]         float32  0 (or less, or NaN): argmax, the lowest index of equal logits
    seeds         [rows]         int64    key of the row's random numbers
    seq_lens      [rows]         int32    position of the draw; equal seeds and positions draw equal noise. Also
                                          selects the bias list
    req_indices   [rows]         int32    request index of each row, for penalties and bias; neither applies if it is
                                          out of range, such as -1 in padding
    returns       [rows]         int32    NO_TOKEN if no token can be sampled

    Truncation, penalties, bias and token mask may be off in some rows; None turns them off in all rows. Truncation
    does not change the noise. NaN and -inf logits are never sampled.
    Capture-safe: no generator state; random numbers depend on seed, position and vocabulary index. A row's token does
    not depend on other rows or on their number.
    Raises: ShapeError: if shapes, dtypes or devices of the tensors do not match, or the vocabulary is larger than
    MAX_VOCAB_SIZE.
    """
    inputs = sample_inputs(logits, temperatures, seeds, seq_lens, req_indices, truncation, penalties, bias, token_mask)
    result: torch.Tensor = _sample_op(*inputs)
    return result


def sample_inputs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    seq_lens: torch.Tensor,
    req_indices: torch.Tensor | None,
    truncation: Truncation | None,
    penalties: Penalties | None,
    bias: LogitBias | None,
    token_mask: TokenMask | None,
) -> SampleInputs:
    """Return the checked tensors of `sample`'s arguments. Raises: see `sample`."""
    check_tensor("logits", logits, shape=(None, None), dtype=_FLOATS)
    check_unit_stride("logits", logits)
    (rows, vocab), device = logits.shape, logits.device
    if not 1 <= vocab <= MAX_VOCAB_SIZE:
        raise ShapeError(f"logits: expected a vocabulary of 1 to {MAX_VOCAB_SIZE}, got {vocab}; use your own sampler")
    if req_indices is None and (penalties is not None or bias is not None):
        raise ShapeError("req_indices: penalties and bias need a tensor of request indices, got None; pass req_indices")
    inputs = SampleInputs(logits, temperatures, seeds, seq_lens, req_indices)
    if truncation is not None:
        inputs = inputs._replace(top_k=truncation.top_k, top_p=truncation.top_p, min_p=truncation.min_p)
    if token_mask is not None:
        check_tensor("mask_words", token_mask.words, shape=(None, state_words(vocab)), dtype=torch.int32, device=device)
        check_contiguous("mask_words", token_mask.words)
        inputs = inputs._replace(mask_words=token_mask.words, mask_index=token_mask.index)
    if bias is not None:
        check_tensor("bias.lists", bias.lists, shape=(None, 3), dtype=torch.int32, device=device)
        shape = (bias.lists.shape[0], 2, None)
        check_tensor("bias.tokens", bias.tokens, shape=shape, dtype=torch.int32, device=device)
        check_tensor("bias.values", bias.values, shape=bias.tokens.shape, dtype=torch.float32, device=device)
        for name, tensor in (("lists", bias.lists), ("tokens", bias.tokens), ("values", bias.values)):
            check_contiguous(f"bias.{name}", tensor)
        if bias.tokens.shape[2]:
            inputs = inputs._replace(bias_tokens=bias.tokens, bias_values=bias.values, bias_lists=bias.lists)
    for name, dtype in _DTYPES_OF_ROWS.items():
        if (tensor := getattr(inputs, name)) is not None:
            check_tensor(name, tensor, shape=(rows,), dtype=dtype, device=device)
            check_unit_stride(name, tensor)
    if penalties is not None:
        inputs = inputs._replace(**penalties.checked(rows, vocab, device))
    return inputs


def compile_variants() -> list[CompileSpec]:
    """Return variants of all passes: with no options, with all, and the largest vocabulary, which needs the most."""
    specs = []
    float_ptrs = ("group_best_ptr", "group_mass_ptr", "changed_best_ptr", "changed_mass_ptr", "list_logits_ptr")
    optional = ("group_mass_ptr", "plain_words_ptr", "changed_mass_ptr", "list_words_ptr", "list_tokens_ptr",
                "list_logits_ptr")  # fmt: skip
    vocabularies = {"fp16": 1 << 17, "bf16": 1 << 17, "fp32": MAX_VOCAB_SIZE}
    alone = {"chunks": sample_chunks_kernel, "rows": sample_rows_kernel}
    with_split = {"chunks_with_split": sample_chunks_kernel}
    cases = [(kind, alone, False) for kind in vocabularies]
    cases += [("bf16", alone, True), ("bf16", with_split, True)]
    cases += [("fp32", alone | {"truncated": sample_truncated_kernel}, True)]  # takes 15 s
    for kind, kernels, everything in cases:
        vocab = vocabularies[kind]
        types: dict[str, Any] = kernel_input_types(kind, everything=everything)
        for part, kernel in kernels.items():
            constexprs: dict[str, object] = {} if everything else dict.fromkeys(optional)
            constexprs |= {
                "GROUPS": vocab // _group_size(vocab), "GROUP": _group_size(vocab),
                "LIST": LIST, "CHUNKS": _CHUNKS, "TILES": vocab // (_CHUNKS * SAMPLE_CHUNK),
                "CHANGED_WORDS": 0 if kernels is with_split else CHANGED_WORDS, "PROCESSES": everything,
                "OVERLAPS": True,
            }  # fmt: skip
            constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
            specs.append(
                CompileSpec(
                    f"sample_{part}_{kind}{'_all' if everything else ''}", kernel,
                    {"ptrs": SampleInputs(**types), **dict.fromkeys(float_ptrs, "*fp32")}, constexprs,
                    _CHUNK_WARPS if part.startswith("chunks") else _ROW_WARPS, 3,
                    divisible=("ptrs", "vocab_size", "stride_logits", "*_ptr"),
                    max_spill={"truncated": _ROW_SPILL, "chunks_with_split": _CHUNK_FRAME}.get(part, 0),
                    maxnreg=None if part.startswith("chunks") else _ROW_REGISTERS,
                )
            )  # fmt: skip
    return specs
