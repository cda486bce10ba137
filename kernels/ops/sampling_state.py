"""Tokens of each sequence, and their counts for penalties, on the device, indexed by request index.

The counts are a function of the tokens: those of `history[:lens]`. So a request may step back, for example because its
last tokens were drafts that a caller rejected, and a failed step may be repeated. The next step first removes the
counts of all tokens at and after its first position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_contiguous, check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.sampling_logits import penalties_of
from graphrt.kernels.ops.sampling_reference import record_tokens_reference
from graphrt.kernels.types import NO_TOKEN

_SLICES = 8  # programs per row, each with a part of the vocabulary
_BLOCK = 1024
_NUM_WARPS = 4


def state_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a bitmap with one bit per token."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Tokens of each sequence and their counts, in persistent tensors indexed by request index.

    seen     [max_reqs, ceil(vocab / 32)]  int32  bit t % 32 of word t // 32 is set if the prompt or the output contains
             token t
    counts   [max_reqs, vocab]             int32  number of times each token is in the output
    history  [max_reqs, max_len]           int32  token at each position; NO_TOKEN where none was recorded
    lens     [max_reqs]                    int32  number of tokens of `history` that `seen` and `counts` include

    `sample` reads the bits of rows with penalties, and the counts of tokens whose bits are set. With top-k, it usually
    reads only the counts of tokens that may be kept. `record_tokens` writes all four tensors.
    """

    seen: torch.Tensor
    counts: torch.Tensor
    history: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, vocab_size: int, max_len: int, device: torch.device) -> PenaltyState:
        """Allocate empty state: 4.125 bytes per request index and vocabulary entry, and 4 per position."""
        return cls(
            torch.zeros((max_reqs, state_words(vocab_size)), dtype=torch.int32, device=device),
            torch.zeros((max_reqs, vocab_size), dtype=torch.int32, device=device),
            torch.full((max_reqs, max_len), NO_TOKEN, dtype=torch.int32, device=device),
            torch.zeros(max_reqs, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties per row, as in vLLM and transformers, and the token history that they use.

    repetition  [rows]  float32  divides positive logits of tokens in prompt or output, and multiplies their other
                                 logits; off if 1, 0 or less, or not finite
    presence    [rows]  float32  subtracted from logits of tokens in the output; off if 0 or not finite
    frequency   [rows]  float32  subtracted once per occurrence of the token in the output; off if 0 or not finite
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    state: PenaltyState

    def checked(self, rows: int, vocab: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the tensors by name. Raises: ShapeError: if a tensor has the wrong shape, dtype or device."""
        of_rows = {"repetition": self.repetition, "presence": self.presence, "frequency": self.frequency}
        for name, tensor in of_rows.items():
            check_tensor(name, tensor, shape=(rows,), dtype=torch.float32, device=device)
            check_unit_stride(name, tensor)
        seen, counts = self.state.seen, self.state.counts
        check_tensor("state.counts", counts, shape=(None, vocab), dtype=torch.int32, device=device)
        check_tensor("state.seen", seen, shape=(counts.shape[0], state_words(vocab)), dtype=torch.int32, device=device)
        for name, tensor in {"state.counts": counts, "state.seen": seen}.items():
            check_contiguous(name, tensor)
        return {**of_rows, "seen": seen, "counts": counts}


@triton.jit
def _change_counts(
    sequence_ptr, seen_ptr, counts_ptr, start, end, prompt_len, first_token, end_token, SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add (SIGN 1) or remove (-1) the tokens at positions `start` to `end` of one sequence, of a vocabulary slice.

    `sequence_ptr` is the address of position 0. Removing a token clears its bit once its count is 0. The caller sets
    the bits of prompt tokens again.
    """
    for base in range(start, end, BLOCK):
        positions = base + tl.arange(0, BLOCK)
        token = tl.load(sequence_ptr + positions, mask=positions < end, other=-1)
        mine = (token >= first_token) & (token < end_token)
        token = tl.where(mine, token, 0).to(tl.int32)
        bit = tl.full([BLOCK], 1, tl.int32) << (token % 32)  # a token may occur several times in a block
        is_output = positions >= prompt_len
        if SIGN > 0:
            tl.atomic_or(seen_ptr + token // 32, bit, mask=mine, sem="relaxed")
            one = tl.full([BLOCK], 1, tl.int32)
            tl.atomic_add(counts_ptr + token, one, mask=mine & is_output, sem="relaxed")
        else:
            change = tl.where(is_output, -1, 0)
            before = tl.atomic_add(counts_ptr + token, change, mask=mine, sem="relaxed")
            tl.atomic_and(seen_ptr + token // 32, ~bit, mask=mine & (before + change == 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "state_rows", "vocab_size", "max_len"])
def _record_tokens_kernel(
    tokens_ptr,
    query_start_loc_ptr,
    last_ptr,
    lens_ptr,
    req_indices_ptr,
    prompt_lens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    counts_ptr,
    history_ptr,
    counted_ptr,
    num_tokens,
    state_rows,
    vocab_size,
    max_len,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    req_index = tl.load(req_indices_ptr + row)
    _, _, _, penalized = penalties_of(row, repetition_ptr, presence_ptr, frequency_ptr)
    start = tl.maximum(tl.load(query_start_loc_ptr + row), 0)
    end = tl.minimum(tl.load(last_ptr + row).to(tl.int32) + 1, num_tokens)
    if (penalized & (req_index >= 0) & (req_index < state_rows)) & (start < end):
        # Each program owns a slice of the vocabulary, so programs need no synchronization to clear and count.
        words = (vocab_size + 31) // 32
        per_slice = tl.cdiv(words, tl.num_programs(1))
        first_word = tl.program_id(1) * per_slice
        end_word = tl.minimum(first_word + per_slice, words)
        first_token = first_word * 32
        end_token = tl.minimum(end_word * 32, vocab_size)
        seen_row_ptr = seen_ptr + req_index.to(tl.int64) * words
        counts_row_ptr = counts_ptr + req_index.to(tl.int64) * vocab_size
        lanes = tl.arange(0, BLOCK)
        first_position = tl.load(lens_ptr + row) - (end - start)
        prompt_len = tl.load(prompt_lens_ptr + row)
        history_row_ptr = history_ptr + req_index.to(tl.int64) * max_len
        known_to = tl.minimum(first_position, max_len)
        counted = tl.where(first_position == 0, 0, tl.load(counted_ptr + req_index))
        if counted == 0:  # a new sequence, or one whose penalties were off
            zeros = tl.zeros([BLOCK], tl.int32)
            for at in range(first_word, end_word, BLOCK):
                tl.store(seen_row_ptr + at + lanes, zeros, mask=at + lanes < end_word)
            for at in range(first_token, end_token, BLOCK):
                tl.store(counts_row_ptr + at + lanes, zeros, mask=at + lanes < end_token)
            tl.debug_barrier()  # threads count in words that others have cleared
        _change_counts(
            history_row_ptr, seen_row_ptr, counts_row_ptr, counted, known_to, prompt_len, first_token, end_token, 1,
            BLOCK,
        )  # fmt: skip
        if counted > first_position:
            _change_counts(
                history_row_ptr, seen_row_ptr, counts_row_ptr, known_to, tl.minimum(counted, max_len), prompt_len,
                first_token, end_token, -1, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()  # threads set bits that others have cleared
            _change_counts(
                history_row_ptr, seen_row_ptr, counts_row_ptr, 0, tl.minimum(known_to, prompt_len), prompt_len,
                first_token, end_token, 1, BLOCK,
            )  # fmt: skip
        _change_counts(
            tokens_ptr + (start - first_position), seen_row_ptr, counts_row_ptr, first_position,
            first_position + (end - start), prompt_len, first_token, end_token, 1, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "state_rows", "max_len"])
def _record_history_kernel(
    tokens_ptr,
    query_start_loc_ptr,
    last_ptr,
    lens_ptr,
    req_indices_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    history_ptr,
    counted_ptr,
    num_tokens,
    state_rows,
    max_len,
    BLOCK: tl.constexpr,
):
    """Store the tokens of a step, after their counts: the counts of replaced tokens are removed before."""
    row = tl.program_id(0)
    req_index = tl.load(req_indices_ptr + row)
    _, _, _, penalized = penalties_of(row, repetition_ptr, presence_ptr, frequency_ptr)
    start = tl.maximum(tl.load(query_start_loc_ptr + row), 0)
    end = tl.minimum(tl.load(last_ptr + row).to(tl.int32) + 1, num_tokens)
    if ((req_index >= 0) & (req_index < state_rows)) & (start < end):
        seq_len = tl.load(lens_ptr + row)
        first_position = seq_len - (end - start)
        counted = tl.load(counted_ptr + req_index)
        # Without penalties, nothing was counted. If counted tokens are replaced, their counts cannot be removed later.
        kept = tl.where(first_position < counted, 0, counted)
        tl.store(counted_ptr + req_index, tl.where(penalized, seq_len, kept))
        for at in range(start, end, BLOCK):
            source = at + tl.arange(0, BLOCK)
            position = first_position + source - start
            mask = (source < end) & (position >= 0) & (position < max_len)
            token = tl.load(tokens_ptr + source, mask=mask, other=0)
            token = tl.where((token >= 0) & (token < (1 << 31)), token, -1).to(tl.int32)
            tl.store(history_ptr + req_index.to(tl.int64) * max_len + position, token, mask=mask)


@dataclass(frozen=True, slots=True)
class _Call:
    tokens: torch.Tensor
    query_start_loc: torch.Tensor
    last: torch.Tensor
    lens: torch.Tensor
    req_indices: torch.Tensor
    prompt_lens: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    seen: Written
    counts: Written
    history: Written
    counted_lens: Written


_launch_counts, _launch_history = KernelLauncher(_record_tokens_kernel), KernelLauncher(_record_history_kernel)


def _launch(call: _Call) -> None:
    rows, num_tokens, max_len = call.req_indices.shape[0], call.tokens.shape[0], call.history.shape[1]
    if not rows:
        return
    of_step = call.tokens, call.query_start_loc, call.last, call.lens, call.req_indices
    penalties = call.repetition, call.presence, call.frequency
    if call.counts.shape[1]:
        _launch_counts(
            (rows, _SLICES), *of_step, call.prompt_lens, *penalties, call.seen, call.counts, call.history,
            call.counted_lens, num_tokens, *call.counts.shape, max_len, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    _launch_history(
        (rows,), *of_step, *penalties, call.history, call.counted_lens, num_tokens, call.counts.shape[0], max_len,
        BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


_op = DeclaredOp("record_tokens", _Call, triton_impl=_launch, reference=record_tokens_reference)


def record_tokens(
    tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    last: torch.Tensor,
    lens: torch.Tensor,
    req_indices: torch.Tensor,
    prompt_lens: torch.Tensor,
    penalties: Penalties,
) -> None:
    """Record the tokens of a step in the state of its requests, before `sample` of that step.

    tokens           [n]         int64  input ids of the step; tokens outside the vocabulary are ignored
    query_start_loc  [rows + 1]  int32  row r's tokens start at query_start_loc[r]
    last             [rows]      int64  index of the last token of each row; drafts may follow it
    lens             [rows]      int32  length of each sequence including these tokens, which gives their positions
    req_indices      [rows]      int32  distinct; a row is skipped if it is out of range, such as -1 in padding
    prompt_lens      [rows]      int32  tokens at and after this position are output tokens, which are counted

    Example: a prompt of 3 tokens in one step, then one token per step. The first call clears the state, because its
    first token has position 0, and records the prompt. Each later call counts one output token. If a call starts before
    the position where the previous call ended, it first removes the tokens at and after this position.

    Tokens of rows without penalties are stored, and counted once the row has penalties. Record a cached prefix by a
    separate call, before the first step.
    Capture-safe: the grid depends on shapes only. Raises: ShapeError.
    """
    check_tensor("req_indices", req_indices, shape=(None,), dtype=torch.int32)
    rows, device = req_indices.shape[0], req_indices.device
    check_tensor("tokens", tokens, shape=(None,), dtype=torch.int64, device=device)
    check_tensor("query_start_loc", query_start_loc, shape=(rows + 1,), dtype=torch.int32, device=device)
    check_tensor("last", last, shape=(rows,), dtype=torch.int64, device=device)
    check_tensor("lens", lens, shape=(rows,), dtype=torch.int32, device=device)
    check_tensor("prompt_lens", prompt_lens, shape=(rows,), dtype=torch.int32, device=device)
    named = {"req_indices": req_indices, "tokens": tokens, "query_start_loc": query_start_loc, "last": last}
    for name, tensor in {**named, "lens": lens, "prompt_lens": prompt_lens}.items():
        check_unit_stride(name, tensor)
    counts = penalties.state.counts
    check_tensor("state.counts", counts, shape=(None, None))
    of_rows = penalties.checked(rows, counts.shape[1], device)
    history, counted = penalties.state.history, penalties.state.lens
    check_tensor("state.history", history, shape=(counts.shape[0], None), dtype=torch.int32, device=device)
    check_tensor("state.lens", counted, shape=(counts.shape[0],), dtype=torch.int32, device=device)
    check_contiguous("state.history", history)
    check_contiguous("state.lens", counted)
    of_step = tokens, query_start_loc, last, lens, req_indices, prompt_lens
    _op(_Call(*of_step, **of_rows, history=history, counted_lens=counted))


def compile_variants() -> list[CompileSpec]:
    """Return the variant of each kernel."""
    floats = ("repetition_ptr", "presence_ptr", "frequency_ptr")
    types = {"tokens_ptr": "*i64", "last_ptr": "*i64", **dict.fromkeys(floats, "*fp32")}
    kernels = {"record_tokens": _record_tokens_kernel, "record_history": _record_history_kernel}
    return [
        CompileSpec(name, kernel, types, {"BLOCK": _BLOCK}, _NUM_WARPS, 3, max_registers=128)
        for name, kernel in kernels.items()
    ]
