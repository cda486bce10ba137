"""Sampling inside the graph: one token per row of logits.

    sample(logits, temperatures, seeds, seq_lens)                                          # greedy and temperature
    sample(logits, temperatures, seeds, seq_lens, truncation=Truncation(top_k, top_p, min_p))

A draw from softmax(logits / temperature) is the argmax of logits + temperature * Gumbel noise (Gumbel-max). The noise
comes from Philox, a counter-based generator, at (seed, vocabulary index, position). So equal logits give the same token
at any place in the batch and with any padding, and there is no generator state between steps. The highest noise of 32
neighbours is drawn first, so that one word can exclude all of them: see `noise_reference`.

Logits are processed in vLLM's order, in float32: token mask, bias, penalties, temperature, min-p, top-k, top-p. A row
without these options costs as much as greedy or temperature sampling.

    sample_split      runs with the first pass, if rows may have mask, bias or penalties: the changed tokens
    sample_chunks     first pass: reads each logit once and writes the highest of 32 neighbours
    sample_rows       second pass: rows that keep all tokens, or truncate by min-p only
    sample_truncated  third pass, if rows may truncate: rows with top-k or top-p

sample_split and sample_truncated are CUDA C++ (`sampling_native.py`). On other devices Triton kernels replace them, and
programs of the first pass find the changed tokens.

Most penalties lower logits. If only such penalties change a row, and top-k keeps few tokens, the model's logit bounds
each processed logit. The first pass then includes all tokens, and `sample_split` skips the row. The third pass lists
slightly more than top-k tokens and processes those that have occurred: see `processes_late`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import overlaps
from graphrt.kernels.library import define_op
from graphrt.kernels.ops.sampling_chunks import CHANGED_WORDS, sample_chunks_kernel
from graphrt.kernels.ops.sampling_logits import SAMPLE_CHUNK
from graphrt.kernels.ops.sampling_native import GROUPS_MULTIPLE, SplitRows, launch_native, serves
from graphrt.kernels.ops.sampling_reference import NOISE_GROUP, sample_reference
from graphrt.kernels.ops.sampling_rows import sample_rows_kernel
from graphrt.kernels.ops.sampling_state import Penalties, state_words
from graphrt.kernels.ops.sampling_truncated import LIST, sample_truncated_kernel
from graphrt.kernels.sizes import ceil_div, next_power_of_two

MAX_VOCAB_SIZE = 1 << 20
"""Largest vocabulary of `sample`: one program compares the results of all parts of a row."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CHUNK_WARPS = 4
_ROW_WARPS = 8
_ROW_REGISTERS = 128  # two rows per multiprocessor
_CHUNK_FRAME = 8  # bytes of stack frame that the first pass reserves, and never uses, if it reads bits early
_ROW_SPILL = 1024  # spilled bytes: registers of loops that most rows do not run
_CHUNKS = 2  # chunks of a tile of the first pass, if there are more than _PROGRAMS chunks
_PROGRAMS = 2048
_MAX_GROUPS = 4096  # per row; larger vocabularies have larger groups


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation per row: min-p, top-k and top-p, applied in this order.

    top_k  [rows]  int32    keep the k most likely tokens; off if 0 or less, or at least the vocabulary size; 1: greedy
    top_p  [rows]  float32  keep the most likely tokens that add up to top_p, after min-p and top-k; off if 1 or more,
                            or NaN; 0 or less: greedy
    min_p  [rows]  float32  keep tokens with at least min_p times the highest probability; off if 0 or less, or NaN;
                            values above 1 count as 1

    Tokens of equal logits are kept or dropped together: ties at a bound are kept.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values that are added to the logits of some tokens: persistent, by request index.

    A request has two lists. The second one applies to its first tokens only, so that `min_tokens` can forbid the stop
    tokens there.

    tokens  [max_reqs, 2, n]  int32    both lists, strictly ascending; tokens outside of the vocabulary are ignored
    values  [max_reqs, 2, n]  float32  -inf and NaN forbid the token
    lists   [max_reqs, 3]     int32    the entries of the first list, those of the second list, and a length: the
                                       second list applies while `seq_lens` is below it, else the first
    """

    tokens: torch.Tensor
    values: torch.Tensor
    lists: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, max_entries: int, device: torch.device) -> LogitBias:
        """Allocate lists of up to `max_entries` tokens; all are empty."""
        return cls(
            torch.zeros((max_reqs, 2, max_entries), dtype=torch.int32, device=device),
            torch.zeros((max_reqs, 2, max_entries), dtype=torch.float32, device=device),
            torch.zeros((max_reqs, 3), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Masks of allowed tokens, as grammars compute them.

    words  [masks, ceil(vocab / 32)]  int32  token t is allowed if bit t % 32 of word t // 32 is set
    index  [rows]                     int32  the mask of each row; none if -1 or out of range
    """

    words: torch.Tensor
    index: torch.Tensor


