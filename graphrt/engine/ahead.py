"""Compile the kernels of a step at all sizes before the step first runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import GraphSupport
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.draft_model import DraftModel
from graphrt.engine.program import StepProgram
from graphrt.kernels.compile_ahead import compiling_ahead
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.sampling import sample_tokens
from graphrt.step import Model, Step


def compile_ahead(program: StepProgram, descriptors: Iterable[BatchDescriptor]) -> None:
    """Compile and load the kernels of a step at these sizes in parallel.

    Runs the step with launches that compile kernels but write nothing. The model is not called, because it could store
    values that it computes from unwritten results. Instead, the attention of all layers runs, and the model's
    `ahead_model()` if it has this method. The same applies to a draft model. Custom samplers and proposers, and
    backends without `compiles_ahead`, are not called. Their kernels are compiled when the step first runs.
    """
    own = replace(
        program,
        model=_AheadModel(program.model, program.vocab_size),
        sampler=program.sampler if program.sampler in (None, sample_tokens) else _any_tokens,
        proposer=_proposer(program),
    )
    others = replace(own, backend=_NoAttention(program.backend))
    with compiling_ahead(program.kv_cache.device):
        for descriptor in descriptors:
            (own if program.backend.compiles_ahead(descriptor) else others).run(descriptor)


def _proposer(program: StepProgram) -> Proposer | None:
    if program.draft_model is not None:
        return _ahead_drafts(program.draft_model)
    return program.proposer if program.proposer in (None, ngram_drafts) else _any_drafts


def _ahead_drafts(draft: DraftModel) -> DraftModel:
    """Return a draft model that keeps no hidden states, and runs the draft model's `ahead_model()`."""
    result = copy.copy(draft)
    result.model, result.hidden_size = _AheadModel(draft.model, draft.vocab_size, draft.hidden_size), None
    return result


def _any_tokens(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """Replace a custom sampler. Most samplers return int64 indices from torch."""
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)


def _any_drafts(step: Step) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Replace a custom proposer."""
    b, reqs = step.buffers, step.descriptor.padded_reqs
    drafts = torch.empty_like(b.drafts[:reqs])
    return (drafts, torch.empty_like(b.draft_logprobs[:reqs])) if b.draft_logprobs.shape[2] else drafts


class _NoAttention(AttentionBackend):
    """Replaces a backend whose kernels cannot be compiled ahead."""

    name, graph_support = "none", GraphSupport.ALWAYS

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend.context)
        self.capabilities, self.decode_len = backend.capabilities, backend.decode_len  # type: ignore[misc]
        self.seq_len_fill = backend.seq_len_fill  # type: ignore[misc]

    def run(self, *arguments: object, **options: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _AheadModel:
    """Runs attention of each kind of layer, on uninitialized tensors, and the model's `ahead_model()`."""

    model: Model
    vocab_size: int
    hidden_size: int | None = None  # set for a draft model

    def __call__(self, step: Step) -> torch.Tensor:
        layers = {(layer.spec, layer.group): layer for layer in step.layers}
        for layer in layers.values():
            _attend(layer, step)
        dtype, device = (step.layers[0].spec.dtype if step.layers else torch.float32), step.positions.device
        ahead_model = getattr(self.model, "ahead_model", None)
        if ahead_model is not None:
            if self.hidden_size is not None:
                previous = torch.empty(len(step.positions), self.hidden_size, dtype=dtype, device=device)
                step = replace(step, previous_hidden=previous)
            logits: torch.Tensor = ahead_model()(step)
            return logits
        return torch.empty(len(step.logits_indices), self.vocab_size, dtype=dtype, device=device)


def _attend(layer: AttentionLayer, step: Step) -> None:
    spec, tokens, device = layer.spec, step.descriptor.padded_tokens, step.positions.device

    def empty(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(tokens, heads, dim, dtype=spec.dtype, device=device)

    q, out = empty(spec.num_q_heads, spec.head_dim), empty(spec.num_q_heads, spec.value_dim)
    sinks = torch.empty(spec.num_q_heads, dtype=torch.float32, device=device) if spec.sinks else None
    if step.context is not None:
        step.context.attend(step.backend, layer, q, step.metadata, out, sinks=sinks, lse=None)
    elif spec.is_cached:
        step.backend.run(layer, q, step.metadata, out, sinks=sinks)
    elif not isinstance(step.backend, _NoAttention):
        k, v = empty(spec.num_kv_heads, spec.head_dim), empty(spec.num_kv_heads, spec.value_dim)
        step.backend.run_encoder(layer, q, k, v, step.metadata, out, sinks=sinks)
