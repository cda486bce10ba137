"""Generation and memory plans at their bounds, with the toy model and its dense oracle: quick enough for every case."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from graphrt.config import RuntimeConfig
from graphrt.engine.stats import Stats
from graphrt.generate.generator import Event, TextGenerator
from graphrt.kernels.errors import CapacityError
from graphrt.replay import ReplayManager
from graphrt.runtime import Runtime, _measure_graphs, _plan_memory
from graphrt.sampling_params import SamplingParams
from tests.support import toy
from tests.support.toy import HEAD_DIM, KV_HEADS, LAYERS, ToyModel, make_runtime

CPU = torch.device("cpu")
PAGE = 4
PAGE_BYTES = LAYERS * 2 * PAGE * KV_HEADS * HEAD_DIM * 4


def build(
    num_pages: int | str = 40, *, rows: int = 3, tokens: int = 8, longest: int = 24, steps: int = 64,
    capture: bool = True, **options,
) -> Runtime:  # fmt: skip
    config = {"max_num_reqs": rows, "max_num_tokens": tokens, "max_seq_len": longest, "launch_steps": steps}
    model = ToyModel(CPU, torch.float32)
    config |= {"mixed_sizes": (tokens,)}
    runtime = make_runtime(CPU, model=model, config=config, num_pages=num_pages, **options)
    if capture:
        runtime.capture()
    return runtime


def greedy(prompt: list[int], count: int) -> list[int]:
    return toy.greedy(ToyModel(CPU, torch.float32), prompt, count)


def events(runtime: Runtime, prompts, params) -> list[Event]:
    return list(TextGenerator(runtime).generate(prompts, params))


def answers(found: list[Event], count: int) -> list[list[int]]:
    return [[e.token for e in found if e.prompt == i and e.token is not None] for i in range(count)]


def check_idle(runtime: Runtime) -> None:
    assert runtime.allocator.num_free == runtime.allocator.num_pages - 1
    assert sorted(runtime.free_req_indices) == list(range(runtime.config.max_num_reqs))


PROMPTS = [[3], [1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4, 6, 2, 6, 4, 3, 3]]


@pytest.mark.parametrize(
    "options", [{}, {"tokens": 3}, {"rows": 1}], ids=["plain", "as many rows as tokens", "one row"]
)
def test_prompts_shorter_and_longer_than_a_step_with_their_own_lengths(options: dict[str, int]) -> None:
    """Prompts of 1, 5, 12 and 8 tokens: the longest in chunks beside rows that decode, or after one that ended."""
    runtime = build(**options)
    counts = [1, 7, 12, 2]
    found = events(runtime, PROMPTS, [SamplingParams(n) for n in counts])
    assert answers(found, 4) == [greedy(p, n) for p, n in zip(PROMPTS, counts, strict=True)]
    for index, count in enumerate(counts):
        own = [e for e in found if e.prompt == index]
        assert [e.finished for e in own] == [False] * (count - 1) + [True]
    order = [e.prompt for e in found]
    assert (order == sorted(order)) == ("rows" in options), "one row serves all in their order"
    check_idle(runtime)


def test_a_sequence_may_be_as_long_as_the_runtime_and_no_longer() -> None:
    """The last token is sampled and never written: prompt and output may be one longer than max_seq_len."""
    runtime = build()
    prompt = PROMPTS[2]
    assert answers(events(runtime, [prompt], SamplingParams(13)), 1) == [greedy(prompt, 13)]
    with pytest.raises(CapacityError, match=r"prompts\[0\]: 12 tokens and max_new_tokens=14 exceed max_seq_len=24"):
        events(runtime, [prompt], SamplingParams(14))
    check_idle(runtime)


def test_as_many_pages_as_a_prompt_needs_and_one_less() -> None:
    """12 + 5 tokens keep 16 in 4 pages; 12 + 6 need a fifth."""
    runtime = build(1 + 4)
    assert answers(events(runtime, [PROMPTS[2]], SamplingParams(5)), 1) == [greedy(PROMPTS[2], 5)]
    with pytest.raises(CapacityError, match=r"prompts\[1\]: 17 tokens need 5 pages, and the cache has 4"):
        events(runtime, [[1], PROMPTS[2]], [SamplingParams(1), SamplingParams(6)])
    check_idle(runtime)
    assert answers(events(runtime, [PROMPTS[2], [3]], SamplingParams(5)), 2) == [greedy(PROMPTS[2], 5), greedy([3], 5)]
    check_idle(runtime)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_stop_token_ends_its_own_prompt(place: int) -> None:
    """Wherever it comes, also as the first or the last token, and for the prompt that named it only."""
    full = greedy(PROMPTS[1], 4)
    cut = full.index(full[place])
    runtime = build()
    found = events(runtime, [PROMPTS[1]] * 2, [SamplingParams(4, stop_ids=frozenset({full[place]})), SamplingParams(4)])
    assert answers(found, 2) == [full[:cut], full]
    assert [(e.token, e.finished) for e in found if e.prompt == 0][-1] == (None, True)
    check_idle(runtime)


@pytest.mark.parametrize(("steps", "more"), [(1, 1), (2, 3), (64, 15)])
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_ended_is_noticed_one_launch_late(place: int, steps: int, more: int) -> None:
    """A prompt that could go on for long takes a step per token up to the stop token, and at most two launches more:
    what is left of the one with the stop token, and the next one. Launches have up to 8 steps."""
    full = greedy([3], 12)
    place = full.index(full[place])
    runtime = build(longest=64, steps=steps)
    events(runtime, [[3]], SamplingParams(60, stop_ids=frozenset({full[place]})))
    assert place + 1 <= sum(runtime.stats().replays.values()) <= place + 1 + more


@pytest.mark.parametrize("taken", ["rows", "pages"])
def test_what_others_hold_is_missed_only_when_nothing_runs(taken: str) -> None:
    runtime = build(1 + 6)
    if taken == "rows":
        runtime.free_req_indices[:] = runtime.free_req_indices[:1]
    else:
        runtime.allocator.allocate(4)  # two are left: 8 tokens
    found = events(runtime, [[3, 4], [5, 6]], SamplingParams(4))
    assert answers(found, 2) == [greedy([3, 4], 4), greedy([5, 6], 4)]
    if taken == "rows":
        runtime.free_req_indices.clear()
    else:
        runtime.allocator.allocate(1)
    with pytest.raises(CapacityError, match=r"prompts\[0\]: other users of the runtime hold"):
        events(runtime, [[3, 4]], SamplingParams(4))


def test_prompts_that_fit_run_side_by_side() -> None:
    """Three prompts in three rows take as many steps as one, and the next two wait for rows."""
    for count, steps in ((1, 4), (3, 4), (5, 8)):
        runtime = build(longest=8)
        events(runtime, [[3]] * count, SamplingParams(4))
        assert sum(runtime.stats().replays.values()) == steps
        check_idle(runtime)


# -- memory plans of a CPU


def physical(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Half of what the machine has is what a cache may take."""
    values = {"SC_PAGE_SIZE": 2, "SC_PHYS_PAGES": nbytes}
    monkeypatch.setattr("graphrt.runtime.os.sysconf", values.__getitem__)


