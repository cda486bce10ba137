"""SwapSpace: copies to and from the host, page ownership, errors, and order with steps on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.cache import swap
from graphrt.cache.groups import kv_groups
from graphrt.cache.kv_cache import KVCache
from graphrt.cache.page_allocator import PageAllocator
from graphrt.cache.swap import HostMemory, SwapSpace, locate_bytes
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.cache.copy import PagePacker
from graphrt.kernels.errors import CapacityError, CaptureError, ConfigError, GraphRTError, ShapeError
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionSpec
from tests.support.layered import Watch, build, generate, prompts_of

F32, CPU = torch.float32, torch.device("cpu")
FULL = AttentionSpec(4, 2, 16, F32)
SPECS = (FULL, replace(FULL, sliding_window=6), AttentionSpec(3, 3, 16, F32))  # two groups in one pool, one in another


class World:
    """A cache of random bytes with its allocators, and a SwapSpace."""

    def __init__(self, device: torch.device = CPU, nbytes: int = 1 << 20, dtype: torch.dtype = F32) -> None:
        groups = kv_groups(SPECS, page_size=4, dtype=dtype, layout=KVLayout.HND)
        self.cache = KVCache.allocate(groups, 20, device)
        for tensor in (*self.cache.k, *self.cache.v):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
        self.allocators = [PageAllocator(20), PageAllocator(20)]
        self.space = SwapSpace(self.cache, self.allocators, nbytes)

    def allocate(self, *counts: int) -> list[list[int]]:
        return [self.allocators[g.pool].allocate(n) for g, n in zip(self.cache.groups, counts, strict=True)]

    def read(self, pages: list[list[int]]) -> list[torch.Tensor]:
        found = []
        for group, ids in enumerate(pages):
            k, v = self.cache.of_group(group)
            found += [t[ids].contiguous().view(torch.uint8).cpu() for t in (*k, *v)]
        return found

    def spoil(self, pages: list[list[int]]) -> None:
        for group, ids in enumerate(pages):
            for tensor in (t for tensors in self.cache.of_group(group) for t in tensors):
                tensor[ids] = float("nan")

    @property
    def num_free(self) -> list[int]:
        return [allocator.num_free for allocator in self.allocators]


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("staged", [1, 1500, 1 << 20], ids=["a_page", "some_pages", "all"])
def test_swap_in_restores_pages_bitwise(
    device: torch.device, dtype: torch.dtype, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With garbage in the staging buffers, and with the old pages overwritten."""
    monkeypatch.setattr("graphrt.cache.swap._STAGED_BYTES", staged)
    world = World(device, dtype=dtype)
    first, second, shared = world.allocate(5, 3, 4), world.allocate(2, 0, 7), world.allocate(2, 1, 1)
    want = world.read(first), world.read(second), world.read(shared)
    world.allocators[0].share(shared[0])
    gone = [world.space.swap_out(pages) for pages in (first, second, shared)]
    for pool in (0, 1):
        assert not world.space.reclaim(pool, 20)
    assert [world.allocators[0].owners(page) for page in shared[0]] == [1, 1], "shared pages stay allocated"
    world.allocators[0].free(shared[0])
    for pool in (0, 1):
        assert world.space.reclaim(pool, 19)
    assert world.num_free == [19, 19]
    world.spoil([list(range(20)) for _ in SPECS])
    for swapped, before in reversed(list(zip(gone, want, strict=True))):
        pages = world.allocate(*swapped.counts)
        arrival = world.space.swap_in(swapped, pages)
        arrival.wait()
        assert all(torch.equal(a, b) for a, b in zip(world.read(pages), before, strict=True))
        assert arrival.done()
    assert world.space.num_free_bytes == 1 << 20
    world.space.close()
    assert world.num_free == [19 - 7 - 3 - 3, 19 - 11 - 1]


