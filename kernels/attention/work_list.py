"""The attention schedule, made on the device from `seq_lens`: a work list that all layers of one window share.

A unit is a tile of BLOCK_M query rows of one row. The units that see any KV tile form a line: each has as many places
as it sees tiles, behind a gap of `unit_overhead` places for what a second segment costs a part, or a longer one that
makes `min_unit_tiles` of both; the line begins behind the first `unit_overhead`. It is cut into equal parts, the last
one being shorter: `num_parts`, or as many as leave each `min_part_tiles`. Where a cut falls into a unit, the unit is
split there. With fixed splits a unit is cut by its own length alone, and the parts take whole segments, so that a row's
result does not depend on its neighbours.

The list is int32, three areas one after another:

    parts      [num_parts + 1, 16]   0: first segment, 1: first unit of zeros, 2: last segment + 1 of the part before;
                                     8..15: a copy of the first segment, unless splits are fixed
    segments   [max_segments, 8]     row, first query row, tile begin, tile end, seq_len, query start, query_len,
                                     number of splits of the unit | index of this one << 16; unless splits are fixed,
                                     units have an entry of their first segment only: the others begin parts, as whose
                                     copies they are read
    zeros      [units, 3]            units that see nothing: query start, first query row, number of query rows, which
                                     is negative for pad tokens
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from graphrt.kernels.attention.arguments import next_power_of_two
from graphrt.kernels.attention.attend import PART_WORDS, SEGMENT_WORDS
from graphrt.kernels.attention.options import check_window
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.schedule import SEARCH_RADIX, schedule_kernel
from graphrt.kernels.attention.work_list_reference import work_list_reference
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.library import define_op

_MAX_PROGRAMS = 64  # of one part each, before they take several
_MAX_PART_BLOCK = 4  # and that many, before there are more programs
_OWN_UNITS = 4  # whose segments a program writes under fixed splits
_UNITS_PER_WARP = 64
_MAX_NUM_WARPS = 8
_MAX_FIXED_NUM_WARPS = 4  # under fixed splits
_MIN_UNIT_BLOCK, _MAX_UNIT_BLOCK = 32, 2048
_MAX_ENTRIES = 1 << 14  # of a block; the kernel has 15 bits to count them


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


def _schedule_triton(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    work_list: torch.Tensor,
    num_rows: int,
    num_tokens: int,
    num_units: int,
    num_parts: int,
    max_segments: int,
    query_len: int,
    group: int,
    block_m: int,
    block_n: int,
    causal: bool,
    sliding_window: int,
    seq_lens_are_starts: bool,
    fixed_splits: int,
    fixed_tiles: int,
    unit_overhead: int,
    min_unit_tiles: int,
    min_part_tiles: int,
) -> None:
    segments_at = (num_parts + 1) * PART_WORDS
    options = _launch_options(query_len, num_rows, num_units, num_parts, fixed_splits)
    programs = triton.cdiv(num_parts + 1, options["PART_BLOCK"])
    if fixed_splits:
        programs = max(programs, triton.cdiv(num_units, _OWN_UNITS))
    schedule_kernel[(programs,)](
        seq_lens,
        seq_lens.stride(0),
        query_start_loc,
        work_list,
        num_rows,
        num_tokens,
        num_units,
        num_parts,
        unit_overhead,
        min_unit_tiles,
        sliding_window,
        segments_at,
        segments_at + max_segments * SEGMENT_WORDS,
        QUERY_LEN=query_len,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CAUSAL=causal,
        SEQ_LENS_ARE_STARTS=seq_lens_are_starts,
        FIXED_SPLITS=fixed_splits,
        FIXED_TILES=fixed_tiles,
        MIN_PART_TILES=min_part_tiles,
        **options,
    )


_schedule_op: Any = define_op(
    "schedule_attention(Tensor seq_lens, Tensor? query_start_loc, Tensor(a!) work_list, int num_rows, int num_tokens, "
    "int num_units, int num_parts, int max_segments, int query_len, int group, int block_m, int block_n, bool causal, "
    "int sliding_window, bool seq_lens_are_starts, int fixed_splits, int fixed_tiles, int unit_overhead, "
    "int min_unit_tiles, int min_part_tiles) -> ()",
    triton_impl=_schedule_triton,
    reference=work_list_reference,
)


def schedule_attention(
    plan: AttentionPlan,
    seq_lens: torch.Tensor,
    work_list: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    seq_lens_are_starts: bool = False,
) -> None:
    """Write the work list of one step from its lengths; every layer with the same plan and window may share it.

    plan             host constants of the captured size
    seq_lens         [rows]      int32  KV tokens of each row; 0: the row's outputs become zeros
                     [rows + 1]  int32  with `seq_lens_are_starts`: where each row's keys begin in contiguous K and V
    work_list        [>= plan.work_list_words]  int32  written in full, as far as it is read
    query_start_loc  [rows + 1]  int32  for plans without a fixed query_len
    sliding_window   that of the layers; 0: none
    seq_lens_are_starts  for `contiguous_attention`, with plans made by `AttentionPlan.varlen`

    What seq_lens and query_start_loc hold is the caller's to guarantee, as `paged_attention` and `contiguous_attention`
    say; the runtime's refresh sees to it. Anything else is undefined, in the calls that follow the list too.

    Capture-safe: one launch, no sync, no allocation; the grid depends on the plan only.

    Raises: ShapeError, CapacityError.
    """
    if seq_lens_are_starts and plan.query_len:
        raise ShapeError(
            f"seq_lens_are_starts: expected a plan made by AttentionPlan.varlen, got query_len={plan.query_len}; "
            "contiguous K and V are attended to by such plans only"
        )
    expected = plan.num_rows + 1 if seq_lens_are_starts else plan.num_rows
    check_tensor("seq_lens", seq_lens, shape=(expected,), dtype=torch.int32)
    check_unit_stride("seq_lens", seq_lens)
    check_tensor("work_list", work_list, shape=(None,), dtype=torch.int32, device=seq_lens.device)
    check_unit_stride("work_list", work_list)
    if work_list.shape[0] < plan.work_list_words:
        raise CapacityError(
            f"work_list: expected at least {plan.work_list_words} words for this plan, got {work_list.shape[0]}; "
            "allocate it for the largest plan"
        )
    if (query_start_loc is None) != (plan.query_len > 0):
        raise ShapeError(
            f"query_start_loc: expected {'None' if plan.query_len else 'a tensor'} for a plan with query_len="
            f"{plan.query_len}, got the opposite; a plan without query_len is made by AttentionPlan.varlen"
        )
    if query_start_loc is not None:
        check_tensor(
            "query_start_loc", query_start_loc, shape=(plan.num_rows + 1,), dtype=torch.int32, device=seq_lens.device
        )
        check_unit_stride("query_start_loc", query_start_loc)
    check_window(sliding_window, causal)
    _schedule_op(
        seq_lens, query_start_loc, work_list, plan.num_rows, plan.num_tokens, plan.num_units, plan.num_parts,
        plan.max_segments, plan.query_len, plan.group, plan.block_m, plan.block_n, causal, sliding_window,
        seq_lens_are_starts, plan.fixed_splits, plan.fixed_tiles, plan.unit_overhead, plan.min_unit_tiles,
        plan.min_part_tiles,
    )  # fmt: skip


def compile_variants() -> list[CompileSpec]:
    """Kernel variants that a test compiles without a GPU."""
    specs = []
    for name, query_len, fixed_splits, min_part_tiles, num_units in (
        ("decode", 1, 0, 1, 256),
        ("clusters", 1, 0, 32, 1),
        ("speculative", 5, 0, 1, 64),
        ("varlen", 0, 0, 1, 256),
        ("fixed", 1, 16, 1, 256),
        ("many", 1, 0, 1, 2048),
        ("varlen_many", 0, 0, 1, 2048),
    ):
        options = _launch_options(query_len, num_units, num_units, 128, fixed_splits)
        num_warps = options.pop("num_warps")
        constexprs: dict[str, object] = {
            "QUERY_LEN": query_len,
            "GROUP": 4,
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "CAUSAL": True,
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
