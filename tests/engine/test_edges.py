"""Boundary values of a step, one wrong argument at a time, and the contents of the caller's tensors."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from graphrt.batch import Batch, Request
from graphrt.cache.kv_cache import KVCache
from graphrt.cache.page_allocator import PageAllocator
from graphrt.capture.descriptor import GraphKind
from graphrt.config import RuntimeConfig
from graphrt.engine.handle import StepFaultError
from graphrt.kernels.errors import CapacityError, ConfigError, GraphRTError, ReplayError, ShapeError
from graphrt.kernels.metadata.step_inputs import inputs_size
from graphrt.kernels.types import FaultCode, KVLayout
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Step
from tests.support.capture_rig import PendingEvent
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, MAX_LEN, VOCAB, Rig, ToyModel, make_rig

CPU = torch.device("cpu")
SPEC = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)
ATTENTION = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32)


def one(token: int = 3, **changes) -> Batch:
    """A request of one token on page 5."""
    return Batch(
        **{"req_indices": [0], "seq_lens": [1], "tokens": [token], "page_indptr": [0, 1], "page_ids": [5]} | changes
    )


def greedy(rig: Rig, tokens: list[int]) -> int:
    return int(rig.model.oracle(tokens).argmax())


def manager(model=None, cache: KVCache | None = None, vocab_size: int = VOCAB, device=CPU, **options) -> ReplayManager:
    settings = {"max_num_reqs": 4, "max_num_tokens": 16, "max_seq_len": 16, "decode_sizes": (4,), "mixed_sizes": (16,)}
    settings |= {name: options.pop(name) for name in list(options) if name in RuntimeConfig.__dataclass_fields__}
    cache = cache or KVCache.allocate(SPEC, 20, device)
    model = model or ToyModel(device, torch.float32)
    config = RuntimeConfig(**settings)
    return ReplayManager(model, cache, ATTENTION, vocab_size=vocab_size, config=config, **options)


# -- how a batch is packed


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_omitted_fields_are_packed_as_their_documented_defaults(rows: int, groups: int, listed: bool) -> None:
    """Also into an entry that holds an older batch."""
    batch = {"req_indices": [4, 2, 7][:rows], "seq_lens": [9, 8, 7][:rows], "tokens": [3, 1, 2][:rows]}
    if listed:
        batch |= {"page_indptr": [*range(groups * rows + 1)], "page_ids": [*range(5, 5 + groups * rows)]}
    lists = groups * rows if listed else 0
    stated = {"query_lens": [1] * rows, "sample": [1] * rows, "first_pages": [0] * lists, "top_ps": [1.0] * rows}
    stated |= {"seeds": [0] * rows, "token_masks": [-1] * rows}
    packed, words = [], inputs_size(rows, rows, lists, groups)
    for names in ((), *((name,) for name in stated), tuple(stated)):
        record = np.full(words, 99, np.int32)
        made = Batch(**batch, **{name: stated[name] for name in names})
        assert made.write_inputs(record, 1, groups) == words
        assert made.is_uniform(1)
        assert made.is_uniform(2) == (rows == 0)
        packed.append(record.tolist())
    assert all(other == packed[0] for other in packed), "word by word"
    with pytest.raises(ValueError, match="read-only"):
        Batch(**batch).query_lens[:] = 2  # shared by all batches of so many rows


# -- which graph serves a batch


@pytest.mark.parametrize("counts", [(2, 4), (4, 2), (3, 2, 4), (1, 5), (3, 3, 1, 5)], ids=str)
def test_requests_whose_mean_is_query_len_are_a_mixed_step(device: torch.device, counts: tuple[int, ...]) -> None:
    rig, rng = make_rig(device, query_len=3), random.Random(0)
    sequences = [rig.start(i, [rng.randrange(VOCAB) for _ in range(n)]) for i, n in enumerate(counts)]
    batch = Batch.from_requests([rig.row(s) for s in sequences])
    assert not batch.is_uniform(3)
    handle = rig.manager.replay(batch)
    assert handle.descriptor.kind is GraphKind.MIXED
    for row, sequence in enumerate(sequences):
        assert (handle.logits()[row].double().cpu() - rig.model.oracle(sequence.tokens)).abs().max() < 2e-4
    assert handle.tokens().tolist() == [greedy(rig, s.tokens) for s in sequences]


def test_uniform_requests_of_another_length_are_a_mixed_step(device: torch.device) -> None:
    rig = make_rig(device, query_len=3)
    for n, kind in ((2, GraphKind.MIXED), (3, GraphKind.DECODE), (4, GraphKind.MIXED)):
        sequences = [rig.start(i, [7 + i, *range(n - 1)]) for i in range(2)]
        handle = rig.manager.replay(Batch.from_requests([rig.row(s) for s in sequences]))
        assert handle.descriptor.kind is kind
        assert handle.tokens().tolist() == [greedy(rig, s.tokens) for s in sequences]


def test_full_step_runs_and_one_more_raises(device: torch.device) -> None:
    """For requests, tokens and KV tokens."""
    rig = make_rig(device, max_num_reqs=4, max_num_tokens=9, max_seq_len=12, decode_sizes=(4,), mixed_sizes=(9,))
    sequences = [rig.start(i, [10 * i + j for j in range(n)]) for i, n in enumerate((1, 2, 3, 3))]
    assert rig.prefill(*sequences).tolist() == [greedy(rig, s.tokens[:-1]) for s in sequences]
    long = rig.start(0, list(range(12)))
    rig.row(long, 3)
    rig.manager.replay(Batch.from_requests([Request(0, [0, 1, 2], 3, long.pages, sample=False)])).tokens()
    rows = [rig.row(long, 9)]
    assert rig.manager.replay(Batch.from_requests(rows)).tokens().tolist() == [greedy(rig, long.tokens)]
    pages = [5, 6, 7, 8]
    for row, text in (
        (
            Request(0, list(range(10)), 10, pages),
            "expected at most 4 requests and 9 tokens, got 1 requests and 10 tokens",
        ),
        (Request(0, [1], 13, pages), "expected at most max_seq_len=12, got 13 for request 0"),
    ):
        with pytest.raises(CapacityError, match=text):
            rig.manager.replay(Batch.from_requests([row]))
    with pytest.raises(CapacityError, match="got 5 requests and 5 tokens"):
        rig.manager.replay(Batch.from_requests([Request(i, [1], 1, [9 + i]) for i in range(5)]))
    with pytest.raises(CapacityError, match="got 13 for request 2"):
        rig.manager.replay(Batch.from_requests([Request(i, [1], n, pages) for i, n in enumerate((1, 12, 13))]))


def test_most_pages_of_the_step_inputs(device: torch.device) -> None:
    rig = make_rig(device, num_pages=500)
    most = inputs_size(8, 32, 8 * MAX_LEN // 4, 1) - inputs_size(1, 1, 0, 1)
    batch = one(page_indptr=[0, most], page_ids=range(1, most + 1))
    assert rig.manager.replay(batch).tokens().tolist() == [greedy(rig, [3])]
    with pytest.raises(CapacityError, match=f"expected at most {most} pages listed in one step, got {most + 1}"):
        rig.manager.replay(one(page_indptr=[0, most + 1], page_ids=range(1, most + 2)))


# -- one wrong argument of a batch at a time

TWO = {"req_indices": [0, 1], "seq_lens": [1, 1], "tokens": [3, 4], "page_indptr": [0, 1, 2], "page_ids": [5, 6]}
MALFORMED = {
    "indptr-starts-late": ({"page_indptr": [1, 1, 2]}, "page_indptr"),
    "indptr-starts-negative": ({"page_indptr": [-1, 1, 2]}, "page_indptr"),
    "indptr-ends-early": ({"page_indptr": [0, 1, 1]}, "page_indptr"),
    "indptr-ends-late": ({"page_indptr": [0, 1, 3]}, "page_indptr"),
    "indptr-sinks": ({"page_indptr": [0, 3, 2]}, "page_indptr"),
    "indptr-short": ({"page_indptr": [0, 2]}, "page_indptr"),
    "indptr-long": ({"page_indptr": [0, 1, 2, 2]}, "page_indptr"),
    "a-token-too-many": ({"tokens": [3, 4, 5]}, "tokens"),
    "a-token-too-few": ({"tokens": [3]}, "tokens"),
    "no-new-token": ({"query_lens": [0, 2]}, "query_lens"),
    "negative-query": ({"query_lens": [3, -1]}, "query_lens"),
    "seq-lens-short": ({"seq_lens": [1]}, "seq_lens"),
    "query-lens-long": ({"query_lens": [1, 1, 1], "tokens": [3, 4, 5]}, "query_lens"),
    "sample-short": ({"sample": [1]}, "sample"),
    "temperatures-long": ({"temperatures": [0.0, 0.0, 0.0]}, "temperatures"),
    "seeds-short": ({"seeds": [1]}, "seeds"),
    "tokens-flat": ({"tokens": [[3, 4]]}, "tokens"),
    "row-ids-flat": ({"req_indices": [[0, 1]]}, "req_indices"),
    "pages-flat": ({"page_ids": [[5, 6]]}, "page_ids"),
    "float-tokens": ({"tokens": [3.0, 4.0]}, "tokens"),
    "text": ({"req_indices": ["0", "1"]}, "req_indices"),
    "complex-temperatures": ({"temperatures": [0j, 1j]}, "temperatures"),
    "too-large": ({"tokens": [3, 2**31]}, "tokens"),
    "too-small": ({"page_ids": [5, -(2**31) - 1]}, "page_ids"),
    "too-large-seed": ({"seeds": [0, 2**63]}, "seeds"),
}


@pytest.fixture(scope="module")
def shared() -> Rig:
    return make_rig(CPU)


@pytest.mark.parametrize("case", MALFORMED)
def test_wrong_batch_field_is_named(shared: Rig, case: str) -> None:
    changes, name = MALFORMED[case]
    with pytest.raises(ShapeError, match=rf"\b{name}: "):
        shared.manager.replay(Batch(**TWO | changes))
    assert shared.manager.replay(Batch(**TWO)).tokens().tolist() == [greedy(shared, [3]), greedy(shared, [4])]


def test_values_at_the_bounds_of_their_dtype() -> None:
    """As wider integers, which are converted, and as arrays of the dtype, which are used as they are."""
    low, high = -(2**31), 2**31 - 1
    assert Batch(**TWO | {"page_ids": [low, high]}).page_ids.tolist() == [low, high]
    for wrong in (low - 1, high + 1):
        with pytest.raises(ShapeError, match=r"\bpage_ids: "):
            Batch(**TWO | {"page_ids": [0, wrong]})


def test_from_requests_converts_each_field() -> None:
    rows = [
        Request(4, [9, 8, 7], 12, [31, 32, 33], sample=False, temperature=0.25, seed=2**31 + 1),
        Request(2, [6], 5, [41, 42], temperature=1.5, seed=11),
        Request(0, [1, 2], 2, [51], seed=2**32 - 1),
    ]
    batch = Batch.from_requests(rows)
    assert (batch.num_reqs, batch.num_tokens) == (3, 6)
    expected = {
        "req_indices": [4, 2, 0],
        "seq_lens": [12, 5, 2],
        "query_lens": [3, 1, 2],
        "tokens": [9, 8, 7, 6, 1, 2],
        "page_indptr": [0, 3, 5, 6],
        "page_ids": [31, 32, 33, 41, 42, 51],
        "sample": [0, 1, 1],
        "temperatures": [0.25, 1.5, 0.0],
        "seeds": [2**31 + 1, 11, 2**32 - 1],
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected


def test_temperatures_and_seeds_above_two_to_the_31(device: torch.device) -> None:
    rig = make_rig(device, decode_sizes=(4,))
    seeds, heat = [2**31 - 1, 2**31, 2**32 - 1], [0.5, 0.0, 1.25]
    rig.manager.replay(
        Batch(
            req_indices=[5, 3, 1], seq_lens=[1, 1, 1], tokens=[7, 8, 9], page_indptr=[0, 1, 2, 3], page_ids=[5, 6, 7],
            temperatures=heat, seeds=seeds,
        )
    ).tokens()  # fmt: skip
    assert rig.manager.buffers.seeds[:4].tolist() == [*seeds, 0]
    assert rig.manager.buffers.temperatures[:4].tolist() == [*heat, 0.0]
    assert rig.manager.buffers.req_indices[:4].tolist() == [5, 3, 1, -1]


# -- what the caller's K and V hold


def dense_kv(model: ToyModel, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V [tokens, KV_HEADS, HEAD_DIM] of every layer, dense and in float64."""
    up = lambda w: w.detach().double().cpu()  # noqa: E731
    x = up(model.embed)[torch.tensor(tokens)] + up(model.where)[: len(tokens)]
    mask, found = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril(), []
    for layer in range(LAYERS):
        qkv = (x @ up(model.qkv[layer]).t()).view(len(tokens), -1, HEAD_DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        found.append((k, v))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", p, v).flatten(1) @ up(model.out[layer]).t()
    return found


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
def test_runtime_reads_and_writes_the_callers_kv_tensors(device: torch.device, layout: KVLayout) -> None:
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, layout, torch.float32)
    page = (KV_HEADS, 4) if layout is KVLayout.HND else (4, KV_HEADS)
    mine = [torch.full((20, *page, HEAD_DIM), float("nan"), device=device) for _ in range(2 * LAYERS)]
    views = [t.transpose(1, 2) if layout is KVLayout.HND else t for t in mine]
    k, v = views[:LAYERS], views[LAYERS:]
    model, tokens = ToyModel(device, torch.float32), [3, 1, 4, 1, 5, 9, 2]
    runtime = manager(model, KVCache(spec, k, v), device=device)
    runtime.capture()
    pages = [11, 6]
    prompt = Request(0, tokens[:6], 6, pages, sample=False)
    runtime.replay(Batch.from_requests([prompt])).tokens()
    expected = dense_kv(model, tokens)
    for layer, pair in enumerate(expected):
        for have, want in zip((k[layer], v[layer]), pair, strict=True):
            stored = torch.cat([have[pages[0]], have[pages[1]][:2]]).double().cpu()
            assert (stored - want[:6]).abs().max() < 1e-5
            assert have[pages[1]][2:].isnan().all()
    other = [17, 2]
    for layer, pair in enumerate(expected):
        for have, want in zip((k[layer], v[layer]), pair, strict=True):
            have[other[0]] = want[:4].float().to(device)
            have[other[1], :2] = want[4:6].float().to(device)
    handle = runtime.replay(Batch.from_requests([Request(3, tokens[6:], 7, other)]))
    assert (handle.logits()[0].double().cpu() - model.oracle(tokens)).abs().max() < 2e-4


