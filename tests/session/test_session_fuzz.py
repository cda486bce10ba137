"""Whatever a server may do, in any order: on a GPU ten thousand steps of it, with the host far ahead of the device."""

from __future__ import annotations

import random
import time

import pytest
import torch

from graphrt.batch import Batch
from graphrt.draft_model import DraftModel
from graphrt.kernels.errors import CapacityError
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.testing.poison import poison_derived
from tests.session.test_session import PROMPTS, alone, oracle
from tests.support.layered import VOCAB, WIDTH, LayeredModel, build
from tests.support.replay_scenarios import branches
from tests.support.toy import LAYERS, MAX_LEN, LivelyModel, captured, finish, slow_device
from tests.support.toy import VOCAB as TOY_VOCAB

STEPS = 10_000
LATE = 3_000_000  # cycles: almost two milliseconds
VERY_LATE = 600_000_000  # and 350, while the host submits all that a test submits, and compiles what is new
WINDOW, CHUNK = 6, 8
SOURCES = ("none", "caller", "ngram", "draft_model", "caller_tree", "ngram_tree", "head")
OWNERS = pytest.mark.parametrize("external_pages", [False, True], ids=["own_pages", "external_pages"])


def some(generator: random.Random) -> dict[str, object]:
    """Some options of sampling, or none."""
    options: dict[str, object] = {
        "top_k": generator.randint(2, 9), "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.4,
        "presence_penalty": 6.0, "frequency_penalty": -3.0, "logprobs": generator.randint(0, 3),
        "logit_bias": {generator.randrange(VOCAB): 9.0, generator.randrange(VOCAB): float("-inf")},
    }  # fmt: skip
    if generator.random() < 0.3:
        options["prompt_logprobs"] = 1
    return {name: value for name, value in options.items() if generator.random() < 0.3}


def drafting(generator: random.Random, source: str, draft: DraftModel) -> tuple[dict[str, int], Proposer | None]:
    """Options of a runtime, and its proposer; None: the caller sends drafts. In trees or chains."""
    if source == "none":
        return {}, None
    most = generator.choice([1, 3])
    options = {"num_speculative_tokens": most, "tree_depth": generator.randint(1, most) if "tree" in source else 0}
    return options, {"ngram": ngram_drafts, "ngram_tree": branches, "draft_model": draft, "head": draft}.get(source)


def toy_runtime(generator: random.Random, device: torch.device, source: str) -> Runtime:
    """One with all options of sampling, few requests and few pages, whose free pages hold NaN."""
    config = {
        "max_seq_len": MAX_LEN, "loop_sizes": generator.choice([(), (1, 2, 4)]), "max_num_tokens": 32,
        "mixed_sizes": (8, 32), "ring_depth": generator.choice([2, 3, 8]), "penalties": True, "max_logit_bias": 2,
        "max_logprobs": 3, "lazy_capture": generator.choice([False, True]),
    }  # fmt: skip
    specs, width = [AttentionSpec(4, 2, 16, torch.float32)] * LAYERS, 64 if source == "head" else None
    draft = DraftModel(LivelyModel(device), specs, vocab_size=TOY_VOCAB, hidden_size=width)
    drafts, proposer = drafting(generator, source, draft)
    return captured(device=device, num_pages=generator.choice([24, 70]), proposer=proposer, **config | drafts)


def layered_runtime(generator: random.Random, device: torch.device, source: str) -> tuple[LayeredModel, Runtime]:
    """Two or three groups of different sight, in one pool or in two, of pages of different sizes where they are two."""
    choices = [({"sliding_window": WINDOW}, {}), ({}, {})]
    if "tree" not in source:
        choices.append(({"attention_chunk_size": CHUNK}, {}, {"sliding_window": WINDOW}))
    sights = generator.choice(choices)
    specs = [AttentionSpec(4, 2, 16, torch.float32, **sight) for sight in sights]
    pools, sizes = generator.choice([((0, 0, 0), (4, 4, 4)), ((0, 1, 1), (2, 4, 4))])
    groups = [
        KVCacheSpec(1, 2, 16, size, dtype=torch.float32, layers=(layer,), pool=pool, **sight)
        for layer, (sight, pool, size) in enumerate(zip(sights, pools, sizes, strict=False))
    ]
    width = WIDTH if source == "head" else None
    draft = DraftModel(LayeredModel(specs, device), specs, vocab_size=VOCAB, hidden_size=width)
    pools = draft.kv_groups(groups) if source in ("draft_model", "head") else groups
    num_pages = [generator.choice([30, 60]) for _ in {group.pool for group in pools}]
    options = {"loop_sizes": generator.choice([(), (2, 4)]), "lazy_capture": generator.choice([False, True])}
    drafts, proposer = drafting(generator, source, draft)
    return build(specs, groups, num_pages, device, proposer, **options | drafts)


