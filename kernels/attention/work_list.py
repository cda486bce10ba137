"""The schedule operator, which writes a work list on the device for all layers with the same window or chunk size.

docs/attention.md shows an example. The rules are as follows; sizes are in KV tiles.

- A query tile is up to BLOCK_M queries of one request. Its cost is an overhead plus its KV tiles.
- The overhead is `q_tile_overhead`, or more if the cost would be less than `min_q_tile_cost`. The first query tile has
  `q_tile_overhead` less, so that with equal overheads it costs only its KV tiles.
- The query tiles are consecutive in the linearized work, each with its overhead first.
- Query tiles that see no KV have no work. Their outputs are zeros, and the partitions share them equally.
- The linearized work is divided into `num_partitions` equal work partitions, of which the last may be smaller. If
  partitions would be smaller than `min_partition_tiles`, fewer partitions are used. A partition boundary between the KV
  tiles of a query tile splits it into KV splits.
- With fixed splits, a query tile is split only by its own length, and partitions have whole splits. The result of a
  request then does not depend on other requests.

The work list is int32, with three consecutive areas:

    partitions [num_partitions + 1, 16]
               0       first split, as an index of the splits area
               1       first of its query tiles that see no KV
               2       last split + 1 of the previous partition
               8..15   a copy of the partition's first split, unless splits are fixed
    splits     [max_split_entries, 8]
               0       request
               1       first query of the query tile within its request: token * num_queries_per_kv + query head
               2, 3    first KV tile, last KV tile + 1
               4       seq_len
               5       first token of the request in q
               6       query_len
               7       splits of the query tile | index of this split << 16
    zeros      [num_q_tiles, 3]
               0       first token of the request in q
               1       first query of the query tile within its request
               2       queries of the query tile, negative for padding tokens

Unless splits are fixed, the splits area has only the first split of each query tile. Every other split is the first
split of a partition, and is read from the partition's copy.
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
"""Maximum programs of one partition each; with more partitions, programs process several. Not measured."""

_MAX_PARTITION_BLOCK = 4
"""Maximum partitions per program; with more partitions there are more programs. Measured: docs/dev/log.md "No changes
of layout", "Other schedule kernel shapes"."""

_OWN_Q_TILES = 4
"""Query tiles per program that writes fixed splits. Measured: docs/dev/log.md "KV splits of fixed split mode"."""

_Q_TILES_PER_WARP = 64
"""Query tiles per warp of a program; up to this many use one warp. Measured: docs/dev/log.md "No changes of layout"."""

_MAX_NUM_WARPS, _MAX_FIXED_NUM_WARPS = 8, 4
"""Maximum warps per program without and with fixed splits. Measured: docs/dev/log.md "Query tiles in blocks"."""

_MIN_Q_TILE_BLOCK, _MAX_Q_TILE_BLOCK = 32, 2048
"""Query tiles that a program processes at once; it processes more in a loop. Measured: docs/dev/log.md "Query tiles in
blocks" (4096 spill)."""

_MAX_ENTRIES = 1 << 14
"""Maximum entries per block of query tiles, because the kernel counts them in 15 bits."""


def _search_levels(num_reqs: int) -> int:
    levels = 1
    while SEARCH_RADIX**levels <= num_reqs:
        levels += 1
    return levels


