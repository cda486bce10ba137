"""Runtime: sizing of the cache, and close."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.kv_cache import KVCache
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.config import RuntimeConfig
from graphrt.engine.lifecycle import State
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import CaptureError, ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.runtime import Runtime, resolve_device
from graphrt.sampling_params import SamplingParams
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.engine.test_modes import MODES
from tests.support.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, LivelyModel, ToyModel, greedy, make_runtime

MIB = 1 << 20


def build(
    device: torch.device, *, max_seq_len: int = 64, head_dim: int = HEAD_DIM, config: dict | None = None, **options
) -> Runtime:
    dtype = torch.float32
    return Runtime(
        ToyModel(device, dtype, head_dim),
        AttentionSpec(HEADS, KV_HEADS, head_dim, dtype),
        KVCacheSpec(LAYERS, KV_HEADS, head_dim, 16, KVLayout.HND, dtype),
        vocab_size=VOCAB,
        device=device,
        config=RuntimeConfig(max_num_reqs=4, max_num_tokens=16, max_seq_len=max_seq_len, **(config or {})),
        **options,
    )


def test_auto_allocates_at_most_the_usable_pages(device: torch.device) -> None:
    runtime = build(device)
    assert runtime.kv_cache.num_pages == 1 + 4 * 4
    assert runtime.allocator.num_free == 16
    runtime.capture()
    pages = runtime.allocator.allocate(1)
    batch = Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=pages)
    assert int(runtime.replay(batch).tokens()[0]) == int(runtime.manager._program.model.oracle([3]).argmax())
    runtime.close()


@pytest.mark.parametrize(
    ("name", "text"), [("meta", "the meta device cannot compute"), ("quantum", "quantum"), ("cuda:77", "cuda:77")]
)
def test_missing_devices_raise(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_device(name)


CPU = torch.device("cpu")
SPEC = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)


def one_row(page: int) -> Batch:
    return Batch(req_indices=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=[page])


def assert_right(runtime: Runtime, model: ToyModel, page: int) -> None:
    want = model.oracle([3])
    handle = runtime.replay(one_row(page))
    assert (handle.logits()[0].double().cpu() - want).abs().max() < 2e-4
    assert handle.tokens().tolist() == [int(want.argmax())]


CLOSED = {
    "manager": lambda r: r.manager,
    "kv_cache": lambda r: r.kv_cache,
    "capture": lambda r: r.capture(),
    "replay": lambda r: r.replay(one_row(5)),
    "with": lambda r: r.__enter__(),
}


def test_calls_after_close_raise(device: torch.device) -> None:
    runtime = make_runtime(device)
    assert runtime.state is State.NEW
    with pytest.raises(CaptureError, match="call capture"):
        runtime.replay(one_row(5))
    runtime.capture()
    handle, manager = runtime.replay(one_row(5)), runtime.manager
    with pytest.raises(CaptureError, match="forget_cache: expected state 'closed', got 'captured'"):
        manager.forget_cache()
    held = [weakref.ref(runtime.kv_cache), weakref.ref(runtime.kv_cache.k[0])]
    runtime.close()
    runtime.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None], "also while a manager and a handle are referenced"
    with pytest.raises(CaptureError, match=r"kv_cache: freed by close\(\) of the runtime"):
        _ = manager.kv_cache
    for name, call in CLOSED.items():
        with pytest.raises(CaptureError, match=f"{name}: this runtime was closed"):
            call(runtime)
    assert runtime.state is State.CLOSED
    assert (runtime.stats().real_tokens, sum(runtime.stats().replays.values())) == (1, 1)
    assert handle.tokens().tolist() == greedy(LivelyModel(CPU), [3], 1)
    assert (runtime.vocab_size, runtime.samples, runtime.device) == (VOCAB, True, device)
    assert runtime.config.max_num_reqs == len(runtime.free_req_indices) == 4
    assert runtime.allocator.num_free == runtime.memory_plan.num_pages - 1
    never_captured = make_runtime(device)
    never_captured.close()
    assert (never_captured.state, never_captured.stats().real_tokens) == (State.CLOSED, 0)


def test_a_with_block_closes(device: torch.device) -> None:
    model = ToyModel(device, torch.float32)
    with make_runtime(device, model=model) as runtime:
        runtime.capture()
        assert_right(runtime, model, 5)
    assert runtime.state is State.CLOSED
    with pytest.raises(KeyError), make_runtime(device) as failed:
        raise KeyError("of the caller")
    assert failed.state is State.CLOSED


def test_page_0_is_allocated_if_the_null_page_is_the_last(device: torch.device) -> None:
    """With a cache of automatic size and of a given size. The last page is then a fault, as page 0 is otherwise."""
    model = ToyModel(device, torch.float32)
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32, null_page="last")
    for num_pages, last in (("auto", 4 * 16), (7, 6)):
        with make_runtime(device, model=model, kv_spec=spec, num_pages=num_pages) as runtime:
            for tensor in (*runtime.kv_cache.k, *runtime.kv_cache.v):
                tensor.fill_(float("nan"))
            runtime.capture()
            assert runtime.kv_cache.groups[0].null_page == last
            assert runtime.kv_cache.num_pages == last + 1
            assert_right(runtime, model, 0)
            (fault,) = runtime.replay(one_row(last)).faults
            assert (fault.code.name, fault.value) == ("PAGE_OUT_OF_RANGE", last)
            pages = runtime.allocator.allocate(last)
            assert sorted(pages) == list(range(last))


@pytest.mark.parametrize("num_pages", ["auto", 9])
def test_allocate_kv_may_return_the_callers_tensors(device: torch.device, num_pages: int | str) -> None:
    """graphrt computes the number of pages, and close leaves the tensors intact."""
    made: list[KVCache] = []

    def allocate(groups: tuple[KVCacheSpec, ...], pages: tuple[int, ...], where: torch.device) -> KVCache:
        (spec,), (count,) = groups, pages
        pool = torch.zeros(LAYERS, count, 2, spec.page_size, KV_HEADS, HEAD_DIM, device=where)
        made.append(KVCache(groups, list(pool[:, :, 0]), list(pool[:, :, 1])))
        return made[-1]

    model = ToyModel(device, torch.float32)
    runtime = make_runtime(device, model=model, num_pages=num_pages, allocate_kv=allocate)
    assert runtime.kv_cache is made[-1]
    assert runtime.kv_cache.num_pages == (9 if num_pages == 9 else 1 + 4 * 16)
    runtime.capture()
    assert_right(runtime, model, 5)
    runtime.close()
    assert made[-1].k[0][5, 0].abs().max() > 0


def test_moved_weight_of_a_function_model_raises(device: torch.device) -> None:
    """Weights may be given as a generator."""
    module = ToyModel(device, torch.float32)
    runtime = make_runtime(device, model=lambda step: module(step), weights=module.named_parameters())
    runtime.capture()
    assert_right(runtime, module, 5)
    module.where.data = module.where.data.clone()
    with pytest.raises(RuntimeError, match="where: expected at address"):
        _ = [runtime.replay(one_row(5)).tokens() for _ in range(runtime.manager._guards.num_turns)]


WRONG: dict[str, tuple[dict, str]] = {
    "model": ({"model": "abc"}, "model: expected a callable, got 'abc'"),
    "sampler": ({"sampler": "abc"}, "sampler: expected a callable, got 'abc'"),
    "stream": ({"stream": "abc"}, "stream: expected .* got 'abc'"),
    "config": ({"config": "abc"}, "config: expected RuntimeConfig, got 'abc'"),
    "kv_spec": ({"kv_spec": "abc"}, "groups: expected a list or tuple of KVCacheSpec per KV group, got 'abc'"),
    "kv_spec-item": ({"kv_spec": [SPEC, None]}, r"groups\[1\]: expected KVCacheSpec, got None"),
    "kv_spec-none": ({"kv_spec": ()}, "attention: one spec for all layers needs a cache with layers"),
    "attention": ({"attention": "abc"}, "attention: expected a list or tuple of AttentionSpec"),
    "attention-none": ({"attention": None}, "attention: required, because the model has no graphrt"),
    "attention-count": (
        {"attention": [AttentionSpec(4, 2, 16, torch.float32)]},
        "attention: expected 2 layers with their own KV, as in the cache, got 1 among 1",
    ),
    "group": ({"group": -100}, "group: expected ProcessGroup, got -100"),
    "vocab": ({"vocab_size": 61.0}, "vocab_size: expected an int from 1 to 1048576, got 61.0"),
    "pages": ({"num_pages": 1.5}, 'num_pages: expected an int from 2 to 2147483647, got 1.5; or pass "auto"'),
    "pages-of-pools": ({"num_pages": [5, 6]}, r"num_pages: expected one int, or a sequence of 1, one per pool"),
    "pages-of-pools-item": ({"num_pages": ["5"]}, "num_pages: expected an int from 2 .* got '5'"),
    "share-above": ({"memory_utilization": 1.5}, r"memory_utilization: expected a finite number from .* to 1, got 1.5"),
    "share-zero": ({"memory_utilization": 0.0}, r"memory_utilization: expected a finite number from .* to 1, got 0.0"),
    "share": ({"memory_utilization": "x"}, r"memory_utilization: expected a finite number from .* to 1, got 'x'"),
    "device": ({"device": 0}, "device: expected cpu, cuda or cuda:N, got 0"),
    "allocate": ({"allocate_kv": 3}, "allocate_kv: expected a callable, got 3"),
    "allocate-none": ({"allocate_kv": lambda *_: None}, "allocate_kv: expected KVCache, got None; return a KVCache"),
    "allocate-pages": (
        {"allocate_kv": lambda s, n, d: KVCache.allocate(s, n[0] + 1, d), "num_pages": 5},
        r"allocate_kv: expected a cache with pool_pages \(5,\), got \(6,\)",
    ),
    "allocate-spec": (
        {"allocate_kv": lambda s, n, d: KVCache.allocate(KVCacheSpec(2, 2, 16, 8), n, d)},
        "allocate_kv: expected a cache with groups .*page_size=4.*, got .*page_size=8",
    ),
    "allocate-device": (
        {"allocate_kv": lambda s, n, d: KVCache.allocate(s, n, "meta")},
        "allocate_kv: expected a cache with device cpu, got meta",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_raise(case: str) -> None:
    changes, text = WRONG[case]
    arguments = {
        "model": ToyModel(CPU, torch.float32),
        "attention": AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, torch.float32),
        "kv_spec": SPEC,
        "vocab_size": VOCAB,
        "device": "cpu",
        "config": RuntimeConfig(max_num_reqs=2, max_num_tokens=8, max_seq_len=16),
    }
    with pytest.raises(ConfigError, match=text):
        Runtime(**(arguments | changes))


@pytest.mark.parametrize("mode", ["inference", "device", "dtype"])
def test_runtime_built_in_a_torch_mode(mode: str) -> None:
    """Steps run outside of the mode, and the other way round."""
    model = ToyModel(CPU, torch.float32)
    with MODES[mode]():
        runtime = make_runtime(CPU, model=model)
    assert not any(tensor.is_inference() for tensor in (*runtime.kv_cache.k, *runtime.kv_cache.v))
    assert {tensor.device for tensor in (*runtime.kv_cache.k, *runtime.kv_cache.v)} == {CPU}
    runtime.capture()
    assert_right(runtime, model, 5)
    with MODES[mode]():
        handle = runtime.replay(one_row(6))
    assert handle.tokens().tolist() == [int(model.oracle([3]).argmax())]
    events = TextGenerator(runtime).generate([np.array([5, 6, 7])], SamplingParams(4))
    assert [event.token for event in events] == greedy(model, [5, 6, 7], 4)
    runtime.close()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("lazy", [False, True], ids=["captured ahead", "captured at first use"])
def test_auto_predicts_free_memory_within_256_mib(lazy: bool) -> None:
    """With a cache bounded by memory, not by use."""
    device = torch.device("cuda", 0)
    build(device).close()
    free, total = torch.cuda.mem_get_info(device)
    config = {"decode_sizes": (1, 2, 4), "loop_sizes": (1, 2), "mixed_sizes": (8, 16), "lazy_capture": lazy}
    share = 1 - (free - (6 << 30)) / total
    runtime = build(device, max_seq_len=1 << 24, head_dim=64, memory_utilization=share, config=config)
    runtime.capture()
    plan = runtime.memory_plan
    if lazy:
        for size in (BatchDescriptor.mixed(8, 4), *(BatchDescriptor.decode(n) for n in (1, 2))):
            assert runtime.replay(Batch.empty(), descriptor=size).why_eager == ""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        plan = replace(plan, actual_free=torch.cuda.mem_get_info(device)[0])
    assert plan.num_pages < 1 + 4 * (1 << 20), "bounded by memory"
    assert plan.kv_bytes > 3 << 30
    assert abs(plan.actual_free - plan.predicted_free) < 256 * MIB, plan
    assert plan.actual_free >= plan.reserved - 256 * MIB, plan
    before = torch.cuda.memory_allocated()
    runtime.close()
    del runtime
    gc.collect()
    assert torch.cuda.memory_allocated() < before - plan.kv_bytes + MIB
