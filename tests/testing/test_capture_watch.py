"""CaptureWatch: each rule that a capture breaks is reported, with its place, and all hooks are restored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels.errors import CaptureError
from graphrt.kernels.native import nvrtc
from graphrt.testing.capture_watch import CaptureWatch
from tests.support import fake_captures, fake_triton
from tests.support.fake_captures import FakeCuda, captured

X = torch.ones(4)


def load_kernel(name: str) -> None:
    triton.knobs.runtime.kernel_load_end_hook(None, None, name, {}, "digest")


def launch_kernel(name: str) -> None:
    triton.knobs.runtime.launch_enter_hook(SimpleNamespace(get=lambda: {"name": name}))


def on_another_stream(cuda: FakeCuda, call: Callable[[], Any]) -> None:
    with cuda.another_stream():
        call()


def out_of_the_pool(cuda: FakeCuda, is_live: bool) -> None:
    result = X * 2
    cuda.pool = []
    if is_live:  # reported once, as the result of an op
        cuda.live.append((result.untyped_storage().data_ptr(), 16))


# The body of a capture, the rule that it breaks, and what is reported.
BROKEN: dict[str, tuple[Callable[[FakeCuda], Any], str, str]] = {
    "op-that-waits": (
        lambda cuda: torch.ops.fake_captures.wait(X),
        "sync",
        "fake_captures.wait.default (called a synchronizing CUDA operation)",
    ),
    "device": (lambda cuda: torch.cuda.synchronize(), "sync", "torch.cuda.synchronize()"),
    "event": (lambda cuda: torch.cuda.Event.synchronize(None), "sync", "Event.synchronize()"),
    "stream": (lambda cuda: torch.cuda.Stream.synchronize(None), "sync", "Stream.synchronize()"),
    "twice": (lambda cuda: [torch.cuda.synchronize() for _ in range(2)], "sync", "torch.cuda.synchronize()"),
    "result": (lambda cuda: out_of_the_pool(cuda, False), "allocate", "the result of aten.mul.Tensor outside of it"),
    "live-result": (
        lambda cuda: out_of_the_pool(cuda, True),
        "allocate",
        "the result of aten.mul.Tensor outside of it",
    ),
    "block": (lambda cuda: cuda.live.append((4096, 24)), "allocate", "24 bytes at 0x1000 outside of it"),
    "kernel": (lambda cuda: load_kernel("_attend"), "compile", "kernel _attend, compiled or loaded"),
    "torch-compile": (
        lambda cuda: torch.compile(lambda x: x + 1, backend="eager")(X),
        "compile",
        "a function that torch.compile compiles",
    ),
    "op-elsewhere": (
        lambda cuda: on_another_stream(cuda, lambda: X.add_(1)),
        "stream",
        "aten.add_.Tensor on another stream",
    ),
    "triton-elsewhere": (
        lambda cuda: on_another_stream(cuda, lambda: launch_kernel("_attend")),
        "stream",
        "Triton kernel _attend on another stream",
    ),
}

CLEAN: dict[str, Callable[[FakeCuda], Any]] = {
    "ops": lambda cuda: (X * 2).add_(1).view(2, 2).t().contiguous(),
    "views-elsewhere": lambda cuda: on_another_stream(cuda, lambda: (X.view(2, 2).t().t_(), torch.empty(4))),
    "warm-kernel": lambda cuda: launch_kernel("_attend"),
    "freed-block": lambda cuda: cuda.live.clear(),
    "idle-block": lambda cuda: cuda.idle.append((4096, 24)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_reported_once_with_its_place(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    body, rule, what = BROKEN[case]
    cuda = fake_captures.install(monkeypatch)
    with CaptureWatch() as watch:
        with captured(torch.cuda.CUDAGraph()):
            pass
        with suppress(RuntimeError), captured(torch.cuda.CUDAGraph()):
            body(cuda)
    (fault,) = watch.faults
    assert (fault.capture, fault.rule, fault.what) == (2, rule, what)
    assert fault.where.startswith("test_capture_watch.py:") is (case != "block")
    assert f"{rule}, capture 2" in str(fault)
    assert f"got {what}" in str(fault)


@pytest.mark.parametrize("case", BROKEN)
def test_a_rule_with_a_reason_and_code_outside_of_captures_are_not_checked(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    body, rule, _ = BROKEN[case]
    cuda = fake_captures.install(monkeypatch)
    with CaptureWatch({rule: "on purpose"}) as watch, captured(torch.cuda.CUDAGraph()):
        body(cuda)  # no op raises where waits are allowed
    assert watch.faults == []
    with CaptureWatch() as watch:
        body(cuda)
        cuda.pool = [fake_captures.EVERYWHERE]
        with captured(torch.cuda.CUDAGraph()):
            pass
    assert (watch.captures, watch.faults) == (1, [])


@pytest.mark.parametrize("case", CLEAN)
def test_a_clean_capture_has_no_faults(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    cuda = fake_captures.install(monkeypatch)
    with CaptureWatch() as watch, captured(torch.cuda.CUDAGraph()):
        CLEAN[case](cuda)
    assert (watch.captures, watch.faults) == (1, [])


@pytest.mark.filterwarnings("error")  # torch warns about its mode
def test_watches_nest_and_restore_the_mode_and_all_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_captures.install(monkeypatch)
    hooks = triton.knobs.runtime
    owners = (torch.cuda.CUDAGraph, torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    names = ("capture_begin", "capture_end", "synchronize")

    def look() -> tuple[list[Any], ...]:
        wrapped = [vars(owner).get(name) for owner in owners for name in names]
        return wrapped, [*hooks.kernel_load_end_hook.calls], [*hooks.launch_enter_hook.calls], [*nvrtc.load_hooks]

    before = look()
    with suppress(LookupError), CaptureWatch() as outer, CaptureWatch({"sync": "why"}) as inner:
        assert look() != before
        with captured(torch.cuda.CUDAGraph()):
            assert cuda.sync_mode == 2
            torch.cuda.synchronize()
        raise LookupError
    assert look() == before
    assert cuda.sync_mode == 0
    assert [len(watch.faults) for watch in (outer, inner)] == [1, 0]


def test_a_capture_that_does_not_end_is_closed_by_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops are no longer checked, and the device's mode is restored."""
    cuda = fake_captures.install(monkeypatch)
    cuda.broken = True
    with CaptureWatch() as watch, pytest.raises(RuntimeError, match="invalidated"), captured(torch.cuda.CUDAGraph()):
        out_of_the_pool(cuda, is_live=False)
    assert watch.faults == [], "the memory of a failed capture is not checked"
    cuda.broken = False
    with CaptureWatch() as watch:
        torch.cuda.CUDAGraph().capture_begin()
        assert cuda.sync_mode == 2
    assert cuda.sync_mode == 0
    on_another_stream(cuda, lambda: torch.ones(4).add_(1))
    assert (watch.captures, watch.faults) == (1, [])


