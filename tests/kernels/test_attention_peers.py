"""Paged attention against flash-attn 3, flash-attn 2 and FlashInfer, which share no code with it.

Let e(x) be the largest error of x against float64 on the same rounded inputs, and "plain" the definition in torch with
every operation in the problem's dtype. The bound is |ours - peer| <= 2 e(plain) + e(peer) + 1e-5: the error that the
other tests allow, plus the peer's. e(peer) is itself bounded by 3 e(plain) + 1e-5, as in flash-attn's own tests of
paged decode. Otherwise a peer that computes something else would widen the bound.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from graphrt.backends.registry import backend_class
from tests.support.attention_cases import BF16, E4M3, F16, Case, Problem, decode, expected, make_problem

pytestmark = pytest.mark.gpu

RAGGED = (1, 15, 16, 17, 256, 257, 1000, 5000)
RAGGED_256 = (1, 255, 256, 257, 511, 512, 3000)
SPECULATIVE = decode((4, 5, 16, 17, 258, 3000), 4)
MIXED = ((5, 5), (1, 1), (300, 128), (1000, 77), (257, 1), (640, 640), (33, 16))


@dataclass
class Answer:
    """A peer's out [tokens, heads, head_dim], and its log-sum-exp [tokens, heads] or None."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


# The backend of each package; `gpu_check.py --require` finds skips by its name.
BACKENDS = {"flash_attn_interface": "flash_attn3", "flash_attn": "flash_attn2", "flashinfer": "flashinfer"}


def package(module: str) -> Any:
    backend = BACKENDS[module]
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library that it links to is missing
        install = backend_class(backend).package.install
        pytest.skip(f"{backend}: {module} cannot be imported ({error}); run {install}")


def case(reqs: tuple[tuple[int, int], ...], dtype: torch.dtype = BF16, **options: Any) -> Case:
    return Case("", reqs, dtype=dtype, num_kv_heads=2, num_sms=132, **options)


def problem_of(case: Case, rng: torch.Generator, *, fp8_queries: bool = False) -> Problem:
    """Inputs that both sides represent exactly: sinks in bfloat16 and, on request, queries in fp8."""
    problem = make_problem(case, rng, torch.device("cuda"))
    if problem.options.sinks is not None:
        problem.options = replace(problem.options, sinks=problem.options.sinks.bfloat16().float())
    if fp8_queries:
        problem.q = problem.q.to(E4M3).to(case.dtype)
    return problem


def clean(cache: torch.Tensor) -> torch.Tensor:
    """Keys or values with zeros in place of NaN that no token sees: peers do not guarantee to mask it."""
    return cache.float().nan_to_num(0.0).to(cache.dtype)


def window_of(case: Case) -> tuple[int, int]:
    """A flash-attn window, which does not count the query's own position."""
    return (case.window - 1, 0) if case.window else (-1, -1)


def compare(problem: Problem, peer: Answer, op: str = "decode", *, peer_slack: float = 0.0) -> None:
    """Compare our result with the peer's by the bound above; `peer_slack` widens the bound of e(peer)."""
    ours = problem.run(op)
    truth, true_lse = expected(problem, torch.float64)
    plain, plain_lse = expected(problem, problem.case.dtype)
    close("out", ours, peer.out, truth, plain, peer_slack)
    if peer.lse is not None:
        assert problem.lse is not None
        assert true_lse.isfinite().all()
        close("log-sum-exp", problem.lse.cpu(), peer.lse, true_lse, plain_lse, 0.0)


def close(
    what: str, ours: torch.Tensor, peer: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor, peer_slack: float
) -> None:
    peer = peer.cpu().double()
    assert peer.shape == ours.shape == truth.shape
    plain_error, peer_error = ((x.double() - truth).abs().max().item() for x in (plain, peer))
    limit = 3 * plain_error + peer_slack + 1e-5
    assert peer_error <= limit, f"{what}: the peer is off by {peer_error:.3g}, allowed {limit:.3g}"
    difference, bound = (ours.double() - peer).abs().max().item(), 2 * plain_error + peer_error + 1e-5
    assert difference <= bound, f"{what}: ours and the peer's differ by {difference:.3g}, allowed {bound:.3g}"