class Blocks:
    """Pages of each pool in the hands of a caller, who gives some to requests and takes back what they need no more."""

    def __init__(self, session: DecodeSession, runtime: Runtime) -> None:
        self.session, self.groups = session, runtime.kv_cache.groups
        self.free = [allocator.allocate(allocator.num_free) for allocator in runtime.allocators]

    def give(self, generator: random.Random, request: SessionRequest) -> None:
        """A few pages of some groups, as far as there are any and the request's table has room."""
        pages: list[list[int]] = []
        for group, have in zip(self.groups, self.session.pages.pages(request.req_index), strict=True):
            count = min(generator.choice([0, 1, 1, 2, 5]), len(self.free[group.pool]), 2 if len(have) else 5)
            pages.append([self.free[group.pool].pop() for _ in range(count)])
        try:
            self.session.append_pages(request, pages if len(pages) > 1 else pages[0])
        except CapacityError:  # beyond the longest sequence
            for group, ids in zip(self.groups, pages, strict=True):
                self.free[group.pool] += ids

    def fork(self, request: SessionRequest) -> SessionRequest:
        """A fork with as many pages as it needs. Raises: CapacityError where there are not as many."""
        needs = self.session.fork_needs(request)
        if any(need > len(free) for need, free in zip(needs, self.free, strict=True)):
            raise CapacityError("fork: too few pages")
        return self.session.fork(
            request, pages=[[free.pop() for _ in range(n)] for n, free in zip(needs, self.free, strict=True)]
        )

    def take(self) -> None:
        """Take back the pages that the session freed: each once, and none that a request still has."""
        every, in_use = self.session.pop_freed_pages(), [set(free) for free in self.free]
        for request in self.session.requests:
            for group, ids in zip(self.groups, self.session.pages.pages(request.req_index), strict=True):
                in_use[group.pool].update(ids.tolist())
        for free, used, back in zip(self.free, in_use, every, strict=True):
            assert len(back) == len(set(back))
            assert used.isdisjoint(back)
            free += back


def draw(
    generator: random.Random,
    session: DecodeSession,
    blocks: Blocks | None,
    requests: list[SessionRequest],
    now: list[SessionRequest],
) -> None:
    """One random thing that a server may do; `now` has the requests that were not released."""
    actions = ["add", "add", "run", "run", "run", "collect", "fork", "release", "poison", "pages", "pages", "drafts"]
    what, runtime = generator.choice(actions), session._runtime
    request = generator.choice(now) if now else None
    if what == "add" and runtime.free_req_indices:
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 20))]
        options = {"temperature": generator.choice([0.0, 0.0, 30.0]), "seed": generator.randrange(100)}
        params = SamplingParams(
            max_new_tokens=generator.randint(1, 30),
            stop_ids=frozenset(generator.sample(range(VOCAB), 2)),
            **(options | some(generator) if runtime.config.penalties else {}),
        )
        requests.append(session.add(prompt, params))
        now.append(requests[-1])
    elif what == "run":
        session.run(generator.randint(1, 7))
    elif what == "collect":
        session.collect(wait=generator.random() < 0.5)
    elif what == "poison" and generator.random() < 0.3:
        session.collect(wait=True)
        poison_derived(runtime.manager.buffers)
    elif request is None:
        pass
    elif what == "drafts":
        most = runtime.config.num_speculative_tokens
        drafts = [generator.randrange(VOCAB) for _ in range(generator.randint(0, most))]
        parents = [generator.randint(0, at) for at in range(len(drafts))] if runtime.config.tree_depth else None
        session.set_drafts(request, drafts, parents)
    elif what == "pages" and blocks is not None:
        blocks.give(generator, request)
    elif what == "fork" and runtime.free_req_indices and request.req_index not in session.table.prefills:
        requests.append(session.fork(request) if blocks is None else blocks.fork(request))
        now.append(requests[-1])
    elif what == "release" and (request.finish_reason or generator.random() < 0.3):
        session.release(request)
        now.remove(request)


