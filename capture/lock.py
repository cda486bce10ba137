"""Count kernels loaded after capture, and memory growth after capture.

Compiling a kernel during serving blocks the host for a third of a second; loading one from Triton's disk cache takes a
few milliseconds. A step that replays a graph must do neither. The lock uses the hooks that Triton and the native
kernels call when they load a kernel, so a step that loads no kernel has no overhead.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

import triton

from graphrt.kernels.errors import ReplayError
from graphrt.kernels.native import nvrtc


class Doing(str, Enum):
    """The activity of a lock's owner when a kernel was loaded.

    GRAPH_STEP       launching a graph, which must not load kernels. Only then may the lock raise
    OTHER_CALL       another call of the owner, or an eager step, which may load kernels
    BETWEEN          no call, but the load is on the thread of the owner's last call and delays its next call
    SOMETHING_ELSE   the load is on another thread; it is not counted
    """

    GRAPH_STEP = "in a graph step"
    OTHER_CALL = "outside the graphs"
    BETWEEN = "between calls"
    SOMETHING_ELSE = "elsewhere"


class CaptureLock:
    """Counts kernel loads and memory growth between `engage()` and `release()`.

        lock = CaptureLock(doing, {"graph pool": recorder.pool_bytes}, strict=False)
        lock.engage()                     after the last capture
        lock.kernels                      Counter({"_attend_kernel (outside the graphs)": 1})
        lock.poll(), lock.grown           Counter({"graph pool": 2097152})

    doing    called when a kernel is loaded, on the thread that loads it
    memory   by name, functions that return the current bytes of memory that must not grow
    strict   raise ReplayError for a kernel loaded in a graph step, and for memory that grew

    kernels  number of loads by kernel name and `Doing`. All variants of a Triton kernel have the same name
    grown    growth in bytes by name, as of the last `poll`

    A load is not always a compilation, because Triton may read the kernel from its disk cache. Kernels of torch and
    CUDA libraries are not counted. A garbage-collected lock is released.
    """

    def __init__(self, doing: Callable[[], Doing], memory: Mapping[str, Callable[[], int]], *, strict: bool) -> None:
        self._doing, self._measures, self._strict = doing, dict(memory), strict
        self._before: dict[str, int] = {}
        self._hooks: weakref.finalize | None = None  # type: ignore[type-arg]  # generic only for type checkers
        self.kernels: Counter[str] = Counter()
        self.grown: Counter[str] = Counter()

    def engage(self) -> None:
        """Measure the memory and install the hooks. Call it only once."""
        assert self._hooks is None, "a lock is engaged once"
        self._before = {name: measure() for name, measure in self._measures.items()}
        lock = weakref.ref(self)

        def loaded(name: str) -> None:
            if (found := lock()) is not None:
                found._note(name)

        def loaded_by_triton(module: object, function: object, name: str, group: object, digest: str) -> None:
            loaded(name)

        # The kernel is complete at the end of a load, so it can be launched even if an error is raised here.
        triton.knobs.runtime.kernel_load_end_hook.add(loaded_by_triton)
        nvrtc.load_hooks.append(loaded)

        def unhook() -> None:
            triton.knobs.runtime.kernel_load_end_hook.remove(loaded_by_triton)
            nvrtc.load_hooks.remove(loaded)

        self._hooks = weakref.finalize(self, unhook)

    def _note(self, name: str) -> None:
        doing = self._doing()
        if doing is Doing.SOMETHING_ELSE:
            return
        self.kernels[f"{name} ({doing.value})"] += 1
        if self._strict and doing is Doing.GRAPH_STEP:
            raise ReplayError(
                f"{name}: this kernel was compiled or loaded in a step that replays a graph, after capture(); launch "
                "it once before capture(), or run such steps eagerly"
            )

    def poll(self) -> None:
        """Measure the memory, and set `grown` to the growth since `engage()`."""
        if not self._before:
            return
        growth = {name: self._measures[name]() - before for name, before in self._before.items()}
        self.grown.clear()
        self.grown.update({name: num for name, num in growth.items() if num > 0})

    def check(self) -> None:
        """Call `poll`, and raise ReplayError if the lock is strict and memory grew."""
        self.poll()
        for name, num in self.grown.most_common(1 if self._strict else 0):
            raise ReplayError(
                f"{name}: expected {self._before[name]} bytes as after capture(), got {self._before[name] + num}; "
                f"steps must not allocate there; look for an abandoned capture, or for another capture into the same "
                f"pool"
            )

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Return a context in which memory may grow, for a capture after `engage()`."""
        start = {name: measure() for name, measure in self._measures.items()}
        try:
            yield
        finally:
            for name, before in start.items():
                self._before[name] += self._measures[name]() - before

    def release(self) -> None:
        """Remove the hooks and keep the counters. Does nothing if the lock is not engaged."""
        self._before, self._measures = {}, {}
        self._doing = lambda: Doing.SOMETHING_ELSE
        if self._hooks is not None:
            self._hooks()