def per_token(lse: torch.Tensor) -> torch.Tensor:
    """[reqs, heads, query_len] of flash-attn's decode as [tokens, heads]."""
    return lse.transpose(1, 2).flatten(0, 1)


# flash-attn 3


def fa3_decode(problem: Problem) -> Answer:
    """Paged decode with the same number of new tokens in every request."""
    package_ = package("flash_attn_interface")
    case, options = problem.case, problem.options
    fp8 = case.stored == E4M3  # then q, k and v are fp8
    reqs, query_len = len(case.reqs), case.reqs[0][1]
    more: dict[str, Any] = {}
    if fp8:
        ones = torch.ones(reqs, case.num_kv_heads, device="cuda")
        assert options.k_scale is not None
        assert options.v_scale is not None
        more = {"q_descale": ones, "k_descale": ones * options.k_scale, "v_descale": ones * options.v_scale}
    if options.sinks is not None:
        if "sinks" not in inspect.signature(package_.flash_attn_with_kvcache).parameters:
            pytest.skip("flash_attn3: this build takes no sinks; run pip install -U tokenspeed-fa3")
        # One split, because builds differ in how splits apply a sink.
        more |= {"sinks": options.sinks.bfloat16()}
    if case.chunk:
        if "attention_chunk" not in inspect.signature(package_.flash_attn_with_kvcache).parameters:
            pytest.skip("flash_attn3: this build has no chunks; run pip install -U tokenspeed-fa3")
        more |= {"attention_chunk": case.chunk}
    out, lse, *_ = package_.flash_attn_with_kvcache(
        problem.q.to(case.stored).unflatten(0, (reqs, query_len)),
        clean(problem.k_cache),
        clean(problem.v_cache),
        cache_seqlens=problem.seq_lens,
        page_table=problem.block_table,
        softmax_scale=options.softmax_scale,
        causal=True,
        window_size=window_of(case),
        num_splits=1 if options.sinks is not None else 0,
        return_softmax_lse=True,
        **more,
    )
    return Answer(out.flatten(0, 1), None if options.sinks is not None else per_token(lse))


def fa3_mixed(problem: Problem) -> Answer:
    """Paged attention of packed requests with different query lengths."""
    package_ = package("flash_attn_interface")
    out, lse, *_ = package_.flash_attn_with_kvcache(
        problem.q,
        clean(problem.k_cache),
        clean(problem.v_cache),
        cache_seqlens=problem.seq_lens,
        page_table=problem.block_table,
        cu_seqlens_q=problem.query_start_loc,
        max_seqlen_q=max(query_len for _, query_len in problem.case.reqs),
        softmax_scale=problem.options.softmax_scale,
        causal=True,
        window_size=window_of(problem.case),
        return_softmax_lse=True,
    )
    return Answer(out, lse.T)


def varlen(problem: Problem, function: Callable[..., torch.Tensor], **options: Any) -> Answer:
    """Packed K and V without pages; flash-attn 2 and 3 take the same arguments."""
    k, v, kv_starts = problem.contiguous()
    num_kv = int(kv_starts[-1])
    out = function(
        problem.q,
        clean(k[:num_kv]),
        clean(v[:num_kv]),
        cu_seqlens_q=problem.query_start_loc,
        cu_seqlens_k=kv_starts,
        max_seqlen_q=max(query_len for _, query_len in problem.case.reqs),
        max_seqlen_k=max(seq_len for seq_len, _ in problem.case.reqs),
        softmax_scale=problem.options.softmax_scale,
        causal=True,
        window_size=window_of(problem.case),
        **options,
    )
    return Answer(out)


