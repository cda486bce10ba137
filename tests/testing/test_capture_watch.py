"""CaptureWatch: it restores its hooks, and sees compiled kernels of its own thread only."""

from __future__ import annotations

import threading

import pytest
import torch
import triton

from graphrt.kernels.errors import ConfigError
from graphrt.kernels.native import nvrtc
from graphrt.testing.capture_watch import CaptureWatch
from tests.support import fake_captures, fake_triton


def test_a_watch_restores_all_hooks() -> None:
    hooks = triton.knobs.runtime
    owners = (torch.cuda.CUDAGraph, torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    names = ("capture_begin", "capture_end", "synchronize")
    look = lambda: (  # noqa: E731
        [vars(owner).get(name) for owner in owners for name in names],
        [*hooks.kernel_load_end_hook.calls], [*hooks.launch_enter_hook.calls], [*nvrtc.load_hooks],
    )  # fmt: skip
    before = look()
    with CaptureWatch() as watch:
        assert look() != before
    assert look() == before
    assert (watch.captures, watch.faults) == (0, [])
    with pytest.raises(LookupError), CaptureWatch():
        raise LookupError
    assert look() == before


def test_a_kernel_compiled_in_a_capture_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton compilation and the load of a native kernel are reported. Kernels of another thread are not."""
    cuda = fake_captures.install(monkeypatch)
    with fake_triton.installed(monkeypatch) as kernels, CaptureWatch() as watch:
        kernels.launch(16)
        with fake_captures.captured(torch.cuda.CUDAGraph()):
            kernels.launch(16)
        assert watch.faults == []
        with fake_captures.captured(torch.cuda.CUDAGraph()):
            cuda.capturing = False  # as on that thread's stream
            thread = threading.Thread(target=kernels.launch, args=[32])
            thread.start()
            thread.join()
            cuda.capturing = True
            assert kernels.launched[-1] == 32
            assert watch.faults == []
            kernels.launch(64)
            nvrtc.load_hooks[-1]("decode")
    assert [(fault.capture, fault.rule, fault.what) for fault in watch.faults] == [
        (2, "compile", "kernel add_one, compiled or loaded"),
        (2, "compile", "kernel decode, compiled or loaded"),
    ]
    assert [fault.where.split(":")[0] for fault in watch.faults] == ["fake_triton.py", "test_capture_watch.py"]


@pytest.mark.filterwarnings("error")
def test_the_warning_of_torch_about_its_mode_is_suppressed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_captures.install(monkeypatch)
    with CaptureWatch() as watch, fake_captures.captured(torch.cuda.CUDAGraph()):
        assert cuda.sync_mode == 2
    assert (cuda.sync_mode, watch.faults) == (0, [])


def test_a_capture_that_does_not_end_is_closed_by_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops are no longer checked, and the device's mode is restored."""
    cuda = fake_captures.install(monkeypatch)
    with CaptureWatch() as watch:
        torch.cuda.CUDAGraph().capture_begin()
        assert cuda.sync_mode == 2
    assert cuda.sync_mode == 0
    with cuda.another_stream():
        torch.ones(4).add_(1)
    assert (watch.captures, watch.faults) == (1, [])


def test_a_rule_without_a_reason_raises() -> None:
    with pytest.raises(
        ConfigError, match=r"^allowed: expected sync, allocate, compile, stream, each with a reason, got"
    ):
        CaptureWatch({"sync": ""})
