"""Injected bugs that need a GPU: launches in flight, streams, freed memory, conditional nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from cuda.bindings import driver

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import make_recorder
from tests.bugs.bug import Seen, add
from tests.bugs.step import COLUMNS, NULL_PAGE, NULL_SLOT, ROWS, Decode

NAMES = ("input_ids", "positions", "seq_lens", "slot_mapping", "block_table")
PADS = (0, 0, 1, NULL_SLOT, NULL_PAGE)


@add("pinned staging overwritten in flight", "packed", gpu=True)
class Staging(Decode):
    """The host fills its pinned buffer for the next step before the device has read it for this one."""

    def add_buffers(self) -> None:
        self.staged = torch.zeros(4 + COLUMNS, ROWS, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        packed = torch.zeros(4 + COLUMNS, ROWS, dtype=torch.int64, device=self.device)
        self.buffers = {"packed": packed}
        self.done = torch.cuda.Event()
        for at, name in enumerate(NAMES):
            self.__dict__[name] = packed[at] if at < 4 else packed[4:].t()

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        if not self.injected:
            self.done.synchronize()  # the previous copy has been read
        n = len(inputs["seq_lens"])
        for at, (name, pad) in enumerate(zip(NAMES, PADS, strict=True)):
            rows = self.staged[at] if at < 4 else self.staged[4:].t()
            rows[:n] = inputs[name]
            rows[n:] = pad
        self.packed.copy_(self.staged, non_blocking=True)
        self.done.record()

    def make_inputs(self, case: int) -> dict[str, Any]:
        return {name: tensor.cpu() for name, tensor in super().make_inputs(case).items()}


class SideStream(Decode):
    """Copies positions on a stream of its own."""

    waits_before, waits_after = True, True

    def add_buffers(self) -> None:
        self.side = torch.cuda.Stream(self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        positions = self.positions.clone()
        super().refresh(inputs)
        wanted = self.positions.clone()
        self.positions.copy_(positions)
        main = torch.cuda.current_stream(self.device)
        if self.waits_before or not self.injected:
            self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.positions.copy_(wanted)
        wanted.record_stream(self.side)
        if self.waits_after or not self.injected:
            main.wait_stream(self.side)


@add("a copy on another stream without a wait", "positions", gpu=True)
class NoWaitAfter(SideStream):
    """The launch does not wait for the side stream."""

    waits_after = False


@add("a buffer overwritten while a graph reads it", "positions", gpu=True)
class NoWaitBefore(SideStream):
    """The side stream does not wait for the previous launch, which still reads the buffer."""

    waits_before = False

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        main = torch.cuda.current_stream(self.device)
        n = len(inputs["positions"])
        wanted = self.wanted[n]
        wanted[:n] = inputs["positions"]
        Decode.refresh(self, {**inputs, "positions": self.positions[:n].clone()})
        if not self.injected:
            self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.positions.copy_(wanted)
        main.wait_stream(self.side)

    def add_buffers(self) -> None:
        super().add_buffers()
        self.wanted = {n: self.ints(ROWS) for n in range(1, ROWS + 1)}


@add("a tensor freed after the capture", "self.table", gpu=True)
class FreedTensor(Decode):
    """A small table is recreated when it is evicted from a cache. Its contents are equal, its address is not."""

    def add_buffers(self) -> None:
        self.table = self.create()

    def create(self) -> torch.Tensor:
        return torch.arange(1, ROWS + 1, device=self.device, dtype=torch.float32).contiguous()

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.injected:
            kept = self.table  # otherwise the new one may get the same memory
            self.table = self.create()
            del kept

    def run(self) -> torch.Tensor:
        return super().run() * self.table[:, None]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * self.create()[: len(inputs["seq_lens"]), None]


@add("an allocation released after the capture", "self.prepared", gpu=True)
class Dropped(Decode):
    """Prepared weights are created on first use, and dropped between steps to save memory."""

    prepared: torch.Tensor | None = None

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.injected:
            self.prepared = None

    def run(self) -> torch.Tensor:
        if self.prepared is None and not torch.cuda.is_current_stream_capturing():
            self.prepared = self.embed * 2
        return super().run() * self.prepared[0, 0]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * 2 * self.embed[0, 0]


@add("a loop condition that is never reset", "", gpu=True)
class Loop:
    """The condition of a WHILE node is 0 after a launch, and is not set to 1 for the next one."""

    def __init__(self, injected: bool, device: torch.device) -> None:
        self.injected, self.device = injected, device
        self.buffers = {
            "x": torch.ones(8, device=device),
            "left": torch.zeros(1, dtype=torch.int32, device=device),
            "more": torch.zeros(1, dtype=torch.int32, device=device),
        }
        self.recorder = make_recorder(device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        self.buffers["x"].copy_(inputs["x"])
        self.buffers["left"].copy_(inputs["left"])
        self.buffers["more"].zero_()

    def body(self) -> torch.Tensor:
        self.buffers["x"].mul_(2)
        self.buffers["left"].sub_(1)
        self.buffers["more"].copy_(self.buffers["left"] > 0)
        return self.buffers["x"] + 0

    def run(self) -> torch.Tensor:
        out = self.body()
        while self.buffers["more"].item():
            out = self.body()
        return out

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return inputs["x"] * 2.0 ** inputs["left"].item()

    def capture(self, inputs: Mapping[str, Any]) -> Callable[[], torch.Tensor]:
        flags = 0 if self.injected else driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        with self.recorder.session(), mock.patch.object(driver, "CU_GRAPH_COND_ASSIGN_DEFAULT", flags):
            graph = self.recorder.capture(self.body, BatchDescriptor.decode(1), lambda: None)
            loop = self.recorder.loop(graph, self.buffers["more"])

        def launch() -> torch.Tensor:
            loop.launch()
            return loop.output

        return launch

    def make_inputs(self, case: int) -> dict[str, Any]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(case)).to(self.device)
        return {"x": x, "left": torch.tensor([(3, 1, 4, 2)[case]], dtype=torch.int32, device=self.device)}


@add("host memory copied inside the graph", "", tool="audit", gpu=True)
def captured_copy(injected: bool, device: torch.device) -> Seen:
    """A copy from pinned memory is captured: every replay reads the current contents of that memory."""
    from graphrt.capture.inspect.audit import audit, memory_of

    staged = torch.arange(8.0).pin_memory()
    buffer, out = torch.zeros(8, device=device), torch.zeros(8, device=device)
    buffer.copy_(staged)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        if injected:
            buffer.copy_(staged, non_blocking=True)
        torch.mul(buffer, 2, out=out)
    graph.instantiate()
    found = audit(graph, memory_of(static={"buffer": buffer, "out": out}, pool=graph))
    return Seen(bool(found.findings), tuple(f.region or f.node for f in found.findings), str(found))