FA3 = {
    **{f"bf16-{dim}": case(decode(RAGGED), head_dim=dim) for dim in (64, 128, 192, 256)},
    **{f"fp16-{dim}": case(decode(RAGGED), F16, head_dim=dim) for dim in (64, 128, 192, 256)},
    "page_64": case(decode(RAGGED), head_dim=128, page_size=64),
    "page_128": case(decode(RAGGED), head_dim=128, page_size=128),
    "hnd": case(decode(RAGGED), head_dim=128, layout="HND"),
    "mha": case(decode(RAGGED), head_dim=128, gqa=1),
    "gqa_of_3": case(decode(RAGGED), head_dim=64, gqa=3),
    "window": case(decode(RAGGED), head_dim=128, window=100),
    "window_1": case(decode(RAGGED), head_dim=64, window=1),
    "sinks": case(decode(RAGGED), head_dim=64, sinks=True),
    "sinks_window": case(decode(RAGGED), head_dim=64, sinks=True, window=128),
    "speculative": case(SPECULATIVE, head_dim=128),
    "speculative_window": case(SPECULATIVE, F16, head_dim=64, window=50),
    "192_and_128": case(decode(RAGGED), head_dim=192, v_head_dim=128),
    "192_and_128_mha": case(decode(RAGGED), F16, head_dim=192, v_head_dim=128, gqa=1, page_size=64),
    "192_and_128_speculative": case(SPECULATIVE, head_dim=192, v_head_dim=128),
    "chunks": case(decode((*RAGGED, 512, 513)), head_dim=128, chunk=256),
    "chunks_speculative": case(SPECULATIVE, head_dim=128, chunk=256),  # the new tokens of 258 are in two chunks
}


@pytest.mark.parametrize("name", FA3)
def test_decode_against_flash_attn_3(name: str, rng: torch.Generator) -> None:
    problem = problem_of(FA3[name], rng)
    compare(problem, fa3_decode(problem))


@pytest.mark.parametrize("reqs", [decode(RAGGED), SPECULATIVE], ids=["decode", "speculative"])
def test_fp8_against_flash_attn_3(reqs: tuple[tuple[int, int], ...], rng: torch.Generator) -> None:
    """flash-attn 3 rounds probabilities to e4m3 with 3 bits of mantissa: errors up to 2**-4 of the largest value."""
    problem = problem_of(case(reqs, head_dim=128, kv_dtype=E4M3, scale_per_head=True), rng, fp8_queries=True)
    largest = max(v.abs().max().item() for _, v in problem.dense)
    compare(problem, fa3_decode(problem), peer_slack=2**-4 * largest)


PROMPTS = {
    "bf16-128": case(MIXED, head_dim=128),
    "fp16-64": case(MIXED, F16, head_dim=64),
    "bf16-256": case(MIXED, head_dim=256),
    "window": case(MIXED, head_dim=128, window=60),
}