def test_a_kernel_compiled_in_a_capture_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton compilation and the load of a native kernel are reported. Kernels of another thread are not."""
    cuda = fake_captures.install(monkeypatch)
    with fake_triton.installed(monkeypatch) as kernels, CaptureWatch() as watch:
        kernels.launch(16)
        with captured(torch.cuda.CUDAGraph()):
            kernels.launch(16)
            cuda.capturing = False  # as on that thread's stream
            thread = threading.Thread(target=kernels.launch, args=[32])
            thread.start()
            thread.join()
            cuda.capturing = True
            assert kernels.launched[-1] == 32
            assert watch.faults == []
            kernels.launch(64)
            nvrtc.load_hooks[-1]("decode")
    assert [(fault.rule, fault.what) for fault in watch.faults] == [
        ("compile", "kernel add_one, compiled or loaded"),
        ("compile", "kernel decode, compiled or loaded"),
    ]
    assert [fault.where.split(":")[0] for fault in watch.faults] == ["fake_triton.py", "test_capture_watch.py"]


OP_TRACES: dict[str, tuple[Callable[[], Any], str | None]] = {
    "clean": (lambda: (X * 2).add_(torch.zeros(4)) + torch.tensor(0.5), None),
    "no-streams": (lambda: (launch_kernel("_attend"), X * 2)[1], None),
    "item": (lambda: X * X[0].item(), "a read on the host"),
    "tolist": (lambda: X * X.tolist()[0], "a read on the host"),
    "nonzero": (lambda: X.nonzero(), "a read on the host"),
    "host-values": (lambda: X + torch.tensor([1.0, 2, 3, 4]), "a tensor made of host values"),
}


@pytest.mark.parametrize("case", OP_TRACES)
def test_op_traces_are_watched(case: str) -> None:
    step, what = OP_TRACES[case]
    with CaptureWatch() as watch, suppress(CaptureError):
        OpTraceRecorder().capture(step, BatchDescriptor.decode(1), lambda: None).launch()
    assert watch.captures == 1
    assert [fault.rule for fault in watch.faults] == ([] if what is None else ["sync"])
    for fault in watch.faults:
        assert fault.what.startswith(what)
        assert fault.where.startswith("test_capture_watch.py:")


# -- a device


@triton.jit
def late_add(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets) + 1)


def forked(x: torch.Tensor, side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul(2)
        late_add[(1,)](x, BLOCK=64)
    torch.cuda.current_stream().wait_stream(side)


def backward(x: torch.Tensor) -> None:
    w = x.detach().requires_grad_()
    torch.autograd.grad((w @ w).relu().sum(), w)


def on_side(side: torch.cuda.Stream, call: Callable[[], Any]) -> None:
    with torch.cuda.stream(side):
        call()


ON_DEVICE: dict[str, tuple[Callable[[torch.Tensor, torch.cuda.Stream], Any], str, str]] = {
    "clean": (lambda x, side: (((x @ x).relu() * 2).sum(), late_add[(1,)](x, BLOCK=64)), "", ""),
    "fork": (forked, "", ""),
    "training": (lambda x, side: backward(x), "", ""),
    "item": (lambda x, side: x.sum().item(), "sync", "_local_scalar_dense"),
    "nonzero": (lambda x, side: x.nonzero(), "sync", "nonzero"),
    "kernel": (lambda x, side: late_add[(1,)](x, BLOCK=128), "compile", "kernel late_add, compiled or loaded"),
    "op-elsewhere": (lambda x, side: on_side(side, lambda: x.add_(1)), "stream", "aten.add_.Tensor on another stream"),
    "triton-elsewhere": (
        lambda x, side: on_side(side, lambda: late_add[(1,)](x, BLOCK=64)),
        "stream",
        "Triton kernel late_add on another stream",
    ),
    "memory-elsewhere": (
        lambda x, side: on_side(side, lambda: torch.empty(3 << 20, device="cuda")),
        "allocate",
        "the result of aten.empty.memory_format outside of it",
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_DEVICE)
def test_on_a_device(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    body, rule, what = ON_DEVICE[case]
    x, side, graph = torch.ones(64, 64, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # The next of torch's 32 streams, so that it is not `side`.
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", torch.cuda.Stream())
    late_add[(1,)](x, BLOCK=64)
    backward(x)
    torch.cuda.synchronize()
    with CaptureWatch() as watch, torch.cuda.graph(graph, capture_error_mode="relaxed"):
        x.add_(1)
        if rule == "sync":
            with pytest.raises(RuntimeError, match="synchronizing"):
                body(x, side)
        else:
            body(x, side)
    torch.cuda.synchronize()
    assert watch.captures == 1
    assert [fault.rule for fault in watch.faults] == ([rule] if rule else [])
    assert all(what in fault.what for fault in watch.faults)
