"""merge_attention, kernel and reference, against attention over all keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from graphrt.kernels.attention.merge import merge_attention
from graphrt.kernels.errors import ShapeError, UnsupportedError
from graphrt.testing.numerics import assert_accurate, assert_bitwise_equal, assert_close, attention_oracle

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
UNWRITTEN = 777.0


@dataclass(frozen=True)
class Case:
    """Attention of `tokens` queries over the first `cut` of `keys` keys, and over the others."""

    id: str
    tokens: int = 3
    heads: int = 4
    head_dim: int = 64
    keys: int = 20
    cut: int = 7
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (F32, F32, F32)  # of out_a, out_b and out
    scale: float = 1.0  # of the queries: with large ones the weights of the sides differ widely
    gap: int = 0  # unused values after each head, and unused heads after each token
    heads_first: bool = False  # memory order [heads, tokens], of outputs and lse
    sinks: bool = False


CASES = [
    Case("fp32"),
    Case("fp16", dtypes=(F16, F16, F16)),
    Case("bf16", dtypes=(BF16, BF16, BF16)),
    Case("fp32_into_bf16", dtypes=(F32, F32, BF16)),
    Case("three_dtypes", dtypes=(F16, BF16, F32)),
    Case("one_head", heads=1, head_dim=16),
    Case("heads_71_head_dim_80", tokens=2, heads=71, head_dim=80, dtypes=(F16, F16, F16)),
    Case("head_dim_1", head_dim=1),
    Case("head_dim_17", head_dim=17),
    Case("head_dim_256_bf16", head_dim=256, heads=9, dtypes=(BF16, BF16, BF16)),
    Case("head_dim_1024", tokens=2, heads=2, head_dim=1024),
    Case("many_tokens", tokens=33, heads=2, head_dim=16),
    Case("gaps", gap=3),
    Case("heads_first", heads_first=True, dtypes=(BF16, BF16, BF16)),
    Case("peaked", scale=40.0),
    Case("one_key_second", cut=19),
    Case("no_keys_first", cut=0),
    Case("no_keys_second", cut=20),
    Case("no_keys", keys=0, cut=0),
    Case("sinks", sinks=True),
    Case("sinks_and_no_keys_second", sinks=True, cut=20),
    Case("no_tokens", tokens=0),
    Case("no_heads", heads=0),
]


def place(case: Case, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` [tokens, heads, ...] on the device, with the strides of the case. Gaps hold UNWRITTEN."""
    if case.heads_first:
        return values.to(device).transpose(0, 1).contiguous().transpose(0, 1)
    padded = [extent + case.gap for extent in values.shape]
    room = torch.full(padded, UNWRITTEN, dtype=values.dtype, device=device)
    room = room[tuple(slice(extent) for extent in values.shape)]
    return room.copy_(values)


