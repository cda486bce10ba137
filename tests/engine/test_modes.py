"""Modes of torch that are active in the caller, and concurrent calls, change no result."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.kv_cache import KVCache
from graphrt.kernels.errors import CaptureError, ReplayError
from graphrt.replay import ReplayManager
from graphrt.spec import KVCacheSpec
from tests.support.steps import decode, prompt
from tests.support.toy import HEAD_DIM, KV_HEADS, LAYERS, ToyModel, make_rig


@contextlib.contextmanager
def default(name: str, value: object, before: object):
    """A default device or dtype of torch."""
    getattr(torch, f"set_default_{name}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_default_{name}")(before)


MODES = {
    "none": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device": lambda: default("device", "meta", None),
    "dtype": lambda: default("dtype", torch.float64, torch.float32),
}


def caches(device: torch.device) -> KVCache:
    """KV tensors of the caller, made in its mode."""
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=torch.float32)
    k, v = torch.zeros(2, LAYERS, 20, 4, KV_HEADS, HEAD_DIM, dtype=torch.float32, device=device)
    return KVCache(spec, list(k), list(v))


def steps(manager: ReplayManager) -> list[int]:
    """Prompt and outputs of a few steps, and the other calls of a manager, all in the caller's mode."""
    tokens = [3, 4, 5]
    handle = manager.replay(prompt(*tokens, pages=(7, 8)))
    tokens.append(int(handle.tokens()[0]))
    handle.logits().add_(1)  # an ordinary tensor, to do with what one likes
    for eager in (False, True):
        tokens.append(int(manager.replay(decode(len(tokens), pages=(7, 8)), eager=eager).tokens()[0]))
    assert manager.compare(decode(6, pages=(7, 8))).equal
    manager.kv_cache.copy_pages([7], [9])
    manager.reset()
    return tokens


def assert_greedy(model: ToyModel, tokens: list[int]) -> None:
    for end in (3, 4, 5):
        assert int(model.oracle(tokens[:end]).argmax()) == tokens[end]


@pytest.mark.parametrize("built", MODES)
@pytest.mark.parametrize("used", ["none", "inference", "device"])
def test_torch_modes_change_nothing(device: torch.device, built: str, used: str) -> None:
    model = ToyModel(device, torch.float32)
    with MODES[built]():
        manager = make_rig(device, model=model, cache=caches(device), max_num_reqs=2, decode_sizes=(1, 2)).manager
    with MODES[used]():
        found = steps(manager)
    assert_greedy(model, found)
    assert_greedy(model, steps(manager))
    with MODES[built]():
        manager.close()


@pytest.mark.parametrize("mode", MODES)
def test_capture_in_a_mode_and_replay_outside(device: torch.device, mode: str) -> None:
    rig = make_rig(device, capture=False)
    with MODES[mode]():
        rig.manager.capture()
    assert_greedy(rig.model, steps(rig.manager))


@pytest.mark.parametrize("when", ["replay", "eager step", "capture"])
def test_autocast_changes_no_logits(device: torch.device, when: str) -> None:
    rig = make_rig(device, capture=False, use_graphs=when != "eager step")
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=when == "capture"):
        rig.manager.capture()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=when != "capture"):
        handle = rig.manager.replay(prompt(5, pages=(4,)))
        logits = handle.logits(copy=True)
    assert (logits[0].double().cpu() - rig.model.oracle([5])).abs().max() < 2e-4


def test_concurrent_call_raises(device: torch.device) -> None:
    """A call from a second thread during a step raises, and the step is correct."""
    inside, go_on = threading.Event(), threading.Event()
    waiting = [False]

    def sampler(logits, step):
        if waiting[0]:
            inside.set()
            assert go_on.wait(60)
        return logits.argmax(-1)

    rig = make_rig(device, use_graphs=False, sampler=sampler)
    batch = prompt(5, pages=(4,))
    results: list[object] = []
    earlier = rig.manager.replay(batch)
    waiting[0] = True
    thread = threading.Thread(target=lambda: results.append(rig.manager.replay(batch).tokens().tolist()))
    thread.start()
    assert inside.wait(60)
    waiting[0] = False
    for call in (
        lambda: rig.manager.replay(batch),
        lambda: rig.manager.compare(batch),
        lambda: rig.manager.check_weights(rig.model),
        rig.manager.capture,
        rig.manager.reset,
        rig.manager.close,
        lambda: earlier.logits(copy=True),
    ):
        with pytest.raises(ReplayError, match="one call at a time"):
            call()
    go_on.set()
    thread.join()
    expected = [int(rig.model.oracle([5]).argmax())]
    assert results == [expected]
    assert rig.manager.replay(batch).tokens().tolist() == expected


def test_model_that_calls_its_manager_raises(device: torch.device) -> None:
    managers: list[ReplayManager] = []

    def sampler(logits, step):
        if managers:
            managers[0].replay(Batch.empty())
        return logits.argmax(-1)

    rig = make_rig(device, use_graphs=False, sampler=sampler)
    managers.append(rig.manager)
    with pytest.raises(ReplayError, match="one call at a time"):
        rig.manager.replay(Batch.empty())
    managers.clear()
    assert rig.manager.replay(Batch.empty()).tokens().tolist() == []


def test_results_can_be_read_from_other_threads(device: torch.device) -> None:
    """While ring entries are reused."""
    rig = make_rig(device, ring_depth=2)
    expected = {token: int(rig.model.oracle([token]).argmax()) for token in range(8)}
    handles: list = []
    found: list[bool] = []

    def read(start: int) -> None:
        for index in range(start, 120, 3):
            while len(handles) <= index:
                time.sleep(1e-4)
            found.append(handles[index].tokens().tolist() == [expected[index % 8]])

    threads = [threading.Thread(target=read, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for index in range(120):
        handles.append(rig.manager.replay(prompt(index % 8, pages=(4,))))
    for thread in threads:
        thread.join()
    assert found == [True] * 120


def test_calls_after_close_raise(device: torch.device) -> None:
    rig = make_rig(device)
    batch = prompt(5, pages=(4,))
    handle = rig.manager.replay(batch)
    kept = handle.logits(copy=True)
    rig.manager.close()
    rig.manager.close()
    assert (kept[0].double().cpu() - rig.model.oracle([5])).abs().max() < 2e-4
    assert (handle.done(), handle.error) == (True, None)
    assert rig.manager.stats().replays.total() == 1
    assert rig.manager.kv_cache.num_pages == 80
    assert rig.manager.descriptors
    assert rig.manager.state.value == "closed"
    assert handle.tokens().tolist() == [int(rig.model.oracle([5]).argmax())]
    for call in (
        lambda: rig.manager.replay(batch),
        lambda: rig.manager.compare(batch),
        lambda: rig.manager.check_weights(rig.model),
        rig.manager.capture,
        rig.manager.reset,
        handle.logits,
        lambda: handle.logits(copy=True),
    ):
        with pytest.raises(CaptureError, match="closed"):
            call()
    with pytest.raises(CaptureError, match=r"^buffers: freed by close\(\); build a new manager"):
        _ = rig.manager.buffers
