"""Whatever a server may do with requests of several KV groups, whoever owns their pages, while pages are few."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.kernels.errors import CapacityError
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession, SessionRequest
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.layered import VOCAB, LayeredModel, build
from tests.support.toy import slow_device

SEEDS, CALLS = 8, 150
WINDOW, CHUNK = 6, 8


def runtime_of(generator: random.Random, device: torch.device) -> tuple[LayeredModel, Runtime]:
    """Two or three groups of different sight, in one pool or in two, of pages of different sizes where they are two."""
    sights = generator.choice(
        [({"sliding_window": WINDOW}, {}), ({"attention_chunk_size": CHUNK}, {}, {"sliding_window": WINDOW}), ({}, {})]
    )
    specs = [AttentionSpec(4, 2, 16, torch.float32, **sight) for sight in sights]
    pools, sizes = generator.choice([((0, 0, 0), (4, 4, 4)), ((0, 1, 1), (2, 4, 4))])
    groups = [
        KVCacheSpec(1, 2, 16, size, dtype=torch.float32, layers=(layer,), pool=pool, **sight)
        for layer, (sight, pool, size) in enumerate(zip(sights, pools, sizes, strict=False))
    ]
    num_pages = [generator.choice([30, 60]) for _ in range(1 + groups[-1].pool)]
    return build(specs, groups, num_pages, device, loop_sizes=generator.choice([(), (2, 4)]))


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
            self.session.append_pages(request, pages)
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
    what = generator.choice(["add", "run", "run", "run", "collect", "fork", "release", "pages", "pages"])
    request = generator.choice(now) if now else None
    free_req_indices = session._runtime.free_req_indices
    if what == "add" and free_req_indices:
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 20))]
        stops = frozenset([generator.randrange(VOCAB)])
        requests.append(session.add(prompt, SamplingParams(generator.randint(1, 30), stop_ids=stops)))
        now.append(requests[-1])
    elif what == "run":
        session.run(generator.randint(1, 7))
    elif what == "collect":
        session.collect(wait=generator.random() < 0.5)
    elif what == "pages" and blocks is not None and request is not None:
        blocks.give(generator, request)
    elif (
        what == "fork" and request is not None and free_req_indices and request.req_index not in session.table.prefills
    ):
        requests.append(session.fork(request) if blocks is None else blocks.fork(request))
        now.append(requests[-1])
    elif what == "release" and request is not None and (request.finish_reason or generator.random() < 0.2):
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


def serve(generator: random.Random, runtime: Runtime, external_pages: bool, calls: int) -> list[SessionRequest]:
    """Random calls of a session; all requests that there were, most of which have ended."""
    requests: list[SessionRequest] = []
    now: list[SessionRequest] = []
    with DecodeSession(runtime, external_pages=external_pages) as session:
        blocks = Blocks(session, runtime) if external_pages else None
        for _ in range(calls):
            try:
                draw(generator, session, blocks, requests, now)
            except CapacityError:
                make_room(generator, session, blocks, now)
            if blocks is not None:
                blocks.take()
        session.collect(wait=True)
        for request in now:
            session.release(request)
        if blocks is not None:
            blocks.take()
            for allocator, free in zip(runtime.allocators, blocks.free, strict=True):
                assert len(free) == allocator.num_pages - 1, "every page came back"
                allocator.free(free)
    assert all(allocator.num_free == allocator.num_pages - 1 for allocator in runtime.allocators)
    assert len(runtime.free_req_indices) == runtime.config.max_num_reqs
    return requests


@pytest.mark.parametrize("external_pages", [False, True], ids=["own_pages", "external_pages"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_requests_of_several_groups_say_what_the_oracle_says(
    device: torch.device, seed: int, external_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(seed)
    if generator.random() < 0.7:
        slow_device(monkeypatch)
    model, runtime = runtime_of(generator, device)
    requests = serve(generator, runtime, external_pages, CALLS)
    decided = 0
    for request in (request for request in requests if request.tokens):
        prompt = request.prompt.tolist()
        want = model.greedy(prompt, len(request.tokens))
        if model.is_decided(prompt, want):
            assert request.tokens == want
            decided += len(want)
    assert decided > CALLS / 3, "most tokens are compared"
    runtime.close()
