"""Attention calls on exactly-sized memory, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python scripts/sanitize_attention.py
    compute-sanitizer --tool racecheck python scripts/sanitize_attention.py --only many,one,two_clusters,pairs

torch's allocator rounds sizes up and hides overruns, so it is switched off: every tensor is an allocation of its own.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch starts

import torch

from graphrt.kernels.attention.attention import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan, AttentionWorkspace
from graphrt.kernels.attention.work_list import schedule_attention

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `query_lens` makes it a packed one."""

    lengths: tuple[int, ...]
    query_lens: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    window: int = 0
    contiguous: bool = False
    batch_invariant: bool = False
    native: bool = True
    num_sms: int = 32
    query_len: int = 1
    scales: bool = False
    sinks: bool = False


CALLS = {
    "wide": Call((300, 1, 0, 17)),
    "wide_fp8": Call((300, 1, 0, 17), kv_dtype=E4M3),
    "one": Call((700,), num_sms=64),
    "one_fp8": Call((700,), kv_dtype=E4M3, num_sms=64),
    "two_clusters": Call((9000,), num_sms=132),
    "pairs": Call((3000, 40, 900), group=16, num_sms=132),
    "many_small_heads": Call(tuple(range(1, 130)), group=3, head_dim=64),
    "two_stages": Call((3000, 40), num_sms=96),
    "speculative": Call((3, 900, 40), query_len=4, kv_dtype=E4M3, scales=True, sinks=True),
    "many": Call(tuple(range(1, 130))),
    "many_fp8": Call(tuple(range(1, 130)), kv_dtype=E4M3),
    "long": Call((2000, *(5,) * 20), num_sms=80),
    "triton_wide": Call((300, 1, 0, 17), native=False),
    "triton_narrow": Call(tuple(range(1, 130)), native=False),
    "triton_long": Call((2000, *(5,) * 150), native=False),
    "triton_fp8": Call(tuple(range(1, 130)), kv_dtype=E4M3, native=False),
    "odd": Call((49, 47, 48, 0), dtype=torch.float16, group=7, head_dim=80, page_size=48),
    "float32": Call((33, 100), dtype=torch.float32, head_dim=64),
    "window": Call((200, 64), window=65, page_size=64),
    "invariant": Call((900, 3), batch_invariant=True),
    "invariant_full": Call((20000,), batch_invariant=True, num_sms=64),
    "varlen": Call((40, 7, 130), (40, 1, 33)),
    "varlen_fp8": Call((40, 7, 130), (40, 1, 33), kv_dtype=E4M3),
    "contiguous": Call((40, 7, 130), (40, 1, 33), contiguous=True),
}


def run(call: Call, device: torch.device) -> None:
    """Make the inputs, call, and look at the result."""
    heads, rows, kv_dtype = 2, len(call.lengths), call.kv_dtype or call.dtype
    num_tokens = sum(call.query_lens) or rows * call.query_len
    pages = [-(-length // call.page_size) for length in call.lengths]
    table = torch.zeros(rows, max(pages), dtype=torch.int32)
    first = 1
    for row, count in enumerate(pages):
        table[row, :count] = torch.arange(first, first + count)
        first += count
    shape = (sum(call.lengths), heads, call.head_dim)
    if not call.contiguous:
        shape = (first, call.page_size, heads, call.head_dim)
    k, v = (torch.randn(shape, device=device).to(kv_dtype) for _ in "kv")
    q = torch.randn(num_tokens, heads * call.group, call.head_dim, device=device).to(call.dtype)
    sizes = {
        "num_q_heads": heads * call.group,
        "num_kv_heads": heads,
        "head_dim": call.head_dim,
        "dtype": call.dtype,
        "kv_dtype": kv_dtype,
        "num_sms": call.num_sms,
        "batch_invariant": call.batch_invariant,
    }
    if not call.query_lens:
        sizes |= {"native": call.native, "query_len": call.query_len}
    arguments = (rows, num_tokens) if call.query_lens else (rows,)
    make_plan = AttentionPlan.varlen if call.query_lens else AttentionPlan.decode
    plan = make_plan(*arguments, **sizes)  # type: ignore[operator]  # a dict of several types
    starts = torch.tensor([0, *call.query_lens]).cumsum(0).int().to(device) if call.query_lens else None
    lengths = torch.tensor(call.lengths, dtype=torch.int32, device=device)
    workspace = AttentionWorkspace.allocate([plan], device)
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32, device=device)
    scale = torch.full((heads,), 0.5, device=device) if call.scales else None
    sinks = torch.ones(heads * call.group, device=device) if call.sinks else None
    options = AttentionOptions(
        call.head_dim**-0.5, sliding_window=call.window, sinks=sinks, k_scale=scale, v_scale=scale
    )
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"), device=device)
    for _ in range(2):
        if call.contiguous and starts is not None:
            kv_starts = torch.tensor([0, *call.lengths]).cumsum(0).int().to(device)
            schedule_attention(plan, kv_starts, work_list, query_start_loc=starts, seq_lens_are_starts=True)
            contiguous_attention(q, k, v, kv_starts, starts, out, plan, work_list, workspace, options, lse=lse)
        else:
            schedule_attention(plan, lengths, work_list, query_start_loc=starts, sliding_window=call.window)
            tensors = (q, k, v, table.to(device), lengths, out, plan, work_list, workspace, options)
            paged_attention(*tensors, query_start_loc=starts, lse=lse)
    right = not lse.isnan().any() and not workspace.counters.any()
    if not call.contiguous:
        right &= bool((out.cpu() - reference(plan, options, q, k, v, table, lengths, starts)).abs().max() < 0.05)
    if not right or not out.isfinite().all():
        raise SystemExit(f"sanitize_attention: wrong result of {call}")


def reference(plan: AttentionPlan, options: AttentionOptions, *tensors: torch.Tensor | None) -> torch.Tensor:
    """What the operator gives on CPU tensors."""
    q, k, v, table, lengths, starts = (None if t is None else t.cpu() for t in tensors)
    assert q is not None, "only the starts are optional"
    moved = {name: getattr(options, name) for name in ("sinks", "k_scale", "v_scale")}
    on_cpu = replace(options, **{name: None if t is None else t.cpu() for name, t in moved.items()})
    out = torch.empty_like(q)
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32)
    workspace = AttentionWorkspace.allocate([plan], q.device)
    paged_attention(q, k, v, table, lengths, out, plan, work_list, workspace, on_cpu, query_start_loc=starts)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CALLS), help="comma-separated cases")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    for name in names:
        run(CALLS[name], torch.device(arguments.device))
    print(f"ok {len(names)} cases: {', '.join(names)}")


if __name__ == "__main__":
    main()