def wrong_calls(world: World, other: World) -> dict[str, tuple[Any, type[GraphRTError], str]]:
    pages = world.allocate(2, 1, 1)
    used, dropped, held = (world.space.swap_out(world.allocate(1, 0, 0)) for _ in range(3))
    world.space.swap_in(used, world.allocate(1, 0, 0))
    world.space.drop(dropped)
    elsewhere = other.space.swap_out(other.allocate(1, 0, 0))
    one, out, back = world.allocate(1, 0, 0), world.space.swap_out, world.space.swap_in
    shared = world.allocate(1, 0, 0)
    world.allocators[0].share(shared[0])
    free = [[19], [], []]
    return {
        "free": (lambda: out(free), ConfigError, r"pages\[0\]: expected pages with at least 1 owner, page 19 has 0"),
        "null": (lambda: out([[0], [], []]), ConfigError, "expected pages with at least 1 owner, page 0 has 0"),
        "range": (lambda: out([[], [20], []]), ConfigError, r"pages\[1\]\[0\]: expected an int from 0 to 19, got 20"),
        "twice": (lambda: out([pages[0], pages[0], []]), ShapeError, "pages: page"),
        "groups": (lambda: out(pages[:2]), ConfigError, "pages: expected 3 lists of pages, one per KV group, got 2"),
        "flat": (lambda: out(pages[0]), ConfigError, "pages: expected 3 lists"),
        "back_free": (lambda: back(held, free), ConfigError, "expected pages with 1 owner, page 19 has 0"),
        "back_shared": (lambda: back(held, shared), ConfigError, "expected pages with 1 owner, page . has 2"),
        "count": (lambda: back(held, pages), ConfigError, r"\(1, 0, 0\) pages per KV group, got \(2, 1, 1\)"),
        "again": (lambda: back(used, one), ConfigError, "swap_in: these pages were swapped in or dropped before"),
        "dropped": (lambda: back(dropped, one), ConfigError, "swap_in: these pages were swapped in or dropped before"),
        "drop_again": (lambda: world.space.drop(dropped), ConfigError, "drop: these pages were swapped in or dropped"),
        "other": (lambda: back(elsewhere, one), ConfigError, "these pages belong to another SwapSpace"),
        "handle": (lambda: back((1, 0, 0), one), ConfigError, "swapped: expected SwappedPages"),
        "pool": (lambda: world.space.reclaim(2, 1), ConfigError, "pool: expected an int from 0 to 1, got 2"),
        "less": (lambda: world.space.reclaim(0, -1), ConfigError, "count: expected an int >= 0, got -1"),
    }


def test_wrong_swaps_raise_and_change_nothing() -> None:
    world, other = World(), World()
    calls = wrong_calls(world, other)
    state = world.num_free, world.space.num_free_bytes, world.read([list(range(20)) for _ in SPECS])
    for name, (call, error, text) in calls.items():
        with pytest.raises(error, match=text):
            call()
        now = world.num_free, world.space.num_free_bytes
        assert now == state[:2], name
    after = world.read([list(range(20)) for _ in SPECS])
    assert all(torch.equal(a, b) for a, b in zip(after, state[2], strict=True))


