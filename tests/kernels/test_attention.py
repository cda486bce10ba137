"""The attention kernels and their reference against a dense float64 oracle, with NaN wherever no kernel may read."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.operators import paged_attention
from tests.support.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    NAN,
    UNWRITTEN,
    Case,
    Problem,
    assert_accurate,
    by_id,
    decode,
    make_problem,
    strided,
)
from tests.support.attention_checks import (
    COMBINATIONS,
    FACTORS,
    check_batch_invariant_reqs,
    check_infinite_values,
    check_large_queries,
    check_scales_of_keys,
    check_slopes,
    combination_case,
    combination_id,
)

EDGES = (0, 1, 15, 16, 17)  # of a page of 16

# Sizes and options that the covering array does not have.
DECODE_CASES = [
    Case("one_token", decode((1,))),
    Case("edges_of_page_16", decode(EDGES)),
    Case("two_pages_exactly", decode((32,))),
    Case("two_pages_and_their_edges", decode((31, 32, 33)), num_sms=2),
    Case("edges_of_page_1", decode((0, 1, 2, 5)), page_size=1),
    Case("edges_of_page_64", decode((63, 64, 65, 0)), page_size=64, num_sms=2),
    Case("page_of_1024", decode((130,)), page_size=1024, num_sms=2),
    Case("gqa_71", decode((40, 7)), gqa=71, dtype=F16, num_sms=2),
    Case("head_dim_16", decode((33, 7)), head_dim=16),
    Case("head_dim_1", decode((33, 7)), head_dim=1),
    Case("head_dim_17_bf16_hnd", decode((33, 7)), head_dim=17, dtype=BF16, layout="HND", num_kv_heads=2),
    Case("head_dim_255_page_1", decode((9, 3)), head_dim=255, page_size=1),
    Case("head_dim_512", decode((33, 7)), head_dim=512, num_sms=2),
    Case("head_dim_512_bf16", decode((70, 7), 2), head_dim=512, dtype=BF16, num_sms=2),
    Case("192_and_128_bf16_split", decode((900, 7)), head_dim=192, v_head_dim=128, dtype=BF16, num_sms=24),
    Case("128_and_1", decode((33, 7), 2), head_dim=128, v_head_dim=1, num_sms=3),
    Case("1_and_128_hnd", decode((33, 7)), head_dim=1, v_head_dim=128, layout="HND", num_sms=3),
    Case("40_and_512", decode((33, 7)), head_dim=40, v_head_dim=512, num_sms=2),
    Case("query_len_2", decode((17, 0, 2, 40), 2), num_sms=2),
    Case("cross", decode((1, 33, 0, 70)), causal=False, num_sms=2),
    Case("cross_longer_than_req", decode((2, 0, 1, 33), 4), causal=False, num_sms=2),
    Case("query_len_2_longer_than_req", decode((1, 33), 2), num_sms=2),
    Case("query_len_5_gqa_7", decode((5, 0, 66), 5), gqa=7, num_sms=3),
    Case("query_len_5_bf16", decode((5, 129), 5), gqa=4, dtype=BF16, head_dim=128, num_sms=3),
    Case("query_len_16_gqa_7_fp16", decode((16, 65), 16), gqa=7, dtype=F16, head_dim=128, num_sms=2),
    Case("ragged", decode((1, 100, 0, 31, 64, 17)), num_kv_heads=2, gqa=2, num_sms=3),
    Case("more_splits_than_tiles", decode((33, 1, 0)), num_sms=64),
    Case("many_splits", decode((300, 90)), gqa=2, num_sms=7),
    Case("splits_fill_two_merges", decode((32 * 17,)), gqa=64, num_sms=17, head_dim=32),
    Case("window", decode((100, 0, 20, 21)), window=20, num_sms=2),
    Case("window_of_1", decode((33, 1)), window=1),
    Case("window_query_len_5", decode((100, 5, 64), 5), window=33, num_sms=3),
    # Requests of one token: first, second and last position of a chunk, in the first chunk, over several pages.
    Case("chunks", decode((100, 0, 20, 21, 41, 40, 1)), chunk=20, num_sms=2),
    Case("chunks_of_1", decode((33, 1)), chunk=1),
    Case("chunks_longer_than_the_reqs", decode((33, 1)), chunk=34),
    Case("chunks_of_tiles", decode((65, 64, 129, 1)), chunk=64, native=False),  # the work list begins there: no mask
    Case("chunks_of_tiles_query_len_3", decode((130, 129, 65, 66, 64), 3), chunk=64),  # new tokens in two chunks
    Case("chunks_split", decode((400, 700)), chunk=300, num_sms=7),
    Case("chunks_query_len_5", decode((100, 5, 64, 2, 34, 37), 5), chunk=33, num_sms=3),  # new tokens in two chunks
    Case("chunks_of_2_query_len_5", decode((100, 5, 64, 3), 5), chunk=2, num_sms=3),  # in three chunks
    Case("softcap", decode((70, 3)), softcap=2.0, qk_size=5.0, num_sms=2),
    Case("softcap_saturated", decode((70, 3)), softcap=0.5, qk_size=1000.0),
    Case("softcap_large", decode((70, 3)), softcap=1000.0),
    Case("large_logits_bf16", decode((70, 3)), qk_size=30.0, dtype=BF16, num_sms=2),
]

VARLEN_CASES = [
    Case("one_prompt", ((37, 37),)),
    Case("prompt_fills_tile_bf16", ((64, 16),), dtype=BF16),
    Case("kv_tile_begins_with_last_token_of_query_tile", ((40, 11),)),
    Case("chunks_and_decodes", ((17, 1), (50, 1), (40, 33), (80, 9)), pad_tokens=5, num_kv_heads=2, gqa=2),
    Case("chunks_and_decodes_bf16", ((17, 1), (150, 1), (40, 33), (80, 9)), pad_tokens=5, dtype=BF16),
    Case("invalid_req_between", ((17, 1), (0, 21), (40, 3))),
    Case("empty_reqs", ((0, 0), (17, 3), (0, 0), (20, 20), (0, 0)), pad_tokens=20),
    Case("only_padding", ((0, 0), (0, 0)), pad_tokens=9),
    Case("longer_than_req", ((3, 7), (2, 1))),
    Case("page_1", ((5, 5), (19, 1)), page_size=1),
    Case("two_pages_exactly", ((32, 32), (32, 1))),
    Case("gqa_3_straddles_tiles", ((40, 20), (9, 5)), gqa=3),
    Case("gqa_7_straddles_tiles_bf16", ((40, 20), (9, 5)), gqa=7, dtype=BF16),
    Case("gqa_71", ((40, 2), (9, 1)), gqa=71, dtype=F16),
    Case("window", ((60, 30), (100, 1), (5, 5)), window=17, pad_tokens=2),
    Case("window_bf16", ((150, 30), (200, 1)), window=70, dtype=BF16),
    Case("chunks", ((60, 30), (100, 1), (5, 5), (64, 64)), chunk=17, pad_tokens=2),
    Case("chunks_of_1", ((20, 7), (5, 1)), chunk=1),
    Case("chunks_bf16", ((150, 30), (200, 1), (140, 1), (141, 1), (139, 1)), chunk=70, dtype=BF16),
    # Query tiles within one chunk skip the masks of whole KV tiles. Others do not, nor chunks between tile boundaries.
    Case("chunks_of_tiles_bf16", ((300, 100), (128, 128)), chunk=128, dtype=BF16),
    Case("chunks_off_tiles_bf16", ((300, 100), (200, 20)), chunk=100, dtype=BF16),
    Case("chunks_longer_than_req", ((3, 7), (2, 1), (90, 40)), chunk=60),
    Case("chunks_invalid_req_between", ((17, 1), (0, 21), (40, 3)), chunk=16),
    Case("head_dim_5", ((33, 7), (20, 1)), head_dim=5),
    Case("head_dim_512", ((33, 7),), head_dim=512, dtype=F16),
]


def check_case(case: Case, op: str, device: torch.device, rng: torch.Generator, *, runs: int = 2) -> None:
    problem = make_problem(case, rng, device)
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    first = problem.run(op)
    assert_accurate(problem, first)
    for _ in range(1, runs):
        for workspace, _ in problem.workspaces.values():
            workspace.partial_out.fill_(NAN)
            workspace.partial_lse.fill_(NAN)
        assert torch.equal(problem.run(op), first), "a second run must give the same bits"
    for before, after in zip(caches, (problem.k_cache, problem.v_cache), strict=True):
        assert torch.equal(before.view(torch.int8), after.view(torch.int8)), "the cache must not be written"


@pytest.mark.parametrize("case", by_id(DECODE_CASES))
def test_decode(case: Case, op_device: torch.device, rng: torch.Generator) -> None:
    check_case(case, "decode", op_device, rng)


@pytest.mark.parametrize("case", by_id(VARLEN_CASES))
def test_varlen(case: Case, op_device: torch.device, rng: torch.Generator) -> None:
    check_case(case, "varlen", op_device, rng)


@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_strided_tensors(op: str, op_device: torch.device, rng: torch.Generator) -> None:
    case = Case("", decode((40, 0, 17)), num_kv_heads=2, gqa=2)
    problem, rest = strided(make_problem(case, rng, op_device))
    assert_accurate(problem, problem.run(op))
    assert (rest == UNWRITTEN).all()


@pytest.mark.parametrize("seq_len", [1, 15, 16])
@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_cache_of_one_page(op: str, seq_len: int, op_device: torch.device, rng: torch.Generator) -> None:
    """Page 0 belongs to the request, and there is no other page."""
    made = make_problem(Case("", decode((seq_len,))), rng, op_device)
    page = int(made.block_table[0, 0])
    k_cache, v_cache = (cache[page : page + 1].clone() for cache in (made.k_cache, made.v_cache))
    table = torch.zeros(1, 1, dtype=torch.int32, device=op_device)
    problem = replace(made, k_cache=k_cache, v_cache=v_cache, block_table=table)
    assert_accurate(problem, problem.run(op))


@pytest.mark.parametrize("op", ["decode", "varlen", "contiguous"])
def test_one_token_returns_its_value(op: str, op_device: torch.device, rng: torch.Generator) -> None:
    """With one token its value has weight 1: the output equals V, which shares no element with K."""
    problem = make_problem(Case("", decode((1,)), num_kv_heads=2, gqa=2), rng, op_device)
    page = int(problem.block_table[0, 0])
    problem.k_cache[page, 0], problem.v_cache[page, 0] = 1.0, -3.0
    got = problem.run(op)
    assert torch.equal(got, torch.full_like(got, -3.0))


@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_pages_before_the_window_are_not_read(op: str, op_device: torch.device, rng: torch.Generator) -> None:
    """A cache manager may free the pages before a window and replace them by the null page."""
    case = Case("", decode((100, 37)), window=20, page_size=16)
    problem = make_problem(case, rng, op_device)
    for req, (seq_len, _) in enumerate(case.reqs):
        problem.block_table[req, : (seq_len - case.window) // case.page_size] = 0
    assert_accurate(problem, problem.run(op))


@pytest.mark.parametrize("kv_dtype", [None, E4M3, E5M2], ids=["bf16", "e4m3", "e5m2"])
def test_batch_invariant_reqs(kv_dtype: torch.dtype | None, kernel_device: torch.device, rng: torch.Generator) -> None:
    check_batch_invariant_reqs(Problem.run, kv_dtype, kernel_device, rng)


def test_large_queries_with_an_fp8_cache(kernel_device: torch.device, rng: torch.Generator) -> None:
    """Queries beyond float16's range are scaled, because fp8 keys are multiplied as float16."""
    check_large_queries(Problem.run, kernel_device, rng)


