"""Every public constructor and call with wrong types and values: typed errors only, and right tokens afterwards.

A target is a call with good arguments. Each of them is replaced by each value of JUNK. The call may succeed (some of
these values are fine for some arguments) or raise a GraphRTError; everything else is a bug. Afterwards the runtime must
give the tokens that a dense float64 oracle gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import (
    AttentionSpec,
    Batch,
    CapacityError,
    GraphRTError,
    KVCache,
    KVCacheSpec,
    PageAllocator,
    ReplayManager,
    Request,
    Runtime,
    RuntimeConfig,
    SamplingParams,
    StepHandle,
    SwapSpace,
    TextGenerator,
    kv_groups,
    register_backend,
)
from graphrt.kernels.checks import shown
from graphrt.runtime import resolve_device
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, LivelyModel, greedy, make_runtime

CPU = torch.device("cpu")
BUSY_ROW, BUSY_PAGES = 3, (60, 61)  # of the sequence that decodes beside every example
JUNK: list[Any] = [
    None, True, 0, 1, 7, -1, 61, 65, -(2**31), 2**31, 2**32 + 5, -(2**70), 10**5000, 0.0, 0.5, 1.5, -1.0, 1e39, 1e-60,
    float("nan"), float("inf"), 1j, np.int8(-1), np.uint64(2**64 - 1), np.float32("nan"), "", "12", "auto", "last",
    "cuda:99", b"12", object(), int, len, slice(1), range(3), frozenset({1}), itertools.count(), torch.float16,
    [], {}, [[]], [1], [1, 2], [0, 1, 2], [-1, -1], [2**31, 1], [10**5000, 1], [1, [2]], [[1], [2, 3]], [1, None],
    ["a", "b"], [True, False], [0.5, 1e39], [float("nan"), 0.0], {"a": 1}, np.array(1), np.array([1, 2]),
    np.array([[1, 2]]), np.zeros((2, 0)), np.array([1.5, 2.5]), np.array([True, False]), np.array(["a", "b"]),
    np.array([None, 1]), np.array([2**63, 1], np.uint64), np.array([1, 2], ">i4"), torch.tensor([1, 2]),
    torch.tensor([[1, 2]]), torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0]).bfloat16(),
    torch.ones(2, device="meta"), torch.tensor([1, 2]).to_sparse(), [torch.tensor(1), torch.tensor(2)],
]  # fmt: skip
CALLBACKS = ("allocate_kv", "model", "progress", "sampler")  # what these raise is the caller's own: it goes through


@dataclass(frozen=True)
class World:
    """The objects that targets use: a captured runtime, and one of its sequences that keeps decoding."""

    runtime: Runtime
    model: LivelyModel
    answer: list[int]

    @property
    def manager(self) -> ReplayManager:
        return self.runtime.manager

    def assert_right(self) -> None:
        """Run a prompt and two decode steps with tokens from the device, and compare with the oracle."""
        prompt = [50, 2, 33]
        assert self.runtime.state.value == "captured"
        first = Batch(
            req_indices=[BUSY_ROW], seq_lens=[3], query_lens=[3], tokens=prompt, page_indptr=[0, 2], page_ids=BUSY_PAGES
        )
        tokens = self.runtime.replay(first).tokens().tolist()
        for length in (4, 5):
            again = Batch(req_indices=[BUSY_ROW], seq_lens=[length], page_indptr=[0, 2], page_ids=BUSY_PAGES)
            tokens += self.runtime.replay(again).tokens().tolist()
        assert tokens == self.answer
        assert sorted(self.runtime.free_req_indices) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def world() -> World:
    model = LivelyModel(CPU)
    runtime = make_runtime(CPU, model=model, config={"decode_sizes": (1, 4), "mixed_sizes": (16,)})
    runtime.capture()
    return World(runtime, model, greedy(model, [50, 2, 33], 3))


def consume(handle: StepHandle) -> None:
    """Read all results of a handle."""
    handle.done()
    handle.wait()
    assert len(handle.tokens(raise_on_fault=False)) == handle.num_reqs
    assert handle.logits().shape == (handle.num_reqs, VOCAB)
    assert handle.error is None or isinstance(handle.error, GraphRTError)
    assert all(0 <= fault.index < handle.num_reqs for fault in handle.faults)
    handle.tokens()


def run_batch(world: World, batch: Batch) -> None:
    consume(world.runtime.replay(batch))


def run_rows(world: World, **row: Any) -> None:
    other = Request(req_index=1, tokens=[4], seq_len=1, pages=[2])
    run_batch(world, Batch.from_requests([Request(**row), other]))


def generate(world: World, prompts: Any, params: Any) -> None:
    events = list(itertools.islice(TextGenerator(world.runtime).generate(prompts, params), 400))
    ends = [event.prompt for event in events if event.finished]
    assert sorted(ends) == list(range(len(prompts)))


def generate_one(world: World, prompt: Any) -> None:
    generate(world, [[5], prompt], SamplingParams(3))


def build_runtime(world: World, **arguments: Any) -> None:
    with Runtime(**arguments) as runtime:
        runtime.kv_cache.nbytes  # noqa: B018


def build_manager(world: World, **arguments: Any) -> None:
    ReplayManager(**arguments).close()


def capture_with(world: World, progress: Any) -> None:
    with make_runtime(CPU, model=world.model, config=TINY, num_pages=4) as runtime:
        attempt(lambda: runtime.capture(progress))
        if runtime.state.value == "new":
            runtime.capture()
        assert runtime.state.value == "captured"


BATCH = {
    "req_indices": [0, 1], "seq_lens": [1, 1], "query_lens": [1, 1], "tokens": [3, 4], "page_indptr": [0, 1, 2],
    "page_ids": [1, 2], "first_pages": [0, 0], "sample": [1, 1], "temperatures": [0.0, 0.0], "seeds": [0, 0],
}  # fmt: skip
TINY = {"max_num_reqs": 2, "max_num_tokens": 8, "max_seq_len": 16, "decode_sizes": (1,), "mixed_sizes": ()}
SPEC = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)
OTHER_POOL = KVCacheSpec(2, 1, 8, 2, layers=(0, 2), pool=1)
SMALL = KVCache.allocate(SPEC, 9, CPU)
SPACE = {"kv_cache": SMALL, "allocators": [PageAllocator(9)]}
ATTENTION = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32)
FIELDS = lambda cls: {f.name: f.default for f in dataclasses.fields(cls) if f.init}  # noqa: E731
BUILD = {
    "model": LivelyModel(CPU), "attention": ATTENTION, "vocab_size": VOCAB, "config": RuntimeConfig(**TINY),
    "sampler": None, "stream": None, "weights": None,
}  # fmt: skip

TARGETS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Batch": (lambda w, **a: run_batch(w, Batch(**a)), BATCH),
    "Request": (
        run_rows,
        FIELDS(Request) | {"req_index": 0, "tokens": [3], "seq_len": 1, "pages": [1]},
    ),
    "Row-of-groups": (
        lambda w, pages, first_page: Batch.from_requests(
            [Request(0, [3], 1, pages, first_page=first_page), Request(1, [4], 1, [[2], [3]])]
        ),
        {"pages": [[1], [4]], "first_page": [0, 0]},
    ),
    "Batch.from_requests": (
        lambda w, rows: run_batch(w, Batch.from_requests(rows)),
        {"rows": [Request(0, [3], 1, [1])]},
    ),
    "replay": (
        lambda w, **a: consume(w.runtime.replay(**a)),
        {"batch": Batch(**BATCH), "eager": False, "descriptor": None},
    ),
    "compare": (lambda w, **a: str(w.runtime.compare(**a)), {"batch": Batch(**BATCH), "descriptor": None}),
    "SamplingParams": (lambda w, **a: hash(SamplingParams(**a)), FIELDS(SamplingParams)),
    "RuntimeConfig": (lambda w, **a: hash(RuntimeConfig(**a).resolve()), FIELDS(RuntimeConfig)),
    "KVCacheSpec": (
        lambda w, **a: hash(KVCacheSpec(**a)),
        FIELDS(KVCacheSpec) | {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16},
    ),
    "AttentionSpec": (
        lambda w, **a: hash(AttentionSpec(**a)),
        FIELDS(AttentionSpec) | {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "alibi_slopes": (1.0,) * 4},
    ),
    "pages_for": (lambda w, num_tokens: SPEC.pages_for(num_tokens), {"num_tokens": 3}),
    "KVCache": (
        lambda w, **a: KVCache(**a).nbytes,
        {"groups": SPEC, "k": SMALL.k, "v": SMALL.v, "k_scales": None, "v_scales": None},
    ),
    "KVCache.allocate": (lambda w, **a: KVCache.allocate(**a), {"groups": SPEC, "num_pages": 3, "device": "cpu"}),
    "KVCache.allocate-groups": (
        lambda w, first, second, pages: KVCache.allocate([first, second], [pages, 4], "cpu"),
        {"first": dataclasses.replace(SPEC, layers=(1, 3)), "second": OTHER_POOL, "pages": 3},
    ),
    "KVCacheSpec-of-layers": (
        lambda w, **a: KVCache.allocate([dataclasses.replace(SPEC, layers=(1, 3)), KVCacheSpec(**a)], 3, "cpu"),
        {"layers": (0, 2), "pool": 1, "v_head_dim": None, "sliding_window": 5, "attention_chunk_size": None}
        | {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "page_size": 2, "null_page": 0},
    ),
    "kv_groups": (
        lambda w, **a: KVCache.allocate(kv_groups(**a), 3, "cpu"),
        {"attention": [ATTENTION, dataclasses.replace(ATTENTION, sliding_window=6)], "page_size": 4}
        | {"layout": SPEC.layout, "dtype": torch.float16, "null_page": 0},
    ),
    "PageAllocator": (lambda w, **a: PageAllocator(**a), {"num_pages": 9, "null_page": 0}),
    "generate": (generate, {"prompts": [[5, 6], [7]], "params": SamplingParams(3)}),
    "generate-one": (generate_one, {"prompt": [5, 6]}),
    "generate-params": (lambda w, params: generate(w, [[5]], [params]), {"params": SamplingParams(3)}),
    "TextGenerator": (lambda w, runtime: TextGenerator(runtime), {"runtime": None}),
    "TextGenerator-swap": (lambda w, swap_bytes: TextGenerator(w.runtime, swap_bytes=swap_bytes), {"swap_bytes": 9}),
    "SwapSpace": (lambda w, **a: SwapSpace(**a).close(), SPACE | {"nbytes": 9, "stream": None}),
    "Runtime": (
        build_runtime,
        BUILD
        | {"kv_spec": SPEC, "device": "cpu", "num_pages": 3, "memory_utilization": 0.9}
        | {"allocate_kv": KVCache.allocate},
    ),
    "ReplayManager": (build_manager, BUILD | {"kv_cache": SMALL}),
    "capture": (capture_with, {"progress": None}),
    "check_weights": (lambda w, model: w.manager.check_weights(model), {"model": BUILD["model"]}),
    "resolve_device": (lambda w, device: resolve_device(device), {"device": None}),
    "register_backend": (lambda w, cls: register_backend(cls), {"cls": None}),
}


def attempt(call: Callable[[], Any]) -> None:
    """Run the call; it may raise a GraphRTError and nothing else."""
    with contextlib.suppress(GraphRTError):
        call()


@pytest.mark.parametrize("target", TARGETS)
def test_each_argument_with_each_value(world: World, target: str) -> None:
    call, good = TARGETS[target]
    for name, value in itertools.product(good, JUNK):
        if name in CALLBACKS and callable(value):
            continue
        try:
            attempt(lambda name=name, value=value: call(world, **(good | {name: value})))
        except Exception as error:
            raise AssertionError(f"{target}: {name}={shown(value)} of {type(value).__name__}: {error!r}") from error
    world.assert_right()


def test_buffers_that_exceed_all_memory_raise(world: World) -> None:
    """Each number is in bounds, but together they need 281 TB for the block table."""
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 1, dtype=torch.float32)
    config = RuntimeConfig(max_num_reqs=65536, max_num_tokens=65536, max_seq_len=1 << 30)
    with pytest.raises(CapacityError, match=r"shape \[.*\] does not fit into (host memory|the memory of cpu);"):
        build_runtime(world, **BUILD | {"kv_spec": spec, "config": config, "device": "cpu", "num_pages": 2})
    world.assert_right()
