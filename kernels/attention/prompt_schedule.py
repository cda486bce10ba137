"""The schedule of a prompt part: which units there are, those that see most first.

It is made on the device, once per step. All layers with as many query heads per KV head share it, whatever their
windows: a kernel finds a unit's tiles by itself.

The layout, in int32 words, is a header of UNIT_WORDS: the number of units, and two counters, which are 0 between the
launches of the CUDA kernel. Then UNIT_WORDS per unit:

    0 row           -1: pad tokens, from the last value of query_start_loc on
    1 first_query   the unit's queries are numbered first_query to first_query + block_m - 1 within their row, as
                    token * group + head
    2 first_token   where the row's new tokens begin
    3 query_len     new tokens of the row
    4 seq_len       keys of the row, those of the new tokens included
    5 kv_start      where the row's keys begin, for keys that lie packed; else 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.attention.prompt_plan import UNIT_WORDS, PromptPlan
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp, Written

_UNIT_WORDS = tl.constexpr(UNIT_WORDS)
_UNITS_OF_PROGRAM, _ROWS_AT_A_TIME, _NUM_WARPS = 32, 64, 4


@triton.jit
def _load_rows(
    rows, lens_ptr, starts_ptr, num_rows, num_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """first_token, query_len, seq_len, kv_start and number of units of `rows`; row num_rows is the padding."""
    is_row = rows < num_rows
    exists = rows <= num_rows
    begin = tl.load(starts_ptr + rows, mask=exists, other=0)
    end = tl.load(starts_ptr + rows + 1, mask=is_row, other=num_tokens)
    query_len = tl.where(exists, end - begin, 0)
    seq_len = tl.load(lens_ptr + rows, mask=is_row, other=0)
    kv_start = tl.zeros_like(seq_len)
    if PACKED:
        kv_start = seq_len
        seq_len = tl.load(lens_ptr + rows + 1, mask=is_row, other=0) - kv_start
    return begin, query_len, seq_len, kv_start, (query_len * GROUP + BLOCK_M - 1) // BLOCK_M


@triton.jit
def _units_beyond(end, query_len, seq_len, num_units, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """How many units of a row see a position of at least `end`."""
    if CAUSAL:
        # Unit j ends with the token of query (j + 1) * BLOCK_M - 1, or with the row's last one.
        token = end - (seq_len - query_len)
        first = (tl.maximum(token, 0) * GROUP + BLOCK_M) // BLOCK_M - 1
        return tl.where(token < query_len, tl.maximum(num_units - first, 0), 0)
    else:
        return tl.where(seq_len > end, num_units, 0)


@triton.jit
def prompt_schedule_kernel(
    lens_ptr,  # seq_lens [rows], or kv_start_loc [rows + 1]
    starts_ptr,  # query_start_loc [rows + 1]
    schedule_ptr,
    num_rows,
    num_tokens,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)

    # 1. The row of each unit, units being numbered row by row: as many rows as end at the unit or before.
    row = tl.zeros([UNITS], tl.int32)
    begin_unit = tl.zeros([UNITS], tl.int32)
    total = 0
    for first in tl.range(0, num_rows + 1, ROWS, num_stages=1):
        rows = first + tl.arange(0, ROWS)
        _, _, _, _, counts = _load_rows(rows, lens_ptr, starts_ptr, num_rows, num_tokens, GROUP, BLOCK_M, PACKED)
        ends = total + tl.cumsum(counts, 0)
        over = ends[None, :] <= units[:, None]
        row += tl.sum(over.to(tl.int32), 1)
        begin_unit = tl.maximum(begin_unit, tl.max(tl.where(over, ends[None, :], 0), 1))
        total += tl.sum(counts, 0)

    # 2. The last position that each unit sees, which is what it costs.
    first_token, query_len, seq_len, kv_start, num_units = _load_rows(
        row, lens_ptr, starts_ptr, num_rows, num_tokens, GROUP, BLOCK_M, PACKED
    )
    index = units - begin_unit
    end = seq_len - 1
    if CAUSAL:
        end = seq_len - query_len + tl.minimum(((index + 1) * BLOCK_M - 1) // GROUP, query_len - 1)

    # 3. Its place: behind the units that see more, those of earlier rows that see as much, and later ones of its row.
    place = num_units - 1 - index
    for first in tl.range(0, num_rows + 1, ROWS, num_stages=1):
        rows = first + tl.arange(0, ROWS)
        _, other_query_len, other_seq_len, _, counts = _load_rows(
            rows, lens_ptr, starts_ptr, num_rows, num_tokens, GROUP, BLOCK_M, PACKED
        )
        least = end[:, None] + tl.where(rows[None, :] < row[:, None], 0, 1)
        ahead = _units_beyond(
            least, other_query_len[None, :], other_seq_len[None, :], counts[None, :], GROUP, BLOCK_M, CAUSAL
        )
        place += tl.sum(tl.where(rows[None, :] == row[:, None], 0, ahead), 1)

    unit_ptr = schedule_ptr + _UNIT_WORDS * (1 + place)
    exists = units < total
    tl.store(unit_ptr, tl.where(row < num_rows, row, -1), mask=exists)
    tl.store(unit_ptr + 1, index * BLOCK_M, mask=exists)
    tl.store(unit_ptr + 2, first_token, mask=exists)
    tl.store(unit_ptr + 3, query_len, mask=exists)
    tl.store(unit_ptr + 4, seq_len, mask=exists)
    tl.store(unit_ptr + 5, kv_start, mask=exists)
    if tl.program_id(0) == 0:
        tl.store(schedule_ptr, total)
        tl.store(schedule_ptr + 1, 0)
        tl.store(schedule_ptr + 2, 0)


@dataclass(frozen=True, slots=True)
class _ScheduleCall:
    lens: torch.Tensor
    query_start_loc: torch.Tensor
    schedule: Written
    packed: bool
    plan: PromptPlan


_launch_kernel = KernelLauncher(prompt_schedule_kernel)


def _launch(call: _ScheduleCall) -> None:
    plan = call.plan
    _launch_kernel(
        (-(-plan.max_units // _UNITS_OF_PROGRAM),),
        call.lens,
        call.query_start_loc,
        call.schedule,
        plan.num_rows,
        plan.num_tokens,
        **_constexprs(plan, call.packed),
        num_warps=_NUM_WARPS,
    )


def _constexprs(plan: PromptPlan, packed: bool) -> dict[str, object]:
    return {
        "GROUP": plan.group,
        "BLOCK_M": plan.block_m,
        "CAUSAL": plan.causal,
        "PACKED": packed,
        "UNITS": _UNITS_OF_PROGRAM,
        "ROWS": _ROWS_AT_A_TIME,
    }


def _reference(call: _ScheduleCall) -> None:
    units = sorted(_units(call), key=lambda unit: unit[0], reverse=True)  # a stable order
    call.schedule[:3] = torch.tensor([len(units), 0, 0], device="cpu")
    for place, (_, *words) in enumerate(units, 1):
        call.schedule[place * UNIT_WORDS : place * UNIT_WORDS + len(words)] = torch.tensor(words, device="cpu")


def _units(call: _ScheduleCall) -> Iterator[tuple[int, ...]]:
    """The last position that a unit sees, and its words; row by row, the later units of a row first."""
    plan, starts, lens = call.plan, call.query_start_loc.tolist(), call.lens.tolist()
    for row in range(plan.num_rows + 1):
        is_row = row < plan.num_rows
        query_len = (starts[row + 1] if is_row else plan.num_tokens) - starts[row]
        kv_start = lens[row] if call.packed and is_row else 0
        seq_len = (lens[row + 1] - kv_start if call.packed else lens[row]) if is_row else 0
        for first_query in reversed(range(0, query_len * plan.group, plan.block_m)):
            last_token = min((first_query + plan.block_m - 1) // plan.group, query_len - 1)
            end = seq_len - query_len + last_token if plan.causal else seq_len - 1
            yield end, row if is_row else -1, first_query, starts[row], query_len, seq_len, kv_start


_schedule = DeclaredOp("schedule_prompt", _ScheduleCall, triton_impl=_launch, reference=_reference)


def schedule_prompt(
    plan: PromptPlan,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    schedule: torch.Tensor,
    *,
    seq_lens_are_starts: bool = False,
) -> None:
    """Write the units of a prompt part, for `prompt_attention` with the same plan.

    seq_lens          [rows]  keys of each row, those of the new tokens included                    int32
                      [rows + 1]  with seq_lens_are_starts: where each row's keys begin, packed     int32
    query_start_loc   [rows + 1]  where each row's new tokens begin                                 int32
    schedule          [plan.schedule_words] or longer                                               int32, written

    Tokens before query_start_loc[0] have no units, and are left to another kernel. The caller guarantees that
    query_start_loc does not decrease, and ends at plan.num_tokens or before.

    Capture-safe: one launch, no sync, no allocation; the grid depends on the plan only.

    Raises: ShapeError, CapacityError.
    """
    device = seq_lens.device
    rows = plan.num_rows + seq_lens_are_starts
    check_tensor("seq_lens", seq_lens, shape=(rows,), dtype=torch.int32, device=device)
    check_tensor("query_start_loc", query_start_loc, shape=(plan.num_rows + 1,), dtype=torch.int32, device=device)
    check_schedule(plan, schedule, device)
    named = [("seq_lens", seq_lens), ("query_start_loc", query_start_loc)]
    for name, tensor in named:
        check_unit_stride(name, tensor)
    _schedule(_ScheduleCall(seq_lens, query_start_loc, schedule, seq_lens_are_starts, plan))


def check_schedule(plan: PromptPlan, schedule: torch.Tensor, device: torch.device) -> None:
    """Raise ShapeError or CapacityError unless `schedule` holds the units of the plan."""
    check_tensor("schedule", schedule, shape=(None,), dtype=torch.int32, device=device)
    check_unit_stride("schedule", schedule)
    if schedule.numel() < plan.schedule_words:
        raise CapacityError(
            f"schedule: expected at least {plan.schedule_words} elements for this plan, got {schedule.numel()}; "
            "allocate plan.schedule_words for the largest plan"
        )


def compile_variants() -> list[CompileSpec]:
    """Kernel variants that a test compiles without a GPU."""
    specs = []
    for name, causal, packed in (("causal", True, False), ("bidirectional", False, True)):
        plan = PromptPlan.make(
            64, 2048, num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, num_sms=132, causal=causal
        )
        constexprs = _constexprs(plan, packed)
        pointers = [argument for argument in prompt_schedule_kernel.arg_names if argument.endswith("_ptr")]
        signature = {
            argument: "constexpr" if argument in constexprs else "*i32" if argument in pointers else "i32"
            for argument in prompt_schedule_kernel.arg_names
        }
        specs.append(
            CompileSpec(
                f"prompt_schedule_{name}", prompt_schedule_kernel, signature, constexprs, _NUM_WARPS, 1,
                divisible=tuple(pointers),
            )
        )  # fmt: skip
    return specs