def test_cache_needs_two_pages() -> None:
    with pytest.raises(ConfigError, match="num_pages: expected an int from 2 to 2147483647, got 1"):
        KVCache.allocate(SPEC, 1, CPU)
    for pages in (1, 2):
        k, v = (list(torch.zeros(LAYERS, pages, 4, KV_HEADS, HEAD_DIM)) for _ in "kv")
        if pages == 1:
            with pytest.raises(
                ConfigError, match="num_pages: expected an int from 2 to 2147483647, got 1; one page is the null"
            ):
                KVCache(SPEC, k, v)
    runtime = manager(cache=KVCache(SPEC, k, v), max_seq_len=4)
    runtime.capture()
    batch = Batch(req_indices=[0], seq_lens=[4], query_lens=[4], tokens=[1, 2, 3, 4], page_indptr=[0, 1], page_ids=[1])
    assert runtime.replay(batch).tokens().tolist() == [int(ToyModel(CPU, torch.float32).oracle([1, 2, 3, 4]).argmax())]
    assert PageAllocator(2).allocate(1) == [1]
    assert PageAllocator(2, null_page=1).allocate(1) == [0]


# -- models and samplers that break their contract

SAMPLERS = {
    "one-more": (lambda logits, step: logits.argmax(-1).repeat(2), r"tokens: expected shape \[4\], got \[8\]"),
    "keepdim": (lambda logits, step: logits.argmax(-1, keepdim=True), r"tokens: expected shape \[4\], got \[4, 1\]"),
    "one-less": (lambda logits, step: logits.argmax(-1)[1:], r"tokens: expected shape \[4\], got \[3\]"),
    "scalar": (lambda logits, step: logits.argmax(), r"tokens: expected shape \[4\], got \[\]"),
    "float": (lambda logits, step: logits.argmax(-1).float(), "tokens: expected dtype int32 or int64, got float32"),
    "int16": (lambda logits, step: logits.argmax(-1).short(), "tokens: expected dtype int32 or int64, got int16"),
    "list": (lambda logits, step: [0] * 4, "tokens: expected a torch.Tensor, got list"),
    "none": (lambda logits, step: None, "tokens: expected a torch.Tensor, got NoneType"),
    "elsewhere": (lambda logits, step: logits.argmax(-1).to("meta"), "tokens: expected device cpu, got meta"),
}


