"""Counters of a runtime, and reports of its graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graphrt import env
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.graph import GraphReport
from graphrt.engine.traffic import FORCED, Served, advise, write_trace
from graphrt.kernels.ops.linear_plans import describe_plans, use_plans


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor whose bits differ between a graph and its eager step.

    name            name of the tensor
    index           index of the first element that differs
    graph, eager    both values of that element
    count, numel    number of elements that differ, and of all elements
    """

    name: str
    index: tuple[int, ...]
    graph: float
    eager: float
    count: int
    numel: int

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        values = f"{self.graph:g} in the graph, {self.eager:g} in the eager step"
        return f"{self.name}[{at}] is {values} ({self.count} of {self.numel})"


@dataclass(frozen=True, slots=True)
class ShadowDifference:
    """A shadow step in which the graph and the eager step wrote different values, from the same state.

    step, descriptor   number and size of the step
    tensors            tensors that differ, in the order in which a step writes them, so that the first tensor is
    closest to the cause
    """

    step: int
    descriptor: BatchDescriptor
    tensors: tuple[TensorDifference, ...]

    def __str__(self) -> str:
        first, *others = self.tensors
        more = f"; then {', '.join(tensor.name for tensor in others)}" if others else ""
        return f"step {self.step}, {self.descriptor}: the graph differs from the eager step: {first}{more}"


def choose_plans(device: torch.device, dtype: torch.dtype) -> str:
    """Use the plans of GRAPHRT_LINEAR_PLANS for later products. Return how they run with activations of this dtype."""
    use_plans(env.linear_plans())
    return describe_plans(device, dtype)


@dataclass(slots=True)
class Stats:
    """Counters of a runtime since its construction. Other threads may read them while steps run.

    recorder         name of the recorder that captures the steps: "cuda-graph" or "op trace (CPU)"
    backend          attention backend
    backend_reason   why this backend was selected
    products         how matrix products with few tokens (`linear` and similar) run on this device, and with which plans
    steps            all steps, by captured size, tokens of the batch, and the reason if no graph ran
    ring_waits       how often a step waited for an entry of the input ring
    graphs           one report per captured graph
    capture_seconds  duration of `capture()`, and of captures at first use
    compiled_kernels kernels, by name, that captures of this process compiled because Triton's cache did not have them
    shadow_steps     steps that ran as a graph and eagerly; see RuntimeConfig.shadow_every
    shadow_differences  the first 16 shadow steps that differed
    tokens_per_step  number of collected steps in graphs that verify drafts, one per request, by the number of tokens
                     that they yielded: 1 if no draft was accepted
    num_draft_tokens drafts that these steps verified
    late_kernels     kernels that were compiled or loaded after `capture()` on the thread that submits steps, by name
                     and activity. "in a graph step" is always an error. "outside the graphs" (eager, shadow steps,
                     captures, writes of request tables) and "between calls" cost time that a warm-up would save
    late_bytes       bytes by which the memory pool of the graphs has grown, except in captures
    """

    recorder: str
    backend: str
    backend_reason: str
    products: str
    steps: Counter[Served] = field(default_factory=Counter)
    ring_waits: int = 0
    graphs: tuple[GraphReport, ...] = ()
    capture_seconds: float = 0.0
    compiled_kernels: Counter[str] = field(default_factory=Counter)
    shadow_steps: int = 0
    shadow_differences: tuple[ShadowDifference, ...] = ()
    tokens_per_step: Counter[int] = field(default_factory=Counter)
    num_draft_tokens: int = 0
    late_kernels: Counter[str] = field(default_factory=Counter)
    late_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, descriptor: BatchDescriptor, num_tokens: int, why_eager: str, steps: int = 1) -> None:
        """Count steps of `num_tokens` tokens each."""
        self.steps[descriptor, num_tokens, why_eager] += steps

    @property
    def replays(self) -> Counter[BatchDescriptor]:
        """Number of steps that replayed a graph, by descriptor."""
        found: Counter[BatchDescriptor] = Counter()
        for (descriptor, _, why_eager), steps in list(self.steps.items()):
            if not why_eager:
                found[descriptor] += steps
        return found

    @property
    def eager_steps(self) -> Counter[str]:
        """Number of steps that ran without a graph, by reason. Steps of `replay(eager=True)` are not counted."""
        found: Counter[str] = Counter()
        for (_, _, why_eager), steps in list(self.steps.items()):
            if why_eager not in ("", FORCED):
                found[why_eager] += steps
        return found

    @property
    def real_tokens(self) -> int:
        """Number of tokens of all batches, without padding."""
        return sum(steps * tokens for (_, tokens, _), steps in list(self.steps.items()))

    @property
    def padded_tokens(self) -> int:
        """Number of tokens of all steps, including padding."""
        return sum(steps * descriptor.padded_tokens for (descriptor, _, _), steps in list(self.steps.items()))

    @property
    def pad_waste(self) -> float:
        """Fraction of computed tokens that were padding."""
        padded = self.padded_tokens
        return 1 - self.real_tokens / padded if padded else 0.0

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted drafts of the steps in `tokens_per_step`."""
        return sum((tokens - 1) * steps for tokens, steps in list(self.tokens_per_step.items()))

    @property
    def graph_bytes(self) -> int:
        """Device memory of all graphs in bytes, including their pool."""
        return sum(g.nbytes for g in self.graphs)

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice about batches that were often padded or ran eagerly: one sentence per kind, with the size to
        capture."""
        return advise(dict(self.steps), [graph.descriptor for graph in self.graphs])

    def write_trace(self, path: str | Path) -> None:
        """Write the sizes of all batches as a text file, which `graphrt plan --trace` reads."""
        write_trace(path, dict(self.steps))
