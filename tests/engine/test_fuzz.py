"""Every public constructor and call with wrong types and values: typed errors only, and right tokens afterwards.

A target is a call with good arguments. Each example replaces one or two of them by values that do not belong there. The
call may succeed (some of these values are fine for some arguments) or raise a GraphRTError; everything else is a bug.
After each example the runtime must give the tokens that a dense float64 oracle gives.
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
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

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


class Hostile:
    """Equal to nothing; `str()` and `bool()` raise."""

    __hash__ = None

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __bool__(self) -> bool:
        raise ValueError("no truth value")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no equality")


SCALARS = [
    None, True, False, np.bool_(True), 0, 1, 2, 3, 7, -1, -2, 61, 62, 65, -(2**31), 2**31, 2**32 + 5, 2**63,
    2**64, -(2**70), 10**30, 10**5000, 0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e39, 1e-60, 1e300, float("nan"),
    float("inf"), float("-inf"), 1j, np.int8(-1), np.uint64(2**64 - 1), np.float32("nan"), np.float64(1e300),
    "", "a", "12", "auto", "last", "cpu", "cuda:99", "ünïcode", "\ud800", b"", b"12", object(), Hostile(),
    Hostile, int, len, Ellipsis, NotImplemented, slice(1), range(3), frozenset({1}), itertools.count(),
    torch.float16, torch.int8, torch.device("meta"), torch.strided,
]  # fmt: skip

ARRAYS = [
    [], (), {}, set(), [[]], [1], [1, 2], [0, 1], [0, 1, 2], [-1], [-1, -1], [61, 61], [2**31, 1], [2**31 - 1,
    1], [2**64, 1], [10**5000, 1], [1, [2]], [[1], [2, 3]], [[1, 2]], [1, None], [1, "a"], ["a", "b"], [True,
    False], [1.0, 2.0], [0.5, 1e39], [float("nan"), 0.0], [float("inf"), -1.0], [Hostile(), 1], {"a": 1}, {1,
    2}, [object()] * 2, bytearray(b"12"), memoryview(b"12"), np.array(1), np.array([1, 2]), np.array([[1, 2]]),
    np.zeros((2, 0)), np.zeros((1, 1, 1, 1)), np.array([1.5, 2.5]), np.array([np.nan, 1], np.float32),
    np.array([True, False]), np.array(["a", "b"]), np.array([None, 1]), np.array([1j, 2]), np.array([2**63, 1],
    np.uint64), np.array([1, 2], ">i4"), np.array([1, 2], "datetime64[s]"), np.array([(1, 2)], "i4,i4"),
    np.ma.array([1, 2], mask=[0, 1]), np.broadcast_to(np.int32(1), 2), torch.tensor(1), torch.tensor([1, 2]),
    torch.tensor([[1, 2]]), torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0]).bfloat16(),
    torch.tensor([1.0]).to(torch.float8_e5m2), torch.tensor([True, False]), torch.ones(2, device="meta"),
    torch.ones(2, dtype=torch.int64, device="meta"), torch.tensor([1, 2]).to_sparse(), torch.tensor([1j,
    2]).conj(),
    torch.nn.Parameter(torch.ones(2)), [torch.tensor(1), torch.tensor(2)], [np.int8(1), np.uint64(2)],
]  # fmt: skip

JUNK = [*SCALARS, *ARRAYS]
CALLBACKS = ("allocate_kv", "model", "progress", "sampler")  # what these raise is the caller's own: it goes through
INDEX = st.integers(0, len(JUNK) - 1)
BOUNDED = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class World:
    """The objects that targets use: a captured runtime, and one of its sequences that keeps decoding."""

    runtime: Runtime
    model: LivelyModel
    allocator: PageAllocator
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
    return World(runtime, model, PageAllocator(9), greedy(model, [50, 2, 33], 3))


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


def replaced(world: World, **changes: Any) -> None:
    """Go around the constructor by `dataclasses.replace`."""
    batch = Batch(**BATCH)
    run_batch(world, dataclasses.replace(batch, **changes))


def handle_calls(world: World, raise_on_fault: Any, copy: Any) -> None:
    handle = world.runtime.replay(Batch(**BATCH))
    assert handle.logits(copy=copy).shape == (2, VOCAB)
    handle.tokens(raise_on_fault=raise_on_fault)


def faulty_handle(world: World, raise_on_fault: Any) -> None:
    handle = world.runtime.replay(Batch(**BATCH | {"tokens": [VOCAB, 4]}))
    handle.tokens(raise_on_fault=raise_on_fault)


def allocator_calls(world: World, count: Any, pages: Any, page: Any) -> None:
    allocator, held = world.allocator, world.allocator.allocate(2)
    for call in (allocator.share, allocator.free):
        attempt(lambda call=call: call(pages))
    attempt(lambda: allocator.owners(page))
    attempt(lambda: allocator.free(allocator.allocate(count)))
    free = [p for p in range(1, 9) if not allocator.owners(p)]
    assert allocator.num_free == len(free)
    for page_id in range(1, 9):
        while allocator.owners(page_id):
            allocator.free([page_id])
    assert held
    assert allocator.num_free == 8


def swaps(world: World, out: Any, back: Any, swapped: Any) -> None:
    """Pages 1 to 4 of a separate cache are allocated."""
    cache, allocator = KVCache.allocate(SPEC, 7, "cpu"), PageAllocator(7)
    allocator.allocate(4)
    with SwapSpace(cache, [allocator], 10**6) as space:
        attempt(lambda: space.swap_in(space.swap_out(out), back))
        attempt(lambda: space.swap_in(swapped, back))
        attempt(lambda: space.drop(swapped))
        attempt(lambda: space.reclaim(swapped, 3))


def page_copies(world: World, src_pages: Any, dst_pages: Any, group: Any) -> None:
    """Copies between pages that no sequence uses."""
    attempt(lambda: KVCache.copy_pages(SMALL, src_pages, dst_pages, group=group))
    attempt(lambda: SMALL.packer(group))
    attempt(lambda: SMALL.of_group(group))


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
    "Batch-defaults": (
        lambda w, **a: run_batch(w, Batch(**a)),
        {name: BATCH[name] for name in ("req_indices", "seq_lens", "query_lens", "page_indptr", "page_ids")},
    ),
    "dataclasses.replace": (replaced, BATCH),
    "Request": (
        run_rows,
        {
            "req_index": 0,
            "tokens": [3],
            "seq_len": 1,
            "pages": [1],
            "sample": True,
            "temperature": 0.0,
            "seed": 0,
            "first_page": 0,
        },
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
    "ReplayManager.replay": (
        lambda w, **a: consume(w.manager.replay(**a)),
        {"batch": Batch(**BATCH), "eager": False, "descriptor": None},
    ),
    "compare": (lambda w, **a: str(w.runtime.compare(**a)), {"batch": Batch(**BATCH), "descriptor": None}),
    "handle": (handle_calls, {"raise_on_fault": True, "copy": False}),
    "handle-of-a-fault": (faulty_handle, {"raise_on_fault": True}),
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
        {
            "attention": [ATTENTION, dataclasses.replace(ATTENTION, sliding_window=6)],
            "page_size": 4,
            "layout": SPEC.layout,
            "dtype": torch.float16,
            "null_page": 0,
        },
    ),
    "kv_groups-layer": (
        lambda w, layer: KVCache.allocate(kv_groups([ATTENTION, layer]), 3, "cpu"),
        {"layer": dataclasses.replace(ATTENTION, kv_shared_with=0)},
    ),
    "pages": (page_copies, {"src_pages": [1, 2], "dst_pages": [3, 4], "group": 0}),
    "PageAllocator": (lambda w, **a: PageAllocator(**a), {"num_pages": 9, "null_page": 0}),
    "allocator": (allocator_calls, {"count": 3, "pages": [1, 2], "page": 1}),
    "generate": (generate, {"prompts": [[5, 6], [7]], "params": SamplingParams(3)}),
    "generate-one": (generate_one, {"prompt": [5, 6]}),
    "generate-params": (lambda w, params: generate(w, [[5]], [params]), {"params": SamplingParams(3)}),
    "TextGenerator": (lambda w, runtime: TextGenerator(runtime), {"runtime": None}),
    "TextGenerator-swap": (lambda w, swap_bytes: TextGenerator(w.runtime, swap_bytes=swap_bytes), {"swap_bytes": 9}),
    "SwapSpace": (lambda w, **a: SwapSpace(**a).close(), SPACE | {"nbytes": 9, "stream": None}),
    "swap": (swaps, {"out": [[1, 2]], "back": [[3, 4]], "swapped": None}),
    "Runtime": (
        build_runtime,
        BUILD
        | {
            "kv_spec": SPEC,
            "device": "cpu",
            "num_pages": 3,
            "memory_utilization": 0.9,
            "allocate_kv": KVCache.allocate,
        },
    ),
    "Runtime-groups": (
        lambda w, group, pages: build_runtime(
            w, **(BUILD | {"kv_spec": [group], "num_pages": [pages], "device": "cpu"})
        ),
        {"group": SPEC, "pages": 3},
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


@pytest.mark.parametrize("target", TARGETS)
@BOUNDED
@given(data=st.data())
def test_wrong_arguments_raise_typed_errors_and_the_next_step_is_right(world: World, target: str, data) -> None:
    call, good = TARGETS[target]
    wrong = data.draw(st.lists(st.sampled_from(sorted(good)), min_size=1, max_size=2, unique=True))
    changes = {name: JUNK[data.draw(INDEX)] for name in wrong}
    changes = {name: None if name in CALLBACKS and callable(value) else value for name, value in changes.items()}
    note(f"wrong arguments: {[(name, type(value), shown(value)) for name, value in changes.items()]}")
    attempt(lambda: call(world, **(good | changes)))
    world.assert_right()


@BOUNDED
@given(prompt=st.lists(INDEX.map(lambda i: JUNK[i]) | st.integers(-3, VOCAB + 3), max_size=5))
def test_lists_of_anything_as_prompts(world: World, prompt: list) -> None:
    attempt(lambda: generate_one(world, prompt))
    world.assert_right()


def test_buffers_that_exceed_all_memory_raise(world: World) -> None:
    """Each number is in bounds, but together they need 281 TB for the block table."""
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 1, dtype=torch.float32)
    config = RuntimeConfig(max_num_reqs=65536, max_num_tokens=65536, max_seq_len=1 << 30)
    with pytest.raises(CapacityError, match=r"shape \[.*\] does not fit into (host memory|the memory of cpu);"):
        build_runtime(world, **BUILD | {"kv_spec": spec, "config": config, "device": "cpu", "num_pages": 2})
    world.assert_right()
