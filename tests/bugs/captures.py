"""Injected bugs that captures show without a replay: graphs that differ between ranks, and captures that wait."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.diff import diff
from graphrt.capture.inspect.view import GraphView
from graphrt.capture.recorder import make_recorder
from graphrt.testing.capture_watch import CaptureWatch
from graphrt.testing.verify import verify
from tests.bugs.bug import Seen, add
from tests.bugs.step import Decode


@add("launches that only one rank captures", "", tool="diff")
def uneven_ranks(injected: bool, device: torch.device) -> Seen:
    """One rank takes another path at capture. Each graph is right by itself, and together they deadlock."""

    def captured(rank: int) -> GraphView:
        step, recorder = Decode(device=device), make_recorder(device)
        step.refresh(step.make_inputs(0))

        def body() -> torch.Tensor:
            out = step.run()
            return out / out.abs().amax() if injected and rank == 0 else out

        with recorder.session():
            body()
            return inspect_graph(recorder.capture(body, BatchDescriptor.decode(1), lambda: None))

    found = diff(captured(0), captured(1))
    return Seen(not found.equal_topology, tuple(node.name for node in found.nodes), str(found))


@add("a constant created in the step", "sync", tool="marker")
def constant_in_the_step(injected: bool, device: torch.device) -> Seen:
    """The step creates a tensor from host values. The copy waits for the device, which a capture forbids."""
    scale = torch.tensor([1.0, 2.0]).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.tensor([1.0, 2.0]).to(device) if injected else scale)

    def make_inputs(case: int) -> dict[str, Any]:
        return {"x": torch.randn(4, 2, generator=torch.Generator().manual_seed(case)).to(device)}

    with CaptureWatch() as watch:  # as @pytest.mark.capture_safe does around a test
        verify(step, make_inputs)
    return Seen(bool(watch.faults), tuple(fault.rule for fault in watch.faults), "\n".join(map(str, watch.faults)))