@pytest.mark.parametrize("native", [False, True], ids=["triton", "cuda"])
def test_infinite_values(native: bool, kernel_device: torch.device, rng: torch.Generator) -> None:
    check_infinite_values(Problem.run, kernel_device, rng, native=native)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [2, 16, 132])
@pytest.mark.parametrize("longest", [3000, 40_000])
def test_merge_is_independent_of_arrival_order(num_sms: int, longest: int, rng: torch.Generator) -> None:
    """Programs run in any order on a GPU: 200 runs in one workspace give the same bits and reset the counters.

    A request of 40,000 tokens has so many splits that it is merged on two levels.
    """
    reqs = decode((longest, *torch.randint(1, 3000, (47,), generator=rng).tolist()))
    case = Case("", reqs, dtype=BF16, num_kv_heads=8, head_dim=128, num_sms=num_sms)
    problem = make_problem(case, rng, torch.device("cuda"))
    first = problem.run()
    assert_accurate(problem, first)
    other = replace(make_problem(case, rng, torch.device("cuda")), workspaces=problem.workspaces)
    expected = [(problem, first), (other, other.run())]
    assert_accurate(*expected[1])
    workspace = next(iter(problem.workspaces.values()))[0]
    for turn in range(200):
        # Stale partial results of another problem, then NaN, expose a merge that is too early or reads a stale line.
        if turn % 3 == 2:
            workspace.partial_out.fill_(float("nan"))
            workspace.partial_lse.fill_(float("nan"))
        current, wanted = expected[turn % 2]
        assert torch.equal(current.run(), wanted)


