"""Attention, products, KV writes and merges in allocations of exact size, for compute-sanitizer; see gpu_check.py.

    compute-sanitizer --tool memcheck --report-api-errors no python -m scripts.sanitize_kernels
    compute-sanitizer --tool racecheck python -m scripts.sanitize_kernels --only many,one,two_clusters,pairs,products_1

torch's caching allocator rounds sizes up, which would hide overruns. It is switched off, so that every tensor is a
separate allocation. racecheck covers shared memory only; test_attention_replays.py covers data that blocks send to each
other.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # must be set before torch is imported

import torch

from graphrt.kernels.attention.merge import merge_attention
from graphrt.kernels.attention.operators import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.cache.write import Rotary, write_kv
from graphrt.kernels.ops.linear import linear, linear_add, linear_rope_write, linear_silu_mul
from scripts.bench_linear import make_weight

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Call:
    """One call; with `query_lens` requests are packed."""

    lengths: tuple[int, ...]
    query_lens: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    gqa: int = 4
    head_dim: int = 128
    v_head_dim: int = 0
    page_size: int = 16
    window: int = 0
    chunk: int = 0
    contiguous: bool = False
    batch_invariant: bool = False
    native: bool = True
    num_sms: int = 32
    query_len: int = 1
    scales: bool = False
    sinks: bool = False
    softcap: float = 0.0
    alibi: bool = False
    heads_first: bool = False


CALLS = {
    "wide": Call((300, 1, 0, 17)),
    "wide_fp8": Call((300, 1, 0, 17), kv_dtype=E4M3),
    "one": Call((700,), num_sms=64),
    "one_fp8": Call((700,), kv_dtype=E4M3, num_sms=64),
    "two_clusters": Call((9000,), num_sms=132),
    "pairs": Call((3000, 40, 900), gqa=16, num_sms=132),
    "many_small_heads": Call(tuple(range(1, 130)), gqa=3, head_dim=64),
    "two_stages": Call((3000, 40), num_sms=96),
    "speculative": Call((3, 900, 40), query_len=4, kv_dtype=E4M3, scales=True, sinks=True),
    "many": Call(tuple(range(1, 130))),
    "many_fp8": Call(tuple(range(1, 130)), kv_dtype=E4M3),
    "long": Call((2000, *(5,) * 20), num_sms=80),
    "triton_wide": Call((300, 1, 0, 17), native=False),
    "triton_narrow": Call(tuple(range(1, 130)), native=False),
    "triton_long": Call((2000, *(5,) * 150), native=False),
    "triton_fp8": Call(tuple(range(1, 130)), kv_dtype=E4M3, native=False),
    "odd": Call((49, 47, 48, 0), dtype=torch.float16, gqa=7, head_dim=80, page_size=48),
    "float32": Call((33, 100), dtype=torch.float32, head_dim=64),
    "window": Call((200, 64), window=65, page_size=64),
    "chunks": Call((200, 64, 900), chunk=65),
    "chunks_speculative": Call((200, 64, 900), query_len=4, chunk=66),
    "triton_chunks": Call((200, 64, 900), chunk=65, native=False),
    "two_sizes": Call((200, 64, 900), head_dim=192, v_head_dim=128),
    "two_sizes_one": Call((900,), head_dim=192, v_head_dim=128, num_sms=132),
    "two_sizes_fp8": Call((200, 64, 900), head_dim=64, v_head_dim=128, kv_dtype=E4M3),
    "triton_two_sizes": Call((200, 64, 900), head_dim=192, v_head_dim=128, native=False),
    "heads_of_72": Call((200, 64, 900), head_dim=72),
    "odd_sizes": Call((200, 64, 900), head_dim=33, v_head_dim=71),
    "heads_of_512": Call((200, 64, 900), head_dim=512),
    "options": Call((200, 1, 900), window=65, softcap=30.0, alibi=True, sinks=True, heads_first=True),
    "triton_options": Call((200, 1, 900), softcap=30.0, alibi=True, sinks=True, heads_first=True, native=False),
    "invariant": Call((900, 3), batch_invariant=True),
    "invariant_full": Call((20000,), batch_invariant=True, num_sms=64),
    "varlen": Call((40, 7, 130), (40, 1, 33)),
    "varlen_fp8": Call((40, 7, 130), (40, 1, 33), kv_dtype=E4M3),
    "varlen_chunks": Call((40, 7, 130), (40, 1, 33), chunk=16, head_dim=71, v_head_dim=33),
    "contiguous": Call((40, 7, 130), (40, 1, 33), contiguous=True),
}


def run(call: Call, device: torch.device) -> None:
    """Make the inputs, run the call twice, and check the result."""
    heads, reqs, kv_dtype = 2, len(call.lengths), call.kv_dtype or call.dtype
    num_tokens = sum(call.query_lens) or reqs * call.query_len
    pages = [-(-length // call.page_size) for length in call.lengths]
    table = torch.zeros(reqs, max(pages), dtype=torch.int32)
    first = 1
    for req, count in enumerate(pages):
        table[req, :count] = torch.arange(first, first + count)
        first += count
    shape = (sum(call.lengths), heads) if call.contiguous else (first, call.page_size, heads)
    v_head_dim = call.v_head_dim or call.head_dim
    k, v = (torch.randn(*shape, size, device=device).to(kv_dtype) for size in (call.head_dim, v_head_dim))
    if call.heads_first:
        k, v = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (k, v))
    q = torch.randn(num_tokens, heads * call.gqa, call.head_dim, device=device).to(call.dtype)
    sizes = {
        "num_q_heads": heads * call.gqa,
        "num_kv_heads": heads,
        "head_dim": call.head_dim,
        "v_head_dim": v_head_dim,
        "dtype": call.dtype,
        "kv_dtype": kv_dtype,
        "num_sms": call.num_sms,
        "batch_invariant": call.batch_invariant,
    }
    if not call.query_lens:
        sizes |= {"native": call.native, "query_len": call.query_len}
    arguments = (reqs, num_tokens) if call.query_lens else (reqs,)
    make_plan = AttentionPlan.varlen if call.query_lens else AttentionPlan.decode
    plan = make_plan(*arguments, **sizes)  # type: ignore[operator]  # a dict of several types
    starts = torch.tensor([0, *call.query_lens]).cumsum(0).int().to(device) if call.query_lens else None
    lengths = torch.tensor(call.lengths, dtype=torch.int32, device=device)
    workspace = AttentionWorkspace.allocate([plan], device)
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32, device=device)
    scale = torch.full((heads,), 0.5, device=device) if call.scales else None
    sinks = torch.ones(heads * call.gqa, device=device) if call.sinks else None
    slopes = torch.rand(heads * call.gqa, device=device) if call.alibi else None
    options = AttentionOptions(
        call.head_dim**-0.5,
        sliding_window=call.window,
        attention_chunk_size=call.chunk,
        logits_softcap=call.softcap,
        alibi_slopes=slopes,
        sinks=sinks,
        k_scale=scale,
        v_scale=scale,
    )
    spans = {"sliding_window": call.window, "attention_chunk_size": call.chunk}
    out, lse = (torch.full((*q.shape[:2], *more), float("nan"), device=device) for more in ((v_head_dim,), ()))
    out = out.to(call.dtype)
    for _ in range(2):
        if call.contiguous and starts is not None:
            kv_starts = torch.tensor([0, *call.lengths]).cumsum(0).int().to(device)
            schedule_attention(plan, kv_starts, work_list, query_start_loc=starts, seq_lens_are_starts=True)
            contiguous_attention(q, k, v, kv_starts, starts, out, plan, work_list, workspace, options, lse=lse)
        else:
            schedule_attention(plan, lengths, work_list, query_start_loc=starts, **spans)
            tensors = (q, k, v, table.to(device), lengths, out, plan, work_list, workspace, options)
            paged_attention(*tensors, query_start_loc=starts, lse=lse)
    right = not lse.isnan().any() and not workspace.counters.any()
    if not call.contiguous:
        right &= bool((out.cpu() - reference(plan, options, q, k, v, table, lengths, starts)).abs().max() < 0.05)
    if not right or not out.isfinite().all():
        raise SystemExit(f"sanitize_kernels: wrong result of {call}")


def reference(plan: AttentionPlan, options: AttentionOptions, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Return the result of the operator on CPU tensors."""
    q, k, v, table, lengths, starts = (None if t is None else t.cpu() for t in tensors)
    assert q is not None, "only the starts are optional"
    moved = {name: getattr(options, name) for name in ("alibi_slopes", "sinks", "k_scale", "v_scale")}
    on_cpu = replace(options, **{name: None if t is None else t.cpu() for name, t in moved.items()})
    out = q.new_empty(*q.shape[:2], plan.shape.v_head_dim)
    work_list = torch.zeros(plan.work_list_words, dtype=torch.int32)
    workspace = AttentionWorkspace.allocate([plan], q.device)
    paged_attention(q, k, v, table, lengths, out, plan, work_list, workspace, on_cpu, query_start_loc=starts)
    return out


