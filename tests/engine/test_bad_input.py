"""Bad input raises typed errors that name the value, writes nothing, and the runtime still serves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from graphrt.batch import Batch, Request
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.engine.handle import StepFaultError
from graphrt.kernels.cache.write import Rotary
from graphrt.kernels.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    ReplayError,
    ShapeError,
    UnsupportedError,
)
from graphrt.kernels.types import TOKEN_FROM_DEVICE, FaultCode
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Step
from tests.support.steps import CPU, assert_works, good
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, Rig, ToyModel, make_rig


def memory(rig: Rig) -> list[torch.Tensor]:
    tensors = [t for _, t in rig.manager.buffers.named()] + [t for _, t in rig.manager.kv_cache.named_tensors()]
    return [torch.nan_to_num(t.float(), nan=-5.0).clone() for t in tensors]


HOST = {
    "too-many-requests": (
        good(req_indices=range(9), seq_lens=[1] * 9, tokens=[1] * 9, page_indptr=range(10), page_ids=range(1, 10)),
        CapacityError,
        "at most 8 requests and 32 tokens, got 9 requests and 9 tokens",
    ),
    "too-many-tokens": (
        good(seq_lens=[20, 20], query_lens=[20, 20], tokens=[1] * 40),
        CapacityError,
        "at most 8 requests and 32 tokens, got 2 requests and 40",
    ),
    "too-long": (good(seq_lens=[65, 1]), CapacityError, "max_seq_len=64, got 65 for request 0"),
    "lengths-short": (good(seq_lens=[1]), ShapeError, r"batch.seq_lens: expected shape \[2\], got shape \[1\]"),
    "rank": (good(seq_lens=[[1], [1]]), ShapeError, r"expected shape \[2\], got shape \[2, 1\]"),
    "dtype": (good(seq_lens=[1.5, 1.0]), ShapeError, "batch.seq_lens: expected int32 values, got float64"),
    "text": (good(req_indices=["a", "b"]), ShapeError, "batch.req_indices: expected int32 values"),
    "overflow": (good(tokens=[2**40, 1]), ShapeError, "values that fit int32, got 1099511627776"),
    "device": (good(seq_lens=torch.ones(2, device="meta")), ShapeError, "expected host values, got a tensor on meta"),
    "no-new-token": (good(query_lens=[0, 2]), ShapeError, "expected >= 1 new token per request, got 0"),
    "token-count": (good(tokens=[1, 2, 3]), ShapeError, "expected 2 tokens, the sum of query_lens, got 3"),
    "indptr-decreases": (good(page_indptr=[0, 3, 2]), ShapeError, "non-decreasing values from 0 to len"),
    "indptr-end": (good(page_indptr=[0, 1, 3]), ShapeError, r"page_ids\)=2"),
    "wide-token": (good(tokens=2**32 + 11), ShapeError, r"batch.tokens: expected one dimension, got shape \[\]"),
    "req-index-too-large": (good(req_indices=[2**32, 1]), ShapeError, "values that fit int32, got 4294967296"),
    "req-index-too-low": (good(req_indices=[-(2**32), 1]), ShapeError, "values that fit int32, got -4294967296"),
    "huge": (good(req_indices=[2**70, 1]), ShapeError, "batch.req_indices: expected int32 values"),
    "ragged": (good(page_ids=[[5], [6, 7]]), ShapeError, "batch.page_ids: NumPy cannot make a one-dimensional int32"),
    "bf16": (good(seq_lens=torch.ones(2, dtype=torch.bfloat16)), ShapeError, "batch.seq_lens: NumPy cannot make"),
    "grad": (good(temperatures=torch.ones(2, requires_grad=True)), ShapeError, "batch.temperatures: NumPy cannot"),
    "none": (good(seq_lens=None), ShapeError, "batch.seq_lens: expected int32 values, got object"),
    "negative-queries": (good(query_lens=[-1, 3]), ShapeError, "expected >= 1 new token per request, got -1"),
    "8-gigabytes": (
        {"req_indices": [0], "seq_lens": [1], "query_lens": [2**31 - 1], "page_indptr": [0, 1], "page_ids": [5]},
        ShapeError,
        "expected at most 65536 tokens, got 2147483647",
    ),
    "batch-too-large": (
        {"req_indices": range(65537), "seq_lens": [1] * 65537, "page_indptr": [0] * 65538, "page_ids": []},
        ShapeError,
        "expected at most 65536 requests, got 65537",
    ),
    "hot-nan": (good(temperatures=[0, float("nan")]), ShapeError, "batch.temperatures: expected finite numbers >= 0"),
    "hot-negative": (good(temperatures=[0, -1e-9]), ShapeError, "batch.temperatures: expected finite numbers >= 0"),
    "hot-infinite": (good(temperatures=[float("inf"), 0]), ShapeError, "batch.temperatures: expected finite numbers"),
    "hot-beyond-float32": (good(temperatures=[1e39, 0]), ShapeError, "batch.temperatures: expected finite numbers"),
    "seed-negative": (good(seeds=[0, -1]), ShapeError, "batch.seeds: expected values that fit uint32, got -1"),
    "seed-wide": (good(seeds=[0, 2**32]), ShapeError, "batch.seeds: expected values that fit uint32, got 4294967296"),
    "seed-float": (good(seeds=[0.5, 0]), ShapeError, "batch.seeds: expected uint32 values, got float64"),
    "sample-2": (good(sample=[0, 2]), ShapeError, "batch.sample: expected 0 or 1, got 2 for request 1"),
    "page-list-too-long": (
        good(page_indptr=[0, 1, 300], page_ids=[1] * 300), CapacityError, r"at most \d+ pages listed",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig(CPU)


@pytest.mark.parametrize("case", HOST, ids=str)
def test_host_checks_raise_before_anything_is_written(rig: Rig, case: str) -> None:
    arguments, error, text = HOST[case]
    before = memory(rig)
    with pytest.raises(error, match=text):
        rig.manager.replay(Batch(**arguments))
    assert all(torch.equal(a, b) for a, b in zip(before, memory(rig), strict=True))
    assert_works(rig)


def requests(*changes: dict) -> Batch:
    """Two or three good requests with changes."""
    base = [
        {"req_index": 0, "tokens": [3], "seq_len": 5, "pages": [40, 41]},
        {"req_index": 1, "tokens": [4], "seq_len": 2, "pages": [42]},
    ]
    filled = [b | c for b, c in zip([*base, base[1] | {"req_index": 2, "pages": [43]}], changes, strict=False)]
    return Batch.from_requests([Request(**f) for f in filled])


DEVICE = {
    "req-index": (requests({}, {"req_index": 8}), 1, FaultCode.REQ_INDEX_OUT_OF_RANGE, 8),
    "negative-req-index": (requests({"req_index": -1}, {}), 0, FaultCode.REQ_INDEX_OUT_OF_RANGE, -1),
    "zero-length": (requests({"seq_len": 0}, {}), 0, FaultCode.BAD_LENGTH, 0),
    "length-below-query": (requests({}, {"tokens": [1, 2, 3], "seq_len": 2}), 1, FaultCode.BAD_LENGTH, 2),
    "negative-length": (requests({}, {"seq_len": -3}), 1, FaultCode.BAD_LENGTH, -3),
    "pages-too-few": (requests({"seq_len": 9}, {}), 0, FaultCode.LENGTH_EXCEEDS_PAGES, 9),
    "no-pages": (requests({}, {"pages": []}), 1, FaultCode.LENGTH_EXCEEDS_PAGES, 2),
    "page-too-big": (requests({}, {"pages": [80]}), 1, FaultCode.PAGE_OUT_OF_RANGE, 80),
    "page-negative": (requests({"pages": [40, -4]}, {}), 0, FaultCode.PAGE_OUT_OF_RANGE, -4),
    "null-page": (requests({"pages": [0, 41]}, {}), 0, FaultCode.PAGE_OUT_OF_RANGE, 0),
    "token-too-big": (requests({"tokens": [VOCAB]}, {}), 0, FaultCode.TOKEN_OUT_OF_RANGE, VOCAB),
    "token-negative": (requests({"tokens": [-9]}, {}), 0, FaultCode.TOKEN_OUT_OF_RANGE, -9),
    "no-last-token": (requests({}, {"req_index": 6, "tokens": [TOKEN_FROM_DEVICE]}), 1, FaultCode.NO_LAST_TOKEN, 6),
    "same-req-index": (requests({}, {"req_index": 0}), 0, FaultCode.DUPLICATE_REQUEST, 0),
    "same-slot": (requests({}, {"pages": [41], "seq_len": 1}), 0, FaultCode.DUPLICATE_PAGE, 41),
}


@pytest.mark.parametrize("eager", [False, True], ids=["replay", "eager"])
@pytest.mark.parametrize("case", DEVICE, ids=str)
def test_faults_found_on_the_device_are_raised_by_the_handle(device: torch.device, case: str, eager: bool) -> None:
    """The bad request gets token -1 and writes nothing; others are served; the error names step, request and value."""
    batch, row, code, value = DEVICE[case]
    rig = make_rig(device, fill=0.25)
    kv = [t.clone() for _, t in rig.manager.kv_cache.named_tensors()]
    handle = rig.manager.replay(batch, eager=eager)
    with pytest.raises(StepFaultError, match=f"step {handle.step}, request {row}: {code.name}") as caught:
        handle.tokens()
    assert (caught.value.step, caught.value.index, caught.value.code, caught.value.value) == (
        handle.step,
        row,
        code,
        value,
    )
    tokens = handle.tokens(raise_on_fault=False)
    invalid = {row} if not code.name.startswith("DUPLICATE") else {0, 1}
    logits = handle.logits(copy=True)
    for i in range(batch.num_reqs):
        if i in invalid:
            assert tokens[i] == -1
        else:
            assert tokens[i] == int(logits[i].argmax())
    allowed = {
        (int(p), (batch.seq_lens[i] - 1) % 4)
        for i in range(batch.num_reqs)
        if i not in invalid
        for p in batch.page_ids[batch.page_indptr[i + 1] - 1 : batch.page_indptr[i + 1]]
    }
    for old, (_, new) in zip(kv, rig.manager.kv_cache.named_tensors(), strict=True):
        changed = {tuple(x) for x in (old != new).flatten(2).any(-1).nonzero().tolist()}
        assert changed == allowed
    assert_works(rig)


def test_a_moved_weight_raises_and_in_place_loading_does_not(device: torch.device) -> None:
    rig = make_rig(device)
    rig.model.embed.data.copy_(rig.model.embed.data * 0.5)
    assert_works(rig)
    rig.model.embed.data = rig.model.embed.data.clone()
    before = memory(rig)
    with pytest.raises(ReplayError, match="embed: expected at address 0x"):
        rig.manager.replay(Batch(**good()))
    assert all(torch.equal(a, b) for a, b in zip(before, memory(rig), strict=True))


def test_a_moved_weight_is_found_within_one_round_of_checks(device: torch.device) -> None:
    rig = make_rig(device, capture=False)
    weights = {f"w{index}": torch.ones(1, device=device) for index in range(100)}
    manager = ReplayManager(
        rig.model, rig.manager.kv_cache, AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32),
        vocab_size=VOCAB, config=rig.manager.config, weights=weights.items(),
    )  # fmt: skip
    manager.capture()
    manager.replay(Batch(**good())).tokens()
    turns = manager._guards.num_turns
    assert turns == 104, "100 weights and 4 tensors of the cache"
    for name in ("w0", "w50", "w99"):
        kept, weights[name].data = weights[name].data, torch.zeros(1, device=device)
        with pytest.raises(ReplayError, match=f"{name}: expected at address 0x"):
            _ = [manager.replay(Batch(**good())) for _ in range(turns)]
        weights[name].data = kept
        manager.replay(Batch(**good())).tokens()
    weights["w99"].data = torch.zeros(1, device=device)
    fresh = ReplayManager(
        rig.model, rig.manager.kv_cache, AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32),
        vocab_size=VOCAB, config=rig.manager.config, weights=weights.items(),
    )  # fmt: skip
    fresh.capture()
    weights["w99"].data = kept
    with pytest.raises(ReplayError, match="w99: expected at address 0x"):
        fresh.replay(Batch(**good()))


def test_check_weights_finds_a_replaced_parameter(rig: Rig) -> None:
    rig.manager.check_weights(rig.model)
    kept, rig.model.where = rig.model.where, torch.nn.Parameter(rig.model.where.detach().clone())
    try:
        with pytest.raises(ReplayError, match="where: expected at address"):
            rig.manager.check_weights(rig.model)
    finally:
        rig.model.where = kept


def test_lifecycle(device: torch.device) -> None:
    rig = make_rig(device, capture=False)
    for call in (lambda: rig.manager.replay(Batch(**good())), rig.manager.reset):
        with pytest.raises(CaptureError, match="expected state 'captured', got 'new'; call capture"):
            call()
    rig.manager.capture()
    with pytest.raises(CaptureError, match="capture: expected state 'new', got 'captured'"):
        rig.manager.capture()
    assert_works(rig)
    handle = rig.manager.replay(Batch(**good()))
    rig.manager.close()
    rig.manager.close()
    assert len(handle.tokens()) == 2, "a handle outlives its manager"
    for call in (lambda: rig.manager.replay(Batch(**good())), rig.manager.capture):
        with pytest.raises(CaptureError, match="got 'closed'; it was closed, build a new one"):
            call()


def test_a_failed_capture_leaves_the_manager_new(device: torch.device) -> None:
    rig = make_rig(device, capture=False)
    real, broken = rig.model.project, {"on": True}

    def project(layer: int, x: torch.Tensor):
        if broken["on"] and float(x.sum()) > 1e9:
            raise AssertionError("never")
        return real(layer, x)

    rig.model.project = project
    with pytest.raises(CaptureError, match=r"mixed\[32 tokens, 8\]"):
        rig.manager.capture()
    broken["on"] = False
    rig.manager.capture()
    assert_works(rig)


def attend_rotated(step: Step, rows: int) -> torch.Tensor:
    q, k = torch.zeros(step.descriptor.padded_tokens, HEADS, 16), torch.zeros(step.descriptor.padded_tokens, 2, 16)
    return step.attend(0, q, k, k, rotary=Rotary(torch.zeros(rows, 16)))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            lambda step: torch.zeros(step.descriptor.padded_reqs, VOCAB + 1),
            "logits: expected vocab_size=61 per request, got 62;",
        ),
        (lambda step: torch.zeros(step.descriptor.padded_tokens, VOCAB, dtype=torch.int64), "logits: expected "),
        (lambda step: "text", "logits: expected a torch.Tensor, got str"),
        (lambda step: step.attend(5, *[torch.zeros(32, 1, 1)] * 3), "layer: expected an int from 0 to 1, got 5"),
        (lambda step: step.attend(0, *[torch.zeros(32, 4, 16)] * 3), r"k: .* \[32, 2, 16\], got \[32, 4, 16\]"),
        (lambda step: step.attend(0, *[torch.zeros(32, 4, 16).half()] * 3), "q: expected dtype float32, got float16"),
        (lambda step: attend_rotated(step, rows=63), "rotary.cos_sin: expected at least max_seq_len=64 rows.* got 63"),
    ],
    ids=["vocab", "dtype", "type", "layer", "k-shape", "q-dtype", "rotary"],
)  # fmt: skip
def test_wrong_outputs_and_calls_of_a_model(model, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        manager(model=model).capture()


def manager(model=None, spec=None, cache=None, **config) -> ReplayManager:
    kv_spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)
    settings = {"max_num_reqs": 8, "max_num_tokens": 32, "max_seq_len": 64} | config
    return ReplayManager(
        model or ToyModel(CPU, torch.float32),
        cache or KVCache.allocate(kv_spec, 10, CPU),
        spec or AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32),
        vocab_size=VOCAB,
        config=RuntimeConfig(**settings),
    )


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: manager(backend="flashy"), ConfigError, "flashy"),
        (lambda: RuntimeConfig(max_num_reqs=0), ConfigError, "max_num_reqs: expected an int from 1 to 65536, got 0"),
        (lambda: RuntimeConfig(ring_depth=1), ConfigError, "ring_depth: expected an int from 2 to 1024, got 1"),
        (lambda: RuntimeConfig(max_num_reqs=64, max_num_tokens=32), ConfigError, "query_len = 64, got 32"),
        (lambda: manager(decode_sizes=(9,)), ConfigError, r"decode_sizes\[0\]: expected an int from 1 to 8, got 9"),
        (lambda: AttentionSpec(4, 3, 16), ConfigError, "multiple of num_kv_heads=3, got 4"),
        (lambda: AttentionSpec(4, 2, 16, dtype=torch.int8), ConfigError, "AttentionSpec.dtype"),
        (lambda: KVCacheSpec(1, 1, 16, page_size=0), ConfigError, "page_size: expected an int from 1 to 1024, got 0"),
        (lambda: KVCacheSpec(1, 1, 16, dtype=torch.int8), ConfigError, "KVCacheSpec.dtype: .*e5m2.*, got torch.int8"),
        (lambda: AttentionSpec(4, 2, 16, alibi_slopes=(1.0,)), ConfigError, "alibi_slopes: expected 4 slopes.* got 1"),
        (lambda: AttentionSpec(1, 1, 16, alibi_slopes=[1.0]), ConfigError, r"expected tuple, got \["),
        (lambda: AttentionSpec(1, 1, 16, alibi_slopes=(float("nan"),)), ConfigError, "expected finite floats"),
        (lambda: AttentionSpec(1, 1, 16, alibi_sqrt=True), ConfigError, "alibi_sqrt: requires alibi_slopes"),
        (
            lambda: manager(spec=AttentionSpec(4, 4, 16, torch.float32)),
            ConfigError,
            "num_kv_heads: expected 2, as in its KV group, got 4",
        ),
        (
            lambda: manager(spec=[AttentionSpec(4, 2, 16, torch.float32)]),
            ConfigError,
            "attention: expected 2 layers with their own KV, .* got 1 among 1",
        ),
        (lambda: KVCache.allocate(KVCacheSpec(1, 1, 16), 1, CPU), ConfigError, "num_pages: .* 2 to 2147483647, got 1"),
    ],
    ids=[
        "backend", "reqs", "ring", "tokens", "sizes", "group", "dtype", "page", "kv-dtype",
        "slopes", "slopes-list", "slopes-nan", "slopes-missing", "heads", "layers", "pages",
    ],
)  # fmt: skip
def test_bad_configuration(build, error, text: str) -> None:
    with pytest.raises(error, match=text):
        build()


TYPES = {  # values of a wrong type, and numbers beyond int32
    "heads": (lambda: AttentionSpec(4.0, 2, 16), "AttentionSpec.num_q_heads: expected an int from 1 to 65536, got 4.0"),
    "heads-text": (
        lambda: AttentionSpec("4", 2, 16),
        "AttentionSpec.num_q_heads: expected an int from 1 to 65536, got '4'",
    ),
    "head_dim": (
        lambda: AttentionSpec(4, 2, True),
        "AttentionSpec.head_dim: expected an int from 1 to 65536, got True",
    ),
    "window": (lambda: AttentionSpec(4, 2, 16, sliding_window=4.5), "sliding_window: expected an int .*, got 4.5"),
    "window-bool": (
        lambda: AttentionSpec(4, 2, 16, sliding_window=True),
        "sliding_window: .* got True; pass None for no limit",
    ),
    "window-wraps": (lambda: AttentionSpec(4, 2, 16, sliding_window=2**30 + 1), "from 1 to 1073741824, got 1073741825"),
    "softcap": (lambda: AttentionSpec(4, 2, 16, logits_softcap=float("inf")), "logits_softcap: .*, got inf; None"),
    "softcap-text": (lambda: AttentionSpec(4, 2, 16, logits_softcap="30"), "logits_softcap: .*, got '30'; None means"),
    "scale": (
        lambda: AttentionSpec(4, 2, 16, softmax_scale="1"),
        "softmax_scale: .* number >= 1.17549e-38, got '1'; None means",
    ),
    "scale-huge": (lambda: AttentionSpec(4, 2, 16, softmax_scale=10**400), "softmax_scale: expected a finite number"),
    "slopes-text": (lambda: AttentionSpec(1, 1, 16, alibi_slopes=("1",)), "alibi_slopes: expected finite floats"),
    "sinks": (
        lambda: AttentionSpec(4, 2, 16, sinks=torch.ones(4)),
        r"sinks: expected True or False, got tensor\(\[1., 1., 1., 1.\]\); pass tensors to",
    ),
    "page": (lambda: KVCacheSpec(1, 1, 16, 16.0), "KVCacheSpec.page_size: expected an int from 1 to 1024, got 16.0"),
    "layers": (lambda: KVCacheSpec(1.5, 1, 16), "KVCacheSpec.num_layers: expected an int from 1 to 65536, got 1.5"),
    "pages": (
        lambda: KVCache.allocate(KVCacheSpec(1, 1, 16), "9", CPU),
        "num_pages: expected an int from 2 to 2147483647, got '9'",
    ),
    "query_len": (lambda: RuntimeConfig(query_len=1.5), "RuntimeConfig.query_len: expected an int from 1 .*, got 1.5"),
    "reqs": (lambda: RuntimeConfig(max_num_reqs="8"), "RuntimeConfig.max_num_reqs: expected an int from .*, got '8'"),
    "length": (lambda: RuntimeConfig(max_seq_len=10**12), "max_seq_len: .* to 1073741824, got 1000000000000"),
    "sizes": (
        lambda: RuntimeConfig(decode_sizes=("1", 2)),
        r"RuntimeConfig.decode_sizes\[0\]: expected an int .*, got '1'",
    ),
    "size": (
        lambda: RuntimeConfig(decode_sizes=8),
        "RuntimeConfig.decode_sizes: expected ints from 1 to 256 .*, got 8",
    ),
    "graphs": (lambda: RuntimeConfig(use_graphs="no"), "RuntimeConfig.use_graphs: expected True or False, got 'no'"),
    "graphs-int": (lambda: RuntimeConfig(use_graphs=1), "RuntimeConfig.use_graphs: .* got 1"),
    "weights": (lambda: RuntimeConfig(check_weights=None), "RuntimeConfig.check_weights: .* got None"),
    "invariant": (lambda: RuntimeConfig(batch_invariant=[]), r"RuntimeConfig.batch_invariant: .* got \[\]"),
    "backend": (lambda: RuntimeConfig(backend=3), "RuntimeConfig.backend: expected str, got 3"),
    "backend-class": (lambda: RuntimeConfig(backend=str), "RuntimeConfig.backend: .* got <class 'str'>"),
    "rows": (
        lambda: RuntimeConfig(max_num_reqs=65537, max_num_tokens=65536),
        "RuntimeConfig.max_num_reqs: expected an int from 1 to 65536, got 65537",
    ),
    "tokens": (
        lambda: RuntimeConfig(max_num_tokens=65537),
        "RuntimeConfig.max_num_tokens: expected an int from 1 to 65536, got 65537",
    ),
    "ring": (lambda: RuntimeConfig(ring_depth=10**9), "RuntimeConfig.ring_depth: .* 2 to 1024, got 1000000000"),
    "sizes-text": (lambda: RuntimeConfig(decode_sizes="12"), "RuntimeConfig.decode_sizes: .* got '12'"),
    "sizes-endless": (lambda: RuntimeConfig(mixed_sizes=itertools.count(1)), "RuntimeConfig.mixed_sizes: .* got count"),
    "sizes-bool": (lambda: RuntimeConfig(mixed_sizes=[True]), r"RuntimeConfig.mixed_sizes\[0\]: .* got True"),
    "sizes-zero": (lambda: RuntimeConfig(mixed_sizes=(0,)), r"RuntimeConfig.mixed_sizes\[0\]: .* 1 to 2048, got 0"),
    "sizes-huge": (lambda: RuntimeConfig(decode_sizes=(10**5000,)), r"decode_sizes\[0\]: .* got a value of type int"),
    "attention-dtype": (lambda: AttentionSpec(4, 2, 16, dtype=np.ones(2)), "AttentionSpec.dtype: expected one of"),
    "attention-dtype-text": (lambda: AttentionSpec(4, 2, 16, "float16"), "AttentionSpec.dtype: .* got 'float16'"),
    "sqrt": (lambda: AttentionSpec(4, 2, 16, alibi_sqrt=1), "AttentionSpec.alibi_sqrt: .* got 1"),
    "scale-underflows": (lambda: AttentionSpec(4, 2, 16, softmax_scale=1e-60), "softmax_scale: .* got 1e-60"),
    "softcap-overflows": (lambda: AttentionSpec(4, 2, 16, logits_softcap=1e39), "logits_softcap: .* got 1e"),
    "slopes-overflow": (lambda: AttentionSpec(1, 1, 16, alibi_slopes=(1e39,)), "alibi_slopes: expected finite floats"),
    "slopes-none": (lambda: AttentionSpec(1, 1, 16, alibi_slopes=(None,)), "alibi_slopes: expected finite floats"),
    "slopes-array": (
        lambda: AttentionSpec(1, 1, 16, alibi_slopes=np.ones(1)),
        "expected tuple, got array",
    ),
}


@pytest.mark.parametrize("case", TYPES)
def test_config_numbers_are_checked(case: str) -> None:
    build, text = TYPES[case]
    with pytest.raises(ConfigError, match=text):
        build()


def test_numpy_numbers_become_python_numbers() -> None:
    """Specs are hashed and traced, so their numbers are Python's."""
    sizes = np.array([4, 2, 16, 8, 1])
    spec = AttentionSpec(
        *sizes[:3], softmax_scale=np.float32(0.5), sliding_window=sizes[3], alibi_slopes=tuple(np.ones(4, np.float32))
    )
    cache = KVCacheSpec(sizes[4], *sizes[1:3], page_size=sizes[3], null_page=sizes[4])
    config = RuntimeConfig(max_num_reqs=sizes[0], max_seq_len=sizes[2], decode_sizes=tuple(sizes[:2])).resolve()
    assert spec == AttentionSpec(4, 2, 16, softmax_scale=0.5, sliding_window=8, alibi_slopes=(1.0,) * 4)
    assert cache == KVCacheSpec(1, 2, 16, page_size=8, null_page=1)
    assert config.decode_sizes == (2, 4)
    numbers = [spec.num_q_heads, spec.head_dim, spec.sliding_window, cache.num_layers, cache.page_size, cache.null_page]
    assert {type(n) for n in (*numbers, config.max_num_reqs, config.max_seq_len, *config.decode_sizes)} == {int}
    assert {type(x) for x in (spec.softmax_scale, *spec.alibi_slopes)} == {float}
    assert KVCache.allocate(cache, sizes[2], "cpu").num_pages == 16


