"""The op trace: the twin of a CUDA graph for machines without CUDA.

While a step runs once, a `TorchDispatchMode` writes every dispatched op to a op trace with its arguments as they were:
scalars, and tensors with their storages. A launch runs the op trace, never the Python that made it, and copies results
into the tensors that the first run produced. So a scalar that was baked, a buffer that was replaced and a value that
was read on the host show on CPU as they would in a graph; re-running the Python would hide all three.
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
from graphrt.capture.graph import NOTHING, CapturedGraph, GraphReport, StepFunction, check_loop, ordinary
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
        "aten::lift_fresh",  # torch.tensor: its values were written before any op could be seen
    }
)  # fmt: skip
"""Ops whose result is memory, not data: nothing is launched for them."""
MAX_RUNS = 1 << 20
"""Runs after which a loop on a CPU gives up. On CUDA nothing would end it."""


@dataclass(frozen=True, slots=True)
class OpTraceEntry:
    """One op: what to call, and which of its results are memory of its own that a launch must fill again.

    interpret   the op ran an interpreted Triton kernel, and must again: which kernel runs is frozen too
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
    """What `torch.empty` and its kind gave: `tensor`, made before the op of index `before` ran."""

    before: int
    tensor: torch.Tensor
    func: Callable[..., Any]


class OpTrace:
    """A captured step on CPU: `launch()` replays the ops into the tensors of the first run."""

    def __init__(
        self, entries: list[OpTraceEntry], output: torch.Tensor, report: GraphReport, made: tuple[MadeMemory, ...] = ()
    ) -> None:
        self._entries, self._made = entries, made
        self.output = ordinary(output)
        self.report = report

    @property
    def entries(self) -> tuple[OpTraceEntry, ...]:
        """The ops in the order of a launch; none once the op trace was closed."""
        return tuple(self._entries)

    @property
    def made(self) -> tuple[MadeMemory, ...]:
        """Memory that the step allocated and that no launch fills; none once the op trace was closed."""
        return self._made

    def launch(self) -> None:
        # A graph knows no autocast: what the caller has in force must not change what was recorded.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for entry in self._entries:
                entry.run()

    def copy(self) -> OpTrace:
        """The same ops on the same memory, closed by itself."""
        return OpTrace(self._entries, self.output, self.report, self._made)

    def close(self) -> None:
        self._entries, self._made = [], ()
        self.output = NOTHING


class OpTraceLoop:
    """The twin of a loop of CUDA graphs: one launch runs the op trace, and again while go_on[0] is not 0 after a
    run."""

    def __init__(self, step: OpTrace, go_on: torch.Tensor) -> None:
        start = time.perf_counter()
        self._step: OpTrace | None = step.copy()
        self._go_on = go_on.detach()  # memory of the time of capture, whatever becomes of the caller's tensor
        self.output = step.output
        self.report = GraphReport(step.report.descriptor, time.perf_counter() - start, 0, 0, step.report.nodes)

    @property
    def step(self) -> OpTrace:
        """What it repeats. Raises: CaptureError once it was closed."""
        return self._open("step")

    @property
    def go_on(self) -> torch.Tensor:
        """What it reads after every run: int32 [1]."""
        return self._go_on

    def launch(self) -> None:
        step = self._open("launch()")
        for _ in range(MAX_RUNS):
            step.launch()
            if self._go_on.item() == 0:
                return
        raise ReplayError(
            f"go_on: expected 0 after at most {MAX_RUNS} runs, got {self._go_on.item()}; let the step count its runs "
            "and stop, as on CUDA the device would never end"
        )

    def close(self) -> None:
        self._step = None
        self.output = NOTHING

    def _open(self, what: str) -> OpTrace:
        if self._step is None:
            raise CaptureError(f"loop: expected an open loop, got {what} of a closed one; make another with loop()")
        return self._step