@pytest.mark.parametrize("op", ["varlen", "contiguous"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_chunks_against_flash_attn_3(name: str, op: str, rng: torch.Generator) -> None:
    problem = problem_of(PROMPTS[name], rng)
    compare(problem, varlen(problem, package("flash_attn_interface").flash_attn_varlen_func), op)
    if op == "varlen":
        compare(problem, fa3_mixed(problem), op)


# flash-attn 2


def fa2_decode(problem: Problem) -> Answer:
    """Paged decode with page sizes that are multiples of 256."""
    package_ = package("flash_attn")
    case, options = problem.case, problem.options
    out, lse = package_.flash_attn_with_kvcache(
        problem.q.unflatten(0, (len(case.reqs), case.reqs[0][1])),
        clean(problem.k_cache),
        clean(problem.v_cache),
        cache_seqlens=problem.seq_lens,
        block_table=problem.block_table,
        softmax_scale=options.softmax_scale,
        causal=True,
        window_size=window_of(case),
        softcap=case.softcap,
        alibi_slopes=options.alibi_slopes,
        return_softmax_lse=True,
    )
    lse = per_token(lse)
    if options.alibi_slopes is not None and not case.window:
        # flash-attn 2 then adds slope x key position instead of subtracting slope x distance. Only the lse differs.
        starts = problem.seq_lens[:, None] - case.reqs[0][1]
        positions = starts + torch.arange(case.reqs[0][1], device=lse.device)
        lse = lse - options.alibi_slopes * positions.flatten()[:, None]
    return Answer(out.flatten(0, 1), lse)


FA2 = {
    **{f"bf16-{dim}": case(decode(RAGGED_256), head_dim=dim, page_size=256) for dim in (64, 128, 256)},
    **{f"fp16-{dim}": case(decode(RAGGED_256), F16, head_dim=dim, page_size=256) for dim in (64, 128, 256)},
    "alibi": case(decode(RAGGED_256), head_dim=128, page_size=256, alibi="linear"),
    "alibi_window": case(decode(RAGGED_256), F16, head_dim=64, page_size=256, alibi="linear", window=300),
    "softcap": case(decode(RAGGED_256), head_dim=128, page_size=256, softcap=5.0),
    "softcap_window": case(decode(RAGGED_256), head_dim=256, page_size=256, softcap=30.0, window=64),
    "window": case(decode(RAGGED_256), head_dim=128, page_size=256, window=257),
    "pages_of_512": case(decode(RAGGED_256), head_dim=128, page_size=512),
    "speculative": case(SPECULATIVE, head_dim=128, page_size=256),
    "speculative_alibi": case(SPECULATIVE, head_dim=64, page_size=256, alibi="linear"),
    "speculative_softcap": case(SPECULATIVE, head_dim=128, page_size=256, softcap=5.0),
    "speculative_window": case(SPECULATIVE, F16, head_dim=64, page_size=256, window=50),
}


@pytest.mark.parametrize("name", FA2)
def test_decode_against_flash_attn_2(name: str, rng: torch.Generator) -> None:
    problem = problem_of(FA2[name], rng)
    compare(problem, fa2_decode(problem))


ALIBI_SOFTCAP = {
    "alibi": case(MIXED, head_dim=64, alibi="linear"),
    "softcap": case(MIXED, head_dim=128, softcap=5.0),
}


@pytest.mark.parametrize("op", ["varlen", "contiguous"])
@pytest.mark.parametrize("name", PROMPTS | ALIBI_SOFTCAP)
def test_prompt_chunks_against_flash_attn_2(name: str, op: str, rng: torch.Generator) -> None:
    problem = problem_of((PROMPTS | ALIBI_SOFTCAP)[name], rng)
    function = package("flash_attn").flash_attn_varlen_func
    options = {"softcap": problem.case.softcap, "alibi_slopes": problem.options.alibi_slopes}
    compare(problem, varlen(problem, function, **options), op)


# FlashInfer


def flashinfer_decode(problem: Problem) -> Answer:
    """Paged decode on tensor cores, with lengths on the host. Its log-sum-exp has base 2."""
    package_ = package("flashinfer")
    case, options, hnd = problem.case, problem.options, problem.case.layout == "HND"
    lengths = torch.tensor([seq_len for seq_len, _ in case.reqs], dtype=torch.int32)
    counts = -(-lengths // case.page_size)
    pages = [problem.block_table[req, :count] for req, count in enumerate(counts.tolist())]
    wrapper = package_.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), case.layout, use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
        torch.cat(pages),
        (lengths - 1) % case.page_size + 1,
        case.num_kv_heads * case.gqa,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        window_left=case.window - 1 if case.window else -1,
        logits_soft_cap=case.softcap or None,
        q_data_type=case.dtype,
        kv_data_type=case.stored,
        sm_scale=options.softmax_scale,
    )
    k, v = (clean(x).transpose(1, 2) if hnd else clean(x) for x in (problem.k_cache, problem.v_cache))
    scales = {}
    if options.k_scale is not None and options.v_scale is not None:
        scales = {"k_scale": options.k_scale.item(), "v_scale": options.v_scale.item()}
    out, lse = wrapper.run(problem.q, (k, v), return_lse=True, **scales)
    return Answer(out, lse * math.log(2))


# Few combinations of dtype, head size, window and softcap: FlashInfer compiles a module for each, in almost a minute.
# Layouts, heads, pages and lengths are run-time arguments.
FLASHINFER = {
    "nhd": case(decode(RAGGED), head_dim=128),
    "hnd": case(decode(RAGGED), head_dim=128, layout="HND"),
    "page_1": case(decode((1, 2, 63, 64, 65, 700)), head_dim=128, page_size=1),
    "page_64": case(decode(RAGGED), head_dim=128, page_size=64),
    "mha": case(decode(RAGGED), head_dim=128, gqa=1),
    "softcap_window": case(decode(RAGGED), head_dim=128, softcap=5.0, window=100),
    "fp8_nhd": case(decode(RAGGED), head_dim=128, kv_dtype=E4M3),
    "fp8_hnd": case(decode(RAGGED), head_dim=128, kv_dtype=E4M3, layout="HND"),
}


@pytest.mark.parametrize("name", FLASHINFER)
def test_decode_against_flashinfer(name: str, rng: torch.Generator) -> None:
    problem = problem_of(FLASHINFER[name], rng)
    compare(problem, flashinfer_decode(problem))
