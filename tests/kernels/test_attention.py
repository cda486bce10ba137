"""Attention kernels and their reference against a dense float64 oracle, with NaN wherever no result may come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from graphrt.kernels.attention.paged_decode import paged_decode
from graphrt.kernels.attention.reference import attention_reference
from graphrt.kernels.attention.splits import DecodeWorkspace
from graphrt.kernels.attention.varlen import varlen_attention

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAN = float("nan")
UNWRITTEN = 777.0


@dataclass(frozen=True)
class Case:
    """One attention problem; a row is (seq_len, query_len), and what the rows leave of `padded_tokens` is padding."""

    id: str
    rows: tuple[tuple[int, int], ...]
    dtype: torch.dtype = F32
    page_size: int = 16
    layout: str = "NHD"
    num_kv_heads: int = 1
    group: int = 4
    head_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    num_splits: int = 1
    pad_tokens: int = 0
    qk_size: float = 1.0

    @property
    def options(self) -> dict[str, float | int]:
        return {
            "softmax_scale": self.head_dim**-0.5,
            "sliding_window": self.window,
            "logits_softcap": self.softcap,
        }


@dataclass
class Problem:
    """Tensors of a case on a device, and the dense K and V of each row on the CPU, of which the oracle is made."""

    case: Case
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens

    def run_varlen(self, function=varlen_attention) -> torch.Tensor:
        self.out.fill_(UNWRITTEN)
        function(*self.tensors, self.query_start_loc, self.out, **self.case.options)
        return self.out.cpu().clone()

    def run_decode(self, workspace: DecodeWorkspace) -> torch.Tensor:
        self.out.fill_(UNWRITTEN)
        query_len, splits = self.case.rows[0][1], self.case.num_splits
        options = self.case.options
        paged_decode(*self.tensors, self.out, workspace, query_len=query_len, num_splits=splits, **options)
        return self.out.cpu().clone()


def make_problem(case: Case, rng: torch.Generator, device: torch.device) -> Problem:
    """Random tensors; NaN in the null page, in pages that no row owns, in page tails and in the queries of padding."""
    size, heads, dim = case.page_size, case.num_kv_heads, case.head_dim
    pages_of = [-(-seq_len // size) for seq_len, _ in case.rows]
    num_pages = 3 + sum(pages_of)
    order = (torch.randperm(num_pages - 1, generator=rng) + 1).tolist()
    shape = (num_pages, size, heads, dim) if case.layout == "NHD" else (num_pages, heads, size, dim)
    k_cache, v_cache = (torch.full(shape, NAN, dtype=case.dtype) for _ in range(2))
    if case.layout == "HND":
        k_cache, v_cache = k_cache.permute(0, 2, 1, 3), v_cache.permute(0, 2, 1, 3)
    block_table = torch.zeros(len(case.rows), max([2, *pages_of]) + 1, dtype=torch.int32)
    dense = []
    for row, (seq_len, _) in enumerate(case.rows):
        k, v = (torch.randn(seq_len, heads, dim, generator=rng).to(case.dtype) for _ in range(2))
        dense.append((k, v))
        for column in range(pages_of[row]):
            page, part = order.pop(), slice(column * size, min(seq_len, (column + 1) * size))
            block_table[row, column] = page
            k_cache[page, : part.stop - part.start] = k[part]
            v_cache[page, : part.stop - part.start] = v[part]
    starts = torch.tensor([0, *(query_len for _, query_len in case.rows)]).cumsum(0).to(torch.int32)
    num_tokens, num_q_heads = int(starts[-1]) + case.pad_tokens, heads * case.group
    q = (case.qk_size * torch.randn(num_tokens, num_q_heads, dim, generator=rng)).to(case.dtype)
    for row, (seq_len, _) in enumerate(case.rows):
        if seq_len == 0:
            q[starts[row] : starts[row + 1]] = NAN
    q[starts[-1] :] = NAN
    on_device = [t.to(device) for t in (q, k_cache, v_cache, block_table, torch.tensor([r[0] for r in case.rows]))]
    on_device[4] = on_device[4].to(torch.int32)
    return Problem(case, *on_device, starts.to(device), torch.empty_like(on_device[0]), dense)


def expected(problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    """The definition, token by token and head by head, with every operation in `dtype`."""
    case, q = problem.case, problem.q.cpu().to(dtype)
    out = torch.zeros(q.shape, dtype=dtype)
    token = 0
    for (seq_len, query_len), (k, v) in zip(case.rows, problem.dense, strict=True):
        for position in range(seq_len - query_len, seq_len):
            first = max(0, position + 1 - case.window) if case.window else 0
            for head in range(q.shape[1]):
                if position >= 0:
                    keys, values = (x[first : position + 1, head // case.group].to(dtype) for x in (k, v))
                    logits = keys @ q[token, head] * case.head_dim**-0.5
                    if case.softcap:
                        logits = case.softcap * torch.tanh(logits / case.softcap)
                    out[token, head] = torch.softmax(logits, 0) @ values
            token += 1
    return out


def assert_accurate(problem: Problem, got: torch.Tensor) -> None:
    """Error at most twice that of plain torch in the same dtype, plus 1e-5; exact zeros where nothing is seen."""
    truth = expected(problem, torch.float64)
    plain = expected(problem, problem.case.dtype)
    bound = 2 * (plain.double() - truth).abs().max().item() + 1e-5
    error = (got.double() - truth).abs().max().item()
    assert error <= bound, f"max error {error:.3g}, allowed {bound:.3g}"
    nothing_seen = (truth == 0).flatten(1).all(1)
    assert torch.equal(got[nothing_seen], torch.zeros_like(got[nothing_seen]))


def make_workspace(problem: Problem) -> DecodeWorkspace:
    """Scratch memory of exactly the size that is needed, NaN where its contents may not matter."""
    tokens, heads, dim = problem.q.shape
    count = tokens * heads * problem.case.num_splits
    return DecodeWorkspace(
        torch.full((count * dim,), NAN, device=problem.q.device),
        torch.full((count,), NAN, device=problem.q.device),
        torch.zeros(tokens * heads, dtype=torch.int32, device=problem.q.device),
    )


def decode(seq_lens: tuple[int, ...], query_len: int = 1) -> tuple[tuple[int, int], ...]:
    return tuple((seq_len, query_len) for seq_len in seq_lens)


EDGES = (0, 1, 15, 16, 17)  # of a page of 16

DECODE_CASES = [
    Case("one_token", decode((1,))),
    Case("edges_of_page_16", decode(EDGES)),
    Case("edges_of_page_1", decode((0, 1, 2, 5)), page_size=1),
    Case("edges_of_page_48", decode((47, 0, 48, 49)), page_size=48),
    Case("edges_of_page_64", decode((63, 64, 65, 0)), page_size=64, num_splits=2),
    Case("page_larger_than_tile", decode((1, 100, 64)), page_size=256, num_splits=3),
    Case("page_of_1024", decode((130,)), page_size=1024, num_splits=2),
    Case("fp16_edges", decode(EDGES), dtype=F16, num_splits=2),
    Case("bf16_edges", decode(EDGES), dtype=BF16, num_splits=2),
    Case("hnd", decode((5, 33, 0)), layout="HND", num_kv_heads=2, group=2),
    Case("hnd_bf16_page_64", decode((70, 3)), layout="HND", num_kv_heads=2, group=2, dtype=BF16, page_size=64),
    Case("group_1", decode((40, 7)), group=1, num_kv_heads=3, num_splits=2),
    Case("group_3", decode((40, 7)), group=3, num_kv_heads=2, num_splits=2),
    Case("group_7_bf16", decode((150, 7)), group=7, dtype=BF16, num_splits=2),
    Case("group_16_fp16", decode((150, 7)), group=16, dtype=F16, num_splits=2),
    Case("group_71", decode((40, 7)), group=71, dtype=F16, num_splits=2),
    Case("head_dim_16", decode((33, 7)), head_dim=16),
    Case("head_dim_80", decode((33, 70)), head_dim=80, num_splits=2),
    Case("head_dim_96_bf16", decode((33, 70)), head_dim=96, dtype=BF16, num_splits=2),
    Case("head_dim_128_bf16", decode((140, 5)), head_dim=128, dtype=BF16, num_splits=3),
    Case("head_dim_256", decode((33, 7)), head_dim=256, num_splits=2),
    Case("head_dim_256_fp16", decode((70, 7)), head_dim=256, dtype=F16, num_splits=2),
    Case("query_len_2", decode((17, 0, 2, 40), 2), num_splits=2),
    Case("query_len_2_longer_than_row", decode((1, 33), 2), num_splits=2),
    Case("query_len_5_group_7", decode((5, 0, 66), 5), group=7, num_splits=3),
    Case("query_len_5_bf16", decode((5, 129), 5), group=4, dtype=BF16, head_dim=128, num_splits=3),
    Case("query_len_16_group_7_fp16", decode((16, 65), 16), group=7, dtype=F16, head_dim=128, num_splits=2),
    Case("ragged", decode((1, 100, 0, 31, 64, 17)), num_kv_heads=2, group=2, num_splits=3),
    Case("more_splits_than_tiles", decode((33, 1, 0)), num_splits=64),
    Case("many_splits", decode((300, 90)), group=2, num_splits=7),
    Case("splits_fill_two_merges", decode((32 * 17,)), group=64, num_splits=17, head_dim=32),
    Case("window", decode((100, 0, 20, 21)), window=20, num_splits=2),
    Case("window_of_1", decode((33, 1)), window=1),
    Case("window_query_len_5", decode((100, 5, 64), 5), window=33, num_splits=3),
    Case("window_bf16_page_64", decode((200, 64)), window=65, page_size=64, dtype=BF16, num_splits=2),
    Case("softcap", decode((70, 3)), softcap=2.0, qk_size=5.0, num_splits=2),
    Case("softcap_saturated", decode((70, 3)), softcap=0.5, qk_size=1000.0),
    Case("softcap_large", decode((70, 3)), softcap=1000.0),
    Case("large_logits_bf16", decode((70, 3)), qk_size=30.0, dtype=BF16, num_splits=2),
    Case("window_softcap_bf16", decode((140, 3), 2), window=70, softcap=30.0, dtype=BF16, num_splits=2),
]

VARLEN_CASES = [
    Case("decodes", decode(EDGES), pad_tokens=3),
    Case("one_prompt", ((37, 37),)),
    Case("prompt_fills_tile_bf16", ((64, 16),), dtype=BF16),
    Case("kv_tile_begins_with_last_token_of_query_tile", ((40, 11),)),
    Case("chunks_and_decodes", ((17, 1), (50, 1), (40, 33), (80, 9)), pad_tokens=5, num_kv_heads=2, group=2),
    Case("chunks_and_decodes_bf16", ((17, 1), (150, 1), (40, 33), (80, 9)), pad_tokens=5, dtype=BF16),
    Case("chunks_and_decodes_hnd_fp16", ((17, 1), (40, 33)), layout="HND", dtype=F16, num_kv_heads=2, group=3),
    Case("invalid_row_between", ((17, 1), (0, 21), (40, 3))),
    Case("empty_rows", ((0, 0), (17, 3), (0, 0), (20, 20), (0, 0)), pad_tokens=20),
    Case("only_padding", ((0, 0), (0, 0)), pad_tokens=9),
    Case("longer_than_row", ((3, 7), (2, 1))),
    Case("page_1", ((5, 5), (19, 1)), page_size=1),
    Case("page_48", ((49, 3), (48, 48)), page_size=48),
    Case("page_64_bf16", ((130, 3), (64, 2)), page_size=64, dtype=BF16),
    Case("page_larger_than_tile", ((70, 3), (64, 2)), page_size=256),
    Case("group_1", ((40, 20), (9, 1)), group=1, num_kv_heads=2),
    Case("group_3_straddles_tiles", ((40, 20), (9, 5)), group=3),
    Case("group_7_straddles_tiles_bf16", ((40, 20), (9, 5)), group=7, dtype=BF16),
    Case("group_71", ((40, 2), (9, 1)), group=71, dtype=F16),
    Case("head_dim_16", ((33, 7),), head_dim=16),
    Case("head_dim_80_fp16", ((33, 7),), head_dim=80, dtype=F16),
    Case("head_dim_128_bf16", ((100, 30),), head_dim=128, dtype=BF16),
    Case("head_dim_256", ((33, 7),), head_dim=256),
    Case("window", ((60, 30), (100, 1), (5, 5)), window=17, pad_tokens=2),
    Case("window_bf16", ((150, 30), (200, 1)), window=70, dtype=BF16),
    Case("softcap", ((60, 20), (3, 1)), softcap=2.0, qk_size=5.0),
    Case("window_softcap_bf16", ((90, 20), (3, 1)), window=33, softcap=30.0, dtype=BF16),
]

REFERENCE_CASES = VARLEN_CASES + [
    replace(case, id=f"decode_{case.id}") for case in DECODE_CASES if case.window or case.rows[0][1] > 1
]


def by_id(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.id) for case in cases]


@pytest.mark.parametrize("case", by_id(DECODE_CASES))
def test_paged_decode(case: Case, kernel_device: torch.device, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, kernel_device)
    workspace = make_workspace(problem)
    first = problem.run_decode(workspace)
    assert_accurate(problem, first)
    assert not workspace.counters.any(), "the kernel must leave its counters at 0"
    workspace.partial_out.fill_(NAN)
    workspace.partial_lse.fill_(NAN)
    assert torch.equal(problem.run_decode(workspace), first), "a second run must give the same bits"


@pytest.mark.parametrize("case", by_id(VARLEN_CASES))
def test_varlen_attention(case: Case, kernel_device: torch.device, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, kernel_device)
    assert_accurate(problem, problem.run_varlen())


@pytest.mark.parametrize("case", by_id(REFERENCE_CASES))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_reference(case: Case, device: str, rng: torch.Generator) -> None:
    problem = make_problem(case, rng, torch.device(device))
    assert_accurate(problem, problem.run_varlen(attention_reference))


@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_cpu_runs_the_reference(op: str, rng: torch.Generator) -> None:
    """Without the interpreter the ops give on CPU, bit for bit, what attention_reference gives."""
    problem = make_problem(Case("", decode((40, 0, 17), 2), num_splits=3), rng, torch.device("cpu"))
    want = problem.run_varlen(attention_reference)
    got = problem.run_varlen() if op == "varlen" else problem.run_decode(make_workspace(problem))
    assert torch.equal(got, want)


@pytest.mark.parametrize("op", ["decode", "varlen", "reference"])
def test_strided_tensors(op: str, kernel_device: torch.device, rng: torch.Generator) -> None:
    """Queries inside a qkv tensor, K and V interleaved by page, output in a larger tensor, a table with a margin."""
    case = Case("", decode((40, 0, 17)), num_kv_heads=2, group=2, num_splits=2)
    dense = make_problem(case, rng, kernel_device)
    qkv = torch.cat([dense.q, torch.full_like(dense.q, NAN)], dim=1)
    kv = torch.stack([dense.k_cache, dense.v_cache], dim=1)
    table = torch.nn.functional.pad(dense.block_table, (0, 3), value=-1)
    out = torch.full_like(qkv, UNWRITTEN)
    problem = replace(
        dense,
        q=qkv[:, :4],
        k_cache=kv[:, 0],
        v_cache=kv[:, 1],
        block_table=table[:, : dense.block_table.shape[1]],
        out=out[:, 4:],
    )
    if op == "decode":
        got = problem.run_decode(make_workspace(problem))
    else:
        got = problem.run_varlen(varlen_attention if op == "varlen" else attention_reference)
    assert_accurate(problem, got)
    assert (out[:, :4] == UNWRITTEN).all()


@pytest.mark.parametrize("op", ["decode", "varlen", "reference"])
def test_pages_before_the_window_may_be_gone(op: str, kernel_device: torch.device, rng: torch.Generator) -> None:
    """A cache manager may free what a window no longer sees and put the null page in its place."""
    case = Case("", decode((100, 37)), window=20, page_size=16, num_splits=2)
    problem = make_problem(case, rng, kernel_device)
    for row, (seq_len, _) in enumerate(case.rows):
        problem.block_table[row, : (seq_len - case.window) // case.page_size] = 0
    if op == "decode":
        got = problem.run_decode(make_workspace(problem))
    else:
        got = problem.run_varlen(varlen_attention if op == "varlen" else attention_reference)
    assert_accurate(problem, got)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [2, 16, 64])
def test_merge_does_not_depend_on_arrival(num_splits: int, rng: torch.Generator) -> None:
    """Programs run in any order on a GPU: 200 runs over one workspace give the same bits and counters of 0."""
    rows = tuple((int(n), 1) for n in torch.randint(1, 3000, (48,), generator=rng))
    case = Case("", rows, dtype=BF16, num_kv_heads=8, head_dim=128, num_splits=num_splits)
    problem = make_problem(case, rng, torch.device("cuda"))
    workspace = make_workspace(problem)
    first = problem.run_decode(workspace)
    assert_accurate(problem, first)
    other = make_problem(case, rng, torch.device("cuda"))
    expected = [(problem, first), (other, other.run_decode(workspace))]
    assert_accurate(*expected[1])
    for turn in range(200):
        # Partial results of another problem, then NaN: a merge that comes too early or reads a stale line shows.
        if turn % 3 == 2:
            workspace.partial_out.fill_(float("nan"))
            workspace.partial_lse.fill_(float("nan"))
        current, wanted = expected[turn % 2]
        assert torch.equal(current.run_decode(workspace), wanted)
    assert not workspace.counters.any()
