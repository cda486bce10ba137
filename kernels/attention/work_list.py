"""The schedule's operator: it writes a work list from `seq_lens`, on the device, for all layers of one window
or chunk size.

docs/attention.md draws the line that is cut; here are its rules. Sizes are in KV tiles.

- A unit is up to BLOCK_M queries of one row. It lies on the line as a gap and then its tiles.
- The gap is `unit_overhead`, or what is missing to `min_unit_tiles` if that is more. The line begins after the first
  `unit_overhead`, so that the first unit costs its tiles only.
- Units that see no tile are not on the line. Their outputs are zeros, and the parts share them equally.
- The line is cut into `num_parts` equal parts, the last one being shorter; or into as many as leave each
  `min_part_tiles`. A cut within a unit's tiles splits the unit into segments.
- With fixed splits a unit is cut by its own length alone, and the parts take whole segments. A row's result then does
  not depend on its neighbours.

The work list is int32, three areas one after another:

    parts      [num_parts + 1, 16]
               0       first segment, as a number of the segments' area
               1       first of its units that see nothing
               2       last segment + 1 of the part before
               8..15   a copy of the part's first segment, unless splits are fixed
    segments   [max_segments, 8]
               0       row
               1       first query of the unit within its row: token * group + query head
               2, 3    first tile, last tile + 1
               4       seq_len
               5       first token of the row in q
               6       query_len
               7       segments of the unit | number of this one << 16
    zeros      [units, 3]
               0       first token of the row in q
               1       first query of the unit within its row
               2       queries of the unit, negative for pad tokens

Unless splits are fixed, the segments' area has the first segment of each unit only. Every other segment begins a part,
and is read from the copy there.
"""

from __future__ import annotations

import torch

from graphrt.kernels.attention.arguments import check_query_starts
from graphrt.kernels.attention.call import ScheduleCall
from graphrt.kernels.attention.options import check_span
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.schedule import SEARCH_RADIX, schedule_kernel
from graphrt.kernels.attention.work_list_reference import work_list_reference
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp
from graphrt.kernels.sizes import next_power_of_two

_MAX_PROGRAMS = 64
"""Programs of one part each; with more parts, programs take several. Not measured."""

_MAX_PART_BLOCK = 4
"""Parts of a program at most; with more parts there are more programs. Measured: docs/LOG.md "No changes of layout",
"Other shapes of the schedule kernel"."""

_OWN_UNITS = 4
"""Units whose segments a program writes under fixed splits. Measured: docs/LOG.md "Segments of fixed splits"."""

_UNITS_PER_WARP = 64
"""Units per warp of a program; up to here one warp suffices. Measured: docs/LOG.md "No changes of layout"."""

_MAX_NUM_WARPS, _MAX_FIXED_NUM_WARPS = 8, 4
"""Warps of a program at most; under fixed splits. Measured: docs/LOG.md "Units in blocks"."""

_MIN_UNIT_BLOCK, _MAX_UNIT_BLOCK = 32, 2048
"""Units that a program looks at together; more are looked at block by block. Measured: docs/LOG.md "Units in blocks"
(4096 spill)."""

_MAX_ENTRIES = 1 << 14
"""Entries of a block of units: the kernel has 15 bits to count them."""


def _search_levels(num_rows: int) -> int:
    levels = 1
    while SEARCH_RADIX**levels <= num_rows:
        levels += 1
    return levels