@pytest.mark.parametrize("case", SAMPLERS)
def test_wrong_sampler_output_raises(case: str) -> None:
    sampler, text = SAMPLERS[case]
    with pytest.raises(ShapeError, match=text):
        manager(sampler=sampler).capture()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sampler_may_return_int32_or_int64(device: torch.device, dtype: torch.dtype) -> None:
    runtime = manager(sampler=lambda logits, step: logits.argmax(-1).to(dtype), device=device)
    runtime.capture()
    assert runtime.replay(one()).tokens().tolist() == [int(ToyModel(device, torch.float32).oracle([3]).argmax())]


LOGITS = {
    "one-more-row": (lambda x: torch.cat([x, x[:1]]), r"logits: expected shape \[4, 61\], got \[5, 61\]"),
    "one-column-less": (lambda x: x[:, 1:], "logits: expected vocab_size=61 per request, got 60; pass"),
    "flat": (lambda x: x.flatten(), "logits: expected shape"),
    "double": (lambda x: x.double(), "logits: expected dtype float16 or bfloat16 or float32, got float64"),
    "elsewhere": (lambda x: x.to("meta"), "logits: expected device cpu, got meta"),
}


@pytest.mark.parametrize("case", LOGITS)
def test_wrong_logits_raise(case: str) -> None:
    change, text = LOGITS[case]
    model = ToyModel(CPU, torch.float32)
    with pytest.raises(ShapeError, match=text):
        manager(lambda step: change(model(step)), mixed_sizes=()).capture()


