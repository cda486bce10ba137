"""A recorder with the condition of its loops, and a step that counts its runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import CapturedGraph
from graphrt.capture.op_trace import OpTrace, OpTraceRecorder
from graphrt.capture.recorder import make_recorder

KEY = BatchDescriptor.decode(1)
CPU = torch.device("cpu")


def ints(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values or (0,), dtype=torch.int32, device=device)


def op_trace_of(step: Callable[[], torch.Tensor]) -> OpTrace:
    """The op trace of a step, captured without a warm-up."""
    return OpTraceRecorder().capture(step, KEY, lambda: None)


class Rig:
    """A recorder, and the condition that its steps write."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recorder = make_recorder(device)
        self.condition = ints(device)

    def capture(self, step: Callable[[], torch.Tensor]) -> CapturedGraph:
        with self.recorder.session():
            self.recorder.warm_up(step, lambda: None)
            return self.recorder.capture(step, KEY, lambda: None)

    def loop(self, step: Callable[[], torch.Tensor]) -> CapturedGraph:
        return self.recorder.loop(self.capture(step), self.condition)


class Countdown(Rig):
    """A step that decrements the condition and increments `runs`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.runs = ints(device)

    def step(self) -> torch.Tensor:
        self.condition.sub_(1)
        self.runs.add_(1)
        return self.runs * 10

    def start(self, count: int) -> None:
        self.condition.fill_(count)
        self.runs.zero_()


class PendingEvent:
    """Stands for the event of a launch that runs until a thread waits for it, which also calls `meanwhile`."""

    def __init__(self) -> None:
        self.ended, self.meanwhile = True, lambda: None

    def record(self, stream: object) -> None:
        self.ended = False

    def synchronize(self) -> None:
        self.ended = True
        self.meanwhile()

    def query(self) -> bool:
        return self.ended
