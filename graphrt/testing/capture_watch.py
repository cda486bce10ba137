"""Watch a process's captures for waits, memory outside the pool, compilations and launches on other streams.

    with CaptureWatch() as watch:
        with torch.cuda.graph(graph):
            step()
    print(watch.captures, *watch.faults, sep="\\n")

`CaptureWatch` watches captures by `torch.cuda.CUDAGraph` (`torch.cuda.graph`, `make_graphed_callables`, cudagraph
trees, graphrt) and, on a CPU, by graphrt's op trace. The marker `capture_safe` of graphrt.testing.pytest_plugin uses
this class.

| rule | on CUDA | on a CPU (op trace) |
|---|---|---|
| sync | a torch op that waits, `synchronize()` of a device, stream or event | a value read on the host; a tensor created from host values, which would wait on a device |
| allocate | memory outside the graph's pool | nothing, because an op trace owns the result of each op |
| compile | a kernel loaded by Triton or graphrt, a frame compiled by torch.compile | the same; an interpreted kernel is not compiled |
| stream | a torch op or a Triton kernel on a stream that is not capturing | nothing, because there are no streams |

Not detected: launches, allocations and waits of code that calls the driver without torch and Triton, such as a C++
extension, and kernels loaded by Inductor's static launcher. For an op inside a custom op, only waits are detected.
"""  # noqa: E501  rows of a table

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from graphrt.capture import op_trace
from graphrt.capture.allocator import allocator_rows
from graphrt.capture.inspect.pool import blocks_of
from graphrt.capture.op_trace import UNWRITTEN_FACTORIES, OpTraceRecorder
from graphrt.kernels.errors import CaptureError, ConfigError
from graphrt.kernels.native import nvrtc

ADVICE = {
    "sync": "expected a capture that never waits for the device, got {}; keep the value on the device, or read it "
    "after the replay",
    "allocate": "expected all memory of a capture in its pool, got {}; replays would keep using it after it is freed, "
    "so allocate it before the capture, or on a stream that captures",
    "compile": "expected kernels that are loaded before the capture, got {}; run the step once before",
    "stream": "expected every launch on a stream that captures, got {}; no replay repeats this launch, so let its "
    "stream wait for the capture stream first",
}
"""The error text of each rule, with advice."""

_DEVICE_TYPE = "cuda"
_MOST_FAULTS = 16  # of one capture
_REFUSED = (
    "synchronizing CUDA operation",
    "operation not permitted when stream is capturing",
    "during CUDA graph capture",
    "cudaErrorStreamCapture",
)
_OWN_FOLDERS = tuple(
    f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, triton, op_trace, sys.modules[__name__])
)
_OWN_FILES = frozenset({contextlib.__file__})


@dataclass(frozen=True, slots=True)
class CaptureFault:
    """A rule that a capture broke.

    capture  number of the capture, starting at 1
    rule     "sync", "allocate", "compile" or "stream"
    what     the op, kernel, call or memory
    where    file and line of the first caller outside torch, Triton and graphrt's checks, or "" if unknown
    """

    capture: int
    rule: str
    what: str
    where: str

    def __str__(self) -> str:
        at = f", {self.where}" if self.where else ""
        return f"{self.rule}, capture {self.capture}{at}: {ADVICE[self.rule].format(self.what)}"