def test_vocabulary_of_one_runs_and_of_zero_raises(device: torch.device) -> None:
    for size in (0, -1, 1.0, True, None):
        with pytest.raises(ConfigError, match="vocab_size: expected an int from 1 to 1048576, got"):
            manager(vocab_size=size)
    runtime = manager(lambda step: torch.ones_like(step.logits_indices).float()[:, None], vocab_size=1, device=device)
    runtime.capture()
    assert runtime.replay(one(0)).tokens().tolist() == [0]
    with pytest.raises(StepFaultError, match="TOKEN_OUT_OF_RANGE: token 1"):
        runtime.replay(one(1)).tokens()


def attend(**changes):
    """A model that calls `attend` of layer `at` with one changed argument."""

    def model(step: Step) -> torch.Tensor:
        tokens = step.descriptor.padded_tokens
        q, k = torch.zeros(tokens, HEADS, HEAD_DIM), torch.zeros(tokens, KV_HEADS, HEAD_DIM)
        given = {"layer": 0, "q": q, "k": k, "v": k.clone()}
        step.attend(**given | {name: change(given.get(name, q)) for name, change in changes.items()})
        return torch.zeros(step.descriptor.padded_reqs, VOCAB)

    return model


ATTEND = {
    "layer-below": ({"layer": lambda x: -1}, "layer: expected an int from 0 to 1, got -1"),
    "layer-above": ({"layer": lambda x: 2}, "layer: expected an int from 0 to 1, got 2"),
    "q-tokens": ({"q": lambda x: x[1:]}, r"q: expected shape \[4, 4, 16\], got \[3, 4, 16\]"),
    "q-heads": ({"q": lambda x: x[:, 1:]}, r"q: expected shape \[4, 4, 16\], got \[4, 3, 16\]"),
    "q-size": ({"q": lambda x: x[..., 1:]}, "q: expected shape"),
    "q-dtype": ({"q": lambda x: x.half()}, "q: expected dtype float32, got float16"),
    "q-device": ({"q": lambda x: x.to("meta")}, "q: expected device cpu, got meta"),
    "k-heads": ({"k": lambda x: x[:, :1]}, "k: expected shape"),
    "rotary": ({"rotary": lambda x: x}, "rotary: expected Rotary, got tensor"),
    "k-tokens": ({"k": lambda x: x[1:]}, "k: expected shape"),
    "k-size": ({"k": lambda x: x[..., 1:]}, "k: expected shape"),
    "v-tokens": ({"v": lambda x: x[1:]}, "v: expected shape"),
    "v-heads": ({"v": lambda x: x[:, :1]}, "v: expected shape"),
    "v-size": ({"v": lambda x: x[..., 1:]}, "v: expected shape"),
    "k-dtype": ({"k": lambda x: x.half()}, "k: expected dtype float32, got float16"),
    "v-dtype": ({"v": lambda x: x.half()}, "v: expected dtype float32, got float16"),
    "k-device": ({"k": lambda x: x.to("meta")}, "k: expected device cpu, got meta"),
    "v-device": ({"v": lambda x: x.to("meta")}, "v: expected device cpu, got meta"),
    "sinks": ({"sinks": lambda x: torch.zeros(HEADS)}, "sinks: expected None for layer 0"),
    "lse-shape": ({"lse": lambda x: torch.zeros(4, HEADS + 1)}, r"lse: expected shape \[4, 4\], got \[4, 5\]"),
    "lse-dtype": ({"lse": lambda x: torch.zeros(4, HEADS).half()}, "lse: expected dtype float32"),
    "lse-device": ({"lse": lambda x: torch.zeros(4, HEADS, device="meta")}, "lse: expected device cpu"),
    "lse-stride": ({"lse": lambda x: torch.zeros(HEADS, 4).t()}, "lse: expected stride 1"),
    "lse-shared": ({"lse": lambda x: torch.zeros(1, HEADS).expand(4, -1)}, "lse: elements share memory"),
}


