"""Counters of a runtime, and the report of its graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport


@dataclass(slots=True)
class Stats:
    """What a runtime did since it was built.

    recorder         how graphs are made: "cuda-graph", or the op-tape twin on CPU
    backend          attention backend, and why it was chosen
    replays          steps that replayed a graph, by descriptor
    eager_steps      steps that ran without a graph, by reason; those of `replay(eager=True)` are not counted
    ring_waits       times that a step had to wait for the ring
    real_tokens      tokens asked for, against padded_tokens that were computed
    graphs           one report per captured graph
    capture_seconds  the whole `capture()` call
    """

    recorder: str
    backend: str
    backend_reason: str
    replays: Counter[BatchDescriptor] = field(default_factory=Counter)
    eager_steps: Counter[str] = field(default_factory=Counter)
    ring_waits: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    graphs: tuple[GraphReport, ...] = ()
    capture_seconds: float = 0.0

    def count(
        self, descriptor: BatchDescriptor, num_tokens: int, why_eager: str, *, forced: bool, steps: int = 1
    ) -> None:
        """Count steps of `num_tokens` tokens each."""
        if not why_eager:
            self.replays[descriptor] += steps
        elif not forced:
            self.eager_steps[why_eager] += steps
        self.real_tokens += steps * num_tokens
        self.padded_tokens += steps * descriptor.padded_tokens

    @property
    def pad_waste(self) -> float:
        """Share of computed tokens that were padding."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def graph_bytes(self) -> int:
        """Device memory of all graphs, their pool included."""
        return sum(g.nbytes for g in self.graphs)
