"""The lock: which kernels it counts, by Triton's own hooks and those of native kernels; memory that grows; its end."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def hooks_are_left_as_they_were():
    before = [*HOOK.calls], [*nvrtc.load_hooks]
    yield
    gc.collect()
    assert ([*HOOK.calls], [*nvrtc.load_hooks]) == before


def load_by_triton(name: str) -> None:
    """As CompiledKernel does."""
    HOOK(None, None, name, {}, "digest")


def test_a_kernel_that_triton_compiles_late_is_counted_once(kernels: FakeTriton) -> None:
    """By a compilation for sm_90 in earnest; what was launched before the lock fell is no delta."""
    lock = CaptureLock(lambda: Doing.OTHER_CALL, {}, strict=True)
    kernels.launch(16)
    lock.fall()
    kernels.launch(16)
    assert not lock.kernels
    kernels.launch(32)
    kernels.launch(32)
    assert lock.kernels == {"add_one (beside the graphs)": 1}
    kernels.launch(64)
    assert lock.kernels == {"add_one (beside the graphs)": 2}
    lock.lift()
    kernels.launch(128)
    assert lock.kernels == {"add_one (beside the graphs)": 2}


def test_strictly_a_kernel_in_a_graph_step_raises_and_can_be_launched_after_that(kernels: FakeTriton) -> None:
    lock = CaptureLock(lambda: Doing.GRAPH_STEP, {}, strict=True)
    lock.fall()
    with pytest.raises(ReplayError, match=r"^add_one: expected no kernel .* in a step that replays a graph, got this"):
        kernels.launch(16)
    assert kernels.launched == []
    kernels.launch(16)
    assert kernels.launched == [16], "the load was over when the lock raised"
    assert lock.kernels == {"add_one (in a graph step)": 1}
    lock.lift()


@pytest.mark.parametrize("doing", Doing)
@pytest.mark.parametrize("strict", [True, False])
def test_what_counts_and_what_raises(doing: Doing, strict: bool) -> None:
    lock = CaptureLock(lambda: doing, {}, strict=strict)
    lock.fall()
    if strict and doing is Doing.GRAPH_STEP:
        with pytest.raises(ReplayError, match=r"^k: expected no kernel"):
            load_by_triton("k")
    else:
        load_by_triton("k")
    assert lock.kernels == ({} if doing is Doing.SOMETHING_ELSE else {f"k ({doing.value})": 1})
    lock.lift()


def test_native_kernels_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that loads one: it asks before it compiles, and what is refused is asked again."""
    monkeypatch.setattr(nvrtc, "ensure_context", lambda index: None)
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda index: (9, 0))

    def compile_it(variant, arch):
        raise LookupError("compiled")

    monkeypatch.setattr(nvrtc, "_cached_cubin", compile_it)
    variant = nvrtc.NativeVariant("decode.cu", "decode_late", (), 32, 0)
    with pytest.raises(LookupError, match="compiled"):
        nvrtc.load(variant, 0)
    strict, loose = (CaptureLock(lambda: Doing.GRAPH_STEP, {}, strict=strict) for strict in (True, False))
    loose.fall()
    with pytest.raises(LookupError, match="compiled"):
        nvrtc.load(variant, 0)
    strict.fall()
    for _ in range(2):
        with pytest.raises(ReplayError, match=r"^decode_late: expected no kernel"):
            nvrtc.load(variant, 0)
    assert strict.kernels == {"decode_late (in a graph step)": 2}
    assert loose.kernels == {"decode_late (in a graph step)": 3}
    strict.lift()
    loose.lift()


def test_memory_that_grows_is_named() -> None:
    held = {"graph pool": 100, "workspace": 7}
    memory = {name: lambda name=name: held[name] for name in held}
    lock, strict = (
        CaptureLock(lambda: Doing.BETWEEN, memory, strict=False),
        CaptureLock(lambda: Doing.BETWEEN, memory, strict=True),
    )
    grown = lock.grown
    lock.fall()
    strict.fall()
    held["graph pool"] = 40
    for each in (lock, strict):
        each.check()
        assert each.grown == {}, "memory may shrink"
    held["workspace"] = 12
    lock.check()
    assert lock.grown == {"workspace": 5}
    assert lock.grown is grown, "a live counter"
    with pytest.raises(
        ReplayError, match=r"^workspace: expected 7 bytes as after capture\(\), got 5 more; no step may"
    ):
        strict.check()
    strict.poll()
    assert strict.grown == {"workspace": 5}
    held["workspace"] = 7
    lock.check()
    strict.check()
    assert lock.grown == strict.grown == {}


def test_a_lock_nobody_holds_is_lifted_and_one_may_be_lifted_twice() -> None:
    asked = []
    lock = CaptureLock(lambda: asked.append(1) or Doing.BETWEEN, {"m": lambda: 1}, strict=True)
    lock.lift()
    lock = CaptureLock(lambda: asked.append(1) or Doing.BETWEEN, {"m": lambda: 1}, strict=True)
    lock.fall()
    load_by_triton("k")
    lock.lift()
    lock.lift()
    lock.check()
    load_by_triton("k")
    assert len(asked) == 1
    dropped = CaptureLock(lambda: Doing.BETWEEN, {}, strict=True)
    dropped.fall()
    gone = weakref.ref(dropped)
    del dropped
    assert gone() is None, "the hooks do not hold it"
    load_by_triton("k")