def _launch_options(
    query_len: int, num_reqs: int, num_q_tiles: int, num_partitions: int, fixed_splits: int
) -> dict[str, int]:
    """Return num_warps and the constexprs that depend on sizes."""
    block = min(max(next_power_of_two(num_q_tiles), _MIN_Q_TILE_BLOCK), _MAX_Q_TILE_BLOCK)
    block = min(block, _MAX_ENTRIES // max(fixed_splits, 1))
    num_warps = min(max(block // _Q_TILES_PER_WARP, 1), _MAX_FIXED_NUM_WARPS if fixed_splits else _MAX_NUM_WARPS)
    return {
        "SEARCH_LEVELS": 0 if query_len else _search_levels(num_reqs),
        "PARTITION_BLOCK": min(next_power_of_two(-(-num_partitions // _MAX_PROGRAMS)), _MAX_PARTITION_BLOCK),
        "PARTITION_LANES": 32 * num_warps,
        "OWN_Q_TILES": _OWN_Q_TILES,
        "Q_TILE_BLOCK": block,
        "ONE_BLOCK": num_q_tiles <= block,
        "num_warps": num_warps,
    }


_launch = KernelLauncher(schedule_kernel)


def _schedule_triton(call: ScheduleCall) -> None:
    plan, shape, schedule = call.plan, call.plan.shape, call.plan.schedule
    num_partitions, fixed_splits = schedule.num_partitions, schedule.fixed_splits
    options = _launch_options(shape.query_len, shape.num_reqs, plan.num_q_tiles, num_partitions, fixed_splits)
    programs = -(-(num_partitions + 1) // options["PARTITION_BLOCK"])
    if fixed_splits:
        programs = max(programs, -(-plan.num_q_tiles // _OWN_Q_TILES))
    _launch(
        (programs,),
        call.seq_lens,
        call.seq_lens.stride(0),
        call.query_start_loc,
        call.work_list,
        shape.num_reqs,
        shape.num_tokens,
        plan.num_q_tiles,
        num_partitions,
        schedule.q_tile_overhead,
        schedule.min_q_tile_cost,
        call.sliding_window or call.attention_chunk_size,
        plan.splits_at,
        plan.zeros_at,
        QUERY_LEN=shape.query_len,
        NUM_QUERIES_PER_KV=shape.num_queries_per_kv,
        BLOCK_M=plan.tile.block_m,
        BLOCK_N=plan.tile.block_n,
        CAUSAL=call.causal,
        CHUNKED=call.attention_chunk_size > 0,
        SEQ_LENS_ARE_STARTS=call.seq_lens_are_starts,
        FIXED_SPLITS=fixed_splits,
        MIN_SPLIT_TILES=schedule.min_split_tiles,
        MIN_PARTITION_TILES=schedule.min_partition_tiles,
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
    """Write the work list of one step. Layers with the same plan and the same window or chunk size may share the list.

    plan             the plan of the captured size
    seq_lens         [num_reqs]      int32  KV tokens of each request; 0: its outputs are zeros
                     [num_reqs + 1]  int32  with `seq_lens_are_starts`: first key of each request in contiguous K and V
    work_list        [>= plan.work_list_words]  int32  written: the words that the kernels read
    query_start_loc  [num_reqs + 1]  int32  for plans without a fixed query_len
    sliding_window, attention_chunk_size   as in the layers; 0: off
    seq_lens_are_starts  for `contiguous_attention`, with plans made by `AttentionPlan.varlen`

    The caller must guarantee valid seq_lens and query_start_loc, as described in `paged_attention` and
    `contiguous_attention`; the runtime's refresh does. Otherwise the behavior of this call, and of attention calls that
    use the list, is undefined.

    Capture-safe: one launch, no sync, no allocation; the grid depends only on the plan.

    Raises: ShapeError, CapacityError.
    """
    shape = plan.shape
    if seq_lens_are_starts and shape.query_len:
        raise ShapeError(
            f"seq_lens_are_starts: expected a plan made by AttentionPlan.varlen, got query_len={shape.query_len}; "
            "make such a plan for contiguous K and V"
        )
    expected = shape.num_reqs + 1 if seq_lens_are_starts else shape.num_reqs
    check_tensor("seq_lens", seq_lens, shape=(expected,), dtype=torch.int32)
    check_unit_stride("seq_lens", seq_lens)
    check_tensor("work_list", work_list, shape=(None,), dtype=torch.int32, device=seq_lens.device)
    check_unit_stride("work_list", work_list)
    if work_list.shape[0] < plan.work_list_words:
        raise CapacityError(
            f"work_list: expected at least {plan.work_list_words} words for this plan, got {work_list.shape[0]}; "
            "allocate it for the largest plan"
        )
    check_query_starts(query_start_loc, shape.num_reqs, shape.query_len, seq_lens.device)
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
    """Return the kernel variants that a test compiles without a GPU."""
    specs = []
    for name, query_len, fixed_splits, min_partition_tiles, num_q_tiles, chunked in (
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
        options = _launch_options(query_len, num_q_tiles, num_q_tiles, 128, fixed_splits)
        num_warps = options.pop("num_warps")
        constexprs: dict[str, object] = {
            "QUERY_LEN": query_len,
            "NUM_QUERIES_PER_KV": 4,
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "CAUSAL": True,
            "CHUNKED": chunked,
            "SEQ_LENS_ARE_STARTS": False,
            "FIXED_SPLITS": fixed_splits,
            "MIN_SPLIT_TILES": 4,
            "MIN_PARTITION_TILES": min_partition_tiles,
            **options,
        }
        if query_len:
            constexprs["query_start_loc_ptr"] = None
        specs.append(
            CompileSpec(f"schedule_{name}", schedule_kernel, {}, constexprs, num_warps, 3, divisible=("*_ptr",))
        )
    return specs
