"""Checks after capture: tensors that graphs read, kernels loaded after capture, memory growth."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from graphrt import env
from graphrt.capture.adapters import AdapterWatch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.guard import NameWatch, PointerGuard
from graphrt.capture.inspect.audit import Allowed, Audit, audit
from graphrt.capture.inspect.blas import with_blas_workspaces
from graphrt.capture.inspect.memory import MemoryMap
from graphrt.capture.inspect.pool import memory_of
from graphrt.capture.lock import CaptureLock, Doing
from graphrt.engine.graphs import StepGraphs
from graphrt.engine.lifecycle import Exclusive
from graphrt.engine.program import StepProgram
from graphrt.engine.stats import Stats
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.step import Model

NamedTensor = tuple[str, torch.Tensor]


class Guards:
    """The pointer guard and the capture lock of one manager.

    The first step checks all tensors that graphs read, by name: address, shape, strides and dtype. If `check_weights`
    is set, each later step compares the addresses of a few weights and cache tensors. It also looks up a few weights of
    the model by name. If a name now refers to a different tensor, the step runs the full check. Tensors that were
    added to the model, such as a bias, are errors too. If the model has layers with adapters of PEFT, each step also
    compares the state of one of them.

    With GRAPHRT_DEBUG=1, every step checks all tensors, names and adapters, and raises for kernels loaded after capture
    and for memory growth.

    weights   named tensors passed by the caller; None: the weights of the model, looked up again at each full check
    """

    def __init__(
        self,
        program: StepProgram,
        graphs: StepGraphs,
        exclusive: Exclusive,
        stats: Stats,
        *,
        weights: Sequence[NamedTensor] | None,
        page_tables: torch.Tensor | None,
        check_weights: bool,
    ) -> None:
        self._program, self._graphs, self._exclusive = program, graphs, exclusive
        self._weights, self._check_weights, self._debug = weights, check_weights, env.debug()
        self._tables = page_tables
        self._lock = CaptureLock(self._doing, {"graph pool": graphs.pool_bytes}, strict=self._debug)
        stats.late_kernels, stats.late_bytes = self._lock.kernels, self._lock.grown
        self._pointers, self._names, self._adapters = PointerGuard(()), NameWatch(None), AdapterWatch(None)

    @property
    def num_turns(self) -> int:
        """Number of steps after which incremental checks have covered all weights and cache tensors."""
        return self._pointers.num_turns

    def before_capture(self) -> None:
        """Record weights and caches, so that a tensor that moves during the capture is detected."""
        self._pointers = PointerGuard(self._in_turns(), in_turns=self._check_weights, always=self._debug)

    def after_capture(self) -> None:
        """Record all other tensors, which a backend may create during the capture, and engage the lock."""
        self._pointers.remember(self._everything)
        self._remember_names()
        self._adapters = AdapterWatch(self._program.model)
        self._lock.engage()

    @contextlib.contextmanager
    def late_capture(self) -> Iterator[None]:
        """Return a context for a capture between steps. Raises: ReplayError: if a tensor has moved."""
        self._pointers.check()
        with self._lock.growing():
            yield
        self._pointers.remember(self._everything)

    def before_step(self) -> None:
        """Run the checks that are due.

        Raises: ReplayError: if a tensor moved, an adapter changed, or kernels or memory were added.
        """
        self._pointers.check_next()
        if self._names.any and self._names.changed():
            self._pointers.check()  # passes if the new object has the same memory
            self._pointers.check_new(self._weights_of(self._program.model))
            self._remember_names()
        if self._adapters.any and self._check_weights:
            self._adapters.check_next()
        if self._debug:
            self._adapters.check()
            self._lock.check()

    def check_names(self, model: torch.nn.Module) -> None:
        """Check the weights of `model`, the cache and adapters.

        Raises: ReplayError: if a tensor moved, changed or was added, or the state of an adapter differs.
        """
        self._pointers.check_names((*self._weights_of(model), *self._tables_and_cache()))
        if self._weights is None:
            self._pointers.check_new(self._weights_of(model))
        self._adapters.check()

    def poll(self) -> None:
        """Update the memory growth in `stats`."""
        self._lock.poll()

    def audit(self, descriptor: BatchDescriptor) -> Audit:
        """Audit the graph of a size, which may access pinned memory only in the input ring and the output rings."""
        allowed = []
        for name, tensor in self._program.buffers.named(BufferKind.INPUT, BufferKind.OUTPUT):
            if tensor.is_pinned():
                written = "an input slot is written after its previous launch has finished"
                reason = written if name == "input_ring" else "results of each step"
                allowed.append(Allowed(reason, region=name))
        return audit(self._graphs.graph(descriptor), self.memory(descriptor), allowed=allowed)

    def memory(self, descriptor: BatchDescriptor) -> MemoryMap:
        """Return the owners of all memory that the graph of a size may access; see `capture/inspect/pool.py`."""
        program = self._program
        slopes = {f"alibi slopes of layer {layer.index}": layer.alibi_slopes for layer in program.layers}
        static = [
            *(() if self._tables is None else [("page_tables", self._tables)]),
            *program.buffers.named(),
            *((f"request tensor {name}", tensor) for name, tensor in program.request_tensors.items()),
            *((f"backend's {name}", tensor) for name, tensor in self._of_backend()),
            *((name, tensor) for name, tensor in slopes.items() if tensor is not None),
            *self._of_path_mover(),
        ]
        memory = memory_of(
            static=static,
            weights=self._named_weights(),
            cache=program.kv_cache.named_tensors(),
            pool=self._graphs.graph(descriptor),
        )
        # Warm-ups ran on the capture stream, so cuBLAS allocated its workspace for that stream.
        return with_blas_workspaces(memory, self._graphs.streams) if self._graphs.streams else memory

    def close(self) -> None:
        """Drop the tensors and release the lock. Its counters remain readable."""
        self._lock.release()
        for name in ("_pointers", "_names", "_adapters", "_program", "_graphs", "_weights", "_tables"):
            vars(self).pop(name, None)

    def _remember_names(self) -> None:
        watched = self._check_weights and self._weights is None
        self._names = NameWatch(self._program.model if watched else None)

    def _doing(self) -> Doing:
        if self._exclusive.thread != threading.get_ident():
            return Doing.SOMETHING_ELSE
        if not self._exclusive.is_entered():
            return Doing.BETWEEN
        return Doing.OTHER_CALL if self._graphs.is_off_graph else Doing.GRAPH_STEP

    def _in_turns(self) -> Iterator[NamedTensor]:
        yield from self._named_weights()
        yield from self._tables_and_cache()

    def _named_weights(self) -> Iterable[NamedTensor]:
        return self._weights_of(self._program.model) if self._weights is None else self._weights

    def _weights_of(self, model: Model) -> Iterator[NamedTensor]:
        """Yield the weights that graphs read. A DTensor has no memory of its own, so its local tensor replaces it."""
        yield from ((name, getattr(tensor, "_local_tensor", tensor)) for name, tensor in self._program.weights(model))

    def _tables_and_cache(self) -> Iterator[NamedTensor]:
        if self._tables is not None:
            yield "page_tables", self._tables
        yield from self._program.kv_cache.named_tensors()

    def _everything(self) -> Iterator[NamedTensor]:
        yield from self._in_turns()
        program = self._program
        for name, tensor in program.buffers.named():
            yield f"static buffer {name}", tensor
        for name, tensor in program.request_tensors.items():
            yield f"request tensor {name}", tensor
        for name, tensor in self._of_backend():
            yield f"backend {program.backend.name}: {name}", tensor
        yield from self._of_path_mover()

    def _of_path_mover(self) -> Iterator[NamedTensor]:
        if (mover := self._program.path_mover) is not None:
            yield "addresses of the KV cache", mover.table

    def _of_backend(self) -> Iterator[NamedTensor]:
        backend = self._program.backend
        yield from (backend.held() | backend.tensors()).items()