def write(dtype: torch.dtype, device: torch.device) -> None:
    """Compare norms, rotation and KV write with CPU tensors; one token has no KV slot."""
    tokens, heads, head_dim = 5, 2, 80
    slots, positions = torch.tensor([7, -1, 0, 31, 16]), torch.tensor([3, 0, 1, 2, 0])
    q, k, v = (torch.randn(tokens, n, head_dim).bfloat16() for n in (3 * heads, heads, heads))
    cos_sin, weight = torch.randn(4, 64), torch.rand(head_dim).bfloat16()
    results = []
    for target in (device, torch.device("cpu")):
        caches = torch.zeros(2, 2, 16, heads, head_dim).to(dtype)
        at = [x.to(target, copy=True) for x in (q, k, v, *caches, slots, positions)]
        scale = torch.full((1,), 0.25, device=target) if dtype.itemsize == 1 else None
        rotary = Rotary(cos_sin.to(target), weight.to(target), weight.to(target), 1e-6)
        write_kv(*at, rotary=rotary, k_scale=scale, v_scale=scale)
        results.append([x.float().cpu() for x in (at[0], at[3], at[4])])
    if not all(torch.allclose(a, b, rtol=0.13, atol=0.05) for a, b in zip(*results, strict=True)):  # one ULP of e4m3
        raise SystemExit(f"sanitize_kernels: wrong result of write_kv to {dtype}")


