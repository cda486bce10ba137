"""Memory that a step must not read, and launches in flight: poison, fills within a graph, stalled streams."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels.errors import ReplayError
from graphrt.testing.verify import in_flight, verify
from graphrt.testing.verify.eager import EagerChecks
from graphrt.testing.verify.graph import GraphChecks
from graphrt.testing.verify.memory import UnwrittenInGraph, fill_inactive, inactive_blocks, zeroed
from graphrt.testing.verify.subject import Target
from graphrt.testing.verify.verification import Verification
from tests.support.verify_examples import Copies, rows, silu


def test_memory_of_torch_empty_is_filled_within_the_graph() -> None:
    """The memory may be that of an intermediate, which the graph wrote before."""
    with zeroed(torch.device("cpu")):
        assert torch.equal(torch.empty(1000), torch.zeros(1000))
    memory = UnwrittenInGraph(torch.device("cpu"))
    x, recorder, key = torch.ones(4), OpTraceRecorder(), BatchDescriptor.decode(1)

    def step() -> torch.Tensor:
        with memory.watch:
            unwritten = torch.empty(4)
            torch.empty(0)
            return unwritten + x

    with torch.inference_mode(), recorder.session():
        graph = recorder.capture(step, key, lambda: None)
        assert memory.count == 1
        for byte in (0, 0xFF, 0):
            memory.fill(byte)
            graph.launch()
            assert bool(graph.output.isnan().all()) is (byte == 0xFF)


SNAPSHOT = [
    {"device": 0, "address": 0x1000, "blocks": [
        {"size": 0x200, "state": "active_allocated"}, {"size": 0x300, "state": "inactive"},
        {"size": 0x100, "state": "active_pending_free"}, {"size": 0x40, "state": "inactive"},
    ]},
    {"device": 1, "address": 0x9000, "blocks": [{"size": 0x200, "state": "inactive"}]},
]  # fmt: skip


def test_inactive_blocks_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    device, calls = torch.device("cuda", 0), []
    status = [driver.CUresult.CUDA_SUCCESS]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": SNAPSHOT})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(driver, "cuMemsetD8Async", lambda *arguments: (calls.append(arguments), status)[1])
    assert inactive_blocks(device) == [(0x1200, 0x300), (0x1600, 0x40)]
    assert fill_inactive(device) == 0x340
    assert calls == ["wait", (0x1200, 0xFF, 0x300, 5), (0x1600, 0xFF, 0x40, 5), "wait"]
    status[0] = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ReplayError, match="pool: cannot poison a block of 768 bytes at 0x1200"):
        fill_inactive(device)


def _captured(verification: Verification) -> tuple[Any, ...]:
    """Return the arguments of flight_findings, with case 0 captured."""
    eagerly, graphs = EagerChecks(verification), GraphChecks(verification)
    eagerly.prepare()
    eagerly.check()
    graph = graphs._capture(verification.cases["0"])
    order = list(verification.cases.values())
    return verification, graph, order


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the waits and stalls of a fake device."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("stall"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=1))
    return calls


def test_a_buffer_overwritten_in_flight_is_blamed(waits: list[str]) -> None:
    """Without a device, a subject that is wrong between two synchronize() calls takes its place."""

    class Staged(Copies):
        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(rows(3) if waits.count("wait") % 2 else inputs)

    verification = Verification(Target(Staged(), None), {str(n): rows(n) for n in range(4)}, None)
    with torch.inference_mode():
        arguments = _captured(verification)
        found = in_flight.flight_findings(*arguments)
        again = in_flight.flight_findings(*arguments, known={"0", "1", "2"})
        assert in_flight.flight_findings(*arguments, known=verification.cases) == []
    assert again == [], "case 3 is right in flight"
    assert not verification.findings
    assert [finding.blamed for finding in found] == [("x",), ("x",)]
    assert "the main stream is stalled" in found[0].text
    assert "use one buffer per launch in flight" in found[0].because
    assert "the other streams are stalled" in found[1].text
    assert "stall" in waits
    assert all(re.search(r"x.* does not contain this case's values", finding.because) for finding in found)


@pytest.mark.usefixtures("waits")
def test_launches_in_flight_draw_the_same_random_numbers() -> None:
    """A step with dropout is right in a queue of launches."""

    class Drops(Copies):
        def run(self) -> torch.Tensor:
            return torch.nn.functional.dropout(self.buffers["x"], 0.5, training=True)

    verification = Verification(Target(Drops(), None), {str(n): rows(n) for n in range(3)}, None)
    with torch.inference_mode():
        arguments = _captured(verification)
        assert in_flight.flight_findings(*arguments) == []


def test_a_replay_that_does_not_repeat_is_blamed_on_replaced_tensors() -> None:
    """The caller's graph reads freed memory, which holds other values at each launch."""

    class Freed(Copies):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(5, 1)
            self.launches = 0

        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs)
            self.before, self.table = self.table, torch.ones(5, 1)  # alive until the next refresh

        def run(self) -> torch.Tensor:
            return silu(self.buffers["x"]) * self.table

        def capture(self, inputs: dict[str, Any]) -> Any:
            def launch() -> torch.Tensor:
                self.launches += 1
                return silu(self.buffers["x"]) * self.launches

            return launch

    report = verify(Freed(), rows)
    assert {finding.check for finding in report.findings} == {"determinism"}
    assert "self.table" in report.blamed
    assert "the graph has the old addresses of" in str(report)
