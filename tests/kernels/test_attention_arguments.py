"""What the attention functions refuse, and how many splits and how much scratch memory decode sizes get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.kernels.attention.paged_decode import paged_decode
from graphrt.kernels.attention.reference import attention_reference
from graphrt.kernels.attention.splits import MAX_SPLITS, DecodeWorkspace, decode_num_splits
from graphrt.kernels.attention.varlen import varlen_attention
from graphrt.kernels.errors import CapacityError, ShapeError, UnsupportedError

CPU = torch.device("cpu")


def arguments(head_dim: int = 32) -> dict[str, Any]:
    """Valid arguments of paged_decode for 2 rows, 4 query heads and 2 KV heads."""
    return {
        "q": torch.zeros(2, 4, head_dim),
        "k_cache": torch.zeros(3, 8, 2, head_dim),
        "v_cache": torch.zeros(3, 8, 2, head_dim),
        "block_table": torch.zeros(2, 5, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "out": torch.zeros(2, 4, head_dim),
        "workspace": DecodeWorkspace.allocate(
            2, max_query_len=1, head_shapes=[(4, 2, head_dim)], num_sms=4, device=CPU
        ),
        "softmax_scale": 1.0,
        "num_splits": 1,
    }


def small_workspace(counters: int = 16) -> DecodeWorkspace:
    return DecodeWorkspace(torch.zeros(4), torch.zeros(4), torch.zeros(counters, dtype=torch.int32))


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("q_dims", {"q": torch.zeros(2, 128)}, ShapeError, r"q: expected shape \[\*, \*, \*\], got \[2, 128\]"),
    ("q_dtype", {"q": torch.zeros(2, 4, 32, dtype=torch.float64)}, ShapeError, "q: expected dtype float16 or"),
    ("k_head_dim", {"k_cache": torch.zeros(3, 8, 2, 16)}, ShapeError, "k_cache: expected shape"),
    ("k_dtype", {"k_cache": torch.zeros(3, 8, 2, 32).half()}, ShapeError, "k_cache: expected dtype float32"),
    ("v_shape", {"v_cache": torch.zeros(4, 8, 2, 32)}, ShapeError, "v_cache: expected shape"),
    ("v_stride", {"v_cache": torch.zeros(3, 8, 32, 2).mT}, ShapeError, "v_cache: expected stride 1"),
    ("kv_heads", {k: torch.zeros(3, 8, 3, 32) for k in ("k_cache", "v_cache")}, ShapeError, "multiple of k_cache's 3"),
    ("table_rows", {"block_table": torch.zeros(3, 5, dtype=torch.int32)}, ShapeError, "block_table: expected shape"),
    ("table_dtype", {"block_table": torch.zeros(2, 5).long()}, ShapeError, "block_table: expected dtype int32"),
    ("lens_dtype", {"seq_lens": torch.zeros(2).long()}, ShapeError, "seq_lens: expected dtype int32"),
    ("lens_device", {"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")}, ShapeError, "seq_lens: .* device"),
    ("out_shape", {"out": torch.zeros(3, 4, 32)}, ShapeError, "out: expected shape"),
    ("scale", {"softmax_scale": float("nan")}, ShapeError, "softmax_scale: expected a finite number"),
    ("window", {"sliding_window": -1}, ShapeError, "sliding_window: expected >= 0, got -1"),
    ("softcap", {"logits_softcap": -1.0}, ShapeError, "logits_softcap: expected a finite number >= 0"),
    ("query_len", {"query_len": 2}, ShapeError, "query_len: expected 1 to 16 tokens in each of 2 rows"),
    ("num_splits", {"num_splits": 65}, ShapeError, "num_splits: expected 1 to 64, got 65"),
    ("workspace", {"workspace": small_workspace(), "num_splits": 2}, CapacityError, "workspace.partial_out: expected"),
    ("counters", {"workspace": small_workspace(3)}, CapacityError, "workspace.counters: expected at least 4"),
]


@pytest.mark.parametrize(("change", "error", "text"), [pytest.param(*r[1:], id=r[0]) for r in REFUSED])
def test_paged_decode_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        paged_decode(**{**arguments(), **change})


@pytest.mark.parametrize("head_dim", [8, 20, 264])
def test_triton_refuses_head_dims(head_dim: int) -> None:
    values = arguments(head_dim)
    with pytest.raises(UnsupportedError, match=f"head_dim {head_dim}: supports multiples of 8 from 16 to 256"):
        paged_decode(**values)
    with pytest.raises(UnsupportedError, match=f"head_dim {head_dim}"):
        varlen_attention(**packed(values))


def packed(values: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name not in ("workspace", "num_splits")}
    return {**kept, "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32)}


@pytest.mark.parametrize("function", [varlen_attention, attention_reference])
def test_packed_functions_refuse(function: Callable[..., None]) -> None:
    values = packed(arguments())
    with pytest.raises(ShapeError, match=r"query_start_loc: expected shape \[3\], got \[2\]"):
        function(**{**values, "query_start_loc": values["query_start_loc"][:2]})
    with pytest.raises(ShapeError, match="query_start_loc: expected dtype int32"):
        function(**{**values, "query_start_loc": values["query_start_loc"].long()})
    with pytest.raises(ShapeError, match="v_cache: expected shape"):
        function(**{**values, "v_cache": torch.zeros(1, 8, 2, 32)})


@pytest.mark.parametrize(
    ("padded_reqs", "num_kv_heads", "num_sms", "packed_rows", "low", "high"),
    [
        pytest.param(1, 8, 132, 4, 28, 33, id="one_row_fills_the_device"),
        pytest.param(1, 1, 132, 4, 57, MAX_SPLITS, id="capped"),
        pytest.param(16, 8, 132, 4, 2, 2, id="sixteen_rows"),
        pytest.param(24, 8, 132, 4, 2, 4, id="more_than_half_a_wave"),
        pytest.param(64, 8, 132, 4, 1, 1, id="full_waves_need_no_split"),
        pytest.param(4096, 8, 132, 4, 1, 1, id="many_rows"),
        pytest.param(1, 8, 132, 256, 7, 9, id="query_tiles_count"),
        pytest.param(1, 1, 1, 1, 2, 8, id="one_sm"),
    ],
)
def test_decode_num_splits(
    padded_reqs: int, num_kv_heads: int, num_sms: int, packed_rows: int, low: int, high: int
) -> None:
    assert low <= decode_num_splits(padded_reqs, num_kv_heads, num_sms, packed_rows) <= high


@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (71, 1, 64), (16, 16, 256)], ids=str)
@pytest.mark.parametrize("max_query_len", [1, 5, 16])
def test_workspace_serves_every_decode_size(heads: tuple[int, int, int], max_query_len: int) -> None:
    """Meta tensors: paged_decode's own check of the workspace is what decides."""
    num_q_heads, num_kv_heads, head_dim = heads
    meta = torch.device("meta")
    workspace = DecodeWorkspace.allocate(
        80, max_query_len=max_query_len, head_shapes=[heads, (1, 1, 16)], num_sms=132, device=meta
    )
    cache = torch.empty(2, 16, num_kv_heads, head_dim, device=meta)
    for query_len in {1, max_query_len}:
        for rows in range(1, 81):
            q = torch.empty(rows * query_len, num_q_heads, head_dim, device=meta)
            table = torch.empty(rows, 4, dtype=torch.int32, device=meta)
            splits = decode_num_splits(rows, num_kv_heads, 132, query_len * num_q_heads // num_kv_heads)
            paged_decode(
                q,
                cache,
                cache,
                table,
                table[:, 0].contiguous(),
                q,
                workspace,
                softmax_scale=1.0,
                num_splits=splits,
                query_len=query_len,
            )


def test_workspace_of_a_model_stays_small() -> None:
    """The partial results of Llama-3.1-8B at up to 256 rows on 132 SMs take at most 4 MB."""
    workspace = DecodeWorkspace.allocate(
        256, max_query_len=1, head_shapes=[(32, 8, 128)], num_sms=132, device=torch.device("meta")
    )
    assert workspace.partial_out.nbytes <= 4 << 20