def test_layers_share_a_work_list(kernel_device: torch.device, rng: torch.Generator) -> None:
    """One schedule serves two layers: the work list depends only on lengths and window."""
    case = Case("", decode((100, 0, 37, 5)), num_kv_heads=2, gqa=2)
    one, two = (make_problem(case, rng, kernel_device) for _ in range(2))
    one.run()
    plan = one.decode_plan()
    workspace, work_list = one.scratch(plan)
    paged_attention(*two.tensors, two.out, plan, work_list, workspace, two.options, lse=two.lse)
    assert_accurate(two, two.out.cpu())


@pytest.mark.parametrize("native", [False, True], ids=["triton", "cuda"])
@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_unusual_scales_of_keys(op: str, native: bool, kernel_device: torch.device, rng: torch.Generator) -> None:
    reqs = decode((40, 0, 17)) if op == "decode" else ((40, 5), (0, 0), (17, 1))
    check_scales_of_keys(lambda problem: problem.run(op), kernel_device, rng, reqs=reqs, native=native)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("native", [False, True], ids=["triton", "cuda"])
@pytest.mark.parametrize("alibi", ["linear", "sqrt"])
@pytest.mark.parametrize("op", ["decode", "varlen"])
def test_slopes(op: str, alibi: str, native: bool, kernel_device: torch.device, rng: torch.Generator) -> None:
    reqs = decode((40, 0, 300)) if op == "decode" else ((40, 5), (0, 0), (300, 1))
    check_slopes(lambda problem: problem.run(op), kernel_device, rng, reqs=reqs, native=native, alibi=alibi)