def merge(device: torch.device) -> None:
    """Compare a merge with CPU tensors; for one token, one side saw no key."""
    sides = [(torch.randn(5, 6, 80).bfloat16(), torch.randn(5, 6)) for _ in "ab"]
    sides[0][1][2] = float("-inf")
    results = []
    for target in (device, torch.device("cpu")):
        out, lse = torch.empty(5, 6, 80, dtype=torch.bfloat16, device=target), torch.empty(5, 6, device=target)
        merge_attention(*(x.to(target) for side in sides for x in side), out, lse)
        results.append((out.float().cpu(), lse.cpu()))
    if not all(torch.allclose(a, b, rtol=0.01, atol=0.01) for a, b in zip(*results, strict=True)):
        raise SystemExit("sanitize_kernels: wrong result of merge_attention")


def products(tokens: int, bits: int, device: torch.device) -> None:
    """Compare the products of a layer with CPU tensors."""
    heads, kv_heads, dim, hidden, inner = 4, 2, 64, 256, 384
    sizes = (((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner))
    weights = [make_weight(*size, bits, torch.device("cpu")) for size in (*sizes, (96, hidden))]
    x, residual = torch.randn(2, tokens, hidden).bfloat16()
    gain, caches = torch.rand(hidden).bfloat16(), torch.zeros(2, 5, 16, kv_heads, dim).bfloat16()
    slots, cos_sin = torch.randperm(80)[:tokens], torch.rand(tokens, dim)
    slots[0] = -1
    results = []
    for target in (device, torch.device("cpu")):
        qkv, o, gate_up, down, head = (weight.to(target) for weight in weights)
        at = [tensor.to(target, copy=True) for tensor in (x, residual, gain, *caches, slots, cos_sin)]
        vectors, total, norm, k_cache, v_cache, where, table = at
        positions = torch.arange(tokens, device=target)
        q = linear_rope_write(vectors, qkv, k_cache, v_cache, where, positions, rotary=Rotary(table))
        normed = linear_add(q.flatten(1), o, total, norm, 1e-5)
        normed = linear_add(linear_silu_mul(normed, gate_up), down, total, norm, 1e-5)
        logits = linear(normed, head, rows=positions[-1:])
        results.append([tensor.float().cpu() for tensor in (q, k_cache, v_cache, total, logits)])
    if not all(torch.allclose(a, b, rtol=0.02, atol=0.05) for a, b in zip(*results, strict=True)):
        raise SystemExit(f"sanitize_kernels: wrong result of products of {tokens} tokens, {bits} bits per weight")


CASES: dict[str, Callable[[torch.device], None]] = {
    **{name: partial(run, call) for name, call in CALLS.items()},
    "write_kv": partial(write, torch.bfloat16),
    "write_kv_fp8": partial(write, E4M3),
    "merge": merge,
    **{f"products_{tokens}": partial(products, tokens, 16) for tokens in (1, 16, 33, 64)},
    **{f"products_{tokens}_{bits}_bits": partial(products, tokens, bits) for tokens in (3, 32) for bits in (8, 4)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="comma-separated cases")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"--only: expected some of {', '.join(CASES)}, got {', '.join(unknown)}")
    for name in names:
        CASES[name](torch.device(arguments.device))
    print(f"ok {len(names)} cases: {', '.join(names)}")


if __name__ == "__main__":
    main()
