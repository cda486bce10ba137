"""A lock that falls when capture is over: names kernels that are loaded later, and memory that grows later.

A kernel that is compiled in the middle of serving stops the host for a third of a second, and one that Triton finds in
its cache on disk for some milliseconds. Neither has any business in a step that replays a graph. The lock hangs in the
hooks that Triton and the native kernels call when a kernel is loaded; a step that loads none pays nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum

import triton

from graphrt.kernels.errors import ReplayError
from graphrt.kernels.native import nvrtc


class Doing(str, Enum):
    """What the owner of a lock was doing when a kernel was loaded.

    GRAPH_STEP    launching a graph: no kernel is ever due there. The one place where the lock may raise
    OTHER_CALL    another call of the owner, or an eager step: these launch kernels by themselves, and may load some
    BETWEEN       nothing, but the thread is the one that its last call came from, and waits for the kernel
    SOMETHING_ELSE    the thread is another one: a kernel of somebody else's, which does not count
    """

    GRAPH_STEP = "in a graph step"
    OTHER_CALL = "beside the graphs"
    BETWEEN = "between calls"
    SOMETHING_ELSE = "elsewhere"


class CaptureLock:
    """Counts late kernels and late memory from `fall()` to `lift()`.

        lock = CaptureLock(doing, {"graph pool": recorder.pool_bytes}, strict=False)
        lock.fall()                       when the last graph was captured
        lock.kernels                      Counter({"_attend_kernel (beside the graphs)": 1})
        lock.poll(), lock.grown           Counter({"graph pool": 2097152})

    doing    called when a kernel is loaded, on the thread that loads it
    memory   name -> bytes held now, for each piece of memory that must not grow any more
    strict   a kernel in a graph step, and memory that grew, raise ReplayError

    kernels  loads by the kernel's name and `Doing`. Triton names a variant of a kernel as the kernel itself
    grown    bytes by name, as of the last `poll`

    What is loaded is not always compiled: Triton may have found it on disk. Kernels of torch and of CUDA's libraries go
    unseen. A lock that is no longer referred to is lifted.
    """

    def __init__(self, doing: Callable[[], Doing], memory: Mapping[str, Callable[[], int]], *, strict: bool) -> None:
        self._doing, self._measures, self._strict = doing, dict(memory), strict
        self._before: dict[str, int] = {}
        self._hooks: weakref.finalize | None = None  # type: ignore[type-arg]  # generic for type checkers alone
        self.kernels: Counter[str] = Counter()
        self.grown: Counter[str] = Counter()

    def fall(self) -> None:
        """Take the present for what there is, and hang in the hooks. A lock falls once."""
        assert self._hooks is None, "a lock falls once"
        self._before = {name: measure() for name, measure in self._measures.items()}
        lock = weakref.ref(self)

        def loaded(name: str) -> None:
            if (found := lock()) is not None:
                found._note(name)

        def loaded_by_triton(module: object, function: object, name: str, group: object, digest: str) -> None:
            loaded(name)

        # At the end of a load, the kernel is whole: an error that is raised there leaves one that can be launched.
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
                f"{name}: expected no kernel to be compiled or loaded after capture() in a step that replays a graph, "
                "got this one; launch it once before capture(), or have such steps run eagerly"
            )

    def poll(self) -> None:
        """Measure the memory: `grown` says by how much it has grown since `fall()`, without what is as it was."""
        if not self._before:
            return
        growth = {name: self._measures[name]() - before for name, before in self._before.items()}
        self.grown.clear()
        self.grown.update({name: num for name, num in growth.items() if num > 0})

    def check(self) -> None:
        """`poll`, and raise ReplayError where the lock is strict and something has grown."""
        self.poll()
        for name, num in self.grown.most_common(1 if self._strict else 0):
            raise ReplayError(
                f"{name}: expected {self._before[name]} bytes as after capture(), got {num} more; no step may allocate "
                "there: look for a capture that was abandoned, or for another one into the same pool"
            )

    def lift(self) -> None:
        """Leave the hooks; counters stay. Lifting a lock that did not fall, or twice, is fine."""
        self._before, self._measures = {}, {}
        self._doing = lambda: Doing.SOMETHING_ELSE
        if self._hooks is not None:
            self._hooks()
