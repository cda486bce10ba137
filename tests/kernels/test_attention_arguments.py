"""Invalid arguments of the attention functions, and the scratch memory that plans need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.operators import _stride_unit, contiguous_attention, paged_attention
from graphrt.kernels.attention.options import MAX_WINDOW, AttentionOptions, check_options
from graphrt.kernels.attention.plan import AttentionPlan
from graphrt.kernels.attention.work_list import schedule_attention
from graphrt.kernels.attention.workspace import AttentionWorkspace
from graphrt.kernels.checks import check_no_overlap
from graphrt.kernels.errors import CapacityError, ShapeError, UnsupportedError

CPU, META = torch.device("cpu"), torch.device("meta")
F16, F32, I32 = torch.float16, torch.float32, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Refused = tuple[str, dict[str, Any], type[Exception], str]


def zeros(*shape: int, dtype: torch.dtype = F32, device: torch.device = CPU) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


SIZES: dict[str, Any] = {"num_reqs": 2, "num_q_heads": 4, "num_kv_heads": 2, "dtype": F32, "num_sms": 4}


def decode_plan(head_dim: int = 32, **changes: Any) -> AttentionPlan:
    return AttentionPlan.decode(**{**SIZES, "head_dim": head_dim, **changes})


def varlen_plan(head_dim: int = 32, **changes: Any) -> AttentionPlan:
    return AttentionPlan.varlen(**{**SIZES, "num_tokens": 2, "head_dim": head_dim, **changes})


def common(plan: AttentionPlan) -> dict[str, Any]:
    return {
        "q": zeros(2, 4, plan.shape.head_dim),
        "out": torch.full((2, 4, plan.shape.head_dim), 777.0),
        "plan": plan,
        "work_list": zeros(plan.work_list_words, dtype=I32),
        "workspace": AttentionWorkspace.allocate([plan], CPU),
        "options": AttentionOptions(1.0),
    }


def paged(head_dim: int = 32, plan: AttentionPlan | None = None) -> dict[str, Any]:
    """Valid arguments of paged_attention for 2 requests of one token, 4 query heads and 2 KV heads."""
    return common(plan or decode_plan(head_dim)) | {
        "k_cache": zeros(3, 8, 2, head_dim),
        "v_cache": zeros(3, 8, 2, head_dim),
        "block_table": zeros(2, 5, dtype=I32),
        "seq_lens": zeros(2, dtype=I32),
    }


def contiguous(head_dim: int = 32) -> dict[str, Any]:
    """Valid arguments of contiguous_attention for the same sizes."""
    return common(varlen_plan(head_dim)) | {
        "k": zeros(6, 2, head_dim),
        "v": zeros(6, 2, head_dim),
        "kv_start_loc": torch.tensor([0, 4, 6], dtype=I32),
        "query_start_loc": torch.tensor([0, 1, 2], dtype=I32),
    }


def workspace(**changes: torch.Tensor) -> AttentionWorkspace:
    """A workspace that is large enough, except for `changes`."""
    tensors = {"partial_out": zeros(1 << 16), "partial_lse": zeros(1 << 16), "counters": zeros(1 << 16, dtype=I32)}
    return AttentionWorkspace(**{**tensors, **changes})


def cases(table: list[Any]) -> list[Any]:
    return [pytest.param(*req[1:], id=req[0]) for req in table]


def scheduled() -> dict[str, Any]:
    """Valid arguments of schedule_attention for the same requests."""
    return {"plan": decode_plan(), "seq_lens": zeros(2, dtype=I32), "work_list": zeros(1 << 16, dtype=I32)}


CALLS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "paged": (paged_attention, paged() | {"lse": zeros(2, 4)}),
    "varlen": (paged_attention, paged(plan=varlen_plan()) | {"query_start_loc": torch.tensor([0, 1, 2], dtype=I32)}),
    "contiguous": (contiguous_attention, contiguous() | {"lse": zeros(2, 4)}),
    "schedule": (schedule_attention, scheduled()),
}
WRONG_TENSORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "dtype": (lambda tensor: tensor.to(torch.float64), "expected dtype"),
    "rank": (lambda tensor: tensor[None], "expected shape"),
    "stride": (lambda tensor: torch.stack([tensor, tensor], -1)[..., 0], "expected stride 1"),
    "device": (lambda tensor: tensor.to(META), "expected device cpu, got meta"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
@pytest.mark.parametrize("call", CALLS)
def test_wrong_tensors_raise(call: str, wrong: str) -> None:
    """The device of a call is that of its first tensor."""
    function, valid = CALLS[call]
    change, text = WRONG_TENSORS[wrong]
    function(**valid)
    first = next(name for name, value in valid.items() if isinstance(value, torch.Tensor))
    for name, tensor in valid.items():
        if isinstance(tensor, torch.Tensor) and not (wrong == "device" and name == first):
            with pytest.raises(ShapeError, match=f"^{name}: {text}"):
                function(**valid | {name: change(tensor)})
        if isinstance(tensor, AttentionWorkspace):
            for field in ("partial_out", "partial_lse", "counters"):
                with pytest.raises(ShapeError, match=rf"^workspace.{field}: {text}"):
                    function(**valid | {name: replace(tensor, **{field: change(getattr(tensor, field))})})


OTHER_SIZES = r"q: expected 2 tokens, 4 query and 2 KV heads of size 32 as in the plan, got "
# Invalid arguments for which both functions raise the same error.
SHARED: list[Refused] = [
    ("out_shape", {"out": zeros(3, 4, 32)}, ShapeError, "out: expected shape"),
    ("lse_shape", {"lse": zeros(2, 3)}, ShapeError, r"lse: expected shape \[2, 4\], got \[2, 3\]"),
    ("out_expanded", {"out": zeros(1, 4, 32).expand(2, 4, 32)}, ShapeError, "out: elements may share memory"),
    ("out_overlaps", {"out": zeros(999).as_strided((2, 4, 32), (64, 32, 1))}, ShapeError, r"out: .* \[64, 32, 1\]"),
    ("lse_expanded", {"lse": zeros(1, 4).expand(2, 4)}, ShapeError, "lse: elements may share memory"),
    ("list_short", {"work_list": zeros(9, dtype=I32)}, CapacityError, r"work_list: expected at least \d+ .* got 9;"),
    ("partial_out", {"workspace": workspace(partial_out=zeros(4))}, CapacityError, "workspace.partial_out: .* got 4;"),
    ("partial_lse", {"workspace": workspace(partial_lse=zeros(4))}, CapacityError, "workspace.partial_lse: .* got 4;"),
    ("counters", {"workspace": workspace(counters=zeros(3, dtype=I32))}, CapacityError, "workspace.counters: .* got 3"),
    ("options", {"options": AttentionOptions(float("nan"))}, ShapeError, "softmax_scale: expected a finite number"),
]

PAGED: list[Refused] = [
    *SHARED,
    ("q_tokens", {"q": zeros(3, 4, 32), "out": zeros(3, 4, 32), "lse": None}, ShapeError, OTHER_SIZES + "3 tokens"),
    (
        "q_heads",
        {"q": zeros(2, 6, 32), "out": zeros(2, 6, 32), "lse": None},
        ShapeError,
        OTHER_SIZES + "2 tokens, 6 and 2 heads",
    ),
    ("plan_tokens", {"plan": decode_plan(query_len=2)}, ShapeError, "q: expected 4 tokens, .* got 2 tokens"),
    ("plan_heads", {"plan": decode_plan(num_kv_heads=4)}, ShapeError, "q: .* 4 query and 4 KV heads .* 4 and 2 heads"),
    (
        "plan_head_dim",
        {"plan": decode_plan(64)},
        ShapeError,
        "q: .* heads of size 64 as in the plan, .* heads of size 32",
    ),
    ("plan_reqs", {"plan": decode_plan(num_reqs=3)}, ShapeError, "seq_lens: expected 3 requests, got 2; use"),
    ("k_head_dim", {"k_cache": zeros(3, 8, 2, 16)}, ShapeError, "k_cache: expected shape"),
    ("v_head_dim", {"v_cache": zeros(3, 8, 2, 16)}, ShapeError, r"out: expected shape \[2, 4, 16\], got \[2, 4, 32\]"),
    (
        "v_plan",
        {"v_cache": zeros(3, 8, 2, 16), "out": zeros(2, 4, 16)},
        ShapeError,
        "v: .* 32 as in the plan, got 16; make",
    ),
    ("v_no_dims", {"v_cache": zeros(3, 8, 2, 0), "out": zeros(2, 4, 0)}, ShapeError, "v_cache: the tensor is empty"),
    ("k_dtype", {"k_cache": zeros(3, 8, 2, 32, dtype=F16)}, ShapeError, "k_cache: expected dtype float32 or float8"),
    ("v_shape", {"v_cache": zeros(4, 8, 2, 32)}, ShapeError, "v_cache: expected shape"),
    ("heads_divide", dict.fromkeys(("k_cache", "v_cache"), zeros(3, 8, 3, 32)), ShapeError, "multiple of k_cache's 3"),
    ("no_pages", dict.fromkeys(("k_cache", "v_cache"), zeros(0, 8, 2, 32)), ShapeError, "k_cache: the tensor is empty"),
    ("table_columns", {"block_table": zeros(2, 0, dtype=I32)}, ShapeError, r"block_table: .* got shape \[2, 0\]"),
    ("table_rows", {"block_table": zeros(3, 5, dtype=I32)}, ShapeError, r"block_table: expected shape \[2, \*\]"),
    ("starts_given", {"query_start_loc": zeros(3, dtype=I32)}, ShapeError, "expected None for a plan with query_len=1"),
]

STARTS: list[Refused] = [
    (
        "missing",
        {"query_start_loc": None},
        ShapeError,
        "query_start_loc: expected a tensor for a plan with query_len=0",
    ),
    ("shape", {"query_start_loc": zeros(2, dtype=I32)}, ShapeError, r"expected shape \[3\], got \[2\]"),
]

CONTIGUOUS: list[Refused] = [
    *SHARED,
    ("k_head_dim", {"k": zeros(6, 2, 16)}, ShapeError, r"k: expected shape \[\*, \*, 32\]"),
    ("v_head_dim", {"v": zeros(6, 2, 16)}, ShapeError, r"out: expected shape \[2, 4, 16\], got \[2, 4, 32\]"),
    (
        "v_plan",
        {"v": zeros(6, 2, 16), "out": zeros(2, 4, 16)},
        ShapeError,
        "v: expected head size 32 as in .*, got 16;",
    ),
    ("v_shape", {"v": zeros(5, 2, 32)}, ShapeError, "v: expected shape"),
    ("heads_divide", dict.fromkeys(("k", "v"), zeros(6, 3, 32)), ShapeError, "q: expected a multiple of .* 3 KV heads"),
    ("no_kv_heads", dict.fromkeys(("k", "v"), zeros(6, 0, 32)), ShapeError, "q: expected a multiple of .* 0 KV heads"),
    ("kv_starts", {"kv_start_loc": zeros(4, dtype=I32)}, ShapeError, r"kv_start_loc: expected shape \[3\], got \[4\]"),
    ("plan_reqs", {"plan": varlen_plan(num_reqs=3)}, ShapeError, "query_start_loc: expected 3 req.* got 2 req"),
    ("plan_decode", {"plan": decode_plan()}, ShapeError, "a plan made by AttentionPlan.varlen, got 2 req.*len=1"),
    ("plan_tokens", {"plan": varlen_plan(num_tokens=5)}, ShapeError, "q: expected 5 tokens, .* got 2 tokens"),
]

SCHEDULE: list[Refused] = [
    ("lens_reqs", {"seq_lens": zeros(3, dtype=I32)}, ShapeError, r"seq_lens: expected shape \[2\], got \[3\]"),
    ("starts_plan", {"seq_lens_are_starts": True}, ShapeError, "a plan made by AttentionPlan.varlen, got query_len=1"),
    (
        "starts_reqs",
        {"plan": varlen_plan(), "seq_lens_are_starts": True, "query_start_loc": zeros(3, dtype=I32)},
        ShapeError,
        r"seq_lens: expected shape \[3\], got \[2\]",
    ),
    ("list_short", {"work_list": zeros(9, dtype=I32)}, CapacityError, r"work_list: expected at least \d+ words .* 9;"),
    ("starts_given", {"query_start_loc": zeros(3, dtype=I32)}, ShapeError, "expected None for a plan with query_len=1"),
    ("starts_missing", {"plan": varlen_plan()}, ShapeError, "expected a tensor for a plan with query_len=0"),
    ("window", {"sliding_window": -1}, ShapeError, "sliding_window: expected an int from 0 to 1073741824, got -1"),
    (
        "chunk_window",
        {"attention_chunk_size": 4, "sliding_window": 8},
        ShapeError,
        "0 with sliding_window=8, got 4; set",
    ),
]


REFUSED = {"paged": PAGED, "varlen": STARTS, "contiguous": CONTIGUOUS, "schedule": SCHEDULE}


@pytest.mark.parametrize(
    ("call", "change", "error", "text"),
    [pytest.param(call, *row[1:], id=f"{call}-{row[0]}") for call, table in REFUSED.items() for row in table],
)
def test_wrong_arguments_raise(call: str, change: dict[str, Any], error: type[Exception], text: str) -> None:
    """A call that raises writes nothing."""
    function, valid = CALLS[call]
    values = valid | change
    before = values["out"].clone() if "out" in values else None
    with pytest.raises(error, match=text):
        function(**values)
    assert before is None or torch.equal(values["out"], before)


@pytest.mark.parametrize("head_dim", [-1, 0, 513, 1024])
def test_unsupported_head_dims_raise(head_dim: int) -> None:
    for make in (decode_plan, varlen_plan):
        with pytest.raises(UnsupportedError, match=f"^head_dim: .* from 1 to 512, got {head_dim}; choose the backend"):
            make(head_dim)
        with pytest.raises(UnsupportedError, match=f"^v_head_dim: .* from 1 to 512, got {head_dim}; choose the back"):
            make(64, v_head_dim=head_dim)
        assert make(48) == make(48, v_head_dim=48) != make(48, v_head_dim=32)


PLANS = [
    ("dtype", {"dtype": torch.float64}, "dtype: expected one of .*float16.*, got torch.float64"),
    ("kv_dtype", {"kv_dtype": torch.int8}, "kv_dtype: expected torch.float32 as for .*, got torch.int8"),
    ("kv_dtype_wide", {"kv_dtype": F16}, "kv_dtype: expected torch.float32 as for .*, got torch.float16"),
    ("num_reqs", {"num_reqs": 0}, "plan: expected at least 1 request and 1 token, got 0 and"),
    ("num_q_heads", {"num_q_heads": 5}, "num_q_heads: expected a multiple of num_kv_heads=2, got 5"),
    ("num_sms", {"num_sms": 0}, "num_sms: expected an int >= 1, got 0"),
    ("num_sms_type", {"num_sms": 4.0}, "num_sms: expected an int >= 1, got 4.0"),
]


@pytest.mark.parametrize(("change", "text"), cases(PLANS))
def test_plans_raise(change: dict[str, Any], text: str) -> None:
    for make in (decode_plan, varlen_plan):
        with pytest.raises(ShapeError, match=text):
            make(**change)


def test_the_largest_window_sees_everything(kernel_device: torch.device) -> None:
    """The largest chunk does too."""
    for plan in (decode_plan(query_len=4), varlen_plan(num_tokens=8)):
        starts = None if plan.shape.query_len else torch.tensor([0, 1, 8], dtype=I32, device=kernel_device)
        seq_lens = torch.tensor([1, 70], dtype=I32, device=kernel_device)
        lists = []
        for spans in ({}, {"sliding_window": MAX_WINDOW}, {"attention_chunk_size": MAX_WINDOW}):
            lists.append(zeros(plan.work_list_words, dtype=I32, device=kernel_device))
            schedule_attention(plan, seq_lens, lists[-1], query_start_loc=starts, **spans)
        assert torch.equal(lists[0], lists[1])
        assert torch.equal(lists[0], lists[2])


@pytest.mark.parametrize(
    ("kv_strides", "others", "unit"),
    [
        ((128, 1024), (128, 512), 1),  # Triton specializes on multiples of 16
        ((128, 1024), (100, 33), 1),
        ((0, 144), (144, 288), 1),
        ((72, 576), (72, 288), 8),
        ((72, 576), (72, 290), 2),
        ((36, 288), (36, 72), 4),
        ((50, 16), (32, 64), 2),
        ((33, 66), (32, 64), 1),
        ((72, 1 << 31), (72, 288), 1),  # divided by 8 it would fit an int32
    ],
    ids=str,
)
def test_unit_of_strides(kv_strides: tuple[int, ...], others: tuple[int, ...], unit: int) -> None:
    assert _stride_unit(kv_strides, others) == unit


def test_wrong_sizes_raise() -> None:
    with pytest.raises(ShapeError, match="at least 1 request and 1 token, got 2 and 0"):
        varlen_plan(num_tokens=0)
    with pytest.raises(ShapeError, match=r"plans: expected a list of plans, got an AttentionPlan; pass \[plan\]"):
        AttentionWorkspace.allocate(decode_plan(), CPU)  # type: ignore[arg-type]  # the error under test
    with pytest.raises(ShapeError, match="plans: expected at least one plan, got none"):
        AttentionWorkspace.allocate([], CPU)


def test_views_without_overlap_are_accepted() -> None:
    """Strides with gaps, permuted strides, and strides of dimensions of size 1 or 0."""
    views = (zeros(9, 5, 4)[::2, 1:3], zeros(2, 3, 4).permute(1, 2, 0), zeros(1, 1, 4).expand(1, 1, 4), zeros(0, 3))
    for view in (*views, zeros(64).as_strided((1, 3, 4), (0, 5, 1)), torch.tensor(1.0)):
        check_no_overlap("view", view)


@pytest.mark.parametrize("query_len", [0, 17, 1.0])
def test_invalid_query_lens_raise(query_len: Any) -> None:
    text = f"query_len: expected an int from 1 to 16, got {query_len}; use AttentionPlan.varlen"
    with pytest.raises(ShapeError, match=text):
        decode_plan(query_len=query_len)


OPTIONS = [
    ("scale", {"softmax_scale": 0.0}, "softmax_scale: expected a finite number > 0, got 0.0"),
    ("scale_inf", {"softmax_scale": float("inf")}, "softmax_scale: expected a finite number > 0, got inf"),
    ("window", {"sliding_window": -1}, "sliding_window: expected an int from 0 to 1073741824, got -1"),
    ("window_large", {"sliding_window": MAX_WINDOW + 1}, "sliding_window: .* to 1073741824, got 1073741825"),
    ("window_causal", {"sliding_window": 4, "causal": False}, "sliding_window: expected 0 without causal, got 4"),
    ("chunk", {"attention_chunk_size": -1}, "attention_chunk_size: expected an int from 0 to 1073741824, got -1"),
    ("chunk_large", {"attention_chunk_size": MAX_WINDOW + 1}, "attention_chunk_size: .* 1073741824, got 1073741825"),
    ("chunk_causal", {"attention_chunk_size": 4, "causal": False}, "attention_chunk_size: expected 0 without causal"),
    ("chunk_window", {"attention_chunk_size": 4, "sliding_window": 1}, "expected 0 with sliding_window=1, got 4"),
    ("softcap", {"logits_softcap": -1.0}, "logits_softcap: expected a finite number >= 0, got -1.0"),
    ("alibi_sqrt", {"alibi_sqrt": True}, "alibi_sqrt: expected alibi_slopes, got None"),
    ("slopes_shape", {"alibi_slopes": zeros(2)}, r"alibi_slopes: expected shape \[4\], got \[2\]"),
    ("sinks_shape", {"sinks": zeros(4, 1)}, r"sinks: expected shape \[4\], got \[4, 1\]"),
    ("sinks_dtype", {"sinks": zeros(4, dtype=F16)}, "sinks: expected dtype float32, got float16"),
    ("sinks_device", {"sinks": zeros(4, device=META)}, "sinks: expected device cpu, got meta"),
    ("sinks_stride", {"sinks": zeros(4, 2)[:, 0]}, "sinks: expected a contiguous tensor"),
    ("k_scale_query_heads", {"k_scale": zeros(4)}, r"k_scale: expected shape \[1\] or \[2\], .* got \[4\]"),
    ("v_scale_dims", {"v_scale": zeros(1, 1)}, r"v_scale: expected shape \[\*\], got \[1, 1\]"),
    ("v_scale_dtype", {"v_scale": zeros(1, dtype=F16)}, "v_scale: expected dtype float32, got float16"),
]


@pytest.mark.parametrize(("change", "text"), cases(OPTIONS))
def test_check_options_raises(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        check_options(AttentionOptions(**{"softmax_scale": 1.0, **change}), 4, 2, E4M3, CPU)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales(name: str) -> None:
    """They need an fp8 cache. [1] is read for every KV head, with stride 0; [num_kv_heads] has stride 1."""
    options = AttentionOptions(1.0, **{name: zeros(2)})
    check_options(options, 4, 2, E5M2, CPU)
    with pytest.raises(ShapeError, match=f"{name}: expected None with a torch.float16 cache, got a tensor"):
        check_options(options, 4, 2, F16, CPU)
    assert options.scale_strides == ((1, 0) if name == "k_scale" else (0, 1))
    assert AttentionOptions(1.0, **{name: zeros(1)}).scale_strides == (0, 0)


def test_workspace_fits_each_plan() -> None:
    """Different plans need the largest size of each tensor."""
    plans = [decode_plan(), decode_plan(query_len=8), decode_plan(batch_invariant=True, num_reqs=9), varlen_plan(64)]
    plans.append(decode_plan(v_head_dim=500))
    made = AttentionWorkspace.allocate(plans, CPU)
    assert made.partial_out.numel() == max(plan.partial_queries * plan.shape.v_head_dim for plan in plans)
    assert made.partial_lse.numel() == max(plan.partial_lses for plan in plans)
    assert made.counters.numel() == max(plan.num_counters for plan in plans)
    for tensor in (made.partial_out, made.partial_lse, made.counters):
        assert not tensor.any(), "0 at first"


def test_workspace_of_a_model_stays_small() -> None:
    """The partial results of Llama-3.1-8B at up to 256 requests on 132 multiprocessors."""
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "num_sms": 132}
    plans = [AttentionPlan.decode(reqs, **heads) for reqs in range(1, 257)]  # type: ignore[arg-type]  # a dict of both
    assert AttentionWorkspace.allocate(plans, META).partial_out.nbytes <= 4 << 20
