"""Mixed steps in two parts. One backend serves decode requests, and another backend serves prefill requests.

    tokens of a mixed step      d d d d p p p p p p p p . .        d decode, p prefill, . padding
    decode part                 d d d d - - - - - - - -            a decode batch; writes zeros to padding (-)
    prefill part                        p p p p p p p p . .        overwrites these, and does not write decode tokens

The refresh puts decode requests first, for any order of the batch. If a request changes from prefill to decode, the
device moves it, and the host does nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import NO_PREFILL, BackendContext, Capabilities, GraphSupport
from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor, GraphKind
from graphrt.metadata import StepMetadata


class TwoPartBackend(AttentionBackend):
    """A decode backend, and another backend for the prefill part of mixed steps. The decode backend serves decode
    steps."""

    name: ClassVar[str] = "two_parts"
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    capabilities: ClassVar[Capabilities]

    def __init__(
        self, context: BackendContext, decode: type[AttentionBackend], prefill: type[AttentionBackend]
    ) -> None:
        super().__init__(context)
        self.decode = decode(decode_context(context))
        self.prefill = prefill(prefill_context(context))
        have, have_prefill = decode.capabilities, prefill.capabilities
        both = replace(have, mixed=True, lse=have.lse and have_prefill.lse)
        self.capabilities = both  # type: ignore[misc]  # differs per instance, which combines two classes
        self.name = f"{decode.name}+{prefill.name}"  # type: ignore[misc]
        self.seq_len_fill = decode.seq_len_fill  # type: ignore[misc]
        self.decode_len = 1

    def extra_graph_unsupported_reason(self, descriptor: BatchDescriptor) -> str | None:
        if descriptor.kind is GraphKind.DECODE:
            return self.decode.graph_unsupported_reason(descriptor)
        rows = min(descriptor.padded_reqs, descriptor.padded_tokens // self.decode_len)
        reason = self.decode.graph_unsupported_reason(BatchDescriptor.decode(rows, self.decode_len)) if rows else None
        return reason or self.prefill.graph_unsupported_reason(descriptor)

    def compiles_ahead(self, descriptor: BatchDescriptor) -> bool:
        decodes = self.decode.compiles_ahead(descriptor)
        return decodes and (descriptor.kind is GraphKind.DECODE or self.prefill.compiles_ahead(descriptor))

    def allocate(self) -> None:
        self.decode.allocate()
        self.prefill.allocate()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return both parts' tensors. Names of the prefill part start with "prefill_"; its counters are left out."""
        rewritten = {name: tensor for name, tensor in self.prefill.tensors().items() if name != "counters"}
        return self.decode.tensors() | {f"prefill_{name}": tensor for name, tensor in rewritten.items()}

    def held(self) -> dict[str, torch.Tensor]:
        """Return the tensors of both parts, named as in `tensors`."""
        return self.decode.held() | {f"prefill_{name}": tensor for name, tensor in self.prefill.held().items()}

    def plan_capture(self, descriptor: BatchDescriptor) -> None:
        """Plan decode steps. The parts of mixed steps have no plan on the host."""
        if descriptor.kind is GraphKind.DECODE:
            self.decode.plan_capture(descriptor)

    def plan_replay(self, descriptor: BatchDescriptor, batch: Batch) -> None:
        if descriptor.kind is GraphKind.DECODE:
            self.decode.plan_replay(descriptor, batch)

    def plans_on_host(self) -> bool:
        return self.decode.plans_on_host()

    def schedule(self, metadata: StepMetadata) -> None:
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
        """Run the decode part, then the prefill part, which overwrites the decode part's zeros."""
        if metadata.parts is None:
            self.decode.run(layer, q, metadata, out, sinks=sinks, lse=lse)
            return
        decodes, prompts = metadata.parts
        if decodes is not None:
            tokens = decodes.descriptor.padded_tokens
            decode_lse = None if lse is None else lse[:tokens]
            self.decode.run(layer, q[:tokens], decodes, out[:tokens], sinks=sinks, lse=decode_lse)
        self.prefill.run(layer, q, prompts, out, sinks=sinks, lse=lse)

    def reset(self) -> None:
        self.decode.reset()
        self.prefill.reset()

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def decode_context(context: BackendContext) -> BackendContext:
    """Return the context of the decode part, in which all requests have the same number of new tokens."""
    return replace(context, mixed_batches=False)


def prefill_context(context: BackendContext) -> BackendContext:
    """Return the context of the prefill part, which has the other requests of mixed steps."""
    return replace(context, prefill=True)


def two_part_unsupported_reasons(
    context: BackendContext, decode: type[AttentionBackend], prefill: type[AttentionBackend] | None
) -> list[str]:
    """Return every reason why two backends cannot serve the mixed steps of a context together; empty if they can."""
    if prefill is None:
        return [NO_PREFILL]
    reasons = list(prefill.unsupported_reasons(prefill_context(context)))
    if not all(spec.is_cached for spec in context.attention):
        reasons.append("encoder layers: steps with encoder layers contain whole sequences only")
    for part, cls in (("decode", decode), ("prefill", prefill)):
        if (cls.plan_capture, cls.plan_replay) != (AttentionBackend.plan_capture, AttentionBackend.plan_replay):
            reasons.append(f"{part} part {cls.name}: plans each step on the host, but the device reorders the requests")
    if decode.seq_len_fill != prefill.seq_len_fill:
        reasons.append(
            f"decode part {decode.name}: needs length {decode.seq_len_fill} in padding requests, {prefill.name} needs "
            f"{prefill.seq_len_fill}"
        )
    return reasons
