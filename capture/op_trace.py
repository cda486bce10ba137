"""The op trace: a substitute for CUDA graphs on machines without CUDA.

While a step runs once, a `TorchDispatchMode` appends every dispatched op to the trace with its arguments: scalars, and
tensors with their storages. A launch runs these ops, not the Python code, and copies results into the tensors of the
first run. Frozen scalars, replaced buffers and host reads thus have the same effect on a CPU as in a CUDA graph.
Running the Python code again would hide all three.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._library import custom_ops
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import NOTHING, CapturedGraph, GraphReport, StepFunction, check_loop, loop_closed, ordinary
from graphrt.capture.host_reads import reads_host, tensors_in
from graphrt.kernels.errors import CaptureError, ReplayError
from graphrt.kernels.library import composite_impl, cpu_runs_triton, interpreted

_HOST_READS = frozenset(
    {
        "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__repr__", "__str__",
        "__format__",
    }
)  # fmt: skip
UNWRITTEN_FACTORIES = frozenset(
    {
        "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
        "aten::empty_permuted",
        "aten::lift_fresh",  # torch.tensor: values are written before any op is dispatched
    }
)  # fmt: skip
"""Ops that a launch skips, because they return uninitialized memory."""
MAX_RUNS = 1 << 20
"""Number of runs after which a loop on a CPU raises ReplayError. On CUDA, the loop would run forever."""


@dataclass(frozen=True, slots=True)
class OpTraceEntry:
    """One op of a trace.

    outputs     results that own their memory, which a launch refills; None for views of inputs
    interpret   whether the op ran an interpreted Triton kernel; a launch does the same
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor | None, ...]
    interpret: bool

    def run(self) -> None:
        with interpreted() if self.interpret else contextlib.nullcontext():
            result = self.func(*self.args, **self.kwargs)
        for kept, new in zip(self.outputs, tensors_in(result), strict=True):
            if kept is not None:
                kept.copy_(new)


@dataclass(frozen=True, slots=True)
class MadeMemory:
    """An uninitialized tensor, such as from `torch.empty`, allocated before the op at index `before` ran."""

    before: int
    tensor: torch.Tensor
    func: Callable[..., Any]


class OpTrace:
    """A captured step on a CPU. `launch()` replays the ops into the tensors of the first run."""

    def __init__(
        self, entries: list[OpTraceEntry], output: torch.Tensor, report: GraphReport, made: tuple[MadeMemory, ...] = ()
    ) -> None:
        self._entries, self._made = entries, made
        self.output = ordinary(output)
        self.report = report

    @property
    def entries(self) -> tuple[OpTraceEntry, ...]:
        """The ops in launch order; empty if the trace is closed."""
        return tuple(self._entries)

    @property
    def made(self) -> tuple[MadeMemory, ...]:
        """Memory that the step allocated and no launch initializes; empty if the trace is closed."""
        return self._made

    def launch(self) -> None:
        # A graph ignores autocast, so the caller's setting must not change the captured ops.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for entry in self._entries:
                entry.run()

    def copy(self) -> OpTrace:
        """Return a second trace of the same ops and memory. Closing one of the two leaves the other open."""
        return OpTrace(self._entries, self.output, self.report, self._made)

    def close(self) -> None:
        self._entries, self._made = [], ()
        self.output = NOTHING


class OpTraceLoop:
    """A substitute for a CUDA graph with a WHILE node. A launch repeats a trace while condition[0] is not 0."""

    def __init__(self, step: OpTrace, condition: torch.Tensor) -> None:
        start = time.perf_counter()
        self._step: OpTrace | None = step.copy()
        self._condition = condition.detach()  # keeps the memory even if the caller's tensor is resized or replaced
        self.output = step.output
        self.report = GraphReport(step.report.descriptor, time.perf_counter() - start, 0, 0, step.report.nodes)

    @property
    def step(self) -> OpTrace:
        """The repeated trace. Raises: CaptureError: if closed."""
        return self._open("step")

    @property
    def condition(self) -> torch.Tensor:
        """The condition, int32 [1], which a launch reads after every run."""
        return self._condition

    def launch(self) -> None:
        step = self._open("launch()")
        for _ in range(MAX_RUNS):
            step.launch()
            if self._condition.item() == 0:
                return
        raise ReplayError(
            f"condition: expected 0 after at most {MAX_RUNS} runs, got {self._condition.item()}; count the runs in the "
            "step and stop at a limit, because on CUDA the loop would never end"
        )

    def close(self) -> None:
        self._step = None
        self.output = NOTHING

    def _open(self, call: str) -> OpTrace:
        if self._step is None:
            raise loop_closed(call)
        return self._step


