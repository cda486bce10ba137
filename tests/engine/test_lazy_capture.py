"""Sizes that are captured at their first use: results, state, failures, and what is kept for them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import triton

from graphrt import env
from graphrt.batch import Batch, Request
from graphrt.bundle.bundle import Bundle
from graphrt.cache.groups import kv_groups
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.engine import graphs
from graphrt.kernels.errors import CaptureError, ConfigError, ReplayError
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.kernels.types import TOKEN_FROM_DEVICE
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from graphrt.testing.verify.runtime import verify_runtime
from tests.engine.test_groups_replay import PAIRS
from tests.support.layered import Watch, generate, prompts_of
from tests.support.layered import build as build_layered
from tests.support.toy import LivelyModel, Rig, ToyModel, captured, finish, greedy, make_rig, make_runtime

CPU = torch.device("cpu")
SIZES = {"decode_sizes": (1, 2, 4, 8), "mixed_sizes": (4, 8, 16, 32)}
FIRST = [BatchDescriptor.mixed(32, 8), BatchDescriptor.decode(8)]
NUMBERS_OF_STEPS = {"step_counter", "last_writers", "write_conflicts"}
"""Buffers with numbers of steps: a capture skips one."""


def lazy_rig(device: torch.device, **options: object) -> Rig:
    return make_rig(device, model=options.pop("model", LivelyModel(device)), lazy_capture=True, **SIZES, **options)


def batch(count: int, length: int = 1, at: int = 0) -> Batch:
    """Requests at `at`, ... of `length` tokens; each has a page of 4 tokens."""
    rows = [Request(at + i, [(i + 3 * t) % 50 for t in range(length)], length, (1 + at + i,)) for i in range(count)]
    return Batch.from_requests(rows)


# -- which sizes have a graph


def test_capture_takes_the_largest_size_of_each_kind_and_steps_the_others(device: torch.device) -> None:
    rig = lazy_rig(device)
    manager = rig.manager
    assert list(manager.descriptors) == [g.descriptor for g in manager.stats().graphs] == FIRST
    before = manager.stats().capture_seconds
    with pytest.raises(ConfigError, match=r"descriptor: decode\[2\] is not a captured size"):
        manager.graph(BatchDescriptor.decode(2))
    found = [
        manager.replay(batch(2)).descriptor,
        manager.replay(batch(5)).descriptor,
        manager.replay(batch(2)).descriptor,
    ]
    assert found == [BatchDescriptor.decode(2), BatchDescriptor.decode(8), BatchDescriptor.decode(2)]
    assert manager.replay(batch(2), eager=True).why_eager == "requested by the caller"
    manager.replay(batch(1), eager=True).wait()
    assert BatchDescriptor.decode(1) not in manager.descriptors, "an eager step captures nothing"
    assert manager.compare(batch(1)).equal
    assert manager.replay(Batch.empty(), descriptor=BatchDescriptor.mixed(8, 8)).why_eager == ""
    assert list(manager.descriptors) == [
        FIRST[0], BatchDescriptor.mixed(8, 8), FIRST[1], BatchDescriptor.decode(2), BatchDescriptor.decode(1)
    ]  # fmt: skip
    assert {g.descriptor for g in manager.stats().graphs} == set(manager.descriptors)
    assert manager.stats().capture_seconds > before
    assert not manager.stats().eager_steps
    for size in manager.descriptors:
        manager.audit(size).raise_if_any()


def test_without_graphs_it_has_no_effect(device: torch.device) -> None:
    rig = lazy_rig(device, use_graphs=False)
    assert rig.manager.replay(batch(2)).why_eager == "graphs are switched off (use_graphs=False)"
    assert rig.manager.descriptors == ()


def test_each_size_is_captured_once_and_warmed_up_only_if_its_kind_was_not() -> None:
    rig = make_rig(CPU, lazy_capture=True, capture=False, decode_sizes=(1, 2, 4), mixed_sizes=())
    recorder, done = rig.manager._graphs._recorder, Counter[str]()
    warm_up, capture = recorder.warm_up, recorder.capture
    recorder.warm_up = lambda step, prepare: (done.update([f"warm {step.args[0]}"]), warm_up(step, prepare))[1]
    recorder.capture = lambda step, *rest: (done.update([str(step.args[0])]), capture(step, *rest))[1]
    rig.manager.capture()
    for count in (2, 1, 2, 1, 4):
        rig.manager.replay(batch(count)).wait()
    assert done == {"warm decode[4]": 1, "decode[4]": 1, "decode[2]": 1, "decode[1]": 1}


# -- results and state equal those of graphs that were captured ahead


class Drawing:
    """A sampler that draws from torch's generator."""

    def __call__(self, logits: torch.Tensor, step: Step) -> torch.Tensor:
        return (logits / 20 - torch.rand_like(logits).log().neg().log()).argmax(-1)


