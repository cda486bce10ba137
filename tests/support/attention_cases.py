"""Attention problems with a dense oracle, shared by the tests of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.operators import contiguous_attention, paged_attention
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN = float("nan")
UNWRITTEN = 768.0  # exact in every dtype


@dataclass(frozen=True)
class Case:
    """One attention problem; a request is (seq_len, query_len), and pad_tokens padding tokens follow.

    gqa          query heads per KV head
    v_head_dim   0: head_dim
    num_sms      multiprocessors of the device, which set the number of work partitions
    sides        of prompt attention: positions before and after its own that a token sees; None: all
    packed       of prompt attention: K and V are packed instead of paged
    first_req    of prompt attention: another kernel owns the requests before it
    """

    id: str
    reqs: tuple[tuple[int, int], ...]
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype | None = None
    page_size: int = 16
    layout: str = "NHD"
    num_kv_heads: int = 1
    gqa: int = 4
    head_dim: int = 64
    v_head_dim: int = 0
    causal: bool = True
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    alibi: str = ""  # "", "linear" or "sqrt"
    sinks: bool = False
    scale_per_head: bool = False
    lse: bool = True
    batch_invariant: bool = False
    native: bool = True  # plan for the CUDA kernel if it supports the shape; on CPU the Triton kernel uses such a plan
    num_sms: int = 2
    pad_tokens: int = 0
    qk_size: float = 1.0
    sides: tuple[int, int] | None = None
    packed: bool = False
    first_req: int = 0

    @property
    def heads(self) -> dict[str, Any]:
        return {
            "num_q_heads": self.num_kv_heads * self.gqa,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim or None,
            "dtype": self.dtype,
        }

    @property
    def spans(self) -> dict[str, Any]:
        """The arguments of `schedule_attention` that the mask needs."""
        return {
            "causal": self.causal,
            "sliding_window": self.window,
            "attention_chunk_size": self.chunk,
        }

    @property
    def reach(self) -> tuple[float, float]:
        """Positions before and after its own that a token sees, without chunks."""
        if self.causal:
            return (self.window - 1 if self.window else float("inf")), 0
        return self.sides or (float("inf"), float("inf"))

    @property
    def stored(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def decode_plan(self) -> AttentionPlan:
        return AttentionPlan.decode(
            len(self.reqs), query_len=self.reqs[0][1], kv_dtype=self.stored, num_sms=self.num_sms,
            batch_invariant=self.batch_invariant, native=self.native, **self.heads,
        )  # fmt: skip


@dataclass
class Problem:
    """Tensors of a case on a device, and the dequantized dense K and V of each request for the oracle."""

    case: Case
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    options: AttentionOptions
    dense: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    workspaces: dict[AttentionPlan, tuple[AttentionWorkspace, torch.Tensor]] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens

    def decode_plan(self) -> AttentionPlan:
        return self.case.decode_plan()

    def varlen_plan(self) -> AttentionPlan:
        case = self.case
        return AttentionPlan.varlen(
            len(case.reqs), self.q.shape[0], kv_dtype=case.stored, num_sms=case.num_sms,
            batch_invariant=case.batch_invariant, **case.heads,
        )  # fmt: skip

    def scratch(self, plan: AttentionPlan) -> tuple[AttentionWorkspace, torch.Tensor]:
        """Scratch memory of the exact size, filled with NaN or invalid values where its contents must not matter."""
        if plan not in self.workspaces:
            workspace = AttentionWorkspace.allocate([plan], self.q.device)
            workspace.partial_out.fill_(NAN)
            workspace.partial_lse.fill_(NAN)
            work_list = torch.full((plan.work_list_words,), -(1 << 30), dtype=torch.int32, device=self.q.device)
            self.workspaces[plan] = workspace, work_list
        return self.workspaces[plan]

    def run(self, op: str = "decode") -> torch.Tensor:
        """Schedule and attend; op is decode, varlen or contiguous. Fails unless the kernel resets its counters."""
        self.out.fill_(UNWRITTEN)
        if self.lse is not None:
            self.lse.fill_(UNWRITTEN)
        plan = self.decode_plan() if op == "decode" else self.varlen_plan()
        workspace, work_list = self.scratch(plan)
        starts = None if op == "decode" else self.query_start_loc
        schedule = self.case.spans
        if op == "contiguous":
            k, v, kv_starts = self.contiguous()
            schedule_attention(plan, kv_starts, work_list, query_start_loc=starts, seq_lens_are_starts=True, **schedule)
            contiguous_attention(
                self.q, k, v, kv_starts, self.query_start_loc, self.out, plan, work_list, workspace, self.options,
                lse=self.lse,
            )  # fmt: skip
        else:
            schedule_attention(plan, self.seq_lens, work_list, query_start_loc=starts, **schedule)
            paged_attention(
                *self.tensors, self.out, plan, work_list, workspace, self.options, query_start_loc=starts, lse=self.lse
            )
        assert not workspace.counters.any(), "the kernel must leave its counters at 0"
        return self.out.cpu().clone()

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V of all requests, packed and followed by NaN, and the first position of each request."""
        size = self.case.page_size
        parts = []
        for cache in (self.k_cache, self.v_cache):
            reqs = [
                cache[self.block_table[req, : -(-seq_len // size)].long()].flatten(0, 1)[:seq_len]
                for req, (seq_len, _) in enumerate(self.case.reqs)
            ]
            parts.append(torch.cat([*reqs, cache[0].flip(0)]))
        starts = torch.tensor([0, *(seq_len for seq_len, _ in self.case.reqs)]).cumsum(0)
        return parts[0], parts[1], starts.to(torch.int32).to(self.q.device)


def make_problem(case: Case, rng: torch.Generator, device: torch.device) -> Problem:
    """Random tensors. NaN wherever a request does not read: in the null page, in unallocated pages, in page tails,
    before the window or the chunk of its first token, and in the queries of padding."""
    size, heads, dims = case.page_size, case.num_kv_heads, (case.head_dim, case.v_head_dim or case.head_dim)
    pages_of = [-(-seq_len // size) for seq_len, _ in case.reqs]
    num_pages = 3 + sum(pages_of)
    order = (torch.randperm(num_pages - 1, generator=rng) + 1).tolist()
    page = (size, heads) if case.layout == "NHD" else (heads, size)
    k_cache, v_cache = (torch.full((num_pages, *page, dim), NAN).to(case.stored) for dim in dims)
    if case.layout == "HND":
        k_cache, v_cache = k_cache.permute(0, 2, 1, 3), v_cache.permute(0, 2, 1, 3)
    k_scale, v_scale = _scales(case, rng)
    block_table = torch.zeros(len(case.reqs), max([2, *pages_of]) + 1, dtype=torch.int32)
    dense = []
    for req, (seq_len, query_len) in enumerate(case.reqs):
        k, v = (torch.randn(seq_len, heads, dim, generator=rng).to(case.stored) for dim in dims)
        dense.append((_dequantize(k.clone(), k_scale), _dequantize(v.clone(), v_scale)))
        hidden = _hidden(case, seq_len, query_len)
        k[:hidden], v[:hidden] = (torch.full_like(x[:hidden].float(), NAN).to(x.dtype) for x in (k, v))
        for column in range(pages_of[req]):
            page, part = order.pop(), slice(column * size, min(seq_len, (column + 1) * size))
            block_table[req, column] = page
            k_cache[page, : part.stop - part.start] = k[part]
            v_cache[page, : part.stop - part.start] = v[part]
    starts = torch.tensor([0, *(query_len for _, query_len in case.reqs)]).cumsum(0).to(torch.int32)
    num_tokens, num_q_heads = int(starts[-1]) + case.pad_tokens, heads * case.gqa
    q = (case.qk_size * torch.randn(num_tokens, num_q_heads, dims[0], generator=rng)).to(case.dtype)
    for req, (seq_len, _) in enumerate(case.reqs):
        if seq_len == 0:
            q[starts[req] : starts[req + 1]] = NAN
    q[starts[-1] :] = NAN
    slopes = torch.rand(num_q_heads, generator=rng) if case.alibi else None
    sinks = torch.randn(num_q_heads, generator=rng) * 3 if case.sinks else None
    lengths = torch.tensor([seq_len for seq_len, _ in case.reqs], dtype=torch.int32)
    on_device = [t.to(device) for t in (q, k_cache, v_cache, block_table, lengths, starts)]
    moved = [None if t is None else t.to(device) for t in (slopes, sinks, k_scale, v_scale)]
    options = AttentionOptions(
        dims[0] ** -0.5, case.causal, case.window, case.chunk, case.softcap, moved[0], case.alibi == "sqrt", *moved[1:]
    )
    lse = torch.empty(num_tokens, num_q_heads, device=device) if case.lse else None
    out = torch.empty(num_tokens, num_q_heads, dims[1], dtype=case.dtype, device=device)
    return Problem(case, *on_device, out, lse, options, dense)


def _hidden(case: Case, seq_len: int, query_len: int) -> int:
    """Positions before the first one that any new token of a request sees."""
    first = max(seq_len - query_len, 0)
    if case.chunk:
        return first - first % case.chunk
    return max(seq_len - query_len + 1 - case.window, 0) if case.window else 0


def _scales(case: Case, rng: torch.Generator) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if case.stored == case.dtype:
        return None, None
    count = case.num_kv_heads if case.scale_per_head else 1
    return 0.5 + torch.rand(count, generator=rng), 0.5 + torch.rand(count, generator=rng)


def _dequantize(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return stored if scale is None else stored.double() * scale.double()[:, None]


def expected(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp by definition, for each request and head, with every operation in `dtype`."""
    left, right = problem.case.reach
    case, q, options = problem.case, problem.q.cpu().to(dtype), problem.options
    out = torch.zeros(*q.shape[:2], case.v_head_dim or case.head_dim, dtype=dtype)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype)
    start = 0
    for req, ((seq_len, query_len), (k, v)) in enumerate(zip(case.reqs, problem.dense, strict=True)):
        if req < case.first_req:
            out[start : start + query_len], lse[start : start + query_len] = UNWRITTEN, UNWRITTEN
            start += query_len
            continue
        where = torch.arange(seq_len)
        at = torch.arange(seq_len - query_len, seq_len)[:, None]
        visible = (where <= at + right) & (where >= at - left)
        if case.chunk:
            visible &= where.div(case.chunk, rounding_mode="floor") == at.div(case.chunk, rounding_mode="floor")
        for head in range(q.shape[1]):
            keys, values = (x[:, head // case.gqa].to(dtype) for x in (k, v))
            logits = q[start : start + query_len, head] @ keys.T * case.head_dim**-0.5
            if case.softcap:
                logits = case.softcap * torch.tanh(logits / case.softcap)
            if options.alibi_slopes is not None:
                distance = (at - where).abs().to(dtype)
                distance = distance.sqrt() if options.alibi_sqrt else distance
                logits = logits - options.alibi_slopes[head].cpu().to(dtype) * distance
            logits = logits.masked_fill(~visible, float("-inf"))
            if options.sinks is not None:
                sink = options.sinks[head].cpu().to(dtype).expand(query_len, 1)
                logits = torch.cat([logits, sink], 1)
            lse[start : start + query_len, head] = torch.logsumexp(logits, 1)
            shares = torch.softmax(logits, 1)[:, :seq_len].nan_to_num(0.0)
            out[start : start + query_len, head] = shares @ values
        if seq_len == 0:  # the queries of such a request are NaN
            out[start : start + query_len] = 0
        start += query_len
    if options.sinks is not None:
        lse[start:] = float("-inf")
    return out, lse


def assert_accurate(problem: Problem, got: torch.Tensor) -> None:
    """Error at most twice that of plain torch in the same dtype, plus 1e-5; exact values where nothing is computed."""
    truth, true_lse = expected(problem, torch.float64)
    plain, plain_lse = expected(problem, problem.case.dtype)
    bound = 2 * (plain.double() - truth).abs().max().item() + 1e-5
    error = (got.double() - truth).abs().max().item()
    assert error <= bound, f"max error {error:.3g}, allowed {bound:.3g}"
    exact = ((truth == 0) | (truth == UNWRITTEN)).flatten(1).all(1)
    assert torch.equal(got[exact].double(), truth[exact])
    if problem.lse is not None:
        have = problem.lse.cpu().double()
        seen = true_lse.isfinite()
        assert torch.equal(have.isfinite(), seen), "log-sum-exp of tokens that see no key"
        bound = 2 * (plain_lse.double() - true_lse)[seen].abs().max().item() + 1e-5 if seen.any() else 0.0
        error = (have - true_lse)[seen].abs().max().item() if seen.any() else 0.0
        assert error <= bound, f"max error of the log-sum-exp {error:.3g}, allowed {bound:.3g}"


def decode(seq_lens: tuple[int, ...], query_len: int = 1) -> tuple[tuple[int, int], ...]:
    return tuple((seq_len, query_len) for seq_len in seq_lens)


def strided(dense: Problem) -> tuple[Problem, torch.Tensor]:
    """Put queries into a qkv tensor, K and V side by side by page, and the table into a wider one.

    Also returns a part of the larger output that must keep the value UNWRITTEN.
    """
    heads = dense.q.shape[1]
    qkv = torch.cat([dense.q, torch.full_like(dense.q, NAN)], dim=1)
    kv = torch.stack([dense.k_cache, dense.v_cache], dim=1)
    table = torch.nn.functional.pad(dense.block_table, (0, 3), value=-1)
    out = torch.full_like(qkv, UNWRITTEN)
    tensors = {"q": qkv[:, :heads], "k_cache": kv[:, 0], "v_cache": kv[:, 1], "out": out[:, heads:]}
    return replace(dense, **tensors, block_table=table[:, : dense.block_table.shape[1]]), out[:, :heads]


def by_id(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=case.id) for case in cases]
