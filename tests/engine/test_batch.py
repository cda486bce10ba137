"""Batch and Request: conversion, defaults, packing into the step inputs, and errors that name the wrong field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.batch import Batch, Request
from graphrt.kernels.errors import CapacityError, ShapeError
from graphrt.kernels.metadata.step_inputs import inputs_size
from graphrt.kernels.types import TOKEN_FROM_DEVICE
from graphrt.step import Step
from tests.support.steps import CPU, assert_works, good
from tests.support.toy import MAX_LEN, Rig, make_rig

LOW, HIGH = -(2**31), 2**31 - 1
META = torch.ones(2, device="meta")
DTYPES = {"temperatures": np.float32, "seeds": np.uint32}


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig(CPU)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"seq_lens": [1.5, 1.0]}, "batch.seq_lens: expected int32 values, got float64"),
    "text": ({"req_indices": ["a", "b"]}, "batch.req_indices: expected int32 values"),
    "none": ({"seq_lens": None}, "batch.seq_lens: expected int32 values, got object"),
    "complex": ({"temperatures": [0j, 1j]}, "batch.temperatures: expected float32 values"),
    "bool temperature": ({"temperatures": np.array([True, False])}, "batch.temperatures: expected float32 .* bool"),
    "float seed": ({"seeds": [0.5, 0]}, "batch.seeds: expected uint32 values, got float64"),
    "device": ({"seq_lens": META}, "batch.seq_lens: expected host values, got a tensor on meta"),
    "ragged": ({"page_ids": [[5], [6, 7]]}, "batch.page_ids: NumPy cannot make a one-dimensional int32"),
    "gradient": ({"temperatures": torch.ones(2, requires_grad=True)}, "batch.temperatures: NumPy cannot"),
    "number": ({"tokens": 5}, r"batch.tokens: expected one dimension, got shape \[\]"),
    "rank": ({"req_indices": [[0, 1]]}, r"batch.req_indices: expected one dimension, got shape \[1, 2\]"),
    "rank of int32": ({"tokens": np.ones((1, 2), np.int32)}, r"batch.tokens: .* got shape \[1, 2\]"),
    "lengths short": ({"seq_lens": [1]}, r"batch.seq_lens: expected shape \[2\], got shape \[1\]"),
    "int32 short": ({"seq_lens": np.ones(1, np.int32)}, r"batch.seq_lens: expected shape \[2\], got shape \[1\]"),
    "sample short": ({"sample": [1]}, "batch.sample: expected shape"),
    "temperatures long": ({"temperatures": [0.0] * 3}, "batch.temperatures: expected shape"),
    "above int32": ({"tokens": [3, HIGH + 1]}, "batch.tokens: expected values that fit int32, got 2147483648"),
    "below int32": ({"page_ids": [5, LOW - 1]}, "batch.page_ids: expected values that fit int32, got -2147483649"),
    "above int64": ({"req_indices": [2**70, 1]}, "batch.req_indices: expected int32 values"),
    "negative seed": ({"seeds": [0, -1]}, "batch.seeds: expected values that fit uint32, got -1"),
    "seed": ({"seeds": [0, 2**32]}, "batch.seeds: expected values that fit uint32, got 4294967296"),
    "no new token": ({"query_lens": [0, 2]}, "batch.query_lens: expected >= 1 new token per request, got 0"),
    "negative query": ({"query_lens": [3, -1]}, "batch.query_lens: expected >= 1 new token per request, got -1"),
    "too many tokens": ({"tokens": [3, 4, 5]}, "batch.tokens: expected 2 tokens, the sum of query_lens, got 3"),
    "too few tokens": ({"tokens": [3]}, "batch.tokens: expected 2 tokens, the sum of query_lens, got 1"),
    "8 gigabytes": ({"query_lens": [HIGH, 1]}, "batch.query_lens: expected at most 65536 tokens, got 2147483648"),
    "lists start": ({"page_indptr": [1, 1, 2]}, r"batch.page_indptr: .*\(page_ids\)=2, got 3 values from 1 to 2"),
    "lists end early": ({"page_indptr": [0, 1, 1]}, "batch.page_indptr: .*, got 3 values from 0 to 1"),
    "lists end late": ({"page_indptr": [0, 1, 3]}, "batch.page_indptr: .*, got 3 values from 0 to 3"),
    "lists fall": ({"page_indptr": [0, 3, 2]}, "batch.page_indptr: expected non-decreasing values"),
    "lists short": ({"page_indptr": [0, 2]}, r"batch.page_indptr: expected 3 values, or G x 2 \+ 1 with G KV.* got 2"),
    "lists long": ({"page_indptr": [0, 1, 2, 2]}, "batch.page_indptr: expected 3 values, .* got 4"),
    "nan": ({"temperatures": [0, float("nan")]}, "batch.temperatures: expected finite numbers >= 0"),
    "negative temperature": ({"temperatures": [0, -1e-9]}, "batch.temperatures: expected finite numbers >= 0"),
    "above float32": ({"temperatures": [1e39, 0]}, "batch.temperatures: expected finite numbers >= 0"),
    "sample": (
        {"sample": [0, 2]},
        "batch.sample: expected at most 1 for request 1, the number of its new tokens, got 2",
    ),
    "negative sample": ({"sample": [-1, 1]}, "batch.sample: expected numbers >= 0, got -1 for request 0"),
    "first page": ({"first_pages": [0, -1]}, "batch.first_pages: expected page indices >= 0, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_batch_fields_raise(case: str) -> None:
    changes, text = WRONG[case]
    with pytest.raises(ShapeError, match=text):
        Batch(**good(**changes))


MANY = {"req_indices": range(9), "seq_lens": [1] * 9, "tokens": [1] * 9, "page_indptr": [0] * 10, "page_ids": []}
LONG_LIST = inputs_size(8, 32, 8 * MAX_LEN // 4, 1) - inputs_size(2, 2, 0, 1) + 1
ABOVE_CAPACITY: dict[str, tuple[dict[str, Any], str]] = {
    "requests": (MANY, "at most 8 requests and 32 tokens, got 9 requests and 9 tokens"),
    "tokens": (
        {"seq_lens": [20, 20], "query_lens": [20, 13], "tokens": [1] * 33},
        "at most 8 requests and 32 tokens, got 2 requests and 33 tokens",
    ),
    "length": ({"seq_lens": [1, 65]}, "batch.seq_lens: expected at most max_seq_len=64, got 65 for request 1"),
    "pages": (
        {"page_indptr": [0, 1, LONG_LIST], "page_ids": [1] * LONG_LIST},
        f"batch.page_ids: expected at most {LONG_LIST - 1} listed pages in one step, got {LONG_LIST}",
    ),
}


@pytest.mark.parametrize("case", ABOVE_CAPACITY)
def test_batches_above_the_capacity_raise_before_anything_is_written(rig: Rig, case: str) -> None:
    changes, text = ABOVE_CAPACITY[case]
    tensors = [tensor for _, tensor in (*rig.manager.buffers.named(), *rig.manager.kv_cache.named_tensors())]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(CapacityError, match=text):
        rig.manager.replay(Batch(**good(**changes)))
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)
    assert_works(rig)


def test_full_step_runs(device: torch.device) -> None:
    """With as many requests, tokens, KV tokens and listed pages as fit."""
    rig = make_rig(device, max_num_reqs=4, max_num_tokens=9, max_seq_len=12, decode_sizes=(4,), mixed_sizes=(9,))
    sequences = [rig.start(i, [10 * i + j for j in range(n)]) for i, n in enumerate((1, 2, 3, 3))]
    assert rig.prefill(*sequences).tolist() == [int(rig.model.oracle(s.tokens[:-1]).argmax()) for s in sequences]
    long = rig.start(0, list(range(12)))
    rig.manager.replay(Batch.from_requests([rig.row(long, 3)])).tokens()
    best = int(rig.model.oracle(long.tokens).argmax())
    assert rig.manager.replay(Batch.from_requests([rig.row(long, 9)])).tokens().tolist() == [best]
    rig = make_rig(device, num_pages=500)
    lists = {"page_indptr": [0, 1, LONG_LIST - 1], "page_ids": range(1, LONG_LIST)}
    want = [int(rig.model.oracle([token]).argmax()) for token in (3, 4)]
    assert rig.manager.replay(Batch(**good(**lists))).tokens().tolist() == want


def test_the_largest_batch() -> None:
    most = 1 << 16
    one = {"req_indices": [0], "seq_lens": [most], "page_indptr": [0, 0], "page_ids": []}
    many = {"seq_lens": [1] * most, "page_indptr": [0] * (most + 1), "page_ids": []}
    assert Batch(**one, query_lens=[most]).num_tokens == most
    assert Batch(req_indices=range(most), **many).num_reqs == most
    with pytest.raises(ShapeError, match="expected at most 65536 tokens, got 65537"):
        Batch(**one, query_lens=[most + 1])
    with pytest.raises(ShapeError, match="expected at most 65536 requests, got 65537"):
        Batch(req_indices=range(most + 1), **many)


@pytest.mark.parametrize("values", [[1, 0], np.array([1, 0]), np.array([1, 9, 0, 9], np.int32)[::2]], ids=str)
@pytest.mark.parametrize(
    "field", ["req_indices", "seq_lens", "tokens", "page_ids", "sample", "temperatures", "seeds", "first_pages"]
)
def test_every_field_becomes_a_contiguous_array_of_its_dtype(field: str, values: object) -> None:
    got = getattr(Batch(**good(**{field: values})), field)
    assert (got.dtype, got.tolist(), got.flags.c_contiguous) == (DTYPES.get(field, np.int32), [1, 0], True)


def test_arrays_are_kept_and_values_at_the_bounds_converted() -> None:
    ids = np.array([5, 6], np.int32)
    assert Batch(**good(page_ids=ids)).page_ids is ids
    assert Batch(**good(page_ids=[LOW, HIGH])).page_ids.tolist() == [LOW, HIGH]
    assert Batch(**good(seeds=np.array([0, 2**32 - 1]))).seeds.tolist() == [0, 2**32 - 1]


def test_a_batch_is_always_checked() -> None:
    """`dataclasses.replace` checks too, and fields cannot be set."""
    batch = Batch(**good())
    with pytest.raises(ShapeError, match="expected 3 tokens, the sum of query_lens, got 2"):
        dataclasses.replace(batch, query_lens=[2, 1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.tokens = np.array([1, 2])
    assert dataclasses.replace(batch, tokens=[8, 9]).tokens.tolist() == [8, 9]
    assert batch == Batch(**good())
    assert batch != Batch(**good(tokens=[3, 5]))
    assert batch != "batch"


@pytest.mark.parametrize("thing", [None, [], {"req_indices": [0]}, Request(0, [1], 1, [5])], ids=str)
def test_replay_and_compare_take_batches_only(rig: Rig, thing: object) -> None:
    for call in (rig.manager.replay, rig.manager.compare):
        with pytest.raises(ShapeError, match="batch: expected Batch, got"):
            call(thing)
    assert_works(rig)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_omitted_fields_are_packed_as_their_documented_defaults(count: int, groups: int, listed: bool) -> None:
    """Also into an entry that holds an older batch."""
    batch = {"req_indices": [4, 2, 7][:count], "seq_lens": [9, 8, 7][:count], "tokens": [3, 1, 2][:count]}
    if listed:
        batch |= {"page_indptr": [*range(groups * count + 1)], "page_ids": [*range(5, 5 + groups * count)]}
    lists = groups * count if listed else 0
    stated = {"query_lens": [1] * count, "sample": [1] * count, "first_pages": [0] * lists, "top_ps": [1.0] * count}
    stated |= {"seeds": [0] * count, "token_masks": [-1] * count}
    packed, words = [], inputs_size(count, count, lists, groups)
    for names in ((), *((name,) for name in stated), tuple(stated)):
        record = np.full(words, 99, np.int32)
        made = Batch(**batch, **{name: stated[name] for name in names})
        assert made.write_inputs(record, 1, groups) == words
        assert made.decode_query_len(2) == 1
        packed.append(record.tolist())
    assert all(other == packed[0] for other in packed), "word by word"
    with pytest.raises(ValueError, match="read-only"):
        Batch(**batch).query_lens[:] = 2  # shared by all batches of so many requests


def one(**changes: Any) -> Request:
    return Request(**{"req_index": 0, "tokens": [1], "seq_len": 1, "pages": [5]} | changes)


WRONG_REQUESTS: dict[str, tuple[Any, str]] = {
    "no list": (one(), "requests: expected a sequence of Request, got Request"),
    "none": ([None], r"requests\[0\]: expected a Request, got NoneType"),
    "tokens none": ([one(tokens=None)], r"requests\[0\].tokens: expected a list or array of ints, got NoneType"),
    "tokens text": ([one(tokens="1")], r"requests\[0\].tokens: expected a list or array of ints, got str"),
    "no tokens": ([one(tokens=[])], "expected >= 1 new token per request, got 0"),
    "pages none": ([one(), one(pages=None)], r"requests\[1\].pages: expected a list or array of ints"),
    "pages tensor": ([one(pages=(torch.tensor([5]),))], r"requests\[0\].pages: expected .* got Tensor; pass \(\)"),
    "pages float": ([one(pages=[5.0])], "batch.page_ids: expected int32 values"),
    "pages nested": ([one(pages=[[[5]]])], "batch.page_ids: expected one dimension"),
    "pages half nested": ([one(pages=[[5], 6])], r"requests\[0\].pages: expected a list or array of ints, got int"),
    "group": ([one(), one(pages=[[6], [7]])], r"requests\[0\].pages: expected 2 lists of .* got \[5\] and 0; pass"),
    "second group": ([one(pages=[[5], [8]]), one(pages=[[6]])], r"requests\[1\].pages: .* got \[\[6\]\] and 0"),
    "first page of a group": ([one(pages=[[5], [8]], first_page=[0])], r"and one first page or 2, got .* and \[0\]"),
    "first page none": ([one(first_page=None)], "batch.first_pages: expected int32 values"),
    "temperature none": ([one(temperature=None)], "batch.temperatures: expected float32 values"),
}


@pytest.mark.parametrize("case", WRONG_REQUESTS)
def test_wrong_requests_raise(case: str) -> None:
    requests, text = WRONG_REQUESTS[case]
    with pytest.raises(ShapeError, match=text):
        Batch.from_requests(requests)


def test_from_requests_converts_each_field() -> None:
    requests = [
        Request(4, [9, 8, 7], 12, [31, 32, 33], sample=False, temperature=0.25, seed=2**31 + 1),
        Request(2, (6,), 5, np.array([41, 42], np.int32), temperature=1.5, seed=11),
        Request(0, range(1, 3), 2, (51,), seed=2**32 - 1),
    ]
    batch = Batch.from_requests(requests)
    assert (batch.num_reqs, batch.num_tokens) == (3, 6)
    expected = {
        "req_indices": [4, 2, 0],
        "seq_lens": [12, 5, 2],
        "query_lens": [3, 1, 2],
        "tokens": [9, 8, 7, 6, 1, 2],
        "page_indptr": [0, 3, 5, 6],
        "page_ids": [31, 32, 33, 41, 42, 51],
        "first_pages": [0, 0, 0],
        "sample": [0, 1, 1],
        "temperatures": [0.25, 1.5, 0.0],
        "seeds": [2**31 + 1, 11, 2**32 - 1],
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected
    nested = [dataclasses.replace(request, pages=[request.pages]) for request in requests]
    assert Batch.from_requests(nested) == batch, "lists per group, of one group"
    arrays = [Request(r, np.array([r + 3]), 1, np.array([r + 5, r + 6], np.uint8)) for r in (0, 1)]
    assert Batch.from_requests(arrays).page_ids.tolist() == [5, 6, 6, 7]


def test_requests_without_pages_list_none_in_any_group() -> None:
    listing, nothing = Request(0, [1], 1, ([5], [6, 7]), first_page=(0, 2)), Request(1, [1], 4)
    batch = Batch.from_requests([nothing, listing, dataclasses.replace(nothing, req_index=2)])
    assert batch.page_indptr.tolist() == [0, 0, 1, 1, 1, 3, 3]
    assert batch.page_ids.tolist() == [5, 6, 7]
    assert batch.first_pages.tolist() == [0, 0, 0, 0, 2, 0]
    assert Batch.from_requests([nothing]) == Batch(req_indices=[1], seq_lens=[4], query_lens=[1], tokens=[1])
    assert Batch.from_requests([nothing]).num_groups == 0


def test_defaults_of_requests_and_arrays_are_the_same() -> None:
    batch = Batch(req_indices=[4], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    assert Batch.from_requests([Request(4, [3], 1, [5])]) == batch
    assert (batch.sample.tolist(), batch.temperatures.tolist(), batch.seeds.tolist()) == ([1], [0.0], [0])
    assert (batch.query_lens.tolist(), batch.query_lens.dtype) == ([1], np.int32)
    assert Batch(req_indices=[4], seq_lens=[1]).tokens.tolist() == [TOKEN_FROM_DEVICE]
    empty = {name: [] for name in ("query_lens", "tokens", "sample", "temperatures", "seeds")}
    assert Batch(req_indices=[], seq_lens=[], page_indptr=[0], page_ids=[], **empty) == Batch.empty()
    assert Batch.from_requests([]) == Batch.empty()


def test_temperatures_and_seeds_above_two_to_the_31(device: torch.device) -> None:
    seen: list[torch.Tensor] = []

    def sampler(logits: torch.Tensor, step: Step) -> torch.Tensor:
        seen.append(torch.stack([step.seeds.double(), step.temperatures.double()]).cpu())
        return logits.argmax(-1)

    rig = make_rig(device, use_graphs=False, decode_sizes=(4,), sampler=sampler)
    seeds, heat = [2**31 - 1, 2**31, 2**32 - 1], [0.5, 0.0, 1.25]
    lists = {"page_indptr": [0, 1, 2, 3], "page_ids": [5, 6, 7]}
    batch = {"req_indices": [5, 3, 1], "seq_lens": [1, 1, 1], "tokens": [7, 8, 9], **lists}
    rig.manager.replay(Batch(**batch, temperatures=heat, seeds=seeds)).tokens()
    assert seen[-1][:, :3].tolist() == [seeds, heat]
    assert rig.manager.buffers.seeds[:4].tolist() == [*seeds, 0]
    assert rig.manager.buffers.temperatures[:4].tolist() == [*heat, 0.0]
    assert rig.manager.buffers.req_indices[:4].tolist() == [5, 3, 1, -1]