@pytest.mark.parametrize("case", ATTEND)
def test_wrong_attend_argument_is_named(case: str) -> None:
    changes, text = ATTEND[case]
    manager(attend(), mixed_sizes=()).capture()
    with pytest.raises(ShapeError, match=text):
        manager(attend(**changes), mixed_sizes=()).capture()


# -- handles, counters, closing


def test_logits_after_close_raise_and_copies_remain(device: torch.device) -> None:
    rig = make_rig(device)
    handle = rig.manager.replay(one())
    kept = handle.logits(copy=True)
    rig.manager.close()
    for copy in (False, True):
        with pytest.raises(GraphRTError, match=r"logits: .*closed"):
            handle.logits(copy=copy)
    assert (kept[0].double().cpu() - rig.model.oracle([3])).abs().max() < 2e-4
    assert handle.tokens().tolist() == [greedy(rig, [3])]
    assert handle.done()
    assert handle.error is None


def test_cpu_never_waits_for_the_ring() -> None:
    rig = make_rig(CPU, ring_depth=2)
    for token in range(7):
        assert rig.manager.replay(one(token)).done()
    assert rig.manager.stats().ring_waits == 0


def test_ring_waits_are_counted() -> None:
    rig = make_rig(CPU, ring_depth=2)
    for slot in rig.manager.queue._ring._slots:
        slot._event = PendingEvent()
    handles = [rig.manager.replay(one(token)) for token in range(5)]
    assert rig.manager.stats().ring_waits == 3
    assert not handles[-1].done()
    assert [int(h.tokens()[0]) for h in handles] == [greedy(rig, [token]) for token in range(5)]