class OpTraceRecorder:
    """Records op op_traces. Capture runs the step once for real, which a CUDA graph capture does not."""

    name = "op trace (CPU twin of a CUDA graph)"
    streams: tuple[torch.cuda.Stream, ...] = ()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def warm_up(self, step: StepFunction, prepare: Callable[[], None]) -> None:
        prepare()
        with torch.inference_mode():
            step()

    def record(self, step: StepFunction, descriptor: BatchDescriptor, prepare: Callable[[], None]) -> OpTrace:
        start = time.perf_counter()
        prepare()
        writer = _OpTraceWriter()
        try:
            with torch.inference_mode(), _uncompiled(), _kernels_of_op_trace(writer), _HostReadGuard(writer), writer:
                output = step()
            if writer.refused is not None:  # the step went on: on CUDA the capture would be lost all the same
                raise writer.refused
        except CaptureError as error:
            raise CaptureError(f"{descriptor}: {error}") from error
        owned = sum(t.numel() * t.element_size() for e in writer.entries for t in e.outputs if t is not None)
        report = GraphReport(descriptor, time.perf_counter() - start, owned, 0, len(writer.entries))
        return OpTrace(writer.entries, output, report, tuple(writer.made))

    def loop(self, graph: CapturedGraph, go_on: torch.Tensor) -> OpTraceLoop:
        return OpTraceLoop(check_loop(OpTrace, graph, go_on, torch.device("cpu")), go_on)

    def pool_bytes(self) -> int:
        """Nothing: there is no pool. A op_trace owns the results of its ops, and their sizes are frozen with it."""
        return 0

    def close(self) -> None:
        pass


class _OpTraceWriter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.entries: list[OpTraceEntry] = []
        self.made: list[MadeMemory] = []
        self.inside_op = False
        self.sets_number = False  # within `x[index] = number`
        self.refused: CaptureError | None = None  # the first error, whatever the step made of it

    def refuse(self, text: str) -> CaptureError:
        """The error for what a graph cannot hold."""
        error = CaptureError(text)
        self.refused = self.refused or error
        return error

    def launch(self, kernel: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a kernel that the step launches by itself, and write it down."""
        if self.inside_op:  # of an op, which is on the op trace
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
        if self.inside_op:  # of a kernel that the step launches
            return func(*args, **kwargs)
        if (opened := composite_impl(func) or _python_of(func)) is not None:
            with self:
                return opened(*args, **kwargs)
        if reads_host(func, args, kwargs, sets_number=self.sets_number):
            raise self.refuse(
                f"{func}: expected ops whose results stay on the device, got one that reads values on the host or has "
                "a data-dependent shape; a graph cannot hold it, compute with torch.where, masked_fill or fixed shapes"
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
            return result  # changes no data: a launch finds shape and memory as they were left
        inputs = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        # Results that are memory of their own; None stands for a view of an input, which needs no filling. The caller
        # may change a result's shape in place (squeeze_, t_), so the op trace keeps a view of its own.
        kept = tuple(
            None if t.untyped_storage().data_ptr() in inputs else t.detach() for t in tensors_in(result)
        )  # fmt: skip
        if func._schema.is_mutable or any(t is not None for t in kept):
            args, kwargs = _aliases((args, kwargs))
            self.entries.append(OpTraceEntry(func, args, kwargs, kept, cpu_runs_triton()))
        return result


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled functions run as they were written: a kernel of a compiler is no op, and would not reach the op
    trace."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _kernels_of_op_trace(writer: _OpTraceWriter) -> Iterator[None]:
    """Writes down the Triton kernels that the step launches by itself. Interpreted, they are no ops."""
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
    """The function of a `torch.library.custom_op` that every device runs: a graph holds what it calls, not itself."""
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
                f"Tensor.{name}: expected no host read of a tensor during capture, got one; the value would be frozen "
                "in the graph, keep it in a tensor"
            )
        if name != "__setitem__" or len(args) < 3 or isinstance(args[2], torch.Tensor):
            return func(*args, **(kwargs or {}))
        self._writer.sets_number = True
        try:
            return func(*args)
        finally:
            self._writer.sets_number = False


def _aliases(tree: Any) -> Any:
    """The same arguments with tensors of the op trace's own on the same memory: as a graph does, a launch goes on using
    the memory and the shapes of the capture, whatever the caller gives its tensors later."""
    made: dict[int, torch.Tensor] = {}
    return tree_map_only(torch.Tensor, lambda tensor: made.setdefault(id(tensor), tensor.detach()), tree)