class Counting(LivelyModel):
    """Keeps state of its own: how many steps each request index has had."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.register_buffer("steps", torch.zeros(9, dtype=torch.int32, device=device))

    def forward(self, step: Step) -> torch.Tensor:
        real = step.req_indices >= 0
        self.steps.index_add_(0, step.req_indices.where(real, 8).long(), real.int())
        shift = self.steps[step.req_indices.where(real, 8).long()]
        return super().forward(step) + (shift * real)[:, None] % 3


def state_of(runtime: Runtime, random: torch.Generator) -> dict[str, torch.Tensor]:
    """The bits of everything that a step passes to later ones."""
    manager = runtime.manager
    state = dict(manager.buffers.named(BufferKind.PERSISTENT, BufferKind.CARRIED))
    state |= {f"request tensor {name}": t for name, t in manager.request_tables.tensors.items()}
    state |= dict(runtime.kv_cache.named_tensors())
    state |= dict(manager._program.model.named_buffers()) | {"random": random.get_state()}
    state |= {name: t for name, t in manager._backend.tensors().items() if name == "counters"}
    return {
        name: t.contiguous().view(torch.uint8).cpu()
        for name, t in state.items()
        if name not in NUMBERS_OF_STEPS and t.numel()
    }


def serve(runtime: Runtime) -> Iterator[str]:
    """Requests that come and go in a session, with launches in flight; every size is met. Yields after each step."""
    params = [
        SamplingParams(30, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=1),
        SamplingParams(24, temperature=30.0, seed=7, logit_bias={3: 2.0}),
        SamplingParams(9, temperature=8.0, top_k=5, presence_penalty=2.0),
        SamplingParams(26, min_tokens=4, stop_ids=frozenset({11})),
    ]
    prompts = [[3, 1, 4], [2, 7, 1, 8, 2], [9, 9, 8, 7, 6, 5, 4, 3, 2], [*range(20, 40)]]
    with DecodeSession(runtime) as session:
        requests = []
        for prompt, of in zip(prompts, params, strict=True):
            requests.append(session.add(prompt, of))
            for steps in (1, 2, 5):
                session.run(steps)
                yield f"{len(requests)} requests, {steps} steps"
        fork = session.fork(requests[0], seed=5)
        session.set_token_mask(requests[3], [-1, 0x0FFFFFFF])
        session.run(3)
        yield "fork"
        session.release(requests[1])
        session.collect(wait=True)
        finish(session, 4)
        yield " ".join(str(request.tokens) for request in (*session.requests, fork))


@pytest.mark.parametrize("draws", [False, True], ids=["sampler of graphrt", "sampler that draws"])
def test_tokens_and_every_bit_of_state_are_those_of_graphs_captured_ahead(device: torch.device, draws: bool) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # creates the generators
    random = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[0]
    config = {
        "max_num_reqs": 8, "max_num_tokens": 32, **SIZES, "penalties": True, "max_logit_bias": 2, "token_masks": True,
        "max_logprobs": 1, "loop_sizes": () if draws else (2, 4),
    }  # fmt: skip
    runs = []
    for lazy in (False, True):
        runtime = make_runtime(
            device, model=Counting(device), num_pages=90, config=config | {"lazy_capture": lazy},
            **({"sampler": Drawing()} if draws else {}),
        )  # fmt: skip
        for _, tensor in runtime.kv_cache.named_tensors():
            tensor[1:] = float("nan")
        runtime.capture()
        runtime.manager._program.model.steps.zero_()
        runs.append(runtime)
    starts, states = [], []
    for runtime in runs:
        random.manual_seed(3)
        starts.append(state_of(runtime, random))
        states.append([(what, state_of(runtime, random)) for what in serve(runtime)])
    for (what, ahead), (same, late) in zip(*states, strict=True):
        assert what == same
        for name, bits in ahead.items():
            assert torch.equal(bits, late[name]), f"{what}: {name}"
    assert runs[0].stats().replays == runs[1].stats().replays
    assert len(runs[1].manager.descriptors) > 5
    assert not runs[1].stats().eager_steps
    for runtime in runs:
        runtime.close()


@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("warm_up", [False, True], ids=["one run", "two runs"])
def test_a_capture_reads_no_launch_of_the_ring(
    device: torch.device, depth: int, warm_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry holds an old launch: a run of the step that read one would write its tokens again."""
    monkeypatch.setattr(graphs, "is_compiled", lambda model: warm_up)
    rig = lazy_rig(device, ring_depth=depth)
    expected = {count: greedy(rig.model, [count], 6) for count in (7, 9)}
    rig.manager.replay(Batch.from_requests([Request(0, [7], 1, (1, 2)), Request(1, [9], 1, (3, 4))])).wait()
    got: dict[int, list[int]] = {7: [], 9: []}
    for length in range(2, 7):
        handle = rig.manager.replay(Batch.from_requests([Request(0, [TOKEN_FROM_DEVICE], length)]))
        if length > 2:  # new mixed sizes, while the launch above may be in flight
            rig.manager.replay(batch(2, length=length - 1, at=4)).wait()
        got[7] += handle.tokens().tolist()
        got[9] += rig.manager.replay(Batch.from_requests([Request(1, [TOKEN_FROM_DEVICE], length)])).tokens().tolist()
    assert got == {first: tokens[1:] for first, tokens in expected.items()}