def _launch_options(query_len: int, num_rows: int, num_units: int, num_parts: int, fixed_splits: int) -> dict[str, int]:
    """Constexprs that follow from the sizes, and num_warps."""
    block = min(max(next_power_of_two(num_units), _MIN_UNIT_BLOCK), _MAX_UNIT_BLOCK)
    block = min(block, _MAX_ENTRIES // max(fixed_splits, 1))
    num_warps = min(max(block // _UNITS_PER_WARP, 1), _MAX_FIXED_NUM_WARPS if fixed_splits else _MAX_NUM_WARPS)
    return {
        "SEARCH_LEVELS": 0 if query_len else _search_levels(num_rows),
        "PART_BLOCK": min(next_power_of_two(-(-num_parts // _MAX_PROGRAMS)), _MAX_PART_BLOCK),
        "PART_LANES": 32 * num_warps,
        "OWN_UNITS": _OWN_UNITS,
        "UNIT_BLOCK": block,
        "ONE_BLOCK": num_units <= block,
        "num_warps": num_warps,
    }


_launch = KernelLauncher(schedule_kernel)


def _schedule_triton(call: ScheduleCall) -> None:
    plan, shape, schedule = call.plan, call.plan.shape, call.plan.schedule
    num_parts, fixed_splits = schedule.num_parts, schedule.fixed_splits
    options = _launch_options(shape.query_len, shape.num_rows, plan.num_units, num_parts, fixed_splits)
    programs = -(-(num_parts + 1) // options["PART_BLOCK"])
    if fixed_splits:
        programs = max(programs, -(-plan.num_units // _OWN_UNITS))
    _launch(
        (programs,),
        call.seq_lens,
        call.seq_lens.stride(0),
        call.query_start_loc,
        call.work_list,
        shape.num_rows,
        shape.num_tokens,
        plan.num_units,
        num_parts,
        schedule.unit_overhead,
        schedule.min_unit_tiles,
        call.sliding_window or call.attention_chunk_size,
        plan.segments_at,
        plan.zeros_at,
        QUERY_LEN=shape.query_len,
        GROUP=shape.group,
        BLOCK_M=plan.tile.block_m,
        BLOCK_N=plan.tile.block_n,
        CAUSAL=call.causal,
        CHUNKED=call.attention_chunk_size > 0,
        SEQ_LENS_ARE_STARTS=call.seq_lens_are_starts,
        FIXED_SPLITS=fixed_splits,
        FIXED_TILES=schedule.fixed_tiles,
        MIN_PART_TILES=schedule.min_part_tiles,
        **options,
    )


_schedule = DeclaredOp("schedule_attention", ScheduleCall, triton_impl=_schedule_triton, reference=work_list_reference)


def schedule_attention(
    plan: AttentionPlan,
    seq_lens: torch.Tensor,
    work_list: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    attention_chunk_size: int = 0,
    seq_lens_are_starts: bool = False,
) -> None:
    """Write the work list of one step from its lengths; layers with the same plan and window or chunks may share it.

    plan             what is fixed for the captured size
    seq_lens         [rows]      int32  KV tokens of each row; 0: the row's outputs become zeros
                     [rows + 1]  int32  with `seq_lens_are_starts`: where each row's keys begin in contiguous K and V
    work_list        [>= plan.work_list_words]  int32  written in full, as far as it is read
    query_start_loc  [rows + 1]  int32  for plans without a fixed query_len
    sliding_window, attention_chunk_size   those of the layers; 0: none
    seq_lens_are_starts  for `contiguous_attention`, with plans made by `AttentionPlan.varlen`

    The caller guarantees what seq_lens and query_start_loc hold, as `paged_attention` and `contiguous_attention` say;
    the runtime's refresh does so. Anything else is undefined, also in the calls that follow the list.

    Capture-safe: one launch, no sync, no allocation; the grid depends on the plan only.

    Raises: ShapeError, CapacityError.
    """
    shape = plan.shape
    if seq_lens_are_starts and shape.query_len:
        raise ShapeError(
            f"seq_lens_are_starts: expected a plan made by AttentionPlan.varlen, got query_len={shape.query_len}; "
            "make such a plan for contiguous K and V"
        )
    expected = shape.num_rows + 1 if seq_lens_are_starts else shape.num_rows
    check_tensor("seq_lens", seq_lens, shape=(expected,), dtype=torch.int32)
    check_unit_stride("seq_lens", seq_lens)
    check_tensor("work_list", work_list, shape=(None,), dtype=torch.int32, device=seq_lens.device)
    check_unit_stride("work_list", work_list)
    if work_list.shape[0] < plan.work_list_words:
        raise CapacityError(
            f"work_list: expected at least {plan.work_list_words} words for this plan, got {work_list.shape[0]}; "
            "allocate it for the largest plan"
        )
    check_query_starts(query_start_loc, shape.num_rows, shape.query_len, seq_lens.device)
    check_span(sliding_window, attention_chunk_size, causal)
    _schedule(
        ScheduleCall(
            seq_lens,
            query_start_loc,
            work_list,
            causal,
            sliding_window,
            attention_chunk_size,
            seq_lens_are_starts,
            plan,
        )
    )


def compile_variants() -> list[CompileSpec]:
    """Kernel variants that a test compiles without a GPU."""
    specs = []
    for name, query_len, fixed_splits, min_part_tiles, num_units, chunked in (
        ("decode", 1, 0, 1, 256, False),
        ("clusters", 1, 0, 32, 1, False),
        ("speculative", 5, 0, 1, 64, False),
        ("varlen", 0, 0, 1, 256, False),
        ("fixed", 1, 16, 1, 256, False),
        ("many", 1, 0, 1, 2048, False),
        ("varlen_many", 0, 0, 1, 2048, False),
        ("chunked", 1, 0, 1, 256, True),
        ("chunked_varlen_many", 0, 0, 1, 2048, True),
    ):
        options = _launch_options(query_len, num_units, num_units, 128, fixed_splits)
        num_warps = options.pop("num_warps")
        constexprs: dict[str, object] = {
            "QUERY_LEN": query_len,
            "GROUP": 4,
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "CAUSAL": True,
            "CHUNKED": chunked,
            "SEQ_LENS_ARE_STARTS": False,
            "FIXED_SPLITS": fixed_splits,
            "FIXED_TILES": 4,
            "MIN_PART_TILES": min_part_tiles,
            **options,
        }
        signature = {}
        for argument in schedule_kernel.arg_names:
            kind = "*i32" if argument.endswith("_ptr") else "i32"
            signature[argument] = "constexpr" if argument in constexprs else kind
        if query_len:
            constexprs["query_start_loc_ptr"] = None
            signature["query_start_loc_ptr"] = "constexpr"
        divisible = tuple(a for a, kind in signature.items() if kind.startswith("*"))
        specs.append(
            CompileSpec(f"schedule_{name}", schedule_kernel, signature, constexprs, num_warps, 3, divisible=divisible)
        )
    return specs
