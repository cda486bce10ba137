"""TextGenerator where pages are short: equal tokens under every budget, shared prefixes, and what is given back."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.cache.groups import kv_groups
from graphrt.cache.swap import SwapArrival
from graphrt.cache.tables import PrefixIndex, Tables
from graphrt.engine.handle import StepFaultError
from graphrt.generate.generator import TextGenerator
from graphrt.generate.scheduler import GenerationStats, PromptState, Scheduler
from graphrt.kernels.cache.copy import PagePacker
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionSpec
from tests.support.layered import VOCAB, LayeredModel, Watch, build, exact_ownership, generate, prompts_of
from tests.support.toy import slow_device

F32, CPU = torch.float32, torch.device("cpu")
FULL = AttentionSpec(4, 2, 16, F32)
MODELS = {
    "full": (FULL,),
    "window_beside_full": (replace(FULL, sliding_window=6), FULL),
    "two_pools": (FULL, AttentionSpec(3, 3, 16, F32)),
}
PROMPTS, COUNTS = prompts_of([11, 3, 18, 1, 7]), [9, 14, 6, 17, 8]


def assert_idle(runtime: Runtime) -> None:
    assert all(a.num_free == a.num_pages - 1 for a in runtime.allocators)
    assert sorted(runtime.free_req_indices) == list(range(runtime.config.max_num_reqs))


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("name", MODELS)
def test_every_budget_gives_the_same_tokens(name: str, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the pages of the longest sequence alone to those of all, with and without host memory; launches have ended
    at once, or are in flight until the host waits for them."""
    specs = MODELS[name]
    groups = kv_groups(specs, page_size=4)
    model = LayeredModel(specs, CPU)
    want = [model.greedy(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    longest = max(len(prompt) + count - 1 for prompt, count in zip(PROMPTS, COUNTS, strict=True))
    least = sum(group.most_pages(longest, 1) for group in groups if group.pool == 0)
    preempted = []
    for budget in range(least, 4 * least, 3 if slow else 2):
        if slow:
            monkeypatch.undo()
            slow_device(monkeypatch)  # of a new runtime
        _, runtime = build(specs, groups, 1 + budget, CPU, mixed_sizes=())
        Watch(runtime)
        for swap_bytes in (0, 20_000):
            generator = TextGenerator(runtime, swap_bytes=swap_bytes)
            with exact_ownership():
                assert generate(runtime, PROMPTS, COUNTS, generator) == want, (budget, swap_bytes)
            stats = generator.stats
            assert (stats.swapped_out_pages == 0) or swap_bytes
            assert stats.swapped_in_pages == stats.swapped_out_pages
            assert (stats.recomputed_tokens > 0) <= (stats.preemptions > 0)
            preempted.append(stats.preemptions)
            assert_idle(runtime)
        runtime.close()
    assert max(preempted) > 1
    assert preempted[-2:] == [0, 0], "with pages for all nobody gives way"


def full(num_pages: int, page_size: int = 4, **options: Any) -> tuple[LayeredModel, Runtime]:
    groups = kv_groups(MODELS["full"], page_size=page_size)
    return build(MODELS["full"], groups, num_pages, CPU, mixed_sizes=(), **options)


def tight() -> tuple[LayeredModel, Runtime]:
    """Nine pages of four tokens: two of the sequences below do not fit beside each other for long."""
    return full(1 + 9)


def sampled(generator: TextGenerator, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for event in generator.generate(prompts, params):
        found[event.prompt].append(event.token)
    return found


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_the_last_sequence_gives_way_and_no_token_is_lost(swap_bytes: int) -> None:
    model, runtime = tight()
    prompts = prompts_of([10, 9])
    generator = TextGenerator(runtime, swap_bytes=swap_bytes)
    order = [(event.prompt, event.token) for event in generator.generate(prompts, SamplingParams(20))]
    for index, prompt in enumerate(prompts):
        assert [token for p, token in order if p == index] == model.greedy(prompt, 20)
    ends = [max(i for i, (p, _) in enumerate(order) if p == index) for index in (0, 1)]
    assert ends[0] < ends[1], "the first never gives way"
    stats = generator.stats
    assert stats.preemptions == 1
    assert (stats.swapped_out_pages > 0, stats.recomputed_tokens > 0) == (swap_bytes > 0, swap_bytes == 0)
    assert_idle(runtime)


def test_hot_sequences_are_the_same_however_often_they_are_preempted() -> None:
    """Random numbers depend on seed and position alone."""
    params = [SamplingParams(15, temperature=1.2, seed=seed) for seed in (2**32 - 1, 2**31 + 7, 2**32 - 1, 7)]
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[0], PROMPTS[4]]
    answers = []
    for pages, swap_bytes in ((60, 0), (8, 0), (8, 1 << 20), (11, 1 << 20)):
        _, runtime = full(1 + pages)
        generator = TextGenerator(runtime, swap_bytes=swap_bytes)
        answers.append(sampled(generator, prompts, params))
        assert (generator.stats.preemptions > 0) == (pages < 60)
    assert all(found == answers[0] for found in answers)
    assert answers[0][0] == answers[0][2] != answers[0][1]


@pytest.mark.parametrize("fault", [False, True], ids=["closed", "fault"])
@pytest.mark.parametrize("at", range(1, 40, 4))
def test_a_generator_that_ends_early_gives_everything_back(at: int, fault: bool) -> None:
    """At any step, also while preempted sequences have pages on the host: after close(), and after NaN logits."""
    model, runtime = tight()
    events = TextGenerator(runtime).generate(prompts_of([10, 9, 12, 5]), SamplingParams(20))
    for _ in range(at):
        next(events)
    if fault:
        model.embed.fill_(float("nan"))
        with pytest.raises(StepFaultError, match="NO_TOKEN_OFFERED"):
            list(events)
    events.close()
    assert_idle(runtime)


def test_an_error_in_the_middle_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runtime = tight()
    prompts = prompts_of([10, 9, 12])
    calls = []

    def failing(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 14:
                raise RuntimeError("out of order")
            return real(*arguments, **options)

        return call

    for name in ("begin", "advance"):
        monkeypatch.setattr(runtime.manager, name, failing(getattr(runtime.manager, name)))
    generator = TextGenerator(runtime)
    with pytest.raises(RuntimeError, match="out of order"):
        generate(runtime, prompts, [20] * 3, generator)
    assert generator.stats.swapped_out_pages
    assert_idle(runtime)
    monkeypatch.undo()
    assert generate(runtime, prompts, [5] * 3) == [model.greedy(prompt, 5) for prompt in prompts]


def test_pages_that_others_take_meanwhile_are_missed_with_an_error() -> None:
    _, runtime = tight()
    for swap_bytes in (-1, 1.5):
        with pytest.raises(ConfigError, match="swap_bytes: expected an int from 0"):
            TextGenerator(runtime, swap_bytes=swap_bytes)
    events = TextGenerator(runtime).generate(prompts_of([10]), SamplingParams(20))
    next(events)
    held = runtime.allocator.allocate(runtime.allocator.num_free)
    with pytest.raises(CapacityError, match=r"prompts\[0\]: other users of the runtime hold .* 0 pages are free"):
        list(events)
    runtime.allocator.free(held)
    assert_idle(runtime)


# -- prefixes


STORY = prompts_of([30], seed=7)[0]
SHARED = {
    # lengths in common with the first prompt, tokens that follow, page size: tokens not computed, pages shared, copied
    "full_pages": (16, 5, 4, (16, 4, 0)),
    "less_than_half_a_page_more": (18, 5, 4, (16, 4, 0)),
    "more_than_half": (19, 5, 4, (19, 5, 1)),
    "equal_prompts": (30, 0, 4, (28, 7, 0)),
    "equal_prompts_and_a_copy": (30, 0, 16, (29, 2, 1)),
    "less_than_a_page": (3, 9, 16, (0, 0, 0)),
    "nothing": (0, 9, 4, (0, 0, 0)),
}


@pytest.mark.parametrize("case", SHARED)
def test_prompts_that_begin_alike_share_pages(case: str) -> None:
    common, more, page_size, want = SHARED[case]
    other = [(token + 1) % VOCAB for token in STORY]
    second = STORY[:common] + other[common : common + more]
    model, runtime = full(60, page_size, max_num_tokens=64, launch_steps=1)
    watch, generator = Watch(runtime), TextGenerator(runtime)
    with exact_ownership():
        assert generate(runtime, [STORY, second], [12, 12], generator) == [
            model.greedy(prompt, 12) for prompt in (STORY, second)
        ]
    stats = generator.stats
    assert (stats.shared_tokens, stats.shared_pages, stats.copied_pages) == want
    computed = len(STORY) + len(second) + 2 * 11 - want[0]
    assert runtime.stats().real_tokens == computed
    assert watch.steps == 12 + (want[0] > 0), "who waits for another's prompt waits a step"
    assert_idle(runtime)


def test_who_comes_when_others_have_been_going_on_for_long_shares_as_well() -> None:
    """A row becomes free while the first prompt goes on by itself: nothing else has happened."""
    model, runtime = full(60, max_num_tokens=64)
    prompts = [STORY, [*STORY[:24], 5]]
    taken = [runtime.free_req_indices.pop() for _ in range(3)]
    generator = TextGenerator(runtime)
    events = generator.generate(prompts, SamplingParams(40))
    found = [next(events) for _ in range(20)]
    assert {event.prompt for event in found} == {0}
    runtime.free_req_indices.extend(taken)
    found += events
    for i, prompt in enumerate(prompts):
        assert [event.token for event in found if event.prompt == i] == model.greedy(prompt, 40)
    assert generator.stats.shared_tokens == 24
    assert_idle(runtime)


def test_equal_prompts_take_the_pages_of_one() -> None:
    """Four sequences of 30 tokens that continue differently: 7 full pages are one sequence's, whoever ends first."""
    _, runtime = full(1 + 7 + 4 * 3)
    watch, generator = Watch(runtime), TextGenerator(runtime)
    params = [SamplingParams(n, temperature=1.5, seed=n) for n in (3, 9, 6, 8)]
    with exact_ownership():
        found = sampled(generator, [STORY] * 4, params)
    assert [len(tokens) for tokens in found] == [3, 9, 6, 8]
    assert len({tuple(tokens[:3]) for tokens in found}) >= 3
    assert generator.stats.preemptions == 0
    assert generator.stats.shared_pages == 3 * 7
    assert watch.most_owned[0] <= 7 + 4 * 3
    assert_idle(runtime)


def test_a_windowed_group_shares_what_it_still_has() -> None:
    """While the first prompt is at most a step ahead; a page behind its window is gone for those that come later."""
    specs = MODELS["window_beside_full"]
    model, runtime = build(specs, kv_groups(specs, page_size=4), 80, CPU, max_num_tokens=64, mixed_sizes=())
    Watch(runtime)
    generator = TextGenerator(runtime)
    prompts = [STORY, [*STORY[:24], 1, 2, 3], [*STORY[:8], 4, 5]]
    with exact_ownership():
        assert generate(runtime, prompts, [9] * 3, generator) == [model.greedy(prompt, 9) for prompt in prompts]
    assert generator.stats.shared_tokens == 24 + 8
    assert_idle(runtime)


def test_pages_that_arrive_are_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link so slow that nothing arrives before somebody waits for it: what is written late must be its owner's."""
    specs = MODELS["window_beside_full"]
    groups = kv_groups(specs, page_size=4)
    made: list[Scheduler] = []
    construct, free_passed = Scheduler.__init__, Tables.free_passed

    def constructed(self: Scheduler, *arguments: Any) -> None:
        construct(self, *arguments)
        made.append(self)

    def checked(self: Tables, slots: Any, positions: Any) -> None:
        before = [int(self.from_[slot]) for slot in slots]
        free_passed(self, slots, positions)
        for slot, first in zip(slots.tolist(), before, strict=True):
            assert slot not in made[-1]._preemption.arriving or self.from_[slot] == first

    monkeypatch.setattr(Scheduler, "__init__", constructed)
    monkeypatch.setattr(Tables, "free_passed", checked)
    monkeypatch.setattr(SwapArrival, "done", lambda self: False)
    lengths, counts = [11, 7, 30, 1, 1, 2], [12, 13, 6, 30, 30, 30]
    longest = max(length + count - 1 for length, count in zip(lengths, counts, strict=True))
    least = sum(group.most_pages(longest, 1) for group in groups)
    model, runtime = build(specs, groups, 1 + least + 8, CPU, mixed_sizes=(), max_num_tokens=6)
    prompts = prompts_of(lengths)
    want = [model.greedy(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert generate(runtime, prompts, counts) == want
    assert made[-1].running == {}
    runtime.close()


# -- what a preemption, a share and a returning sequence may cost


def follow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of every sequence that is preempted again: its prompt, its tokens when it came back, and those it has now."""
    start, preempt = Scheduler._start, Scheduler._preempt
    came_back: dict[int, int] = {}
    found: list[tuple[int, int, int]] = []

    def started(self: Scheduler, request: Any, needs: Any) -> None:
        if request.was_preempted:
            came_back[request.index] = request.preempted.length
        start(self, request, needs)

    def preempted(self: Scheduler, req_index: int) -> None:
        request, length = self.running[req_index], self._table.length(req_index)
        if request.index in came_back:
            found.append((request.index, came_back.pop(request.index), length))
        preempt(self, req_index)

    monkeypatch.setattr(Scheduler, "_start", started)
    monkeypatch.setattr(Scheduler, "_preempt", preempted)
    return found


@pytest.mark.parametrize("budget", [23, 26, 29])
def test_who_comes_back_goes_on_before_it_gives_way_again(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is preempted a second time has computed a token since it came back."""
    again, specs = follow(monkeypatch), MODELS["window_beside_full"]
    _, runtime = build(specs, kv_groups(specs, page_size=2), 1 + budget, CPU, mixed_sizes=(), max_num_tokens=6)
    generator = TextGenerator(runtime, swap_bytes=20_000)
    generate(runtime, prompts_of([9, 12, 5, 14, 3]), [30, 24, 30, 18, 30], generator)
    assert generator.stats.preemptions > 2
    assert all(before < now for _, before, now in again), again


def test_who_has_computed_nothing_goes_back_as_it_came() -> None:
    """Two prompts run and a third has a row, but no token yet when pages run out: it is not a preemption."""
    _, runtime = full(1 + 12)
    params = SamplingParams(20)
    requests = [PromptState(i, np.array(p, np.int32), params) for i, p in enumerate(prompts_of([4, 4, 4]))]
    stats = GenerationStats()
    with DecodeSession(runtime) as session:
        scheduler = Scheduler(requests, runtime, session, None, stats)
        scheduler.admit()
        assert [request.index for request in scheduler.running.values()] == [0, 1, 2]
        req_index = next(req_index for req_index, request in scheduler.running.items() if request.index == 2)
        scheduler._preempt(req_index)
        assert (stats.preemptions, requests[2].was_preempted, list(scheduler.queue)) == (0, False, [requests[2]])
        scheduler.admit()
        assert len(scheduler.running) == 3
    assert_idle(runtime)


def test_a_copy_on_write_leaves_the_pages_that_others_need_at_once() -> None:
    """The first prompt decodes, the second shares 2 full pages and would copy a third: only where pages are plenty."""
    second = [*STORY[:11], (STORY[11] + 1) % VOCAB, 3]
    for pages, copied in ((1 + 3 + 2, 0), (1 + 3 + 8, 1)):
        _, runtime = full(pages, max_num_tokens=16)
        params = SamplingParams(3)
        requests = [PromptState(i, np.array(p, np.int32), params) for i, p in enumerate((STORY[:12], second))]
        stats = GenerationStats()
        with DecodeSession(runtime) as session:
            scheduler = Scheduler(requests, runtime, session, None, stats)
            for request in requests:
                scheduler._start(request, [1])
            scheduler.queue.clear()
            for _ in range(2):
                (launch,) = scheduler.launch()
                launch.wait()
            assert (stats.copied_pages, stats.shared_tokens) == (copied, 11 if copied else 8)
        assert_idle(runtime)
        runtime.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8), st.data())
def test_prefixes_against_a_comparison_of_all_pairs(sequences: list[list[int]], data: st.DataObject) -> None:
    index, block = PrefixIndex(2), 2
    alive = []
    for slot, tokens in enumerate(sequences):
        index.add(slot, np.array(tokens, np.int32))
        alive.append(slot)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(alive))
            index.remove(gone)
            alive.remove(gone)
    for slot in alive:
        most = len(sequences[slot]) - 1
        common = {}
        for other in set(alive) - {slot}:
            pairs = zip(sequences[slot][:most], sequences[other], strict=False)
            alike = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            common[other] = alike // block * block
        best = max(common.values(), default=0)
        want = [other for other in alive if best and common.get(other) == best and other < slot]
        assert index.find(slot, most) == (best, want)
    for slot in alive:
        index.remove(slot)
    assert not index._indices


def test_packers_are_warm_when_a_session_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runtime = build(MODELS["two_pools"], kv_groups(MODELS["two_pools"], page_size=4), 20, CPU)
    warmed: list[PagePacker] = []
    monkeypatch.setattr(PagePacker, "warm_up", lambda packer: warmed.append(packer))
    DecodeSession(runtime).close()
    assert warmed == [runtime.kv_cache.packer(group) for group in (0, 1)]


def test_without_pinned_memory_everything_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning that says why, for all calls of a generator."""
    model, runtime = tight()
    prompts, generator = prompts_of([10, 9]), TextGenerator(runtime)

    def no_space(*arguments: Any, **options: Any) -> Any:
        raise CapacityError("nbytes: cannot allocate 9 bytes of host memory; lower it")

    monkeypatch.setattr("graphrt.generate.generator.SwapSpace", no_space)
    want = [model.greedy(prompt, 20) for prompt in prompts]
    with pytest.warns(RuntimeWarning, match="are recomputed: nbytes: cannot allocate 9 bytes of host memory"):
        assert generate(runtime, prompts, [20] * 2, generator) == want
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(runtime, prompts, [20] * 2, generator) == want
    assert generator.stats.recomputed_tokens
    assert not generator.stats.swapped_out_pages
    assert_idle(runtime)
