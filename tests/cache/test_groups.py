"""KV groups: layers that differ, compared with a dense oracle, with page ownership checked in every step."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from graphrt.batch import Batch, Request
from graphrt.cache.groups import kv_groups
from graphrt.cache.kv_cache import KVCache
from graphrt.engine.handle import StepFaultError
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.kernels.types import FaultCode, KVLayout
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.layered import Watch, build, exact_ownership, generate, locations, prompts_of

F32, F16, CPU = torch.float32, torch.float16, torch.device("cpu")
FULL = AttentionSpec(4, 2, 16, F32)
WINDOW = replace(FULL, sliding_window=6)
NARROW = replace(FULL, sliding_window=3)
SMALL = AttentionSpec(4, 1, 16, F32)  # half the bytes per token
CHUNKED = replace(FULL, attention_chunk_size=7)
VALUES = AttentionSpec(4, 2, 24, F32, v_head_dim=16)
SHARES_0 = replace(FULL, kv_shared_with=0)

MODELS: dict[str, tuple[AttentionSpec, ...]] = {
    "windows_beside_full": (WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL),
    "one_window_for_all": (WINDOW, WINDOW),
    "two_windows": (WINDOW, FULL, NARROW),
    "shared": (FULL, WINDOW, SHARES_0, replace(WINDOW, kv_shared_with=1)),
    "two_geometries": (SMALL, replace(FULL, sliding_window=8), SMALL),
    "two_pools": (FULL, AttentionSpec(3, 3, 16, F32), WINDOW),
    "padded": (WINDOW, WINDOW, WINDOW, FULL, FULL),
    "chunks_beside_full": (CHUNKED, CHUNKED, CHUNKED, FULL),
    "chunks_beside_windows": (CHUNKED, WINDOW),
    "value_heads": (VALUES, replace(VALUES, sliding_window=7), replace(VALUES, kv_shared_with=0)),
    "any_head_sizes": (
        AttentionSpec(3, 1, 20, F32, v_head_dim=7),
        AttentionSpec(2, 2, 40, F32, attention_chunk_size=5),
    ),
}


INTERPRETED = ("shared", "two_geometries", "any_head_sizes")  # seconds each; with windows, chunks and sharing


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch_reference") for name in MODELS), *((name, "triton") for name in INTERPRETED)],
)
def test_tokens_equal_the_oracle_and_pages_have_one_owner(name: str, backend: str) -> None:
    specs = MODELS[name]
    few = backend == "triton"
    model, runtime = build(specs, kv_groups(specs, page_size=4), 120, CPU, backend=backend)
    watch = Watch(runtime)
    lengths, counts = ((2, 13), (3, 5)) if few else ((1, 9, 23, 30, 5), (30, 21, 40, 1, 12))
    prompts = prompts_of(lengths)
    answers = generate(runtime, prompts, counts)
    assert answers == [model.greedy(p, n) for p, n in zip(prompts, counts, strict=True)]
    assert watch.steps >= 5
    assert all(a.num_free == a.num_pages - 1 for a in runtime.allocators), "all pages were given back"
    runtime.close()


def test_windowed_groups_keep_only_the_pages_of_the_window() -> None:
    """A sequence of 90 tokens: 23 pages without a window, 3 with a window of 6."""
    specs = MODELS["windows_beside_full"]
    model, runtime = build(specs, kv_groups(specs, page_size=4), 1 + 23 + 2 * 3, CPU)
    watch = Watch(runtime)
    (prompt,) = prompts_of([1])
    assert generate(runtime, [prompt], [90]) == [model.greedy(prompt, 90)]
    assert watch.most_owned == [23 + 2 * 3]
    one_table, plain = build(specs, KVCacheSpec(6, 2, 16, 4, dtype=F32), 1 + 23 + 2 * 3, CPU)
    watch = Watch(plain)
    assert generate(plain, [prompt], [90]) == [one_table.greedy(prompt, 90)]
    assert watch.most_owned == [23]  # of three times the bytes
    assert plain.kv_cache.nbytes == 3 * runtime.kv_cache.nbytes


LAYERS = st.sampled_from([FULL, WINDOW, NARROW, CHUNKED, VALUES, SMALL, replace(SMALL, sliding_window=5)])


@st.composite
def models(draw: Any) -> tuple[AttentionSpec, ...]:
    specs: list[AttentionSpec] = []
    for _ in range(draw(st.integers(1, 5))):
        spec = draw(LAYERS)
        writers = [
            i for i, s in enumerate(specs) if s.kv_shared_with is None and replace(s, sliding_window=None) == FULL
        ]
        if writers and replace(spec, sliding_window=None) == FULL and draw(st.booleans()):
            source = draw(st.sampled_from(writers))
            spec = replace(specs[source], kv_shared_with=source)
        specs.append(spec)
    return tuple(specs)


@st.composite
def requests(draw: Any) -> list[tuple[list[int], int, int | None]]:
    """Prompts, new tokens, and the stop token; many prompts share a prefix."""
    story, found = prompts_of([40], seed=draw(st.integers(0, 9)))[0], []
    for seed in range(draw(st.integers(1, 7))):
        shared, own = draw(st.integers(0, 30)), draw(st.integers(0, 12))
        prompt = story[:shared] + prompts_of([own or int(not shared)], seed=10 + seed)[0]
        count = draw(st.integers(1, 25))
        found.append((prompt, count, draw(st.none() | st.integers(0, count - 1))))
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    specs=models(),
    page_size=st.sampled_from([1, 2, 4, 5]),
    requests=requests(),
    spare=st.integers(0, 30),
    swap_bytes=st.sampled_from([0, 8_000, 1 << 20]),
    query=st.sampled_from([5, 16]),
    mixed=st.sampled_from([True, True, False]),
)
def test_generation_with_any_groups_equals_each_sequence_alone(
    specs, page_size, requests, spare, swap_bytes, query, mixed
) -> None:
    """Admissions, ends, preemptions, sliding windows and shared prefixes, with little more memory than one sequence
    needs; page ownership is exact after every step."""
    groups = kv_groups(specs, page_size=page_size)
    needs = [0] * (1 + max(group.pool for group in groups))
    longest = max(len(prompt) + new - 1 for prompt, new, _ in requests)
    for group in groups:
        needs[group.pool] += group.most_pages(longest, 1)
    pages = [1 + need + spare for need in needs]
    model, runtime = build(specs, groups, pages, CPU, max_num_tokens=query, mixed_sizes=(), mixed_batches=mixed)
    Watch(runtime)
    prompts, counts = [prompt for prompt, _, _ in requests], [count for _, count, _ in requests]
    alone = [model.greedy(p, n) for p, n in zip(prompts, counts, strict=True)]
    assume(all(model.is_decided(p, answer) for p, answer in zip(prompts, alone, strict=True)))
    stops = [frozenset() if at is None else frozenset({a[at]}) for a, (_, _, at) in zip(alone, requests, strict=True)]
    want = [list(takewhile(lambda t, s=stop: t not in s, a)) for a, stop in zip(alone, stops, strict=True)]
    with exact_ownership():
        generator = TextGenerator(runtime, swap_bytes=swap_bytes)
        assert generate(runtime, prompts, counts, generator, stops) == want
    assert all(a.num_free == a.num_pages - 1 for a in runtime.allocators)
    assert sorted(runtime.free_req_indices) == list(range(4))
    runtime.close()


def two_groups(**options: Any) -> Any:
    return build((FULL, WINDOW), kv_groups((FULL, WINDOW), page_size=4), 40, CPU, **options)


def row(req_index: int, tokens: list[int], length: int, pages: Any, first: Any = 0) -> Request:
    return Request(req_index, tokens, length, pages, first_page=first)


def test_pages_of_one_group_are_sent_without_the_others() -> None:
    """After its first step a request lists a new page of one group, a replaced page, or nothing."""
    model, runtime = two_groups()
    tokens = prompts_of([7])[0]
    steps: list[tuple[Any, Any]] = [
        (([1, 2], [3, 4]), (0, 0)),  # 7 tokens: two pages in each group
        (([], []), (0, 0)),  # the eighth
        (([5], [6]), (2, 2)),  # the ninth needs a page in each
        (([], []), (0, 0)),
    ]
    length = 0
    for pages, firsts in steps:
        new = tokens[length:] if length == 0 else [tokens[-1]]
        length = len(tokens)
        result = runtime.replay(Batch.from_requests([row(0, new, length, pages, firsts)])).tokens()
        assert result.tolist() == [int(model.oracle(tokens).argmax())]
        tokens.append(int(result[0]))
    # Page 2 of the full group moves to another place: only that group's page is listed.
    runtime.kv_cache.copy_pages([2], [9], group=0)
    for tensor in (t for tensors in runtime.kv_cache.of_group(0) for t in tensors):
        tensor[2] = float("nan")
    batch = Batch.from_requests([row(0, [tokens[-1]], len(tokens), ([9], []), (1, 0))])
    assert runtime.replay(batch).tokens().tolist() == [int(model.oracle(tokens).argmax())]


def faults(runtime: Any, *rows: Request) -> list[tuple[int, FaultCode, int, int]]:
    with pytest.raises(StepFaultError) as caught:
        runtime.replay(Batch.from_requests(list(rows))).tokens()
    return [(f.index, f.code, f.value, f.group) for f in caught.value.faults]


def test_faults_name_the_group() -> None:
    _, runtime = two_groups()
    good = row(0, [1], 1, ([1], [2]))
    assert faults(runtime, row(0, [1], 1, ([1], [40]))) == [(0, FaultCode.PAGE_OUT_OF_RANGE, 40, 1)]
    assert faults(runtime, row(0, [1], 1, ([1], []))) == [(0, FaultCode.LENGTH_EXCEEDS_PAGES, 1, 1)]
    # Two groups of one pool share their page ids: a page is written by one of them.
    assert faults(runtime, row(0, [1], 1, ([1], [1]))) == [(0, FaultCode.DUPLICATE_PAGE, 1, 0)]
    twice = [(0, FaultCode.DUPLICATE_PAGE, 2, 1), (1, FaultCode.DUPLICATE_PAGE, 2, 0)]
    assert faults(runtime, good, row(1, [1], 1, ([2], [3]))) == twice
    with pytest.raises(StepFaultError, match=r"page 40 is the null page or outside the cache in KV group 1; the req"):
        runtime.replay(Batch.from_requests([row(0, [1], 1, ([1], [40]))])).tokens()
    assert runtime.replay(Batch.from_requests([good])).tokens().min() >= 0, "the runtime goes on"


def test_new_sequence_keeps_no_pages_of_the_previous_one() -> None:
    """A gap in the pages of a request is a fault."""
    _, runtime = two_groups()
    runtime.replay(Batch.from_requests([row(0, list(range(9)), 9, ([1, 2, 3], [4, 5, 6]))])).tokens()
    begins = row(0, [1], 1, ([], []))
    assert faults(runtime, begins) == [(0, FaultCode.LENGTH_EXCEEDS_PAGES, 1, 0)]
    gap = row(0, [1], 17, ([9], [10]), (4, 4))  # page 3 was never listed
    assert faults(runtime, gap) == [(0, FaultCode.LENGTH_EXCEEDS_PAGES, 17, 0)]
    behind = row(0, [1, 2], 10, ([], []))
    assert runtime.replay(Batch.from_requests([behind])).tokens().min() >= 0, "a faulty step leaves the table as it was"
    on = row(0, list(range(10)), 20, ([7, 8], [9, 10]), (3, 3))
    far = row(0, list(range(10)), 30, ([11, 12, 13], [14, 15, 16]), (5, 5))
    for chunk in (on, far):
        assert runtime.replay(Batch.from_requests([chunk])).tokens().min() >= 0
    back = row(0, [1], 12, ([], []))
    assert faults(runtime, back) == [(0, FaultCode.LENGTH_EXCEEDS_PAGES, 12, 1)], "its window's pages are given away"


def test_pages_before_the_window_may_be_null_pages() -> None:
    """As block managers pass them. The group without a window still needs all pages."""
    model, runtime = two_groups()
    tokens = prompts_of([13])[0]
    chunk = row(0, tokens[:12], 12, ([1, 2, 3], [4, 5, 6]))
    runtime.replay(Batch.from_requests([chunk])).tokens()
    # Token 12 sees from 7 on: page 1. What stands at page 0 is nobody's business.
    last = row(0, tokens[12:], 13, ([1, 2, 3, 7], [0, 5, 6, 8]))
    result = runtime.replay(Batch.from_requests([last])).tokens().tolist()
    assert result == [int(model.oracle(tokens).argmax())]
    assert runtime.manager.buffers.block_table[1, 0, :5].tolist() == [0, 5, 6, 8, 0]


GROUPINGS: dict[str, tuple[tuple[AttentionSpec, ...], list[tuple[int, ...] | None]]] = {
    "alike": ((FULL, FULL, FULL), [None]),
    "five_to_one": (
        (WINDOW,) * 5 + (FULL,) + (WINDOW,) * 5 + (FULL,),
        [(0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (5, 11)],
    ),
    "nearly_as_many": ((WINDOW,) * 5 + (FULL,) * 4, [(0, 1, 2, 3, 4), (5, 6, 7, 8)]),
    "last_one_padded": ((WINDOW,) * 5 + (FULL,) * 2, [(0, 1), (2, 3), (4,), (5, 6)]),
    "shared_layers_own_nothing": ((FULL, WINDOW, SHARES_0, replace(WINDOW, kv_shared_with=1)), [(0,), (1,)]),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_kv_groups_of_layers(name: str) -> None:
    specs, layers = GROUPINGS[name]
    groups = kv_groups(specs, page_size=4)
    assert [group.layers for group in groups] == layers
    assert {group.pool for group in groups} == {0}
    where = locations(specs, groups)
    assert [w for *_, w in where] == [spec.kv_shared_with is None for spec in specs]
    for index, (group, cache_layer, writes) in enumerate(where):
        assert groups[group].sliding_window in (None, specs[index].sliding_window)
        if not writes:
            assert (group, cache_layer) == where[specs[index].kv_shared_with][:2]


def test_pages_of_a_pool_have_equal_bytes() -> None:
    groups = kv_groups((SMALL, FULL), page_size=4, layout=KVLayout.HND)
    assert [(group.page_size, group.pool) for group in groups] == [(8, 0), (4, 0)]
    cache = KVCache.allocate(groups, 5, CPU)
    assert cache.nbytes == 5 * 4 * 2 * 2 * 16 * 4
    assert [tuple(t.shape) for t in cache.k] == [(5, 8, 1, 16), (5, 4, 2, 16)]
    # A page is the same bytes in both groups: what one writes to page 3 is in page 3 of the other, and nowhere else.
    cache.k[0][3], cache.v[0][3] = 1.0, 2.0
    assert cache.k[1][3].abs().min() > 0
    assert cache.v[1][3].abs().min() > 0
    assert all(not t[page].any() for t in (*cache.k, *cache.v) for page in (0, 1, 2, 4))
    other = kv_groups((AttentionSpec(3, 3, 16, F32), FULL), page_size=4)
    assert [group.pool for group in other] == [0, 1]
    two_pools = KVCache.allocate(other, [5, 7], CPU)
    assert (two_pools.pool_pages, two_pools.num_pages) == ((5, 7), 12)


WRONG_GROUPS: dict[str, tuple[Any, Any, str]] = {
    "layer_in_two": ([KVCacheSpec(1, 2, 16, layers=(0,))] * 2, (FULL, FULL), "layer 0 is also in group 0"),
    "layer_missing": (
        [KVCacheSpec(1, 2, 16, layers=(0,)), KVCacheSpec(1, 2, 16, layers=(2,))], (FULL, FULL),
        r"expected layers 0 to 1, got \[0, 2\]"
    ),
    "unnamed": ([KVCacheSpec(1, 2, 16), KVCacheSpec(1, 2, 16)], (FULL, FULL), r"groups\[0\].layers: required"),
    "pools": (
        [KVCacheSpec(1, 2, 16, layers=(0,), pool=2), KVCacheSpec(1, 2, 16, layers=(1,))], (FULL, FULL), "pools 0 to 1"
    ),
    "null_pages": (
        [KVCacheSpec(1, 2, 16, layers=(0,)), KVCacheSpec(1, 2, 16, layers=(1,), null_page=3)], (FULL, FULL), "null_page"
    ),
    "heads": (KVCacheSpec(1, 2, 16, dtype=F32), (AttentionSpec(4, 4, 16, F32),), "num_kv_heads: expected 2, as in"),
    "window_too_wide": (
        KVCacheSpec(1, 2, 16, dtype=F32, sliding_window=6), (replace(FULL, sliding_window=7),),
        "at most 6, the window of its KV group"
    ),
    "no_window": (KVCacheSpec(1, 2, 16, dtype=F32, sliding_window=6), (FULL,), "at most 6, the window of its KV group"),
    "too_few_layers": (KVCacheSpec(1, 2, 16, dtype=F32), (FULL, FULL), "expected 1 layers with their own KV"),
    "shares_with_itself": (
        KVCacheSpec(1, 2, 16, dtype=F32), (FULL, replace(FULL, kv_shared_with=1)), "layer 1 is not an earlier layer"
    ),
    "shares_with_one_that_shares": (
        KVCacheSpec(1, 2, 16, dtype=F32), (FULL, SHARES_0, replace(FULL, kv_shared_with=1)), "an earlier layer with"
    ),
}  # fmt: skip


def test_groups_of_no_layers_raise() -> None:
    with pytest.raises(ConfigError, match="attention: expected at least 1 AttentionSpec, got none"):
        kv_groups([], page_size=16)


@pytest.mark.parametrize("name", WRONG_GROUPS)
def test_groups_that_do_not_match_the_layers_raise(name: str) -> None:
    groups, specs, message = WRONG_GROUPS[name]
    with pytest.raises(ConfigError, match=message):
        build(specs, groups, 8, CPU)


def test_only_layers_that_write_take_keys() -> None:
    _, runtime = build((FULL, SHARES_0), KVCacheSpec(1, 2, 16, 4, dtype=F32), 8, CPU)
    step = runtime.manager._program.view(runtime.manager.descriptors[0])
    q = torch.zeros(step.descriptor.padded_tokens, 4, 16)
    with pytest.raises(ShapeError, match=r"k: expected None for layer 1, got a tensor; pass None only after"):
        step.attend(1, q, q[:, :2], q[:, :2])
    with pytest.raises(ShapeError, match=r"k: expected a tensor for layer 0, got None"):
        step.attend(0, q, None, None)
    assert len(runtime.kv_cache.k) == 1


def test_memory_is_divided_among_pools() -> None:
    specs = (FULL, AttentionSpec(3, 3, 16, F32))
    runtime = build(specs, kv_groups(specs, page_size=4), "auto", CPU)[1]
    assert runtime.memory_plan is not None
    assert runtime.memory_plan.pool_pages == tuple(a.num_pages for a in runtime.allocators) == (1 + 4 * 24,) * 2
    with pytest.raises(ConfigError, match=r"allocator: this runtime has 2 pools; use allocators"):
        _ = runtime.allocator
    with pytest.raises(ConfigError, match="a sequence of 2, one per pool"):
        build(specs, kv_groups(specs, page_size=4), [4, 4, 4], CPU)