def make_room(
    generator: random.Random, session: DecodeSession, blocks: Blocks | None, now: list[SessionRequest]
) -> None:
    """Give pages to all requests, or release finished requests, and sometimes an unfinished one."""
    session.collect(wait=True)
    if blocks is not None and generator.random() < 0.8:
        for request in now:
            blocks.give(generator, request)
        return
    for request in [request for request in now if request.finish_reason] or now[: generator.random() < 0.3]:
        session.release(request)
        now.remove(request)


def check_pages(session: DecodeSession, runtime: Runtime) -> None:
    """No page is held by nobody."""
    for pool, allocator in enumerate(runtime.allocators):
        tables = [table for table in session.pages.tables if table.group.pool == pool]
        owned = sum(int(t.to[r.req_index] - t.from_[r.req_index]) for t in tables for r in session.requests)
        assert allocator.num_pages - 1 - allocator.num_free <= owned


def serve(
    generator: random.Random, runtime: Runtime, calls: int, *, external_pages: bool = False, late: float = 0.0
) -> list[SessionRequest]:
    """Random calls of a session, on a device that is late with this probability; all requests that there were."""
    requests: list[SessionRequest] = []
    now: list[SessionRequest] = []
    with DecodeSession(runtime, external_pages=external_pages) as session:
        blocks = Blocks(session, runtime) if external_pages else None
        for _ in range(calls):
            if generator.random() < late:
                delay(runtime, LATE)
            try:
                draw(generator, session, blocks, requests, now)
            except CapacityError:
                make_room(generator, session, blocks, now)
            if blocks is None:
                check_pages(session, runtime)
            else:
                blocks.take()
        session.collect(wait=True)
        if blocks is not None:
            for request in now:
                session.release(request)
            blocks.take()
            for allocator, free in zip(runtime.allocators, blocks.free, strict=True):
                assert len(free) == allocator.num_pages - 1, "every page came back"
                allocator.free(free)
    assert all(allocator.num_free == allocator.num_pages - 1 for allocator in runtime.allocators)
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    return requests


def delay(runtime: Runtime, cycles: int = VERY_LATE) -> None:
    """Keep the device busy, so that whatever the host submits next waits while the host goes on."""
    with torch.cuda.stream(runtime.stream):
        torch.cuda._sleep(cycles)


def check_requests(runtime: Runtime, requests: list[SessionRequest]) -> None:
    """Each request sampled what it samples alone, one token a step, and its log-probabilities are those."""
    for request in requests:
        want, logprobs = alone(runtime, request)
        assert request.tokens == want[: len(request.tokens)]
        assert request.tokens == want or not request.finish_reason
        assert len(request.logprobs) == (len(request.tokens) if request.params.logprobs is not None else 0)
        for ours, theirs in zip(request.logprobs, logprobs, strict=False):
            assert theirs is not None
            assert (ours.token, ours.rank, len(ours.top)) == (theirs.token, theirs.rank, len(theirs.top))
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)  # of logits of about 60


