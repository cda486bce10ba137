"""Sessions with an external block allocator: equal tokens, requests that wait for pages, pages freed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from graphrt.cache.page_allocator import PageAllocator
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.types import FinishReason
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import SessionPages
from graphrt.session.session import DecodeSession
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support import toy
from tests.support.layered import build
from tests.support.toy import LivelyModel, finish, greedy

CPU = torch.device("cpu")
PAGE = 4


def captured(device: torch.device, model: LivelyModel | None = None, **config: Any) -> Runtime:
    return toy.captured(model, device, 40, **({"decode_sizes": (2, 4), "loop_sizes": (4,)} | config))


@pytest.mark.parametrize("first", ["long", "none"])
def test_a_request_goes_on_while_others_wait_for_pages(first: str, device: torch.device) -> None:
    """One of them has one page, and one has a prompt without pages. The caller decides whose prompt runs."""
    model = LivelyModel(device)
    runtime = captured(device, model)
    prompts = {"long": [5, 2, 3], "short": [6, 2, 3], "none": [7, 2, 3]}
    order = [*prompts] if first == "long" else [*reversed(prompts)]
    with DecodeSession(runtime, external_pages=True) as session:
        requests = {name: session.add(prompts[name], SamplingParams(max_new_tokens=12)) for name in order}
        session.append_pages(requests["long"], [4, 5, 6, 7])
        session.append_pages(requests["short"], [8])
        while len(requests["long"].tokens) < 12:
            session.run(4)
            session.collect(wait=True)
        assert (len(requests["short"].tokens), len(requests["none"].tokens)) == (2, 0)
        assert requests["short"].finish_reason is FinishReason.RUNNING
        session.append_pages(requests["short"], torch.tensor([9, 10, 11]).numpy())
        session.append_pages(requests["none"], [12, 13, 14, 15])
        finish(session, 4)
        for name, prompt in prompts.items():
            assert requests[name].tokens == greedy(model, prompt, 12)


def test_forks_take_the_callers_pages() -> None:
    model = LivelyModel(CPU)
    runtime = captured(CPU, model)
    with DecodeSession(runtime, external_pages=True) as session:
        request = session.add([5, 6, 7, 8, 9, 1], SamplingParams(max_new_tokens=8))
        session.append_pages(request, [4, 5, 6, 7])
        session.run(1)
        session.collect(wait=True)
        assert session.fork_needs(request) == [1], "not the first page, which is full, nor those without a token"
        session.run(3)
        assert session.fork_needs(request) == [2], "launches in flight may have come so far"
        with pytest.raises(CapacityError, match="fork: expected 2 pages in pages=, got 1; pass as many"):
            session.fork(request, pages=[[20]])
        with pytest.raises(CapacityError, match="fork: expected 2 pages in pages=, got 3"):
            session.fork(request, pages=[[20, 21, 22]])
        with pytest.raises(CapacityError, match="fork: expected 2 pages in pages=, got 0"):
            session.fork(request)
        for pages in ([20, 21], [[20, 0]], [[21, 21]], [[20, 99]], [[20, 5]], [], 7):
            with pytest.raises(ShapeError, match="pages"):
                session.fork(request, pages=pages)  # type: ignore[arg-type]
        fork = session.fork(request, pages=[[20, 21]])
        session.run(8)
        session.collect(wait=True)
        assert request.finish_reason is FinishReason.LENGTH
        assert len(fork.tokens) == 7, "it stands still at the end of its own pages"
        session.append_pages(fork, [22])
        finish(session, 2)
        assert fork.tokens == request.tokens == greedy(model, [5, 6, 7, 8, 9, 1], 8)
        session.release(request)
        assert sorted(session.pop_freed_pages()[0]) == [5, 6, 7], "not the first one, which the fork reads"
        session.release(fork)
        assert sorted(session.pop_freed_pages()[0]) == [4, 20, 21, 22], "the shared page, from the last that had it"


def test_pages_of_a_fork_that_failed_are_the_callers() -> None:
    """Another request could have been given them since."""
    runtime = captured(CPU)
    with DecodeSession(runtime, external_pages=True) as session:
        requests = [session.add([5, 6, 7]) for _ in range(runtime.config.max_num_reqs)]
        session.append_pages(requests[0], [4])
        session.run(1)
        session.collect(wait=True)
        with pytest.raises(CapacityError, match="requests: no request index is free"):
            session.fork(requests[0], pages=[[20] * n for n in session.fork_needs(requests[0])])
        while True:
            try:
                session.run(1)
            except CapacityError:
                break
        session.collect(wait=True)
        for request in requests:
            session.release(request)
        assert session.pop_freed_pages() == [[4]]


def test_wrong_pages_are_refused() -> None:
    specs = [AttentionSpec(4, 2, 16, torch.float32)] * 2
    groups = [KVCacheSpec(1, 2, 16, PAGE, dtype=torch.float32, layers=(layer,)) for layer in (0, 1)]
    _, of_groups = build(specs, groups, 60, CPU)
    with DecodeSession(of_groups, external_pages=True) as session:
        request = session.add([1, 2, 3])
        with pytest.raises(ShapeError, match=r"pages: \[10\] are in use by a request of the session"):
            session.append_pages(request, [[10], [10]])  # two groups, one pool
        with pytest.raises(ShapeError, match="pages: expected 2 lists of page ids, one per KV group, got 1"):
            session.append_pages(request, [[3]])
    of_groups.close()
    runtime = captured(CPU)
    with DecodeSession(runtime, external_pages=True) as session:
        request = session.add([1, 2, 3])
        other = session.add([4])
        session.append_pages(other, [9])
        for pages in ([0], [40], [-1], [3, 3], ["x"], [1.5], 7, [9]):
            with pytest.raises(ShapeError, match="pages"):
                session.append_pages(request, pages)
        with pytest.raises(CapacityError, match="pages: expected at most 16 more pages of KV group 0"):
            session.append_pages(request, list(range(1, 18)))
        session.release(other)
        with pytest.raises(ShapeError, match=r"pages: \[9\] are in use .* call pop_freed_pages\(\) first"):
            session.append_pages(request, [9])
        assert session.pop_freed_pages() == [[9]]
        session.append_pages(request, [])
        with pytest.raises(CapacityError, match="run: no request has a page for its next token; call append"):
            session.run()
        session.append_pages(request, [3, 4])
        with pytest.raises(ShapeError, match=r"pages: \[4\] are in use"):
            session.append_pages(request, [5, 4])
        session.release(request)
        with pytest.raises(ConfigError, match="append_pages: the request was released"):
            session.append_pages(request, [3])
    with DecodeSession(runtime) as session:
        request = session.add([1, 2, 3])
        with pytest.raises(ConfigError, match="append_pages: this session allocates its pages itself"):
            session.append_pages(request, [3])
        session.run()
        with pytest.raises(ConfigError, match="pages: this session allocates its pages itself"):
            session.fork(request, pages=[[3]])
        with pytest.raises(ConfigError, match="pop_freed_pages: this session allocates its pages itself"):
            session.pop_freed_pages()
    with pytest.raises(ConfigError, match="external_pages: expected"):
        DecodeSession(runtime, external_pages="no")  # type: ignore[arg-type]


def test_a_fork_takes_no_pages_for_what_its_request_has_ahead() -> None:
    """Pages for later tokens are not copied: a fork needs one page."""
    runtime = captured(CPU, model := LivelyModel(CPU))
    prompt = [5, 6, 7]
    with DecodeSession(runtime) as session:
        request = session.add(prompt, SamplingParams(max_new_tokens=30))
        session.run(3)
        session.collect(wait=True)
        ahead = session.pages.pages(request.req_index)[0]
        assert len(ahead) > 2
        rest = runtime.allocator.allocate(runtime.allocator.num_free - 1)
        fork = session.fork(request)
        assert runtime.allocator.num_free == 0
        runtime.allocator.free(rest)
        finish(session, 4)
        assert fork.tokens == request.tokens == greedy(model, prompt, 30)


def test_pages_of_a_fork_that_waits_are_listed_when_it_goes_on(device: torch.device) -> None:
    """A fork whose own pages are full waits beside its request, which goes on: no step may have taken its list."""
    runtime = captured(device, model := LivelyModel(device))
    prompt = [5, 6, 7, 8, 9]
    with DecodeSession(runtime) as session:
        request = session.add(prompt, SamplingParams(max_new_tokens=20))
        session.run(1)
        session.run(3)
        assert session.fork_needs(request) == [2], "eight tokens at most, none of them for sure"
        rest = runtime.allocator.allocate(runtime.allocator.num_free - 2)
        fork = session.fork(request)
        session.run(2)
        session.collect(wait=True)
        assert (len(request.tokens), len(fork.tokens)) == (6, 4)
        runtime.allocator.free(rest)
        finish(session)
        assert fork.tokens == request.tokens == greedy(model, prompt, 20)


def test_a_request_waits_for_pages_of_each_group(device: torch.device) -> None:
    """Pages of one group, given while another has none, are not lost."""
    spec = AttentionSpec(4, 2, 16, torch.float32)
    groups = [KVCacheSpec(1, 2, 16, PAGE, dtype=torch.float32, layers=(layer,), pool=layer) for layer in (0, 1)]
    model, runtime = build([spec, spec], groups, 60, device)
    prompts = [[1, 2, 3, 4], [5, 6]]
    with DecodeSession(runtime, external_pages=True) as session:
        first, second = (session.add(prompt, SamplingParams(max_new_tokens=10)) for prompt in prompts)
        session.append_pages(first, [[7], [8]])
        session.append_pages(second, [[1, 2, 3], [4, 5, 6]])
        session.run(2)
        session.append_pages(first, [[9, 10, 11], []])
        session.run(2)
        session.collect(wait=True)
        assert (len(first.tokens), len(second.tokens)) == (1, 4)
        session.append_pages(first, [[], [9, 10, 11]])
        finish(session)
        assert [request.tokens for request in (first, second)] == [model.greedy(prompt, 10) for prompt in prompts]
    runtime.close()


@pytest.mark.parametrize(
    ("free", "ahead"), [(128, 256), (127, 64), (32, 64), (31, 16), (8, 16), (7, 8), (2, 8), (1, 4)]
)
def test_requests_have_pages_ahead_as_far_as_half_of_the_free_ones_go(free: int, ahead: int) -> None:
    """One request of pages of four tokens, eight steps a launch; the last two are what these take themselves."""
    pages = SessionPages([KVCacheSpec(1, 1, 8, PAGE)], [PageAllocator(free + 1)], 1, 1000)
    request, limit = np.array([0]), np.array([1000])
    pages.reserve(request, request * 0, limit, 8)
    assert pages.room(request).tolist() == [ahead]
