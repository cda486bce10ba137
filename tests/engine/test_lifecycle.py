"""What each call of a manager and a runtime hands on, in which order; and what each end lets go of."""

from __future__ import annotations

import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

from graphrt import runtime
from graphrt.backends import registry
from graphrt.backends.torch_reference import TorchReferenceBackend
from graphrt.batch import Batch
from graphrt.cache.kv_cache import KVCache
from graphrt.capture import recorder
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.config import RuntimeConfig
from graphrt.engine import lifecycle as entry
from graphrt.kernels.checks import check_device
from graphrt.kernels.errors import CaptureError, ConfigError
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.kernels.ops.sampling import MAX_VOCAB_SIZE
from graphrt.kernels.types import RequestStatus
from graphrt.replay import ReplayManager
from graphrt.spec import AttentionSpec, KVCacheSpec
from graphrt.step import Step
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, ToyModel, greedy, make_rig, make_runtime

CPU = torch.device("cpu")
CUDA_1 = torch.device("cuda", 1)


def one(page: int = 5, token: int = 3) -> Batch:
    return Batch(req_indices=[0], seq_lens=[1], tokens=[token], page_indptr=[0, 1], page_ids=[page])


def gone(*references: weakref.ref) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


# -- the verbs of a backend


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a backend of the name "recording" is asked to do."""
    called: list[str] = []

    class Recording(TorchReferenceBackend):
        name = "recording"

    def recorded(verb: str):
        def call(self, *args, **kwargs):
            called.append(verb)
            # What `reset` changes is made outside of inference mode; steps run in it.
            assert torch.is_inference_mode_enabled() == (verb not in ("allocate", "reset", "close"))
            return getattr(super(Recording, self), verb)(*args, **kwargs)

        return call

    for verb in ("allocate", "plan_capture", "plan_replay", "schedule", "run", "reset", "close"):
        setattr(Recording, verb, recorded(verb))
    monkeypatch.setitem(registry._registered, "recording", Recording)
    return called


def test_the_verbs_of_each_call(verbs: list[str]) -> None:
    rig = make_rig(CPU, backend="recording", capture=False, decode_sizes=(1, 2), mixed_sizes=())
    step = ["schedule", *["run"] * LAYERS]
    for call, expected in (
        (rig.manager.capture, ["allocate", *["plan_capture", *step] * 3]),  # a warm-up, and two sizes
        (lambda: rig.manager.replay(one()), ["plan_replay"]),
        (lambda: rig.manager.replay(one(), eager=True), ["plan_capture", "plan_replay", *step]),
        (lambda: rig.manager.compare(one()), ["plan_replay", "plan_capture", "plan_replay", *step]),
        (rig.manager.reset, ["reset"]),
        (rig.manager.close, ["close"]),
        (rig.manager.close, []),
    ):
        verbs.clear()
        call()
        assert verbs == expected


def test_the_largest_size_of_each_kind_is_warmed_up_before_it_is_captured() -> None:
    rig = make_rig(CPU, capture=False, decode_sizes=(1, 2), mixed_sizes=(16, 32))
    recorder, order = rig.manager._graphs._recorder, []
    warm_up, capture = recorder.warm_up, recorder.capture

    def size_of(step) -> str:
        return str(step.args[0])

    recorder.warm_up = lambda step, prepare: (order.append(f"warm {size_of(step)}"), warm_up(step, prepare))[1]
    recorder.capture = lambda step, *rest: (order.append(size_of(step)), capture(step, *rest))[1]
    recorder.close = lambda: order.append("close")
    rig.manager.capture()
    rig.manager.close()
    mixed, decode = ["mixed[32 tokens, 8]", "mixed[16 tokens, 8]"], ["decode[2]", "decode[1]"]
    assert order == [f"warm {mixed[0]}", *mixed, f"warm {decode[0]}", *decode, "close"]


def test_a_capture_that_failed_at_a_later_size_is_made_again(device: torch.device) -> None:
    """The graphs before it are dropped, and with the last of them the memory pool that torch had for them."""

    class Failing(ToyModel):
        broken = True

        def forward(self, step: Step) -> torch.Tensor:
            if self.broken and step.descriptor.padded_reqs == 1:
                raise ZeroDivisionError
            return super().forward(step)

    model = Failing(device, torch.float32)
    rig = make_rig(device, model=model, capture=False, decode_sizes=(1, 2), mixed_sizes=())
    for _ in range(2):
        with pytest.raises((CaptureError, ZeroDivisionError)):
            rig.manager.capture()
    with pytest.raises(CaptureError, match="expected state 'captured', got 'new'; call capture"):
        rig.manager.reset()
    model.broken = False
    rig.manager.capture()
    with pytest.raises(CaptureError, match="capture: expected state 'new', got 'captured'"):
        rig.manager.capture()
    assert rig.manager.replay(one()).tokens().tolist() == greedy(model, [3], 1)


# -- what a manager is built from


def test_buffers_have_the_extents_of_the_configuration_and_hold_pads() -> None:
    sizes = {"max_num_reqs": 3, "max_num_tokens": 7, "max_seq_len": 50, "ring_depth": 6}
    rig = make_rig(CPU, num_pages=11, decode_sizes=(), mixed_sizes=(), **sizes)
    shapes = {name: list(tensor.shape) for name, tensor in rig.manager.buffers.named()}
    assert shapes["input_ids"] == [7]
    assert shapes["block_table"] == shapes["page_table"] == [1, 3, 13], "50 tokens in pages of 4"
    assert shapes["query_start_loc"] == [4]
    assert (shapes["last_token"], shapes["last_writers"]) == ([3], [11 + 3])
    assert (shapes["token_ring"], shapes["step_ring"], shapes["input_ring"][0]) == ([6 * 64, 1, 3], [6 * 64], 6)
    assert shapes["inputs"] == [8 + 3 * 21 + 7 + 3 * 13]
    buffers = make_rig(CPU).manager.buffers
    assert buffers.slot_mapping.unique().tolist() == buffers.req_indices.unique().tolist() == [-1]
    assert buffers.req_status.unique().tolist() == [int(RequestStatus.PAD)]


def test_the_largest_vocabulary() -> None:
    cache = KVCache.allocate(KVCacheSpec(1, 1, 16, 4, dtype=torch.float32), 2, CPU)
    spec = AttentionSpec(1, 1, 16, torch.float32)
    for options, most in (({}, MAX_VOCAB_SIZE), ({"sampler": None}, 2**31 - 1)):
        options |= {"config": RuntimeConfig(4)}
        ReplayManager(lambda step: None, cache, spec, vocab_size=most, **options)
        with pytest.raises(ConfigError, match=f"vocab_size: expected an int from 1 to {most}, got {most + 1}"):
            ReplayManager(lambda step: None, cache, spec, vocab_size=most + 1, **options)


# -- calls of a runtime reach its manager


def test_a_runtime_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    class Spy(ReplayManager):
        def __init__(self, model, kv_cache, attention, **options) -> None:
            given.update(options, model=model, attention=attention, groups=kv_cache.groups)
            super().__init__(model, kv_cache, attention, **(options | {"stream": None}))

    monkeypatch.setattr(runtime, "ReplayManager", Spy)
    model, stream, sampler = ToyModel(CPU, torch.float32), object(), lambda logits, step: logits.argmax(-1)
    named = [("a", torch.ones(1))]
    made = make_runtime(CPU, model=model, stream=stream, sampler=sampler, weights=named, num_pages=7)
    assert given == {
        "model": model, "attention": AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32), "stream": stream,
        "sampler": sampler, "weights": tuple(named), "vocab_size": VOCAB, "config": made.config,
        "groups": made.kv_cache.groups, "proposer": None, "group": None,
    }  # fmt: skip
    assert made.vocab_size == VOCAB


def test_a_runtime_hands_on_how_a_step_is_to_run() -> None:
    made = make_runtime(CPU)
    reports = []
    made.capture(reports.append)
    assert [report.descriptor for report in reports] == list(made.manager.descriptors)
    assert reports
    assert made.replay(one()).why_eager == ""
    assert made.replay(one(), eager=True).why_eager == "requested by the caller"
    assert made.manager.descriptors[0].kind is GraphKind.MIXED
    for descriptor in (BatchDescriptor.decode(1), BatchDescriptor.decode(4), made.manager.descriptors[0]):
        assert made.replay(one(), descriptor=descriptor).descriptor == descriptor
        assert made.compare(one(), descriptor=descriptor).descriptor == descriptor
    before = made.replay(one()).step
    assert made.compare(one()).descriptor == BatchDescriptor.decode(1)
    assert made.replay(one()).step == before + 3, "a comparison takes two numbers, and none of them twice"
    made.manager.queue._ring.waits = 2
    assert made.stats().ring_waits == 2


# -- the ends


@pytest.mark.parametrize("last", ["replay", "eager", "compare"])
def test_close_lets_go_of_the_logits(last: str) -> None:
    """Of those that a model returned eagerly, and of those that graphs hold; a comparison keeps none from the start."""
    logits: list[weakref.ref] = []

    def model(step) -> torch.Tensor:
        made = toy(step)
        logits.append(weakref.ref(made))
        return made

    toy = ToyModel(CPU, torch.float32)
    rig = make_rig(CPU, model=model)
    logits.clear()
    if last == "compare":
        rig.manager.compare(one())
        assert len(logits) == 1
        assert gone(*logits)
    else:
        rig.manager.replay(one(), eager=last == "eager")
    held = [weakref.ref(rig.manager.queue._logits), *logits]
    assert not gone(held[0])
    rig.manager.close()
    nothing = last == "compare"  # what stands there is the one empty tensor for all
    assert gone(*held[nothing:])


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
def test_close_lets_go_of_buffers_graphs_and_weights(read: bool) -> None:
    """Though the caller keeps the manager, a handle and the counters; results are still there."""
    rig = make_rig(CPU, capture=False)
    manager = rig.manager
    manager.capture()
    handle, stats = manager.replay(one()), manager.stats()
    if read:
        handle.wait()
    slot = manager.queue._ring.acquire(3)
    watched = [weakref.ref(tensor) for _, tensor in manager.buffers.named()]
    watched += [weakref.ref(slot.inputs_tensor), *map(weakref.ref, rig.model.parameters())]
    watched += [weakref.ref(graph) for graph in manager._graphs._graphs.values()]
    manager.queue._ring.waits = 3
    del slot
    rig.model = None
    manager.close()
    assert gone(*watched)
    assert len(handle.tokens()) == 1
    assert stats.ring_waits == 3, "close() counts for the last time"


def test_reset_keeps_the_results_of_steps_in_flight() -> None:
    rig = make_rig(CPU)
    before, handle = rig.manager.replay(one()).tokens().tolist(), rig.manager.replay(one())
    rig.manager.reset()
    assert handle.tokens().tolist() == before
    for name, spec in rig.manager.buffers.specs().items():
        if spec.kind is BufferKind.CONSTANT:
            assert getattr(rig.manager.buffers, name).tolist() == [[4, 80, 0, 16, 0, 0, 0, 0]], (
                "not reset, as constants are"
            )
            continue
        assert (getattr(rig.manager.buffers, name) == spec.initial).all(), name


def test_a_comparison_restores_the_first_slot_of_the_cache() -> None:
    """Slot 0 is a slot like others where the null page is the last."""
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32, null_page="last")
    made = make_runtime(CPU, kv_spec=spec, num_pages=9)
    made.capture()
    assert made.compare(one(page=0)).equal
    assert [int(tensor.count_nonzero()) for tensor in (*made.kv_cache.k, *made.kv_cache.v)] == [0] * 2 * LAYERS
    made.replay(one(page=0)).wait()
    assert made.kv_cache.k[0][0, 0].count_nonzero()


# -- CUDA devices, without one


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


def test_the_stream_of_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The given one, if it is of the cache's device; else the current one there."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    own = Stream(CUDA_1)
    assert entry.stream_on(CUDA_1, None) == ("current", CUDA_1)
    assert entry.stream_on(CUDA_1, own) is own
    assert entry.stream_on(CPU, None) is None
    for device, stream, text in (
        (
            CUDA_1,
            Stream(torch.device("cuda", 0)),
            "expected a stream on cuda:1, the device of the cache, got one on cuda:0",
        ),
        (CUDA_1, SimpleNamespace(device=CUDA_1), "expected Stream, got"),
        (CPU, own, "expected None with a cache on cpu"),
    ):
        with pytest.raises(ConfigError, match=f"stream: {text}"):
            entry.stream_on(device, stream)


def test_cuda_without_a_number_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert check_device("cuda") == CUDA_1
    assert check_device("cuda:0") == torch.device("cuda", 0)
    assert check_device(CUDA_1) == CUDA_1
    with pytest.raises(ConfigError, match="device: expected one of 2 CUDA devices, got 'cuda:2'"):
        check_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device: expected one of 0 CUDA devices, got 'cuda'"):
        check_device("cuda")


# -- runtimes that are dropped without close()


def test_a_runtime_that_is_dropped_warns() -> None:
    with pytest.warns(ResourceWarning, match="Runtime: dropped without close"):
        make_runtime(CPU, num_pages=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = make_runtime(CPU, num_pages=9)
        made.close()
        del made


def test_a_recorder_leaves_its_stream_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is dropped: cuBLAS keeps a workspace per stream, 32 MiB on an H100."""
    made: list[object] = []
    idle: dict[torch.device, list[object]] = {CPU: []}

    def own_stream(device: torch.device) -> object:
        stream = idle[device].pop() if idle[device] else object()
        made.append(stream)
        return stream

    monkeypatch.setattr(recorder, "_idle_streams", idle)
    monkeypatch.setattr(recorder, "_own_stream", own_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    for way in ("close", "drop", "close twice"):
        one_of_them = recorder.CudaGraphRecorder(CPU)
        for _ in range({"close": 1, "drop": 0, "close twice": 2}[way]):
            one_of_them.close()
        del one_of_them
        assert idle[CPU] == made[:1], way


@pytest.mark.gpu
@pytest.mark.alone
def test_runtimes_that_are_dropped_keep_no_device_memory() -> None:
    device = torch.device("cuda")

    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def dropped() -> None:
        made = make_runtime(device, num_pages=9)
        made.capture()
        made.replay(one()).wait()

    for _ in range(3):
        dropped()
    before = used()
    for _ in range(20):
        dropped()
    assert used() - before < 32 << 20, "the workspace of one stream"