def attend(
    case: Case, rng: torch.Generator
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Output and lse in float64 of both sides, and over all keys. The second side has the sinks."""
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    q = draw(case.tokens, case.heads, case.head_dim) * case.scale
    k, v = (draw(case.keys, max(case.heads, 1), case.head_dim) for _ in range(2))
    sinks = draw(case.heads) if case.sinks else None
    scale = case.head_dim**-0.5

    def over(part: slice, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_oracle(q, k[part], v[part], softmax_scale=scale, causal=False, sinks=sinks)

    return [over(slice(case.cut), None), over(slice(case.cut, None), sinks)], *over(slice(None), sinks)


def merged_in_torch(sides: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """The merge in float32, rounded once."""
    (out_a, lse_a), (out_b, lse_b) = sides
    weights = torch.softmax(torch.stack((lse_a, lse_b)), 0).nan_to_num(0.0)[..., None]
    return (weights[0] * out_a.float() + weights[1] * out_b.float()).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_merge(op_device: torch.device, rng: torch.Generator, case: Case) -> None:
    parts, whole, whole_lse = attend(case, rng)
    sides = [(out.to(dtype), lse.float()) for (out, lse), dtype in zip(parts, case.dtypes, strict=False)]
    weights = torch.softmax(torch.stack([lse for _, lse in sides]).double(), 0).nan_to_num(0.0)[..., None]
    exact = weights[0] * sides[0][0].double() + weights[1] * sides[1][0].double()
    exact_lse = torch.logaddexp(sides[0][1].double(), sides[1][1].double())
    inputs = [place(case, tensor, op_device) for side in sides for tensor in side]
    before = [tensor.clone() for tensor in inputs]
    out = place(case, torch.full(exact.shape, UNWRITTEN, dtype=case.dtypes[2]), op_device)
    lse = place(case, torch.full(exact_lse.shape, UNWRITTEN), op_device)
    merge_attention(*inputs, out, lse)
    for tensor in (out, lse) if case.gap else ():
        memory = torch.empty(0, dtype=tensor.dtype, device=op_device).set_(tensor.untyped_storage())
        assert (memory == UNWRITTEN).sum() == memory.numel() - tensor.numel(), "memory between heads and tokens"
    for tensor, unchanged in zip(inputs, before, strict=True):
        assert_bitwise_equal(tensor, unchanged, name="an input, which must not change")
    assert_accurate(out, plain=merged_in_torch(sides, case.dtypes[2]), exact=exact, name="out")
    assert_close(lse, exact_lse, atol=1e-5, rtol=1e-6, name="lse")
    without_lse = torch.full_like(out, UNWRITTEN)
    merge_attention(*inputs, without_lse)
    assert_bitwise_equal(without_lse, out, name="out without lse")
    if whole.numel() and case.keys and case.dtypes == (F32, F32, F32):
        # The float32 lse of the sides have a relative rounding error, which becomes an error of the weights.
        tolerance = 1e-5 + 2 * torch.finfo(F32).eps * whole_lse[whole_lse.isfinite()].abs().max().item()
        assert_close(out, whole, atol=4 * tolerance, name="out over all keys")
        assert_close(lse, whole_lse, atol=tolerance, name="lse over all keys")


def empty_sides(device: torch.device) -> list[torch.Tensor]:
    """Four tokens of two heads that side a, side b, both and neither saw keys for. Sides without keys are NaN."""
    rng = torch.Generator().manual_seed(1)
    out_a, out_b = (torch.randn(4, 2, 16, generator=rng) for _ in range(2))
    lse_a, lse_b = (torch.randn(4, 2, generator=rng) for _ in range(2))
    out_a[[1, 3]], lse_a[[1, 3]] = NAN, -INF
    out_b[[0, 3]], lse_b[[0, 3]] = NAN, -INF
    return [tensor.to(device) for tensor in (out_a, lse_a, out_b, lse_b)]


def test_sides_without_keys_are_not_read(op_device: torch.device) -> None:
    out_a, lse_a, out_b, lse_b = empty_sides(op_device)
    out, lse = torch.full_like(out_a, UNWRITTEN), torch.full_like(lse_a, UNWRITTEN)
    merge_attention(out_a, lse_a, out_b, lse_b, out, lse)
    for token, side_out, side_lse in ((0, out_a, lse_a), (1, out_b, lse_b)):
        assert_bitwise_equal(out[token], side_out[token], name="out of a token with keys on one side")
        assert_bitwise_equal(lse[token], side_lse[token], name="lse of a token with keys on one side")
    assert out[2].isfinite().all()
    assert_bitwise_equal(out[3], torch.zeros_like(out[3]), name="out of a token without keys")
    assert_bitwise_equal(lse[3], torch.full_like(lse[3], -INF), name="lse of a token without keys")


def test_extremes(op_device: torch.device) -> None:
    """Log-sum-exps beyond the range of exp, and so far apart that one side has weight 0."""
    lse_a = torch.tensor([[1e4, -1e4, 300.0, 88.0]], device=op_device)
    lse_b = torch.tensor([[1e4, -1e4, -300.0, 89.0]], device=op_device)
    out_a, out_b = (torch.full((1, 4, 8), value, device=op_device) for value in (2.0, 4.0))
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    merge_attention(out_a, lse_a, out_b, lse_b, out, lse)
    last = 2.0 + 2.0 * torch.sigmoid(torch.tensor(1.0, dtype=F64)).item()
    assert_close(out[0, :, 0], torch.tensor([3.0, 3.0, 2.0, last]), atol=1e-6)
    assert_close(lse, torch.logaddexp(lse_a.double(), lse_b.double()), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("into", ["a", "b"])
@pytest.mark.parametrize(("dtype", "heads"), [(F32, 1), (BF16, 5), (F16, 128)], ids=str)
def test_aliasing(op_device: torch.device, rng: torch.Generator, into: str, dtype: torch.dtype, heads: int) -> None:
    """Every input is overwritten by results that differ from it."""
    out_a, out_b = (torch.randn(9, heads, 32, generator=rng).to(op_device, dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(9, heads, generator=rng).to(op_device) for _ in range(2))
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    merge_attention(out_a, lse_a, out_b, lse_b, out, lse)
    targets = (out_a, lse_a) if into == "a" else (out_b, lse_b)
    merge_attention(out_a, lse_a, out_b, lse_b, *targets)
    assert_bitwise_equal(targets[0], out, name=f"out_{into}")
    assert_bitwise_equal(targets[1], lse, name=f"lse_{into}")


@pytest.mark.gpu
def test_merge_replays_in_a_graph(rng: torch.Generator) -> None:
    device = torch.device("cuda")
    inputs = [tensor.to(device) for tensor in empty_sides(device)]
    out, lse = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    merge_attention(*inputs, out, lse)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_attention(*inputs, out, lse)
    for _ in range(2):
        for tensor in inputs:
            tensor.copy_(torch.randn(tensor.shape, generator=rng))
        out.fill_(UNWRITTEN)
        lse.fill_(UNWRITTEN)
        graph.replay()
        eager, eager_lse = torch.empty_like(out), torch.empty_like(lse)
        merge_attention(*inputs, eager, eager_lse)
        assert_bitwise_equal(out, eager, name="out")
        assert_bitwise_equal(lse, eager_lse, name="lse")


BAD = {
    "out_rank": ({"out": torch.ones(2, 64)}, ShapeError, r"out: expected shape \[\*, \*, \*\]"),
    "out_dtype": ({"out": torch.ones(2, 4, 16, dtype=F64)}, ShapeError, "out: expected dtype"),
    "out_stride": ({"out": torch.ones(2, 16, 4).mT}, ShapeError, "out: expected stride 1"),
    "out_expanded": ({"out": torch.ones(1, 4, 16).expand(2, 4, 16)}, ShapeError, "out: elements may share memory"),
    "lse_expanded": ({"lse": torch.ones(2, 1).expand(2, 4)}, ShapeError, "lse: elements may share memory"),
    "out_a_heads": ({"out_a": torch.ones(2, 1, 16)}, ShapeError, "out_a: expected shape"),
    "out_b_tokens": ({"out_b": torch.ones(3, 4, 16)}, ShapeError, "out_b: expected shape"),
    "out_b_stride": ({"out_b": torch.ones(2, 16, 4).mT}, ShapeError, "out_b: expected stride 1"),
    "out_b_device": ({"out_b": torch.ones(2, 4, 16, device="meta")}, ShapeError, "out_b: expected device"),
    "lse_a_shape": ({"lse_a": torch.ones(4, 2)}, ShapeError, "lse_a: expected shape"),
    "lse_b_dtype": ({"lse_b": torch.ones(2, 4, dtype=F16)}, ShapeError, "lse_b: expected dtype float32"),
    "lse_b_missing": ({"lse_b": None}, ShapeError, "lse_b: expected a torch.Tensor"),
    "lse_dtype": ({"lse": torch.ones(2, 4, dtype=F64)}, ShapeError, "lse: expected dtype float32"),
    "head_dim": (
        dict.fromkeys(("out_a", "out_b", "out"), torch.ones(2, 4, 1025)), UnsupportedError,
        "expected a head_dim from 1 to 1024, got 1025",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_raise(case: str) -> None:
    changes, error, message = BAD[case]
    outs = dict.fromkeys(("out_a", "out_b", "out"), torch.ones(2, 4, 16))
    lses = dict.fromkeys(("lse_a", "lse_b", "lse"), torch.ones(2, 4))
    with pytest.raises(error, match=message):
        merge_attention(**(outs | lses | changes))
