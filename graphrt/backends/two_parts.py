"""Mixed steps in two parts: rows that decode by one backend, prompts by another.

    tokens of a mixed step      d d d d p p p p p p p p . .        d decodes, p prompts, . padding
    decode part                 d d d d - - - - - - - -            a decode batch; prompt tokens get zeros
    prompt part                         p p p p p p p p . .        writes over these, and leaves decodes alone

The refresh puts decode rows first, whatever the order of the batch. So a row that had a prompt chunk in one step and
decodes in the next changes its place on the device, and nothing on the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer, BackendContext, Capabilities, GraphSupport
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.metadata import StepMetadata


class TwoPartBackend(AttentionBackend):
    """A decode backend, and a backend for the prompt part of mixed steps. Decode steps are the first one's alone."""

    name: ClassVar[str] = "two_parts"
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    capabilities: ClassVar[Capabilities]

    def __init__(
        self, context: BackendContext, decode: type[AttentionBackend], prefill: type[AttentionBackend]
    ) -> None:
        super().__init__(context)
        self.decode = decode(decode_context(context))
        self.prefill = prefill(prefill_context(context))
        have, of_prompts = decode.capabilities, prefill.capabilities
        both = replace(have, mixed=True, lse=have.lse and of_prompts.lse)
        self.capabilities = both  # type: ignore[misc]  # an instance is of two classes
        self.name = f"{decode.name}+{prefill.name}"  # type: ignore[misc]
        self.seq_len_fill = decode.seq_len_fill  # type: ignore[misc]
        self.decode_len = context.max_query_len

    def extra_graph_unsupported_reason(self, descriptor: BatchDescriptor) -> str | None:
        """A reason of either part."""
        if descriptor.kind is GraphKind.DECODE:
            return self.decode.graph_unsupported_reason(descriptor)
        rows = min(descriptor.padded_reqs, descriptor.padded_tokens // self.decode_len)
        of_decodes = (
            self.decode.graph_unsupported_reason(BatchDescriptor.decode(rows, self.decode_len)) if rows else None
        )
        return of_decodes or self.prefill.graph_unsupported_reason(descriptor)

    def allocate(self) -> None:
        """Allocate the buffers of both."""
        self.decode.allocate()
        self.prefill.allocate()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of both. Those of the prompt part have its name before theirs; its counters are left alone."""
        rewritten = {name: tensor for name, tensor in self.prefill.tensors().items() if name != "counters"}
        of_prompts = {f"prefill_{name}": tensor for name, tensor in rewritten.items()}
        return self.decode.tensors() | of_prompts

    def held(self) -> dict[str, torch.Tensor]:
        """The tensors of both, named as in `tensors`."""
        return self.decode.held() | {f"prefill_{name}": tensor for name, tensor in self.prefill.held().items()}

    def plan_capture(self, descriptor: BatchDescriptor) -> None:
        """Decode steps may be planned on the host; the parts of mixed steps are not."""
        if descriptor.kind is GraphKind.DECODE:
            self.decode.plan_capture(descriptor)

    def plan_replay(self, descriptor: BatchDescriptor, batch: Batch) -> None:
        """As `plan_capture`."""
        if descriptor.kind is GraphKind.DECODE:
            self.decode.plan_replay(descriptor, batch)

    def plans_on_host(self) -> bool:
        """Whether the decode part does; the other one never does."""
        return self.decode.plans_on_host()

    def schedule(self, metadata: StepMetadata) -> None:
        """The schedules of the parts, at the head of the step."""
        if metadata.parts is None:
            self.decode.schedule(metadata)
            return
        decodes, prompts = metadata.parts
        if decodes is not None:
            self.decode.schedule(decodes)
        self.prefill.schedule(prompts)

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        metadata: StepMetadata,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """The decode part, then the prompt part, which writes over what the first leaves in prompt tokens."""
        if metadata.parts is None:
            self.decode.run(layer, q, metadata, out, sinks=sinks, lse=lse)
            return
        decodes, prompts = metadata.parts
        if decodes is not None:
            tokens = decodes.descriptor.padded_tokens
            of_decodes = None if lse is None else lse[:tokens]
            self.decode.run(layer, q[:tokens], decodes, out[:tokens], sinks=sinks, lse=of_decodes)
        self.prefill.run(layer, q, prompts, out, sinks=sinks, lse=lse)

    def reset(self) -> None:
        """Reset both."""
        self.decode.reset()
        self.prefill.reset()

    def close(self) -> None:
        """Close both."""
        self.decode.close()
        self.prefill.close()


def decode_context(context: BackendContext) -> BackendContext:
    """What the decode part is asked for: steps whose rows all have as many new tokens."""
    return replace(context, mixed_batches=False)


def prefill_context(context: BackendContext) -> BackendContext:
    """What the prompt part is asked for: the other rows of mixed steps."""
    return replace(context, prefill=True)


def two_part_unsupported_reasons(
    context: BackendContext, decode: type[AttentionBackend], prefill: type[AttentionBackend] | None
) -> list[str]:
    """Every reason why the two cannot serve the mixed steps of a context together; empty when they can."""
    if prefill is None:
        return ["prompt part of mixed steps: not supported"]
    reasons = list(prefill.unsupported_reasons(prefill_context(context)))
    if not all(spec.is_cached for spec in context.attention):
        reasons.append("encoder layers: a step of theirs has whole sequences alone")
    for part, cls in (("decode", decode), ("prompt", prefill)):
        if (cls.plan_capture, cls.plan_replay) != (AttentionBackend.plan_capture, AttentionBackend.plan_replay):
            reasons.append(f"{part} part {cls.name}: plans each step on the host, which has the rows in another order")
    if decode.seq_len_fill != prefill.seq_len_fill:
        reasons.append(
            f"decode part {decode.name}: pad rows have length {decode.seq_len_fill}, those of {prefill.name} "
            f"{prefill.seq_len_fill}"
        )
    return reasons
