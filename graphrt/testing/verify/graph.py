"""The graph checks of `verify`: capture at one case, then replay every case after every fill of the buffers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import CapturedGraph, Recorder
from graphrt.capture.recorder import make_recorder
from graphrt.kernels.errors import CaptureError
from graphrt.testing.verify.blame import Blame, Captured
from graphrt.testing.verify.eager import REFRESH_READS
from graphrt.testing.verify.host import HostValues
from graphrt.testing.verify.in_flight import flight_findings
from graphrt.testing.verify.locations import locations
from graphrt.testing.verify.memory import NAN_BYTE, CapturedMemory, UnwrittenInGraph, fill_inactive
from graphrt.testing.verify.report import own_line, raised
from graphrt.testing.verify.runs import POISONED, Case, Contents, Fill
from graphrt.testing.verify.subject import Output
from graphrt.testing.verify.verification import SURELY, Verification

_MOST_EXPLAINED = 8  # wrong replays per graph whose cause is searched; further wrong replays are only counted
_KEY = BatchDescriptor.decode(1)


class GraphChecks:
    """Capture and replay.

    seconds     duration of the captures
    unwritten   number of uninitialized allocations filled with poison
    pool_bytes  largest size of the inactive blocks filled with poison
    in_flight   number of replays queued on stalled streams
    """

    def __init__(self, verification: Verification) -> None:
        self._v = verification
        self._recorder: Recorder | None = None
        self._graphs: list[CapturedGraph] = []
        self.seconds, self.unwritten, self.pool_bytes, self.in_flight = 0.0, 0, 0, 0

    def check(self, name: str) -> None:
        """Capture at a case, then replay every case after every fill; the captured case comes last."""
        case = self._v.cases.get(name)
        if case is None or not self._v.reference:
            return
        with ExitStack() as stack:
            self._forget(case, stack)
            self._check(case)

    def _check(self, case: Case) -> None:
        start = time.perf_counter()
        graph = self._capture(case)
        self.seconds += time.perf_counter() - start
        if graph is None:
            return
        order = list(self._v.cases.values())
        at = order.index(case)
        order = [*order[at + 1 :], *order[: at + 1]]
        if at == len(order) - 1:  # for the last capture, reverse the order, so that neighbors differ
            order = [*reversed(order[:-1]), case]
        explained, wrong = 0, set[str]()
        for value in (Fill.PREVIOUS, Fill.HIGH, Fill.LOW):
            for each in order:
                if self._replay(graph, each, value, explain=explained < _MOST_EXPLAINED):
                    explained += 1
                    wrong.add(each.name)
                if self._v.unrepeatable:
                    return
        if self._v.target.device.type == "cuda":
            for finding in flight_findings(self._v, graph, order, wrong):
                self._v.add(finding)
            self.in_flight += 2 * len(order)

    def _forget(self, case: Case, stack: ExitStack) -> None:
        """Restore the initial Python values, from before any case ran, until the stack closes.

        A server captures before it has seen other cases, so values that grow with cases grow after the capture. If the
        captured case then gives a different result, another check reports it, and the values are not restored.
        """
        target, runs = self._v.target, self._v.runs
        if target.capture is not None:
            return
        changes = self._v.host.changed(*target.root, entries=True)
        old = {change.path: runs.before(change) for change in changes}
        contents, expected = self._v.reference[case.name]
        with ExitStack() as forgotten:
            forgotten.enter_context(runs.as_at_first(old))
            if old and runs.same(case, runs.eager(case, contents, put=False), expected):
                stack.push(forgotten.pop_all())

    def _capture(self, case: Case) -> Captured | None:
        target, runs = self._v.target, self._v.runs
        contents = runs.enter(case, Fill.INITIAL)
        static: dict[str, torch.Tensor] = {}
        memory = UnwrittenInGraph(target.device)

        def step() -> torch.Tensor:
            with memory.watch:
                static.update(target.run())
            return next(iter({**static, **target.buffers}.values()))

        try:
            if target.capture is not None:
                launch = target.capture(case.inputs)
            else:
                graph = self._record(contents, step)

                def launch() -> Output:
                    graph.launch()
                    return static

        except Exception as error:
            if "CUDA error" in str(error) and not isinstance(error, CaptureError):
                raise
            text = str(error).removeprefix(f"{_KEY}: ") + own_line(error)
            because = "a graph contains kernel launches, numbers and addresses; compute with tensors on the device"
            self._v.find("capture", case, case.name, f"the step cannot be captured: {text}", Blame("", (), because))
            return None
        self.unwritten += memory.count
        poisoned = {n: t for n, t in static.items() if n not in runs.old}

        fills_results = [True]  # whether to poison the results of the next launch

        def fill_memory(byte: int) -> None:
            fills_results[0] = byte != 0
            memory.fill(byte)
            if target.device.type == "cuda":
                self.pool_bytes = max(self.pool_bytes, fill_inactive(target.device, byte))

        def launched() -> Output:
            for name, tensor in poisoned.items():
                if fills_results[0]:
                    runs.fill(name, tensor, Fill.HIGH)
                else:
                    tensor.zero_()
            fills_results[0] = True
            return launch()

        host = HostValues.take(*target.root)
        # Use aliases, because the caller may change its tensor's memory by set_() or its shape by resize_().
        named = {name: tensor.detach() for name, tensor in target.subject.buffers.items()}
        tensors = (at.value for at in locations(*target.root) if isinstance(at.value, torch.Tensor))
        memory_at_capture = CapturedMemory(tensors)
        return Captured(case, launched, host, fill_memory, target.found | named, memory_at_capture)

    def _record(self, contents: Contents, step: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Warm up and capture, like a server."""
        runs = self._v.runs
        if self._recorder is None:
            self._recorder = make_recorder(self._v.target.device)

        def prepare() -> None:
            runs.restore_state()
            runs.put(contents)

        with self._recorder.session():
            self._v.target.run()
            prepare()
            graph = self._recorder.capture(step, _KEY, prepare)
        self._graphs.append(graph)
        return graph

    def _replay(self, graph: Captured, case: Case, value: Fill, *, explain: bool) -> bool:
        """Replay a case, compare it with the reference, and return whether it is wrong."""
        runs = self._v.runs
        try:
            contents = runs.enter(case, value)
        except Exception as error:
            text = f"refresh() raised {raised(error)}; before it the buffers held {value.value}"
            self._v.find("refresh", case, graph.case.name, text, REFRESH_READS)
            return True
        graph.memory.poison_dropped()
        moved = [name for name, tensor in self._v.target.buffers.items() if not _is_captured(name, tensor, graph)]
        is_poisoned = value in POISONED
        runs.replays += 1
        unowned = value if is_poisoned and not self._v.trespassed else None
        before = partial(graph.fill_memory, NAN_BYTE) if is_poisoned else None
        got = runs.run(case, graph.launch, contents, entered=True, unowned=unowned, before=before)
        self._v.check_canaries(case, graph.case.name, "a replay")
        expected = self._v.reference[case.name][1]
        if runs.same(case, got, expected):
            return False
        wrong = None if got.error else runs.difference(case, got, expected)
        text = f"the replay differs from the eager run; before refresh() the buffers held {value.value}"
        if got.error:
            text = f"the replay raised {got.error}"
        if moved:
            name = moved[0]
            shapes = [list(group[name].shape) for group in (graph.buffers, self._v.target.buffers) if name in group]
            because = f"refresh() replaces the tensor {name}, but the graph reads the old tensor; use copy_()"
            if len(shapes) == 2 and shapes[0] != shapes[1]:
                because = f"refresh() gives {name} the shape {shapes[1]}, and the graph has {shapes[0]}; use copy_()"
            self._v.find("replaced", case, graph.case.name, text, Blame("", tuple(moved), because), wrong)
        elif explain:
            if not self._v.repeats(case, SURELY):
                return True
            blame = self._v.blamer.explain(graph, case, value, contents, got)
            self._v.find(blame.check, case, graph.case.name, text, blame, wrong)
        else:
            self._v.count_again()
        return True

    def close(self) -> None:
        """Drop the graphs."""
        for graph in self._graphs:
            graph.close()
        if self._recorder is not None:
            self._recorder.close()


def _is_captured(name: str, tensor: torch.Tensor, graph: Captured) -> bool:
    """Return whether a buffer has the same memory and layout as at capture."""
    captured = graph.buffers.get(name)
    if captured is None:
        return False
    layouts = [(t.data_ptr(), t.shape, t.stride()) for t in (captured, tensor)]
    return layouts[0] == layouts[1]
