"""The capture lock: late kernels of Triton and of nvrtc, memory growth, and its release."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import triton

from graphrt.capture.lock import CaptureLock, Doing
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.native import nvrtc
from tests.support.fake_triton import FakeTriton, installed

HOOK = triton.knobs.runtime.kernel_load_end_hook


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    with installed(monkeypatch) as triton:
        yield triton


@pytest.fixture(autouse=True, scope="module")
def hooks_are_restored():
    gc.collect()  # of managers of other tests
    before = [*HOOK.calls], [*nvrtc.load_hooks]
    yield
    gc.collect()
    assert ([*HOOK.calls], [*nvrtc.load_hooks]) == before


def load_by_triton(name: str) -> None:
    """Call the hook as CompiledKernel does."""
    HOOK(None, None, name, {}, "digest")


def test_a_kernel_that_triton_compiles_after_capture_is_counted_once(kernels: FakeTriton) -> None:
    """Triton compiles for sm_90 here. Kernels launched before engage() are not counted."""
    lock = CaptureLock(lambda: Doing.OTHER_CALL, {}, strict=True)
    kernels.launch(16)
    lock.engage()
    kernels.launch(16)
    assert not lock.kernels
    kernels.launch(32)
    kernels.launch(32)
    assert lock.kernels == {"add_one (outside the graphs)": 1}
    kernels.launch(64)
    assert lock.kernels == {"add_one (outside the graphs)": 2}
    lock.release()
    kernels.launch(128)
    assert lock.kernels == {"add_one (outside the graphs)": 2}


def test_a_strict_lock_raises_in_a_graph_step_and_the_kernel_can_be_launched_afterwards(kernels: FakeTriton) -> None:
    lock = CaptureLock(lambda: Doing.GRAPH_STEP, {}, strict=True)
    lock.engage()
    with pytest.raises(ReplayError, match=r"^add_one: this kernel was compiled or loaded in a step that replays"):
        kernels.launch(16)
    assert kernels.launched == []
    kernels.launch(16)
    assert kernels.launched == [16], "the load had finished when the lock raised"
    assert lock.kernels == {"add_one (in a graph step)": 1}
    lock.release()


@pytest.mark.parametrize("doing", Doing)
@pytest.mark.parametrize("strict", [True, False])
def test_which_loads_are_counted_and_which_raise(doing: Doing, strict: bool) -> None:
    lock = CaptureLock(lambda: doing, {}, strict=strict)
    lock.engage()
    if strict and doing is Doing.GRAPH_STEP:
        with pytest.raises(ReplayError, match=r"^k: this kernel was compiled"):
            load_by_triton("k")
    else:
        load_by_triton("k")
    assert lock.kernels == ({} if doing is Doing.SOMETHING_ELSE else {f"k ({doing.value})": 1})
    lock.release()


def test_native_kernels_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook runs before the compilation, so a refused load runs it again."""
    monkeypatch.setattr(nvrtc, "ensure_context", lambda index: None)
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda index: (9, 0))

    def compile_it(variant, arch):
        raise LookupError("compiled")

    monkeypatch.setattr(nvrtc, "_cached_cubin", compile_it)
    variant = nvrtc.NativeVariant("decode.cu", "decode_late", (), 32, 0)
    with pytest.raises(LookupError, match="compiled"):
        nvrtc.load(variant, 0)
    strict, loose = (CaptureLock(lambda: Doing.GRAPH_STEP, {}, strict=strict) for strict in (True, False))
    loose.engage()
    with pytest.raises(LookupError, match="compiled"):
        nvrtc.load(variant, 0)
    strict.engage()
    for _ in range(2):
        with pytest.raises(ReplayError, match=r"^decode_late: this kernel was compiled"):
            nvrtc.load(variant, 0)
    assert strict.kernels == {"decode_late (in a graph step)": 2}
    assert loose.kernels == {"decode_late (in a graph step)": 3}
    strict.release()
    loose.release()


def test_memory_that_grows_is_counted_by_name() -> None:
    held = {"graph pool": 100, "workspace": 7}
    memory = {name: lambda name=name: held[name] for name in held}
    lock, strict = (CaptureLock(lambda: Doing.BETWEEN, memory, strict=strict) for strict in (False, True))
    grown = lock.grown
    lock.engage()
    strict.engage()
    held["graph pool"] = 40
    for each in (lock, strict):
        each.check()
        assert each.grown == {}, "memory may shrink"
    held["workspace"] = 12
    lock.check()
    assert lock.grown == {"workspace": 5}
    assert lock.grown is grown, "a live counter"
    with pytest.raises(ReplayError, match=r"^workspace: expected 7 bytes as after capture\(\), got 12; steps must not"):
        strict.check()
    strict.poll()
    assert strict.grown == {"workspace": 5}
    held["workspace"] = 7
    lock.check()
    strict.check()
    assert lock.grown == strict.grown == {}


def test_a_capture_may_grow_memory_and_hides_no_other_growth() -> None:
    held = {"graph pool": 100}
    lock = CaptureLock(lambda: Doing.BETWEEN, {"graph pool": lambda: held["graph pool"]}, strict=False)
    lock.engage()
    held["graph pool"] += 5
    with contextlib.suppress(LookupError), lock.growing():
        held["graph pool"] += 60
        raise LookupError
    held["graph pool"] += 1
    lock.check()
    assert lock.grown == {"graph pool": 6}
    lock.release()


def test_release_is_idempotent_and_a_collected_lock_is_released() -> None:
    asked = []
    lock = CaptureLock(lambda: asked.append(1) or Doing.BETWEEN, {"m": lambda: 1}, strict=True)
    lock.release()
    lock = CaptureLock(lambda: asked.append(1) or Doing.BETWEEN, {"m": lambda: 1}, strict=True)
    lock.engage()
    load_by_triton("k")
    lock.release()
    lock.release()
    lock.check()
    load_by_triton("k")
    assert len(asked) == 1
    dropped = CaptureLock(lambda: Doing.BETWEEN, {}, strict=True)
    dropped.engage()
    gone = weakref.ref(dropped)
    del dropped
    assert gone() is None, "the hooks do not keep it alive"
    load_by_triton("k")