class CaptureWatch:
    """Watch every capture of the process inside a `with` block. `faults` lists the broken rules.

    An op that waits raises an error in the capture, as on CUDA. Other faults are only recorded.

    Args:
        allowed: by rule, the reason why captures may break it.

    Raises:
        ConfigError: if a rule is unknown, or a reason is not a non-empty string.
    """

    def __init__(self, allowed: Mapping[str, str] | None = None) -> None:
        self.allowed = dict(allowed or {})
        for rule, reason in self.allowed.items():
            if rule not in ADVICE or not isinstance(reason, str) or not reason:
                raise ConfigError(
                    f"allowed: expected reasons by rule ({', '.join(ADVICE)}), got {rule}={reason!r}; pass a string "
                    f"as the reason"
                )
        self.captures = 0
        self.faults: list[CaptureFault] = []
        self._open: list[_Capture] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> CaptureWatch:
        graphs = torch.cuda.CUDAGraph
        self._wrap(graphs, "capture_begin", self._capture_begin)
        self._wrap(graphs, "capture_end", self._capture_end)
        self._wrap(OpTraceRecorder, "capture", self._capture_op_trace)
        for owner, name in ((torch.cuda, "torch.cuda"), (torch.cuda.Stream, "Stream"), (torch.cuda.Event, "Event")):
            self._wrap(owner, "synchronize", self._wait_of(f"{name}.synchronize()"))
        hooks = triton.knobs.runtime
        self._add(hooks.kernel_load_end_hook.add, hooks.kernel_load_end_hook.remove, self._triton_loaded)
        self._add(hooks.launch_enter_hook.add, hooks.launch_enter_hook.remove, self._triton_launches)
        self._add(nvrtc.load_hooks.append, nvrtc.load_hooks.remove, self._kernel_loaded)
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:  # a capture that did not end
            self._close(self._open[-1])
        self._undo.close()

    # -- captures

    def _capture_begin(self, begin: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        # After begin(), because the first capture_begin allocates the generator's state and waits for the device.
        capture = self._new_capture(graph)
        capture.before = _live_blocks(allocator_rows())
        capture.sync_mode = torch.cuda.get_sync_debug_mode()
        if "sync" not in self.allowed:
            _set_sync_mode("error")
        self._begin(capture)

    def _capture_end(self, end: Callable[..., None], graph: Any) -> None:
        capture = next((c for c in self._open if c.graph is graph), None)
        if capture is None:
            return end(graph)
        self._close(capture)
        end(graph)  # if this raises, there is no graph and no pool
        self._check_memory(capture, tuple(graph.pool()))

    def _capture_op_trace(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        capture = self._new_capture(None)
        self._begin(capture)
        try:
            return run(*args, **kwargs)
        except CaptureError as error:
            if "on the host" in str(error):
                first = error.__cause__ or error  # as raised inside the step
                where = _first_foreign(reversed(list(traceback.walk_tb(first.__traceback__))))
                self._note(capture, "sync", f"a read on the host ({error})", where)
            raise
        finally:
            self._close(capture)

    def _new_capture(self, graph: Any) -> _Capture:
        self.captures += 1
        return _Capture(self.captures, graph, threading.get_ident())

    def _begin(self, capture: _Capture) -> None:
        if (dynamo := sys.modules.get("torch._dynamo.callback")) is not None:
            dynamo.callback_handler.register_start_callback(self._dynamo_starts)
            capture.undo.callback(dynamo.callback_handler.remove_start_callback, self._dynamo_starts)
        capture.mode = _OpWatch(self, capture)
        capture.mode.__enter__()  # type: ignore[no-untyped-call]  # as above
        self._open.append(capture)

    def _close(self, capture: _Capture) -> None:
        self._open.remove(capture)
        if capture.mode is not None and _get_current_dispatch_mode() is capture.mode:  # else another mode is on top
            capture.mode.__exit__(None, None, None)
        capture.undo.close()
        if capture.sync_mode is not None:
            _set_sync_mode(capture.sync_mode)

    def _current(self) -> _Capture | None:
        """Return this thread's capture. Autograd threads belong to the capture whose stream they use."""
        mine = [c for c in self._open if c.thread == threading.get_ident()]
        if not mine and self._open and self._open[-1].graph is not None and torch.cuda.is_current_stream_capturing():
            mine = self._open
        return mine[-1] if mine else None

    # -- faults

    def _note(self, capture: _Capture, rule: str, what: str, where: str | None = None) -> None:
        if rule in self.allowed:
            return
        fault = CaptureFault(capture.number, rule, what, _caller() if where is None else where)
        same = [other for other in self.faults if other.capture == capture.number]
        if fault not in same and len(same) < _MOST_FAULTS:
            self.faults.append(fault)

    def _wait_of(self, what: str) -> Callable[..., Any]:
        def wait(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if (capture := self._current()) is not None:
                self._note(capture, "sync", what)
            return original(*args, **kwargs)

        return wait

    def _triton_loaded(self, module: object, function: object, name: str, group: object, digest: str) -> None:
        self._kernel_loaded(name)

    def _kernel_loaded(self, name: str) -> None:
        if (capture := self._current()) is not None:
            self._note(capture, "compile", f"kernel {name}, compiled or loaded")

    def _dynamo_starts(self, *args: object) -> None:
        if (capture := self._current()) is not None:
            self._note(capture, "compile", "a function that torch.compile compiles")

    def _triton_launches(self, metadata: Any) -> None:
        capture = self._current()
        if capture is not None and capture.graph is not None and not torch.cuda.is_current_stream_capturing():
            self._note(capture, "stream", f"Triton kernel {metadata.get().get('name', '')} on another stream")

    def op(self, capture: _Capture, func: Any, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Check a torch op after it has run."""
        name = str(func)
        if capture.graph is None:
            if name.startswith("aten.lift_fresh") and any(t.dim() for t in results):
                self._note(capture, "sync", "a tensor made of host values (torch.tensor)")
            return
        known = {_storage(t) for t in tensors}
        made = [t for t in results if _storage(t) not in known]
        where = _caller()
        capture.made += [(at, name, where) for t in made if t.device.type == _DEVICE_TYPE and (at := _storage(t))]
        of_device = any(t.device.type == _DEVICE_TYPE for t in (*tensors, *results))
        moves_no_data = torch.Tag.inplace_view in func.tags or func._schema.name in UNWRITTEN_FACTORIES
        launches = not moves_no_data and (bool(made) or func._schema.is_mutable)
        if of_device and launches and not torch.cuda.is_current_stream_capturing():
            self._note(capture, "stream", f"{name} on another stream", where)

    def op_failed(self, capture: _Capture, func: Any, error: Exception) -> None:
        """Record an op that CUDA or torch does not allow in a capture."""
        if any(words in str(error) for words in _REFUSED):
            self._note(capture, "sync", f"{func} ({str(error).splitlines()[0]})")

    def _check_memory(self, capture: _Capture, pool: tuple[int, ...]) -> None:
        """Compare op results and live blocks with the segments of the pool."""
        segments = allocator_rows()
        own = [(s["address"], s["address"] + s["total_size"]) for s in segments if _pool_of(s) == pool]
        told = set()
        for address, name, where in capture.made:
            if not any(start <= address < end for start, end in own):
                told.add(address)
                self._note(capture, "allocate", f"the result of {name} outside of it", where)
        for address, size in sorted(_live_blocks(segments, pool) - capture.before):
            if address not in told:
                self._note(capture, "allocate", f"{size} bytes at {address:#x} outside of it", "")

    # -- hooks

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        own = name in vars(owner)
        setattr(owner, name, call)
        self._undo.callback(setattr, owner, name, original) if own else self._undo.callback(delattr, owner, name)

    def _add(self, add: Callable[..., object], remove: Callable[..., object], hook: Callable[..., None]) -> None:
        add(hook)
        self._undo.callback(remove, hook)


@dataclass(eq=False)
class _Capture:
    """A capture in progress. `graph` is None for an op trace.

    before  address and size of each block that was live at the start of the capture
    made    memory allocated by ops: address, op, caller
    """

    number: int
    graph: Any
    thread: int
    before: set[tuple[int, int]] = field(default_factory=set)
    made: list[tuple[int, str, str]] = field(default_factory=list)
    sync_mode: int | None = None
    mode: TorchDispatchMode | None = None
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class _OpWatch(TorchDispatchMode):
    """Passes every op of a capture to the watch. torch.compile still compiles inside it, and compiled code runs."""

    def __init__(self, watch: CaptureWatch, capture: _Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._watch, self._capture = watch, capture

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._watch.op_failed(self._capture, func, error)
            raise
        self._watch.op(self._capture, func, _plain_tensors((args, kwargs)), _plain_tensors(result))
        return result


def _plain_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, except subclasses, which may have no memory."""
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)


def _pool_of(segment: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(segment["segment_pool_id"])


def _live_blocks(segments: Sequence[Any], pool: tuple[int, ...] | None = None) -> set[tuple[int, int]]:
    """Return the address and size of every block in use, except those in `pool`."""
    return {
        (address, block["size"])
        for segment, block, address in blocks_of(segments)
        if (pool is None or _pool_of(segment) != pool) and block["state"] != "inactive"
    }


def _caller() -> str:
    """Return the file and line of the code that called torch."""
    return _first_foreign(traceback.walk_stack(sys._getframe(1)))


def _first_foreign(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the file and line of the first frame outside the libraries, or ""."""
    for frame, line in frames:
        name = frame.f_code.co_filename
        if name not in _OWN_FILES and not name.startswith(_OWN_FOLDERS) and not name.startswith("<"):
            return f"{Path(name).name}:{line}"
    return ""
