"""Arguments of Batch, Request, ReplayManager and descriptors: typed errors name the wrong one."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from graphrt.batch import Batch, Request
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.config import RuntimeConfig
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.types import TOKEN_FROM_DEVICE
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.steps import CPU, assert_works, good
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, Rig, ToyModel, make_rig


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig(CPU)


def test_a_batch_is_always_checked(rig: Rig) -> None:
    """`dataclasses.replace` checks too, and fields cannot be set."""
    batch = Batch(**good())
    for change, text in (
        ({"tokens": [2**32 + 11, 1]}, "values that fit int32"),
        ({"req_indices": [0.5, 1]}, "batch.req_indices: expected int32 values, got float64"),
        ({"seeds": [1.5, 2]}, "batch.seeds: expected uint32 values"),
        ({"query_lens": [2, 1]}, "expected 3 tokens, the sum of query_lens, got 2"),
    ):
        with pytest.raises(ShapeError, match=text):
            dataclasses.replace(batch, **change)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.tokens = np.array([1, 2])
    assert dataclasses.replace(batch, tokens=[8, 9]).tokens.tolist() == [8, 9]
    assert batch == Batch(**good())
    assert batch != Batch(**good(tokens=[3, 5]))
    assert batch != "batch"
    assert_works(rig)


def test_arrays_of_the_right_dtype_are_kept() -> None:
    ids = np.array([5, 6], np.int32)
    assert Batch(**good(page_ids=ids)).page_ids is ids


@pytest.mark.parametrize(
    "thing",
    [None, "batch", [], {"req_indices": [0]}, Request(0, [1], 1, [5]), [Request(0, [1], 1, [5])]],
    ids=["none", "text", "list", "dict", "request", "requests"],
)
def test_replay_and_compare_take_batches_only(rig: Rig, thing: object) -> None:
    for call in (rig.manager.replay, rig.manager.compare):
        with pytest.raises(ShapeError, match="batch: expected Batch, got"):
            call(thing)
    assert_works(rig)


REQUESTS = {
    "no-list": (Request(0, [1], 1, [5]), "requests: expected a sequence of Request, got Request"),
    "none": ([None], r"requests\[0\]: expected a Request, got NoneType"),
    "tokens-none": (
        [Request(0, None, 1, [5])],
        r"requests\[0\].tokens: expected a list or array of ints, got NoneType; \[TOKEN_FROM_DEVICE\] is",
    ),
    "pages-tensors": (
        [Request(0, [1], 1, (torch.tensor([5]), torch.tensor([6])))],
        r"requests\[0\].pages: expected a list or array of ints, got Tensor; \(\) lists no page",
    ),
    "tokens-text": ([Request(0, "1", 1, [5])], r"requests\[0\].tokens: expected a list or array of ints, got str"),
    "pages-none": (
        [Request(0, [1], 1, [5]), Request(1, [1], 1, None)],
        r"requests\[1\].pages: expected a list or array of ints",
    ),
    "pages-float": ([Request(0, [1], 1, [5.0])], "batch.page_ids: expected int32 values"),
    "pages-nested": ([Request(0, [1], 1, [[[5]]])], "batch.page_ids: expected one dimension"),
    "pages-half-nested": (
        [Request(0, [1], 1, [[5], 6])],
        r"requests\[0\].pages: expected a list or array of ints, got int",
    ),
    "pages-of-one-request": (
        [Request(0, [1], 1, [5]), Request(1, [1], 1, [[6], [7]])],
        r"requests\[0\].pages: expected 2 lists of pages, .* got \[5\] and 0; pass a list per KV group",
    ),
    "pages-of-a-group": (
        [Request(0, [1], 1, [[5], [8]]), Request(1, [1], 1, [[6]])],
        r"requests\[1\].pages: expected 2 lists of pages, .* got \[\[6\]\] and 0",
    ),
    "first-page-of-a-group": (
        [Request(0, [1], 1, [[5], [8]], first_page=[0])],
        r"requests\[0\].pages: expected 2 lists of pages, .* and one first page or 2, got .* and \[0\]",
    ),
    "first-page-none": ([Request(0, [1], 1, [5], first_page=None)], "batch.first_pages: expected int32 values"),
    "first-page-negative": (
        [Request(0, [1], 1, [5], first_page=-1)],
        "batch.first_pages: expected page indices >= 0, got -1",
    ),
    "seq-len-none": ([Request(0, [1], None, [5])], "batch.seq_lens: expected int32 values"),
    "req-index-none": ([Request(None, [1], 1, [5])], "batch.req_indices: expected int32 values"),
    "temperature-none": ([Request(0, [1], 1, [5], temperature=None)], "batch.temperatures: expected float32 values"),
    "seed-none": ([Request(0, [1], 1, [5], seed=None)], "batch.seeds: expected uint32 values"),
    "no-tokens": ([Request(0, [], 1, [5])], "expected >= 1 new token per request, got 0"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_bad_requests_are_named(case: str) -> None:
    requests, text = REQUESTS[case]
    with pytest.raises(ShapeError, match=text):
        Batch.from_requests(requests)


def test_requests_without_pages_list_none_in_any_group() -> None:
    listing, nothing = Request(0, [1], 1, ([5], [6, 7]), first_page=(0, 2)), Request(1, [1], 4)
    batch = Batch.from_requests([nothing, listing, dataclasses.replace(nothing, req_index=2)])
    assert batch.page_indptr.tolist() == [0, 0, 1, 1, 1, 3, 3]
    assert batch.page_ids.tolist() == [5, 6, 7]
    assert batch.first_pages.tolist() == [0, 0, 0, 0, 2, 0]
    assert Batch.from_requests([nothing]) == Batch(req_indices=[1], seq_lens=[4], query_lens=[1], tokens=[1])
    assert Batch.from_requests([nothing]).num_groups == 0


def test_requests_may_hold_lists_tuples_and_arrays() -> None:
    requests = [
        Request(0, (3,), 5, np.array([40, 41], np.int32)),
        Request(1, [4], 2, [42]),
        Request(2, range(2), 2, (43,)),
    ]
    batch = Batch.from_requests(requests)
    assert batch.tokens.tolist() == [3, 4, 0, 1]
    assert batch.page_ids.tolist() == [40, 41, 42, 43]
    assert batch.page_indptr.tolist() == [0, 2, 3, 4]
    assert batch.first_pages.tolist() == [0, 0, 0]
    assert Batch.from_requests([]) == Batch.empty()
    nested = [dataclasses.replace(request, pages=[request.pages]) for request in requests]
    assert Batch.from_requests(nested) == batch, "lists per group, of one group"
    arrays = [Request(r, np.array([r + 3]), 1, np.array([r + 5, r + 6], np.uint8)) for r in (0, 1)]
    assert Batch.from_requests(arrays).tokens.tolist() == [3, 4]
    assert Batch.from_requests(arrays).page_ids.tolist() == [5, 6, 6, 7]


def test_defaults_of_requests_and_arrays_are_the_same() -> None:
    batch = Batch(req_indices=[4], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    assert Batch.from_requests([Request(4, [3], 1, [5])]) == batch
    assert (batch.sample.tolist(), batch.temperatures.tolist(), batch.seeds.tolist()) == ([1], [0.0], [0])
    assert (batch.query_lens.tolist(), batch.query_lens.dtype) == ([1], np.int32)
    bare = Batch(req_indices=[4], seq_lens=[1], page_indptr=[0, 1], page_ids=[5])
    assert bare.tokens.tolist() == [TOKEN_FROM_DEVICE]
    empty = {name: [] for name in ("query_lens", "tokens", "sample", "temperatures", "seeds")}
    assert Batch(req_indices=[], seq_lens=[], page_indptr=[0], page_ids=[], **empty) == Batch.empty()


DTYPES = {"temperatures": np.float32, "seeds": np.uint32}


@pytest.mark.parametrize(
    "values", [[1, 0], np.array([1, 0]), np.array([1, 9, 0, 9], np.int32)[::2]], ids=["list", "int64", "strided"]
)
@pytest.mark.parametrize(
    "field", ["req_indices", "seq_lens", "tokens", "page_ids", "sample", "temperatures", "seeds", "first_pages"]
)
def test_every_field_becomes_a_contiguous_array_of_its_dtype(field: str, values: object) -> None:
    got = getattr(Batch(**good(**{field: values})), field)
    assert (got.dtype, got.tolist(), got.flags.c_contiguous) == (DTYPES.get(field, np.int32), [1, 0], True)


ONE_WRONG = {
    "indptr-start": ({"page_indptr": [1, 1, 2]}, "2, got 3 values from 1 to 2"),
    "indptr-end": ({"page_indptr": [0, 1, 1]}, "2, got 3 values from 0 to 1"),
    "indptr-falls": ({"page_indptr": [0, 3, 2]}, "2, got 3 values from 0 to 2"),
    "indptr-short": ({"page_indptr": [0, 2]}, r"expected 3 values, or G x 2 \+ 1 with G KV groups, got 2"),
    "int32-short": ({"seq_lens": np.ones(1, np.int32)}, r"batch.seq_lens: expected shape \[2\], got shape \[1\]"),
    "int32-rank": ({"tokens": np.ones((1, 2), np.int32)}, r"batch.tokens: expected one dimension, got shape \[1, 2\]"),
    "bool-heat": ({"temperatures": np.array([True, False])}, "batch.temperatures: expected float32 values, got bool"),
    "below-int32": ({"req_indices": np.array([0, -(2**31) - 1])}, "batch.req_indices: .* got -2147483649"),
    "beyond-int32": ({"req_indices": np.array([2**31, 0])}, "batch.req_indices: .* got 2147483648"),
    "sample-low": ({"sample": [-1, 1]}, "batch.sample: expected 0 or 1, got -1 for request 0"),
}


@pytest.mark.parametrize("case", ONE_WRONG)
def test_each_array_of_a_batch_is_checked(case: str) -> None:
    changes, text = ONE_WRONG[case]
    with pytest.raises(ShapeError, match=text):
        Batch(**good(**changes))


def test_int64_arrays_are_taken_if_their_values_fit() -> None:
    low, high = -(1 << 31), (1 << 31) - 1
    assert Batch(**good(page_ids=np.array([low, high]))).page_ids.tolist() == [low, high]
    assert Batch(**good(seeds=np.array([0, 2**32 - 1]))).seeds.tolist() == [0, 2**32 - 1]


def test_the_largest_batch() -> None:
    most = 1 << 16
    one = Batch(req_indices=[0], seq_lens=[most], query_lens=[most], page_indptr=[0, 0], page_ids=[])
    assert one.num_tokens == most
    many = {"seq_lens": [1] * most, "page_indptr": [0] * (most + 1), "page_ids": []}
    assert Batch(req_indices=range(most), **many).num_reqs == most
    with pytest.raises(ShapeError, match="expected at most 65536 tokens, got 65537"):
        Batch(req_indices=[0], seq_lens=[most], query_lens=[most + 1], page_indptr=[0, 0], page_ids=[])


def test_check_weights_takes_modules_only(rig: Rig) -> None:
    for wrong in (None, lambda step: None):
        with pytest.raises(ConfigError, match="model: expected Module, got"):
            rig.manager.check_weights(wrong)


def built(**changes: object) -> ReplayManager:
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)
    arguments = {
        "model": ToyModel(CPU, torch.float32),
        "kv_cache": KVCache.allocate(spec, 8, CPU),
        "attention": AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32),
        "vocab_size": VOCAB,
        "config": RuntimeConfig(max_num_reqs=2, max_num_tokens=4, max_seq_len=8),
    }
    return ReplayManager(**{**arguments, **changes})


BAD_MANAGER = {
    "model": ({"model": "abc"}, "model: expected a callable, got 'abc'"),
    "kv_cache": ({"kv_cache": None}, "kv_cache: expected KVCache, got None"),
    "attention": ({"attention": "abc"}, "attention: expected a list or tuple of AttentionSpec"),
    "attention-item": ({"attention": [None] * LAYERS}, r"attention\[0\]: expected AttentionSpec, got None"),
    "sampler": ({"sampler": "abc"}, "sampler: expected a callable, got 'abc'"),
    "weights": ({"weights": "abc"}, "weights: expected pairs of a name and a tensor, got 'abc'"),
    "weights-items": ({"weights": [("a", 1)]}, r"weights\[0\]: expected a name and a tensor"),
    "config": ({"config": {}}, "config: expected RuntimeConfig, got {}"),
    "stream": ({"stream": 0}, "stream: expected None with a cache on cpu, got 0"),
    "vocab": ({"vocab_size": 0}, "vocab_size: expected an int from 1 to 1048576, got 0"),
    "vocab-too-large-for-the-sampler": ({"vocab_size": (1 << 20) + 1}, "vocab_size: expected an int from 1 to 1048576"),
}


@pytest.mark.parametrize("case", BAD_MANAGER)
def test_bad_manager_arguments_are_named(case: str) -> None:
    changes, text = BAD_MANAGER[case]
    with pytest.raises(ConfigError, match=text):
        built(**changes)
    built().close()


def test_a_custom_sampler_takes_any_vocabulary() -> None:
    built(vocab_size=(1 << 20) + 1, sampler=lambda logits, step: logits.argmax(-1)).close()


def test_mixed_sizes_need_mixed_batches(rig: Rig) -> None:
    alone = built(config=RuntimeConfig(max_num_reqs=2, max_num_tokens=4, max_seq_len=8, mixed_batches=False))
    alone.capture()
    batch = Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[5])
    with pytest.raises(UnsupportedError, match="a decode size with mixed_batches=False, got mixed"):
        alone.replay(batch, descriptor=BatchDescriptor.mixed(4, 2))
    assert alone.replay(batch, descriptor=BatchDescriptor.decode(2)).descriptor == BatchDescriptor.decode(2)
    alone.close()


def test_descriptors_are_equal_in_every_process() -> None:
    """Ranks send descriptors to each other: hashes of strings would differ."""
    code = "import pickle, sys; d = pickle.load(sys.stdin.buffer); print(hash(d))"
    for seed in ("1", "2"):
        sent = pickle.dumps(BatchDescriptor.mixed(64, 8))
        result = subprocess.run(
            [sys.executable, "-c", code], input=sent, capture_output=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert int(result.stdout) == hash(BatchDescriptor.mixed(64, 8))
    for kind, reqs in (("decode", 1), (GraphKind.DECODE, "1"), (GraphKind.DECODE, 1.0), (GraphKind.MIXED, 0)):
        with pytest.raises(ConfigError, match=r"BatchDescriptor\.(kind|padded_reqs): expected"):
            BatchDescriptor(kind, reqs, 1)


DESCRIPTORS = {
    "type": ("decode", ConfigError, "descriptor: expected BatchDescriptor, got 'decode'"),
    "unknown": (BatchDescriptor.decode(3), ConfigError, "is not a size that this runtime pads to"),
    "query_len": (BatchDescriptor.decode(2, 2), ConfigError, "is not a size that this runtime pads to"),
    "beyond": (BatchDescriptor.decode(64), ConfigError, "is not a size that this runtime pads to"),
    "small": (BatchDescriptor.decode(1), CapacityError, "does not fit 2 requests and 2 tokens; choose"),
}


@pytest.mark.parametrize("case", DESCRIPTORS)
def test_descriptors_that_do_not_fit_a_batch_are_refused(rig: Rig, case: str) -> None:
    descriptor, error, text = DESCRIPTORS[case]
    with pytest.raises(error, match=text):
        rig.manager.replay(Batch(**good()), descriptor=descriptor)
    uneven = Batch(**good(seq_lens=[2, 1], query_lens=[2, 1], tokens=[3, 4, 5]))
    with pytest.raises(CapacityError, match="of unequal query lengths; choose"):
        rig.manager.replay(uneven, descriptor=BatchDescriptor.decode(8))
    assert_works(rig)
