"""Three ways to submit the same model step, timed by `scripts/bench_host.py`: a session, batches with full block
tables, and one copy per field to static buffers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from graphrt.batch import Batch
from graphrt.bench.timer import synchronize
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import CudaGraph, make_recorder
from graphrt.engine.handle import Launch, StepHandle
from graphrt.kernels.types import RequestStatus
from graphrt.runtime import Runtime
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession

PAGE, COLLECT_EVERY = 16, 8


class SessionWay:
    """Launches of `steps` steps, at most two in flight."""

    def __init__(self, runtime: Runtime, batch: int, context: int, steps: int = 1) -> None:
        self.steps, self._launches, self._session = steps, deque[Launch](), DecodeSession(runtime)
        self.collects: list[float] = []
        self._since = 0
        prompt = np.ones(context, np.int32)
        for _ in range(batch):
            row = self._session.add(prompt, SamplingParams(max_new_tokens=runtime.config.max_seq_len - context))
            # As if all but the last prompt token were computed: the cache content does not affect times.
            self._session.table.prefills[row.req_index] = self._session.table.most[row.req_index] = context - 1
        self._session.run(1)
        self._session.collect(wait=True)

    def prepare(self) -> None:
        pass

    def submit(self) -> None:
        self._launches += self._session.run(self.steps)
        self._since += self.steps

    def read(self) -> None:
        if len(self._launches) > 1:
            self._launches.popleft().wait()
        self._collect()

    def wait(self) -> None:
        while self._launches:
            self._launches.popleft().wait()
        self._collect()

    def _collect(self) -> None:
        if self._since >= COLLECT_EVERY:
            start = time.perf_counter()
            self._session.collect()
            self.collects.append((time.perf_counter() - start) / self._since * 1e6)
            self._since = 0

    def close(self) -> None:
        self._session.close()


class StatelessWay:
    """Batches with full block tables."""

    steps = 1

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self._runtime, self._length = runtime, context - 1
        self._table = _table(runtime, batch)
        self._rows = np.arange(batch, dtype=np.int32)
        self._handles: deque[StepHandle] = deque()
        self._tokens: np.ndarray | None = np.ones(batch, np.int32)

    def prepare(self) -> None:
        n, listed = len(self._rows), self._length // PAGE + 1
        self._length += 1
        self._batch = Batch(
            req_indices=self._rows,
            seq_lens=np.full(n, self._length, np.int32),
            tokens=self._tokens,
            page_indptr=np.arange(0, n * listed + 1, listed, dtype=np.int32),
            page_ids=self._table[:, :listed].reshape(-1),
        )
        self._tokens = None

    def submit(self) -> None:
        self._handles.append(self._runtime.replay(self._batch))

    def read(self) -> None:
        if len(self._handles) > 1:
            self._handles.popleft().tokens()

    def wait(self) -> None:
        while self._handles:
            self._handles.popleft().tokens()

    def close(self) -> None:
        self._runtime.allocator.free(self._table.reshape(-1))


class CopiesWay:
    """One copy per field to the static buffers of a captured model step. The host waits for its tokens."""

    steps = 1

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self._runtime, self._length, self._tokens = runtime, context - 1, np.ones(batch, np.int64)
        self._table = _table(runtime, batch)
        program, key = runtime.manager._program, BatchDescriptor.decode(batch)
        runtime.manager.reset()
        with torch.inference_mode():
            buffers = program.refresh(key).buffers  # constant fields are written once
            buffers.query_start_loc.copy_(torch.arange(batch + 1, device=runtime.device))
            for buffer in (buffers.req_indices, buffers.logits_indices):
                buffer.copy_(torch.arange(batch, device=runtime.device))
            buffers.req_status.fill_(int(RequestStatus.SAMPLES))
            self._statics = {
                "input_ids": buffers.input_ids,
                "positions": buffers.positions,
                "slot_mapping": buffers.slot_mapping[0],
                "seq_lens": buffers.seq_lens,
                "block_table": buffers.block_table[0],
                "temperatures": buffers.temperatures,
            }
            self._out = torch.zeros(batch, dtype=torch.int64, device=runtime.device)

            def run() -> torch.Tensor:
                step = program.view(key)  # a new Step for each call of the model
                program.backend.schedule(step.metadata)
                with program.model_layers.bound_to(step):
                    logits = program.model(step)
                assert program.sampler is not None, "a runtime with a sampler"
                self._out.copy_(program.sampler(logits, step))
                return logits

            self._recorder = make_recorder(runtime.device)
            with self._recorder.session():
                self._recorder.warm_up(run, lambda: program.backend.plan_capture(key))
                self._graph = self._recorder.capture(run, key, lambda: program.backend.plan_capture(key))
        self._pinned = {name: _pinned_like(static) for name, static in self._statics.items()}
        self._host = {name: pinned.numpy() for name, pinned in self._pinned.items()}
        self._host_out = _pinned_like(self._out)
        raw = self._graph._graph if isinstance(self._graph, CudaGraph) else None
        self.replay: Callable[[], None] = self._graph.launch if raw is None else raw.replay

    def prepare(self) -> None:
        pass

    def submit(self) -> None:
        self._length += 1
        host, length = self._host, self._length
        host["input_ids"][:] = self._tokens
        host["positions"][:] = length - 1
        host["slot_mapping"][:] = self._table[:, (length - 1) // PAGE].astype(np.int64) * PAGE + (length - 1) % PAGE
        host["seq_lens"][:] = length
        pages = -(-length // PAGE)
        host["block_table"][:, :pages] = self._table[:, :pages]
        host["temperatures"][:] = 0
        for name, static in self._statics.items():
            static.copy_(self._pinned[name], non_blocking=True)
        self.replay()

    def read(self) -> None:
        self._host_out.copy_(self._out, non_blocking=True)
        synchronize(self._runtime.device)
        self._tokens = self._host_out.numpy() % self._runtime.vocab_size

    wait = read

    def launch_us(self) -> float | None:
        """Return microseconds of one launch on an idle device, or None on a CPU."""
        if self._runtime.stream is None:
            return None
        self._graph.launch()  # the first launch goes through torch
        times = []
        for _ in range(20):
            synchronize(self._runtime.device)
            start = time.perf_counter()
            self._graph.launch()
            times.append((time.perf_counter() - start) * 1e6)
        synchronize(self._runtime.device)
        return float(np.median(times))

    def close(self) -> None:
        self._graph.close()
        self._recorder.close()
        self._runtime.manager.reset()
        self._runtime.allocator.free(self._table.reshape(-1))


Way = SessionWay | StatelessWay | CopiesWay
"""Ways to submit steps of the same requests. A loop calls `prepare`, `submit` and `read`, and finally `wait`."""


def _table(runtime: Runtime, batch: int) -> np.ndarray:
    """Return pages for the longest sequences in the order of a long-running allocator: [batch, pages] int32."""
    per_row = -(-runtime.config.max_seq_len // PAGE)
    pages = np.random.default_rng(0).permutation(runtime.allocator.allocate(batch * per_row))
    return pages.astype(np.int32).reshape(batch, per_row)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.device.type == "cuda"
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
