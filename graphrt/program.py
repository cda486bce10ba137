"""The decode step that is captured: refresh, schedule, model, sampling, on the static buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.checks import check_tensor
from graphrt.kernels.metadata.buffers import StaticBuffers
from graphrt.kernels.metadata.publish import publish
from graphrt.kernels.metadata.refresh import refresh
from graphrt.kv_cache import KVCache
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec
from graphrt.step import Model, Sampler, Step

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Everything that one decode step reads and writes. `run` is what graphs are made of, and what eager steps call."""

    model: Model
    sampler: Sampler | None
    backend: AttentionBackend
    layers: tuple[AttentionLayer, ...]
    kv_cache: KVCache
    buffers: StaticBuffers
    vocab_size: int
    max_seq_len: int

    def run(self, descriptor: BatchDescriptor) -> torch.Tensor:
        """Run the step at one size and return its logits [padded_reqs, vocab].

        Capture-safe: whatever varies between steps is read from the static buffers on the device.
        Raises: ShapeError when the model or the sampler returns the wrong shape.
        """
        step = self.refresh(descriptor)
        self.backend.schedule(step.metadata)
        logits = self.model(step)
        rows, device = descriptor.padded_reqs, self.kv_cache.device
        check_tensor("logits", logits, shape=(rows, self.vocab_size), dtype=_FLOATS, device=device)
        tokens = None
        if self.sampler is not None:
            tokens = self.sampler(logits, step)
            check_tensor("tokens", tokens, shape=(rows,), dtype=(torch.int32, torch.int64), device=device)
        publish(step.buffers, tokens, vocab_size=self.vocab_size)
        return logits

    def refresh(self, descriptor: BatchDescriptor) -> Step:
        """Turn the step record into the derived buffers of one size, and return these. Capture-safe, as `run`."""
        step = self.view(descriptor)
        refresh(
            step.buffers,
            page_size=self.kv_cache.spec.page_size,
            num_pages=self.kv_cache.num_pages,
            null_page=self.kv_cache.null_page,
            max_seq_len=self.max_seq_len,
            vocab_size=self.vocab_size,
            query_len=descriptor.query_len,
            seq_len_fill=self.backend.seq_len_fill,
        )
        return step

    def view(self, descriptor: BatchDescriptor) -> Step:
        """The static buffers as a step of this size sees them."""
        buffers = self.buffers.cut(descriptor.padded_reqs, descriptor.padded_tokens)
        return Step(
            descriptor=descriptor,
            metadata=StepMetadata.of(buffers, descriptor, self.max_seq_len),
            buffers=buffers,
            backend=self.backend,
            layers=self.layers,
        )


def attention_layers(specs: Sequence[AttentionSpec], kv_cache: KVCache) -> tuple[AttentionLayer, ...]:
    """Every layer over its part of the cache. Layers of equal ALiBi slopes share one tensor of them."""
    slopes = {
        values: torch.tensor(values, dtype=torch.float32, device=kv_cache.device)
        for values in {spec.alibi_slopes for spec in specs} - {None}
    }
    scaled = bool(kv_cache.k_scales)
    return tuple(
        AttentionLayer(
            index,
            spec,
            kv_cache.k[index],
            kv_cache.v[index],
            k_scale=kv_cache.k_scales[index] if scaled else None,
            v_scale=kv_cache.v_scales[index] if scaled else None,
            alibi_slopes=None if spec.alibi_slopes is None else slopes[spec.alibi_slopes],
        )
        for index, spec in enumerate(specs)
    )
