"""Launches in their order: each gets a slot of the input_ring and numbers for its steps, and is queued on the steps'
stream.

Here a launch is also watched: by its shadow, which runs a step eagerly too, and by a recording, for a replay bundle.
"""

from __future__ import annotations

import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import NOTHING
from graphrt.capture.staging import StagingRing, StagingSlot
from graphrt.config import RuntimeConfig
from graphrt.engine.graphs import StepGraphs
from graphrt.engine.handle import Rings
from graphrt.engine.lifecycle import OnStream
from graphrt.engine.program import StepProgram
from graphrt.engine.recording import Recording
from graphrt.engine.shadow import Shadow
from graphrt.engine.stats import Stats
from graphrt.engine.undo import StepUndo
from graphrt.kernels.errors import ReplayError
from graphrt.kernels.metadata.buffers import CURSOR_ENTRY, CURSOR_STEP
from graphrt.kernels.metadata.step_inputs import HEADER_COPIES, HEADER_SIZE


class LaunchQueue:
    """Queues launches of a program, one at a time.

    rings      where the device writes their results
    next_step  number of the next step; none is used twice
    launches   how many were queued
    resets     how often rows of sessions were lost: after each `reset()`, and where steps of a launch that raised may
               have run
    """

    def __init__(
        self, program: StepProgram, graphs: StepGraphs, stats: Stats, config: RuntimeConfig, on_stream: OnStream
    ) -> None:
        self._program, self._graphs, self._config, self._on_stream = program, graphs, config, on_stream
        buffers = program.buffers
        self._ring = StagingRing(buffers.input_ring, program.kv_cache.device, HEADER_SIZE, HEADER_COPIES)
        self.rings = Rings(buffers)
        self._shadow = Shadow(program, graphs, stats) if config.shadow_every else None
        self._recording: Recording | None = None
        self._logits = NOTHING
        self.next_step = self._follows = self.launches = 0
        self.resets = 0

    @property
    def waits(self) -> int:
        """How often a launch had to wait for a slot."""
        return self._ring.waits

    def slot(self, steps: int = 1) -> tuple[StagingSlot, int]:
        """A slot that no launch in flight uses, for the next launch, and the number of its first step."""
        if self.next_step != self._follows:  # a launch failed: with its numbers left out two might share an entry
            self._ring.drain()
        slot, first = self._ring.acquire(self.launches), self.next_step
        self.next_step += steps
        return slot, first

    def can_loop(self, descriptor: BatchDescriptor, why_eager: str) -> bool:
        """Whether the steps of the next launch, if there are several, run in one launch of a graph."""
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
        *,
        of_session: bool = True,
    ) -> None:
        """Queue the steps that a slot is for; `of_session`: of rows that a session knows. If that fails, the device
        takes the slot again."""
        on_stream = self._on_stream
        on_stream.enter()
        try:
            slot.begin()
            try:
                if self._recording is None and self._shadow is None:
                    self._logits = self._graphs.run(descriptor, batch, bool(why_eager), steps, loops)
                else:
                    self._launch_watched(slot, descriptor, num_reqs, batch, why_eager, steps, loops)
            finally:
                slot.end(on_stream.stream)
            self._follows = self.next_step
            self.launches += 1
        except BaseException as error:
            self._program.buffers.cursor[CURSOR_ENTRY] = self.launches
            self._program.buffers.cursor[CURSOR_STEP] = 0
            unknown = steps > 1 or not isinstance(error, Exception) or self._has_run(slot)
            self.resets += of_session and unknown
            raise
        finally:
            on_stream.leave()

    def _has_run(self, slot: StagingSlot) -> bool:
        """Whether the step of a launch that raised gave its results all the same. Waits for the device."""
        step = self.next_step - 1
        try:
            slot.wait()
            return bool(self.rings.steps[step % self.rings.depth] == step)
        except Exception:  # a device that is lost
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
        """Queue steps where a recording or a shadow looks on."""
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
        """Queue a step and take back what it does, the use of its slot too: a copy of its logits."""
        in_flight, off_graph = slot.in_flight(self._on_stream.stream), self._graphs.off_graph()
        with self._on_stream, torch.inference_mode(), in_flight, off_graph, undo.undone(descriptor):
            self._logits = self._graphs.run(descriptor, batch, eager=eager)
            logits = self.logits(descriptor, batch.num_reqs).clone()
        self._logits = NOTHING
        return logits

    def logits(self, descriptor: BatchDescriptor, num_reqs: int) -> torch.Tensor:
        """Logits of the last step's rows in the batch's order: a copy where the step had them in another."""
        if not self._program.decode_len(descriptor):
            return self._logits[:num_reqs]
        return self._logits.index_select(0, self._program.buffers.buffer_rows[:num_reqs])

    def record(self, launches: int, max_bytes: int) -> Recording:
        """Record the next launches. Raises: ReplayError where a recording is under way."""
        if (under_way := self._recording) is not None and not under_way.done:
            raise ReplayError(
                f"record: expected no recording under way, got one with {len(under_way.launches)} of {under_way.count} "
                "launches; run the others, or stop() that recording"
            )
        self._recording = Recording(self._config, self._program, self.rings, launches, max_bytes)
        return self._recording

    def poll_shadow(self) -> None:
        """Take in what the last shadowed step found."""
        if self._shadow is not None:
            self._shadow.poll()

    def drain(self) -> None:
        """Wait for every launch in flight, and hand all results over."""
        self._ring.drain()

    def restart(self) -> None:
        """Begin with the first slot again, as the device does after a reset. Every launch must have ended."""
        self.next_step += 1  # of no step: the buffers that say where its rows stood are gone with it
        self.launches = 0
        self.resets += 1

    def close(self) -> None:
        """Drop slots, copies and logits; every launch must have ended."""
        self.poll_shadow()
        self._ring.close()
        self._shadow = self._recording = None
        self._logits = NOTHING
        self.resets += 1
        del self.rings, self._program

    def _is_shadowed(self, why_eager: str) -> bool:
        """Whether the next launch is one of those whose first step runs both ways."""
        every = self._config.shadow_every
        return every > 0 and not why_eager and (self.launches + 1) % every == 0