FAILURES = {
    "packer": (PagePacker, "pack", 2),
    "writer": (PagePacker, "unpack", 2),
    "first_upload": (PagePacker, "upload", 1),
    "second_upload": (PagePacker, "upload", 2),
    "copy_out": (swap, "_copy", 2),
    "copy_back": (swap, "_copy", 7),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failed_copy_changes_nothing(device: torch.device, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pieces each way; one call of a packer or a copy fails, each in turn."""
    monkeypatch.setattr("graphrt.cache.swap._STAGED_BYTES", 3 * 1024)
    owner, name, at = FAILURES[case]
    world, real, calls = World(device), getattr(owner, name), []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*arguments)

    monkeypatch.setattr(owner, name, failing)
    pages = world.allocate(4, 3, 4)
    want = world.read(pages)
    state = lambda: (world.num_free, world.space.num_free_bytes)  # noqa: E731
    before, failed, swapped = state(), 0, None
    try:
        swapped = world.space.swap_out(pages)
    except torch.OutOfMemoryError:
        failed += 1
        assert state() == before
        assert [world.allocators[0].owners(page) for page in (*pages[0], *pages[1])] == [1] * 7
        swapped = world.space.swap_out(pages)
    assert [world.space.reclaim(pool, 19) for pool in (0, 1)] == [True, True]
    back = world.allocate(*swapped.counts)
    before = state()
    try:
        arrival = world.space.swap_in(swapped, back)
    except torch.OutOfMemoryError:
        failed += 1
        assert state() == before
        arrival = world.space.swap_in(swapped, back)
    arrival.wait()
    assert failed == 1
    assert all(torch.equal(a, b) for a, b in zip(world.read(back), want, strict=True))
    assert world.space.num_free_bytes == 1 << 20
    world.space.close()
    assert world.num_free == [19 - 7, 19 - 4]


def test_close_frees_pages_if_the_link_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(world.space._link, "outward", lambda *arguments: Late())
    world.space.swap_out(world.allocate(3, 2, 1))
    monkeypatch.setattr(world.space._link, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.space.close()
    assert world.num_free == [19, 19]
    world.space.close()


def test_full_and_closed_space_raise() -> None:
    world = World(nbytes=4 * 1024 + 100)
    pages = world.allocate(4, 1, 0)
    assert world.space.bytes_of((4, 1, 0)) == 5 * 4 * 2 * (16 + 16) * 4
    with pytest.raises(CapacityError, match=r"swap_out: the pages need 5120 bytes, but only 4196 are free"):
        world.space.swap_out(pages)
    assert world.num_free == [14, 19]
    swapped = world.space.swap_out([pages[0][:2], [], []])
    with world.space:
        pass
    for call in (
        lambda: world.space.swap_out([pages[0][2:], [], []]),
        lambda: world.space.swap_in(swapped, [pages[0][2:], [], []]),
        lambda: world.space.drop(swapped),
        world.space.__enter__,
    ):
        with pytest.raises(CaptureError, match="this SwapSpace was closed"):
            call()
    world.space.close()


WRONG_SPACES = {
    "cache": ({"kv_cache": None}, "kv_cache: expected KVCache, got None"),
    "allocators": ({"allocators": [PageAllocator(20)]}, "allocators: expected 2 PageAllocators, one per pool, got 1"),
    "allocator": ({"allocators": [PageAllocator(20), 3]}, r"allocators\[1\]: expected PageAllocator or"),
    "pages": ({"allocators": [PageAllocator(20), PageAllocator(9)]}, r"allocators\[1\].num_pages: expected 20"),
    "nothing": ({"nbytes": 0}, "nbytes: expected an int from 1"),
    "memory": ({"nbytes": 1 << 50}, "nbytes: cannot allocate 1125899906842624 bytes"),
    "stream": ({"stream": 3}, "stream: expected Stream, got 3"),
    "groups": ({"kv_cache": KVCache.allocate((), (), "cpu"), "allocators": []}, "kv_cache: has no KV groups"),
    "device": ({"nbytes": 11}, "SwapSpace: cannot allocate two staging buffers of 1152921504606846976 bytes"),
}


@pytest.mark.parametrize("case", WRONG_SPACES)
def test_wrong_space_arguments_raise(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    if case == "device":
        monkeypatch.setattr("graphrt.cache.swap._STAGED_BYTES", 1 << 60)
    change, text = WRONG_SPACES[case]
    arguments = {"kv_cache": world.cache, "allocators": world.allocators, "nbytes": 10}
    with pytest.raises(GraphRTError, match=text):
        SwapSpace(**(arguments | change))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
def test_host_memory_is_allocated_once(calls: list[tuple[bool, int]]) -> None:
    """Compared with a set of bytes."""
    memory, free, taken = HostMemory(100), set(range(100)), []
    for take, number in calls:
        if take:
            extents = memory.take(number)
            assert (extents is None) == (number > len(free))
            if extents is not None:
                places = [byte for start, size in extents for byte in range(start, start + size)]
                assert len(places) == number
                assert free.issuperset(places)
                free -= set(places)
                taken.append((extents, places))
                parts = [p for at in range(0, number, 7) for p in locate_bytes(extents, at, min(7, number - at))]
                assert [byte for _, start, size in parts for byte in range(start, start + size)] == places
        elif taken:
            extents, places = taken.pop(number % len(taken))
            memory.give(extents)
            free |= set(places)
        assert memory.num_free == len(free)
    for extents, _ in taken:
        memory.give(extents)
    assert memory.take(100) == [(0, 100)]


class Late:
    """An event that has not completed."""

    def __init__(self) -> None:
        self.come = False

    def query(self) -> bool:
        return self.come


def test_pages_are_freed_after_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete event keeps the pages, or makes the stream of the steps wait; the host never waits."""
    world, events, waited = World(), [], []
    link, real = world.space._link, world.space._link.outward

    def outward(*arguments: Any) -> Any:
        real(*arguments)
        events.append(Late())
        return events[-1]

    monkeypatch.setattr(link, "outward", outward)
    monkeypatch.setattr(link, "main_waits", waited.append)
    world.space.swap_out(world.allocate(3, 2, 1))
    world.space.swap_out(world.allocate(2, 0, 0))
    assert world.num_free == [12, 18]
    events[1].come = True
    world.space.collect()
    assert world.num_free == [12, 18], "copies end in their order"
    events[0].come = True
    world.space.collect()
    assert world.num_free == [17, 18]
    assert not waited
    assert world.space.reclaim(0, 16)
    assert not waited, "enough are free"
    assert world.space.reclaim(0, 19)
    assert waited == events[2:]
    assert not world.space.reclaim(0, 20)


@pytest.mark.parametrize("window", [None, 20])
def test_swaps_in_flight_do_not_change_tokens(device: torch.device, window: int | None) -> None:
    """Steps continue during copies; freed pages become NaN as soon as they are free."""
    specs = (replace(FULL, head_dim=32, sliding_window=window), replace(FULL, head_dim=32))
    groups, prompts = kv_groups(specs, page_size=4), prompts_of([30, 25, 41, 9, 33, 18])
    answers = []
    for pages in (400, 60):
        _, runtime = build(specs, groups, pages, device, batch_invariant=True)
        watch, generator = Watch(runtime), TextGenerator(runtime)
        answers.append(generate(runtime, prompts, [40] * len(prompts), generator))
        assert watch.steps > 40
        assert (generator.stats.swapped_out_pages > 0) == (pages == 60)
        assert generator.stats.swapped_in_pages == generator.stats.swapped_out_pages
        assert all(a.num_free == a.num_pages - 1 for a in runtime.allocators)
        runtime.close()
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_host_never_waits() -> None:
    """Calls return while the stream of the steps is busy, and read nothing before that stream reaches them."""
    device = torch.device("cuda", 0)
    world = World(device)
    first = world.allocate(5, 3, 4)
    pages = world.allocate(5, 3, 4)
    world.space.swap_in(world.space.swap_out(pages), first)  # pins memory for page ids
    pages = world.allocate(2, 1, 4)
    there = [torch.tensor(ids, device=device) for ids in pages]
    world.space.collect()
    torch.cuda.synchronize()
    world.space.collect()
    torch.cuda._sleep(2_000_000_000)  # about a second
    for group, ids in enumerate(there):  # behind the sleep: what goes out is NaN
        for tensor in (t for tensors in world.cache.of_group(group) for t in tensors):
            tensor.index_fill_(0, ids, float("nan"))
    busy = torch.cuda.current_stream(device).record_event()
    free = world.num_free
    swapped = world.space.swap_out(pages)
    assert world.num_free == free, "the copies may be running"
    assert world.space.reclaim(0, 11)
    back = world.allocate(2, 1, 4)
    arrival = world.space.swap_in(swapped, back)
    assert not busy.query(), "a call waited for the device"
    assert not arrival.done()
    arrival.wait()
    for group, ids in enumerate(back):
        assert all(t[ids].isnan().all() for tensors in world.cache.of_group(group) for t in tensors)
    world.space.close()
