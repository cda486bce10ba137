"""The schedule of prefills, which is a list of query tiles in order of decreasing work.

The device writes it once per step, for all layers with the same number of query heads per KV head. Their windows
may differ, because the kernels derive the KV tiles of each query tile.

The layout in int32 words is a header of Q_TILE_WORDS, then Q_TILE_WORDS per query tile. The header has the number
of query tiles, and two counters that are 0 between launches of the CUDA kernel. The words of a query tile are:

    0 req           index of the request; -1: padding tokens (query_start_loc[-1] and above)
    1 first_query   the queries first_query to first_query + block_m - 1 of the request, numbered
                    token * num_queries_per_kv + head
    2 first_token   first new token of the request
    3 query_len     new tokens of the request
    4 seq_len       keys of the request, including the keys of the new tokens
    5 kv_start      first key of the request in packed K and V; else 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.kernels.attention.prompt_plan import Q_TILE_WORDS, PromptPlan
from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.compile_spec import CompileSpec
from graphrt.kernels.errors import CapacityError
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.op_declaration import DeclaredOp, Written

_Q_TILE_WORDS = tl.constexpr(Q_TILE_WORDS)
_Q_TILES_PER_PROGRAM, _REQS_AT_A_TIME, _NUM_WARPS = 32, 64, 4


@triton.jit
def _load_reqs(
    reqs, lens_ptr, starts_ptr, num_reqs, num_tokens, NUM_QUERIES_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Return first_token, query_len, seq_len, kv_start and query tiles of `reqs`; req num_reqs is the padding."""
    is_req = reqs < num_reqs
    exists = reqs <= num_reqs
    begin = tl.load(starts_ptr + reqs, mask=exists, other=0)
    end = tl.load(starts_ptr + reqs + 1, mask=is_req, other=num_tokens)
    query_len = tl.where(exists, end - begin, 0)
    seq_len = tl.load(lens_ptr + reqs, mask=is_req, other=0)
    kv_start = tl.zeros_like(seq_len)
    if PACKED:
        kv_start = seq_len
        seq_len = tl.load(lens_ptr + reqs + 1, mask=is_req, other=0) - kv_start
    return begin, query_len, seq_len, kv_start, (query_len * NUM_QUERIES_PER_KV + BLOCK_M - 1) // BLOCK_M


