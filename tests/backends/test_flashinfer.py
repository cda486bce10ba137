"""The host side of FlashInfer's backend: what is planned, when, and into which wrapper and buffer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from graphrt.backends.flashinfer import FlashInferBackend
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.staging import StagingSlot
from graphrt.kernels.errors import ReplayError, UnsupportedError
from tests.support.fake_packages import install
from tests.support.peer_kit import BF16, allocated, context, layer_of, metadata_of, step


class FakeWrapper:
    """The host side of a FlashInfer wrapper."""

    log: list[tuple[str, Any]]
    layout = (1, 2, 3)

    def __init__(self, workspace, kv_layout, **options):
        self.workspace, self.kv_layout, self.options = workspace, kv_layout, options
        self._int_workspace_buffer, self._pin_memory_int_workspace_buffer = torch.zeros(1), torch.zeros(1)
        self.log.append(("make", self))

    def plan(self, *args, **kwargs):
        self._plan_info = self.layout
        self.log.append(("plan", ([a.clone() if isinstance(a, torch.Tensor) else a for a in args], kwargs, args)))
        if "paged_kv_indptr_buffer" in self.options:
            self.options["paged_kv_indptr_buffer"].copy_(args[0])

    def run(self, q, cache, return_lse):
        self.log.append(("run", (q, cache)))
        return q * 2, torch.ones(q.shape[:2])


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    log: list[tuple[str, Any]] = []
    decode = type("Decode", (FakeWrapper,), {"log": log})
    prefill = type("Prefill", (FakeWrapper,), {"log": log})
    install(
        monkeypatch,
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=decode,
        BatchPrefillWithPagedKVCacheWrapper=prefill,
    )
    for name in ("wait", "end"):
        real = getattr(StagingSlot, name)
        monkeypatch.setattr(
            StagingSlot, name, lambda self, *a, _name=name, _real=real: (log.append((_name, None)), _real(self, *a))[1]
        )
    monkeypatch.setattr("graphrt.backends.flashinfer._SMALLEST_WORKSPACE", 1 << 10)
    return log


def batch_of(seq_lens: list[int]) -> Batch:
    counts = [-(-n // 4) for n in seq_lens]
    indptr = torch.tensor([0, *counts]).cumsum(0).tolist()
    return Batch(
        req_indices=range(len(seq_lens)), seq_lens=seq_lens, page_indptr=indptr,
        page_ids=range(1, indptr[-1] + 1),
    )  # fmt: skip


def test_flashinfer_plans_on_the_host_and_lists_pages_on_the_device(
    flashinfer: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, asked = allocated(FlashInferBackend, page_size=4)
    four, two = BatchDescriptor.decode(4), BatchDescriptor.decode(2)
    for descriptor in (four, two, four):
        backend.plan_capture(descriptor)
    wrappers = [x for kind, x in flashinfer if kind == "make"]
    assert len(wrappers) == 2, "one per size, made once"
    for name in ("workspace", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
        assert getattr(wrappers[0], name) is getattr(wrappers[1], name), "shared"
    assert all(w.options["use_cuda_graph"] and w.options["use_tensor_cores"] for w in wrappers)
    flashinfer.clear()
    backend.plan_replay(four, batch_of([9, 4, 1]))
    assert [kind for kind, _ in flashinfer] == ["wait", "plan", "end"], "guarded before and behind the upload"
    arguments, options, originals = flashinfer[1][1]
    indptr, indices, last_page_len = arguments[:3]
    assert all(x.device.type == "cpu" for x in originals[:3])
    assert indptr.tolist() == [0, 3, 4, 5, 6], "the pad row has one page"
    assert last_page_len.tolist() == [1, 4, 1, 1]
    assert indices.numel() == 0, "page ids are the refresh's"
    assert arguments[3:] == [8, 2, 64, 4]
    assert options["window_left"] == -1
    metadata = metadata_of(asked, four, 3)
    q = torch.ones(4, 8, 64, dtype=BF16)
    out, lse = step(backend, metadata, q, [layer_of(asked)])
    assert backend.tensors()["indices"][:6].tolist() == [0, 1, 2, 4, 8, 12], "rows of the table, four columns each"
    assert (out[:3] == 2).all()
    assert not out[3:].any()
    assert lse[:3].unique().tolist() == pytest.approx([math.log(2.0)])
    assert (lse[3:] == -math.inf).all()
    monkeypatch.setattr(FakeWrapper, "layout", (1, 2, 4))
    with pytest.raises(ReplayError, match=r"expected the layout \(1, 2, 3\) of the captured plan, got \(1, 2, 4\)"):
        backend.plan_replay(four, batch_of([3, 3, 3]))
    backend.close()
    assert backend.tensors() == {}


@pytest.mark.parametrize("info", [None, [], "lost", ["a"]], ids=str)
def test_flashinfer_needs_the_layout_and_the_memory_of_its_plans(
    flashinfer: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, info: Any
) -> None:
    """Without it, a graph could read another plan than the captured one."""

    def plan(self, *args, **kwargs):
        if info != "lost":
            self._plan_info = info

    monkeypatch.setattr(FakeWrapper, "plan", plan)
    backend, _ = allocated(FlashInferBackend, page_size=4)
    with pytest.raises(UnsupportedError, match="flashinfer: this version has no layout of a plan as numbers"):
        backend.plan_capture(BatchDescriptor.decode(2))
    monkeypatch.setattr(FakeWrapper, "__init__", lambda self, *args, **options: None)
    backend, _ = allocated(FlashInferBackend, page_size=4)
    with pytest.raises(UnsupportedError, match="flashinfer: this version has no _int_workspace_buffer and _pin"):
        backend.plan_capture(BatchDescriptor.decode(2))


class Stream:
    """A device that runs uploads and launches late, in order, when it is waited for."""

    def __init__(self) -> None:
        self.queue: list[Any] = []

    def run(self) -> None:
        for call in self.queue:
            call()
        self.queue.clear()


@pytest.mark.parametrize("guarded", [True, False])
def test_flashinfer_waits_for_the_upload_of_the_last_plan(
    flashinfer: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """Without the wait, the first step would run with the lengths of the second one."""
    stream, (backend, _) = Stream(), allocated(FlashInferBackend, page_size=4)
    four = BatchDescriptor.decode(4)
    backend.plan_capture(four)
    (wrapper,) = [x for kind, x in flashinfer if kind == "make"]
    offsets = wrapper.options["paged_kv_indptr_buffer"]
    monkeypatch.setattr(FakeWrapper, "plan", lambda self, indptr, *a, **o: stream.queue.append(
        lambda: offsets.copy_(indptr)
    ))  # fmt: skip
    monkeypatch.setattr(StagingSlot, "wait", lambda self: stream.run() if guarded else None)
    seen: list[list[int]] = []
    for lengths in ([9, 4, 1, 5], [1, 1, 1, 1], [16, 2, 8, 3]):
        backend.plan_replay(four, batch_of(lengths))
        stream.queue.append(lambda: seen.append(offsets.tolist()))
    stream.run()
    wanted = [[0, 3, 4, 5, 7], [0, 1, 2, 3, 4], [0, 4, 5, 7, 8]]
    assert (seen == wanted) == guarded


def test_flashinfer_names_all_memory_of_its_graphs(flashinfer: list[tuple[str, Any]]) -> None:
    """The buffers of each wrapper, and the plan that all wrappers share."""
    backend = FlashInferBackend(context(page_size=4))
    assert backend.held() == {}
    backend.allocate()
    backend.plan_capture(BatchDescriptor.decode(2))
    wrapper = next(made for what, made in flashinfer if what == "make")
    given = [wrapper.workspace, wrapper._int_workspace_buffer]
    given += [value for name, value in wrapper.options.items() if name.endswith("_buffer")]
    named = {t.data_ptr() for t in (backend.held() | backend.tensors()).values()}
    assert {t.data_ptr() for t in given} <= named
    assert len(given) == 5
    backend.close()
    assert backend.held() == {}
