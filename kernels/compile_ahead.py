"""Compile and load the kernels of a step concurrently, before the step runs.

    with compiling_ahead(device):
        step()        # launches no kernel of graphrt: each launch compiles and loads its kernel in a thread
    step()            # finds all kernels loaded

A kernel takes up to seconds to compile, and a step at all sizes needs dozens. Triton holds Python's lock for about a
quarter of this time; NVRTC and the assembler do not hold it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from threading import Thread
from typing import Any

import torch
import triton
from triton.runtime.cache import triton_key

from graphrt.kernels.garbage import no_collections

_MOST_THREADS = 8  # more threads would wait for Python's lock

_active: ContextVar[CompileThreads | None] = ContextVar("compile_threads", default=None)

compiled: list[str] = []
"""Names of the kernels that this process compiled in `counting_compilations`, because Triton's cache lacked them."""


class CompileThreads:
    """The threads of a `compiling_ahead` block. Triton uses it as an executor."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._loads: dict[object, Future[Any]] = {}

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """Compile a Triton kernel, and load it."""

        def load() -> Any:
            kernel = compile_kernel()
            _ = kernel.run  # builds the launcher and loads the kernel
            return kernel

        return self._threads.submit(load)

    def load_once(self, key: object, load: Callable[[], Any]) -> None:
        """Call `load`, which compiles and loads a kernel, unless it was called with this key."""
        if key not in self._loads:
            self._loads[key] = self._threads.submit(load)

    def wait(self) -> None:
        """Wait until all calls of `load_once` have finished. Their errors are ignored."""
        wait(self._loads.values())


def compile_threads() -> CompileThreads | None:
    """Return the threads of the current `compiling_ahead` block; None outside such a block."""
    return _active.get()


@contextlib.contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Make launches of this thread in the block only compile and load their kernels, in other threads.

    The block waits for all kernels at its end. It affects launches of `KernelLauncher` and of `native.nvrtc`, which
    write no outputs in the block. Compiler errors are ignored, because the first launch after the block raises them. Do
    not use it during a capture.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    threads = ThreadPoolExecutor(
        min(_MOST_THREADS, os.cpu_count() or 1), "graphrt-compile", torch.cuda.set_device, (index,)
    )
    ahead = CompileThreads(threads)
    hash_triton().join()
    token = _active.set(ahead)
    try:
        # Garbage collection may switch threads inside ast.parse, which then fails if another thread parses (Python
        # 3.11: "AST constructor recursion depth mismatch").
        with no_collections():
            with triton.AsyncCompileMode(ahead, ignore_errors=True):
                yield
            ahead.wait()
    finally:
        _active.reset(token)
        threads.shutdown(cancel_futures=True)


@functools.cache
def hash_triton() -> Thread:
    """Start a thread that hashes Triton's files, and return it; later calls return the same thread.

    Every key of Triton's cache contains this hash. Hashing the 0.5 GB of files takes 0.3 to 1 s. Hashing does not hold
    Python's lock, so start it early.
    """
    thread = Thread(target=triton_key, name="graphrt-hash-triton", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def counting_compilations() -> Iterator[None]:
    """Append the names of kernels compiled in the block to `compiled`. An installed Triton listener is still called."""
    outer = triton.knobs.compilation.listener

    def listener(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)
        if outer is not None:
            outer(src=src, cache_hit=cache_hit, **more)

    triton.knobs.compilation.listener = listener
    try:
        yield
    finally:
        triton.knobs.compilation.listener = outer