def test_slopes_in_the_reference(rng: torch.Generator) -> None:
    check_slopes(Problem.run, torch.device("cpu"), rng)


def test_the_array_covers_every_pair():
    for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2):
        assert {(row[a], row[b]) for row in COMBINATIONS} == set(itertools.product(xs, ys))
    assert len(COMBINATIONS) < 70


@pytest.mark.parametrize("row", [pytest.param(row, id=combination_id(row)) for row in COMBINATIONS])
def test_combinations(row: dict[str, Any], op_device: torch.device, rng: torch.Generator) -> None:
    op, case = combination_case(row)
    check_case(case, op, op_device, rng, runs=1)


LONG = {
    "bf16": Case("", decode((131072, 5)), dtype=BF16, head_dim=128, num_sms=132),
    "fp8": Case("", decode((131072, 5)), dtype=BF16, kv_dtype=E4M3, head_dim=128, num_sms=132),
    "window": Case("", decode((131072, 5)), dtype=F16, head_dim=64, window=4000, num_sms=132),
    "invariant": Case("", decode((131072, 5)), dtype=BF16, head_dim=128, batch_invariant=True, num_sms=132),
    "speculative": Case("", decode((131072, 5), 4), dtype=BF16, head_dim=128, alibi="linear", num_sms=132),
    "varlen": Case("", ((131072, 20), (7, 7)), dtype=BF16, head_dim=128, num_sms=132),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
def test_request_of_128k_tokens(name: str, rng: torch.Generator) -> None:
    problem = make_problem(LONG[name], rng, torch.device("cuda"))
    assert_accurate(problem, problem.run("varlen" if name == "varlen" else "decode"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [64, 256])
def test_large_batches(num_reqs: int, rng: torch.Generator) -> None:
    """Batch sizes for which Triton plans use one-warp programs, and plans of the CUDA kernel smaller blocks."""
    lengths = torch.randint(0, 700, (num_reqs,), generator=rng).tolist()
    base = Case("", decode(tuple(lengths)), dtype=BF16, num_kv_heads=8, head_dim=128, num_sms=132)
    for kv_dtype, native in itertools.product((None, E4M3), (False, True)):
        case = replace(base, kv_dtype=kv_dtype, native=native)
        problem = make_problem(case, rng, torch.device("cuda"))
        assert_accurate(problem, problem.run())
        again = replace(problem, out=torch.empty_like(problem.out))
        assert torch.equal(again.run(), problem.run())


def test_example_of_decode_requests_in_the_docs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "attention.md"
    example, _ = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    for req, length in enumerate((40, 7)):
        pages = names["block_table"][req].long()
        k, v = (names[name][pages].flatten(0, 1)[:length].float().transpose(0, 1) for name in ("k_cache", "v_cache"))
        q = names["q"][req, :, None].float()
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, 0]
        torch.testing.assert_close(names["out"][req].float(), want, rtol=0.0, atol=2e-2)