@triton.jit
def _q_tiles_beyond(
    end, query_len, seq_len, num_q_tiles, NUM_QUERIES_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return how many query tiles of a request see a position of at least `end`."""
    if CAUSAL:
        # Query tile j ends with the token of query (j + 1) * BLOCK_M - 1 or with the last token of the request.
        token = end - (seq_len - query_len)
        first = (tl.maximum(token, 0) * NUM_QUERIES_PER_KV + BLOCK_M) // BLOCK_M - 1
        return tl.where(token < query_len, tl.maximum(num_q_tiles - first, 0), 0)
    else:
        return tl.where(seq_len > end, num_q_tiles, 0)


# One variant for all batches: hosts that do not capture this kernel would compile one in a step.
@triton.jit(do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=["lens_ptr", "starts_ptr"])
def prompt_schedule_kernel(
    lens_ptr,  # seq_lens [num_reqs], or kv_start_loc [num_reqs + 1]
    starts_ptr,  # query_start_loc [num_reqs + 1]
    schedule_ptr,
    num_reqs,
    num_tokens,
    NUM_QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    Q_TILES: tl.constexpr,
    REQS: tl.constexpr,
):
    q_tiles = tl.program_id(0) * Q_TILES + tl.arange(0, Q_TILES)

    # 1. The request of each query tile. Query tiles are numbered request by request, so its index is the number of
    # requests whose query tiles end before this one.
    req = tl.zeros([Q_TILES], tl.int32)
    begin_q_tile = tl.zeros([Q_TILES], tl.int32)
    total = 0
    for first in tl.range(0, num_reqs + 1, REQS, num_stages=1):
        reqs = first + tl.arange(0, REQS)
        _, _, _, _, counts = _load_reqs(
            reqs, lens_ptr, starts_ptr, num_reqs, num_tokens, NUM_QUERIES_PER_KV, BLOCK_M, PACKED
        )
        ends = total + tl.cumsum(counts, 0)
        over = ends[None, :] <= q_tiles[:, None]
        req += tl.sum(over.to(tl.int32), 1)
        begin_q_tile = tl.maximum(begin_q_tile, tl.max(tl.where(over, ends[None, :], 0), 1))
        total += tl.sum(counts, 0)

    # 2. The last position that each query tile sees, which is its cost.
    first_token, query_len, seq_len, kv_start, num_q_tiles = _load_reqs(
        req, lens_ptr, starts_ptr, num_reqs, num_tokens, NUM_QUERIES_PER_KV, BLOCK_M, PACKED
    )
    index = q_tiles - begin_q_tile
    end = seq_len - 1
    if CAUSAL:
        end = seq_len - query_len + tl.minimum(((index + 1) * BLOCK_M - 1) // NUM_QUERIES_PER_KV, query_len - 1)

    # 3. The rank of each query tile. It follows query tiles that see more positions, query tiles of earlier requests
    # that see as many, and later query tiles of its own request.
    rank = num_q_tiles - 1 - index
    for first in tl.range(0, num_reqs + 1, REQS, num_stages=1):
        reqs = first + tl.arange(0, REQS)
        _, other_query_len, other_seq_len, _, counts = _load_reqs(
            reqs, lens_ptr, starts_ptr, num_reqs, num_tokens, NUM_QUERIES_PER_KV, BLOCK_M, PACKED
        )
        least = end[:, None] + tl.where(reqs[None, :] < req[:, None], 0, 1)
        ahead = _q_tiles_beyond(
            least,
            other_query_len[None, :],
            other_seq_len[None, :],
            counts[None, :],
            NUM_QUERIES_PER_KV,
            BLOCK_M,
            CAUSAL,
        )
        rank += tl.sum(tl.where(reqs[None, :] == req[:, None], 0, ahead), 1)

    q_tile_ptr = schedule_ptr + _Q_TILE_WORDS * (1 + rank)
    exists = q_tiles < total
    tl.store(q_tile_ptr, tl.where(req < num_reqs, req, -1), mask=exists)
    tl.store(q_tile_ptr + 1, index * BLOCK_M, mask=exists)
    tl.store(q_tile_ptr + 2, first_token, mask=exists)
    tl.store(q_tile_ptr + 3, query_len, mask=exists)
    tl.store(q_tile_ptr + 4, seq_len, mask=exists)
    tl.store(q_tile_ptr + 5, kv_start, mask=exists)
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
        (-(-plan.max_q_tiles // _Q_TILES_PER_PROGRAM),),
        call.lens,
        call.query_start_loc,
        call.schedule,
        plan.num_reqs,
        plan.num_tokens,
        **_constexprs(plan, call.packed),
        num_warps=_NUM_WARPS,
    )


def _constexprs(plan: PromptPlan, packed: bool) -> dict[str, object]:
    return {
        "NUM_QUERIES_PER_KV": plan.num_queries_per_kv,
        "BLOCK_M": plan.block_m,
        "CAUSAL": plan.causal,
        "PACKED": packed,
        "Q_TILES": _Q_TILES_PER_PROGRAM,
        "REQS": _REQS_AT_A_TIME,
    }


def _reference(call: _ScheduleCall) -> None:
    q_tiles = sorted(_q_tiles(call), key=lambda q_tile: q_tile[0], reverse=True)  # a stable sort
    call.schedule[:3] = torch.tensor([len(q_tiles), 0, 0], device="cpu")
    for rank, (_, *words) in enumerate(q_tiles, 1):
        call.schedule[rank * Q_TILE_WORDS : rank * Q_TILE_WORDS + len(words)] = torch.tensor(words, device="cpu")


def _q_tiles(call: _ScheduleCall) -> Iterator[tuple[int, ...]]:
    """Yield each query tile's last visible position and its words, in reverse order within a request."""
    plan, starts, lens = call.plan, call.query_start_loc.tolist(), call.lens.tolist()
    for req in range(plan.num_reqs + 1):
        is_req = req < plan.num_reqs
        query_len = (starts[req + 1] if is_req else plan.num_tokens) - starts[req]
        kv_start = lens[req] if call.packed and is_req else 0
        seq_len = (lens[req + 1] - kv_start if call.packed else lens[req]) if is_req else 0
        for first_query in reversed(range(0, query_len * plan.num_queries_per_kv, plan.block_m)):
            last_token = min((first_query + plan.block_m - 1) // plan.num_queries_per_kv, query_len - 1)
            end = seq_len - query_len + last_token if plan.causal else seq_len - 1
            yield end, req if is_req else -1, first_query, starts[req], query_len, seq_len, kv_start


_schedule = DeclaredOp("schedule_prompt", _ScheduleCall, triton_impl=_launch, reference=_reference)


def schedule_prompt(
    plan: PromptPlan,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    schedule: torch.Tensor,
    *,
    seq_lens_are_starts: bool = False,
) -> None:
    """Write the prefill schedule that `prompt_attention` reads in the same step, with the same plan.

    seq_lens          [num_reqs]  keys of each request, including the keys of the new tokens        int32
                      [num_reqs + 1]  with seq_lens_are_starts: first key of each packed request    int32
    query_start_loc   [num_reqs + 1]  first new token of each request                               int32
    schedule          [plan.schedule_words] or longer                                               int32, written

    The schedule does not cover tokens before query_start_loc[0]; another kernel owns them. The caller guarantees that
    query_start_loc does not decrease and ends at plan.num_tokens or less.

    Capture-safe: one launch, no sync, no allocation; the grid depends only on the plan.

    Raises: ShapeError, CapacityError.
    """
    device = seq_lens.device
    reqs = plan.num_reqs + seq_lens_are_starts
    check_tensor("seq_lens", seq_lens, shape=(reqs,), dtype=torch.int32, device=device)
    check_tensor("query_start_loc", query_start_loc, shape=(plan.num_reqs + 1,), dtype=torch.int32, device=device)
    check_schedule(plan, schedule, device)
    named = [("seq_lens", seq_lens), ("query_start_loc", query_start_loc)]
    for name, tensor in named:
        check_unit_stride(name, tensor)
    _schedule(_ScheduleCall(seq_lens, query_start_loc, schedule, seq_lens_are_starts, plan))


def check_schedule(plan: PromptPlan, schedule: torch.Tensor, device: torch.device) -> None:
    """Raise ShapeError or CapacityError unless `schedule` has room for the plan's query tiles."""
    check_tensor("schedule", schedule, shape=(None,), dtype=torch.int32, device=device)
    check_unit_stride("schedule", schedule)
    if schedule.numel() < plan.schedule_words:
        raise CapacityError(
            f"schedule: expected at least {plan.schedule_words} elements for this plan, got {schedule.numel()}; "
            "allocate plan.schedule_words for the largest plan"
        )


def compile_variants() -> list[CompileSpec]:
    """Return the kernel variants that a test compiles without a GPU."""
    specs = []
    for name, causal, packed in (("causal", True, False), ("bidirectional", False, True)):
        plan = PromptPlan.make(
            64, 2048, num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, num_sms=132, causal=causal
        )
        specs.append(
            CompileSpec(
                f"prompt_schedule_{name}", prompt_schedule_kernel, {}, _constexprs(plan, packed), _NUM_WARPS, 1,
                divisible=("schedule_ptr",),
            )
        )  # fmt: skip
    return specs
