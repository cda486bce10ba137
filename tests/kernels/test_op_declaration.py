"""Operators declared by a dataclass: schema, conversion of arguments, and errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

from graphrt.kernels.attention.operators import _attention
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import _schedule
from graphrt.kernels.op_declaration import DeclaredOp, Written

SIZES = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "num_sms": 132}
PLANS = [
    AttentionPlan.decode(3, **SIZES),
    AttentionPlan.decode(300, query_len=2, batch_invariant=True, **SIZES),
    AttentionPlan.decode(1, native=True, **SIZES),
    AttentionPlan.decode(64, native=True, kv_dtype=torch.float8_e5m2, **SIZES),
    AttentionPlan.varlen(5, 70, **SIZES),
]


@dataclass(frozen=True, slots=True)
class Inner:
    scale: float
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ScaleCall:
    x: torch.Tensor
    out: Written
    extra: Written | None
    inner: Inner
    plan: AttentionPlan
    steps: list[int]
    twice: bool
    count: int


seen: list[ScaleCall] = []


def run(call: ScaleCall) -> None:
    seen.append(call)
    call.out.copy_(call.x * call.inner.scale)


scale_op = DeclaredOp("test_declared_scale", ScaleCall, triton_impl=run, reference=run)


def test_the_schema_follows_from_the_fields() -> None:
    assert scale_op.schema == (
        "test_declared_scale(Tensor x, Tensor(a!) out, Tensor(b!)? extra, float scale, Tensor? bias, int[] plan, "
        "int[] steps, bool twice, int count) -> ()"
    )
    assert str(torch.ops.graphrt.test_declared_scale.default._schema) == f"graphrt::{scale_op.schema}"


@pytest.mark.parametrize("bias", [None, torch.ones(2)], ids=["without", "with"])
def test_the_implementation_gets_an_equal_call(bias: torch.Tensor | None) -> None:
    call = ScaleCall(torch.arange(3.0), torch.zeros(3), None, Inner(2.5, bias), PLANS[2], [4, 5], True, 7)
    seen.clear()
    scale_op(call)
    (got,) = seen
    assert got.out.tolist() == [0.0, 2.5, 5.0] == call.out.tolist()
    assert got.out.data_ptr() == call.out.data_ptr()
    assert (got.inner.scale, got.plan, got.steps, got.twice, got.count) == (2.5, PLANS[2], [4, 5], True, 7)
    assert got.extra is None
    assert (got.inner.bias is None) == (bias is None)


@pytest.mark.parametrize("plan", PLANS, ids=["triton", "invariant", "cluster", "warps", "varlen"])
def test_a_plan_round_trips_through_its_ints(plan: AttentionPlan) -> None:
    assert all(type(value) is int for value in plan.ints)
    assert AttentionPlan.from_ints(plan.ints) == plan
    changed = replace(plan, schedule=replace(plan.schedule, min_partition_tiles=plan.schedule.min_partition_tiles + 1))
    assert AttentionPlan.from_ints(changed.ints) != plan


def test_operators_declare_what_they_write() -> None:
    written = [re.findall(r"Tensor\(\w!\)\?? (\w+)", op.schema) for op in (_attention, _schedule)]
    assert written == [["out", "lse", "partial_out", "partial_lse", "counters"], ["work_list"]]


@dataclass(frozen=True, slots=True)
class Text:
    name: str


@dataclass(frozen=True, slots=True)
class One:
    x: torch.Tensor


@dataclass(frozen=True, slots=True)
class Two:
    scale: float
    inner: Inner


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (Text, "Text.name: expected a tensor, int, float, bool, .* got <class 'str'>"),
        (Two, "with different names, got .*scale.*scale"),
        (One, "at least two fields"),
    ],
    ids=["text", "two_of_a_name", "one_field"],
)
def test_fields_without_a_schema_raise(arguments: type[object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        DeclaredOp("test_declared_wrong", arguments, triton_impl=print, reference=None)