def test_the_largest_config() -> None:
    config = RuntimeConfig(max_num_reqs=65536, max_num_tokens=65536, max_seq_len=1 << 30, ring_depth=1024)
    assert (config.max_num_reqs, config.max_num_tokens, config.max_seq_len) == (65536, 65536, 1 << 30)


def test_sizes_become_sorted_tuples() -> None:
    config = RuntimeConfig(max_num_reqs=8, decode_sizes=[4, 2, 4], mixed_sizes=np.array([32, 16], np.int16))
    assert (config.decode_sizes, config.mixed_sizes) == ((2, 4), (16, 32))
    assert hash(config) == hash(RuntimeConfig(max_num_reqs=8, decode_sizes=(2, 4), mixed_sizes=(16, 32)))
    assert RuntimeConfig(use_graphs=np.bool_(False)).use_graphs is False


def test_a_backend_that_cannot_serve_gives_all_reasons() -> None:
    spec = KVCacheSpec(LAYERS, KV_HEADS, 520, 4, dtype=torch.float32)
    attention = AttentionSpec(HEADS, KV_HEADS, 520, torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"triton: does not support this model.*head_dim.*; .*bfloat16.*float32"):
        manager(backend="triton", spec=attention, cache=KVCache.allocate(spec, 10, CPU))
