"""Sampling inside the graph: a token per row from its logits.

    sample(logits, temperatures, seeds, seq_lens)                                          # greedy and temperature
    sample(logits, temperatures, seeds, seq_lens, truncation=Truncation(top_k, top_p, min_p))

A draw from softmax(logits / temperature) is the argmax of logits + temperature * Gumbel noise (Gumbel-max). The noise
comes from Philox, a counter-based generator, at (seed, vocabulary index, position): from equal logits a row
draws the same token wherever it stands and whatever the batch is padded to, and no generator is kept between steps.
The highest noise of 32 neighbours is drawn before theirs, so that one word dismisses them: see `noise_reference`.

Logits are processed as vLLM does it, in float32: token mask, bias, penalties, temperature, min-p, top-k, top-p. A row
that uses none of these costs what greedy and temperature sampling cost.

    sample_split      beside the first pass, where rows may have mask, bias or penalties: the tokens that these change
    sample_chunks     first pass: every logit is read once, and the highest of 32 neighbours is left
    sample_rows       second pass: rows that keep all tokens, or what min-p leaves
    sample_truncated  third pass, where rows may truncate: those that do, by top-k or top-p

The first and the last of them are CUDA C++ (`sampling_native.py`). Where it does not run, Triton kernels take their
place: programs of the first pass find the changed tokens then.

Penalties mostly lower tokens. Where they alone change a row, and top-k keeps few of its tokens, no processed logit is
higher than what the model gave. Then the first pass leaves nothing out, and `sample_split` has nothing to do. The third
pass lists somewhat more than top-k tokens, and processes those of them that have occurred: see `processes_late`.
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
"""Largest vocabulary that `sample` takes: what a row's parts found is compared by one program."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CHUNK_WARPS = 4
_ROW_WARPS = 8
_ROW_REGISTERS = 128  # keep two rows on a multiprocessor
_CHUNK_FRAME = 8  # bytes that the first pass sets aside in memory where its bits are read early: nothing touches them
_ROW_SPILL = 1024  # bytes that wait in memory meanwhile: what loops need that do not run for most rows
_CHUNKS = 2  # of a tile of the first pass, once chunks are more than _PROGRAMS
_PROGRAMS = 2048
_MAX_GROUPS = 4096  # of a row; in larger vocabularies groups are larger


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens a draw may choose, per row: min-p, top-k and top-p, in this order.

    top_k  [rows]  int32    the k best; 0 or less, or the vocabulary's size or more: off; 1: greedy
    top_p  [rows]  float32  the fewest best that hold top_p of the probability, after min-p and top-k; 1 or more, or
                            NaN: off; 0 or less: greedy
    min_p  [rows]  float32  those with at least min_p times the best one's probability; 0 or less, or NaN: off; values
                            above 1 count as 1

    Tokens of equal logits are kept or dropped together, so ties at a bound are kept.
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
    """Which tokens are allowed, as grammars say it.

    words  [masks, ceil(vocab / 32)]  int32  bit t % 32 of word t // 32 is set: token t is allowed
    index  [rows]                     int32  the mask that a row uses; -1, or any that is not there: none
    """

    words: torch.Tensor
    index: torch.Tensor


def _group_size(vocab: int) -> int:
    """Neighbouring tokens that a row knows the highest logit of, and bounds the noise of."""
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
    # Nothing that a row draws depends on how large the tiles are.
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
    changed_best, changed_mass = group_best, group_mass  # in their place while no row has changed tokens
    if processes and native:
        split = SplitRows.allocate(rows, groups, group, device)
        changed_best = split.best
    elif processes:
        plain_words = torch.empty((rows, groups * group // 32), dtype=torch.int32, device=device)
        changed_best = torch.empty_like(group_best)
        changed_mass = torch.empty_like(group_best) if top_k is not None else None
        programs += ceil_div(groups * group // 32, CHANGED_WORDS)
    ints, floats = list_groups, group_best  # in the place of tables that no row uses, while some row may use others
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
    """One token per row: argmax at temperature 0, else a draw from softmax(logits / temperature).

    logits        [rows, vocab]  float16, bfloat16 or float32  device; rows may be strided; not written
    temperatures  [rows]         float32  0 (or less, or NaN): argmax, the lowest index of equal logits
    seeds         [rows]         int64    key of the row's random numbers
    seq_lens      [rows]         int32    position of the draw; the same seed and position draw the same noise
    req_indices       [rows]         int32    where penalties and bias find a row's state; needed by them. An id that is
                                          not there, as -1 in pads: neither of them
    returns       [rows]         int32    NO_TOKEN where no token is possible

    Truncation, penalties, bias and token mask say per row whether the row uses them; None: no row does. A draw among
    the kept tokens has the noise of a draw among all, so a row without truncation draws the same token either way.
    NaN and -inf logits are never chosen.
    Capture-safe: no generator state; random numbers are a function of seed, position and vocabulary index. What a row
    gets does not depend on other rows or on their number.
    Raises: ShapeError when a tensor does not fit the others, or the vocabulary is larger than MAX_VOCAB_SIZE.
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
        raise ShapeError("req_indices: expected a tensor beside penalties or bias, got None; pass the batch's row ids")
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
        raise ShapeError(f"logits: expected a vocabulary of 1 to {MAX_VOCAB_SIZE}, got {vocab}; sample in the caller")
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
        raise ShapeError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}; copy it once")


def compile_variants() -> list[CompileSpec]:
    """All passes: from each logits dtype alone, with everything, and at the largest vocabulary."""
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
    beside_split = {"chunks_beside_split": sample_chunks_kernel}
    cases = [(kind, alone) for kind in vocabularies]
    cases += [("bf16", with_all), ("fp32", with_all), ("bf16", beside_split)]
    for kind, kernels in cases:
        vocab, everything = vocabularies[kind], kernels is not alone
        for part, kernel in kernels.items():
            constexprs: dict[str, object] = {} if everything else {f"{name}_ptr": None for name in optional}
            constexprs |= {
                "GROUPS": vocab // _group_size(vocab), "GROUP": _group_size(vocab),
                "LIST": LIST, "CHUNKS": _CHUNKS, "TILES": vocab // (_CHUNKS * SAMPLE_CHUNK),
                "CHANGED_WORDS": 0 if kernels is beside_split else CHANGED_WORDS, "PROCESSES": everything,
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
                    max_spill={"truncated": _ROW_SPILL, "chunks_beside_split": _CHUNK_FRAME}.get(part, 0),
                    maxnreg=None if part.startswith("chunks") else _ROW_REGISTERS,
                )
            )  # fmt: skip
    return specs
