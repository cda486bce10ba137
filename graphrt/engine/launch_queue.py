"""Queues launches on the steps' stream. Each launch uses one input slot, and its steps are numbered.

A shadow, which also runs a step eagerly, and a recording for a replay bundle can observe each launch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.device_wait import wait_for
from graphrt.capture.graph import NOTHING, ordinary
from graphrt.capture.staging import StagingRing, StagingSlot
from graphrt.config import RuntimeConfig
from graphrt.engine.batch_delta import ChangeFlag
from graphrt.engine.graphs import StepGraphs
from graphrt.engine.handle import InFlight, Rings
from graphrt.engine.lifecycle import OnStream
from graphrt.engine.program import StepProgram
from graphrt.engine.rank_calls import RankCalls
from graphrt.engine.recording import Recording
from graphrt.engine.shadow import Shadow
from graphrt.engine.stats import Stats
from graphrt.engine.undo import StepUndo
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ReplayError, UnsupportedError
from graphrt.kernels.metadata.buffers import CURSOR_ENTRY, CURSOR_STEP
from graphrt.kernels.metadata.step_inputs import HEADER_COPIES, HEADER_SIZE, write_header


class LaunchQueue:
    """Queues launches of a program, one at a time.

    rings      the rings that the device writes results to
    next_step  number of the next step; numbers are never reused
    launches   number of launches that were queued
    resets     number of resets, each of which ends the requests of sessions
    """

    def __init__(
        self, program: StepProgram, graphs: StepGraphs, stats: Stats, config: RuntimeConfig, on_stream: OnStream,
        calls: RankCalls | None = None,
    ) -> None:  # fmt: skip
        self._calls = calls
        if calls is not None:
            calls.add_part("queue", self)
        self._program, self._graphs, self._config, self._on_stream = program, graphs, config, on_stream
        buffers = program.buffers
        self._ring = StagingRing(buffers.input_ring, program.kv_cache.device, HEADER_SIZE, HEADER_COPIES)
        self.rings = Rings(buffers, several_ranks=calls is not None)
        self._shadow = Shadow(program, graphs, stats) if config.shadow_every else None
        self._recording: Recording | None = None
        self._logits = NOTHING
        self.next_step = self._follows = self.launches = 0
        self.resets = 0

    @property
    def waits(self) -> int:
        return self._ring.waits

    def slot(self, steps: int = 1) -> tuple[StagingSlot, int]:
        """Return an input slot that no launch in flight uses, and the number of the next launch's first step."""
        # After a failed launch or a capture, step numbers are skipped, so two launches in flight could share an entry
        # of the output rings. If that launch was interrupted, the event of its input slot may not have been recorded,
        # and its steps may have moved the cursor.
        if self.next_step != self._follows:
            self.synchronize()
            with self._on_stream:
                self._rewind()
        slot, first = self._ring.acquire(self.launches), self.next_step
        self.next_step += steps
        return slot, first

    def capture(self, descriptor: BatchDescriptor) -> None:
        """Capture the graph of a size, after the launches in flight. An error changes no state that later steps read.

        Warm-up runs read inputs without requests, which the next launch replaces. Their step number is skipped, so that
        no handle polls for it and finds it before its own step has run.
        """
        if self._calls is not None and not self._calls.follows:
            self._calls.call(self.capture, descriptor)
        slot, step = self.slot()
        write_header(slot.inputs, step, 0, 0, 0)
        with OnStream(self._on_stream.stream, "graphrt.capture"), slot.in_flight(self._on_stream.stream):
            self._graphs.capture_late(descriptor, self._rewind)

    def _rewind(self) -> None:
        """Let the next step on the current stream read the input slot of the next launch."""
        cursor = self._program.buffers.cursor
        cursor[CURSOR_ENTRY].fill_(self.launches)
        cursor[CURSOR_STEP].fill_(0)

    def can_loop(self, descriptor: BatchDescriptor, why_eager: str) -> bool:
        """Return True if one graph launch can run several steps."""
        return not why_eager and self._graphs.can_loop(descriptor) and not self._is_shadowed(why_eager)

    def launch(
        self,
        slot: StagingSlot,
        descriptor: BatchDescriptor,
        num_reqs: int,
        batch: Batch | None,
        why_eager: str,
        steps: int = 1,
        loops: bool = False,
        flag: ChangeFlag | None = None,
    ) -> None:
        """Queue the steps whose inputs are in `slot`. If that fails, the next launch uses the same input slot."""
        on_stream = self._on_stream
        if self._calls is not None:
            self._calls.launch(slot.inputs, descriptor, why_eager, self.next_step - steps, loops)
        on_stream.enter()
        try:
            slot.begin()
            if flag is not None:
                flag.changing = True
            try:
                if self._recording is None and self._shadow is None:
                    self._logits = self._graphs.run(descriptor, batch, bool(why_eager), steps, loops)
                else:
                    self._launch_watched(slot, descriptor, num_reqs, batch, why_eager, steps, loops)
            finally:
                slot.end(on_stream.stream)
            self._follows = self.next_step
            self.launches += 1
            if self._calls is not None:
                self._calls.ranks.arrive()
        except BaseException as error:
            if self._calls is not None:
                self._calls.ranks.fail(error)
            if flag is not None and steps == 1 and isinstance(error, Exception) and not self._has_run(slot):
                flag.changing = False
            raise
        finally:
            on_stream.leave()

    def follow(
        self,
        descriptor: BatchDescriptor,
        num_reqs: int,
        steps: int,
        loops: bool,
        why_eager: str,
        first: int,
        words: npt.NDArray[np.int32],
    ) -> None:
        """Queue a launch of rank 0."""
        self.next_step = first
        slot, _ = self.slot(steps)
        slot.inputs[: len(words)] = words
        self.launch(slot, descriptor, num_reqs, None, why_eager, steps, loops)

    def _has_run(self, slot: StagingSlot) -> bool:
        """Return True if the step of a launch that raised has written its results. Waits for the device."""
        step = self.next_step - 1
        try:
            slot.wait()
            return bool(self.rings.steps[step % self.rings.depth] == step)
        except Exception:  # the device is lost
            return True

    def _launch_watched(
        self,
        slot: StagingSlot,
        descriptor: BatchDescriptor,
        num_reqs: int,
        batch: Batch | None,
        why_eager: str,
        steps: int,
        loops: bool,
    ) -> None:
        """Queue steps that a recording or a shadow observes."""
        first, left = self.next_step - steps, steps
        if (recording := self._recording) is not None:
            with self._graphs.off_graph():
                recording.before(slot.inputs, descriptor)
        if self._shadow is not None and self._is_shadowed(why_eager):
            self._logits = self._shadow.run(first, descriptor, batch, num_reqs)
            left -= 1
        if left:
            self._logits = self._graphs.run(descriptor, batch, bool(why_eager), left, loops)
        if recording is not None:
            recording.after(first, self.logits(descriptor, num_reqs))
            self._recording = None if recording.done else recording

    def try_out(
        self, slot: StagingSlot, descriptor: BatchDescriptor, batch: Batch, undo: StepUndo, *, eager: bool
    ) -> torch.Tensor:
        """Queue a step, undo its effects, including the use of its input slot, and return a copy of its logits."""
        in_flight, off_graph = slot.in_flight(self._on_stream.stream), self._graphs.off_graph()
        with self._on_stream, torch.inference_mode(), in_flight, off_graph, undo.undone(descriptor):
            self._logits = self._graphs.run(descriptor, batch, eager=eager)
            logits = self.logits(descriptor, batch.num_reqs).clone()
        self._logits = NOTHING
        return logits

    def logits(self, descriptor: BatchDescriptor, num_reqs: int) -> torch.Tensor:
        """Return logits of the last step; see `StepProgram.logits_of`."""
        return self._program.logits_of(self._logits, descriptor, num_reqs)

    def latest_logits(self, handle: InFlight, copy: bool) -> torch.Tensor:
        """Return the logits of a launch's last step; see `StepHandle.logits`."""
        step, descriptor, num_reqs = handle.step + handle.steps - 1, handle.descriptor, handle.num_reqs
        if step != (latest := self.next_step - 1):
            raise ReplayError(
                f"logits: step {latest} has overwritten the logits of step {step}; "
                "call logits(copy=True) before the next step"
            )
        if self._program.splits_logits and self._logits.shape[-1] != self._program.vocab_size:
            raise UnsupportedError("logits: each rank has logits of its own tokens; gather them, with max_logprobs=0")
        moved, stream = bool(self._program.decode_len(descriptor)), self._on_stream.stream
        with self._on_stream:  # between this step and the next, which overwrites them
            logits = ordinary(self.logits(descriptor, num_reqs))
            if copy and not moved:
                logits = logits.clone()
        if stream is not None:
            reader = torch.cuda.current_stream(stream.device)
            reader.wait_stream(stream)
            if copy or moved:
                logits.record_stream(reader)
        return logits

    def record(self, launches: int, max_bytes: int) -> Recording:
        """Record the next launches. Raises: see `ReplayManager.record`."""
        launches = check_int("launches", launches, 1, advice="pass the number of launches")
        max_bytes = check_int("max_bytes", max_bytes, 1, advice="pass the maximum bytes of host memory")
        if (under_way := self._recording) is not None and not under_way.done:
            raise ReplayError(
                f"record: a recording is in progress and has {len(under_way.launches)} of {under_way.count} launches; "
                "run the others, or stop() that recording"
            )
        self._recording = Recording(self._config, self._program, self.rings, launches, max_bytes)
        return self._recording

    def poll_shadow(self) -> None:
        """Read the result of the last shadowed step."""
        if self._shadow is not None:
            self._shadow.poll()

    def drain(self) -> None:
        """Wait for every launch in flight, and collect all results."""
        self._ring.drain()

    def synchronize(self) -> None:
        """Wait for all work of steps and captures, including interrupted ones, and collect all results."""
        self._ring.drain()
        if self._on_stream.stream is not None:
            for stream in (self._on_stream.stream, *self._graphs.streams):
                wait_for(stream)

    def restart(self) -> None:
        """Start with the first input slot again, as the device does after a reset. Every launch must have finished."""
        self.next_step += 1  # skip a number, because the logits of the last step are no longer valid
        self.launches = 0
        self.resets += 1

    def close(self) -> None:
        """Drop input slots, copies and logits. Every launch must have finished. May be called twice."""
        self.poll_shadow()
        self._ring.close()
        if self._calls is not None:
            self._calls.close()
        self._shadow = self._recording = self._calls = None
        self._logits = NOTHING
        self.resets += 1
        for name in ("rings", "_program"):
            vars(self).pop(name, None)

    def _is_shadowed(self, why_eager: str) -> bool:
        """Return True if the first step of the next launch also runs eagerly."""
        every = self._config.shadow_every
        return every > 0 and not why_eager and (self.launches + 1) % every == 0