def _group_size(vocab: int) -> int:
    """Return the size of a group: neighbouring tokens with one highest logit and one bound on their noise."""
    smallest: int = next_power_of_two(ceil_div(vocab, _MAX_GROUPS))
    return max(NOISE_GROUP, smallest)


def _sample_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    seq_lens: torch.Tensor,
    req_indices: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    repetition: torch.Tensor | None,
    presence: torch.Tensor | None,
    frequency: torch.Tensor | None,
    seen: torch.Tensor | None,
    counts: torch.Tensor | None,
    bias_tokens: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    bias_lists: torch.Tensor | None,
    mask_words: torch.Tensor | None,
    mask_index: torch.Tensor | None,
) -> torch.Tensor:
    (rows, vocab), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    native = serves(device)
    # No draw depends on the tile size.
    chunks = _CHUNKS if rows * ceil_div(vocab, SAMPLE_CHUNK) > _PROGRAMS else 1
    tiles = programs = ceil_div(vocab, chunks * SAMPLE_CHUNK)
    group = _group_size(vocab)
    groups = ceil_div(vocab, group)
    if native:
        groups = GROUPS_MULTIPLE * ceil_div(groups, GROUPS_MULTIPLE)
    group_best = torch.empty((rows, groups), dtype=torch.float32, device=device)
    list_groups = torch.empty((rows, groups), dtype=torch.int32, device=device)
    group_mass = torch.empty_like(group_best) if top_k is not None else None
    processes = mask_words is not None or bias_tokens is not None or seen is not None
    split = plain_words = None
    changed_best, changed_mass = group_best, group_mass  # placeholders: no row has changed tokens
    if processes and native:
        split = SplitRows.allocate(rows, groups, group, device)
        changed_best = split.best
    elif processes:
        plain_words = torch.empty((rows, groups * group // 32), dtype=torch.int32, device=device)
        changed_best = torch.empty_like(group_best)
        changed_mass = torch.empty_like(group_best) if top_k is not None else None
        programs += ceil_div(groups * group // 32, CHANGED_WORDS)
    ints, floats = list_groups, group_best  # placeholders for tables that no row uses
    inputs = (
        logits, temperatures, seeds, seq_lens, req_indices, top_k, top_p, min_p, repetition, presence, frequency,
        ints if seen is None else seen, ints if counts is None else counts,
        ints if bias_tokens is None else bias_tokens, floats if bias_values is None else bias_values, bias_lists,
        ints if mask_words is None else mask_words, mask_index,
    )  # fmt: skip
    sizes = (
        vocab,
        logits.stride(0),
        0 if seen is None else seen.shape[0],
        0 if bias_tokens is None else bias_tokens.shape[0],
        0 if bias_tokens is None else bias_tokens.shape[2],
        0 if mask_words is None else mask_words.shape[0],
        groups,
    )
    early = overlaps(device)
    if split is not None:
        launch_native("sample_split", inputs, sizes, group_best, group_mass, split, out, group)
    sample_chunks_kernel[(rows, programs)](
        *inputs, group_best, group_mass, plain_words, changed_best, changed_mass, list_groups, *sizes, GROUP=group,
        CHUNKS=chunks, CHANGED_WORDS=0 if native else CHANGED_WORDS, PROCESSES=processes, OVERLAPS=early,
        num_warps=_CHUNK_WARPS, launch_pdl=early and split is not None,
    )  # fmt: skip
    wide = max(next_power_of_two(groups), 32)
    sample_rows_kernel[(rows,)](
        *inputs, group_best, changed_best, list_groups, out, *sizes, GROUPS=wide, GROUP=group,
        TILES=next_power_of_two(tiles), CHUNKS=chunks, OVERLAPS=early, num_warps=_ROW_WARPS, maxnreg=_ROW_REGISTERS,
        launch_pdl=early,
    )  # fmt: skip
    if top_k is not None and native:
        launch_native("sample_truncated", inputs, sizes, group_best, group_mass, split, out, group)
    elif top_k is not None:
        list_words = torch.empty((rows, LIST * group // 32), dtype=torch.int32, device=device)
        list_tokens = torch.empty((rows, LIST), dtype=torch.int32, device=device)
        list_logits = torch.empty((rows, LIST), dtype=torch.float32, device=device)
        sample_truncated_kernel[(rows,)](
            *inputs, group_best, group_mass, plain_words, changed_best, changed_mass, list_groups, list_words,
            list_tokens, list_logits, out, *sizes, GROUPS=wide, GROUP=group, LIST=LIST, OVERLAPS=early,
            num_warps=_ROW_WARPS, maxnreg=_ROW_REGISTERS, launch_pdl=early,
        )  # fmt: skip
    return out


_OPTIONAL = (
    "req_indices", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seen", "counts", "bias_tokens",
    "bias_values", "bias_lists", "mask_words", "mask_index",
)  # fmt: skip
_sample_op = define_op(
    "sample(Tensor logits, Tensor temperatures, Tensor seeds, Tensor seq_lens, "
    f"{', '.join(f'Tensor? {name}' for name in _OPTIONAL)}) -> Tensor",
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
    seq_lens      [rows]         int32    position of the draw: the same seed and position draw the same noise. Also
                                          selects the bias list
    req_indices   [rows]         int32    request index of each row, for penalties and bias; neither applies if it is
                                          out of range, such as -1 in padding
    returns       [rows]         int32    NO_TOKEN if no token can be sampled

    Truncation, penalties, bias and token mask may be off in some rows; None means that they are off in all. Truncation
    does not change the noise. NaN and -inf logits are never sampled.
    Capture-safe: no generator state; random numbers depend on seed, position and vocabulary index. A row's token does
    not depend on other rows or on their number.
    Raises: ShapeError: if a tensor does not fit the others, or the vocabulary is larger than MAX_VOCAB_SIZE.
    """
    check_tensor("logits", logits, shape=(None, None), dtype=_FLOATS)
    (rows, vocab), device = logits.shape, logits.device
    of_rows = {
        "temperatures": (temperatures, torch.float32),
        "seeds": (seeds, torch.int64),
        "seq_lens": (seq_lens, torch.int32),
    }
    optional: dict[str, torch.Tensor] = {}
    if req_indices is not None:
        of_rows["req_indices"] = (req_indices, torch.int32)
        optional["req_indices"] = req_indices
    elif penalties is not None or bias is not None:
        raise ShapeError("req_indices: penalties and bias need a tensor of request indices, got None; pass one")
    if truncation is not None:
        of_rows["top_k"] = (truncation.top_k, torch.int32)
        of_rows["top_p"] = (truncation.top_p, torch.float32)
        of_rows["min_p"] = (truncation.min_p, torch.float32)
        optional |= {"top_k": truncation.top_k, "top_p": truncation.top_p, "min_p": truncation.min_p}
    if token_mask is not None:
        of_rows["mask_index"] = (token_mask.index, torch.int32)
        optional |= {"mask_words": token_mask.words, "mask_index": token_mask.index}
    for name, (tensor, dtype) in of_rows.items():
        check_tensor(name, tensor, shape=(rows,), dtype=dtype, device=device)
        check_unit_stride(name, tensor)
    check_unit_stride("logits", logits)
    if not 1 <= vocab <= MAX_VOCAB_SIZE:
        raise ShapeError(f"logits: expected a vocabulary of 1 to {MAX_VOCAB_SIZE}, got {vocab}; use your own sampler")
    if token_mask is not None:
        _check_table("mask_words", token_mask.words, (None, state_words(vocab)), torch.int32, device)
    if penalties is not None:
        optional |= penalties.checked(rows, vocab, device)
    if bias is not None:
        _check_table("bias.lists", bias.lists, (None, 3), torch.int32, device)
        _check_table("bias.tokens", bias.tokens, (bias.lists.shape[0], 2, None), torch.int32, device)
        _check_table("bias.values", bias.values, tuple(bias.tokens.shape), torch.float32, device)
        if bias.tokens.shape[2]:
            optional |= {"bias_tokens": bias.tokens, "bias_values": bias.values, "bias_lists": bias.lists}
    result: torch.Tensor = _sample_op(
        logits, temperatures, seeds, seq_lens, *(optional.get(name) for name in _OPTIONAL)
    )
    return result


def _check_table(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check_tensor(name, tensor, shape=shape, dtype=dtype, device=device)
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}; call contiguous()"
        )


def compile_variants() -> list[CompileSpec]:
    """Return all passes: each logits dtype without options, with all options, and the largest vocabulary."""
    specs = []
    floats = ("temperatures", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values",
              "group_best", "group_mass", "changed_best", "changed_mass", "list_logits")  # fmt: skip
    always = ("seen", "counts", "bias_tokens", "bias_values", "mask_words")
    optional = (
        *(name for name in _OPTIONAL if name not in always), "group_mass", "plain_words", "changed_mass", "list_words",
        "list_tokens", "list_logits",
    )  # fmt: skip
    vocabularies = {"fp16": 1 << 17, "bf16": 1 << 17, "fp32": MAX_VOCAB_SIZE}
    alone = {"chunks": sample_chunks_kernel, "rows": sample_rows_kernel}
    with_all = alone | {"truncated": sample_truncated_kernel}
    with_split = {"chunks_with_split": sample_chunks_kernel}
    cases = [(kind, alone) for kind in vocabularies]
    cases += [("bf16", with_all), ("fp32", with_all), ("bf16", with_split)]
    for kind, kernels in cases:
        vocab, everything = vocabularies[kind], kernels is not alone
        for part, kernel in kernels.items():
            constexprs: dict[str, object] = {} if everything else {f"{name}_ptr": None for name in optional}
            constexprs |= {
                "GROUPS": vocab // _group_size(vocab), "GROUP": _group_size(vocab),
                "LIST": LIST, "CHUNKS": _CHUNKS, "TILES": vocab // (_CHUNKS * SAMPLE_CHUNK),
                "CHANGED_WORDS": 0 if kernels is with_split else CHANGED_WORDS, "PROCESSES": everything,
                "OVERLAPS": True,
            }  # fmt: skip
            constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
            signature = {}
            for name in kernel.arg_names:
                tensor = name.removesuffix("_ptr")
                if name in constexprs:
                    signature[name] = "constexpr"
                elif tensor == name:
                    signature[name] = "i32"
                else:
                    signature[name] = {"logits": f"*{kind}", "seeds": "*i64"}.get(
                        tensor, "*fp32" if tensor in floats else "*i32"
                    )
            divisible = tuple(n for n in signature if n in ("vocab_size", "stride_logits") or n.endswith("_ptr"))
            divisible = tuple(n for n in divisible if n not in constexprs)
            specs.append(
                CompileSpec(
                    f"sample_{part}_{kind}{'_all' if everything else ''}", kernel, signature, constexprs,
                    _CHUNK_WARPS if part.startswith("chunks") else _ROW_WARPS, 3, divisible=divisible,
                    max_spill={"truncated": _ROW_SPILL, "chunks_with_split": _CHUNK_FRAME}.get(part, 0),
                    maxnreg=None if part.startswith("chunks") else _ROW_REGISTERS,
                )
            )  # fmt: skip
    return specs
