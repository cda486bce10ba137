"""Token history of each sequence for penalties, on the device, indexed by request index."""

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

_SLICES = 8  # programs per row, each with a part of the vocabulary
_BLOCK = 1024
_NUM_WARPS = 4


def state_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a bitmap with one bit per token."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Token history of each sequence, in persistent tensors indexed by request index.

    seen    [max_reqs, ceil(vocab / 32)]  int32  bit t % 32 of word t // 32 is set if prompt or output have token t
    counts  [max_reqs, vocab]             int32  number of times each token is in the output

    `sample` reads the bits of rows with penalties, and the counts of tokens whose bits are set. With top-k, it usually
    reads only the counts of tokens that may be kept. `record_tokens` writes both tensors.
    """

    seen: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, vocab_size: int, device: torch.device) -> PenaltyState:
        """Allocate empty state, which takes 4.125 bytes per request index and vocabulary entry."""
        return cls(
            torch.zeros((max_reqs, state_words(vocab_size)), dtype=torch.int32, device=device),
            torch.zeros((max_reqs, vocab_size), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties per row, as in vLLM and transformers, and the token history that they use.

    repetition  [rows]  float32  divides positive logits of tokens in prompt or output, and multiplies the others;
                                 off if 1, 0 or less, or not finite
    presence    [rows]  float32  subtracted from logits of tokens in the output; off if 0 or not finite
    frequency   [rows]  float32  subtracted for each time the token is in the output; off if 0 or not finite
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


@triton.jit(do_not_specialize=["num_tokens", "state_rows", "vocab_size", "amount"])
def _record_tokens_kernel(
    tokens_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    req_indices_ptr,
    prompt_lens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    counts_ptr,
    num_tokens,
    state_rows,
    vocab_size,
    amount,  # 1 adds the tokens, -1 removes them
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    req_index = tl.load(req_indices_ptr + row)
    _, _, _, penalised = penalties_of(row, repetition_ptr, presence_ptr, frequency_ptr)
    start = tl.maximum(tl.load(query_start_loc_ptr + row), 0)
    end = tl.minimum(tl.load(query_start_loc_ptr + row + 1), num_tokens)
    if (penalised & (req_index >= 0) & (req_index < state_rows)) & (start < end):
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
        first_position = tl.load(seq_lens_ptr + row) - (end - start)
        if (first_position == 0) & (amount > 0):
            zeros = tl.zeros([BLOCK], tl.int32)
            for at in range(first_word, end_word, BLOCK):
                tl.store(seen_row_ptr + at + lanes, zeros, mask=at + lanes < end_word)
            for at in range(first_token, end_token, BLOCK):
                tl.store(counts_row_ptr + at + lanes, zeros, mask=at + lanes < end_token)
            tl.debug_barrier()  # threads count in words that others have cleared
        prompt_len = tl.load(prompt_lens_ptr + row)
        for at in range(start, end, BLOCK):
            token = tl.load(tokens_ptr + at + lanes, mask=at + lanes < end, other=-1)
            mine = (token >= first_token) & (token < end_token)
            token = tl.where(mine, token, 0).to(tl.int32)
            # A token may occur several times in a block.
            bit = tl.full([BLOCK], 1, tl.int32) << (token % 32)
            tl.atomic_or(seen_row_ptr + token // 32, bit, mask=mine, sem="relaxed")
            is_output = first_position + (at - start) + lanes >= prompt_len
            change = tl.full([BLOCK], 0, tl.int32) + amount
            tl.atomic_add(counts_row_ptr + token, change, mask=mine & is_output, sem="relaxed")


@dataclass(frozen=True, slots=True)
class _Call:
    tokens: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    req_indices: torch.Tensor
    prompt_lens: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    seen: Written
    counts: Written
    amount: int


_launch_kernel = KernelLauncher(_record_tokens_kernel)


def _launch(call: _Call) -> None:
    if not call.req_indices.shape[0]:
        return
    _launch_kernel(
        (call.req_indices.shape[0], _SLICES), call.tokens, call.query_start_loc, call.seq_lens, call.req_indices,
        call.prompt_lens, call.repetition, call.presence, call.frequency, call.seen, call.counts, call.tokens.shape[0],
        *call.counts.shape, call.amount, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


_op = DeclaredOp("record_tokens", _Call, triton_impl=_launch, reference=record_tokens_reference)


def record_tokens(
    tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    req_indices: torch.Tensor,
    prompt_lens: torch.Tensor,
    penalties: Penalties,
    *,
    take_back: bool = False,
) -> None:
    """Record the tokens of a step in the state of its requests, before `sample` of that step.

    tokens           [n]         int64  input ids of the step; tokens outside the vocabulary are ignored
    query_start_loc  [rows + 1]  int32  row r has tokens query_start_loc[r] to query_start_loc[r + 1]
    seq_lens         [rows]      int32  length of each sequence including these tokens, which gives their positions
    req_indices      [rows]      int32  distinct; a row is skipped if it is out of range, such as -1 in padding
    prompt_lens      [rows]      int32  tokens from this position on are output tokens, which are counted
    take_back        undo an earlier call with the same arguments, for a failed step, by subtracting its counts. Bits
                     stay set, because the repeated step has the same tokens

    Example: a prompt of 3 tokens in one step, then one token per step. The first call clears the state, because its
    first token has position 0, and records the prompt. Each later call counts one output token.

    Rows without penalties are skipped, so tokens from before penalties are enabled are not recorded. Record a cached
    prefix by a separate call, before the first step.
    Capture-safe: the grid depends on shapes only. Raises: ShapeError.
    """
    check_tensor("req_indices", req_indices, shape=(None,), dtype=torch.int32)
    rows, device = req_indices.shape[0], req_indices.device
    check_tensor("tokens", tokens, shape=(None,), dtype=torch.int64, device=device)
    check_tensor("query_start_loc", query_start_loc, shape=(rows + 1,), dtype=torch.int32, device=device)
    check_tensor("seq_lens", seq_lens, shape=(rows,), dtype=torch.int32, device=device)
    check_tensor("prompt_lens", prompt_lens, shape=(rows,), dtype=torch.int32, device=device)
    named = {"req_indices": req_indices, "tokens": tokens, "query_start_loc": query_start_loc, "seq_lens": seq_lens}
    for name, tensor in {**named, "prompt_lens": prompt_lens}.items():
        check_unit_stride(name, tensor)
    counts = penalties.state.counts
    check_tensor("state.counts", counts, shape=(None, None))
    of_rows = penalties.checked(rows, counts.shape[1], device)
    _op(_Call(tokens, query_start_loc, seq_lens, req_indices, prompt_lens, **of_rows, amount=-1 if take_back else 1))


def compile_variants() -> list[CompileSpec]:
    """Return the only variant."""
    floats = ("repetition_ptr", "presence_ptr", "frequency_ptr")
    types = {"tokens_ptr": "*i64", **dict.fromkeys(floats, "*fp32")}
    return [
        CompileSpec("record_tokens", _record_tokens_kernel, types, {"BLOCK": _BLOCK}, _NUM_WARPS, 3, max_registers=128)
    ]