class OpTraceRecorder:
    """Captures op traces. Capturing executes the step once, unlike the capture of a CUDA graph."""

    name = "op trace (CPU)"
    streams: tuple[torch.cuda.Stream, ...] = ()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def warm_up(self, step: StepFunction, prepare: Callable[[], None]) -> None:
        prepare()
        with torch.inference_mode():
            step()

    def capture(self, step: StepFunction, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> OpTrace:
        start = time.perf_counter()
        prepare()
        writer = _OpTraceWriter()
        try:
            with torch.inference_mode(), _uncompiled(), _kernels_of_op_trace(writer), _HostReadGuard(writer), writer:
                output = step()
            if writer.refused is not None:  # the step caught the error, but on CUDA the capture would still be invalid
                raise writer.refused
        except CaptureError as error:
            raise CaptureError(f"{descriptor}: {error}") from error
        owned = sum(t.numel() * t.element_size() for e in writer.entries for t in e.outputs if t is not None)
        report = GraphReport(descriptor, time.perf_counter() - start, owned, 0, len(writer.entries))
        return OpTrace(writer.entries, output, report, tuple(writer.made))

    def loop(self, graph: CapturedGraph, condition: torch.Tensor) -> OpTraceLoop:
        return OpTraceLoop(check_loop(OpTrace, graph, condition, torch.device("cpu")), condition)

    def pool_bytes(self) -> int:
        """Return 0. An op trace has no pool; it owns the results of its ops."""
        return 0

    def close(self) -> None:
        pass


class _OpTraceWriter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.entries: list[OpTraceEntry] = []
        self.made: list[MadeMemory] = []
        self.inside_op = False
        self.sets_number = False  # in `x[index] = number`
        self.refused: CaptureError | None = None  # the first error, even if the step caught it

    def refuse(self, text: str) -> CaptureError:
        """Return the error for an operation that a graph cannot contain, and store the first such error."""
        error = CaptureError(text)
        self.refused = self.refused or error
        return error

    def launch(self, kernel: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a kernel that the step launches directly, and append it to the trace."""
        if self.inside_op:  # launched by an op, which is in the trace
            kernel(*args, **kwargs)
            return
        self.inside_op = True
        try:
            kernel(*args, **kwargs)
        finally:
            self.inside_op = False
        args, kwargs = _aliases((args, kwargs))
        self.entries.append(OpTraceEntry(kernel, args, kwargs, (), cpu_runs_triton()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside_op:  # called by a kernel that the step launches
            return func(*args, **kwargs)
        if (opened := composite_impl(func) or _python_of(func)) is not None:
            with self:
                return opened(*args, **kwargs)
        if reads_host(func, args, kwargs, sets_number=self.sets_number):
            raise self.refuse(
                f"{func}: this op reads values on the host or has a data-dependent shape, which a graph cannot "
                "contain; use torch.where, masked_fill or fixed shapes"
            )
        self.inside_op = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside_op = False
        if func._schema.name in UNWRITTEN_FACTORIES:
            self.made.append(MadeMemory(len(self.entries), result.detach(), func))
            return result
        if torch.Tag.inplace_view in func.tags:
            return result  # changes no data
        inputs = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        # Results that own their memory; None is a view of an input, which a launch need not fill. The caller may change
        # a result's shape in place (squeeze_, t_), so the trace keeps a separate view.
        kept = tuple(
            None if t.untyped_storage().data_ptr() in inputs else t.detach() for t in tensors_in(result)
        )  # fmt: skip
        if func._schema.is_mutable or any(t is not None for t in kept):
            args, kwargs = _aliases((args, kwargs))
            self.entries.append(OpTraceEntry(func, args, kwargs, kept, cpu_runs_triton()))
        return result


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled functions eagerly. Compiled kernels are not dispatched as ops, so the trace would miss them."""
    if "torch._dynamo" not in sys.modules:  # no function is compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _kernels_of_op_trace(writer: _OpTraceWriter) -> Iterator[None]:
    """Append Triton kernels that the step launches directly, because these are not dispatched as ops."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    executor: Any = interpreter.GridExecutor
    call = executor.__call__

    def launched(grid: Any, *args: Any, **kwargs: Any) -> None:
        writer.launch(partial(call, grid), args, kwargs)

    executor.__call__ = launched
    try:
        yield
    finally:
        executor.__call__ = call


def _python_of(func: Any) -> Callable[..., Any] | None:
    """Return the device-independent function of a `torch.library.custom_op`. A graph contains the ops that it calls."""
    op = custom_ops.OPDEFS.get(func._schema.name)
    return None if op is None or "cpu" in op._backend_fns else op._backend_fns.get(None)


class _HostReadGuard(TorchFunctionMode):
    """Catches host reads that never reach the dispatcher, such as `tolist()` of a CPU tensor."""

    def __init__(self, writer: _OpTraceWriter) -> None:
        super().__init__()
        self._writer = writer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and not self._writer.inside_op:
            raise self._writer.refuse(
                f"Tensor.{name}: the step reads a tensor on the host during capture, and the value would be frozen in "
                "the graph; keep it in a tensor"
            )
        if name != "__setitem__" or len(args) < 3 or isinstance(args[2], torch.Tensor):
            return func(*args, **(kwargs or {}))
        self._writer.sets_number = True
        try:
            return func(*args)
        finally:
            self._writer.sets_number = False


def _aliases(tree: Any) -> Any:
    """Return the arguments with the trace's own tensors on the same memory. Like a graph, a launch continues to use the
    memory and shapes of the capture, even if the caller resizes or replaces tensors."""
    made: dict[int, torch.Tensor] = {}
    return tree_map_only(torch.Tensor, lambda tensor: made.setdefault(id(tensor), tensor.detach()), tree)
