"""Planted bugs that only a GPU shows: launches in flight, streams, memory that is given away, conditional nodes."""

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


@add("pinned staging overwritten in flight", "mini-sglang #103, vLLM #24527, tokenspeed #376", "packed", gpu=True)
class Staging(Decode):
    """The host fills its one pinned buffer for the next step before the device has read it for this one."""

    def add_buffers(self) -> None:
        self.staged = torch.zeros(4 + COLUMNS, ROWS, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        packed = torch.zeros(4 + COLUMNS, ROWS, dtype=torch.int64, device=self.device)
        self.buffers = {"packed": packed}
        self.done = torch.cuda.Event()
        for at, name in enumerate(NAMES):
            self.__dict__[name] = packed[at] if at < 4 else packed[4:].t()

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        if not self.planted:
            self.done.synchronize()  # the copy of the step before has been read
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
    """Positions come over a stream of their own."""

    waits_before, waits_after = True, True

    def add_buffers(self) -> None:
        self.side = torch.cuda.Stream(self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        positions = self.positions.clone()
        super().refresh(inputs)
        wanted = self.positions.clone()
        self.positions.copy_(positions)
        main = torch.cuda.current_stream(self.device)
        if self.waits_before or not self.planted:
            self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.positions.copy_(wanted)
        wanted.record_stream(self.side)
        if self.waits_after or not self.planted:
            main.wait_stream(self.side)


@add("a copy on another stream that nobody waits for", "ninfer #44", "positions", gpu=True)
class NoWaitAfter(SideStream):
    """The launch does not wait for the side stream."""

    waits_after = False


@add("a buffer overwritten while a graph reads it", "sglang #26380, #26646", "positions", gpu=True)
class NoWaitBefore(SideStream):
    """The side stream does not wait for the launch before, which still reads the buffer."""

    waits_before = False

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        main = torch.cuda.current_stream(self.device)
        n = len(inputs["positions"])
        wanted = self.wanted[n]
        wanted[:n] = inputs["positions"]
        Decode.refresh(self, {**inputs, "positions": self.positions[:n].clone()})
        if not self.planted:
            self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.positions.copy_(wanted)
        main.wait_stream(self.side)

    def add_buffers(self) -> None:
        super().add_buffers()
        self.wanted = {n: self.ints(ROWS) for n in range(1, ROWS + 1)}


@add("a tensor that was captured and then freed", "vLLM #43909, aiter #4587, #5194", "self.table", gpu=True)
class FreedTensor(Decode):
    """A small table is made anew whenever it fell out of a cache. Its contents are the same, its address is not."""

    def add_buffers(self) -> None:
        self.table = self.made()

    def made(self) -> torch.Tensor:
        return torch.arange(1, ROWS + 1, device=self.device, dtype=torch.float32).contiguous()

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.planted:
            kept = self.table  # the new one must not get the old one's memory
            self.table = self.made()
            del kept

    def run(self) -> torch.Tensor:
        return super().run() * self.table[:, None]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * self.made()[: len(inputs["seq_lens"]), None]


@add("an allocation that was given away after the capture", "sglang #27140", "self.prepared", gpu=True)
class GivenAway(Decode):
    """Weights are prepared when they are first needed, and dropped between steps to save memory."""

    prepared: torch.Tensor | None = None

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.planted:
            self.prepared = None

    def run(self) -> torch.Tensor:
        if self.prepared is None and not torch.cuda.is_current_stream_capturing():
            self.prepared = self.embed * 2
        return super().run() * self.prepared[0, 0]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * 2 * self.embed[0, 0]


@add("a loop whose condition never resets", "the CUDA documentation of conditional handles", "", gpu=True)
class Loop:
    """The condition of a WHILE node is 0 after a launch, and nobody sets it back to 1 for the next one."""

    def __init__(self, planted: bool, device: torch.device) -> None:
        self.planted, self.device = planted, device
        self.buffers = {
            "x": torch.ones(8, device=device),
            "left": torch.zeros(1, dtype=torch.int32, device=device),
            "go_on": torch.zeros(1, dtype=torch.int32, device=device),
        }
        self.recorder = make_recorder(device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        self.buffers["x"].copy_(inputs["x"])
        self.buffers["left"].copy_(inputs["left"])
        self.buffers["go_on"].zero_()

    def body(self) -> torch.Tensor:
        self.buffers["x"].mul_(2)
        self.buffers["left"].sub_(1)
        self.buffers["go_on"].copy_(self.buffers["left"] > 0)
        return self.buffers["x"] + 0

    def run(self) -> torch.Tensor:
        out = self.body()
        while self.buffers["go_on"].item():
            out = self.body()
        return out

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return inputs["x"] * 2.0 ** inputs["left"].item()

    def capture(self, inputs: Mapping[str, Any]) -> Callable[[], torch.Tensor]:
        flags = 0 if self.planted else driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        with self.recorder.session(), mock.patch.object(driver, "CU_GRAPH_COND_ASSIGN_DEFAULT", flags):
            graph = self.recorder.capture(self.body, BatchDescriptor.decode(1), lambda: None)
            loop = self.recorder.loop(graph, self.buffers["go_on"])

        def launch() -> torch.Tensor:
            loop.launch()
            return loop.output

        return launch

    def make_inputs(self, case: int) -> dict[str, Any]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(case)).to(self.device)
        return {"x": x, "left": torch.tensor([(3, 1, 4, 2)[case]], dtype=torch.int32, device=self.device)}


@add("host memory copied inside the graph", "onnxruntime #32121, candle #3352", "", tool="audit", gpu=True)
def captured_copy(planted: bool, device: torch.device) -> Seen:
    """A copy from pinned memory is captured: every replay reads whatever stands there by then."""
    from graphrt.capture.inspect.audit import audit, memory_of

    staged = torch.arange(8.0).pin_memory()
    buffer, out = torch.zeros(8, device=device), torch.zeros(8, device=device)
    buffer.copy_(staged)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        if planted:
            buffer.copy_(staged, non_blocking=True)
        torch.mul(buffer, 2, out=out)
    graph.instantiate()
    found = audit(graph, memory_of(static={"buffer": buffer, "out": out}, pool=graph))
    return Seen(bool(found.findings), tuple(f.region or f.node for f in found.findings), str(found))