@pytest.mark.parametrize("pages", [2, 3, 18, 19])
def test_a_plan_takes_what_fits_and_what_can_be_used(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Three rows of 24 tokens use 18 pages and the null page."""
    physical(monkeypatch, pages * PAGE_BYTES + 5)
    plan = build("auto", capture=False, memory_utilization=1.0).memory_plan
    assert (plan.num_pages, plan.free_before, plan.reserved) == (pages, pages * PAGE_BYTES + 5, 0)
    assert plan.kv_bytes == pages * PAGE_BYTES
    assert plan.actual_free is None
    assert plan.predicted_free == 5 - 8 * pages, "a claim for each page"
    physical(monkeypatch, (pages + 1) * PAGE_BYTES - 1)
    assert build("auto", capture=False, memory_utilization=1.0).memory_plan.num_pages == pages
    physical(monkeypatch, 100 * PAGE_BYTES)
    runtime = build("auto", capture=False, memory_utilization=0.5)
    assert (runtime.memory_plan.num_pages, runtime.memory_plan.reserved) == (19, 50 * PAGE_BYTES)
    assert (runtime.kv_cache.num_pages, runtime.allocator.num_pages) == (19, 19)
    physical(monkeypatch, 8 * PAGE_BYTES)
    for share, count in ((0.5, 4), (0.25, 2)):
        assert build("auto", capture=False, memory_utilization=share).memory_plan.num_pages == count
    with pytest.raises(CapacityError, match=rf"{PAGE_BYTES} bytes cannot hold 2 pages of {PAGE_BYTES} bytes \(free"):
        build("auto", capture=False, memory_utilization=0.125)
    assert build(7, capture=False).memory_plan is None


def test_a_plan_of_a_device_leaves_room_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What trial captures took, and what is kept free of the whole device, are not given to the cache."""
    runtime = build(2, capture=False)
    cuda, config, groups = torch.device("cuda", 0), runtime.config, runtime.kv_cache.groups
    free, total, graphs = 20 * PAGE_BYTES, 40 * PAGE_BYTES, 3 * PAGE_BYTES + 7
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total) if device == cuda else None)
    monkeypatch.setattr(
        "graphrt.runtime._measure_graphs", lambda *given: graphs if given == ("b", config, cuda, 1) else 0
    )
    plan = _plan_memory("b", config, groups, cuda, 0.75, None)
    assert (plan.free_before, plan.reserved, plan.predicted_graphs) == (free, 10 * PAGE_BYTES, graphs)
    assert (plan.num_pages, plan.kv_bytes) == (6, 6 * PAGE_BYTES)
    assert plan.predicted_free == free - graphs - 6 * PAGE_BYTES - 8 * 6


@pytest.mark.parametrize("loop_sizes", [(), (1, 2), (1, 3)])
def test_trial_captures_count_all_graphs_and_loops(
    monkeypatch: pytest.MonkeyPatch, loop_sizes: tuple[int, ...]
) -> None:
    """The largest size of each kind is captured, and its bytes count for the other graphs and loops of its kind."""
    free = iter([5000, 3000])
    config = RuntimeConfig(3, 16, 24, decode_sizes=(1, 2, 3), mixed_sizes=(8, 16), loop_sizes=loop_sizes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 9000))

    def build(config: RuntimeConfig, pages: tuple[int, ...]) -> ReplayManager:
        assert pages == (2, 2)
        manager = toy.make_runtime(CPU, num_pages=4, config=asdict(config)).manager
        stats = manager.stats()

        def measured() -> Stats:
            driver_bytes = {"decode[3]": 10, "mixed[16 tokens, 3]": 100}
            stats.graphs = tuple(replace(g, driver_bytes=driver_bytes[str(g.descriptor)]) for g in stats.graphs)
            return stats

        manager.stats = measured
        return manager

    others = 2 + len(set(loop_sizes) - {3})
    assert _measure_graphs(build, config, torch.device("cuda", 0), 2) == 2000 + 100 + 10 * others


def test_rows_are_handed_out_from_the_lowest() -> None:
    runtime = build(7, capture=False)
    assert [runtime.free_req_indices.pop() for _ in range(3)] == [0, 1, 2]
    assert runtime.free_req_indices == []