def test_handle_of_an_unreported_step_raises(device: torch.device) -> None:
    rig = make_rig(device)
    for wrong in (-1, 1, 4):
        handle = rig.manager.replay(one())
        if device.type == "cuda":
            torch.cuda.synchronize()
        rig.manager.buffers.step_ring[handle.step % 4] = handle.step + wrong
        with pytest.raises(ReplayError, match=f"step {handle.step}: .* holds step {handle.step + wrong}\\);"):
            handle.tokens()
        assert type(handle.error) is ReplayError
        with pytest.raises(ReplayError, match=f"step {handle.step}: .* holds step {handle.step + wrong}\\);"):
            handle.faults  # noqa: B018
    assert rig.manager.replay(one()).tokens().tolist() == [greedy(rig, [3])]


def test_faults_can_be_read_without_raising(device: torch.device) -> None:
    rig = make_rig(device)
    for token, code in ((VOCAB - 1, None), (VOCAB, FaultCode.TOKEN_OUT_OF_RANGE)):
        handle = rig.manager.replay(one(token))
        fault = handle.error
        assert (fault is None) == (code is None)
        assert handle.faults == (() if fault is None else fault.faults)
        if code is not None:
            assert (fault.step, fault.index, fault.code, fault.value) == (handle.step, 0, code, VOCAB)
            assert handle.tokens(raise_on_fault=False).tolist() == [-1]


def test_stats_of_padding_and_memory(device: torch.device) -> None:
    rig = make_rig(device, decode_sizes=(4,), mixed_sizes=())
    stats = rig.manager.stats()
    assert stats.pad_waste == 0.0
    assert stats.graph_bytes == sum(g.pool_bytes + g.driver_bytes for g in stats.graphs)
    if device.type == "cpu":
        assert stats.graph_bytes > 0
    rig.manager.replay(one())
    assert rig.manager.stats().pad_waste == 0.75
    assert 0 < stats.capture_seconds < 600
    decode, *_ = stats.backend.split("+")  # where mixed steps have two parts, the other one's name follows
    assert decode == rig.manager.stats().backend_reason.split(":")[0]


def test_close_drops_every_buffer_and_graph(device: torch.device) -> None:
    import gc
    import weakref

    rig = make_rig(device)
    rig.manager.replay(one()).tokens()
    watched = [weakref.ref(rig.manager.buffers.inputs), weakref.ref(rig.manager.buffers.block_table)]
    rig.manager.close()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert rig.manager.state.value == "closed"