def test_layers_that_differ_and_shadow_steps(device: torch.device) -> None:
    """Windows, chunks and groups, with an owner for each page, and every step also run eagerly."""
    for specs in (PAIRS["window_beside_full"], PAIRS["shared_window_beside_full"]):
        model, runtime = build_layered(
            specs, kv_groups(specs, page_size=8), 200, device, lazy_capture=True, shadow_every=1,
            decode_sizes=(1, 2, 4), mixed_sizes=(4, 8, 16),
        )  # fmt: skip
        Watch(runtime)
        prompts = prompts_of([3, 9, 1, 14, 6], seed=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            tokens = generate(runtime, prompts, [12] * 5)
            runtime.stats()
        for prompt, answer in zip(prompts, tokens, strict=True):
            want = model.greedy(prompt, len(answer))
            assert answer == want or not model.is_decided(prompt, want)
        assert not runtime.stats().eager_steps
        runtime.close()


def test_verify_captures_what_it_runs(device: torch.device) -> None:
    rig = lazy_rig(device, fill=0.0)
    report = verify_runtime(rig.manager, [batch(2), batch(1), batch(3), batch(2, 2)])
    report.raise_if_any()
    assert {BatchDescriptor.decode(n) for n in (1, 2, 4)} <= set(rig.manager.descriptors)


def test_a_bundle_is_opened_with_graphs_of_its_launches(device: torch.device) -> None:
    rig = lazy_rig(device, fill=0.0)
    recording = rig.manager.record(2)
    tokens = [rig.manager.replay(batch(count)).tokens().tolist() for count in (3, 1)]
    assert rig.manager.descriptors == (*FIRST, BatchDescriptor.decode(4), BatchDescriptor.decode(1))
    with Bundle.of(recording).open(rig.model, device=device) as replays:
        assert replays.manager.descriptors == (BatchDescriptor.decode(4), BatchDescriptor.decode(1))
        for index in (0, 1):
            found = replays.run(index)
            assert found.difference is None
            assert found.tokens_equal
            assert found.tokens[0].tolist() == tokens[index]


# -- captures that fail


class Reads(LivelyModel):
    """Reads a tensor on the host in steps of two requests."""

    def forward(self, step: Step) -> torch.Tensor:
        logits = super().forward(step)
        if step.descriptor.padded_reqs == 2:
            assert float(logits[0, 0]) == float(logits[0, 0])
        return logits


def failing(rig: Rig, name: str, error: BaseException) -> Counter[str]:
    """Let a call of the recorder fail for steps of two requests. Returns how often it was called."""
    recorder, calls = rig.manager._graphs._recorder, Counter[str]()
    real = getattr(recorder, name)

    def call(step: Callable, *rest: object) -> object:
        size = str(step.report.descriptor if name == "loop" else step.args[0])
        calls[size] += 1
        if size == "decode[2]":
            if name == "capture":  # after a run, whose results must not appear anywhere
                rest[1]()
                step()
            raise error
        return real(step, *rest)

    setattr(recorder, name, call)
    return calls


FAILURES = {
    "op": None,
    "memory": ("capture", torch.OutOfMemoryError("CUDA out of memory")),
    "random": ("capture", RuntimeError("Offset increment outside graph capture encountered unexpectedly")),
    "loop": ("loop", CaptureError("decode[2]: the step cannot be looped")),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_size_whose_capture_fails_runs_eagerly(device: torch.device, failure: str) -> None:
    config = {"max_num_reqs": 8, "max_num_tokens": 32, "loop_sizes": (1, 2, 4), **SIZES, "lazy_capture": True}
    model = Reads(device) if failure == "op" else LivelyModel(device)
    runtime = captured(model, device, **config)
    calls = Counter[str]()
    if (how := FAILURES[failure]) is not None:
        calls = failing(Rig(model, runtime.manager, runtime.allocator, 4), *how)
    prompts, requests = [[3, 1, 4], [2, 7, 1], [9], [8, 8]], []
    with DecodeSession(runtime) as session:
        for prompt in prompts:  # one request, then two, ...
            requests.append(session.add(prompt, SamplingParams(20)))
            session.run(3)
        finish(session)
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.tokens == greedy(model, prompt, 20)
    stats = runtime.stats()
    (reason,) = stats.eager_steps
    assert reason.startswith("decode[2]: capture at first use failed: ")
    assert ("CaptureError" if how is None else str(how[1])) in reason
    assert stats.eager_steps[reason] > 2
    assert how is None or calls["decode[2]"] == 1, "not tried again"
    assert BatchDescriptor.decode(2) not in runtime.manager.descriptors
    assert {BatchDescriptor.decode(1), BatchDescriptor.decode(4)} <= set(runtime.manager.descriptors)
    with pytest.raises(ReplayError, match=r"compare: this batch has no graph \(decode\[2\]: capture at first use"):
        runtime.compare(batch(2))
    runtime.close()


def test_a_size_interrupted_before_its_loop_keeps_its_graph() -> None:
    runtime = captured(max_num_reqs=4, loop_sizes=(2,), lazy_capture=True)
    rig = Rig(runtime.manager._program.model, runtime.manager, runtime.allocator, 4)
    loop = runtime.manager._graphs._recorder.loop
    failing(rig, "loop", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.manager.replay(batch(2))
    graph = rig.manager.graph(BatchDescriptor.decode(2))
    runtime.manager._graphs._recorder.loop = loop
    assert rig.manager.replay(batch(2)).why_eager == ""
    assert rig.manager.graph(BatchDescriptor.decode(2)) is graph
    assert rig.manager._graphs.can_loop(BatchDescriptor.decode(2))


def test_a_weight_that_moved_is_not_captured() -> None:
    rig = lazy_rig(CPU)
    rig.manager.replay(batch(5)).wait()
    rig.model.out[1].data = rig.model.out[1].data.clone()  # not the first to be checked in turn
    for count in (2, 1, 2):
        with pytest.raises(ReplayError, match=r"out\.1: expected at address"):
            rig.manager.replay(batch(count))
    assert list(rig.manager.descriptors) == FIRST


def test_memory_and_kernels_of_late_graphs_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)  # the lock raises
    rig = lazy_rig(CPU, capture=False)
    recorder = rig.manager._graphs._recorder
    recorder.pool_bytes = lambda: 100 * len(rig.manager._graphs._graphs) + extra
    extra = 0
    rig.manager.capture()
    loads, capture = triton.knobs.runtime.kernel_load_end_hook, recorder.capture
    recorder.capture = lambda *given: (loads(None, None, "k", {}, "digest"), capture(*given))[1]
    for count in (2, 1, 2):
        rig.manager.replay(batch(count)).wait()
    assert not rig.manager.stats().late_bytes
    assert rig.manager.stats().late_kernels == {"k (outside the graphs)": 2}
    extra = 7
    with pytest.raises(ReplayError, match="graph pool: expected 400 bytes as after"):
        rig.manager.replay(batch(4))
    assert rig.manager.stats().late_bytes == {"graph pool": 7}


def test_logits_and_handles_of_earlier_steps(device: torch.device) -> None:
    """A handle polls its own step number: the runs of a capture must not answer for it."""
    rig = lazy_rig(device, model=ToyModel(device, torch.float32))
    first = rig.manager.replay(batch(5))
    logits = first.logits(copy=True)
    second = rig.manager.replay(batch(2))
    assert second.step > first.step
    torch.testing.assert_close(second.logits(copy=True), logits[:2])
    assert first.tokens()[:2].tolist() == second.tokens().tolist()
    assert second.num_arrived == 1
