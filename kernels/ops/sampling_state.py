"""The tokens of each sequence as penalties need them, kept on the device by row id."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.op_declaration import DeclaredOp, Written
from graphrt.kernels.ops.sampling_logits import penalties_of
from graphrt.kernels.ops.sampling_reference import record_tokens_reference

_SLICES = 8  # programs of a row; each keeps a part of the vocabulary
_BLOCK = 1024
_NUM_WARPS = 4


def state_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit per token."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Which tokens each sequence has: persistent, by row id.

    seen    [max_rows, ceil(vocab / 32)]  int32  bit t % 32 of word t // 32: token t is in the prompt or the output
    counts  [max_rows, vocab]             int32  how often a token is in the output

    `sample` reads the bits of a row that is penalised, and counts where a bit is set. With top-k it mostly reads counts
    of the few such tokens that may be kept. `record_tokens` writes both.
    """

    seen: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> PenaltyState:
        """State without any token, of 4.125 bytes per row and vocabulary entry."""
        return cls(
            torch.zeros((max_rows, state_words(vocab_size)), dtype=torch.int32, device=device),
            torch.zeros((max_rows, vocab_size), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties per row, as vLLM and transformers define them, and the state that they read.

    repetition  [rows]  float32  logits above 0 of tokens in prompt or output are divided by it, others multiplied;
                                 1: off, also where it is 0 or less, or not finite
    presence    [rows]  float32  subtracted from logits of tokens in the output; 0, or not finite: off
    frequency   [rows]  float32  subtracted for each time the token is in the output; 0, or not finite: off
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    state: PenaltyState

    def checked(self, rows: int, vocab: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors by name. Raises: ShapeError where one does not fit."""
        of_rows = {"repetition": self.repetition, "presence": self.presence, "frequency": self.frequency}
        for name, tensor in of_rows.items():
            check_tensor(name, tensor, shape=(rows,), dtype=torch.float32, device=device)
            check_unit_stride(name, tensor)
        seen, counts = self.state.seen, self.state.counts
        check_tensor("state.counts", counts, shape=(None, vocab), dtype=torch.int32, device=device)
        check_tensor("state.seen", seen, shape=(counts.shape[0], state_words(vocab)), dtype=torch.int32, device=device)
        for name, tensor in {"state.counts": counts, "state.seen": seen}.items():
            if not tensor.is_contiguous():
                raise ShapeError(
                    f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}; allocate it by itself"
                )
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
    amount,  # 1 counts the tokens, -1 takes them back
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    req_index = tl.load(req_indices_ptr + row)
    _, _, _, penalised = penalties_of(row, repetition_ptr, presence_ptr, frequency_ptr)
    start = tl.maximum(tl.load(query_start_loc_ptr + row), 0)
    end = tl.minimum(tl.load(query_start_loc_ptr + row + 1), num_tokens)
    if (penalised & (req_index >= 0) & (req_index < state_rows)) & (start < end):
        # A program has a slice of the vocabulary to itself, so clearing and counting need no other program.
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
            tl.debug_barrier()  # other threads of the program count where these have cleared
        prompt_len = tl.load(prompt_lens_ptr + row)
        for at in range(start, end, BLOCK):
            token = tl.load(tokens_ptr + at + lanes, mask=at + lanes < end, other=-1)
            mine = (token >= first_token) & (token < end_token)
            token = tl.where(mine, token, 0).to(tl.int32)
            # A token may stand several times in a block.
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


def _launch(call: _Call) -> None:
    if not call.req_indices.shape[0]:
        return
    _record_tokens_kernel[(call.req_indices.shape[0], _SLICES)](
        call.tokens, call.query_start_loc, call.seq_lens, call.req_indices, call.prompt_lens, call.repetition,
        call.presence, call.frequency, call.seen, call.counts, call.tokens.shape[0], *call.counts.shape, call.amount,
        BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _reference(call: _Call) -> None:
    record_tokens_reference(
        call.tokens, call.query_start_loc, call.seq_lens, call.req_indices, call.prompt_lens, call.repetition,
        call.presence, call.frequency, call.seen, call.counts, call.amount,
    )  # fmt: skip


_op = DeclaredOp("record_tokens", _Call, triton_impl=_launch, reference=_reference)


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
    """Enter the tokens that a step computes into the state of its rows, before `sample` of that step.

    tokens           [n]         int64  the step's input ids; those outside of the vocabulary are ignored
    query_start_loc  [rows + 1]  int32  row r has tokens query_start_loc[r] to query_start_loc[r + 1]
    seq_lens         [rows]      int32  length of the sequence with these tokens: says their positions
    req_indices          [rows]      int32  distinct; an id that is not there, as -1 in pads: the row is skipped
    prompt_lens      [rows]      int32  tokens from this position on are output tokens, and counted
    take_back        undo a call with the same arguments, of a step that failed: its output tokens count once less. The
                     tokens stay seen, as the same step again sees the same ones

    Example: a prompt of 3 tokens in one step, then a token per step, each the one sampled before. The first call clears
    the row, since its first token has position 0, and enters the prompt. Each later call counts one output token.

    Rows whose penalties are all off are skipped. A sequence whose penalties are switched on while it runs has lost the
    tokens before. Tokens that no step computes, as after a hit in a prefix cache, take a call of their own, before.
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
    """The one kernel."""
    floats = ("repetition_ptr", "presence_ptr", "frequency_ptr")
    signature = {
        name: "*fp32" if name in floats else "*i32" if name.endswith("_ptr") else "i32"
        for name in _record_tokens_kernel.arg_names
    }
    signature |= {"tokens_ptr": "*i64", "BLOCK": "constexpr"}
    return [
        CompileSpec(
            "record_tokens", _record_tokens_kernel, signature, {"BLOCK": _BLOCK}, _NUM_WARPS, 3, max_registers=128
        )
    ]
