"""Counters of a runtime, and the report of its graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that a graph and the eager step left with different bits.

    index           of the first element that differs, and both values there
    count           elements that differ, of `numel`
    """

    name: str
    index: tuple[int, ...]
    graph: float
    eager: float
    count: int
    numel: int

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return (
            f"{self.name}[{at}] is {self.graph:g} by the graph, {self.eager:g} eagerly ({self.count} of {self.numel})"
        )


@dataclass(frozen=True, slots=True)
class ShadowDifference:
    """A shadowed step whose graph left something else than the eager step did, from the same state.

    tensors   in the order in which a step writes them: the first one is nearest to the cause
    """

    step: int
    descriptor: BatchDescriptor
    tensors: tuple[TensorDifference, ...]

    def __str__(self) -> str:
        first, *others = self.tensors
        more = f"; then {', '.join(tensor.name for tensor in others)}" if others else ""
        return f"step {self.step}, {self.descriptor}: the graph differs from the eager step: {first}{more}"


@dataclass(slots=True)
class Stats:
    """What a runtime did since it was built.

    recorder         how graphs are made: "cuda-graph", or the op trace twin on CPU
    backend          attention backend, and why it was chosen
    replays          steps that replayed a graph, by descriptor
    eager_steps      steps that ran without a graph, by reason; those of `replay(eager=True)` are not counted
    ring_waits       times that a step had to wait for the ring
    real_tokens      tokens asked for, against padded_tokens that were computed
    graphs           one report per captured graph
    capture_seconds  the whole `capture()` call
    shadow_steps     steps that ran both ways, see RuntimeConfig.shadow_every
    shadow_differences  the first 16 of them that differed
    late_kernels     kernels that were compiled or loaded after `capture()`, on the thread that submits steps, by name
                     and by what it was doing: "in a graph step" is always wrong, "outside the graphs" (eager steps,
                     shadow steps, writes of row tables) and "between calls" cost time, which a warm-up would spare
    late_bytes       bytes by which the graphs' memory pool has grown since
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
    shadow_steps: int = 0
    shadow_differences: tuple[ShadowDifference, ...] = ()
    late_kernels: Counter[str] = field(default_factory=Counter)
    late_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, descriptor: BatchDescriptor, num_tokens: int, why_eager: str, forced: bool, steps: int = 1) -> None:
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