@OWNERS
@pytest.mark.parametrize("source", SOURCES)
def test_requests_sample_what_they_sample_alone(
    device: torch.device, source: str, external_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any interleaving of add, fork, release, run and collect, any split of steps into launches, few pages. Launches
    have ended at once, or are in flight until the host waits for them, with tokens that are there already."""
    generator = random.Random(SOURCES.index(source) + 10 * external_pages)
    if generator.random() < 0.5:
        slow_device(monkeypatch)
    runtime = toy_runtime(generator, device, source)
    check_requests(runtime, serve(generator, runtime, 100, external_pages=external_pages))


@OWNERS
@pytest.mark.parametrize("source", SOURCES)
def test_requests_of_several_groups_say_what_the_oracle_says(
    device: torch.device, source: str, external_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, decided = random.Random(SOURCES.index(source) + 10 * external_pages), 0
    if generator.random() < 0.7:
        slow_device(monkeypatch)
    model, runtime = layered_runtime(generator, device, source)
    for request in serve(generator, runtime, 200, external_pages=external_pages):
        prompt = request.prompt.tolist()
        want = model.greedy(prompt, len(request.tokens))
        if want and model.is_decided(prompt, want):
            assert request.tokens == want
            decided += len(want)
    assert decided > 30, "most tokens are compared"
    runtime.close()


@pytest.mark.gpu
def test_ten_thousand_steps_of_whatever_a_server_does() -> None:
    generator, device, steps, tokens = random.Random(15), torch.device("cuda"), 0, 0
    while steps < STEPS:
        runtime = toy_runtime(generator, device, generator.choice(SOURCES))
        requests = serve(generator, runtime, 1500, late=0.05)
        steps += runtime.manager.queue.next_step
        check_requests(runtime, requests)
        tokens += sum(len(request.tokens) for request in requests)
        runtime.close()
    assert tokens > STEPS, "most steps sampled tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("loop_sizes", [(), (4,)], ids=["launch_by_launch", "loop"])
def test_a_late_device_reads_what_was_meant_for_it(loop_sizes: tuple[int, ...]) -> None:
    """All slots are written, with requests that come, go and get pages, before the device has begun the first one."""
    device = torch.device("cuda")
    runtime = captured(device=device, ring_depth=16, loop_sizes=loop_sizes)
    with DecodeSession(runtime) as session:
        first = session.add(PROMPTS[0], SamplingParams(max_new_tokens=40))
        session.run(2)
        session.collect(wait=True)
        delay(runtime)
        began = time.perf_counter()
        session.run(6)
        second = session.add(PROMPTS[1], SamplingParams(max_new_tokens=30))
        session.run(5)
        third = session.fork(first)
        session.run(9)
        session.release(second)
        fourth = session.add(PROMPTS[2], SamplingParams(max_new_tokens=12))
        session.run(1)
        in_flight = sum(not flight.launch.done() for flight in session.launches.pending)
        assert in_flight >= 5, f"the host was not ahead: {in_flight} launches after {time.perf_counter() - began:.4f} s"
        finish(session, 4)
        assert first.tokens == third.tokens == oracle(runtime, PROMPTS[0], 40)
        assert fourth.tokens == oracle(runtime, PROMPTS[2], 12)
        assert second.tokens == oracle(runtime, PROMPTS[1], 30)[: len(second.tokens)]


@pytest.mark.gpu
@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4)], ids=["launch_by_launch", "loop"])
def test_a_launch_that_is_stopped_ends_after_its_step(loop_sizes: tuple[int, ...]) -> None:
    runtime = captured(device="cuda", loop_sizes=loop_sizes)
    with DecodeSession(runtime) as session:
        requests = [session.add(prompt, SamplingParams(max_new_tokens=40)) for prompt in PROMPTS]
        session.run(2)
        session.collect(wait=True)
        before = [len(request.tokens) for request in requests]
        delay(runtime)
        launches = [*session.run(20), *session.run(10)]
        for launch in launches:
            launch.stop()
        session.collect(wait=True)
        assert [len(request.tokens) - count for request, count in zip(requests, before, strict=True)] == [
            len(launches)
        ] * 3
        launches[0].stop()  # has ended: its slot is another's by now
        finish(session, 7)
        assert [request.tokens for request in requests] == [oracle(runtime, prompt, 40) for prompt in PROMPTS]


@pytest.mark.gpu
@pytest.mark.alone  # the host must keep up with 50 steps of a toy
def test_a_loop_is_stopped_while_it_runs() -> None:
    """Its first steps have read the word that stops it, and found nothing: each step must read it anew."""
    runtime = captured(device="cuda", loop_sizes=(1, 2, 4))
    with DecodeSession(runtime) as session:
        request = session.add(PROMPTS[0], SamplingParams(max_new_tokens=60))
        session.run(2)
        session.collect(wait=True)
        launch, *_ = session.run(50)
        next(iter(launch))
        launch.stop()
        assert len(launch.tokens()) < launch.steps
        finish(session, 7)
        assert request.tokens == oracle(runtime, PROMPTS[0], 60)


@pytest.mark.gpu
def test_a_late_device_reads_the_batch_that_was_submitted() -> None:
    """The stateless path: slots are written again at once, and only where the device is done with them."""
    device = torch.device("cuda")
    runtime = captured(device=device, ring_depth=4)
    pages = runtime.allocator.allocate(16)
    prompt, handles = PROMPTS[0], []
    batch = Batch(req_indices=[0], seq_lens=[3], query_lens=[3], tokens=prompt, page_indptr=[0, 16], page_ids=pages)
    handles.append(runtime.replay(batch))
    for length in range(4, 24):
        if length % 5 == 0:
            delay(runtime)
        handles.append(runtime.replay(Batch(req_indices=[0], seq_lens=[length])))
    assert [int(handle.tokens()[0]) for handle in handles] == oracle(runtime, prompt, 21)
