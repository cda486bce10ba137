"""`write_kv`, kernel and reference, against float64 formulas and transformers layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from graphrt.kernels.cache.write import Rotary, write_kv
from graphrt.kernels.errors import ShapeError
from graphrt.testing.numerics import assert_bitwise_equal

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNWRITTEN = 777.0


@dataclass(frozen=True)
class Case:
    """Tokens to store in a cache. `rotary_dim` 0: no rotation and no norms; `v_head_dim` 0: head_dim."""

    id: str
    dtype: torch.dtype = F32
    cache_dtype: torch.dtype | None = None
    tokens: int = 3
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 0
    rotary_dim: int = 16
    q_norm: bool = False
    k_norm: bool = False
    page_size: int = 4
    layout: str = "NHD"
    pads: tuple[int, ...] = ()
    packed: bool = True


CASES = [
    Case("plain", rotary_dim=0),
    Case("plain_bf16", BF16, rotary_dim=0),
    Case("rotary"),
    Case("rotary_fp16", F16),
    Case("rotary_bf16", BF16),
    Case("norms", q_norm=True, k_norm=True),
    Case("norms_bf16", BF16, q_norm=True, k_norm=True, head_dim=64, rotary_dim=64),
    Case("norms_fp16", F16, q_norm=True, k_norm=True),
    Case("q_norm_only", q_norm=True),
    Case("k_norm_only", k_norm=True),
    Case("partial_rotation", head_dim=24, rotary_dim=8, q_norm=True, k_norm=True),
    Case("odd_sizes", head_dim=22, rotary_dim=14, num_q_heads=5, num_kv_heads=5),
    Case("head_dim_80", head_dim=80, rotary_dim=80, q_norm=True, k_norm=True),
    Case("head_dim_80_bf16", BF16, head_dim=80, rotary_dim=32, q_norm=True, k_norm=True, num_q_heads=5, num_kv_heads=5),
    Case("head_dim_96", head_dim=96, rotary_dim=96, q_norm=True, k_norm=True, num_q_heads=6, num_kv_heads=3),
    Case("head_dim_96_fp16", F16, head_dim=96, rotary_dim=96),
    Case("head_dim_96_partial", head_dim=96, rotary_dim=24, q_norm=True, k_norm=True, page_size=6),
    Case("rotary_dim_2", head_dim=6, rotary_dim=2),
    Case("wide_heads", head_dim=256, rotary_dim=64, num_q_heads=9, num_kv_heads=3, tokens=2),
    Case("many_heads", num_q_heads=70, num_kv_heads=35, head_dim=64, rotary_dim=64, tokens=1),
    Case("hnd_cache", layout="HND"),
    Case("page_size_1", page_size=1),
    Case("page_size_7", page_size=7, tokens=9),
    Case("pads", tokens=5, pads=(1, 4)),
    Case("only_pads", tokens=2, pads=(0, 1)),
    Case("bf16_into_fp32_cache", BF16, F32),
    Case("fp32_into_bf16_cache", F32, BF16, k_norm=True),
    Case("separate_tensors", packed=False),
    Case("wider_keys", head_dim=24, v_head_dim=16, rotary_dim=24, q_norm=True, k_norm=True),
    Case("wider_keys_bf16", BF16, head_dim=192, v_head_dim=128, rotary_dim=64, num_q_heads=5, num_kv_heads=5),
    Case("wider_values", head_dim=16, v_head_dim=40, layout="HND", pads=(1,)),
    Case("wider_values_fp16", F16, head_dim=64, v_head_dim=128, rotary_dim=64, k_norm=True, num_kv_heads=4),
    Case("heads_of_1", head_dim=1, v_head_dim=1, rotary_dim=0),
    Case("odd_keys_and_values", head_dim=17, v_head_dim=33, rotary_dim=6, page_size=3, packed=False),
    Case("heads_of_512", BF16, head_dim=512, rotary_dim=128, num_q_heads=9, num_kv_heads=3, q_norm=True, k_norm=True),
    Case("narrow_keys_many_heads", head_dim=8, v_head_dim=256, rotary_dim=8, num_kv_heads=20, num_q_heads=20),
]
by_id = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@dataclass
class Problem:
    """The tensors of a case on one device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    rotary: Rotary | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def make(cls, case: Case, rng: torch.Generator, device: torch.device) -> Problem:
        dim, v_dim = case.head_dim, case.v_head_dim or case.head_dim
        heads = ((case.num_q_heads, dim), (case.num_kv_heads, dim), (case.num_kv_heads, v_dim))
        widths = [count * size for count, size in heads]
        qkv = torch.randn(case.tokens, sum(widths), generator=rng).to(device, case.dtype)
        q, k, v = (part.unflatten(1, sizes) for part, sizes in zip(qkv.split(widths, dim=1), heads, strict=True))
        if not case.packed:
            q, k, v = (t.contiguous() for t in (q, k, v))
        num_pages = 3 + case.tokens // case.page_size
        page = (case.page_size, case.num_kv_heads) if case.layout == "NHD" else (case.num_kv_heads, case.page_size)
        k_cache, v_cache = (
            torch.full((num_pages, *page, size), UNWRITTEN).to(device, case.cache_dtype or case.dtype)
            for size in (dim, v_dim)
        )
        if case.layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        slots = torch.randperm(num_pages * case.page_size, generator=rng)[: case.tokens]
        slots[list(case.pads)] = -1
        positions = torch.randint(0, 50, (case.tokens,), generator=rng)
        rotary = None
        if case.rotary_dim:
            angles = torch.outer(torch.arange(50.0), 1e4 ** -torch.linspace(0, 1, case.rotary_dim // 2))
            weights = [torch.randn(dim, generator=rng).to(device, case.dtype) for _ in range(2)]
            rotary = Rotary(
                torch.cat((angles.cos(), angles.sin()), 1).to(device),
                weights[0] if case.q_norm else None,
                weights[1] if case.k_norm else None,
                norm_eps=1e-5,
            )
        return cls(q, k, v, k_cache, v_cache, slots.to(device), positions.to(device), rotary)

    def run(self) -> None:
        write_kv(
            self.q, self.k, self.v, self.k_cache, self.v_cache, self.slots, self.positions,
            rotary=self.rotary, k_scale=self.k_scale, v_scale=self.v_scale,
        )  # fmt: skip

    def transformed(self, x: torch.Tensor, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return x after norm and rotation by the formulas, with all intermediates in `dtype`."""
        x = x.to(dtype)
        if self.rotary is None:
            return x
        if weight is not None:
            mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
            x = x / (mean_square + self.rotary.norm_eps).sqrt() * weight.to(dtype)
        half = self.rotary.cos_sin.shape[1] // 2
        table = self.rotary.cos_sin[self.positions].to(dtype)
        out = x.clone()
        for i in range(half):
            cos, sin = table[:, i, None], table[:, half + i, None]
            out[..., i] = x[..., i] * cos - x[..., half + i] * sin
            out[..., half + i] = x[..., half + i] * cos + x[..., i] * sin
        return out


def tolerance(case: Case) -> float:
    """Return the tolerance for the rounding after norm, weight, rotation and store, for values below about 8."""
    dtypes = {case.dtype, case.cache_dtype or case.dtype}
    return 4e-6 if dtypes == {F32} else 12 * max(torch.finfo(dtype).eps for dtype in dtypes)


@by_id
def test_case(op_device: torch.device, rng: torch.Generator, case: Case) -> None:
    problem = Problem.make(case, rng, op_device)
    q_before, k_before, v_before = (t.clone() for t in (problem.q, problem.k, problem.v))
    rotary = problem.rotary
    exact_q = problem.transformed(problem.q, rotary and rotary.q_norm, F64)
    exact_k = problem.transformed(problem.k, rotary and rotary.k_norm, F64)
    problem.run()
    assert_bitwise_equal(problem.k, k_before, name="k, which must not change")
    assert_bitwise_equal(problem.v, v_before, name="v, which must not change")
    if rotary is None:
        assert_bitwise_equal(problem.q, q_before, name="q without rotary")
    limit = tolerance(case)
    torch.testing.assert_close(problem.q.double(), exact_q, rtol=limit, atol=limit)
    written = [slot for slot in problem.slots.tolist() if slot >= 0]
    for cache, exact in ((problem.k_cache, exact_k), (problem.v_cache, v_before.double())):
        flat = cache.reshape(-1, *cache.shape[2:]).double()
        for token, slot in enumerate(problem.slots.tolist()):
            if slot >= 0:
                torch.testing.assert_close(flat[slot], exact[token], rtol=limit, atol=limit)
        others = [slot for slot in range(len(flat)) if slot not in written]
        assert bool((flat[others] == float(torch.tensor(UNWRITTEN, dtype=cache.dtype))).all())


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_against_transformers(kernel_device: torch.device, rng: torch.Generator, dtype: torch.dtype) -> None:
    """Compare with the norm and the rotation of Qwen3 attention."""
    case = Case("", dtype, q_norm=True, k_norm=True, head_dim=32, rotary_dim=32, page_size=8)
    problem = Problem.make(case, rng, kernel_device)
    rotary = problem.rotary
    assert rotary is not None
    normed = []
    for x, weight in ((problem.q, rotary.q_norm), (problem.k, rotary.k_norm)):
        norm = Qwen3RMSNorm(case.head_dim, eps=rotary.norm_eps)
        norm.weight.data = weight
        normed.append(norm(x))
    cos, sin = rotary.cos_sin[problem.positions].chunk(2, -1)
    cos, sin = (torch.cat((t, t), -1)[None].to(dtype) for t in (cos, sin))
    with torch.no_grad():
        q, k = apply_rotary_pos_emb(normed[0][None].transpose(1, 2), normed[1][None].transpose(1, 2), cos, sin)
    problem.run()
    # transformers rounds cosines, products and sums to the dtype; here the rotation is rounded once.
    limit = 1e-6 if dtype is F32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(problem.q, q[0].transpose(0, 1), rtol=limit, atol=limit)
    written = problem.k_cache.reshape(-1, case.num_kv_heads, case.head_dim)[problem.slots]
    torch.testing.assert_close(written, k[0].transpose(0, 1), rtol=limit, atol=limit)


FP8_CASES = {
    "e4m3": (Case("", F32, E4M3), None, None),
    "e4m3_fp16": (Case("", F16, E4M3, k_norm=True), None, [0.02]),
    "e4m3_bf16": (Case("", BF16, E4M3, head_dim=64, rotary_dim=64), [0.25], [3.0, 0.007]),
    "e4m3_odd_sizes": (Case("", F32, E4M3, head_dim=22, rotary_dim=14, q_norm=True, k_norm=True), [0.3, 1.7], [0.1]),
    "e4m3_head_dim_80": (Case("", F32, E4M3, head_dim=80, rotary_dim=80, q_norm=True, k_norm=True), [0.3], [0.1, 1.7]),
    "e5m2_head_dim_96": (Case("", BF16, E5M2, head_dim=96, rotary_dim=48, k_norm=True), [0.3, 2.0], [0.1]),
    "e4m3_hnd_pads": (Case("", BF16, E4M3, layout="HND", tokens=5, pads=(1, 4)), [0.004, 5.0], None),
    "e4m3_many_heads": (Case("", F16, E4M3, num_kv_heads=35, num_q_heads=35, head_dim=64, tokens=1), [0.3] * 35, None),
    "e4m3_one_head": (Case("", F32, E4M3, num_kv_heads=1), [0.011], [0.011]),
    "e4m3_wider_keys": (Case("", BF16, E4M3, head_dim=48, v_head_dim=32, rotary_dim=16), [0.3, 2.0], [0.1, 1.7]),
    "e5m2_odd_values": (Case("", F16, E5M2, head_dim=16, v_head_dim=21, layout="HND"), [0.3], [0.1, 1.7]),
    "e5m2": (Case("", F32, E5M2), None, None),
    "e5m2_fp16": (Case("", F16, E5M2, rotary_dim=0), [0.3], [1e-6]),
    "e5m2_bf16": (Case("", BF16, E5M2, q_norm=True, k_norm=True), [1e-5, 0.9], [7.0, 0.3]),
    "only_pads": (Case("", F32, E4M3, tokens=2, pads=(0, 1)), None, None),
}
UNWRITTEN_BITS = 0x5B


@pytest.mark.parametrize("case", FP8_CASES)
def test_fp8_is_the_saturated_quotient(op_device: torch.device, case: str) -> None:
    """Bitwise equal to torch's conversion of the values in q's dtype, divided by their scales."""
    settings, k_scale, v_scale = FP8_CASES[case]
    assert settings.cache_dtype is not None
    wide = Problem.make(replace(settings, cache_dtype=None), torch.Generator().manual_seed(5), op_device)
    fp8 = Problem.make(settings, torch.Generator().manual_seed(5), op_device)
    fp8.k_scale, fp8.v_scale = (None if s is None else torch.tensor(s, device=op_device) for s in (k_scale, v_scale))
    for cache in (fp8.k_cache, fp8.v_cache):
        cache.view(torch.uint8).fill_(UNWRITTEN_BITS)
    wide.run()
    fp8.run()
    assert_bitwise_equal(fp8.q, wide.q, name="q")
    written = fp8.slots[fp8.slots >= 0]
    for name, values, cache, scale in (
        ("k", wide.k_cache, fp8.k_cache, fp8.k_scale),
        ("v", wide.v_cache, fp8.v_cache, fp8.v_scale),
    ):
        rows, stored = (t.reshape(-1, *t.shape[2:]) for t in (values, cache.view(torch.uint8)))
        expected = torch.full_like(stored, UNWRITTEN_BITS)
        expected[written] = quantized(rows[written], scale, settings.cache_dtype).view(torch.uint8)
        assert_bitwise_equal(stored, expected, name=name)


def quantized(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    quotient = values.float() if scale is None else values.float() / scale[:, None]
    return quotient.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 3e-4, 65.0])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
def test_fp8_of_every_value(
    kernel_device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, scale: float | None
) -> None:
    """All 65536 16-bit patterns: ties, subnormals and both zeros round as in torch, infinities saturate."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(8, 32, 256).to(kernel_device)
    caches = torch.zeros(2, 1, 8, 32, 256, dtype=cache_dtype, device=kernel_device)
    scales = None if scale is None else torch.tensor([scale], device=kernel_device)
    slots = torch.arange(8, device=kernel_device)
    write_kv(values.clone(), values, values, *caches, slots, slots, k_scale=scales, v_scale=scales)
    expected = quantized(values, scales, cache_dtype)
    nan = values.isnan()
    for cache in caches[:, 0]:
        assert bool((cache.float().isnan() == nan).all())
        assert_bitwise_equal(cache.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan], name="finite values")
        assert float(cache.float()[~nan].max()) == torch.finfo(cache_dtype).max


def test_no_tokens(kernel_device: torch.device) -> None:
    problem = Problem.make(Case("", tokens=0), torch.Generator(), kernel_device)
    problem.run()
    assert bool((problem.k_cache == UNWRITTEN).all())


BAD = {
    "dtype": ("k", lambda t: t.half(), "k: expected dtype float32, got float16"),
    "tokens": ("v", lambda t: t[:-1], "v: expected shape"),
    "slots": ("slots", lambda t: t.int(), "slot_mapping: expected dtype int64"),
    "positions": ("positions", lambda t: t[:-1], "positions: expected shape"),
    "cache": ("k_cache", lambda t: t[..., :-1], "k_cache: expected shape"),
    "stride": ("v_cache", lambda t: t.mT.contiguous().mT, "v_cache: expected stride 1"),
    "rotary_odd": ("rotary", lambda r: Rotary(r.cos_sin[:, :-1]), "rotary.cos_sin: expected an even width"),
    "rotary_wide": ("rotary", lambda r: Rotary(r.cos_sin.repeat(1, 2)), "rotary.cos_sin: expected an even width"),
    "rotary_dtype": ("rotary", lambda r: Rotary(r.cos_sin.half()), "rotary.cos_sin: expected dtype float32"),
    "norm": ("rotary", lambda r: Rotary(r.cos_sin, k_norm=r.cos_sin[0, :-1]), "rotary.k_norm: expected shape"),
    "rotary_empty": ("rotary", lambda r: Rotary(r.cos_sin[:0]), "rotary.cos_sin: the tensor is empty"),
    "q_rank": ("q", lambda t: t.flatten(1), r"q: expected shape \[\*, \*, \*\]"),
    "q_expanded": ("q", lambda t: t[:1].expand_as(t), "q: elements may share memory"),
    "k_expanded": ("k_cache", lambda t: t[:1].expand_as(t), "k_cache: elements may share memory"),
    "v_expanded": ("v_cache", lambda t: t[:, :1].expand_as(t), "v_cache: elements may share memory"),
    "no_pages": (("k_cache", "v_cache"), lambda t: t[:0], "k_cache: the tensor is empty, got shape"),
    "page_size": (("k_cache", "v_cache"), lambda t: t[:, :0], "k_cache: the tensor is empty, got shape"),
    "cache_dtype": ("k_cache", lambda t: t.double(), "k_cache: expected dtype .* or float8_e5m2, got float64"),
    "mixed_caches": ("v_cache", lambda t: t.to(E5M2), "v_cache: expected dtype float32, got float8_e5m2"),
    "wide_scale": ("k_scale", lambda _: torch.ones(1), "k_scale: a float32 cache takes no scale"),
    "scale_shape": ("v_scale", lambda _: torch.ones(3), r"v_scale: expected shape \[1\] or \[2\], got \[3\]"),
    "scale_rank": ("v_scale", lambda _: torch.tensor(1.0), r"v_scale: expected shape \[\*\], got \[\]"),
    "scale_dtype": ("v_scale", lambda _: torch.ones(2, dtype=F64), "v_scale: expected dtype float32, got float64"),
    "scale_device": ("v_scale", lambda _: torch.ones(2, device="meta"), "v_scale: expected device cpu, got meta"),
    "scale_stride": ("v_scale", lambda _: torch.ones(4)[::2], "v_scale: expected stride 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_raise_before_anything_is_written(rng: torch.Generator, case: str) -> None:
    names, change, message = BAD[case]
    problem = Problem.make(Case("", cache_dtype=E4M3 if case.startswith("scale_") else None), rng, torch.device("cpu"))
    before = problem.q.clone(), problem.k_cache.view(torch.uint8).clone()
    k_cache = problem.k_cache
    for name in (names,) if isinstance(names, str) else names:
        setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ShapeError, match=message):
        problem.run()
    assert "q" in names or torch.equal(problem.q, before[0])
    assert torch.equal(k_cache.view(torch.uint8), before[1])


def test_queries_may_overlap_without_rotation(rng: torch.Generator) -> None:
    """Queries are only written with rotation."""
    problem = Problem.make(Case("", rotary_dim=0), rng, torch.device("cpu"))
    problem.q = problem.q[:1].expand_as(problem.q)
    problem.run()
